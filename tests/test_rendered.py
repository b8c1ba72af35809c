import dataclasses

from exposition_support import exclusive, shared, snapshot
from prometheus_client.parser import text_string_to_metric_families

from exporter.exposition.collector import ExpositionOptions
from exporter.exposition.rendered import Renderer
from exporter.exposition.text import OPENMETRICS, PLAIN


def value_of(page: bytes, name: str) -> float:
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if sample.name == name:
                return sample.value
    raise AssertionError(name)


def test_many_scrapes_of_one_snapshot_cost_one_rendering() -> None:
    renderer = Renderer(ExpositionOptions())
    first = snapshot(exclusive())
    body = renderer.metrics(first, "")
    assert body.content_type == PLAIN
    assert renderer.metrics(first, "text/plain").plain is body.plain
    modern = renderer.metrics(first, "application/openmetrics-text;version=1.0.0")
    assert modern.content_type == OPENMETRICS
    assert modern.plain.endswith(b"# EOF\n")
    assert renderer.metrics(first, "").plain is body.plain


def test_a_new_snapshot_is_shown_at_once() -> None:
    renderer = Renderer(ExpositionOptions())
    renderer.metrics(snapshot(exclusive(), at_seconds=100.0))
    page = renderer.metrics(snapshot(exclusive(), at_seconds=101.5)).plain
    assert value_of(page, "gpu_exporter_snapshot_timestamp_seconds") == 101.5


def test_what_was_left_out_is_counted_over_all_pages() -> None:
    renderer = Renderer(ExpositionOptions(series_limit=0), list)
    for number in range(1, 4):
        page = renderer.metrics(dataclasses.replace(snapshot(shared()), taken_at_seconds=float(number))).plain
        holders, ledger = 12, 10
        assert value_of(page, "gpu_exporter_dropped_series_total") == (holders + ledger) * number


def test_memory_and_garbage_collection_of_the_process_are_on_the_page() -> None:
    page = Renderer(ExpositionOptions()).metrics(snapshot(exclusive())).plain
    assert value_of(page, "process_resident_memory_bytes") > 1_000_000
    assert value_of(page, "process_cpu_seconds_total") > 0
    assert value_of(page, "python_gc_collections_total") >= 0
    assert b"_created" not in page
