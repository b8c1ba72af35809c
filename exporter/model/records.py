"""Converts records to JSON and back; the types of the fields define the form of the JSON.

In the state file, a record is an object with names. In messages of a child process, it is an array of its fields.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from functools import cache, lru_cache, partial
from operator import attrgetter
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from exporter.model.devices import Gpu, MigInstance, ProcessUse
from exporter.model.fields import Field
from exporter.model.ledger import STATES, ByState

Record = TypeVar("Record")
_Reader = Callable[[Any], Any]

_PLAIN: Mapping[type, tuple[type, ...]] = {str: (str,), bool: (bool,), int: (int,), float: (int, float)}
"""Allowed types in JSON by type of the field."""
_NUMBERS = frozenset({int, float})
_MOST = 1e300
"""Upper limit of a number, so that the sum of two numbers is finite."""
_MOST_MEASURED = 2**64
"""Upper limit of a measured value: no library reports more, and results of larger values may not be finite."""
_REPEATED = frozenset({Gpu, MigInstance, ProcessUse})
"""Records that usually repeat in the next message: processes are polled at every second sample."""
_KEPT_ROWS = 1024
"""Number of cached rows per repeated record; both children of a node list fewer."""
# A table lookup is several times faster than Field(int(key)), and a reading has hundreds of keys.
_FIELDS = {str(int(member)): member for member in Field}
_LONGEST_ID = 6


def written(record: object) -> dict[str, Any]:
    """Return a dataclass as a JSON object, for the ``default`` of ``json.dumps``.

    Raises:
        TypeError: The value is not a record.
    """
    if isinstance(record, ByState):
        return dict(record)
    if not is_dataclass(record) or isinstance(record, type):
        raise TypeError(f"{record!r:.80} is not a record")
    kind: Any = type(record)
    return {name: getattr(record, name) for name in _types_of(kind)}


def row(record: object) -> object:
    """Return a dataclass as a JSON array, for the ``default`` of ``json.dumps``."""
    kind: Any = type(record)
    return _items_of(kind)(record)


def read(kind: type[Record], data: object) -> Record:
    """Return a value of a type from JSON. An absent field has its default; keys without a field are ignored.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: The data has another form, or a figure is negative, too large
            or not finite.
    """
    any_kind: Any = kind
    record: Record = _reader_of(any_kind)(data)
    return record


@cache
def _types_of(kind: Any) -> dict[str, Any]:  # noqa: ANN401 - a dataclass
    """Return the types of the fields to write, without sets and fields that are not constructor arguments."""
    hints = get_type_hints(kind)
    plain = {one.name: hints[one.name] for one in fields(kind) if one.init}
    return {name: one for name, one in plain.items() if get_origin(one) is not frozenset}


@cache
def _items_of(kind: type) -> _Reader:
    return attrgetter(*_types_of(kind))


@cache
def _reader_of(kind: Any) -> _Reader:  # noqa: ANN401 - a type
    """Return the function that reads a type from JSON."""
    if kind in _FIXED:
        return _FIXED[kind]
    origin, parts = get_origin(kind), get_args(kind)
    if origin is None:
        return kind if issubclass(kind, StrEnum) else _record_reader(kind)
    readers = [_reader_of(part) for part in parts if part not in {Ellipsis, type(None)}]
    if origin is UnionType:  # X | None
        return lambda data: None if data is None else readers[0](data)
    if origin is Mapping:
        return lambda data: {readers[0](key): readers[1](item) for key, item in dict(data).items()}
    return partial(_tuple, readers, is_open=Ellipsis in parts)


def _record_reader(kind: Any) -> _Reader:  # noqa: ANN401 - as above
    readers = {name: _reader_of(one) for name, one in _types_of(kind).items()}

    def of_row(*items: object) -> Any:  # noqa: ANN401 - a record
        return kind(**{name: one(item) for (name, one), item in zip(readers.items(), items, strict=True)})

    kept = lru_cache(maxsize=_KEPT_ROWS, typed=True)(of_row) if kind in _REPEATED else of_row

    def of(data: Any) -> Any:  # noqa: ANN401 - comes from JSON, is checked here
        if type(data) is list:
            return kept(*map(_hashable, data)) if kind is Gpu else kept(*data)
        return kind(**{name: one(data[name]) for name, one in readers.items() if name in data})

    return of


def _hashable(item: Any) -> Any:  # noqa: ANN401 - as above
    """Return an item of a row in a hashable form, as a key of cached rows: the labels of a GPU are an object."""
    return tuple(item.items()) if type(item) is dict else item


def _plain(kind: type, data: Any) -> Any:  # noqa: ANN401 - as above
    if type(data) not in _PLAIN[kind]:  # not isinstance: a bool is an int
        raise TypeError(f"{data!r:.80} is not of type {kind.__name__}")
    if kind in _NUMBERS and not 0 <= data < _MOST:
        raise ValueError(f"{data!r:.80} is not an amount")
    return kind(data)


def _tuple(readers: list[_Reader], data: object, *, is_open: bool) -> tuple[Any, ...]:
    if not isinstance(data, list):
        raise TypeError(f"{data!r:.80} is not a list")
    if is_open:
        return tuple(map(readers[0], data))
    return tuple(one(item) for one, item in zip(readers, data, strict=True))


def _measured(values: Mapping[str, Any]) -> dict[Field, int | float]:
    # type(), not isinstance(): a bool is an int, and no measured value is a bool.
    if not _NUMBERS.issuperset(map(type, values.values())):
        raise TypeError(f"not the values of fields: {values!r:.200}")
    # One invalid value from a library must not discard the others.
    most = _MOST_MEASURED
    return {_FIELDS.get(key) or _field(key): value for key, value in values.items() if -most <= value <= most}


def _field(key: str) -> Field:
    """Return the field of an id; an id that only DCGM has becomes a field when it first arrives."""
    known = _FIELDS.get(key)
    if known is None:
        if len(key) > _LONGEST_ID:
            raise ValueError(f"{key!r} is not the id of a field")
        known = _FIELDS[key] = Field(int(key))
    return known


_FIXED: Mapping[Any, _Reader] = {
    **{kind: partial(_plain, kind) for kind in _PLAIN},
    ByState: lambda data: ByState.of({state: _plain(float, data[state]) for state in STATES}),
    Field: _field,
    Mapping[Field, int | float]: _measured,
}
"""Readers of types that do not contain other types."""
