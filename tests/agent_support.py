"""The agent as a process of its own, on a simulated node, for tests that see what a user sees."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from fork_server import Fork, fork

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_SECONDS = 60.0
POLL_SECONDS = 0.25
"""A scrape costs the agent and its test as much as a tenth of a second of sampling."""
_OF_A_START = frozenset({"LD_PRELOAD", "PYTHONPATH"})
"""Variables that a process takes when it starts, and a fork does not."""
_LISTENING = re.compile(r"listening on \S*:(\d+)")


@dataclass
class AgentProcess:
    """A running agent and what it has logged."""

    process: subprocess.Popen[str] | Fork
    port: int = 0
    lines: list[str] = field(default_factory=list)

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Status and body of a GET; an error status is an answer too."""
        return self.ask("GET", path, headers)

    def ask(self, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Status and body of a request."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - as above
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def series(self) -> dict[str, float]:
        """One scrape: value by name and labels, as they stand on the page."""
        _, text = self.get("/metrics")
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def until(self, check: Callable[[dict[str, float]], object], what: str) -> dict[str, float]:
        """The first scrape for which ``check`` holds; one that is not answered in time is asked for again."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError), _timeouts():
                page = self.series()
                if check(page):
                    return page
            time.sleep(POLL_SECONDS)
        raise AssertionError(f"not seen within {PATIENCE_SECONDS} s: {what}; the agent said: {self.lines[-5:]}")

    def children(self) -> list[int]:
        """Process ids of the agent's children."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="ascii")
        return [int(pid) for pid in text.split()]

    def end(self, number: int = signal.SIGTERM, seconds: float = 10.0) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=seconds)


@contextmanager
def _timeouts() -> Iterator[None]:
    """Raises TimeoutError for a connection that is not made in time, too, which urllib wraps."""
    try:
        yield
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimeoutError from error
        raise


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Wait until something is so, without an event loop."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not so after {PATIENCE_SECONDS} s: {what}"
        time.sleep(0.05)


async def until(check: Callable[[], object]) -> None:
    """Wait until something in this process is so."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not check():
        assert time.monotonic() < end, "not seen in time"
        await asyncio.sleep(0.01)


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """An HTTP server of a few lines on a free port, in threads that log nothing; its address."""
    quiet = type("Quiet", (handler,), {"log_message": lambda *_: None})
    with ThreadingHTTPServer(("127.0.0.1", 0), quiet) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(timeout=5)


def gpu_seconds(page: dict[str, float]) -> float:
    """All GPU-seconds that a page shows as metered, those of owners that are not known yet included."""
    capacity = matching(page, "gpu_exporter_ledger_capacity_seconds_total")
    return sum(capacity.values(), page.get("gpu_exporter_ledger_withheld_seconds", 0.0))


def matching(page: dict[str, float], name: str, **labels: str) -> dict[str, float]:
    """Series of one metric that carry all of the labels."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return {
        key: value
        for key, value in page.items()
        if (key == name or key.startswith(name + "{")) and all(label in key for label in wanted)
    }


@contextmanager
def running_agent(
    *arguments: str, prefix: Sequence[str] = (), env: dict[str, str] | None = None, is_fork: bool = True
) -> Iterator[AgentProcess]:
    """Start an agent on a free port and wait until it listens; it is gone when the block ends.

    Without a simulated node it has a directory of its own for the node's lock: tests side by side are all on one node.

    Args:
        arguments: Of the agent.
        prefix: Command that starts it; it is in an interpreter of its own then.
        env: More of its environment.
        is_fork: Whether it is a fork of a process that has loaded it, where no prefix is given.
    """
    with tempfile.TemporaryDirectory() as lock:
        own = {} if "--simulate" in arguments else {"GPU_COST_EXPORTER_LOCK_DIR": lock}
        words = ("agent", "--listen", "127.0.0.1:0", *arguments)
        whole = {**os.environ, **own, **(env or {})}
        if is_fork and not prefix and not _OF_A_START & whole.keys():
            process: subprocess.Popen[str] | Fork = fork(*words, env=whole, stderr=subprocess.PIPE)
        else:
            command = [*prefix, sys.executable, "-m", "exporter", *words]
            process = subprocess.Popen(
                command, cwd=ROOT, env=whole, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        with _running(process) as agent:
            yield agent


@contextmanager
def _running(process: subprocess.Popen[str] | Fork) -> Iterator[AgentProcess]:
    agent = AgentProcess(process)
    listening = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            agent.lines.append(line.rstrip())
            if found := _LISTENING.search(line):
                agent.port = int(found[1])
                listening.set()
        listening.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert listening.wait(PATIENCE_SECONDS), "the agent does not listen"
        assert agent.port, f"the agent ended: {agent.lines}"
        yield agent
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        reader.join(timeout=5)
        if process.stderr is not None:
            process.stderr.close()
