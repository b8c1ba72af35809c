import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from agent_support import Fork, fork, run_fork
from fleet_support import FleetServer

from exporter.cost.store import DayStore
from gpu_simulator.stack import free_port

ROOT = Path(__file__).resolve().parent.parent
READY_SECONDS = 60.0
BUDGETS = "budgets:\n  - {name: all, amount: 1000, currency: USD, period: month}\n"


@contextmanager
def serving(
    log: Path, *arguments: str, ready: bool = True, tls: ssl.SSLContext | None = None
) -> Iterator[tuple[Fork, str]]:
    """Run the service as a process; yield it with its address once it is ready, or at least answers."""
    port = free_port(0)
    path = "/readyz" if ready else "/healthz"
    with log.open("wb") as output:
        process = fork("serve", "--listen", f"127.0.0.1:{port}", *arguments, stderr=output, env=_environment())
    url = f"https://localhost:{port}" if tls else f"http://127.0.0.1:{port}"
    try:
        _until(lambda: _status(url + path, tls) == 200 or process.poll() is not None)
        assert process.poll() is None, log.read_text()
        yield process, url
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("GPU_COST_EXPORTER_")}


def _until(holds: object) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"not within {READY_SECONDS} s"
        time.sleep(0.05)


def _status(url: str, tls: ssl.SSLContext | None = None) -> int:
    try:
        with urllib.request.urlopen(url, timeout=5, context=tls) as answer:  # noqa: S310 - our own server
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_fork("serve", *arguments, env=_environment())


def test_service_ends_within_two_seconds_on_sigterm(fleet_prometheus: FleetServer, tmp_path: Path) -> None:
    store = tmp_path / "days.sqlite"
    log = tmp_path / "log"
    with serving(log, "--prometheus", fleet_prometheus.url, "--store", str(store)) as (process, url):
        assert _status(f"{url}/healthz") == 200
        assert _status(f"{url}/metrics") == 200
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0, log.read_text()
        assert time.monotonic() - began < 2
    assert "ending" in log.read_text()
    with DayStore(store).writing(time.time()):
        pass


def test_service_ends_quickly_while_prometheus_hangs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        log = tmp_path / "log"
        with serving(log, "--prometheus", url, "--store", str(tmp_path / "s"), ready=False) as (process, address):
            assert _status(f"{address}/readyz") == 503
            waiting = Thread(target=_status, args=(f"{address}/api/v1/report",))
            waiting.start()
            _until(lambda: "listening" in log.read_text())
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0, log.read_text()
            assert time.monotonic() - began < 2
            waiting.join()


def test_sighup_reloads_budgets_and_a_mistake_ends_nothing(fleet_prometheus: FleetServer, tmp_path: Path) -> None:
    file, log = tmp_path / "budgets.yaml", tmp_path / "log"
    file.write_text(BUDGETS)
    with serving(log, "--prometheus", fleet_prometheus.url, "--budgets", str(file)) as (process, url):
        file.write_text("budgets: [{name: all}]\n")
        process.send_signal(signal.SIGHUP)
        _until(lambda: "the budgets stay as they were" in log.read_text())
        assert _status(f"{url}/api/v1/budgets") == 200
        assert process.poll() is None


def test_configuration_mistakes_prevent_the_start(fleet_prometheus: FleetServer, tmp_path: Path) -> None:
    file = tmp_path / "budgets.yaml"
    file.write_text("budgets: [{name: all, amount: much}]\n")
    done = _run("--prometheus", fleet_prometheus.url, "--budgets", str(file), "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert f"{file}:1" in done.stderr
    assert _run().returncode == 2
    assert "--titel: unknown flag; did you mean '--title'?" in _run("--titel", "x").stderr


def test_occupied_port_is_reported(fleet_prometheus: FleetServer, tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--prometheus", fleet_prometheus.url) as (_, url):
        taken = url.removeprefix("http://")
        done = _run("--prometheus", fleet_prometheus.url, "--listen", taken)
        assert done.returncode == 1
        assert f"cannot listen on '{taken}'" in done.stderr


def test_service_starts_and_reports_an_unreachable_prometheus(tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port(0)}"
    with serving(tmp_path / "log", "--prometheus", nowhere) as (_, url):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{url}/api/v1/report", timeout=30)  # noqa: S310 - our own server
        assert refused.value.code == 503
        assert b"cannot connect" in refused.value.read()
