"""Rows, footer and formatting that the forms of a fleet's report share."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TextIO

from exporter.cost.ledger import LABEL, Dimension, Failure, Figures, LineKey
from exporter.cost.report import FleetReport, close, filter_words, is_apart, is_part, total_of
from exporter.model import Totals
from exporter.model.formatting import decimal, hour_digits, minute, model, moment, money_with_code, percent_down

HOUR = 3600.0
JOULES_PER_KWH = 3.6e6
_FORMULA_START = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\n")
_FORMULA_WITHIN = re.compile(r'(^\s+|[;\t\n|][\s"]*)(?=[=+\-@\uff1d\uff0b\uff0d\uff20])')
"""A formula sign where a spreadsheet that splits at another character than the comma sees the begin of a cell."""


def clean(name: str) -> str:
    """A text that cannot steer the terminal or turn the line around that it is written to."""
    return name if name.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in name)


def guarded(name: str) -> str:
    """Return the text of a CSV cell: UTF-8 can encode it, and no spreadsheet reads a formula or another row in it.

    Spreadsheets of many locales split at ``;`` and ignore quotes within a cell, so each part gets its own guard.
    """
    name = encodable(name).replace("\r\n", "\n").replace("\r", "\n")  # Python's writer does not quote a lone \r
    name = _FORMULA_WITHIN.sub(r"\1'", name)
    return f"'{name}" if name.startswith(_FORMULA_START) else name


def csv_stream(stream: TextIO) -> "TextIO | _Terminal":
    """Return where to write CSV: a terminal gets no control characters, a file gets every name as it is."""
    return _Terminal(stream) if stream.isatty() else stream


class _Terminal:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str, /) -> object:
        return self._stream.write("\n".join(clean(line) for line in text.split("\n")))


def encodable(name: str) -> str:
    """A text that UTF-8 has: half a surrogate pair, which JSON can smuggle in, becomes a question mark."""
    return name if name.isascii() else name.encode("utf-8", "replace").decode()


Sort = Literal["held", "more", "apart", "total"]
_OWNERS: tuple[Dimension, ...] = ("namespace", "kind", "workload", "team")
TITLES: Mapping[Dimension, str] = {
    "cluster": "Cluster",
    "node": "Node",
    "pool": "Node pool",
    "namespace": "Namespace",
    "kind": "Kind",
    "workload": "Workload",
    "team": "Team",
    "model": "Model",
    "mode": "Mode",
}
_UNKNOWN: Mapping[Dimension, str] = {
    "cluster": "(no cluster label)",
    "pool": "(unknown pool)",
    "namespace": "(no namespace)",
    "team": "(no team)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One row."""

    names: tuple[str, ...]
    figures: Figures
    sort: Sort
    shared: Mapping[str, float] = field(default_factory=dict)
    """By currency; empty where nothing is spread."""
    charged: Mapping[str, float] = field(default_factory=dict)
    """Own and shared money, by currency; the rows' sum to the total's to the hundredth."""


def is_shared(report: FleetReport) -> bool:
    """Whether money of nobody's was to be spread."""
    return report.share_idle != "none"


def titles(report: FleetReport) -> tuple[str, ...]:
    """Of the columns that name a row."""
    return (*map(title, report.by), *(() if _of_owners(report.by) else ("Held by",)))


def number_titles(report: FleetReport) -> tuple[str, ...]:
    """Of the columns with numbers, as ``numbers`` gives them."""
    kinds = ("Cost", "Idle", "Shared", "Charged") if is_shared(report) else ("Cost", "Idle")
    money = [f"{kind} {currency}".strip() for currency in report.currencies or ("",) for kind in kinds]
    return ("GPU-hours", "Active", "Idle", "Unknown", "Active %", *money)


def rows(report: FleetReport, top: int | None = None) -> list[ReportRow]:
    """Owners' rows, dearest first, what is nobody's, and the total; beyond ``top`` owners one row has the rest."""
    made = [
        ReportRow(
            names=tuple(_names(line.key, report.by)),
            figures=line.figures,
            sort="apart" if is_apart(line.key) else "held",
            shared=line.shared,
            charged=charges,
        )
        for line, charges in zip((*report.held, *report.apart), charged(report), strict=True)
    ]
    rest = [""] * (len(titles(report)) - 1)
    held, apart = made[: len(report.held)], made[len(report.held) :]
    if top is not None and len(held) > top:
        held = [*held[:top], _summed(held[top:], (f"({len(held) - top:,} more)", *rest))]
    total = ReportRow(
        names=("Total", *rest),
        figures=report.total,
        sort="total",
        charged=_sums([row.charged for row in made]),
    )
    return [*held, *apart, total]


