"""Opens a CSV file of a bill, packed with gzip or not."""

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

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
            is_packed = file.read(len(_GZIP)) == _GZIP
        with (
            gzip.open(path, "rt", encoding="utf-8-sig", newline="")
            if is_packed
            else path.open(encoding="utf-8-sig", newline="")
        ) as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ExporterError(f"{path}: damaged gzip: {error}; fetch the file again") from None
    except UnicodeDecodeError:
        raise ExporterError(f"{path}: not UTF-8 text; give a CSV file with a header") from None
    except OSError as error:
        raise ExporterError(f"{path}: cannot read: {error.strerror or error}; give a readable file") from None
