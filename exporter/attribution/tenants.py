"""Attributes devices outside Kubernetes: to Slurm jobs, or to users and systemd units."""

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from exporter.attribution.processes import NO_NAME, NO_POD, PodName, ProcessLookup, Remembered, content, hides_processes
from exporter.attribution.shares import HOST, SLURM, SLURM_PROCESS
from exporter.model.attribution import Allocations, ContainerAllocation, DeviceIds, Owner, PodFacts
from exporter.model.devices import DeviceReading, DeviceState, GpuReading, ProcessUse, Reading

_PASSWD_LIMIT_BYTES = 4 * 2**20
_USER = re.compile(r"^([^:\n]+):[^:\n]*:([0-9]{1,10}):", re.ASCII | re.MULTILINE)
_REAL_USER = re.compile(r"^Uid:\s+([0-9]{1,10})(?=\s|$)", re.ASCII | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    """One process at its first read."""

    command: str
    """Name of the program, at most 15 bytes; the process can change it."""
    cgroup: str
    """Full text of the cgroup file."""
    user_id: int | None
    """Real user id in the user namespace of the agent; ``None`` if the kernel does not report it."""


class UserNames:
    """Finds names of the host's users in its passwd file.

    The file is read through the root directory of the host's first process, because a container has its own users.
    Directory services such as LDAP are not queried, because a query can take seconds.

    Args:
        proc_root: The host's ``/proc``, or its mount point.
    """

    def __init__(self, proc_root: Path) -> None:
        self._path = proc_root / "1" / "root" / "etc" / "passwd"
        self._names: dict[int, str] = {}
        self._changed_ns: int | None = None

    def name_of(self, user_id: int) -> str:
        """Return the name of a user, or ``uid-<number>`` if the file does not list the user or cannot be read."""
        return self._names.get(user_id) or f"uid-{user_id}"

    def follow(self) -> None:
        """Read the file after a change; keep the last names if that fails."""
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
    """Read a process from its directory.

    Raises:
        OSError: The directory cannot be read.
    """
    return HostProcess(command=name, cgroup=content(f"{directory}/cgroup"), user_id=_real_user(f"{directory}/status"))


def _real_user(path: str) -> int | None:
    # Not the owner of /proc/<pid>, which is root for a process that is not dumpable.
    try:
        found = _REAL_USER.search(content(path))
    except OSError:
        return None
    return int(found[1]) if found else None


UNNAMED: Final = "/"
"""Name for a tenant that cannot be identified; no tenant has this name."""

RENEW_SECONDS = 5.0
"""Interval after which an unchanged answer is published again and files are read again."""

_TENANTS_LIMIT = 4096


class TenantSource(ProcessLookup):
    """Reports holders without a kubelet, in the form of a kubelet's answer, and stores recent holders.

    A tenant is a possible holder: a job, a unit or a user. Its name replaces the name and UID of a pod.

    Args:
        proc_root: The host's ``/proc``, or its mount point.
    """

    manager: ClassVar[str]
    """Workload manager, a value of the option; also the namespace of its tenants."""
    resource: str
    """Resource name of the held devices."""
    unnamed_problem: ClassVar[str] = ""
    """Reason for unidentified tenants, and the fix; shown after the names of their GPUs."""

    def __init__(self, proc_root: Path) -> None:
        super().__init__(proc_root)
        self._processes = Remembered(proc_root, host_process)
        self._users = UserNames(proc_root)
        self._facts: dict[str, PodFacts] = {}
        """Owners of tenants by name, in the order in which they were last seen."""
        self._running: dict[str, Mapping[int, str]] = {}
        """Tenants by UUID of the device and pid."""
        self._read_at: float | None = None
        self.latest: Allocations | None = None
        """The newest answer; ``None`` before the first."""
        self.problem = ""
        """Problem and fix in one line; empty without a problem."""
        self.errors: Counter[str] = Counter()
        """Errors since start by reason."""

    def observe(self, reading: Reading, now: float) -> None:
        """Process the newest reading at a Unix time; read files again every ``RENEW_SECONDS``."""
        due = self._read_at is None or not 0 <= now - self._read_at < RENEW_SECONDS
        if due:
            self._read_at = now
            self._users.follow()
        self._observe(reading, now, due=due)

    def _observe(self, reading: Reading, now: float, *, due: bool) -> None:  # noqa: ARG002 - for files of a subclass
        self._observe_processes(reading, now)

    @abstractmethod
    def _tenant_of(self, pid: int) -> str | None:
        """Return the tenant of a process; ``NO_POD`` without one, or ``UNNAMED``; ``None`` if it is not visible."""

    def pod_uid(self, pid: int) -> str | None:
        """Return the name of the tenant of a process."""
        tenant = self._tenant_of(pid)
        return None if tenant == UNNAMED else tenant

    def name_of(self, uid: str) -> PodName:
        """Return namespace and name of a tenant."""
        return (self.manager, uid) if uid in self._facts else NO_NAME

    def uid_of(self, namespace: str, pod: str) -> str | None:
        """Return the name of a tenant."""
        return pod if namespace == self.manager and pod in self._facts else None

    def facts(self, namespace: str, pod: str) -> PodFacts | None:
        """Return the owner facts of a tenant; ``None`` for an unknown tenant."""
        return self._facts.get(pod) if namespace == self.manager else None

    def _enter(self, tenant: str, facts: PodFacts) -> None:
        """Store the newest facts of a tenant; above the limit, drop the tenant that was last seen first."""
        self._facts.pop(tenant, None)
        self._facts[tenant] = facts
        if len(self._facts) > _TENANTS_LIMIT:
            del self._facts[next(iter(self._facts))]

    def _publish(self, held: Mapping[str, Iterable[str]], now: float, doubtful: Sequence[str] = ()) -> None:
        """Publish an answer; keep the previous object while it is equal and recent.

        Args:
            held: Tenants by device UUID.
            now: Unix time.
            doubtful: Devices with an unidentified holder: UUIDs, or words that are not device ids. The join does not
                resolve them; with such words, it reports no device as free.
        """
        devices: dict[str, list[str]] = {}
        for uuid, tenants in held.items():
            for tenant in dict.fromkeys(tenants):
                devices.setdefault(tenant, []).append(uuid)
                if tenant in self._facts:
                    self._enter(tenant, self._facts[tenant])
        containers = tuple(self._held(self.manager, tenant, ids) for tenant, ids in sorted(devices.items()))
        if doubtful:
            containers += (self._held(self.resource, "", doubtful),)
        latest = self.latest
        if latest and latest.containers == containers and 0 <= now - latest.answered_at_seconds < RENEW_SECONDS:
            return
        self.latest = Allocations(answered_at_seconds=now, containers=containers)

    def _held(self, namespace: str, tenant: str, ids: Iterable[str]) -> ContainerAllocation:
        devices = DeviceIds(resource=self.resource, ids=tuple(ids))
        return ContainerAllocation(namespace=namespace, pod=tenant, container="", devices=(devices,))

    def _observe_processes(self, reading: Reading, now: float) -> None:
        """Derive the holders of each device from its processes.

        The driver lists no processes for a GPU that is lost or waits for a reset. Its holders stay while one of their
        processes exists. If the processes of a working GPU are not listed, the last answer stays and becomes older.
        """
        running: dict[str, Mapping[int, str]] = {}
        unlisted: dict[str, None] = {}
        unnamed: dict[str, str] = {}
        for gpu in reading.gpus:
            label = f"GPU {gpu.gpu.index}"
            for device in allocatable(gpu):
                if gpu.state is DeviceState.UP:
                    found = self._tenants(processes_of(device))
                else:
                    before = self._running.get(device.uuid, {})
                    found = {pid: tenant for pid, tenant in before.items() if self._processes.lives(pid)}
                if found is None:
                    unlisted[label] = None
                    continue
                running[device.uuid] = found
                if UNNAMED in found.values():
                    unnamed[device.uuid] = label
        if unlisted:
            self.errors["processes_not_told"] += 1
            self.problem = (
                f"the processes on {', '.join(unlisted)} cannot be seen, so the holders are unknown; "
                "run as root in the host's PID namespace, with its /proc as --proc-root"
            )
            return
        self.problem = f"{', '.join(dict.fromkeys(unnamed.values()))}: {self.unnamed_problem}" if unnamed else ""
        self._running = running
        held = {uuid: [one for one in found.values() if one != UNNAMED] for uuid, found in running.items()}
        self._publish(held, now, tuple(unnamed))

    def _tenants(self, processes: tuple[ProcessUse, ...] | None) -> Mapping[int, str] | None:
        """Return the tenants by pid; ``None`` if processes exist and none of them can be identified."""
        if processes is None:
            return None
        found = {process.pid: self._tenant_of(process.pid) for process in processes}
        alive = [found[process.pid] for process in processes if not process.ended]
        if alive and all(tenant is None for tenant in alive):
            return None
        return {pid: tenant for pid, tenant in found.items() if tenant}


def processes_of(device: DeviceReading) -> tuple[ProcessUse, ...] | None:
    """Return the processes of a device; ``None`` if their list is missing or incomplete."""
    listed = device.processes
    return None if listed is None or hides_processes(listed, device.values) else listed


def allocatable(gpu: GpuReading) -> tuple[DeviceReading, ...]:
    """Return the allocatable devices of a GPU; for a GPU in MIG mode, only its instances."""
    return gpu.instances if gpu.gpu.mig_enabled else gpu.devices


_CONTAINER = re.compile(r"(?:^|[/:-])([0-9a-f]{64})(?=\.scope|/|$)", re.ASCII)
_LOGIN = re.compile(r"/user-(?P<user>[0-9]{1,10})\.slice(?=/|$)", re.ASCII)
_MANAGER = re.compile(r"user@[0-9]+\.service", re.ASCII)
# Names from systemd-run or a desktop differ at each start, so they do not identify an owner.
_TRANSIENT = re.compile(r"(?:run-[rup]?[0-9a-f]+(?:-i[0-9]+)?|app-.*)\.service", re.ASCII)
_ID_SHOWN = 12
# Services of the driver and the display, if root runs them: they use a GPU on behalf of others.
_INFRASTRUCTURE = frozenset(
    {"Xorg", "Xwayland", "nvidia-cuda-mps", "nvidia-persiste", "nv-hostengine", "nv-fabricmanage", "dcgm-exporter"}
)


class HostUsers(TenantSource):
    """Tracks the holders of devices on a host without a workload manager."""

    manager = "host"
    resource = HOST

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
            name = f"{user}/{name}"  # two users can have units with the same name
        # The key is the name, not the user id, because the name can become known later.
        if name not in self._facts:
            self._enter(name, PodFacts(owner=Owner(namespace=self.manager, kind=kind, name=name, team=user)))
        return name


def tenant_of(process: HostProcess) -> tuple[str, str, int | None]:
    """Return the owner of a process.

    Returns:
        Kind, name and user id. ``Container`` has the first digits of its id as name, ``SystemdUnit`` its name, both
        with the user if they belong to a user. Otherwise ``User`` without a name: the login user or the user of the
        process. The kind is empty if the user is unknown too.
    """
    for line in process.cgroup.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers not in {"", "name=systemd"} and not _CONTAINER.search(path):
            continue  # of cgroup v1, where only systemd's own hierarchy contains every unit
        login = _LOGIN.search(path)
        user_id = int(login["user"]) if login else None
        if container := _CONTAINER.search(path):
            return "Container", container[1][:_ID_SHOWN], user_id  # users choose the names in their slices
        for part in reversed(path.split("/")):
            if part.endswith(".service") and not _MANAGER.fullmatch(part) and not _TRANSIENT.fullmatch(part):
                return "SystemdUnit", part, user_id
        if user_id is not None:
            return "User", "", user_id
    return ("User", "", process.user_id) if process.user_id is not None else ("", "", None)


# A step ("1234.batch") is part of a job. An element of an array ("1234_7") or heterogeneous job is a separate job.
_MAPPED_JOB = re.compile(r"([0-9]{1,18}(?:[_+][0-9]{1,9})?)(?:\.[0-9A-Za-z_.-]{1,64})?", re.ASCII)
_FILE_NAME = re.compile(r"(?P<gpu>[0-9]{1,4})(?:\.(?P<instance>[0-9]{1,4}))?", re.ASCII)
_FILE_LIMIT_BYTES = 65_536
_JOBS_LIMIT = 256

Place = tuple[int, int | None]
"""Index of a GPU, and id of a GPU instance on it; ``None`` for the whole GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """Content of a mapping directory."""

    jobs: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    """Job ids by place; a place without jobs is not listed."""
    doubtful: Mapping[Place, str] = field(default_factory=dict)
    """Reasons by place with a file that cannot be read or parsed."""


def read_mapping(directory: Path) -> Mapped:
    """Read every file named by one number (``0``) or two (``2.1``); each of its lines is a job id.

    Raises:
        OSError: The directory cannot be read.
    """
    jobs: dict[Place, tuple[str, ...]] = {}
    doubtful: dict[Place, str] = {}
    for path in sorted(directory.iterdir()):
        named = _FILE_NAME.fullmatch(path.name)
        if named is None:
            continue  # a backup of an editor, a lock, or a file that is renamed after the write
        place = int(named["gpu"]), int(named["instance"]) if named["instance"] else None
        try:
            found = _jobs(path)
        except FileNotFoundError:
            continue  # the job has ended in the meantime
        except OSError as error:
            doubtful[place] = f"{path}: {error.strerror}; let the agent read it"
            continue
        if found is None:
            doubtful[place] = f"{path}: not job ids, one per line; write SLURM_JOB_ID there and nothing else"
        elif found:
            jobs[place] = found
    return Mapped(jobs=jobs, doubtful=doubtful)


def _jobs(path: Path) -> tuple[str, ...] | None:
    """Return the job ids of a file, each once; ``None`` if a line is not a job id."""
    with path.open("rb") as file:
        text = file.read(_FILE_LIMIT_BYTES + 1)
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    matches = [_MAPPED_JOB.fullmatch(line) for line in lines if line]
    if len(text) > _FILE_LIMIT_BYTES or len(matches) > _JOBS_LIMIT:
        return None
    found = [match[1] for match in matches if match]
    return tuple(dict.fromkeys(found)) if len(found) == len(matches) else None


TEAM_PATIENCE_SECONDS = 60.0
"""Maximum wait for the first process of a mapped job on a GPU, which identifies the user of the job."""

SLUID_PROBLEM = (
    "Slurm names the cgroups of jobs by SLUID, not by job id, so the jobs that run there are not known; "
    "set CgroupJobIdPaths=yes in cgroup.conf (Slurm 26.05.2 or later), or give a --job-mapping-dir"
)

# cgroup v1 .../slurm/uid_1000/job_123/step_0/task_0, v2 .../slurmstepd.scope/job_123/step_0/user/task_0
_JOB = re.compile(r"(?:/uid_(?P<user>[0-9]{1,10}))?/job_(?P<job>[0-9]{1,18})(?=/|$)", re.ASCII | re.MULTILINE)
# Slurm 26.05 on cgroup v2: .../slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0
_SLUID = re.compile(r"slurmstepd\.scope/s[0-9A-Z]{8,32}(?=/|$)", re.ASCII | re.MULTILINE)


class SlurmJobs(TenantSource):
    """Tracks the holders of the devices of a Slurm node.

    Args:
        mapping_dir: Directory of files ``0`` or ``2.1`` (index of a GPU, id of a GPU instance) with a job id per line;
            only these jobs are holders. ``None``: the holders are the jobs whose cgroups have a process on a device.
        proc_root: The host's ``/proc``, or its mount point.
    """

    manager = "slurm"
    unnamed_problem = SLUID_PROBLEM

    def __init__(self, *, mapping_dir: Path | None, proc_root: Path) -> None:
        super().__init__(proc_root)
        self.resource = SLURM if mapping_dir else SLURM_PROCESS
        self._mapping_dir = mapping_dir
        self._mapped: Mapped | None = None
        """Content of the directory; ``None`` while it cannot be read."""
        self._bound: dict[tuple[Place, str], str] = {}
        self._mapped_since: dict[str, float] = {}

    def _observe(self, reading: Reading, now: float, *, due: bool) -> None:
        if self._mapping_dir is None:
            self._observe_processes(reading, now)
            return
        if due:
            self._mapped = self._read_mapping(self._mapping_dir)
        if self._mapped:
            self._publish_mapped(self._mapped, reading, now, due=due)

    def facts(self, namespace: str, pod: str) -> PodFacts | None:
        """Return the owner facts of a job; ``None`` for an unknown job, and for a short time before a job runs."""
        facts = super().facts(namespace, pod)
        since = self._mapped_since.get(pod)
        waits = since is not None and 0 <= (self._read_at or 0.0) - since < TEAM_PATIENCE_SECONDS
        return None if waits and facts and not facts.owner.team else facts

    def _tenant_of(self, pid: int) -> str | None:
        process = self._processes.look(pid)
        if process is None:
            return None
        # Only lines with names from root, because users can name cgroups in their slices like jobs.
        lines = [line for line in process.cgroup.splitlines() if "/user.slice/" not in line]
        match = next(filter(None, map(_JOB.search, lines)), None)
        if match is None and any(map(_SLUID.search, lines)):
            return UNNAMED
        if match is None:
            self._processes.forget(pid)  # slurmstepd may still move it into its job's cgroup
            return NO_POD
        return self._tenant(match["job"], self._team(match["user"], process))

    def _tenant(self, job: str, team: str) -> str:
        """Return the tenant of a job, and store its team when it becomes known."""
        name = f"job-{job}"
        known = self._facts.get(name)
        if known is None or (team and not known.owner.team):
            owner = Owner(namespace=self.manager, kind="SlurmJob", name=job, team=team)
            self._enter(name, PodFacts(owner=owner))
        return name

    def _team(self, named_user: str | None, process: HostProcess) -> str:
        # A process of a prolog or a launcher in the job can belong to root, unlike the job.
        user = int(named_user) if named_user else process.user_id
        return self._users.name_of(user) if user else ""

    def _read_mapping(self, directory: Path) -> Mapped | None:
        try:
            mapped = read_mapping(directory)
        except OSError as error:
            self.errors["mapping_unreadable"] += 1
            self.problem = (
                f"job-mapping directory {directory}: {error.strerror}; have Slurm's prolog make it, "
                "and let the agent read it"
            )
            return None
        if mapped.doubtful:
            self.errors["mapping_garbage"] += len(mapped.doubtful)
        return mapped

    def _publish_mapped(self, mapped: Mapped, reading: Reading, now: float, *, due: bool) -> None:
        tenants = {self._tenant(job, "") for jobs in mapped.jobs.values() for job in jobs}
        self._mapped_since = {tenant: self._mapped_since.get(tenant, now) for tenant in tenants}
        jobs_on, absent = self._jobs_on(mapped.jobs, reading)
        if not all(self._facts[tenant].owner.team for tenant in tenants):
            self._learn_teams(reading, jobs_on)
        held = {uuid: [self._tenant(job, "") for job in jobs] for uuid, jobs in jobs_on.items()}
        if due and absent:
            self.errors["mapping_absent_device"] += len(absent)
        if due:
            self.problem = _problem(mapped, absent)
        self._publish(held, now, [f"mapping file {_shown(place)}" for place in mapped.doubtful])

    def _jobs_on(
        self, mapped: Mapping[Place, Sequence[str]], reading: Reading
    ) -> tuple[dict[str, list[str]], list[str]]:
        """Return the mapped jobs by UUID of their device, and the places without a device.

        A job keeps the GPU that its file named first, because an index can change to another GPU after a loss.
        """
        gpus = {gpu.uuid: gpu for gpu in reading.gpus}
        there = {gpu.gpu.index: gpu for gpu in reading.gpus if gpu.state is not DeviceState.MISSING}
        bound: dict[tuple[Place, str], str] = {}
        jobs_on: dict[str, list[str]] = {}
        absent: dict[str, None] = {}
        for place, jobs in mapped.items():
            for job in jobs:
                gpu = gpus.get(self._bound.get((place, job), "")) or there.get(place[0])
                devices = _parts(gpu, place[1]) if gpu else []
                if gpu and devices:
                    bound[place, job] = gpu.uuid
                else:
                    absent[_shown(place)] = None
                for uuid in devices:
                    jobs_on.setdefault(uuid, []).append(job)
        self._bound = bound
        return jobs_on, list(absent)

    def _learn_teams(self, reading: Reading, jobs_on: Mapping[str, Sequence[str]]) -> None:
        for gpu in reading.gpus:
            for device in allocatable(gpu):
                jobs = jobs_on.get(device.uuid, ())
                for process in processes_of(device) or ():
                    if self._tenant_of(process.pid) == UNNAMED and len(jobs) == 1:
                        found = self._processes.look(process.pid)
                        self._tenant(jobs[0], self._team(None, found) if found else "")


def tenant_source(manager: str, mapping_dir: Path | None, proc_root: Path) -> TenantSource:
    """Return the source of holders on a node with a workload manager: ``slurm`` or ``host``."""
    if manager == SlurmJobs.manager:
        return SlurmJobs(mapping_dir=mapping_dir, proc_root=proc_root)
    return HostUsers(proc_root=proc_root)


def _parts(gpu: GpuReading, instance_id: int | None) -> list[str]:
    """Return the UUIDs of a GPU's devices, or of those in one of its GPU instances."""
    if instance_id is None:
        return [device.uuid for device in gpu.devices]
    return [part.uuid for part in gpu.instances if part.instance.gpu_instance_id == instance_id]


def _shown(place: Place) -> str:
    return str(place[0]) if place[1] is None else f"{place[0]}.{place[1]}"


def _problem(mapped: Mapped, gone: list[str]) -> str:
    faults = list(mapped.doubtful.values())
    if gone:
        faults.append(f"mapping files of devices that are not here: {', '.join(gone)}; have Slurm's epilog remove them")
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{faults[0]}{more}" if faults else ""
