"""One row of a price book: whom it is for, when it holds, and one of three ways to say the price."""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from math import inf, nan

from exporter.accounting.pricing import Match, OnPrem, PriceRow
from exporter.config.yaml_fields import Fields
from exporter.model import Price

CAPACITY_TYPES = ("on-demand", "spot", "reserved")
WAYS = ("per_gpu_hour", "node_hour", "on_prem")
_MOST, _MOST_GPUS = 1e12, 1024
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_DATE_ALLOWED = "2026-01-31, or a time with its zone such as 2026-01-31T12:00:00Z"
_NOT_NEGATIVE, _POSITIVE = "0 or more", "more than 0"
_TINY = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class BookHead:
    """What all rows of a book have in common."""

    name: str
    currency: str
    gpu_part: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rate:
    per_hour: float
    per_kwh: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRow:
    """A row as far as it could be read."""

    row: PriceRow
    right: bool
    """False where its price is not one, so that it is only fit to be compared with other rows."""


def read_row(fields: Fields, number: int, head: BookHead) -> ReadRow | None:
    """A row; every mistake is among the problems. ``None`` where it cannot be told whom and when it is for."""
    before = len(fields.problems)
    match = Match(
        node=fields.take_text("node") or "",
        instance_type=fields.take_text("instance_type") or "",
        capacity_type=fields.take_choice("capacity_type", CAPACITY_TYPES, ", ".join(CAPACITY_TYPES)) or "",
        region=fields.take_text("region") or "",
        model=fields.take_text("model") or "",
    )
    start, end = _time(fields, "from"), _time(fields, "to")
    if start is not None and end is not None and end <= start:
        fields.problem("to", f"not after from; allowed: a time after {moment(start)}")
    comparable = len(fields.problems) == before
    name = fields.take_text("name") or str(number)
    rate = _rate(fields, head.gpu_part)
    source = fields.take_text("source", "where the price comes from, such as a list or a contract", needed=True)
    as_of = _day(fields)
    fields.finish()
    if not comparable:
        return None
    row = PriceRow(
        number=number,
        match=match,
        price=Price(
            per_hour=rate.per_hour if rate else nan,
            per_kwh=rate.per_kwh if rate else 0.0,
            currency=head.currency,
            source=f"{head.name}:{name}",
            as_of=as_of.isoformat() if as_of else "",
        ),
        from_seconds=-inf if start is None else start,
        to_seconds=inf if end is None else end,
        source=source or "",
    )
    return ReadRow(row=row, right=len(fields.problems) == before)


def moment(seconds: float) -> str:
    """A Unix time as a user would write it: the date alone at midnight UTC; ``always`` where there is no bound."""
    if abs(seconds) == inf:
        return "always"
    told = datetime.fromtimestamp(seconds, UTC)
    return told.date().isoformat() if seconds % 86_400 == 0 else told.isoformat().replace("+00:00", "Z")


def _rate(fields: Fields, gpu_part: float) -> _Rate | None:
    given = [way for way in WAYS if way in fields]
    if len(given) != 1:
        words = f"{' and '.join(given)} are given" if given else "missing"
        fields.problem(given[1] if given else "price", f"{words}; allowed: one of {', '.join(WAYS)}")
    per_gpu = fields.take_number("per_gpu_hour", _NOT_NEGATIVE, 0, _MOST)
    per_node = fields.take_number("node_hour", _NOT_NEGATIVE, 0, _MOST)
    gpus = _gpus(fields, needed="node_hour" in fields)
    if gpus is not None and "node_hour" not in fields:
        fields.problem("gpus", "belongs to node_hour, which is not given; take it out")
    on_prem = fields.take_mapping("on_prem")
    owned = _on_prem(on_prem) if on_prem else None
    if len(given) != 1:
        return None
    if per_gpu is not None:
        return _Rate(per_hour=per_gpu)
    if per_node is not None and gpus is not None:
        return _Rate(per_hour=per_node * gpu_part / gpus)
    if owned is not None:
        return _Rate(per_hour=owned.per_gpu_hour(gpu_part), per_kwh=owned.per_measured_kwh)
    return None


def _gpus(fields: Fields, *, needed: bool) -> int | None:
    allowed = f"the physical GPUs of the node, 1 to {_MOST_GPUS}"
    value = fields.take_number("gpus", allowed, 1, _MOST_GPUS, needed=needed)
    if value is None or value == int(value):
        return None if value is None else int(value)
    fields.problem("gpus", f"'{value:g}' is not a whole number; allowed: {allowed}")
    return None


def _on_prem(fields: Fields) -> OnPrem | None:
    before = len(fields.problems)
    capex = fields.take_number("capex", _NOT_NEGATIVE, 0, _MOST, needed=True)
    years = fields.take_number("years", "more than 0, at most 50", _TINY, 50, needed=True)
    gpus = _gpus(fields, needed=True)
    measured = fields.take_choice("measured_energy", ("true", "false"), "true, false") == "true"
    if measured and "kw_per_gpu" in fields:
        fields.problem("kw_per_gpu", "given beside measured_energy: true, so that energy would be paid twice; keep one")
    power = fields.take_number("kw_per_gpu", _NOT_NEGATIVE, 0, 1000, needed=not measured)
    pue = fields.take_number("pue", "1 to 10", 1, 10)
    per_kwh = fields.take_number("per_kwh", _NOT_NEGATIVE, 0, _MOST, needed=True)
    opex = fields.take_number("opex_per_year", _NOT_NEGATIVE, 0, _MOST)
    target = fields.take_number("target_availability", "more than 0, at most 1", _TINY, 1)
    fields.finish()
    if len(fields.problems) > before or capex is None or years is None or gpus is None or per_kwh is None:
        return None
    return OnPrem(
        capex=capex,
        years=years,
        gpus=gpus,
        kw_per_gpu=None if measured else power,
        pue=1.0 if pue is None else pue,
        per_kwh=per_kwh,
        opex_per_year=opex or 0.0,
        target_availability=1.0 if target is None else target,
    )


def _time(fields: Fields, key: str) -> float | None:
    text = fields.take_text(key, _DATE_ALLOWED)
    if text is None:
        return None
    try:
        told = datetime.fromisoformat(text)
        if _DATE.fullmatch(text):
            told = told.replace(tzinfo=UTC)
        if told.tzinfo is None:
            fields.problem(key, f"'{text}' is a time without its zone; allowed: {_DATE_ALLOWED}")
            return None
        return told.astimezone(UTC).timestamp()
    except (ValueError, OverflowError):  # the latter: in UTC it is before year 1 or after year 9999
        fields.problem(key, f"'{text}' is not a date; allowed: {_DATE_ALLOWED}")
        return None


def _day(fields: Fields) -> date | None:
    text = fields.take_text("as_of", "the day of the source, such as 2026-01-31", needed=True)
    if text is None:
        return None
    try:
        if _DATE.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    fields.problem("as_of", f"'{text}' is not a day; allowed: such as 2026-01-31")
    return None
