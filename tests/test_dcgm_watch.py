"""DCGM's watches: one refused field affects no other, a dead watch is noticed, an engine's return is quick."""

import itertools
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import dcgm_stub_support as stub
import pytest
from driver_support import FIELDS, H100, PROFILED, T4, engine, gpu, instance, of, partitioned, profiled

from exporter.errors import SourceError
from exporter.gpu import wire
from exporter.gpu.dcgm import library
from exporter.gpu.dcgm import library as abi
from exporter.gpu.dcgm.session import DcgmSource
from exporter.gpu.worker import child_command
from exporter.model.devices import DeviceState, ProfilingState, Reading, SourceState, SourceStatus
from exporter.model.fields import CODECS, DECODERS, FLOW_ENGINES, JPEG_DECODERS, Field
from gpu_simulator import dcgm
from gpu_simulator.truth import Fault

_log = logging.getLogger(__name__)
needs_compiler = pytest.mark.skipif(stub.compiler() is None, reason="the simulated engine needs a C compiler (gcc)")


@pytest.mark.parametrize("refused", [Field.FB_FREE, Field.PROF_SM_ACTIVE, Field.PCIE_REPLAY_COUNTER])
@pytest.mark.parametrize("function", ["dcgmWatchFields", "dcgmFieldGroupCreate"])
def test_refused_field_affects_no_other_field(refused: Field, function: str) -> None:
    with engine(gpu(), gpu(1)) as bench:
        everything = of(bench.opened()).values.keys()
        bench.source.close()
        dcgm.fail(function, abi.Code.ERROR, only=refused)
        reading = bench.opened()
        assert [of(reading, index).values.keys() for index in (0, 1)] == [everything - {refused}] * 2
        assert bench.errors == {"dcgm_error": 1}
        assert of(reading).profiling is ProfilingState.RUNNING


def test_refused_field_is_retried_after_minutes_and_not_every_sample() -> None:
    with engine(gpu()) as bench:
        dcgm.fail("dcgmWatchFields", abi.Code.ERROR, only=Field.FB_FREE)
        bench.opened()
        dcgm.clear_failures()
        assert Field.FB_FREE not in of(bench.sample(60)).values
        bench.until(lambda one: Field.FB_FREE in of(one).values, within_seconds=620)


def test_permanently_refused_field_is_counted_per_attempt_and_blocks_no_others() -> None:
    with engine(gpu()) as bench:
        dcgm.fail("dcgmWatchFields", abi.Code.ERROR, only=Field.FB_FREE)
        bench.opened()
        for _ in range(620):
            values = of(bench.sample()).values
            assert values.keys() >= PROFILED | {Field.FB_USED, Field.GPU_UTIL}
        assert bench.errors == {"dcgm_error": 2}


def test_refused_profiling_affects_no_other_field_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with engine(gpu()) as bench, caplog.at_level(logging.WARNING):
        for field in PROFILED:
            dcgm.fail("dcgmWatchFields", abi.Code.MODULE_NOT_LOADED, only=field)
        reading = bench.opened()
        assert of(reading).profiling is ProfilingState.NO_MODULE
        assert profiled(reading) == frozenset()
        assert of(reading).values.keys() >= {Field.GPU_UTIL, Field.ECC_DBE_VOL_TOTAL}
        assert bench.errors == {"dcgm_module_not_loaded": 1}
        assert caplog.text.count("dcgm_module_not_loaded: the engine has no profiling module: install") == 1


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (abi.Code.MODULE_NOT_LOADED, ProfilingState.NO_MODULE),
        (abi.Code.PROFILING_NOT_SUPPORTED, ProfilingState.UNSUPPORTED),
        (abi.Code.NO_PERMISSION, ProfilingState.NO_PERMISSION),
        (abi.Code.REQUIRES_ROOT, ProfilingState.NO_PERMISSION),
        (abi.Code.PAUSED, ProfilingState.PAUSED),
        (abi.Code.IN_USE, ProfilingState.REFUSED),
        (abi.Code.DRIVER_TOO_OLD, ProfilingState.REFUSED),
    ],
)
def test_profiling_refusal_reason_is_reported_and_retried(code: int, state: ProfilingState) -> None:
    with engine(gpu()) as bench:
        dcgm.fail("dcgmProfGetSupportedMetricGroups", code)
        assert of(bench.opened()).profiling is state
        dcgm.clear_failures()
        back = bench.until(lambda one: profiled(one) == PROFILED, within_seconds=70)
        assert of(back).profiling is ProfilingState.RUNNING


def test_devices_of_one_kind_share_watches() -> None:
    gpus = (*(gpu(index) for index in range(4)), partitioned(instance(7), instance(9), index=4), gpu(5, model=T4))
    with engine(*gpus) as bench:
        bench.opened()
        # For GPUs: fast, slow, profiled; for instances: fast, profiled; and the Xids of all.
        assert dcgm.held() == {"connections": 1, "groups": 6, "field_groups": 6, "watches": 6}


