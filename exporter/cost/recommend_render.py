"""Writes recommendations as table, CSV or JSON, and as values of the API."""

import csv
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, TextIO

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from exporter.cost.document import OwnerDocument, window_document
from exporter.cost.foot import Remark, write_foot
from exporter.cost.holdings import PAYER
from exporter.cost.recommend import AdviceReading, Recommendation, RiskLevel
from exporter.cost.render import console_for, csv_stream, encodable, guarded
from exporter.model.formatting import clean, decimal, iso, minute, money_with_code

Form = Literal["table", "csv", "json"]
FORMATS: tuple[Form, ...] = ("table", "csv", "json")
_LEVELS = {"low": "green", "medium": "yellow", "high": "red"}
_COLUMNS = (
    *("advice", "cluster", "owner_namespace", "owner_kind", "owner_name", "team", "model", "title", "gpus"),
    *("per_month", "currency", "risk_level", "risk", "command", "evidence", "devices"),
)


def write(reading: AdviceReading, form: Form, stream: TextIO) -> None:
    """Write recommendations, most money first."""
    {"table": _write_table, "csv": _write_csv, "json": _write_json}[form](reading, stream)


def totals(found: Sequence[Recommendation]) -> dict[str, float]:
    """Return the money per month by currency, of all recommendations with a price."""
    sums: dict[str, float] = {}
    for one in found:
        if one.per_month is not None:
            sums[one.currency] = sums.get(one.currency, 0.0) + one.per_month
    return dict(sorted(sums.items()))


def _write_table(reading: AdviceReading, stream: TextIO) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True, show_lines=False)
    for title in ("Workload", "Team", "What to do and why"):
        table.add_column(title, overflow="fold")
    for title in ("GPUs", "A month"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("Risk")
    for one in reading.recommendations:
        owner = one.owner
        place = f"{owner.cluster}: " if owner.cluster else ""
        why = Text(clean(one.title), style="bold")
        for sentence in filter(None, (*one.evidence, f"Risk: {one.risk}", one.command)):
            why.append(f"\n{clean(sentence)}", style="not bold")
        table.add_row(
            Text(clean(f"{place}{owner.kind} {owner.namespace}/{owner.workload}")),
            Text(clean(owner.team)),
            why,
            decimal(one.gpus, 2) if one.gpus else "-",
            "-" if one.per_month is None else money_with_code(one.per_month, clean(one.currency)),
            Text(one.risk_level, style=_LEVELS[one.risk_level]),
            end_section=True,
        )
    console = console_for(stream, table)
    window = reading.ledger.window
    if reading.ledger.simulated:
        console.print(Text("SIMULATED FLEET: nothing here is real", style="bold yellow"))
    period = f"{minute(window.start_seconds)} to {minute(window.end_seconds)} UTC"
    console.print(Text(f"Recommendations, from use in {period}", style="bold"))
    if reading.recommendations:
        console.print(table)
    write_foot(console, _foot(reading))


def _foot(reading: AdviceReading) -> Iterator[Remark]:
    held = [use for use in reading.uses if use.still_held]
    found = [one for one in reading.recommendations if one.advice != "bottleneck"]
    workloads = {use.owner.at(PAYER - {"model"}) for use in held}
    yield Remark("Looked at", f"{len(held):,} devices that {len(workloads):,} workloads still hold")
    month = " and ".join(money_with_code(money, clean(currency)) for currency, money in totals(found).items())
    unpriced = sum(one.per_month is None for one in found)
    without = f"; {unpriced} without a price" if unpriced else ""
    savings = f"{month or 'no money'} a month, of {len(found)} recommendations{without}" if found else "none found"
    yield Remark("Savings", savings)
    for failure in reading.ledger.failures:
        yield Remark("Missing", f"{clean(failure.what)}: {clean(failure.reason)}: prices are of the rest")
    for note in reading.ledger.notes:
        yield Remark("Note", clean(note))


def _write_csv(reading: AdviceReading, stream: TextIO) -> None:
    writer = csv.DictWriter(csv_stream(stream), ("from", "to", *_COLUMNS), lineterminator="\n")
    writer.writeheader()
    window = reading.ledger.window
    period = {"from": iso(window.start_seconds), "to": iso(window.end_seconds)}
    for one in reading.recommendations:
        joined = {"evidence": " ".join(one.evidence), "devices": " ".join(one.devices)}
        values = {**recommendation_document(one), **joined, **period}
        # The writer leaves cells of ``None`` empty.
        writer.writerow({name: guarded(value) if isinstance(value, str) else value for name, value in values.items()})


def _write_json(reading: AdviceReading, stream: TextIO) -> None:
    ledger = reading.ledger
    document = {
        "api_version": 1,
        "window": window_document(ledger.window),
        "recommendations": [recommendation_document(one) for one in reading.recommendations],
        "per_month": totals(reading.recommendations),
        "failures": [{"what": failure.what, "reason": failure.reason} for failure in ledger.failures],
        "notes": list(ledger.notes),
        "simulated": ledger.simulated,
    }
    stream.write(encodable(json.dumps(document, ensure_ascii=False, indent=2)) + "\n")


class RecommendationDocument(OwnerDocument):
    """One suggestion."""

    advice: Annotated[str, "give-back, fewer-gpus, share, smaller-mig, smaller-model or bottleneck."]
    title: Annotated[str, "What to do."]
    gpus: Annotated[float, "Physical GPUs that would become free, by share."]
    currency: Annotated[str | None, "ISO 4217."]
    per_month: Annotated[float | None, "Money of 730 hours; null where there was no price."]
    evidence: Annotated[list[str], "Measured facts, with window and coverage."]
    risk: Annotated[str, "What could go wrong, and how to try it."]
    risk_level: Annotated[RiskLevel, "How bad that is."]
    command: Annotated[str | None, "To copy: does it, or opens the manifest; null where the workload has no name."]
    devices: Annotated[list[str], "UUIDs that it is about."]


def recommendation_document(one: Recommendation) -> RecommendationDocument:
    """Return a recommendation as plain values, with the names of a report's lines."""
    return {
        "advice": one.advice,
        "title": one.title,
        "cluster": one.owner.cluster or None,
        "owner_namespace": one.owner.namespace or None,
        "owner_kind": one.owner.kind or None,
        "owner_name": one.owner.workload or None,
        "team": one.owner.team or None,
        "model": one.owner.model or None,
        "gpus": one.gpus,
        "per_month": one.per_month,
        "currency": one.currency or None,
        "evidence": list(one.evidence),
        "risk": one.risk,
        "risk_level": one.risk_level,
        "command": one.command or None,
        "devices": list(one.devices),
    }
