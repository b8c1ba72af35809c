"""Keeps closed days: fills the store from what Prometheus has, and closes each day when it is over."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from exporter.errors import ExporterError, StoreError
from exporter.report.fleet.sources import LedgerSource, Progress
from exporter.report.fleet.values import DAY_SECONDS
from exporter.report.store import ClosedDay, DayStore, close_due_days, oldest_day

LOG = logging.getLogger("exporter.service")

EVERY_SECONDS = 3600.0
"""Between two looks for days that are over."""
RETRY_SECONDS = 60.0
BY = "serve"


@dataclass(slots=True, kw_only=True)
class Keeping:
    """The store, where there is one, and what is in it."""

    prometheus: LedgerSource
    path: Path | None
    history_days: int
    changed: Callable[[], None] = field(default=lambda: None)
    """Called when something was closed."""
    problem: str = ""
    """Why days are not kept, in one sentence; empty where all is well."""
    days: tuple[ClosedDay, ...] = ()
    not_closed: int | None = None
    """Days that the last closing left, but for those that wait for hours; ``None`` before it, and without a store."""
    _store: DayStore | None = None
    _oldest_seconds: float | None = None
    _oldest_at: float = 0.0

    @property
    def state(self) -> object:
        """Another one when a day was closed or reopened."""
        return tuple((day.window.start_seconds, day.version) for day in self.days)

    @property
    def first_day_seconds(self) -> float | None:
        """Start of the oldest day that the store or Prometheus has."""
        known = [float(self.days[0].window.start_seconds)] if self.days else []
        return min([*known, *([] if self._oldest_seconds is None else [self._oldest_seconds])], default=None)

    @property
    def closed_until_seconds(self) -> float | None:
        """End of the newest closed day."""
        return float(self.days[-1].window.end_seconds) if self.days else None

    def open(self, now: float) -> None:
        """Open the store to write; where another process does, its days are shown and that is told.

        Raises:
            StoreError: It can neither be read nor written.
        """
        if self.path is None or self._store is not None:
            return
        try:
            self._store = self._opened(self.path, now)
            self.problem = ""
        except StoreError as error:
            if error.reason != "in_use":
                raise
            self.problem = str(error)
        self.days = DayStore.open(self.path, write=False).closed_days()

    @staticmethod
    def _opened(path: Path, now: float) -> DayStore:
        try:
            return DayStore.open(path, write=True, now=now)
        except StoreError as error:
            if error.reason != "damaged":
                raise
            LOG.error("%s", error)  # noqa: TRY400 - the message is all there is to tell: what was damaged is set aside
            return DayStore.open(path, write=True, now=now)

    def close(self) -> None:
        """Let another process write."""
        if self._store is not None:
            self._store.close()
            self._store = None

    async def round(self, now: float) -> None:
        """Close what is due; the oldest day is looked for where it is not known.

        Raises:
            PrometheusError: It cannot be asked.
            StoreError: The store cannot be read or written.
        """
        if self._store is None:
            await asyncio.to_thread(self.open, now)
        midnight = int(now // DAY_SECONDS) * DAY_SECONDS
        if self._oldest_seconds is None or now - self._oldest_at >= DAY_SECONDS:
            self._oldest_seconds = await oldest_day(
                self.prometheus, midnight + DAY_SECONDS, from_day=midnight - self.history_days * DAY_SECONDS
            )
            self._oldest_at = now
        if self._store is None or self._oldest_seconds is None:
            self.changed()
            return
        from_day = None if self.days else int(self._oldest_seconds)
        closing = await close_due_days(
            self._store, self.prometheus, now, from_day=from_day, accept_gaps=True, by=BY, progress=_told
        )
        for left in closing.left:
            LOG.info("a day is not closed", extra={"day": _date(left.day_seconds), "reason": left.reason})
        stuck = [left for left in closing.left if not left.waits]
        self.not_closed = len(stuck)
        self.problem = stuck[0].reason if stuck else ""
        self.days = await asyncio.to_thread(self._store.closed_days)
        self.changed()


def _told(progress: Progress) -> None:
    LOG.info("closing days", extra={"done": progress.done, "due": progress.total})


def _date(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"


async def keep(keeping: Keeping, clock: Callable[[], float], failed: Callable[[ExporterError], str]) -> None:
    """Close days until cancelled; ``failed`` is told what went wrong."""
    while True:
        pause = EVERY_SECONDS
        try:
            await keeping.round(clock())
        except ExporterError as error:
            keeping.problem = failed(error)
            pause = RETRY_SECONDS
        except Exception:
            # The service goes on with what it has; a day that was not closed is closed later.
            LOG.exception("closing days has failed")
            pause = RETRY_SECONDS
        await asyncio.sleep(pause)
