"""Reads dcgm-exporter's collectors file: the DCGM fields to export and their names."""

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from exporter.errors import ConfigError, expected
from exporter.metrics import catalog
from exporter.metrics.dcgm_names import (
    BY_NAME,
    NOT_MADE,
    TABLE,
    DcgmField,
    Era,
    EventCount,
    event_metric,
    names_of,
    parse_field,
    table_lines,
)
from exporter.metrics.text_format import Kind, Metric
from exporter.model.fields import PIPES, Field
from exporter.model.formatting import some

HIGHEST_ID = 1650
"""Highest numeric id that can exist in DCGM 4.7."""

_Known = tuple[DcgmField, Era]
"""Field, and the era of its unit."""


def other_fields() -> dict[str, _Known]:
    """Return the fields that only DCGM measures, by name (each of them) and by number.

    They are read from a file at each call and not kept, because only a collectors file needs them.
    """
    lines = table_lines("dcgm_ids.txt")
    return names_of(parse_field(line, f"DCGM field {line.partition(' ')[0]}.") for line in lines)


_COLUMNS = 3
_NUMBER = re.compile(r"[1-9][0-9]{0,3}")
_DEAD_NAMES = frozenset({"dcgm_pcie_tx_throughput", "dcgm_pcie_rx_throughput"})  # in dcgm-exporter's 1.x file
_GPU_UTIL_RATIO = "DCGM_FI_DEV_GPU_UTIL_RATIO"
_SINCE_4_7 = Field(1648)
_SHOWN_NAMES = 3
_EVENT_NAMES = frozenset(EventCount)

ALWAYS_READ: frozenset[Field] = frozenset(
    {
        # Activity.
        Field.PROF_GR_ENGINE_ACTIVE,
        Field.GPU_UTIL,
        Field.ENC_UTIL,
        Field.DEC_UTIL,
        Field.JPG_UTIL,
        Field.OFA_UTIL,
        # Effective time.
        *PIPES,
        Field.PROF_DRAM_ACTIVE,
        Field.PROF_PCIE_TX_BYTES,
        Field.PROF_PCIE_RX_BYTES,
        Field.PROF_NVLINK_TX_BYTES,
        Field.PROF_NVLINK_RX_BYTES,
        Field.SM_CLOCK,
        Field.MAX_SM_CLOCK,
        Field.PCIE_LINK_GEN,
        Field.PCIE_MAX_LINK_GEN,
        Field.PCIE_LINK_WIDTH,
        # Our own metrics.
        Field.FB_USED,
        Field.FB_TOTAL,
        Field.POWER_USAGE,
        Field.TOTAL_ENERGY_CONSUMPTION,
        *catalog.HEALTH_FIELDS,
        Field.NVLINK_TX_BYTES_TOTAL,
        Field.NVLINK_RX_BYTES_TOTAL,
        Field.XID_ERRORS,
    }
)
"""Fields that are read whatever the collectors file contains."""

BY_IDENTITY = (Field(50), Field(54), Field(57))
"""Fields with texts of the identity, which every source provides: name, UUID and PCI address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Metric):
    """One metric (or label) of the drop-in family; its name is shown exactly as in the file."""

    field: DcgmField
    era: Era
    """Era of the shown unit."""


Columns = Mapping[Field, Sequence[tuple[Row, Callable[[float], int | float]]]]
"""Rows by field, each with the conversion of a value to its unit."""


@dataclass(frozen=True, kw_only=True)
class Collectors:
    """Rows of the drop-in family, in order. ``warnings`` are one line each, for the log at start."""

    rows: tuple[Row, ...]
    events: tuple[Metric, ...] = ()
    """Event counts that dcgm-exporter defines itself."""
    warnings: tuple[str, ...] = ()

    @cached_property
    def numbers(self) -> tuple[Row, ...]:
        """Rows that are metrics."""
        return tuple(row for row in self.rows if row.kind is not Kind.LABEL)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """All metrics of a page, in its order."""
        return (*catalog.ALL, *self.numbers, *self.events)

    @cached_property
    def texts(self) -> tuple[Row, ...]:
        """Rows that are labels of the others, by name."""
        return tuple(sorted((row for row in self.rows if row.kind is Kind.LABEL), key=lambda row: row.name))

    @cached_property
    def columns(self) -> Columns:
        """Metrics by field, without the last Xid, because its rows have more labels."""
        columns: dict[Field, list[tuple[Row, Callable[[float], int | float]]]] = {}
        for row in self.numbers:
            if row.field.field is not Field.XID_ERRORS:
                columns.setdefault(row.field.field, []).append((row, row.field.converter(row.era)))
        return columns

    @cached_property
    def columns_of_instances(self) -> Columns:
        """Metrics by field, of the fields that are measured on MIG instances."""
        return {field: shown for field, shown in self.columns.items() if shown[0][0].field.per_instance}

    @property
    def fields(self) -> frozenset[Field]:
        """Fields that the sources must read: the rows' fields and those that are always read."""
        return ALWAYS_READ | {row.field.field for row in self.rows if row.field.field not in BY_IDENTITY}

    @property
    def dcgm_only(self) -> tuple[Row, ...]:
        """Rows of fields that NVML lacks; they have no series without DCGM."""
        return tuple(row for row in self.rows if row.field.field.only_dcgm and row.field.field not in BY_IDENTITY)

    @property
    def without_dcgm(self) -> str:
        """Names of rows without a series if DCGM is not used, and the fix, in one line; empty without such rows."""
        names = some([row.name for row in self.dcgm_only], _SHOWN_NAMES)
        fix = "which show nothing; name its host engine (--dcgm-address)"
        return f"collectors: only DCGM measures {names}, {fix}" if names else ""


