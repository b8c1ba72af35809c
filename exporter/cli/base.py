"""What every command is made of: its parser, its options, where it writes, and how mistakes are told."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import tzinfo
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TextIO, TypeAlias

from exporter.config import dcgm_flags, kinds
from exporter.config.logs import told
from exporter.config.options import OPTIONS, Option
from exporter.errors import ConfigError, ExporterError

PROGRAM = "gpu-cost-exporter"
EXIT_FAILED, EXIT_USAGE, EXIT_PARTIAL, EXIT_INTERRUPTED = 1, 2, 3, 130
"""Failed; a mistake in what the user wrote; done, but not whole; interrupted."""

_ORDER = (
    "Each option can also be set as an environment variable, GPU_COST_EXPORTER_ and its name in capitals"
    " (GPU_COST_EXPORTER_SAMPLE_INTERVAL=500ms), or as a key of the file (sample-interval: 500ms). Flags win over the"
    " environment, the environment over the file. dcgm-exporter's flags and variables are accepted where there is an"
    " equivalent ([also: ...]); ours win over them, and one line names those that have none: docs/migrating.md."
)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are told like every other mistake in what the user wrote."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message}; see: {self.prog} --help")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # noqa: SLF001 - argparse names its type no other way
"""What a command adds itself to."""


def say(problem: str) -> None:
    """Tell one problem on standard error."""
    print(f"{PROGRAM}: {told(' '.join(problem.split()))}", file=sys.stderr)  # noqa: T201 - nothing logs before the settings are known


@contextmanager
def stdout() -> Iterator[TextIO]:
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


def command(commands: Commands, name: str, about: str) -> Parser:
    """A new command; ``about`` is one sentence."""
    return commands.add_parser(name, help=about, description=about, allow_abbrev=False)


def add_options(parser: Parser, options: Sequence[Option] = OPTIONS, epilog: str = _ORDER) -> None:
    """Every option of a table, the agent's by default, in groups; and the file that may have them."""
    parser.usage = f"{parser.prog} [OPTION ...]"
    parser.epilog = epilog
    general = parser.add_argument_group("Configuration")
    general.add_argument("--config", metavar="FILE", help="YAML file with any of the options below [default: none]")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        also = dcgm_flags.names_for(option.key) if options is OPTIONS else ()
        groups[option.group].add_argument(option.flag, metavar=option.kind.metavar, help=_help(option, also))


def _help(option: Option, names: Sequence[str]) -> str:
    default = option.default_note or option.default or "none"
    unit = f" {option.unit}" if option.unit else ""
    allowed = "" if option.kind.metavar.startswith("{") else f" Allowed: {option.kind.allowed}."
    also = f" [also: {', '.join(names)}]" if names else ""
    return f"{option.help}{allowed} [default: {default}{unit}]{also}".replace("%", "%%")


def add_output(options: "argparse._ActionsContainer") -> None:
    """The flag that names the result's file; nothing and ``-`` are standard output, as ``None``."""
    options.add_argument(
        "--output",
        type=lambda text: None if text == "-" else Path(text),
        metavar="FILE",
        help="file to write, whole or not at all; -: standard output [default: -]",
    )


def add_timezone(options: "argparse._ActionsContainer") -> None:
    """Add the flag that says whose days, weeks and months a period means."""
    options.add_argument(
        "--timezone",
        type=_time_zone,
        metavar="ZONE",
        help="time zone of days, weeks and months, as Europe/Berlin; whole hours from UTC [default: UTC]",
    )


def _time_zone(text: str) -> tzinfo:
    try:
        return kinds.parse_zone(text)
    except ValueError:
        why = kinds.zone_hint(text)
        hint = f"; {why}" if why else ""
        raise argparse.ArgumentTypeError(
            f"value '{text}' is not {kinds.ZONE.noun}; allowed: {kinds.ZONE.allowed}{hint}"
        ) from None


def unknown_flags(unknown: Sequence[str], namespace: argparse.Namespace, more: Sequence[str] = ()) -> tuple[str, ...]:
    """What was written and is known to no command, one line each with the nearest flag; ``more`` are known as well."""
    known = [f"--{name.replace('_', '-')}" for name in vars(namespace) if name not in {"command", "run"}] + [*more]
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


def refuse(problems: tuple[str, ...]) -> None:
    """End here where there is a problem.

    Raises:
        ConfigError: With all of them.
    """
    if problems:
        raise ConfigError(*problems)
