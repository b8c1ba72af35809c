"""Days of a fleet with known truth for the store, and a process that closes days until it is killed."""

import asyncio
import dataclasses
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from exporter.cost.dimensions import EVERYTHING, UNALLOCATED, UNATTRIBUTED, Dimension, Filters, LineKey
from exporter.cost.holdings import PAYER, HeldDevice
from exporter.cost.ledger import Chunk, Failure, Figures, FleetLedger, Progress, total_of, unseen
from exporter.cost.store import ALL_OF_A_DAY, DayStore, day_window
from exporter.cost.store_ledger import StoreLedger, close_due_days
from exporter.cost.window import DAY_SECONDS, Window
from exporter.cost.window import chunks as cut
from exporter.errors import PrometheusError
from exporter.model.attribution import NodeFacts
from exporter.model.ledger import ByState

D1 = 20_700 * DAY_SECONDS
"""2026-09-04."""
D2, D3, D4 = (D1 + number * DAY_SECONDS for number in (1, 2, 3))
NOW = D4 + 5 * 3600.0
FACTS = NodeFacts(instance_type="p5.48xlarge", capacity_type="on-demand", region="eu-west-1", gpu_product="H100")


def figures(chance: random.Random, currencies: tuple[str, ...]) -> Figures:
    """Return a line of some hours."""
    seconds = ByState(**{name: chance.choice((0.0, chance.uniform(0, DAY_SECONDS))) for name in ByState.__slots__})
    return Figures(
        seconds=seconds + ByState(unprofiled=1),
        unpriced_seconds=0.0 if currencies else seconds.active,
        energy_joules=chance.choice((None, seconds.active * 300)),
        money={code: seconds.scaled(0.001) for code in currencies},
    )


def chunk(day: int, *, seed: int = 0, nodes: int = 3, owners: int = 4, hours: int = 24) -> Chunk:
    """Return a day of two clusters: pods, unallocated and unattributed time."""
    chance = random.Random(seed * 100_003 + day)  # noqa: S311 - figures, not secrets
    lines: dict[LineKey, Figures] = {}
    for cluster in ("east", "west"):
        for node in range(nodes):
            place = {
                "cluster": cluster,
                "node": f"node-{node}",
                "pool": f"p{node % 2} on-demand",
                "model": f"H{node % 2}00",
                "mode": chance.choice(("exclusive", "mig")),
            }
            for kind in (UNALLOCATED, UNATTRIBUTED):
                lines[LineKey(kind=kind, **place)] = figures(chance, ("USD",))
            for _ in range(owners):
                team = chance.choice(("red", "blue", ""))
                owner = LineKey(
                    namespace=f"ns-{chance.randrange(3)}",
                    kind=chance.choice(("Job", "Deployment", "Pod")),
                    workload=f"w-{chance.randrange(6)}",
                    team=team,
                    labels=chance.choice(("", "project=llm", "environment=dev,project=ads")),
                    **place,
                )
                lines[owner] = figures(chance, chance.choice(((), ("USD",), ("EUR", "USD"))))
    capacity = {
        cluster: sum(line.seconds.total for key, line in lines.items() if key.cluster == cluster)
        for cluster in ("east", "west")
    }
    return Chunk(
        window=day_window(day), lines=lines, capacity_seconds=capacity, recorded_hours={"east": hours, "west": hours}
    )


def day_ledger(of: Chunk, *, simulated: bool = False, failures: tuple[Failure, ...] = ()) -> FleetLedger:
    """Return a day as read from a source to be closed."""
    return FleetLedger(
        window=of.window,
        dimensions=ALL_OF_A_DAY,
        chunks=(of,),
        nodes={(key.cluster, key.node): FACTS for key in of.lines},
        failures=failures,
        engine="Prometheus 2.42.0",
        simulated=simulated,
    )


