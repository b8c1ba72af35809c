"""Requests objects, lists and watches of the Kubernetes API over HTTP, with clear errors."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from exporter.errors import ApiError
from exporter.kube.credentials import ApiSettings, Credentials, usable

FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 60.0
FORBIDDEN_SECONDS = 60.0
"""Wait after a 403. Permissions are changed by hand, so a shorter wait is useless."""
LONGEST_RETRY_AFTER_SECONDS = 300.0
_REASONS = {401: "unauthorised", 403: "forbidden", 404: "not_found", 410: "gone", 413: "too_large", 429: "too_many"}
_FIXES = {
    "unauthorised": "the token is not accepted though it was read again; check that it has not ended, that the"
    " service account exists and that the token is for this cluster",
    "not_found": "the API server has no such object, or does not serve this version of its API; compare with"
    " `kubectl api-resources`",
    "too_many": "the server is overloaded and asks to wait",
    "server_error": "see the log of the API server",
}


PLAIN = "application/json"
# Plain JSON is last, for proxies without the form: readers check ``kind`` or use fields that both forms have.
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1, application/json"
METADATA_WATCH = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1, application/json"


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the API server."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = PLAIN
    """Media types of the requested form of objects."""

    @property
    def rights(self) -> tuple[str, str, str]:
        """Verb, resource and API group, as in a role."""
        parts = self.path.strip("/").split("/")
        group, rest = ("", parts[2:]) if parts[0] == "api" else ("".join(parts[1:2]), parts[3:])
        if rest[:1] == ["namespaces"] and len(rest) > 2:  # noqa: PLR2004 - namespaces/<name>/<resource>
            rest = rest[2:]
        if not rest:
            return "get", self.path, group
        verb = "watch" if "watch" in self.query else "get" if len(rest) > 1 else "list"
        return verb, rest[0], group

    @property
    def action(self) -> str:
        """Verb and resource: ``watch pods``, ``get nodes``."""
        verb, resource, _group = self.rights
        return f"{verb} {resource}"


def of_status(
    status: object, address: str, request: Request, *, details: object = "", retry_after: str | None = None
) -> ApiError:
    """Return the error for an HTTP status, or for the code of an ERROR event."""
    code = status if isinstance(status, int) else 0
    reason = _REASONS.get(code, "server_error" if code >= 500 or code == 0 else "garbage")  # noqa: PLR2004 - HTTP
    verb, resource, group = request.rights
    if reason == "forbidden":
        fix = f"grant verb {verb} on resource {resource} of API group {group!r} to this service account"
    else:
        fix = _FIXES.get(reason, "")
    detail = " ".join(str(details or "").split())[:300]
    words = "; ".join(word for word in (detail, fix) if word)
    message = f"{request.action} at {address}: HTTP {code or str(status)[:40]}" + (f": {words}" if words else "")
    return ApiError(reason, message, retry_after_seconds=_seconds(retry_after))


def message_of(body: bytes) -> str:
    """Return the message of a ``Status``; empty for any other body."""
    try:
        status: Any = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    message = status.get("message") if isinstance(status, dict) else None
    return message if isinstance(message, str) else ""


def _seconds(retry_after: str | None) -> float | None:
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


LINE_LIMIT_BYTES = 2 << 20
"""Maximum size of a line with one object; etcd stores objects up to 1.5 MiB."""
ANSWER_LIMIT_BYTES = 64 << 20
CONNECT_SECONDS = 10.0
HEADERS_SECONDS = 30.0
"""Maximum wait for the headers. A server accepts a watch at once, but its first event may take long."""
OPENED = "OPENED"
"""Type of the first event of an open watch."""


class ApiClient:
    """Sends requests to the API server of this cluster over one connection pool, which the first request opens.

    Args:
        credentials: Address and credentials of the server.
        random: Returns 0..1, for jitter between thousands of agents.
    """

    def __init__(self, credentials: Credentials, *, random: Callable[[], float]) -> None:
        self.random = random
        self._credentials = credentials
        self._session: aiohttp.ClientSession | None = None
        self._settings: tuple[ApiSettings, ssl.SSLContext] | None = None
        self._stale = False
        self._reading = asyncio.Lock()
        self._token = ""
        self.date = ""
        """Date header of the last answer; empty if it had none."""

    @property
    def address(self) -> str:
        """URL of the API server for messages; before the first request, the source of the configuration."""
        return self._settings[0].host if self._settings else f"the server of the {self._credentials.place}"

    def retry_seconds(self, error: ApiError, failures: int) -> float:
        """Return the wait in seconds: the one that the server requests, otherwise full jitter over 1 s, 2 s, ... 60 s.

        Args:
            error: Error of the last attempt.
            failures: Number of consecutive failed attempts, this one included.
        """
        if error.retry_after_seconds is not None:
            # Slightly longer than requested, so that clients with the same answer do not retry at the same time.
            wait_seconds = min(error.retry_after_seconds, LONGEST_RETRY_AFTER_SECONDS)
            return wait_seconds * (1 + 0.1 * self.random()) + 0.1 * self.random()
        if error.reason in {"forbidden", "too_large"}:
            return FORBIDDEN_SECONDS * (0.75 + 0.5 * self.random())
        ceiling = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(max(failures - 1, 0), 10), LONGEST_BACKOFF_SECONDS)
        # Never 0: a server that refuses quickly would receive hundreds of requests a second.
        return max(ceiling * self.random(), 0.1 * FIRST_BACKOFF_SECONDS)

    async def get(self, request: Request, *, timeout_seconds: float = 30.0) -> dict[str, Any]:
        """Read one object or one list, without ``managedFields``.

        Raises:
            ApiError: The server did not answer, or its answer is unreadable.
        """
        limits = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=CONNECT_SECONDS)
        with self._translated(request, timeout_seconds):
            response = await self._answer(request, limits)
            try:
                decoded = _decode(await self._body(response, request))
            finally:
                response.release()
        if not isinstance(decoded, dict):
            raise self._error("garbage", request, "the answer is not a JSON object")
        return decoded

    async def watch(self, request: Request, *, silence_seconds: float) -> AsyncGenerator[dict[str, Any], None]:
        """Yield events until the server ends the stream, each ``{"type": ..., "object": {...}}``.

        The first event is ``{"type": "OPENED"}``: the watch is open. Silence ends the stream like the server does. A
        server sends nothing while nothing changes, so only the next watch detects a dead connection.

        Args:
            request: Request for the list; ``watch`` is added to its query.
            silence_seconds: Time without a line after which the stream ends.

        Raises:
            ApiError: As for ``get``, and for an ERROR event, with the reason of its code.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        request = replace(request, query={**request.query, "watch": "1"})
        patience_seconds = min(HEADERS_SECONDS, silence_seconds)
        with self._translated(request, patience_seconds):
            async with asyncio.timeout(patience_seconds):
                response = await self._answer(request, limits)
        with self._translated(request, silence_seconds):
            try:
                yield {"type": OPENED, "object": {}}
                with contextlib.suppress(TimeoutError):
                    while line := await response.content.readline(max_line_length=LINE_LIMIT_BYTES):
                        if not line.endswith(b"\n"):
                            raise aiohttp.ClientPayloadError("the stream was cut in the middle of a line")
                        if line.strip():
                            yield self._event(line, request)
            finally:
                response.close()

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _event(self, line: bytes, request: Request) -> dict[str, Any]:
        match _decode(line):
            case {"type": "ERROR", "object": dict(status)}:
                details = self._without_token(str(status.get("message") or ""))
                raise of_status(status.get("code"), self.address, request, details=details)
            case {"type": str(kind), "object": dict(shown)}:
                return {"type": kind, "object": shown}
            case _:
                raise self._error("garbage", request, "an event has no type or no object")

    async def _body(self, response: aiohttp.ClientResponse, request: Request) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > ANSWER_LIMIT_BYTES:
                response.close()
                raise self._error("too_large", request, f"the answer is longer than {ANSWER_LIMIT_BYTES >> 20} MiB")
        return bytes(body)

    async def _answer(self, request: Request, limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        response = await self._send(request, limits)
        if response.status == 401:  # noqa: PLR2004 - the token has expired; its file may have a new token
            response.close()
            self._stale = True
            response = await self._send(request, limits)
        if response.status != 200:  # noqa: PLR2004 - no other status is a success for reads
            try:
                details = self._without_token(message_of(await response.content.read(4096)))
            finally:
                response.close()
            retry_after = response.headers.get("Retry-After")
            raise of_status(response.status, self.address, request, details=details, retry_after=retry_after)
        return response

    async def _send(self, request: Request, limits: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        settings, context = await self._current()
        with usable(self._credentials.place):  # the token's file is read again
            authorization = await settings.authorization()
        self._token = authorization.rpartition(" ")[2]
        if self._session is None:
            self._session = aiohttp.ClientSession(
                cookie_jar=aiohttp.DummyCookieJar(), headers={"User-Agent": "gpu-cost-exporter"}
            )
        url = f"{settings.host.rstrip('/')}{request.path}"
        response = await self._session.get(
            f"{url}?{urlencode(request.query)}" if request.query else url,
            headers={"Accept": request.accept, **({"Authorization": authorization} if authorization else {})},
            timeout=limits,
            ssl=context,
            proxy=settings.proxy,
            server_hostname=settings.server_name,
            allow_redirects=False,  # an API server has no reason to redirect
        )
        self.date = response.headers.get("Date", "")
        return response

    async def _current(self) -> tuple[ApiSettings, ssl.SSLContext]:
        """Return settings and certificates; read them again after the refusal of a credential.

        Requests with the same certificates share connections. Open streams keep their connections.
        """
        async with self._reading:
            if self._settings is None or self._stale:
                settings = await self._credentials.read()
                self._settings, self._stale = (settings, settings.context()), False
            return self._settings

    def _without_token(self, answer: str) -> str:
        """Return the answer of a server without the token, because some proxies repeat requests in errors."""
        return answer.replace(self._token, "...") if self._token else answer

    def _error(self, reason: str, request: Request, problem: str) -> ApiError:
        return ApiError(reason, f"{request.action} at {self.address}: {problem}")

    @contextlib.contextmanager
    def _translated(self, request: Request, seconds: float) -> Iterator[None]:
        """Convert errors of transport, credentials and JSON to ``ApiError``."""
        try:
            yield
        except (ssl.SSLError, aiohttp.ClientSSLError) as error:
            self._stale = True  # the CA may have been replaced; the next request reads its file again
            problem = f"TLS failed: {error}; check that the CA of service account or kubeconfig is this cluster's"
            raise self._error("certificate", request, problem) from error
        except TimeoutError as error:
            problem = "check that the API server works and no network policy blocks it"
            raise self._error("timeout", request, f"no data for {seconds:g} s; {problem}") from error
        except aiohttp.InvalidURL as error:
            problem = f"no such URL: {error}; fix `server` of the cluster"
            raise self._error("no_config", request, problem) from error
        except (aiohttp.ClientError, OSError) as error:
            problem = "check that the address is right and no network policy blocks it"
            if self._settings and self._settings[0].certificate_file:
                self._stale = True  # a server may reject a client certificate by closing the connection
                problem += ", and that it accepts the client certificate"
            raise self._error("unreachable", request, f"{str(error) or type(error).__name__}; {problem}") from error
        except LineTooLong as error:
            problem = f"an event is longer than {LINE_LIMIT_BYTES >> 20} MiB"
            raise self._error("too_large", request, problem) from error
        except (ValueError, RecursionError) as error:
            problem = f"the answer is not JSON: {str(error)[:200]}"
            raise self._error("garbage", request, problem) from error


def _decode(raw: bytes) -> Any:  # noqa: ANN401 - JSON
    return json.loads(raw.decode("utf-8", "replace"), object_hook=_without_managed_fields)


def _without_managed_fields(decoded: dict[str, Any]) -> dict[str, Any]:
    # Removed during decoding, because they are four fifths of the metadata.
    decoded.pop("managedFields", None)
    return decoded
