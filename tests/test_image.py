"""The image runs as on a node: read-only, without capabilities, with the kubelet's socket in a directory of root."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import stub_support as stub
from agent_support import matching
from files_support import bill_problem
from image_support import (
    NOBODY,
    SOCKET_DIRECTORY,
    Container,
    Images,
    build,
    lacking,
    output,
    running,
    unmount,
    version,
)
from image_support import command as container_command
from service_support import PASSWORD, hashed, make_certificates, web_file

from gpu_simulator.kubelet import KubeletServer
from gpu_simulator.truth import HolderTruth, NodeTruth

pytestmark = [
    pytest.mark.skipif(bool(lacking()), reason=lacking()),
    pytest.mark.skipif(stub.compiler() is None, reason="the simulated driver needs a C compiler"),
]

MOST_BYTES = 150_000_000
ENDS_WITHIN_SECONDS = 2.0
ANY_PORT = ("--listen", "127.0.0.1:0")
FAST = ("--sample-interval", "200ms", "--kubelet-interval", "1s")
DRIVER = "/usr/local/nvidia/lib64"

HOLDER = HolderTruth(
    namespace="ml",
    pod="train-0",
    container="main",
    pod_uid="5717b000-0000-4000-8000-0000000000aa",
    device_uuid=stub.gpu_uuid(0),
    resource="nvidia.com/gpu",
    device_ids=(stub.gpu_uuid(0),),
    share_ratio=1.0,
    activity_ratio=0.0,
    started_seconds=0.0,
)
TRUTH = NodeTruth(
    at_seconds=0.0,
    node="real",
    driver_version=stub.RELEASE,
    holders=(HOLDER,),
    allocatable={"nvidia.com/gpu": (stub.gpu_uuid(0), stub.gpu_uuid(1))},
)


@pytest.fixture(scope="module")
def images() -> Iterator[Images]:
    try:
        yield build()
    finally:
        unmount()


class Kubelet:
    """A kubelet with a separate loop, on a socket as on nodes: the directory is 0750 and root's."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o750)
        self.directory = directory
        self.socket = directory / "kubelet.sock"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._server = KubeletServer(self.socket, lambda: TRUTH)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(30)
        self.socket.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def restart(self) -> None:
        asyncio.run_coroutine_threadsafe(self._server.restart(), self._loop).result(30)


@pytest.fixture(scope="module")
def kubelet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubelet]:
    with Kubelet(tmp_path_factory.mktemp("node") / "pod-resources") as one:
        yield one


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str | Path, str], dict[str, str]]:
    """Return mounts and environment that give a container the library of a driver with two GPUs."""
    folder = tmp_path_factory.mktemp("driver")
    folder.chmod(0o755)
    stub.build(folder / "lib")
    stub.control(folder / "lib" / "control", gpus=2)
    (folder / "lib" / "control").chmod(0o666)
    environment = {"LD_LIBRARY_PATH": DRIVER, "NVML_STUB_CONTROL": f"{DRIVER}/control", "NODE_NAME": "real"}
    return {folder / "lib": DRIVER}, environment


Driver = tuple[dict[str | Path, str], dict[str, str]]


def socket_mount(kubelet: Kubelet) -> dict[str | Path, str]:
    return {kubelet.directory: f"{SOCKET_DIRECTORY}:ro"}


def is_measured(page: dict[str, float]) -> bool:
    return len(matching(page, "gpu_activity_ratio")) == 2


@contextlib.contextmanager
def agent(
    images: Images, driver: Driver, *words: str, mounts: dict[str | Path, str], options: tuple[str, ...] = ()
) -> Iterator[Container]:
    driver_mounts, environment = driver
    arguments = ("agent", *ANY_PORT, *FAST, *words)
    with running(
        images, images.agent, *arguments, mounts=driver_mounts | mounts, env=environment, options=options
    ) as one:
        yield one


