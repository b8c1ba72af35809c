"""Builds PromQL over the recorded hourly ledger, the same for every engine."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from exporter.cost.dimensions import LABEL, Dimension, Filters
from exporter.cost.window import CHECKPOINT_SECONDS, Window

KIND, COST_LABELS = "workload_kind", "cost_labels"
CURRENCY, STATE = "currency", "state"
RECORDED = "cluster:gpu_capacity_seconds:delta1h"
"""Series with one sample per recorded hour."""
CAPACITY = "capacity"
"""Name of the ``capacity`` query in messages."""
NODE_INFO, NODE_INFO_LABELS = "gpu_node_info", ("instance_type", "capacity_type", "region", "gpu_product")
SIMULATED = "gpu_exporter_simulated"
RAW_LEDGER = "gpu_ledger_seconds_total"
ANYTHING = "gpu_exporter_build_info"

Level = Literal["owner", "workload"]
"""Series to read: ``workload`` has fewer series, without node and mode; ``owner`` has both labels."""
LEVELS: tuple[Level, ...] = ("owner", "workload")
_ONLY_OF_OWNERS: frozenset[Dimension] = frozenset({"node", "pool", "mode"})


class Measure(NamedTuple):
    """A quantity of the ledger, and the labels of its hourly series in addition to an owner's."""

    quantity: str
    labels: tuple[str, ...] = ()

    def series(self, level: Level, *more: str) -> str:
        """Return the selector of its hourly series with more matchers; messages use it as the name of the series."""
        return level + ":gpu_ledger:delta1h{" + ", ".join((f'quantity="{self.quantity}"', *more)) + "}"


SECONDS = Measure("seconds", (STATE,))
COST = Measure("cost", (STATE, CURRENCY))
UNPRICED = Measure("unpriced_seconds")
ENERGY = Measure("energy_joules")
MEASURES = (SECONDS, COST, UNPRICED, ENERGY)
HALVES = (f'{STATE}="idle"', f'{STATE}!="idle"')
"""Matchers that split a query by state in two, so that an answer is parsed while the engine runs the next query."""

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
FIELD_OF = {label: name for name, label in _LABELS.items()}
"""Field of ``LineKey`` by label; the user configures the label of clusters."""
_WORKLOAD = ("workload_namespace", KIND, "workload_name", "team", COST_LABELS, "model")
_IDENTITY: Mapping[Level, tuple[str, ...]] = {"owner": ("node", *_WORKLOAD, "mode"), "workload": _WORKLOAD}
_REGEX_SIGNS = re.compile(r"([\\.+*?()|\[\]{}^$])")


def level_of(asked: Iterable[Dimension]) -> Level:
    """Return the level with the fewest series that has all of these dimensions."""
    return "owner" if _ONLY_OF_OWNERS & set(asked) else "workload"


def labels_of(dimensions: Iterable[Dimension], cluster_label: str) -> tuple[str, ...]:
    """Return the labels that lines keep for these dimensions, in a fixed order; the kind is always kept.

    The ledger has no label for the pool: ``pool`` keeps node and cluster, from which the facts of nodes give it.
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
    """Return the Unix time at which to query a window: all its hours are recorded, and none of the next."""
    return window.end_seconds + CHECKPOINT_SECONDS


class Part(NamedTuple):
    """Hours of a window, and the matchers of the series to read for them.

    The range begins and ends ``CHECKPOINT_SECONDS`` after an hour. No sample has that time, so that it does not matter
    whether an engine includes the ends of a range.
    """

    seconds: int
    back_seconds: int = 0
    """Time from the last of the hours to the end of the window."""
    matchers: str = ""
    """Label matchers of a recorder and its clusters; empty with a single recorder."""

    def gained(self, series: str, more: str = "") -> str:
        """Return PromQL for the sum of the series over these hours, evaluated at ``asked_at`` of the window."""
        inside = ", ".join(text for text in (more, self.matchers) if text)
        offset = f" offset {self.back_seconds}s" if self.back_seconds else ""
        return f"sum_over_time({series}{{{inside}}}[{self.seconds}s]{offset})"


class Scope(NamedTuple):
    """Common settings of all queries about lines."""

    cluster_label: str
    level: Level
    keep: tuple[str, ...]
    """Labels of the lines, as returned by ``labels_of``."""
    matchers: str = ""
    """Label matchers, as returned by ``matchers``."""


def total(measure: Measure, half: str, scope: Scope, parts: Sequence[Part]) -> str:
    """Return a query of the gain of a series, or of one of its ``HALVES``, over parts of a window, by kept labels."""
    wanted = ", ".join(filter(None, (f'quantity="{measure.quantity}"', half, scope.matchers)))
    gained = _gained(f"{scope.level}:gpu_ledger:delta1h", parts, wanted)
    return f"sum by ({', '.join((*scope.keep, *measure.labels))}) ({gained}) > 0"


def capacity(cluster_label: str, parts: Sequence[Part]) -> str:
    """Return a query of the metered GPU-seconds by cluster."""
    return f"sum by ({cluster_label}) ({_gained(RECORDED, parts)}) > 0"


def _gained(series: str, parts: Sequence[Part], more: str = "") -> str:
    """Return PromQL for the gain over the parts; the label ``part`` distinguishes the parts of one recorder."""
    if len(parts) == 1:
        return parts[0].gained(series, more)
    numbered = (f'label_replace({part.gained(series, more)}, "part", "{n}", "", "")' for n, part in enumerate(parts))
    return " or ".join(numbered)


def recorded_hours(window: Window) -> str:
    """Return a query of the number of hours that each Prometheus recorded."""
    return f"count_over_time({RECORDED}[{window.seconds}s])"


def recorded_hour() -> str:
    """Return a query of the value that each Prometheus recorded for the hour before ``asked_at``."""
    return f"last_over_time({RECORDED}[1h])"


def node_info(cluster_label: str, lookback: str) -> str:
    """Return a query of each node's facts that select a price, last seen within the look-back."""
    labels = ", ".join((cluster_label, "node", *NODE_INFO_LABELS))
    return f"max by ({labels}) (last_over_time({NODE_INFO}[{lookback}]))"


def simulated(lookback: str) -> str:
    """Return a query with a value above 0 if an agent exported a simulated node within the look-back."""
    return f"max(last_over_time({SIMULATED}[{lookback}]))"


def matchers(filters: Filters, cluster_label: str) -> str:
    """Return label matchers of the filters, without pools and cost labels, which are filtered later."""
    found = []
    for dimension, values in sorted(filters.wanted.items()):
        if dimension != "pool" and not dimension.startswith(LABEL):
            found.append(matches(cluster_label if dimension == "cluster" else _LABELS[dimension], values))
    return ", ".join(found)


def matches(label: str, values: Iterable[str]) -> str:
    """Return a matcher for a label with one of the values, which may contain any characters.

    Without values, the matcher never matches.
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
    # Invalid Unicode, such as a byte from the command line, matches nothing and must not make the query invalid.
    return '"' + escaped.encode("utf-8", "replace").decode("utf-8") + '"'
