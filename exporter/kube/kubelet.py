"""Polls the kubelet's pod-resources API over its unix socket."""

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from google.protobuf.message import DecodeError, Message
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.exceptions import ProtocolError

from exporter.attribution.device_ids import GPU_DRA_DRIVER, is_per_unit, named_devices, significant_ids
from exporter.attribution.pod_lifecycle import PodName
from exporter.errors import AttributionError
from exporter.model.attribution import Allocations, ClaimedDevice, ContainerAllocation, DeviceIds

SERVICE = "v1.PodResourcesLister"
LIST_METHOD = f"/{SERVICE}/List"
ALLOCATABLE_METHOD = f"/{SERVICE}/GetAllocatableResources"

READ_SCHEMA: Mapping[str, str] = {
    "ContainerDevices": "resource_name 1 string, device_ids 2 *string",
    "CDIDevice": "name 1 string",
    "ClaimResource": (
        "cdi_devices 1 *CDIDevice, driver_name 2 string, pool_name 3 string, device_name 4 string, share_id 5 string"
    ),
    "DynamicResource": "claim_name 2 string, claim_namespace 3 string, claim_resources 4 *ClaimResource",
    "ContainerResources": "name 1 string, devices 2 *ContainerDevices, dynamic_resources 5 *DynamicResource",
    "PodResources": "name 1 string, namespace 2 string, containers 3 *ContainerResources",
    "ListPodResourcesResponse": "pod_resources 1 *PodResources",
    "AllocatableResourcesResponse": "devices 1 *ContainerDevices",
}

_SCALARS = {
    "string": FieldDescriptorProto.TYPE_STRING,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
}


