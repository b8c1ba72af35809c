"""The doctor on the Kubernetes API: settings, address, rights, token, clock, and owners of the GPU pods."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from api_support import NODE, World, pod
from join_support import attributor
from page_support import configured

from exporter.config import AgentConfig, load_agent
from exporter.doctor import checks, kubernetes
from exporter.doctor.findings import Finding, Level, Surroundings
from exporter.kube.metadata import Metadata
from exporter.model.attribution import (
    Allocations,
    ClaimedDevice,
    ContainerAllocation,
    DeviceIds,
    NodeFacts,
    Owner,
    PodFacts,
)
from exporter.model.devices import Gpu, GpuReading, Reading
from gpu_simulator.api_server import ApiObjects
from gpu_simulator.truth import Fault

UUID = "GPU-00000000-1111-2222-3333-444444444444"
NAMESPACE = {"kind": "Namespace", "metadata": {"name": "ml", "labels": {"team": "vision"}}}
NODE_OBJECT = {
    "kind": "Node",
    "metadata": {
        "name": NODE,
        "labels": {"node.kubernetes.io/instance-type": "p5.48xlarge", "nvidia.com/gpu.product": "NVIDIA-L40S"},
    },
}
WHOLE = ApiObjects(pods=(pod("train-0"),), namespaces=(NAMESPACE,), node=NODE_OBJECT)
HOLDING = Allocations(
    answered_at_seconds=1.0,
    containers=(
        ContainerAllocation(
            namespace="ml",
            pod="train-0",
            container="main",
            devices=(DeviceIds(resource="nvidia.com/gpu", ids=(UUID,)),),
        ),
    ),
)
READING = Reading(
    source="nvml",
    taken_at_seconds=1.0,
    duration_seconds=0.01,
    gpus=(GpuReading(gpu=Gpu(uuid=UUID, index=0, minor=0, model="NVIDIA L40S", pci_bus_id="00000000:01:00.0")),),
)


def settings(kubeconfig: Path, **changes: object) -> AgentConfig:
    config = load_agent({}, {}, check_paths=False)
    return configured(
        config,
        **{
            "kube_metadata": True,
            "kubeconfig": kubeconfig,
            "node_name": NODE,
            "kube_start_jitter_seconds": 0.0,
            **changes,
        },
    )


async def asked(
    config: AgentConfig, allocations: Allocations | None = HOLDING, *, skew: float = 0.0
) -> tuple[dict[str, Finding], Metadata | None]:
    around = Surroundings(config=config, wall=lambda: time.time() + skew, monotonic=time.monotonic)
    found, view = await kubernetes.ask_api(around, attributor(config, allocations, around.wall), READING)
    return {finding.name: finding for finding in found}, view


def of_holders(config: AgentConfig, view: Metadata) -> Finding:
    attribution = attributor(config, HOLDING).join(READING, time.time(), 0.0)
    return checks.of_holders(config, attribution, view.facts)


async def test_working_api_is_ok_with_rights_owners_and_node_labels(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.objects = WHOLE
        config = settings(world.kubeconfig)
        found, view = await asked(config)
    assert found["kubernetes API"].level is Level.OK
    assert "1 pods of node gpu-node-1" in found["kubernetes API"].cause
    assert found["API rights"].level is Level.OK
    assert set(found) == {"kubernetes API", "API rights"}
    assert view
    assert of_holders(config, view).cause == "owner and team known of all 1 pods that hold GPUs"
    labels = checks.node_labels(view.node_facts)
    assert (labels.level, labels.cause) == (Level.OK, "p5.48xlarge, NVIDIA-L40S")


async def test_wrong_node_name_is_a_fail_with_the_value_and_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with World(tmp_path) as world:
        world.objects = WHOLE
        wrong, _ = await asked(settings(world.kubeconfig, node_name="mistyped"))
        monkeypatch.setenv("POD_NAMESPACE", "monitoring")
        monkeypatch.setenv("POD_NAME", "agent-x7")
        foreign, _ = await asked(settings(world.kubeconfig))
    assert wrong["kubernetes API"].level is Level.FAIL
    assert "no node 'mistyped', the value of --node-name" in wrong["kubernetes API"].cause
    assert "spec.nodeName" in wrong["kubernetes API"].cause
    assert foreign["kubernetes API"].level is Level.FAIL
    assert "monitoring/agent-x7, the pod of this agent, is not among the 1 objects" in foreign["kubernetes API"].cause
    assert "--node-name is 'gpu-node-1': set it" in foreign["kubernetes API"].cause


async def test_pods_without_a_team_or_unknown_to_the_api_are_counted(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.objects = replace(WHOLE, namespaces=())
        config = settings(world.kubeconfig)
        _, view = await asked(config)
        assert view
        teamless = of_holders(config, view)
        world.objects = ApiObjects(pods=(pod("another"),), namespaces=(NAMESPACE,), node=NODE_OBJECT)
        _, view = await asked(config)
    assert (teamless.level, "1 of 1 pods that hold GPUs have no team: ml/train-0" in teamless.cause) == (
        Level.WARN,
        True,
    )
    assert "team" in teamless.fix
    assert view
    assert "not known to the API: ml/train-0" in of_holders(config, view).cause


async def test_namespace_rights_are_not_required_without_namespace_teams(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.objects = WHOLE
        found, _ = await asked(settings(world.kubeconfig, namespace_teams=False), None)
        assert found["API rights"].level is Level.OK


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (Fault.API_FORBIDDEN, "grant verb list on resource pods"),
        (Fault.API_ERROR, "500"),
        (Fault.API_DOWN, "127.0.0.1"),
    ],
)
async def test_refusing_or_unreachable_api_is_a_fail_with_the_cause(tmp_path: Path, fault: Fault, word: str) -> None:
    async with World(tmp_path) as world:
        world.faults = {fault: 0.0}
        if fault is Fault.API_DOWN:
            await world.server.stop()
        found, view = await asked(settings(world.kubeconfig))
    assert (found["kubernetes API"].level, view) == (Level.FAIL, None)
    assert word in found["kubernetes API"].cause


async def test_missing_settings_are_a_fail_with_the_paths_checked(tmp_path: Path) -> None:
    found, view = await asked(settings(tmp_path / "none"))
    assert (found["kubernetes API"].level, view) == (Level.FAIL, None)
    assert str(tmp_path / "none") in found["kubernetes API"].cause


async def test_node_clock_skew_is_a_warning(tmp_path: Path) -> None:
    async with World(tmp_path) as world:
        world.objects = WHOLE
        found, _ = await asked(settings(world.kubeconfig), skew=-120.0)
    assert found["API clock"].level is Level.WARN
    assert "behind the API server" in found["API clock"].cause


@asynccontextmanager
async def refusing(kubeconfig: Path, refused: set[str]) -> AsyncIterator[None]:
    """Serve an API that lists pods and forbids paths that end in one of the words, ``watch`` among them."""

    async def handle(request: web.Request) -> web.Response:
        if any(request.path.endswith(word) for word in refused) or ("watch" in refused and request.query.get("watch")):
            return web.json_response({"kind": "Status", "message": "not allowed"}, status=403)
        if request.path == "/apis/resource.k8s.io":
            return web.json_response({"versions": [{"version": "v1beta1"}]})
        return web.json_response({"kind": "PodList", "metadata": {"resourceVersion": "1"}, "items": []})

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    written = {
        "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{"name": "x", "cluster": {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}}],
        "users": [{"name": "x", "user": {"token": "abc"}}],
    }
    await asyncio.to_thread(kubeconfig.write_text, json.dumps(written))
    try:
        yield
    finally:
        await runner.cleanup()


CLAIMING = Allocations(
    answered_at_seconds=1.0,
    containers=(
        ContainerAllocation(
            namespace="ml",
            pod="train-0",
            container="main",
            claims=(
                ClaimedDevice(
                    claim_name="gpus", claim_namespace="ml", driver="gpu.nvidia.com", pool=NODE, device="gpu-0"
                ),
            ),
        ),
    ),
)


async def test_each_missing_right_is_named_with_verb_and_resource(tmp_path: Path) -> None:
    refused = {"watch", f"/nodes/{NODE}", "/namespaces/ml", "/resourceslices", "/resourceclaims/gpus"}
    async with refusing(tmp_path / "config", refused):
        found, _ = await asked(settings(tmp_path / "config"), CLAIMING)
    rights = found["API rights"]
    assert rights.level is Level.WARN
    for verb, resource in (
        ("watch", "pods"),
        ("get", "nodes"),
        ("get", "namespaces"),
        ("list", "resourceslices"),
        ("get", "resourceclaims"),
    ):
        assert f"grant verb {verb} on resource {resource} " in rights.cause


def test_disabled_metadata_finding_names_the_missing_features() -> None:
    finding = kubernetes.OFF
    assert (finding.level, "--kube-metadata on" in finding.cause, "namespaces" in finding.cause) == (
        Level.OK,
        True,
        True,
    )


def test_unreadable_and_empty_node_labels_are_distinguished() -> None:
    assert checks.node_labels(None).level is Level.WARN
    assert "say nothing" in checks.node_labels(NodeFacts()).cause


def test_invalid_pod_annotations_are_reported() -> None:
    config = load_agent({}, {}, check_paths=False)
    attribution = attributor(config, HOLDING).join(READING, 1.0, 0.0)
    facts = PodFacts(owner=Owner(namespace="ml", team="t"), problems=("bad_opt_out",))
    finding = checks.of_holders(config, attribution, lambda _namespace, _pod: facts)
    assert (finding.level, "bad opt out" in finding.cause) == (Level.WARN, True)
