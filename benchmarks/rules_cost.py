"""What the rules cost a Prometheus with fleets of 100, 1,000 and 8,000 GPUs: time, recorded series, memory."""

import argparse
import contextlib
import datetime as dt
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml
from measure_rules import Figures, Prometheus, table
from remote_write import Sender, encode_labels, encode_samples
from rules_fleet import STEP_SECONDS, Fleet, Pattern

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "rules" / "prometheus-rules.yaml"
SCRAPE_SECONDS = 30
LOOKBACK_SECONDS = 600
"""So much is written of a series that rules do not look back on: they read its newest value."""
FASTEST_SECONDS = 60
"""Groups with a longer interval run at this one, or few evaluations would be seen."""
REPLAYED_SECONDS = 9000
"""Recorded series that are looked back on for no longer have their true past; of others it is what they are now."""
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_RANGE = re.compile(r"([a-z_:][\w:]*)\s*(?:\{[^}]*\})?\s*(?:\[([\dsmhdw]+)\])?(?:\s*offset\s+([\dsmhdw]+))?")


def seconds(duration: str) -> float:
    """Seconds of a duration as PromQL writes it: ``1h30m``."""
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)(ms|[smhdw])", duration))


def lookbacks(rules: list[dict[str, Any]]) -> dict[str, float]:
    """How far back the rules look on each metric, in seconds; of what is recorded, its readers' look-back is added."""
    furthest: dict[str, float] = defaultdict(float)
    for rule in reversed(rules):
        outer = max((seconds(text) for text in re.findall(r"\[([\dsmhdw]+):", rule["expr"])), default=0.0)
        if "record" in rule and furthest[rule["record"]] <= REPLAYED_SECONDS:
            outer += furthest[rule["record"]]
        for name, window, offset in _RANGE.findall(rule["expr"]):
            furthest[name] = max(furthest[name], seconds(window) + seconds(offset) + outer)
    return furthest


