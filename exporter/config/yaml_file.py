"""The configuration file: a flat YAML mapping, read so that every mistake can name its line."""

from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml

from exporter.config.yaml_fields import compose

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileValue:
    """One value of the file as text, or as texts where it is a list, and where it stands."""

    raw: str | tuple[str, ...]
    line: int


def read(path: Path, keys: Collection[str]) -> tuple[dict[str, FileValue], list[str]]:
    """Values by key, and the problems met, one line each. Underscores in keys are read as hyphens."""
    text, problem = _text(path)
    if problem:
        return {}, [problem]
    root, problem = compose(text, str(path))
    if problem:
        return {}, [problem]
    if root is None:
        return {}, []
    if not isinstance(root, yaml.MappingNode):
        return {}, [f"{path}:1: not a mapping; allowed: lines such as 'sample-interval: 1s'"]
    return _entries(root, path, keys)


def _text(path: Path) -> tuple[str, str]:
    """The file's text, and why there is none; empty where there is."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            return "", f"config: {path} is larger than {_MOST_BYTES >> 20} MiB; give a configuration file"
        return content.decode(), ""
    except OSError as error:
        return "", f"config: cannot read {path}: {error.strerror}; give a readable YAML file, or leave --config out"
    except UnicodeDecodeError:
        return "", f"config: {path} is not UTF-8 text; give a YAML file"


def _entries(root: yaml.MappingNode, path: Path, keys: Collection[str]) -> tuple[dict[str, FileValue], list[str]]:
    values: dict[str, FileValue] = {}
    problems: list[str] = []
    for key_node, value_node in root.value:
        line = key_node.start_mark.line + 1
        key = str(key_node.value).replace("_", "-") if isinstance(key_node, yaml.ScalarNode) else "?"
        if key not in keys:
            problems.append(f"{path}:{line}: unknown key '{key}'{_suggestion(key, keys)}")
            continue
        raw = _raw(value_node)
        if raw is None:
            problems.append(f"{path}:{line}: {key}: empty or nested; allowed: one value, or a list of values")
        elif key in values:
            problems.append(f"{path}:{line}: {key}: given twice, first in line {values[key].line}; keep one")
        else:
            values[key] = FileValue(raw, line)
    return values, problems


def _suggestion(key: str, keys: Collection[str]) -> str:
    close = get_close_matches(key, keys, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; allowed: {', '.join(sorted(keys))}"


def _raw(node: yaml.Node) -> str | tuple[str, ...] | None:
    if isinstance(node, yaml.ScalarNode):
        return str(node.value) or None
    if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in node.value):
        return tuple(str(item.value) for item in node.value)
    return None
