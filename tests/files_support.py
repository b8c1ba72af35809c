"""YAML, JSON schemas, pages of docs/, the program in contrib/digest, and small disks."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(text: str) -> Any:  # noqa: ANN401 - YAML of any shape
    """Return the only document of a text."""
    return yaml.load(text, LOADER)  # noqa: S506 - a safe one


def read_documents(text: str) -> Iterator[Any]:
    """Return every document of a text."""
    return iter(yaml.load_all(text, LOADER))


# ruff: noqa: PLC0415


def problems(document: Any, schema: Mapping[str, Any]) -> list[str]:  # noqa: ANN401 - JSON of any shape
    """Return the errors of a document against a schema; the default draft is the newest."""
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for

    check = validator_for(schema, default=Draft202012Validator)(schema)
    return [error.message for error in check.iter_errors(document)]


def schema_problems(schema: Mapping[str, Any]) -> list[str]:
    """Return the errors of a schema itself."""
    from jsonschema import Draft202012Validator

    return problems(schema, Draft202012Validator.META_SCHEMA)


def bill_problem(text: str) -> object:
    """Return the error of a bill of materials against CycloneDX's strict schema; ``None`` without one."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    return JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)


ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CHART = ROOT / "deploy" / "helm" / "gpu-cost-exporter"

_VALUE = re.compile(
    r"`((?:agent|service|monitoring|networkPolicy|image|serviceAccount|rbac)(?:\.[A-Za-z0-9_-]+)+)[=:`]"
)
_ALSO_SERVICES = frozenset({"service.enable", "service.address", "service.webReadTimeout", "service.clusterIP"})
"""Values of dcgm-exporter's chart that pages name together with ours."""


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced code of a language, without the indentation of a list around it."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return ["".join(line.removeprefix(indent) for line in code.splitlines(keepends=True)) for indent, code in found]


def commands(text: str) -> list[list[str]]:
    """Return the commands of all shell code, in words; line ends within quotes stay."""
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
    """Return the YAML blocks whose first line is a comment with a file name."""
    found = {}
    for code in blocks(text, "yaml"):
        match = re.match(r"# ([\w.-]+\.yaml|prometheus\.yml)\b", code)
        if match:
            found[match[1]] = code
    return found


def lead_nowhere(text: str) -> list[str]:
    """Return the links within docs/ to a missing file or heading."""
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
    """Return the values of the chart that a page names and the chart lacks."""
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


PROGRAM = Path(__file__).parent.parent / "contrib" / "digest" / "digest.py"
_SPEC = importlib.util.spec_from_file_location("contrib_digest", PROGRAM)
assert _SPEC is not None
assert _SPEC.loader is not None
digest = importlib.util.module_from_spec(_SPEC)
sys.modules["contrib_digest"] = digest  # dataclasses look up their module
_SPEC.loader.exec_module(digest)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")


@contextmanager
def tmpfs(directory: Path, options: str) -> Iterator[Path]:
    """Mount a separate file system in memory; ``options`` are those of mount."""
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"may not mount here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)
