"""Defines the endpoints of the API and their answers."""

import asyncio
import io
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, TypedDict

from exporter.cost import document, render
from exporter.cost.budgets import BudgetState
from exporter.cost.focus import DEFAULT_VERSION, FOCUS_DIMENSIONS, ORIGIN_DIMENSIONS, VERSIONS, write_focus
from exporter.cost.live import PodDocument
from exporter.cost.recommend_render import RecommendationDocument, recommendation_document
from exporter.cost.report import FleetReport, Question, compared
from exporter.cost.window import Window
from exporter.errors import ConfigError
from exporter.model.ledger import state_columns
from exporter.service import parameters, responses
from exporter.service.data import Freshness, Month, gpu_funnel
from exporter.service.fleet import Fleet
from exporter.service.parameters import Parameter
from exporter.service.settings import ServeSettings
from exporter.web.responses import Bodies, Body, json_body


class PagingDocument(TypedDict):
    """Position of the owners' lines in the report."""

    offset: Annotated[int, "Number of owners' lines before these."]
    limit: Annotated[int, "Maximum number of these lines."]
    lines: Annotated[int, "Number of owners' lines in the report."]


class ReportDocument(document.FleetDocument):
    """Use of GPUs by owner, and its cost."""

    paging: PagingDocument


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetMoneyDocument(document.Funnel):
    """Cost of all GPUs in one currency: the funnel, and the other parts of the total."""

    currency: Annotated[str, "ISO 4217."]
    ineffective: Annotated[float | None, "Of the profiled active seconds that were not effective."]
    idle: Annotated[float, "Of owners' idle seconds."]
    unattributed: Annotated[float, "Without a known holder."]
    unallocated: Annotated[float, "Without a holder."]


class FreshnessEnvelope(TypedDict):
    """Common fields of most answers."""

    freshness: Freshness


class SummaryDocument(FreshnessEnvelope):
    """The fleet in a few numbers."""

    window: document.WindowDocument
    funnel: Annotated[document.Funnel | None, "In mean numbers of GPUs over the recorded hours."]
    money: Annotated[list[FleetMoneyDocument], "By currency."]
    trust: document.TrustDocument
    months: Annotated[list[Month], "By currency; without filters."]


class MonthsDocument(FreshnessEnvelope):
    """This month."""

    months: Annotated[list[Month], "By currency."]


class RecommendationsDocument(FreshnessEnvelope):
    """Suggestions."""

    recommendations: Annotated[list[RecommendationDocument], "Dearest first."]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetDocument:
    """A budget and its state."""

    name: Annotated[str, "Name in the budgets file."]
    owner: Annotated[Mapping[str, Any], "By dimension; empty is all owners."]
    period: Annotated[str, "week, month, quarter or year."]
    from_seconds: Annotated[int, "Start, Unix time."]
    to_seconds: Annotated[int, "End, Unix time; outside of the period."]
    currency: Annotated[str, "ISO 4217."]
    amount: Annotated[float, "Limit of the period."]
    include_unallocated: Annotated[bool, "Counts Unallocated and Unattributed, too."]
    spent: Annotated[float | None, "In this period so far; null where that is not known."]
    projected: Annotated[float | None, "Of the whole period; null while too little is known."]
    unpriced_seconds: Annotated[float | None, "GPU-seconds without a price: spent is too low while there are any."]
    thresholds: Annotated[list[float], "Parts of the amount that are marked."]
    passed: Annotated[list[float], "Those that were reached."]
    as_of_seconds: Annotated[float, "When it was counted, Unix time."]
    known: Annotated[bool, "False: some of it could not be read, or its money is in another currency; spent is null."]
    notes: Annotated[list[str], "Missing money, and the causes."]


class BudgetsDocument(FreshnessEnvelope):
    """Budgets."""

    budgets: Annotated[list[BudgetDocument], "In the order of their file."]


class PodsDocument(FreshnessEnvelope):
    """Pods."""

    pods: Annotated[list[PodDocument], "By node and device."]


def money_documents(report: FleetReport) -> list[FleetMoneyDocument]:
    """Return the cost of all GPUs of a report by currency, in parts that sum to ``total``."""
    return [
        FleetMoneyDocument(
            currency=currency,
            **document.parts(report, currency)
            | state_columns(report.owned.money_in(currency))
            | asdict(document.funnel(report, currency)),
        )
        for currency in report.currencies
    ]


