"""The series of owners, pools and shared devices on the page."""

from dataclasses import replace

import pytest
from exposition_support import OWNERS, snapshot
from page_support import changed, samples_of

from exporter.metrics.catalog import FOR_GOOD_SECONDS
from exporter.metrics.collector import ExpositionOptions, families
from exporter.model.attribution import NodeFacts
from exporter.model.ledger import WINDOWS, OwnersView

JOB = {
    "node": "node-a",
    "workload_namespace": "vision",
    "workload_kind": "Job",
    "workload_name": "resnet",
    "team": "perception",
}


def series(view: OwnersView | None = OWNERS, **more: object) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return the series of owners, pools and shared devices by name."""
    shown = families(changed(snapshot(), metering={"owners": view, **more}), ExpositionOptions())
    return {
        family.name: [(dict(sample.pairs), sample.value) for sample in samples_of(family)]
        for family in shown
        if family.name.startswith(("gpu_owner_", "gpu_pool_", "gpu_shared_"))
    }


def test_owner_series_export_known_values() -> None:
    page = series()
    assert page["gpu_owner_gpus"] == [(JOB, 1.0)]
    assert page["gpu_owner_estimated_gpus"] == [(JOB, 0.25)]
    assert page["gpu_owner_active_gpu_seconds"][:2] == [
        (JOB | {"window": "15m"}, 700.0),
        (JOB | {"window": "30m"}, 1500.0),
    ]
    assert page["gpu_owner_measured_gpu_seconds"][1] == (JOB | {"window": "30m"}, 1799.123)
    assert page["gpu_owner_unused_gpus"] == [(JOB | {"window": "30m"}, 0.25)]
    assert page["gpu_owner_policy"] == [(JOB | {"policy": "batch"}, 1)]
    assert page["gpu_owner_alerts_off_until_timestamp_seconds"] == [(JOB, FOR_GOOD_SECONDS)]
    assert page["gpu_owner_cost_per_hour"] == [(JOB | {"currency": "USD"}, 2.5)]
    assert page["gpu_owner_idle_cost_per_hour"] == [(JOB | {"currency": "USD"}, 0.5)]


@pytest.mark.parametrize(
    ("policy", "shown"),
    [
        ("batch", {"15m", "30m", "1h"}),
        ("default", {"15m", "1h"}),
        ("interactive", {"15m", "1h", "2h"}),
        ("inference", {"15m", "1h", "24h"}),
        ("reserved", {"15m", "1h"}),
        ("", {"15m", "30m", "1h", "2h", "24h"}),
    ],
)
def test_owner_exports_the_windows_of_its_policy(policy: str, shown: set[str]) -> None:
    every = dict.fromkeys(WINDOWS, 1.0)
    figures = {"active_seconds": every, "measured_seconds": every, "unused_gpus": every}
    use = replace(OWNERS.owners[0], policy=policy, **figures)
    page = series(replace(OWNERS, owners=(use,)))
    for name in ("gpu_owner_active_gpu_seconds", "gpu_owner_measured_gpu_seconds", "gpu_owner_unused_gpus"):
        assert {labels["window"] for labels, _ in page[name]} == shown


def test_owner_without_devices_exports_only_its_windows() -> None:
    page = series(replace(OWNERS, owners=OWNERS.owners[1:], broken_gpus={}, xids=()))
    ended = {"node": "node-a", "workload_namespace": "vision", "workload_kind": "Pod", "workload_name": "short-job"}
    assert {name for name in page if name.startswith("gpu_owner_")} == {
        "gpu_owner_active_gpu_seconds",
        "gpu_owner_measured_gpu_seconds",
    }
    assert page["gpu_owner_measured_gpu_seconds"] == [(ended | {"window": "24h"}, 60.0)]


def test_pool_has_the_labels_known_for_the_node() -> None:
    page = series()
    pool = {"node": "node-a", "model": "NVIDIA H100 80GB HBM3", "instance_type": "p5.48xlarge", "capacity_type": "spot"}
    assert page["gpu_pool_gpus"] == [(pool, 4)]
    assert page["gpu_pool_unallocated_gpus"] == [(pool, 1.5)]
    assert page["gpu_pool_unallocated_cost_per_hour"] == [(pool | {"currency": "USD"}, 3.75)]
    assert page["gpu_pool_unpriced_gpus"] == [(pool, 1)]
    assert "gpu_pool_unpriced_gpus" not in series(price_book="")
    unlabelled = series(node_facts=NodeFacts())["gpu_pool_gpus"]
    assert unlabelled == [({"node": "node-a", "model": "NVIDIA H100 80GB HBM3"}, 4)]


def test_owner_exports_broken_gpus_and_application_xids() -> None:
    page = series()
    assert page["gpu_owner_broken_gpus"] == [(JOB, 2)]
    device = {"gpu": "2", "uuid": "MIG-290", "pod_namespace": "vision", "pod_name": "resnet-0", "xid": "31"}
    assert page["gpu_owner_xid_last_seen_timestamp_seconds"] == [(JOB | device, 1_760_000_100.5)]


def test_shared_idle_device_has_index_uuid_and_instance_labels() -> None:
    carried = {"node": "node-a", "gpu": "2", "uuid": "MIG-290", "gpu_instance": "9"}
    assert series()["gpu_shared_idle_gpus"] == [(carried, 0.125)]


def test_owner_series_are_absent_without_owners() -> None:
    assert series(None) == {}
