"""What a Prometheus would hold of a corpus: the series that the agents of its nodes show."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from corpus_support import Board, Outage, Pod, Shape, Track, Use, Workload, combine, total

BIRTH_SECONDS = 75.0
LINGER_SECONDS = 300.0
BUSY_FROM = 0.01
"""The agent's default ``--idle-threshold``."""
GONE = "stale"
"""The marker that Prometheus writes where a series has gone."""

Labels = tuple[tuple[str, str], ...]
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
        self.outages, self.lost, self.times = shape.outages, shape.lost, times
        self.restarts = [outage for outage in shape.outages if outage.what.startswith("agent")]
        self.blind = tuple((outage.start, outage.end) for outage in shape.outages if outage.blinds)
        self.driverless = tuple((item.start, item.end) for item in shape.outages if item.what == "driver")

    def scraped(self, number: int, t: float) -> bool:
        if any(outage.start <= t < outage.end for outage in self.outages if outage.what != "driver"):
            return False
        return not self.lost or number % self.lost != self.lost - 1

    def marked(self, t: float) -> bool:
        """Whether a missing sample is marked: not where Prometheus itself was away."""
        return not any(item.what == "prometheus" and item.start <= t < item.end for item in self.outages)

    def began(self, t: float, since: float) -> float:
        """When the agent that runs at ``t`` first saw what has been there ``since``."""
        return max([since, *(outage.end for outage in self.restarts if outage.end <= t)])

    def forgot(self, t: float) -> Outage | None:
        """The last restart before ``t`` that lost the ledger."""
        lost = [item for item in self.restarts if item.what == "agent-without-state" and item.end <= t]
        return lost[-1] if lost else None

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

    def add(self, name: str, node: str, labels: Mapping[str, str], values: Iterable[float | None]) -> None:
        """Add a series as Prometheus gets it: with the target's labels, and without what was not scraped."""
        if self.series.wanted is not None and name not in self.series.wanted:
            return
        values = list(values)
        for pod, start, end in self.agents.generations():
            target = {
                "job": "gpu-cost/gpu-cost-exporter",
                "instance": f"{node}:9400",
                "namespace": "gpu-cost",
                "pod": f"{pod}-{node}",
            }
            seen: list[float | None] = []
            for number, (t, value) in enumerate(zip(self.times, values, strict=True)):
                there = start <= t < end and t < self.shape.lasts and self.agents.scraped(number, t)
                seen.append(value if there else None)
            self.series.add(name, {**labels, **target}, seen)
            self._unmark(name, {**labels, **target})

    def _unmark(self, name: str, labels: Mapping[str, str]) -> None:
        """Take the markers away where Prometheus was not there to write them."""
        row = self.series.rows.get((name, tuple((label, value) for label, value in labels.items() if value)))
        for index, t in enumerate(self.times):
            if row is not None and row[index] == GONE and not self.agents.marked(t):
                row[index] = None

    def everything(self) -> None:
        """Add all series of the shape."""
        accounts: dict[Labels, list[tuple[Pod, Use]]] = {}
        for workload in self.shape.workloads:
            for pod in workload.pods:
                for use in pod.uses:
                    self.holder(workload, pod, use)
                    node = use.board.node
                    known = self.shape.metadata_from < math.inf
                    account = {
                        "node": node,
                        **self.owner(workload, known=known),
                        "model": use.board.model,
                        "mode": use.mode,
                    }
                    accounts.setdefault(tuple(account.items()), []).append((pod, use))
        for labels, held in accounts.items():
            self.counters("gpu_ledger", dict(labels)["node"], dict(labels), held, linger=None)
        for board in self.shape.boards:
            self.device(board)
        for node in self.shape.nodes:
            self.node(node)

    def owner(self, workload: Workload, *, known: bool) -> dict[str, str]:
        """The owner's labels; without pod metadata the namespace is all."""
        owner = {"workload_namespace": workload.namespace}
        if known:
            owner |= {"workload_kind": workload.kind, "workload_name": workload.name, "team": workload.team}
        return owner

    def holder(self, workload: Workload, pod: Pod, use: Use) -> None:
        """Series of a container on a device."""
        labels = _holder_labels(pod, use)
        node = use.board.node
        here = [pod.start <= t < pod.end for t in self.times]
        driver = use.part.with_unknown(self.agents.driverless)
        busy = use.activity.with_unknown(self.agents.blind)

        def live(values: Iterable[float | None]) -> Iterator[float | None]:
            return (value if there else None for there, value in zip(here, values, strict=True))

        self.whose(workload, pod, use)
        self.add("gpu_pod_share_ratio", node, labels, live(use.share for _ in self.times))
        ages = (t - self.agents.began(t, pod.start) for t in self.times)
        self.add("gpu_pod_age_seconds", node, labels, live(ages))
        activity = live(driver.at(t) for t in self.times)
        self.add("gpu_pod_activity_ratio", node, {**labels, "source": use.source}, activity)
        since = busy.last_busy(self.times, pod.start, BUSY_FROM)
        idle = (
            None if busy.at(t) is None else t - max(last, self.agents.began(t, pod.start))
            for t, last in zip(self.times, since, strict=True)
        )
        self.add("gpu_pod_idle_for_seconds", node, labels, live(idle))
        if pod.alerts_off_until is not None and self.shape.metadata_from < math.inf:
            until = pod.alerts_off_until
            name = "gpu_pod_alerts_off_until_timestamp_seconds"
            self.add(name, node, labels, live(until for _ in self.times))
        self.counters("gpu_pod", node, labels, [(pod, use)], linger=LINGER_SECONDS)

    def whose(self, workload: Workload, pod: Pod, use: Use) -> None:
        """The series that says whose a pod is: another one from when on that is known."""
        for known in (False, True):
            info = {
                **_holder_labels(pod, use),
                "resource": pod.resource,
                "share_mode": use.mode,
                "attribution_source": "device-plugin",
                "share_estimated": "false",
                **self.owner(workload, known=known),
                "workload_class": workload.policy if known else "",
            }
            here = (pod.start <= t < pod.end and (t >= self.shape.metadata_from) is known for t in self.times)
            self.add("gpu_pod_info", use.board.node, info, (1.0 if there else None for there in here))

    def counters(
        self, level: str, node: str, labels: Mapping[str, str], held: Sequence[tuple[Pod, Use]], *, linger: float | None
    ) -> None:
        """The cumulative seconds and money of a holder, or of all holders of an owner."""
        born = min(pod.start for pod, _ in held)
        gone = float("inf") if linger is None else max(pod.end for pod, _ in held) + linger
        sums = [[0.0, 0.0, 0.0] for _ in self.times]
        for pod, use in held:
            track = use.activity.with_unknown(self.agents.blind)
            known = track.integrals(self.times, pod.start, pod.end)
            for into, t, (active, unknown) in zip(sums, self.times, known, strict=True):
                into[0] += use.share * (min(max(t, pod.start), pod.end) - pod.start)
                into[1] += use.share * active
                into[2] += use.share * unknown
        shown = [self.shown(sums, index, t, born, gone) for index, t in enumerate(self.times)]
        board = held[0][1].board
        self.seconds(level, node, labels, shown)
        self.money(level, node, labels, shown, board)

    def shown(
        self, sums: Sequence[Sequence[float]], index: int, t: float, born: float, gone: float
    ) -> tuple[float, float, float] | None:
        """(allocated, active, unknown) on the page at ``t``: 0 for the first 75 s, from 0 where the ledger was lost."""
        if not born <= t < gone:
            return None
        start: Sequence[float] = (0.0, 0.0, 0.0)
        lost = self.agents.forgot(t)
        if lost is not None and lost.end > born:
            last = max((n for n, at in enumerate(self.times) if at <= lost.end), default=0)
            start, born = sums[last], lost.end
        if t < born + BIRTH_SECONDS:
            return (0.0, 0.0, 0.0)
        allocated, active, unknown = (now - then for now, then in zip(sums[index], start, strict=True))
        return (allocated, active, unknown)

    def seconds(
        self, level: str, node: str, labels: Mapping[str, str], shown: Sequence[tuple[float, float, float] | None]
    ) -> None:
        parts: dict[str, Callable[[float, float, float], float]] = {
            "allocated": lambda allocated, _active, _unknown: allocated,
            "active": lambda _allocated, active, _unknown: active,
            "idle": lambda allocated, active, unknown: max(0.0, allocated - active - unknown),
            "unknown": lambda _allocated, _active, unknown: unknown,
        }
        for part, of in parts.items():
            values = (None if row is None else of(*row) for row in shown)
            self.add(f"{level}_{part}_seconds_total", node, labels, values)

    def money(
        self,
        level: str,
        node: str,
        labels: Mapping[str, str],
        shown: Sequence[tuple[float, float, float] | None],
        board: Board,
    ) -> None:
        if level == "gpu_ledger":
            unpriced = (None if row is None else row[0] if board.price is None else 0.0 for row in shown)
            self.add("gpu_ledger_unpriced_seconds_total", node, labels, unpriced)
        if board.price is None:
            return
        rate = board.price / 3600
        priced = {**labels, "currency": board.currency}
        self.add(f"{level}_cost_total", node, priced, (None if row is None else row[0] * rate for row in shown))
        if level == "gpu_ledger":
            idle = (None if row is None else max(0.0, row[0] - row[1] - row[2]) * rate for row in shown)
            self.add("gpu_ledger_idle_cost_total", node, priced, idle)

    def device(self, board: Board) -> None:
        """Series of a GPU, held or not."""
        labels = {"node": board.node, "gpu": str(board.index), "uuid": board.uuid, "model": board.model}
        up = [0.0 if any(a <= t < b for a, b in self.agents.driverless) else 1.0 for t in self.times]
        self.add("gpu_info", board.node, labels, (1.0 for _ in self.times))
        self.add("gpu_up", board.node, labels, up)
        if board.price is not None:
            priced = {**labels, "currency": board.currency, "price_source": "book"}
            self.add("gpu_hourly_price", board.node, priced, (board.price for _ in self.times))
        held = [(pod, use) for w in self.shape.workloads for pod in w.pods for use in pod.uses if use.board == board]
        if not any(use.profile for _, use in held):
            activity = combine([use.part for _, use in held], total) if held else Track((0.0,), (0.0,))
            seen = (activity.with_unknown(self.agents.driverless).at(t) for t in self.times)
            self.add("gpu_activity_ratio", board.node, {**labels, "source": "engine"}, seen)
        taken = [any(pod.start <= t < pod.end for pod, _ in held) for t in self.times]
        for state in ("allocated", "unallocated", "unknown"):
            now = (float(state == ("allocated" if there else "unallocated")) for there in taken)
            self.add("gpu_allocation_state", board.node, {**labels, "state": state}, now)

    def node(self, node: str) -> None:
        """Series of a node and of its agent."""
        boards = [board for board in self.shape.boards if board.node == node]
        for state in ("present", "expected", "advertised"):
            self.add("gpu_devices", node, {"node": node, "state": state}, (float(len(boards)) for _ in self.times))
        lost = [any(a <= t < b for a, b in self.agents.driverless) for t in self.times]
        self.add("gpu_exporter_source_up", node, {"source": "nvml"}, (0.0 if gone else 1.0 for gone in lost))
        self.add("gpu_exporter_source_up", node, {"source": "kubelet"}, (1.0 for _ in self.times))
        self.add("gpu_exporter_snapshot_timestamp_seconds", node, {}, (float(t) for t in self.times))
        unpriced = float(sum(board.price is None for board in boards))
        self.add("gpu_exporter_unpriced_devices", node, {}, (unpriced for _ in self.times))
        target = {"job": "gpu-cost/gpu-cost-exporter", "instance": f"{node}:9400"}
        scraped = enumerate(self.times)
        up = (float(self.agents.scraped(number, t)) if self.agents.marked(t) else None for number, t in scraped)
        self.series.add("up", {**target, "namespace": "gpu-cost", "pod": f"agent-0-{node}"}, up)


def _holder_labels(pod: Pod, use: Use) -> dict[str, str]:
    return {
        "node": use.board.node,
        "gpu": str(use.board.index),
        "uuid": use.device_uuid,
        "gpu_instance": use.instance,
        "mig_profile": use.profile,
        "model": use.board.model,
        "pod_namespace": pod.namespace,
        "pod_name": pod.name,
        "container_name": "main",
        "pod_uid": pod.uid,
    }
