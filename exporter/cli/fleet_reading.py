"""Reads a fleet's ledger for a command: from Prometheus, from the store, or from both, with a bar where it is long."""

import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.cli.base import say
from exporter.cli.progress import ProgressBar
from exporter.config.prometheus_options import PrometheusSettings
from exporter.errors import ExporterError
from exporter.report.fleet.prometheus import PrometheusClient
from exporter.report.fleet.reading import PrometheusLedger
from exporter.report.fleet.values import Dimension, Filters, FleetLedger, Window
from exporter.report.render.foot import failure_words
from exporter.report.store import CombinedLedger, DayStore, StoreLedger

if TYPE_CHECKING:
    from exporter.report.fleet.sources import LedgerSource


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
        bar = stack.enter_context(ProgressBar("Reading", time.monotonic))
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
