"""Owners of a corpus with their windows, and the series of agents and a Prometheus for them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from corpus_support import Pod, Shape, Use, Workload, combine

from exporter.accounting.owner_figures import owners_view
from exporter.accounting.windows import Windows
from exporter.metrics.catalog import shown_until_seconds
from exporter.model.attribution import AllocationState, Holder, Owner, PodFacts, ShareMode
from exporter.model.devices import Gpu, MigInstance
from exporter.model.ledger import (
    Account,
    Bottleneck,
    ByState,
    OwnersView,
    OwnerUse,
    PodAccount,
    Portion,
    Price,
    ResourceProfile,
    shown_windows,
)
from exporter.model.snapshot import DeviceView, PodUse

HOUR = 3600.0
BUSY_FROM = 0.01
"""The agent's default ``--idle-threshold``."""

Labels = tuple[tuple[str, str], ...]
Row = tuple[str, Labels, float]
"""Metric, labels and value."""


@dataclass(slots=True)
class _Held:
    """A container on a device, and its seconds at each time."""

    pod: Pod
    use: Use
    holder: Holder
    account: PodAccount
    gpu: Gpu
    instance: MigInstance | None
    facts: PodFacts
    own: Owner
    """Its owner while the metadata is unknown."""
    seconds: list[ByState]
    """Seconds since it began, by share."""
    idle_for: list[float | None]

    def portion(self, owner: Owner, before: ByState, number: int) -> Portion:
        seconds = self.seconds[number] + before.scaled(-1.0)
        return Portion(
            gpu_uuid=self.gpu.uuid,
            account=Account(owner=owner, model=self.gpu.model, mode=self.holder.mode),
            pod=self.account,
            seconds=replace(seconds, idle=max(0.0, seconds.idle), unprofiled=max(0.0, seconds.unprofiled)),
            interval_seconds=seconds.total,
            estimated=self.use.source == "estimated",
            profile=ResourceProfile((seconds.effective / seconds.total, 0.0, 0.0, 0.0), Bottleneck.STARVED)
            if seconds.profiled
            else None,
        )


