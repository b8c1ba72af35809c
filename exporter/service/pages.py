"""Builds the pages of the cost service from the data of the fleet; the pages work without scripts."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import TypeVar

from aiohttp import hdrs, web

from exporter.cost.budgets import BudgetState
from exporter.cost.dimensions import LABEL, Dimension, Filters, LineKey, label_problem
from exporter.cost.document import MEANINGS, funnel
from exporter.cost.ledger import total_of
from exporter.cost.live import PodDocument
from exporter.cost.render import noun, title
from exporter.cost.report import FleetReport, Question, ReportLine, compared, rank, sum_line
from exporter.cost.window import DAY_SECONDS, HOUR_SECONDS
from exporter.errors import ConfigError, PrometheusError
from exporter.service import charts, responses
from exporter.service import page_tables as tables
from exporter.service.data import gpu_funnel
from exporter.service.fleet import Fleet
from exporter.service.openapi import ENDPOINTS, PLAIN
from exporter.service.page_frame import GROUPS, NONE, View, choices, dimensions_in, make_frame, read_view
from exporter.service.responses import assets
from exporter.service.settings import ServeSettings
from exporter.web import templating
from exporter.web.responses import Body, response_of

Read = TypeVar("Read")
_LARGEST, _WASTE = 5, 8
_AT_WORK_RATIO = 0.05
"""A day with less activity than this counts as waste."""
_WASTE_LEAST_SECONDS = HOUR_SECONDS
_RANKED = ("team", "namespace", "model")
_OF_A_WORKLOAD: tuple[Dimension, ...] = ("namespace", "workload")


def usual_currency(report: FleetReport) -> str:
    """Return the currency of most GPU-hours; empty if nothing has a price."""
    seconds = dict.fromkeys(report.currencies, 0.0)
    for line in report.held:
        for currency in line.figures.money:
            seconds[currency] += line.figures.seconds.total
    return max(seconds, key=lambda currency: seconds[currency], default="")


async def summed(fleet: Fleet, view: View, *by: Dimension) -> FleetReport:
    """Return the report, per day except for workloads; if possible, summed from the report by ``GROUPS``."""
    # Money that is spread evenly depends on the number of lines.
    if view.question.is_shared or not set(by) <= set(GROUPS):
        # Reading thousands of workloads per day would be slow, and the page shows few of them.
        return await fleet.report(view.window, view.about(*by, with_series=by != tables.WORKLOADS.by))
    report = await fleet.report(view.window, view.about(*GROUPS, with_series=True))
    return replace(
        report,
        question=replace(report.question, by=by),
        held=_regrouped(report.held, by),
        apart=_regrouped(report.apart, by),
    )


async def with_days(fleet: Fleet, view: View, report: FleetReport, lines: Sequence[ReportLine]) -> list[ReportLine]:
    """Return lines of a report on workloads with their days, in the same order; the report has no days."""
    if not lines:
        return []
    wanted = dict(view.question.filters.wanted)
    for name in _OF_A_WORKLOAD:
        wanted[name] = frozenset(str(getattr(line.key, name)) for line in lines)
    question = Question(by=report.question.by, filters=Filters(wanted=wanted), with_series=True)
    some = await fleet.report(view.window, question)
    series = {line.key: line.series for line in some.held}
    return [replace(line, series=series.get(line.key, ())) for line in lines]


def _regrouped(lines: Iterable[ReportLine], by: Sequence[Dimension]) -> tuple[ReportLine, ...]:
    found: dict[LineKey, list[ReportLine]] = {}
    for line in lines:
        found.setdefault(line.key.group(by), []).append(line)
    summed_lines = [sum_line(key, many) for key, many in found.items()]
    if lines and next(iter(found)).is_apart:
        return tuple(summed_lines)
    return tuple(sorted(summed_lines, key=rank))


async def overview(fleet: Fleet, view: View) -> tuple[FleetReport, dict[str, object]]:
    """Return the report of the fleet, and the values of the template."""
    total, workloads = await asyncio.gather(
        fleet.report(view.window, view.about(*GROUPS, with_series=True)), summed(fleet, view, *tables.WORKLOADS.by)
    )
    currency = view.currency_of(total)
    wasteful = await with_days(fleet, view, workloads, _wasteful(workloads, currency))
    ranked = await asyncio.gather(*(summed(fleet, view, *tables.SUBJECTS[name].by) for name in _RANKED))
    starts = [period.start_seconds for period in total.periods]
    months = [] if view.question.filters.wanted else await fleet.months()
    before = fleet.before(view.window)
    earlier = compared(total, await fleet.report(before, view.about())).before if before else None
    return total, {
        "month": next((month for month in months if month.currency == currency or not currency), None),
        "budgets": []
        if view.question.filters.wanted
        else sorted(fleet.budgets.value, key=_used, reverse=True)[:_LARGEST],
        "before": earlier,
        "chart": charts.uses(total, currency),
        "waste": [_waste(line, starts, workloads, view) for line in wasteful],
        "advice": tables.advised(fleet.recommendations.value, view),
        "rankings": [_ranking(report, view, currency, name) for name, report in zip(_RANKED, ranked, strict=True)],
    }


def _used(state: BudgetState) -> float:
    return max(state.spent, state.projected or 0.0) / state.budget.amount


def _wasteful(report: FleetReport, currency: str) -> list[ReportLine]:
    """Return the owners with the most idle money, or idle hours if nothing has a price."""

    def size(line: ReportLine) -> float:
        return line.figures.amounts(currency).idle

    lines = [line for line in report.held if line.figures.seconds.idle >= _WASTE_LEAST_SECONDS and size(line) > 0]
    return sorted(lines, key=size, reverse=True)[:_WASTE]


_Waste = tuple[tables.TableRow, float | None, float | None, float | None]
"""Row of an owner with idle GPUs, and starts of days of the window: first and last day with held GPUs, last day at
work. ``None``: it held GPUs before the window, on its last day, or was never at work."""


def _waste(line: ReportLine, starts: Sequence[int], report: FleetReport, view: View) -> _Waste:
    days = list(zip(starts, line.series, strict=False))
    held = [start for start, figures in days if figures.seconds.total > 0]
    at_work = [start for start, figures in days if (figures.seconds.active_ratio or 0.0) >= _AT_WORK_RATIO]
    return (
        tables.make_row(line, view, tables.WORKLOADS),
        held[0] if held and held[0] >= report.window.start_seconds + DAY_SECONDS else None,
        held[-1] if held and held[-1] < starts[-1] else None,
        at_work[-1] if at_work else None,
    )


def _ranking(
    report: FleetReport, view: View, currency: str, name: str
) -> tuple[str, str, Sequence[tables.TableRow], int]:
    """Return title, address and rows of the dearest lines of a subject, and the number of other lines."""
    subject = tables.SUBJECTS[name]
    lines = [line for line in report.held if not currency or currency in line.figures.money]
    if currency:
        lines.sort(key=lambda line: -line.figures.money_in(currency).total)
    value = charts.whole(currency)
    most = max((value(line.figures) for line in lines), default=0.0)
    rows = [
        replace(tables.make_row(line, view, subject), length=value(line.figures) / most if most else 0.0)
        for line in lines[:_LARGEST]
    ]
    return subject.title, view.link(f"/by/{name}"), rows, max(0, len(report.held) - len(rows))


_DRAWN, _FEW = 8, 25
_SUBJECTS: tuple[Dimension, ...] = ("workload", "namespace", "model", "node", "pool", "team", "cluster")
"""Dimensions that can be the subject of a page, the narrowest first; labels come between pool and team."""
_OF_PODS: tuple[Dimension, ...] = ("namespace", "workload", "node")
"""Subjects with a list of pods; the list of a whole team or cluster would be too long."""


async def table(fleet: Fleet, view: View, name: str) -> tuple[FleetReport, dict[str, object]]:
    """Return report and values of a page of ``SUBJECTS``."""
    subject = tables.subject_of(name)
    report, everyone = await asyncio.gather(summed(fleet, view, *subject.by), summed(fleet, view))
    if before := fleet.before(view.window):
        report = compared(report, await summed(fleet, replace(view, window=before), *subject.by))
    currency = view.currency_of(report)
    drawn = [line for line in report.held if not currency or currency in line.figures.money][:_DRAWN]
    if subject is tables.WORKLOADS and drawn:
        drawn = await with_days(fleet, view, report, drawn)
    named = list(zip(tables.names_of(drawn, subject), drawn, strict=True))
    return report, {
        "subject": subject,
        # In a thread, because thousands of lines would block other requests.
        "table": await asyncio.to_thread(tables.make_table, report, view, currency, subject),
        "chart": charts.largest(everyone, currency, named, more=len(report.held) > len(named)),
    }


async def owner(fleet: Fleet, view: View) -> tuple[FleetReport, dict[str, object]]:
    """Return report and values of the page on the subject of the filters."""
    asks_pods = any(name in view.question.filters.wanted for name in _OF_PODS)

    async def pods_now() -> Sequence[PodDocument]:
        return await fleet.pods(view.question.filters) if asks_pods else ()

    report, places, days, (pods, problem), (prices, _) = await asyncio.gather(
        fleet.report(view.window, view.about(*tables.WORKLOADS.by)),
        fleet.report(view.window, view.about(*tables.PLACES.by)),
        fleet.report(view.window, view.about(with_series=True)),
        _tried(pods_now(), ()),
        _tried(fleet.prices(view.window.end_seconds, view.question.filters), {}),
    )
    currency = view.currency_of(report)
    return report, {
        "kind_and_name": _title(view),
        "crumbs": _crumbs(view),
        "apart": total_of(line.figures for line in report.apart),
        "shared": sum(line.shared.get(currency, 0.0) for line in report.held),
        "chart": charts.uses(days, currency),
        "table": None
        if "workload" in view.asked
        else await asyncio.to_thread(tables.make_table, report, view, currency, tables.WORKLOADS, lines=_FEW),
        "places": await asyncio.to_thread(tables.make_table, places, view, currency, tables.PLACES, prices=prices),
        "pods": pods,
        "pods_asked": asks_pods,
        "pods_problem": problem,
        "advice": tables.advised(fleet.recommendations.value, view),
    }


async def _tried(reading: Awaitable[Read], otherwise: Read) -> tuple[Read, str]:
    """Return the result and no text, or the alternative and the reason of the failure."""
    try:
        return await reading, ""
    except PrometheusError as error:
        return otherwise, str(error)


def _named(view: View, name: Dimension) -> str:
    return " or ".join(f"(no {noun(name)})" if value == NONE else value for value in view.asked[name])


def _title(view: View) -> tuple[str, str]:
    """Return the kind and the name of the subject."""
    for name in _subjects(view):
        kind = view.asked.get("kind") if name == "workload" else None
        return (kind[0] if kind and kind[0] != NONE else title(name), _named(view, name))
    return "Fleet", "Everything"


def _subjects(view: View) -> list[Dimension]:
    """Return the subjects of the page, the narrowest first."""
    labels = (name for name in view.asked if name.startswith(LABEL))
    return [name for name in (*_SUBJECTS[:5], *labels, *_SUBJECTS[5:]) if name in view.asked]


def _crumbs(view: View) -> list[tuple[str, str]]:
    """Return names and addresses of the pages from the fleet to this page."""
    crumbs = [("Overview", view.menu("/"))]
    so_far: dict[str, str | None] = dict.fromkeys(dimensions_in(view.asked))
    here = _subjects(view)[::-1]
    for name in here[:-1]:
        so_far[name] = view.asked[name][0]
        crumbs.append((f"{title(name)} {_named(view, name)}", view.link(None, **so_far)))
    return crumbs


_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
)
"""Content of this service only: markup in the name of a pod cannot run scripts or load files."""
_A_YEAR = "public, max-age=31536000, immutable"

_Make = Callable[[Fleet, View], Awaitable[tuple[FleetReport, dict[str, object]]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """All pages, and the files that they load."""

    fleet: Fleet
    settings: ServeSettings

    def add_to(self, app: web.Application) -> None:
        """Add the routes to an application."""
        pages: tuple[tuple[str, str, _Make], ...] = (
            ("/", "overview.html", overview),
            ("/owner", "owner.html", owner),
            ("/recommendations", "recommendations.html", tables.recommendations),
            ("/budgets", "budgets.html", tables.plain),
            ("/about", "about.html", tables.plain),
            ("/api", "api.html", tables.plain),
            *((f"/by/{name}", "table.html", partial(table, name=name)) for name in tables.SUBJECTS),
        )
        for path, template, make in pages:
            app.router.add_get(path, partial(self._page, path=path, template=template, make=make))
        app.router.add_get("/by/{dimension:label:.+}", self._label)
        app.router.add_get("/runbook", self._runbook)
        app.router.add_get("/d/{dashboard:.+}", self._dashboard)
        app.router.add_get("/static/{name}", self._static)

    def _view(self, path: str, pairs: Iterable[tuple[str, str]] = ()) -> View:
        """Parse the request of a page; by default, a request without parameters."""
        return read_view(path, pairs, self.fleet.now(), self.settings.path_prefix)

    async def _page(self, request: web.Request, *, path: str, template: str, make: _Make) -> web.Response:
        view = self._view(path, request.query.items())
        whole = await self.fleet.report(view.window, Question(by=GROUPS, with_series=True))
        view = replace(view, usual_currency=usual_currency(whole))
        report, values = await make(self.fleet, view)
        return await self._respond(request, template, view, values, report=report, whole=whole)

    async def _label(self, request: web.Request) -> web.Response:
        """Return the table of a label's values."""
        dimension = request.match_info["dimension"]
        if label_problem(dimension):
            raise web.HTTPNotFound
        make = partial(table, name=dimension)
        return await self._page(request, path=f"/by/{dimension}", template="table.html", make=make)

    async def _runbook(self, request: web.Request) -> web.Response:
        """Return the runbook, the target of links in alerts; it needs no Prometheus."""
        return await self._respond(request, "runbook.html", self._view("/runbook"), {})

    async def _dashboard(self, request: web.Request) -> web.Response:
        """Redirect a link to a Grafana dashboard to the page on the same subject, for users without Grafana."""
        target = self._view("").link("/")
        for subject, path in (("node", "/by/node"), ("namespace", "/by/workload")):
            value = request.query.get(f"var-{subject}")
            if value:
                target = self._view("").link(path, **{subject: value})
        return web.Response(status=HTTPStatus.FOUND, headers={hdrs.LOCATION: target})

    async def error_page(self, request: web.Request, status: int, problems: tuple[str, ...]) -> web.Response:
        """Return the page of an error on any path, with the filters if they are valid."""
        path = request.path.removeprefix(self.settings.path_prefix)
        try:
            view = self._view(path, request.query.items())
        except ConfigError:
            view = self._view(path)
        values = {"problems": problems, "status": status}
        return await self._respond(request, "error.html", view, values, status=status)

    async def _static(self, request: web.Request) -> web.Response:
        body = dict(assets().values()).get(request.match_info["name"])
        if body is None:
            raise web.HTTPNotFound
        return response_of(request, body, headers={hdrs.CACHE_CONTROL: _A_YEAR})

    async def _respond(
        self,
        request: web.Request,
        template: str,
        view: View,
        values: Mapping[str, object],
        *,
        report: FleetReport | None = None,
        whole: FleetReport | None = None,
        status: int = 200,
    ) -> web.Response:
        freshness = self.fleet.freshness()
        offered = choices(whole, self.fleet.labels.value)
        shown = {
            "view": view,
            "frame": make_frame(view, freshness, report, offered, whole),
            "freshness": freshness,
            "offered": offered,
            "budgets": self.fleet.budgets.value,
            "meanings": MEANINGS,
            "funnel": funnel,
            "gpu_funnel": gpu_funnel,
            "noun": noun,
            "title": title,
            "site": self.settings.serving.title or "GPU cost",
            "report": report,
            "endpoints": ENDPOINTS,
            "plain": PLAIN,
            "static": {plain: f"{view.prefix}/static/{name}" for plain, (name, _) in assets().items()},
            **values,
        }
        page = await asyncio.to_thread(templating.render, "exporter.service", template, shown)
        # Half a surrogate pair in a name cannot be encoded and becomes a question mark.
        body = Body(page.encode("utf-8", "replace"), responses.HTML)
        headers = {"Content-Security-Policy": _POLICY}
        return await responses.respond(request, body, status=status, headers=headers)
