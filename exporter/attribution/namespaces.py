"""Namespaces of pods that hold GPUs: their labels and annotations, for the teams, cost labels and policies in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exporter.attribution import pod_objects


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What a namespace says; empty where it says nothing or may not be read."""

    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Only those that are read."""


NO_NAMESPACE = Namespace()


def parse(item: Mapping[str, Any], wanted: frozenset[str]) -> Namespace:
    """Read a namespace, whole or metadata only; anything is borne."""
    metadata = item.get("metadata")
    if not isinstance(metadata, dict):
        return NO_NAMESPACE
    return Namespace(labels=pod_objects.labels_of(metadata), annotations=pod_objects.annotations_of(metadata, wanted))
