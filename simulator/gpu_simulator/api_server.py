"""Simulates a Kubernetes API server: HTTP with list, watch and get of the current objects."""

import asyncio
import contextlib
import json
import math
import re
import secrets
import ssl
from base64 import b64encode
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from aiohttp import web

from gpu_simulator import identities
from gpu_simulator.truth import Fault, NodeTruth, PodTruth

Json = Mapping[str, Any]
Selector = Callable[[Json], bool]
ObjectKey = tuple[str, str, str]
"""Resource, namespace, name."""
HISTORY_LENGTH = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiObjects:
    """All objects of the API as complete JSON; the server sets ``metadata.resourceVersion``."""

    pods: tuple[Json, ...] = ()
    namespaces: tuple[Json, ...] = ()
    node: Json | None = None
    resource_slices: tuple[Json, ...] = ()
    resource_claims: tuple[Json, ...] = ()
    dra_version: str = ""
    """``v1``, ``v1beta2`` or ``v1beta1``; empty: a cluster without DRA."""

    def by_key(self) -> dict[ObjectKey, Json]:
        """Return every object by resource, namespace and name."""
        resources: dict[str, Iterable[Json]] = {
            "pods": self.pods,
            "namespaces": self.namespaces,
            "nodes": (self.node,) if self.node is not None else (),
            "resourceslices": self.resource_slices,
            "resourceclaims": self.resource_claims,
        }
        every = ((name, one, one["metadata"]) for name, some in resources.items() for one in some)
        return {(name, metadata.get("namespace", ""), metadata["name"]): one for name, one, metadata in every}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectChange:
    """An object before and after a change; ``None``: it did or does not exist."""

    version: int
    resource: str
    before: Json | None
    after: Json | None


class Store:
    """Objects by key, and the latest changes, oldest first."""

    def __init__(self) -> None:
        self.version = 1000
        self.oldest = 1000
        """Oldest version from which a watch can start."""
        self._seen: ApiObjects | None = None
        self._objects: dict[ObjectKey, tuple[Json, Json]] = {}
        """Each object as given, and as shown with a version."""
        self._changes: deque[ObjectChange] = deque(maxlen=HISTORY_LENGTH)

    def follow(self, objects: ApiObjects) -> bool:
        """Store the current objects; return whether any object changed."""
        if objects is self._seen:
            return False
        self._seen, before, wanted = objects, self.version, objects.by_key()
        for key, (known, _) in list(self._objects.items()):
            if key not in wanted or known["metadata"].get("uid") != wanted[key]["metadata"].get("uid"):
                self._change(key, None)
        for key, given in wanted.items():
            if key not in self._objects or self._objects[key][0] != given:
                self._change(key, given)
        return self.version != before

    def get(self, resource: str, namespace: str, name: str) -> Json | None:
        """Return one object."""
        known = self._objects.get((resource, namespace, name))
        return known[1] if known else None

    def list(self, resource: str) -> Iterator[Json]:
        """Yield all objects of a resource."""
        return (shown for key, (_, shown) in self._objects.items() if key[0] == resource)

    def changes(self, resource: str, after: int) -> Iterator[ObjectChange]:
        """Yield the changes of a resource after a version."""
        return (change for change in self._changes if change.version > after and change.resource == resource)

    def forget(self) -> None:
        """Drop the history, like a restarted server: watches can start only at the current version."""
        self._changes.clear()
        self.oldest = self.version

    def _change(self, key: ObjectKey, given: Json | None) -> None:
        """Add, replace or remove an object."""
        self.version += 1
        before, shown = self._objects.get(key, (None, None))[1], None
        if given is None:
            del self._objects[key]
        else:
            shown = {**given, "metadata": {**given["metadata"], "resourceVersion": str(self.version)}}
            self._objects[key] = (given, shown)
        if len(self._changes) == HISTORY_LENGTH:
            self.oldest = self._changes[0].version
        self._changes.append(ObjectChange(version=self.version, resource=key[0], before=before, after=shown))


