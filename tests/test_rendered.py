import asyncio
import dataclasses
import gzip
import random
import tracemalloc

import aiohttp
from aiohttp import web
from exposition_support import FACTS, exclusive, holder, ledger, lost, one_ledger, partitioned, shared, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from page_support import changed, duplicate_series
from prometheus_client.parser import text_string_to_metric_families

from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import OPENMETRICS, PLAIN, Dropped, Family, render
from exporter.model.attribution import PodFacts, ShareMode
from exporter.model.fields import Field
from exporter.model.ledger import ByState, Totals
from exporter.model.snapshot import Activity, ActivitySource, DeviceView, PodUse, Snapshot
from exporter.web.responses import Body
from exporter.web.server import NodeSite, Renderer

MODERN = "application/openmetrics-text;version=1.0.0"


def value_of(page: bytes, name: str) -> float:
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if sample.name == name:
                return sample.value
    raise AssertionError(name)


def test_scrapes_of_one_snapshot_share_one_rendering() -> None:
    renderer = Renderer(ExpositionOptions())
    first = snapshot(exclusive())
    body = renderer.metrics(first, "")
    assert body.content_type == PLAIN
    assert renderer.metrics(first, "text/plain").plain is body.plain
    modern = renderer.metrics(first, "application/openmetrics-text;version=1.0.0")
    assert modern.content_type == OPENMETRICS
    assert modern.plain.endswith(b"# EOF\n")
    assert renderer.metrics(first, "").plain is body.plain
    assert body.packed() is renderer.metrics(first, "").packed()
    assert gzip.decompress(body.packed() or b"") == body.plain


async def test_fifty_concurrent_scrapers_share_one_rendering_and_compression() -> None:
    made: list[int] = []
    bodies: list[Body] = []

    def nothing() -> list[Family]:
        made.append(1)
        return []

    class Recording(Renderer):
        def metrics(self, snapshot: Snapshot | None, accept: str = "") -> Body:
            bodies.append(super().metrics(snapshot, accept))
            return bodies[-1]

    renderer, one = Recording(ExpositionOptions(), nothing), snapshot()
    site = NodeSite(snapshot=lambda: one, renderer=renderer, release=lambda _: None)
    runner = web.AppRunner(site.app(), access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
        async with aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=50)) as session:

            async def scrape(number: int) -> bytes:
                headers = {"Accept": MODERN if number % 2 else "", "Accept-Encoding": "gzip"}
                async with session.get(url, headers=headers) as response:
                    return await response.read()

            answers = await asyncio.gather(*(scrape(number) for number in range(50)))
    finally:
        await runner.cleanup()
    assert len(answers) == len(bodies) == 50
    assert len(made) == 1, "the page is built once"
    assert len({id(body) for body in bodies}) == len({id(body.packed()) for body in bodies}) == 2, (
        "one body of each format"
    )
    plain = renderer.metrics(one).plain
    assert {gzip.decompress(answer) for answer in answers} == {plain, renderer.metrics(one, MODERN).plain}


RATIOS = (0.0, 0.25, 0.8732, 1.0)
COUNTS = (0, 1, 8_123_456_789, 1.0, 1_234_567.5)
DEVICES: tuple[tuple[DeviceView, ...], ...] = ((exclusive(),), (shared(),), partitioned(), (lost(),))


