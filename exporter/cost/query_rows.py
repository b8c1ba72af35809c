"""Sums the answers of Prometheus, chunk by chunk, into lines of a ledger."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import groupby
from typing import Any, Protocol

from exporter.cost import prometheus_access
from exporter.cost.ledger import (
    DAY_SECONDS,
    HOUR_SECONDS,
    MOST_FIGURE,
    UNALLOCATED,
    UNATTRIBUTED,
    Dimension,
    Failure,
    Figures,
    Filters,
    FleetLedger,
    LineKey,
    Window,
    picking,
)
from exporter.cost.prometheus import PrometheusAnswer, PrometheusClient
from exporter.cost.queries import (
    COST,
    COST_LABELS,
    CURRENCY,
    ENERGY,
    KIND,
    NODE_INFO_LABELS,
    STATE,
    UNPRICED,
    Measure,
    asked_at,
)
from exporter.errors import PrometheusError
from exporter.model import STATES, ByState, NodeFacts

APART = frozenset({UNALLOCATED, UNATTRIBUTED})
_UNPRICED, _ENERGY = len(STATES), len(STATES) + 1
_PLAIN = {UNPRICED: _UNPRICED, ENERGY: _ENERGY}
CELL_BYTES = 1000
"""What a cell takes, with its key and one currency."""
_FIELD_OF = {"workload_namespace": "namespace", KIND: "kind", "workload_name": "workload", COST_LABELS: "labels"}
_ALL = Filters()

Key = tuple[str, ...]
"""Values of the labels that were kept, in their order."""


class _Cell:
    """Figures of one key in one chunk, while they come in: by state, then by ``_PLAIN``; money by state."""

    __slots__ = ("money", "plain")

    def __init__(self) -> None:
        self.plain = [0.0] * (len(STATES) + len(_PLAIN))
        self.money: dict[str, list[float]] = {}

    def add(self, other: "_Cell") -> None:
        self.plain = [mine + theirs for mine, theirs in zip(self.plain, other.plain, strict=True)]
        for currency, theirs in other.money.items():
            mine = self.money.setdefault(currency, [0.0] * len(STATES))
            mine[:] = [one + more for one, more in zip(mine, theirs, strict=True)]

    def figures(self) -> Figures:
        plain = self.plain
        return Figures(
            seconds=_by_state(plain[: len(STATES)]),
            unpriced_seconds=plain[_UNPRICED],
            energy_joules=plain[_ENERGY] or None,
            money={currency: _by_state(amounts) for currency, amounts in self.money.items()},
        )


def _by_state(values: Sequence[float]) -> ByState:
    effective, ineffective, unprofiled, idle, unknown = values
    return ByState(effective=effective, ineffective=ineffective, unprofiled=unprofiled, idle=idle, unknown=unknown)


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
        is_money, plain = measure == COST, _PLAIN.get(measure)
        for row in rows:
            label = row["metric"].get
            key = tuple([label(name, "") for name in keep])
            currency = label(CURRENCY, "") if is_money else ""
            place = _place_of(label(STATE, "")) if plain is None else plain
            "".join((*key, currency))  # a label that is no text would be met when lines are sorted
            for moment, text in row["values"] if "values" in row else (row["value"],):
                value = float(text)
                if not 0 < value <= MOST_FIGURE:
                    if value > MOST_FIGURE:
                        self.beyond.add(measure)
                    continue
                cells = chunks[chunk_at[int(moment)]]
                cell = cells.get(key)
                if cell is None:
                    self._grow(CELL_BYTES)
                    cell = cells[key] = _Cell()
                if is_money:
                    cell.money.setdefault(currency, [0.0] * len(STATES))[place] += value
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
        # In the order of keys: sums are the same to the last digit, whichever answer came first.
        for key, cell in sorted(self._chunks[chunk].items(), key=lambda pair: pair[0]):
            line = key_of(key)
            if line in merged:
                merged[line].add(cell)
            elif line is not None:
                merged[line] = cell
        self._chunks[chunk] = {}
        return {line: cell.figures() for line, cell in merged.items()}


@lru_cache(maxsize=64)
def _place_of(state: str) -> int:
    """What the time of a state is shown as; of one that is not known here it is not known whether it was active."""
    known = state if state in STATES else "active_unprofiled" if state.startswith("active") else "unknown"
    return STATES.index(known)


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
    fields = tuple(("cluster" if label == cluster_label else _FIELD_OF.get(label, label)) for label in keep)
    pick = picking(fields, fields)
    shown = dimensions | ({"namespace", "kind"} if "workload" in dimensions else set())
    shown_apart = shown | {"kind"}

    @cache
    def line(key: Key) -> LineKey | None:
        whole = LineKey._make(pick((*key, "")))
        if pool_of:
            whole = whole._replace(pool=pool_of(whole.cluster, whole.node))
        if not wanted.keep(whole):
            return None
        return whole.at(shown_apart if whole.kind in APART else shown)

    return line


STEP_SECONDS = 6 * HOUR_SECONDS
Node = tuple[str, str]
"""Cluster and node."""


def moments(first: Window, last: Window) -> tuple[int, int, str]:
    """Start and end of the range query over some days, a step apart, and how far each moment looks back."""
    seconds = last.end_seconds - first.start_seconds
    steps = max(0, -(-seconds // STEP_SECONDS) - 1)
    return last.end_seconds - steps * STEP_SECONDS, last.end_seconds, f"{min(seconds, STEP_SECONDS) * 1000 - 1}ms"


class WindowFacts:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a long reading is."""

    done: int
    total: int
    """Questions, retries not counted."""


