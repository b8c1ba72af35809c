"""Fixed facts of the GPU models that can be simulated, and where MIG instances sit on them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from exporter.model import Field
from gpu_simulator.truth import GpuTruth, MigTruth, ModelSpec

MIB = 1024 * 1024


def _named(pattern: str) -> frozenset[Field]:
    return frozenset(field for field in Field if re.search(pattern, field.name))


NVLINK = _named("NVLINK") - _named("^NVLINK_COUNT")
"""Fields that a board without NVLink, or one in MIG mode, does not have."""
_NVLINK_5 = _named("^NVLINK_COUNT")
_RETIRED_PAGES = _named("^RETIRED_")
REMAPPED_ROWS = _named("REMAP")
_THRESHOLDS = frozenset({Field.SLOWDOWN_TEMP, Field.SHUTDOWN_TEMP, Field.MEM_MAX_OP_TEMP, Field.GPU_MAX_OP_TEMP})
UTILISATION = frozenset(
    {Field.GPU_UTIL, Field.MEM_COPY_UTIL, Field.ENC_UTIL, Field.DEC_UTIL, Field.JPG_UTIL, Field.OFA_UTIL}
)
NOT_SUPPORTED_IN_MIG_MODE = UTILISATION | REMAPPED_ROWS | NVLINK
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


_H100 = ModelSpec(
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
)
_A100 = replace(
    _H100,
    name="NVIDIA A100-SXM4-80GB",
    memory_bytes=81920 * MIB,
    memory_reserved_bytes=653 * MIB,
    power_limit_watts=400.0,
    idle_watts=60.0,
    max_sm_clock_mhz=1410,
    max_mem_clock_mhz=1593,
    multiprocessors=108,
    gpm=False,
    not_supported=_AMPERE_NOT_SUPPORTED,
)
MODELS: dict[str, ModelSpec] = {
    "h100": _H100,
    "h200": replace(
        _H100,
        name="NVIDIA H200",
        memory_bytes=143771 * MIB,
        memory_reserved_bytes=603 * MIB,
        idle_watts=76.0,
        max_mem_clock_mhz=3201,
        mig_profiles=_seven_slice_profiles(18),
    ),
    "a100-40gb": replace(
        _A100,
        name="NVIDIA A100-SXM4-40GB",
        memory_bytes=40960 * MIB,
        memory_reserved_bytes=571 * MIB,
        idle_watts=52.0,
        max_mem_clock_mhz=1215,
        mig_profiles=_seven_slice_profiles(5),
    ),
    "a100-80gb": _A100,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Fixed facts of a model that no scenario needs to vary; ``None`` is what nvidia-smi shows as N/A.

    Source of H100 and L40S: nvidia-smi captures of the project utkuozdemir/nvidia_gpu_exporter; the rest: data sheets.
    """

    vbios: str = "96.00.A5.00.01"
    inforom: tuple[str | None, str | None, str | None, str | None] = ("G520.0200.00.05", "2.1", "7.16", None)
    """Versions of image, OEM, ECC and power."""
    pci_device_id: int = 0x233010DE
    pcie_generation: int = 5
    min_power_watts: float = 200.0
    bar1_mib: int = 131072
    celsius: tuple[int, int, int] = (87, 2, 8)
    """Highest operating temperature, and how far above it the board slows down and shuts down."""
    compute_capability: tuple[int, int] = (9, 0)


_AMPERE_INFOROM = ("G506.0200.00.04", "2.0", "6.16", None)
_FACTS: Mapping[str, ModelFacts] = {
    "H100": ModelFacts(),
    "H200": ModelFacts(pci_device_id=0x233510DE, bar1_mib=262144),
    "L40S": ModelFacts(
        vbios="95.02.66.00.02",
        inforom=("G133.0242.00.03", "2.1", "6.16", None),
        pci_device_id=0x26B910DE,
        pcie_generation=4,
        min_power_watts=100.0,
        bar1_mib=65536,
        celsius=(88, 2, 5),
        compute_capability=(8, 9),
    ),
    "A100": ModelFacts(
        vbios="92.00.45.00.03",
        inforom=_AMPERE_INFOROM,
        pci_device_id=0x20B210DE,
        pcie_generation=4,
        min_power_watts=100.0,
        celsius=(85, 4, 7),
        compute_capability=(8, 0),
    ),
    "A30": ModelFacts(
        vbios="92.00.66.00.0A",
        inforom=("1001.0205.00.03", *_AMPERE_INFOROM[1:]),
        pci_device_id=0x20B710DE,
        pcie_generation=4,
        min_power_watts=100.0,
        bar1_mib=32768,
        celsius=(85, 2, 8),
        compute_capability=(8, 0),
    ),
    "T4": ModelFacts(
        vbios="90.04.96.00.01",
        inforom=("G183.0200.00.02", "1.1", "5.0", None),
        pci_device_id=0x1EB810DE,
        pcie_generation=3,
        min_power_watts=60.0,
        bar1_mib=256,
        celsius=(85, 8, 11),
        compute_capability=(7, 5),
    ),
}


