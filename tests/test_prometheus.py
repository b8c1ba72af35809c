"""A real Prometheus scrapes the agent; its API returns the values that the agent shows."""

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from agent_support import AgentProcess

PATIENCE_SECONDS = 40.0


class Prometheus:
    """A Prometheus that scrapes one agent as two jobs: with the label names of the agent, and of the target."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, **query: str) -> object:
        """Return the data of an API answer."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> dict[frozenset[tuple[str, str]], float]:
        """Run an instant query; return values by label set."""
        data = self.ask("query", query=expression)
        assert isinstance(data, dict)
        return {frozenset(row["metric"].items()): float(row["value"][1]) for row in data["result"]}

    def value(self, expression: str) -> float:
        """Return the only value of a query."""
        (value,) = self.query(expression).values()
        return value


CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: agent
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{port}"], labels: {{namespace: monitoring, pod: exporter-x}}}}]
  - job_name: renamed
    honor_labels: false
    static_configs: [{{targets: ["127.0.0.1:{port}"], labels: {{namespace: monitoring, pod: exporter-x}}}}]
  - job_name: liar
    honor_labels: true
    static_configs: [{{targets: ["127.0.0.1:{liar}"]}}]
  - job_name: renamed-liar
    honor_labels: false
    static_configs: [{{targets: ["127.0.0.1:{liar}"]}}]
"""


class _Liar(BaseHTTPRequestHandler):
    """A compromised agent that sends series of another one."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(b'gpu_up{instance="victim:9400",gpu="7"} 0\n')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def liar() -> Iterator[str]:
    """Serve a target with a false identity; yield its address."""
    with HTTPServer(("127.0.0.1", 0), _Liar) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def prometheus(demo_agent: AgentProcess, liar: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs prometheus on the PATH: make install")
    directory = tmp_path_factory.mktemp("prometheus")
    config = CONFIG.format(port=demo_agent.port, liar=liar.rpartition(":")[2])
    (directory / "prometheus.yml").write_text(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
    log = (directory / "log").open("w")
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    server = Prometheus(port)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                if len(server.query("count_over_time(gpu_up{gpu='7'}[1m]) >= 3")) == 4:
                    break
            except OSError:
                pass
            assert time.monotonic() < deadline, (directory / "log").read_text()[-2000:]
            time.sleep(0.2)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=20)
        log.close()


def test_scrape_ingests_the_whole_page(prometheus: Prometheus, demo_agent: AgentProcess) -> None:
    targets = prometheus.ask("targets", state="active")
    assert isinstance(targets, dict)
    assert {(target["health"], target["lastError"]) for target in targets["activeTargets"]} == {("up", "")}
    scraped = prometheus.value('scrape_samples_scraped{job="agent"}')
    demo_agent.until(lambda page: abs(len(page) - scraped) <= 30, f"a page of {scraped:g} series, as Prometheus has it")


def test_queries_return_the_values_of_the_page(prometheus: Prometheus) -> None:
    assert prometheus.value('count(gpu_info{job="agent", gpu_instance=""})') == 8
    assert prometheus.value('gpu_exporter_simulated{job="agent"}') == 1
    assert prometheus.value('sum(gpu_pod_share_ratio{job="agent", gpu="6"})') == 0.75
    assert prometheus.value('count(gpu_allocation_state{job="agent", state="unallocated"} == 1)') == 4
    busy = prometheus.value(
        'avg_over_time(gpu_pod_activity_ratio{job="agent", pod_name="llama-pretrain-worker-0"}[10s])'
    )
    assert 0.1 <= busy <= 1


def test_parts_of_a_shared_gpu_sum_to_the_device(prometheus: Prometheus) -> None:
    difference = prometheus.query(
        'abs(sum by (uuid) (gpu_pod_activity_ratio{job="agent", gpu="6"})'
        ' + sum by (uuid) (gpu_unattributed_activity_ratio{job="agent", gpu="6"})'
        ' - sum by (uuid) (gpu_activity_ratio{job="agent", gpu="6"}))'
    )
    assert list(difference.values()) == [pytest.approx(0, abs=1e-9)]


def test_own_series_are_the_same_with_and_without_honor_labels(prometheus: Prometheus) -> None:
    def without_job(job: str) -> set[frozenset[tuple[str, str]]]:
        rows = prometheus.query(f'gpu_pod_info{{job="{job}"}}')
        return {frozenset(pair for pair in row if pair[0] != "job") for row in rows}

    assert without_job("agent") == without_job("renamed")
    assert not prometheus.query('{__name__=~"gpu_.*", job="renamed", exported_pod!=""}')
    moved = 'DCGM_FI_DEV_POWER_USAGE{job="renamed", exported_pod="llama-pretrain-worker-0", pod="exporter-x"}'
    assert len(prometheus.query(moved)) == 1


def test_target_can_write_another_instance_only_with_honor_labels(prometheus: Prometheus, liar: str) -> None:
    (honoured,) = prometheus.query('gpu_up{job="liar"}')
    assert dict(honoured)["instance"] == "victim:9400"
    assert liar not in dict(honoured).values(), "no label of the series identifies its target"
    (renamed,) = prometheus.query('gpu_up{job="renamed-liar"}')
    assert (dict(renamed)["instance"], dict(renamed)["exported_instance"]) == (liar, "victim:9400")
    targets = prometheus.ask("targets", state="active")
    assert isinstance(targets, dict)
    assert {one["labels"]["instance"] for one in targets["activeTargets"]} >= {liar}


def test_queries_of_public_dashboards_return_data(prometheus: Prometheus) -> None:
    for expression in (
        'DCGM_FI_DEV_GPU_TEMP{gpu=~"0|1"}',
        "sum(DCGM_FI_DEV_POWER_USAGE)",
        "DCGM_FI_DEV_SM_CLOCK * 1000000",
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_FB_USED",
        "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
        'avg(DCGM_FI_PROF_GR_ENGINE_ACTIVE{container!=""}) by (container, pod, namespace, pod_uid)',
        'group(DCGM_FI_DEV_DEC_UTIL{container!=""}) by (container, pod, namespace, device, modelName, UUID)',
    ):
        assert prometheus.query(expression), expression
