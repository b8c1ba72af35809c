"""The pages of the cost service: each is read from the book, rendered here, and works without a script."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus

from aiohttp import hdrs, web

from exporter.cost.budgets import BudgetState
from exporter.cost.document import funnel
from exporter.cost.ledger import DAY_SECONDS, HOUR_SECONDS, LABEL, Dimension, label_problem, total_of
from exporter.cost.live import PodDocument, PriceRows
from exporter.cost.render import noun, title
from exporter.cost.report import FleetReport, ReportLine, compared
from exporter.errors import ConfigError, PrometheusError, StoreError
from exporter.service import charts, page_tables, responses
from exporter.service.data import Book, gpu_funnel
from exporter.service.openapi import ENDPOINTS, PLAIN
from exporter.service.page_frame import (
    DEFAULT_WINDOW,
    GROUPS,
    MOST_CHOICES,
    NONE,
    View,
    choices,
    chosen_currency,
    dimensions_in,
    everything,
    groups,
    make_frame,
    read,
    read_view,
    render,
    summed,
    usual_currency,
    with_days,
)
from exporter.service.page_tables import (
    PLACES,
    SUBJECTS,
    WORKLOADS,
    TableRow,
    advised,
    make_row,
    make_table,
    names_of,
    subject_of,
)
from exporter.service.report_cache import Question
from exporter.service.responses import assets, packed
from exporter.service.settings import ServeSettings
from exporter.web.responses import Body, accepts_gzip

_LARGEST, _WASTE, _ADVICE = 5, 8, 5
_AT_WORK_RATIO = 0.05
"""A day with less activity than this was one of waste."""
_WASTE_LEAST_SECONDS = HOUR_SECONDS
_RANKED = ("team", "namespace", "model")


def questions() -> tuple[Question, ...]:
    """What the page of a first visit asks the book for, and takes long."""
    return tuple(
        Question(name=DEFAULT_WINDOW, by=by, filters=frozenset(), with_series=with_series)
        for by, with_series in ((GROUPS, True), (WORKLOADS.by, False))
    )


async def overview(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The fleet's report, and what the template shows."""
    total, workloads = await asyncio.gather(groups(book, view), read(book, view, WORKLOADS.by))
    currency = chosen_currency(total, view)
    wasteful = await with_days(book, view, workloads, _wasteful(workloads, currency))
    ranked = await asyncio.gather(*(summed(book, view, SUBJECTS[name].by) for name in _RANKED))
    starts = [period.start_seconds for period in total.periods]
    months = [] if view.filters.wanted else await book.months()
    before = book.before(view.window)
    earlier = compared(total, await read(book, replace(view, window=before), ())).before if before else None
    advice = advised(book.recommendations.value, view)
    return total, {
        "month": next((month for month in months if month.currency == currency or not currency), None),
        "budgets": [] if view.filters.wanted else sorted(book.budgets.value, key=_used, reverse=True)[:_LARGEST],
        "cost": total.total.money.get(currency),
        "figures": total.total,
        "idle_cost": total.owned.money_in(currency).idle,
        "before": earlier,
        **_funnels(total, view, currency),
        "chart": charts.uses(total, currency),
        "waste": [_waste(line, starts, workloads, view, currency) for line in wasteful],
        "advice": advice[:_ADVICE],
        "advice_more": max(0, len(advice) - _ADVICE),
        "rankings": [_ranking(report, view, currency, name) for name, report in zip(_RANKED, ranked, strict=True)],
    }


def _funnels(report: FleetReport, view: View, currency: str) -> dict[str, object]:
    """Return the funnel in GPUs and, where something has a price, in money."""
    return {
        "funnel": gpu_funnel(report, view.now_seconds),
        "money_funnel": funnel(report, currency) if currency else None,
    }


def _used(state: BudgetState) -> float:
    return max(state.spent, state.projected or 0.0) / state.budget.amount


def _wasteful(report: FleetReport, currency: str) -> list[ReportLine]:
    """Owners with the most idle money, or idle hours where nothing has a price."""

    def size(line: ReportLine) -> float:
        return line.figures.amounts(currency).idle

    lines = [line for line in report.held if line.figures.seconds.idle >= _WASTE_LEAST_SECONDS and size(line) > 0]
    return sorted(lines, key=size, reverse=True)[:_WASTE]


