"""Builds PromQL over the recorded hourly ledger, the same for every engine."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from exporter.cost.ledger import CHECKPOINT_SECONDS, HOUR_SECONDS, LABEL, Dimension, Filters, Window

KIND, COST_LABELS = "workload_kind", "cost_labels"
CURRENCY, STATE = "currency", "state"
RECORDED = "cluster:gpu_capacity_seconds:delta1h"
"""Has a sample for each hour that was recorded."""
CAPACITY = "capacity"
"""Names the question of ``capacity`` in messages."""
NODE_INFO, NODE_INFO_LABELS = "gpu_node_info", ("instance_type", "capacity_type", "region", "gpu_product")
SIMULATED = "gpu_exporter_simulated"
RAW_LEDGER = "gpu_ledger_seconds_total"
ANYTHING = "gpu_exporter_build_info"

Level = Literal["owner", "workload"]
"""Which series are read: ``workload`` has no node and no mode, and few series; ``owner`` has both."""
LEVELS: tuple[Level, ...] = ("owner", "workload")
_ONLY_OF_OWNERS: frozenset[Dimension] = frozenset({"node", "pool", "mode"})


class Measure(NamedTuple):
    """A quantity of the ledger; its hourly series has an owner's labels and these."""

    name: str
    labels: tuple[str, ...] = ()

    def series(self, level: Level) -> str:
        """The name of its hourly series."""
        return f"{level}:{self.name}:delta1h"


SECONDS = Measure("gpu_seconds", (STATE,))
COST = Measure("gpu_cost", (STATE, CURRENCY))
UNPRICED = Measure("gpu_unpriced_seconds")
ENERGY = Measure("gpu_energy_joules")
MEASURES = (SECONDS, COST, UNPRICED, ENERGY)

_LABELS: Mapping[Dimension, str] = {
    "node": "node",
    "namespace": "workload_namespace",
    "kind": KIND,
    "workload": "workload_name",
    "team": "team",
    "labels": COST_LABELS,
    "model": "model",
    "mode": "mode",
}
_WORKLOAD = ("workload_namespace", KIND, "workload_name", "team", COST_LABELS, "model")
_IDENTITY: Mapping[Level, tuple[str, ...]] = {"owner": ("node", *_WORKLOAD, "mode"), "workload": _WORKLOAD}
_REGEX_SIGNS = re.compile(r"([\\.+*?()|\[\]{}^$])")
_CARRIED = "24h"
"""As far back as the rules look for what they recorded last, from two hours before their value."""


def level_of(asked: Iterable[Dimension]) -> Level:
    """The level with the fewest series that has all of these dimensions."""
    return "owner" if _ONLY_OF_OWNERS & set(asked) else "workload"


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
            wanted.add(_LABELS["labels" if dimension.startswith(LABEL) else dimension])
    return tuple(label for label in (cluster_label, *_IDENTITY["owner"]) if label in wanted)


def asked_at(window: Window) -> int:
    """Unix time at which a window is asked for: all of its hours are recorded, and none of the next."""
    return window.end_seconds + CHECKPOINT_SECONDS


def span(window: Window) -> str:
    """The range that has the samples of a window's hours, evaluated ``asked_at`` it.

    It begins and ends ``CHECKPOINT_SECONDS`` after an hour. No hour is stamped there: it does not matter which ends of
    a range an engine includes.
    """
    return f"{window.seconds}s"


class Scope(NamedTuple):
    """What all questions about lines have in common."""

    cluster_label: str
    level: Level
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
    selector = f"{measure.series(scope.level)}{{{scope.matchers}}}"
    gained = f"sum_over_time({selector}[{window_span}])"
    if twice:
        labels = (scope.cluster_label, *_IDENTITY[scope.level], *measure.labels)
        once = _once(selector, labels, (scope.cluster_label, *apart))
        gained = f"sum_over_time({once}[{window_span}:1h])"
    return f"sum by ({', '.join((*scope.keep, *measure.labels))}) ({gained}) > 0"


def capacity(scope: Scope, window_span: str, *, twice: bool, apart: Iterable[str] = ()) -> str:
    """GPU-seconds that were metered, by cluster, whoever held them; arguments as of ``total``.

    Of several recorders the largest values of the lines are another sum than that of their clusters.
    """
    label = scope.cluster_label
    if twice:
        return total(SECONDS, Scope(label, scope.level, (label,)), window_span, twice=twice, apart=apart)
    return f"sum by ({label}) (sum_over_time({RECORDED}[{window_span}])) > 0"


def recorded_hours(window_span: str) -> str:
    """How many hours were recorded; of each Prometheus that recorded them."""
    return f"count_over_time({RECORDED}[{window_span}])"


def recorded_hours_once(cluster_label: str, window_span: str) -> str:
    """The same by cluster, where several recorded them: hours that at least one has."""
    return f"count_over_time({_once(RECORDED, (cluster_label,))}[{window_span}:1h])"


def _once(selector: str, labels: tuple[str, ...], recorder: tuple[str, ...] = ()) -> str:
    """The largest value of an hour; ``recorder``: the labels of a Prometheus, its cluster's first.

    One that missed an hour has it in its next value, and the others have it in that hour's: so that value counts only
    where no other recorded both hours. Where none did, as those who have this hour all missed the one before, what
    another had in that one is in the value, too: and does not count there. If the value is of more missed hours than
    that one, those before it are counted twice.
    """
    last = _of_hour(selector)
    if len(recorder) > 1:
        place, cluster = ", ".join(recorder), recorder[0]
        before, now, after = (_of_hour(RECORDED, later) for later in (-1, 0, 1))
        both = f"({now} and on ({place}) {before})"
        last = f"{last} and on ({place}) ({both} or {now} unless on ({cluster}) {both})"
        # One that is new has nothing of the hour before: its value counts from when it began.
        known = _of_hour(RECORDED, -1, _CARRIED)
        late = f"{after} and on ({place}) {known} unless on ({cluster}) ({after} and on ({place}) {now})"
        again = f"{_of_hour(selector, 1)} and on ({place}) ({late})"
        last = f"({last}) unless on ({', '.join(labels)}) ({again})"
    return f"max by ({', '.join(labels)}) ({last})"


def _of_hour(selector: str, later: int = 0, lookback: str = "1h") -> str:
    """What was recorded of the hour that ends at a step, which is on the hour; or so many hours later."""
    seconds = -CHECKPOINT_SECONDS - later * HOUR_SECONDS
    return f"last_over_time({selector}[{lookback}] offset {seconds}s)"


def node_info(cluster_label: str, lookback: str) -> str:
    """What prices go by, of each node that was there within the look-back."""
    labels = ", ".join((cluster_label, "node", *NODE_INFO_LABELS))
    return f"max by ({labels}) (last_over_time({NODE_INFO}[{lookback}]))"


def simulated(lookback: str) -> str:
    """More than 0 where an agent showed a simulated node within the look-back."""
    return f"max(last_over_time({SIMULATED}[{lookback}]))"


def matchers(filters: Filters | None, cluster_label: str) -> str:
    """Label matchers of what is asked for; pools and cost labels are no labels here, and are picked out later."""
    if filters is None:
        return ""
    found = []
    for dimension, values in sorted(filters.wanted.items()):
        if dimension != "pool" and not dimension.startswith(LABEL):
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
