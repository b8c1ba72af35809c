"""The DCGM source through the real binding, a real shared library and a real engine process: content of readings."""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import dcgm_stub_support as stub
import pytest
from agent_support import matching, running_agent

from exporter.errors import NoValuesError, SourceError
from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.entities import MIG_MAX_SLICES, UUID
from exporter.gpu.dcgm.session import DcgmSource
from exporter.model.devices import DeviceState, GpuReading, ProfilingState, Reading
from exporter.model.fields import Field

pytestmark = pytest.mark.skipif(stub.compiler() is None, reason="the simulated libdcgm needs a C compiler (gcc)")

INTERVAL_SECONDS = 0.1
PATIENCE_SECONDS = 20.0
PROFILED = frozenset(
    {Field.PROF_GR_ENGINE_ACTIVE, Field.PROF_SM_ACTIVE, Field.PROF_DRAM_ACTIVE, Field.PROF_PCIE_TX_BYTES}
)
BOARD = frozenset(
    {
        *(Field.SM_CLOCK, Field.GPU_TEMP, Field.POWER_USAGE, Field.TOTAL_ENERGY_CONSUMPTION, Field.GPU_UTIL),
        *(Field.FB_TOTAL, Field.FB_USED, Field.FB_FREE, Field.PCIE_REPLAY_COUNTER, Field.VBIOS_VERSION),
    }
)
FIELDS = BOARD | PROFILED | {Field.XID_ERRORS}


class Bench:
    """A source on an engine, which reads the control block at once."""

    def __init__(self, source: DcgmSource, control: stub.StubControl, engine: stub.Engine) -> None:
        self.source, self.control, self.engine = source, control, engine

    def until(self, check: Callable[[Reading], object], what: str, *, patient: bool = False) -> Reading:
        """Return the first reading from now on with a true check; if patient, continue without values.

        Values from before a jump of a test's clock are too old after it.
        """
        until = time.monotonic() + PATIENCE_SECONDS
        while True:
            reading = None
            with contextlib.suppress(*([NoValuesError] if patient else [])):
                reading = self.source.sample(time.time())
            if reading and check(reading):
                return reading
            assert time.monotonic() < until, f"not seen within {PATIENCE_SECONDS} s: {what}: {reading}"
            time.sleep(INTERVAL_SECONDS / 2)

    def profiled(self) -> Reading:
        """Return a reading in which every GPU that is up is profiled."""
        return self.until(lambda reading: all(map(is_profiled, reading.gpus)), "every GPU profiled")


def is_profiled(gpu: GpuReading) -> bool:
    parts = gpu.instances or (gpu,)
    return all(Field.PROF_GR_ENGINE_ACTIVE in part.values for part in parts)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("dcgm")
    stub.build(made, major=3, without=["dcgmConnect_v3"])
    return stub.build(made)


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> stub.StubControl:
    monkeypatch.setenv("DCGM_STUB_CONTROL", str(tmp_path / "control"))
    return stub.control(tmp_path / "control")


@contextmanager
def loaded(directory: Path, major: int = 4) -> Iterator[None]:
    """Replace this process' library."""
    library.install(ctypes.CDLL(str(directory / f"libdcgm.so.{major}")), f"libdcgm.so.{major}")
    try:
        yield
    finally:
        library.uninstall()


@contextmanager
def opened(engine: stub.Engine, control: stub.StubControl, fields: frozenset[Field] = FIELDS) -> Iterator[Bench]:
    source = DcgmSource(fields, address=engine.address, interval_seconds=INTERVAL_SECONDS)
    source.open()
    try:
        yield Bench(source, control, engine)
    finally:
        source.close()


@pytest.fixture
def engine(directory: Path, control: stub.StubControl, tmp_path: Path) -> Iterator[stub.Engine]:
    assert control.size
    with loaded(directory), stub.Engine(directory, tmp_path / "control") as running:
        yield running


@pytest.fixture
def bench(engine: stub.Engine, control: stub.StubControl) -> Iterator[Bench]:
    with opened(engine, control) as one:
        yield one


def expected(index: int) -> dict[Field, float]:
    """Return the expected values of every GPU of the simulated node."""
    ratio = (805 - index) / 1000
    return {
        Field.SM_CLOCK: 1900 + index,
        Field.GPU_TEMP: 50 + index,
        Field.POWER_USAGE: 400.0 + index,
        Field.TOTAL_ENERGY_CONSUMPTION: 5_000_000_000_000 + index,
        Field.GPU_UTIL: 90 - index,
        Field.FB_TOTAL: 81_559,
        Field.FB_USED: 20_000 + index,
        Field.FB_FREE: 81_559 - 500 - 20_000 - index,
        Field.PCIE_REPLAY_COUNTER: 94_000 + index,
        Field.PROF_GR_ENGINE_ACTIVE: ratio,
        Field.PROF_SM_ACTIVE: round(0.9 * ratio, 6),
        Field.PROF_DRAM_ACTIVE: round(0.3 * ratio, 6),
        Field.PROF_PCIE_TX_BYTES: 20 * stub.MIB,
    }


@pytest.mark.parametrize("major", [3, 4])
@pytest.mark.parametrize("by_socket", [False, True], ids=["tcp", "unix"])
def test_library_and_engine_of_either_major_version_give_every_gpus_values(
    *, directory: Path, control: stub.StubControl, tmp_path: Path, major: int, by_socket: bool
) -> None:
    path = tmp_path / "engine" if by_socket else None
    with (
        loaded(directory, major),
        stub.Engine(directory, tmp_path / "control", socket_path=path, release=stub.RELEASES[major]) as engine,
        opened(engine, control) as bench,
    ):
        reading = bench.profiled()
    assert (reading.source, reading.dcgm_version) == ("dcgm", stub.RELEASES[major])
    assert [one.gpu.uuid for one in reading.gpus] == [stub.gpu_uuid(index) for index in range(8)]
    for index, one in enumerate(reading.gpus):
        assert (one.state, one.profiling) == (DeviceState.UP, ProfilingState.RUNNING)
        assert (one.gpu.index, one.gpu.minor) == (index, index)
        assert one.gpu.pci_bus_id == f"00000000:{0x10 + index:02X}:00.0"
        assert one.gpu.labels[Field.VBIOS_VERSION] == "96.00.AF.00.01"
        assert one.values == pytest.approx(expected(index))


@pytest.mark.parametrize("major", [3, 4])
def test_56_instances_have_their_own_values_and_none_of_their_gpu(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, major: int
) -> None:
    monkeypatch.setenv("DCGM_STUB_CONTROL", str(tmp_path / "control"))
    control = stub.control(tmp_path / "control", partitioned=True)
    with (
        loaded(directory, major),
        stub.Engine(directory, tmp_path / "control", release=stub.RELEASES[major]) as engine,
        opened(engine, control) as bench,
    ):
        reading = bench.profiled()
        assert reading.errors == {}
    for index, one in enumerate(reading.gpus):
        assert {Field.GPU_TEMP, Field.POWER_USAGE} <= one.values.keys()
        assert Field.GPU_UTIL not in one.values
        places = [(part.instance.uuid, part.instance.gpu_instance_id) for part in one.instances]
        assert places == [(stub.instance_uuid(index, place), 7 + place) for place in range(7)]
        for place, part in enumerate(one.instances):
            ratio = (100 * place + index) / 1000
            assert part.instance.profile == "1g.10gb"
            assert part.values == pytest.approx(
                {
                    Field.FB_TOTAL: 9_984,
                    Field.FB_USED: 1_000 + 10 * index + place,
                    Field.FB_FREE: 9_984 - 16 - (1_000 + 10 * index + place),
                    Field.PROF_GR_ENGINE_ACTIVE: ratio,
                    Field.PROF_SM_ACTIVE: round(0.9 * ratio, 6),
                    Field.PROF_DRAM_ACTIVE: round(0.3 * ratio, 6),
                }
            )


