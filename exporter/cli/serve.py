"""Implements `serve`: the cost service with pages, API and metrics."""

import argparse
import asyncio
import os
import time

from exporter.cli.common import Parser, add_options, start_log
from exporter.service.run import serve
from exporter.service.settings import OPTIONS, load_settings

_ORDER = (
    "Each option can also be set as an environment variable, GPU_COST_EXPORTER_ and its name in capitals"
    " (GPU_COST_EXPORTER_PROMETHEUS=http://prometheus:9090), or as a key of the file (prometheus: http://...). Flags"
    " win over the environment, the environment over the file. SIGHUP reads the budgets again, SIGTERM ends all."
    " Exit code: 0 after a signal; 1 if the port or the store cannot be used, which may pass by itself; 2 for"
    " mistakes in options and budgets, which do not."
)


def add_serve(parser: Parser) -> None:
    """Add the flags of `serve`."""
    add_options(parser, OPTIONS, _ORDER)
    parser.set_defaults(run=_serve)


def _serve(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    settings = load_settings(vars(namespace), os.environ, extra=problems)
    start_log(settings.logging, settings.warnings)
    return asyncio.run(serve(settings, time.time))
