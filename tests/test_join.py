from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_support import gpu_uuid, held, join, mig_uuid

from exporter.model.attribution import Attribution, ClaimedDevice, ContainerAllocation, DeviceIds, Holder, ShareMode
from exporter.model.devices import Gpu, MigInstance


def gpu(index: int, *, minor: int | None = None, mig: bool = False) -> Gpu:
    return Gpu(
        uuid=gpu_uuid(index),
        index=index,
        minor=index if minor is None else minor,
        model="NVIDIA H100 80GB HBM3",
        pci_bus_id=f"00000000:{index:02X}:00.0",
        mig_enabled=mig,
        compute_slices=7,
        memory_slices=8,
    )


PROFILES = {"1g.10gb": (1, 1), "1g.20gb": (1, 2), "2g.20gb": (2, 2), "3g.40gb": (3, 4), "4g.40gb": (4, 4)}


def instance(number: int, parent: int, profile: str, *, gi: int | None = None, ci: int = 0) -> MigInstance:
    compute, memory = PROFILES[profile]
    return MigInstance(
        uuid=mig_uuid(number),
        parent_uuid=gpu_uuid(parent),
        gpu_instance_id=number if gi is None else gi,
        compute_instance_id=ci,
        profile=profile,
        compute_slices=compute,
        memory_slices=memory,
    )


def claimed(
    pod: str, *devices: str, driver: str = "gpu.nvidia.com", share_id: str | None = None
) -> ContainerAllocation:
    claims = tuple(
        ClaimedDevice(
            claim_name="c", claim_namespace="ml", driver=driver, pool="node-1", device=device, share_id=share_id
        )
        for device in devices
    )
    return ContainerAllocation(namespace="ml", pod=pod, container="main", claims=claims)


def only(attribution: Attribution, uuid: str) -> Holder:
    (holder,) = attribution.holders[uuid]
    return holder


def reasons(attribution: Attribution) -> list[tuple[str, str]]:
    return [(unresolved.device_id, unresolved.reason) for unresolved in attribution.unresolved]


def test_a_whole_gpu_has_one_exclusive_holder_with_all_of_it() -> None:
    attribution = join([held("a", gpu_uuid(1))], [gpu(0), gpu(1)])
    assert attribution.holders == {
        gpu_uuid(1): (
            Holder(
                namespace="ml",
                pod="a",
                container="main",
                device_uuid=gpu_uuid(1),
                mode=ShareMode.EXCLUSIVE,
                resource="nvidia.com/gpu",
                source="device-plugin",
                share_ratio=1.0,
                device_share_ratio=1.0,
            ),
        )
    }


@pytest.mark.parametrize(
    ("device_id", "device"),
    [
        (gpu_uuid(1), gpu_uuid(1)),
        ("nvidia11", gpu_uuid(1)),
        ("nvidia10", gpu_uuid(0)),
        (mig_uuid(3), mig_uuid(3)),
        (f"MIG-{gpu_uuid(0)}/5/0", mig_uuid(3)),
        (f"MIG-{gpu_uuid(0)}/5/1", mig_uuid(4)),
        ("nvidia10/gi5", mig_uuid(3)),
    ],
)
def test_every_device_id_form_resolves_to_its_device(device_id: str, device: str) -> None:
    gpus = [gpu(0, minor=10, mig=True), gpu(1, minor=11)]
    instances = [instance(3, 0, "3g.40gb", gi=5), instance(4, 0, "3g.40gb", gi=5, ci=1)]
    assert list(join([held("a", device_id)], gpus, instances).holders) == [device]


