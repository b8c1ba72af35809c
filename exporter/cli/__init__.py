"""Selects the command on the command line, runs its module and returns the exit code."""

import os
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from exporter import __version__
from exporter.cli.common import Parser, command, refuse, unknown_flags
from exporter.cli.output import EXIT_USAGE, PROGRAM, ended
from exporter.config import dcgm_flags


class _Command(NamedTuple):
    """A command: module in which ``add_COMMAND`` adds its flags; purpose; examples, as words after the command."""

    module: str
    purpose: str
    examples: tuple[str, ...]


_COMMANDS: Mapping[str, _Command] = {
    "agent": _Command(
        "agent",
        "Measure the GPUs of this node, and serve metrics, a page and an API.",
        ("", "--simulate demo --listen localhost:9400", "--config agent.yaml --price-book prices.yaml"),
    ),
    "doctor": _Command(
        "agent",
        "Check this node for the agent, and say what to fix.",
        ("", "--simulate demo", "--report hardware.json"),
    ),
    "top": _Command(
        "top",
        "Show GPUs with holders, activity, idle time and cost, live in the terminal.",
        ("--agent http://node-a:9400", "--prometheus http://prometheus:9090", "--once --sort idle"),
    ),
    "report": _Command(
        "report",
        "Report GPU-hours and cost of a fleet or of one node.",
        (
            "--agent http://node-a:9400 --by team",
            "--prometheus http://prometheus:9090 --window last-month --by team,model",
            "--store days.sqlite --window 2026-Q3 --format csv --output quarter.csv",
        ),
    ),
    "recommend": _Command(
        "recommend",
        "List GPUs to return, share or make smaller, with the savings.",
        (
            "--prometheus http://prometheus:9090",
            "--prometheus http://prometheus:9090 --window 14d --filter team=vision --format csv",
        ),
    ),
    "serve": _Command(
        "serve",
        "Run the cost service of a fleet: web pages, API, budgets and metrics.",
        (
            "--prometheus http://prometheus:9090",
            "--prometheus http://prometheus:9090 --store days.sqlite --budgets budgets.yaml",
        ),
    ),
    "store": _Command(
        "store",
        "Manage the store of closed days, which outlives Prometheus' retention.",
        (
            "backfill --store days.sqlite --prometheus http://prometheus:9090",
            "list --store days.sqlite",
            "history --store days.sqlite 2026-10-31",
        ),
    ),
    "prices": _Command(
        "prices",
        "Write or check a price book, or list the bundled prices.",
        ("init --agent http://node-a:9400 --output prices.yaml", "check prices.yaml", "list"),
    ),
    "focus": _Command("report", "List the columns of the FOCUS format.", ("columns", "columns --version 1.2")),
    "simulate": _Command(
        "simulate",
        "Run simulated nodes and fleets, for demonstrations and tests.",
        ("list", "check my-node.yaml", "stack demo"),
    ),
    "completion": _Command(
        "completion",
        "Print a completion script for a shell.",
        ("bash > /etc/bash_completion.d/gpu-cost-exporter", "zsh > ~/.gpu-cost-exporter.zsh", "fish | source"),
    ),
}
"""Commands in the order of ``--help``. Only the requested module is imported: some libraries take a second."""
_HELP, _VERSION, _FLAGS = "help", "version", ("--version", "--help")
_LIKE_DCGM_EXPORTER = frozenset({"agent", "doctor"})
"""Commands that also accept dcgm-exporter's flags."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 for a failure, 2 for a mistake of the user."""
    if os.getpid() == 1:
        # The first process of a container ignores signals without a handler, and some commands take time to start.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    return ended(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    namespace, problems = parse(argv)
    if namespace.command is None:
        refuse(problems)
        _parser(()).print_help()
        return EXIT_USAGE
    return int(namespace.run(namespace, problems))


def parse(argv: list[str]) -> tuple[Namespace, tuple[str, ...]]:
    """Parse a command line; return the options and the problems, one line each."""
    words, given, problems = _dcgm_flags(_long(argv))
    namespace, unknown = _parser([word for word in words if word in _COMMANDS][:1]).parse_known_args(words)
    known: tuple[str, ...] = () if namespace.command else _FLAGS
    if namespace.command in _LIKE_DCGM_EXPORTER:
        known = dcgm_flags.KNOWN_FLAGS
    namespace.dcgm_flags = given
    return namespace, (*problems, *unknown_flags(unknown, namespace, known))


def _long(words: list[str]) -> list[str]:
    """Return the words with ``help [COMMAND]`` and ``version`` as flags."""
    if words[:1] == [_HELP]:
        return [*words[1:], "--help"]
    return ["--version"] if words == [_VERSION] else words


def _dcgm_flags(words: list[str]) -> tuple[list[str], list[dcgm_flags.GivenFlag], list[str]]:
    """Return the words without dcgm-exporter's flags, these flags, and problems of one line each.

    Words that begin with one of these flags are arguments for dcgm-exporter's image, which name no command.
    """
    if words and dcgm_flags.find(words[0]):
        words.insert(0, "agent")
    if not words or words[0] not in _LIKE_DCGM_EXPORTER:
        return words, [], []
    rest, given, problems = dcgm_flags.take(words[1:])
    return [words[0], *rest], given, problems


def whole_parser() -> Parser:
    """Return the parser with the options of all commands."""
    return _parser(tuple(_COMMANDS))


def _parser(wanted: Sequence[str]) -> Parser:
    """Return a parser of all commands; only the wanted commands have their options."""
    about = "Show which pod holds each GPU, how busy it is, how long it has been idle, and what it costs."
    parser = Parser(prog=PROGRAM, usage=f"{PROGRAM} COMMAND [OPTION ...]", description=about)
    parser.epilog = f"Examples of a command: {PROGRAM} COMMAND -h; all of its options: {PROGRAM} COMMAND --help"
    parser.add_argument(_FLAGS[0], action="version", version=f"{PROGRAM} {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog=PROGRAM, parser_class=Parser)
    for name, (module, purpose, examples) in _COMMANDS.items():
        added = command(commands, name, purpose, examples)
        if name in wanted:
            getattr(import_module(f"exporter.cli.{module}"), f"add_{name}")(added)
    topic = command(commands, _HELP, "Show the options of a command.")
    topic.add_argument("topic", choices=tuple(_COMMANDS), nargs="?", metavar="COMMAND", help="one of the commands")
    command(commands, _VERSION, "Show the version.")
    return parser
