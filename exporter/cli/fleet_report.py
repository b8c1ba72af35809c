"""The report of a fleet: from what the user wrote to a written report."""

import argparse
import asyncio
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from exporter.cli.base import EXIT_PARTIAL, say
from exporter.cli.fleet_task import Task, settle_task
from exporter.cli.output import check_output, is_written_in_place, output
from exporter.cli.progress import ProgressBar
from exporter.config import price_book
from exporter.errors import ExporterError
from exporter.report.fleet.costs import filter_words, make_report
from exporter.report.fleet.prometheus import PrometheusClient
from exporter.report.fleet.reading import PrometheusLedger
from exporter.report.fleet.reprice import reprice
from exporter.report.fleet.values import HOUR_SECONDS, Dimension, FleetLedger
from exporter.report.focus import DEFAULT_VERSION, FocusSettings, write_focus
from exporter.report.render import write_fleet
from exporter.report.render.foot import failure_words
from exporter.report.store import CombinedLedger, DayStore, StoreLedger

if TYPE_CHECKING:
    from exporter.report.fleet.sources import LedgerSource

_MOST_FAILURES = 3
"""On standard error; the report itself has all of them."""


def run(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    """Read, work out, write; the exit code.

    Raises:
        ConfigError: With all mistakes at once.
        ExporterError: Nothing can be read or written.
    """
    now = time.time()
    task = settle_task(namespace, problems, now)
    check_output(namespace.output)
    book = None
    if namespace.price_book is not None:
        book = price_book.load(namespace.price_book)
        for warning in book.warnings:
            say(f"warning: {warning}")
    ledger = asyncio.run(_read(task, task.dimensions))
    _refuse_nothing(ledger)
    if book is not None:
        ledger = reprice(ledger, book)
    whole = (
        _write_focus(ledger, namespace, now)
        if namespace.format == "focus"
        else _write(ledger, task, namespace, now, book.description or "none" if book else "")
    )
    if ledger.failures:
        say(f"the report is not whole: {len(ledger.failures)} question(s) stayed unanswered")
        for failure in ledger.failures[:_MOST_FAILURES]:
            say(failure_words(failure))
    return 0 if whole else EXIT_PARTIAL


async def _read(task: Task, dimensions: frozenset[Dimension]) -> FleetLedger:
    async with AsyncExitStack() as stack:
        source: LedgerSource | None = None
        if task.prometheus is not None:
            source = PrometheusLedger(await stack.enter_async_context(PrometheusClient(task.prometheus)))
        if task.store is not None:
            store = StoreLedger(stack.enter_context(DayStore.open(task.store, write=False)))
            source = store if source is None else CombinedLedger(store, source)
        assert source is not None  # noqa: S101 - settle_task sees to it
        bar = stack.enter_context(ProgressBar("Reading", time.monotonic))
        return await source.ledger(task.window, dimensions, task.filters, bar.told)


def _refuse_nothing(ledger: FleetLedger) -> None:
    if any(chunk.lines or chunk.capacity_seconds for chunk in ledger.chunks):
        return
    if ledger.failures:
        raise ExporterError(f"nothing could be read: {ledger.failures[0].what}: {ledger.failures[0].reason}")
    why = "; ".join(ledger.notes) or "is the window right, and does the store or Prometheus reach back so far?"
    raise ExporterError(f"there is no ledger in this period: {why}")


def _write(ledger: FleetLedger, task: Task, namespace: argparse.Namespace, now: float, prices: str) -> bool:
    report = make_report(
        ledger,
        task.by,
        task.filters,
        now_seconds=now,
        share_idle=namespace.share_idle or "none",
        share_unallocated=bool(namespace.share_unallocated),
        prices=prices,
    )
    if task.filters.wanted and not report.held and not report.apart:
        say(f"warning: nothing matches {filter_words(task.filters)}; look for the names in a report without the filter")
    with output(namespace.output) as stream:
        write_fleet(report, namespace.format, stream, top=namespace.top)
    return report.trust.whole


def _write_focus(ledger: FleetLedger, namespace: argparse.Namespace, now: float) -> bool:
    version = namespace.focus_version or DEFAULT_VERSION
    settings = FocusSettings(created_seconds=now)
    if namespace.output is None or is_written_in_place(namespace.output):
        with output(namespace.output) as stream:
            write_focus(ledger, stream, version=version, settings=settings)
    else:
        beside = namespace.output.with_name(f"{namespace.output.name}.metadata.json")
        with output(beside) as metadata, output(namespace.output) as stream:
            write_focus(ledger, stream, version=version, settings=settings, metadata_stream=metadata)
    unpriced = sum(line.unpriced_seconds for chunk in ledger.chunks for line in chunk.lines.values())
    if unpriced:
        say(f"warning: {unpriced / HOUR_SECONDS:,.1f} GPU-hours had no price and are in no cost; see --price-book")
    return not ledger.failures
