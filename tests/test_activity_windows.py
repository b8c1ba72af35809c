"""Activity windows: sums over the last minutes and hours, against all portions added up one by one."""

import json
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.accounting.windows import COARSE_SECONDS, FINE_SECONDS, HOLDER_SECONDS, OWNERS_LIMIT, Windows
from exporter.model.attribution import Owner, ShareMode
from exporter.model.ledger import WINDOWS, Account, Bottleneck, ByState, PodAccount, Portion, ResourceProfile

JOB = Owner(namespace="ml", kind="Job", name="train")
OTHER_JOB = Owner(namespace="ml", kind="Job", name="tune")
KEY = ("GPU-0", "ml", "pod-0", "main")
LONGEST_STEP = 100.0
USES = (0.05, 0.0, 0.25, 0.0)


def pod_account(number: int = 0, uid: str | None = None) -> PodAccount:
    return PodAccount(
        device_uuid=f"GPU-{number}",
        gpu_index=number,
        gpu_uuid=f"GPU-{number}",
        model="H100",
        namespace="ml",
        pod=f"pod-{number}",
        container="main",
        pod_uid=uid,
    )


def portion(
    owner: Owner, active: float, idle: float = 0.0, *, interval: float = 1.0, pod: PodAccount | None = None
) -> Portion:
    return Portion(
        gpu_uuid="GPU-0",
        account=Account(owner=owner, model="H100", mode=ShareMode.EXCLUSIVE),
        pod=pod or pod_account(),
        seconds=ByState(
            effective=active / 4,
            ineffective=active / 4,
            unprofiled=active / 2,
            idle=idle,
            unknown=interval - active - idle,
        ),
        interval_seconds=interval,
        profile=ResourceProfile(USES, Bottleneck.VIDEO if active == interval else Bottleneck.COMPUTE),
    )


@dataclass(frozen=True)
class Step:
    """One sample: its length, and its active and idle parts."""

    seconds: float
    active: float
    idle: float


def steps() -> st.SearchStrategy[list[Step]]:
    def step(seconds: float, kind: int, part: float) -> Step:
        if kind == 0:
            return Step(seconds, 0.0, 0.0)  # not measured
        active = (0.0, part, 1.0)[kind - 1] * seconds
        return Step(seconds, active, seconds - active)

    one = st.builds(step, st.floats(0.5, LONGEST_STEP), st.integers(0, 3), st.floats(0, 1))
    return st.lists(one, min_size=1, max_size=40).flatmap(
        lambda found: st.integers(1, 60).map(lambda times: (found * times)[:1500])
    )


def added_up(past: list[tuple[float, Step]], now: float, window: float) -> tuple[float, float]:
    """Return active and measured seconds of a window, summed over every step."""
    active = measured = 0.0
    for end, step in past:
        part = max(0.0, min(1.0, (end - (now - window)) / step.seconds))
        active += step.active * part
        measured += (step.active + step.idle) * part
    return active, measured


@settings(max_examples=60, deadline=None)
@given(found=steps(), start=st.sampled_from([0.0, 1e6]))
def test_windows_equal_the_sum_of_all_portions(found: list[Step], start: float) -> None:
    windows, now, past = Windows(), start, []
    for step in found:
        now += step.seconds
        windows.add([portion(JOB, step.active, step.idle, interval=step.seconds)], now)
        past.append((now, step))
    reading = windows.at(now)
    of_owner, of_holder = reading.of_owner(JOB), reading.of_holder(KEY, None)
    for window, seconds in WINDOWS.items():
        expected = added_up(past, now, seconds)
        # Use is assumed to be even between two marks: the edge of a window errs by less than the time between them.
        most = (COARSE_SECONDS if window == "24h" else FINE_SECONDS) + LONGEST_STEP
        for got, wanted in zip(of_owner.get(window, (0.0, 0.0)), expected, strict=True):
            assert abs(got - wanted) <= most + 0.01, window
            assert got <= seconds + 0.01, window
        if window in of_holder and any(step.active + step.idle for step in found):
            assert of_holder[window] == of_owner[window]


