"""What a running Prometheus says of its rules: how long they take, what they record, what it needs; as tables."""

import json
import statistics
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


class Prometheus:
    """The HTTP API of a server on this machine."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ready(self) -> bool:
        """Whether it answers queries yet."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def reload(self) -> None:
        """Have the configuration and the rules read again."""
        urllib.request.urlopen(f"http://127.0.0.1:{self._port}/-/reload", data=b"", timeout=300).close()

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Rows of an instant query."""
        when = {} if at is None else {"time": f"{at:.3f}"}
        rows: list[dict[str, Any]] = self._get("query", query=expression, timeout="10m", **when)["result"]
        return rows

    def query_range(self, expression: str, start: int, end: int, step: int) -> list[dict[str, Any]]:
        """Rows of a range query; Unix times and a step in seconds."""
        times = {"start": str(start), "end": str(end), "step": str(step)}
        rows: list[dict[str, Any]] = self._get("query_range", query=expression, timeout="10m", **times)["result"]
        return rows

    def groups(self) -> list[dict[str, Any]]:
        """Rule groups with their rules, as ``/api/v1/rules`` has them."""
        groups: list[dict[str, Any]] = self._get("rules")["groups"]
        return groups

    def own(self, name: str) -> float:
        """A metric of the server itself: the sum over its series."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        body = urllib.parse.urlencode(query).encode() if query else None
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}", data=body, timeout=660) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data


@dataclass(kw_only=True)
class Figures:
    """What was measured on one fleet; times in seconds, sizes in bytes."""

    gpus: int
    pods: int
    workloads: int
    series: int
    by_metric: dict[str, int] = field(default_factory=dict)
    groups: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    rules: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    recorded: dict[str, int] = field(default_factory=dict)
    alerts: dict[str, int] = field(default_factory=dict)
    errors: set[str] = field(default_factory=set)
    resident: tuple[float, float] = (0.0, 0.0)
    """Before the rules and at the end."""
    cores: tuple[float, float] = (0.0, 0.0)
    intervals: dict[str, float] = field(default_factory=dict)
    """Of the groups, as the rules file has them."""

    def note(self, groups: Sequence[dict[str, Any]], seen: set[tuple[str, str]]) -> None:
        """Take what one look at the rules says; evaluations that were taken before are passed over."""
        for group in groups:
            if group["lastEvaluation"].startswith("0001") or (group["name"], group["lastEvaluation"]) in seen:
                continue
            seen.add((group["name"], group["lastEvaluation"]))
            self.groups[group["name"]].append(group["evaluationTime"])
            counts: dict[str, int] = defaultdict(int)
            for rule in group["rules"]:
                counts[rule["name"]] += 1
                self.rules[group["name"], f"{rule['name']} {counts[rule['name']]}"].append(rule["evaluationTime"])
                if rule.get("lastError"):
                    self.errors.add(f"{rule['name']}: {rule['lastError']}")


def table(all_figures: Sequence[Figures]) -> str:
    """Markdown: sizes, time per group, the dearest rules, and series that are recorded."""
    head = "| | " + " | ".join(f"{one.gpus:,} GPUs" for one in all_figures) + " |"
    line = "|---|" + "---:|" * len(all_figures)
    sizes = [
        ("pods, workloads", [f"{one.pods:,}, {one.workloads:,}" for one in all_figures]),
        ("series of the agents", [f"{one.series:,}" for one in all_figures]),
        ("series that the rules record", [f"{sum(one.recorded.values()):,}" for one in all_figures]),
        ("alerts, pending and firing", [f"{sum(one.alerts.values()):,}" for one in all_figures]),
        ("all groups once, s", [f"{sum(map(_median, one.groups.values())):.3f}" for one in all_figures]),
        ("part of one core that the groups take at their intervals, %", [f"{_load(one):.1f}" for one in all_figures]),
        ("CPU of Prometheus, cores: without rules", [f"{one.cores[0]:.2f}" for one in all_figures]),
        ("the same, with rules", [f"{one.cores[1]:.2f}" for one in all_figures]),
        ("memory of Prometheus, MiB: without rules", [f"{one.resident[0] / 2**20:,.0f}" for one in all_figures]),
        ("the same, with rules", [f"{one.resident[1] / 2**20:,.0f}" for one in all_figures]),
    ]
    largest = all_figures[-1]
    rows = [f"| {title} | " + " | ".join(cells) + " |" for title, cells in sizes]
    blocks = [head, line, *rows, "", "Evaluation of a group, median seconds (interval):", "", head, line]
    for name in sorted(largest.groups, key=lambda name: -_median(largest.groups[name])):
        cells = [f"{_median(one.groups[name]):.3f}" for one in all_figures]
        blocks.append(f"| {name} ({largest.intervals[name]:g} s) | " + " | ".join(cells) + " |")
    blocks += ["", "The dearest rules, median seconds:", "", head, line]
    for key in sorted(largest.rules, key=lambda key: -_median(largest.rules[key]))[:15]:
        cells = [f"{_median(one.rules[key]):.3f}" for one in all_figures]
        blocks.append(f"| `{key[1].removesuffix(' 1')}` | " + " | ".join(cells) + " |")
    blocks += ["", "Series recorded:", "", head, line]
    for name in sorted(largest.recorded, key=lambda name: -largest.recorded[name]):
        cells = [f"{one.recorded.get(name, 0):,}" for one in all_figures]
        blocks.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join([*blocks, ""])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _load(one: Figures) -> float:
    return 100 * sum(_median(values) / one.intervals[name] for name, values in one.groups.items())
