"""Builds the report of a fleet's ledger: lines per dimension, Unallocated apart, coverage."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from math import floor
from typing import Literal, TypeVar

from exporter.cost.dimensions import APART, OTHER, UNALLOCATED, Dimension, Filters, LineKey, label_keys, with_parts
from exporter.cost.ledger import NOTHING, Failure, Figures, FleetLedger, total_by_state, total_of
from exporter.cost.window import HOUR_SECONDS, Window
from exporter.model.formatting import percent_down
from exporter.model.ledger import state_columns

NO_MATCH = "nothing matches"
"""Begins the note of a report whose filters leave nothing."""
RATIOS = ("active_ratio", "effective_ratio", "profiled_ratio")
"""Ratios of the states of a line."""
ShareIdle = Literal["none", "even", "weighted"]
"""What becomes of money that no owner's GPUs cost: shown apart, spread evenly over owners, or by their own money."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a report is asked for, apart from its window."""

    by: tuple[Dimension, ...] = ()
    """Dimensions of the lines."""
    filters: Filters = field(default_factory=Filters)
    """Of dimensions that the ledger does not have, its source has kept what was asked for."""
    share_idle: ShareIdle = "none"
    """See ``spread``."""
    share_unallocated: bool = False
    """Unallocated and Unattributed money is spread, too, in the manner of ``share_idle``."""
    with_series: bool = False
    """Each line also has its figures of each chunk."""

    @property
    def is_shared(self) -> bool:
        """Whether money without an owner is to be spread."""
        return self.share_idle != "none"


def _cost(figures: Figures, currency: str) -> float | None:
    """Return the cost in a currency; 0 where nothing was paid in it, ``None`` where there was no price."""
    money = figures.money.get(currency)
    return money.total if money else None if figures.unpriced_seconds and not figures.money else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLine:
    """One line. ``key`` has the dimensions of the report, and ``kind`` if the line has no owner."""

    key: LineKey
    figures: Figures
    shared: Mapping[str, float] = field(default_factory=dict)
    """By currency: money of others (idle, Unallocated) that was spread onto this line; not in ``figures``."""
    charged: Mapping[str, float] = field(default_factory=dict)
    """By currency: own and shared money in whole hundredths, which sum to the total's; empty where none is spread."""
    series: tuple[Figures, ...] = ()
    """Figures of each chunk of the report's ``periods``; empty where they were not asked for."""
    before: Figures = NOTHING
    """Figures of the period before, where the report is compared with it."""
    owned: Figures | None = None
    """Of a total: the part of its figures that has an owner. ``None`` of every other line."""

    @property
    def states(self) -> Figures | None:
        """Figures of active, idle and unknown time; ``None`` without an owner, which has no idle time."""
        return None if self.key.is_apart else self.owned or self.figures

    def by_state(self, currency: str | None = None) -> Mapping[str, float | None]:
        """Return the seconds, or the money in a currency, by ``STATE_COLUMNS``; ``None`` is not known."""
        if (states := self.states) is None:
            return state_columns(None)
        return state_columns(states.seconds if currency is None else states.money.get(currency))

    def ratio(self, name: str) -> float | None:
        """Return one of ``RATIOS``; ``None`` without an owner, or where nothing was measured."""
        return getattr(self.states.seconds, name) if self.states else None

    def change(self, currency: str) -> tuple[float | None, float | None]:
        """Return the cost of the period before, and the difference; ``None`` without a price or without any cost."""
        if currency not in self.figures.money and currency not in self.before.money:
            return None, None
        then, now = _cost(self.before, currency), _cost(self.figures, currency)
        return then, None if then is None or now is None else now - then


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
    question: Question
    held: tuple[ReportLine, ...]
    apart: tuple[ReportLine, ...]
    """``Unattributed`` and ``Unallocated``, in this order, split by those of the dimensions that they have."""
    total: Figures
    """Of held and apart."""
    owned: Figures
    """Of held alone: every total of active, idle and unknown time is of owners."""
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

    @property
    def sum_of_lines(self) -> ReportLine:
        """The total as a line."""
        return ReportLine(
            key=LineKey(),
            figures=self.total,
            owned=self.owned,
            charged=money_sums(line.charged for line in (*self.held, *self.apart)),
            before=self.before.total if self.before else NOTHING,
        )


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
    question, held = report.question, report.held
    if not question.is_shared:
        return report
    kinds = set(APART) if question.share_unallocated else {UNALLOCATED}
    levels = list(dict.fromkeys(frozenset(question.by) & narrow for narrow in _NARROWER))
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
        taken.append(_take(line, held, payers, question.share_idle, given) if is_spread else line)
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
    """Return whole parts in proportion to weights that sum to the whole; the largest remainders are rounded up.

    Args:
        whole: What is divided, not negative.
        weights: At least one, none negative, not all 0; of equal remainders the first is rounded up.
    """
    total = sum(weights)
    return settled([whole * (weight / total) for weight in weights], whole)


def close(amounts: Sequence[float]) -> list[float]:
    """Return amounts in hundredths, rounded such that they sum to their rounded sum: a bill that closes to the cent.

    The largest remainders are rounded up; an amount of less than half a hundredth, as what is left of a line that was
    spread, is 0 as long as others can bear the difference.
    """
    hundredths = [amount * _PER_UNIT for amount in amounts]
    parts = settled(hundredths, round(sum(hundredths)), [abs(value) <= _HALF for value in hundredths])
    return [part / _PER_UNIT for part in parts]


Exact = TypeVar("Exact", float, Decimal)


