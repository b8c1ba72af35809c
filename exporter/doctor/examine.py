"""Runs all checks, in the order in which they build on each other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from exporter.attribution.evidence import NO_EVIDENCE, Evidence
from exporter.config import AgentConfig, read_collectors
from exporter.doctor import api, driver, host, kubelet, layers, owners, prices, web, workloads
from exporter.doctor.finding import Finding
from exporter.errors import ConfigError
from exporter.model import Field, Reading
from exporter.sources.worker import nvml_command


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the checks look at. ``worker_command`` replaces the NVML child: a simulated driver, or a test's."""

    config: AgentConfig
    wall: Callable[[], float]
    """Unix time in seconds."""
    monotonic: Callable[[], float]
    worker_command: Sequence[str] | None = None
    worker_env: Mapping[str, str] | None = None
    simulated: bool = False
    dev_root: Path = Path("/dev")
    sys_root: Path = Path("/sys")
    driver_deadline_seconds: float = 20.0


async def examine(around: Surroundings) -> tuple[Finding, ...]:
    """All findings; takes some seconds, at most the driver's deadline and the kubelet's."""
    config = around.config
    wall, monotonic = around.wall(), around.monotonic()
    found = [host.package()]
    if not around.simulated:
        found += [host.device_nodes(around.dev_root), host.kernel_module(config.proc_root)]
    finding, reading = await driver.read(
        around.worker_command or nvml_command(config.sample_interval_seconds, _fields(config)),
        env=around.worker_env,
        interval_seconds=config.sample_interval_seconds,
        deadline_seconds=around.driver_deadline_seconds,
        clock=around.wall,
    )
    found.append(finding)
    if reading:
        found += [driver.devices(reading), driver.activity(reading), driver.processes(reading)]
    found += await _attribution(around, reading)
    found.append(host.process_tree(config.proc_root))
    if config.workload_manager == "kubernetes":
        found.append(host.pod_logs(config.pod_log_root))
    found.append(host.state_dir(config.state_dir))
    found += [host.port(config.listen_host, config.listen_port), host.collectors(config)]
    if config.web_config:
        found.append(web.face(config.web_config))
    found.append(prices.book(config, reading, wall))
    found.append(host.clock((wall, around.wall()), (monotonic, around.monotonic())))
    return tuple(found)


async def _attribution(around: Surroundings, reading: Reading | None) -> list[Finding]:
    """Who holds what, whose it is, and which layer of the node stands in the way of knowing."""
    config = around.config
    on_bus = None if around.simulated else layers.on_bus(around.sys_root)
    in_driver = None if around.simulated else layers.in_driver(config.proc_root)
    if config.attribution and config.workload_manager != "kubernetes":
        judged = layers.agreement(reading, None, None, on_bus=on_bus, in_driver=in_driver)
        return [workloads.holders(config, reading, around.wall()), judged]
    finding, allocations = await kubelet.ask(config, clock=around.wall, monotonic=around.monotonic)
    found, view = [finding], None
    if config.attribution and config.kube_metadata:

        def holders_of(evidence: Evidence) -> set[tuple[str, str]]:
            return kubelet.holders(kubelet.join(config, allocations, reading, evidence))

        of_api, view = await api.ask(config, allocations, holders_of, clock=around.wall)
        found += of_api
    elif config.attribution:
        found.append(api.off())
    attribution = kubelet.join(config, allocations, reading, view.evidence if view else NO_EVIDENCE)
    found.append(layers.agreement(reading, attribution, allocations, on_bus=on_bus, in_driver=in_driver))
    if attribution and reading:
        found.append(kubelet.agreement(attribution))
    if view and attribution:
        # Without the driver it is not known who holds anything.
        found += [owners.of_holders(config, attribution, view.facts)] if reading else []
        found.append(owners.node_labels(view.node_facts, reading))
    return found


def _fields(config: AgentConfig) -> frozenset[Field]:
    try:
        return read_collectors(config.collectors).fields
    except ConfigError:
        return read_collectors(None).fields  # the file's mistakes are a finding of their own
