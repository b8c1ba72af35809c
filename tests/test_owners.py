import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from files_support import read_yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.attribution.owner_rules import (
    MAX_KIND,
    MAX_NAME,
    MAX_TEAM,
    RULES,
    OwnerRules,
    facts_of,
    label_text,
    wanted_annotations,
    workload_of,
)
from exporter.model.attribution import UNALLOCATED, UNATTRIBUTED, PodFacts, PodMetadata

FIXTURES = sorted((Path(__file__).parent / "fixtures" / "pods").glob("*.yaml"))
TEAM_KEYS = ("team", "owner", "project", "cost-center", "costcenter", "cost_center", "department")
DEFAULTS = OwnerRules(team_keys=TEAM_KEYS)

# Keys that some rule reads, so that hypothesis also generates matches of the rules.
KEYS = (
    *TEAM_KEYS,
    "ray.io/originated-from-crd",
    "ray.io/originated-from-cr-name",
    "ray.io/cluster",
    "leaderworkerset.sigs.k8s.io/name",
    "jobset.sigs.k8s.io/jobset-name",
    "training.kubeflow.org/job-name",
    "training.kubeflow.org/operator-name",
    "serving.kserve.io/inferenceservice",
    "app.kubernetes.io/part-of",
    "app.kubernetes.io/name",
    "notebook-name",
    "volcano.sh/job-name",
    "volcano.sh/queue-name",
    "scheduling.k8s.io/group-name",
    "sparkoperator.k8s.io/app-name",
    "job-name",
    "statefulset.kubernetes.io/pod-name",
    "pod-template-hash",
    "kueue.x-k8s.io/queue-name",
    "gpu-cost-exporter/workload-class",
    "gpu-cost-exporter/alerts",
    "gpu-cost-exporter/alerts-until",
)
WORDS = ("RayJob", "Job", "web-0", "web-29012345", "llminferenceservice", "mpi-operator", "disabled", "2026-12-31")
# Including lone surrogates: JSON may contain them.
ANY_TEXT = st.one_of(st.text(st.characters(codec=None), max_size=300), st.sampled_from(WORDS))
MAPPINGS = st.dictionaries(st.one_of(st.sampled_from(KEYS), ANY_TEXT), ANY_TEXT, max_size=12)
KINDS = st.one_of(ANY_TEXT, st.sampled_from(["Job", "ReplicaSet", "StatefulSet", "Unallocated", "Other", "RayCluster"]))
PODS = st.builds(
    PodMetadata,
    namespace=ANY_TEXT,
    name=ANY_TEXT,
    uid=ANY_TEXT,
    labels=MAPPINGS,
    annotations=MAPPINGS,
    owner_kind=KINDS,
    owner_name=ANY_TEXT,
    owner_api=st.one_of(ANY_TEXT, st.sampled_from(["apps/v1", "batch/v1", "batch.volcano.sh/v1alpha1", "v1"])),
)


def pod_of(document: Mapping[str, Any]) -> PodMetadata:
    metadata = document["metadata"]
    controllers = [owner for owner in metadata.get("ownerReferences", ()) if owner.get("controller")]
    owner = controllers[0] if controllers else {}
    return PodMetadata(
        namespace=metadata["namespace"],
        name=metadata["name"],
        uid=metadata.get("uid", "uid"),
        labels=metadata.get("labels", {}),
        annotations=metadata.get("annotations", {}),
        owner_kind=owner.get("kind", ""),
        owner_name=owner.get("name", ""),
        owner_api=owner.get("apiVersion", ""),
    )


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_fixture_pods_have_their_expected_owners(path: Path) -> None:
    fixture = read_yaml(path.read_text())
    namespace, expected = fixture.get("namespace", {}), fixture["expected"]
    pod = pod_of(fixture["pod"])
    facts = facts_of(pod, namespace.get("labels", {}), namespace.get("annotations", {}), DEFAULTS)
    assert facts.owner.namespace == fixture["pod"]["metadata"]["namespace"]
    assert {
        "kind": facts.owner.kind,
        "name": facts.owner.name,
        "team": facts.owner.team,
        "queue": facts.queue,
        "class": facts.workload_class,
        "opt_out": facts.opt_out_until_seconds,
        "problems": list(facts.problems),
    } == {"team": "", "queue": "", "class": "", "opt_out": None, "problems": [], **expected}


