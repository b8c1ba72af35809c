"""How far long work is, on the terminal of whoever waits for it; never in pipes and logs."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

# Imports inside functions keep `--help` and `--version` fast.
# ruff: noqa: PLC0415

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from exporter.report.fleet.sources import Progress

_PATIENCE_SECONDS = 1.0


class ProgressBar:
    """A bar on standard error with an estimate of what is left, from the second second on; gone when work is done.

    Args:
        what: What is being done, in a word or two.
        clock: Monotonic seconds.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        self._what, self._clock = what, clock
        self._begun = clock()
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def told(self, progress: "Progress") -> None:
        """Show how far it is."""
        if self._bar is None:
            if not sys.stderr.isatty() or self._clock() - self._begun < _PATIENCE_SECONDS:
                return
            self._bar = _bar()
            self._bar.start()
            self._bar.add_task(self._what)
        self._bar.update(self._bar.task_ids[0], completed=progress.done, total=progress.total)


def _bar() -> "Bar":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
