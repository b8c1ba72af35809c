import time
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_support import (
    GPU_MIB,
    MIB,
    allocated,
    claimed,
    gpu,
    gpu_uuid,
    held,
    instance,
    join,
    knowing,
    mig_uuid,
    pod_metadata,
    reasons,
    shares,
)

from exporter.attribution.pod_lifecycle import Evidence, SliceDevice
from exporter.attribution.vgpu import HAMI_DEVICES, HAMI_INSTANCES
from exporter.model.attribution import ContainerAllocation, PodMetadata
from exporter.model.devices import Gpu, MigInstance


def test_holders_have_the_known_uid_of_their_pod() -> None:
    containers = [held("a", gpu_uuid(0)), held("b", gpu_uuid(1))]
    holders = join(containers, [gpu(0), gpu(1)], evidence=knowing(pod_metadata("a"))).holders
    assert [holders[gpu_uuid(number)][0].pod_uid for number in range(2)] == ["uid-a", None]


def test_ended_pods_are_neither_holders_nor_unresolved() -> None:
    evidence = Evidence(ended=frozenset({("ml", "b"), ("ml", "c")}))
    containers = [held("a", gpu_uuid(0)), held("b", gpu_uuid(0)), held("c", "junk")]
    attribution = join(containers, [gpu(0)], evidence=evidence)
    assert shares(attribution) == {(gpu_uuid(0), "a", "main"): 1.0}
    assert attribution.unresolved == ()


def test_the_agents_own_pod_holds_nothing() -> None:
    evidence = Evidence(own_pod=("ml", "agent"))
    attribution = join([held("agent", gpu_uuid(0)), held("agent-2", gpu_uuid(1))], [gpu(0), gpu(1)], evidence=evidence)
    assert shares(attribution) == {(gpu_uuid(1), "agent-2", "main"): 1.0}


@pytest.mark.parametrize(
    ("allocatable", "containers", "expected"),
    [
        (None, [held("a", gpu_uuid(0))], (None, 1, None)),
        ({}, [held("a", gpu_uuid(0))], (0, 1, None)),
        ({"nvidia.com/gpu": [gpu_uuid(0), gpu_uuid(1)]}, [held("a", gpu_uuid(0))], (2, 1, 2)),
        ({"nvidia.com/gpu": [gpu_uuid(1)]}, [held("a", gpu_uuid(0)), held("b", gpu_uuid(7))], (1, 2, 3)),
        ({"nvidia.com/gpu": [mig_uuid(1), mig_uuid(2)]}, [held("a", mig_uuid(1)), held("b", mig_uuid(2))], (1, 1, 1)),
        ({"nvidia.com/gpu": [mig_uuid(1), mig_uuid(9)]}, [held("a", mig_uuid(1))], (None, 1, None)),
        ({"nvidia.com/gpu": [gpu_uuid(0)]}, [held("a", mig_uuid(9))], (1, None, None)),
        ({"nvidia.com/gpu": [f"{gpu_uuid(0)}-1"]}, [held("a", f"{gpu_uuid(0)}-1")], (1, None, 1)),
        ({"nvidia.com/gpu": ["all"]}, [], (2, 0, 2)),
        ({"nvidia.com/gpu": ["junk"]}, [held("a", "junk")], (None, None, None)),
    ],
)
def test_gpu_counts_are_kept_per_source_and_absent_if_incomplete(
    allocatable: dict[str, Sequence[str]] | None,
    containers: list[ContainerAllocation],
    expected: tuple[int | None, int | None, int | None],
) -> None:
    attribution = join(containers, [gpu(0), gpu(1)], [instance(1), instance(2)], allocatable=allocatable)
    counts = (attribution.advertised_devices, attribution.allocated_devices, attribution.expected_devices)
    assert counts == expected


