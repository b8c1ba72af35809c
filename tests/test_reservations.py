from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_support import GPU_MIB, gpu, gpu_uuid, held, join, knowing, pod_metadata, reasons, shares

from exporter.attribution import vgpu
from exporter.attribution.pod_lifecycle import NO_EVIDENCE, Evidence
from exporter.model.attribution import ContainerAllocation, PodMetadata, ShareMode

RESERVED = "kai-resource-reservation"
GROUP = "runai-gpu-group"


def reservation(number: int = 0, group: str = "g", namespace: str = RESERVED) -> PodMetadata:
    return pod_metadata(f"gpu-reservation-{number}", labels={GROUP: group}, namespace=namespace)


def reserved(number: int = 0, namespace: str = RESERVED) -> ContainerAllocation:
    return held(f"gpu-reservation-{number}", gpu_uuid(number), namespace=namespace, container="holder")


def member(name: str, annotations: Mapping[str, str] | None = None, *groups: str) -> PodMetadata:
    labels = {f"{GROUP}/{group}": group for group in groups} if groups else {GROUP: "g"}
    return pod_metadata(name, {"gpu-fraction": "0.5"} if annotations is None else annotations, labels)


def others(*pods: str) -> list[tuple[str, str, str]]:
    return [("ml", pod, "main") for pod in pods]


def test_members_hold_their_fraction_and_the_rest_is_unallocated() -> None:
    known = knowing(reservation(), member("a"), member("b", {"gpu-fraction": "0.2"}), pod_metadata("c"))
    attribution = join([reserved()], [gpu(0)], evidence=known, others=others("a", "b", "c"))
    first, second = attribution.holders[gpu_uuid(0)]
    assert (first.namespace, first.pod, first.container, first.pod_uid) == ("ml", "a", "main", "uid-a")
    assert (first.share_ratio, first.device_share_ratio, first.share_estimated) == (0.5, 0.5, False)
    assert (first.mode, first.source, first.resource) == (ShareMode.SHARED, "annotation", "gpu-fraction")
    assert (second.pod, second.share_ratio) == ("b", 0.2)


@pytest.mark.parametrize(
    ("followed", "listed", "doubts"),
    [
        (True, ["a", "new"], []),
        (False, ["a"], []),
        (False, ["a", "ended"], []),
        (False, ["a", "new"], [("gpu-reservation-0", "reservation_pending")]),
    ],
    ids=["the API is well", "all are known", "one has ended", "one is not known"],
)
def test_possible_share_of_an_unknown_pod_is_not_free_during_an_api_outage(
    followed: bool,  # noqa: FBT001 - a table
    listed: list[str],
    doubts: list[tuple[str, str]],
) -> None:
    evidence = knowing(reservation(), member("a"), is_followed=followed, ended=frozenset({("ml", "ended")}))
    attribution = join([reserved()], [gpu(0), gpu(1)], evidence=evidence, others=others(*listed))
    assert shares(attribution) == {(gpu_uuid(0), "a", "main"): 0.5}
    assert reasons(attribution) == doubts
    assert {uuid for one in attribution.unresolved for uuid in one.devices or ()} == {gpu_uuid(0) for _ in doubts}


def test_member_stays_a_holder_while_listed_by_the_kubelet_during_an_outage() -> None:
    evidence = knowing(reservation(), member("a"), member("b"), member("gone"), is_followed=False)
    network = held("b", "nic-0", resource="example.com/nic")
    attribution = join([reserved(), network], [gpu(0)], evidence=evidence, others=others("a"))
    assert {pod for _, pod, _ in shares(attribution)} == {"a", "b"}


@pytest.mark.parametrize("namespace", ["kai-resource-reservation", "runai-reservation"])
def test_default_reservation_namespaces_are_supported(namespace: str) -> None:
    known = knowing(reservation(namespace=namespace), member("a"))
    attribution = join([reserved(namespace=namespace)], [gpu(0)], evidence=known)
    assert shares(attribution) == {(gpu_uuid(0), "a", ""): 0.5}


