"""What a simulated board answers for each field, in ``Field`` units, as a pure function of its truth."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from exporter.model import Field
from gpu_simulator.truth import Fault, GpuTruth

MIB = 1 << 20
"""Bytes per MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Fixed facts of a model that no scenario needs to vary; ``None`` is what nvidia-smi shows as N/A.

    Source of H100 and L40S: nvidia-smi captures of the project utkuozdemir/nvidia_gpu_exporter; the rest: data sheets.
    """

    vbios: str = "96.00.A5.00.01"
    inforom_image: str | None = "G520.0200.00.05"
    inforom_oem: str | None = "2.1"
    inforom_ecc: str | None = "7.16"
    inforom_power: str | None = None
    pci_device_id: int = 0x233010DE
    pcie_generation: int = 5
    min_power_watts: float = 200.0
    bar1_mib: int = 131072
    max_operating_celsius: int = 87
    slowdown_above_celsius: int = 2
    shutdown_above_celsius: int = 8
    compute_capability: tuple[int, int] = (9, 0)
    architecture: int = 9


_HOPPER = Board()
_BOARDS: tuple[tuple[str, Board], ...] = (
    ("H100", _HOPPER),
    ("H200", Board(pci_device_id=0x233510DE, bar1_mib=262144)),
    (
        "L40S",
        Board(
            vbios="95.02.66.00.02",
            inforom_image="G133.0242.00.03",
            inforom_ecc="6.16",
            pci_device_id=0x26B910DE,
            pcie_generation=4,
            min_power_watts=100.0,
            bar1_mib=65536,
            max_operating_celsius=88,
            shutdown_above_celsius=5,
            compute_capability=(8, 9),
            architecture=8,
        ),
    ),
    (
        "A100",
        Board(
            vbios="92.00.45.00.03",
            inforom_image="G506.0200.00.04",
            inforom_oem="2.0",
            inforom_ecc="6.16",
            pci_device_id=0x20B210DE,
            pcie_generation=4,
            min_power_watts=100.0,
            max_operating_celsius=85,
            slowdown_above_celsius=4,
            shutdown_above_celsius=7,
            compute_capability=(8, 0),
            architecture=7,
        ),
    ),
    (
        "A30",
        Board(
            vbios="92.00.66.00.0A",
            inforom_image="1001.0205.00.03",
            inforom_oem="2.0",
            inforom_ecc="6.16",
            pci_device_id=0x20B710DE,
            pcie_generation=4,
            min_power_watts=100.0,
            bar1_mib=32768,
            max_operating_celsius=85,
            compute_capability=(8, 0),
            architecture=7,
        ),
    ),
    (
        "T4",
        Board(
            vbios="90.04.96.00.01",
            inforom_image="G183.0200.00.02",
            inforom_oem="1.1",
            inforom_ecc="5.0",
            pci_device_id=0x1EB810DE,
            pcie_generation=3,
            min_power_watts=60.0,
            bar1_mib=256,
            max_operating_celsius=85,
            slowdown_above_celsius=8,
            shutdown_above_celsius=11,
            compute_capability=(7, 5),
            architecture=6,
        ),
    ),
)

NOT_UNDER_MIG = frozenset(
    {Field.GPU_UTIL, Field.MEM_COPY_UTIL, Field.ENC_UTIL, Field.DEC_UTIL, Field.JPG_UTIL, Field.OFA_UTIL}
)
"""Fields that the driver refuses once a GPU is partitioned (reference: utilisation under MIG)."""

_Reader = Callable[[GpuTruth], int | float | None]


def board_of(gpu: GpuTruth) -> Board:
    """Facts of ``gpu``'s model, found by a part of its name; those of an H100 for a model that is not known."""
    return next((board for part, board in _BOARDS if part in gpu.model.name), _HOPPER)


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
    Field.BAR1_TOTAL: lambda g: board_of(g).bar1_mib,
    Field.BAR1_USED: lambda _: 1,
    Field.BAR1_FREE: lambda g: board_of(g).bar1_mib - 1,
    Field.SM_CLOCK: lambda g: g.sm_clock_mhz,
    Field.MEM_CLOCK: lambda g: g.mem_clock_mhz,
    Field.VIDEO_CLOCK: _video_clock_mhz,
    Field.CLOCK_THROTTLE_REASONS: lambda g: g.clock_event_reasons,
    Field.MAX_SM_CLOCK: lambda g: g.model.max_sm_clock_mhz,
    Field.MAX_MEM_CLOCK: lambda g: g.model.max_mem_clock_mhz,
    Field.MEMORY_TEMP: lambda g: g.memory_temp_celsius,
    Field.GPU_TEMP: lambda g: g.gpu_temp_celsius,
    Field.GPU_MAX_OP_TEMP: lambda g: board_of(g).max_operating_celsius,
    Field.MEM_MAX_OP_TEMP: lambda g: None if g.memory_temp_celsius is None else 95,
    Field.GPU_TEMP_LIMIT: lambda g: board_of(g).max_operating_celsius - g.gpu_temp_celsius,
    Field.SLOWDOWN_TEMP: lambda g: board_of(g).max_operating_celsius + board_of(g).slowdown_above_celsius,
    Field.SHUTDOWN_TEMP: lambda g: board_of(g).max_operating_celsius + board_of(g).shutdown_above_celsius,
    Field.POWER_USAGE: lambda g: g.power_watts,
    Field.POWER_USAGE_INSTANT: lambda g: g.power_watts,
    Field.TOTAL_ENERGY_CONSUMPTION: lambda g: g.energy_joules * 1000.0,
    Field.POWER_MGMT_LIMIT: lambda g: g.model.power_limit_watts,
    Field.POWER_MGMT_LIMIT_MIN: lambda g: board_of(g).min_power_watts,
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
    Field.PCIE_MAX_LINK_GEN: lambda g: board_of(g).pcie_generation,
    Field.PCIE_LINK_GEN: lambda g: board_of(g).pcie_generation,
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
    {
        Field.PCIE_REPLAY_COUNTER,
        Field.POWER_VIOLATION,
        Field.THERMAL_VIOLATION,
        Field.SYNC_BOOST_VIOLATION,
        Field.BOARD_LIMIT_VIOLATION,
        Field.LOW_UTIL_VIOLATION,
        Field.RELIABILITY_VIOLATION,
        Field.TOTAL_APP_CLOCKS_VIOLATION,
        Field.TOTAL_BASE_CLOCKS_VIOLATION,
        Field.ECC_SBE_VOL_TOTAL,
        Field.ECC_DBE_VOL_TOTAL,
        Field.ECC_SBE_AGG_TOTAL,
        Field.ECC_DBE_AGG_TOTAL,
        Field.UNCORRECTABLE_REMAPPED_ROWS,
        Field.CORRECTABLE_REMAPPED_ROWS,
        Field.ROW_REMAP_FAILURE,
        Field.ROW_REMAP_PENDING,
        Field.RETIRED_SBE,
        Field.RETIRED_DBE,
        Field.RETIRED_PENDING,
        Field.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        Field.NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        Field.NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        Field.NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
        Field.NVLINK_ERROR_DL_CRC,
        Field.NVLINK_ERROR_DL_RECOVERY,
        Field.NVLINK_ERROR_DL_REPLAY,
        Field.NVLINK_COUNT_RX_ERRORS,
        Field.NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS,
        Field.NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS,
        Field.NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
        Field.CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS,
        Field.CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS,
        Field.CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS,
        Field.PCIE_COUNT_CORRECTABLE_ERRORS,
        Field.MEMORY_UNREPAIRABLE_FLAG,
    }
)
"""Counters and flags of a board that nothing ever happened to; a scenario overrides them."""


def read(gpu: GpuTruth, field: Field) -> int | float | None:
    """Value of ``field`` on ``gpu``, in the units of ``Field``; ``None`` where this driver says NOT_SUPPORTED.

    An override wins over everything, then what the model lacks, then what MIG takes away, then the truth.
    """
    if field in gpu.overrides:
        return gpu.overrides[field]
    if field in gpu.model.not_supported or (gpu.mig_enabled and field in NOT_UNDER_MIG):
        return None
    if field in _HEALTHY_ZERO:
        return 0
    reader = _READERS.get(field)
    return reader(gpu) if reader else None
