"""A Kubernetes API for tests: objects and faults that a test changes, and a server that says what it is told."""

import asyncio
import contextlib
import json
import random
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web

from exporter.kube.api_client import ApiClient
from exporter.kube.credentials import Credentials
from exporter.kube.list_watch import ListWatch
from gpu_simulator.api_server import ApiObjects, ApiServer, ServerTls

if TYPE_CHECKING:
    from gpu_simulator.truth import Fault

NODE = "gpu-node-1"
PODS = "/api/v1/pods"
SELECTOR = {"fieldSelector": f"spec.nodeName={NODE},status.phase!=Succeeded,status.phase!=Failed"}


def pod(name: str, *, uid: str = "", phase: str = "Running", node: str = NODE, **metadata: object) -> dict[str, Any]:
    """Make a pod as the API has it, with the ``managedFields`` and the null list that real ones have too."""
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
    """Objects and faults, and the server and client over them."""

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
    """A sleep that is over soon and remembers how long it should have been."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)
        await asyncio.sleep(min(seconds, 0.01))


@contextlib.asynccontextmanager
async def following(client: ApiClient, **options: Any) -> AsyncIterator[ListWatch[str]]:  # noqa: ANN401 - of ListWatch
    """Follow the pods of the node by their UIDs; ``random`` is the client's."""
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
    """Serve whatever a test wants, however wrong; give a client of it and the requests in their order."""
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
    """Make a certificate that is its own authority."""
    tls = ServerTls(certificate=folder / "ca.crt", key=folder / "tls.key")
    folder.mkdir(parents=True, exist_ok=True)
    made = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    files = ("-keyout", str(tls.key), "-out", str(tls.certificate), "-days", "2", "-subj", "/CN=simulated")
    subprocess.run([*made, *files, "-addext", f"subjectAltName={','.join(names)}"], check=True, capture_output=True)
    return tls
