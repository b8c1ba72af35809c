"""What a Prometheus would hold of a corpus: the series that the agents of its nodes show."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from corpus_owners import Labels, OwnedNode, rows_of
from corpus_support import Shape

RECORDED = "workload:gpu_ledger:delta1h"
"""What the rules of the ledger record, taken as given here: the money."""
RECORDED_AFTER_SECONDS = 900.0
GONE = "stale"
"""The marker that Prometheus writes where a series has gone."""

Value = float | str | None
"""A sample, a marker of staleness, or nothing at all."""


@dataclass(slots=True)
class Series:
    """All series of a fleet, sampled at the same times."""

    times: Sequence[float]
    wanted: frozenset[str] | None = None
    """Names of the metrics that are asked for; ``None``: all."""
    rows: dict[tuple[str, Labels], list[Value]] = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], values: Iterable[float | None]) -> None:
        """Add a series; labels without a value are left out, and a series that stops is marked."""
        if self.wanted is not None and name not in self.wanted:
            return
        key = (name, tuple((label, value) for label, value in labels.items() if value))
        made: list[Value] = []
        before: Value = None
        for value in values:
            made.append(GONE if value is None and before is not None else None if value is None else float(value))
            before = value
        if all(value is None for value in made):
            return
        there = self.rows.get(key)
        if there is None:
            self.rows[key] = made
            return
        # The same labels again: a pod of the same name and no UID among the labels.
        twice = [t for t, *both in zip(self.times, there, made, strict=True) if all(isinstance(v, float) for v in both)]
        if twice:
            raise ValueError(f"two series of the name {name} with labels {key[1]} at {twice[0]} s")
        there[:] = [old if new is None or isinstance(old, float) else new for old, new in zip(there, made, strict=True)]

    def text(self) -> Iterator[tuple[str, str]]:
        """(series, values) as promtool reads them."""
        for (name, labels), values in self.rows.items():
            inner = ",".join(f'{label}="{value}"' for label, value in labels)
            yield f"{name}{{{inner}}}", " ".join(_runs(values))


def _runs(values: Sequence[Value]) -> Iterator[str]:
    """Values as promtool reads them, straight runs put together."""
    index = 0
    while index < len(values):
        value = values[index]
        last = index
        if isinstance(value, float):
            step = _step(values, index)
            while step is not None and _step(values, last) == step:
                last += 1
            more = last - index
            sign = "-" if (step or 0) < 0 else "+"
            yield f"{_number(value)}{sign}{_number(abs(step or 0))}x{more}" if more else _number(value)
        else:
            while last + 1 < len(values) and values[last + 1] == value:
                last += 1
            times = last - index + 1
            yield GONE if value == GONE else f"_x{times}"
        index = last + 1


def _step(values: Sequence[Value], index: int) -> float | None:
    if index + 1 >= len(values):
        return None
    one, two = values[index], values[index + 1]
    return round(two - one, 6) if isinstance(one, float) and isinstance(two, float) else None


def _number(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".") or "0"


class _Agents:
    """The agents of a shape: when they are scraped, and since when they run."""

    def __init__(self, shape: Shape, times: Sequence[float]) -> None:
        self.outages, self.times = shape.outages, times
        self.lost = {node: shape.lost.numbers(node, len(times)) for node in shape.nodes}
        self.restarts = [outage for outage in shape.outages if outage.what.startswith("agent")]
        self.blind = tuple((outage.start, outage.end) for outage in shape.outages if outage.blinds)
        self.driverless = tuple((item.start, item.end) for item in shape.outages if item.what == "driver")

    def scraped(self, node: str, number: int, t: float) -> bool:
        if any(outage.start <= t < outage.end for outage in self.outages if outage.what != "driver"):
            return False
        return number not in self.lost[node]

    def started(self, t: float) -> float:
        """When the process that runs at ``t`` started."""
        return max((item.end for item in self.restarts if item.end <= t), default=0.0)

    def marked(self, t: float) -> bool:
        """Whether a missing sample is marked: not where Prometheus itself was away."""
        return not any(item.what == "prometheus" and item.start <= t < item.end for item in self.outages)

    def generations(self) -> Iterator[tuple[str, float, float]]:
        """(suffix of the agent's pod, from, to): a rollout makes another pod."""
        edges = [0.0, *(item.end for item in self.restarts if item.what == "agent-replaced"), float("inf")]
        for number, (start, end) in enumerate(pairwise(edges)):
            yield f"agent-{number}", start, end


class Page:
    """Adds what one shape's agents show."""

    def __init__(self, shape: Shape, series: Series) -> None:
        self.shape, self.series, self.times = shape, series, series.times
        self.agents = _Agents(shape, series.times)
        self.scraped = {
            node: [t < shape.lasts and self.agents.scraped(node, number, t) for number, t in enumerate(self.times)]
            for node in shape.nodes
        }
        self.unmarked = [index for index, t in enumerate(self.times) if not self.agents.marked(t)]

    def add(self, name: str, node: str, labels: Mapping[str, str], values: Iterable[float | None]) -> None:
        """Add a series as Prometheus gets it: with the target's labels, and without what was not scraped."""
        if self.series.wanted is not None and name not in self.series.wanted:
            return
        values = list(values)
        for pod, start, end in self.agents.generations():
            target = self.target(node, pod)
            seen = [
                value if scraped and start <= t < end else None
                for t, scraped, value in zip(self.times, self.scraped[node], values, strict=True)
            ]
            self.series.add(name, {**labels, **target}, seen)
            self._unmark(name, {**labels, **target})

    def _unmark(self, name: str, labels: Mapping[str, str]) -> None:
        """Take the markers away where Prometheus was not there to write them."""
        row = self.series.rows.get((name, tuple((label, value) for label, value in labels.items() if value)))
        for index in self.unmarked:
            if row is not None and row[index] == GONE:
                row[index] = None

    def everything(self) -> None:
        """Add all series of the shape."""
        restarts = [(item.end, item.what == "agent-without-state") for item in self.agents.restarts]
        away = [(item.start, item.end) for item in self.agents.restarts]
        costs: dict[Labels, dict[float, float]] = {}
        for node in self.shape.nodes:
            self.process(node)
            owned = OwnedNode(self.shape, node, self.times, self.agents.blind, restarts)
            series: dict[tuple[str, Labels], list[float | None]] = {}
            for number, view in enumerate(owned.views(away)):
                for name, labels, value in rows_of(view, node) if view else ():
                    series.setdefault((name, labels), [None] * len(self.times))[number] = value
            for (name, labels), values in series.items():
                self.add(name, node, dict(labels), values)
            for key, hour, money in owned.costs():
                of_key = costs.setdefault(key, {})
                of_key[hour] = of_key.get(hour, 0.0) + money
        for key, by_hour in costs.items():
            recorded = (by_hour.get(t - RECORDED_AFTER_SECONDS) for t in self.times)
            self.series.add(RECORDED, {**dict(key), "quantity": "cost"}, recorded)

    def process(self, node: str) -> None:
        """Add what Prometheus and the agent's process show of a target."""
        self.add("process_start_time_seconds", node, {}, (self.agents.started(t) for t in self.times))
        present = float(sum(board.node == node for board in self.shape.boards))
        self.add("gpu_devices", node, {"node": node, "state": "present"}, (present for _ in self.times))
        for pod, start, end in self.agents.generations():
            answers = (
                float(self.agents.scraped(node, number, t))
                if start <= t < min(end, self.shape.lasts) and self.agents.marked(t)
                else None
                for number, t in enumerate(self.times)
            )
            self.series.add("up", self.target(node, pod), answers)

    @staticmethod
    def target(node: str, pod: str) -> dict[str, str]:
        """Return the labels of a target."""
        return {
            "job": "gpu-cost/gpu-cost-exporter",
            "instance": f"{node}:9400",
            "namespace": "gpu-cost",
            "pod": f"{pod}-{node}",
        }
