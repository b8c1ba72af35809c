"""Maps the process ids that a driver lists to the pods that hold the device, from data of the node alone.

Two results are distinct throughout: an empty string means "looked up, and there is none", ``None`` means "could not be
looked up". The first makes a process unattributed, the second leaves its holder open; neither makes a wrong owner.
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

# The pattern needs "pod<uid>" and not "kubepods": a private cgroup namespace hides that prefix.
_POD = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=\.slice|[/:]|$)", re.ASCII
)


def pod_of(text: str) -> str | None:
    r"""Find the pod of a process.

    The last pod of a path counts: a kubelet within a container has an outer one before it. On cgroup v1, any matching
    line is enough.

    Args:
        text: Full text of the cgroup file; systemd's escape ``\x2d`` is understood.

    Returns:
        Pod UID (with dashes; 32 digits without dashes for a static pod). ``None`` for a process outside every pod, or
        with a path that does not name its pod.
    """
    paths = (line.split(":", 2)[-1].replace(r"\x2d", "-") for line in text.splitlines())
    pods = next(filter(None, map(_POD.findall, paths)), None)
    return pods[-1].replace("_", "-") if pods else None


Found = TypeVar("Found")

_MOST_BYTES = 1 << 16
"""More than any file of a process that is read here; the kernel returns such a file in one read."""
_MANY = 2048
"""Number of processes to remember; more than the GPUs of a node have at a time."""
# After the last ")" of /proc/<pid>/stat comes field 3, so field 22 is the twentieth word there.
_START_TIME_WORD = 19


def content(path: str) -> str:
    """Read a file; invalid UTF-8 is replaced.

    Raises:
        OSError: The file cannot be read, or the process has ended.
    """
    # Runs for every process of every sample: half of the system calls of a file object.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_BYTES).decode("utf-8", "replace")
    finally:
        os.close(descriptor)


def name_and_start(directory: str) -> tuple[str, str | None]:
    """Read a process's own name and its start time in clock ticks, which distinguishes processes with the same pid.

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
    """Return whether ``proc_root`` is the host's: only there is process 2 the kernel's thread daemon."""
    try:
        return content(f"{proc_root}/2/comm").strip() == "kthreadd"
    except OSError:
        return False


class Remembered(Generic[Found]):
    """Cached data of processes, by pid and start time, as pids are reused.

    An entry is dropped after thousands of other processes were looked up: its process has ended.

    Args:
        proc_root: The host's ``/proc``, or where it is mounted.
        read: Maps a process's directory and its own name to the data to cache; may raise OSError.
    """

    def __init__(self, proc_root: Path, read: Callable[[str, str], Found]) -> None:
        self._proc_root = str(proc_root)
        self._read = read
        self._known: dict[int, tuple[str, Found]] = {}
        """Start time and data by pid, the one that was looked up last at the end."""

    def look(self, pid: int) -> Found | None:
        """Look up a process.

        Args:
            pid: In the PID namespace of ``proc_root``.

        Returns:
            The data of the process; for an ended one the last data, because the driver's samples are from before its
            end. ``None`` if it is not visible: another PID namespace, or it ended before its first lookup.
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
        """Return whether the process that was last looked up under a pid still exists."""
        known = self._known.get(pid)
        _, started = name_and_start(f"{self._proc_root}/{pid}")
        return started is not None and (known is None or known[0] == started)

    def forget(self, pid: int) -> None:
        """Read a process again at its next lookup: it may still be moved to another cgroup."""
        self._known.pop(pid, None)


_POD_LOG = re.compile(r"(?P<namespace>[^_]+)_(?P<pod>[^_]+)_(?P<uid>[^_]+)")

MPS_SERVER = "nvidia-cuda-mps"
"""Start of its name, as long as the kernel keeps it."""
UNLISTED_USE = "unlisted_use"
"""Reason of a device without a holder in the kubelet's list, used by a process in a pod's cgroup."""
PodName = tuple[str, str]
"""Namespace and name."""
NO_POD = ""
NO_NAME: PodName = ("", "")


HIDDEN_PROCESSES_MEMORY_MIB = 300
"""More memory than a driver needs for itself on a GPU without processes."""


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
    """Whether there are running processes that the driver does not list; then memory by process is unknown."""
    by_mps: bool = False
    """Whether one MPS server works for several processes; then samples do not identify the process that caused them."""

    @property
    def unattributed(self) -> tuple[ProcessUse, ...]:
        """Processes without a holder: of the host, ended, or of pods that do not hold the device."""
        return tuple(process for bucket in self.buckets if not bucket.holders for process in bucket.processes)


def hides_processes(processes: Sequence[ProcessUse], values: Mapping[Field, int | float]) -> bool:
    """Return whether processes run that the list does not contain, as in a PID namespace other than the host's.

    This is so if no listed process runs while memory is in use and samples keep coming.

    Args:
        processes: Processes that the driver lists and samples on a device.
        values: The device's values.
    """
    running = any(not process.ended for process in processes)
    return not running and values.get(Field.FB_USED, 0) > HIDDEN_PROCESSES_MEMORY_MIB


class ProcessLookup(ABC):
    """Finds the holder of a process: a pod, or a job or user in its place.

    Args:
        proc_root: The host's ``/proc``, or where it is mounted.
    """

    def __init__(self, proc_root: Path) -> None:
        self._proc_root = str(proc_root)

    @abstractmethod
    def pod_uid(self, pid: int) -> str | None:
        """Look up the pod of a process.

        Args:
            pid: In the PID namespace of ``proc_root``.

        Returns:
            The pod's UID, ``NO_POD`` for a process outside every pod, ``None`` if it is not visible (another PID
            namespace, or it ended before its first lookup). An ended process keeps the pod that was found before.
        """

    @abstractmethod
    def name_of(self, uid: str) -> PodName | None:
        """Return namespace and name of a pod; ``NO_NAME`` if there is no such pod, ``None`` if it is not known."""

    @abstractmethod
    def uid_of(self, namespace: str, pod: str) -> str | None:
        """Return a pod's UID; ``None`` if it is not known."""

    def command_of(self, pid: int) -> str:
        """Read a process's own name, at most 15 characters; empty if the process is not visible."""
        return name_and_start(f"{self._proc_root}/{pid}")[0]


