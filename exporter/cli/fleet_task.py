"""What a report of a fleet is asked for: from flags, with all mistakes at once, to a task without one."""

import argparse
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from exporter.cli.focus import FOCUS_FLAGS
from exporter.config.prometheus_options import PROMETHEUS_OPTIONS, PrometheusSettings, prometheus_settings
from exporter.errors import ConfigError
from exporter.report.fleet.costs import dimensions_of
from exporter.report.fleet.reprice import REPRICE_DIMENSIONS
from exporter.report.fleet.values import DIMENSIONS, LABEL, Dimension, Filters, Window, label_problem, too_many_labels
from exporter.report.fleet.windows import parse_window
from exporter.report.focus import FOCUS_DIMENSIONS

_SAME: dict[str, Dimension] = {"node pool": "pool", "node-pool": "pool", "node_pool": "pool", "nodepool": "pool"}
_OF_ORIGINS: frozenset[Dimension] = frozenset({"cluster", "node", "pool", "model"})
"""By which FOCUS may be filtered: others would leave out parts of a split charge, which then does not add up."""
_ADDRESS = next(option for option in PROMETHEUS_OPTIONS if option.key == "prometheus")
_SHOWN_WHOLE = ("csv", "json", "focus")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is asked for, without a mistake."""

    window: Window
    by: tuple[Dimension, ...]
    filters: Filters
    dimensions: frozenset[Dimension]
    """What the ledger must be read by."""
    prometheus: PrometheusSettings | None
    store: Path | None
    """One of the two is there."""


def settle_task(namespace: argparse.Namespace, given: Iterable[str], now: float) -> Task:
    """The task; ``given`` are mistakes that are known already.

    Raises:
        ConfigError: With all mistakes at once.
    """
    problems = list(given)
    by = _by("namespace" if namespace.by is None else namespace.by, problems)
    filters = read_filters(namespace.filter or (), problems)
    problems += _contradictions(namespace, filters)
    written = "30d" if namespace.window is None else namespace.window
    window = or_problems(lambda: parse_window(written, now, namespace.timezone or UTC), problems, prefix="--")
    prometheus = None
    if namespace.prometheus or os.environ.get(_ADDRESS.env):
        prometheus = or_problems(lambda: prometheus_settings(namespace, os.environ), problems)
    elif namespace.store is None:
        problems.append(
            "report: nothing says where to read; give --prometheus URL or --store FILE for a fleet, --agent URL for one"
            " node"
        )
    if problems or window is None:
        raise ConfigError(*problems)
    wanted = FOCUS_DIMENSIONS if namespace.format == "focus" else dimensions_of(by)
    return Task(
        window=window,
        by=by,
        filters=filters,
        dimensions=wanted | REPRICE_DIMENSIONS if namespace.price_book else wanted,
        prometheus=prometheus,
        store=namespace.store,
    )


def or_problems(make: Callable[[], _T], problems: list[str], prefix: str = "") -> _T | None:
    """What it makes, or ``None``, and its mistakes among ``problems``."""
    try:
        return make()
    except ConfigError as error:
        problems += [f"{prefix}{problem}" for problem in error.problems]
        return None


def _by(text: str, problems: list[str]) -> tuple[Dimension, ...]:
    found = [_dimension(name, "--by", problems) for name in text.split(",")]
    known = [name for name in found if name is not None]
    problems += [f"--by: {name} is named twice" for name in sorted({name for name in known if known.count(name) > 1})]
    problems += too_many_labels("--by", known)
    return tuple(known)


def _dimension(name: str, flag: str, problems: list[str]) -> Dimension | None:
    if name.strip().startswith(LABEL):
        if problem := label_problem(name.strip()):
            problems.append(f"{flag}: value '{name.strip()}' {problem}")
            return None
        return name.strip()
    written = name.strip().lower()
    found = _SAME.get(written) or (written if written in DIMENSIONS else None)
    if found is None:
        if written == "owner":
            hint = "; a fleet's owners are told apart by workload, or workload,model,mode"
        else:
            close = get_close_matches(written, DIMENSIONS, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
        problems.append(
            f"{flag}: value '{name.strip()}' is no dimension; allowed: {', '.join(DIMENSIONS)}, label:KEY{hint}"
        )
    return found


def read_filters(texts: Iterable[str], problems: list[str]) -> Filters:
    """What ``--filter`` asks for, each text as ``DIMENSION=VALUE,...``; its mistakes among ``problems``."""
    wanted: dict[Dimension, frozenset[str]] = {}
    for text in texts:
        name, separator, values = text.partition("=")
        if not separator:
            problems.append(f"--filter: value '{text}' has no =; allowed: DIMENSION=VALUE,..., as namespace=ml,vision")
            continue
        dimension = _dimension(name, "--filter", problems)
        if dimension in wanted:
            problems.append(f"--filter: {dimension} is named twice; give all its values at once, separated by commas")
        elif dimension is not None:
            wanted[dimension] = frozenset(value.strip() for value in values.split(","))
    problems += too_many_labels("--filter", wanted)
    return Filters(wanted=wanted)


def _contradictions(namespace: argparse.Namespace, filters: Filters) -> Iterator[str]:
    if namespace.share_unallocated and namespace.share_idle in {None, "none"}:
        yield "--share-unallocated: says what is spread, not how; give --share-idle even or weighted, too"
    if namespace.top is not None and namespace.format in _SHOWN_WHOLE:
        yield f"--top: {namespace.format} has every line, so that it adds up; leave it out, or take table or html"
    if namespace.format != "focus":
        for flag in FOCUS_FLAGS:
            if getattr(namespace, flag) is not None:
                yield f"--{flag.replace('_', '-')}: does nothing without --format focus; give both"
        return
    for flag in ("by", "share_idle", "share_unallocated"):
        if getattr(namespace, flag) is not None:
            name = flag.replace("_", "-")
            yield f"--{name}: FOCUS settles what its rows are; leave it out, or take another format"
    for dimension in sorted(set(filters.wanted) - _OF_ORIGINS):
        yield (
            f"--filter: {dimension} would leave out parts of split charges, which then do not add up; with --format"
            f" focus allowed: {', '.join(sorted(_OF_ORIGINS))}"
        )
