"""What each path of the API answers."""

import asyncio
import io
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from exporter.errors import ConfigError
from exporter.exposition.responses import Bodies, Body
from exporter.report import render
from exporter.report.fleet.report import FleetReport
from exporter.report.fleet.values import Window
from exporter.report.focus import DEFAULT_VERSION, FOCUS_DIMENSIONS, VERSIONS, write_focus
from exporter.report.recommend.write import keys as recommendation_keys
from exporter.report.render.document import document
from exporter.report.service import documents, responses
from exporter.report.service.book import Book
from exporter.report.service.parameters import (
    BY,
    FILTERS,
    LABEL_FILTER,
    LIMIT,
    OFFSET,
    SERIES,
    SHARE_IDLE,
    SHARE_UNALLOCATED,
    WINDOW,
    Parameter,
    choice,
    filters_of,
)
from exporter.report.service.settings import ServeSettings
from exporter.report.service.view_overview import funnel

_OF_ORIGINS = frozenset({"cluster", "node", "pool", "model"})
CSV = "text/csv; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A question that was understood."""

    values: Mapping[str, Any]
    """By parameter."""
    book: Book
    bodies: Bodies
    settings: ServeSettings
    now_seconds: float
    ignored: tuple[str, ...] = ()
    """One warning for each parameter that was ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What is sent."""

    body: Body
    filename: str = ""
    """Under which name it is to be saved; empty where it is to be shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A path of the API."""

    path: str
    about: str
    handle: Callable[[Ask], Awaitable[Answer]]
    parameters: tuple[Parameter, ...] = ()
    schema: str = ""
    """Of its JSON, in ``schemas.SCHEMAS``."""
    other_types: tuple[str, ...] = field(default=())
    """Content types that it can answer besides."""
    ignores_unknown: bool = False
    """Ignore unknown parameters with a warning, as an API of others does; else they are refused."""


async def _report(ask: Ask) -> Answer:
    values, form = ask.values, ask.values["format"]
    if form == "focus":
        return await _focus(ask)
    report = await ask.book.report(
        values["window"],
        values["by"],
        filters_of(values),
        share_idle=values["shareIdle"],
        share_unallocated=values["shareUnallocated"],
        with_series=values["series"],
    )
    if form == "json":
        offset, limit = values["offset"], values["limit"]
        make = partial(_json_page, report, offset, limit)
        return Answer(body=await ask.bodies.of_thread(report, (form, offset, limit), make))
    body = await ask.bodies.of_thread(report, form, partial(_rendered, report, form))
    name = "" if form == "table" else _filename("gpu-cost", report.window, "-".join(report.by), form)
    return Answer(body=body, filename=name)


def _json_page(report: FleetReport, offset: int, limit: int) -> Body:
    """The report's document with some of the owners' lines; what is nobody's always stays."""
    found = document(report)
    held = len(report.held)
    found["lines"] = [*found["lines"][:held][offset : offset + limit], *found["lines"][held:]]
    return responses.json_body({**found, "paging": {"offset": offset, "limit": limit, "lines": held}})


def _rendered(report: FleetReport, form: render.Form) -> Body:
    stream = io.StringIO()
    render.write_fleet(report, form, stream)
    content_type = {"csv": CSV, "html": responses.HTML, "table": responses.TEXT}[form]
    return Body(stream.getvalue().encode("utf-8", "replace"), content_type)


async def _focus(ask: Ask) -> Answer:
    filters = filters_of(ask.values)
    wrong = sorted(set(filters.wanted) - _OF_ORIGINS)
    if wrong:
        raise ConfigError(
            *(
                f"filter.{dimension}: would leave out parts of a split charge, which then does not add up; allowed with"
                " format=focus: filter.cluster, filter.node, filter.pool, filter.model"
                for dimension in wrong
            )
        )
    ledger = await ask.book.ledger(ask.values["window"], FOCUS_DIMENSIONS, filters)
    stream = io.StringIO()
    version = ask.values["focusVersion"]
    await asyncio.to_thread(write_focus, ledger, stream, version=version)
    body = Body(stream.getvalue().encode("utf-8", "replace"), CSV)
    return Answer(body=body, filename=_filename("focus", ledger.window, version, "csv"))


