"""Simulates a kubelet: serves the pod-resources API on a unix socket from the ground truth."""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

# The same settings as in the exporter, because both can run in one process.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc
import grpc.aio

from exporter.errors import ConfigError
from exporter.kube.kubelet import LONGEST_PATH_BYTES, READ_SCHEMA, SERVICE, build_messages
from gpu_simulator.identities import DRA_PREFIX, claim_uid
from gpu_simulator.truth import Fault, HolderTruth, NodeTruth

CALLS_PER_SECOND = 100.0
BURST_CALLS = 10
RATE_LIMIT_TEXT = "rejected by rate limit"
GET_TEXT = "PodResources API Get method disabled"
HUGE_BYTES = 40 << 20
_FOLLOW_SECONDS = 0.2
_STARTS = frozenset({Fault.KUBELET_STARTING, Fault.KUBELET_PARTIAL})
"""Faults of a kubelet that has just started."""
_GARBAGE = b"\xff\xfe simulated garbage"
# Known and unknown fields that the exporter does not read: it must be able to read the responses of a later kubelet.
_SERVED_SCHEMA: Mapping[str, str] = {
    **READ_SCHEMA,
    "NUMANode": "ID 1 int64",
    "TopologyInfo": "nodes 1 *NUMANode",
    "ContainerMemory": "memory_type 1 string, size 2 uint64, topology 3 TopologyInfo",
    "ContainerDevices": READ_SCHEMA["ContainerDevices"] + ", topology 3 TopologyInfo, not_yet_invented 99 string",
    "ContainerResources": READ_SCHEMA["ContainerResources"] + ", cpu_ids 3 *int64, memory 4 *ContainerMemory",
    "PodResources": READ_SCHEMA["PodResources"] + ", cpu_ids 4 *int64, not_yet_invented 99 string",
    "AllocatableResourcesResponse": READ_SCHEMA["AllocatableResourcesResponse"] + ", cpu_ids 2 *int64",
}
_MESSAGES = build_messages(_SERVED_SCHEMA)


