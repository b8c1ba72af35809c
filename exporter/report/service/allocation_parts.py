"""What rows of OpenCost's allocation are told apart by and filtered by, in its words, over lines of the ledger."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from exporter.errors import ConfigError
from exporter.report.fleet.values import LABEL, Dimension, LineKey, label_problem
from exporter.report.fleet.windows import Now
from exporter.report.service.parameters import shown

NOBODY, IDLE, UNATTRIBUTED_NAME = "__unallocated__", "__idle__", "__unattributed__"
"""OpenCost's names: an owner that lacks what is asked for; what nobody held. The third is ours."""
_TERM = re.compile(
    r"\s*(?P<name>[A-Za-z]+)(?:\[(?P<label>[^\]]*)\])?\s*:\s*"
    r'(?P<values>"[^"]*"(?:\s*,\s*"[^"]*")*|[^\s+"|]+)\s*'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One of what rows are told apart by: its dimensions, and a line's name in it."""

    dimensions: tuple[Dimension, ...]
    name: Callable[[LineKey], str]


def kind_of(key: LineKey) -> str:
    """As OpenCost spells kinds: in small letters."""
    return key.kind.lower()


def _controller(key: LineKey) -> str:
    return f"{kind_of(key)}:{key.workload}" if key.workload else ""


def _of_kind(kind: str) -> Callable[[LineKey], str]:
    return lambda key: key.workload if kind_of(key) == kind else ""


_TEAM = Part(dimensions=("team",), name=lambda key: key.team)
_CONTROLLERS = ("deployment", "statefulset", "daemonset", "job")
PARTS: Mapping[str, Part] = {
    "cluster": Part(dimensions=("cluster",), name=lambda key: key.cluster),
    "node": Part(dimensions=("node",), name=lambda key: key.node),
    "namespace": Part(dimensions=("namespace",), name=lambda key: key.namespace),
    "controllerKind": Part(dimensions=("kind",), name=kind_of),
    "controller": Part(dimensions=("workload",), name=_controller),
    "team": _TEAM,
    "label:team": _TEAM,
    **{kind: Part(dimensions=("workload",), name=_of_kind(kind)) for kind in _CONTROLLERS},
}
_LACKING = frozenset({"pod", "container", "service", "department", "environment", "owner", "product"})
_ANNOTATION = "annotation:"
_NONE = Part(dimensions=(), name=lambda _: "")


def is_lacking(name: str) -> bool:
    """Return whether OpenCost can aggregate by this property and the ledger does not record it."""
    return name in _LACKING or name.startswith(_ANNOTATION)


def part_of(name: str) -> Part:
    """Return the part of a property; one that the ledger does not record is empty on every line."""
    if name.startswith(LABEL) and name not in PARTS:
        return Part(dimensions=(name,), name=lambda key: key.value(name))
    return PARTS.get(name, _NONE)


_FIELDS: Mapping[str, str] = {
    "cluster": "cluster",
    "node": "node",
    "namespace": "namespace",
    "controllerKind": "controllerKind",
    "controllerName": "controllerName",
    "controller": "controllerName",
    "team": "team",
}
FILTER_DIMENSIONS: Mapping[str, tuple[Dimension, ...]] = {
    "cluster": ("cluster",),
    "node": ("node",),
    "namespace": ("namespace",),
    "controllerKind": ("kind",),
    "controllerName": ("workload",),
    "team": ("team",),
}
_VALUE_OF: Mapping[str, Callable[[LineKey], str]] = {
    "cluster": lambda key: key.cluster,
    "node": lambda key: key.node,
    "namespace": lambda key: key.namespace,
    "controllerKind": kind_of,
    "controllerName": lambda key: key.workload,
    "team": lambda key: key.team,
}


def dimensions_of_field(name: str) -> tuple[Dimension, ...]:
    """Return what a ledger must be told apart by for a filter by a field or a label."""
    return FILTER_DIMENSIONS.get(name, (name,))


def value_of(name: str, key: LineKey) -> str:
    """Return a line's value of a field or label that can be filtered by; kinds in small letters."""
    return _VALUE_OF[name](key) if name in _VALUE_OF else key.value(name)


def keeps(wanted: Mapping[str, frozenset[str]], key: LineKey) -> bool:
    """Whether a line is asked for; kinds in small letters."""
    return all(value_of(name, key) in values for name, values in wanted.items())


def conditions(text: str, _now: Now) -> dict[str, frozenset[str]]:
    """``namespace:"a","b"+controllerKind:"job"``: what must hold, all of it; kinds in small letters.

    Raises:
        ConfigError: It is not understood, and from where on.
    """
    found: dict[str, frozenset[str]] = {}
    at = 0
    while at < len(text):
        match = _TERM.match(text, at)
        name = _FIELDS.get(match["name"]) if match else None
        if match and match["name"] == "label" and match["label"]:
            label = LABEL + match["label"]
            name = "team" if label == "label:team" else None if label_problem(label) else label
        elif match and match["label"] is not None:
            name = None
        if match is None or name is None:
            raise ConfigError(
                f"filter: '{shown(text)}' is not understood from '{shown(text[at:])}'; allowed: terms such as"
                f' namespace:"a","b" of {", ".join(FILTER_DIMENSIONS)}, label[KEY], joined by +'
            )
        values = [value.strip().strip('"') for value in match["values"].split(",")]
        wanted = frozenset(value.lower() if name == "controllerKind" else value for value in values)
        found[name] = found[name] & wanted if name in found else wanted
        at = match.end()
        if at < len(text) and text[at] in "+ ":
            at += 1
    return found
