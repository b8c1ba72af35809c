"""`simulate`: nodes that do not exist."""

# Imports inside functions keep `--help` and `--version` fast: gRPC, aiohttp and the driver's binding take a second.
# ruff: noqa: PLC0415

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

from exporter.cli.base import Commands, Parser, command, refuse
from exporter.cli.simulate_fleet import add_fleet
from exporter.errors import ConfigError


def add(commands: Commands) -> None:
    """Add the command and what it can do."""
    _add_simulations(command(commands, "simulate", "Nodes that do not exist: for the demo, for trying out, for tests."))


def _add_simulations(parser: Parser) -> None:
    kinds = parser.add_subparsers(dest="simulation", metavar="WHAT", required=True, parser_class=Parser)
    listing = command(kinds, "list", "Names of the shipped scenarios.")
    listing.set_defaults(run=_list_scenarios)
    check = command(kinds, "check", "Read a scenario and say what is in it, or what is wrong with it.")
    check.set_defaults(run=_check_scenario)
    node = command(kinds, "node", "Run the kubelet socket and the process tree of a simulated node until SIGTERM.")
    node.add_argument(
        "--dir", required=True, type=Path, metavar="DIR", help="empty or new directory to make the node in"
    )
    node.set_defaults(run=_run_node)
    stack = command(
        kinds, "stack", "Run agent, Prometheus, Alertmanager and the cost service on simulated data until Ctrl-C."
    )
    stack.set_defaults(run=_run_stack)
    add_fleet(kinds)
    for simulation in (check, node, stack):
        simulation.add_argument("scenario", metavar="NAME|FILE", help="a shipped scenario, or a scenario file")


def _list_scenarios(_namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    from exporter.simulator import scenario

    sys.stdout.writelines(f"{name}\n" for name in scenario.shipped())
    return 0


def _check_scenario(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    from exporter.simulator import scenario

    plan = scenario.load(namespace.scenario)
    truth = plan.at(0.0)
    instances = sum(len(gpu.instances) for gpu in truth.gpus)
    parts = f", {instances} MIG instances" if instances else ""
    sys.stdout.write(
        f"{namespace.scenario}: ok: {truth.node}, {len(truth.gpus)} GPUs{parts}, {len(truth.holders)} holders\n"
    )
    return 0


def _run_node(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    directory: Path = namespace.dir
    try:
        directory.mkdir(parents=True, exist_ok=True)
        occupied = any(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"--dir: {directory}: {error.strerror}; allowed: an empty or new directory") from None
    if occupied:
        raise ConfigError(f"--dir: {directory} is not empty; allowed: an empty or new directory")
    return asyncio.run(_serve_node(namespace.scenario, directory.resolve()))


async def _serve_node(name: str, directory: Path) -> int:
    from exporter.simulator import scenario
    from exporter.simulator.node import SimulatedNode

    plan = scenario.load(name)
    node = SimulatedNode(plan, directory, time.time)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await node.start()
    try:
        sys.stdout.write(
            f"SIMULATED NODE {plan.node}: nothing here is real\nkubelet-socket: {node.kubelet_socket}\n"
            f"kubeconfig: {node.kubeconfig}\nproc-root: {node.proc_root}\npod-log-root: {node.pod_log_root}\n"
        )
        sys.stdout.flush()
        await stop.wait()
    finally:
        await node.stop()
    return 0


def _run_stack(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    from exporter.simulator import stack

    return int(stack.main(namespace.scenario))
