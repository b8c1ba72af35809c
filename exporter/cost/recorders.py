"""Chooses whose hours count where several Prometheus servers recorded the same cluster; pure.

Two servers cut hours at different instants, so only the hours of one server add up to what was metered: of a job over a
full hour the larger values of both have up to 5 minutes twice. So one recorder counts for a cluster and all measures of
a chunk. An hour that it missed is in its next value, and nothing is taken from another for it. Another takes over where
that value is in the next chunk, where the rules no longer knew what they had recorded last, or where the recorder ends.
At such a change the edges of two servers meet: the sum misses or repeats at most 5 minutes and a scrape.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias

CARRIED_HOURS = 27
"""A value has all hours since the last one of its recorder, if those are not more."""
_MOST = 0.75
"""With less than this part of what another recorded in the same hours, a value does not have them all."""
_BEGUN = 0.5
"""How many hours the first value of a recorder is thought not to have."""
_EDGE = 0.1
"""Recorders that saw the same differ by less than this part of their largest hour: 5 minutes and a scrape."""

Recorder: TypeAlias = tuple[tuple[str, str], ...]
"""Labels of a recorded series besides its name and its cluster: those of the Prometheus that recorded it."""
Hours: TypeAlias = Mapping[int, float]
"""GPU-seconds of a recorder by hour: the number of the full hour since 1970 at which it ends."""


class Span(NamedTuple):
    """What one value covers."""

    recorder: Recorder
    begin: int
    end: int
    """Full hours since 1970."""
    seconds: float
    lost: float = 0.0
    """How many of these hours the value is thought not to have."""


class Way(NamedTuple):
    """Values that count one after the other."""

    lost: float = 0.0
    """Hours that no value has."""
    changes: int = 0
    """How often another recorder takes over."""
    spans: tuple[Span, ...] = ()
    """The values in the order of time."""

    def with_span(self, span: Span) -> "Way":
        """Return the way with one more value."""
        is_change = bool(self.spans) and self.spans[-1].recorder != span.recorder
        return Way(self.lost + span.lost, self.changes + is_change, (*self.spans, span))

    @property
    def seconds(self) -> float:
        """GPU-seconds of its values."""
        return sum(span.seconds for span in self.spans)


_BADNESS = itemgetter(0, 1)
"""Of two ways the one with fewer lost hours is better, then the one with fewer changes."""


def spans_of(hours: Mapping[Recorder, Hours]) -> list[Span]:
    """Return what the values of a cluster's recorders cover.

    The first value of a recorder begins with its first evaluation. A value after missed hours that has too little for
    them has the last hour only: the recorder had lost what it knew, or had stopped while it recorded an hour.
    """
    found = []
    for recorder, own in hours.items():
        before: int | None = None
        for end in sorted(own):
            if before is None or end - before > CARRIED_HOURS or _lacks_hours(recorder, before, end, hours):
                found.append(Span(recorder, end - 1, end, own[end], _BEGUN))
            else:
                found.append(Span(recorder, before, end, own[end]))
            before = end
    return found


def _lacks_hours(recorder: Recorder, begin: int, end: int, hours: Mapping[Recorder, Hours]) -> bool:
    """Return whether a value after missed hours has too little for them, as another recorder of all of them shows."""
    if end - begin == 1:
        return False
    known = [
        sum(other[hour] for hour in range(begin + 1, end + 1))
        for other in hours.values()
        if all(hour in other for hour in range(begin, end + 1))
    ]
    return bool(known) and hours[recorder][end] < _MOST * max(known)


def chosen(spans: Sequence[Span], begin: int, end: int, order: Sequence[Recorder]) -> Way:
    """Return the values that count in a period of one cluster.

    Args:
        spans: All values of the cluster.
        begin: Full hour, since 1970.
        end: The same.
        order: Recorders; of those that are as good the first one counts.
    """
    # With an hour of any recorder at the beginning, what is in a later value and before it was counted there.
    is_known = any(span.end == begin for span in spans)
    usable = [
        span._replace(begin=max(span.begin, begin), lost=span.lost + 0.001 * max(0, begin - span.begin))
        for span in spans
        if begin < span.end <= end and (span.begin >= begin or not is_known)
    ]
    usable.sort(key=lambda span: order.index(span.recorder))
    best = _best(usable, begin, end)
    alone = [_best([span for span in usable if span.recorder == name], begin, end) for name in order]
    enough = [way for way in alone if way.spans and way.lost <= best.lost]
    if not enough:
        return best
    # One that recorded each hour can still have lacked nodes.
    edge = _EDGE * max(span.seconds / (span.end - span.begin) for span in spans)
    most = max(way.seconds for way in enough)
    return next(way for way in enough if way.seconds >= most - edge)


def _best(spans: Iterable[Span], begin: int, end: int) -> Way:
    """Return the best way."""
    by_end: dict[int, list[Span]] = {}
    for span in spans:
        by_end.setdefault(span.end, []).append(span)
    # Of each full hour the best way to it, by the recorder of its last value.
    ways: dict[int, dict[Recorder | None, Way]] = {begin: {None: Way()}}
    for hour in range(begin + 1, end + 1):
        here = {last: way._replace(lost=way.lost + 1) for last, way in ways[hour - 1].items()}
        for span in by_end.get(hour, ()):
            way = min((way.with_span(span) for way in ways[span.begin].values()), key=_BADNESS)
            here[span.recorder] = min(here.get(span.recorder, way), way, key=_BADNESS)
        ways[hour] = here
    return min(ways[end].values(), key=_BADNESS)


def order_of(hours: Mapping[Recorder, Hours], first: int) -> list[Recorder]:
    """Return the recorders of a cluster: those with the most hours after the first one, then by their labels."""
    return sorted(hours, key=lambda name: (-sum(hour > first for hour in hours[name]), name))


class Turn(NamedTuple):
    """A range of hours in which the values of one recorder count."""

    begin: int
    end: int
    recorder: Recorder


def turns_of(spans: Sequence[Span], begin: int, end: int, order: Sequence[Recorder]) -> list[Turn]:
    """Return the ranges of a period, one for each change of the recorder; the arguments are those of ``chosen``."""
    way = chosen(spans, begin, end, order)
    if way.spans and way.changes == 0:
        name = way.spans[0].recorder
        if sum(span.recorder == name and begin < span.end <= end for span in spans) == len(way.spans):
            return [Turn(begin, end, name)]
    found: list[Turn] = []
    for span in way.spans:
        if found and found[-1][1:] == (span.begin, span.recorder):
            found[-1] = found[-1]._replace(end=span.end)
        else:
            found.append(Turn(span.begin, span.end, span.recorder))
    return found


def differing_labels(recorders: Iterable[Recorder]) -> set[str]:
    """Return the names of labels whose values differ between recorders."""
    labels = [dict(recorder) for recorder in recorders]
    names = {name for metric in labels for name in metric}
    return {name for name in names if len({metric.get(name, "") for metric in labels}) > 1}
