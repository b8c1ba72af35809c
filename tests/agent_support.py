"""Agents as processes on simulated nodes, started from a process that has loaded the program."""

import asyncio
import atexit
import contextlib
import gc
import importlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any, TextIO

ROOT = Path(__file__).resolve().parents[1]
LOADED = (
    "exporter.agent",
    "exporter.cli.agent",
    "exporter.doctor",
    "exporter.service.run",
    "gpu_simulator.node",
    "gpu_simulator.scenario",
    "kubernetes.aio.client.configuration",
    "kubernetes.aio.config.kube_config",
)
MOST_BYTES = 1 << 20
PATIENCE_SECONDS = 60.0


@dataclass(slots=True)
class Fork:
    """A process of the program, with those parts of ``subprocess.Popen`` that tests use."""

    stdout: TextIO | None = None
    stderr: TextIO | None = None
    pid: int = 0
    returncode: int | None = None
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def poll(self) -> int | None:
        """Return the exit code; ``None`` while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("gpu-cost-exporter", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal if the process has not ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """End it."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks, and its reports about the forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=ROOT)
        self._starting: Fork | None = None
        self._forks: dict[int, Fork] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        atexit.register(self.close)

    def start(self, fork: Fork, words: Sequence[str], env: Mapping[str, str], streams: Sequence[int]) -> None:
        """Run the program with these arguments, in this environment, with these descriptors for output and errors."""
        request = json.dumps({"words": list(words), "env": dict(env)}).encode()
        with self._lock:
            self._starting = fork
            socket.send_fds(self._socket, [request], list(streams))
            assert fork.started.wait(PATIENCE_SECONDS), "no fork was made"

    def close(self) -> None:
        """End the server."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._process.wait(timeout=PATIENCE_SECONDS)
        self._socket.close()

    def _read(self) -> None:
        while text := self._socket.recv(MOST_BYTES):
            report: dict[str, int] = json.loads(text)
            if "code" in report:
                fork = self._forks.pop(report["pid"])
                fork.returncode = report["code"]
                fork.ended.set()
            elif self._starting:
                self._starting.pid = report["pid"]
                self._forks[report["pid"]] = self._starting
                self._starting.started.set()


@cache
def _server() -> ForkServer:
    """Return the server of this test process."""
    return ForkServer()


def fork(
    *words: str, env: Mapping[str, str] | None = None, stdout: IO[Any] | int = 1, stderr: IO[Any] | int = 2
) -> Fork:
    """Start the program in the root of the repository; streams are as for ``subprocess.Popen``."""
    made, descriptors, pipes = Fork(), [], []
    for name, stream in (("stdout", stdout), ("stderr", stderr)):
        if stream == subprocess.PIPE:
            reading, writing = os.pipe()
            setattr(made, name, os.fdopen(reading, encoding="utf-8"))
            pipes.append(writing)
            descriptors.append(writing)
        elif stream == subprocess.STDOUT:
            descriptors.append(descriptors[0])
        else:
            descriptors.append(stream if isinstance(stream, int) else stream.fileno())
    _server().start(made, words, os.environ if env is None else env, descriptors)
    for descriptor in pipes:
        os.close(descriptor)
    return made


def run_fork(*words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the program to its end; return its output."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        code = fork(*words, env=env, stdout=output, stderr=errors).wait(PATIENCE_SECONDS)
        outputs = []
        for stream in (output, errors):
            stream.seek(0)
            outputs.append(stream.read())
        return subprocess.CompletedProcess(words, code, *outputs)


def serve(requests: socket.socket) -> None:
    """Fork for each request until the other end is closed; only a fork returns, to run the program."""
    waiting = selectors.DefaultSelector()
    waiting.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not requests:
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                report = {"pid": key.data, "code": os.waitstatus_to_exitcode(status)}
                requests.send(json.dumps(report).encode())
                continue
            text, descriptors, _, _ = socket.recv_fds(requests, MOST_BYTES, 2)
            if not text:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                kept = [one.fd for one in waiting.get_map().values() if one.data]
                waiting.close()
                requests.close()
                for descriptor in kept:
                    os.close(descriptor)
                become(json.loads(text), descriptors)
                return
            for descriptor in descriptors:
                os.close(descriptor)
            waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
            requests.send(json.dumps({"pid": pid}).encode())


def become(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Take over arguments, environment and streams as a new process gets them."""
    for descriptor, stream in zip(streams, (sys.stdout, sys.stderr), strict=True):
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = request["words"]


if __name__ == "__main__":
    # The program's own import of the kubeconfig reader does the same.
    sys.modules["kubernetes_validate"] = None  # type: ignore[assignment]
    for _name in LOADED:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
    from exporter.cli import main

    sys.exit(main())


POLL_SECONDS = 0.25
"""A scrape costs the agent and its test as much CPU as 0.1 s of sampling."""
_OF_A_START = frozenset({"LD_PRELOAD", "PYTHONPATH"})
"""Variables that take effect when a process starts, and not in a fork."""
_LISTENING = re.compile(r"listening on \S*:(\d+)")


@dataclass
class AgentProcess:
    """A running agent and its log."""

    process: subprocess.Popen[str] | Fork
    port: int = 0
    lines: list[str] = field(default_factory=list)

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Return status and body of a GET; an error status is also an answer."""
        return self.ask("GET", path, headers)

    def ask(self, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Return status and body of a request."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - as above
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def series(self) -> dict[str, float]:
        """Scrape once; return values by name and labels, as on the page."""
        _, text = self.get("/metrics")
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def until(self, check: Callable[[dict[str, float]], object], what: str) -> dict[str, float]:
        """Return the first scrape for which ``check`` holds; a scrape without a timely answer is repeated."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError), _timeouts():
                page = self.series()
                if check(page):
                    return page
            time.sleep(POLL_SECONDS)
        raise AssertionError(f"not seen within {PATIENCE_SECONDS} s: {what}; its log: {self.lines[-5:]}")

    def children(self) -> list[int]:
        """Return the process ids of the agent's children."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text(encoding="ascii")
        return [int(pid) for pid in text.split()]

    def end(self, number: int = signal.SIGTERM, seconds: float = 10.0) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(timeout=seconds)


@contextmanager
def _timeouts() -> Iterator[None]:
    """Raise TimeoutError also for a late connection, for which urllib wraps it."""
    try:
        yield
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimeoutError from error
        raise


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Wait until a condition holds, without an event loop."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"not within {PATIENCE_SECONDS} s: {what}"
        time.sleep(0.05)


async def until(check: Callable[[], object]) -> None:
    """Wait until a condition in this process holds."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not check():
        assert time.monotonic() < end, "not seen in time"
        await asyncio.sleep(0.01)


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve HTTP in threads on a free port without a log; yield the address."""
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
    """Return all metered GPU-seconds of a page, including those of unknown owners."""
    capacity = matching(page, "gpu_exporter_ledger_capacity_seconds_total")
    return sum(capacity.values(), page.get("gpu_exporter_ledger_withheld_seconds", 0.0))


def matching(page: dict[str, float], name: str, **labels: str) -> dict[str, float]:
    """Return the series of one metric that carry all of the labels."""
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
    """Start an agent on a free port and wait until it listens; it ends with the block.

    Without a simulated node it gets a separate directory for the node's lock: parallel tests are all on one node.

    Args:
        arguments: Arguments of the agent.
        prefix: Command that starts it, in a separate interpreter.
        env: Additions to its environment.
        is_fork: Whether it is a fork of a process that has loaded it; without a prefix only.
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