_Waste = tuple[TableRow, float | None, float | None, float | None]
"""An owner with idle GPUs, and starts of days of the window: the first and the last on which it held GPUs, and
the last on which these were at work. ``None``: it held some before the window, on its last day, and on none."""


def _waste(line: ReportLine, starts: Sequence[int], report: FleetReport, view: View, currency: str) -> _Waste:
    days = list(zip(starts, line.series, strict=False))
    held = [start for start, figures in days if figures.seconds.total > 0]
    at_work = [start for start, figures in days if (figures.seconds.active_ratio or 0.0) >= _AT_WORK_RATIO]
    return (
        make_row(line, report, view, currency, WORKLOADS),
        held[0] if held and held[0] >= report.window.start_seconds + DAY_SECONDS else None,
        held[-1] if held and held[-1] < starts[-1] else None,
        at_work[-1] if at_work else None,
    )


def _ranking(report: FleetReport, view: View, currency: str, name: str) -> tuple[str, str, Sequence[TableRow], int]:
    """Return title, address and rows of the dearest of a sort, and how many more there are."""
    subject = SUBJECTS[name]
    lines = [line for line in report.held if not currency or currency in line.figures.money]
    if currency:
        lines.sort(key=lambda line: -line.figures.money_in(currency).total)
    value = charts.whole(currency)
    most = max((value(line.figures) for line in lines), default=0.0)
    rows = [
        replace(make_row(line, report, view, currency, subject), length=value(line.figures) / most if most else 0.0)
        for line in lines[:_LARGEST]
    ]
    return subject.title, view.link(f"/by/{name}"), rows, max(0, len(report.held) - len(rows))


_DRAWN, _FEW, _PODS = 8, 25, 200
_SUBJECTS: tuple[Dimension, ...] = ("workload", "namespace", "model", "node", "pool", "team", "cluster")
"""What a page can be on, the narrowest first, labels between pool and team."""
_OF_PODS: tuple[Dimension, ...] = ("namespace", "workload", "node")
"""Subjects with a list of pods: that of a whole team or cluster would be too long to read."""


async def table(book: Book, view: View, name: str) -> tuple[FleetReport, dict[str, object]]:
    """A page of ``SUBJECTS``."""
    subject = subject_of(name)
    if subject is WORKLOADS:
        report, everyone = await asyncio.gather(read(book, view, subject.by), summed(book, view, ()))
    else:
        report = everyone = await summed(book, view, subject.by)
    if before := book.before(view.window):
        earlier = replace(view, window=before)
        of_before = read(book, earlier, subject.by) if subject is WORKLOADS else summed(book, earlier, subject.by)
        report = compared(report, await of_before)
    currency = chosen_currency(report, view)
    drawn = [line for line in report.held if not currency or currency in line.figures.money][:_DRAWN]
    if subject is WORKLOADS and drawn:
        drawn = await with_days(book, view, report, drawn)
    named = list(zip(names_of(drawn, subject), drawn, strict=True))
    return report, {
        "subject": subject,
        # Thousands of lines are not to keep other visitors waiting.
        "table": await asyncio.to_thread(make_table, report, view, currency, subject),
        "chart": charts.largest(everyone, currency, named, more=len(report.held) > len(named)),
    }


