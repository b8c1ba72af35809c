"""Evaluates the shipped rules of the ledger in virtual time: a real Prometheus answers, and stores the results."""

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from accuracy_day import OPENS_AT
from remote_write import Prometheus, Sender, encode_labels, encode_samples

RULES = Path(__file__).resolve().parents[1] / "rules" / "prometheus-rules.yaml"
GROUP, HOURS = "gpu-ledger", "gpu-ledger-hours"
INTERVAL_SECONDS, HOURS_INTERVAL_SECONDS = 300.0, 900.0
WANTED = ("owner:gpu_ledger:delta1h", "workload:gpu_ledger:delta1h", "cluster:gpu_capacity_seconds:delta1h")
_RECORDED = re.compile(r"\b[a-z_]+:[a-z0-9_:]+")
(STALE,) = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))
"""Value that Prometheus stores where a series is no longer in the result."""

Rule = Mapping[str, Any]
Span = tuple[float, float]
"""Start and end, in seconds since the day's start."""


def evaluate(server: Prometheus, spans: Sequence[Span], phase: float) -> None:
    """Evaluate the rules in the order of time, as Prometheus does, and store their results.

    Args:
        server: Has the samples of the whole day.
        spans: Times in which Prometheus runs. After a restart it has no state of former evaluations.
        phase: Seconds after a multiple of its interval at which the quicker group is evaluated. The other group has a
            phase in proportion to its interval.

    Raises:
        RuntimeError: Prometheus refuses the samples.
    """
    rules, hourly = needed(yaml.safe_load(RULES.read_text("utf-8"))["groups"], WANTED)
    plain = [rule for rule in rules if not _RECORDED.search(rule["expr"])]
    others = [rule for rule in rules if rule not in plain]
    sender = Sender(server.url)
    for first, last in spans:
        moments = [*times(first, last, INTERVAL_SECONDS, phase)]
        for rule in plain:
            _at_once(server, sender, rule, moments)
        later = times(first, last, HOURS_INTERVAL_SECONDS, phase * HOURS_INTERVAL_SECONDS / INTERVAL_SECONDS)
        before: dict[str, frozenset[bytes]] = {}
        for at, is_hourly in sorted([*((at, False) for at in moments), *((at, True) for at in later)]):
            for rule in hourly if is_hourly else others:
                before[rule["record"]] = _turn(server, sender, rule, at, before.get(rule["record"], frozenset()))


def _turn(server: Prometheus, sender: Sender, rule: Rule, at: float, before: frozenset[bytes]) -> frozenset[bytes]:
    """Evaluate a rule once; return the series of its result."""
    found = {_labels(rule, labels): value for labels, value in server.query(rule["expr"], OPENS_AT + at)}
    gone = dict.fromkeys(before - found.keys(), STALE)
    for series, value in {**found, **gone}.items():
        sender.add(series, encode_samples([_unix_ms(at)], [value]))
    sender.flush()
    return frozenset(found)


def _at_once(server: Prometheus, sender: Sender, rule: Rule, moments: Sequence[float]) -> None:
    """Evaluate a rule that reads no recorded series, at all its times."""
    span = OPENS_AT + moments[0], OPENS_AT + moments[-1]
    following = {_unix_ms(one): _unix_ms(other) for one, other in pairwise(moments)}
    for labels, values in server.range(rule["expr"], *span, INTERVAL_SECONDS):
        there = {round(at * 1000): value for at, value in values}
        ends = {following[at]: STALE for at in there if at in following and following[at] not in there}
        samples = sorted({**there, **ends}.items())
        sender.add(_labels(rule, labels), encode_samples(*zip(*samples, strict=True)))
    sender.flush()


def _unix_ms(at: float) -> int:
    return round((OPENS_AT + at) * 1000)


def _labels(rule: Rule, labels: Mapping[str, str]) -> bytes:
    return _encoded((*labels.items(), ("__name__", rule["record"])))


@lru_cache(maxsize=1 << 16)
def _encoded(labels: tuple[tuple[str, str], ...]) -> bytes:
    return encode_labels(dict(labels))


def times(first: float, last: float, interval: float, phase: float) -> Iterator[float]:
    """Yield the times at which a group is evaluated within a span."""
    at = first - first % interval + phase
    while at <= last:
        if at >= first:
            yield at
        at += interval


def needed(groups: Iterable[Mapping[str, Any]], wanted: Iterable[str]) -> tuple[list[Rule], list[Rule]]:
    """Return the rules of the ledger's two groups that produce the wanted series, in their order."""
    of_group = {group["name"]: group["rules"] for group in groups if group["name"] in {GROUP, HOURS}}
    by_name = {rule["record"]: rule for rules in of_group.values() for rule in rules}
    found, reads = set[str](), set(wanted)
    while reads - found:
        found |= reads
        reads = {name for one in found for name in _RECORDED.findall(by_name[one]["expr"])} & by_name.keys()
    quick, hourly = ([rule for rule in of_group[name] if rule["record"] in found] for name in (GROUP, HOURS))
    return quick, hourly
