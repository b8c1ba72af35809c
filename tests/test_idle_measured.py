"""Idle time is measured time: codecs at every level, dead engine counters, missing readings; from driver to page."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from page_support import rows
from pipeline_support import Pipeline, pipeline

from exporter.model.devices import SourceState
from exporter.model.ledger import Bottleneck, ResourceProfile
from exporter.model.snapshot import Activity, ActivitySource, Snapshot
from gpu_simulator import scenario

NODE = """\
node: n
driver: 590.48.01
gpus:
{gpus}
pods:
{pods}
"""
SECONDS = 66
POD = """\
  - {{namespace: ml, name: {name}, container: c, start: -900, devices: [{device}], kind: inference, memory_mib: 2048,
     activity: {activity}, mix: {mix}}}
"""
DECODES = "{engine: 0.02, utilisation: 0.02, sm: 0, tensor: 0, dram: 0, decode: 1}"
DECODES_JPEG = "{engine: 0.02, utilisation: 0.02, sm: 0, tensor: 0, dram: 0, jpeg: 1}"
COMPUTES = "{engine: 1}"
MIG = "{{model: {model}, mig: [3g.{gb}gb, 3g.{gb}gb]}}"


def pod(name: str, device: str, activity: str, mix: str = COMPUTES) -> str:
    return POD.format(name=name, device=device, activity=activity, mix=mix)


@dataclass
class Results:
    """Final page of the agent, and content of its ledger."""

    snapshot: Snapshot

    def activity(self, name: str) -> Activity | None:
        return next(use.activity for view in self.snapshot.devices for use in view.pods if use.holder.pod == name)

    def reason(self, name: str) -> str:
        held = (view for view in self.snapshot.devices for use in view.pods if use.holder.pod == name)
        return next(held).activity_unknown_reason

    def idle_for(self, name: str) -> list[float]:
        return self._rows("gpu_pod_idle_for_seconds", pod_name=name)

    def seconds(self, name: str, part: str) -> float:
        return sum(self._rows(f"gpu_pod_{part}_seconds_total", pod_name=name))

    def counted(self, reason: str) -> float:
        return sum(self._rows("gpu_exporter_errors_total", part="activity", reason=reason))

    def _rows(self, family: str, **wanted: str) -> list[float]:
        return [value for labels, value in rows(self.snapshot, family) if wanted.items() <= labels.items()]


async def results_of(directory: Path, gpu: str, pods: str, *, source: str) -> Results:
    file = directory / "node.yaml"
    file.write_text(NODE.format(gpus=f"  - {gpu}", pods=pods), encoding="utf-8")
    node: Pipeline
    async with pipeline(scenario.load(str(file)), directory, start=0.0, source=source) as node:
        return Results(await node.until(float(SECONDS), steps=SECONDS))


H100_MIG, A100_MIG = MIG.format(model="h100", gb=40), MIG.format(model="a100-80gb", gb=40)
DECODER = pod("decoder", "{gpu: 0, mig: 0}", "0.9", DECODES)
RESTING = pod("resting", "{gpu: 0, mig: 1}", "0")


@pytest.mark.parametrize("source", ["nvml", "auto"])
async def test_decoding_instance_is_active_and_its_neighbour_is_idle(tmp_path: Path, source: str) -> None:
    seen = await results_of(tmp_path, H100_MIG, DECODER + RESTING, source=source)
    assert seen.activity("decoder") == Activity(ratio=pytest.approx(0.9), source=ActivitySource.CODEC)
    assert seen.idle_for("decoder") == [0.0]
    assert seen.seconds("decoder", "active") > 18
    assert seen.seconds("decoder", "idle") < 6
    assert seen.seconds("resting", "idle") > 22
    assert seen.counted("incomplete") == 0


@pytest.mark.parametrize(
    ("gpu", "source"),
    [(H100_MIG, "dcgm"), (A100_MIG, "dcgm"), (A100_MIG, "auto")],
    ids=["h100 dcgm", "a100 dcgm", "a100 auto"],
)
async def test_unattributed_decoding_makes_instance_activity_unknown(tmp_path: Path, gpu: str, source: str) -> None:
    seen = await results_of(tmp_path, gpu, DECODER + RESTING, source=source)
    for name in ("decoder", "resting"):  # each of them has a process
        assert (seen.activity(name), seen.reason(name)) == (None, "incomplete")
        assert seen.idle_for(name) == []
        assert seen.seconds(name, "idle") < 2, "the first means take a second"
        assert seen.seconds(name, "unknown") > 20


@pytest.mark.parametrize("source", ["auto", "dcgm"])
async def test_idle_a100_instance_is_idle_without_codec_measurements(tmp_path: Path, source: str) -> None:
    busy = pod("busy", "{gpu: 0, mig: 0}", "0.7")
    seen = await results_of(tmp_path, A100_MIG, busy + RESTING, source=source)
    nothing = ResourceProfile((0.0, 0.0, 0.0, 0.0), Bottleneck.STARVED)
    assert seen.activity("resting") == Activity(
        ratio=0.0, source=ActivitySource.ENGINE, measured_by="dcgm", profile=nothing
    )
    assert seen.seconds("resting", "idle") > 22
    assert seen.seconds("resting", "unknown") < 2
    assert seen.idle_for("resting")[0] > 50
    assert seen.counted("incomplete") == 2, "counted once for each instance"


async def test_dcgm_alone_measures_jpeg_if_it_profiles_it(tmp_path: Path) -> None:
    jpeg = pod("jpeg", "{gpu: 0}", "0.9", DECODES_JPEG)
    seen = await results_of(tmp_path, "{model: h100}", jpeg, source="dcgm")
    expected = Activity(ratio=pytest.approx(0.9), source=ActivitySource.CODEC, measured_by="dcgm")
    assert seen.activity("jpeg") == expected
    assert seen.seconds("jpeg", "idle") < 12
    assert seen.counted("incomplete") == 0


async def test_dcgm_alone_counts_unmeasured_jpeg_as_incomplete(tmp_path: Path) -> None:
    resting = pod("resting", "{gpu: 0}", "0")
    seen = await results_of(tmp_path, "{model: l40s}", resting, source="dcgm")
    assert seen.seconds("resting", "idle") > 50, "an idle GPU stays idle"
    assert seen.counted("incomplete") == 1


@pytest.mark.parametrize("model", ["l40s", "a100-80gb", "h100"])
async def test_idle_time_continues_one_minute_after_nvml_disappears(tmp_path: Path, model: str) -> None:
    file = tmp_path / "node.yaml"
    gpus = f"  - {{model: {model}}}"
    text = NODE.format(gpus=gpus, pods=pod("resting", "{gpu: 0}", "0"))
    file.write_text(text, encoding="utf-8")
    async with pipeline(scenario.load(str(file)), tmp_path, source="auto") as node:
        nvml, dcgm = node.sampled
        await node.until(10.0, steps=10)
        node.sampled = (dcgm,)
        nvml.direct.state, nvml.direct.reason = SourceState.DIED, "died"
        seen = Results(await node.until(120.0, steps=110))
    found = seen.activity("resting")
    assert found is not None
    assert (found.ratio, found.measured_by) == (0.0, "dcgm")
    unmeasured = 0 if model == "h100" else 60  # before Hopper DCGM does not measure JPEG and optical flow
    assert seen.seconds("resting", "unknown") == pytest.approx(unmeasured, abs=2)
    assert seen.idle_for("resting")[0] == pytest.approx(119 - unmeasured, abs=2)


def steps(*percent: int) -> str:
    """Return overrides that repeat a utilisation second by second, with a dead engine counter."""
    values = [
        f"{{from: {second}, to: {second + 1}, values: {{GPU_UTIL: {percent[second % len(percent)]}}}}}"
        for second in range(SECONDS)
    ]
    return f"[{{values: {{PROF_GR_ENGINE_ACTIVE: 0}}}}, {', '.join(values)}]"


CASES: Mapping[str, tuple[int, ...]] = {
    "steady 45": (45,),
    "dips": (99, 30, 99, 99, 30, 99),
    "steady 99": (99,),
    "one second in six at 42": (99, 99, 99, 99, 99, 42),
}


@pytest.mark.parametrize(
    ("case", "model", "source"),
    [
        *((case, "h100", "nvml") for case in CASES),
        ("steady 45", "a100-80gb", "auto"),
        ("one second in six at 42", "a100-80gb", "dcgm"),
    ],
)
async def test_a_gpu_with_a_dead_engine_counter_is_not_billed_idle(
    tmp_path: Path, case: str, model: str, source: str
) -> None:
    gpu = f"{{model: {model}, overrides: {steps(*CASES[case])}}}"
    seen = await results_of(tmp_path, gpu, pod("trains", "{gpu: 0}", "0.9"), source=source)
    assert (seen.activity("trains"), seen.reason("trains")) == (None, "contradiction")
    assert seen.idle_for("trains") == []
    assert seen.seconds("trains", "unknown") > 33
    assert seen.seconds("trains", "idle") < 25, "idle until the mean utilisation exceeds 10 %"
    assert seen.counted("contradiction") == 1


@pytest.mark.parametrize("activity", ["0", "{square: {high: 0.95, period: 30, duty: 0.2}}", "0.12"], ids=str)
@pytest.mark.parametrize(("model", "source"), [("h100", "nvml"), ("a100-80gb", "auto"), ("t4", "nvml")])
async def test_a_healthy_gpu_has_no_unknown_time(tmp_path: Path, model: str, source: str, activity: str) -> None:
    seen = await results_of(tmp_path, f"{{model: {model}}}", pod("works", "{gpu: 0}", activity), source=source)
    assert seen.seconds("works", "unknown") == 0
    assert seen.counted("contradiction") == seen.counted("incomplete") == 0
