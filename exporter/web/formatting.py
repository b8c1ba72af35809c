"""Words, numbers and small pictures of the page; everything that comes from outside is escaped here."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from html import escape

from exporter.model import Activity, ActivitySource, AllocationState, DeviceState, DeviceView, PodUse, Price, Snapshot

UNKNOWN = (
    '<span class="dim" title="not measured"><span aria-hidden="true">—</span><span class="vh">unknown</span></span>'
)

_GIB = 1024**3
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_IN_SECONDS_BELOW, _IN_MINUTES_BELOW, _IN_HOURS_BELOW = 2 * _MINUTE, 2 * _HOUR, 2 * _DAY

STATE_WORDS = {
    DeviceState.UP: "up",
    DeviceState.LOST: "lost: fell off the bus",
    DeviceState.RESET_REQUIRED: "needs a reset",
    DeviceState.FAILED: "no answer",
    DeviceState.MISSING: "missing",
    DeviceState.UNKNOWN: "unknown",
}
SOURCE_WORDS = {
    ActivitySource.ENGINE: ("engine", "mean share of time in which the compute engine was active"),
    ActivitySource.UTILISATION: ("utilisation", "share of time in which a kernel was resident"),
    ActivitySource.CODEC: ("codec", "a video, JPEG or optical-flow engine was the busiest"),
    ActivitySource.PROCESS_SAMPLES: ("processes", "divided between the holders by per-process samples"),
    ActivitySource.ESTIMATED: ("estimated", "divided between the holders by share; processes do not tell"),
}
UNKNOWN_WORDS = {
    "no_source": "nothing on this device measures it",
    "contradiction": "two readings contradict each other",
    "incomplete": "an engine that may be in use is not measured",
    "device_down": "the device is down",
    "stale": "no fresh reading",
    "job_id_unknown": "a Slurm job whose id its cgroup does not have: set CgroupJobIdPaths=yes in cgroup.conf",
}


def text(value: object) -> str:
    """Any value as safe text, also inside a quoted attribute."""
    return escape(str(value), quote=True)


def words(reason: str) -> str:
    """A snake-case reason as safe words."""
    return text(UNKNOWN_WORDS.get(reason, reason.replace("_", " ")))


def duration(seconds: float) -> str:
    """``95 s``, ``42 min``, ``3 h 12 min``, ``5 d 4 h``."""
    whole = max(0, int(seconds))
    if whole < _IN_SECONDS_BELOW:
        return f"{whole} s"
    if whole < _IN_MINUTES_BELOW:
        return f"{whole // _MINUTE} min"
    if whole < _IN_HOURS_BELOW:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR} h"


def brief(seconds: float) -> str:
    """``duration`` without its smaller unit, for narrow places."""
    return " ".join(duration(seconds).split()[:2])


def moment(unix_seconds: float) -> str:
    """``2026-11-21 01:39:22 UTC`` as a ``time`` element."""
    at = datetime.fromtimestamp(unix_seconds, tz=UTC)
    return f'<time datetime="{at:%Y-%m-%dT%H:%M:%SZ}">{at:%Y-%m-%d %H:%M:%S} UTC</time>'


def percent(ratio: float) -> str:
    """A ratio as a whole per cent; a little is never shown as nothing."""
    return "&lt;1 %" if 0 < ratio < 0.005 else f"{ratio * 100:.0f} %"  # noqa: PLR2004 - half a per cent, where rounding makes 0


def gib(size_bytes: float) -> str:
    """GiB without the unit: ``0.4``, ``71``."""
    value = size_bytes / _GIB
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"  # noqa: PLR2004 - two digits are enough, one is not


def memory(used_bytes: float | None, total_bytes: float | None) -> str:
    """``12 / 80 GiB``, as far as it is known."""
    if used_bytes is None:
        return UNKNOWN
    total = f'<span class="dim"> / {gib(total_bytes)}</span>' if total_bytes else ""
    return f'{gib(used_bytes)}{total} <span class="dim">GiB</span>'


def model(name: str) -> str:
    """The model without the vendor, which is always the same."""
    return text(name.removeprefix("NVIDIA "))


def chip(css: str, inner: str) -> str:
    """A small coloured word; the word says it all, the colour only repeats it. ``inner`` must be safe."""
    return f'<span class="chip {css}">{inner}</span>'


def bar(ratio: float | None) -> str:
    """A bar for eyes only: the number stands beside it. SVG, because the page allows no inline style."""
    filled = "" if ratio is None else f'<rect class="busy" width="{min(max(ratio, 0), 1) * 100:.1f}" height="8"/>'
    return f'<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">{filled}</svg>'


def activity(value: Activity | None, unknown_reason: str) -> str:
    """Bar, number and where the number comes from; or why there is none."""
    if value is None:
        why = f' <span class="meta">{words(unknown_reason)}</span>' if unknown_reason else ""
        return f'<span class="dim">unknown</span>{why}'
    word, meaning = SOURCE_WORDS[value.source]
    if value.measured_by == "dcgm":
        word, meaning = f"{word}, DCGM", f"{meaning}; measured by DCGM"
    return (
        f'<div class="actrow">{bar(value.ratio)}<span class="val">{percent(value.ratio)}</span>'
        f'<span class="meta" title="{text(meaning)}">{word}</span></div>'
    )


NO_PRICE = '<span class="dim" title="the price of this GPU is not known: see Prices">no price</span>'

_NO_ROW = "no row of the price book matches; --price-book takes yours"
_AWAITS_LABELS = (
    "it may depend on the node's labels, which are not read yet; if this stays, see /readyz, "
    "or set --instance-type, --capacity-type and --region"
)
_SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥"}
_LEAST = 0.005
_WHOLE_FROM = 1000
_A_LITTLE_SHARE = 1e-9

Rates = Mapping[str, float]
"""Money per hour by currency; currencies are never added up."""


def is_shown(snapshot: Snapshot) -> bool:
    """Whether the agent knows of prices at all; without, the page has no word on money."""
    return bool(snapshot.prices or snapshot.price_book or snapshot.unpriced_gpus)


def amount(value: float, currency: str) -> str:
    """``$1.25``, ``CHF 1.25``; a little is never shown as nothing. Safe."""
    symbol = _SYMBOLS.get(currency) or f"{text(currency)} "
    if 0 < value < _LEAST:
        return f"&lt;{symbol}0.01"
    return f"{symbol}{value:,.0f}" if value >= _WHOLE_FROM else f"{symbol}{value:,.2f}"


def amounts(values: Rates) -> str:
    """Amounts in every currency, side by side. Safe."""
    return " + ".join(amount(value, currency) for currency, value in sorted(values.items()))


def rates(snapshot: Snapshot, uses: Iterable[tuple[DeviceView, PodUse]]) -> Rates:
    """What holders cost per hour: their share at the price of now. A GPU without a price adds nothing."""
    return _sum((snapshot.prices.get(view.gpu.uuid), use.holder.share_ratio) for view, use in uses)


def unheld_rates(snapshot: Snapshot) -> Rates:
    """What the parts of GPUs cost per hour that nobody holds."""
    return _sum((snapshot.prices.get(uuid), share) for uuid, share in unheld(snapshot).items())


def unheld(snapshot: Snapshot) -> Mapping[str, float]:
    """The part of each GPU, by UUID, that nobody holds; a GPU of which not all holders are known is left out."""
    held: dict[str, float] = {}
    for view in snapshot.devices:
        share = sum(use.holder.share_ratio for use in view.pods)
        held[view.gpu.uuid] = held.get(view.gpu.uuid, 0.0) + share
    for view in snapshot.devices:
        if view.allocation is AllocationState.UNKNOWN or _may_hide_a_holder(view):
            held.pop(view.gpu.uuid, None)
    return {uuid: 1 - share for uuid, share in held.items() if 1 - share > _A_LITTLE_SHARE}


def _may_hide_a_holder(view: DeviceView) -> bool:
    """Whether somebody unknown may hold the rest of what is held in part, or an instance that is not described."""
    held = sum(use.holder.share_ratio for use in view.pods)
    in_part = bool(view.pods) and held < view.share_ratio - _A_LITTLE_SHARE
    return not view.rest_is_free and (in_part or view.lacks_instances)


def _sum(parts: Iterable[tuple[Price | None, float]]) -> Rates:
    totals: dict[str, float] = {}
    for price, share in parts:
        if price is not None:
            totals[price.currency] = totals.get(price.currency, 0.0) + price.per_hour * share
    return totals


def unpriced(snapshot: Snapshot, uses: Iterable[tuple[DeviceView, PodUse]]) -> int:
    """GPUs that are held and have no price."""
    return len({view.gpu.uuid for view, _ in uses if view.gpu.uuid not in snapshot.prices})


def part_rate(snapshot: Snapshot, view: DeviceView, share_ratio: float) -> str:
    """``$0.62`` per hour for a part of the device's GPU, or that there is no price. Safe."""
    price = snapshot.prices.get(view.gpu.uuid)
    return NO_PRICE if price is None else amount(price.per_hour * share_ratio, price.currency)


