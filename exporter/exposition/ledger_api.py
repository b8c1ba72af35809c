"""The ledger as JSON: what ``report --agent`` reads. Units are in the keys; what is unknown is null."""

import json
from collections.abc import Mapping
from typing import Any

from exporter.exposition.ledger_collector import energy_joules
from exporter.model import Account, Money, Owner, PodAccount, Price, Snapshot, Totals

API_VERSION = 1


def ledger_document(snapshot: Snapshot) -> bytes:
    """The body of ``/api/v1/ledger``: one JSON object in UTF-8, keys as ``document`` has them."""
    text = json.dumps(document(snapshot), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")  # one odd name may not cost the answer


def document(snapshot: Snapshot) -> dict[str, Any]:
    """The ledger as plain values.

    Seconds are share-weighted GPU-seconds, times Unix seconds; ``None`` is unknown, never 0. ``metered`` is False and
    there are no accounts before the first reading was metered. Accounts are summed over the ledgers.
    """
    ledger = snapshot.ledger
    accounts = ledger.accounts if ledger else {}
    pods = ledger.pods if ledger else {}
    return {
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
        "price_book": snapshot.price_book or None,
        "unpriced_gpus": snapshot.unpriced_gpus,
        "prices": _prices(snapshot),
        "accounts": [{**_account(account), **totals_keys(totals)} for account, totals in accounts.items()],
        "pods": [{**_pod(pod), **totals_keys(totals)} for pod, totals in pods.items()],
    }


def _prices(snapshot: Snapshot) -> list[dict[str, Any]]:
    gpus = [view.gpu for view in snapshot.devices if view.instance is None]
    return [
        {"gpu_uuid": gpu.uuid, "gpu_index": gpu.index, "model": gpu.model, **price_keys(snapshot.prices[gpu.uuid])}
        for gpu in gpus
        if gpu.uuid in snapshot.prices
    ]


def price_keys(price: Price) -> dict[str, Any]:
    """How a price is spelt in JSON, in every document."""
    return {
        "per_hour": price.per_hour,
        "per_kwh": price.per_kwh,
        "currency": price.currency,
        "source": price.source,
        "as_of": price.as_of,
        "fallback": price.fallback,
    }


def _account(account: Account) -> dict[str, Any]:
    keys = account_keys(account.owner, account.model, account.mode.value)
    return {**keys, "cost_labels": account.owner.cost_labels or None}


def account_keys(owner: Owner, model: str, mode: str) -> dict[str, Any]:
    """How an account, or a sum over accounts, is spelt in JSON; ``None`` is not known, or summed over."""
    return {
        "owner_namespace": owner.namespace or None,
        "owner_kind": owner.kind or None,
        "owner_name": owner.name or None,
        "team": owner.team or None,
        "model": model or None,
        "mode": mode or None,
    }


def _pod(pod: PodAccount) -> dict[str, Any]:
    return {
        "namespace": pod.namespace,
        "pod": pod.pod,
        "container": pod.container or None,
        "pod_uid": pod.pod_uid,
        "device_uuid": pod.device_uuid,
        "gpu_uuid": pod.gpu_uuid,
        "gpu_index": pod.gpu_index,
        "gpu_instance": pod.gpu_instance or None,
        "mig_profile": pod.mig_profile or None,
        "model": pod.model,
    }


def totals_keys(totals: Totals) -> dict[str, Any]:
    """How totals are spelt in JSON, in every document; share-weighted GPU-seconds, ``None`` is not measured."""
    return {
        "allocated_seconds": totals.allocated_seconds,
        "active_seconds": totals.active_seconds,
        "idle_seconds": totals.idle_seconds,
        "unknown_seconds": totals.unknown_seconds,
        "unpriced_seconds": totals.unpriced_seconds,
        "energy_joules": energy_joules(totals),
        "energy_unknown_seconds": totals.energy_unknown_seconds,
        "money": _money(totals.money),
    }


def _money(money: Mapping[str, Money]) -> list[dict[str, Any]]:
    return [
        {"currency": currency, "cost": one.total, "idle_cost": one.idle, "unknown_cost": one.unknown}
        for currency, one in sorted(money.items())
    ]
