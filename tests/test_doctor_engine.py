"""The doctor with a host engine process: its findings on profiling, GPUs and fields, and on an engine that hangs."""

import time
from dataclasses import dataclass
from pathlib import Path

import dcgm_stub_support as dcgm_stub
import pytest
import stub_support as stub
from page_support import configured

from exporter.config import load_agent
from exporter.config.types import Listen
from exporter.doctor import checks, findings
from exporter.doctor.findings import Finding, Level

pytestmark = pytest.mark.skipif(stub.compiler() is None, reason="the simulated libraries need a C compiler")

GPUS = 2
_GPM = ("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMigSampleGet")


@dataclass(frozen=True)
class Node:
    """A node before Hopper: its driver has no GPM, so that only DCGM can measure engines."""

    libraries: Path
    env: dict[str, str]
    control: Path
    block: dcgm_stub.StubControl

    async def findings(self, address: str, **changes: object) -> dict[str, Finding]:
        """Return the doctor's findings, by the names of the checks."""
        config = load_agent({}, {}, check_paths=False)
        config = configured(
            config,
            dcgm_address=address,
            interval_seconds=0.2,
            enabled=False,
            listen=Listen("", 0),
            **changes,
        )
        around = findings.Surroundings(
            config=config,
            wall=time.time,
            monotonic=time.monotonic,
            worker_env=self.env,
            driver_deadline_seconds=10.0,
        )
        return {found.name: found for found in (await checks.examine(around)).findings}

    def engine(self) -> dcgm_stub.Engine:
        """Start the host engine of the node."""
        return dcgm_stub.Engine(self.libraries, self.control)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("libraries")
    dcgm_stub.build(directory / "dcgm")
    stub.build(directory / "nvml", without=_GPM)
    return directory


@pytest.fixture
def node(built: Path, tmp_path: Path) -> Node:
    stub.control(tmp_path / "nvml-control", gpus=GPUS)
    control = tmp_path / "dcgm-control"
    block = dcgm_stub.control(control, gpus=GPUS)
    beside = stub.environment(built / "nvml", tmp_path / "nvml-control")
    env = dcgm_stub.environment(built / "dcgm", control, base=beside)
    return Node(libraries=built / "dcgm", env=env, control=control, block=block)


async def test_engine_with_the_driver_has_complete_findings(node: Node) -> None:
    with node.engine() as engine:
        found = await node.findings(engine.address)
    assert found["DCGM engine"].cause.startswith(f"{engine.address}: DCGM 4.6.0, first reading after ")
    assert found["DCGM devices"].cause.endswith(", as NVML has")
    assert found["DCGM profiling"].cause == "running on 2 of 2 GPUs"
    assert found["activity"].cause == "engine counters on all 2 GPUs, on 2 of them by DCGM"
    assert found["processes"].level is Level.OK


async def test_paused_profiling_has_the_resume_command(node: Node) -> None:
    node.block.module_status = dcgm_stub.PAUSED
    with node.engine() as engine:
        found = await node.findings(engine.address)
    assert found["DCGM profiling"].cause == "of 2 GPUs 0 running, 2 paused: their engines are not measured"
    assert "dcgmi profile --resume" in found["DCGM profiling"].fix
    assert found["activity"].cause == "engine counters on 0 of 2 GPUs, utilisation on the others"


async def test_missing_profiling_module_names_the_package(node: Node) -> None:
    node.block.module_present = 0
    with node.engine() as engine:
        found = await node.findings(engine.address)
    assert "2 no module" in found["DCGM profiling"].cause
    assert "datacenter-gpu-manager-4-proprietary" in found["DCGM profiling"].fix


async def test_gpu_that_cannot_be_profiled_does_not_hide_the_other(node: Node) -> None:
    node.block.gpus[1].profiling = dcgm_stub.BY_NOTHING
    with node.engine() as engine:
        found = await node.findings(engine.address)
    assert "of 2 GPUs 1 running, 1 " in found["DCGM profiling"].cause
    assert found["activity"].cause == "engine counters on 1 of 2 GPUs, on 1 of them by DCGM, utilisation on the others"


async def test_gpu_missing_from_the_engine_is_named(node: Node) -> None:
    node.block.gpu_count = 1
    with node.engine() as engine:
        found = await node.findings(engine.address)
    assert found["DCGM devices"].level is Level.WARN
    assert stub.gpu_uuid(1) in found["DCGM devices"].cause


async def test_collectors_fields_without_dcgm_values_are_named(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "collectors.csv"
    path.write_text("DCGM_FI_DEV_GPU_TEMP, gauge, t\n69, gauge, slices\n300, gauge, ecc\n1077, gauge, c2c\n")
    node.block.override(1077, dcgm_stub.BLANK, code=2)
    with node.engine() as engine:
        found = await node.findings(engine.address, collectors=path)
    assert found["collectors"].level is Level.OK
    reported = found["DCGM fields"]
    assert reported.level is Level.WARN
    assert reported.cause.startswith("no GPU has a value of ")
    assert "ECC" in reported.cause
    assert "C2C" in reported.cause
    assert "SLICES" not in reported.cause


async def test_hanging_engine_does_not_block_the_doctor(node: Node) -> None:
    with node.engine() as engine:
        engine.stop()
        started = time.monotonic()
        found = await node.findings(engine.address)
        assert time.monotonic() - started < 30
        engine.resume()
    assert found["DCGM engine"].level is Level.WARN
    assert "does not answer" in found["DCGM engine"].cause
    assert found["driver"].level is Level.OK
    alone = await node.findings(engine.address, source="dcgm")
    assert alone["DCGM engine"].level is Level.FAIL


async def test_embedded_engine_is_reported_as_embedded(node: Node) -> None:
    found = await node.findings("embedded")
    assert found["DCGM engine"].cause.startswith("embedded: DCGM 4.6.0, first reading after ")
    assert found["DCGM devices"].level is Level.OK


async def test_slow_engine_is_reported_as_slower_than_the_interval(node: Node) -> None:
    node.block.slow_micros = 150_000
    with node.engine() as engine:
        found = await node.findings(engine.address)
    assert found["DCGM engine"].level is Level.WARN
    assert "longer than the sample interval of 0.2 s" in found["DCGM engine"].cause


async def test_refused_field_is_reported_and_other_findings_continue(node: Node) -> None:
    node.block.refused_field, node.block.refused_code = 155, -24
    with node.engine() as engine:
        found = await node.findings(engine.address)
    assert found["DCGM refusals"].level is Level.WARN
    assert "limit reached (" in found["DCGM refusals"].cause
    assert found["DCGM profiling"].level is Level.OK


async def test_engine_without_values_is_not_to_be_restarted(node: Node) -> None:
    with node.engine() as engine:
        node.block.pause()
        found = await node.findings(engine.address, source="dcgm")
    assert found["DCGM engine"].level is Level.FAIL
    assert "has 2 GPUs and gives no values" in found["DCGM engine"].cause
    assert "wait for the diagnosis to end" in found["DCGM engine"].cause
    assert not [one for one in found.values() if "restart" in one.fix], "a restart would abort the diagnosis"


async def test_engine_without_room_for_a_group_is_reported_without_blaming_a_gpu(node: Node) -> None:
    node.block.foreign_groups = 64
    with node.engine() as engine:
        found = await node.findings(engine.address, source="dcgm")
    assert found["DCGM engine"].level is Level.FAIL
    assert "no room for another group" in found["DCGM engine"].cause
    assert not [one for one in found.values() if "kernel log" in one.fix or "all 0 GPUs" in one.cause]
