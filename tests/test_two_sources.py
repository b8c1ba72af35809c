"""Two sources read together: the leading one, single use of each value, and the effect of a source that is down."""

import logging
import math
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_support import EPOCH_SECONDS, DirectSource, pipeline

from exporter.agent.sources import FIRST_WAIT_SECONDS, Sources
from exporter.gpu.merge import MergeMemory, merge
from exporter.model.devices import DeviceState, Gpu, GpuReading, Reading, SourceState
from exporter.model.fields import Field
from gpu_simulator import scenario

UTIL, ENGINE, ENERGY = Field.GPU_UTIL, Field.PROF_GR_ENGINE_ACTIVE, Field.TOTAL_ENERGY_CONSUMPTION
Values = Mapping[Field, int | float]


def gpu(number: int = 0, *, model: str = "A100") -> Gpu:
    return Gpu(uuid=f"GPU-{number}", index=number, minor=number, model=model, pci_bus_id="")


def reading_of(source: str, at: float, values: Values | None = None, *, number: int = 0, **facts: object) -> Reading:
    one = GpuReading(gpu=gpu(number, model="A100" if source == "nvml" else "GRID"), values=values or {})
    return Reading(
        source=source,
        taken_at_seconds=1_800_000_000.0 + at,
        duration_seconds=0.01,
        steady_seconds=at,
        gpus=(one,),
        **facts,  # type: ignore[arg-type] # facts of the one dataclass
    )


class Watched(dict[Field, int | float]):
    """Values that allow weak references, which show whether the values are still in use."""


class Pair:
    """NVML together with DCGM, at one-second intervals, driven by a test."""

    def __init__(self) -> None:
        self.nvml = DirectSource(name="nvml", state=SourceState.STARTING)
        self.dcgm = DirectSource(name="dcgm", state=SourceState.STARTING)
        self.sources = Sources(nvml=self.nvml, dcgm=self.dcgm, stale_after_seconds=3.0)

    def hear(self, *readings: Reading) -> None:
        for one in readings:
            source = self.nvml if one.source == "nvml" else self.dcgm
            source.readings.append(one)
            self.set(one.source, SourceState.UP)

    def set(self, name: str, state: SourceState, reason: str = "") -> None:
        source = self.nvml if name == "nvml" else self.dcgm
        source.state, source.reason = state, reason

    def take(self, at: float) -> tuple[Reading, ...]:
        return self.sources.take(1_800_000_000.0 + at, at)


def test_every_nvml_reading_gives_one_merged_reading() -> None:
    pair = Pair()
    pair.hear(
        reading_of("nvml", 1.0, {UTIL: 10}), reading_of("dcgm", 1.4, {ENGINE: 0.1}), reading_of("nvml", 2.0, {UTIL: 20})
    )
    pair.hear(reading_of("dcgm", 2.4, {ENGINE: 0.2}))
    first, second = pair.take(2.5)
    assert (dict(first.gpus[0].values), dict(second.gpus[0].values)) == (
        {UTIL: 10, ENGINE: 0.1},
        {UTIL: 20, ENGINE: 0.2},
    )
    assert pair.take(2.6) == (), "DCGM alone gives no reading while NVML answers"
    pair.hear(reading_of("nvml", 3.0, {UTIL: 30}))
    assert dict(pair.take(3.1)[0].gpus[0].values) == {UTIL: 30, ENGINE: 0.2}


def test_dcgm_reading_that_is_old_or_of_a_failed_engine_adds_nothing() -> None:
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0, {UTIL: 10}), reading_of("dcgm", 1.0, {ENGINE: 0.1}, dcgm_version="4.6.0"))
    assert pair.take(1.0)[0].dcgm_version == "4.6.0"
    pair.set("dcgm", SourceState.FAILED, "engine_gone")
    pair.hear(reading_of("nvml", 2.0, {UTIL: 10}))
    (gone,) = pair.take(2.0)
    assert (dict(gone.gpus[0].values), gone.dcgm_version) == ({UTIL: 10}, None)
    pair.set("dcgm", SourceState.UP)
    pair.hear(reading_of("nvml", 4.1, {UTIL: 10}))
    assert dict(pair.take(4.1)[0].gpus[0].values) == {UTIL: 10}


