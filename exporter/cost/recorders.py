"""Chooses whose hours count where several Prometheus servers recorded the same cluster.

Two servers cut hours at different instants, so only the hours of one server add up to what was metered: of a job over a
full hour the larger values of both have up to 5 minutes twice. So one recorder counts for a cluster and all measures of
a chunk. An hour that it missed is in its next value, and nothing is taken from another for it. Another takes over where
that value is in the next chunk, where the rules no longer knew what they had recorded last, or where the recorder ends.
At such a change the edges of two servers meet: the sum misses or repeats at most 5 minutes and a scrape.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from exporter.cost import queries
from exporter.cost.ledger import CHECKPOINT_SECONDS, HOUR_SECONDS, MOST_FIGURE, Window
from exporter.cost.queries import Part
from exporter.cost.query_rows import Asking, Block, Rows
from exporter.errors import PrometheusError

CARRIED_HOURS = 27
"""A value has all hours since the last one of its recorder, if those are not more."""
_MOST = 0.75
"""With less than this part of what another recorded in the same hours, a value does not have them all."""
_BEGUN = 0.5
"""How many hours the first value of a recorder is thought not to have."""
_EDGE = 0.1
"""Recorders that saw the same differ by less than this part of their largest hour: 5 minutes and a scrape."""

Recorder = tuple[tuple[str, str], ...]
"""Labels of a recorded series besides its name and its cluster: those of the Prometheus that recorded it."""
Hours = Mapping[int, float]
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
    last: Span | None = None
    before: "Way | None" = None
    """The way to the last value."""

    def with_span(self, span: Span) -> "Way":
        """The way with one more value."""
        is_change = self.last is not None and self.last.recorder != span.recorder
        return Way(self.lost + span.lost, self.changes + is_change, span, self)

    @property
    def spans(self) -> list[Span]:
        """Its values in the order of time."""
        found: list[Span] = []
        way: Way | None = self
        while way is not None and way.last is not None:
            found.append(way.last)
            way = way.before
        return found[::-1]


def spans_of(hours: Mapping[Recorder, Hours]) -> list[Span]:
    """What the values of a cluster's recorders cover.

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
    """Whether a value after missed hours has too little for them, as another shows that recorded each of them."""
    if end - begin == 1:
        return False
    known = [
        sum(other[hour] for hour in range(begin + 1, end + 1))
        for other in hours.values()
        if all(hour in other for hour in range(begin, end + 1))
    ]
    return bool(known) and hours[recorder][end] < _MOST * max(known)


def chosen(spans: Sequence[Span], begin: int, end: int, order: Sequence[Recorder]) -> Way:
    """The values that count in a period of one cluster.

    Args:
        spans: All values of the cluster.
        begin: Full hour, since 1970.
        end: The same.
        order: Recorders; of those that are as good the first one counts.
    """
    # With an hour of somebody at the beginning, what is in a later value and before it was counted there.
    is_known = any(span.end == begin for span in spans)
    usable = [
        span._replace(begin=max(span.begin, begin), lost=span.lost + 0.001 * max(0, begin - span.begin))
        for span in spans
        if begin < span.end <= end and (span.begin >= begin or not is_known)
    ]
    usable.sort(key=lambda span: order.index(span.recorder))
    best = _best(usable, begin, end)
    alone = [_best([span for span in usable if span.recorder == name], begin, end) for name in order]
    enough = [way for way in alone if way.last and way.lost <= best.lost]
    if not enough:
        return best
    # One that recorded each hour can still have lacked nodes.
    edge = _EDGE * max(span.seconds / (span.end - span.begin) for span in spans)
    most = max(_seconds(way) for way in enough)
    return next(way for way in enough if _seconds(way) >= most - edge)


def _seconds(way: Way) -> float:
    return sum(span.seconds for span in way.spans)


