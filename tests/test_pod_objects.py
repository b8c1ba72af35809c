"""Pods as in the API, and invalid ones."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from exporter.attribution import vgpu
from exporter.attribution.owner_rules import OwnerRules, facts_of
from exporter.kube.list_watch import TEXT_LIMIT
from exporter.kube.metadata import LONG_TEXT_LIMIT, parse_pod
from exporter.model.attribution import PodMetadata

UID = "6f1c7e8a-1b1a-4b3e-9e55-0f2f4d1c9a01"
WANTED = frozenset({"team", "note"})
HASH = "0123456789abcdef0123456789abcdef"

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)


def pod(**metadata: object) -> dict[str, Any]:
    return {"metadata": {"namespace": "ml", "name": "train-0", "uid": UID, **metadata}}


def parsed(item: dict[str, Any]) -> PodMetadata:
    found = parse_pod(item, WANTED)
    assert found is not None
    return found


def test_a_pod_is_read_with_its_controller_and_only_wanted_annotations() -> None:
    item = pod(
        labels={"app": "train"},
        annotations={"team": "vision", "kubectl.kubernetes.io/last-applied-configuration": "x" * 9000},
        ownerReferences=[
            {"kind": "Other", "name": "no", "apiVersion": "v1"},
            {"kind": "Job", "name": "train", "apiVersion": "batch/v1", "controller": True},
        ],
        managedFields=[{}],
    )
    assert parse_pod(item, WANTED) == PodMetadata(
        namespace="ml",
        name="train-0",
        uid=UID,
        labels={"app": "train"},
        annotations={"team": "vision"},
        owner_kind="Job",
        owner_name="train",
        owner_api="batch/v1",
    )


def test_whole_pod_and_metadata_only_pod_are_read_the_same() -> None:
    whole = {**pod(labels={"a": "b"}), "spec": {"containers": None}, "status": {"phase": "Running"}}
    assert parse_pod(whole, WANTED) == parse_pod(pod(labels={"a": "b"}), WANTED)


def test_pod_without_a_name_is_ignored() -> None:
    assert parse_pod({}, WANTED) is None
    assert parse_pod({"metadata": None}, WANTED) is None
    assert parse_pod({"metadata": {"name": "a"}}, WANTED) is None


def test_the_uid_of_a_static_pod_is_the_hash_of_its_file() -> None:
    annotations = {"kubernetes.io/config.hash": HASH, "kubernetes.io/config.mirror": HASH}
    assert parsed(pod(annotations=annotations)).uid == HASH
    node = [{"kind": "Node", "name": "n1", "apiVersion": "v1", "controller": True}]
    assert parsed(pod(annotations={"kubernetes.io/config.hash": HASH}, ownerReferences=node)).uid == HASH


def test_pod_without_valid_mirror_annotations_keeps_its_own_uid() -> None:
    assert parsed(pod(annotations={"kubernetes.io/config.hash": HASH})).uid == UID
    mirror = {"kubernetes.io/config.hash": "not a hash", "kubernetes.io/config.mirror": "x"}
    assert parsed(pod(annotations=mirror)).uid == UID


def test_long_values_are_truncated_and_scheduler_device_lists_less() -> None:
    found = parsed(pod(labels={"app": "x" * 9000}, annotations={"team": "y" * 9000, vgpu.HAMI_DEVICES: "z" * 90000}))
    assert len(found.labels["app"]) == TEXT_LIMIT
    assert len(found.annotations["team"]) == TEXT_LIMIT
    assert len(found.annotations[vgpu.HAMI_DEVICES]) == LONG_TEXT_LIMIT


def test_non_text_values_are_converted_or_omitted() -> None:
    labels = {"number": 7, "switch": True, "none": None, "list": [1], "half": "\ud83d", "nul": "a\0b"}
    assert parsed(pod(labels=labels)).labels == {"number": "7", "switch": "true", "half": "?", "nul": "a\0b"}


def test_number_of_kept_labels_is_limited() -> None:
    assert len(parsed(pod(labels={f"key-{number}": "v" for number in range(5000)})).labels) == 512


@given(st.dictionaries(st.sampled_from(["labels", "annotations", "ownerReferences", "uid", "name"]), JSON))
def test_arbitrary_pod_is_read_and_its_text_can_be_encoded(metadata: dict[str, Any]) -> None:
    found = parse_pod(pod(**metadata), WANTED)
    if found is not None:
        json.dumps([found.labels, found.annotations, found.uid], ensure_ascii=False).encode()
        facts = facts_of(found, {}, {}, OwnerRules(team_keys=("team",), exported_annotations=("note",)))
        assert facts.owner.name.isprintable()