@pytest.mark.parametrize("interval", [7.0, 30.0, 250.0])
def test_steady_use_is_exact_in_every_window(interval: float) -> None:
    windows, now = Windows(), 0.0
    while now < 30 * 3600:
        now += interval
        windows.add([portion(JOB, 0.25 * interval, 0.5 * interval, interval=interval)], now)
    for window, (active, measured) in windows.at(now).of_owner(JOB).items():
        assert active == pytest.approx(0.25 * WINDOWS[window], abs=0.01)
        assert measured == pytest.approx(0.75 * WINDOWS[window], abs=0.01)


def test_time_without_samples_lowers_measured_seconds() -> None:
    windows = Windows()
    for minute in range(61):
        windows.add([portion(JOB, 0.0, 60.0, interval=60.0)], minute * 60.0)
    assert windows.at(3600.0).of_owner(JOB)["1h"] == pytest.approx((0.0, 3600.0), abs=0.01)
    assert windows.at(3600.0 + 600.0).of_owner(JOB)["1h"] == pytest.approx((0.0, 3000.0), abs=0.01)
    assert windows.at(3600.0 + 600.0).of_owner(JOB)["15m"] == pytest.approx((0.0, 300.0), abs=0.01)


@pytest.mark.parametrize("end", [1830, 1800])  # the last sample is at a mark, or between two
def test_gap_is_unmeasured_and_is_not_filled_with_earlier_values(end: int) -> None:
    windows, now = Windows(), end + 600.0
    for second in range(0, end + 1, 30):
        windows.add([portion(JOB, 30.0, interval=30.0)], float(second))
    windows.add([portion(JOB, 0.0, interval=600.0)], now)  # unknown
    assert windows.at(now).of_owner(JOB)["15m"] == pytest.approx((300.0, 300.0), abs=0.01)
    assert windows.at(now + 600.0).of_owner(JOB)["15m"] == (0.0, 0.0)


