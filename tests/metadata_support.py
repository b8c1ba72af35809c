"""A small cluster of one node behind the simulator's API server, for tests of what is read from it."""

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.attribution.owner_rules import OwnerRules
from exporter.kube.metadata import Metadata, MetadataSettings
from exporter.model.attribution import Allocations, ClaimedDevice, ContainerAllocation, DeviceIds
from gpu_simulator.api_server import ApiObjects, ApiServer

if TYPE_CHECKING:
    from gpu_simulator.truth import Fault

NODE = "n1"
CLAIM_UID = "11111111-2222-3333-4444-555555555555"
DEADLINE_SECONDS = 15.0


class Cluster:
    """Objects that a test changes, and time that it lets pass."""

    def __init__(self) -> None:
        self.pods: dict[tuple[str, str], dict[str, Any]] = {}
        self.namespaces: dict[str, dict[str, Any]] = {}
        self.node_labels: dict[str, str] = {}
        self.slices: list[dict[str, Any]] = []
        self.claims: list[dict[str, Any]] = []
        self.dra_version = ""
        self.faults: dict[Fault, float] = {}
        self.now = float(round(time.time()))

    def add_pod(
        self, name: str, *, namespace: str = "ml", uid: str = "", phase: str = "Running", **metadata: object
    ) -> None:
        self.pods[namespace, name] = {
            "metadata": {"namespace": namespace, "name": name, "uid": uid or f"uid-{name}", **metadata},
            "spec": {"nodeName": NODE},
            "status": {"phase": phase},
        }

    def add_namespace(self, name: str, **metadata: object) -> None:
        self.namespaces[name] = {"metadata": {"name": name, **metadata}}

    def objects(self) -> ApiObjects:
        return ApiObjects(
            pods=tuple(self.pods.values()),
            namespaces=tuple(self.namespaces.values()),
            node={"metadata": {"name": NODE, "labels": dict(self.node_labels)}},
            resource_slices=tuple(self.slices),
            resource_claims=tuple(self.claims),
            dra_version=self.dra_version,
        )

    def clock(self) -> float:
        return self.now


class Reader:
    """Metadata that runs against a cluster's server, asked as the agent asks it."""

    def __init__(self, cluster: Cluster, server: ApiServer, metadata: Metadata) -> None:
        self.cluster = cluster
        self.server = server
        self.metadata = metadata

    def passes(self, seconds: float) -> None:
        """Let time pass in the agent's steps."""
        for _ in range(round(seconds)):
            self.cluster.now += 1.0
            self.metadata.evidence(self.cluster.now)

    def note(self, *containers: ContainerAllocation) -> None:
        allocations = Allocations(answered_at_seconds=self.cluster.now, containers=containers)
        self.metadata.note(allocations, self.cluster.now)

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"not in time; problem: {self.metadata.status.problem!r}"
            await asyncio.sleep(0.02)
            self.metadata.evidence(self.cluster.now)


@asynccontextmanager
async def reading(
    cluster: Cluster,
    folder: Path,
    *,
    before: Callable[[ApiServer], Awaitable[None] | None] | None = None,
    random: Callable[[], float] = lambda: 0.1,
    **settings: Any,  # noqa: ANN401 - as MetadataSettings
) -> Any:  # noqa: ANN401 - an async generator, as the decorator wants it
    for module in ("client.configuration", "config.kube_config"):
        # The agent loads it when it first needs it: seconds on a busy machine, and not what is waited for here.
        importlib.import_module(f"kubernetes.aio.{module}")
    server = ApiServer(
        cluster.objects,
        lambda: cluster.faults,
        token_file=folder / "token",
        kubeconfig=folder / "kubeconfig",
    )
    await server.start()
    if before is not None:
        waits = before(server)
        if waits is not None:
            await waits
    wanted: Mapping[str, Any] = {
        "node": NODE,
        "kubeconfig": folder / "kubeconfig",
        "rules": OwnerRules(team_keys=("team",)),
        **settings,
    }
    metadata = Metadata(MetadataSettings(**wanted), clock=cluster.clock, random=random)
    task = asyncio.create_task(metadata.run())
    try:
        yield Reader(cluster, server, metadata)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await server.stop()


def whole_gpu(pod: str, namespace: str = "ml") -> ContainerAllocation:
    devices = (DeviceIds(resource="nvidia.com/gpu", ids=("GPU-b1028956-cfa2-0990-bf4a-5da9abb51763",)),)
    return ContainerAllocation(namespace=namespace, pod=pod, container="main", devices=devices)


def claimed(pod: str, *, device: str = "gpu-0", claim: str = "c", uid: str = CLAIM_UID) -> ContainerAllocation:
    one = ClaimedDevice(
        claim_name=claim,
        claim_namespace="ml",
        driver="gpu.nvidia.com",
        pool=NODE,
        device=device,
        cdi_names=(f"k8s.gpu.nvidia.com/claim={uid}-{device}",) if uid else (),
    )
    return ContainerAllocation(namespace="ml", pod=pod, container="main", claims=(one,))
