import math
import re
import shutil
import subprocess
from collections.abc import Iterable

import pytest
from exposition_support import snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from page_support import pairs, samples_of
from prometheus_client import core
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as modern
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from prometheus_client.registry import Collector

from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.collectors_file import default
from exporter.metrics.text_format import Family, Kept, Kind, labels, negotiate, number, render

SCRAPE_OF_PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
SCRAPE_OF_PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;"
    "version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)


class Fixed(Collector):
    """A registry of prometheus_client with the given families."""

    def __init__(self, metrics: list[core.Metric]) -> None:
        self.metrics = metrics

    def collect(self) -> Iterable[core.Metric]:
        return self.metrics


Drawn = list[tuple[str, Kind, str, list[tuple[dict[str, str], float]]]]
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,12}[a-z0-9]", fullmatch=True).filter(
    lambda name: not name.endswith(("_total", "_created", "_info", "_bucket", "_count", "_sum", "_gsum", "_gcount"))
)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)
ODD = st.sampled_from((0.0, -0.0, 5e-324, 2.2e-308, 1e-7, 0.1, 1.0, 999_999.9, 1e6, 1234567.25, 1e15, 1e16, 1.5e300))
SMALL = st.sampled_from((0, 1, -1, 2, True, 1 << 62, 0.5, 0.25))
EXTREMES = st.sampled_from((math.inf, -math.inf, math.nan, -1.5, -1e6, -1e-320))
FAMILIES = st.lists(
    st.tuples(
        NAMES,
        st.sampled_from(Kind).filter(lambda kind: kind is not Kind.LABEL),
        TEXTS,
        st.lists(
            st.tuples(st.dictionaries(NAMES, TEXTS, max_size=3), st.floats(min_value=0, allow_infinity=False) | ODD),
            min_size=1,
            max_size=4,
            unique_by=lambda sample: tuple(sorted(sample[0].items())),
        ),
    ),
    max_size=4,
    unique_by=lambda family: family[0],
)


def ours_and_theirs(drawn: Drawn) -> tuple[list[Family], Fixed]:
    ours, theirs = [], []
    for name, kind, text, samples in drawn:
        full = f"{name}_total" if kind is Kind.COUNTER else name
        rows = {labels(*sorted(carried.items())): value for carried, value in samples}
        ours.append(Family(name=full, kind=kind, help=text, values=rows))
        metric = core.Metric(name, text, kind)
        for carried, value in samples:
            metric.add_sample(full, carried, value)
        theirs.append(metric)
    return ours, Fixed(theirs)


@given(FAMILIES)
def test_both_formats_match_prometheus_client_byte_for_byte(drawn: Drawn) -> None:
    ours, theirs = ours_and_theirs(drawn)
    assert render(ours, openmetrics=False) == generate_latest(theirs)
    assert render(ours, openmetrics=True) == modern(theirs)


@given(
    st.sampled_from(Kind).filter(lambda kind: kind is not Kind.LABEL), st.lists(EXTREMES | ODD, min_size=1, max_size=5)
)
def test_extreme_values_are_formatted_like_prometheus_client(kind: Kind, values: list[float]) -> None:
    ours, theirs = ours_and_theirs([("x", kind, "h", [({"n": str(n)}, value) for n, value in enumerate(values)])])
    assert render(ours, openmetrics=False) == generate_latest(theirs)


@given(st.lists(st.integers(-(2**63), 2**64), min_size=1, max_size=5), st.lists(ODD, max_size=2))
def test_integers_stay_whole_unlike_in_prometheus_client(whole: list[int], others: list[float]) -> None:
    values = [*whole, *others]
    ours, theirs = ours_and_theirs([("x", Kind.GAUGE, "h", [({"n": str(n)}, v) for n, v in enumerate(values)])])
    pairs_of_lines = list(zip(render(ours, openmetrics=True).split(b"\n"), modern(theirs).split(b"\n"), strict=True))
    for value, (line, other) in zip(values, pairs_of_lines[2:], strict=False):
        (shown, text), (theirs_shown, their_text) = line.rsplit(b" ", 1), other.rsplit(b" ", 1)
        assert shown == theirs_shown
        assert float(text) == float(their_text)
        assert text == (b"%d" % value if isinstance(value, int) else their_text)


@settings(max_examples=30)
@given(FAMILIES)
def test_dcgm_counter_is_rendered_like_a_gauge_except_for_its_type(drawn: Drawn) -> None:
    """The library appends ``_total`` to the name of every counter, and dcgm-exporter's counters have none."""
    gauges = [(name, Kind.GAUGE, text, samples) for name, _, text, samples in drawn]
    ours, theirs = ours_and_theirs(gauges)
    counters = [Family(name=one.name, kind=Kind.COUNTER, help=one.help, values=one.values) for one in ours]
    for openmetrics, page, kind in ((False, generate_latest(theirs), b"counter"), (True, modern(theirs), b"unknown")):
        expected = re.sub(rb"(?m)^(# TYPE \S+) gauge$", rb"\1 " + kind, page)
        assert render(counters, openmetrics=openmetrics) == expected