def test_gpu_facts_missing_at_first_are_requested_again_and_then_kept(engine: stub.Engine, tmp_path: Path) -> None:
    ahead_seconds = 0.0
    control = stub.control(tmp_path / "control", gpus=1, partitioned=True)
    source = DcgmSource(FIELDS, address=engine.address, monotonic=lambda: time.monotonic() + ahead_seconds)
    bench = Bench(source, control, engine)
    for field_id in (Field.FB_TOTAL, MIG_MAX_SLICES):
        control.override(field_id, stub.BLANK, entity=(1, 0))
    source.open()
    reported = []
    for overrides in (2, 0, 2):
        control.override_count = overrides
        ahead_seconds += 61
        reported.append(
            bench.until(lambda one: one.gpus[0].instances, "what is measured after a minute", patient=True).gpus[0]
        )
    source.close()
    assert (reported[0].gpu.compute_slices, reported[0].gpu.memory_total_bytes) == (0, None)
    for one in reported[1:]:
        assert (one.gpu.compute_slices, one.gpu.memory_slices, one.gpu.memory_total_bytes) == (7, 8, 81_559 * stub.MIB)
        assert {part.instance.memory_slices for part in one.instances} == {1}


def test_instance_size_missing_at_first_is_read_later_and_kept(engine: stub.Engine, tmp_path: Path) -> None:
    ahead_seconds = 0.0
    control = stub.control(tmp_path / "control", gpus=1, partitioned=True)
    source = DcgmSource(FIELDS, address=engine.address, monotonic=lambda: time.monotonic() + ahead_seconds)
    bench = Bench(source, control, engine)
    entity = (4, stub.entity_id(0, 3))
    control.override(Field.FB_TOTAL, stub.NUMBER, entity=entity, number=40_448)
    control.override(Field.FB_TOTAL, stub.BLANK, entity=entity)
    source.open()
    reported = []
    for overrides in (2, 1, 2):
        control.override_count = overrides
        ahead_seconds += 61 if overrides == 2 else 5
        reading = bench.until(lambda one: one.gpus[0].instances, "the instances", patient=True)
        reported.append(reading.gpus[0].instances[3])
    source.close()
    assert [one.instance.memory_slices for one in reported] == [1, 4, 4]


def test_layout_change_of_one_gpu_interrupts_no_values_of_another(engine: stub.Engine, tmp_path: Path) -> None:
    control = stub.control(tmp_path / "control", gpus=3, partitioned=True)
    ahead_seconds = 0.0
    source = DcgmSource(
        FIELDS,
        address=engine.address,
        interval_seconds=INTERVAL_SECONDS,
        monotonic=lambda: time.monotonic() + ahead_seconds,
    )
    bench = Bench(source, control, engine)
    source.open()
    bench.profiled()
    control.gpus[0].instance_count = 5
    ahead_seconds += 5
    bench.until(lambda one: len(one.gpus[0].instances) == 5, "the new layout")
    time.sleep(10 * INTERVAL_SECONDS)
    reading = bench.profiled()
    source.close()
    assert [one.state for one in reading.gpus] == [DeviceState.UP] * 3
    assert {len(part.values) for one in reading.gpus for part in one.instances} == {6}
    assert "dcgm_stale" not in reading.errors


NOTHING = {
    "no value yet": (stub.BLANK, 0, 0.0),
    "not found": (stub.BLANK, 1, 0.0),
    "not supported": (stub.BLANK, 2, 0.0),
    "not permitted": (stub.BLANK, 3, 0.0),
    "not a number": (stub.NUMBER, 0, float("nan")),
    "no data": (stub.STATUS, -14, 0.0),
    "stale": (stub.STATUS, -15, 0.0),
    "not watched": (stub.STATUS, -16, 0.0),
    "no permission": (stub.STATUS, -17, 0.0),
    "an error of NVML's": (stub.STATUS, -8, 0.0),
}


@pytest.mark.parametrize("name", NOTHING)
def test_unmeasured_value_is_absent_and_affects_no_other_value(bench: Bench, name: str) -> None:
    what, code, number = NOTHING[name]
    bench.profiled()
    spoilt = [Field.POWER_USAGE, Field.PROF_SM_ACTIVE]
    for field in spoilt:
        bench.control.override(int(field), what, entity=(1, 3), code=code, number=number)
    reading = bench.until(lambda one: one.gpus[3].values.keys().isdisjoint(spoilt), name)
    whole = expected(3)
    assert reading.gpus[3].values == pytest.approx({field: whole[field] for field in whole if field not in spoilt})
    assert reading.gpus[3].state is DeviceState.UP
    assert reading.gpus[4].values == pytest.approx(expected(4))