def _budget(state: BudgetState) -> BudgetDocument:
    return BudgetDocument(
        **asdict(state.budget),
        from_seconds=state.period.start_seconds,
        to_seconds=state.period.end_seconds,
        spent=state.spent if state.known else None,
        projected=state.projected,
        unpriced_seconds=state.unpriced_seconds if state.known else None,
        passed=list(state.passed),
        as_of_seconds=state.as_of_seconds,
        known=state.known,
        notes=list(state.notes),
    )


CSV = "text/csv; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A parsed request of the API."""

    values: Mapping[str, Any]
    """Values by name of the parameter."""
    fleet: Fleet
    bodies: Bodies
    settings: ServeSettings
    ignored: tuple[str, ...] = ()
    """Warnings, one for each ignored parameter."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A path of the API."""

    path: str
    about: str
    handle: Callable[[Ask], Awaitable[object]]
    """Function that returns a document or a ``Body``."""
    answer: type
    """Type of the JSON document."""
    parameters: tuple[Parameter, ...] = ()
    other_types: tuple[str, ...] = ()
    """Content types of the answer in addition to JSON."""

    @property
    def ignores_unknown(self) -> bool:
        """Whether unknown parameters only cause a warning, as in the API of OpenCost; otherwise they are an error."""
        return not self.path.startswith("/api/")


async def _report(ask: Ask) -> object:
    values, form = ask.values, ask.values["format"]
    if form == "focus":
        return await _focus(ask)
    question = Question(
        by=values["by"],
        filters=parameters.filters_of(values),
        share_idle=values["shareIdle"],
        share_unallocated=values["shareUnallocated"],
    )
    kept = report = await ask.fleet.report(values["window"], replace(question, with_series=values["series"]))
    before = ask.fleet.before(report.window)
    earlier = await ask.fleet.report(before, question) if before else None
    if earlier:
        report = compared(report, earlier)
    if form == "json":
        offset, limit = values["offset"], values["limit"]
        make = partial(_json_page, report, offset, limit)
        return await ask.bodies.of_thread(kept, (form, offset, limit, id(earlier)), make)
    make = partial(_rendered, report, form, with_notes=values["withNotes"])
    return await ask.bodies.of_thread(kept, (form, values["withNotes"], id(earlier)), make)


def _json_page(report: FleetReport, offset: int, limit: int) -> Body:
    """Return the report's document with a page of the owners' lines and all lines without an owner."""
    whole = document.document(report)
    held = len(report.held)
    found: ReportDocument = {
        **whole,
        "lines": [*whole["lines"][:held][offset : offset + limit], *whole["lines"][held:]],
        "paging": {"offset": offset, "limit": limit, "lines": held},
    }
    return json_body(found)


def _rendered(report: FleetReport, form: render.Form, *, with_notes: bool) -> Body:
    stream = io.StringIO()
    render.write_fleet(report, form, stream, with_notes=with_notes)
    content = stream.getvalue().encode("utf-8", "replace")
    if form in {"table", "funnel"}:
        return Body(content, responses.TEXT)
    head = "gpu-cost-simulated" if report.simulated else "gpu-cost"
    filename = _filename(head, report.window, "-".join(report.question.by), form)
    return Body(content, CSV if form == "csv" else responses.HTML, filename)


async def _focus(ask: Ask) -> object:
    filters = parameters.filters_of(ask.values)
    wrong = sorted(set(filters.wanted) - ORIGIN_DIMENSIONS)
    if wrong:
        raise ConfigError(
            *(
                f"filter.{dimension}: would leave out parts of a split charge, which then does not add up; allowed with"
                " format=focus: filter.cluster, filter.node, filter.pool, filter.model"
                for dimension in wrong
            )
        )
    ledger = await ask.fleet.ledger(ask.values["window"], FOCUS_DIMENSIONS, filters)
    stream = io.StringIO()
    version = ask.values["focusVersion"]
    await asyncio.to_thread(write_focus, ledger, stream, version=version)
    filename = _filename("focus", ledger.window, version, "csv")
    return Body(stream.getvalue().encode("utf-8", "replace"), CSV, filename)


