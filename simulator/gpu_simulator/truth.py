"""The ground truth of a simulated node at one instant: what driver, kubelet and /proc must agree on.

A scenario is a pure function from seconds since its start to a ``NodeTruth``; the fake driver, the kubelet
server, the fake ``/proc`` and the tests all read the same one, so accuracy is a number and not an opinion.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from exporter.model import Field, PodMetadata


class Fault(StrEnum):
    """What can be wrong with a simulated GPU or driver at an instant."""

    GPU_LOST = "gpu_lost"
    """Every call on the GPU answers NVML_ERROR_GPU_IS_LOST."""
    RESET_REQUIRED = "reset_required"
    UNKNOWN_ERROR = "unknown_error"
    GPU_ABSENT = "gpu_absent"
    """Not enumerated by a driver that is initialised now."""
    DRIVER_UNLOADED = "driver_unloaded"
    LIBRARY_MISMATCH = "library_mismatch"
    LIBRARY_MISSING = "library_missing"
    HANG = "hang"
    """Calls do not return while the fault lasts: those for one GPU, or all."""
    SLOW = "slow"
    """Every call takes ``seconds``."""
    PROCESSES_LOST = "processes_lost"
    """The driver lists no process, whatever runs."""
    KUBELET_DOWN = "kubelet_down"
    KUBELET_GARBAGE = "kubelet_garbage"
    KUBELET_HUGE = "kubelet_huge"
    KUBELET_SILENT = "kubelet_silent"
    KUBELET_RATE_LIMIT = "kubelet_rate_limit"
    KUBELET_STARTING = "kubelet_starting"
    """The kubelet has started again, on a new socket, and answers without any pod or device while the fault lasts."""
    KUBELET_PARTIAL = "kubelet_partial"
    """The kubelet has started again, on a new socket, and lists no more than half of the pods that have devices, and
    none of the others; its parameter is for how many seconds after the start, while the fault lasts where that is 0."""
    API_DOWN = "api_down"
    """Nothing listens where the Kubernetes API was; open streams break."""
    API_SILENT = "api_silent"
    """Connections are taken, and neither answers nor events come."""
    API_CUT = "api_cut"
    """Every stream breaks off in the middle of a line."""
    API_SLOW = "api_slow"
    """Every answer takes ``seconds``."""
    API_GONE = "api_gone"
    """Resource versions are too old: HTTP 410 for new watches, an ERROR event for open ones."""
    API_TOO_MANY = "api_too_many"
    """HTTP 429 with Retry-After; its parameter is the seconds, 1 where that is 0."""
    API_UNAUTHORISED = "api_unauthorised"
    """HTTP 401, until the token is read again from its file."""
    API_FORBIDDEN = "api_forbidden"
    API_ERROR = "api_error"
    """HTTP 500 with a body that is no JSON."""
    API_OTHER_NODE_NAME = "api_other_node_name"
    """The API has this node and its pods under another name, as where ``--node-name`` is wrong."""
    API_UPGRADED = "api_upgraded"
    """``resource.k8s.io`` is served as ``v1`` only, whatever version the cluster began with."""
    ENGINE_DOWN = "engine_down"
    """Nothing listens where DCGM's host engine was; connections that were open are dead for good."""
    ENGINE_HANG = "engine_hang"
    """Calls to the host engine do not return while the fault lasts."""
    ENGINE_SLOW = "engine_slow"
    """Every call to the host engine takes ``seconds``."""
    PROFILING_PAUSED = "profiling_paused"
    """DCGM's profiling is paused: its values are blank for all clients."""


