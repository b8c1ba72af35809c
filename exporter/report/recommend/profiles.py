"""The MIG profiles of each GPU model: what part of the GPU an instance is, and how much fits into it."""

import re
from typing import NamedTuple

GIB = 1 << 30
_USABLE_RATIO = 0.88
"""Of the memory in a profile's name: instances have up to an eighth less (1g.5gb of an A100 has 4.75 GiB)."""


class Profile(NamedTuple):
    """A size of instance."""

    name: str
    compute_ratio: float
    """Its part of the GPU's compute slices."""
    memory_bytes: float
    """What surely fits."""
    share_ratio: float
    """Its part of the GPU, by which it is paid: the larger of its parts of compute and memory slices."""


def _seven(*gigabytes: int) -> tuple[Profile, ...]:
    """Profiles of a GPU with seven compute and eight memory slices, by the memory of 1g, 2g, 3g and 7g."""
    one, two, half, whole = gigabytes
    shapes = ((1, 1, one), (1, 2, two), (2, 2, two), (3, 4, half), (4, 4, half), (7, 8, whole))
    return tuple(_profile(compute, memory, size, 7, 8) for compute, memory, size in shapes)


def _profile(compute: int, memory: int, gigabytes: int, compute_slices: int, memory_slices: int) -> Profile:
    return Profile(
        f"{compute}g.{gigabytes}gb",
        compute / compute_slices,
        gigabytes * GIB * _USABLE_RATIO,
        max(compute / compute_slices, memory / memory_slices),
    )


# The first that fits: what the driver calls the model, its memory in GiB at most, its profiles.
_MODELS: tuple[tuple[re.Pattern[str], float, tuple[Profile, ...]], ...] = (
    (re.compile(r"\bA100\b"), 50, _seven(5, 10, 20, 40)),
    (re.compile(r"\bA100\b"), 100, _seven(10, 20, 40, 80)),
    (re.compile(r"\bA30\b"), 30, tuple(_profile(n, n, gb, 4, 4) for n, gb in ((1, 6), (2, 12), (4, 24)))),
    (re.compile(r"\bH100\b"), 85, _seven(10, 20, 40, 80)),
    (re.compile(r"\bH100\b"), 100, _seven(12, 24, 47, 94)),
    (re.compile(r"\bH200\b"), 150, _seven(18, 35, 71, 141)),
    (re.compile(r"\bB200\b"), 200, _seven(23, 45, 90, 180)),
)
_BIG = re.compile(r"\b(?:A100|A800|H100|H800|H20|H200|GH200|B100|B200|GB200|B300|GB300|MI[23]\d\dX?)\b")


def profiles_of(model: str, memory_bytes: float | None, current: str = "") -> tuple[Profile, ...]:
    """Profiles of a model, the smallest first; empty where it has none or cannot be told.

    Args:
        model: As the driver names it.
        memory_bytes: Of the device.
        current: Profile of the device where it is an instance: then its name tells the model's size.
    """
    sorts = [(most_gib, profiles) for pattern, most_gib, profiles in _MODELS if pattern.search(model)]
    if not current:
        return next((found for most, found in sorts if memory_bytes is not None and memory_bytes <= most * GIB), ())
    named = [(most, found) for most, found in sorts if plain_name(current) in {profile.name for profile in found}]
    if len(named) > 1:  # 1g.10gb of an A100 is a slice of 80 GB, or two of 40 GB
        size = next((int(text) for text in _SIZE.findall(model)), 0)
        named = [(most, found) for most, found in named if most * 0.7 < size <= most]
    return named[0][1] if named else ()


_SIZE = re.compile(r"(\d+) ?GB\b")


def plain_name(profile: str) -> str:
    """The profile without media engines and compute instances: ``1c.3g.40gb+me`` is ``3g.40gb``."""
    return re.sub(r"^\d+c\.|[+-].*$", "", profile)


def is_big(model: str) -> bool:
    """Whether it is one of the dear models, for which smaller ones stand in."""
    return _BIG.search(model) is not None
