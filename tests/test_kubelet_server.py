# ruff: noqa: ASYNC240 - files of one test, with nothing else in its loop
import asyncio
import dataclasses
import stat
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from join_support import evidence_of, read

from exporter.attribution.join import attribute
from exporter.config import load_agent
from exporter.errors import ConfigError
from exporter.kube import kubelet as _proto
from exporter.kube.kubelet import KubeletClient
from exporter.model.devices import Gpu, MigInstance
from gpu_simulator.api_server import objects_of
from gpu_simulator.kubelet import BURST_CALLS, KubeletServer, allocatable_response, list_response
from gpu_simulator.scenario import load, shipped
from gpu_simulator.truth import Fault, HolderTruth, NodeTruth

GPU = "GPU-00000000-0000-4000-8000-000000000000"


def truth(*faults: Fault) -> NodeTruth:
    holder = HolderTruth(
        namespace="ml",
        pod="train",
        container="main",
        pod_uid="u",
        device_uuid=GPU,
        resource="nvidia.com/gpu",
        device_ids=(GPU,),
        share_ratio=1,
        activity_ratio=1,
        started_seconds=0,
    )
    return NodeTruth(
        at_seconds=0,
        node="n",
        driver_version="580",
        holders=(holder,),
        other_pods=(("kube-system", "dns", "main"), ("ml", "train", "sidecar")),
        faults=dict.fromkeys(faults, 0.0),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pod-resources" / "kubelet.sock"


@pytest.fixture
async def server(path: Path) -> AsyncIterator[KubeletServer]:
    kubelet = KubeletServer(path, truth)
    await kubelet.start()
    yield kubelet
    await kubelet.stop()


async def call(path: Path, method: str, times: int = 1) -> list[tuple[grpc.StatusCode, str]]:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        ask = channel.unary_unary(f"/{_proto.SERVICE}/{method}", request_serializer=None, response_deserializer=None)

        async def once() -> tuple[grpc.StatusCode, str]:
            try:
                await ask(b"", timeout=10)
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or ""
            return grpc.StatusCode.OK, ""

        return await asyncio.gather(*(once() for _ in range(times)))


def test_every_pod_is_listed_once_with_and_without_devices() -> None:
    answer = _proto.build_messages()["ListPodResourcesResponse"].FromString(list_response(truth()))
    assert [(pod.name, [c.name for c in pod.containers]) for pod in answer.pod_resources] == [  # type: ignore[attr-defined] # made at run time
        ("dns", ["main"]),
        ("train", ["sidecar", "main"]),
    ]


def containers_of(node: NodeTruth) -> dict[tuple[str, str], Any]:
    answer: Any = _proto.build_messages()["ListPodResourcesResponse"].FromString(list_response(node))
    return {(pod.name, container.name): container for pod in answer.pod_resources for container in pod.containers}


def test_fractional_pod_lists_no_device_and_its_reservation_pod_lists_the_gpu() -> None:
    node = load("kai").at(5.0)
    containers = containers_of(node)
    assert list(containers["notebook-eve", "main"].devices) == []
    assert [name for pod, name in containers if pod == "distill-0"] == ["uploader", "main"]
    held = [list(c.devices[0].device_ids) for (pod, _), c in containers.items() if pod.startswith("gpu-reservation-")]
    assert held == [[gpu.uuid] for gpu in node.gpus[:3]]


def test_volcano_lists_two_resources_with_one_container() -> None:
    listed = containers_of(load("volcano-vgpu").at(0.0))["etl-map-1", "main"].devices
    assert [(entry.resource_name, len(entry.device_ids)) for entry in listed] == [
        ("volcano.sh/vgpu-number", 2),
        ("volcano.sh/vgpu-memory", 10),
    ]


def test_containers_list_their_claims_and_finished_pods_linger() -> None:
    early, late, later = (containers_of(load("dra").at(t)) for t in (50.0, 75.0, 135.0))
    claims = {key: [claim.claim_name for claim in container.dynamic_resources] for key, container in early.items()}
    assert claims["chat-0", "prefill"] == claims["chat-0", "decode"] == claims["chat-canary-0", "main"] == ["chat-gpu"]
    assert [len(claim.claim_resources) for claim in early["gpu-watch-x7d2k", "main"].dynamic_resources] == [4]
    assert claims["legacy-train", "main"][0].startswith("legacy-train-extended-resources-")
    assert ("finetune-8fj2c", "main") in late
    assert ("finetune-8fj2c", "main") not in later


def test_answer_contains_an_unknown_field() -> None:
    assert b"simulated" in list_response(truth())


@pytest.mark.usefixtures("server")
async def test_get_is_disabled_as_in_a_kubelet_before_1_34(path: Path) -> None:
    assert await call(path, "Get") == [(grpc.StatusCode.UNKNOWN, "PodResources API Get method disabled")]


async def test_calls_beyond_the_burst_get_the_kubelets_rate_limit_error(path: Path) -> None:
    server = KubeletServer(path, truth, clock=lambda: 0.0)  # a running clock allows more calls, all on a busy machine
    await server.start()
    answers = await call(path, "GetAllocatableResources", times=200)
    await server.stop()
    assert Counter(answers) == {
        (grpc.StatusCode.OK, ""): BURST_CALLS,
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit"): 200 - BURST_CALLS,
    }


async def test_restart_replaces_the_socket_and_stop_removes_it(server: KubeletServer, path: Path) -> None:
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert [entry.name for entry in path.parent.iterdir()] == ["kubelet.sock"]
    await server.restart()
    assert await call(path, "List") == [(grpc.StatusCode.OK, "")]
    await server.stop()
    assert list(path.parent.iterdir()) == []


async def test_stopped_kubelet_has_no_socket(path: Path) -> None:
    kubelet = KubeletServer(path, lambda: truth(Fault.KUBELET_DOWN))
    await kubelet.start()
    assert not path.exists()
    await kubelet.stop()


def test_dra_devices_are_never_advertised() -> None:
    advertised = {"dra:": ("dra:gpu.nvidia.com/n/gpu-0",), "nvidia.com/gpu": (GPU,)}
    answer = allocatable_response(dataclasses.replace(truth(), allocatable=advertised))
    assert b"gpu-0" not in answer
    assert GPU.encode() in answer


def seen_by_driver(node: NodeTruth) -> tuple[list[Gpu], list[MigInstance]]:
    gpus = [
        Gpu(
            uuid=gpu.uuid,
            index=gpu.index,
            minor=gpu.minor,
            model=gpu.model.name,
            pci_bus_id=gpu.pci_bus_id,
            mig_enabled=gpu.mig_enabled,
            compute_slices=gpu.model.compute_slices,
            memory_slices=gpu.model.memory_slices,
            memory_total_bytes=gpu.model.memory_bytes,
        )
        for gpu in node.gpus
    ]
    instances = [
        MigInstance(
            uuid=instance.uuid,
            parent_uuid=gpu.uuid,
            gpu_instance_id=instance.gpu_instance_id,
            compute_instance_id=instance.compute_instance_id,
            profile=instance.profile,
            compute_slices=instance.compute_slices,
            memory_slices=instance.memory_slices,
            profile_id=instance.profile_id,
            placement_start=instance.placement_start,
        )
        for gpu in node.gpus
        for instance in gpu.instances
    ]
    return gpus, instances


@pytest.mark.parametrize("name", shipped())
async def test_attribution_finds_the_holders_and_shares_of_every_shipped_scenario(name: str, path: Path) -> None:
    scenario = load(name)
    now = 0.0
    kubelet = KubeletServer(path, lambda: dataclasses.replace(scenario.at(now), faults={}))
    await kubelet.start()
    client = KubeletClient(str(path), resources=load_agent({}, {}).attribution.gpu_resources)
    for now in (1.0, 60.0, 75.0, 600.0, 6000.0):
        node = scenario.at(now)
        gpus, instances = seen_by_driver(node)
        found = attribute(await client.fetch(now), read(gpus, instances), evidence_of(objects_of(node)))
        shares = {
            (holder.device_uuid, holder.namespace, holder.pod, holder.container): holder.share_ratio
            for holders in found.holders.values()
            for holder in holders
        }
        assert shares == pytest.approx(
            {(held.device_uuid, held.namespace, held.pod, held.container): held.share_ratio for held in node.holders}
        )
        assert found.unresolved == ()
    await kubelet.stop()


async def test_socket_path_that_is_too_long_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for a unix socket"):
        await KubeletServer(tmp_path / ("x" * 120), truth).start()
