"""Made-up nodes for ``rendering.py``: of each one snapshot after the other, as an agent's ticks would make them."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from exporter.model import (
    CLOCK_EVENTS,
    UNALLOCATED,
    Account,
    Activity,
    ActivitySource,
    AllocationState,
    DeviceEvents,
    DeviceView,
    Field,
    Gpu,
    Holder,
    LedgerView,
    MigInstance,
    Money,
    NodeFacts,
    Owner,
    PodAccount,
    PodFacts,
    PodUse,
    Price,
    ShareMode,
    ShownLedger,
    Snapshot,
    SourceState,
    SourceStatus,
    Totals,
)

GPUS = 8
INSTANCES = 7
NODE = "gpu-node-eu-west-1-0042.example.internal"
MODEL = "NVIDIA H100 80GB HBM3"
EPOCH_SECONDS = 1_790_000_000.0
SCRAPE_SECONDS = 30.0
STILL = (
    *(Field.PCIE_REPLAY_COUNTER, Field.VGPU_LICENSE_STATUS, Field.UNCORRECTABLE_REMAPPED_ROWS, Field.ROW_REMAP_FAILURE),
    *(Field.CORRECTABLE_REMAPPED_ROWS, Field.ROW_REMAP_PENDING, Field.ECC_SBE_VOL_TOTAL, Field.ECC_DBE_VOL_TOTAL),
    *(Field.CLOCK_THROTTLE_REASONS, Field.GPU_RECOVERY_ACTION, Field.POWER_VIOLATION, Field.THERMAL_VIOLATION),
    *(Field.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, Field.NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, Field.SLOWDOWN_TEMP),
    *(Field.NVLINK_REPLAY_ERROR_COUNT_TOTAL, Field.NVLINK_RECOVERY_ERROR_COUNT_TOTAL, Field.SHUTDOWN_TEMP),
    *(Field.GPU_MAX_OP_TEMP, Field.MEM_MAX_OP_TEMP, Field.RETIRED_SBE, Field.RETIRED_DBE, Field.RETIRED_PENDING),
)
"""Whole numbers that hardly ever change."""
GROWING = (
    *(Field.TOTAL_ENERGY_CONSUMPTION, Field.PCIE_TX_BYTES_TOTAL, Field.PCIE_RX_BYTES_TOTAL),
    *(Field.NVLINK_TX_BYTES_TOTAL, Field.NVLINK_RX_BYTES_TOTAL),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large a node is."""

    title: str
    partitioned: bool
    sharing: int
    """Pods on each device."""
    ended: int
    """Pods that have ended and whose series linger."""
    owners: int
    """Owners in the ledger, those of the pods that run among them."""


SHAPES = {
    900: Shape(title="8 GPUs, a pod on each", partitioned=False, sharing=1, ended=0, owners=12),
    2_200: Shape(title="56 MIG instances, a pod on each", partitioned=True, sharing=1, ended=10, owners=40),
    5_000: Shape(
        title="56 MIG instances shared by 112 pods, 100 ended", partitioned=True, sharing=2, ended=100, owners=157
    ),
    20_000: Shape(title="the same, and 2,000 owners", partitioned=True, sharing=2, ended=100, owners=2000),
}
"""By the samples of their pages, about."""


def ticks(shape: Shape, seed: int = 7) -> Iterator[Snapshot]:
    """Snapshots of a node, a scrape's interval apart; every measured value and every running total has changed."""
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    for number in count(1):
        yield _snapshot(shape, number, chance)


def _snapshot(shape: Shape, number: int, chance: random.Random) -> Snapshot:
    now = EPOCH_SECONDS + number * SCRAPE_SECONDS
    views = tuple(view for index in range(GPUS) for view in _views(shape, index, number, chance))
    return Snapshot(
        taken_at_seconds=now,
        node=NODE,
        driver_version="580.65.06",
        nvml_version="13.580.65",
        sample_at_seconds=now - 0.25,
        sample_duration_seconds=chance.uniform(0.002, 0.02),
        devices=views,
        expected_devices=GPUS,
        sources=(SourceStatus(name="nvml", state=SourceState.UP),),
        events={_gpu(shape, i).uuid: DeviceEvents(clock_events=dict.fromkeys(CLOCK_EVENTS, 0)) for i in range(GPUS)},
        attribution_known=True,
        attribution_at_seconds=now - 2,
        advertised_devices=GPUS,
        allocated_devices=GPUS,
        metadata_enabled=True,
        metadata_known=True,
        metadata_at_seconds=now - 20,
        node_facts=NodeFacts(instance_type="p5.48xlarge", capacity_type="spot", region="eu-west-1"),
        tick_duration_seconds=chance.uniform(0.001, 0.004),
        ready=True,
        ledger=_ledger(shape, views, number, chance, now),
        prices={
            _gpu(shape, index).uuid: Price(per_hour=2.9925, currency="USD", source="fleet:h100", as_of="2026-10-01")
            for index in range(GPUS)
        },
        price_book="fleet",
    )


