"""Measures the cost of the rules for a Prometheus with fleets of 100, 1,000 and 8,000 GPUs: time, series, memory."""

import argparse
import contextlib
import datetime as dt
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import remote_write
import yaml
from measure_rules import CPU, Cost, Figures, Meter, table
from remote_write import Prometheus, Sender, encode_labels, encode_samples
from rules_fleet import STEP_SECONDS, Fleet, Pattern, Series

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "rules" / "prometheus-rules.yaml"
SCRAPE_SECONDS = 30
LOOKBACK_SECONDS = 600
"""Written past of a series without lookbacks: rules read its newest value."""
WATCHED_SECONDS = 300
"""Groups with a longer interval do not run during the measurement: once a minute they would disturb the others."""
SETTLE_SECONDS, IDLE_SECONDS = 30, 60
RESIDENT = "process_resident_memory_bytes"
LEARNT_SECONDS = 9000
OFFSET_SECONDS = 1e6
"""Time that counters had counted before the first sample."""
SAMPLE_BYTES = 18
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_RANGE = re.compile(r"([a-z_:][\w:]*)\s*(?:\{[^}]*\})?\s*(?:\[([\dsmhdw]+)\])?(?:\s*offset\s+([\dsmhdw]+))?")


def seconds(duration: str) -> float:
    """Return the seconds of a PromQL duration such as ``1h30m``."""
    return sum(int(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)(ms|[smhdw])", duration))


def lookbacks(rules: list[dict[str, Any]]) -> dict[str, float]:
    """Return the longest lookback of the rules on each metric, in seconds: range and offset."""
    furthest: dict[str, float] = defaultdict(float)
    for rule in rules:
        outer = max((seconds(text) for text in re.findall(r"\[([\dsmhdw]+):", rule["expr"])), default=0.0)
        for name, window, offset in _RANGE.findall(rule["expr"]):
            furthest[name] = max(furthest[name], seconds(window) + seconds(offset) + outer)
    return furthest


class Feeder:
    """Writes samples up to the present: those of the fleet, and those of ``recorded`` while it has series."""

    def __init__(self, fleet: Fleet, sender: Sender, begins: Mapping[str, float], *, epoch: int, now: float) -> None:
        self._fleet = fleet
        self._sender = sender
        self._epoch = epoch
        self._begins = begins
        self._default = now - LOOKBACK_SECONDS
        self.recorded: list[Series] = []
        self.every: Mapping[str, int] = {}
        """Seconds between the samples of recorded series, by name."""
        self.reached = grid(min(begins.values(), default=self._default))
        self.samples = 0

    def feed(self, until: float) -> None:
        """Write all due scrapes, in slices of time, so that times ascend for the server."""
        while self.reached + SCRAPE_SECONDS <= until:
            end = min(self.reached // STEP_SECONDS * STEP_SECONDS + STEP_SECONDS, grid(until) + SCRAPE_SECONDS)
            self._slice(range(self.reached, end, SCRAPE_SECONDS))
            self.reached = end

    def _slice(self, times: range) -> None:
        blobs: dict[tuple[Pattern, int], bytes] = {}
        for metric, labels, pattern in itertools.chain(self._fleet.series(times[0]), self.recorded):
            if self._begins.get(metric, self._default) >= times.stop:
                continue
            key = pattern, self.every.get(metric, SCRAPE_SECONDS)
            if key not in blobs:
                chosen = [at for at in times if at % key[1] == 0]
                blobs[key] = encode_samples([at * 1000 for at in chosen], self.values(pattern, chosen))
            self._sender.add(labels, blobs[key])
            self.samples += len(blobs[key]) // SAMPLE_BYTES
        self._sender.flush()

    def values(self, pattern: Pattern, times: Sequence[int]) -> Iterator[float]:
        """Yield the values of a pattern at Unix times."""
        shape, size = pattern
        random = Random(f"{pattern}{times[0] if times else 0}")  # noqa: S311 - the same values each time
        for at in times:
            if shape == "ramp":  # scrapes are never exactly on time
                yield size * (at - self._epoch + OFFSET_SECONDS + random.random())
            elif shape == "noise":
                yield size * random.uniform(0.9, 1.1)
            else:
                yield float(at) if shape == "clock" else size


def grid(at: float) -> int:
    """Return the time of the scrape before a time."""
    return int(at) // SCRAPE_SECONDS * SCRAPE_SECONDS


def learn(
    fleet: Fleet,
    groups: list[dict[str, Any]],
    every: Mapping[str, int],
    back: Mapping[str, float],
    program: str,
    epoch: int,
) -> list[Series]:
    """Return recorded series that other rules look back on, with labels and values, from a server with a short past.

    Their past is written together with the fleet's, and not afterwards: samples out of order are slow to read.
    """
    found: list[Series] = []
    with serving(program) as (_, prometheus):
        sender = Sender(prometheus.url)
        feeder = Feeder(fleet, sender, {}, epoch=epoch, now=time.time())
        while feeder.reached + SCRAPE_SECONDS <= time.time():
            feeder.feed(time.time())
        for rule in (rule for group in groups for rule in group["rules"] if "record" in rule):
            now, step = feeder.reached - SCRAPE_SECONDS, every[rule["record"]]
            length = int(min(back[rule["record"]], LEARNT_SECONDS))
            times = range(now - length // step * step, now + 1, step)
            for found_labels, value in prometheus.query(at_any_time(rule["expr"]), now):
                counts = "_total" in rule["record"]
                pattern = Pattern("ramp", value / (now - epoch + OFFSET_SECONDS)) if counts else Pattern("level", value)
                labels = encode_labels({**found_labels, **rule.get("labels", {}), "__name__": rule["record"]})
                sender.add(labels, encode_samples([at * 1000 for at in times], feeder.values(pattern, times)))
                if back[rule["record"]]:
                    found.append(Series(rule["record"], labels, pattern))
            sender.flush()
    return found


@contextlib.contextmanager
def serving(program: str) -> Iterator[tuple[Path, Prometheus]]:
    """Run an empty Prometheus that accepts remote writes; yield the folder of its rules, and its API."""
    with tempfile.TemporaryDirectory(prefix="rules-cost-") as name:
        rules = Path(name) / "rules"
        rules.mkdir()
        window = "storage: {tsdb: {out_of_order_time_window: 3h}}"
        config = f"global: {{evaluation_interval: 30s}}\nrule_files: [{rules}/*.yaml]\n{window}\n"
        data = Path(name) / "data"
        with remote_write.serving(data, config, "--web.enable-lifecycle", program=program) as prometheus:
            yield rules, prometheus


def measure(gpus: int, hours: float, arguments: argparse.Namespace) -> Figures:
    """Measure one fleet: history, then the rules for some minutes with further samples."""
    document = yaml.safe_load(arguments.rules.read_text(encoding="utf-8"))
    groups: list[dict[str, Any]] = document["groups"]
    back = lookbacks([rule for group in groups for rule in group["rules"]])
    fleet = Fleet(gpus, arguments.ended_owners)
    count = sum(1 for _ in fleet.series(int(time.time())))
    figures = Figures(
        gpus=fleet.gpus,
        pods=fleet.pods,
        workloads=fleet.workloads,
        series=count,
        history_hours=hours,
        intervals={group["name"]: seconds(group.get("interval", "30s")) for group in groups},
    )
    begun = time.time()
    every = {
        rule["record"]: int(figures.intervals[group["name"]])
        for group in groups
        for rule in group["rules"]
        if "record" in rule
    }
    recorded = learn(fleet, groups, every, back, arguments.prometheus, grid(begun))
    say(f"{fleet.gpus} GPUs: rules look back on {len(recorded)} recorded series")
    with serving(arguments.prometheus) as (rules, prometheus):
        sender = Sender(prometheus.url)
        begins = {name: begun - min(back[name], hours * 3600) - LOOKBACK_SECONDS for name in back}
        feeder = Feeder(fleet, sender, begins, epoch=grid(begun), now=begun)
        feeder.recorded, feeder.every = recorded, every
        while feeder.reached + SCRAPE_SECONDS <= time.time():
            feeder.feed(time.time())
        say(f"{fleet.gpus} GPUs: {feeder.samples / 1e6:.1f} M samples in {time.time() - begun:.0f} s")
        _run(feeder, SETTLE_SECONDS)
        before, since = prometheus.own(CPU)[0], time.time()
        _run(feeder, IDLE_SECONDS)
        figures.cores = (prometheus.own(CPU)[0] - before) / (time.time() - since)
        resident = prometheus.own(RESIDENT)[0]
        meter = Meter(prometheus)
        figures.garbage_cpu = meter.garbage_cpu
        for group in groups:
            for place, rule in enumerate(group["rules"]):
                name = str(rule.get("record") or rule["alert"])
                cost = mean_cost(meter, rule["expr"], figures.intervals[group["name"]])
                figures.costs[group["name"], place, name] = cost
                feeder.feed(time.time())
        feeder.recorded = []
        watched = [group for group in groups if figures.intervals[group["name"]] <= WATCHED_SECONDS]
        (rules / "rules.yaml").write_text(yaml.safe_dump({"groups": watched}), encoding="utf-8")
        prometheus.reload()
        _run(feeder, arguments.minutes * 60)
        figures.resident = resident, prometheus.own(RESIDENT)[0]
        figures.recorded = prometheus.by('count({__name__=~".+:.+"})').get("", 0.0)
        figures.alerts = prometheus.by("count(ALERTS)").get("", 0.0)
        ran = (rule for group in prometheus.groups() for rule in group["rules"])
        figures.errors |= {f"{rule['name']}: {rule['lastError']}" for rule in ran if rule.get("lastError")}
        if failed := prometheus.own("prometheus_rule_evaluation_failures_total")[0]:
            figures.errors.add(f"{failed:.0f} evaluations failed")
    return figures


def at_any_time(expression: str) -> str:
    """Return an expression with a value now, from one that has a value once an hour."""
    return re.sub(r"and on \(\) \(?minute\(\).*", "", re.sub(r"\[(\d+m):1h\]", r"[\1:1m]", expression))


def mean_cost(meter: Meter, expression: str, interval: float) -> Cost:
    """Return the cost of one evaluation: the mean over an hour, if one evaluation in it is more expensive."""
    if "minute()" not in expression:
        return meter.cost(expression)
    hour, turns = time.time() // 3600 * 3600 - 3600, 3600 / interval
    rest, full = (meter.cost(expression, hour + after) for after in (1800, 600))
    return Cost(*((often * (turns - 1) + once) / turns for often, once in zip(rest, full, strict=True)))


def _run(feeder: Feeder, duration: float) -> None:
    """Continue the samples in real time."""
    end = time.time() + duration
    while time.time() < end:
        feeder.feed(time.time())
        time.sleep(5)


def say(text: str) -> None:
    """Print the progress, separately from the tables."""
    print(f"rules_cost: {dt.datetime.now(tz=dt.UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Measure each fleet and print the tables; return 1 if a rule failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[100, 1000, 8000], help="sizes of the fleets")
    parser.add_argument("--minutes", type=float, default=4, help="minutes of measurement for each (default 4)")
    parser.add_argument(
        "--history-hours",
        type=float,
        nargs="+",
        default=[26],
        help="longest written past, per fleet (default 26)",
    )
    parser.add_argument("--ended-owners", type=int, default=10, help="ended jobs in the ledgers, per slot (default 10)")
    parser.add_argument("--rules", type=Path, default=RULES, help="rules file")
    parser.add_argument("--prometheus", default="prometheus", help="program to measure, such as prometheus-3")
    arguments = parser.parse_args()
    os.environ["PATH"] = f"{ROOT / '.tools' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    version = subprocess.run([arguments.prometheus, "--version"], check=True, capture_output=True, text=True).stdout
    print(f"{dt.datetime.now(tz=dt.UTC):%Y-%m-%d}, {os.cpu_count()} cores, {' '.join(version.split()[:3])}", flush=True)
    print(f"load average at the start {os.getloadavg()[0]:.1f}", flush=True)
    measured = []
    for place, gpus in enumerate(arguments.gpus):
        hours = arguments.history_hours[min(place, len(arguments.history_hours) - 1)]
        measured.append(measure(gpus, hours, arguments))
        print(f"load average after {gpus:,} GPUs {os.getloadavg()[0]:.1f}", flush=True)
    print(table(measured))
    errors = {error for one in measured for error in one.errors}
    for error in sorted(errors):
        print(f"rule failed: {error}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
