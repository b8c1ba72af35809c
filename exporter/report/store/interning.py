"""Names that come again every day, kept once: nodes, owners, sorts of devices, currencies, facts of nodes."""

from collections.abc import Callable
from sqlite3 import Connection

_TABLES = {
    "nodes": ("cluster", "name"),
    "owners": ("namespace", "kind", "workload", "team", "labels"),
    "sorts": ("pool", "model", "mode"),
    "currencies": ("code",),
    "facts": ("instance_type", "capacity_type", "region", "gpu_product"),
}


def interned(connection: Connection, table: str) -> Callable[[tuple[str, ...]], int]:
    """What gives the id of a row's names within the transaction, and makes the row where there is none."""
    columns = _TABLES[table]
    marks, names = ", ".join("?" * len(columns)), ", ".join(columns)
    where = " AND ".join(f"{column} = ?" for column in columns)
    # Names are bound; what is put in here is of the table above.
    select = f"SELECT id FROM {table} WHERE {where}"  # noqa: S608
    insert = f"INSERT INTO {table} ({names}) VALUES ({marks})"  # noqa: S608
    known: dict[tuple[str, ...], int] = {}

    def identify(names: tuple[str, ...]) -> int:
        found = known.get(names)
        if found is None:
            row = connection.execute(select, names).fetchone()
            found = int(row[0] if row else connection.execute(insert, names).lastrowid or 0)
            known[names] = found
        return found

    return identify
