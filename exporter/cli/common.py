"""Provides the parser and the options that commands share."""

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any, NoReturn, TypeAlias, TypeVar

from exporter.cli.output import PROGRAM
from exporter.config import dcgm_flags, types
from exporter.config.options import OPTIONS, LoggingSettings, Option
from exporter.config.resolve import configure
from exporter.errors import ConfigError, did_you_mean

T = TypeVar("T")
_ORDER = (
    "Each option can also be set as an environment variable, GPU_COST_EXPORTER_ and its name in capitals"
    " (GPU_COST_EXPORTER_SAMPLE_INTERVAL=500ms), or as a key of the file (sample-interval: 500ms). Flags win over the"
    " environment, the environment over the file. dcgm-exporter's flags and variables are accepted where there is an"
    " equivalent ([also: ...]); ours win over them, and one line names those that have none: docs/migrating.md."
)


_EXAMPLES = "Examples:"


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs, except paragraphs of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = partial(fill, width=width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        return "\n\n".join(one if one.startswith(_EXAMPLES) else wrap(one) for one in text.split("\n\n"))


_SHORT_LINES = 24
"""Maximum number of lines of options in the short help."""


class _ShortHelp(argparse.Action):
    """Prints the help without a long list of options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        text = parser.format_help()
        head, *options = text.split("\noptions:\n", 1)
        is_long = "".join(options).count("\n") > _SHORT_LINES
        sys.stdout.write(f"{head}\nAll options: {parser.prog} --help\n" if is_long else text)
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser that reports errors like other mistakes of the user, and has a short help (``-h``)."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - argparse's
        super().__init__(add_help=False, allow_abbrev=False, formatter_class=_Help, **settings)
        self.add_argument("-h", action=_ShortHelp, nargs=0, help="show purpose and examples, and exit")
        self.add_argument("--help", action="help", help="show all options, and exit")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Raise an error for an unknown choice, with the nearest choice.

        Raises:
            ConfigError: Names the choices.
        """
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        is_command = isinstance(action, argparse._SubParsersAction)  # noqa: SLF001 - as of Commands
        what = f"unknown command '{value}'" if is_command else f"{_name(action)}: unknown value '{value}'"
        hint = did_you_mean(str(value), choices)
        raise ConfigError(f"{what}{hint or '; allowed: ' + ', '.join(choices)}")

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message}; see: {self.prog} --help")


def _name(action: argparse.Action) -> str:
    return action.option_strings[-1] if action.option_strings else str(action.metavar)


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"  # noqa: SLF001 - argparse names its type no other way
"""Type of the object to which commands are added."""


def command(commands: Commands, name: str, about: str, examples: Sequence[str] = ()) -> Parser:
    """Add a command; ``about`` is one sentence, ``examples`` are words after the command."""
    parser = commands.add_parser(name, help=about, description=about)
    if examples:
        lines = "".join(f"\n  {parser.prog} {example}".rstrip() for example in examples)
        parser.description = f"{about}\n\n{_EXAMPLES}{lines}"
    return parser


def add_options(
    parser: Parser, options: Sequence[Option] = OPTIONS, epilog: str = _ORDER, *, shown: bool = True
) -> None:
    """Add the options of a table in groups, by default the agent's, and the option for the configuration file.

    Args:
        parser: Parser of the command.
        options: Table of options.
        epilog: Text at the end of the help.
        shown: Whether the help lists the options.
    """
    parser.usage = f"{parser.prog} [OPTION ...]"
    parser.epilog = epilog
    general = parser.add_argument_group("Configuration")
    general.add_argument("--config", metavar="FILE", help="YAML file of options [default: none]")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        also = dcgm_flags.names_for(option.key) if options is OPTIONS else ()
        usage = option.usage(also) if shown else argparse.SUPPRESS
        groups[option.group].add_argument(option.flag, metavar=option.kind.metavar, help=usage)


def add_output(options: "argparse._ActionsContainer") -> None:
    """Add the flag for the file of the result; without it, and for ``-``, the value is ``None``: standard output."""
    options.add_argument(
        "--output",
        type=lambda text: None if text == "-" else Path(text),
        metavar="FILE",
        help="file to write, whole or not at all; -: standard output [default: -]",
    )


def add_timezone(options: "argparse._ActionsContainer") -> None:
    """Add the flag for the time zone of days, weeks and months."""
    options.add_argument(
        "--timezone",
        type=of_kind(types.ZONE),
        metavar="ZONE",
        help="time zone of days, weeks and months, as Europe/Berlin; whole hours from UTC [default: UTC]",
    )


def of_kind(kind: types.OptionType) -> Callable[[str], object]:
    """Return the reader of a flag's value for argparse."""

    def read(text: str) -> object:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(kind.refusal(error)) from None

    return read


def or_problems(make: Callable[[], T], problems: list[str], prefix: str = "") -> T | None:
    """Return the result of ``make``; if it fails, ``None``, and add its mistakes to ``problems``."""
    try:
        return make()
    except ConfigError as error:
        problems += [f"{prefix}{problem}" for problem in error.problems]
        return None


def unknown_flags(
    unknown: Sequence[str], namespace: argparse.Namespace, more: Sequence[str] = (), program: str = PROGRAM
) -> tuple[str, ...]:
    """Return a line for each unknown word, with the nearest flag; ``more`` are additional known flags."""
    known = [f"--{name.replace('_', '-')}" for name in vars(namespace) if name not in {"command", "run"}] + [*more]
    see = " ".join(filter(None, (program, namespace.command, "--help")))
    problems = []
    after_flag = False
    for word in unknown:
        if word.startswith("-"):
            flag, has_value, _ = word.partition("=")
            problems.append(f"{flag}: unknown flag{did_you_mean(flag, known) or f'; see: {see}'}")
            after_flag = not has_value
        else:
            if not after_flag:
                problems.append(f"'{word}': unexpected argument; see: {see}")
            after_flag = False
    return tuple(problems)


def start_log(settings: LoggingSettings, warnings: tuple[str, ...]) -> None:
    """Configure the log, and write the warnings of the configuration."""
    configure(settings.log_format, settings.log_level)
    for warning in warnings:
        logging.getLogger("exporter.cli").warning(warning)


def refuse(problems: tuple[str, ...]) -> None:
    """Raise an error if there are problems.

    Raises:
        ConfigError: Lists all problems.
    """
    if problems:
        raise ConfigError(*problems)


def alone(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace, tuple[str, ...]], int]:
    """Return a function that runs a command if the parser found no problems."""

    def checked(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
        refuse(problems)
        return run(namespace)

    return checked
