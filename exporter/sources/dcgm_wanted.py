"""What is asked of an engine, sorted by what the loaded library knows of each field."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from exporter.model import Field
from exporter.sources import _libdcgm
from exporter.sources.libdcgm import Library

_VGPU = 2
_OF_GPUS = frozenset({_libdcgm.GPU, _VGPU, _libdcgm.GPU_INSTANCE, _libdcgm.COMPUTE_INSTANCE})
"""Levels of a GPU or a part of one; what a vGPU has its host's GPU is asked for. Others: switches, links, CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The fields of one session by how they are read."""

    levels: Mapping[int, int]
    """Numbers of GPUs and their parts, which are watched: field id to entity level."""
    texts: tuple[int, ...]
    """Of GPUs; read at once, and rarely."""
    of_the_node: tuple[int, ...]
    """Of no entity."""
    xids: bool
    left_out: Mapping[int, str]
    """Field id to the reason why it is not read."""


def sort(fields: Iterable[Field], library: Library) -> Wanted:
    """Return how each field is read; of NVML's own and of Xid events there is nothing to read here.

    Args:
        fields: What is asked for.
        library: Initialised: before that it does not know its fields.
    """
    asked = frozenset(fields)
    levels: dict[int, int] = {}
    texts: list[int] = []
    of_the_node: list[int] = []
    left_out: dict[int, str] = {}
    for field_id in sorted(int(one) for one in asked if one < Field.OWN_FIRST and one != Field.XID_ERRORS):
        meta = library.field_meta(field_id)
        if meta is None:
            left_out[field_id] = "dcgm_unknown_field"
        elif ord(meta.fieldType) == _libdcgm.BINARY:
            left_out[field_id] = "dcgm_binary_field"
        elif meta.entityLevel == _libdcgm.NONE:
            of_the_node.append(field_id)
        elif meta.entityLevel not in _OF_GPUS:
            left_out[field_id] = "dcgm_field_of_other_entity"
        elif ord(meta.fieldType) == _libdcgm.STRING:
            texts.append(field_id)
        else:
            levels[field_id] = meta.entityLevel
    return Wanted(
        levels=levels,
        texts=tuple(texts),
        of_the_node=tuple(of_the_node),
        xids=Field.XID_ERRORS in asked,
        left_out=left_out,
    )
