"""From the process ids that a driver lists to the pods that hold the device, on the evidence of the node alone.

Two answers are kept apart throughout: an empty string means "looked, and there is none", ``None`` means "could not be
looked up". The first makes a process unattributed, the second leaves open whose it is; neither makes a wrong owner.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.attribution import cgroup
from exporter.attribution.proc_files import Remembered, content
from exporter.model import Holder, ProcessUse

_POD_LOG = re.compile(r"(?P<namespace>[^_]+)_(?P<pod>[^_]+)_(?P<uid>[^_]+)")

_MPS_SERVER = "nvidia-cuda-mps"
"""The begin of its name that the kernel keeps."""
NO_POD = ""
NO_NAME = ("", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Processes of one device, divided by who they belong to; each process is in one of the three places at most."""

    by_holder: Mapping[Holder, tuple[ProcessUse, ...]] = field(default_factory=dict)
    unattributed: tuple[ProcessUse, ...] = ()
    """Of no listed pod: host processes, vanished ones, pods that hold nothing here (any more)."""
    ambiguous: tuple[ProcessUse, ...] = ()
    """Perhaps of a holder, but of which cannot be told: a pod without a name, or busy and gone before a look at it."""
    complete: bool = True
    """False when the division cannot be relied on: something is ambiguous, or no process at all was visible."""
    by_mps: bool = False
    """Whether one MPS server works for several processes: then samples of processes do not tell whose the time was."""


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
) -> Matched:
    """Divide the processes of one device among its holders.

    Args:
        holders: Holders of the device.
        processes: What the driver lists on it.
        uid_of: Pod UID of a process, as ``PidResolver.pod_uid``.
        name_of: Pod name of a UID, as ``PodNames.name_of``.
        command_of: A process' own name, empty where it cannot be seen.

    Returns:
        The division. A process goes to a holder only on the evidence of its pod's UID or name, and only if a single
        container of that pod holds the device; never by elimination. One that has ended, of a pod that does not hold
        the device (any more), is left out: beside it the pod that came after would look idle until the next samples.
    """
    by_holder: dict[Holder, list[ProcessUse]] = {holder: [] for holder in holders}
    unattributed: list[ProcessUse] = []
    ambiguous: list[ProcessUse] = []
    visible = 0
    owners_of: dict[str | None, tuple[Holder, ...] | None] = {None: (), NO_POD: ()}
    for process in processes:
        uid = uid_of(process.pid)
        visible += uid is not None
        if uid not in owners_of:
            owners_of[uid] = _owners(holders, uid or NO_POD, name_of)
        owners = owners_of[uid]
        # A job of many short processes would look idle beside its own launcher.
        gone_busy = uid is None and _is_busy(process)
        if owners is None or len(owners) > 1 or (holders and gone_busy):
            ambiguous.append(process)
        elif owners:
            by_holder[owners[0]].append(process)
        elif not (holders and process.ended and uid):
            unattributed.append(process)
    blind = bool(holders and processes and not visible)
    return Matched(
        by_holder={holder: tuple(found) for holder, found in by_holder.items()},
        unattributed=tuple(unattributed),
        ambiguous=tuple(ambiguous),
        complete=not (ambiguous or blind),
        by_mps=any(process.mps for process in processes) or _has_server(unattributed, command_of),
    )


def _has_server(unattributed: Sequence[ProcessUse], command_of: Callable[[int], str]) -> bool:
    """Whether a busy one is an MPS server: before Volta the driver lists it alone, and nobody who holds owns it."""
    return any(_is_busy(process) and command_of(process.pid) == _MPS_SERVER for process in unattributed)


def _is_busy(process: ProcessUse) -> bool:
    return bool(process.sm_ratio or process.enc_ratio or process.dec_ratio)


def _owners(
    holders: Sequence[Holder], uid: str, name_of: Callable[[str], tuple[str, str] | None]
) -> tuple[Holder, ...] | None:
    by_uid = tuple(holder for holder in holders if holder.pod_uid == uid)
    # A holder whose UID is known to be another one may be a new pod of the same name: its name proves nothing.
    by_name_only = [holder for holder in holders if holder.pod_uid is None]
    if by_uid or not by_name_only:
        return by_uid
    name = name_of(uid)
    return None if name is None else tuple(h for h in by_name_only if (h.namespace, h.pod) == name)
