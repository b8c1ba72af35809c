"""Faults on the way to a DCGM engine: doctor names cause and fix, and the agent continues with NVML."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer, ThreadingTCPServer

import dcgm_stub_support as dcgm_stub
import pytest
import stub_support as stub
from agent_support import ROOT, AgentProcess, matching, run_fork, running_agent

pytestmark = pytest.mark.skipif(stub.compiler() is None, reason="the simulated libraries need a C compiler")

GPUS = 2
INTERVAL_SECONDS = 0.2
WATCHED_SECONDS = 2.0
"""Ten attempts: a line for each attempt would appear more than once."""
_NO_OVERRIDE = ("setpriv", "--bounding-set=-dac_override")


@dataclass(frozen=True)
class Place:
    """The simulated libraries, their control files, and a folder for one test."""

    libraries: Path
    older: Path
    nvml_only: Path
    directory: Path

    @property
    def control(self) -> Path:
        return self.directory / "dcgm-control"

    def environment(self, libraries: Path) -> dict[str, str]:
        beside = stub.environment(self.nvml_only, self.directory / "nvml-control")
        return dcgm_stub.environment(libraries, self.control, base=beside)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    directory = tmp_path_factory.mktemp("libraries")
    four = dcgm_stub.build(directory / "4")
    three = dcgm_stub.build(directory / "3", major=3)
    return four, three, stub.build(directory / "nvml")


@pytest.fixture
def place(built: tuple[Path, Path, Path], tmp_path: Path) -> Place:
    stub.control(tmp_path / "nvml-control", gpus=GPUS)
    dcgm_stub.control(tmp_path / "dcgm-control", gpus=GPUS)
    return Place(*built, directory=tmp_path)


@dataclass(frozen=True)
class Case:
    """Address for the agent, and the expected report."""

    address: str
    reason: str
    words: tuple[str, ...]
    """Words of the line, of cause and fix."""
    libraries: Path
    finding: str = "DCGM engine"
    prefix: tuple[str, ...] = ()


def nowhere(place: Place) -> Case:
    """Return the case of a port on which nothing listens."""
    port = dcgm_stub.free_port()
    words = (f"nothing listens at 127.0.0.1:{port}", "start nv-hostengine", "--dcgm-address")
    return Case(f"127.0.0.1:{port}", "dcgm_refused", words, place.libraries)


def nameless(place: Place) -> Case:
    """Return the case of an unknown host name."""
    words = ("no host of the name in engine.invalid:5555", "--dcgm-address", "DNS")
    return Case("engine.invalid", "dcgm_no_such_host", words, place.libraries)


def socketless(place: Place) -> Case:
    """Return the case of a path without a socket."""
    path = place.directory / "none.sock"
    return Case(f"unix://{path}", "dcgm_socket_missing", (f"no socket unix://{path}", "-d", "mount"), place.libraries)


def libraryless(place: Place) -> Case:
    """Return the case of a missing libdcgm."""
    words = ("libdcgm was not found", "install DCGM's client library")
    return Case("127.0.0.1", "dcgm_library_not_found", words, place.nvml_only)


class _Web(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class _Banner(BaseRequestHandler):
    def handle(self) -> None:
        self.request.sendall(b"SSH-2.0-Something\r\n" + bytes(256))


@contextmanager
def serving(server: TCPServer) -> Iterator[str]:
    """Run a server; yield its address."""
    with server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def web_server(place: Place) -> Iterator[Case]:
    """Yield the case of an HTTP server, which waits for the end of a line that does not come."""
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), _Web)) as where:
        words = (f"something takes connections at {where} and does not answer", "restart it", "--dcgm-address")
        yield Case(where, "dcgm_silent", words, place.libraries)


@contextmanager
def greeter(place: Place) -> Iterator[Case]:
    """Yield the case of another protocol, such as that of an SSH server."""
    with serving(ThreadingTCPServer(("127.0.0.1", 0), _Banner)) as where:
        words = (f"what listens at {where} does not answer as a DCGM host engine", "port 5555")
        yield Case(where, "dcgm_not_an_engine", words, place.libraries)


@contextmanager
def mute(place: Place) -> Iterator[Case]:
    """Yield the case of a port that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        words = (f"something takes connections at {where} and does not answer", "restart it", "--dcgm-address")
        yield Case(where, "dcgm_silent", words, place.libraries)


