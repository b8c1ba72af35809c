"""A simulated Kubernetes API server: real HTTP, list, watch and get over the objects of the instant."""

import asyncio
import contextlib
import json
import re
import secrets
import ssl
from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from gpu_simulator.api_objects import ApiObjects, Json, ObjectChange, Store
from gpu_simulator.truth import Fault

Selector = Callable[[Json], bool]
_TERM = re.compile(r"\s*([A-Za-z.]+)\s*(!=|==|=)\s*([^=!]*)\s*")
_FIELDS = {
    "pods": {"metadata.name", "metadata.namespace", "spec.nodeName", "status.phase"},
    "resourceslices": {"metadata.name", "spec.nodeName", "spec.driver"},
}
_KINDS = {"pods": ("v1", "Pod"), "resourceslices": ("resource.k8s.io/", "ResourceSlice")}


def selector(resource: str, text: str) -> Selector:
    """Read a ``fieldSelector``.

    Raises:
        ValueError: For a field that the API cannot select by.
    """
    terms = []
    for part in filter(None, text.split(",")):
        found = _TERM.fullmatch(part)
        if found is None or found[1] not in _FIELDS[resource]:
            raise ValueError(f"field label not supported: {part}")
        terms.append((found[1].split("."), found[2] != "!=", found[3]))
    return lambda shown: all((_field(shown, path) == value) is equal for path, equal, value in terms)


def one(shown: Json, *, metadata_only: bool) -> Json:
    """Show an object whole or as ``PartialObjectMetadata``."""
    if not metadata_only:
        return shown
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": shown["metadata"]}


def listed(resource: str, items: Iterable[Json], version: int, *, metadata_only: bool, dra_version: str) -> Json:
    """Make a list; its items have no kind of their own, as in the real one, except in the metadata form."""
    api, kind = _KINDS[resource]
    if metadata_only:
        api, kind = "meta.k8s.io/v1", "PartialObjectMetadata"
    elif api.endswith("/"):
        api += dra_version
    shown = [one(each, metadata_only=metadata_only) for each in items]
    if not metadata_only:
        shown = [{key: value for key, value in each.items() if key not in {"kind", "apiVersion"}} for each in shown]
    return {
        "kind": f"{kind}List",
        "apiVersion": api,
        "metadata": {"resourceVersion": str(version)},
        "items": shown,
    }


def event(change: ObjectChange, wanted: Selector, *, metadata_only: bool) -> bytes | None:
    """Make the line by which a watch is told of a change; ``None`` where it does not concern the watch."""
    before = change.before if change.before is not None and wanted(change.before) else None
    after = change.after if change.after is not None and wanted(change.after) else None
    shown = after if after is not None else before
    if shown is None:
        return None
    kind = "DELETED" if after is None else "ADDED" if before is None else "MODIFIED"
    metadata = {**shown["metadata"], "resourceVersion": str(change.version)}
    return event_line(kind, one({**shown, "metadata": metadata}, metadata_only=metadata_only))


def bookmark(resource: str, version: int, *, metadata_only: bool) -> bytes:
    """Make the line that tells a watch how far it has come."""
    api, kind = ("meta.k8s.io/v1", "PartialObjectMetadata") if metadata_only else _KINDS[resource]
    shown: dict[str, Any] = {
        "kind": kind,
        "apiVersion": api,
        "metadata": {"resourceVersion": str(version), "creationTimestamp": None},
    }
    if resource == "pods" and not metadata_only:
        shown |= {"spec": {"containers": None}, "status": {}}
    return event_line("BOOKMARK", shown)


