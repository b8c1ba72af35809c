"""The agent's HTTP face: what shows the newest snapshot, and the one request that closes the driver."""

import asyncio
import ipaddress
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import hdrs, web

from exporter.metrics import catalog, text_format
from exporter.metrics.catalog import exported_labels
from exporter.metrics.collector import ExpositionOptions, build
from exporter.metrics.process import ProcessMetrics
from exporter.metrics.text_format import Block, Dropped, Family, forget_unused
from exporter.model import MetadataStatus, Snapshot, SourceState
from exporter.web import node_api, node_page, templating
from exporter.web.access import ALIVE_TOO
from exporter.web.responses import Bodies, Body, response_of

LOG = logging.getLogger("exporter.server")
MAX_RELEASE_SECONDS = 3600.0

PATHS: tuple[tuple[str, str], ...] = (
    ("/", "this node, for people"),
    ("/metrics", "this node, for Prometheus"),
    ("/api/v1/devices", "this node, as JSON"),
    ("/api/v1/ledger", "use and cost of owners since the ledger began, as JSON"),
    ("/healthz", "200 while the process lives"),
    ("/readyz", "200 while the picture is fresh, else 503 with the reasons"),
    ("/-/release", "POST, from this host only: close the driver for ?seconds=60"),
)
_OF_BROWSERS = (hdrs.ORIGIN, hdrs.REFERER, "Sec-Fetch-Site")
_OF_DIRECT_CLIENTS = frozenset(
    {"host", "user-agent", "accept", "accept-encoding", "connection", "content-length", "content-type", "authorization"}
)
"""Headers that curl, wget and Python send. Proxies and meshes have no common list: any other header may be theirs."""
_TEXT = "text/plain; charset=utf-8"
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class _Face:
    """What the handlers share: callbacks, and the bodies that show the newest snapshot."""

    snapshot: Callable[[], Snapshot | None]
    metrics: Callable[[str], Body]
    release: Callable[[float], None]
    steady: Callable[[], float]
    cost_service_url: str
    bodies: Bodies = field(default_factory=Bodies)

    async def index(self, request: web.Request) -> web.Response:
        await asyncio.to_thread(templating.load, "exporter.web")  # scrapes are answered meanwhile
        snapshot = self.snapshot()
        made = node_page.fragment if "fragment" in request.query else node_page.document
        body = self.bodies.of(
            snapshot,
            made,
            lambda: Body(made(snapshot, self.cost_service_url).encode("utf-8", "replace"), "text/html; charset=utf-8"),
        )
        return response_of(request, body, headers={"Content-Security-Policy": node_page.CONTENT_SECURITY_POLICY})

    async def scrape(self, request: web.Request) -> web.Response:
        return response_of(request, self.metrics(request.headers.get(hdrs.ACCEPT, "")))

    async def devices(self, request: web.Request) -> web.Response:
        return self._json(request, node_api.device_document)

    async def ledger(self, request: web.Request) -> web.Response:
        return self._json(request, node_api.ledger_document)

    def _json(self, request: web.Request, document: Callable[[Snapshot], bytes]) -> web.Response:
        snapshot = self.snapshot()
        if snapshot is None:
            none = b'{"error":"no picture of the node yet; ask again in a second"}'
            return response_of(request, Body(none, "application/json"), status=503)
        body = self.bodies.of(snapshot, document, lambda: Body(document(snapshot), "application/json"))
        return response_of(request, body)

    async def healthz(self, request: web.Request) -> web.Response:
        return response_of(request, Body(b"ok\n", _TEXT))

    async def readyz(self, request: web.Request) -> web.Response:
        snapshot = self.snapshot()
        reasons = _reasons_not_ready(snapshot, self.steady())
        ready = not reasons
        lines = ["ready"] if ready else ["not ready", *(f"- {reason}" for reason in reasons)]
        notes = _notes(snapshot) if snapshot else []
        return _text(request, 200 if ready else 503, "\n".join([*lines, *notes]))

    async def close_driver(self, request: web.Request) -> web.Response:
        refusal = _refusal_of_release(request)
        if refusal:
            return _text(request, 403, refusal)
        text = request.query.get("seconds", "60")
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_RELEASE_SECONDS:
            shown = text.encode("ascii", "backslashreplace").decode()
            return _text(
                request, 400, f"seconds: value '{shown}' is not a time to release for; allowed: more than 0, up to 3600"
            )
        self.release(seconds)
        LOG.info("driver released on request", extra={"seconds": seconds})
        return _text(request, 202, f"the driver is closed for {seconds:g} s; it is opened again by itself")


