"""One ledger of closed days and of what Prometheus has of the rest."""

from collections.abc import Callable
from itertools import groupby

from exporter.errors import PrometheusError
from exporter.report.fleet import prometheus_errors
from exporter.report.fleet.sources import LedgerSource, Progress
from exporter.report.fleet.values import Dimension, Failure, Filters, FleetLedger, Window
from exporter.report.store.ledger import StoreLedger
from exporter.report.store.values import days_of, is_day


class CombinedLedger:
    """Reads closed days from the store and the rest from Prometheus: a closed day is what it was when it was closed."""

    def __init__(self, store: StoreLedger, rest: LedgerSource) -> None:
        self._store = store
        self._rest = rest

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> FleetLedger:
        """The ledger of the window.

        Raises:
            PrometheusError: Nothing of it is in the store, and Prometheus cannot be asked.
            StoreError: The store cannot be read.
        """
        closed = await self._store.closed()
        runs = _runs(window, closed)
        parts: list[FleetLedger] = []
        problem: PrometheusError | None = None
        for run, is_closed in runs:
            told = _of_part(progress, run, window)
            if is_closed:
                parts.append(await self._store.ledger(run, dimensions, filters, told))
                continue
            if problem is None:
                try:
                    parts.append(await self._rest.ledger(run, dimensions, filters, told))
                    continue
                except PrometheusError as error:
                    if not any(is_closed for _, is_closed in runs):
                        raise
                    problem = error
            parts.append(_unread(run, dimensions, problem))
        return _joined(window, dimensions, parts)


def _runs(window: Window, closed: frozenset[int]) -> list[tuple[Window, bool]]:
    """The window in as few pieces as tell closed days from the rest, and which of them are closed."""
    days = groupby(days_of(window), key=lambda piece: is_day(piece) and piece.start_seconds in closed)
    runs = []
    for is_closed, pieces in days:
        several = tuple(pieces)
        whole = Window(
            start_seconds=several[0].start_seconds, end_seconds=several[-1].end_seconds, label=several[0].label
        )
        runs.append((whole, is_closed))
    return runs


def _of_part(
    progress: Callable[[Progress], None] | None, run: Window, window: Window
) -> Callable[[Progress], None] | None:
    """Progress of a part as progress of the whole, by hours."""
    if progress is None:
        return None
    before = (run.start_seconds - window.start_seconds) // 3600

    def told(part: Progress) -> None:
        done = before + (run.hours * part.done // part.total if part.total else 0)
        progress(Progress(done=done, total=window.hours))

    return told


def _unread(run: Window, dimensions: frozenset[Dimension], problem: PrometheusError) -> FleetLedger:
    failures = tuple(
        Failure(window=piece, what="ledger", reason=str(problem), may_pass=prometheus_errors.may_pass(problem))
        for piece in days_of(run)
    )
    return FleetLedger(window=run, dimensions=dimensions, chunks=(), failures=failures)


def _joined(window: Window, dimensions: frozenset[Dimension], parts: list[FleetLedger]) -> FleetLedger:
    return FleetLedger(
        window=window,
        dimensions=dimensions,
        chunks=tuple(chunk for part in parts for chunk in part.chunks),
        nodes={node: facts for part in parts for node, facts in part.nodes.items()},
        failures=tuple(failure for part in parts for failure in part.failures),
        label_keys=frozenset[str]().union(*(part.label_keys for part in parts)),
        engine=", ".join(dict.fromkeys(part.engine for part in parts if part.engine)),
        simulated=any(part.simulated for part in parts),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )
