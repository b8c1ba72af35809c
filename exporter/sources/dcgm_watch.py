"""The watches of one connection: made as planned, kept while they fit, halved where one field is refused, read."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from exporter.sources import _libdcgm
from exporter.sources.dcgm_engine import Engine, reason_of
from exporter.sources.dcgm_group import Group, RefusedError
from exporter.sources.dcgm_plan import Pace, Watching
from exporter.sources.dcgm_values import Entity, Inbox, Movement, Value

_SLOW_SECONDS = 10.0
_QUICKEST_PROFILING_SECONDS = 0.1
"""A hard limit of the hardware's counters."""
_MISSED_UPDATES = 3.0
_RETRY_SECONDS = 600.0
_FULL_RETRY_SECONDS = 60.0
_SILENT_SECONDS = 10.0
_SILENT_RETRY_SECONDS = 3600.0
_ROUNDS = 4
_EARLY = 0.1
"""Part of an interval by which a beat may come early."""
_NOTHING_YET = frozenset({_libdcgm.OK, _libdcgm.NO_DATA, _libdcgm.NOT_WATCHED, _libdcgm.STALE})

Values = Mapping[Entity, Mapping[int, Value]]


@dataclass(slots=True, kw_only=True)
class _Watch:
    """A watch that stands, and what was last read of it."""

    group: Group
    pace: Pace
    movement: Movement
    every_seconds: float
    begun_at: float
    read_at: float = -math.inf
    values: Values
    codes: Mapping[Entity, int]
    gone: bool = False
    spoke: bool = False
    """Whether it gave a value at the last read."""

    def is_awaited(self, now: float) -> bool:
        """Whether a first value should be there by now, and the engine's own beat may be a little behind ours."""
        age = now - self.begun_at
        begun = (1 - _EARLY) * self.every_seconds <= age <= _MISSED_UPDATES * self.every_seconds
        return self.pace is Pace.PROFILING and not self.spoke and begun

    def is_due(self, now: float) -> bool:
        # At first as often as samples are taken: the first values come when they come.
        if now - self.begun_at < 2 * self.every_seconds:
            return True
        return now - self.read_at >= self.every_seconds * (0.5 - _EARLY)


