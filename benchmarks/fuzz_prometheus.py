"""Targets of answers that are read over HTTP: PromQL's vectors and matrices, refusals, and an agent's ledger."""

import asyncio
import io
from collections.abc import Mapping

from fuzz_targets import require, require_finite, require_json, target

from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost import node_report, prometheus_access
from exporter.cost import node_report as agent_client
from exporter.cost import report as costs
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.ledger import Dimension, Figures, Filters, LineKey, Window
from exporter.cost.live import live_pods
from exporter.cost.node_report import FORMATS, write
from exporter.cost.prometheus import PrometheusAnswer, PrometheusClient
from exporter.cost.render import FLEET_FORMATS, write_fleet
from exporter.errors import ExporterError, PrometheusError

_SETTINGS = PrometheusSettings(url="http://prometheus:9090", retries=0)
_START = 1_790_812_800
WINDOW = Window(start_seconds=_START, end_seconds=_START + 86_400 + 3600, label="2026-10-01")
"""A day and an hour: asked for by a range and by an instant query, or by two instant ones."""
_BY: frozenset[Dimension] = frozenset(LineKey._fields)


class FedPrometheus(PrometheusClient):
    """The client with bodies put in where HTTP gives them, in turn."""

    def __init__(self, data: bytes) -> None:
        super().__init__(_SETTINGS, random=lambda: 0.5)
        self._bodies = [line for line in data.split(b"\n") if line] or [b""]
        self._asked = 0

    async def _attempt(self, path: str, form: Mapping[str, str] | None) -> PrometheusAnswer:  # noqa: ARG002 - any question
        self._asked += 1
        return self._decoded(self._bodies[(self._asked - 1) % len(self._bodies)], {})


def _check(figures: Figures) -> None:
    plain = (figures.active_seconds, figures.idle_seconds, figures.unknown_seconds, figures.unpriced_seconds)
    require_finite((*plain, figures.energy_joules), "a figure", least=0.0)
    for money in figures.money.values():
        require_finite((money.total, money.idle), "money", least=0.0)


@target("prometheus", "ledger", PrometheusError)
def _ledger(data: bytes) -> None:
    """Bodies of answers, a line each, in turn: what was read is written in every form."""
    ledger = asyncio.run(PrometheusLedger(FedPrometheus(data)).ledger(WINDOW, _BY))
    for chunk in ledger.chunks:
        require_finite(chunk.capacity_seconds.values(), "a capacity", least=0.0)
        require(all(0 <= hours <= chunk.window.hours for hours in chunk.recorded_hours.values()), "hours of a chunk")
        for figures in chunk.lines.values():
            _check(figures)
    found = costs.make_report(ledger, ("namespace", "team"))
    _check(found.total)
    for form in FLEET_FORMATS:
        text = io.StringIO()
        write_fleet(found, form, text)
        text.getvalue().encode()
        if form == "json":
            require_json(text.getvalue())


@target("prometheus", "series", PrometheusError)
def _series(data: bytes) -> None:
    """Instant and range queries, decoded; and pods of the live series."""

    async def ask() -> None:
        for sample in await FedPrometheus(data).instant("up", None):
            require_finite((sample.value,), "a sample")
        for series in await FedPrometheus(data).range("up", 0, 60, 15):
            require_finite((value for _, value in series.points), "a point")
        for pod in await live_pods(FedPrometheus(data), Filters(wanted={"namespace": frozenset({"a"})})):
            require_finite((pod.share_ratio, pod.activity_ratio, *pod.cost_per_hour.values()), "a pod's value")

    asyncio.run(ask())


@target("prometheus", "refusal", PrometheusError, most_bytes=1024)
def _refusal(data: bytes) -> None:
    """A status, a header's value, a body."""
    status, header, body = [*data.split(b"\n", 2), b"", b""][:3]
    code = int(status) if status.isdigit() and len(status) < 4 else 500  # noqa: PLR2004 - HTTP
    value = header.decode("latin-1")
    raise prometheus_access.refusal(_SETTINGS, "/api/v1/query", code, body, {"location": value, "retry-after": value})


@target("prometheus", "agent", ExporterError, most_bytes=8192)
def _agent(data: bytes) -> None:
    """The body of an agent's answer to /api/v1/ledger."""
    document = agent_client.document_of(data, "http://node-a:9400")
    report = node_report.read(document, "http://node-a:9400")
    totals = report.total
    seconds = (totals.active_seconds, totals.idle_seconds, totals.unknown_seconds, report.capacity_seconds)
    require_finite((*seconds, totals.energy_joules), "a total")
    for form in FORMATS:
        for by in node_report.BY:
            text = io.StringIO()
            write(report, form, text, by)
            text.getvalue().encode()
            if form == "json":
                require_json(text.getvalue())
