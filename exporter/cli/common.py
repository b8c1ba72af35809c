"""Shared parts of all commands: parser, options, output, progress and error messages."""

import argparse
import logging
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from textwrap import fill
from typing import Any, NoReturn, TextIO, TypeAlias, TypeVar

from exporter.config import dcgm_flags, types
from exporter.config.options import OPTIONS, LoggingSettings, Option
from exporter.config.resolve import configure, redacted
from exporter.errors import ConfigError, ExporterError, did_you_mean

T = TypeVar("T")
PROGRAM = "gpu-cost-exporter"
EXIT_FAILED, EXIT_USAGE, EXIT_PARTIAL, EXIT_INTERRUPTED = 1, 2, 3, 130
"""Failed; a mistake in what the user wrote; done, but not whole; interrupted."""

_ORDER = (
    "Each option can also be set as an environment variable, GPU_COST_EXPORTER_ and its name in capitals"
    " (GPU_COST_EXPORTER_SAMPLE_INTERVAL=500ms), or as a key of the file (sample-interval: 500ms). Flags win over the"
    " environment, the environment over the file. dcgm-exporter's flags and variables are accepted where there is an"
    " equivalent ([also: ...]); ours win over them, and one line names those that have none: docs/migrating.md."
)


_EXAMPLES = "Examples:"


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs, and leaves a paragraph of examples as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        wrap = partial(fill, width=width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        return "\n\n".join(one if one.startswith(_EXAMPLES) else wrap(one) for one in text.split("\n\n"))


_SHORT_LINES = 24
"""Options of so many lines are in the short help, too."""


class _ShortHelp(argparse.Action):
    """Prints the help without a long list of options."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        text = parser.format_help()
        head, *options = text.split("\noptions:\n", 1)
        is_long = "".join(options).count("\n") > _SHORT_LINES
        sys.stdout.write(f"{head}\nAll options: {parser.prog} --help\n" if is_long else text)
        parser.exit()


class Parser(argparse.ArgumentParser):
    """A parser with errors like every other mistake of the user, and a short help (``-h``)."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - argparse's
        super().__init__(add_help=False, allow_abbrev=False, formatter_class=_Help, **settings)
        self.add_argument("-h", action=_ShortHelp, nargs=0, help="show purpose and examples, and exit")
        self.add_argument("--help", action="help", help="show all options, and exit")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Refuse what is not a choice, with the nearest one.

        Raises:
            ConfigError: With the choices.
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
"""What commands are added to."""


def say(problem: str) -> None:
    """Write one problem to standard error."""
    print(f"{PROGRAM}: {redacted(' '.join(problem.split()))}", file=sys.stderr)  # noqa: T201 - nothing logs before the settings are known


@contextmanager
def stdout() -> Iterator[TextIO]:
    """Yield standard output, only for writing: its reader may have ended (head), and its disk may be full."""
    try:
        yield sys.stdout
        sys.stdout.flush()
    except OSError as error:
        # What is still buffered would fail once more when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(EXIT_FAILED) from None
        raise ExporterError(f"standard output: cannot write: {error.strerror}; give it room, or another file") from None


def put(*lines: str) -> None:
    """Write lines to standard output."""
    with stdout() as stream:
        stream.writelines(f"{line}\n" for line in lines)


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
    """Add every option of a table in groups, by default the agent's, and the configuration file.

    Args:
        parser: Of the command.
        options: The table.
        epilog: Ends the help.
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
    """Add the flag for the result's file; without it, and for ``-``, the value is ``None``: standard output."""
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
            raise argparse.ArgumentTypeError(kind.refusal(text, error)) from None

    return read


def or_problems(make: Callable[[], T], problems: list[str], prefix: str = "") -> T | None:
    """Return what it makes; where that fails ``None``, with its mistakes in ``problems``."""
    try:
        return make()
    except ConfigError as error:
        problems += [f"{prefix}{problem}" for problem in error.problems]
        return None


def unknown_flags(
    unknown: Sequence[str], namespace: argparse.Namespace, more: Sequence[str] = (), program: str = PROGRAM
) -> tuple[str, ...]:
    """Return a line for each unknown word, with the nearest flag; ``more`` are known flags as well."""
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


def ended(run: Callable[[], int]) -> int:
    """Return the exit code of a program: 0, 1 for a failure, 2 for a mistake in what the user wrote."""
    try:
        return run()
    except ConfigError as error:
        for problem in error.problems:
            say(problem)
        return EXIT_USAGE
    except ExporterError as error:
        say(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def start_log(settings: LoggingSettings, warnings: tuple[str, ...]) -> None:
    """Configure the log, and write the warnings of the configuration."""
    configure(settings.log_format, settings.log_level)
    for warning in warnings:
        logging.getLogger("exporter.cli").warning(warning)


def refuse(problems: tuple[str, ...]) -> None:
    """End here where there is a problem.

    Raises:
        ConfigError: With all of them.
    """
    if problems:
        raise ConfigError(*problems)


def check_output(path: Path | None, flag: str = "--output") -> None:
    """Find out before long work that its result could not be written.

    Raises:
        ConfigError: The file cannot be one.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"{flag}: {path} is a directory; allowed: a file")
    if not folder.is_dir():
        raise ConfigError(f"{flag}: {folder} is no directory; make it, or give another file")
    target = path if is_written_in_place(path) else folder
    if not os.access(target, os.W_OK):
        raise ConfigError(f"{flag}: {target} may not be written to; allow it, or give another file")


def is_written_in_place(path: Path) -> bool:
    """Return whether a file is a pipe or a device, which cannot be replaced."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


@contextmanager
def output(path: Path | None) -> Iterator[TextIO]:
    """Yield a stream for the result. A file is replaced when all of it is on the disk; otherwise the old one stays.

    Raises:
        ExporterError: It cannot be written.
    """
    if path is None:
        with stdout() as stream:
            yield stream
        return
    try:
        if is_written_in_place(path):
            with path.open("w", encoding="utf-8", newline="") as stream:
                yield stream
        else:
            with _replaced(path.resolve()) as stream:
                yield stream
    except OSError as error:
        raise ExporterError(f"{path}: cannot write: {error.strerror or error}; give it room, or another file") from None


@contextmanager
def _replaced(path: Path) -> Iterator[TextIO]:
    # A random name: in a container the process id is always the same, and a killed process leaves its part behind.
    part = path.with_name(f".{path.name[:200]}.{token_hex(4)}.part")
    try:
        with part.open("x", encoding="utf-8", newline="") as stream:
            with suppress(FileNotFoundError):
                os.fchmod(stream.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


_PATIENCE_SECONDS = 1.0


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what shows how far long work is: a bar on a terminal, from the second second on, with the time left.

    Args:
        what: What is being done, in a word or two.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415 - the agent does without
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415 - as above
    from rich.progress import Progress as Bar  # noqa: PLC0415 - as above

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("left:"))
    bar = Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task, begun = bar.add_task(what), time.monotonic()

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if time.monotonic() - begun >= _PATIENCE_SECONDS:
            bar.start()

    try:
        yield show
    finally:
        bar.stop()
