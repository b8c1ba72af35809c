"""The cost service's application over the small simulated fleet behind a real Prometheus, for tests of its pages."""

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from recommend_support import with_owner
from web_support import http_server

from exporter.config.prometheus_options import PrometheusSettings
from exporter.cost.budgets import Budget, BudgetState, standings
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.holdings import Recommendation
from exporter.cost.ledger import Filters, parse_window
from exporter.cost.live import PodDocument, price_rows
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.recommend import read_recommendations
from exporter.errors import PrometheusError
from exporter.service.data import Book, BookSources, Freshness, label_values, newest_hour
from exporter.service.routes import Face, create_app
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


def live_pods(uses: Sequence[PodDocument] | None, url: str) -> "PodsOf":
    """Answers with these pods; ``None``: says that Prometheus is away."""
    return PodsOf(tuple(uses) if uses is not None else None, url)


@dataclass(frozen=True, slots=True)
class PodsOf:
    """A source of live pods that has only those it was given."""

    uses: tuple[PodDocument, ...] | None
    url: str

    async def __call__(self, filters: Filters) -> Sequence[PodDocument]:
        """The pods of the namespaces that are asked for."""
        if self.uses is None:
            raise PrometheusError("unreachable", f"{self.url}: no answer; see whether Prometheus runs", retriable=True)
        wanted = filters.wanted.get("namespace")
        return [use for use in self.uses if wanted is None or use.namespace in wanted]


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
        sources = BookSources(
            ledger=ledger,
            prices=partial(price_rows, client),
            pods=live_pods(pods, prometheus_url),
            newest_hour=partial(newest_hour, client),
            labels=partial(label_values, client),
            recommendations=partial(read_recommendations, client, ledger),
        )
        book = Book(sources, lambda: now_seconds)
        hour = now_seconds // HOUR_SECONDS * HOUR_SECONDS
        book.show(Freshness(now_seconds=now_seconds, read_until_seconds=hour, problem=problem or None))
        book.labels.value = {} if problem else await label_values(client, now_seconds)
        book.recommendations.value = (
            await read_recommendations(client, ledger, now_seconds) if recommendations is None else recommendations
        )
        book.budgets.value = [
            *[state for state in budgets if isinstance(state, BudgetState)],
            *await standings([one for one in budgets if isinstance(one, Budget)], ledger, now_seconds),
        ]
        app = create_app(book, settings or ServeSettings(), Face())
        async with http_server(app) as port:
            try:
                yield Served(url=f"http://127.0.0.1:{port}", book=book, loop=asyncio.get_running_loop())
            finally:
                await book.readings.stop()


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
    return Recommendation(**with_owner({**values, **changes}))  # type: ignore[arg-type]


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
