import json
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_support import GPU_MIB, gpu, gpu_uuid, held, instance, join, knowing, mig_uuid, pod_metadata, reasons, shares

from exporter.attribution import vgpu as annotated
from exporter.attribution.pod_lifecycle import Evidence
from exporter.model.attribution import ContainerAllocation, DeviceIds, ShareMode

HAMI = "hami.io/vgpu-devices-allocated"
INSTANCES = "hami.io/vgpu-mig-allocations"
VOLCANO = "volcano.sh/vgpu-ids-new"
QUARTER = GPU_MIB // 4


def vgpu(number: int, mib: int = QUARTER, cores: int = 0) -> str:
    return f"{gpu_uuid(number)},NVIDIA,{mib},{cores}:"


def placeholder(number: int, running: int = 0) -> str:
    return f"{gpu_uuid(number)}-{running}"


def test_annotation_overrides_the_placeholder_device() -> None:
    known = knowing(pod_metadata("a", {HAMI: vgpu(1) + ";"}))
    attribution = join([held("a", placeholder(0))], [gpu(0), gpu(1)], evidence=known)
    (holder,) = attribution.holders[gpu_uuid(1)]
    assert list(attribution.holders) == [gpu_uuid(1)]
    assert (holder.share_ratio, holder.device_share_ratio, holder.share_estimated) == (0.25, 0.25, False)
    assert (holder.source, holder.resource, holder.mode) == ("annotation", "nvidia.com/gpu", ShareMode.SHARED)
    assert holder.pod_uid == "uid-a"


@pytest.mark.parametrize(
    ("mib", "cores", "share", "estimated"),
    [
        (QUARTER, 0, 0.25, False),
        (QUARTER, 30, 0.3, False),
        (QUARTER, 10, 0.25, False),
        (0, 50, 0.5, False),
        (GPU_MIB, 0, 1.0, False),
        (GPU_MIB, 100, 1.0, False),
        (2 * GPU_MIB, 0, 1.0, True),
        (0, 0, 1.0, True),
    ],
)
def test_share_is_the_larger_of_memory_and_cores_and_0_is_no_limit(
    mib: int,
    cores: int,
    share: float,
    estimated: bool,  # noqa: FBT001 - a table
) -> None:
    known = knowing(pod_metadata("a", {HAMI: vgpu(0, mib, cores) + ";"}))
    (holder,) = join([held("a", placeholder(0))], [gpu(0)], evidence=known).holders[gpu_uuid(0)]
    assert (holder.share_ratio, holder.share_estimated) == (share, estimated)
    assert holder.mode is (ShareMode.SHARED if share < 1 else ShareMode.EXCLUSIVE)


def test_declared_memory_on_a_gpu_of_unknown_memory_is_estimated_by_cores() -> None:
    known = knowing(pod_metadata("a", {HAMI: vgpu(0, 1000, 40) + ";"}))
    (holder,) = join([held("a", placeholder(0))], [gpu(0, memory_mib=None)], evidence=known).holders[gpu_uuid(0)]
    assert (holder.share_ratio, holder.share_estimated) == (0.4, True)


def test_declared_memory_without_cores_on_unknown_memory_is_unresolved() -> None:
    known = knowing(pod_metadata("a", {HAMI: vgpu(0, 1000, 0) + ";"}))
    attribution = join([held("a", placeholder(0))], [gpu(0, memory_mib=None)], evidence=known)
    assert attribution.holders.get(gpu_uuid(0), ()) == ()
    assert [entry.reason for entry in attribution.unresolved] == ["memory_unknown"]


def test_shares_over_the_whole_gpu_are_scaled_and_estimated() -> None:
    known = knowing(
        pod_metadata("a", {HAMI: vgpu(0, 3 * QUARTER) + ";"}), pod_metadata("b", {HAMI: vgpu(0, 3 * QUARTER) + ";"})
    )
    holders = join([held("a", placeholder(0)), held("b", placeholder(0, 1))], [gpu(0)], evidence=known).holders
    assert [(one.share_ratio, one.share_estimated) for one in holders[gpu_uuid(0)]] == [(0.5, True)] * 2


def test_two_parts_of_one_gpu_in_one_container_are_added() -> None:
    known = knowing(pod_metadata("a", {HAMI: vgpu(0) + vgpu(0) + ";"}))
    attribution = join([held("a", placeholder(0), placeholder(0, 1))], [gpu(0)], evidence=known)
    assert shares(attribution) == {(gpu_uuid(0), "a", "main"): 0.5}


