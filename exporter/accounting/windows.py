"""Activity windows: active and measured GPU-seconds of holders, owners and shared devices over the last hours.

Owners have effective and profiled seconds too, and the use of resources.

Sums only grow; their values are recorded at marks on a time axis. A window is the current sum less the sum at its
start, interpolated between two marks. Reading one costs the same for a minute and for a day.
"""

import base64
import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from exporter.model import (
    RESOURCES,
    WINDOWS,
    Bottleneck,
    ByState,
    HolderKey,
    Owner,
    PodAccount,
    Portion,
    ResourceProfile,
    is_other_pod,
)

FINE_SECONDS, COARSE_SECONDS = 60.0, 900.0
"""Minimum time between two marks: for windows up to ``FINE_WINDOW_SECONDS``, and for longer ones."""
FINE_WINDOW_SECONDS, COARSE_WINDOW_SECONDS = 7200.0, 86400.0
FINE_WINDOWS = tuple(name for name, seconds in WINDOWS.items() if seconds <= FINE_WINDOW_SECONDS)
COARSE_WINDOWS = tuple(name for name in WINDOWS if name not in FINE_WINDOWS)
ESTIMATED_SECONDS = 900.0
"""Time after its last estimate for which a holder's activity counts as estimated."""
HOLDER_SECONDS = 900.0
"""Time without a portion after which a holder is dropped: none of its windows could be covered any more."""
OWNERS_LIMIT = 2000
"""Maximum number of owners; above it, those that ended first are dropped."""

_WRAP = 0xFFFFFFFF
"""Points are milliseconds in 32 bits; differences up to 49 GPU-days survive the overflow."""
_MILLISECONDS = 1000
_MOST_SECONDS = 1e15

Sums = tuple[float, ...]
"""GPU-seconds: (active, measured); of a profile, (effective, profiled), and up to 2 h the rest of ``_PROFILE``."""
_Marked = tuple[int, ...]
"""The same in milliseconds of 32 bits."""
_USE = ("active", "measured")
_CLASSES = tuple(Bottleneck)
_PROFILE = ("effective", "profiled", *_CLASSES, *RESOURCES, "sm", "sm_profiled")
"""After the profiled seconds: these by bottleneck; use of each resource and of the multiprocessors, times seconds; and
the seconds in which the latter was measured."""
_WITHOUT_USE = 2 + len(_CLASSES) + 3
"""Parts of a profile in files from before the use of resources was summed."""
_Place = tuple[int, float]
"""A mark's number, and the position (0..1) of an instant between it and the next mark."""


def own_owner(namespace: str, pod: str) -> Owner:
    """Return the owner of a pod with an unknown workload: the pod."""
    return Owner(namespace=namespace, kind="Pod", name=pod)


def owner_shown(owner: Owner, namespace: str, pod: str) -> Owner:
    """Return the owner under which a pod is shown; never provisional, never a namespace alone, without cost labels."""
    return own_owner(namespace, pod) if owner.provisional or not owner.name else owner.without_cost_labels


@dataclass(slots=True)
class _Axis:
    """Instants at which sums are recorded."""

    step_seconds: float
    kept_seconds: float
    first: int = 0
    """Number of the first mark that is kept; numbers are never reused."""
    times: "array[float]" = field(default_factory=lambda: array("d"))

    def mark(self, steady: float) -> int | None:
        """Add a mark if it is due and return its number; drop marks that no window reaches."""
        if self.times and steady - self.times[-1] < self.step_seconds:
            return None
        self.times.append(steady)
        outside = bisect_right(self.times, steady - self.kept_seconds) - 1  # the last mark before the longest window
        if outside > 0:
            del self.times[:outside]
            self.first += outside
        return self.last

    @property
    def last(self) -> int:
        """Number of the newest mark."""
        return self.first + len(self.times) - 1

    def load(self, first: object, times: Sequence[object], steady: float) -> None:
        """Set marks of the same boot.

        Raises:
            ValueError: The values are not marks, or later than now.
        """
        self.first = int(_figure(first))
        self.times.extend(_figure(time) for time in times)
        if any(time > later for time, later in pairwise((*self.times, steady))):
            raise ValueError("marks out of order")

    def place(self, at: float, now: float) -> _Place:
        """Return the place of an instant; an instant before the first mark counts as that mark."""
        number = bisect_right(self.times, at) - 1
        if number < 0:
            return self.first, 0.0
        begin = self.times[number]
        end = self.times[number + 1] if number + 1 < len(self.times) else now
        return self.first + number, (at - begin) / (end - begin) if end > begin else 1.0