@pytest.mark.parametrize(
    ("resource", "device_id", "reason"),
    [
        ("nvidia.com/gpu", gpu_uuid(9), "unknown_uuid"),
        ("nvidia.com/gpu", mig_uuid(9), "unknown_uuid"),
        ("nvidia.com/gpu", f"MIG-{gpu_uuid(9)}/1/0", "unknown_uuid"),
        ("nvidia.com/gpu", f"MIG-{gpu_uuid(0)}/1/0", "unknown_instance"),
        ("nvidia.com/gpu", "nvidia7", "unknown_minor"),
        ("nvidia.com/gpu", "nvidia0/gi4", "unknown_instance"),
        ("nvidia.com/gpu", "gpu zero", "unknown_form"),
        ("nvidia.com/gpu", f"{gpu_uuid(0)}-3", "needs_annotation"),
        ("volcano.sh/gpu-number", "0-1", "needs_annotation"),
    ],
)
def test_unknown_device_id_is_unresolved_with_its_reason(resource: str, device_id: str, reason: str) -> None:
    attribution = join([held("a", device_id, resource=resource)], [gpu(0)])
    assert attribution.holders == {}
    assert reasons(attribution) == [(device_id, reason)]


def test_all_resolves_to_every_gpu_of_the_node() -> None:
    attribution = join([held("a", "all")], [gpu(0), gpu(1)])
    assert set(attribution.holders) == {gpu_uuid(0), gpu_uuid(1)}


def test_replicas_of_one_container_are_one_holder_with_a_count() -> None:
    ids = [f"{gpu_uuid(0)}::{number}" for number in range(4)]
    attribution = join([held("a", ids[0], ids[2]), held("b", ids[3])], [gpu(0)], allocatable={"nvidia.com/gpu": ids})
    first, second = attribution.holders[gpu_uuid(0)]
    assert (first.replicas, first.share_ratio, first.mode) == (2, 0.5, ShareMode.SHARED)
    assert (second.replicas, second.share_ratio, second.share_estimated) == (1, 0.25, False)


def test_container_with_one_gpu_in_two_resources_is_one_holder() -> None:
    both = ContainerAllocation(
        namespace="ml",
        pod="a",
        container="main",
        devices=(
            DeviceIds(resource="nvidia.com/gpu", ids=(f"{gpu_uuid(0)}::0",)),
            DeviceIds(resource="nvidia.com/gpu.shared", ids=(f"{gpu_uuid(0)}::0",)),
        ),
    )
    ids = [f"{gpu_uuid(0)}::{number}" for number in range(4)]
    attribution = join([both], [gpu(0)], allocatable={"nvidia.com/gpu": ids, "nvidia.com/gpu.shared": ids})
    holder = only(attribution, gpu_uuid(0))
    assert (holder.resource, holder.replicas, holder.share_ratio) == ("nvidia.com/gpu", 2, 0.5)


def test_share_without_advertised_replicas_is_estimated_from_replica_numbers() -> None:
    attribution = join([held("a", f"{gpu_uuid(0)}::3")], [gpu(0)])
    assert only(attribution, gpu_uuid(0)).share_ratio == 0.25
    assert only(attribution, gpu_uuid(0)).share_estimated


def test_unhealthy_gpu_is_divided_like_its_neighbours() -> None:
    advertised = [f"{gpu_uuid(1)}::{number}" for number in range(10)]
    attribution = join([held("a", f"{gpu_uuid(0)}::1")], [gpu(0), gpu(1)], allocatable={"nvidia.com/gpu": advertised})
    assert only(attribution, gpu_uuid(0)).share_ratio == 0.1
    assert only(attribution, gpu_uuid(0)).share_estimated


def replicas_of(number: int, count: int) -> list[str]:
    return [f"{gpu_uuid(number)}::{replica}" for replica in range(count)]


@pytest.mark.parametrize("advertised", [{}, {"nvidia.com/gpu": replicas_of(1, 2)}, None])
def test_unadvertised_shared_gpu_keeps_its_division(
    advertised: Mapping[str, Sequence[str]] | None,
) -> None:
    holders = [held("a", f"{gpu_uuid(0)}::0"), held("b", f"{gpu_uuid(0)}::1")]
    healthy = join(holders, [gpu(0), gpu(1)], allocatable={"nvidia.com/gpu": replicas_of(0, 3)})
    away = join(holders[:1], [gpu(0), gpu(1)], allocatable=advertised, replicas=healthy.replicas)
    again = join(holders, [gpu(0), gpu(1)], allocatable=advertised, replicas=away.replicas)
    for found in (healthy, away, again):
        assert {one.share_ratio for one in found.holders[gpu_uuid(0)]} == {1 / 3}
        assert not any(one.share_estimated for one in found.holders[gpu_uuid(0)])