def _best(spans: Iterable[Span], begin: int, end: int) -> Way:
    """The way with the fewest lost hours, then the fewest changes."""
    by_end: dict[int, list[Span]] = {}
    for span in spans:
        by_end.setdefault(span.end, []).append(span)
    # Of each full hour the best way to it, by the recorder of its last value.
    ways: dict[int, dict[Recorder | None, Way]] = {begin: {None: Way()}}
    for hour in range(begin + 1, end + 1):
        here = {last: way._replace(lost=way.lost + 1) for last, way in ways[hour - 1].items()}
        for span in by_end.get(hour, ()):
            way = min((way.with_span(span) for way in ways[span.begin].values()), key=_badness)
            here[span.recorder] = min(here.get(span.recorder, way), way, key=_badness)
        ways[hour] = here
    return min(ways[end].values(), key=_badness)


def _badness(way: Way) -> tuple[float, int]:
    return way.lost, way.changes


class Recorded:
    """Recorded hours and metered GPU-seconds by chunk and cluster, and whose hours count.

    Args:
        windows: The chunks.
        cluster_label: Tells clusters apart.
    """

    def __init__(self, windows: Sequence[Window], cluster_label: str) -> None:
        self._windows = windows
        self._label = cluster_label
        self._hours: list[dict[str, int]] = [{} for _ in windows]
        self._capacity: list[dict[str, float]] = [{} for _ in windows]
        self._parts: list[Sequence[Part]] = [(Part(window.seconds),) for window in windows]
        self._differing: set[str] = set()

    async def read(self, asking: Asking, blocks: Sequence[Block]) -> None:
        """Ask which hours were recorded; the other questions depend on whether several recorded them.

        Raises:
            PrometheusError: None of it can be answered.
        """
        series: list[dict[str, set[Recorder]]] = [{} for _ in self._windows]
        answered = [await self._count(asking, block, series) for block in blocks]
        if not any(answered):
            raise asking.last_error or PrometheusError("server_error", "no question was answered")
        twice = {
            block for block in blocks if any(len(found) > 1 for chunk in block for found in series[chunk].values())
        }
        if not twice:
            return
        known: dict[str, dict[Recorder, dict[int, float]]] = {}
        for block in blocks:
            if block in twice:
                await self._list(asking, block, known)
        self._differing = {name for found in known.values() for name in _differing(list(found))}
        self._choose([chunk for block in blocks if block in twice for chunk in block], known)

    async def _count(self, asking: Asking, block: Block, series: list[dict[str, set[Recorder]]]) -> bool:
        def take(rows: Rows) -> None:
            for moment, metric, value in _values(rows):
                chunk, cluster = ends[moment], metric.get(self._label, "")
                series[chunk].setdefault(cluster, set()).add(self._recorder(metric))
                self._hours[chunk][cluster] = min(int(value), self._windows[chunk].hours)

        ends = self._ends(block)
        return await asking.ask(
            block, queries.RECORDED, lambda chunk: queries.recorded_hours(self._windows[chunk]), take
        )

    async def _list(self, asking: Asking, block: Block, known: dict[str, dict[Recorder, dict[int, float]]]) -> None:
        """Ask what each recorded of each hour, and of those before that a value can have."""

        def take(rows: Rows) -> None:
            for moment, metric, value in _values(rows):
                recorders = known.setdefault(metric.get(self._label, ""), {})
                hour = (moment - CHECKPOINT_SECONDS) // HOUR_SECONDS
                recorders.setdefault(self._recorder(metric), {})[hour] = value

        first, last = (queries.asked_at(self._windows[chunk]) for chunk in (block[0], block[-1]))
        start = first - self._windows[block[0]].seconds - CARRIED_HOURS * HOUR_SECONDS
        asking.expect_more()
        await asking.ask_moments(block, queries.RECORDED, queries.recorded_hour(), (start, last, HOUR_SECONDS), take)

    def _choose(self, chunks: Iterable[int], known: Mapping[str, Mapping[Recorder, Hours]]) -> None:
        first = min((window.start_seconds for window in self._windows), default=0) // HOUR_SECONDS
        ways = {cluster: (spans_of(hours), _order(hours, first)) for cluster, hours in known.items()}
        for chunk in chunks:
            begin, end = (
                at // HOUR_SECONDS for at in (self._windows[chunk].start_seconds, self._windows[chunk].end_seconds)
            )
            clusters: dict[tuple[int, int, Recorder], list[str]] = {}
            for cluster, (spans, order) in ways.items():
                hours = {span.end for span in spans if begin < span.end <= end}
                if hours:
                    self._hours[chunk][cluster] = len(hours)
                for piece in _pieces(spans, begin, end, chosen(spans, begin, end, order)):
                    clusters.setdefault(piece, []).append(cluster)
            if clusters:
                self._parts[chunk] = [self._part(end, *piece, names) for piece, names in sorted(clusters.items())]

    def _part(self, end: int, first: int, last: int, recorder: Recorder, clusters: Sequence[str]) -> Part:
        """Hours of one recorder in a chunk that ends at ``end``."""
        labels = dict(recorder)
        wanted = [(self._label, clusters), *((name, [labels.get(name, "")]) for name in sorted(self._differing))]
        return Part(
            seconds=(last - first) * HOUR_SECONDS,
            back_seconds=(end - last) * HOUR_SECONDS,
            matchers=", ".join(queries.matches(name, values) for name, values in wanted),
        )

    def _recorder(self, metric: Mapping[str, str]) -> Recorder:
        return tuple(sorted((name, text) for name, text in metric.items() if name not in {"__name__", self._label}))

    def _ends(self, block: Block) -> dict[int, int]:
        return {queries.asked_at(self._windows[chunk]): chunk for chunk in block}

    def add_capacity(self, rows: Rows, block: Block) -> None:
        """Take the rows of ``queries.capacity``."""
        ends = self._ends(block)
        for moment, metric, value in _values(rows):
            cluster, seconds = metric.get(self._label, ""), self._capacity[ends[moment]]
            seconds[cluster] = seconds.get(cluster, 0.0) + value

    def parts(self, chunk: int) -> Sequence[Part]:
        """Whose hours count in a chunk."""
        return self._parts[chunk]

    def hours(self, chunk: int) -> Mapping[str, int]:
        """By cluster: of several recorders the hours that at least one has."""
        return self._hours[chunk]

    def capacity(self, chunk: int) -> Mapping[str, float]:
        """GPU-seconds by cluster."""
        return self._capacity[chunk]

    @property
    def clusters(self) -> set[str]:
        """All that recorded something."""
        return {cluster for hours in self._hours for cluster in hours}

    def notes(self) -> list[str]:
        """What a reader must know of who recorded."""
        if not self._differing:
            return []
        names = ", ".join(sorted(self._differing))
        note = (
            f"Several Prometheus servers have recorded the same hours (told apart by {names}): one of them counts for"
            " each cluster. If these are several clusters, give the label that tells them apart by --cluster-label"
        )
        return [note]


