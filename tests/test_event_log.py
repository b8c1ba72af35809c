import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_support import EPOCH_SECONDS, AgentSettings, pipeline

from exporter.agent.history import EventLog, EventWindow
from exporter.model.devices import CLOCK_EVENTS, Gpu, GpuReading, Reading, XidEvent
from exporter.model.fields import Field
from exporter.model.snapshot import Snapshot
from exporter.web import node_api
from gpu_simulator import scenario

IDLE, POWER_CAP, SW_THERMAL = 0x1, 0x4, 0x20


def observed(log: EventLog, at: float, *masks: int | None, xids: tuple[tuple[int, str], ...] = ()) -> None:
    """Make a reading with one GPU per mask, called "0", "1", ...; the Xids are (code, device)."""
    gpus = tuple(
        GpuReading(
            gpu=Gpu(uuid=str(index), index=index, minor=index, model="H100", pci_bus_id=""),
            values={} if mask is None else {Field.CLOCK_THROTTLE_REASONS: mask},
        )
        for index, mask in enumerate(masks)
    )
    events = tuple(XidEvent(uuid=uuid, xid=xid, at_seconds=1e9) for xid, uuid in xids)
    log.add(Reading(source="nvml", taken_at_seconds=1e9, duration_seconds=0.1, gpus=gpus, xids=events), None, at)


def keeping() -> EventLog:
    return EventLog(with_windows=True, xid_window_seconds=300.0, clock_events_window_seconds=60.0)


def began(log: EventLog, now: float, uuid: str = "0") -> dict[str, int]:
    counts = log.by_device(now)[uuid].clock_events
    assert counts is not None
    return {event: times for event, times in counts.items() if times}


def test_clock_event_is_counted_once_when_it_begins() -> None:
    log = EventLog()
    for second, mask in enumerate([0, POWER_CAP, POWER_CAP, 0, POWER_CAP | SW_THERMAL, SW_THERMAL]):
        observed(log, second, mask)
    assert began(log, 6.0) == {"power_cap": 2, "sw_thermal": 1}


def test_clock_event_active_at_the_first_reading_is_not_counted() -> None:
    log = EventLog()
    observed(log, 0.0, IDLE)
    assert log.by_device(0.0)["0"].clock_events == dict.fromkeys(CLOCK_EVENTS, 0)


def test_gpu_without_clock_reasons_has_no_count_and_continues_on_return() -> None:
    log = EventLog()
    observed(log, 0.0, POWER_CAP, None)
    observed(log, 1.0, None, None)
    observed(log, 2.0, POWER_CAP | IDLE, None)
    assert began(log, 2.0) == {"gpu_idle": 1}
    assert "1" not in log.by_device(2.0)


def test_clock_event_window_counts_readings_and_drops_old_ones() -> None:
    log = keeping()
    for second in range(30):
        observed(log, second, POWER_CAP if second < 10 else SW_THERMAL)
    assert log.by_device(30.0)["0"].recent_clock_events == {"power_cap": 10, "sw_thermal": 20}
    assert log.by_device(66.0)["0"].recent_clock_events == {"power_cap": 3, "sw_thermal": 20}
    assert log.by_device(89.5)["0"].recent_clock_events is None, "there is no reading in the last minute"
    assert began(log, 300.0) == {"sw_thermal": 1}, "the counter keeps its value"


def test_window_without_events_is_empty_and_not_unknown() -> None:
    log = keeping()
    observed(log, 0.0, 0)
    assert log.by_device(1.0)["0"].recent_clock_events == {}


def test_xids_are_counted_per_device_and_expire_from_the_window() -> None:
    log = keeping()
    observed(log, 10.0, 0, xids=((31, "0"), (31, "0"), (43, "MIG-1")))
    observed(log, 200.0, 0, xids=((31, "0"),))
    history = log.by_device(200.0)
    assert (history["0"].recent_xids, history["MIG-1"].recent_xids) == ({31: 3}, {43: 1})
    history = log.by_device(310.0)
    assert (history["0"].recent_xids, "MIG-1" in history) == ({31: 1}, False)


def test_event_log_keeps_no_window_by_default() -> None:
    log = EventLog()
    observed(log, 0.0, POWER_CAP, xids=((31, "0"),))
    history = log.by_device(1.0)["0"]
    assert (history.recent_xids, history.recent_clock_events) == ({}, None)


def test_event_storm_does_not_grow_a_window() -> None:
    window = EventWindow(seconds=300.0)
    for number in range(20_000):
        window.add(31, number / 20)
    assert 295 * 20 <= window.counts(1000.0)[31] <= 300 * 20
    assert len(window._steps) <= 61


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 3)), max_size=60),
    st.floats(0.5, 600),
    st.floats(0, 800),
)
def test_window_count_is_within_two_steps_of_the_exact_count(
    added: list[tuple[float, int]], seconds: float, later: float
) -> None:
    window = EventWindow(seconds=seconds)
    added = sorted(added)
    for at, key in added:
        window.add(key, at)
    now = (added[-1][0] if added else 0.0) + later
    step = seconds / 60
    counts = window.counts(now)
    for key in (1, 2, 3):
        sure = sum(1 for at, one in added if one == key and at > now - seconds + 2 * step)
        possible = sum(1 for at, one in added if one == key and at >= now - seconds - 2 * step)
        assert sure <= counts.get(key, 0) <= possible


