"""Findings of fuzzing, from a user's view: former failures, and the present answers."""

import asyncio
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from fleet_support import serving, success
from service_support import http_server

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from fuzz_page import NOW, lived, node_in
from fuzz_targets import WINDOW, FedApi, FedPrometheus, followed, state_of_a_node, written

from exporter.config import price_book, web_config
from exporter.config.prometheus_options import PrometheusSettings
from exporter.config.resolve import load_agent
from exporter.cost import budgets as budget_file
from exporter.cost import node_report, queries
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.window import Now
from exporter.errors import ApiError, ConfigError, ExporterError, PrometheusError, SourceError, StateError
from exporter.gpu import wire
from exporter.kube import api_client
from exporter.kube.api_client import Request
from exporter.model.devices import Reading
from exporter.model.fields import Field
from exporter.service.page_frame import read_view
from exporter.web.node_api import ledger_document
from gpu_simulator import scenario


def body(kind: str, rows: object) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": kind, "result": rows}}).encode()


def test_prometheus_response_without_a_result_is_an_error() -> None:
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
def test_malformed_prometheus_row_is_an_error_with_the_address(row: object) -> None:
    with pytest.raises(PrometheusError, match="http://prometheus:9090: the answer has rows") as reported:
        asyncio.run(FedPrometheus(body("vector", [row])).instant("up", None))
    assert reported.value.reason == "bad_rows"


@pytest.mark.parametrize("points", [[[0]], [["x", "1"]], None])
def test_malformed_points_are_an_error(points: object) -> None:
    client = FedPrometheus(body("matrix", [{"metric": {}, "values": points}]))
    two_days = replace(WINDOW, end_seconds=WINDOW.start_seconds + 2 * 86_400)
    with pytest.raises(PrometheusError, match="the answer has rows"):
        asyncio.run(PrometheusLedger(client).ledger(two_days, frozenset()))


def test_lone_surrogate_in_a_label_is_replaced() -> None:
    found = asyncio.run(
        FedPrometheus(body("vector", [{"metric": {"team": "a\ud800"}, "value": [1, "1"]}])).instant("up", None)
    )
    assert found[0].labels == {"team": "a?"}


async def test_non_numeric_capacity_is_left_out_of_a_ledger() -> None:
    async def answer(request: web.Request) -> web.Response:
        form = await request.post()
        values = {"a": "NaN", "b": "7"} if queries.RECORDED in str(form.get("query")) else {}
        rows = [{"metric": {"cluster": name}, "value": [form["time"], text]} for name, text in values.items()]
        return success(rows, "matrix" if "start" in form else "vector")

    hour = replace(WINDOW, end_seconds=WINDOW.start_seconds + 3600)
    async with serving(answer) as server, PrometheusClient(PrometheusSettings(url=server.url)) as client:
        ledger = await PrometheusLedger(client).ledger(hour, frozenset())
    assert ledger.chunks[0].capacity_seconds == {"b": 7.0}


async def test_watch_event_without_a_type_is_garbage_and_not_unexpected() -> None:
    stream = FedApi([b'{"object":{}}\n']).watch(Request("/api/v1/pods"), silence_seconds=1)
    with pytest.raises(ApiError, match="an event has no type or no object") as reported:
        _ = [event async for event in stream]
    assert reported.value.reason == "garbage"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("metered_steady",), 10**400),
        (("saved_at_seconds",), float("nan")),
        (("saved_at_seconds",), 1e18),
        (("slots", 0, "gpu_uuid"), []),
        (("slots", 0, "share_ratio"), "half"),
        (("ledger", "capacity_seconds"), 10**400),
        (("ledger", "accounts", 0, "totals", "seconds", "idle"), 1e308),
    ],
)
def test_damaged_state_is_set_aside_and_the_agent_continues_metering(
    tmp_path: Path, path: tuple[str | int, ...], value: object
) -> None:
    (tmp_path / "read" / "state").mkdir(parents=True)
    state = json.loads(state_of_a_node(tmp_path / "made"))
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    written(tmp_path / "read" / "state", json.dumps(state).encode())
    world, agent = node_in(tmp_path / "read", since=20.0)
    assert "is damaged" in agent.metering.problem
    assert (tmp_path / "read" / "state" / "ledger.json.damaged-1").exists()
    lived(world, agent)
    agent.end()


