"""The collectors preset ``wide``: what public dashboards ask has an answer, without DCGM."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from agent_support import AgentProcess, running_agent
from chart_support import FIXTURES, Scraper, scraping

from exporter.config.paths import read_collectors
from exporter.errors import ConfigError
from exporter.exposition.collectors_file import DEFAULT
from exporter.exposition.family import Kind

CONSUMERS: list[dict[str, Any]] = yaml.safe_load((FIXTURES / "wide_dashboards.yaml").read_text(encoding="utf-8"))
ASKED = [
    pytest.param(query, id=f"{consumer['who']}: {query[:80]}") for consumer in CONSUMERS for query in consumer["asks"]
]
TARGET = {"namespace": "gpu-cost", "pod": "agent-x", "instance_shape": "BM.GPU.H100.8", "oci_name": "node-a"}
"""Labels of the target, as relabelling in these installations brings them."""


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    words = (
        "--simulate",
        str(FIXTURES / "switch-over-node.yaml"),
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
    config = {"job_name": "nvidia-dcgm-exporter", "static_configs": targets}
    with scraping(tmp_path_factory.mktemp("wide"), [config]) as found:
        found.until('count_over_time(up{job="nvidia-dcgm-exporter"}[1m]) >= 4')
        yield found


@pytest.mark.parametrize("query", ASKED)
def test_wide_preset_answers_public_dashboards(server: Scraper, query: str) -> None:
    (one, *_) = (dict(labels)["UUID"] for labels in server.query('DCGM_FI_DEV_POWER_USAGE{exported_pod="train-0"}'))
    assert server.query(query.replace("$uuid", one))


def test_panels_without_data_name_series_of_others() -> None:
    for consumer in CONSUMERS:
        for ask in consumer.get("without", ()):
            assert not re.search(r"DCGM_|gpu_", ask["query"].replace("nvidia)_com_gpu", ""))
            assert ask["source"] in {"kube-state-metrics", "node-exporter"}


def test_wide_preset_extends_the_default_set() -> None:
    wide = read_collectors(Path("wide"))
    assert {row.name for row in DEFAULT.rows} <= {row.name for row in wide.rows}
    # A further text label would change the identity of every series.
    labels = [{row.name for row in found.rows if row.kind is Kind.LABEL} for found in (DEFAULT, wide)]
    assert labels[0] == labels[1]
    assert wide.warnings == ()
    assert wide.without_dcgm == ""


def test_unknown_preset_is_refused_with_the_names_of_presets() -> None:
    with pytest.raises(ConfigError, match=r"cannot read wyde: .* or a preset: wide"):
        read_collectors(Path("wyde"))
