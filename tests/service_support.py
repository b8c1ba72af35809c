"""The cost service over real servers, certificates and web configurations, and raw HTTP clients."""

import asyncio
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import bcrypt
import pytest
from aiohttp import web
from fleet_support import END_SECONDS

from exporter.config.options import FleetSettings
from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost.budgets import Budget, BudgetState, standings
from exporter.cost.dimensions import Filters, LineKey
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.ledger import LedgerSource
from exporter.cost.live import PodDocument
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.recommend import Recommendation, read_recommendations
from exporter.cost.window import parse_window
from exporter.errors import PrometheusError
from exporter.service.data import label_values
from exporter.service.fleet import Fleet, Keeping
from exporter.service.routes import create_app
from exporter.service.run import fleet_of
from exporter.service.settings import ServeSettings, load_settings
from exporter.web.access import WebAccess
from exporter.web.http_server import HttpServer, Limits, bind

PASSWORD = "correct horse"  # noqa: S105 - of a server for one test


def hashed(password: str = PASSWORD, prefix: bytes = b"2y") -> str:
    """Return a cheap hash, in the form of htpasswd."""
    return (b"$" + prefix + bcrypt.hashpw(password.encode(), bcrypt.gensalt(4))[3:]).decode()


@asynccontextmanager
async def http_server(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    access: WebAccess | None = None,
    limits: Limits | None = None,
    count: Callable[[str, str], None] = lambda _part, _reason: None,
) -> AsyncIterator[int]:
    """Serve an application on a free port, as agent and service do."""
    listener = bind(host, 0)
    server = HttpServer(
        app=app, listener=listener, shutdown_seconds=1.0, access=access, limits=limits or Limits(), count=count
    )
    async with server.running():
        watching = asyncio.ensure_future(server.watch())
        try:
            yield listener.getsockname()[1]
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Certificates:
    """An authority, a server for 127.0.0.1 and localhost, and a client named prometheus.example."""

    folder: Path

    def path(self, name: str) -> Path:
        """``ca.pem``, ``server.pem``, ``server.key``, ``client.pem``, ``client.key``."""
        return self.folder / name

    def client(self, *, shown: bool = False, most: ssl.TLSVersion | None = None) -> ssl.SSLContext:
        """Return a client's context that trusts the authority, and sends its certificate on request."""
        context = ssl.create_default_context(cafile=str(self.path("ca.pem")))
        if shown:
            context.load_cert_chain(self.path("client.pem"), self.path("client.key"))
        if most is not None:
            context.maximum_version = most
        return context


