import asyncio
import dataclasses
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_support import D1, D2, D3, FACTS, NOW, Known, assert_lines, chunk, day_ledger, same, summed

from exporter.cost import store_file
from exporter.cost.dimensions import Dimension, Filters, LineKey
from exporter.cost.ledger import Chunk, Failure, Figures
from exporter.cost.store import ALL_OF_A_DAY, DayStore, day_window
from exporter.cost.store_ledger import StoreLedger
from exporter.cost.window import DAY_SECONDS, Window
from exporter.errors import PrometheusError, StoreError
from exporter.model.ledger import ByState

FIXTURES = Path(__file__).resolve().parent / "fixtures"
WHOLE = Window(start_seconds=D1, end_seconds=D3, label="2d")


@contextmanager
def closed(path: Path, *days: Chunk) -> Iterator[DayStore]:
    with DayStore(path).writing(NOW) as store:
        for day in days:
            store.close_day(day_ledger(day), now=NOW, by="ann@host")
        yield store


def close_days(path: Path, *days: Chunk) -> DayStore:
    with closed(path, *days) as store:
        return store


def use(path: Path, *, write: bool) -> None:
    if write:
        close_days(path)
    else:
        DayStore(path).closed_days()


def test_closed_day_is_read_unchanged(tmp_path: Path) -> None:
    days = [chunk(D1), chunk(D2)]
    with closed(tmp_path / "store", *days) as store:
        ledger = asyncio.run(StoreLedger(store).ledger(WHOLE, ALL_OF_A_DAY))
    assert ledger.failures == ()
    for found, day in zip(ledger.chunks, days, strict=True):
        assert (found.window, found.closed) == (day.window, True)
        assert (found.capacity_seconds, found.recorded_hours) == (day.capacity_seconds, day.recorded_hours)
        assert dict(found.lines) == dict(day.lines)
    assert ledger.nodes[("west", "node-2")] == FACTS
    assert (ledger.engine, ledger.simulated) == ("store of closed days", False)


def test_cost_and_energy_of_a_line_without_seconds_are_stored(tmp_path: Path) -> None:
    """Such lines come from processes without a pod on a held GPU: their energy is paid, the time is the pod's."""
    held = LineKey(namespace="ml", kind="Job", workload="w", model="H100", mode="exclusive")
    nobody = LineKey(kind="Unattributed", model="H100", mode="exclusive")
    other_model = nobody._replace(model="T4")
    lines = {
        held: Figures(seconds=ByState(unprofiled=86_400.0), energy_joules=1e7, money={"USD": ByState(unprofiled=10.0)}),
        nobody: Figures(energy_joules=4.32e7, money={"USD": ByState(unprofiled=1.44)}),
        other_model: Figures(energy_joules=5.0),
    }
    day = Chunk(
        window=day_window(D1),
        lines={**lines, held._replace(workload="gone"): Figures(money={"USD": ByState()})},
        capacity_seconds={"": 86_400.0},
        recorded_hours={"": 24},
    )
    with closed(tmp_path / "store", day) as store:
        found = asyncio.run(StoreLedger(store).ledger(day_window(D1), ALL_OF_A_DAY)).chunks[0].lines
        by_kind = asyncio.run(StoreLedger(store).ledger(day_window(D1), frozenset({"kind"}))).chunks[0].lines
        assert store.check() == ()
        assert store.restatements(D1)[0].lines == 3, "a line without any value is not kept"
    assert found == lines
    assert (by_kind[LineKey(kind="Unattributed")].money, len(by_kind)) == ({"USD": ByState(unprofiled=1.44)}, 2)


@given(
    dimensions=st.frozensets(st.sampled_from(sorted(ALL_OF_A_DAY))),
    wanted=st.fixed_dictionaries(
        {},
        optional={
            "cluster": st.just(frozenset({"east"})),
            "namespace": st.sampled_from((frozenset({"ns-1"}), frozenset({"ns-0", "ns-2", "x' OR 1=1 --"}))),
            "kind": st.just(frozenset({"Job", "Unallocated"})),
            "team": st.just(frozenset({"", "red"})),
            "pool": st.just(frozenset({"p1 on-demand"})),
            "label:project": st.sampled_from((frozenset({"llm"}), frozenset({"", "ads"}))),
        },
    ),
)
@settings(max_examples=60, deadline=None)
def test_sums_by_any_dimensions_and_filters_match_the_lines(
    tmp_path_factory: pytest.TempPathFactory,
    dimensions: frozenset[Dimension],
    wanted: dict[Dimension, frozenset[str]],
) -> None:
    path = tmp_path_factory.getbasetemp() / "sums"
    if not path.exists():
        close_days(path, chunk(D1), chunk(D2))
    filters = Filters(wanted=wanted)
    ledger = asyncio.run(StoreLedger(DayStore(path)).ledger(WHOLE, dimensions, filters))
    for found, day in zip(ledger.chunks, (chunk(D1), chunk(D2)), strict=True):
        assert_lines(found.lines, summed(day.lines, dimensions, filters))
        assert found.capacity_seconds == day.capacity_seconds


