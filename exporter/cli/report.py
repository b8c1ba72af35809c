"""Implements `report` (use and cost of GPUs of a node or fleet) and `focus` (columns of the FOCUS format)."""

import argparse
import asyncio
import gc
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path

from exporter.accounting.prices import PriceBook
from exporter.cli.common import Parser, add_output, add_timezone, alone, command, of_kind, or_problems, refuse
from exporter.cli.output import EXIT_PARTIAL, check_output, is_written_in_place, output, progress_bar, put, say
from exporter.config import price_book, types
from exporter.config.prometheus_options import ADDRESS, PrometheusSettings, add_prometheus_options, prometheus_settings
from exporter.cost import agent_client, node_report
from exporter.cost.dimensions import Dimension, Filters, dimension_of, dimensions_of, too_many_labels
from exporter.cost.document import MEANINGS
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.focus import (
    DEFAULT_VERSION,
    FOCUS_DIMENSIONS,
    ORIGIN_DIMENSIONS,
    VERSIONS,
    FocusSettings,
    columns_of,
    write_focus,
)
from exporter.cost.foot import failure_words
from exporter.cost.ledger import REPRICE_DIMENSIONS, FleetLedger, reprice
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.render import FLEET_FORMATS, write_fleet
from exporter.cost.report import Question, Trust, compared, make_report, unknown_labels
from exporter.cost.store import DayStore
from exporter.cost.store_ledger import StoreLedger
from exporter.cost.window import HOUR_SECONDS, Window, parse_window, period_before
from exporter.errors import ConfigError, ExporterError
from exporter.model.formatting import percent_down

_FOCUS_NAMES = (
    ("billing-account", "ID", "BillingAccountId of every row [default: on-prem]"),
    ("billing-account-name", "NAME", "BillingAccountName [default: none]"),
    (
        "provider",
        "NAME",
        "provider of the GPUs, which would send an invoice: the provider columns of every row [default: Internal]",
    ),
)
_FOCUS_FLAGS = ("focus_version", *(f"focus_{name.replace('-', '_')}" for name, _, _ in _FOCUS_NAMES), "focus_restated")
"""Options of `report` that apply to FOCUS only."""
_OF_A_NODE = frozenset(
    {"command", "dcgm_flags", "run", "agent", "by", "format", "with_notes", "output", *agent_client.KEYS}
)
_EPILOG = (
    "Exit code: 0 for a whole report; 1 if nothing can be read, or there is nothing yet; 2 for a wrong flag; 3 for a"
    " report that is not whole, or with coverage below --min-coverage: its foot shows the missing parts. How money is"
    " shared and re-priced: docs/cost.md. "
) + " ".join(f"{word}: {meaning}" for word, meaning in MEANINGS.items())


def add_report(parser: Parser) -> None:
    """Add the flags."""
    parser.usage = f"{parser.prog} --agent URL | --prometheus URL | --store FILE [OPTION ...]"
    parser.epilog = _EPILOG
    _add_source(parser)
    agent_client.add_agent_access(parser)
    _add_contents(parser)
    _add_form(parser)
    _add_focus_options(parser)
    add_prometheus_options(parser)
    parser.set_defaults(run=_report)


def _add_source(parser: Parser) -> None:
    where = parser.add_argument_group(
        "Where it is read: one of these, --prometheus (below), or --store and --prometheus"
    )
    where.add_argument(
        "--agent",
        metavar="URL",
        help="one node: address of its agent, as http://node-a:9400; of a pod through kubectl port-forward",
    )
    where.add_argument("--store", type=Path, metavar="FILE", help="a fleet: closed days that serve or store keep")


def _add_contents(parser: Parser) -> None:
    what = parser.add_argument_group("Selection")
    what.add_argument(
        "--window",
        metavar="PERIOD",
        help="30d, 12h, today, lastmonth, 2026-10, 2026-Q3, 2026-10-01..2026-10-15, ... [default: 30d]",
    )
    add_timezone(what)
    what.add_argument(
        "--by",
        metavar="DIMENSION,...",
        help="dimensions of the lines: cluster, node, pool, namespace, kind, workload, team, model, mode,"
        " label:KEY of a cost label [default: namespace]; of one node: one of owner, namespace, team, model,"
        " label:KEY [default: owner]",
    )
    what.add_argument(
        "--filter",
        action="append",
        metavar="DIMENSION=VALUE,...",
        help="only lines that have one of the values; again for another dimension; team= is for none [default: all]",
    )
    what.add_argument(
        "--share-idle",
        choices=("none", "even", "weighted"),
        help="spread the money of GPUs without a holder over owners: evenly, or by their own cost [default: none]",
    )
    what.add_argument(
        "--share-unallocated",
        action="store_const",
        const=True,
        help="with --share-idle: also spread Unattributed, so that all money without an owner is",
    )
    what.add_argument(
        "--price-book", type=Path, metavar="FILE", help="work money out again at the prices of this book (docs/cost.md)"
    )


