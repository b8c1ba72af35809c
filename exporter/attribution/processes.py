"""Finds the pods of the processes that a driver lists, only from data of the node.

An empty result and ``None`` differ throughout. An empty string means that the lookup succeeded without a pod: the
process is unattributed. ``None`` means that the lookup failed: the holder is unknown. Neither leads to a wrong owner.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from exporter.model.attribution import Attribution, Holder, Unresolved
from exporter.model.devices import ProcessUse, Reading
from exporter.model.fields import Field

# The pattern requires "pod<uid>" but not "kubepods", because a private cgroup namespace hides that prefix.
_POD = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=\.slice|[/:]|$)", re.ASCII
)


def pod_of(text: str) -> str | None:
    r"""Find the pod of a process.

    The last pod of a path counts, because the path of a kubelet within a container starts with an outer pod. On cgroup
    v1, any matching line is enough.

    Args:
        text: Full text of the cgroup file; systemd's escape ``\x2d`` is understood.

    Returns:
        Pod UID (with dashes; 32 digits without dashes for a static pod). ``None`` for a process outside every pod, or
        with a path without the UID of its pod.
    """
    paths = (line.split(":", 2)[-1].replace(r"\x2d", "-") for line in text.splitlines())
    pods = next(filter(None, map(_POD.findall, paths)), None)
    return pods[-1].replace("_", "-") if pods else None


Found = TypeVar("Found")

_MOST_BYTES = 1 << 16
"""Maximum size of the files of a process that are read here; the kernel returns such a file in one read."""
_MANY = 2048
"""Number of cached processes; more than the GPUs of a node have at a time."""
# After the last ")" of /proc/<pid>/stat comes field 3, so field 22 is the twentieth word there.
_START_TIME_WORD = 19


def content(path: str) -> str:
    """Read a file; invalid UTF-8 is replaced.

    Raises:
        OSError: The file cannot be read, or the process has ended.
    """
    # Called for every process of every sample; needs half of the system calls of a file object.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_BYTES).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def name_and_start(directory: str) -> tuple[str, str | None]:
    """Read the name and the start time of a process; the time, in clock ticks, distinguishes uses of the same pid.

    Args:
        directory: ``/proc/<pid>``.

    Returns:
        An empty name and ``None`` if the process is not visible.
    """
    try:
        before, _, after = content(f"{directory}/stat").rpartition(")")
    except OSError:
        return "", None
    words = after.split()
    return before.partition("(")[2], words[_START_TIME_WORD] if len(words) > _START_TIME_WORD else None


def sees_host_processes(proc_root: Path) -> bool:
    """Return whether ``proc_root`` is that of the host: only there, process 2 is the kernel's thread daemon."""
    try:
        return content(f"{proc_root}/2/comm").strip() == "kthreadd"
    except OSError:
        return False


class Remembered(Generic[Found]):
    """Caches data of processes by pid and start time, because pids are reused.

    An entry is dropped after lookups of thousands of other processes, since its process has ended by then.

    Args:
        proc_root: The host's ``/proc``, or its mount point.
        read: Returns the data to cache, from the directory and the name of a process; may raise OSError.
    """

    def __init__(self, proc_root: Path, read: Callable[[str, str], Found]) -> None:
        self._proc_root = str(proc_root)
        self._read = read
        self._known: dict[int, tuple[str, Found]] = {}
        """Start time and data by pid, in the order of the last lookups."""

    def look(self, pid: int) -> Found | None:
        """Look up a process.

        Args:
            pid: Process id in the PID namespace of ``proc_root``.

        Returns:
            The data of the process. For an ended process, its last data, because samples of the driver are from before
            its end. ``None`` if it is not visible: another PID namespace, or it ended before its first lookup.
        """
        directory = f"{self._proc_root}/{pid}"
        name, started = name_and_start(directory)
        known = self._known.get(pid)
        if known is None or started not in {None, known[0]}:
            if started is None:
                return None
            try:
                known = started, self._read(directory, name)
            except OSError:
                return None
        self.forget(pid)
        self._known[pid] = known
        if len(self._known) > _MANY:
            del self._known[next(iter(self._known))]
        return known[1]

    def lives(self, pid: int) -> bool:
        """Return whether the process of the last lookup of a pid still exists."""
        known = self._known.get(pid)
        _, started = name_and_start(f"{self._proc_root}/{pid}")
        return started is not None and (known is None or known[0] == started)

    def forget(self, pid: int) -> None:
        """Read a process again at its next lookup, because it may be moved to another cgroup."""
        self._known.pop(pid, None)


_POD_LOG = re.compile(r"(?P<namespace>[^_]+)_(?P<pod>[^_]+)_(?P<uid>[^_]+)")

MPS_SERVER = "nvidia-cuda-mps"
"""Name of an MPS server's process, cut to the kernel's limit of 15 characters."""
UNLISTED_USE = "unlisted_use"
"""Reason of a device that a process in a pod uses, although the kubelet lists no holder."""
PodName = tuple[str, str]
"""Namespace and name."""
NO_POD = ""
NO_NAME: PodName = ("", "")


