"""Values of a checked scenario: boards, pods, processes and faults, with times since its start."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from exporter.model import Field, PodMetadata
from gpu_simulator.activity import Signal, Vector
from gpu_simulator.models import MIB
from gpu_simulator.truth import Board, DcgmTruth, Fault


class IdForm(StrEnum):
    """Which device plugin the node runs, so which ids the kubelet lists."""

    UUID = "uuid"
    """NVIDIA's plugin: ``GPU-...``, ``MIG-...``, with ``::N`` for replicas."""
    LEGACY_MIG = "legacy-mig"
    """NVIDIA's plugin before driver 470: ``MIG-GPU-.../gi/ci``."""
    GKE = "gke"
    """``nvidiaN``, ``nvidiaN/giK``, ``nvidiaN/vgpuM``; N is the minor number."""
    HAMI = "hami"
    """``GPU-...-N``: placeholders, the truth is in an annotation."""
    VOLCANO = "volcano-vgpu"
    """As HAMi's, under resources of volcano's and with an annotation of its own."""
    KAI = "kai"
    """NVIDIA's plugin; a reservation pod has the GPU for the pods with fractions, which have no id."""
    DRA = "dra"
    """No device plugin: entries of claims, ``gpu-<minor>`` and ``gpu-<minor>-mig-...``."""


class DraMig(StrEnum):
    """How NVIDIA's DRA driver comes to MIG instances."""

    STATIC = "static"
    """They were made beforehand: a slice knows their UUIDs."""
    DYNAMIC = "dynamic"
    """They are made when they are claimed: a slice has every possible one, without a UUID."""


class DraVersion(StrEnum):
    """Versions of ``resource.k8s.io``."""

    V1 = "v1"
    V1BETA2 = "v1beta2"
    V1BETA1 = "v1beta1"


class MigStrategy(StrEnum):
    """How NVIDIA's plugin names MIG instances."""

    MIXED = "mixed"
    SINGLE = "single"
    NONE = "none"


class Runtime(StrEnum):
    """Whose cgroup paths the node's processes have."""

    CONTAINERD = "containerd"
    CRIO = "crio"
    CGROUPFS = "cgroupfs"
    CGROUP_V1 = "cgroup-v1"
    MIXED = "mixed"