def _gpu(shape: Shape, index: int) -> Gpu:
    return Gpu(
        uuid=f"GPU-{index:08x}-7ab1-5c2d-9e4f-3b6a8d0c1e{index:02x}",
        index=index,
        minor=index,
        model=MODEL,
        pci_bus_id=f"00000000:{index + 16:02X}:00.0",
        mig_enabled=shape.partitioned,
        compute_slices=7,
        memory_slices=8,
    )


def _views(shape: Shape, index: int, number: int, chance: random.Random) -> Iterator[DeviceView]:
    gpu = _gpu(shape, index)
    board = _board(number, chance)
    if not shape.partitioned:
        yield _view(shape, gpu, None, board | _parts(chance), chance)
        return
    yield DeviceView(gpu=gpu, values=board, allocation=None, activity=_activity(chance))
    for one in range(INSTANCES):
        instance = MigInstance(
            uuid=f"MIG-{index:04x}{one:04x}-7ab1-5c2d-9e4f-3b6a8d0c1e00",
            parent_uuid=gpu.uuid,
            gpu_instance_id=one + 7,
            compute_instance_id=0,
            profile="1g.10gb",
            compute_slices=1,
            memory_slices=1,
        )
        yield _view(shape, gpu, instance, _parts(chance), chance)


def _board(number: int, chance: random.Random) -> dict[Field, int | float]:
    measured = {
        Field.SM_CLOCK: chance.randrange(300, 1980),
        Field.MEM_CLOCK: 2619,
        Field.MEMORY_TEMP: chance.randrange(40, 80),
        Field.GPU_TEMP: chance.randrange(40, 80),
        Field.POWER_USAGE: round(chance.uniform(70, 700), 3),
        Field.NVLINK_BANDWIDTH_TOTAL: chance.randrange(10**6),
        Field.PROF_PCIE_TX_BYTES: chance.randrange(10**9),
        Field.PROF_PCIE_RX_BYTES: chance.randrange(10**9),
        Field.GPU_UTIL: chance.randrange(101),
        Field.MEM_COPY_UTIL: chance.randrange(101),
        Field.ENC_UTIL: 0,
        Field.DEC_UTIL: 0,
    }
    growing = {field: number * 10**10 + chance.randrange(10**9) for field in GROWING}
    return {**dict.fromkeys(STILL, 0), **measured, **growing}


def _parts(chance: random.Random) -> dict[Field, int | float]:
    used = chance.randrange(10_000)
    return {
        Field.FB_TOTAL: 81_559,
        Field.FB_FREE: 81_000 - used,
        Field.FB_USED: used,
        Field.FB_RESERVED: 559,
        Field.PROF_GR_ENGINE_ACTIVE: chance.random(),
        Field.PROF_PIPE_TENSOR_ACTIVE: chance.random(),
        Field.PROF_DRAM_ACTIVE: chance.random(),
    }


def _activity(chance: random.Random, source: ActivitySource = ActivitySource.ENGINE) -> Activity:
    return Activity(ratio=chance.random(), source=source)


def _view(
    shape: Shape, gpu: Gpu, instance: MigInstance | None, values: dict[Field, int | float], chance: random.Random
) -> DeviceView:
    place = gpu.index * INSTANCES + (instance.gpu_instance_id if instance else 0)
    pods = tuple(_use(shape, gpu, instance, place * shape.sharing + one, chance) for one in range(shape.sharing))
    return DeviceView(
        gpu=gpu,
        instance=instance,
        values=values,
        activity=_activity(chance),
        allocation=AllocationState.ALLOCATED,
        pods=pods,
        unattributed_activity_ratio=0.0,
        unattributed_memory_bytes=0,
        unattributed_processes=0,
    )


