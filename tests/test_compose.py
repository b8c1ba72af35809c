"""The compose file of the demo is valid against its schema, the mounted files, and the started programs."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from files_support import problems, read_yaml
from image_support import version

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "deploy" / "compose"
SCHEMA = ROOT / ".tools" / "compose-spec.json"
OURS = {"agent", "past", "cost"}

Service = dict[str, Any]


def read(name: str) -> Any:  # noqa: ANN401 - YAML of any shape
    """Return a YAML file of the folder."""
    return read_yaml((HERE / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def services() -> dict[str, Service]:
    """Return the services, with defaults in place of the variables."""
    text = (HERE / "compose.yaml").read_text(encoding="utf-8")
    plain = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    assert "${" not in plain, "a variable without a default"
    found: dict[str, Service] = read_yaml(plain)["services"]
    return found


def mounts(service: Service) -> list[list[str]]:
    """Yield source, place and, if given, mode."""
    return [volume.split(":") for volume in service.get("volumes", [])]


def errors_of(*words: str) -> list[str]:
    """Return the errors of one of our commands with a mistake added, one per line."""
    command = [sys.executable, "-m", "exporter", *words, "--log-format=mistaken"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    return done.stderr.splitlines()


def test_compose_file_matches_the_published_schema() -> None:
    if not SCHEMA.exists():
        pytest.skip(f"needs {SCHEMA.relative_to(ROOT)}: make install")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert not problems(read("compose.yaml"), schema)


def test_mounted_files_exist_and_only_volumes_are_writable(services: dict[str, Service]) -> None:
    volumes = set(read("compose.yaml")["volumes"])
    for name, service in services.items():
        for source, _, *mode in mounts(service):
            if source.startswith("."):
                assert (HERE / source).exists(), f"{name}: {source}"
                assert mode == ["ro"], f"{name}: {source}"
            else:
                assert source in volumes, f"{name}: {source}"
    used = {source for service in services.values() for source, *_ in mounts(service) if not source.startswith(".")}
    assert used == volumes


def test_images_are_pinned_and_ports_are_local(services: dict[str, Service]) -> None:
    for name, service in services.items():
        digest = "" if name in OURS else "@sha256:[0-9a-f]{64}"
        assert re.search(rf":v?\d+\.\d+\.\d+{digest}$", service["image"]), f"{name}: a tag can move"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
    tags = {name: services[name]["image"] for name in OURS}
    ours = f"gpu-cost-exporter:{version()}"
    assert tags == {"agent": ours, "past": ours, "cost": f"gpu-cost-exporter-service:{version()}"}
    assert {services[name]["build"]["args"]["VERSION"] for name in OURS} == {version()}
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r"^ARG BASE_IMAGE=python:[\d.]+-slim-bookworm@sha256:[0-9a-f]{64}$", dockerfile, re.MULTILINE)
    targets = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.MULTILINE)
    assert {services[name]["build"]["target"] for name in OURS} <= set(targets)
    assert (HERE / services["agent"]["build"]["context"]).resolve() == ROOT


def test_agent_and_cost_service_accept_their_commands(services: dict[str, Service], tmp_path: Path) -> None:
    (problem,) = errors_of(*services["agent"]["command"])
    assert "log-format" in problem
    stored = [word.replace("/var/lib/gpu-cost-exporter", str(tmp_path)) for word in services["cost"]["command"]]
    (problem,) = errors_of(*stored)
    assert "log-format" in problem
    (place,) = [place for _, place in mounts(services["cost"])]
    assert f"--store={place}/days.sqlite" in services["cost"]["command"]


def test_past_data_is_written_where_the_blocks_step_reads_it(services: dict[str, Service], tmp_path: Path) -> None:
    output = "/past/fleet.om"
    words = [word.replace(output, str(tmp_path / "fleet.om")) for word in services["past"]["command"]]
    command = [sys.executable, "-m", "exporter", *words, "--nodes=2", "--days=1"]
    subprocess.run(command, check=True, capture_output=True, timeout=120, cwd=ROOT)
    assert f"--output={output}" in services["past"]["command"]
    (script,) = services["blocks"]["command"]
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool on the PATH: make install")
    (tmp_path / "made").mkdir()
    here = script.replace(output, str(tmp_path / "fleet.om")).replace("/prometheus", str(tmp_path / "made"))
    ((shipped, place, _),) = (mount for mount in mounts(services["blocks"]) if mount[0].startswith("."))
    here = here.replace(place, str((HERE / shipped).resolve()))
    for _ in range(2):  # the second run has nothing left to do
        subprocess.run(["sh", "-c", here], check=True, capture_output=True, timeout=120)
    assert len([folder for folder in (tmp_path / "made").iterdir() if folder.is_dir()]) in {1, 2}
    assert "dashboard: http://localhost:3000/d/" in (tmp_path / "made" / "rules.yaml").read_text(encoding="utf-8")


def test_prometheus_and_alertmanager_accept_their_files(services: dict[str, Service], tmp_path: Path) -> None:
    promtool, amtool = shutil.which("promtool"), shutil.which("amtool")
    if promtool is None or amtool is None:
        pytest.skip("needs promtool and amtool on the PATH: make install")
    settings = (HERE / "prometheus.yaml").read_text(encoding="utf-8")
    for source, place, *_ in mounts(services["prometheus"]):
        if source.startswith("."):
            settings = settings.replace(place, str((HERE / source).resolve()))
    rules = tmp_path / "rules.yaml"
    shutil.copyfile(ROOT / "rules" / "prometheus-rules.yaml", rules)
    settings = settings.replace("/prometheus/rules.yaml", str(rules))
    (tmp_path / "prometheus.yaml").write_text(settings, encoding="utf-8")
    for command in (
        [promtool, "check", "config", str(tmp_path / "prometheus.yaml")],
        [amtool, "check-config", str(HERE / "alertmanager.yaml")],
    ):
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
    for program in ("prometheus", "alertmanager"):
        (file,) = [place for source, place, *_ in mounts(services[program]) if source == f"./{program}.yaml"]
        assert f"--config.file={file}" in services[program]["command"]


def test_every_configured_address_is_an_open_port(services: dict[str, Service]) -> None:
    settings = read("prometheus.yaml")
    jobs = {job["job_name"]: job for job in settings["scrape_configs"]}
    asked = [target for job in jobs.values() for one in job["static_configs"] for target in one["targets"]]
    asked += settings["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    (prometheus,) = [word for word in services["cost"]["command"] if word.startswith("--prometheus=")]
    asked += [urlsplit(url).netloc for url in (source["url"], prometheus.partition("=")[2])]
    open_ports = {f"{name}:{port.split(':')[2]}" for name, one in services.items() for port in one.get("ports", [])}
    assert set(asked) <= open_ports
    assert jobs["gpu-cost-exporter"]["honor_labels"] is True


def test_grafana_provider_finds_every_dashboard(services: dict[str, Service]) -> None:
    (provider,) = read("grafana/provisioning/dashboards/gpu-cost.yaml")["providers"]
    folder = provider["options"]["path"]
    mounted = {place: (HERE / source).resolve() for source, place, *_ in mounts(services["grafana"])}
    boards = {place: path for place, path in mounted.items() if place.startswith(f"{folder}/")}
    assert set(boards.values()) == set((ROOT / "dashboards").glob("*.json"))
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in boards
    least = re.search(r"Grafana (\d+)\.(\d+) and later", (ROOT / "docs" / "dashboards.md").read_text(encoding="utf-8"))
    assert least is not None
    given = services["grafana"]["image"].partition("@")[0].rpartition(":")[2].split(".")
    assert [int(part) for part in given[:2]] >= [int(part) for part in least.groups()]
