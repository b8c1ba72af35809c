"""Requests objects, lists and watches of the Kubernetes API over HTTP, with clear errors."""

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from exporter.errors import ApiError
from exporter.kube.credentials import SERVICE_ACCOUNT, ApiSettings, Credentials, usable


class Transport:
    """A pool of connections that is used as long as its settings are valid.

    Args:
        settings: Settings of the server; may be replaced by equal ones with newer credentials.

    Raises:
        OSError: A certificate cannot be read.
        SSLError: A certificate is not valid.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self.settings = settings
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=_context(settings), socket_factory=_keepalive_socket),
            # Only for a proxy: it also reads ~/.netrc, and with an entry there no request can carry a token.
            trust_env=settings.proxy is None and _is_by_proxy(settings.host),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "gpu-cost-exporter"},
        )

    async def get(self, request: "Request", authorization: str) -> aiohttp.ClientResponse:
        """Send a request and return the answer; its body is still to be read.

        Raises:
            ClientError, OSError, TimeoutError: There is no answer.
        """
        headers = {"Accept": request.accept, **({"Authorization": authorization} if authorization else {})}
        url = f"{self.settings.host.rstrip('/')}{request.path}"
        return await self._session.get(
            f"{url}?{urlencode(request.query)}" if request.query else url,
            headers=headers,
            timeout=request.limits,
            proxy=self.settings.proxy,
            server_hostname=self.settings.server_name,
            allow_redirects=False,  # an API server has no reason to redirect
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


def _context(settings: ApiSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ca_file, cadata=settings.ca_data)
    if settings.certificate_file:
        context.load_cert_chain(settings.certificate_file, settings.key_file)
    if not settings.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    # Python 3.13 requires certificate extensions that many clusters lack and Go does not require; chain and name are
    # checked as before.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _is_by_proxy(url: str) -> bool:
    """Return whether the environment sends requests to an address through a proxy."""
    parts, proxies = urlsplit(url), getproxies()
    host = parts.hostname or ""
    if parts.scheme not in proxies or proxy_bypass(host):
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True
    return not any(_is_in(address, entry.strip()) for entry in proxies.get("no", "").split(","))


def _is_in(address: ipaddress.IPv4Address | ipaddress.IPv6Address, entry: str) -> bool:
    """Return whether an entry of ``NO_PROXY`` matches an address, networks included, as in Go but not in Python."""
    try:
        return address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _keepalive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    # Without keepalive, a vanished peer is noticed only after minutes of silence of a watch.
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made


FIRST_BACKOFF_SECONDS = 1.0
LONGEST_BACKOFF_SECONDS = 60.0
FORBIDDEN_SECONDS = 60.0
"""Wait after a 403: permissions are changed by hand, so a shorter wait has no use."""
LONGEST_RETRY_AFTER_SECONDS = 300.0
_REASONS = {401: "unauthorised", 403: "forbidden", 404: "not_found", 410: "gone", 413: "too_large", 429: "too_many"}
_FIXES = {
    "unauthorised": "the token is not accepted though it was read again; check that the service account exists and"
    " the token is for this cluster",
    "not_found": "the API server has no such object, or does not serve this version of its API; compare with"
    " `kubectl api-resources`",
    "too_many": "the server is overloaded and asks to wait",
    "server_error": "see the log of the API server",
}


def retry_seconds(error: ApiError, failures: int, random: Callable[[], float]) -> float:
    """Return the wait in seconds: the server's, otherwise full jitter over 1 s, 2 s, 4 s up to 60 s.

    Args:
        error: Error of the last attempt.
        failures: Number of consecutive failed attempts, this one included.
        random: Random number, 0..1.
    """
    if error.retry_after_seconds is not None:
        # A little longer than requested, so that clients with the same answer do not retry at the same time.
        return min(error.retry_after_seconds, LONGEST_RETRY_AFTER_SECONDS) * (1 + 0.1 * random()) + 0.1 * random()
    if error.reason in {"forbidden", "too_large"}:
        return FORBIDDEN_SECONDS * (0.75 + 0.5 * random())
    ceiling = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(max(failures - 1, 0), 10), LONGEST_BACKOFF_SECONDS)
    # Never at once: a server that refuses quickly would receive hundreds of requests a second.
    return max(ceiling * random(), 0.1 * FIRST_BACKOFF_SECONDS)


PLAIN = "application/json"
# Plain JSON last: a proxy may not know the form, so readers check ``kind`` or use the fields that both forms have.
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1, application/json"
METADATA_WATCH = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1, application/json"
_NO_QUERY: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Request:
    """One request to the API server."""

    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = PLAIN
    """Requested form of the objects."""
    limits: aiohttp.ClientTimeout = field(default_factory=aiohttp.ClientTimeout)

    @property
    def rights(self) -> tuple[str, str, str]:
        """Verb, resource and API group, as a role names them."""
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
        """Action in the words of permissions: ``watch pods``, ``get nodes``."""
        verb, resource, _group = self.rights
        return f"{verb} {resource}"


def of_status(
    status: object, address: str, request: Request, *, details: object = "", retry_after: str | None = None
) -> ApiError:
    """Return the error for an HTTP status, or for the code of an event of type ERROR."""
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
"""An object is at most 1.5 MiB in etcd; a longer line is left out."""
ANSWER_LIMIT_BYTES = 64 << 20
CONNECT_SECONDS = 10.0
HEADERS_SECONDS = 30.0
"""Maximum wait for the headers: a server accepts a watch at once, though its first event may take long."""
OPENED = "OPENED"
"""Type of the event after which the watch is open."""
SKIPPED = "SKIPPED"
"""Type of the event that replaces a line over the limit."""


class ApiClient:
    """One connection pool to the API server of this cluster; nothing is read or opened before the first request.

    Args:
        kubeconfig: File to use; without one the pod's service account, then $KUBECONFIG, then ~/.kube/config.
        random: Returns 0..1, for waits that differ between thousands of agents.
        environ: Contains ``KUBERNETES_SERVICE_HOST`` and ``KUBECONFIG``.
        service_account: Folder with the pod's ``token`` and ``ca.crt``.
    """

    def __init__(
        self,
        kubeconfig: Path | None,
        *,
        random: Callable[[], float],
        environ: Mapping[str, str] = os.environ,
        service_account: Path = SERVICE_ACCOUNT,
    ) -> None:
        self.random = random
        self._credentials = Credentials(kubeconfig, environ=environ, service_account=service_account)
        self._api: Transport | None = None
        self._stale = False
        self._opening = asyncio.Lock()
        self._token = ""
        self.date = ""
        """Date header of the last answer; empty if it had none."""

    @property
    def address(self) -> str:
        """URL of the API server for messages, or its configured source before the first read."""
        if self._api is not None:
            return self._api.settings.host
        return f"the server of the {self._credentials.place}"

    def retry_seconds(self, error: ApiError, failures: int) -> float:
        """Return the wait in seconds before the next attempt.

        Args:
            error: Error of the last attempt.
            failures: Number of consecutive failed attempts, this one included.
        """
        return retry_seconds(error, failures, self.random)

    async def get(
        self,
        path: str,
        query: Mapping[str, str] = _NO_QUERY,
        *,
        accept: str = PLAIN,
        timeout_seconds: float = 30.0,
    ) -> dict[str, Any]:
        """Read one object or one list, without ``managedFields``.

        Raises:
            ApiError: There is no answer, or it is unreadable.
        """
        limits = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=CONNECT_SECONDS)
        request = Request(path, query, accept, limits)
        with self._translated(request, timeout_seconds):
            response = await self._answer(request)
            try:
                decoded = _decode(await self._body(response, request))
            finally:
                response.release()
        if not isinstance(decoded, dict):
            raise self._error("garbage", request, "the answer is not a JSON object")
        return decoded

    async def watch(
        self, path: str, query: Mapping[str, str], *, accept: str, silence_seconds: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield events until the server ends the stream, each ``{"type": ..., "object": {...}}``.

        The first event is ``{"type": "OPENED"}``: the watch is open. A line longer than any valid object becomes
        ``{"type": "SKIPPED"}``. Silence ends the stream like the server's own end: a server sends nothing while nothing
        changes, and a dead connection is detected when the watch is opened again.

        Args:
            path: Path of the list.
            query: As for ``get``; ``watch`` is added.
            accept: Requested form of the objects.
            silence_seconds: Time without a line after which the stream ends.

        Raises:
            ApiError: Also for an event of type ERROR, with the reason of its code.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        request = Request(path, {**query, "watch": "1"}, accept, limits)
        patience_seconds = min(HEADERS_SECONDS, silence_seconds)
        with self._translated(request, patience_seconds):
            async with asyncio.timeout(patience_seconds):
                response = await self._answer(request)
        with self._translated(request, silence_seconds):
            try:
                yield {"type": OPENED, "object": {}}
                async with contextlib.aclosing(_until_silent(_lines(response.content))) as lines:
                    async for line in lines:
                        yield self._event(line, request)
            finally:
                response.close()

    async def close(self) -> None:
        """Close all connections; a later request opens new ones."""
        if self._api is not None:
            api, self._api = self._api, None
            await api.close()

    def _event(self, line: bytes | None, request: Request) -> dict[str, Any]:
        if line is None:
            return {"type": SKIPPED, "object": {}}
        event = _decode(line)
        if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
            raise self._error("garbage", request, "an event has no object")
        if not isinstance(event.get("type"), str):
            raise self._error("garbage", request, "an event has no type")
        if event["type"] == "ERROR":
            status = event["object"]
            details = self._without_token(str(status.get("message") or ""))
            raise of_status(status.get("code"), self.address, request, details=details)
        return event

    async def _body(self, response: aiohttp.ClientResponse, request: Request) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > ANSWER_LIMIT_BYTES:
                response.close()
                raise self._error("too_large", request, f"the answer is longer than {ANSWER_LIMIT_BYTES >> 20} MiB")
        return bytes(body)

    async def _answer(self, request: Request) -> aiohttp.ClientResponse:
        response = await self._send(await self._opened(), request)
        if response.status == 401:  # noqa: PLR2004 - the token has expired, its file may have a new one
            response.close()
            response = await self._send(await self._reopened(), request)
        if response.status != 200:  # noqa: PLR2004 - no other status is a success for reads
            try:
                details = self._without_token(message_of(await response.content.read(4096)))
            finally:
                response.close()
            retry_after = response.headers.get("Retry-After")
            raise of_status(response.status, self.address, request, details=details, retry_after=retry_after)
        return response

    async def _send(self, api: Transport, request: Request) -> aiohttp.ClientResponse:
        with usable(self._credentials.place):  # the token's file is read again
            authorization = await api.settings.authorization()
        self._token = authorization.rpartition(" ")[2]
        response = await api.get(request, authorization)
        self.date = response.headers.get("Date", "")
        return response

    async def _opened(self) -> Transport:
        async with self._opening:
            if self._api is None or self._stale:
                await self.close()
                self._api, self._stale = Transport(await self._credentials.read()), False
            return self._api

    async def _reopened(self) -> Transport:
        """Read settings and credentials again; open streams stay if only the token is new."""
        async with self._opening:
            new, old = await self._credentials.read(), self._api
            # Connections use the client certificate, and its file may have been renewed.
            if old is not None and new == old.settings and not new.certificate_file:
                old.settings = new
                return old
            await self.close()
            self._api = Transport(new)
            return self._api

    def _without_token(self, answer: str) -> str:
        """Return a server's answer without the token: some proxies repeat a request in their errors."""
        return answer.replace(self._token, "...") if self._token else answer

    def _error(self, reason: str, request: Request, problem: str) -> ApiError:
        return ApiError(reason, f"{request.action} at {self.address}: {problem}")

    @contextlib.contextmanager
    def _translated(self, request: Request, seconds: float) -> Iterator[None]:
        """Convert the errors of transport, credentials and JSON into ``ApiError``."""
        try:
            yield
        except (aiohttp.ClientError, OSError, ValueError, RecursionError, RuntimeError, AssertionError) as error:
            raise self._explained(error, request, seconds) from error

    def _explained(self, error: Exception, request: Request, seconds: float) -> ApiError:
        match error:
            case ssl.SSLError() | aiohttp.ClientSSLError():
                self._stale = True  # the CA may have been replaced: the next request reads its file again
                problem = f"TLS failed: {error}; check that the CA of service account or kubeconfig is this cluster's"
                return self._error("certificate", request, problem)
            case TimeoutError():
                problem = "check that the API server works and no network policy blocks it"
                return self._error("timeout", request, f"no data for {seconds:g} s; {problem}")
            case aiohttp.InvalidURL():
                return self._error("no_config", request, f"no such URL: {error}; fix `server` of the cluster")
            case aiohttp.ClientError() | OSError():
                problem = "check that the address is right and no network policy blocks it"
                if self._api is not None and self._api.settings.certificate_file:
                    self._stale = True  # a server may reject a client certificate by closing the connection
                    problem += ", and that it accepts the client certificate"
                return self._error("unreachable", request, f"{str(error) or type(error).__name__}; {problem}")
            case ValueError() | RecursionError():
                return self._error("garbage", request, f"the answer is not JSON: {str(error)[:200]}")
            case _:
                # aiohttp raises this in one task when another has just replaced or closed the connections.
                return self._error("unreachable", request, "the connections were replaced during the request")


