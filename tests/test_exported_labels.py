import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.attribution.owner_rules import (
    MAX_CHARACTERS,
    MAX_KEYS,
    OwnerRules,
    export_names,
    facts_of,
    is_never_shown,
)
from exporter.model.attribution import PodMetadata

ANY_TEXT = st.text(st.characters(codec=None), max_size=200)
Allowed = tuple[str, ...]
LIKELY_TO_CLASH = st.text("aB./-_1", min_size=1, max_size=4)


def exported_of(
    labels: dict[str, str], annotations: dict[str, str], allowed_labels: Allowed, allowed_annotations: Allowed
) -> tuple[tuple[str, str], ...]:
    pod = PodMetadata(namespace="ml", name="a", uid="", labels=labels, annotations=annotations)
    rules = OwnerRules(exported_labels=allowed_labels, exported_annotations=allowed_annotations)
    return facts_of(pod, {}, {}, rules).exported


def test_label_names_match_kube_state_metrics() -> None:
    labels = {"app.kubernetes.io/name": "vllm", "costCenter": "CC-1", "größe": "XL", "unasked": "x"}
    assert exported_of(labels, {"owner": "anna"}, ("app.kubernetes.io/name", "costCenter", "größe"), ("owner",)) == (
        ("annotation_owner", "anna"),
        ("label_app_kubernetes_io_name", "vllm"),
        ("label_cost_center", "CC-1"),
        ("label_gr__e", "XL"),
    )


def test_no_labels_are_exported_by_default() -> None:
    assert exported_of({"team": "a"}, {"team": "b"}, (), ()) == ()


def test_absent_and_empty_labels_are_left_out() -> None:
    assert exported_of({"a": "", "b": " \t"}, {}, ("a", "b", "c"), ("a",)) == ()


def test_clashing_names_are_numbered_in_key_order() -> None:
    allowed = ("a/b", "a.b", "c")
    assert export_names("label", allowed) == {
        "a.b": "label_a_b_conflict1",
        "a/b": "label_a_b_conflict2",
        "c": "label_c",
    }
    assert exported_of({"a/b": "2"}, {}, allowed, ()) == (("label_a_b_conflict2", "2"),)
    assert exported_of({"a/b": "2", "a.b": "1"}, {}, allowed, ()) == (
        ("label_a_b_conflict1", "1"),
        ("label_a_b_conflict2", "2"),
    )


def test_key_that_resembles_a_numbered_name_keeps_its_name() -> None:
    names = export_names("label", ("a.b", "a/b", "a_b_conflict1"))
    assert names["a_b_conflict1"] == "label_a_b_conflict1"
    assert sorted(names.values()) == ["label_a_b_conflict1", "label_a_b_conflict2", "label_a_b_conflict3"]


def test_repeated_key_is_one_label() -> None:
    assert export_names("label", ("team", "team")) == {"team": "label_team"}


@pytest.mark.parametrize(
    "key",
    [
        "pod-template-hash",
        "rollouts-pod-template-hash",
        "controller-revision-hash",
        "controller-uid",
        "batch.kubernetes.io/controller-uid",
        "job-completion-index",
        "batch.kubernetes.io/job-completion-index",
        "statefulset.kubernetes.io/pod-name",
        "jobset.sigs.k8s.io/jobset-uid",
        "serving.knative.dev/revisionUID",
        "volcano.sh/template-uid",
        "checksum/config",
        "example.com/config-checksum",
        "kubernetes.io/config.hash",
        "kubectl.kubernetes.io/last-applied-configuration",
    ],
)
def test_per_pod_and_per_rollout_keys_are_never_exported(key: str) -> None:
    assert is_never_shown(key)
    assert exported_of({key: "x"}, {key: "x"}, (key,), (key,)) == ()


@pytest.mark.parametrize("key", ["team", "app.kubernetes.io/name", "fluid", "hashicorp.com/team", "guide", "pod-name"])
def test_keys_similar_to_hash_and_uid_keys_are_exported(key: str) -> None:
    assert not is_never_shown(key)


def test_at_most_ten_keys_are_exported_and_excluded_keys_do_not_count() -> None:
    allowed = ("pod-template-hash", *(f"key{number}" for number in range(20)))
    shown = exported_of(dict.fromkeys(allowed, "x"), {}, allowed, ())
    assert [name for name, _ in shown] == [f"label_key{number}" for number in range(MAX_KEYS)]


def test_long_values_are_truncated_and_stay_distinct() -> None:
    ((_, one),) = exported_of({}, {"note": "n" * 4096}, (), ("note",))
    ((_, two),) = exported_of({}, {"note": "n" * 4097}, (), ("note",))
    assert len(one) == MAX_CHARACTERS
    assert one != two


@settings(deadline=None)  # a busy machine is not an error
@given(st.dictionaries(st.one_of(ANY_TEXT, LIKELY_TO_CLASH), ANY_TEXT, max_size=20))
def test_arbitrary_labels_give_valid_unique_names(labels: dict[str, str]) -> None:
    shown = exported_of(labels, labels, tuple(labels), tuple(labels))
    names = [name for name, _ in shown]
    assert names == sorted(set(names))
    assert len(names) <= 2 * MAX_KEYS
    for name, value in shown:
        assert re.fullmatch(r"(label|annotation)_[a-z0-9_]*", name)
        assert value.isprintable()
        assert 0 < len(value) <= MAX_CHARACTERS


@settings(deadline=None)
@given(st.lists(LIKELY_TO_CLASH, unique=True, max_size=10))
def test_clashing_keys_get_unique_names_independent_of_order(keys: list[str]) -> None:
    names = export_names("label", keys)
    assert set(names) == set(keys)
    assert len(set(names.values())) == len(keys)
    assert export_names("label", keys[::-1]) == names
