"""dcgm-exporter's collectors file: which DCGM fields are shown, under which names; and its default contents."""

import csv
import difflib
from dataclasses import dataclass

from exporter.errors import ConfigError
from exporter.exposition import health_collector
from exporter.exposition.dcgm_fields import BY_NAME, TABLE, DcgmField, Era
from exporter.exposition.dcgm_known import HIGHEST_ID, NOT_MEASURED
from exporter.exposition.family import Kind
from exporter.model import Field

_COLUMNS = 3
_DEAD_NAMES = frozenset({"dcgm_pcie_tx_throughput", "dcgm_pcie_rx_throughput"})  # in dcgm-exporter's 1.x file
_GPU_UTIL_RATIO = "DCGM_FI_DEV_GPU_UTIL_RATIO"

ALWAYS_READ: frozenset[Field] = frozenset(
    {
        # What activity is made of.
        Field.PROF_GR_ENGINE_ACTIVE,
        Field.GPU_UTIL,
        Field.ENC_UTIL,
        Field.DEC_UTIL,
        Field.JPG_UTIL,
        Field.OFA_UTIL,
        # What the own metrics show.
        Field.FB_USED,
        Field.FB_TOTAL,
        Field.POWER_USAGE,
        Field.TOTAL_ENERGY_CONSUMPTION,
        *health_collector.FIELDS,
        Field.PCIE_TX_BYTES_TOTAL,
        Field.PCIE_RX_BYTES_TOTAL,
        Field.NVLINK_TX_BYTES_TOTAL,
        Field.NVLINK_RX_BYTES_TOTAL,
        Field.XID_ERRORS,
    }
)
"""Fields that are read whatever the collectors file says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One metric (or label) of the drop-in family. ``era`` decides the unit in which it is shown."""

    field: DcgmField
    name: str
    """As printed: exactly the text of the file."""
    kind: Kind
    help: str
    era: Era


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectors:
    """What the drop-in family shows, in order. ``warnings`` are one line each, for the log at start."""

    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()
    from_file: bool = False
    """A file's names are printed as written; only the built-in set follows ``--dcgm-names``."""

    @property
    def fields(self) -> frozenset[Field]:
        """What the sources must read: the rows' fields and those that are always read."""
        return ALWAYS_READ | {row.field.field for row in self.rows}


def default(names: str) -> Collectors:
    """The default set of dcgm-exporter with ``legacy`` (up to 4.8) or ``4.9`` names and units."""
    era = Era(names)
    rows = []
    for row in TABLE:
        name = row.name(era)
        if name and (row.default if era is Era.LEGACY else row.new_default):
            rows.append(Row(field=row, name=name, kind=row.kind, help=row.help, era=era))
    return Collectors(rows=tuple(rows))


DEFAULT = default(Era.LEGACY)
"""What is shown without a collectors file."""


def parse(text: str, source: str) -> Collectors:
    """Read a collectors file in dcgm-exporter's format: field, Prometheus type, help.

    The field may be a name of any era or a numeric id (printed with the name of its era). Of two rows with the
    same field the first one counts, as there.

    Args:
        text: The whole file.
        source: Its name, for messages.

    Raises:
        ConfigError: With one line ``source:line: ...`` per mistake.
    """
    rows: dict[int, Row] = {}
    problems: list[str] = []
    warnings: list[str] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if line.startswith("#") or not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            row, warning = _row(line.rstrip("\r"))
        except ValueError as mistake:
            problems.append(f"{where}: {mistake}")
            continue
        if row and row.field.field in rows:
            earlier = rows[row.field.field].name
            warning, row = f"{row.name} is the same field as {earlier} above and is left out", None
        if warning:
            warnings.append(f"{where}: {warning}")
        if row:
            rows[row.field.field] = row
    if problems:
        raise ConfigError(*problems)
    if not rows:
        warnings.append(f"{source}: no row names a field that this agent measures: there will be no DCGM_FI_* metric")
    return Collectors(rows=tuple(rows.values()), warnings=tuple(warnings), from_file=True)


def _row(line: str) -> tuple[Row | None, str]:
    """A line's row and what to warn of; ``ValueError`` says what is wrong with it and what is allowed."""
    name, kind_text, text = _columns(line)
    try:
        kind = Kind(kind_text)
    except ValueError:
        raise ValueError(f"type {kind_text!r} of {name}: allowed are gauge, counter and label") from None
    if (
        name in NOT_MEASURED
        or name in _DEAD_NAMES
        or (name not in BY_NAME and name.isascii() and name.isdigit() and _is_id(name))
    ):
        return None, f"{name} is not measured by this agent; the row shows nothing"
    if name not in BY_NAME:
        raise ValueError(f"unknown field {name!r}{_suggestion(name)}; allowed are DCGM field names and ids")
    field, era = BY_NAME[name]
    if kind is Kind.LABEL and field.kind is not Kind.LABEL:
        raise ValueError(f"{name} is a number and cannot be a label: allowed are gauge and counter")
    if kind is not Kind.LABEL and field.kind is Kind.LABEL:
        raise ValueError(f"{name} is a text and cannot be a {kind}: allowed is label")
    printed = (field.name(era) or field.legacy_name) if name.isdigit() else name
    warning = ""
    if name == _GPU_UTIL_RATIO:
        warning = f"{name} is shown as 0-1, as dcgm-exporter 4.9 does; in DCGM 4.6 the same name meant 0-100"
    return Row(field=field, name=printed, kind=kind, help=text or field.help, era=era), warning


def _columns(line: str) -> list[str]:
    try:
        columns = next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise ValueError(f"not valid CSV ({error}): write field, type, help; a help with a comma in quotes") from None
    columns = [column.strip(" ") for column in columns]
    if len(columns) != _COLUMNS:
        hint = "; put a help that has a comma in quotes, straight after the comma" if len(columns) > _COLUMNS else ""
        raise ValueError(f"{len(columns)} columns instead of 3 (field, type, help){hint}")
    return columns


def _is_id(text: str) -> bool:
    return 0 < int(text) <= HIGHEST_ID


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name, [*BY_NAME, *NOT_MEASURED], n=1, cutoff=0.8)
    return f": did you mean {close[0]}?" if close else ""