HIDDEN_PROCESSES_MEMORY_MIB = 300
"""Memory above which processes must exist; a driver needs less for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Processes of one device that belong to the same holders."""

    holders: tuple[Holder, ...]
    """Possible holders: the containers of one pod, or all candidates; empty if the processes have no holder."""
    processes: tuple[ProcessUse, ...]
    known: bool = True
    """Whether the pod is known. If not, the processes may also have no holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Processes of one device by holder; each process is in at most one bucket."""

    buckets: tuple[Bucket, ...] = ()
    hidden: bool = False
    """Whether the driver does not list some running processes; then the memory by process is unknown."""
    by_mps: bool = False
    """Whether an MPS server works for several processes; then samples do not identify their process."""

    @property
    def unattributed(self) -> tuple[ProcessUse, ...]:
        """Processes without a holder: of the host, ended, or of pods that do not hold the device."""
        return tuple(process for bucket in self.buckets if not bucket.holders for process in bucket.processes)


def hides_processes(processes: Sequence[ProcessUse], values: Mapping[Field, int | float]) -> bool:
    """Return whether the list lacks running processes, for example in a PID namespace other than the host's.

    This is the case if no listed process runs while more memory is in use than the driver needs.

    Args:
        processes: Processes that the driver lists and samples on a device.
        values: The device's values.
    """
    running = any(not process.ended for process in processes)
    return not running and values.get(Field.FB_USED, 0) > HIDDEN_PROCESSES_MEMORY_MIB


class ProcessLookup(ABC):
    """Finds the holder of a process: a pod, or a job or user in its place.

    Args:
        proc_root: The host's ``/proc``, or its mount point.
    """

    def __init__(self, proc_root: Path) -> None:
        self._proc_root = str(proc_root)

    @abstractmethod
    def pod_uid(self, pid: int) -> str | None:
        """Look up the pod of a process.

        Args:
            pid: Process id in the PID namespace of ``proc_root``.

        Returns:
            UID of the pod; ``NO_POD`` for a process outside every pod; ``None`` if the process is not visible (another
            PID namespace, or it ended before its first lookup). An ended process keeps the pod of an earlier lookup.
        """

    @abstractmethod
    def name_of(self, uid: str) -> PodName | None:
        """Return namespace and name of a pod; ``NO_NAME`` if no such pod exists, ``None`` if unknown."""

    @abstractmethod
    def uid_of(self, namespace: str, pod: str) -> str | None:
        """Return the UID of a pod; ``None`` if unknown."""

    def command_of(self, pid: int) -> str:
        """Read the name of a process, at most 15 characters; empty if the process is not visible."""
        return name_and_start(f"{self._proc_root}/{pid}")[0]


class PodLookup(ProcessLookup):
    """Finds pods of processes by cgroup, and names of pods by the kubelet's log directories, without the API.

    Args:
        proc_root: The host's ``/proc``, or its mount point.
        pod_log_root: The host's ``/var/log/pods``, or its mount point; contains ``<namespace>_<pod>_<uid>``.
    """

    def __init__(self, proc_root: Path, pod_log_root: Path) -> None:
        super().__init__(proc_root)
        self._pods = Remembered(proc_root, _pod_uid)
        self._log_root = pod_log_root
        self._changed_ns: int | None = None
        self._names: dict[str, PodName] = {}
        self._uids: dict[PodName, list[str]] = {}
        self._missed: set[str] = set()

    def pod_uid(self, pid: int) -> str | None:
        """Look up the pod of a process."""
        uid = self._pods.look(pid)
        if uid == NO_POD:
            self._pods.forget(pid)  # a runtime may still move it into its pod's cgroup
        return uid

    def name_of(self, uid: str) -> PodName | None:
        """Look up the name of a pod.

        Args:
            uid: UID as written in the pod's cgroup path.

        Returns:
            Namespace and pod name. ``NO_NAME`` if the directory is readable and has no such pod. ``None`` if it cannot
            be read, or if two pods with this name exist, of which only one can be alive.
        """
        if not self._follow(uid):
            return None
        name = self._names.get(uid, NO_NAME)
        return name if name == NO_NAME or len(self._uids[name]) == 1 else None

    def uid_of(self, namespace: str, pod: str) -> str | None:
        """Return the UID of a pod, which distinguishes a recreated pod (StatefulSet) from its predecessor.

        Returns:
            The UID; ``None`` without a directory of that name, or with several.
        """
        uids = self._uids.get((namespace, pod), []) if self._follow() else []
        return uids[0] if len(uids) == 1 else None

    def _follow(self, uid: str = "") -> bool:
        """Read the log directory after a change, or for a new unknown UID; return whether it can be read."""
        try:
            changed_ns = self._log_root.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                self._missed.clear()
                self._read()
            if uid and uid not in self._names and uid not in self._missed:
                self._read()  # a directory created just after the last scan may not change the time of change
                self._missed.add(uid)
        except OSError:
            self._changed_ns = None
            return False
        self._changed_ns = changed_ns
        return True

    def _read(self) -> None:
        names = [match for path in self._log_root.iterdir() if (match := _POD_LOG.fullmatch(path.name))]
        self._names = {match["uid"]: (match["namespace"], match["pod"]) for match in names}
        self._uids = {}
        for uid, name in self._names.items():
            self._uids.setdefault(name, []).append(uid)


