"""The doctor on DCGM: library, engine, devices against NVML's, profiling, fields, and the hint without DCGM."""

import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from page_support import configured

from exporter.cli import main
from exporter.config import AgentConfig, load_agent
from exporter.config.types import Listen
from exporter.doctor import checks, findings, machine, sources
from exporter.doctor.checks import layer_agreement
from exporter.doctor.findings import Finding, Level
from exporter.gpu import wire
from exporter.gpu.merge import merge
from exporter.model.devices import (
    DeviceState,
    Gpu,
    GpuReading,
    MigInstance,
    MigReading,
    ProfilingState,
    Reading,
    SourceState,
    SourceStatus,
)
from exporter.model.fields import Field

SPEAK = "import sys, time; print(end=sys.argv[1], flush=True); time.sleep(60)"
ENGINE = Field.PROF_GR_ENGINE_ACTIVE


def settings(**changes: object) -> AgentConfig:
    return configured(load_agent({}, {}, check_paths=False), **{"dcgm_address": "localhost:5555", **changes})


def gpu(index: int = 0, *, instances: int = 0, host: int = 0) -> Gpu:
    return Gpu(
        uuid=f"GPU-{host}000000{index}-1111-2222-3333-444444444444",
        index=index,
        minor=index,
        model="NVIDIA A100-SXM4-80GB",
        pci_bus_id=f"00000000:0{index + 1}:00.0",
        mig_enabled=bool(instances),
    )


def part(parent: Gpu, number: int, **values: float) -> MigReading:
    instance = MigInstance(
        uuid=f"MIG-{parent.index}-{number}",
        parent_uuid=parent.uuid,
        gpu_instance_id=number,
        compute_instance_id=0,
        profile="1g.10gb",
        compute_slices=1,
        memory_slices=1,
    )
    return MigReading(instance=instance, values={Field[name]: value for name, value in values.items()})


def one(index: int = 0, *, instances: int = 0, host: int = 0, **changes: object) -> GpuReading:
    identity = gpu(index, instances=instances, host=host)
    parts = tuple(part(identity, number) for number in range(instances))
    return replace(GpuReading(gpu=identity, values={Field.GPU_UTIL: 5}, instances=parts), **changes)


def reading(*gpus: GpuReading, source: str = "dcgm") -> Reading:
    return Reading(source=source, taken_at_seconds=100.0, duration_seconds=0.01, dcgm_version="4.6.0", gpus=gpus)


def nvml(*gpus: GpuReading) -> Reading:
    return reading(*gpus, source="nvml")


def test_engine_with_the_same_gpus_and_instances_as_nvml_is_ok() -> None:
    found = sources.engine_devices(reading(one(0, instances=2), one(1)), nvml(one(0, instances=2), one(1)))
    assert (found.level, found.cause) == (Level.OK, "2 x NVIDIA A100-SXM4-80GB, 2 MIG instances, as NVML has")


def test_engine_without_an_nvml_instance_is_a_warning_with_its_uuid() -> None:
    found = sources.engine_devices(reading(one(0, instances=1)), nvml(one(0, instances=3)))
    assert found.level is Level.WARN
    assert found.cause == "of NVML's 1 GPUs, 3 MIG instances it has not MIG-0-1, MIG-0-2"
    assert "restart nvidia-dcgm" in found.fix


def test_engine_of_another_node_is_a_warning_with_the_service_fix() -> None:
    found = sources.engine_devices(reading(one(0, host=7), one(1, host=7)), nvml(one(0), one(1)))
    assert (found.level, "none of its 2 GPUs" in found.cause) == (Level.WARN, True)
    assert "internalTrafficPolicy: Local" in found.fix


def test_engine_without_gpus_or_with_a_lost_gpu_is_a_warning() -> None:
    assert "restart" in sources.engine_devices(reading(), nvml(one())).fix
    lost = sources.engine_devices(reading(one(0), one(1, state=DeviceState.LOST)), None)
    assert (lost.level, "GPU 1 lost" in lost.cause) == (Level.WARN, True)
    assert sources.engine_devices(reading(one()), None) == Finding(
        name="DCGM devices", level=Level.OK, cause="1 x NVIDIA A100-SXM4-80GB"
    )


@pytest.mark.parametrize(
    ("state", "level", "words"),
    [
        (ProfilingState.RUNNING, Level.OK, ""),
        (ProfilingState.PAUSED, Level.WARN, "dcgmi profile --resume"),
        (ProfilingState.NO_MODULE, Level.WARN, "datacenter-gpu-manager-4-proprietary"),
        (ProfilingState.NO_PERMISSION, Level.WARN, "CAP_SYS_ADMIN"),
        (ProfilingState.REFUSED, Level.WARN, "a profiler that has the counters"),
        (ProfilingState.UNSUPPORTED, Level.OK, ""),
    ],
)
def test_each_profiling_state_has_its_fix(state: ProfilingState, level: Level, words: str) -> None:
    found = sources.profiling(reading(one(profiling=state)), nvml(one()))
    assert found is not None
    assert (found.level, words in found.fix) == (level, True)