def test_labels_of_any_text_round_trip(tmp_path: Path) -> None:
    odd = ("'; DROP TABLE lines; --", 'a"b\n\\', "\u202eabc", "日本", "\x00", "=1+1", " ")
    lines = {
        LineKey(namespace=text, kind="Job", workload=text): Figures(seconds=ByState(unprofiled=1.0)) for text in odd
    }
    day = Chunk(window=day_window(D1), lines=lines, capacity_seconds={"": 7.0}, recorded_hours={"": 24})
    with closed(tmp_path / "it's a #store?", day) as store:
        window = day_window(D1)
        wanted = Filters(wanted={"namespace": frozenset({odd[0]})})
        assert asyncio.run(StoreLedger(store).ledger(window, ALL_OF_A_DAY)).chunks[0].lines == lines
        one = asyncio.run(StoreLedger(store).ledger(window, frozenset({"namespace"}), wanted)).chunks[0].lines
    assert list(one) == [LineKey(namespace=odd[0])]


def test_invalid_unicode_is_refused_and_the_day_stays_open(tmp_path: Path) -> None:
    day = chunk(D1)
    bad = dataclasses.replace(day, lines={**day.lines, LineKey(namespace="\ud800"): Figures(seconds=ByState(idle=1.0))})
    with DayStore(tmp_path / "store").writing(0.0) as store:
        with pytest.raises(StoreError, match="no valid Unicode"):
            store.close_day(day_ledger(bad), now=NOW)
        assert (store.closed_days(), store.check()) == ((), ())


def test_closed_day_is_reopened_only_with_a_reason(tmp_path: Path) -> None:
    with closed(tmp_path / "store", chunk(D1)) as store:
        with pytest.raises(StoreError, match="2026-09-04 is closed: reopen it with a reason"):
            store.close_day(day_ledger(chunk(D1, seed=1)), now=NOW)
        with pytest.raises(StoreError, match="give a reason"):
            store.reopen(D1, reason=" ", by="ann", now=NOW)
        with pytest.raises(StoreError, match="2026-09-05 is not closed"):
            store.reopen(D2, reason="late data", by="ann", now=NOW)
        store.reopen(D1, reason="late data", by="ann", now=NOW)
        (day,) = store.closed_days()
        assert (day.version, day.reopened) == (1, "late data")
        before = asyncio.run(StoreLedger(store).ledger(day_window(D1), ALL_OF_A_DAY)).chunks[0].lines
        assert before == chunk(D1).lines, "until the next close, the present version is valid"
        assert store.close_day(day_ledger(chunk(D1, seed=1)), now=NOW + 60, by="bob") == 2
        (day,) = store.closed_days()
        assert (day.version, day.reopened) == (2, "")
        after = asyncio.run(StoreLedger(store).ledger(day_window(D1), ALL_OF_A_DAY)).chunks[0].lines
        assert after == chunk(D1, seed=1).lines


def test_every_version_of_a_day_keeps_its_time_author_and_reason(tmp_path: Path) -> None:
    with closed(tmp_path / "store", chunk(D1)) as store:
        store.close_day(day_ledger(chunk(D1, seed=1), simulated=True), now=NOW + 60, by="bob", reason="wrong price")
        first, second = store.restatements(D1)
        assert store.restatements(D2) == ()
        assert [day.simulated for day in store.closed_days()] == [True]
    assert (first.closed_at_seconds, first.closed_by, first.reason) == (NOW, "ann@host", "")
    assert (second.number, second.closed_by, second.reason) == (2, "bob", "wrong price")
    for version, day in ((first, chunk(D1)), (second, chunk(D1, seed=1))):
        assert same(version.figures, next(iter(summed_all(day).values())))
        assert (version.lines, version.recorded_hours) == (len(day.lines), day.recorded_hours)


