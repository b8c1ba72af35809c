"""Years of faults in minutes: the agent's real tick, meters, ledger and pages against a node whose truth is known.

A schedule of faults per seed, all in virtual time: no process, no sleeping. After every tick the books are held against
the truth: every GPU-second has one owner, nothing shown goes back, what was not seen is unknown, money is seconds times
the price of their time.

    python benchmarks/virtual_chaos.py [--seeds N] [--first SEED] [--faults N]
"""

import argparse
import logging
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from virtual_checks import Checks
from virtual_node import Settings
from virtual_run import LAST_WALL, Run
from virtual_world import LAYOUTS, new_world

from exporter.accounting.state_file import VERSION
from exporter.model import DeviceState

SEEDS, FAULTS = 300, 50
STEPS_PER_FAULT = 8
QUIET_STEPS = 100
"""Time for all that is new to be shown, once every fault has ended."""


MOMENTS = (
    datetime(2028, 2, 28, 23, 59, 50, tzinfo=UTC),
    datetime(2028, 2, 29, 23, 59, 50, tzinfo=UTC),
    datetime(2096, 2, 29, 0, 0, 0, tzinfo=UTC),
    datetime(2100, 2, 28, 23, 59, 50, tzinfo=UTC),
    datetime(2038, 1, 19, 3, 14, 2, tzinfo=UTC),
    datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
    datetime(2026, 12, 31, 23, 59, 50, tzinfo=UTC),
)


def _flipped(run: Run, content: bytes) -> bytes:
    changed = bytearray(content or b"{")
    changed[run.random.randrange(len(changed))] ^= 1 << run.random.randrange(8)
    return bytes(changed)


DAMAGES: Mapping[str, Callable[[Run, bytes], bytes]] = {
    "truncated": lambda run, content: content[: run.random.randrange(len(content) + 1)],
    "a bit flipped": _flipped,
    "garbage": lambda run, _: run.random.randbytes(200),
    "empty": lambda _run, _: b"",
    "newer": lambda _run, content: content.replace(b'{"version":%d' % VERSION, b'{"version":9', 1),
}


def _lines(what: str, most: int) -> Callable[[Run], None]:
    return lambda run: run.transport.extend([what] * run.random.randint(1, most))


def _gpu_fails(run: Run) -> None:
    board = run.random.choice(run.world.boards)
    board.state = run.random.choice((DeviceState.LOST, DeviceState.RESET_REQUIRED, DeviceState.FAILED))

    def back() -> None:
        board.state = DeviceState.UP

    run.later(run.random.choice((1.0, 3.0, 20.0, 90.0)), back)


def _gpu_goes(run: Run) -> None:
    board = run.random.choice(run.world.boards)
    board.is_there = False

    def back() -> None:
        board.is_there = True

    run.later(run.random.choice((1.0, 5.0, 50.0, 120.0)), back)


def _gpu_replaced(run: Run) -> None:
    board = run.random.choice(run.world.boards)
    run.world.evict(board)
    run.world.replace_board(board)


def _mig_changes(run: Run) -> None:
    board = run.random.choice(run.world.boards)
    run.world.evict(board)
    board.generation += 1
    board.layout = run.random.choice((*LAYOUTS, ()))
    replicas = 1 if board.layout else run.random.choice((1, 2, 4))
    others = {one.replicas for one in run.world.boards if one is not board and one.replicas > 1}
    board.replicas = max(others) if others and replicas > 1 else replicas  # a plugin divides all alike


def _driver_restarts(run: Run) -> None:
    run.driver_down = True

    def back() -> None:
        run.driver_down = False
        for board in run.world.boards:
            board.energy_joules = 0.0

    run.later(run.random.choice((2.0, 5.0, 30.0)), back)


def _kubelet(what: str, *seconds: float) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        run.kubelet_trouble = what

        def back() -> None:
            run.kubelet_trouble = ""

        run.later(run.random.choice(seconds), back)

    return fault


def _api_down(run: Run) -> None:
    run.api_down = True

    def back() -> None:
        run.api_down = False

    run.later(run.random.choice((5.0, 60.0, 200.0)), back)


def _api_late(run: Run) -> None:
    run.api_late = run.random.choice((5.0, 40.0, 120.0))

    def back() -> None:
        run.api_late = 1.0

    run.later(100.0, back)