def test_dcgm_waits_for_the_nvml_start_for_a_bounded_time() -> None:
    pair = Pair()
    pair.take(0.0)
    pair.hear(reading_of("dcgm", 1.0, {UTIL: 1}), reading_of("dcgm", 2.0, {UTIL: 2}))
    assert pair.take(FIRST_WAIT_SECONDS) == ()
    taken = pair.take(FIRST_WAIT_SECONDS + 1)
    assert [one.gpus[0].values[UTIL] for one in taken] == [1, 2], "the readings that arrived in that time are used"


def test_dcgm_does_not_wait_for_an_nvml_that_failed_to_start() -> None:
    pair = Pair()
    pair.set("nvml", SourceState.FAILED, "no_driver")
    pair.hear(reading_of("dcgm", 1.0, {UTIL: 1}))
    assert [one.source for one in pair.take(1.0)] == ["dcgm"]


def test_dcgm_continues_a_silent_nvml_from_its_last_instant_and_identity() -> None:
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0, {UTIL: 10}), reading_of("dcgm", 1.4, {UTIL: 1}))
    pair.take(1.5)
    pair.hear(reading_of("dcgm", 2.4, {UTIL: 2}))
    assert pair.take(2.5) == ()
    pair.hear(reading_of("dcgm", 3.4, {UTIL: 3}))
    assert pair.take(3.5) == ()
    pair.hear(reading_of("dcgm", 4.4, {UTIL: 4}))
    taken = pair.take(4.5)
    assert [(one.instant, one.gpus[0].values[UTIL], one.source) for one in taken] == [
        (1.4, 1, "dcgm"),
        (2.4, 2, "dcgm"),
        (3.4, 3, "dcgm"),
        (4.4, 4, "dcgm"),
    ]
    assert all(one.gpus[0].gpu == gpu() for one in taken)
    assert taken[0].gpus[0].from_dcgm == {UTIL}


def test_dcgm_takes_over_at_once_after_nvml_death_and_yields_on_its_return() -> None:
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0, {UTIL: 10}), reading_of("dcgm", 1.4, {UTIL: 1}))
    pair.take(1.5)
    pair.set("nvml", SourceState.DIED, "died")
    pair.hear(reading_of("dcgm", 2.4, {UTIL: 2}))
    assert [one.instant for one in pair.take(2.5)] == [1.4, 2.4]
    pair.hear(
        reading_of("nvml", 2.2, {UTIL: 22}), reading_of("nvml", 3.2, {UTIL: 32}), reading_of("dcgm", 3.4, {UTIL: 3})
    )
    taken = pair.take(3.5)
    assert [(one.instant, one.source) for one in taken] == [(3.2, "nvml")], "instants only increase"


def test_sources_are_fresh_while_one_source_works() -> None:
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0), reading_of("dcgm", 1.0))
    pair.take(1.0)
    assert pair.sources.is_fresh(1.0)
    pair.set("nvml", SourceState.DIED, "died")
    assert pair.sources.is_fresh(1.0), "DCGM is about to lead"
    assert not pair.sources.is_fresh(3.1)
    pair.set("dcgm", SourceState.RELEASED, "released")
    assert not pair.sources.is_fresh(1.0)


def test_errors_are_counted_once_per_source() -> None:
    pair = Pair()
    pair.nvml.errors, pair.dcgm.errors = {"hung": 1}, {"died": 2}
    pair.hear(reading_of("nvml", 1.0, errors={"x": 1}), reading_of("dcgm", 1.0, errors={"x": 5}))
    pair.take(1.0)
    pair.hear(reading_of("nvml", 2.0, errors={"x": 1}))
    taken = pair.take(2.0)
    assert pair.sources.errors == {
        ("nvml", "x"): 2,
        ("dcgm", "x"): 5,
        ("nvml", "hung"): 1,
        ("dcgm", "died"): 2,
    }
    assert not taken[0].errors


def test_returning_dcgm_values_are_used_before_the_next_nvml_reading() -> None:
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0, {UTIL: 10, ENERGY: 7}), reading_of("dcgm", 1.1, {UTIL: 1}))
    assert [one.instant for one in pair.take(1.2)] == [1.0], "the engine answers without a measurement so far"
    pair.hear(reading_of("dcgm", 2.6, {UTIL: 1, ENGINE: 0.5}))
    (more,) = pair.take(2.6)
    assert dict(more.gpus[0].values) == {UTIL: 10, ENERGY: 7, ENGINE: 0.5}
    assert (more.steady_seconds, more.taken_at_seconds, more.source) == (2.6, 1_800_000_002.6, "nvml")
    pair.hear(reading_of("dcgm", 3.6, {ENGINE: 0.6}))
    assert pair.take(3.6) == (), "once"
    pair.hear(reading_of("nvml", 3.7, {UTIL: 20}))
    assert [(one.instant, one.gpus[0].values[ENGINE]) for one in pair.take(3.7)] == [(3.7, 0.6)]


