"""What the agent costs on a simulated driver, against its budgets: ``make bench``."""

import argparse
import compileall
import contextlib
import datetime as dt
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import budgets
import measure
import stub_node
from measure import Figures, Subject

from gpu_simulator.stack import free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import dcgm_stub_support  # noqa: E402 - lies with the tests, which the line above makes importable
import stub_support  # noqa: E402 - as above


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One node with 110 pods to measure on."""

    title: str
    partitioned: bool
    both: bool = False
    """Whether the agent asks the Kubernetes API and a host engine, with GPUs that only DCGM profiles."""


SETTINGS = (
    Setting(title="8 whole GPUs, 110 pods", partitioned=False),
    Setting(title="56 MIG instances, 110 pods", partitioned=True),
    Setting(title="8 whole GPUs, 110 pods, metadata and DCGM", partitioned=False, both=True),
    Setting(title="56 MIG instances, 110 pods, metadata and DCGM", partitioned=True, both=True),
)


def main() -> int:
    """Measure and print Markdown tables; 0 when everything could be measured, whatever the budgets say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each CPU measurement (default 10)")
    parser.add_argument("--only", default="", help="measure only settings with this in their title, and no budgets")
    arguments = parser.parse_args()
    if stub_support.compiler() is None:
        print("bench: skipped: the simulated driver needs a C compiler (install gcc)")
        return 0
    today = dt.datetime.now(tz=dt.UTC).date()
    print(f"{today}, {_machine()}, Python {platform.python_version()}, {arguments.seconds:g} s per CPU measurement,")
    print(f"load average at the start {os.getloadavg()[0]:.1f} (latencies mean little when it is not near 0),")
    print("simulated driver that answers at once: the agent's own cost, without a real driver's.\n")
    # As in an image: what is compiled at the start of a process stays in its heap.
    compileall.compile_dir(ROOT / "exporter", quiet=1)
    measured: dict[str, Figures] = {}
    for setting in (one for one in SETTINGS if arguments.only in one.title):
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            directory = Path(name)
            with running_agent(setting, directory) as agent:
                figures = measure.measure(agent, seconds=arguments.seconds, log=directory / "agent.log")
        measured[setting.title] = figures
        print(budgets.figures_table(setting.title, figures), flush=True)
    if not arguments.only:
        whole, partitioned, both, _ = (measured[one.title] for one in SETTINGS)
        print(budgets.table(whole=whole, partitioned=partitioned, both=both), flush=True)
    return 0


@contextlib.contextmanager
def running_agent(setting: Setting, directory: Path) -> Iterator[Subject]:
    """Simulate a node in processes that are not counted, and yield how its agent is started."""
    with contextlib.ExitStack() as stack:
        without = dcgm_stub_support.WITHOUT_GPM if setting.both else ()
        library = stub_support.build(directory / "lib", without=without)
        control = stub_support.control(directory / "control", partitioned=setting.partitioned)
        pids = stub_node.pids(stub_node.truth(partitioned=setting.partitioned))
        for place, held in enumerate(pids):
            if setting.partitioned:
                control.gpus[place // stub_node.PARTS].instances[place % stub_node.PARTS].pid = held[0]
            for slot, pid in enumerate(held if not setting.partitioned else ()):
                control.gpus[place].processes[slot].pid = pid
        api = stack.enter_context(_node(directory, partitioned=setting.partitioned))
        environment = stub_support.environment(library, directory / "control")
        agent = _agent(directory, environment, devices=len(pids), api=api if setting.both else None)
        if setting.both:
            agent = stack.enter_context(_with_dcgm(directory, agent, partitioned=setting.partitioned))
        yield agent


def _agent(directory: Path, environment: dict[str, str], *, devices: int, api: str | None) -> Subject:
    port = free_port(0)
    start = ["-m", "exporter"]
    if api:
        start = [str(ROOT / "benchmarks" / "in_pod.py"), str(directory)]
        host, _, number = api.removeprefix("https://").partition(":")
        environment = {**environment, "KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": number}
    command = [sys.executable, *start, "agent", "--listen", f"127.0.0.1:{port}", "--node-name", "bench"]
    command += ["--kubelet-socket", str(directory / "kubelet.sock"), "--proc-root", str(directory / "proc")]
    command += ["--pod-log-root", str(directory / "pods"), "--sample-interval", "1s"]
    command += ["--lock-dir", str(directory / "lock")]
    if api:
        command += ["--kube-metadata", "on", "--kube-start-jitter", "0s"]
    owned = devices if api else 0

    def ready(page: str) -> bool:
        infos = [line for line in page.splitlines() if line.startswith("gpu_pod_info{")]
        active = page.count("\ngpu_pod_activity_ratio{") > 0
        return len(infos) == devices and active and sum('workload_kind="Job"' in line for line in infos) >= owned

    return Subject(
        name="agent", command=command, environment={**environment, "PYTHONPATH": str(ROOT)}, port=port, ready=ready
    )


@contextlib.contextmanager
def _with_dcgm(directory: Path, agent: Subject, *, partitioned: bool) -> Iterator[Subject]:
    """Give the agent a host engine, as a process that is not counted."""
    library, control = dcgm_stub_support.build(directory / "dcgm"), directory / "dcgm-control"
    block = dcgm_stub_support.control(control, partitioned=partitioned)
    with dcgm_stub_support.Engine(library, control) as engine:

        def ready(page: str) -> bool:
            profiled = page.count("\nDCGM_FI_PROF_GR_ENGINE_ACTIVE{")
            return agent.ready(page) and profiled >= block.gpu_count * (7 if partitioned else 1)

        yield replace(
            agent,
            command=[*agent.command, "--dcgm-address", engine.address],
            environment=dcgm_stub_support.environment(library, control, beside=agent.environment),
            ready=ready,
        )


@contextlib.contextmanager
def _node(directory: Path, *, partitioned: bool) -> Iterator[str]:
    """Serve the node around the agent; the URL of its Kubernetes API."""
    command = [sys.executable, str(ROOT / "benchmarks" / "stub_node.py"), "--directory", str(directory)]
    command += ["--partitioned"] if partitioned else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said, _, api = (process.stdout.readline() if process.stdout else "").strip().partition(" ")
            if said != "ready":
                raise RuntimeError("the simulated node did not start; see above")
            yield api
        finally:
            process.terminate()


def _machine() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} cores of {line.partition(':')[2].strip()}"
    return f"{os.cpu_count()} cores"


if __name__ == "__main__":
    sys.exit(main())