def build_messages(schema: Mapping[str, str] = READ_SCHEMA) -> Mapping[str, type[Message]]:
    """Create one message class per entry of a schema, in a separate descriptor pool.

    Args:
        schema: Fields by message name, in the notation of this module.

    Returns:
        Classes by message name.
    """
    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package="v1", syntax="proto3")
    for name, fields in schema.items():
        message = file.message_type.add(name=name)
        for spec in filter(None, fields.split(", ")):
            field, number, kind = spec.split()
            bare = kind.lstrip("*")
            message.field.add(
                name=field,
                number=int(number),
                label=FieldDescriptorProto.LABEL_OPTIONAL if kind == bare else FieldDescriptorProto.LABEL_REPEATED,
                type=FieldDescriptorProto.TYPE_MESSAGE if bare in schema else _SCALARS[bare],
                type_name=f".v1.{bare}" if bare in schema else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v1.{name}")) for name in schema}


LONGEST_PATH_BYTES = 107
FIX_PATH = "set --kubelet-socket to <kubelet root>/pod-resources/kubelet.sock"


def _unreachable(path: str, error: Exception, deadline_seconds: float) -> AttributionError:
    """Return the error for a failed call to the kubelet's socket, with its fix."""
    found = AttributionError("bad_path", f"kubelet socket {path!r}: {error}; {FIX_PATH}")  # a file in the path, a NUL
    match error:
        case TimeoutError():
            text = f"kubelet accepts on {path} but did not answer within {deadline_seconds:g} s; see its log"
            found = AttributionError("deadline", text)
        case OSError() if (length := len(os.fsencode(path))) > LONGEST_PATH_BYTES:
            text = f"kubelet socket {path}: {length} bytes; allowed: {LONGEST_PATH_BYTES}; {FIX_PATH}"
            found = AttributionError("bad_path", text)
        case FileNotFoundError() if Path(path).parent.is_dir():
            found = AttributionError("no_socket", f"no kubelet socket at {path}: start the kubelet, or {FIX_PATH}")
        case FileNotFoundError():
            fix = f"mount the directory, never the socket file, and {FIX_PATH}"
            found = AttributionError("no_socket", f"no directory for the kubelet socket {path}: {fix}")
        case PermissionError():
            fix = "run as user 0 (no capability is needed), and under SELinux as a type that may connect to the kubelet"
            found = AttributionError("no_permission", f"no permission for {path}: {fix}")
        case ConnectionRefusedError() if not Path(path).is_socket():
            found = AttributionError("not_a_socket", f"{path} is not a socket; {FIX_PATH}")
        case ConnectionRefusedError():
            cause = "the kubelet is stopped, or its socket file was mounted instead of the directory and is left over"
            found = AttributionError("refused", f"no process listens on {path}: {cause}")
        case ConnectionError() | EOFError() | ProtocolError():
            broken = "accepts connections and closes them: the kubelet is restarting, or this is not its socket"
            found = AttributionError("unavailable", f"{path} {broken}; {FIX_PATH}")
        case OSError(errno=errno.EAGAIN | errno.ENOTCONN):  # asyncio takes the refusal of a full queue for a connection
            found = AttributionError("deadline", f"{path} accepts no more connections: the kubelet hangs; see its log")
    return found


def identity(path: str) -> tuple[int, int] | None:
    """Return a value that differs between two sockets created at one path; ``None`` without a socket.

    It is not only the inode number, which the next socket can have too.
    """
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_ctime_ns


DEFAULT_RESOURCES = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-*", "volcano.sh/vgpu-number")
DEADLINE_SECONDS = 2.0
RECEIVE_LIMIT_BYTES = 32 << 20
_READ_BYTES = 256 << 10
_TOO_LARGE = (
    f"kubelet's answer on {{path}} is over the limit of {RECEIVE_LIMIT_BYTES >> 20} MiB: a device plugin of this node"
    " lists far too many ids (one per MiB?); make its unit larger"
)
_MESSAGES = build_messages()


def own_pod(environ: Mapping[str, str] = os.environ) -> PodName | None:
    """Return the pod of this process, from variables that its manifest sets; ``None`` outside a pod."""
    namespace, name = environ.get("POD_NAMESPACE", ""), environ.get("POD_NAME", "")
    return (namespace, name) if namespace and name else None


class Completeness:
    """Checks that an answer is complete, because a starting kubelet answers before it knows its pods.

    Inside a pod, the agent's own pod must be listed. Outside a pod, an empty answer is valid only if no earlier answer
    had pods, or if the kubelet has not restarted since then. An answer with only static pods counts as empty, because
    the kubelet reads those from files before the API server answers. After a restart, a kubelet may list some of its
    pods before it knows all. So a missing holder has ended only if two consecutive answers of that kubelet lack it.

    Args:
        canary: Namespace and name of the agent's own pod; ``None`` outside a pod.
        node_name: Name of the node, the suffix of names of static pods; empty if unknown.
    """

    def __init__(self, canary: PodName | None, node_name: str = "") -> None:
        self._canary = canary
        self._static_ending = f"-{node_name.lower()}" if node_name else ""
        self._had_pods = False
        self._restarted = False
        self._socket: object = None
        self._holders: frozenset[tuple[str, str, str]] = frozenset()
        self._missing_once: frozenset[tuple[str, str, str]] = frozenset()
        self._missing_from: object = None
        """Socket of the answer that lacked the missing holders; ``None`` if unknown."""

    def check(self, pods: AbstractSet[PodName], holders: frozenset[tuple[str, str, str]], socket: object) -> None:
        """Accept or refuse an answer.

        Args:
            pods: All pods of the answer.
            holders: (namespace, pod, container) of the containers with devices.
            socket: Identity of the socket file, which changes with each start of the kubelet; ``None`` if it is
                unknown, or has changed during the call.

        Raises:
            AttributionError: ``kubelet_starting``: the answer is incomplete and must not be used.
        """
        self._restarted = self._restarted or socket is None or self._socket not in {None, socket}
        self._socket = socket or self._socket
        if self._missing_from not in {None, socket}:
            self._missing_once = frozenset()
        static = {one for one in pods if self._static_ending and one[1].endswith(self._static_ending)}
        if problem := self._incomplete(pods, len(static)):
            self._restarted, self._missing_once = True, frozenset()
            raise AttributionError("kubelet_starting", problem)
        missing = self._holders - holders
        if self._restarted and not missing <= self._missing_once:
            self._missing_once, self._missing_from = missing, socket
            namespace, pod, container = min(missing)
            raise AttributionError(
                "kubelet_starting",
                f"kubelet has restarted and does not list {len(missing)} of {len(self._holders)} holders any more"
                f" (container {container} of pod {namespace}/{pod}); the next answer confirms it, or lists them again",
            )
        # The answer may be from the former kubelet; the next answer is then the first of the new kubelet.
        self._restarted = socket is None
        self._had_pods, self._missing_once, self._holders = len(pods) > len(static), frozenset(), holders

    def _incomplete(self, pods: AbstractSet[PodName], static: int) -> str:
        """Return a message on the missing pods of an answer; empty if it is complete."""
        if self._canary and self._canary not in pods:
            return (
                f"kubelet lists {len(pods)} pods without {'/'.join(self._canary)}, the pod of this agent: it has just"
                " started and does not know its pods yet; if this lasts, set POD_NAMESPACE and POD_NAME of the agent"
                " from metadata.namespace and metadata.name"
            )
        if not self._canary and len(pods) == static and self._had_pods and self._restarted:
            return (
                f"kubelet has restarted, lists {'only static pods' if static else 'no pod'} and listed others"
                " before: it does not know its pods yet; if this node is to run no pods any more, restart the agent"
            )
        return ""


_STATUSES = (
    "OK CANCELLED UNKNOWN INVALID_ARGUMENT DEADLINE_EXCEEDED NOT_FOUND ALREADY_EXISTS PERMISSION_DENIED"
    " RESOURCE_EXHAUSTED FAILED_PRECONDITION ABORTED OUT_OF_RANGE UNIMPLEMENTED INTERNAL UNAVAILABLE DATA_LOSS"
    " UNAUTHENTICATED"
)
"""Names of gRPC's status codes, by number. Source: doc/statuscodes.md of the gRPC project."""


async def _unary_call(path: str, method: str) -> bytes:
    """Make one unary gRPC call with an empty request, on its own connection.

    A new connection per call has no state from an outage, and needs no threads. The gRPC library would keep up to 16
    threads that wake up 30 times a second. It also terminates the process if the node has no free process id.

    Returns:
        The encoded answer.

    Raises:
        OSError: The connection to the socket failed.
        AttributionError: The server refused the call, or its answer is over ``RECEIVE_LIMIT_BYTES``.
        ProtocolError, EOFError: The server does not use gRPC, or closed the connection during the answer.
    """
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        connection = H2Connection(H2Configuration(header_encoding="utf-8"))
        connection.initiate_connection()
        names = (":method", "POST"), (":scheme", "http"), (":authority", "localhost"), (":path", method)
        connection.send_headers(1, [*names, ("te", "trailers"), ("content-type", "application/grpc")])
        connection.send_data(1, b"\0\0\0\0\0", end_stream=True)  # not compressed, length 0
        headers: dict[str, str] = {}
        answer = bytearray()
        while True:
            writer.write(connection.data_to_send())
            if not (received := await reader.read(_READ_BYTES)):
                raise EOFError
            for event in connection.receive_data(received):
                match event:
                    case ResponseReceived() | TrailersReceived():
                        headers.update({str(name): str(value) for name, value in event.headers or ()})
                    case DataReceived():
                        answer += event.data or b""
                        connection.acknowledge_received_data(event.flow_controlled_length or 0, 1)
                        if max(len(answer), int.from_bytes(answer[1:5])) > RECEIVE_LIMIT_BYTES:
                            raise AttributionError("too_large", _TOO_LARGE.format(path=path))
                    case StreamReset():
                        raise EOFError
                    case StreamEnded():
                        return _message(path, headers, bytes(answer))
    finally:
        writer.transport.abort()


def _message(path: str, headers: Mapping[str, str], answer: bytes) -> bytes:
    """Return the message of a complete answer; raise the error that its status reports."""
    code = headers.get("grpc-status", "")
    if not code.isdecimal():
        raise ProtocolError(f"no status of a call, HTTP {headers.get(':status')}")
    status = dict(enumerate(_STATUSES.split())).get(int(code), "UNKNOWN")
    details = " ".join(unquote(headers.get("grpc-message", "")).split())[:200]
    match status:
        case "OK":
            return answer[5:]
        case "RESOURCE_EXHAUSTED" if "rate limit" in details.lower():
            raise AttributionError(
                "rate_limited",
                f"kubelet refused a call on {path}: its limit of 100 calls/s is used up by all clients of the socket"
                " together; find the one that polls too often (CNI, topology or other GPU exporters)",
            )
        case "UNIMPLEMENTED":
            missing = f"server on {path} has no {SERVICE} with this method; a kubelet of 1.23 or newer has"
            raise AttributionError("unimplemented", missing)
        case "UNKNOWN" if "disabled" in details.lower():
            raise AttributionError("unimplemented", f"kubelet has disabled this method: {details}")
        case _:
            raise AttributionError("kubelet_error", f"kubelet answered {status} on {path}: {details}")


class KubeletClient:
    """Reads the holders of each device from the kubelet; keeps no connection.

    Args:
        socket_path: Path of the kubelet's socket, which need not exist yet.
        resources: Glob patterns of GPU resource names. Of other resources, only ids that are UUIDs of GPUs or MIG
            instances are kept. Containers without a device are dropped.
        deadline_seconds: Deadline of each call.
        canary: Namespace and name of the agent's own pod, which complete answers list; ``None`` outside a pod.
        node_name: As for ``Completeness``.
    """

    def __init__(
        self,
        socket_path: str,
        *,
        resources: Sequence[str] = DEFAULT_RESOURCES,
        deadline_seconds: float = DEADLINE_SECONDS,
        canary: PodName | None = None,
        node_name: str = "",
    ) -> None:
        self._completeness = Completeness(canary, node_name)
        self._path = os.path.abspath(socket_path)  # noqa: PTH100 - resolve() would follow links that may change later
        self._resources = tuple(resources)
        self._deadline_seconds = deadline_seconds
        self._allocatable: tuple[DeviceIds, ...] | None = None
        self.allocatable_error: AttributionError | None = None
        """Error for which the last ``fetch`` repeated the advertised devices of an earlier answer; ``None`` without."""

    async def fetch(self, now: float) -> Allocations:
        """Return the containers with their devices, and the advertised devices.

        Args:
            now: Unix time, for the timestamp of the answer.

        Raises:
            AttributionError: The list cannot be read, or is incomplete. If only the advertised devices cannot be read,
                those of an earlier answer are repeated; for a kubelet without that call, ``allocatable`` is ``None``.
        """
        socket = identity(self._path)
        listed = await self._call(LIST_METHOD, "ListPodResourcesResponse")
        found = [
            ContainerAllocation(
                namespace=pod.namespace,
                pod=pod.name,
                container=one.name,
                devices=self._devices(one.devices),
                claims=_claims(one.dynamic_resources),
            )
            for pod in listed.pod_resources
            for one in pod.containers
        ]
        containers = tuple(one for one in found if one.devices or one.claims)
        others = tuple((one.namespace, one.pod, one.container) for one in found if not (one.devices or one.claims))
        self._completeness.check(
            {(pod.namespace, pod.name) for pod in listed.pod_resources},
            frozenset((one.namespace, one.pod, one.container) for one in containers),
            socket if socket == identity(self._path) else None,
        )
        self.allocatable_error = None
        try:
            answer = await self._call(ALLOCATABLE_METHOD, "AllocatableResourcesResponse")
            self._allocatable = self._devices(answer.devices)
        except AttributionError as error:
            if error.reason == "unimplemented":
                self._allocatable = None
            else:
                self.allocatable_error = error
        return Allocations(
            answered_at_seconds=now, containers=containers, allocatable=self._allocatable, other_containers=others
        )

    async def _call(self, method: str, answer: str) -> Any:  # noqa: ANN401 - classes made at run time have no static type
        try:
            raw = await self._once(method)
        except (OSError, EOFError, ProtocolError, ValueError) as error:
            raise _unreachable(self._path, error, self._deadline_seconds) from error
        try:
            return _MESSAGES[answer].FromString(raw)
        except DecodeError as error:
            raise AttributionError(
                "garbage",
                f"kubelet answered {len(raw)} bytes on {self._path} that are not a pod-resources v1 message;"
                f" {FIX_PATH} of a kubelet of 1.20 or newer",
            ) from error

    async def _once(self, method: str) -> bytes:
        async with asyncio.timeout(self._deadline_seconds):
            return await _unary_call(self._path, method)

    def _devices(self, listed: Any) -> tuple[DeviceIds, ...]:  # noqa: ANN401 - as _call
        by_resource: dict[str, list[str]] = {}  # the kubelet lists a resource once per NUMA node
        for entry in listed:
            name, ids = entry.resource_name, entry.device_ids
            is_gpu = any(fnmatchcase(name, pattern) for pattern in self._resources)
            if kept := ids if is_gpu else named_devices(name, ids):
                by_resource.setdefault(name, []).extend(kept)
        return tuple(
            # Redundant ids are dropped: there can be thousands.
            DeviceIds(resource=name, ids=significant_ids(name, ids) if is_per_unit(name) else tuple(ids))
            for name, ids in by_resource.items()
            if ids
        )


class KubeletPoller:
    """Polls the kubelet, and stores its last valid answer and the current problem.

    The interval is the same after failures: the agent must find an absent kubelet soon, and a failing kubelet gets no
    additional calls.

    Args:
        client: Client of the kubelet.
        interval_seconds: Interval of polls.
        clock: Returns the current Unix time.
    """

    def __init__(self, client: KubeletClient, *, interval_seconds: float, clock: Callable[[], float]) -> None:
        self._client = client
        self._interval_seconds = interval_seconds
        self._clock = clock
        self.errors: Counter[str] = Counter()
        """Failed polls since the start, by reason; ``allocatable_<reason>`` if only the advertised devices failed."""
        self.latest: Allocations | None = None
        self.problem = ""

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._interval_seconds)

    async def poll(self) -> None:
        """Poll once."""
        try:
            self.latest = await self._client.fetch(self._clock())
        except AttributionError as error:
            self.errors[error.reason] += 1
            self.problem = str(error)
            return
        self.problem = ""
        if missed := self._client.allocatable_error:
            self.errors[f"allocatable_{missed.reason}"] += 1
            self.problem = f"advertised devices could not be read again: {missed}"


def _claims(dynamic: Any) -> tuple[ClaimedDevice, ...]:  # noqa: ANN401 - as KubeletClient._call
    return tuple(
        ClaimedDevice(
            claim_name=claim.claim_name,
            claim_namespace=claim.claim_namespace,
            driver=device.driver_name,
            pool=device.pool_name,
            device=device.device_name,
            share_id=device.share_id or None,
            cdi_names=tuple(cdi.name for cdi in device.cdi_devices),
        )
        for claim in dynamic
        for device in claim.claim_resources
        if device.driver_name == GPU_DRA_DRIVER
    )
