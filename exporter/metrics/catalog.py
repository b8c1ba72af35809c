"""Defines every metric of the exporter's own with its full name; docs/metrics.md is generated from it."""

import math
from collections import Counter
from collections.abc import Mapping

from exporter.metrics.text_format import Metric
from exporter.metrics.text_format import plain as _own
from exporter.model.attribution import Owner, PodFacts
from exporter.model.fields import Field
from exporter.model.snapshot import PodUse, Snapshot

FOR_GOOD_SECONDS = 253_402_300_799
"""Unix time that means "permanent", since JSON has no infinity: 9999-12-31T23:59:59Z."""

EXPORTED_PREFIXES = ("label_", "annotation_")
"""Prefixes of the labels with exported labels and annotations of a pod; no other label has them."""


def owner_of(use: PodUse) -> Owner:
    """Return the owner of a holder, without cost labels; only the namespace until the workload is known."""
    return use.facts.owner.without_cost_labels if use.facts else Owner(namespace=use.holder.namespace)


def alerts_off_until_seconds(facts: PodFacts | None) -> float | None:
    """Return the Unix time until which alerts are off, at most ``FOR_GOOD_SECONDS``; ``None`` if they are on."""
    return shown_until_seconds(facts.opt_out_until_seconds if facts else None)


def shown_until_seconds(until: float | None) -> float | None:
    """Return the end of an opt-out, at most ``FOR_GOOD_SECONDS``; ``None`` without one."""
    return None if until is None or math.isnan(until) else min(until, FOR_GOOD_SECONDS)


def problems(snapshot: Snapshot) -> dict[str, int]:
    """Return the number of pods by problem in their labels and annotations; a pod with several devices counts once."""
    pods = {
        (problem, use.holder.namespace, use.holder.pod)
        for view in snapshot.devices
        for use in view.pods
        if use.facts
        for problem in use.facts.problems
    }
    return Counter(problem for problem, _, _ in sorted(pods))


DEVICE_LABELS = ("node", "gpu", "uuid", "gpu_instance", "mig_profile", "model")
"""Labels of a device: ``gpu`` is the index, ``uuid`` that of the GPU or MIG instance. A GPU has no MIG labels."""
POD_LABELS = ("pod_namespace", "pod_name", "container_name", "pod_uid")
"""Labels of a holder; ``pod_uid`` if known. ``namespace``, ``pod``, ``container`` would collide with target labels."""
OWNER_LABELS = ("node", "workload_namespace", "workload_kind", "workload_name", "team", "cost_labels", "model", "mode")
"""Labels of a ledger's account; mode: exclusive, mig, shared. Unknown parts of the owner are absent."""

WORKLOAD_LABELS = ("node", "workload_namespace", "workload_kind", "workload_name", "team")
"""Labels of an owner of holders; a pod with an unknown workload is its own owner, of kind Pod."""
INFO_LABELS = (
    *("resource", "share_mode", "attribution_source", "share_estimated"),
    *(*WORKLOAD_LABELS[1:], "queue", "workload_class"),
)
"""Labels of a holder's info series: resource, mode, source, and owner."""
POOL_LABELS = ("node", "model", "instance_type", "capacity_type")


def _device(name: str, *labels: str) -> Metric:
    """Return a metric of a GPU or MIG instance."""
    return _own(name, *DEVICE_LABELS, *labels)


def _pod(name: str, *labels: str, prefixes: tuple[str, ...] = ()) -> Metric:
    """Return a metric of a container that holds a device."""
    return _own(name, *DEVICE_LABELS, *POD_LABELS, *labels, prefixes=prefixes)


def _owner(name: str, *labels: str) -> Metric:
    """Return a metric of a ledger."""
    return _own(name, "ledger", *OWNER_LABELS, *labels)


def _workload(name: str, *labels: str) -> Metric:
    """Return a metric of the devices that an owner holds and uses."""
    return _own(name, *WORKLOAD_LABELS, *labels)


GPU_INFO = _device("gpu_info", "parent_uuid", "pci_bus_id", "minor", "driver_version").meaning(
    "Identity of a GPU or MIG instance; always 1. parent_uuid is set on MIG instances; minor is the number of the "
    "device node."
)
GPU_UP = _device("gpu_up").meaning(
    "1 while a physical GPU answers its driver, else 0. Absent while unknown: DCGM is the only source and gives no "
    "values, or the agent's loop fails."
)
GPU_DEVICES = _own("gpu_devices", "node", "state").meaning(
    "Physical GPUs of the node by state: present (enumerated and not lost), expected, advertised (healthy for "
    "the kubelet), allocated (with a holder, visible to the driver or not). Absent while unknown."
)
GPU_NODE_INFO = _own("gpu_node_info", "node", "instance_type", "capacity_type", "region", "gpu_product").meaning(
    "Facts for prices, from the node's labels or from flags; always 1, absent if nothing is known. gpu_product "
    "is from the label; model is from the driver."
)
GPU_ALLOCATION_STATE = _device("gpu_allocation_state", "state").meaning(
    "1 on the current state: allocated, unallocated, or unknown because the kubelet does not answer."
)
GPU_SHARE_RATIO = _device("gpu_share_ratio").meaning(
    "A MIG instance's part of its physical GPU, 0-1, held or free; a whole GPU has no series."
)
GPU_ACTIVITY_RATIO = _device("gpu_activity_ratio", "source", "measured_by").meaning(
    "Activity of the device over the last sample, 0-1: the busiest of its compute, video, JPEG, flow and copy engines. "
    "source is the measure (engine, utilisation, codec, copy), measured_by the library (nvml, dcgm); absent if "
    "unmeasured."
)
GPU_EFFECTIVE_RATIO = _device("gpu_effective_ratio").meaning(
    "Use of the resource nearest to its limit over the last sample, 0-1 and at most gpu_activity_ratio: an upper bound "
    "on useful work. Absent if a resource of the device was not measured."
)
GPU_BOTTLENECK = _device("gpu_bottleneck", "resource").meaning(
    "Part of the profiled active time of the last 15 minutes in which a kind of resource was the limit: compute, "
    "memory, transfer, video, or starved (none near its limit). Sums to 1; absent without profiled active time."
)
GPU_MEMORY_USED_BYTES = _device("gpu_memory_used_bytes").meaning(
    "Framebuffer memory in use, in bytes to the MiB, without the driver's own. A partitioned GPU has a series in "
    "addition to those of its instances: filter gpu_instance before summing."
)
GPU_MEMORY_TOTAL_BYTES = _device("gpu_memory_total_bytes").meaning(
    "Framebuffer memory of the device, in bytes to the MiB; free, used and reserved."
)
GPU_POWER_WATTS = _device("gpu_power_watts").meaning("Power drawn by the whole board, in watts, from NVML or DCGM.")
GPU_ENERGY_JOULES_TOTAL = _device("gpu_energy_joules_total").meaning(
    "Energy used by the whole board since its driver was loaded, in joules, as the device counts it; restarts at "
    "0 with the driver."
)
GPU_XID_ERRORS_TOTAL = _device("gpu_xid_errors_total", "xid").meaning(
    "Xid events (driver errors) since this agent started, by code; a code appears with its first event."
)
GPU_XID_LAST_SEEN_TIMESTAMP_SECONDS = _device("gpu_xid_last_seen_timestamp_seconds", "xid", "tier").meaning(
    "Unix time of the newest event of an Xid code, in seconds. tier: critical (reset or reboot), application (a "
    "program's error), warning, none (nothing to do)."
)
GPU_THROTTLE_SECONDS_TOTAL = _device("gpu_throttle_seconds_total", "reason").meaning(
    "Time with reduced clocks, by reason, in seconds since the driver was loaded; sw_thermal, hw_thermal and "
    "hw_power_brake from driver 590 on."
)
GPU_THROTTLE_ACTIVE = _device("gpu_throttle_active", "reason").meaning(
    "1 for each reason that reduces clocks at the sample, else 0."
)
GPU_THERMAL_THROTTLE_RATIO = _device("gpu_thermal_throttle_ratio").meaning(
    "Part of the last 5 minutes in which heat reduced the clocks, 0-1: from the driver's counter of that time, "
    "or from its flags at each sample if it has none."
)
GPU_CLOCK_EVENTS_TOTAL = _device("gpu_clock_events_total", "event").meaning(
    "Number of times that an event began to reduce clocks since this agent started, by event, from samples. "
    "Events that are active at the start are not counted."
)
GPU_RECOVERY_ACTION = _device("gpu_recovery_action").meaning(
    "Action that the driver requests: 0 nothing, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset, 5 "
    "recover the IMEX domain, 6 bus reset, 7 system reboot."
)
GPU_ECC_ERRORS_TOTAL = _device("gpu_ecc_errors_total", "type").meaning(
    "ECC errors since the driver was loaded, by type: corrected, uncorrected. Absent without ECC."
)
GPU_REMAPPED_ROWS = _device("gpu_remapped_rows", "type").meaning(
    "Memory rows replaced by spare ones, over the board's life, for errors of the type."
)
GPU_ROW_REMAP_PENDING = _device("gpu_row_remap_pending").meaning(
    "1 while the replacement of a memory row waits for a reset of the GPU, else 0."
)
GPU_ROW_REMAP_FAILURE = _device("gpu_row_remap_failure").meaning(
    "1 if a memory row could not be replaced: exchange the board; else 0."
)
GPU_RETIRED_PAGES = _device("gpu_retired_pages", "cause").meaning(
    "Memory pages taken out of use over the board's life, by cause: single_bit, double_bit. Boards before Ampere."
)
GPU_RETIRED_PAGES_PENDING = _device("gpu_retired_pages_pending").meaning(
    "More than 0 while pages wait for a reboot to be taken out of use; before Ampere."
)
GPU_NVLINK_ERRORS_TOTAL = _device("gpu_nvlink_errors_total", "kind").meaning(
    "Errors over all NVLinks since the driver was loaded, by kind: crc_flit, crc_data, replay, recovery up to NVLink "
    "4; receive, integrity, recovery, recovery_failed from NVLink 5."
)
GPU_PCIE_REPLAYS_TOTAL = _device("gpu_pcie_replays_total").meaning(
    "PCIe packets that had to be sent again, since the driver was loaded."
)
GPU_TEMPERATURE_CELSIUS = _device("gpu_temperature_celsius", "sensor").meaning(
    "Temperature in degrees Celsius by sensor: gpu, memory."
)
GPU_TEMPERATURE_LIMIT_CELSIUS = _device("gpu_temperature_limit_celsius", "limit").meaning(
    "The driver's limits: slowdown, shutdown, max_operating, memory_max_operating. Hopper may have none."
)
GPU_TEMPERATURE_MARGIN_CELSIUS = _device("gpu_temperature_margin_celsius").meaning(
    "Degrees below the GPU's highest operating temperature; may be negative."
)
GPU_MEMORY_TEMPERATURE_MARGIN_CELSIUS = _device("gpu_memory_temperature_margin_celsius", "limit").meaning(
    "Degrees below the memory's highest operating temperature; may be negative. limit: driver (from the driver), "
    "assumed (the driver has none: 95)."
)
GPU_NVLINK_TRANSMIT_BYTES_TOTAL = _device("gpu_nvlink_transmit_bytes_total").meaning(
    "Payload bytes sent over all NVLinks since the driver was loaded."
)
GPU_NVLINK_RECEIVE_BYTES_TOTAL = _device("gpu_nvlink_receive_bytes_total").meaning(
    "Payload bytes received over all NVLinks since the driver was loaded."
)
GPU_UNATTRIBUTED_ACTIVITY_RATIO = _device("gpu_unattributed_activity_ratio").meaning(
    "Activity of the device that belongs to no listed pod, 0-1 of the device; absent while unknown."
)
GPU_UNATTRIBUTED_MEMORY_USED_BYTES = _device("gpu_unattributed_memory_used_bytes").meaning(
    "Memory of processes that belong to no listed pod, in bytes."
)
GPU_UNATTRIBUTED_PROCESSES = _device("gpu_unattributed_processes").meaning(
    "Processes on the device that belong to no listed pod."
)
GPU_PROFILING_STATE = _device("gpu_profiling_state", "state").meaning(
    "1 on the current state of DCGM's profiling of a physical GPU: running, paused, unsupported, no_module, "
    "no_permission, refused. Absent without DCGM, or while it does not answer."
)
GPU_HOURLY_PRICE = _device("gpu_hourly_price", "currency", "price_source").meaning(
    "Current price of one hour of the whole physical GPU; a holder's part is its gpu_pod_share_ratio. "
    "price_source has price book and row; absent if no row matches."
)

GPU_POD_INFO = _pod("gpu_pod_info", *INFO_LABELS, prefixes=EXPORTED_PREFIXES).meaning(
    "A container that holds a device, with its owner; always 1. share_mode: exclusive, mig, shared; "
    "attribution_source: device-plugin, dra, annotation, job-mapping, process; share_estimated: true if the "
    "number of replicas is an estimate."
)
GPU_POD_ALERTS_OFF_UNTIL_TIMESTAMP_SECONDS = _pod("gpu_pod_alerts_off_until_timestamp_seconds").meaning(
    "Unix time until which waste alerts are off for the pod, from its annotation, in seconds; 253402300799 (the "
    "end of the year 9999) is permanent."
)
GPU_POD_SHARE_RATIO = _pod("gpu_pod_share_ratio").meaning(
    "The holder's part of the physical GPU, 0-1; parts of one GPU never sum to more than 1."
)
GPU_POD_ACTIVITY_RATIO = _pod("gpu_pod_activity_ratio", "source").meaning(
    "The holder's part of the device's activity, 0-1 of the device; parts and the unattributed rest sum to "
    "gpu_activity_ratio. source estimated: most of it is divided by share, because of containers of one pod, "
    "MPS, or missing process data."
)
GPU_POD_EFFECTIVE_RATIO = _pod("gpu_pod_effective_ratio").meaning(
    "gpu_effective_ratio of a holder that has its GPU or MIG instance alone; absent where holders share one."
)
GPU_POD_IDLE_FOR_SECONDS = _pod("gpu_pod_idle_for_seconds").meaning(
    "Measured idle seconds of the holder since its activity last reached the idle threshold; absent while it may "
    "be either. Unmeasured time does not count; more than 5 minutes of it restart the value at 0."
)
GPU_POD_AGE_SECONDS = _pod("gpu_pod_age_seconds").meaning(
    "Seconds since the container was first seen to hold the device."
)
GPU_POD_MEMORY_USED_BYTES = _pod("gpu_pod_memory_used_bytes").meaning(
    "Device memory used by the holder, in bytes; absent while unknown."
)
GPU_POD_ALLOCATED_SECONDS_TOTAL = _pod("gpu_pod_allocated_seconds_total").meaning(
    "GPU-seconds that the container has held, weighted by its share: active + idle + unknown. Stays for --linger after "
    "its end."
)
GPU_POD_ACTIVE_SECONDS_TOTAL = _pod("gpu_pod_active_seconds_total").meaning(
    "Active GPU-seconds of the container, weighted by its share and activity."
)
GPU_POD_IDLE_SECONDS_TOTAL = _pod("gpu_pod_idle_seconds_total").meaning(
    "Idle GPU-seconds of the container, weighted by its share: the part that its activity leaves."
)
GPU_POD_UNKNOWN_SECONDS_TOTAL = _pod("gpu_pod_unknown_seconds_total").meaning(
    "GPU-seconds of the container without measured activity: neither active nor idle."
)
GPU_POD_ENERGY_JOULES_TOTAL = _pod("gpu_pod_energy_joules_total").meaning(
    "The container's part of the GPU's energy, in joules: of the idle part by share, of the rest by active seconds. "
    "Absent where energy was never measured."
)
GPU_POD_COST_TOTAL = _pod("gpu_pod_cost_total", "currency").meaning(
    "Cost of the container, at the price of each second; absent if no second had a price."
)
GPU_POD_UNRESOLVED_DEVICES = _own(
    "gpu_pod_unresolved_devices", "node", "pod_namespace", "pod_name", "container_name", "resource", "reason"
).meaning("Devices in doubt, by reason: listed with the container and unknown here, or used by the pod and not listed.")

GPU_LEDGER_SECONDS_TOTAL = _owner("gpu_ledger_seconds_total", "state").meaning(
    "GPU-seconds of an owner, by share and state: active_effective, active_ineffective, active_unprofiled (together "
    "weighted by activity), idle (the rest), unknown (activity not measured). Over all owners and states, Unallocated "
    "and Unattributed included: the node's GPUs times the elapsed time."
)
GPU_LEDGER_ENERGY_JOULES_TOTAL = _owner("gpu_ledger_energy_joules_total").meaning(
    "The owner's part of the GPUs' energy, in joules: of the idle part by share, of the rest by active seconds. Absent "
    "where energy was never measured."
)
GPU_LEDGER_COST_TOTAL = _owner("gpu_ledger_cost_total", "currency", "state").meaning(
    "Cost of an owner's GPU-seconds, by state, at the price of each second; absent if none had a price."
)
GPU_LEDGER_UNPRICED_SECONDS_TOTAL = _owner("gpu_ledger_unpriced_seconds_total").meaning(
    "Allocated GPU-seconds of an owner without a price; no cost includes them. Absent while there are none."
)
GPU_LEDGER_CREATED_TIMESTAMP_SECONDS = _own("gpu_ledger_created_timestamp_seconds", "ledger", "node").meaning(
    "Unix time at which a ledger began, in seconds; all of its series began at 0 then."
)

GPU_OWNER_GPUS = _workload("gpu_owner_gpus").meaning(
    "GPUs that the owner holds now, by share: a MIG instance or a replica is a part of one."
)
GPU_OWNER_ESTIMATED_GPUS = _workload("gpu_owner_estimated_gpus").meaning(
    "The part of gpu_owner_gpus with only estimated activity (divided by share) within the last 15 minutes. No "
    "other gpu_owner_ figure of activity includes it. Absent if 0."
)
GPU_OWNER_ACTIVE_GPU_SECONDS = _workload("gpu_owner_active_gpu_seconds", "window").meaning(
    "Active GPU-seconds of the owner over the window that ends now, ended pods included: 15m, 1h, and the window "
    "of its policy (batch 30m, interactive 2h, inference 24h); all windows if the owner holds nothing now. "
    "Absent if nothing was measured."
)
GPU_OWNER_MEASURED_GPU_SECONDS = _workload("gpu_owner_measured_gpu_seconds", "window").meaning(
    "Active and idle GPU-seconds of the owner over the window: the measured part of gpu_owner_gpus times the "
    "window. Absent if 0 and the owner holds nothing, or only estimated GPUs."
)
GPU_OWNER_PROFILED_GPU_SECONDS = _workload("gpu_owner_profiled_gpu_seconds", "window").meaning(
    "The part of gpu_owner_active_gpu_seconds in which all resources of the device were measured. Absent if 0."
)
GPU_OWNER_EFFECTIVE_GPU_SECONDS = _workload("gpu_owner_effective_gpu_seconds", "window").meaning(
    "The effective part of gpu_owner_profiled_gpu_seconds: active time times the use of the resource nearest to its "
    "limit. Absent with it."
)
GPU_OWNER_BOTTLENECK_GPU_SECONDS = _workload("gpu_owner_bottleneck_gpu_seconds", "window", "resource").meaning(
    "gpu_owner_profiled_gpu_seconds by the kind of resource that was the limit, as in gpu_bottleneck; they sum to it. "
    "Only for the window 1h. Absent if 0."
)
GPU_OWNER_RESOURCE_USE_GPU_SECONDS = _workload("gpu_owner_resource_use_gpu_seconds", "window", "resource").meaning(
    "Use of each kind of resource (compute, memory, transfer, video) in GPU-seconds at its limit; divided by "
    "resource=profiled, gpu_owner_profiled_gpu_seconds again: mean use while active. The same of multiprocessors with "
    "work: sm, by sm_profiled; absent if not measured. Only for the window 1h."
)
GPU_OWNER_UNDERUSED_GPUS = _workload("gpu_owner_underused_gpus").meaning(
    "GPUs held now with own activity below 10 % over 15 minutes or below 5 % over an hour. Absent if 0."
)
GPU_OWNER_UNUSED_GPUS = _workload("gpu_owner_unused_gpus", "window").meaning(
    "GPUs held now without activity (below 0.1 %) over the window (1h, and the window of the policy) with 90 % "
    "of it measured; for 24h by gpu_pod_idle_for_seconds. Absent if 0."
)
GPU_OWNER_ACTIVE_GPUS = _workload("gpu_owner_active_gpus").meaning(
    "GPUs held now with own activity of at least 5 % over 15 minutes; absent if no activity was measured."
)
GPU_OWNER_IDLE_FOR_SECONDS = _workload("gpu_owner_idle_for_seconds").meaning(
    "Shortest gpu_pod_idle_for_seconds of the owner's devices, in seconds."
)
GPU_OWNER_AGE_SECONDS = _workload("gpu_owner_age_seconds").meaning(
    "Longest gpu_pod_age_seconds of the owner's devices, in seconds."
)
GPU_OWNER_POLICY = _workload("gpu_owner_policy", "policy").meaning(
    "Class by which alerts judge the owner; always 1. If its pods differ, the most patient one: reserved, "
    "inference, interactive, default, batch."
)
GPU_OWNER_ALERTS_OFF_UNTIL_TIMESTAMP_SECONDS = _workload("gpu_owner_alerts_off_until_timestamp_seconds").meaning(
    "Latest gpu_pod_alerts_off_until_timestamp_seconds of the owner's pods, in seconds; absent without one."
)
GPU_OWNER_COST_PER_HOUR = _workload("gpu_owner_cost_per_hour", "currency").meaning(
    "Current price of an hour of the owner's GPUs. GPUs without a price are left out."
)
GPU_OWNER_IDLE_COST_PER_HOUR = _workload("gpu_owner_idle_cost_per_hour", "currency").meaning(
    "The part of gpu_owner_cost_per_hour for the idle part of the last 15 minutes. GPUs without measured "
    "activity are left out."
)
GPU_OWNER_BROKEN_GPUS = _workload("gpu_owner_broken_gpus").meaning(
    "Physical GPUs that do not answer or have a critical fault, of those that the owner holds or held within an "
    "hour. An Xid counts for 40 minutes, a memory error for 45. Absent if 0."
)
GPU_OWNER_XID_LAST_SEEN_TIMESTAMP_SECONDS = _workload(
    "gpu_owner_xid_last_seen_timestamp_seconds", "gpu", "uuid", "pod_namespace", "pod_name", "xid"
).meaning(
    "Unix time of the newest event of an Xid of tier application, in seconds, with each pod that held the device "
    "within 10 minutes. Absent 10 minutes after the event."
)
GPU_POOL_GPUS = _own("gpu_pool_gpus", *POOL_LABELS).meaning(
    "Physical GPUs of the node by model, including those that are down."
)
GPU_POOL_UNALLOCATED_GPUS = _own("gpu_pool_unallocated_gpus", *POOL_LABELS).meaning(
    "GPUs of the pool without a holder, by share; absent while the allocation of all of them is unknown."
)
GPU_POOL_UNALLOCATED_COST_PER_HOUR = _own("gpu_pool_unallocated_cost_per_hour", *POOL_LABELS, "currency").meaning(
    "Current price of an hour of gpu_pool_unallocated_gpus. GPUs without a price are left out."
)
GPU_POOL_UNPRICED_GPUS = _own("gpu_pool_unpriced_gpus", *POOL_LABELS).meaning(
    "Physical GPUs of the pool with unknown price. Absent without prices."
)
GPU_SHARED_IDLE_GPUS = _own("gpu_shared_idle_gpus", "node", "gpu", "uuid", "gpu_instance").meaning(
    "Held part of a shared device that was idle (below 5 %) for 2 h and has only estimated activity per holder. "
    "Absent otherwise, and if a holder is of class inference or reserved, has opted out or is in a system "
    "namespace."
)

