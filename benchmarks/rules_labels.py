"""Which label sets each metric has on the made-up fleet of the rules benchmark, beside those of its owner."""

import zlib
from collections.abc import Iterator, Mapping

from exporter.metrics.text_format import Metric

ON_INSTANCES = frozenset(
    {
        "gpu_info",
        "gpu_allocation_state",
        "gpu_activity_ratio",
        "gpu_memory_used_bytes",
        "gpu_memory_total_bytes",
        "gpu_unattributed_activity_ratio",
        "gpu_unattributed_memory_used_bytes",
        "gpu_unattributed_processes",
    }
)
"""Device series that MIG instances have too; all others are the board's."""
PER_THOUSAND = {
    "gpu_xid_errors_total": 10,
    "gpu_xid_last_seen_timestamp_seconds": 10,
    "gpu_pod_alerts_off_until_timestamp_seconds": 30,
    "gpu_owner_alerts_off_until_timestamp_seconds": 30,
    "gpu_owner_estimated_gpus": 0,
    "gpu_owner_broken_gpus": 10,
    "gpu_owner_xid_last_seen_timestamp_seconds": 10,
    "gpu_shared_idle_gpus": 10,
    "gpu_pod_unresolved_devices": 0,
    "gpu_exporter_pod_metadata_problems": 0,
    "gpu_retired_pages": 0,
    "gpu_retired_pages_pending": 0,
}
"""Of how many in 1,000 the series is there, where it is not there for all."""
REASONS = {
    "gpu_throttle_seconds_total": (
        *("power", "thermal", "sync_boost", "board_limit", "low_utilisation", "reliability"),
        *("application_clocks", "base_clocks"),
    ),
    "gpu_throttle_active": (
        *("gpu_idle", "clocks_setting", "power_cap", "hw_slowdown", "sync_boost", "sw_thermal", "hw_thermal"),
        *("hw_power_brake", "display_clocks"),
    ),
}
STATES = {
    "gpu_devices": ("present", "expected", "advertised", "allocated"),
    "gpu_allocation_state": ("allocated", "unallocated", "unknown"),
    "gpu_ledger_seconds_total": ("active_unprofiled", "idle"),
    "gpu_ledger_cost_total": ("active_unprofiled", "idle"),
}
VALUES = {
    "type": ("corrected", "uncorrected"),
    "kind": ("crc_flit", "crc_data", "replay", "recovery"),
    "sensor": ("gpu", "memory"),
    "limit": ("slowdown", "shutdown", "max_operating", "memory_max_operating"),
    "currency": ("USD",),
    "source": ("nvml", "kubelet", "kubernetes-api"),
    "generation": ("0", "1", "2"),
    "xid": ("13",),
    "tier": ("application",),
    "part": ("kubelet", "nvml"),
    "window": ("15m", "30m", "1h", "2h", "24h"),
}


def is_there(metric: str, key: str) -> bool:
    """Whether a series that not all have is on this device, pod or owner."""
    return zlib.crc32(f"{metric}/{key}".encode()) % 1000 < PER_THOUSAND.get(metric, 1000)


def own_labels(metric: Metric, known: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Label sets of a metric on one device, pod or owner: every value of the labels that are the metric's own."""
    sets: list[dict[str, str]] = [{}]
    for name in metric.labels:
        if name in known:
            continue
        choices: tuple[str, ...] = VALUES.get(name, ("",))
        if name == "reason":
            choices = REASONS.get(metric.name, ("other",))
        elif name == "state":
            choices = STATES.get(metric.name, ("other",))
        elif name == "limit" and metric.name.endswith("margin_celsius"):
            choices = ("driver",)
        elif name == "source" and metric.name.endswith("activity_ratio"):
            choices = ("gpm",)
        sets = [{**labels, name: value} for labels in sets for value in choices]
    yield from sets
