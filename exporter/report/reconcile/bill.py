"""Reads bills and sums what they have for instances with GPUs; each line that cannot be read is told."""

import csv
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

from exporter.errors import ExporterError
from exporter.report.fleet.values import DAY_SECONDS, Window
from exporter.report.focus.check_values import NULLS
from exporter.report.focus.opening import Records, opened
from exporter.report.reconcile import bill_cur, bill_focus
from exporter.report.reconcile.columns import MalformedError
from exporter.report.reconcile.instances import gpus_of
from exporter.report.reconcile.mapping import Mapping
from exporter.report.reconcile.values import BillLine, Scope, Sort

_MOST_TOLD = 20
_LineOf = Callable[[dict[str, str], Collection[str]], BillLine]


class BillKey(NamedTuple):
    """Like instances."""

    instance_type: str
    region: str
    currency: str


@dataclass(slots=True, kw_only=True)
class BillGroup:
    """What the bill has for like instances."""

    hours: dict[int, Decimal] = field(default_factory=dict)
    """Of instances, by the Unix time at which the UTC day begins."""
    gpu_hours: dict[int, Decimal] = field(default_factory=dict)
    """Of GPUs, the same way, where these are billed by themselves."""
    daily: bool = True
    """No line is for longer than a day: hours can be compared day by day."""
    listed: Decimal = Decimal(0)
    contracted: Decimal = Decimal(0)
    amortised: Decimal = Decimal(0)
    """These three of time that was used."""
    extras: dict[Sort, Decimal] = field(default_factory=dict)
    """Amortised, of what is not time that was used."""
    invoiced: Decimal = Decimal(0)
    """Of all."""
    gpus: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """A line that could not be read and is in no sum."""

    file: str
    line: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """All bills together."""

    groups: dict[BillKey, BillGroup]
    scope: Scope
    malformed: tuple[Malformed, ...]
    """The first of them; ``scope.malformed`` counts all."""
    node_types: dict[tuple[str, str], tuple[str, str]]
    """Instance type and region of nodes, by cluster and node, as mapped lines tell them."""


def read_bill(paths: Iterable[Path], window: Window, mapping: Mapping, known: Collection[str] = ()) -> Bill:
    """Sum the lines of the window.

    Args:
        paths: CSV files, FOCUS 1.0 or later or AWS' report in its old or new form, also with gzip.
        window: Lines that begin outside of it are counted and left out.
        mapping: What ties the bill to the fleet.
        known: Instance types of the fleet's nodes.

    Raises:
        ExporterError: A file cannot be read, or is none of these.
    """
    sums = _Sums(window, mapping)
    types = frozenset((*known, *mapping.instance_types.values(), *mapping.gpus))
    for path in paths:
        with opened(path) as stream:
            for line, row, line_of in _rows(Records(stream), path):
                sums.lines += 1
                try:
                    if row is None:
                        raise MalformedError("another number of fields than the header")  # noqa: TRY301 - told below
                    sums.add(line_of(row, types))
                except MalformedError as error:
                    sums.malformed += 1
                    if len(sums.told) < _MOST_TOLD:
                        sums.told.append(Malformed(file=str(path), line=line, what=str(error)))
    return sums.bill()


def check_bills(paths: Iterable[Path]) -> None:
    """Find out before long work that a bill cannot be read, or is none.

    Raises:
        ExporterError: Which one, and what a bill is.
    """
    for path in paths:
        with opened(path) as stream:
            next(_rows(Records(stream), path), None)


def _rows(reader: Records, path: Path) -> Iterator[tuple[int, dict[str, str] | None, _LineOf]]:
    """Line number, row and how it is read; ``None`` where a row has another number of fields than the header."""
    try:
        first = next(reader, None)
        if not first:
            raise ExporterError(f"{path}: empty; give a bill: FOCUS or AWS Cost and Usage Report, as CSV")
        header, line_of = _form(first, path)
        for fields in reader:
            if fields:
                values = ["" if value in NULLS else value for value in fields]
                row = dict(zip(header, values, strict=True)) if len(values) == len(header) else None
                yield reader.line_num, row, line_of
    except csv.Error as error:
        raise ExporterError(f"{path}:{reader.line_num}: not CSV: {error}; give the bill as CSV") from None


