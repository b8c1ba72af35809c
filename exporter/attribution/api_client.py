"""The Kubernetes API over HTTP: one object, one list, one watch; every failure in words."""

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp

from exporter.attribution import api_errors
from exporter.attribution.api_credentials import Credentials, usable
from exporter.attribution.api_settings import SERVICE_ACCOUNT
from exporter.attribution.api_transport import Transport
from exporter.errors import ApiError

PLAIN = "application/json"
# Plain JSON last: a proxy may not know the form, so readers look at ``kind`` or take what both forms have.
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1, application/json"
METADATA_WATCH = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1, application/json"
LINE_LIMIT_BYTES = 2 << 20
"""An object is at most 1.5 MiB in etcd; a longer line is no use to anybody and is left out."""
ANSWER_LIMIT_BYTES = 64 << 20
CONNECT_SECONDS = 10.0
HEADERS_SECONDS = 30.0
"""A server answers a watch at once, though its first event may be long in coming."""
OPENED = "OPENED"
"""Type of the event that says that the server has taken the watch."""
SKIPPED = "SKIPPED"
"""Type of the event that stands for a line over the limit."""
_NO_QUERY: Mapping[str, str] = MappingProxyType({})


class ApiClient:
    """One connection pool to the API server of this cluster; nothing is read or opened before the first request.

    Args:
        kubeconfig: File to use; without one the pod's service account, then $KUBECONFIG, then ~/.kube/config.
        random: 0..1, for the waits of ``retry_seconds``.
        environ: Where ``KUBERNETES_SERVICE_HOST`` and ``KUBECONFIG`` are looked up.
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
        self._random = random
        self._credentials = Credentials(kubeconfig, environ=environ, service_account=service_account)
        self._api: Transport | None = None
        self._stale = False
        self._opening = asyncio.Lock()
        self._token = ""
        self.date = ""
        """The server's clock with its last answer, as HTTP writes it; empty where it did not tell."""

    @property
    def address(self) -> str:
        """URL of the API server, for messages; where it would be read from, before it has been."""
        if self._api is not None:
            return self._api.settings.host
        return f"the server of the {self._credentials.place}"

    def retry_seconds(self, error: ApiError, failures: int) -> float:
        """Say how long to wait before the next attempt.

        Args:
            error: What happened last.
            failures: How many attempts in a row have failed, this one included.
        """
        return api_errors.retry_seconds(error, failures, self._random)

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
            ApiError: When there is no answer, or none that can be read.
        """
        limits = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=CONNECT_SECONDS)
        with self._translated(path, query, timeout_seconds):
            response = await self._request(path, query, accept, limits)
            try:
                decoded = _decode(await self._body(response, path, query))
            finally:
                response.release()
        if not isinstance(decoded, dict):
            raise self._error("garbage", path, query, "the answer is no JSON object")
        return decoded

    async def watch(
        self, path: str, query: Mapping[str, str], *, accept: str, silence_seconds: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield events until the server ends the stream, each ``{"type": ..., "object": {...}}``.

        The first is ``{"type": "OPENED"}``: the server has taken the watch. A line that is longer than any object may
        be comes as ``{"type": "SKIPPED"}``. Silence ends the stream as the server's own end does: a server sends
        nothing at all while nothing changes, and a connection that is dead shows when the watch is opened again.

        Args:
            path: Of the list.
            query: As for ``get``; ``watch`` is added.
            accept: Which form the objects have.
            silence_seconds: After how long without a line the stream ends.

        Raises:
            ApiError: Also for an event of type ERROR, with the reason of its code.
        """
        query = {**query, "watch": "1"}
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds)
        patience_seconds = min(HEADERS_SECONDS, silence_seconds)
        with self._translated(path, query, patience_seconds):
            async with asyncio.timeout(patience_seconds):
                response = await self._request(path, query, accept, limits)
        with self._translated(path, query, silence_seconds):
            try:
                yield {"type": OPENED, "object": {}}
                async with contextlib.aclosing(_until_silent(_lines(response.content))) as lines:
                    async for line in lines:
                        yield self._event(line, path, query)
            finally:
                response.close()

    async def close(self) -> None:
        """Close all connections; a later request opens new ones."""
        if self._api is not None:
            api, self._api = self._api, None
            await api.close()

    def _event(self, line: bytes | None, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        if line is None:
            return {"type": SKIPPED, "object": {}}
        event = _decode(line)
        if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
            raise self._error("garbage", path, query, "an event has no object")
        if not isinstance(event.get("type"), str):
            raise self._error("garbage", path, query, "an event has no type")
        if event["type"] == "ERROR":
            status = event["object"]
            details = self._without_token(str(status.get("message") or ""))
            raise api_errors.of_status(status.get("code"), self.address, path, query, details=details)
        return event

    async def _body(self, response: aiohttp.ClientResponse, path: str, query: Mapping[str, str]) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > ANSWER_LIMIT_BYTES:
                response.close()
                raise self._error("too_large", path, query, f"the answer is longer than {ANSWER_LIMIT_BYTES >> 20} MiB")
        return bytes(body)

    async def _request(
        self, path: str, query: Mapping[str, str], accept: str, limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        response = await self._send(await self._opened(), path, query, accept, limits)
        if response.status == 401:  # noqa: PLR2004 - the token has expired, its file may have a new one
            response.close()
            response = await self._send(await self._reopened(), path, query, accept, limits)
        if response.status != 200:  # noqa: PLR2004 - reading gives nothing else
            try:
                details = self._without_token(api_errors.message_of(await response.content.read(4096)))
            finally:
                response.close()
            raise api_errors.of_status(
                response.status,
                self.address,
                path,
                query,
                details=details,
                retry_after=response.headers.get("Retry-After"),
            )
        return response

    async def _send(
        self, api: Transport, path: str, query: Mapping[str, str], accept: str, limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        with usable(self._credentials.place):  # the token's file is read again
            authorization = await api.settings.authorization()
        self._token = authorization.rpartition(" ")[2]
        response = await api.get(path, query, accept=accept, authorization=authorization, limits=limits)
        self.date = response.headers.get("Date", "")
        return response

    async def _opened(self) -> Transport:
        async with self._opening:
            if self._api is None or self._stale:
                await self.close()
                self._api, self._stale = Transport(await self._credentials.read()), False
            return self._api

    async def _reopened(self) -> Transport:
        """Read settings and credentials again; open streams stay where only the token is new."""
        async with self._opening:
            new, old = await self._credentials.read(), self._api
            # A client certificate is of the connections, and may have been renewed in its file.
            if old is not None and new == old.settings and not new.certificate_file:
                old.settings = new
                return old
            await self.close()
            self._api = Transport(new)
            return self._api

    def _without_token(self, said: str) -> str:
        """What a server said, without the token that it was shown: some proxies repeat a request in their errors."""
        return said.replace(self._token, "...") if self._token else said

    def _error(self, reason: str, path: str, query: Mapping[str, str], problem: str) -> ApiError:
        return ApiError(reason, f"{api_errors.action(path, query)} at {self.address}: {problem}")

    @contextlib.contextmanager
    def _translated(self, path: str, query: Mapping[str, str], seconds: float) -> Iterator[None]:
        """Turn what transport, credentials and JSON raise into ``ApiError``."""
        try:
            yield
        except (ssl.SSLError, aiohttp.ClientSSLError) as error:
            self._stale = True  # the CA may have been replaced: its file is read again for the next request
            raise self._error(
                "certificate",
                path,
                query,
                f"TLS failed: {error}; see that the CA of the service account or kubeconfig is this cluster's",
            ) from error
        except TimeoutError as error:
            raise self._error(
                "timeout",
                path,
                query,
                f"nothing came for {seconds:g} s; see that the API server is well and no network policy forbids it",
            ) from error
        except aiohttp.InvalidURL as error:
            raise self._error(
                "no_config", path, query, f"no such URL: {error}; mend `server` of the cluster"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            problem = (
                f"{str(error) or type(error).__name__}; see that the address is right and no network policy forbids it"
            )
            if self._api is not None and self._api.settings.certificate_file:
                self._stale = True  # a server that refuses the client's certificate may just hang up
                problem += ", and that the client certificate is one that it takes"
            raise self._error("unreachable", path, query, problem) from error
        except (ValueError, RecursionError) as error:
            raise self._error("garbage", path, query, f"the answer is no JSON: {str(error)[:200]}") from error
        except (RuntimeError, AssertionError) as error:
            # What aiohttp raises in one task when another has just replaced or closed the connections.
            raise self._error("unreachable", path, query, "the connections were replaced meanwhile") from error


def _decode(raw: bytes) -> Any:  # noqa: ANN401 - JSON
    return json.loads(raw.decode("utf-8", "replace"), object_hook=_without_managed_fields)


def _without_managed_fields(decoded: dict[str, Any]) -> dict[str, Any]:
    # While decoding, because they are four fifths of the metadata.
    decoded.pop("managedFields", None)
    return decoded


async def _until_silent(lines: AsyncGenerator[bytes | None, None]) -> AsyncGenerator[bytes | None, None]:
    """Yield lines until none has come for as long as the connection waits for one."""
    async with contextlib.aclosing(lines):
        with contextlib.suppress(TimeoutError):
            async for line in lines:
                yield line


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes | None, None]:
    """Yield lines without their end; ``None`` for one over the limit.

    Raises:
        ClientError: When the last line has no end.
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
