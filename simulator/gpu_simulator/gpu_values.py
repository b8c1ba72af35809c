"""The value of each field on a simulated GPU, in ``Field`` units, as a pure function of its truth."""

import re
from collections.abc import Callable, Mapping

from exporter.model import Field
from gpu_simulator.models import MIB, UTILISATION
from gpu_simulator.truth import Fault, GpuTruth, MigTruth, NodeTruth

FIRST_DRIVER: Mapping[Field, int] = {
    Field.NVLINK_COUNT_RX_ERRORS: 570,
    Field.NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS: 570,
    Field.NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS: 570,
    Field.NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS: 570,
    Field.GPU_RECOVERY_ACTION: 565,
    Field.CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS: 590,
    Field.CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS: 590,
    Field.CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS: 590,
}
"""First driver branch of the newer fields."""
_BAR1_PER_MEMORY_SLICE = 0.047186
"""Part of the board's BAR1 that an instance shows per memory slice, recorded on H100 with driver 590.48.01."""

_Reader = Callable[[GpuTruth], int | float | None]


def _percent(ratio: float) -> int:
    return round(min(max(ratio, 0.0), 1.0) * 100)


def _video_clock_mhz(gpu: GpuTruth) -> int:
    """Between the two points of the H100 capture: 765 MHz idle, 1545 MHz at the highest SM clock."""
    return max(765, round(1545 * gpu.sm_clock_mhz / max(gpu.model.max_sm_clock_mhz, 1)))


def _usable_mib(gpu: GpuTruth) -> float | None:
    total, reserved = read(gpu, Field.FB_TOTAL), read(gpu, Field.FB_RESERVED)
    return None if total is None or reserved is None else total - reserved


def _free_mib(gpu: GpuTruth) -> float | None:
    usable, used = _usable_mib(gpu), read(gpu, Field.FB_USED)
    return None if usable is None or used is None else max(usable - used, 0.0)


def _used_ratio(gpu: GpuTruth) -> float | None:
    usable, used = _usable_mib(gpu), read(gpu, Field.FB_USED)
    return None if not usable or used is None else used / usable


