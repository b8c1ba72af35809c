"""The corpus's view of an agent, against the agent's own meter, second by second."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest
from corpus_series import OwnedNode
from corpus_support import Shape, load, shape_of
from metering_support import holder, use, whole

from exporter.accounting.activity import ActivityJudge, DeviceLevel, Observation
from exporter.accounting.meter import Meter
from exporter.accounting.windows import Windows
from exporter.model.attribution import Holder, Owner, ShareMode
from exporter.model.fields import DECODERS, Field
from exporter.model.snapshot import DeviceView

STEP_SECONDS = 30

PHASES = {
    "name": "phases",
    "why": "One pod with GPUs of its own.",
    "lasts": "40m",
    "metadata": False,
    "workloads": [
        {
            "name": "p",
            "pods": [
                {
                    "name": "p",
                    "from": "1m",
                    "to": "30m",
                    "each": [["0.9 5m", "? 4m", "0"], [{"repeat": ["1 7s", "0 31s"]}]],
                }
            ],
        }
    ],
}
SHARERS = {
    "name": "sharers",
    "why": "Two pods that share a GPU, the one busier than its share.",
    "lasts": "20m",
    "metadata": False,
    "workloads": [
        {"name": "a", "pods": [{"name": "a", "gpu": "g", "share": 0.25, "activity": ["0.6 6m", "0.1"]}]},
        {"name": "b", "pods": [{"name": "b", "gpu": "g", "share": 0.25, "from": "2m", "to": "12m", "activity": 0}]},
    ],
}


@dataclass(slots=True)
class Metered:
    """The node of a shape in the agent's meter, second by second."""

    shape: Shape
    meter: Meter = field(default_factory=lambda: Meter(1.0, owner_of))
    windows: Windows = field(default_factory=Windows)
    second: int = 0

    def until(self, end: float) -> dict[Owner, Mapping[str, tuple[float, float]]]:
        """Return active and measured seconds by owner and window."""
        while self.second <= end:
            self.windows.add(
                self.meter.add(list(views(self.shape, float(self.second))), float(self.second)), float(self.second)
            )
            self.second += 1
        reading = self.windows.at(end)
        return {owner: reading.of_owner(owner) for owner in reading.owners()}


def owner_of(held: Holder) -> Owner:
    return Owner(namespace=held.namespace, kind="Pod", name=held.pod, provisional=True)


def views(shape: Shape, t: float) -> Iterator[DeviceView]:
    """Return the node of a shape at ``t``, as in the agent's tick."""
    for board in shape.boards:
        pods = [
            use(
                holder(
                    pod.name,
                    f"GPU-{board.index}",
                    share=held.share,
                    mode=ShareMode.SHARED if held.mode == "shared" else ShareMode.EXCLUSIVE,
                    namespace=pod.namespace,
                ),
                held.part.at(t),
            )
            for workload in shape.workloads
            for pod in workload.pods
            for held in pod.uses
            if held.board == board and pod.start <= t < pod.end
        ]
        yield whole(*pods, index=board.index)


@pytest.mark.parametrize("raw", [PHASES, SHARERS], ids=lambda raw: raw["name"])
def test_corpus_windows_match_the_meter(raw: dict[str, object]) -> None:
    shape = shape_of(raw)
    times = [float(STEP_SECONDS * number) for number in range(int(shape.lasts // STEP_SECONDS))]
    metered, seen = Metered(shape), 0
    for t, view in zip(times, OwnedNode(shape, shape.nodes[0], times, (), ()).views(), strict=True):
        real = metered.until(t)
        for mine in view.owners if view else ():
            for window, measured in mine.measured_seconds.items():
                seen += 1
                # A window of days begins at a tick, and a sample covers the second before it.
                theirs = real.get(mine.owner, {}).get(window, (0.0, 0.0))
                expected = mine.active_seconds.get(window, 0.0), measured
                assert expected == pytest.approx(theirs, abs=5.0), (mine.owner, window, t)
    assert seen > len(times)


ENGINE = Field.PROF_GR_ENGINE_ACTIVE
AT_REST = {Field.ENC_UTIL: 0, Field.DEC_UTIL: 0, Field.JPG_UTIL: 0, Field.OFA_UTIL: 0}
A100 = {"model": "NVIDIA A100-SXM4-80GB", "level": DeviceLevel.INSTANCE, "values": {ENGINE: 0.0}, "process_count": 1}
L40S = {"model": "NVIDIA L40S", "values": {ENGINE: 0.0, Field.GPU_UTIL: 0, Field.ENC_UTIL: 0, Field.DEC_UTIL: 0}}
TELEMETRY: dict[str, dict[str, object]] = {
    "a100-mig-idle-with-dcgm": A100,
    "dcgm-alone-idle": L40S,
    "a100-mig-decodes": {**A100, "parent_values": {DECODERS[0]: 0.4}},
    "dead-engine-counter": {"values": {ENGINE: 0.0, Field.GPU_UTIL: 45, **AT_REST}},
    "unknown-activity": {**A100, "values": {Field.FB_USED: 3000}},
}


@pytest.mark.parametrize("name", TELEMETRY)
def test_corpus_activity_matches_the_activity_judge(name: str) -> None:
    shape = next(shape for shape in load() if shape.name == name)
    use, judge = shape.workloads[0].pods[0].uses[0], ActivityJudge()
    for second in range(600):
        sample = Observation(**{"uuid": "one", "at_seconds": float(second), **TELEMETRY[name]})  # type: ignore[arg-type]
        activity = judge.judge(sample, idle_below=0.05).activity
        assert (activity and activity.ratio) == use.part.at(float(second)), second
