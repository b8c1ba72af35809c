import asyncio
import gc
from collections.abc import Callable
from itertools import count
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_support import Clock

from exporter.cost.dimensions import Filters, LineKey
from exporter.cost.ledger import Failure, Figures
from exporter.cost.report import FleetReport, Question, ReportLine, Trust
from exporter.cost.window import Now, Window
from exporter.errors import ConfigError, PrometheusError
from exporter.service import cache as of_readings
from exporter.service.cache import CLIENT, MOST_FIGURES, MOST_OF_ONE, Asked, Cached, Readings
from exporter.service.data import lateness
from exporter.service.parameters import BY, FILTERS, LIMIT, SHARE_IDLE, WINDOW, filter_text, filters_of, read
from exporter.service.responses import problem_document
from exporter.web import responses
from exporter.web.responses import Bodies, Body

WINDOW_NOW = Window(start_seconds=0, end_seconds=3600, label="1h")


def question(number: int = 0) -> Asked:
    return Asked("1h", Question(by=("team",), filters=Filters(wanted={"team": frozenset({str(number)})})))


def report(lines: int = 1, failed: str = "", window: Window = WINDOW_NOW) -> FleetReport:
    failures = (
        (Failure(window=window, what='workload:gpu_ledger:delta1h{quantity="cost"}', reason=failed),) if failed else ()
    )
    return FleetReport(
        window=window,
        question=Question(by=("team",)),
        held=tuple(ReportLine(key=LineKey(team=str(number)), figures=Figures()) for number in range(lines)),
        apart=(),
        total=Figures(),
        owned=Figures(),
        trust=Trust(
            capacity_seconds=0,
            missing_seconds=0,
            expected_hours=1,
            recorded_hours=1,
            activity_coverage_ratio=None,
            price_coverage_ratio=None,
            failures=failures,
        ),
        engine="",
        simulated=False,
    )


async def whole() -> FleetReport:
    return report()


async def test_old_report_is_preferred_to_a_partial_one_and_not_retried_at_once() -> None:
    clock = Clock(1000.0)
    readings = Readings(clock)
    asked = 0

    async def holes() -> FleetReport:
        nonlocal asked
        asked += 1
        return report(failed="timed out")

    await readings.get(question(), WINDOW_NOW, whole)
    readings.expire()
    for _ in range(3):
        shown = await readings.get(question(), WINDOW_NOW, holes)
        assert not shown.trust.failures
        assert "timed out" in shown.trust.notes[0]
    assert asked == 1
    clock.now += of_readings.REST_SECONDS + 1
    await readings.get(question(), WINDOW_NOW, holes)
    assert asked == 2


async def test_partial_report_is_shown_without_an_older_one() -> None:
    readings = Readings(Clock(1000.0))

    async def holes() -> FleetReport:
        return report(failed="timed out")

    assert (await readings.get(question(), WINDOW_NOW, holes)).trust.failures


async def test_report_older_than_the_limit_is_not_shown() -> None:
    clock = Clock(1000.0)
    readings = Readings(clock)

    async def whole() -> FleetReport:
        return report()

    async def fails() -> FleetReport:
        raise PrometheusError("unreachable", "gone", retriable=True)

    await readings.get(question(), WINDOW_NOW, whole)
    readings.expire()
    clock.now += of_readings.OLDEST_SECONDS + 1
    with pytest.raises(PrometheusError):
        await readings.get(question(), WINDOW_NOW, fails, "gone")


