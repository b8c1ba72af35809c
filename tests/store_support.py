"""Days of a fleet whose truth is known, and a source that has them: what the store is tested with."""

import dataclasses
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.cost.dimensions import EVERYTHING, UNALLOCATED, UNATTRIBUTED, Dimension, Filters, LineKey
from exporter.cost.ledger import Chunk, Failure, Figures, FleetLedger, Progress, total_of, unseen
from exporter.cost.store import ALL_OF_A_DAY, day_window
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
    """A line of some hours."""
    seconds = ByState(**{name: chance.choice((0.0, chance.uniform(0, DAY_SECONDS))) for name in ByState.__slots__})
    return Figures(
        seconds=seconds + ByState(unprofiled=1),
        unpriced_seconds=0.0 if currencies else seconds.active,
        energy_joules=chance.choice((None, seconds.active * 300)),
        money={code: seconds.scaled(0.001) for code in currencies},
    )


def chunk(day: int, *, seed: int = 0, nodes: int = 3, owners: int = 4, hours: int = 24) -> Chunk:
    """A day of two clusters: pods, what nobody held, what nobody knows."""
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
    """A day as a source reads it to be closed."""
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
    """What the store must say, added up line by line."""
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
    """Equal but for the order in which numbers were added."""
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
    """The same lines with the same figures."""
    assert set(found) == set(expected)
    assert [key for key in expected if not same(found[key], expected[key])] == []


@dataclass
class Known:
    """A source that has some days, and may be broken."""

    days: dict[int, Chunk]
    failing: set[int] = field(default_factory=set)
    """Days of which a question stays unanswered."""
    unanswered: str = 'workload:gpu_ledger:delta1h{quantity="cost"}'
    """What it asks for."""
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
        """As the protocol says."""
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