async def owner(book: Book, view: View) -> tuple[FleetReport, dict[str, object]]:
    """The page on what the filters say."""
    report, places, days, (pods, problem), prices = await asyncio.gather(
        read(book, view, WORKLOADS.by),
        read(book, view, PLACES.by),
        read(book, view, (), with_series=True),
        _pods(book, view),
        _prices(book, view),
    )
    currency = chosen_currency(report, view)
    held = report.owned
    return report, {
        "kind_and_name": _title(view),
        "crumbs": _crumbs(view),
        "team": _team(report),
        "figures": held,
        "recorded": report.total.seconds.total > 0,
        **_funnels(report, view, currency),
        "cost": held.money.get(currency),
        "apart": total_of(line.figures for line in report.apart),
        "idle_cost": held.money_in(currency).idle,
        "shared": sum(line.shared.get(currency, 0.0) for line in report.held),
        "chart": charts.uses(days, currency),
        "table": None
        if "workload" in view.asked
        else await asyncio.to_thread(make_table, report, view, currency, WORKLOADS, lines=_FEW),
        "all_href": view.link("/by/workload"),
        "places": await asyncio.to_thread(make_table, places, view, currency, PLACES, prices=prices),
        "pods": pods[:_PODS],
        "pods_more": max(0, len(pods) - _PODS),
        "pods_asked": _asks_pods(view),
        "pods_problem": problem,
        "advice": advised(book.recommendations.value, view),
    }


async def _prices(book: Book, view: View) -> PriceRows:
    """Return the price rows at the end of the period; none where they cannot be read."""
    try:
        return await book.sources.prices(view.window.end_seconds, view.filters)
    except PrometheusError:
        return {}


async def _pods(book: Book, view: View) -> tuple[Sequence[PodDocument], str]:
    if not _asks_pods(view):
        return (), ""
    try:
        return await book.sources.pods(view.filters), ""
    except PrometheusError as error:
        return (), str(error)


def _asks_pods(view: View) -> bool:
    return any(name in view.filters.wanted for name in _OF_PODS)


def _named(view: View, name: Dimension) -> str:
    return " or ".join(f"(no {noun(name)})" if value == NONE else value for value in view.asked[name])


def _title(view: View) -> tuple[str, str]:
    """What it is, and its name."""
    for name in _subjects(view):
        kind = view.asked.get("kind") if name == "workload" else None
        return (kind[0] if kind and kind[0] != NONE else title(name), _named(view, name))
    return "Fleet", "Everything"


def _subjects(view: View) -> list[Dimension]:
    """What the page is on, the narrowest first."""
    labels = (name for name in view.asked if name.startswith(LABEL))
    return [name for name in (*_SUBJECTS[:5], *labels, *_SUBJECTS[5:]) if name in view.asked]


def _crumbs(view: View) -> list[tuple[str, str]]:
    """Return names and addresses of the pages from the fleet to this one."""
    crumbs = [("Overview", view.menu("/"))]
    so_far: dict[str, str | None] = dict.fromkeys(dimensions_in(view.asked))
    here = _subjects(view)[::-1]
    for name in here[:-1]:
        so_far[name] = view.asked[name][0]
        crumbs.append((f"{title(name)} {_named(view, name)}", view.link(None, **so_far)))
    return crumbs


def _team(report: FleetReport) -> str:
    teams = {line.key.team for line in report.held}
    return teams.pop() if len(teams) == 1 else ""


_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
)
"""Only what this service serves may run or be loaded: a pod's name that smuggles in markup would still do nothing."""
_A_YEAR = "public, max-age=31536000, immutable"

_Make = Callable[[Book, View], Awaitable[tuple[FleetReport, dict[str, object]]]]


