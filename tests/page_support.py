"""Configurations and snapshots for tests of pages, API and server, and the series of a page."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from exporter.config import AgentConfig
from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import Family, Labels
from exporter.model.attribution import AllocationState, Attribution, Holder, MetadataStatus, ShareMode, Unresolved
from exporter.model.devices import DeviceState, Gpu, MigInstance, Reading, SourceState, SourceStatus
from exporter.model.fields import Field
from exporter.model.snapshot import Activity, ActivitySource, DeviceView, PodUse, Snapshot
from exporter.web import node_page


def configured(config: AgentConfig, **changes: object) -> AgentConfig:
    """Return a copy with other settings, each in its group."""
    groups = {part.name: getattr(config, part.name) for part in fields(config) if part.name != "warnings"}
    new = {}
    for name, group in groups.items():
        own = {one.name for one in fields(group)} & changes.keys()
        new[name] = replace(group, **{setting: changes.pop(setting) for setting in own})
    assert not changes
    return replace(config, **new)


def settings_of(config: AgentConfig) -> dict[str, object]:
    """Return every setting by its name."""
    groups = [getattr(config, part.name) for part in fields(config) if part.name != "warnings"]
    return {one.name: getattr(group, one.name) for group in groups for one in fields(group)}


PARTS = frozenset({"reading", "attribution", "metadata", "metering"})


def changed(snapshot: Snapshot, **changes: object) -> Snapshot:
    """Return a copy with other values; a ``dict`` changes only these values of a part of the snapshot."""
    new = {name: _part(snapshot, name, value) for name, value in changes.items()}
    return replace(snapshot, **new)


def _part(snapshot: Snapshot, name: str, value: object) -> object:
    if name not in PARTS or not isinstance(value, dict):
        return value
    old = getattr(snapshot, name)
    return MetadataStatus(**{"known": True, **value}) if name == "metadata" and old is None else replace(old, **value)


_PAIR = re.compile(r'([^=,]+)="((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of a family."""

    labels: Labels
    value: int | float

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return names and values of its labels."""
        return pairs(self.labels)


def samples_of(family: Family) -> tuple[Sample, ...]:
    """Return the series one by one."""
    return tuple(Sample(carried, value) for carried, value in family.values.items())


def rows(snapshot: Snapshot, name: str, options: ExpositionOptions | None = None) -> list[tuple[dict[str, str], float]]:
    """Return labels and value of every series of a metric on the page of a snapshot."""
    return [
        (dict(sample.pairs), sample.value)
        for family in families(snapshot, options or ExpositionOptions())
        if family.name == name
        for sample in samples_of(family)
    ]


def pairs(carried: Labels) -> tuple[tuple[str, str], ...]:
    """Return names and values of a label set, in its order."""
    return tuple((name, _ESCAPED.sub(_unescaped, value)) for name, value in _PAIR.findall(carried))


def _unescaped(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


def duplicate_series(page: Iterable[Family]) -> list[tuple[str, frozenset[tuple[str, str]]]]:
    """Return name and label set of every duplicate series; Prometheus refuses a page with one."""
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    twice = []
    for family in page:
        for sample in samples_of(family):
            key = (family.name, frozenset(sample.pairs))
            if key in seen:
                twice.append(key)
            seen.add(key)
    return twice


TAKEN_AT = 1_800_000_000.0
MIB = 1024 * 1024


def gpu(index: int = 0, **changes: object) -> Gpu:
    made = Gpu(
        uuid=f"GPU-{index:08d}-0000-0000-0000-000000000000",
        index=index,
        minor=index,
        model="NVIDIA H100 80GB HBM3",
        pci_bus_id=f"00000000:{index + 16:02X}:00.0",
        compute_slices=7,
        memory_slices=8,
    )
    return replace(made, **changes)


def holder(uuid: str, pod: str = "train-0", **changes: object) -> Holder:
    made = Holder(
        namespace="ml",
        pod=pod,
        container="main",
        device_uuid=uuid,
        mode=ShareMode.EXCLUSIVE,
        resource="nvidia.com/gpu",
        source="device-plugin",
        share_ratio=1.0,
        device_share_ratio=1.0,
    )
    return replace(made, **changes)


def use(owner: Holder, ratio: float | None = 0.9, idle_for: float | None = 0.0, **changes: object) -> PodUse:
    measured = None if ratio is None else Activity(ratio=ratio, source=ActivitySource.ENGINE)
    made = PodUse(
        holder=owner,
        age_seconds=4000.0,
        activity=measured,
        idle_for_seconds=None if ratio is None else idle_for,
        memory_used_bytes=20_000 * MIB,
    )
    return replace(made, **changes)


def view(index: int = 0, ratio: float | None = 0.9, **changes: object) -> DeviceView:
    made = DeviceView(
        gpu=gpu(index),
        values={
            Field.FB_USED: 20_000,
            Field.FB_TOTAL: 81_559,
            Field.POWER_USAGE: 100 + 600 * (ratio or 0),
            Field.GPU_TEMP: 41,
            Field.TOTAL_ENERGY_CONSUMPTION: 5_000_500,
        },
        activity=None if ratio is None else Activity(ratio=ratio, source=ActivitySource.ENGINE),
        allocation=AllocationState.UNALLOCATED,
    )
    return replace(made, **changes)


def held(index: int, pod: str, ratio: float | None = 0.9, idle_for: float = 0.0, namespace: str = "ml") -> DeviceView:
    base = view(index, ratio, activity_unknown_reason="" if ratio is not None else "no_source")
    owner = holder(base.uuid, pod, namespace=namespace)
    return replace(base, allocation=AllocationState.ALLOCATED, pods=(use(owner, ratio, idle_for),))


def partitioned(index: int, profiles: tuple[tuple[str, int, int], ...]) -> tuple[DeviceView, ...]:
    parent = gpu(index, mig_enabled=True)
    views = [replace(view(index, None, allocation=None), gpu=parent, activity=None)]
    for number, (profile, compute, memory) in enumerate(profiles):
        instance = MigInstance(
            uuid=f"MIG-{index:04d}{number:04d}-0000-0000-0000-000000000000",
            parent_uuid=parent.uuid,
            gpu_instance_id=7 + number,
            compute_instance_id=0,
            profile=profile,
            compute_slices=compute,
            memory_slices=memory,
        )
        idle = number % 3 == 1
        free = number % 3 == 2
        ratio = 0.0 if idle or free else 0.35 + 0.1 * number
        owner = holder(
            instance.uuid,
            f"worker-{index}-{number}",
            namespace="research",
            mode=ShareMode.MIG,
            resource=f"nvidia.com/mig-{profile}",
            share_ratio=compute / 7,
        )
        views.append(
            DeviceView(
                gpu=parent,
                instance=instance,
                share_ratio=compute / 7,
                values={Field.FB_USED: 3_000, Field.FB_TOTAL: 9_984},
                activity=Activity(ratio=min(ratio, 1.0), source=ActivitySource.ENGINE),
                allocation=AllocationState.UNALLOCATED if free else AllocationState.ALLOCATED,
                pods=() if free else (use(owner, ratio, 5400.0 if idle else 0.0, memory_used_bytes=3_000 * MIB),),
            )
        )
    return tuple(views)


def shared(index: int) -> DeviceView:
    base = view(index, 0.62, allocation=AllocationState.ALLOCATED)
    how = {"namespace": "serving", "mode": ShareMode.SHARED, "share_ratio": 0.25, "device_share_ratio": 0.25}
    parts = (("chat-7c9f", 0.5, 0.0), ("embed-x2", 0.12, 0.0), ("notebook-tom", 0.0, 1000.0))
    return replace(
        base,
        pods=tuple(
            use(
                holder(base.uuid, pod, **how),
                ratio,
                idle_for,
                memory_used_bytes=6_000 * MIB,
                activity=Activity(ratio=ratio, source=ActivitySource.PROCESS_SAMPLES),
            )
            for pod, ratio, idle_for in parts
        ),
    )


def lost(index: int) -> DeviceView:
    base = held(index, "train-1", None)
    return replace(
        base,
        state=DeviceState.LOST,
        reason="gpu_is_lost",
        values={},
        activity_unknown_reason="device_down",
        xids={79: 1},
        xid_last_seen_seconds={79: TAKEN_AT - 60},
        last_xid=79,
    )


def snapshot(*devices: DeviceView, **changes: object) -> Snapshot:
    made = Snapshot(
        taken_at_seconds=TAKEN_AT,
        node="gpu-node-a",
        reading=Reading(
            source="nvml",
            driver_version="570.124.06",
            nvml_version="12.570.124.06",
            taken_at_seconds=TAKEN_AT - 0.4,
            duration_seconds=0.01,
        ),
        devices=devices,
        sources=(SourceStatus(name="nvml", state=SourceState.UP),),
        attribution=Attribution(known=True, answered_at_seconds=TAKEN_AT - 2),
        ready=True,
    )
    return changed(made, **changes)


SEVEN = (("1g.10gb", 1, 1),) * 7
MIXED = (("3g.40gb", 3, 4), ("2g.20gb", 2, 2), ("1g.10gb", 1, 1))


def rich_snapshot() -> Snapshot:
    """Return a snapshot of eight GPUs with every kind of device and holder."""
    stray = replace(view(6, 0.14), unattributed_activity_ratio=0.14, unattributed_memory_bytes=2_000 * MIB)
    return snapshot(
        held(0, "llm-pretrain-worker-0", 0.97),
        held(1, "llm-pretrain-worker-1", 0.94),
        held(2, "notebook-anna", 0.0, 8_000.0, namespace="research"),
        *partitioned(3, MIXED),
        *partitioned(4, SEVEN),
        shared(5),
        replace(stray, unattributed_processes=1),
        lost(7),
        simulated=True,
        attribution={
            "unresolved": (
                Unresolved(
                    namespace="ml",
                    pod="dra-job-1",
                    container="main",
                    resource="gpu.nvidia.com",
                    device_id="node-a/gpu-9",
                    reason="dra_unresolved",
                ),
            )
        },
    )


def fragment(shown: Snapshot | None) -> str:
    """Return the page without its frame."""
    return node_page.document(shown, is_whole=False)
