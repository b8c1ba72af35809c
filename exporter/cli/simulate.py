"""Implements `simulate`: simulated nodes and fleets."""

import argparse
import json
import math
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.cli.common import Commands, Parser, alone, command
from exporter.cli.output import output, progress_bar, put
from exporter.errors import ConfigError

if TYPE_CHECKING:
    from gpu_simulator.fleet_plan import FleetPlan

# Imports inside functions keep `--help` and `--version` fast.
# ruff: noqa: PLC0415


_HOUR_SECONDS = 3600
_EPILOG = (
    "openmetrics: for promtool tsdb create-blocks-from --max-block-duration=768h openmetrics FILE DIR."
    " import: for VictoriaMetrics, POST /api/v1/import/prometheus."
    " The same options give the same fleet. Exit code: 0, 1 if a file cannot be written, 2 for a wrong flag."
)


def _add_fleet(kinds: Commands) -> None:
    examples = (
        "--nodes 100 --output fleet.om",
        "--nodes 20 --days 7 --format import --output fleet.txt --truth totals.json",
    )
    about = "Write the recorded series of a fleet that does not exist, for reports to be tried on."
    parser = command(kinds, "fleet", about, examples)
    parser.usage = f"{parser.prog} --nodes N --output FILE [OPTION ...]"
    parser.epilog = _EPILOG
    parser.add_argument("--nodes", required=True, type=int, metavar="N", help="how many nodes")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs of a node [default: 8]")
    parser.add_argument("--days", type=int, default=30, metavar="N", help="how many days [default: 30]")
    parser.add_argument("--end", metavar="TIME", help="a whole hour, as 2026-10-01T14:00Z [default: the last one]")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="another number, another fleet [default: 1]")
    parser.add_argument("--clusters", default="", metavar="NAMES", help="as east,west [default: one without a name]")
    parser.add_argument(
        "--one-shot",
        type=float,
        default=0.05,
        metavar="RATIO",
        help="part of the short tasks that are Jobs of a name of their own, 0-1 [default: 0.05]",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="CSV file of pods that short tasks are drawn from")
    parser.add_argument("--ledger-only", action="store_true", help="leave out prices and use of single devices")
    parser.add_argument(
        "--format", choices=("openmetrics", "import"), default="openmetrics", help="see below [default: openmetrics]"
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="file for the series; -: standard output")
    parser.add_argument("--truth", type=Path, metavar="FILE", help="JSON file for the totals by day and owner")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, metavar="N", help="at work at once [default: all cores]"
    )
    parser.set_defaults(run=alone(_write))


def _write(namespace: argparse.Namespace) -> int:
    from gpu_simulator.fleet import Writing, truth_json, write_fleet

    plan = _plan(namespace)
    writing = Writing(
        form=namespace.format, devices=not namespace.ledger_only, processes=min(namespace.processes, plan.nodes)
    )
    path = None if namespace.output == "-" else Path(namespace.output)
    with progress_bar("Writing nodes") as show, output(path) as stream:
        truth = write_fleet(plan, stream, writing, lambda done: show(done, plan.nodes))
    if namespace.truth is not None:
        with output(namespace.truth) as stream:
            json.dump(truth_json(truth), stream)
    if path is not None:
        owned = truth.capacity_seconds / _HOUR_SECONDS
        span = f"{_time(plan.start_seconds)} to {_time(plan.end_seconds)}"
        put(
            f"SIMULATED FLEET: nothing in {path} is real",
            f"{plan.nodes} nodes, {plan.nodes * plan.gpus_per_node} GPUs, {span}, {owned:,.1f} GPU-hours",
        )
    return 0


def _plan(namespace: argparse.Namespace) -> "FleetPlan":
    from gpu_simulator.fleet_plan import FleetPlan, read_trace

    return FleetPlan(
        nodes=namespace.nodes,
        gpus_per_node=namespace.gpus,
        days=namespace.days,
        end_seconds=_end(namespace.end),
        seed=namespace.seed,
        clusters=tuple(namespace.clusters.split(",")),
        one_shot_ratio=namespace.one_shot,
        trace=read_trace(namespace.trace) if namespace.trace is not None else (),
    )


def _end(text: str | None) -> int:
    from gpu_simulator.fleet_plan import RECORDED_AFTER_SECONDS

    if text is None:
        return int(time.time() - RECORDED_AFTER_SECONDS) // _HOUR_SECONDS * _HOUR_SECONDS
    try:
        moment = datetime.fromisoformat(text.upper())
        seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        seconds = math.nan
    if seconds % _HOUR_SECONDS:  # also of nan
        raise ConfigError(f"--end: {text!r}; allowed: a whole hour UTC, as 2026-10-01T14:00Z")
    return int(seconds)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%MZ")


def add_simulate(parser: Parser) -> None:
    """Add the subcommands."""
    kinds = parser.add_subparsers(dest="simulation", metavar="WHAT", required=True, parser_class=Parser)
    listing = command(kinds, "list", "List the shipped scenarios.")
    listing.set_defaults(run=alone(_list_scenarios))
    check = command(kinds, "check", "Check a scenario: show its content, or all mistakes.")
    check.set_defaults(run=alone(_check_scenario))
    stack = command(
        kinds, "stack", "Run agent, Prometheus, Alertmanager and the cost service on simulated data until Ctrl-C."
    )
    stack.set_defaults(run=alone(_run_stack))
    _add_fleet(kinds)
    for simulation in (check, stack):
        simulation.add_argument("scenario", metavar="NAME|FILE", help="a shipped scenario, or a scenario file")


def _list_scenarios(_namespace: argparse.Namespace) -> int:
    from gpu_simulator import scenario

    names = scenario.shipped()
    width = max(map(len, names))
    put(*(f"{name:<{width}}  {scenario.load(name).plan.description}" for name in names))
    return 0


def _check_scenario(namespace: argparse.Namespace) -> int:
    from gpu_simulator import scenario

    plan = scenario.load(namespace.scenario)
    truth = plan.at(0.0)
    instances = sum(len(gpu.instances) for gpu in truth.gpus)
    parts = f", {instances} MIG instances" if instances else ""
    put(f"{namespace.scenario}: ok: {truth.node}, {len(truth.gpus)} GPUs{parts}, {len(truth.holders)} holders")
    return 0


def _run_stack(namespace: argparse.Namespace) -> int:
    from gpu_simulator import stack

    return int(stack.main(namespace.scenario))
