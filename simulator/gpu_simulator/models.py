"""Fixed facts of the GPU models that can be simulated, from data sheets and recorded nvidia-smi output."""

from exporter.model import Field
from gpu_simulator.truth import ModelSpec

MIB = 1024 * 1024

NVLINK = frozenset(
    {
        Field.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        Field.NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
        Field.NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        Field.NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
        Field.NVLINK_BANDWIDTH_TOTAL,
        Field.NVLINK_ERROR_DL_CRC,
        Field.NVLINK_ERROR_DL_RECOVERY,
        Field.NVLINK_ERROR_DL_REPLAY,
        Field.PROF_NVLINK_TX_BYTES,
        Field.PROF_NVLINK_RX_BYTES,
        Field.NVLINK_TX_BYTES_TOTAL,
        Field.NVLINK_RX_BYTES_TOTAL,
    }
)
"""Everything that a board without NVLink, or one in MIG mode, does not tell."""

_NVLINK_5 = frozenset(
    {
        Field.NVLINK_COUNT_RX_ERRORS,
        Field.NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS,
        Field.NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS,
        Field.NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS,
    }
)

_RETIRED_PAGES = frozenset({Field.RETIRED_SBE, Field.RETIRED_DBE, Field.RETIRED_PENDING})

REMAPPED_ROWS = frozenset(
    {
        Field.UNCORRECTABLE_REMAPPED_ROWS,
        Field.CORRECTABLE_REMAPPED_ROWS,
        Field.ROW_REMAP_FAILURE,
        Field.ROW_REMAP_PENDING,
    }
)

_THRESHOLDS = frozenset({Field.SLOWDOWN_TEMP, Field.SHUTDOWN_TEMP, Field.MEM_MAX_OP_TEMP, Field.GPU_MAX_OP_TEMP})

_UTILISATION = frozenset(
    {Field.GPU_UTIL, Field.MEM_COPY_UTIL, Field.ENC_UTIL, Field.DEC_UTIL, Field.JPG_UTIL, Field.OFA_UTIL}
)

NOT_SUPPORTED_IN_MIG_MODE = _UTILISATION | REMAPPED_ROWS | NVLINK
"""What a board stops telling once it is partitioned (recorded on H100, driver 590.48.01)."""

# Recorded: remapping replaced page retirement, SXM boards have no fan, and limits are told as a margin only.
_HOPPER_NOT_SUPPORTED = _RETIRED_PAGES | _NVLINK_5 | _THRESHOLDS | {Field.FAN_SPEED, Field.POWER_INFOROM_VER}
_AMPERE_NOT_SUPPORTED = _RETIRED_PAGES | _NVLINK_5 | {Field.FAN_SPEED, Field.GPU_TEMP_LIMIT, Field.POWER_USAGE_INSTANT}

_SEVEN_SLICES = {1: 16, 2: 32, 3: 60, 4: 64, 7: 132}
"""Streaming multiprocessors by compute slices on Hopper; 60 for three is recorded, not a typing error."""


def _seven_slice_profiles(slice_gb: int) -> dict[str, tuple[int, int, int]]:
    """Profiles of A100, H100 and H200: name to (NVML profile id, compute slices, memory slices)."""
    return {
        f"1g.{slice_gb}gb": (0, 1, 1),
        f"2g.{2 * slice_gb}gb": (1, 2, 2),
        f"3g.{4 * slice_gb}gb": (2, 3, 4),
        f"4g.{4 * slice_gb}gb": (3, 4, 4),
        f"7g.{8 * slice_gb}gb": (4, 7, 8),
        f"1g.{2 * slice_gb}gb": (9, 1, 2),
    }