def test_profiling_missing_in_dcgm_but_measured_by_nvml_is_ok() -> None:
    hopper = one(0, values={ENGINE: 0.5})
    found = sources.profiling(reading(one(0, profiling=ProfilingState.NO_MODULE)), nvml(hopper))
    assert found == Finding(
        name="DCGM profiling", level=Level.OK, cause="running on 0 of 1 GPUs; NVML measures the other 1 by itself"
    )
    mixed = reading(one(0, profiling=ProfilingState.NO_MODULE), one(1, profiling=ProfilingState.NO_MODULE))
    blind = sources.profiling(mixed, nvml(hopper, one(1)))
    assert blind is not None
    assert (blind.level, "1 no module" in blind.cause) == (Level.WARN, True)


def test_unrequested_profiling_gives_no_finding() -> None:
    assert sources.profiling(reading(one()), None) is None


def test_collectors_fields_without_values_are_named() -> None:
    rows = {Field(300): "DCGM_FI_DEV_ECC_CURRENT", Field(63): "CAPABILITY"}
    found = sources.fields(rows, reading(one(values={Field(63): 8})))
    assert found is not None
    assert found.level is Level.WARN
    assert found.cause == "no GPU has a value of DCGM_FI_DEV_ECC_CURRENT"
    assert sources.fields({}, reading(one())) is None


def test_profiling_field_is_not_reported_again_while_profiling_is_paused() -> None:
    rows = {Field(1013): "DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE"}
    paused = reading(one(profiling=ProfilingState.PAUSED))
    assert sources.fields(rows, paused) is None
    running = sources.fields(rows, reading(one(profiling=ProfilingState.RUNNING)))
    assert running is not None
    assert running.level is Level.WARN


def speaking(*messages: Reading | SourceStatus) -> list[str]:
    lines = b"".join(wire.encode(message) for message in messages)
    return [sys.executable, "-c", SPEAK, lines.decode()]


async def engine_finding(
    command: list[str], config: AgentConfig, *, deadline: float = 20.0, clock: Callable[[], float] = time.time
) -> tuple[list[Finding], Reading | None]:
    around = findings.Surroundings(
        config=config,
        wall=clock,
        monotonic=time.monotonic,
        dcgm_command=command,
        simulated=True,
        driver_deadline_seconds=deadline,
    )
    found, last = await sources.engine(around, ())
    return [one for one in found if one], last


async def test_working_engine_is_ok_with_version_and_age_of_the_reading() -> None:
    last = reading(one())
    (found,), got = await engine_finding(speaking(*[last] * 4), settings(), clock=lambda: 100.4)
    assert (found.level, found.name, got) == (Level.OK, "DCGM engine", last)
    assert "localhost:5555: DCGM 4.6.0, first reading after " in found.cause
    assert found.cause.endswith("the last one 0.4 s old")


async def test_engine_slower_than_the_interval_is_a_warning() -> None:
    slow = replace(reading(one()), duration_seconds=1.6)
    (found,), _ = await engine_finding(speaking(*[slow] * 4), settings())
    assert (found.level, "--sample-interval" in found.fix) == (Level.WARN, True)
    assert "it took 1.6 s, longer than the sample interval of 1 s" in found.cause


async def test_engine_failure_is_a_warning_with_nvml_and_a_fail_without() -> None:
    refused = SourceStatus(
        name="dcgm", state=SourceState.FAILED, reason="dcgm_refused", message="nobody listens; start"
    )
    for source, level in (("auto", Level.WARN), ("dcgm", Level.FAIL)):
        (found,), last = await engine_finding(speaking(refused), settings(source=source))
        assert (found.level, found.cause, last) == (level, "nobody listens; start", None)


async def test_hanging_engine_is_reported_within_the_deadline() -> None:
    started = time.monotonic()
    silent = [sys.executable, "-c", "import time; time.sleep(60)"]
    (found,), last = await engine_finding(silent, settings(), deadline=0.5)
    assert time.monotonic() - started < 10
    assert (found.cause, last) == ("localhost:5555: no answer within 0.5 s", None)
    assert "restart nvidia-dcgm" in found.fix


async def test_dead_child_is_reported_with_its_signal() -> None:
    (found,), _ = await engine_finding([sys.executable, "-c", "import os; os.abort()"], settings())
    assert (found.level, "SIGABRT" in found.cause) == (Level.WARN, True)
    assert "--log-level debug" in found.fix


def test_unmeasured_instances_suggest_dcgm_unless_in_use() -> None:
    blind = nvml(one(0, instances=2))
    assert "--dcgm-address" in sources.activity(blind).fix
    assert "--dcgm-address" not in sources.activity(blind, dcgm=True).fix
    whole, _ = merge(None, reading(replace(one(), instances=(part(gpu(), 0, PROF_GR_ENGINE_ACTIVE=0.5),))))
    assert whole is not None
    found = sources.activity(whole, dcgm=True)
    assert (found.level, found.cause) == (Level.OK, "engine counters on all 1 GPUs, on 1 of them by DCGM")


