"""The idle clock: how long a holder has had its device, and how long it has left it idle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metering_support import through_json

from exporter.accounting.idle import IdleClock, IdleMemory, IdleState
from exporter.model.records import read

KEY = ("GPU-0", "ml", "notebook-0", "main")


IDLE, BUSY, OPEN = (0.0, 0.01), (0.9, 0.9), (0.0, 0.5)
"""Bounds of an activity: surely below the threshold, surely above it, or neither."""
DAY = 86400.0


def clock(tolerated_gap_seconds: float = 3.0) -> IdleClock:
    return IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=tolerated_gap_seconds)


def observed(
    idle: IdleClock, begin: int, end: int, bounds: tuple[float, float] | None, uid: str | None = "uid-1", step: int = 1
) -> IdleState:
    """Sample every ``step`` seconds from ``begin`` to ``end``, both included."""
    for second in range(begin, end + 1, step):
        standing = idle.observe(KEY, float(second), bounds, uid)
    return standing


def restarted(idle: IdleClock, now: float) -> IdleClock:
    """Return the clock of the next process, restored from a state file's JSON."""
    after = clock()
    after.restore([read(IdleMemory, row) for row in through_json(idle.memories())], now)
    return after


def test_idle_time_runs_from_the_last_busy_sample() -> None:
    idle = clock()
    observed(idle, 100, 100, BUSY)
    assert observed(idle, 101, 160, IDLE) == IdleState(age_seconds=60.0, idle_for_seconds=60.0)
    assert idle.observe(KEY, 161.0, (0.05, 0.05), "uid-1").idle_for_seconds == 0.0


def test_time_seen_by_two_agents_counts_once_after_takeover() -> None:
    first, second = clock(), clock()
    observed(first, 100, 100, BUSY)
    observed(first, 101, 200, IDLE)
    observed(second, 160, 203, IDLE)
    second.restore(first.memories(), 203.0)
    assert observed(second, 204, 204, IDLE) == IdleState(age_seconds=104.0, idle_for_seconds=104.0)


def test_unknown_activity_gives_unknown_idle_time() -> None:
    idle = clock()
    observed(idle, 100, 100, IDLE)
    assert observed(idle, 101, 101, None) == IdleState(age_seconds=1.0, idle_for_seconds=None)


def test_short_unknown_time_neither_counts_nor_restarts_the_clock() -> None:
    idle = clock()
    observed(idle, 100, 200, IDLE)
    observed(idle, 201, 204, None)
    assert observed(idle, 205, 205, IDLE).idle_for_seconds == 101.0


def test_short_gap_without_samples_neither_counts_nor_restarts_the_clock() -> None:
    idle = clock()
    observed(idle, 100, 200, IDLE)
    assert observed(idle, 204, 205, IDLE).idle_for_seconds == 101.0


def test_open_estimate_neither_counts_nor_restarts_the_clock() -> None:
    idle = clock()
    observed(idle, 100, 200, IDLE)
    assert observed(idle, 201, 210, OPEN).idle_for_seconds is None
    assert observed(idle, 211, 220, IDLE).idle_for_seconds == 110.0


@pytest.mark.parametrize("bounds", [None, OPEN])
def test_a_longer_unmeasured_time_restarts_the_clock(bounds: tuple[float, float] | None) -> None:
    for unmeasured, idle_for in ((300, 101.0), (302, 1.0)):
        idle = clock()
        observed(idle, 100, 200, IDLE)
        observed(idle, 201, 200 + unmeasured, bounds)
        assert observed(idle, 201 + unmeasured, 201 + unmeasured, IDLE).idle_for_seconds == idle_for


def test_a_long_time_without_samples_restarts_the_clock() -> None:
    idle = clock()
    observed(idle, 100, 200, IDLE)
    assert observed(idle, 501, 502, IDLE).idle_for_seconds == 1.0


def test_repeatedly_unmeasured_holder_is_never_idle_for_long() -> None:
    """In each sample, its processes can end before the agent knows their owner."""
    idle = clock()
    longest = 0.0
    for second in range(0, 20_000, 10):
        observed(idle, second, second + 1, OPEN)
        longest = max(longest, observed(idle, second + 2, second + 9, IDLE).idle_for_seconds or 0.0)
    assert longest < 1600


def test_clock_survives_a_hiccup_every_hour() -> None:
    idle = clock(tolerated_gap_seconds=60.0)
    for hour in range(48):
        observed(idle, hour * 3600, hour * 3600 + 3560, IDLE, step=20)
        standing = observed(idle, hour * 3600 + 3580, hour * 3600 + 3580, None)
    assert standing.idle_for_seconds is None
    standing = observed(idle, 48 * 3600, 48 * 3600, IDLE)
    assert standing.idle_for_seconds == 48 * 3600 - 48 * 20, "the measured time only"


