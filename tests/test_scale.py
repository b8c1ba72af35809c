"""The page on scale says what the arithmetic gives, and the arithmetic what can be checked by hand."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from fleet_load import Fleet, Sizes, load, sizes, table  # noqa: E402 - lies in a folder of scripts

SIZES = Sizes(pod_full=10_000, pod_metadata=5_000, bookmark=100, node=10_000, namespace=500)


def test_the_page_has_the_table_that_is_computed() -> None:
    assert table(Fleet(), sizes()) in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def test_a_fleet_that_watches_asks_for_little_of_what_one_that_polls_asks_for() -> None:
    one = load(Fleet(), SIZES)
    assert one.renewals == pytest.approx(5000 / 360)
    assert one.node_gets + one.namespace_gets == pytest.approx(4 * 5000 / 600)
    assert one.poll_requests == pytest.approx(333.3, abs=0.1)
    assert one.poll_bytes > 200 * one.steady_bytes


def test_the_load_grows_with_the_fleet_and_nothing_else_does() -> None:
    small, large = load(Fleet(nodes=500, pod_starts_per_hour=5_000), SIZES), load(Fleet(), SIZES)
    for name in ("streams", "start_bytes", "start_requests", "renewals", "steady_requests", "steady_bytes"):
        assert getattr(large, name) == pytest.approx(10 * getattr(small, name)), name


def test_more_pods_make_a_larger_start_and_no_more_requests() -> None:
    few, many = load(Fleet(), SIZES), load(Fleet(pods_per_node=250), SIZES)
    assert many.start_bytes == pytest.approx(few.start_bytes * 250 / 110)
    assert many.steady_requests == few.steady_requests