def _use(shape: Shape, gpu: Gpu, instance: MigInstance | None, place: int, chance: random.Random) -> PodUse:
    source = ActivitySource.ENGINE if shape.sharing == 1 else ActivitySource.PROCESS_SAMPLES
    share = (1 / INSTANCES if instance else 1.0) / shape.sharing
    holder = Holder(
        namespace=f"team-{place % 7}",
        pod=f"training-job-{place:04d}-7d9f8b6c5d-x{place:04d}",
        container="main",
        device_uuid=instance.uuid if instance else gpu.uuid,
        mode=ShareMode.SHARED if shape.sharing > 1 else ShareMode.MIG if instance else ShareMode.EXCLUSIVE,
        resource="nvidia.com/gpu",
        source="device-plugin",
        share_ratio=share,
        device_share_ratio=1 / shape.sharing,
        pod_uid=f"00000000-0000-4000-8000-{place:012d}",
    )
    owner = Owner(namespace=holder.namespace, kind="Deployment", name=f"training-job-{place:04d}", team="perception")
    return PodUse(
        holder=holder,
        age_seconds=chance.uniform(0, 86_400),
        activity=_activity(chance, source),
        idle_for_seconds=chance.uniform(0, 60),
        memory_used_bytes=chance.randrange(10**10),
        values={Field.GPU_UTIL: chance.randrange(101), Field.FB_USED: 1000} if shape.sharing > 1 else {},
        facts=PodFacts(owner=owner, queue="research", workload_class="batch", exported=(("label_app", "train"),)),
    )


def _ledger(shape: Shape, views: tuple[DeviceView, ...], number: int, chance: random.Random, now: float) -> LedgerView:
    """Totals of whoever holds something have grown; those of all others are what they were."""
    pods: dict[PodAccount, Totals] = {}
    accounts = {Account(owner=UNALLOCATED, model=MODEL, mode=ShareMode.EXCLUSIVE): _totals(number, chance)}
    for view in views:
        for use in view.pods:
            totals = _totals(number, chance)
            pods[_pod(view, use.holder.namespace, use.holder.pod, use.holder.pod_uid or "")] = totals
            owner = use.facts.owner if use.facts else Owner()
            if len(accounts) < shape.owners:
                accounts[Account(owner=owner, model=MODEL, mode=use.holder.mode)] = totals
    still = random.Random(1)  # noqa: S311 - not for secrets
    for place in range(shape.ended):
        view = views[place % len(views)]
        pods[_pod(view, f"team-{place % 7}", f"ended-job-{place:04d}-x", f"uid-{place}")] = _totals(1, still)
    while len(accounts) < shape.owners:
        place = len(accounts)
        owner = Owner(namespace=f"team-{place % 7}", kind="Job", name=f"nightly-evaluation-{place:05d}", team="vision")
        accounts[Account(owner=owner, model=MODEL, mode=ShareMode.MIG)] = _totals(1, still)
    return LedgerView(
        ledgers=(
            ShownLedger(
                identity="0123456789ab",
                created_at_seconds=EPOCH_SECONDS,
                capacity_seconds=GPUS * SCRAPE_SECONDS * number,
                accounts=accounts,
            ),
        ),
        pods=pods,
        conservation_error_seconds=1e-12,
        saved_at_seconds=now - 3,
    )


def _pod(view: DeviceView, namespace: str, pod: str, uid: str) -> PodAccount:
    return PodAccount(
        device_uuid=view.uuid,
        gpu_index=view.gpu.index,
        gpu_uuid=view.gpu.uuid,
        gpu_instance=str(view.instance.gpu_instance_id) if view.instance else "",
        mig_profile=view.instance.profile if view.instance else "",
        model=view.gpu.model,
        namespace=namespace,
        pod=pod,
        container="main",
        pod_uid=uid,
    )


def _totals(number: int, chance: random.Random) -> Totals:
    active, idle = SCRAPE_SECONDS * number * chance.random(), SCRAPE_SECONDS * number * chance.random()
    return Totals(
        active_seconds=active,
        idle_seconds=idle,
        unknown_seconds=chance.random(),
        energy_joules=active * 512.3,
        money={"USD": Money(active=active * 2.9925 / 3600, idle=idle * 2.9925 / 3600)},
    )