def test_new_pod_with_the_same_name_is_a_new_holder() -> None:
    idle = clock()
    observed(idle, 100, 100, IDLE, "uid-1")
    assert observed(idle, 101, 101, IDLE, "uid-2") == IdleState(age_seconds=0.0, idle_for_seconds=0.0)


def test_late_uid_does_not_create_a_new_holder() -> None:
    idle = clock()
    observed(idle, 100, 100, IDLE, None)
    assert observed(idle, 103, 103, IDLE, "uid-1").age_seconds == 3.0


def test_returning_holder_starts_from_zero() -> None:
    idle = clock()
    observed(idle, 100, 100, IDLE)
    idle.forget(keep=())
    assert observed(idle, 200, 200, IDLE).age_seconds == 0.0


def test_a_restart_of_the_agent_keeps_age_and_idle_time() -> None:
    idle = clock()
    observed(idle, 100, 700, IDLE)
    after = restarted(idle, 720.0)
    assert observed(after, 720, 720, IDLE) == IdleState(age_seconds=620.0, idle_for_seconds=600.0)
    assert observed(after, 721, 730, IDLE).idle_for_seconds == 610.0


def test_restart_drops_the_clock_of_a_different_pod_with_the_same_name() -> None:
    idle = clock()
    observed(idle, 100, 700, IDLE)
    after = restarted(idle, 720.0)
    assert observed(after, 720, 721, IDLE, "uid-2") == IdleState(age_seconds=1.0, idle_for_seconds=1.0)


def test_restored_clock_applies_only_once_the_pod_uid_is_known() -> None:
    idle = clock()
    observed(idle, 100, 700, IDLE)
    after = restarted(idle, 720.0)
    assert observed(after, 720, 730, IDLE, None) == IdleState(age_seconds=10.0, idle_for_seconds=10.0)
    assert after.memories() == idle.memories(), "another restart in between loses nothing"
    assert observed(after, 731, 731, IDLE) == IdleState(age_seconds=631.0, idle_for_seconds=611.0)
    busy = restarted(idle, 720.0)
    observed(busy, 720, 720, BUSY, None)
    assert observed(busy, 721, 725, IDLE) == IdleState(age_seconds=625.0, idle_for_seconds=5.0)


def test_long_gap_between_processes_restarts_the_idle_clock_but_not_the_age() -> None:
    idle = clock()
    observed(idle, 100, 700, IDLE)
    after = restarted(idle, 1001.0)
    assert observed(after, 1001, 1002, IDLE) == IdleState(age_seconds=902.0, idle_for_seconds=1.0)


def test_restart_forgets_a_holder_without_devices() -> None:
    idle = clock()
    observed(idle, 100, 700, IDLE)
    after = restarted(idle, 720.0)
    after.forget(keep=())
    assert after.memories() == ()


def test_clock_ahead_of_now_is_discarded_as_from_another_boot() -> None:
    idle = clock()
    observed(idle, 100, 700, IDLE)
    after = restarted(idle, 50.0)
    assert observed(after, 50, 50, IDLE).age_seconds == 0.0


@pytest.mark.parametrize(
    "change",
    [
        {"holder": ["a"]},
        {"holder": [1, 2, 3, 4]},
        {"pod_uid": 7},
        {"idle_seconds": -1},
        {"first_seen": "x"},
        {"first_seen": 1e9},
    ],
)
def test_a_damaged_idle_clock_is_refused(change: dict[str, object]) -> None:
    idle = clock()
    observed(idle, 100, 700, IDLE)
    (row,) = through_json(idle.memories())
    with pytest.raises((TypeError, ValueError)):
        read(IdleMemory, row | change)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.sampled_from([None, IDLE, BUSY, OPEN])), max_size=30))
def test_clock_steps_never_make_a_duration_negative(samples: list[tuple[float, tuple[float, float] | None]]) -> None:
    idle = clock()
    now = 1e9
    for step, bounds in samples:
        now += step
        standing = idle.observe(KEY, now, bounds, None)
        assert standing.age_seconds >= 0
        assert standing.idle_for_seconds is None or 0 <= standing.idle_for_seconds <= standing.age_seconds + 1e-6


@given(st.lists(st.tuples(st.integers(1, 200), st.sampled_from([None, IDLE, OPEN, BUSY])), max_size=60))
def test_idle_time_never_exceeds_the_idle_time_measured_since_busy(
    samples: list[tuple[int, tuple[float, float] | None]],
) -> None:
    idle = clock()
    now, measured = 0, 0
    idle.observe(KEY, 0.0, IDLE, None)
    for step, bounds in samples:
        now += step
        measured = 0 if bounds == BUSY else measured + step * (bounds == IDLE and step <= 3)
        assert (idle.observe(KEY, float(now), bounds, None).idle_for_seconds or 0.0) <= measured
