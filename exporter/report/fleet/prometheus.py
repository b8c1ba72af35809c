"""Asks Prometheus, or what speaks its API: the one door to HTTP, with retries, limits and words for what goes wrong."""

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp

from exporter.config.prometheus_options import PrometheusSettings
from exporter.report.fleet import credentials, prometheus_errors
from exporter.report.fleet.prometheus_errors import Refusal

MOST_BYTES = 512 << 20
CONNECT_SECONDS = 10.0
_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS, _LONGEST_RETRY_AFTER_SECONDS = 0.25, 8.0, 60.0
_OK = 200
# Thanos: no partial answer, one of each pair of replicas. VictoriaMetrics: no partial answer, times as they were asked
# for. Others take no notice of them.
_FORM = {"partial_response": "false", "dedup": "true", "deny_partial_response": "1", "nocache": "1"}


class Sample(NamedTuple):
    """A value of an instant query."""

    labels: dict[str, str]
    value: float


class Series(NamedTuple):
    """Values of a range query."""

    labels: dict[str, str]
    points: tuple[tuple[float, float], ...]
    """Unix seconds and value, in the order of time."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer as it was decoded; ``headers`` are by name in small letters."""

    data: Any
    """Of a query: a list of objects with ``metric`` and ``value`` or ``values``, values as texts."""
    notes: tuple[str, ...] = ()
    """Warnings of the server, one line each."""
    headers: Mapping[str, str] | None = None


