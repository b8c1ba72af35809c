"""What a second scraper, the sampler and the memory notice of clients that are many, slow or odd."""

import argparse
import contextlib
import http.client
import json
import re
import resource
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(__file__).with_name("load_source.py")
SCRAPE_SECONDS, TIMEOUT_SECONDS = 0.2, 10.0
FLOOD = 10_000
_LISTENING = re.compile(r"listening on \S*:(\d+)")
_SAMPLE = re.compile(r"^gpu_exporter_sample_timestamp_seconds(?:\{.*\})? (\S+)$", re.MULTILINE)
MANY = tuple(f"127.0.{third}.{fourth}" for third in range(1, 5) for fourth in range(1, 251))
"""A thousand addresses."""
ELSEWHERE = ("--source", "127.0.9.9")


class Told(TypedDict):
    """What a source prints."""

    opened: int
    most_open: int
    outcomes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Clients of one kind, and how many."""

    name: str
    arguments: tuple[str, ...]
    """Of each source."""
    count: int = FLOOD
    """In all, at a time."""
    sources: int = 4
    rate: int = 2000
    """New ones a second, in all."""
    tls: bool = False
    descriptors: int | None = None
    """Most files of the agent."""


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


@dataclass(slots=True)
class Watch:
    """What a second scraper saw; a thread of its own."""

    port: int
    context: ssl.SSLContext | None
    latencies: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    samples: list[float] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Scrape with a fresh connection each until told to stop."""
        while not self.stop.is_set():
            began = time.perf_counter()
            try:
                self._scrape()
            except (OSError, http.client.HTTPException) as error:
                self.failures[type(error).__name__] += 1
            else:
                self.latencies.append(time.perf_counter() - began)
            self.stop.wait(SCRAPE_SECONDS)

    def _scrape(self) -> None:
        kind = http.client.HTTPSConnection if self.context else http.client.HTTPConnection
        more = {"context": self.context} if self.context else {}
        connection = kind("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS, **more)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            answer = connection.getresponse()
            body = answer.read().decode()
        if answer.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(answer.status)
        found = _SAMPLE.search(body)
        if found and float(found[1]) not in self.samples[-1:]:
            self.samples.append(float(found[1]))


@dataclass(slots=True)
class Gauge:
    """Peaks of a process; a thread of its own."""

    pid: int
    rss_kib: int = 0
    descriptors: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Look ten times a second."""
        while not self.stop.wait(0.1):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
                self.rss_kib = max(self.rss_kib, int((re.findall(r"VmRSS:\s+(\d+)", text) or [0])[0]))
                self.descriptors = max(self.descriptors, len(list(Path(f"/proc/{self.pid}/fd").iterdir())))


@contextmanager
def subject(scenario: Scenario, folder: Path) -> Iterator[tuple[int, int, list[str]]]:
    """Run the agent as a process; yield its id, port and log."""
    command = [sys.executable, "-m", "exporter", "agent", "--simulate", "a100-mig", "--listen", "127.0.0.1:0"]
    if scenario.tls:
        command += ["--web-config", str(certificate(folder))]

    def limit() -> None:
        most = scenario.descriptors or resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=limit)  # noqa: PLW1509 - no threads yet
    lines: list[str] = []
    ports: list[int] = []

    def read() -> None:
        for line in process.stderr or ():
            lines.append(line.rstrip())
            ports.extend(int(number) for number in _LISTENING.findall(line))

    threading.Thread(target=read, daemon=True).start()
    try:
        until = time.monotonic() + 30
        while not ports and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if not ports:
            raise SystemExit("\n".join(lines) or "it does not listen")
        time.sleep(3)  # the first samples, and what is loaded with them
        yield process.pid, ports[0], lines
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def certificate(folder: Path) -> Path:
    """A web configuration with a certificate of its own."""
    if not (folder / "web.yaml").exists():
        openssl = shutil.which("openssl") or "openssl"
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
        files = ("-keyout", "k.pem", "-out", "c.pem")
        subprocess.run(
            [openssl, "req", "-x509", *key, *files, "-subj", "/CN=localhost"],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        (folder / "web.yaml").write_text("tls_server_config: {cert_file: c.pem, key_file: k.pem}\n")
    return folder / "web.yaml"


def measure(scenario: Scenario, folder: Path, seconds: float) -> str:
    """One row."""
    context = None
    if scenario.tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with subject(scenario, folder) as (pid, port, lines):
        before = len(lines)
        watch, gauge = Watch(port, context), Gauge(pid)
        threads = [threading.Thread(target=one.run, daemon=True) for one in (watch, gauge)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        sources = started(scenario, port, seconds)
        told = [json.loads(source.communicate(timeout=seconds + 60)[0].splitlines()[-1]) for source in sources]
        lasted = time.monotonic() - began
        watch.stop.set()
        gauge.stop.set()
        for thread in threads:
            thread.join(TIMEOUT_SECONDS + 1)
        return row(scenario, watch, gauge, told, lasted, len(lines) - before)


def started(scenario: Scenario, port: int, seconds: float) -> list[subprocess.Popen[str]]:
    """Its sources, as processes that leave the others the CPU first."""
    each = (
        "--count",
        str(max(1, scenario.count // scenario.sources)),
        "--rate",
        str(scenario.rate / scenario.sources),
        "--seconds",
        str(seconds),
        "--port",
        str(port),
    )
    return [
        subprocess.Popen(
            ["nice", "-n", "5", sys.executable, str(SOURCE), *scenario.arguments, *each, "--seed", str(number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(scenario.sources)
    ]


def row(scenario: Scenario, watch: Watch, gauge: Gauge, told: Sequence[Told], lasted: float, lines: int) -> str:
    """What was seen, as a row of the table."""
    outcomes: Counter[str] = Counter()
    opened = most = 0
    for one in told:
        outcomes.update(one["outcomes"])
        opened += one["opened"]
        most += one["most_open"]
    asked = len(watch.latencies) + watch.failures.total()
    ordered = sorted(watch.latencies) or [float("nan")]
    p50, p99 = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    steps = [later - earlier for earlier, later in zip(watch.samples, watch.samples[1:], strict=False)]
    cadence = f"{len(watch.samples)} / {lasted:.0f}, {max(steps, default=float('nan')):.1f} s"
    failed = ", ".join(f"{count} {name}" for name, count in watch.failures.items())
    answers = ", ".join(f"{name}: {count}" for name, count in sorted(outcomes.items()))
    cells = (
        scenario.name,
        f"{opened} / {most}",
        f"{len(watch.latencies)} / {asked}" + (f" ({failed})" if failed else ""),
        f"{p50 * 1000:.0f} / {p99 * 1000:.0f}",
        cadence,
        f"{gauge.rss_kib / 1024:.0f}",
        str(gauge.descriptors),
        answers or "-",
        str(lines),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure every scenario with a fresh process each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each scenario")
    parser.add_argument("--only", default="", help="scenarios whose name has this")
    options = parser.parse_args()
    print("| clients | opened / at a time | scrapes ok | p50 / p99, ms | samples / s, longest gap", end="")
    print(" | RSS peak, MiB | descriptors | what became of them | log lines |")
    print("|---|---|---|---|---|---:|---:|---|---:|")
    with tempfile.TemporaryDirectory() as name:
        for scenario in SCENARIOS:
            if options.only in scenario.name:
                print(measure(scenario, Path(name), options.seconds), flush=True)


if __name__ == "__main__":
    main()
