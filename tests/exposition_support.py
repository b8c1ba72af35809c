"""Hand-made snapshots for the exposition's tests: one node with every kind of device and holder."""

from collections.abc import Mapping
from math import inf

from exporter.model.attribution import (
    UNALLOCATED,
    UNATTRIBUTED,
    AllocationState,
    Attribution,
    Holder,
    MetadataStatus,
    NodeFacts,
    Owner,
    PodFacts,
    ShareMode,
    Unresolved,
)
from exporter.model.devices import (
    CLOCK_EVENTS,
    DeviceEvents,
    DeviceState,
    Gpu,
    MigInstance,
    ProfilingState,
    Reading,
    SourceState,
    SourceStatus,
)
from exporter.model.fields import Field
from exporter.model.ledger import (
    Account,
    Bottleneck,
    ByState,
    LedgerView,
    OwnersView,
    OwnerUse,
    OwnerXid,
    PodAccount,
    PoolUse,
    Price,
    ResourceProfile,
    SharedIdle,
    ShownLedger,
    Totals,
)
from exporter.model.snapshot import (
    Activity,
    ActivityHistory,
    ActivitySource,
    DeviceView,
    MeteringView,
    PodUse,
    Snapshot,
)

H100 = "NVIDIA H100 80GB HBM3"
BOARD: dict[Field, int | float] = {
    Field.SM_CLOCK: 1980,
    Field.MEM_CLOCK: 2619,
    Field.MEMORY_TEMP: 61,
    Field.GPU_TEMP: 54,
    Field.POWER_USAGE: 512.318,
    Field.TOTAL_ENERGY_CONSUMPTION: 8_123_456_789,
    Field.PCIE_REPLAY_COUNTER: 0,
    Field.NVLINK_BANDWIDTH_TOTAL: 1234,
    Field.VGPU_LICENSE_STATUS: 0,
    Field.UNCORRECTABLE_REMAPPED_ROWS: 0,
    Field.CORRECTABLE_REMAPPED_ROWS: 1,
    Field.ROW_REMAP_FAILURE: 0,
    Field.PROF_PCIE_TX_BYTES: 1_048_576,
    Field.PROF_PCIE_RX_BYTES: 2_097_152,
    Field.CLOCK_THROTTLE_REASONS: 0x4,
    Field.POWER_VIOLATION: 1_500_000_000,
    Field.GPU_RECOVERY_ACTION: 0,
    Field.NVLINK_TX_BYTES_TOTAL: 5,
    Field.NVLINK_RX_BYTES_TOTAL: 6,
}
PER_DEVICE: dict[Field, int | float] = {
    Field.FB_TOTAL: 81_559,
    Field.FB_FREE: 40_000,
    Field.FB_USED: 41_000,
    Field.FB_RESERVED: 559,
    Field.PROF_GR_ENGINE_ACTIVE: 0.8732,
    Field.PROF_PIPE_TENSOR_ACTIVE: 0.41,
    Field.PROF_DRAM_ACTIVE: 0.3,
}
UTILISATION: dict[Field, int | float] = {
    Field.GPU_UTIL: 87,
    Field.MEM_COPY_UTIL: 40,
    Field.ENC_UTIL: 0,
    Field.DEC_UTIL: 0,
}
WHOLE = {**BOARD, **PER_DEVICE, **UTILISATION}


def gpu(index: int, *, mig: bool = False) -> Gpu:
    return Gpu(
        uuid=f"GPU-{index:08d}-0000-0000-0000-000000000000",
        index=index,
        minor=index,
        model=H100,
        pci_bus_id=f"00000000:{index + 1:02X}:00.0",
        mig_enabled=mig,
        compute_slices=7,
        memory_slices=8,
        labels={Field.SERIAL: f"16500{index}"},
    )


def instance(parent: Gpu, number: int, *, compute: int = 0) -> MigInstance:
    return MigInstance(
        uuid=f"MIG-{parent.index}{number}{compute}",
        parent_uuid=parent.uuid,
        gpu_instance_id=number,
        compute_instance_id=compute,
        profile="1g.10gb",
        compute_slices=1,
        memory_slices=1,
    )


def holder(pod: str, device_uuid: str, mode: ShareMode = ShareMode.EXCLUSIVE, *, parts: int = 1) -> Holder:
    return Holder(
        namespace="vision",
        pod=pod,
        container="main",
        device_uuid=device_uuid,
        mode=mode,
        resource="nvidia.com/gpu",
        source="device-plugin",
        share_ratio=1 / parts,
        device_share_ratio=1 if mode is ShareMode.MIG else 1 / parts,
        pod_uid=f"uid-{pod}",
    )


RESNET = Owner(
    namespace="vision",
    kind="Job",
    name="resnet",
    team="perception",
    cost_labels="example.com/cost-center=42,project=resnet",
)
FACTS = PodFacts(
    owner=RESNET,
    queue="research",
    workload_class="batch",
    opt_out_until_seconds=1_760_003_600.0,
    exported=(("annotation_cost_code", "4711"), ("label_app", "resnet")),
    problems=("bad_class",),
)


PROFILED = Activity(
    ratio=0.8732,
    source=ActivitySource.ENGINE,
    profile=ResourceProfile((0.125, 0.25, 0.0, 0.0), Bottleneck.STARVED, sm_ratio=0.75),
)


def exclusive(index: int = 0) -> DeviceView:
    device = gpu(index)
    return DeviceView(
        gpu=device,
        values=WHOLE,
        activity=PROFILED,
        allocation=AllocationState.ALLOCATED,
        pods=(
            PodUse(
                holder=holder("resnet-0", device.uuid),
                age_seconds=3600.0,
                activity=PROFILED,
                idle_for_seconds=0.0,
                memory_used_bytes=42_000_000_000,
                facts=FACTS,
            ),
        ),
        profiling=ProfilingState.RUNNING,
        xids={31: 2, 94: 1},
        xid_last_seen_seconds={31: 1_760_000_000.5, 94: 1_760_000_100.0},
        last_xid=94,
    )


def shared(index: int = 1) -> DeviceView:
    device = gpu(index)
    uses = tuple(
        PodUse(
            holder=holder(pod, device.uuid, ShareMode.SHARED, parts=4),
            age_seconds=60.0,
            activity=Activity(ratio=ratio, source=ActivitySource.PROCESS_SAMPLES),
            idle_for_seconds=5.0,
            memory_used_bytes=1 << 30,
            values={Field.GPU_UTIL: ratio * 100, Field.FB_USED: 1024},
        )
        for pod, ratio in (("llm-a", 0.25), ("llm-b", 0.5))
    )
    return DeviceView(
        gpu=device,
        values=WHOLE,
        activity=Activity(ratio=0.87, source=ActivitySource.UTILISATION),
        allocation=AllocationState.ALLOCATED,
        pods=uses,
        unattributed_activity_ratio=0.12,
        unattributed_memory_bytes=3 << 20,
        unattributed_processes=1,
    )


def partitioned(index: int = 2) -> tuple[DeviceView, ...]:
    device = gpu(index, mig=True)
    held, free = instance(device, 9), instance(device, 10)
    use = PodUse(holder=holder("notebook", held.uuid, ShareMode.MIG, parts=7), age_seconds=7.5)
    own = {**PER_DEVICE, **UTILISATION, Field.POWER_USAGE: 1.0}
    return (
        DeviceView(gpu=device, values={**BOARD, Field.FB_TOTAL: 81_559}, allocation=None),
        DeviceView(gpu=device, instance=held, values=own, allocation=AllocationState.ALLOCATED, pods=(use,)),
        DeviceView(gpu=device, instance=free, values=PER_DEVICE, allocation=AllocationState.UNALLOCATED),
    )


def lost(index: int = 3) -> DeviceView:
    device = gpu(index)
    return DeviceView(
        gpu=device,
        state=DeviceState.LOST,
        reason="gpu_is_lost",
        values=WHOLE,
        allocation=AllocationState.ALLOCATED,
        pods=(PodUse(holder=holder("stuck", device.uuid), age_seconds=9.0, idle_for_seconds=9.0),),
        xids={79: 1},
        last_xid=79,
    )


EVENTS = {
    gpu(0).uuid: DeviceEvents(
        recent_xids={31: 2},
        clock_events=dict.fromkeys(CLOCK_EVENTS, 0) | {"power_cap": 3, "hw_thermal": 1},
        recent_clock_events={"power_cap": 12},
        thermal_throttle_ratio=0.25,
    ),
    gpu(1).uuid: DeviceEvents(clock_events=dict.fromkeys(CLOCK_EVENTS, 0), recent_clock_events={}),
    gpu(2).uuid: DeviceEvents(clock_events=dict.fromkeys(CLOCK_EVENTS, 0)),
    "MIG-290": DeviceEvents(recent_xids={43: 1}),
    gpu(3).uuid: DeviceEvents(recent_xids={79: 1}, clock_events=dict.fromkeys(CLOCK_EVENTS, 0)),
}
PRICE = Price(per_hour=2.5, currency="USD", source="fleet:h100", as_of="2026-10-01")
TRAINING = Account(owner=RESNET, model=H100, mode=ShareMode.EXCLUSIVE)
UNMEASURED = Account(owner=UNATTRIBUTED, model=H100, mode=ShareMode.MIG)
IN_USE = PodAccount(
    device_uuid=gpu(0).uuid,
    gpu_index=0,
    gpu_uuid=gpu(0).uuid,
    model=H100,
    namespace="vision",
    pod="resnet-0",
    container="main",
    pod_uid="uid-resnet-0",
)
ENDED = PodAccount(
    device_uuid=instance(gpu(2, mig=True), 10).uuid,
    gpu_index=2,
    gpu_uuid=gpu(2).uuid,
    gpu_instance="10",
    mig_profile="1g.10gb",
    model=H100,
    namespace="vision",
    pod="short-job",
    container="main",
)


def one_ledger(
    accounts: Mapping[Account, Totals],
    created_at_seconds: float = 0.0,
    *,
    identity: str = "0123456789ab",
    capacity_seconds: float = 0.0,
) -> tuple[ShownLedger, ...]:
    return (
        ShownLedger(
            identity=identity,
            created_at_seconds=created_at_seconds,
            capacity_seconds=capacity_seconds,
            accounts=accounts,
        ),
    )


def ledger(at_seconds: float) -> LedgerView:
    """Return an hour of two GPUs with three owners: a measured one, an unmeasured one, and Unallocated."""
    work = Totals(
        seconds=ByState(effective=500.0, ineffective=1300.0, unprofiled=900.0, idle=600.0, unknown=300.0),
        energy_joules=1_800_000.5,
        money={"USD": ByState(effective=0.35, ineffective=0.9, unprofiled=0.625, idle=0.4166666, unknown=0.2083334)},
    )
    short = Totals(seconds=ByState(unknown=72.0), energy_unknown_seconds=72.0, unpriced_seconds=72.0)
    free = Totals(seconds=ByState(idle=3528.0), energy_joules=250_000.0, money={"USD": ByState(idle=2.45)})
    nobody = Account(owner=UNALLOCATED, model=H100, mode=ShareMode.EXCLUSIVE)
    return LedgerView(
        ledgers=one_ledger(
            {TRAINING: work, UNMEASURED: short, nobody: free}, at_seconds - 3600, capacity_seconds=7200.0
        ),
        pods={IN_USE: work, ENDED: short},
        conservation_error_seconds=1e-12,
        saved_at_seconds=at_seconds - 3,
    )


