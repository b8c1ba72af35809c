"""An Xid is counted once and at once, from either of two sources, also while one of them is down."""

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_support import DirectSource, pipeline

from exporter.agent.sources import Sources
from exporter.model.devices import Gpu, GpuReading, Reading, SourceState, XidEvent
from exporter.model.fields import Field
from gpu_simulator import scenario

EPOCH = 1_800_000_000.0
GPUS = tuple(
    GpuReading(
        gpu=Gpu(uuid=f"GPU-{number}", index=number, minor=number, model="A100", pci_bus_id=""),
        values={Field.GPU_UTIL: 1},
    )
    for number in range(2)
)
Xid = tuple[str, int]


class Node:
    """Two sources, at one-second intervals; their events are counted."""

    def __init__(self) -> None:
        self.nvml, self.dcgm = DirectSource(name="nvml"), DirectSource(name="dcgm")
        self.sources = Sources(nvml=self.nvml, dcgm=self.dcgm, stale_after_seconds=3.0)
        self.counted: Counter[Xid] = Counter()
        self.wall = EPOCH
        self.dcgm_gpus = GPUS

    def read(self, at: float, nvml: list[int] | None = None, dcgm: list[int] | None = None, uuid: str = "GPU-0") -> int:
        """Take a reading of each source that has one, with these Xids, and return the number of new events."""
        for source, xids in ((self.nvml, nvml), (self.dcgm, dcgm)):
            if xids is not None:
                source.state = SourceState.UP
                source.readings.append(
                    Reading(
                        source=source.name,
                        taken_at_seconds=self.wall + at,
                        duration_seconds=0.01,
                        steady_seconds=at + (0.01 if source is self.dcgm else 0.0),
                        gpus=GPUS if source is self.nvml else self.dcgm_gpus,
                        xids=tuple(XidEvent(uuid=uuid, xid=xid, at_seconds=self.wall + at) for xid in xids),
                    )
                )
        before = self.counted.total()
        for reading in self.sources.take(self.wall + at, at + 0.02):
            self.counted.update((event.uuid, event.xid) for event in reading.xids)
        return self.counted.total() - before

    def nvml_dies(self) -> None:
        self.nvml.state, self.nvml.reason = SourceState.DIED, "died"


@pytest.fixture
def node() -> Node:
    node = Node()
    node.read(1.0, [], [])
    return node


@pytest.mark.parametrize("first", ["nvml", "dcgm"])
def test_xid_reported_by_both_sources_counts_once_in_either_order(node: Node, first: str) -> None:
    reported = [node.read(2.0, [79] if first == "nvml" else [], [79] if first == "dcgm" else [])]
    reported.append(node.read(3.0, [] if first == "nvml" else [79], [] if first == "dcgm" else [79]))
    assert reported == [1, 0], "nothing is held back"
    node.nvml_dies()
    assert node.read(4.0, None, []) == 0


def test_late_nvml_report_of_an_xid_counted_during_its_outage_is_not_repeated(node: Node) -> None:
    assert node.read(3.0, None, []) == 0
    assert node.read(5.0, None, [79]) == 1, "NVML hangs"
    assert node.read(9.0, [79], []) == 0, "it continues, and delivers earlier events"
    node.nvml_dies()
    assert node.read(10.0, None, [79]) == 1, "a second event"
    assert node.read(11.0, [], []) == 0
    assert node.read(12.0, [79], []) == 1, "NVML missed the former event: this is another one"
    assert node.read(13.0, [], [79]) == 0


def test_new_xid_during_an_nvml_outage_is_not_matched_to_an_older_one(node: Node) -> None:
    assert node.read(2.0, [31], [31]) == 1
    node.nvml_dies()
    assert node.read(5.0, None, [31]) == 1


def test_burst_reported_slowly_by_dcgm_is_not_repeated_after_nvml_death(node: Node) -> None:
    assert node.read(2.0, [13] * 20, []) == 20
    for second in range(3, 8):
        assert node.read(second, [], [13]) == 0
    node.nvml_dies()
    for second in range(8, 23):
        assert node.read(second, None, [13]) == 0
    assert node.read(24.0, None, [13]) == 1, "the twenty are paired: this is another one"


def test_repeated_xids_are_counted_each_time_and_per_gpu(node: Node) -> None:
    assert node.read(2.0, [94, 94], [94]) == 2
    assert node.read(3.0, [94], [94, 94]) == 1
    assert node.read(4.0, [94], [], uuid="GPU-1") == 1
    node.nvml_dies()
    assert node.read(5.0, None, [94], uuid="GPU-1") == 0


def test_wall_clock_change_between_two_reports_creates_no_second_event(node: Node) -> None:
    assert node.read(2.0, [79], []) == 1
    node.nvml_dies()
    node.wall -= 7200
    assert node.read(3.0, None, [79]) == 0


def test_xid_of_dcgm_on_another_machine_is_not_counted(node: Node) -> None:
    node.dcgm_gpus = tuple(replace(one, gpu=replace(one.gpu, uuid=f"GPU-far-{one.gpu.index}")) for one in GPUS)
    node.read(2.0, [], [])
    assert node.read(3.0, [], [79]) == 0


told_by = st.sampled_from(["nvml", "dcgm", "both", "neither"])


@given(script=st.lists(st.tuples(told_by, told_by, st.booleans()), max_size=9))
def test_no_xid_event_is_lost_or_counted_more_often_than_reported(
    script: list[tuple[str, str, bool]],
) -> None:
    node, heard = Node(), Counter[str]()
    for second, (reads, tells, dies) in enumerate(script):
        if dies:
            node.nvml_dies()
        xids = {
            name: ([79] if tells in (name, "both") else []) if reads in (name, "both") else None
            for name in ("nvml", "dcgm")
        }
        heard.update({name: len(some or ()) for name, some in xids.items()})
        node.read(float(second), xids["nvml"], xids["dcgm"])
        if not any(died for _, _, died in script):
            assert node.counted.total() <= max(heard["nvml"], heard["dcgm"])
        assert node.counted.total() <= heard.total()
    node.read(30.0, [], [])
    assert node.counted.total() >= max(heard["nvml"], heard["dcgm"])


XIDS = """
node: n1
gpus: [{model: a100-80gb}]
xids: [{gpu: 0, code: 31, at: 4.5}, {gpu: 0, code: 79, at: 14.5}, {gpu: 0, code: 31, at: 24.5}]
"""


async def test_real_driver_and_engine_count_every_xid_once_through_an_nvml_outage(tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(XIDS)
    async with pipeline(scenario.load(str(path)), tmp_path, source="auto") as node:
        nvml, dcgm = node.sampled

        async def counted(until: float) -> Counter[int]:
            """Advance to a second, then wait until the driver's own thread has delivered its events."""
            reported: Counter[int] = Counter()
            while node.clock.seconds < until:
                reported = Counter((await node.step(node.clock.seconds + 1)).devices[0].xids)
                await asyncio.sleep(0.12 if nvml in node.sampled else 0.0)  # the thread's beat is 0.05 s
            return reported

        assert await counted(8.0) == {31: 1}
        nvml.close()
        nvml.direct.state, nvml.direct.reason = SourceState.DIED, "died"
        node.sampled = (dcgm,)
        assert await counted(18.0) == {31: 1, 79: 1}, "only DCGM could deliver it"
        node.sampled = (nvml, dcgm)
        assert await counted(28.0) == {31: 2, 79: 1}
