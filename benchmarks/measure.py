"""Measures one running exporter: CPU without scrapes, CPU per scrape, scrape latency, memory."""

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import footprint
import page_map
import scrapes

READY_SECONDS = 60.0
WARM_UP_SECONDS = 12.0
"""In its first ten seconds the agent also makes up for its start: first lists, first save, first collections."""
SCRAPES, PAUSE_SECONDS = 200, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An exporter to start. ``ready`` says whether a page shows everything that it should show."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    port: int
    ready: Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one exporter cost. Both take one sample a second, so CPU seconds per second are CPU per sample."""

    cpu_per_sample_seconds: float
    cpu_per_scrape_seconds: float
    """Of a page made after a new sample, which is what a scrape interval of seconds gets; above the sampling's."""
    fresh_seconds: tuple[float, ...]
    """Latencies of scrapes that each came after a new sample."""
    plain_seconds: tuple[float, ...]
    gzip_seconds: tuple[float, ...]
    page_bytes: int
    gzip_bytes: int
    series: int
    pss_bytes: tuple[int, ...]
    """Per process, the parent first."""
    held: tuple[page_map.Held, ...]
    """The same, were there no other programs on the machine."""
    process_names: tuple[str, ...]

    @property
    def alone_bytes(self) -> int:
        """Memory of all processes on a node where nothing else shares their pages."""
        return sum(one.size_bytes for one in self.held)


class NotReadyError(RuntimeError):
    """The exporter did not show what it should in time."""


def measure(subject: Subject, *, seconds: float, log: Path) -> Figures:
    """Start the exporter, measure it for about ``2 * seconds`` plus the scrapes, and end it.

    Raises:
        NotReadyError: with the end of its log.
    """
    with started(subject, log) as process:
        time.sleep(WARM_UP_SECONDS)
        return _figures(subject, footprint.family(process.pid), seconds)


@contextlib.contextmanager
def started(subject: Subject, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start the exporter, wait until it is ready, and end it.

    Raises:
        NotReadyError: with the end of its log.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(subject.command),
            env={**os.environ, **subject.environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait(subject, process, log)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def name_of(place: int, pid: int) -> str:
    """Return which of the agent's processes it is."""
    if place == 0:
        return "parent"
    return "child for DCGM" if b"--dcgm-address" in Path(f"/proc/{pid}/cmdline").read_bytes() else "child"


def _wait(subject: Subject, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            if subject.ready(scrapes.scrape(subject.port).body.decode()):
                return
        except (OSError, RuntimeError):
            pass
        time.sleep(0.25)
    tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    raise NotReadyError(f"{subject.name} did not become ready in {READY_SECONDS:.0f} s; its log ends:\n{tail}")


def _figures(subject: Subject, pids: tuple[int, ...], seconds: float) -> Figures:
    before = footprint.cpu(pids)
    started = time.monotonic()
    time.sleep(seconds)
    idle_rate = (footprint.cpu(pids) - before) / (time.monotonic() - started)

    count = max(1, round(seconds / 1.05))
    before = footprint.cpu(pids)
    started = time.monotonic()
    # A little more than the sample interval: never the same snapshot twice, at every phase of it.
    fresh = scrapes.many(subject.port, count=count, pause_seconds=1.05)
    spent = footprint.cpu(pids) - before
    per_scrape = max(0.0, spent - idle_rate * (time.monotonic() - started)) / count

    memory, held = tuple(footprint.pss_bytes(pid) for pid in pids), page_map.alone(pids)
    page, zipped = scrapes.scrape(subject.port), scrapes.scrape(subject.port, gzip=True)
    return Figures(
        cpu_per_sample_seconds=idle_rate,
        cpu_per_scrape_seconds=per_scrape,
        fresh_seconds=fresh,
        plain_seconds=fresh + scrapes.many(subject.port, count=SCRAPES, pause_seconds=PAUSE_SECONDS),
        gzip_seconds=scrapes.many(subject.port, count=SCRAPES, pause_seconds=PAUSE_SECONDS, gzip=True),
        page_bytes=page.size_bytes,
        gzip_bytes=zipped.size_bytes,
        series=sum(1 for line in page.body.splitlines() if line and not line.startswith(b"#")),
        pss_bytes=memory,
        held=held,
        process_names=tuple(name_of(place, pid) for place, pid in enumerate(pids)),
    )
