"""Runs `report` on a fleet: from options to a written report."""

import argparse
import asyncio
import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from exporter.cli.common import EXIT_PARTIAL, ProgressBar, check_output, is_written_in_place, output, say
from exporter.cli.focus import FOCUS_FLAGS
from exporter.config import price_book
from exporter.config.prometheus_options import PROMETHEUS_OPTIONS, PrometheusSettings, prometheus_settings
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.focus import DEFAULT_VERSION, FocusSettings
from exporter.cost.focus_rows import FOCUS_DIMENSIONS, ORIGIN_DIMENSIONS
from exporter.cost.focus_write import write_focus
from exporter.cost.ledger import (
    HOUR_SECONDS,
    LABEL,
    POOL_NAMES,
    Dimension,
    Filters,
    FleetLedger,
    Window,
    dimension_problem,
    parse_window,
    too_many_labels,
)
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.render import write_fleet
from exporter.cost.render_rows import failure_words
from exporter.cost.report import Trust, dimensions_of, filter_words, make_report, unknown_labels
from exporter.cost.reprice import REPRICE_DIMENSIONS, reprice
from exporter.cost.store import DayStore
from exporter.cost.store_ledger import CombinedLedger, StoreLedger
from exporter.errors import ConfigError, ExporterError
from exporter.model.formatting import percent_down

if TYPE_CHECKING:
    from exporter.cost.query_rows import LedgerSource

