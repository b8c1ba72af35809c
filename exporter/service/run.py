"""Starts the parts of the service in order, serves until a signal, and stops all parts."""

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from exporter.config import web_config
from exporter.config.options import FleetSettings
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.store import DayStore
from exporter.cost.store_ledger import StoreLedger
from exporter.service.fleet import Fleet, Keeping
from exporter.service.page_tables import FIRST
from exporter.service.routes import create_app
from exporter.service.settings import ServeSettings
from exporter.web.access import WebAccess
from exporter.web.http_server import HttpServer, bind

LOG = logging.getLogger("exporter.service")

SHUTDOWN_SECONDS = 1.5
"""Time for open requests to finish when the service stops."""


async def serve(settings: ServeSettings, clock: Callable[[], float]) -> int:
    """Run the service until SIGTERM or SIGINT, and return the exit code.

    Args:
        settings: Settings of the service.
        clock: Returns Unix seconds.

    Raises:
        ConfigError: The budgets have mistakes; nothing is started.
        ExporterError: The port cannot be bound; nothing is started.
        StoreError: The store can neither be read nor written.
    """
    serving = settings.serving
    access = None
    if serving.web_config:
        access = WebAccess(partial(web_config.load, serving.web_config), settings.path_prefix)
    listener = bind(serving.listen.host, serving.listen.port)
    # One query at a time for closing days, so that filling the store does not delay pages.
    for_pages = replace(settings.prometheus, concurrency=max(1, settings.prometheus.concurrency - 1))
    async with (
        PrometheusClient(for_pages) as client,
        PrometheusClient(replace(settings.prometheus, concurrency=1)) as closing,
    ):
        fleet = fleet_of(settings.fleet, client, closing, clock)
        try:
            fleet.load_budgets()
            await asyncio.to_thread(fleet.keeping.open, clock())
            server = HttpServer(
                app=create_app(fleet, settings),
                listener=listener,
                access=access,
                count=partial(_count_error, fleet),
                shutdown_seconds=SHUTDOWN_SECONDS,
            )
            jobs = (
                partial(fleet.repeat, fleet.look, fleet.wake),
                partial(fleet.repeat, fleet.close_days, asyncio.Event()),
            )
            await server.serve(_stopping(fleet), jobs, fleet.readings.stop)
        finally:
            listener.close()
            fleet.keeping.close()
    return 0


def fleet_of(
    settings: FleetSettings, client: PrometheusClient, closing: PrometheusClient, clock: Callable[[], float]
) -> Fleet:
    """Return the fleet with its sources: the store and Prometheus.

    Args:
        settings: Settings of reading and storing.
        client: Client for the data of pages.
        closing: Client for the days to close.
        clock: Returns Unix seconds.
    """
    prometheus, store = PrometheusLedger(client), settings.store
    return Fleet(
        client,
        StoreLedger(DayStore(store), prometheus) if store else prometheus,
        Keeping(prometheus=PrometheusLedger(closing), path=store, history_days=settings.history_days),
        clock,
        settings,
        FIRST,
    )


def _count_error(fleet: Fleet, part: str, _reason: str) -> None:
    if part == "web":
        fleet.errors["web_config"] += 1


def _stopping(fleet: Fleet) -> asyncio.Event:
    """Register signal handlers: Python as process 1 of a container ignores SIGTERM by default."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _reload, fleet)
    return stop


def _reload(fleet: Fleet) -> None:
    fleet.load_budgets()
    fleet.wake.set()
