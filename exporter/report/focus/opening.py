"""Opens a CSV file of a bill, packed with gzip or not, and reads its records within bounds."""

import csv
import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from exporter.errors import ExporterError

_GZIP = b"\x1f\x8b"
MOST_FIELD, MOST_RECORD, MOST_FILE = 1 << 20, 4 << 20, 16 << 30
"""Characters, once unpacked: of a field, of a record with all its fields, of a file."""


class Records:
    """The records of a CSV text; ``line_num`` is that of the last line read.

    A megabyte of gzip can be a line of a gigabyte, and the csv module takes whole lines.

    Args:
        stream: Opened with ``newline=""``.
    """

    def __init__(self, stream: TextIO) -> None:
        csv.field_size_limit(MOST_FIELD)
        self._stream = stream
        self._of_record = self._of_file = 0
        self._reader = csv.reader(self._lines(), strict=True)

    @property
    def line_num(self) -> int:
        """Lines read so far."""
        return self._reader.line_num

    def __iter__(self) -> "Records":
        """Return the records themselves: they can be read once."""
        return self

    def __next__(self) -> list[str]:
        """Return the fields of the next record; an empty line has none.

        Raises:
            csv.Error: It is no CSV, or beyond a bound.
        """
        self._of_record = 0
        return next(self._reader)

    def _lines(self) -> Iterator[str]:
        while line := self._stream.readline(MOST_RECORD + 1):
            self._of_record += len(line)
            self._of_file += len(line)
            if self._of_record > MOST_RECORD:
                raise csv.Error(f"a record is longer than {MOST_RECORD >> 20} MiB")
            if self._of_file > MOST_FILE:
                raise csv.Error(f"the file is longer than {MOST_FILE >> 30} GiB")
            yield line


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The file's text, its line ends as they are.

    Raises:
        ExporterError: It cannot be read, now or while it is read.
    """
    try:
        with path.open("rb") as file:
            # Looked at, not read: what a pipe has given it does not give again.
            is_packed = file.peek(len(_GZIP)).startswith(_GZIP)
            unpacked = cast("BinaryIO", gzip.GzipFile(fileobj=file)) if is_packed else file
            with TextIOWrapper(unpacked, encoding="utf-8-sig", newline="") as stream:
                yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ExporterError(f"{path}: damaged gzip: {error}; fetch the file again") from None
    except UnicodeDecodeError:
        raise ExporterError(f"{path}: not UTF-8 text; give a CSV file with a header") from None
    except OSError as error:
        raise ExporterError(f"{path}: cannot read: {error.strerror or error}; give a readable file") from None
