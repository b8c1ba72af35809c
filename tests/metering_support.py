"""Nodes for the meter, made by hand or at random, and their owners in activity windows."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from exporter.accounting.idle import IdleClock
from exporter.accounting.ledger import Ledgers
from exporter.accounting.meter import Meter
from exporter.accounting.owner_figures import owners_view
from exporter.accounting.state_file import to_json
from exporter.accounting.windows import Windows
from exporter.agent.attributor import Attributor
from exporter.agent.metering import Metering
from exporter.agent.node import Node
from exporter.agent.owners import Owners
from exporter.agent.sources import Sources
from exporter.agent.views import Viewer
from exporter.attribution.inventory import PartOfGpu, parts_of
from exporter.attribution.processes import ProcessLookup
from exporter.model.attribution import AllocationState, Holder, Owner, PodFacts, ShareMode
from exporter.model.devices import DeviceState, Gpu, GpuReading, MigInstance, MigReading
from exporter.model.fields import Field
from exporter.model.ledger import Bottleneck, OwnersView, OwnerUse, Price, ResourceProfile
from exporter.model.snapshot import Activity, ActivitySource, DeviceView, PodUse

H100 = "NVIDIA H100 80GB HBM3"
SLICES: Mapping[str, tuple[int, int]] = {
    "1g.10gb": (1, 1),
    "1g.20gb": (1, 2),
    "2g.20gb": (2, 2),
    "3g.40gb": (3, 4),
    "4g.40gb": (4, 4),
    "7g.80gb": (7, 8),
}
LAYOUTS: tuple[tuple[str, ...], ...] = (
    (),
    ("1g.10gb",) * 7,
    ("3g.40gb", "4g.40gb"),
    ("3g.40gb", "3g.40gb"),
    ("1g.20gb", *("1g.10gb",) * 6),
    ("2g.20gb", "1g.10gb"),
)


def plain_metering() -> Metering:
    """Return the metering of a node without prices and without a state directory."""
    meter = Meter(1.0, Owners().owner_of)
    return Metering(meter=meter, ledgers=Ledgers())


def through_json(data: object) -> Any:  # noqa: ANN401 - any JSON value
    """Return a state as the next process reads it."""
    return json.loads(to_json(data))


def plain_viewer(lookup: ProcessLookup, **settings: object) -> Viewer:
    return Viewer(lookup=lookup, clock=IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=3.0), **settings)


def plain_node(sources: Sources, attributor: Attributor, **parts: object) -> Node:
    """Return a node that is sampled once a second, without prices and without a state directory."""
    viewer, metering = plain_viewer(attributor.lookup), plain_metering()
    usual = {"viewer": viewer, "metering": metering, "sample_interval_seconds": 1.0, "process_clock": lambda: 0.0}
    return Node(name="n", sources=sources, attributor=attributor, **{**usual, **parts})


def _parts(board: Gpu, instances: Sequence[MigInstance]) -> dict[str, PartOfGpu]:
    return parts_of(GpuReading(gpu=board, instances=tuple(MigReading(instance=one) for one in instances)))


def namespace_pays(holder: Holder) -> Owner:
    return Owner(namespace=holder.namespace)


def gpu(index: int = 0, model: str = H100, *, mig: bool = False) -> Gpu:
    return Gpu(
        uuid=f"GPU-{index}",
        index=index,
        minor=index,
        model=model,
        pci_bus_id=f"00000000:{index:02X}:00.0",
        mig_enabled=mig,
        compute_slices=7,
        memory_slices=8,
    )


def holder(
    pod: str,
    device: str = "GPU-0",
    *,
    share: float = 1.0,
    of_device: float | None = None,
    mode: ShareMode = ShareMode.EXCLUSIVE,
    namespace: str = "ml",
    uid: str | None = None,
) -> Holder:
    return Holder(
        namespace=namespace,
        pod=pod,
        container="main",
        device_uuid=device,
        mode=mode,
        resource="nvidia.com/gpu",
        source="device-plugin",
        share_ratio=share,
        device_share_ratio=share if of_device is None else of_device,
        pod_uid=uid,
    )


def activity(ratio: float | None, effective: float | None = None) -> Activity | None:
    """Make an activity; ``effective`` is None while it is not profiled."""
    profile = None if effective is None else ResourceProfile((0.0, effective, 0.0, 0.0), Bottleneck.MEMORY)
    return None if ratio is None else Activity(ratio=ratio, source=ActivitySource.ENGINE, profile=profile)


def use(held: Holder, ratio: float | None, effective: float | None = None) -> PodUse:
    return PodUse(holder=held, age_seconds=1.0, activity=activity(ratio, effective))


def whole(
    *pods: PodUse,
    busy: float | None = 0.0,
    index: int = 0,
    model: str = H100,
    foreign: float | None = 0.0,
    state: DeviceState = DeviceState.UP,
    known: bool = True,
    values: Mapping[Field, int | float] | None = None,
) -> DeviceView:
    """Make a whole GPU; free without ``pods``, of unknown holders if ``known`` is False."""
    allocation = AllocationState.ALLOCATED if pods else AllocationState.UNALLOCATED
    return DeviceView(
        gpu=gpu(index, model),
        state=state,
        values=values or {},
        activity=activity(busy),
        allocation=allocation if known else AllocationState.UNKNOWN,
        pods=pods,
        unattributed_activity_ratio=foreign,
    )


def instances_of(board: Gpu, layout: Sequence[str]) -> list[MigInstance]:
    return [
        MigInstance(
            uuid=f"MIG-{board.index}-{profile}-{number}",
            parent_uuid=board.uuid,
            gpu_instance_id=number + 1,
            compute_instance_id=0,
            profile=profile,
            compute_slices=SLICES[profile][0],
            memory_slices=SLICES[profile][1],
        )
        for number, profile in enumerate(layout)
    ]


def partitioned(
    layout: Sequence[str],
    held: Mapping[int, tuple[str, float | None]],
    *,
    free_busy: float | None = 0.0,
    values: Mapping[Field, int | float] | None = None,
    state: DeviceState = DeviceState.UP,
) -> list[DeviceView]:
    """Make a partitioned GPU; ``held`` has the pod and the activity of each instance by its number."""
    board = gpu(mig=True)
    found = instances_of(board, layout)
    parts = _parts(board, found)
    views = [DeviceView(gpu=board, state=state, values=values or {}, allocation=None)]
    for number, instance in enumerate(found):
        ratio = parts[instance.uuid].ratio
        pod, busy = held.get(number, ("", free_busy))
        mine = holder(pod, instance.uuid, share=ratio, of_device=1.0, mode=ShareMode.MIG)
        views.append(
            DeviceView(
                gpu=board,
                instance=instance,
                state=state,
                activity=activity(busy),
                share_ratio=ratio,
                allocation=AllocationState.ALLOCATED if pod else AllocationState.UNALLOCATED,
                pods=(use(mine, busy),) if pod else (),
                unattributed_activity_ratio=0.0,
            )
        )
    return views


def namespace_owner(held: Holder) -> Owner:
    return Owner(namespace=held.namespace)


def random_views(random: Random, layouts: Sequence[int], counters: dict[int, float]) -> list[DeviceView]:
    """Return a node in a random state, with any changes since the last call.

    Args:
        random: Source of chance.
        layouts: Number of the layout of each GPU.
        counters: Energy counters by GPU in millijoules, increased here.
    """
    views: list[DeviceView] = []
    known = random.random() > 0.1
    for index, layout in enumerate(layouts):
        if random.random() < 0.05:
            continue  # not enumerated this time
        board = gpu(index, (H100, "NVIDIA A100-SXM4-40GB")[index % 2], mig=bool(layout))
        state = DeviceState.LOST if random.random() < 0.1 else DeviceState.UP
        counters[index] = 0.0 if random.random() < 0.05 else counters.get(index, 0.0) + random.uniform(0, 7e5)
        values: dict[Field, int | float] = {}
        if random.random() < 0.8:
            values[Field.TOTAL_ENERGY_CONSUMPTION] = counters[index]
        if random.random() < 0.8:
            values[Field.POWER_USAGE] = random.uniform(60, 700)
        found = instances_of(board, LAYOUTS[layout])
        parts = _parts(board, found)
        held_whole = bool(found) and random.random() < 0.1
        units: list[tuple[MigInstance | None, float]] = [(None, 1.0)]
        units += [(instance, parts[instance.uuid].ratio) for instance in found]
        for instance, ratio in units:
            nobody = (instance is None and bool(found) and not held_whole) or not known
            view = _random_view(random, board, instance, ratio, nobody=nobody, state=state)
            if instance is None:
                view = replace(view, values=values)
            if instance is None and found and not view.pods:
                view = replace(view, allocation=None)
            elif not known:
                view = replace(view, allocation=AllocationState.UNKNOWN, unattributed_activity_ratio=None)
            views.append(view)
    return views


def _random_view(
    random: Random, board: Gpu, instance: MigInstance | None, ratio: float, *, nobody: bool, state: DeviceState
) -> DeviceView:
    uuid = instance.uuid if instance else board.uuid
    replicas = random.choice((1, 1, 3, 4))
    count = 0 if nobody else random.randint(0, replicas)
    busy = None if random.random() < 0.2 or state is not DeviceState.UP else random.choice((0.0, 1.0, random.random()))
    mode = ShareMode.SHARED if replicas > 1 else ShareMode.MIG if instance else ShareMode.EXCLUSIVE
    names = random.sample("abcdef", count)
    weights = [random.random() for _ in range(count + 1)]
    pods = tuple(
        use(
            holder(
                name,
                uuid,
                share=ratio / replicas,
                of_device=1 / replicas,
                mode=mode,
                namespace=f"team-{name}",
                uid=random.choice((None, "uid-1", "uid-2")),
            ),
            None if busy is None else busy * weight / sum(weights),
            random.choice((None, 0.0, random.random())) if replicas == 1 else None,
        )
        for name, weight in zip(names, weights, strict=False)
    )
    return DeviceView(
        gpu=board,
        instance=instance,
        state=state,
        activity=activity(busy, random.choice((None, random.random()))),
        share_ratio=ratio,
        allocation=AllocationState.ALLOCATED if pods else AllocationState.UNALLOCATED,
        pods=pods,
        unattributed_activity_ratio=None if busy is None else busy * weights[-1] / sum(weights),
    )


STEP = 30.0
MINUTE, HOUR = 60.0, 3600.0
DOLLARS = Price(per_hour=4.0, currency="USD", source="test:1", as_of="2026-01-01")
TRAIN = Owner(namespace="ml", kind="Job", name="train", team="vision")


def held(
    holder: Holder,
    ratio: float | None,
    owner: Owner | None = TRAIN,
    *,
    source: ActivitySource = ActivitySource.ENGINE,
    workload_class: str = "",
    off_until: float | None = None,
    idle_for: float | None = None,
    age: float = 1.0,
) -> PodUse:
    """Make a use; ``ratio`` is of the device, ``owner`` None while it is unknown."""
    facts = owner and PodFacts(owner=owner, workload_class=workload_class, opt_out_until_seconds=off_until)
    activity = None if ratio is None else Activity(ratio=ratio, source=source)
    return PodUse(holder=holder, age_seconds=age, activity=activity, idle_for_seconds=idle_for, facts=facts)


@dataclass(slots=True)
class OwnedNode:
    """Samples every ``STEP`` seconds."""

    owner_of: Callable[[Holder], Owner] = namespace_pays
    prices: Mapping[str, Price] = field(default_factory=dict)
    windows: Windows = field(default_factory=Windows)
    now: float = 0.0
    views: Sequence[DeviceView] = ()
    _owners: dict[Holder, Owner] = field(default_factory=dict)
    _meter: Meter | None = None

    def sample(self, views: Sequence[DeviceView]) -> None:
        """Take one sample now."""
        self._owners = {
            use.holder: use.facts.owner
            if use.facts
            else Owner(namespace=use.holder.namespace, kind="Pod", name=use.holder.pod, provisional=True)
            for view in views
            for use in view.pods
        }
        self._meter = self._meter or Meter(STEP, lambda holder: self._owners[holder])
        self.windows.add(self._meter.add(views, self.now), self.now)
        self.views = views

    def until(self, seconds: float, *views: DeviceView) -> None:
        """Sample the same views up to an instant."""
        self.sample(views)
        while self.now < seconds:
            self.now = min(self.now + STEP, seconds)
            self.sample(views)

    def view(self) -> OwnersView:
        """Return the view now."""
        free = self._meter.free_shares() if self._meter else {}
        return owners_view(self.views, self.windows.at(self.now), self.prices, free, self.now)

    def use(self, owner: Owner = TRAIN) -> OwnerUse:
        """Return the view of one owner."""
        return next(use for use in self.view().owners if use.owner == owner)


def renamed(view: DeviceView, uuid: str) -> DeviceView:
    """Return the same device under another UUID."""
    return replace(view, gpu=replace(view.gpu, uuid=uuid))