def _form(header: list[str], path: Path) -> tuple[list[str], _LineOf]:
    if bill_focus.NEEDED.issubset(header):
        return header, bill_focus.line_of
    new = [bill_cur.new_name(name) if "/" in name else name for name in header]
    if bill_cur.NEEDED.issubset(new):
        return new, bill_cur.line_of
    raise ExporterError(
        f"{path}: neither FOCUS (its header has {', '.join(sorted(bill_focus.NEEDED))}) nor AWS' Cost and Usage Report"
        f" ({', '.join(sorted(bill_cur.NEEDED))}, or lineItem/UnblendedCost ...); export the bill in one of these"
    )


class _Sums:
    def __init__(self, window: Window, mapping: Mapping) -> None:
        self.window = window
        self.mapping = mapping
        self.lines = self.gpu_lines = self.other_lines = 0
        self.outside = self.foreign = self.malformed = 0
        self.told: list[Malformed] = []
        self.groups: dict[BillKey, BillGroup] = {}
        self.other_cost: dict[str, Decimal] = {}
        self.key_of: dict[str, BillKey] = {}
        """Of resources that are instances with GPUs."""
        self.waiting: dict[tuple[str, str], list[BillLine]] = {}
        """By resource and currency, summed by sort: what may turn out to be an instance's."""
        self.node_types: dict[tuple[str, str], tuple[str, str]] = {}

    def add(self, line: BillLine) -> None:
        if not self.window.start_seconds <= line.start_seconds < self.window.end_seconds:
            self.outside += 1
            return
        if self.mapping.accounts and line.account not in self.mapping.accounts:
            self.foreign += 1
            return
        place = self.mapping.resources.get(line.resource)
        if place and line.instance_type:
            self.node_types[place] = (line.instance_type, line.region)
        if place and not line.instance_type:
            line = line._replace(instance_type=self.mapping.instance_types.get(place, ""))
        if not line.instance_type:
            self._wait(line)
            return
        key = BillKey(line.instance_type, line.region, line.currency)
        if line.resource and line.sort == "use":
            self.key_of[line.resource] = key
        self._enter(key, line)
        self.gpu_lines += 1

    def _wait(self, line: BillLine) -> None:
        self.other_lines += 1
        self.other_cost[line.currency] = self.other_cost.get(line.currency, Decimal(0)) + line.amortised
        if not line.resource:
            return
        waiting = self.waiting.setdefault((line.resource, line.currency), [])
        for index, one in enumerate(waiting):
            if one.sort == line.sort:
                amortised, billed = one.amortised + line.amortised, one.billed + line.billed
                waiting[index] = one._replace(amortised=amortised, billed=billed, days=one.days + 1)
                return
        waiting.append(line._replace(days=1))  # from here on the number of lines

    def _enter(self, key: BillKey, line: BillLine) -> None:
        group = self.groups.setdefault(key, BillGroup())
        group.invoiced += line.billed
        group.gpus = group.gpus or line.gpus or gpus_of(key.instance_type)
        if line.sort != "use":
            group.extras[line.sort] = group.extras.get(line.sort, Decimal(0)) + line.amortised
            return
        day = line.start_seconds - line.start_seconds % DAY_SECONDS
        group.hours[day] = group.hours.get(day, Decimal(0)) + line.hours
        group.gpu_hours[day] = group.gpu_hours.get(day, Decimal(0)) + line.gpu_hours
        group.daily = group.daily and line.days == 1
        group.listed += line.listed
        group.contracted += line.contracted
        group.amortised += line.amortised

    def bill(self) -> Bill:
        for (resource, currency), waiting in self.waiting.items():
            key = self.key_of.get(resource)
            if key is None:
                continue
            for line in waiting:
                sort: Sort = "other" if line.sort == "use" else line.sort
                self._enter(key._replace(currency=currency), line._replace(sort=sort, gpus=None))
                self.other_lines -= line.days
                self.gpu_lines += line.days
                self.other_cost[currency] -= line.amortised
        scope = Scope(
            lines=self.lines,
            gpu_lines=self.gpu_lines,
            other_lines=self.other_lines,
            outside_window=self.outside,
            other_accounts=self.foreign,
            malformed=self.malformed,
            other_cost={currency: cost for currency, cost in sorted(self.other_cost.items()) if cost},
        )
        return Bill(groups=self.groups, scope=scope, malformed=tuple(self.told), node_types=self.node_types)
