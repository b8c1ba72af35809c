"""Xid events as the engine has noted them: each is told once, and those from before we came not at all."""

import contextlib
from collections.abc import Callable, Mapping

from exporter.model import Field, XidEvent
from exporter.sources import _libdcgm
from exporter.sources.dcgm_engine import Engine, reason_of
from exporter.sources.dcgm_group import Group, RefusedError
from exporter.sources.dcgm_values import Entity, Inbox

_FIELD = int(Field.XID_ERRORS)
_KEPT_SECONDS = 3600.0
_KEPT_SAMPLES = 100
_QUIET = frozenset({_libdcgm.OK, _libdcgm.NO_DATA})


class Xids:
    """Reads the events of all GPUs and instances of one connection.

    Args:
        engine: On whose connection.
        every_seconds: How often the engine looks.
        inbox: Takes in the events.
        count: Called with the reason of everything that goes wrong.
    """

    def __init__(self, engine: Engine, every_seconds: float, inbox: Inbox, count: Callable[[str], None]) -> None:
        self._engine = engine
        self._every_seconds = every_seconds
        self._count = count
        self._inbox = inbox
        self._group: Group | None = None
        self._members: frozenset[Entity] = frozenset()
        self._since = 0
        self._primed = False

    def follow(self, members: frozenset[Entity]) -> None:
        """Watch these entities from now on.

        Raises:
            SourceError: the engine is gone.
        """
        if members == self._members:
            return
        before, self._group, self._members = self._group, None, members
        try:
            if members:
                self._group = Group(
                    self._engine,
                    sorted(members),
                    (_FIELD,),
                    every_seconds=self._every_seconds,
                    keep_seconds=_KEPT_SECONDS,
                    samples=_KEPT_SAMPLES,
                )
        except RefusedError as refusal:
            self._count(f"xids_{reason_of(refusal.code)}")
            # Asked for again at the next look.
            self._members = frozenset()
        if before is not None:
            before.close()

    def read(self, places: Mapping[Entity, tuple[str, int | None]], now: float) -> tuple[XidEvent, ...]:
        """Return the events since the last call.

        Args:
            places: Entity to its GPU's UUID and NVML's GPU instance id.
            now: Unix time of this machine, which the events get: the engine's clock may be another one.

        Raises:
            SourceError: the engine is gone.
        """
        if self._group is None:
            return ()
        self._inbox.expect_events()
        code, go_on = self._group.since(self._since, self._inbox.callback)
        if code not in _QUIET:
            self._count(f"xids_{reason_of(code)}")
            if code == _libdcgm.NOT_CONFIGURED:
                self._group, self._members = None, frozenset()
            return ()
        self._since = max(self._since, go_on)
        events, first = self._inbox.events(), not self._primed
        self._primed = True
        found: dict[tuple[str, int, int], XidEvent] = {}
        for entity, xid, at in () if first else events:
            with contextlib.suppress(KeyError):
                uuid, instance = places[entity]
                event = XidEvent(uuid=uuid, xid=xid, at_seconds=now, gpu_instance_id=instance)
                # One event may be noted of the GPU and of its part: the part says more.
                found.setdefault((uuid, xid, at), event)
                if instance is not None:
                    found[uuid, xid, at] = event
        return tuple(found.values())
