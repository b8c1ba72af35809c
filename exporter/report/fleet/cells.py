"""Adds up what Prometheus answers, chunk by chunk, and makes lines of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from exporter.model import Money
from exporter.report.fleet.queries import COST, COST_LABELS, CURRENCY, ENERGY, KIND, STATE, UNPRICED, Measure
from exporter.report.fleet.values import MOST_FIGURE, UNALLOCATED, UNATTRIBUTED, Dimension, Figures, Filters, LineKey

APART = frozenset({UNALLOCATED, UNATTRIBUTED})
_ACTIVE, _IDLE, _UNKNOWN, _UNPRICED, _ENERGY = range(5)
_PLAIN = {UNPRICED: _UNPRICED, ENERGY: _ENERGY}
CELL_BYTES = 1000
"""What a cell takes, with its key and one currency."""
_FIELD_OF = {"workload_namespace": "namespace", KIND: "kind", "workload_name": "workload", COST_LABELS: "labels"}
_ALL = Filters()

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
        for currency, theirs in other.money.items():
            mine = self.money.setdefault(currency, [0.0] * 3)
            mine[:] = [one + more for one, more in zip(mine, theirs, strict=True)]

    def figures(self) -> Figures:
        plain = self.plain
        return Figures(
            active_seconds=plain[_ACTIVE],
            idle_seconds=plain[_IDLE],
            unknown_seconds=plain[_UNKNOWN],
            unpriced_seconds=plain[_UNPRICED],
            energy_joules=plain[_ENERGY] or None,
            money={
                currency: Money(active=amounts[_ACTIVE], idle=amounts[_IDLE], unknown=amounts[_UNKNOWN])
                for currency, amounts in self.money.items()
            },
        )


class Cells:
    """Figures by chunk and key.

    Args:
        keep: Labels of the keys, as they were asked for.
        count: How many chunks there are.
        grow: Called before a cell is made, with the bytes that it takes; raises where there is no room for it.
    """

    def __init__(self, keep: Sequence[str], count: int, grow: Callable[[int], None] = lambda _: None) -> None:
        self._keep = tuple(keep)
        self._grow = grow
        self.beyond: set[Measure] = set()
        """Those of which a value was left out, as no fleet can have it."""
        self._chunks: list[dict[Key, _Cell]] = [{} for _ in range(count)]

    def add(self, measure: Measure, rows: Iterable[Mapping[str, Any]], chunk_at: Mapping[int, int]) -> None:
        """Add the rows of an answer.

        Args:
            measure: What was asked for.
            rows: As the client gives them, of an instant or a range query.
            chunk_at: Which chunk is asked for at a moment, by Unix seconds.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The rows are not what an API sends.
        """
        keep, chunks = self._keep, self._chunks
        for row in rows:
            label = row["metric"].get
            key = tuple([label(name, "") for name in keep])
            currency = label(CURRENCY, "")
            place = _PLAIN.get(measure, _place_of(label(STATE, "")))
            "".join((*key, currency))  # a label that is no text would be met when lines are sorted
            for moment, text in row["values"] if "values" in row else (row["value"],):
                value = float(text)
                if value > MOST_FIGURE:
                    self.beyond.add(measure)
                if not 0 < value <= MOST_FIGURE:
                    continue
                cells = chunks[chunk_at[int(moment)]]
                cell = cells.get(key)
                if cell is None:
                    self._grow(CELL_BYTES)
                    cell = cells[key] = _Cell()
                if measure == COST:
                    cell.money.setdefault(currency, [0.0] * 3)[place] += value
                else:
                    cell.plain[place] += value

    def values(self, label: str) -> set[str]:
        """Every value of a label that was kept, before lines are made; none of one that was not."""
        if label not in self._keep:
            return set()
        at = self._keep.index(label)
        return {key[at] for cells in self._chunks for key in cells}

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


def _place_of(state: str) -> int:
    """What the time of a state is shown as; of one that is not known here it is not known whether it was active."""
    return _IDLE if state == "idle" else _ACTIVE if state.startswith("active") else _UNKNOWN


def line_keys(
    keep: Sequence[str],
    dimensions: frozenset[Dimension],
    cluster_label: str,
    pool_of: Callable[[str, str], str] | None = None,
    wanted: Filters = _ALL,
) -> Callable[[Key], LineKey | None]:
    """How a key becomes a line at the dimensions that were asked for.

    Args:
        keep: Labels of the keys.
        dimensions: That were asked for; ``workload`` has namespace and kind with it.
        cluster_label: Tells clusters apart.
        pool_of: The sort of a node, by cluster and node; where sorts of nodes are asked for.
        wanted: Filters that no matcher of the question stands for. A key of something else comes to no line.
    """
    fields = [("cluster" if label == cluster_label else _FIELD_OF.get(label, label)) for label in keep]
    shown = dimensions | ({"namespace", "kind"} if "workload" in dimensions else set())
    known: dict[Key, LineKey | None] = {}

    def line(key: Key) -> LineKey | None:
        if key not in known:
            known[key] = _line(LineKey(**dict(zip(fields, key, strict=True))))
        return known[key]

    def _line(whole: LineKey) -> LineKey | None:
        if pool_of:
            whole = whole._replace(pool=pool_of(whole.cluster, whole.node))
        if not wanted.keep(whole):
            return None
        return whole.at(shown | {"kind"} if whole.kind in APART else shown)

    return line
