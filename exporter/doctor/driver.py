"""Checks of the driver, made in a child process with a deadline: a call into it can hang for ever."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from exporter.doctor.finding import Finding, fail, ok, warn
from exporter.model import DeviceState, Field, GpuReading, Reading, SourceState
from exporter.sources.worker import Worker

_LOOK_SECONDS = 0.05
_ENOUGH_READINGS = 3
"""Rates and engine counters are differences: the first reading cannot have them."""
_BAD_STATES = frozenset({SourceState.FAILED, SourceState.HUNG, SourceState.DIED})


async def read(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    interval_seconds: float,
    deadline_seconds: float,
    clock: Callable[[], float],
) -> tuple[Finding, Reading | None]:
    """How the driver does, and its last reading; ``None`` where there was none within the deadline."""
    worker = Worker(
        name="nvml",
        command=command,
        interval_seconds=interval_seconds,
        # Longer than this check's own: one of the two must decide, and restarting is not wanted here.
        deadline_seconds=2 * deadline_seconds,
        start_deadline_seconds=2 * deadline_seconds,
        env=env,
        clock=clock,
    )
    task = asyncio.ensure_future(worker.run())
    readings: list[Reading] = []
    loop = asyncio.get_running_loop()
    start = loop.time()
    first_after = 0.0
    try:
        while loop.time() - start < deadline_seconds and len(readings) < _ENOUGH_READINGS and not task.done():
            await asyncio.sleep(_LOOK_SECONDS)
            taken = worker.take()
            if taken and not readings:
                first_after = loop.time() - start
            readings += taken
            if worker.status.state in _BAD_STATES:
                break
        status = worker.status
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    if not readings:
        cause = status.message or status.reason.replace("_", " ") or f"no answer within {deadline_seconds:g} s"
        mend = "" if status.message else "see the kernel log: dmesg | grep -i nvrm"
        return fail("driver", cause, mend), None
    last = readings[-1]
    version = f"driver {last.driver_version or 'of unknown version'}"
    return ok("driver", f"{version}, first reading after {first_after:.1f} s"), last


def devices(reading: Reading) -> Finding:
    """Every GPU that the driver lists must be up."""
    bad = [gpu for gpu in reading.gpus if gpu.state is not DeviceState.UP]
    if bad:
        told = ", ".join(f"GPU {gpu.gpu.index} {gpu.state.value.replace('_', ' ')}" for gpu in bad)
        return fail(
            "devices", f"{told}; the others go on", "reset it (nvidia-smi --gpu-reset -i N) or restart the node"
        )
    if not reading.gpus:
        return fail(
            "devices", "the driver lists no GPU", "check lspci and the kernel log; set NVIDIA_VISIBLE_DEVICES=all"
        )
    models = Counter(gpu.gpu.model for gpu in reading.gpus)
    instances = sum(len(gpu.instances) for gpu in reading.gpus)
    parts = f", {instances} MIG instances" if instances else ""
    return ok("devices", ", ".join(f"{count} x {model}" for model, count in sorted(models.items())) + parts)


def activity(reading: Reading) -> Finding:
    """Where activity comes from: engine counters where there are some, else utilisation, else nowhere."""
    up = [gpu for gpu in reading.gpus if gpu.state is DeviceState.UP]
    blind = sum(not _is_measured(gpu) for gpu in up)
    engine = sum(_has_engine(gpu) for gpu in up)
    if blind:
        return warn(
            "activity",
            f"{blind} of {len(up)} GPUs have no activity for at least one device, which shows as unknown",
            "MIG before Hopper has none without DCGM; elsewhere the driver may refuse profiling: see dmesg",
        )
    if engine < len(up):
        return ok("activity", f"engine counters on {engine} of {len(up)} GPUs, NVML utilisation on the others")
    return ok("activity", f"engine counters on all {len(up)} GPUs")


def _has_engine(reading: GpuReading) -> bool:
    parts = [part.values for part in reading.instances] or [reading.values]
    return all(Field.PROF_GR_ENGINE_ACTIVE in values for values in parts)


def _is_measured(reading: GpuReading) -> bool:
    return _has_engine(reading) or (not reading.instances and Field.GPU_UTIL in reading.values)


def processes(reading: Reading) -> Finding:
    """The process list divides a shared device between its holders."""
    up = [gpu for gpu in reading.gpus if gpu.state is DeviceState.UP]
    silent = sum(gpu.processes is None and all(part.processes is None for part in gpu.instances) for gpu in up)
    if silent:
        return warn(
            "processes", f"{silent} of {len(up)} GPUs do not list their processes", "set hostPID: true and run as uid 0"
        )
    count = sum(len(gpu.processes or ()) + sum(len(part.processes or ()) for part in gpu.instances) for gpu in up)
    return ok("processes", f"{count} processes listed")
