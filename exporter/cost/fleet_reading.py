"""Reads the ledger of a fleet from Prometheus: recorded hourly series, summed by the server, chunk by chunk."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from operator import itemgetter

from exporter.cost import prometheus, queries, recorders
from exporter.cost.asking import Asking, Block, Cell, Column, Draft, Key, Metric, Node, blocks
from exporter.cost.dimensions import APART, EVERYTHING, LABEL, Dimension, Filters, LineKey, pairs, picking, with_parts
from exporter.cost.ledger import Chunk, Figures, FleetLedger, Progress, joined, total_of, unseen
from exporter.cost.prometheus import MemoryUse, PrometheusClient, QueryEngine
from exporter.cost.queries import COST, CURRENCY, ENERGY, MEASURES, SECONDS, STATE, UNPRICED, Measure, Part
from exporter.cost.recorders import Recorder, Turn
from exporter.cost.window import CHECKPOINT_SECONDS, DAY_SECONDS, HOUR_SECONDS, Window, chunks, stretches
from exporter.errors import PrometheusError
from exporter.model.attribution import NodeFacts
from exporter.model.formatting import day
from exporter.model.ledger import STATES, ByState

_CELL_BYTES = 1000
"""Memory of a cell, with its key and one currency."""
_STEP_SECONDS = 6 * HOUR_SECONDS
_NEEDED = tuple(measure for measure in MEASURES if measure != ENERGY)


class PrometheusLedger:
    """A ``LedgerSource`` that reads from Prometheus, Thanos, Mimir or VictoriaMetrics.

    Args:
        client: Client of the server.
        by_day: Whether each UTC day is a chunk. If not, a chunk has several days, and reading takes half the time; not
            for prices that change from day to day.
    """

    def __init__(self, client: PrometheusClient, *, by_day: bool = True) -> None:
        self._client = client
        self._by_day = by_day

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters = EVERYTHING,
        progress: Progress = unseen,
    ) -> FleetLedger:
        """Return the ledger over a window; see ``LedgerSource``. ``workload`` adds ``namespace`` and ``kind``.

        If a query for time or money fails, its chunk has no lines, because partial figures would look complete. The
        capacity of the chunk shows how much is missing. If the query for energy fails, the lines have no energy.

        Raises:
            PrometheusError: No query can be answered.
        """
        if self._by_day or "pool" in dimensions or "pool" in filters.wanted:
            days = _Reading(self._client, chunks(window), dimensions, filters, progress)
            return replace(await days.read(), window=window)
        ledger = await _Reading(self._client, stretches(window), dimensions, filters, progress).read()
        parts = {chunk.window: replace(ledger, chunks=(chunk,), failures=()) for chunk in ledger.chunks}
        # A chunk with a failed query is read again day by day, so that only the days that fail are missing.
        for lost in parts:
            if any(lost.meets(failure.window) for failure in ledger.failures):
                parts[lost] = await _Reading(self._client, chunks(lost), dimensions, filters, unseen).read()
        return joined(window, dimensions, tuple(parts.values()))


class _Reading:
    """Runs one reading."""

    def __init__(
        self,
        client: PrometheusClient,
        windows: Sequence[Window],
        dimensions: frozenset[Dimension],
        filters: Filters,
        progress: Progress,
    ) -> None:
        self._client = client
        self._dimensions = dimensions
        self._label = label = client.settings.cluster_label
        self._drafts = tuple(map(Draft, windows))
        of_window = dict(zip(windows, self._drafts, strict=True))
        self._blocks = [tuple(of_window[window] for window in block) for block in blocks(windows)]
        # Queries have no matcher for these filters.
        picked = {name: of for name, of in filters.wanted.items() if name == "pool" or name.startswith(LABEL)}
        self._picked = Filters(wanted=picked)
        asked = dimensions | set(picked)
        self._by_pool = "pool" in asked
        self._with_nodes = bool(asked & {"node", "pool"})
        keep = queries.labels_of(asked | ({"cluster"} if self._with_nodes else set()), label)
        fields = tuple("cluster" if name == label else queries.FIELD_OF[name] for name in keep)
        self._pick = picking(fields, fields)
        self._shown = with_parts(dimensions)
        level = queries.level_of(asked | set(filters.wanted))
        self._scope = queries.Scope(label, level, keep, queries.matchers(filters, label))
        self._memory = MemoryUse(client.memory)
        self._simulated = False
        self._differing: set[str] = set()
        """Labels that differ between servers that recorded the same hours."""
        self._measures = [(one, half) for one in MEASURES for half in (queries.HALVES if one.labels else ("",))]
        questions = len(self._blocks) * (len(self._measures) + 2 + self._with_nodes) + 1
        self._asking = Asking(client, progress, questions)

    async def read(self) -> FleetLedger:
        """Run all queries and return the ledger."""
        engine = await prometheus.detect(self._client)
        await self._choose_recorders()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask_simulated())
            for block in self._blocks:
                for measure, half in self._measures:
                    tasks.create_task(self._ask_measure(measure, half, block))
                tasks.create_task(self._ask_capacity(block))
                if self._with_nodes:
                    tasks.create_task(self._ask_nodes(block))
        notes = [*self._asking.notes, *self._recorder_notes()]
        notes += await _coverage_notes(self._client, self._drafts, engine)
        nodes: dict[Node, NodeFacts] = {}
        for draft in self._drafts:
            nodes |= draft.nodes
        first, last = self._drafts[0].window, self._drafts[-1].window
        return FleetLedger(
            window=Window(start_seconds=first.start_seconds, end_seconds=last.end_seconds),
            dimensions=self._dimensions,
            label_keys=self._label_keys(),
            chunks=tuple(self._chunks(nodes)),
            nodes=nodes,
            failures=self._asking.failures(),
            engine=engine.title,
            simulated=self._simulated,
            notes=tuple(dict.fromkeys(notes)),
        )

    async def _choose_recorders(self) -> None:
        """Query which hours were recorded, and whether by several servers; the other queries depend on it."""
        answered = [await self._ask_hours(block) for block in self._blocks]
        if not any(answered):
            raise self._asking.last_error or PrometheusError("server_error", "no query was answered")
        known: dict[str, dict[Recorder, dict[int, float]]] = {}
        twice = [block for block in self._blocks if any(len(r) > 1 for one in block for r in one.recorders.values())]
        for block in twice:
            await self._ask_each_hour(block, known)
        self._differing = {name for hours in known.values() for name in recorders.differing_labels(hours)}
        first = self._drafts[0].window.start_seconds // HOUR_SECONDS
        spans = {cluster: recorders.spans_of(hours) for cluster, hours in known.items()}
        order = {cluster: recorders.order_of(hours, first) for cluster, hours in known.items()}
        for draft in (draft for block in twice for draft in block):
            begin, end = draft.window.start_seconds // HOUR_SECONDS, draft.window.end_seconds // HOUR_SECONDS
            clusters: dict[Turn, list[str]] = {}
            for cluster in known:
                if hours := {span.end for span in spans[cluster] if begin < span.end <= end}:
                    draft.hours[cluster] = len(hours)
                for turn in recorders.turns_of(spans[cluster], begin, end, order[cluster]):
                    clusters.setdefault(turn, []).append(cluster)
            if clusters:
                draft.parts = [self._part(end, turn, names) for turn, names in sorted(clusters.items())]

    def _part(self, end: int, turn: Turn, clusters: Sequence[str]) -> Part:
        """Return the hours of one recorder in a chunk that ends at ``end``."""
        labels = dict(turn.recorder)
        wanted = [(self._label, clusters), *((name, [labels.get(name, "")]) for name in sorted(self._differing))]
        return Part(
            seconds=(turn.end - turn.begin) * HOUR_SECONDS,
            back_seconds=(end - turn.end) * HOUR_SECONDS,
            matchers=", ".join(queries.matches(name, values) for name, values in wanted),
        )

    def _recorder(self, metric: Metric) -> Recorder:
        return tuple(sorted((name, text) for name, text in metric.items() if name not in {"__name__", self._label}))

    def _recorder_notes(self) -> Iterator[str]:
        if self._differing:
            yield (
                f"Several Prometheus servers have recorded the same hours (distinguished by"
                f" {', '.join(sorted(self._differing))}): one of them counts for each cluster. If these are several"
                " clusters, give the label that distinguishes them by --cluster-label"
            )

    async def _ask_hours(self, block: Block) -> bool:
        def take(metric: Metric, points: Sequence[tuple[Draft, float]]) -> None:
            cluster, recorder = metric.get(self._label, ""), self._recorder(metric)
            for draft, hours in points:
                draft.recorders.setdefault(cluster, set()).add(recorder)
                draft.hours[cluster] = min(int(hours), draft.window.hours)

        return await self._asking.ask(block, queries.RECORDED, lambda one: queries.recorded_hours(one.window), take)

    async def _ask_each_hour(self, block: Block, known: dict[str, dict[Recorder, dict[int, float]]]) -> None:
        """Query the value that each server recorded for each hour, from ``CARRIED_HOURS`` before the block."""

        def take(metric: Metric, points: Sequence[tuple[int, float]]) -> None:
            own = known.setdefault(metric.get(self._label, ""), {}).setdefault(self._recorder(metric), {})
            own.update({(moment - CHECKPOINT_SECONDS) // HOUR_SECONDS: value for moment, value in points})

        first, last = block[0].window, block[-1].window
        start = queries.asked_at(first) - first.seconds - recorders.CARRIED_HOURS * HOUR_SECONDS
        moments = (start, queries.asked_at(last), HOUR_SECONDS)
        self._asking.total += 1
        await self._asking.ask_moments(block, queries.RECORDED, queries.recorded_hour(), moments, take)

    async def _ask_measure(self, measure: Measure, half: str, block: Block) -> None:
        keep = self._scope.keep

        def take(metric: Metric, points: Sequence[tuple[Draft, float]]) -> None:
            label = metric.get
            key = tuple([label(name, "") for name in keep])
            column = (measure.quantity, _known_state(label(STATE, "")) if measure.labels else "", label(CURRENCY, ""))
            for draft, value in points:
                cell = draft.cells.get(key)
                if cell is None and value:
                    # The query cannot be divided and repeated: some of its rows are already added.
                    self._memory.grow(_CELL_BYTES, "too_many_lines")
                    cell = draft.cells[key] = {}
                if cell is not None:
                    cell[column] = cell.get(column, 0.0) + value

        def query(draft: Draft) -> str:
            return queries.total(measure, half, self._scope, draft.parts)

        await self._asking.ask(block, measure.series(self._scope.level), query, take)

    async def _ask_capacity(self, block: Block) -> None:
        def take(metric: Metric, points: Sequence[tuple[Draft, float]]) -> None:
            cluster = metric.get(self._label, "")
            for draft, seconds in points:
                draft.capacity[cluster] = draft.capacity.get(cluster, 0.0) + seconds

        await self._asking.ask(block, queries.CAPACITY, lambda one: queries.capacity(self._label, one.parts), take)

    async def _ask_nodes(self, block: Block) -> None:
        seen: list[tuple[int, Node, NodeFacts]] = []

        def take(metric: Metric, points: Sequence[tuple[int, float]]) -> None:
            node = metric.get(self._label, ""), metric.get("node", "")
            facts = NodeFacts(**{name: metric.get(name, "") for name in queries.NODE_INFO_LABELS})
            seen.extend((moment, node, facts) for moment, _ in points)

        moments, lookback = _moments(block)
        query = queries.node_info(self._label, lookback)
        await self._asking.ask_moments(block, queries.NODE_INFO, query, moments, take)
        for moment, node, facts in sorted(seen, key=itemgetter(0)):
            for draft in block:
                if draft.window.start_seconds < moment <= draft.window.end_seconds:
                    draft.nodes[node] = facts
                    break

    async def _ask_simulated(self) -> None:
        def take(_: Metric, points: Sequence[tuple[int, float]]) -> None:
            self._simulated |= any(value for _, value in points)

        moments, lookback = _moments(self._drafts)
        await self._asking.ask_moments(self._drafts, queries.SIMULATED, queries.simulated(lookback), moments, take)

    def _label_keys(self) -> frozenset[str]:
        if queries.COST_LABELS not in self._scope.keep:
            return frozenset()
        at = self._scope.keep.index(queries.COST_LABELS)
        return frozenset(name for draft in self._drafts for key in draft.cells for name in pairs(key[at]))

    def _chunks(self, nodes: Mapping[Node, NodeFacts]) -> Iterator[Chunk]:
        level = self._scope.level
        needed, energy = {measure.series(level) for measure in _NEEDED}, ENERGY.series(level)
        line_of = cache(partial(self._line_of, {}))
        for draft in self._drafts:
            if self._by_pool:
                pools = {node: pool_name(facts) for node, facts in {**nodes, **draft.nodes}.items()}
                line_of = cache(partial(self._line_of, pools))
            lines: dict[LineKey, list[Figures]] = {}
            # In the order of keys, so that the order of the answers does not change the last digit of a sum.
            for key, cell in sorted(draft.cells.items()) if not draft.unanswered & {queries.RECORDED, *needed} else ():
                if energy in draft.unanswered:
                    cell.pop((ENERGY.quantity, "", ""), None)
                if (line := line_of(key)) is not None:
                    lines.setdefault(line, []).append(_figures(cell))
            draft.cells.clear()
            yield Chunk(
                window=draft.window,
                lines={line: total_of(figures) for line, figures in lines.items()},
                capacity_seconds=draft.capacity,
                recorded_hours=draft.hours,
            )

    def _line_of(self, pools: Mapping[Node, str], key: Key) -> LineKey | None:
        """Return the line of a key at the requested dimensions; ``None`` if a filter excludes it."""
        whole = LineKey._make(self._pick((*key, "")))
        if self._by_pool:
            whole = whole._replace(pool=pools.get((whole.cluster, whole.node), ""))
        if not self._picked.keep(whole):
            return None
        return whole.at(self._shown | {"kind"} if whole.kind in APART else self._shown)


@lru_cache(maxsize=64)
def _known_state(state: str) -> str:
    """Return the state that time counts as; an unknown state counts as ``active_unprofiled`` or ``unknown``."""
    return state if state in STATES else "active_unprofiled" if state.startswith("active") else "unknown"


def _figures(cell: Cell) -> Figures:
    currencies = sorted({currency for quantity, _, currency in cell if quantity == COST.quantity})
    return Figures(
        seconds=_by_state(cell, SECONDS.quantity, ""),
        unpriced_seconds=cell.get((UNPRICED.quantity, "", ""), 0.0),
        energy_joules=cell.get((ENERGY.quantity, "", "")),
        money={currency: _by_state(cell, COST.quantity, currency) for currency in currencies},
    )


def _by_state(cell: Cell, quantity: str, currency: str) -> ByState:
    effective, ineffective, unprofiled, idle, unknown = [cell.get(one, 0.0) for one in _columns(quantity, currency)]
    return ByState(effective=effective, ineffective=ineffective, unprofiled=unprofiled, idle=idle, unknown=unknown)


@lru_cache(maxsize=64)
def _columns(quantity: str, currency: str) -> tuple[Column, ...]:
    return tuple((quantity, state, currency) for state in STATES)


def _moments(block: Block) -> tuple[tuple[int, int, int], str]:
    """Return start, end and step of a range query over some chunks, and the look-back of each step."""
    end = block[-1].window.end_seconds
    seconds = end - block[0].window.start_seconds
    steps = max(0, -(-seconds // _STEP_SECONDS) - 1)
    return (end - steps * _STEP_SECONDS, end, _STEP_SECONDS), f"{min(seconds, _STEP_SECONDS) * 1000 - 1}ms"


def pool_name(facts: NodeFacts) -> str:
    """Return the name of a node's pool, such as ``p5.48xlarge on-demand``, without unknown parts."""
    return f"{facts.instance_type} {facts.capacity_type}".strip()