@pytest.mark.parametrize(
    ("resource", "form", "unresolved"),
    [
        ("volcano.sh/vgpu-memory", "{uuid}-memory-{number}", 1),
        ("volcano.sh/gpu-memory", "0-{number}", 1),
        ("aliyun.com/gpu-mem", "{uuid}-_-{number}", 1),
        ("nvidia.com/gpu", "{uuid}-{number}", 1),
        ("example.com/gpu", "gpu mem {number}", 1),
    ],
)
def test_one_id_per_mebibyte_is_cheap_and_unresolved_once_per_container(
    resource: str, form: str, unresolved: int
) -> None:
    ids = [form.format(uuid=gpu_uuid(0), number=number) for number in range(88_000)]
    containers = [held("a", *ids[:44_000], resource=resource), held("b", *ids[44_000:], resource=resource)]
    begun = time.process_time()
    attribution = join(containers, [gpu(0)], allocatable={resource: ids})
    took = time.process_time() - begun
    assert len(attribution.unresolved) == 2 * unresolved
    assert attribution.unresolved[0].device_id == ids[0]
    assert took < 5  # quadratic time would be minutes; a busy machine cannot keep the budget of 0.2 s


NAMES = ("a", "b", "c")
HAMI_TEXT = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from([gpu_uuid(0), gpu_uuid(1), gpu_uuid(5), mig_uuid(11), "junk"]),
            st.integers(0, 2 * GPU_MIB),
            st.integers(0, 120),
        ).map(lambda one: f"{one[0]},NVIDIA,{one[1]},{one[2]}:"),
        max_size=3,
    ).map("".join),
    max_size=3,
).map(";".join)
PODS = st.builds(
    pod_metadata,
    st.sampled_from(NAMES),
    st.fixed_dictionaries(
        {}, optional={HAMI_DEVICES: HAMI_TEXT, "gpu-fraction": st.sampled_from(["0.3", "0.9", "2", "x"])}
    ),
    st.fixed_dictionaries({}, optional={"runai-gpu-group": st.sampled_from(["x", "y"])}),
)
RESERVING = st.builds(
    pod_metadata,
    st.sampled_from(["r0", "r1"]),
    labels=st.fixed_dictionaries({}, optional={"runai-gpu-group": st.sampled_from(["x", "y"])}),
    namespace=st.just("kai-resource-reservation"),
)
IDS = st.lists(
    st.tuples(
        st.sampled_from([gpu_uuid(0), gpu_uuid(1), gpu_uuid(5), mig_uuid(11), mig_uuid(12)]),
        st.sampled_from(["", "-0", "-1", "::0", "::1"]),
    ).map("".join),
    min_size=1,
    max_size=3,
)
DRA_NAMES = ("gpu-10", "gpu-11", "gpu-11-mig-1g10gb-19-0", "gpu-11-mig-1g10gb-19-1")
CONTAINERS = st.lists(
    st.builds(lambda pod, ids: held(pod, *ids), st.sampled_from(NAMES), IDS)
    | st.builds(
        lambda pod, ids: held(pod, *ids, namespace="kai-resource-reservation"), st.sampled_from(["r0", "r1"]), IDS
    )
    | st.builds(
        lambda pod, device, claim, share: claimed(pod, device, claim=claim, share_id=share),
        st.sampled_from(NAMES),
        st.sampled_from(DRA_NAMES),
        st.integers(1, 2),
        st.sampled_from([None, "s1", "s2"]),
    ),
    max_size=6,
)
SLICE_DEVICES = st.sampled_from(
    [
        SliceDevice(kind="gpu", uuid=gpu_uuid(0), memory_bytes=GPU_MIB * MIB),
        SliceDevice(kind="gpu", uuid=gpu_uuid(5)),
        SliceDevice(kind="mig", parent_uuid=gpu_uuid(1), profile="1g.10gb"),
        SliceDevice(kind="mig", uuid=mig_uuid(11)),
        SliceDevice(kind="vfio"),
        SliceDevice(),
    ]
)
RESULTS = st.lists(
    st.builds(
        allocated,
        st.sampled_from(DRA_NAMES),
        share_id=st.sampled_from([None, "s1", "s2"]),
        admin_access=st.booleans(),
        consumed_memory_bytes=st.none() | st.integers(0, 2 * GPU_MIB * MIB),
    ),
    max_size=4,
).map(tuple)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    pods = draw(st.none() | st.lists(PODS | RESERVING, max_size=5))
    results = draw(st.dictionaries(st.integers(1, 2).map("0f1e2d3c-0000-4000-8000-0000000000{:02d}".format), RESULTS))
    return Evidence(
        pods=None if pods is None else {(pod.namespace, pod.name): pod for pod in pods},
        ended=frozenset(draw(st.sets(st.sampled_from([("ml", name) for name in NAMES]), max_size=1))),
        claims=results,
        reads_claims=draw(st.booleans()),
        devices=draw(
            st.none() | st.dictionaries(st.sampled_from([("node-1", name) for name in DRA_NAMES]), SLICE_DEVICES)
        ),
        own_pod=draw(st.sampled_from([None, ("ml", "c")])),
    )


