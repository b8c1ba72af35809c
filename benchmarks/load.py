"""Measures the effect of many, slow or odd clients on a second scraper, on the sampler and on the memory."""

import argparse
import http.client
import json
import math
import re
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from measure import percentile

SOURCE = Path(__file__).with_name("load_source.py")
sys.path.insert(0, str(SOURCE.parents[1] / "tests"))

from agent_support import AgentProcess, running_agent  # noqa: E402 - found among the tests
from service_support import make_certificates, web_file  # noqa: E402 - as above

SCRAPE_SECONDS, TIMEOUT_SECONDS = 0.1, 10.0
FLOOD = 10_000
_SAMPLE = re.compile(r"^gpu_exporter_sample_timestamp_seconds(?:\{.*\})? (\S+)$", re.MULTILINE)
MANY = tuple(f"127.0.{third}.{fourth}" for third in range(1, 5) for fourth in range(1, 251))
"""A thousand addresses."""
ELSEWHERE = ("--source", "127.0.9.9")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Clients of one kind, and their number."""

    name: str
    arguments: tuple[str, ...]
    """Arguments of each source."""
    count: int = FLOOD
    """Clients at a time, over all sources."""
    sources: int = 4
    rate: int = 2000
    """New clients a second, over all sources."""
    tls: bool = False
    descriptors: int | None = None
    """Limit of open files of the agent."""


SCENARIOS = (
    Scenario(name="quiet", arguments=("silent",), count=1, sources=1, rate=1),
    Scenario(name="50 scrapers, 1/s each, gzip", arguments=("scrapes", "--pause", "1"), count=50, sources=2),
    Scenario(name="50 scrapers without a pause, gzip", arguments=("scrapes",), count=50, sources=2),
    Scenario(name="200 slow readers", arguments=("slow", "--again"), count=200, sources=2, rate=100),
    Scenario(name="silent, the scraper's address", arguments=("silent", "--again")),
    Scenario(name="silent, 1,000 addresses", arguments=("silent", "--again", "--source", *MANY)),
    Scenario(name="half a request, the scraper's address", arguments=("begins", "--again")),
    Scenario(name="half a request, one other address", arguments=("begins", "--again", *ELSEWHERE)),
    Scenario(name="a header byte by byte, one other address", arguments=("drips", "--again", *ELSEWHERE)),
    Scenario(name="a page each, the scraper's address", arguments=("asks", "--again")),
    Scenario(
        name="a page each, one other address",
        arguments=("asks", "--again", *ELSEWHERE),
    ),
    Scenario(name="100 MB header line", arguments=("line", "--again"), count=8, sources=2),
    Scenario(name="100 MB of headers", arguments=("headers", "--again"), count=8, sources=2),
    Scenario(name="100 MB body", arguments=("body", "--again"), count=8, sources=2),
    Scenario(name="odd requests", arguments=("odd", "--again"), count=400, sources=2, rate=400),
    Scenario(name="silent, 256 descriptors", arguments=("silent", "--again"), descriptors=256),
    Scenario(name="TLS, quiet", arguments=("silent",), count=1, sources=1, rate=1, tls=True),
    Scenario(name="TLS, silent before the handshake", arguments=("begins", "--again", *ELSEWHERE), tls=True, rate=500),
    Scenario(name="TLS, half a handshake", arguments=("hello", "--again", *ELSEWHERE), tls=True, rate=500),
    Scenario(
        name="TLS, silent after the handshake", arguments=("silent", "--again", "--tls", *ELSEWHERE), tls=True, rate=500
    ),
)


class Results(NamedTuple):
    """Results of the scenario's clients, of a second scraper, and of the readings of the process."""

    outcomes: Counter[str]
    opened: int
    most_open: int
    latencies: list[float]
    failures: Counter[str]
    samples: list[float]
    rss_kib: int
    descriptors: int


