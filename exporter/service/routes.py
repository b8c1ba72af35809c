"""The service's HTTP face: pages, API, metrics and health under one application that only reads."""

import asyncio
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Middleware

from exporter.cost.ledger import Now
from exporter.errors import ConfigError, ExporterError, PrometheusError
from exporter.service import responses
from exporter.service.api import Ask, Endpoint
from exporter.service.data import Book
from exporter.service.openapi import ENDPOINTS, document
from exporter.service.pages import add_pages
from exporter.service.parameters import read
from exporter.service.report_cache import CLIENT
from exporter.service.settings import ServeSettings
from exporter.web.responses import Bodies, Body

LOG = logging.getLogger("exporter.service")
RETRY_AFTER_SECONDS = 15

_PREFIX_BITS = 64
"""One host of IPv6 has that many addresses of its own."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
SETTINGS = web.AppKey("SETTINGS", ServeSettings)
_API = ("/api/", "/allocation", "/assets", "/model/", "/metrics", "/healthz", "/readyz", "/openapi.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Face:
    """What the application shows besides the book. Every default is for a service that has nothing of it."""

    metrics: Callable[[str], Body] = field(default=lambda _: Body(b"", responses.TEXT))
    """From an Accept header to the body of ``/metrics``."""
    ready: Callable[[], bool] = field(default=lambda: True)
    """Whether the first look at store and Prometheus is over, however it went."""


def create_app(book: Book, settings: ServeSettings, face: Face) -> web.Application:
    """The service as an aiohttp application; it answers under ``/`` and under the prefix of ``external_url``."""
    app = _one_app(book, settings, face, [_own_host, _known_client, _plain_errors])
    if settings.path_prefix:
        # People write an address without the slash at its end.
        app.router.add_get(settings.path_prefix, partial(_redirect, to=f"{settings.path_prefix}/"))
        app.add_subapp(settings.path_prefix, _one_app(book, settings, face, []))
    return app


def _one_app(book: Book, settings: ServeSettings, face: Face, middlewares: list[Middleware]) -> web.Application:
    app = web.Application(middlewares=middlewares)
    app[SETTINGS] = settings

    async def healthz(request: web.Request) -> web.Response:
        return await responses.respond(request, Body(b"ok\n", responses.TEXT), cache="no-store")

    async def readyz(request: web.Request) -> web.Response:
        ready = face.ready()
        problem = book.freshness().problem
        lines = ["ready" if ready else "not ready: the first look at the store and at Prometheus is not over"]
        lines += [f"note: {problem}"] if problem else []
        text = "".join(f"{line}\n" for line in lines)
        body = Body(text.encode(), responses.TEXT)
        return await responses.respond(request, body, status=200 if ready else 503, cache="no-store")

    async def metrics(request: web.Request) -> web.Response:
        body = face.metrics(request.headers.get(hdrs.ACCEPT, ""))
        return await responses.respond(request, body, cache="no-store")

    async def openapi(request: web.Request) -> web.Response:
        return await responses.respond(
            request, responses.json_body(document(settings.serving.title, settings.path_prefix))
        )

    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/openapi.json", openapi)
    bodies = Bodies()
    for endpoint in ENDPOINTS:
        app.router.add_get(endpoint.path, _handler(endpoint, book, bodies, settings))
    add_pages(app, book, settings)
    return app


def _handler(
    endpoint: Endpoint, book: Book, bodies: Bodies, settings: ServeSettings
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        now = book.freshness().now_seconds
        ignored: list[str] = []
        lenient = ignored if endpoint.ignores_unknown else None
        values = read(endpoint.parameters, request.query.items(), Now(now, settings.books.timezone), lenient)
        ask = Ask(values=values, book=book, bodies=bodies, settings=settings, ignored=tuple(ignored))
        answer = await endpoint.handle(ask)
        body, filename = answer if isinstance(answer, tuple) else (answer, "")
        if not isinstance(body, Body):
            body = await asyncio.to_thread(responses.json_body, body)
        headers: dict[str, str] = {}
        if filename:
            headers[hdrs.CONTENT_DISPOSITION] = f'attachment; filename="{filename}"'
        return await responses.respond(request, body, headers=headers)

    return handle


async def _redirect(request: web.Request, *, to: str) -> web.Response:
    headers: dict[str, str] = {hdrs.LOCATION: str(request.rel_url.with_path(to).with_query(request.query))}
    return await responses.respond(request, Body(b"", responses.TEXT), status=308, headers=headers)


@web.middleware
async def _own_host(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Refuse names that are not the service's, so that a DNS name that is rebound to it reads nothing."""
    settings = request.app[SETTINGS]
    address = settings.serving.external_url
    if address and not _is_own(request.headers.get(hdrs.HOST, ""), address):
        words = f"this service is {address}; ask for it by that name, its address or its *.svc name\n"
        return web.Response(status=web.HTTPMisdirectedRequest.status_code, text=words)
    return await handler(request)


