"""The idle clock: since when a holder has its device, and since when it leaves it idle."""

from hypothesis import given
from hypothesis import strategies as st

from exporter.accounting.idle import IdleClock, Standing

KEY = ("GPU-0", "ml", "notebook-0", "main")


def clock() -> IdleClock:
    return IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=3.0)


def test_idle_time_runs_from_the_last_busy_sample() -> None:
    idle = clock()
    idle.observe(KEY, 100.0, 0.9, None)
    for second in range(101, 161):
        standing = idle.observe(KEY, float(second), 0.01, None)
    assert standing == Standing(age_seconds=60.0, idle_for_seconds=60.0)
    assert idle.observe(KEY, 161.0, 0.05, None).idle_for_seconds == 0.0


def test_unknown_activity_is_unknown_idleness() -> None:
    idle = clock()
    idle.observe(KEY, 100.0, 0.0, None)
    assert idle.observe(KEY, 101.0, None, None) == Standing(age_seconds=1.0, idle_for_seconds=None)


def test_time_that_was_not_seen_is_never_counted_as_idle() -> None:
    idle = clock()
    for second in range(100, 200):
        idle.observe(KEY, float(second), 0.0, None)
    for second in range(200, 260):
        idle.observe(KEY, float(second), None, None)
    assert idle.observe(KEY, 260.0, 0.0, None).idle_for_seconds == 0.0


def test_one_lost_sample_does_not_start_the_idle_clock_anew() -> None:
    idle = clock()
    idle.observe(KEY, 100.0, 0.0, None)
    idle.observe(KEY, 101.0, 0.0, None)
    idle.observe(KEY, 102.0, None, None)
    assert idle.observe(KEY, 103.0, 0.0, None).idle_for_seconds == 3.0


def test_another_pod_under_the_same_name_is_another_holder() -> None:
    idle = clock()
    idle.observe(KEY, 100.0, 0.0, "uid-1")
    assert idle.observe(KEY, 101.0, 0.0, "uid-2") == Standing(age_seconds=0.0, idle_for_seconds=0.0)


def test_a_uid_that_is_learnt_later_does_not_make_a_new_holder() -> None:
    idle = clock()
    idle.observe(KEY, 100.0, 0.0, None)
    assert idle.observe(KEY, 103.0, 0.0, "uid-1").age_seconds == 3.0


def test_a_holder_that_went_and_came_back_starts_anew() -> None:
    idle = clock()
    idle.observe(KEY, 100.0, 0.0, None)
    idle.forget(keep=())
    assert idle.observe(KEY, 200.0, 0.0, None).age_seconds == 0.0


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.one_of(st.none(), st.floats(0, 1))), max_size=30))
def test_no_clock_step_makes_a_duration_negative(samples: list[tuple[float, float | None]]) -> None:
    idle = clock()
    now = 1e9
    for step, activity in samples:
        now += step
        standing = idle.observe(KEY, now, activity, None)
        assert standing.age_seconds >= 0
        assert standing.idle_for_seconds is None or 0 <= standing.idle_for_seconds <= standing.age_seconds