def test_currently_advertised_replicas_override_remembered_ones() -> None:
    before = {(gpu_uuid(0), "nvidia.com/gpu"): 2}
    found = join(
        [held("a", f"{gpu_uuid(0)}::0")], [gpu(0)], allocatable={"nvidia.com/gpu": replicas_of(0, 4)}, replicas=before
    )
    assert only(found, gpu_uuid(0)).share_ratio == 0.25
    assert found.replicas == {(gpu_uuid(0), "nvidia.com/gpu"): 4}


def test_replica_count_is_remembered_while_the_gpu_is_present_or_held() -> None:
    before = {(gpu_uuid(number), "nvidia.com/gpu"): 2 for number in range(3)}
    found = join([held("a", f"{gpu_uuid(1)}::0")], [gpu(0)], allocatable={}, replicas=before)
    assert set(found.replicas) == {(gpu_uuid(0), "nvidia.com/gpu"), (gpu_uuid(1), "nvidia.com/gpu")}


@pytest.mark.parametrize("neighbours", [(), (2, 4), (1,)], ids=["none", "that differ", "with fewer than are held"])
def test_share_with_unknown_replica_count_is_unresolved(neighbours: tuple[int, ...]) -> None:
    advertised = [one for number, count in enumerate(neighbours, 1) for one in replicas_of(number, count)]
    replica = f"{gpu_uuid(0)}::1"
    gpus = [gpu(number) for number in range(3)]
    found = join([held("a", replica)], gpus, allocatable={"nvidia.com/gpu": advertised})
    assert found.holders == {}
    assert reasons(found) == [(replica, "replicas_unknown")]
    assert found.unresolved[0].devices == (gpu_uuid(0),), "the other GPUs are not in doubt"


def test_unhealthy_replica_does_not_enlarge_the_other_shares() -> None:
    advertised = [one for one in replicas_of(0, 4) if not one.endswith("::2")]
    found = join([held("a", f"{gpu_uuid(0)}::0")], [gpu(0)], allocatable={"nvidia.com/gpu": advertised})
    assert only(found, gpu_uuid(0)).share_ratio == 0.25


@given(
    counts=st.lists(st.integers(1, 8), min_size=2, max_size=2),
    held_numbers=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9)), max_size=8, unique=True),
    shown=st.lists(st.booleans(), min_size=2, max_size=2),
    remembered=st.dictionaries(st.integers(0, 1), st.integers(1, 8)),
    tells=st.booleans(),
)
def test_shares_of_replicas_never_exceed_the_gpu(
    counts: list[int],
    held_numbers: list[tuple[int, int]],
    shown: list[bool],
    remembered: dict[int, int],
    tells: bool,  # noqa: FBT001 - drawn
) -> None:
    containers = [held(f"p{at}", f"{gpu_uuid(number)}::{replica}") for at, (number, replica) in enumerate(held_numbers)]
    ids = [one for number in (0, 1) if shown[number] for one in replicas_of(number, counts[number])]
    found = join(
        containers,
        [gpu(0), gpu(1)],
        allocatable={"nvidia.com/gpu": ids} if tells else None,
        replicas={(gpu_uuid(number), "nvidia.com/gpu"): count for number, count in remembered.items()},
    )
    for holders in found.holders.values():
        assert sum(one.share_ratio for one in holders) <= 1 + 1e-9
    assert sum(map(len, found.holders.values())) + len(found.unresolved) == len(containers)


def test_mig_share_is_the_larger_of_compute_and_memory_fractions() -> None:
    instances = [instance(1, 0, "1g.10gb"), instance(2, 0, "1g.20gb"), instance(3, 0, "2g.20gb")]
    attribution = join(
        [held("a", mig_uuid(1)), held("b", mig_uuid(2)), held("c", mig_uuid(3))], [gpu(0, mig=True)], instances
    )
    shares = {uuid: holders[0].share_ratio for uuid, holders in attribution.holders.items()}
    assert shares == {mig_uuid(1): 1 / 7, mig_uuid(2): 0.25, mig_uuid(3): 2 / 7}
    assert only(attribution, mig_uuid(1)).mode is ShareMode.MIG
    assert only(attribution, mig_uuid(1)).device_share_ratio == 1


