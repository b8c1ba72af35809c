"""Renders a node's report as a table, CSV or JSON."""

import csv
import json
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from exporter.cost.ledger import LABEL, pairs
from exporter.cost.node_report import APART, By, Line, NodeReport, PricedModel, owner_name, summed
from exporter.cost.render import CSV_HOURS, console_for, csv_figures, write_foot
from exporter.cost.render_rows import (
    HOUR,
    Remark,
    clean,
    csv_stream,
    guarded,
    hours_of,
    money_of,
    unpriced,
)
from exporter.metrics.ledger_collector import energy_joules
from exporter.model import Owner, Totals
from exporter.model.formatting import decimal, hour_digits, iso, moment
from exporter.web.node_api import account_keys, price_keys, totals_keys

FORMATS = ("table", "csv", "json")

_Column = tuple[str, Callable[[Line], str]]


def write(report: NodeReport, form: str, stream: TextIO, by: By = "owner") -> None:
    """Write the report in one of ``FORMATS``, its lines summed by ``by``."""
    {"table": write_table, "csv": write_csv, "json": write_json}[form](summed(report, by), stream)


def write_table(report: NodeReport, stream: TextIO) -> None:
    """A table with what nobody held apart, and at its foot how far it can be trusted."""
    table = _table(report)
    console = console_for(stream, table)
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
    for title in ("GPU-hours", "Active", "Idle", "Unknown", *money_titles):
        table.add_column(title.strip(), justify="right", no_wrap=True)
    digits = hour_digits(report.capacity_seconds)
    held = sum(line.owner not in APART for line in report.lines)
    for number, line in enumerate(report.lines, start=1):
        ends = number in {held, len(report.lines)}
        style = "" if number <= held else "dim"
        names = (Text(clean(name_of(line))) for _, name_of in columns)
        table.add_row(*names, *_figures(line.totals, currencies, digits), end_section=ends, style=style)
    table.add_row("Total", *("" for _ in columns[1:]), *_figures(report.total, currencies, digits), style="bold")
    return table


def _columns(report: NodeReport) -> tuple[_Column, ...]:
    """Titles of the names, and what they are of a line; time without an owner stands in the first one."""
    if report.by == "namespace":
        return (("Namespace", lambda line: _kind(line) or line.owner.namespace or "(no namespace)"),)
    if report.by.startswith(LABEL):
        key = report.by.removeprefix(LABEL)
        return ((key, lambda line: _kind(line) or pairs(line.owner.cost_labels).get(key) or f"(no {key})"),)
    if report.by == "team":
        return (("Team", lambda line: _kind(line) or line.owner.team or "(no team)"),)
    model: _Column = ("Model", lambda line: line.model.removeprefix("NVIDIA "))
    if report.by == "model":
        return (model, ("Held by", lambda line: _kind(line) or "owners"))
    with_teams = any(line.owner.team for line in report.lines)
    team: tuple[_Column, ...] = (("Team", lambda line: line.owner.team),) if with_teams else ()
    return (("Owner", lambda line: owner_name(line.owner)), *team, model, ("Mode", lambda line: line.mode))


def _kind(line: Line) -> str:
    return line.owner.kind if line.owner in APART else ""


def _figures(totals: Totals, currencies: tuple[str, ...], digits: int) -> list[str]:
    return [*hours_of(totals, digits), *(text for currency in currencies for text in money_of(totals, currency))]


def _foot(report: NodeReport) -> Iterator[Remark]:
    total, digits = report.total, hour_digits(report.capacity_seconds)
    whole = f"{decimal(report.capacity_seconds / HOUR, digits)} GPU-hours metered"
    error = f"conservation error {report.conservation_error_seconds:.1e} s"
    yield Remark("Sum", f"{decimal(total.allocated_seconds / HOUR, digits)} of {whole}, {error}")
    if report.withheld_seconds > 0:
        yield Remark("", f"{report.withheld_seconds:,.0f} s are of pods whose owner is not known yet", "note")
    if report.missing_seconds:
        yield Remark("", f"{report.missing_seconds:,.3f} s have no owner: please report this as a bug", "error")
    if report.coverage_ratio is not None:
        yield Remark("Coverage", f"{report.coverage_ratio:.2%}: the part of these hours in which activity was measured")
    kept = "totals as of the last save" if report.saved else "a restart of the agent loses what is in memory only"
    yield Remark("Period", f"{moment(report.from_seconds)} to {moment(report.to_seconds)}; {kept}")
    if report.state_problem:
        yield Remark("State", report.state_problem, "warning")
    for label, priced in zip(("Prices", *("",) * len(report.prices)), report.prices, strict=False):
        yield Remark(label, _price(priced))
    if report.price_book:
        yield Remark("Book", report.price_book)
    if report.unpriced_gpus:
        yield Remark(
            "No price", f"no row of the price book matches {report.unpriced_gpus} GPU(s) of this node", "warning"
        )
    yield from unpriced(total, digits)


def _price(priced: PricedModel) -> str:
    price = priced.price
    energy = f" and {price.per_kwh:g} per measured kWh" if price.per_kwh else ""
    listed = ", a bundled list price: what you pay may differ" if price.fallback else ""
    of = f"{priced.gpus} x {priced.model}"
    return f"{of}: {price.per_hour:,.4g} {price.currency}/h{energy} now, {price.source} as of {price.as_of}{listed}"


def write_csv(report: NodeReport, stream: TextIO) -> None:
    """One row per owner, model and mode; money in two columns per currency, empty where there was no price."""
    currencies = report.currencies  # a sum over all lines: once, not per line
    money = [name for currency in currencies for name in (f"cost_{currency}", f"idle_cost_{currency}")]
    labels = [report.by] if report.by.startswith(LABEL) else []
    names = (*account_keys(Owner(), "", ""), *labels)
    head = ("node", "from", "to", *names, *CSV_HOURS, "energy_kwh", *money)
    writer = csv.DictWriter(csv_stream(stream), head, restval="", lineterminator="\n")
    writer.writeheader()
    first = {"node": report.node, "from": iso(report.from_seconds), "to": iso(report.to_seconds)}
    for line in report.lines:
        texts = {**first, **account_keys(line.owner, line.model, line.mode)}
        texts |= {label: pairs(line.owner.cost_labels).get(label.removeprefix(LABEL), "") for label in labels}
        figures = csv_figures(line.totals, energy_joules(line.totals))
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
                **totals_keys(line.totals),
            }
            for line in report.lines
        ],
        "total": totals_keys(report.total),
        "capacity_seconds": report.capacity_seconds,
        "withheld_seconds": report.withheld_seconds,
        "missing_seconds": report.missing_seconds,
        "conservation_error_seconds": report.conservation_error_seconds,
        "coverage_ratio": report.coverage_ratio,
        "price_book": report.price_book or None,
        "unpriced_gpus": report.unpriced_gpus,
        "prices": [{"model": one.model, "gpus": one.gpus, **price_keys(one.price)} for one in report.prices],
    }
    stream.write(json.dumps(document, ensure_ascii=False, indent=2) + "\n")