def facts_of(gpu: GpuTruth) -> ModelFacts:
    """Return the facts of a GPU's model, found by a part of its name; those of an H100 for an unknown model."""
    return next((board for part, board in _FACTS.items() if part in gpu.model.name), _FACTS["H100"])


def _instance_memory_bytes(model: ModelSpec, memory_slices: int) -> int:
    """Memory of a MIG instance in bytes; on H100 exactly what was recorded for 1g, 2g and 3g."""
    slice_mib = model.memory_bytes // MIB * 10112 // 81559 * 8 // max(model.memory_slices, 1)
    small = memory_slices * 2 < model.memory_slices
    return (memory_slices * slice_mib - (128 if small else 0)) * MIB


def instance_base_bytes(memory_slices: int) -> int:
    """Memory that an instance uses before any process comes, in bytes (recorded: 9, 17 and 26 MiB)."""
    return {1: 9, 2: 17, 4: 26}.get(memory_slices, 7 * memory_slices) * MIB


class LayoutError(ValueError):
    """A layout that the GPU cannot have; the message is for the user."""


def instances(model: ModelSpec) -> tuple[MigTruth, ...]:
    """Return every instance that a model can have, each alone, without a UUID; by profile, then by place."""
    return tuple(
        _instance(model, profile, start)
        for profile, (_, compute, memory) in model.mig_profiles.items()
        for start in _allowed_starts(model, compute, memory)
    )


def _instance(model: ModelSpec, profile: str, start: int) -> MigTruth:
    profile_id, compute, memory = model.mig_profiles[profile]
    return MigTruth(
        uuid="",
        gpu_instance_id=_instance_id(model, start, memory),
        compute_instance_id=0,
        profile=profile,
        profile_id=profile_id,
        placement_start=start,
        compute_slices=compute,
        memory_slices=memory,
        memory_bytes=_instance_memory_bytes(model, memory),
        multiprocessors=_SEVEN_SLICES[compute] if model.gpm else 14 * compute,
    )


def _allowed_starts(model: ModelSpec, compute: int, memory: int) -> list[int]:
    if compute == model.compute_slices:
        return [0]
    if compute == memory == model.memory_slices // 2 and compute > 1 and model.memory_slices > model.compute_slices:
        return [0]  # 4g needs the half that has four compute slices
    return _starts(model, memory)


def _starts(model: ModelSpec, memory_slices: int) -> list[int]:
    """Where an instance of this width may begin, in the order in which the driver tries it."""
    width = model.memory_slices // 2 if memory_slices * 2 == model.memory_slices else memory_slices
    starts = list(range(0, model.memory_slices - width + 1, width))
    if memory_slices * 2 == model.memory_slices:
        starts.reverse()  # recorded: 3g goes to the upper half, which keeps 4g possible
    if memory_slices == 1 and model.memory_slices > model.compute_slices:
        starts = starts[: model.compute_slices]
    return starts


def _instance_id(model: ModelSpec, start: int, memory_slices: int) -> int:
    """GPU-instance id: a node of the binary tree of placements (recorded: 3g at 4 is 2, 1g at 2 is 9)."""
    width, first = model.memory_slices, 0
    count = 1
    while width > memory_slices:
        first += count
        count *= 2
        width //= 2
    return first + start // width


def place(model: ModelSpec, profiles: Sequence[str]) -> tuple[MigTruth, ...]:
    """Place instances in the order given, without a UUID.

    Raises:
        LayoutError: a profile that the model has not, or one that does not fit any more.
    """
    taken: set[int] = set()
    compute_left = model.compute_slices
    placed: list[MigTruth] = []
    for profile in profiles:
        if profile not in model.mig_profiles:
            allowed = ", ".join(model.mig_profiles) or "none: this model has no MIG"
            raise LayoutError(f"{model.name} has no MIG profile {profile!r}; allowed: {allowed}")
        _, compute, memory = model.mig_profiles[profile]
        starts = _allowed_starts(model, compute, memory)
        free = [start for start in starts if not taken & set(range(start, start + memory))]
        if not free or compute > compute_left:
            raise LayoutError(
                f"{profile} does not fit beside {', '.join(p.profile for p in placed)}; "
                f"left: {compute_left} of {model.compute_slices} compute and "
                f"{model.memory_slices - len(taken)} of {model.memory_slices} memory slices"
            )
        taken |= set(range(free[0], free[0] + memory))
        compute_left -= compute
        placed.append(_instance(model, profile, free[0]))
    return tuple(placed)
