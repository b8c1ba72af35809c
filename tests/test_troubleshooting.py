"""docs/troubleshooting.md: every line of doctor, every counted reason; and its quotations match the program."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from files_support import ROOT, page, read_yaml

from exporter.accounting import state_file
from exporter.gpu.nvml import library
from exporter.kube import api_client

TEXT = page("troubleshooting.md")
DOCTOR = ROOT / "exporter" / "doctor"
LEVELS = {"ok", "warn", "fail", "told", "bad"}
"""Functions that make a finding: the three levels, and names in doctor for one of two of them."""


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def calls(path: Path) -> list[tuple[str, ast.Call, ast.AST]]:
    """Return the name of each call, the call, and the function or module around it."""
    found: list[tuple[str, ast.Call, ast.AST]] = []
    left: list[tuple[ast.AST, ast.AST]] = [(tree(path), tree(path))]
    while left:
        node, scope = left.pop()
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            found.append((name, node, scope))
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else scope
        left += [(child, inner) for child in ast.iter_child_nodes(node)]
    return found


def name_of(argument: ast.expr, scope: ast.AST, path: Path) -> str:
    """Return the text of a finding's name: a constant, or a variable of its function or module."""
    if isinstance(argument, ast.Constant):
        return str(argument.value)
    assert isinstance(argument, ast.Name), ast.unparse(argument)
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id == argument.id:
                    return str(node.value.value)
    return str(getattr(importlib.import_module(f"exporter.doctor.{path.stem}"), argument.id))


def findings() -> set[str]:
    """Return the names of all lines that doctor can write."""
    return {
        name_of(call.args[0], scope, path)
        for path in DOCTOR.glob("*.py")
        for name, call, scope in calls(path)
        if name in LEVELS and len(call.args) > 1
    }


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith("| ---")
    ]


def test_every_doctor_finding_is_listed_and_in_a_symptom_table() -> None:
    there = findings()
    assert len(there) > 25
    listed = {name for row in rows(section("Every line of doctor"))[1:] for name in re.findall(r"`([^`]+)`", row[0])}
    assert listed == there
    tables = TEXT.partition("\n## Pods that are not there\n")[2].partition("\n## Every line of doctor\n")[0]
    shown = set(re.findall(r"\b(?:ok|warn|fail) `([^`]+)`", tables))
    assert shown - {"DCGM engine"} == there - {"DCGM engine"}


def test_quoted_texts_match_the_program() -> None:
    said = "\0".join(
        str(node.value)
        for path in (ROOT / "exporter").rglob("*.py")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    quoted = [
        quote
        for row in rows(TEXT)
        if len(row) == 4 and re.search(r"\b(?:ok|warn|fail) `", row[1])
        for quote in re.findall(r'"([^"]+)"', row[1])
    ]
    assert len(quoted) > 50
    for quote in quoted:
        for part in filter(None, (piece.strip(" :;,") for piece in quote.split("…"))):
            assert part in said, quote


def constants(name: str, paths: Iterator[Path]) -> set[str]:
    """Return the constant first arguments of all calls of a name."""
    return {
        str(constant.value)
        for path in paths
        for called, call, _ in calls(path)
        if called == name and call.args
        for constant in (
            (call.args[0].body, call.args[0].orelse) if isinstance(call.args[0], ast.IfExp) else (call.args[0],)
        )
        if isinstance(constant, ast.Constant)
    }


def counted_by_key(paths: Iterator[Path]) -> set[str]:
    """Return the keys of `errors["..."] += ...`; the last of two keys."""
    found = set()
    for path in paths:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Subscript):
                key = node.target.slice
                last = key.elts[-1] if isinstance(key, ast.Tuple) else key
                if re.search(r"errors|reasons", ast.unparse(node.target.value)) and isinstance(last, ast.Constant):
                    found.add(str(last.value))
    return found


def beginnings(paths: Iterator[Path]) -> set[str]:
    """Return the reasons of `_count(memory, "reason", holds=...)`, which counts each start of such a condition."""
    return {
        str(call.args[1].value)
        for path in paths
        for called, call, _ in calls(path)
        if called == "_count" and len(call.args) > 1 and isinstance(call.args[1], ast.Constant)
    }


def modules(*folders: str) -> Iterator[Path]:
    return (path for folder in folders for path in (ROOT / "exporter" / folder).rglob("*.py"))


def reasons() -> set[str]:
    """Return every reason that can be counted and is a constant; those of DCGM are on a separate page."""
    every = ("agent", "attribution", "accounting", "kube", "gpu", "metrics", "web")
    found = counted_by_key(modules(*every))
    for error in ("AttributionError", "ApiError", "StateError", "SourceError", "set_aside"):
        found |= constants(error, modules("agent", "attribution", "accounting", "kube", "gpu"))
    found |= beginnings(modules("accounting"))
    found |= constants("_error", modules("kube")) | set(api_client._REASONS.values()) | {"server_error"}
    found |= set(library._REASONS.values()) | library._FIXES.keys() | {state_file.UNSYNCED}
    return {reason for reason in found if not reason.startswith("dcgm_")}


def test_every_counted_reason_is_documented() -> None:
    text = section("What is counted")
    there = reasons()
    assert len(there) > 70
    assert {reason for reason in there if f"`{reason}`" not in text} == set()
    named = {name for row in rows(text) for cell in row[:2] for name in re.findall(r"`([a-z_]+)`", cell)}
    parts = {"ledger", "state", "windows", "prices", "web", "activity", "exposition", "agent"}
    assert (
        named - there - parts - {"config", "tick", "gpm_clamped", "events_unavailable", "too_many_cost_labels"} == set()
    )


def test_every_part_has_its_reasons() -> None:
    text = section("What is counted")
    headed = set(re.findall(r'^### part="(\w+)"$', text, re.MULTILINE))
    others = {row[0].strip("`") for row in rows(text.partition("### Other parts")[2])[1:]}
    assert headed == {"nvml", "dcgm", "attribution", "metadata"}
    assert others == {"ledger", "state", "windows", "prices", "web", "activity", "exposition", "agent"}


def test_every_exporter_alert_links_here_and_to_its_runbook() -> None:
    groups = read_yaml((ROOT / "rules" / "prometheus-rules.yaml").read_text(encoding="utf-8"))["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    own = {name for name in alerts if re.match(r"GPUExporter|GPULedger|GPUPriceBook|GPUSimulated|GPUActivity", name)}
    table = section("Alerts of the exporter itself")
    assert own - set(re.findall(r"\[(\w+)\]\(runbook\.md#", table)) == set()
    for name, heading in re.findall(r"\[(GPU\w+)\]\(runbook\.md#(\w+)\)", TEXT):
        assert name in alerts
        assert heading == name.lower()
