"""Forecast of a month: none before a day is known, and with weekends after two of them."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.cost.budgets import forecast
from exporter.cost.window import DAY_SECONDS, Window

MONDAY = int(datetime(2026, 10, 5, tzinfo=UTC).timestamp())


def at(month: int, day: int, hour: int = 0) -> int:
    return int(datetime(2026, month, day, hour, tzinfo=UTC).timestamp())


OCTOBER = Window(start_seconds=at(10, 1), end_seconds=at(11, 1))


def test_forecast_without_a_complete_day_is_none() -> None:
    assert forecast(12.0, [], at(10, 1, 7), OCTOBER) is None


def test_rest_of_the_month_costs_the_average_of_the_last_week() -> None:
    daily = [1000.0, 10, 20, 30, 40, 50, 60, 70]
    assert forecast(500.0, daily, at(10, 9), OCTOBER) == pytest.approx(500 + 23 * 40)


def test_rest_of_today_is_weighted_by_its_hours() -> None:
    assert forecast(5.0, [24.0], at(10, 31, 6), OCTOBER) == pytest.approx(5 + 18)


def test_future_period_is_forecast_completely() -> None:
    assert forecast(0.0, [2.0], at(9, 30, 12), OCTOBER) == pytest.approx(31 * 2)


def test_weekends_are_separate_once_two_weeks_are_known() -> None:
    daily = [100.0, 100, 100, 100, 100, 10, 10] * 2
    week = Window(start_seconds=MONDAY, end_seconds=MONDAY + 7 * DAY_SECONDS)
    # Friday at noon: half a Friday, a Saturday and a Sunday are left.
    after = daily + daily[:4]
    assert forecast(450.0, after, MONDAY + 4.5 * DAY_SECONDS, week) == pytest.approx(450 + 50 + 20)


def test_days_older_than_four_weeks_are_ignored() -> None:
    daily = [1e9] * 30 + [1.0] * 28
    assert forecast(0.0, daily, at(10, 30), OCTOBER) == pytest.approx(2)


@given(st.floats(0, 1e6), st.integers(1, 60), st.floats(0, 31 * 86_400))
def test_constant_days_continue_unchanged(cost: float, known: int, into: float) -> None:
    now = OCTOBER.start_seconds + into
    rest = (OCTOBER.end_seconds - now) / DAY_SECONDS
    assert forecast(7.0, [cost] * known, now, OCTOBER) == pytest.approx(7 + cost * rest)
