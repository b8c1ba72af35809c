"""Unit tests of the rules, each case with the rules that it is about and no other."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from corpus_support import seconds
from yaml_support import read_yaml

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_FROM_NOTHING = re.compile(r"__name__|\babsent|\bvector\(|\btime\(\)|\bALERTS\b")
"""An expression with one of these may have a value whatever series there are."""
_PARTS = ("alert_rule_test", "promql_expr_test")
_Rule = Mapping[str, Any]


def relevant(path: Path, folder: Path, *, thorough: bool = False) -> tuple[Path, ...]:
    """Write copies of a file of unit tests whose rules are those that its cases can notice.

    Every evaluation costs every rule, and most cases are about a few: those that lead from a series of the case to
    what it asks for. One engine is tested thoroughly. Others can only differ in an expression: for them each alert
    fires, is silent and is silent again, and each query has its answer, in at least one case.

    Args:
        path: Of the unit tests, in the form of promtool.
        folder: Where to write the copies and their rules.
        thorough: Keep all cases, and each rule that reads a series of the case: evaluating it can fail.

    Returns:
        One file for each set of rules.
    """
    document: dict[str, Any] = read_yaml(path.read_text(encoding="utf-8"))
    files = [path.parent / name for name in document["rule_files"]]
    groups = [group for file in files for group in read_yaml(file.read_text(encoding="utf-8"))["groups"]]
    rules: Sequence[_Rule] = [rule for group in groups for rule in group["rules"]]
    cases: dict[frozenset[int], list[Any]] = {}
    for case in document["tests"] if thorough else _covering(document["tests"]):
        alive = _alive(rules, case)
        cases.setdefault(alive if thorough else alive & _asked(rules, case), []).append(case)
    written = []
    for number, (kept, some) in enumerate(cases.items()):
        ours = {id(rule) for index, rule in enumerate(rules) if index in kept}
        some_groups = [group | {"rules": [rule for rule in group["rules"] if id(rule) in ours]} for group in groups]
        some_groups = [group for group in some_groups if group["rules"]]
        order = [name for name in document.get("group_eval_order", ()) if name in {one["name"] for one in some_groups}]
        rules_file, copy = (folder / f"{path.stem}-{number}{ending}" for ending in (".rules.yaml", ".yaml"))
        _dump(rules_file, {"groups": some_groups})
        _dump(copy, document | {"rule_files": [str(rules_file)], "group_eval_order": order, "tests": some})
        written.append(copy)
    return tuple(written)


def _covering(cases: Sequence[_Rule]) -> list[_Rule]:
    """Return short cases, or beginnings of them, that together have every result."""
    wanted = {result for case in cases for result in _results(case)}
    beginnings = [_until(case, moment) for case in cases for moment in {_moment(check) for check in _checks(case)}]
    kept: list[_Rule] = []
    while wanted:
        best = max(beginnings, key=lambda case: len(_results(case) & wanted) / _seconds(case))
        kept.append(best)
        wanted -= _results(best)
    return [case for case in kept if not any(_is_more(other, case) for other in kept)]


def _checks(case: _Rule) -> list[_Rule]:
    return [check for part in _PARTS for check in case.get(part, ())]


def _moment(check: _Rule) -> float:
    return seconds(check["eval_time"])


def _seconds(case: _Rule) -> float:
    return max(_moment(check) for check in _checks(case))


def _until(case: _Rule, moment: float) -> _Rule:
    """Return a case with its checks until a moment."""
    kept = {part: [one for one in case[part] if _moment(one) <= moment] for part in _PARTS if part in case}
    return {**case, **kept}


def _is_more(case: _Rule, other: _Rule) -> bool:
    """Whether one case is another and goes on after it."""
    return case["input_series"] is other["input_series"] and len(_checks(case)) > len(_checks(other))


def _results(case: _Rule) -> set[tuple[str, str]]:
    """Return which alerts are silent, fire and are silent again; queries likewise find nothing, something, nothing."""
    found: set[tuple[str, str]] = set()
    for check in sorted(_checks(case), key=_moment):
        name = check.get("alertname") or check["expr"]
        if check.get("exp_alerts") or check.get("exp_samples"):
            found.add((name, "some"))
        else:
            found.add((name, "none again" if (name, "some") in found else "none"))
    return found


def _dump(path: Path, document: Any) -> None:  # noqa: ANN401 - YAML of any shape
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    path.write_text(yaml.dump(document, Dumper=dumper, allow_unicode=True), encoding="utf-8")


def _name(rule: _Rule) -> str:
    return str(rule.get("record") or rule["alert"])


def _words(rule: _Rule) -> set[str]:
    """Names of the series that a rule and its texts read, and other words."""
    return set(_NAME.findall(" ".join([rule["expr"], *rule.get("annotations", {}).values()])))


def _alive(rules: Sequence[_Rule], case: Mapping[str, Any]) -> frozenset[int]:
    """Rules that may have a value where the series of a case are all that there is."""
    there = {_NAME.match(one["series"]).group() for one in case.get("input_series", ())}  # type: ignore[union-attr]

    def has_value(rule: _Rule) -> bool:
        if not (there & _words(rule) or _FROM_NOTHING.search(rule["expr"])):
            return False
        there.add(_name(rule))
        return True

    return _closure(rules, has_value)


def _asked(rules: Sequence[_Rule], case: Mapping[str, Any]) -> frozenset[int]:
    """Rules whose value a case asks for, and those that these read."""
    queries = [query["expr"] for query in case.get("promql_expr_test", ())]
    wanted = set(_NAME.findall(" ".join(queries))) | {one["alertname"] for one in case.get("alert_rule_test", ())}
    of_any_alert = any("ALERTS" in query and "alertname" not in query for query in queries)

    def is_wanted(rule: _Rule) -> bool:
        nonlocal of_any_alert
        if _name(rule) not in wanted and not (of_any_alert and "alert" in rule):
            return False
        words = _words(rule)
        of_any_alert |= "ALERTS" in words
        wanted.update(words)
        return True

    return _closure(rules, is_wanted)


def _closure(rules: Sequence[_Rule], belongs: Callable[[_Rule], bool]) -> frozenset[int]:
    """Indices of the rules that belong, when each may make others belong."""
    found: set[int] = set()
    while more := {index for index, rule in enumerate(rules) if index not in found and belongs(rule)}:
        found |= more
    return frozenset(found)
