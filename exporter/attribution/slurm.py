"""Attributes devices to Slurm jobs, by the job-mapping directory of a prolog or by the cgroups of processes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exporter.attribution.host import (
    SLURM,
    SLURM_PROCESS,
    UNNAMED,
    HostProcess,
    HostUsers,
    TenantSource,
    allocatable,
    processes_of,
)
from exporter.attribution.processes import NO_POD
from exporter.model import DeviceState, GpuReading, Owner, PodFacts, Reading

# A step after the id ("1234.batch") is part of the job; a part of an array ("1234_7") or heterogeneous job is a job.
_MAPPED_JOB = re.compile(r"([0-9]{1,18}(?:[_+][0-9]{1,9})?)(?:\.[0-9A-Za-z_.-]{1,64})?", re.ASCII)
_FILE_NAME = re.compile(r"(?P<gpu>[0-9]{1,4})(?:\.(?P<instance>[0-9]{1,4}))?", re.ASCII)
_FILE_LIMIT_BYTES = 65_536
_JOBS_LIMIT = 256

Place = tuple[int, int | None]
"""Index of a GPU, and id of a GPU instance on it or ``None`` for the whole GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """Content of a mapping directory."""

    jobs: Mapping[Place, tuple[str, ...]] = field(default_factory=dict)
    """Job ids by place; a place without jobs is not listed."""
    doubtful: Mapping[Place, str] = field(default_factory=dict)
    """Reasons by place with a file that cannot be read or parsed."""


def read(directory: Path) -> Mapped:
    """Read every file named by one number (``0``) or two (``2.1``); each of its lines is a job id.

    Raises:
        OSError: The directory cannot be read.
    """
    jobs: dict[Place, tuple[str, ...]] = {}
    doubtful: dict[Place, str] = {}
    for path in sorted(directory.iterdir()):
        named = _FILE_NAME.fullmatch(path.name)
        if named is None:
            continue  # an editor's backup, a lock, or a file that is written first and renamed later
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
    """Return the ids, each once; ``None`` if a line is not a job id."""
    with path.open("rb") as file:
        text = file.read(_FILE_LIMIT_BYTES + 1)
    lines = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    matches = [_MAPPED_JOB.fullmatch(line) for line in lines if line]
    if len(text) > _FILE_LIMIT_BYTES or len(matches) > _JOBS_LIMIT:
        return None
    found = [match[1] for match in matches if match]
    return tuple(dict.fromkeys(found)) if len(found) == len(matches) else None


TEAM_PATIENCE_SECONDS = 60.0
"""Maximum time for which the owner of a mapped job waits for its first process on a GPU, which identifies its user."""

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
        mapping_dir: Directory of files ``0`` or ``2.1`` (index of a GPU, id of a GPU instance) with a job's id per
            line; only it names holders then. ``None``: every job with a process on a device in its cgroup.
        proc_root: The host's ``/proc``, or where it is mounted.
    """

    manager = "slurm"

    def __init__(self, *, mapping_dir: Path | None, proc_root: Path) -> None:
        super().__init__(SLURM_PROCESS, proc_root, unnamed_problem=SLUID_PROBLEM)
        self._mapping_dir = mapping_dir
        self._mapped = Mapped()
        self._bound: dict[tuple[Place, str], str] = {}
        self._mapped_since: dict[str, float] = {}
        self._readable = False
        self._now = 0.0

    def observe(self, reading: Reading, now: float) -> None:
        """Derive the holders; read the mapping again after some seconds."""
        self._now = now
        due = self._is_due(now)
        if self._mapping_dir is None:
            self._observe_processes(reading, now)
            return
        if due:
            self._read_mapping(self._mapping_dir)
        if self._readable:
            self._publish_mapped(reading, now, due=due)

    def facts(self, namespace: str, pod: str) -> PodFacts | None:
        """Return the owner facts of a job; ``None`` for an unknown job, and for a short time until a job runs."""
        facts = super().facts(namespace, pod)
        since = self._mapped_since.get(pod)
        waits = since is not None and 0 <= self._now - since < TEAM_PATIENCE_SECONDS
        return None if waits and facts and not facts.owner.team else facts

    def _tenant_of(self, pid: int) -> str | None:
        process = self._processes.look(pid)
        if process is None:
            return None
        # Only lines that root must have named: below a user's slice, users can name cgroups like jobs.
        lines = [line for line in process.cgroup.splitlines() if "/user.slice/" not in line]
        match = next(filter(None, map(_JOB.search, lines)), None)
        if match is None and any(map(_SLUID.search, lines)):
            return UNNAMED
        if match is None:
            self._processes.forget(pid)  # slurmstepd may still move it into its job's cgroup
            return NO_POD
        return self._tenant(match["job"], self._team(match["user"], process))

    def _tenant(self, job: str, team: str) -> str:
        """Return the tenant of a job, with its team from the time when that is first known."""
        name = f"job-{job}"
        known = self._facts.get(name)
        if known is None or (team and not known.owner.team):
            owner = Owner(namespace=self.manager, kind="SlurmJob", name=job, team=team)
            self._enter(name, PodFacts(owner=owner))
        return name

    def _team(self, named_user: str | None, process: HostProcess) -> str:
        # A process of a prolog or a launcher within the job can belong to root; the job does not.
        user = int(named_user) if named_user else process.user_id
        return self._users.name_of(user) if user else ""

    def _read_mapping(self, directory: Path) -> None:
        try:
            self._mapped = read(directory)
        except OSError as error:
            self._readable = False
            self.errors["mapping_unreadable"] += 1
            self.problem = (
                f"job-mapping directory {directory}: {error.strerror}; have Slurm's prolog make it, "
                "and let the agent read it"
            )
            return
        self._readable = True
        if self._mapped.doubtful:
            self.errors["mapping_garbage"] += len(self._mapped.doubtful)

    def _publish_mapped(self, reading: Reading, now: float, *, due: bool) -> None:
        tenants = {self._tenant(job, "") for jobs in self._mapped.jobs.values() for job in jobs}
        self._mapped_since = {tenant: self._mapped_since.get(tenant, now) for tenant in tenants}
        jobs_on, absent = self._jobs_on(reading)
        if not all(self._facts[tenant].owner.team for tenant in tenants):
            self._learn_teams(reading, jobs_on)
        held = {uuid: [self._tenant(job, "") for job in jobs] for uuid, jobs in jobs_on.items()}
        if due and absent:
            self.errors["mapping_absent_device"] += len(absent)
        if due:
            self.problem = _problem(self._mapped, absent)
        doubtful = [f"mapping file {_shown(place)}" for place in self._mapped.doubtful]
        self._publish(held, SLURM, now, doubtful)

    def _jobs_on(self, reading: Reading) -> tuple[dict[str, list[str]], list[str]]:
        """Return the mapped jobs by UUID of their device, and the places without a device.

        A job keeps the GPU that its file named first: an index can pass to another GPU when one is lost.
        """
        gpus = {gpu.gpu.uuid: gpu for gpu in reading.gpus}
        there = {gpu.gpu.index: gpu for gpu in reading.gpus if gpu.state is not DeviceState.MISSING}
        bound: dict[tuple[Place, str], str] = {}
        jobs_on: dict[str, list[str]] = {}
        absent: dict[str, None] = {}
        for place, jobs in self._mapped.jobs.items():
            for job in jobs:
                gpu = gpus.get(self._bound.get((place, job), "")) or there.get(place[0])
                devices = _parts(gpu, place[1]) if gpu else []
                if gpu and devices:
                    bound[place, job] = gpu.gpu.uuid
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