def test_32_bit_blank_is_absent_but_a_counter_may_have_that_value(bench: Bench) -> None:
    bench.control.override(int(Field.GPU_TEMP), stub.BLANK32)
    bench.control.override(int(Field.TOTAL_ENERGY_CONSUMPTION), stub.BLANK32)
    reading = bench.until(lambda one: Field.GPU_TEMP not in one.gpus[0].values, "the blank")
    assert reading.gpus[0].values[Field.TOTAL_ENERGY_CONSUMPTION] == 0x7FFFFFF0


@pytest.mark.parametrize("per_callback", [1, 5, 0], ids=["one by one", "five at once", "whole entities"])
def test_records_are_copied_before_the_library_reuses_them(bench: Bench, per_callback: int) -> None:
    bench.control.per_callback = per_callback
    reading = bench.profiled()
    assert [one.values for one in reading.gpus] == [pytest.approx(expected(index)) for index in range(8)]


@pytest.mark.parametrize("refused", [Field.POWER_USAGE, Field.PROF_SM_ACTIVE])
def test_refused_field_affects_no_other_field(engine: stub.Engine, control: stub.StubControl, refused: Field) -> None:
    control.refused_field, control.refused_code = int(refused), -6
    with opened(engine, control) as bench:
        reading = bench.profiled()
    whole = expected(5)
    assert reading.gpus[5].values == pytest.approx({field: whole[field] for field in whole if field != refused})


def test_field_unknown_to_an_older_engine_is_left_out(control: stub.StubControl, tmp_path: Path) -> None:
    newer = stub.build(tmp_path / "newer", release="4.7.0")
    fields = FIELDS | {Field(1603)}
    with (
        loaded(newer),
        stub.Engine(newer, tmp_path / "control", release="4.6.0") as older,
        opened(older, control, fields) as bench,
    ):
        assert bench.profiled().gpus[0].values == pytest.approx(expected(0))
    with (
        loaded(newer),
        stub.Engine(newer, tmp_path / "control", release="4.7.0") as engine,
        opened(engine, control, fields) as bench,
    ):
        assert bench.profiled().gpus[0].values[Field(1603)] == 1900 * 10**6


def test_missing_profiling_module_leaves_other_fields_measured(engine: stub.Engine, control: stub.StubControl) -> None:
    control.module_present = 0
    with opened(engine, control) as bench:
        first = bench.until(lambda one: Field.GPU_TEMP in one.gpus[0].values, "the temperature")
        control.gpus[0].temperature_celsius = 77
        later = bench.until(lambda one: one.gpus[0].values.get(Field.GPU_TEMP) == 77, "the next temperature")
    for reading in (first, later):
        assert reading.gpus[0].profiling is ProfilingState.NO_MODULE
        assert reading.gpus[0].values.keys().isdisjoint(PROFILED)


def test_gpu_that_cannot_be_profiled_affects_no_other_gpu(engine: stub.Engine, control: stub.StubControl) -> None:
    control.gpus[0].profiling = stub.BY_NOTHING
    with opened(engine, control) as bench:
        reading = bench.until(lambda one: all(map(is_profiled, one.gpus[1:])), "the other seven profiled")
    assert reading.gpus[0].profiling is ProfilingState.UNSUPPORTED
    assert reading.gpus[0].values.keys() == BOARD - {Field.VBIOS_VERSION}


def test_xid_is_reported_once_with_its_number(bench: Bench) -> None:
    bench.profiled()
    stub.xid(bench.control, 2, 79)
    reading = bench.until(lambda one: one.xids, "the Xid")
    assert [(event.uuid, event.xid) for event in reading.xids] == [(stub.gpu_uuid(2), 79)]
    assert bench.source.sample(time.time()).xids == ()


