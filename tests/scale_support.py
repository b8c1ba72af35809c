"""Reports of a simulated fleet with the command of users: duration, memory, and distance from the truth."""

import http.client
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from exporter.model.ledger import Totals
from gpu_simulator.fleet import FleetTruth

APART = ("Unallocated", "Unattributed")
FIELDS: Mapping[str, tuple[str, ...]] = {
    "namespace": ("namespace",),
    "team,model": ("team", "model"),
    "workload": ("namespace", "kind", "workload"),
}
"""Groupings of a report, and the fields of the truth in its lines."""
_COLUMNS = {"namespace": "owner_namespace", "kind": "owner_kind", "workload": "owner_name", "team": "team"}
_ATTEMPTS_APART = 40
_LAUNCHER = """
import json, os, subprocess, sys, time
begin = time.monotonic()
process = subprocess.Popen(sys.argv[2:])
_, status, usage = os.wait4(process.pid, 0)
process.returncode = os.waitstatus_to_exitcode(status)
figures = {"exit_code": process.returncode, "wall_seconds": time.monotonic() - begin}
figures["cpu_seconds"] = usage.ru_utime + usage.ru_stime
figures["peak_bytes"] = usage.ru_maxrss * 1024
open(sys.argv[1], "w", encoding="ascii").write(json.dumps(figures))
"""
"""Measures from a small process: the kernel's peak of a child includes the time before it became another program."""
_SECONDS = ("active_seconds", "idle_seconds", "unknown_seconds", "unpriced_seconds", "energy_joules")
_OF_NOBODY = _SECONDS[-2:]

Numbers = dict[tuple[str, ...], Counter[str]]
"""Every figure by its name, money by currency, for each line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One report and its figures."""

    exit_code: int
    wall_seconds: float
    cpu_seconds: float
    """CPU seconds of the process itself: its duration on a machine without other load."""
    peak_bytes: int
    """Peak resident memory of the process."""
    report: dict[str, Any]
    said: str
    """Standard error."""


def window(start_seconds: int, end_seconds: int) -> str:
    """Return a window in the form of users."""
    return "..".join(datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%MZ") for at in (start_seconds, end_seconds))


def report(url: str, period: str, by: str, output: Path, *options: str) -> Run:
    """Run the command; its output is a file, which is read after its end."""
    errors = output.with_suffix(".err")
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", "exporter", "report", "--prometheus", url, "--window", period, "--by", by]
    figures = output.with_suffix(".figures")
    launcher = [sys.executable, "-S", "-c", _LAUNCHER, str(figures)]
    with errors.open("wb") as said:
        whole = [*launcher, *command, "--format", "json", "--output", str(output), *options]
        subprocess.run(whole, stderr=said, check=True)
    return Run(
        **json.loads(figures.read_text(encoding="ascii")),
        report=json.loads(output.read_text(encoding="utf-8")) if output.is_file() else {},
        said=errors.read_text(encoding="utf-8"),
    )


def reported(found: Mapping[str, Any], by: str) -> Numbers:
    """Return the numbers of a report by line; lines without an owner have only their kind."""
    numbers: Numbers = {}
    for line in found["lines"]:
        if line["held"]:
            key = tuple(line[_COLUMNS.get(name, name)] or "" for name in FIELDS[by])
        else:
            key = (line["owner_kind"],)
        sums = numbers.setdefault(key, Counter())
        for name in _SECONDS if line["held"] else _OF_NOBODY:
            sums[name] += line[name] or 0
        for money in line["money"]:
            sums[f"{money['currency']} cost"] += money["cost"]
            if line["held"]:
                sums[f"{money['currency']} idle"] += money["idle_cost"]
    return numbers


def true_numbers(truth: FleetTruth, by: str) -> Numbers:
    """Return the same numbers of the truth."""
    fields = FIELDS[by]
    numbers: Numbers = {}
    for key, totals in truth.total("kind", *fields).items():
        apart = key[0] in APART
        found = _numbers(totals)
        if apart:  # such lines have no active, idle and unknown part
            found = Counter(
                {name: value for name, value in found.items() if name in _OF_NOBODY or name.endswith(" cost")}
            )
        numbers.setdefault((key[0],) if apart else key[1:], Counter()).update(found)
    return numbers


def _numbers(totals: Totals) -> Counter[str]:
    numbers: Counter[str] = Counter(
        {name: getattr(totals.seconds, name.removesuffix("_seconds")) for name in _SECONDS[:3]}
        | {name: getattr(totals, name) for name in _SECONDS[3:]}
    )
    for currency, money in totals.money.items():
        numbers[f"{currency} cost"] += money.total  # type: ignore[assignment]
        numbers[f"{currency} idle"] += money.idle  # type: ignore[assignment]
    return numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Errors of a report, as parts of the truth."""

    total: float
    """Worst error of the sums over all lines."""
    line: float
    """Worst error of any figure of any line."""


def errors(found: Numbers, true: Numbers) -> Errors:
    """Return the worst errors; a line that only one side has counts as wrong entirely."""
    worst = 0.0
    sums: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for key in found.keys() | true.keys():
        shown, meant = found.get(key, Counter()), true.get(key, Counter())
        sums[0].update(shown)
        sums[1].update(meant)
        worst = max(worst, _worst(shown, meant))
    return Errors(total=_worst(*sums), line=worst)


def _worst(shown: Counter[str], meant: Counter[str]) -> float:
    return max(
        (
            abs(shown[name] - meant[name]) / max(shown[name], meant[name])
            for name in shown | meant
            if shown[name] != meant[name]
        ),
        default=0.0,
    )


class _Flaky(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, target: str, hang_seconds: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(target).netloc
        self.hang_seconds = hang_seconds
        self.lock = threading.Lock()
        self.asked = self.refused = self.hung = 0
        self.ended = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Flaky

    def do_GET(self) -> None:
        self._forward(b"")

    def do_POST(self) -> None:
        self._forward(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def _forward(self, body: bytes) -> None:
        server = self.server
        with server.lock:
            server.asked += 1
            place = server.asked % _ATTEMPTS_APART
            server.refused += place == 5
            server.hung += place == 10
        if place == 5:
            self._answer(503, b"overloaded", [])
            return
        if place == 10:
            server.ended.wait(server.hang_seconds)
            self.close_connection = True
            return
        upstream = http.client.HTTPConnection(server.target, timeout=120)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "host"}
            upstream.request(self.command, self.path, body, headers)
            got = upstream.getresponse()
            kept = [(n, v) for n, v in got.getheaders() if n.lower() in {"content-type", "content-encoding"}]
            self._answer(got.status, got.read(), kept)
        except OSError:
            self.close_connection = True
        finally:
            upstream.close()

    def _answer(self, status: int, body: bytes, headers: Sequence[tuple[str, str]]) -> None:
        try:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A proxy that fails: of 40 requests one is refused (503) and one is never answered: 5 %."""

    url: str
    server: _Flaky

    @property
    def failed(self) -> tuple[int, int, int]:
        """Return the requests so far: all, refused, not answered."""
        return self.server.asked, self.server.refused, self.server.hung


@contextmanager
def flaky(target: str, hang_seconds: float = 60.0) -> Iterator[Proxy]:
    """Run a proxy in front of a server that fails as real servers do."""
    server = _Flaky(target, hang_seconds)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Proxy(url=f"http://127.0.0.1:{server.server_port}", server=server)
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