async def test_cache_is_limited_and_evicts_the_least_recently_used_report() -> None:
    readings = Readings(Clock(1000.0))

    async def large() -> FleetReport:
        return report(lines=MOST_FIGURES // 3 + 1)

    for number in range(3):
        await readings.get(question(number), WINDOW_NOW, large)
    begun = readings.begun
    await readings.get(question(2), WINDOW_NOW, large)
    assert readings.begun == begun
    await readings.get(question(0), WINDOW_NOW, large)
    assert readings.begun == begun + 1


async def test_disconnecting_client_does_not_end_the_reading_of_others() -> None:
    readings = Readings(Clock(1000.0))
    gate = asyncio.Event()

    async def slow() -> FleetReport:
        await gate.wait()
        return report()

    one = asyncio.ensure_future(readings.get(question(), WINDOW_NOW, slow))
    other = asyncio.ensure_future(readings.get(question(), WINDOW_NOW, slow))
    await asyncio.sleep(0)
    one.cancel()
    gate.set()
    assert (await other).held
    assert readings.begun == 1


async def test_partial_report_is_read_again_after_the_rest_time() -> None:
    clock = Clock(1000.0)
    readings = Readings(clock)
    failed = "timed out"

    async def read_now() -> FleetReport:
        return report(failed=failed)

    for _ in range(2):
        assert (await readings.get(question(), WINDOW_NOW, read_now)).trust.failures
    assert readings.begun == 1
    failed = ""
    clock.now += of_readings.REST_SECONDS + 1
    assert not (await readings.get(question(), WINDOW_NOW, read_now)).trust.failures


async def test_clock_set_back_does_not_prevent_a_reading() -> None:
    clock = Clock(100_000.0)
    readings = Readings(clock)

    async def dead() -> FleetReport:
        raise PrometheusError("timeout", "it timed out", retriable=True)

    await readings.get(question(), WINDOW_NOW, whole)
    readings.expire()
    assert (await readings.get(question(), WINDOW_NOW, dead)).trust.notes
    clock.now -= 50_000
    assert not (await readings.get(question(), WINDOW_NOW, whole)).trust.notes


async def test_number_of_remembered_empty_and_failed_queries_is_limited() -> None:
    readings = Readings(Clock(1000.0))

    async def empty() -> FleetReport:
        return report(lines=0)

    async def dead() -> FleetReport:
        raise PrometheusError("down", "it is down", retriable=True)

    for number in range(2 * MOST_FIGURES // 300):
        await readings.get(question(number), WINDOW_NOW, empty)
        with pytest.raises(PrometheusError):
            await readings.get(question(-1 - number), WINDOW_NOW, dead)
    assert len(readings._kept) <= MOST_FIGURES // 300


async def test_only_recently_viewed_reports_are_refreshed() -> None:
    clock = Clock(1000.0)
    readings = Readings(clock)

    async def read() -> FleetReport:
        return report(lines=1)

    for number in (1, 2):
        readings.look(question(number))
        await readings.get(question(number), WINDOW_NOW, read)
        clock.now += 100.0
    readings.expire()
    await readings.get(question(1), WINDOW_NOW, read)  # by itself: there was no request for it
    assert readings.lately(1050.0) == (question(2),)
    assert readings.lately(0.0) == (question(1), question(2))


async def test_cached_value_stays_due_after_a_reading_that_was_cancelled() -> None:
    gate = asyncio.Event()
    cached = counted(gate)
    reading = asyncio.ensure_future(cached.refresh(1.0))
    await asyncio.sleep(0)
    reading.cancel()
    gate.set()
    await cached.refresh(2.0)
    assert cached.value == 2
    assert not cached.is_due(3.0)


async def test_cached_value_that_expires_during_its_reading_is_read_again() -> None:
    gate = asyncio.Event()
    cached = counted(gate)
    reading = asyncio.ensure_future(cached.refresh(1.0))
    await asyncio.sleep(0)
    cached.expire()
    gate.set()
    await reading
    assert cached.is_due(2.0)
    await asyncio.gather(cached.refresh(2.0), cached.refresh(2.0))
    assert cached.value == 2


def counted(gate: asyncio.Event) -> Cached[int]:
    """Return a cached number of its readings, each of which waits at a gate."""
    numbers = count(1)

    async def read(_now: float) -> int:
        number = next(numbers)
        await gate.wait()
        return number

    return Cached(read=read, value=0)


def plain(content: bytes) -> Callable[[], Body]:
    return lambda: Body(content, "text/plain")


async def test_cached_body_does_not_keep_its_report_alive() -> None:
    bodies, one = Bodies(), report()
    alive = ref(one)
    await bodies.of_thread(one, "json", plain(b"{}"))
    del one
    gc.collect()
    assert alive() is None
    assert (await bodies.of_thread(report(), "json", plain(b"again"))).plain == b"again"


async def test_report_is_rendered_once_per_format() -> None:
    bodies = Bodies()
    written: list[str] = []

    def writer(form: str) -> Callable[[], Body]:
        def write() -> Body:
            written.append(form)
            return Body(form.encode(), "text/plain")

        return write

    one, other = report(), report(lines=2)
    for form in ("csv", "csv", "json"):
        assert (await bodies.of_thread(one, form, writer(form))).plain == form.encode()
    assert bodies.of(other, "csv", writer("another")).plain == b"another"
    assert written == ["csv", "json", "another"]


def test_body_cache_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "KEPT_BYTES", 10)
    bodies = Bodies()
    one, other = report(), report(lines=2)
    assert bodies.of(one, "csv", plain(b"x" * 6)).plain == b"x" * 6
    assert bodies.of(other, "csv", plain(b"y" * 6)).plain == b"y" * 6
    assert bodies.of(one, "csv", plain(b"again")).plain == b"again"
    assert bodies.of(one, "large", plain(b"z" * 11)).plain == b"z" * 11


@given(st.lists(st.text(st.sampled_from("ab\\, é") | st.characters(exclude_categories=["Cs"])), min_size=1, max_size=4))
def test_filter_text_of_any_value_is_parsed_back(values: list[str]) -> None:
    escaped = [filter_text(value) for value in values]
    together = read(FILTERS, [("filter.team", ",".join(escaped))], Now(0.0))
    apart = read(FILTERS, [("filter.team", value) for value in escaped], Now(0.0))
    assert filters_of(together) == filters_of(apart) == Filters(wanted={"team": frozenset(values)})


@given(
    st.lists(st.tuples(st.sampled_from(["window", "by", "limit", "shareIdle", "x"]), st.text(max_size=30)), max_size=5)
)
def test_arbitrary_parameters_are_parsed_or_reported(pairs: list[tuple[str, str]]) -> None:
    try:
        read((WINDOW, BY, LIMIT, SHARE_IDLE), pairs, Now(1_790_000_000.0))
    except ConfigError as error:
        for problem in problem_document(error.problems, 400).problems:
            assert problem["error"]
            assert problem["error"].isprintable()


def test_parameter_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="window: is given 2 times; allowed: once"):
        read([WINDOW, BY], [("window", "1h"), ("window", "2h")], Now(1_790_000_000.0))


