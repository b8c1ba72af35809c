"""Implements `recommend`: GPUs to return, share or make smaller, and the savings."""

import argparse
import asyncio
import os
import time
from datetime import UTC

from exporter.cli.common import Parser, add_output, add_timezone, or_problems
from exporter.cli.output import EXIT_PARTIAL, check_output, output, say
from exporter.cli.report import read_filters
from exporter.config.prometheus_options import PrometheusSettings, add_prometheus_options, prometheus_settings
from exporter.cost.dimensions import Filters
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.recommend import AdviceReading, read
from exporter.cost.recommend_render import FORMATS, write
from exporter.cost.window import DAY_SECONDS, Window, parse_window
from exporter.errors import ConfigError, ExporterError

_EPILOG = (
    "Exit code: 0, also where nothing was found; 1 if Prometheus cannot be asked or has no evidence; 2 for a wrong"
    " flag; 3 if some prices could not be read. Each rule with its threshold: docs/cost.md."
)


def add_recommend(parser: Parser) -> None:
    """Add the flags."""
    parser.usage = f"{parser.prog} --prometheus URL [OPTION ...]"
    parser.epilog = _EPILOG
    add_prometheus_options(parser)
    what = parser.add_argument_group("Selection")
    what.add_argument(
        "--window",
        default="7d",
        metavar="PERIOD",
        help="a period of a day or more that ends now, or did: 7d, 14d, lastweek, ... [default: %(default)s]",
    )
    add_timezone(what)
    what.add_argument(
        "--filter",
        action="append",
        metavar="DIMENSION=VALUE,...",
        help="only workloads that have one of the values; again for another dimension: cluster, node, namespace, kind,"
        " workload, team, model, mode [default: all]",
    )
    what.add_argument(
        "--servers",
        action="store_true",
        help="suggest MIG and sharing also for servers that take memory in advance (vLLM, Triton, ...)",
    )
    form = parser.add_argument_group("Output")
    form.add_argument("--format", choices=FORMATS, default="table", help="form [default: table]")
    add_output(form)
    parser.set_defaults(run=_recommend)


def _recommend(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    mistakes = [*problems]
    filters = read_filters(namespace.filter or (), mistakes)
    if "pool" in filters.wanted:
        mistakes.append("--filter: pool is not known of devices; allowed: node, model, namespace, team and others")
    zone = namespace.timezone or UTC
    window = or_problems(lambda: parse_window(namespace.window, time.time(), zone), mistakes, prefix="--")
    if window is not None and window.seconds < DAY_SECONDS:
        mistakes.append(f"--window: '{namespace.window}' is shorter than a day; allowed: a day or more, better a week")
    settings = or_problems(lambda: prometheus_settings(namespace, os.environ), mistakes)
    if mistakes or window is None or settings is None:
        raise ConfigError(*mistakes)
    check_output(namespace.output)
    found = asyncio.run(_read(window, filters, settings, servers=namespace.servers))
    if not found.uses and not filters.wanted:
        raise ExporterError(
            f"Prometheus has no evidence of how devices were used over {window.label}: no series"
            " workload_device:gpu_use:facts. It is recorded once an hour by the group gpu-evidence of"
            " rules/prometheus-rules.yaml: load it. Or no device was held when the period ended"
        )
    if not found.uses:
        say(f"warning: nothing matches {filters.words}; a report without the filter shows the names")
    with output(namespace.output) as stream:
        write(found, namespace.format, stream)
    return EXIT_PARTIAL if found.ledger.failures else 0


async def _read(window: Window, filters: Filters, settings: PrometheusSettings, *, servers: bool) -> AdviceReading:
    async with PrometheusClient(settings) as client:
        return await read(client, PrometheusLedger(client), window, filters=filters, judge_servers=servers)