class Watches:
    """Everything that is watched over one connection.

    Args:
        engine: On whose connection.
        interval_seconds: Between samples.
        inbox: Takes in the values.
        count: Called with the reason of everything that goes wrong.
    """

    def __init__(self, engine: Engine, interval_seconds: float, inbox: Inbox, count: Callable[[str], None]) -> None:
        self._engine = engine
        self._count = count
        self._inbox = inbox
        self._standing: dict[Watching, _Watch] = {}
        self._refused: dict[tuple[Entity, int], tuple[int, float]] = {}
        self.most_fields = _libdcgm.MAX_FIELDS_PER_GROUP
        """How many fields the engine takes in one watch, as far as it was found."""
        self._codecs: dict[Entity, Mapping[int, Value]] = {}
        self.profiling_stopped = False
        """Whether profiled values were there before the last read and are not now."""
        self._every_seconds = {
            Pace.FAST: interval_seconds,
            Pace.SLOW: max(interval_seconds, _SLOW_SECONDS),
            Pace.PROFILING: max(interval_seconds, _QUICKEST_PROFILING_SECONDS),
            Pace.CODECS: max(interval_seconds, _QUICKEST_PROFILING_SECONDS),
        }

    def is_refused(self, entity: Entity, field_id: int) -> bool:
        """Tell whether the engine would not watch a field of an entity a while ago."""
        return (entity, field_id) in self._refused

    def stands_for(self, entity: Entity) -> bool:
        """Tell whether anything of an entity is watched."""
        return any(entity in watching.members for watching in self._standing)

    @property
    def full(self) -> bool:
        """Whether nothing is watched because the engine has no room for another group."""
        return not self._standing and any(code == _libdcgm.LIMIT_REACHED for code, _ in self._refused.values())

    def refusal_of(self, entity: Entity, field_ids: Sequence[int]) -> int | None:
        """Return the code with which every one of the fields was refused; ``None`` where not all were."""
        codes = [self._refused[entity, one][0] if (entity, one) in self._refused else None for one in field_ids]
        return codes[0] if codes and None not in codes else None

    def follow(self, planned: Callable[[], Sequence[Watching]], now: float) -> bool:
        """Watch what is planned and nothing else; what is watched already goes on undisturbed.

        Args:
            planned: Gives the plan; asked again after a refusal, of which ``is_refused`` tells.
            now: Seconds of the monotonic clock.

        Returns:
            Whether a new watch was made.

        Raises:
            SourceError: the engine is gone.
        """
        self._refused = {key: (code, until) for key, (code, until) in self._refused.items() if now < until}
        self._leave_out_silent(now)
        for watching in [one for one, watch in self._standing.items() if watch.gone]:
            self._standing.pop(watching).group.close()
        made = False
        ended: list[Watching] = []
        wanted: Sequence[Watching] = ()
        for _ in range(_ROUNDS):
            wanted = planned()
            missing = [one for one in wanted if one not in self._standing]
            refusals = [one for one in missing if not self._begin(one, now)]
            made = made or len(refusals) < len(missing)
            # Of those each part was tried, and ended again.
            ended += refusals
            if not refusals:
                break
        # Only now: a value that both the old and the new watch have never stops coming.
        for watching in [one for one in self._standing if one not in wanted]:
            self._standing.pop(watching).group.close()
            ended.append(watching)
        for standing, watch in self._standing.items():
            if any(_overlap(standing, one) for one in ended):
                watch.group.renew()
        if made:
            self.hurry()
        return made

    def _leave_out_silent(self, now: float) -> None:
        """Refuse codec units that give no value: GPUs have fewer than DCGM has fields, and engines log each miss."""
        for watching, watch in self._standing.items():
            patience = max(_SILENT_SECONDS, _MISSED_UPDATES * watch.every_seconds)
            if watch.pace is not Pace.CODECS or not watch.spoke or now - watch.begun_at < patience:
                continue
            for entity, values in watch.values.items():
                for unit in set(watching.field_ids) - values.keys() if values else ():
                    self._refused[entity, unit] = (_libdcgm.NOT_SUPPORTED, now + _SILENT_RETRY_SECONDS)

    def _carry_codecs(self, watching: Watching, watch: _Watch, now: float) -> None:
        """Keep the values of codecs over a change of the plan: the first ones of a new watch take an interval."""
        if watch.spoke:
            self._codecs.update({entity: values for entity, values in watch.values.items() if values})
        elif now - watch.begun_at <= _MISSED_UPDATES * watch.every_seconds:
            watch.values = {entity: self._codecs[entity] for entity in watching.members if entity in self._codecs}

    def hurry(self) -> None:
        """Have the engine measure at once what is due, and wait until it has."""
        self._engine.call("dcgmUpdateAllFields", 1)

    def read(self, now: float) -> tuple[dict[Entity, dict[int, Value]], dict[Entity, int]]:
        """Return the good values by entity and field id, and the codes of entities that are lost or need a reset.

        Args:
            now: Seconds of the monotonic clock.

        Raises:
            SourceError: the engine is gone.
        """
        values: dict[Entity, dict[int, Value]] = {}
        codes: dict[Entity, int] = {}
        self.profiling_stopped = False
        for watching, watch in self._standing.items():
            if watch.is_due(now):
                self._read(watch, now)
                if watch.pace is Pace.CODECS:
                    self._carry_codecs(watching, watch, now)
            for entity, some in watch.values.items():
                values.setdefault(entity, {}).update(some)
            codes.update(watch.codes)
        return values, codes

    def speaks(self, entity: Entity) -> bool:
        """Tell whether an entity said anything at the last read that is not carried over from an earlier one."""
        own = [watch for watching, watch in self._standing.items() if entity in watching.members]
        quick = [watch for watch in own if watch.pace is Pace.FAST]
        return any(watch.values.get(entity) for watch in quick or own)

    @property
    def lost_one(self) -> bool:
        """Whether the engine does not know a watch any more, so that the plan has to be followed anew."""
        return any(watch.gone for watch in self._standing.values())

    def _read(self, watch: _Watch, now: float) -> None:
        if watch.is_awaited(now):
            self.hurry()
        self._inbox.expect(watch.movement, now)
        code = watch.group.latest(self._inbox.callback)
        watch.values, watch.codes = self._inbox.delivered()
        watch.read_at = now
        speaks = any(watch.values.values())
        if watch.spoke and not speaks and watch.pace is Pace.PROFILING:
            self.profiling_stopped = True
        watch.spoke = speaks
        if code == _libdcgm.NOT_CONFIGURED:
            watch.gone = True
        if code not in _NOTHING_YET:
            self._count(reason_of(code))

    def _begin(self, watching: Watching, now: float) -> bool:
        """Make a watch; where it is refused, find out of whom and for which fields, and return False."""
        every_seconds = self._every_seconds[watching.pace]
        try:
            group = Group(self._engine, watching.members, watching.field_ids, every_seconds=every_seconds)
        except RefusedError as refusal:
            self._settle(watching, refusal.code, every_seconds, now)
            return False
        self._standing[watching] = _Watch(
            group=group,
            pace=watching.pace,
            movement=Movement(_MISSED_UPDATES * every_seconds, self._count),
            every_seconds=every_seconds,
            begun_at=now,
            values={},
            codes={},
        )
        return True

    def _settle(self, watching: Watching, code: int, every_seconds: float, now: float) -> None:
        """Note which fields of which entities are refused; first by entity, then by field."""
        members, retry_seconds = watching.members, _RETRY_SECONDS
        if code == _libdcgm.LIMIT_REACHED:
            # The engine has no room for another group now, whatever is in it.
            refused, retry_seconds = dict.fromkeys(watching.field_ids, code), _FULL_RETRY_SECONDS
        else:
            if len(members) > 1:
                failing = tuple(one for one in members if self._try([one], watching.field_ids, every_seconds))
                members = failing or members
            refused = self._halve(members, watching.field_ids, every_seconds)
        if not refused:
            self._count(reason_of(code))
            if len(watching.field_ids) > 1 and self._try(members, watching.field_ids, every_seconds):
                # Each part is accepted, only not all at once: this engine takes fewer fields in a watch.
                self.most_fields = (len(watching.field_ids) + 1) // 2
        for reason in {reason_of(one) for one in refused.values()}:
            self._count(reason)
        for entity in members:
            for field_id, why in refused.items():
                self._refused[entity, field_id] = (why, now + retry_seconds)

    def _halve(self, members: Sequence[Entity], field_ids: Sequence[int], every_seconds: float) -> dict[int, int]:
        """Return the fields that are refused, with the code of the refusal."""
        code = self._try(members, field_ids, every_seconds)
        if code == _libdcgm.OK:
            return {}
        if len(field_ids) == 1:
            return {field_ids[0]: code}
        middle = len(field_ids) // 2
        return {
            **self._halve(members, field_ids[:middle], every_seconds),
            **self._halve(members, field_ids[middle:], every_seconds),
        }

    def _try(self, members: Sequence[Entity], field_ids: Sequence[int], every_seconds: float) -> int:
        try:
            Group(self._engine, members, field_ids, every_seconds=every_seconds).close()
        except RefusedError as refusal:
            return refusal.code
        return _libdcgm.OK


def _overlap(one: Watching, other: Watching) -> bool:
    return not (set(one.members).isdisjoint(other.members) or set(one.field_ids).isdisjoint(other.field_ids))
