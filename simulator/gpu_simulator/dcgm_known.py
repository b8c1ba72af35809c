"""Which fields each DCGM version knows: their types and the smallest entity that has a value of its own."""

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

from exporter.gpu.dcgm import library
from exporter.gpu.dcgm.library import BINARY, COMPUTE_INSTANCE, DOUBLE, GPU, GPU_INSTANCE, INTEGER, NONE, STRING

Version = tuple[int, ...]

_STRINGS = frozenset({1, 2, 3, 50, 51, 53, 54, 56, 57, 68, 80, 81, 82, 85, 172, 1502})
_BLOBS = frozenset({60, 61, 62, 75, 76, 77, 91, 130, 165, 166, 167, 205})
_DOUBLES = frozenset({155, 157, *range(160, 165), 254, *range(1001, 1009), *range(1013, 1035), 1216, 1218})
_OF_THE_NODE = frozenset({*range(1, 7), 91, 1502, 1503})
_OF_COMPUTE_INSTANCES = frozenset(
    {50, 54, 68, 90, 92, 93, 230, *range(250, 255), *range(1001, 1005), 1006, 1007, 1008, *range(1013, 1017)}
)
_OF_GPU_INSTANCES = frozenset({1005})
_WITH_3 = tuple(
    chain(
        range(1, 7),
        range(50, 59),
        range(59, 90),
        range(90, 94),
        range(100, 103),
        range(110, 116),
        (120, 130, 140),
        range(150, 168),
        range(170, 176),
        (190, 191),
        range(200, 208),
        (230,),
        range(235, 248),
        range(250, 255),
        range(285, 288),
        (300, 301),
        range(310, 334),
        range(385, 397),
        range(400, 500),
        (500, 526),
        range(1001, 1097),
    )
)
_SINCE: tuple[tuple[Version, tuple[int, ...]], ...] = (
    ((3, 3, 0), _WITH_3),
    (
        (4, 0, 0),
        (
            94,
            *range(334, 347),
            *range(825, 898),
            *range(1200, 1221),
            *range(1400, 1425),
            *range(1501, 1504),
            1507,
            1523,
        ),
    ),
    ((4, 6, 0), tuple(range(1525, 1534))),
    ((4, 6, 1), tuple(range(1600, 1613))),
    ((4, 7, 0), (*range(1613, 1629), 1648)),
)


def parse(version: str) -> Version:
    """``(4, 6, 0)`` of ``4.6.0``."""
    return tuple(int(part) for part in version.split("."))


def is_profiling(field_id: int) -> bool:
    """Whether a field is measured by the profiling module or GPM."""
    return 1001 <= field_id <= 1096 or field_id in (1532, 1533)  # noqa: PLR2004 - DCGM's own bounds


def type_of(field_id: int) -> int:
    """Character code of a field's type."""
    if field_id in _STRINGS:
        return STRING
    if field_id in _BLOBS:
        return BINARY
    return DOUBLE if field_id in _DOUBLES else INTEGER


def level_of(field_id: int) -> int:
    """Entity group of the smallest entity that has a value of its own."""
    if field_id in _OF_THE_NODE:
        return NONE
    if field_id in _OF_GPU_INSTANCES:
        return GPU_INSTANCE
    return COMPUTE_INSTANCE if field_id in _OF_COMPUTE_INSTANCES else GPU


@lru_cache(maxsize=8)
def known(version: Version) -> frozenset[int]:
    """Ids that a version has."""
    return frozenset(_known(version))


def _known(version: Version) -> Iterator[int]:
    for since, ids in _SINCE:
        if version >= since:
            yield from ids


@lru_cache(maxsize=2048)
def meta(field_id: int) -> library.FieldMeta:
    """What the library tells of a field."""
    kind = type_of(field_id)
    return library.FieldMeta(
        fieldId=field_id,
        fieldType=bytes([kind]),
        size=0 if kind in (STRING, BINARY) else 8,
        tag=f"simulated_{field_id}".encode(),
        scope=int(level_of(field_id) != NONE),
        nvmlFieldId=0,
        entityLevel=level_of(field_id),
    )


def meta_pointer(field_id: int, version: Version) -> "ctypes._Pointer[library.FieldMeta]":
    """A pointer to it; a null pointer where the version does not know the field."""
    kind = ctypes.POINTER(library.FieldMeta)
    return kind(meta(field_id)) if field_id in known(version) else kind()
