"""Reads the duration, results and resource use of rules from a running Prometheus; prints tables."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from remote_write import Prometheus

DEAREST = 15
CPU, ALLOCATED, HEAP = "process_cpu_seconds_total", "go_memstats_alloc_bytes_total", "go_memstats_heap_alloc_bytes"
CYCLES, GOAL = "go_gc_duration_seconds_count", "go_memstats_next_gc_bytes"
FORCED_CYCLES = 3
FREE_PART = 0.3
"""Part of the growth between two garbage collections: the next one begins within this part before its goal."""
ENOUGH_SECONDS, MOST_EVALUATIONS, MOST_DIRTY = 0.3, 10, 3


class Cost(NamedTuple):
    """CPU seconds, without garbage collection, and allocated bytes."""

    cpu: float
    allocated: float


class Meter:
    """Measures the cost of expressions, without garbage collection, which is charged by the bytes allocated.

    A collection of a large heap takes seconds, and begins during whichever evaluation allocates the last byte.
    """

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        prometheus.collect_garbage()
        (begun,) = prometheus.own(CPU)
        for _ in range(FORCED_CYCLES):
            prometheus.collect_garbage()
        end, self._live, goal = prometheus.own(CPU, HEAP, GOAL)
        self._growth = goal - self._live
        self.garbage_cpu = (end - begun) / FORCED_CYCLES / self._growth
        """CPU seconds of garbage collection that one allocated byte causes."""
        self._nothing = Cost(0.0, 0.0)
        self._nothing = self.cost("vector(1)")

    def cost(self, expression: str, at: float | None = None) -> Cost:
        """Return the mean of some evaluations without garbage collection: the server counts hundredths of a second.

        The answer as JSON stands for the samples that a rule writes: its cost is about the same.
        """
        cpu = allocated = 0.0
        clean = dirty = 0
        while cpu < ENOUGH_SECONDS and clean < MOST_EVALUATIONS and dirty < MOST_DIRTY:
            spent, is_clean = self._evaluate(expression, at)
            if is_clean or (dirty == MOST_DIRTY - 1 and not clean):
                cpu, allocated, clean = cpu + spent.cpu, allocated + spent.allocated, clean + 1
            dirty += not is_clean
        return Cost(max(0.0, cpu / clean - self._nothing.cpu), max(0.0, allocated / clean - self._nothing.allocated))

    def _evaluate(self, expression: str, at: float | None) -> tuple[Cost, bool]:
        """Return the cost of one evaluation, without the collections in it, and whether it had none."""
        limit = self._live + (1 - FREE_PART) * self._growth
        if self._prometheus.own(HEAP)[0] > (self._live + limit) / 2:
            self._prometheus.collect_garbage()
        cpu, allocated, cycles = self._prometheus.own(CPU, ALLOCATED, CYCLES)
        self._prometheus.query(expression, at)
        now = self._prometheus.own(CPU, ALLOCATED, CYCLES, HEAP)
        collected = (now[2] - cycles) * self._growth * self.garbage_cpu
        return Cost(max(0.0, now[0] - cpu - collected), now[1] - allocated), now[2] == cycles and now[3] < limit


@dataclass(kw_only=True)
class Figures:
    """Measurements on one fleet; times in seconds, sizes in bytes."""

    gpus: int
    pods: int
    workloads: int
    series: int
    history_hours: float
    intervals: dict[str, float]
    """Intervals of the groups, as in the rules file."""
    costs: dict[tuple[str, int, str], Cost] = field(default_factory=dict)
    """Cost of one evaluation, by group, position and name; without the templates of alerts."""
    garbage_cpu: float = 0.0
    """CPU seconds of garbage collection for each allocated byte."""
    recorded: float = 0.0
    """Recorded series."""
    alerts: float = 0.0
    errors: set[str] = field(default_factory=set)
    resident: tuple[float, float] = (0.0, 0.0)
    """Resident memory before the rules and at the end."""
    cores: float = 0.0
    """Cores used without rules."""

    def seconds(self, key: tuple[str, int, str]) -> tuple[float, float]:
        """Return CPU seconds of one evaluation of a rule, and of the garbage collection that it causes."""
        cost = self.costs.get(key, Cost(0.0, 0.0))
        return cost.cpu, cost.allocated * self.garbage_cpu

    def percents(self, groups: Collection[str]) -> tuple[float, float]:
        """Return the use of a core by groups at their intervals, in percent: evaluation and garbage collection."""
        keys = [key for key in self.costs if key[0] in groups]
        parts = [[100 * seconds / self.intervals[key[0]] for seconds in self.seconds(key)] for key in keys]
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    def load(self, groups: Collection[str]) -> str:
        """Return the same as text, with the sum."""
        percents = self.percents(groups)
        return "{:.2f} + {:.2f} = {:.2f}".format(*percents, sum(percents))


def table(all_figures: Sequence[Figures]) -> str:
    """Return sizes, load per group and the most expensive rules as Markdown."""
    largest = all_figures[-1]
    groups = sorted(largest.intervals, key=lambda name: -sum(largest.percents([name])))
    dearest = sorted(largest.costs, key=lambda key: -sum(largest.seconds(key)))[:DEAREST]
    rows: dict[str, Callable[[Figures], str]] = {
        "pods, workloads": lambda one: f"{one.pods:,}, {one.workloads:,}",
        "longest past, h": lambda one: f"{one.history_hours:g}",
        "series of the agents": lambda one: f"{one.series:,}",
        "series that the rules record": lambda one: f"{one.recorded:,.0f}",
        "alerts, pending and firing": lambda one: f"{one.alerts:,.0f}",
        "all rules at their intervals, % of a core": lambda one: one.load(one.intervals),
        "Prometheus without rules, % of a core": lambda one: f"{100 * one.cores:.0f}",
        "memory of Prometheus without rules, MiB": lambda one: f"{one.resident[0] / 2**20:,.0f}",
        "the same, with rules": lambda one: f"{one.resident[1] / 2**20:,.0f}",
    }
    for name in groups:
        rows[f"{name} ({largest.intervals[name]:g} s), % of a core"] = partial(Figures.load, groups=[name])
    for key in dearest:
        rows[f"`{key[2]}`, s"] = partial(_seconds, key=key)
    heads = ["evaluation + garbage collection", *(f"{one.gpus:,} GPUs" for one in all_figures)]
    lines = [f"| {title} | {' | '.join(map(cell, all_figures))} |" for title, cell in rows.items()]
    return "\n".join([f"| {' | '.join(heads)} |", f"|---|{'---:|' * len(all_figures)}", *lines, ""])


def _seconds(one: Figures, key: tuple[str, int, str]) -> str:
    return "{:.3f} + {:.3f}".format(*one.seconds(key))