def settled(exact: Sequence[Exact], whole: int, small: Sequence[bool] = ()) -> list[int]:
    """Return the values rounded down or up such that they sum to the whole: largest remainders up, ``small`` last."""
    small = small or [not value for value in exact]
    parts = [0 if is_small else floor(value) for value, is_small in zip(exact, small, strict=True)]
    order = sorted(range(len(parts)), key=lambda index: (small[index], parts[index] - exact[index]))
    # Rounding of floats may leave a little more than a unit for each part, or take one too many.
    while left := whole - sum(parts):
        for index in order[:left] if left > 0 else [index for index in order if parts[index]][left:]:
            parts[index] += 1 if left > 0 else -1
    return parts


_TOLERATED_RATIO, _TOLERATED_SECONDS = 1e-9, 1e-6


def make_report(ledger: FleetLedger, question: Question, prices: str = "") -> FleetReport:
    """Return the report over a ledger's window.

    Args:
        ledger: At ``dimensions_of(question.by)`` or finer.
        question: What is asked for.
        prices: Which prices the money is at, where it is not at those of the time of use.
    """
    lines, seconds = _gather(ledger, question)
    held = [line for line in lines if not line.key.is_apart]
    apart = [line for kind in APART for line in lines if line.key.is_apart and line.key.kind == kind]
    total, of_held = total_of(line.figures for line in lines), total_of(line.figures for line in held)
    report = FleetReport(
        window=ledger.window,
        question=question,
        held=tuple(held),
        apart=tuple(apart),
        total=total,
        owned=of_held,
        periods=tuple(chunk.window for chunk in ledger.chunks) if question.with_series else (),
        trust=_trust(ledger, question, seconds, lines),
        engine=ledger.engine,
        simulated=ledger.simulated,
        prices=prices,
    )
    return spread(report)


def in_period(report: FleetReport, period: Window) -> FleetReport:
    """Return the report of a period; how far to trust it is said of the whole.

    Args:
        report: Read ``with_series``.
        period: Of whole chunks of the report.
    """
    chosen = [
        index
        for index, chunk in enumerate(report.periods)
        if period.start_seconds <= chunk.start_seconds < period.end_seconds
    ]

    def part(lines: Sequence[ReportLine]) -> tuple[ReportLine, ...]:
        kept = ((line.key, [line.series[index] for index in chosen]) for line in lines)
        return tuple(
            ReportLine(key=key, figures=total_of(some)) for key, some in kept if any(one != NOTHING for one in some)
        )

    held, apart = part(report.held), part(report.apart)
    owned, total = (total_of(line.figures for line in lines) for lines in (held, (*held, *apart)))
    return spread(replace(report, window=period, held=held, apart=apart, total=total, owned=owned, periods=()))


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


def figures_before(report: FleetReport) -> Callable[[LineKey], Figures]:
    """Return what gives a line's figures of the period before: nothing where it had no line then."""
    earlier = report.before
    known = {line.key: line.figures for line in (*earlier.held, *earlier.apart)} if earlier else {}
    return lambda key: known.get(key, NOTHING)


def _gather(ledger: FleetLedger, question: Question) -> tuple[list[ReportLine], list[float]]:
    """Return the lines that are asked for, and of each chunk the seconds of what the filters keep."""
    wanted, with_series = with_parts(question.by), question.with_series
    kept = question.filters.only(ledger.dimensions)
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
                is_kept = not (question.filters.of_owners and key.is_apart) and kept.keep(key)
                group = groups[key] = key.group(wanted) if is_kept else None
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
        ReportLine(key=key, figures=total_of(some), series=tuple([series.get(key, NOTHING) for series in by_chunk]))
        for key, some in whole.items()
    ]
    return sorted(lines, key=rank), seconds


def rank(line: ReportLine) -> tuple[float, float, LineKey]:
    """Order lines by money, dearest first, then by time."""
    # Currencies cannot be compared; a fleet mostly has one, and then this is the order of money.
    cost = sum(money.total for money in line.figures.money.values())
    return (-cost, -line.figures.seconds.total, line.key)


def _trust(
    ledger: FleetLedger, question: Question, chunk_seconds: Sequence[float], lines: Sequence[ReportLine]
) -> Trust:
    filters = question.filters
    total = total_by_state(line.figures.seconds for line in lines)
    held = total_by_state(line.figures.seconds for line in lines if line.states)
    wanted = filters.wanted.get("cluster")
    clusters = {
        cluster
        for chunk in ledger.chunks
        for cluster in (*chunk.capacity_seconds, *chunk.recorded_hours)
        if wanted is None or cluster in wanted
    }
    capacity, missing = _conservation(ledger, chunk_seconds, clusters, is_whole=not filters.is_part)
    recorded = sum(chunk.recorded_hours.get(cluster, 0) for chunk in ledger.chunks for cluster in clusters)
    notes = ledger.notes
    if filters.wanted and not total.total and any(chunk.capacity_seconds for chunk in ledger.chunks):
        notes += (f"{NO_MATCH} {filters.words}: find the names in a report without the filter",)
    if unknown := unknown_labels(ledger, (*question.by, *filters.wanted)):
        notes += (unknown,)
    if any(OTHER in line.key.label_values.values() for line in lines):
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
        metered = sum(some for cluster, some in chunk.capacity_seconds.items() if cluster in clusters)
        lacking = _beyond_rounding(metered - of_lines, metered) if is_whole else 0.0
        if lacking and any(failure.window.meets(chunk.window) for failure in ledger.failures):
            continue
        capacity += metered
        missing += metered - of_lines if is_whole else 0.0
    return capacity, _beyond_rounding(missing, capacity)


def _beyond_rounding(missing: float, capacity: float) -> float:
    return missing if abs(missing) > _TOLERATED_SECONDS + abs(capacity) * _TOLERATED_RATIO else 0.0


def _rest(part: float, whole: float) -> float | None:
    return max(0.0, 1 - part / whole) if whole else None