def test_number_of_reported_unknown_parameters_is_limited() -> None:
    pairs = [(f"wi{number}", "x") for number in range(1000)] * 2
    with pytest.raises(ConfigError) as reported:
        read([WINDOW, BY, *FILTERS], pairs, Now(0.0))
    assert len(reported.value.problems) == 21
    assert reported.value.problems[0].startswith("wi0: unknown parameter; ")
    assert reported.value.problems[-1] == "980 more unknown parameters"


async def test_client_with_many_queries_leaves_slots_for_others() -> None:
    readings, gate = Readings(Clock(1000.0)), asyncio.Event()

    async def answer() -> FleetReport:
        await gate.wait()
        return report()

    def ask(client: str, number: int) -> asyncio.Task[FleetReport]:
        before = CLIENT.set(client)
        task = asyncio.ensure_future(readings.get(question(number), WINDOW_NOW, answer))
        CLIENT.reset(before)
        return task

    waiting = [ask("a", number) for number in range(MOST_OF_ONE)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(5):
        with pytest.raises(PrometheusError, match="too many reports are being read now"):
            await ask("a", MOST_OF_ONE)
    waiting.append(ask("b", MOST_OF_ONE + 1))
    await asyncio.sleep(0.01)
    gate.set()
    assert len(await asyncio.gather(*waiting)) == MOST_OF_ONE + 1


def test_stopped_recording_is_reported_with_the_fix() -> None:
    hour, hours = 3600.0, 1000 * 3600.0
    assert lateness(hours, hours + 2 * hour) == ""
    assert "no hour after 1970-02-11 16:00 UTC was recorded" in lateness(hours, hours + 3 * hour)
    assert "load rules/prometheus-rules.yaml" in lateness(None, hours)