def test_deeply_nested_state_is_reported_as_damaged(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is damaged"):
        written(tmp_path, b"[" * 100_000).load()


@pytest.mark.parametrize("rubbish", [10**400, 1e308, -1e300])
def test_out_of_range_value_is_left_out_and_others_are_kept(rubbish: float, tmp_path: Path) -> None:
    reported = node_in(tmp_path)[0].reading(wall=NOW, steady=0.0)
    values = {**reported.gpus[0].values, Field.MEMORY_TEMP: rubbish, Field.GPU_TEMP: 54}
    line = wire.encode(replace(reported, gpus=(replace(reported.gpus[0], values=values),)))
    message = wire.decode(line)
    assert isinstance(message, Reading)
    assert message.gpus[0].values == {**reported.gpus[0].values, Field.GPU_TEMP: 54}


@pytest.mark.parametrize("name", ["index", "memory_total_bytes"])
def test_out_of_range_identity_number_is_refused(name: str, tmp_path: Path) -> None:
    reported = node_in(tmp_path)[0].reading(wall=NOW, steady=0.0)
    body = json.loads(wire.encode(reported))
    identity = next(item for item in body["reading"] if isinstance(item, list))[0][0]
    identity[identity.index(getattr(reported.gpus[0].gpu, name))] = 10**400
    with pytest.raises(SourceError, match="is not an amount"):
        wire.decode(json.dumps(body).encode())


@pytest.mark.parametrize(("key", "value"), [("taken_at_seconds", -(2**63)), ("capacity_seconds", float("nan"))])
def test_agent_ledger_with_an_invalid_number_is_refused(key: str, value: float, tmp_path: Path) -> None:
    document = json.loads(ledger_document(lived(*node_in(tmp_path))).plain)
    with pytest.raises(ExporterError, match="is not an agent's ledger"):
        node_report.read({**document, "saved_at_seconds": None, key: value}, "http://node-a:9400")


def test_path_with_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a path"):
        load_agent({"price-book": "a\ud800"}, {})


def test_view_address_with_invalid_bytes_still_has_links() -> None:
    view = read_view("/teams", [("team", "a\udcff")], Now(WINDOW.end_seconds))
    assert view.link(page=2) == "/teams?team=a%3F&page=2"


def test_long_non_numeric_api_status_gives_a_short_message() -> None:
    assert len(str(api_client.of_status("x" * 100_000, "https://api", api_client.Request("/api/v1/pods")))) < 200


def test_gpu_reported_twice_by_a_child_counts_once(tmp_path: Path) -> None:
    reported = node_in(tmp_path)[0].reading(wall=NOW, steady=0.0)
    line = wire.encode(
        replace(reported, gpus=(*reported.gpus, replace(reported.gpus[0], gpu=replace(reported.gpus[0].gpu, index=7))))
    )
    assert wire.decode(line) == reported


@pytest.mark.parametrize("text", ['a: "\\UFFFFFFFF"', 'a: "\\U00110000"'])
def test_invalid_yaml_escape_is_reported_in_every_kind_of_file(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    for load in (web_config.load, budget_file.load, price_book.load, lambda one: scenario.load(str(one))):
        with pytest.raises(ConfigError, match="YAML"):
            load(path)
    with pytest.raises(ConfigError, match="not YAML"):
        load_agent({"config": str(path)}, {})


@pytest.mark.parametrize("value", ["!!bool maybe", "!!int ''", "!!int _", "!!timestamp x", "!!float x"])
def test_value_that_does_not_match_its_yaml_tag_is_reported_with_its_line(value: str, tmp_path: Path) -> None:
    path = tmp_path / "scenario.yaml"
    path.write_text(f"node: a\ndriver: {value}\n")
    with pytest.raises(ConfigError, match=r"scenario\.yaml:"):
        scenario.load(str(path))


@pytest.mark.parametrize(("one", "other"), [("9" * 5000, "1"), ("1", "9" * 5000), ("\u0663", "7")])
def test_resource_version_of_thousands_of_digits_is_compared(one: str, other: str) -> None:
    pods = asyncio.run(followed([listed(one), b"", listed(other), b""]))
    assert "unexpected" not in pods.errors


def listed(version: str) -> bytes:
    return json.dumps({"items": [], "metadata": {"resourceVersion": version}}).encode()


async def test_client_that_disconnects_within_its_body_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = web.Application()
    app.router.add_get("/readyz", _answer)
    async with http_server(app) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n\r\n")
        writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def _answer(_request: web.Request) -> web.Response:
    return web.Response(text="ready")
