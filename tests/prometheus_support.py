"""HTTP servers that stand where Prometheus stands: with scripted answers, or in front of a real one and faulty."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle

import aiohttp
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Server:
    """A server, and what it was asked."""

    url: str
    requests: list[web.Request] = field(default_factory=list)
    forms: list[dict[str, str]] = field(default_factory=list)


@asynccontextmanager
async def serving(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """A server on a port of its own; the handler answers everything."""
    server = Server("")

    async def answer(request: web.Request) -> web.StreamResponse:
        server.requests.append(request)
        server.forms.append({name: str(value) for name, value in (await request.post()).items()})
        return await handler(request)

    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
        await site.start()
        host, port = runner.addresses[0][:2]
        server.url = f"{'https' if tls else 'http'}://{host}:{port}"
        yield server
    finally:
        await runner.cleanup()


def success(result: object, kind: str = "vector", **more: object) -> web.Response:
    """An answer as Prometheus sends it."""
    return web.json_response({"status": "success", "data": {"resultType": kind, "result": result}, **more})


def failure(status: int, error: str, kind: str = "execution") -> web.Response:
    """A refusal as Prometheus sends it."""
    return web.json_response({"status": "error", "errorType": kind, "error": error}, status=status)


@dataclass
class FaultyProxy:
    """What a proxy in front of a real server does wrong; ``rate`` of all questions, by a seed."""

    upstream: str
    rate: float = 0.05
    faults: tuple[str, ...] = ("503", "429", "cut", "garbage", "stall", "drop")
    seed: int = 3
    stall_seconds: float = 3.0
    refuse: Callable[[dict[str, str]], bool] = lambda form: False  # noqa: ARG005 - the default refuses nothing
    told: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 - faults that come again, not secrets
        self._turns = cycle(self.faults)

    async def __call__(self, request: web.Request) -> web.StreamResponse:  # noqa: PLR0911 - a fault each
        """Answer a question, mostly."""
        form = {name: str(value) for name, value in (await request.post()).items()}
        if self.refuse(form):
            return failure(503, "storage is away", "unavailable")
        fault = next(self._turns) if self._random.random() < self.rate else ""
        self.told[fault] = self.told.get(fault, 0) + 1
        if fault == "503":
            return web.Response(status=503, text="upstream connect error")
        if fault == "429":
            return web.Response(status=429, headers={"Retry-After": "0"})
        if fault == "garbage":
            return web.Response(text='{"status":"success","data":{"resul', content_type="application/json")
        if fault == "stall":
            await asyncio.sleep(self.stall_seconds)
        if fault == "drop" and request.transport is not None:
            request.transport.abort()
            return web.Response()
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.upstream + request.path_qs, data=form or None) as answer,
        ):
            body = await answer.read()
            if fault == "cut":
                return await _cut(request, body)
            return web.Response(body=body, status=answer.status, content_type=answer.content_type)


async def _cut(request: web.Request, body: bytes) -> web.StreamResponse:
    """Half of the body, then the end of the connection."""
    response = web.StreamResponse(headers={"Content-Length": str(len(body)), "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.abort()
    return response


def vector(*samples: tuple[dict[str, str], str]) -> list[dict[str, object]]:
    """Rows of an instant query."""
    return [{"metric": labels, "value": [1_790_000_000, value]} for labels, value in samples]


@dataclass
class StubLedger:
    """A Prometheus whose recorded hours all have the same lines: whatever a test wants it to claim."""

    lines: Sequence[tuple[dict[str, str], str]] = ()
    """Labels, and active seconds."""
    money: Sequence[tuple[dict[str, str], str]] = ()
    warnings: tuple[str, ...] = ()
    newest_hour: float | None = None
    delay_seconds: float = 0.0
    asked: list[dict[str, str]] = field(default_factory=list)
    """Form and path of every question about the ledger."""

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        """Answer a question."""
        form = {name: str(value) for name, value in (await request.post()).items()}
        if "query" not in form:
            return web.json_response({"status": "error", "error": "not here"}, status=404)
        self.asked.append({"path": request.path, **form})
        await asyncio.sleep(self.delay_seconds)
        rows = self._rows(form["query"])
        if request.path.endswith("query_range"):
            start, end, step = (float(form[name]) for name in ("start", "end", "step"))
            moments = [start + number * step for number in range(int((end - start) / step + 1e-9) + 1)]
            found = [{"metric": labels, "values": [[at, text] for at in moments]} for labels, text in rows]
            return success(found, "matrix", warnings=list(self.warnings))
        at = float(form.get("time", "0"))
        found = [{"metric": labels, "value": [at, text]} for labels, text in rows]
        return success(found, warnings=list(self.warnings))

    def _rows(self, query: str) -> Sequence[tuple[dict[str, str], str]]:
        if "timestamp(" in query:
            return [] if self.newest_hour is None else [({}, str(self.newest_hour))]
        if "count_over_time(" in query:
            return [({}, "24")]
        is_idle = 'state="idle"' in query
        if 'quantity="cost"' in query:
            return [row for row in self.money if (row[0].get("state") == "idle") == is_idle]
        if ":gpu_capacity_seconds:delta1h" in query:
            return [({}, str(sum(float(text) for _, text in self.lines)))]
        return self.lines if 'quantity="seconds"' in query and not is_idle else ()