class LedgerSource(Protocol):
    """Reads the ledger over a window."""

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> FleetLedger:
        """The ledger, a chunk per UTC day, summed over every dimension that is not asked for.

        ``kind`` stays apart for Unallocated and Unattributed even where it is not asked for. Filters hold for the
        lines, not for capacity. What cannot be read after retries is in ``failures``; it is never left out silently.

        Raises:
            PrometheusError: Nothing can be read at all: wrong address, no access, no such server.
            StoreError: The store is damaged or not to be opened.
        """
        ...


BLOCK_DAYS = 15
"""Days in one question. A month of 8,000 GPUs by workload and day cost Prometheus 2.42 a third more at 7 than at 15."""
_LOST_HOPE_AFTER, _OF_SERIES = 4, 3
"""Failures without an answer in between, and of how many series: one or two may be all that is wrong."""
_IN_THREAD_ROWS = 5000
"""With more rows the loop would stand still for too long."""
_DIVISIBLE = frozenset({"timeout", "too_many_samples", "too_large", "server_error", "broken", "garbage", "partial"})
_TOO_MUCH = frozenset({"timeout", "too_many_samples", "too_large"})
"""A shorter question may be answered, and a longer one of the others will not."""

Block = tuple[int, ...]
"""Chunks, by number, that one question is for: whole days in a row, or a part of a day alone."""
Rows = Iterable[Mapping[str, Any]]
Take = Callable[[Rows], None]


def blocks(windows: Sequence[Window]) -> tuple[Block, ...]:
    """Which chunks are asked for together."""
    found: list[Block] = []
    days: list[int] = []
    for number, window in enumerate(windows):
        whole = window.seconds == DAY_SECONDS
        if days and (not whole or len(days) == BLOCK_DAYS):
            found.append(tuple(days))
            days = []
        if whole:
            days.append(number)
        else:
            found.append((number,))
    if days:
        found.append(tuple(days))
    return tuple(found)


