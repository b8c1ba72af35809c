"""Fields that sources can measure, with stable numeric identities."""

from enum import IntEnum
from typing import Self

_DCGM_IDS = range(1, 2**16)


class Field(IntEnum):
    """A measured quantity, keyed by its DCGM field id (``dcgm_fields.h``).

    The id, never the name, decides meaning and unit: DCGM 4.6 and 4.7 reuse names with other scales.
    A value is always carried in the unit of the *legacy* (DCGM 3.x to 4.5) field, so that one table in
    the exposition can convert it: MHz, degrees Celsius, watts, millijoules, MiB, percent 0..100 for
    ``*_UTIL``, ratio 0..1 for ``PROF_*``, nanoseconds for ``*_VIOLATION`` and ``*_NS``, bytes per second for
    ``PROF_*_BYTES``. Members from ``OWN_FIRST`` up have no DCGM field; their unit is in their comment.

    The named members are those that NVML also reports. Every other id of DCGM becomes a member when it is first used:
    ``Field(1076)``, named ``DCGM_1076``. Only DCGM measures it, in DCGM's own unit.
    """

    # Text (label) fields.
    DRIVER_VERSION = 1
    NVML_VERSION = 2
    BRAND = 51
    SERIAL = 53
    OEM_INFOROM_VER = 56
    ECC_INFOROM_VER = 80
    POWER_INFOROM_VER = 81
    INFOROM_IMAGE_VER = 82
    VBIOS_VERSION = 85
    # Numbers.
    BAR1_TOTAL = 90
    BAR1_USED = 92
    BAR1_FREE = 93
    SM_CLOCK = 100
    MEM_CLOCK = 101
    VIDEO_CLOCK = 102
    CLOCK_THROTTLE_REASONS = 112
    MAX_SM_CLOCK = 113
    MAX_MEM_CLOCK = 114
    MEMORY_TEMP = 140
    GPU_TEMP = 150
    MEM_MAX_OP_TEMP = 151
    GPU_MAX_OP_TEMP = 152
    GPU_TEMP_LIMIT = 153
    POWER_USAGE = 155
    TOTAL_ENERGY_CONSUMPTION = 156
    POWER_USAGE_INSTANT = 157
    SLOWDOWN_TEMP = 158
    SHUTDOWN_TEMP = 159
    POWER_MGMT_LIMIT = 160
    POWER_MGMT_LIMIT_MIN = 161
    POWER_MGMT_LIMIT_MAX = 162
    POWER_MGMT_LIMIT_DEF = 163
    ENFORCED_POWER_LIMIT = 164
    PSTATE = 190
    FAN_SPEED = 191
    PCIE_REPLAY_COUNTER = 202
    GPU_UTIL = 203
    MEM_COPY_UTIL = 204
    ENC_UTIL = 206
    DEC_UTIL = 207
    XID_ERRORS = 230
    PCIE_MAX_LINK_GEN = 235
    PCIE_MAX_LINK_WIDTH = 236
    PCIE_LINK_GEN = 237
    PCIE_LINK_WIDTH = 238
    POWER_VIOLATION = 240
    THERMAL_VIOLATION = 241
    SYNC_BOOST_VIOLATION = 242
    BOARD_LIMIT_VIOLATION = 243
    LOW_UTIL_VIOLATION = 244
    RELIABILITY_VIOLATION = 245
    TOTAL_APP_CLOCKS_VIOLATION = 246
    TOTAL_BASE_CLOCKS_VIOLATION = 247
    FB_TOTAL = 250
    FB_FREE = 251
    FB_USED = 252
    FB_RESERVED = 253
    FB_USED_PERCENT = 254
    ECC_SBE_VOL_TOTAL = 310
    ECC_DBE_VOL_TOTAL = 311
    ECC_SBE_AGG_TOTAL = 312
    ECC_DBE_AGG_TOTAL = 313
    RETIRED_SBE = 390
    RETIRED_DBE = 391
    RETIRED_PENDING = 392
    UNCORRECTABLE_REMAPPED_ROWS = 393
    CORRECTABLE_REMAPPED_ROWS = 394
    ROW_REMAP_FAILURE = 395
    ROW_REMAP_PENDING = 396
    NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = 409
    NVLINK_CRC_DATA_ERROR_COUNT_TOTAL = 419
    NVLINK_REPLAY_ERROR_COUNT_TOTAL = 429
    NVLINK_RECOVERY_ERROR_COUNT_TOTAL = 439
    NVLINK_BANDWIDTH_TOTAL = 449
    NVLINK_ERROR_DL_CRC = 497
    NVLINK_ERROR_DL_RECOVERY = 498
    NVLINK_ERROR_DL_REPLAY = 499
    VIRTUAL_MODE = 500
    VGPU_LICENSE_STATUS = 526
    PROF_GR_ENGINE_ACTIVE = 1001
    PROF_SM_ACTIVE = 1002
    PROF_SM_OCCUPANCY = 1003
    PROF_PIPE_TENSOR_ACTIVE = 1004
    PROF_DRAM_ACTIVE = 1005
    PROF_PIPE_FP64_ACTIVE = 1006
    PROF_PIPE_FP32_ACTIVE = 1007
    PROF_PIPE_FP16_ACTIVE = 1008
    PROF_PCIE_TX_BYTES = 1009
    PROF_PCIE_RX_BYTES = 1010
    PROF_NVLINK_TX_BYTES = 1011
    PROF_NVLINK_RX_BYTES = 1012
    PROF_PIPE_INT_ACTIVE = 1016
    PROF_C2C_TX_ALL_BYTES = 1076
    PROF_C2C_RX_ALL_BYTES = 1078
    NVLINK_COUNT_RX_ERRORS = 1206
    NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS = 1209
    NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS = 1211
    NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS = 1212
    CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS = 1422
    CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS = 1423
    CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS = 1424
    PCIE_COUNT_CORRECTABLE_ERRORS = 1501
    MEMORY_UNREPAIRABLE_FLAG = 1507
    GPU_RECOVERY_ACTION = 1523
    # Quantities of NVML without a field in DCGM.
    OWN_FIRST = 100_000
    JPG_UTIL = 100_001  # percent 0..100
    OFA_UTIL = 100_002  # percent 0..100
    NVLINK_TX_BYTES_TOTAL = 100_005  # payload bytes over all links since driver load
    NVLINK_RX_BYTES_TOTAL = 100_006  # payload bytes over all links since driver load

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        if not isinstance(value, int) or value not in _DCGM_IDS:
            return None
        member = int.__new__(cls, value)
        member._name_, member._value_ = f"DCGM_{value}", value
        # Like unnamed combinations in enum.Flag: one object for each value.
        kept: Self = cls._value2member_map_.setdefault(value, member)  # type: ignore[assignment]
        return kept

    @property
    def only_dcgm(self) -> bool:
        """Whether NVML does not report it."""
        return self._name_.startswith("DCGM_")