def _filename(head: str, window: Window, what: str, ending: str) -> str:
    start = datetime.fromtimestamp(window.start_seconds, UTC)
    end = datetime.fromtimestamp(window.end_seconds, UTC)
    name = f"{head}-{start:%Y%m%dT%H}-{end:%Y%m%dT%H}-{what}".strip("-")
    return re.sub(r"[^A-Za-z0-9.-]", "-", name) + f".{ending}"


async def _summary(ask: Ask) -> object:
    report = await ask.fleet.report(ask.values["window"], Question(filters=parameters.filters_of(ask.values)))
    return SummaryDocument(
        window=document.window_document(report.window),
        funnel=gpu_funnel(report, ask.fleet.now().seconds),
        money=money_documents(report),
        trust=document.trust_document(report),
        months=list(await ask.fleet.months()),
        freshness=ask.fleet.freshness(),
    )


async def _months(ask: Ask) -> object:
    return MonthsDocument(months=list(await ask.fleet.months()), freshness=ask.fleet.freshness())


async def _recommendations(ask: Ask) -> object:
    wanted = parameters.filters_of(ask.values).wanted
    return RecommendationsDocument(
        recommendations=[
            recommendation_document(advice)
            for advice in ask.fleet.recommendations.value
            if all(advice.owner.value(name) in values for name, values in wanted.items())
        ],
        freshness=ask.fleet.freshness(),
    )


async def _budgets(ask: Ask) -> object:
    return BudgetsDocument(
        budgets=[_budget(state) for state in ask.fleet.budgets.value],
        freshness=ask.fleet.freshness(),
    )


async def _pods(ask: Ask) -> object:
    pods = await ask.fleet.pods(parameters.filters_of(ask.values))
    return PodsDocument(pods=list(pods), freshness=ask.fleet.freshness())


async def _freshness(ask: Ask) -> object:
    return ask.fleet.freshness()


_FORMAT = parameters.choice(
    "format",
    "Form of the report; csv, html and focus are sent as files, funnel is a table of held, active and effective.",
    (*render.FLEET_FORMATS, "focus"),
    "json",
)
_FOCUS_VERSION = parameters.choice("focusVersion", "Version of FOCUS, with format focus.", VERSIONS, DEFAULT_VERSION)
_OF_OWNERS = tuple(one for one in parameters.FILTERS if one.name not in {"filter.node", "filter.pool", "filter.mode"})

ENDPOINTS: tuple[Endpoint, ...] = (
    Endpoint(
        "/api/v1/report",
        "Who used GPUs, how well, and what it cost.",
        _report,
        ReportDocument,
        (
            parameters.WINDOW,
            parameters.BY,
            *parameters.FILTERS,
            parameters.LABEL_FILTER,
            parameters.SHARE_IDLE,
            parameters.SHARE_UNALLOCATED,
            parameters.SERIES,
            parameters.OFFSET,
            parameters.LIMIT,
            _FORMAT,
            parameters.switch("withNotes", "CSV also has rows of totals, coverage, notes and of what has no owner."),
            _FOCUS_VERSION,
        ),
        other_types=("text/csv", "text/html", "text/plain"),
    ),
    Endpoint(
        "/api/v1/summary",
        "The fleet in a few numbers: GPUs and money from total to effective, this month.",
        _summary,
        SummaryDocument,
        (parameters.WINDOW, *parameters.FILTERS, parameters.LABEL_FILTER),
    ),
    Endpoint("/api/v1/months", "This month's money: to date, forecast, and the month before.", _months, MonthsDocument),
    Endpoint(
        "/api/v1/recommendations",
        "What could be given back, shared or made smaller, and what that saves a month.",
        _recommendations,
        RecommendationsDocument,
        _OF_OWNERS,
    ),
    Endpoint("/api/v1/budgets", "Budgets and how they stand.", _budgets, BudgetsDocument),
    Endpoint(
        "/api/v1/pods", "Pods on devices now, and those that ended lately.", _pods, PodsDocument, parameters.FILTERS
    ),
    Endpoint("/api/v1/freshness", "Freshness of the data.", _freshness, Freshness),
)