def status(code: int, reason: str, message: str) -> Json:
    """Make the body of a refusal."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def expired(version: int, oldest: int) -> Json:
    """Make the status for a resource version that is too old."""
    return status(410, "Expired", f"too old resource version: {version} ({oldest})")


def event_line(kind: str, shown: Json) -> bytes:
    """Make one line of a watch."""
    return json.dumps({"type": kind, "object": shown}, separators=(",", ":")).encode() + b"\n"


def _field(shown: Json, path: Iterable[str]) -> str:
    value: Any = shown
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value)


_HALF_A_LINE = b'{"type":"MODIFIED","object":{"kind":"Pod","metadata":{"na'


@dataclass(slots=True, kw_only=True)
class ClientWatch:
    """What a client asked for, and how far it has been served."""

    resource: str
    wanted: Selector
    version: int
    """Of the last change sent; 0 begins with all objects that there are."""
    metadata_only: bool
    bookmark_seconds: float | None
    """``None``: no bookmarks."""
    lifetime_seconds: float
    has_news: bool = False
    """Whether an object of the resource has changed since the last bookmark: without that a server sends none."""

    async def serve(
        self,
        stream: web.StreamResponse,
        store: Store,
        faults: Callable[[], Mapping[Fault, float]],
        ticked: asyncio.Condition,
    ) -> None:
        """Write events until the watch's time is up or a fault ends it."""
        clock = asyncio.get_running_loop().time
        ends_at = clock() + self.lifetime_seconds
        bookmark_at = clock() + (self.bookmark_seconds or 0.0)
        for line in self._first(store):
            await stream.write(line)
        while clock() < ends_at:
            now = faults()
            if Fault.API_CUT in now:
                await stream.write(_HALF_A_LINE)
                return
            if Fault.API_GONE in now or self.version < store.oldest:
                await stream.write(event_line("ERROR", expired(self.version, store.oldest)))
                return
            if Fault.API_SILENT not in now:
                for line in self._news(store):
                    await stream.write(line)
                if self.bookmark_seconds is not None and clock() >= bookmark_at and self.has_news:
                    bookmark_at, self.has_news = clock() + self.bookmark_seconds, False
                    await stream.write(bookmark(self.resource, self.version, metadata_only=self.metadata_only))
            async with ticked:
                await ticked.wait()

    def _first(self, store: Store) -> Iterator[bytes]:
        if self.version:
            return
        self.version = store.version
        for shown in store.list(self.resource):
            first = ObjectChange(version=store.version, resource=self.resource, before=None, after=shown)
            if line := event(first, self.wanted, metadata_only=self.metadata_only):
                yield line

    def _news(self, store: Store) -> Iterator[bytes]:
        for change in tuple(store.changes(self.resource, self.version)):
            self.has_news = True
            if line := event(change, self.wanted, metadata_only=self.metadata_only):
                yield line
        self.version = store.version


__all__ = ["ApiObjects", "ApiServer"]

