"""Builds the report of a fleet's ledger: lines per dimension, Unallocated apart, coverage."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import floor
from typing import Literal

from exporter.cost.ledger import (
    HOUR_SECONDS,
    LABEL,
    OTHER,
    UNALLOCATED,
    UNATTRIBUTED,
    Chunk,
    Dimension,
    Failure,
    Figures,
    Filters,
    FleetLedger,
    LineKey,
    Window,
    label_keys,
    pairs,
    total_by_state,
    total_of,
    with_parts,
)
from exporter.model.formatting import percent_down

NO_MATCH = "nothing matches"
"""Begins the note of a report whose filters leave nothing."""
ShareIdle = Literal["none", "even", "weighted"]
"""What becomes of money that no owner's GPUs cost: shown apart, spread evenly over owners, or by their own money."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLine:
    """One line. ``key`` has the dimensions of the report, and ``kind`` where it is none of an owner's."""

    key: LineKey
    figures: Figures
    shared: Mapping[str, float] = field(default_factory=dict)
    """By currency: money of others (idle, Unallocated) that was spread onto this line; not in ``figures``."""
    charged: Mapping[str, float] = field(default_factory=dict)
    """By currency: own and shared money in whole hundredths, which sum to the total's; empty where none is spread."""
    series: tuple[Figures, ...] = ()
    """Figures of each chunk of the report's ``periods``; empty where they were not asked for."""
    before: Figures = field(default_factory=Figures)
    """Figures of the period before, where the report is compared with it."""

    @property
    def states(self) -> Figures | None:
        """Figures of active, idle and unknown time; ``None`` without an owner, which has no idle time."""
        return None if is_apart(self.key) else self.figures


def sum_line(key: LineKey, lines: Sequence[ReportLine]) -> ReportLine:
    """Return one line for several, with their periods where all have them."""
    if len(lines) == 1:
        return replace(lines[0], key=key)
    periods = zip(*(line.series for line in lines), strict=True)
    return ReportLine(
        key=key,
        figures=total_of(line.figures for line in lines),
        shared=money_sums(line.shared for line in lines),
        charged=money_sums(line.charged for line in lines),
        series=tuple(total_of(figures) for figures in periods),
        before=total_of(line.before for line in lines),
    )


