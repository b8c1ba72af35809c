"""Queries Prometheus or a compatible engine over HTTP, with retries, limits and clear errors."""

import asyncio
import gc
import json
import os
import random
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import aiohttp

from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost import prometheus_access
from exporter.cost.ledger import MOST_FIGURE
from exporter.cost.window import DAY_SECONDS, HOUR_SECONDS
from exporter.errors import PrometheusError

MOST_BYTES = 512 << 20
"""Maximum memory of one answer, unpacked and decoded; the event loop blocks for less than a second."""
_LEAST_MEMORY_BYTES, _MOST_MEMORY_BYTES = 64 << 20, 4 << 30
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_PIECE_BYTES, _IN_THREAD_BYTES = 1 << 18, 1 << 20
_VALUE_BYTES, _OBJECT_BYTES = 64, 240
"""Memory in CPython of a number, a short string or a list, with its place in a list, and of a small object."""
_PLAIN_TEXT, _WIDE_TEXT = 3, 9
"""Bytes of memory for a byte of JSON: the byte, the text and its strings; an emoji makes each letter take 4 bytes."""
CONNECT_SECONDS = 10.0
_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS, _LONGEST_RETRY_AFTER_SECONDS = 0.25, 8.0, 60.0
_OK = 200
# Thanos: no partial answer, one series of replicas. VictoriaMetrics: no partial answer, exact times. Other engines
# ignore these.
_FORM = {"partial_response": "false", "dedup": "true", "deny_partial_response": "1", "nocache": "1"}


class SeriesSample(NamedTuple):
    """A value of an instant query."""

    labels: dict[str, str]
    value: float


def by_labels(samples: Iterable[SeriesSample], names: Sequence[str]) -> dict[tuple[str, ...], float]:
    """Return the values by the given labels; an absent label is empty."""
    return {tuple([sample.labels.get(name, "") for name in names]): sample.value for sample in samples}


