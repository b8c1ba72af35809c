"""Checks DCGM: library, host engine, devices against NVML's, profiling and fields."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from exporter.config import AgentConfig
from exporter.doctor import machine
from exporter.doctor.findings import Finding, Surroundings, fail, interval_seconds, ok, some, warn
from exporter.gpu.dcgm.engine import no_values
from exporter.gpu.merge import of_one_machine
from exporter.gpu.worker import child_command
from exporter.model import DeviceState, Field, GpuReading, ProfilingState, Reading, SourceState
from exporter.model.fields import PROFILING

_ENGINE, _REFUSALS, _DEVICES, _PROFILING, _FIELDS = (
    f"DCGM {what}" for what in ("engine", "refusals", "devices", "profiling", "fields")
)
_OF_OTHER_CHECKS = frozenset(
    f"dcgm_{reason}"
    for reason in (
        # With the fields of the file, where they are rows of it.
        *("unknown_field", "binary_field", "field_of_other_entity"),
        # Noise of the counters, that is put right.
        "clamped",
        # With the profiling.
        *("module_not_loaded", "paused", "profiling_not_supported", "profiling_library_error", "in_use"),
        *("requires_root", "driver_too_old"),
    )
)
_ENOUGH_READINGS = 4
"""The first reading of a profiling field is blank, and some fields are slower than the others."""
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
"""By state, the one that can be fixed at once first."""


async def examine(around: Surroundings, fields: Collection[Field]) -> tuple[list[Finding | None], Reading | None]:
    """Return whether the engine works, and its last reading; ``None`` where there was none.

    Args:
        around: The node.
        fields: What is asked for.
    """
    config = around.config
    # Alone it is all there is; with NVML the agent continues without it.
    bad = fail if config.sampling.source == "dcgm" else warn
    command = around.dcgm_command or child_command(interval_seconds(config), fields, config.sampling.dcgm_address)
    heard = await machine.listen(around, "dcgm", command, enough=_ENOUGH_READINGS)
    if heard.last is None:
        return [bad(_ENGINE, *_trouble(config, heard, around.driver_deadline_seconds))], None
    if not any(_has_values(gpu) for gpu in heard.last.gpus):
        count = len(heard.last.gpus)
        return [bad(_ENGINE, str(no_values(config.sampling.dcgm_address, count)), "")], heard.last
    engine = _engine(config, heard.last, heard.first_after_seconds, around.wall())
    return [engine, refusals(heard.errors)], heard.last


def _has_values(gpu: GpuReading) -> bool:
    """Return whether an engine has values of a GPU, or a reason why not."""
    return bool(gpu.values) or gpu.state is not DeviceState.UP or any(part.values for part in gpu.instances)


def refusals(errors: Mapping[str, int]) -> Finding | None:
    """What the engine refused or left stale; ``None`` where all went well, or another check shows why.

    Args:
        errors: Counts by reason.
    """
    reasons = [
        f"{reason.removeprefix('dcgm_').replace('_', ' ')} ({count})"
        for reason, count in sorted(errors.items())
        if reason not in _OF_OTHER_CHECKS
    ]
    if not reasons:
        return None
    fix = "what is refused is absent, the rest goes on; docs/dcgm.md has the reasons, the engine's log more"
    return warn(_REFUSALS, f"refused, by reason: {', '.join(reasons)}", fix)


def _trouble(config: AgentConfig, heard: machine.ProbeAnswer, deadline_seconds: float) -> tuple[str, str]:
    """What is wrong with the engine, and its fix where the child has not said it itself."""
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


def devices(dcgm: Reading, nvml: Reading | None) -> Finding:
    """The engine's GPUs and instances must be this node's, and all of them.

    Args:
        dcgm: Of the engine.
        nvml: ``None`` where NVML is not asked or does not work: then nothing can be compared.
    """
    theirs, ours = _uuids([dcgm]), _uuids([nvml] if nvml else [])
    if not dcgm.gpus:
        return warn(
            _DEVICES,
            "the engine has no GPU",
            "it was started without a driver: restart it (systemctl restart nvidia-dcgm)",
        )
    missing = ours - theirs
    if nvml and not of_one_machine(nvml, dcgm):
        fix = "it is another node's engine: name this node's (a Service needs internalTrafficPolicy: Local)"
        return warn(_DEVICES, f"none of its {len(dcgm.gpus)} GPUs is one of NVML's {_count(nvml)}", fix)
    if missing:
        fix = "restart the engine (systemctl restart nvidia-dcgm), and see that its container is shown all GPUs"
        return warn(_DEVICES, f"of NVML's {_count(nvml)} it has not {some(sorted(missing), _SHOWN)}", fix)
    if bad := machine.not_up(dcgm):
        return warn(_DEVICES, f"{bad}; the others go on", "see the kernel log, and: dcgmi discovery -l")
    return ok(_DEVICES, machine.by_model(dcgm) + (", as NVML has" if ours else ""))


def _uuids(readings: Iterable[Reading]) -> set[str]:
    gpus = [gpu for reading in readings for gpu in reading.gpus if gpu.state is not DeviceState.MISSING]
    return {gpu.gpu.uuid for gpu in gpus} | {part.instance.uuid for gpu in gpus for part in gpu.instances}


def _count(reading: Reading | None) -> str:
    return f"{len(reading.gpus)} GPUs{machine.instances(reading)}" if reading else ""


def profiling(dcgm: Reading, nvml: Reading | None) -> Finding | None:
    """Whether engines are measured, GPU by GPU; ``None`` where DCGM was not asked that.

    Where NVML measures them itself, DCGM's word does not matter.
    """
    measured = {gpu.gpu.uuid for gpu in nvml.gpus if machine.has_engine(gpu)} if nvml else set()
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
    """Whether what the collectors file has for DCGM alone can be had; ``None`` where it has nothing of that kind.

    Args:
        rows: Name in the file by field, of what only DCGM measures.
        dcgm: Of the engine.
    """
    # Why the counters of engines are absent is a finding of the profiling.
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
