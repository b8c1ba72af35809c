"""Encodes and decodes the messages between the child process of a source and its parent.

The child writes one line per reading or status, a compact JSON object. Its standard input is a file in memory, in which
it records the GPU of its current driver call. A hung child cannot write a line.
"""

import contextlib
import json
import os
from dataclasses import replace
from typing import NoReturn

from exporter.errors import SourceError
from exporter.model.devices import GpuReading, Reading, SourceStatus
from exporter.model.records import read, row

_NOTE_BYTES = 8


def encode(message: Reading | SourceStatus) -> bytes:
    """Return one JSON line, with its newline.

    Raises:
        ValueError: A value is NaN or infinite; sources leave such values out.
    """
    kind = "reading" if isinstance(message, Reading) else "status"
    return json.dumps({kind: message}, separators=(",", ":"), allow_nan=False, default=row).encode() + b"\n"


def decode(line: bytes) -> Reading | SourceStatus:
    """Return the message that ``encode`` wrote.

    Raises:
        SourceError: The line is not a message; reason ``garbled``.
    """
    try:
        body = json.loads(line, parse_constant=_no_constant)
        if "status" in body:
            return read(SourceStatus, body["status"])
        reading = read(Reading, body["reading"])
    except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        start = line[:80].decode("utf-8", "replace")
        message = f"the source's process sent a line that is not a reading ({error!r}): {start!r}"
        raise SourceError("garbled", message) from error
    # A second entry of a GPU, possible while numbers change after a loss, is left out: it would be metered twice.
    gpus: dict[str, GpuReading] = {}
    for gpu in reading.gpus:
        gpus.setdefault(gpu.uuid, gpu)
    return reading if len(gpus) == len(reading.gpus) else replace(reading, gpus=tuple(gpus.values()))


def open_note() -> int:
    """Return the descriptor of a new file in memory, for ``note_asked`` in the child and ``asked`` in the parent."""
    return os.memfd_create("asked-gpu")


def note_asked(index: int | None) -> None:
    """Record the index of the GPU of the current driver call; ``None`` for a call without a single GPU."""
    with contextlib.suppress(OSError):  # a child that was started by hand has a terminal as its input
        os.pwrite(0, str(-1 if index is None else index).ljust(_NOTE_BYTES).encode(), 0)


def asked(note: int) -> int | None:
    """Return the index of the GPU that a child recorded last; ``None`` without one."""
    text = os.pread(note, _NOTE_BYTES, 0).strip()
    return int(text) if text and text != b"-1" else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that a source may send")
