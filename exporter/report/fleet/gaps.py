"""Says which hours of a period were not recorded."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from exporter.report.fleet.values import DAY_SECONDS, Window

_MOST_GAPS = 3


def missing_hours(windows: Sequence[Window], hours: Sequence[Mapping[str, int]], why: str = "") -> list[str]:
    """Hours without records, cluster by cluster: before the first that has some, and gaps after it.

    Args:
        windows: The chunks of the period, in the order of time.
        hours: Of each of them, by cluster: how many were recorded.
        why: What is said of those that are missing at the beginning.
    """
    found: list[str] = []
    for cluster in sorted({name for counts in hours for name, count in counts.items() if count}):
        where = f"cluster {cluster}: " if cluster else ""
        counted = list(zip(windows, (counts.get(cluster, 0) for counts in hours), strict=True))
        found += [f"{where}{words}" for words in _missing(counted, why)]
    return found


def _missing(counted: Sequence[tuple[Window, int]], why: str) -> Iterator[str]:
    first = next(number for number, (_, count) in enumerate(counted) if count)
    before = sum(window.hours for window, _ in counted[:first])
    if before:
        yield f"nothing was recorded before {day_of(counted[first][0].start_seconds)}, {before} hours{why}"
    gaps = [(window, window.hours - count) for window, count in counted[first:] if count < window.hours]
    if gaps:
        total = sum(missing for _, missing in gaps)
        told = ", ".join(f"{_days(window)} ({missing})" for window, missing in gaps[:_MOST_GAPS])
        more = f" and {len(gaps) - _MOST_GAPS} more days" if len(gaps) > _MOST_GAPS else ""
        # What a server of a short memory lacks of a chunk of many days lies at the beginning of the chunk.
        earliest = counted[0][0]
        because = why if gaps[0][0] == earliest and earliest.seconds > DAY_SECONDS else ""
        yield f"{total} {'hour was' if total == 1 else 'hours were'} not recorded: {told}{more}{because}"


def _days(window: Window) -> str:
    """A day, or the first and the last of a chunk that has several."""
    first, last = day_of(window.start_seconds), day_of(window.end_seconds - 1)
    return first if first == last else f"within {first} to {last}"


def day_of(unix_seconds: float) -> str:
    """``2026-10-01``, in UTC."""
    return f"{datetime.fromtimestamp(unix_seconds, UTC):%Y-%m-%d}"
