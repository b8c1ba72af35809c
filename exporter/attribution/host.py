"""Attributes devices outside Kubernetes: users and systemd units by the processes on a device."""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from exporter.attribution.processes import (
    NO_NAME,
    NO_POD,
    PodName,
    ProcessLookup,
    Remembered,
    content,
    hides_processes,
)
from exporter.model import (
    Allocations,
    ContainerAllocation,
    DeviceIds,
    DeviceReading,
    DeviceState,
    GpuReading,
    Owner,
    PodFacts,
    ProcessUse,
    Reading,
)

_PASSWD_LIMIT_BYTES = 4 * 2**20
_USER = re.compile(r"^([^:\n]+):[^:\n]*:([0-9]{1,10}):", re.ASCII | re.MULTILINE)
_REAL_USER = re.compile(r"^Uid:\s+([0-9]{1,10})(?=\s|$)", re.ASCII | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    """One process, as it was when it was first read."""

    command: str
    """Name of its program, at most 15 bytes; the process may have changed it."""
    cgroup: str
    """Full text of its cgroup file."""
    user_id: int | None
    """Real user id in the user namespace of the agent; ``None`` where the kernel does not report it."""


class UserNames:
    """Names of the host's users, from its own passwd file.

    The file is read through the root directory of the host's first process, because a container has its own users.
    Directory services such as LDAP are not queried: that can take seconds.

    Args:
        proc_root: The host's ``/proc``, or where it is mounted.
    """

    def __init__(self, proc_root: Path) -> None:
        self._path = proc_root / "1" / "root" / "etc" / "passwd"
        self._names: dict[int, str] = {}
        self._changed_ns: int | None = None

    def name_of(self, user_id: int) -> str:
        """Return a user's name, or ``uid-<number>`` where the file does not list the user or cannot be read."""
        return self._names.get(user_id) or f"uid-{user_id}"

    def follow(self) -> None:
        """Read the file again if it has changed; keep the last names if that fails."""
        try:
            changed_ns = self._path.stat().st_mtime_ns
            if changed_ns == self._changed_ns:
                return
            with self._path.open("rb") as file:
                text = file.read(_PASSWD_LIMIT_BYTES).decode("utf-8", "replace")
        except OSError:
            return
        self._changed_ns = changed_ns
        self._names = {}
        for name, number in _USER.findall(text):
            self._names.setdefault(int(number), name)


def host_process(directory: str, name: str) -> HostProcess:
    """Read a process from its directory, given its own name.

    Raises:
        OSError: The directory cannot be read.
    """
    return HostProcess(command=name, cgroup=content(f"{directory}/cgroup"), user_id=_real_user(f"{directory}/status"))


def _real_user(path: str) -> int | None:
    # Not the owner of /proc/<pid>: that is root for a process that is not dumpable.
    try:
        found = _REAL_USER.search(content(path))
    except OSError:
        return None
    return int(found[1]) if found else None


SLURM, SLURM_PROCESS, HOST = "slurm", "slurm-process", "host"
"""Resource names, by which the join distinguishes the sources of a holder."""
SOURCES: Final[Mapping[str, str]] = {SLURM: "job-mapping", SLURM_PROCESS: "process", HOST: "process"}
"""``Holder.source`` by resource name."""

UNNAMED: Final = "/"
"""Name in place of a tenant that cannot be identified; no tenant has it."""
UNNAMED_REASON: Final = "job_id_unknown"

RENEW_SECONDS = 5.0
"""Interval after which an unchanged answer is published again and files are read again."""

_TENANTS_LIMIT = 4096


class TenantSource(ProcessLookup):
    """Reports holders without a kubelet, in the form of a kubelet's answer, and remembers recent holders.

    A tenant is a possible holder: a job, a unit or a user. Its name takes the place of a pod's name and UID.

    Args:
        resource: Resource name of devices that processes hold.
        proc_root: The host's ``/proc``, or where it is mounted.
        unnamed_problem: Why tenants cannot be identified and how to fix it; shown after the names of their GPUs.
    """

    manager: ClassVar[str]
    """Workload manager, as the option names it; the namespace of its tenants."""

    def __init__(self, resource: str, proc_root: Path, *, unnamed_problem: str = "") -> None:
        super().__init__(proc_root)
        self._resource = resource
        self._unnamed_problem = unnamed_problem
        self._processes = Remembered(proc_root, host_process)
        self._users = UserNames(proc_root)
        self._facts: dict[str, PodFacts] = {}
        """Owners of tenants by name, the tenant that was seen last at the end."""
        self._running: dict[str, Mapping[int, str]] = {}
        """Tenants by pid and UUID of the device."""
        self._read_at: float | None = None
        self.latest: Allocations | None = None
        """The newest answer; ``None`` before the first."""
        self.problem = ""
        """The problem and its fix in one line; empty if there is none."""
        self.errors: Counter[str] = Counter()
        """Errors since start by reason."""

    @abstractmethod
    def observe(self, reading: Reading, now: float) -> None:
        """Process the newest reading.

        Args:
            reading: The newest reading.
            now: Unix time.
        """

    @abstractmethod
    def _tenant_of(self, pid: int) -> str | None:
        """Return the tenant of a process: ``NO_POD`` for no tenant, ``UNNAMED``, or ``None`` if it is not visible."""

    def pod_uid(self, pid: int) -> str | None:
        """Return the name of a process's tenant."""
        tenant = self._tenant_of(pid)
        return None if tenant == UNNAMED else tenant

    def name_of(self, uid: str) -> PodName:
        """Return namespace and name of a tenant."""
        return (self.manager, uid) if uid in self._facts else NO_NAME

    def uid_of(self, namespace: str, pod: str) -> str | None:
        """Return the name of a tenant."""
        return pod if namespace == self.manager and pod in self._facts else None

    def facts(self, namespace: str, pod: str) -> PodFacts | None:
        """Return the owner facts of a tenant; ``None`` for an unknown one."""
        return self._facts.get(pod) if namespace == self.manager else None

    def _enter(self, tenant: str, facts: PodFacts) -> None:
        """Store the newest facts of a tenant; when there are too many, drop the one not seen for the longest time."""
        self._facts.pop(tenant, None)
        self._facts[tenant] = facts
        if len(self._facts) > _TENANTS_LIMIT:
            del self._facts[next(iter(self._facts))]

    def _is_due(self, now: float) -> bool:
        """Return whether files are to be read again; if so, the names of users are up to date."""
        due = self._read_at is None or not 0 <= now - self._read_at < RENEW_SECONDS
        if due:
            self._read_at = now
            self._users.follow()
        return due

    def _publish(
        self,
        held: Mapping[str, Iterable[str]],
        resource: str,
        now: float,
        doubtful: Sequence[str] = (),
    ) -> None:
        """Publish an answer; keep the previous object while it is equal and recent.

        Args:
            held: Tenants by device UUID.
            resource: One of the names above.
            now: Unix time.
            doubtful: Devices with an unidentifiable holder: UUIDs, or words that are not device ids. The join leaves
                them unresolved; with such words, it calls no device free.
        """
        devices: dict[str, list[str]] = {}
        for uuid, tenants in held.items():
            for tenant in dict.fromkeys(tenants):
                devices.setdefault(tenant, []).append(uuid)
                if tenant in self._facts:
                    self._enter(tenant, self._facts[tenant])
        names = [(self.manager, tenant, ids) for tenant, ids in sorted(devices.items())]
        if doubtful:
            names.append((resource, "", [*doubtful]))
        containers = tuple(
            ContainerAllocation(
                namespace=namespace, pod=name, container="", devices=(DeviceIds(resource=resource, ids=tuple(ids)),)
            )
            for namespace, name, ids in names
        )
        latest = self.latest
        if latest and latest.containers == containers and 0 <= now - latest.answered_at_seconds < RENEW_SECONDS:
            return
        self.latest = Allocations(answered_at_seconds=now, containers=containers)

    def _observe_processes(self, reading: Reading, now: float) -> None:
        """Derive the holders of each device from its processes.

        The driver lists no processes for a GPU that is lost or waits for a reset: its holders stay while one of their
        processes lives. If a working GPU does not list its processes, the last answer stays and ages.
        """
        running: dict[str, Mapping[int, str]] = {}
        unlisted: list[str] = []
        unnamed: dict[str, str] = {}
        for gpu in reading.gpus:
            for device in allocatable(gpu):
                if gpu.state is DeviceState.UP:
                    found = self._tenants(processes_of(device))
                else:
                    before = self._running.get(device.uuid, {})
                    found = {pid: tenant for pid, tenant in before.items() if self._processes.lives(pid)}
                if found is None:
                    unlisted.append(f"GPU {gpu.gpu.index}")
                    continue
                running[device.uuid] = found
                if UNNAMED in found.values():
                    unnamed[device.uuid] = f"GPU {gpu.gpu.index}"
        if unlisted:
            self.errors["processes_not_told"] += 1
            where = ", ".join(dict.fromkeys(unlisted))
            self.problem = (
                f"the processes on {where} cannot be seen, so the holders are unknown; "
                "run as root in the host's PID namespace, with its /proc as --proc-root"
            )
            return
        where = ", ".join(dict.fromkeys(unnamed.values()))
        self.problem = f"{where}: {self._unnamed_problem}" if unnamed else ""
        self._running = running
        held = {uuid: [one for one in found.values() if one != UNNAMED] for uuid, found in running.items()}
        self._publish(held, self._resource, now, tuple(unnamed))

    def _tenants(self, processes: tuple[ProcessUse, ...] | None) -> Mapping[int, str] | None:
        """Return the tenants by pid, or ``None`` if there are processes and none of them can be identified."""
        if processes is None:
            return None
        found = {process.pid: self._tenant_of(process.pid) for process in processes}
        alive = [found[process.pid] for process in processes if not process.ended]
        if alive and all(tenant is None for tenant in alive):
            return None
        return {pid: tenant for pid, tenant in found.items() if tenant}


def processes_of(device: DeviceReading) -> tuple[ProcessUse, ...] | None:
    """Return the processes of a device; ``None`` where their list is missing or hides some."""
    listed = device.processes
    return None if listed is None or hides_processes(listed, device.values) else listed


def allocatable(gpu: GpuReading) -> tuple[DeviceReading, ...]:
    """Return the allocatable devices of a GPU: a GPU in MIG mode is none itself."""
    return gpu.instances if gpu.gpu.mig_enabled else gpu.devices


_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?=\.scope|/|$)", re.ASCII)
_LOGIN = re.compile(r"/user-(?P<user>[0-9]{1,10})\.slice(?=/|$)", re.ASCII)
_MANAGER = re.compile(r"user@[0-9]+\.service", re.ASCII)
# Named by systemd-run or by a desktop, differently at each start: the names do not identify an owner.
_TRANSIENT = re.compile(r"(?:run-[rup]?[0-9a-f]+(?:-i[0-9]+)?|app-.*)\.service", re.ASCII)
_ID_SHOWN = 12
# Services of the driver and the display while root runs them: they use a GPU on behalf of others.
_INFRASTRUCTURE = frozenset(
    {"Xorg", "Xwayland", "nvidia-cuda-mps", "nvidia-persiste", "nv-hostengine", "nv-fabricmanage", "dcgm-exporter"}
)


