"""Reads the keys of a scenario; records missing, unknown and invalid keys by line."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

import yaml

from exporter.errors import expected
from gpu_simulator.models import FAST_LOADER
from gpu_simulator.plan import ScenarioWindow

Choice = TypeVar("Choice", bound=StrEnum)
Scalar = str | int | float | bool
_MOST_NODES = 500_000
_QUOTES = " (in quotes if it looks like something else)"


@dataclass(frozen=True, slots=True)
class Item:
    """A value of the file and its line number (from 1)."""

    value: "Mapping[str, Item] | tuple[Item, ...] | str | int | float | bool | None"
    line: int


@dataclass(slots=True)
class Problems:
    """The mistakes found so far."""

    source: str
    """File or scenario name from the user."""
    lines: list[str] = field(default_factory=list)
    sections: "list[Section]" = field(default_factory=list)
    """All mappings that were read."""
    nodes: int = 0
    """Number of values that were read, including each use of an alias."""

    def add(self, line: int, message: str) -> None:
        """Record a mistake."""
        self.lines.append(f"{self.source}:{line}: {message}")


class Section:
    """A mapping of the file; ``finish`` reports its unknown keys."""

    def __init__(self, item: Item, path: str, problems: Problems) -> None:
        """Store a mapping; another value is a mistake and becomes an empty mapping."""
        self.path = path
        self.line = item.line
        self._problems = problems
        self._asked: dict[str, None] = {}
        self._parts: dict[str, Section] = {}
        problems.sections.append(self)
        self._values: Mapping[str, Item] = {}
        if isinstance(item.value, Mapping):
            self._values = item.value
        else:
            problems.add(item.line, f"{path or 'the file'}: is {_told(item)}; allowed: keys with values")

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def problem(self, key: str, message: str) -> None:
        """Record a mistake at a key, or at the section if the key is missing."""
        item = self._values.get(key)
        self._problems.add(item.line if item else self.line, f"{self._name(key)}: {message}")

    def has(self, key: str) -> bool:
        """Return whether the key has a value."""
        self._asked[key] = None
        item = self._values.get(key)
        return item is not None and item.value is not None

    def item(self, key: str) -> Item | None:
        """Return the raw value."""
        return self._values[key] if self.has(key) else None

    def names(self) -> tuple[str, ...]:
        """Return all keys, and mark them as known."""
        self._asked |= dict.fromkeys(self._values)
        return tuple(self._values)

    def _value(
        self, key: str, right: Callable[[object], bool], words: str, *, required: bool, hint: str = ""
    ) -> Scalar | None:
        """Return the value of a key; ``None`` without one, or after a mistake."""
        item = self.item(key)
        if item is None:
            if required:
                self.problem(key, f"is missing; allowed: {words}")
            return None
        if not right(item.value):
            self.problem(key, f"is {_told(item)}; allowed: {words}{hint}")
            return None
        return item.value if isinstance(item.value, (str, int, float)) else None

    def number(
        self, key: str, default: float | None = None, *, low: float = -math.inf, high: float = math.inf
    ) -> float:
        """Return a number between two bounds; the key is required without a default."""
        return self._number(key, default, (int, float), f"a number{_bounds(low, high)}", low, high)

    def optional_number(self, key: str, *, low: float = -math.inf) -> float | None:
        """Return a number if the key exists."""
        return self.number(key, 0.0, low=low) if self.has(key) else None

    def integer(self, key: str, default: int | None = None, *, low: int = 0, high: int = 2**53) -> int:
        """Return a whole number between two bounds; the key is required without a default."""
        return int(self._number(key, default, (int,), f"a whole number{_bounds(low, high)}", low, high))

    def _number(
        self, key: str, default: float | None, kinds: tuple[type, ...], words: str, low: float, high: float
    ) -> float:
        def right(value: object) -> bool:
            return isinstance(value, kinds) and not isinstance(value, bool) and low <= float(str(value)) <= high

        value = self._value(key, right, words, required=default is None)
        if isinstance(value, (int, float)):
            return value
        return default if default is not None else max(low, min(high, 0))

    def text(self, key: str, default: str | None = None) -> str:
        """Return a non-empty text; numbers and booleans of YAML are mistakes."""

        def right(value: object) -> bool:
            return isinstance(value, str) and value != ""

        value = self._value(key, right, "a text", required=default is None, hint=_QUOTES)
        return value if isinstance(value, str) else default or ""

    def flag(self, key: str) -> bool:
        """Return a boolean; ``false`` without the key."""
        return bool(self._value(key, lambda value: isinstance(value, bool), "true, false", required=False))

    def choice(self, key: str, default: Choice) -> Choice:
        """Return a value of an enumeration."""
        word, names = self.text(key, default.value), [kind.value for kind in type(default)]
        if word in names:
            return type(default)(word)
        self.problem(key, f"is {word!r}{expected(word, names, ', '.join(names))}")
        return default

    def section(self, key: str) -> "Section":
        """Return the mapping of a key; empty without the key."""
        return self._part(key, self.item(key) or Item({}, self.line))

    def items(self, key: str) -> tuple[Item, ...]:
        """Return the list of a key; empty without the key."""
        item = self.item(key)
        if item is None:
            return ()
        if not isinstance(item.value, tuple):
            self.problem(key, f"is {_told(item)}; allowed: a list")
            return ()
        return item.value

    def sections(self, key: str) -> "tuple[Section, ...]":
        """Return the list of mappings of a key."""
        return tuple(self._part(f"{key}[{number}]", item) for number, item in enumerate(self.items(key)))

    def _part(self, name: str, item: Item) -> "Section":
        if name not in self._parts:
            self._parts[name] = Section(item, self._name(name), self._problems)
        return self._parts[name]

    def texts(self, key: str) -> dict[str, str]:
        """Return a mapping of names to texts, such as labels; empty texts are allowed, like in Kubernetes."""
        part = self.section(key)
        found: dict[str, str] = {}
        for name in part.names():
            item = part.item(name)
            if item is not None and isinstance(item.value, str):
                found[name] = item.value
            else:
                told = "empty" if item is None else repr(item.value)
                part.problem(name, f"is {told}; allowed: a text{_QUOTES}")
        return found

    def gpu_index(self, gpus: int) -> int | None:
        """Return ``gpu``, the index of an existing board; ``None`` after a mistake."""
        index = self.integer("gpu")
        if index < gpus:
            return index
        allowed = f"0 to {gpus - 1}" if gpus else "none, there are no GPUs"
        self.problem("gpu", f"is {index}, which does not exist; allowed: {allowed}")
        return None

    def window(self, first: str, last: str, linger_seconds: float = 0.0) -> ScenarioWindow:
        """Return the window of ``first``, then ``last`` or ``for``, and ``every``.

        Args:
            first: Key of the start.
            last: Key of the end; without it the window has no end.
            linger_seconds: Least time between the end and the next start.
        """
        start = self.number(first, 0.0)
        end = self.optional_number(last, low=start)
        ends = f"'{last}'"
        if last == "to":
            duration, ends = self.optional_number("for", low=0.0), "'to' or 'for'"
            if end is not None and duration is not None:
                self.problem("for", "is set together with 'to'; allowed: one of them")
            end = end if duration is None else start + duration
        every = self.optional_number("every", low=0.001)
        if every is not None and (end is None or end - start + linger_seconds > every):
            self.problem("every", f"is {every:g}; allowed: at least the duration, with {ends} set")
            every = None
        return ScenarioWindow(start_seconds=start, end_seconds=end, every_seconds=every)

    def finish(self) -> None:
        """Report the unknown keys."""
        for key in self._values:
            if key not in self._asked:
                self.problem(key, f"is not a key here{expected(key, self._asked, ', '.join(self._asked))}")


def _told(item: Item) -> str:
    """Return the text of a value for messages."""
    kinds = {dict: "a mapping", tuple: "a list", type(None): "empty"}
    return kinds.get(type(item.value), repr(item.value))


def _bounds(low: float, high: float) -> str:
    if math.isinf(low) and math.isinf(high):
        return ""
    if high in (math.inf, 2**53):
        return f" from {low:g}"
    return f" from {low:g} to {high:g}"


def read_tree(text: str, problems: Problems, *, is_ours: bool) -> Item | None:
    """Return the values of the file with lines; ``None`` if the file cannot be parsed."""
    try:
        root = yaml.compose(text, Loader=FAST_LOADER if is_ours else yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:  # of \UFFFFFFFF
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        words = getattr(error, "problem", None) or getattr(error, "context", None) or str(error).splitlines()[0]
        problems.add(mark.line + 1 if mark else 1, f"is not YAML: {words}")
        return None
    if root is None:
        problems.add(1, "is empty; expected: a scenario, see docs/scenarios.md")
        return None
    try:
        return _item(root, problems)
    except RecursionError:
        problems.add(1, "aliases (*) expand to too many values; replace them")
        return None


def _item(node: yaml.Node, problems: Problems) -> Item:
    """Return a node as a value with its line.

    Raises:
        RecursionError: Aliases expand to more than ``_MOST_NODES`` nodes, or refer to themselves.
    """
    problems.nodes += 1
    if problems.nodes > _MOST_NODES:
        raise RecursionError
    line = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Item] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            if key in found:
                problems.add(key_node.start_mark.line + 1, f"{key}: appears twice in one mapping")
            child = _item(value_node, problems)
            # A mistake in a value is reported at the line of its key, even if the value starts on the next line.
            found[key] = Item(child.value, key_node.start_mark.line + 1)
        return Item(found, line)
    if isinstance(node, yaml.SequenceNode):
        return Item(tuple(_item(child, problems) for child in node.value), line)
    return Item(_scalar(node, problems), line)


def _scalar(node: yaml.Node, problems: Problems) -> str | int | float | bool | None:
    """Return a scalar of YAML's safe schema; a date is a text."""
    if node.tag == "tag:yaml.org,2002:timestamp":
        return str(node.value)
    try:
        value = yaml.constructor.SafeConstructor().construct_object(node)
    except (yaml.YAMLError, ValueError, LookupError, OverflowError) as error:  # of !!bool maybe, !!int ''
        problems.add(node.start_mark.line + 1, f"cannot be read: {str(error).partition(chr(10))[0]}")
        return None
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)
