"""ResourceSlices and claims in every possible form."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.attribution.pod_lifecycle import AllocatedDevice, SliceDevice
from exporter.kube.dra import Slice, allocated_devices, parse_slice, pools_of, quantity, served_version, uid_of

GPU_UUID = "GPU-b1028956-cfa2-0990-bf4a-5da9abb51763"
ATTRIBUTES = {"type": {"string": "gpu"}, "uuid": {"string": GPU_UUID}, "driverVersion": {"version": "580.1.2"}}
GPU = SliceDevice(kind="gpu", uuid=GPU_UUID, memory_bytes=80 << 30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


def resource_slice(*devices: dict[str, Any], generation: int = 1, count: int = 1, name: str = "n1-a") -> dict[str, Any]:
    pool = {"name": "n1", "generation": generation, "resourceSliceCount": count}
    spec = {"driver": "gpu.nvidia.com", "nodeName": "n1", "pool": pool, "devices": list(devices)}
    return {"metadata": {"name": name}, "spec": spec}


def parsed(item: dict[str, Any]) -> Slice:
    found = parse_slice(item)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "device",
    [
        {"name": "gpu-0", "attributes": ATTRIBUTES, "capacity": {"memory": {"value": "80Gi"}}},
        {"name": "gpu-0", "basic": {"attributes": ATTRIBUTES, "capacity": {"memory": {"value": "80Gi"}}}},
        {"name": "gpu-0", "basic": {"attributes": ATTRIBUTES, "capacity": {"memory": "80Gi"}}},
        {
            "name": "gpu-0",
            "attributes": {f"gpu.nvidia.com/{name}": value for name, value in ATTRIBUTES.items()},
            "capacity": {"gpu.nvidia.com/memory": {"value": "85899345920"}},
        },
        {
            "name": "gpu-0",
            "attributes": {"uuid": {"string": GPU_UUID}},
            "capacity": {"memory": {"value": 80 << 30}},
        },
    ],
    ids=["v1 and v1beta2", "v1beta1", "v1alpha3", "with domain", "without type"],
)
def test_device_reads_the_same_in_every_version(device: dict[str, Any]) -> None:
    assert parsed(resource_slice(device)).devices == {"gpu-0": GPU}


def test_future_mig_device_has_a_parent_and_a_profile_and_no_uuid() -> None:
    attributes = {"type": {"string": "mig"}, "parentUUID": {"string": GPU_UUID}, "profile": {"string": "1g.24gb"}}
    devices = parsed(resource_slice({"name": "gpu-2-mig-1g24gb-19-0", "attributes": attributes})).devices
    assert devices == {
        "gpu-2-mig-1g24gb-19-0": SliceDevice(kind="mig", parent_uuid=GPU_UUID, profile="1g.24gb", memory_bytes=None)
    }


def test_slices_of_other_drivers_are_ignored() -> None:
    item = resource_slice()
    item["spec"]["driver"] = "compute-domain.nvidia.com"
    assert parse_slice(item) is None


def test_slice_without_devices_completes_its_pool() -> None:
    gpu = parsed(resource_slice({"name": "gpu-0", "attributes": ATTRIBUTES}, count=2))
    counters = parsed(resource_slice(count=2, name="n1-b"))
    assert pools_of([gpu], {}) == {}
    assert set(pools_of([gpu, counters], {})["n1"]) == {"gpu-0"}


def test_newest_complete_generation_is_used_or_the_previous_one() -> None:
    old = Slice(pool="n1", generation=1, slice_count=2, devices={"gpu-0": GPU})
    new = Slice(pool="n1", generation=2, slice_count=2, devices={"gpu-1": GPU})
    before = pools_of([old, old], {})
    assert set(before["n1"]) == {"gpu-0"}
    assert set(pools_of([old, old, new], before)["n1"]) == {"gpu-0"}
    assert set(pools_of([old, new], before)["n1"]) == {"gpu-0"}
    for others in ([old], [old, old]):
        slices = [*others, new, replace(new, devices={"gpu-2": GPU})]
        assert set(pools_of(slices, before)["n1"]) == {"gpu-1", "gpu-2"}
    assert pools_of([], before) == {}


def test_claim_has_its_devices_with_share_access_and_consumption() -> None:
    results = [
        {"request": "r", "driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0", "adminAccess": True},
        {
            "driver": "gpu.nvidia.com",
            "pool": "n1",
            "device": "gpu-1",
            "shareID": "s",
            "consumedCapacity": {"gpu.nvidia.com/memory": "40Gi"},
        },
    ]
    item = {"metadata": {"uid": "ABC"}, "status": {"allocation": {"devices": {"results": results}}}}
    assert uid_of(item) == "abc"
    assert allocated_devices(item) == (
        AllocatedDevice(driver="gpu.nvidia.com", pool="n1", device="gpu-0", admin_access=True),
        AllocatedDevice(
            driver="gpu.nvidia.com", pool="n1", device="gpu-1", share_id="s", consumed_memory_bytes=40 << 30
        ),
    )


def test_unallocated_claim_is_none_and_claim_without_results_is_empty() -> None:
    assert allocated_devices({"status": {}}) is None
    assert allocated_devices({}) is None
    assert allocated_devices({"status": {"allocation": {"devices": {"results": None}}}}) == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("40Gi", 40 << 30),
        ("81559Mi", 81559 << 20),
        ("1500m", 2),
        ("1k", 1000),
        ("2.5Ki", 2560),
        ("1e9", 10**9),
        ("1E3", 1000),
        ("7E", 7 * 10**18),
        ("12", 12),
        (12, 12),
        ("+3", 3),
        ("", None),
        ("-1", None),
        ("Gi", None),
        ("1e99", None),
        ("1e999999999", None),
        ("9" * 40, None),
        (True, None),
        (None, None),
        (-4, None),
    ],
)
def test_quantities_are_parsed(text: object, expected: int | None) -> None:
    assert quantity(text) == expected


def test_newest_supported_version_of_the_cluster_is_used() -> None:
    assert served_version({"versions": [{"version": "v1beta1"}, {"version": "v1"}]}) == "v1"
    assert served_version({"versions": [{"version": "v1beta1"}, {"version": "v1beta2"}]}) == "v1beta2"
    assert served_version({"versions": [{"version": "v1alpha3"}]}) == ""
    assert served_version({}) == ""


@given(JSON)
def test_arbitrary_json_does_not_raise(item: object) -> None:
    parse_slice(
        {"metadata": {"name": "a"}, "spec": {"driver": "gpu.nvidia.com", "pool": {"name": "p"}, "devices": item}}
    )
    parse_slice({"metadata": item, "spec": item})
    allocated_devices({"status": {"allocation": {"devices": {"results": item}}}})
    allocated_devices({"status": item})
    served_version({"versions": item})
    quantity(item)