def test_missing_codec_units_are_unwatched_without_interrupting_other_fields() -> None:
    gpus = (gpu(), gpu(1, overrides={DECODERS[0]: None}))
    with engine(*gpus, fields=FIELDS | CODECS) as bench:
        bench.opened()
        alike = dcgm.held()["groups"]
        readings = [bench.sample() for _ in range(30)]
        lost = [[sorted(PROFILED - profiled(reading, index)) for index in (0, 1)] for reading in readings]
        assert lost == [[[], []]] * 30
        assert dcgm.held()["groups"] == alike + 1, "the GPUs are profiled for other fields"
        units = {DECODERS[0], JPEG_DECODERS[0], FLOW_ENGINES[0]}
        assert all(units <= of(reading).values.keys() for reading in readings), "not even while the plan changes"
        assert [CODECS & of(readings[-1], index).values.keys() for index in (0, 1)] == [units, units - {DECODERS[0]}]


def test_fields_beyond_the_group_limit_are_split() -> None:
    many = frozenset(Field(one) for one in range(400, 600)) | frozenset(Field(one) for one in range(1400, 1530))
    with engine(gpu(), fields=FIELDS | many) as bench:
        assert of(bench.opened()).state is DeviceState.UP
        assert profiled(bench.sample()) == PROFILED
        assert "dcgm_bad_parameter" not in bench.errors


def test_engine_without_room_for_a_group_is_reported_and_other_fields_are_read() -> None:
    with engine(gpu()) as bench:
        dcgm.fail("dcgmFieldGroupCreate", abi.Code.LIMIT_REACHED, only=Field.PCIE_REPLAY_COUNTER)
        reading = bench.opened()
        assert Field.GPU_UTIL in of(reading).values
        assert Field.PCIE_REPLAY_COUNTER not in of(reading).values
        assert bench.errors == {"dcgm_limit_reached": 1}
        dcgm.clear_failures()
        bench.until(lambda one: Field.PCIE_REPLAY_COUNTER in of(one).values, within_seconds=70)


def test_watch_lost_by_the_engine_is_recreated() -> None:
    with engine(gpu()) as bench:
        bench.opened()
        before = dcgm.held()
        dcgm.fail("dcgmGetLatestValues_v2", abi.Code.NOT_CONFIGURED, times=3)
        bench.until(lambda one: profiled(one) == PROFILED and Field.GPU_UTIL in of(one).values, within_seconds=8)
        assert dcgm.held() == before


def test_mig_changes_leak_no_groups() -> None:
    with engine(gpu(), partitioned(instance(7), index=1)) as bench:
        bench.opened()
        before = dcgm.held()
        for number in (9, 11, 7) * 5:
            bench.change(1, instances=(instance(number),))
            bench.sample(6)
        assert dcgm.held() == before


def test_failed_hierarchy_call_removes_no_instance() -> None:
    with engine(partitioned(instance(7))) as bench:
        bench.opened()
        dcgm.fail("dcgmGetGpuInstanceHierarchy", abi.Code.NVML_ERROR)
        assert len(of(bench.sample(12)).instances) == 1
        assert bench.errors["mig_dcgm_nvml_error"] > 0


def test_models_profiled_by_module_and_by_gpm_are_both_profiled() -> None:
    ampere = replace(H100, name="NVIDIA A100-SXM4-80GB", gpm=False)
    with engine(gpu(), gpu(1, model=ampere)) as bench:
        reading = bench.opened()
        assert profiled(reading, 0) == profiled(reading, 1) == PROFILED


def test_slow_engine_is_not_treated_as_hanging() -> None:
    """Announcements make the parent wait: some on a slow engine, none while the engine is well."""
    announced: list[float] = []
    with engine(gpu(), gpu(1)) as bench:
        bench.source.announce = lambda: announced.append(bench.seconds)
        bench.opened(30)
        assert announced == []
        bench.set(faults={Fault.ENGINE_SLOW: 1.0})
        began = bench.seconds
        bench.source.close()
        assert of(bench.opened(4)).state is DeviceState.UP
        gaps = [after - before for before, after in itertools.pairwise([began, *announced, bench.seconds])]
        assert max(gaps) <= 8


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stub.build(tmp_path_factory.mktemp("libdcgm"))


