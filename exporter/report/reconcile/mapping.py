"""What ties a bill to a fleet where names alone do not: nodes to resources, clusters to accounts, GPUs per instance."""

import csv
from dataclasses import dataclass, field
from pathlib import Path

from exporter.errors import ConfigError
from exporter.report.focus.findings import shown

_COLUMNS = ("cluster", "node", "instance_type", "account", "resource", "gpus")
_ALLOWED = f"a CSV file with a header of some of: {', '.join(_COLUMNS)}"
_MOST_GPUS, _MOST_TOLD = 1024, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapping:
    """Empty where nothing was told."""

    resources: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Cluster and node of a bill's resource."""
    instance_types: dict[tuple[str, str], str] = field(default_factory=dict)
    """Of nodes, by cluster and node."""
    accounts: frozenset[str] = frozenset()
    """Accounts of the clusters; lines of others are left out, where there are any."""
    gpus: dict[str, int] = field(default_factory=dict)
    """Physical GPUs of an instance, by its type."""


def read_mapping(path: Path) -> Mapping:
    """Read a file of rows of which each says one thing; what a row does not need is empty.

    ``cluster,node`` with ``resource`` or ``instance_type``; ``cluster`` with ``account``; ``instance_type`` with
    ``gpus``.

    Raises:
        ConfigError: With all mistakes at once, each with its line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.DictReader(stream, strict=True)
            rows = [(reader.line_num, row) for row in reader]
            header = reader.fieldnames or ()
    except OSError as error:
        raise ConfigError(f"map: cannot read {path}: {error.strerror}; allowed: {_ALLOWED}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"map: {path} is not CSV: {error}; allowed: {_ALLOWED}") from None
    unknown = [name for name in header if name not in _COLUMNS]
    problems = [f"{path}:1: no such column: {', '.join(map(shown, unknown[:5]))}; allowed: {_ALLOWED}"] * bool(unknown)
    found = _Found()
    for line, row in rows:
        values = {name: (row.get(name) or "").strip() for name in _COLUMNS}
        if None in row:
            problems.append(f"{path}:{line}: more fields than the header; allowed: as many")
        elif not found.take(values):
            problems.append(
                f"{path}:{line}: says nothing that is known; allowed: node with resource or instance_type, cluster with"
                " account, instance_type with gpus from 1 to 1024"
            )
    if problems:
        more = len(problems) - _MOST_TOLD
        raise ConfigError(*problems[:_MOST_TOLD], *([f"{path}: {more:,} more such lines"] if more > 0 else []))
    return Mapping(
        resources=found.resources,
        instance_types=found.instance_types,
        accounts=frozenset(found.accounts),
        gpus=found.gpus,
    )


class _Found:
    def __init__(self) -> None:
        self.resources: dict[str, tuple[str, str]] = {}
        self.instance_types: dict[tuple[str, str], str] = {}
        self.accounts: set[str] = set()
        self.gpus: dict[str, int] = {}

    def take(self, row: dict[str, str]) -> bool:
        """Whether the row says anything."""
        place = (row["cluster"], row["node"])
        said = False
        if row["node"] and row["resource"]:
            self.resources[row["resource"]] = place
            said = True
        if row["node"] and row["instance_type"]:
            self.instance_types[place] = row["instance_type"]
            said = True
        if row["account"]:
            self.accounts.add(row["account"])
            said = True
        if row["gpus"]:
            if not (row["instance_type"] and row["gpus"].isascii() and row["gpus"].isdigit()):
                return False
            count = int(row["gpus"][:6])
            self.gpus[row["instance_type"]] = count
            said = 0 < count <= _MOST_GPUS
        return said