def summed(
    lines: Mapping[LineKey, Figures], dimensions: frozenset[Dimension], filters: Filters = EVERYTHING
) -> dict[LineKey, Figures]:
    """Return the expected answer of the store, added up line by line."""
    groups: dict[LineKey, list[Figures]] = {}
    for key, line in lines.items():
        if not filters.keep(key):
            continue
        whole = dimensions | {"namespace", "kind"} if "workload" in dimensions else dimensions
        kept = {name: getattr(key, name) for name in whole}
        if key.kind in {UNALLOCATED, UNATTRIBUTED}:
            kept["kind"] = key.kind
        groups.setdefault(LineKey(**kept), []).append(line)
    return {key: total_of(group) for key, group in groups.items()}


def same(one: Figures, other: Figures) -> bool:
    """Return whether figures are equal, except for the order of additions."""
    numbers = [
        (one.unpriced_seconds, other.unpriced_seconds),
        (one.energy_joules or 0.0, other.energy_joules or 0.0),
    ]
    for currency in ("", *one.money):
        amounts = one.amounts(currency), other.amounts(currency)
        numbers += [(mine, theirs) for (_, mine), (_, theirs) in zip(*amounts, strict=True)]
    return (
        all(math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-9) for a, b in numbers)
        and set(one.money) == set(other.money)
        and (one.energy_joules is None) == (other.energy_joules is None)
    )


def assert_lines(found: Mapping[LineKey, Figures], expected: Mapping[LineKey, Figures]) -> None:
    """Assert the same lines with the same figures."""
    assert set(found) == set(expected)
    assert [key for key in expected if not same(found[key], expected[key])] == []


@dataclass
class Known:
    """A source of some days, with faults."""

    days: dict[int, Chunk]
    failing: set[int] = field(default_factory=set)
    """Days with an unanswered query."""
    unanswered: str = 'workload:gpu_ledger:delta1h{quantity="cost"}'
    """The unanswered query."""
    may_pass: bool = True
    down: bool = False
    asked: list[Window] = field(default_factory=list)

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters = EVERYTHING,
        progress: Progress = unseen,
    ) -> FleetLedger:
        """Return the ledger of a window, as in the protocol."""
        if self.down:
            raise PrometheusError("unreachable", "prometheus: cannot connect; start it", retriable=True)
        self.asked.append(window)
        pieces = cut(window)
        chunks = []
        for number, piece in enumerate(pieces, start=1):
            whole = self.days.get(piece.start_seconds // DAY_SECONDS * DAY_SECONDS)
            if whole is None:
                chunks.append(Chunk(window=piece))
            elif piece.start_seconds not in self.failing:
                chunks.append(dataclasses.replace(whole, window=piece, lines=summed(whole.lines, dimensions, filters)))
            progress(number, len(pieces))
        return FleetLedger(
            window=window,
            dimensions=dimensions,
            chunks=tuple(chunks),
            nodes={("east", "node-0"): FACTS},
            failures=tuple(
                Failure(
                    window=piece, what=self.unanswered, reason="no answer in 60 s; try again", may_pass=self.may_pass
                )
                for piece in pieces
                if piece.start_seconds in self.failing
            ),
            engine="Prometheus 2.42.0",
        )


NODES, OWNERS = 5, 6
LONGEST_WAIT_SECONDS = 0.2
DAYS_A_ROUND = 3
MOST_STEPS = 5
"""The days of a round and two that are closed again. A busy machine may do none of them in any fixed time."""


def seed_of(version: int) -> int:
    """Return the seed of a version of a day: every version has other lines."""
    return version


def end_of(days: int) -> float:
    """Return the time at which that many days are due."""
    return D1 + days * DAY_SECONDS + 3 * 3600.0


def work(path: Path, log: int) -> None:
    """Close the next days, then some of them again, until killed; log each one after it is on the disk."""
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


def judge(path: Path, logged: dict[int, int], newest: int) -> tuple[int, int, list[str]]:
    """Return days, versions, and problems; the lines of the ``newest`` days are compared with the truth."""
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
            if day.version < logged.get(start, 0):
                problems.append(f"{day.window.label}: version {logged[start]} was logged, the store has {day.version}")
            if day not in known[-newest:]:
                continue
            truth = chunk(start, seed=seed_of(day.version), nodes=NODES, owners=OWNERS)
            found = asyncio.run(StoreLedger(store).ledger(day_window(start), ALL_OF_A_DAY)).chunks[0]
            if found.lines != truth.lines or found.capacity_seconds != truth.capacity_seconds:
                problems.append(f"{day.window.label}: version {day.version} differs from the closed day")
        problems += [f"{day} was logged and is missing" for day in logged if day not in starts]
    return len(known), versions, problems


def lines_of(log: Path) -> list[str]:
    """Return the whole lines of the log: days and versions that are on the disk."""
    return log.read_text().splitlines() if log.exists() else []


def wait_for_steps(child: int, log: Path, steps: int) -> None:
    """Wait until the log has that many lines, or the child has ended by itself."""
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
        logged = {}
        for line in lines_of(log):
            day, version = line.split()
            logged[int(day)] = int(version)
        days, versions, found = judge(directory / "store", logged, 2 * DAYS_A_ROUND if number + 1 < rounds else 10_000)
        problems += found
    print(json.dumps({"rounds": rounds, "days": days, "versions": versions, "problems": problems}))  # noqa: T201 - the test reads it


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))


