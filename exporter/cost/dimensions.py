"""Defines the dimensions of a ledger: names of a line, cost labels, and filters."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from exporter.errors import expected

Dimension: TypeAlias = str
"""Name of a dimension: a field of ``LineKey``, or ``label:KEY``. ``workload`` needs namespace and kind."""
LABEL = "label:"
"""Prefix of the dimension of a cost label, as in ``label:project``."""
OTHER = "__other__"
"""Value of cost labels beyond the number of combinations that an agent keeps."""
MOST_LABELS = 8
"""Maximum number of labels in one question; an agent accepts no more."""
_LABEL_KEY = re.compile(r"([a-z0-9][a-z0-9.-]{0,252}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
UNALLOCATED, UNATTRIBUTED = "Unallocated", "Unattributed"
"""Kinds of time without a known owner: see ``exporter.model.attribution``."""
APART = (UNATTRIBUTED, UNALLOCATED)
"""Kinds of lines without an owner, in the order of reports."""


class LineKey(NamedTuple):
    """The names of a line; a name is empty if it is unknown or was summed over."""

    cluster: str = ""
    node: str = ""
    pool: str = ""
    """``p5.48xlarge on-demand``: instance type and capacity type of the node, as far as they are known."""
    namespace: str = ""
    kind: str = ""
    """Kind of the workload, or ``Unallocated``, ``Unattributed``; sums keep these two separate."""
    workload: str = ""
    team: str = ""
    labels: str = ""
    """Cost labels in the format of the agents: ``environment=dev,project=llm``, sorted by key."""
    model: str = ""
    mode: str = ""
    """Sharing mode: ``exclusive``, ``mig``, ``shared``."""

    @property
    def is_apart(self) -> bool:
        """Whether the line has no owner; a workload with the kind Unallocated has a namespace, and is an owner."""
        return self.kind in APART and not self.namespace

    @property
    def label_values(self) -> Mapping[str, str]:
        """Values of the cost labels by key."""
        return pairs(self.labels)

    def value(self, dimension: Dimension) -> str:
        """Return the value of a dimension; empty if it is unknown."""
        if dimension.startswith(LABEL):
            return self.label_values.get(dimension.removeprefix(LABEL), "")
        return str(getattr(self, dimension))

    def at(self, dimensions: Collection[Dimension]) -> "LineKey":
        """Return the key of the sum over all other dimensions; of the labels, the key keeps those in ``dimensions``."""
        key = LineKey._make(picking(self._fields, frozenset(dimensions))((*self, "")))
        if self.labels and "labels" not in dimensions:
            named = [f"{name}={value}" for name, value in self.label_values.items() if LABEL + name in dimensions]
            key = key._replace(labels=",".join(named))
        return key

    def group(self, dimensions: Collection[Dimension]) -> "LineKey":
        """Return the key of the line's group; a line without an owner keeps its kind."""
        return self.at({*dimensions, "kind"} if self.is_apart else dimensions)


@lru_cache(maxsize=256)
def picking(names: Sequence[str], kept: Collection[str]) -> Callable[[Sequence[str]], tuple[str, ...]]:
    """Return a function that returns the fields of a ``LineKey`` from values followed by an empty text.

    Args:
        names: Fields of the values, in their order.
        kept: Fields to keep; all others become empty.
    """
    return itemgetter(*[names.index(field) if field in kept and field in names else -1 for field in LineKey._fields])


DIMENSIONS: tuple[Dimension, ...] = tuple(name for name in LineKey._fields if name != "labels")
"""Dimensions that users may name, in addition to ``label:KEY``."""


@lru_cache(maxsize=4096)
def pairs(labels: str) -> Mapping[str, str]:
    """Return the values of ``LineKey.labels`` by key; labels of Kubernetes contain no ``=`` or ``,``."""
    return {key: value for key, _, value in (pair.partition("=") for pair in labels.split(",")) if key}