class PrometheusClient:
    """Questions to one server, a few at a time. To be used as an asynchronous context manager.

    Proxies of the environment and ``.netrc`` are not used: Prometheus is mostly where no proxy leads to.

    Args:
        settings: Where and how.
        random: 0..1, for the waits between attempts.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        settings: PrometheusSettings,
        *,
        random: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.settings = settings
        self._random = random
        self._sleep = sleep
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._tls = credentials.Tls(settings)
        self._has_answered = False
        self._timeouts_in_a_row = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; a later question opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def instant(self, query: str, at_seconds: float | None) -> tuple[Sample, ...]:
        """Ask an instant query; values that are no finite number are left out.

        Args:
            query: PromQL.
            at_seconds: Unix time; ``None`` is the server's now.

        Raises:
            PrometheusError: There is no answer after all retries, or none that can be read.
        """
        answer = await self.ask_instant(query, at_seconds)
        with prometheus_errors.rows_read(self.settings):
            pairs = [(_labels(row), float(row["value"][1])) for row in answer.data]
        return tuple(Sample(labels, value) for labels, value in pairs if math.isfinite(value))

    async def range(
        self, query: str, start_seconds: float, end_seconds: float, step_seconds: float
    ) -> tuple[Series, ...]:
        """Ask a range query; values that are no finite number are left out, and series without others.

        Raises:
            PrometheusError: As for ``instant``.
        """
        answer = await self.ask_range(query, start_seconds, end_seconds, step_seconds)
        found = []
        with prometheus_errors.rows_read(self.settings):
            for row in answer.data:
                points = ((float(moment), float(value)) for moment, value in row["values"])
                finite = tuple(point for point in points if math.isfinite(sum(point)))
                if finite:
                    found.append(Series(_labels(row), finite))
        return tuple(found)

    async def ask_instant(self, query: str, at_seconds: float | None) -> Answer:
        """As ``instant``, undecoded: a list of ``{"metric": {...}, "value": [seconds, text]}``."""
        form = {"query": query} if at_seconds is None else {"query": query, "time": _number(at_seconds)}
        return await self._query("/api/v1/query", form, "vector")

    async def ask_range(
        self,
        query: str,
        start_seconds: float,
        end_seconds: float,
        step_seconds: float,
        *,
        retry_timeouts: bool = True,
    ) -> Answer:
        """As ``range``, undecoded: a list of ``{"metric": {...}, "values": [[seconds, text], ...]}``.

        Without ``retry_timeouts`` a timeout is told at once, to who can ask for less at a time.
        """
        times = {"start": _number(start_seconds), "end": _number(end_seconds), "step": _number(step_seconds)}
        return await self._query(
            "/api/v1/query_range", {"query": query, **times}, "matrix", retry_timeouts=retry_timeouts
        )

    async def status(self, path: str) -> Answer:
        """Something below ``/api/v1/status``, such as ``buildinfo``.

        Raises:
            PrometheusError: As for ``instant``; many servers have no such path.
        """
        return await self._retried(f"/api/v1/status/{path}", None)

    async def _query(self, path: str, form: dict[str, str], result_type: str, *, retry_timeouts: bool = True) -> Answer:
        timeout = {"timeout": f"{int(self.settings.timeout_seconds * 1000)}ms"}
        answer = await self._retried(path, {**form, **timeout, **_FORM}, retry_timeouts=retry_timeouts)
        data = answer.data
        if (
            not isinstance(data, dict)
            or data.get("resultType") != result_type
            or not isinstance(data.get("result"), list)
        ):
            raise prometheus_errors.not_prometheus(self.settings, f"no {result_type} in the answer of {path}")
        return Answer(data["result"], answer.notes, answer.headers)

    async def _retried(self, path: str, form: Mapping[str, str] | None, *, retry_timeouts: bool = True) -> Answer:
        """Ask, and ask again where that can help."""
        failures = 0
        while True:
            try:
                async with self._slots:
                    answer = await self._attempt(path, form)
            except Refusal as error:
                failures += 1
                self._timeouts_in_a_row = self._timeouts_in_a_row + 1 if error.reason == "timeout" else 0
                if failures > self.settings.retries or not self._may_help(error, retry_timeouts=retry_timeouts):
                    raise
                await self._sleep(self._wait_seconds(error, failures))
            else:
                self._has_answered, self._timeouts_in_a_row = True, 0
                return answer

    def _may_help(self, error: Refusal, *, retry_timeouts: bool) -> bool:
        """Whether the same question may be answered soon."""
        if error.reason == "unreachable" and not self._has_answered:
            return False  # the address is wrong, rather than a server that starts anew
        if error.reason == "timeout":
            return retry_timeouts and self._timeouts_in_a_row < 2 * self.settings.concurrency
        return error.retriable

    def _wait_seconds(self, error: Refusal, failures: int) -> float:
        """What the server asked for, else full jitter, so that all who were refused do not come back together."""
        if error.retry_after_seconds is not None:
            return min(error.retry_after_seconds, _LONGEST_RETRY_AFTER_SECONDS) + 0.25 * self._random()
        ceiling = min(_FIRST_BACKOFF_SECONDS * 2.0**failures, _LONGEST_BACKOFF_SECONDS)
        return max(ceiling * self._random(), 0.1 * _FIRST_BACKOFF_SECONDS)

    async def _attempt(self, path: str, form: Mapping[str, str] | None) -> Answer:
        headers = credentials.headers(self.settings)
        tls = self._tls.context()
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
            )
        # A little longer than the server may take, so that its own words come.
        limits = aiohttp.ClientTimeout(total=self.settings.timeout_seconds + 2, sock_connect=CONNECT_SECONDS)
        with _translated(self.settings):
            async with self._session.request(
                "GET" if form is None else "POST",
                self.settings.url + path,
                data=form,
                headers=headers,
                ssl=tls,
                timeout=limits,
                allow_redirects=False,
            ) as response:
                body = await self._body(response)
                answered = {name.lower(): value for name, value in response.headers.items()}
                status = response.status
        if status != _OK:
            said = credentials.without_secrets(body, headers)
            raise prometheus_errors.refusal(self.settings, path, status, said, answered)
        answer = self._decoded(body, answered)
        notes = tuple(
            credentials.without_secrets(note.encode("utf-8", "replace"), headers).decode() for note in answer.notes
        )
        return replace(answer, notes=notes)

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in response.content.iter_chunked(1 << 18):
            size += len(part)
            if size > MOST_BYTES:
                raise Refusal(
                    "too_large",
                    f"{self.settings.url}: an answer is longer than {MOST_BYTES >> 20} MiB; ask for a shorter window,"
                    " fewer dimensions, or filter",
                )
            parts.append(part)
        return b"".join(parts)

    def _decoded(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        if body.lstrip()[:1] == b"<":
            raise prometheus_errors.not_prometheus(self.settings, "it is a web page, perhaps of a login")
        try:
            whole = _loaded(body)
        except (ValueError, RecursionError):
            raise Refusal(
                "garbage",
                f"{self.settings.url}: the answer is no JSON; is there a faulty proxy in between?",
                retriable=True,
            ) from None
        if not isinstance(whole, dict) or whole.get("status") != "success" or "data" not in whole:
            raise prometheus_errors.not_prometheus(self.settings, "its JSON is another")
        if whole.get("isPartial"):
            raise Refusal(
                "partial",
                f"{self.settings.url}: a part of its storage did not answer, so that the figures would be too low; see"
                " the state of its storage nodes",
                retriable=True,
            )
        warnings = whole.get("warnings")
        notes = tuple(credentials.one_line(str(warning)) for warning in warnings) if isinstance(warnings, list) else ()
        return Answer(whole["data"], notes, headers)


@contextmanager
def _translated(settings: PrometheusSettings) -> Iterator[None]:
    """Everything that a connection can do becomes a ``Refusal``."""
    url = settings.url
    try:
        yield
    except TimeoutError:
        raise prometheus_errors.timed_out(settings) from None
    except aiohttp.ClientConnectorCertificateError as error:
        why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        raise Refusal(
            "tls", f"{url}: its certificate is not trusted: {why}; give the authority's by --prometheus-ca-file"
        ) from None
    except aiohttp.ClientSSLError as error:
        raise Refusal(
            "tls", f"{url}: TLS failed: {credentials.why(error.os_error)}; does it speak https there?"
        ) from None
    except aiohttp.ClientConnectorDNSError:
        raise Refusal(
            "no_such_name", f"{url}: the name cannot be resolved; see the address, and the DNS here"
        ) from None
    except aiohttp.ClientConnectorError as error:
        raise Refusal(
            "unreachable",
            f"{url}: cannot connect: {credentials.why(error.os_error)}; is it running there?",
            retriable=True,
        ) from None
    except (aiohttp.InvalidURL, aiohttp.ClientResponseError) as error:
        raise prometheus_errors.not_prometheus(settings, f"no HTTP: {credentials.one_line(str(error))}") from None
    except (aiohttp.ClientError, OSError) as error:
        before = isinstance(error, aiohttp.ServerDisconnectedError)
        why = "closed before an answer" if before else "broken within the answer"
        raise Refusal(
            "broken", f"{url}: the connection was {why}; is there a proxy with limits?", retriable=True
        ) from None


def _loaded(body: bytes) -> Any:  # noqa: ANN401 - JSON
    whole = json.loads(body)
    if b"\\ud" in body or b"\\uD" in body:
        # Half of a surrogate pair is JSON, and no file takes it: one odd letter must not cost the report.
        whole = json.loads(json.dumps(whole, ensure_ascii=False).encode("utf-8", "replace"))
    return whole


def _labels(row: Mapping[str, Any]) -> dict[str, str]:
    """Labels of a row; raises what ``rows_read`` puts into words where they are none."""
    labels: dict[str, str] = row["metric"]
    "".join(labels.values())
    return labels


def _number(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".")
