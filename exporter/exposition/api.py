"""The node as JSON: what the page shows, for programs. Units are in the keys; what is unknown is null."""

import json
from collections.abc import Mapping
from typing import Any

from exporter.exposition.tenants import alerts_off_until_seconds, owner_of
from exporter.model import Activity, DeviceView, Field, NodeFacts, PodUse, Price, Snapshot, SourceStatus

API_VERSION = 1
_MIB = 1024 * 1024


def device_document(snapshot: Snapshot) -> bytes:
    """The body of ``/api/v1/devices``: one JSON object in UTF-8, keys as ``document`` has them."""
    text = json.dumps(document(snapshot), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")  # one odd name may not cost the answer


def document(snapshot: Snapshot) -> dict[str, Any]:
    """The node as plain values. Times are Unix seconds; ratios are 0..1; ``None`` is unknown, never 0."""
    return {
        "api_version": API_VERSION,
        "node": snapshot.node,
        "simulated": snapshot.simulated,
        "taken_at_seconds": snapshot.taken_at_seconds,
        "sample_at_seconds": snapshot.sample_at_seconds,
        "ready": snapshot.ready,
        "not_ready_reasons": list(snapshot.not_ready_reasons),
        "driver_version": snapshot.driver_version,
        "nvml_version": snapshot.nvml_version,
        "dcgm_version": snapshot.dcgm_version,
        "expected_devices": snapshot.expected_devices,
        "advertised_devices": snapshot.advertised_devices,
        "allocated_devices": snapshot.allocated_devices,
        "node_facts": _node_facts(snapshot.node_facts),
        "sources": [_source(source) for source in snapshot.sources],
        "attribution": {
            "enabled": snapshot.attribution_enabled,
            "known": snapshot.attribution_known,
            "answered_at_seconds": snapshot.attribution_at_seconds,
            "problem": snapshot.attribution_problem or None,
        },
        "metadata": {
            "enabled": snapshot.metadata_enabled,
            "known": snapshot.metadata_known,
            "answered_at_seconds": snapshot.metadata_at_seconds,
            "problem": snapshot.metadata_problem or None,
        },
        "devices": [_device(view, snapshot.prices.get(view.gpu.uuid)) for view in snapshot.devices],
        "unresolved": [
            {
                "namespace": item.namespace,
                "pod": item.pod,
                "container": item.container,
                "resource": item.resource,
                "device_id": item.device_id,
                "reason": item.reason,
            }
            for item in snapshot.unresolved
        ],
    }


def mebibytes(values: Mapping[Field, int | float], field: Field) -> int | None:
    """Bytes of a field that is carried in MiB; ``None`` where it was not measured."""
    value = values.get(field)
    return None if value is None else round(value * _MIB)


def _node_facts(facts: NodeFacts) -> dict[str, str | None]:
    return {
        "instance_type": facts.instance_type or None,
        "capacity_type": facts.capacity_type or None,
        "region": facts.region or None,
        "gpu_product": facts.gpu_product or None,
    }


def _source(source: SourceStatus) -> dict[str, Any]:
    return {
        "name": source.name,
        "state": source.state.value,
        "reason": source.reason or None,
        "message": source.message or None,
        "restarts": source.restarts,
    }


def _activity(activity: Activity | None) -> dict[str, Any]:
    return {
        "activity_ratio": activity.ratio if activity else None,
        "activity_source": activity.source.value if activity else None,
    }


def _device(view: DeviceView, price: Price | None) -> dict[str, Any]:
    instance = view.instance
    energy_millijoules = view.values.get(Field.TOTAL_ENERGY_CONSUMPTION)
    return {
        "uuid": view.uuid,
        "kind": "mig_instance" if instance else "gpu",
        "gpu_uuid": view.gpu.uuid,
        "gpu_index": view.gpu.index,
        "model": view.gpu.model,
        "pci_bus_id": view.gpu.pci_bus_id,
        "mig_enabled": view.gpu.mig_enabled,
        "mig_profile": instance.profile if instance else None,
        "gpu_instance_id": instance.gpu_instance_id if instance else None,
        "compute_instance_id": instance.compute_instance_id if instance else None,
        "state": view.state.value,
        "state_reason": view.reason or None,
        "allocation": view.allocation.value if view.allocation else None,
        **_activity(view.activity),
        "activity_measured_by": view.activity.measured_by if view.activity else None,
        "activity_unknown_reason": view.activity_unknown_reason or None,
        "profiling": view.profiling.value if view.profiling else None,
        "memory_used_bytes": mebibytes(view.values, Field.FB_USED),
        "memory_total_bytes": mebibytes(view.values, Field.FB_TOTAL),
        "power_watts": view.values.get(Field.POWER_USAGE),
        "energy_joules": None if energy_millijoules is None else energy_millijoules / 1000,
        "temperature_celsius": view.values.get(Field.GPU_TEMP),
        "gpu_price_per_hour": price.per_hour if price else None,
        "price_currency": price.currency if price else None,
        "price_source": price.source if price else None,
        "holders": [_holder(use) for use in view.pods],
        "unattributed": {
            "activity_ratio": view.unattributed_activity_ratio,
            "memory_used_bytes": view.unattributed_memory_bytes,
            "processes": view.unattributed_processes,
        },
        "xid_errors": [
            {"xid": xid, "count": count, "last_seen_at_seconds": view.xid_last_seen_seconds.get(xid)}
            for xid, count in sorted(view.xids.items())
        ],
    }


def _holder(use: PodUse) -> dict[str, Any]:
    holder = use.holder
    return {
        "namespace": holder.namespace,
        "pod": holder.pod,
        "container": holder.container or None,
        "pod_uid": holder.pod_uid,
        "mode": holder.mode.value,
        "resource": holder.resource,
        "source": holder.source,
        "gpu_share_ratio": holder.share_ratio,
        "device_share_ratio": holder.device_share_ratio,
        "share_estimated": holder.share_estimated,
        "replicas": holder.replicas,
        "age_seconds": use.age_seconds,
        **_activity(use.activity),
        "idle_for_seconds": use.idle_for_seconds,
        "memory_used_bytes": use.memory_used_bytes,
        **_whose(use),
    }


def _whose(use: PodUse) -> dict[str, Any]:
    facts, owner = use.facts, owner_of(use)
    return {
        "owner_namespace": owner.namespace or None,
        "owner_kind": owner.kind or None,
        "owner_name": owner.name or None,
        "team": owner.team or None,
        "queue": facts.queue or None if facts else None,
        "workload_class": facts.workload_class or None if facts else None,
        "alerts_off_until_seconds": alerts_off_until_seconds(facts),
        "exported": dict(facts.exported) if facts else None,
        "metadata_problems": list(facts.problems) if facts else None,
    }
