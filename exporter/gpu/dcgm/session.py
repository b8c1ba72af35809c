"""Reads all GPUs through a DCGM host engine, local or remote: values, states and Xid events."""

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache, partial

from exporter.errors import SourceError
from exporter.gpu.dcgm.engine import MISMATCH, Engine, advice_of, connect, problem
from exporter.gpu.dcgm.entities import PAUSED, DcgmDevice, DcgmLayout, Entities, Place
from exporter.gpu.dcgm.library import MAX_ENTITIES_PER_GROUP, SONAMES, Code, load, prefer, reason_of
from exporter.gpu.dcgm.readings import Entity, Inbox, Profiling, SessionFields, Value, decode, sort
from exporter.gpu.dcgm.watch import FieldGroup, RefusedError, Watches
from exporter.model.devices import DeviceState, Gpu, GpuReading, MigReading, ProfilingState, Reading, XidEvent
from exporter.model.fields import PROFILING, Field

_LOOK_SECONDS = 4.9
_REREAD_SECONDS = 60.0
_SILENT_INTERVALS = 3.0
_field = lru_cache(maxsize=1024)(Field)
"""Returns the field of an id, several times faster than ``Field``."""
_MEASURED = (DeviceState.UP, DeviceState.RESET_REQUIRED)
_DOWN: Mapping[int, tuple[DeviceState, str]] = {
    Code.GPU_IS_LOST: (DeviceState.LOST, "gpu_is_lost"),
    Code.RESET_REQUIRED: (DeviceState.RESET_REQUIRED, "reset_required"),
    Code.DETACHED: (DeviceState.MISSING, "detached"),
}
Values = Mapping[Entity, Mapping[int, Value]]
Event = tuple[Entity, int, int]
"""Entity, Xid, microseconds of the engine's clock."""


_KEPT_SECONDS = 3600.0
_KEPT_SAMPLES = 100
_QUIET = frozenset({Code.OK, Code.NO_DATA})
_NEVER = -1


@dataclass(slots=True)
class Xids:
    """Reads the Xid events of all GPUs and instances over one connection."""

    engine: Engine
    every_seconds: float
    """Interval at which the engine checks for events."""
    inbox: Inbox
    """Receives the events."""
    _groups: tuple[FieldGroup, ...] = ()
    _members: frozenset[Entity] = frozenset()
    _reported_to: dict[Entity, int] = field(default_factory=dict)
    """Time of the newest event by entity, also from before the connection, in microseconds of the engine's clock."""

    def follow(self, up: set[Entity], present: set[Entity]) -> None:
        """Watch the entities that are up.

        The existing watch keeps lost entities while they are present, because the event with the cause may still
        arrive. The engine refuses them in a new watch.

        Raises:
            SourceError: The engine is gone.
        """
        if up <= self._members <= present:
            return
        before, self._members = self._groups, frozenset(up)
        self._groups = tuple(self._begun(sorted(up)))
        for group in before:
            group.close()
        for group in self._groups if before else ():
            group.renew()

    def _begun(self, members: list[Entity]) -> Iterator[FieldGroup]:
        for start in range(0, len(members), MAX_ENTITIES_PER_GROUP):
            some = members[start : start + MAX_ENTITIES_PER_GROUP]
            try:
                yield FieldGroup(
                    self.engine,
                    some,
                    (Field.XID_ERRORS,),
                    every_seconds=self.every_seconds,
                    keep_seconds=_KEPT_SECONDS,
                    samples=_KEPT_SAMPLES,
                )
            except RefusedError as refusal:
                self.engine.count(f"xids_{reason_of(refusal.code)}")
                # The next call of ``follow`` tries again.
                self._members = frozenset()

    def read(self, places: Mapping[Entity, Place], now: float) -> tuple[XidEvent, ...]:
        """Return the events since the last call.

        Args:
            places: Place of each entity.
            now: Unix time of this machine for the events; the engine may run on a machine with another clock.

        Raises:
            SourceError: The engine is gone.
        """
        found: dict[tuple[str, int, int], XidEvent] = {}
        for entity, xid, at in [event for group in self._groups for event in self._events(group)]:
            with contextlib.suppress(KeyError):
                uuid, instance, part = places[entity]
                event = XidEvent(uuid=uuid, xid=xid, at_seconds=now, gpu_instance_id=instance, compute_instance_id=part)
                # The engine may report an event for a GPU and its parts; the smallest part is the most precise.
                before = found.setdefault((uuid, xid, at), event)
                if _depth(before) < _depth(event):
                    found[uuid, xid, at] = event
        return tuple(found.values())

    def _events(self, group: FieldGroup) -> list[Event]:
        """Return new events; the newest of each entity are read first, in one round trip for all."""
        latest = self._ask(group.latest)
        if latest is None:
            return []
        newest = {entity: at for entity, _, at in latest}
        last = {entity: self._reported_to.setdefault(entity, newest.get(entity, _NEVER)) for entity in group.members}
        # An event that is older than the last one means that the clock of the engine was set back.
        after = {entity: min(last[entity], at - 1) for entity, at in newest.items() if at != last.get(entity, at)}
        if not after:
            return []
        recent = self._ask(partial(group.since, min(after.values()) + 1)) or []
        events = [event for event in recent if event[0] in after and event[2] > after[event[0]]]
        self._reported_to.update({entity: at for entity, _, at in events})
        return events

    def _ask(self, call: Callable[[Callable[..., int]], int]) -> list[Event] | None:
        """Return events, oldest first; ``None`` if the engine does not answer."""
        code, found = self.inbox.fetch(call)
        if code in _QUIET:
            events = [
                (entity, value, record.at_microseconds)
                for entity, some in found.items()
                for record in some
                if isinstance(value := decode(record), int) and value >= 0
            ]
            return sorted(events, key=lambda event: event[2])
        self.engine.count(f"xids_{reason_of(code)}")
        if code == Code.NOT_CONFIGURED:
            # The next call of ``follow`` watches again.
            self._members = frozenset()
        return None