@contextmanager
def older_engine(place: Place) -> Iterator[Case]:
    """Yield the case of an engine of DCGM 3 and a library of DCGM 4."""
    with dcgm_stub.Engine(place.older, place.control, release="3.3.9") as engine:
        words = (f"the host engine at {engine.address} is DCGM", "libdcgm.so.4 is 4.6.0", "client library")
        yield Case(engine.address, "dcgm_version_mismatch", words, place.libraries)


@contextmanager
def older_library(place: Place) -> Iterator[Case]:
    """Yield the case of a library of DCGM 3 and an engine of DCGM 4."""
    with dcgm_stub.Engine(place.libraries, place.control) as engine:
        words = (f"the host engine at {engine.address} is DCGM", "libdcgm.so.3 is 3.3.9", "client library")
        yield Case(engine.address, "dcgm_version_mismatch", words, place.older)


@contextmanager
def closed_socket(place: Place) -> Iterator[Case]:
    """Yield the case of a socket without permission for this user; root without its capability has none, either."""
    path = place.directory / "engine.sock"
    with dcgm_stub.Engine(place.libraries, place.control, socket_path=path) as engine:
        path.chmod(0)
        prefix = _NO_OVERRIDE if os.geteuid() == 0 else ()
        words = (f"this user may not open the socket unix://{path}", "run as a user or group")
        yield Case(engine.address, "dcgm_no_permission", words, place.libraries, prefix=prefix)


AGENTS = {nowhere, libraryless, mute, older_engine}
"""Cases in which an agent runs, too, one for each kind of failure; test_dcgm_source has the reasons of all."""
CASES = (
    *(nowhere, nameless, socketless, libraryless, web_server),
    *(greeter, mute, older_engine, older_library, closed_socket),
)


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_doctor_and_agent_report_the_same_cause_and_fix_once(kind: object, place: Place) -> None:
    with ExitStack() as stack:
        made = kind(place)  # type: ignore[operator] - each is a function of the place
        case = made if isinstance(made, Case) else stack.enter_context(made)
        env = place.environment(case.libraries)
        arguments = ("--dcgm-address", case.address, "--sample-interval", f"{INTERVAL_SECONDS:g}s", "--attribution=off")
        line = finding_of_doctor(case, arguments, env)
        for words in case.words:
            assert words in line
        if kind not in AGENTS:
            return
        agent = stack.enter_context(running_agent(*arguments, env=env))
        page = agent.until(
            lambda page: matching(page, "gpu_exporter_errors_total", part="dcgm", reason=case.reason), case.reason
        )
        assert matching(page, "gpu_exporter_source_up", source="dcgm") == {source_up("dcgm"): 0.0}
        continues_with_nvml(agent)
        assert [logged for logged in agent.lines if line in logged] != [], agent.lines
        assert len([logged for logged in agent.lines if case.words[0] in logged]) == 1
        assert line in " ".join(unescape(agent.get("/")[1]).split())


def finding_of_doctor(case: Case, arguments: tuple[str, ...], env: dict[str, str]) -> str:
    """Return the doctor's only finding at a level other than ok because of DCGM."""
    words, whole = ("doctor", "--format", "json", *arguments), {**os.environ, **env}
    if case.prefix:
        command = [*case.prefix, sys.executable, "-m", "exporter", *words]
        run = subprocess.run(command, cwd=ROOT, env=whole, capture_output=True, text=True, timeout=60, check=False)
    else:
        run = run_fork(*words, env=whole)
    findings = {one["name"]: one for one in json.loads(run.stdout)["findings"]}
    assert findings["driver"]["level"] == "ok", "NVML works"
    found = findings[case.finding]
    assert found["level"] == "warn", "with NVML it is only a warning"
    others = [name for name in findings if name.startswith("DCGM ") and name != case.finding]
    assert all(findings[name]["level"] == "ok" for name in others)
    return str(found["cause"])


def source_up(source: str) -> str:
    return f'gpu_exporter_source_up{{source="{source}"}}'