def test_window_sums_do_not_overflow_after_weeks() -> None:
    windows = Windows()
    now = 0.0
    for _ in range(1500):
        now += 3600.0
        windows.add([portion(JOB, 8 * 1200.0, 8 * 2400.0, interval=3600.0)], now)
    active, measured = windows.at(now).of_owner(JOB)["24h"]
    assert (active, measured) == pytest.approx((8 * 86400 / 3, 8 * 86400.0), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(found=steps(), at=st.floats(0, 1), away=st.floats(0, 20_000))
def test_restart_loses_only_its_own_duration(found: list[Step], at: float, away: float) -> None:
    whole, stopped = Windows(), Windows()
    now, cut = 0.0, int(at * len(found))
    for number, step in enumerate(found):
        if number == cut:
            now += away
            stopped = Windows.load(json.loads(json.dumps(stopped.dump())), now)
        now += step.seconds
        for windows in (whole, stopped):
            windows.add([portion(JOB, step.active, step.idle, interval=step.seconds)], now)
    for one, other in ((whole, stopped), (stopped, Windows.load(json.loads(json.dumps(stopped.dump())), now))):
        for window, sums in one.at(now).of_owner(JOB).items():
            assert other.at(now).of_owner(JOB)[window] == pytest.approx(sums, abs=0.01)
        for window, sums in one.at(now).of_holder(KEY, None).items():
            assert other.at(now).of_holder(KEY, None)[window] == pytest.approx(sums, abs=0.01)
        for window, sums in one.at(now).profile_of(JOB).items():
            assert other.at(now).profile_of(JOB)[window] == pytest.approx(sums, abs=0.01)
            assert sums[1] == pytest.approx(2 * sums[0], abs=0.01)
            assert window == "24h" or sums[1] == pytest.approx(sum(sums[2:7]), abs=0.01)


@pytest.mark.parametrize(
    "damage",
    [
        {"fine": [0, [5.0, 4.0]]},
        {"fine": [0, [1e9]]},
        {"fine": [0, ["x"]]},
        {"fine": None},
        {"owners": [[["ml", "Job", "train", 3], [0, 0, 0, [0, ""], [0, ""]]]]},
        {"owners": [[["ml", "Job", "train", ""], [0, 0, 0, [0, "AAAA"], [0, ""]]]]},
        {"owners": [[["ml", "Job", "train", ""], [0, 0, 0, [7, "AAAAAAAAAAA="], [0, ""]]]]},
        {"owners": [[["ml", "Job", "train", ""], [0, -1, 0, [0, ""], [0, ""]]]]},
        {"profiles": [[["ml", "Job", "train", ""], [*[0] * 8, 0, [0, ""], [0, ""]]]]},
        {"profiles": [[["ml", "Job", "train", ""], [*[0] * 6, 0, [0, ""], [0, ""]]]]},
        {"holders": [{}]},
        {"last": float("nan")},
    ],
)
def test_invalid_windows_dump_is_refused(damage: dict[str, object]) -> None:
    good = Windows()
    good.add([portion(JOB, 1.0)], 10.0)
    with pytest.raises((KeyError, TypeError, ValueError)):
        Windows.load(good.dump() | damage, 20.0)


def test_owner_known_later_takes_over_the_windows_of_its_pod() -> None:
    windows = Windows()
    unknown = Owner(namespace="ml", kind="Pod", name="pod-0", provisional=True)
    others = pod_account(1)
    now = 0.0
    for _ in range(40):
        now += 30.0
        windows.add([portion(unknown, 15.0, 15.0, interval=30.0), portion(JOB, 30.0, interval=30.0, pod=others)], now)
    pod = Owner(namespace="ml", kind="Pod", name="pod-0")
    assert windows.at(now).of_owner(pod)["15m"] == pytest.approx((450.0, 900.0), abs=0.01)
    for _ in range(20):
        now += 30.0
        windows.add([portion(JOB, 15.0, 15.0, interval=30.0), portion(JOB, 30.0, interval=30.0, pod=others)], now)
    assert windows.at(now).owners() == {JOB}
    assert windows.at(now).of_owner(JOB)["30m"] == pytest.approx((900.0 + 1800.0, 3600.0), abs=0.01)
    assert windows.at(now).of_owner(JOB)["24h"] == pytest.approx((900.0 + 1800.0, 3600.0), abs=0.01)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000))
def test_owner_known_late_has_the_same_windows_as_one_known_early(seed: int) -> None:
    chance = Random(seed)  # noqa: S311 - use of GPUs, not secrets
    late, early = Windows(), Windows()
    known_at, now = chance.uniform(0, 90_000), 0.0
    while now < 100_000:
        interval = chance.uniform(20, 900)
        now += interval
        active = chance.random() * interval
        for windows, known in ((late, now > known_at), (early, True)):
            owner = JOB if known else Owner(namespace="ml", kind="Pod", name="pod-0", provisional=True)
            own = portion(owner, active, interval - active, interval=interval)
            windows.add([own, portion(JOB, 1.0, interval=interval, pod=pod_account(1))], now)
    for window, sums in early.at(now).of_owner(JOB).items():
        assert late.at(now).of_owner(JOB)[window] == pytest.approx(sums, abs=0.02)
        assert late.at(now).profile_of(JOB)[window] == pytest.approx(early.at(now).profile_of(JOB)[window], abs=0.02)