END_SECONDS = 1_789_999_200
WEEK = Window(start_seconds=END_SECONDS - 7 * 86_400, end_seconds=END_SECONDS, label="7d")
HOURS = 168.0
H100, A100, L40S, T4 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "Tesla T4"
GB = 1e9


def use(number: int = 0, activity: float = 0.5, /, **others: object) -> HeldDevice:
    """Return a device that was held all the week; ``activity`` is its mean, its 95 % and its peak."""
    figures: dict[str, object] = {
        "cluster": "",
        "node": "n1",
        "uuid": f"GPU-{number}",
        "model": H100,
        "namespace": "ml",
        "kind": "Deployment",
        "workload": "w",
        "team": "t",
        "share_ratio": 1.0,
        "held_hours": HOURS,
        "measured_hours": HOURS,
        "mean_ratio": activity,
        "p95_ratio": activity,
        "peak_ratio": activity,
        "peak_memory_bytes": 70 * GB,
        "memory_total_bytes": 85 * GB,
    }
    values = figures | others
    values["mode"] = "mig" if values.get("mig_profile") else "exclusive" if values["share_ratio"] == 1 else "shared"
    return HeldDevice(**with_owner(values))  # type: ignore[arg-type]


def with_owner(values: dict[str, object]) -> dict[str, object]:
    """Return the values with those of an owner combined."""
    names = {name: str(value) for name, value in values.items() if name in LineKey._fields}
    return {"owner": LineKey(**names), **{name: value for name, value in values.items() if name not in names}}


def ledger(*lines: tuple[LineKey, Figures]) -> FleetLedger:
    """Return a week's ledger of one chunk."""
    return FleetLedger(window=WEEK, dimensions=PAYER, chunks=(Chunk(window=WEEK, lines=dict(lines)),))


def paid(per_hour: float, hours: float, *, currency: str = "USD", **key: str) -> tuple[LineKey, Figures]:
    """Return a line of some GPU-hours at a price."""
    names = {"namespace": "ml", "kind": "Deployment", "workload": "w", "team": "t", "model": H100} | key
    money = {currency: ByState(unprofiled=per_hour * hours)}
    return LineKey(**names), Figures(seconds=ByState(unprofiled=hours * 3600), money=money)


ACTIVE = ByState(unprofiled=1)


def prices_of(uses: Iterable[HeldDevice], per_hour: float, parts: ByState = ACTIVE) -> FleetLedger:
    """Return the cost of these uses at one price, in parts that sum to 1."""
    hours: dict[LineKey, float] = {}
    for one in uses:
        key = one.owner.at(PAYER)
        hours[key] = hours.get(key, 0.0) + one.held_hours * one.share_ratio
    return ledger(
        *(
            (key, Figures(seconds=parts.scaled(held * 3600), money={"USD": parts.scaled(held * per_hour)}))
            for key, held in hours.items()
        )
    )
