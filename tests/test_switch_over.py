"""From dcgm-exporter's chart to this one by docs/migrating.md: the new exporter answers the queries of the old one.

`fixtures/dcgm-exporter-values.yaml` is an install of its chart, `fixtures/switched-over-values.yaml` the same for ours.
dcgm-exporter's page for the simulated node is written here in its documented form, and served to the same Prometheus.
"""

import csv
import io
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from agent_support import AgentProcess, running_agent
from chart_support import (
    FIXTURES,
    ROOT,
    Document,
    Scraper,
    documents,
    of_kind,
    page_server,
    scrape_config,
    scraping,
    started,
)
from files_support import read_yaml

OLD_VALUES: Document = read_yaml((FIXTURES / "dcgm-exporter-values.yaml").read_text(encoding="utf-8"))
NEW_VALUES = FIXTURES / "switched-over-values.yaml"
NODE = FIXTURES / "switch-over-node.yaml"
QUERIES: list[dict[str, Any]] = read_yaml((FIXTURES / "dcgm-exporter-queries.yaml").read_text(encoding="utf-8"))
OLD, NEW = "dcgm-exporter", "gpu-cost-exporter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The subject of a row in dcgm-exporter: a whole GPU, an instance, or a pod's slot of a shared GPU."""

    gpu: int
    pod: tuple[str, str, str] | None = None
    """Namespace, pod, container."""
    instance: tuple[str, str] | None = None
    """Profile and id."""
    utilisation: float = 0.0
    memory_mib: float = 0.0


def rows(page: Mapping[str, float]) -> list[Row]:
    """Return the rows of `switch-over-node.yaml`; instance ids are the driver's."""
    ids = sorted(
        {
            (found["GPU_I_PROFILE"], found["GPU_I_ID"])
            for name in page
            if name.startswith("DCGM_FI_DEV_FB_USED") and "GPU_I_ID" in (found := labels_in(name))
        }
    )
    held, other, free = sorted(ids, key=lambda pair: -int(pair[0][0]))
    return [
        Row(gpu=0, pod=("ml", "train-0", "trainer"), utilisation=60, memory_mib=20000),
        Row(gpu=1),
        Row(gpu=2, instance=held, pod=("lab", "notebook-4", "nb"), utilisation=40, memory_mib=8000),
        Row(gpu=2, instance=other),
        Row(gpu=2, instance=free),
        Row(gpu=3, pod=("serving", "llm-a", "api"), utilisation=30, memory_mib=4000),
        Row(gpu=3, pod=("serving", "llm-b", "api"), utilisation=20, memory_mib=2000),
    ]


def labels_in(name: str) -> dict[str, str]:
    """Return the labels of a series as on a page."""
    return dict(re.findall(r'([A-Za-z_]+)="([^"]*)"', name))


TEAMS = {
    "train-0": {"team": "vision", "cost_center": "cc-1"},
    "notebook-4": {"team": "biology"},
    "llm-a": {"team": "assistants"},
    "llm-b": {"team": "assistants"},
}


def old_page(page: Mapping[str, float], tick: int) -> str:
    """Return the page of dcgm-exporter 4.8.2 with the values of its chart, and the GPU and pod ids of the new page."""
    gpus = {
        found["gpu"]: found for name in page if (found := labels_in(name)) and name.startswith("DCGM_FI_DEV_GPU_TEMP")
    }
    uids = {
        found["pod_name"]: found["pod_uid"]
        for name in page
        if (found := labels_in(name)) and name.startswith("gpu_pod_info")
    }
    lines = []
    for field, kind, _ in collectors():
        if kind == "label" or field == "DCGM_EXP_XID_ERRORS_COUNT":
            continue
        lines.append(f"# TYPE {field} {kind}")
        for row in rows(page):
            value = value_of(field, row, tick)
            if value is None:
                continue
            known = {key: gpus[str(row.gpu)][key] for key in ("gpu", "UUID", "pci_bus_id", "device", "modelName")}
            known |= {"Hostname": "node-a", "DCGM_FI_DRIVER_VERSION": "580.65.06"}
            if row.instance:
                known |= dict(zip(("GPU_I_PROFILE", "GPU_I_ID"), row.instance, strict=True))
            if row.pod:
                known |= dict(zip(("namespace", "pod", "container"), row.pod, strict=True))
                known |= {"pod_uid": uids[row.pod[1]], **TEAMS[row.pod[1]]}
            if field == "DCGM_FI_DEV_XID_ERRORS":
                known |= {"err_code": "31", "err_msg": "GPU memory page fault"}
            lines.append(f"{field}{{{text_of(known)}}} {value}")
    zero = {**{key: gpus["0"][key] for key in ("gpu", "UUID")}, "window_size_in_ms": "600000", "xid": "31"}
    lines += ["# TYPE DCGM_EXP_XID_ERRORS_COUNT gauge", f"DCGM_EXP_XID_ERRORS_COUNT{{{text_of(zero)}}} 1"]
    return "\n".join(lines) + "\n"


