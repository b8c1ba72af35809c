"""Writes a reconciliation: a table for people, CSV for spreadsheets, JSON for programs."""

import csv
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from exporter.report.focus.findings import printable
from exporter.report.reconcile.values import Group, Reconciliation
from exporter.report.render.foot import failure_words
from exporter.report.render.words import csv_stream, encodable, guarded

FORMATS = ("table", "csv", "json")
_WIDTH_OF_A_FILE = 160


def write_reconciliation(found: Reconciliation, form: str, stream: TextIO) -> None:
    """Write it in one of ``FORMATS``."""
    writers: dict[str, Callable[[Reconciliation, TextIO], None]] = {
        "table": _write_table,
        "csv": _write_csv,
        "json": _write_json,
    }
    writers[form](found, stream)


def _write_table(found: Reconciliation, stream: TextIO) -> None:
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else _WIDTH_OF_A_FILE)
    period = f"{_day(found.window.start_seconds)} to {_day(found.window.end_seconds)}"
    console.print(Text(f"Bill and ledger, {period}", style="bold"))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    table.add_column("Instances", overflow="fold")
    table.add_column("What", overflow="fold")
    for title in ("GPU-hours", "Money", "Currency"):
        table.add_column(title, justify="right", no_wrap=True)
    for group in found.groups:
        _add_group(table, group)
    label = "All compared" if any(group.note for group in found.groups) else "All"
    for currency in found.currencies:
        billed, metered, gap = found.total(currency)
        words = f"Metered {metered:,.2f}, gap {gap:+,.2f}, on the bill"
        table.add_row(Text(label, style="bold"), words, "", f"{billed:,.2f}", currency, style="bold")
    console.print(table)
    for label, words in _foot(found):
        line = Text(f"{label:<12}", style="bold")
        line.append(words)
        console.print(line, soft_wrap=True)


def _add_group(table: Table, group: Group) -> None:
    name = Text(_name(group))
    if group.note:
        row = f"Metered {group.metered:,.2f}, on the bill {group.billed:,.2f}: {group.note}"
        table.add_row(name, Text(row), "", "", group.currency, end_section=True, style="yellow")
        return
    table.add_row(name, "Metered", f"{group.metered_gpu_hours:,.1f}", f"{group.metered:,.2f}", group.currency)
    for one in group.explanations:
        hours = "" if one.gpu_hours is None else f"{one.gpu_hours:,.1f}"
        table.add_row("", Text(f"  {one.words}"), hours, f"{one.amount:+,.2f}", group.currency, style="dim")
    hours = "" if group.billed_gpu_hours is None else f"{group.billed_gpu_hours:,.1f}"
    table.add_row("", "On the bill", hours, f"{group.billed:,.2f}", group.currency, end_section=True)


def _name(group: Group) -> str:
    return " ".join(printable(name) for name in (group.instance_type, group.region) if name) or "(no instance type)"


def _foot(found: Reconciliation) -> Iterator[tuple[str, str]]:
    scope = found.scope
    other = ", ".join(f"{cost:,.2f} {currency}" for currency, cost in scope.other_cost.items())
    yield "Bill", f"{scope.lines:,} lines, of which {scope.gpu_lines:,} are for instances with GPUs"
    yield "", f"{scope.other_lines:,} for something else, left out{f': {other}' if other else ''}"
    if scope.outside_window:
        yield "", f"{scope.outside_window:,} of another time, left out"
    if scope.other_accounts:
        yield "", f"{scope.other_accounts:,} of other accounts, left out"
    if scope.malformed:
        yield "", f"{scope.malformed:,} could not be read and are in no sum"
    for group in found.groups:
        if group.invoiced != group.billed:
            yield "Invoice", f"{_name(group)}: {group.invoiced:,.2f} {group.currency} as invoiced, before it is spread"
    yield "Coverage", f"{found.recorded_hours:,} of {found.expected_hours:,} hours of the ledger are recorded"
    for failure in found.failures:
        yield "Not read", failure_words(failure)
    for note in found.notes:
        yield "Note", printable(note)


def _write_csv(found: Reconciliation, stream: TextIO) -> None:
    writer = csv.writer(csv_stream(stream), lineterminator="\n")
    writer.writerow(("instance_type", "region", "currency", "kind", "what", "gpu_hours", "amount"))
    for group in found.groups:
        place = (guarded(group.instance_type), guarded(group.region), group.currency)
        writer.writerow((*place, "metered", guarded(group.note), group.metered_gpu_hours, group.metered))
        for one in group.explanations:
            hours = "" if one.gpu_hours is None else one.gpu_hours
            writer.writerow((*place, one.kind, guarded(one.words), hours, one.amount))
        hours = "" if group.billed_gpu_hours is None else group.billed_gpu_hours
        writer.writerow((*place, "billed", guarded(group.note), hours, group.billed))


def _write_json(found: Reconciliation, stream: TextIO) -> None:
    scope = found.scope
    document = {
        "start": _day(found.window.start_seconds),
        "end": _day(found.window.end_seconds),
        "groups": [_group(group) for group in found.groups],
        "totals": [
            {"currency": currency, "billed": _money(billed), "metered": _money(metered), "gap": _money(gap)}
            for currency in found.currencies
            for billed, metered, gap in (found.total(currency),)
        ],
        "bill": {
            "lines": scope.lines,
            "gpu_lines": scope.gpu_lines,
            "other_lines": scope.other_lines,
            "outside_window": scope.outside_window,
            "other_accounts": scope.other_accounts,
            "malformed": scope.malformed,
            "other_cost": {currency: _money(cost) for currency, cost in scope.other_cost.items()},
        },
        "expected_hours": found.expected_hours,
        "recorded_hours": found.recorded_hours,
        "failures": [
            {
                "start": _day(failure.window.start_seconds),
                "end": _day(failure.window.end_seconds),
                "what": failure.what,
                "reason": failure.reason,
            }
            for failure in found.failures
        ],
        "notes": list(found.notes),
    }
    stream.write(encodable(json.dumps(document, ensure_ascii=False, indent=2)) + "\n")


def _group(group: Group) -> dict[str, object]:
    return {
        "instance_type": group.instance_type,
        "region": group.region,
        "currency": group.currency,
        "metered": _money(group.metered),
        "billed": _money(group.billed),
        "invoiced": _money(group.invoiced),
        "gap": None if group.note else _money(group.gap),
        "metered_gpu_hours": group.metered_gpu_hours,
        "billed_gpu_hours": group.billed_gpu_hours,
        "note": group.note or None,
        "explanations": [
            {"kind": one.kind, "what": one.words, "amount": _money(one.amount), "gpu_hours": one.gpu_hours}
            for one in group.explanations
        ],
    }


def _money(amount: Decimal) -> str:
    """As text: cents are exact, and floats are not."""
    return f"{amount:.2f}"


def _day(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, tz=UTC):%Y-%m-%dT%H:%M:%SZ}"
