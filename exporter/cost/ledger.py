"""The ledger of a fleet over a window: holders, seconds, money, and what could not be read."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta, tzinfo
from functools import lru_cache
from operator import itemgetter
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

from exporter.errors import ConfigError, expected
from exporter.model import NO_SECONDS, ByState, NodeFacts
from exporter.model.formatting import day, minute

HOUR_SECONDS, DAY_SECONDS = 3600, 86_400
CHECKPOINT_SECONDS = 1200
"""An hour is recorded 5 to 20 minutes after its end: at this time no hour is recorded, and the last one has been."""
MOST_FIGURE = 1e15
"""Seconds, joules or money: more than any fleet has. Sums of any number of such figures stay finite."""

Dimension: TypeAlias = str
"""Dimension of a line: a field of ``LineKey``, or ``label:KEY``. ``workload`` needs namespace and kind."""
LABEL = "label:"
"""Begins the dimension of one cost label: ``label:project``."""
OTHER = "__other__"
"""Value of cost labels beyond the number of combinations that an agent keeps."""
MOST_LABELS = 8
"""Labels in one question; an agent takes no more."""
_LABEL_KEY = re.compile(r"([a-z0-9][a-z0-9.-]{0,252}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
UNALLOCATED, UNATTRIBUTED = "Unallocated", "Unattributed"
"""Kinds of what no known owner held: see ``exporter.model.attribution``."""


def last_recorded(now_seconds: float) -> int:
    """Return the Unix time at which the last recorded hour ended."""
    return int((now_seconds - CHECKPOINT_SECONDS) // HOUR_SECONDS) * HOUR_SECONDS


class LineKey(NamedTuple):
    """The names of a line; one that was summed over, or is unknown, is empty."""

    cluster: str = ""
    node: str = ""
    pool: str = ""
    """``p5.48xlarge on-demand``: instance type and capacity type of the node, as far as they are known."""
    namespace: str = ""
    kind: str = ""
    """Of the workload, or ``Unallocated``, ``Unattributed``; these two are never summed away."""
    workload: str = ""
    team: str = ""
    labels: str = ""
    """Cost labels as the agents write them: ``environment=dev,project=llm``, sorted by key."""
    model: str = ""
    mode: str = ""
    """``exclusive``, ``mig``, ``shared``."""

    def value(self, dimension: Dimension) -> str:
        """Return the value of a dimension; empty if it is unknown."""
        if dimension.startswith(LABEL):
            return pairs(self.labels).get(dimension.removeprefix(LABEL), "")
        return str(getattr(self, dimension))

    def at(self, dimensions: Collection[Dimension]) -> "LineKey":
        """Return the key of the line that is summed over every other dimension, with the named labels alone."""
        key = LineKey._make(picking(self._fields, frozenset(dimensions))((*self, "")))
        if self.labels and "labels" not in dimensions:
            named = [f"{name}={value}" for name, value in pairs(self.labels).items() if LABEL + name in dimensions]
            key = key._replace(labels=",".join(named))
        return key


@lru_cache(maxsize=256)
def picking(names: Sequence[str], kept: Collection[str]) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """Return a getter of the fields of a ``LineKey`` from values and an empty text at their end.

    Args:
        names: Fields that the values are of, in their order.
        kept: Fields that are taken; all others are empty.
    """
    return itemgetter(*[names.index(field) if field in kept and field in names else -1 for field in LineKey._fields])


DIMENSIONS: tuple[Dimension, ...] = tuple(name for name in LineKey._fields if name != "labels")
"""What users may name, besides ``label:KEY``."""


@lru_cache(maxsize=4096)
def pairs(labels: str) -> Mapping[str, str]:
    """Return the values of ``LineKey.labels`` by key; no label of Kubernetes has ``=`` or ``,`` in it."""
    return {key: value for key, _, value in (pair.partition("=") for pair in labels.split(",")) if key}


def with_parts(dimensions: Iterable[Dimension]) -> frozenset[Dimension]:
    """Return the dimensions; a workload is one only with its namespace and kind."""
    wanted = frozenset(dimensions)
    return wanted | {"namespace", "kind"} if "workload" in wanted else wanted


def label_keys(dimensions: Iterable[Dimension]) -> list[str]:
    """Return the keys of the labels among the dimensions."""
    return [dimension.removeprefix(LABEL) for dimension in dimensions if dimension.startswith(LABEL)]


def too_many_labels(where: str, dimensions: Iterable[Dimension]) -> list[str]:
    """Return a problem if more labels are named than an agent takes."""
    count = len(label_keys(dimensions))
    return [f"{where}: names {count} labels; allowed: at most {MOST_LABELS}"] if count > MOST_LABELS else []


def label_problem(dimension: Dimension) -> str:
    """Return what is wrong with ``label:KEY``; empty for a label that Kubernetes can have."""
    if _LABEL_KEY.fullmatch(dimension.removeprefix(LABEL)):
        return ""
    return "names no label; allowed: label:KEY, a key of the agents' --cost-labels, as label:project"


_POOL_NAMES = frozenset({"node pool", "node-pool", "node_pool", "nodepool"})


def dimension_of(text: str) -> tuple[Dimension, str]:
    """Return the dimension that a user names, and what is wrong with the name; empty where there is such a one."""
    name = text.strip()
    if name.startswith(LABEL):
        return name, label_problem(name)
    name = "pool" if name.lower() in _POOL_NAMES else name.lower()
    if name in DIMENSIONS:
        return name, ""
    hint = "; a fleet has owners by workload, or workload,model,mode" if name == "owner" else ""
    return name, f"is not a dimension{expected(name, DIMENSIONS, ', '.join((*DIMENSIONS, 'label:KEY')))}{hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a line. Seconds are share-weighted GPU-seconds."""

    seconds: ByState = NO_SECONDS
    """Always all of the allocated seconds."""
    unpriced_seconds: float = 0.0
    """Allocated seconds that had no price and are in no money."""
    energy_joules: float | None = None
    """``None`` where none was measured."""
    energy_unknown_seconds: float = 0.0
    """Allocated seconds without measured energy, of one node; a fleet's are not known."""
    money: Mapping[str, ByState] = field(default_factory=dict)
    """By ISO 4217 currency; a currency in which nothing was priced is absent."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing on the line: no seconds, joules or money.

        A line may have joules and money without seconds: those of a process of no pod on a GPU that a pod holds.
        """
        return not (self.seconds.total or self.energy_joules or any(money.total for money in self.money.values()))

    def money_in(self, currency: str) -> ByState:
        """Return the money in a currency; 0 if nothing was priced in it."""
        return self.money.get(currency, NO_SECONDS)

    def amounts(self, currency: str) -> ByState:
        """Return the money in a currency, or the seconds if none is named."""
        return self.money_in(currency) if currency else self.seconds