class HostUsers(TenantSource):
    """Track the holders of devices on a host without a workload manager.

    Args:
        proc_root: The host's ``/proc``, or where it is mounted.
    """

    manager = "host"

    def __init__(self, *, proc_root: Path) -> None:
        super().__init__(HOST, proc_root)

    def observe(self, reading: Reading, now: float) -> None:
        """Read the names of users, and derive the holders."""
        self._is_due(now)
        self._observe_processes(reading, now)

    def _tenant_of(self, pid: int) -> str | None:
        process = self._processes.look(pid)
        if process is None:
            return None
        kind, name, user_id = tenant_of(process)
        if not kind or (process.command in _INFRASTRUCTURE and process.user_id == 0):
            return NO_POD
        user = "" if user_id is None else self._users.name_of(user_id)
        if kind == "User":
            name = user
        elif user:
            name = f"{user}/{name}"  # two users may have units with the same name
        # Known by name and not by user id: the name can become known later than the id.
        if name not in self._facts:
            self._enter(name, PodFacts(owner=Owner(namespace=self.manager, kind=kind, name=name, team=user)))
        return name


def tenant_of(process: HostProcess) -> tuple[str, str, int | None]:
    """Return the owner of a process.

    Returns:
        Kind, name and user id. ``Container`` has the first digits of its id and ``SystemdUnit`` its name, both with
        the user if they belong to one. Otherwise ``User`` without a name: the login user or the process's user. An
        empty kind if the user is not known either.
    """
    for line in process.cgroup.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in {"", "name=systemd"} and not _CONTAINER.search(path):
            continue  # of cgroup v1, where only systemd's own hierarchy contains every unit
        login = _LOGIN.search(path)
        user_id = int(login["user"]) if login else None
        if container := _CONTAINER.search(path):
            return "Container", container[1][:_ID_SHOWN], user_id  # below a user's slice, the user chooses the names
        for part in reversed(path.split("/")):
            if part.endswith(".service") and not _MANAGER.fullmatch(part) and not _TRANSIENT.fullmatch(part):
                return "SystemdUnit", part, user_id
        if user_id is not None:
            return "User", "", user_id
    return ("User", "", process.user_id) if process.user_id is not None else ("", "", None)
