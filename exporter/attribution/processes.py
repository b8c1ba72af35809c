"""From the process ids that a driver lists to the pods that hold the device, on the evidence of the node alone.

Two answers are kept apart throughout: an empty string means "looked, and there is none", ``None`` means "could not be
looked up". The first makes a process unattributed, the second leaves open whose it is; neither makes a wrong owner.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from exporter.attribution import cgroup
from exporter.attribution.proc_files import Remembered, content
from exporter.model import Attribution, Field, Holder, ProcessUse, Reading, Unresolved

_POD_LOG = re.compile(r"(?P<namespace>[^_]+)_(?P<pod>[^_]+)_(?P<uid>[^_]+)")

MPS_SERVER = "nvidia-cuda-mps"
"""The begin of its name that the kernel keeps."""
UNLISTED_USE = "unlisted_use"
"""Reason of a device that the kubelet lists with nobody and that a process in a pod's cgroup uses."""
NO_POD = ""
NO_NAME = ("", "")


HIDDEN_PROCESSES_MEMORY_MIB = 300
"""More than a driver takes for itself on a GPU without processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Processes of one device that belong to the same holders."""

    holders: tuple[Holder, ...]
    """Containers that they may be of: those of one pod, or all candidates; empty: they are of no holder."""
    processes: tuple[ProcessUse, ...]
    known: bool = True
    """Whether the pod is known. If not, they may also be of no holder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Processes of one device by holder; each process is in one bucket at most."""

    buckets: tuple[Bucket, ...] = ()
    hidden: bool = False
    """Whether processes run that the driver does not list here: then memory by process is unknown."""
    by_mps: bool = False
    """Whether one MPS server works for several processes: then samples do not show which of them it worked for."""

    @property
    def unattributed(self) -> tuple[ProcessUse, ...]:
        """Processes of no holder: of the host, vanished, or of pods that do not hold the device."""
        return tuple(process for bucket in self.buckets if not bucket.holders for process in bucket.processes)


def hides_processes(processes: Sequence[ProcessUse], values: Mapping[Field, int | float]) -> bool:
    """Return whether processes run that the list does not show, as in a PID namespace other than the host's.

    Nothing lists as running there, while memory is in use and samples keep coming.

    Args:
        processes: What the driver lists and samples on a device.
        values: The device's values.
    """
    running = any(not process.ended for process in processes)
    return not running and values.get(Field.FB_USED, 0) > HIDDEN_PROCESSES_MEMORY_MIB


class PidResolver:
    """Pod UIDs of host processes.

    Args:
        proc_root: The host's ``/proc``, or where it is mounted.
    """

    def __init__(self, proc_root: Path) -> None:
        self._uids = Remembered(proc_root, _pod_uid)

    def pod_uid(self, pid: int) -> str | None:
        """Look up the pod of a process.

        Args:
            pid: In the PID namespace of ``proc_root``.

        Returns:
            The pod's UID, ``NO_POD`` for a process that is in no pod, ``None`` for one that cannot be seen (another
            PID namespace, or gone before it was ever looked up). One that has ended keeps the pod it was known by.
        """
        uid = self._uids.look(pid)
        if uid == NO_POD:
            self._uids.forget(pid)  # a runtime may move it into its pod's cgroup yet
        return uid


def _pod_uid(directory: str, _name: str) -> str:
    pod = cgroup.pod_of(content(f"{directory}/cgroup"))
    return pod[0] if pod else NO_POD


class PodNames:
    """Names and UIDs of this node's pods, from the kubelet's log directories; no API needed.

    Their names are ``<namespace>_<pod>_<uid>``.

    Args:
        pod_log_root: ``/var/log/pods`` of the host, or where it is mounted.
    """

    def __init__(self, pod_log_root: Path) -> None:
        self._root = pod_log_root
        self._changed_ns: int | None = None
        self._names: dict[str, tuple[str, str]] = {}
        self._uids: dict[tuple[str, str], list[str]] = {}
        self._missed: set[str] = set()

    def name_of(self, uid: str) -> tuple[str, str] | None:
        """Look up a pod's name.

        Args:
            uid: As it stands in the pod's cgroup path.

        Returns:
            Namespace and pod name; ``NO_NAME`` where the directory is readable and has no such pod; ``None`` where it
            cannot be read, or where two pods of one name are there and only one of them can be alive.
        """
        try:
            changed_ns = self._follow()
            if uid not in self._names and uid not in self._missed:
                # Once more for each new uid: a directory made right after the scan can leave the same mtime.
                self._read(changed_ns)
                self._missed.add(uid)
        except OSError:
            self._changed_ns = None
            return None
        name = self._names.get(uid, NO_NAME)
        return name if name == NO_NAME or len(self._uids[name]) == 1 else None

    def uid_of(self, namespace: str, pod: str) -> str | None:
        """Look up a pod's UID, by which a pod that was made again under its name (StatefulSet) is told from the former.

        Returns:
            The UID; ``None`` where there is no directory of that name, or several.
        """
        try:
            self._follow()
        except OSError:
            self._changed_ns = None
            return None
        uids = self._uids.get((namespace, pod), [])
        return uids[0] if len(uids) == 1 else None

    def _follow(self) -> int:
        """Read again if something has changed; give the time of the change."""
        changed_ns = self._root.stat().st_mtime_ns
        if changed_ns != self._changed_ns:
            self._missed.clear()
            self._read(changed_ns)
        return changed_ns

    def _read(self, changed_ns: int) -> None:
        names = [match for path in self._root.iterdir() if (match := _POD_LOG.fullmatch(path.name))]
        self._names = {match["uid"]: (match["namespace"], match["pod"]) for match in names}
        self._uids = {}
        for uid, name in self._names.items():
            self._uids.setdefault(name, []).append(uid)
        self._changed_ns = changed_ns


