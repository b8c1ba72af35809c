"""Writes the output of commands: lines, files replaced as a whole, progress, problems and exit codes."""

import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TextIO

from exporter.config.resolve import redacted
from exporter.errors import ConfigError, ExporterError

PROGRAM = "gpu-cost-exporter"
EXIT_FAILED, EXIT_USAGE, EXIT_PARTIAL, EXIT_INTERRUPTED = 1, 2, 3, 130
"""Failure; mistake of the user; incomplete result; interrupted."""


def say(problem: str) -> None:
    """Write one problem to standard error."""
    print(f"{PROGRAM}: {redacted(' '.join(problem.split()))}", file=sys.stderr)  # noqa: T201 - nothing logs before the settings are known


@contextmanager
def stdout() -> Iterator[TextIO]:
    """Yield standard output, for writing only; its reader may have ended (head), or its disk may be full."""
    try:
        yield sys.stdout
        sys.stdout.flush()
    except OSError as error:
        # Buffered output would fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(EXIT_FAILED) from None
        raise ExporterError(f"standard output: cannot write: {error.strerror}; give it room, or another file") from None


def put(*lines: str) -> None:
    """Write lines to standard output."""
    with stdout() as stream:
        stream.writelines(f"{line}\n" for line in lines)


def check_output(path: Path | None, flag: str = "--output") -> None:
    """Raise an error before long work if its result cannot be written.

    Raises:
        ConfigError: The path cannot be a file.
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
    """Yield a stream for the result. A file is replaced once the result is on the disk; until then the old file stays.

    Raises:
        ExporterError: The file cannot be written.
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
    # A random name: the process id in a container is always the same, and a killed process leaves its part file.
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
    """Yield a function that shows the progress of long work: a bar with the time left, on a terminal, after one second.

    Args:
        what: The work, in a word or two.
    """
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console  # noqa: PLC0415 - the agent does not need it
    from rich.progress import Progress as Bar  # noqa: PLC0415 - as above

    bar = Bar(console=Console(stderr=True), transient=True)
    task, begun = bar.add_task(what), time.monotonic()

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if time.monotonic() - begun >= _PATIENCE_SECONDS:
            bar.start()

    try:
        yield show
    finally:
        bar.stop()


def ended(run: Callable[[], int]) -> int:
    """Run a program and return the exit code: 0, 1 for a failure, 2 for a mistake of the user."""
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
