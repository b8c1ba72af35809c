"""Tenancy of pods on the page for Prometheus: the ledger's names, absent if unknown, and no page broken by a pod."""

import dataclasses

import pytest
from exposition_support import FACTS, exclusive, gpu, holder, partitioned, snapshot
from page_support import changed, rows, samples_of

from exporter.metrics.collector import ExpositionOptions, families
from exporter.model.attribution import NodeFacts, Owner, PodFacts
from exporter.model.snapshot import DeviceView, PodUse

OWN = {"workload_namespace", "workload_kind", "workload_name", "team", "queue", "workload_class"}


def held_by(facts: PodFacts | None) -> DeviceView:
    view = exclusive()
    return dataclasses.replace(view, pods=(dataclasses.replace(view.pods[0], facts=facts),))


def test_pod_info_has_the_owner_labels_of_the_ledger() -> None:
    view = snapshot(exclusive())
    ((info, _),) = rows(view, "gpu_pod_info")
    of_ledger, *_ = (pairs for pairs, _ in rows(view, "gpu_ledger_seconds_total"))
    owner = ("workload_namespace", "workload_kind", "workload_name", "team")
    assert {name: info[name] for name in owner} == {name: of_ledger[name] for name in owner}
    assert (info["queue"], info["workload_class"]) == ("research", "batch")
    assert (info["label_app"], info["annotation_cost_code"]) == ("resnet", "4711")


def test_pod_info_without_metadata_has_the_namespace_only() -> None:
    ((info, _),) = rows(snapshot(held_by(None)), "gpu_pod_info")
    assert {name: info[name] for name in OWN & info.keys()} == {"workload_namespace": "vision"}
    bare = PodFacts(owner=Owner(namespace="vision", kind="Pod", name="resnet-0"))
    ((info, _),) = rows(snapshot(held_by(bare)), "gpu_pod_info")
    assert OWN & info.keys() == {"workload_namespace", "workload_kind", "workload_name"}


def test_exported_labels_are_only_on_the_info_series() -> None:
    page = families(snapshot(exclusive()), ExpositionOptions())
    carriers = {
        family.name
        for family in page
        for sample in samples_of(family)
        for name, _ in sample.pairs
        if name.startswith(("label_", "annotation_")) or name in {"queue", "workload_class"}
    }
    assert carriers == {"gpu_pod_info"}


@pytest.mark.parametrize(
    ("until", "shown"),
    [(1_760_003_600.0, [1_760_003_600.0]), (float("inf"), [253_402_300_799]), (1.0, [1.0]), (None, [])],
)
def test_opt_out_end_is_a_valid_calendar_time(until: float | None, shown: list[float]) -> None:
    facts = dataclasses.replace(FACTS, opt_out_until_seconds=until)
    reported = rows(snapshot(held_by(facts)), "gpu_pod_alerts_off_until_timestamp_seconds")
    assert [value for _, value in reported] == shown
    assert all(pairs["pod_name"] == "resnet-0" for pairs, _ in reported)


def test_pod_with_invalid_annotations_counts_once_for_all_its_devices() -> None:
    def use(index: int, pod: str) -> PodUse:
        return PodUse(holder=holder(pod, gpu(index).uuid), age_seconds=1.0, facts=FACTS)

    views = [dataclasses.replace(exclusive(index), pods=(use(index, pod),)) for index, pod in enumerate("aab")]
    assert rows(snapshot(*views), "gpu_exporter_pod_metadata_problems") == [({"reason": "bad_class"}, 2)]
    assert rows(snapshot(*partitioned()), "gpu_exporter_pod_metadata_problems") == []


def test_api_source_is_exported_only_if_used_and_up_only_without_problems() -> None:
    def up(**changes: object) -> list[float]:
        view = changed(snapshot(exclusive()), **changes)
        reported = rows(view, "gpu_exporter_source_up")
        return [value for pairs, value in reported if pairs["source"] == "kubernetes-api"]

    assert up() == [1]
    assert up(metadata={"known": False}) == [0]
    assert up(metadata={"problem": "forbidden"}) == [0]
    assert up(metadata=None) == []
    silent = changed(snapshot(exclusive()), metadata={"at_seconds": None})
    assert rows(silent, "gpu_exporter_metadata_timestamp_seconds") == []


def test_gpu_counts_are_exported_by_source_and_absent_if_unknown() -> None:
    def states(**changes: object) -> dict[str, float]:
        view = changed(snapshot(), **changes)
        return {pairs["state"]: value for pairs, value in rows(view, "gpu_devices")}

    assert states() == {"present": 3, "expected": 5, "advertised": 4, "allocated": 3}
    old_kubelet = {"advertised_devices": None, "allocated_devices": 0}
    assert states(attribution=old_kubelet) == {
        "present": 3,
        "expected": 5,
        "allocated": 0,
    }


def test_node_info_has_the_known_facts_and_is_absent_without_them() -> None:
    ((pairs, value),) = rows(snapshot(exclusive()), "gpu_node_info")
    assert value == 1
    assert pairs == {
        "node": "node-a",
        "instance_type": "p5.48xlarge",
        "capacity_type": "spot",
        "region": "us-east-1",
        "gpu_product": "NVIDIA-H100-80GB-HBM3",
    }
    some = changed(snapshot(exclusive()), metering={"node_facts": NodeFacts(region="eu-west-1")})
    assert rows(some, "gpu_node_info") == [({"node": "node-a", "region": "eu-west-1"}, 1)]
    assert rows(changed(some, metering={"node_facts": NodeFacts()}), "gpu_node_info") == []