def test_dcgm_only_rows_are_a_warning_without_dcgm(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("DCGM_FI_DEV_GPU_TEMP, gauge, t\n1013, gauge, tensor\n")
    found, _ = machine.collectors(settings(collectors=path, dcgm_address=""))
    assert (found.level, "--dcgm-address" in found.fix) == (Level.WARN, True)
    assert found.cause.startswith("only DCGM measures ")
    assert machine.collectors(settings(collectors=path))[0].level is Level.OK


def test_layers_finding_names_dcgm_if_dcgm_is_the_only_source() -> None:
    node = findings.Surroundings(config=settings(), wall=time.time, monotonic=time.monotonic)
    found = layer_agreement(replace(node, config=configured(node.config, source="dcgm")), None)
    assert "DCGM does not work here" in found.cause
    assert "NVML" not in found.cause


async def test_listening_engine_port_is_suggested() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        found = await sources.hint(port)
    assert found is not None
    assert (found.level, f"--dcgm-address localhost:{port}" in found.cause) == (Level.OK, True)
    assert await sources.hint(port) is None


async def test_dcgm_alone_has_no_nvml_findings(tmp_path: Path) -> None:
    config = settings(source="dcgm", enabled=False, proc_root=tmp_path, listen=Listen("", 0))
    last = reading(one(profiling=ProfilingState.RUNNING))
    around = findings.Surroundings(
        config=config,
        wall=time.time,
        monotonic=time.monotonic,
        dcgm_command=speaking(*[last] * 4),
        simulated=True,
    )
    found = {finding.name: finding for finding in (await checks.examine(around)).findings}
    assert not {"device nodes", "driver", "devices"} & set(found)
    assert found["DCGM devices"].level is Level.OK
    assert "--source auto" in found["processes"].fix
    assert "driver" not in found["activity"].cause


def findings_of(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Return exit code and findings of the doctor on a simulated node."""
    code = main(["doctor", "--format", "json", "--listen", "127.0.0.1:0", "--sample-interval", "200ms", *options])
    return code, {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}


def test_partitioned_a100_is_unmeasured_without_dcgm_and_measured_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    _, without = findings_of(capsys, "--simulate", "a100-mig")
    assert without["activity"]["level"] == "warn"
    assert "--dcgm-address HOST:5555" in without["activity"]["fix"]
    assert not [name for name in without if name.startswith("DCGM")]
    code, beside = findings_of(capsys, "--simulate", "a100-mig", "--dcgm-address", "localhost")
    assert {name: one["level"] for name, one in beside.items() if name.startswith("DCGM")} == {
        "DCGM engine": "ok",
        "DCGM devices": "ok",
        "DCGM profiling": "ok",
    }
    assert (code, beside["activity"]["level"], "by DCGM" in beside["activity"]["cause"]) == (0, "ok", True)


def test_long_sample_interval_does_not_leave_the_doctor_without_activity(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, found = findings_of(capsys, "--simulate", "a100-mig", "--dcgm-address", "localhost", "--sample-interval", "30s")
    assert found["activity"]["cause"] == "engine counters on all 2 GPUs, on 2 of them by DCGM"
    _, found = findings_of(capsys, "--simulate", "capture-h100-mig", "--sample-interval", "30s")
    assert found["activity"]["level"] == "ok"


def test_unsupported_dcgm_exporter_options_are_findings(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings_of(capsys, "--simulate", "a100-mig", "-d", "g+i", "--enable-pprof", "-k=true")
    assert (code, found["options"]["level"]) == (0, "warn")
    assert found["options"]["cause"] == (
        "of dcgm-exporter, without an equivalent here, not used: -d (every GPU and instance is measured),"
        " --enable-pprof (there is no profiling over HTTP)"
    )


def test_simulated_node_is_examined_through_dcgm_alone(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings_of(capsys, "--simulate", "a100-mig", "--source", "dcgm")
    assert (code, found["DCGM engine"]["level"], "driver" in found) == (0, "ok", False)
    assert found["activity"]["level"] == "ok"
    assert found["kubelet and driver"]["level"] == "ok"


def test_simulated_engine_listens_only_at_its_address(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = findings_of(capsys, "--simulate", "a100-mig", "--dcgm-address", "localhost:5556")
    assert (code, found["DCGM engine"]["level"]) == (0, "warn")
    assert "nothing listens at localhost:5556" in found["DCGM engine"]["cause"]
    code, found = findings_of(capsys, "--simulate", "a100-mig", "--dcgm-address", "localhost:5556", "--source", "dcgm")
    assert (code, found["DCGM engine"]["level"]) == (1, "fail")
