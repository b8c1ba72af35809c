"""What Prometheus is asked: PromQL over the recorded hourly ledger, the same for every engine."""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from exporter.report.fleet.values import Dimension, Filters, Window

KIND = "workload_kind"
CURRENCY = "currency"
ALLOCATED = "owner:gpu_allocated_seconds:delta1h"
RECORDED = "cluster:gpu_capacity_seconds:delta1h"
"""Has a sample for each hour that was recorded."""
NODE_INFO, NODE_INFO_LABELS = "gpu_node_info", ("instance_type", "capacity_type", "region", "gpu_product")
SIMULATED = "gpu_exporter_simulated"
RAW_LEDGER = "gpu_ledger_allocated_seconds_total"
ANYTHING = "gpu_exporter_build_info"


class Measure(NamedTuple):
    """A figure and the series that it is read from."""

    figure: str
    series: str
    has_currency: bool = False


MEASURES = (
    Measure("active", "owner:gpu_active_seconds:delta1h"),
    Measure("idle", "owner:gpu_idle_seconds:delta1h"),
    Measure("unknown", "owner:gpu_unknown_seconds:delta1h"),
    Measure("unpriced", "owner:gpu_unpriced_seconds:delta1h"),
    Measure("energy", "owner:gpu_energy_joules:delta1h"),
    Measure("total", "owner:gpu_cost:delta1h", has_currency=True),
    Measure("idle_cost", "owner:gpu_idle_cost:delta1h", has_currency=True),
)
"""In the order of ``reading``'s cells."""

_LABELS: Mapping[Dimension, str] = {
    "node": "node",
    "namespace": "workload_namespace",
    "kind": KIND,
    "workload": "workload_name",
    "team": "team",
    "model": "model",
    "mode": "mode",
}
_IDENTITY = ("node", "workload_namespace", KIND, "workload_name", "team", "model", "mode")
_REGEX_SIGNS = re.compile(r"([\\.+*?()|\[\]{}^$])")
_HOUR = "3599999ms"
_CARRIED = "23h"
"""As far back as the rules look for what they recorded last, from two hours before their value."""


def labels_of(dimensions: Iterable[Dimension], cluster_label: str) -> tuple[str, ...]:
    """Labels that the lines must keep for these dimensions, the kind always; in a settled order.

    A node's sort is not in the ledger: ``pool`` asks for node and cluster, and so does ``node``'s home for ``node``.
    """
    wanted = {KIND}
    for dimension in dimensions:
        if dimension == "cluster":
            wanted.add(cluster_label)
        elif dimension == "pool":
            wanted |= {"node", cluster_label}
        elif dimension == "workload":
            wanted |= {"workload_namespace", "workload_name"}
        else:
            wanted.add(_LABELS[dimension])
    return tuple(label for label in (cluster_label, *_IDENTITY) if label in wanted)


LATE_SECONDS = 0.001
"""After its end a window is asked for. VictoriaMetrics finds no series whose first sample is at the very moment, where
that is midnight; and that is when its vmalert stamps the last hour of a day."""


def span(window: Window) -> str:
    """The range that has the samples of (start, end], evaluated ``LATE_SECONDS`` after the end.

    The same for ranges that are closed at both ends, and for those that are open to the left. Samples are stamped in
    whole milliseconds; what is stamped one or two of them after an hour would be taken for the hour before.
    """
    return f"{window.seconds * 1000 - 1}ms"


class Scope(NamedTuple):
    """What all questions about lines have in common."""

    cluster_label: str
    keep: tuple[str, ...]
    """Labels of the lines, as ``labels_of`` makes them."""
    matchers: str = ""
    """As ``matchers`` makes them."""


def total(measure: Measure, scope: Scope, window_span: str, *, twice: bool, apart: Iterable[str] = ()) -> str:
    """What a series gained over the span, by the labels to keep.

    Args:
        measure: Which.
        scope: Of which lines.
        window_span: As ``span`` makes it.
        twice: Several Prometheis recorded the same: of each hour the largest counts.
        apart: Labels that tell those Prometheis apart, where they are known.
    """
    currency = (CURRENCY,) if measure.has_currency else ()
    selector = f"{measure.series}{{{scope.matchers}}}"
    gained = f"sum_over_time({selector}[{window_span}])"
    if twice:
        once = _once(selector, (scope.cluster_label, *_IDENTITY, *currency), (scope.cluster_label, *apart))
        gained = f"sum_over_time({once}[{window_span}:1h])"
    return f"sum by ({', '.join((*scope.keep, *currency))}) ({gained}) > 0"


