import pytest
from join_support import (
    CLAIM,
    GPU_MIB,
    MIB,
    allocated,
    claimed,
    gpu,
    gpu_uuid,
    instance,
    join,
    knowing,
    mig_uuid,
    pod_metadata,
    reasons,
    shares,
)

from exporter.attribution.device_ids import claim_uid
from exporter.attribution.pod_lifecycle import AllocatedDevice, Evidence, SliceDevice
from exporter.model.attribution import ClaimedDevice, ShareMode
from exporter.model.devices import MigInstance

FIRST, SECOND = CLAIM.format(1), CLAIM.format(2)
NEW_FORM = "gpu-10-mig-1g10gb-19-2"
OLD_FORM = "gpu-10-mig-19-2-1"


def sliced(**devices: SliceDevice) -> Evidence:
    return Evidence(devices={("node-1", name.replace("_", "-")): device for name, device in devices.items()})


def whole(number: int) -> SliceDevice:
    return SliceDevice(kind="gpu", uuid=gpu_uuid(number), memory_bytes=GPU_MIB * MIB)


def test_device_is_resolved_by_its_slice_and_not_by_its_name() -> None:
    attribution = join([claimed("a", "gpu-10")], [gpu(0), gpu(1)], evidence=sliced(gpu_10=whole(1)))
    (holder,) = attribution.holders[gpu_uuid(1)]
    assert (holder.source, holder.resource, holder.mode) == ("dra", "gpu.nvidia.com", ShareMode.EXCLUSIVE)
    assert list(attribution.holders) == [gpu_uuid(1)]


@pytest.mark.parametrize("evidence", [Evidence(), sliced(), sliced(gpu_99=whole(1))])
def test_device_without_a_slice_is_resolved_by_its_name(evidence: Evidence) -> None:
    assert list(join([claimed("a", "gpu-10")], [gpu(0), gpu(1)], evidence=evidence).holders) == [gpu_uuid(0)]


def test_slice_of_another_pool_is_ignored() -> None:
    evidence = Evidence(devices={("node-2", "gpu-10"): whole(1)})
    assert list(join([claimed("a", "gpu-10")], [gpu(0), gpu(1)], evidence=evidence).holders) == [gpu_uuid(0)]


PLACED = [instance(1, start=0, profile_id=19), instance(2, start=2, profile_id=19), instance(3, start=2, profile_id=15)]
UNPLACED = [instance(1), instance(2)]
STATIC = SliceDevice(kind="mig", uuid=mig_uuid(2), parent_uuid=gpu_uuid(0), profile="1g.10gb")
DYNAMIC = SliceDevice(kind="mig", parent_uuid=gpu_uuid(0), profile="1g.10gb")


@pytest.mark.parametrize(
    ("name", "device", "instances", "found"),
    [
        (NEW_FORM, STATIC, UNPLACED, [mig_uuid(2)]),
        (OLD_FORM, STATIC, UNPLACED, [mig_uuid(2)]),
        (NEW_FORM, DYNAMIC, PLACED, [mig_uuid(2)]),
        (NEW_FORM, None, PLACED, [mig_uuid(2)]),
        (NEW_FORM, DYNAMIC, UNPLACED, []),
        (NEW_FORM, None, UNPLACED, []),
        (NEW_FORM, DYNAMIC, UNPLACED[:1], [mig_uuid(1)]),
        (NEW_FORM, DYNAMIC, [], []),
        (NEW_FORM, DYNAMIC, PLACED[:1], []),
        (OLD_FORM, DYNAMIC, UNPLACED[:1], [mig_uuid(1)]),
        (OLD_FORM, DYNAMIC, UNPLACED, []),
        (OLD_FORM, None, PLACED, []),
    ],
    ids=[
        "static",
        "static, old name",
        "dynamic by place",
        "by place without a slice",
        "dynamic, places not reported",
        "without a slice, places not reported",
        "dynamic, one of its profile",
        "dynamic, not made yet",
        "dynamic, another is made",
        "old name, one of its profile",
        "old name, several of its profile",
        "old name without a slice",
    ],
)
def test_instance_is_found_by_uuid_placement_or_unique_profile(
    name: str, device: SliceDevice | None, instances: list[MigInstance], found: list[str]
) -> None:
    evidence = Evidence(devices={("node-1", name): device} if device else None)
    attribution = join([claimed("a", name)], [gpu(0, mig=True)], instances, evidence=evidence)
    assert list(attribution.holders) == found
    assert reasons(attribution) == ([] if found else [("a", "dra_unresolved")])


def test_two_dynamic_instances_are_distinguished_by_placement() -> None:
    names = ("gpu-10-mig-1g10gb-19-0", NEW_FORM)
    evidence = Evidence(devices={("node-1", name): DYNAMIC for name in names})
    containers = [claimed("a", names[0]), claimed("b", names[1], claim=2)]
    attribution = join(containers, [gpu(0, mig=True)], PLACED[:2], evidence=evidence)
    assert set(shares(attribution)) == {(mig_uuid(1), "a", "main"), (mig_uuid(2), "b", "main")}