def _pod_uid(directory: str, _name: str) -> str:
    return pod_of(content(f"{directory}/cgroup")) or NO_POD


def match(
    holders: Sequence[Holder], processes: Sequence[ProcessUse], lookup: ProcessLookup, *, hidden: bool = False
) -> Matched:
    """Divide the processes of one device among its holders.

    A process is assigned to a pod only if the pod's UID or name proves it, never by elimination. An unmatched process
    does not affect the others.

    Args:
        holders: Holders of the device.
        processes: Processes that the driver lists on the device.
        lookup: Finds pods by process and by UID.
        hidden: Result of ``hides_processes``.

    Returns:
        The processes by holder, without ended processes of pods that no longer hold the device. With them, the next
        pod on the device would look idle until the next samples.
    """
    uids = [lookup.pod_uid(process.pid) for process in processes]
    blind = all(uid is None for uid in uids)
    by_pod: dict[str | None, list[ProcessUse]] = {}
    for process, uid in zip(processes, uids, strict=True):
        # A busy process that has ended can belong to any holder, for example a short process of a launcher.
        is_holderless = uid is None and not blind and not process.busiest_ratio
        by_pod.setdefault(NO_POD if is_holderless else uid, []).append(process)
    buckets: list[Bucket] = []
    unattributed: list[ProcessUse] = []
    for uid, found in by_pod.items():
        owners, known = _holders_of(uid, holders, lookup)
        if owners:
            buckets.append(Bucket(holders=owners, processes=tuple(found), known=known))
        else:
            unattributed += [one for one in found if not (holders and one.ended and uid)]
    if unattributed:
        buckets.append(Bucket(holders=(), processes=tuple(unattributed)))
    # Before Volta, the driver lists only the busy MPS server, which has no holder.
    servers = (one for one in unattributed if one.busiest_ratio and lookup.command_of(one.pid) == MPS_SERVER)
    by_mps = any(process.mps for process in processes) or any(servers)
    return Matched(buckets=tuple(buckets), hidden=hidden, by_mps=by_mps)


def _holders_of(uid: str | None, holders: Sequence[Holder], lookup: ProcessLookup) -> tuple[tuple[Holder, ...], bool]:
    """Return the possible holders of a pod's processes, and whether the pod is known."""
    if uid is None:
        return tuple(holders), False
    if uid == NO_POD:
        return (), True
    by_uid = tuple(holder for holder in holders if holder.pod_uid == uid)
    # A holder with another UID does not match by name, because the pod may be a new one with that name.
    nameless = () if by_uid else tuple(holder for holder in holders if holder.pod_uid is None)
    if not nameless:
        return by_uid, True
    name = lookup.name_of(uid)
    if name is None:
        return nameless, False
    return tuple(holder for holder in nameless if (holder.namespace, holder.pod) == name), True


def with_unlisted_uses(attribution: Attribution, reading: Reading, lookup: ProcessLookup) -> Attribution:
    """Return an attribution with unresolved entries for pods that use a device for which no holder is listed.

    The kubelet does not list ordinary init containers, but their devices stay allocated until their pod ends.

    Args:
        attribution: The holders of every device that the kubelet lists.
        reading: The processes of every device.
        lookup: Finds the pods of processes.
    """
    unlisted = [
        _unlisted(device.uuid, uid, lookup)
        for gpu in reading.gpus
        for device in gpu.devices
        if device.processes and not attribution.holders.keys() & {device.uuid, gpu.uuid}
        for uid in _pods_among(device.processes, lookup)
    ]
    return replace(attribution, unresolved=(*attribution.unresolved, *unlisted)) if unlisted else attribution


def _pods_among(processes: Sequence[ProcessUse], lookup: ProcessLookup) -> dict[str, None]:
    """Return the UIDs of the pods with a running process, each once."""
    uids = {process.pid: lookup.pod_uid(process.pid) for process in processes if not process.ended}
    # An MPS server works for other processes and holds nothing.
    return {uid: None for pid, uid in uids.items() if uid and lookup.command_of(pid) != MPS_SERVER}


def _unlisted(device: str, uid: str, lookup: ProcessLookup) -> Unresolved:
    namespace, pod = lookup.name_of(uid) or NO_NAME
    return Unresolved(
        namespace=namespace,
        pod=pod,
        container="",
        resource="",
        device_id=device,
        reason=UNLISTED_USE,
        devices=(device,),
    )