def capacity(cluster_label: str, window_span: str, *, twice: bool, apart: Iterable[str] = ()) -> str:
    """GPU-seconds that were metered, by cluster, whoever held them; arguments as of ``total``."""
    scope = Scope(cluster_label, (cluster_label,))
    return total(Measure("capacity", ALLOCATED), scope, window_span, twice=twice, apart=apart)


def recorded_hours(window_span: str) -> str:
    """How many hours were recorded; of each Prometheus that recorded them."""
    return f"count_over_time({RECORDED}[{window_span}])"


def recorded_hours_once(cluster_label: str, window_span: str) -> str:
    """The same by cluster, where several recorded them: hours that at least one has."""
    return f"count_over_time({_once(RECORDED, (cluster_label,))}[{window_span}:1h])"


def _once(selector: str, labels: tuple[str, ...], recorder: tuple[str, ...] = ()) -> str:
    """The largest of an hour; ``recorder``: the labels of a Prometheus, its cluster's first.

    One that missed an hour has it in its next value, and the others have it in that hour's: so that value counts only
    where no other recorded both hours. Where none did, as those who have this hour all missed the one before, what
    another had in that one is in the value, too: and does not count there. If the value is of more missed hours than
    that one, those before it are counted twice.
    """
    last = f"last_over_time({selector}[{_HOUR}])"
    if len(recorder) > 1:
        place, cluster = ", ".join(recorder), recorder[0]
        before, now, after = (
            f"last_over_time({RECORDED}[{_HOUR}]{moved})" for moved in (" offset 1h", "", " offset -1h")
        )
        both = f"({now} and on ({place}) {before})"
        last = f"{last} and on ({place}) ({both} or {now} unless on ({cluster}) {both})"
        # One that is new has nothing of the hour before: its value counts from when it began.
        known = f"last_over_time({RECORDED}[{_CARRIED}] offset 1h)"
        late = f"{after} and on ({place}) {known} unless on ({cluster}) ({after} and on ({place}) {now})"
        again = f"last_over_time({selector}[{_HOUR}] offset -1h) and on ({place}) ({late})"
        last = f"({last}) unless on ({', '.join(labels)}) ({again})"
    return f"max by ({', '.join(labels)}) ({last})"


def node_info(cluster_label: str, lookback: str) -> str:
    """What prices go by, of each node that was there within the look-back."""
    labels = ", ".join((cluster_label, "node", *NODE_INFO_LABELS))
    return f"max by ({labels}) (last_over_time({NODE_INFO}[{lookback}]))"


def simulated(lookback: str) -> str:
    """More than 0 where an agent showed a simulated node within the look-back."""
    return f"max(last_over_time({SIMULATED}[{lookback}]))"


def matchers(filters: Filters | None, cluster_label: str) -> str:
    """Label matchers of what is asked for; a pool is no label, and is picked out later."""
    if filters is None:
        return ""
    found = []
    for dimension, values in sorted(filters.wanted.items()):
        if dimension != "pool":
            found.append(matches(cluster_label if dimension == "cluster" else _LABELS[dimension], values))
    return ", ".join(found)


def matches(label: str, values: Iterable[str]) -> str:
    """A matcher for a label that must have one of the values, whatever characters they have.

    One of no values never matches.
    """
    wanted = sorted(set(values))
    if len(wanted) == 1:
        return f"{label}={_quoted(wanted[0])}"
    if not wanted:
        return f'{label}=~".^"'
    # Escaped here and not by re.escape, which escapes more than the engines' regular expressions allow.
    pattern = "|".join(_REGEX_SIGNS.sub(r"\\\1", value) for value in wanted)
    return f"{label}=~{_quoted(pattern)}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    # What is no text at all, such as a byte from the command line, matches nothing; it must not break the question.
    return '"' + escaped.encode("utf-8", "replace").decode("utf-8") + '"'
