"""What prices go by, node by node: read from where the agents tell it, a few moments a day."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from exporter.model import NodeFacts
from exporter.report.fleet.queries import NODE_INFO_LABELS
from exporter.report.fleet.values import HOUR_SECONDS, Window

STEP_SECONDS = 6 * HOUR_SECONDS
Node = tuple[str, str]
"""Cluster and node."""


def moments(first: Window, last: Window) -> tuple[int, int, str]:
    """Start and end of the range query over some days, a step apart, and how far each moment looks back."""
    seconds = last.end_seconds - first.start_seconds
    steps = max(0, -(-seconds // STEP_SECONDS) - 1)
    return last.end_seconds - steps * STEP_SECONDS, last.end_seconds, f"{min(seconds, STEP_SECONDS) * 1000 - 1}ms"


class Facts:
    """Facts by chunk, and the last of the whole window."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self._windows = windows
        self._seen: list[dict[Node, tuple[float, NodeFacts]]] = [{} for _ in windows]

    def add(self, rows: Iterable[Mapping[str, Any]], chunks: Sequence[int], cluster_label: str) -> None:
        """Add the rows of a range query.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The rows are not what an API sends.
        """
        for row in rows:
            label = row["metric"].get
            node = label(cluster_label, ""), label("node", "")
            facts = NodeFacts(**{name: label(name, "") for name in NODE_INFO_LABELS})
            "".join((*node, *(getattr(facts, name) for name in NODE_INFO_LABELS)))
            for moment, _ in row["values"]:
                for chunk in chunks:
                    window = self._windows[chunk]
                    if window.start_seconds < moment <= window.end_seconds:
                        self._see(chunk, node, float(moment), facts)
                        break

    def _see(self, chunk: int, node: Node, moment: float, facts: NodeFacts) -> None:
        before = self._seen[chunk].get(node)
        if before is None or before[0] <= moment:
            self._seen[chunk][node] = (moment, facts)

    def last(self) -> dict[Node, NodeFacts]:
        """Of every node, as last seen within the window."""
        found: dict[Node, NodeFacts] = {}
        for seen in self._seen:
            found.update({node: facts for node, (_, facts) in seen.items()})
        return found

    def pools(self, chunk: int, last: Mapping[Node, NodeFacts]) -> Mapping[Node, str]:
        """The sort of every node: as seen within the chunk, else as last seen."""
        seen = {node: facts for node, (_, facts) in self._seen[chunk].items()}
        return {node: pool_name(facts) for node, facts in (dict(last) | seen).items()}


def pool_name(facts: NodeFacts) -> str:
    """``p5.48xlarge on-demand``, as far as it is known."""
    return f"{facts.instance_type} {facts.capacity_type}".strip()