def test_mig_shares_exceeding_the_gpu_are_divided_by_their_sum() -> None:
    instances = [instance(1, 0, "3g.40gb"), instance(2, 0, "4g.40gb")]
    attribution = join([held("a", mig_uuid(1)), held("b", mig_uuid(2))], [gpu(0, mig=True)], instances)
    assert only(attribution, mig_uuid(1)).share_ratio == pytest.approx(0.5 / (0.5 + 4 / 7))
    assert only(attribution, mig_uuid(2)).share_ratio == pytest.approx(4 / 7 / (0.5 + 4 / 7))


def test_compute_instances_divide_the_memory_of_their_gpu_instance() -> None:
    parts = [
        MigInstance(
            uuid=mig_uuid(ci),
            parent_uuid=gpu_uuid(0),
            gpu_instance_id=2,
            compute_instance_id=ci,
            profile="1c.3g.40gb",
            compute_slices=1,
            memory_slices=4,
        )
        for ci in range(3)
    ]
    attribution = join([held("a", mig_uuid(0))], [gpu(0, mig=True)], parts)
    assert only(attribution, mig_uuid(0)).share_ratio == pytest.approx(0.5 / 3)


def test_instances_with_unknown_slices_have_equal_estimated_shares() -> None:
    nameless = Gpu(uuid=gpu_uuid(0), index=0, minor=0, model="?", pci_bus_id="", mig_enabled=True)
    attribution = join([held("a", mig_uuid(1))], [nameless], [instance(1, 0, "1g.10gb"), instance(2, 0, "4g.40gb")])
    assert only(attribution, mig_uuid(1)).share_ratio == 0.5
    assert only(attribution, mig_uuid(1)).share_estimated


def test_a_replica_of_a_mig_instance_is_shared_and_has_its_part_of_the_instance() -> None:
    ids = [f"{mig_uuid(1)}::{number}" for number in range(2)]
    attribution = join(
        [held("a", ids[0], resource="nvidia.com/mig-3g.40gb.shared")],
        [gpu(0, mig=True)],
        [instance(1, 0, "3g.40gb")],
        allocatable={"nvidia.com/mig-3g.40gb.shared": ids},
    )
    holder = only(attribution, mig_uuid(1))
    assert (holder.mode, holder.device_share_ratio, holder.share_ratio) == (ShareMode.SHARED, 0.5, 0.25)


def test_a_whole_gpu_id_on_a_partitioned_gpu_holds_the_gpu() -> None:
    attribution = join([held("a", gpu_uuid(0))], [gpu(0, mig=True)], [instance(1, 0, "3g.40gb")])
    assert only(attribution, gpu_uuid(0)).share_ratio == 1


def test_whole_holder_and_instance_holder_sum_to_one_gpu() -> None:
    attribution = join(
        [held("a", gpu_uuid(0)), held("b", mig_uuid(3))], [gpu(0, mig=True)], [instance(3, 0, "3g.40gb")]
    )
    whole, part = only(attribution, gpu_uuid(0)), only(attribution, mig_uuid(3))
    assert whole.share_ratio + part.share_ratio == pytest.approx(1.0)


def test_two_pods_with_one_whole_gpu_divide_it() -> None:
    attribution = join([held("finished", gpu_uuid(0)), held("running", gpu_uuid(0))], [gpu(0)])
    holders = attribution.holders[gpu_uuid(0)]
    assert [(h.share_ratio, h.mode, h.share_estimated) for h in holders] == [(0.5, ShareMode.SHARED, True)] * 2


def test_minor_id_is_unresolved_if_a_minor_number_is_unknown() -> None:
    silent = Gpu(uuid=gpu_uuid(0), index=0, minor=None, model="?", pci_bus_id="")
    assert reasons(join([held("a", "nvidia0")], [silent])) == [("nvidia0", "minor_not_told")]
    assert reasons(join([held("a", "nvidia0")], [gpu(1)])) == [("nvidia0", "unknown_minor")]


