"""Activity windows: active and measured GPU-seconds of holders, owners and shared devices over the last hours.

For owners there are also effective and profiled seconds, and the use of resources.

Sums only grow. Their values are recorded at marks on a time axis. A window is the current sum minus the sum at its
start, interpolated between two marks. The cost of a read does not depend on the length of the window.
"""

import base64
import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from exporter.model.attribution import HolderKey, Owner, is_other_pod
from exporter.model.ledger import RESOURCES, WINDOWS, Bottleneck, ByState, PodAccount, Portion, ResourceProfile
from exporter.model.records import read

FINE_SECONDS, COARSE_SECONDS = 60.0, 900.0
"""Minimum time between two marks: for windows up to ``FINE_WINDOW_SECONDS``, and for longer ones."""
FINE_WINDOW_SECONDS, COARSE_WINDOW_SECONDS = 7200.0, 86400.0
ESTIMATED_SECONDS = 900.0
"""Time after its last estimate for which a holder's activity counts as estimated."""
HOLDER_SECONDS = 900.0
"""Time without a portion after which a holder is dropped, because no window of it can still be covered."""
OWNERS_LIMIT = 2000
"""Maximum number of owners; above it, the owners that ended first are dropped."""

_SHORT = {name: seconds for name, seconds in WINDOWS.items() if seconds <= FINE_WINDOW_SECONDS}
_LONG = {name: seconds for name, seconds in WINDOWS.items() if name not in _SHORT}
_NOTHING: dict[str, tuple[float, ...]] = dict.fromkeys(_SHORT, (0.0, 0.0))

_WRAP = 0xFFFFFFFF
"""Points are milliseconds in 32 bits that wrap; differences up to 49 GPU-days are still correct."""
_MILLISECONDS = 1000

Sums = tuple[float, ...]
"""GPU-seconds: (active, measured); for a profile, the sums of ``_PROFILE``, of windows above 2 h the first two."""
_Marked = tuple[int, ...]
"""Sums in milliseconds of 32 bits."""
_USE = ("active", "measured")
_CLASSES = tuple(Bottleneck)
_PROFILE = ("effective", "profiled", *_CLASSES, *RESOURCES, "sm", "sm_profiled")
"""Names of the sums of a profile: effective and profiled seconds; profiled seconds by bottleneck; use of each resource
and of the multiprocessors, times seconds; seconds with measured multiprocessors."""
_Places = Mapping[str, tuple[int, float]]
"""Place of the start of each window, by name: number of a mark, and position (0..1) between it and the next mark."""
_Key = TypeVar("_Key")


def own_owner(namespace: str, pod: str) -> Owner:
    """Return the owner of a pod with an unknown workload: the pod itself."""
    return Owner(namespace=namespace, kind="Pod", name=pod)


def owner_shown(owner: Owner, namespace: str, pod: str) -> Owner:
    """Return the shown owner of a pod: not provisional, not only a namespace, and without cost labels."""
    return own_owner(namespace, pod) if owner.provisional or not owner.name else owner.without_cost_labels


@dataclass(slots=True)
class _Axis:
    """Instants (marks) at which sums are recorded, for some windows."""

    step_seconds: float
    windows: Mapping[str, float]
    """Lengths of the windows in seconds, by name."""
    most_sums: int
    """Number of recorded sums, from the first one."""
    first: int = 0
    """Number of the first kept mark; numbers are never reused."""
    times: "array[float]" = field(default_factory=lambda: array("d"))

    def mark(self, steady: float, gap_seconds: float = 0.0) -> bool:
        """Add a mark if it is due, and return whether it was due; drop marks before all windows.

        Args:
            steady: The instant.
            gap_seconds: Time without samples after the instant. A mark is due before a gap of more than a step.
        """
        since = steady - self.times[-1] if self.times else math.inf
        if since < self.step_seconds and not (since > 0 and gap_seconds > self.step_seconds):
            return False
        self.times.append(steady)
        outside = bisect_right(self.times, steady - max(self.windows.values())) - 1  # the last one before all windows
        if outside > 0:
            del self.times[:outside]
            self.first += outside
        return True

    @property
    def last(self) -> int:
        """Number of the newest mark."""
        return self.first + len(self.times) - 1

    def load(self, first: object, times: Sequence[object], steady: float) -> None:
        """Set marks of the same boot.

        Raises:
            ValueError: The values are not marks, or are later than now.
        """
        self.first = int(read(float, first))
        self.times.extend(read(float, time) for time in times)
        if any(time > later for time, later in pairwise((*self.times, steady))):
            raise ValueError("marks out of order")

    def places(self, now: float) -> _Places:
        """Return the place of the start of each window; a start before the first mark counts as that mark."""
        return {name: self._place(now - seconds, now) for name, seconds in self.windows.items()}

    def _place(self, at: float, now: float) -> tuple[int, float]:
        number = bisect_right(self.times, at) - 1
        if number < 0:
            return self.first, 0.0
        begin = self.times[number]
        end = self.times[number + 1] if number + 1 < len(self.times) else now
        return self.first + number, (at - begin) / (end - begin) if end > begin else 1.0


