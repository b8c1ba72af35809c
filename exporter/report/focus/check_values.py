"""What a single value of a FOCUS file must be, by the kind of its column."""

import json
import math
import re
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any

from exporter.config.currencies import CURRENCIES
from exporter.report.focus.columns import Column, Kind

Problem = tuple[str, str] | None
"""The rule that is broken and what is allowed; ``None`` where all is well."""

NULLS = frozenset(("", "NULL", "null"))
"""How files write null: the specification's own examples have ``NULL``."""
_NULL_WORDS = frozenset(("Null", "None", "none", "NaN", "nan", "N/A", "n/a", "NA", "-"))
# What people name: a team may be NA, and "none" is a namespace that Kubernetes takes.
_NAMED = frozenset(
    """
    AllocatedResourceId AllocatedResourceName ResourceName SubAccountId SubAccountName
    x_Cluster x_Namespace x_Node x_Team x_Workload
    """.split()  # noqa: SIM905 - names read better in lines
)
_DECIMAL = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?")
_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?Z")
_DATA_SIZES = "|".join(
    ("b", "B", *(f"{scale}{binary}{of}" for scale in "KMGTPE" for binary in ("", "i") for of in ("b", "B")))
)
# An optional number, then units of which each begins with a capital (data sizes aside), joined by hyphens; per one.
_BASE = rf"(?:{_DATA_SIZES}|[A-Z][A-Za-z0-9]*(?: [A-Z][A-Za-z0-9]*)*)"
_UNIT = re.compile(rf"(?:[1-9][0-9]* )?{_BASE}(?:-{_BASE})*(?:/(?:[1-9][0-9]* )?{_BASE}(?:-{_BASE})*)?")
_RATIO_NAME = re.compile(r"x_\w*Ratio|x_Coverage")


def problem_of(column: Column, value: str) -> Problem:
    """What is wrong with a value that is not null."""
    if value in _NULL_WORDS and not {column.name, column.name.removeprefix("x_")} & _NAMED:
        return "VAL-2", "an empty field, or NULL, where there is no value"
    if column.allowed and value not in column.allowed:
        return "VAL-5", ", ".join(column.allowed[:8]) + (", …" if len(column.allowed) > 8 else "")  # noqa: PLR2004
    return _CHECKS[column.kind](column, value)


def _string(_column: Column, _value: str) -> Problem:
    return None


def _decimal(column: Column, value: str) -> Problem:
    if not _DECIMAL.fullmatch(value):
        return "VAL-3", "digits with a point, and a minus sign where negative"
    if _RATIO_NAME.fullmatch(column.name) and not 0 <= Decimal(value) <= 1:
        return "VAL-9", "0 to 1"
    return None


def _price(column: Column, value: str) -> Problem:
    problem = _decimal(column, value)
    if problem is None and value.startswith("-") and Decimal(value):
        return "VAL-9", "0 or more"
    return problem


def _moment(_column: Column, value: str) -> Problem:
    if _MOMENT.fullmatch(value):
        try:
            datetime.fromisoformat(value)
        except ValueError:
            pass
        else:
            return None
    return "VAL-4", "a UTC time such as 2026-01-31T00:00:00Z"


def _currency(_column: Column, value: str) -> Problem:
    return None if value in CURRENCIES else ("VAL-6", "an ISO 4217 code such as USD")


def _unit(_column: Column, value: str) -> Problem:
    return None if _UNIT.fullmatch(value) else ("VAL-8", "such as Hours, GB-Hours, GPU-Hours, 1000 Requests, GB/Hour")


def _object(_column: Column, value: str) -> Problem:
    return None if parsed(value) is not None else ("VAL-7", "a JSON object")


def _tags(_column: Column, value: str) -> Problem:
    tags = parsed(value)
    if tags is None or not all(_is_plain(tag) for tag in tags.values()):
        return "VAL-7", "a JSON object whose values are texts, numbers or true"
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, float | Decimal):
        return math.isfinite(value)
    return isinstance(value, str | int) or value is None


def parsed(value: str) -> dict[str, Any] | None:
    """A JSON object with its numbers as decimals; ``None`` where it is none."""
    try:
        found = json.loads(value, parse_float=Decimal, parse_int=Decimal)
    except (ValueError, RecursionError, ArithmeticError):
        return None
    return found if isinstance(found, dict) else None


_CHECKS: dict[Kind, Callable[[Column, str], Problem]] = {
    "string": _string,
    "decimal": _decimal,
    "price": _price,
    "datetime": _moment,
    "json": _object,
    "tags": _tags,
    "currency": _currency,
    "unit": _unit,
}
