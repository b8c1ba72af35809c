"""What the engine reads from the driver at once, for what is asked rarely: who a device is, not what it does."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from ctypes import c_uint, c_ushort

from exporter.sources import _libdcgm
from exporter.sources._libdcgm import EntityPair, FieldValueV2
from exporter.sources.dcgm_engine import Engine, reason_of
from exporter.sources.dcgm_fields import is_profiling
from exporter.sources.dcgm_values import Entity, Value, decode
from exporter.sources.libdcgm import Record

_RECORDS = 32
"""So many values at once: a record takes 4 KiB, whatever is in it."""
_NOT_LIVE = frozenset({230})
"""Events cannot be read at once: the whole call would fail."""


class Live:
    """Reads fields at once, without a watch; one that makes the call fail does not cost the others.

    Args:
        engine: To ask.
        count: Called with the reason of everything that goes wrong.
    """

    def __init__(self, engine: Engine, count: Callable[[str], None]) -> None:
        self._engine = engine
        self._count = count
        self._buffer = (FieldValueV2 * _RECORDS)()

    def read(self, entities: Sequence[Entity], field_ids: Iterable[int]) -> Mapping[Entity, Mapping[int, Value]]:
        """Return what is told, by entity and field id.

        Args:
            entities: Of one or several groups.
            field_ids: None of them profiled: to read one of those at once would kill the engine for everybody.

        Raises:
            SourceError: the engine is gone.
        """
        wanted = [one for one in field_ids if not is_profiling(one) and one not in _NOT_LIVE]
        found: dict[Entity, dict[int, Value]] = {entity: {} for entity in entities}
        for start in range(0, len(wanted), _RECORDS):
            some = wanted[start : start + _RECORDS]
            step = max(1, _RECORDS // len(some))
            for first in range(0, len(entities), step):
                self._ask(entities[first : first + step], some, found)
        return found

    def _ask(self, entities: Sequence[Entity], field_ids: Sequence[int], into: dict[Entity, dict[int, Value]]) -> None:
        pairs = (EntityPair * len(entities))(*(EntityPair(*one) for one in entities))
        ids = (c_ushort * len(field_ids))(*field_ids)
        code = self._engine.call(
            "dcgmEntitiesGetLatestValues",
            *(pairs, c_uint(len(entities)), ids, c_uint(len(field_ids)), c_uint(_libdcgm.LIVE), self._buffer),
        )
        if code == _libdcgm.OK:
            for slot in self._buffer[: len(entities) * len(field_ids)]:
                self._keep(slot, into)
        elif len(field_ids) > 1:
            for one in field_ids:
                self._ask(entities, [one], into)
        elif len(entities) > 1:
            for entity in entities:
                self._ask([entity], field_ids, into)
        else:
            self._count(reason_of(code))

    @staticmethod
    def _keep(slot: FieldValueV2, into: dict[Entity, dict[int, Value]]) -> None:
        raw: int | float | bytes
        if slot.fieldType == _libdcgm.STRING:
            raw = slot.value.str
        else:
            raw = slot.value.dbl if slot.fieldType == _libdcgm.DOUBLE else slot.value.i64
        value = decode(Record(slot.fieldId, slot.fieldType, slot.status, slot.ts, raw))
        if value is not None:
            into.setdefault((slot.entityGroupId, slot.entityId), {})[slot.fieldId] = value