BUILD_INFO = _own("gpu_exporter_build_info", "version", "python").meaning(
    "Version of this agent and of its Python; always 1."
)
SIMULATED = _own("gpu_exporter_simulated").meaning("1 if every GPU and pod on this page is simulated, else 0.")
SOURCE_UP = _own("gpu_exporter_source_up", "source").meaning(
    "1 while a source of readings (nvml, dcgm), of holders (kubelet, slurm, host) or of owners (kubernetes-api) works."
)
DCGM_INFO = _own("gpu_exporter_dcgm_info", "version").meaning(
    "Version of the DCGM host engine; always 1, absent while no engine answers."
)
ERRORS_TOTAL = _own("gpu_exporter_errors_total", "part", "reason").meaning(
    "Errors since the start, by part and reason."
)
SAMPLE_DURATION_SECONDS = _own("gpu_exporter_sample_duration_seconds").meaning(
    "Duration of the newest sample in the driver, in seconds."
)
TICK_DURATION_SECONDS = _own("gpu_exporter_tick_duration_seconds").meaning(
    "Duration of the tick that made the shown snapshot, in seconds, pauses for scrapes included."
)
SNAPSHOT_TIMESTAMP_SECONDS = _own("gpu_exporter_snapshot_timestamp_seconds").meaning(
    "Unix time of the shown snapshot, in seconds."
)
SAMPLE_TIMESTAMP_SECONDS = _own("gpu_exporter_sample_timestamp_seconds").meaning(
    "Unix time of the newest reading of the driver, in seconds."
)
ATTRIBUTION_TIMESTAMP_SECONDS = _own("gpu_exporter_attribution_timestamp_seconds").meaning(
    "Unix time of the kubelet's last good answer, in seconds."
)
METADATA_TIMESTAMP_SECONDS = _own("gpu_exporter_metadata_timestamp_seconds").meaning(
    "Unix time of the Kubernetes API's last sign of life (a list, an event, a bookmark), in seconds."
)
POD_METADATA_PROBLEMS = _own("gpu_exporter_pod_metadata_problems", "reason").meaning(
    "Pods that hold a device and have invalid labels or annotations of ours, by reason."
)
WORKER_RESTARTS_TOTAL = _own("gpu_exporter_worker_restarts_total", "source").meaning(
    "Restarts of the child process that reads a source (nvml, dcgm)."
)
DROPPED_SERIES_TOTAL = _own("gpu_exporter_dropped_series_total").meaning(
    "Pod series left out of rendered pages because of the series limit."
)
UNPRICED_DEVICES = _own("gpu_exporter_unpriced_devices").meaning(
    "Physical GPUs with unknown price: their use has no cost. Absent without prices."
)
CONSERVATION_ERROR_SECONDS = _own("gpu_exporter_conservation_error_seconds").meaning(
    "Difference between the ledger's parts and the whole, in GPU-seconds since it began: 0 except for rounding."
)
LEDGER_CAPACITY_SECONDS_TOTAL = _own("gpu_exporter_ledger_capacity_seconds_total", "ledger").meaning(
    "Metered GPU-seconds: the time between readings, over all GPUs, without that of unknown owners. The "
    "gpu_ledger_seconds_total of the ledger sum to it."
)
LEDGER_WITHHELD_SECONDS = _own("gpu_exporter_ledger_withheld_seconds").meaning(
    "GPU-seconds of owners that are still unknown; no gpu_ledger_ series includes them."
)
LEDGER_WRITER = _own("gpu_exporter_ledger_writer").meaning(
    "1 if this agent writes the ledger of its node; 0 if another agent on the node does and this one waits."
)
LEDGER_LOCKED = _own("gpu_exporter_ledger_locked").meaning(
    "1 if the writer of the ledger has the node's lock in --lock-dir; 0 if it cannot lock, so a second agent "
    "would count the same time again. Absent while this agent does not write, and on a simulated node without "
    "--lock-dir."
)
STATE_SAVED = _own("gpu_exporter_state_saved").meaning(
    "1 while the shown ledgers are on disk; 0 if one is in memory only and ends with the process."
)
STATE_SAVED_TIMESTAMP_SECONDS = _own("gpu_exporter_state_saved_timestamp_seconds").meaning(
    "Unix time of the shown save, in seconds."
)

