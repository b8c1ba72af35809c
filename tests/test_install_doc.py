"""docs/install.md: every command has the described result, every file in it is valid, and every name in it exists."""

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import files_support
import pytest
import yaml
from chart_support import OPERATOR_API, PLATFORMS, helm, manifest_problems
from files_support import CHART, ROOT, blocks, commands, named_files, page, read_documents, read_yaml
from fleet_support import tool
from service_support import make_certificates

from exporter.config import load_agent, price_book, web_config
from exporter.cost import budgets
from exporter.metrics import catalog
from exporter.service import metrics

TEXT = page("install.md")
FILES = named_files(TEXT)
PAGES = ("install.md", "troubleshooting.md", "migrating.md")
OPTIONS_ONLY = ("dcgm.yaml", "operator-26.7.yaml", "openshift-service.yaml", "network.yaml", "tls.yaml")
"""Values for use together with those of a command."""

Document = dict[str, Any]


def helm_commands() -> list[list[str]]:
    return [words for words in commands(TEXT) if words[:2] == ["helm", "upgrade"]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the files of the page; return their folder."""
    made = tmp_path_factory.mktemp("page")
    for name, text in FILES.items():
        (made / name).write_text(text, encoding="utf-8")
    return made


def release(words: list[str], folder: Path, *more: str) -> list[Document]:
    """Return the objects that a command of the page would install."""
    given = [word for word in words[2:] if word != "--install"]
    given[1] = str(CHART) if given[1].endswith(".tgz") else str(ROOT / given[1])
    paths = (folder / word if word in FILES else ROOT / word if (ROOT / word).is_file() else word for word in given)
    extra = [word for name in more for word in ("-f", str(folder / name))]
    cluster = ("--kube-version", "1.37.0", "--api-versions", OPERATOR_API)
    rendered = helm("template", *map(str, paths), *extra, *cluster).stdout
    return [document for document in read_documents(rendered) if document]


@cache
def built(path: str) -> list[Document]:
    """Return the output of kustomize for a folder."""
    done = subprocess.run(
        [tool("kubectl"), "kustomize", str(ROOT / path)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return list(read_documents(done.stdout))


@pytest.fixture(scope="session")
def releases(folder: Path) -> list[list[Document]]:
    return [release(words, folder) for words in helm_commands()]


def objects(documents: list[Document]) -> set[tuple[str, str]]:
    return {(one["kind"].lower(), one["metadata"]["name"]) for one in documents}


def entries(documents: list[Document]) -> dict[str, str]:
    """Return the files of all ConfigMaps."""
    return {key: text for one in documents if one["kind"] == "ConfigMap" for key, text in one["data"].items()}


def pod(documents: list[Document], kind: str) -> Document:
    (found,) = (one for one in documents if one["kind"] == kind)
    spec: Document = found["spec"]["template"]
    return spec


def test_every_helm_command_installs_an_agent_and_covers_every_platform(releases: list[list[Document]]) -> None:
    assert len(releases) == len(helm_commands())
    assert all("DaemonSet" in {one["kind"] for one in documents} for documents in releases)
    used = {word.removeprefix("platform=") for words in helm_commands() for word in words if "platform=" in word}
    assert used == {"gpu-operator", "openshift", "aks"}
    table = TEXT.partition("\n## Platforms\n")[2].partition("\n### ")[0]
    assert set(re.findall(r"^\| \[?`([a-z0-9-]+)`", table, re.MULTILINE)) - {"platform"} == set(PLATFORMS)


def test_readme_installs_the_agent_image_that_it_builds(folder: Path) -> None:
    shown = commands(page("../README.md"))
    (made,) = (words[2].removeprefix("IMAGE=") for words in shown if words[:2] == ["make", "image"])
    installing = next(words for words in shown if words[:3] == ["helm", "upgrade", "--install"])
    (agent,) = pod(release(installing, folder), "DaemonSet")["spec"]["containers"]
    assert agent["image"].rpartition(":")[0] == made


def test_programs_accept_the_options_files_of_agent_and_service(releases: list[list[Document]], tmp_path: Path) -> None:
    for documents in releases:
        files = entries(documents)
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        load_agent({"config": str(tmp_path / "agent.yaml")}, {}, check_paths=False)
        book = price_book.load(tmp_path / "prices.yaml")
        assert book.rows
        assert not book.warnings
    assert budgets.load(tmp_path / "budgets.yaml") if "budgets.yaml" in files else True
    assert any("budgets.yaml" in entries(documents) for documents in releases)


@pytest.mark.parametrize("name", OPTIONS_ONLY)
def test_chart_accepts_the_standalone_values_examples(name: str, folder: Path) -> None:
    assert release(helm_commands()[0], folder, name) != release(helm_commands()[0], folder)


def test_every_yaml_block_of_the_page_is_tested() -> None:
    used = {word for words in helm_commands() for word in words}
    elsewhere = {"kustomization.yaml", "prometheus.yml", "opencost-policy.yaml", "web.yaml"}
    assert len(FILES) == len(blocks(TEXT, "yaml"))
    assert FILES.keys() - used - elsewhere == set(OPTIONS_ONLY)


def test_every_kustomization_builds_and_platforms_have_overlays(tmp_path: Path) -> None:
    named = [words[3] for words in commands(TEXT) if words[:3] == ["kubectl", "apply", "-k"]]
    assert len(named) >= 3
    for path in named:
        assert "DaemonSet" in {one["kind"] for one in built(path)}
    overlays = {path.name for path in (ROOT / "deploy" / "kustomize" / "overlays").iterdir()}
    assert overlays >= set(PLATFORMS) - {"k3s", "bare"}

    copy = tmp_path / "deploy" / "kustomize"
    shutil.copytree(ROOT / "deploy" / "kustomize", copy)
    shutil.copytree(ROOT / "dashboards", tmp_path / "dashboards")
    (copy / "mine").mkdir()
    (copy / "mine" / "kustomization.yaml").write_text(FILES["kustomization.yaml"], encoding="utf-8")
    documents = built(str(copy / "mine"))
    for kind, suffix in (("DaemonSet", ""), ("Deployment", "-service")):
        (container,) = pod(documents, kind)["spec"]["containers"]
        assert container["image"] == f"registry.example.org/gpu/gpu-cost-exporter{suffix}:0.1.0"
    assert {one["metadata"].get("namespace", "gpu-cost") for one in documents} == {"gpu-cost"}


def test_kubectl_commands_name_installed_objects(releases: list[list[Document]]) -> None:
    there = set.union(*map(objects, [*releases, built("deploy/kustomize/base")]))
    for text in map(page, PAGES[:2]):
        for words in commands(text):
            for word in words[1:] if words[0] == "kubectl" else ():
                kind, slash, name = word.partition("/")
                assert not (slash and kind in {"daemonset", "service", "deployment"}) or (kind, name) in there, word
    assert ("persistentvolumeclaim", "gpu-cost-exporter-service") in there
    template = pod(releases[0], "DaemonSet")
    wanted = dict(
        label.split("=") for label in re.findall(r"app\.kubernetes\.io/\w+=\w[\w-]*", TEXT.partition("pod=$(")[2])
    )
    assert wanted.items() <= template["metadata"]["labels"].items()
    assert [container["name"] for container in template["spec"]["containers"]] == ["agent"]


def test_opencost_policy_is_valid_and_selects_the_agents(releases: list[list[Document]], tmp_path: Path) -> None:
    text = FILES["opencost-policy.yaml"]
    selector = read_yaml(text)["spec"]["podSelector"]["matchLabels"]
    assert selector.items() <= pod(releases[0], "DaemonSet")["metadata"]["labels"].items()
    path = tmp_path / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    assert manifest_problems("1.37", path) == []


def test_promtool_accepts_the_scrape_job_and_the_queries(tmp_path: Path) -> None:
    # Distributions build Prometheus without Kubernetes' discovery.
    text, count = re.subn(r"kubernetes_sd_configs: .*", "static_configs: []", FILES["prometheus.yml"])
    assert count == 1
    job = tmp_path / "prometheus.yml"
    job.write_text(text, encoding="utf-8")
    command = [tool("promtool"), "check", "config", "--syntax-only", str(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    queries = [query for name in PAGES[:2] for query in blocks(page(name), "promql")]
    assert len(queries) >= 7
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}), encoding="utf-8")
    done = subprocess.run([tool("promtool"), "check", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_named_metric_and_rule_exists() -> None:
    text = "".join(map(page, PAGES[:2]))
    rules = (ROOT / "rules" / "prometheus-rules.yaml").read_text(encoding="utf-8")
    recorded = set(re.findall(r"record: (\S+)", rules))
    ours = {metric.name for metric in (*catalog.ALL, *metrics.ALL)}
    assert set(re.findall(r"\b[a-z_]+:gpu_[a-z0-9_:]+", text)) - recorded == set()
    named = set(re.findall(r"(?<![\w:/-])(gpu_[a-z_]+[a-z])(?![\w:*])", text))
    assert named - ours - {"gpu_is_lost", "gpu_not_found"} == set()
    alerts = set(re.findall(r"alert: (\S+)", rules))
    assert set(re.findall(r"\bGPU(?!s\b)[A-Z]\w+", text)) - alerts == set()


def test_web_configuration_example_loads(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "tls")
    text = FILES["web.yaml"]
    for name, made in (("tls.crt", "server.pem"), ("tls.key", "server.key")):
        assert f"/etc/gpu-cost-exporter/tls/{name}" in text, "the file is where the chart mounts the Secret"
        text = text.replace(f"/etc/gpu-cost-exporter/tls/{name}", str(certificates.path(made)))
    path = tmp_path / "web.yaml"
    path.write_text(text, encoding="utf-8")
    settings = web_config.load(path)
    assert settings.tls
    assert settings.users.keys() == {"prometheus"}
    assert not settings.warnings


def test_secrets_made_as_shown_have_the_keys_in_the_values(folder: Path, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "made")
    shutil.copy(certificates.path("server.pem"), tmp_path / "tls.crt")
    shutil.copy(certificates.path("server.key"), tmp_path / "tls.key")
    shutil.copy(certificates.path("ca.pem"), tmp_path / "ca.crt")
    shutil.copy(folder / "web.yaml", tmp_path)
    (tmp_path / "password").write_text("not one", encoding="utf-8")
    keys = {}
    for words in commands(TEXT):
        if words[:1] == ["kubectl"] and "secret" in words:
            command = [tool("kubectl"), *words[1:], "--dry-run=client", "--output=yaml"]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, done.stderr
            secret = read_yaml(done.stdout)
            keys[secret["metadata"]["name"]] = set(secret["data"])
    web = read_yaml(FILES["tls.yaml"])["agent"]["web"]
    assert keys[web["tlsSecret"]] == {"tls.crt", "tls.key"}
    assert keys[web["existingSecret"]] == {"web.yaml"}
    asked = [web["scrape"]["tlsConfig"]["ca"]["secret"], *web["scrape"]["basicAuth"].values()]
    assert all(one["key"] in keys[one["name"]] for one in asked)


class _Closer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.asked = self.path  # type: ignore[attr-defined]
        self.send_response(202)
        self.end_headers()
        self.wfile.write(b"closed")

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def test_one_liner_requests_the_release_window() -> None:
    (words,) = (words for words in commands(TEXT) if "import urllib" in words[-1])
    with HTTPServer(("127.0.0.1", 0), _Closer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        code = words[-1].replace(":9400", f":{server.server_port}")
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=30)
        thread.join(timeout=10)
        assert done.stdout == "closed\n", done.stderr
        assert server.asked == "/-/release?seconds=600"  # type: ignore[attr-defined]


@cache
def flags_of(command: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "exporter", command, "--help"], capture_output=True, text=True, check=True
    ).stdout


@pytest.mark.parametrize("name", PAGES[:2])
def test_programs_have_every_shown_command_and_flag(name: str) -> None:
    text = page(name)
    shown = [" ".join(words).rpartition("gpu-cost-exporter ") for words in commands(text)]
    lines = [line for _, found, line in shown if found]
    lines += re.findall(r"`gpu-cost-exporter ([a-z][^`]*)`", text)
    for line in lines:
        command, *words = line.split()
        if re.fullmatch(r"doctor|prices|report|serve|agent", command):
            assert all(word.partition("=")[0] in flags_of(command) for word in words if word.startswith("--")), line
    assert any(line.startswith("doctor") for line in lines)


@pytest.mark.parametrize("name", PAGES)
def test_every_link_has_a_target(name: str) -> None:
    assert files_support.lead_nowhere(page(name)) == []


@pytest.mark.parametrize("name", [*PAGES, "runbook.md", "dcgm.md", "../README.md"])
def test_every_named_chart_value_exists(name: str) -> None:
    assert files_support.unknown_values(page(name)) == []


@pytest.mark.parametrize("name", [*PAGES, "../README.md"])
def test_every_named_repository_path_exists(name: str) -> None:
    named = set(re.findall(r"(?<![\w/.-])(?:deploy|rules|requirements|docs|dashboards)/[\w./-]*\w", page(name)))
    assert {path for path in named if not (ROOT / path).exists()} - {"deploy/kustomize/mine"} == set()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", page(name), re.MULTILINE)) - targets == set()


def level(template: Mapping[str, Any]) -> str:
    """Return the lowest Pod Security level that admits a pod, as far as these manifests distinguish the levels."""
    spec = template["spec"]
    containers = [*spec.get("initContainers", ()), *spec["containers"]]
    contexts = [container.get("securityContext", {}) for container in containers]
    host = any(spec.get(key) for key in ("hostPID", "hostNetwork", "hostIPC"))
    paths = any("hostPath" in volume for volume in spec.get("volumes", ()))
    if host or paths or any(one.get("privileged") or one.get("capabilities", {}).get("add") for one in contexts):
        return "privileged"
    whole = spec.get("securityContext", {})
    merged = [{**whole, **one} for one in contexts]
    strict = all(
        one.get("runAsNonRoot")
        and one.get("allowPrivilegeEscalation") is False
        and one.get("capabilities", {}).get("drop") == ["ALL"]
        and one.get("seccompProfile", {}).get("type") == "RuntimeDefault"
        for one in merged
    )
    return "restricted" if strict else "baseline"


def test_pod_security_levels_match_the_table(releases: list[list[Document]], folder: Path) -> None:
    section = TEXT.partition("### Pod security")[2].partition("###")[0]
    rows = dict(re.findall(r"^\| ([^|]*?) \| `(\w+)` \|", section, re.MULTILINE))
    agent, without, service = rows
    assert level(pod(releases[0], "DaemonSet")) == rows[agent]
    (with_service,) = (one for one in releases if "Deployment" in {document["kind"] for document in one})
    assert level(pod(with_service, "Deployment")) == rows[service]
    off = [word for key in re.findall(r"`(agent\.[\w.]+)`", without) for word in ("--set", f"{key}=false")]
    assert len(off) == 6
    assert level(pod(release([*helm_commands()[0], *off], folder), "DaemonSet")) == rows[without]
    for more in ("agent.driver.runtimeClass.deviceListMount=true", "agent.driver.mode=privileged"):
        changed = release([*helm_commands()[0], *off, "--set", more], folder)
        assert level(pod(changed, "DaemonSet")) == "privileged"


def test_two_releases_of_the_page_share_no_object(folder: Path) -> None:
    first, second = helm_commands()[0], [*helm_commands()[0]]
    second[3] = "other"
    shared = objects(release(first, folder)) & objects(release(second, folder))
    assert shared == set()
    assert ("daemonset", "other-gpu-cost-exporter") in objects(release(second, folder))