MODELS: dict[str, ModelSpec] = {
    "h100": ModelSpec(
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=81559 * MIB,
        memory_reserved_bytes=479 * MIB,
        power_limit_watts=700.0,
        idle_watts=70.0,
        max_sm_clock_mhz=1980,
        max_mem_clock_mhz=2619,
        multiprocessors=132,
        gpm=True,
        mig_profiles=_seven_slice_profiles(10),
        compute_slices=7,
        memory_slices=8,
        not_supported=_HOPPER_NOT_SUPPORTED,
    ),
    "h200": ModelSpec(
        name="NVIDIA H200",
        memory_bytes=143771 * MIB,
        memory_reserved_bytes=603 * MIB,
        power_limit_watts=700.0,
        idle_watts=76.0,
        max_sm_clock_mhz=1980,
        max_mem_clock_mhz=3201,
        multiprocessors=132,
        gpm=True,
        mig_profiles=_seven_slice_profiles(18),
        compute_slices=7,
        memory_slices=8,
        not_supported=_HOPPER_NOT_SUPPORTED,
    ),
    "a100-40gb": ModelSpec(
        name="NVIDIA A100-SXM4-40GB",
        memory_bytes=40960 * MIB,
        memory_reserved_bytes=571 * MIB,
        power_limit_watts=400.0,
        idle_watts=52.0,
        max_sm_clock_mhz=1410,
        max_mem_clock_mhz=1215,
        multiprocessors=108,
        gpm=False,
        mig_profiles=_seven_slice_profiles(5),
        compute_slices=7,
        memory_slices=8,
        not_supported=_AMPERE_NOT_SUPPORTED,
    ),
    "a100-80gb": ModelSpec(
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=81920 * MIB,
        memory_reserved_bytes=653 * MIB,
        power_limit_watts=400.0,
        idle_watts=60.0,
        max_sm_clock_mhz=1410,
        max_mem_clock_mhz=1593,
        multiprocessors=108,
        gpm=False,
        mig_profiles=_seven_slice_profiles(10),
        compute_slices=7,
        memory_slices=8,
        not_supported=_AMPERE_NOT_SUPPORTED,
    ),
    "a30": ModelSpec(
        name="NVIDIA A30",
        memory_bytes=24576 * MIB,
        memory_reserved_bytes=443 * MIB,
        power_limit_watts=165.0,
        idle_watts=29.0,
        max_sm_clock_mhz=1440,
        max_mem_clock_mhz=1215,
        multiprocessors=56,
        gpm=False,
        mig_profiles={"1g.6gb": (0, 1, 1), "2g.12gb": (1, 2, 2), "4g.24gb": (3, 4, 4)},
        compute_slices=4,
        memory_slices=4,
        not_supported=_AMPERE_NOT_SUPPORTED,
    ),
    "l40s": ModelSpec(
        name="NVIDIA L40S",
        memory_bytes=46068 * MIB,
        memory_reserved_bytes=609 * MIB,
        power_limit_watts=350.0,
        idle_watts=36.0,
        max_sm_clock_mhz=2520,
        max_mem_clock_mhz=9001,
        multiprocessors=142,
        gpm=False,
        not_supported=_HOPPER_NOT_SUPPORTED | NVLINK | {Field.MEMORY_TEMP},
    ),
    "t4": ModelSpec(
        name="Tesla T4",
        memory_bytes=15360 * MIB,
        memory_reserved_bytes=451 * MIB,
        power_limit_watts=70.0,
        idle_watts=9.0,
        max_sm_clock_mhz=1590,
        max_mem_clock_mhz=5001,
        multiprocessors=40,
        gpm=False,
        not_supported=NVLINK
        | _NVLINK_5
        | REMAPPED_ROWS
        | {
            Field.MEMORY_TEMP,
            Field.FAN_SPEED,
            Field.GPU_TEMP_LIMIT,
            Field.POWER_USAGE_INSTANT,
            Field.JPG_UTIL,
            Field.OFA_UTIL,
        },
    ),
}
"""Every model by the short name that scenarios use."""

IDLE_SM_CLOCK_MHZ = {"h100": 345, "h200": 345, "a100-40gb": 210, "a100-80gb": 210, "a30": 210, "l40s": 210, "t4": 300}
"""SM clock of a GPU without any process, by the same short names; Hopper recorded, the others from data sheets."""


def instance_memory_bytes(model: ModelSpec, memory_slices: int) -> int:
    """Memory of a MIG instance in bytes; on H100 exactly what was recorded for 1g, 2g and 3g."""
    slice_mib = model.memory_bytes // MIB * 10112 // 81559 * 8 // max(model.memory_slices, 1)
    small = memory_slices * 2 < model.memory_slices
    return (memory_slices * slice_mib - (128 if small else 0)) * MIB


def instance_multiprocessors(model: ModelSpec, compute_slices: int) -> int:
    """Streaming multiprocessors of a MIG instance."""
    return _SEVEN_SLICES[compute_slices] if model.gpm else 14 * compute_slices


def instance_base_bytes(memory_slices: int) -> int:
    """Memory that an instance uses before any process comes, in bytes (recorded: 9, 17 and 26 MiB)."""
    return {1: 9, 2: 17, 4: 26}.get(memory_slices, 7 * memory_slices) * MIB