def test_every_rule_is_the_first_match_of_a_fixture_pod() -> None:
    pods = [pod_of(read_yaml(path.read_text())["pod"]) for path in FIXTURES]
    first = {next((index for index, rule in enumerate(RULES) if rule(pod)), None) for pod in pods}
    assert first == {*range(len(RULES)), None}
    assert len(pods) >= 25


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.stem)
def test_only_the_wanted_annotations_are_read(path: Path) -> None:
    fixture = read_yaml(path.read_text())
    pod = pod_of(fixture["pod"])
    rules = replace(DEFAULTS, exported_annotations=("sidecar.istio.io/inject",))
    wanted = wanted_annotations(rules)
    kept = replace(pod, annotations={key: value for key, value in pod.annotations.items() if key in wanted})
    assert facts_of(kept, {}, {}, rules) == facts_of(pod, {}, {}, rules)


@settings(deadline=None)  # a busy machine is not an error
@given(PODS, MAPPINGS, MAPPINGS, st.randoms(use_true_random=False))
def test_an_unchanged_pod_never_changes_its_owner(
    pod: PodMetadata, labels: dict[str, str], annotations: dict[str, str], chance: random.Random
) -> None:
    def shuffled(mapping: Mapping[str, str]) -> dict[str, str]:
        items = list(mapping.items())
        chance.shuffle(items)
        return dict(items)

    rules = OwnerRules(team_keys=TEAM_KEYS, exported_labels=("team", "a.b", "a/b"), exported_annotations=("owner",))
    same = replace(pod, labels=shuffled(pod.labels), annotations=shuffled(pod.annotations), uid="another")
    assert facts_of(same, shuffled(labels), shuffled(annotations), rules) == facts_of(pod, labels, annotations, rules)


@settings(deadline=None)
@given(PODS, st.dictionaries(st.from_regex(r"[a-z]{1,9}\.example\.com/[a-z]{1,9}", fullmatch=True), ANY_TEXT))
def test_labels_without_a_rule_change_nothing(pod: PodMetadata, others: dict[str, str]) -> None:
    more = replace(pod, labels={**pod.labels, **others}, annotations={**pod.annotations, **others})
    assert facts_of(more, {}, {}, DEFAULTS) == facts_of(pod, {}, {}, DEFAULTS)


@settings(deadline=None)
@given(PODS, MAPPINGS, MAPPINGS)
def test_arbitrary_text_gives_one_printable_owner(
    pod: PodMetadata, labels: dict[str, str], annotations: dict[str, str]
) -> None:
    facts = facts_of(pod, labels, annotations, OwnerRules(team_keys=TEAM_KEYS, exported_labels=KEYS))
    owner = facts.owner
    assert owner.kind
    assert owner.kind not in {UNALLOCATED.kind, UNATTRIBUTED.kind}
    assert not owner.provisional
    texts = [(owner.namespace, MAX_NAME), (owner.kind, MAX_KIND), (owner.name, MAX_NAME), (owner.team, MAX_TEAM)]
    texts += [(facts.queue, MAX_NAME), *((value, 128) for _, value in facts.exported)]
    for text, limit in texts:
        assert text.isprintable()
        assert text == text.strip()
        assert len(text) <= limit
    owners = {"text_too_long", "text_unreadable", "unknown_kind"}
    assert set(facts.problems) <= {"bad_workload_class", "bad_opt_out", *owners}