def with_parts(dimensions: Iterable[Dimension]) -> frozenset[Dimension]:
    """Return the dimensions; ``workload`` adds ``namespace`` and ``kind``, which identify it."""
    wanted = frozenset(dimensions)
    return wanted | {"namespace", "kind"} if "workload" in wanted else wanted


def dimensions_of(by: Iterable[Dimension]) -> frozenset[Dimension]:
    """Return the ledger dimensions of a report: those of ``with_parts``, with all cost labels instead of some.

    With all labels, a report can list them if the requested one does not exist.
    """
    wanted = with_parts(by)
    labels = {dimension for dimension in wanted if dimension.startswith(LABEL)}
    return wanted - labels | {"labels"} if labels else wanted


def label_keys(dimensions: Iterable[Dimension]) -> list[str]:
    """Return the keys of the labels among the dimensions."""
    return [dimension.removeprefix(LABEL) for dimension in dimensions if dimension.startswith(LABEL)]


def too_many_labels(where: str, dimensions: Iterable[Dimension]) -> list[str]:
    """Return a problem if there are more labels than an agent accepts."""
    count = len(label_keys(dimensions))
    return [f"{where}: names {count} labels; allowed: at most {MOST_LABELS}"] if count > MOST_LABELS else []


def label_problem(dimension: Dimension) -> str:
    """Return the problem of ``label:KEY``; empty for a valid key of a Kubernetes label."""
    if _LABEL_KEY.fullmatch(dimension.removeprefix(LABEL)):
        return ""
    return "names no label; allowed: label:KEY, a key of the agents' --cost-labels, as label:project"


_POOL_NAMES = frozenset({"node pool", "node-pool", "node_pool", "nodepool"})


def dimension_of(text: str) -> tuple[Dimension, str]:
    """Return the dimension that a user names, and the problem of the name; empty if there is no problem."""
    name = text.strip()
    if name.startswith(LABEL):
        return name, label_problem(name)
    name = "pool" if name.lower() in _POOL_NAMES else name.lower()
    if name in DIMENSIONS:
        return name, ""
    hint = "; a fleet has owners by workload, or workload,model,mode" if name == "owner" else ""
    return name, f"is not a dimension{expected(name, DIMENSIONS, ', '.join((*DIMENSIONS, 'label:KEY')))}{hint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Accepted values by dimension; a line must have one of them in each dimension."""

    wanted: Mapping[Dimension, frozenset[str]] = field(default_factory=dict)

    def __hash__(self) -> int:
        """Return a hash that does not depend on the order of the filters."""
        return hash(frozenset(self.wanted.items()))

    def keep(self, key: LineKey) -> bool:
        """Return whether a line has one of the values of each dimension."""
        return not self.wanted or all(key.value(dimension) in values for dimension, values in self.wanted.items())

    def only(self, dimensions: Collection[Dimension]) -> "Filters":
        """Return the filters on the given dimensions."""
        return Filters(wanted={name: values for name, values in self.wanted.items() if name in dimensions})

    @property
    def is_part(self) -> bool:
        """Whether the filters exclude metered time, so that the lines cannot sum to capacity."""
        return bool(set(self.wanted) - {"cluster"})

    @property
    def of_owners(self) -> bool:
        """Whether a filter is on a property of owners, which a line without an owner never has."""
        return any(name in {"namespace", "workload", "team"} or name.startswith(LABEL) for name in self.wanted)

    @property
    def words(self) -> str:
        """The filters as ``namespace a or b, team core``."""
        words = []
        for dimension, values in sorted(self.wanted.items()):
            name = dimension.removeprefix(LABEL)
            words.append(f"{name} {' or '.join(value or f'(no {name})' for value in sorted(values))}")
        return ", ".join(words)

    @property
    def by_label(self) -> "Filters":
        """The filters by label, which a source applies to its answers."""
        return Filters(wanted={name: values for name, values in self.wanted.items() if name.startswith(LABEL)})


EVERYTHING = Filters()
"""Keeps every line."""
