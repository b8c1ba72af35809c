"""Writes the tables of docs/architecture.md from the import contracts and the sources; ``--check`` compares."""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from generated import ROOT, write_or_check

PAGE = ROOT / "docs" / "architecture.md"
SPINE = (
    "model.devices",
    "model.attribution",
    "model.ledger",
    "model.snapshot",
    "agent.node",
    "agent.sources",
    "attribution.join",
    "agent.views",
    "accounting.activity",
    "agent.metering",
    "accounting.meter",
    "accounting.gpu_split",
    "accounting.ledger",
)
"""Modules of the agent in the reading order for new contributors."""


def contracts() -> list[dict[str, Any]]:
    """Return the import contracts of pyproject.toml."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = document["tool"]["importlinter"]["contracts"]
    return found


def summary(path: Path) -> str:
    """Return the first line of the docstring of a module or package."""
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()[0]


def layers() -> Iterator[str]:
    """Yield the table of layers, from the top down."""
    yield "| layer | responsibility |"
    yield "|---|---|"
    (contract,) = (one for one in contracts() if one["id"] == "layers")
    for layer in contract["layers"]:
        names = [name.strip() for name in str(layer).split("|")]
        words = [summary(ROOT / "exporter" / name).rstrip(".") for name in names]
        yield f"| {', '.join(f'`{name}`' for name in names)} | {'. '.join(words)}. |"


def libraries() -> Iterator[str]:
    """Yield the table of third-party libraries and the modules that may import them."""
    yield "| library | imported by |"
    yield "|---|---|"
    for contract in contracts():
        if not str(contract["id"]).startswith("library-"):
            continue
        imports = (str(one).partition(" -> ")[0] for one in contract.get("ignore_imports", []))
        doors = ", ".join(f"`{name.removeprefix('exporter.')}`" for name in imports)
        yield f"| {contract['name']} | {doors or 'no module'} |"


def spine() -> Iterator[str]:
    """Yield the table of the modules to read first."""
    yield "| module | lines | subject |"
    yield "|---|---:|---|"
    total = 0
    for name in SPINE:
        path = ROOT / "exporter" / name.replace(".", "/")
        lines = len(path.with_suffix(".py").read_text(encoding="utf-8").splitlines())
        total += lines
        yield f"| `{name}` | {lines} | {summary(path)} |"
    yield f"| all | {total:,} | |"


def text() -> str:
    """Return the page with current tables."""
    page = PAGE.read_text(encoding="utf-8")
    for name, table in (("layers", layers), ("libraries", libraries), ("spine", spine)):
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->\n"
        head, found, rest = page.partition(begin)
        if not found:
            raise SystemExit(f"docs/architecture.md: the line {begin.strip()!r} is missing; add it above the table")
        page = head + begin + "\n".join(table()) + "\n" + end + rest.partition(end)[2]
    return page


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: text()}))
