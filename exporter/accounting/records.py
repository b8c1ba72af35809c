"""Converts the records of the state file to JSON and back; the types of a record's fields are the form of its JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from exporter.model.ledger import STATES, ByState

Record = TypeVar("Record")

_PLAIN: Mapping[type, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (int, float)}
"""Types in JSON by type of the field."""
_MOST = 1e300
"""Upper limit of a figure: the sum of two figures below it is finite."""


def written(record: object) -> dict[str, Any]:
    """Return a dataclass as a JSON object: the ``default`` of ``json.dumps``.

    Raises:
        TypeError: The value is not a record.
    """
    if isinstance(record, ByState):
        return dict(record)
    if not is_dataclass(record) or isinstance(record, type):
        raise TypeError(f"{record!r:.80} is not a record")
    return {name: getattr(record, name) for name in _types_of(type(record))}


def read(kind: type[Record], data: object) -> Record:
    """Return a value of a type from JSON. An absent field has its default; keys without a field are ignored.

    Raises:
        KeyError, TypeError, ValueError: The data has another form, or a figure is negative, too large or not finite.
    """
    record: Record = _read(kind, data)
    return record


@cache
def _types_of(kind: type) -> dict[str, Any]:
    """Return the types of a record's fields; a field that is not an argument is not saved."""
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind) if one.init}


def _read(kind: Any, data: Any) -> Any:  # noqa: ANN401 - a type, and what JSON has for it
    if get_origin(kind) is not None:
        return _read_parts(get_origin(kind), get_args(kind), data)
    if kind in _PLAIN:
        if type(data) not in _PLAIN[kind]:  # not isinstance: a bool is an int
            raise TypeError(f"{data!r:.80} is not of type {kind.__name__}")
        if kind in {int, float} and not 0 <= data < _MOST:
            raise ValueError(f"{data!r:.80} is not an amount")
        return kind(data)
    if kind is ByState:
        return ByState.of({state: _read(float, data[state]) for state in STATES})
    if issubclass(kind, StrEnum):
        return kind(data)
    return kind(**{name: _read(one, data[name]) for name, one in _types_of(kind).items() if name in data})


def _read_parts(origin: Any, parts: Sequence[Any], data: Any) -> Any:  # noqa: ANN401 - as above
    if origin is UnionType:  # X | None
        return None if data is None else _read(parts[0], data)
    if origin is Mapping:
        return {_read(parts[0], key): _read(parts[1], item) for key, item in data.items()}
    if not isinstance(data, list):
        raise TypeError(f"{data!r:.80} is not a list")
    kinds = [parts[0]] * len(data) if parts[-1] is Ellipsis else parts
    return tuple(_read(one, item) for one, item in zip(kinds, data, strict=True))
