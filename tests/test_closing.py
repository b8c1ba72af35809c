import asyncio
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from store_support import D1, D2, D3, D4, NOW, Known, chunk

from exporter.cost.store import ALL_OF_A_DAY, DayStore
from exporter.cost.store_ledger import StoreLedger, close_due_days, due_days, oldest_day
from exporter.cost.window import DAY_SECONDS, Window
from exporter.errors import PrometheusError, StoreError
from exporter.service.fleet import Keeping

HERE = Path(__file__).resolve().parent


def three_days() -> Known:
    return Known({day: chunk(day) for day in (D1, D2, D3)})


def test_due_days_are_closed_in_order_from_the_oldest(tmp_path: Path) -> None:
    source = three_days()
    reported: list[tuple[int, int]] = []
    with DayStore(tmp_path / "store").writing(0.0) as store:
        closing = asyncio.run(
            close_due_days(store, source, NOW, by="ann", progress=lambda done, due: reported.append((done, due)))
        )
        assert (closing.closed, closing.left) == ((D1, D2, D3), ())
        assert reported == [(1, 3), (2, 3), (3, 3)]
        assert asyncio.run(close_due_days(store, source, NOW)).closed == ()
        read = asyncio.run(StoreLedger(store).ledger(Window(start_seconds=D1, end_seconds=D4), ALL_OF_A_DAY))
        assert [dict(found.lines) for found in read.chunks] == [dict(chunk(day).lines) for day in (D1, D2, D3)]
        assert store.restatements(D2)[0].closed_by == "ann"


def test_day_is_due_two_hours_after_its_end(tmp_path: Path) -> None:
    with DayStore(tmp_path / "store").writing(0.0) as store:
        early = asyncio.run(due_days(store, three_days(), D4 + 2 * 3600 - 1.0, from_day=D3))
        late = asyncio.run(due_days(store, three_days(), D4 + 2 * 3600.0, from_day=D3))
    assert (early, late) == ((), (D3,))


def test_failed_day_does_not_block_other_days_and_is_closed_later(tmp_path: Path) -> None:
    source = three_days()
    source.failing = {D2}
    with DayStore(tmp_path / "store").writing(0.0) as store:
        closing = asyncio.run(close_due_days(store, source, NOW))
        assert closing.closed == (D1, D3)
        (left,) = closing.left
        assert (left.day_seconds, left.waits) == (D2, False)
        assert "no answer in 60 s" in left.reason
        source.failing = set()
        assert asyncio.run(close_due_days(store, source, NOW)).closed == (D2,)


def test_unavailable_prometheus_keeps_closed_days(tmp_path: Path) -> None:
    source = three_days()
    with DayStore(tmp_path / "store").writing(0.0) as store:
        asyncio.run(close_due_days(store, source, D3 + 3 * 3600.0))
        source.down = True
        closing = asyncio.run(close_due_days(store, source, NOW))
        assert closing.closed == ()
        assert [left.reason for left in closing.left] == ["prometheus: cannot connect; start it"]
        assert len(store.closed_days()) == 2
    with DayStore(tmp_path / "empty").writing(0.0) as store, pytest.raises(PrometheusError):
        asyncio.run(close_due_days(store, source, NOW))


def test_missing_hours_wait_two_days_and_then_need_accept_gaps(tmp_path: Path) -> None:
    source = Known({D1: chunk(D1, hours=23), D2: chunk(D2)})
    soon, later = D2 + 47 * 3600.0, D2 + 48 * 3600.0
    with DayStore(tmp_path / "store").writing(0.0) as store:
        for now, accept in ((soon, True), (later, False)):
            closing = asyncio.run(close_due_days(store, source, now, from_day=D1, accept_gaps=accept))
            assert D1 not in closing.closed
            (left,) = [left for left in closing.left if left.day_seconds == D1]
            assert left.waits
            assert "23 of its 24 hours of cluster 'east'" in left.reason
        assert D1 in asyncio.run(close_due_days(store, source, later, from_day=D1, accept_gaps=True)).closed


def test_service_counts_days_that_fail_and_not_days_that_wait_for_hours(tmp_path: Path) -> None:
    bare = D2
    source = Known({D1: chunk(D1), D3: chunk(D3, hours=20), D4: chunk(D4)})
    source.failing = {D4}
    keeping = Keeping(prometheus=source, path=tmp_path / "store", history_days=30)
    asyncio.run(keeping.round(D4 + DAY_SECONDS + 3 * 3600.0))
    keeping.close()
    assert {day.window.start_seconds for day in keeping.days}.isdisjoint({bare, D3, D4})
    assert keeping.not_closed == 1
    assert "no answer in 60 s" in keeping.problem


def test_late_hours_are_included_in_the_day(tmp_path: Path) -> None:
    source = Known({D1: chunk(D1, hours=20)})
    with DayStore(tmp_path / "store").writing(0.0) as store:
        assert asyncio.run(close_due_days(store, source, D2 + 3 * 3600.0)).closed == ()
        source.days[D1] = chunk(D1)
        assert asyncio.run(close_due_days(store, source, D2 + 9 * 3600.0)).closed == (D1,)