def make_certificates(folder: Path) -> Certificates:
    """Make new certificates in a folder, which may have old ones."""
    folder.mkdir(exist_ok=True)
    _openssl(
        folder,
        "req",
        "-x509",
        *_KEY,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-subj",
        "/CN=test authority",
        "-days",
        "2",
    )
    _issue(folder, "server", "DNS:localhost,IP:127.0.0.1", "serverAuth")
    _issue(folder, "client", "DNS:prometheus.example", "clientAuth")
    return Certificates(folder)


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _issue(folder: Path, name: str, names: str, usage: str) -> None:
    _openssl(folder, "req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / f"{name}.ext").write_text(f"subjectAltName={names}\nextendedKeyUsage={usage}\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")


def _openssl(folder: Path, *arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl on the PATH: make install")
    subprocess.run([program, *arguments], cwd=folder, check=True, capture_output=True)


def web_file(folder: Path, *, tls: Mapping[str, str] | None = None, users: Mapping[str, str] | None = None) -> Path:
    """Write a web configuration next to its certificates."""
    lines = []
    if tls is not None:
        whole = {"cert_file": "server.pem", "key_file": "server.key", **tls}
        lines += ["tls_server_config:", *(f"  {key}: {value}" for key, value in whole.items())]
    if users:
        lines += ["basic_auth_users:", *(f"  {user}: {known}" for user, known in users.items())]
    path = folder / "web.yaml"
    beside = folder / "web.yaml.new"
    beside.write_text("\n".join(lines) + "\n")
    beside.replace(path)
    return path


HOUR_SECONDS = 3600
Reply = TypeVar("Reply")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running service."""

    url: str
    """Address without a slash at the end."""
    fleet: Fleet
    loop: asyncio.AbstractEventLoop
    """Event loop of the fleet."""

    def ask(self, question: Coroutine[Any, Any, Reply]) -> Reply:
        """Return the fleet's answer to another thread."""
        return asyncio.run_coroutine_threadsafe(question, self.loop).result(120)


def live_pods(uses: Sequence[PodDocument] | None, url: str) -> Callable[[Filters], Awaitable[Sequence[PodDocument]]]:
    """Return a reader of these pods, filtered by namespace; ``None``: it reports that Prometheus is down."""

    async def pods(filters: Filters) -> Sequence[PodDocument]:
        if uses is None:
            raise PrometheusError("unreachable", f"{url}: no answer; see whether Prometheus runs", retriable=True)
        wanted = filters.wanted.get("namespace")
        return [use for use in uses if wanted is None or use.namespace in wanted]

    return pods


@asynccontextmanager
async def served(
    prometheus_url: str,
    now_seconds: float,
    *,
    pods: Sequence[PodDocument] | None = (),
    recommendations: Sequence[Recommendation] | None = (),
    budgets: Sequence[BudgetState | Budget] = (),
    problem: str = "",
    settings: ServeSettings | None = None,
) -> AsyncIterator[Served]:
    """Run the service on a free port, with its clock stopped at ``now_seconds``.

    The service itself reads recommendations of ``None``, and the state of each ``Budget``.
    """
    asked = PrometheusSettings(url=prometheus_url, retries=0, timeout_seconds=60.0)
    async with PrometheusClient(asked) as client:
        ledger = PrometheusLedger(client)
        chosen = settings or ServeSettings()
        fleet = fleet_of(chosen.fleet, client, client, lambda: now_seconds)
        fleet.pods = live_pods(pods, prometheus_url)
        fleet.newest.value, fleet.newest.problem = now_seconds // HOUR_SECONDS * HOUR_SECONDS, problem
        fleet.looked = True
        ledger = PrometheusLedger(client)
        fleet.labels.value = {} if problem else await label_values(client, now_seconds)
        fleet.recommendations.value = (
            await read_recommendations(client, ledger, now_seconds) if recommendations is None else recommendations
        )
        fleet.budgets.value = [
            *[state for state in budgets if isinstance(state, BudgetState)],
            *await standings([one for one in budgets if isinstance(one, Budget)], ledger, now_seconds),
        ]
        app = create_app(fleet, chosen)
        async with http_server(app) as port:
            try:
                yield Served(url=f"http://127.0.0.1:{port}", fleet=fleet, loop=asyncio.get_running_loop())
            finally:
                await fleet.readings.stop()


def quiet_fleet(now_seconds: float, budgets: Sequence[BudgetState] = (), source: LedgerSource | None = None) -> Fleet:
    """Return a fleet with only the state of these budgets, which does not query a Prometheus for a ledger."""
    client = PrometheusClient(PrometheusSettings(url="http://127.0.0.1:1"))
    ledger = source or PrometheusLedger(client)
    keeping = Keeping(prometheus=ledger, path=None, history_days=1)
    fleet = Fleet(client, ledger, keeping, lambda: now_seconds, FleetSettings(refresh_interval_seconds=3600.0))
    fleet.budgets.value = budgets
    return fleet


@contextmanager
def in_thread(service: AbstractAsyncContextManager[Served]) -> Iterator[Served]:
    """Run the service on a separate loop, for tests that block: a browser's, or plain requests."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="service")
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(service.__aenter__(), loop).result(60)
        asyncio.run_coroutine_threadsafe(service.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def recommendation(namespace: str, workload: str, **changes: object) -> Recommendation:
    """Return a recommendation for a workload."""
    values: dict[str, object] = {
        "advice": "fewer-gpus",
        "cluster": "alpha",
        "namespace": namespace,
        "kind": "Deployment",
        "workload": workload,
        "team": "search",
        "model": "NVIDIA H100 80GB HBM3",
        "title": "Give back 3 of 8 H100",
        "gpus": 3.0,
        "currency": "USD",
        "per_month": 8_431.5,
        "evidence": ("3 of its 8 GPUs were idle in all of 612 measured hours.", "Coverage was 98 % of 624 hours."),
        "risk": "A load that comes once a month would not fit; take one GPU away at a time.",
        "risk_level": "low",
        "command": f"kubectl -n {namespace} edit deployment/{workload}",
    }
    values |= changes
    owner = LineKey(**{name: str(values.pop(name)) for name in LineKey._fields if name in values})
    return Recommendation(owner=owner, **values)  # type: ignore[arg-type]


def budget_state(name: str, amount: float, spent: float, projected: float | None, now_seconds: float) -> BudgetState:
    """Return a budget of this month for a team."""
    return BudgetState(
        budget=Budget(name=name, currency="USD", amount=amount, period="month", owner={"team": name}),
        period=parse_window("month", now_seconds),
        spent=spent,
        projected=projected,
        unpriced_seconds=0.0,
        as_of_seconds=now_seconds,
        passed=tuple(part for part in (0.5, 0.8, 1.0) if spent >= part * amount),
    )


NOW = END_SECONDS + 1500.0
"""Ten minutes after the newest recorded hour of the small fleet."""


class Clock:
    """A clock that stands still until a test sets it."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the service."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:  # noqa: ANN401 - any document
        return json.loads(self.body)


@dataclass(frozen=True, slots=True)
class Running:
    """A running service."""

    url: str
    fleet: Fleet
    clock: Clock
    session: aiohttp.ClientSession

    async def get(self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Answer:
        """Request a path with its query, unchanged."""
        async with self.session.request(method, self.url + path, headers=headers, allow_redirects=False) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    async def json(self, path: str) -> Any:  # noqa: ANN401 - any document
        """Return the document of a path, which must be answered with 200."""
        answer = await self.get(path)
        assert answer.status == 200, answer.text
        return answer.json()

    async def round(self) -> bool:
        """Run one round of the service; return false without an answer from Prometheus."""
        await self.fleet.look(self.clock.now)
        return not self.fleet.newest.problem

    async def keep(self) -> None:
        """Close the due days."""
        await self.fleet.close_days(self.clock.now)


@asynccontextmanager
async def running(prometheus_url: str, *, now: float = NOW, **options: object) -> AsyncIterator[Running]:
    """Run a service over a Prometheus; ``options`` are those of ``serve``, with underscores. A test runs its rounds."""
    flags = {"prometheus": prometheus_url, "prometheus_retries": 1, "prometheus_timeout": "20s", **options}
    settings = load_settings(flags, {})
    clock = Clock(now)
    async with PrometheusClient(settings.prometheus) as client, aiohttp.ClientSession() as session:
        fleet = fleet_of(settings.fleet, client, client, clock)
        fleet.load_budgets()
        fleet.keeping.open(now)
        try:
            async with http_server(create_app(fleet, settings)) as port:
                try:
                    yield Running(f"http://127.0.0.1:{port}", fleet, clock, session)
                finally:
                    await fleet.readings.stop()
        finally:
            fleet.keeping.close()


@dataclass(frozen=True, slots=True)
class Raw:
    """An answer as received."""

    status: int
    headers: tuple[tuple[str, str], ...]
    """Names in lower case; a repeated header is here repeatedly."""
    body: bytes

    def values(self, name: str) -> list[str]:
        """Return all values of a header."""
        return [value for key, value in self.headers if key == name]


async def raw(port: int, request: bytes) -> Raw:
    """Send bytes to a port of this host and read until it closes the connection; status 0 means no answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        async with asyncio.timeout(30):
            answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    pairs = tuple((name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines))
    return Raw(int(words[1]) if len(words) > 1 else 0, pairs, body)


def ask(path: str, method: str = "GET", **headers: str) -> bytes:
    """Return a request as bytes, with its path unchanged; underscores of header names become hyphens."""
    sent = {"Host": "localhost", "Connection": "close"} | {key.replace("_", "-"): of for key, of in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()


def openssl(*arguments: str, folder: Path, said: str = "") -> str:
    """Return the output of openssl for these arguments, with any exit code."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl on the PATH: make install")
    done = subprocess.run(
        [program, *arguments], cwd=folder, input=said, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr
