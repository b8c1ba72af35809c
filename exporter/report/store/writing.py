"""What closing a day writes, within one transaction of its caller's."""

from collections.abc import Iterator, Mapping
from math import isfinite
from operator import itemgetter
from sqlite3 import Connection

from exporter.errors import StoreError
from exporter.model import NodeFacts
from exporter.report.fleet.values import DAY_SECONDS, Chunk, Figures, LineKey
from exporter.report.store.interning import interned
from exporter.report.store.values import day_name

_LINE = "INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_VERSION = (
    "INSERT INTO versions (day, number, closed_at, closed_by, reason, engine, simulated, lines, allocated_seconds)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


def write_version(
    connection: Connection,
    chunk: Chunk,
    nodes: Mapping[tuple[str, str], NodeFacts],
    *,
    number: int,
    closed: tuple[float, str, str, str, bool],
) -> int:
    """Add a version of a day and make it the one that holds; its id.

    Args:
        connection: Within a transaction.
        chunk: The day, at full dimensions.
        nodes: Facts by (cluster, node).
        number: Of the version.
        closed: When, by whom, why, from which engine, and whether simulated.
    """
    day = chunk.window.start_seconds // DAY_SECONDS
    lines = {key: figures for key, figures in chunk.lines.items() if not figures.is_empty}
    allocated = sum(figures.allocated_seconds for figures in lines.values())
    version = int(connection.execute(_VERSION, (day, number, *closed, len(lines), allocated)).lastrowid or 0)
    connection.executemany(
        "INSERT INTO capacity VALUES (?, ?, ?, ?)",
        [
            (version, cluster, chunk.capacity_seconds.get(cluster, 0.0), chunk.recorded_hours.get(cluster, 0))
            for cluster in sorted({*chunk.capacity_seconds, *chunk.recorded_hours})
        ],
    )
    # In the order of the key: the pages of the table are filled one after the other.
    connection.executemany(_LINE, sorted(_rows(connection, version, lines), key=itemgetter(1, 2, 3, 4)))
    node_of, facts_of = interned(connection, "nodes"), interned(connection, "facts")
    connection.executemany(
        "INSERT INTO node_facts VALUES (?, ?, ?)",
        sorted(
            (version, node_of(node), facts_of((f.instance_type, f.capacity_type, f.region, f.gpu_product)))
            for node, f in nodes.items()
        ),
    )
    connection.execute(
        "INSERT INTO days (day, version) VALUES (?, ?) ON CONFLICT (day) DO UPDATE SET version = excluded.version,"
        " reopened_at = NULL, reopened_by = NULL, reopened_reason = NULL",
        (day, version),
    )
    return version


def _rows(connection: Connection, version: int, lines: Mapping[LineKey, Figures]) -> Iterator[tuple[float | None, ...]]:
    node_of, owner_of = interned(connection, "nodes"), interned(connection, "owners")
    sort_of, currency_of = interned(connection, "sorts"), interned(connection, "currencies")
    for key, figures in lines.items():
        owner = owner_of((key.namespace, key.kind, key.workload, key.team, key.labels))
        place = (sort_of((key.pool, key.model, key.mode)), node_of((key.cluster, key.node)))
        seconds = (figures.active_seconds, figures.idle_seconds, figures.unknown_seconds, figures.unpriced_seconds)
        if not figures.money:
            yield (version, owner, 0, *place, *seconds, figures.energy_joules, 0.0, 0.0, 0.0)
        for number, (currency, money) in enumerate(sorted(figures.money.items())):
            first = number == 0
            yield (
                version,
                owner,
                currency_of((currency,)),
                *place,
                *(seconds if first else (0.0, 0.0, 0.0, 0.0)),
                figures.energy_joules if first else None,
                money.active,
                money.idle,
                money.unknown,
            )


def refuse_nonsense(chunk: Chunk) -> None:
    """Refuse a number that no ledger has: a store that has it would have it for years.

    Raises:
        StoreError: With the line.
    """
    day = day_name(chunk.window.start_seconds)
    for key, figures in chunk.lines.items():
        numbers = [figures.active_seconds, figures.idle_seconds, figures.unknown_seconds, figures.unpriced_seconds]
        numbers += [figures.energy_joules or 0.0]
        numbers += [value for money in figures.money.values() for value in (money.active, money.idle, money.unknown)]
        if not all(isfinite(number) and number >= 0 for number in numbers):
            name = "/".join(part for part in key if part)
            raise StoreError(
                "nonsense", f"store: {day} is not closed: {name} has a figure that is negative or no number"
            )
    for cluster, seconds in chunk.capacity_seconds.items():
        if not (isfinite(seconds) and seconds >= 0):
            raise StoreError("nonsense", f"store: {day} is not closed: capacity of cluster '{cluster}' is {seconds}")