def made_up(seed: int) -> Snapshot:
    """Return a random node: devices, holders, labels, values and ledger can all differ from a moment before."""
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    views = []
    for view in [view for views in DEVICES if chance.random() < 0.7 for view in views]:
        measured = {
            Field.TOTAL_ENERGY_CONSUMPTION: chance.choice(COUNTS),
            Field.PROF_GR_ENGINE_ACTIVE: chance.choice(RATIOS),
        }
        pods = tuple(_another(use, chance.choice("ab"), chance.choice(RATIOS)) for use in view.pods)
        some = pods[chance.randrange(2) :]
        views.append(dataclasses.replace(view, values={**view.values, **measured}, pods=some))
    at_seconds = float(chance.randrange(3))
    reported = ledger(at_seconds)
    money = ByState(unprofiled=chance.choice(RATIOS), idle=chance.choice(RATIOS))
    paid = Totals(seconds=ByState(unprofiled=chance.choice(COUNTS)), money={"USD": money})
    version = chance.choice(("580.65.06", "590.1", None))
    books = dataclasses.replace(
        reported,
        ledgers=one_ledger(
            {account: chance.choice((paid, totals)) for account, totals in reported.accounts.items()},
            identity=chance.choice(("0123456789ab", "ba9876543210")),
        ),
        pods={pod: totals for pod, totals in reported.pods.items() if chance.random() < 0.7},
    )
    return changed(
        snapshot(at_seconds=at_seconds),
        devices=tuple(views),
        reading={"driver_version": version},
        metering={"ledger": books},
        errors={("attribution", reason): 3 for reason in "abc" if chance.random() < 0.5},
    )


def _another(use: PodUse, pod: str, ratio: float) -> PodUse:
    facts = dataclasses.replace(FACTS, exported=(("label_app", pod),)) if ratio else None
    activity = Activity(ratio=ratio, source=ActivitySource.ENGINE) if ratio < 1 else None
    named = dataclasses.replace(use.holder, pod=f"{use.holder.pod}-{pod}")
    return dataclasses.replace(use, holder=named, activity=activity, age_seconds=ratio * 1e7, facts=facts)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 9999), min_size=2, max_size=5))
def test_cached_rendering_equals_a_fresh_rendering(seeds: list[int]) -> None:
    options = ExpositionOptions()
    renderer, dropped = Renderer(options, list), Dropped()
    for one in map(made_up, seeds):
        shown = families(one, options, dropped)
        assert renderer.metrics(one).plain == render(shown, openmetrics=False)
        assert renderer.metrics(one, MODERN).plain == render(shown, openmetrics=True)
        assert not duplicate_series(shown)


def test_kept_text_of_pods_is_bounded() -> None:
    renderer, device = Renderer(ExpositionOptions(), list), shared()

    def long_words(pod: str) -> PodFacts:
        return dataclasses.replace(FACTS, exported=(("label_says", pod + "x" * 600),))

    def some_pages(first: int) -> int:
        for page in range(first, first + 45):
            holders = [holder(f"job-{page}-{number}", device.gpu.uuid, ShareMode.SHARED) for number in range(20)]
            uses = tuple(PodUse(holder=one, age_seconds=1.0, facts=long_words(one.pod)) for one in holders)
            one = snapshot(dataclasses.replace(device, pods=uses), at_seconds=float(page))
            renderer.metrics(one).packed()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = [some_pages(first) for first in (0, 1000)][-1]
        after = some_pages(2000)
    finally:
        tracemalloc.stop()
    # The objects for the pods of 45 pages take three times as much.
    assert after - before < 500_000


def test_a_new_snapshot_is_shown_at_once() -> None:
    renderer = Renderer(ExpositionOptions())
    renderer.metrics(snapshot(exclusive(), at_seconds=100.0))
    page = renderer.metrics(snapshot(exclusive(), at_seconds=101.5)).plain
    assert value_of(page, "gpu_exporter_snapshot_timestamp_seconds") == 101.5


def test_dropped_series_are_counted_over_all_pages() -> None:
    renderer = Renderer(ExpositionOptions(series_limit=0), list)
    for number in range(1, 4):
        page = renderer.metrics(dataclasses.replace(snapshot(shared()), taken_at_seconds=float(number))).plain
        holders, ledger = 12, 10
        assert value_of(page, "gpu_exporter_dropped_series_total") == (holders + ledger) * number


def test_process_memory_and_garbage_collection_are_exported() -> None:
    page = Renderer(ExpositionOptions()).metrics(snapshot(exclusive())).plain
    assert value_of(page, "process_resident_memory_bytes") > 1_000_000
    assert value_of(page, "process_cpu_seconds_total") > 0
    assert value_of(page, "python_gc_collections_total") >= 0
    assert b"_created " not in page
    assert b"_created{" not in page