@pytest.mark.parametrize(
    "text",
    [
        "{0};{1};",
        "{0};{1}",
        ";{0};;{1};",
        "{3};{0};{1};",
        "{0};{3};{1};",
        ",,0,0:;{0};,,0,0:;{1};,,0,0:;",
        "{0};{1};;,,0,0:;,,0,0:;",
    ],
    ids=[
        "in order",
        "no end",
        "containers without GPUs",
        "an init container first",
        "one between",
        "no GPUs in zeros",
        "no GPUs in zeros and in nothing",
    ],
)
def test_containers_are_matched_by_device_count_from_the_end(text: str) -> None:
    elements = [vgpu(0), vgpu(1) + vgpu(2), "", vgpu(0) + vgpu(1) + vgpu(2)]
    known = knowing(pod_metadata("a", {HAMI: text.format(*elements)}))
    containers = [
        held("a", placeholder(2), container="one"),
        held("a", placeholder(0), placeholder(1), container="two"),
    ]
    attribution = join(containers, [gpu(0), gpu(1), gpu(2)], evidence=known)
    assert shares(attribution) == {
        (gpu_uuid(0), "a", "one"): 0.25,
        (gpu_uuid(1), "a", "two"): 0.25,
        (gpu_uuid(2), "a", "two"): 0.25,
    }


def test_init_container_of_the_same_size_is_not_matched() -> None:
    known = knowing(pod_metadata("a", {HAMI: f"{vgpu(0)};{vgpu(1)};"}))
    attribution = join([held("a", placeholder(0))], [gpu(0), gpu(1)], evidence=known)
    assert shares(attribution) == {(gpu_uuid(1), "a", "main"): 0.25}


@pytest.mark.parametrize(
    ("annotations", "reason"),
    [
        ({}, "needs_annotation"),
        ({VOLCANO: vgpu(0)}, "needs_annotation"),
        ({HAMI: ""}, "bad_annotation"),
        ({HAMI: ";"}, "bad_annotation"),
        ({HAMI: "nonsense"}, "bad_annotation"),
        ({HAMI: f"{gpu_uuid(0)},NVIDIA,1000:;"}, "bad_annotation"),
        ({HAMI: f"{gpu_uuid(0)},NVIDIA,-5,0:;"}, "bad_annotation"),
        ({HAMI: f"{gpu_uuid(0)},NVIDIA,{'9' * 5000},0:;"}, "bad_annotation"),
        ({HAMI: f"{vgpu(0)}{vgpu(1)};{vgpu(0)}{vgpu(1)};"}, "bad_annotation"),
        ({HAMI: f"{gpu_uuid(0)}[1-0],NVIDIA,1000,0:;"}, "unknown_form"),
        ({HAMI: "all,NVIDIA,1000,0:;"}, "unknown_form"),
        ({HAMI: f"{vgpu(9)};"}, "unknown_uuid"),
        ({HAMI: vgpu(0), INSTANCES: "{"}, "bad_annotation"),
        ({HAMI: vgpu(0), INSTANCES: "[" * 100_000}, "bad_annotation"),
        ({HAMI: vgpu(0), INSTANCES: "7"}, "bad_annotation"),
        ({HAMI: vgpu(0), INSTANCES: '[{"containerIndex": -1, "deviceIndex": 0}]'}, "bad_annotation"),
        ({HAMI: vgpu(0), INSTANCES: '[{"containerIndex": 0, "deviceIndex": 7}]'}, "bad_annotation"),
        ({HAMI: vgpu(0), INSTANCES: '[{"containerIndex": 0, "deviceIndex": 0}]'}, "bad_annotation"),
    ],
)
def test_unusable_annotation_is_unresolved_with_the_reason(annotations: Mapping[str, str], reason: str) -> None:
    attribution = join([held("a", placeholder(0))], [gpu(0)], evidence=knowing(pod_metadata("a", annotations)))
    assert attribution.holders == {}
    assert reasons(attribution) == [("a", reason)]


@pytest.mark.parametrize("evidence", [knowing(), knowing(pod_metadata("b"))])
def test_unknown_pod_is_unresolved_and_needs_its_annotation(evidence: Evidence) -> None:
    attribution = join([held("a", placeholder(0))], [gpu(0)], evidence=evidence)
    assert reasons(attribution) == [("a", "needs_annotation")]
    assert attribution.unresolved[0].device_id == placeholder(0)


def test_annotation_does_not_override_a_uuid_of_the_kubelet() -> None:
    known = knowing(pod_metadata("a", {HAMI: vgpu(1) + ";"}))
    attribution = join([held("a", gpu_uuid(0))], [gpu(0), gpu(1)], evidence=known)
    assert shares(attribution) == {(gpu_uuid(0), "a", "main"): 1.0}