OTHER_NAME = ".example.internal"
"""Suffix of the node name in the API during the fault API_OTHER_NODE_NAME."""
_CREATED = "2026-01-05T08:00:00Z"
_IMAGE = "registry.invalid/simulated:1"
_Texts = tuple[tuple[str, str], ...]


def objects_of(truth: NodeTruth) -> ApiObjects:
    """Return the objects of the API at this time; unchanged objects are identical to the previous ones."""
    node, cluster = truth.node + OTHER_NAME * (Fault.API_OTHER_NODE_NAME in truth.faults), truth.cluster
    # Namespaces that the scenario describes, and those of its pods.
    names = dict.fromkeys([*cluster.namespaces, *(pod.namespace for pod in truth.pods)])
    upgraded = Fault.API_UPGRADED in truth.faults and bool(cluster.dra_version)
    return ApiObjects(
        pods=tuple(_pod(node, pod) for pod in truth.pods),
        namespaces=tuple(_unspaced("Namespace", name, _texts(cluster.namespaces.get(name, {}))) for name in names),
        node=_unspaced("Node", node, _texts(cluster.node_labels)),
        resource_slices=cluster.slices,
        resource_claims=cluster.claims,
        dra_version="v1" if upgraded else cluster.dra_version,
    )


def _texts(texts: Mapping[str, str]) -> _Texts:
    return tuple(texts.items())


@lru_cache(maxsize=256)  # called ten times a second
def _unspaced(kind: str, name: str, labels: _Texts) -> Json:
    """Return a cluster-scoped object."""
    own = {"kubernetes.io/metadata.name" if kind == "Namespace" else "kubernetes.io/hostname": name}
    metadata = {"name": name, "uid": identities.stable_uuid(kind.lower(), name), "creationTimestamp": _CREATED}
    return {"apiVersion": "v1", "kind": kind, "metadata": {**metadata, "labels": {**own, **dict(labels)}}}


def _pod(node: str, pod: PodTruth) -> Json:
    return _pod_json(
        node,
        (pod.namespace, pod.name, pod.uid, pod.phase),
        _texts(pod.labels),
        _texts(pod.annotations),
        (pod.owner_kind, pod.owner_name, pod.owner_api),
        pod.containers,
    )


@lru_cache(maxsize=2048)  # as above
def _pod_json(
    node: str,
    identity: tuple[str, str, str, str],
    labels: _Texts,
    annotations: _Texts,
    owner: tuple[str, str, str],
    containers: tuple[str, ...],
) -> Json:
    namespace, name, uid, phase = identity
    # Every real object has these fields; no client reads them.
    managed = {"apiVersion": "v1", "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": {"f:metadata": {}}}
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": namespace,
        "uid": uid,
        "creationTimestamp": _CREATED,
        "labels": dict(labels),
        "annotations": dict(annotations),
        "managedFields": [managed | {"manager": manager} for manager in ("kube-controller-manager", "kubelet")],
    }
    kind, owner_name, api = owner
    if kind:
        reference = {"apiVersion": api, "kind": kind, "name": owner_name, "controller": True}
        reference["uid"] = identities.stable_uuid("owner", namespace, kind, owner_name)
        metadata["ownerReferences"] = [reference | {"blockOwnerDeletion": True}]
        if kind in ("ReplicaSet", "StatefulSet", "DaemonSet", "Job"):
            metadata["generateName"] = f"{owner_name}-"
    ids = {one: f"containerd://{identities.container_id(uid, one)}" for one in containers}
    specs = [{"name": one, "image": _IMAGE, "resources": {}} for one in containers]
    statuses = [{"name": one, "image": _IMAGE, "containerID": ids[one]} for one in containers]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {"nodeName": node, "restartPolicy": "Always", "containers": specs},
        "status": {"phase": phase, "containerStatuses": statuses},
    }


_TERM = re.compile(r"\s*([A-Za-z.]+)\s*(!=|==|=)\s*([^=!]*)\s*")
_FIELDS = {
    "pods": {"metadata.name", "metadata.namespace", "spec.nodeName", "status.phase"},
    "resourceslices": {"metadata.name", "spec.nodeName", "spec.driver"},
}
_METADATA = ("meta.k8s.io/v1", "PartialObjectMetadata")


