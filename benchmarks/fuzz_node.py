"""Targets of what a node tells: the kubelet's messages, files of processes, device ids, the child's lines, DCGM."""

import ctypes
import re
from collections.abc import Callable, Sequence

from fuzz_page import NOW, gpus, lived, node, reading
from fuzz_targets import Scratch, require, require_finite, target

from exporter.agent.history import SourceRecord
from exporter.attribution import device_ids, processes
from exporter.attribution.device_ids import IdKind
from exporter.attribution.host import UserNames, host_process
from exporter.attribution.processes import PidResolver, PodNames
from exporter.attribution.slurm import SlurmJobs
from exporter.errors import AttributionError, SourceError
from exporter.gpu import wire
from exporter.gpu.dcgm.library import FieldValueV1
from exporter.gpu.dcgm.readings import RecordBuffer, TimestampMovement
from exporter.kube.kubelet import LIST_METHOD, KubeletClient
from exporter.model import Allocations, ContainerAllocation, DeviceIds, Reading

_POD = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PARTS = b"\n--\n"
"""Between the files of one input."""
_PLACED = ContainerAllocation(
    namespace="team-a",
    pod="trainer-0",
    container="main",
    devices=(DeviceIds(resource="nvidia.com/gpu", ids=(gpus()[0].gpu.uuid,)),),
)


class _FedKubelet(KubeletClient):
    """The client with answers put in where the socket gives them."""

    def __init__(self, listed: bytes, allocatable: bytes | None) -> None:
        super().__init__("/run/kubelet.sock")
        self._listed = listed
        self._allocatable_answer = allocatable

    async def _once(self, method: str) -> bytes:
        if method == LIST_METHOD:
            return self._listed
        if self._allocatable_answer is None:
            raise AttributionError("unimplemented", "not there")
        return self._allocatable_answer


def _asked(client: KubeletClient) -> Allocations:
    """Run what never waits."""
    try:
        client.fetch(NOW).send(None)
    except StopIteration as end:
        answer: Allocations = end.value
        return answer
    raise AssertionError("the client waits")


@target("kubelet", "list", AttributionError)
def _kubelet_list(data: bytes) -> None:
    lived(*node(told=_asked(_FedKubelet(data, None))))


@target("kubelet", "allocatable", AttributionError)
def _kubelet_allocatable(data: bytes) -> None:
    client = _FedKubelet(b"", data)
    answer = _asked(client)
    require(client.allocatable_error is None or answer.allocatable is None, "an error and an answer")
    told = Allocations(answered_at_seconds=NOW, containers=(_PLACED,), allocatable=answer.allocatable)
    lived(*node(told=told))


@target("process", "cgroup")
def _cgroup(data: bytes) -> None:
    found = processes.pod_of(data.decode("utf-8", "replace"))
    if found is not None:
        require(_POD.fullmatch(found[0]) is not None, f"the pod {found[0]!r}")
        require(found[1] is None or re.fullmatch("[0-9a-f]{64}", found[1]) is not None, f"the container {found[1]!r}")


@target("process", "proc")
def _proc(data: bytes) -> None:
    """``/proc/7/{stat,cgroup,status}`` and the host's passwd."""
    stat, groups, status, passwd = [*data.split(_PARTS, 3), b"", b"", b""][:4]
    root = Scratch.folder() / "proc"
    (root / "7").mkdir(parents=True, exist_ok=True)
    (root / "1" / "root" / "etc").mkdir(parents=True, exist_ok=True)
    for name, content in (("stat", stat), ("cgroup", groups), ("status", status)):
        (root / "7" / name).write_bytes(content)
    (root / "1" / "root" / "etc" / "passwd").write_bytes(passwd)
    uid = PidResolver(root).pod_uid(7)
    require(not uid or _POD.fullmatch(uid) is not None, f"the pod {uid!r}")
    seen = processes.Remembered(root, host_process).look(7)
    require(seen is None or seen.user_id is None or 0 <= seen.user_id < 10**10, "no user's number")
    users = UserNames(root)
    users.follow()
    require(bool(users.name_of(0)), "a user without a name")
    jobs = SlurmJobs(mapping_dir=None, proc_root=root)
    key = jobs.pod_uid(7)
    require(not key or key.startswith("job-"), f"the job {key!r}")
    jobs.observe(reading(0.0, gpus()), NOW)


