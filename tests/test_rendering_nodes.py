"""The nodes that ``benchmarks/rendering.py`` measures pages of are such as it says."""

import sys
from itertools import islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from prometheus_client.parser import text_string_to_metric_families
from rendering_nodes import SHAPES, ticks

from exporter.metrics.collector import ExpositionOptions
from exporter.web.server import Renderer


@pytest.mark.parametrize("size", [900, 2_200, 5_000])
def test_a_measured_page_is_as_large_as_it_says_and_another_than_the_one_before(size: int) -> None:
    renderer = Renderer(ExpositionOptions(), list)
    pages = [renderer.metrics(snapshot).plain.decode() for snapshot in islice(ticks(SHAPES[size]), 2)]
    lines = [[line for line in page.splitlines() if not line.startswith("#")] for page in pages]
    assert len(lines[0]) == pytest.approx(size, rel=0.2)
    assert len({line.rpartition(" ")[0] for line in lines[1]}) == len(lines[1]) == len(lines[0]), "no series twice"
    changed = sum(one != other for one, other in zip(*lines, strict=True))
    assert changed > 0.3 * size, "what is measured and what runs up has changed"
    assert sum(len(family.samples) for family in text_string_to_metric_families(pages[1])) == len(lines[1])
