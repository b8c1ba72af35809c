"""The messages between a source's child process and its parent.

The child writes one line per reading or status, a compact JSON object. Its standard input is a file in memory, in which
it records the GPU of its current driver call: a hung child can write no line.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any, Generic, NoReturn, TypeVar, get_args

from exporter.errors import SourceError
from exporter.model.devices import Gpu, GpuReading, MigInstance, MigReading, ProcessUse, Reading, SourceStatus, XidEvent
from exporter.model.fields import Field

Value = TypeVar("Value")
# A table lookup is several times faster than Field(int(key)), and a reading has hundreds of keys.
_FIELDS = {str(int(member)): member for member in Field}
_LONGEST_ID = 6
_MOST = 2**64
"""No library reports a larger number; results computed from a larger one may not be finite."""
_KEPT_IDENTITIES = 512
"""Cached GPUs and MIG instances, which change rarely: more than both children of a node list."""
_KEPT_PROCESSES = 1024
"""Cached processes: they are polled at every second sample, and an idle process has the same row for longer."""
_NOTE_BYTES = 8
_NUMBERS = frozenset({int, float})


def _json_types(kinds: Iterable[type]) -> frozenset[type]:
    """Return the JSON types of a value that has one of these types."""
    found = frozenset(str if issubclass(one, StrEnum) else one for one in kinds)
    return found | _NUMBERS if float in found else found


class _Row(Generic[Value]):
    """The form of a dataclass's value in a line: a JSON array with one item for each of its plain fields.

    Args:
        kind: The dataclass.
        separate: Fields that are elsewhere in the line, or not in it.
    """

    def __init__(self, kind: type[Value], *separate: str) -> None:
        plain = [one for one in fields(kind) if one.name not in separate]  # type: ignore[arg-type]  # a dataclass
        self._kind = kind
        kinds: dict[str, Sequence[Any]] = {one.name: get_args(one.type) or (one.type,) for one in plain}
        self._types = [_json_types(some) for some in kinds.values()]
        self._enums = [(name, some[0]) for name, some in kinds.items() if issubclass(some[0], StrEnum)]
        self.names = tuple(kinds)
        self.write = attrgetter(*self.names)
        """Returns the items of a value."""

    def read(self, row: Sequence[Any], **separate: object) -> Value:
        """Return the value of a row and of the separate fields.

        Raises:
            TypeError: An item has another type than its field.
            ValueError: An item is missing, too many or unknown, or a number is larger than any library can report.
        """
        for allowed, item in zip(self._types, row, strict=True):
            kind = type(item)
            if kind not in allowed:
                raise TypeError(f"{item!r:.40} in a row of {self._kind.__name__}")
            if kind in _NUMBERS and not -_MOST <= item <= _MOST:
                raise ValueError(f"{item!r:.40} is too large for a number")
        items = dict(zip(self.names, row, strict=True))
        for name, enum in self._enums:
            items[name] = None if items[name] is None else enum(items[name])
        return self._kind(**items, **separate)


_STATUS = _Row(SourceStatus)
_READING = _Row(Reading, "gpus", "xids", "errors")
_GPU_READING = _Row(GpuReading, "gpu", "values", "instances", "processes", "from_dcgm")
_GPU = _Row(Gpu, "labels")
_INSTANCE = _Row(MigInstance, "parent_uuid")
_PROCESS = _Row(ProcessUse)
_XID = _Row(XidEvent)


def encode(message: Reading | SourceStatus) -> bytes:
    """Return one JSON line, with its newline.

    Raises:
        ValueError: A value is NaN or infinite; a source leaves such a value out.
    """
    body = _reading_out(message) if isinstance(message, Reading) else {"status": _STATUS.write(message)}
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> Reading | SourceStatus:
    """Return the message that ``encode`` wrote.

    Raises:
        SourceError: The line is not a message; reason ``garbled``.
    """
    try:
        body = json.loads(line, parse_constant=_no_constant)
        return _STATUS.read(body["status"]) if "status" in body else _reading_in(body)
    except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        start = line[:80].decode("utf-8", "replace")
        message = f"the source's process sent a line that is not a reading ({error!r}): {start!r}"
        raise SourceError("garbled", message) from error


def open_note() -> int:
    """Return the descriptor of a new file in memory, for ``note_asked`` in the child and ``asked`` in the parent."""
    return os.memfd_create("asked-gpu")


def note_asked(index: int | None) -> None:
    """Record the index of the GPU that this process calls the driver for now; ``None``: not for a single one."""
    with contextlib.suppress(OSError):  # a child that was started by hand has a terminal as its input
        os.pwrite(0, str(-1 if index is None else index).ljust(_NOTE_BYTES).encode(), 0)


def asked(note: int) -> int | None:
    """Return the index of the GPU that a child recorded last, or ``None``."""
    text = os.pread(note, _NOTE_BYTES, 0).strip()
    return int(text) if text and text != b"-1" else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that a source may send")


def _reading_out(reading: Reading) -> dict[str, Any]:
    return {
        "reading": _READING.write(reading),
        "gpus": [_gpu_reading_out(gpu) for gpu in reading.gpus],
        "xids": [_XID.write(xid) for xid in reading.xids],
        "errors": dict(reading.errors),
    }


def _reading_in(body: Mapping[str, Any]) -> Reading:
    # The second entry of a GPU is left out: numbers change while one is lost, and it would be metered twice.
    gpus: dict[str, GpuReading] = {}
    for row in body["gpus"]:
        gpu = _gpu_reading_in(row)
        gpus.setdefault(gpu.gpu.uuid, gpu)
    errors = body["errors"]
    if not all(type(count) is int and abs(count) <= _MOST for count in errors.values()):
        raise TypeError(f"not counts of errors: {errors!r:.200}")
    xids = tuple(_XID.read(row) for row in body["xids"])
    return _READING.read(body["reading"], gpus=tuple(gpus.values()), xids=xids, errors=errors)


def _gpu_reading_out(reading: GpuReading) -> dict[str, Any]:
    return {
        "state": _GPU_READING.write(reading),
        "gpu": [*_GPU.write(reading.gpu), *chain(*reading.gpu.labels.items())],
        "values": dict(reading.values),
        "parts": [
            [_INSTANCE.write(part.instance), dict(part.values), _processes_out(part.processes)]
            for part in reading.instances
        ],
        "procs": _processes_out(reading.processes),
    }


def _gpu_reading_in(row: Mapping[str, Any]) -> GpuReading:
    gpu = _gpu_in(*row["gpu"])
    return _GPU_READING.read(
        row["state"],
        gpu=gpu,
        values=_values_in(row["values"]),
        instances=tuple(
            MigReading(
                instance=_instance_in(gpu.uuid, *part), values=_values_in(values), processes=_processes_in(processes)
            )
            for part, values, processes in row["parts"]
        ),
        processes=_processes_in(row["procs"]),
    )


@lru_cache(maxsize=_KEPT_IDENTITIES, typed=True)
def _gpu_in(*row: Any) -> Gpu:  # noqa: ANN401 - comes from JSON, is checked here
    labels = row[len(_GPU.names) :]
    if not all(type(text) is str for text in labels[1::2]):
        raise TypeError(f"not labels of a GPU: {labels!r:.200}")
    texts = {_field(str(key)): text for key, text in zip(labels[::2], labels[1::2], strict=True)}
    return _GPU.read(row[: len(_GPU.names)], labels=texts)


@lru_cache(maxsize=_KEPT_IDENTITIES, typed=True)
def _instance_in(parent_uuid: str, *row: Any) -> MigInstance:  # noqa: ANN401 - as above
    return _INSTANCE.read(row, parent_uuid=parent_uuid)


def _processes_out(processes: tuple[ProcessUse, ...] | None) -> list[Any] | None:
    return None if processes is None else list(map(_PROCESS.write, processes))


def _processes_in(rows: Sequence[Sequence[Any]] | None) -> tuple[ProcessUse, ...] | None:
    return None if rows is None else tuple(_process_in(*row) for row in rows)


@lru_cache(maxsize=_KEPT_PROCESSES, typed=True)
def _process_in(*row: Any) -> ProcessUse:  # noqa: ANN401 - as above
    return _PROCESS.read(row)


def _values_in(values: Mapping[str, Any]) -> dict[Field, int | float]:
    # type(), not isinstance(): a bool is an int, and no measured value is a bool.
    if not _NUMBERS.issuperset(map(type, values.values())):
        raise TypeError(f"not the values of fields: {values!r:.200}")
    # One invalid value from a library must not discard the others.
    return {_FIELDS.get(key) or _field(key): value for key, value in values.items() if -_MOST <= value <= _MOST}


def _field(key: str) -> Field:
    """Return the field of an id; ids that only DCGM has become fields when they first arrive."""
    known = _FIELDS.get(key)
    if known is None:
        if len(key) > _LONGEST_ID:
            raise ValueError(f"{key!r} is not the id of a field")
        known = _FIELDS[key] = Field(int(key))
    return known
