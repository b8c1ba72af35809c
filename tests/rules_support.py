"""Unit tests of rules, and rules of the ledger evaluated in virtual time."""

import http.client
import json
import math
import re
import sys
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from corpus_support import seconds
from files_support import read_yaml
from fleet_support import END_SECONDS, SMALL_FLEET, prometheus, victoria

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from remote_write import Sender, encode_labels, encode_samples  # noqa: E402 - lies in a folder of scripts

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_FROM_NOTHING = re.compile(r"__name__|\babsent|\bvector\(|\btime\(\)|\bALERTS\b")
"""Expressions with one of these may have a value for any series."""
_PARTS = ("alert_rule_test", "promql_expr_test")
_Rule = Mapping[str, Any]


def relevant(path: Path, folder: Path, *, thorough: bool = False) -> tuple[Path, ...]:
    """Write copies of a file of unit tests with only the rules that its cases can observe.

    Every evaluation costs every rule, and most cases need a few: those between a series of the case and its queries.
    One engine is tested thoroughly. Others can only differ in an expression. For them, each alert fires, is silent
    and is silent again in at least one case, and each query has its answer.

    Args:
        path: File of the unit tests, in the form of promtool.
        folder: Folder for the copies and their rules.
        thorough: Keep all cases, and each rule that reads a series of the case: its evaluation can fail.

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
    """Return whether one case is a longer version of another."""
    return case["input_series"] is other["input_series"] and len(_checks(case)) > len(_checks(other))


def _results(case: _Rule) -> set[tuple[str, str]]:
    """Return the states of alerts in order: silent, firing, silent again; for queries: none, a result, none again."""
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
    """Return the names of the series that a rule and its texts read, and other words."""
    return set(_NAME.findall(" ".join([rule["expr"], *rule.get("annotations", {}).values()])))


def _alive(rules: Sequence[_Rule], case: Mapping[str, Any]) -> frozenset[int]:
    """Return the rules that may have a value if the series of a case are the only ones."""
    there = {_NAME.match(one["series"]).group() for one in case.get("input_series", ())}  # type: ignore[union-attr]

    def has_value(rule: _Rule) -> bool:
        if not (there & _words(rule) or _FROM_NOTHING.search(rule["expr"])):
            return False
        there.add(_name(rule))
        return True

    return _closure(rules, has_value)


def _asked(rules: Sequence[_Rule], case: Mapping[str, Any]) -> frozenset[int]:
    """Return the rules with a value that a case queries, and those that these read."""
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
    """Return the indices of all rules that belong, where each can make others belong."""
    found: set[int] = set()
    while more := {index for index, rule in enumerate(rules) if index not in found and belongs(rule)}:
        found |= more
    return frozenset(found)


RULES = ROOT / "rules" / "src" / "ledger.yaml"
EPOCH_SECONDS = float(END_SECONDS)
"""A full hour."""
HOUR, TURN, SCRAPE = 3600.0, 300.0, 30.0
RECORDED_FROM, RECORDED_BY = 300.0, 1200.0
"""Seconds after the end of an hour between which it is recorded."""
FOREVER = math.inf
MEASURES = {"seconds": 1.0, "cost": 0.0005, "energy_joules": 300.0, "unpriced_seconds": 0.25}
"""Increase of a ledger in a second of an owner. The real ones exclude each other; rules do not depend on it."""
OWN_LABELS = {"seconds": {"state": "idle"}, "cost": {"state": "idle", "currency": "USD"}}
Spans = tuple[tuple[float, float], ...]


def within(spans: Spans, at: float) -> bool:
    """Return whether a moment is in one of the spans."""
    return any(begin <= at < end for begin, end in spans)


@dataclass(frozen=True, slots=True)
class Owner:
    """A holder of GPUs between two instants, in seconds since the epoch of a run."""

    name: str
    begin: float = 0.0
    end: float = FOREVER
    gpus: float = 1.0
    pause: tuple[float, float] = (0.0, 0.0)
    """Time in which another ledger counts."""

    def seconds(self, at: float) -> float | None:
        """Return the GPU-seconds by a moment; None before the first ones."""
        if at <= self.begin:
            return None
        reached = min(at, self.end)
        paused = max(0.0, min(reached, self.pause[1]) - self.pause[0])
        return self.gpus * (reached - self.begin - paused)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The counters of an identity, and the targets and times that show it."""

    identity: str
    owners: tuple[Owner, ...]
    shown: Mapping[str, Spans]
    created: float = 1.0
    node: str = "n1"
    age_seconds: Mapping[str, float] = field(default_factory=dict)
    """Age of the values of a target."""

    def value(self, owner: Owner, at: float) -> float | None:
        """Return the GPU-seconds of an owner."""
        return owner.seconds(at) if at >= self.created else None


