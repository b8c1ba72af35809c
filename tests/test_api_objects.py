"""The API of a simulated node: full objects, the same ones while nothing changes, in every version of DRA."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from join_support import evidence_of

from exporter.attribution.pod_lifecycle import SliceDevice
from exporter.kube import kubelet
from exporter.kube.api_client import METADATA_LIST, ApiClient, Request
from exporter.kube.credentials import Credentials
from gpu_simulator import scenario, scenario_file
from gpu_simulator.api_server import objects_of
from gpu_simulator.kubelet import list_response
from gpu_simulator.node import SimulatedNode
from gpu_simulator.truth import NodeTruth

DRA = """\
node: n1
plugin: {ids: dra, dra_mig: MIG}
dra_version: VERSION
gpus:
  - {model: h100, minor: 3}
  - {model: h100, mig: [3g.40gb, 1g.10gb]}
  - {model: h100, sharing: {strategy: fraction}}
pods:
  - {namespace: a, name: whole, devices: [{gpu: 0}], activity: 0.1}
  - {namespace: a, name: slice, devices: [{gpu: 1, mig: 1}], activity: 0.1}
  - {namespace: a, name: part, devices: [{gpu: 2, memory_mib: 20480}], activity: 0.1}
  - {namespace: a, name: watch, devices: [{gpu: 0, admin: true}], activity: 0}
  - {namespace: a, name: plain, devices: [{gpu: 2, memory_mib: 1024, claim: named}], activity: 0}
"""


def dra(version: str, mig: str, t: float = 60.0) -> NodeTruth:
    text = DRA.replace("VERSION", version).replace("MIG", mig)
    return scenario.build(scenario_file.parse(text, "s.yaml")).at(t)


def test_simulated_pod_has_the_fields_of_a_real_pod() -> None:
    pod: Any = next(
        pod
        for pod in objects_of(scenario.load("demo").at(5.0)).pods
        if pod["metadata"]["name"] == "llama-pretrain-worker-0"
    )
    assert pod["spec"]["nodeName"] == "sim-h100-01"
    assert pod["status"]["phase"] == "Running"
    assert [container["name"] for container in pod["spec"]["containers"]] == ["trainer"]
    (owner,) = pod["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("PyTorchJob", "llama-pretrain", True)
    assert owner["apiVersion"] == "kubeflow.org/v1"
    assert {entry["manager"] for entry in pod["metadata"]["managedFields"]} == {"kube-controller-manager", "kubelet"}


@pytest.mark.parametrize("name", scenario.shipped())
def test_every_listed_pod_is_unique_in_the_api_with_its_containers_and_uid(name: str) -> None:
    for t in (0.0, 35.0, 75.0, 130.0):
        truth = scenario.load(name).at(t)
        pods = {(pod.namespace, pod.name): pod for pod in truth.pods}
        assert len(pods) == len(truth.pods)
        for holder in (*truth.holders, *truth.also_listed):
            pod = pods[holder.namespace, holder.pod]
            assert holder.pod_uid == pod.uid
            assert holder.container in pod.containers
        assert {(namespace, pod) for namespace, pod, _ in truth.other_pods} <= set(pods)


def test_owners_scenario_has_110_pods_and_23_gpu_holders() -> None:
    truth = scenario.load("owners").at(0.0)
    assert len(truth.pods) == 110
    assert len({holder.pod for holder in truth.holders}) == 23


def test_unchanged_objects_are_not_rebuilt() -> None:
    loaded = scenario.load("chaos")
    before, after = objects_of(loaded.at(6.0)), objects_of(loaded.at(13.0))
    kept = {id(pod) for pod in before.pods} & {id(pod) for pod in after.pods}
    assert len(before.pods) - len(kept) == 1  # "short" ended at 12


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_resource_slices_of_every_dra_version_describe_the_same_devices(version: str) -> None:
    truth = dra(version, "static")
    evidence = evidence_of(objects_of(truth))
    whole, board, _ = truth.gpus
    assert evidence.devices is not None
    assert set(evidence.devices) == {
        ("n1", name) for name in ("gpu-3", "gpu-1-mig-3g40gb-2-4", "gpu-1-mig-1g10gb-0-0", "gpu-2")
    }
    assert evidence.devices["n1", "gpu-3"] == SliceDevice(
        kind="gpu", uuid=whole.uuid, memory_bytes=whole.model.memory_bytes
    )
    small = board.instances[1]
    assert evidence.devices["n1", "gpu-1-mig-1g10gb-0-0"] == SliceDevice(
        kind="mig", uuid=small.uuid, parent_uuid=board.uuid, profile="1g.10gb", memory_bytes=small.memory_bytes
    )


def test_dynamic_slices_list_every_possible_instance_without_a_uuid() -> None:
    devices = evidence_of(objects_of(dra("v1", "dynamic"))).devices or {}
    possible = {name: device for (_, name), device in devices.items() if device.kind == "mig"}
    assert len(possible) == 7 + 4 + 2 + 1 + 1 + 4
    assert {device.uuid for device in possible.values()} == {""}
    assert ("n1", "gpu-1") in devices


def test_older_slice_generation_lasts_30_seconds_and_adds_no_devices() -> None:
    early, late = (objects_of(dra("v1", "dynamic", t)) for t in (29.0, 31.0))
    assert [len(each.resource_slices) for each in (early, late)] == [3, 2]
    assert evidence_of(early).devices == evidence_of(late).devices


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_claims_have_admin_access_and_shares_and_kubelet_cdi_ids_match_uids(version: str) -> None:
    truth = dra(version, "static")
    objects = objects_of(truth)
    evidence = evidence_of(objects)
    by_name = {claim["metadata"]["name"]: claim for claim in objects.resource_claims}
    results = {name: evidence.claims[claim["metadata"]["uid"]][0] for name, claim in by_name.items()}
    assert [name for name, result in results.items() if result.admin_access] == ["watch-gpu"]
    assert results["part-gpu"].consumed_memory_bytes == 20480 << 20
    assert results["named"].share_id != results["part-gpu"].share_id
    answer: Any = kubelet.build_messages()["ListPodResourcesResponse"].FromString(list_response(truth))
    cdi = [
        name.name
        for pod in answer.pod_resources
        for container in pod.containers
        for claim in container.dynamic_resources
        for device in claim.claim_resources
        for name in device.cdi_devices
    ]
    assert sorted(name.split("claim=")[1][:36] for name in cdi) == sorted(evidence.claims)


async def test_simulated_node_serves_its_pods_through_its_kubeconfig(tmp_path: Path) -> None:
    node = SimulatedNode(scenario.load("kai"), tmp_path, time.time)
    await node.start()
    client = ApiClient(Credentials(kubeconfig=node.kubeconfig), random=lambda: 0.5)
    try:
        async with asyncio.timeout(20):
            query = {"fieldSelector": "spec.nodeName=sim-kai-01"}
            listed = await client.get(Request("/api/v1/pods", query, METADATA_LIST))
            own = await client.get(Request("/api/v1/nodes/sim-kai-01"))
    finally:
        await client.close()
        await node.stop()
    assert {pod["metadata"]["name"] for pod in listed["items"]} == {pod.name for pod in node.truth().pods}
    assert own["metadata"]["labels"]["topology.kubernetes.io/region"] == "eu-west-1"