def summed_all(day: Chunk) -> dict[LineKey, Figures]:
    return summed({LineKey(node=str(n)): line for n, line in enumerate(day.lines.values())}, frozenset())


@pytest.mark.parametrize(
    ("hours", "problem"),
    [(23, "23 of its 24 hours of cluster 'east' were recorded"), (0, "there is nothing to close")],
)
def test_day_with_gaps_is_not_closed_by_default(tmp_path: Path, hours: int, problem: str) -> None:
    with DayStore(tmp_path / "store").writing(0.0) as store, pytest.raises(StoreError, match=problem):
        store.close_day(day_ledger(chunk(D1, hours=hours)), now=NOW, accept_gaps=not hours)


def test_accepted_gaps_stay_visible(tmp_path: Path) -> None:
    with DayStore(tmp_path / "store").writing(0.0) as store:
        store.close_day(day_ledger(chunk(D1, hours=23)), now=NOW, accept_gaps=True)
        (day,) = store.closed_days()
        ledger = asyncio.run(StoreLedger(store).ledger(day_window(D1), frozenset()))
    assert day.recorded_hours == 23
    assert ledger.chunks[0].recorded_hours == {"east": 23, "west": 23}
    assert ledger.notes == tuple(
        f"cluster {name}: 1 hour was not recorded: 2026-09-04 (1)" for name in ("east", "west")
    ), "as in a report from Prometheus"


def test_reopened_day_is_not_replaced_by_fewer_hours(tmp_path: Path) -> None:
    with closed(tmp_path / "store", chunk(D1)) as store:
        store.reopen(D1, reason="late data", by="ann", now=NOW)
        with pytest.raises(StoreError, match="23 hours of cluster 'east' are there now, the closed day has 24"):
            store.close_day(day_ledger(chunk(D1, hours=23)), now=NOW, accept_gaps=True)
        assert store.close_day(day_ledger(chunk(D1, hours=23)), now=NOW, accept_gaps=True, accept_less=True) == 2


def test_incomplete_or_unfinished_day_is_refused(tmp_path: Path) -> None:
    day = day_ledger(chunk(D1))
    failure = Failure(window=day.window, what='workload:gpu_ledger:delta1h{quantity="cost"}', reason="no answer")
    half = Window(start_seconds=D1, end_seconds=D1 + 3600)
    with DayStore(tmp_path / "store").writing(0.0) as store:
        with pytest.raises(StoreError, match="only whole UTC days"):
            store.close_day(dataclasses.replace(day, window=half), now=NOW)
        with pytest.raises(StoreError, match="only whole UTC days"):
            store.close_day(dataclasses.replace(day, dimensions=frozenset()), now=NOW)
        with pytest.raises(StoreError, match="is not over, or the clock is wrong"):
            store.close_day(day, now=D2 - 1.0)
        with pytest.raises(StoreError, match="1 queries failed, first workload:gpu_ledger:delta1h"):
            store.close_day(dataclasses.replace(day, failures=(failure,)), now=NOW)
        assert store.closed_days() == ()


def test_clock_set_back_closes_nothing(tmp_path: Path) -> None:
    with closed(tmp_path / "store", chunk(D1)) as store, pytest.raises(StoreError, match="set the clock"):
        store.close_day(day_ledger(chunk(D2)), now=NOW - 7200)


