"""Starts the service's parts in the right order, serves until a signal, and stops them all."""

import asyncio
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from aiohttp import web

from exporter.config import web_config
from exporter.cost.budgets import load
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.live import live_pods, price_rows
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.query_rows import LedgerSource
from exporter.cost.recommend import read_recommendations
from exporter.cost.store import DayStore
from exporter.cost.store_ledger import StoreLedger
from exporter.metrics.process import ProcessMetrics
from exporter.service import pages
from exporter.service.data import Book, BookSources, label_values, newest_hour
from exporter.service.metrics import ServiceFigures, render
from exporter.service.refresh import Keeping, Refreshing, keep, rounds
from exporter.service.routes import Face, create_app
from exporter.service.settings import ServeSettings
from exporter.web.access import WebAccess
from exporter.web.http_server import HttpServer, bind
from exporter.web.responses import Body

LOG = logging.getLogger("exporter.service")

SHUTDOWN_SECONDS = 1.5
"""How long open requests may take to finish when the service stops."""


async def serve(settings: ServeSettings, clock: Callable[[], float]) -> int:
    """Run the service until SIGTERM or SIGINT; its exit code.

    Args:
        settings: What the user wants.
        clock: Unix seconds.

    Raises:
        ConfigError: The budgets have mistakes; nothing has been started then.
        ExporterError: The port cannot be bound; nothing has been started then.
        StoreError: The store can neither be read nor written.
    """
    access = None
    if settings.serving.web_config:
        access = WebAccess(partial(web_config.load, settings.serving.web_config), settings.path_prefix)
    listener = bind(settings.serving.listen.host, settings.serving.listen.port)
    # Days are closed one question at a time, so that filling the store does not keep people waiting.
    for_pages = replace(settings.prometheus, concurrency=max(1, settings.prometheus.concurrency - 1))
    async with (
        PrometheusClient(for_pages) as client,
        PrometheusClient(replace(settings.prometheus, concurrency=1)) as closing,
    ):
        service = Service(settings, client, closing, clock, access)
        try:
            service.refreshing.load_budgets()
            await asyncio.to_thread(service.refreshing.keeping.open, clock())
            return await service.run(listener)
        finally:
            listener.close()
            service.refreshing.keeping.close()


class Service:
    """A running service.

    Args:
        settings: What the user wants.
        client: Asks Prometheus for what is shown.
        closing: Asks it for the days that are to be closed.
        clock: Unix seconds.
        access: Who may ask; ``None``: everybody, by plain HTTP.
    """

    def __init__(
        self,
        settings: ServeSettings,
        client: PrometheusClient,
        closing: PrometheusClient,
        clock: Callable[[], float],
        access: WebAccess | None = None,
    ) -> None:
        self._settings = settings
        self._access = access
        self._clock = clock
        self._process = ProcessMetrics()
        self._wake = asyncio.Event()
        ledger = _ledger(settings, PrometheusLedger(client))
        self.book = Book(
            BookSources(
                ledger=ledger,
                prices=partial(price_rows, client),
                pods=partial(live_pods, client),
                newest_hour=partial(newest_hour, client),
                labels=partial(label_values, client),
                recommendations=partial(read_recommendations, client, ledger),
            ),
            clock,
            settings.books.timezone,
        )
        self.refreshing = Refreshing(
            book=self.book,
            load=lambda: load(settings.books.budgets) if settings.books.budgets else (),
            keeping=Keeping(
                prometheus=PrometheusLedger(closing),
                path=settings.books.store,
                history_days=settings.books.history_days,
                changed=self._wake.set,
            ),
            first=pages.questions(),
        )

    def app(self) -> web.Application:
        """Its HTTP face."""
        face = Face(metrics=self._metrics, ready=lambda: self.refreshing.looked)
        return create_app(self.book, self._settings, face)

    async def run(self, listener: socket.socket) -> int:
        """Serve until a signal."""
        stop = asyncio.Event()
        self._install_signals(stop)
        server = HttpServer(
            app=self.app(),
            listener=listener,
            access=self._access,
            count=self._count_error,
            shutdown_seconds=SHUTDOWN_SECONDS,
        )
        parts = (
            partial(rounds, self.refreshing, self._clock, self._settings.books.refresh_interval_seconds, self._wake),
            partial(keep, self.refreshing.keeping, self._clock, self.refreshing.failed),
        )
        await server.serve(stop, parts, self.book.readings.stop)
        return 0

    def _metrics(self, accept: str) -> Body:
        keeping = self.refreshing.keeping
        month = self.book.known_month()
        figures = ServiceFigures(
            freshness=self.book.freshness(),
            budgets=self.book.budgets.value,
            months=month.money if month else (),
            days_closed=None if keeping.path is None else len(keeping.days),
            days_not_closed=keeping.not_closed,
            last_read_seconds=self.refreshing.last_read_seconds,
            coverage_ratio=month.coverage if month else None,
            read_errors=self.refreshing.errors,
        )
        return Body(*render(figures, accept, self._process))

    def _count_error(self, part: str, _reason: str) -> None:
        if part == "web":
            self.refreshing.errors["web_config"] += 1

    def _install_signals(self, stop: asyncio.Event) -> None:
        """Handle signals ourselves: as process 1 of a container Python would ignore SIGTERM."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _reload(self) -> None:
        self.refreshing.load_budgets()
        self._wake.set()


def _ledger(settings: ServeSettings, prometheus: LedgerSource) -> LedgerSource:
    if settings.books.store is None:
        return prometheus
    return StoreLedger(DayStore(settings.books.store), prometheus)