def test_agent_runs_read_only_without_capabilities_and_ends_on_sigterm(
    images: Images, driver: Driver, kubelet: Kubelet
) -> None:
    state = kubelet.directory.stat()
    assert (state.st_mode & 0o777, state.st_uid) == (0o750, 0)
    with agent(images, driver, mounts=socket_mount(kubelet)) as one:
        page = one.until(
            lambda page: matching(page, "gpu_pod_allocated_seconds_total", pod_name="train-0"), "a pod's seconds"
        )
        assert matching(page, "DCGM_FI_DEV_GPU_UTIL", UUID=stub.gpu_uuid(0), namespace="ml", pod="train-0")
        pid = one.pid()
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        held = {line.split()[0]: int(line.split()[1], 16) for line in status.splitlines() if line.startswith("Cap")}
        assert set(held.values()) == {0}, held
        mounts = Path(f"/proc/{pid}/mountinfo").read_text(encoding="utf-8").splitlines()
        (root,) = [line.split() for line in mounts if line.split()[4] == "/"]
        assert "ro" in root[5].split(",")
        start = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        while Path(f"/proc/{pid}").exists() and time.monotonic() < start + 30:
            time.sleep(0.01)
        took = time.monotonic() - start
        assert one.process.wait(timeout=30) == 0
    assert took < ENDS_WITHIN_SECONDS
    assert not [line for line in one.lines if "ERROR" in line or "Traceback" in line]


def test_agent_image_accepts_the_arguments_of_dcgm_exporters_daemonset(
    images: Images, driver: Driver, kubelet: Kubelet
) -> None:
    mounts, environment = driver
    theirs = {"DCGM_EXPORTER_KUBERNETES": "true", "DCGM_EXPORTER_LISTEN": "127.0.0.1:0"}
    words = ("-f", "/etc/dcgm-exporter/dcp-metrics-included.csv", "-c", "1000")
    whole = mounts | socket_mount(kubelet)
    with running(images, images.agent, *words, mounts=whole, env=environment | theirs) as one:
        one.until(lambda page: matching(page, "DCGM_FI_DEV_FB_USED", pod="train-0"), "a pod's memory")
        assert one.get("/health")[0] == 200


def test_mounted_socket_directory_survives_a_kubelet_restart(images: Images, driver: Driver, kubelet: Kubelet) -> None:
    with agent(images, driver, mounts=socket_mount(kubelet)) as one:
        before = one.until(
            lambda page: matching(page, "gpu_exporter_attribution_timestamp_seconds"), "the kubelet's answer"
        )
        kubelet.restart()
        (asked_at,) = matching(before, "gpu_exporter_attribution_timestamp_seconds").values()
        one.until(
            lambda page: max(matching(page, "gpu_exporter_attribution_timestamp_seconds").values()) > asked_at + 2,
            "an answer after the restart",
        )


def test_agent_reports_a_socket_file_mount_gone_stale_and_keeps_measuring(
    images: Images, driver: Driver, kubelet: Kubelet
) -> None:
    place = f"{SOCKET_DIRECTORY}/kubelet.sock"
    with agent(images, driver, mounts={kubelet.socket: f"{place}:ro"}) as one:
        one.until(lambda page: matching(page, "gpu_pod_info", pod_name="train-0"), "a pod")
        kubelet.restart()
        line = one.said("no process listens on")
        assert f"{place}: the kubelet is stopped, or its socket file was mounted instead of the directory" in line
        one.until(is_measured, "both GPUs")


@pytest.mark.parametrize(
    ("mounted", "said"),
    [
        ("nothing", f"no directory for the kubelet socket {SOCKET_DIRECTORY}/kubelet.sock: mount the directory"),
        ("an empty directory", f"no kubelet socket at {SOCKET_DIRECTORY}/kubelet.sock: start the kubelet, or set"),
    ],
)
def test_missing_socket_mount_is_reported_and_measuring_continues(
    images: Images, driver: Driver, tmp_path: Path, mounted: str, said: str
) -> None:
    mounts: dict[str | Path, str] = {} if mounted == "nothing" else {tmp_path: f"{SOCKET_DIRECTORY}:ro"}
    with agent(images, driver, mounts=mounts) as one:
        one.said(said)
        one.until(is_measured, "both GPUs")
        assert one.get("/healthz")[0] == 200
        assert said in one.get("/readyz")[1]


def test_agent_without_attribution_runs_as_any_uid(images: Images, driver: Driver) -> None:
    options = ("--user", NOBODY)
    with agent(images, driver, "--attribution", "off", mounts={}, options=options) as one:
        one.until(is_measured, "both GPUs")
        uids = Path(f"/proc/{one.pid()}/status").read_text(encoding="ascii").partition("Uid:")[2].split()[:4]
        assert set(uids) == {NOBODY.partition(":")[0]}
        assert one.get("/readyz")[0] == 200


