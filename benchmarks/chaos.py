"""Chaos: real agents with real children under random faults; compares every page with the truth (`make chaos`).

python benchmarks/chaos.py --seeds 1..200            # each seed on a separate node
python benchmarks/chaos.py --seeds 17 --show         # print a seed's schedule and run it again
python benchmarks/chaos.py --seeds 1..20 --together  # one agent runs all of them: does anything grow?
"""

import argparse
import asyncio
import math
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

import chaos_schedule
import chaos_world
from chaos_invariants import Judge
from chaos_machine import Machine, Weight, built_clock
from chaos_node import ChaosNode
from chaos_schedule import CLOCK_LIKE, GPU_HANG, Injection, Schedule
from measure import cpu
from page_checks import tables

from gpu_simulator.truth import Fault

WELL_SECONDS = 30.0
"""Longest time from the last fault to the recovery of a node."""
AFTER_SECONDS, AFTER_SECONDS_MOST, AFTER_PAGES = 1.2, 12.0, 12
"""Least time, most time and least number of pages of the CPU measurement after the recovery."""
BUSY_RATIO = 0.5
"""Most cores per process: more than twice the need of any process at five samples a second."""
BETWEEN_SECONDS = 14.0
"""Time between the schedules of one agent: longer than any recovery so far."""
MOST_FILES = 4
GROWTH = {"threads": 4, "descriptors": 10, "series": 100, "memory_kib": 24 * 1024}
"""Most growth of an agent since its first schedule: further pods, devices and layouts can exist."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Result of one node."""

    seeds: tuple[int, ...]
    faults: Counter[str]
    judge: Judge
    recovered_seconds: list[float] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the result in a line, with some violations of each kind."""
        checks, violations = self.judge.checks, self.judge.violations
        well = ", ".join(f"{seconds:.1f}" for seconds in self.recovered_seconds) or "?"
        counts = f"{self.faults.total()} faults, {checks.total()} checks, {checks['page valid']} pages"
        shown: dict[str, list[str]] = {}
        for at, kind, what in violations:
            shown.setdefault(kind, []).append(f"    {at:7.2f}  {kind}: {what}")
        some = (line for lines in shown.values() for line in lines[:3])
        return "\n".join([f"seeds {self.seeds}: {counts}, well after {well} s, {len(violations)} violations", *some])


async def live(schedules: list[Schedule], clock: Path | None, log: Path | None = None) -> Outcome:
    """Run one agent through schedules, one after the other."""
    starts, injections = _chained(schedules)
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    plan = chaos_world.plan(injections, epoch_unix=time.time(), epoch_monotonic=time.monotonic())
    world = chaos_world.World(plan)
    judge = Judge(world=world, injections=injections, with_dcgm=schedules[0].with_dcgm)
    faults = Counter(one.kind for one in injections)
    outcome = Outcome(seeds=tuple(one.seed for one in schedules), faults=faults, judge=judge)
    try:
        with Machine(directory, clock) as machine:
            async with ChaosNode(directory=directory, world=world, judge=judge, machine=machine) as node:
                for begin, schedule in zip(starts, schedules, strict=True):
                    await _through(node, begin, schedule, outcome)
        return outcome
    finally:
        if log is not None and judge.violations:
            kept = log / f"seed-{schedules[0].seed}"
            shutil.copytree(
                directory, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.sock", "proc", "pods")
            )
        shutil.rmtree(directory, ignore_errors=True)


async def _busy(node: ChaosNode) -> float:
    """Return the cores that each process of the agent uses on average while some pages are served."""
    processes, began, wanted = node.family(), node.now(), node.judge.checks["page valid"] + AFTER_PAGES
    try:
        before = cpu(processes)
        served = node.until(lambda: node.judge.checks["page valid"] >= wanted, AFTER_SECONDS_MOST)
        await asyncio.gather(asyncio.sleep(AFTER_SECONDS), served)
        return (cpu(processes) - before) / (node.now() - began) / max(1, len(processes))
    except OSError:  # a child was replaced
        return math.inf


async def _through(node: ChaosNode, begin: float, schedule: Schedule, outcome: Outcome) -> None:
    """Run a node through one schedule, and wait until it is well again."""
    await node.play(chaos_schedule.shifted(schedule, begin))
    await asyncio.sleep(max(0.0, begin + schedule.seconds - node.now()))
    await node.until_quiet()
    judge, calm_at, lost = node.judge, node.now(), node.lost_seconds

    def unwell() -> str:
        return judge.is_well(node.newest, node.now()) if node.newest is not None else "no page"

    why = "" if await node.until(lambda: not unwell(), WELL_SECONDS) else unwell()
    if not why and node.lost_seconds == lost:
        outcome.recovered_seconds.append(node.now() - calm_at)
    if why and node.newest is not None:
        lines = (f"{key} {value!r}" for key, value in node.newest.values.items())
        (node.directory / "unwell.txt").write_text("\n".join(lines), encoding="utf-8")
    judge.expect("recovers", not why, node.now(), f"not within {WELL_SECONDS:g} s: {why}")
    busy = await _busy(node)
    if busy > BUSY_RATIO:
        # One-time work, such as loading a library on a busy machine, is over now; a busy loop is not.
        busy = await _busy(node)
    judge.expect("no busy loop", busy <= BUSY_RATIO, node.now(), f"{busy:.2f} of a core each")
    _weigh(node, outcome)
    if node.newest is not None:
        judge.shares(node.newest, node.now())


def _chained(schedules: list[Schedule]) -> tuple[list[float], tuple[Injection, ...]]:
    """Return the start of each schedule, and all injections in order."""
    begin, starts = chaos_schedule.BEFORE_SECONDS, list[float]()
    found: list[Injection] = []
    for one in schedules:
        starts.append(begin)
        # The API never gives a node another name while the agent runs.
        found += [
            each
            for each in chaos_schedule.shifted(one, begin)
            if each.kind != Fault.API_OTHER_NODE_NAME or len(starts) == 1
        ]
        begin += one.seconds + BETWEEN_SECONDS
    return starts, tuple(sorted(found, key=lambda one: one.at))


def _weigh(node: ChaosNode, outcome: Outcome) -> None:
    judge, weight = node.judge, node.weigh()
    if weight is None:
        return
    outcome.weights.append(weight)
    # After a hang of a GPU, a second child can run without that GPU.
    now, expected = node.now(), 1 + judge.with_dcgm + any(one.kind == GPU_HANG for one in judge.injections)
    judge.expect("no child too many", weight.children <= expected, now, f"{weight.children} children")
    judge.expect("no file left behind", weight.files <= MOST_FILES, now, f"{weight.files} in the state directory")
    first = outcome.weights[0]
    for what, most in GROWTH.items():
        before, after = getattr(first, what), getattr(weight, what)
        judge.expect(f"no growth of {what}", after <= before + most, now, f"from {before} to {after}")


async def run(arguments: argparse.Namespace, clock: Path | None) -> list[Outcome]:
    """Run all seeds, some of them at the same time."""
    faults, seconds, without = arguments.faults, arguments.seconds, frozenset[str]() if clock else CLOCK_LIKE
    drawn = [
        chaos_schedule.draw(seed, faults=faults, seconds=seconds, without=without) for seed in _seeds(arguments.seeds)
    ]
    groups = [drawn] if arguments.together else [[one] for one in drawn]
    side_by_side = asyncio.Semaphore(arguments.jobs)
    outcomes: list[Outcome] = []

    async def one(group: list[Schedule]) -> None:
        async with side_by_side:
            if arguments.show:
                print(*(one for each in group for one in each.injections), sep="\n", flush=True)
            outcome = await live(group, clock, arguments.log)
            outcomes.append(outcome)
            print(f"{len(outcomes)}/{len(groups)} {outcome}", flush=True)

    await asyncio.gather(*(one(group) for group in groups))
    return outcomes


def _seeds(text: str) -> list[int]:
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        seeds += range(int(first), int(last) + 1) if dots else [int(first)]
    return seeds


def show(outcomes: list[Outcome]) -> None:
    """Print the tables."""
    faults = sum((one.faults for one in outcomes), Counter[str]())
    checks = sum((one.judge.checks for one in outcomes), Counter[str]())
    print(tables(faults, checks, (each for one in outcomes for each in one.judge.violations)))
    recovered = sorted(seconds for one in outcomes for seconds in one.recovered_seconds)
    if recovered:
        high = quantiles([*recovered, recovered[-1]], n=100, method="inclusive")[98]
        print(f"well again after median {median(recovered):.1f} s, p99 {high:.1f} s, longest {recovered[-1]:.1f} s")
    for one in outcomes:
        if len(one.weights) > 1:
            print(*one.weights, sep="\n")
        if one.judge.violations:
            print(f"VIOLATED with seeds {one.seeds}: again with `make chaos SEEDS={one.seeds[0]}`")


def main() -> int:
    """Run and print; return 1 for a violation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1..20", help="such as 17, 1..200 or 1,5,9 [default: 1..20]")
    parser.add_argument("--faults", type=int, default=54, help="faults of a schedule [default: 54]")
    parser.add_argument("--seconds", type=float, default=12.0, help="time within which faults begin [default: 12]")
    parser.add_argument("--jobs", type=int, default=1, help="nodes at the same time [default: 1]")
    parser.add_argument("--together", action="store_true", help="run all seeds with one agent")
    parser.add_argument("--show", action="store_true", help="print each schedule")
    parser.add_argument("--log", type=Path, help="directory for the pages and agents' logs of violations")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop agents and remove mounts on SIGTERM
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-tools-") as directory:
        clock = built_clock(Path(directory))
        outcomes = asyncio.run(run(arguments, clock))
    show(outcomes)
    print("" if clock else f"without a C compiler {sorted(CLOCK_LIKE)} are left out")
    print(f"{time.monotonic() - began:.0f} s in all")
    return 1 if any(one.judge.violations for one in outcomes) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
