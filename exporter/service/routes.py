"""Routes HTTP requests to pages, API, metrics and health, in one read-only application."""

import asyncio
import ipaddress
import logging
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from exporter.errors import ConfigError, ExporterError, PrometheusError
from exporter.metrics.collector import ProcessMetrics
from exporter.service import responses
from exporter.service.api import Ask, Endpoint
from exporter.service.cache import CLIENT
from exporter.service.fleet import Fleet
from exporter.service.metrics import render
from exporter.service.openapi import ENDPOINTS, document
from exporter.service.pages import Pages
from exporter.service.parameters import read
from exporter.service.settings import ServeSettings
from exporter.web.access import address_of, plain
from exporter.web.responses import Bodies, Body, json_body, response_of

LOG = logging.getLogger("exporter.service")
_PREFIX_BITS = 64
"""Bits of the network of an IPv6 host, which may use any of its addresses."""
_API = ("/api/", "/allocation", "/assets", "/model/", "/metrics", "/healthz", "/readyz", "/openapi.json")


def create_app(fleet: Fleet, settings: ServeSettings) -> web.Application:
    """Return the service as an aiohttp application, under ``/`` and under the prefix of ``external_url``."""
    site = _Site(fleet=fleet, settings=settings, pages=Pages(fleet=fleet, settings=settings))
    app = site.app([site.own_host, _known_client, site.plain_errors])
    if settings.path_prefix:
        # Users type the address without the slash at its end.
        app.router.add_get(settings.path_prefix, partial(_redirect, to=f"{settings.path_prefix}/"))
        app.add_subapp(settings.path_prefix, site.app([]))
    return app


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """The handlers of the service, and their shared state."""

    fleet: Fleet
    settings: ServeSettings
    pages: Pages
    bodies: Bodies = field(default_factory=Bodies)
    process: ProcessMetrics = field(default_factory=ProcessMetrics)

    def app(self, middlewares: list[Middleware]) -> web.Application:
        app = web.Application(middlewares=middlewares)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/readyz", self.readyz)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/openapi.json", self.openapi)
        for endpoint in ENDPOINTS:
            app.router.add_get(endpoint.path, partial(self.answer, endpoint=endpoint))
        self.pages.add_to(app)
        return app

    async def healthz(self, _request: web.Request) -> web.Response:
        return plain(200, "ok")

    async def readyz(self, _request: web.Request) -> web.Response:
        problem = self.fleet.freshness().problem
        note = f"\nnote: {problem}" if problem else ""
        if self.fleet.looked:
            return plain(200, f"ready{note}")
        return plain(503, f"not ready: the first read of the store and of Prometheus is not complete{note}")

    async def metrics(self, request: web.Request) -> web.Response:
        accept = request.headers.get(hdrs.ACCEPT, "")
        return response_of(request, render(self.fleet, accept, self.process))

    async def openapi(self, request: web.Request) -> web.Response:
        described = document(self.settings.serving.title, self.settings.path_prefix)
        return await responses.respond(request, json_body(described))

    async def answer(self, request: web.Request, *, endpoint: Endpoint) -> web.Response:
        """Return the answer of an endpoint of the API."""
        ignored: list[str] = []
        lenient = ignored if endpoint.ignores_unknown else None
        values = read(endpoint.parameters, request.query.items(), self.fleet.now(), lenient)
        ask = Ask(values=values, fleet=self.fleet, bodies=self.bodies, settings=self.settings, ignored=tuple(ignored))
        found = await endpoint.handle(ask)
        body = found if isinstance(found, Body) else await asyncio.to_thread(json_body, found)
        return await responses.respond(request, body)

    @web.middleware
    async def own_host(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse other host names, so that DNS rebinding cannot read data of the service."""
        address = self.settings.serving.external_url
        if address and not _is_own(request.headers.get(hdrs.HOST, ""), address):
            words = f"this service is {address}; ask for it by that name, its address or its *.svc name"
            return plain(web.HTTPMisdirectedRequest.status_code, words)
        return await handler(request)

    @web.middleware
    async def plain_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Convert errors to answers that contain the fix."""
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            response = await self._problem(
                request, 405, (f"{request.method} is not for this path; allowed: {allowed}",)
            )
            response.headers[hdrs.ALLOW] = allowed
            return response
        except web.HTTPNotFound:
            prefix = self.settings.path_prefix
            what = (
                f"{request.path}: no page or API has this address; pages start at {prefix}/, the API is"
                f" described at {prefix}/api and {prefix}/openapi.json;"
                " of the APIs of OpenCost and Kubecost there are allocation, assets and getConfigs, for GPUs only"
            )
            return await self._problem(request, 404, (what,))
        except web.HTTPException:
            raise
        except ConfigError as error:
            return await self._problem(request, 400, error.problems)
        except PrometheusError as error:
            return await self._problem(request, 503, (str(error),))
        except Exception as error:
            # An error in a page must not end the process, and is logged with its traceback.
            LOG.exception("request failed", extra={"path": request.path})
            is_ours = isinstance(error, ExporterError)
            words = str(error) if is_ours else "this could not be answered; the service's log has the cause"
            return await self._problem(request, 500, (words,))

    async def _problem(self, request: web.Request, status: int, problems: tuple[str, ...]) -> web.Response:
        path = request.path.removeprefix(self.settings.path_prefix)
        if "text/html" in request.headers.get(hdrs.ACCEPT, "") and not path.startswith(_API):
            return await self.pages.error_page(request, status, problems)
        return await responses.respond(request, json_body(responses.problem_document(problems, status)), status=status)


async def _redirect(request: web.Request, *, to: str) -> web.Response:
    headers: dict[str, str] = {hdrs.LOCATION: str(request.rel_url.with_path(to).with_query(request.query))}
    return await responses.respond(request, Body(b"", responses.TEXT), status=308, headers=headers)


@web.middleware
async def _known_client(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Store the client of a request for the limit on readings per client."""
    CLIENT.set(client_of(request.transport.get_extra_info("peername") if request.transport else None))
    return await handler(request)


def client_of(peer: object) -> str:
    """Return a client's name: an IPv4 address, or the network of an IPv6 address; empty if unknown.

    Args:
        peer: Peer name of the transport.
    """
    found = address_of(peer)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(found), _PREFIX_BITS), strict=False))
    return str(found or "")


def _is_own(host: str, external_url: str) -> bool:
    """Return whether a Host header names the service; no public DNS name is an IP address or ends in ``.svc``."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        own = (urlsplit(external_url).hostname or "").rstrip(".")
        if name in {"", "localhost", own} or name.endswith((".localhost", ".svc", ".svc.cluster.local")):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