def test_uncertain_owners_have_named_problems() -> None:
    pod = PodMetadata(namespace="n", name="p", uid="u", owner_kind="Deployment2", owner_name="x", owner_api="e.com/v1")
    rules = OwnerRules(team_keys=("team",))
    assert facts_of(pod, {}, {}, rules).problems == ("unknown_kind",)
    assert facts_of(replace(pod, owner_kind="DaemonSet"), {}, {}, rules).problems == ()
    assert facts_of(replace(pod, labels={"ray.io/cluster": "c"}), {}, {}, rules).problems == ()
    lone = replace(pod, owner_kind="", owner_name="")
    assert facts_of(lone, {"team": "v" * 4096}, {}, rules).problems == ("text_too_long",)
    assert facts_of(lone, {}, {"team": b"\xffision".decode(errors="replace")}, rules).problems == ("text_unreadable",)


def test_pod_matching_several_rules_gets_the_first_in_the_table() -> None:
    everything = PodMetadata(
        namespace="n",
        name="p",
        uid="u",
        labels={
            "ray.io/cluster": "a-raycluster",
            "leaderworkerset.sigs.k8s.io/name": "b-set",
            "jobset.sigs.k8s.io/jobset-name": "c-jobset",
            "notebook-name": "d-notebook",
            "batch.kubernetes.io/job-name": "e-job",
        },
        annotations={"scheduling.k8s.io/group-name": "f-group"},
        owner_kind="Job",
        owner_name="e-job",
        owner_api="batch/v1",
    )
    assert workload_of(everything) == ("RayCluster", "a-raycluster")
    labels = dict(everything.labels)
    found = []
    for key in tuple(labels):
        found.append(workload_of(replace(everything, labels=dict(labels)))[0])
        del labels[key]
    assert found == ["RayCluster", "LeaderWorkerSet", "JobSet", "Notebook", "PodGroup"]
    assert workload_of(replace(everything, labels={}, annotations={})) == ("Job", "e-job")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("backup-23667840", ("CronJob", "backup")),  # 2015-01-01
        ("backup-23667839", ("Job", "backup-23667839")),
        ("backup-68374079", ("CronJob", "backup")),  # 2099-12-31
        ("backup-68374080", ("Job", "backup-68374080")),
        ("backup-1732100000", ("Job", "backup-1732100000")),  # seconds
        ("backup-2901234", ("Job", "backup-2901234")),
        ("a-29012345-29012345", ("CronJob", "a-29012345")),
        ("-29012345", ("Job", "-29012345")),
        ("backup-٢٩٠١٢٣٤٥", ("Job", "backup-٢٩٠١٢٣٤٥")),
    ],
)
def test_cron_job_is_inferred_only_from_a_plausible_minute(name: str, expected: tuple[str, str]) -> None:
    pod = PodMetadata(namespace="n", name="p", uid="u", owner_kind="Job", owner_name=name, owner_api="batch/v1")
    assert workload_of(pod) == expected


def test_replica_set_without_hash_suffix_is_its_own_workload() -> None:
    pod = PodMetadata(
        namespace="n",
        name="p",
        uid="u",
        labels={"pod-template-hash": "abc"},
        owner_kind="ReplicaSet",
        owner_name="webabc",
        owner_api="apps/v1",
    )
    assert workload_of(pod) == ("ReplicaSet", "webabc")
    assert workload_of(replace(pod, owner_name="-abc")) == ("ReplicaSet", "-abc")
    assert workload_of(replace(pod, owner_name="web-abc")) == ("Deployment", "web")


