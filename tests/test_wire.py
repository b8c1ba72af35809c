"""The parent reads exactly what a child writes, and refuses anything else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.errors import SourceError
from exporter.gpu import wire
from exporter.model.devices import (
    DeviceState,
    Gpu,
    GpuReading,
    MigInstance,
    MigReading,
    ProcessUse,
    Reading,
    SourceState,
    SourceStatus,
    XidEvent,
)
from exporter.model.fields import Field

TEXT = st.text(max_size=12)
COUNT = st.integers(0, 2**63)
NUMBER = st.one_of(st.integers(-(2**62), 2**62), st.floats(-(2.0**64), 2.0**64))
RATIO = st.one_of(st.none(), st.floats(0, 1))
VALUES = st.dictionaries(st.sampled_from(Field), NUMBER, max_size=6)
PROCESSES = st.one_of(
    st.none(),
    st.lists(
        st.builds(
            ProcessUse,
            pid=st.integers(1, 2**31),
            memory_used_bytes=st.one_of(st.none(), COUNT),
            sm_ratio=RATIO,
            enc_ratio=RATIO,
            dec_ratio=RATIO,
            jpg_ratio=RATIO,
            ofa_ratio=RATIO,
            ended=st.booleans(),
            mps=st.booleans(),
        ),
        max_size=3,
    ).map(tuple),
)
GPUS = st.builds(
    Gpu,
    uuid=TEXT,
    index=st.integers(0, 64),
    minor=st.one_of(st.none(), st.integers(0, 64)),
    model=TEXT,
    pci_bus_id=TEXT,
    mig_enabled=st.booleans(),
    compute_slices=st.integers(0, 8),
    memory_slices=st.integers(0, 8),
    memory_total_bytes=st.one_of(st.none(), COUNT),
    labels=st.dictionaries(st.sampled_from(Field), TEXT, max_size=3),
)


@st.composite
def gpu_readings(draw: st.DrawFn) -> GpuReading:
    gpu = draw(GPUS)
    instance = st.builds(
        MigInstance,
        uuid=TEXT,
        parent_uuid=st.just(gpu.uuid),
        gpu_instance_id=st.integers(0, 20),
        compute_instance_id=st.integers(0, 7),
        profile=TEXT,
        compute_slices=st.integers(1, 7),
        memory_slices=st.integers(1, 8),
        profile_id=st.one_of(st.none(), st.integers(0, 30)),
        placement_start=st.one_of(st.none(), st.integers(0, 8)),
    )
    return GpuReading(
        gpu=gpu,
        state=draw(st.sampled_from(DeviceState)),
        reason=draw(TEXT),
        values=draw(VALUES),
        instances=tuple(
            draw(st.lists(st.builds(MigReading, instance=instance, values=VALUES, processes=PROCESSES), max_size=2))
        ),
        processes=draw(PROCESSES),
        lacks_instances=draw(st.booleans()),
    )


READINGS = st.builds(
    Reading,
    source=TEXT,
    taken_at_seconds=st.floats(0, 1e11),
    duration_seconds=st.floats(0, 1e3),
    driver_version=st.one_of(st.none(), TEXT),
    nvml_version=st.one_of(st.none(), TEXT),
    gpus=st.lists(gpu_readings(), max_size=3, unique_by=lambda one: one.gpu.uuid).map(tuple),
    xids=st.lists(
        st.builds(
            XidEvent,
            uuid=TEXT,
            xid=st.integers(0, 200),
            at_seconds=st.floats(0, 1e11),
            gpu_instance_id=st.one_of(st.none(), st.integers(0, 20)),
            compute_instance_id=st.one_of(st.none(), st.integers(0, 7)),
        ),
        max_size=2,
    ).map(tuple),
    errors=st.dictionaries(TEXT, st.integers(0, 2**40), max_size=3),
)


@given(READINGS)
def test_reading_round_trips_in_one_line(reading: Reading) -> None:
    line = wire.encode(reading)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert wire.decode(line) == reading


@given(TEXT, st.sampled_from(SourceState), TEXT, TEXT, st.integers(0, 2**31))
def test_status_round_trips(name: str, state: SourceState, reason: str, message: str, restarts: int) -> None:
    status = SourceStatus(name=name, state=state, reason=reason, message=message, restarts=restarts)
    assert wire.decode(wire.encode(status)) == status


@given(st.binary(max_size=200))
def test_other_bytes_are_garbled(line: bytes) -> None:
    with pytest.raises(SourceError) as caught:
        wire.decode(line)
    assert caught.value.reason == "garbled"


@given(READINGS, st.data())
def test_truncated_line_is_garbled(reading: Reading, data: st.DataObject) -> None:
    line = wire.encode(reading).rstrip(b"\n")
    with pytest.raises(SourceError, match="not a reading"):
        wire.decode(line[: data.draw(st.integers(0, len(line) - 1))])


@pytest.mark.parametrize(
    "line",
    [
        b"null",
        b"[]",
        b'{"status":["sleeping","nvml","","",0]}',
        b'{"status":["up","nvml"]}',
        b"[" * 100_000,
        b'{"status":["up","nvml","","",1e999]}',
        b'{"reading":["nvml",1e999,0,null,null,null,null,[],[],{}]}',
        b'{"reading":["nvml",NaN,0,null,null,null,null,[],[],{}]}',
        b'{"reading":["nvml",1,0,null,null,null,null,[],[]]}',
        b'{"reading":["nvml",-1,0,null,null,null,null,[],[],{}]}',
    ],
)
def test_json_without_a_message_is_garbled(line: bytes) -> None:
    with pytest.raises(SourceError, match="not a reading"):
        wire.decode(line)


def test_non_finite_value_is_never_sent() -> None:
    gpu = Gpu(uuid="GPU-1", index=0, minor=0, model="m", pci_bus_id="00000000:17:00.0")
    reading = Reading(
        source="nvml",
        taken_at_seconds=1.0,
        duration_seconds=0.0,
        gpus=(GpuReading(gpu=gpu, values={Field.POWER_USAGE: float("nan")}),),
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        wire.encode(reading)


def test_value_of_the_wrong_type_is_garbled() -> None:
    gpu = Gpu(uuid="GPU-1", index=0, minor=0, model="m", pci_bus_id="00000000:17:00.0")
    reading = Reading(
        source="nvml",
        taken_at_seconds=1.0,
        duration_seconds=0.0,
        gpus=(GpuReading(gpu=gpu, values={Field.GPU_UTIL: 7}),),
    )
    line = wire.encode(reading)
    for wrong in (b'"7"', b"true", b"null"):
        with pytest.raises(SourceError, match="not a reading"):
            wire.decode(line.replace(b'{"203":7}', b'{"203":' + wrong + b"}"))
    with pytest.raises(SourceError, match="not a reading"):
        wire.decode(line.replace(b'"203"', b'"204042"'))
