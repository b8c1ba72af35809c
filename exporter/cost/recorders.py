"""Chooses the hours that count if several Prometheus servers recorded the same cluster; pure.

Servers evaluate their rules at different instants, so only the hours of one server sum to the metered time. For a job
across a full hour, the larger values of two servers count up to 5 minutes twice. One recorder therefore counts for a
cluster and for all measures of a chunk. Its next value contains an hour that it missed; no other recorder fills the
gap. Another recorder takes over if that value is in the next chunk, if the rules lost their last state, or if the
recorder ends. At a change of recorders, the sum misses or repeats at most 5 minutes and a scrape interval.
"""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias

CARRIED_HOURS = 27
"""Maximum gap in hours after which the next value still contains all hours since the previous value."""
_MOST = 0.75
"""Part of another recorder's value for the same hours, below which a value lacks some of the hours."""
_BEGUN = 0.5
"""Hours that the first value of a recorder is assumed to lack."""
_EDGE = 0.1
"""Part of the largest hour by which complete recorders differ at most: 5 minutes and a scrape interval."""

Recorder: TypeAlias = tuple[tuple[str, str], ...]
"""Labels of a recorded series without its name and cluster: the labels of the Prometheus that recorded it."""
Hours: TypeAlias = Mapping[int, float]
"""GPU-seconds of a recorder by hour; the key is the number of the full hour since 1970 at the end of the hour."""


class Span(NamedTuple):
    """The hours that one value covers."""

    recorder: Recorder
    begin: int
    end: int
    """End of the span; both ends are full hours since 1970."""
    seconds: float
    lost: float = 0.0
    """Hours of the span that the value is assumed to lack."""


class Way(NamedTuple):
    """Consecutive values that count."""

    lost: float = 0.0
    """Hours without a value."""
    changes: int = 0
    """Number of changes of the recorder."""
    spans: tuple[Span, ...] = ()
    """The values in the order of time."""

    def with_span(self, span: Span) -> "Way":
        """Return the way extended by one value."""
        is_change = bool(self.spans) and self.spans[-1].recorder != span.recorder
        return Way(self.lost + span.lost, self.changes + is_change, (*self.spans, span))

    @property
    def seconds(self) -> float:
        """GPU-seconds of the values."""
        return sum(span.seconds for span in self.spans)


_BADNESS = itemgetter(0, 1)
"""Sort key of ways: fewer lost hours are better, then fewer changes."""


def spans_of(hours: Mapping[Recorder, Hours]) -> list[Span]:
    """Return the spans of the values of a cluster's recorders.

    The first value of a recorder begins with its first evaluation. A value after missed hours that is too small for
    them covers only its last hour: the recorder had lost its state, or had stopped while it recorded an hour.
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
    """Return whether a value after missed hours is too small for them, compared with a recorder of all these hours."""
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
        begin: Full hour since 1970.
        end: Full hour since 1970.
        order: Recorders by preference; the first of equally good recorders counts.
    """
    # If any recorder has an hour that ends at the beginning, earlier parts of a later value were counted there.
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
    # A recorder with every hour may still lack nodes.
    edge = _EDGE * max(span.seconds / (span.end - span.begin) for span in spans)
    most = max(way.seconds for way in enough)
    return next(way for way in enough if way.seconds >= most - edge)


def _best(spans: Iterable[Span], begin: int, end: int) -> Way:
    """Return the way with the fewest lost hours, then the fewest changes."""
    by_end: dict[int, list[Span]] = {}
    for span in spans:
        by_end.setdefault(span.end, []).append(span)
    # Best way to each full hour, by the recorder of its last value.
    ways: dict[int, dict[Recorder | None, Way]] = {begin: {None: Way()}}
    for hour in range(begin + 1, end + 1):
        here = {last: way._replace(lost=way.lost + 1) for last, way in ways[hour - 1].items()}
        for span in by_end.get(hour, ()):
            way = min((way.with_span(span) for way in ways[span.begin].values()), key=_BADNESS)
            here[span.recorder] = min(here.get(span.recorder, way), way, key=_BADNESS)
        ways[hour] = here
    return min(ways[end].values(), key=_BADNESS)


def order_of(hours: Mapping[Recorder, Hours], first: int) -> list[Recorder]:
    """Return the recorders of a cluster, sorted by most hours after the first one, then by labels."""
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
