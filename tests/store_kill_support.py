"""A process that closes days and is killed again and again; what it leaves is held against the truth.

Run as a program: DIRECTORY ROUNDS SEED. Prints what was seen as JSON.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from store_support import D1, Known, chunk, day_ledger

from exporter.cost.store import ALL_OF_A_DAY, DayStore, day_window
from exporter.cost.store_ledger import StoreLedger, close_due_days
from exporter.cost.window import DAY_SECONDS

NODES, OWNERS = 5, 6
LONGEST_WAIT_SECONDS = 0.2
DAYS_A_ROUND = 3
MOST_STEPS = 5
"""The days of a round and two that are closed again. A busy machine may do none of them in any fixed time."""


def seed_of(version: int) -> int:
    """Every version of a day has lines of its own."""
    return version


def end_of(days: int) -> float:
    """When that many days are due."""
    return D1 + days * DAY_SECONDS + 3 * 3600.0


def work(path: Path, log: int) -> None:
    """Close the next days, then some of them again, until killed; each is logged when it is told to be on the disk."""
    with DayStore(path).writing(0.0) as store:
        while True:
            done = len(store.closed_days())
            wanted = done + DAYS_A_ROUND
            source = Known(
                {
                    D1 + n * DAY_SECONDS: chunk(D1 + n * DAY_SECONDS, seed=seed_of(1), nodes=NODES, owners=OWNERS)
                    for n in range(done, wanted)
                }
            )
            closing = asyncio.run(close_due_days(store, source, end_of(wanted), from_day=D1))
            for day in closing.closed:
                os.write(log, f"{day} 1\n".encode())
            for day in closing.closed[:2]:
                version = store.restatements(day)[-1].number + 1
                again = chunk(day, seed=seed_of(version), nodes=NODES, owners=OWNERS)
                store.close_day(day_ledger(again), now=end_of(wanted), reason="again")
                os.write(log, f"{day} {version}\n".encode())


def judge(path: Path, told: dict[int, int], newest: int) -> tuple[int, int, list[str]]:
    """Days, versions, and what is wrong with them; the lines are held against the truth of the ``newest`` days."""
    problems: list[str] = []
    with DayStore(path).writing(0.0) as store:
        problems += store.check()
        known = store.closed_days()
        versions = 0
        starts = [day.window.start_seconds for day in known]
        if starts != [D1 + n * DAY_SECONDS for n in range(len(starts))]:
            problems.append("a day is lost or doubled")
        for day in known:
            start = day.window.start_seconds
            versions += len(store.restatements(start))
            if day.version < told.get(start, 0):
                problems.append(f"{day.window.label}: version {told[start]} was told and {day.version} is there")
            if day not in known[-newest:]:
                continue
            truth = chunk(start, seed=seed_of(day.version), nodes=NODES, owners=OWNERS)
            found = asyncio.run(StoreLedger(store).ledger(day_window(start), ALL_OF_A_DAY)).chunks[0]
            if found.lines != truth.lines or found.capacity_seconds != truth.capacity_seconds:
                problems.append(f"{day.window.label}: version {day.version} is not what was closed")
        problems += [f"{day} was told and is not there" for day in told if day not in starts]
    return len(known), versions, problems


def lines_of(log: Path) -> list[str]:
    """Return the whole lines of the log: days and versions that are on the disk."""
    return log.read_text().splitlines() if log.exists() else []


def wait_for_steps(child: int, log: Path, steps: int) -> None:
    """Wait until the log has so many lines, or the child has ended by itself."""
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while len(lines_of(log)) < steps and os.waitid(os.P_PID, child, ended) is None:
        time.sleep(0.002)


def main(directory: Path, rounds: int, seed: int) -> None:
    """Kill ``rounds`` closing processes at random moments."""
    chance = random.Random(seed)  # noqa: S311 - moments to kill, not secrets
    log = directory / "log"
    days = versions = 0
    problems: list[str] = []
    for number in range(rounds):
        child = os.fork()
        if child == 0:
            try:
                work(directory / "store", os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
            finally:
                os._exit(1)
        wait_for_steps(child, log, len(lines_of(log)) + chance.randrange(MOST_STEPS + 1))
        time.sleep(chance.uniform(0.0, LONGEST_WAIT_SECONDS))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "a round ended by itself"
        told = {}
        for line in lines_of(log):
            day, version = line.split()
            told[int(day)] = int(version)
        days, versions, found = judge(directory / "store", told, 2 * DAYS_A_ROUND if number + 1 < rounds else 10_000)
        problems += found
    print(json.dumps({"rounds": rounds, "days": days, "versions": versions, "problems": problems}))  # noqa: T201 - what the test reads


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