def money_sums(many: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of amounts in hundredths, by currency."""
    sums: dict[str, float] = {}
    for amounts in many:
        for currency, amount in amounts.items():
            sums[currency] = round(sums.get(currency, 0.0) + amount, 2)
    return sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How far a report can be trusted; at the foot of every format."""

    capacity_seconds: float
    """GPU-seconds that were metered; all lines must sum to it."""
    missing_seconds: float
    """What the lines lack of it (negative: have too much); 0 within rounding, or something is wrong."""
    expected_hours: int
    """Hours of the window, times clusters; those of a cluster that is new only from its first chunk on."""
    recorded_hours: int
    """For how many of them the ledger was recorded."""
    activity_coverage_ratio: float | None
    """Part of the held GPU-seconds whose activity was measured; ``None`` where nothing was held."""
    price_coverage_ratio: float | None
    """Part of all GPU-seconds that had a price; ``None`` where there are none."""
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def period_coverage_ratio(self) -> float | None:
        """Part of the hours that were recorded; ``None`` of a window without hours."""
        return self.recorded_hours / self.expected_hours if self.expected_hours else None

    @property
    def whole(self) -> bool:
        """Whether nothing is missing: every query is answered, every second is on a line."""
        return not self.failures and not self.missing_seconds


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class FleetReport:
    """Lines sorted by money, dearest first, then by time; ``held`` have an owner, ``apart`` have none."""

    window: Window
    by: tuple[Dimension, ...]
    filters: Filters
    held: tuple[ReportLine, ...]
    apart: tuple[ReportLine, ...]
    """``Unattributed`` and ``Unallocated``, in this order, split by those of ``by`` that they have."""
    total: Figures
    """Of held and apart."""
    owned: Figures
    """Of held alone: every total of active, idle and unknown time is of owners."""
    share_idle: ShareIdle = "none"
    share_unallocated: bool = False
    """Unallocated and Unattributed money is spread, too, in the manner of ``share_idle``."""
    periods: tuple[Window, ...] = ()
    """Of ``ReportLine.series``."""
    trust: Trust
    engine: str
    simulated: bool
    prices: str = ""
    """Which prices the money is at: empty for those of the time of use, else the price book of a re-pricing."""
    before: "FleetReport | None" = None
    """Of the period before, for a calendar period; ``None`` where there is nothing to compare with."""

    @property
    def currencies(self) -> tuple[str, ...]:
        """Every currency in which something was priced, in the order of the alphabet."""
        return tuple(sorted(self.total.money))


_PER_UNIT, _HALF = 100, 0.5 + 1e-6
"""Money is spread in hundredths, whatever the currency's smallest coin is."""
_NARROWER: tuple[frozenset[Dimension], ...] = (
    frozenset({"cluster", "pool", "model", "node"}),
    frozenset({"cluster", "pool", "model"}),
    frozenset({"cluster", "pool"}),
    frozenset({"cluster", "model"}),
    frozenset({"cluster"}),
)
"""Whose owners pay for what was free in a place: that place's; where it had none, a wider one's; never another
cluster's."""


def spread(report: FleetReport) -> FleetReport:
    """Return the report with ``shared`` and ``charged`` of its lines; shared sums to 0 over all lines.

    Where the dimensions tell places apart (cluster, pool, model, node), the owners of a place pay for what was free
    there. ``share_idle`` spreads Unallocated: GPUs without a holder, which other tools call idle; ``even`` over lines,
    or ``weighted`` by their own money (where they have none in the currency by their GPU-seconds). What an owner held
    and did not use stays the owner's. With ``share_unallocated`` Unattributed is spread, too, so that all that has no
    owner is.

    ``shared`` of owners' lines are whole hundredths, that of the others is what was taken from them: all but what is
    less than half a hundredth. Money without an owner to pay it stays where it is.
    """
    if report.share_idle == "none":
        return report
    held = report.held
    kinds = {UNALLOCATED, UNATTRIBUTED} if report.share_unallocated else {UNALLOCATED}
    levels = list(dict.fromkeys(frozenset(report.by) & narrow for narrow in _NARROWER))
    crowds: dict[tuple[frozenset[Dimension], LineKey], list[int]] = {}
    for level in levels:
        for index, line in enumerate(held):
            crowds.setdefault((level, line.key.at(level)), []).append(index)
    given: list[dict[str, int]] = [{} for _ in held]
    taken = []
    for line in report.apart:
        places = ((level, line.key.at(level)) for level in levels)
        payers = next((crowds[place] for place in places if place in crowds), [])
        is_spread = payers and line.key.kind in kinds
        taken.append(_take(line, held, payers, report.share_idle, given) if is_spread else line)
    lines = [replace(line, shared=_units(hundredths)) for line, hundredths in zip(held, given, strict=True)] + taken
    charged: list[dict[str, float]] = [{} for _ in lines]
    for currency in report.currencies:
        has = [n for n, line in enumerate(lines) if currency in line.figures.money or currency in line.shared]
        amounts = [lines[n].figures.money_in(currency).total + lines[n].shared.get(currency, 0.0) for n in has]
        for n, amount in zip(has, close(amounts), strict=True):
            charged[n][currency] = amount
    lines = [replace(line, charged=amounts) for line, amounts in zip(lines, charged, strict=True)]
    return replace(report, held=tuple(lines[: len(held)]), apart=tuple(lines[len(held) :]))


def _take(
    line: ReportLine,
    held: Sequence[ReportLine],
    payers: Sequence[int],
    share_idle: ShareIdle,
    given: Sequence[dict[str, int]],
) -> ReportLine:
    """Give the money of a line without an owner to the lines that pay for it."""
    taken: dict[str, int] = {}
    for currency, money in line.figures.money.items():
        hundredths = round(money.total * _PER_UNIT)
        weights = [1.0] * len(payers) if share_idle == "even" else _weights([held[n] for n in payers], currency)
        for index, part in zip(payers, divide(hundredths, weights), strict=True):
            given[index][currency] = given[index].get(currency, 0) + part
        taken[currency] = -hundredths
    return replace(line, shared=_units(taken))


def _weights(lines: Sequence[ReportLine], currency: str) -> list[float]:
    """Return the lines' money; without any their GPU-seconds, and without these equal weights."""
    money = [max(0.0, line.figures.money_in(currency).total) for line in lines]
    if any(money):
        return money
    seconds = [max(0.0, line.figures.seconds.total) for line in lines]
    return seconds if any(seconds) else [1.0] * len(lines)


def _units(hundredths: Mapping[str, int]) -> dict[str, float]:
    return {currency: number / _PER_UNIT for currency, number in hundredths.items() if number}


def divide(whole: int, weights: Sequence[float]) -> list[int]:
    """Whole parts in proportion to weights that sum to the whole; the largest remainders are rounded up.

    Args:
        whole: What is divided, not negative.
        weights: At least one, none negative, not all 0; of equal remainders the first is rounded up.
    """
    total = sum(weights)
    exact = [whole * (weight / total) for weight in weights]
    parts = [floor(value) for value in exact]
    order = sorted(range(len(parts)), key=lambda index: parts[index] - exact[index])
    return _settled(parts, order, whole)


def close(amounts: Sequence[float]) -> list[float]:
    """Amounts in hundredths, rounded such that they sum to their rounded sum: a bill that closes to the cent.

    The largest remainders are rounded up; an amount of less than half a hundredth, as what is left of a line that was
    spread, is 0 as long as others can bear the difference.
    """
    hundredths = [amount * _PER_UNIT for amount in amounts]
    is_little = [abs(value) <= _HALF for value in hundredths]
    parts = [0 if little else floor(value) for value, little in zip(hundredths, is_little, strict=True)]
    order = sorted(range(len(parts)), key=lambda index: (is_little[index], parts[index] - hundredths[index]))
    whole = round(sum(hundredths))
    return [part / _PER_UNIT for part in _settled(parts, order, whole)]


def _settled(parts: list[int], order: Sequence[int], whole: int) -> list[int]:
    """Change parts in this order, a unit each, until they sum to the whole."""
    # Rounding of floats may leave a little more than a unit for each part, or take one too many.
    while left := whole - sum(parts):
        for index in order[:left] if left > 0 else [index for index in order if parts[index]][left:]:
            parts[index] += 1 if left > 0 else -1
    return parts


APART = (UNATTRIBUTED, UNALLOCATED)
"""Kinds of lines without an owner, in the order of reports."""
_OF_OWNERS: frozenset[Dimension] = frozenset({"namespace", "workload", "team"})
_TOLERATED_RATIO, _TOLERATED_SECONDS = 1e-9, 1e-6
_NOTHING = Figures()


def dimensions_of(by: Iterable[Dimension]) -> frozenset[Dimension]:
    """Dimensions that a report needs of a ledger: a workload is one only with its namespace and kind.

    It has all cost labels, so that a report can name them if an unknown one is asked for.
    """
    wanted = with_parts(by)
    labels = {dimension for dimension in wanted if dimension.startswith(LABEL)}
    return wanted - labels | {"labels"} if labels else wanted


def is_apart(key: LineKey) -> bool:
    """Return whether a line has no owner; a workload with the kind Unallocated has a namespace, and is an owner."""
    return key.kind in APART and not key.namespace


def is_part(filters: Filters) -> bool:
    """Return whether the lines are only a part of the metered time, so that they cannot sum to it."""
    return bool(set(filters.wanted) - {"cluster"})


def make_report(
    ledger: FleetLedger,
    by: Sequence[Dimension],
    filters: Filters | None = None,
    *,
    share_idle: ShareIdle = "none",
    share_unallocated: bool = False,
    with_series: bool = False,
    prices: str = "",
) -> FleetReport:
    """Return the report over a ledger's window.

    Args:
        ledger: At ``dimensions_of(by)`` or finer.
        by: Dimensions of the lines.
        filters: What is asked for; of dimensions that the ledger does not have its source has kept them.
        share_idle: See ``spread``.
        share_unallocated: See ``spread``.
        with_series: Each line also has its figures of each chunk.
        prices: Which prices the money is at, where it is not at those of the time of use.
    """
    filters = filters or Filters()
    lines, seconds = _gather(ledger, by, filters, with_series=with_series)
    held = [line for line in lines if not is_apart(line.key)]
    apart = [line for kind in APART for line in lines if is_apart(line.key) and line.key.kind == kind]
    total, of_held = total_of(line.figures for line in lines), total_of(line.figures for line in held)
    report = FleetReport(
        window=ledger.window,
        by=tuple(by),
        filters=filters,
        held=tuple(held),
        apart=tuple(apart),
        total=total,
        owned=of_held,
        share_idle=share_idle,
        share_unallocated=share_unallocated,
        periods=tuple(chunk.window for chunk in ledger.chunks) if with_series else (),
        trust=_trust(ledger, filters, seconds, lines, {*by, *filters.wanted}),
        engine=ledger.engine,
        simulated=ledger.simulated,
        prices=prices,
    )
    return spread(report)


def in_periods(report: FleetReport, periods: Sequence[Window]) -> list[FleetReport]:
    """Divide a report with its series into reports of periods; how far to trust it is said of the whole.

    Args:
        report: Read ``with_series``.
        periods: Each of whole chunks of the report.
    """
    return [_in_period(report, period) for period in periods]


def _in_period(report: FleetReport, period: Window) -> FleetReport:
    chosen = [
        index
        for index, chunk in enumerate(report.periods)
        if period.start_seconds <= chunk.start_seconds < period.end_seconds
    ]

    def part(lines: Sequence[ReportLine]) -> list[ReportLine]:
        kept = ((line.key, [line.series[index] for index in chosen]) for line in lines)
        return [
            ReportLine(key=key, figures=total_of(some)) for key, some in kept if any(one != _NOTHING for one in some)
        ]

    held, apart = part(report.held), part(report.apart)
    owned, total = (total_of(line.figures for line in lines) for lines in (held, (*held, *apart)))
    return spread(
        replace(report, window=period, held=tuple(held), apart=tuple(apart), total=total, owned=owned, periods=())
    )


KNOWN_RATIO = 0.99
"""So much of an earlier period must have been recorded, or its money is not compared with."""


def compared(report: FleetReport, earlier: FleetReport) -> FleetReport:
    """Return the report with the one of the period before; with a note where that is not known well enough."""
    covered, name = earlier.trust.period_coverage_ratio or 0.0, earlier.window.label
    if covered >= KNOWN_RATIO and earlier.trust.whole:
        report = replace(report, before=earlier)
        known = figures_before(report)
        held, apart = (
            tuple([replace(line, before=known(line.key)) for line in lines]) for lines in (report.held, report.apart)
        )
        return replace(report, held=held, apart=apart)
    why = earlier.trust.failures[0].reason if earlier.trust.failures else f"{percent_down(covered)} of it was recorded"
    note = f"not compared with {name}: {why}"
    return replace(report, trust=replace(report.trust, notes=(*report.trust.notes, note)))


def _cost(figures: Figures, currency: str) -> float | None:
    """Return the cost in a currency; 0 where nothing was paid in it, ``None`` where there was no price."""
    money = figures.money.get(currency)
    return money.total if money else None if figures.unpriced_seconds and not figures.money else 0.0


def change(figures: Figures, before: Figures, currency: str) -> tuple[float | None, float | None]:
    """Return the cost of the period before, and the difference; ``None`` without a price, or where nothing was paid."""
    if currency not in figures.money and currency not in before.money:
        return None, None
    then, now = _cost(before, currency), _cost(figures, currency)
    return then, None if then is None or now is None else now - then


def figures_before(report: FleetReport) -> Callable[[LineKey], Figures]:
    """Return what gives a line's figures of the period before: nothing where it had no line then."""
    earlier = report.before
    known = {line.key: line.figures for line in (*earlier.held, *earlier.apart)} if earlier else {}
    return lambda key: known.get(key, _NOTHING)


def _gather(
    ledger: FleetLedger, by: Sequence[Dimension], filters: Filters, *, with_series: bool
) -> tuple[list[ReportLine], list[float]]:
    """Return the lines that are asked for, and of each chunk the seconds of what the filters keep."""
    wanted = with_parts(by)
    known = {dimension: values for dimension, values in filters.wanted.items() if dimension in ledger.dimensions}
    kept = Filters(wanted=known)
    # A line without an owner has no namespace; it is not what is asked for by asking for none.
    of_owners = any(name in _OF_OWNERS or name.startswith(LABEL) for name in filters.wanted)
    groups: dict[LineKey, LineKey | None] = {}
    whole: dict[LineKey, list[Figures]] = {}
    by_chunk: list[dict[LineKey, Figures]] = []
    seconds: list[float] = []
    for chunk in ledger.chunks:
        here: dict[LineKey, list[Figures]] = {} if with_series else whole
        chunk_seconds = 0.0
        for key, figures in chunk.lines.items():
            if key in groups:
                group = groups[key]
            else:
                is_kept = not (of_owners and is_apart(key)) and kept.keep(key)
                group = groups[key] = group_of(key, wanted) if is_kept else None
            if group is None:
                continue
            here.setdefault(group, []).append(figures)
            chunk_seconds += figures.seconds.total
        seconds.append(chunk_seconds)
        if with_series:
            by_chunk.append({group: total_of(some) for group, some in here.items()})
            for group, figures in by_chunk[-1].items():
                whole.setdefault(group, []).append(figures)
    lines = [
        ReportLine(key=key, figures=total_of(some), series=tuple([series.get(key, _NOTHING) for series in by_chunk]))
        for key, some in whole.items()
    ]
    return sorted(lines, key=rank), seconds


def group_of(key: LineKey, dimensions: Collection[Dimension]) -> LineKey:
    """Return the key of the line that a line is summed into; without an owner it keeps its kind."""
    return key.at({*dimensions, "kind"} if is_apart(key) else dimensions)


def rank(line: ReportLine) -> tuple[float, float, LineKey]:
    """Order lines by money, dearest first, then by time."""
    # Currencies cannot be compared; a fleet mostly has one, and then this is the order of money.
    cost = sum(money.total for money in line.figures.money.values())
    return (-cost, -line.figures.seconds.total, line.key)


def _trust(
    ledger: FleetLedger,
    filters: Filters,
    chunk_seconds: Sequence[float],
    lines: Sequence[ReportLine],
    asked: Iterable[Dimension],
) -> Trust:
    total = total_by_state(line.figures.seconds for line in lines)
    held = total_by_state(line.figures.seconds for line in lines if line.states)
    wanted = filters.wanted.get("cluster")
    clusters = {
        cluster
        for chunk in ledger.chunks
        for cluster in (*chunk.capacity_seconds, *chunk.recorded_hours)
        if wanted is None or cluster in wanted
    }
    capacity, missing = _conservation(ledger, chunk_seconds, clusters, is_whole=not is_part(filters))
    recorded = sum(chunk.recorded_hours.get(cluster, 0) for chunk in ledger.chunks for cluster in clusters)
    notes = ledger.notes
    if filters.wanted and not total.total and any(chunk.capacity_seconds for chunk in ledger.chunks):
        notes += (f"{NO_MATCH} {filter_words(filters)}: find the names in a report without the filter",)
    if unknown := unknown_labels(ledger, asked):
        notes += (unknown,)
    if any(OTHER in pairs(line.key.labels).values() for line in lines):
        notes += (f"{OTHER} has the label values beyond the combinations that an agent keeps (docs/cost.md)",)
    return Trust(
        capacity_seconds=capacity,
        missing_seconds=missing,
        expected_hours=sum(ledger.window.end_seconds - start for start in _starts(ledger, clusters)) // HOUR_SECONDS,
        recorded_hours=recorded,
        activity_coverage_ratio=_rest(held.unknown, held.total),
        price_coverage_ratio=_rest(sum(line.figures.unpriced_seconds for line in lines), total.total),
        failures=ledger.failures,
        notes=notes,
    )


def unknown_labels(ledger: FleetLedger, asked: Iterable[Dimension]) -> str:
    """Return which of the labels no line has, and which labels exist; empty if all are known."""
    missing = sorted(set(label_keys(asked)) - ledger.label_keys)
    if not missing or not any(chunk.capacity_seconds for chunk in ledger.chunks):
        return ""
    there = ", ".join(sorted(ledger.label_keys)) or "none; name them by --cost-labels of the agents"
    return f"no line has the label {', '.join(missing)}; labels of this period: {there}"


def _starts(ledger: FleetLedger, clusters: set[str]) -> list[int]:
    """Return when the hours of each cluster begin: a new cluster has none before its first chunk.

    What no cluster has is missing, rather than too early for all of them.
    """
    firsts: dict[str, int] = {}
    for chunk in ledger.chunks:
        for cluster in clusters:
            if chunk.recorded_hours.get(cluster):
                firsts.setdefault(cluster, chunk.window.start_seconds)
    begin, first_of_all = ledger.window.start_seconds, min(firsts.values(), default=0)
    late = {cluster: start for cluster, start in firsts.items() if start > first_of_all}
    return [late.get(cluster, begin) for cluster in clusters] or [begin]


def _conservation(
    ledger: FleetLedger, seconds: Sequence[float], clusters: set[str], *, is_whole: bool
) -> tuple[float, float]:
    """Return capacity, and what the lines lack of it; a chunk with unanswered queries is a failure, not a lack."""
    capacity = missing = 0.0
    for chunk, of_lines in zip(ledger.chunks, seconds, strict=True):
        metered = _capacity(chunk, clusters)
        lacking = _beyond_rounding(metered - of_lines, metered) if is_whole else 0.0
        if lacking and any(failure.window.meets(chunk.window) for failure in ledger.failures):
            continue
        capacity += metered
        missing += metered - of_lines if is_whole else 0.0
    return capacity, _beyond_rounding(missing, capacity)


def _capacity(chunk: Chunk, clusters: set[str]) -> float:
    return sum(seconds for cluster, seconds in chunk.capacity_seconds.items() if cluster in clusters)


def _beyond_rounding(missing: float, capacity: float) -> float:
    return missing if abs(missing) > _TOLERATED_SECONDS + abs(capacity) * _TOLERATED_RATIO else 0.0


def _rest(part: float, whole: float) -> float | None:
    return max(0.0, 1 - part / whole) if whole else None


def filter_words(filters: Filters) -> str:
    """Return ``namespace a or b, team core``."""
    words = []
    for dimension, values in sorted(filters.wanted.items()):
        name = dimension.removeprefix(LABEL)
        words.append(f"{name} {' or '.join(value or f'(no {name})' for value in sorted(values))}")
    return ", ".join(words)
