"""Checks the sources of readings: the driver, and DCGM's engine, its devices against NVML's, profiling and fields."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from exporter.config import AgentConfig
from exporter.doctor.findings import Finding, Surroundings, fail, interval_seconds, ok, warn
from exporter.gpu.dcgm.engine import problem
from exporter.gpu.merge import of_one_machine
from exporter.gpu.worker import Worker, child_command
from exporter.model.devices import DeviceState, GpuReading, ProfilingState, Reading, SourceState, SourceStatus
from exporter.model.fields import PROFILING, Field
from exporter.model.formatting import some

_LOOK_SECONDS = 0.05
_BAD_STATES = frozenset({SourceState.FAILED, SourceState.HUNG, SourceState.DIED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """Readings and state of a source's child."""

    last: Reading | None
    """The last reading; ``None`` without a reading within the deadline."""
    first_after_seconds: float
    status: SourceStatus
    errors: Mapping[str, int]
    """Errors of all readings, by reason."""

    def trouble(self, deadline_seconds: float) -> str:
        """Return why there is no reading, in one line."""
        status = self.status
        return status.message or status.reason.replace("_", " ") or f"no answer within {deadline_seconds:g} s"


async def listen(around: Surroundings, name: str, command: Sequence[str], *, enough: int) -> ProbeAnswer:
    """Run a source's child until it has made enough readings, fails, or reaches the deadline.

    Args:
        around: The node; its deadline covers all readings together.
        name: Name of the source.
        command: Command line of the child.
        enough: Number of readings.
    """
    deadline_seconds = around.driver_deadline_seconds
    worker = Worker(
        name=name,
        command=command,
        interval_seconds=interval_seconds(around.config),
        # Longer than the check's own deadline, so the worker does not restart its child.
        deadline_seconds=2 * deadline_seconds,
        start_deadline_seconds=2 * deadline_seconds,
        env=around.worker_env,
    )
    readings: list[Reading] = []
    now = asyncio.get_running_loop().time
    start, first_after = now(), 0.0
    task = asyncio.ensure_future(worker.run())
    try:
        while now() - start < deadline_seconds and len(readings) < enough and not task.done():
            await asyncio.sleep(_LOOK_SECONDS)
            taken = worker.take()
            if taken and not readings:
                first_after = now() - start
            readings += taken
            if worker.status.state in _BAD_STATES:
                break
        status = worker.status
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    errors = sum((Counter(reading.errors) for reading in readings), Counter[str]())
    last = readings[-1] if readings else None
    return ProbeAnswer(last=last, first_after_seconds=first_after, status=status, errors=errors)


_ENOUGH_OF_DRIVER = 3
"""Number of readings: rates and engine counters are differences, which the first reading does not have."""
_BLIND = "see the lines of DCGM; the driver may refuse profiling, too: see dmesg"
_BLIND_WITHOUT_DCGM = (
    "MIG before Hopper is measured by DCGM alone: run its host engine and name it, --dcgm-address HOST:5555"
    " (docs/dcgm.md); elsewhere the driver may refuse profiling: see dmesg"
)


async def driver(around: Surroundings, fields: Collection[Field]) -> tuple[Finding, Reading | None]:
    """Check the driver; also return its last reading, or ``None`` without one within the deadline."""
    command = around.worker_command or child_command(interval_seconds(around.config), fields)
    heard = await listen(around, "nvml", command, enough=_ENOUGH_OF_DRIVER)
    if heard.last is None:
        fix = "" if heard.status.message else "see the kernel log: dmesg | grep -i nvrm"
        return fail("driver", heard.trouble(around.driver_deadline_seconds), fix), None
    version = f"driver {heard.last.driver_version or 'of unknown version'}"
    return ok("driver", f"{version}, first reading after {heard.first_after_seconds:.1f} s"), heard.last


def driver_devices(reading: Reading) -> Finding:
    """Check that each GPU of the driver is up."""
    if bad := _not_up(reading):
        return fail("devices", f"{bad}; others continue", "reset it (nvidia-smi --gpu-reset -i N) or restart the node")
    if not reading.gpus:
        fix = "check lspci and the kernel log; set NVIDIA_VISIBLE_DEVICES=all"
        return fail("devices", "the driver lists no GPU", fix)
    return ok("devices", _by_model(reading))