TICK_SECONDS = 0.1
BOOKMARK_SECONDS = 60.0
_LONGEST_WATCH_SECONDS = 1800.0
_DRA = "/apis/resource.k8s.io"
_GARBAGE = "<html>simulated proxy error</html>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """A certificate that is its own authority, and its key, as PEM files."""

    certificate: Path
    key: Path


class ApiServer:
    """Serves the objects on loopback, to those who show the bearer token, and follows the faults ``API_*``.

    Args:
        objects: What there is now; returning the same object says that nothing changed.
        faults: The faults now, with their parameters.
        token_file: Where the token is written, for clients to read; a new one when API_UNAUTHORISED begins.
        kubeconfig: Where a kubeconfig is written that points to the server and the token's file.
        port: 0 for a free one, which is kept from then on.
        metadata_forms: Whether the metadata-only form is known; a proxy may answer in plain form.
        bookmark_seconds: Between two bookmarks of one watch.
        tls: Without it the server speaks plain HTTP.
    """

    def __init__(
        self,
        objects: Callable[[], ApiObjects],
        faults: Callable[[], Mapping[Fault, float]],
        *,
        token_file: Path,
        kubeconfig: Path,
        port: int = 0,
        metadata_forms: bool = True,
        bookmark_seconds: float = BOOKMARK_SECONDS,
        tls: ServerTls | None = None,
    ) -> None:
        self._objects = objects
        self._faults = faults
        self._token_file = token_file
        self._kubeconfig = kubeconfig
        self._port = port
        self._metadata_forms = metadata_forms
        self._bookmark_seconds = bookmark_seconds
        self._tls = tls
        self._store = Store()
        self._token = ""
        self._refused_before = False
        self._runner: web.AppRunner | None = None
        self._follower: asyncio.Task[None] | None = None
        self._ticked = asyncio.Condition()
        self._streams: set[web.StreamResponse] = set()
        self.requests: Counter[str] = Counter()
        """By verb and resource: ``list pods``, ``watch pods``, ``get node``; refused ones too."""
        self.without_token = 0
        """Requests that came without any token."""
        self.most_streams = 0
        """The most that were open at once."""
        self.forbidden: set[str] = set()
        """Resources that the role leaves out, named as in ``requests``: ``pods``, ``node``, ``resourceclaim``."""

    @property
    def url(self) -> str:
        """Where it listens, or listened last."""
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self._port}"

    @property
    def open_streams(self) -> int:
        """Watches that are open now."""
        return len(self._streams)

    async def start(self) -> None:
        """Listen, write token and kubeconfig, and follow objects and faults from now on."""
        if self._follower is not None:
            return
        if not self._token:
            self.rotate()
        self._store.follow(self._objects())
        if Fault.API_DOWN not in self._faults() or not self._port:
            await self._open()  # also to get a port that the kubeconfig can name
        self._write_kubeconfig()
        await self._tick()
        self._follower = asyncio.create_task(self._follow(), name="simulated API server")

    async def stop(self) -> None:
        """Close the port and break all streams."""
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
            self._follower = None
        await self._close()

    async def restart(self) -> None:
        """Stop and start, as an upgrade of the server does: the objects stay, what happened before is forgotten."""
        await self.stop()
        self._store.follow(self._objects())
        self._store.forget()
        await self.start()

    def rotate(self) -> None:
        """Accept another token from now on, and write it to its file."""
        self._token = secrets.token_hex(16)
        self._token_file.parent.mkdir(parents=True, exist_ok=True)
        self._token_file.write_text(self._token + "\n", encoding="utf-8")

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            await self._tick()

    async def _tick(self) -> None:
        faults = self._look()
        if Fault.API_DOWN in faults and self._runner is not None:
            await self._close()
        elif Fault.API_DOWN not in faults and self._runner is None:
            await self._open()
        async with self._ticked:
            self._ticked.notify_all()

    def _look(self) -> Mapping[Fault, float]:
        """Take what there is now."""
        self._store.follow(self._objects())
        faults = self._faults()
        if Fault.API_UNAUTHORISED in faults and not self._refused_before:
            self.rotate()
        self._refused_before = Fault.API_UNAUTHORISED in faults
        return faults

    async def _open(self) -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", self._handle)
        # Without cancellation a watch would outlive its client until the next event.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.05)
        await runner.setup()
        context = None
        if self._tls is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._tls.certificate, self._tls.key)
        await web.TCPSite(runner, "127.0.0.1", self._port, ssl_context=context).start()
        self._port = int(runner.addresses[0][1])
        self._runner = runner

    async def _close(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    def _write_kubeconfig(self) -> None:
        cluster = {"server": self.url}
        if self._tls is not None:
            cluster["certificate-authority-data"] = b64encode(self._tls.certificate.read_bytes()).decode()
        written = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "simulated",
            "contexts": [{"name": "simulated", "context": {"cluster": "simulated", "user": "simulated"}}],
            "clusters": [{"name": "simulated", "cluster": cluster}],
            "users": [{"name": "simulated", "user": {"tokenFile": str(self._token_file.absolute())}}],
        }
        self._kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        self._kubeconfig.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")  # JSON is YAML too

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        faults = self._look()
        place = _place(request.path)
        verb, resource = "get", place["get"].removesuffix("s")
        if place["list"]:
            verb, resource = "watch" if request.query.get("watch") in {"1", "true"} else "list", place["list"]
        self.requests[f"{verb} {resource}"] += 1
        if Fault.API_SILENT in faults:
            await asyncio.Event().wait()
        if Fault.API_SLOW in faults:
            await asyncio.sleep(faults[Fault.API_SLOW] or 1.0)
        refusal = self._refusal(request, resource, faults)
        if refusal is not None:
            return refusal
        if place["version"] and place["version"] != self._objects().dra_version:
            return _refuse(404, "NotFound", "the server could not find the requested resource")
        if verb == "watch":
            return await self._watch(request, resource)
        return self._list(request, resource, place["namespace"]) if verb == "list" else self._get(request, place)

    def _refusal(self, request: web.Request, resource: str, faults: Mapping[Fault, float]) -> web.Response | None:
        shown = request.headers.get("Authorization", "")
        self.without_token += not shown
        if Fault.API_ERROR in faults:
            return web.Response(status=500, text=_GARBAGE, content_type="text/html")
        if Fault.API_TOO_MANY in faults:
            seconds = faults[Fault.API_TOO_MANY] or 1.0
            answer = _refuse(429, "TooManyRequests", "the server has received too many requests")
            answer.headers["Retry-After"] = f"{seconds:g}"
            return answer
        if shown.partition(" ")[0].lower() != "bearer" or shown.partition(" ")[2] != self._token:
            return _refuse(401, "Unauthorized", "Unauthorized")
        if Fault.API_FORBIDDEN in faults or resource in self.forbidden:
            return _refuse(403, "Forbidden", f'User "simulated" cannot get path "{request.path}"')
        return None

    def _list(self, request: web.Request, resource: str, namespace: str) -> web.Response:
        try:
            wanted = selector(resource, request.query.get("fieldSelector", ""))
        except ValueError as error:
            return _refuse(400, "BadRequest", str(error))
        found = (each for each in self._store.list(resource) if namespace in {"", each["metadata"].get("namespace")})
        return web.json_response(
            listed(
                resource,
                filter(wanted, found),
                self._store.version,
                metadata_only=self._metadata_only(request),
                dra_version=self._objects().dra_version,
            )
        )

    def _metadata_only(self, request: web.Request) -> bool:
        return self._metadata_forms and "as=PartialObjectMetadata" in request.headers.get("Accept", "")

    def _get(self, request: web.Request, place: Mapping[str, str]) -> web.Response:
        version = self._objects().dra_version
        if request.path == _DRA and version:
            preferred = {"groupVersion": f"resource.k8s.io/{version}", "version": version}
            body = {"kind": "APIGroup", "apiVersion": "v1", "name": "resource.k8s.io", "versions": [preferred]}
            return web.json_response({**body, "preferredVersion": preferred})
        found = self._store.get(place["get"], place["namespace"], place["name"])
        if found is None:
            return _refuse(404, "NotFound", f"{request.path} not found")
        return web.json_response(one(found, metadata_only=self._metadata_only(request)))

    async def _watch(self, request: web.Request, resource: str) -> web.StreamResponse:
        try:
            watch = ClientWatch(
                resource=resource,
                wanted=selector(resource, request.query.get("fieldSelector", "")),
                version=int(request.query.get("resourceVersion") or 0),
                metadata_only=self._metadata_only(request),
                bookmark_seconds=self._bookmark_seconds if request.query.get("allowWatchBookmarks") == "true" else None,
                lifetime_seconds=min(float(request.query.get("timeoutSeconds", "inf")), _LONGEST_WATCH_SECONDS),
            )
        except ValueError as error:
            return _refuse(400, "BadRequest", str(error))
        if Fault.API_GONE in self._faults() or 0 < watch.version < self._store.oldest:
            return web.json_response(expired(watch.version, self._store.oldest), status=410)
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        stream.enable_chunked_encoding()
        await stream.prepare(request)
        self._streams.add(stream)
        self.most_streams = max(self.most_streams, len(self._streams))
        try:
            await watch.serve(stream, self._store, self._faults, self._ticked)
        except ConnectionResetError:
            pass  # the client went away
        finally:
            self._streams.discard(stream)
        return stream


def _refuse(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(status(code, reason, message), status=code)


_PATHS = tuple(
    re.compile(path)
    for path in (
        r"/api/v1(?:/namespaces/(?P<namespace>[^/]+))?/(?P<list>pods)",
        r"/api/v1/(?P<get>namespaces|nodes)/(?P<name>[^/]+)",
        r"/api/v1/namespaces/(?P<namespace>[^/]+)/(?P<get>pods)/(?P<name>[^/]+)",
        r"/apis/resource\.k8s\.io/(?P<version>[^/]+)/(?P<list>resourceslices)",
        r"/apis/resource\.k8s\.io/(?P<version>[^/]+)/namespaces/(?P<namespace>[^/]+)/(?P<get>resourceclaims)/(?P<name>[^/]+)",
        r"/apis/(?P<get>[^/]+)",
        r"(?P<get>.*)",
    )
)


def _place(path: str) -> Mapping[str, str]:
    """Return the parts of a path: the resource to ``list`` or ``get``, version, namespace and name."""
    found = next(match for expression in _PATHS if (match := expression.fullmatch(path.rstrip("/"))))
    return defaultdict(str, {part: text for part, text in found.groupdict().items() if text})
