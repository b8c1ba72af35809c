"""Where a command's result goes: standard output, or a file that is whole or stays what it was."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import TextIO

from exporter.cli.base import stdout
from exporter.errors import ConfigError, ExporterError


def check_output(path: Path | None) -> None:
    """Find out before long work that its result could not be written.

    Raises:
        ConfigError: The file cannot be one.
    """
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"--output: {path} is a directory; allowed: a file")
    if not folder.is_dir():
        raise ConfigError(f"--output: {folder} is no directory; make it, or give another file")
    target = path if is_written_in_place(path) else folder
    if not os.access(target, os.W_OK):
        raise ConfigError(f"--output: {target} may not be written to; allow it, or give another file")


def is_written_in_place(path: Path) -> bool:
    """A pipe or a device cannot be replaced."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


@contextmanager
def output(path: Path | None) -> Iterator[TextIO]:
    """A stream for the result; a file is put in place when all of it is on the disk, else what was there stays.

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
    # Not by the process' number: in a container it is always the same, and a killed one leaves its part behind.
    beside = path.with_name(f".{path.name[:200]}.{token_hex(4)}.part")
    try:
        with beside.open("x", encoding="utf-8", newline="") as stream:
            with suppress(FileNotFoundError):
                os.fchmod(stream.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