class MemoryBudget:
    """The memory for answers, shared by all clients of a process.

    Args:
        most_bytes: Maximum for unpacked and decoded answers, and for the sums over them.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self.lock = threading.RLock()


class MemoryUse:
    """Memory of one answer, or of the sums of one reading; deleting this object returns the memory to the budget.

    Args:
        budget: The budget that all answers share.
        most_bytes: Maximum of this use; by default the whole budget.
    """

    def __init__(self, budget: MemoryBudget, most_bytes: int | None = None) -> None:
        self._budget = budget
        self._most_bytes = budget.most_bytes if most_bytes is None else min(most_bytes, budget.most_bytes)
        self.bytes = 0

    def grow(self, count: int, reason: str = "too_large") -> None:
        """Take ``count`` more bytes from the budget.

        Raises:
            PrometheusError: This use would exceed its maximum, or all uses together would exceed the budget.
        """
        budget, alone = self._budget, self.bytes + count > self._most_bytes
        with budget.lock:
            if not alone and budget.used_bytes + count <= budget.most_bytes:
                budget.used_bytes += count
                self.bytes += count
                return
        most, what = (self._most_bytes, "an answer") if alone else (budget.most_bytes, "all answers together")
        fix = "ask for a shorter window, fewer dimensions, or filter"
        raise PrometheusError(reason, f"Prometheus: {what} would take more than {most >> 20} MiB of memory; {fix}")

    def __del__(self) -> None:
        """Return the bytes to the budget: the answer is in use as long as a reference to this object exists."""
        with self._budget.lock:
            self._budget.used_bytes -= self.bytes


def memory_budget_bytes(cgroup_limits: Sequence[str] = _CGROUP_LIMITS) -> int:
    """Return half of the memory limit of the container, or of the memory of the machine.

    Args:
        cgroup_limits: Files that may contain the container's limit, in bytes.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in cgroup_limits:
        with suppress(OSError, ValueError):  # "max" is not a number: no limit
            limits.append(int(Path(path).read_text(encoding="ascii")))
    return max(_LEAST_MEMORY_BYTES, min(min(limits) // 2, _MOST_MEMORY_BYTES))


MEMORY = MemoryBudget(memory_budget_bytes())
"""Budget of this process."""


@dataclass(frozen=True, slots=True)
class PrometheusAnswer:
    """A decoded answer; ``headers`` are by name in lower case."""

    data: Any
    """Data; for a query, a list of objects with ``metric`` and ``value`` or ``values``, values as texts."""
    notes: tuple[str, ...] = ()
    """Warnings of the server, one line each."""
    headers: Mapping[str, str] | None = None
    memory: MemoryUse | None = field(default=None, repr=False, compare=False)
    """Memory of ``data``, which stays reserved as long as this answer is in use."""


class PrometheusClient:
    """Sends queries to one server, a few at a time. Use it as an asynchronous context manager.

    It ignores proxies of the environment and ``.netrc``, because most proxies have no route to Prometheus.

    Args:
        settings: Address, credentials and limits.
        random: Returns 0..1, for the waits between attempts.
        sleep: Waits for a number of seconds.
        memory: Budget for answers; by default the budget of this process.
    """

    def __init__(
        self,
        settings: PrometheusSettings,
        *,
        random: Callable[[], float] = random.random,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        memory: MemoryBudget = MEMORY,
    ) -> None:
        self.settings = settings
        self.memory = memory
        self._random = random
        self._sleep = sleep
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._has_answered = False
        self._timeouts_in_a_row = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; a later query opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def instant(self, query: str, at_seconds: float | None) -> tuple[SeriesSample, ...]:
        """Run an instant query; values that are not numbers within ``MOST_FIGURE`` are left out.

        Args:
            query: PromQL.
            at_seconds: Unix time; ``None``: the current time of the server.

        Raises:
            PrometheusError: All attempts failed, or the answer cannot be read.
        """
        answer = await self.ask_instant(query, at_seconds)
        with prometheus_access.rows_read(self.settings):
            pairs = [(_labels(row), float(row["value"][1])) for row in answer.data]
        return tuple(SeriesSample(labels, value) for labels, value in pairs if abs(value) <= MOST_FIGURE)

    async def ask_instant(self, query: str, at_seconds: float | None) -> PrometheusAnswer:
        """Run an instant query and return its rows: a list of ``{"metric": {...}, "value": [seconds, text]}``."""
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
    ) -> PrometheusAnswer:
        """Run a range query and return its rows: a list of ``{"metric": {...}, "values": [[seconds, text], ...]}``.

        Without ``retry_timeouts``, a timeout is raised at once, for callers that can send smaller queries.

        Raises:
            PrometheusError: As for ``instant``.
        """
        times = {"start": _number(start_seconds), "end": _number(end_seconds), "step": _number(step_seconds)}
        return await self._query(
            "/api/v1/query_range", {"query": query, **times}, "matrix", retry_timeouts=retry_timeouts
        )

    async def status(self, path: str) -> PrometheusAnswer:
        """Return the answer of a path below ``/api/v1/status``, such as ``buildinfo``.

        Raises:
            PrometheusError: As for ``instant``; many servers have no such path.
        """
        return await self._retried(f"/api/v1/status/{path}", None)

    async def _query(
        self, path: str, form: dict[str, str], result_type: str, *, retry_timeouts: bool = True
    ) -> PrometheusAnswer:
        timeout = {"timeout": f"{int(self.settings.timeout_seconds * 1000)}ms"}
        answer = await self._retried(path, {**form, **timeout, **_FORM}, retry_timeouts=retry_timeouts)
        data = answer.data
        if (
            not isinstance(data, dict)
            or data.get("resultType") != result_type
            or not isinstance(data.get("result"), list)
        ):
            raise prometheus_access.not_prometheus(self.settings, f"no {result_type} in the answer of {path}")
        return replace(answer, data=data["result"])

    async def _retried(
        self, path: str, form: Mapping[str, str] | None, *, retry_timeouts: bool = True
    ) -> PrometheusAnswer:
        """Send a request, and retry if a retry can succeed."""
        failures = 0
        while True:
            try:
                async with self._slots:
                    answer = await self._attempt(path, form)
            except PrometheusError as error:
                error.__traceback__ = error.__context__ = None  # traceback frames would keep the answer in memory
                failures += 1
                self._timeouts_in_a_row = self._timeouts_in_a_row + 1 if error.reason == "timeout" else 0
                if failures > self.settings.retries or not self._may_help(error, retry_timeouts=retry_timeouts):
                    raise
                await self._sleep(self._wait_seconds(error, failures))
            else:
                self._has_answered, self._timeouts_in_a_row = True, 0
                return answer

    def _may_help(self, error: PrometheusError, *, retry_timeouts: bool) -> bool:
        """Return whether a retry of the query may succeed soon."""
        if error.reason == "unreachable" and not self._has_answered:
            return False  # more likely a wrong address than a server that restarts
        if error.reason == "timeout":
            return retry_timeouts and self._timeouts_in_a_row < 2 * self.settings.concurrency
        return error.retriable

    def _wait_seconds(self, error: PrometheusError, failures: int) -> float:
        """Return the wait that the server requests, else a wait with full jitter, to spread the retries of clients."""
        if error.retry_after_seconds is not None:
            return min(error.retry_after_seconds, _LONGEST_RETRY_AFTER_SECONDS) + 0.25 * self._random()
        ceiling = min(_FIRST_BACKOFF_SECONDS * 2.0**failures, _LONGEST_BACKOFF_SECONDS)
        return max(ceiling * self._random(), 0.1 * _FIRST_BACKOFF_SECONDS)

    async def _attempt(self, path: str, form: Mapping[str, str] | None) -> PrometheusAnswer:
        headers = {**prometheus_access.headers(self.settings), "Accept-Encoding": "gzip"}
        memory = MemoryUse(self.memory, MOST_BYTES)
        tls = prometheus_access.tls_of(self.settings)
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        # A little more than the limit of the server, so that its own error arrives.
        limits = aiohttp.ClientTimeout(total=self.settings.timeout_seconds + 2, sock_connect=CONNECT_SECONDS)
        try:
            async with self._session.request(
                "GET" if form is None else "POST",
                self.settings.url + path,
                data=form,
                headers=headers,
                ssl=tls,
                timeout=limits,
                allow_redirects=False,
            ) as response:
                body = await self._body(response, memory)
                answered = {name.lower(): value for name, value in response.headers.items()}
                status = response.status
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _unanswered(self.settings, error) from None
        if status != _OK:
            said = prometheus_access.without_secrets(bytes(body[:_IN_THREAD_BYTES]), headers)
            raise prometheus_access.refusal(self.settings, path, status, said, answered)
        if _has_surrogates(body):
            memory.grow(memory.bytes)  # such a body is decoded twice
        is_large = len(body) > _IN_THREAD_BYTES
        answer = await asyncio.to_thread(self._decoded, body, answered) if is_large else self._decoded(body, answered)
        notes = tuple(
            prometheus_access.without_secrets(note.encode("utf-8", "replace"), headers).decode()
            for note in answer.notes
        )
        return replace(answer, notes=notes, memory=memory)

    async def _body(self, response: aiohttp.ClientResponse, memory: MemoryUse) -> bytearray:
        body, text = bytearray(), _PLAIN_TEXT
        # In small unpacked pieces, so that a small compressed answer cannot exceed the budget.
        async for piece in response.content.iter_chunked(_PIECE_BYTES):
            if text == _PLAIN_TEXT and not piece.isascii():
                memory.grow(len(body) * (_WIDE_TEXT - _PLAIN_TEXT))
                text = _WIDE_TEXT
            memory.grow(len(piece) * text + _decoded_bytes(piece))
            body += piece
        return body

    def _decoded(self, body: bytearray, headers: Mapping[str, str]) -> PrometheusAnswer:
        if body[:_PIECE_BYTES].lstrip()[:1] == b"<":
            raise prometheus_access.not_prometheus(self.settings, "it is a web page, perhaps of a login")
        try:
            whole = _loaded(body)
        except (ValueError, RecursionError):
            words = f"{self.settings.url}: the answer is no JSON; is there a faulty proxy in between?"
            raise PrometheusError("garbage", words, retriable=True) from None
        if not isinstance(whole, dict) or whole.get("status") != "success" or "data" not in whole:
            raise prometheus_access.not_prometheus(self.settings, "its JSON is another")
        if whole.get("isPartial"):
            why = "a part of its storage did not answer, so that the figures would be too low"
            words = f"{self.settings.url}: {why}; see the state of its storage nodes"
            raise PrometheusError("partial", words, retriable=True)
        warnings = whole.get("warnings")
        listed = warnings if isinstance(warnings, list) else ()
        return PrometheusAnswer(whole["data"], tuple(prometheus_access.one_line(str(one)) for one in listed), headers)


def _unanswered(settings: PrometheusSettings, error: Exception) -> PrometheusError:  # noqa: PLR0911 - a cause each
    """Return the error of a connection without an answer."""
    url = settings.url
    if isinstance(error, TimeoutError):
        return prometheus_access.timed_out(settings)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
        fix = "give the authority's by --prometheus-ca-file"
        return PrometheusError("tls", f"{url}: its certificate is not trusted: {why}; {fix}")
    if isinstance(error, aiohttp.ClientSSLError):
        why = prometheus_access.why(error.os_error)
        return PrometheusError("tls", f"{url}: TLS failed: {why}; does it speak https there?")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return PrometheusError("no_such_name", f"{url}: the name cannot be resolved; see the address, and the DNS here")
    if isinstance(error, aiohttp.ClientConnectorError):
        why = prometheus_access.why(error.os_error)
        return PrometheusError("unreachable", f"{url}: cannot connect: {why}; is it running there?", retriable=True)
    if isinstance(error.__cause__, aiohttp.http_exceptions.ContentEncodingError) or "content-encoding" in str(error):
        words = f"{url}: the answer cannot be unpacked; is there a faulty proxy in between?"
        return PrometheusError("garbage", words, retriable=True)
    if isinstance(error, aiohttp.InvalidURL | aiohttp.ClientResponseError):
        return prometheus_access.not_prometheus(settings, f"no HTTP: {prometheus_access.one_line(str(error))}")
    before = isinstance(error, aiohttp.ServerDisconnectedError)
    why = "closed before an answer" if before else "broken within the answer"
    return PrometheusError("broken", f"{url}: the connection was {why}; is there a proxy with limits?", retriable=True)


def _decoded_bytes(piece: bytes) -> int:
    """Return the maximum memory of the values in a piece of JSON, without text: two characters can be an object."""
    values = len(piece) - len(piece.translate(None, b",:["))  # takes a fifth of the time of counting each character
    return values * _VALUE_BYTES + piece.count(b"{") * _OBJECT_BYTES


def _has_surrogates(body: bytearray) -> bool:
    return b"\\" in body and (b"\\ud" in body or b"\\uD" in body)


def _loaded(body: bytearray) -> Any:  # noqa: ANN401 - JSON
    was_enabled = gc.isenabled()  # the report command disables it for its whole run
    gc.disable()  # JSON has no cycles, and a collection over millions of new objects takes most of the time
    try:
        whole = json.loads(body)
    finally:
        if was_enabled:
            gc.enable()
    if _has_surrogates(body):
        # Half of a surrogate pair is valid JSON, but cannot be written to a file; such a character is replaced.
        whole = json.loads(json.dumps(whole, ensure_ascii=False).encode("utf-8", "replace"))
    return whole


def _labels(row: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of a row; labels that are not texts raise an error that ``rows_read`` converts."""
    labels: dict[str, str] = row["metric"]
    "".join(labels.values())
    return labels


def _number(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".")


_DURATION = re.compile(r"(\d+)(y|w|d|h|m(?!s)|s)")
_SECONDS = {"y": 365 * DAY_SECONDS, "w": 7 * DAY_SECONDS, "d": DAY_SECONDS, "h": HOUR_SECONDS, "m": 60, "s": 1}
_FATAL = frozenset({"unreachable", "no_such_name", "tls", "unauthorised", "forbidden", "redirected", "credentials"})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryEngine:
    """The query engine of the server."""

    name: str
    """``Prometheus``, ``VictoriaMetrics``, ``Thanos``, ``Grafana Mimir``; ``Prometheus API`` if it is unknown."""
    version: str = ""
    """Version; empty if unknown: VictoriaMetrics reports the version of Prometheus that it imitates."""
    retention_seconds: float | None = None
    """Retention of the server; ``None`` if unknown."""

    @property
    def title(self) -> str:
        """Name and version: ``Prometheus 2.42.0``."""
        return f"{self.name} {self.version}".rstrip()


async def detect(client: PrometheusClient) -> QueryEngine:
    """Return the query engine of the server.

    Raises:
        PrometheusError: No query can be answered: wrong address, no access. An unknown engine raises no error.
    """
    try:
        answer = await client.status("buildinfo")
    except PrometheusError as error:
        if error.reason in _FATAL:
            raise
        return QueryEngine(name="Prometheus API")
    data = answer.data if isinstance(answer.data, dict) else {}
    version = str(data.get("version", "")).removeprefix("v").partition("+")[0][:40]
    if answer.headers and "x-server-hostname" in answer.headers:
        return QueryEngine(name="VictoriaMetrics")
    application = str(data.get("application", ""))[:40]
    if application:
        return QueryEngine(name=application, version=version)
    if version.startswith("0."):
        return QueryEngine(name="Thanos", version=version)
    return QueryEngine(name="Prometheus", version=version, retention_seconds=await _retention_seconds(client))


async def _retention_seconds(client: PrometheusClient) -> float | None:
    try:
        answer = await client.status("runtimeinfo")
    except PrometheusError:
        return None  # many servers deny access to it; only a note depends on it
    text = answer.data.get("storageRetention", "") if isinstance(answer.data, dict) else ""
    return seconds_of(str(text))


def seconds_of(retention: str) -> float | None:
    """Return the seconds of ``15d`` or ``15d or 10GiB``; ``None`` for every other form."""
    text = retention.partition(" or ")[0]
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return float(sum(int(number) * _SECONDS[unit] for number, unit in parts))
