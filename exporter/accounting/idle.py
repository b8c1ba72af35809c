"""Tracks the age and the idle time of each holder."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from exporter.model.attribution import HolderKey, is_other_pod

UNMEASURED_SECONDS = 300.0
"""Unmeasured time after which the idle clock restarts; longer than an upgrade of the agent."""
UNMEASURED_RATIO = 0.01
"""Tolerated unmeasured time, as a part of the measured idle time."""


@dataclass(slots=True, kw_only=True)
class IdleMemory:
    """State of the idle clock of one holder; a record of the state file. Instants are of the monotonic clock."""

    holder: HolderKey
    pod_uid: str | None
    first_seen: float
    last_seen: float
    idle_seconds: float = 0.0
    """Measured idle time since the holder was last busy."""
    unmeasured_seconds: float = 0.0
    """Unmeasured time since the holder was last busy, less the tolerated part."""
    was_busy: bool = field(default=False, init=False)
    """Whether the holder was busy in this process; not saved."""

    def __post_init__(self) -> None:
        if self.first_seen > self.last_seen:
            raise ValueError(f"not the instants of an idle clock: {self}")

    def restart(self) -> None:
        """Restart the idle time at 0."""
        self.idle_seconds = self.unmeasured_seconds = 0.0

    def resume(self, earlier: "IdleMemory") -> None:
        """Continue from the state of the same pod in an earlier process.

        An agent that waited for the ledger has measured a part of that time itself. That part counts once.
        """
        if not self.was_busy:
            both_saw = max(0.0, earlier.last_seen - self.first_seen)
            self.idle_seconds += max(0.0, earlier.idle_seconds - both_saw)
            self.unmeasured_seconds += earlier.unmeasured_seconds + max(0.0, self.first_seen - earlier.last_seen)
        self.first_seen = min(self.first_seen, earlier.first_seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleState:
    """Age and idle time of a holder, in seconds; ``None`` is unknown."""

    age_seconds: float
    idle_for_seconds: float | None


@dataclass(slots=True)
class IdleClock:
    """Measures the age and the idle time of each holder.

    Only time with measured idle activity counts. Unmeasured time (a gap, an unknown activity, an ambiguous estimate)
    neither counts nor restarts the clock, up to ``UNMEASURED_SECONDS`` and ``UNMEASURED_RATIO`` of the idle time. After
    that the clock restarts, because the holder may have worked for too long.

    Attributes:
        threshold_ratio: Minimum activity (0..1) of a busy holder.
        tolerated_gap_seconds: Longest time between two samples that counts as measured.
    """

    threshold_ratio: float
    tolerated_gap_seconds: float
    _memory: dict[HolderKey, IdleMemory] = field(default_factory=dict)
    _earlier: dict[HolderKey, IdleMemory] = field(default_factory=dict)
    """States of the previous process, kept until the UID of the pod shows whether it is the same pod."""

    def observe(self, key: HolderKey, now: float, bounds: tuple[float, float] | None, pod_uid: str | None) -> IdleState:
        """Count the time since the holder's last sample.

        Args:
            key: Holder and device.
            now: Monotonic clock, in seconds; a step backwards never makes a duration negative.
            bounds: Minimum and maximum of the holder's activity, *as a part of the held share*; ``None`` if
                unknown.
            pod_uid: UID of the pod if known; another UID under the same name is another pod.
        """
        memory = self._memory_of(key, now, pod_uid)
        elapsed = now - memory.last_seen
        memory.last_seen = now
        if elapsed < 0:
            memory.first_seen = min(memory.first_seen, now)
            memory.idle_seconds = min(memory.idle_seconds, now - memory.first_seen)
            elapsed = 0.0
        least, most = bounds or (0.0, math.inf)
        is_busy, is_idle = least >= self.threshold_ratio, most < self.threshold_ratio
        if is_idle and elapsed <= self.tolerated_gap_seconds:
            memory.idle_seconds += elapsed
            memory.unmeasured_seconds = max(0.0, memory.unmeasured_seconds - elapsed * UNMEASURED_RATIO)
        else:
            memory.unmeasured_seconds += elapsed
        if is_busy or memory.unmeasured_seconds > UNMEASURED_SECONDS:
            memory.was_busy = memory.was_busy or is_busy
            memory.restart()
        return IdleState(
            age_seconds=now - memory.first_seen,
            idle_for_seconds=memory.idle_seconds if is_idle or is_busy else None,
        )

    def _memory_of(self, key: HolderKey, now: float, pod_uid: str | None) -> IdleMemory:
        memory = self._memory.get(key)
        if memory is None or is_other_pod(memory.pod_uid, pod_uid):
            memory = self._memory[key] = IdleMemory(holder=key, pod_uid=pod_uid, first_seen=now, last_seen=now)
        memory.pod_uid = memory.pod_uid or pod_uid
        if pod_uid and self._earlier:
            earlier = self._earlier.pop(key, None)
            if earlier and earlier.pod_uid == pod_uid:
                memory.resume(earlier)
        return memory

    def forget(self, keep: Iterable[HolderKey]) -> None:
        """Drop holders that are not in ``keep``; call it only when the holders are known."""
        kept = set(keep)
        for memories in (self._memory, self._earlier):
            for key in memories.keys() - kept:
                del memories[key]

    def memories(self) -> tuple[IdleMemory, ...]:
        """Return copies of the state to save: of holders with a known pod UID."""
        known = {key: memory for key, memory in self._memory.items() if memory.pod_uid}
        return tuple(replace(memory) for memory in {**self._earlier, **known}.values())

    def restore(self, memories: Iterable[IdleMemory], now: float) -> None:
        """Continue from an earlier process of the same boot; the clock of another boot is not comparable.

        Args:
            memories: Result of ``memories``.
            now: Monotonic clock, in seconds.
        """
        self._earlier = {memory.holder: memory for memory in memories if memory.last_seen <= now}
