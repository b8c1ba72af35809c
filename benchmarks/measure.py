"""Measures a running exporter: CPU without scrapes, CPU per scrape, latency, and memory as if it were alone."""

import contextlib
import http.client
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WARM_UP_SECONDS = 12.0
"""Time for the agent's start: in its first ten seconds it also makes its first lists, save and collections."""
SCRAPES, PAUSE_SECONDS = 200, 0.02
TIMEOUT_SECONDS = 10.0


PAGE_BYTES = 4096
_PRESENT, _SHARED = 1 << 63, 1 << 61
_ENTRY_BYTES = 8
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ ([0-9a-f]+) (\S+) (\d+) ")


@dataclass(frozen=True, slots=True)
class Held:
    """Resident pages of one process in bytes; pages of files only if no process before it has them."""

    private_bytes: int
    """Private pages: not shared with any process."""
    file_bytes: int
    """Pages of files, unchanged."""

    @property
    def size_bytes(self) -> int:
        """Return the sum."""
        return self.private_bytes + self.file_bytes


def alone(pids: Iterable[int]) -> tuple[Held, ...]:
    """Return the pages of each process as if they were alone on the machine; ``pids`` in the order of precedence.

    Linux reports to the owner of a process which of its pages are present and which belong to a file
    (``/proc/<pid>/pagemap``). Memory that a fork shares counts for each; the agent's processes start with ``exec``.
    """
    seen: set[tuple[str, str, int]] = set()
    return tuple(_held(pid, seen) for pid in pids)


def _held(pid: int, seen: set[tuple[str, str, int]]) -> Held:
    private, before = 0, len(seen)
    with Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            match = _MAPPING.match(line)
            if match is None or line.endswith(("[vsyscall]", "[vvar]", "[vdso]")):
                continue
            first, end, offset = (int(match[number], 16) // PAGE_BYTES for number in (1, 2, 3))
            device, inode = match[4], match[5]
            pagemap.seek(first * _ENTRY_BYTES)
            entries = memoryview(pagemap.read((end - first) * _ENTRY_BYTES)).cast("Q")
            for place, entry in enumerate(entries):
                if entry & _PRESENT and inode != "0" and entry & _SHARED:
                    seen.add((device, inode, offset + place))
                elif entry & _PRESENT:
                    private += 1
    return Held(private_bytes=private * PAGE_BYTES, file_bytes=(len(seen) - before) * PAGE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Cost of an exporter. It takes one sample a second, so CPU seconds per second are CPU per sample."""

    cpu_per_sample_seconds: float
    cpu_per_scrape_seconds: float
    """CPU of a page after a new sample, as with a scrape interval of seconds, in addition to the sampling's."""
    fresh_seconds: tuple[float, ...]
    """Latencies of scrapes, each after a new sample."""
    plain_seconds: tuple[float, ...]
    gzip_seconds: tuple[float, ...]
    page_bytes: int
    gzip_bytes: int
    series: int
    held: tuple[Held, ...]
    """Memory per process, the parent first, without other programs on the machine."""
    process_names: tuple[str, ...]

    @property
    def alone_bytes(self) -> int:
        """Return the memory of all processes on a node where no other program shares their pages."""
        return sum(one.size_bytes for one in self.held)


def scrape(port: int, *, gzip: bool = False) -> tuple[float, bytes]:
    """Request ``/metrics`` over a new connection; return the duration in seconds and the body as sent.

    Raises:
        OSError: nothing listens, or the answer is late.
        RuntimeError: the answer is not 200.
    """
    headers = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "gzip" if gzip else "identity"}
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/metrics", headers=headers)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise RuntimeError(f"/metrics on port {port} answered {response.status}")
    return time.perf_counter() - started, body


def scrapes(port: int, *, count: int, pause_seconds: float, gzip: bool = False) -> tuple[float, ...]:
    """Scrape ``count`` times with a pause after each; return the latencies in seconds."""
    latencies = []
    for _ in range(count):
        latencies.append(scrape(port, gzip=gzip)[0])
        time.sleep(pause_seconds)
    return tuple(latencies)


def percentile(values: tuple[float, ...], percent: float) -> float:
    """Return the smallest value that ``percent`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def family(pid: int) -> tuple[int, ...]:
    """Return ``pid`` and all its living descendants, the parent first."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{one}/task/{one}/children").read_text(encoding="ascii")
            found.extend(int(child) for child in text.split())
    return tuple(found)


def cpu(pids: Iterable[int]) -> float:
    """Return the user and system time of processes in seconds, to the nanosecond, including ended threads."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)  # the same as clock_getcpuclockid() of a process


def _name_of(place: int, pid: int) -> str:
    """Return the name of one of the agent's processes."""
    if place == 0:
        return "parent"
    return "child for DCGM" if b"--dcgm-address" in Path(f"/proc/{pid}/cmdline").read_bytes() else "child"


def measure(pid: int, port: int, seconds: float) -> Figures:
    """Measure a running agent for about ``2 * seconds`` plus the scrapes."""
    time.sleep(WARM_UP_SECONDS)
    pids = family(pid)
    before = cpu(pids)
    started = time.monotonic()
    time.sleep(seconds)
    idle_rate = (cpu(pids) - before) / (time.monotonic() - started)

    count = max(1, round(seconds / 1.05))
    before = cpu(pids)
    started = time.monotonic()
    # Slightly longer than the sample interval: a new snapshot each time, at every phase of the interval.
    fresh = scrapes(port, count=count, pause_seconds=1.05)
    spent = cpu(pids) - before
    per_scrape = max(0.0, spent - idle_rate * (time.monotonic() - started)) / count

    held = alone(pids)
    (_, page), (_, zipped) = scrape(port), scrape(port, gzip=True)
    return Figures(
        cpu_per_sample_seconds=idle_rate,
        cpu_per_scrape_seconds=per_scrape,
        fresh_seconds=fresh,
        plain_seconds=fresh + scrapes(port, count=SCRAPES, pause_seconds=PAUSE_SECONDS),
        gzip_seconds=scrapes(port, count=SCRAPES, pause_seconds=PAUSE_SECONDS, gzip=True),
        page_bytes=len(page),
        gzip_bytes=len(zipped),
        series=sum(1 for line in page.splitlines() if line and not line.startswith(b"#")),
        held=held,
        process_names=tuple(_name_of(place, pid) for place, pid in enumerate(pids)),
    )
