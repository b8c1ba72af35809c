"""The store as a source of the ledger: closed days, summed as they are asked for."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from sqlite3 import Connection

from exporter.model import NodeFacts
from exporter.report.fleet.gaps import missing_hours
from exporter.report.fleet.sources import Progress
from exporter.report.fleet.values import (
    DAY_SECONDS,
    Chunk,
    Dimension,
    Failure,
    Figures,
    Filters,
    FleetLedger,
    LineKey,
    Window,
    pairs,
)
from exporter.report.store import door
from exporter.report.store.days import DayStore
from exporter.report.store.sums import owners_labels, sums
from exporter.report.store.values import days_of, is_day

ENGINE = "store of closed days"
_DAYS_AT_ONCE = 31
"""So that progress is told, and a long window's lines are not twice in memory."""


class StoreLedger:
    """Reads closed days; every question on a thread and a connection of its own, so that none waits for a writer."""

    def __init__(self, store: DayStore) -> None:
        self._path = store.path

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> FleetLedger:
        """The ledger of the closed days in the window; what else is in it is in ``failures``.

        Raises:
            StoreError: The store cannot be read.
        """
        pieces = days_of(window)
        chunks: dict[Window, Chunk] = {}
        nodes: dict[tuple[str, str], NodeFacts] = {}
        simulated = False
        keys: frozenset[str] = frozenset()
        iterator = iter(piece for piece in pieces if is_day(piece))
        asked = 0
        while days := tuple(islice(iterator, _DAYS_AT_ONCE)):
            found, facts, some, keys = await asyncio.to_thread(
                _read, self._path, days, dimensions, filters or Filters()
            )
            chunks.update(found)
            nodes.update(facts)
            simulated = simulated or some
            asked += len(days)
            if progress is not None:
                progress(Progress(done=asked, total=sum(map(is_day, pieces))))
        closed = tuple(chunks[piece] for piece in pieces if piece in chunks)
        return FleetLedger(
            window=window,
            dimensions=dimensions,
            chunks=closed,
            nodes=nodes,
            failures=tuple(_failure(piece) for piece in pieces if piece not in chunks),
            label_keys=keys,
            engine=ENGINE,
            simulated=simulated,
            notes=tuple(missing_hours([one.window for one in closed], [one.recorded_hours for one in closed])),
        )

    async def closed(self) -> frozenset[int]:
        """Starts of all closed days, as Unix times.

        Raises:
            StoreError: The store cannot be read.
        """
        return await asyncio.to_thread(_closed, self._path)


def _failure(piece: Window) -> Failure:
    if is_day(piece):
        return Failure(
            window=piece,
            what="closed day",
            reason=f"{piece.label} is not closed; close it, or ask Prometheus",
            may_pass=False,
        )
    return Failure(
        window=piece,
        what="closed day",
        reason=f"the store has whole UTC days only, and this is a part of {piece.label}; ask for whole days",
        may_pass=False,
    )


def _closed(path: Path) -> frozenset[int]:
    with door.reading(path) as connection:
        return frozenset(day * DAY_SECONDS for (day,) in connection.execute("SELECT day FROM days"))


def _read(
    path: Path, days: Sequence[Window], dimensions: frozenset[Dimension], filters: Filters
) -> tuple[dict[Window, Chunk], dict[tuple[str, str], NodeFacts], bool, frozenset[str]]:
    with door.reading(path) as connection:
        wanted = {day.start_seconds // DAY_SECONDS: day for day in days}
        rows = connection.execute(
            "SELECT days.day, versions.id, simulated FROM days JOIN versions ON versions.id = days.version"
            " WHERE days.day BETWEEN ? AND ? ORDER BY days.day",
            (min(wanted), max(wanted)),
        )
        held = [(version, wanted[day], simulated) for day, version, simulated in rows if day in wanted]
        lines = sums(connection, [version for version, *_ in held], dimensions, filters)
        found = {day: _chunk(connection, version, day, lines[version]) for version, day, _ in held}
        nodes = dict(_nodes(connection, [version for version, *_ in held]))
        keys = frozenset(key for labels in owners_labels(connection) for key in pairs(labels))
        return found, nodes, any(simulated for *_, simulated in held), keys


def _chunk(connection: Connection, version: int, day: Window, lines: Mapping[LineKey, Figures]) -> Chunk:
    rows = connection.execute("SELECT cluster, seconds, hours FROM capacity WHERE version = ?", (version,)).fetchall()
    return Chunk(
        window=day,
        lines=lines,
        capacity_seconds={cluster: seconds for cluster, seconds, _ in rows},
        recorded_hours={cluster: hours for cluster, _, hours in rows},
        closed=True,
    )


def _nodes(connection: Connection, versions: Sequence[int]) -> Iterator[tuple[tuple[str, str], NodeFacts]]:
    """Facts of every node, oldest first: the last word on a node is that of its newest day."""
    for version in versions:
        rows = connection.execute(
            "SELECT cluster, name, instance_type, capacity_type, region, gpu_product FROM node_facts"
            " JOIN nodes ON nodes.id = node_facts.node JOIN facts ON facts.id = node_facts.facts WHERE version = ?",
            (version,),
        )
        for cluster, name, instance_type, capacity_type, region, gpu_product in rows:
            yield (
                (cluster, name),
                NodeFacts(
                    instance_type=instance_type, capacity_type=capacity_type, region=region, gpu_product=gpu_product
                ),
            )