class Feeder:
    """Writes the fleet's samples up to the clock."""

    def __init__(
        self, fleet: Fleet, sender: Sender, back: Mapping[str, float], limit_seconds: float, now: float
    ) -> None:
        self._fleet = fleet
        self._sender = sender
        self._epoch = self._grid(now)
        # A counter's look-back needs one sample before it.
        self._begins = {name: now - min(back[name], limit_seconds) - LOOKBACK_SECONDS for name in back}
        self._default = now - LOOKBACK_SECONDS
        self.reached = self._grid(min(self._begins.values(), default=self._default))
        self.samples = 0

    def feed(self, until: float) -> None:
        """Write all scrapes that are due; in time slices, so that the server sees time go forwards."""
        while self.reached + SCRAPE_SECONDS <= until:
            end = min(self.reached // STEP_SECONDS * STEP_SECONDS + STEP_SECONDS, self._grid(until) + SCRAPE_SECONDS)
            self._slice(range(self.reached, end, SCRAPE_SECONDS))
            self.reached = end

    def _slice(self, times: range) -> None:
        blobs: dict[Pattern, bytes] = {}
        for metric, labels, pattern in self._fleet.series(times[0]):
            if self._begins.get(metric, self._default) >= times.stop:
                continue
            if pattern not in blobs:
                blobs[pattern] = encode_samples([at * 1000 for at in times], self._values(pattern, times))
            self._sender.add(labels, blobs[pattern])
            self.samples += len(times)
        self._sender.flush()

    def _values(self, pattern: Pattern, times: range) -> Iterator[float]:
        shape, size = pattern
        random = Random(f"{pattern}{times[0]}")  # noqa: S311 - the same values each time
        for at in times:
            if shape == "ramp":  # scrapes are never quite on time
                yield size * (at - self._epoch + 1e6 + random.random())
            elif shape == "noise":
                yield size * random.uniform(0.9, 1.1)
            else:
                yield float(at) if shape == "clock" else size

    @staticmethod
    def _grid(at: float) -> int:
        return int(at) // SCRAPE_SECONDS * SCRAPE_SECONDS


def prefill(
    prometheus: Prometheus,
    sender: Sender,
    groups: list[dict[str, Any]],
    back: Mapping[str, float],
    intervals: Mapping[str, float],
) -> None:
    """Give recorded series the history that other rules look back on, in their order: one reads what another made."""
    for group in groups:
        every = int(intervals[group["name"]])
        for rule in (rule for rule in group["rules"] if "record" in rule):
            for labels, times, values in _past(prometheus, rule["expr"], int(back[rule["record"]]), every):
                names = {**labels, **rule.get("labels", {}), "__name__": rule["record"]}
                sender.add(encode_labels(names), encode_samples([at * 1000 for at in times], values))
            sender.flush()


def _past(
    prometheus: Prometheus, expression: str, length: int, every: int
) -> Iterator[tuple[dict[str, str], Sequence[int], list[float]]]:
    """Labels, times and values of an expression over so many seconds up to now, half an hour after half an hour."""
    now = int(time.time()) // every * every
    if length > REPLAYED_SECONDS:
        times = range(now - length, now + 1, every)
        for row in prometheus.query(expression, now):
            yield row["metric"], times, [float(row["value"][1])] * len(times)
        return
    for start in range(now - length // every * every, now + 1, STEP_SECONDS):
        for row in prometheus.query_range(expression, start, min(start + STEP_SECONDS - every, now), every):
            yield row["metric"], [int(at) for at, _ in row["values"]], [float(text) for _, text in row["values"]]


@contextlib.contextmanager
def serving(folder: Path, program: str) -> Iterator[tuple[int, Prometheus]]:
    """An empty Prometheus that takes remote writes, on a free port."""
    (folder / "rules").mkdir()
    window = "storage: {tsdb: {out_of_order_time_window: 30d}}"
    config = f"global: {{evaluation_interval: 30s}}\nrule_files: [{folder}/rules/*.yaml]\n{window}\n"
    (folder / "prometheus.yml").write_text(config, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [
        f"--web.listen-address=127.0.0.1:{port}",
        "--web.enable-remote-write-receiver",
        "--web.enable-lifecycle",
    ]
    command.append("--query.max-samples=500000000")  # for the past of recorded series, not for the rules
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    prometheus = Prometheus(port)
    try:
        deadline = time.monotonic() + 60
        while not prometheus.ready():
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{program} does not start: {(folder / 'log').read_text()[-500:]}")
            time.sleep(0.2)
        yield port, prometheus
    finally:
        process.terminate()
        process.wait(timeout=120)


def measure(gpus: int, arguments: argparse.Namespace) -> Figures:
    """One fleet: history, then the rules for some minutes while samples go on."""
    document = yaml.safe_load(arguments.rules.read_text(encoding="utf-8"))
    groups: list[dict[str, Any]] = document["groups"]
    back = lookbacks([rule for group in groups for rule in group["rules"]])
    fleet = Fleet(gpus, arguments.ended_owners)
    count = Counter(series.metric for series in fleet.series(int(time.time())))
    figures = Figures(
        gpus=fleet.gpus, pods=fleet.pods, workloads=fleet.workloads, series=count.total(), by_metric=count
    )
    for group in groups:
        figures.intervals[group["name"]] = seconds(group.get("interval", "30s"))
        group["interval"] = f"{int(min(figures.intervals[group['name']], FASTEST_SECONDS))}s"
    with tempfile.TemporaryDirectory(prefix="rules-cost-") as name, serving(Path(name), arguments.prometheus) as server:
        port, prometheus = server
        sender, begun = Sender(port), time.time()
        feeder = Feeder(fleet, sender, back, arguments.history_hours * 3600, begun)
        while feeder.reached + SCRAPE_SECONDS <= time.time():
            feeder.feed(time.time())
        say(f"{fleet.gpus} GPUs: {feeder.samples / 1e6:.1f} M samples in {time.time() - begun:.0f} s")
        _run(prometheus, feeder, 45)
        before = prometheus.own("process_cpu_seconds_total"), time.time()
        _run(prometheus, feeder, 60)
        idle = (prometheus.own("process_cpu_seconds_total") - before[0]) / (time.time() - before[1])
        resident = prometheus.own("process_resident_memory_bytes")
        prefill(prometheus, sender, groups, back, figures.intervals)
        say(f"{fleet.gpus} GPUs: recorded series have their past")
        (Path(name) / "rules" / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}), encoding="utf-8")
        prometheus.reload()
        _run(prometheus, feeder, 2.5 * FASTEST_SECONDS)  # the first evaluations meet cold caches
        before = prometheus.own("process_cpu_seconds_total"), time.time()
        _run(prometheus, feeder, arguments.minutes * 60, figures)
        busy = (prometheus.own("process_cpu_seconds_total") - before[0]) / (time.time() - before[1])
        figures.cores, figures.resident = (idle, busy), (resident, prometheus.own("process_resident_memory_bytes"))
        figures.recorded = _counts(prometheus, 'count by (__name__) ({__name__=~".+:.+"})', "__name__")
        figures.alerts = _counts(prometheus, "count by (alertname) (ALERTS)", "alertname")
        if failed := prometheus.own("prometheus_rule_evaluation_failures_total"):
            figures.errors.add(f"{failed:.0f} evaluations failed")
    return figures


def _run(prometheus: Prometheus, feeder: Feeder, duration: float, figures: Figures | None = None) -> None:
    """Go on with the samples as time passes, and look at the rules where ``figures`` are wanted."""
    seen: set[tuple[str, str]] = set()
    end = time.time() + duration
    while time.time() < end:
        feeder.feed(time.time())
        if figures is not None:
            figures.note(prometheus.groups(), seen)
        time.sleep(5)


def _counts(prometheus: Prometheus, expression: str, label: str) -> dict[str, int]:
    return {row["metric"][label]: int(row["value"][1]) for row in prometheus.query(expression)}


def say(text: str) -> None:
    """What goes on, apart from the tables."""
    print(f"rules_cost: {dt.datetime.now(tz=dt.UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Measure each fleet and print the tables; 1 when a rule could not be evaluated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[100, 1000, 8000], help="sizes of the fleets")
    parser.add_argument("--minutes", type=float, default=4, help="how long each is looked at (default 4)")
    parser.add_argument("--history-hours", type=float, default=26, help="longest past that is written (default 26)")
    parser.add_argument(
        "--ended-owners", type=int, default=10, help="ended jobs that ledgers keep, per slot (default 10)"
    )
    parser.add_argument("--rules", type=Path, default=RULES, help="rules file")
    parser.add_argument("--prometheus", default="prometheus", help="program to measure (prometheus-3 is one, too)")
    arguments = parser.parse_args()
    os.environ["PATH"] = f"{ROOT / '.tools' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    version = subprocess.run([arguments.prometheus, "--version"], check=True, capture_output=True, text=True).stdout
    print(f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}, {os.cpu_count()} cores, {' '.join(version.split()[:3])}", flush=True)
    print(f"load average at the start {os.getloadavg()[0]:.1f}", flush=True)
    measured = []
    for gpus in arguments.gpus:
        measured.append(measure(gpus, arguments))
        print(f"load average after {gpus:,} GPUs {os.getloadavg()[0]:.1f}", flush=True)
    print(table(measured))
    errors = {error for one in measured for error in one.errors}
    for error in sorted(errors):
        print(f"rule failed: {error}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