class Sharing(StrEnum):
    """How several containers come to one device."""

    NONE = "none"
    TIME_SLICING = "time-slicing"
    MPS = "mps"
    FRACTION = "fraction"
    """Parts as the pods declare them: HAMi, volcano-vgpu, KAI, and consumable capacity of DRA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioWindow:
    """When something is there: from ``start`` to ``end``, once or again every so often."""

    start_seconds: float = 0.0
    """May be negative: it was there before the scenario began."""
    end_seconds: float | None = None
    every_seconds: float | None = None

    def occurrence(self, t: float, linger_seconds: float = 0.0) -> tuple[int, float] | None:
        """Number of the occurrence that is there at ``t`` and seconds since it began; ``None`` if none is."""
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
    """Values that replace what would follow from the load, while the window lasts."""

    window: ScenarioWindow
    values: Mapping[Field, int | float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan(Board):
    """One board, and how it is shared."""

    sharing: Sharing = Sharing.NONE
    replicas: int = 1
    """Of the GPU, or of each of its MIG instances."""
    splits: int = 1
    """With fractions: how many placeholders the plugin advertises for the GPU."""
    overrides: tuple[Override, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """One process that a container keeps on each of its devices."""

    comm: str
    memory_bytes: int
    part: float
    """Of the container's load on that device; a container's parts sum to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A device that a container holds."""

    gpu: int
    instance: int | None = None
    """Position in the GPU's MIG layout."""
    replicas: tuple[int, ...] = ()
    """Replica numbers on a shared device; empty where the device is not shared."""
    scale: float = 1.0
    """How much of the container's activity reaches this device: 0 is a GPU that was asked for and never used."""
    memory_bytes: int | None = None
    """Declared part of the device's memory; ``None``: all of it, or by ``fraction``."""
    cores: int = 0
    """Declared part of its compute in percent; 0 is not limited."""
    fraction: float | None = None
    """Declared part of the device, of KAI's."""
    claim_name: str = ""
    """Of the DRA claim; empty for one of the container's own. Containers that name the same claim share its devices."""
    admin: bool = False
    """A DRA claim that monitors and does not hold."""
    extended: bool = False
    """A DRA claim made for a pod that asks for ``nvidia.com/gpu``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPlan:
    """One container and what it does on each of its devices."""

    name: str
    claims: tuple[Claim, ...]
    signal: Signal
    mix: Vector
    memory_bytes: int
    """On each device, its processes' and what their contexts add."""
    processes: tuple[ProcessPlan, ...]
    init: bool = False
    """An ordinary init container: the kubelet does not list it, and its devices stay taken while the pod lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan(PodMetadata):
    """One pod, or a pod that comes again and again. Without a namespace: processes outside every pod."""

    uid: str = ""
    """Of each occurrence; always empty here."""
    window: ScenarioWindow
    containers: tuple[ContainerPlan, ...]
    linger_seconds: float = 0.0
    """How long its processes outlive it."""
    finished_seconds: float = 0.0
    """How long after its end an old kubelet lists it still."""
    sidecars: tuple[str, ...] = ()
    """Containers without devices."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        """Devices of all its containers."""
        return tuple(claim for container in self.containers for claim in container.claims)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Something that goes wrong and comes right again."""

    kind: Fault
    gpu: int | None
    window: ScenarioWindow
    parameter: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class XidPlan:
    """A driver error, once or again and again."""

    gpu: int
    code: int
    at_seconds: float
    every_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """How the node's devices are advertised."""

    ids: IdForm = IdForm.UUID
    mig_strategy: MigStrategy = MigStrategy.MIXED
    rename_shared: bool = False
    """Shared devices as ``nvidia.com/gpu.shared``."""
    dra_mig: DraMig = DraMig.STATIC


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """A whole scenario."""

    name: str
    """Of the scenario."""
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
    """Pods without devices."""
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels by namespace."""
    node_labels: Mapping[str, str] = field(default_factory=dict)
    dra_version: str = ""
    """Of ``resource.k8s.io``; empty: a cluster without."""
    dcgm: DcgmTruth = field(default_factory=DcgmTruth)


_ROUNDING = 1e-9
WHOLE_PERCENT = 100
_Slot = tuple[int, int | None, int]
"""GPU, position in its MIG layout, replica."""
_Conflict = tuple[int, str]
"""Number of the pod, and what it cannot have."""


def conflicts(pods: Sequence[PodPlan], gpus: Sequence[GpuPlan], ids: IdForm) -> Iterator[_Conflict]:
    """Yield every pod that cannot have its devices together with the pods before it."""
    if ids is IdForm.KAI:
        yield from _kai_conflicts(pods, gpus)
    yield from _claim_conflicts(pods)
    yield from _device_conflicts(pods, gpus)
    for gpu in gpus:
        if gpu.sharing is Sharing.FRACTION:
            yield from _part_conflicts([(number, pod) for number, pod in enumerate(pods) if _claims_on(pod, gpu)], gpu)


def _kai_conflicts(pods: Sequence[PodPlan], gpus: Sequence[GpuPlan]) -> Iterator[_Conflict]:
    """One container of a pod can have parts, and all alike: there is one annotation for them."""
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
    """A container that names a DRA claim gets all of its devices, so that all must list the same ones."""
    devices: dict[tuple[str, str], set[Claim]] = {}
    for number, pod in enumerate(pods):
        for container in pod.containers:
            for name in {claim.claim_name for claim in container.claims} - {""}:
                listed = {replace(claim, scale=1.0) for claim in container.claims if claim.claim_name == name}
                if devices.setdefault((pod.namespace, name), listed) != listed:
                    yield number, f"has other devices of claim {name!r} than another container; allowed: the same"


def _device_conflicts(pods: Sequence[PodPlan], gpus: Sequence[GpuPlan]) -> Iterator[_Conflict]:
    """Two pods cannot have the same whole device, or the same replica, at the same time, but by one claim."""
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
    """Return the claims of a pod that hold a part of a GPU."""
    return [claim for claim in pod.claims if claim.gpu == gpu.index and not claim.admin]


def _part_conflicts(numbered: Sequence[tuple[int, PodPlan]], gpu: GpuPlan) -> Iterator[_Conflict]:
    """Parts of one GPU cannot be more than it has at any time; recurring pods count as always there."""
    for position, (number, pod) in enumerate(numbered):
        pods = [other for _, other in numbered[: position + 1]]
        # The most is in use when a pod comes: at the pod's own start, or at that of one before it.
        for start in {other.window.start_seconds for other in pods}:
            there = [
                other for other in pods if other.window.every_seconds is not None or other.window.occurrence(start)
            ]
            told = _excess(there, gpu) if pod in there else ""
            if told:
                yield number, f"GPU {gpu.index} would have {told} in use at the same time"
                break


def _excess(pods: Sequence[PodPlan], gpu: GpuPlan) -> str:
    """Return what is too much of a GPU; containers that name one DRA claim have one part together."""
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
    """Return whether two lifetimes can meet; of recurring ones only the plain case of never-ending is sure."""
    if one.every_seconds is not None or other.every_seconds is not None:
        return False
    starts = max(one.start_seconds, other.start_seconds)
    ends = [window.end_seconds for window in (one, other) if window.end_seconds is not None]
    return all(starts < end for end in ends)