class Asking:
    """The questions of one reading, and what became of them.

    Args:
        client: Where.
        windows: The chunks.
        progress: Is told of every question that is done with.
        total: How many questions there will be.
    """

    def __init__(
        self,
        client: PrometheusClient,
        windows: Sequence[Window],
        progress: Callable[[Progress], None] | None,
        total: int,
    ) -> None:
        self.windows = windows
        self.notes: dict[str, None] = {}
        self._client = client
        self._progress = progress
        self._done, self._total = 0, total
        # Here and not only in the client: who waits for a turn hears of what the others met.
        self._slots = asyncio.Semaphore(client.settings.concurrency)
        self._taking = asyncio.Lock()  # what takes rows may do so in a thread, and is not made for two
        self._is_slow = False
        self._in_a_row: list[str] = []
        self._hopeless: PrometheusError | None = None
        self._failures: list[Failure] = []
        self.last_error: PrometheusError | None = None

    async def ask(self, block: Block, what: str, query: Callable[[int], str], take: Take) -> bool:
        """Put a question over a block; chunk by chunk where it differs, or cannot be answered in one.

        Args:
            block: Over which chunks.
            what: The series, for messages.
            query: PromQL by chunk.
            take: Takes the rows; raises KeyError, TypeError, ValueError or AttributeError where they are none.

        Returns:
            Whether all of it was answered; what was not is in ``failures``.
        """
        async with self._slots:
            runs = [tuple(run) for _, run in groupby(block, key=query)]
            answered = all([await self._divided(run, what, query, take) for run in runs])
        self._step()
        return answered

    def expect_more(self) -> None:
        """Count on one more question."""
        self._total += 1

    async def ask_moments(self, block: Block, what: str, query: str, moments: tuple[int, int, int], take: Take) -> None:
        """Ask a range query that stands for all of the block.

        Args:
            block: Over which chunks.
            what: The series, for messages.
            query: PromQL.
            moments: Start, end and step in seconds.
            take: As for ``ask``; rows have ``values``.
        """
        async with self._slots:
            try:
                await self._taken(self._client.ask_range(query, *moments), take)
            except PrometheusError as error:
                self._fail(block, what, error)
        self._step()

    def _step(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(Progress(done=self._done, total=self._total))

    async def _divided(self, block: Block, what: str, query: Callable[[int], str], take: Take) -> bool:
        try:
            if len(block) == 1 or not self._is_slow:
                await self._once(block, query, take)
                return True
        except PrometheusError as error:
            if len(block) == 1 or error.reason not in _DIVISIBLE or self._hopeless is not None:
                self._fail(block, what, error)
                return False
            self._is_slow |= error.reason in _TOO_MUCH
        # One after the other: the server has just been asked too much.
        return all([await self._divided((chunk,), what, query, take) for chunk in block])

    async def _once(self, block: Block, query: Callable[[int], str], take: Take) -> None:
        first, last = self.windows[block[0]], self.windows[block[-1]]
        if len(block) == 1:
            question = self._client.ask_instant(query(block[-1]), asked_at(last))
        else:
            question = self._client.ask_range(
                query(block[0]),
                asked_at(first),
                asked_at(last),
                DAY_SECONDS,
                retry_timeouts=False,
            )
        await self._taken(question, take)

    async def _taken(self, question: Coroutine[Any, Any, PrometheusAnswer], take: Take) -> None:
        if self._hopeless is not None:
            question.close()
            raise self._hopeless
        answer = await question
        self.notes.update(dict.fromkeys(f"{self._client.settings.url} warns: {note}" for note in answer.notes))
        async with self._taking:
            with prometheus_access.rows_read(self._client.settings):
                if len(answer.data) > _IN_THREAD_ROWS:
                    await asyncio.to_thread(take, answer.data)
                else:
                    take(answer.data)
        self._in_a_row.clear()

    def _fail(self, block: Block, what: str, error: PrometheusError) -> None:
        self.last_error = error
        self._in_a_row.append(what)
        if len(self._in_a_row) >= _LOST_HOPE_AFTER and len(set(self._in_a_row)) >= _OF_SERIES and error.retriable:
            # It is down rather than flaky: waiting out all retries of all other questions would tell no more.
            self._hopeless = error
        self._failures += [
            Failure(
                window=self.windows[chunk], what=what, reason=str(error), may_pass=prometheus_access.may_pass(error)
            )
            for chunk in block
        ]

    def failures(self) -> tuple[Failure, ...]:
        """What stayed unanswered; questions of a series, and days in a row, that failed alike are one."""
        merged: list[Failure] = []
        for failure in sorted(set(self._failures), key=lambda one: (one.what, one.reason, one.window.start_seconds)):
            last = merged[-1] if merged else None
            same = last is not None and (last.what, last.reason) == (failure.what, failure.reason)
            if last is not None and same and last.window.end_seconds == failure.window.start_seconds:
                window = Window(start_seconds=last.window.start_seconds, end_seconds=failure.window.end_seconds)
                merged[-1] = replace(failure, window=window)
            else:
                merged.append(failure)
        return tuple(merged)

    def failed_chunks(self, *series: str) -> set[int]:
        """Chunks for which one of the series is missing."""
        missing = {failure.window for failure in self._failures if failure.what in series}
        return {number for number, window in enumerate(self.windows) if window in missing}