def _order(hours: Mapping[Recorder, Hours], first: int) -> list[Recorder]:
    """The recorders of a cluster: those with the most hours after the first one come first, then by their labels."""
    return sorted(hours, key=lambda name: (-sum(hour > first for hour in hours[name]), name))


def _pieces(spans: Sequence[Span], begin: int, end: int, way: Way) -> list[tuple[int, int, Recorder]]:
    """First and last hour of each range in which the values of one recorder count."""
    counted = way.spans
    if counted and way.changes == 0:
        name = counted[0].recorder
        if sum(span.recorder == name and begin < span.end <= end for span in spans) == len(counted):
            return [(begin, end, name)]
    found: list[tuple[int, int, Recorder]] = []
    for span in counted:
        if found and found[-1][1:] == (span.begin, span.recorder):
            found[-1] = (found[-1][0], span.end, span.recorder)
        else:
            found.append((span.begin, span.end, span.recorder))
    return found


def _values(rows: Rows) -> list[tuple[int, dict[str, Any], float]]:
    found = [
        (int(moment), row["metric"], float(value))
        for row in rows
        for moment, value in (row["values"] if "values" in row else (row["value"],))
    ]
    "".join(text for _, metric, _ in found for text in metric.values())
    return [one for one in found if 0 <= one[2] <= MOST_FIGURE]


def _differing(recorders: Sequence[Recorder]) -> set[str]:
    """Labels whose values differ between recorders."""
    labels = [dict(recorder) for recorder in recorders]
    names = {name for metric in labels for name in metric}
    return {name for name in names if len({metric.get(name, "") for metric in labels}) > 1}