def test_day_without_any_hour_is_never_closed(tmp_path: Path) -> None:
    source = three_days()
    del source.days[D2]
    with DayStore(tmp_path / "store").writing(0.0) as store:
        closing = asyncio.run(close_due_days(store, source, D4 + 9 * DAY_SECONDS, accept_gaps=True))
        assert closing.closed == (D1, D3)
        assert "there is nothing to close" in next(left.reason for left in closing.left if left.day_seconds == D2)


def test_reopened_day_is_read_again(tmp_path: Path) -> None:
    source = three_days()
    with DayStore(tmp_path / "store").writing(0.0) as store:
        asyncio.run(close_due_days(store, source, NOW))
        store.reopen(D1, reason="late prices", by="ann", now=NOW)
        source.days[D1] = chunk(D1, seed=7)
        assert asyncio.run(close_due_days(store, source, NOW, by="bob")).closed == (D1,)
        assert [(v.number, v.closed_by, v.reason) for v in store.restatements(D1)] == [
            (1, "", ""),
            (2, "bob", "late prices"),
        ]


def test_data_lost_by_prometheus_later_changes_no_closed_day(tmp_path: Path) -> None:
    source = three_days()
    with DayStore(tmp_path / "store").writing(0.0) as store:
        asyncio.run(close_due_days(store, source, NOW))
        store.reopen(D1, reason="a wrong word", by="ann", now=NOW)
        source.days = {D1: dataclasses.replace(chunk(D1, seed=3), recorded_hours={"east": 5, "west": 5})}
        closing = asyncio.run(close_due_days(store, source, NOW + 9 * DAY_SECONDS, accept_gaps=True, from_day=D1))
        assert closing.closed == ()
        assert "5 hours of cluster 'east' are there now, the closed day has 24" in closing.left[0].reason
        combined = StoreLedger(store, source)
        ledger = asyncio.run(combined.ledger(Window(start_seconds=D1, end_seconds=D4), ALL_OF_A_DAY))
        assert [dict(found.lines) for found in ledger.chunks] == [dict(chunk(day).lines) for day in (D1, D2, D3)]


def test_store_with_a_future_closed_day_closes_nothing(tmp_path: Path) -> None:
    with DayStore(tmp_path / "store").writing(0.0) as store:
        asyncio.run(close_due_days(store, three_days(), NOW))
        with pytest.raises(StoreError, match="2026-09-06 is closed, and by this clock not over: set the clock"):
            asyncio.run(close_due_days(store, three_days(), D3 + 1.0))


def test_oldest_day_is_found_across_gaps_of_months() -> None:
    old = D3 - 75 * DAY_SECONDS
    source = Known({day: chunk(day, nodes=1, owners=1) for day in range(old, D3, 20 * DAY_SECONDS)})
    assert asyncio.run(oldest_day(source, D3)) == old
    assert asyncio.run(oldest_day(source, D3, from_day=D3 - 50 * DAY_SECONDS)) == old + 40 * DAY_SECONDS
    later = D3 + 70 * DAY_SECONDS
    assert asyncio.run(oldest_day(source, later)) is None
    assert asyncio.run(oldest_day(source, later, from_day=later - 90 * DAY_SECONDS)) is not None
    assert asyncio.run(oldest_day(Known({}), D3)) is None


def test_day_without_a_previously_seen_cluster_is_closed_after_two_days(tmp_path: Path) -> None:
    source = three_days()
    whole = source.days[D2]
    for day in (D2, D3):
        source.days[day] = dataclasses.replace(
            chunk(day),
            lines={key: figures for key, figures in chunk(day).lines.items() if key.cluster == "east"},
            capacity_seconds={"east": chunk(day).capacity_seconds["east"]},
            recorded_hours={"east": 24},
        )
    soon, later = D3 + 3 * 3600.0, D3 + 48 * 3600.0
    with DayStore(tmp_path / "store").writing(0.0) as store:
        closing = asyncio.run(close_due_days(store, source, soon, accept_gaps=True))
        assert closing.closed == (D1,)
        assert [left.waits for left in closing.left] == [True]
        assert "no hour of cluster 'west' was recorded" in closing.left[0].reason
        assert asyncio.run(close_due_days(store, source, later, accept_gaps=True)).closed == (D2, D3)
    with DayStore(tmp_path / "other").writing(0.0) as store:
        asyncio.run(close_due_days(store, source, D2 + 3 * 3600.0))
        source.days[D2] = whole
        assert asyncio.run(close_due_days(store, source, soon)).closed == (D2,)


def test_kill_at_any_moment_leaves_no_lost_duplicate_or_partial_day(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "store_support.py"), str(tmp_path), "25", "11"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["rounds"] == 25
    assert seen["days"] >= 3
    assert seen["versions"] > seen["days"], "no day was closed again"
    assert seen["problems"] == []
