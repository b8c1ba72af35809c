"""Reads YAML mappings field by field, so that every mistake names its line and key."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from exporter.errors import ConfigError, did_you_mean, expected

_NULL = "tag:yaml.org,2002:null"
_MOST_CHARACTERS = 500


def read_text(path: Path, key: str, what: str, fix: str, most_mib: int = 1) -> str:
    """Return the text of a file.

    Args:
        path: Path of the file.
        key: Option that names the file.
        what: Kind of the file.
        fix: End of the message if the file cannot be read.
        most_mib: Maximum size.

    Raises:
        ConfigError: The file cannot be read, is too large or is not text.
    """
    try:
        with path.open("rb") as file:
            content = file.read((most_mib << 20) + 1)
        if len(content) > most_mib << 20:
            raise ConfigError(f"{key}: {path} is larger than {most_mib} MiB; give {what}")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}; {fix}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path} is not UTF-8 text; {fix}") from None


def fields_of(text: str, path: str, wrong: str, *, is_ours: bool = False, may_be_empty: bool = False) -> "Fields":
    """Return the top-level mapping of a file, without problems so far.

    Args:
        text: Text of the file.
        path: Path for messages.
        wrong: Message for a file that is not a mapping.
        is_ours: Whether the file comes with the program. libyaml reads it ten times as fast, but crashes on some files.
        may_be_empty: Whether an empty file is a mapping without keys.

    Raises:
        ConfigError: The text is not YAML, or not a mapping.
    """
    try:
        # Composing instead of loading: scalars keep the text of the user and their line.
        root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader) if is_ours else yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line, problem = _said(error)
        raise ConfigError(f"{path}:{line}: not YAML: {problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:  # of \UFFFFFFFF
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if root is None and may_be_empty:
        root = yaml.MappingNode("", [], yaml.Mark(path, 0, 0, 0, None, 0))
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: {wrong}")
    return Fields(root, path)


_FLOWS = {
    "while parsing a flow sequence": "'[' is not closed; close it with ']'",
    "while parsing a flow mapping": "'{' is not closed; close it with '}'",
}
_HINTS = {
    "but found '<stream end>'": "close the '[' or '{'",
    "alias": "put text that begins with * in quotes",
    "mapping values are not allowed": "put text with ': ' in it in quotes, or correct the indentation",
    r"'\t'": "indent with spaces, not tabs",
    "cannot start any token": "put text that begins with it in quotes",
}
"""Hints by text in the library's messages; the first match applies."""