def create_app(
    *,
    snapshot: Callable[[], Snapshot | None],
    metrics: Callable[[str], Body],
    release: Callable[[float], None],
    steady: Callable[[], float] = time.monotonic,
    cost_service_url: str = "",
) -> web.Application:
    """The agent's pages as an aiohttp application.

    Args:
        snapshot: The newest picture of the node; ``None`` before the first.
        metrics: From an Accept header to the body of ``/metrics``.
        release: Closes the driver for so many seconds.
        steady: The monotonic clock of snapshots, in seconds; ``/readyz`` judges a snapshot's age by it.
        cost_service_url: Address of the cost service, for links of the page; empty without one.
    """
    face = _Face(snapshot, metrics, release, steady, cost_service_url)
    app = web.Application(middlewares=[_plain_errors])
    app.router.add_get("/", face.index)
    app.router.add_get("/metrics", face.scrape)
    app.router.add_get("/api/v1/devices", face.devices)
    app.router.add_get("/api/v1/ledger", face.ledger)
    app.router.add_get("/healthz", face.healthz)
    app.router.add_get(ALIVE_TOO, face.healthz)
    app.router.add_get("/readyz", face.readyz)
    app.router.add_post("/-/release", face.close_driver)
    return app


@web.middleware
async def _plain_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Turn errors into a few words that explain what to do instead."""
    try:
        return await handler(request)
    except web.HTTPNotFound:
        listing = "".join(f"  {path:<18}{what}\n" for path, what in PATHS)
        return _text(request, 404, f"nothing here; there is:\n{listing.rstrip()}")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = _text(request, 405, f"{request.method} is not for this path; allowed: {allowed}")
        response.headers[hdrs.ALLOW] = allowed
        return response
    except web.HTTPException:
        raise
    except Exception:
        # A page that cannot be made must not end the process, nor hide: it is logged with its cause.
        LOG.exception("request failed", extra={"path": request.path})
        return _text(request, 500, "this page could not be made; the agent's log has the cause")


def _reasons_not_ready(snapshot: Snapshot | None, steady: float) -> tuple[str, ...]:
    if snapshot is None:
        return ("no picture of the node yet",)
    stale = snapshot.stale_reason(steady)  # judged now: a loop that has ended makes no snapshot that says so
    if stale:
        return (stale,)
    return () if snapshot.ready else snapshot.not_ready_reasons or ("no fresh reading",)


def _notes(snapshot: Snapshot) -> list[str]:
    """What is known less of: no reason not to be ready, since GPUs are measured and metered all the same.

    A wrong --node-name is an error among them: it does not pass by itself.
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
    """Why this request may not release the driver; empty where it may."""
    if not _is_local(request):
        return "only this host may release the driver: kubectl exec into the agent's pod"
    if any(name in request.headers for name in _OF_BROWSERS):
        # Any site that a browser here has open, or one behind a port-forward, could ask for it.
        return "no page of a browser may release the driver: ask with curl, from this host"
    if not {name.lower() for name in request.headers} <= _OF_DIRECT_CLIENTS:
        # A proxy next to the agent, such as kube-rbac-proxy, makes every client local.
        return "the driver is not released through a proxy: ask the agent itself, from this host, without other headers"
    return ""


def _is_local(request: web.Request) -> bool:
    """Whether the peer of the connection is this host; headers are not asked, since anyone can write them."""
    peer = request.transport.get_extra_info("peername") if request.transport else None
    if not isinstance(peer, tuple):
        return False
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return address.is_loopback


def _text(request: web.Request, status: int, text: str) -> web.Response:
    return response_of(request, Body(f"{text}\n".encode("utf-8", "replace"), _TEXT), status=status)


_TURN_PAGES = 20
"""Label sets that so many pages did without are forgotten; looking all of them over costs a page half a millisecond."""


class Renderer:
    """Renders snapshots and counts what it had to leave out. Not for several threads.

    Args:
        options: How snapshots are shown.
        process_families: Gives the process metrics; tests pass ``list`` for a page without them.
    """

    def __init__(self, options: ExpositionOptions, process_families: Callable[[], list[Family]] | None = None) -> None:
        self._options = options
        self._process_families = process_families or ProcessMetrics().families
        self._dropped = Dropped()
        self._snapshot: Snapshot | None = None
        self._blocks: dict[str, Block] = {}
        self._built = 0
        self._bodies = Bodies()

    def metrics(self, snapshot: Snapshot, accept: str = "") -> Body:
        """The page for an ``Accept`` header; the same body until the next snapshot."""
        openmetrics = text_format.negotiate(accept)
        return self._bodies.of(snapshot, openmetrics, lambda: self._body(snapshot, openmetrics=openmetrics))

    def _body(self, snapshot: Snapshot, *, openmetrics: bool) -> Body:
        if snapshot is not self._snapshot:
            self._build(snapshot)
        page = text_format.page(self._blocks.values(), openmetrics=openmetrics)
        return Body(page, text_format.OPENMETRICS if openmetrics else text_format.PLAIN)

    def _build(self, snapshot: Snapshot) -> None:
        self._built += 1
        if self._built % _TURN_PAGES == 0:
            forget_unused()
            exported_labels.cache_clear()
        families, self._dropped = build(snapshot, self._options, self._dropped)
        before, self._blocks = self._blocks, {}
        for family in (*families, *self._process_families()):
            block = before.get(family.name)
            if block is None:
                block = Block(family)
            else:
                block.show(family)
            self._blocks[family.name] = block
        self._snapshot = snapshot
