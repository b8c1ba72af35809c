"""Where MIG instances sit on a GPU: placements and instance ids as the driver gives them out."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_simulator.truth import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One GPU instance of a layout."""

    profile: str
    profile_id: int
    start: int
    """First memory slice."""
    compute_slices: int
    memory_slices: int
    gpu_instance_id: int


class LayoutError(ValueError):
    """A layout that the GPU cannot have; the message is for the user."""


def placements(model: ModelSpec) -> tuple[Placement, ...]:
    """Every instance that a model could have, each alone; in the order of profiles, then of places."""
    return tuple(
        Placement(
            profile=profile,
            profile_id=profile_id,
            start=start,
            compute_slices=compute,
            memory_slices=memory,
            gpu_instance_id=_instance_id(model, start, memory),
        )
        for profile, (profile_id, compute, memory) in model.mig_profiles.items()
        for start in _allowed_starts(model, compute, memory)
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


def place(model: ModelSpec, profiles: Sequence[str]) -> tuple[Placement, ...]:
    """Place instances in the order given.

    Raises:
        LayoutError: a profile that the model has not, or one that does not fit any more.
    """
    taken: set[int] = set()
    compute_left = model.compute_slices
    placed: list[Placement] = []
    for profile in profiles:
        if profile not in model.mig_profiles:
            allowed = ", ".join(model.mig_profiles) or "none: this model has no MIG"
            raise LayoutError(f"{model.name} has no MIG profile {profile!r}; allowed: {allowed}")
        profile_id, compute, memory = model.mig_profiles[profile]
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
        placed.append(
            Placement(
                profile=profile,
                profile_id=profile_id,
                start=free[0],
                compute_slices=compute,
                memory_slices=memory,
                gpu_instance_id=_instance_id(model, free[0], memory),
            )
        )
    return tuple(placed)
