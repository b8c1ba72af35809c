"""Reads Xid events from the engine, each once, without those before the agent's start."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from exporter.gpu.dcgm.engine import Engine
from exporter.gpu.dcgm.entities import Place
from exporter.gpu.dcgm.library import MAX_ENTITIES_PER_GROUP, Code, reason_of
from exporter.gpu.dcgm.readings import Entity, RecordBuffer
from exporter.gpu.dcgm.watch import FieldGroup, RefusedError
from exporter.model import Field, XidEvent

_FIELD = int(Field.XID_ERRORS)
_KEPT_SECONDS = 3600.0
_KEPT_SAMPLES = 100
_QUIET = frozenset({Code.OK, Code.NO_DATA})
_NEVER = -1
_Event = tuple[Entity, int, int]
"""Entity, Xid, microseconds of the engine's clock."""


@dataclass(frozen=True, slots=True)
class _Watch:
    """Entities whose events the engine keeps."""

    group: FieldGroup
    members: tuple[Entity, ...]


class Xids:
    """Reads the events of all GPUs and instances of one connection.

    Args:
        engine: On whose connection.
        every_seconds: How often the engine looks.
        inbox: Takes in the events.
        count: Called with the reason of everything that goes wrong.
    """

    def __init__(self, engine: Engine, every_seconds: float, inbox: RecordBuffer, count: Callable[[str], None]) -> None:
        self._engine = engine
        self._every_seconds = every_seconds
        self._count = count
        self._inbox = inbox
        self._watches: tuple[_Watch, ...] = ()
        self._members: frozenset[Entity] = frozenset()
        self._told_to: dict[Entity, int] = {}
        """When an entity's newest event that is told or from before was, in microseconds of the engine's clock."""

    def follow(self, members: frozenset[Entity]) -> None:
        """Watch these entities from now on.

        Raises:
            SourceError: the engine is gone.
        """
        if members == self._members:
            return
        before, self._members = self._watches, members
        self._watches = tuple(self._begun(sorted(members)))
        for watch in before:
            watch.group.close()
        for watch in self._watches if before else ():
            watch.group.renew()

    def _begun(self, members: list[Entity]) -> Iterable[_Watch]:
        for start in range(0, len(members), MAX_ENTITIES_PER_GROUP):
            some = tuple(members[start : start + MAX_ENTITIES_PER_GROUP])
            try:
                group = FieldGroup(
                    self._engine,
                    some,
                    (_FIELD,),
                    every_seconds=self._every_seconds,
                    keep_seconds=_KEPT_SECONDS,
                    samples=_KEPT_SAMPLES,
                )
            except RefusedError as refusal:
                self._count(f"xids_{reason_of(refusal.code)}")
                # Asked for again at the next look.
                self._members = frozenset()
            else:
                yield _Watch(group, some)

    def read(self, places: Mapping[Entity, Place], now: float) -> tuple[XidEvent, ...]:
        """Return the events since the last call.

        Args:
            places: Where each entity is.
            now: Unix time of this machine, which the events get: the engine's clock may be another one.

        Raises:
            SourceError: the engine is gone.
        """
        found: dict[tuple[str, int, int], XidEvent] = {}
        for entity, xid, at in [event for watch in self._watches for event in self._events(watch)]:
            with contextlib.suppress(KeyError):
                uuid, instance, part = places[entity]
                event = XidEvent(uuid=uuid, xid=xid, at_seconds=now, gpu_instance_id=instance, compute_instance_id=part)
                # The engine may note one event of a GPU and of its parts: the smallest part says most.
                before = found.setdefault((uuid, xid, at), event)
                if _depth(before) < _depth(event):
                    found[uuid, xid, at] = event
        return tuple(found.values())

    def _events(self, watch: _Watch) -> list[_Event]:
        """Return what is new; the newest of each are looked at first, which takes one round trip for all of them."""
        latest = self._ask(watch.group.latest)
        if latest is None:
            return []
        newest = {entity: at for entity, _, at in latest}
        told_to = {entity: self._told_to.setdefault(entity, newest.get(entity, _NEVER)) for entity in watch.members}
        # An event that is older than what was told came after the engine's clock was set back.
        after = {entity: min(told_to[entity], at - 1) for entity, at in newest.items() if at != told_to.get(entity, at)}
        if not after:
            return []
        told = self._ask(partial(watch.group.since, min(after.values()) + 1)) or []
        events = [event for event in told if event[0] in after and event[2] > after[event[0]]]
        self._told_to.update({entity: at for entity, _, at in events})
        return events

    def _ask(self, call: Callable[[Callable[..., int]], int]) -> list[_Event] | None:
        """Return events, oldest first; ``None`` where the engine does not tell."""
        self._inbox.expect_events()
        code = call(self._inbox.callback)
        if code in _QUIET:
            return self._inbox.events()
        self._count(f"xids_{reason_of(code)}")
        if code == Code.NOT_CONFIGURED:
            # Watched again at the next look.
            self._members = frozenset()
        return None


def _depth(event: XidEvent) -> int:
    return (event.gpu_instance_id is not None) + (event.compute_instance_id is not None)
