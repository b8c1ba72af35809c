"""Metadata from the Kubernetes API, over real HTTP, and the rest after a failure of a part."""

import gc
import time
from pathlib import Path
from typing import Any

import pytest
from api_support import CLAIM_UID, CLUSTER_NODE, Cluster, claimed, reading, whole_gpu

from exporter.attribution import join
from exporter.attribution.owner_rules import OwnerRules
from exporter.attribution.pod_lifecycle import AllocatedDevice, SliceDevice
from exporter.model.attribution import NodeFacts, Owner, PodMetadata
from gpu_simulator.api_server import ApiServer
from gpu_simulator.truth import Fault

JOB = [{"kind": "Job", "name": "train", "apiVersion": "batch/v1", "controller": True}]
GPU_UUID = "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763"


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    made.add_pod("train-0", labels={"app": "x"}, ownerReferences=JOB)
    made.add_namespace("ml", labels={"team": "vision"})
    made.node_labels = {"node.kubernetes.io/instance-type": "p5.48xlarge", "karpenter.sh/capacity-type": "spot"}
    return made


def with_dra(cluster: Cluster, version: str = "v1", *, admin: bool = False) -> None:
    cluster.dra_version = version
    attributes = {"type": {"string": "gpu"}, "uuid": {"string": GPU_UUID}}
    device: dict[str, Any] = {"name": "gpu-0"}
    device |= {"basic": {"attributes": attributes}} if version == "v1beta1" else {"attributes": attributes}
    pool = {"name": CLUSTER_NODE, "generation": 1, "resourceSliceCount": 1}
    cluster.slices.append(
        {
            "metadata": {"name": "n1-gpu"},
            "spec": {"driver": "gpu.nvidia.com", "nodeName": CLUSTER_NODE, "pool": pool, "devices": [device]},
        }
    )
    result = {"driver": "gpu.nvidia.com", "pool": CLUSTER_NODE, "device": "gpu-0", "adminAccess": admin}
    cluster.claims.append(
        {
            "metadata": {"namespace": "ml", "name": "c", "uid": CLAIM_UID},
            "status": {"allocation": {"devices": {"results": [result]}}},
        }
    )


async def test_pod_owner_namespace_team_and_node_are_read(cluster: Cluster, tmp_path: Path) -> None:
    async with reading(cluster, tmp_path) as reader:
        metadata = reader.metadata
        reader.note(whole_gpu("train-0"))
        await reader.until(lambda: metadata.facts("ml", "train-0") and metadata.node_facts)
        assert metadata.facts("ml", "train-0").owner == Owner(namespace="ml", kind="Job", name="train", team="vision")
        assert metadata.facts("ml", "train-0") is metadata.facts("ml", "train-0")
        assert metadata.facts("ml", "train-0").pod_uid == "uid-train-0"
        assert metadata.node_facts == NodeFacts(instance_type="p5.48xlarge", capacity_type="spot")
        assert metadata.status.known
        assert metadata.status.at_seconds == cluster.now
        assert (metadata.status.problem, metadata.errors) == ("", {})
        assert reader.server.requests["get namespace"] == 1
        assert not {"get resource.k8s.io", "list resourceslices"} & set(reader.server.requests)
        assert reader.server.without_token == 0