@given(FAMILIES)
def test_rendered_page_is_parsed_back_by_both_parsers(drawn: Drawn) -> None:
    ours, _ = ours_and_theirs(drawn)
    expected = {(family.name, sample.pairs, sample.value) for family in ours for sample in samples_of(family)}
    for parse, openmetrics in ((parse_plain, False), (parse_openmetrics, True)):
        page = render(ours, openmetrics=openmetrics).decode()
        read = {
            (sample.name, tuple(sorted(sample.labels.items())), sample.value)
            for metric in parse(page)
            for sample in metric.samples
        }
        assert read == expected


def test_integers_stay_whole_and_floats_are_shortest() -> None:
    shown = [number(value) for value in (0, 81_559, 85_520_809_984, 1 << 62, 0.1, 0.8732, 1.0, 512.318, 1_234_567.5)]
    assert shown == [
        "0",
        "81559",
        "85520809984",
        "4611686018427387904",
        "0.1",
        "0.8732",
        "1.0",
        "512.318",
        "1.2345675e+06",
    ]
    assert [number(value) for value in (math.inf, -math.inf, math.nan)] == ["+Inf", "-Inf", "NaN"]


def test_counter_without_total_keeps_its_name_and_is_unknown_in_openmetrics() -> None:
    family = Family(
        name="DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", kind=Kind.COUNTER, help="Energy.", values={labels(): 5}
    )
    assert render([family], openmetrics=False).decode() == (
        "# HELP DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION Energy.\n"
        "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter\n"
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION 5\n"
    )
    assert render([family], openmetrics=True).decode() == (
        "# HELP DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION Energy.\n"
        "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION unknown\n"
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION 5\n"
        "# EOF\n"
    )


def test_quotes_and_newlines_in_a_label_are_escaped() -> None:
    page = render(
        [Family(name="x", kind=Kind.GAUGE, help="a\\b\nc", values={labels(("a", 'q"\\\n')): 1})],
        openmetrics=False,
    )
    assert page.decode() == '# HELP x a\\\\b\\nc\n# TYPE x gauge\nx{a="q\\"\\\\\\n"} 1\n'


def test_invalid_unicode_in_a_name_does_not_break_the_page() -> None:
    family = Family(name="x", kind=Kind.GAUGE, help="h", values={labels(("a", "\udc80")): 1})
    assert b'x{a="?"} 1' in render([family], openmetrics=False)


@pytest.mark.parametrize(
    "after", [{"a": 1.0, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 3}, {"a": 1, "c": 2}, {"a": 1}, {}]
)
def test_page_does_not_depend_on_the_page_before(after: dict[str, float]) -> None:
    kept: Kept = {}
    pages = [
        [Family(name="x", kind=Kind.GAUGE, help="h", values={labels(("l", name)): one for name, one in values.items()})]
        for values in ({"a": 1, "b": 2}, after)
    ]
    assert [render(page, openmetrics=False, kept=kept) for page in pages] == [
        render(page, openmetrics=False) for page in pages
    ]


def test_empty_label_is_omitted() -> None:
    assert pairs(labels(("a", ""), ("b", None), ("c", "d"))) == (("c", "d"),)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/html,application/xhtml+xml,*/*;q=0.8", False),
        ("text/plain;version=0.0.4", False),
        (SCRAPE_OF_PROMETHEUS_2, True),
        (SCRAPE_OF_PROMETHEUS_3, True),
        ("application/openmetrics-text", True),
        ('Application/OpenMetrics-Text; version="1.0.0"', True),
        ("application/openmetrics-text; version=0.0.1", False),
        ("application/openmetrics-text; version=2.0.0, text/plain;q=0.5", False),
        ("application/openmetrics-text;version=1.0.0;q=0.1,text/plain;q=0.9", False),
        ("text/plain, application/openmetrics-text", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much", False),
    ],
)
def test_openmetrics_is_used_only_if_preferred(accept: str, *, openmetrics: bool) -> None:
    assert negotiate(accept) is openmetrics


def test_whole_page_gives_the_same_samples_in_both_parsers() -> None:
    shown = families(snapshot(), ExpositionOptions())
    expected = sum(len(samples_of(family)) for family in shown)
    plain = list(parse_plain(render(shown, openmetrics=False).decode()))
    newer = list(parse_openmetrics(render(shown, openmetrics=True).decode()))
    assert sum(len(metric.samples) for metric in plain) == expected
    assert sum(len(metric.samples) for metric in newer) == expected
    assert not any(sample.name.endswith("_created") for metric in newer for sample in metric.samples)


@pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")
@pytest.mark.parametrize("names", ["legacy", "4.9"])
def test_promtool_reports_only_dcgm_metric_names(names: str) -> None:
    page = render(families(snapshot(), ExpositionOptions(collectors=default(names))), openmetrics=False)
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    lines = [line for line in done.stderr.decode().splitlines() if not line.startswith("DCGM_FI_")]
    assert lines == []
