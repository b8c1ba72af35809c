"""Provides facts of the GPU models that can be simulated, and the placement of their MIG instances."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml

from exporter.model.fields import Field
from gpu_simulator.truth import MigTruth, ModelSpec

MIB = 1024 * 1024


UTILISATION = frozenset(
    {Field.GPU_UTIL, Field.MEM_COPY_UTIL, Field.ENC_UTIL, Field.DEC_UTIL, Field.JPG_UTIL, Field.OFA_UTIL}
)
_SEVEN_SLICES = {1: 16, 2: 32, 3: 60, 4: 64, 7: 132}
"""Streaming multiprocessors by compute slices on Hopper, recorded; 60 for three is correct."""


def _fields(*expressions: str) -> frozenset[Field]:
    return frozenset(field for field in Field if any(re.search(one, field.name) for one in expressions))


NOT_SUPPORTED_IN_MIG_MODE = UTILISATION | _fields("REMAP", "^(?!NVLINK_COUNT).*NVLINK")
"""Fields that a partitioned board does not report (recorded on H100, driver 590.48.01)."""


FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Loader for files of this package, ten times as fast with libyaml; a user's file could crash libyaml."""


@cache
def table(name: str) -> dict[Any, Any]:
    """Return a table of the package."""
    text = resources.files("gpu_simulator").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return dict(yaml.load(text, FAST_LOADER))  # noqa: S506 - a safe loader


def _models() -> dict[str, ModelSpec]:
    rows = table("models")
    return {key: _spec(_with_defaults(rows, key)) for key in rows}


def _with_defaults(rows: Mapping[str, dict[str, Any]], key: str) -> dict[str, Any]:
    own = dict(rows[key])
    like = own.pop("like", None)
    return (_with_defaults(rows, like) if like else {}) | own


def _spec(row: dict[str, Any]) -> ModelSpec:
    facts: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    facts["memory_bytes"] = facts.pop("memory_mib") * MIB
    facts["memory_reserved_bytes"] = facts.pop("memory_reserved_mib") * MIB
    facts["not_supported"] = _fields(*facts["not_supported"])
    facts["mig_profiles"] = {name: tuple(numbers) for name, numbers in facts.get("mig_profiles", {}).items()}
    return ModelSpec(**facts)


MODELS = _models()
"""Models by their short name in scenarios."""


def _instance_memory_bytes(model: ModelSpec, memory_slices: int) -> int:
    """Return the memory of a MIG instance in bytes, which on H100 matches the records of 1g, 2g and 3g."""
    slice_mib = model.memory_bytes // MIB * 10112 // 81559 * 8 // max(model.memory_slices, 1)
    small = memory_slices * 2 < model.memory_slices
    return (memory_slices * slice_mib - (128 if small else 0)) * MIB


def instance_base_bytes(memory_slices: int) -> int:
    """Return the memory that an instance uses without processes, in bytes (recorded: 9, 17 and 26 MiB)."""
    return {1: 9, 2: 17, 4: 26}.get(memory_slices, 7 * memory_slices) * MIB


class LayoutError(ValueError):
    """A layout is not possible on the GPU; the message is for the user."""


def instances(model: ModelSpec) -> tuple[MigTruth, ...]:
    """Return every possible instance of a model, without a UUID, by profile and placement."""
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
        return [0]  # 4g needs the half with four compute slices
    return _starts(model, memory)


def _starts(model: ModelSpec, memory_slices: int) -> list[int]:
    """Return the possible placements of an instance of this width, in the order of the driver."""
    width = model.memory_slices // 2 if memory_slices * 2 == model.memory_slices else memory_slices
    starts = list(range(0, model.memory_slices - width + 1, width))
    if memory_slices * 2 == model.memory_slices:
        starts.reverse()  # recorded: 3g uses the upper half, so that 4g stays possible
    if memory_slices == 1 and model.memory_slices > model.compute_slices:
        starts = starts[: model.compute_slices]
    return starts


def _instance_id(model: ModelSpec, start: int, memory_slices: int) -> int:
    """Return the GPU-instance id, a node in the tree of placements (recorded: 3g at 4 is 2, 1g at 2 is 9)."""
    width, first = model.memory_slices, 0
    count = 1
    while width > memory_slices:
        first += count
        count *= 2
        width //= 2
    return first + start // width


def place(model: ModelSpec, profiles: Sequence[str]) -> tuple[MigTruth, ...]:
    """Return placed instances in the given order, without a UUID.

    Raises:
        LayoutError: The model does not have a profile, or a profile does not fit.
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
                f"{profile} does not fit next to {', '.join(p.profile for p in placed)}; "
                f"left: {compute_left} of {model.compute_slices} compute and "
                f"{model.memory_slices - len(taken)} of {model.memory_slices} memory slices"
            )
        taken |= set(range(free[0], free[0] + memory))
        compute_left -= compute
        placed.append(_instance(model, profile, free[0]))
    return tuple(placed)
