"""The cost service's application over the small simulated fleet behind a real Prometheus, for tests of its pages."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from web_support import http_server

from exporter.config.options import BookSettings
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
from exporter.service.book import Book, Keeping
from exporter.service.data import label_values
from exporter.service.routes import create_app
from exporter.service.run import book_of
from exporter.service.settings import ServeSettings

HOUR_SECONDS = 3600
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A running service."""

    url: str
    """Without a slash at its end."""
    book: Book
    loop: asyncio.AbstractEventLoop
    """Where the book lives."""

    def ask(self, question: Coroutine[Any, Any, Answer]) -> Answer:
        """What the book answers, asked from another thread."""
        return asyncio.run_coroutine_threadsafe(question, self.loop).result(120)


def live_pods(uses: Sequence[PodDocument] | None, url: str) -> Callable[[Filters], Awaitable[Sequence[PodDocument]]]:
    """Answers with those of these pods that are in the namespaces; ``None``: reports that Prometheus is away."""

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
    """The service on a free port, its clock standing at ``now_seconds``.

    Recommendations of ``None`` are read as the service reads them, and so is how a ``Budget`` stands.
    """
    asked = PrometheusSettings(url=prometheus_url, retries=0, timeout_seconds=60.0)
    async with PrometheusClient(asked) as client:
        ledger = PrometheusLedger(client)
        chosen = settings or ServeSettings()
        book = book_of(chosen.books, client, client, lambda: now_seconds)
        book.pods = live_pods(pods, prometheus_url)
        book.newest.value, book.newest.problem = now_seconds // HOUR_SECONDS * HOUR_SECONDS, problem
        book.looked = True
        ledger = PrometheusLedger(client)
        book.labels.value = {} if problem else await label_values(client, now_seconds)
        book.recommendations.value = (
            await read_recommendations(client, ledger, now_seconds) if recommendations is None else recommendations
        )
        book.budgets.value = [
            *[state for state in budgets if isinstance(state, BudgetState)],
            *await standings([one for one in budgets if isinstance(one, Budget)], ledger, now_seconds),
        ]
        app = create_app(book, chosen)
        async with http_server(app) as port:
            try:
                yield Served(url=f"http://127.0.0.1:{port}", book=book, loop=asyncio.get_running_loop())
            finally:
                await book.readings.stop()


def quiet_book(now_seconds: float, budgets: Sequence[BudgetState] = (), source: LedgerSource | None = None) -> Book:
    """A book that has read nothing but the state of these budgets, and asks no Prometheus for a ledger."""
    client = PrometheusClient(PrometheusSettings(url="http://127.0.0.1:1"))
    ledger = source or PrometheusLedger(client)
    keeping = Keeping(prometheus=ledger, path=None, history_days=1)
    book = Book(client, ledger, keeping, lambda: now_seconds, BookSettings(refresh_interval_seconds=3600.0))
    book.budgets.value = budgets
    return book


@contextmanager
def beside(service: AbstractAsyncContextManager[Served]) -> Iterator[Served]:
    """The service on a loop of its own, for tests that block: a browser's, or plain requests."""
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
    """A recommendation to a workload."""
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
    """A budget of this month for a team."""
    return BudgetState(
        budget=Budget(name=name, currency="USD", amount=amount, period="month", owner={"team": name}),
        period=parse_window("month", now_seconds),
        spent=spent,
        projected=projected,
        unpriced_seconds=0.0,
        as_of_seconds=now_seconds,
        passed=tuple(part for part in (0.5, 0.8, 1.0) if spent >= part * amount),
    )