def _not_up(reading: Reading) -> str:
    """Name the GPUs that are not up, each with its state."""
    bad = [gpu for gpu in reading.gpus if gpu.state is not DeviceState.UP]
    return ", ".join(f"GPU {gpu.gpu.index} {gpu.state.value.replace('_', ' ')}" for gpu in bad)


def _by_model(reading: Reading) -> str:
    """Count the GPUs of each model, and the MIG instances."""
    models = Counter(gpu.gpu.model for gpu in reading.gpus)
    return ", ".join(f"{count} x {model}" for model, count in sorted(models.items())) + _instances(reading)


def _instances(reading: Reading) -> str:
    """Count the MIG instances; empty if there are none."""
    count = sum(len(gpu.instances) for gpu in reading.gpus)
    return f", {count} MIG instances" if count else ""


def activity(reading: Reading, *, dcgm: bool = False) -> Finding:
    """Report the source of activity: engine counters, utilisation, or none.

    Args:
        reading: Merged reading of all sources.
        dcgm: Whether DCGM is a source.
    """
    up = [gpu for gpu in reading.gpus if gpu.state is DeviceState.UP]
    if not up:
        return warn("activity", "no GPU is up, so that none is measured", "see the checks above")
    blind = sum(not _is_measured(gpu) for gpu in up)
    engine = sum(_has_engine(gpu) for gpu in up)
    if blind:
        cause = f"{blind} of {len(up)} GPUs have no activity for at least one device, which shows as unknown"
        return warn("activity", cause, _BLIND if dcgm else _BLIND_WITHOUT_DCGM)
    by_dcgm = sum(_has_engine(gpu) and _is_of_dcgm(gpu) for gpu in up)
    by = f", on {by_dcgm} of them by DCGM" if by_dcgm else ""
    if engine < len(up):
        return ok("activity", f"engine counters on {engine} of {len(up)} GPUs{by}, utilisation on the others")
    return ok("activity", f"engine counters on all {len(up)} GPUs{by}")


def _is_of_dcgm(reading: GpuReading) -> bool:
    parts = [part.from_dcgm for part in reading.instances] or [reading.from_dcgm]
    return any(Field.PROF_GR_ENGINE_ACTIVE in fields for fields in parts)


def _has_engine(reading: GpuReading) -> bool:
    """Return whether a GPU, or each of its instances, has engine counters."""
    parts = [part.values for part in reading.instances] or [reading.values]
    return all(Field.PROF_GR_ENGINE_ACTIVE in values for values in parts)


def _is_measured(reading: GpuReading) -> bool:
    return _has_engine(reading) or (not reading.instances and Field.GPU_UTIL in reading.values)


def processes(reading: Reading) -> Finding:
    """Check the process lists, by which shared devices are divided; only NVML has them."""
    up = [gpu for gpu in reading.gpus if gpu.state is DeviceState.UP]
    silent = sum(gpu.processes is None and all(part.processes is None for part in gpu.instances) for gpu in up)
    if silent:
        cause = f"{silent} of {len(up)} GPUs do not list their processes"
        return warn("processes", cause, "set hostPID: true and run as uid 0")
    count = sum(len(gpu.processes or ()) + sum(len(part.processes or ()) for part in gpu.instances) for gpu in up)
    return ok("processes", f"{count} processes listed")


_ENGINE, _REFUSALS, _DEVICES, _PROFILING, _FIELDS = (
    f"DCGM {what}" for what in ("engine", "refusals", "devices", "profiling", "fields")
)
_OF_OTHER_CHECKS = (
    # With the fields of the file, where they are rows of it.
    *("unknown_field", "binary_field", "field_of_other_entity"),
    # Noise of the counters, that is put right.
    "clamped",
    # With the profiling.
    *("module_not_loaded", "paused", "profiling_not_supported", "profiling_library_error", "in_use"),
    *("requires_root", "driver_too_old"),
)
_ENOUGH_OF_ENGINE = 4
"""Number of readings: the first one of a profiling field is blank, and some fields are slower than others."""
_USUAL_HOST, _USUAL_PORT = "localhost", 5555
_PROBE_SECONDS = 0.5
_SHOWN = 5