def _recreated(run: Run) -> None:
    """Make a pod again under its name, as a StatefulSet or a person does."""
    if not run.world.pods:
        return
    pod = run.random.choice(sorted(run.world.pods.values(), key=lambda one: one.uid))
    run.world.end(pod)

    def again() -> None:
        free = [unit for unit in run.world.free() if unit.device_id == pod.unit.device_id] or run.world.free()
        if free and (pod.namespace, pod.name) not in run.world.pods:
            run.world.start(free[0], name=pod.name, job=pod.job, namespace=pod.namespace)

    run.later(run.random.choice((0.0, 0.0, 3.0, 20.0)), again)


def _lone_pod(run: Run) -> None:
    """Start a pod without a controller, which is an owner of its own."""
    free = run.world.free()
    if free:
        run.world.start(run.random.choice(free), job="")


def _many_short(run: Run) -> None:
    """Let pods of seconds fill every unit for a while."""
    before = run.world.churn, run.world.life_seconds
    run.world.churn, run.world.life_seconds = 0.9, 3.0

    def back() -> None:
        run.world.churn, run.world.life_seconds = before

    if before[1] > 3.0:  # noqa: PLR2004 - else it is so already
        run.later(30.0, back)


def _killed(run: Run) -> None:
    run.kill()
    run.later(run.random.choice((0.0, 1.0, 10.0, 100.0)), run.start_agent)


def _ended(run: Run) -> None:
    run.terminate()
    run.later(run.random.choice((0.0, 2.0, 60.0)), run.start_agent)


def _rebooted(run: Run) -> None:
    run.kill()
    run.boot += 1
    run.boot_t = run.world.t - run.random.uniform(5, 60)
    for board in run.world.boards:
        board.energy_joules = 0.0
    run.later(run.random.choice((0.0, 30.0)), run.start_agent)


def _damaged(run: Run) -> None:
    """Kill the agent and damage what it saved."""
    run.kill()
    path = run.settings.directory / "state" / "ledger.json"
    if path.exists():
        kind = run.random.choice(sorted(DAMAGES))
        path.write_bytes(DAMAGES[kind](run, path.read_bytes()))
        run.lose_state()
    run.later(run.random.choice((0.0, 5.0)), run.start_agent)


def _half_written(run: Run) -> None:
    """Kill the agent in the middle of writing: half a file beside the whole one."""
    run.kill()
    path = run.settings.directory / "state" / "ledger.json"
    if path.exists():
        content = path.read_bytes()
        path.with_name("ledger.json.new").write_bytes(content[: run.random.randrange(len(content) + 1)])
    run.later(0.0, run.start_agent)


def _disk(what: str) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        run.disk = what

        def back() -> None:
            run.disk = ""

        run.later(run.random.choice((5.0, 30.0, 90.0)), back)

    return fault


def _slow_disk(run: Run) -> None:
    run.save_takes = run.random.choice((10.0, 45.0))

    def back() -> None:
        run.save_takes = 0.0

    run.later(60.0, back)


def _clock(*steps: float) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        step = run.random.choice(steps)
        if 0 < run.wall + step < LAST_WALL:
            run.wall_offset += step

    return fault


def _clock_at(run: Run) -> None:
    run.wall_offset = run.random.choice(MOMENTS).timestamp() - run.world.t
    run.reprice()


def _paused(run: Run) -> None:
    run.pause(run.random.choice((2.5, 10.0, 100.0, 4000.0)))


YEAR = 365.25 * 86_400

KINDS: Mapping[str, Callable[[Run], None]] = {
    "readings lost": _lines("lost", 8),
    "readings late": _lines("late", 4),
    "readings twice": _lines("twice", 2),
    "readings out of order": _lines("swapped", 1),
    "readings broken": _lines("broken", 2),
    "driver restarts": _driver_restarts,
    "GPU fails": _gpu_fails,
    "GPU goes and returns": _gpu_goes,
    "GPU replaced": _gpu_replaced,
    "MIG changes": _mig_changes,
    "kubelet away, shorter than expiry": _kubelet("refused", 5.0, 30.0),
    "kubelet away, longer than expiry": _kubelet("deadline", 70.0, 150.0),
    "kubelet lists no pod": _kubelet("starting", 2.0, 30.0, 150.0),
    "kubelet answers garbage": _kubelet("garbage", 5.0, 70.0),
    "API away": _api_down,
    "metadata late": _api_late,
    "pod again under its name": _recreated,
    "pod without a controller": _lone_pod,
    "hundreds of short pods": _many_short,
    "agent killed": _killed,
    "agent ended": _ended,
    "reboot": _rebooted,
    "state damaged": _damaged,
    "state half written": _half_written,
    "disk full": _disk("full"),
    "disk refuses": _disk("refuses"),
    "disk gone": _disk("gone"),
    "disk slow or hung": _slow_disk,
    "clock steps by seconds to days": _clock(-86_400.0, -3600.0, -70.0, -3.0, 3.0, 70.0, 3600.0, 86_400.0),
    "clock steps by years": _clock(-20 * YEAR, -1 * YEAR, YEAR, 5 * YEAR, 50 * YEAR),
    "clock at a leap day or an epoch": _clock_at,
    "machine suspended": _paused,
    "prices change": Run.reprice,
}