def add_pages(app: web.Application, book: Book, settings: ServeSettings) -> None:
    """Add every page, and what they load, to the application."""
    face = _Pages(book=book, settings=settings)
    pages: tuple[tuple[str, str, _Make], ...] = (
        ("/", "overview.html", overview),
        ("/owner", "owner.html", owner),
        ("/recommendations", "recommendations.html", page_tables.recommendations),
        ("/budgets", "budgets.html", page_tables.budgets),
        ("/about", "about.html", page_tables.plain),
        ("/api", "api.html", page_tables.plain),
        *((f"/by/{name}", "table.html", partial(table, name=name)) for name in SUBJECTS),
    )
    for path, template, make in pages:
        app.router.add_get(path, partial(face.page, path=path, template=template, make=make))
    app.router.add_get("/by/{dimension:label:.+}", face.label)
    app.router.add_get("/runbook", face.runbook)
    app.router.add_get("/d/{dashboard:.+}", face.dashboard)
    app.router.add_get("/static/{name}", face.static)
    app[responses.ERROR_PAGE] = face.error_page


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pages:
    """What all handlers share."""

    book: Book
    settings: ServeSettings

    def _view(self, path: str, pairs: Iterable[tuple[str, str]] = ()) -> View:
        """Return the page as it is asked for, by default with nothing asked for."""
        now = self.book.freshness().now_seconds
        return read_view(path, pairs, now, self.settings.path_prefix, self.settings.books.timezone)

    async def page(self, request: web.Request, *, path: str, template: str, make: _Make) -> web.Response:
        try:
            view = self._view(path, request.query.items())
        except ConfigError as error:
            return await self._failed(request, self._view(path), HTTPStatus.BAD_REQUEST, error.problems)
        try:
            whole = await everything(self.book, view)
            view = replace(view, usual_currency=usual_currency(whole))
            report, values = await make(self.book, view)
        except (PrometheusError, StoreError) as error:
            return await self._failed(request, view, HTTPStatus.SERVICE_UNAVAILABLE, (str(error),))
        return await self._respond(request, template, view, values, report=report, whole=whole)

    async def label(self, request: web.Request) -> web.Response:
        """Answer with the table of a label's values."""
        dimension = request.match_info["dimension"]
        if label_problem(dimension):
            raise web.HTTPNotFound
        make = partial(table, name=dimension)
        return await self.page(request, path=f"/by/{dimension}", template="table.html", make=make)

    async def runbook(self, request: web.Request) -> web.Response:
        """Answer with the runbook, to which alerts link; it needs no Prometheus."""
        return await self._respond(request, "runbook.html", self._view("/runbook"), {})

    async def dashboard(self, request: web.Request) -> web.Response:
        """Lead a link to one of Grafana's dashboards to the page on the same subject, for those without Grafana."""
        target = self._view("").link("/")
        for subject, path in (("node", "/by/node"), ("namespace", "/by/workload")):
            value = request.query.get(f"var-{subject}")
            if value:
                target = self._view("").link(path, **{subject: value})
        return web.Response(status=HTTPStatus.FOUND, headers={hdrs.LOCATION: target})

    async def error_page(self, request: web.Request, status: int, what: str, fix: str) -> web.Response:
        """An error of any path, for people."""
        return await self._failed(request, self._view(""), status, (f"{what}; {fix}" if fix else what,))

    async def static(self, request: web.Request) -> web.Response:
        found = [(plain, asset) for plain, asset in assets().items() if asset.name == request.match_info["name"]]
        if not found:
            raise web.HTTPNotFound
        plain, asset = found[0]
        headers = {
            hdrs.CONTENT_TYPE: asset.content_type,
            hdrs.CACHE_CONTROL: _A_YEAR,
            hdrs.VARY: "Accept-Encoding",
        }
        body = asset.body
        if accepts_gzip(request.headers.get(hdrs.ACCEPT_ENCODING, "")):
            body = await asyncio.to_thread(packed, plain)
            headers[hdrs.CONTENT_ENCODING] = "gzip"
        return web.Response(body=body, headers=headers)

    async def _failed(self, request: web.Request, view: View, status: int, problems: tuple[str, ...]) -> web.Response:
        values = {"problems": problems, "status": int(status)}
        return await self._respond(request, "error.html", view, values, status=int(status))

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
        freshness = self.book.freshness()
        offered = {
            **(choices(whole) if whole else {}),
            **{LABEL + key: known[:MOST_CHOICES] for key, known in self.book.labels.value.items()},
        }
        shown = {
            "view": view,
            "frame": make_frame(view, freshness, report, offered, whole),
            "freshness": freshness,
            "offered": offered,
            "noun": noun,
            "title": title,
            "site": self.settings.serving.title or "GPU cost",
            "report": report,
            "endpoints": ENDPOINTS,
            "plain": PLAIN,
            "static": {plain: f"{view.prefix}/static/{asset.name}" for plain, asset in assets().items()},
            **values,
        }
        body = Body(await asyncio.to_thread(render, template, shown), responses.HTML)
        headers = {"Content-Security-Policy": _POLICY}
        response = await responses.respond(request, body, status=status, headers=headers)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            response.headers[hdrs.RETRY_AFTER] = "15"
        return response
