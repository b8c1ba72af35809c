"""What passes between a source's child process and its parent.

The child writes one line per reading or status, a compact JSON object. Its standard input is a file in memory, in which
it notes the GPU that it calls the driver for: a child that hangs can write no line.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn

from exporter.errors import SourceError
from exporter.model import (
    DeviceState,
    Field,
    Gpu,
    GpuReading,
    MigInstance,
    MigReading,
    ProcessUse,
    ProfilingState,
    Reading,
    SourceState,
    SourceStatus,
    XidEvent,
)

# A table lookup is several times faster than Field(int(key)), and a reading has hundreds of keys.
_FIELDS = {str(int(member)): member for member in Field}
_LONGEST_ID = 6
_MOST = 2**64
"""No library can tell a larger one; what is worked out with a larger one may be no number any more."""
_KEPT_IDENTITIES = 512
"""GPUs and MIG instances are described anew only when they change: more than both children of a node list."""
_NOTE_BYTES = 8
_ENDED, _MPS = 1, 2
"""Bits of what a process is."""
_NUMBERS = frozenset({int, float})


def encode(message: Reading | SourceStatus) -> bytes:
    """Return one JSON line, with its newline.

    Raises:
        ValueError: a value is NaN or infinite; a source leaves such a value out.
    """
    body = _status_out(message) if isinstance(message, SourceStatus) else _reading_out(message)
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> Reading | SourceStatus:
    """Return what ``encode`` was given.

    Raises:
        SourceError: the line is anything else; reason ``garbled``.
    """
    try:
        body = json.loads(line, parse_constant=_no_constant)
        return _status_in(body["status"]) if "status" in body else _reading_in(body)
    except (ArithmeticError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        start = line[:80].decode("utf-8", "replace")
        message = f"the source's process sent a line that is not a reading ({error!r}): {start!r}"
        raise SourceError("garbled", message) from error


def open_note() -> int:
    """Return the descriptor of a new file in memory, for ``note_asked`` in the child and ``asked`` in the parent."""
    return os.memfd_create("asked-gpu")


def note_asked(index: int | None) -> None:
    """Note the index of the GPU that this process calls the driver for now; ``None``: of no single one."""
    with contextlib.suppress(OSError):  # a child that was started by hand has a terminal there
        os.pwrite(0, str(-1 if index is None else index).ljust(_NOTE_BYTES).encode(), 0)


def asked(note: int) -> int | None:
    """Return the index of the GPU that a child noted last, or ``None``."""
    text = os.pread(note, _NOTE_BYTES, 0).strip()
    return int(text) if text and text != b"-1" else None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that a source may send")


def _status_out(status: SourceStatus) -> dict[str, Any]:
    return {"status": [status.name, status.state, status.reason, status.message, status.restarts]}


def _status_in(row: Sequence[Any]) -> SourceStatus:
    name, state, reason, message, restarts = row
    return SourceStatus(
        name=_text(name),
        state=SourceState(state),
        reason=_text(reason),
        message=_text(message),
        restarts=_whole(restarts),
    )


def _reading_out(reading: Reading) -> dict[str, Any]:
    return {
        "source": reading.source,
        "at": reading.taken_at_seconds,
        "took": reading.duration_seconds,
        "steady": reading.steady_seconds,
        "driver": reading.driver_version,
        "nvml": reading.nvml_version,
        "dcgm": reading.dcgm_version,
        "gpus": [_gpu_reading_out(gpu) for gpu in reading.gpus],
        "xids": [
            [xid.uuid, xid.xid, xid.at_seconds, xid.gpu_instance_id, xid.compute_instance_id] for xid in reading.xids
        ],
        "errors": dict(reading.errors),
    }


def _reading_in(body: Mapping[str, Any]) -> Reading:
    return Reading(
        source=_text(body["source"]),
        taken_at_seconds=_finite(body["at"]),
        duration_seconds=_finite(body["took"]),
        steady_seconds=_optional_float(body["steady"]),
        driver_version=_optional_text(body["driver"]),
        nvml_version=_optional_text(body["nvml"]),
        dcgm_version=_optional_text(body["dcgm"]),
        gpus=_once(_gpu_reading_in(row) for row in body["gpus"]),
        xids=tuple(
            XidEvent(
                uuid=_text(uuid),
                xid=_whole(xid),
                at_seconds=_finite(at),
                gpu_instance_id=_optional_int(instance),
                compute_instance_id=_optional_int(part),
            )
            for uuid, xid, at, instance, part in body["xids"]
        ),
        errors={reason: _whole(count) for reason, count in body["errors"].items()},
    )


def _once(gpus: Iterable[GpuReading]) -> tuple[GpuReading, ...]:
    """Leave out a GPU that is told again: numbers move while one is lost, and a second would be metered twice."""
    by_uuid: dict[str, GpuReading] = {}
    for gpu in gpus:
        by_uuid.setdefault(gpu.gpu.uuid, gpu)
    return tuple(by_uuid.values())


def _gpu_reading_out(reading: GpuReading) -> dict[str, Any]:
    gpu = reading.gpu
    shape = [gpu.mig_enabled, gpu.compute_slices, gpu.memory_slices, gpu.memory_total_bytes]
    return {
        "gpu": [gpu.uuid, gpu.index, gpu.minor, gpu.model, gpu.pci_bus_id, *shape, *chain(*gpu.labels.items())],
        "state": reading.state,
        "reason": reading.reason,
        "values": dict(reading.values),
        "parts": [_instance_out(part) for part in reading.instances],
        "procs": _processes_out(reading.processes),
        "profiling": reading.profiling,
        "lacks": reading.lacks_instances,
    }


def _gpu_reading_in(row: Mapping[str, Any]) -> GpuReading:
    gpu = _gpu_in(*row["gpu"])
    return GpuReading(
        gpu=gpu,
        state=DeviceState(row["state"]),
        reason=_text(row["reason"]),
        values=_values_in(row["values"]),
        instances=tuple(_instance_in(part, gpu.uuid) for part in row["parts"]),
        processes=_processes_in(row["procs"]),
        profiling=None if row["profiling"] is None else ProfilingState(row["profiling"]),
        lacks_instances=bool(row["lacks"]),
    )


@lru_cache(maxsize=_KEPT_IDENTITIES, typed=True)
def _gpu_in(*row: Any) -> Gpu:  # noqa: ANN401 - comes from JSON, is checked here
    uuid, index, minor, model, bus_id, mig_enabled, compute_slices, memory_slices, memory_total_bytes, *labels = row
    return Gpu(
        uuid=_text(uuid),
        index=_whole(index),
        minor=_optional_int(minor),
        model=_text(model),
        pci_bus_id=_text(bus_id),
        mig_enabled=bool(mig_enabled),
        compute_slices=_whole(compute_slices),
        memory_slices=_whole(memory_slices),
        memory_total_bytes=_optional_int(memory_total_bytes),
        labels={_field(str(key)): _text(value) for key, value in zip(labels[::2], labels[1::2], strict=True)},
    )


def _instance_out(reading: MigReading) -> list[Any]:
    one = reading.instance
    identity = [one.uuid, one.gpu_instance_id, one.compute_instance_id, one.profile]
    place = [one.compute_slices, one.memory_slices, one.profile_id, one.placement_start]
    return [*identity, *place, dict(reading.values), _processes_out(reading.processes)]


def _instance_in(row: Sequence[Any], parent_uuid: str) -> MigReading:
    *identity, values, processes = row
    return MigReading(
        instance=_mig_in(parent_uuid, *identity), values=_values_in(values), processes=_processes_in(processes)
    )


@lru_cache(maxsize=_KEPT_IDENTITIES, typed=True)
def _mig_in(parent_uuid: str, *row: Any) -> MigInstance:  # noqa: ANN401 - comes from JSON, is checked here
    uuid, gpu_instance_id, compute_instance_id, profile, compute_slices, memory_slices, profile_id, start = row
    return MigInstance(
        uuid=_text(uuid),
        parent_uuid=parent_uuid,
        gpu_instance_id=_whole(gpu_instance_id),
        compute_instance_id=_whole(compute_instance_id),
        profile=_text(profile),
        compute_slices=_whole(compute_slices),
        memory_slices=_whole(memory_slices),
        profile_id=_optional_int(profile_id),
        placement_start=_optional_int(start),
    )


def _processes_out(processes: tuple[ProcessUse, ...] | None) -> list[list[Any]] | None:
    if processes is None:
        return None
    return [
        [
            *(one.pid, one.memory_used_bytes, one.sm_ratio, one.enc_ratio, one.dec_ratio),
            *(one.jpg_ratio, one.ofa_ratio),
            one.ended * _ENDED | one.mps * _MPS,
        ]
        for one in processes
    ]


def _processes_in(rows: Sequence[Sequence[Any]] | None) -> tuple[ProcessUse, ...] | None:
    if rows is None:
        return None
    return tuple(
        ProcessUse(
            pid=_whole(pid),
            memory_used_bytes=_optional_int(memory),
            sm_ratio=_optional_float(sm),
            enc_ratio=_optional_float(enc),
            dec_ratio=_optional_float(dec),
            jpg_ratio=_optional_float(jpg),
            ofa_ratio=_optional_float(ofa),
            ended=bool(_whole(flags) & _ENDED),
            mps=bool(_whole(flags) & _MPS),
        )
        for pid, memory, sm, enc, dec, jpg, ofa, flags in rows
    )


def _values_in(values: Mapping[str, Any]) -> dict[Field, int | float]:
    # type(), not isinstance(): a bool is an int, and no measured value is a bool.
    if not _NUMBERS.issuperset(map(type, values.values())):
        raise TypeError(f"not the values of fields: {values!r:.200}")
    # A field that a library fills with rubbish must not cost the others.
    return {_FIELDS.get(key) or _field(key): value for key, value in values.items() if -_MOST <= value <= _MOST}


def _field(key: str) -> Field:
    """Return the field of an id; those that only DCGM has become known when they come."""
    known = _FIELDS.get(key)
    if known is None:
        if len(key) > _LONGEST_ID:
            raise ValueError(f"{key!r} is not the id of a field")
        known = _FIELDS[key] = Field(int(key))
    return known


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _optional_text(value: object) -> str | None:
    return None if value is None else _text(value)


def _optional_int(value: Any) -> int | None:  # noqa: ANN401 - comes from JSON, is checked by the conversion
    return None if value is None else _whole(value)


def _whole(value: Any) -> int:  # noqa: ANN401 - as above
    number = int(value)
    if not -_MOST <= number <= _MOST:
        raise ValueError(f"{value!r:.40} is too large for a number")
    return number


def _optional_float(value: Any) -> float | None:  # noqa: ANN401 - comes from JSON, is checked by the conversion
    return None if value is None else _finite(value)


def _finite(value: Any) -> float:  # noqa: ANN401 - comes from JSON, is checked here
    number = float(value)
    if not -_MOST <= number <= _MOST:
        raise ValueError(f"{value!r:.40} is too large for a number")
    return number
