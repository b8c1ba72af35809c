"""What each path of the API answers."""

import asyncio
import io
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from exporter.cost import render
from exporter.cost.budgets import BudgetState
from exporter.cost.document import document
from exporter.cost.focus import DEFAULT_VERSION, VERSIONS
from exporter.cost.focus_rows import FOCUS_DIMENSIONS
from exporter.cost.focus_write import write_focus
from exporter.cost.ledger import UNALLOCATED, UNATTRIBUTED, Figures, Window
from exporter.cost.live import LivePod
from exporter.cost.recommend_render import keys as recommendation_keys
from exporter.cost.report import FleetReport
from exporter.errors import ConfigError
from exporter.service import responses
from exporter.service.data import Book, Freshness, Funnel, MonthMoney
from exporter.service.pages import funnel
from exporter.service.parameters import (
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
from exporter.service.settings import ServeSettings
from exporter.web.responses import Bodies, Body


def month_document(month: MonthMoney) -> dict[str, Any]:
    """This month in one currency."""
    return {
        "currency": month.currency,
        "spent": month.spent,
        "forecast": month.forecast,
        "last_month": month.last_month,
    }


def funnel_document(funnel: Funnel | None) -> dict[str, Any] | None:
    """Mean numbers of GPUs; ``None`` where no hour was recorded."""
    if funnel is None:
        return None
    return {
        "total": funnel.total,
        "allocated": funnel.allocated,
        "active": funnel.at_work,
        "effective": funnel.effective,
        "unknown": funnel.unknown,
    }


def money_documents(report: FleetReport) -> list[dict[str, Any]]:
    """By currency what all GPUs of a report have cost, in parts that sum to ``total``."""
    held = [line.figures for line in report.held]
    apart = {
        kind: [line.figures for line in report.apart if line.key.kind == kind] for kind in (UNATTRIBUTED, UNALLOCATED)
    }
    return [
        {
            "currency": currency,
            "total": _cost([report.total], currency),
            "active": sum(figures.money_in(currency).active for figures in held),
            "idle": sum(figures.money_in(currency).idle for figures in held),
            "unknown": sum(figures.money_in(currency).unknown for figures in held),
            "unattributed": _cost(apart[UNATTRIBUTED], currency),
            "unallocated": _cost(apart[UNALLOCATED], currency),
        }
        for currency in report.currencies
    ]


def _cost(many: Sequence[Figures], currency: str) -> float:
    return sum(figures.money_in(currency).total for figures in many)


def budget_document(state: BudgetState) -> dict[str, Any]:
    """One budget and how it stands."""
    budget = state.budget
    return {
        "name": budget.name,
        "owner": dict(sorted(budget.owner.items())),
        "period": budget.period,
        "currency": budget.currency,
        "amount": budget.amount,
        "include_unallocated": budget.include_unallocated,
        "from_seconds": state.period.start_seconds,
        "to_seconds": state.period.end_seconds,
        "spent": state.spent if state.known else None,
        "projected": state.projected,
        "unpriced_seconds": state.unpriced_seconds if state.known else None,
        "thresholds": list(budget.thresholds),
        "passed": list(state.passed),
        "as_of_seconds": state.as_of_seconds,
        "known": state.known,
        "notes": list(state.notes),
    }


def pod_document(use: LivePod) -> dict[str, Any]:
    """One pod on one device."""
    return {
        "cluster": use.cluster or None,
        "node": use.node,
        "gpu_uuid": use.uuid,
        "gpu_index": use.gpu,
        "gpu_instance": use.gpu_instance or None,
        "mig_profile": use.mig_profile or None,
        "model": use.model or None,
        "namespace": use.namespace,
        "pod": use.pod,
        "container": use.container or None,
        "gpu_share_ratio": use.share_ratio,
        "activity_ratio": use.activity_ratio,
        "idle_for_seconds": use.idle_for_seconds,
        "age_seconds": use.age_seconds,
        "memory_used_bytes": use.memory_used_bytes,
        "cost_per_hour": [{"currency": currency, "cost": cost} for currency, cost in sorted(use.cost_per_hour.items())],
        "live": use.live,
    }


def freshness_document(freshness: Freshness) -> dict[str, Any]:
    """How new all is."""
    return {
        "now_seconds": freshness.now_seconds,
        "first_day_seconds": freshness.first_day_seconds,
        "closed_until_seconds": freshness.closed_until_seconds,
        "read_until_seconds": freshness.read_until_seconds,
        "problem": freshness.problem or None,
        "simulated": freshness.simulated,
    }


def window_document(window: Window) -> Mapping[str, Any]:
    """A period, its end outside."""
    return {
        "from_seconds": window.start_seconds,
        "to_seconds": window.end_seconds,
        "label": window.label or None,
    }


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
        "window": window_document(report.window),
        "funnel": funnel_document(funnel(report, ask.now_seconds, at_work)),
        "money": money_documents(report),
        "trust": document(report)["trust"],
        "months": [month_document(month) for month in await ask.book.months()],
        "freshness": freshness_document(ask.book.freshness()),
    }
    return Answer(body=responses.json_body(found))


async def _months(ask: Ask) -> Answer:
    months = [month_document(month) for month in await ask.book.months()]
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
    return _with_freshness(ask, {"budgets": [budget_document(state) for state in ask.book.budgets()]})


async def _pods(ask: Ask) -> Answer:
    pods = await ask.book.pods(filters_of(ask.values))
    return _with_freshness(ask, {"pods": [pod_document(pod) for pod in pods]})


async def _freshness(ask: Ask) -> Answer:
    return Answer(body=responses.json_body(freshness_document(ask.book.freshness())))


def _with_freshness(ask: Ask, found: dict[str, Any]) -> Answer:
    found["freshness"] = freshness_document(ask.book.freshness())
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
