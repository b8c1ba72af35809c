"""The DCGM source on a simulated host engine: identities of devices, their values, and reports of their loss."""

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from driver_support import (
    ADDRESS,
    EPOCH_SECONDS,
    FIELDS,
    H100,
    PROFILED,
    T4,
    engine,
    gpu,
    instance,
    load,
    of,
    partitioned,
    profiled,
)

from exporter.errors import NoValuesError, SourceError
from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.engine import knock
from exporter.gpu.dcgm.session import DcgmSource
from exporter.gpu.nvml.source import NvmlSource
from exporter.model.devices import DeviceState, ProfilingState, Reading
from exporter.model.fields import Field
from gpu_simulator import dcgm, driver
from gpu_simulator.truth import Fault

AMPERE = replace(H100, name="NVIDIA A100-SXM4-80GB", gpm=False)
BUSY = load(engine=0.5, sm=0.25, dram=0.125, utilisation=0.75, pcie_tx_bytes_per_second=1e6, memory_used_bytes=2**30)


def integral(load_now: object, seconds: float) -> object:
    """Return the integrals of a load after a number of seconds."""
    fields = type(load_now).__dataclass_fields__
    return replace(
        load_now, **{name: getattr(load_now, name) * seconds for name in fields if name != "memory_used_bytes"}
    )


def busy(index: int = 0, **values: object) -> object:
    return gpu(index, load=BUSY, **values)


@contextmanager
def nvml_of(bench: object) -> Iterator[NvmlSource]:
    driver.install(bench.now, cache_seconds=0.0, monotonic=bench.monotonic, epoch_seconds=EPOCH_SECONDS)
    source = NvmlSource(FIELDS, clock=bench.monotonic)
    try:
        source.open()
        yield source
    finally:
        source.close()
        driver.uninstall()


def test_devices_have_the_same_identity_as_through_nvml() -> None:
    parts = (instance(7), instance(9, "3g.40gb", compute_slices=3, memory_slices=4, memory_bytes=40448 * 2**20))
    with engine(busy(), partitioned(*parts, index=1), gpu(2, model=T4)) as bench, nvml_of(bench) as nvml:
        reported, wanted = bench.opened(), nvml.sample(EPOCH_SECONDS + bench.seconds)
        assert [one.gpu for one in reported.gpus] == [one.gpu for one in wanted.gpus]
        for ours, theirs in zip(reported.gpus, wanted.gpus, strict=True):
            assert [one.instance for one in ours.instances] == [
                # DCGM does not report the place of an instance on its GPU.
                replace(one.instance, placement_start=None)
                for one in theirs.instances
            ]
        assert (reported.driver_version, reported.nvml_version) == (wanted.driver_version, wanted.nvml_version)
        assert (reported.source, reported.dcgm_version) == ("dcgm", "4.6.0")
        assert all(one.processes is None for one in reported.gpus)


def test_gpu_brand_is_the_same_through_either_source() -> None:
    with engine(busy()) as bench, nvml_of(bench) as nvml:
        reported, wanted = bench.opened(), nvml.sample(EPOCH_SECONDS + bench.seconds)
    assert [of(one).gpu.labels[Field.BRAND] for one in (reported, wanted)] == ["NVIDIA", "NVIDIA"]


def test_values_have_the_same_units_as_through_nvml() -> None:
    with engine(busy(), gpu(1, model=T4)) as bench, nvml_of(bench) as nvml:
        bench.source.open()
        for _ in range(3):
            bench.change(load_integral=integral(BUSY, bench.seconds))
            wanted, reported = nvml.sample(EPOCH_SECONDS + bench.seconds), bench.sample()
        assert of(reported).values == {one: of(wanted).values[one] for one in of(reported).values}
        assert of(reported).values.keys() >= FIELDS & of(wanted).values.keys()
        assert of(reported).values[Field.PROF_GR_ENGINE_ACTIVE] == 0.5
        assert of(reported).values[Field.PROF_PCIE_TX_BYTES] == 1_000_000


def test_profiling_fields_arrive_with_the_second_sample_and_others_with_the_first() -> None:
    with engine(busy()) as bench:
        first = bench.opened(1)
        assert of(first).values.keys() >= {Field.GPU_UTIL, Field.ECC_DBE_VOL_TOTAL, Field.FB_USED}
        assert profiled(first) == frozenset()
        assert profiled(bench.sample()) == PROFILED
        assert of(first).profiling is ProfilingState.RUNNING
        assert bench.errors == {}


