"""Periods in the form of users: their meaning, their edges, and the errors for invalid ones."""

from datetime import UTC, date, datetime, timedelta, tzinfo
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.cli import main
from exporter.cost.window import Window, chunks, parse_window, stretches
from exporter.errors import ConfigError

NOW = datetime(2026, 10, 14, 15, 42, 11, tzinfo=UTC)  # a Wednesday


def moment(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())


@pytest.mark.parametrize(
    ("text", "start", "end"),
    [
        ("30d", "2026-09-14T15:00", "2026-10-14T15:00"),
        ("12h", "2026-10-14T03:00", "2026-10-14T15:00"),
        ("2w", "2026-09-30T15:00", "2026-10-14T15:00"),
        ("today", "2026-10-14", "2026-10-14T15:00"),
        ("yesterday", "2026-10-13", "2026-10-14"),
        ("week", "2026-10-12", "2026-10-14T15:00"),
        ("lastweek", "2026-10-05", "2026-10-12"),
        ("month", "2026-10-01", "2026-10-14T15:00"),
        ("LastMonth", "2026-09-01", "2026-10-01"),
        ("2026", "2026-01-01", "2026-10-14T15:00"),
        ("2025", "2025-01-01", "2026-01-01"),
        ("2026-Q3", "2026-07-01", "2026-10-01"),
        ("2025-q4", "2025-10-01", "2026-01-01"),
        ("2026-10", "2026-10-01", "2026-10-14T15:00"),
        ("2025-12", "2025-12-01", "2026-01-01"),
        ("2026-10-03", "2026-10-03", "2026-10-04"),
        ("2026-10-01..2026-10-03", "2026-10-01", "2026-10-04"),
        ("2026-08..2026-09", "2026-08-01", "2026-10-01"),
        ("2026-10-01T00:00Z..2026-10-02T06:00Z", "2026-10-01", "2026-10-02T06:00"),
        ("2026-10-01T02:00+02:00..2026-10-01T06:00+02:00", "2026-10-01", "2026-10-01T04:00"),
        ("2026-10-01T00:00..2026-10-01T05:59:59", "2026-10-01", "2026-10-01T06:00"),
        ("2026-10-01T05:30+05:30..2026-10-01T07:30+05:30", "2026-10-01", "2026-10-01T02:00"),
        (f"{moment('2026-10-01')},{moment('2026-10-02')}", "2026-10-01", "2026-10-02"),
        (" 2026-10-03 ", "2026-10-03", "2026-10-04"),
        ("2024-02", "2024-02-01", "2024-03-01"),
    ],
)
def test_period_texts_give_the_expected_window(text: str, start: str, end: str) -> None:
    window = parse_window(text, NOW.timestamp())
    assert (window.start_seconds, window.end_seconds, window.label) == (moment(start), moment(end), text.strip())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not a period"),
        ("yesteryear", "is not a period; did you mean 'yesterday'?"),
        ("lastmnth", "is not a period; did you mean 'lastmonth'?"),
        ("14 days", "is not a period; did you mean '14d'?"),
        ("30", "is not a period; did you mean '30d'?"),
        ("2026-13", "is not a period"),
        ("2026-02-30", "is not a period"),
        ("2026-Q5", "is not a period"),
        ("1790000000", "is not a period"),
        ("0001-01", "is not a period"),
        ("9999-12", "is not a period"),
        ("2026-10-01..", "is not a period"),
        ("2026-10-01T25:00..2026-10-02T00:00", "is not a period"),
        ("\u202e\n30d", "is not a period"),
        ("2026-10-03..2026-10-01", "ends before it begins"),
        ("2026-10-02T06:00Z..2026-10-02T06:00Z", "ends before it begins"),
        ("1790086400,1790000000", "ends before it begins"),
        ("0d", "ends before it begins"),
        ("2026-11", "lies in the future"),
        ("2027-01-01..2027-01-02", "lies in the future"),
        ("9999d", "longer than ten years"),
        ("2026-10-01T00:30..2026-10-01T05:00", "begins at 2026-10-01 00:30:00 UTC, within an hour"),
        ("2026-10-01T00:00..2026-10-01T05:10", "ends at 2026-10-01 05:10:00 UTC, within an hour"),
        ("1790001000,1790003600", "begins at 2026-09-21 14:30:00 UTC"),
    ],
)
def test_invalid_period_is_reported_with_the_allowed_forms(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_window(text, NOW.timestamp())
    assert why in str(caught.value)
    assert "llowed: " in str(caught.value)
    assert str(caught.value).isprintable()


def test_period_without_a_recorded_hour_is_distinct_from_the_future() -> None:
    with pytest.raises(ConfigError, match="has no recorded hour yet; it is 2026-10-14 00:20 UTC"):
        parse_window("today", datetime(2026, 10, 14, 0, 20, tzinfo=UTC).timestamp())


@pytest.mark.parametrize(
    ("now", "text", "end"),
    [
        ("2026-10-14T15:19:59", "30d", "2026-10-14T14:00"),
        ("2026-10-14T15:20:00", "30d", "2026-10-14T15:00"),
        ("2026-10-14T00:19:59", "yesterday", "2026-10-13T23:00"),
        ("2026-10-14T00:20:00", "yesterday", "2026-10-14"),
        ("2026-10-01T00:00:01", "lastmonth", "2026-09-30T23:00"),
    ],
)
def test_last_hour_is_available_twenty_minutes_after_its_end(now: str, text: str, end: str) -> None:
    assert parse_window(text, moment(now)).end_seconds == moment(end)


def test_period_within_hours_is_refused_with_a_whole_hour_example() -> None:
    with pytest.raises(ConfigError, match=r"allowed: whole hours, such as 2026-10-01T04:00Z\.\.2026-10-01T07:00Z"):
        parse_window("2026-10-01T10:00+05:30..2026-10-01T12:00+05:30", NOW.timestamp())


BERLIN, KOLKATA, SYDNEY = ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Kolkata"), ZoneInfo("Australia/Sydney")


@pytest.mark.parametrize(
    ("text", "zone", "start", "end"),
    [
        ("today", BERLIN, "2026-10-13T22:00", "2026-10-14T15:00"),
        ("today", SYDNEY, "2026-10-14T13:00", "2026-10-14T15:00"),  # the next day in Sydney
        ("yesterday", SYDNEY, "2026-10-13T13:00", "2026-10-14T13:00"),
        ("2026-09", BERLIN, "2026-08-31T22:00", "2026-09-30T22:00"),
        ("2026-03", BERLIN, "2026-02-28T23:00", "2026-03-31T22:00"),
        ("2026-03-29", BERLIN, "2026-03-28T23:00", "2026-03-29T22:00"),  # 23 hours
        ("2025-10-26", BERLIN, "2025-10-25T22:00", "2025-10-26T23:00"),  # 25 hours
        ("2026-Q1", BERLIN, "2025-12-31T23:00", "2026-03-31T22:00"),
        ("lastmonth", BERLIN, "2026-08-31T22:00", "2026-09-30T22:00"),
        ("2026-10-01T06:00..2026-10-01T08:00", BERLIN, "2026-10-01T04:00", "2026-10-01T06:00"),
        ("2026-10-01T06:00Z..2026-10-01T08:00Z", BERLIN, "2026-10-01T06:00", "2026-10-01T08:00"),
        ("12h", BERLIN, "2026-10-14T03:00", "2026-10-14T15:00"),
    ],
)
def test_days_and_months_use_the_time_zone(text: str, zone: ZoneInfo, start: str, end: str) -> None:
    window = parse_window(text, NOW.timestamp(), zone)
    assert (window.start_seconds, window.end_seconds) == (moment(start), moment(end))


@pytest.mark.parametrize("text", ["today", "2026-09", "2026-10-03", "2026-10-03T00:00..2026-10-04T00:00"])
def test_days_of_a_half_hour_zone_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\(Asia/Kolkata\) begins at .* 18:30:00 UTC, within an hour"):
        parse_window(text, NOW.timestamp(), KOLKATA)


@given(days=st.integers(min_value=0, max_value=3000), zone=st.sampled_from([BERLIN, SYDNEY, UTC]))
def test_days_of_a_time_zone_are_contiguous(days: int, zone: tzinfo) -> None:
    day = date(2018, 1, 1) + timedelta(days=days)
    first, second = (parse_window(f"{one}", NOW.timestamp(), zone) for one in (day, day + timedelta(days=1)))
    assert first.end_seconds == second.start_seconds
    assert first.hours in {23, 24, 25}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Asia/Kolkata", "days there begin within an hour UTC, and the ledger is recorded by the hour UTC"),
        ("Australia/Lord_Howe", "days there begin within an hour UTC"),
        ("Europe/Berln", "value 'Europe/Berln' is not a time zone; allowed: an IANA name such as Europe/Berlin"),
        ("../etc/passwd", "is not a time zone"),
        ("Europe", "is not a time zone"),
        ("/etc/localtime", "value '/etc/localtime' is not a time zone"),
        ("", "is not a time zone"),
    ],
)
def test_inexact_time_zone_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str], name: str, why: str) -> None:
    assert main(["report", "--prometheus", "http://127.0.0.1:1", "--timezone", name]) == 2
    assert why in capsys.readouterr().err


hours = st.integers(min_value=0, max_value=600_000).map(lambda hour: hour * 3600)


@given(start=hours, length=st.integers(min_value=1, max_value=4000).map(lambda hour: hour * 3600))
def test_days_and_stretches_cover_a_window_once_and_in_order(start: int, length: int) -> None:
    window = Window(start_seconds=start, end_seconds=start + length)
    for pieces in (chunks(window), stretches(window)):
        assert pieces[0].start_seconds == window.start_seconds
        assert pieces[-1].end_seconds == window.end_seconds
        for before, after in pairwise(pieces):
            assert before.end_seconds == after.start_seconds
        assert all(piece.seconds > 0 for piece in pieces)
    assert all(piece.start_seconds // 86_400 == (piece.end_seconds - 1) // 86_400 for piece in chunks(window))


@given(st.text(max_size=40))
def test_arbitrary_text_gives_a_window_or_a_clear_error(text: str) -> None:
    try:
        window = parse_window(text, NOW.timestamp())
    except ConfigError as error:
        assert "llowed: " in str(error)  # noqa: PT017 - both outcomes are right
    else:
        assert window.seconds > 0
        assert window.end_seconds <= NOW.timestamp()
        assert window.start_seconds % 3600 == window.end_seconds % 3600 == 0