GPU_FAULTS = frozenset({Fault.GPU_LOST, Fault.RESET_REQUIRED, Fault.UNKNOWN_ERROR, Fault.GPU_ABSENT})
"""Faults of one GPU; all others are of the driver, the kubelet, the API or the host engine as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What is fixed for a GPU model; the defaults are those of an H100."""

    name: str
    """As NVML names it: ``NVIDIA H100 80GB HBM3``."""
    memory_bytes: int
    memory_reserved_bytes: int
    power_limit_watts: float
    idle_watts: float
    max_sm_clock_mhz: int
    max_mem_clock_mhz: int
    multiprocessors: int
    gpm: bool
    """Hopper and later: GPU Performance Monitoring answers."""
    mig_profiles: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Profile name to (NVML GPU-instance profile id, compute slices, memory slices)."""
    compute_slices: int = 0
    memory_slices: int = 0
    not_supported: frozenset[Field] = frozenset()
    """Fields for which this model's driver returns NOT_SUPPORTED."""
    idle_sm_clock_mhz: int = 345
    """Of a GPU without any process."""
    idle_performance_state: int = 0
    vbios: str = "96.00.A5.00.01"
    inforom: tuple[str | None, str | None, str | None, str | None] = ("G520.0200.00.05", "2.1", "7.16", None)
    """Versions of image, OEM, ECC and power; ``None`` is what nvidia-smi shows as N/A."""
    pci_device_id: int = 0x233010DE
    pcie_generation: int = 5
    min_power_watts: float = 200.0
    bar1_mib: int = 131072
    celsius: tuple[int, int, int] = (87, 2, 8)
    """Highest operating temperature, and how far above it the board slows down and shuts down."""
    compute_capability: tuple[int, int] = (9, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTruth:
    """One process that uses a device; ratios are its part of the device, 0..1."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/<pid>/stat: shows that a pid is reused."""
    comm: str
    cgroup: str
    """The whole text of /proc/<pid>/cgroup."""
    memory_used_bytes: int
    sm_ratio: float = 0.0
    mem_ratio: float = 0.0
    enc_ratio: float = 0.0
    dec_ratio: float = 0.0
    jpg_ratio: float = 0.0
    ofa_ratio: float = 0.0
    namespace: str = ""
    """Empty for a process outside every pod."""
    pod: str = ""
    container: str = ""
    pod_uid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a device is at an instant; ratios 0..1 of the device."""

    engine: float = 0.0
    sm: float = 0.0
    occupancy: float = 0.0
    tensor: float = 0.0
    dram: float = 0.0
    fp16: float = 0.0
    fp32: float = 0.0
    fp64: float = 0.0
    integer: float = 0.0
    utilisation: float = 0.0
    """NVML's GPU utilisation (kernel-resident time)."""
    memory_copy: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    jpeg: float = 0.0
    optical_flow: float = 0.0
    pcie_tx_bytes_per_second: float = 0.0
    pcie_rx_bytes_per_second: float = 0.0
    nvlink_tx_bytes_per_second: float = 0.0
    nvlink_rx_bytes_per_second: float = 0.0
    c2c_tx_bytes_per_second: float = 0.0
    c2c_rx_bytes_per_second: float = 0.0
    memory_used_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MigTruth:
    """One MIG instance at an instant."""

    uuid: str
    gpu_instance_id: int
    compute_instance_id: int
    profile: str
    profile_id: int
    placement_start: int
    compute_slices: int
    memory_slices: int
    memory_bytes: int
    multiprocessors: int
    load: Load = field(default_factory=Load)
    load_integral: Load = field(default_factory=Load)
    """Integral of ``load``'s ratios since the scenario's start, in seconds; GPM answers differences of it."""
    processes: tuple[ProcessTruth, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Identity and layout of one simulated GPU."""

    index: int
    minor: int
    uuid: str
    pci_bus_id: str
    serial: str
    model: ModelSpec
    mig_enabled: bool = False
    instances: tuple[MigTruth, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTruth(Board):
    """One simulated GPU at an instant."""

    load: Load = field(default_factory=Load)
    load_integral: Load = field(default_factory=Load)
    """Integral of ``load``'s ratios (and bytes per second) since the scenario's start, in seconds (bytes)."""
    processes: tuple[ProcessTruth, ...] = ()
    power_watts: float = 0.0
    energy_joules: float = 0.0
    """Since the driver was loaded; monotonic while it stays loaded."""
    gpu_temp_celsius: int = 30
    memory_temp_celsius: int | None = None
    sm_clock_mhz: int = 345
    mem_clock_mhz: int = 2619
    performance_state: int = 0
    clock_event_reasons: int = 0
    overrides: Mapping[Field, int | float | None] = field(default_factory=dict)
    """Values that replace what would follow from the load, in ``Field`` units; ``None`` = NOT_SUPPORTED."""
    fault: Fault | None = None
    xids: tuple[tuple[float, int, *tuple[int, ...]], ...] = ()
    """All Xid events up to now as (seconds since the scenario's start, code), oldest first; an event of a part has the
    driver's ids of its GPU instance and compute instance behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderTruth:
    """A container that truly holds a device now, and how the kubelet lists it."""

    namespace: str
    pod: str
    container: str
    pod_uid: str
    device_uuid: str
    """Of the GPU or MIG instance."""
    resource: str
    device_ids: tuple[str, ...]
    """As the kubelet lists them, in whatever form the scenario's plugin uses."""
    share_ratio: float
    """Part of the physical GPU."""
    activity_ratio: float
    """Its part of the device's activity."""
    listed: bool = True
    """Whether the kubelet lists its device; one with a fraction of KAI's has no id there."""
    init: bool = False
    """Whether it is an ordinary init container, which no kubelet lists; its device stays taken while the pod lives."""
    started_seconds: float
    """Since the scenario's start; may be negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTruth(PodMetadata):
    """A pod as the Kubernetes API knows it, with devices or without; the UID is that of the API object."""

    containers: tuple[str, ...] = ()
    phase: str = "Running"
    """``Succeeded`` and ``Failed`` are finished: a kubelet up to 1.33 may list them still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTruth:
    """Objects of the API in addition to the pods of this node."""

    node_labels: Mapping[str, str] = field(default_factory=dict)
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels by namespace."""
    slices: tuple[Mapping[str, object], ...] = ()
    """ResourceSlices as the API of ``dra_version`` shows them."""
    claims: tuple[Mapping[str, object], ...] = ()
    """ResourceClaims, allocated."""
    dra_version: str = ""
    """``v1``, ``v1beta2`` or ``v1beta1``; empty: a cluster without DRA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmTruth:
    """The node's DCGM host engine."""

    version: str = "4.6.0"
    profiling_module: bool = True
    """Whether NVIDIA's full package is there: without it only Hopper and later have profiling fields, by GPM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTruth:
    """A simulated node at an instant (``at_seconds`` since the scenario's start)."""

    at_seconds: float
    node: str
    driver_version: str
    gpus: tuple[GpuTruth, ...] = ()
    holders: tuple[HolderTruth, ...] = ()
    other_pods: tuple[tuple[str, str, str], ...] = ()
    """(namespace, pod, container) of containers without devices, which the kubelet lists too."""
    also_listed: tuple[HolderTruth, ...] = ()
    """Containers that the kubelet lists with devices and that hold none: finished, monitoring and reservation pods."""
    allocatable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Resource to healthy device ids, allocated or not."""
    pods: tuple[PodTruth, ...] = ()
    """Every pod of the node that the API knows."""
    cluster: ClusterTruth = field(default_factory=ClusterTruth)
    dcgm: DcgmTruth = field(default_factory=DcgmTruth)
    faults: Mapping[Fault, float] = field(default_factory=dict)
    """Faults of the node as a whole, with a parameter (seconds for those that are slow, else 0)."""
