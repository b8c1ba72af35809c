"""Sorts DCGM's fields by number: profiled, slow, counters, and those that NVML does not measure."""

from collections.abc import Iterable

from exporter.model import CODECS, Field

LINK_PROFILING = frozenset({1532, 1533})
PROFILING = frozenset(range(1001, 1100)) | LINK_PROFILING
"""Measured by the profiling module or GPM, watched apart; to read one live kills the engine."""

RATIOS = frozenset(range(1001, 1009)) | frozenset(range(1013, 1035))
"""Profiling fields that are a part of a whole: 0..1, whatever the counters' noise makes of them."""

NOT_OF_INSTANCES = frozenset({1009, 1010, 1011, 1012})
"""PCIe and NVLink belong to the board; the engine logs an error at each beat where one is watched on an instance."""

MEMORY = frozenset({90, 92, 93, 250, 251, 252, 253, 254})
"""The compute instances of one GPU instance have it together."""

DRAM_ACTIVE = 1005
"""Measured on a whole GPU instance; blank on a part of one, with an error in the engine's log at each beat."""

COUNTERS = frozenset(
    {156, 202, *range(240, 248), *range(310, 346), *range(390, 395), *range(400, 441), 497, 498, 499}
    | {*range(1084, 1097), *range(1200, 1221), *range(1400, 1425), 1501}
)
"""Fields that only grow: they pass through the 32-bit numbers that mean "blank" elsewhere."""

_FAST = frozenset(
    {
        Field.SM_CLOCK,
        Field.MEM_CLOCK,
        Field.VIDEO_CLOCK,
        Field.CLOCK_THROTTLE_REASONS,
        Field.MEMORY_TEMP,
        Field.GPU_TEMP,
        Field.POWER_USAGE,
        Field.TOTAL_ENERGY_CONSUMPTION,
        Field.POWER_USAGE_INSTANT,
        Field.PSTATE,
        Field.GPU_UTIL,
        Field.MEM_COPY_UTIL,
        Field.ENC_UTIL,
        Field.DEC_UTIL,
        Field.FB_TOTAL,
        Field.FB_FREE,
        Field.FB_USED,
        Field.FB_RESERVED,
        Field.FB_USED_PERCENT,
        Field.NVLINK_BANDWIDTH_TOTAL,
    }
)
_FALLBACK = frozenset(
    {
        Field.GPU_UTIL,
        Field.ENC_UTIL,
        Field.DEC_UTIL,
        Field.FB_USED,
        Field.FB_TOTAL,
        Field.POWER_USAGE,
        Field.TOTAL_ENERGY_CONSUMPTION,
    }
)
"""Enough to know who does what while NVML does not answer; without its codecs a transcoder would look idle."""
_ACTIVITY = frozenset({Field.PROF_GR_ENGINE_ACTIVE})


def supplement(fields: Iterable[Field]) -> frozenset[Field]:
    """Return what to ask DCGM for beside NVML: what NVML may not have, and a little to fall back on.

    Codecs are both: of a GPU before Hopper in MIG mode NVML has no figure of them.
    """
    wanted = frozenset(fields) | _ACTIVITY | CODECS
    return frozenset(one for one in wanted if one.only_dcgm or is_profiling(one)) | _FALLBACK | {Field.XID_ERRORS}


def alone(fields: Iterable[Field]) -> frozenset[Field]:
    """Return what to ask DCGM for where there is no NVML: all that it can have, Xid events and codecs in any case."""
    return frozenset(one for one in fields if one < Field.OWN_FIRST) | _ACTIVITY | CODECS | {Field.XID_ERRORS}


def is_profiling(field_id: int) -> bool:
    """Return whether a field is measured by the profiling module or GPM."""
    return field_id in PROFILING


def is_slow(field: Field) -> bool:
    """Return whether a field changes so rarely that every few samples are enough, as with NVML."""
    return field not in _FAST and not field.only_dcgm and not is_profiling(field)