def test_a_dra_device_is_found_by_its_minor_number() -> None:
    attribution = join([claimed("a", "gpu-1")], [gpu(0, minor=1), gpu(1, minor=0)])
    holder = only(attribution, gpu_uuid(0))
    assert (holder.source, holder.resource, holder.mode) == ("dra", "gpu.nvidia.com", ShareMode.EXCLUSIVE)


def test_claim_of_several_pods_is_shared_evenly() -> None:
    attribution = join([claimed("a", "gpu-0"), claimed("b", "gpu-0"), claimed("c", "gpu-0")], [gpu(0)])
    holders = attribution.holders[gpu_uuid(0)]
    assert [h.share_ratio for h in holders] == [pytest.approx(1 / 3)] * 3
    assert {(h.mode, h.share_estimated) for h in holders} == {(ShareMode.SHARED, False)}


def test_claim_named_twice_by_one_container_is_one_holder() -> None:
    holder = only(join([claimed("a", "gpu-0", "gpu-0")], [gpu(0)]), gpu_uuid(0))
    assert (holder.replicas, holder.mode) == (1, ShareMode.EXCLUSIVE)


def test_share_of_a_dra_device_is_estimated() -> None:
    holder = only(join([claimed("a", "gpu-0", share_id="s1")], [gpu(0)]), gpu_uuid(0))
    assert (holder.mode, holder.share_estimated) == (ShareMode.SHARED, True)


def test_dra_mig_device_with_a_unique_profile_is_found() -> None:
    instances = [instance(1, 2, "1g.20gb"), instance(2, 2, "3g.40gb")]
    attribution = join([claimed("a", "gpu-2-mig-1g20gb-15-0")], [gpu(2, mig=True)], instances)
    assert only(attribution, mig_uuid(1)).source == "dra"


def test_dra_mig_device_matching_two_instances_is_unresolved() -> None:
    instances = [instance(1, 2, "1g.20gb"), instance(2, 2, "1g.20gb")]
    attribution = join([claimed("a", "gpu-2-mig-1g20gb-15-0")], [gpu(2, mig=True)], instances)
    assert attribution.holders == {}
    assert reasons(attribution) == [("gpu-2-mig-1g20gb-15-0", "dra_unresolved")]


def test_two_dra_mig_devices_matching_one_instance_are_unresolved() -> None:
    containers = [claimed("a", "gpu-2-mig-1g20gb-15-0"), claimed("b", "gpu-2-mig-1g20gb-15-2")]
    attribution = join(containers, [gpu(2, mig=True)], [instance(1, 2, "1g.20gb")])
    assert attribution.holders == {}
    assert len(attribution.unresolved) == 2


def test_non_gpu_claim_is_neither_held_nor_unresolved() -> None:
    attribution = join([claimed("a", "channel-0", driver="compute-domain.nvidia.com")], [gpu(0)])
    assert (attribution.holders, attribution.unresolved) == ({}, ())


def test_expected_devices_are_the_distinct_gpus_advertised_or_held() -> None:
    advertised = {"nvidia.com/gpu": [gpu_uuid(0), f"{gpu_uuid(1)}::0", f"{gpu_uuid(1)}::1"]}
    attribution = join([held("a", gpu_uuid(5))], [gpu(0), gpu(1)], allocatable=advertised)
    assert attribution.expected_devices == 3


def test_expected_devices_by_minor_and_by_mig_parent_are_counted_once() -> None:
    advertised = {"nvidia.com/gpu": ["nvidia0/gi1", "nvidia0/gi2", "nvidia7", gpu_uuid(0), mig_uuid(1)]}
    attribution = join([], [gpu(0, mig=True)], [instance(1, 0, "1g.10gb")], allocatable=advertised)
    assert attribution.expected_devices == 2


