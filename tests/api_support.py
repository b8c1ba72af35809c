"""A Kubernetes API server over TLS, and a small cluster behind it."""

import asyncio
import contextlib
import importlib
import json
import random
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from exporter.attribution.owner_rules import OwnerRules
from exporter.kube.api_client import ApiClient
from exporter.kube.credentials import Credentials
from exporter.kube.list_watch import ListWatch
from exporter.kube.metadata import Metadata, MetadataSettings
from exporter.model.attribution import Allocations, ClaimedDevice, ContainerAllocation, DeviceIds
from gpu_simulator.api_server import ApiObjects, ApiServer, ServerTls

if TYPE_CHECKING:
    from gpu_simulator.truth import Fault

NODE = "gpu-node-1"
PODS = "/api/v1/pods"
SELECTOR = {"fieldSelector": f"spec.nodeName={NODE},status.phase!=Succeeded,status.phase!=Failed"}


def pod(name: str, *, uid: str = "", phase: str = "Running", node: str = NODE, **metadata: object) -> dict[str, Any]:
    """Make a pod as in the API, with the ``managedFields`` and the null list of real pods."""
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": {
            "namespace": "ml",
            "name": name,
            "uid": uid or f"uid-of-{name}",
            "labels": {"app": name},
            "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {"f:phase": {}}}}],
            **metadata,
        },
        "spec": {"nodeName": node, "containers": None},
        "status": {"phase": phase},
    }


def uid_of(shown: dict[str, Any]) -> str:
    """Parse a pod into its UID."""
    return str(shown["metadata"]["uid"])


async def until(holds: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Wait until something holds; fail after the deadline."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(0.005)


class World:
    """Objects and faults, and a server and a client for them."""

    def __init__(self, folder: Path, **options: Any) -> None:  # noqa: ANN401 - of ApiServer
        self.objects = ApiObjects()
        self.faults: dict[Fault, float] = {}
        self.token_file = folder / "token"
        self.kubeconfig = folder / "kubeconfig"
        self.server = ApiServer(
            lambda: self.objects,
            lambda: self.faults,
            token_file=self.token_file,
            kubeconfig=self.kubeconfig,
            **{"bookmark_seconds": 0.2, **options},
        )
        self.client = ApiClient(Credentials(kubeconfig=self.kubeconfig), random=random.random)

    def put(self, *pods: dict[str, Any]) -> None:
        self.objects = ApiObjects(pods=pods)

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()
        await self.server.stop()


class Waits:
    """A sleep that ends soon and records its requested durations."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(min(seconds, 0.01))


@contextlib.asynccontextmanager
async def following(client: ApiClient, **options: Any) -> AsyncIterator[ListWatch[str]]:  # noqa: ANN401 - of ListWatch
    """Follow the pods of the node by their UIDs; ``random`` is that of the client."""
    client.random = options.pop("random", client.random)
    settings = {
        "path": PODS,
        "query": SELECTOR,
        "metadata_only": True,
        "parse": uid_of,
        "clock": time.time,
        "sleep": Waits(),
        "silence_seconds": 1.0,
    }
    watcher: ListWatch[str] = ListWatch(client=client, **{**settings, **options})
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@contextlib.asynccontextmanager
async def scripted(
    answer: Answer, folder: Path, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[ApiClient, list[web.Request]]]:
    """Serve the answers of a test, also invalid ones; yield a client and the requests in their order."""
    requests: list[web.Request] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        requests.append(request)
        return await answer(request)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    kubeconfig = folder / "scripted-kubeconfig"
    server = f"http{'s' if tls else ''}://127.0.0.1:{runner.addresses[0][1]}"
    write_kubeconfig(kubeconfig, server, {"token": "secret"})
    client = ApiClient(Credentials(kubeconfig=kubeconfig), random=random.random)
    try:
        yield client, requests
    finally:
        await client.close()
        await runner.cleanup()


def write_kubeconfig(path: Path, server: str, user: Mapping[str, str], **cluster: str) -> None:
    """Write a kubeconfig of one cluster and one user."""
    written = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(written), encoding="utf-8")


async def stream(request: web.Request, parts: Iterable[bytes], *, hold: bool = False) -> web.StreamResponse:
    """Answer with parts of a stream; then end it properly, or keep it open."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    if hold:
        await asyncio.Event().wait()
    return response


def pod_list(*pods: object, version: int = 100) -> web.Response:
    """Answer with a list."""
    return web.json_response({"kind": "PodList", "metadata": {"resourceVersion": str(version)}, "items": list(pods)})


def self_signed(folder: Path, names: Sequence[str] = ("IP:127.0.0.1",)) -> ServerTls:
    """Make a self-signed certificate."""
    tls = ServerTls(certificate=folder / "ca.crt", key=folder / "tls.key")
    folder.mkdir(parents=True, exist_ok=True)
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    files = ("-keyout", str(tls.key), "-out", str(tls.certificate), "-days", "2", "-subj", "/CN=simulated")
    subprocess.run([*made, *files, "-addext", f"subjectAltName={','.join(names)}"], check=True, capture_output=True)
    return tls


if TYPE_CHECKING:
    from gpu_simulator.truth import Fault

CLUSTER_NODE = "n1"
CLAIM_UID = "11111111-2222-3333-4444-555555555555"
DEADLINE_SECONDS = 15.0


class Cluster:
    """Objects and a time that a test changes."""

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
            "spec": {"nodeName": CLUSTER_NODE},
            "status": {"phase": phase},
        }

    def add_namespace(self, name: str, **metadata: object) -> None:
        self.namespaces[name] = {"metadata": {"name": name, **metadata}}

    def objects(self) -> ApiObjects:
        return ApiObjects(
            pods=tuple(self.pods.values()),
            namespaces=tuple(self.namespaces.values()),
            node={"metadata": {"name": CLUSTER_NODE, "labels": dict(self.node_labels)}},
            resource_slices=tuple(self.slices),
            resource_claims=tuple(self.claims),
            dra_version=self.dra_version,
        )

    def clock(self) -> float:
        return self.now


class Reader:
    """Metadata that runs against a cluster's server, driven as by the agent."""

    def __init__(self, cluster: Cluster, server: ApiServer, metadata: Metadata) -> None:
        self.cluster = cluster
        self.server = server
        self.metadata = metadata

    def passes(self, seconds: float) -> None:
        """Advance the time in the agent's steps."""
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
        # The agent loads it at the first use: seconds on a busy machine, and not part of the measured wait.
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
        "node": CLUSTER_NODE,
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
        pool=CLUSTER_NODE,
        device=device,
        cdi_names=(f"k8s.gpu.nvidia.com/claim={uid}-{device}",) if uid else (),
    )
    return ContainerAllocation(namespace="ml", pod=pod, container="main", claims=(one,))
