"""Years of faults in minutes: the agent's real tick, meters, ledger and pages against a node with a known truth.

A seed gives a schedule of faults, all in virtual time: no process, no sleep. The books are compared with the truth
after every tick. Every GPU-second has one owner, shown counters never decrease, unseen time is unknown, and money is
seconds times the price of their time.

python benchmarks/virtual_chaos.py [--seeds N] [--first SEED] [--faults N]
"""

import argparse
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from page_checks import Violation, tables
from virtual_checks import Checks, Expected
from virtual_node import Settings
from virtual_run import LAST_WALL, Run
from virtual_world import LAYOUTS, new_world

from exporter.accounting.state_file import VERSION
from exporter.model.devices import DeviceState

Fault = Callable[[Run], None]
SEEDS, FAULTS = 300, 50
STEPS_PER_FAULT = 8
QUIET_STEPS = 100
"""Steps after the end of every fault, until everything new is shown."""


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


def _lines(what: str, most: int) -> Fault:
    return lambda run: run.transport.extend([what] * run.random.randint(1, most))


def _lasts(part: str, whats: Sequence[object], *seconds: float) -> Fault:
    """Return a fault that affects a part of the node for a time."""

    def fault(run: Run) -> None:
        run.troubles[part] = run.random.choice(whats)
        run.later(run.random.choice(seconds), lambda: run.troubles.pop(part, None))

    return fault


def _gpu(states: Sequence[DeviceState], *seconds: float) -> Fault:
    """Return the fault of a failing GPU, or of one that the driver does not list."""

    def fault(run: Run) -> None:
        board = run.random.choice(run.world.boards)
        board.state = run.random.choice(states)
        run.later(run.random.choice(seconds), board.recover)

    return fault


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
    board.replicas = max(others) if others and replicas > 1 else replicas  # a plugin divides all shared GPUs alike


def _driver_restarts(run: Run) -> None:
    _lasts("driver", ("down",), 2.0, 5.0, 30.0)(run)
    for board in run.world.boards:
        board.energy_joules = 0.0


def _recreated(run: Run) -> None:
    """Create a pod again under its name, as a StatefulSet or a person does."""
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
    """Start a pod without a controller, which is itself an owner."""
    free = run.world.free()
    if free:
        run.world.start(run.random.choice(free), job="")


def _killed(run: Run, *seconds: float) -> None:
    run.kill()
    run.later(run.random.choice(seconds), run.start_agent)


def _ended(run: Run) -> None:
    run.terminate()
    run.later(run.random.choice((0.0, 2.0, 60.0)), run.start_agent)


def _rebooted(run: Run) -> None:
    _killed(run, 0.0, 30.0)
    run.boot += 1
    run.boot_t = run.world.t - run.random.uniform(5, 60)
    for board in run.world.boards:
        board.energy_joules = 0.0


def _damaged(run: Run) -> None:
    """Kill the agent and damage its saved state."""
    _killed(run, 0.0, 5.0)
    path = run.settings.directory / "state" / "ledger.json"
    if path.exists():
        kind = run.random.choice(sorted(DAMAGES))
        path.write_bytes(DAMAGES[kind](run, path.read_bytes()))
        run.on_disk = Expected()
        run.checks.agent_began(all_was_saved=False)


def _half_written(run: Run) -> None:
    """Kill the agent in the middle of a write: half a file next to the whole one."""
    _killed(run, 0.0)
    path = run.settings.directory / "state" / "ledger.json"
    if path.exists():
        content = path.read_bytes()
        path.with_name("ledger.json.new").write_bytes(content[: run.random.randrange(len(content) + 1)])


def _clock(*steps: float) -> Fault:
    def fault(run: Run) -> None:
        step = run.random.choice(steps)
        if 0 < run.wall + step < LAST_WALL:
            run.wall_offset += step

    return fault


def _clock_at(run: Run) -> None:
    run.wall_offset = run.random.choice(MOMENTS).timestamp() - run.world.t
    run.reprice()


def _paused(run: Run) -> None:
    """Suspend the machine: time passes without a sample."""
    run.world.pass_time(run.random.choice((2.5, 10.0, 100.0, 4000.0)))


YEAR = 365.25 * 86_400

