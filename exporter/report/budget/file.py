"""Budgets from their file, read so that every mistake is told at once with its line and key."""

from pathlib import Path
from typing import get_args

import yaml

from exporter.config.currencies import CURRENCIES
from exporter.config.yaml_fields import Fields, compose
from exporter.errors import ConfigError
from exporter.report.budget.values import Budget, Period
from exporter.report.fleet.values import LABEL, Dimension, label_problem, too_many_labels

PERIODS: tuple[Period, ...] = get_args(Period)
OWNERS: tuple[Dimension, ...] = ("cluster", "namespace", "team")
"""What a budget can be for, besides ``label:KEY``."""
_DEFAULT_THRESHOLDS = (0.5, 0.8, 1.0)
_MOST_BYTES, _MOST_BUDGETS, _MOST_THRESHOLDS, _MOST_PARTS = 1 << 20, 2000, 20, 10
_LEAST_AMOUNT, _MOST_AMOUNT = 0.01, 1e15
_THRESHOLDS = f"a list of 1 to {_MOST_THRESHOLDS} parts of the amount, such as 0.8 or 80%"
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def load(path: Path) -> tuple[Budget, ...]:
    """The budgets of a file, in its order.

    Raises:
        ConfigError: With all mistakes at once: file, line, budget, key, what is wrong and what is allowed.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"budgets: {path} is larger than {_MOST_BYTES >> 20} MiB; give a file of budgets")
        text = content.decode()
    except OSError as error:
        raise ConfigError(f"budgets: cannot read {path}: {error.strerror}; allowed: a readable YAML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"budgets: {path} is not UTF-8 text; allowed: a YAML file") from None
    return parse(text, str(path))


def parse(text: str, path: str) -> tuple[Budget, ...]:
    """Budgets from the text of a file; ``path`` is for messages.

    Raises:
        ConfigError: With all mistakes at once.
    """
    root, problem = compose(text, path)
    if problem:
        raise ConfigError(problem)
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: no budgets; allowed: the key budgets with a list below it (see docs/budgets.md)")
    problems: list[str] = []
    top = Fields(root, path, "", problems)
    budgets = _budgets(top)
    top.finish()
    if problems:
        raise ConfigError(*problems)
    return budgets


def _budgets(top: Fields) -> tuple[Budget, ...]:
    node = top.take("budgets")
    if not isinstance(node, yaml.SequenceNode) or not 0 < len(node.value) <= _MOST_BUDGETS:
        top.problem("budgets", f"missing, empty, no list or too long; allowed: a list of 1 to {_MOST_BUDGETS} budgets")
        return ()
    found: list[Budget] = []
    lines: dict[str, int] = {}
    for number, item in enumerate(node.value, start=1):
        line = item.start_mark.line + 1
        if not isinstance(item, yaml.MappingNode):
            top.problems.append(f"{top.path}:{line}: budget {number}: not a mapping; allowed: keys with values")
            continue
        fields = Fields(item, top.path, f"budget {number}: ", top.problems)
        budget = _budget(fields)
        fields.finish()
        if budget is None:
            continue
        if budget.name in lines:
            fields.problem("name", f"'{budget.name}' is given twice, first in line {lines[budget.name]}; rename one")
        lines.setdefault(budget.name, line)
        found.append(budget)
    return tuple(found)


def _budget(fields: Fields) -> Budget | None:
    """One budget; ``None`` where something of it is missing, which is noted."""
    before = len(fields.problems)
    name = fields.take_text("name", needed=True)
    allowed = "an amount of money, 0.01 or more"
    amount = fields.take_number("amount", allowed, _LEAST_AMOUNT, _MOST_AMOUNT, needed=True)
    currency = fields.take_choice("currency", CURRENCIES, "an ISO 4217 code such as USD or EUR", needed=True)
    period = fields.take_choice("period", PERIODS, ", ".join(PERIODS), needed=True)
    owner = _owner(fields)
    thresholds = _thresholds(fields)
    word = fields.take_choice("include_unallocated", _WORDS, "true, false")
    with_unallocated = _WORDS.get(word or "false", False)
    if with_unallocated and owner.keys() - {"cluster"}:
        fields.problem(
            "include_unallocated",
            "nobody's GPUs belong to no namespace, team or label; allowed: for all, or for a cluster",
        )
    if len(fields.problems) > before or name is None or amount is None or currency is None:
        return None
    return Budget(
        name=name,
        currency=currency,
        amount=amount,
        period=next(known for known in PERIODS if known == period),
        owner=owner,
        thresholds=thresholds,
        include_unallocated=with_unallocated,
    )


def _owner(fields: Fields) -> dict[Dimension, str]:
    selector = fields.take_mapping("owner")
    if selector is None:
        return {}
    labels = [key for key in selector if key.startswith(LABEL)]
    for key in labels:
        if problem := label_problem(key):
            selector.problem(key, problem)
    fields.problems += too_many_labels(f"{selector.path}: {selector.place.rstrip(': ')}", labels)
    chosen = {key: selector.take_text(key, "one name, as reports show it") for key in (*OWNERS, *labels)}
    selector.finish()
    return {key: text for key, text in chosen.items() if text is not None}


def _thresholds(fields: Fields) -> tuple[float, ...]:
    node = fields.take("thresholds")
    if node is None:
        return _DEFAULT_THRESHOLDS
    if not isinstance(node, yaml.SequenceNode) or not 0 < len(node.value) <= _MOST_THRESHOLDS:
        fields.problem("thresholds", f"no list, empty or too long; allowed: {_THRESHOLDS}")
        return ()
    parts = [_part(item) for item in node.value]
    for item, part in zip(node.value, parts, strict=True):
        if part is None:
            shown = item.value if isinstance(item, yaml.ScalarNode) else "a list or mapping"
            fields.problem("thresholds", f"'{shown}' is none; allowed: {_THRESHOLDS}, at most {_MOST_PARTS}")
    return tuple(sorted({part for part in parts if part is not None}))


def _part(node: yaml.Node) -> float | None:
    """A part of the amount, from 0.01 to ``_MOST_PARTS``."""
    text = node.value.strip() if isinstance(node, yaml.ScalarNode) else ""
    try:
        value = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
    return value if _LEAST_AMOUNT <= value <= _MOST_PARTS else None
