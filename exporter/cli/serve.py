"""`serve`: the cost service with pages, API and metrics."""

# Imports inside functions keep `--help` and `--version` fast: aiohttp and jinja2 take a second.
# ruff: noqa: PLC0415

import argparse
import asyncio
import logging
import os
import time
from importlib.util import find_spec

from exporter.cli.common import Commands, add_options, command
from exporter.config.options import SERVE_OPTIONS
from exporter.config.prometheus_options import PROMETHEUS_OPTIONS
from exporter.errors import ExporterError

LOG = logging.getLogger("exporter.cli")

_ORDER = (
    "Each option can also be set as an environment variable, GPU_COST_EXPORTER_ and its name in capitals"
    " (GPU_COST_EXPORTER_PROMETHEUS=http://prometheus:9090), or as a key of the file (prometheus: http://...). Flags"
    " win over the environment, the environment over the file. SIGHUP reads the budgets again, SIGTERM ends all."
    " Exit code: 0 when it was told to end; 1 if the port or the store cannot be used, which may pass by itself; 2 for"
    " mistakes in options and budgets, which do not."
)


def add(commands: Commands) -> None:
    """Add the command."""
    serve = command(commands, "serve", "Serve what a fleet's GPUs cost: pages, an API, budgets and metrics.")
    add_options(serve, (*SERVE_OPTIONS, *PROMETHEUS_OPTIONS), _ORDER)
    serve.set_defaults(run=_serve)


def _serve(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    from exporter.config import resolve
    from exporter.service.settings import load_settings

    flags = {name: value for name, value in vars(namespace).items() if name not in {"command", "run"}}
    settings = load_settings(flags, os.environ, extra=problems)
    resolve.configure(settings.log_format, settings.log_level)
    for warning in settings.warnings:
        LOG.warning(warning)
    if find_spec("plotly") is None:  # the agent's image goes without
        raise ExporterError(
            "serve needs plotly, which this installation lacks: take the image of the cost service,"
            " or pip install gpu-cost-exporter[report]"
        )
    from exporter.service.run import serve

    return asyncio.run(serve(settings, time.time))
