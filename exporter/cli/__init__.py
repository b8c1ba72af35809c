"""The command line: selects the command, runs its module and returns the exit code."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from exporter import __version__
from exporter.cli.common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, PROGRAM, Parser, command, say, unknown_flags
from exporter.config import dcgm_flags
from exporter.config.options import OPTIONS
from exporter.errors import ConfigError, ExporterError

_COMMANDS: Mapping[str, tuple[str, str]] = {
    "agent": ("agent", "Measure this node's GPUs and serve them to Prometheus and to people."),
    "doctor": ("agent", "Check whether this node is fit for the agent, and say what to fix."),
    "prices": ("prices", "Price books: what an hour of a GPU costs."),
    "report": ("report", "Who used GPUs, how well, and what it cost: of a fleet, or of one node."),
    "simulate": ("simulate", "Nodes that do not exist: for the demo, for trying out, for tests."),
    "focus": ("focus", "The FOCUS format for cost and usage: its columns."),
    "recommend": ("recommend", "Which GPUs could be given back, shared or made smaller, and what it saves."),
    "serve": ("serve", "Serve what a fleet's GPUs cost: pages, an API, budgets and metrics."),
    "store": ("store", "The store of closed days: what a report shows of days that Prometheus forgot."),
}
"""Module and purpose of each command, in the order of ``--help``; ``add_COMMAND`` of the module adds its flags.

Only the module of the command that was given is loaded: others need a second for libraries that this one does without.
"""
_LIKE_DCGM_EXPORTER = frozenset({"agent", "doctor"})
"""Commands that take dcgm-exporter's flags, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 for a failure, 2 for a mistake in what the user wrote."""
    if os.getpid() == 1:
        # Only signals that it handles itself end a container's first process, and some commands take time to begin.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        words, given, problems = _dcgm_flags(list(sys.argv[1:] if argv is None else argv))
        parser = _parser(words)
        namespace, unknown = parser.parse_known_args(words)
        if namespace.command is None:
            parser.print_help()
            return EXIT_USAGE
        known = dcgm_flags.KNOWN_FLAGS if namespace.command in _LIKE_DCGM_EXPORTER else ()
        problems += unknown_flags(unknown, namespace, known)
        if namespace.command in _LIKE_DCGM_EXPORTER:
            namespace.dcgm_flags = given
        return int(namespace.run(namespace, tuple(problems)))
    except ConfigError as error:
        for problem in error.problems:
            say(problem)
        return EXIT_USAGE
    except ExporterError as error:
        say(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _dcgm_flags(words: list[str]) -> tuple[list[str], list[dcgm_flags.GivenFlag], list[str]]:
    """The words without dcgm-exporter's flags, these, and problems of one line each.

    Words that begin with one of its flags are those of its image, which names no command.
    """
    if words and dcgm_flags.is_flag(words[0]):
        words.insert(0, "agent")
    if not words or words[0] not in _LIKE_DCGM_EXPORTER:
        return words, [], []
    ours = frozenset(option.key for option in OPTIONS)
    rest, given, problems = dcgm_flags.take(words[1:], ours)
    return [words[0], *rest], given, problems


def _parser(words: Sequence[str]) -> Parser:
    """Return the parser of the command that the words name; of the others it knows names and purposes."""
    about = "Holders of GPUs, how busy each GPU is, and since when it is idle."
    parser = Parser(prog=PROGRAM, description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    wanted = next((word for word in words if word in _COMMANDS), None)
    for name, (module, purpose) in _COMMANDS.items():
        added = command(commands, name, purpose)
        if name == wanted:
            getattr(import_module(f"exporter.cli.{module}"), f"add_{name}")(added)
    return parser