class OwnedNode:
    """One node of a shape, tick by tick.

    Args:
        shape: Shape of the node.
        node: Its name.
        times: Times of the ticks, in seconds.
        blind: Spans without samples of the agent.
        restarts: Ends of its restarts; true for a loss of its state.
    """

    def __init__(
        self,
        shape: Shape,
        node: str,
        times: Sequence[float],
        blind: Sequence[tuple[float, float]],
        restarts: Sequence[tuple[float, bool]],
    ) -> None:
        self.shape, self.node, self.times, self.restarts = shape, node, times, restarts
        self._held = [
            self._made(workload, pod, use, blind)
            for workload in shape.workloads
            for pod in workload.pods
            for use in pod.uses
            if use.board.node == node
        ]
        boards = [board for board in shape.boards if board.node == node and board.price is not None]
        self._prices = {
            board.uuid: Price(per_hour=board.price or 0.0, currency=board.currency, source="book:1", as_of="2026-01-01")
            for board in boards
        }

    def views(self, away: Sequence[tuple[float, float]] = ()) -> Iterator[OwnersView | None]:
        """Yield the view at each time within the shape; ``None`` while the agent is ``away``."""
        windows, fed, fed_until = Windows(), [ByState()] * len(self._held), 0.0
        restarts = [end for end, lost in self.restarts if lost]
        for number, t in enumerate(self.times):
            if t >= self.shape.lasts:
                return
            if any(start <= t < end for start, end in away):
                yield None
                continue
            while restarts and restarts[0] <= t:
                windows, _ = Windows(), restarts.pop(0)
            known = t >= self.shape.metadata_from
            portions = []
            for index, held in enumerate(self._held):
                if held.pod.start < t and fed_until < held.pod.end:
                    owner = held.facts.owner if known else held.own
                    portions.append(held.portion(owner, fed[index], number))
                    fed[index] = held.seconds[number]
            fed_until = t
            windows.add(portions, t)
            views = self._devices(number, t, known=known)
            yield owners_view(views, windows.at(t), self._prices, {}, t)

    def costs(self) -> Iterator[tuple[Labels, float, float]]:
        """Yield the cost of each hour: (labels, end of the hour, money), as the rules of the ledger record it."""
        hours = [number for number, t in enumerate(self.times) if t % HOUR == 0]
        for held in self._held:
            price, owner = self._prices.get(held.gpu.uuid), held.facts.owner
            for begin, end in pairwise(hours):
                for state, spent in held.seconds[end] + held.seconds[begin].scaled(-1.0) if price else ():
                    labels: Labels = (
                        ("workload_namespace", owner.namespace),
                        ("workload_kind", owner.kind),
                        ("workload_name", owner.name),
                        ("team", owner.team),
                        ("model", held.gpu.model),
                        ("state", state),
                        ("currency", price.currency),
                    )
                    if spent > 0:
                        yield labels, self.times[end], price.per_hour * spent / HOUR

    def _devices(self, number: int, t: float, *, known: bool) -> list[DeviceView]:
        devices: dict[str, list[tuple[_Held, PodUse]]] = {}
        for held in self._held:
            if held.pod.start <= t < held.pod.end:
                use = PodUse(
                    holder=held.holder,
                    age_seconds=t - self.began(t, held.pod.start),
                    idle_for_seconds=held.idle_for[number],
                    facts=held.facts if known else None,
                )
                devices.setdefault(held.use.device_uuid, []).append((held, use))
        return [
            DeviceView(
                gpu=rows[0][0].gpu,
                instance=rows[0][0].instance,
                allocation=AllocationState.ALLOCATED,
                pods=tuple(use for _, use in rows),
            )
            for rows in devices.values()
        ]

    def began(self, t: float, since: float) -> float:
        """Return when the agent of time ``t`` first saw an object that exists ``since``."""
        return max([since, *(end for end, _ in self.restarts if end <= t)])

    def _made(self, workload: Workload, pod: Pod, use: Use, blind: Sequence[tuple[float, float]]) -> _Held:
        board, track = use.board, use.activity.with_unknown(blind)
        gpu = Gpu(uuid=board.uuid, index=board.index, minor=board.index, model=board.model, pci_bus_id="")
        instance = None
        if use.profile:
            instance = MigInstance(
                uuid=use.device_uuid,
                parent_uuid=board.uuid,
                gpu_instance_id=int(use.instance),
                compute_instance_id=0,
                profile=use.profile,
                compute_slices=1,
                memory_slices=1,
            )
        holder = Holder(
            namespace=pod.namespace,
            pod=pod.name,
            container="main",
            device_uuid=use.device_uuid,
            mode=ShareMode(use.mode),
            resource=pod.resource,
            source="device-plugin",
            share_ratio=use.share,
            device_share_ratio=1.0,
            pod_uid=pod.uid,
        )
        account = PodAccount(
            device_uuid=use.device_uuid,
            gpu_index=board.index,
            gpu_uuid=board.uuid,
            gpu_instance=use.instance,
            mig_profile=use.profile,
            model=board.model,
            namespace=pod.namespace,
            pod=pod.name,
            container="main",
            pod_uid=pod.uid,
        )
        owner = Owner(namespace=workload.namespace, kind=workload.kind, name=pod.owner, team=workload.team)
        profiled = combine([track, use.near], lambda values: 0.0 if None in values else values[0])
        effective = combine([track, use.near], lambda values: 0.0 if None in values else min(values))
        seconds = [
            ByState(
                effective=near,
                ineffective=whole - near,
                unprofiled=active - whole,
                idle=min(max(t, pod.start), pod.end) - pod.start - active - unknown,
                unknown=unknown,
            ).scaled(use.share)
            for t, (active, unknown), (whole, _), (near, _) in zip(
                self.times,
                *(one.integrals(self.times, pod.start, pod.end) for one in (track, profiled, effective)),
                strict=True,
            )
        ]
        since = track.last_busy(self.times, pod.start, BUSY_FROM)
        idle_for = [
            t - max(last, self.began(t, pod.start)) if pod.start <= t < pod.end and track.at(t) is not None else None
            for t, last in zip(self.times, since, strict=True)
        ]
        return _Held(
            pod=pod,
            use=use,
            holder=holder,
            account=account,
            gpu=gpu,
            instance=instance,
            facts=PodFacts(owner=owner, workload_class=workload.policy, opt_out_until_seconds=pod.alerts_off_until),
            own=Owner(namespace=pod.namespace, kind="Pod", name=pod.name, provisional=True),
            seconds=seconds,
            idle_for=idle_for,
        )


def rows_of(view: OwnersView, node: str) -> Iterator[Row]:
    """Yield the rows of the agent's page."""
    for use in view.owners:
        yield from _owner_rows(use, node)
    for idle in view.shared_idle:
        labels = (
            ("node", node),
            ("gpu", str(idle.gpu_index)),
            ("uuid", idle.uuid),
            ("gpu_instance", idle.gpu_instance),
        )
        yield "gpu_shared_idle_gpus", labels, idle.gpus