def text_of(labels: Mapping[str, str]) -> str:
    return ",".join(f'{key}="{value}"' for key, value in labels.items())


def collectors() -> list[list[str]]:
    """Return the rows of the old install's collectors file."""
    text = "\n".join(line for line in OLD_VALUES["customMetrics"].splitlines() if not line.startswith("#"))
    return [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if row]


def value_of(field: str, row: Row, tick: int) -> float | None:
    """Return dcgm-exporter's value of a row; None without one."""
    if field in {"DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_DEC_UTIL"}:
        if row.instance:
            return None  # the driver has no such figure for an instance
        return row.utilisation if field == "DCGM_FI_DEV_GPU_UTIL" else 0
    if field == "DCGM_FI_DEV_XID_ERRORS":
        return 31 if row.gpu == 0 else None
    if field == "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION":
        return 1e9 + 3e5 * tick
    known = {
        "DCGM_FI_DEV_FB_USED": row.memory_mib,
        "DCGM_FI_DEV_FB_FREE": 60000.0,
        "DCGM_FI_DEV_SM_CLOCK": 1980.0,
        "DCGM_FI_DEV_GPU_TEMP": 41.0,
        "DCGM_FI_DEV_POWER_USAGE": 300.0,
    }
    return known.get(field, row.utilisation / 100)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """Run the agent with the translated values, on the simulated node."""
    found = documents(NEW_VALUES)
    start = started(of_kind(found, "DaemonSet"), found, tmp_path_factory.mktemp("pod"))
    words = [word for word in start.args[1:] if not word.startswith("--listen")]
    with running_agent(*words, "--simulate", str(NODE), env={**start.env, "NODE_NAME": "node-a"}) as process:
        process.until(
            lambda page: (
                {labels_in(name).get("pod") for name in page if name.startswith("DCGM_FI_DEV_FB_USED")}
                >= {"train-0", "notebook-4", "llm-a", "llm-b"}
                and any(name.startswith("DCGM_FI_DEV_XID_ERRORS") for name in page)
            ),
            "every holder, and the Xid",
        )
        yield process


def targets(agent: AgentProcess, old: str, folder: Path) -> list[Document]:
    """Return the targets of both exporters, as derived by the Prometheus operator from their charts' monitors."""
    monitor = OLD_VALUES["serviceMonitor"]
    pod = {"namespace": "monitoring", "pod": "exporter-x", "container": "exporter", "endpoint": "metrics"}
    found = {"__meta_kubernetes_pod_node_name": "node-a", **pod}
    (endpoint,) = of_kind(documents(NEW_VALUES), "ServiceMonitor")["spec"]["endpoints"]
    before = scrape_config(monitor, OLD, old, {**found, "job": OLD}, folder)
    after = scrape_config(endpoint, NEW, f"127.0.0.1:{agent.port}", found, folder)
    return [before, after]


@contextmanager
def old_exporter(agent: AgentProcess) -> Iterator[str]:
    """Serve dcgm-exporter's page over HTTP; yield its address."""
    began = time.monotonic()

    with page_server(lambda: old_page(agent.series(), int(time.monotonic() - began))) as address:
        yield address


@pytest.fixture(scope="module")
def prometheus(agent: AgentProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraper]:
    folder = tmp_path_factory.mktemp("prometheus")
    with old_exporter(agent) as old, scraping(folder, targets(agent, old, folder)) as server:
        server.until("count_over_time(up[1m]) >= 5", count=2)
        yield server


def answer(prometheus: Scraper, query: str, job: str, by: list[str]) -> dict[tuple[str, ...], float]:
    """Return values by the labels that distinguish the rows; the largest of several."""
    found: dict[tuple[str, ...], float] = {}
    for labels, value in prometheus.query(query.replace("JOB", f'job="{job}"')).items():
        key = tuple(dict(labels).get(name, "") for name in by)
        found[key] = max(value, found.get(key, value))
    return found


@pytest.mark.parametrize("asked", QUERIES, ids=[f"{one['who']}: {one['query']}" for one in QUERIES])
def test_every_query_answered_before_is_answered_after(prometheus: Scraper, asked: dict[str, Any]) -> None:
    before = answer(prometheus, asked["query"], OLD, asked["by"])
    after = answer(prometheus, asked.get("now", asked["query"]), NEW, asked["by"])
    assert before, "the query had no answer before"
    assert before.keys() - after.keys() == set()
    if "within" in asked:
        for key, value in before.items():
            assert after[key] == pytest.approx(value, abs=asked["within"]), key


def test_every_query_to_rewrite_is_in_the_guide() -> None:
    guide = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    for asked in QUERIES:
        assert ("now" in asked) is ("where" in asked)
        assert asked.get("where", "") in guide


def test_every_metric_of_the_old_collectors_file_is_exported(agent: AgentProcess) -> None:
    page = agent.series()
    shown = {name.partition("{")[0] for name in page}
    for field, kind, _ in collectors():
        if kind == "label":
            assert any(f"{field}=" in name for name in page), field
        else:
            assert field in shown


