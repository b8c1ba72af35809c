"""A fleet's report as rows of text: what the table and the page for mails show alike."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from exporter.report.fleet.costs import is_apart, total_of
from exporter.report.fleet.report import FleetReport, ReportLine
from exporter.report.fleet.sharing import close
from exporter.report.fleet.values import LABEL, Dimension, Figures, LineKey
from exporter.report.render.words import HOUR, clean, decimal, percent

Sort = Literal["held", "more", "apart", "total"]
_Naming: TypeAlias = Callable[[LineKey], str]
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
class Row:
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
    return tuple(title for title, _ in _columns(report.by))


def number_titles(report: FleetReport) -> tuple[str, ...]:
    """Of the columns with numbers, as ``numbers`` gives them."""
    kinds = ("Cost", "Idle", "Shared", "Charged") if is_shared(report) else ("Cost", "Idle")
    money = [f"{kind} {currency}".strip() for currency in report.currencies or ("",) for kind in kinds]
    return ("GPU-hours", "Active", "Idle", "Unknown", "Active %", *money)


def rows(report: FleetReport, top: int | None = None) -> list[Row]:
    """Owners' rows, dearest first, what is nobody's, and the total; beyond ``top`` owners one row has the rest."""
    names = [naming for _, naming in _columns(report.by)]
    lines = (*report.held, *report.apart)
    charges = charged(report)
    made = [
        Row(
            names=tuple(naming(line.key) for naming in names),
            figures=line.figures,
            sort="apart" if is_apart(line.key) else "held",
            shared=line.shared,
            charged=charges[index],
        )
        for index, line in enumerate(lines)
    ]
    held, apart = made[: len(report.held)], made[len(report.held) :]
    if top is not None and len(held) > top:
        rest = f"({len(held) - top:,} more)"
        held = [*held[:top], _summed(held[top:], (rest, *("" for _ in names[1:])), "more")]
    total = Row(
        names=("Total", *("" for _ in names[1:])),
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
        amounts = [_own(lines[n], currency) + lines[n].shared.get(currency, 0.0) for n in has]
        for n, amount in zip(has, close(amounts), strict=True):
            found[n][currency] = amount
    return found


def _own(line: ReportLine, currency: str) -> float:
    money = line.figures.money.get(currency)
    return money.total if money else 0.0


def _summed(many: Sequence[Row], names: tuple[str, ...], sort: Sort) -> Row:
    return Row(
        names=names,
        figures=total_of(row.figures for row in many),
        sort=sort,
        shared=_sums([row.shared for row in many]),
        charged=_sums([row.charged for row in many]),
    )


def _sums(many: Sequence[Mapping[str, float]]) -> dict[str, float]:
    currencies = {currency for one in many for currency in one}
    return {currency: round(sum(one.get(currency, 0.0) for one in many), 2) for currency in currencies}


def numbers(row: Row, report: FleetReport, digits: int) -> list[str]:
    """The row's numbers as text, in the order of ``number_titles``; empty where they are not known."""
    figures = row.figures
    seconds = (figures.allocated_seconds, figures.active_seconds, figures.idle_seconds, figures.unknown_seconds)
    activity = active_ratio(figures)
    shown = [decimal(value / HOUR, digits) for value in seconds]
    shown.append("" if activity is None or row.sort == "apart" else percent(activity, 0))
    unpriced = not figures.money and figures.unpriced_seconds > 0
    for currency in report.currencies or ("",):
        money = figures.money.get(currency)
        partly = "*" if money and figures.unpriced_seconds > 0 else ""
        shown += (
            [decimal(money.total, 2) + partly, decimal(money.idle, 2)]
            if money
            else ["no price" if unpriced else "", ""]
        )
        if is_shared(report):
            amounts = (row.shared.get(currency), row.charged.get(currency))
            shown += ["" if amount is None else decimal(amount, 2) for amount in amounts]
    return shown


def active_ratio(figures: Figures) -> float | None:
    """Part of the measured time that was active; ``None`` where nothing was measured. 8 GPUs at 90 % are at 90 %."""
    measured = figures.active_seconds + figures.idle_seconds
    return figures.active_seconds / measured if measured else None


def _columns(by: Sequence[Dimension]) -> tuple[tuple[str, _Naming], ...]:
    """Titles of the names, and what they are of a line; what is nobody's says so in the first column of owners."""
    found: list[tuple[str, _Naming]] = []
    of_owners = [dimension for dimension in by if dimension in _OWNERS or dimension.startswith(LABEL)]
    for dimension in by:
        naming = _name_in(dimension, whole="namespace" not in by)
        if of_owners and dimension == of_owners[0]:
            naming = _kind_or(naming)
        elif dimension in of_owners:
            naming = _unless_ours(naming)
        found.append((title(dimension), naming))
    if not of_owners:
        found.append(("Held by", lambda key: _ours(key) or "owners"))
    return tuple(found)


def _name_in(dimension: Dimension, *, whole: bool) -> _Naming:
    if dimension == "workload":
        return lambda key: workload_name(key, whole=whole)
    if dimension == "model":
        return lambda key: clean(key.model.removeprefix("NVIDIA "))
    unknown = f"(no {title(dimension)})" if dimension.startswith(LABEL) else _UNKNOWN.get(dimension, "")
    return lambda key: clean(key.value(dimension)) or unknown


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


def _ours(key: LineKey) -> str:
    return key.kind if is_apart(key) else ""


def _kind_or(naming: _Naming) -> _Naming:
    return lambda key: _ours(key) or naming(key)


def _unless_ours(naming: _Naming) -> _Naming:
    return lambda key: "" if _ours(key) else naming(key)
