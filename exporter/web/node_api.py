"""Returns the node as JSON, with the contents of the page. Units are in the keys; null is unknown."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from exporter.metrics.catalog import alerts_off_until_seconds, owner_of
from exporter.metrics.ledger_collector import energy_joules
from exporter.model.attribution import Owner
from exporter.model.devices import SourceStatus
from exporter.model.fields import Field
from exporter.model.ledger import ByState, Price, Totals, state_columns
from exporter.model.records import written
from exporter.model.snapshot import Activity, ActivityHistory, DeviceView, PodUse, Snapshot
from exporter.web.responses import Body, json_body

API_VERSION = 1
_MIB = 1024 * 1024


def device_document(snapshot: Snapshot) -> Body:
    """Return the body of ``/api/v1/devices``. Times are Unix seconds; ratios are 0..1; null is unknown, never 0."""
    reading, attribution, metadata = snapshot.reading, snapshot.attribution, snapshot.metadata
    prices = snapshot.metering.prices
    return json_body(
        {
            "api_version": API_VERSION,
            "node": snapshot.node,
            "simulated": snapshot.simulated,
            "taken_at_seconds": snapshot.taken_at_seconds,
            "sample_at_seconds": reading and reading.taken_at_seconds,
            "ready": snapshot.ready,
            "not_ready_reasons": list(snapshot.not_ready_reasons),
            "driver_version": reading and reading.driver_version,
            "nvml_version": reading and reading.nvml_version,
            "dcgm_version": reading and reading.dcgm_version,
            "expected_devices": snapshot.expected_devices,
            "advertised_devices": attribution.advertised_devices,
            "allocated_devices": attribution.allocated_devices,
            "node_facts": {name: fact or None for name, fact in asdict(snapshot.metering.node_facts).items()},
            "sources": [_source(source) for source in snapshot.sources],
            "attribution": {
                "enabled": bool(attribution.source),
                "known": attribution.known,
                "answered_at_seconds": attribution.answered_at_seconds,
                "problem": attribution.problem or None,
            },
            "metadata": {
                "enabled": metadata is not None,
                "known": bool(metadata and metadata.known),
                "answered_at_seconds": metadata and metadata.at_seconds,
                "problem": (metadata and metadata.problem) or None,
            },
            "history": {
                "ends_at_seconds": snapshot.history.ends_at_seconds,
                "step_seconds": ActivityHistory.STEP_SECONDS,
            },
            "devices": [
                {**_device(view, prices.get(view.gpu.uuid)), "activity_history": snapshot.history.ratios(view.uuid)}
                for view in snapshot.devices
            ],
            "unresolved": [
                picked(item, "namespace", "pod", "container", "resource", "device_id", "reason")
                for item in attribution.unresolved
            ],
        }
    )


def mebibytes(values: Mapping[Field, int | float], field: Field) -> int | None:
    """Return the value of a field in MiB as bytes; ``None`` if it was not measured."""
    value = values.get(field)
    return None if value is None else round(value * _MIB)


def picked(value: object, *names: str) -> dict[str, Any]:
    """Return attributes of a value by name."""
    return {name: getattr(value, name) for name in names}


def _known(value: object, *names: str) -> dict[str, str | None]:
    """Return texts of a value by name; ``None`` for an empty text."""
    return {name: text or None for name, text in picked(value, *names).items()}


def _source(source: SourceStatus) -> dict[str, Any]:
    return {**picked(source, "name", "state", "restarts"), **_known(source, "reason", "message")}


def _activity(activity: Activity | None) -> dict[str, Any]:
    profile = activity.profile if activity else None
    return {
        "activity_ratio": activity.ratio if activity else None,
        "activity_source": activity.source.value if activity else None,
        "effective_ratio": profile.effective_ratio if profile else None,
        "bottleneck": profile.bottleneck.value if profile else None,
    }


def _device(view: DeviceView, price: Price | None) -> dict[str, Any]:
    gpu, instance = view.gpu, view.instance
    energy_millijoules = view.values.get(Field.TOTAL_ENERGY_CONSUMPTION)
    return {
        "uuid": view.uuid,
        "kind": "mig_instance" if instance else "gpu",
        "gpu_uuid": gpu.uuid,
        "gpu_index": gpu.index,
        **picked(gpu, "model", "pci_bus_id", "mig_enabled"),
        "mig_profile": instance.profile if instance else None,
        "gpu_instance_id": instance.gpu_instance_id if instance else None,
        "compute_instance_id": instance.compute_instance_id if instance else None,
        "state_reason": view.reason or None,
        **picked(view, "state", "allocation", "profiling"),
        **_known(view, "activity_unknown_reason"),
        **_activity(view.activity),
        "activity_measured_by": view.activity.measured_by if view.activity else None,
        "memory_used_bytes": mebibytes(view.values, Field.FB_USED),
        "memory_total_bytes": mebibytes(view.values, Field.FB_TOTAL),
        "power_watts": view.values.get(Field.POWER_USAGE),
        "energy_joules": None if energy_millijoules is None else energy_millijoules / 1000,
        "temperature_celsius": view.values.get(Field.GPU_TEMP),
        "gpu_share_ratio": view.share_ratio,
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
    holder, facts = use.holder, use.facts
    return {
        **picked(holder, "namespace", "pod", "pod_uid", "mode", "resource", "source"),
        **_known(holder, "container"),
        "gpu_share_ratio": holder.share_ratio,
        **picked(holder, "device_share_ratio", "share_estimated", "replicas"),
        **_activity(use.activity),
        **picked(use, "age_seconds", "idle_for_seconds", "memory_used_bytes"),
        **owner_keys(owner_of(use)),
        "queue": facts.queue or None if facts else None,
        "workload_class": facts.workload_class or None if facts else None,
        "alerts_off_until_seconds": alerts_off_until_seconds(facts),
        "exported": dict(facts.exported) if facts else None,
        "metadata_problems": list(facts.problems) if facts else None,
    }


def ledger_document(snapshot: Snapshot) -> Body:
    """Return the body of ``/api/v1/ledger``.

    Seconds are share-weighted GPU-seconds, times are Unix seconds; null is unknown, never 0. Until the first reading
    is metered, ``metered`` is False and there are no accounts. Accounts are summed over the ledgers.
    """
    metering = snapshot.metering
    ledger = metering.ledger
    accounts = ledger.accounts if ledger else {}
    pods = ledger.pods if ledger else {}
    return json_body(
        {
            "api_version": API_VERSION,
            "node": snapshot.node,
            "simulated": snapshot.simulated,
            "taken_at_seconds": snapshot.taken_at_seconds,
            "metered": bool(ledger and ledger.ledgers),
            "ledgers": [
                {"id": one.identity, "created_at_seconds": one.created_at_seconds}
                for one in (ledger.ledgers if ledger else ())
            ],
            "started_at_seconds": ledger.started_at_seconds if ledger else None,
            "saved_at_seconds": ledger.saved_at_seconds if ledger else None,
            "state_problem": (ledger.state_problem or None) if ledger else None,
            "capacity_seconds": ledger.capacity_seconds if ledger else None,
            "withheld_seconds": ledger.withheld_seconds if ledger else None,
            "conservation_error_seconds": ledger.conservation_error_seconds if ledger else None,
            "price_book": metering.price_book or None,
            "unpriced_gpus": metering.unpriced_gpus,
            "prices": _prices(snapshot),
            "accounts": [
                {
                    **account_keys(account.owner, account.model, account.mode.value),
                    "cost_labels": account.owner.cost_labels or None,
                    **totals_keys(totals),
                }
                for account, totals in accounts.items()
            ],
            "pods": [
                {**picked(pod, *_POD), **_known(pod, *_POD_PARTS), **totals_keys(totals)}
                for pod, totals in pods.items()
            ],
        }
    )


def _prices(snapshot: Snapshot) -> list[dict[str, Any]]:
    prices = snapshot.metering.prices
    gpus = [view.gpu for view in snapshot.devices if view.instance is None]
    return [
        {"gpu_uuid": gpu.uuid, "gpu_index": gpu.index, "model": gpu.model, **written(prices[gpu.uuid])}
        for gpu in gpus
        if gpu.uuid in prices
    ]


def account_keys(owner: Owner, model: str, mode: str) -> dict[str, Any]:
    """Return the JSON keys of an account or of a sum over accounts; ``None`` is unknown or summed over."""
    return {**owner_keys(owner), "model": model or None, "mode": mode or None}


def owner_keys(owner: Owner) -> dict[str, Any]:
    """Return the JSON keys of an owner; ``None`` is unknown."""
    return {
        "owner_namespace": owner.namespace or None,
        "owner_kind": owner.kind or None,
        "owner_name": owner.name or None,
        "team": owner.team or None,
    }


_POD = ("namespace", "pod", "pod_uid", "device_uuid", "gpu_uuid", "gpu_index", "model")
_POD_PARTS = ("container", "gpu_instance", "mig_profile")


def totals_keys(totals: Totals) -> dict[str, Any]:
    """Return the JSON keys of totals; share-weighted GPU-seconds, ``None`` is not measured."""
    return {
        "allocated_seconds": totals.seconds.total,
        **_by_state(totals.seconds, "seconds"),
        "unpriced_seconds": totals.unpriced_seconds,
        "energy_joules": energy_joules(totals),
        "energy_unknown_seconds": totals.energy_unknown_seconds,
        "money": [
            {"currency": currency, "cost": money.total, **_by_state(money, "cost")}
            for currency, money in sorted(totals.money.items())
        ],
    }


def _by_state(figures: ByState, unit: str) -> dict[str, float | None]:
    return {f"{name}_{unit}": value for name, value in state_columns(figures).items()}