def _said(error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """Return line and text for an unclosed bracket or quote; otherwise the library's message, with a hint."""
    began = error.context_mark
    if began is not None and error.context == "while scanning a quoted scalar":
        return began.line + 1, "the quote is not closed; close it"
    if began is not None and error.context in _FLOWS:
        return began.line + 1, _FLOWS[error.context]
    words = f"{error.context} {error.problem}"
    hint = next((f"; {hint}" for part, hint in _HINTS.items() if part in words), "")
    return error.problem_mark.line + 1 if error.problem_mark else 1, f"{error.problem or error.context}{hint}"


@dataclass(slots=True)
class Fields:
    """One mapping: ``take_*`` reads a key, or adds a problem and returns ``None``; ``finish`` refuses other keys.

    ``place`` is between line and key in messages, such as ``row 3: ``; one file has one list of ``problems``.
    """

    node: yaml.MappingNode
    path: str
    place: str = ""
    problems: list[str] = field(default_factory=list)
    _found: dict[str, yaml.Node] = field(default_factory=dict)
    _lines: dict[str, int] = field(default_factory=dict)
    _known: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Index the keys."""
        for key_node, value_node in self.node.value:
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "?"
            line = key_node.start_mark.line + 1
            if key in self._found:
                self.problems.append(
                    f"{self.path}:{line}: {self.place}{key}: given twice, first in line {self._lines[key]}; keep one"
                )
                continue
            self._found[key], self._lines[key] = value_node, line

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __iter__(self) -> Iterator[str]:
        """Yield every key in the order of the file."""
        return iter(self._found)

    def problem(self, key: str, words: str) -> None:
        """Add a problem at the line of a key, or of the mapping if the key is missing."""
        self.problems.append(f"{self.place_of(key)}: {self.place}{key}: {words}")

    def place_of(self, key: str) -> str:
        """Return file and line of a key, or of the mapping if the key is missing."""
        return f"{self.path}:{self._lines.get(key, self.node.start_mark.line + 1)}"

    def take(self, key: str) -> yaml.Node | None:
        """Return the key's node."""
        self._known.append(key)
        return self._found.get(key)

    def take_text(self, key: str, allowed: str = "one line of text", *, needed: bool = False) -> str | None:
        """Return a text that is not empty; ``allowed`` describes it in messages."""
        node = self.take(key)
        if node is None:
            if needed:
                self.problem(key, f"missing; allowed: {allowed}")
            return None
        # A null would otherwise become the text "~" or "null", which matches nothing.
        is_text = isinstance(node, yaml.ScalarNode) and node.tag != _NULL
        text = node.value.strip() if is_text else ""
        if not text or not text.isprintable():
            self.problem(key, f"empty, nested or not printable; allowed: {allowed}")
            return None
        if len(text) > _MOST_CHARACTERS:
            self.problem(key, f"longer than {_MOST_CHARACTERS} characters; allowed: {allowed}")
            return None
        return str(text)

    def take_number(self, key: str, allowed: str, low: float, high: float, *, needed: bool = False) -> float | None:
        """Return a finite number from ``low`` to ``high``; ``allowed`` describes it in messages."""
        text = self.take_text(key, allowed, needed=needed)
        if text is None:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and low <= value <= high):
            self.problem(key, f"'{text}' is not a number in range; allowed: {allowed}")
            return None
        return value + 0.0  # -0.0 is 0.0

    def take_choice(self, key: str, words: Collection[str], allowed: str, *, needed: bool = False) -> str | None:
        """Return a word of a choice."""
        text = self.take_text(key, allowed, needed=needed)
        if text is None or text in words:
            return text
        same = [word for word in words if word.lower() == text.lower()]
        self.problem(key, f"'{text}' is not known{expected(same[0] if same else text, words, allowed)}")
        return None

    def take_switch(self, key: str) -> bool | None:
        """Return ``true`` or ``false``."""
        word = self.take_choice(key, ("true", "false"), "true, false")
        return None if word is None else word == "true"

    def take_mapping(self, key: str) -> "Fields | None":
        """Return the mapping below the key."""
        node = self.take(key)
        if node is None:
            return None
        if not isinstance(node, yaml.MappingNode):
            self.problem(key, "not a mapping; allowed: keys with values below it")
            return None
        return Fields(node, self.path, f"{self.place}{key}: ", self.problems)

    def take_mappings(self, key: str, items: str, word: str, most: int) -> "Iterator[Fields]":
        """Yield the mappings of a required list; anything else is a problem.

        Args:
            key: Key of the list.
            items: Plural of the elements, for messages.
            word: Singular of the elements, for messages, which number them from 1.
            most: Maximum number of elements.
        """
        node = self.take(key)
        listed = node.value if isinstance(node, yaml.SequenceNode) else []
        if not 0 < len(listed) <= most:
            count = f"{len(listed):,} of them, which is too many" if listed else "empty, or not a list"
            wrong = "missing" if node is None else count
            self.problem(key, f"{wrong}; allowed: a list of 1 to {most} {items}, each begun by '- '")
            return
        for number, item in enumerate(listed, start=1):
            if isinstance(item, yaml.MappingNode):
                yield Fields(item, self.path, f"{word} {number}: ", self.problems)
            else:
                line = item.start_mark.line + 1
                self.problems.append(f"{self.path}:{line}: {word} {number}: not a mapping; allowed: keys with values")

    def finish(self) -> None:
        """Add a problem for every key that was not read."""
        known = ", ".join(sorted(set(self._known)))
        for key in self._found:
            if key in self._known:
                continue
            self.problem(key, f"unknown key{did_you_mean(key, self._known) or f'; allowed: {known}'}")


Raw = str | tuple[str, ...]
"""A value as text, or as texts for a list."""
FileValue = tuple[str, Raw]
"""Place of a value, as ``file:line``, and the value."""


def read(path: Path, keys: Collection[str]) -> tuple[dict[str, FileValue], list[str]]:
    """Return values by key, and problems, one line each. Underscores in keys count as hyphens."""
    try:
        text = read_text(path, "config", "a configuration file", "give a readable YAML file, or leave --config out")
        wrong = "not a mapping; allowed: lines such as 'sample-interval: 1s'"
        root = fields_of(text, str(path), wrong, may_be_empty=True).node
    except ConfigError as error:
        return {}, [*error.problems]
    for key_node, _ in root.value:
        if isinstance(key_node, yaml.ScalarNode):
            key_node.value = str(key_node.value).replace("_", "-")
    values: dict[str, FileValue] = {}
    fields = Fields(root, str(path))
    for key in keys:
        if (node := fields.take(key)) is None:
            continue
        raw = _raw(node)
        if raw is None:
            fields.problem(key, "empty or nested; allowed: one value, or a list of values")
        else:
            values[key] = fields.place_of(key), raw
    fields.finish()
    return values, sorted(fields.problems, key=lambda one: int(one.removeprefix(f"{path}:").partition(":")[0]))


def _raw(node: yaml.Node) -> Raw | None:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value) or None
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return tuple(str(item.value) for item in node.value)
    return None
