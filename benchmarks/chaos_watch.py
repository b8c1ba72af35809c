"""Runs the real agent through a scenario's faults and holds the page of every second to the truth."""

import argparse
import math
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from exporter.simulator import scenario
from exporter.simulator.scenario import Scenario
from exporter.simulator.truth import NodeTruth

ALLOWED_RATIO = 0.15
"""So much lower than the truth may an activity be before it is a false idle."""
SAMPLE_LAG_SECONDS = 3.5
KUBELET_LAG_SECONDS = 7.0
"""One kubelet interval of five seconds and what the answer takes to be seen; after a fault twice that."""
RECOVERY_SECONDS = 45.0
"""The driver's child may be in its longest back-off of 30 seconds when a fault ends."""

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(kw_only=True)
class Watch:
    """What was seen so far."""

    scenario: Scenario
    epoch_seconds: float
    wrong: Counter[str] = field(default_factory=Counter)
    last_fault: float = 0.0
    faulty: frozenset[str] = frozenset({"start"})
    recovered: bool = False

    def __post_init__(self) -> None:
        """Begin as behind a fault."""
        self.last_fault = self.epoch_seconds

    def look(self, page: str, now: float) -> None:
        """Hold one page to the truth."""
        series = self._parse(page)
        moments = [self.truth(now - back / 4) for back in range(int(4 * SAMPLE_LAG_SECONDS) + 1)]
        self._activity(series, moments, now)
        self._holders(series, now)
        self._recovery(series, now)

    def truth(self, now: float) -> NodeTruth:
        """The node at a Unix time."""
        return self.scenario.at(now - self.epoch_seconds)

    def note(self, what: str, now: float) -> None:
        """Count a mistake, and show its first and every tenth instance."""
        kind = what.partition(":")[0]
        self.wrong[kind] += 1
        if self.wrong[kind] % 10 == 1:
            print(f"{now - self.epoch_seconds:7.1f}  WRONG {what}", flush=True)

    def _parse(self, page: str) -> Series:
        series: Series = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                if key in series:
                    raise ValueError(f"duplicate series {key}")
                if math.isnan(sample.value):
                    raise ValueError(f"NaN in {key}")
                series[key] = sample.value
        return series

    def _activity(self, series: Series, moments: list[NodeTruth], now: float) -> None:
        least: dict[tuple[str, str], float] = {}
        for number, truth in enumerate(moments):
            loads = dict(_loads(truth))
            # A pod that was not there yet did nothing.
            keys = loads if not number else least
            least = {key: min(least.get(key, 1.0), loads.get(key, 0.0)) for key in keys}
        for name, carried, value in rows(series, "gpu_activity_ratio", "gpu_pod_activity_ratio"):
            key = carried["uuid"], carried.get("pod_name", "")
            if carried["source"] != "estimated" and value < least.get(key, 0.0) - ALLOWED_RATIO:
                self.note(f"false idle {name}: {key} {value:.2f}, truth at least {least[key]:.2f}", now)
            if not 0 <= value <= 1:
                self.note(f"ratio: {key} {value}", now)

    def _holders(self, series: Series, now: float) -> None:
        shown = {
            (carried["uuid"], carried["pod_namespace"], carried["pod_name"])
            for _, carried, _ in rows(series, "gpu_pod_info")
        }
        recent = [self.truth(now - back / 2) for back in range(int(2 * KUBELET_LAG_SECONDS) + 1)]
        ever = {(one.device_uuid, one.namespace, one.pod) for truth in recent for one in truth.holders}
        always = set.intersection(*({(h.device_uuid, h.namespace, h.pod) for h in t.holders} for t in recent))
        if foreign := shown - {(h.device_uuid, h.namespace, h.pod) for t in self._long_ago(now) for h in t.holders}:
            self.note(f"never held: {foreign}", now)
        for _, carried, value in rows(series, "gpu_allocation_state"):
            if carried["state"] == "unallocated" and value and any(carried["uuid"] == one[0] for one in always):
                self.note(f"held, shown unallocated: {carried['uuid']}", now)
        if now - self.last_fault > 2 * KUBELET_LAG_SECONDS:
            if missing := always - shown:
                self.note(f"holder missing: {missing}", now)
            if extra := shown - ever:
                self.note(f"holder of before: {extra}", now)

    def _long_ago(self, now: float) -> list[NodeTruth]:
        return [self.truth(now - back) for back in range(75)]

    def _recovery(self, series: Series, now: float) -> None:
        truth = self.truth(now)
        faults = {fault.value for fault in truth.faults} | {gpu.fault.value for gpu in truth.gpus if gpu.fault}
        up = {carried["uuid"]: value for _, carried, value in rows(series, "gpu_up")}
        well = len(up) == len(truth.gpus) and all(up.values())
        if faults:
            self.last_fault, self.faulty, self.recovered = now, frozenset(faults), False
        elif well and not self.recovered:
            self.recovered = True
            after = f"{now - self.last_fault:.1f} s after {', '.join(sorted(self.faulty))}"
            print(f"{now - self.epoch_seconds:7.1f}  well {after}", flush=True)
        elif not well and now - self.last_fault > RECOVERY_SECONDS:
            self.note(f"not recovered: {up} after {self.faulty}", now)


def _loads(truth: NodeTruth) -> Iterator[tuple[tuple[str, str], float]]:
    """True activity by (device, pod); of the device itself where the pod is empty."""
    for gpu in truth.gpus:
        yield (gpu.uuid, ""), gpu.load.engine
        for part in gpu.instances:
            yield (part.uuid, ""), part.load.engine
    for one in truth.holders:
        yield (one.device_uuid, one.pod), one.activity_ratio


def rows(series: Series, *names: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Series of some metrics as (name, labels, value)."""
    return ((name, dict(carried), value) for (name, carried), value in series.items() if name in names)


def epoch_of(agent: "subprocess.Popen[bytes]") -> float:
    """When the scenario began: the agent's child has been told on its command line."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    while True:
        for child in children.read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_text().split("\0")
            if "--epoch" in words:
                return float(words[words.index("--epoch") + 1])
        time.sleep(0.1)


def scrape(url: str) -> str:
    """Get the page; any status but 200 is an error."""
    with urllib.request.urlopen(url, timeout=3) as answer:  # noqa: S310 - http to this machine
        return str(answer.read(), "utf-8")


def main() -> int:
    """Print what was wrong; 0 when nothing was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", default="chaos", help="a shipped scenario or a file (default chaos)")
    parser.add_argument("--seconds", type=float, default=690.0, help="how long (default 690: chaos once through)")
    parser.add_argument("agent_options", nargs="*", help="further options of the agent, after --")
    arguments = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "exporter", "agent", "--simulate", arguments.scenario, "--listen", address]
    with subprocess.Popen([*command, *arguments.agent_options]) as agent:
        try:
            watch = Watch(scenario=scenario.load(arguments.scenario), epoch_seconds=epoch_of(agent))
            pages = 0
            while (now := time.time()) < watch.epoch_seconds + arguments.seconds:
                try:
                    watch.look(scrape(f"http://{address}/metrics"), now)
                    pages += 1
                except (urllib.error.URLError, TimeoutError, ValueError) as error:
                    watch.note(f"page: {error!r}", now)
                time.sleep(max(0.0, now + 1 - time.time()))
        finally:
            agent.terminate()
    print(f"{pages} pages, mistakes: {dict(watch.wrong) or 'none'}")
    return 1 if watch.wrong or not pages else 0


if __name__ == "__main__":
    raise SystemExit(main())
