"""What stands in a page of docs/: its code, its links, the values of the chart that it names."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from yaml_support import read_yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CHART = ROOT / "deploy" / "helm" / "gpu-cost-exporter"

_VALUE = re.compile(
    r"`((?:agent|service|monitoring|networkPolicy|image|serviceAccount|rbac)(?:\.[A-Za-z0-9_-]+)+)[=:`]"
)
_ALSO_SERVICES = frozenset({"service.enable", "service.address", "service.webReadTimeout", "service.clusterIP"})
"""Values of dcgm-exporter's chart that are named beside ours."""


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Fenced code of a language, without the indentation of a list that it may stand in."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return ["".join(line.removeprefix(indent) for line in code.splitlines(keepends=True)) for indent, code in found]


def commands(text: str) -> list[list[str]]:
    """Commands of all shell code, in words; line ends within quotes stay."""
    found: list[list[str]] = []
    for code in blocks(text, "sh"):
        bare = re.sub(r" +# .*$", "", code, flags=re.MULTILINE).replace("\\\n", " ")
        reader = shlex.shlex(bare, posix=True, punctuation_chars=";\n")
        reader.whitespace, reader.whitespace_split, reader.commenters = " \t", True, ""
        line: list[str] = []
        for word in [*reader, "\n"]:
            if set(word) <= {";", "\n"}:
                found += [line] if line else []
                line = []
            else:
                line.append(word)
    return found


def named_files(text: str) -> dict[str, str]:
    """YAML whose first line is a comment with a file's name."""
    found = {}
    for code in blocks(text, "yaml"):
        match = re.match(r"# ([\w.-]+\.yaml|prometheus\.yml)\b", code)
        if match:
            found[match[1]] = code
    return found


def lead_nowhere(text: str) -> list[str]:
    """Links within docs/ whose file or heading is not there."""
    links = (link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link)
    return [link for link in links if not _leads(link, text)]


def _leads(link: str, text: str) -> bool:
    target, _, heading = link.partition("#")
    path = DOCS / target
    if target and not path.is_file():
        return False
    return not heading or heading in _headings(path.read_text(encoding="utf-8") if target else text)


def _headings(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^a-z0-9_ -]", "", title.lower()).replace(" ", "-") for title in titles}


def unknown_values(text: str) -> list[str]:
    """Values of the chart that a page names and the chart does not have."""
    values = read_yaml((CHART / "values.yaml").read_text(encoding="utf-8"))
    free = {"agent.config", "service.config", *_empty_maps(values)}
    named = {match.rstrip(".") for match in _VALUE.findall(text)} - _ALSO_SERVICES
    return sorted(name for name in named if not _is_there(values, name, free))


def _is_there(values: dict[str, Any], name: str, free: set[str]) -> bool:
    found: Any = values
    path = ""
    for part in name.split("."):
        if not isinstance(found, dict) or part not in found:
            return path in free
        found, path = found[part], f"{path}.{part}".removeprefix(".")
    return True


def _empty_maps(values: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        here = f"{path}.{key}".removeprefix(".")
        if value == {}:
            yield here
        elif isinstance(value, dict):
            yield from _empty_maps(value, here)