def test_event_earlier_than_the_last_one_is_counted() -> None:
    window = EventWindow(seconds=60.0)
    window.add(1, 30.0)
    window.add(1, 10.0)
    assert window.counts(31.0) == {1: 2}


def heat(log: EventLog, at: float, *, seconds: float | None = None, mask: int | None = None) -> float | None:
    """Return the ratio after a reading of one GPU; ``seconds`` is the driver's counter of throttling."""
    history = {
        Field.THERMAL_VIOLATION: None if seconds is None else seconds * 1e9,
        Field.CLOCK_THROTTLE_REASONS: mask,
    }
    values = {name: value for name, value in history.items() if value is not None}
    gpu = Gpu(uuid="0", index=0, minor=0, model="H100", pci_bus_id="")
    reading = GpuReading(gpu=gpu, values=values)
    log.add(Reading(source="nvml", taken_at_seconds=1e9, duration_seconds=0.1, gpus=(reading,)), [], at)
    return log.by_device(at)["0"].thermal_throttle_ratio


def test_thermal_counter_of_the_driver_takes_precedence_over_its_flags() -> None:
    log = EventLog()
    assert heat(log, 0.0, seconds=1000.0, mask=SW_THERMAL) is None, "one reading covers no time"
    for second in range(1, 600):
        ratio = heat(log, second, seconds=1000.0 + second / 4, mask=SW_THERMAL)
    assert ratio == pytest.approx(0.25, abs=1e-3)
    for second in range(600, 750):
        ratio = heat(log, second, seconds=1149.75, mask=SW_THERMAL)
    assert ratio == pytest.approx(0.125, abs=5e-3), "half of the window"
    assert log.by_device(1050.0)["0"].thermal_throttle_ratio is None, "no reading within the window"


def test_thermal_ratio_without_a_counter_uses_the_flags_of_the_samples() -> None:
    log = EventLog()
    heat(log, 0.0, mask=IDLE)
    assert heat(log, 30.0, mask=POWER_CAP) == 0.0
    assert heat(log, 60.0, mask=SW_THERMAL) == 0.5
    assert heat(log, 90.0, mask=0x40 | POWER_CAP) == pytest.approx(0.6667)


def test_driver_reload_keeps_the_thermal_time_so_far() -> None:
    log = EventLog()
    heat(log, 0.0, seconds=100.0)
    assert heat(log, 10.0, seconds=105.0) == 0.5
    assert heat(log, 20.0, seconds=0.0) == 0.25
    assert heat(log, 25.0, seconds=5.0) == 0.4


PAST = """
node: n1
gpus: [{model: h100}, {model: h100}]
pods:
  - namespace: ml
    name: train
    devices: [{gpu: 0}]
    activity: {square: {high: 1.0, low: 0.0, period: 200, duty: 0.25}}
faults: [{kind: gpu_lost, gpu: 1, from: 30}]
"""


def history(snapshot: Snapshot) -> tuple[float | None, list[list[float | None]]]:
    """Return the end of the API's history, in seconds of the scenario, and the activity of each device."""
    document: dict[str, Any] = json.loads(node_api.device_document(snapshot).plain)
    ends = document["history"]["ends_at_seconds"]
    assert document["history"]["step_seconds"] == 10
    return ends and ends - EPOCH_SECONDS, [device["activity_history"] for device in document["devices"]]


async def test_device_history_has_gaps_for_unmeasured_time(tmp_path: Path) -> None:
    (tmp_path / "past.yaml").write_text(PAST)
    async with pipeline(scenario.load(str(tmp_path / "past.yaml")), tmp_path) as node:
        assert history(await node.step(1.0)) == (None, [[], []])
        ends, (train, free) = history(await node.until(69.5, steps=69))
        assert ends == pytest.approx(60.0)
        assert train == [pytest.approx(one, abs=0.2) for one in (1.0, 1.0, 1.0, 1.0, 1.0, 0.0)]
        assert free[:2] == [0.0, 0.0]
        assert free[-2:] == [None, None], "a lost GPU is not idle"
        ends, (train, free) = history(await node.step(125.0))
        assert ends == pytest.approx(120.0)
        assert (len(train), len(free)) == (12, 12)
        assert train[6:] == [0.0, *[None] * 5], "a part of the time before 70 s was measured"


async def test_device_history_ends_with_a_gap_if_unmeasured_and_spans_15_minutes(tmp_path: Path) -> None:
    (tmp_path / "past.yaml").write_text(PAST)
    slow = AgentSettings(interval_seconds=30.0)
    async with pipeline(scenario.load(str(tmp_path / "past.yaml")), tmp_path, agent=slow) as node:
        for seconds in range(5, 1205, 30):
            shown = await node.step(seconds)
        ends, (train, _) = history(shown)
        assert ends == pytest.approx(1170.0)
        assert len(train) == 90
        assert None not in train, "a sample is the mean since the one before it"
        dark = node.node.tick(EPOCH_SECONDS + 1305.0, 1305.0)
        ends, (train, _) = history(dark)
        assert ends == pytest.approx(1300.0)
        assert train[-13:-11] != [None, None]
        assert train[-11:] == [None] * 11