class Child:
    """A source's child on the simulated libdcgm, and its messages."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def message(self) -> object:
        assert self.process.stdout is not None
        return wire.decode(self.process.stdout.readline())

    def reading(self) -> Reading:
        while not isinstance(message := self.message(), Reading):
            pass
        return message

    def usage(self) -> tuple[int, int]:
        """Return resident bytes and open descriptors."""
        proc = Path("/proc") / str(self.process.pid)
        pages = int((proc / "statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), sum(1 for _ in (proc / "fd").iterdir())


@contextmanager
def child(host: stub.Engine, libraries: Path, control: Path, interval_seconds: float) -> Iterator[Child]:
    process = subprocess.Popen(
        child_command(interval_seconds, FIELDS, host.address),
        stdout=subprocess.PIPE,
        env={**os.environ, **stub.environment(libraries, control)},
    )
    try:
        yield Child(process)
    finally:
        process.kill()
        process.communicate()


@needs_compiler
def test_field_with_a_dead_watch_is_absent_and_other_fields_are_not(libraries: Path, tmp_path: Path) -> None:
    block = stub.control(tmp_path / "control", gpus=1)
    with (
        stub.Engine(libraries, tmp_path / "control") as host,
        child(host, libraries, tmp_path / "control", 0.1) as source,
    ):
        while Field.GPU_TEMP not in source.reading().gpus[0].values:
            pass
        block.override(int(Field.GPU_TEMP), stub.FROZEN)
        until = time.monotonic() + 20
        while Field.GPU_TEMP in (reading := source.reading()).gpus[0].values:
            assert time.monotonic() < until, "a stopped value is still reported"
        assert reading.gpus[0].values.keys() >= {Field.GPU_UTIL, Field.POWER_USAGE}
        assert reading.errors == {"dcgm_stale": 1}


@needs_compiler
def test_engine_with_a_wrong_clock_is_read(libraries: Path, tmp_path: Path) -> None:
    block = stub.control(tmp_path / "control", gpus=1)
    block.clock_ahead_micros = -5 * 3600 * 10**6
    with (
        stub.Engine(libraries, tmp_path / "control") as host,
        child(host, libraries, tmp_path / "control", 0.1) as source,
    ):
        readings = [source.reading() for _ in range(10)]
        assert profiled(readings[-1]) == PROFILED
        assert abs(readings[-1].taken_at_seconds - time.time()) < 60


@needs_compiler
def test_killed_engine_returns_within_two_intervals_and_leaks_nothing(libraries: Path, tmp_path: Path) -> None:
    interval_seconds, kills, warm_up = 0.3, 12, 4
    block = stub.control(tmp_path / "control", gpus=2)
    late: list[float] = []
    with (
        stub.Engine(libraries, tmp_path / "control") as host,
        child(host, libraries, tmp_path / "control", interval_seconds) as source,
    ):
        for kill in range(kills):
            while profiled(source.reading()) != PROFILED:
                pass
            if kill == warm_up:
                before, held = source.usage(), (block.engine.connections, block.engine.groups, block.engine.watches)
            host.kill()
            while isinstance(source.message(), Reading):
                pass
            host.start()
            returned = time.monotonic()
            while profiled(source.reading()) != PROFILED:
                pass
            late.append((time.monotonic() - returned) / interval_seconds)
        memory, descriptors = source.usage()
        _log.info("back after %.2f intervals (median), %.2f at most", statistics.median(late), max(late))
        assert statistics.median(late) <= 2
        assert descriptors == before[1]
        assert memory - before[0] < 2**19
        assert (block.engine.connections, block.engine.groups, block.engine.watches) == held


@needs_compiler
def test_installed_library_that_matches_the_engine_is_used(tmp_path: Path) -> None:
    both = stub.build(stub.build(tmp_path / "both"), major=3)
    block = stub.control(tmp_path / "control", gpus=1)
    host = stub.Engine(both, tmp_path / "control")
    with child(host, both, tmp_path / "control", 0.1) as source:
        for release in ("3.3.9", "4.6.0", "3.3.9"):
            host.release = release
            host.start()
            reasons = set()
            while not isinstance(one := source.message(), Reading) or one.dcgm_version != release:
                reasons.add(one.reason if isinstance(one, SourceStatus) else "")
            assert "dcgm_version_mismatch" not in reasons, "with the other library installed there is no mismatch"
            assert block.engine.connections == 1
            host.kill()
        host.release = "5.0.0"
        host.start()
        reported = [one for _ in range(60) if isinstance(one := source.message(), SourceStatus)]
        host.kill()
    reasons = {one.reason for one in reported} - {""}
    assert reasons <= {"dcgm_version_mismatch", "dcgm_connection_lost", "dcgm_refused"}
    assert [one.state for one in reported].count(SourceState.FAILED) > 10, "the failed state stays"


def test_dcgm_child_never_loads_nvml() -> None:
    script = (
        "import sys\n"
        "from exporter.gpu import child\n"
        "child.run = lambda source, out, interval: print(source.name, 'pynvml' in sys.modules, file=sys.stderr)\n"
        "child.main(['--dcgm-address', 'localhost:5555', '--fields', '150,1001'])\n"
    )
    reported = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert reported.stderr.split() == ["dcgm", "False"]


def test_retry_waits_are_at_most_half_the_interval() -> None:
    for interval in (0.1, 0.2, 1.0, 5.0, 30.0):
        first, longest = DcgmSource(FIELDS, address="localhost:5555", interval_seconds=interval).waits_seconds
        assert first > 0
        assert longest <= interval / 2


def test_missing_library_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SONAMES", ("libdcgm-of-nowhere.so.4",))
    library.uninstall()
    with pytest.raises(SourceError, match="datacenter-gpu-manager") as error:
        DcgmSource(FIELDS, address="localhost:5555").open()
    assert error.value.reason == "dcgm_library_not_found"