def watch(agent: AgentProcess, context: ssl.SSLContext | None, sources: list[subprocess.Popen[str]]) -> Results:
    """Scrape with a new connection each, and read the process, until the sources have ended."""
    latencies, failures, samples = list[float](), Counter[str](), list[float]()
    url, process = f"http{'s' if context else ''}://localhost:{agent.port}/metrics", Path(f"/proc/{agent.process.pid}")
    descriptors = 0
    while any(source.poll() is None for source in sources):
        began = time.perf_counter()
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS, context=context) as answer:  # noqa: S310 - http
                found = _SAMPLE.search(answer.read().decode())
        except (OSError, http.client.HTTPException) as error:
            failures[type(getattr(error, "reason", error)).__name__] += 1
        else:
            latencies.append(time.perf_counter() - began)
            if found and float(found[1]) not in samples[-1:]:
                samples.append(float(found[1]))
        descriptors = max(descriptors, len(list((process / "fd").iterdir())))
        time.sleep(SCRAPE_SECONDS)
    peak = re.findall(r"VmHWM:\s+(\d+)", (process / "status").read_text(encoding="ascii"))
    tallies = [json.loads(source.communicate()[0].splitlines()[-1]) for source in sources]
    return Results(
        outcomes=sum((Counter(one["outcomes"]) for one in tallies), Counter()),
        opened=sum(one["opened"] for one in tallies),
        most_open=sum(one["most_open"] for one in tallies),
        latencies=latencies,
        failures=failures,
        samples=samples,
        rss_kib=int(peak[0]),
        descriptors=descriptors,
    )


def measure(scenario: Scenario, folder: Path, seconds: float) -> str:
    """Measure a scenario; return its row of the table."""
    options = ["--simulate", "a100-mig"]
    context = None
    if scenario.tls:
        context = make_certificates(folder).client()
        options += ["--web-config", str(web_file(folder, tls={}))]
    prefix = ("sh", "-c", f'ulimit -n {scenario.descriptors or "$(ulimit -Hn)"}; exec "$@"', "sh")
    with running_agent(*options, prefix=prefix) as agent:
        time.sleep(3)  # the first samples, and the modules that they load
        before, began = len(agent.lines), time.monotonic()
        results = watch(agent, context, started(scenario, agent.port, seconds))
        return row(scenario, results, time.monotonic() - began, len(agent.lines) - before)


def started(scenario: Scenario, port: int, seconds: float) -> list[subprocess.Popen[str]]:
    """Start its sources, as processes with a lower CPU priority than the others."""
    each = ["--count", str(max(1, scenario.count // scenario.sources)), "--rate", str(scenario.rate / scenario.sources)]
    each += ["--seconds", str(seconds), "--port", str(port)]
    return [
        subprocess.Popen(
            ["nice", "-n", "5", sys.executable, str(SOURCE), *scenario.arguments, *each, "--seed", str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(scenario.sources)
    ]


def row(scenario: Scenario, results: Results, lasted: float, lines: int) -> str:
    """Return the results as a row of the table."""
    asked = len(results.latencies) + results.failures.total()
    p50, p99 = (1000 * percentile(tuple(results.latencies) or (math.nan,), percent) for percent in (50, 99))
    gap = max((later - earlier for earlier, later in pairwise(results.samples)), default=math.nan)
    failed = ", ".join(f"{count} {name}" for name, count in results.failures.items())
    cells = (
        scenario.name,
        f"{results.opened} / {results.most_open}",
        f"{len(results.latencies)} / {asked}" + (f" ({failed})" if failed else ""),
        f"{p50:.0f} / {p99:.0f}",
        f"{len(results.samples)} / {lasted:.0f}, {gap:.1f} s",
        f"{results.rss_kib / 1024:.0f}",
        str(results.descriptors),
        ", ".join(f"{name}: {count}" for name, count in sorted(results.outcomes.items())) or "-",
        str(lines),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure every scenario with a fresh process each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each scenario")
    parser.add_argument("--only", default="", help="scenarios with this text in their name")
    options = parser.parse_args()
    print("| clients | opened / at a time | scrapes ok | p50 / p99, ms | samples / s, longest gap", end="")
    print(" | RSS peak, MiB | descriptors | outcomes | log lines |")
    print("|---|---|---|---|---|---:|---:|---|---:|")
    with tempfile.TemporaryDirectory() as name:
        for scenario in SCENARIOS:
            if options.only in scenario.name:
                print(measure(scenario, Path(name), options.seconds), flush=True)


if __name__ == "__main__":
    main()
