"""Measures the cost of the agent on a simulated driver, against its budgets: ``make bench``."""

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
from dataclasses import dataclass
from pathlib import Path

import budgets
import measure
import stub_node
from measure import Figures

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import dcgm_stub_support  # noqa: E402 - lies with the tests, which the line above makes importable
import stub_support  # noqa: E402 - as above
from agent_support import AgentProcess, matching, running_agent  # noqa: E402 - as below


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One node with 110 pods to measure on."""

    title: str
    partitioned: bool
    both: bool = False
    """Whether the agent uses the Kubernetes API and a host engine, with GPUs that only DCGM profiles."""


SETTINGS = (
    Setting(title="8 whole GPUs, 110 pods", partitioned=False),
    Setting(title="56 MIG instances, 110 pods", partitioned=True),
    Setting(title="8 whole GPUs, 110 pods, metadata and DCGM", partitioned=False, both=True),
    Setting(title="56 MIG instances, 110 pods, metadata and DCGM", partitioned=True, both=True),
)


def main() -> int:
    """Measure and print Markdown tables; return 0 after all measurements, also over budget."""
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
    # Compile as an image does: modules that a process compiles at its start stay in its heap.
    compileall.compile_dir(ROOT / "exporter", quiet=1)
    measured: dict[str, Figures] = {}
    for setting in (one for one in SETTINGS if arguments.only in one.title):
        with tempfile.TemporaryDirectory(prefix="bench-") as name, running(setting, Path(name)) as agent:
            figures = measure.measure(agent.process.pid, agent.port, arguments.seconds)
        measured[setting.title] = figures
        print(budgets.figures_table(setting.title, figures), flush=True)
    if not arguments.only:
        whole, partitioned, both, _ = (measured[one.title] for one in SETTINGS)
        print(budgets.table(whole=whole, partitioned=partitioned, both=both), flush=True)
    return 0


@contextlib.contextmanager
def running(setting: Setting, directory: Path) -> Iterator[AgentProcess]:
    """Run an agent with all features of a setting; the processes of its node are not measured."""
    partitioned = setting.partitioned
    with contextlib.ExitStack() as stack:
        without = dcgm_stub_support.WITHOUT_GPM if setting.both else ()
        library = stub_support.build(directory / "lib", without=without)
        control = stub_support.control(directory / "control", partitioned=partitioned)
        pids = stub_node.pids(stub_node.truth(partitioned=partitioned))
        for place, held in enumerate(pids):
            if partitioned:
                control.gpus[place // stub_node.PARTS].instances[place % stub_node.PARTS].pid = held[0]
            for slot, pid in enumerate(held if not partitioned else ()):
                control.gpus[place].processes[slot].pid = pid
        api = stack.enter_context(_node(directory, partitioned=partitioned))
        environment, prefix = stub_support.environment(library, directory / "control"), list[str]()
        options = [
            "--node-name",
            "bench",
            "--kubelet-socket",
            str(directory / "kubelet.sock"),
            "--sample-interval",
            "1s",
        ]
        options += ["--proc-root", str(directory / "proc"), "--pod-log-root", str(directory / "pods")]
        if setting.both:
            prefix = [sys.executable, str(ROOT / "benchmarks" / "in_pod.py"), str(directory)]
            host, _, number = api.removeprefix("https://").partition(":")
            environment |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": number, "PYTHONPATH": str(ROOT)}
            library, dcgm = dcgm_stub_support.build(directory / "dcgm"), directory / "dcgm-control"
            dcgm_stub_support.control(dcgm, partitioned=partitioned)
            engine = stack.enter_context(dcgm_stub_support.Engine(library, dcgm))
            environment = dcgm_stub_support.environment(library, dcgm, base=environment)
            options += ["--kube-metadata", "on", "--kube-start-jitter", "0s", "--dcgm-address", engine.address]

        def ready(page: dict[str, float]) -> bool:
            infos = matching(page, "gpu_pod_info")
            owned = [one for one in infos if 'workload_kind="Job"' in one]
            profiled = matching(page, "DCGM_FI_PROF_GR_ENGINE_ACTIVE")
            whole = not setting.both or len(owned) == len(pids) <= len(profiled)
            return whole and len(infos) == len(pids) and bool(matching(page, "gpu_pod_activity_ratio"))

        agent = stack.enter_context(running_agent(*options, prefix=prefix, env=environment, is_fork=False))
        agent.until(ready, "every device with its holder")
        yield agent


@contextlib.contextmanager
def _node(directory: Path, *, partitioned: bool) -> Iterator[str]:
    """Serve the node around the agent; yield the URL of its Kubernetes API."""
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
