"""What a scenario says, once it is checked: boards, pods, processes and faults, with times since its start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from exporter.model import Field
from gpu_simulator.activity import Mix, Signal
from gpu_simulator.truth import DcgmTruth, Fault, MigTruth, ModelSpec


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
    """NVIDIA's plugin; a reservation pod has the GPU of those who have fractions of it and no id themselves."""
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
class Window:
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

    window: Window
    values: Mapping[Field, int | float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPlan:
    """One board."""

    index: int
    minor: int
    uuid: str
    pci_bus_id: str
    serial: str
    model_key: str
    model: ModelSpec
    mig_enabled: bool = False
    instances: tuple[MigTruth, ...] = ()
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
    """Of the DRA claim; empty for one of the container's own. Who names the same one shares its devices."""
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
    mix: Mix
    memory_bytes: int
    """On each device, its processes' and what their contexts add."""
    processes: tuple[ProcessPlan, ...]
    init: bool = False
    """An ordinary init container: the kubelet does not list it, and its devices stay taken while the pod lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerPlan:
    """What a pod's controller is."""

    kind: str
    name: str
    api: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """One pod, or a pod that comes again and again. Without a namespace: processes outside every pod."""

    namespace: str
    name: str
    window: Window
    containers: tuple[ContainerPlan, ...]
    linger_seconds: float = 0.0
    """How long its processes outlive it."""
    finished_seconds: float = 0.0
    """How long after its end an old kubelet lists it still."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    owner: OwnerPlan | None = None
    sidecars: tuple[str, ...] = ()
    """Containers without devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Something that goes wrong and comes right again."""

    kind: Fault
    gpu: int | None
    window: Window
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
    """Everything that a scenario says."""

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
