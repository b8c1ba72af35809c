"""Defines a checked scenario: boards, pods, processes and faults, with times since its start."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from exporter.model.attribution import PodMetadata
from exporter.model.fields import Field
from gpu_simulator.activity import Signal, Vector
from gpu_simulator.models import MIB
from gpu_simulator.truth import Board, DcgmTruth, Fault


class IdForm(StrEnum):
    """Device plugin of the node, which determines the ids in the kubelet's list."""

    UUID = "uuid"
    """NVIDIA's plugin: ``GPU-...``, ``MIG-...``, with ``::N`` for replicas."""
    LEGACY_MIG = "legacy-mig"
    """NVIDIA's plugin before driver 470: ``MIG-GPU-.../gi/ci``."""
    GKE = "gke"
    """``nvidiaN``, ``nvidiaN/giK``, ``nvidiaN/vgpuM``; N is the minor number."""
    HAMI = "hami"
    """``GPU-...-N``: placeholders; an annotation has the devices."""
    VOLCANO = "volcano-vgpu"
    """Like HAMi, with resources and annotation of volcano."""
    KAI = "kai"
    """NVIDIA's plugin; a reservation pod holds the GPU for the pods with fractions, which have no id."""
    DRA = "dra"
    """No device plugin: devices of claims, ``gpu-<minor>`` and ``gpu-<minor>-mig-...``."""


class DraMig(StrEnum):
    """Creation of MIG instances by NVIDIA's DRA driver."""

    STATIC = "static"
    """Instances exist before they are claimed: a slice has their UUIDs."""
    DYNAMIC = "dynamic"
    """Instances are created when they are claimed: a slice has every possible one, without a UUID."""


class DraVersion(StrEnum):
    """Versions of ``resource.k8s.io``."""

    V1 = "v1"
    V1BETA2 = "v1beta2"
    V1BETA1 = "v1beta1"


class MigStrategy(StrEnum):
    """Names of MIG instances in NVIDIA's plugin."""

    MIXED = "mixed"
    SINGLE = "single"
    NONE = "none"


class Runtime(StrEnum):
    """Container runtime, which determines the cgroup paths of the node's processes."""

    CONTAINERD = "containerd"
    CRIO = "crio"
    CGROUPFS = "cgroupfs"
    CGROUP_V1 = "cgroup-v1"
    MIXED = "mixed"