def total_of(many: Iterable[Figures]) -> Figures:
    """Return the sum of figures, currency by currency."""
    summed = list(many)
    if len(summed) == 1:
        return summed[0]  # mostly, at the finest: and making values is what takes time
    unpriced = unmeasured = 0.0
    energy: float | None = None
    money: dict[str, list[ByState]] = {}
    for figures in summed:
        unpriced += figures.unpriced_seconds
        unmeasured += figures.energy_unknown_seconds
        if figures.energy_joules is not None:
            energy = figures.energy_joules + (energy or 0.0)
        for currency, amount in figures.money.items():
            money.setdefault(currency, []).append(amount)
    return Figures(
        seconds=total_by_state(figures.seconds for figures in summed),
        unpriced_seconds=unpriced,
        energy_joules=energy,
        energy_unknown_seconds=unmeasured,
        money={currency: total_by_state(amounts) for currency, amounts in money.items()},
    )


def total_by_state(many: Iterable[ByState]) -> ByState:
    """Return the sum with one new value; ``__add__`` makes one for each."""
    effective = ineffective = unprofiled = idle = unknown = 0.0
    for one in many:
        effective += one.effective
        ineffective += one.ineffective
        unprofiled += one.unprofiled
        idle += one.idle
        unknown += one.unknown
    return ByState(effective=effective, ineffective=ineffective, unprofiled=unprofiled, idle=idle, unknown=unknown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A period, its ends on whole hours UTC; the end is outside of it."""

    start_seconds: int
    end_seconds: int
    label: str = ""
    """As the user wrote it: ``30d``, ``2026-10``."""

    @property
    def seconds(self) -> int:
        """How long it is."""
        return self.end_seconds - self.start_seconds

    @property
    def hours(self) -> int:
        """How many hours it has."""
        return self.seconds // HOUR_SECONDS

    def meets(self, other: "Window") -> bool:
        """Return whether the two have a moment in common."""
        return self.start_seconds < other.end_seconds and other.start_seconds < self.end_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The ledger of one UTC day, or of the part of it that lies in the window."""

    window: Window
    lines: Mapping[LineKey, Figures] = field(default_factory=dict)
    capacity_seconds: Mapping[str, float] = field(default_factory=dict)
    """By cluster: GPU-seconds that were metered, whoever held them; what the lines must sum to."""
    recorded_hours: Mapping[str, int] = field(default_factory=dict)
    """By cluster: hours of the chunk for which the hourly ledger was recorded."""
    closed: bool = False
    """Read from the store of closed days, rather than from Prometheus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A query without an answer after all retries; the ledger lacks its figures."""

    window: Window
    what: str
    """The series that was asked for."""
    reason: str
    """In words, with the fix."""
    may_pass: bool = True
    """Whether it may be answered within the hour; not where it asks too much, or for a day that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLedger:
    """The ledger over a window, chunk by chunk in the order of time, at the dimensions that were asked for."""

    window: Window
    dimensions: frozenset[Dimension]
    chunks: tuple[Chunk, ...] = field(repr=False)  # asyncio.run makes the text of its result, twice
    nodes: Mapping[tuple[str, str], NodeFacts] = field(default_factory=dict)
    """What prices go by, by (cluster, node), as last seen within the window."""
    failures: tuple[Failure, ...] = ()
    """Empty, or the ledger is not whole."""
    label_keys: frozenset[str] = frozenset()
    """Keys of cost labels that occur; only where it was read by labels."""
    engine: str = ""
    """Where it was read: ``Prometheus 3.5.0``, ``VictoriaMetrics 1.112``, ``store of closed days``, or several."""
    simulated: bool = False
    """Some of it is of simulated nodes."""
    notes: tuple[str, ...] = ()
    """One line each: what a reader must know, such as warnings of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """The values of which a line must have one, by dimension."""

    wanted: Mapping[Dimension, frozenset[str]] = field(default_factory=dict)

    def keep(self, key: LineKey) -> bool:
        """Return whether a line has one of the values of each dimension."""
        return not self.wanted or all(key.value(dimension) in values for dimension, values in self.wanted.items())

    def only(self, dimensions: Collection[Dimension]) -> "Filters":
        """Return those of some dimensions."""
        return Filters(wanted={name: values for name, values in self.wanted.items() if name in dimensions})

    @property
    def by_label(self) -> "Filters":
        """The filters by label, which a source applies to its answers."""
        return Filters(wanted={name: values for name, values in self.wanted.items() if name.startswith(LABEL)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a long reading is."""

    done: int
    total: int
    """Questions, retries not counted."""


class LedgerSource(Protocol):
    """Reads the ledger over a window."""

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> FleetLedger:
        """Return the ledger, a chunk per UTC day, summed over every dimension that is not asked for.

        ``kind`` stays apart for Unallocated and Unattributed even where it is not asked for. Filters hold for the
        lines, not for capacity. What cannot be read after retries is in ``failures``; it is never left out silently.

        Raises:
            PrometheusError: Nothing can be read at all: wrong address, no access, no such server.
            StoreError: The store is damaged or not to be opened.
        """
        ...


def joined(window: Window, dimensions: frozenset[Dimension], parts: Sequence[FleetLedger]) -> FleetLedger:
    """Return the ledger of a window that was read in parts, in the order of time."""
    return FleetLedger(
        window=window,
        dimensions=dimensions,
        chunks=tuple(chunk for part in parts for chunk in part.chunks),
        nodes={node: facts for part in parts for node, facts in part.nodes.items()},
        failures=tuple(failure for part in parts for failure in part.failures),
        label_keys=frozenset[str]().union(*(part.label_keys for part in parts)),
        engine=", ".join(dict.fromkeys(part.engine for part in parts if part.engine)),
        simulated=any(part.simulated for part in parts),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


ALLOWED = (
    "30d, 12h or 4w back from now; today, yesterday, week, lastweek, month, lastmonth or last-month; 2026,"
    " 2026-Q3, 2026-10, 2026-10-03; 2026-10-01..2026-10-15 (both days included); two times such as"
    " 2026-10-01T00:00Z..2026-10-02T06:00Z (the end is outside); Unix seconds 1790000000,1790086400"
)
_BACK = re.compile(r"(\d{1,6})([hdw])")
_LONG_BACK = re.compile(r"(\d{1,6}) ?([hdw])?(?:(?:ou)?rs?|ays?|eeks?)?", re.ASCII)
_UNIX = re.compile(r"(\d{1,12}),(\d{1,12})")
_HOURS = {"h": 1, "d": 24, "w": 168}
Period = Literal["week", "month", "quarter", "year"]
Unit: TypeAlias = Literal["day"] | Period
_MONTHS: dict[Unit, int] = {"month": 1, "quarter": 3, "year": 12}
_CALENDAR: dict[Unit, re.Pattern[str]] = {
    "year": re.compile(r"(\d{4})"),
    "quarter": re.compile(r"(\d{4})-[Qq]([1-4])"),
    "month": re.compile(r"(\d{4})-(\d{2})"),
    "day": re.compile(r"(\d{4})-(\d{2})-(\d{2})"),
}
_NAMED: dict[str, tuple[Unit, bool]] = {
    "today": ("day", False),
    "yesterday": ("day", True),
    "week": ("week", False),
    "lastweek": ("week", True),
    "month": ("month", False),
    "lastmonth": ("month", True),
}
"""Unit of a period with a name, and whether it is the one before that of now."""
PERIODS = tuple(_NAMED)
_A_DAY = timedelta(days=1)
_FIRST_YEAR, _LAST_YEAR = 2000, 2199
_LONGEST_DAYS = 3700
_STRETCH_DAYS = 31
"""Owners that last are read once: a month in three parts takes a server twice as long as in one."""


class Now(NamedTuple):
    """An instant, and the time zone of its calendar."""

    seconds: float
    """Unix time."""
    zone: tzinfo = UTC


def parse_window(text: str, now_seconds: float, zone: tzinfo = UTC) -> Window:
    """Return the period that a text means, cut at the last recorded hour.

    Args:
        text: One of the forms in ``ALLOWED``; its label is kept where it is cut.
        now_seconds: Unix time.
        zone: Whose days and months are meant, and times without a zone.

    Raises:
        ConfigError: It is none of them, ends before it begins, lies in the future, is longer than ten years, or begins
            or ends within an hour UTC, by which the ledger is recorded.
    """
    written = text.strip()
    try:
        bounds = _bounds(written, Now(now_seconds, zone))
    except (ValueError, OverflowError):
        bounds = None
    if bounds is None:
        raise ConfigError(f"window: value '{shown(text)}' is not a period{_nearest(written)}")
    start, end = bounds
    last = last_recorded(now_seconds)
    problem = ""
    if end <= start:
        problem = f" ends before it begins, or has less than an hour; allowed: {ALLOWED}"
    elif start >= last:
        when = "has no recorded hour yet" if start <= now_seconds else "lies in the future"
        problem = f" {when}; it is {minute(now_seconds)} UTC; allowed: a period that has begun"
    elif start % HOUR_SECONDS or end % HOUR_SECONDS:
        problem = _within_hours(start, end, zone)
    elif end - start > _LONGEST_DAYS * DAY_SECONDS:
        problem = f" is longer than ten years; allowed: at most {_LONGEST_DAYS} days"
    if problem:
        raise ConfigError(f"window: '{shown(text)}'{problem}")
    return Window(start_seconds=start, end_seconds=min(end, last), label=written)


def _nearest(text: str) -> str:
    """Return the end of a message: the period that a text is most like, if any, and the forms of one."""
    back = _LONG_BACK.fullmatch(text.lower())
    word = f"{back[1]}{back[2] or 'd'}" if back else _plain(text)
    return expected(word, (word,) if back else PERIODS, ALLOWED)


def _plain(text: str) -> str:
    """Return a name of a period in the form of ``PERIODS``: ``Last-Month`` is ``lastmonth``."""
    return text.lower().replace("-", "").replace("_", "").replace(" ", "")


def last_days(count: int, now: Now) -> tuple[int, int]:
    """Return the Unix times from the beginning of a day, today being the last of ``count``, to the last recorded hour.

    While no hour of today is recorded, the days before it are meant.
    """
    today = datetime.fromtimestamp(now.seconds, now.zone).date()
    start, _ = _days(today - timedelta(days=count - 1), today, now.zone)
    last = last_recorded(now.seconds)
    if last > start:
        return start, last
    start, end = _days(today - timedelta(days=count), today, now.zone)
    return start, min(end, last)


def chunks(window: Window) -> tuple[Window, ...]:
    """Return the UTC days of a window in the order of time, the first and the last as far as they lie in it."""
    midnight = (window.start_seconds // DAY_SECONDS + 1) * DAY_SECONDS
    starts = [window.start_seconds, *range(midnight, window.end_seconds, DAY_SECONDS)]
    ends = [*starts[1:], window.end_seconds]
    return tuple(
        Window(start_seconds=start, end_seconds=end, label=day(start))
        for start, end in zip(starts, ends, strict=True)
        if start < end
    )


def stretches(window: Window) -> tuple[Window, ...]:
    """Return the pieces of several days of a window, for questions without days."""
    starts = range(window.start_seconds, window.end_seconds, _STRETCH_DAYS * DAY_SECONDS)
    return tuple(
        Window(start_seconds=start, end_seconds=min(start + _STRETCH_DAYS * DAY_SECONDS, window.end_seconds))
        for start in starts
    )


def _bounds(text: str, now: Now) -> tuple[int, int] | None:
    """Return start and end in Unix seconds, not yet cut; ``None`` for an unknown form."""
    zone = now.zone
    if match := _BACK.fullmatch(text):
        end = last_recorded(now.seconds)
        return end - int(match[1]) * _HOURS[match[2]] * HOUR_SECONDS, end
    if named := _NAMED.get(_plain(text)):
        unit, is_before = named
        first, after = _span(unit, datetime.fromtimestamp(now.seconds, zone).date())
        return _days(*(_span(unit, first - _A_DAY) if is_before else (first, after)), zone)
    if match := _UNIX.fullmatch(text):
        return int(match[1]), _end_of(int(match[2]))
    begin, dots, end_text = text.partition("..")
    one, other = _calendar(begin, zone), _calendar(end_text, zone)
    if not dots:
        return one
    return (one[0], other[1]) if one and other else (_instant(begin, zone), _end_of(_instant(end_text, zone)))


def _calendar(text: str, zone: tzinfo) -> tuple[int, int] | None:
    """Return the bounds of a year, a quarter, a month or a day."""
    for unit, pattern in _CALENDAR.items():
        if match := pattern.fullmatch(text):
            year, number, day_of_month = (*map(int, match.groups()), 1, 1)[:3]
            month = number * 3 - 2 if unit == "quarter" else number
            return _days(*_span(unit, _checked(date(year, month, day_of_month))), zone)
    return None


def _span(unit: Unit, day: date) -> tuple[date, date]:
    """Return the first day of the unit that a day is in, and the first after it; a week begins on Monday."""
    if unit == "day":
        return day, day + _A_DAY
    if unit == "week":
        first = day - day.weekday() * _A_DAY
        return first, first + 7 * _A_DAY
    months = _MONTHS[unit]
    first = day.replace(day=1, month=(day.month - 1) // months * months + 1)
    after = first.year * 12 + first.month - 1 + months
    return first, date(after // 12, after % 12 + 1, 1)


def _checked(day: date) -> date:
    if not _FIRST_YEAR <= day.year <= _LAST_YEAR:
        raise ValueError(day)
    return day


def _days(first: date, after: date, zone: tzinfo) -> tuple[int, int]:
    """Return when one day begins and another one does, in a time zone; a day may have 23 or 25 hours there."""
    start, end = (int(datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()) for day in (first, after))
    return start, end


def _instant(text: str, zone: tzinfo) -> int:
    """Return the Unix seconds of an RFC 3339 time; one without a zone is of ``zone``."""
    if "T" not in text.upper() and not _CALENDAR["day"].fullmatch(text):
        raise ValueError(text)
    moment = datetime.fromisoformat(text.upper())
    _checked(moment.date())
    return int((moment if moment.tzinfo else moment.replace(tzinfo=zone)).timestamp())


def _end_of(seconds: int) -> int:
    """Return the end of a period; 23:59:59, as many clients write the end of a day, is midnight."""
    return seconds + 1 if seconds % HOUR_SECONDS == HOUR_SECONDS - 1 else seconds


def _within_hours(start: int, end: int, zone: tzinfo) -> str:
    """Say that a period does not begin and end on hours that are recorded, and what to give instead."""
    first, after = start // HOUR_SECONDS * HOUR_SECONDS, -(-end // HOUR_SECONDS) * HOUR_SECONDS
    what = "begins" if start % HOUR_SECONDS else "ends"
    at = datetime.fromtimestamp(start if start % HOUR_SECONDS else end, UTC)
    of_zone = "" if zone is UTC else f" ({zone})"
    return (
        f"{of_zone} {what} at {at:%Y-%m-%d %H:%M:%S} UTC, within an hour, and the ledger is"
        f" recorded by the hour UTC; allowed: whole hours, such as {_rfc3339(first)}..{_rfc3339(after)}, or days of a"
        " time zone that differs from UTC by whole hours"
    )


def _rfc3339(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%MZ}"


def shown(text: str) -> str:
    """Return a text of a user, safe for a message."""
    return "".join(character if character.isprintable() else "?" for character in text[:80])


def period_at(period: Period, now: float, zone: tzinfo = UTC) -> Window:
    """The week (from Monday), month, quarter or year that ``now`` is in; labelled ``2026-W47``, ``2026-11``, ..."""
    first, after = _span(period, datetime.fromtimestamp(now, zone).date())
    quarter = f"{first:%Y}-Q{first.month // 3 + 1}"
    label = {"week": f"{first:%G-W%V}", "month": f"{first:%Y-%m}", "quarter": quarter, "year": f"{first:%Y}"}[period]
    start, end = _days(first, after, zone)
    return Window(start_seconds=start, end_seconds=end, label=label)


def period_before(window: Window, zone: tzinfo = UTC) -> Window | None:
    """Return the period before a whole week, month, quarter or year; ``None`` for every other window."""
    for period in get_args(Period):
        here = period_at(period, window.start_seconds, zone)
        if (here.start_seconds, here.end_seconds) == (window.start_seconds, window.end_seconds):
            return period_at(period, window.start_seconds - 1, zone)
    return None