def _add_form(parser: Parser) -> None:
    form = parser.add_argument_group("Output")
    form.add_argument(
        "--format",
        choices=(*FLEET_FORMATS, "focus"),
        default="table",
        help="form of the report; funnel: a table of what was held, active and effective of each line, in GPU-hours and"
        " money; of one node table, csv or json [default: table]",
    )
    form.add_argument(
        "--top",
        type=of_kind(types.count(1, 1_000_000)),
        metavar="N",
        help="show N owners and the rest as one line (table, funnel, html) [default: all]",
    )
    form.add_argument(
        "--with-notes",
        action="store_true",
        help="csv: also rows of totals, coverage, notes and of what has no owner [default: owners alone]",
    )
    form.add_argument(
        "--min-coverage",
        type=of_kind(types.PART),
        metavar="PART",
        help="exit code 3 if a smaller part of the period's hours was recorded, as 0.99 or 99%% [default: 0]",
    )
    add_output(form)


def _report(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    problems = (*problems, *agent_client.access_problems(namespace, of_an_agent=namespace.agent is not None))
    if namespace.agent is not None:
        refuse((*problems, *_not_of_a_node(namespace)))
        return _of_a_node(namespace)
    return _of_a_fleet(namespace, problems)


def _not_of_a_node(namespace: argparse.Namespace) -> list[str]:
    problems = [
        f"--{key.replace('_', '-')}: is for a fleet, and --agent reports one node; leave out one of them"
        for key, value in vars(namespace).items()
        if key not in _OF_A_NODE and value is not None
    ]
    if namespace.by is not None and (problem := node_report.by_problem(namespace.by)):
        problems.append(f"--by: {problem}")
    if namespace.format not in node_report.FORMATS:
        problems.append(
            f"--format: value '{namespace.format}' is not for one node; allowed: {', '.join(node_report.FORMATS)}"
        )
    return problems


def _of_a_node(namespace: argparse.Namespace) -> int:
    check_output(namespace.output)
    client = agent_client.client_of(namespace, namespace.agent)
    read = node_report.read(client.fetch(), client.base)
    by = namespace.by or "owner"
    if unknown := unknown_labels(read.fleet, (by,)):
        raise ConfigError(f"--by: {unknown}")
    with output(namespace.output) as stream:
        node_report.write(read, namespace.format, stream, by, with_notes=namespace.with_notes)
    return 0


_SHOWN_WHOLE = ("csv", "json", "focus")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """The validated task of a report."""

    window: Window
    question: Question
    dimensions: frozenset[Dimension]
    """Dimensions at which to read the ledger."""
    book: PriceBook | None
    """Price book of a re-pricing; ``None`` keeps the prices of the time of use."""
    is_focus: bool
    prometheus: PrometheusSettings | None
    store: Path | None
    """Store of closed days; ``None`` without a store. ``store``, ``prometheus`` or both are set."""

    async def read(self, window: Window) -> FleetLedger:
        """Return the ledger of a window.

        Raises:
            ExporterError: The ledger cannot be read.
        """
        async with AsyncExitStack() as stack:
            rest = None
            if self.prometheus is not None:
                client = await stack.enter_async_context(PrometheusClient(self.prometheus))
                # Re-pricing and FOCUS need daily chunks. Other reports use longer chunks, which take a third of the
                # time.
                rest = PrometheusLedger(client, by_day=self.is_focus or self.book is not None)
            source = rest if self.store is None else StoreLedger(DayStore(self.store), rest)
            assert source is not None  # noqa: S101 - the options require at least one of them
            show = stack.enter_context(progress_bar("Reading"))
            ledger = await source.ledger(window, self.dimensions, self.question.filters, show)
        return reprice(ledger, self.book) if self.book else ledger


def _settle(namespace: argparse.Namespace, given: Iterable[str], now: float) -> _Task:
    """Return the task; ``given`` are mistakes found before.

    Raises:
        ConfigError: Lists all mistakes.
    """
    problems = list(given)
    by = _by("namespace" if namespace.by is None else namespace.by, problems)
    filters = read_filters(namespace.filter or (), problems)
    problems += _contradictions(namespace, filters)
    written = "30d" if namespace.window is None else namespace.window
    window = or_problems(lambda: parse_window(written, now, namespace.timezone or UTC), problems, prefix="--")
    prometheus = None
    if namespace.prometheus or os.environ.get(ADDRESS.env):
        prometheus = or_problems(lambda: prometheus_settings(namespace, os.environ), problems)
    elif namespace.store is None:
        problems.append("no source given; give --prometheus URL or --store FILE for a fleet, --agent URL for one node")
    if problems or window is None:
        raise ConfigError(*problems)
    book = price_book.load(namespace.price_book) if namespace.price_book else None
    is_focus = namespace.format == "focus"
    return _Task(
        window=window,
        question=Question(
            by=by,
            filters=filters,
            share_idle=namespace.share_idle or "none",
            share_unallocated=bool(namespace.share_unallocated),
        ),
        dimensions=(FOCUS_DIMENSIONS if is_focus else dimensions_of(by)) | (REPRICE_DIMENSIONS if book else set()),
        book=book,
        is_focus=is_focus,
        prometheus=prometheus,
        store=namespace.store,
    )


def _by(text: str, problems: list[str]) -> tuple[Dimension, ...]:
    found = [_dimension(name, "--by", problems) for name in text.split(",")]
    known = [name for name in found if name is not None]
    problems += [f"--by: {name} is named twice" for name in sorted({name for name in known if known.count(name) > 1})]
    problems += too_many_labels("--by", known)
    return tuple(known)


def _dimension(text: str, flag: str, problems: list[str]) -> Dimension | None:
    name, problem = dimension_of(text)
    if not problem:
        return name
    problems.append(f"{flag}: value '{text.strip()}' {problem}")
    return None


def read_filters(texts: Iterable[str], problems: list[str]) -> Filters:
    """Return the filters of ``--filter``, each text ``DIMENSION=VALUE,...``; add their mistakes to ``problems``."""
    wanted: dict[Dimension, frozenset[str]] = {}
    for text in texts:
        name, separator, values = text.partition("=")
        if not separator:
            problems.append(f"--filter: value '{text}' has no =; allowed: DIMENSION=VALUE,..., as namespace=ml,vision")
            continue
        dimension = _dimension(name, "--filter", problems)
        if dimension in wanted:
            problems.append(f"--filter: {dimension} is named twice; give all its values at once, separated by commas")
        elif dimension is not None:
            wanted[dimension] = frozenset(value.strip() for value in values.split(","))
    problems += too_many_labels("--filter", wanted)
    return Filters(wanted=wanted)


def _contradictions(namespace: argparse.Namespace, filters: Filters) -> Iterator[str]:
    if namespace.share_unallocated and namespace.share_idle in {None, "none"}:
        yield "--share-unallocated: says what is spread, not how; give --share-idle even or weighted, too"
    if namespace.with_notes and namespace.format != "csv":
        yield f"--with-notes: {namespace.format} has them already; leave it out, or take csv"
    if namespace.top is not None and namespace.format in _SHOWN_WHOLE:
        yield f"--top: {namespace.format} has every line, so that it adds up; leave it out, or take table or html"
    if namespace.format != "focus":
        for flag in _FOCUS_FLAGS:
            if getattr(namespace, flag) is not None:
                yield f"--{flag.replace('_', '-')}: does nothing without --format focus; give both"
        return
    for flag in ("by", "share_idle", "share_unallocated"):
        if getattr(namespace, flag) is not None:
            name = flag.replace("_", "-")
            yield f"--{name}: FOCUS defines its own rows; leave --{name} out, or choose another --format"
    for dimension in sorted(set(filters.wanted) - ORIGIN_DIMENSIONS):
        yield (
            f"--filter: {dimension} would leave out parts of split charges, which then do not add up; with --format"
            f" focus allowed: {', '.join(sorted(ORIGIN_DIMENSIONS))}"
        )


_MOST_FAILURES = 3
"""Maximum on standard error; the report contains all of them."""


def _refuse_nothing(ledger: FleetLedger) -> None:
    if any(chunk.lines or chunk.capacity_seconds for chunk in ledger.chunks):
        return
    if ledger.failures:
        raise ExporterError(f"nothing could be read: {ledger.failures[0].what}: {ledger.failures[0].reason}")
    why = "; ".join(ledger.notes) or "is the window right, and does the store or Prometheus reach back so far?"
    raise ExporterError(f"there is no ledger in this period: {why}")


def _of_a_fleet(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    """Read the ledger and write the report; return the exit code.

    Raises:
        ConfigError: Lists all mistakes.
        ExporterError: The ledger cannot be read, or the report cannot be written.
    """
    # All values of a report stay in use to the end; a search for cycles in them would take a quarter of the time.
    gc.disable()
    now = time.time()
    task = _settle(namespace, problems, now)
    for path in (namespace.output, _metadata_of(namespace.output) if task.is_focus else None):
        check_output(path)
    for warning in task.book.warnings if task.book else ():
        say(f"warning: {warning}")
    ledger = asyncio.run(task.read(task.window))
    _refuse_nothing(ledger)
    filters = task.question.filters
    unknown = unknown_labels(ledger, (*task.question.by, *filters.wanted))
    if unknown and filters == filters.by_label and not ledger.failures:
        raise ConfigError(f"--by, --filter: {unknown}")
    if task.is_focus:
        _write_focus(ledger, task, namespace, now)
        trust = make_report(ledger, Question(filters=filters)).trust
        whole = not ledger.failures
    else:
        trust = _write(ledger, task, namespace)
        whole = trust.whole
    whole &= _is_covered(trust, namespace.min_coverage or 0.0)
    if ledger.failures:
        say(f"the report is not whole: {len(ledger.failures)} failed queries")
        for failure in ledger.failures[:_MOST_FAILURES]:
            say(failure_words(failure))
    return 0 if whole else EXIT_PARTIAL


def _is_covered(trust: Trust, least: float) -> bool:
    """Return whether enough of the period's hours were recorded; if not, report it."""
    coverage = trust.period_coverage_ratio
    if coverage is None or coverage >= least:
        return True
    hours = f"{trust.recorded_hours:,} of {trust.expected_hours:,}"
    say(
        f"coverage: {percent_down(coverage)} of the hours were recorded ({hours}),"
        f" less than --min-coverage {percent_down(least)}"
    )
    return False


def _write(ledger: FleetLedger, task: _Task, namespace: argparse.Namespace) -> Trust:
    question, prices = task.question, task.book.description or "none" if task.book else ""
    report = make_report(ledger, question, prices)
    if before := period_before(task.window, namespace.timezone or UTC):
        report = compared(report, make_report(asyncio.run(task.read(before)), question))
    _warn_of_nothing(question.filters, is_empty=not report.held and not report.apart)
    with output(namespace.output) as stream:
        write_fleet(report, namespace.format, stream, top=namespace.top, with_notes=namespace.with_notes)
    return report.trust


def _warn_of_nothing(filters: Filters, *, is_empty: bool) -> None:
    if filters.wanted and is_empty:
        say(f"warning: nothing matches {filters.words}; a report without the filter shows the names")


def _write_focus(ledger: FleetLedger, task: _Task, namespace: argparse.Namespace, now: float) -> None:
    version = namespace.focus_version or DEFAULT_VERSION
    names = {flag.replace("-", "_") for flag, _, _ in _FOCUS_NAMES}
    settings = FocusSettings(
        created_seconds=now,
        restated=bool(namespace.focus_restated),
        filters=task.question.filters.words,
        **{name: text for name in names if (text := getattr(namespace, f"focus_{name}"))},
    )
    _warn_of_nothing(task.question.filters, is_empty=not any(chunk.lines for chunk in ledger.chunks))
    beside = _metadata_of(namespace.output)
    with nullcontext() if beside is None else output(beside) as metadata, output(namespace.output) as stream:
        write_focus(ledger, stream, version=version, settings=settings, metadata_stream=metadata)
    unpriced = sum(line.unpriced_seconds for chunk in ledger.chunks for line in chunk.lines.values())
    if unpriced:
        say(f"warning: {unpriced / HOUR_SECONDS:,.1f} GPU-hours had no price and are in no cost; see --price-book")


def _metadata_of(path: Path | None) -> Path | None:
    """Return the path of the metadata of a FOCUS file; ``None`` for a pipe."""
    if path is None or is_written_in_place(path):
        return None
    return path.with_name(f"{path.name}.metadata.json")


def _add_focus_options(parser: Parser) -> None:
    """Add the options of `report --format focus`, which are values that the ledger does not contain."""
    focus = parser.add_argument_group("With --format focus (docs/focus.md)")
    focus.add_argument("--focus-version", choices=VERSIONS, help="version of FOCUS [default: 1.4]")
    for flag, metavar, about in _FOCUS_NAMES:
        focus.add_argument(f"--focus-{flag}", type=of_kind(types.NAME), metavar=metavar, help=about)
    focus.add_argument(
        "--focus-restated",
        action="store_const",
        const=True,
        help="the period was exported before: its charges are corrections (ChargeClass)",
    )


def add_focus(parser: Parser) -> None:
    """Add the subcommand."""
    kinds = parser.add_subparsers(dest="about_focus", metavar="WHAT", required=True, parser_class=Parser)
    columns = command(kinds, "columns", "The columns of a version: what they hold, and which must be there.")
    columns.add_argument("--version", choices=VERSIONS, default=DEFAULT_VERSION, help="version [default: %(default)s]")
    columns.set_defaults(run=alone(_columns))


def _columns(namespace: argparse.Namespace) -> int:
    for column in columns_of(namespace.version).values():
        null = "may be null" if column.nullable else "never null"
        allowed = f": {', '.join(column.allowed)}" if column.allowed else ""
        put(f"{column.name:<38}{column.level:<13}{column.kind:<10}{null}{allowed}")
    return 0
