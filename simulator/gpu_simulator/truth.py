"""Defines the ground truth of a simulated node at a time, which is common to driver, kubelet and /proc.

A scenario is a pure function from seconds since its start to a ``NodeTruth``. The fake driver, the kubelet server, the
fake ``/proc`` and the tests read the same truth, so that tests can compute the error of every figure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from exporter.model.attribution import PodMetadata
from exporter.model.fields import Field


class Fault(StrEnum):
    """Faults of a simulated node."""

    GPU_LOST = "gpu_lost"
    """Every call for the GPU returns NVML_ERROR_GPU_IS_LOST."""
    RESET_REQUIRED = "reset_required"
    UNKNOWN_ERROR = "unknown_error"
    GPU_ABSENT = "gpu_absent"
    """A driver that is initialised during the fault does not enumerate the GPU."""
    DRIVER_UNLOADED = "driver_unloaded"
    LIBRARY_MISMATCH = "library_mismatch"
    LIBRARY_MISSING = "library_missing"
    HANG = "hang"
    """Calls for one GPU, or all calls, do not return during the fault."""
    SLOW = "slow"
    """Every call takes ``seconds``."""
    PROCESSES_LOST = "processes_lost"
    """The driver lists no processes."""
    KUBELET_DOWN = "kubelet_down"
    KUBELET_GARBAGE = "kubelet_garbage"
    KUBELET_HUGE = "kubelet_huge"
    KUBELET_SILENT = "kubelet_silent"
    KUBELET_RATE_LIMIT = "kubelet_rate_limit"
    KUBELET_STARTING = "kubelet_starting"
    """The kubelet restarts with a new socket, and returns no pods and devices during the fault."""
    KUBELET_PARTIAL = "kubelet_partial"
    """The kubelet restarts with a new socket, and lists at most half of the pods with devices, and no other pods. The
    parameter is the duration in seconds after the start; 0: during the fault."""
    API_DOWN = "api_down"
    """The port of the Kubernetes API is closed; open streams break."""
    API_SILENT = "api_silent"
    """The API accepts connections, but sends neither responses nor events."""
    API_CUT = "api_cut"
    """Every stream breaks in the middle of a line."""
    API_SLOW = "api_slow"
    """Every response takes ``seconds``."""
    API_GONE = "api_gone"
    """Resource versions are too old: HTTP 410 for new watches, an ERROR event for open ones."""
    API_TOO_MANY = "api_too_many"
    """HTTP 429 with Retry-After; the parameter is its value in seconds; 0: 1 second."""
    API_UNAUTHORISED = "api_unauthorised"
    """HTTP 401 until the client reads the token file again."""
    API_FORBIDDEN = "api_forbidden"
    API_ERROR = "api_error"
    """HTTP 500 with a body that is not JSON."""
    API_OTHER_NODE_NAME = "api_other_node_name"
    """The API has this node and its pods with another name, as if ``--node-name`` were wrong."""
    API_UPGRADED = "api_upgraded"
    """The API serves ``resource.k8s.io`` only as ``v1``."""
    ENGINE_DOWN = "engine_down"
    """The port of DCGM's host engine is closed; open connections stay broken."""
    ENGINE_HANG = "engine_hang"
    """Calls to the host engine do not return during the fault."""
    ENGINE_SLOW = "engine_slow"
    """Every call to the host engine takes ``seconds``."""
    PROFILING_PAUSED = "profiling_paused"
    """DCGM's profiling is paused: its values are missing for all clients."""


