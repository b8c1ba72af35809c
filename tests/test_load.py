"""Agent and service with many, slow or odd clients: another scraper gets its page, and samples continue."""

import asyncio
import gzip
import json
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_support import AgentProcess, matching, running_agent
from service_support import make_certificates, web_file
from test_service_run import serving

SOURCE = Path(__file__).resolve().parents[1] / "benchmarks" / "load_source.py"
MOST_MIB = 300
"""Three times the memory of an agent without load; separate copies of a hundred pages would need far more."""
_SAMPLE = re.compile(r"^gpu_exporter_sample_timestamp_seconds (\S+)$", re.MULTILINE)
SAMPLES = 4
DESCRIPTORS_OF_A_HANDFUL = 40
CROWD_SECONDS, PATIENCE_SECONDS = 0.8, 60.0

ELSEWHERE = ("--source", "127.0.0.9")
CROWDS = {
    "silent": ("silent", "--count", "1500", "--rate", "700", "--again"),
    "half a request, of another address": ("begins", "--count", "1500", "--rate", "500", "--again", *ELSEWHERE),
    "a page each, of another address": ("asks", "--count", "1500", "--rate", "400", "--again", *ELSEWHERE),
    "slow readers of another address": ("slow", "--count", "150", "--rate", "300", "--again", *ELSEWHERE),
    "a header line of 100 MB": ("line", "--count", "2", "--again"),
    "headers of 100 MB": ("headers", "--count", "2", "--again"),
    "a body of 100 MB": ("body", "--count", "2", "--again"),
}


