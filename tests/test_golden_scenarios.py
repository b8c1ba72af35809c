"""Every shipped scenario has a golden page: what Prometheus would scrape from it at a fixed instant."""

import os
import re
from pathlib import Path

import pytest
from pipeline_support import pipeline
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from samples_support import duplicate_series

from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import render
from gpu_simulator import scenario

GOLDEN = Path(__file__).parent / "golden"
INSTANT_SECONDS = 100.0
# What says which program made the page, and not what is on the node.
_OURS = re.compile(r"^(gpu_exporter_build_info)\{.*$", re.MULTILINE)
# When the API's server, which runs in real time, last gave a sign of life: written as 0.
_SIGN_OF_LIFE = re.compile(r"^(gpu_exporter_metadata_timestamp_seconds) \S+$", re.MULTILINE)
# The last digits of a sum are not the same in every version of Python.
_SUMS = re.compile(
    r"^(gpu_(?:(?:ledger|pod)_\w+_total|exporter_conservation_error_seconds)(?:\{.*\})?) (\S+)$", re.MULTILINE
)


async def page(name: str, directory: Path, *, openmetrics: bool = False, source: str = "nvml") -> str:
    loaded = scenario.load(name)
    async with pipeline(loaded, directory, start=INSTANT_SECONDS - 10, with_api=True, source=source) as node:
        snapshot = await node.until(INSTANT_SECONDS)
    shown = families(snapshot, ExpositionOptions())
    assert duplicate_series(shown) == []
    text = _OURS.sub(r"\1{...} 1", render(shown, openmetrics=openmetrics).decode())
    text = _SIGN_OF_LIFE.sub(r"\1 0", text)
    return _SUMS.sub(lambda line: f"{line[1]} {round(float(line[2]), 9)!r}", text)


@pytest.mark.parametrize("name", scenario.shipped())
async def test_golden_page_of_every_shipped_scenario(name: str, tmp_path: Path) -> None:
    text = await page(name, tmp_path)
    golden = GOLDEN / f"scenario_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    expected = golden.read_text()
    got, wanted = text.splitlines(), expected.splitlines()
    assert got == wanted, "the page has changed; if that is meant: make golden, and look at the difference"


@pytest.mark.parametrize("name", ["demo", "a100-mig"])
async def test_both_formats_of_a_page_read_back_the_same(name: str, tmp_path: Path) -> None:
    plain = await page(name, tmp_path / "plain")
    openmetrics = await page(name, tmp_path / "open", openmetrics=True)
    plain = plain.replace("gpu_exporter_build_info{...} 1", "gpu_exporter_build_info 1")
    openmetrics = openmetrics.replace("gpu_exporter_build_info{...} 1", "gpu_exporter_build_info 1")

    def samples(families_of: object) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
        return {
            # The plain parser appends "_total" to counters that have none, as DCGM's.
            (sample.name.removesuffix("_total"), frozenset(sample.labels.items()), sample.value)
            for family in families_of  # type: ignore[attr-defined] # the parsers are not typed
            for sample in family.samples
        }

    assert samples(parse_plain(plain)) == samples(parse_openmetrics(openmetrics))


def test_the_sample_in_the_readme_is_what_the_demo_shows() -> None:
    readme = (GOLDEN.parents[1] / "README.md").read_text(encoding="utf-8")
    sample = readme.split("```\n")[2].splitlines()
    page = (GOLDEN / "scenario_demo.txt").read_text(encoding="utf-8")
    assert len(sample) > 4
    for line in sample:
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        assert re.search(f"^{pattern}$", page, re.MULTILINE), line
