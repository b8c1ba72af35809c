"""The command line: settles the configuration, then hands over to the agent, doctor, report or simulator."""

# Imports inside functions keep `--help` and `--version` fast: gRPC, aiohttp and the driver's binding take a second.
# ruff: noqa: PLC0415

import argparse
import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from exporter import __version__
from exporter.config.options import OPTIONS, Option
from exporter.errors import ConfigError, ExporterError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from exporter.config import AgentConfig

PROGRAM = "gpu-cost-exporter"
LOG = logging.getLogger("exporter.cli")
EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

_ORDER = (
    "Each option can also be set as an environment variable, GPU_COST_EXPORTER_ and its name in capitals"
    " (GPU_COST_EXPORTER_SAMPLE_INTERVAL=500ms), or as a key of the file (sample-interval: 500ms). Flags win over the"
    " environment, the environment over the file. dcgm-exporter's variables that mean the same are accepted."
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are told like every other mistake in what the user wrote."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message}; see: {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 for a failure, 2 for a mistake in what the user wrote."""
    try:
        namespace, unknown = _parser().parse_known_args(argv)
        if namespace.command is None:
            _parser().print_help()
            return EXIT_USAGE
        return int(namespace.run(namespace, _unknown_flags(unknown, namespace)))
    except ConfigError as error:
        for problem in error.problems:
            _say(problem)
        return EXIT_USAGE
    except ExporterError as error:
        _say(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _say(problem: str) -> None:
    print(f"{PROGRAM}: {' '.join(problem.split())}", file=sys.stderr)  # noqa: T201 - nothing logs before the settings are known


@contextmanager
def _stdout() -> "Iterator[TextIO]":
    """Standard output, to be written to and nothing else: its reader may have enough (head), its disk may be full."""
    try:
        yield sys.stdout
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(EXIT_FAILED) from None
        raise ExporterError(f"standard output: cannot write: {error.strerror}; give it room, or another file") from None


def _parser() -> _Parser:
    about = "Who holds which GPU, how busy it is, and since when it is idle."
    parser = _Parser(prog=PROGRAM, description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    agent = _command(commands, "agent", "Measure this node's GPUs and serve them to Prometheus and to people.")
    _add_options(agent)
    agent.set_defaults(run=_agent)
    doctor = _command(commands, "doctor", "Check whether this node is fit for the agent, and say what to mend.")
    doctor.add_argument(
        "--format", choices=("text", "json"), default="text", help="form of the findings [default: text]"
    )
    _add_options(doctor)
    doctor.set_defaults(run=_doctor)
    prices = _command(commands, "prices", "Price books: what an hour of a GPU costs.")
    _add_prices(prices)
    report = _command(commands, "report", "Who used GPUs, how well, and what it cost: a node's ledger.")
    _add_report(report)
    report.set_defaults(run=_report)
    simulate = _command(commands, "simulate", "Nodes that do not exist: for the demo, for trying out, for tests.")
    _add_simulations(simulate)
    return parser


def _command(commands: "argparse._SubParsersAction[_Parser]", name: str, about: str) -> _Parser:
    return commands.add_parser(name, help=about, description=about, allow_abbrev=False)


def _add_options(parser: _Parser) -> None:
    parser.usage = f"{parser.prog} [OPTION ...]"
    parser.epilog = _ORDER
    general = parser.add_argument_group("Configuration")
    general.add_argument("--config", metavar="FILE", help="YAML file with any of the options below [default: none]")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in OPTIONS:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        groups[option.group].add_argument(option.flag, metavar=option.kind.metavar, help=_help(option))


def _help(option: Option) -> str:
    default = option.default_note or option.default or "none"
    unit = f" {option.unit}" if option.unit else ""
    allowed = "" if option.kind.metavar.startswith("{") else f" Allowed: {option.kind.allowed}."
    also = f" [also: {option.dcgm_env}]" if option.dcgm_env else ""
    return f"{option.help}{allowed} [default: {default}{unit}]{also}".replace("%", "%%")


def _add_simulations(parser: _Parser) -> None:
    kinds = parser.add_subparsers(dest="simulation", metavar="WHAT", required=True, parser_class=_Parser)
    listing = _command(kinds, "list", "Names of the shipped scenarios.")
    listing.set_defaults(run=_list_scenarios)
    check = _command(kinds, "check", "Read a scenario and say what is in it, or what is wrong with it.")
    check.set_defaults(run=_check_scenario)
    node = _command(kinds, "node", "Run the kubelet socket and the process tree of a simulated node until SIGTERM.")
    node.add_argument(
        "--dir", required=True, type=Path, metavar="DIR", help="empty or new directory to make the node in"
    )
    node.set_defaults(run=_run_node)
    stack = _command(kinds, "stack", "Run agent, Prometheus and Alertmanager on a simulated node until Ctrl-C.")
    stack.set_defaults(run=_run_stack)
    for simulation in (check, node, stack):
        simulation.add_argument("scenario", metavar="NAME|FILE", help="a shipped scenario, or a scenario file")


def _add_prices(parser: _Parser) -> None:
    kinds = parser.add_subparsers(dest="about_prices", metavar="WHAT", required=True, parser_class=_Parser)
    check = _command(kinds, "check", "Read a price book and say what each row is for, or what is wrong with it.")
    check.add_argument("file", type=Path, metavar="FILE", help="YAML file (format: docs/cost.md)")
    check.set_defaults(run=_check_prices)
    listing = _command(kinds, "list", "The bundled list prices, which hold where no price book has a matching row.")
    listing.set_defaults(run=_list_prices)


def _add_report(parser: _Parser) -> None:
    parser.epilog = "Exit code: 0 for a report, 1 if the agent cannot be asked or has nothing yet, 2 for a wrong flag."
    parser.add_argument(
        "--agent",
        required=True,
        metavar="URL",
        help="address of the agent to ask, as http://node-a:9400; of a pod through kubectl port-forward",
    )
    parser.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="form of the report [default: table]"
    )
    parser.add_argument(
        "--by",
        choices=("owner", "namespace", "team", "model"),
        default="owner",
        help="what lines are summed by; owner: a line per owner, model and mode [default: owner]",
    )


def _unknown_flags(unknown: Sequence[str], namespace: argparse.Namespace) -> tuple[str, ...]:
    known = [f"--{name.replace('_', '-')}" for name in vars(namespace) if name not in {"command", "run"}]
    problems = []
    after_flag = False
    for word in unknown:
        if word.startswith("-"):
            flag, has_value, _ = word.partition("=")
            close = get_close_matches(flag, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; see: {PROGRAM} {namespace.command} --help"
            problems.append(f"{flag}: unknown flag{hint}")
            after_flag = not has_value
        else:
            if not after_flag:
                problems.append(f"'{word}': unexpected argument; see: {PROGRAM} {namespace.command} --help")
            after_flag = False
    return tuple(problems)


def _refuse(problems: tuple[str, ...]) -> None:
    if problems:
        raise ConfigError(*problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """What to look at: this node, or a simulated one."""

    config: "AgentConfig"
    worker_command: tuple[str, ...] | None = None


def _settings(namespace: argparse.Namespace, problems: tuple[str, ...], *, for_doctor: bool) -> "AgentConfig":
    """The configuration; for the doctor, wrong paths are findings, and what would be logged is in the findings."""
    from exporter.config import load_agent, logs

    flags = {name: value for name, value in vars(namespace).items() if name not in {"command", "run", "format"}}
    config = load_agent(flags, os.environ, check_paths=not for_doctor, extra=problems)
    logs.configure(config.log_format, "error" if for_doctor and config.log_level == "info" else config.log_level)
    for warning in config.warnings:
        LOG.warning(warning)
    return config


@asynccontextmanager
async def _target(config: "AgentConfig", *, node_name_given: bool) -> "AsyncIterator[_Target]":
    """The node to look at; a simulated one lives in a temporary directory as long as it is looked at."""
    if config.simulate is None:
        yield _Target(config=config)
        return
    from exporter.config import read_collectors
    from exporter.simulator import scenario
    from exporter.simulator.node import SimulatedNode

    plan = scenario.load(config.simulate)
    with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-simulated-") as directory:
        node = SimulatedNode(plan, Path(directory), time.time)
        await node.start()
        try:
            simulated = replace(
                config,
                node_name=config.node_name if node_name_given else plan.node,
                kubelet_socket=str(node.kubelet_socket),
                kubeconfig=node.kubeconfig,
                kube_start_jitter_seconds=0.0,
                proc_root=node.proc_root,
                pod_log_root=node.pod_log_root,
            )
            fields = read_collectors(config.collectors).fields
            command = tuple(node.child_command(config.sample_interval_seconds, fields))
            yield _Target(config=simulated, worker_command=command)
        finally:
            await node.stop()


def _agent(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    config = _settings(namespace, problems, for_doctor=False)
    return asyncio.run(_run_agent(config, node_name_given=namespace.node_name is not None))


async def _run_agent(config: "AgentConfig", *, node_name_given: bool) -> int:
    from exporter import agent

    async with _target(config, node_name_given=node_name_given) as target:
        return await agent.run(
            target.config, worker_command=target.worker_command, simulated=target.worker_command is not None
        )


def _doctor(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    _refuse(problems)
    config = _settings(namespace, problems, for_doctor=True)
    return asyncio.run(_examine(config, namespace.format, node_name_given=namespace.node_name is not None))


async def _examine(config: "AgentConfig", form: str, *, node_name_given: bool) -> int:
    from exporter import doctor

    async with _target(config, node_name_given=node_name_given) as target:
        simulated = target.worker_command is not None
        findings = await doctor.examine(
            doctor.Surroundings(
                config=target.config,
                wall=time.time,
                monotonic=time.monotonic,
                worker_command=target.worker_command,
                simulated=simulated,
            )
        )
    write = doctor.write_json if form == "json" else doctor.write_text
    with _stdout() as stream:
        write(findings, simulated=simulated, stream=stream)
    return EXIT_FAILED if doctor.worst(findings) is doctor.Level.FAIL else 0


def _check_prices(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    _refuse(problems)
    from exporter.config import price_book, price_table

    book, mistakes = price_book.examine(price_book.read_text(namespace.file), str(namespace.file))
    if book.rows:
        with _stdout() as stream:
            stream.writelines(f"{line}\n" for line in price_table.lines(book))
    for warning in book.warnings:
        _say(f"warning: {warning}")
    _refuse(mistakes)
    with _stdout() as stream:
        stream.write(f"{namespace.file}: ok\n")
    return 0


def _list_prices(_namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    _refuse(problems)
    from exporter.config import price_book, price_table

    with _stdout() as stream:
        stream.writelines(f"{line}\n" for line in price_table.lines(price_book.bundled()))
    return 0


def _report(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    _refuse(problems)
    from exporter import report

    base = report.base_address(namespace.agent)
    read = report.read(report.fetch(base), base)
    with _stdout() as stream:
        report.write(read, namespace.format, stream, namespace.by)
    return 0


def _list_scenarios(_namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    _refuse(problems)
    from exporter.simulator import scenario

    sys.stdout.writelines(f"{name}\n" for name in scenario.shipped())
    return 0


def _check_scenario(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    _refuse(problems)
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
    _refuse(problems)
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
    _refuse(problems)
    from exporter.simulator import stack

    return int(stack.main(namespace.scenario))
