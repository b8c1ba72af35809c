"""Meters: every GPU-second between two samples has one owner, once."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metering_support import LAYOUTS, holder, namespace_owner, partitioned, random_views, through_json, use, whole

from exporter.accounting.ledger import Ledgers
from exporter.accounting.meter import Meter, MeterState
from exporter.model.attribution import UNATTRIBUTED, AllocationState, Holder, Owner, ShareMode
from exporter.model.devices import DeviceState
from exporter.model.fields import Field
from exporter.model.ledger import ByState, Portion, Price
from exporter.model.records import read
from exporter.model.snapshot import DeviceView

COUNTER = Field.TOTAL_ENERGY_CONSUMPTION
Figures = tuple[float, float, float]


@pytest.fixture
def meter() -> Meter:
    return Meter(1.0, namespace_owner)


def after(meter: Meter, views: Sequence[DeviceView], dt: float = 1.0, start: float = 100.0) -> tuple[Portion, ...]:
    """Meter an interval without changes."""
    meter.add(views, start)
    return meter.add(views, start + dt)


def figures(portions: Sequence[Portion]) -> dict[str, Figures]:
    """Return active, idle and unknown seconds, rounded, by pod or else by kind of owner."""
    return {
        (portion.pod.pod if portion.pod else portion.account.owner.kind): (
            round(portion.seconds.active, 9),
            round(portion.seconds.idle, 9),
            round(portion.seconds.unknown, 9),
        )
        for portion in portions
    }


def shared(pod: str, ratio: float | None, *, quarter: float = 0.25) -> tuple[Holder, float | None]:
    return holder(pod, share=quarter, mode=ShareMode.SHARED), ratio


def test_the_first_sample_of_a_gpu_charges_nothing(meter: Meter) -> None:
    assert meter.add([whole(use(holder("a"), 0.5))], 100.0) == ()


@pytest.mark.parametrize(
    ("effective", "expected"),
    [
        (None, {"active_unprofiled": 1.5}),
        (0.25, {"active_effective": 0.5, "active_ineffective": 1.0}),
        (0.9, {"active_effective": 1.5}),
    ],
)
def test_active_time_is_divided_by_the_effective_ratio(
    meter: Meter, effective: float | None, expected: dict[str, float]
) -> None:
    (portion,) = after(meter, [whole(use(holder("a"), 0.75, effective), busy=0.75)], dt=2.0)
    assert {state: seconds for state, seconds in portion.seconds if seconds} == expected | {"idle": 0.5}
    assert (portion.profile is None) == (effective is None)


def test_exclusive_holder_has_the_activity_of_its_gpu(meter: Meter) -> None:
    (portion,) = after(meter, [whole(use(holder("a"), 0.75), busy=0.75)], dt=2.0)
    assert (portion.seconds.active, portion.seconds.idle, portion.seconds.unknown) == (1.5, 0.5, 0.0)
    assert portion.account.owner == Owner(namespace="ml")
    assert portion.account.mode is ShareMode.EXCLUSIVE
    assert portion.interval_seconds == 2.0


def test_unknown_activity_is_neither_active_nor_idle(meter: Meter) -> None:
    assert figures(after(meter, [whole(use(holder("a"), None), busy=None)])) == {"a": (0.0, 0.0, 1.0)}


def test_lost_gpu_charges_unknown_time_to_its_holder(meter: Meter) -> None:
    lost = whole(use(holder("a"), 0.5), busy=0.5, state=DeviceState.LOST)
    assert figures(after(meter, [lost])) == {"a": (0.0, 0.0, 1.0)}


def test_fully_used_share_is_active_and_the_free_replica_is_idle(meter: Meter) -> None:
    pods = [use(*shared("a", 0.25)), use(*shared("b", 0.05)), use(*shared("c", 0.4))]
    portions = after(meter, [whole(*pods, busy=0.7)])
    assert figures(portions) == {
        "a": (0.25, 0.0, 0.0),
        "b": (0.05, 0.2, 0.0),
        "c": (0.25, 0.0, 0.0),
        "Unallocated": (0.0, 0.25, 0.0),
    }
    assert {portion.account.mode for portion in portions} == {ShareMode.SHARED}


def test_rest_of_a_gpu_with_possible_holders_is_unattributed(meter: Meter) -> None:
    doubtful = replace(whole(use(*shared("a", 0.25)), busy=0.2), rest_is_free=False)
    assert figures(after(meter, [doubtful])) == {"a": (0.25, 0.0, 0.0), "Unattributed": (0.0, 0.0, 0.75)}


def test_free_gpu_is_unallocated_and_a_gpu_with_unknown_holders_unattributed(meter: Meter) -> None:
    assert figures(after(meter, [whole(busy=0.1)])) == {"Unallocated": (0.1, 0.9, 0.0)}
    unknown = figures(after(Meter(1.0, namespace_owner), [whole(busy=0.4, known=False)]))
    assert unknown == {"Unattributed": (0.4, 0.6, 0.0)}


def test_stranded_slices_are_idle_and_unallocated() -> None:
    meter = Meter(10.0, namespace_owner)
    views = partitioned(("2g.20gb", "1g.10gb"), {0: ("a", 0.5), 1: ("b", 1.0)})
    portions = after(meter, views, dt=7.0)
    assert figures(portions) == {"a": (1.0, 1.0, 0.0), "b": (1.0, 0.0, 0.0), "Unallocated": (0.0, 4.0, 0.0)}
    assert {portion.account.mode for portion in portions} == {ShareMode.MIG}
    (pod,) = [portion.pod for portion in portions if portion.pod and portion.pod.pod == "a"]
    assert (pod.gpu_instance, pod.mig_profile, pod.gpu_uuid) == ("1", "2g.20gb", "GPU-0")


@pytest.mark.parametrize(("free", "owner"), [(False, "Unattributed"), (True, "Unallocated")])
def test_undescribed_instance_slices_are_unknown_time(*, free: bool, owner: str) -> None:
    board, *parts = partitioned(("2g.20gb", "1g.10gb"), {0: ("a", 0.5), 1: ("b", 1.0)})
    lacking = [replace(board, lacks_instances=True, rest_is_free=free), *parts]
    portions = after(Meter(10.0, namespace_owner), lacking, dt=7.0)
    assert figures(portions) == {"a": (1.0, 1.0, 0.0), "b": (1.0, 0.0, 0.0), owner: (0.0, 0.0, 4.0)}


def test_free_part_of_a_lost_or_unmeasured_device_is_unknown_time() -> None:
    blind = whole(use(*shared("a", None)), busy=None)
    assert figures(after(Meter(1.0, namespace_owner), [blind])) == {"a": (0, 0, 0.25), "Unallocated": (0, 0, 0.75)}
    down = partitioned(("2g.20gb", "1g.10gb"), {0: ("a", 0.5), 1: ("b", 1.0)}, state=DeviceState.LOST)
    assert figures(after(Meter(10.0, namespace_owner), down, dt=7.0)) == {
        "a": (0.0, 0.0, 2.0),
        "b": (0.0, 0.0, 1.0),
        "Unallocated": (0.0, 0.0, 4.0),
    }


def test_free_instance_is_idle_if_measured_and_unknown_otherwise(meter: Meter) -> None:
    measured = figures(after(meter, partitioned(("3g.40gb", "3g.40gb"), {0: ("a", 1.0)}, free_busy=0.2)))
    assert measured == {"a": (0.5, 0.0, 0.0), "Unallocated": (0.1, 0.4, 0.0)}
    blind = after(Meter(1.0, namespace_owner), partitioned(("3g.40gb", "3g.40gb"), {}, free_busy=None))
    assert figures(blind) == {"Unallocated": (0.0, 0.0, 1.0)}


def test_overlapping_instances_sum_to_one_gpu(meter: Meter) -> None:
    portions = after(meter, partitioned(("3g.40gb", "4g.40gb"), {0: ("a", 1.0), 1: ("b", 1.0)}))
    # 3g is 4/8 of the memory, 4g 4/7 of the compute: 15/14 of a GPU, normalised to one.
    assert figures(portions) == {"a": (round(7 / 15, 9), 0.0, 0.0), "b": (round(8 / 15, 9), 0.0, 0.0)}


def test_holder_of_a_partitioned_gpu_has_all_of_it(meter: Meter) -> None:
    board, *instances = partitioned(("3g.40gb", "3g.40gb"), {})
    held = replace(board, allocation=whole(use(holder("a"), 1.0)).allocation, pods=(use(holder("a"), 1.0),))
    held = replace(held, activity=whole(busy=1.0).activity)
    assert figures(after(meter, [held, *instances])) == {"a": (1.0, 0.0, 0.0)}


def test_free_replicas_of_a_partitioned_gpu_without_activity_are_unknown(meter: Meter) -> None:
    board, *instances = partitioned(("3g.40gb", "3g.40gb"), {})
    board = replace(board, allocation=AllocationState.ALLOCATED, pods=(use(*shared("a", None)),))
    assert figures(after(meter, [board, *instances])) == {"a": (0.0, 0.0, 0.25), "Unallocated": (0.0, 0.0, 0.75)}


def test_gpu_holder_and_instance_holder_divide_the_whole_gpu(meter: Meter) -> None:
    views = partitioned(("1g.10gb",) * 7, {0: ("b", 1.0)})
    board, instance, *free = views
    # As from the join: 1 and 1/7 of the GPU, normalised.
    of_board = use(holder("a", share=7 / 8, of_device=1.0), 1.0)
    of_instance = use(replace(instance.pods[0].holder, share_ratio=1 / 8), 0.0)
    board = replace(board, pods=(of_board,), allocation=AllocationState.ALLOCATED)
    portions = after(meter, [board, replace(instance, pods=(of_instance,)), *free])
    assert figures(portions) == {"a": (0.875, 0.0, 0.0), "b": (0.0, 0.125, 0.0)}


def test_holder_at_the_end_of_an_interval_is_charged_for_it(meter: Meter) -> None:
    meter.add([whole(use(holder("a"), 1.0), busy=1.0)], 100.0)
    assert figures(meter.add([whole(use(holder("b"), 1.0), busy=1.0)], 101.0)) == {"b": (1.0, 0.0, 0.0)}


def test_gap_is_unknown_time_of_the_continuous_holder(meter: Meter) -> None:
    assert figures(after(meter, [whole(use(holder("a"), 1.0), busy=1.0)], dt=3.0)) == {"a": (3.0, 0.0, 0.0)}
    gap = after(Meter(1.0, namespace_owner), [whole(use(holder("a"), 1.0), busy=1.0)], dt=3.1)
    assert figures(gap) == {"a": (0.0, 0.0, 3.1)}


def test_two_seconds_are_no_gap_for_a_fast_sampler() -> None:
    fast = Meter(0.1, namespace_owner)
    assert figures(after(fast, [whole(use(holder("a"), 1.0), busy=1.0)], dt=2.0)) == {"a": (2.0, 0.0, 0.0)}


def test_shares_with_a_changed_holder_in_a_gap_are_unattributed(meter: Meter) -> None:
    meter.add([whole(use(*shared("a", 0.1)), use(*shared("b", 0.1)), busy=0.2)], 100.0)
    now = whole(use(*shared("a", 0.1)), use(*shared("c", 0.1, quarter=0.5)), busy=0.2)
    # a held a quarter throughout, a quarter was free throughout; b's quarter and c's other one have unknown owners.
    assert figures(meter.add([now], 200.0)) == {
        "a": (0.0, 0.0, 25.0),
        "Unallocated": (0.0, 0.0, 25.0),
        "Unattributed": (0.0, 0.0, 50.0),
    }


def test_gpu_missing_over_two_restarts_loses_no_second(meter: Meter) -> None:
    here, other = whole(use(holder("a"), 1.0), busy=1.0), whole(index=1)
    meter.add([here, other], 100.0)
    for restart in (200.0, 300.0):
        after = Meter(1.0, namespace_owner)
        after.resume(meter.state())
        after.add([other], restart)
        meter = after
    portions = meter.add([here, other], 301.0)
    assert sum(one.seconds.total for one in portions if one.gpu_uuid == "GPU-0") == pytest.approx(201.0)


def test_share_that_changed_in_a_gap_is_charged_at_the_smaller_size(meter: Meter) -> None:
    few, many = use(*shared("a", 0.1)), use(*shared("a", 0.1, quarter=0.75))
    meter.add([whole(few, busy=0.1)], 100.0)
    assert figures(meter.add([whole(many, busy=0.1)], 200.0)) == {
        "a": (0.0, 0.0, 25.0),
        "Unallocated": (0.0, 0.0, 25.0),
        "Unattributed": (0.0, 0.0, 50.0),
    }
    assert figures(meter.add([whole(few, busy=0.1)], 300.0)) == {
        "a": (0.0, 0.0, 25.0),
        "Unallocated": (0.0, 0.0, 25.0),
        "Unattributed": (0.0, 0.0, 50.0),
    }


def test_gap_holder_is_that_of_the_last_sample(meter: Meter) -> None:
    for second, pod in ((100.0, "a"), (101.0, "b")):
        meter.add([whole(use(holder(pod), 1.0), busy=1.0)], second)
    assert figures(meter.add([whole(use(holder("b"), 1.0), busy=1.0)], 111.0)) == {"b": (0.0, 0.0, 10.0)}


def test_new_pod_with_the_same_name_does_not_hold_through_a_gap(meter: Meter) -> None:
    meter.add([whole(use(holder("web-0", uid="uid-1"), 1.0), busy=1.0)], 100.0)
    portions = meter.add([whole(use(holder("web-0", uid="uid-2"), 1.0), busy=1.0)], 200.0)
    assert figures(portions) == {"Unattributed": (0.0, 0.0, 100.0)}


@pytest.mark.parametrize("second", [100.0, 40.0])
def test_stalled_clock_charges_nothing_and_the_next_second_counts(meter: Meter, second: float) -> None:
    views = [whole(use(holder("a"), 1.0), busy=1.0)]
    meter.add(views, 100.0)
    assert meter.add(views, second) == ()
    assert figures(meter.add(views, second + 1)) == {"a": (1.0, 0.0, 0.0)}


@pytest.mark.parametrize(("after", "expected"), [("a", 301 * 300.0), ("b", None)], ids=["same holder", "other holder"])
@pytest.mark.parametrize("restarts", [False, True])
def test_lost_gpu_energy_is_counted_on_return_unless_the_holder_changed(
    meter: Meter, after: str, expected: float | None, *, restarts: bool
) -> None:
    def view(pod: str, joules: float | None) -> list[DeviceView]:
        state = DeviceState.UP if joules is not None else DeviceState.LOST
        values = {} if joules is None else {COUNTER: joules * 1000}
        return [whole(use(holder(pod), 1.0), busy=1.0, state=state, values=values)]

    meter.add(view("a", 0.0), 0.0)
    for second in range(1, 301):
        assert all(one.energy_joules is None for one in meter.add(view("a", None), second))
    meter = resumed(meter) if restarts else meter
    assert [one.energy_joules for one in meter.add(view(after, 301 * 300.0), 301.0)] == [expected]
    assert [one.energy_joules for one in meter.add(view(after, 302 * 300.0), 302.0)] == [300.0]


def test_late_sample_counts_no_second_twice(meter: Meter) -> None:
    views = [whole(use(holder("a"), 1.0), busy=1.0)]
    meter.add(views, 100.0)
    meter.add(views, 102.0)
    assert meter.add(views, 101.0) == ()
    assert meter.steady == 102.0
    assert figures(meter.add(views, 103.0)) == {"a": (1.0, 0.0, 0.0)}


def test_returning_gpu_is_charged_unknown_time(meter: Meter) -> None:
    here, other = whole(use(holder("a"), 1.0), busy=1.0), whole(index=1)
    meter.add([here, other], 100.0)
    portions = meter.add([other], 101.0)
    assert {portion.gpu_uuid for portion in portions} == {"GPU-1"}
    meter.add([other], 110.0)
    assert figures([p for p in meter.add([here, other], 111.0) if p.pod]) == {"a": (0.0, 0.0, 11.0)}


def test_late_owner_is_charged_from_then_on() -> None:
    owners: list[Owner] = [Owner(namespace="ml")]
    meter = Meter(1.0, lambda _: owners[-1])
    views = [whole(use(holder("a"), 1.0), busy=1.0)]
    after(meter, views)
    owners.append(Owner(namespace="ml", kind="Job", name="train", team="red"))
    (portion,) = meter.add(views, 102.0)
    assert portion.account.owner.name == "train"


def test_unattributed_use_has_energy_but_no_seconds(meter: Meter) -> None:
    def views(joules: float) -> list[DeviceView]:
        return [whole(use(holder("a"), 0.2), busy=0.8, foreign=0.6, values={COUNTER: joules * 1000})]

    meter.add(views(0), 100.0)
    meter.add(views(100), 101.0)  # the GPU's idle power is at most 100 W
    portions = meter.add(views(500), 102.0)
    joules = {portion.account.owner.kind: portion.energy_joules for portion in portions}
    assert joules == pytest.approx({"": 100 + 300 * 0.25, "Unattributed": 300 * 0.75})
    assert sum(portion.energy_joules or 0 for portion in portions) == 400.0
    assert [portion.seconds.total for portion in portions if portion.account.owner == UNATTRIBUTED] == [0.0]


def test_idle_energy_is_also_charged_to_free_instances(meter: Meter) -> None:
    def views(joules: float, busy: float) -> list[DeviceView]:
        return partitioned(("3g.40gb", "3g.40gb"), {0: ("a", busy)}, values={COUNTER: joules * 1000})

    meter.add(views(0, 0.0), 100.0)
    meter.add(views(100, 0.0), 101.0)
    portions = meter.add(views(600, 1.0), 102.0)
    joules = {portion.account.owner.kind: portion.energy_joules for portion in portions}
    assert joules == pytest.approx({"": 450.0, "Unallocated": 50.0})


def test_unmeasured_energy_is_absent(meter: Meter) -> None:
    (portion,) = after(meter, [whole(use(holder("a"), 1.0))])
    assert portion.energy_joules is None


def resumed(meter: Meter, owner_of: Callable[[Holder], Owner] = namespace_owner) -> Meter:
    """Return the meter of the next process, from the content of the file."""
    fresh = Meter(meter.sample_interval_seconds, owner_of)
    if meter.steady is not None:
        fresh.resume(read(MeterState, through_json(meter.state())))
    return fresh


def test_short_restart_is_a_normal_interval_and_a_longer_one_a_gap(meter: Meter) -> None:
    def views(joules: float) -> list[DeviceView]:
        return [whole(use(holder("a"), 1.0), busy=1.0, values={COUNTER: joules * 1000})]

    meter.add(views(0), 100.0)
    quick, slow = resumed(meter), resumed(meter)
    (portion,) = quick.add(views(300), 101.5)
    assert (portion.seconds.active, portion.energy_joules) == (1.5, 300.0)
    (portion,) = slow.add(views(9000), 130.0)
    assert (portion.seconds.unknown, portion.energy_joules) == (30.0, 9000.0)


PRICE = Price(per_hour=3.6, currency="USD", source="book:row", as_of="2026-01-01", per_kwh=0.36)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.integers(0, len(LAYOUTS) - 1), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.lists(st.sampled_from((0.0, -5.0, 0.3, 1.0, 1.01, 2.9, 3.5, 600.0)), min_size=2, max_size=25),
)
def test_all_time_and_energy_have_an_owner(layouts: list[int], seed: int, steps: list[float]) -> None:
    random = Random(seed)  # noqa: S311 # chance in a test, nothing secret
    meter, ledgers = Meter(1.0, namespace_owner), Ledgers(saves=True)
    counters: dict[int, float] = {}
    at: dict[str, float] = {}
    steady = passed = joules = 0.0
    charged = ByState()
    for step in steps:
        steady = max(0.0, steady + step)
        views = random_views(random, layouts, counters)
        portions = meter.add(views, steady)
        for uuid in dict.fromkeys(view.gpu.uuid for view in views):
            of_gpu = [portion for portion in portions if portion.gpu_uuid == uuid]
            interval = max(0.0, steady - at.get(uuid, steady))
            assert sum(p.seconds.total for p in of_gpu) == pytest.approx(interval, rel=1e-9, abs=1e-300)
            assert all(seconds >= 0 for p in of_gpu for _, seconds in p.seconds)
            assert len({p.energy_joules is None for p in of_gpu}) <= 1
            passed += interval
            at[uuid] = max(steady, at.get(uuid, steady))
        joules += sum(portion.energy_joules or 0.0 for portion in portions)
        charged = sum((portion.seconds for portion in portions), charged)
        ledgers.charge(portions, {"GPU-0": PRICE}, now=steady, steady=steady)
        state = through_json(ledgers.begin_save(lambda owner: owner, steady))
        ledgers.saved()
        view = ledgers.view()
        in_sight = sum(totals.seconds.total for totals in view.accounts.values())
        assert in_sight + view.withheld_seconds == pytest.approx(view.capacity_seconds, rel=1e-9)
        if random.random() < 0.2:
            meter = resumed(meter)
            ledgers = Ledgers(saves=True)
            ledgers.restore(state)
    view = ledgers.view()
    totals = view.accounts.values()
    assert view.capacity_seconds == pytest.approx(passed, rel=1e-9)
    assert sum(total.seconds.total for total in totals) == pytest.approx(passed, rel=1e-9)
    assert dict(sum((total.seconds for total in totals), ByState())) == pytest.approx(dict(charged), rel=1e-9)
    assert sum(total.energy_joules for total in totals) == pytest.approx(joules, rel=1e-9)
    assert view.conservation_error_seconds <= 1e-9 * max(passed, 1.0)