@dataclass(slots=True)
class _Points:
    """Values of some sums at consecutive marks, from the first mark after their start to the last change."""

    width: int
    """Number of sums."""
    first: int = 0
    values: "array[int]" = field(default_factory=lambda: array("I"))

    def note(self, axis: _Axis, number: int, sums: _Marked) -> None:
        """Record the sums at a mark. Unchanged sums need no point: the last point still applies."""
        values, width = self.values, self.width
        if not values:
            self.first = number
        elif tuple(values[-width:]) == sums:
            self._trim(axis)
            return
        else:
            missing = number - self.first - len(values) // width
            values.extend(values[-width:] * missing)
        values.extend(sums)
        self._trim(axis)

    def _trim(self, axis: _Axis) -> None:
        gone = axis.first - self.first
        if gone > 0:
            del self.values[: self.width * min(gone, len(self.values) // self.width - 1)]
            self.first = axis.first

    def at(self, number: int) -> _Marked:
        """Return the sums at a mark, 0 before the first point."""
        width = self.width
        place = min(width * (number - self.first), len(self.values) - width)
        return tuple(self.values[place : place + width]) if place >= 0 else (0,) * width

    def since(self, places: Sequence[_Place], axis: _Axis, now: _Marked) -> list[Sums]:
        """Return the increase since each of some instants.

        Args:
            places: The instants.
            axis: Axis of the points.
            now: The current sums.
        """
        newest = axis.last
        found = []
        for number, part in places:
            old = self.at(number)
            increase: list[float] = _increase(old, now)
            if part and any(increase):
                after = self.at(number + 1) if number < newest else now
                increase = [one - step * part for one, step in zip(increase, _increase(old, after), strict=True)]
            found.append(tuple(one / _MILLISECONDS for one in increase))
        return found

    def plus(self, other: "_Points") -> "_Points":
        """Return the sum of both."""
        if not self.values or not other.values:
            return self if self.values else other
        first = min(self.first, other.first)
        end = max(one.first + len(one.values) // one.width for one in (self, other))
        values = array("I")
        for number in range(first, end):
            values.extend((one + more) & _WRAP for one, more in zip(self.at(number), other.at(number), strict=True))
        return _Points(self.width, first, values)

    def dump(self) -> list[Any]:
        return [self.first, base64.b64encode(self.values.tobytes()).decode("ascii")]

    @classmethod
    def load(cls, data: Sequence[Any], axis: _Axis, width: int) -> "_Points":
        first, text = data
        points = cls(width, int(first))
        points.values.frombytes(base64.b64decode(text, validate=True))
        count = len(points.values) // width
        if len(points.values) % width or (
            count and not axis.first <= points.first <= axis.first + len(axis.times) - count
        ):
            raise ValueError("points outside the marks")
        return points


def _increase(before: _Marked, after: _Marked) -> list[float]:
    return [(new - old) & _WRAP for old, new in zip(before, after, strict=True)]


class _Sums:
    """Sums of seconds since the start, and their points on the axes.

    Args:
        width: Number of sums.
    """

    __slots__ = ("changed", "coarse", "fine", "totals")

    def __init__(self, width: int = len(_USE)) -> None:
        self.totals = [0.0] * width
        self.changed = 0.0
        """Instant of the last addition."""
        self.fine, self.coarse = _Points(width), _Points(len(_USE))

    def add(self, seconds: Sequence[float], steady: float) -> None:
        self.totals = [known + more for known, more in zip(self.totals, seconds, strict=True)]
        self.changed = steady

    def now(self) -> _Marked:
        """Return the sums in the form of a point."""
        return tuple(round(one * _MILLISECONDS) & _WRAP for one in self.totals)

    def absorb(self, other: "_Sums") -> None:
        self.add(other.totals, max(self.changed, other.changed))
        self.fine, self.coarse = self.fine.plus(other.fine), self.coarse.plus(other.coarse)

    def dump(self) -> list[Any]:
        return [*self.now(), self.changed, self.fine.dump(), self.coarse.dump()]

    @classmethod
    def load(cls, data: Sequence[Any], fine: _Axis, coarse: _Axis, width: int = len(_USE)) -> "_Sums":
        *totals, changed, of_fine, of_coarse = data
        sums = cls(width)
        sums.add([_figure(one) / _MILLISECONDS for one in totals], _figure(changed))
        sums.fine, sums.coarse = _Points.load(of_fine, fine, width), _Points.load(of_coarse, coarse, len(_USE))
        return sums


@dataclass(slots=True, kw_only=True)
class _Holder:
    pod_uid: str | None
    sums: _Sums = field(default_factory=_Sums)
    charged: Owner | None = None
    """Owner in the portions; the same object while it does not change."""
    owner: Owner | None = None
    """Owner under which the holder is shown."""
    of_owner: _Sums = field(default_factory=_Sums)
    estimated_until: float = -math.inf
    seen: float = 0.0


@dataclass(frozen=True, slots=True)
class WindowSample:
    """Windows that end at one instant."""

    steady: float
    windows: "Windows"
    _fine: tuple[_Place, ...]
    _coarse: tuple[_Place, ...]

    def owners(self) -> frozenset[Owner]:
        """Return every owner that has held a device within a day."""
        return frozenset(self.windows.owners)

    def of_owner(self, owner: Owner) -> dict[str, Sums]:
        """Return active and measured seconds of an owner by window; empty for an unknown one."""
        return self._all_windows(self.windows.owners.get(owner))

    def profile_of(self, owner: Owner) -> dict[str, Sums]:
        """Return effective and profiled seconds by window, up to 2 h all of ``_PROFILE``; empty without any."""
        return self._all_windows(self.windows.profiles.get(owner))

    def of_holder(self, key: HolderKey, pod_uid: str | None) -> dict[str, Sums]:
        """Return active and measured seconds of a holder over each window up to 2 h."""
        holder = self.windows.holders.get(key)
        if holder is None or is_other_pod(holder.pod_uid, pod_uid):
            return dict.fromkeys(FINE_WINDOWS, (0.0, 0.0))
        return self._fine_windows(holder.sums)

    def of_shared(self, device_uuid: str) -> dict[str, Sums]:
        """Return the same for all estimated holders of a device."""
        sums = self.windows.shared.get(device_uuid)
        return dict.fromkeys(FINE_WINDOWS, (0.0, 0.0)) if sums is None else self._fine_windows(sums)

    def _all_windows(self, sums: _Sums | None) -> dict[str, Sums]:
        if sums is None:
            return {}
        coarse = sums.coarse.since(self._coarse, self.windows.coarse, sums.now()[: len(_USE)])
        return self._fine_windows(sums) | dict(zip(COARSE_WINDOWS, coarse, strict=True))

    def _fine_windows(self, sums: _Sums) -> dict[str, Sums]:
        found = sums.fine.since(self._fine, self.windows.fine, sums.now())
        return dict(zip(FINE_WINDOWS, found, strict=True))

    def is_estimated(self, key: HolderKey) -> bool:
        """Return whether a holder's activity was only estimated within the last 15 minutes."""
        holder = self.windows.holders.get(key)
        return holder is not None and self.steady <= holder.estimated_until


@dataclass(slots=True)
class Windows:
    """Sums portions per holder, per owner and, for estimated activity, per shared device.

    An owner's windows include all of its holders, ended ones too. The sums of a pod from before its owner was known
    move to that owner. Estimated portions count for no holder and no owner: they mark the holder for 15 minutes.
    """

    fine: _Axis = field(default_factory=lambda: _Axis(FINE_SECONDS, FINE_WINDOW_SECONDS))
    coarse: _Axis = field(default_factory=lambda: _Axis(COARSE_SECONDS, COARSE_WINDOW_SECONDS))
    holders: dict[HolderKey, _Holder] = field(default_factory=dict)
    owners: dict[Owner, _Sums] = field(default_factory=dict)
    profiles: dict[Owner, _Sums] = field(default_factory=dict)
    """Effective and profiled seconds of the owners that have any."""
    shared: dict[str, _Sums] = field(default_factory=dict)
    """Sums by UUID of the device."""
    _last: float | None = None
    """Instant of the last portions."""

    def add(self, portions: Sequence[Portion], steady: float) -> None:
        """Add the portions of one sample.

        Args:
            portions: Result of one call of ``Meter.add``.
            steady: Their end, in seconds of the monotonic clock.
        """
        if self._last is None:
            self._mark(steady - max((portion.interval_seconds or 0.0 for portion in portions), default=0.0))
        elif steady - self._last > FINE_SECONDS:
            self._mark(self._last)  # so the sums before a gap are not spread over it
        for portion in portions:
            if portion.pod is not None:
                self._add(portion, portion.pod, steady)
        self._last = steady
        self._mark(steady)

    def _add(self, portion: Portion, pod: PodAccount, steady: float) -> None:
        holder = self.holders.get(pod.key)
        if holder is None or is_other_pod(holder.pod_uid, pod.pod_uid):
            holder = self.holders[pod.key] = _Holder(pod_uid=pod.pod_uid)
        if holder.charged is not portion.account.owner:
            self._charge(holder, portion.account.owner, pod.namespace, pod.pod)
        holder.pod_uid = pod.pod_uid or holder.pod_uid
        holder.seen = steady
        use = portion.seconds.active, portion.seconds.measured
        if portion.estimated:
            holder.estimated_until = steady + ESTIMATED_SECONDS
            self.shared.setdefault(pod.device_uuid, _Sums()).add(use, steady)
        elif portion.seconds.measured > 0:
            holder.sums.add(use, steady)
            holder.of_owner.add(use, steady)
            if portion.profile and holder.owner:
                self._add_profile(holder.owner, portion.profile, portion.seconds, steady)

    def _add_profile(self, owner: Owner, profile: ResourceProfile, seconds: ByState, steady: float) -> None:
        profiled, whole, sm_ratio = seconds.profiled, seconds.total, profile.sm_ratio
        if not profiled:
            return
        sums = self.profiles.get(owner)
        if sums is None:
            sums = self.profiles[owner] = _Sums(len(_PROFILE))
        by_class = [profiled if kind is profile.bottleneck else 0.0 for kind in _CLASSES]
        used = [min(profiled, whole * use) for use in profile.uses]
        of_sm = (0.0, 0.0) if sm_ratio is None else (min(profiled, whole * sm_ratio), profiled)
        sums.add((seconds.effective, profiled, *by_class, *used, *of_sm), steady)

    def _charge(self, holder: _Holder, charged: Owner, namespace: str, pod: str) -> None:
        """Set a holder's owner; the pod's own windows move to it when the owner becomes known."""
        owner, own = owner_shown(charged, namespace, pod), own_owner(namespace, pod)
        if holder.owner == own:
            self.settle(own, owner)
        sums = self.owners.get(owner)
        if sums is None:
            sums = self.owners[owner] = _Sums()
        holder.charged, holder.owner, holder.of_owner = charged, owner, sums

    def settle(self, pod: Owner, owner: Owner) -> None:
        """Move the windows of a pod to its owner once that is known; the pod may have ended in the meantime.

        Args:
            pod: The pod as an owner, provisional or not.
            owner: The actual owner; no effect if it is the pod itself.
        """
        own, owner = own_owner(pod.namespace, pod.name), owner_shown(owner, pod.namespace, pod.name)
        if owner != own and own in self.owners:
            self.owners.setdefault(owner, _Sums()).absorb(self.owners.pop(own))
            if own in self.profiles:
                self.profiles.setdefault(owner, _Sums(len(_PROFILE))).absorb(self.profiles.pop(own))
            for holder in self.holders.values():
                if holder.owner == own:
                    holder.charged = None  # its next portion finds the owner's sums again

    def _mark(self, steady: float) -> None:
        fine, coarse = self.fine.mark(steady), self.coarse.mark(steady)
        if fine is not None:
            self._forget(steady)
            held = (holder.sums for holder in self.holders.values())
            for sums in chain(held, self.owners.values(), self.profiles.values(), self.shared.values()):
                sums.fine.note(self.fine, fine, sums.now())
        if coarse is not None:
            for sums in (*self.owners.values(), *self.profiles.values()):
                sums.coarse.note(self.coarse, coarse, sums.now()[: len(_USE)])

    def _forget(self, steady: float) -> None:
        for key in [key for key, holder in self.holders.items() if steady - holder.seen > HOLDER_SECONDS]:
            del self.holders[key]
        for uuid in [uuid for uuid, sums in self.shared.items() if steady - sums.changed > FINE_WINDOW_SECONDS]:
            del self.shared[uuid]
        held = {id(holder.of_owner) for holder in self.holders.values()}
        ended = {owner: sums.changed for owner, sums in self.owners.items() if id(sums) not in held}
        too_many = len(self.owners) - OWNERS_LIMIT
        for rank, owner in enumerate(sorted(ended, key=ended.__getitem__)):
            if rank >= too_many and steady - ended[owner] <= COARSE_WINDOW_SECONDS:
                break
            del self.owners[owner]
            self.profiles.pop(owner, None)

    def at(self, steady: float) -> WindowSample:
        """Return the windows that end at an instant, in seconds of the monotonic clock."""
        fine = tuple(self.fine.place(steady - WINDOWS[name], steady) for name in FINE_WINDOWS)
        coarse = tuple(self.coarse.place(steady - WINDOWS[name], steady) for name in COARSE_WINDOWS)
        return WindowSample(steady, self, fine, coarse)

    def dump(self) -> dict[str, Any]:
        """Return all windows, for JSON."""
        return {
            "last": self._last,
            "fine": [self.fine.first, self.fine.times.tolist()],
            "coarse": [self.coarse.first, self.coarse.times.tolist()],
            "holders": [
                {
                    "key": key,
                    "pod_uid": holder.pod_uid,
                    "owner": _texts(holder.owner) if holder.owner else None,
                    "estimated_until": max(holder.estimated_until, 0.0),
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
            ValueError: The data has another form; the message says which part is wrong.
        """
        try:
            windows = cls()
            windows._last = None if data["last"] is None else _figure(data["last"])
            for axis, (first, times) in ((windows.fine, data["fine"]), (windows.coarse, data["coarse"])):
                axis.load(first, times, steady)
            axes = windows.fine, windows.coarse
            windows.owners = {_owner_of(texts): _Sums.load(sums, *axes) for texts, sums in data["owners"]}
            # Absent in files of layout 2; without the use of resources, they begin again.
            profiles = [one for one in data.get("profiles", ()) if len(one[1]) != _WITHOUT_USE]
            windows.profiles = {_owner_of(texts): _Sums.load(sums, *axes, len(_PROFILE)) for texts, sums in profiles}
            windows.shared = {_text(uuid): _Sums.load(sums, *axes) for uuid, sums in data["shared"]}
            for entry in data["holders"]:
                device, namespace, pod, container = (_text(text) for text in entry["key"])
                holder = _Holder(pod_uid=None if entry["pod_uid"] is None else _text(entry["pod_uid"]))
                holder.owner = None if entry["owner"] is None else _owner_of(entry["owner"])
                holder.estimated_until, holder.seen = _figure(entry["estimated_until"]), _figure(entry["seen"])
                holder.sums = _Sums.load(entry["sums"], *axes)
                windows.holders[device, namespace, pod, container] = holder
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"not activity windows: {type(error).__name__}: {error}") from error
        return windows


def _texts(owner: Owner) -> list[str]:
    return [owner.namespace, owner.kind, owner.name, owner.team]


def _owner_of(texts: Sequence[Any]) -> Owner:
    namespace, kind, name, team = (_text(text) for text in texts)
    return Owner(namespace=namespace, kind=kind, name=name, team=team)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _figure(value: object) -> float:
    if not isinstance(value, int | float) or not 0 <= value < _MOST_SECONDS:
        raise ValueError(f"{value!r} is not an amount")
    return float(value)