@dataclass(slots=True)
class _Points:
    """Values of some sums at consecutive marks, from the first mark after their start to the last change."""

    axis: _Axis
    width: int
    """Number of sums."""
    first: int = 0
    values: "array[int]" = field(default_factory=lambda: array("I"))

    @property
    def end(self) -> int:
        """Number of the mark after the last point."""
        return self.first + len(self.values) // self.width

    def note(self, now: _Marked) -> None:
        """Record the sums at the newest mark. Unchanged sums get no point, since the last point still applies."""
        values, width, sums = self.values, self.width, now[: self.width]
        if not values:
            self.first = self.axis.last
        last = tuple(values[-width:])
        if last != sums:
            values.extend(last * (self.axis.last - self.end))
            values.extend(sums)
        gone = self.axis.first - self.first
        if gone > 0:
            del values[: width * min(gone, len(values) // width - 1)]
            self.first = self.axis.first

    def at(self, number: int) -> _Marked:
        """Return the sums at a mark; 0 before the first point."""
        width = self.width
        place = min(width * (number - self.first), len(self.values) - width)
        return tuple(self.values[place : place + width]) if place >= 0 else (0,) * width

    def since(self, places: _Places, now: _Marked) -> dict[str, Sums]:
        """Return the increase since the start of each window, from the current sums."""
        now, found = now[: self.width], dict[str, Sums]()
        for name, (number, part) in places.items():
            old = self.at(number)
            increase: list[float] = _increase(old, now)
            if part and any(increase):
                after = self.at(number + 1) if number < self.axis.last else now
                increase = [one - step * part for one, step in zip(increase, _increase(old, after), strict=True)]
            found[name] = tuple([one / _MILLISECONDS for one in increase])
        return found

    def absorb(self, other: "_Points") -> None:
        """Add other points of the same axis."""
        if not self.values:
            self.first, self.values = other.first, other.values
        elif other.values:
            first, end = min(self.first, other.first), max(self.end, other.end)
            pairs = (zip(self.at(number), other.at(number), strict=True) for number in range(first, end))
            self.values = array("I", [(one + more) & _WRAP for pair in pairs for one, more in pair])
            self.first = first

    def dump(self) -> list[Any]:
        return [self.first, base64.b64encode(self.values.tobytes()).decode("ascii")]

    def load(self, data: Sequence[Any]) -> None:
        first, text = data
        self.first = int(first)
        self.values.frombytes(base64.b64decode(text, validate=True))
        count, axis = len(self.values) // self.width, self.axis
        inside = axis.first <= self.first <= axis.first + len(axis.times) - count
        if len(self.values) % self.width or (count and not inside):
            raise ValueError("points outside the marks")


def _increase(before: _Marked, after: _Marked) -> list[float]:
    return [(new - old) & _WRAP for old, new in zip(before, after, strict=True)]


class _Sums:
    """Sums of seconds since the start, and their points on some axes.

    Args:
        axes: The axes.
        width: Number of sums.
    """

    __slots__ = ("changed", "points", "totals")

    def __init__(self, axes: Sequence[_Axis], width: int = len(_USE)) -> None:
        self.totals = [0.0] * width
        self.changed = 0.0
        """Instant of the last addition."""
        self.points = [_Points(axis, min(width, axis.most_sums)) for axis in axes]

    def add(self, seconds: Sequence[float], steady: float) -> None:
        self.totals = [known + more for known, more in zip(self.totals, seconds, strict=True)]
        self.changed = steady

    def now(self) -> _Marked:
        """Return the sums in the form of a point."""
        return tuple(round(one * _MILLISECONDS) & _WRAP for one in self.totals)

    def since(self, places: Sequence[_Places]) -> dict[str, Sums]:
        """Return the increase by window, from the places on each axis."""
        now = self.now()
        found = [points.since(of_axis, now) for points, of_axis in zip(self.points, places, strict=False)]
        return found[0] | found[1] if found[1:] else found[0]

    def absorb(self, other: "_Sums") -> None:
        self.add(other.totals, max(self.changed, other.changed))
        for points, more in zip(self.points, other.points, strict=True):
            points.absorb(more)

    def dump(self) -> list[Any]:
        points = [points.dump() for points in self.points]
        # Earlier releases expect points of both axes.
        return [*self.now(), self.changed, *points, *([] if points[1:] else [[0, ""]])]

    def load(self, data: Sequence[Any]) -> "_Sums":
        width = len(self.totals)
        self.add([read(float, one) / _MILLISECONDS for one in data[:width]], read(float, data[width]))
        for points, saved in zip(self.points, data[width + 1 :], strict=False):
            points.load(saved)
        return self


@dataclass(slots=True, kw_only=True)
class _Holder:
    pod_uid: str | None
    sums: _Sums
    charged: Owner | None = None
    """Owner in the portions, the same object while it does not change."""
    owner: Owner | None = None
    """Owner under which the holder is shown."""
    estimated_until: float = 0.0
    seen: float = 0.0


@dataclass(frozen=True, slots=True)
class WindowSample:
    """Windows that end at one instant, by name."""

    steady: float
    windows: "Windows"
    _places: Sequence[_Places]

    def owners(self) -> frozenset[Owner]:
        """Return the owners that have held a device within a day."""
        return frozenset(self.windows.owners)

    def of_owner(self, owner: Owner) -> dict[str, Sums]:
        """Return active and measured seconds of an owner; empty for an unknown owner."""
        return self._since(self.windows.owners.get(owner))

    def profile_of(self, owner: Owner) -> dict[str, Sums]:
        """Return the sums of ``_PROFILE`` of an owner, above 2 h only the first two; empty without profiled time."""
        return self._since(self.windows.profiles.get(owner))

    def of_holder(self, key: HolderKey, pod_uid: str | None) -> dict[str, Sums]:
        """Return active and measured seconds of a holder over each window up to 2 h."""
        holder = self.windows.holders.get(key)
        if holder is None or is_other_pod(holder.pod_uid, pod_uid):
            return _NOTHING
        return holder.sums.since(self._places)

    def of_shared(self, device_uuid: str) -> dict[str, Sums]:
        """Return active and measured seconds of all estimated holders of a device, over each window up to 2 h."""
        return self._since(self.windows.shared.get(device_uuid)) or _NOTHING

    def _since(self, sums: _Sums | None) -> dict[str, Sums]:
        return {} if sums is None else sums.since(self._places)

    def is_estimated(self, key: HolderKey) -> bool:
        """Return whether a holder's activity was only estimated within the last 15 minutes."""
        holder = self.windows.holders.get(key)
        return holder is not None and self.steady <= holder.estimated_until


def _axes() -> tuple[_Axis, _Axis]:
    return _Axis(FINE_SECONDS, _SHORT, len(_PROFILE)), _Axis(COARSE_SECONDS, _LONG, len(_USE))


@dataclass(slots=True)
class Windows:
    """Sums portions per holder, per owner and, for estimated activity, per shared device.

    The windows of an owner include all its holders, also ended ones. When the owner of a pod becomes known, the earlier
    sums of the pod move to that owner. Estimated portions do not count for holders and owners; they mark the holder as
    estimated for 15 minutes.
    """

    axes: tuple[_Axis, _Axis] = field(default_factory=_axes)
    """Fine and coarse axis. Owners and profiles are on both, holders and shared devices on the fine axis."""
    holders: dict[HolderKey, _Holder] = field(default_factory=dict)
    owners: dict[Owner, _Sums] = field(default_factory=dict)
    profiles: dict[Owner, _Sums] = field(default_factory=dict)
    """Sums of ``_PROFILE`` by owner; an owner without profiled time is absent."""
    shared: dict[str, _Sums] = field(default_factory=dict)
    """Sums by UUID of the device."""
    _last: float | None = None
    """Instant of the last portions."""

    @property
    def fine(self) -> Sequence[_Axis]:
        """Only the fine axis."""
        return self.axes[:1]

    def add(self, portions: Sequence[Portion], steady: float) -> None:
        """Add the portions of one sample.

        Args:
            portions: Result of one call of ``Meter.add``.
            steady: End of the portions, in seconds of the monotonic clock.
        """
        if self._last is None:
            self._mark(steady - max((portion.interval_seconds or 0.0 for portion in portions), default=0.0))
        elif steady - self._last > FINE_SECONDS:
            self._mark(self._last, steady - self._last)  # so the sums before a gap are not spread over it
        for portion in portions:
            if portion.pod is not None:
                self._add(portion, portion.pod, steady)
        self._last = steady
        self._mark(steady)

    def _add(self, portion: Portion, pod: PodAccount, steady: float) -> None:
        holder = self.holders.get(pod.key)
        if holder is None or is_other_pod(holder.pod_uid, pod.pod_uid):
            holder = self.holders[pod.key] = _Holder(pod_uid=pod.pod_uid, sums=_Sums(self.fine))
        owner = self._owner_of(holder, portion.account.owner, pod)
        holder.pod_uid = pod.pod_uid or holder.pod_uid
        holder.seen = steady
        use = portion.seconds.active, portion.seconds.measured
        if portion.estimated:
            holder.estimated_until = steady + ESTIMATED_SECONDS
            self._sums(self.shared, pod.device_uuid, self.fine).add(use, steady)
        elif portion.seconds.measured > 0:
            holder.sums.add(use, steady)
            self._sums(self.owners, owner, self.axes).add(use, steady)
            if portion.profile:
                self._add_profile(owner, portion.profile, portion.seconds, steady)

    def _add_profile(self, owner: Owner, profile: ResourceProfile, seconds: ByState, steady: float) -> None:
        profiled, whole, sm_ratio = seconds.profiled, seconds.total, profile.sm_ratio
        if not profiled:
            return
        by_class = [profiled if kind is profile.bottleneck else 0.0 for kind in _CLASSES]
        used = [min(profiled, whole * use) for use in profile.uses]
        of_sm = (0.0, 0.0) if sm_ratio is None else (min(profiled, whole * sm_ratio), profiled)
        sums = self._sums(self.profiles, owner, self.axes, len(_PROFILE))
        sums.add((seconds.effective, profiled, *by_class, *used, *of_sm), steady)

    def _sums(self, known: dict[_Key, _Sums], key: _Key, axes: Sequence[_Axis], width: int = len(_USE)) -> _Sums:
        sums = known.get(key)
        if sums is None:
            sums = known[key] = _Sums(axes, width)
        return sums

    def _owner_of(self, holder: _Holder, charged: Owner, pod: PodAccount) -> Owner:
        """Return the owner of a holder; when the owner becomes known, move the windows of the pod to it."""
        if holder.owner is None or holder.charged is not charged:
            owner, own = owner_shown(charged, pod.namespace, pod.pod), own_owner(pod.namespace, pod.pod)
            if holder.owner == own:
                self.settle(own, owner)
            holder.charged, holder.owner = charged, owner
            self._sums(self.owners, owner, self.axes)
        return holder.owner

    def settle(self, pod: Owner, owner: Owner) -> None:
        """Move the windows of a pod to its owner when the owner becomes known; the pod may have ended meanwhile.

        Args:
            pod: The pod as an owner, provisional or not.
            owner: Actual owner; no effect if it is the pod itself.
        """
        own, owner = own_owner(pod.namespace, pod.name), owner_shown(owner, pod.namespace, pod.name)
        if owner != own and own in self.owners:
            self._sums(self.owners, owner, self.axes).absorb(self.owners.pop(own))
            if own in self.profiles:
                self._sums(self.profiles, owner, self.axes, len(_PROFILE)).absorb(self.profiles.pop(own))
            for holder in self.holders.values():
                if holder.owner == own:
                    holder.charged = None  # its next portion finds the owner again

    def _mark(self, steady: float, gap_seconds: float = 0.0) -> None:
        for number, axis in enumerate(self.axes):
            if axis.mark(steady, gap_seconds):
                self._forget(steady)
                held = (holder.sums for holder in self.holders.values())
                for sums in (*held, *self.owners.values(), *self.profiles.values(), *self.shared.values()):
                    for points in sums.points[number : number + 1]:  # holders and shared devices are on one axis
                        points.note(sums.now())

    def _forget(self, steady: float) -> None:
        for key in [key for key, holder in self.holders.items() if steady - holder.seen > HOLDER_SECONDS]:
            del self.holders[key]
        for uuid in [uuid for uuid, sums in self.shared.items() if steady - sums.changed > FINE_WINDOW_SECONDS]:
            del self.shared[uuid]
        held = {holder.owner for holder in self.holders.values()}
        ended = {owner: sums.changed for owner, sums in self.owners.items() if owner not in held}
        too_many = len(self.owners) - OWNERS_LIMIT
        for rank, owner in enumerate(sorted(ended, key=ended.__getitem__)):
            if rank >= too_many and steady - ended[owner] <= COARSE_WINDOW_SECONDS:
                break
            del self.owners[owner]
            self.profiles.pop(owner, None)

    def at(self, steady: float) -> WindowSample:
        """Return the windows that end at an instant, in seconds of the monotonic clock."""
        return WindowSample(steady, self, [axis.places(steady) for axis in self.axes])

    def dump(self) -> dict[str, Any]:
        """Return all windows, for JSON."""
        fine, coarse = ([axis.first, axis.times.tolist()] for axis in self.axes)
        return {
            "last": self._last,
            "fine": fine,
            "coarse": coarse,
            "holders": [
                {
                    "key": key,
                    "pod_uid": holder.pod_uid,
                    "owner": _texts(holder.owner) if holder.owner else None,
                    "estimated_until": holder.estimated_until,
                    "seen": holder.seen,
                    "sums": holder.sums.dump(),
                }
                for key, holder in self.holders.items()
            ],
            "owners": [[_texts(owner), sums.dump()] for owner, sums in self.owners.items()],
            "profiles": [[_texts(owner), sums.dump()] for owner, sums in self.profiles.items()],
            "shared": [[uuid, sums.dump()] for uuid, sums in self.shared.items()],
        }

    @classmethod
    def load(cls, data: Mapping[str, Any], steady: float) -> "Windows":
        """Parse the output of ``dump``, in the same boot.

        Args:
            data: Output of ``dump``.
            steady: Current seconds of the monotonic clock.

        Raises:
            KeyError, TypeError, ValueError: The data has another form.
        """
        windows = cls()
        windows._last = None if data["last"] is None else read(float, data["last"])
        for axis, (first, times) in zip(windows.axes, (data["fine"], data["coarse"]), strict=True):
            axis.load(first, times, steady)
        for texts, sums in data["owners"]:
            windows.owners[_owner_of(texts)] = _Sums(windows.axes).load(sums)
        for texts, sums in data["profiles"]:
            windows.profiles[_owner_of(texts)] = _Sums(windows.axes, len(_PROFILE)).load(sums)
        for uuid, sums in data["shared"]:
            windows.shared[read(str, uuid)] = _Sums(windows.fine).load(sums)
        for entry in data["holders"]:
            windows.holders[_four(entry["key"])] = _Holder(
                pod_uid=entry["pod_uid"] and read(str, entry["pod_uid"]),
                owner=entry["owner"] and _owner_of(entry["owner"]),
                estimated_until=read(float, entry["estimated_until"]),
                seen=read(float, entry["seen"]),
                sums=_Sums(windows.fine).load(entry["sums"]),
            )
        return windows


def _texts(owner: Owner) -> list[str]:
    return [owner.namespace, owner.kind, owner.name, owner.team]


def _owner_of(texts: Sequence[object]) -> Owner:
    namespace, kind, name, team = _four(texts)
    return Owner(namespace=namespace, kind=kind, name=name, team=team)


def _four(texts: Sequence[object]) -> tuple[str, str, str, str]:
    one, two, three, four = (read(str, text) for text in texts)
    return one, two, three, four