def test_second_writer_is_refused_with_the_process_and_readers_do_not_wait(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with closed(path, chunk(D1)):
        with pytest.raises(StoreError, match=f"is being written by process {os.getpid()} on .* since 2026-09-07T05"):
            use(path, write=True)
        with store_file.changing(path):  # a transaction in progress
            assert len(DayStore(path).closed_days()) == 1
    use(path, write=True)


def test_concurrent_readers_see_whole_days_during_writes(tmp_path: Path) -> None:
    path = tmp_path / "store"
    versions = {tuple(sorted(chunk(D1, seed=seed).lines)): chunk(D1, seed=seed) for seed in range(8)}
    problems: list[str] = []
    done = False

    def read() -> None:
        while not done:
            found = asyncio.run(StoreLedger(DayStore(path)).ledger(day_window(D1), ALL_OF_A_DAY)).chunks[0]
            truth = versions.get(tuple(sorted(found.lines)))
            if truth is None or truth.lines != found.lines or truth.capacity_seconds != found.capacity_seconds:
                problems.append("a mixture of versions")

    with closed(path, chunk(D1)) as store:
        threads = [Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for seed in range(1, 8):
            store.close_day(day_ledger(chunk(D1, seed=seed)), now=NOW, reason="again")
        done = True
        for thread in threads:
            thread.join()
    assert problems == []


def test_days_older_than_the_retention_are_deleted(tmp_path: Path) -> None:
    with closed(tmp_path / "store", chunk(D1), chunk(D2), chunk(D3)) as store:
        store.close_day(day_ledger(chunk(D1, seed=5)), now=NOW, reason="again")
        store.forget(D3)
        store.shrink()
        assert [day.window.start_seconds for day in store.closed_days()] == [D3]
        assert (store.restatements(D1), store.check()) == ((), ())
        ledger = asyncio.run(StoreLedger(store).ledger(day_window(D3), ALL_OF_A_DAY))
        assert ledger.chunks[0].lines == chunk(D3).lines
        store.close_day(day_ledger(chunk(D1)), now=NOW)
        assert len(store.closed_days()) == 2


def test_file_that_is_no_store_is_refused_and_unchanged(tmp_path: Path) -> None:
    notes, other, nameless = tmp_path / "notes.txt", tmp_path / "other.db", tmp_path / "nameless.db"
    notes.write_text("my notes\n" * 100)
    for path, number in ((other, 42), (nameless, 0)):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA application_id = {number}")
            connection.execute("CREATE TABLE t (a)")
    of_another = "another program's database"
    for path, words in ((notes, "no store and no database"), (other, of_another), (nameless, of_another)):
        content = path.read_bytes()
        for write in (False, True):
            with pytest.raises(StoreError, match=words):
                use(path, write=write)
        assert path.read_bytes() == content
    for write in (False, True):
        with pytest.raises(StoreError, match="is a directory; name a file"):
            use(tmp_path, write=write)


def test_missing_store_reports_how_to_create_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"there is no .*/store; make it with: gpu-cost-exporter store backfill"):
        use(tmp_path / "store", write=False)
    with pytest.raises(StoreError, match="see that the directory is there"):
        use(tmp_path / "none" / "store", write=True)


def test_a_damaged_store_is_set_aside_and_a_new_one_can_be_started(tmp_path: Path) -> None:
    path = tmp_path / "store"
    close_days(path, chunk(D1))
    content = bytearray(path.read_bytes())
    content[5000:9000] = b"\xff" * 4000
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"is damaged \(.*\); kept as store.damaged-1. Put a backup in its place"):
        use(path, write=True)
    assert (tmp_path / "store.damaged-1").read_bytes() == content
    with DayStore(path).writing(0.0) as store:
        assert store.closed_days() == ()


def test_check_reports_a_missing_line(tmp_path: Path) -> None:
    path = tmp_path / "store"
    close_days(path, chunk(D1))
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM lines WHERE idle = (SELECT max(idle) FROM lines)")
    connection.close()
    (problem,) = DayStore(path).check()
    assert problem.startswith("2026-09-04, version 1: ")


def test_newer_store_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "store"
    close_days(path, chunk(D1))
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    for write in (False, True):
        with pytest.raises(StoreError, match="is of version 99, this program knows 3: use the program that wrote it"):
            use(path, write=write)


def test_a_store_without_labels_is_refused_to_readers_and_upgraded_by_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    with monkeypatch.context() as older:
        older.setattr(store_file, "STEPS", store_file.STEPS[:1])
        use(path, write=True)
        with store_file.changing(path) as connection:
            connection.execute("INSERT INTO owners VALUES (7, 'ml', 'Job', 'train', 'red')")
    with pytest.raises(
        StoreError, match=r"is of version 1, this program reads 3; bring it there with: .* store vacuum"
    ):
        use(path, write=False)
    close_days(path, chunk(D1))
    with sqlite3.connect(path) as changed:
        assert changed.execute("SELECT * FROM owners WHERE id = 7").fetchall() == [(7, "ml", "Job", "train", "red", "")]
        assert changed.execute("PRAGMA foreign_key_check").fetchall() == []
    changed.close()