@web.middleware
async def _known_client(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Remember the client of a request: one client must leave room for others."""
    CLIENT.set(client_of(request.transport.get_extra_info("peername") if request.transport else None))
    return await handler(request)


def client_of(address: object) -> str:
    """Return a client's name: an IPv4 address, or the network of an IPv6 one; empty where there is none.

    Args:
        address: As a transport has it.
    """
    if not isinstance(address, tuple) or not address:
        return ""
    text = str(address[0])
    if ":" not in text:
        return text
    try:
        found = ipaddress.IPv6Address(text)
    except ValueError:
        return text
    if found.ipv4_mapped:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> _PREFIX_BITS << _PREFIX_BITS, _PREFIX_BITS)))


def _is_own(host: str, external_url: str) -> bool:
    """Whether a Host header names the service; no public DNS name is a literal address, or ends in ``.svc``."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        own = (urlsplit(external_url).hostname or "").rstrip(".")
        if name in {"", "localhost", own} or name.endswith((".localhost", ".svc", ".svc.cluster.local")):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@web.middleware
async def _plain_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Turn errors into answers with the fix."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = await _problem(request, 405, (f"{request.method} is not for this path; allowed: {allowed}",))
        response.headers[hdrs.ALLOW] = allowed
        return response
    except web.HTTPNotFound:
        prefix = request.app[SETTINGS].path_prefix
        what = (
            f"{request.path}: no page or API has this address; pages start at {prefix}/, the API is"
            f" described at {prefix}/api and {prefix}/openapi.json;"
            " of the APIs of OpenCost and Kubecost there are allocation, assets and getConfigs, for GPUs only"
        )
        return await _problem(request, 404, (what,))
    except web.HTTPException:
        raise
    except Exception as error:
        status, problems = _status_of(error)
        if status == web.HTTPInternalServerError.status_code:
            # A page that cannot be made must not end the process, nor hide: it is logged with its cause.
            LOG.exception("request failed", extra={"path": request.path})
        return await _problem(request, status, problems)


def _status_of(error: Exception) -> tuple[int, tuple[str, ...]]:
    """Status and problems: what the user wrote, what cannot be asked now, what is broken."""
    if isinstance(error, ConfigError):
        return 400, error.problems
    if isinstance(error, PrometheusError):
        return 503, (str(error),)
    if isinstance(error, ExporterError):
        return 500, (str(error),)
    return 500, ("this could not be answered; the service's log has the cause",)


async def _problem(request: web.Request, status: int, problems: tuple[str, ...]) -> web.Response:
    page = request.app.get(responses.ERROR_PAGE)
    path = request.path.removeprefix(request.app[SETTINGS].path_prefix)
    for_people = "text/html" in request.headers.get(hdrs.ACCEPT, "") and not path.startswith(_API)
    found = responses.problem_document(problems, status)
    if page and for_people:
        response = await page(request, status, found["error"], found["fix"])
    else:
        response = await responses.respond(request, responses.json_body(found), status=status)
    if status == web.HTTPServiceUnavailable.status_code:
        response.headers[hdrs.RETRY_AFTER] = str(RETRY_AFTER_SECONDS)
    return response