def match(
    holders: Sequence[Holder],
    processes: Sequence[ProcessUse],
    uid_of: Callable[[int], str | None],
    name_of: Callable[[str], tuple[str, str] | None],
    command_of: Callable[[int], str] = lambda _pid: "",
    *,
    hidden: bool = False,
) -> Matched:
    """Divide the processes of one device among its holders.

    A process goes to a pod only on the evidence of that pod's UID or name, never by elimination. One that cannot be
    matched leaves the others as they are.

    Args:
        holders: Holders of the device.
        processes: What the driver lists on it.
        uid_of: Pod UID of a process, as ``PidResolver.pod_uid``.
        name_of: Pod name of a UID, as ``PodNames.name_of``.
        command_of: A process' own name, empty where it cannot be seen.
        hidden: As ``hides_processes`` returns it.

    Returns:
        The division. It leaves out a process that has ended, of a pod that does not hold the device (any more): with
        it the pod that came after would look idle until the next samples.
    """
    uids = [uid_of(process.pid) for process in processes]
    blind = all(uid is None for uid in uids)
    by_pod: dict[str | None, list[ProcessUse]] = {}
    for process, uid in zip(processes, uids, strict=True):
        # One that was busy and is gone may be of any holder: a launcher's short processes are.
        of_nobody = uid is None and not blind and not process.busiest_ratio
        by_pod.setdefault(NO_POD if of_nobody else uid, []).append(process)
    pods = _Pods.of(holders, name_of)
    buckets: list[Bucket] = []
    unattributed: list[ProcessUse] = []
    for uid, found in by_pod.items():
        owners, known = pods.holders_of(uid)
        if owners:
            buckets.append(Bucket(holders=owners, processes=tuple(found), known=known))
        else:
            unattributed += [one for one in found if not (holders and one.ended and uid)]
    if unattributed:
        buckets.append(Bucket(holders=(), processes=tuple(unattributed)))
    by_mps = any(process.mps for process in processes) or _has_server(unattributed, command_of)
    return Matched(buckets=tuple(buckets), hidden=hidden, by_mps=by_mps)


def unlisted_uses(
    reading: Reading,
    attribution: Attribution,
    *,
    pod_uid: Callable[[int], str | None],
    name_of: Callable[[str], tuple[str, str] | None],
    command_of: Callable[[int], str],
) -> tuple[Unresolved, ...]:
    """Find the pods that use a device which the kubelet lists with nobody.

    The kubelet does not list ordinary init containers, whose devices stay taken for the life of their pod.

    Args:
        reading: The processes of every device.
        attribution: The holders of every device that the kubelet lists.
        pod_uid: From a process id to the UID of its pod.
        name_of: From a UID to namespace and name.
        command_of: From a process id to its own name.
    """

    def pods_among(processes: Sequence[ProcessUse]) -> Iterator[str]:
        for process in processes:
            uid = None if process.ended else pod_uid(process.pid)
            if uid and command_of(process.pid) != MPS_SERVER:  # the server works for others and holds nothing
                yield uid

    found: list[Unresolved] = []
    for gpu in reading.gpus:
        whole = () if gpu.instances else ((gpu.gpu.uuid, gpu.processes),)
        parts = ((part.instance.uuid, part.processes) for part in gpu.instances)
        for uuid, processes in (*whole, *parts):
            if not processes or attribution.holders.keys() & {uuid, gpu.gpu.uuid}:
                continue
            for uid in dict.fromkeys(pods_among(processes)):
                namespace, pod = name_of(uid) or ("", "")
                found.append(
                    Unresolved(
                        namespace=namespace,
                        pod=pod,
                        container="",
                        resource="",
                        device_id=uuid,
                        reason=UNLISTED_USE,
                        gpu_uuids=(gpu.gpu.uuid,),
                    )
                )
    return tuple(found)


def _has_server(unattributed: Sequence[ProcessUse], command_of: Callable[[int], str]) -> bool:
    """Return whether a busy one is an MPS server: before Volta the driver lists it alone, and it is of no holder."""
    return any(process.busiest_ratio and command_of(process.pid) == MPS_SERVER for process in unattributed)


@dataclass(frozen=True, slots=True)
class _Pods:
    """Holders of one device by pod."""

    everybody: tuple[Holder, ...]
    by_uid: Mapping[str, tuple[Holder, ...]]
    by_name_only: tuple[Holder, ...]
    """Holders of which the UID is unknown. Of another one the name proves nothing: it may be a new pod of that name."""
    name_of: Callable[[str], tuple[str, str] | None]

    @classmethod
    def of(cls, holders: Sequence[Holder], name_of: Callable[[str], tuple[str, str] | None]) -> Self:
        """Sort the holders of a device."""
        by_uid: dict[str | None, tuple[Holder, ...]] = {}
        for holder in holders:
            by_uid[holder.pod_uid] = (*by_uid.get(holder.pod_uid, ()), holder)
        by_name_only = by_uid.pop(None, ())
        return cls(tuple(holders), {uid: of_pod for uid, of_pod in by_uid.items() if uid}, by_name_only, name_of)

    def holders_of(self, uid: str | None) -> tuple[tuple[Holder, ...], bool]:
        """Return the holders that a pod's processes may be of, and whether the pod is known."""
        if uid is None:
            return self.everybody, False
        by_uid = self.by_uid.get(uid, ())
        if by_uid or not uid or not self.by_name_only:
            return by_uid, True
        name = self.name_of(uid)
        if name is None:
            return self.by_name_only, False
        return tuple(holder for holder in self.by_name_only if (holder.namespace, holder.pod) == name), True