PROCESS: tuple[Metric, ...] = (
    _own("process_cpu_seconds_total").meaning("User and system CPU time of this process, in seconds."),
    _own("process_resident_memory_bytes").meaning("Resident memory of this process, in bytes."),
    _own("process_virtual_memory_bytes").meaning("Virtual memory of this process, in bytes."),
    _own("process_start_time_seconds").meaning("Unix time of this process' start, in seconds."),
    _own("process_open_fds").meaning("File descriptors that this process has open."),
    _own("process_max_fds").meaning("File descriptors that this process may open."),
    _own("python_gc_collections_total", "generation").meaning("Runs of Python's garbage collector."),
    _own("python_gc_objects_collected_total", "generation").meaning("Objects freed by Python's garbage collector."),
    _own("python_gc_objects_uncollectable_total", "generation").meaning(
        "Objects that Python's garbage collector could not free."
    ),
)
"""Metrics of the agent's process, under the usual names of Prometheus clients; read when the page is rendered."""

ALL: tuple[Metric, ...] = (*(value for value in list(globals().values()) if isinstance(value, Metric)), *PROCESS)
"""All metrics, in the order of the page."""
BY_NAME = {metric.name: metric for metric in ALL}

HEALTH_PLAIN: tuple[tuple[Metric, Field], ...] = (
    (GPU_RECOVERY_ACTION, Field.GPU_RECOVERY_ACTION),
    (GPU_ROW_REMAP_PENDING, Field.ROW_REMAP_PENDING),
    (GPU_ROW_REMAP_FAILURE, Field.ROW_REMAP_FAILURE),
    (GPU_RETIRED_PAGES_PENDING, Field.RETIRED_PENDING),
    (GPU_PCIE_REPLAYS_TOTAL, Field.PCIE_REPLAY_COUNTER),
    (GPU_TEMPERATURE_MARGIN_CELSIUS, Field.GPU_TEMP_LIMIT),
)
"""Fields of a board's health that are shown without conversion."""
HEALTH_LABELLED: Mapping[Metric, Mapping[str, Field]] = {
    GPU_ECC_ERRORS_TOTAL: {"corrected": Field.ECC_SBE_VOL_TOTAL, "uncorrected": Field.ECC_DBE_VOL_TOTAL},
    GPU_REMAPPED_ROWS: {
        "corrected": Field.CORRECTABLE_REMAPPED_ROWS,
        "uncorrected": Field.UNCORRECTABLE_REMAPPED_ROWS,
    },
    GPU_RETIRED_PAGES: {"single_bit": Field.RETIRED_SBE, "double_bit": Field.RETIRED_DBE},
    GPU_NVLINK_ERRORS_TOTAL: {
        "crc_flit": Field.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        "crc_data": Field.NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        "replay": Field.NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        "receive": Field.NVLINK_COUNT_RX_ERRORS,
        "integrity": Field.NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS,
        "recovery_failed": Field.NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    },
    GPU_TEMPERATURE_CELSIUS: {"gpu": Field.GPU_TEMP, "memory": Field.MEMORY_TEMP},
    GPU_TEMPERATURE_LIMIT_CELSIUS: {
        "slowdown": Field.SLOWDOWN_TEMP,
        "shutdown": Field.SHUTDOWN_TEMP,
        "max_operating": Field.GPU_MAX_OP_TEMP,
        "memory_max_operating": Field.MEM_MAX_OP_TEMP,
    },
}
"""By value of the metric's last label."""
NVLINK_RECOVERIES = (Field.NVLINK_RECOVERY_ERROR_COUNT_TOTAL, Field.NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS)
"""Fields with the same count, for two generations of NVLink."""

THROTTLE_TIMES = {
    "power": Field.POWER_VIOLATION,
    "thermal": Field.THERMAL_VIOLATION,
    "sync_boost": Field.SYNC_BOOST_VIOLATION,
    "board_limit": Field.BOARD_LIMIT_VIOLATION,
    "low_utilisation": Field.LOW_UTIL_VIOLATION,
    "reliability": Field.RELIABILITY_VIOLATION,
    "application_clocks": Field.TOTAL_APP_CLOCKS_VIOLATION,
    "base_clocks": Field.TOTAL_BASE_CLOCKS_VIOLATION,
    "sw_thermal": Field.CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS,
    "hw_thermal": Field.CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS,
    "hw_power_brake": Field.CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS,
}
"""Fields with the nanoseconds of reduced clocks, by reason."""

HEALTH_FIELDS: frozenset[Field] = frozenset(
    {
        *(field for _, field in HEALTH_PLAIN),
        *(field for parts in HEALTH_LABELLED.values() for field in parts.values()),
        *NVLINK_RECOVERIES,
        *THROTTLE_TIMES.values(),
        Field.CLOCK_THROTTLE_REASONS,
    }
)
"""Fields of the health series."""