def test_nvml_instant_older_than_the_last_one_is_dropped() -> None:
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0), reading_of("dcgm", 2.001, {ENGINE: 0.5}))
    assert [one.instant for one in pair.take(2.001)] == [1.0], "merged with it, so that it is back at once"
    pair.hear(reading_of("dcgm", 3.0), reading_of("nvml", 3.1), reading_of("dcgm", 4.001, {ENGINE: 0.5}))
    pair.take(3.2)
    pair.hear(reading_of("nvml", 4.0), reading_of("dcgm", 5.0), reading_of("nvml", 5.1))
    assert [one.instant for one in pair.take(5.1)] == [5.1]


def test_dcgm_return_needs_new_values_the_same_machine_and_a_started_nvml() -> None:
    hopper = Pair()
    hopper.hear(reading_of("nvml", 1.0, {ENGINE: 0.1}), reading_of("dcgm", 1.0))
    hopper.take(1.0)
    hopper.hear(reading_of("dcgm", 1.5, {ENGINE: 0.2}))
    assert hopper.take(1.5) == ()
    other = Pair()
    other.hear(reading_of("nvml", 1.0, {UTIL: 1}), reading_of("dcgm", 1.0, number=7))
    other.take(1.0)
    for state in (SourceState.UP, SourceState.HUNG):
        other.set("nvml", state)
        other.dcgm.readings.append(reading_of("dcgm", 1.5, {ENGINE: 0.2}, number=7))
        assert other.take(1.5) == ()
    early = Pair()
    early.take(0.0)
    early.hear(reading_of("dcgm", 1.0, {ENGINE: 0.2}))
    assert early.take(1.0) == ()


def test_dcgm_return_is_detected_as_leading_and_as_only_source() -> None:
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0, {UTIL: 10}), reading_of("dcgm", 1.0, {ENGINE: 0.5}))
    pair.take(1.0)
    pair.set("nvml", SourceState.DIED, "died")
    pair.set("dcgm", SourceState.FAILED, "dcgm_connection_lost")
    assert pair.take(2.0) == ()
    pair.hear(reading_of("dcgm", 3.0, {UTIL: 1}))
    pair.hear(reading_of("dcgm", 4.0, {ENGINE: 0.5}))
    assert [one.instant for one in pair.take(4.0)] == [3.0, 4.0]
    alone = DirectSource(name="dcgm")
    sources = Sources(dcgm=alone, stale_after_seconds=3.0)
    for at, state, values in (
        (1.0, SourceState.UP, {ENGINE: 0.5}),
        (2.0, SourceState.UP, {ENGINE: 0.5}),
        (3.0, SourceState.FAILED, None),
        (4.0, SourceState.UP, {UTIL: 1}),
        (5.0, SourceState.UP, {ENGINE: 0.5}),
    ):
        alone.state = state
        alone.readings += [reading_of("dcgm", at, values)] if values else []
        assert len(sources.take(0.0, at)) == len(values or ()), "each reading is taken once"


def test_dcgm_of_another_machine_is_reported_and_never_leads(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "exporter.agent")
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0, {UTIL: 10}), reading_of("dcgm", 1.0, {UTIL: 90}, number=7))
    assert [one.gpus[0].gpu.uuid for one in pair.take(1.0)] == ["GPU-0"]
    _, dcgm = pair.sources.statuses
    assert (dcgm.state, dcgm.reason) == (SourceState.FAILED, "other_machine")
    assert "--dcgm-address" in dcgm.message
    pair.set("nvml", SourceState.DIED, "died")
    pair.hear(reading_of("dcgm", 2.0, {UTIL: 90}, number=7))
    assert pair.take(2.0) == ()
    assert not pair.sources.is_fresh(1.0)
    assert pair.sources.errors["dcgm", "other_machine"] == 1
    assert len(caplog.records) == 1, "logged once"
    pair.hear(reading_of("dcgm", 3.0, {UTIL: 9}))
    assert [one.gpus[0].gpu for one in pair.take(3.0)] == [gpu()]
    assert pair.sources.statuses[1].state is SourceState.UP


