"""Scenario files: valid content becomes a plan, and all errors are reported at once by line and key."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.errors import ConfigError
from gpu_simulator import scenario, scenario_file
from gpu_simulator.activity import MIXES
from gpu_simulator.models import MODELS
from gpu_simulator.plan import DraMig, DraVersion, IdForm, MigStrategy, Runtime, Sharing
from gpu_simulator.truth import Fault

WELL = """\
node: n1
gpus:
  - {model: h100, count: 2}
  - {model: h100, mig: [3g.40gb, 1g.10gb]}
  - {model: h100, sharing: {replicas: 4}}
pods:
  - namespace: team
    name: one
    devices: [{gpu: 0}, {gpu: 1, scale: 0}]
    activity: 0.5
  - namespace: team
    name: two
    containers:
      - {name: a, devices: [{gpu: 2, mig: 1}], activity: {sine: {mean: 0.5, amplitude: 0.2, period: 60}}}
      - {name: b, devices: [{gpu: 3, replicas: [0, 3]}], activity: {steps: [{at: 0, level: 1}, {at: 9, level: 0}]}}
"""


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        scenario_file.parse(text, "s.yaml")
    return caught.value.problems


def changed(old: str, new: str) -> str:
    assert old in WELL
    return WELL.replace(old, new)


def test_containers_devices_and_replicas_become_holders() -> None:
    truth = scenario.build(scenario_file.parse(WELL, "s.yaml")).at(5.0)
    held = {(h.container, h.device_ids[0].split("-")[0], len(h.device_ids), h.share_ratio) for h in truth.holders}
    assert held == {("main", "GPU", 1, 1.0), ("a", "MIG", 1, 1 / 7), ("b", "GPU", 2, 0.5)}
    assert truth.gpus[1].load.engine == 0.0


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        (changed("node: n1\n", ""), "s.yaml:1: node: is missing"),
        (changed("count: 2", "cuont: 2"), "s.yaml:3: gpus[0].cuont: is not a key here; did you mean 'count'?"),
        (changed("model: h100, count", "model: h10, count"), "s.yaml:3: gpus[0].model: is 'h10'; did you mean 'h100'?"),
        (
            changed("{gpu: 0}", "{gpu: 9}"),
            "s.yaml:9: pods[0].devices[0].gpu: is 9, which does not exist; allowed: 0 to 3",
        ),
        (changed("{gpu: 2, mig: 1}", "{gpu: 2}"), "mig: is missing, but GPU 2 is partitioned; allowed: 0 (3g.40gb), 1"),
        (changed("{gpu: 2, mig: 1}", "{gpu: 2, mig: 2}"), "mig: is 2, which does not exist"),
        (changed("{gpu: 0}", "{gpu: 0, mig: 0}"), "mig: is 0, but GPU 0 is not partitioned"),
        (changed("[0, 3]", "[0, 4]"), "replicas: has 4; allowed on GPU 3: 0 to 3"),
        (changed(", replicas: [0, 3]", ""), "replicas: is missing, but GPU 3 is shared; allowed: 0 to 3"),
        (changed("{gpu: 0}", "{gpu: 0, replicas: [0]}"), "replicas: is set, but GPU 0 is not shared"),
        (changed("[3g.40gb, 1g.10gb]", "[4g.40gb, 4g.40gb]"), "s.yaml:4: gpus[1].mig: 4g.40gb does not fit next to"),
        (changed("[3g.40gb, 1g.10gb]", "[3g.40gb, 1g.5gb]"), "has no MIG profile '1g.5gb'; allowed: 1g.10gb, 2g.20gb"),
        (
            changed("activity: 0.5", "activity: 1.5"),
            "s.yaml:10: pods[0].activity: is 1.5; allowed: a number from 0 to 1",
        ),
        (changed("activity: 0.5", "activity: {sinus: {}}"), "has sinus; did you mean 'sine'? Allowed: exactly one of"),
        (changed("activity: 0.5", ""), "pods[0].activity: is missing; allowed: a number from 0 to 1"),
        (changed("activity: 0.5", "activity: 0.5\n    kind: trainign"), "did you mean 'training'?"),
        (changed("activity: 0.5", "activity: 0.5\n    memory_mib: 90000"), "allowed: at most the device's 81559"),
        (changed("amplitude: 0.2", "amplitude: 0.7"), "sine.amplitude: is 0.7; allowed: a number from 0 to 0.5"),
        (changed("name: two", "name: 2"), "pods[1].name: is 2; allowed: a text (in quotes"),
        (changed("{gpu: 1, scale: 0}", "{gpu: 0}"), "GPU 0 is held"),
        (WELL + "faults: [{kind: gpu_lots, gpu: 0}]\n", "did you mean 'gpu_lost'?"),
        (WELL + "faults: [{kind: kubelet_down, gpu: 0}]\n", "has no effect with kubelet_down"),
        (WELL + "faults: [{kind: gpu_lost, gpu: 0, for: 9, every: 5}]\n", "faults[0].every: is 5"),
        (WELL + "xids: [{gpu: 4, code: 79, at: 0}]\n", "xids[0].gpu: is 4, which does not exist"),
        (WELL + "faults: [{kind: api_slow}]\n", "faults[0].seconds: is missing; allowed: a number from 0"),
        (WELL + "node: n2\n", "s.yaml:16: node: appears twice"),
        (WELL + "pods: [", "is not YAML"),
        ("", "s.yaml:1: is empty"),
        ("- a\n", "s.yaml:1: the file: is a list; allowed: keys with values"),
    ],
)
def test_mistake_is_reported_with_file_line_key_and_allowed_values(text: str, reported: str) -> None:
    assert reported in "\n".join(problems(text))


def test_all_mistakes_are_reported_at_once() -> None:
    text = changed("{gpu: 0}", "{gpu: 7}").replace("count: 2", "cont: 2").replace("0.5\n", "high\n") + "zzz: 1\n"
    lines = [int(problem.split(":")[1]) for problem in problems(text)]
    assert {3, 9, 10, 16} <= set(lines)


@given(st.text(max_size=200))
def test_no_text_crashes_the_reader(text: str) -> None:
    try:
        scenario_file.parse(text, "s.yaml")
    except ConfigError as error:
        assert all(problem.startswith("s.yaml:") for problem in error.problems)  # noqa: PT017 - the usual outcome


@given(
    st.sampled_from(range(len(WELL.splitlines()))), st.sampled_from(["x", "[]", "{}", "- 1", "3: 4", "~", "!!binary x"])
)
def test_no_broken_line_crashes_the_reader(number: int, line: str) -> None:
    lines = WELL.splitlines()
    lines[number] = line
    test_no_text_crashes_the_reader.hypothesis.inner_test("\n".join(lines))


@pytest.mark.parametrize(
    ("plugin", "expected"),
    [
        ("{ids: uuid}", {"GPU-", "MIG-"}),
        ("{ids: legacy-mig}", {"GPU-", "MIG-GPU-"}),
        ("{ids: gke}", {"nvidia0", "nvidia2/gi7", "nvidia3/vgpu3"}),
        ("{ids: dra}", {"dra:gpu.nvidia.com/n1/gpu-0", "dra:gpu.nvidia.com/n1/gpu-2-mig-1g10gb-0-0"}),
        ("{ids: hami}", {"GPU-"}),
    ],
)
def test_the_nodes_plugin_decides_the_form_of_the_ids(plugin: str, expected: set[str]) -> None:
    truth = scenario.build(scenario_file.parse(WELL + f"plugin: {plugin}\n", "s.yaml")).at(0.0)
    ids = [device_id for holder in truth.holders for device_id in holder.device_ids]
    assert all(any(device_id.startswith(form) for device_id in ids) for form in expected), ids


def test_mig_strategy_and_renaming_decide_the_resource_names() -> None:
    text = WELL + "plugin: {mig_strategy: single, rename_shared: true}\n"
    truth = scenario.build(scenario_file.parse(text, "s.yaml")).at(0.0)
    assert {holder.resource for holder in truth.holders} == {"nvidia.com/gpu", "nvidia.com/gpu.shared"}


def test_documented_example_parses_and_the_document_names_every_option() -> None:
    text = (Path(__file__).parent.parent / "docs" / "scenarios.md").read_text()
    example = text.split("```yaml\n")[1].split("```")[0]
    assert len(scenario_file.parse(example, "docs.yaml").gpus) == 4
    for names in (MODELS, MIXES, scenario.shipped(), Fault, IdForm, Runtime, MigStrategy, DraMig, DraVersion, Sharing):
        assert [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)] == []


def test_a_file_is_loaded_by_its_path_and_keeps_it_for_the_child(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(WELL)
    loaded = scenario.load(str(path))
    assert (loaded.name, loaded.source) == ("mine", str(path))


def test_non_utf_8_file_is_reported_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"node: \xff\xfe")
    with pytest.raises(ConfigError, match=r"mine\.yaml: is not UTF-8"):
        scenario.load(str(path))
