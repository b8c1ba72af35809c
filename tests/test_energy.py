"""Energy of a GPU: amount and owner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.accounting.meter import Energy, EnergyMeter, split_energy
from exporter.model.fields import Field

COUNTER, POWER = Field.TOTAL_ENERGY_CONSUMPTION, Field.POWER_USAGE
part = st.floats(0, 1) | st.just(0.0)


def meter_at(millijoules: float) -> EnergyMeter:
    meter = EnergyMeter()
    meter.begin({COUNTER: millijoules})
    return meter


def test_energy_is_the_increase_of_the_counter() -> None:
    meter = meter_at(5_000_000)
    ended = meter.end({COUNTER: 5_400_000, POWER: 999.0}, 1.0, seen=True, is_long=True)
    assert ended == Energy(joules=400.0, idle_joules=400.0)


def test_energy_above_the_lowest_power_is_active_energy() -> None:
    meter = meter_at(0)
    meter.end({COUNTER: 100_000}, 1.0, seen=True, is_long=True)
    assert meter.end({COUNTER: 600_000}, 1.0, seen=True, is_long=True) == Energy(joules=500.0, idle_joules=100.0)
    assert meter.end({COUNTER: 800_000}, 2.0, seen=True, is_long=True) == Energy(joules=200.0, idle_joules=200.0)


@pytest.mark.parametrize(("interval", "seen"), [(1.0, True), (620.0, False)])
def test_energy_across_a_counter_reset_is_unmeasured(*, interval: float, seen: bool) -> None:
    meter = meter_at(900_000)
    assert meter.end({COUNTER: 50_000, POWER: 100.0}, interval, seen=seen, is_long=True) is None
    assert meter.idle_watts is None
    ended = meter.end({COUNTER: 150_000}, 1.0, seen=True, is_long=True)
    assert ended == Energy(joules=100.0, idle_joules=100.0)


def test_impossible_energy_is_unmeasured() -> None:
    meter = meter_at(900_000)
    assert meter.end({COUNTER: 2**64 - 1}, 1.0, seen=True, is_long=True) is None
    assert meter.end({COUNTER: 1_500_000}, 1.0, seen=True, is_long=True) is None
    assert meter.end({COUNTER: 1_900_000}, 1.0, seen=True, is_long=True) == Energy(joules=400.0, idle_joules=400.0)
    assert EnergyMeter().end({POWER: 4_294_967.295}, 1.0, seen=True, is_long=True) is None


def test_energy_without_a_counter_is_power_times_time_but_not_over_a_gap() -> None:
    meter = EnergyMeter()
    ended = meter.end({POWER: 300.0}, 2.0, seen=True, is_long=True)
    assert ended is not None
    assert ended.joules == 600.0
    assert meter.end({POWER: 300.0}, 600.0, seen=False, is_long=True) is None
    assert meter.end({}, 1.0, seen=True, is_long=True) is None


def test_counter_covers_a_gap_without_updating_idle_power() -> None:
    meter = meter_at(0)
    ended = meter.end({COUNTER: 60_000_000}, 600.0, seen=False, is_long=True)
    assert ended is not None
    assert ended.joules == 60_000.0
    assert meter.idle_watts is None


def test_counter_missing_in_one_sample_is_caught_up_once_by_the_next() -> None:
    blind = meter_at(0)
    assert blind.end({}, 1.0, seen=True, is_long=True) is None
    ended = blind.end({COUNTER: 200_000}, 1.0, seen=True, is_long=True)
    assert ended is not None
    assert ended.joules == 200.0

    powered = meter_at(0)
    first = powered.end({POWER: 100.0}, 1.0, seen=True, is_long=True)
    second = powered.end({COUNTER: 200_000, POWER: 100.0}, 1.0, seen=True, is_long=True)
    assert first is not None
    assert second is not None
    assert first.joules + second.joules == 200.0


def test_counter_first_read_after_a_gap_counts_from_then_on() -> None:
    meter = EnergyMeter()
    meter.begin({})
    assert meter.end({COUNTER: 9_000_000}, 600.0, seen=False, is_long=True) is None
    ended = meter.end({COUNTER: 9_300_000}, 1.0, seen=True, is_long=True)
    assert ended == Energy(joules=300.0, idle_joules=300.0)
    assert meter.idle_watts == 300.0


def test_interval_too_short_for_the_counter_does_not_update_idle_power() -> None:
    meter = meter_at(0)
    meter.end({COUNTER: 1}, 0.01, seen=True, is_long=False)
    assert meter.idle_watts is None


def test_idle_energy_is_split_by_share_and_the_rest_by_activity() -> None:
    parts = split_energy(Energy(joules=500.0, idle_joules=100.0), [0.25, 0.75], [0.3, 0.1])
    assert parts == pytest.approx([25 + 300, 75 + 100])
    assert split_energy(Energy(joules=500.0, idle_joules=100.0), [0.5, 0.5], [0.0, 0.0]) == [250.0, 250.0]


@given(st.floats(0, 1e9), st.floats(0, 1), st.lists(st.tuples(part, part), min_size=1, max_size=60))
def test_energy_parts_are_never_negative_and_sum_to_the_energy_of_the_gpu(
    joules: float, idle: float, parts: list[tuple[float, float]]
) -> None:
    shares = [share + 1e-3 for share, _ in parts]
    split = split_energy(Energy(joules=joules, idle_joules=joules * idle), shares, [weight for _, weight in parts])
    assert min(split) >= 0
    assert sum(split) == pytest.approx(joules, rel=1e-12, abs=1e-300)