def test_unusable_dcgm_readings_are_not_kept_while_nvml_is_unavailable() -> None:
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0, {UTIL: 10}), reading_of("dcgm", 1.0, {UTIL: 90}, number=7))
    pair.take(1.0)
    pair.set("nvml", SourceState.DIED, "died")
    kept = []
    for second in range(2, 602):
        values = Watched({UTIL: 90})
        kept.append(weakref.ref(values))
        pair.hear(reading_of("dcgm", float(second), values, number=7))
        del values
        assert pair.take(float(second)) == ()
    assert sum(1 for one in kept if one() is not None) <= 1, "the newest may be merged with NVML's next reading"


def test_dcgm_alone_is_used_unchanged() -> None:
    dcgm = DirectSource(name="dcgm")
    dcgm.readings.append(reading_of("dcgm", 1.0, {UTIL: 1}, errors={"x": 2}))
    sources = Sources(dcgm=dcgm, stale_after_seconds=3.0)
    (one,) = sources.take(0.0, 1.0)
    assert (one.gpus[0].gpu.model, one.gpus[0].from_dcgm) == ("GRID", frozenset({UTIL}))
    assert [status.name for status in sources.statuses] == ["dcgm"]
    assert sources.errors == {("dcgm", "x"): 2}


def test_gpu_known_only_to_nvml_is_failed_not_missing_while_nvml_is_unavailable() -> None:
    pair = Pair()
    both = reading_of("nvml", 1.0, {UTIL: 10})
    other = GpuReading(gpu=gpu(1), values={UTIL: 5})
    pair.hear(replace(both, gpus=(*both.gpus, other)), reading_of("dcgm", 1.0, {UTIL: 10}))
    pair.take(1.0)
    pair.set("nvml", SourceState.HUNG, "hung")
    pair.hear(reading_of("dcgm", 2.0, {UTIL: 11}))
    (alone,) = pair.take(2.0)
    assert [(one.state, one.reason) for one in alone.gpus] == [(DeviceState.UP, ""), (DeviceState.FAILED, "hung")]


def test_engine_without_driver_makes_no_gpu_missing() -> None:
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0, {UTIL: 10}), reading_of("dcgm", 1.0, {UTIL: 10}))
    pair.take(1.0)
    pair.set("nvml", SourceState.FAILED, "driver_not_loaded")
    pair.hear(replace(reading_of("dcgm", 2.0), gpus=()))
    assert pair.take(2.0) == ()
    assert not pair.sources.is_fresh(3.1)


def test_counter_does_not_decrease_with_an_older_value_of_the_other_source() -> None:
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0, {ENERGY: 5000}), reading_of("dcgm", 1.1, {ENERGY: 4600}))
    shown = [one.gpus[0].values.get(ENERGY) for one in pair.take(1.2)]
    pair.set("nvml", SourceState.DIED, "died")
    for at, energy in ((2.1, 4900), (3.1, 5400)):
        pair.hear(reading_of("dcgm", at, {ENERGY: energy}))
        shown += [one.gpus[0].values.get(ENERGY) for one in pair.take(at)]
    assert shown == [5000, None, None, 5400]


def test_counter_measured_by_dcgm_before_an_outage_does_not_decrease() -> None:
    pair = Pair()
    pair.hear(reading_of("nvml", 1.0, {ENERGY: 5000}), reading_of("dcgm", 1.1, {ENERGY: 4600}))
    shown = [one.gpus[0].values.get(ENERGY) for one in pair.take(1.2)]
    pair.set("nvml", SourceState.HUNG, "hung")
    pair.hear(reading_of("dcgm", 12.0, {ENERGY: 4700}), reading_of("dcgm", 22.0, {ENERGY: 5700}))
    shown += [one.gpus[0].values.get(ENERGY) for one in pair.take(22.1)]
    assert shown == [5000, None, None, 5700], "a slow field's figure may be older than the outage"


def test_restarted_counter_is_shown_after_a_while() -> None:
    memory, shown = MergeMemory(), []
    for at, source, energy in ((1.0, "nvml", 9000), (2.0, "dcgm", 10), (4.0, "dcgm", 20), (4.1, "dcgm", 30)):
        one = reading_of(source, at, {ENERGY: energy})
        nvml, dcgm = (one, None) if source == "nvml" else (None, one)
        kept, memory = merge(nvml, dcgm, memory, patience_seconds=3.0)
        assert kept is not None
        shown.append(kept.gpus[0].values.get(ENERGY))
    assert shown == [9000, None, None, 30]


