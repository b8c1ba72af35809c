"""Scenario files, the API's side: metadata, declared parts and claims are read, and mistakes in them are reported."""

import pytest

from exporter.errors import ConfigError
from gpu_simulator import scenario, scenario_file
from gpu_simulator.truth import HolderTruth, NodeTruth

METADATA = """\
node: n1
node_labels: {topology.kubernetes.io/region: r1}
namespaces:
  team: {labels: {team: ml, empty: ""}}
gpus:
  - {model: h100}
pods:
  - namespace: team
    name: run
    labels: {app: run}
    annotations: {note: "7"}
    owner: {kind: Job, name: run}
    sidecars: [proxy]
    end: 60
    finished: 30
    every: 100
    devices: [{gpu: 0}]
    activity: 0.5
"""

HAMI = """\
node: n1
plugin: {ids: hami}
gpus:
  - {model: l40s, count: 2, sharing: {strategy: fraction}}
pods:
  - namespace: team
    name: one
    devices: [{gpu: 0, memory_mib: 23034, cores: 10}]
    activity: 0.5
  - namespace: team
    name: two
    devices: [{gpu: 0, memory_mib: 10000, cores: 60}]
    activity: 0.5
"""

KAI = """\
node: n1
plugin: {ids: kai}
gpus:
  - {model: h100, sharing: {strategy: fraction}}
  - {model: h100, sharing: {strategy: fraction}}
pods:
  - namespace: team
    name: half
    start: 10
    end: 50
    devices: [{gpu: 0, fraction: 0.5}]
    activity: 0.5
  - namespace: team
    name: third
    start: 20
    sidecars: [proxy]
    devices: [{gpu: 0, fraction: 0.3}, {gpu: 1, fraction: 0.3}]
    activity: 0.5
"""

DRA = """\
node: n1
plugin: {ids: dra}
gpus:
  - {model: h100}
  - {model: h100, sharing: {strategy: fraction}}
pods:
  - namespace: team
    name: one
    devices: [{gpu: 0, claim: both}]
    activity: 0.2
  - namespace: team
    name: two
    end: 60
    devices: [{gpu: 0, claim: both}, {gpu: 1, memory_mib: 20480}]
    activity: 0.2
  - namespace: health
    name: watch
    devices: [{gpu: 0, admin: true}, {gpu: 1, admin: true}]
    activity: 0
"""


def at(text: str, t: float) -> NodeTruth:
    return scenario.build(scenario_file.parse(text, "s.yaml")).at(t)


def shares(truth: NodeTruth) -> list[tuple[str, float]]:
    return [(holder.pod, round(holder.share_ratio, 4)) for holder in truth.holders]


