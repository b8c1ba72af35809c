"""The pages of the cost service: each is read from the book, rendered here, and works without a script."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus

from aiohttp import hdrs, web

from exporter.errors import ConfigError, PrometheusError, StoreError
from exporter.exposition.responses import Body, accepts_gzip
from exporter.report.fleet.report import FleetReport
from exporter.report.fleet.values import LABEL, Dimension, label_problem
from exporter.report.service import responses, view_advice, view_overview, view_owner
from exporter.report.service.book import Book
from exporter.report.service.settings import ServeSettings
from exporter.report.service.view_frame import make_frame
from exporter.report.service.view_groups import MOST_CHOICES, choices, everything, usual_currency
from exporter.report.service.view_query import View, plain_view, read_view
from exporter.report.service.view_static import assets, packed
from exporter.report.service.view_table import SUBJECTS
from exporter.report.service.view_templates import render

# Plotly makes two style elements: one without content, to which it adds its rules, and one for maps, which nothing here
# shows. These are their hashes; were the second one another version's, it would be refused, at no loss.
_OF_PLOTLY = (
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=' 'sha256-ji27qzEtxXZW+7dun6UwjHXJ18e6WAin1VvNtkzIE/o='"
)
_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' {_OF_PLOTLY}; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'self'"
)
"""Only what this service serves may run or be loaded: a pod's name that smuggles in markup would still do nothing."""
_A_YEAR = "public, max-age=31536000, immutable"

_Make = Callable[[Book, View], Awaitable[tuple[FleetReport, dict[str, object]]]]


def add_pages(app: web.Application, book: Book, settings: ServeSettings) -> None:
    """Add every page, and what they load, to the application."""
    face = _Pages(book=book, settings=settings)
    pages: tuple[tuple[str, str, _Make], ...] = (
        ("/", "overview.html", view_overview.overview),
        ("/owner", "owner.html", view_owner.owner),
        ("/recommendations", "recommendations.html", view_advice.recommendations),
        ("/budgets", "budgets.html", view_advice.budgets),
        ("/about", "about.html", view_advice.about),
        *((f"/by/{name}", "table.html", partial(view_owner.table, name=name)) for name in SUBJECTS),
    )
    for path, template, make in pages:
        app.router.add_get(path, partial(face.page, path=path, template=template, make=make))
    app.router.add_get("/by/{dimension:label:.+}", face.label)
    app.router.add_get("/runbook", face.runbook)
    app.router.add_get("/static/{name}", face.static)
    app[responses.ERROR_PAGE] = face.error_page


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pages:
    """What all handlers share."""

    book: Book
    settings: ServeSettings

    async def page(self, request: web.Request, *, path: str, template: str, make: _Make) -> web.Response:
        now = self.book.freshness().now_seconds
        try:
            view = read_view(path, request.query.items(), now, self.settings.path_prefix, self.settings.timezone)
        except ConfigError as error:
            plain = plain_view(path, now, self.settings.path_prefix, self.settings.timezone)
            return await self._failed(request, plain, HTTPStatus.BAD_REQUEST, error.problems)
        try:
            whole = await everything(self.book, view)
            view = replace(view, usual_currency=usual_currency(whole))
            report, values = await make(self.book, view)
        except (PrometheusError, StoreError) as error:
            return await self._failed(request, view, HTTPStatus.SERVICE_UNAVAILABLE, (str(error),))
        offered = {**choices(whole), **{LABEL + key: known[:MOST_CHOICES] for key, known in self.book.labels().items()}}
        return await self._respond(request, template, view, values, report=report, offered=offered)

    async def label(self, request: web.Request) -> web.Response:
        """Answer with the table of a label's values."""
        dimension = request.match_info["dimension"]
        if label_problem(dimension):
            raise web.HTTPNotFound
        make = partial(view_owner.table, name=dimension)
        return await self.page(request, path=f"/by/{dimension}", template="table.html", make=make)

    async def runbook(self, request: web.Request) -> web.Response:
        """Answer with the runbook, to which alerts link; it needs no Prometheus."""
        view = plain_view("/runbook", self.book.freshness().now_seconds, self.settings.path_prefix)
        return await self._respond(request, "runbook.html", view, {})

    async def error_page(self, request: web.Request, status: int, what: str, mend: str) -> web.Response:
        """An error of any path, for people."""
        now = self.book.freshness().now_seconds
        view = plain_view("", now, self.settings.path_prefix, self.settings.timezone)
        return await self._failed(request, view, status, (f"{what}; {mend}" if mend else what,))

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
        offered: Mapping[Dimension, tuple[str, ...]] | None = None,
        status: int = 200,
    ) -> web.Response:
        frame = make_frame(view, self.book.freshness(), report, offered or {}, self.settings)
        shown = {
            "view": view,
            "frame": frame,
            "report": report,
            "static": {plain: f"{view.prefix}/static/{asset.name}" for plain, asset in assets().items()},
            **values,
        }
        body = Body(await asyncio.to_thread(render, template, shown), responses.HTML)
        headers = {"Content-Security-Policy": _POLICY}
        response = await responses.respond(request, body, status=status, headers=headers)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            response.headers[hdrs.RETRY_AFTER] = "15"
        return response
