"""Reports one node's ledger, read from its agent, as a table, CSV or JSON: owners by cost against capacity."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TextIO, TypeAlias

from exporter.cost.agent_client import number, understood
from exporter.cost.dimensions import LABEL, Dimension, LineKey, label_problem
from exporter.cost.document import figures_document, line_document
from exporter.cost.foot import HOUR, Remark, listed, terms, unpriced
from exporter.cost.ledger import Chunk, Figures, FleetLedger
from exporter.cost.render import encodable, write_csv, write_table
from exporter.cost.report import FleetReport, Question, make_report
from exporter.cost.window import Window
from exporter.errors import ExporterError, expected
from exporter.model.attribution import ShareMode
from exporter.model.formatting import clean, decimal, hour_digits, moment
from exporter.model.ledger import ByState, Price
from exporter.model.records import written

By: TypeAlias = str
"""A name in ``BY``, or ``label:KEY``."""
BY: Mapping[By, tuple[Dimension, ...]] = {
    "owner": ("workload", "team", "model", "mode"),
    "namespace": ("namespace",),
    "team": ("team",),
    "model": ("model",),
}
"""Dimensions of the lines, by name."""


def by_problem(by: By) -> str:
    """Return the problem of a dimension for one node; empty if there is no problem."""
    if by in BY or (by.startswith(LABEL) and not label_problem(by)):
        return ""
    return f"value '{by}' is not for one node{expected(by, BY, ', '.join((*BY, 'label:KEY')))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLedger:
    """Use of a node's GPUs since its ledger began. Seconds are share-weighted GPU-seconds."""

    node: str
    simulated: bool
    from_seconds: float
    to_seconds: float
    """Unix time until which the totals count: time of their save, or of the snapshot."""
    saved: bool
    state_problem: str
    lines: Mapping[LineKey, Figures]
    """Figures of every account."""
    capacity_seconds: float
    withheld_seconds: float
    """GPU-seconds of pods whose owner is not known yet."""
    conservation_error_seconds: float
    price_book: str
    unpriced_gpus: int
    prices: Mapping[tuple[str, Price], int]
    """Number of GPUs by model and current price."""

    @property
    def fleet(self) -> FleetLedger:
        """The ledger as that of a fleet with this node only, without withheld seconds."""
        window = Window(start_seconds=int(self.from_seconds), end_seconds=int(self.to_seconds))
        capacity = {"": self.capacity_seconds - self.withheld_seconds}
        return FleetLedger(
            window=window,
            dimensions=frozenset(LineKey._fields),
            chunks=(Chunk(window=window, lines=self.lines, capacity_seconds=capacity),),
            label_keys=frozenset(name for key in self.lines for name in key.label_values),
            simulated=self.simulated,
        )

    def report(self, by: By) -> FleetReport:
        """Return the report by a name in ``BY``, or by a label."""
        dimensions = BY.get(by, (by,))
        if by == "owner" and not any(key.team for key in self.lines):
            dimensions = tuple(name for name in dimensions if name != "team")
        report = make_report(self.fleet, Question(by=(*dimensions, "node")), self.price_book)
        trust = replace(
            report.trust,
            capacity_seconds=self.capacity_seconds,
            expected_hours=0,  # nothing is recorded by the hour
            notes=tuple(filter(None, (self.state_problem,))),
        )
        return replace(report, question=Question(by=dimensions), trust=trust)


def read(document: Mapping[str, Any], where: str) -> AgentLedger:
    """Parse an agent's answer to ``/api/v1/ledger``; ``where`` names the agent in errors.

    Raises:
        ExporterError: The agent has metered nothing yet, or the answer is not a ledger.
    """
    with understood(where, "an agent's ledger"):
        if not document["metered"]:
            raise ExporterError(f"{where}: the agent has not metered anything yet; {where}/readyz shows the reason")
        return _ledger(document)


def _ledger(document: Mapping[str, Any]) -> AgentLedger:
    saved_at, node = document["saved_at_seconds"], _text(document["node"])
    return AgentLedger(
        node=node,
        simulated=bool(document["simulated"]),
        from_seconds=_instant(document["started_at_seconds"]),
        to_seconds=_instant(document["taken_at_seconds"] if saved_at is None else saved_at),
        saved=saved_at is not None,
        state_problem=_text(document["state_problem"]),
        lines=dict(_line(entry, node) for entry in document["accounts"]),
        capacity_seconds=number(document["capacity_seconds"]),
        withheld_seconds=number(document["withheld_seconds"]),
        conservation_error_seconds=number(document["conservation_error_seconds"]),
        price_book=_text(document["price_book"]),
        unpriced_gpus=int(document["unpriced_gpus"]),
        prices=Counter(map(_priced, document["prices"])),
    )


