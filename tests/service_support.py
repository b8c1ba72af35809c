"""A cost service over a real Prometheus, real SQLite and real HTTP, at a time of the test's choice."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from fleet_support import END_SECONDS
from web_support import http_server

from exporter.cost.prometheus import PrometheusClient
from exporter.service.book import Book
from exporter.service.routes import create_app
from exporter.service.run import book_of
from exporter.service.settings import load_settings

NOW = END_SECONDS + 1500.0
"""Ten minutes after the newest recorded hour of the small fleet."""


class Clock:
    """A clock that stands until it is set."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Answer:
    """What the service answered."""

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
    """A service that runs."""

    url: str
    book: Book
    clock: Clock
    session: aiohttp.ClientSession

    async def get(self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Answer:
        """Ask for a path with its query as it stands."""
        async with self.session.request(method, self.url + path, headers=headers, allow_redirects=False) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    async def json(self, path: str) -> Any:  # noqa: ANN401 - any document
        """The document of a path that is answered well."""
        answer = await self.get(path)
        assert answer.status == 200, answer.text
        return answer.json()

    async def round(self) -> bool:
        """One look of the service; false where Prometheus did not answer."""
        await self.book.look(self.clock.now)
        return not self.book.newest.problem

    async def keep(self) -> None:
        """Close what is due."""
        await self.book.close_days(self.clock.now)


@asynccontextmanager
async def running(prometheus_url: str, *, now: float = NOW, **options: object) -> AsyncIterator[Running]:
    """A service over a Prometheus; ``options`` are those of ``serve``, with underscores. Its rounds are the test's."""
    flags = {"prometheus": prometheus_url, "prometheus_retries": 1, "prometheus_timeout": "20s", **options}
    settings = load_settings(flags, {})
    clock = Clock(now)
    async with PrometheusClient(settings.prometheus) as client, aiohttp.ClientSession() as session:
        book = book_of(settings.books, client, client, clock)
        book.load_budgets()
        book.keeping.open(now)
        try:
            async with http_server(create_app(book, settings)) as port:
                try:
                    yield Running(f"http://127.0.0.1:{port}", book, clock, session)
                finally:
                    await book.readings.stop()
        finally:
            book.keeping.close()