GPUS: list[Gpu] = [gpu(0), gpu(1, mig=True)]
INSTANCES: list[MigInstance] = [instance(11, 1, start=0, profile_id=19), instance(12, 1)]


@settings(max_examples=100)
@given(CONTAINERS, evidences())
def test_evidence_never_overfills_a_gpu_or_loses_a_container(
    containers: list[ContainerAllocation], evidence: Evidence
) -> None:
    attribution = join(containers, GPUS, INSTANCES, evidence=evidence)
    parents = {one.uuid: one.uuid for one in GPUS} | {one.uuid: one.parent_uuid for one in INSTANCES}
    per_gpu: dict[str, float] = defaultdict(float)
    for uuid, holders in attribution.holders.items():
        assert len({(one.namespace, one.pod, one.container) for one in holders}) == len(holders)
        for one in holders:
            assert 0 < one.share_ratio <= 1 + 1e-12
            assert (one.namespace, one.pod) not in evidence.ended
            assert (one.namespace, one.pod) != evidence.own_pod
            per_gpu[parents[uuid]] += one.share_ratio
    assert all(total <= 1 + 1e-12 for total in per_gpu.values())
    seen = {(one.namespace, one.pod) for of in attribution.holders.values() for one in of}
    seen |= {(one.namespace, one.pod) for one in attribution.unresolved}
    for container in containers:
        name = (container.namespace, container.pod)
        reserves = container.namespace != "ml" and evidence.pods is not None
        if container.devices and not reserves and name not in evidence.ended and name != evidence.own_pod:
            assert name in seen


@settings(deadline=None)  # a busy machine is not an error
@given(st.lists(st.integers(1, GPU_MIB), min_size=1, max_size=8))
def test_fitting_declared_parts_are_kept_and_others_are_scaled(mebibytes: list[int]) -> None:
    pods = [
        pod_metadata(f"p{number}", {HAMI_DEVICES: f"{gpu_uuid(0)},NVIDIA,{mib},0:;"})
        for number, mib in enumerate(mebibytes)
    ]
    containers = [held(pod.name, f"{gpu_uuid(0)}-{number}") for number, pod in enumerate(pods)]
    holders = join(containers, [gpu(0)], evidence=knowing(*pods)).holders[gpu_uuid(0)]
    fits = sum(mebibytes) <= GPU_MIB
    whole = GPU_MIB if fits else sum(mebibytes)
    assert [one.share_ratio for one in holders] == [pytest.approx(mib / whole) for mib in mebibytes]
    assert {one.share_estimated for one in holders} == {not fits}


def test_hami_and_nvidia_plugin_devices_coexist() -> None:
    pods: list[PodMetadata] = [
        pod_metadata("hami", {HAMI_DEVICES: f"{gpu_uuid(0)},NVIDIA,{GPU_MIB // 2},0:;"}),
        pod_metadata("mig", {HAMI_DEVICES: f"{gpu_uuid(1)},NVIDIA,10240,0:;", HAMI_INSTANCES: "[]"}),
    ]
    containers = [held("hami", f"{gpu_uuid(0)}-0"), held("plain", mig_uuid(12)), held("broken", f"{gpu_uuid(1)}-0")]
    attribution = join(containers, GPUS, INSTANCES, evidence=knowing(*pods))
    assert {pod: share for (_, pod, _), share in shares(attribution).items()} == {"hami": 0.5, "plain": 1 / 7}
    assert reasons(attribution) == [("broken", "needs_annotation")]