@contextmanager
def crowd(port: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run clients in a separate process; yield after many have connected."""
    command = [sys.executable, str(SOURCE), *arguments, "--port", str(port), "--seconds", "120"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def outcomes_of(process: subprocess.Popen[str]) -> Counter[str]:
    """End the clients; return their outcomes."""
    process.terminate()
    said, _ = process.communicate(timeout=60)
    return Counter(json.loads(said)["outcomes"])


def pages_under_load(url: str, context: ssl.SSLContext | None = None, *, samples: int = SAMPLES) -> list[str]:
    """Return whole pages, each over a new connection, until they show the given number of samples."""
    pages: list[str] = []
    seen: set[str] = set()
    began = time.monotonic()
    while len(seen) < samples or time.monotonic() - began < CROWD_SECONDS:
        assert time.monotonic() - began < PATIENCE_SECONDS, f"{len(pages)} pages, samples of {sorted(seen)}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=20, context=context) as answer:  # noqa: S310 - our own server
            assert answer.status == 200
            pages.append(answer.read().decode())
        assert pages[-1].endswith("\n")
        seen.update(_SAMPLE.findall(pages[-1]))
        time.sleep(0.02)
    return pages


def memory_mib(pid: int) -> int:
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(re.findall(r"VmHWM:\s+(\d+)", text)[0]) // 1024


def most_descriptors(pid: int, seconds: float) -> int:
    """Return the most open descriptors of a process over a time."""
    until, most = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        most = max(most, len(list(Path(f"/proc/{pid}/fd").iterdir())))
        time.sleep(0.005)
    return most


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with running_agent("--simulate", "a100-mig", "--sample-interval", "200ms") as one:
        one.until(lambda page: "gpu_exporter_sample_timestamp_seconds" in page, "a sample")
        yield one


@pytest.mark.parametrize("arguments", CROWDS.values(), ids=CROWDS.keys())
def test_scrapes_and_samples_continue_under_each_kind_of_load(agent: AgentProcess, arguments: tuple[str, ...]) -> None:
    before = len(agent.lines)
    with crowd(agent.port, *arguments) as process:
        pages = pages_under_load(f"http://127.0.0.1:{agent.port}")
        outcomes = outcomes_of(process)
    assert all("gpu_up{" in page for page in pages)
    assert memory_mib(agent.process.pid) < MOST_MIB
    assert not outcomes["500"]
    assert not outcomes["broken"]
    assert len(agent.lines) - before <= 1, agent.lines[before:]


async def test_fifty_concurrent_scrapers_get_the_same_whole_page_of_a_snapshot(agent: AgentProcess) -> None:
    async def scrape() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", agent.port, limit=1 << 22)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n")
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        writer.close()
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"Content-Encoding: gzip" in head
        return gzip.decompress(body)

    by_snapshot: dict[str, set[bytes]] = {}
    for _ in range(3):
        for page in await asyncio.gather(*(scrape() for _ in range(50))):
            text = page.decode()
            when = next(
                line for line in text.splitlines() if line.startswith("gpu_exporter_snapshot_timestamp_seconds")
            )
            assert text.endswith("\n")
            by_snapshot.setdefault(when, set()).add(page)
    assert len(by_snapshot) < 150
    assert all(len(pages) == 1 for pages in by_snapshot.values())


def test_odd_requests_are_answered_or_closed_and_not_logged(agent: AgentProcess) -> None:
    before = len(agent.lines)
    with crowd(agent.port, "odd", "--count", "300", "--rate", "600") as process:
        pages = pages_under_load(f"http://127.0.0.1:{agent.port}")
        outcomes = outcomes_of(process)
    assert all("gpu_up{" in page for page in pages)
    assert set(outcomes) <= {
        "100",
        "200",
        "304",
        "400",
        "403",
        "404",
        "405",
        "408",
        "413",
        "417",
        "ended",
        "202",
    }
    assert outcomes["400"]
    assert len(agent.lines) - before <= 1, agent.lines[before:]


def test_dropped_connections_are_counted(agent: AgentProcess) -> None:
    counter = 'gpu_exporter_errors_total{part="http",reason="made_way"}'
    with crowd(agent.port, *CROWDS["silent"]):
        before = agent.series().get(counter, 0)
        agent.until(lambda page: page.get(counter, 0) > before + 100, "closed connections")


@pytest.mark.parametrize("descriptors", [256, 40])
def test_flood_leaves_the_agent_the_descriptors_for_its_sources(descriptors: int) -> None:
    few = ("sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh")
    with running_agent("--simulate", "demo", "--sample-interval", "200ms", prefix=few) as agent:
        agent.until(lambda page: "gpu_exporter_sample_timestamp_seconds" in page, "a sample")
        with crowd(agent.port, *CROWDS["silent"], *ELSEWHERE):
            # With few descriptors, the kernel queues one more client among 700 a second only by chance.
            # The agent must still keep its descriptors and its samples.
            if descriptors > DESCRIPTORS_OF_A_HANDFUL:
                pages_under_load(f"http://127.0.0.1:{agent.port}")
            most = most_descriptors(agent.process.pid, CROWD_SECONDS)
            flooded_until = time.time()
        page = agent.until(
            lambda page: page.get("gpu_exporter_sample_timestamp_seconds", 0) > flooded_until,
            "a sample after the flood",
        )
        assert most < min(200, descriptors)
        assert page['gpu_exporter_errors_total{part="http",reason="made_way"}'] > 0
        others = {name for name in matching(page, "gpu_exporter_errors_total") if 'part="http"' not in name}
        assert not [name for name in others if page[name]], "a source failed under load"
        assert not [line for line in agent.lines if "Too many open files" in line or "Traceback" in line]


@pytest.mark.parametrize("kind", ["begins", "hello"])
def test_incomplete_tls_connections_do_not_block_other_clients(tmp_path: Path, kind: str) -> None:
    certificates = make_certificates(tmp_path)
    path = web_file(tmp_path, tls={})
    with running_agent("--simulate", "demo", "--sample-interval", "200ms", "--web-config", str(path)) as agent:
        with crowd(agent.port, kind, "--count", "800", "--rate", "400", "--again", *ELSEWHERE):
            pages_under_load(f"https://localhost:{agent.port}", certificates.client())
        assert memory_mib(agent.process.pid) < MOST_MIB
        assert not [line for line in agent.lines if "Traceback" in line or "SSL" in line]


def test_service_stays_within_its_limits_under_load(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with serving(log, "--prometheus", "http://127.0.0.1:9", ready=False) as (process, url):
        port = int(url.rpartition(":")[2])
        outcomes: Counter[str] = Counter()
        kinds = (CROWDS["silent"], CROWDS["a header line of 100 MB"], ("odd", "--count", "100", "--rate", "200"))
        for arguments in kinds:
            with crowd(port, *arguments) as source:
                assert pages_under_load(url, samples=0)
                outcomes += outcomes_of(source)
        assert not outcomes["500"]
        assert memory_mib(process.pid) < MOST_MIB
    assert "Traceback" not in log.read_text()