def _filename(head: str, window: Window, what: str, ending: str) -> str:
    start = datetime.fromtimestamp(window.start_seconds, UTC)
    end = datetime.fromtimestamp(window.end_seconds, UTC)
    name = f"{head}-{start:%Y%m%dT%H}-{end:%Y%m%dT%H}-{what}".strip("-")
    return re.sub(r"[^A-Za-z0-9.-]", "-", name) + f".{ending}"


async def _summary(ask: Ask) -> Answer:
    filters = filters_of(ask.values)
    report = await ask.book.report(ask.values["window"], (), filters)
    at_work = await ask.book.at_work_ratio(report.window, report.filters)
    found = {
        "window": documents.window_document(report.window),
        "funnel": documents.funnel_document(funnel(report, ask.now_seconds, at_work)),
        "money": documents.money_documents(report),
        "trust": document(report)["trust"],
        "months": [documents.month_document(month) for month in await ask.book.months()],
        "freshness": documents.freshness_document(ask.book.freshness()),
    }
    return Answer(body=responses.json_body(found))


async def _months(ask: Ask) -> Answer:
    months = [documents.month_document(month) for month in await ask.book.months()]
    return _with_freshness(ask, {"months": months})


async def _recommendations(ask: Ask) -> Answer:
    wanted = filters_of(ask.values).wanted
    kept = [
        recommendation_keys(advice)
        for advice in ask.book.recommendations()
        if all(getattr(advice, name) in values for name, values in wanted.items())
    ]
    return _with_freshness(ask, {"recommendations": kept})


async def _budgets(ask: Ask) -> Answer:
    return _with_freshness(ask, {"budgets": [documents.budget_document(state) for state in ask.book.budgets()]})


async def _pods(ask: Ask) -> Answer:
    pods = await ask.book.pods(filters_of(ask.values))
    return _with_freshness(ask, {"pods": [documents.pod_document(pod) for pod in pods]})


async def _freshness(ask: Ask) -> Answer:
    return Answer(body=responses.json_body(documents.freshness_document(ask.book.freshness())))


def _with_freshness(ask: Ask, found: dict[str, Any]) -> Answer:
    found["freshness"] = documents.freshness_document(ask.book.freshness())
    return Answer(body=responses.json_body(found))


_FORMAT = choice(
    "format", "Form of the report; csv, html and focus are sent as files.", "json", "csv", "html", "table", "focus"
)
_FOCUS_VERSION = choice(
    "focusVersion",
    "Version of FOCUS, with format focus.",
    DEFAULT_VERSION,
    *(version for version in VERSIONS if version != DEFAULT_VERSION),
)
_OF_OWNERS = tuple(one for one in FILTERS if one.name not in {"filter.node", "filter.pool", "filter.mode"})

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        path="/api/v1/report",
        about="Who used GPUs, how well, and what it cost.",
        handle=_report,
        parameters=(
            WINDOW,
            BY,
            *FILTERS,
            LABEL_FILTER,
            SHARE_IDLE,
            SHARE_UNALLOCATED,
            SERIES,
            OFFSET,
            LIMIT,
            _FORMAT,
            _FOCUS_VERSION,
        ),
        schema="Report",
        other_types=("text/csv", "text/html", "text/plain"),
    ),
    Endpoint(
        path="/api/v1/summary",
        about="The fleet in a few numbers: GPUs from total to active, money by what it went for, this month.",
        handle=_summary,
        parameters=(WINDOW, *FILTERS, LABEL_FILTER),
        schema="Summary",
    ),
    Endpoint(
        path="/api/v1/months",
        about="This month's money: to date, forecast, and the month before.",
        handle=_months,
        schema="Months",
    ),
    Endpoint(
        path="/api/v1/recommendations",
        about="What could be given back, shared or made smaller, and what that saves a month.",
        handle=_recommendations,
        parameters=_OF_OWNERS,
        schema="Recommendations",
    ),
    Endpoint(path="/api/v1/budgets", about="Budgets and how they stand.", handle=_budgets, schema="Budgets"),
    Endpoint(
        path="/api/v1/pods",
        about="Pods on devices now, and those that ended lately.",
        handle=_pods,
        parameters=FILTERS,
        schema="Pods",
    ),
    Endpoint(path="/api/v1/freshness", about="How new all this is.", handle=_freshness, schema="Freshness"),
)