DECODERS = tuple(Field(one) for one in range(1017, 1025))
"""Activity of each video decoder, ratio 0..1: from DCGM, and from NVML's GPM on MIG instances."""

JPEG_DECODERS = tuple(Field(one) for one in range(1025, 1033))
"""Activity of each JPEG decoder, like ``DECODERS``."""

FLOW_ENGINES = tuple(Field(one) for one in range(1033, 1035))
"""Activity of each optical-flow engine, like ``DECODERS``."""

CODECS = frozenset({*DECODERS, *JPEG_DECODERS, *FLOW_ENGINES})
"""All fields of the video, JPEG and optical-flow engines."""

PIPES = (
    Field.PROF_PIPE_TENSOR_ACTIVE,
    Field.PROF_PIPE_FP64_ACTIVE,
    Field.PROF_PIPE_FP32_ACTIVE,
    Field.PROF_PIPE_FP16_ACTIVE,
    Field.PROF_PIPE_INT_ACTIVE,
)
"""Activity of each arithmetic pipe, ratio 0..1."""

MOST_OF_LIMIT = 1.05
"""Highest use of a limited resource that counter noise explains; a higher value is invalid."""

_LIMITED = frozenset({*PIPES, Field.PROF_DRAM_ACTIVE})
"""Ratios that are left out above ``MOST_OF_LIMIT``: limited to 1, they would make a device look fully used."""
_RATIO_DIGITS = 6
"""Precision of ratios in DCGM's tools; further digits are noise of a division by percent."""
_ROUNDING = 1e-6
_NOISE = 0.01


def ratio_in_range(field: int, value: float) -> tuple[float | None, bool]:
    """Return a measured ratio limited to 0..1, and whether it was outside.

    Counter noise can exceed the range slightly. A ratio more than 0.01 below 0 is invalid (``None``): the counter has
    restarted between two samples, for example because a MIG instance was created again. A value of 0 would mean an
    idle device. A pipe or memory ratio above ``MOST_OF_LIMIT`` is invalid too.

    Args:
        field: Field of the ratio.
        value: A finite number.
    """
    if value < -_NOISE or (value > MOST_OF_LIMIT and field in _LIMITED):
        return None, True
    return round(min(1.0, max(0.0, value)), _RATIO_DIGITS), not -_ROUNDING <= value <= 1 + _ROUNDING


PROFILING = frozenset({*range(1001, 1100), 1532, 1533})
"""Fields of the profiling module or GPM, watched separately; reading one live terminates the engine."""

COUNTERS = frozenset(
    {156, 202, *range(240, 248), *range(310, 346), *range(390, 395), *range(400, 441), 497, 498, 499}
    | {*range(1084, 1097), *range(1200, 1221), *range(1400, 1425), 1501}
)
"""Fields that only increase: values that are 32-bit "blank" markers elsewhere are valid for them."""