def _line(entry: Mapping[str, Any], node: str) -> tuple[LineKey, Figures]:
    key = LineKey(
        node=node,
        namespace=_text(entry["owner_namespace"]),
        kind=_text(entry["owner_kind"]),
        workload=_text(entry["owner_name"]),
        team=_text(entry["team"]),
        labels=_text(entry["cost_labels"]),
        model=_text(entry["model"]),
        mode=ShareMode(entry["mode"]).value,
    )
    joules = entry["energy_joules"]
    figures = Figures(
        seconds=_by_state(entry, "seconds", "allocated_seconds"),
        energy_joules=None if joules is None else number(joules),
        energy_unknown_seconds=number(entry["energy_unknown_seconds"]),
        unpriced_seconds=number(entry["unpriced_seconds"]),
        money={_text(money["currency"]): _by_state(money, "cost", "cost") for money in entry["money"]},
    )
    return key, figures


def _by_state(entry: Mapping[str, Any], unit: str, total: str) -> ByState:
    """Read the figures of an entry; all active time of older agents is unprofiled."""
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
    """Return a Unix time that the calendar can represent."""
    return datetime.fromtimestamp(float(value), tz=UTC).timestamp()


def _text(value: str | None) -> str:
    """Return a text; empty for ``None``. Control characters stay, so that two names do not become the same."""
    return encodable(value) if value else ""


FORMATS = ("table", "csv", "json")


def write(ledger: AgentLedger, form: str, stream: TextIO, by: By = "owner", *, with_notes: bool = False) -> None:
    """Write the report by ``by`` in one of ``FORMATS``."""
    report = ledger.report(by)
    if form == "csv":
        write_csv(report, stream, with_notes=with_notes)
    elif form == "json":
        _write_json(ledger, report, by, stream)
    else:
        write_table(report, stream, "NODE", f"GPU use on {clean(ledger.node)}", _foot(ledger, report))


def _foot(ledger: AgentLedger, report: FleetReport) -> Iterator[Remark]:
    total, trust, digits = report.total, report.trust, hour_digits(ledger.capacity_seconds)
    whole = f"{decimal(ledger.capacity_seconds / HOUR, digits)} GPU-hours metered"
    error = f"conservation error {ledger.conservation_error_seconds:.1e} s"
    yield Remark("Sum", f"{decimal(total.seconds.total / HOUR, digits)} of {whole}, {error}")
    if ledger.withheld_seconds > 0:
        yield Remark("", f"{ledger.withheld_seconds:,.0f} s are of pods whose owner is not known yet", "note")
    if trust.missing_seconds:
        yield Remark("", f"{trust.missing_seconds:,.3f} s have no owner: please report this as a bug", "error")
    if (coverage := _coverage_ratio(report)) is not None:
        yield Remark("Coverage", f"{coverage:.2%}: the part of these hours in which activity was measured")
    yield from terms(report.owned)
    kept = "totals as of the last save" if ledger.saved else "a restart of the agent loses what is in memory only"
    yield Remark("Period", f"{moment(ledger.from_seconds)} to {moment(ledger.to_seconds)}; {kept}")
    if ledger.state_problem:
        yield Remark("State", clean(ledger.state_problem), "warning")
    yield from listed("Prices", (clean(_price(model, price, gpus)) for (model, price), gpus in ledger.prices.items()))
    if ledger.price_book:
        yield Remark("Book", clean(ledger.price_book))
    if ledger.unpriced_gpus:
        words = f"no row of the price book matches {ledger.unpriced_gpus} GPU(s) of this node"
        yield Remark("No price", words, "warning")
    yield from unpriced(total, digits)


def _price(model: str, price: Price, gpus: int) -> str:
    energy = f" and {price.per_kwh:g} per measured kWh" if price.per_kwh else ""
    listed = ", a bundled list price: what you pay may differ" if price.fallback else ""
    cost = f"{price.per_hour:,.4g} {price.currency}/h{energy} now"
    return f"{gpus} x {model}: {cost}, {price.source} as of {price.as_of}{listed}"


def _write_json(ledger: AgentLedger, report: FleetReport, by: By, stream: TextIO) -> None:
    """Write one object: the period, the lines, their sum against capacity, and the prices. ``null`` is unknown."""
    document = {
        "node": ledger.node,
        "simulated": ledger.simulated,
        "from_seconds": ledger.from_seconds,
        "to_seconds": ledger.to_seconds,
        "saved": ledger.saved,
        "state_problem": ledger.state_problem or None,
        "by": by,
        "lines": [{**line_document(line), **_energy(line.figures)} for line in (*report.held, *report.apart)],
        "total": {**figures_document(report.total, report.owned), **_energy(report.total)},
        "capacity_seconds": ledger.capacity_seconds,
        "withheld_seconds": ledger.withheld_seconds,
        "missing_seconds": report.trust.missing_seconds,
        "conservation_error_seconds": ledger.conservation_error_seconds,
        "coverage_ratio": _coverage_ratio(report),
        "price_book": ledger.price_book or None,
        "unpriced_gpus": ledger.unpriced_gpus,
        "prices": [{"model": model, "gpus": gpus, **written(price)} for (model, price), gpus in ledger.prices.items()],
    }
    stream.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")


def _coverage_ratio(report: FleetReport) -> float | None:
    """Return the part of all GPU-seconds, with or without an owner, whose activity was measured."""
    seconds = report.total.seconds
    return 1 - seconds.unknown / seconds.total if seconds.total else None


def _energy(figures: Figures) -> dict[str, float]:
    return {"energy_unknown_seconds": figures.energy_unknown_seconds}
