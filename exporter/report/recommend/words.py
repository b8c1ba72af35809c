"""The sentences of suggestions: what was measured, over which time, and how a thing is called."""

from collections.abc import Iterator

from exporter.report.fleet.values import HOUR_SECONDS, Window
from exporter.report.recommend.held import Lot
from exporter.report.recommend.prices import Price
from exporter.report.render.words import decimal, minute, percent

GIGABYTE = 1e9
_CENTS_FROM = 0.1


def short(model: str) -> str:
    """``H100`` of ``NVIDIA H100 80GB HBM3``; a name whose first word has no number stays whole."""
    bare = model.removeprefix("NVIDIA ").removeprefix("Tesla ")
    first = bare.replace("-", " ").split(" ", 1)[0]
    return first if any(letter.isdigit() for letter in first) else bare


def devices(lot: Lot, count: int | None = None) -> str:
    """``8 H100``, ``3 instances 1g.10gb of A100``, ``2 parts of T4``."""
    number = len(lot.uses) if count is None else count
    many = "s" if number != 1 else ""
    if lot.profile:
        return f"{number} instance{many} {lot.profile} of {short(lot.model)}"
    return f"{number} {short(lot.model)}" if lot.whole else f"{number} part{many} of {short(lot.model)}"


def each(lot: Lot) -> str:
    """``the H100``, ``each of 8 H100``."""
    return f"the {devices(lot).removeprefix('1 ')}" if len(lot.uses) == 1 else f"each of {devices(lot)}"


def ratio(value: float) -> str:
    """``0.3 %``; a little is never shown as nothing."""
    return "<0.1 %" if 0 < value < 0.001 else percent(value, 1)  # noqa: PLR2004 - what one decimal can show


def whole(value: float) -> str:
    """``20 %``."""
    return percent(value, 0)


def memory(size: float) -> str:
    """``4.2 GB``."""
    return f"{decimal(size / GIGABYTE, 1)} GB"


def activity(lot: Lot) -> str:
    """How busy it was."""
    return (
        f"{devices(lot)}: {ratio(lot.mean_ratio)} active on the mean, {ratio(lot.p95_ratio)} or less in 95 % of the"
        f" hours, {ratio(lot.peak_ratio)} in the busiest hour."
    )


def coverage(lot: Lot, window: Window) -> str:
    """How far that can be trusted."""
    return (
        f"Activity was measured for {ratio(lot.coverage_ratio)} of {decimal(lot.held_hours, 0)} device-hours held from"
        f" {minute(window.start_seconds)} to {minute(window.end_seconds)} UTC ({window.seconds // HOUR_SECONDS} h)."
    )


def memories(lot: Lot) -> Iterator[str]:
    """How much memory it took, where that is known."""
    peak, total = lot.peak_memory_bytes, lot.memory_total_bytes
    if peak is not None and total is not None:
        where = " on any of them" if len(lot.uses) > 1 else ""
        yield f"At most {memory(peak)} of {memory(total)} of memory was in use{where}."


def paid(price: Price | None) -> str:
    """What it has cost."""
    if price is None:
        return "There is no one price for it in the window, so that no money is told."
    return f"{money(price)} was paid for a GPU-hour on the mean of the window."


def money(price: Price) -> str:
    """``4.10 USD``; cents of a cent where it is that little."""
    return f"{decimal(price.per_hour, 2 if price.per_hour >= _CENTS_FROM else 4)} {price.currency}"