def charged(report: FleetReport) -> list[dict[str, float]]:
    """By line (held, then apart) and currency: what it is charged with, its own money and what was spread onto it.

    Whole hundredths that sum to the total's; empty where nothing was to be spread, or a line has no such money.
    """
    lines = (*report.held, *report.apart)
    found: list[dict[str, float]] = [{} for _ in lines]
    if not is_shared(report):
        return found
    for currency in report.currencies:
        has = [n for n, line in enumerate(lines) if currency in line.figures.money or currency in line.shared]
        amounts = [lines[n].figures.money_in(currency).total + lines[n].shared.get(currency, 0.0) for n in has]
        for n, amount in zip(has, close(amounts), strict=True):
            found[n][currency] = amount
    return found


def _summed(many: Sequence[ReportRow], names: tuple[str, ...]) -> ReportRow:
    return ReportRow(
        names=names,
        figures=total_of(row.figures for row in many),
        sort="more",
        shared=_sums([row.shared for row in many]),
        charged=_sums([row.charged for row in many]),
    )


def _sums(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    currencies = {currency for one in many for currency in one}
    return {currency: round(sum(one.get(currency, 0.0) for one in many), 2) for currency in currencies}


def numbers(row: ReportRow, report: FleetReport, digits: int) -> list[str]:
    """The row's numbers as text, in the order of ``number_titles``; empty where they are not known."""
    activity = row.figures.active_ratio
    shown = hours_of(row.figures, digits)
    shown.append("" if activity is None or row.sort == "apart" else percent_down(activity, 0))
    for currency in report.currencies or ("",):
        shown += money_of(row.figures, currency)
        if is_shared(report):
            amounts = (row.shared.get(currency), row.charged.get(currency))
            shown += ["" if amount is None else decimal(amount, 2) for amount in amounts]
    return shown


def hours_of(figures: Figures | Totals, digits: int) -> list[str]:
    """Hours held, active, idle and unknown, as text."""
    seconds = (figures.allocated_seconds, figures.active_seconds, figures.idle_seconds, figures.unknown_seconds)
    return [decimal(value / HOUR, digits) for value in seconds]


def money_of(figures: Figures | Totals, currency: str) -> list[str]:
    """Cost and idle cost in a currency, as text; a star where a part of the hours has no price."""
    unpriced, money = figures.unpriced_seconds > 0, figures.money.get(currency)
    if money is None:
        return ["no price" if unpriced and not figures.money else "", ""]
    return [decimal(money.total, 2) + ("*" if unpriced else ""), decimal(money.idle, 2)]


def _of_owners(by: Sequence[Dimension]) -> list[Dimension]:
    return [dimension for dimension in by if dimension in _OWNERS or dimension.startswith(LABEL)]


def _names(key: LineKey, by: Sequence[Dimension]) -> Iterator[str]:
    """Texts of the columns that name a line; what is nobody's says so in the first column of owners."""
    ours, of_owners = key.kind if is_apart(key) else "", _of_owners(by)
    for dimension in by:
        if ours and dimension in of_owners:
            yield ours if dimension == of_owners[0] else ""
        elif dimension == "workload":
            yield workload_name(key, whole="namespace" not in by)
        elif dimension == "model":
            yield clean(model(key.model))
        else:
            unknown = f"(no {title(dimension)})" if dimension.startswith(LABEL) else _UNKNOWN.get(dimension, "")
            yield clean(key.value(dimension)) or unknown
    if not of_owners:
        yield ours or "owners"


def title(dimension: Dimension) -> str:
    """What a dimension is called; a label by its key."""
    return TITLES.get(dimension) or dimension.removeprefix(LABEL)


def noun(dimension: Dimension) -> str:
    """The same within a sentence."""
    return title(dimension).lower() if dimension in TITLES else title(dimension)


def workload_name(key: LineKey, *, whole: bool) -> str:
    """``vision/Job/resnet``, as far as it is known; without the namespace where that stands beside it."""
    parts = (key.namespace if whole else "", key.kind, key.workload)
    return clean("/".join(part for part in parts if part)) or "(no workload)"


Tone = Literal["", "note", "warning", "error"]


class Remark(NamedTuple):
    """One line of the foot; ``label`` is empty where the line goes on with the subject of the one before."""

    label: str
    words: str
    tone: Tone = ""


def remarks(report: FleetReport) -> Iterator[Remark]:
    """All that a reader must know of a report beside its rows."""
    yield from _sum(report)
    yield _funnel(report)
    yield from _sharing(report)
    yield from _coverage(report)
    window = report.window
    label = f" ({clean(window.label)})" if window.label else ""
    yield Remark("Period", f"{moment(window.start_seconds)} to {moment(window.end_seconds)}{label}")
    if report.engine:
        yield Remark("Source", clean(report.engine))
    yield Remark("Prices", clean(report.prices) or "of the time of use")
    yield from unpriced(report.total, hour_digits(report.trust.capacity_seconds))
    for label, failure in zip(("Not read", *("",) * len(report.trust.failures)), report.trust.failures, strict=False):
        yield Remark(label, failure_words(failure), "error")
    for label, note in zip(("Note", *("",) * len(report.trust.notes)), report.trust.notes, strict=False):
        yield Remark(label, clean(note), "warning")


def unpriced(total: Figures | Totals, digits: int) -> Iterator[Remark]:
    """Say how much had no price, if anything."""
    if total.unpriced_seconds > 0:
        mark = " (marked * where that is a part)" if total.money else ""
        hours = decimal(total.unpriced_seconds / HOUR, digits)
        yield Remark("Unpriced", f"{hours} GPU-hours had no price and are in no cost{mark}", "warning")


def failure_words(failure: Failure) -> str:
    """What was not read, and why."""
    window = failure.window
    when = f"{minute(window.start_seconds)} to {minute(window.end_seconds)} UTC"
    return clean(f"{when}: {failure.what}: {failure.reason}; what it asked for is missing")


def _sum(report: FleetReport) -> Iterator[Remark]:
    trust = report.trust
    digits = hour_digits(trust.capacity_seconds)
    capacity = f"{decimal(trust.capacity_seconds / HOUR, digits)} GPU-hours metered"
    if is_part(report.filters):
        hours = decimal(report.total.allocated_seconds / HOUR, digits)
        only = f"only {clean(filter_words(report.filters))}"
        yield Remark("Sum", f"{hours} of {capacity}: {only}; that nothing is missing can be seen without the filter")
        return
    lines = decimal((trust.capacity_seconds - trust.missing_seconds) / HOUR, digits)
    if trust.missing_seconds:
        told = f"conservation error {abs(trust.missing_seconds):.1e} s"
    elif trust.failures or trust.recorded_hours < trust.expected_hours:
        told = "all that was recorded and read is on a line; what was not is in no sum"
    else:
        told = "nothing is missing"
    yield Remark("Sum", f"{lines} of {capacity}, {told}")
    if trust.missing_seconds:
        what = "have no line" if trust.missing_seconds > 0 else "are on lines and were not metered"
        hours = f"{abs(trust.missing_seconds) / HOUR:,.3f} GPU-hours"
        yield Remark(
            "",
            f"{hours} {what}: owner:gpu_seconds:delta1h and workload:gpu_seconds:delta1h do not"
            " agree; is one set of rules loaded, of this release, and does it see every agent?",
            "error",
        )


def _funnel(report: FleetReport) -> Remark:
    held = total_of(line.figures for line in report.held)
    whole = report.total.allocated_seconds
    digits = hour_digits(report.trust.capacity_seconds)
    steps = [f"{decimal(whole / HOUR, digits)} GPU-hours"]
    for seconds, word in ((held.allocated_seconds, "held"), (held.active_seconds, "active")):
        part = f" ({percent_down(seconds / whole, 1)})" if whole else ""
        steps.append(f"{decimal(seconds / HOUR, digits)} {word}{part}")
    unknown = held.unknown_seconds / HOUR
    told = f"; of {decimal(unknown, digits)} held it is not known" if unknown else ""
    return Remark("Funnel", " > ".join(steps) + told)


def _sharing(report: FleetReport) -> Iterator[Remark]:
    if report.share_idle == "none":
        return
    how = "evenly over owners' lines" if report.share_idle == "even" else "over owners by their own cost"
    what = "Unallocated and Unattributed" if report.share_unallocated else "Unallocated"
    spread = {currency: sum(line.shared.get(currency, 0.0) for line in report.held) for currency in report.currencies}
    amounts = " and ".join(money_with_code(amount, currency) for currency, amount in spread.items()) or "nothing"
    yield Remark("Shared", f"{amounts} of {what}, {how}; Charged is Cost and Shared")


def _coverage(report: FleetReport) -> Iterator[Remark]:
    trust = report.trust
    label = "Coverage"
    if trust.period_coverage_ratio is not None:
        hours = f"{trust.recorded_hours:,} of {trust.expected_hours:,}"
        tone: Tone = "warning" if trust.recorded_hours < trust.expected_hours else ""
        yield Remark(label, f"{percent_down(trust.period_coverage_ratio)} of the hours were recorded ({hours})", tone)
        label = ""
    if trust.activity_coverage_ratio is not None:
        yield Remark(
            label, f"{percent_down(trust.activity_coverage_ratio)} of the held GPU-hours had their activity measured"
        )
        label = ""
    if trust.price_coverage_ratio is not None:
        yield Remark(label, f"{percent_down(trust.price_coverage_ratio)} of the GPU-hours had a price")