GPU_FAULTS = frozenset({Fault.GPU_LOST, Fault.RESET_REQUIRED, Fault.UNKNOWN_ERROR, Fault.GPU_ABSENT})
"""Faults of a single GPU; other faults affect driver, kubelet, API or host engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Constants of a GPU model; the defaults are those of an H100."""

    name: str
    """Name in NVML, such as ``NVIDIA H100 80GB HBM3``."""
    memory_bytes: int
    memory_reserved_bytes: int
    power_limit_watts: float
    idle_watts: float
    max_sm_clock_mhz: int
    max_mem_clock_mhz: int
    multiprocessors: int
    gpm: bool
    """Whether the model has GPU Performance Monitoring: Hopper and later."""
    mig_profiles: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """Profile name to (NVML GPU-instance profile id, compute slices, memory slices)."""
    compute_slices: int = 0
    memory_slices: int = 0
    not_supported: frozenset[Field] = frozenset()
    """Fields for which this model's driver returns NOT_SUPPORTED."""
    idle_sm_clock_mhz: int = 345
    """SM clock without processes, in MHz."""
    idle_performance_state: int = 0
    vbios: str = "96.00.A5.00.01"
    inforom: tuple[str | None, str | None, str | None, str | None] = ("G520.0200.00.05", "2.1", "7.16", None)
    """Versions of image, OEM, ECC and power; ``None``: N/A in nvidia-smi."""
    pci_device_id: int = 0x233010DE
    pcie_generation: int = 5
    min_power_watts: float = 200.0
    bar1_mib: int = 131072
    celsius: tuple[int, int, int] = (87, 2, 8)
    """Highest operating temperature, and distances to the temperatures of slowdown and shutdown."""
    compute_capability: tuple[int, int] = (9, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessTruth:
    """A process that uses a device; ratios are its part of the device, 0..1."""

    pid: int
    start_ticks: int
    """Field 22 of /proc/<pid>/stat, which shows the reuse of a pid."""
    comm: str
    cgroup: str
    """Text of /proc/<pid>/cgroup."""
    memory_used_bytes: int
    sm_ratio: float = 0.0
    mem_ratio: float = 0.0
    enc_ratio: float = 0.0
    dec_ratio: float = 0.0
    jpg_ratio: float = 0.0
    ofa_ratio: float = 0.0
    namespace: str = ""
    """Namespace of the pod; empty for a process outside pods."""
    pod: str = ""
    container: str = ""
    pod_uid: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Load of a device at a time, as ratios 0..1 of the device."""

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
    """A MIG instance at a time."""

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
    """Integral of ``load``'s ratios since the scenario's start, in seconds; GPM returns differences of it."""
    processes: tuple[ProcessTruth, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Identity and layout of a simulated GPU."""

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
    """A simulated GPU at a time."""

    load: Load = field(default_factory=Load)
    load_integral: Load = field(default_factory=Load)
    """Integral of ``load``'s ratios (and bytes per second) since the scenario's start, in seconds (bytes)."""
    processes: tuple[ProcessTruth, ...] = ()
    power_watts: float = 0.0
    energy_joules: float = 0.0
    """Energy since the load of the driver; monotonic until the next load."""
    gpu_temp_celsius: int = 30
    memory_temp_celsius: int | None = None
    sm_clock_mhz: int = 345
    mem_clock_mhz: int = 2619
    performance_state: int = 0
    clock_event_reasons: int = 0
    overrides: Mapping[Field, int | float | None] = field(default_factory=dict)
    """Values that replace those derived from the load, in units of ``Field``; ``None``: NOT_SUPPORTED."""
    fault: Fault | None = None
    xids: tuple[tuple[float, int, *tuple[int, ...]], ...] = ()
    """Xid events until now as (seconds since the scenario's start, code), oldest first; an event of an instance also
    has the driver's ids of the GPU instance and the compute instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderTruth:
    """A container that holds a device now, and its entry in the kubelet's list."""

    namespace: str
    pod: str
    container: str
    pod_uid: str
    device_uuid: str
    """UUID of the GPU or MIG instance."""
    resource: str
    device_ids: tuple[str, ...]
    """Ids in the kubelet's list, in the form of the scenario's plugin."""
    share_ratio: float
    """Part of the physical GPU."""
    activity_ratio: float
    """Part of the device's activity."""
    listed: bool = True
    """Whether the kubelet lists its device; a fraction of KAI has no id in the list."""
    init: bool = False
    """Whether it is an ordinary init container, which no kubelet lists; its device stays allocated with the pod."""
    started_seconds: float
    """Start in seconds since the scenario's start; can be negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTruth(PodMetadata):
    """A pod in the Kubernetes API, with or without devices; the UID is that of the API object."""

    containers: tuple[str, ...] = ()
    phase: str = "Running"
    """Phase; a kubelet up to 1.33 can still list pods that are ``Succeeded`` or ``Failed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTruth:
    """Objects of the API in addition to the pods of this node."""

    node_labels: Mapping[str, str] = field(default_factory=dict)
    namespaces: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Labels by namespace."""
    slices: tuple[Mapping[str, object], ...] = ()
    """ResourceSlices in the format of ``dra_version``."""
    claims: tuple[Mapping[str, object], ...] = ()
    """Allocated ResourceClaims."""
    dra_version: str = ""
    """``v1``, ``v1beta2`` or ``v1beta1``; empty: a cluster without DRA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmTruth:
    """DCGM's host engine of the node."""

    version: str = "4.6.0"
    profiling_module: bool = True
    """Whether NVIDIA's full package is installed: without it only Hopper and later have profiling fields, from GPM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTruth:
    """A simulated node at a time (``at_seconds`` since the scenario's start)."""

    at_seconds: float
    node: str
    driver_version: str
    gpus: tuple[GpuTruth, ...] = ()
    holders: tuple[HolderTruth, ...] = ()
    other_pods: tuple[tuple[str, str, str], ...] = ()
    """(namespace, pod, container) of containers without devices, which the kubelet also lists."""
    also_listed: tuple[HolderTruth, ...] = ()
    """Containers that the kubelet lists with devices without a hold: finished, monitoring and reservation pods."""
    allocatable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ids of healthy devices by resource, allocated or not."""
    pods: tuple[PodTruth, ...] = ()
    """Pods of the node in the API."""
    cluster: ClusterTruth = field(default_factory=ClusterTruth)
    dcgm: DcgmTruth = field(default_factory=DcgmTruth)
    faults: Mapping[Fault, float] = field(default_factory=dict)
    """Faults of the node with their parameter (seconds for slow ones, else 0)."""