def test_two_dynamic_claims_never_resolve_to_one_instance() -> None:
    names = ("gpu-10-mig-1g10gb-19-0", NEW_FORM)
    evidence = Evidence(devices={("node-1", names[0]): DYNAMIC})
    containers = [claimed("a", names[0]), claimed("b", names[1], claim=2)]
    attribution = join(containers, [gpu(0, mig=True)], UNPLACED[:1], evidence=evidence)
    assert attribution.holders == {}
    attribution = join(containers, [gpu(0, mig=True)], PLACED[:1], evidence=evidence)
    assert shares(attribution) == {(mig_uuid(1), "a", "main"): 1 / 7}


def test_slice_uuid_unknown_to_the_driver_is_unresolved() -> None:
    attribution = join([claimed("a", "gpu-10")], [gpu(0)], evidence=sliced(gpu_10=whole(5)))
    assert reasons(attribution) == [("a", "unknown_uuid")]
    assert attribution.allocated_devices == 1


def test_gpu_of_a_virtual_machine_is_passed_through() -> None:
    evidence = sliced(gpu_10=SliceDevice(kind="vfio", uuid=gpu_uuid(0)))
    attribution = join([claimed("a", "gpu-10")], [gpu(0)], evidence=evidence)
    assert reasons(attribution) == [("a", "dra_passed_through")]
    assert attribution.allocated_devices == 0


def test_admin_access_claim_is_no_holder() -> None:
    containers = [claimed("a", "gpu-10"), claimed("watcher", "gpu-10", "gpu-11", claim=2)]
    evidence = Evidence(
        reads_claims=True,
        claims={
            FIRST: (allocated("gpu-10"),),
            SECOND: (allocated("gpu-10", admin_access=True), allocated("gpu-11", admin_access=True)),
        },
    )
    attribution = join(containers, [gpu(0), gpu(1)], evidence=evidence)
    assert shares(attribution) == {(gpu_uuid(0), "a", "main"): 1.0}
    assert attribution.unresolved == ()
    assert attribution.allocated_devices == 1


def test_claim_with_admin_access_to_one_device_holds_the_other() -> None:
    evidence = Evidence(claims={FIRST: (allocated("gpu-10", admin_access=True), allocated("gpu-11"))})
    attribution = join([claimed("a", "gpu-10", "gpu-11")], [gpu(0), gpu(1)], evidence=evidence)
    assert list(attribution.holders) == [gpu_uuid(1)]


def test_claim_with_and_without_admin_access_to_a_device_holds_it() -> None:
    evidence = Evidence(claims={FIRST: (allocated("gpu-10", admin_access=True), allocated("gpu-10"))})
    assert list(join([claimed("a", "gpu-10")], [gpu(0)], evidence=evidence).holders) == [gpu_uuid(0)]


def test_unread_claim_is_pending() -> None:
    attribution = join([claimed("a", "gpu-10")], [gpu(0)], evidence=Evidence(reads_claims=True))
    assert attribution.holders == {}
    assert reasons(attribution) == [("a", "claim_pending")]
    assert attribution.allocated_devices is None


@pytest.mark.parametrize(
    ("claim", "evidence"),
    [
        (1, Evidence(reads_claims=True, unreadable_claims=frozenset({FIRST}))),
        (1, Evidence(reads_claims=True, claims={FIRST: ()})),
        (1, Evidence(reads_claims=True, claims={FIRST: (allocated("gpu-11", admin_access=True),)})),
        (1, Evidence(reads_claims=False)),
        (None, Evidence(reads_claims=True)),
    ],
    ids=["unreadable", "no results", "results of another device", "claims are not read", "no UID"],
)
def test_unreadable_claim_falls_back_to_the_kubelet(claim: int | None, evidence: Evidence) -> None:
    attribution = join([claimed("a", "gpu-10", claim=claim)], [gpu(0)], evidence=evidence)
    assert shares(attribution) == {(gpu_uuid(0), "a", "main"): 1.0}


def test_claim_without_a_uid_is_found_by_name() -> None:
    evidence = Evidence(reads_claims=True, claims={"ml/cNone": (allocated("gpu-10", admin_access=True),)})
    attribution = join([claimed("a", "gpu-10", claim=None)], [gpu(0)], evidence=evidence)
    assert (attribution.holders, attribution.unresolved) == ({}, ())


def consumed(share_id: str, mib: int | None) -> AllocatedDevice:
    return allocated("gpu-10", share_id=share_id, consumed_memory_bytes=None if mib is None else mib * MIB)