_ADDRESS = next(option for option in PROMETHEUS_OPTIONS if option.key == "prometheus")
_SHOWN_WHOLE = ("csv", "json", "focus")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is asked for, without a mistake."""

    window: Window
    by: tuple[Dimension, ...]
    filters: Filters
    dimensions: frozenset[Dimension]
    """What the ledger must be read by."""
    prometheus: PrometheusSettings | None
    store: Path | None
    """One of the two is there."""


def settle_task(namespace: argparse.Namespace, given: Iterable[str], now: float) -> Task:
    """The task; ``given`` are mistakes that are known already.

    Raises:
        ConfigError: With all mistakes at once.
    """
    problems = list(given)
    by = _by("namespace" if namespace.by is None else namespace.by, problems)
    filters = read_filters(namespace.filter or (), problems)
    problems += _contradictions(namespace, filters)
    written = "30d" if namespace.window is None else namespace.window
    window = or_problems(lambda: parse_window(written, now, namespace.timezone or UTC), problems, prefix="--")
    prometheus = prometheus_or_store(
        namespace,
        problems,
        "report: nothing says where to read; give --prometheus URL or --store FILE for a fleet, --agent URL for one"
        " node",
    )
    if problems or window is None:
        raise ConfigError(*problems)
    wanted = FOCUS_DIMENSIONS if namespace.format == "focus" else dimensions_of(by)
    return Task(
        window=window,
        by=by,
        filters=filters,
        dimensions=wanted | REPRICE_DIMENSIONS if namespace.price_book else wanted,
        prometheus=prometheus,
        store=namespace.store,
    )


def prometheus_or_store(namespace: argparse.Namespace, problems: list[str], nowhere: str) -> PrometheusSettings | None:
    """Return how to ask Prometheus; without an address ``None``, and without a store ``nowhere`` among ``problems``."""
    if namespace.prometheus or os.environ.get(_ADDRESS.env):
        return or_problems(lambda: prometheus_settings(namespace, os.environ), problems)
    if namespace.store is None:
        problems.append(nowhere)
    return None


def or_problems(make: Callable[[], _T], problems: list[str], prefix: str = "") -> _T | None:
    """What it makes, or ``None``, and its mistakes among ``problems``."""
    try:
        return make()
    except ConfigError as error:
        problems += [f"{prefix}{problem}" for problem in error.problems]
        return None


def _by(text: str, problems: list[str]) -> tuple[Dimension, ...]:
    found = [_dimension(name, "--by", problems) for name in text.split(",")]
    known = [name for name in found if name is not None]
    problems += [f"--by: {name} is named twice" for name in sorted({name for name in known if known.count(name) > 1})]
    problems += too_many_labels("--by", known)
    return tuple(known)


def _dimension(text: str, flag: str, problems: list[str]) -> Dimension | None:
    name = text.strip() if text.strip().startswith(LABEL) else text.strip().lower()
    name = "pool" if name in POOL_NAMES else name
    if problem := dimension_problem(name):
        problems.append(f"{flag}: value '{text.strip()}' {problem}")
        return None
    return name


def read_filters(texts: Iterable[str], problems: list[str]) -> Filters:
    """What ``--filter`` asks for, each text as ``DIMENSION=VALUE,...``; its mistakes among ``problems``."""
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
    if namespace.top is not None and namespace.format in _SHOWN_WHOLE:
        yield f"--top: {namespace.format} has every line, so that it adds up; leave it out, or take table or html"
    if namespace.format != "focus":
        for flag in FOCUS_FLAGS:
            if getattr(namespace, flag) is not None:
                yield f"--{flag.replace('_', '-')}: does nothing without --format focus; give both"
        return
    for flag in ("by", "share_idle", "share_unallocated"):
        if getattr(namespace, flag) is not None:
            name = flag.replace("_", "-")
            yield f"--{name}: FOCUS settles what its rows are; leave it out, or take another format"
    for dimension in sorted(set(filters.wanted) - ORIGIN_DIMENSIONS):
        yield (
            f"--filter: {dimension} would leave out parts of split charges, which then do not add up; with --format"
            f" focus allowed: {', '.join(sorted(ORIGIN_DIMENSIONS))}"
        )


_MOST_FAILURES = 3
"""On standard error; what is written has all of them."""


async def read_fleet(
    prometheus: PrometheusSettings | None,
    store: Path | None,
    window: Window,
    dimensions: frozenset[Dimension],
    filters: Filters | None = None,
    *,
    by_day: bool = True,
) -> FleetLedger:
    """The ledger of a window; one of ``prometheus`` and ``store`` is there.

    Without ``by_day`` Prometheus is asked for many days at once, which takes a third of the time.

    Raises:
        ExporterError: Nothing can be read, or nothing was recorded in the window.
    """
    async with AsyncExitStack() as stack:
        source, _ = await open_source(stack, prometheus, store, by_day=by_day)
        bar = stack.enter_context(ProgressBar("Reading"))
        ledger = await source.ledger(window, dimensions, filters, bar.told)
    _refuse_nothing(ledger)
    return ledger


async def open_source(
    stack: AsyncExitStack, prometheus: PrometheusSettings | None, store: Path | None, *, by_day: bool = True
) -> "tuple[LedgerSource, PrometheusClient | None]":
    """Open what has the ledger, and the client of Prometheus where that is one of the two; ``stack`` closes them."""
    client: PrometheusClient | None = None
    source: LedgerSource | None = None
    if prometheus is not None:
        client = await stack.enter_async_context(PrometheusClient(prometheus))
        source = PrometheusLedger(client, by_day=by_day)
    if store is not None:
        stored = StoreLedger(stack.enter_context(DayStore.open(store, write=False)))
        source = stored if source is None else CombinedLedger(stored, source)
    assert source is not None  # noqa: S101 - the options say that one of the two is there
    return source, client


def tell_failures(ledger: FleetLedger, whole: str) -> None:
    """Say that something could not be read, if so; ``whole`` is what lacks it."""
    if ledger.failures:
        say(f"{whole} is not whole: {len(ledger.failures)} question(s) stayed unanswered")
        for failure in ledger.failures[:_MOST_FAILURES]:
            say(failure_words(failure))


def _refuse_nothing(ledger: FleetLedger) -> None:
    if any(chunk.lines or chunk.capacity_seconds for chunk in ledger.chunks):
        return
    if ledger.failures:
        raise ExporterError(f"nothing could be read: {ledger.failures[0].what}: {ledger.failures[0].reason}")
    why = "; ".join(ledger.notes) or "is the window right, and does the store or Prometheus reach back so far?"
    raise ExporterError(f"there is no ledger in this period: {why}")


def run(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    """Read, work out, write; the exit code.

    Raises:
        ConfigError: With all mistakes at once.
        ExporterError: Nothing can be read or written.
    """
    # A report is trees of values, all needed to its end: looking for cycles in them takes a quarter of the time.
    gc.disable()
    now = time.time()
    task = settle_task(namespace, problems, now)
    check_output(namespace.output)
    if namespace.format == "focus" and (beside := _metadata_of(namespace.output)):
        check_output(beside)
    book = None
    if namespace.price_book is not None:
        book = price_book.load(namespace.price_book)
        for warning in book.warnings:
            say(f"warning: {warning}")
    # Prices of a book are of a date, and the rows of FOCUS of a day; all else is of the whole window.
    by_day = book is not None or namespace.format == "focus"
    ledger = asyncio.run(
        read_fleet(task.prometheus, task.store, task.window, task.dimensions, task.filters, by_day=by_day)
    )
    labels_alone = task.filters.wanted == task.filters.by_label.wanted
    if labels_alone and not ledger.failures and (unknown := unknown_labels(ledger, (*task.by, *task.filters.wanted))):
        raise ConfigError(f"--by, --filter: {unknown}")
    if book is not None:
        ledger = reprice(ledger, book)
    if namespace.format == "focus":
        whole = _write_focus(ledger, task, namespace, now)
        if namespace.min_coverage:
            whole &= _is_covered(make_report(ledger, (), task.filters).trust, namespace.min_coverage)
    else:
        trust = _write(ledger, task, namespace, book.description or "none" if book else "")
        whole = _is_covered(trust, namespace.min_coverage or 0.0) and trust.whole
    tell_failures(ledger, "the report")
    return 0 if whole else EXIT_PARTIAL


def _is_covered(trust: Trust, least: float) -> bool:
    """Return whether enough of the period's hours were recorded, and say so if not."""
    coverage = trust.period_coverage_ratio
    if coverage is None or coverage >= least:
        return True
    hours = f"{trust.recorded_hours:,} of {trust.expected_hours:,}"
    say(
        f"coverage: {percent_down(coverage)} of the hours were recorded ({hours}),"
        f" less than --min-coverage {percent_down(least)}"
    )
    return False


