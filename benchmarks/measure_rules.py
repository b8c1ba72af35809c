"""What a running Prometheus reports of its rules: how long they take, what they record, what it needs; as tables."""

import json
import statistics
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

DEAREST = 15
CPU, ALLOCATED, HEAP = "process_cpu_seconds_total", "go_memstats_alloc_bytes_total", "go_memstats_heap_alloc_bytes"
CYCLES, GOAL = "go_gc_duration_seconds_count", "go_memstats_next_gc_bytes"
FORCED_CYCLES = 3
FREE_PART = 0.3
"""Of the growth between two garbage collections: the next one begins within this part before its goal."""
ENOUGH_SECONDS, MOST_EVALUATIONS, MOST_DIRTY = 0.3, 10, 3


class Prometheus:
    """The HTTP API of a server on this machine."""

    def __init__(self, port: int) -> None:
        self._port = port

    def reload(self) -> None:
        """Have the configuration and the rules read again."""
        urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/reload", data=b"", timeout=300).close()

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Rows of an instant query."""
        when = {} if at is None else {"time": f"{at:.3f}"}
        rows: list[dict[str, Any]] = self._get("query", query=expression, timeout="10m", **when)["result"]
        return rows

    def groups(self) -> list[dict[str, Any]]:
        """Rule groups with their rules, as ``/api/v1/rules`` has them."""
        groups: list[dict[str, Any]] = self._get("rules")["groups"]
        return groups

    def own(self, *names: str) -> list[float]:
        """Metrics of the server itself: for each the sum over its series."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return [
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))
            for name in names
        ]

    def collect_garbage(self) -> None:
        """Run a garbage collection to its end."""
        urllib.request.urlopen(f"http://127.0.0.1:{self._port}/debug/pprof/heap?gc=1", timeout=600).close()

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        body = urllib.parse.urlencode(query).encode() if query else None
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}", data=body, timeout=660) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data


class Cost(NamedTuple):
    """CPU seconds, without garbage collection, and bytes that are allocated."""

    cpu: float
    allocated: float


class Meter:
    """What expressions cost a server, apart from its garbage collection, which is charged by the bytes allocated.

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
        """Mean of some evaluations without garbage collection, for the server counts hundredths of a second.

        The answer, as JSON, takes the place of the samples that a rule writes: it costs about as much.
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
        """Return what one evaluation costs, less the collections in it, and whether there was none."""
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
    """What was measured on one fleet; times in seconds, sizes in bytes."""

    gpus: int
    pods: int
    workloads: int
    series: int
    history_hours: float
    groups: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    costs: dict[tuple[str, int, str], Cost] = field(default_factory=dict)
    """Of one evaluation, by group, place in it and name; the words of alerts are not in it."""
    garbage_cpu: float = 0.0
    """CPU seconds of garbage collection for each allocated byte."""
    recorded: dict[str, int] = field(default_factory=dict)
    alerts: dict[str, int] = field(default_factory=dict)
    errors: set[str] = field(default_factory=set)
    resident: tuple[float, float] = (0.0, 0.0)
    """Before the rules and at the end."""
    cores: float = 0.0
    """Used without rules."""
    intervals: dict[str, float] = field(default_factory=dict)
    """Of the groups, as the rules file has them."""

    def note(self, groups: Sequence[dict[str, Any]], seen: set[tuple[str, str]]) -> None:
        """Take what one look at the rules says; evaluations that were taken before are passed over."""
        for group in groups:
            if group["lastEvaluation"].startswith("0001") or (group["name"], group["lastEvaluation"]) in seen:
                continue
            seen.add((group["name"], group["lastEvaluation"]))
            self.groups[group["name"]].append(group["evaluationTime"])
            for rule in group["rules"]:
                if rule.get("lastError"):
                    self.errors.add(f"{rule['name']}: {rule['lastError']}")


