"""Sees that an Xid that both sources tell of is told on once, whichever leads when they do."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from exporter.model import Reading, XidEvent

SAME_SECONDS = 10.0
"""One event that both tell of within this time is one: a source that hangs for longer is started anew and forgets."""
LATE_SECONDS = 60.0
"""The same where DCGM is the second to tell: its engine takes up one event a second, so that a burst comes late."""
_KEPT = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    event: XidEvent
    source: str
    at: float
    told: bool

    def is_the_same(self, event: XidEvent, source: str) -> bool:
        """Whether it is the other source's word on what may be one event."""
        mine, its = self.event, event
        return source != self.source and (mine.uuid, mine.xid, mine.gpu_instance_id) == (
            *(its.uuid, its.xid, its.gpu_instance_id),
        )


@dataclass(slots=True, kw_only=True)
class XidsOnce:
    """Pairs the events of two sources one by one; those of the second wait until it leads.

    What the second tells while the first answers is held: the first's word is awaited. When the second leads, what it
    told last and the first did not is told, too: the first may have gone with the event that ended it.
    """

    second: str
    """Name of the source whose events wait."""
    slack_seconds: float
    """By how much later than an event a reading may be that tells of it."""
    _unpaired: deque[_Heard] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """What one source told and the other did not so far; oldest first."""
    _ready: list[XidEvent] = field(default_factory=list)

    def hear(self, reading: Reading, at: float) -> None:
        """Take the events of a source's reading, each reading once.

        Args:
            reading: As the source gave it.
            at: Its instant, of a clock that nobody sets.
        """
        held = reading.source == self.second
        for event in reading.xids:
            other = next(self._matches(event, reading.source, at), None)
            if other is not None:
                self._unpaired.remove(other)
            else:
                self._unpaired.append(_Heard(event=event, source=reading.source, at=at, told=not held))
            if not held and not (other and other.told):
                self._ready.append(event)

    def let_second_tell(self, at: float) -> None:
        """Tell what the second told by now and lately, for it leads."""
        for number, one in enumerate(self._unpaired):
            if not one.told and at - one.at <= SAME_SECONDS + self.slack_seconds:
                self._ready.append(one.event)
                self._unpaired[number] = replace(one, told=True)

    def ready(self) -> tuple[XidEvent, ...]:
        """Return what is to be told on with the next reading."""
        events = tuple(self._ready)
        self._ready.clear()
        return events

    def _matches(self, event: XidEvent, source: str, at: float) -> Iterator[_Heard]:
        earliest = at - self.slack_seconds - (LATE_SECONDS if source == self.second else SAME_SECONDS)
        return (one for one in self._unpaired if one.at >= earliest and one.is_the_same(event, source))
