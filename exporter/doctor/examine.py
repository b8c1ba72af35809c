"""Runs all checks, in the order in which they build on each other."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from exporter.attribution import truth_table
from exporter.attribution.evidence import NO_EVIDENCE, Evidence
from exporter.config import AgentConfig, read_collectors
from exporter.doctor import api, dcgm, driver, host, kubelet, layers, owners, prices, web, workloads
from exporter.doctor.dcgm_library import Library
from exporter.doctor.finding import Finding, Level, warn
from exporter.errors import ConfigError
from exporter.exposition.collectors_file import Collectors
from exporter.model import NodeFacts, Reading
from exporter.sources.dcgm_fields import alone, supplement
from exporter.sources.merge import joined
from exporter.sources.worker import dcgm_command, nvml_command

_LONGEST_INTERVAL_SECONDS = 1.0
_NO_PROCESSES = warn(
    "processes",
    "DCGM tells none: use of shared devices is estimated, not measured",
    "--source auto reads them from NVML, where the agent runs beside the driver",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the checks look at.

    ``worker_command`` replaces the NVML child, ``dcgm_command`` DCGM's: a simulated one, or a test's.
    """

    config: AgentConfig
    wall: Callable[[], float]
    """Unix time in seconds."""
    monotonic: Callable[[], float]
    worker_command: Sequence[str] | None = None
    dcgm_command: Sequence[str] | None = None
    worker_env: Mapping[str, str] | None = None
    simulated: bool = False
    dev_root: Path = Path("/dev")
    sys_root: Path = Path("/sys")
    driver_deadline_seconds: float = 20.0


def interval_seconds(config: AgentConfig) -> float:
    """Between the readings of the checks: an agent that samples every 30 s would leave too few of them to judge by."""
    return min(config.sample_interval_seconds, _LONGEST_INTERVAL_SECONDS)


async def examine(around: Surroundings) -> tuple[Finding, ...]:
    """All findings; takes some seconds, at most the driver's deadline and the kubelet's."""
    config = around.config
    wall, monotonic = around.wall(), around.monotonic()
    made = _collectors(config)
    (found, nvml), (of_dcgm, library, from_dcgm) = await asyncio.gather(_nvml(around, made), _dcgm(around, made))
    found += of_dcgm
    if from_dcgm:
        rows = {row.field.field: row.name for row in made.dcgm_only}
        judged = (
            dcgm.devices(from_dcgm, nvml),
            dcgm.profiling(from_dcgm, nvml),
            dcgm.fields(rows, library, from_dcgm),
        )
        found += [one for one in judged if one]
    reading = joined(nvml, from_dcgm) if nvml or from_dcgm else None
    if reading:
        found.append(driver.activity(reading, dcgm=bool(config.dcgm_address)))
        found.append(driver.processes(reading) if nvml else _NO_PROCESSES)
    of_owners, labelled = await _attribution(around, reading)
    found += of_owners
    found.append(host.process_tree(config.proc_root))
    if config.workload_manager == "kubernetes":
        found.append(host.pod_logs(config.pod_log_root))
    found += [host.state_dir(config.state_dir), host.writer_lock(config)]
    found += [host.port(config.listen_host, config.listen_port), host.collectors(config), *host.options(config)]
    if config.web_config:
        found.append(web.face(config.web_config))
    found.append(prices.book(config, labelled, reading, wall))
    found.append(host.clock((wall, around.wall()), (monotonic, around.monotonic())))
    return tuple(found)


async def _nvml(around: Surroundings, made: Collectors) -> tuple[list[Finding], Reading | None]:
    """Binding, driver and devices, where NVML is asked; and its last reading."""
    config = around.config
    if config.source == "dcgm":
        return [], None
    found = [host.package()]
    if not around.simulated:
        found += [host.device_nodes(around.dev_root), host.kernel_module(config.proc_root)]
    finding, reading = await driver.read(
        around.worker_command or nvml_command(interval_seconds(config), made.fields),
        env=around.worker_env,
        interval_seconds=interval_seconds(config),
        deadline_seconds=around.driver_deadline_seconds,
        clock=around.wall,
    )
    found.append(finding)
    if reading:
        found.append(driver.devices(reading))
    return found, reading


async def _dcgm(around: Surroundings, made: Collectors) -> tuple[list[Finding], Library, Reading | None]:
    """Library and engine, where DCGM is in use; which library there is, and the engine's last reading."""
    config = around.config
    if not config.dcgm_address:
        hint = await dcgm.hint() if config.source == "auto" and not around.simulated else None
        return [hint] if hint else [], Library(), None
    fields = (alone if config.source == "dcgm" else supplement)(made.fields)
    return await dcgm.examine(
        config,
        around.dcgm_command or dcgm_command(interval_seconds(config), fields, config.dcgm_address),
        fields,
        env=around.worker_env,
        interval_seconds=interval_seconds(config),
        simulated=around.simulated,
        deadline_seconds=around.driver_deadline_seconds,
        clock=around.wall,
    )


async def _attribution(around: Surroundings, reading: Reading | None) -> tuple[list[Finding], NodeFacts | None]:
    """Who holds what, whose it is, which layer of the node stands in the way of knowing; and what its labels say."""
    config = around.config
    # A host engine may be shown another machine's GPUs, or others of this one's.
    by_host = not around.simulated and config.source != "dcgm"
    compared = partial(
        layers.agreement,
        on_bus=layers.on_bus(around.sys_root) if by_host else None,
        in_driver=layers.in_driver(config.proc_root) if by_host else None,
        shown_by=truth_table.DCGM if config.source == "dcgm" else truth_table.NVML,
    )
    if config.attribution and config.workload_manager != "kubernetes":
        judged = compared(reading, None, None)
        return [workloads.holders(config, reading, around.wall()), judged], NodeFacts()
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
    refused = allocations is not None and finding.level is Level.WARN
    found.append(compared(reading, attribution, allocations, inventory_refused=refused))
    if attribution and reading:
        found.append(kubelet.agreement(attribution))
    if view and attribution:
        # Without the driver it is not known who holds anything.
        found += [owners.of_holders(config, attribution, view.facts)] if reading else []
        found.append(owners.node_labels(view.node_facts, reading))
    if not (config.attribution and config.kube_metadata):
        return found, NodeFacts()
    return found, view.node_facts if view else None


def _collectors(config: AgentConfig) -> Collectors:
    try:
        return read_collectors(config.collectors)
    except ConfigError:
        return read_collectors(None)  # the file's mistakes are a finding of their own