@dataclass(slots=True)
class Outcome:
    """What seeds have come to."""

    faults: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    """Violations, told."""
    ticks: int = 0
    seconds: float = 0.0
    pods: int = 0

    def add(self, seed: int, run: Run) -> None:
        """Add a seed."""
        self.faults += run.faults
        self.checks += run.checks.counts
        self.broken += Counter(name for _, name, _ in run.checks.violations)
        first = {name: (at, what) for at, name, what in reversed(run.checks.violations)}
        self.lines += [f"seed {seed}, {at:.1f} s, {name}: {what}" for name, (at, what) in first.items()]
        self.ticks += run.ticks
        self.seconds += run.world.t
        self.pods += len(run.world.known)


def chaos(seed: int, directory: Path, faults: int = FAULTS) -> Run:
    """Let a node live through a schedule; a failure of the agent's own is a violation too."""
    random = Random(seed)  # noqa: S311 - a schedule, not a secret
    world = new_world(random, directory)
    with_limits = random.random() < 0.2  # noqa: PLR2004 - one in five
    settings = Settings(
        directory=directory,
        with_api=random.random() < 0.7,  # noqa: PLR2004 - two in three
        in_pod=random.random() < 0.5,  # noqa: PLR2004 - every other
        save_seconds=random.choice((2.0, 5.0, 20.0)),
        account_limit=12 if with_limits else 2000,
        series_limit=150 if with_limits else 20_000,
    )
    world.churn = random.choice((0.02, 0.1, 0.3))
    world.life_seconds = random.choice((20.0, 100.0, 400.0))
    run = Run(
        random=random,
        world=world,
        settings=settings,
        checks=Checks(world, settings.interval_seconds),
    )
    kinds = sorted(KINDS)
    for _ in range(faults):
        for _ in range(random.randint(1, 2 * STEPS_PER_FAULT)):
            run.step()
        kind = random.choice(kinds)
        run.faults[kind] += 1
        KINDS[kind](run)
    _come_right(run)
    return run


def _come_right(run: Run) -> None:
    """Let every fault end, and look whether all is as if none had been."""
    while run.is_troubled:
        run.step()
    run.start_agent()
    for _ in range(QUIET_STEPS):
        run.step()
    if run.agent is not None:
        run.look(run.agent)
        run.checks.owners(run.agent, run.expected)


def show(outcome: Outcome, seeds: int) -> None:
    """Print the tables."""
    print(f"| fault ({seeds} seeds) | times |\n|---|---:|")
    print("\n".join(f"| {kind} | {outcome.faults[kind]:,} |" for kind in KINDS))
    print(f"| in all | {outcome.faults.total():,} |")
    print("\n| invariant | checks | violations |\n|---|---:|---:|")
    print(
        "\n".join(f"| {name} | {count:,} | {outcome.broken[name]} |" for name, count in sorted(outcome.checks.items()))
    )
    print(f"| in all | {outcome.checks.total():,} | {outcome.broken.total()} |")
    days = outcome.seconds / 86_400
    print(f"\n{outcome.ticks:,} ticks, {days:.1f} days of virtual time, {outcome.pods:,} pods")


def main() -> int:
    """Run and print; 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description="Chaos of the meter in virtual time.")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="how many schedules [default: %(default)s]")
    parser.add_argument("--first", type=int, default=1, help="seed of the first [default: %(default)s]")
    parser.add_argument("--faults", type=int, default=FAULTS, help="of each schedule [default: %(default)s]")
    options = parser.parse_args()
    logging.getLogger("exporter").setLevel(logging.CRITICAL)  # faults are logged, as they should be
    outcome, started = Outcome(), time.monotonic()
    with TemporaryDirectory() as directory:
        for seed in range(options.first, options.first + options.seeds):
            place = Path(directory) / str(seed)
            place.mkdir()
            outcome.add(seed, chaos(seed, place, options.faults))
            shutil.rmtree(place)
            checks, broken = outcome.checks.total(), outcome.broken.total()
            told = f"{seed}: {outcome.faults.total()} faults, {checks} checks, {broken} broken"
            print(told, file=sys.stderr, flush=True)
    show(outcome, options.seeds)
    print(f"{time.monotonic() - started:.0f} s")
    print("\n".join(outcome.lines[:50]))
    return 1 if outcome.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