_FIXES: Mapping[ProfilingState, str] = {
    ProfilingState.PAUSED: "the client that paused it may still need the counters; then: dcgmi profile --resume",
    ProfilingState.UNSUPPORTED: "DCGM measures no engines on this model; utilisation is what there is",
    ProfilingState.NO_MODULE: (
        "install NVIDIA's full package with the engine (datacenter-gpu-manager-4-proprietary; 3.x has it in"
        " datacenter-gpu-manager) and restart the engine"
    ),
    ProfilingState.NO_PERMISSION: (
        "run the engine as root with CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    ),
    ProfilingState.REFUSED: (
        "see the engine's log (/var/log/nv-hostengine.log): a profiler that has the counters must end first, an old"
        " driver be replaced"
    ),
}
"""Fix by state; states that are fixed at once come first."""


async def engine(around: Surroundings, fields: Collection[Field]) -> tuple[list[Finding | None], Reading | None]:
    """Check the engine; also return its last reading, or ``None`` without one.

    Args:
        around: The node.
        fields: Requested fields.
    """
    config = around.config
    # With NVML the agent continues without the engine.
    bad = fail if config.sampling.source == "dcgm" else warn
    command = around.dcgm_command or child_command(interval_seconds(config), fields, config.sampling.dcgm_address)
    heard = await listen(around, "dcgm", command, enough=_ENOUGH_OF_ENGINE)
    if heard.last is None:
        return [bad(_ENGINE, *_trouble(config, heard, around.driver_deadline_seconds))], None
    if not any(_has_values(gpu) for gpu in heard.last.gpus):
        count = len(heard.last.gpus)
        return [bad(_ENGINE, str(problem("dcgm_no_values", config.sampling.dcgm_address, gpus=count)), "")], heard.last
    judged = _engine(config, heard.last, heard.first_after_seconds, around.wall())
    return [judged, refusals(heard.errors)], heard.last


def _has_values(gpu: GpuReading) -> bool:
    """Return whether an engine has values of a GPU, or a reason why not."""
    return bool(gpu.values) or gpu.state is not DeviceState.UP or any(part.values for part in gpu.instances)


def refusals(errors: Mapping[str, int]) -> Finding | None:
    """Report what the engine refused or left stale; ``None`` without errors, or if other checks report them.

    Args:
        errors: Counts by reason.
    """
    counts = {reason.removeprefix("dcgm_"): count for reason, count in sorted(errors.items())}
    reasons = [f"{one.replace('_', ' ')} ({count})" for one, count in counts.items() if one not in _OF_OTHER_CHECKS]
    if not reasons:
        return None
    fix = "refused fields are absent, the rest continues; docs/dcgm.md has the reasons, the engine's log more"
    return warn(_REFUSALS, f"refused, by reason: {', '.join(reasons)}", fix)


def _trouble(config: AgentConfig, heard: ProbeAnswer, deadline_seconds: float) -> tuple[str, str]:
    """Return the engine's fault, and its fix if the child's message has none."""
    cause = heard.trouble(deadline_seconds)
    if heard.status.state is SourceState.DIED:
        fix = "install DCGM's client library of the engine's major version; --log-level debug shows what it wrote"
        return cause, fix
    if heard.status.message:
        return cause, ""
    return f"{config.sampling.dcgm_address}: {cause}", "it takes connections and does not answer: restart nvidia-dcgm"


def _engine(config: AgentConfig, last: Reading, first_after_seconds: float, now: float) -> Finding:
    interval = config.sampling.interval_seconds
    engine = (
        f"{config.sampling.dcgm_address}: DCGM {last.dcgm_version or 'of unknown version'}, first reading after"
        f" {first_after_seconds:.1f} s, the last one {max(now - last.taken_at_seconds, 0.0):.1f} s old"
    )
    if last.duration_seconds > interval:
        slow = f"{engine}; it took {last.duration_seconds:.1f} s, longer than the sample interval of {interval:g} s"
        return warn(_ENGINE, slow, "give it time (--sample-interval), or use the engine of this node")
    return ok(_ENGINE, engine)


def engine_devices(dcgm: Reading, nvml: Reading | None) -> Finding:
    """Check that the engine has all GPUs and instances of this node.

    Args:
        dcgm: The engine's reading.
        nvml: NVML's reading, for comparison; ``None`` if NVML is no source or does not work.
    """
    theirs, ours = _uuids([dcgm]), _uuids([nvml] if nvml else [])
    if not dcgm.gpus:
        fix = "it was started without a driver: restart it (systemctl restart nvidia-dcgm)"
        return warn(_DEVICES, "the engine has no GPU", fix)
    missing = ours - theirs
    if nvml and not of_one_machine(nvml, dcgm):
        fix = "it is another node's engine: name this node's (a Service needs internalTrafficPolicy: Local)"
        return warn(_DEVICES, f"none of its {len(dcgm.gpus)} GPUs is one of NVML's {_count(nvml)}", fix)
    if missing:
        fix = "restart the engine (systemctl restart nvidia-dcgm), and see that its container is shown all GPUs"
        return warn(_DEVICES, f"of NVML's {_count(nvml)} it has not {some(sorted(missing), _SHOWN)}", fix)
    if bad := _not_up(dcgm):
        return warn(_DEVICES, f"{bad}; others continue", "see the kernel log, and: dcgmi discovery -l")
    return ok(_DEVICES, _by_model(dcgm) + (", as NVML has" if ours else ""))


def _uuids(readings: Iterable[Reading]) -> set[str]:
    gpus = [gpu for reading in readings for gpu in reading.gpus if gpu.state is not DeviceState.MISSING]
    return {gpu.gpu.uuid for gpu in gpus} | {part.instance.uuid for gpu in gpus for part in gpu.instances}


def _count(reading: Reading | None) -> str:
    return f"{len(reading.gpus)} GPUs{_instances(reading)}" if reading else ""


def profiling(dcgm: Reading, nvml: Reading | None) -> Finding | None:
    """Check whether the engines of each GPU are measured; ``None`` if DCGM was not to profile.

    If NVML measures the engines of a GPU, DCGM need not.
    """
    measured = {gpu.gpu.uuid for gpu in nvml.gpus if _has_engine(gpu)} if nvml else set()
    up = [gpu for gpu in dcgm.gpus if gpu.state is DeviceState.UP]
    states = [gpu.profiling for gpu in up if gpu.profiling is not None]
    if not states:
        return None
    missing = Counter(gpu.profiling for gpu in up if gpu.profiling in _FIXES and gpu.gpu.uuid not in measured)
    running = states.count(ProfilingState.RUNNING)
    if not missing:
        others = len(states) - running
        spare = f"; NVML measures the other {others} by itself" if others else ""
        return ok(_PROFILING, f"running on {running} of {len(up)} GPUs{spare}")
    absent = ", ".join(f"{count} {state.value.replace('_', ' ')}" for state, count in missing.items() if state)
    state = next(state for state in _FIXES if state in missing)
    of = f"of {len(up)} GPUs {running} running, {absent}"
    if set(missing) == {ProfilingState.UNSUPPORTED}:
        return ok(_PROFILING, f"{of}: {_FIXES[state]}")
    return warn(_PROFILING, f"{of}: their engines are not measured", _FIXES[state])


def fields(rows: Mapping[Field, str], dcgm: Reading) -> Finding | None:
    """Check the rows of the collectors file that only DCGM measures; ``None`` without such rows.

    Args:
        rows: Name in the file by field.
        dcgm: The engine's reading.
    """
    # The check of the profiling reports absent counters of engines.
    measuring = any(gpu.profiling is ProfilingState.RUNNING for gpu in dcgm.gpus)
    judged = {field: name for field, name in rows.items() if measuring or field not in PROFILING}
    if not judged:
        return None
    had = {field for gpu in dcgm.gpus for field in (*gpu.values, *gpu.gpu.labels)}
    had |= {field for gpu in dcgm.gpus for part in gpu.instances for field in part.values}
    absent = [name for field, name in judged.items() if field not in had]
    if absent:
        fix = "take the rows out, or see why: dcgmi dmon -e ID (a newer DCGM has more; not every GPU has every field)"
        return warn(_FIELDS, f"no GPU has a value of {some(absent, _SHOWN)}", fix)
    return ok(_FIELDS, f"{some(tuple(judged.values()), _SHOWN)}: measured, which only DCGM does")


async def hint(port: int = _USUAL_PORT) -> Finding | None:
    """Report something that listens where an engine usually does; only for a node that does not use DCGM."""
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            _, writer = await asyncio.open_connection(_USUAL_HOST, port)
    except OSError:
        return None
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    where = f"{_USUAL_HOST}:{port}"
    return ok(_ENGINE, f"not in use; something listens on {where}: if it is an engine, --dcgm-address {where} adds it")
