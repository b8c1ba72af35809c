"""The truth of a node for chaos in virtual time: GPUs, pods that come and go, their activity, and the history."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NamedTuple

from exporter.model.devices import DeviceState, Gpu, GpuReading, MigInstance, MigReading, ProcessUse, Reading
from exporter.model.fields import Field
from gpu_simulator.truth import HolderTruth, NodeTruth

NODE = "virtual"
AGENT_POD = ("gpu-cost", "gpu-cost-exporter-x")
MODELS = ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
SLICES: Mapping[str, tuple[int, int]] = {"1g.10gb": (1, 1), "2g.20gb": (2, 2), "3g.40gb": (3, 4), "4g.40gb": (4, 4)}
LAYOUTS = (("1g.10gb",) * 7, ("3g.40gb", "4g.40gb"), ("3g.40gb", "3g.40gb"), ("2g.20gb", "1g.10gb"))
IDLE_WATTS, BUSY_WATTS = 70.0, 630.0
HISTORY_SECONDS = 400.0
LOGS_SECONDS = 10.0
"""Time for which the kubelet keeps the log directory of an ended pod."""
CHANGE_CHANCE = 0.02
"""Chance per second and pod of a new activity."""
REPORTING_CHANCE = 0.8
"""Chance that a GPU has an energy counter, and that its driver reports processes."""

Held = tuple[str, str, str, str]
"""(namespace, pod, uid, device uuid)."""


def place_of(gpu_uuid: str) -> str:
    """Return the PCI bus id of a GPU: its index is a part of its UUID."""
    index = int(gpu_uuid.rpartition("-")[2][:4])
    return f"00000000:{index:02X}:00.0"


class Unit(NamedTuple):
    """A device that one pod can hold: a GPU, an instance, a replica."""

    gpu_uuid: str
    device_uuid: str
    device_id: str
    resource: str
    share: float
    """Share of the physical GPU."""
    of_device: float


@dataclass(slots=True, kw_only=True)
class Board:
    """One physical GPU and its division; ``layout`` is profiles, or replicas, or neither."""

    index: int
    serial: int
    model: str
    layout: tuple[str, ...] = ()
    replicas: int = 1
    generation: int = 0
    state: DeviceState = DeviceState.UP
    counts_energy: bool = True
    reports_processes: bool = True
    energy_joules: float = 0.0
    """Energy since the start of the driver."""
    watts: float = IDLE_WATTS

    @property
    def is_there(self) -> bool:
        """Return whether the driver lists it."""
        return self.state is not DeviceState.MISSING

    @property
    def uuid(self) -> str:
        """Return the UUID of the board; a replacement has another one."""
        return f"GPU-00000000-0000-4000-8000-{self.index:04d}{self.serial:08d}"

    def recover(self) -> None:
        """End a fault."""
        self.state = DeviceState.UP

    def instances(self) -> list[MigInstance]:
        """Return the MIG instances; every reconfiguration makes new ones."""
        return [
            MigInstance(
                uuid=f"MIG-00000000-0000-5000-{self.generation:04d}-{self.serial:04d}{self.index:04d}{number:04d}",
                parent_uuid=self.uuid,
                gpu_instance_id=number + 1,
                compute_instance_id=0,
                profile=profile,
                compute_slices=SLICES[profile][0],
                memory_slices=SLICES[profile][1],
            )
            for number, profile in enumerate(self.layout)
        ]

    def gpu(self) -> Gpu:
        """Return its description, as of a driver."""
        return Gpu(
            uuid=self.uuid,
            index=self.index,
            minor=self.index,
            model=self.model,
            pci_bus_id=place_of(self.uuid),
            mig_enabled=bool(self.layout),
            compute_slices=7,
            memory_slices=8,
            memory_total_bytes=80 << 30,
        )

    def units(self) -> list[Unit]:
        """Return all units of it."""
        uuid, part = self.uuid, 1 / self.replicas
        if self.layout:
            parts = [max(SLICES[profile][0] / 7, SLICES[profile][1] / 8) for profile in self.layout]
            held = [
                (one.uuid, one.uuid, f"nvidia.com/mig-{one.profile}", of_gpu / max(1.0, sum(parts)), 1.0)
                for one, of_gpu in zip(self.instances(), parts, strict=True)
            ]
        elif self.replicas > 1:
            held = [(uuid, f"{uuid}::{n}", "nvidia.com/gpu.shared", part, part) for n in range(self.replicas)]
        else:
            held = [(uuid, uuid, "nvidia.com/gpu", 1.0, 1.0)]
        return [Unit(uuid, *one) for one in held]


@dataclass(slots=True, kw_only=True)
class Pod:
    """One pod on one unit."""

    namespace: str
    name: str
    uid: str
    job: str
    """Controller; empty for a pod without one."""
    team: str
    unit: Unit
    pid: int
    ends_at: float
    level: float
    """Used part of its share, 0..1."""

    @property
    def held(self) -> Held:
        """Return the pod and its device."""
        return self.namespace, self.name, self.uid, self.unit.device_uuid

    @property
    def owner(self) -> tuple[str, str, str, str]:
        """Return the true owner: namespace, kind, name, team."""
        return self.namespace, "Job" if self.job else "Pod", self.job or self.name, self.team


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A time span without changes."""

    start: float
    end: float
    busy: Mapping[str, float]
    """Activity by GPU, 0..1."""
    levels: Mapping[Held, float]
    """Used part of each holder's share."""
    up: frozenset[str]
    """GPUs without a fault."""


