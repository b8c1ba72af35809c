"""The command line: selects the command, runs its module and returns the exit code."""

import os
import signal
import sys
from collections.abc import Sequence

from exporter import __version__
from exporter.cli import agent, focus, prices, recommend, report, serve, simulate, store
from exporter.cli.common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, PROGRAM, Parser, say, unknown_flags
from exporter.config import dcgm_flags
from exporter.config.options import OPTIONS
from exporter.errors import ConfigError, ExporterError

_COMMANDS = (agent, prices, report, simulate, focus, recommend, serve, store)
"""In the order of ``--help``."""
_LIKE_DCGM_EXPORTER = frozenset({"agent", "doctor"})
"""Commands that take dcgm-exporter's flags, too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 for a failure, 2 for a mistake in what the user wrote."""
    if os.getpid() == 1:
        # Only signals that it handles itself end a container's first process, and some commands take time to begin.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        words, given, problems = _dcgm_flags(list(sys.argv[1:] if argv is None else argv))
        namespace, unknown = _parser().parse_known_args(words)
        if namespace.command is None:
            _parser().print_help()
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

    Words that begin with one of its flags are those of its image, whose arguments name no command.
    """
    if words and dcgm_flags.is_flag(words[0]):
        words.insert(0, "agent")
    if not words or words[0] not in _LIKE_DCGM_EXPORTER:
        return words, [], []
    ours = frozenset(option.key for option in OPTIONS)
    rest, given, problems = dcgm_flags.take(words[1:], ours)
    return [words[0], *rest], given, problems


def _parser() -> Parser:
    about = "Who holds which GPU, how busy it is, and since when it is idle."
    parser = Parser(prog=PROGRAM, description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for module in _COMMANDS:
        module.add(commands)
    return parser