async def test_cost_labels_are_read_from_the_pod_and_its_namespace(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_pod("llm-0", labels={"project": "llm", "user": "anna"})
    cluster.add_namespace("ml", labels={"project": "default", "example.com/cost-center": "42"})
    rules = OwnerRules(team_keys=("team",), cost_labels=("project", "example.com/cost-center"))
    async with reading(cluster, tmp_path, rules=rules) as reader:
        reader.note(whole_gpu("llm-0"))
        await reader.until(lambda: reader.metadata.facts("ml", "llm-0"))
        assert reader.metadata.facts("ml", "llm-0").owner.cost_labels == "example.com/cost-center=42,project=llm"


async def test_evidence_is_the_same_object_until_something_changes(cluster: Cluster, tmp_path: Path) -> None:
    async with reading(cluster, tmp_path) as reader:
        await reader.until(lambda: reader.metadata.status.known)
        first = reader.metadata.evidence(cluster.now)
        assert set(first.pods) == {("ml", "train-0")}
        reader.passes(5)
        assert reader.metadata.evidence(cluster.now) is first
        cluster.add_pod("train-1")
        await reader.until(lambda: reader.metadata.evidence(cluster.now) is not first)
        assert set(reader.metadata.evidence(cluster.now).pods) == {("ml", "train-0"), ("ml", "train-1")}


async def test_no_pod_is_known_or_ended_before_the_first_api_answer(cluster: Cluster, tmp_path: Path) -> None:
    cluster.faults = {Fault.API_ERROR: 0}
    async with reading(cluster, tmp_path) as reader:
        reader.note(whole_gpu("train-0"))
        await reader.until(lambda: reader.metadata.status.problem)
        reader.passes(100)
        evidence = reader.metadata.evidence(cluster.now)
        assert evidence.pods is None
        assert evidence.ended == frozenset()
        assert reader.metadata.facts("ml", "train-0") is None
        assert not reader.metadata.status.known
        assert reader.metadata.errors["server_error"] >= 1
        cluster.faults = {}
        await reader.until(lambda: reader.metadata.facts("ml", "train-0"))
        await reader.until(lambda: not reader.metadata.status.problem)


async def test_outage_is_reported_once_and_known_metadata_stays(cluster: Cluster, tmp_path: Path) -> None:
    async with reading(cluster, tmp_path) as reader:
        await reader.until(lambda: reader.metadata.facts("ml", "train-0"))
        cluster.faults = {Fault.API_DOWN: 0}
        await reader.until(lambda: reader.metadata.status.problem)
        reader.note(whole_gpu("train-0"), whole_gpu("other-0", "other"))
        await reader.until(lambda: "namespace_unreachable" in reader.metadata.errors)
        assert reader.metadata.status.problem.count("at http") == 1
        assert "\n" not in reader.metadata.status.problem
        reader.passes(400)
        assert not reader.metadata.status.known
        assert reader.metadata.facts("ml", "train-0").owner.team == "vision"
        assert reader.metadata.evidence(cluster.now).pods
        assert reader.metadata.evidence(cluster.now).ended == frozenset()
        cluster.add_pod("train-1", ownerReferences=JOB)
        cluster.faults = {}
        await reader.until(lambda: reader.metadata.facts("ml", "train-1") and not reader.metadata.status.problem)
        assert reader.metadata.status.known


async def test_pod_that_finishes_while_listed_by_the_kubelet_has_ended_at_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with reading(cluster, tmp_path) as reader:
        await reader.until(lambda: reader.metadata.facts("ml", "train-0"))
        facts = reader.metadata.facts("ml", "train-0")
        reader.note(whole_gpu("train-0"))
        cluster.add_pod("train-0", labels={"app": "x"}, ownerReferences=JOB, phase="Succeeded")
        await reader.until(lambda: reader.metadata.evidence(cluster.now).ended)
        evidence = reader.metadata.evidence(cluster.now)
        assert (evidence.pods, evidence.ended) == ({}, frozenset({("ml", "train-0")}))
        assert evidence.is_followed
        assert reader.metadata.facts("ml", "train-0") == facts, "its last seconds are not yet charged"
        cluster.faults = {Fault.API_DOWN: 0}
        await reader.until(lambda: reader.metadata.status.problem)
        assert reader.metadata.evidence(cluster.now).ended, "an outage does not bring it back"
        assert not reader.metadata.evidence(cluster.now).is_followed
        reader.note()
        assert reader.metadata.evidence(cluster.now).ended == frozenset()


async def test_pod_unknown_to_the_api_stays_a_holder(cluster: Cluster, tmp_path: Path) -> None:
    async with reading(cluster, tmp_path) as reader:
        reader.note(whole_gpu("static-without-mirror"))
        await reader.until(lambda: reader.metadata.status.known)
        reader.passes(100)
        assert reader.metadata.evidence(cluster.now).ended == frozenset()
        await reader.until(lambda: reader.server.requests["list pods"] > 1)
        reader.passes(1000)
        assert reader.metadata.evidence(cluster.now).ended == frozenset()
        assert reader.metadata.status.problem == ""


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
async def test_pod_finished_before_the_agent_start_has_ended(cluster: Cluster, tmp_path: Path, phase: str) -> None:
    cluster.add_pod("done-0", phase=phase)
    async with reading(cluster, tmp_path) as reader:
        reader.note(whole_gpu("done-0"))
        await reader.until(lambda: reader.metadata.evidence(cluster.now).ended == {("ml", "done-0")})
        cluster.add_pod("done-0", uid="another")
        await reader.until(lambda: not reader.metadata.evidence(cluster.now).ended)


async def test_an_incomplete_list_ends_no_pod(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_pod("own")
    async with reading(cluster, tmp_path, own_pod=("ml", "own")) as reader:
        await reader.until(lambda: reader.metadata.facts("ml", "train-0"))
        reader.note(whole_gpu("train-0"))
        await reader.server.stop()
        cluster.pods.clear()
        await reader.server.restart()
        await reader.until(lambda: "incomplete" in reader.metadata.errors)
        assert reader.metadata.evidence(cluster.now).ended == frozenset()
        assert "--node-name is 'n1'" in reader.metadata.status.problem


async def test_new_pod_with_the_same_name_has_its_own_uid_and_owner(cluster: Cluster, tmp_path: Path) -> None:
    async with reading(cluster, tmp_path) as reader:
        await reader.until(lambda: reader.metadata.facts("ml", "train-0"))
        cluster.add_pod("train-0", uid="second")
        await reader.until(lambda: reader.metadata.facts("ml", "train-0").pod_uid == "second")
        assert reader.metadata.facts("ml", "train-0").owner.kind == "Pod"


async def test_metadata_of_a_deleted_pod_is_freed_after_some_time(cluster: Cluster, tmp_path: Path) -> None:
    def remembered() -> set[str]:
        objects = [one for one in gc.get_objects() if isinstance(one, PodMetadata)]
        return {one.uid for one in objects if one.uid.startswith("uid-short-")}

    async with reading(cluster, tmp_path) as reader:
        for number in range(5):
            name = f"short-{number}"
            cluster.add_pod(name, annotations={"x": "y" * 1000})
            await reader.until(lambda name=name: reader.metadata.facts("ml", name))
            del cluster.pods["ml", name]
        await reader.until(lambda: not any(pod.startswith("short") for _, pod in reader.metadata.evidence(0).pods))
        assert reader.metadata.facts("ml", "short-4") is not None, "its last seconds are not yet charged"
        reader.passes(700)
        cluster.add_pod("last")
        await reader.until(lambda: reader.metadata.facts("ml", "last"))
        reader.note(whole_gpu("last"))
        gc.collect()
        assert remembered() == set()


async def test_facts_wait_for_the_namespace_for_a_bounded_time(cluster: Cluster, tmp_path: Path) -> None:
    async with reading(cluster, tmp_path) as reader:
        await reader.until(lambda: reader.metadata.status.known)
        cluster.faults = {Fault.API_DOWN: 0}
        await reader.until(lambda: reader.metadata.status.problem)
        assert reader.metadata.facts("ml", "train-0") is None
        await reader.until(lambda: "namespace_unreachable" in reader.metadata.errors)
        reader.passes(59)
        assert reader.metadata.facts("ml", "train-0") is None
        reader.passes(2)
        assert reader.metadata.facts("ml", "train-0").owner == Owner(namespace="ml", kind="Job", name="train")


async def test_namespaces_are_not_read_without_namespace_teams(cluster: Cluster, tmp_path: Path) -> None:
    async with reading(cluster, tmp_path, namespace_teams=False) as reader:
        reader.note(whole_gpu("train-0"))
        await reader.until(lambda: reader.metadata.facts("ml", "train-0"))
        assert reader.metadata.facts("ml", "train-0").owner.team == ""
        assert reader.server.requests["get namespace"] == 0


async def test_namespace_of_a_pod_without_kubelet_devices_is_read_on_demand(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_pod("fraction-0", namespace="shared")
    cluster.add_namespace("shared", labels={"team": "nlp"})
    async with reading(cluster, tmp_path) as reader:
        reader.note(whole_gpu("train-0"))
        await reader.until(lambda: reader.metadata.facts("shared", "fraction-0"))
        reader.note(whole_gpu("train-0"))
        assert reader.metadata.facts("shared", "fraction-0").owner.team == "nlp"


async def test_deleted_namespace_has_no_team(cluster: Cluster, tmp_path: Path) -> None:
    cluster.namespaces.clear()
    async with reading(cluster, tmp_path) as reader:
        await reader.until(lambda: reader.metadata.facts("ml", "train-0"))
        assert reader.metadata.status.problem == ""


def lacking(*resources: str) -> Any:  # noqa: ANN401 - as for ``reading``
    def before(server: ApiServer) -> None:
        server.forbidden.update(resources)

    return before


async def test_missing_right_to_list_pods_is_reported_and_the_node_is_still_read(
    cluster: Cluster, tmp_path: Path
) -> None:
    async with reading(cluster, tmp_path, before=lacking("pods")) as reader:
        reader.note(whole_gpu("train-0"))
        await reader.until(lambda: reader.metadata.node_facts and reader.metadata.status.problem)
        assert "list on resource pods" in reader.metadata.status.problem
        assert reader.metadata.errors == {"forbidden": 1}
        assert reader.metadata.evidence(cluster.now).pods is None


async def test_owners_are_known_without_rights_to_nodes_and_namespaces(cluster: Cluster, tmp_path: Path) -> None:
    async with reading(cluster, tmp_path, before=lacking("node", "namespace")) as reader:
        reader.note(whole_gpu("train-0"))
        await reader.until(lambda: reader.metadata.facts("ml", "train-0"))
        await reader.until(lambda: reader.metadata.status.problem.count("grant") == 2)
        assert reader.metadata.facts("ml", "train-0").owner == Owner(namespace="ml", kind="Job", name="train")
        assert reader.metadata.node_facts is None
        assert reader.metadata.errors == {"node_forbidden": 1, "namespace_forbidden": 1}
        assert "get on resource nodes" in reader.metadata.status.problem
        assert "get on resource namespaces" in reader.metadata.status.problem


async def test_unknown_node_name_is_reported(cluster: Cluster, tmp_path: Path) -> None:
    async with reading(cluster, tmp_path, node="mistyped") as reader:
        await reader.until(lambda: "node_not_found" in reader.metadata.errors)
        await reader.until(lambda: "no node 'mistyped', the value of --node-name" in reader.metadata.status.problem)
        reader.note(whole_gpu("train-0"))
        reader.passes(100)
        evidence = reader.metadata.evidence(cluster.now)
        assert (evidence.pods, evidence.ended, evidence.is_followed) == (None, frozenset(), False)
        assert not reader.metadata.status.known


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
async def test_claims_and_slices_are_read_once_a_claimed_device_appears(
    cluster: Cluster, tmp_path: Path, version: str
) -> None:
    with_dra(cluster, version, admin=True)
    async with reading(cluster, tmp_path) as reader:
        reader.note(claimed("train-0"))
        evidence = reader.metadata.evidence(cluster.now)
        assert evidence.reads_claims
        await reader.until(lambda: reader.metadata.evidence(cluster.now).claims)
        await reader.until(lambda: reader.metadata.evidence(cluster.now).devices)
        evidence = reader.metadata.evidence(cluster.now)
        allocated = AllocatedDevice(driver="gpu.nvidia.com", pool=CLUSTER_NODE, device="gpu-0", admin_access=True)
        assert evidence.claims == {CLAIM_UID: (allocated,)}
        assert evidence.devices == {(CLUSTER_NODE, "gpu-0"): SliceDevice(kind="gpu", uuid=GPU_UUID)}
        reader.note(claimed("train-0"))
        reader.note(whole_gpu("train-0"))
        assert reader.metadata.evidence(cluster.now).claims == {}
        assert reader.server.requests["get resource.k8s.io"] == 1
        assert reader.server.requests["get resourceclaim"] == 1


async def test_unserved_api_version_is_discovered_again(cluster: Cluster, tmp_path: Path) -> None:
    with_dra(cluster, "v1beta2", admin=True)
    async with reading(cluster, tmp_path) as reader:
        reader.note(claimed("train-0"))
        await reader.until(lambda: reader.metadata.evidence(cluster.now).claims)
        await reader.until(lambda: reader.metadata.evidence(cluster.now).devices)
        await reader.server.stop()
        second = "22222222-2222-3333-4444-555555555555"
        with_dra(cluster, "v1", admin=True)
        claim = cluster.claims[0]
        cluster.claims.append({**claim, "metadata": {**claim["metadata"], "name": "d", "uid": second}})
        await reader.server.restart()
        reader.note(claimed("train-0"), claimed("train-1", claim="d", uid=second))
        await reader.until(lambda: second in reader.metadata.evidence(cluster.now).claims)
        await reader.until(lambda: not reader.metadata.status.problem)
        assert reader.metadata.evidence(cluster.now).devices
        assert reader.metadata.errors["slices_not_found"] + reader.metadata.errors["claim_not_found"] > 0


async def test_cluster_without_dra_is_queried_once(cluster: Cluster, tmp_path: Path) -> None:
    async with reading(cluster, tmp_path) as reader:
        reader.note(claimed("train-0"))
        await reader.until(lambda: not reader.metadata.evidence(cluster.now).reads_claims)
        assert reader.server.requests["get resource.k8s.io"] == 1
        assert reader.metadata.status.problem == ""


async def test_kubelet_claims_count_without_rights_to_claims_and_slices(cluster: Cluster, tmp_path: Path) -> None:
    with_dra(cluster)
    async with reading(cluster, tmp_path, before=lacking("resourceclaim", "resourceslices")) as reader:
        reader.note(claimed("train-0"))
        await reader.until(lambda: reader.metadata.evidence(cluster.now).unreadable_claims)
        assert reader.metadata.evidence(cluster.now).unreadable_claims == {CLAIM_UID}
        await reader.until(lambda: "slices_forbidden" in reader.metadata.errors)
        assert reader.metadata.evidence(cluster.now).devices is None
        assert reader.metadata.errors == {"claim_forbidden": 1, "slices_forbidden": 1}
        assert "get on resource resourceclaims" in reader.metadata.status.problem
        assert "list on resource resourceslices" in reader.metadata.status.problem


async def test_recreated_claim_with_the_same_name_is_not_the_held_claim(cluster: Cluster, tmp_path: Path) -> None:
    with_dra(cluster)
    async with reading(cluster, tmp_path) as reader:
        before = "99999999-2222-3333-4444-555555555555"
        reader.note(claimed("train-0", uid=before))
        await reader.until(lambda: reader.server.requests["get resourceclaim"])
        reader.passes(61)
        assert reader.metadata.evidence(cluster.now).unreadable_claims == {before}
        assert reader.metadata.evidence(cluster.now).claims == {}


async def test_claim_without_uid_in_the_kubelet_answer_is_found_by_name(cluster: Cluster, tmp_path: Path) -> None:
    with_dra(cluster, admin=True)
    async with reading(cluster, tmp_path) as reader:
        monitoring = claimed("train-0", uid="")
        reader.note(monitoring)
        await reader.until(lambda: CLAIM_UID in reader.metadata.evidence(cluster.now).claims)
        assert list(join.claimed_entries(monitoring, reader.metadata.evidence(cluster.now))) == []


async def test_invalid_or_oversized_labels_do_not_affect_other_metadata(cluster: Cluster, tmp_path: Path) -> None:
    cluster.add_pod(
        "odd-0", labels={"team": "\ud83d\ud83d", "app": "x" * 4096, "n": 5}, annotations={"team": "é" * 70000}
    )
    cluster.add_namespace("ml", labels={"team": "\x00\x1f"})
    async with reading(cluster, tmp_path) as reader:
        await reader.until(lambda: reader.metadata.facts("ml", "odd-0"))
        assert reader.metadata.facts("ml", "odd-0").owner.team == "??"
        assert reader.metadata.facts("ml", "train-0").owner.team == ""
        assert reader.metadata.status.problem == ""


async def test_clock_skew_is_reported_as_a_remark(cluster: Cluster, tmp_path: Path) -> None:
    cluster.now = time.time() + 3600.0
    async with reading(cluster, tmp_path) as reader:
        await reader.until(lambda: reader.metadata.status.remark)
        assert "this node's clock is 3" in reader.metadata.status.remark
        assert "ahead of the API server's" in reader.metadata.status.remark
        assert reader.metadata.errors["clock_skew"] == 1
        assert reader.metadata.status.problem == ""
    cluster.now = time.time()
    async with reading(cluster, tmp_path) as reader:
        await reader.until(lambda: reader.metadata.status.known)
        assert (reader.metadata.status.remark, reader.metadata.errors) == ("", {})


async def test_unexpected_error_stops_one_lookup_for_a_while_and_not_the_agent(
    cluster: Cluster, tmp_path: Path
) -> None:
    divisors = [1.0]

    def random() -> float:
        return 0.1 / (divisors.pop() if len(divisors) > 1 else divisors[0])

    async with reading(cluster, tmp_path, random=random) as reader:
        metadata = reader.metadata
        await reader.until(lambda: metadata.facts("ml", "train-0") and metadata.node_facts)
        await reader.until(lambda: reader.server.open_streams)
        divisors.append(0.0)  # once, in the draw of a namespace's next reading
        reader.note(whole_gpu("train-0"), whole_gpu("other-0", "other"))
        cluster.add_namespace("other")
        await reader.until(lambda: reader.server.requests["get namespace"] >= 2)
        await reader.until(lambda: metadata.errors.get("unexpected"))
        assert "namespace: unexpected ZeroDivisionError" in metadata.status.problem
        cluster.add_pod("train-1", ownerReferences=JOB)
        await reader.until(lambda: metadata.facts("ml", "train-1"))
        assert metadata.status.known


async def test_first_request_waits_for_the_start_jitter(cluster: Cluster, tmp_path: Path) -> None:
    began = time.monotonic()
    async with reading(cluster, tmp_path, start_jitter_seconds=4.0) as reader:
        await reader.until(lambda: reader.server.requests)
        assert time.monotonic() - began >= 0.35