KINDS: Mapping[str, Fault] = {
    "readings lost": _lines("lost", 8),
    "readings late": _lines("late", 4),
    "readings twice": _lines("twice", 2),
    "readings out of order": _lines("swapped", 1),
    "readings broken": _lines("broken", 2),
    "driver restarts": _driver_restarts,
    "GPU fails": _gpu((DeviceState.LOST, DeviceState.RESET_REQUIRED, DeviceState.FAILED), 1.0, 3.0, 20.0, 90.0),
    "GPU goes and returns": _gpu((DeviceState.MISSING,), 1.0, 5.0, 50.0, 120.0),
    "GPU replaced": _gpu_replaced,
    "MIG changes": _mig_changes,
    "kubelet away, shorter than expiry": _lasts("kubelet", ("refused",), 5.0, 30.0),
    "kubelet away, longer than expiry": _lasts("kubelet", ("deadline",), 70.0, 150.0),
    "kubelet lists no pod": _lasts("kubelet", ("starting",), 2.0, 30.0, 150.0),
    "kubelet answers garbage": _lasts("kubelet", ("garbage",), 5.0, 70.0),
    "API away": _lasts("API", ("down",), 5.0, 60.0, 200.0),
    "metadata late": _lasts("metadata", (5.0, 40.0, 120.0), 100.0),
    "pod again under its name": _recreated,
    "pod without a controller": _lone_pod,
    "hundreds of short pods": _lasts("pods", ("short",), 30.0),
    "agent killed": lambda run: _killed(run, 0.0, 1.0, 10.0, 100.0),
    "agent ended": _ended,
    "reboot": _rebooted,
    "state damaged": _damaged,
    "state half written": _half_written,
    "disk full": _lasts("disk", ("full",), 5.0, 30.0, 90.0),
    "disk refuses": _lasts("disk", ("refuses",), 5.0, 30.0, 90.0),
    "disk gone": _lasts("disk", ("gone",), 5.0, 30.0, 90.0),
    "disk slow or hung": _lasts("save", (10.0, 45.0), 60.0),
    "clock steps by seconds to days": _clock(-86_400.0, -3600.0, -70.0, -3.0, 3.0, 70.0, 3600.0, 86_400.0),
    "clock steps by years": _clock(-20 * YEAR, -1 * YEAR, YEAR, 5 * YEAR, 50 * YEAR),
    "clock at a leap day or an epoch": _clock_at,
    "machine suspended": _paused,
    "prices change": Run.reprice,
}


def chaos(seed: int, directory: Path, faults: int = FAULTS) -> Run:
    """Run a node through a schedule; an exception of the agent is a violation, too."""
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
    run = Run(random=random, world=world, settings=settings, checks=Checks(world=world))
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
    """Let every fault end, and check that the state is as without faults."""
    while run.is_troubled:
        run.step()
    run.start_agent()
    for _ in range(QUIET_STEPS):
        run.step()
    if run.agent is not None:
        run.look(run.agent)
        run.checks.owners(run.agent, run.expected)


def main() -> int:
    """Run and print; return 1 for a violation."""
    parser = argparse.ArgumentParser(description="Chaos of the meter in virtual time.")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="number of schedules [default: %(default)s]")
    parser.add_argument("--first", type=int, default=1, help="seed of the first schedule [default: %(default)s]")
    parser.add_argument("--faults", type=int, default=FAULTS, help="faults of each schedule [default: %(default)s]")
    options = parser.parse_args()
    logging.getLogger("exporter").setLevel(logging.CRITICAL)  # faults produce log lines, as expected
    faults, checks, violations, started = Counter[str](), Counter[str](), list[Violation](), time.monotonic()
    for seed in range(options.first, options.first + options.seeds):
        with TemporaryDirectory() as directory:
            run = chaos(seed, Path(directory), options.faults)
        faults += run.faults
        checks += run.checks.checks
        found = run.checks.violations
        violations += found
        counts = f"{run.ticks} ticks, {len(run.world.known)} pods, {run.world.t / 3600:.1f} h, {len(found)} violations"
        print(f"seed {seed}: {counts}", file=sys.stderr, flush=True)
        first = {one.kind: one for one in reversed(found)}
        print("".join(f"seed {seed}, {at:.1f} s, {kind}: {what}\n" for at, kind, what in first.values()), end="")
    print(tables(faults, checks, violations))
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
