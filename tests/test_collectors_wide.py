"""The collectors preset ``wide``: queries of public dashboards have an answer, without DCGM."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_support import AgentProcess, running_agent
from chart_support import FIXTURES, Scraper, scraping
from files_support import read_yaml

from exporter.config import read_collectors
from exporter.errors import ConfigError
from exporter.metrics.collectors_file import DEFAULT
from exporter.metrics.text_format import Kind

CONSUMERS: list[dict[str, Any]] = read_yaml((FIXTURES / "wide_dashboards.yaml").read_text(encoding="utf-8"))
OTHERS = read_yaml((FIXTURES / "consumers.yaml").read_text(encoding="utf-8"))
"""test_consumers.py checks the truth of the answers with the default set."""
ASKED = [
    *((consumer["who"], query) for consumer in CONSUMERS for query in consumer["asks"]),
    *(
        (other["who"], ask["query"])
        for other in OTHERS
        if other["who"].startswith(("Grafana 12239", "OpenCost"))
        for ask in other["asks"]
    ),
]
TARGET = {
    "namespace": "gpu-cost",
    "pod": "agent-x",
    "instance_shape": "BM.GPU.H100.8",
    "oci_name": "node-a",
    "deployment": "my-gpu-workload",
}
"""Labels of the target, as set by relabelling in these installations."""
LOWER_CASE = [
    {"source_labels": ["__name__"], "regex": "DCGM_FI_DEV_GPU_UTIL", "action": "keep"},
    {"source_labels": ["__name__"], "target_label": "__name__", "action": "lowercase"},
]
IDLE = "  - {namespace: lab, name: idle-0, container: nb, start: -600, devices: [{gpu: 1}], activity: 0}\n"
"""An idle pod for gpu-pruner."""


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    node = tmp_path_factory.mktemp("node") / "node.yaml"
    node.write_text((FIXTURES / "switch-over-node.yaml").read_text(encoding="utf-8").replace("xids:", f"{IDLE}xids:"))
    words = (
        "--simulate",
        str(node),
        "--collectors",
        "wide",
        "--sample-interval",
        "500ms",
    )
    with running_agent(*words, env={"NODE_NAME": "node-a"}) as found:
        found.until(lambda page: any(name.startswith("DCGM_FI_PROF_NVLINK_TX_BYTES") for name in page), "NVLink rates")
        yield found


@pytest.fixture(scope="module")
def server(agent: AgentProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraper]:
    targets = [{"targets": [f"127.0.0.1:{agent.port}"], "labels": TARGET}]
    configs = [
        {"job_name": "nvidia-dcgm-exporter", "static_configs": targets},
        {"job_name": "honoured", "honor_labels": True, "static_configs": targets},
        {"job_name": "lower-case", "static_configs": targets, "metric_relabel_configs": LOWER_CASE},
    ]
    with scraping(tmp_path_factory.mktemp("wide"), configs) as found:
        found.until('count_over_time(up{job="nvidia-dcgm-exporter"}[1m]) >= 4')
        yield found


@pytest.mark.parametrize("query", [pytest.param(query, id=f"{who}: {query[:80]}") for who, query in ASKED])
def test_wide_preset_answers_public_dashboards(server: Scraper, query: str) -> None:
    (one, *_) = (dict(labels)["UUID"] for labels in server.query('DCGM_FI_DEV_POWER_USAGE{exported_pod="train-0"}'))
    for name, value in {"uuid": one, "namespace": "ml", "instance": ".*", "gpu": ".*"}.items():
        query = query.replace(f"${name}", value)
    assert server.query(query)


def test_panels_without_data_need_series_of_other_exporters() -> None:
    for consumer in CONSUMERS:
        for ask in consumer.get("without", ()):
            assert not re.search(r"DCGM_|gpu_", ask["query"].replace("nvidia)_com_gpu", ""))
            assert ask["source"] in {"kube-state-metrics", "node-exporter"}


def test_wide_preset_extends_the_default_set() -> None:
    wide = read_collectors(Path("wide"))
    assert {row.name for row in DEFAULT.rows} <= {row.name for row in wide.rows}
    # Another text label would change the identity of every series.
    labels = [{row.name for row in found.rows if row.kind is Kind.LABEL} for found in (DEFAULT, wide)]
    assert labels[0] == labels[1]
    assert wide.warnings == ()
    assert wide.without_dcgm == ""


def test_unknown_preset_is_refused_with_the_names_of_presets() -> None:
    with pytest.raises(ConfigError, match=r"cannot read wyde: .* or a preset: wide"):
        read_collectors(Path("wyde"))
