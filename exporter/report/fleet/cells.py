"""Adds up what Prometheus answers, chunk by chunk, and makes lines of it."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from exporter.model import Money
from exporter.report.fleet.queries import CURRENCY, KIND, MEASURES, Measure
from exporter.report.fleet.values import UNALLOCATED, UNATTRIBUTED, Dimension, Figures, LineKey

APART = frozenset({UNALLOCATED, UNATTRIBUTED})
_PLACE = {measure.figure: place for place, measure in enumerate(MEASURES)}
_ACTIVE, _IDLE, _UNKNOWN, _UNPRICED, _ENERGY = range(5)
_FIELD_OF = {"workload_namespace": "namespace", KIND: "kind", "workload_name": "workload"}

Key = tuple[str, ...]
"""Values of the labels that were kept, in their order."""


class _Cell:
    """Figures of one key in one chunk, while they come in."""

    __slots__ = ("money", "plain")

    def __init__(self) -> None:
        self.plain = [0.0] * 5
        self.money: dict[str, list[float]] = {}

    def add(self, other: "_Cell") -> None:
        self.plain = [mine + theirs for mine, theirs in zip(self.plain, other.plain, strict=True)]
        for currency, (total, idle) in other.money.items():
            mine = self.money.setdefault(currency, [0.0, 0.0])
            mine[0] += total
            mine[1] += idle

    def figures(self) -> Figures:
        plain = self.plain
        return Figures(
            active_seconds=plain[_ACTIVE],
            idle_seconds=plain[_IDLE],
            unknown_seconds=plain[_UNKNOWN],
            unpriced_seconds=plain[_UNPRICED],
            energy_joules=plain[_ENERGY] or None,
            # The two are rounded apart where they are added up; idle is a part.
            money={
                currency: Money(total=total, idle=min(idle, total)) for currency, (total, idle) in self.money.items()
            },
        )


class Cells:
    """Figures by chunk and key.

    Args:
        keep: Labels of the keys, as they were asked for.
        count: How many chunks there are.
    """

    def __init__(self, keep: Sequence[str], count: int) -> None:
        self._keep = tuple(keep)
        self._chunks: list[dict[Key, _Cell]] = [{} for _ in range(count)]

    def add(self, measure: Measure, rows: Iterable[Mapping[str, Any]], chunk_at: Mapping[int, int]) -> None:
        """Add the rows of an answer.

        Args:
            measure: What was asked for.
            rows: As the client gives them, of an instant or a range query.
            chunk_at: Which chunk ends at a moment, by Unix seconds.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The rows are not what an API sends.
        """
        place, keep, chunks = _PLACE[measure.figure], self._keep, self._chunks
        for row in rows:
            label = row["metric"].get
            key = tuple([label(name, "") for name in keep])
            currency = label(CURRENCY, "")
            "".join((*key, currency))  # a label that is no text would be met when lines are sorted
            for moment, text in row["values"] if "values" in row else (row["value"],):
                value = float(text)
                if not 0 < value < math.inf:
                    continue
                cells = chunks[chunk_at[int(moment)]]
                cell = cells.get(key)
                if cell is None:
                    cell = cells[key] = _Cell()
                if measure.has_currency:
                    cell.money.setdefault(currency, [0.0, 0.0])[place - _PLACE["total"]] += value
                else:
                    cell.plain[place] += value

    def forget(self, chunk: int) -> None:
        """Drop a chunk of which something is missing."""
        self._chunks[chunk].clear()

    def forget_energy(self, chunk: int) -> None:
        """Drop the energy of a chunk of which some is missing."""
        for cell in self._chunks[chunk].values():
            cell.plain[_ENERGY] = 0.0

    def lines(self, chunk: int, key_of: Callable[[Key], LineKey | None]) -> dict[LineKey, Figures]:
        """Lines of a chunk, once; keys that come to the same line are added up, those that come to none left out."""
        merged: dict[LineKey, _Cell] = {}
        for key, cell in self._chunks[chunk].items():
            line = key_of(key)
            if line is None:
                continue
            there = merged.get(line)
            if there is None:
                merged[line] = cell
            else:
                there.add(cell)
        self._chunks[chunk] = {}
        return {line: cell.figures() for line, cell in merged.items()}


def line_keys(
    keep: Sequence[str],
    dimensions: frozenset[Dimension],
    cluster_label: str,
    pool_of: Callable[[str, str], str] | None = None,
    pools: frozenset[str] | None = None,
) -> Callable[[Key], LineKey | None]:
    """How a key becomes a line at the dimensions that were asked for.

    Args:
        keep: Labels of the keys.
        dimensions: That were asked for; ``workload`` has namespace and kind with it.
        cluster_label: Tells clusters apart.
        pool_of: The sort of a node, by cluster and node; where sorts of nodes are asked for.
        pools: Those that are asked for; ``None`` is all. A key of another comes to no line.
    """
    fields = [("cluster" if label == cluster_label else _FIELD_OF.get(label, label)) for label in keep]
    wanted = set(dimensions) | ({"namespace", "kind"} if "workload" in dimensions else set())
    known: dict[Key, LineKey | None] = {}

    def line(key: Key) -> LineKey | None:
        if key not in known:
            known[key] = _line(dict(zip(fields, key, strict=True)))
        return known[key]

    def _line(parts: dict[str, str]) -> LineKey | None:
        pool = pool_of(parts["cluster"], parts["node"]) if pool_of else ""
        if pools is not None and pool not in pools:
            return None
        shown = {part: value for part, value in parts.items() if part in wanted}
        if parts["kind"] in APART:
            shown["kind"] = parts["kind"]
        return LineKey(**shown, pool=pool if "pool" in wanted else "")

    return line