def test_reservation_namespace_is_configurable() -> None:
    known = knowing(
        reservation(namespace="mine"),
        member("a"),
        pod_metadata("x", labels={GROUP: "g"}),
        reservation_namespaces=("mine",),
    )
    attribution = join([reserved(namespace="mine")], [gpu(0)], evidence=known)
    assert shares(attribution) == {(gpu_uuid(0), "a", ""): 0.5}
    assert reasons(attribution) == [("x", "needs_annotation")]


@pytest.mark.parametrize(
    ("annotations", "memory_mib", "share", "estimated"),
    [
        ({"gpu-fraction": "0.25"}, GPU_MIB, 0.25, False),
        ({"gpu-fraction": ".5"}, GPU_MIB, 0.5, False),
        ({"gpu-fraction": "1"}, GPU_MIB, 1.0, False),
        ({"gpu-fraction": "3"}, GPU_MIB, 1.0, True),
        ({"gpu-memory": str(GPU_MIB // 8)}, GPU_MIB, 0.125, False),
        ({"gpu-fraction": "0.5", "gpu-memory": "1"}, GPU_MIB, 0.5, False),
    ],
)
def test_share_is_the_requested_fraction_or_memory(
    annotations: Mapping[str, str],
    memory_mib: int,
    share: float,
    estimated: bool,  # noqa: FBT001 - a table
) -> None:
    known = knowing(reservation(), member("a", annotations))
    (holder,) = join([reserved()], [gpu(0, memory_mib=memory_mib)], evidence=known).holders[gpu_uuid(0)]
    assert (holder.share_ratio, holder.share_estimated) == (share, estimated)


def test_memory_request_on_a_gpu_with_unknown_memory_is_unresolved() -> None:
    known = knowing(reservation(), member("a", {"gpu-memory": "1000"}))
    attribution = join([reserved()], [gpu(0, memory_mib=None)], evidence=known)
    assert not attribution.holders
    assert reasons(attribution) == [("a", "memory_unknown")]


@pytest.mark.parametrize(
    ("annotations", "reason"),
    [
        ({}, "needs_annotation"),
        ({"gpu-fraction": "half"}, "bad_annotation"),
        ({"gpu-fraction": "0"}, "bad_annotation"),
        ({"gpu-fraction": "."}, "bad_annotation"),
        ({"gpu-fraction": ""}, "bad_annotation"),
        ({"gpu-fraction": "-1"}, "bad_annotation"),
        ({"gpu-fraction": "nan"}, "bad_annotation"),
        ({"gpu-fraction": "1e400"}, "bad_annotation"),
        ({"gpu-memory": "0"}, "bad_annotation"),
        ({"gpu-memory": "2Gi"}, "bad_annotation"),
        ({"gpu-memory": "9" * 5000}, "bad_annotation"),
    ],
)
def test_member_without_a_valid_share_is_unresolved(annotations: Mapping[str, str], reason: str) -> None:
    attribution = join([reserved()], [gpu(0)], evidence=knowing(reservation(), member("a", annotations)))
    assert attribution.holders == {}
    assert reasons(attribution) == [("a", reason)]
    assert attribution.allocated_devices is None


def test_fractions_exceeding_the_gpu_are_scaled_and_estimated() -> None:
    known = knowing(reservation(), member("a"), member("b"), member("c"))
    holders = join([reserved()], [gpu(0)], evidence=known).holders[gpu_uuid(0)]
    assert [(one.share_ratio, one.share_estimated) for one in holders] == [(pytest.approx(1 / 3), True)] * 3


def test_a_member_of_several_groups_has_its_fraction_of_each_gpu() -> None:
    known = knowing(reservation(0, "x"), reservation(1, "y"), member("a", {"gpu-fraction": "0.25"}, "x", "y"))
    attribution = join([reserved(0), reserved(1)], [gpu(0), gpu(1)], evidence=known)
    assert shares(attribution) == {(gpu_uuid(0), "a", ""): 0.25, (gpu_uuid(1), "a", ""): 0.25}


def test_ended_member_holds_nothing() -> None:
    known = knowing(reservation(), member("a"), member("b"), ended=frozenset({("ml", "a")}))
    attribution = join([reserved()], [gpu(0)], evidence=known)
    assert shares(attribution) == {(gpu_uuid(0), "b", ""): 0.5}


def test_groups_are_kept_separate() -> None:
    known = knowing(reservation(0, "x"), reservation(1, "y"), member("a", None, "x"), member("b", None, "y"))
    attribution = join([reserved(0), reserved(1)], [gpu(0), gpu(1)], evidence=known)
    assert set(shares(attribution)) == {(gpu_uuid(0), "a", ""), (gpu_uuid(1), "b", "")}


@pytest.mark.parametrize(
    ("annotations", "listed", "container"),
    [
        ({}, [("ml", "a", "main")], "main"),
        ({}, [("ml", "a", "main"), ("ml", "a", "side")], ""),
        ({}, [], ""),
        ({"gpu-fraction-container-name": "side"}, [("ml", "a", "main"), ("ml", "a", "side")], "side"),
    ],
    ids=["the only one", "one of two", "not listed", "named"],
)
def test_the_container_is_the_named_one_or_the_only_one(
    annotations: Mapping[str, str], listed: list[tuple[str, str, str]], container: str
) -> None:
    known = knowing(reservation(), member("a", {"gpu-fraction": "0.5", **annotations}))
    attribution = join([reserved()], [gpu(0)], evidence=known, others=listed)
    assert shares(attribution) == {(gpu_uuid(0), "a", container): 0.5}


def test_reservation_is_pending_before_the_first_pod_list() -> None:
    attribution = join([reserved()], [gpu(0)], evidence=Evidence(pods=None, is_followed=False))
    assert attribution.holders == {}
    assert reasons(attribution) == [("gpu-reservation-0", "reservation_pending")]


def test_reservation_is_pending_while_the_kubelet_lacks_a_member() -> None:
    known = knowing(reservation(), member("a"), member("coming"))
    attribution = join([reserved()], [gpu(0)], evidence=known, others=others("a"))
    assert shares(attribution) == {(gpu_uuid(0), "a", "main"): 0.5}
    assert reasons(attribution) == [("gpu-reservation-0", "reservation_pending")]


def test_reservation_without_members_leaves_the_gpu_unallocated() -> None:
    attribution = join([reserved()], [gpu(0)], evidence=knowing(reservation()))
    assert (attribution.holders, attribution.unresolved, attribution.allocated_devices) == ({}, (), 0)


def test_reservation_missing_in_the_api_is_pending() -> None:
    attribution = join(
        [reserved()], [gpu(0)], evidence=knowing(member("a")), allocatable={"nvidia.com/gpu": [gpu_uuid(0)]}
    )
    assert attribution.holders == {}
    assert reasons(attribution) == [("gpu-reservation-0", "reservation_pending")]
    assert (attribution.allocated_devices, attribution.expected_devices) == (None, 1)


@pytest.mark.parametrize("evidence", [NO_EVIDENCE, knowing(pod_metadata("gpu-reservation-0", namespace=RESERVED))])
def test_reservation_without_group_evidence_is_the_holder(evidence: Evidence) -> None:
    attribution = join([reserved()], [gpu(0)], evidence=evidence)
    assert shares(attribution) == {(gpu_uuid(0), "gpu-reservation-0", "holder"): 1.0}


ANNOTATIONS = st.dictionaries(st.sampled_from(sorted(vgpu.KEYS)), st.text("0123456789.-e", max_size=6))
GROUPS = st.dictionaries(st.sampled_from([GROUP, f"{GROUP}/x", f"{GROUP}/y"]), st.sampled_from(["", "x", "y"]))


@settings(deadline=None)  # a busy machine is not an error
@given(st.lists(st.tuples(ANNOTATIONS, GROUPS), max_size=5), GROUPS)
def test_shares_of_arbitrary_members_never_exceed_the_gpu(
    members: list[tuple[dict[str, str], dict[str, str]]], labels: dict[str, str]
) -> None:
    pods = [pod_metadata(f"p{number}", *member) for number, member in enumerate(members)]
    known = knowing(pod_metadata("gpu-reservation-0", labels=labels, namespace=RESERVED), *pods)
    attribution = join([reserved()], [gpu(0)], evidence=known)
    assert sum(shares(attribution).values()) <= 1 + 1e-12
    assert all(share > 0 for share in shares(attribution).values())
