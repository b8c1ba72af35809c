"""Output of commands: lines, files that are replaced whole, progress, problems and exit codes."""

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
"""Failed; a mistake in what the user wrote; done, but not whole; interrupted."""


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