def continues_with_nvml(agent: AgentProcess) -> None:
    """Wait until every GPU is up and measured for some time."""
    name = "gpu_exporter_snapshot_timestamp_seconds"
    started = agent.until(lambda page: page.get(name), "a snapshot")[name]
    page = agent.until(lambda page: page[name] > started + WATCHED_SECONDS, "more snapshots")
    assert list(matching(page, "gpu_up").values()) == [1.0] * GPUS
    assert len(matching(page, "gpu_activity_ratio", measured_by="nvml")) == GPUS
    assert page[source_up("nvml")] == 1.0
    assert agent.get("/readyz")[0] == 200


SILENT = {
    "paused": ("dcgm_no_values", "gives no values"),
    "full": ("dcgm_limit_reached", "no room for another group"),
    "empty": ("dcgm_no_gpus", "has no GPU"),
}


@pytest.mark.parametrize("kind", SILENT)
def test_dcgm_alone_without_values_is_degraded_and_no_gpu_is_down(kind: str, place: Place) -> None:
    reason, words = SILENT[kind]
    control = place.directory / "dcgm-control"
    block = dcgm_stub.opened(control)
    if kind == "full":
        block.foreign_groups = 64
    arguments = ("--source=dcgm", "--sample-interval", f"{INTERVAL_SECONDS:g}s", "--attribution=off")
    with (
        dcgm_stub.Engine(place.libraries, control) as engine,
        running_agent(*arguments, "--dcgm-address", engine.address, env=place.environment(place.libraries)) as agent,
    ):
        if kind != "full":
            agent.until(lambda page: list(matching(page, "gpu_up").values()) == [1.0] * GPUS, "GPUs are up")
        if kind == "paused":
            block.pause()
        if kind == "empty":
            block.gpu_count = 0
        page = agent.until(
            lambda page: (
                matching(page, "gpu_exporter_errors_total", part="dcgm", reason=reason) and not page[source_up("dcgm")]
            ),
            reason,
        )
        assert matching(page, "gpu_up") == {}, "the fault shows nothing about the GPUs"
        status, text = agent.get("/readyz")
        assert status == 503
        assert words in text
        assert len([line for line in agent.lines if "source dcgm is failed" in line and words in line]) == 1
        block.foreign_groups, block.gpu_count = 0, GPUS
        if kind != "full":
            block.resume()
            agent.until(lambda page: list(matching(page, "gpu_up").values()) == [1.0] * GPUS, "GPUs are up again")
            assert agent.get("/readyz")[0] == 200


def test_engine_without_gpus_takes_no_nvml_gpu_down(place: Place) -> None:
    block = dcgm_stub.opened(place.control)
    arguments = ("--sample-interval", f"{INTERVAL_SECONDS:g}s", "--attribution=off")
    with (
        dcgm_stub.Engine(place.libraries, place.control) as engine,
        running_agent(*arguments, "--dcgm-address", engine.address, env=place.environment(place.libraries)) as agent,
    ):
        agent.until(lambda page: page.get(source_up("dcgm")), "both sources are up")
        block.gpu_count = 0
        agent.until(lambda page: not page[source_up("dcgm")], "the engine is degraded")
        continues_with_nvml(agent)
        assert "note: dcgm: failed" in agent.get("/readyz")[1]


def test_dcgm_exporter_arguments_give_the_whole_page_without_nvml(place: Place) -> None:
    control = place.directory / "dcgm-control"
    env = dcgm_stub.environment(place.libraries, control)
    with dcgm_stub.Engine(place.libraries, control) as engine:
        words = ("-k=false", "-r", engine.address, "-c", "200", "--disable-startup-validate")
        with running_agent(*words, env=env) as agent:
            page = agent.until(lambda page: matching(page, "DCGM_FI_DEV_SM_CLOCK"), "a field that NVML has, too")
            for name in ("GPU_TEMP", "FB_FREE", "PCIE_REPLAY_COUNTER", "UNCORRECTABLE_REMAPPED_ROWS", "GPU_UTIL"):
                assert len(matching(page, f"DCGM_FI_DEV_{name}")) == GPUS, name
