"""What a record of DCGM's is worth: blanks, codes, values that stopped moving, ratios that are none."""

import math
from collections.abc import Callable, Mapping

from exporter.sources import _libdcgm
from exporter.sources._libdcgm import DOUBLE, INTEGER, STRING, TIMESTAMP
from exporter.sources.dcgm_fields import COUNTERS, RATIOS
from exporter.sources.libdcgm import Record, records

Entity = tuple[int, int]
"""Entity group and id: a GPU, a GPU instance, a compute instance, by the engine's own numbers."""
Value = int | float | str

_USABLE = frozenset({DOUBLE, INTEGER, STRING, TIMESTAMP})
_BLANK_LARGE = frozenset(range(0x7FFFFFFFFFFFFFF0, 0x7FFFFFFFFFFFFFF4))
_BLANK_SMALL = frozenset(range(0x7FFFFFF0, 0x7FFFFFF4))
_BLANK_DOUBLES = frozenset(2.0**47 + one for one in range(4))
_BLANK_TEXTS = frozenset({b"<<<NULL>>>", b"<<<NOT_FOUND>>>", b"<<<NOT_SUPPORTED>>>", b"<<<NOT_PERM>>>"})
_RATIO_DIGITS = 6
"""As DCGM's tools print ratios."""
_ROUNDING = 1e-6
_NOISE = 0.01


def decode(record: Record) -> Value | None:
    """Return what a record says; ``None`` where it says that there is nothing, or says nothing that can be used.

    A status of 0 means neither that there is a value nor that it is new.
    """
    value = record.value
    if record.status != _libdcgm.OK or record.type not in _USABLE:
        return None
    if isinstance(value, bytes):
        if value in _BLANK_TEXTS:
            return None
        return value.decode("utf-8", "replace").strip() or None
    if record.type == DOUBLE:
        return None if value in _BLANK_DOUBLES or not math.isfinite(value) else value
    if value in _BLANK_LARGE or (value in _BLANK_SMALL and record.field_id not in COUNTERS):
        return None
    return value


def whole(value: Value | None) -> int | None:
    """Return a value as a whole number, ``None`` where there is none or it is text."""
    return None if value is None or isinstance(value, str) else int(value)


def in_range(field_id: int, value: float) -> tuple[int | float | None, bool]:
    """Return a value as it is told on, and whether it was out of what is possible.

    Args:
        field_id: Whose value; parts of a whole are 0..1, and noise of the counters takes them out of it. More than a
            hundredth below 0 is none: a counter began anew, and 0 would say that the device was idle.
        value: In the field's unit.
    """
    if field_id not in RATIOS:
        return value, False
    if value < -_NOISE:
        return None, True
    return round(min(1.0, max(0.0, value)), _RATIO_DIGITS), not -_ROUNDING <= value <= 1 + _ROUNDING


class Movement:
    """Tells a value that is measured anew from one that a dead watch left: its time moves, by our own clock.

    Args:
        lasts_seconds: How long a value whose time does not move is still good.
        count: Called with a reason when a value stopped moving, once each time.
    """

    def __init__(self, lasts_seconds: float, count: Callable[[str], None]) -> None:
        self._lasts_seconds = lasts_seconds
        self._count = count
        self._seen: dict[Entity, dict[int, tuple[int, float]]] = {}

    def is_fresh(self, entity: Entity, field_id: int, at_microseconds: int, now: float) -> bool:
        """Note the time that a value bears, and tell whether the value is good now.

        Args:
            entity: Whose value.
            field_id: Of what.
            at_microseconds: The time it bears, of the engine's clock, which may be another machine's.
            now: Seconds of this process's monotonic clock.
        """
        seen = self._seen.setdefault(entity, {})
        before = seen.get(field_id)
        if before is None or before[0] != at_microseconds:
            seen[field_id] = (at_microseconds, now)
            return True
        if now - before[1] <= self._lasts_seconds:
            return True
        if before[1] > -math.inf:
            self._count("dcgm_stale")
            seen[field_id] = (at_microseconds, -math.inf)
        return False


class Inbox:
    """Takes in what the engine delivers by callback; one for the source's life, for the library is given its address.

    It and its callback hold each other, so that one per connection would stay in memory for good.

    Args:
        count: Called with the reason of everything that goes wrong.
    """

    def __init__(self, count: Callable[[str], None]) -> None:
        self.callback = _libdcgm.CALLBACK(self._take)
        self._count = count
        self._error: Exception | None = None
        self._now = 0.0
        self._movement = Movement(0.0, count)
        self._values: dict[Entity, dict[int, Value]] = {}
        self._codes: dict[Entity, int] = {}
        self._events: list[tuple[Entity, int, int]] | None = None

    def expect(self, movement: Movement, now: float) -> None:
        """Get ready for the latest values of one watch."""
        self._movement, self._now, self._events = movement, now, None
        self._values, self._codes, self._error = {}, {}, None

    def expect_events(self) -> None:
        """Get ready for every value since a time: what happened, not how something is."""
        self._values, self._codes, self._error, self._events = {}, {}, None, []

    def delivered(self) -> tuple[Mapping[Entity, Mapping[int, Value]], Mapping[Entity, int]]:
        """Return the good values by entity and field id, and the code of entities that are lost or need a reset."""
        self._raise_again()
        return self._values, self._codes

    def events(self) -> list[tuple[Entity, int, int]]:
        """Return (entity, value, microseconds of the engine's clock), oldest first."""
        self._raise_again()
        return sorted(self._events or (), key=lambda event: event[2])

    def _raise_again(self) -> None:
        if self._error is not None:
            raise self._error

    def _take(self, group: int, entity: int, address: int, count: int, _user: object) -> int:
        try:
            if self._events is None:
                self._take_values((group, entity), address, count)
            else:
                self._take_events((group, entity), address, count, self._events)
        except Exception as error:  # noqa: BLE001 - nothing passes through C; it is raised again after the call
            self._error = error
            return -1
        return 0

    def _take_values(self, entity: Entity, address: int, count: int) -> None:
        values = self._values.setdefault(entity, {})
        for record in records(address, count):
            if record.status in (_libdcgm.GPU_IS_LOST, _libdcgm.RESET_REQUIRED, _libdcgm.DETACHED):
                self._codes[entity] = record.status
            value = decode(record)
            if value is None:
                continue
            field_id = record.field_id
            if not self._movement.is_fresh(entity, field_id, record.at_microseconds, self._now):
                continue
            if not isinstance(value, str):
                told, clamped = in_range(field_id, value)
                if clamped:
                    self._count("dcgm_clamped")
                if told is None:
                    continue
                value = told
            values[field_id] = value

    def _take_events(self, entity: Entity, address: int, count: int, into: list[tuple[Entity, int, int]]) -> None:
        for record in records(address, count):
            value = decode(record)
            if isinstance(value, int):
                into.append((entity, value, record.at_microseconds))
