"""Every DCGM field beside those of ``dcgm_table``: what DCGM alone is asked for, and what nobody is."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from exporter.exposition.dcgm_fields import PREFIX, DcgmField, Era
from exporter.exposition.family import Kind
from exporter.model import Field

HIGHEST_ID = 1650
"""Numeric ids up to here exist, or may exist, in DCGM 4.7."""

_TEXT = Path(__file__).with_name("dcgm_ids.txt")
_MEASURED_LEVELS = frozenset({"node", "gpu", "gi", "ci"})
_INSTANCE_LEVELS = frozenset({"gi", "ci"})
_BINARY, _STRING, _FLOAT = "b", "s", "d"
_COUNTED = re.compile(r"\{(\d+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherField:
    """A field that is not in ``dcgm_table``. ``type`` and ``level`` are the words of the file."""

    id: int
    type: str
    level: str
    names: tuple[str, ...]
    """dcgm-exporter's up to 4.8 first."""
    new: tuple[int, str, int] | None = None
    """4.9's own field: id, name, and what a value is multiplied by."""

    @property
    def measured(self) -> bool:
        """Whether DCGM is asked for it."""
        return self.level in _MEASURED_LEVELS and self.type != _BINARY

    def field(self) -> DcgmField:
        """It as a field that can be shown; its unit is DCGM's own."""
        name = self.names[0]
        new_id, new_name, times = self.new or (self.id, self.names[-1], 1)
        return DcgmField(
            field=Field(self.id),
            legacy_name=name,
            canonical_name=self.names[-1],
            new_name=new_name,
            new_id=new_id,
            kind=Kind.LABEL if self.type == _STRING else Kind.GAUGE,
            unit="",
            new_unit="",
            times=times,
            per=1,
            whole=self.type != _FLOAT,
            new_whole=self.type != _FLOAT,
            per_instance=self.level in _INSTANCE_LEVELS,
            default=False,
            new_default=False,
            help=f"DCGM field {self.id}.",
        )


def read() -> dict[str, tuple[OtherField, Era]]:
    """Every such field by each of its names and by its number, with the era that decides its unit.

    Read from a file at each call, as only a collectors file needs it and an agent without one is not to keep it.
    """
    known: dict[str, tuple[OtherField, Era]] = {}
    for line in _TEXT.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            for other in _fields(line):
                known.update(dict.fromkeys((*other.names, str(other.id)), (other, Era.LEGACY)))
                if other.new:
                    known.update(dict.fromkeys((other.new[1], str(other.new[0])), (other, Era.NEW)))
    return known


def _fields(line: str) -> Iterator[OtherField]:
    columns, _, new = line.partition(" | ")
    ids, kind, level, *names = columns.split(" ")
    span, _, step = ids.partition("/")
    first, _, last = span.partition("-")
    for place, number in enumerate(range(int(first), int(last or first) + 1, int(step or 1))):
        yield OtherField(
            id=number,
            type=kind,
            level=level,
            names=tuple(PREFIX + _counted(name, place) for name in names),
            new=_new(new) if new else None,
        )


def _counted(name: str, place: int) -> str:
    return _COUNTED.sub(lambda start: str(int(start[1]) + place), name)


def _new(text: str) -> tuple[int, str, int]:
    number, name, scale = text.split(" ")
    return int(number), PREFIX + name, int(scale.removeprefix("*"))
