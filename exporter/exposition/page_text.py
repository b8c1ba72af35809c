"""Words, numbers and small pictures of the page; everything that comes from outside is escaped here."""

from datetime import UTC, datetime
from html import escape

from exporter.model import Activity, ActivitySource, DeviceState

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
