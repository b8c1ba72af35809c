"""Reports one node's ledger, read from its agent, as a table, CSV or JSON: owners by cost against capacity."""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TextIO, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from exporter.cost.agent_client import number
from exporter.cost.foot import HOUR, Remark, clean, terms, unpriced, write_foot
from exporter.cost.ledger import LABEL, LineKey, pairs
from exporter.cost.render import EFFECTIVE_TITLES, HOUR_TITLES, console_for, effective_of, hours_of, money_of
from exporter.cost.report_csv import CSV_HOURS, CSV_MONEY, CSV_RATIOS, csv_figures, csv_stream, encodable, guarded
from exporter.errors import ExporterError
from exporter.metrics.ledger_collector import energy_joules
from exporter.model import UNALLOCATED, UNATTRIBUTED, ByState, Owner, Price, ShareMode, Totals
from exporter.model.formatting import decimal, hour_digits, iso, moment
from exporter.web.node_api import account_keys, owned_keys, price_keys

APART = (UNATTRIBUTED, UNALLOCATED)
"""Owners of what no known owner held, in the order in which they are shown."""
_TOLERATED_RATIO = 1e-9
_TOLERATED_SECONDS = 1e-6


By: TypeAlias = str
"""One of ``BY``, or ``label:KEY``."""
BY: tuple[By, ...] = ("owner", "namespace", "team", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line; what it sums over, and what is not known, is empty. Seconds are share-weighted GPU-seconds."""

    owner: Owner
    model: str = ""
    mode: str = ""
    totals: Totals

    @property
    def states(self) -> Totals | None:
        """What the columns of active, idle and unknown time show; ``None``: without an owner there is no idle time."""
        return None if self.owner in APART else self.totals


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
    """Of pods without a known owner yet."""
    conservation_error_seconds: float
    price_book: str
    unpriced_gpus: int
    prices: Mapping[tuple[str, Price], int]
    """How many GPUs have a price now, by model and price."""
    by: By = "owner"
    lines: tuple[Line, ...]
    """Who held GPUs, dearest first, then longest; then what no known owner held: Unattributed, Unallocated."""

    @property
    def total(self) -> Totals:
        """The sum over all lines."""
        return add(line.totals for line in self.lines)

    @property
    def owned(self) -> Totals:
        """The sum over owners: every total of active, idle and unknown time is of owners."""
        return add(line.totals for line in self.lines if line.states)

    @property
    def currencies(self) -> tuple[str, ...]:
        """Every currency in which something was priced."""
        return tuple(sorted(self.total.money))

    @property
    def coverage_ratio(self) -> float | None:
        """Part of the GPU-seconds with known activity; ``None`` where there are none."""
        seconds = self.total.seconds
        return 1 - seconds.unknown / seconds.total if seconds.total else None

    @property
    def missing_seconds(self) -> float:
        """What the lines and what is withheld lack of the capacity; 0 within rounding, or something is wrong."""
        missing = self.capacity_seconds - self.withheld_seconds - self.total.seconds.total
        return missing if abs(missing) > _TOLERATED_SECONDS + self.capacity_seconds * _TOLERATED_RATIO else 0.0


def add(many: Iterable[Totals]) -> Totals:
    """The sum of totals, currency by currency."""
    return sum(many, start=Totals())


def read(document: Mapping[str, Any], where: str) -> NodeReport:
    """The report of an agent's answer to ``/api/v1/ledger``.

    Raises:
        ExporterError: The agent has metered nothing yet, or its answer is not a ledger's; ``where`` names the agent.
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
    saved_at = document["saved_at_seconds"]
    return NodeReport(
        node=_text(document["node"]),
        simulated=bool(document["simulated"]),
        from_seconds=_instant(document["started_at_seconds"]),
        to_seconds=_instant(document["taken_at_seconds"] if saved_at is None else saved_at),
        saved=saved_at is not None,
        state_problem=_text(document["state_problem"]),
        capacity_seconds=number(document["capacity_seconds"]),
        withheld_seconds=number(document["withheld_seconds"]),
        conservation_error_seconds=number(document["conservation_error_seconds"]),
        price_book=_text(document["price_book"]),
        unpriced_gpus=int(document["unpriced_gpus"]),
        prices=Counter(map(_priced, document["prices"])),
        lines=tuple(sorted(map(_line, document["accounts"]), key=_rank)),
    )


def _rank(line: Line) -> tuple[int, float, float, str, str, str, str]:
    # Currencies cannot be compared; a book has one, and then this is the order of money.
    cost = sum(money.total for money in line.totals.money.values())
    owner = line.owner
    place = APART.index(owner) + 1 if owner in APART else 0
    return (place, -cost, -line.totals.seconds.total, owner_name(owner), owner.team, line.model, line.mode)


def summed(report: NodeReport, by: By) -> NodeReport:
    """Return the report's lines summed by ``by``; time without an owner stays separate."""

    def key(line: Line) -> tuple[Owner, str, str]:
        owner = line.owner
        if by == "owner":
            return owner.without_cost_labels, line.model, line.mode
        if by == "model":
            return owner if owner in APART else Owner(), line.model, ""
        if owner in APART:
            return owner, "", ""
        if by == "namespace":
            return Owner(namespace=owner.namespace), "", ""
        if by == "team":
            return Owner(team=owner.team), "", ""
        return Owner(cost_labels=LineKey(labels=owner.cost_labels).at((by,)).labels), "", ""

    parts: dict[tuple[Owner, str, str], list[Totals]] = {}
    for line in report.lines:
        parts.setdefault(key(line), []).append(line.totals)
    lines = [
        Line(owner=owner, model=model, mode=mode, totals=many[0] if len(many) == 1 else add(many))
        for (owner, model, mode), many in parts.items()
    ]
    return replace(report, by=by, lines=tuple(sorted(lines, key=_rank)))


def label_keys(report: NodeReport) -> set[str]:
    """Keys of the cost labels that owners have."""
    return {key for line in report.lines for key in pairs(line.owner.cost_labels)}


def owner_name(owner: Owner) -> str:
    """``vision/Job/resnet``, as far as it is known; ours by their kind alone."""
    if owner in APART:
        return owner.kind
    return "/".join(part for part in (owner.namespace, owner.kind, owner.name) if part)


def _line(entry: Mapping[str, Any]) -> Line:
    owner = Owner(
        namespace=_text(entry["owner_namespace"]),
        kind=_text(entry["owner_kind"]),
        name=_text(entry["owner_name"]),
        team=_text(entry["team"]),
        cost_labels=_text(entry["cost_labels"]),
    )
    joules = entry["energy_joules"]
    totals = Totals(
        seconds=_by_state(entry, "seconds", "allocated_seconds"),
        energy_joules=0.0 if joules is None else number(joules),
        energy_unknown_seconds=number(entry["energy_unknown_seconds"]),
        unpriced_seconds=number(entry["unpriced_seconds"]),
        money={_text(money["currency"]): _by_state(money, "cost", "cost") for money in entry["money"]},
    )
    return Line(owner=owner, model=_text(entry["model"]), mode=ShareMode(entry["mode"]), totals=totals)


def _by_state(entry: Mapping[str, Any], unit: str, total: str) -> ByState:
    """Read the figures of an entry; of older agents all active time is unprofiled."""
    is_old = f"unprofiled_{unit}" not in entry
    names = ("idle", "unknown") if is_old else ByState.__slots__
    known = ByState(**{name: number(entry[f"{name}_{unit}"] or 0.0) for name in names})
    return known + ByState(unprofiled=number(entry[total]) - known.total) if is_old else known


def _priced(entry: Mapping[str, Any]) -> tuple[str, Price]:
    price = Price(
        per_hour=number(entry["per_hour"]),
        per_kwh=number(entry["per_kwh"]),
        currency=_text(entry["currency"]),
        source=_text(entry["source"]),
        as_of=_text(entry["as_of"]),
        fallback=bool(entry["fallback"]),
    )
    return _text(entry["model"]), price


def _instant(value: float) -> float:
    """A Unix time that a calendar has."""
    return datetime.fromtimestamp(float(value), tz=UTC).timestamp()


def _text(value: str | None) -> str:
    """A text, empty where there is none; whoever writes it to a terminal cleans it, so that no two become one here."""
    return encodable(value) if value else ""


FORMATS = ("table", "csv", "json")
_LONGEST_LINE = 1000
"""A table of names and figures: a broken name could not be searched for."""

_Column = tuple[str, Callable[[Line], str]]
_MODEL: _Column = ("Model", lambda line: line.model.removeprefix("NVIDIA "))


def write(report: NodeReport, form: str, stream: TextIO, by: By = "owner", *, with_notes: bool = False) -> None:
    """Write the report in one of ``FORMATS``, its lines summed by ``by``."""
    lines = summed(report, by)
    if form == "csv":
        write_csv(lines, stream, with_notes=with_notes)
    else:
        (write_table if form == "table" else write_json)(lines, stream)


def write_table(report: NodeReport, stream: TextIO) -> None:
    """Write a table with separate lines without an owner; its foot shows how far it can be trusted."""
    table = _table(report)
    console = console_for(stream, table, _LONGEST_LINE)
    if report.simulated:
        console.print(Text("SIMULATED NODE: nothing here is real", style="bold yellow"))
    console.print(Text(f"GPU use on {clean(report.node)}", style="bold"))
    console.print(table)
    write_foot(console, (remark._replace(words=clean(remark.words)) for remark in _foot(report)))


def _table(report: NodeReport) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    columns = _columns(report)
    for title, _ in columns:
        table.add_column(title, overflow="fold")
    currencies = report.currencies or ("",)
    money_titles = [title for currency in currencies for title in (f"Cost {currency}", f"Idle {currency}")]
    effective = EFFECTIVE_TITLES if report.owned.seconds.profiled else ()
    for title in (*HOUR_TITLES, *effective, *money_titles):
        table.add_column(title.strip(), justify="right", no_wrap=True)
    digits = hour_digits(report.capacity_seconds)
    held = sum(line.owner not in APART for line in report.lines)
    for place, line in enumerate(report.lines, start=1):
        ends = place in {held, len(report.lines)}
        style = "" if place <= held else "dim"
        names = (Text(clean(name_of(line))) for _, name_of in columns)
        figures = _figures(line.totals, line.states, currencies, digits, with_effective=bool(effective))
        table.add_row(*names, *figures, end_section=ends, style=style)
    total = _figures(report.total, report.owned, currencies, digits, with_effective=bool(effective))
    table.add_row("Total", *("" for _ in columns[1:]), *total, style="bold")
    return table


def _columns(report: NodeReport) -> tuple[_Column, ...]:
    """Return titles of the names, and what gives them; time without an owner stands in the first one."""
    if report.by == "model":
        return (_MODEL, ("Held by", lambda line: _kind(line) or "owners"))
    if report.by == "owner":
        with_teams = any(line.owner.team for line in report.lines)
        team: tuple[_Column, ...] = (("Team", lambda line: line.owner.team),) if with_teams else ()
        return (("Owner", lambda line: owner_name(line.owner)), *team, _MODEL, ("Mode", lambda line: line.mode))
    key = report.by.removeprefix(LABEL)
    if report.by.startswith(LABEL):
        return ((key, lambda line: _kind(line) or pairs(line.owner.cost_labels).get(key) or f"(no {key})"),)
    return ((key.capitalize(), lambda line: _kind(line) or getattr(line.owner, key) or f"(no {key})"),)


def _kind(line: Line) -> str:
    return line.owner.kind if line.owner in APART else ""


def _figures(
    totals: Totals, states: Totals | None, currencies: tuple[str, ...], digits: int, *, with_effective: bool
) -> list[str]:
    money = (text for currency in currencies for text in money_of(totals, states, currency))
    effective = effective_of(states, digits) if with_effective else ()
    return [*hours_of(totals, states, digits), *effective, *money]


def _foot(report: NodeReport) -> Iterator[Remark]:
    total, digits = report.total, hour_digits(report.capacity_seconds)
    whole = f"{decimal(report.capacity_seconds / HOUR, digits)} GPU-hours metered"
    error = f"conservation error {report.conservation_error_seconds:.1e} s"
    yield Remark("Sum", f"{decimal(total.seconds.total / HOUR, digits)} of {whole}, {error}")
    if report.withheld_seconds > 0:
        yield Remark("", f"{report.withheld_seconds:,.0f} s are of pods whose owner is not known yet", "note")
    if report.missing_seconds:
        yield Remark("", f"{report.missing_seconds:,.3f} s have no owner: please report this as a bug", "error")
    if report.coverage_ratio is not None:
        yield Remark("Coverage", f"{report.coverage_ratio:.2%}: the part of these hours in which activity was measured")
    yield from terms(report.owned)
    kept = "totals as of the last save" if report.saved else "a restart of the agent loses what is in memory only"
    yield Remark("Period", f"{moment(report.from_seconds)} to {moment(report.to_seconds)}; {kept}")
    if report.state_problem:
        yield Remark("State", report.state_problem, "warning")
    for label, ((model, price), gpus) in zip(
        ("Prices", *("",) * len(report.prices)), report.prices.items(), strict=False
    ):
        yield Remark(label, _price(model, price, gpus))
    if report.price_book:
        yield Remark("Book", report.price_book)
    if report.unpriced_gpus:
        yield Remark(
            "No price", f"no row of the price book matches {report.unpriced_gpus} GPU(s) of this node", "warning"
        )
    yield from unpriced(total, digits)


def _price(model: str, price: Price, gpus: int) -> str:
    energy = f" and {price.per_kwh:g} per measured kWh" if price.per_kwh else ""
    listed = ", a bundled list price: what you pay may differ" if price.fallback else ""
    cost = f"{price.per_hour:,.4g} {price.currency}/h{energy} now"
    return f"{gpus} x {model}: {cost}, {price.source} as of {price.as_of}{listed}"


def write_csv(report: NodeReport, stream: TextIO, *, with_notes: bool = False) -> None:
    """Write a row per owner, model and mode, rounded; with notes, rows of what has no owner, too.

    Money is in columns per currency, empty where there was no price.
    """
    currencies = report.currencies  # a sum over all lines: once, not per line
    money = [f"{name}_{currency}" for currency in currencies for name in CSV_MONEY]
    labels = [report.by] if report.by.startswith(LABEL) else []
    names = (*account_keys(Owner(), "", ""), *labels)
    head = ("node", "from", "to", *names, *CSV_HOURS, "energy_kwh", *CSV_RATIOS, *money)
    writer = csv.DictWriter(csv_stream(stream), head, restval="", lineterminator="\n")
    writer.writeheader()
    first = {"node": report.node, "from": iso(report.from_seconds), "to": iso(report.to_seconds)}
    for line in report.lines if with_notes else (line for line in report.lines if line.states):
        texts = {**first, **account_keys(line.owner, line.model, line.mode)}
        texts |= {label: pairs(line.owner.cost_labels).get(label.removeprefix(LABEL), "") for label in labels}
        figures = csv_figures(line.totals, line.states, energy_joules(line.totals))
        writer.writerow({**{name: guarded(clean(text or "")) for name, text in texts.items()}, **figures})


def write_json(report: NodeReport, stream: TextIO) -> None:
    """One object: the period, the lines, their sum against capacity, and the prices. ``null`` is unknown."""
    document = {
        "node": report.node,
        "simulated": report.simulated,
        "from_seconds": report.from_seconds,
        "to_seconds": report.to_seconds,
        "saved": report.saved,
        "state_problem": report.state_problem or None,
        "by": report.by,
        "lines": [
            {
                **account_keys(line.owner, line.model, line.mode),
                "labels": pairs(line.owner.cost_labels) or None,
                **owned_keys(line.totals, line.states),
            }
            for line in report.lines
        ],
        "total": owned_keys(report.total, report.owned),
        "capacity_seconds": report.capacity_seconds,
        "withheld_seconds": report.withheld_seconds,
        "missing_seconds": report.missing_seconds,
        "conservation_error_seconds": report.conservation_error_seconds,
        "coverage_ratio": report.coverage_ratio,
        "price_book": report.price_book or None,
        "unpriced_gpus": report.unpriced_gpus,
        "prices": [
            {"model": model, "gpus": gpus, **price_keys(price)} for (model, price), gpus in report.prices.items()
        ],
    }
    stream.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")