def test_instance_has_its_own_values_and_none_of_its_gpu() -> None:
    whole = instance(7, load=BUSY)
    halves = [
        instance(9, "1c.2g.20gb", compute_instance=one, compute_slices=1, memory_slices=2, memory_bytes=20096 * 2**20)
        for one in (0, 1)
    ]
    with engine(partitioned(whole, *halves, model=AMPERE)) as bench:
        alone, *together = of(bench.opened()).instances
        own = {Field.FB_TOTAL, Field.FB_USED, Field.FB_FREE, Field.PROF_GR_ENGINE_ACTIVE, Field.PROF_SM_ACTIVE}
        assert alone.values.keys() == own | {Field.PROF_DRAM_ACTIVE}
        # Two compute instances share their memory, and its traffic.
        assert [one.values.keys() for one in together] == [{Field.PROF_GR_ENGINE_ACTIVE, Field.PROF_SM_ACTIVE}] * 2


def test_lost_gpu_has_no_values_and_returns_while_others_continue() -> None:
    with engine(busy(), busy(1)) as bench:
        bench.opened()
        bench.change(1, fault=Fault.GPU_LOST)
        reading = bench.sample(2)
        assert (of(reading, 1).state, of(reading, 1).reason) == (DeviceState.LOST, "gpu_is_lost")
        assert of(reading, 1).values == {}
        assert profiled(reading, 0) == PROFILED
        bench.change(1, fault=None)
        back = bench.until(lambda one: profiled(one, 1) == PROFILED, within_seconds=10)
        assert of(back, 1).state is DeviceState.UP


def test_unbound_gpu_is_missing_and_new_gpu_is_found() -> None:
    with engine(busy(), busy(1)) as bench:
        bench.opened()
        bench.set(gpus=(busy(), busy(2)))
        reading = bench.until(lambda one: len(one.gpus) == 3, within_seconds=10)
        assert [one.state for one in reading.gpus] == [DeviceState.UP, DeviceState.MISSING, DeviceState.UP]
        assert of(reading, 1).values == {}
        bench.until(lambda one: profiled(one, 2) == PROFILED, within_seconds=5)


def test_gpu_without_any_value_has_failed() -> None:
    with engine(busy(), busy(1)) as bench:
        bench.opened()
        bench.change(1, fault=Fault.UNKNOWN_ERROR)
        reading = bench.until(lambda one: of(one, 1).state is DeviceState.FAILED, within_seconds=10)
        assert of(reading, 1).reason == "no_values"
        assert of(reading, 0).state is DeviceState.UP


def test_instance_changes_are_followed_without_interrupting_other_gpus() -> None:
    with engine(busy(), partitioned(instance(7, load=BUSY), index=1), busy(2)) as bench:
        bench.opened()
        bench.change(1, instances=(instance(9, load=BUSY), instance(11, load=BUSY)))
        for _ in range(10):
            reading = bench.sample()
            assert profiled(reading, 0) == profiled(reading, 2) == PROFILED
        found = of(reading, 1).instances
        assert [one.instance.gpu_instance_id for one in found] == [9, 11]
        assert all(Field.PROF_GR_ENGINE_ACTIVE in one.values for one in found)


def test_instance_recreated_in_the_same_place_is_a_new_one() -> None:
    with engine(partitioned(instance(7))) as bench:
        bench.opened()
        bench.change(instances=(replace(instance(7), uuid="MIG-99999999-0000-0000-0000-000000000007"),))
        wanted = "MIG-99999999-0000-0000-0000-000000000007"
        bench.until(lambda one: of(one).instances[0].instance.uuid == wanted, within_seconds=10)


def test_enabled_mig_mode_is_detected() -> None:
    with engine(busy()) as bench:
        assert not of(bench.opened()).gpu.mig_enabled
        bench.change(mig_enabled=True, instances=(instance(7),))
        reading = bench.until(lambda one: of(one).gpu.mig_enabled, within_seconds=10)
        assert len(of(reading).instances) == 1


def test_profiling_support_is_determined_per_gpu() -> None:
    with engine(gpu(0, model=T4), busy(1), profiling_module=False) as bench:
        reading = bench.opened()
        assert of(reading, 0).profiling is ProfilingState.NO_MODULE
        assert profiled(reading, 0) == frozenset()
        assert of(reading, 0).values.keys() >= {Field.GPU_UTIL, Field.POWER_USAGE}
        assert of(reading, 1).profiling is ProfilingState.RUNNING
        assert profiled(reading, 1) == PROFILED


def test_paused_profiling_is_a_state_without_values_until_resumed() -> None:
    with engine(busy()) as bench:
        bench.opened()
        bench.set(faults={Fault.PROFILING_PAUSED: 0.0})
        reading = bench.sample(2)
        assert of(reading).profiling is ProfilingState.PAUSED
        assert profiled(reading) == frozenset()
        assert Field.GPU_UTIL in of(reading).values
        bench.set(faults={})
        back = bench.until(lambda one: profiled(one) == PROFILED, within_seconds=4)
        assert of(back).profiling is ProfilingState.RUNNING


