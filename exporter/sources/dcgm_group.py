"""Entities, fields and the watch of the ones on the others, as the engine keeps them for one connection."""

import secrets
from collections.abc import Callable, Sequence
from ctypes import byref, c_double, c_int, c_int64, c_uint, c_ushort

from exporter.sources import _libdcgm
from exporter.sources._libdcgm import Handle
from exporter.sources.dcgm_engine import Engine
from exporter.sources.dcgm_values import Entity


class RefusedError(Exception):
    """The engine would not watch; never leaves the sources. ``code`` is its dcgmReturn_t."""

    def __init__(self, code: int) -> None:
        """Keep the code, by which it is told what was refused."""
        super().__init__(code)
        self.code = code


class Group:
    """A watch that stands; ``close`` takes it back.

    Args:
        engine: On whose connection it is made.
        members: Entities, of any groups; at most ``MAX_ENTITIES_PER_GROUP``.
        field_ids: At most ``MAX_FIELDS_PER_GROUP``, each known to the library.
        every_seconds: How often the engine measures.
        keep_seconds: How long it keeps what it measured, 0.0 for no limit.
        samples: How many values of each it keeps.

    Raises:
        RefusedError: one of the steps was refused; what was made by then is taken back.
        SourceError: the engine is gone.
    """

    def __init__(
        self,
        engine: Engine,
        members: Sequence[Entity],
        field_ids: Sequence[int],
        *,
        every_seconds: float,
        keep_seconds: float = 0.0,
        samples: int = 1,
    ) -> None:
        self._engine = engine
        self._group = Handle()
        self._fields = Handle()
        self._undo: list[tuple[str, tuple[Handle, ...]]] = []
        try:
            self._make(members, field_ids)
            microseconds = c_int64(round(every_seconds * 1e6))
            self._watch = (self._group, self._fields, microseconds, c_double(keep_seconds), c_int(samples))
            self._do("dcgmWatchFields", *self._watch)
        except RefusedError:
            self.close()
            raise
        self._undo.append(("dcgmUnwatchFields", (self._group, self._fields)))

    def renew(self) -> None:
        """Watch again after another group with some of the same members and fields was closed.

        To the engine a connection watches a field of an entity or it does not, through however many groups.

        Raises:
            SourceError: the engine is gone.
        """
        self._engine.call("dcgmWatchFields", *self._watch)

    def _make(self, members: Sequence[Entity], field_ids: Sequence[int]) -> None:
        # Names of field groups are the engine's, not the connection's: two agents on one engine must not meet.
        name = f"gpu-cost-exporter-{secrets.token_hex(8)}".encode()
        self._do("dcgmGroupCreate", c_int(_libdcgm.EMPTY_GROUP), name, byref(self._group))
        self._undo.append(("dcgmGroupDestroy", (self._group,)))
        for entity_group, entity_id in members:
            self._do("dcgmGroupAddEntity", self._group, c_uint(entity_group), c_uint(entity_id))
        ids = (c_ushort * len(field_ids))(*field_ids)
        self._do("dcgmFieldGroupCreate", c_int(len(field_ids)), ids, name, byref(self._fields))
        self._undo.append(("dcgmFieldGroupDestroy", (self._fields,)))

    def _do(self, name: str, *arguments: object) -> None:
        code = self._engine.call(name, *arguments)
        if code != _libdcgm.OK:
            raise RefusedError(code)

    def close(self) -> None:
        """Take the watch back; what the engine says to that changes nothing.

        Raises:
            SourceError: the engine is gone, and all of this with it.
        """
        while self._undo:
            name, arguments = self._undo.pop()
            self._engine.call(name, *arguments)

    def latest(self, callback: Callable[..., int]) -> int:
        """Have the latest values delivered, and return the code."""
        return self._engine.call("dcgmGetLatestValues_v2", self._group, self._fields, callback, None)

    def since(self, microseconds: int, callback: Callable[..., int]) -> int:
        """Have every value since a time of the engine's clock delivered, and return the code.

        The library makes a round trip for each entity and field.
        """
        # It tells where to go on by the engine's clock, which may be set back meanwhile: not used.
        go_on = c_int64(0)
        return self._engine.call(
            "dcgmGetValuesSince_v2",
            *(self._group, self._fields, c_int64(microseconds), byref(go_on), callback, None),
        )