_READERS: Mapping[Field, _Reader] = {
    Field.BAR1_TOTAL: lambda g: g.model.bar1_mib,
    Field.BAR1_USED: lambda _: 1,
    Field.BAR1_FREE: lambda g: g.model.bar1_mib - 1,
    Field.SM_CLOCK: lambda g: g.sm_clock_mhz,
    Field.MEM_CLOCK: lambda g: g.mem_clock_mhz,
    Field.VIDEO_CLOCK: _video_clock_mhz,
    Field.CLOCK_THROTTLE_REASONS: lambda g: g.clock_event_reasons,
    Field.MAX_SM_CLOCK: lambda g: g.model.max_sm_clock_mhz,
    Field.MAX_MEM_CLOCK: lambda g: g.model.max_mem_clock_mhz,
    Field.MEMORY_TEMP: lambda g: g.memory_temp_celsius,
    Field.GPU_TEMP: lambda g: g.gpu_temp_celsius,
    Field.GPU_MAX_OP_TEMP: lambda g: g.model.celsius[0],
    Field.MEM_MAX_OP_TEMP: lambda g: None if g.memory_temp_celsius is None else 95,
    Field.GPU_TEMP_LIMIT: lambda g: g.model.celsius[0] - g.gpu_temp_celsius,
    Field.SLOWDOWN_TEMP: lambda g: sum(g.model.celsius[:2]),
    Field.SHUTDOWN_TEMP: lambda g: g.model.celsius[0] + g.model.celsius[2],
    Field.POWER_USAGE: lambda g: g.power_watts,
    Field.POWER_USAGE_INSTANT: lambda g: g.power_watts,
    Field.TOTAL_ENERGY_CONSUMPTION: lambda g: g.energy_joules * 1000.0,
    Field.POWER_MGMT_LIMIT: lambda g: g.model.power_limit_watts,
    Field.POWER_MGMT_LIMIT_MIN: lambda g: g.model.min_power_watts,
    Field.POWER_MGMT_LIMIT_MAX: lambda g: g.model.power_limit_watts,
    Field.POWER_MGMT_LIMIT_DEF: lambda g: g.model.power_limit_watts,
    Field.ENFORCED_POWER_LIMIT: lambda g: g.model.power_limit_watts,
    Field.PSTATE: lambda g: g.performance_state,
    Field.GPU_UTIL: lambda g: _percent(g.load.utilisation),
    Field.MEM_COPY_UTIL: lambda g: _percent(g.load.memory_copy),
    Field.ENC_UTIL: lambda g: _percent(g.load.encode),
    Field.DEC_UTIL: lambda g: _percent(g.load.decode),
    Field.JPG_UTIL: lambda g: _percent(g.load.jpeg),
    Field.OFA_UTIL: lambda g: _percent(g.load.optical_flow),
    Field.PCIE_MAX_LINK_GEN: lambda g: g.model.pcie_generation,
    Field.PCIE_LINK_GEN: lambda g: g.model.pcie_generation,
    Field.PCIE_MAX_LINK_WIDTH: lambda _: 16,
    Field.PCIE_LINK_WIDTH: lambda _: 16,
    Field.FB_TOTAL: lambda g: g.model.memory_bytes / MIB,
    Field.FB_RESERVED: lambda g: g.model.memory_reserved_bytes / MIB,
    Field.FB_USED: lambda g: g.load.memory_used_bytes / MIB,
    Field.FB_FREE: _free_mib,
    Field.FB_USED_PERCENT: _used_ratio,
    Field.VIRTUAL_MODE: lambda _: 0,
    Field.VGPU_LICENSE_STATUS: lambda _: 0,
    Field.GPU_RECOVERY_ACTION: lambda g: int(g.fault is Fault.RESET_REQUIRED),
    Field.PCIE_TX_BYTES_TOTAL: lambda g: int(g.load_integral.pcie_tx_bytes_per_second),
    Field.PCIE_RX_BYTES_TOTAL: lambda g: int(g.load_integral.pcie_rx_bytes_per_second),
    Field.NVLINK_TX_BYTES_TOTAL: lambda g: int(g.load_integral.nvlink_tx_bytes_per_second),
    Field.NVLINK_RX_BYTES_TOTAL: lambda g: int(g.load_integral.nvlink_rx_bytes_per_second),
}

_HEALTHY_ZERO = frozenset(
    field
    for field in Field
    if field is not Field.ECC_INFOROM_VER
    and re.search(
        r"_VIOLATION$|^ECC_|^RETIRED_|REMAP|^NVLINK_(CRC|REPLAY|RECOVERY|ERROR|COUNT)|_SLOWDOWN_NS$"
        r"|^PCIE_(REPLAY|COUNT)|^MEMORY_UNREPAIRABLE",
        field.name,
    )
)
"""Counters and flags of a board without any error so far; a scenario overrides them."""


def read(gpu: GpuTruth, field: Field) -> int | float | None:
    """Value of ``field`` on ``gpu``, in the units of ``Field``; ``None`` where this driver says NOT_SUPPORTED.

    An override wins over everything, then what the model lacks, then what MIG takes away, then the truth.
    """
    if field in gpu.overrides:
        return gpu.overrides[field]
    if field in gpu.model.not_supported or (gpu.mig_enabled and field in UTILISATION):
        return None
    if field in _HEALTHY_ZERO:
        return 0
    reader = _READERS.get(field)
    return reader(gpu) if reader else None


def driver_major(version: str) -> int:
    """``590`` of ``590.48.01``."""
    return int(version.partition(".")[0])


def cuda_major(driver_version: str) -> int:
    """Return the major version of the CUDA that comes with a driver."""
    return next((cuda for since, cuda in ((580, 13), (525, 12)) if driver_major(driver_version) >= since), 11)


def is_before(node: NodeTruth, field: Field) -> bool:
    """Return whether the node's driver is older than a field."""
    return driver_major(node.driver_version) < FIRST_DRIVER.get(field, 0)


def instance_bar1_bytes(gpu: GpuTruth, instance: MigTruth) -> int:
    """Return the size of an instance's part of the board's BAR1, none of which is in use."""
    return int(round((read(gpu, Field.BAR1_TOTAL) or 0) * MIB) * _BAR1_PER_MEMORY_SLICE * instance.memory_slices)