@target("process", "mapping")
def _mapping(data: bytes) -> None:
    """A job-mapping directory's files of GPU 0 and of GPU instance 2.1, and a pod's log directory."""
    whole, part, name = [*data.split(_PARTS, 2), b"", b""][:3]
    folder = Scratch.folder() / "jobs"
    folder.mkdir(exist_ok=True)
    (folder / "0").write_bytes(whole)
    (folder / "2.1").write_bytes(part)
    jobs = SlurmJobs(mapping_dir=folder, proc_root=Scratch.folder() / "no-proc")
    jobs.observe(reading(0.0, gpus()), NOW)
    if jobs.latest is not None:
        lived(*node(told=jobs.latest))
    logs = Scratch.folder() / "logs"
    logs.mkdir(exist_ok=True)
    made = logs / (name.replace(b"/", b"").replace(b"\0", b"")[:100].decode("utf-8", "surrogateescape") or "x")
    if made.name in {".", ".."}:
        return
    made.mkdir()
    try:
        names = PodNames(logs)
        names.name_of(made.name.rpartition("_")[2])
        names.uid_of("team-a", "trainer-0")
    finally:
        made.rmdir()


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "replace").split("\n")


@target("ids", "listed", most_bytes=1024)
def _listed(data: bytes) -> None:
    """A resource's name, then ids, a line each."""
    resource, *ids = _lines(data)
    for one in ids:
        parsed = device_ids.parse(resource, one)
        unknown = parsed.kind in {IdKind.UNKNOWN, IdKind.NEEDS_ANNOTATION}
        require(bool(parsed.reason) is unknown, f"{one!r} is {parsed.kind} with the reason {parsed.reason!r}")
        require(parsed.uuid is None or parsed.uuid.isascii(), f"the uuid {parsed.uuid!r}")
    devices = DeviceIds(resource=resource, ids=device_ids.telling(resource, ids))
    container = ContainerAllocation(namespace="team-a", pod="trainer-0", container="main", devices=(devices,))
    _live((container,) if devices.ids else ())


@target("ids", "claimed", most_bytes=512)
def _claimed(data: bytes) -> None:
    """A DRA driver's device names, a line each."""
    for name in _lines(data):
        parsed = device_ids.parse_claimed(device_ids.GPU_DRA_DRIVER, name)
        require(parsed is not None and (parsed.profile or "").isascii(), "no answer")


def _live(containers: Sequence[ContainerAllocation]) -> None:
    told = Allocations(answered_at_seconds=NOW, containers=tuple(containers), allocatable=None)
    lived(*node(told=told))


@target("wire", "line", SourceError)
def _line(data: bytes) -> None:
    message = wire.decode(data)
    again = wire.encode(message)
    require(wire.decode(again) == message, "what was decoded is not what it is encoded to")


@target("wire", "page", SourceError, most_bytes=8192)
def _page(data: bytes) -> None:
    """A line of a child becomes a page."""
    message = wire.decode(data)
    if not isinstance(message, Reading):
        one, source = node()
        source.status = message
        lived(one, source)
        return
    SourceRecord().add(message)
    one, source = node(told=Allocations(answered_at_seconds=NOW, containers=(_PLACED,), allocatable=None))
    lived(one, source, first=message.gpus)


_RECORD = ctypes.sizeof(FieldValueV1)
_HEAD = FieldValueV1.value.offset
_SHORT = _HEAD + 64
"""Of an input's record: what is before the value, and as much of it as matters."""


@target("dcgm", "records", most_bytes=8 * _SHORT)
def _records(data: bytes) -> None:
    """Records as the library hands them to the callback, as values and as events."""
    shorts = [data[start : start + _SHORT].ljust(_SHORT, b"\0") for start in range(0, len(data), _SHORT)][:8]
    memory = ctypes.create_string_buffer(b"".join(short.ljust(_RECORD, b"\0") for short in shorts), _RECORD * 8)
    counted: list[str] = []
    inbox = RecordBuffer(counted.append)

    def call(callback: Callable[..., int]) -> int:
        return callback(1, 0, ctypes.addressof(memory), len(shorts), None)

    _, values, _ = inbox.values(call, TimestampMovement(3.0, counted.append), 0.0)
    for value in values.get((1, 0), {}).values():
        if isinstance(value, str):
            require(value.strip() == value != "" and bool(value.encode()), f"the text {value!r}")
        else:
            require_finite((value,), "a value")
    inbox.events(call)