class Sharing(StrEnum):
    """Sharing of a device by several containers."""

    NONE = "none"
    TIME_SLICING = "time-slicing"
    MPS = "mps"
    FRACTION = "fraction"
    """Parts declared by the pods: HAMi, volcano-vgpu, KAI, and consumable capacity of DRA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioWindow:
    """Time from ``start`` to ``end``, once or repeated."""

    start_seconds: float = 0.0
    """Start in seconds since the scenario's start; can be negative."""
    end_seconds: float | None = None
    every_seconds: float | None = None

    def occurrence(self, t: float, linger_seconds: float = 0.0) -> tuple[int, float] | None:
        """Return number and elapsed seconds of the occurrence at ``t``; ``None`` without one."""
        elapsed = t - self.start_seconds
        if elapsed < 0:
            return None
        number = 0
        if self.every_seconds is not None:
            number, elapsed = int(elapsed // self.every_seconds), elapsed % self.every_seconds
        if self.end_seconds is not None and elapsed >= self.end_seconds - self.start_seconds + linger_seconds:
            return None
        return number, elapsed


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """Values that replace those derived from the load during the window."""

    window: ScenarioWindow
    values: Mapping[Field, int | float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan(Board):
    """A board and its sharing."""

    sharing: Sharing = Sharing.NONE
    replicas: int = 1
    """Number of replicas of the GPU, or of each of its MIG instances."""
    splits: int = 1
    """With fractions: number of placeholders that the plugin advertises for the GPU."""
    overrides: tuple[Override, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """A process of a container on each of its devices."""

    comm: str
    memory_bytes: int
    part: float
    """Part of the container's load on the device; the parts of a container sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A device that a container holds."""

    gpu: int
    instance: int | None = None
    """Position in the GPU's MIG layout."""
    replicas: tuple[int, ...] = ()
    """Replica numbers on a shared device; empty if the device is not shared."""
    scale: float = 1.0
    """Factor of the container's activity for this device; 0: a GPU that is requested and not used."""
    memory_bytes: int | None = None
    """Declared part of the device's memory; ``None``: all memory, or that of ``fraction``."""
    cores: int = 0
    """Declared part of its compute in percent; 0: no limit."""
    fraction: float | None = None
    """Declared part of the device in KAI."""
    claim_name: str = ""
    """Name of a DRA claim, whose devices all containers with the name share; empty: the container has its own claim."""
    admin: bool = False
    """Whether the DRA claim only monitors."""
    extended: bool = False
    """Whether the DRA claim is created for a pod that requests ``nvidia.com/gpu``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPlan:
    """A container and its use of each of its devices."""

    name: str
    claims: tuple[Claim, ...]
    signal: Signal
    mix: Vector
    memory_bytes: int
    """Memory of its processes on each device, including their contexts."""
    processes: tuple[ProcessPlan, ...]
    init: bool = False
    """Whether it is an ordinary init container, which no kubelet lists; its devices stay allocated with the pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan(PodMetadata):
    """A pod, or a recurring pod. Without a namespace: processes outside pods."""

    uid: str = ""
    """Always empty: each occurrence has its own UID."""
    window: ScenarioWindow
    containers: tuple[ContainerPlan, ...]
    linger_seconds: float = 0.0
    """Seconds for which its processes continue after its end."""
    finished_seconds: float = 0.0
    """Seconds for which an old kubelet lists it after its end."""
    sidecars: tuple[str, ...] = ()
    """Containers without devices."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Return the devices of all its containers."""
        return tuple(claim for container in self.containers for claim in container.claims)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """A temporary fault."""

    kind: Fault
    gpu: int | None
    window: ScenarioWindow
    parameter: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class XidPlan:
    """A driver error, once or repeated."""

    gpu: int
    code: int
    at_seconds: float
    every_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """Advertisement of the node's devices."""

    ids: IdForm = IdForm.UUID
    mig_strategy: MigStrategy = MigStrategy.MIXED
    rename_shared: bool = False
    """Whether shared devices have the name ``nvidia.com/gpu.shared``."""
    dra_mig: DraMig = DraMig.STATIC


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """A scenario."""

    name: str
    """Name of the scenario."""
    node: str
    driver_version: str = "590.48.01"
    description: str = ""
    runtime: Runtime = Runtime.CONTAINERD
    plugin: Plugin = field(default_factory=Plugin)
    gpus: tuple[GpuPlan, ...] = ()
    pods: tuple[PodPlan, ...] = ()
    faults: tuple[FaultPlan, ...] = ()
    xids: tuple[XidPlan, ...] = ()
    other_pods: int = 0
    """Number of pods without devices."""
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels by namespace."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    dra_version: str = ""
    """Version of ``resource.k8s.io``; empty: a cluster without DRA."""
    dcgm: DcgmTruth = field(default_factory=DcgmTruth)


_ROUNDING = 1e-9
WHOLE_PERCENT = 100
_Slot = tuple[int, int | None, int]
"""GPU, position in its MIG layout, replica."""
_Conflict = tuple[int, str]
"""Index of the pod, and its conflict."""


def conflicts(pods: Sequence[PodPlan], gpus: Sequence[GpuPlan], ids: IdForm) -> Iterator[_Conflict]:
    """Yield the conflicts of pods with the pods before them."""
    if ids is IdForm.KAI:
        yield from _kai_conflicts(pods, gpus)
    yield from _claim_conflicts(pods)
    yield from _device_conflicts(pods, gpus)
    for gpu in gpus:
        if gpu.sharing is Sharing.FRACTION:
            yield from _part_conflicts([(number, pod) for number, pod in enumerate(pods) if _claims_on(pod, gpu)], gpu)


def _kai_conflicts(pods: Sequence[PodPlan], gpus: Sequence[GpuPlan]) -> Iterator[_Conflict]:
    """Yield pods with different parts, because a pod has one annotation for the equal parts of one container."""
    for number, pod in enumerate(pods):
        parts = {
            (container.name, claim.fraction, claim.memory_bytes)
            for container in pod.containers
            for claim in container.claims
            if gpus[claim.gpu].sharing is Sharing.FRACTION
        }
        if len(parts) > 1:
            yield number, "are different parts, or of different containers; allowed: parts of the same size"


def _claim_conflicts(pods: Sequence[PodPlan]) -> Iterator[_Conflict]:
    """Yield containers of a DRA claim that list different devices, because each container gets all of them."""
    devices: dict[tuple[str, str], set[Claim]] = {}
    for number, pod in enumerate(pods):
        for container in pod.containers:
            for name in {claim.claim_name for claim in container.claims} - {""}:
                listed = {replace(claim, scale=1.0) for claim in container.claims if claim.claim_name == name}
                if devices.setdefault((pod.namespace, name), listed) != listed:
                    yield number, f"has other devices of claim {name!r} than another container; allowed: the same"


def _device_conflicts(pods: Sequence[PodPlan], gpus: Sequence[GpuPlan]) -> Iterator[_Conflict]:
    """Yield pods that hold the same device or replica at the same time, without a common claim."""
    taken: dict[_Slot, list[tuple[PodPlan, str]]] = defaultdict(list)
    for number, pod in enumerate(pods):
        for slot, claim in _slots(pod, gpus):
            others = [
                other
                for other, name in taken[slot]
                if (other is pod or _overlap(other.window, pod.window))
                and not (claim.claim_name and name == claim.claim_name and other.namespace == pod.namespace)
            ]
            if others:
                gpu, instance, replica = slot
                what = f"GPU {gpu}" + (f" MIG {instance}" if instance is not None else "")
                what += f" replica {replica}" if gpus[gpu].replicas > 1 else ""
                yield number, f"{what} is held by {others[0].namespace}/{others[0].name} at the same time"
            taken[slot].append((pod, claim.claim_name))


def _slots(pod: PodPlan, gpus: Sequence[GpuPlan]) -> Iterator[tuple[_Slot, Claim]]:
    for claim in pod.claims:
        if gpus[claim.gpu].sharing is not Sharing.FRACTION and not claim.admin:
            for number in claim.replicas or (0,):
                yield (claim.gpu, claim.instance, number), claim


def _claims_on(pod: PodPlan, gpu: GpuPlan) -> list[Claim]:
    """Return the claims of a pod for a part of a GPU."""
    return [claim for claim in pod.claims if claim.gpu == gpu.index and not claim.admin]


def _part_conflicts(numbered: Sequence[tuple[int, PodPlan]], gpu: GpuPlan) -> Iterator[_Conflict]:
    """Yield pods with which the parts of a GPU exceed it; recurring pods count as permanent."""
    for position, (number, pod) in enumerate(numbered):
        pods = [other for _, other in numbered[: position + 1]]
        # The maximum is at the start of a pod: that of this pod, or of one before it.
        for start in {other.window.start_seconds for other in pods}:
            there = [
                other for other in pods if other.window.every_seconds is not None or other.window.occurrence(start)
            ]
            told = _excess(there, gpu) if pod in there else ""
            if told:
                yield number, f"GPU {gpu.index} would have {told} in use at the same time"
                break


def _excess(pods: Sequence[PodPlan], gpu: GpuPlan) -> str:
    """Return the exceeded resources of a GPU; containers of one DRA claim share a part."""
    found = [(pod.namespace, claim) for pod in pods for claim in _claims_on(pod, gpu)]
    named = {(namespace, claim.claim_name): claim for namespace, claim in found if claim.claim_name}
    claims = [*(claim for _, claim in found if not claim.claim_name), *named.values()]
    room = gpu.model.memory_bytes
    memory = sum(claim.memory_bytes or (round(claim.fraction * room) if claim.fraction else room) for claim in claims)
    if memory > room * (1 + _ROUNDING) + len(claims):
        return f"{memory // MIB} of {room // MIB} MiB"
    cores = sum(claim.cores for claim in claims)
    return f"{cores} of {WHOLE_PERCENT} % of its cores" if cores > WHOLE_PERCENT else ""


def _overlap(one: ScenarioWindow, other: ScenarioWindow) -> bool:
    """Return whether two lifetimes can overlap; for recurring ones only if the other one never ends."""
    if one.every_seconds is not None or other.every_seconds is not None:
        return False
    starts = max(one.start_seconds, other.start_seconds)
    ends = [window.end_seconds for window in (one, other) if window.end_seconds is not None]
    return all(starts < end for end in ends)