def selector(resource: str, text: str) -> Selector:
    """Return the parsed ``fieldSelector``.

    Raises:
        ValueError: The API does not support the field.
    """
    terms = []
    for part in filter(None, text.split(",")):
        found = _TERM.fullmatch(part)
        if found is None or found[1] not in _FIELDS[resource]:
            raise ValueError(f"field label not supported: {part}")
        terms.append((found[1].split("."), found[2] != "!=", found[3]))
    return lambda shown: all((_field(shown, path) == value) is equal for path, equal, value in terms)


def _field(shown: Json, path: Iterable[str]) -> str:
    value: Any = shown
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def one(shown: Json, *, metadata_only: bool) -> Json:
    """Return an object completely or as ``PartialObjectMetadata``."""
    if not metadata_only:
        return shown
    return {"kind": _METADATA[1], "apiVersion": _METADATA[0], "metadata": shown["metadata"]}


def event(change: ObjectChange, wanted: Selector, *, metadata_only: bool) -> bytes | None:
    """Return the line of a change for a watch; ``None`` if the watch does not select the object."""
    before = change.before if change.before is not None and wanted(change.before) else None
    after = change.after if change.after is not None and wanted(change.after) else None
    shown = after if after is not None else before
    if shown is None:
        return None
    kind = "DELETED" if after is None else "ADDED" if before is None else "MODIFIED"
    metadata = {**shown["metadata"], "resourceVersion": str(change.version)}
    return event_line(kind, one({**shown, "metadata": metadata}, metadata_only=metadata_only))


def status(code: int, reason: str, message: str) -> Json:
    """Return the body of an error response."""
    said = {"status": "Failure", "message": message, "reason": reason, "code": code}
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **said}


def expired(version: int, oldest: int) -> Json:
    """Return the status for a resource version that is too old."""
    return status(410, "Expired", f"too old resource version: {version} ({oldest})")


def event_line(kind: str, shown: Json) -> bytes:
    """Return one line of a watch."""
    return json.dumps({"type": kind, "object": shown}, separators=(",", ":")).encode() + b"\n"