def test_values_from_before_profiling_was_paused_are_absent() -> None:
    with engine(busy(), interval_seconds=10.0) as bench:
        assert profiled(bench.opened()) == PROFILED
        bench.set(faults={Fault.PROFILING_PAUSED: 0.0})
        bench.seconds -= 5.0  # the engine measures again in 5 s
        reading = bench.sample()
        assert of(reading).profiling is ProfilingState.PAUSED
        assert profiled(reading) == frozenset()


def test_profiling_support_is_not_requested_without_profiling_fields() -> None:
    with engine(busy(), fields=FIELDS - PROFILED) as bench:
        assert of(bench.opened()).profiling is None


def test_xid_is_reported_once_and_none_from_before_the_start() -> None:
    with engine(busy(xids=((900.0, 79),)), fields=FIELDS) as bench:
        assert bench.opened().xids == ()
        bench.change(xids=((900.0, 79), (bench.seconds, 31)))
        found = [one for _ in range(5) for one in bench.sample().xids]
        assert [(one.uuid, one.xid) for one in found] == [(bench.truth.gpus[0].uuid, 31)]
        assert abs(found[0].at_seconds - (EPOCH_SECONDS + bench.seconds)) < 6


def test_xid_of_a_gpu_and_its_parts_is_one_event_of_the_smallest_part() -> None:
    with engine(partitioned(instance(7)), fields=FIELDS) as bench:
        bench.opened()
        bench.change(xids=((bench.seconds, 31), (bench.seconds, 43)))
        found = [one for _ in range(5) for one in bench.sample().xids]
        reported = [(one.xid, one.gpu_instance_id, one.compute_instance_id) for one in found]
        assert sorted(reported, key=str) == [(31, 7, 0), (43, 7, 0)]


def test_unrequested_xids_are_not_watched() -> None:
    with engine(busy(), fields=FIELDS - {Field.XID_ERRORS}) as bench:
        bench.opened()
        bench.change(xids=((bench.seconds, 31),))
        assert all(bench.sample().xids == () for _ in range(3))


def test_any_gpu_field_is_read_by_number_and_others_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    capability, c2c, newer, switch, blob = Field(63), Field(1076), Field(1604), Field(701), Field(60)
    with engine(busy(), fields=frozenset({capability, c2c, newer, switch, blob, Field.GPU_UTIL})) as bench:
        with caplog.at_level(logging.WARNING):
            reading = bench.opened()
        assert of(reading).values[capability] == 9 << 16
        assert not of(reading).values.keys() & {newer, switch, blob}
        assert sum(bench.errors.values()) == 3
        assert "60, 701, 1604" in caplog.text
        caplog.clear()
        bench.source.close()
        bench.opened()
        assert sum(bench.errors.values()) == 3
        assert caplog.text == ""


def test_text_fields_are_labels_and_versions_belong_to_the_node() -> None:
    fields = frozenset({Field.VBIOS_VERSION, Field.DRIVER_VERSION, Field(3), Field.GPU_UTIL})
    with engine(busy(), fields=fields) as bench:
        labels = of(bench.opened()).gpu.labels
        assert labels[Field.VBIOS_VERSION] == "96.00.A5.00.01"
        assert Field.DRIVER_VERSION not in labels


def test_lost_engine_is_one_error_and_its_gpus_are_read_again_on_return() -> None:
    with engine(busy()) as bench:
        bench.opened()
        bench.set(faults={Fault.ENGINE_DOWN: 0.0})
        with pytest.raises(SourceError) as lost:
            bench.sample()
        assert lost.value.reason == "dcgm_connection_lost"
        assert ADDRESS in str(lost.value)
        bench.source.close()
        with pytest.raises(SourceError) as refused:
            bench.source.open()
        assert refused.value.reason == "dcgm_refused"
        assert bench.slept_seconds == 0, "the library tried a closed port, which takes its full timeout"
        bench.set(faults={})
        assert profiled(bench.opened()) == PROFILED


def test_repeated_engine_loss_leaks_nothing() -> None:
    with engine(busy(), partitioned(instance(7), index=1)) as bench:
        bench.opened()
        before = dcgm.held()
        for _ in range(50):
            bench.set(faults={Fault.ENGINE_DOWN: 0.0})
            with pytest.raises(SourceError):
                bench.sample()
            bench.source.close()
            bench.set(faults={})
            bench.source.open()
        assert dcgm.held() == before
        bench.source.close()
        assert set(dcgm.held().values()) == {0}


def test_gpu_removed_while_the_engine_was_away_is_missing() -> None:
    with engine(busy(), busy(1)) as bench:
        bench.opened()
        bench.source.close()
        bench.set(gpus=(busy(),))
        assert [one.state for one in bench.opened().gpus] == [DeviceState.UP, DeviceState.MISSING]


