"""Sums over closed days by any dimensions, made by SQLite."""

import json
from collections.abc import Iterable, Mapping, Sequence
from sqlite3 import Connection

from exporter.model import Money
from exporter.report.fleet.values import UNALLOCATED, UNATTRIBUTED, Dimension, Figures, Filters, LineKey

_COLUMNS: Mapping[Dimension, tuple[str, str]] = {
    "cluster": ("nodes", "cluster"),
    "node": ("nodes", "name"),
    "pool": ("sorts", "pool"),
    "namespace": ("owners", "namespace"),
    "kind": ("owners", "kind"),
    "workload": ("owners", "workload"),
    "team": ("owners", "team"),
    "labels": ("owners", "labels"),
    "model": ("sorts", "model"),
    "mode": ("sorts", "mode"),
}
"""Table and column of each dimension, in the order of ``LineKey``."""
_ID = {"nodes": "node", "owners": "owner", "sorts": "sort"}
"""The column of ``lines`` that names a row of the table."""
_FIGURES = ("active", "idle", "unknown", "unpriced", "energy", "active_cost", "idle_cost", "unknown_cost")
_SUMS = ", ".join(f"sum({name}) AS {name}" for name in _FIGURES)
_APART = f"CASE WHEN owners.kind IN ('{UNALLOCATED}', '{UNATTRIBUTED}') THEN owners.kind ELSE '' END"


def sums(
    connection: Connection, versions: Sequence[int], dimensions: frozenset[Dimension], filters: Filters
) -> dict[int, dict[LineKey, Figures]]:
    """The lines of each version that the filters keep, summed over the dimensions that are not asked for.

    A workload has namespace and kind with it, as where Prometheus is read.
    """
    if "workload" in dimensions:
        dimensions |= {"namespace", "kind"}
    by_label = filters.by_label
    if by_label.wanted:
        kept = {labels for labels in owners_labels(connection) if by_label.keep(LineKey(labels=labels))}
        others = {name: values for name, values in filters.wanted.items() if name not in by_label.wanted}
        filters = Filters(wanted={**others, "labels": frozenset(kept)})
    question, values = _question(versions, dimensions, filters)
    found: dict[int, dict[LineKey, Figures]] = {version: {} for version in versions}
    keys = len(_COLUMNS)
    once: dict[str, str] = {}  # SQLite makes every name anew, and 10^5 lines have the same few thousand
    for row in connection.execute(question, values):
        key = LineKey(*[once.setdefault(name, name) for name in row[1 : 1 + keys]])
        lines = found[row[0]]
        figures = _figures(row[1 + keys], row[2 + keys :])
        earlier = lines.get(key)
        lines[key] = figures if earlier is None else added((earlier, figures))
    return {version: {k: f for k, f in lines.items() if not f.is_empty} for version, lines in found.items()}


def owners_labels(connection: Connection) -> list[str]:
    """Every combination of cost labels that a line of the store has."""
    return [labels for (labels,) in connection.execute("SELECT DISTINCT labels FROM owners")]


def _question(
    versions: Sequence[int], dimensions: frozenset[Dimension], filters: Filters
) -> tuple[str, tuple[str, ...]]:
    """Group by ids first, so that names are looked up once per group and not once per row."""
    tables = ["owners", *(t for t in ("sorts", "nodes") if any(_COLUMNS[d][0] == t for d in dimensions))]
    # In the order in which lines lie: what is asked for most is summed as it is read.
    ids = ", ".join(("version", "owner", "currency", *(_ID[table] for table in tables[1:])))
    where, values = ["version IN (SELECT value FROM json_each(?))"], [json.dumps(list(versions))]
    for dimension, wanted in sorted(filters.wanted.items()):
        table, column = _COLUMNS[dimension]
        where.append(
            f"{_ID[table]} IN (SELECT id FROM {table} WHERE {column} IN (SELECT value FROM json_each(?)))"  # noqa: S608
        )
        values.append(json.dumps(sorted(wanted)))
    names = ", ".join(_name(dimension, dimensions) for dimension in _COLUMNS)
    joins = " ".join(f"JOIN {table} ON {table}.id = grouped.{_ID[table]}" for table in tables)
    figures, group = ", ".join(_FIGURES), ""
    if "workload" not in dimensions:  # else there is next to nothing left to sum
        figures = _SUMS
        group = "GROUP BY " + ", ".join(str(number) for number in range(1, len(_COLUMNS) + 3))
    # What is put in here is of the tables above; what users ask for is bound.
    question = (
        f"WITH grouped AS MATERIALIZED (SELECT {ids}, {_SUMS} FROM lines WHERE {' AND '.join(where)}"  # noqa: S608
        f" GROUP BY {ids}) SELECT version, {names}, currencies.code, {figures} FROM grouped {joins}"
        f" JOIN currencies ON currencies.id = grouped.currency {group}"
    )
    return question, tuple(values)


def _name(dimension: Dimension, dimensions: frozenset[Dimension]) -> str:
    if dimension in dimensions:
        return ".".join(_COLUMNS[dimension])
    return _APART if dimension == "kind" else "''"


def _figures(currency: str, row: Sequence[float | None]) -> Figures:
    active, idle, unknown, unpriced, energy, *by_state = row
    active_cost, idle_cost, unknown_cost = (amount or 0.0 for amount in by_state)
    return Figures(
        active_seconds=active or 0.0,
        idle_seconds=idle or 0.0,
        unknown_seconds=unknown or 0.0,
        unpriced_seconds=unpriced or 0.0,
        energy_joules=energy,
        money={currency: Money(active=active_cost, idle=idle_cost, unknown=unknown_cost)} if currency else {},
    )


def added(several: Iterable[Figures]) -> Figures:
    """The sum of lines; money by currency, energy of those that have it."""
    lines = tuple(several)
    money: dict[str, Money] = {}
    for figures in lines:
        for currency, more in figures.money.items():
            known = money.get(currency, Money())
            money[currency] = known + more
    measured = [figures.energy_joules for figures in lines if figures.energy_joules is not None]
    return Figures(
        active_seconds=sum(figures.active_seconds for figures in lines),
        idle_seconds=sum(figures.idle_seconds for figures in lines),
        unknown_seconds=sum(figures.unknown_seconds for figures in lines),
        unpriced_seconds=sum(figures.unpriced_seconds for figures in lines),
        energy_joules=sum(measured) if measured else None,
        money=money,
    )
