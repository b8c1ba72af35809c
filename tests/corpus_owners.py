"""What the agent of a node judges of its owners: its own windows and figures, fed with the seconds of the corpus."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Its owner before that is known."""
    seconds: list[ByState]
    """Since it began, by share."""
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
        shape: Of it.
        node: Its name.
        times: Of the ticks, in seconds.
        blind: Spans that the agent does not see.
        restarts: Ends of its restarts; true where it lost its state.
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
        """What is shown at each time that the shape lasts; ``None`` while the agent is ``away``."""
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
        """Yield what each hour costs: (labels, end of the hour, money), as the rules of the ledger record it."""
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
        """When the agent that runs at ``t`` first saw what has been there ``since``."""
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
    """What stands on the agent's page."""
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