@dataclass(frozen=True, slots=True)
class World:
    """Ledgers by cluster: each cluster is a separate case, so that one run has many."""

    clusters: Mapping[str, tuple[Ledger, ...]]
    measures: tuple[str, ...] = ("seconds",)

    def series(self, at: float) -> Iterator[tuple[dict[str, str], float]]:
        """Yield the scraped series at a moment."""
        for cluster, ledgers in self.clusters.items():
            for ledger in ledgers:
                for target, spans in ledger.shown.items():
                    if within(spans, at):
                        shown = at - ledger.age_seconds.get(target, 0.0)
                        yield from self._page(cluster, ledger, target, shown)

    def _page(self, cluster: str, ledger: Ledger, target: str, at: float) -> Iterator[tuple[dict[str, str], float]]:
        base = {"cluster": cluster, "instance": target, "ledger": ledger.identity, "node": ledger.node}
        yield {"__name__": "gpu_ledger_created_timestamp_seconds", **base}, EPOCH_SECONDS + ledger.created
        for owner in ledger.owners:
            seconds = ledger.value(owner, at)
            if seconds is not None:
                who = {"workload_kind": "Job", "workload_name": owner.name, "model": "H100", "mode": "exclusive"}
                for measure in self.measures:
                    name, own = f"gpu_ledger_{measure}_total", OWN_LABELS.get(measure, {})
                    yield {"__name__": name, **base, **who, **own}, seconds * MEASURES[measure]


