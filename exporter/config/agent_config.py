"""What the agent is told to do, after flags, environment, file and defaults are settled."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Settled configuration of the agent; every value is valid. Made by ``load_agent``."""

    listen_host: str
    """Empty: every interface, IPv4 and IPv6."""
    listen_port: int
    """0: any free port."""
    web_config: Path | None
    """``None``: plain HTTP, for everybody."""
    release_seconds: float
    sample_interval_seconds: float
    source: Literal["auto", "nvml", "dcgm"]
    """``auto`` is NVML, and DCGM beside it where there is an address; the others are one alone."""
    dcgm_address: str
    """``host:port``, ``unix:///path`` or ``embedded``; empty where DCGM is not used."""
    idle_threshold_ratio: float
    attribution: bool
    kubelet_socket: str
    kubelet_interval_seconds: float
    attribution_expiry_seconds: float
    gpu_resources: tuple[str, ...]
    """Resource names and glob patterns."""
    node_name: str
    proc_root: Path
    pod_log_root: Path
    workload_manager: Literal["kubernetes", "slurm", "host"]
    job_mapping_dir: Path | None
    kube_metadata: bool
    kubeconfig: Path | None
    """``None``: the service account's, else the usual files."""
    kube_start_jitter_seconds: float
    team_keys: tuple[str, ...]
    cost_labels: tuple[str, ...]
    namespace_teams: bool
    pod_labels: tuple[str, ...]
    pod_annotations: tuple[str, ...]
    reservation_namespaces: tuple[str, ...]
    collectors: Path | None
    dcgm_names: Literal["legacy", "4.9"]
    hostname_label: str
    """Empty: no such label."""
    dcgm_pod_uid: bool
    dcgm_old_labels: bool
    dcgm_model_hyphens: bool
    xid_count_window_seconds: float
    clock_events_window_seconds: float
    series_limit: int
    linger_seconds: float
    price_book: Path | None
    """For ``price_book.load``: ``None`` is the bundled list prices, ``none`` no prices at all."""
    instance_type: str
    """Of this node, as are the next two; empty where not known."""
    capacity_type: Literal["on-demand", "spot", "reserved", ""]
    region: str
    state_dir: Path | None
    lock_dir: Path | None
    """Of the host, with the lock of the ledger's writer; ``None`` for a simulated node without one."""
    state_interval_seconds: float
    simulate: str | None
    simulate_hour_seconds: float
    log_format: Literal["text", "json"]
    log_level: Literal["debug", "info", "warning", "error"]
    warnings: tuple[str, ...] = ()
    """One line each: what was accepted and does not mean what it may seem to mean; to be logged at the start."""
