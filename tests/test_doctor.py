"""The doctor: each check reports ok, or cause and fix."""

import io
import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc.aio
import pytest
from page_support import configured

from exporter.accounting.state_file import WriterLock
from exporter.agent.run import attributor_of
from exporter.cli import main
from exporter.config import AgentConfig, load_agent
from exporter.config.types import Listen
from exporter.doctor import checks, findings, kubernetes, machine, sources
from exporter.doctor.checks import Counts, diagnose
from exporter.doctor.findings import Finding, Level, Surroundings, fail, ok, warn
from exporter.gpu import wire
from exporter.kube.kubelet import SERVICE, KubeletPoller
from exporter.model.attribution import Allocations, Attribution, NodeFacts, Unresolved
from exporter.model.devices import DeviceState, Gpu, GpuReading, ProcessUse, Reading, SourceState, SourceStatus
from exporter.model.fields import Field
from gpu_simulator import scenario
from gpu_simulator.kubelet import RATE_LIMIT_TEXT, KubeletServer, list_response
from gpu_simulator.node import SimulatedNode

SPEAK = "import sys, time; print(end=sys.argv[1], flush=True); time.sleep(60)"


def settings(**changes: object) -> AgentConfig:
    return configured(load_agent({}, {}, check_paths=False), **{"lock_dir": None, **changes})


def around(config: AgentConfig) -> Surroundings:
    return Surroundings(config=config, wall=time.time, monotonic=time.monotonic)


async def asked_kubelet(config: AgentConfig) -> tuple[Finding, Allocations | None]:
    source = attributor_of(config).kubelet
    assert isinstance(source, KubeletPoller)
    return await kubernetes.ask_kubelet(around(config), source), source.latest


def gpu(index: int = 0) -> Gpu:
    return Gpu(
        uuid=f"GPU-0000000{index}-1111-2222-3333-444444444444",
        index=index,
        minor=index,
        model="NVIDIA L40S",
        pci_bus_id=f"00000000:0{index + 1}:00.0",
    )


def reading(*gpus: GpuReading) -> Reading:
    return Reading(source="nvml", taken_at_seconds=1.0, duration_seconds=0.01, driver_version="570.1", gpus=gpus)


def healthy(index: int = 0, field: Field = Field.PROF_GR_ENGINE_ACTIVE) -> GpuReading:
    return GpuReading(gpu=gpu(index), values={field: 0.5}, processes=(ProcessUse(pid=7),))


def speaking(*messages: Reading | SourceStatus) -> list[str]:
    """Return a child that prints these lines and then waits."""
    lines = b"".join(wire.encode(message) for message in messages)
    return [sys.executable, "-c", SPEAK, lines.decode()]


async def driver_finding(command: list[str], deadline: float = 20.0) -> tuple[Finding, Reading | None]:
    node = replace(around(settings()), worker_command=command, driver_deadline_seconds=deadline)
    return await sources.driver(node, ())


async def test_working_driver_is_ok_with_its_version() -> None:
    last = reading(healthy())
    finding, got = await driver_finding(speaking(last, last, last))
    assert finding.level is Level.OK
    assert "570.1" in finding.cause
    assert got == last


async def test_failed_driver_is_a_fail_with_its_message() -> None:
    status = SourceStatus(name="nvml", state=SourceState.FAILED, reason="driver_not_loaded", message="load the module")
    finding, got = await driver_finding(speaking(status))
    assert (finding.level, finding.cause, got) == (Level.FAIL, "load the module", None)


async def test_hanging_driver_is_a_fail_within_the_deadline() -> None:
    started = time.monotonic()
    finding, got = await driver_finding([sys.executable, "-c", "import time; time.sleep(60)"], deadline=0.5)
    assert time.monotonic() - started < 10
    assert (finding.level, finding.cause, got) == (Level.FAIL, "no answer within 0.5 s", None)


def test_devices_are_counted_by_model_and_a_faulty_one_is_named() -> None:
    assert sources.driver_devices(reading(healthy(0), healthy(1))) == ok("devices", "2 x NVIDIA L40S")
    lost = replace(healthy(1), state=DeviceState.RESET_REQUIRED)
    finding = sources.driver_devices(reading(healthy(0), lost))
    assert finding.level is Level.FAIL
    assert "GPU 1 reset required" in finding.cause
    assert sources.driver_devices(reading()).level is Level.FAIL


def test_activity_source_is_reported_and_an_unmeasured_device_is_a_warning() -> None:
    assert "all 1 GPUs" in sources.activity(reading(healthy())).cause
    mixed = sources.activity(reading(healthy(0), healthy(1, Field.GPU_UTIL)))
    assert (mixed.level, "1 of 2" in mixed.cause) == (Level.OK, True)
    assert sources.activity(reading(healthy(0, Field.FB_USED))).level is Level.WARN


