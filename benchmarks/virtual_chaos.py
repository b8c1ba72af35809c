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
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from virtual_checks import Checks
from virtual_faults import KINDS
from virtual_node import Settings
from virtual_run import Run
from virtual_world import new_world

SEEDS, FAULTS = 300, 50
STEPS_PER_FAULT = 8
QUIET_STEPS = 100
"""Time for all that is new to be shown, once every fault has ended."""


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