def test_xids_of_more_instances_than_a_dcgm_3_group_are_reported_once(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCGM_STUB_CONTROL", str(tmp_path / "control"))
    control = stub.control(tmp_path / "control", partitioned=True)
    with (
        loaded(directory, 3),
        stub.Engine(directory, tmp_path / "control", release=stub.RELEASES[3]) as engine,
        opened(engine, control) as bench,
    ):
        bench.profiled()
        for number in (13, 43):
            stub.xid(control, 7, number, level=5, place=6)
        stub.xid(control, 0, 79)
        found = [event for _ in range(3) for event in bench.source.sample(time.time()).xids]
    assert sorted((event.uuid, event.xid, event.gpu_instance_id) for event in found) == sorted(
        [(stub.gpu_uuid(0), 79, None), (stub.gpu_uuid(7), 13, 13), (stub.gpu_uuid(7), 43, 13)]
    )


def test_xid_is_reported_after_watches_are_rebuilt_for_another_lost_gpu(bench: Bench) -> None:
    bench.source.sample(time.time())
    bench.control.gpus[1].status = 4
    bench.until(lambda one: one.gpus[1].state is DeviceState.LOST, "the lost GPU", patient=True)
    bench.control.gpus[7].status = 7
    bench.until(lambda one: one.gpus[7].state is DeviceState.MISSING, "the detached GPU", patient=True)
    stub.xid(bench.control, 2, 31)
    reading = bench.until(lambda one: one.xids, "the Xid of another GPU")
    assert [(event.uuid, event.xid) for event in reading.xids] == [(stub.gpu_uuid(2), 31)]


def test_xid_polling_takes_at_most_4_round_trips_without_an_xid(bench: Bench) -> None:
    def round_trips() -> int:
        before = bench.control.engine.requests
        bench.source.sample(time.time())
        return int(bench.control.engine.requests - before)

    bench.profiled()
    quiet = min(round_trips() for _ in range(5))
    assert quiet <= 4
    stub.xid(bench.control, 2, 79)
    assert round_trips() > quiet + 8


def test_xid_is_reported_after_the_engine_clock_is_set_back(bench: Bench) -> None:
    bench.profiled()
    stub.xid(bench.control, 2, 79)
    assert bench.until(lambda one: one.xids, "the first Xid").xids
    bench.control.clock_ahead_micros = -3600 * 10**6
    stub.xid(bench.control, 3, 31)
    reading = bench.until(lambda one: one.xids, "the Xid of an hour ago, by the engine's clock")
    assert [(event.uuid, event.xid) for event in reading.xids] == [(stub.gpu_uuid(3), 31)]
    assert bench.source.sample(time.time()).xids == ()


def test_more_fields_than_one_watch_allows_are_all_read(engine: stub.Engine, control: stub.StubControl) -> None:
    many = frozenset(Field(one) for one in range(700, 850))
    with opened(engine, control, FIELDS | many) as bench:
        values = bench.profiled().gpus[0].values
        assert values.keys() >= (BOARD | many) - {Field.VBIOS_VERSION}
        assert bench.source.sample(time.time()).errors == {}


def test_engine_with_paused_telemetry_is_degraded_and_gpus_are_not_down(bench: Bench) -> None:
    bench.profiled()
    bench.control.pause()
    with pytest.raises(NoValuesError, match=r"8 GPUs and gives no values.*diagnosis") as caught:
        bench.until(lambda one: {gpu.state for gpu in one.gpus} != {DeviceState.UP}, "a GPU that is down")
    assert caught.value.reason == "dcgm_no_values"
    bench.control.resume()
    reading = bench.until(lambda one: all(map(is_profiled, one.gpus)), "every GPU profiled", patient=True)
    assert reading.gpus[7].state is DeviceState.UP


def test_engine_paused_before_open_is_degraded_immediately(engine: stub.Engine, control: stub.StubControl) -> None:
    control.pause()
    with opened(engine, control) as bench:
        with pytest.raises(NoValuesError, match="8 GPUs and gives no values"):
            bench.source.sample(time.time())
        control.resume()
        bench.until(lambda one: all(map(is_profiled, one.gpus)), "every GPU profiled", patient=True)


def test_open_of_an_engine_without_driver_access_reports_its_gpus(
    engine: stub.Engine, control: stub.StubControl
) -> None:
    control.override(UUID, stub.BLANK)
    with pytest.raises(SourceError, match="8 GPUs and gives no values"), opened(engine, control):
        pass


def test_engine_without_room_for_a_group_is_degraded_until_room_is_free(
    engine: stub.Engine, control: stub.StubControl, caplog: pytest.LogCaptureFixture
) -> None:
    control.foreign_groups = 64
    ahead_seconds = 0.0
    source = DcgmSource(
        FIELDS,
        address=engine.address,
        interval_seconds=INTERVAL_SECONDS,
        monotonic=lambda: time.monotonic() + ahead_seconds,
    )
    source.open()
    for _ in range(5):
        with pytest.raises(NoValuesError, match="no room for another group") as caught:
            source.sample(time.time())
    assert caught.value.reason == "dcgm_limit_reached"
    logged = [record.message for record in caplog.records]
    assert sum(": dcgm_limit_reached: " in line for line in logged) == 1, "logged once"
    control.foreign_groups = 0
    ahead_seconds += 61
    assert Bench(source, control, engine).profiled().gpus[7].state is DeviceState.UP
    source.close()


def test_every_gpu_is_read_again_when_the_set_of_gpus_changes(bench: Bench) -> None:
    bench.profiled()
    bench.control.gpus[1].status = 7
    for number in range(2, 8):
        bench.control.gpus[number].nvml_index = number - 1
    reading = bench.until(lambda one: of_uuid(one, 1).state is DeviceState.MISSING, "GPU 1 detached")
    assert [of_uuid(reading, number).gpu.index for number in range(2, 8)] == [1, 2, 3, 4, 5, 6]


def of_uuid(reading: Reading, number: int) -> GpuReading:
    return next(one for one in reading.gpus if one.gpu.uuid == stub.gpu_uuid(number))


def test_slow_engine_gives_a_slow_but_complete_sample(bench: Bench) -> None:
    bench.profiled()
    bench.control.slow_micros = 100_000
    started = time.monotonic()
    reading = bench.source.sample(time.time())
    assert time.monotonic() - started >= 0.1
    assert [one.values for one in reading.gpus] == [pytest.approx(expected(index)) for index in range(8)]


def test_killed_engine_is_one_error_and_the_next_engine_is_read(bench: Bench) -> None:
    bench.profiled()
    bench.engine.kill()
    with pytest.raises(SourceError, match="went away") as raised:
        bench.source.sample(time.time())
    assert raised.value.reason == "dcgm_connection_lost"
    bench.source.close()
    with pytest.raises(SourceError) as refused:
        bench.source.open()
    assert refused.value.reason == "dcgm_refused"
    bench.engine.start()
    bench.source.open()
    assert bench.profiled().gpus[7].values == pytest.approx(expected(7))
    assert bench.control.engine.connections == 1


def test_engine_of_another_major_version_is_reported_with_the_fix(
    directory: Path, control: stub.StubControl, tmp_path: Path
) -> None:
    assert control.size
    with (
        loaded(directory, 3),
        stub.Engine(directory, tmp_path / "control", release="4.6.0") as engine,
        pytest.raises(SourceError, match="major version") as raised,
    ):
        DcgmSource(FIELDS, address=engine.address).open()
    assert raised.value.reason == "dcgm_version_mismatch"
    assert "libdcgm.so.3 is 3.3.9" in str(raised.value)


def test_agent_without_the_nvml_library_reads_every_row_from_the_engine(
    engine: stub.Engine, directory: Path, tmp_path: Path
) -> None:
    """As with dcgm-exporter's ``-r`` for a remote engine, which needs no NVML on this machine."""
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"")
    env = stub.environment(directory, tmp_path / "control", base={"LD_LIBRARY_PATH": str(tmp_path)})
    options = ("--node-name", "here", "--attribution", "off", "--sample-interval", "500ms")
    names = ("DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_FB_FREE", "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_GPU_TEMP")
    with running_agent(*options, "--dcgm-address", engine.address, env=env) as agent:
        agent.until(lambda page: all(len(matching(page, name)) == 8 for name in names), "every row of 8 GPUs")
