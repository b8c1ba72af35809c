"""Writes the foot of a report: its sum against the capacity, coverage, prices, failures and notes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from rich.console import Console
from rich.text import Text

from exporter.cost.document import Funnel, funnel
from exporter.cost.ledger import Failure, Figures, total_of
from exporter.cost.report import FleetReport
from exporter.model.formatting import clean, decimal, hour_digits, minute, moment, money_with_code, percent_down

HOUR = 3600.0
_LABEL_WIDTH = 10


Tone = Literal["", "note", "warning", "error"]
_STYLES: dict[Tone, str] = {"": "", "note": "dim", "warning": "yellow", "error": "bold red"}


class Remark(NamedTuple):
    """One line of the foot; ``label`` is empty if the line continues the subject of the previous one."""

    label: str
    words: str
    tone: Tone = ""


def remarks(report: FleetReport) -> Iterator[Remark]:
    """Yield the remarks on a report, for display below its rows."""
    yield from _sum(report)
    yield from _funnels(report)
    yield from terms(report.owned)
    yield from _sharing(report)
    yield from _before(report)
    yield from _coverage(report)
    window = report.window
    label = f" ({clean(window.label)})" if window.label else ""
    yield Remark("Period", f"{moment(window.start_seconds)} to {moment(window.end_seconds)}{label}")
    if report.engine:
        yield Remark("Source", clean(report.engine))
    yield Remark("Prices", clean(report.prices) or "of the time of use")
    yield from unpriced(report.total, hour_digits(report.trust.capacity_seconds))
    yield from listed("Not read", map(failure_words, report.trust.failures), "error")
    yield from listed("Note", map(clean, report.trust.notes), "warning")


def listed(label: str, many: Iterable[str], tone: Tone = "") -> Iterator[Remark]:
    """Yield a remark for each text; only the first has the label."""
    for number, words in enumerate(many):
        yield Remark("" if number else label, words, tone)


def terms(owned: Figures) -> Iterator[Remark]:
    """Explain the columns of effective time, if there are any."""
    if owned.seconds.profiled:
        effective = "Effective: active time, weighted by use of the resource nearest to its limit"
        yield Remark("Terms", f"{effective}. Unprofiled: a resource was not measured.", "note")


def unpriced(total: Figures, digits: int) -> Iterator[Remark]:
    """Yield a remark on hours without a price, if there are any."""
    if total.unpriced_seconds > 0:
        mark = " (marked * where that is a part)" if total.money else ""
        hours = decimal(total.unpriced_seconds / HOUR, digits)
        yield Remark("Unpriced", f"{hours} GPU-hours had no price and are in no cost{mark}", "warning")


def failure_words(failure: Failure) -> str:
    """Return period, series and reason of a failed query."""
    window = failure.window
    when = f"{minute(window.start_seconds)} to {minute(window.end_seconds)} UTC"
    return clean(f"{when}: {failure.what}: {failure.reason}; its data is missing")


def _sum(report: FleetReport) -> Iterator[Remark]:
    trust = report.trust
    digits = hour_digits(trust.capacity_seconds)
    capacity = f"{decimal(trust.capacity_seconds / HOUR, digits)} GPU-hours metered"
    if report.question.filters.is_part:
        hours = decimal(report.total.seconds.total / HOUR, digits)
        only = f"only {clean(report.question.filters.words)}"
        yield Remark("Sum", f"{hours} of {capacity}: {only}; that nothing is missing can be seen without the filter")
        return
    lines = decimal((trust.capacity_seconds - trust.missing_seconds) / HOUR, digits)
    if trust.missing_seconds:
        state = f"conservation error {abs(trust.missing_seconds):.1e} s"
    elif trust.failures or trust.recorded_hours < trust.expected_hours:
        state = "all recorded and read hours are on a line; no sum includes other hours"
    else:
        state = "nothing is missing"
    yield Remark("Sum", f"{lines} of {capacity}, {state}")
    if trust.missing_seconds:
        what = "have no line" if trust.missing_seconds > 0 else "are on lines and were not metered"
        hours = f"{abs(trust.missing_seconds) / HOUR:,.3f} GPU-hours"
        yield Remark(
            "",
            f"{hours} {what}: owner:gpu_ledger:delta1h and workload:gpu_ledger:delta1h do not"
            " agree; is one set of rules loaded, of this release, and does it see every agent?",
            "error",
        )


def _funnels(report: FleetReport) -> Iterator[Remark]:
    digits = hour_digits(report.trust.capacity_seconds)
    hours = funnel(report, unit=HOUR)
    yield Remark("Funnel", _steps(hours, "GPU-hours", lambda value: decimal(value, digits)))
    for currency in report.currencies:
        yield Remark("", _steps(funnel(report, currency), currency, decimal))


def _steps(one: Funnel, unit: str, form: Callable[[float], str]) -> str:
    steps = [f"{form(one.total)} {unit}"]
    for value, word in ((one.allocated, "held"), (one.active, "active"), (one.effective, "effective")):
        if value is not None:
            part = f" ({percent_down(value / one.total, 1)})" if one.total else ""
            steps.append(f"{form(value)} {word}{part}")
    rest = f"; {form(one.unknown)} held and not measured" if one.unknown else ""
    if one.unprofiled:
        part = "nothing" if one.effective is None else percent_down(one.profiled_ratio, 1)
        rest += f"; {part} of what was active was profiled"
    return " > ".join(steps) + rest


def _sharing(report: FleetReport) -> Iterator[Remark]:
    if not report.question.is_shared:
        return
    how = "evenly over owners' lines" if report.question.share_idle == "even" else "over owners by their own cost"
    what = "Unallocated and Unattributed" if report.question.share_unallocated else "Unallocated"
    spread = {currency: sum(line.shared.get(currency, 0.0) for line in report.held) for currency in report.currencies}
    amounts = " and ".join(money_with_code(amount, currency) for currency, amount in spread.items()) or "nothing"
    yield Remark("Shared", f"{amounts} of {what}, {how}; Charged is Cost and Shared")


def _before(report: FleetReport) -> Iterator[Remark]:
    if (earlier := report.before) is None:
        return
    now = {line.key for line in report.held}
    gone = total_of(line.figures for line in earlier.held if line.key not in now)
    money, ended = (
        " and ".join(money_with_code(figures.money_in(one).total, one) for one in earlier.currencies) or "nothing"
        for figures in (earlier.total, gone)
    )
    yield Remark("Before", f"{clean(earlier.window.label)} cost {money}; of that {ended} on lines that are not here")


def _coverage(report: FleetReport) -> Iterator[Remark]:
    trust = report.trust
    hours = f"{trust.recorded_hours:,} of {trust.expected_hours:,}"
    tone: Tone = "warning" if trust.recorded_hours < trust.expected_hours else ""
    covered: tuple[tuple[float | None, str, Tone], ...] = (
        (trust.period_coverage_ratio, f"of the hours were recorded ({hours})", tone),
        (trust.activity_coverage_ratio, "of the held GPU-hours had their activity measured", ""),
        (trust.price_coverage_ratio, "of the GPU-hours had a price", ""),
    )
    known = [(f"{percent_down(ratio)} {words}", tone) for ratio, words, tone in covered if ratio is not None]
    for number, (words, tone) in enumerate(known):
        yield Remark("" if number else "Coverage", words, tone)


def write_foot(console: Console, found: Iterable[Remark]) -> None:
    """Write remarks below a table, each on a line."""
    for label, words, tone in found:
        line = Text(f"{label:<{_LABEL_WIDTH}}", style="bold")
        console.print(line.append(words, style=_STYLES[tone]), soft_wrap=True)