def _depth(event: XidEvent) -> int:
    return (event.gpu_instance_id is not None) + (event.compute_instance_id is not None)


@dataclass
class Session:
    """Manages the devices and watches of one connection."""

    engine: Engine
    """Connected engine."""
    wanted: SessionFields
    """Fields to read."""
    interval_seconds: float
    """Time between samples."""
    inbox: Inbox
    """Receives the engine's values."""

    def __post_init__(self) -> None:
        """Begin without devices and watches."""
        engine, wanted = self.engine, self.wanted
        self.layout = DcgmLayout()
        self._entities = Entities(engine, texts=wanted.texts, node_fields=wanted.of_the_node)
        self._profiling = Profiling(engine, PROFILING.intersection(wanted.levels))
        self._watches = Watches(engine, self.interval_seconds, self.inbox, wanted.levels)
        self.xids = Xids(engine, self.interval_seconds, self.inbox)
        self._looked_at = self._reread_at = -math.inf
        self._speaking: frozenset[str] = frozenset()
        self._spoke_at: dict[str, float] = {}

    def look(self, now: float) -> None:
        """Read the devices and their states, and watch their available fields.

        Args:
            now: Seconds of the monotonic clock.

        Raises:
            SourceError: The engine is gone.
        """
        again = now - self._reread_at >= _REREAD_SECONDS
        layout = self._entities.look(again=again)
        self._reread_at = now if again else self._reread_at
        self.layout, self._looked_at = layout, now
        if any(device.reason == PAUSED for device in layout.devices):
            # The engine refuses paused GPUs in new groups. Existing watches continue after the pause.
            return
        self._profiling.follow((one.gpu_id for one in layout.devices if one.state is DeviceState.UP), now)
        self._watches.follow(layout, self._profiling.fields_of, now)
        if self.wanted.xids:
            states = {device.gpu.uuid: device.state for device in layout.devices}
            present = {one for one, place in layout.places.items() if states[place[0]] is not DeviceState.MISSING}
            self.xids.follow({one for one in present if states[layout.places[one][0]] is DeviceState.UP}, present)

    def read(self, now: float) -> dict[str, GpuReading]:
        """Return a reading of every device by its UUID.

        Args:
            now: Seconds of the monotonic clock.

        Raises:
            NoValuesError: The engine answers and lists no GPU, or has no values of any.
            SourceError: The engine is gone.
        """
        if now - self._looked_at >= _LOOK_SECONDS or self._watches.lost_one or not self.layout.listed:
            self.look(now)
        values, codes = self._watches.read(now)
        spoke, devices = self._speaking, self.layout.devices
        self._speaking = frozenset(one.gpu.uuid for one in devices if self._watches.speaks(one.entity))
        if not spoke <= self._speaking:
            # If a GPU has no values any more, its state is read at once.
            self.look(now)
        self._profiling.look(now, at_once=self._profiling.paused or self._watches.profiling_stopped)
        self._note_silence(codes, now)
        return {device.gpu.uuid: self._reading(device, values, codes, now) for device in self.layout.devices}

    def text(self, field: Field) -> str | None:
        """Return a text of the node, ``None`` if it is not reported."""
        value = self._entities.node_values.get(int(field))
        return value if isinstance(value, str) else None

    def _note_silence(self, codes: Mapping[Entity, int], now: float) -> None:
        """Record the time since which each GPU has no values.

        Raises:
            NoValuesError: No GPU that is up has values, or all GPUs are missing at once. This indicates a fault of the
                engine, not of the GPUs.
        """
        if all(one.state is DeviceState.MISSING for one in self.layout.devices):
            raise problem("dcgm_no_gpus", self.engine.address)
        up = [one for one in self.layout.devices if one.state is DeviceState.UP and one.entity not in codes]
        uuids = [one.gpu.uuid for one in up]
        self._spoke_at = {uuid: now if uuid in self._speaking else self._spoke_at.get(uuid, now) for uuid in uuids}
        if not self.wanted.levels:
            return
        if up and self._watches.full:
            raise problem("dcgm_limit_reached", self.engine.address, gpus=len(up))
        if up and all(self._is_silent(one, now) for one in up):
            raise problem("dcgm_no_values", self.engine.address, gpus=len(up))

    def _is_silent(self, device: DcgmDevice, now: float) -> bool:
        spoke_at = self._spoke_at.get(device.gpu.uuid, now)
        return device.reason == PAUSED or now - spoke_at > _SILENT_INTERVALS * self.interval_seconds

    def _reading(self, device: DcgmDevice, values: Values, codes: Mapping[Entity, int], now: float) -> GpuReading:
        gpu, state, reason = device.gpu, device.state, device.reason
        if state is DeviceState.UP and device.entity in codes:
            state, reason = _DOWN[codes[device.entity]]
        if state not in _MEASURED:
            return GpuReading(gpu=gpu, state=state, reason=reason)
        refusal = self._watches.refusal_of(device.entity, self._profiling.fields_of(device.gpu_id))
        profiling = self._profiling.state(device.gpu_id, refusal)
        paused = profiling is ProfilingState.PAUSED
        own = _numbers(values.get(device.entity, {}), paused=paused)
        if self._watches.stands_for(device.entity) and self._is_silent(device, now):
            return GpuReading(gpu=gpu, state=DeviceState.FAILED, reason="no_values", profiling=profiling)
        return GpuReading(
            gpu=gpu,
            state=state,
            reason=reason,
            values={**_numbers(self._entities.node_values, paused=False), **own},
            instances=tuple(
                MigReading(instance=one.instance, values=_numbers(values.get(one.measured, {}), paused=paused))
                for one in device.instances
            ),
            profiling=profiling,
        )