class Noting(dict[str, str]):
    """A mapping without items that notes the requested keys."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return False

    def get(self, key: str, default: str | None = None) -> str | None:
        self.asked.add(key)
        return default


def test_owners_document_names_every_key_and_every_kind_of_a_rule() -> None:
    text = (Path(__file__).parent.parent / "docs" / "owners.md").read_text()
    labels, annotations = Noting(), Noting()
    facts_of(
        PodMetadata(namespace="n", name="p", uid="u", labels=labels, annotations=annotations), {}, {}, OwnerRules()
    )
    assert len(labels.asked) > 30
    assert [key for key in sorted(labels.asked | annotations.asked) if f"`{key}" not in text] == []
    assert annotations.asked == wanted_annotations(OwnerRules())
    pods = [pod_of(read_yaml(path.read_text())["pod"]) for path in FIXTURES]
    known = {workload_of(pod)[0] for pod in pods if any(rule(pod) for rule in RULES[:-1])} - {"FlaxJob"}
    assert [kind for kind in sorted(known) if f"`{kind}`" not in text] == []


def teams(pod: PodMetadata, labels: Mapping[str, str], annotations: Mapping[str, str]) -> str:
    return facts_of(pod, labels, annotations, DEFAULTS).owner.team


def test_team_is_read_from_the_pod_then_the_namespace_labels_first() -> None:
    pod = PodMetadata(
        namespace="n", name="p", uid="u", labels={"department": "a"}, annotations={"team": "b", "owner": "c"}
    )
    assert teams(pod, {"team": "d"}, {"team": "e"}) == "a"
    assert teams(replace(pod, labels={}), {"team": "d"}, {"team": "e"}) == "b"
    assert teams(replace(pod, labels={}, annotations={}), {"team": "d"}, {"team": "e"}) == "d"
    assert teams(replace(pod, labels={}, annotations={}), {}, {"team": "e"}) == "e"
    assert teams(replace(pod, labels={}, annotations={}), {}, {}) == ""


def test_cost_labels_come_from_the_pod_or_its_namespace_sorted_by_key() -> None:
    pod = PodMetadata(
        namespace="n",
        name="p",
        uid="u",
        labels={"project": "llm", "environment": "", "user": "anna", "tier": "a=b,c"},
        annotations={"example.com/cost-center": "7"},
    )
    of_namespace = {"project": "default", "environment": "prod", "example.com/cost-center": "42"}
    keys = ("project", "example.com/cost-center", "absent", "environment", "tier")
    facts = facts_of(pod, of_namespace, {"absent": "said"}, OwnerRules(cost_labels=keys))
    assert facts.owner.cost_labels == "environment=prod,example.com/cost-center=42,project=llm"
    assert facts_of(pod, {}, {}, OwnerRules(cost_labels=("absent",))).owner.cost_labels == ""
    assert facts_of(pod, of_namespace, {}, DEFAULTS).owner.cost_labels == "", "there are none by default"


def test_the_order_of_team_keys_decides_between_two_on_one_object() -> None:
    pod = PodMetadata(namespace="n", name="p", uid="u", labels={"team": "a", "cost-center": "b"})
    assert facts_of(pod, {}, {}, OwnerRules(team_keys=("cost-center", "team"))).owner.team == "b"
    assert facts_of(pod, {}, {}, OwnerRules(team_keys=("team", "cost-center"))).owner.team == "a"
    assert facts_of(pod, {}, {}, OwnerRules()).owner.team == ""


def test_long_texts_with_a_common_prefix_stay_distinct() -> None:
    one, two = label_text("x" * 4096 + "1", 128), label_text("x" * 4096 + "2", 128)
    assert len(one) == len(two) == 128
    assert one != two
    assert label_text(one, 128) == one


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  ml \t platform\n", "ml platform"),
        ("a\x00b\x1b[31mc", "ab[31mc"),
        ("left\u202eright", "leftright"),
        ("no\u00a0break", "no break"),
        ("\ud800", ""),
        ("Zürich 東京 🙂", "Zürich 東京 🙂"),
    ],
)
def test_unprintable_characters_are_removed(text: str, expected: str) -> None:
    assert label_text(text, 64) == expected


def test_pod_without_labels_has_only_default_facts() -> None:
    facts = facts_of(PodMetadata(namespace="n", name="p", uid="u"), {}, {}, DEFAULTS)
    assert facts == PodFacts(owner=facts.owner)
    assert (facts.owner.namespace, facts.owner.kind, facts.owner.name, facts.owner.team) == ("n", "Pod", "p", "")
