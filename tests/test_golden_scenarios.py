"""Every shipped scenario has a golden page: the scrape at a fixed instant."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from page_support import duplicate_series
from pipeline_support import pipeline
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain

from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import render
from gpu_simulator import scenario

GOLDEN = Path(__file__).parent / "golden"
INSTANT_SECONDS = 100.0
# Information on the program, not on the node.
_OURS = re.compile(r"^(gpu_exporter_build_info)\{.*$", re.MULTILINE)
# Time of the API server's last sign of life, in real time: written as 0.
_SIGN_OF_LIFE = re.compile(r"^(gpu_exporter_metadata_timestamp_seconds) \S+$", re.MULTILINE)
# The last digits of a sum differ between versions of Python.
_SUMS = re.compile(
    r"^(gpu_(?:(?:ledger|pod)_\w+_total|exporter_conservation_error_seconds)(?:\{.*\})?) (\S+)$", re.MULTILINE
)


async def pages(name: str, directory: Path, *, source: str = "nvml") -> tuple[str, str]:
    """Return the page in the plain format and as OpenMetrics."""
    loaded = scenario.load(name)
    async with pipeline(loaded, directory, start=INSTANT_SECONDS - 10, with_api=True, source=source) as node:
        snapshot = await node.until(INSTANT_SECONDS)
    shown = families(snapshot, ExpositionOptions())
    assert duplicate_series(shown) == []
    plain, openmetrics = (_fixed(render(shown, openmetrics=kind).decode()) for kind in (False, True))
    return plain, openmetrics


def _fixed(text: str) -> str:
    """Return the page without values that differ between runs."""
    text = _SIGN_OF_LIFE.sub(r"\1 0", _OURS.sub(r"\1{...} 1", text))
    return _SUMS.sub(lambda line: f"{line[1]} {round(float(line[2]), 9)!r}", text)


@pytest.mark.parametrize("name", scenario.shipped())
async def test_golden_page_of_every_shipped_scenario_in_both_formats(name: str, tmp_path: Path) -> None:
    text, openmetrics = await pages(name, tmp_path)
    golden = GOLDEN / f"scenario_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    expected = golden.read_text()
    got, wanted = text.splitlines(), expected.splitlines()
    assert got == wanted, "the page has changed; after an intended change: make golden, and review the difference"
    if name in {"demo", "a100-mig"}:
        assert read_back(parse_plain, text) == read_back(parse_openmetrics, openmetrics)


def read_back(
    parse: Callable[[str], Iterable[Metric]], text: str
) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
    """Return the samples of a page as a client reads them."""
    return {
        # The plain parser appends "_total" to counters without it, as DCGM's are.
        (sample.name.removesuffix("_total"), frozenset(sample.labels.items()), sample.value)
        for family in parse(text.replace("gpu_exporter_build_info{...} 1", "gpu_exporter_build_info 1"))
        for sample in family.samples
    }


def test_readme_sample_matches_the_demo() -> None:
    readme = (GOLDEN.parents[1] / "README.md").read_text(encoding="utf-8")
    sample = readme.split("```\n")[2].splitlines()
    page = (GOLDEN / "scenario_demo.txt").read_text(encoding="utf-8")
    assert len(sample) > 4
    for line in sample:
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        assert re.search(f"^{pattern}$", page, re.MULTILINE), line