def _write(ledger: FleetLedger, task: Task, namespace: argparse.Namespace, prices: str) -> Trust:
    report = make_report(
        ledger,
        task.by,
        task.filters,
        share_idle=namespace.share_idle or "none",
        share_unallocated=bool(namespace.share_unallocated),
        prices=prices,
    )
    _warn_of_nothing(task.filters, is_empty=not report.held and not report.apart)
    with output(namespace.output) as stream:
        write_fleet(report, namespace.format, stream, top=namespace.top)
    return report.trust


def _warn_of_nothing(filters: Filters, *, is_empty: bool) -> None:
    if filters.wanted and is_empty:
        say(f"warning: nothing matches {filter_words(filters)}; look for the names in a report without the filter")


def _write_focus(ledger: FleetLedger, task: Task, namespace: argparse.Namespace, now: float) -> bool:
    version = namespace.focus_version or DEFAULT_VERSION
    settings = replace(_focus_settings(namespace, now), filters=filter_words(task.filters))
    _warn_of_nothing(task.filters, is_empty=not any(chunk.lines for chunk in ledger.chunks))
    beside = _metadata_of(namespace.output)
    with nullcontext() if beside is None else output(beside) as metadata, output(namespace.output) as stream:
        write_focus(ledger, stream, version=version, settings=settings, metadata_stream=metadata)
    unpriced = sum(line.unpriced_seconds for chunk in ledger.chunks for line in chunk.lines.values())
    if unpriced:
        say(f"warning: {unpriced / HOUR_SECONDS:,.1f} GPU-hours had no price and are in no cost; see --price-book")
    return not ledger.failures


def _focus_settings(namespace: argparse.Namespace, now: float) -> FocusSettings:
    own = FocusSettings(created_seconds=now, restated=bool(namespace.focus_restated))
    return replace(
        own,
        billing_account_id=namespace.focus_billing_account or own.billing_account_id,
        billing_account_name=namespace.focus_billing_account_name or own.billing_account_name,
        provider=namespace.focus_provider or own.provider,
    )


def _metadata_of(path: Path | None) -> Path | None:
    """Where the metadata of a FOCUS file go: nowhere, beside a pipe."""
    if path is None or is_written_in_place(path):
        return None
    return path.with_name(f"{path.name}.metadata.json")