def default(names: str) -> Collectors:
    """Return the default set of dcgm-exporter with ``legacy`` (up to 4.8) or ``4.9`` names and units."""
    era = Era(names)
    rows = []
    for row in TABLE:
        name = row.name(era)
        if name and (row.default if era is Era.LEGACY else row.new_default):
            rows.append(Row(field=row, name=name, kind=row.kind, help=row.help, era=era))
    return Collectors(rows=tuple(rows))


DEFAULT = default(Era.LEGACY)
"""Rows of an agent without a collectors file."""


def parse(text: str, source: str) -> Collectors:
    """Read a collectors file in dcgm-exporter's format: field, Prometheus type, help.

    The field may be a name of any era or a numeric id (shown with the name of its era). Of two rows with the same id
    the first one counts, as in dcgm-exporter. An old field and its 4.9 form in another unit have different ids, so a
    file may have both.

    Args:
        text: The whole file.
        source: Name of the file, for messages.

    Raises:
        ConfigError: With one line ``source:line: ...`` per mistake.
    """
    others = other_fields()
    rows: dict[int | str, Metric] = {}
    problems: list[str] = []
    warnings: list[str] = []
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), start=1):
        if line.startswith("#") or not line.strip():
            continue
        where = f"{source}:{number}"
        try:
            row, warning = _row(line.rstrip("\r"), others)
        except ValueError as mistake:
            problems.append(f"{where}: {mistake}")
            continue
        if row:
            key = row.field.number(row.era) if isinstance(row, Row) else row.name
            if key in rows:
                warning = f"{row.name} is the same field as {rows[key].name} above and is left out"
            rows.setdefault(key, row)
        if warning:
            warnings.append(f"{where}: {warning}")
    if problems:
        raise ConfigError(*problems)
    if not rows:
        warnings.append(f"{source}: no row names a field that this agent measures: there will be no DCGM_FI_* metric")
    return Collectors(
        rows=tuple(row for row in rows.values() if isinstance(row, Row)),
        events=tuple(row for row in rows.values() if not isinstance(row, Row)),
        warnings=tuple(warnings),
    )


def _row(line: str, others: Mapping[str, _Known]) -> tuple[Metric | None, str]:
    """Return the row of a line and a warning.

    Raises:
        ValueError: The line is invalid; the message has the mistake and the allowed values.
    """
    name, kind_text, text = _columns(line)
    try:
        kind = Kind(kind_text)
    except ValueError:
        raise ValueError(f"type {kind_text!r} of {name}: allowed are gauge, counter and label") from None
    if name in _EVENT_NAMES:
        row = event_metric(name, text)
        _check_kind(name, kind, row.kind)
        return row, "" if row.kind is kind else f"{name} is shown as the {row.kind} that it is, not as a {kind}"
    if name in NOT_MADE:
        return None, f"{name} is not made by this agent; the row shows nothing: use {NOT_MADE[name]}"
    found = _field(name, others)
    if found is None:
        return None, f"{name} is not measured by this agent; the row shows nothing"
    field, era = found
    _check_kind(name, kind, field.kind)
    printed = (field.name(era) or field.legacy_name) if name.isdigit() else name
    return Row(field=field, name=printed, kind=kind, help=text or field.help, era=era), _remark(name, field)


def _check_kind(name: str, written: Kind, true: Kind) -> None:
    if written is Kind.LABEL and true is not Kind.LABEL:
        raise ValueError(f"{name} is a number and cannot be a label: allowed are gauge and counter")
    if written is not Kind.LABEL and true is Kind.LABEL:
        raise ValueError(f"{name} is a text and cannot be a {written}: allowed is label")


def _field(name: str, others: Mapping[str, _Known]) -> _Known | None:
    """Return the field of a name or number and the era of its unit; ``None`` if it exists but is not measured."""
    known = BY_NAME.get(name) or others.get(name)
    if known:
        return known if known[0].asked else None
    if name in _DEAD_NAMES or (_NUMBER.fullmatch(name) and int(name) <= HIGHEST_ID):
        return None
    # Numbers get no suggestions: a wrong number is not a misspelling of another one.
    words = () if name.isdecimal() else (*BY_NAME, *others, *EventCount, *NOT_MADE)
    raise ValueError(f"unknown field {name!r}{expected(name, words, 'DCGM field names and ids', cutoff=0.8)}")


def _remark(name: str, field: DcgmField) -> str:
    if name == _GPU_UTIL_RATIO:
        return f"{name} is shown as 0-1, as dcgm-exporter 4.9 does; in DCGM 4.6 the same name meant 0-100"
    return f"{name} is measured by DCGM 4.7 and later alone" if field.field is _SINCE_4_7 else ""


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