TICK_SECONDS = 0.1
BOOKMARK_SECONDS = 60.0
_LONGEST_WATCH_SECONDS = 1800.0
_DRA = "resource.k8s.io"
_GARBAGE = "<html>simulated proxy error</html>"
_HALF_A_LINE = b'{"type":"MODIFIED","object":{"kind":"Pod","metadata":{"na'
_LISTS = {
    "/api/v1/pods": "pods",
    "/api/v1/namespaces/{namespace}/pods": "pods",
    f"/apis/{_DRA}/{{version}}/resourceslices": "resourceslices",
}
"""Resource by path."""
_SINGLE = {
    "/api/v1/namespaces/{name}": "namespaces",
    "/api/v1/nodes/{name}": "nodes",
    "/api/v1/namespaces/{namespace}/pods/{name}": "pods",
    f"/apis/{_DRA}/{{version}}/namespaces/{{namespace}}/resourceclaims/{{name}}": "resourceclaims",
    f"/apis/{_DRA}": _DRA,
    "/{path:.*}": "",
}
"""Resource of single objects by path; other paths are not found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """Self-signed certificate and its key, as PEM files."""

    certificate: Path
    key: Path


class ApiServer:
    """Serves the objects on loopback to clients with the bearer token, and applies the faults ``API_*``.

    Args:
        objects: Returns the current objects, or the previous value if no object changed.
        faults: Returns the current faults with their parameters.
        token_file: File for the token; the server writes a new token when API_UNAUTHORISED begins.
        kubeconfig: File for a kubeconfig with the address of the server and the token file.
        port: TCP port; 0 selects a free port, which later starts reuse.
        metadata_forms: Whether the server supports the metadata-only form; a proxy may return the full form.
        bookmark_seconds: Seconds between two bookmarks of a watch.
        tls: Certificate and key; None: plain HTTP.
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
        """Number of requests by verb and resource, such as ``list pods`` or ``get node``, including refused ones."""
        self.without_token = 0
        """Number of requests without a token."""
        self.most_streams = 0
        """Highest number of concurrent watches."""
        self.forbidden: set[str] = set()
        """Resources without rights, with the names of ``requests``: ``pods``, ``node``, ``resourceclaim``."""

    @property
    def url(self) -> str:
        """Return the current or last address of the server."""
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self._port}"

    @property
    def open_streams(self) -> int:
        """Return the number of open watches."""
        return len(self._streams)

    async def start(self) -> None:
        """Listen, write token and kubeconfig, and start to apply objects and faults."""
        if self._follower is not None:
            return
        if not self._token:
            self.rotate()
        self._store.follow(self._objects())
        if Fault.API_DOWN not in self._faults() or not self._port:
            await self._open()  # also to get a port for the kubeconfig
        self._write_kubeconfig()
        await self._tick()
        self._follower = asyncio.create_task(self._follow(), name="simulated API server")

    async def stop(self) -> None:
        """Close the port and all streams."""
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
            self._follower = None
        await self._close()

    async def restart(self) -> None:
        """Restart like an upgrade of the server: the objects stay, the history is lost."""
        await self.stop()
        self._store.follow(self._objects())
        self._store.forget()
        await self.start()

    def rotate(self) -> None:
        """Replace the token, and write the new one to its file."""
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
        """Store the current objects."""
        self._store.follow(self._objects())
        faults = self._faults()
        if Fault.API_UNAUTHORISED in faults and not self._refused_before:
            self.rotate()
        self._refused_before = Fault.API_UNAUTHORISED in faults
        return faults

    async def _open(self) -> None:
        app = web.Application()
        for path, resource in _LISTS.items():
            app.router.add_get(path, partial(self._handle, resource, single=False))
        for path, resource in _SINGLE.items():
            app.router.add_get(path, partial(self._handle, resource, single=True))
        # Without cancellation a watch would stay open after its client disconnects, until the next event.
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
        self._kubeconfig.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")  # JSON is valid YAML

    async def _handle(self, resource: str, request: web.Request, *, single: bool) -> web.StreamResponse:
        faults, known_as = self._look(), resource.removesuffix("s") if single else resource
        verb = "get" if single else "watch" if request.query.get("watch") in {"1", "true"} else "list"
        self.requests[f"{verb} {known_as}"] += 1
        if Fault.API_SILENT in faults:
            await asyncio.Event().wait()
        if Fault.API_SLOW in faults:
            await asyncio.sleep(faults[Fault.API_SLOW] or 1.0)
        refusal = self._refusal(request, known_as, faults)
        if refusal is not None:
            return refusal
        if request.match_info.get("version", self._objects().dra_version) != self._objects().dra_version:
            return _refuse(404, "NotFound", "the server could not find the requested resource")
        if single:
            return self._get(request, resource)
        try:
            wanted = selector(resource, request.query.get("fieldSelector", ""))
            return (
                await self._watch(request, resource, wanted)
                if verb == "watch"
                else self._list(request, resource, wanted)
            )
        except ValueError as error:
            return _refuse(400, "BadRequest", str(error))

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

    def _list(self, request: web.Request, resource: str, wanted: Selector) -> web.Response:
        """Return a list; like in the real API, its items have no kind, except in the metadata form."""
        namespace = request.match_info.get("namespace", "")
        found = filter(wanted, self._store.list(resource))
        shown = [each for each in found if namespace in {"", each["metadata"].get("namespace")}]
        (api, kind), metadata_only = self._kind(request, resource), self._metadata_only(request)
        items = [one(each, metadata_only=metadata_only) for each in shown]
        if not metadata_only:
            items = [{key: value for key, value in each.items() if key not in {"kind", "apiVersion"}} for each in shown]
        metadata = {"resourceVersion": str(self._store.version)}
        return web.json_response({"kind": f"{kind}List", "apiVersion": api, "metadata": metadata, "items": items})

    def _metadata_only(self, request: web.Request) -> bool:
        return self._metadata_forms and "as=PartialObjectMetadata" in request.headers.get("Accept", "")

    def _kind(self, request: web.Request, resource: str) -> tuple[str, str]:
        """Return API version and kind of the response."""
        whole = ("v1", "Pod") if resource == "pods" else (f"{_DRA}/{self._objects().dra_version}", "ResourceSlice")
        return _METADATA if self._metadata_only(request) else whole

    def _get(self, request: web.Request, resource: str) -> web.Response:
        version, place = self._objects().dra_version, request.match_info
        if resource == _DRA and version:
            preferred = {"groupVersion": f"{_DRA}/{version}", "version": version}
            body = {"kind": "APIGroup", "apiVersion": "v1", "name": _DRA, "versions": [preferred]}
            return web.json_response({**body, "preferredVersion": preferred})
        found = self._store.get(resource, place.get("namespace", ""), place.get("name", ""))
        if found is None:
            return _refuse(404, "NotFound", f"{request.path} not found")
        return web.json_response(one(found, metadata_only=self._metadata_only(request)))

    async def _watch(self, request: web.Request, resource: str, wanted: Selector) -> web.StreamResponse:
        version = int(request.query.get("resourceVersion") or 0)
        seconds = min(float(request.query.get("timeoutSeconds", "inf")), _LONGEST_WATCH_SECONDS)
        if Fault.API_GONE in self._faults() or 0 < version < self._store.oldest:
            return web.json_response(expired(version, self._store.oldest), status=410)
        stream = web.StreamResponse(headers={"Content-Type": "application/json"})
        stream.enable_chunked_encoding()
        await stream.prepare(request)
        self._streams.add(stream)
        self.most_streams = max(self.most_streams, len(self._streams))
        try:
            async with contextlib.aclosing(self._events(request, resource, wanted, version, seconds)) as lines:
                async for line in lines:
                    await stream.write(line)
        except ConnectionResetError:
            pass  # the client disconnected
        finally:
            self._streams.discard(stream)
        return stream

    async def _events(
        self, request: web.Request, resource: str, wanted: Selector, version: int, seconds: float
    ) -> AsyncGenerator[bytes]:
        """Yield the lines of a watch after a version, or of all objects for 0, until its timeout or a fault."""
        clock, store, metadata_only = asyncio.get_running_loop().time, self._store, self._metadata_only(request)
        every = self._bookmark_seconds if request.query.get("allowWatchBookmarks") == "true" else math.inf
        ends_at, bookmark_at, has_news = clock() + seconds, clock() + every, False
        news: Iterable[ObjectChange] = ()
        if not version:
            version = store.version
            every_one = list(store.list(resource))
            news = [ObjectChange(version=version, resource=resource, before=None, after=each) for each in every_one]
        while clock() < ends_at:
            faults = self._faults()
            if Fault.API_CUT in faults:
                yield _HALF_A_LINE
                return
            if Fault.API_GONE in faults or version < store.oldest:
                yield event_line("ERROR", expired(version, store.oldest))
                return
            if Fault.API_SILENT not in faults:
                changes, version = [*store.changes(resource, version)], store.version
                has_news = has_news or bool(changes)
                for change in (*news, *changes):
                    if line := event(change, wanted, metadata_only=metadata_only):
                        yield line
                news = ()
                if has_news and clock() >= bookmark_at:
                    bookmark_at, has_news = clock() + every, False
                    yield self._bookmark(request, resource, version)
            async with self._ticked:
                await self._ticked.wait()

    def _bookmark(self, request: web.Request, resource: str, version: int) -> bytes:
        """Return the bookmark of a watch; a server sends it only after changes."""
        api, kind = self._kind(request, resource)
        metadata = {"resourceVersion": str(version), "creationTimestamp": None}
        shown: dict[str, Any] = {"kind": kind, "apiVersion": api, "metadata": metadata}
        if kind == "Pod":
            shown |= {"spec": {"containers": None}, "status": {}}
        return event_line("BOOKMARK", shown)


def _refuse(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(status(code, reason, message), status=code)
