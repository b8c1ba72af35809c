"""Builds the report of a fleet's ledger: lines by dimension, separate lines without an owner, coverage."""

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
"""Beginning of the note of a report whose filters exclude everything."""
RATIOS = ("active_ratio", "effective_ratio", "profiled_ratio")
"""Names of the ratios of a line."""
ShareIdle = Literal["none", "even", "weighted"]
"""Treatment of money without an owner: separate lines, spread evenly over owners, or by their own money."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The settings of a report, without its window."""

    by: tuple[Dimension, ...] = ()
    """Dimensions of the lines."""
    filters: Filters = field(default_factory=Filters)
    """Filters on lines; the source has applied those on dimensions that the ledger lacks."""
    share_idle: ShareIdle = "none"
    """See ``spread``."""
    share_unallocated: bool = False
    """Whether money of Unattributed is spread in addition to Unallocated, in the manner of ``share_idle``."""
    with_series: bool = False
    """Whether each line also has its figures per chunk."""

    @property
    def is_shared(self) -> bool:
        """Whether money without an owner is spread over owners."""
        return self.share_idle != "none"


def _cost(figures: Figures, currency: str) -> float | None:
    """Return the cost in a currency; 0 if nothing was paid in it, ``None`` without a price."""
    money = figures.money.get(currency)
    return money.total if money else None if figures.unpriced_seconds and not figures.money else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportLine:
    """One line of a report. ``key`` has the dimensions of the report, and ``kind`` if the line has no owner."""

    key: LineKey
    figures: Figures
    shared: Mapping[str, float] = field(default_factory=dict)
    """Money of lines without an owner that was spread onto this line, by currency; not included in ``figures``."""
    charged: Mapping[str, float] = field(default_factory=dict)
    """Own and shared money in whole hundredths, by currency, which sum to the total's; empty if no money is spread."""
    series: tuple[Figures, ...] = ()
    """Figures per chunk of the report's ``periods``; empty if they were not requested."""
    before: Figures = NOTHING
    """Figures of the previous period, if the report is compared with it."""
    owned: Figures | None = None
    """Figures of owners in a total; ``None`` for any other line."""

    @property
    def states(self) -> Figures | None:
        """Figures by state; ``None`` for a line without an owner, which has no idle time."""
        return None if self.key.is_apart else self.owned or self.figures

    def by_state(self, currency: str | None = None) -> Mapping[str, float | None]:
        """Return the seconds, or the money in a currency, by ``STATE_COLUMNS``; ``None`` if unknown."""
        if (states := self.states) is None:
            return state_columns(None)
        return state_columns(states.seconds if currency is None else states.money.get(currency))

    def ratio(self, name: str) -> float | None:
        """Return a ratio of ``RATIOS``; ``None`` without an owner or without measurements."""
        return getattr(self.states.seconds, name) if self.states else None

    def change(self, currency: str) -> tuple[float | None, float | None]:
        """Return the cost of the previous period, and the change; ``None`` without a price or without any cost."""
        if currency not in self.figures.money and currency not in self.before.money:
            return None, None
        then, now = _cost(self.before, currency), _cost(self.figures, currency)
        return then, None if then is None or now is None else now - then


def sum_line(key: LineKey, lines: Sequence[ReportLine]) -> ReportLine:
    """Return the sum of several lines, with their series."""
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
    """Coverage and completeness of a report; every format shows them at its foot."""

    capacity_seconds: float
    """Metered GPU-seconds; all lines must sum to this."""
    missing_seconds: float
    """Capacity without a line (negative: surplus of the lines); 0 within rounding. Any other value shows a fault."""
    expected_hours: int
    """Hours of the window, times clusters; hours of a new cluster count from its first chunk on."""
    recorded_hours: int
    """Expected hours with a recorded ledger."""
    activity_coverage_ratio: float | None
    """Part of the held GPU-seconds whose activity was measured; ``None`` if nothing was held."""
    price_coverage_ratio: float | None
    """Part of all GPU-seconds with a price; ``None`` without GPU-seconds."""
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def period_coverage_ratio(self) -> float | None:
        """Part of the hours that were recorded; ``None`` for a window without hours."""
        return self.recorded_hours / self.expected_hours if self.expected_hours else None

    @property
    def whole(self) -> bool:
        """Whether nothing is missing: no query failed, and the lines sum to capacity."""
        return not self.failures and not self.missing_seconds


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class FleetReport:
    """Lines sorted by money, dearest first, then by time; ``held`` have an owner, ``apart`` do not."""

    window: Window
    question: Question
    held: tuple[ReportLine, ...]
    apart: tuple[ReportLine, ...]
    """Lines of ``Unattributed`` and ``Unallocated``, in this order, split by the dimensions that they have."""
    total: Figures
    """Total of ``held`` and ``apart``."""
    owned: Figures
    """Total of ``held``; totals of active, idle and unknown time include only owners."""
    periods: tuple[Window, ...] = ()
    """Periods of ``ReportLine.series``."""
    trust: Trust
    engine: str
    simulated: bool
    prices: str = ""
    """Description of the price book of a re-pricing; empty for prices of the time of use."""
    before: "FleetReport | None" = None
    """Report of the previous period, for a calendar period; ``None`` without a comparison."""

    @property
    def currencies(self) -> tuple[str, ...]:
        """Currencies with priced time, in alphabetical order."""
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
"""Units of spread money: hundredths, whatever the smallest coin of the currency is."""
_NARROWER: tuple[frozenset[Dimension], ...] = (
    frozenset({"cluster", "pool", "model", "node"}),
    frozenset({"cluster", "pool", "model"}),
    frozenset({"cluster", "pool"}),
    frozenset({"cluster", "model"}),
    frozenset({"cluster"}),
)
"""Dimensions by which owners pay for unallocated time: owners of the same place; if there are none, of a wider one;
never of another cluster."""