def test_engine_without_gpus_is_reported() -> None:
    with engine() as bench:
        with pytest.raises(SourceError, match="has no GPU") as error:
            bench.source.open()
        assert error.value.reason == "dcgm_no_gpus"
        assert set(dcgm.held().values()) == {0}


def test_engine_temporarily_without_gpus_is_degraded_and_gpus_are_not_missing() -> None:
    with engine(busy(), busy(1)) as bench:
        bench.opened()
        bench.set(gpus=())
        with pytest.raises(NoValuesError, match="has no GPU") as error:
            bench.until(lambda one: {gpu.state for gpu in one.gpus} != {DeviceState.UP}, within_seconds=10)
        assert error.value.reason == "dcgm_no_gpus"
        bench.set(gpus=(busy(), busy(1)))
        assert [one.state for one in bench.sample().gpus] == [DeviceState.UP] * 2


def opening(address: str) -> SourceError:
    with pytest.raises(SourceError) as error:
        DcgmSource(FIELDS, address=address).open()
    text = str(error.value)
    assert "\n" not in text
    assert address in text
    return error.value


@pytest.fixture
def real_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the simulated library; endpoints are real."""
    with engine(busy()):
        monkeypatch.setattr(library.load(), "knock", None)
        yield


@pytest.mark.usefixtures("real_sockets")
def test_each_connection_failure_has_its_own_reason(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        assert opening(f"127.0.0.1:{port}").reason == "dcgm_refused"
        assert opening(f"[::ffff:127.0.0.1]:{port}").reason == "dcgm_refused"
    assert opening("no-such-host.invalid:5555").reason == "dcgm_no_such_host"
    assert opening("no..host:5555").reason == "dcgm_no_such_host"
    assert opening(f"unix://{tmp_path}/nv-hostengine").reason == "dcgm_socket_missing"
    (tmp_path / "file").write_text("no socket")
    assert opening(f"unix://{tmp_path}/file").reason == "dcgm_refused"


@pytest.mark.parametrize(("given", "number"), [("localhost", "127.0.0.1"), ("[::1]", "::1")])
def test_library_gets_the_resolved_address_that_accepted(given: str, number: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in number else socket.AF_INET) as listening:
        try:
            listening.bind((number, 0))
        except OSError:
            pytest.skip(f"this machine has no {number}")
        listening.listen()
        port = listening.getsockname()[1]
        assert knock(f"{given}:{port}", 1.0) == (f"[{number}]:{port}" if ":" in number else f"{number}:{port}")


def test_refused_socket_is_a_permission_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_address: str, _seconds: float) -> str:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with engine(busy()):
        monkeypatch.setattr(library.load(), "knock", refuse)
        assert opening("unix:///run/nv-hostengine").reason == "dcgm_no_permission"
        assert opening("localhost:5555").reason == "dcgm_unreachable"


@pytest.mark.usefixtures("real_sockets")
def test_non_engine_listener_has_its_own_reason() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert opening(address).reason in {"dcgm_not_an_engine", "dcgm_silent"}


def test_engine_of_another_major_version_is_reported_as_a_mismatch() -> None:
    with engine(busy(), version="3.3.9") as bench:
        dcgm.install(bench.now, cache_seconds=0.0, monotonic=bench.monotonic, soname="libdcgm.so.4")
        error = opening(ADDRESS)
        assert error.reason == "dcgm_version_mismatch"
        assert "install" in str(error)


def test_engine_of_version_3_is_read() -> None:
    with engine(busy(), version="3.3.9") as bench:
        reading = bench.opened()
        assert reading.dcgm_version == "3.3.9"
        assert profiled(reading) == PROFILED


def test_embedded_engine_starts_only_on_request() -> None:
    with engine(busy()) as bench:
        source = DcgmSource(FIELDS, address="embedded", monotonic=bench.monotonic)
        source.open()
        assert [one.gpu.uuid for one in source.sample(EPOCH_SECONDS).gpus] == [bench.truth.gpus[0].uuid]
        source.close()
        assert set(dcgm.held().values()) == {0}


def test_source_cannot_be_sampled_before_it_is_open() -> None:
    with engine(busy()) as bench, pytest.raises(SourceError, match="not opened"):
        bench.sample()


def test_closed_source_can_be_closed_again() -> None:
    with engine(busy()) as bench:
        bench.opened()
        bench.source.close()
        bench.source.close()


def test_reading_has_timestamps_of_both_clocks() -> None:
    with engine(busy()) as bench:
        bench.source.open()
        began = bench.seconds
        reading: Reading = bench.sample()
        assert reading.steady_seconds == began
        assert reading.taken_at_seconds == EPOCH_SECONDS + began
