"""What fuzzing found, each as a user would meet it: what was taken for granted, and what is said of it now."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from fuzz_api import FedApi
from fuzz_prometheus import WINDOW, FedPrometheus

from exporter.errors import ApiError, PrometheusError
from exporter.report.fleet.recorded import Recorded


def body(kind: str, rows: object) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": rows}}).encode()


def test_a_prometheus_answer_without_a_result_is_told_and_no_key_error() -> None:
    answer = b'{"status":"success","data":{"resultType":"vector"}}'
    with pytest.raises(PrometheusError, match="not Prometheus' API"):
        asyncio.run(FedPrometheus(answer).instant("up", None))


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"metric": {}},
        {"metric": {}, "value": []},
        {"metric": {}, "value": [1, "x"]},
        {"metric": {"a": 1}, "value": [1, "1"]},
        7,
    ],
)
def test_a_row_that_no_prometheus_sends_is_told_with_its_address(row: object) -> None:
    with pytest.raises(PrometheusError, match="http://prometheus:9090: the answer has rows") as told:
        asyncio.run(FedPrometheus(body("vector", [row])).instant("up", None))
    assert told.value.reason == "bad_rows"


@pytest.mark.parametrize("points", [[[0]], [["x", "1"]], None])
def test_points_that_are_none_are_told(points: object) -> None:
    with pytest.raises(PrometheusError, match="the answer has rows"):
        asyncio.run(FedPrometheus(body("matrix", [{"metric": {}, "values": points}])).range("up", 0, 60, 15))


def test_half_a_surrogate_pair_in_a_label_does_not_keep_a_report_from_being_written() -> None:
    found = asyncio.run(
        FedPrometheus(body("vector", [{"metric": {"team": "a\ud800"}, "value": [1, "1"]}])).instant("up", None)
    )
    assert found[0].labels == {"team": "a?"}


def test_a_capacity_that_is_no_number_is_left_out_of_a_ledger() -> None:
    recorded = Recorded([WINDOW], "cluster")
    rows = [
        {"metric": {"cluster": name}, "value": [WINDOW.end_seconds, text]} for name, text in (("a", "NaN"), ("b", "7"))
    ]
    recorded.add_capacity(rows, (0,))
    assert recorded.capacity(0) == {"b": 7.0}


async def test_an_event_of_the_kubernetes_api_without_a_type_is_garbage_and_not_unexpected() -> None:
    stream = FedApi([b'{"object":{}}\n']).watch("/api/v1/pods", {}, accept="", silence_seconds=1)
    with pytest.raises(ApiError, match="an event has no type") as told:
        _ = [event async for event in stream]
    assert told.value.reason == "garbage"
