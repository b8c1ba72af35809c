"""The agent under chaos: its own `run` and its own children over a simulated driver, with shorter timeouts.

A node under chaos runs five times as fast: it is sampled every 0.2 s, and the agent polls the kubelet every second. The
timeouts of the agent are a fifth, too, so that 20 s correspond to 100 s of a real node; see ``hurry``.
"""

import argparse
import asyncio
import faulthandler
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from chaos_world import Plan, World

if TYPE_CHECKING:
    from gpu_simulator.truth import NodeTruth

HASTE = 5.0


def hurry_child() -> None:
    """Shorten the timeouts of the process that owns the driver."""
    from exporter.gpu.nvml import source  # noqa: PLC0415 - the child of DCGM does without

    source.NvmlSource.waits_seconds = (1.0 / HASTE, 10.0 / HASTE)
    _shorten(source.NvmlSource.__init__, "retry_seconds")


def hurry() -> None:
    """Shorten the timeouts of the agent: deadlines of children and kubelet, pauses after failures."""
    from exporter.agent import metering, sources  # noqa: PLC0415 - a child does without
    from exporter.gpu import worker  # noqa: PLC0415
    from exporter.kube import api_client, list_watch  # noqa: PLC0415

    for module, names in (
        (metering, ("HUNG_SECONDS",)),
        (api_client, ("FIRST_BACKOFF_SECONDS", "LONGEST_BACKOFF_SECONDS", "FORBIDDEN_SECONDS")),
        (list_watch, ("GONE_SPREAD_SECONDS", "SHORTEST_WATCH_SECONDS")),
        (worker, ("_GRACE_SECONDS", "_LAST_CHANCE_SECONDS")),
        (worker, ("_FIRST_RENEWAL_SECONDS", "_LONGEST_RENEWAL_SECONDS")),
        (worker, ("_FIRST_BACKOFF_SECONDS", "_LONGEST_BACKOFF_SECONDS", "_SETTLED_SECONDS")),
    ):
        for name in names:
            setattr(module, name, getattr(module, name) / HASTE)
    _shorten(worker.Worker.__init__, "deadline_seconds", "start_deadline_seconds")
    _shorten(sources.MissingGpus.__init__, "first_seconds", "longest_seconds")


def _shorten(function: object, *names: str) -> None:
    defaults = getattr(function, "__kwdefaults__")  # noqa: B009 - the type of a function lacks it
    for name in names:
        defaults[name] /= HASTE


def _child(path: Path, rest: list[str]) -> int:
    from exporter.gpu import child  # noqa: PLC0415
    from gpu_simulator import dcgm, driver  # noqa: PLC0415 - the agent does without

    plan = Plan.read(path)
    world = World(plan)

    made = dcgm if "--dcgm-address" in rest else driver
    if made is driver:
        hurry_child()

    def truth() -> "NodeTruth":
        now = time.monotonic()
        made.set_epoch(time.time() - now + plan.epoch_monotonic)  # stamps follow the wall clock, which can step
        return world.at(now - plan.epoch_monotonic)

    made.install(lambda: world.at(0.0), epoch_seconds=plan.epoch_unix)
    made.install(truth, epoch_seconds=plan.epoch_unix)
    return child.main(rest)


def _agent(path: Path, rest: list[str]) -> int:
    from exporter import agent  # noqa: PLC0415 - a child does without
    from exporter.agent.sources import fields_of, sources_of  # noqa: PLC0415
    from exporter.cli.agent import leave_threads  # noqa: PLC0415
    from exporter.cli.common import Parser, add_options  # noqa: PLC0415
    from exporter.config import load_agent, read_collectors, resolve  # noqa: PLC0415

    faulthandler.enable()  # SIGABRT prints the stacks of an agent that does not end
    hurry()
    parser = Parser(prog="chaos_agent.py")
    add_options(parser)
    config = load_agent(vars(parser.parse_args(rest)), os.environ)
    resolve.configure(config.logging.log_format, config.logging.log_level)
    fields = read_collectors(config.exposition.collectors).fields
    commands = {
        name: (
            *(sys.executable, __file__, "child", str(path), "--interval", str(config.sampling.interval_seconds)),
            *("--fields", ",".join(str(int(one)) for one in sorted(fields_of(config, name, fields)))),
            *(("--dcgm-address", config.sampling.dcgm_address) if name == "dcgm" else ()),
        )
        for name in sources_of(config)
    }

    async def live() -> int:
        code = 1
        try:
            code = await agent.run(config, commands)
        finally:
            await leave_threads(code)
        return code

    return asyncio.run(live())


def main() -> int:
    """Run the agent or one of its children; return its exit code."""
    parser = argparse.ArgumentParser(description="The agent under chaos; benchmarks/chaos.py starts it.")
    parser.add_argument("part", choices=("agent", "child"))
    parser.add_argument("plan", type=Path, help="plan that benchmarks/chaos_world.py wrote")
    arguments, rest = parser.parse_known_args()
    return _child(arguments.plan, rest) if arguments.part == "child" else _agent(arguments.plan, rest)


if __name__ == "__main__":
    raise SystemExit(main())
