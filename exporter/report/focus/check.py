"""Checks a FOCUS file of anybody's: columns, values, what rows must be, and how split charges add up."""

import csv
import re
from typing import TextIO

from exporter.errors import ConfigError, ExporterError
from exporter.report.focus import check_rows
from exporter.report.focus.check_splits import Splits
from exporter.report.focus.check_values import NULLS, Problem, problem_of
from exporter.report.focus.columns import (
    DEFAULT_VERSION,
    MOST_NAME_CHARACTERS,
    OWN_COLUMNS,
    SPLIT_COLUMNS,
    VERSIONS,
    Column,
    columns_of,
)
from exporter.report.focus.findings import Check, Findings, shown
from exporter.report.focus.opening import Records

_OWN_NAME = re.compile(r"x_[A-Za-z0-9]+")
_MOST_REMEMBERED = 20_000


def check_focus(stream: TextIO, name: str, *, version: str | None = None) -> Check:
    """Read a CSV file row by row and note every fault.

    Args:
        stream: The file, opened with ``newline=""``.
        name: For messages.
        version: One of ``VERSIONS``; ``None`` to tell it by the file's columns.

    Raises:
        ConfigError: No such version.
        ExporterError: The file is no CSV, or no text.
    """
    if version is not None and version not in VERSIONS:
        raise ConfigError(f"version: '{version}' is not known; allowed: {', '.join(VERSIONS)}")
    reader = Records(stream)
    findings = Findings()
    header = tuple(_next(reader, name) or ())
    if not header:
        raise ExporterError(f"{name}: empty; give a FOCUS file: CSV with a header")
    used = version or version_of(header)
    _check_header(header, used, findings)
    file = _File(header, used, findings)
    rows = 0
    while (fields := _next(reader, name)) is not None:
        if fields:  # the csv module gives an empty line as no fields
            rows += 1
            file.row(reader.line_num, fields)
    file.splits.finish()
    return Check(
        version=used,
        rows=rows,
        split_rows=file.splits.rows,
        origins=file.splits.origins,
        findings=tuple(sorted(findings.kept, key=lambda finding: finding.line)),
        counts=dict(findings.counts),
    )


def version_of(header: tuple[str, ...]) -> str:
    """The version that a file's columns tell: 1.4 has no ProviderName, 1.2 no ServiceProviderName."""
    if "ServiceProviderName" not in header and "ProviderName" in header:
        return "1.2"
    return "1.3" if "ProviderName" in header else DEFAULT_VERSION


def _next(reader: Records, name: str) -> list[str] | None:
    try:
        return next(reader, None)
    except csv.Error as error:
        raise ExporterError(f"{name}: not CSV: {error}; give a FOCUS file: CSV with a header") from None
    except UnicodeDecodeError:
        raise ExporterError(f"{name}: not UTF-8 text; give a FOCUS file: CSV with a header") from None


def _check_header(header: tuple[str, ...], version: str, findings: Findings) -> None:
    known = columns_of(version)
    for column in known.values():
        if column.level == "mandatory" and column.name not in header:
            findings.add(1, column.name, "COL-1", "is not there", "every mandatory column")
    seen: set[str] = set()
    own_before = ""
    for name in header:
        if name in seen:
            findings.add(1, shown(name), "COL-3", "is there twice", "once")
        seen.add(name)
        if name.startswith("x_"):
            own_before = own_before or name
            if not _OWN_NAME.fullmatch(name) or len(name) > MOST_NAME_CHARACTERS:
                findings.add(1, shown(name), "COL-5", "is no name of a column", "x_ and at most 48 letters and digits")
        elif name not in known:
            other = columns_of(DEFAULT_VERSION).get(name) or columns_of(VERSIONS[0]).get(name)
            why = f"is not of {version}" if other else "is no column of FOCUS"
            findings.add(1, shown(name), "COL-2", why, f"columns of {version}, or a name that begins with x_")
        elif own_before:
            findings.add(1, name, "COL-4", f"stands behind {shown(own_before)}", "x_ columns last")


class _File:
    """What is known of a file while its rows pass."""

    def __init__(self, header: tuple[str, ...], version: str, findings: Findings) -> None:
        self.header = header
        self.findings = findings
        self.present = frozenset(header)
        self.columns = tuple(_column(name, version) for name in header)
        prefix = "x_" if "AllocatedMethodId" not in columns_of(version) else ""
        self.splits = Splits(header, findings, prefix)
        # A file has few values in most columns: each is looked at once.
        self.looked_at: tuple[dict[str, Problem], ...] = tuple({} for _ in header)

    def row(self, line: int, fields: list[str]) -> None:
        """Note the faults of one row."""
        if len(fields) != len(self.header):
            what = f"{len(fields)} fields, and the header has {len(self.header)}"
            self.findings.add(line, "", "FILE-2", what, "as many as the header; quote fields with commas")
            return
        right = self._right(line, fields)
        for column, rule, what, allowed in check_rows.faults(right, self.present):
            self.findings.add(line, column, rule, what, allowed)
        for column, rule, what, allowed in self.splits.row(line, right):
            self.findings.add(line, column, rule, what, allowed)

    def _right(self, line: int, fields: list[str]) -> dict[str, str]:
        """The values that are right by themselves; the others are noted."""
        right: dict[str, str] = {}
        for column, value, looked_at in zip(self.columns, fields, self.looked_at, strict=True):
            if column is None:
                continue
            if value in NULLS:
                if not column.nullable:
                    self.findings.add(line, column.name, "VAL-1", "null", "a value")
                continue
            problem = looked_at.get(value, _NOT_YET)
            if problem is _NOT_YET:
                if len(looked_at) >= _MOST_REMEMBERED:
                    looked_at.clear()
                problem = looked_at[value] = problem_of(column, value)
            if problem is None:
                right[column.name] = value
            else:
                self.findings.add(line, column.name, problem[0], shown(value), problem[1])
        return right


_NOT_YET: Problem = ("", "")


def _column(name: str, version: str) -> Column | None:
    """What a column holds; ``None`` where it is anybody's own, or unknown."""
    known = columns_of(version).get(name)
    if known is not None:
        return known
    inner = columns_of(DEFAULT_VERSION).get(name.removeprefix("x_"))
    if inner is not None and inner.name in SPLIT_COLUMNS and name.startswith("x_"):
        return Column(name=name, kind=inner.kind, level="conditional", since=version)
    kind = OWN_COLUMNS.get(name)
    return None if kind is None else Column(name=name, kind=kind, level="conditional", since=version)
