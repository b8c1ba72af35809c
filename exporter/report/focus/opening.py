"""Opens a CSV file of a bill, packed with gzip or not."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from exporter.errors import ExporterError

_GZIP = b"\x1f\x8b"


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