class Recorder:
    """Scrapes and evaluates, with one connection for each direction."""

    def __init__(self, url: str, *, shows_late: bool, flush: str = "") -> None:
        self.url = url
        address = urllib.parse.urlsplit(url)
        self._sender = Sender(url)
        self._questions = http.client.HTTPConnection(str(address.hostname), int(address.port or 0), timeout=60)
        self._shows_late = shows_late
        self._flush = flush
        self._encoded: dict[tuple[tuple[str, str], ...], bytes] = {}
        groups = read_yaml(RULES.read_text(encoding="utf-8"))["groups"]
        self._groups: dict[float, list[tuple[str, str]]] = {
            60.0 * int(group["interval"].removesuffix("m")): [(rule["record"], rule["expr"]) for rule in group["rules"]]
            for group in groups
        }
        assert len(self._groups) == len(groups)

    @property
    def intervals(self) -> tuple[float, ...]:
        """Return the seconds between the turns of each group."""
        return tuple(self._groups)

    def query(self, expression: str, at: float) -> list[tuple[dict[str, str], float]]:
        """Return the rows of an instant query."""
        return [(row["metric"], float(row["value"][1])) for row in self._ask(expression, at)]

    def samples(self, selector: str, at: float) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Return the series of a range selector, with Unix times and values."""
        return [
            (row["metric"], [(float(moment), float(text)) for moment, text in row["values"]])
            for row in self._ask(selector, at)
        ]

    def _ask(self, expression: str, at: float) -> list[dict[str, Any]]:
        form = urllib.parse.urlencode({"query": expression, "time": f"{EPOCH_SECONDS + at:.3f}", "nocache": "1"})
        head = {"Content-Type": "application/x-www-form-urlencoded"}
        self._questions.request("POST", "/api/v1/query", form, head)
        answer = json.load(self._questions.getresponse())
        assert answer["status"] == "success", answer
        assert not answer.get("warnings"), answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def write(self, rows: Sequence[tuple[dict[str, str], float]], at: float) -> None:
        """Store samples."""
        for labels, value in rows:
            series = tuple(labels.items())
            encoded = self._encoded[series] = self._encoded.get(series) or encode_labels(labels)
            self._sender.add(encoded, encode_samples([round((EPOCH_SECONDS + at) * 1000)], [value]))

    def evaluate(self, interval: float, at: float, rules: int | None = None) -> None:
        """Evaluate a group once, as an engine that shows its records at once, or after the turn.

        Args:
            interval: Interval of the group.
            at: Time since the epoch of a run.
            rules: Number of rules after which the server stops.
        """
        self.settle()
        for name, expression in self._groups[interval][:rules]:
            rows = [({**labels, "__name__": name}, value) for labels, value in self.query(expression, at)]
            self.write(rows, at)
            if not self._shows_late:
                self.settle()
        self.settle()

    def close(self) -> None:
        """Close both connections."""
        self._sender.close()
        self._questions.close()

    def settle(self) -> None:
        """Make written samples visible to queries."""
        self._sender.flush()
        if self._flush:
            self._questions.request("GET", self._flush)
            self._questions.getresponse().read()


@dataclass(frozen=True, slots=True)
class Run:
    """Length of a run, phase of the evaluations, and times without scrapes or evaluations."""

    hours: float
    phase: float = 0.0
    away: Spans = ()
    skipped: Spans = ()
    """Times without evaluations, but with scrapes."""
    unrecorded: Spans = ()
    """Times without evaluations of the group of the hours only."""
    cut: Spans = ()
    """Times in which the server stops in the middle of each turn that records an hour."""
    cut_after: int = 0
    """Number of rules that are stored in such a turn."""
    begins: float = -900.0

    def drive(self, world: World, recorder: Recorder) -> None:
        """Run through the time. Groups with a longer interval have another phase, as in Prometheus."""
        for at, interval in sorted(self._moments(recorder.intervals)):
            if interval == 0.0:
                if not within(self.away, at):
                    recorder.write(list(world.series(at)), at)
            elif not within((*self.away, *self.skipped, *(self.unrecorded if interval > TURN else ())), at):
                is_cut = interval > TURN and within(self.cut, at)
                recorder.evaluate(interval, at, self.cut_after if is_cut else None)

    def _moments(self, intervals: Sequence[float]) -> Iterator[tuple[float, float]]:
        """Yield the moments of scrapes (0) and of turns of a group (its interval)."""
        end = self.hours * HOUR
        yield from ((at, 0.0) for at in _every(SCRAPE, self.phase - 0.5, self.begins, end))
        for interval in intervals:
            phase = self.phase * interval / TURN
            yield from ((at, interval) for at in _every(interval, phase, self.begins, end))


def _every(seconds: float, phase: float, first: float, last: float) -> Iterator[float]:
    for number in range(math.ceil((first - phase) / seconds), math.floor((last - phase) / seconds) + 1):
        yield number * seconds + phase


@contextmanager
def engine(directory: Path, program: str) -> Iterator[Recorder]:
    """Run a recorder over an empty server; VictoriaMetrics shows the records of vmalert after the turn."""
    late = program.startswith("victoria")
    with ExitStack() as stack:
        if late:
            server = stack.enter_context(victoria(directory, None, SMALL_FLEET, program=program))
        else:
            option = "--web.enable-remote-write-receiver"
            server = stack.enter_context(
                prometheus(directory, directory / "blocks", SMALL_FLEET, option, program=program)
            )
        recorder = Recorder(server.url, shows_late=late, flush="/internal/force_flush" if late else "")
        yield stack.enter_context(closing(recorder))


def hours_of(recorder: Recorder, name: str, end: float) -> dict[tuple[str, str], dict[int, float]]:
    """Return the recorded values, by cluster and owner, then by hour; rows of one owner are added up."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for hour in range(1, round(end / HOUR) + 1):
        at = hour * HOUR + RECORDED_BY - 0.001
        for labels, value in recorder.query(f"sum_over_time({name}[{RECORDED_BY - RECORDED_FROM:g}s])", at):
            key = labels.get("cluster", ""), labels.get("workload_name", "")
            assert "ledger" not in labels
            counted = found.setdefault(key, {})
            counted[hour] = counted.get(hour, 0.0) + value
    return found