def listed_only(truth: NodeTruth) -> list[HolderTruth]:
    return list(truth.also_listed)


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (
            changed(METADATA, "{app: run}", "{app: 7}"),
            "s.yaml:10: pods[0].labels.app: is 7; allowed: a text (in quotes",
        ),
        (changed(METADATA, "{app: run}", "[app]"), "pods[0].labels: is a list; allowed: keys with values"),
        (
            changed(METADATA, "kind: Job", "kind: Jbo"),
            "owner.api: is missing, and 'Jbo' has no default; did you mean 'Job'",
        ),
        (changed(METADATA, "kind: Job", "knd: Job"), "owner.knd: is not a key here; did you mean 'kind'?"),
        (changed(METADATA, "[proxy]", "[main]"), "sidecars: has an invalid or repeated name"),
        (changed(METADATA, "{labels: {team: ml", "{lables: {team: ml"), "namespaces.team.lables: is not a key here"),
        (changed(METADATA, "every: 100", "every: 80"), "every: is 80; allowed: at least the duration"),
        (
            changed(METADATA, "{gpu: 0}", "{gpu: 0, claim: x}"),
            "claim: has no effect with plugin ids uuid; allowed: only with dra",
        ),
        (changed(METADATA, "{gpu: 0}", "{gpu: 0, cores: 5}"), "cores: has no effect with this plugin and this GPU"),
        (
            METADATA + "plugin: {dra_mig: dynamic}\n",
            "plugin.dra_mig: has no effect with ids uuid; allowed: only with dra",
        ),
        (METADATA + "dra_version: v2\n", "dra_version: is 'v2'; allowed: v1, v1beta2, v1beta1"),
        (
            changed(METADATA, "{model: h100}", "{model: h100, sharing: {strategy: fraction}}"),
            "allowed: a whole GPU, and plugin ids hami",
        ),
        (
            changed(HAMI, "cores: 10", "fraction: 0.5"),
            "fraction: has no effect with this plugin and this GPU; allowed: memory_mib and cores",
        ),
        (changed(HAMI, "cores: 10", "cores: 101"), "cores: is 101; allowed: a whole number from 0 to 100"),
        (
            changed(HAMI, "10000, cores: 60", "30000, cores: 60"),
            "s.yaml:12: pods[1].devices: GPU 0 would have 53034 of 46068 MiB",
        ),
        (changed(HAMI, "cores: 60", "cores: 95"), "GPU 0 would have 105 of 100 % of its cores in use at the same time"),
        (
            changed(HAMI, "activity: 0.5", "activity: 0.5\n    memory_mib: 30000"),
            "is 30000; allowed: at most the device's 23034",
        ),
        (
            changed(KAI, "fraction: 0.5}", "fraction: 0.5, memory_mib: 9}"),
            "fraction: or memory_mib is required; allowed: one of",
        ),
        (changed(KAI, "fraction: 0.5", "fraction: 0.8"), "GPU 0 would have 89714 of 81559 MiB in use at the same time"),
        (
            changed(KAI, "{gpu: 1, fraction: 0.3}", "{gpu: 1, fraction: 0.4}"),
            "are different parts, or of different containers",
        ),
        (changed(DRA, ", memory_mib: 20480", ""), "devices[1].memory_mib: is missing; allowed: memory_mib"),
        (
            changed(DRA, "[{gpu: 0, claim: both}, {gpu: 1", "[{gpu: 0, claim: other}, {gpu: 1"),
            "GPU 0 is held by team/one at the same time",
        ),
        (
            changed(DRA, "{gpu: 1, memory_mib: 20480}", "{gpu: 1, memory_mib: 9, claim: both}"),
            "has other devices of claim 'both'",
        ),
        (
            changed(DRA, "{gpu: 0, admin: true}", "{gpu: 0, admin: true, extended: true}"),
            "extended: creates its own claim",
        ),
    ],
)
def test_api_section_mistake_is_reported_with_line_and_key(text: str, reported: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario_file.parse(text, "s.yaml")
    assert reported in "\n".join(caught.value.problems)


def test_metadata_of_pods_namespaces_and_node_is_in_the_truth() -> None:
    truth = at(METADATA, 5.0)
    (pod,) = truth.pods
    assert (pod.labels, pod.annotations) == ({"app": "run"}, {"note": "7"})
    assert (pod.owner_kind, pod.owner_name, pod.owner_api) == ("Job", "run", "batch/v1")
    assert (pod.name, pod.uid, pod.containers) == ("run-0", truth.holders[0].pod_uid, ("proxy", "main"))
    assert truth.other_pods == (("team", "run-0", "proxy"),)
    assert truth.cluster.namespaces == {"team": {"team": "ml", "empty": ""}}
    assert truth.cluster.node_labels == {"topology.kubernetes.io/region": "r1"}
    assert truth.cluster.dra_version == ""


def test_a_finished_pod_is_listed_for_a_while_and_holds_nothing() -> None:
    assert [(pod.phase, len(at(METADATA, t).holders)) for t in (59.0, 61.0) for pod in at(METADATA, t).pods] == [
        ("Running", 1),
        ("Succeeded", 0),
    ]
    (listed,) = listed_only(at(METADATA, 61.0))
    assert (listed.pod, listed.container, listed.share_ratio) == ("run-0", "main", 0.0)
    assert (at(METADATA, 91.0).pods, listed_only(at(METADATA, 91.0))) == ((), [])


def test_hami_annotates_declared_shares_and_kubelet_ids_name_another_gpu() -> None:
    truth = at(HAMI, 0.0)
    one, other = truth.gpus
    assert [pod.annotations["hami.io/vgpu-devices-allocated"] for pod in truth.pods] == [
        f"{one.uuid},NVIDIA,23034,10:;",
        f"{one.uuid},NVIDIA,10000,60:;",
    ]
    assert [holder.device_ids for holder in truth.holders] == [(f"{other.uuid}-0",), (f"{other.uuid}-1",)]
    assert {holder.device_uuid for holder in truth.holders} == {one.uuid}


def test_greater_of_memory_and_cores_counts_and_excess_shares_are_scaled() -> None:
    assert shares(at(changed(HAMI, "cores: 60", "cores: 40"), 0.0)) == [("one", 0.5), ("two", 0.4)]
    assert shares(at(HAMI, 0.0)) == [("one", round(0.5 / 1.1, 4)), ("two", round(0.6 / 1.1, 4))]


def test_volcano_lists_three_resources_of_which_one_counts_gpus() -> None:
    truth = at(HAMI.replace("ids: hami", "ids: volcano-vgpu"), 0.0)
    assert [holder.resource for holder in truth.holders] == ["volcano.sh/vgpu-number"] * 2
    assert [(listed.resource, len(listed.device_ids)) for listed in listed_only(truth)] == [
        ("volcano.sh/vgpu-memory", 22),
        ("volcano.sh/vgpu-memory", 9),
    ]
    assert [set(pod.annotations) for pod in truth.pods] == [{"volcano.sh/vgpu-ids-new", "volcano.sh/vgpu-node"}] * 2


def test_reservation_pod_holds_the_gpu_while_a_pod_has_a_fraction_of_it() -> None:
    assert [len(listed_only(at(KAI, t))) for t in (5.0, 15.0, 25.0)] == [0, 1, 2]
    truth = at(KAI, 25.0)
    assert shares(truth) == [("half", 0.5), ("third", 0.3), ("third", 0.3)]
    assert not any(holder.listed for holder in truth.holders)
    half, third, *reservations = truth.pods
    assert half.labels["runai-gpu-group"] == reservations[0].labels["runai-gpu-group"]
    assert {f"runai-gpu-group/{pod.labels['runai-gpu-group']}" for pod in reservations} == set(third.labels)
    assert third.annotations["gpu-fraction-num-devices"] == "2"
    assert third.annotations["gpu-fraction-container-name"] == "main"
    assert [listed.device_ids for listed in listed_only(truth)] == [(gpu.uuid,) for gpu in truth.gpus]


def test_shared_claim_is_divided_and_monitoring_pods_hold_nothing() -> None:
    part = round(20480 / 81559, 4)
    assert shares(at(DRA, 1.0)) == [("one", 0.5), ("two", 0.5), ("two", part)]
    assert shares(at(DRA, 61.0)) == [("one", 1.0)]
    assert [listed.pod for listed in listed_only(at(DRA, 1.0))] == ["watch", "watch"]