def test_older_store_is_upgraded_to_the_newest_version_or_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "store"
    close_days(path, chunk(D1))
    steps = store_file.STEPS
    with monkeypatch.context() as broken:
        broken.setattr(store_file, "STEPS", (*steps, "CREATE TABLE later (a INTEGER); INSERT INTO nowhere VALUES (1)"))
        with pytest.raises(StoreError, match="nowhere"):
            use(path, write=True)
    assert len(DayStore(path).closed_days()) == 1
    monkeypatch.setattr(store_file, "STEPS", (*steps, "ALTER TABLE versions ADD COLUMN later INTEGER"))
    use(path, write=True)
    with store_file.reading(path) as connection:
        assert connection.execute("SELECT number, later FROM versions").fetchall() == [(1, None)]
        assert connection.execute("PRAGMA user_version").fetchone() == (len(steps) + 1,)


def test_first_version_store_is_still_readable(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript((FIXTURES / "store-1.sql").read_text())
    with DayStore(path).writing(0.0) as store:
        assert [(day.window.start_seconds, day.version, day.reopened) for day in store.closed_days()] == [
            (D1, 2, ""),
            (D2, 1, "late hours"),
        ]
        assert [(v.number, v.closed_by, v.reason) for v in store.restatements(D1)] == [
            (1, "ann@host", ""),
            (2, "bob@host", "late prices"),
        ]
        found = asyncio.run(StoreLedger(store).ledger(WHOLE, ALL_OF_A_DAY)).chunks
        assert [len(day.lines) for day in found] == [8, 6]
        for day in found:
            seconds = sum(line.seconds.total for line in day.lines.values())
            assert seconds == pytest.approx(sum(day.capacity_seconds.values()), rel=1e-12)
            assert {line.seconds.effective_ratio for line in day.lines.values()} == {None}
            assert sum(line.seconds.unprofiled for line in day.lines.values()) > 0
        assert {code for line in found[0].lines.values() for code in line.money} == {"EUR", "USD"}
        assert store.check() == ()


def test_combined_ledger_reads_closed_days_from_the_store_others_from_prometheus(tmp_path: Path) -> None:
    changed = Known({D1: chunk(D1, seed=9), D2: chunk(D2), D3: chunk(D3)})
    with closed(tmp_path / "store", chunk(D1), chunk(D3)) as store:
        combined = StoreLedger(store, changed)
        window = Window(start_seconds=D1, end_seconds=D3 + DAY_SECONDS + 3600, label="4d")
        ledger = asyncio.run(combined.ledger(window, frozenset({"namespace"})))
    assert [(c.window.start_seconds, c.closed) for c in ledger.chunks] == [
        (D1, True),
        (D2, False),
        (D3, True),
        (D3 + DAY_SECONDS, False),
    ]
    assert [(w.start_seconds, w.hours) for w in changed.asked] == [(D2, 24), (D3 + DAY_SECONDS, 1)]
    assert_lines(ledger.chunks[0].lines, summed(chunk(D1).lines, frozenset({"namespace"})))
    assert ledger.engine == "store of closed days, Prometheus 2.42.0"
    assert (ledger.window, ledger.failures) == (window, ())


def test_closed_days_are_read_and_others_reported_while_prometheus_is_down(tmp_path: Path) -> None:
    down = Known({}, down=True)
    with closed(tmp_path / "store", chunk(D1)) as store:
        combined = StoreLedger(store, down)
        ledger = asyncio.run(combined.ledger(WHOLE, frozenset()))
        with pytest.raises(PrometheusError):
            asyncio.run(combined.ledger(day_window(D2), frozenset()))
    assert [c.window.start_seconds for c in ledger.chunks] == [D1]
    assert [(f.window.start_seconds, f.reason) for f in ledger.failures] == [
        (D2, "prometheus: cannot connect; start it")
    ]


def test_store_alone_reports_its_missing_days(tmp_path: Path) -> None:
    with closed(tmp_path / "store", chunk(D1)) as store:
        window = Window(start_seconds=D1, end_seconds=D2 + 3600)
        ledger = asyncio.run(StoreLedger(store).ledger(window, frozenset()))
    assert "whole UTC days only" in ledger.failures[0].reason
    assert len(ledger.chunks) == 1


def test_reading_works_while_another_process_writes(tmp_path: Path) -> None:
    path = tmp_path / "store"
    close_days(path, chunk(D1))
    code = (
        "import sys; from pathlib import Path; from exporter.cost.store import DayStore;"
        "print(len(DayStore(Path(sys.argv[1])).closed_days()))"
    )
    with DayStore(path).writing(0.0):
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