_MOST_GAPS = 3


def missing_hours(windows: Sequence[Window], hours: Sequence[Mapping[str, int]], why: str = "") -> list[str]:
    """Return texts on hours without records, by cluster: hours before the first record, and gaps after it.

    Args:
        windows: The chunks of the period, in the order of time.
        hours: Recorded hours of each chunk, by cluster.
        why: Explanation to append for hours that are missing at the beginning.
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
        listed = ", ".join(f"{_days('within ', window)} ({missing})" for window, missing in gaps[:_MOST_GAPS])
        more = f" and {len(gaps) - _MOST_GAPS} more days" if len(gaps) > _MOST_GAPS else ""
        # A server with a short retention lacks the beginning of a chunk of many days.
        earliest = counted[0][0]
        because = why if gaps[0][0] == earliest and earliest.seconds > DAY_SECONDS else ""
        yield f"{total} {'hour was' if total == 1 else 'hours were'} not recorded: {listed}{more}{because}"


def _days(preposition: str, window: Window, of_a_day: str = "") -> str:
    """Return the day of a window, or a preposition with its first and last day."""
    first, last = day(window.start_seconds), day(window.end_seconds - 1)
    return f"{of_a_day}{first}" if first == last else f"{preposition}{first} to {last}"


_RULES = (
    "load rules/prometheus-rules.yaml into Prometheus (or vmalert, or the ruler); the ledger is recorded from then on"
)
_LOOK_BACK_DAYS = 400


async def _coverage_notes(client: PrometheusClient, drafts: Block, engine: QueryEngine) -> list[str]:
    """Return notes on hours without records; query the cause only if no hour was recorded."""
    window = Window(start_seconds=drafts[0].window.start_seconds, end_seconds=drafts[-1].window.end_seconds)
    if not any(draft.hours for draft in drafts):
        try:
            return [await _why_nothing(client, window)]
        except PrometheusError as error:
            return [f"No hour of the period was recorded, and the query for the cause failed: {error}"]
    why = ""
    if engine.retention_seconds is not None and engine.retention_seconds < window.seconds:
        days = engine.retention_seconds / DAY_SECONDS
        why = f": the server keeps {days:g} days; keep closed days with `serve --store`, or raise its retention"
    return missing_hours([draft.window for draft in drafts], [draft.hours for draft in drafts], why)


async def _why_nothing(client: PrometheusClient, window: Window) -> str:
    """Return the cause of a period without records: another period, rules that are not loaded, or another server."""
    url = client.settings.url
    nothing = f"{url}: nothing was recorded {_days('from ', window, 'on ')}"
    recorded = f"count(last_over_time({queries.RECORDED}[1d]))"
    midnight = f"max_over_time(timestamp({recorded})[{_LOOK_BACK_DAYS}d:1d])"
    if before := await client.instant(midnight, queries.asked_at(window)):
        return f"{nothing}; the newest hours before it are of {day(before[0].value - 1)}"
    causes = (
        (recorded, f"{nothing}, but is now: that is before the rules were loaded, or older than what the server keeps"),
        (
            f"count(last_over_time({queries.RAW_LEDGER}[1h]))",
            f"{url}: the agents' ledger is there, but its hourly series {queries.RECORDED} are not: {_RULES}",
        ),
        (
            f"count(last_over_time({queries.ANYTHING}[1h]))",
            f"{url}: agents are scraped, but they have no ledger yet; ask again in a few minutes",
        ),
    )
    for query, words in causes:
        if await client.instant(query, None):
            return words
    return (
        f"{url}: has no series of an agent at all; is this the right Prometheus, and the right tenant"
        " (--prometheus-headers X-Scope-OrgID=...), and does it scrape the agents?"
    )
