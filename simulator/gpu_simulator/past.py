"""Creates the past of the demo's fleet: Prometheus blocks, written once a day by a child process and cached."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from exporter.errors import ExporterError
from gpu_simulator.fleet import Writing, write_fleet
from gpu_simulator.fleet_plan import HOUR_SECONDS, RECORDED_AFTER_SECONDS, FleetPlan

NODES = 12
CLUSTERS = ("sim-research", "sim-serving")
_PROMTOOL_SECONDS = 300.0


def demo_fleet(now_seconds: float, days: int) -> FleetPlan:
    """Return the fleet, with a past until the last recorded hour."""
    end = int((now_seconds - RECORDED_AFTER_SECONDS) // HOUR_SECONDS) * HOUR_SECONDS
    return FleetPlan(nodes=NODES, days=days, end_seconds=end, clusters=CLUSTERS)


def make_history(
    fleet: FleetPlan,
    promtool: str,
    blocks: Path,
    *,
    processes: int = 1,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the fleet's past as Prometheus blocks, which takes a minute.

    Args:
        fleet: The fleet.
        promtool: Path of the program that creates the blocks.
        blocks: Directory for the blocks.
        processes: Number of processes that write the series.
        progress: Called with the number of written nodes.

    Raises:
        ExporterError: promtool failed; the message has its output.
    """
    blocks.mkdir(parents=True, exist_ok=True)
    text = blocks.with_suffix(".om")
    # One block of half a year, because promtool reads the complete text for each block.
    command = [promtool, "tsdb", "create-blocks-from", "--max-block-duration=4374h", "--quiet", "openmetrics"]
    try:
        with text.open("w", encoding="utf-8") as output:
            write_fleet(fleet, output, Writing(form="openmetrics", processes=processes), progress)
        made = subprocess.run(  # noqa: S603 - promtool on the PATH, with a file of the simulator
            [*command, str(text), str(blocks)], check=False, capture_output=True, text=True, timeout=_PROMTOOL_SECONDS
        )
        problem = "" if made.returncode == 0 else (made.stderr or made.stdout).strip()[-500:] or "no output"
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    finally:
        text.unlink(missing_ok=True)
    if problem:
        raise ExporterError(f"{promtool}: cannot create the past of the simulated fleet: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The blocks of a fleet in a directory that remains after the demo."""

    fleet: FleetPlan
    promtool: str
    cache: Path

    @property
    def kept(self) -> Path:
        """Return the directory of the blocks, which depends on the day and on the version of the fleet."""
        code = hashlib.sha256()
        here = Path(__file__).parent
        for path in sorted([*here.glob("fleet*"), *here.glob("models*")]):
            code.update(path.read_bytes())
        day = datetime.fromtimestamp(self.fleet.end_seconds, UTC).strftime("%Y-%m-%d")
        return self.cache / f"past-{day}-{self.fleet.days}d-{code.hexdigest()[:8]}"

    @property
    def command(self) -> tuple[str, ...]:
        """Return the command that creates the blocks; each line of its output is the progress in percent."""
        words = (str(self.fleet.days), str(self.fleet.end_seconds), self.promtool, str(self.kept))
        return (sys.executable, "-m", "gpu_simulator.past", *words)

    def load(self, data: Path) -> bool:
        """Copy the blocks to Prometheus' data, each atomically; return False if they do not exist."""
        if not self.kept.is_dir():
            return False
        data.mkdir(parents=True, exist_ok=True)
        blocks = [(block, data / f"{block.name}.tmp") for block in sorted(self.kept.iterdir())]
        for block, copy in blocks:
            shutil.copytree(block, copy)
        for block, copy in blocks:
            copy.rename(data / block.name)
        return True


def main() -> int:
    """Create the past, store it, and remove those of other days."""
    days, end_seconds, promtool, place = sys.argv[1:]  # see Past.command
    os.nice(10)  # pages and alerts of the demo have priority
    plan = FleetPlan(nodes=NODES, days=int(days), end_seconds=int(end_seconds), clusters=CLUSTERS)
    kept = Path(place)
    making = kept.with_name(f"{kept.name}.{os.getpid()}.part")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes incomplete blocks

    def show(nodes: int) -> None:
        sys.stdout.write(f"{_WRITING_PERCENT * nodes // NODES}\n")
        sys.stdout.flush()

    try:
        make_history(plan, promtool, making, processes=min(2, os.cpu_count() or 1), progress=show)
        with suppress(OSError):  # another demo stored it first
            making.rename(kept)
    except (ExporterError, OSError) as error:
        sys.stdout.write(f"{error}\n")
        return 1
    finally:
        shutil.rmtree(making, ignore_errors=True)
    for other in kept.parent.glob("past-*"):
        if other != kept and time.time() - other.stat().st_mtime > _OLD_SECONDS:
            shutil.rmtree(other, ignore_errors=True)
    return 0


_WRITING_PERCENT = 50
"""Progress at the start of promtool, in percent."""
_OLD_SECONDS = 7200.0
"""Age in seconds below which another demo can still write a directory."""

if __name__ == "__main__":
    sys.exit(main())
