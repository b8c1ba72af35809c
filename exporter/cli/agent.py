"""Implements `agent` and `doctor`, on this node or on a simulated node."""

# Imports inside functions keep `--help` and `--version` fast: gRPC, aiohttp and the driver's binding take a second.
# ruff: noqa: PLC0415

import argparse
import asyncio
import logging
import os
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.cli.common import Parser, add_options, alone, start_log
from exporter.cli.output import EXIT_FAILED, PROGRAM, check_output, output, say, stdout

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from exporter.config import AgentConfig

    Commands = Mapping[str, tuple[str, ...]]
    """Commands of a simulated node's children, by source; empty for a real node."""

LOG = logging.getLogger("exporter.cli")

THREADS_SECONDS = 0.5
"""Time for threads to end after all else has ended; the last save has its own time."""

_ENDS = (
    "Exit code: 0 after a signal; 1 if another process has the port, which may pass by itself; 2 for"
    " mistakes in options and files, which do not."
)
_DOCTOR = (
    "doctor also takes every option and variable of the agent, and checks what the agent would do; see:"
    f" {PROGRAM} agent --help. Exit code: 0; 1 if a check failed; 2 for mistakes in options. Each"
    " line: docs/troubleshooting.md."
)


def add_agent(parser: Parser) -> None:
    """Add the flags of `agent`."""
    add_options(parser)
    parser.epilog = f"{parser.epilog} {_ENDS}"
    parser.set_defaults(run=_agent)


def add_doctor(parser: Parser) -> None:
    """Add the flags of `doctor`."""
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="form of the findings [default: text]"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="also write a JSON file to send to the project: versions, fields, values and timings of the GPUs, without"
        " names of hosts and pods; UUIDs are shortened [default: none]",
    )
    add_options(parser, epilog=_DOCTOR, shown=False)
    parser.set_defaults(run=alone(_doctor))


def _settings(namespace: argparse.Namespace, problems: tuple[str, ...], *, for_doctor: bool) -> "AgentConfig":
    """Return the configuration. The doctor reports wrong paths and warnings as findings."""
    from exporter.config import load_agent

    config = load_agent(
        vars(namespace), os.environ, dcgm_flags=namespace.dcgm_flags, check_paths=not for_doctor, extra=problems
    )
    quiet = for_doctor and config.logging.log_level == "info"
    start_log(replace(config.logging, log_level="error") if quiet else config.logging, config.warnings)
    return config


@asynccontextmanager
async def _node(
    config: "AgentConfig", namespace: argparse.Namespace, interval_seconds: float
) -> "AsyncIterator[tuple[AgentConfig, Commands]]":
    """Yield the configuration and no commands for this node, or both for a simulated node in a temporary directory."""
    if config.running.simulate is None:
        yield config, {}
        return
    from exporter.agent.sources import fields_of, sources_of
    from exporter.config import read_collectors
    from exporter.kube.kubelet import own_pod
    from gpu_simulator import scenario
    from gpu_simulator.node import SimulatedNode

    plan = scenario.load(config.running.simulate)
    with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-simulated-") as directory:
        node = SimulatedNode(plan, Path(directory), time.time, agent=own_pod())
        await node.start()
        try:
            simulated = replace(
                config,
                attribution=replace(
                    config.attribution,
                    node_name=plan.node if namespace.node_name is None else config.attribution.node_name,
                    kubelet_socket=str(node.kubelet_socket),
                    proc_root=node.proc_root,
                    pod_log_root=node.pod_log_root,
                ),
                owners=replace(config.owners, kubeconfig=node.kubeconfig, kube_start_jitter_seconds=0.0),
            )
            fields = read_collectors(config.exposition.collectors).fields
            address = config.sampling.dcgm_address
            commands = {
                name: node.child_command(
                    interval_seconds, fields_of(config, name, fields), address if name == "dcgm" else ""
                )
                for name in sources_of(config)
            }
            yield simulated, commands
        finally:
            await node.stop()


def _agent(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    return asyncio.run(_run_agent(_settings(namespace, problems, for_doctor=False), namespace))


async def _run_agent(config: "AgentConfig", namespace: argparse.Namespace) -> int:
    from exporter import agent

    code = EXIT_FAILED
    try:
        async with _node(config, namespace, config.sampling.interval_seconds) as (settled, commands):
            code = await agent.run(settled, commands)
    finally:
        await leave_threads(code)
    return code


async def leave_threads(code: int) -> None:
    """Wait a short time for threads, then end this process without them. All children have ended.

    All state is already saved. A disk that hangs, or a library that loads slowly, would delay the exit.

    Args:
        code: Exit code.
    """
    threads = asyncio.ensure_future(asyncio.get_running_loop().shutdown_default_executor())
    done, _ = await asyncio.wait({threads}, timeout=THREADS_SECONDS)
    if not done:
        problem = "ended without a thread that does not: a disk that hangs, or a library that loads slowly"
        LOG.warning(problem, exc_info=sys.exception())
        logging.shutdown()
        os._exit(code)


def _doctor(namespace: argparse.Namespace) -> int:
    check_output(namespace.report, "--report")
    return asyncio.run(_examine(_settings(namespace, (), for_doctor=True), namespace))


async def _examine(config: "AgentConfig", namespace: argparse.Namespace) -> int:
    from exporter.doctor import checks, findings

    async with _node(config, namespace, findings.interval_seconds(config)) as (settled, commands):
        simulated = bool(commands)
        around = findings.Surroundings(
            config=settled,
            wall=time.time,
            monotonic=time.monotonic,
            worker_command=commands.get("nvml"),
            dcgm_command=commands.get("dcgm"),
            simulated=simulated,
        )
        done = await checks.examine(around)
    write = findings.write_json if namespace.format == "json" else findings.write_text
    with stdout() as stream:
        write(done.findings, simulated=simulated, stream=stream)
    if namespace.report is not None:
        with output(namespace.report) as stream:
            findings.write_report(done, around, stream)
        say(f"{namespace.report}: written; read it, then attach it to an issue of the project (docs/hardware.md)")
    return EXIT_FAILED if findings.worst(done.findings) is findings.Level.FAIL else 0