def test_counter_does_not_decrease_after_a_reading_without_it() -> None:
    memory, shown = MergeMemory(), []
    for at, source, values in ((1.0, "nvml", {ENERGY: 5000}), (2.0, "nvml", {}), (3.0, "dcgm", {ENERGY: 4900})):
        one = reading_of(source, at, values)
        nvml, dcgm = (one, None) if source == "nvml" else (None, one)
        kept, memory = merge(nvml, dcgm, memory)
        assert kept is not None
        shown.append(kept.gpus[0].values.get(ENERGY))
    assert shown == [5000, None, None]


@pytest.mark.parametrize("outage", ["silent", "dead"])
async def test_meters_charge_every_second_once_through_an_nvml_outage(tmp_path: Path, outage: str) -> None:
    async with pipeline(scenario.load("capture-h100"), tmp_path, source="auto") as node:
        nvml, dcgm = node.sampled
        await node.until(10.0)
        node.sampled = (dcgm,)
        if outage == "dead":
            nvml.direct.state, nvml.direct.reason = SourceState.DIED, "died"
        for second in range(11, 31):
            # As in the agent; the pipeline advances the monotonic clock when it samples both.
            node.clock.seconds = float(second)
            dcgm.sample(EPOCH_SECONDS + second)
            away = node.node.tick(EPOCH_SECONDS + second, float(second))
            assert away.ready
            assert {view.state for view in away.devices} == {DeviceState.UP}
        assert {view.activity.measured_by for view in away.devices if view.activity} == {"dcgm"}
        node.sampled = (nvml, dcgm)
        back = await node.until(40.0)
    assert {view.activity.measured_by for view in back.devices if view.activity} == {"nvml"}
    assert back.metering is not None
    assert back.metering.ledger is not None
    accounts = back.metering.ledger.accounts.values()
    assert sum(one.seconds.total for one in accounts) == pytest.approx(len(back.devices) * 38.0)
    assert sum(one.seconds.unknown for one in accounts) == 0


states = st.sampled_from([SourceState.UP, SourceState.UP, SourceState.UP, SourceState.DIED, SourceState.HUNG])
steps = st.lists(
    st.tuples(
        st.floats(0.1, 2.0),
        st.lists(st.tuples(st.sampled_from(["nvml", "dcgm"]), st.floats(-1.5, 0.0)), max_size=3),
        states,
        states,
    ),
    max_size=25,
)


@given(script=steps)
def test_instants_only_increase_and_no_reading_is_used_twice(
    script: list[tuple[float, list[tuple[str, float]], SourceState, SourceState]],
) -> None:
    pair, at, given_out = Pair(), 0.0, -math.inf
    newest = {"nvml": -math.inf, "dcgm": -math.inf}
    for passed, readings, nvml, dcgm in script:
        at += passed
        for source, earlier in readings:
            taken_at = at + earlier
            if taken_at > newest[source]:  # the readings of a source arrive in their order
                newest[source] = taken_at
                pair.hear(reading_of(source, taken_at, {UTIL: 1, ENERGY: taken_at * 1000}))
        pair.set("nvml", nvml)
        pair.set("dcgm", dcgm)
        for one in pair.take(at):
            assert one.instant > given_out
            given_out = one.instant
            assert [gpu.gpu.uuid for gpu in one.gpus] == ["GPU-0"]
        if dcgm is SourceState.UP and nvml is not SourceState.UP and newest["dcgm"] > newest["nvml"]:
            assert given_out >= newest["dcgm"], "no DCGM reading waits while NVML is down"


@pytest.mark.parametrize("set_by", [7200.0, -7200.0])
async def test_wall_clock_change_neither_hides_values_nor_a_silent_source(tmp_path: Path, set_by: float) -> None:
    async with pipeline(scenario.load("capture-h100"), tmp_path, source="auto") as node:
        await node.until(5.0)
        wall = EPOCH_SECONDS + 5.5 + set_by
        assert node.node.tick(wall, 5.5).ready
        for sampled in node.sampled:
            sampled.direct.state = SourceState.UP
        silent = node.node.tick(wall + 4.0, 9.5)
    assert not silent.ready
    assert silent.not_ready_reasons == (
        "the newest reading of source nvml is too old",
        "the newest reading of source dcgm is too old",
    )
    assert silent.devices
    assert not any(view.values or view.activity or view.state is DeviceState.UP for view in silent.devices)
