"""Reads the ledger of a fleet from Prometheus: recorded hourly series, summed by the server."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from exporter.cost import prometheus, queries
from exporter.cost.ledger import (
    CHECKPOINT_SECONDS,
    DAY_SECONDS,
    MOST_FIGURE,
    Chunk,
    Dimension,
    Filters,
    FleetLedger,
    LineKey,
    Window,
    chunks,
    pairs,
    stretches,
)
from exporter.cost.prometheus import PrometheusClient, QueryEngine
from exporter.cost.queries import ENERGY, MEASURES, Measure, Scope
from exporter.cost.query_rows import (
    STEP_SECONDS,
    Asking,
    Block,
    Cells,
    Key,
    Progress,
    Rows,
    WindowFacts,
    blocks,
    line_keys,
    moments,
)
from exporter.cost.recorders import Recorded
from exporter.errors import PrometheusError
from exporter.model.formatting import day

_MOST_GAPS = 3


def missing_hours(windows: Sequence[Window], hours: Sequence[Mapping[str, int]], why: str = "") -> list[str]:
    """Hours without records, cluster by cluster: before the first that has some, and gaps after it.

    Args:
        windows: The chunks of the period, in the order of time.
        hours: Of each of them, by cluster: how many were recorded.
        why: What is said of those that are missing at the beginning.
    """
    found: list[str] = []
    clusters = sorted({name for counts in hours for name, count in counts.items() if count})
    for cluster in clusters:
        where = f"cluster {cluster}: " if cluster else "nodes without a cluster: " if len(clusters) > 1 else ""
        counted = list(zip(windows, (counts.get(cluster, 0) for counts in hours), strict=True))
        found += [f"{where}{words}" for words in _missing(counted, why)]
    return found


def _missing(counted: Sequence[tuple[Window, int]], why: str) -> Iterator[str]:
    first = next(number for number, (_, count) in enumerate(counted) if count)
    before = sum(window.hours for window, _ in counted[:first])
    if before:
        yield f"nothing was recorded before {day(counted[first][0].start_seconds)}, {before} hours{why}"
    gaps = [(window, window.hours - count) for window, count in counted[first:] if count < window.hours]
    if gaps:
        total = sum(missing for _, missing in gaps)
        told = ", ".join(f"{_days(window)} ({missing})" for window, missing in gaps[:_MOST_GAPS])
        more = f" and {len(gaps) - _MOST_GAPS} more days" if len(gaps) > _MOST_GAPS else ""
        # What a server of a short memory lacks of a chunk of many days lies at the beginning of the chunk.
        earliest = counted[0][0]
        because = why if gaps[0][0] == earliest and earliest.seconds > DAY_SECONDS else ""
        yield f"{total} {'hour was' if total == 1 else 'hours were'} not recorded: {told}{more}{because}"


def _days(window: Window) -> str:
    """A day, or the first and the last of a chunk that has several."""
    first, last = day(window.start_seconds), day(window.end_seconds - 1)
    return first if first == last else f"within {first} to {last}"


RULES = (
    "load rules/prometheus-rules.yaml into Prometheus (or vmalert, or the ruler); the ledger is recorded from then on"
)
_LOOK_BACK_DAYS = 400


async def coverage_notes(
    client: PrometheusClient, windows: Sequence[Window], recorded: Recorded, engine: QueryEngine
) -> list[str]:
    """One line for each thing that a reader must know.

    Args:
        client: Asked only where nothing was recorded.
        windows: The chunks.
        recorded: What is known of their hours.
        engine: What answers.
    """
    if not recorded.clusters:
        try:
            return [await _why_nothing(client, windows)]
        except PrometheusError as error:
            return [f"No hour of the period was recorded, and why could not be asked: {error}"]
    why = ""
    if engine.retention_seconds is not None and engine.retention_seconds < _length(windows):
        days = engine.retention_seconds / DAY_SECONDS
        why = f": the server keeps {days:g} days; keep closed days with `serve --store`, or raise its retention"
    return missing_hours(windows, [recorded.hours(number) for number in range(len(windows))], why)


async def _why_nothing(client: PrometheusClient, windows: Sequence[Window]) -> str:
    """Nothing was recorded: the period is another, the rules are not loaded, or this is not the right server."""
    url = client.settings.url
    end = queries.asked_at(windows[-1])
    first, last = day(windows[0].start_seconds), day(windows[-1].end_seconds - 1)
    period = f"from {first} to {last}" if first != last else f"on {first}"
    days = await client.range(
        f"count(last_over_time({queries.RECORDED}[1d]))", end - _LOOK_BACK_DAYS * DAY_SECONDS, end, DAY_SECONDS
    )
    now = await client.instant(f"count(last_over_time({queries.RECORDED}[1d]))", None)
    if days:
        newest = day(days[0].points[-1][0] - CHECKPOINT_SECONDS - 1)
        return f"{url}: nothing was recorded {period}; the newest hours before it are of {newest}"
    if now:
        return (
            f"{url}: nothing was recorded {period}, but is now: that is before the rules were loaded, or older than"
            " what the server keeps"
        )
    if await client.instant(f"count(last_over_time({queries.RAW_LEDGER}[1h]))", None):
        return f"{url}: the agents' ledger is there, but its hourly series {queries.RECORDED} are not: {RULES}"
    if await client.instant(f"count(last_over_time({queries.ANYTHING}[1h]))", None):
        return f"{url}: agents are scraped, but they have no ledger yet; ask again in a few minutes"
    return (
        f"{url}: has no series of an agent at all; is this the right Prometheus, and the right tenant"
        " (--prometheus-headers X-Scope-OrgID=...), and does it scrape the agents?"
    )


def _length(windows: Sequence[Window]) -> int:
    return windows[-1].end_seconds - windows[0].start_seconds


_NEEDED = tuple(measure for measure in MEASURES if measure != ENERGY)


class PrometheusLedger:
    """The ledger as Prometheus, Thanos, Mimir or VictoriaMetrics has it; a ``LedgerSource``.

    Args:
        client: Where it is asked for.
        by_day: A chunk per UTC day. Without, a chunk has several days, which is read in half the time; not for prices
            that change from day to day.
    """

    def __init__(self, client: PrometheusClient, *, by_day: bool = True) -> None:
        self._client = client
        self._by_day = by_day

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> FleetLedger:
        """The ledger over a window; see ``LedgerSource``. Where ``workload`` is asked for, namespace and kind come too.

        Of a chunk of which a series of time or money stayed unanswered no line is given, so that no half figures stand
        as whole ones: its capacity shows how much is missing. Without energy it is given, without energy.

        Raises:
            PrometheusError: Nothing can be read at all.
        """
        by_pool = "pool" in dimensions or (filters is not None and "pool" in filters.wanted)
        if self._by_day or by_pool:
            return await self._read(window, chunks(window), dimensions, filters, progress)
        ledger = await self._read(window, stretches(window), dimensions, filters, progress)
        lost = [chunk for chunk in ledger.chunks if any(_overlap(chunk.window, one.window) for one in ledger.failures)]
        if not lost:
            return ledger
        # What failed in one is read day by day, so that no more is missing than cannot be had.
        parts = {
            chunk.window: await self._read(chunk.window, chunks(chunk.window), dimensions, filters, None)
            for chunk in lost
        }
        return _mended(ledger, parts)

    async def _read(
        self,
        window: Window,
        windows: Sequence[Window],
        dimensions: frozenset[Dimension],
        filters: Filters | None,
        progress: Callable[[Progress], None] | None,
    ) -> FleetLedger:
        return await _Reading(self._client, window, windows, dimensions, filters, progress).read()


class _Reading:
    """One reading under way."""

    def __init__(
        self,
        client: PrometheusClient,
        window: Window,
        windows: Sequence[Window],
        dimensions: frozenset[Dimension],
        filters: Filters | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._client = client
        self._window, self._dimensions = window, dimensions
        self._windows = windows
        self._blocks = blocks(self._windows)
        self._cluster_label = client.settings.cluster_label
        own = filters.by_label.wanted if filters else {}
        if filters and "pool" in filters.wanted:
            own = {**own, "pool": filters.wanted["pool"]}
        self._picked = Filters(wanted=own)
        asked = set(dimensions) | set(own)
        self._by_pool = "pool" in asked
        self._with_nodes = bool(asked & {"node", "pool"})
        keep = queries.labels_of(asked | ({"cluster"} if self._with_nodes else set()), self._cluster_label)
        level = queries.level_of(asked | (set(filters.wanted) if filters else set()))
        self._scope = Scope(self._cluster_label, level, keep, queries.matchers(filters, self._cluster_label))
        self._held = client.memory.hold()
        # Not divisible: some of the rows have been added.
        self._cells = Cells(keep, len(self._windows), lambda count: self._held.grow(count, "too_many_lines"))
        self._facts = WindowFacts(self._windows)
        self._recorded = Recorded(self._windows, self._cluster_label)
        self._simulated = False
        self._measures = [(one, half) for one in MEASURES for half in (queries.HALVES if one.labels else ("",))]
        questions = len(self._blocks) * (len(self._measures) + 2 + self._with_nodes) + 1
        self._asking = Asking(client, self._windows, progress, questions)

    async def read(self) -> FleetLedger:
        """All questions, then the ledger."""
        found = await prometheus.detect(self._client)
        await self._recorded.read(self._asking, self._blocks)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask_simulated())
            for block in self._blocks:
                for measure, half in self._measures:
                    tasks.create_task(self._ask_measure(measure, half, block))
                tasks.create_task(self._ask_capacity(block))
                if self._with_nodes:
                    tasks.create_task(self._ask_nodes(block))
        level = self._scope.level
        for chunk in self._asking.failed_chunks(queries.RECORDED, *(measure.series(level) for measure in _NEEDED)):
            self._cells.forget(chunk)
        for chunk in self._asking.failed_chunks(ENERGY.series(level)):
            self._cells.forget_energy(chunk)
        notes = [*self._asking.notes, *self._recorded.notes()]
        notes += [
            f"{series}: values beyond {MOST_FIGURE:g} are left out, as no fleet has them; see which target sends them"
            for series in sorted(measure.series(level) for measure in self._cells.beyond)
        ]
        notes += await coverage_notes(self._client, self._windows, self._recorded, found)
        label_keys = frozenset(key for text in self._cells.values(queries.COST_LABELS) for key in pairs(text))
        return FleetLedger(
            window=self._window,
            dimensions=self._dimensions,
            chunks=self._chunks(),
            nodes=self._facts.last(),
            failures=self._asking.failures(),
            label_keys=label_keys,
            engine=found.title,
            simulated=self._simulated,
            notes=tuple(dict.fromkeys(notes)),
        )

    async def _ask_measure(self, measure: Measure, half: str, block: Block) -> None:
        ends = {queries.asked_at(self._windows[chunk]): chunk for chunk in block}
        await self._asking.ask(
            block,
            measure.series(self._scope.level),
            lambda chunk: queries.total(measure, half, self._scope, self._recorded.parts(chunk)),
            lambda rows: self._cells.add(measure, rows, ends),
        )

    async def _ask_capacity(self, block: Block) -> None:
        await self._asking.ask(
            block,
            queries.CAPACITY,
            lambda chunk: queries.capacity(self._cluster_label, self._recorded.parts(chunk)),
            lambda rows: self._recorded.add_capacity(rows, block),
        )

    async def _ask_nodes(self, block: Block) -> None:
        first, last = self._windows[block[0]], self._windows[block[-1]]
        start, end, lookback = moments(first, last)
        await self._asking.ask_moments(
            block,
            queries.NODE_INFO,
            queries.node_info(self._cluster_label, lookback),
            (start, end, STEP_SECONDS),
            lambda rows: self._facts.add(rows, block, self._cluster_label),
        )

    async def _ask_simulated(self) -> None:
        start, end, lookback = moments(self._windows[0], self._windows[-1])

        def take(rows: Rows) -> None:
            self._simulated = any(float(value) > 0 for row in rows for _, value in row["values"])

        everything = tuple(range(len(self._windows)))
        query = queries.simulated(lookback)
        await self._asking.ask_moments(everything, queries.SIMULATED, query, (start, end, STEP_SECONDS), take)

    def _chunks(self) -> tuple[Chunk, ...]:
        last = self._facts.last()
        keys = self._line_keys()
        made = []
        for number, window in enumerate(self._windows):
            if self._by_pool:
                pools = self._facts.pools(number, last)
                keys = self._line_keys(lambda cluster, node, pools=pools: pools.get((cluster, node), ""))  # type: ignore[misc]
            lines = self._cells.lines(number, keys)
            made.append(
                Chunk(
                    window=window,
                    lines=lines,
                    capacity_seconds=self._recorded.capacity(number),
                    recorded_hours=self._recorded.hours(number),
                )
            )
        return tuple(made)

    def _line_keys(self, pool_of: Callable[[str, str], str] | None = None) -> Callable[[Key], LineKey | None]:
        return line_keys(self._scope.keep, self._dimensions, self._cluster_label, pool_of, self._picked)


def _overlap(one: Window, other: Window) -> bool:
    return one.start_seconds < other.end_seconds and other.start_seconds < one.end_seconds


def _mended(ledger: FleetLedger, parts: Mapping[Window, FleetLedger]) -> FleetLedger:
    """The ledger with some of its chunks read again."""
    made: list[Chunk] = []
    for chunk in ledger.chunks:
        part = parts.get(chunk.window)
        made += part.chunks if part else (chunk,)
    again = parts.values()
    return replace(
        ledger,
        chunks=tuple(made),
        nodes={**ledger.nodes, **{node: facts for part in again for node, facts in part.nodes.items()}},
        failures=tuple(failure for part in again for failure in part.failures),
        label_keys=ledger.label_keys.union(*(part.label_keys for part in again)),
        simulated=ledger.simulated or any(part.simulated for part in again),
        notes=tuple(dict.fromkeys(note for part in (ledger, *again) for note in part.notes)),
    )
