"""The counters of pods: what each container on a device has had, until some time after its end."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.accounting.tally import Tally, tally_of, text
from exporter.model import PodAccount, Totals

PodKey = tuple[str, str, str, str]
"""(device uuid, namespace, pod, container)."""


@dataclass(slots=True, kw_only=True)
class PodTable:
    """Tallies of pods; one is dropped ``linger_seconds`` after its last charge."""

    linger_seconds: float = 300.0
    _tallies: dict[PodAccount, Tally] = field(default_factory=dict)
    _changed: dict[PodAccount, float] = field(default_factory=dict)
    """Monotonic time of the last charge in this process; a pod from before a restart has none at first."""
    _now: dict[PodKey, PodAccount] = field(default_factory=dict)
    """The pod that has a name now."""

    def tally(self, pod: PodAccount, steady: float) -> Tally:
        """Return the tally of a pod, to be charged at a monotonic time.

        A UID that becomes known, or is unknown for a while, makes no other pod; one that differs does.
        """
        known = self._known(pod)
        self._changed[known] = steady
        return self._tallies[known]

    def _known(self, pod: PodAccount) -> PodAccount:
        if pod in self._tallies:
            return pod
        before = self._now.get(_key(pod))
        tally = None
        if before is not None and before in self._tallies and not _other_pod(before, pod):
            if pod.pod_uid is None and replace(pod, pod_uid=before.pod_uid) == before:
                return before
            tally = self._tallies.pop(before)
            self._changed.pop(before, None)
        self._now[_key(pod)] = pod
        self._tallies[pod] = tally or Tally()
        return pod

    def drop_ended(self, steady: float) -> None:
        """Drop pods that ended long enough ago; to be called only where time is metered: only then an end is known."""
        for pod in [*self._tallies]:
            if steady <= self._changed.setdefault(pod, steady) + self.linger_seconds:
                continue
            del self._tallies[pod], self._changed[pod]
            if self._now.get(_key(pod)) == pod:
                del self._now[_key(pod)]

    def shown(self) -> dict[PodAccount, Totals]:
        """Return the totals of this moment."""
        return {pod: tally.totals() for pod, tally in self._tallies.items()}

    def dump(self) -> list[dict[str, Any]]:
        """Return all of it, ready for JSON."""
        return [
            {name: getattr(pod, name) for name in PodAccount.__slots__} | {"totals": tally.dump()}
            for pod, tally in self._tallies.items()
        ]

    def restore(self, tallies: Mapping[PodAccount, Tally]) -> None:
        """Go on from what ``pods_of`` has read."""
        self._tallies = dict(tallies)
        self._changed = {}
        self._now = {_key(pod): pod for pod in tallies}


def pods_of(entries: Iterable[Mapping[str, Any]]) -> dict[PodAccount, Tally]:
    """Read what ``PodTable.dump`` wrote.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: It is something else.
    """
    return {_pod_of(entry): tally_of(entry["totals"]) for entry in entries}


def _key(pod: PodAccount) -> PodKey:
    return pod.device_uuid, pod.namespace, pod.pod, pod.container


def _other_pod(before: PodAccount, after: PodAccount) -> bool:
    return bool(before.pod_uid and after.pod_uid and before.pod_uid != after.pod_uid)


def _pod_of(entry: Mapping[str, Any]) -> PodAccount:
    texts = {name: text(entry, name) for name in PodAccount.__slots__ if name not in {"gpu_index", "pod_uid"}}
    uid = None if entry["pod_uid"] is None else text(entry, "pod_uid")
    return PodAccount(**texts, gpu_index=int(entry["gpu_index"]), pod_uid=uid)