def refusal(images: Images, driver: Driver, mounts: dict[str | Path, str], *options: str) -> str:
    """Return the only line of an agent that ends at once, because waiting would fix nothing."""
    driver_mounts, environment = driver
    words = list(options)
    for path, place in (driver_mounts | mounts).items():
        words += ["--volume", f"{path}:{place}"]
    for key, value in environment.items():
        words += ["--env", f"{key}={value}"]
    whole = container_command(images.storage, images.agent, ("agent", *ANY_PORT), words)
    done = subprocess.run(whole, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    return line


def test_non_root_agent_with_attribution_logs_how_to_fix_permissions(
    images: Images, driver: Driver, kubelet: Kubelet
) -> None:
    line = refusal(images, driver, socket_mount(kubelet), "--user", NOBODY)
    assert f"no permission to reach {SOCKET_DIRECTORY}/kubelet.sock as uid 65534" in line
    assert "run as uid 0, or --attribution off" in line


def test_directory_at_the_socket_path_is_reported(images: Images, driver: Driver, tmp_path: Path) -> None:
    line = refusal(images, driver, {tmp_path: f"{SOCKET_DIRECTORY}/kubelet.sock:ro"})
    assert f"{SOCKET_DIRECTORY}/kubelet.sock is a directory, not a socket" in line


def test_simulated_node_in_the_image_resolves_workloads(images: Images) -> None:
    words = ("agent", *ANY_PORT, "--simulate", "demo")
    options = ("--tmpfs", "/tmp", "--user", NOBODY)  # noqa: S108 - the container's own
    with running(images, images.agent, *words, options=options) as one:
        one.until(lambda page: matching(page, "gpu_ledger_seconds_total", workload_kind="Job"), "a job")


def test_health_check_detects_a_hung_agent_under_every_web_configuration(
    images: Images, driver: Driver, tmp_path: Path
) -> None:
    # Also with the host's processes in sight, as for figures per process.
    with agent(images, driver, "--attribution", "off", mounts={}, options=("--pid", "host")) as one:
        assert one.check() == (0, "")
    made = make_certificates(tmp_path / "web")
    file = web_file(made.folder, tls={}, users={"alice": hashed(PASSWORD)})
    mounts: dict[str | Path, str] = {made.folder: "/web:ro"}
    words = ("--attribution", "off", "--web-config", f"/web/{file.name}")
    with agent(images, driver, *words, mounts=mounts) as one:
        assert one.check() == (0, "")
    web_file(made.folder, tls={"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "ca.pem"})
    with agent(images, driver, *words, mounts=mounts) as one:
        assert one.check() == (0, "")
        # A stopped process still has its socket, and answers nothing.
        os.kill(one.pid(), signal.SIGSTOP)
        code, reported = one.check()
        os.kill(one.pid(), signal.SIGCONT)
    assert code == 1
    assert reported.endswith("timed out")


def test_health_check_reports_a_missing_listener(images: Images) -> None:
    check = "/usr/share/gpu-cost-exporter/healthcheck.py"
    options = ("--entrypoint", "/opt/gpu-cost-exporter/bin/python")
    whole = container_command(images.storage, images.agent, ("-IS", check), options)
    done = subprocess.run(whole, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (1, "no process of this container listens on a port\n")


def test_the_cost_service_runs_as_nobody_and_keeps_its_store_on_a_volume(images: Images) -> None:
    words = (
        "serve",
        *ANY_PORT,
        "--prometheus",
        "http://127.0.0.1:9",
        "--store",
        "/var/lib/gpu-cost-exporter/days.sqlite",
    )
    volume = f"test-{os.getpid()}"
    options = ("--volume", f"{volume}:/var/lib/gpu-cost-exporter")
    try:
        with running(images, images.service, *words, options=options) as one:
            assert one.get("/healthz")[0] == 200
            (script,) = re.findall(r'src="(/static/page[^"]+)"', one.get("/runbook")[1])
            assert one.get(script)[0] == 200
            assert one.check() == (0, "")
            pid = one.pid()
            status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            assert set(status.partition("Uid:")[2].split()[:4]) == {NOBODY.partition(":")[0]}
            assert Path(f"/proc/{pid}/root/var/lib/gpu-cost-exporter/days.sqlite").stat().st_size > 0
            os.kill(pid, signal.SIGTERM)
            assert one.process.wait(timeout=30) == 0
    finally:
        images.storage.run("podman", "volume", "rm", "--force", volume)


LOOK = """
import importlib.util, os, shutil
programs = ("pip", "pip3", "cc", "gcc", "c++", "ld", "make", "curl", "git")
print("programs", [name for name in programs if shutil.which(name)])
names = ("pip", "ensurepip", "setuptools", "jinja2")
print("modules", [name for name in names if importlib.util.find_spec(name)])
wheels = [file for folder, _, files in os.walk("/") if not folder.startswith(("/proc", "/sys")) for file in files]
print("wheels", [file for file in wheels if file.endswith(".whl")])
print("compiled", any(files for _, _, files in os.walk("/opt") for files in files if files.endswith(".pyc")))
"""


@pytest.mark.parametrize("target", ["agent", "service"])
def test_images_have_no_compiler_and_no_package_installer(images: Images, target: str) -> None:
    image = images.agent if target == "agent" else images.service
    entry = ("--entrypoint", "/opt/gpu-cost-exporter/bin/python")
    said = output(images, image, "-c", LOOK, options=entry)
    assert said.splitlines() == ["programs []", "modules ['jinja2']", "wheels []", "compiled True"]


BILL = """
import importlib.metadata, json, pathlib, platform, re
bill = json.loads(pathlib.Path("/opt/gpu-cost-exporter/sbom.cdx.json").read_text())
listed = {one["purl"] for one in [bill["metadata"]["component"], *bill["components"]]}
listed = {one for one in listed if one.startswith("pkg:pypi/")}
there = {re.sub("[-_.]+", "-", one.name).lower() + "@" + one.version for one in importlib.metadata.distributions()}
print(sorted(listed ^ {"pkg:pypi/" + one for one in there}))
print(f"pkg:generic/python@{platform.python_version()}" in {one["purl"] for one in bill["components"]})
"""


def test_both_images_have_a_bill_of_materials_with_all_packages(images: Images) -> None:
    bills = set()
    for image in (images.agent, images.service):
        entry = ("--entrypoint", "/opt/gpu-cost-exporter/bin/python")
        assert output(images, image, "-c", BILL, options=entry).splitlines() == ["[]", "True"]
        bills.add(output(images, image, "/opt/gpu-cost-exporter/sbom.cdx.json", options=("--entrypoint", "/bin/cat")))
    (text,) = bills
    assert bill_problem(text) is None


@pytest.mark.parametrize("target", ["agent", "service"])
def test_image_adds_little_to_its_base(images: Images, target: str) -> None:
    image = images.agent if target == "agent" else images.service
    own = images.size_bytes(image) - images.size_bytes(images.base)
    print(f"{target}: {own / 1e6:.0f} MB beyond its base")  # noqa: T201 - the figure is wanted
    assert own < MOST_BYTES


@pytest.mark.parametrize(
    ("target", "user", "port", "words"),
    [("agent", "0:0", "9400/tcp", ["agent"]), ("service", NOBODY, "9401/tcp", ["serve"])],
)
def test_image_labels_and_config_describe_the_program(
    images: Images, target: str, user: str, port: str, words: list[str]
) -> None:
    image = images.agent if target == "agent" else images.service
    facts = images.facts(image)
    config = facts["Config"]
    assert isinstance(config, dict)
    labels = {key.rpartition(".")[2]: value for key, value in config["Labels"].items() if "opencontainers" in key}
    assert labels["version"] == version() == output(images, image, "--version").split()[-1]
    assert labels["licenses"] == "Apache-2.0"
    assert labels["title"]
    assert labels["description"]
    assert re.fullmatch("[0-9a-f]{40}", labels["revision"])
    assert (config["User"], list(config["ExposedPorts"]), config["StopSignal"]) == (user, [port], "SIGTERM")
    assert (config["Entrypoint"], config["Cmd"]) == (["gpu-cost-exporter"], words)
    nvidia = {entry for entry in config["Env"] if entry.startswith("NVIDIA_")}
    expected = {"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=utility"} if target == "agent" else set()
    assert nvidia == expected