class KubeletServer:
    """Serves ``v1.PodResourcesLister`` from the truth at the time of the call.

    It applies the faults ``KUBELET_*``: DOWN (the socket is removed, then restored), STARTING (a new socket, and no
    pods during the fault), PARTIAL (a new socket, and some of the pods), SILENT, GARBAGE, RATE_LIMIT (other clients
    use the limit) and HUGE (its parameter is the size in bytes; 0 is more than any client accepts).

    Args:
        socket_path: Path of the socket. Like the kubelet, the server listens on another name and renames it.
        truth: Returns the current node.
        clock: Clock of the rate limit in seconds; a virtual clock if the time of the node is compressed.
    """

    def __init__(
        self, socket_path: Path, truth: Callable[[], NodeTruth], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = socket_path
        self._truth = truth
        self._clock = clock
        self._server: grpc.aio.Server | None = None
        self._follower: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()
        self._tokens = float(BURST_CALLS)
        self._refilled_at = 0.0
        self._padding: dict[int, bytes] = {}
        self._starts: frozenset[Fault] = frozenset()
        """Faults during which this server was restarted."""
        self._opened_at = 0.0
        self._knows_pods_at = 0.0

    async def start(self) -> None:
        """Listen, and start to apply the fault DOWN.

        Raises:
            ConfigError: The path is too long for a socket.
        """
        if len(os.fsencode(self._temporary)) > LONGEST_PATH_BYTES:
            raise ConfigError(
                f"kubelet socket {self._path}: too long for a unix socket; allowed: {LONGEST_PATH_BYTES - 4} bytes"
            )
        if self._follower is None:
            await self.follow()
            self._follower = asyncio.create_task(self._follow(), name="simulated kubelet")

    async def stop(self) -> None:
        """Stop immediately: calls fail, and the socket is removed."""
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
            self._follower = None
        await self._close()

    async def restart(self, *, starting_seconds: float = 0.0) -> None:
        """Restart like an upgrade of the kubelet.

        Args:
            starting_seconds: Seconds without pods after the start, like a kubelet before it knows its pods.
        """
        await self.stop()
        self._knows_pods_at = asyncio.get_running_loop().time() + starting_seconds
        await self.start()

    @property
    def _temporary(self) -> Path:
        return self._path.with_name(f"{self._path.name}.new")

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(_FOLLOW_SECONDS)
            await self.follow()

    async def follow(self) -> None:
        """Apply the current faults immediately, instead of at the next poll."""
        async with self._changing:
            faults = self._truth().faults
            down, starts = Fault.KUBELET_DOWN in faults, _STARTS & faults.keys()
            begins, self._starts = bool(starts - self._starts), starts
            if (down or begins) and self._server is not None:
                await self._close()
            if not down and self._server is None:
                await self._open()

    async def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        server = grpc.aio.server()
        handlers = {
            "List": self._handler(self._list),
            "GetAllocatableResources": self._handler(self._allocatable),
            "Get": self._handler(self._get),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._temporary.unlink(missing_ok=True)
        server.add_insecure_port(f"unix:{self._temporary.absolute()}")
        await server.start()
        self._temporary.replace(self._path)
        self._server = server
        self._opened_at = asyncio.get_running_loop().time()

    async def _close(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            self._path.unlink(missing_ok=True)
            await server.stop(grace=None)

    def _handler(self, answer: Callable[[NodeTruth, Any], Awaitable[bytes]]) -> Any:  # noqa: ANN401 - the type of grpc is private
        async def handle(_request: bytes, context: Any) -> bytes:  # noqa: ANN401 - as above
            truth = self._truth()
            if Fault.KUBELET_SILENT in truth.faults:
                await asyncio.Event().wait()
            if Fault.KUBELET_DOWN in truth.faults:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "simulated kubelet is down")
            if not self._take_token(truth):
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, RATE_LIMIT_TEXT)
            if Fault.KUBELET_GARBAGE in truth.faults:
                return _GARBAGE
            return await answer(truth, context)

        return grpc.unary_unary_rpc_method_handler(handle)

    def _take_token(self, truth: NodeTruth) -> bool:
        now = self._clock()
        self._tokens = min(BURST_CALLS, self._tokens + (now - self._refilled_at) * CALLS_PER_SECOND)
        self._refilled_at = now
        if Fault.KUBELET_RATE_LIMIT in truth.faults:
            self._tokens = 0.0
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _is_starting(self, truth: NodeTruth) -> bool:
        early = asyncio.get_running_loop().time() < self._knows_pods_at
        return early or Fault.KUBELET_STARTING in truth.faults

    async def _list(self, truth: NodeTruth, _context: object) -> bytes:
        if not _STARTS & truth.faults.keys() <= self._starts:
            await asyncio.Event().wait()  # until the restart ends this call: only the new server lacks pods
        if self._is_starting(truth):
            return b""
        seconds = truth.faults.get(Fault.KUBELET_PARTIAL)
        if seconds and asyncio.get_running_loop().time() >= self._opened_at + seconds:
            truth = replace(truth, faults={one: truth.faults[one] for one in truth.faults.keys() - _STARTS})
        answer = list_response(truth)
        if Fault.KUBELET_HUGE in truth.faults:
            size = int(truth.faults[Fault.KUBELET_HUGE]) or HUGE_BYTES
            if size not in self._padding:
                self._padding = {size: _many_ids(size)}
            answer += self._padding[size]  # concatenated messages are one message with joined lists
        return answer

    async def _allocatable(self, truth: NodeTruth, _context: object) -> bytes:
        return b"" if self._is_starting(truth) else allocatable_response(truth)

    async def _get(self, _truth: NodeTruth, context: Any) -> bytes:  # noqa: ANN401 - as _handler
        await context.abort(grpc.StatusCode.UNKNOWN, GET_TEXT)
        raise AssertionError  # abort raises


def list_response(truth: NodeTruth) -> bytes:
    """Return the response of this node's kubelet to ``List``: every pod, with or without devices."""
    answer: Any = _MESSAGES["ListPodResourcesResponse"]()
    held: dict[tuple[str, str, str], list[HolderTruth]] = {key: [] for key in truth.other_pods}
    for holder in (*truth.holders, *truth.also_listed):
        listed = held.setdefault((holder.namespace, holder.pod, holder.container), [])
        if holder.listed:
            listed.append(holder)
    names = list(dict.fromkeys((namespace, pod) for namespace, pod, _ in held))
    if Fault.KUBELET_PARTIAL in truth.faults:
        names = list(dict.fromkeys((one.namespace, one.pod) for one in truth.holders))
        del names[(len(names) + 1) // 2 :]
    pods = {
        (namespace, pod): answer.pod_resources.add(
            namespace=namespace, name=pod, cpu_ids=[0], not_yet_invented="simulated"
        )
        for namespace, pod in names
    }
    unlisted = {(one.namespace, one.pod, one.container) for one in truth.holders if one.init}
    for (namespace, pod, container), holders in held.items():
        if (namespace, pod) not in pods or (namespace, pod, container) in unlisted:
            continue
        entry = pods[namespace, pod].containers.add(name=container, cpu_ids=[0, 1])
        entry.memory.add(memory_type="memory", size=1 << 30).topology.nodes.add(ID=0)
        _add_devices(entry.devices, _plain_ids(holders))
        _add_claims(entry.dynamic_resources, holders)
    return bytes(answer.SerializeToString())


def allocatable_response(truth: NodeTruth) -> bytes:
    """Return the response of this node's kubelet to ``GetAllocatableResources``."""
    answer: Any = _MESSAGES["AllocatableResourcesResponse"](cpu_ids=range(16))
    for resource, ids in truth.allocatable.items():  # DRA devices are never listed
        _add_devices(answer.devices, [(resource, ids)] if not resource.startswith(DRA_PREFIX) else ())
    return bytes(answer.SerializeToString())


def _plain_ids(holders: Iterable[HolderTruth]) -> Iterable[tuple[str, tuple[str, ...]]]:
    ids: dict[str, list[str]] = {}
    for holder in holders:
        plain = [device_id for device_id in holder.device_ids if not device_id.startswith(DRA_PREFIX)]
        if plain:
            ids.setdefault(holder.resource, []).extend(plain)
    return [(resource, tuple(dict.fromkeys(of_resource))) for resource, of_resource in ids.items()]


def _add_devices(devices: Any, ids: Iterable[tuple[str, Iterable[str]]]) -> None:  # noqa: ANN401 - a class created at run time
    for resource, of_resource in ids:
        entry = devices.add(resource_name=resource, device_ids=of_resource, not_yet_invented="simulated")
        entry.topology.nodes.add(ID=0)


def _add_claims(claims: Any, holders: Iterable[HolderTruth]) -> None:  # noqa: ANN401 - a class created at run time
    """Add ``dra:<driver>/<pool>/<device>[#<share id>]``; CDI names accumulate within a driver, like in the kubelet."""
    devices_of: dict[tuple[str, str], list[str]] = {}
    for holder in holders:
        devices = [text.removeprefix(DRA_PREFIX) for text in holder.device_ids if text.startswith(DRA_PREFIX)]
        if devices:
            name = holder.resource.removeprefix(DRA_PREFIX) or f"{holder.pod}-gpu"
            devices_of.setdefault((holder.namespace, name), []).extend(devices)
    for (namespace, name), devices in devices_of.items():
        claim = claims.add(claim_name=name, claim_namespace=namespace)
        uid = claim_uid(namespace, name)
        cdi_names: dict[str, list[str]] = {}
        for text in devices:
            place, _, share_id = text.partition("#")
            driver, pool, device = place.split("/", 2)
            cdi_names.setdefault(driver, []).append(f"k8s.{driver}/claim={uid}-{device}")
            entry = claim.claim_resources.add(driver_name=driver, pool_name=pool, device_name=device)
            for cdi_name in cdi_names[driver]:
                entry.cdi_devices.add(name=cdi_name)
            if share_id:
                entry.share_id = share_id


def _many_ids(size: int) -> bytes:
    """Return about ``size`` bytes of a pod with one id per MiB."""
    answer: Any = _MESSAGES["ListPodResourcesResponse"]()
    pod = answer.pod_resources.add(namespace="kube-system", name="simulated-many-ids")
    ids = [f"GPU-00000000-0000-4000-8000-000000000000-memory-{number:08d}" for number in range(size // 59 + 1)]
    pod.containers.add(name="main").devices.add(resource_name="volcano.sh/vgpu-memory", device_ids=ids)
    return bytes(answer.SerializeToString())