def test_missing_process_list_is_a_warning() -> None:
    assert sources.processes(reading(healthy())) == ok("processes", "1 processes listed")
    assert sources.processes(reading(replace(healthy(), processes=None))).level is Level.WARN


async def test_missing_kubelet_is_a_failure(tmp_path: Path) -> None:
    config = settings(kubelet_socket=str(tmp_path / "none.sock"))
    finding, answer = await asked_kubelet(config)
    assert (finding.level, answer) == (Level.FAIL, None)
    assert "none.sock" in finding.cause


async def test_kubelet_without_pods_is_a_warning(tmp_path: Path) -> None:
    server = KubeletServer(tmp_path / "kubelet.sock", lambda: scenario.load("demo").at(0.0))
    await server.restart(starting_seconds=60.0)
    config = settings(kubelet_socket=str(tmp_path / "kubelet.sock"))
    try:
        finding, answer = await asked_kubelet(config)
        await server.restart()
        well, reported = await asked_kubelet(config)
    finally:
        await server.stop()
    assert (finding.level, answer) == (Level.WARN, None)
    assert "no pod is listed" in finding.cause
    assert "API server" in finding.fix
    assert (well.level, reported is None) == (Level.OK, False)


async def test_inventory_rate_limit_is_not_reported_as_an_old_kubelet(tmp_path: Path) -> None:
    async def listed(_request: bytes, _context: object) -> bytes:
        return list_response(scenario.load("demo").at(0.0))

    async def refused(_request: bytes, context: Any) -> bytes:  # noqa: ANN401 - grpc's own type is private
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, RATE_LIMIT_TEXT)
        raise AssertionError

    server = grpc.aio.server()
    handlers = {
        "List": grpc.unary_unary_rpc_method_handler(listed),
        "GetAllocatableResources": grpc.unary_unary_rpc_method_handler(refused),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"unix:{tmp_path / 'kubelet.sock'}")
    await server.start()
    try:
        config = settings(kubelet_socket=str(tmp_path / "kubelet.sock"))
        finding, answer = await asked_kubelet(config)
    finally:
        await server.stop(None)
    assert finding.level is Level.WARN
    assert "its limit of 100 calls/s is used up" in finding.cause
    assert answer is not None
    counts = Counts(seen=1, allocated=1, inventory_refused=True)
    assert diagnose(counts).cause == "1 GPU here, advertised devices not known, 1 held"
    assert "is too old" in diagnose(replace(counts, inventory_refused=False)).fix


def test_stopped_device_plugin_is_reported_as_not_advertising_now() -> None:
    lacking = Unresolved(
        namespace="ml", pod="a", container="c", resource="nvidia.com/gpu", device_id="x::0", reason="replicas_unknown"
    )
    found = kubernetes.agreement(Attribution(known=True, unresolved=(lacking,)))
    assert "does not advertise this shared GPU now" in found.fix
    assert "never" not in found.fix


def test_device_nodes_and_the_control_node_are_required(tmp_path: Path) -> None:
    assert machine.device_nodes(tmp_path).level is Level.FAIL
    (tmp_path / "nvidia0").touch()
    assert machine.device_nodes(tmp_path).level is Level.FAIL
    (tmp_path / "nvidiactl").touch()
    assert machine.device_nodes(tmp_path) == ok("device nodes", f"1 GPU nodes in {tmp_path}")


def test_hidden_host_processes_are_a_warning(tmp_path: Path) -> None:
    finding = machine.process_tree(tmp_path)
    assert (finding.level, "hostPID: true" in finding.fix) == (Level.WARN, True)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "comm").write_text("kthreadd\n")
    assert machine.process_tree(tmp_path).level is Level.OK


def test_pod_logs_are_counted(tmp_path: Path) -> None:
    assert machine.pod_logs(tmp_path).level is Level.WARN
    assert machine.pod_logs(tmp_path / "none").level is Level.WARN
    (tmp_path / "ml_train-0_8a6bf3a5-0000-0000-0000-000000000000").mkdir()
    assert machine.pod_logs(tmp_path).cause.startswith("1 pods")


def test_node_lock_is_free_held_by_an_agent_or_unavailable(tmp_path: Path) -> None:
    config = settings(lock_dir=tmp_path / "run", node_name="n1")
    assert machine.writer_lock(config).level is Level.OK
    assert not (tmp_path / "run").exists(), "the doctor creates no files"
    agent = WriterLock(node="n1", directory=tmp_path / "run")
    assert agent.take()
    taken = machine.writer_lock(config)
    assert taken.level is Level.OK
    assert "n1.lock" in taken.cause
    assert "an agent of this node has it" in taken.cause
    agent.release()
    assert "is free" in machine.writer_lock(config).cause
    bad = machine.writer_lock(configured(config, lock_dir=tmp_path / "none" / "below"))
    assert bad.level is Level.WARN
    assert "--lock-dir" in bad.fix
    assert machine.writer_lock(configured(config, lock_dir=None)).level is Level.OK