OWNERS = OwnersView(
    owners=(
        OwnerUse(
            owner=TRAINING.owner,
            active_seconds={"15m": 700.0, "30m": 1500.0, "24h": 40_000.0},
            measured_seconds={"15m": 900.0, "30m": 1799.12345, "24h": 80_000.0},
            profiled_seconds={"15m": 600.0, "1h": 1800.0},
            effective_seconds={"15m": 180.0, "1h": 500.0},
            bottleneck_seconds={"memory": 500.0, "starved": 1300.0},
            resource_use_seconds={"compute": 90.0, "memory": 450.0, "transfer": 0.0, "video": 0.0, "profiled": 1800.0},
            gpus=1.0,
            estimated_gpus=0.25,
            underused_gpus=0.5,
            unused_gpus={"30m": 0.25, "2h": 0.125},
            active_gpus=0.5,
            idle_for_seconds=5.0,
            age_seconds=3600.0,
            policy="batch",
            opt_out_until_seconds=inf,
            cost_per_hour={"USD": 2.5},
            idle_cost_per_hour={"USD": 0.5},
        ),
        OwnerUse(
            owner=Owner(namespace="vision", kind="Pod", name="short-job"),
            active_seconds={"24h": 30.0},
            measured_seconds={"24h": 60.0},
        ),
    ),
    pools=(
        PoolUse(model=H100, gpus=4, unallocated_gpus=1.5, unallocated_cost_per_hour={"USD": 3.75}, unpriced_gpus=1),
    ),
    shared_idle=(SharedIdle(gpu_index=2, uuid="MIG-290", gpu_instance="9", gpus=0.125),),
    broken_gpus={TRAINING.owner: 2},
    xids=(
        OwnerXid(
            owner=TRAINING.owner,
            gpu_index=2,
            device_uuid="MIG-290",
            namespace="vision",
            pod="resnet-0",
            xid=31,
            at_seconds=1_760_000_100.5,
        ),
    ),
)


def snapshot(*devices: DeviceView, at_seconds: float = 1_760_000_200.25) -> Snapshot:
    return Snapshot(
        taken_at_seconds=at_seconds,
        node="node-a",
        simulated=True,
        reading=Reading(
            source="nvml",
            driver_version="580.65.06",
            nvml_version="13.580.65",
            dcgm_version="4.6.0",
            taken_at_seconds=at_seconds - 0.25,
            duration_seconds=0.012,
        ),
        devices=devices or (exclusive(), shared(), *partitioned(), lost()),
        sources=(
            SourceStatus(name="nvml", state=SourceState.UP, restarts=1),
            SourceStatus(name="dcgm", state=SourceState.UP),
        ),
        events=EVENTS,
        history=ActivityHistory(bottlenecks={gpu(0).uuid: {Bottleneck.MEMORY: 0.25, Bottleneck.STARVED: 0.75}}),
        attribution=Attribution(
            known=True,
            answered_at_seconds=at_seconds - 2,
            expected_devices=5,
            advertised_devices=4,
            allocated_devices=3,
            unresolved=(
                Unresolved(
                    namespace="lab",
                    pod="odd",
                    container="main",
                    resource="nvidia.com/gpu",
                    device_id="GPU-gone",
                    reason="unknown_uuid",
                ),
            ),
        ),
        metadata=MetadataStatus(known=True, at_seconds=at_seconds - 20),
        errors={("attribution", "unavailable"): 3},
        tick_duration_seconds=0.001,
        ready=True,
        metering=MeteringView(
            ledger=ledger(at_seconds),
            owners=OWNERS,
            node_facts=NodeFacts(
                instance_type="p5.48xlarge",
                capacity_type="spot",
                region="us-east-1",
                gpu_product="NVIDIA-H100-80GB-HBM3",
            ),
            is_writer=True,
            is_locked=True,
            prices={gpu(index).uuid: PRICE for index in range(3)},
            price_book="fleet (GPUs are 80% of a node's price)",
            unpriced_gpus=1,
        ),
    )