@dataclass(slots=True, kw_only=True)
class World:
    """The true state of the node; ``t`` is true time in seconds, which no step of a clock changes."""

    random: Random
    boards: list[Board]
    directory: Path
    churn: float = 0.15
    """Chance per second that a pod starts."""
    life_seconds: float = 60.0
    t: float = 0.0
    pods: dict[tuple[str, str], Pod] = field(default_factory=dict)
    known: dict[str, Pod] = field(default_factory=dict)
    """All pods so far, by UID."""
    started: int = 0
    history: deque[Span] = field(default_factory=deque)
    sampled_busy: dict[str, float] = field(default_factory=dict)
    _logs: deque[tuple[float, Path]] = field(default_factory=deque)
    """Directories of ended pods, and the times at which the kubelet removes them."""

    def __post_init__(self) -> None:
        """Create the folders of the node."""
        for name in ("proc", "pods"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)

    def units(self) -> Iterator[Unit]:
        """Yield all units."""
        return (unit for board in self.boards if board.is_there for unit in board.units())

    def free(self) -> list[Unit]:
        """Return all units that no pod holds."""
        held = {pod.unit.device_id for pod in self.pods.values()}
        return [unit for unit in self.units() if unit.device_id not in held]

    def on(self, board: Board) -> list[Pod]:
        """Return the pods of a board."""
        return [pod for pod in self.pods.values() if pod.unit.gpu_uuid == board.uuid]

    def start(
        self, unit: Unit, *, name: str = "", job: str | None = None, namespace: str = "", life_seconds: float = 0.0
    ) -> Pod:
        """Start a pod on a unit."""
        self.started = number = self.started + 1
        namespace = namespace or self.random.choice(("search", "ads", "vision"))
        job = f"train-{self.random.randrange(8)}" if job is None else job
        pod = Pod(
            namespace=namespace,
            name=name or f"{job or 'lone'}-{number:05d}",
            uid=f"00000000-0000-4000-8000-{number:012d}",
            job=job,
            team=f"team-{namespace}" if job else f"team-{number % 5}",
            unit=unit,
            pid=1000 + number,
            ends_at=self.t + self.random.expovariate(1 / (life_seconds or self.life_seconds)) + 1.0,
            level=self.random.choice((0.0, 1.0, self.random.random())),
        )
        self.pods[namespace, pod.name] = pod
        self.known[pod.uid] = pod
        process = self.directory / "proc" / str(pod.pid)
        process.mkdir()
        (process / "cgroup").write_text(f"0::/kubepods/pod{pod.uid}/{'c' * 64}\n", encoding="ascii")
        (process / "stat").write_text(f"{pod.pid} (python) S {'0 ' * 18}{pod.pid} 0\n", encoding="ascii")
        (self.directory / "pods" / f"{namespace}_{pod.name}_{pod.uid}").mkdir()
        return pod

    def end(self, pod: Pod) -> None:
        """End a pod."""
        del self.pods[pod.namespace, pod.name]
        process = self.directory / "proc" / str(pod.pid)
        for name in ("cgroup", "stat"):
            (process / name).unlink()
        process.rmdir()
        self._logs.append((self.t + LOGS_SECONDS, self.directory / "pods" / f"{pod.namespace}_{pod.name}_{pod.uid}"))

    def evict(self, board: Board) -> None:
        """End every pod of a board."""
        for pod in self.on(board):
            self.end(pod)

    def turn_over(self, *, fast: bool = False) -> None:
        """End, start and change pods up to the present time.

        Args:
            fast: Whether every unit gets pods that live for seconds.
        """
        churn, life_seconds = (0.9, 3.0) if fast else (self.churn, self.life_seconds)
        while self._logs and self._logs[0][0] <= self.t:
            self._logs.popleft()[1].rmdir()
        for pod in [pod for pod in self.pods.values() if pod.ends_at <= self.t]:
            self.end(pod)
        for unit in self.free():
            if self.random.random() < churn:
                self.start(unit, life_seconds=life_seconds)
        for pod in self.pods.values():
            if self.random.random() < CHANGE_CHANCE:
                pod.level = self.random.choice((0.0, 1.0, self.random.random()))

    def pass_time(self, seconds: float) -> None:
        """Advance the time without other changes."""
        levels = {pod.held: pod.level for pod in self.pods.values()}
        busy: dict[str, float] = {}
        for board in self.boards:
            busy[board.uuid] = min(1.0, sum(pod.unit.share * pod.level for pod in self.on(board)))
            board.watts = IDLE_WATTS + BUSY_WATTS * busy[board.uuid]
            board.energy_joules += board.watts * seconds
        up = frozenset(one.uuid for one in self.boards if one.state is DeviceState.UP)
        self.history.append(Span(start=self.t, end=self.t + seconds, busy=busy, levels=levels, up=up))
        self.t += seconds
        while self.history[0].end < self.t - HISTORY_SECONDS:
            self.history.popleft()
        self.sampled_busy = busy

    def spans(self, start: float, end: float) -> Iterator[Span]:
        """Yield the spans of a time, as far as the history has them."""
        return (span for span in self.history if span.end > start + 1e-9 and span.start < end - 1e-9)

    def replace_board(self, board: Board) -> None:
        """Replace a GPU by another one."""
        board.serial += 1
        board.energy_joules = 0.0

    def reading(self, *, wall: float, steady: float) -> Reading:
        """Return the reading of the driver now, over the time since the last change."""
        gpus = tuple(self._reading_of(board) for board in self.boards if board.is_there)
        return Reading(
            source="nvml",
            taken_at_seconds=wall,
            duration_seconds=0.002,
            steady_seconds=steady,
            driver_version="590.48.01",
            gpus=gpus,
        )

    def _reading_of(self, board: Board) -> GpuReading:
        if board.state is not DeviceState.UP:
            return GpuReading(gpu=board.gpu(), state=board.state, reason="gpu_is_lost")
        busy = self.sampled_busy.get(board.uuid, 0.0)
        values: dict[Field, int | float] = {Field.POWER_USAGE: board.watts, Field.FB_USED: 400 if self.on(board) else 0}
        if board.counts_energy:
            values[Field.TOTAL_ENERGY_CONSUMPTION] = board.energy_joules * 1000
        if not board.layout:
            values |= {Field.PROF_GR_ENGINE_ACTIVE: busy, Field.GPU_UTIL: round(busy * 100)}
        instances = tuple(self._instance(board, one) for one in board.instances())
        processes = self._processes(board, board.uuid) if not board.layout else None
        return GpuReading(gpu=board.gpu(), values=values, instances=instances, processes=processes)

    def _instance(self, board: Board, instance: MigInstance) -> MigReading:
        level = sum(pod.level for pod in self.pods.values() if pod.unit.device_uuid == instance.uuid)
        return MigReading(
            instance=instance,
            values={Field.PROF_GR_ENGINE_ACTIVE: level},
            processes=self._processes(board, instance.uuid),
        )

    def _processes(self, board: Board, device_uuid: str) -> tuple[ProcessUse, ...] | None:
        if not board.reports_processes:
            return None
        return tuple(
            ProcessUse(pid=pod.pid, memory_used_bytes=400 << 20, sm_ratio=pod.unit.of_device * pod.level)
            for pod in self.pods.values()
            if pod.unit.device_uuid == device_uuid
        )

    def truth(self) -> NodeTruth:
        """Return the truth for the kubelet's answers."""
        allocatable: dict[str, list[str]] = {}
        for unit in self.units():
            allocatable.setdefault(unit.resource, []).append(unit.device_id)
        holders = tuple(
            HolderTruth(
                namespace=pod.namespace,
                pod=pod.name,
                container="main",
                pod_uid=pod.uid,
                device_uuid=pod.unit.device_uuid,
                resource=pod.unit.resource,
                device_ids=(pod.unit.device_id,),
                share_ratio=pod.unit.share,
                activity_ratio=pod.level * pod.unit.of_device,
                started_seconds=0.0,
            )
            for pod in self.pods.values()
        )
        return NodeTruth(
            at_seconds=self.t,
            node=NODE,
            driver_version="590.48.01",
            holders=holders,
            other_pods=((*AGENT_POD, "agent"),),
            allocatable={name: tuple(ids) for name, ids in allocatable.items()},
        )


def new_world(random: Random, directory: Path) -> World:
    """Return a random node; a device plugin divides all shared GPUs alike."""
    replicas = random.choice((2, 3, 4))
    boards = [
        Board(
            index=index,
            serial=1,
            model=random.choice(MODELS),
            layout=random.choice(LAYOUTS) if kind == "mig" else (),
            replicas=replicas if kind == "shared" else 1,
            counts_energy=random.random() < REPORTING_CHANCE,
            reports_processes=random.random() < REPORTING_CHANCE,
        )
        for index, kind in enumerate(random.choices(("whole", "mig", "shared"), k=random.randint(1, 4)))
    ]
    (directory / "proc" / "2").mkdir(parents=True)
    (directory / "proc" / "2" / "comm").write_text("kthreadd\n", encoding="ascii")
    return World(random=random, boards=boards, directory=directory)