def _decode(raw: bytes) -> Any:  # noqa: ANN401 - JSON
    return json.loads(raw.decode("utf-8", "replace"), object_hook=_without_managed_fields)


def _without_managed_fields(decoded: dict[str, Any]) -> dict[str, Any]:
    # Removed while decoding, because they are four fifths of the metadata.
    decoded.pop("managedFields", None)
    return decoded


async def _until_silent(lines: AsyncGenerator[bytes | None, None]) -> AsyncGenerator[bytes | None, None]:
    """Yield lines until the connection times out for lack of one."""
    async with contextlib.aclosing(lines):
        with contextlib.suppress(TimeoutError):
            async for line in lines:
                yield line


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes | None, None]:
    """Yield lines without their line ends; ``None`` for one over the limit.

    Raises:
        ClientError: The last line is incomplete.
    """
    line, too_long = bytearray(), False
    async for chunk in content.iter_any():
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            line += part
            if too_long or len(line) > LINE_LIMIT_BYTES:
                yield None
            elif line.strip():
                yield bytes(line)
            line, too_long = bytearray(), False
        line += rest
        if len(line) > LINE_LIMIT_BYTES:
            line, too_long = bytearray(), True
    if line or too_long:
        raise aiohttp.ClientPayloadError("the stream was cut in the middle of a line")