def table(all_figures: Sequence[Figures]) -> str:
    """Markdown: sizes, load per group, the most expensive rules, and series that are recorded."""
    head = "| | " + " | ".join(f"{one.gpus:,} GPUs" for one in all_figures) + " |"
    line = "|---|" + "---:|" * len(all_figures)
    sizes = [
        ("pods, workloads", [f"{one.pods:,}, {one.workloads:,}" for one in all_figures]),
        ("longest past, h", [f"{one.history_hours:g}" for one in all_figures]),
        ("series of the agents", [f"{one.series:,}" for one in all_figures]),
        ("series that the rules record", [f"{sum(one.recorded.values()):,}" for one in all_figures]),
        ("alerts, pending and firing", [f"{sum(one.alerts.values()):,}" for one in all_figures]),
        ("all rules at their intervals, % of a core", [_load(one, *one.intervals) for one in all_figures]),
        ("Prometheus without rules, % of a core", [f"{100 * one.cores:.0f}" for one in all_figures]),
        ("memory of Prometheus without rules, MiB", [f"{one.resident[0] / 2**20:,.0f}" for one in all_figures]),
        ("the same, with rules", [f"{one.resident[1] / 2**20:,.0f}" for one in all_figures]),
    ]
    largest = all_figures[-1]
    blocks = [head, line, *(f"| {title} | " + " | ".join(cells) + " |" for title, cells in sizes)]
    blocks += [
        "",
        "Group: % of a core, as evaluation + garbage collection; median seconds that it took:",
        "",
        head,
        line,
    ]
    for name in sorted(largest.intervals, key=lambda name: -_percent(largest, name)):
        cells = [f"{_load(one, name)}{_took(one, name)}" for one in all_figures]
        blocks.append(f"| {name} ({largest.intervals[name]:g} s) | " + " | ".join(cells) + " |")
    blocks += ["", "The most expensive rules, CPU seconds of one evaluation + garbage collection:", "", head, line]
    for key in sorted(largest.costs, key=lambda key: -sum(_seconds(largest, key)))[:DEAREST]:
        cells = ["{:.3f} + {:.3f}".format(*_seconds(one, key)) for one in all_figures]
        blocks.append(f"| `{key[2]}` | " + " | ".join(cells) + " |")
    blocks += ["", "Series recorded:", "", head, line]
    for level in sorted({name.partition(":")[0] for name in largest.recorded}):
        cells = [f"{sum(_of_level(one, level)):,} of {len(_of_level(one, level))} names" for one in all_figures]
        blocks.append(f"| `{level}:` | " + " | ".join(cells) + " |")
    return "\n".join([*blocks, ""])


def _of_level(one: Figures, level: str) -> list[int]:
    return [count for name, count in one.recorded.items() if name.partition(":")[0] == level]


def _seconds(one: Figures, key: tuple[str, int, str]) -> tuple[float, float]:
    """CPU seconds of one evaluation of a rule, and of the garbage collection that it causes."""
    cost = one.costs.get(key, Cost(0.0, 0.0))
    return cost.cpu, cost.allocated * one.garbage_cpu


def _shares(one: Figures, groups: Collection[str]) -> tuple[float, float]:
    """Percentages of a core that groups take at their intervals: for evaluation and for garbage collection."""
    parts = [
        [100 * seconds / one.intervals[key[0]] for seconds in _seconds(one, key)]
        for key in one.costs
        if key[0] in groups
    ]
    return sum(part[0] for part in parts), sum(part[1] for part in parts)


def _percent(one: Figures, *groups: str) -> float:
    return sum(_shares(one, groups))


def _load(one: Figures, *groups: str) -> str:
    return "{:.2f} + {:.2f} = {:.2f}".format(*_shares(one, groups), _percent(one, *groups))


def _took(one: Figures, group: str) -> str:
    return f"; {statistics.median(one.groups[group]):.3f}" if group in one.groups else ""