def spread(report: FleetReport) -> FleetReport:
    """Return the report with ``shared`` and ``charged`` of its lines; the ``shared`` values sum to 0 over all lines.

    If the dimensions distinguish places (cluster, pool, model, node), the owners of a place pay for its unallocated
    time. ``share_idle`` spreads Unallocated, GPUs without a holder, which other tools call idle: ``even`` over lines,
    or ``weighted`` by their own money (without money in the currency, by their GPU-seconds). Idle time of an owner
    stays with the owner. With ``share_unallocated``, Unattributed is spread as well, so that all money without an owner
    is.

    ``shared`` of an owner's line is in whole hundredths; ``shared`` of any other line is the amount taken from it: all
    but less than half a hundredth. Money without an owner to pay it stays on its line.
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
    """Return the lines' money; without money, their GPU-seconds; without both, equal weights."""
    money = [max(0.0, line.figures.money_in(currency).total) for line in lines]
    if any(money):
        return money
    seconds = [max(0.0, line.figures.seconds.total) for line in lines]
    return seconds if any(seconds) else [1.0] * len(lines)


def _units(hundredths: Mapping[str, int]) -> dict[str, float]:
    return {currency: number / _PER_UNIT for currency, number in hundredths.items() if number}


def divide(whole: int, weights: Sequence[float]) -> list[int]:
    """Divide a number into whole parts in proportion to weights; the parts with the largest remainders are rounded up.

    Args:
        whole: Number to divide, not negative.
        weights: At least one, none negative, not all 0; of equal remainders, the first is rounded up.
    """
    total = sum(weights)
    return settled([whole * (weight / total) for weight in weights], whole)


def close(amounts: Sequence[float]) -> list[float]:
    """Round amounts to hundredths so that they sum to their rounded sum: a bill that adds up to the cent.

    The largest remainders are rounded up. An amount below half a hundredth becomes 0 if the other amounts
    can take the difference; the rest of a line that was spread is such an amount.
    """
    hundredths = [amount * _PER_UNIT for amount in amounts]
    parts = settled(hundredths, round(sum(hundredths)), [abs(value) <= _HALF for value in hundredths])
    return [part / _PER_UNIT for part in parts]


Exact = TypeVar("Exact", float, Decimal)


def settled(exact: Sequence[Exact], whole: int, small: Sequence[bool] = ()) -> list[int]:
    """Round the values down or up so that they sum to ``whole``: largest remainders up, values of ``small`` last."""
    small = small or [not value for value in exact]
    parts = [0 if is_small else floor(value) for value, is_small in zip(exact, small, strict=True)]
    order = sorted(range(len(parts)), key=lambda index: (small[index], parts[index] - exact[index]))
    # Rounding of floats may leave more than one unit per part, or take one unit too many.
    while left := whole - sum(parts):
        for index in order[:left] if left > 0 else [index for index in order if parts[index]][left:]:
            parts[index] += 1 if left > 0 else -1
    return parts


_TOLERATED_RATIO, _TOLERATED_SECONDS = 1e-9, 1e-6


def make_report(ledger: FleetLedger, question: Question, prices: str = "") -> FleetReport:
    """Return the report over a ledger's window.

    Args:
        ledger: Ledger at ``dimensions_of(question.by)`` or finer.
        question: Settings of the report.
        prices: Description of the prices; empty for prices of the time of use.
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
    """Return the report of a period; ``trust`` stays that of the whole report.

    Args:
        report: Report with series.
        period: Period of whole chunks of the report.
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
"""Least recorded part of an earlier period for a comparison."""


def compared(report: FleetReport, earlier: FleetReport) -> FleetReport:
    """Return the report with the previous one for comparison; a note gives the reason if that one is incomplete."""
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
    """Return a function that returns the figures of a line in the previous period; zero without a line."""
    earlier = report.before
    known = {line.key: line.figures for line in (*earlier.held, *earlier.apart)} if earlier else {}
    return lambda key: known.get(key, NOTHING)


def _gather(ledger: FleetLedger, question: Question) -> tuple[list[ReportLine], list[float]]:
    """Return the requested lines, and for each chunk the seconds that the filters keep."""
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
    """Return the sort key of a line: money, dearest first, then time."""
    # Currencies cannot be compared; a fleet mostly has a single one, for which this is the order of money.
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
    """Return a note on requested labels that no line has, with the existing labels; empty if all are known."""
    missing = sorted(set(label_keys(asked)) - ledger.label_keys)
    if not missing or not any(chunk.capacity_seconds for chunk in ledger.chunks):
        return ""
    there = ", ".join(sorted(ledger.label_keys)) or "none; name them by --cost-labels of the agents"
    return f"no line has the label {', '.join(missing)}; labels of this period: {there}"


def _starts(ledger: FleetLedger, clusters: set[str]) -> list[int]:
    """Return the start of the hours of each cluster: hours of a new cluster count from its first chunk on.

    Hours before the first chunk of any cluster count as missing.
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
    """Return capacity, and the part of it without a line; a chunk with failed queries is a failure, not missing."""
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