def test_pod_that_ended_before_its_owner_was_known_counts_for_the_owner() -> None:
    windows = Windows()
    unknown = Owner(namespace="ml", kind="Pod", name="pod-0", provisional=True)
    windows.add([portion(unknown, 1.0)], 10.0)
    windows.settle(unknown, unknown)
    windows.settle(unknown, replace(unknown, provisional=False))
    assert windows.at(11.0).owners() == {replace(unknown, provisional=False)}
    windows.settle(unknown, JOB)
    assert windows.at(11.0).of_owner(JOB)["15m"] == pytest.approx((1.0, 1.0))
    assert windows.at(11.0).owners() == {JOB}
    windows.add([portion(unknown, 1.0)], 11.0)
    assert windows.at(11.0).of_owner(replace(unknown, provisional=False))["15m"] == pytest.approx((1.0, 1.0))


def test_owner_with_only_a_namespace_is_shown_as_the_pod() -> None:
    windows = Windows()
    windows.add([portion(Owner(namespace="ml"), 1.0)], 10.0)
    assert windows.at(10.0).owners() == {Owner(namespace="ml", kind="Pod", name="pod-0")}


def test_second_pod_with_the_same_name_starts_with_empty_windows() -> None:
    windows = Windows()
    windows.add([portion(JOB, 1.0, pod=pod_account(uid="a"))], 10.0)
    windows.add([portion(JOB, 0.5, pod=pod_account(uid="b"))], 11.0)
    reading = windows.at(11.0)
    assert reading.of_holder(KEY, "b")["15m"] == pytest.approx((0.5, 0.5))
    assert reading.of_holder(KEY, "a")["15m"] == (0.0, 0.0)
    assert reading.of_owner(JOB)["15m"] == pytest.approx((1.5, 1.5))


def test_pod_uid_known_later_continues_the_same_pod() -> None:
    windows = Windows()
    windows.add([portion(JOB, 1.0)], 10.0)
    windows.add([portion(JOB, 1.0, pod=pod_account(uid="a"))], 11.0)
    assert windows.at(11.0).of_holder(KEY, "a")["15m"] == pytest.approx((2.0, 2.0))


def test_estimated_portions_count_as_shared_and_mark_the_holder_for_15_minutes() -> None:
    windows = Windows()
    windows.add([replace(portion(JOB, 1.0), estimated=True)], 10.0)
    windows.add([portion(JOB, 0.5)], 11.0)
    reading = windows.at(11.0)
    assert reading.is_estimated(KEY)
    assert reading.of_owner(JOB)["15m"] == pytest.approx((0.5, 0.5))
    assert reading.of_shared("GPU-0")["15m"] == pytest.approx((1.0, 1.0))
    assert windows.at(910.0).is_estimated(KEY)
    assert not windows.at(911.0).is_estimated(KEY)


def test_ended_holders_and_owners_are_forgotten() -> None:
    windows = Windows()
    windows.add([portion(JOB, 1.0), replace(portion(JOB, 1.0, pod=pod_account(1)), estimated=True)], 10.0)
    for second in range(60, 86_400 + 180, 60):
        windows.add([portion(OTHER_JOB, 60.0, interval=60.0, pod=pod_account(2))], float(second))
        if second == HOLDER_SECONDS + 120:
            assert set(windows.holders) == {("GPU-2", "ml", "pod-2", "main")}
            assert windows.at(float(second)).owners() == {JOB, OTHER_JOB}
    assert set(windows.owners) == {OTHER_JOB}
    assert not windows.shared


def test_oldest_ended_owners_over_the_limit_are_forgotten() -> None:
    windows = Windows()
    jobs = [Owner(namespace="ml", kind="Job", name=f"job-{number}") for number in range(OWNERS_LIMIT + 60)]
    for first in range(0, len(jobs), 60):
        of_a_sample = enumerate(jobs[first : first + 60], first)
        windows.add([portion(job, 20.0, interval=20.0, pod=pod_account(n)) for n, job in of_a_sample], first * 20.0)
    now = len(jobs) * 20.0 + HOLDER_SECONDS + 60
    windows.add([], now)
    assert windows.at(now).owners() == set(jobs[60:])
