"""The JSON of the node and of its ledger: units in the keys, null for unknown."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import exposition_support
import page_support as made

from exporter.model.attribution import AllocationState, NodeFacts, Owner, PodFacts, Unresolved
from exporter.model.fields import Field
from exporter.model.ledger import Price
from exporter.web import node_api


def parsed(*devices: made.DeviceView, **changes: object) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(node_api.device_document(made.snapshot(*devices, **changes)).plain)
    return loaded


def test_allocated_gpu_has_values_in_the_units_of_the_keys() -> None:
    (device,) = parsed(made.held(0, "train-0", 0.9))["devices"]
    assert device["kind"] == "gpu"
    assert device["memory_used_bytes"] == 20_000 * 2**20
    assert device["memory_total_bytes"] == 81_559 * 2**20
    assert device["power_watts"] == 640
    assert device["energy_joules"] == 5000.5
    assert device["temperature_celsius"] == 41
    assert (device["activity_ratio"], device["activity_source"]) == (0.9, "engine")
    (holder,) = device["holders"]
    assert (holder["namespace"], holder["pod"], holder["container"]) == ("ml", "train-0", "main")
    assert (holder["gpu_share_ratio"], holder["mode"], holder["idle_for_seconds"]) == (1.0, "exclusive", 0.0)


def test_unmeasured_values_are_null_and_never_zero() -> None:
    bare = replace(made.view(0, None), values={Field.FB_TOTAL: 81_559}, activity_unknown_reason="no_source")
    (device,) = parsed(bare)["devices"]
    unmeasured = ("activity_ratio", "memory_used_bytes", "power_watts", "energy_joules", "temperature_celsius")
    assert all(device[key] is None for key in unmeasured)
    assert device["activity_unknown_reason"] == "no_source"
    assert device["unattributed"] == {"activity_ratio": None, "memory_used_bytes": None, "processes": None}


def test_mig_instance_refers_to_its_gpu_and_the_gpu_has_no_allocation() -> None:
    parent, first, *_ = parsed(*made.partitioned(3, made.MIXED))["devices"]
    assert (parent["kind"], parent["mig_enabled"], parent["allocation"]) == ("gpu", True, None)
    assert (first["kind"], first["mig_profile"], first["gpu_instance_id"]) == ("mig_instance", "3g.40gb", 7)
    assert first["gpu_uuid"] == parent["uuid"]
    assert first["power_watts"] is None


def test_allocation_distinguishes_allocated_unallocated_and_unknown() -> None:
    devices = parsed(made.held(0, "a"), made.view(1), made.view(2, allocation=AllocationState.UNKNOWN))["devices"]
    assert [device["allocation"] for device in devices] == ["allocated", "unallocated", "unknown"]


def test_document_marks_a_simulated_node_and_the_reason_of_a_lost_gpu() -> None:
    document = parsed(made.lost(0), simulated=True)
    assert document["simulated"] is True
    (device,) = document["devices"]
    assert (device["state"], device["state_reason"]) == ("lost", "gpu_is_lost")
    assert device["xid_errors"] == [{"xid": 79, "count": 1, "last_seen_at_seconds": made.TAKEN_AT - 60}]


def test_every_device_has_the_same_keys() -> None:
    document = json.loads(node_api.device_document(made.rich_snapshot()).plain)
    assert len({tuple(device) for device in document["devices"]}) == 1
    assert document["unresolved"][0]["reason"] == "dra_unresolved"


def test_invalid_unicode_in_a_name_is_replaced() -> None:
    assert parsed(made.held(0, "train-\ud800", 0.9))["devices"][0]["holders"][0]["pod"] == "train-?"


def test_holder_has_its_owner_or_only_its_namespace_without_metadata() -> None:
    facts = PodFacts(
        owner=Owner(namespace="ml", kind="Job", name="train", team="core"),
        queue="gold",
        workload_class="batch",
        opt_out_until_seconds=float("inf"),
        exported=(("label_app", "x"),),
        problems=("bad_class",),
    )
    known, unknown = made.held(0, "train-0"), made.held(1, "train-1")
    known = replace(known, pods=(replace(known.pods[0], facts=facts),))
    document = parsed(known, unknown, metadata={"problem": "slow"})
    (first,), (second,) = (device["holders"] for device in document["devices"])
    assert [first[f"owner_{key}"] for key in ("namespace", "kind", "name")] == ["ml", "Job", "train"]
    assert (first["team"], first["queue"], first["workload_class"]) == ("core", "gold", "batch")
    assert (first["alerts_off_until_seconds"], first["exported"]) == (253_402_300_799, {"label_app": "x"})
    assert first["metadata_problems"] == ["bad_class"]
    assert (second["owner_namespace"], second["owner_kind"], second["team"], second["queue"]) == (
        "ml",
        None,
        None,
        None,
    )
    assert (second["alerts_off_until_seconds"], second["exported"], second["metadata_problems"]) == (None, None, None)
    reported = {"enabled": True, "known": True, "answered_at_seconds": None, "problem": "slow"}
    assert document["metadata"] == reported


def test_unknown_device_counts_and_node_facts_are_null() -> None:
    document = parsed(attribution={"advertised_devices": 8}, metering={"node_facts": NodeFacts(region="us-east-1")})
    assert (document["advertised_devices"], document["allocated_devices"]) == (8, None)
    assert document["node_facts"] == {
        "instance_type": None,
        "capacity_type": None,
        "region": "us-east-1",
        "gpu_product": None,
    }


def keys_of(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)


def undocumented(path: str, document: object) -> tuple[set[str], set[str]]:
    """Return the undescribed keys of a document in docs/api.md under the path, and the missing described ones."""
    text = (Path(__file__).resolve().parent.parent / "docs" / "api.md").read_text()
    reference = text.partition(f"## `{path}`")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", reference, re.MULTILINE)
    reported = {key for cell in cells for key in re.findall(r"`([a-z_]+)`", cell)}
    keys = set(keys_of(document))
    return keys - set(re.findall(r"`([a-z_]+)`", reference)), reported - keys


def test_device_keys_match_the_documentation() -> None:
    loose = Unresolved(namespace="a", pod="b", container="c", resource="d", device_id="e", reason="f")
    failing = replace(made.held(0, "train-0", 0.9), xids={79: 1})
    assert undocumented("/api/v1/devices", parsed(failing, attribution={"unresolved": (loose,)})) == (set(), set())


def test_ledger_keys_match_the_documentation() -> None:
    document = json.loads(node_api.ledger_document(exposition_support.snapshot()).plain)
    assert undocumented("/api/v1/ledger", document) == (set(), set())


def test_gpu_has_its_price_or_null_without_a_matching_row() -> None:
    price = Price(per_hour=3.5, currency="EUR", source="own:h100", as_of="2026-01-01")
    metering = {"prices": {made.gpu(0).uuid: price}}
    first, second = parsed(made.held(0, "a"), made.held(1, "b"), metering=metering)["devices"]
    assert (first["gpu_price_per_hour"], first["price_currency"], first["price_source"]) == (3.5, "EUR", "own:h100")
    assert (second["gpu_price_per_hour"], second["price_currency"]) == (None, None)


def test_ledger_lists_every_owner_with_seconds_joules_and_cost() -> None:
    document = json.loads(node_api.ledger_document(exposition_support.snapshot()).plain)
    work, nobody_known, free = document["accounts"]
    assert (work["owner_namespace"], work["owner_kind"], work["owner_name"], work["team"]) == (
        "vision",
        "Job",
        "resnet",
        "perception",
    )
    assert (work["allocated_seconds"], work["active_seconds"], work["effective_seconds"]) == (3600.0, 2700.0, 500.0)
    assert work["money"] == [
        {
            "currency": "USD",
            "cost": 2.5,
            "active_cost": 1.875,
            "effective_cost": 0.35,
            "ineffective_cost": 0.9,
            "unprofiled_cost": 0.625,
            "idle_cost": 0.4166666,
            "unknown_cost": 0.2083334,
        }
    ]
    assert (nobody_known["energy_joules"], nobody_known["money"], nobody_known["unpriced_seconds"]) == (None, [], 72.0)
    assert (free["owner_kind"], free["owner_namespace"]) == ("Unallocated", None)
    assert sum(account["allocated_seconds"] for account in document["accounts"]) == document["capacity_seconds"]
    assert [pod["pod"] for pod in document["pods"]] == ["resnet-0", "short-job"]
    assert document["prices"][0]["source"] == "fleet:h100"


def test_ledger_before_the_first_metering_is_unmetered_and_has_no_zeros() -> None:
    document = json.loads(node_api.ledger_document(made.snapshot(made.held(0, "a"))).plain)
    assert (document["metered"], document["capacity_seconds"], document["accounts"]) == (False, None, [])
