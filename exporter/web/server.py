"""Answers HTTP requests to the agent: from the newest snapshot, and the request that closes the driver."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from aiohttp import hdrs, web

from exporter.metrics import catalog, text_format
from exporter.metrics.collector import ExpositionOptions, ProcessMetrics, families
from exporter.metrics.text_format import Dropped, Family, Kept
from exporter.model.attribution import MetadataStatus
from exporter.model.devices import SourceState
from exporter.model.snapshot import Snapshot
from exporter.web import node_api, node_page, templating
from exporter.web.access import ALIVE_TOO, address_of, plain
from exporter.web.responses import Bodies, Body, json_body, response_of

LOG = logging.getLogger("exporter.server")
MAX_RELEASE_SECONDS = 3600.0
RELEASE = "/-/release"

_OF_BROWSERS = (hdrs.ORIGIN, hdrs.REFERER, "Sec-Fetch-Site")
_OF_DIRECT_CLIENTS = frozenset(
    {"host", "user-agent", "accept", "accept-encoding", "connection", "content-length", "content-type", "authorization"}
)
"""Headers that curl, wget and Python send. Any other header may be from a proxy or mesh, which share no fixed list."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Renderer:
    """Renders snapshots and counts the series that it leaves out. Not for several threads.

    Args:
        options: Options of the page.
        process_families: Returns the process metrics; tests pass ``list`` for a page without them.
    """

    def __init__(self, options: ExpositionOptions, process_families: Callable[[], list[Family]] | None = None) -> None:
        self._options = options
        self._process_families = process_families or ProcessMetrics().families
        self._dropped = Dropped()
        self._snapshot: Snapshot | None = None
        self._families: list[Family] = []
        self._kept: dict[bool, Kept] = {False: {}, True: {}}
        self._bodies = Bodies()

    def metrics(self, snapshot: Snapshot | None, accept: str = "") -> Body:
        """Return the page for an ``Accept`` header; the same body until the next snapshot, empty without one."""
        if snapshot is None:
            return Body(b"", text_format.PLAIN)
        openmetrics = text_format.negotiate(accept)
        return self._bodies.of(snapshot, openmetrics, lambda: self._body(snapshot, openmetrics=openmetrics))

    def _body(self, snapshot: Snapshot, *, openmetrics: bool) -> Body:
        if snapshot is not self._snapshot:
            own = families(snapshot, self._options, self._dropped)
            self._snapshot, self._families = snapshot, [*own, *self._process_families()]
        page = text_format.render(self._families, openmetrics=openmetrics, kept=self._kept[openmetrics])
        return Body(page, text_format.OPENMETRICS if openmetrics else text_format.PLAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSite:
    """Answers requests for the agent's page, API, metrics and health."""

    snapshot: Callable[[], Snapshot | None]
    """Returns the newest snapshot of the node; ``None`` before the first."""
    renderer: Renderer
    """Renders the metrics of a snapshot."""
    release: Callable[[float], None]
    """Closes the driver for a number of seconds."""
    steady: Callable[[], float] = time.monotonic
    """Monotonic clock of snapshots, in seconds; ``/readyz`` calculates the age of a snapshot from it."""
    cost_service_url: str = ""
    """Address of the cost service, for links of the page; empty without one."""
    bodies: Bodies = field(default_factory=Bodies)

    def app(self) -> web.Application:
        """Return the aiohttp application with all paths."""
        app = web.Application(middlewares=[_plain_errors])
        for path, (handler, _) in PATHS.items():
            add = app.router.add_post if path == RELEASE else app.router.add_get
            add(path, partial(handler, self))
        return app

    async def index(self, request: web.Request) -> web.Response:
        """Return the page."""
        await asyncio.to_thread(templating.load, "exporter.web")  # the loop answers scrapes meanwhile
        snapshot = self.snapshot()
        is_whole = "fragment" not in request.query

        def make() -> Body:
            page = node_page.document(snapshot, self.cost_service_url, is_whole=is_whole)
            return Body(page.encode("utf-8", "replace"), "text/html; charset=utf-8")

        body = self.bodies.of(snapshot, is_whole, make)
        return response_of(request, body, headers={"Content-Security-Policy": node_page.CONTENT_SECURITY_POLICY})

    async def scrape(self, request: web.Request) -> web.Response:
        """Return the metrics."""
        return response_of(request, self.renderer.metrics(self.snapshot(), request.headers.get(hdrs.ACCEPT, "")))

    async def devices(self, request: web.Request) -> web.Response:
        """Return the node as JSON."""
        return self._json(request, node_api.device_document)

    async def ledger(self, request: web.Request) -> web.Response:
        """Return the ledger as JSON."""
        return self._json(request, node_api.ledger_document)

    def _json(self, request: web.Request, document: Callable[[Snapshot], Body]) -> web.Response:
        snapshot = self.snapshot()
        if snapshot is None:
            none = {"error": "no picture of the node yet; ask again in a second"}
            return response_of(request, json_body(none), status=503)
        return response_of(request, self.bodies.of(snapshot, document, lambda: document(snapshot)))

    async def healthz(self, _request: web.Request) -> web.Response:
        """Return 200 while the process answers."""
        return plain(200, "ok")

    async def readyz(self, _request: web.Request) -> web.Response:
        """Return whether the snapshot is fresh, with the reasons and notes on unknown values."""
        snapshot = self.snapshot()
        reasons = _reasons_not_ready(snapshot, self.steady())
        ready = not reasons
        lines = ["ready"] if ready else ["not ready", *(f"- {reason}" for reason in reasons)]
        notes = _notes(snapshot) if snapshot else []
        return plain(200 if ready else 503, "\n".join([*lines, *notes]))

    async def close_driver(self, request: web.Request) -> web.Response:
        """Close the driver for the requested time."""
        refusal = _refusal_of_release(request)
        if refusal:
            return plain(403, refusal)
        text = request.query.get("seconds", "60")
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_RELEASE_SECONDS:
            shown = text.encode("ascii", "backslashreplace").decode()
            return plain(
                400, f"seconds: value '{shown}' is not a time to release for; allowed: more than 0, up to 3600"
            )
        self.release(seconds)
        LOG.info("driver released on request", extra={"seconds": seconds})
        return plain(202, f"the driver is closed for {seconds:g} s; it is opened again by itself")


PATHS: Mapping[str, tuple[Callable[[NodeSite, web.Request], Awaitable[web.Response]], str]] = {
    "/": (NodeSite.index, "this node, for people"),
    "/metrics": (NodeSite.scrape, "this node, for Prometheus"),
    "/api/v1/devices": (NodeSite.devices, "this node, as JSON"),
    "/api/v1/ledger": (NodeSite.ledger, "use and cost of owners since the ledger began, as JSON"),
    "/healthz": (NodeSite.healthz, "200 while the process lives"),
    ALIVE_TOO: (NodeSite.healthz, "the same"),
    "/readyz": (NodeSite.readyz, "200 while the picture is fresh, else 503 with the reasons"),
    RELEASE: (NodeSite.close_driver, "POST, from this host only: close the driver for ?seconds=60"),
}
"""Handler and purpose by path."""


@web.middleware
async def _plain_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Return errors as short texts with a fix."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        listing = "".join(f"  {path:<18}{what}\n" for path, (_, what) in PATHS.items())
        return plain(404, f"nothing here; there is:\n{listing.rstrip()}")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        return plain(405, f"{request.method} is not for this path; allowed: {allowed}", {hdrs.ALLOW: allowed})
    except web.HTTPException:
        raise
    except Exception:
        # An error in one page must not end the process; the log has its cause.
        LOG.exception("request failed", extra={"path": request.path})
        return plain(500, "this page could not be made; the agent's log has the cause")


def _reasons_not_ready(snapshot: Snapshot | None, steady: float) -> tuple[str, ...]:
    if snapshot is None:
        return ("no picture of the node yet",)
    stale = snapshot.stale_reason(steady)  # at the request: after the loop has ended, no new snapshot reports it
    if stale:
        return (stale,)
    return () if snapshot.ready else snapshot.not_ready_reasons or ("no fresh reading",)


def _notes(snapshot: Snapshot) -> list[str]:
    """Return lines on unknown values. The agent is ready in spite of them, since GPUs are measured and metered.

    A wrong --node-name is an error, not a note, because it stays until the flag is changed.
    """
    attribution, metadata = snapshot.attribution, snapshot.metadata or MetadataStatus(known=False)
    down = [source for source in snapshot.sources if snapshot.ready and source.state is not SourceState.UP]
    api_level = "error" if metadata.names_other_node else "note"
    problems = (
        *(("note", source.name, f"{source.state}: {source.message or source.reason}".rstrip(": ")) for source in down),
        ("note", attribution.source, attribution.problem),
        (api_level, "kubernetes-api", metadata.problem),
        ("note", "kubernetes-api", metadata.remark),
        ("note", "ledger", snapshot.metering.lock_note),
    )
    notes = [f"{level}: {part}: {problem}" for level, part, problem in problems if problem]
    notes += [
        f"note: pods: {count} with labels, annotations or owners that are not understood: {reason}; doctor names one"
        for reason, count in catalog.problems(snapshot).items()
    ]
    return notes


def _refusal_of_release(request: web.Request) -> str:
    """Return why this request may not release the driver; empty if it may."""
    if not _is_local(request):
        return "only this host may release the driver: kubectl exec into the agent's pod"
    if any(name in request.headers for name in _OF_BROWSERS):
        # Any site in a browser on this host, or at the end of a port-forward, could send this request.
        return "no page of a browser may release the driver: ask with curl, from this host"
    if not {name.lower() for name in request.headers} <= _OF_DIRECT_CLIENTS:
        # A proxy next to the agent, such as kube-rbac-proxy, makes every client local.
        return "the driver is not released through a proxy: ask the agent itself, from this host, without other headers"
    return ""


def _is_local(request: web.Request) -> bool:
    """Return whether the peer of the connection is this host. Headers do not count, since any client can set them."""
    found = address_of(request.transport.get_extra_info("peername") if request.transport else None)
    return found is not None and found.is_loopback