def prices(snapshot: Snapshot) -> str:
    """Which prices the page reckons with, told once."""
    if not is_shown(snapshot):
        return ""
    gpus = [view.gpu for view in snapshot.devices if view.instance is None]
    counted: dict[tuple[str, Price | None], list[int]] = {}
    for gpu in gpus:
        counted.setdefault((gpu.model, snapshot.prices.get(gpu.uuid)), []).append(gpu.index)
    missing = _AWAITS_LABELS if snapshot.prices_await_labels else _NO_ROW
    lines = [f"<li>{_told(name, price, indices, missing)}</li>" for (name, price), indices in counted.items()]
    book = f"<small>{text(snapshot.price_book)}</small>" if snapshot.price_book else ""
    how = (
        '<li class="meta">A holder costs its share of the GPU at this price. What it has cost so far is in the '
        '<a id="to-ledger" href="/api/v1/ledger">ledger</a>: <span class="mono">gpu-cost-exporter report</span> shows '
        "it.</li>"
    )
    return (
        f'<section class="panel" aria-labelledby="prices"><h2 id="prices">Prices {book}</h2>'
        f'<ul class="notes">{"".join(lines)}{how}</ul></section>'
    )


def _told(name: str, price: Price | None, indices: list[int], missing: str) -> str:
    if price is None:
        which = ", ".join(f"GPU {index}" for index in indices)
        return f"<b>No price</b> for {which}, {model(name)}: {missing}"
    energy = f" and {amount(price.per_kwh, price.currency)} per measured kWh" if price.per_kwh else ""
    listed = "; a bundled list price, what you pay may differ" if price.fallback else ""
    return (
        f"{len(indices)} x {model(name)}: <b>{amount(price.per_hour, price.currency)}</b> an hour{energy} "
        f'<span class="meta">{text(price.source)}, as of {text(price.as_of)}{listed}</span>'
    )
