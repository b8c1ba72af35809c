"""Owners' use in the agent: fed with portions, judged now and then, and kept across restarts in a file of its own."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.accounting.owner_figures import owners_view
from exporter.accounting.state_file import StateFile
from exporter.accounting.windows import Windows
from exporter.errors import StateError
from exporter.model import DeviceView, OwnersView, Portion, Price

LOG = logging.getLogger("exporter.agent")

FILE_NAME = "windows.json"
SAVE_SECONDS = 60.0
"""Time between two saves. What a crash loses counts as unmeasured: a minute leaves the shortest window covered."""
JUDGE_SECONDS = 15.0
"""For so long figures are shown while the holders stay the same: the shortest usual scrape interval."""


@dataclass(slots=True, kw_only=True)
class WindowsSave:
    """Windows to be written, and how that went."""

    file: StateFile
    data: Mapping[str, Any]
    error: StateError | None = None

    def write(self) -> None:
        """Write them; takes as long as the disk. Touches nothing that the agent goes on changing."""
        try:
            self.file.save(self.data)
        except StateError as error:
            self.error = error


@dataclass(slots=True, kw_only=True)
class OwnerWindows:
    """Activity windows of one node and what is shown of them. Their loss never touches the ledger."""

    file: StateFile | None = None
    boot_id: str = ""
    """Of the machine: windows of another boot are not restored."""
    simulated: bool = False
    pace: float = 1.0
    """Seconds of the windows in a second; only on a simulated node another than 1."""
    judge_seconds: float = JUDGE_SECONDS
    windows: Windows = field(default_factory=Windows)
    _view: OwnersView | None = None
    _held: list[object] = field(default_factory=list)
    """What was held when ``_view`` was made."""
    _judge_at: float = 0.0
    _save_at: float = 0.0
    _problem: str = ""

    def restore(self, steady: float, errors: Counter[tuple[str, str]]) -> None:
        """Continue from the file, if it is of this boot; a damaged one is set aside, logged and counted.

        Args:
            steady: Seconds of the monotonic clock, now.
            errors: Counts by (part, reason).
        """
        if self.file is None:
            return
        try:
            state = self.file.load()
            if state is None or not self.boot_id or state.get("boot_id") != self.boot_id:
                return
            if state.get("simulated") is not self.simulated:
                return
            try:
                self.windows = Windows.load(state["windows"], steady * self.pace)
            except (KeyError, ValueError) as error:
                raise self.file.set_aside("state_damaged", f"is damaged: {error!r}") from error
        except StateError as error:
            self._failed(error, errors)

    def add(self, portions: Sequence[Portion], steady: float) -> None:
        """Add the portions of one sample that ended at ``steady``, in seconds of the monotonic clock."""
        if self.pace != 1:
            portions = [_at_pace(portion, self.pace) for portion in portions]
        self.windows.add(portions, steady * self.pace)

    def view(
        self,
        views: Sequence[DeviceView],
        prices: Mapping[str, Price],
        free_shares: Callable[[], Mapping[str, float]],
        *,
        now: float,
        steady: float,
    ) -> OwnersView:
        """Return what owners hold and use; made again when the holders change, and every ``judge_seconds``.

        Args:
            views: GPUs and MIG instances with their holders.
            prices: Price now by UUID of the physical GPU.
            free_shares: As ``Meter.free_shares``.
            now: Unix time.
            steady: Seconds of the monotonic clock.
        """
        held: list[object] = [
            one
            for view in views
            for use in view.pods
            for one in (view.uuid, use.holder.pod, use.holder.container, use.holder.share_ratio)
        ]
        if self._view is None or steady >= self._judge_at or held != self._held:
            if self.pace != 1:
                views = [_clocks_at_pace(view, self.pace) for view in views]
            self._view = owners_view(views, self.windows.at(steady * self.pace), prices, free_shares(), now)
            self._held, self._judge_at = held, steady + self.judge_seconds / self.pace
        return self._view

    def begin_save(self, steady: float, *, last: bool) -> WindowsSave | None:
        """Return what is to be saved now; nothing before it is due, unless the agent ends (``last``)."""
        if self.file is None or (steady < self._save_at and not last):
            return None
        self._save_at = steady + SAVE_SECONDS
        data = {"boot_id": self.boot_id, "simulated": self.simulated, "windows": self.windows.dump()}
        return WindowsSave(file=self.file, data=data)

    def end_save(self, save: WindowsSave, errors: Counter[tuple[str, str]]) -> None:
        """Log and count a save that failed."""
        if save.error is not None:
            self._failed(save.error, errors)
        elif self._problem:
            self._problem = ""
            LOG.info("activity windows are saved again: file=%s", save.file.path)

    def _failed(self, error: StateError, errors: Counter[tuple[str, str]]) -> None:
        errors["windows", error.reason] += 1
        if str(error) != self._problem:
            LOG.warning("%s", error)
        self._problem = str(error)


def _at_pace(portion: Portion, pace: float) -> Portion:
    """Return a portion of a simulated node as if it had lasted so many times as long."""
    return replace(
        portion,
        active_seconds=pace * portion.active_seconds,
        idle_seconds=pace * portion.idle_seconds,
        unknown_seconds=pace * portion.unknown_seconds,
        interval_seconds=pace * (portion.interval_seconds or 0.0),
    )


def _clocks_at_pace(view: DeviceView, pace: float) -> DeviceView:
    """Return a simulated device with ages and idle times that fit its windows."""
    pods = tuple(
        replace(
            use,
            age_seconds=pace * use.age_seconds,
            idle_for_seconds=None if use.idle_for_seconds is None else pace * use.idle_for_seconds,
        )
        for use in view.pods
    )
    return replace(view, pods=pods)