def _owner_rows(use: OwnerUse, node: str) -> Iterator[Row]:
    owner = use.owner
    labels: Labels = (
        ("node", node),
        ("workload_namespace", owner.namespace),
        ("workload_kind", owner.kind),
        ("workload_name", owner.name),
        ("team", owner.team),
    )
    plain = {
        "gpu_owner_gpus": use.gpus,
        "gpu_owner_estimated_gpus": use.estimated_gpus,
        "gpu_owner_underused_gpus": use.underused_gpus,
        "gpu_owner_active_gpus": use.active_gpus,
        "gpu_owner_idle_for_seconds": use.idle_for_seconds,
        "gpu_owner_age_seconds": use.age_seconds,
        "gpu_owner_alerts_off_until_timestamp_seconds": shown_until_seconds(use.opt_out_until_seconds),
    }
    yield from ((name, labels, value) for name, value in plain.items() if value is not None)

    def shown(by_window: Mapping[str, float]) -> dict[str, float]:
        return {window: value for window, value in by_window.items() if window in shown_windows(use.policy)}

    several = {
        ("gpu_owner_active_gpu_seconds", "window"): shown(use.active_seconds),
        ("gpu_owner_measured_gpu_seconds", "window"): shown(use.measured_seconds),
        ("gpu_owner_profiled_gpu_seconds", "window"): shown(use.profiled_seconds),
        ("gpu_owner_effective_gpu_seconds", "window"): shown(use.effective_seconds),
        ("gpu_owner_unused_gpus", "window"): shown(use.unused_gpus),
        ("gpu_owner_policy", "policy"): {use.policy: 1.0} if use.policy else {},
        ("gpu_owner_cost_per_hour", "currency"): use.cost_per_hour,
        ("gpu_owner_idle_cost_per_hour", "currency"): use.idle_cost_per_hour,
    }
    for (name, label), values in several.items():
        yield from ((name, (*labels, (label, which)), value) for which, value in values.items())


RECORDED = "workload:gpu_ledger:delta1h"
"""Series that the rules of the ledger record, an input here: the money."""
RECORDED_AFTER_SECONDS = 900.0
GONE = "stale"
"""Marker that Prometheus writes at the end of a series."""

Value = float | str | None
"""A sample, a staleness marker, or no value."""


@dataclass(slots=True)
class Series:
    """All series of a fleet, sampled at the same times."""

    times: Sequence[float]
    wanted: frozenset[str] | None = None
    """Names of the wanted metrics; ``None``: all."""
    rows: dict[tuple[str, Labels], list[Value]] = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], values: Iterable[float | None]) -> None:
        """Add a series without empty labels; the end of a series is marked."""
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
        # The same labels a second time: a pod of the same name, without a UID among the labels.
        twice = [t for t, *both in zip(self.times, there, made, strict=True) if all(isinstance(v, float) for v in both)]
        if twice:
            raise ValueError(f"two series of the name {name} with labels {key[1]} at {twice[0]} s")
        there[:] = [old if new is None or isinstance(old, float) else new for old, new in zip(there, made, strict=True)]

    def text(self) -> Iterator[tuple[str, str]]:
        """Yield (series, values) in the form of promtool."""
        for (name, labels), values in self.rows.items():
            inner = ",".join(f'{label}="{value}"' for label, value in labels)
            yield f"{name}{{{inner}}}", " ".join(_runs(values))


def _runs(values: Sequence[Value]) -> Iterator[str]:
    """Yield values in the form of promtool, with straight runs merged."""
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
    """The agents of a shape: times of their scrapes and starts."""

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
        """Return the start of the process at time ``t``."""
        return max((item.end for item in self.restarts if item.end <= t), default=0.0)

    def marked(self, t: float) -> bool:
        """Return whether a missing sample is marked: not during an outage of Prometheus itself."""
        return not any(item.what == "prometheus" and item.start <= t < item.end for item in self.outages)

    def generations(self) -> Iterator[tuple[str, float, float]]:
        """Yield (suffix of the agent's pod, from, to): a rollout makes another pod."""
        edges = [0.0, *(item.end for item in self.restarts if item.what == "agent-replaced"), float("inf")]
        for number, (start, end) in enumerate(pairwise(edges)):
            yield f"agent-{number}", start, end


class Page:
    """Adds the series of the agents of one shape."""

    def __init__(self, shape: Shape, series: Series) -> None:
        self.shape, self.series, self.times = shape, series, series.times
        self.agents = _Agents(shape, series.times)
        self.scraped = {
            node: [t < shape.lasts and self.agents.scraped(node, number, t) for number, t in enumerate(self.times)]
            for node in shape.nodes
        }
        self.unmarked = [index for index, t in enumerate(self.times) if not self.agents.marked(t)]

    def add(self, name: str, node: str, labels: Mapping[str, str], values: Iterable[float | None]) -> None:
        """Add a series as in Prometheus: with the target's labels, and without failed scrapes."""
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
        """Remove the markers in an outage of Prometheus, which would have to write them."""
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
        """Add the series of Prometheus and of the agent's process for a target."""
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