class PodLookup(ProcessLookup):
    """Finds the pods of processes by their cgroups, and their names by the kubelet's log directories; no API needed.

    Args:
        proc_root: The host's ``/proc``, or where it is mounted.
        pod_log_root: ``/var/log/pods`` of the host, or where it is mounted; with ``<namespace>_<pod>_<uid>``.
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
        """Look up a pod's name.

        Args:
            uid: UID as written in the pod's cgroup path.

        Returns:
            Namespace and pod name; ``NO_NAME`` where the directory is readable and has no such pod; ``None`` where it
            cannot be read, or where two pods with one name exist and only one of them can be alive.
        """
        if not self._follow(uid):
            return None
        name = self._names.get(uid, NO_NAME)
        return name if name == NO_NAME or len(self._uids[name]) == 1 else None

    def uid_of(self, namespace: str, pod: str) -> str | None:
        """Return a pod's UID, which distinguishes a recreated pod (StatefulSet) from the earlier one of its name.

        Returns:
            The UID; ``None`` where there is no directory of that name, or several.
        """
        uids = self._uids.get((namespace, pod), []) if self._follow() else []
        return uids[0] if len(uids) == 1 else None

    def _follow(self, uid: str = "") -> bool:
        """Read the log directory if it has changed, or for a new unknown UID; return whether it can be read."""
        try:
            changed_ns = self._log_root.stat().st_mtime_ns
            if changed_ns != self._changed_ns:
                self._missed.clear()
                self._read()
            if uid and uid not in self._names and uid not in self._missed:
                self._read()  # a directory created right after the last scan can leave the time of change as it is
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
        hidden: As ``hides_processes`` returns it.

    Returns:
        The processes by holder. An ended process of a pod that no longer holds the device is left out: with it, the
        next pod on the device would look idle until the next samples.
    """
    uids = [lookup.pod_uid(process.pid) for process in processes]
    blind = all(uid is None for uid in uids)
    by_pod: dict[str | None, list[ProcessUse]] = {}
    for process, uid in zip(processes, uids, strict=True):
        # A busy process that has ended may be of any holder: short processes of a launcher, for example.
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
    # A holder with another UID does not match by name: the pod may be new under that name.
    nameless = () if by_uid else tuple(holder for holder in holders if holder.pod_uid is None)
    if not nameless:
        return by_uid, True
    name = lookup.name_of(uid)
    if name is None:
        return nameless, False
    return tuple(holder for holder in nameless if (holder.namespace, holder.pod) == name), True


def with_unlisted_uses(attribution: Attribution, reading: Reading, lookup: ProcessLookup) -> Attribution:
    """Return an attribution with the pods that use a device without a holder in the kubelet's list, as unresolved.

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
    # The server of MPS works for others and holds nothing.
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
