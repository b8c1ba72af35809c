"""Starts the program in forks of a process that has loaded it, which takes 0.6 CPU-seconds each time.

A fork has environment, arguments and streams of its own; what it loads later, as its children, it loads itself. What a
start itself does, or a page of memory costs, is to be seen on a new interpreter only.

Run as a program, with the descriptor of a socket: it forks once per request, and tells how each fork ends.
"""

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
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
        """The exit code, once it has ended."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; the exit code."""
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("gpu-cost-exporter", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it has not ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """End it."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks, and what it has told of its forks."""

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
            told: dict[str, int] = json.loads(text)
            if "code" in told:
                fork = self._forks.pop(told["pid"])
                fork.returncode = told["code"]
                fork.ended.set()
            elif self._starting:
                self._starting.pid = told["pid"]
                self._forks[told["pid"]] = self._starting
                self._starting.started.set()


@cache
def _server() -> ForkServer:
    """Of this test process."""
    return ForkServer()


def fork(
    *words: str, env: Mapping[str, str] | None = None, stdout: IO[Any] | int = 1, stderr: IO[Any] | int = 2
) -> Fork:
    """Start the program in the root of the repository; streams are as ``subprocess.Popen`` has them."""
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
    """Run the program to its end; what it wrote."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        code = fork(*words, env=env, stdout=output, stderr=errors).wait(PATIENCE_SECONDS)
        told = []
        for stream in (output, errors):
            stream.seek(0)
            told.append(stream.read())
        return subprocess.CompletedProcess(words, code, *told)


def serve(requests: socket.socket) -> None:
    """Fork for each request until nobody can ask any more; only a fork returns, to run the program."""
    waiting = selectors.DefaultSelector()
    waiting.register(requests, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is not requests:
                waiting.unregister(key.fileobj)
                os.close(key.fd)
                _, status = os.waitpid(key.data, 0)
                told = {"pid": key.data, "code": os.waitstatus_to_exitcode(status)}
                requests.send(json.dumps(told).encode())
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
    """Take over what a new process would be given."""
    for descriptor, stream in zip(streams, (sys.stdout, sys.stderr), strict=True):
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = request["words"]


if __name__ == "__main__":
    # Its own import of the kubeconfig reader does the same.
    sys.modules["kubernetes_validate"] = None  # type: ignore[assignment]
    for _name in LOADED:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
    from exporter.cli import main

    sys.exit(main())
