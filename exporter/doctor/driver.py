"""Checks of the driver, and of what its readings tell of activity and processes."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from exporter.doctor import listening
from exporter.doctor.finding import Finding, fail, ok, warn
from exporter.model import DeviceState, Field, GpuReading, Reading

_ENOUGH_READINGS = 3
"""Rates and engine counters are differences: the first reading cannot have them."""
_BLIND = "see the lines of DCGM; the driver may refuse profiling, too: see dmesg"
_BLIND_WITHOUT_DCGM = (
    "MIG before Hopper is measured by DCGM alone: run its host engine and name it, --dcgm-address HOST:5555"
    " (docs/dcgm.md); elsewhere the driver may refuse profiling: see dmesg"
)


async def read(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    interval_seconds: float,
    deadline_seconds: float,
    clock: Callable[[], float],
) -> tuple[Finding, Reading | None]:
    """How the driver does, and its last reading; ``None`` where there was none within the deadline."""
    heard = await listening.listen(
        "nvml",
        command,
        env=env,
        interval_seconds=interval_seconds,
        deadline_seconds=deadline_seconds,
        enough=_ENOUGH_READINGS,
        clock=clock,
    )
    if heard.last is None:
        mend = "" if heard.status.message else "see the kernel log: dmesg | grep -i nvrm"
        return fail("driver", heard.trouble(deadline_seconds), mend), None
    version = f"driver {heard.last.driver_version or 'of unknown version'}"
    return ok("driver", f"{version}, first reading after {heard.first_after_seconds:.1f} s"), heard.last


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


def activity(reading: Reading, *, dcgm: bool = False) -> Finding:
    """Where activity comes from: engine counters where there are some, else utilisation, else nowhere.

    Args:
        reading: Of all sources together.
        dcgm: Whether DCGM is one of them.
    """
    up = [gpu for gpu in reading.gpus if gpu.state is DeviceState.UP]
    if not up:
        return warn("activity", "no GPU is up, so that none is measured", "see the checks above")
    blind = sum(not _is_measured(gpu) for gpu in up)
    engine = sum(_has_engine(gpu) for gpu in up)
    if blind:
        return warn(
            "activity",
            f"{blind} of {len(up)} GPUs have no activity for at least one device, which shows as unknown",
            _BLIND if dcgm else _BLIND_WITHOUT_DCGM,
        )
    by_dcgm = sum(_has_engine(gpu) and _is_of_dcgm(gpu) for gpu in up)
    by = f", on {by_dcgm} of them by DCGM" if by_dcgm else ""
    if engine < len(up):
        return ok("activity", f"engine counters on {engine} of {len(up)} GPUs{by}, utilisation on the others")
    return ok("activity", f"engine counters on all {len(up)} GPUs{by}")


def _is_of_dcgm(reading: GpuReading) -> bool:
    parts = [part.from_dcgm for part in reading.instances] or [reading.from_dcgm]
    return any(Field.PROF_GR_ENGINE_ACTIVE in fields for fields in parts)


def _has_engine(reading: GpuReading) -> bool:
    parts = [part.values for part in reading.instances] or [reading.values]
    return all(Field.PROF_GR_ENGINE_ACTIVE in values for values in parts)


def _is_measured(reading: GpuReading) -> bool:
    return _has_engine(reading) or (not reading.instances and Field.GPU_UTIL in reading.values)


def processes(reading: Reading) -> Finding:
    """The process list, which NVML alone has, divides a shared device between its holders."""
    up = [gpu for gpu in reading.gpus if gpu.state is DeviceState.UP]
    silent = sum(gpu.processes is None and all(part.processes is None for part in gpu.instances) for gpu in up)
    if silent:
        return warn(
            "processes", f"{silent} of {len(up)} GPUs do not list their processes", "set hostPID: true and run as uid 0"
        )
    count = sum(len(gpu.processes or ()) + sum(len(part.processes or ()) for part in gpu.instances) for gpu in up)
    return ok("processes", f"{count} processes listed")