@pytest.mark.parametrize("advertised", [None, {}, {"nvidia.com/gpu": [gpu_uuid(0), mig_uuid(77)]}])
def test_expected_devices_are_absent_without_a_complete_kubelet_answer(
    advertised: dict[str, Sequence[str]] | None,
) -> None:
    assert join([held("a", gpu_uuid(0))], [gpu(0)], allocatable=advertised).expected_devices is None


@st.composite
def nodes(
    draw: st.DrawFn,
) -> tuple[list[ContainerAllocation], list[Gpu], list[MigInstance], Mapping[str, Sequence[str]] | None]:
    gpus = [gpu(index, mig=draw(st.booleans())) for index in range(draw(st.integers(0, 3)))]
    instances = [
        instance(10 * parent.index + number, parent.index, draw(st.sampled_from(sorted(PROFILES))), gi=number)
        for parent in gpus
        if parent.mig_enabled
        for number in range(draw(st.integers(0, 7)))
    ]
    bases = st.sampled_from(
        [gpu_uuid(n) for n in range(4)] + [mig_uuid(n) for n in range(28)] + ["nvidia0", "nvidia1/gi2", "junk"]
    )
    suffixes = st.sampled_from(["", "", "::0", "::1", "::5", "/vgpu0", "/vgpu3"])
    ids = st.lists(st.tuples(bases, suffixes).map("".join), max_size=4)
    resources = st.sampled_from(["nvidia.com/gpu", "nvidia.com/gpu.shared", "k8s.amazonaws.com/vgpu"])
    containers = [
        held(draw(st.sampled_from("abc")), *draw(ids), resource=draw(resources), container=f"c{number % 2}")
        for number in range(draw(st.integers(0, 6)))
    ] + draw(
        st.lists(st.sampled_from("abc").map(lambda pod: claimed(pod, "gpu-0", "gpu-1-mig-1g10gb-19-0")), max_size=3)
    )
    advertised = draw(st.none() | st.dictionaries(resources, st.lists(st.tuples(bases, suffixes).map("".join))))
    return containers, gpus, instances, advertised


@settings(deadline=None)  # a busy machine is not an error
@given(nodes())
def test_shares_never_exceed_the_gpu_and_holders_are_listed_containers(
    node: tuple[list[ContainerAllocation], list[Gpu], list[MigInstance], Mapping[str, Sequence[str]] | None],
) -> None:
    containers, gpus, instances, advertised = node
    attribution = join(containers, gpus, instances, allocatable=advertised)
    parents = {one.uuid: one.uuid for one in gpus} | {one.uuid: one.parent_uuid for one in instances}
    listed = {(c.namespace, c.pod, c.container) for c in containers}
    per_gpu: dict[str, float] = defaultdict(float)
    for uuid, holders in attribution.holders.items():
        assert uuid in parents
        assert holders
        assert len({(h.namespace, h.pod, h.container) for h in holders}) == len(holders)
        assert sum(holder.device_share_ratio for holder in holders) <= 1 + 1e-12
        for holder in holders:
            assert holder.device_uuid == uuid
            assert (holder.namespace, holder.pod, holder.container) in listed
            assert 0 < holder.share_ratio <= 1 + 1e-12
            per_gpu[parents[uuid]] += holder.share_ratio
    assert all(total <= 1 + 1e-12 for total in per_gpu.values())
    for unresolved in attribution.unresolved:
        assert (unresolved.namespace, unresolved.pod, unresolved.container) in listed
        assert unresolved.reason


@settings(deadline=None)  # a busy machine is not an error
@given(nodes())
def test_every_listed_id_is_either_held_or_unresolved(
    node: tuple[list[ContainerAllocation], list[Gpu], list[MigInstance], Mapping[str, Sequence[str]] | None],
) -> None:
    containers, gpus, instances, advertised = node
    attribution = join(containers, gpus, instances, allocatable=advertised)
    held_by = {(h.namespace, h.pod, h.container) for holders in attribution.holders.values() for h in holders}
    left_by = {(u.namespace, u.pod, u.container) for u in attribution.unresolved}
    for container in containers:
        if container.claims or any(devices.ids for devices in container.devices):
            assert (container.namespace, container.pod, container.container) in held_by | left_by
