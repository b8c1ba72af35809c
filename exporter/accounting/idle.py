"""Since when a holder has its device, and since when it leaves it idle."""

from collections.abc import Iterable
from dataclasses import dataclass, field

HolderKey = tuple[str, str, str, str]
"""(device uuid, namespace, pod, container)."""


@dataclass(slots=True)
class _Memory:
    first_seen: float
    pod_uid: str | None
    idle_since: float
    last_known: float | None = None
    """When activity was last known; ``None`` if never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What can be said of a holder now, in seconds; ``None`` is unknown."""

    age_seconds: float
    idle_for_seconds: float | None


@dataclass(slots=True)
class IdleClock:
    """Remembers, per holder, when it was first seen and when it was last busy.

    ``threshold_ratio`` is the activity (0..1) from which on a holder counts as busy. Time in which activity was
    unknown for longer than ``tolerated_gap_seconds`` is never counted as idle: the clock starts anew after it.
    """

    threshold_ratio: float
    tolerated_gap_seconds: float
    _memory: dict[HolderKey, _Memory] = field(default_factory=dict)

    def observe(self, key: HolderKey, now: float, activity_ratio: float | None, pod_uid: str | None) -> Standing:
        """Take note of one sample of one holder.

        Args:
            key: Who holds what.
            now: Seconds, best of a clock that nobody sets; a step backwards never makes a duration negative.
            activity_ratio: Activity of the holder *as a part of what it holds*, ``None`` if unknown.
            pod_uid: UID of the pod where known; another UID under the same name is another pod.
        """
        memory = self._memory.get(key)
        if memory is None or (pod_uid and memory.pod_uid and pod_uid != memory.pod_uid):
            memory = self._memory[key] = _Memory(first_seen=now, pod_uid=pod_uid, idle_since=now)
        memory.pod_uid = memory.pod_uid or pod_uid
        memory.first_seen = min(memory.first_seen, now)
        age = now - memory.first_seen
        if activity_ratio is None:
            return Standing(age_seconds=age, idle_for_seconds=None)
        seen_before = memory.last_known if memory.last_known is not None else memory.first_seen
        if activity_ratio >= self.threshold_ratio or now - seen_before > self.tolerated_gap_seconds:
            memory.idle_since = now
        memory.idle_since = min(memory.idle_since, now)
        memory.last_known = now
        return Standing(age_seconds=age, idle_for_seconds=now - memory.idle_since)

    def forget(self, keep: Iterable[HolderKey]) -> None:
        """Forget holders that are not in ``keep``; call it only when the holders are known."""
        for key in self._memory.keys() - set(keep):
            del self._memory[key]
