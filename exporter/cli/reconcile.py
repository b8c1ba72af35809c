"""`reconcile`: a cloud's bill beside what was metered."""

# Imports inside functions keep `--help` and `--version` fast: gRPC, aiohttp and the driver's binding take a second.
# ruff: noqa: PLC0415

import argparse
import os
import time
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.cli.base import EXIT_PARTIAL, Commands, add_output, add_timezone, command, say
from exporter.errors import ConfigError

if TYPE_CHECKING:
    from exporter.config.prometheus_options import PrometheusSettings
    from exporter.report.fleet.values import Window

_FORMATS = ("table", "csv", "json")


def add(commands: Commands) -> None:
    """Add the command."""
    from exporter.config.prometheus_options import add_prometheus_options

    parser = command(commands, "reconcile", "A cloud's bill beside what was metered: the gap, explained line by line.")
    parser.epilog = (
        "Exit code: 0 where everything was read, 1 if nothing can be, 2 for a wrong flag, 3 where lines of the bill or"
        " hours of the ledger could not be read; what they are is told."
    )
    parser.add_argument(
        "--bill",
        required=True,
        action="append",
        metavar="FILE[,...]",
        help="CSV of the bill: FOCUS 1.0 or later, or AWS Cost and Usage Report in its old or new form; also with gzip",
    )
    parser.add_argument("--window", required=True, metavar="PERIOD", help="period of the bill, as 2026-10")
    add_timezone(parser)
    parser.add_argument("--map", type=Path, metavar="FILE", help="CSV that ties nodes to the bill (docs/focus.md)")
    parser.add_argument(
        "--gpu-part",
        type=float,
        default=1.0,
        metavar="PART",
        help="the GPUs' part of a node's price, as gpu_part of the price book has it [default: 1]",
    )
    parser.add_argument("--store", type=Path, metavar="FILE", help="store of closed days to read, too")
    parser.add_argument("--format", choices=_FORMATS, default="table", help="form of the result [default: table]")
    add_output(parser)
    add_prometheus_options(parser)
    parser.set_defaults(run=_reconcile)


def _reconcile(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    import asyncio

    from exporter.cli.fleet_reading import read_fleet, tell_failures
    from exporter.cli.output import check_output, output
    from exporter.report import reconcile as of

    now = time.time()
    paths = [Path(name) for names in namespace.bill for name in names.split(",") if name.strip()]
    window, prometheus = _settled(namespace, (*problems, *_of_bills(paths)), now)
    check_output(namespace.output)
    mapping = of.Mapping() if namespace.map is None else of.read_mapping(namespace.map)
    of.check_bills(paths)
    ledger = asyncio.run(read_fleet(prometheus, namespace.store, window, of.RECONCILE_DIMENSIONS))
    known = {facts.instance_type for facts in ledger.nodes.values() if facts.instance_type}
    bill = of.read_bill(paths, window, mapping, known)
    found = of.reconcile(ledger, bill, mapping, gpu_part=namespace.gpu_part)
    with output(namespace.output) as stream:
        of.write_reconciliation(found, namespace.format, stream)
    for one in bill.malformed:
        say(f"{one.file}:{one.line}: {one.what}; the line is in no sum")
    more = bill.scope.malformed - len(bill.malformed)
    if more:
        say(f"{more:,} more lines could not be read")
    tell_failures(ledger, "the ledger")
    return EXIT_PARTIAL if bill.scope.malformed or ledger.failures else 0


def _of_bills(paths: list[Path]) -> list[str]:
    if not paths:
        return ["--bill: names no file; allowed: CSV files, separated by commas"]
    problems = [
        f"--bill: {path} is a pipe or device, and bills are read twice; write it to a file"
        for path in paths
        if path.is_fifo() or path.is_char_device()
    ]
    twice = sorted({str(path) for path in paths if [one.resolve() for one in paths].count(path.resolve()) > 1})
    return problems + [f"--bill: {name} is named twice, and would count twice; name it once" for name in twice]


def _settled(
    namespace: argparse.Namespace, given: tuple[str, ...], now: float
) -> "tuple[Window, PrometheusSettings | None]":
    """What to read, or all mistakes at once."""
    from exporter.config.prometheus_options import prometheus_settings
    from exporter.report.fleet.windows import parse_window

    problems = list(given)
    prometheus = window = None
    if not 0 < namespace.gpu_part <= 1:
        problems.append(f"--gpu-part: value '{namespace.gpu_part}' is not a part; allowed: more than 0, at most 1")
    try:
        window = parse_window(namespace.window, now, namespace.timezone or UTC)
    except ConfigError as error:
        problems += [f"--{problem}" for problem in error.problems]
    if namespace.prometheus or namespace.store is None or os.environ.get("GPU_COST_EXPORTER_PROMETHEUS"):
        try:
            prometheus = prometheus_settings(namespace, os.environ)
        except ConfigError as error:
            problems += error.problems
    if problems or window is None:
        raise ConfigError(*problems)
    return window, prometheus