def test_state_directory_must_be_a_directory(tmp_path: Path) -> None:
    assert machine.state_dir(None).level is Level.OK
    assert machine.state_dir(tmp_path).level is Level.OK
    assert machine.state_dir(tmp_path / "none").level is Level.FAIL
    assert machine.state_dir(tmp_path / ("x" * 300)).level is Level.FAIL


def test_clock_decades_off_is_a_fail() -> None:
    assert machine.clock(1_800_000_000.0).level is Level.OK
    assert machine.clock(0.0).level is Level.FAIL


@contextmanager
def answering(body: bytes) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # the name is the standard library's
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def test_port_is_ok_if_free_or_served_by_an_agent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        free = probe.getsockname()[1]
    assert machine.port("127.0.0.1", free).level is Level.OK
    with answering(b"ok\n") as number:
        assert "already serving" in machine.port("127.0.0.1", number).cause
    with answering(b"something else") as number:
        finding = machine.port("127.0.0.1", number)
    assert (finding.level, "--listen" in finding.fix) == (Level.FAIL, True)
    assert "while attempting" not in finding.cause


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_port_taken_on_ipv6_only_is_a_fail() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        assert machine.port("", taken.getsockname()[1]).level is Level.FAIL


def test_invalid_collectors_file_is_a_finding(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text("DCGM_FI_DEV_GPU_TEMPP, gauge, x\n")
    finding, _ = machine.collectors(settings(collectors=path))
    assert finding.level is Level.FAIL
    assert f"{path}:1" in finding.cause
    assert machine.collectors(settings())[0].level is Level.OK


FINDINGS = (ok("clock", "steady"), warn("pods", "two\nlines", "mount them"), fail("driver", "gone", "load it"))


def test_text_findings_are_one_line_each_without_colour() -> None:
    stream = io.StringIO()
    findings.write_text(FINDINGS, simulated=True, stream=stream)
    assert stream.getvalue().splitlines() == [
        "SIMULATED NODE: nothing here is real",
        "ok   clock              steady",
        "warn pods               two lines  → mount them",
        "fail driver             gone  → load it",
        "1 ok, 1 warn, 1 fail",
    ]


def test_json_findings_have_the_worst_level() -> None:
    stream = io.StringIO()
    findings.write_json(FINDINGS, simulated=False, stream=stream)
    document = json.loads(stream.getvalue())
    assert (document["simulated"], document["level"], len(document["findings"])) == (False, "fail", 3)
    assert document["findings"][0] == {"name": "clock", "level": "ok", "cause": "steady", "fix": None}
    assert findings.worst(()) is Level.OK


def test_simulated_node_has_every_finding(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = ("--report", str(tmp_path / "report.json"))
    code = main(["doctor", "--simulate", "demo", "--format", "json", "--listen", "127.0.0.1:0", *report])
    document = json.loads(capsys.readouterr().out)
    levels = {finding["name"]: finding["level"] for finding in document["findings"]}
    assert (code, document["simulated"]) == (0, True)
    assert {name for name, level in levels.items() if level == "fail"} == set()
    assert {"driver", "devices", "activity", "kubelet", "kubelet and driver", "pod logs", "layers"} <= set(levels)
    assert {"kubernetes API", "API rights", "owners", "node labels"} <= set(levels)
    assert_reports_hardware_without_names((tmp_path / "report.json").read_text(), levels)


def test_disabled_attribution_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--simulate", "demo", "--attribution", "off", "--format", "json", "--listen", "127.0.0.1:0"])
    findings = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert (findings["kubelet"]["level"], findings["kubelet"]["fix"]) == ("warn", "set --attribution on")
    assert findings["layers"]["level"] == "ok"


def assert_reports_hardware_without_names(text: str, levels: dict[str, str]) -> None:
    report = json.loads(text)
    (nvml,) = report["sources"]
    assert {check["name"]: check["level"] for check in report["checks"]} == levels
    assert (nvml["driver_version"], len(nvml["gpus"]), nvml["sample_seconds"] > 0) == ("590.48.01", 8, True)
    assert {"GPU_UTIL", "FB_USED", "POWER_USAGE"} <= nvml["gpus"][0]["values"].keys()
    assert nvml["gpus"][4]["instances"][0]["values"]["PROF_GR_ENGINE_ACTIVE"] >= 0
    assert nvml["gpus"][0]["processes"]["listed"] > 0
    truth = scenario.load("demo").at(0.0)
    names = {truth.node, socket.gethostname(), *(name for one in truth.holders for name in (one.namespace, one.pod))}
    words = set(re.findall(r"[\w.-]+", text))
    assert not names & words
    assert not any(gpu.uuid in text for gpu in truth.gpus)
    assert truth.gpus[0].uuid[:12] in text, "shortened UUIDs distinguish the two GPUs"


def test_node_outside_kubernetes_has_no_kubelet_findings(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--workload-manager", "host", "--kube-metadata", "off", "--listen", "127.0.0.1:0", "--format", "json")
    assert main(["doctor", "--simulate", "demo", *options]) == 0
    found = {one["name"]: one["cause"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert found["workload manager"].startswith("host: 15 hold devices, by their processes")
    assert not {"kubelet", "kubelet and driver", "kubernetes API", "pod logs"} & set(found)


async def test_missing_driver_gives_no_owner_finding(tmp_path: Path) -> None:
    node = SimulatedNode(scenario.load("demo"), tmp_path, time.time)
    await node.start()
    try:
        config = settings(
            node_name="sim-h100-01",
            kubelet_socket=str(node.kubelet_socket),
            kube_metadata=True,
            kubeconfig=node.kubeconfig,
            proc_root=node.proc_root,
            listen=Listen("", 0),
        )
        gone = SourceStatus(name="nvml", state=SourceState.FAILED, message="no driver")
        node_around = replace(around(config), worker_command=speaking(gone), simulated=True)
        found = {finding.name: finding for finding in (await checks.examine(node_around)).findings}
    finally:
        await node.stop()
    assert (found["driver"].level, found["kubernetes API"].level) == (Level.FAIL, Level.OK)
    assert "owners" not in found, "the holders of the GPUs are unknown"


def test_disabled_metadata_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--simulate", "demo", "--kube-metadata", "off", "--listen", "127.0.0.1:0", "--format", "json"])
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)["findings"]}
    assert (found["kubernetes API"]["level"], "owners" in found) == ("ok", False)


def test_node_without_a_driver_exits_with_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["doctor", "--kubelet-socket", str(tmp_path / "none.sock"), "--proc-root", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert any(line.startswith("fail kubelet ") for line in lines)
    assert any(line.startswith("fail driver ") for line in lines)


def test_region_price_row_is_matched_by_node_labels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    row = "- {region: westeurope, capacity_type: spot, per_gpu_hour: 2, source: s, as_of: 2026-03-01}\n"
    path.write_text("currency: EUR\nlist_prices: off\nrows:\n" + row)
    options = ("--price-book", str(path), "--listen", "127.0.0.1:0", "--format", "json")
    levels = {}
    for metadata in ("on", "off"):
        main(["doctor", "--simulate", "owners", "--kube-metadata", metadata, *options])
        found = {one["name"]: one["level"] for one in json.loads(capsys.readouterr().out)["findings"]}
        levels[metadata] = found["price book"]
    assert levels == {"on": "ok", "off": "warn"}


def price_finding(path: Path | None, *gpus: GpuReading, now: float = 1_790_000_000.0, **changes: object) -> Finding:
    return checks.book(settings(book=path, **changes), NodeFacts(), reading(*gpus) if gpus else None, now)


def test_price_book_finding_has_row_count_dates_and_the_fallback(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    row = "  - {model: %s, per_gpu_hour: 2, source: s, as_of: %s}\n"
    path.write_text("currency: EUR\nrows:\n" + row % ("NVIDIA H100*", "2026-03-01") + row % ("NVIDIA L4", "2026-01-15"))
    found = price_finding(path, healthy())
    assert (found.level, found.name) == (Level.OK, "price book")
    assert found.cause.startswith("mine.yaml: 2 rows, EUR, as of 2026-01-15 to 2026-03-01; else list-prices: ")
    assert price_finding(None, healthy()).cause.startswith("list-prices: ")
    assert price_finding(Path("none"), healthy()).level is Level.OK


def test_invalid_price_book_is_a_fail_and_an_unpriced_gpu_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert price_finding(path).level is Level.FAIL
    path.write_text("currency: EUR\n")
    assert "mine.yaml:1: rows: missing" in price_finding(path).cause
    row = "  - {region: r1, per_gpu_hour: 2, source: s, as_of: 2026-03-01}\n"
    path.write_text("currency: EUR\nlist_prices: off\nrows:\n" + row)
    assert price_finding(path, healthy(), region="r1").level is Level.OK
    unpriced = price_finding(path, healthy())
    assert (unpriced.level, "no price for NVIDIA L40S" in unpriced.cause) == (Level.WARN, True)
    assert price_finding(path, healthy(), region="r1", now=1_740_000_000.0).level is Level.WARN
