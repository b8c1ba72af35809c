"""The command line: settles the configuration, then hands over to the agent, doctor, report or simulator."""

from collections.abc import Sequence

from exporter import __version__
from exporter.cli import agent, digest, focus, prices, recommend, reconcile, report, serve, simulate, store
from exporter.cli.base import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, PROGRAM, Parser, say, unknown_flags
from exporter.errors import ConfigError, ExporterError

_COMMANDS = (agent, prices, report, simulate, focus, recommend, digest, serve, reconcile, store)
"""In the order of ``--help``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 1 for a failure, 2 for a mistake in what the user wrote."""
    try:
        namespace, unknown = _parser().parse_known_args(argv)
        if namespace.command is None:
            _parser().print_help()
            return EXIT_USAGE
        return int(namespace.run(namespace, unknown_flags(unknown, namespace)))
    except ConfigError as error:
        for problem in error.problems:
            say(problem)
        return EXIT_USAGE
    except ExporterError as error:
        say(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> Parser:
    about = "Who holds which GPU, how busy it is, and since when it is idle."
    parser = Parser(prog=PROGRAM, description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for module in _COMMANDS:
        module.add(commands)
    return parser
