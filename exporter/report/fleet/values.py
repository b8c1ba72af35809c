"""The ledger of a fleet over a window: who held GPUs, for how long and for how much, and what could not be read."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from exporter.model import Money, NodeFacts

HOUR_SECONDS, DAY_SECONDS = 3600, 86_400
CHECKPOINT_SECONDS = 1200
"""An hour is recorded 5 to 20 minutes after its end: at this time no hour is recorded, and the last one has been."""
MOST_FIGURE = 1e15
"""Seconds, joules or money: more than any fleet has. Sums of any number of such figures stay finite."""

Dimension: TypeAlias = str
"""What lines can be told apart by: a field of ``LineKey``, or ``label:KEY``. ``workload`` needs namespace and kind."""
LABEL = "label:"
"""Begins the dimension of one cost label: ``label:project``."""
OTHER = "__other__"
"""Value of cost labels beyond the number of combinations that an agent keeps."""
MOST_LABELS = 8
"""Labels in one question; an agent takes no more."""
_LABEL_KEY = re.compile(r"([a-z0-9][a-z0-9.-]{0,252}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
UNALLOCATED, UNATTRIBUTED = "Unallocated", "Unattributed"
"""Kinds of what no known owner held: see ``exporter.model.ledger``."""


def last_recorded(now_seconds: float) -> int:
    """Unix time at which the last hour ended that is recorded by now."""
    return int((now_seconds - CHECKPOINT_SECONDS) // HOUR_SECONDS) * HOUR_SECONDS


class LineKey(NamedTuple):
    """Whose a line is. A part that was summed away, and one that is not known, is empty."""

    cluster: str = ""
    node: str = ""
    pool: str = ""
    """``p5.48xlarge on-demand``: instance type and capacity type of the node, as far as they are known."""
    namespace: str = ""
    kind: str = ""
    """Of the workload, or ``Unallocated``, ``Unattributed``; these two are never summed away."""
    workload: str = ""
    team: str = ""
    labels: str = ""
    """Cost labels as the agents write them: ``environment=dev,project=llm``, sorted by key."""
    model: str = ""
    mode: str = ""
    """``exclusive``, ``mig``, ``shared``."""

    def value(self, dimension: Dimension) -> str:
        """The value of a dimension; empty where it is not known."""
        if dimension.startswith(LABEL):
            return pairs(self.labels).get(dimension.removeprefix(LABEL), "")
        return str(getattr(self, dimension))

    def at(self, dimensions: Collection[Dimension]) -> "LineKey":
        """The key of the line that is summed over every other dimension; of labels those that are named."""
        key = LineKey(*[value if name in dimensions else "" for name, value in zip(self._fields, self, strict=True)])
        if self.labels and "labels" not in dimensions:
            named = [f"{name}={value}" for name, value in pairs(self.labels).items() if LABEL + name in dimensions]
            key = key._replace(labels=",".join(named))
        return key


DIMENSIONS: tuple[Dimension, ...] = tuple(name for name in LineKey._fields if name != "labels")
"""What users may name, besides ``label:KEY``."""


@lru_cache(maxsize=4096)
def pairs(labels: str) -> Mapping[str, str]:
    """Values by key of ``LineKey.labels``; no label of Kubernetes has ``=`` or ``,`` in it."""
    return {key: value for key, _, value in (pair.partition("=") for pair in labels.split(",")) if key}


def label_keys(dimensions: Iterable[Dimension]) -> list[str]:
    """Keys of the labels among the dimensions."""
    return [dimension.removeprefix(LABEL) for dimension in dimensions if dimension.startswith(LABEL)]


def too_many_labels(where: str, dimensions: Iterable[Dimension]) -> list[str]:
    """A problem where more labels are named than an agent takes."""
    count = len(label_keys(dimensions))
    return [f"{where}: names {count} labels; allowed: at most {MOST_LABELS}"] if count > MOST_LABELS else []


def label_problem(dimension: Dimension) -> str:
    """What is wrong with ``label:KEY``; empty where it names a label that Kubernetes can have."""
    if _LABEL_KEY.fullmatch(dimension.removeprefix(LABEL)):
        return ""
    return "names no label; allowed: label:KEY, a key of the agents' --cost-labels, as label:project"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What stands on a line. Seconds are share-weighted GPU-seconds."""

    active_seconds: float = 0.0
    idle_seconds: float = 0.0
    unknown_seconds: float = 0.0
    unpriced_seconds: float = 0.0
    """Allocated seconds that had no price and are in no money."""
    energy_joules: float | None = None
    """``None`` where none was measured."""
    money: Mapping[str, Money] = field(default_factory=dict)
    """By ISO 4217 currency; a currency in which nothing was priced is absent."""

    @property
    def allocated_seconds(self) -> float:
        """Active, idle and unknown, always."""
        return self.active_seconds + self.idle_seconds + self.unknown_seconds

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing on the line: no seconds, joules or money.

        A line may have joules and money without seconds: those of a process of no pod on a GPU that a pod holds.
        """
        return not (self.allocated_seconds or self.energy_joules or any(money.total for money in self.money.values()))

    def money_in(self, currency: str) -> Money:
        """The money of one currency; none at all where nothing was priced in it."""
        return self.money.get(currency, Money())


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A period, its ends on whole hours UTC; the end is outside of it."""

    start_seconds: int
    end_seconds: int
    label: str = ""
    """As the user wrote it: ``30d``, ``2026-10``."""

    @property
    def seconds(self) -> int:
        """How long it is."""
        return self.end_seconds - self.start_seconds

    @property
    def hours(self) -> int:
        """How many hours it has."""
        return self.seconds // HOUR_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What is known of one UTC day, or of the part of it that lies in the window."""

    window: Window
    lines: Mapping[LineKey, Figures] = field(default_factory=dict)
    capacity_seconds: Mapping[str, float] = field(default_factory=dict)
    """By cluster: GPU-seconds that were metered, whoever held them; what the lines must sum to."""
    recorded_hours: Mapping[str, int] = field(default_factory=dict)
    """By cluster: hours of the chunk for which the hourly ledger was recorded."""
    closed: bool = False
    """Read from the store of closed days, rather than from Prometheus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A question that stayed unanswered after all retries; what it asked for is not in the ledger."""

    window: Window
    what: str
    """The series that was asked for."""
    reason: str
    """In words, with the mend."""
    may_pass: bool = True
    """Whether it may be answered within the hour; not where it asks too much, or for a day that is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetLedger:
    """The ledger over a window, chunk by chunk in the order of time, at the dimensions that were asked for."""

    window: Window
    dimensions: frozenset[Dimension]
    chunks: tuple[Chunk, ...]
    nodes: Mapping[tuple[str, str], NodeFacts] = field(default_factory=dict)
    """What prices go by, by (cluster, node), as last seen within the window."""
    failures: tuple[Failure, ...] = ()
    """Empty, or the ledger is not whole."""
    label_keys: frozenset[str] = frozenset()
    """Keys of cost labels that occur; only where it was read by labels."""
    engine: str = ""
    """Where it was read: ``Prometheus 3.5.0``, ``VictoriaMetrics 1.112``, ``store of closed days``, or several."""
    simulated: bool = False
    """Some of it is of simulated nodes."""
    notes: tuple[str, ...] = ()
    """One line each: what a reader must know, such as warnings of the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What is asked for: for each dimension that is named the values of which a line must have one."""

    wanted: Mapping[Dimension, frozenset[str]] = field(default_factory=dict)

    def keep(self, key: LineKey) -> bool:
        """Whether a line is asked for."""
        return all(key.value(dimension) in values for dimension, values in self.wanted.items())

    @property
    def by_label(self) -> "Filters":
        """Those of labels, which a source picks out of what it has read."""
        return Filters(wanted={name: values for name, values in self.wanted.items() if name.startswith(LABEL)})
