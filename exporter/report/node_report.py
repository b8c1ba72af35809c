"""One node's ledger as a report: owners by cost, what nobody held apart, and the sum against capacity."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from exporter.errors import ExporterError
from exporter.model import UNALLOCATED, UNATTRIBUTED, Account, Money, Owner, Price, ShareMode, Totals
from exporter.report.render.words import encodable

APART = (UNATTRIBUTED, UNALLOCATED)
"""Owners of what no known owner held, in the order in which they are told."""
_TOLERATED_RATIO = 1e-9
_TOLERATED_SECONDS = 1e-6
_MOST = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedModel:
    """What GPUs of a model cost now, and how many of them there are."""

    model: str
    price: Price
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What a node's GPUs were used for since its ledger began. Seconds are share-weighted GPU-seconds."""

    node: str
    simulated: bool
    from_seconds: float
    to_seconds: float
    """Unix time until which the totals count: of their save, or of the snapshot."""
    saved: bool
    state_problem: str
    capacity_seconds: float
    withheld_seconds: float
    """Of pods whose owner is not known yet."""
    conservation_error_seconds: float
    price_book: str
    unpriced_gpus: int
    prices: tuple[PricedModel, ...]
    owners: tuple[tuple[Account, Totals], ...]
    """Who held GPUs, dearest first, then longest."""
    apart: tuple[tuple[Account, Totals], ...]
    """What no known owner held: Unattributed, Unallocated."""

    @property
    def total(self) -> Totals:
        """The sum over all lines."""
        return add(totals for _, totals in (*self.owners, *self.apart))

    @property
    def currencies(self) -> tuple[str, ...]:
        """Every currency in which something was priced."""
        return tuple(sorted(self.total.money))

    @property
    def coverage_ratio(self) -> float | None:
        """Part of the GPU-seconds whose activity is known; ``None`` where there are none."""
        total = self.total
        return 1 - total.unknown_seconds / total.allocated_seconds if total.allocated_seconds else None

    @property
    def missing_seconds(self) -> float:
        """What the lines and what is withheld lack of the capacity; 0 within rounding, or something is wrong."""
        missing = self.capacity_seconds - self.withheld_seconds - self.total.allocated_seconds
        return missing if abs(missing) > _TOLERATED_SECONDS + self.capacity_seconds * _TOLERATED_RATIO else 0.0


def add(many: Iterable[Totals]) -> Totals:
    """The sum of totals, currency by currency."""
    return sum(many, start=Totals())


def read(document: Mapping[str, Any], where: str) -> NodeReport:
    """The report of an agent's answer to ``/api/v1/ledger``.

    Raises:
        ExporterError: The agent has metered nothing yet, or its answer is not a ledger's; ``where`` says whose it is.
    """
    try:
        if not document["metered"]:
            raise ExporterError(
                f"{where}: the agent has not metered anything yet; look at {where}/readyz for what it waits for"
            )
        return _report(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise ExporterError(
            f"{where}: the answer is not an agent's ledger: {type(error).__name__} {error}; is this agent of another"
            " release?"
        ) from error


def _report(document: Mapping[str, Any]) -> NodeReport:
    lines = [(_account(entry), _totals(entry)) for entry in document["accounts"]]
    held = [line for line in lines if line[0].owner not in APART]
    apart = [line for line in lines if line[0].owner in APART]
    saved_at = document["saved_at_seconds"]
    return NodeReport(
        node=_text(document["node"]),
        simulated=bool(document["simulated"]),
        from_seconds=_instant(document["started_at_seconds"]),
        to_seconds=_instant(document["taken_at_seconds"] if saved_at is None else saved_at),
        saved=saved_at is not None,
        state_problem=_text(document["state_problem"]),
        capacity_seconds=_number(document["capacity_seconds"]),
        withheld_seconds=_number(document["withheld_seconds"]),
        conservation_error_seconds=_number(document["conservation_error_seconds"]),
        price_book=_text(document["price_book"]),
        unpriced_gpus=int(document["unpriced_gpus"]),
        prices=_prices(document["prices"]),
        owners=tuple(sorted(held, key=_rank)),
        apart=tuple(sorted(apart, key=lambda line: (APART.index(line[0].owner), _rank(line)))),
    )


def _rank(line: tuple[Account, Totals]) -> tuple[float, float, str, str, str]:
    account, totals = line
    # Currencies cannot be compared; a book has one, and then this is the order of money.
    cost = sum(money.total for money in totals.money.values())
    return (-cost, -totals.allocated_seconds, owner_name(account.owner), account.model, account.mode)


def owner_name(owner: Owner) -> str:
    """``vision/Job/resnet``, as far as it is known; ours by their kind alone."""
    if owner in APART:
        return owner.kind
    return "/".join(part for part in (owner.namespace, owner.kind, owner.name) if part)


def _account(entry: Mapping[str, Any]) -> Account:
    owner = Owner(
        namespace=_text(entry["owner_namespace"]),
        kind=_text(entry["owner_kind"]),
        name=_text(entry["owner_name"]),
        team=_text(entry["team"]),
        cost_labels=_text(entry["cost_labels"]),
    )
    return Account(owner=owner, model=_text(entry["model"]), mode=ShareMode(entry["mode"]))


def _totals(entry: Mapping[str, Any]) -> Totals:
    joules = entry["energy_joules"]
    return Totals(
        active_seconds=_number(entry["active_seconds"]),
        idle_seconds=_number(entry["idle_seconds"]),
        unknown_seconds=_number(entry["unknown_seconds"]),
        energy_joules=0.0 if joules is None else _number(joules),
        energy_unknown_seconds=_number(entry["energy_unknown_seconds"]),
        unpriced_seconds=_number(entry["unpriced_seconds"]),
        money={
            _text(money["currency"]): _money(*(_number(money[name]) for name in ("cost", "idle_cost", "unknown_cost")))
            for money in entry["money"]
        },
    )


def _money(total: float, idle: float, unknown: float) -> Money:
    return Money(active=total - idle - unknown, idle=idle, unknown=unknown)


def _prices(entries: Iterable[Mapping[str, Any]]) -> tuple[PricedModel, ...]:
    counted: dict[tuple[str, Price], int] = {}
    for entry in entries:
        price = Price(
            per_hour=_number(entry["per_hour"]),
            per_kwh=_number(entry["per_kwh"]),
            currency=_text(entry["currency"]),
            source=_text(entry["source"]),
            as_of=_text(entry["as_of"]),
            fallback=bool(entry["fallback"]),
        )
        key = (_text(entry["model"]), price)
        counted[key] = counted.get(key, 0) + 1
    return tuple(PricedModel(model=model, price=price, gpus=gpus) for (model, price), gpus in counted.items())


def _number(value: Any) -> float:  # noqa: ANN401 - comes from JSON, is checked here
    """A number that can be shown and added: JSON's reader takes NaN and 1e999, too."""
    number = float(value)
    if not abs(number) < _MOST:
        raise ValueError(f"{value!r} is no number")
    return number


def _instant(value: float) -> float:
    """A Unix time that a calendar has."""
    return datetime.fromtimestamp(float(value), tz=UTC).timestamp()


def _text(value: str | None) -> str:
    """A text, empty where there is none; whoever writes it to a terminal cleans it, so that no two become one here."""
    return encodable(value) if value else ""
