"""The rules of the ledger in virtual time: pages are scraped, rules evaluated at any phase, over a real server."""

import http.client
import json
import math
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fleet_support import END_SECONDS, SMALL_FLEET, prometheus, victoria
from tests.yaml_support import read_yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

# ruff: noqa: E402 - the benchmarks are no package
from remote_write import Sender, encode_labels, encode_samples

RULES = ROOT / "rules" / "src" / "ledger.yaml"
EPOCH_SECONDS = float(END_SECONDS)
"""A full hour."""
HOUR, TURN, SCRAPE = 3600.0, 300.0, 30.0
RECORDED_FROM, RECORDED_BY = 300.0, 1200.0
"""An hour is recorded so many seconds after its end."""
FOREVER = math.inf
MEASURES = {"seconds": 1.0, "cost": 0.0005, "energy_joules": 300.0, "unpriced_seconds": 0.25}
"""What a ledger counts in a second of an owner. The real ones exclude each other; rules do not know."""
OWN_LABELS = {"seconds": {"state": "idle"}, "cost": {"state": "idle", "currency": "USD"}}
Spans = tuple[tuple[float, float], ...]


def within(spans: Spans, at: float) -> bool:
    """Whether a moment is in one of the spans."""
    return any(begin <= at < end for begin, end in spans)


@dataclass(frozen=True, slots=True)
class Owner:
    """One who holds GPUs from a moment to another; seconds since the epoch of a run."""

    name: str
    begin: float = 0.0
    end: float = FOREVER
    gpus: float = 1.0
    pause: tuple[float, float] = (0.0, 0.0)
    """When another ledger counts."""

    def seconds(self, at: float) -> float | None:
        """GPU-seconds by a moment; None before there were any."""
        if at <= self.begin:
            return None
        reached = min(at, self.end)
        paused = max(0.0, min(reached, self.pause[1]) - self.pause[0])
        return self.gpus * (reached - self.begin - paused)


@dataclass(frozen=True, slots=True)
class Ledger:
    """What an identity counts, and on which targets it is shown when."""

    identity: str
    owners: tuple[Owner, ...]
    shown: Mapping[str, Spans]
    created: float = 1.0
    node: str = "n1"
    age_seconds: Mapping[str, float] = field(default_factory=dict)
    """How old what a target shows is."""

    def value(self, owner: Owner, at: float) -> float | None:
        """GPU-seconds of an owner."""
        return owner.seconds(at) if at >= self.created else None


@dataclass(frozen=True, slots=True)
class World:
    """Ledgers by cluster: each cluster is a case of its own, so that one run holds many."""

    clusters: Mapping[str, tuple[Ledger, ...]]
    measures: tuple[str, ...] = ("seconds",)

    def series(self, at: float) -> Iterator[tuple[dict[str, str], float]]:
        """What scrapes find at a moment."""
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
    """Scrapes and evaluates; one connection each way."""

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
        """Seconds between the turns of each group."""
        return tuple(self._groups)

    def query(self, expression: str, at: float) -> list[tuple[dict[str, str], float]]:
        """Rows of an instant query."""
        return [(row["metric"], float(row["value"][1])) for row in self._ask(expression, at)]

    def samples(self, selector: str, at: float) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Series of a range selector, with Unix times and values."""
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
        """One turn of a group, as an engine takes it that shows what it records at once, or after the turn.

        Args:
            interval: Of the group.
            at: When, since the epoch of a run.
            rules: The server stops after so many of them.
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
        """Make what was written visible to queries."""
        self._sender.flush()
        if self._flush:
            self._questions.request("GET", self._flush)
            self._questions.getresponse().read()


@dataclass(frozen=True, slots=True)
class Run:
    """How long, at which phase the rules are evaluated, and when nothing is scraped or evaluated."""

    hours: float
    phase: float = 0.0
    away: Spans = ()
    skipped: Spans = ()
    """When no rule is evaluated, but scrapes go on."""
    unrecorded: Spans = ()
    """When of the two groups only that of the hours is not evaluated."""
    cut: Spans = ()
    """When the server stops in the middle of each turn that records an hour."""
    cut_after: int = 0
    """So many rules are stored in such a turn."""
    begins: float = -900.0

    def drive(self, world: World, recorder: Recorder) -> None:
        """Go through the time of a run. Groups that are evaluated less often have another phase, as in Prometheus."""
        for at, interval in sorted(self._moments(recorder.intervals)):
            if interval == 0.0:
                if not within(self.away, at):
                    recorder.write(list(world.series(at)), at)
            elif not within((*self.away, *self.skipped, *(self.unrecorded if interval > TURN else ())), at):
                is_cut = interval > TURN and within(self.cut, at)
                recorder.evaluate(interval, at, self.cut_after if is_cut else None)

    def _moments(self, intervals: Sequence[float]) -> Iterator[tuple[float, float]]:
        """When there is a scrape (0) or a turn of a group (its interval)."""
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
    """A recorder over an empty server; VictoriaMetrics shows what vmalert records after the turn."""
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
    """What was recorded, by cluster and owner, then by hour; rows of one owner are added up."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for hour in range(1, round(end / HOUR) + 1):
        at = hour * HOUR + RECORDED_BY - 0.001
        for labels, value in recorder.query(f"sum_over_time({name}[{RECORDED_BY - RECORDED_FROM:g}s])", at):
            key = labels.get("cluster", ""), labels.get("workload_name", "")
            assert "ledger" not in labels
            counted = found.setdefault(key, {})
            counted[hour] = counted.get(hour, 0.0) + value
    return found
