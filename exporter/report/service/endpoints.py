"""Every path of the API, and how a request becomes a question and an answer a response."""

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from exporter.exposition.responses import Bodies
from exporter.report.fleet.windows import Now
from exporter.report.service import allocation, api, responses
from exporter.report.service.api import Ask, Endpoint
from exporter.report.service.book import Book
from exporter.report.service.parameters import read
from exporter.report.service.settings import ServeSettings

ENDPOINTS: tuple[Endpoint, ...] = (*api.ENDPOINTS, *allocation.ENDPOINTS)


def add_endpoints(app: web.Application, book: Book, settings: ServeSettings, clock: Callable[[], float]) -> None:
    """Answer every path of the API; ``clock`` gives Unix seconds."""
    bodies = Bodies()
    for endpoint in ENDPOINTS:
        app.router.add_get(endpoint.path, _handler(endpoint, book, bodies, settings, clock))


def _handler(
    endpoint: Endpoint, book: Book, bodies: Bodies, settings: ServeSettings, clock: Callable[[], float]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        now = clock()
        ignored: list[str] = []
        lenient = ignored if endpoint.ignores_unknown else None
        values = read(endpoint.parameters, request.query.items(), Now(now, settings.timezone), lenient)
        ask = Ask(values=values, book=book, bodies=bodies, settings=settings, now_seconds=now, ignored=tuple(ignored))
        answer = await endpoint.handle(ask)
        headers: dict[str, str] = {}
        if answer.filename:
            headers[hdrs.CONTENT_DISPOSITION] = f'attachment; filename="{answer.filename}"'
        return await responses.respond(request, answer.body, headers=headers)

    return handle