def _numbers(values: Mapping[int, Value], *, paused: bool) -> dict[Field, int | float]:
    """Return the numeric values; while profiling is paused, without the old profiling values of the engine."""
    return {
        _field(one): value
        for one, value in values.items()
        if not isinstance(value, str) and not (paused and one in PROFILING)
    }


NAME = "dcgm"
_SHORTEST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 10.0
_LONG_SECONDS = 2.0

_NOT_LOGGED = frozenset({"dcgm_clamped", "dcgm_unknown_field", "dcgm_binary_field", "dcgm_field_of_other_entity"})
"""Reasons that are only counted: noise of the counters, and omitted fields, which are logged by number."""

_log = logging.getLogger("exporter.gpu.dcgm.session")


@dataclass
class DcgmSource:
    """Reads one host engine; open, sample repeatedly, close; may be opened again."""

    name = NAME

    fields: frozenset[Field]
    """Fields to read; fields that DCGM lacks are absent."""
    _: KW_ONLY
    address: str
    """Address of the engine: ``host:port``, ``unix:///path``, or ``embedded`` for one in this process."""
    interval_seconds: float = 1.0
    """Planned time between samples; the engine measures at the same interval."""
    monotonic: Callable[[], float] = time.monotonic
    """Clock that times the samples, in seconds."""
    library: str = ""
    """Name of the libdcgm to load first, if another version did not match the engine; empty for the newest."""

    def __post_init__(self) -> None:
        """Begin without a connection."""
        prefer(self.library or SONAMES[0])
        self.announce: Callable[[], None] = lambda: None
        """Function that is called while the engine answers slowly, so that the child does not count as hung."""
        # The first value of a profiling field takes one interval; with these waits, it returns within two.
        self.waits_seconds = (
            min(1.0, max(_SHORTEST_WAIT_SECONDS, self.interval_seconds / 4)),
            min(_LONGEST_WAIT_SECONDS, max(_SHORTEST_WAIT_SECONDS, self.interval_seconds / 3)),
        )
        self._errors: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._inbox = Inbox()
        self._session: Session | None = None
        self._known: dict[str, Gpu] = {}
        self._left_out: frozenset[int] = frozenset()
        self._busy_since = 0.0

    @property
    def fresh_process_reasons(self) -> frozenset[str]:
        """Reasons that need a new process with the other libdcgm: once per engine, without alternating."""
        return frozenset({MISMATCH} if self._known or not self.library else ())

    @property
    def fresh_arguments(self) -> tuple[str, ...]:
        """Arguments for a process with the other libdcgm, which may match the engine."""
        return "--dcgm-library", next(soname for soname in SONAMES if soname != load().soname)

    def open(self) -> None:
        """Connect, find the devices and watch them.

        Raises:
            SourceError: The library, the engine or GPUs are missing or not usable; the message has the fix.
        """
        self._busy_since = self.monotonic()
        engine = connect(self.address, count=self._count, progress=self._progress, monotonic=self.monotonic)
        try:
            self._session = self._begin(engine)
        except SourceError:
            engine.close()
            raise

    def _begin(self, engine: Engine) -> Session:
        wanted = sort(self.fields, engine.library)
        self._log_left_out(wanted, engine.version)
        session = Session(engine, wanted, self.interval_seconds, self._inbox)
        session.look(self.monotonic())
        if session.layout.devices:
            return session
        if session.layout.listed:
            raise problem("dcgm_no_values", self.address, gpus=session.layout.listed)
        raise problem("dcgm_no_gpus", self.address)

    def close(self) -> None:
        """Close the connection with all its watches; known GPUs stay known."""
        if self._session is not None:
            session, self._session = self._session, None
            session.engine.close()

    def sample(self, now: float) -> Reading:
        """Return one reading of every GPU that was ever seen.

        Args:
            now: Unix time at the start of the sample, in seconds.

        Raises:
            NoValuesError: The engine answers and has no values of any GPU; sample again.
            SourceError: The engine is gone; close, and open again.
        """
        session = self._session
        if session is None:
            raise SourceError("dcgm_not_open", "the DCGM source was not opened: open it, then sample")
        started = self._busy_since = self.monotonic()
        readings = session.read(started)
        self._known.update({uuid: reading.gpu for uuid, reading in readings.items()})
        gpus = sorted(self._known.values(), key=lambda gpu: (gpu.index, gpu.uuid))
        xids = session.xids.read(session.layout.places, now)
        errors, self._errors = self._errors, Counter()
        ended = self.monotonic()
        return Reading(
            source=NAME,
            taken_at_seconds=now + (ended - started),
            duration_seconds=ended - started,
            steady_seconds=ended,
            driver_version=session.text(Field.DRIVER_VERSION),
            nvml_version=session.text(Field.NVML_VERSION),
            dcgm_version=session.engine.version,
            gpus=tuple(
                readings.get(gpu.uuid) or GpuReading(gpu=gpu, state=DeviceState.MISSING, reason="not_enumerated")
                for gpu in gpus
            ),
            xids=xids,
            errors=dict(errors),
        )

    def _progress(self) -> None:
        now = self.monotonic()
        if now - self._busy_since >= _LONG_SECONDS:
            self._busy_since = now
            self.announce()

    def _count(self, reason: str) -> None:
        self._errors[reason] += 1
        if reason not in self._logged | _NOT_LOGGED:
            self._logged.add(reason)
            _log.warning("DCGM at %s: %s: %s", self.address, reason, advice_of(reason))

    def _log_left_out(self, wanted: SessionFields, version: str | None) -> None:
        """Log the fields that cannot be read once, not at every connection."""
        new = wanted.left_out.keys() - self._left_out
        self._left_out |= new
        for field_id in sorted(new):
            self._count(wanted.left_out[field_id])
        if new:
            ids = ", ".join(str(one) for one in sorted(new))
            _log.warning("DCGM %s has no number of a GPU for the fields %s: they are left out", version, ids)
