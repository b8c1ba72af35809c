"""Modules and driver calls of agent and children: only the needed ones, and no call with a known answer."""

import os
import subprocess
import sys
from pathlib import Path

import dcgm_stub_support
import pytest
import stub_support

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import measure  # noqa: E402 - in the folder that the line above makes importable

AGENT = """
import sys
import exporter.cli, exporter.agent.run, exporter.kube.metadata
"""
CHILD = """
import sys
from exporter.gpu import child
from exporter.gpu.{source} import {name}
"""
ONLY_OTHERS_NEED = {"rich", "jinja2", "kubernetes", "requests", "urllib3", "pydantic", "sqlite3", "pynvml"}
NO_CHILD_NEEDS = {"aiohttp", "asyncio", "google", "grpc", "prometheus_client", "ssl", "yaml", "email", "http"}
SAMPLES = 50
needs_compiler = pytest.mark.skipif(stub_support.compiler() is None, reason="needs a C compiler for the stub library")


def loaded(*steps: str) -> list[set[str]]:
    """Return the modules that are loaded after each step of a new process."""
    code = "".join(f"{step}\nprint(*sys.modules)\n" for step in steps)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def packages(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_agent_loads_only_what_it_needs_and_templates_with_the_first_page() -> None:
    first, page = loaded(AGENT, "from exporter.web import node_page\nnode_page.document(None)")
    assert not packages(first) & {*ONLY_OTHERS_NEED, "ctypes"}
    others = ("exporter.cost.", "exporter.service.", "exporter.gpu.dcgm.library", "exporter.gpu.dcgm.session")
    assert not {name for name in first if name.startswith((*others, "gpu_simulator"))}
    assert packages(page) & ONLY_OTHERS_NEED == {"jinja2"}


@pytest.mark.parametrize(("source", "name"), [("nvml.source", "NvmlSource"), ("dcgm.session", "DcgmSource")])
def test_child_loads_only_its_source(source: str, name: str) -> None:
    (modules,) = loaded(CHILD.format(source=source, name=name))
    assert not packages(modules) & (ONLY_OTHERS_NEED | NO_CHILD_NEEDS) - {"pynvml"}
    layers = {name.split(".")[1] for name in modules if name.startswith("exporter.")}
    assert layers == {"errors", "model", "gpu"}
    assert ("pynvml" in modules) == (source == "nvml.source")


@needs_compiler
@pytest.mark.parametrize(("node", "most"), [("whole", 17.0), ("partitioned", 62.0)])
def test_sample_makes_a_bounded_number_of_calls_per_gpu(node: str, most: float) -> None:
    partitioned = node == "partitioned"
    calls = dcgm_stub_support.nvml(partitioned=partitioned, samples=SAMPLES)
    assert sum(calls.values()) / SAMPLES / 8 <= most
    # The identity of a GPU does not change while it exists, nor do its limits without a command. An instance can return
    # under its UUID with another shape, so all instances are described every five samples.
    for name in ("nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetMaxClockInfo"):
        assert name not in calls
    assert calls.get("nvmlDeviceGetName", 0) == (56 * SAMPLES / 5 if partitioned else 0)
    # One call for each list of each device, every other sample.
    devices = 56 if partitioned else 8
    assert calls["nvmlDeviceGetComputeRunningProcesses_v3"] == devices * SAMPLES / 2


@needs_compiler
def test_dcgm_sample_needs_few_round_trips_for_any_number_of_instances() -> None:
    samples = 20
    calls = dcgm_stub_support.dcgm(partitioned=True, samples=samples)
    assert sum(calls.values()) / samples <= 8


def test_shared_file_pages_count_once_and_private_memory_per_process() -> None:
    own = os.getpid()
    one, same = measure.alone((own, own))
    assert one.file_bytes > 0
    assert same.file_bytes <= one.file_bytes / 100
    assert same.private_bytes >= one.private_bytes * 0.9
    resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * measure.PAGE_BYTES
    assert one.size_bytes == pytest.approx(resident, rel=0.1)
