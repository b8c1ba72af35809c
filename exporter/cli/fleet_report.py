"""The report of a fleet: from what the user wrote to a written report."""

import argparse
import asyncio
import gc
import time
from dataclasses import replace
from pathlib import Path

from exporter.cli.base import EXIT_PARTIAL, say
from exporter.cli.fleet_reading import read_fleet, tell_failures
from exporter.cli.fleet_task import Task, settle_task
from exporter.cli.output import check_output, is_written_in_place, output
from exporter.config import price_book
from exporter.errors import ConfigError
from exporter.report.fleet.costs import filter_words, make_report, unknown_labels
from exporter.report.fleet.report import Trust
from exporter.report.fleet.reprice import reprice
from exporter.report.fleet.values import HOUR_SECONDS, Filters, FleetLedger
from exporter.report.focus import DEFAULT_VERSION, FocusSettings, write_focus
from exporter.report.render import write_fleet
from exporter.report.render.words import percent


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
        f"coverage: {percent(coverage)} of the hours were recorded ({hours}), less than --min-coverage {percent(least)}"
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
    if beside is None:
        with output(namespace.output) as stream:
            write_focus(ledger, stream, version=version, settings=settings)
    else:
        with output(beside) as metadata, output(namespace.output) as stream:
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
