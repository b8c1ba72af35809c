"""Runs the agent's tick: joins sources and attribution into one immutable snapshot."""

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace

from exporter.agent.attributor import Attributor
from exporter.agent.history import ActivityLog, EventLog, SourceRecord
from exporter.agent.metering import Metering
from exporter.agent.sources import Sources
from exporter.agent.views import Viewer, darkened
from exporter.attribution.tenants import TenantSource
from exporter.model.attribution import Attribution
from exporter.model.devices import DeviceState, Reading, SourceState, SourceStatus
from exporter.model.snapshot import DeviceView, Snapshot

_Views = tuple[DeviceView, ...]


@dataclass(slots=True, kw_only=True)
class Node:
    """Parts of the agent that make the snapshots of one node."""

    name: str
    sources: Sources
    attributor: Attributor
    viewer: Viewer
    sample_interval_seconds: float
    process_clock: Callable[[], float]
    """Monotonic clock in seconds, for the duration of the tick."""
    metering: Metering
    record: SourceRecord = field(default_factory=SourceRecord)
    events: EventLog = field(default_factory=EventLog)
    activity: ActivityLog = field(default_factory=ActivityLog)
    own_errors: Counter[tuple[str, str]] = field(default_factory=Counter)

    def tick(self, now: float, steady: float) -> Snapshot:
        """Process the new readings and answers, and return the node's snapshot; arguments as of ``steps``."""
        return next(filter(None, self.steps(now, steady)))

    def steps(self, now: float, steady: float) -> Iterator[Snapshot | None]:
        """Process the new readings and answers in steps; yield ``None`` after each, and the node's snapshot at the end.

        A step takes a few milliseconds, so a scrape does not wait for the whole tick. Never blocks. The next tick
        starts only after this one.

        Args:
            now: Unix time; the clock of the node can be set at any time.
            steady: Seconds of the monotonic clock, for the instants of readings and for durations.
        """
        started = self.process_clock()
        metadata = self.attributor.metadata
        self.metering.become_writer(steady)  # first: the saved state must not replace newer data
        if metadata:
            self.metering.prices.learn(metadata.node_facts)
        sampled: tuple[Attribution, _Views] | None = None
        for reading in self.sources.take(now, steady):
            sampled = yield from self._add(reading, now, steady)
            yield None
        newest = self.record.newest
        fresh = newest is not None and self.sources.is_fresh(newest.age_seconds(now, steady))
        attribution, views = sampled or (self.attributor.join(newest, now, steady), ())
        statuses = self.sources.statuses
        if newest is not None and not fresh:
            newest = darkened(newest, statuses[0].reason or "stale")
        if newest is not None and not (views and fresh):
            views = self.viewer.views(newest, attribution, self.events.xids, steady)
        if sampled is None:  # with a sample, the prices are already up to date
            self.metering.prices.look_up(views, now)
        yield replace(
            self._empty(now, steady),
            reading=newest,
            devices=views,
            sources=statuses,
            attribution=attribution,
            metadata=metadata.status if metadata else None,
            metering=self.metering.view(views, now=now, steady=steady),
            errors=self._errors(),
            history=self.activity.history(now, steady, self.sources.stale_after_seconds),
            events=self.events.by_device(steady),
            xid_window_seconds=self.events.xid_window_seconds,
            clock_events_window_seconds=self.events.clock_events_window_seconds,
            tick_duration_seconds=self.process_clock() - started,
            ready=fresh,
            not_ready_reasons=() if fresh else _why_not(statuses, newest),
        )

    def _add(self, reading: Reading, now: float, steady: float) -> Generator[None, None, tuple[Attribution, _Views]]:
        """Process and meter one reading in steps; return its holders and its views."""
        before, newest = self.record.newest, self.record.add(reading)
        if left_out := self.events.add(newest, before, steady):
            self.own_errors["agent", "xid_codes"] += left_out
        if isinstance(self.attributor.kubelet, TenantSource):
            self.attributor.kubelet.observe(newest, now)
        attribution = self.attributor.join(newest, now, steady)
        # In the same step as the join: the kubelet's first answer may arrive before the next step.
        is_charged = self.metering.begun or not self.attributor.awaits_holders(
            attribution, steady, resumes=self.metering.resumes
        )
        yield None
        views = self.viewer.views(newest, attribution, self.events.xids, steady)
        self.activity.add(views, steady, self.sources.stale_after_seconds)
        yield None
        if is_charged:
            self.metering.observe(views, sampled_steady=reading.instant, now=now, steady=steady)
        return attribution, views

    def after_failed_tick(self, last: Snapshot | None, now: float, steady: float) -> Snapshot:
        """Return the last snapshot with the errors since then; if it is too old, without values and not ready.

        Args:
            last: Result of the last successful tick or of this method; ``None`` if there was none.
            now: Unix time.
            steady: Current seconds of the monotonic clock.
        """
        last = last or self._empty(now, steady)
        stale = last.stale_reason(steady)
        if not stale:
            return replace(last, errors=self._errors())
        devices = tuple(_without_values(view) for view in last.devices)
        return replace(
            last,
            errors=self._errors(),
            devices=devices,
            metering=replace(last.metering, owners=None),
            ready=False,
            not_ready_reasons=(stale,),
        )

    def _empty(self, now: float, steady: float) -> Snapshot:
        """Return a snapshot without data."""
        return Snapshot(
            taken_at_seconds=now,
            taken_steady_seconds=steady,
            stale_after_seconds=self.sources.stale_after_seconds,
            node=self.name,
            simulated=self.metering.simulated,
            not_ready_reasons=("no picture of the node yet",),
        )

    def count_error(self, part: str, reason: str) -> None:
        """Count an error of the agent itself."""
        self.own_errors[part, reason] += 1

    def _errors(self) -> dict[tuple[str, str], int]:
        errors: Counter[tuple[str, str]] = Counter(self.own_errors)
        for counted in (self.metering.errors, self.sources.errors, self.viewer.judge.errors):
            errors.update(counted)
        for part, source in (("attribution", self.attributor.kubelet), ("metadata", self.attributor.metadata)):
            if source:
                errors.update({(part, reason): count for reason, count in source.errors.items()})
        return dict(errors)


def _without_values(view: DeviceView) -> DeviceView:
    """Return a device without measured values, because they are too old; identity, holders and events stay."""
    return replace(
        view,
        # A failure of the agent does not mean that the GPU is down.
        state=DeviceState.UNKNOWN if view.state is DeviceState.UP else view.state,
        reason=view.reason or "stale",
        values={},
        activity=None,
        activity_unknown_reason="stale",
        pods=tuple(
            replace(use, activity=None, idle_for_seconds=None, memory_used_bytes=None, values={}) for use in view.pods
        ),
        unattributed_activity_ratio=None,
        unattributed_memory_bytes=None,
        unattributed_processes=None,
        profiling=None,
    )


def _why_not(statuses: tuple[SourceStatus, ...], newest: Reading | None) -> tuple[str, ...]:
    """Return the reason of each source without a reading; a working source has none while another fails."""
    down = [status for status in statuses if status.state is not SourceState.UP]
    if down:
        reasons = {status: status.message or status.reason or "no reading yet" for status in down}
        return tuple(f"source {status.name} is {status.state}: {reason}" for status, reason in reasons.items())
    what = "source {} has not sent a reading yet" if newest is None else "the newest reading of source {} is too old"
    return tuple(what.format(status.name) for status in statuses)
