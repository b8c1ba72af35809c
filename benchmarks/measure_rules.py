"""What a running Prometheus says of its rules: how long they take, what they record, what it needs; as tables."""

import json
import statistics
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DEAREST = 15


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
    history_hours: float
    groups: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    cpu: dict[tuple[str, int, str], float] = field(default_factory=dict)
    """CPU seconds of one evaluation, by group, place in it and name; the words of alerts are not in it."""
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
            for rule in group["rules"]:
                if rule.get("lastError"):
                    self.errors.add(f"{rule['name']}: {rule['lastError']}")


def table(all_figures: Sequence[Figures]) -> str:
    """Markdown: sizes, time per group, the dearest rules, and series that are recorded."""
    head = "| | " + " | ".join(f"{one.gpus:,} GPUs" for one in all_figures) + " |"
    line = "|---|" + "---:|" * len(all_figures)
    sizes = [
        ("pods, workloads", [f"{one.pods:,}, {one.workloads:,}" for one in all_figures]),
        ("longest past, h", [f"{one.history_hours:g}" for one in all_figures]),
        ("series of the agents", [f"{one.series:,}" for one in all_figures]),
        ("series that the rules record", [f"{sum(one.recorded.values()):,}" for one in all_figures]),
        ("alerts, pending and firing", [f"{sum(one.alerts.values()):,}" for one in all_figures]),
        ("CPU of all rules once, s", [f"{sum(one.cpu.values()):.2f}" for one in all_figures]),
        ("CPU of all rules at their intervals, % of a core", [f"{_load(one):.1f}" for one in all_figures]),
        ("CPU of Prometheus without rules, % of a core", [f"{100 * one.cores[0]:.0f}" for one in all_figures]),
        ("memory of Prometheus without rules, MiB", [f"{one.resident[0] / 2**20:,.0f}" for one in all_figures]),
        ("the same, with rules", [f"{one.resident[1] / 2**20:,.0f}" for one in all_figures]),
    ]
    largest = all_figures[-1]
    rows = [f"| {title} | " + " | ".join(cells) + " |" for title, cells in sizes]
    blocks = [
        head,
        line,
        *rows,
        "",
        "Group: CPU seconds of one evaluation; median seconds that it took:",
        "",
        head,
        line,
    ]
    for name in sorted(largest.intervals, key=lambda name: -_group_cpu(largest, name)):
        cells = [f"{_group_cpu(one, name):.3f}{_took(one, name)}" for one in all_figures]
        blocks.append(f"| {name} ({largest.intervals[name]:g} s) | " + " | ".join(cells) + " |")
    blocks += ["", "The dearest rules, CPU seconds of one evaluation:", "", head, line]
    for key in sorted(largest.cpu, key=lambda key: -largest.cpu[key])[:DEAREST]:
        cells = [f"{one.cpu.get(key, 0):.3f}" for one in all_figures]
        blocks.append(f"| `{key[2]}` | " + " | ".join(cells) + " |")
    blocks += ["", "Series recorded:", "", head, line]
    for level in sorted({name.partition(":")[0] for name in largest.recorded}):
        cells = [f"{sum(_of_level(one, level)):,} of {len(_of_level(one, level))} names" for one in all_figures]
        blocks.append(f"| `{level}:` | " + " | ".join(cells) + " |")
    return "\n".join([*blocks, ""])


def _of_level(one: Figures, level: str) -> list[int]:
    return [count for name, count in one.recorded.items() if name.partition(":")[0] == level]


def _group_cpu(one: Figures, group: str) -> float:
    return sum(seconds for key, seconds in one.cpu.items() if key[0] == group)


def _took(one: Figures, group: str) -> str:
    return f"; {statistics.median(one.groups[group]):.3f}" if group in one.groups else ""


def _load(one: Figures) -> float:
    return 100 * sum(_group_cpu(one, name) / interval for name, interval in one.intervals.items())