def sharing(first: int | None, second: int | None) -> Evidence:
    return Evidence(
        devices={("node-1", "gpu-10"): whole(0)},
        claims={FIRST: (consumed("s1", first),), SECOND: (consumed("s2", second),)},
    )


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (GPU_MIB // 4, GPU_MIB // 2, [(0.25, False), (0.5, False)]),
        (GPU_MIB // 4, None, [(0.25, False), (0.75, True)]),
        (None, None, [(0.5, True), (0.5, True)]),
        (GPU_MIB, GPU_MIB, [(0.5, True), (0.5, True)]),
        (GPU_MIB, None, [(0.5, True), (0.5, True)]),
    ],
)
def test_share_is_the_consumed_part_of_the_memory(
    first: int | None, second: int | None, expected: list[tuple[float, bool]]
) -> None:
    containers = [claimed("a", "gpu-10", share_id="s1"), claimed("b", "gpu-10", claim=2, share_id="s2")]
    holders = join(containers, [gpu(0)], evidence=sharing(first, second)).holders[gpu_uuid(0)]
    assert [(one.share_ratio, one.share_estimated) for one in holders] == expected
    assert {one.mode for one in holders} == {ShareMode.SHARED}


def test_share_named_twice_by_a_container_counts_once() -> None:
    containers = [claimed("a", "gpu-10", "gpu-10", share_id="s1")]
    (holder,) = join(containers, [gpu(0)], evidence=sharing(GPU_MIB // 4, None)).holders[gpu_uuid(0)]
    assert (holder.share_ratio, holder.share_estimated) == (0.25, False)


def test_containers_of_one_share_split_it() -> None:
    containers = [
        claimed("a", "gpu-10", share_id="s1", container="one"),
        claimed("a", "gpu-10", share_id="s1", container="two"),
    ]
    holders = join(containers, [gpu(0)], evidence=sharing(GPU_MIB // 4, None)).holders[gpu_uuid(0)]
    assert [(one.share_ratio, one.share_estimated) for one in holders] == [(0.125, False)] * 2


def test_two_claims_on_one_whole_gpu_are_split_and_estimated() -> None:
    containers = [claimed("a", "gpu-10"), claimed("b", "gpu-10", claim=2)]
    holders = join(containers, [gpu(0)]).holders[gpu_uuid(0)]
    assert [(one.share_ratio, one.share_estimated) for one in holders] == [(0.5, True)] * 2


def test_claim_uid_is_read_from_the_cdi_name_of_its_device() -> None:
    first, second = claimed("a", "gpu-0", "gpu-1").claims
    assert claim_uid(first) == claim_uid(second) == FIRST


@pytest.mark.parametrize(
    ("names", "uid"),
    [
        ((), None),
        (("runtime.nvidia.com/gpu=all",), None),
        ((f"k8s.gpu.nvidia.com/claim={FIRST}-gpu-1",), FIRST),
        ((f"k8s.gpu.nvidia.com/claim={SECOND}-gpu-1", f"k8s.gpu.nvidia.com/claim={FIRST}-gpu-0"), FIRST),
        ((f"k8s.gpu.nvidia.com/claim={FIRST}-gpu-0", f"k8s.gpu.nvidia.com/claim={SECOND}-gpu-0"), None),
    ],
    ids=["none", "no claim", "another device's", "its own first", "two"],
)
def test_claim_uid_is_read_only_from_an_unambiguous_cdi_name(names: tuple[str, ...], uid: str | None) -> None:
    claim = ClaimedDevice(
        claim_name="c", claim_namespace="ml", driver="gpu.nvidia.com", pool="n", device="gpu-0", cdi_names=names
    )
    assert claim_uid(claim) == uid


def test_slices_give_the_advertised_devices_of_a_node_with_claims() -> None:
    evidence = sliced(gpu_10=whole(0), gpu_11=whole(1), gpu_12=SliceDevice(kind="vfio"), mig=STATIC)
    attribution = join([claimed("a", "gpu-10")], [gpu(0), gpu(1)], evidence=evidence, allocatable={})
    counts = (attribution.advertised_devices, attribution.allocated_devices, attribution.expected_devices)
    assert counts == (2, 1, 2)


def test_missing_slices_leave_the_advertised_devices_unknown() -> None:
    attribution = join([claimed("a", "gpu-10")], [gpu(0)], allocatable={})
    counts = (attribution.advertised_devices, attribution.allocated_devices, attribution.expected_devices)
    assert counts == (None, 1, None)


def test_ended_pod_still_listed_by_the_kubelet_holds_no_claim() -> None:
    evidence = knowing(pod_metadata("a"), ended=frozenset({("ml", "b")}))
    attribution = join([claimed("a", "gpu-10"), claimed("b", "gpu-10")], [gpu(0)], evidence=evidence)
    assert shares(attribution) == {(gpu_uuid(0), "a", "main"): 1.0}