def test_mig_uuid_in_the_annotation_is_the_whole_instance() -> None:
    known = knowing(pod_metadata("a", {HAMI: f"{mig_uuid(2)},NVIDIA,9984,14:;"}))
    attribution = join([held("a", mig_uuid(1))], [gpu(0, mig=True)], [instance(1), instance(2)], evidence=known)
    (holder,) = attribution.holders[mig_uuid(2)]
    assert (holder.share_ratio, holder.device_share_ratio, holder.mode) == (1 / 7, 1.0, ShareMode.MIG)
    assert mig_uuid(1) not in attribution.holders


def allocation(container: int, device: int, **values: object) -> dict[str, object]:
    return {
        "containerIndex": container,
        "deviceIndex": device,
        "gpuUUID": gpu_uuid(0),
        "profile": "1g.10gb",
        "placement": {"start": 2, "size": 1},
        **values,
    }


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"migUUID": mig_uuid(1), "gpuInstanceID": 1, "computeInstanceID": 0}, [mig_uuid(1)]),
        ({}, [mig_uuid(2)]),
        ({"placement": {"start": 5, "size": 1}}, []),
        ({"profile": "2g.20gb"}, []),
    ],
)
def test_instance_created_by_hami_is_found_by_uuid_or_placement(
    values: Mapping[str, object], found: Sequence[str]
) -> None:
    annotations = {HAMI: f";{vgpu(0, 10240)};", INSTANCES: json.dumps([allocation(1, 0, **values)])}
    attribution = join(
        [held("a", placeholder(0))],
        [gpu(0, mig=True)],
        [instance(1, start=0, profile_id=19), instance(2, start=2, profile_id=19)],
        evidence=knowing(pod_metadata("a", annotations)),
    )
    assert list(attribution.holders) == found
    assert len(attribution.unresolved) == (not found)


def volcano(pod: str, number: int, memory: int, container: str = "main") -> ContainerAllocation:
    return ContainerAllocation(
        namespace="ml",
        pod=pod,
        container=container,
        devices=(
            DeviceIds(resource="volcano.sh/vgpu-memory", ids=tuple(f"{gpu_uuid(0)}-memory-{i}" for i in range(memory))),
            DeviceIds(resource="volcano.sh/vgpu-number", ids=tuple(placeholder(0, i) for i in range(number))),
        ),
    )


def test_volcano_containers_are_matched_by_device_count_not_memory() -> None:
    known = knowing(pod_metadata("a", {VOLCANO: f"{vgpu(0)}{vgpu(1, cores=50)};{vgpu(2)}"}))
    containers = [volcano("a", 2, 1000, "one"), volcano("a", 1, 500, "two")]
    attribution = join(containers, [gpu(0), gpu(1), gpu(2)], evidence=known)
    assert shares(attribution) == {
        (gpu_uuid(0), "a", "one"): 0.25,
        (gpu_uuid(1), "a", "one"): 0.5,
        (gpu_uuid(2), "a", "two"): 0.25,
    }
    assert {one.resource for holders in attribution.holders.values() for one in holders} == {"volcano.sh/vgpu-number"}


def test_volcano_memory_resource_alone_is_one_device() -> None:
    ids = [f"{gpu_uuid(0)}-memory-{number}" for number in range(2000)]
    containers = [held("a", *ids, resource="volcano.sh/vgpu-memory"), volcano("a", 1, 10, "two")]
    known = knowing(pod_metadata("a", {VOLCANO: f"{vgpu(0)};{vgpu(1)}"}))
    attribution = join(containers, [gpu(0), gpu(1)], evidence=known)
    assert shares(attribution) == {(gpu_uuid(0), "a", "main"): 0.25, (gpu_uuid(1), "a", "two"): 0.25}


def test_annotation_keys_to_read_are_requested() -> None:
    assert {HAMI, INSTANCES, VOLCANO, "gpu-fraction", "gpu-memory", "gpu-fraction-container-name"} == annotated.KEYS


@settings(deadline=None)  # a busy machine is not an error
@given(st.dictionaries(st.sampled_from(sorted(annotated.KEYS)), st.text(st.sampled_from(f"{vgpu(0)};[]{{}}"))))
def test_arbitrary_annotations_resolve_or_are_unresolved(annotations: Mapping[str, str]) -> None:
    containers = [
        held("a", placeholder(0)),
        volcano("a", 1, 10, "v"),
        held("a", "0-1", resource="volcano.sh/gpu-number"),
    ]
    attribution = join(containers, [gpu(0)], evidence=knowing(pod_metadata("a", annotations)))
    assert attribution.holders or attribution.unresolved