def test_opencost_finds_the_agent_and_its_metrics(agent: AgentProcess) -> None:
    template = of_kind(documents(NEW_VALUES), "DaemonSet")["spec"]["template"]
    seen = ("app", "app.kubernetes.io/name", "app.kubernetes.io/component")
    assert any("dcgm-exporter" in template["metadata"]["labels"].get(label, "") for label in seen)
    (container,) = template["spec"]["containers"]
    assert 9400 in {port["containerPort"] for port in container["ports"]}
    page = agent.series()
    wanted = ("namespace", "pod", "container", "device", "modelName", "UUID")
    for field, pods in (
        ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", {"train-0", "notebook-4", "llm-a", "llm-b"}),
        ("DCGM_FI_DEV_DEC_UTIL", {"train-0"}),
    ):
        found = [labels for name in page if name.startswith(field) and (labels := labels_in(name)).get("container")]
        assert {labels["pod"] for labels in found} == pods
        assert all(labels.get(label) for labels in found for label in (*wanted, "pod_uid"))


def test_new_install_keeps_the_pod_settings_of_the_old_one() -> None:
    spec = of_kind(documents(NEW_VALUES), "DaemonSet")["spec"]
    template, pod = spec["template"], spec["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["hostPath"]["path"] for mount in pod["volumes"] if "hostPath" in mount} >= {OLD_VALUES["kubeletPath"]}
    assert pod["hostPID"] is OLD_VALUES["hostPID"]
    assert pod["runtimeClassName"] == OLD_VALUES["runtimeClassName"]
    assert pod["priorityClassName"] == OLD_VALUES["priorityClassName"]
    assert pod["imagePullSecrets"] == OLD_VALUES["imagePullSecrets"]
    assert pod["nodeSelector"] == OLD_VALUES["nodeSelector"]
    assert all(one in pod["tolerations"] for one in OLD_VALUES["tolerations"])
    assert spec["updateStrategy"]["rollingUpdate"]["maxUnavailable"] == OLD_VALUES["rollingUpdate"]["maxUnavailable"]
    assert OLD_VALUES["podLabels"].items() <= template["metadata"]["labels"].items()
    assert OLD_VALUES["podAnnotations"].items() <= template["metadata"]["annotations"].items()
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}, "no profiling right is needed"
    assert container["image"].startswith("registry.example/mirror/")


def test_service_and_service_monitor_are_unchanged() -> None:
    found = documents(NEW_VALUES)
    service, monitor = of_kind(found, "Service"), of_kind(found, "ServiceMonitor")
    old = OLD_VALUES["service"]
    assert [port["port"] for port in service["spec"]["ports"]] == [old["port"]]
    assert service["spec"]["internalTrafficPolicy"] == old["internalTrafficPolicy"]
    assert old["annotations"].items() <= service["metadata"]["annotations"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    before = OLD_VALUES["serviceMonitor"]
    assert (endpoint["interval"], endpoint["scrapeTimeout"]) == (before["interval"], before["scrapeTimeout"])
    assert endpoint["honorLabels"] is before["honorLabels"]
    assert before["additionalLabels"].items() <= monitor["metadata"]["labels"].items()
    assert before["relabelings"][0] in endpoint["relabelings"]


def test_no_previous_setting_is_dropped_silently(agent: AgentProcess) -> None:
    warnings = [line for line in agent.lines if '"warning"' in line.lower() or "WARNING" in line]
    assert [line for line in warnings if "simulat" not in line] == []


def leaves(values: object, path: str = "") -> Iterator[str]:
    """Yield the paths of all values: `serviceMonitor.interval`; a list is one."""
    if not isinstance(values, dict) or not values:
        yield path
        return
    for key, value in values.items():
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def table() -> list[tuple[set[str], set[str]]]:
    """Return the rows of "Values of its chart": the old keys, and ours. `.b` after `a.x` stands for `a.b`."""
    guide = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    section = guide.partition("## Values of its chart")[2].partition("\n## ")[0]
    found = []
    for line in section.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 3 or not cells[0].startswith("`"):
            continue
        names: list[str] = []
        for name in re.findall(r"`([^`]+)`", cells[0]):
            names.append(f"{names[-1].rpartition('.')[0]}{name}" if name.startswith(".") else name)
        found.append((set(names), set(re.findall(r"`([^`]+)`", cells[2]))))
    return found


def is_of(path: str, names: set[str]) -> bool:
    return any(
        path == name or path.startswith(name.removesuffix("*") if name.endswith(".*") else f"{name}.") for name in names
    )


def test_every_value_of_the_old_install_is_in_the_guide() -> None:
    old = set().union(*(theirs for theirs, _ in table()))
    assert [path for path in leaves(OLD_VALUES) if not is_of(path, old)] == []


def test_every_value_of_the_new_install_is_named_in_the_guide() -> None:
    set_there = list(leaves(OLD_VALUES))
    named = set().union(*(ours for theirs, ours in table() if any(is_of(path, theirs) for path in set_there)))
    new = read_yaml(NEW_VALUES.read_text(encoding="utf-8"))
    assert [path for path in leaves(new) if not is_of(path, named)] == []
