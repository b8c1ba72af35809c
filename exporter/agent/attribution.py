"""Chooses who tells whose a device is: the kubelet and the Kubernetes API, Slurm, or whoever runs there."""

import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from exporter.agent.attributor import Attributor
from exporter.agent.owners import Tenancy
from exporter.attribution.podresources import KubeletPoller, own_pod
from exporter.attribution.proc_files import own_name
from exporter.attribution.processes import PidResolver, PodNames
from exporter.config import AgentConfig

# Each way is imported only where it is asked for: the Kubernetes client alone doubles what the agent takes.
# ruff: noqa: PLC0415

if TYPE_CHECKING:
    from exporter.attribution.host_users import HostUsers
    from exporter.attribution.metadata import Metadata
    from exporter.attribution.slurm import SlurmJobs

API_ANSWER_SECONDS = 15.0
"""How long the API may take for its first answers, beyond the jitter of the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attributing:
    """The join, what is known of whose a pod is, and what must run beside the ticks for them."""

    attributor: Attributor
    tenancy: Tenancy | None = None
    """``None``: nothing beyond names is known, and the namespace pays."""
    tasks: tuple[Callable[[], Awaitable[None]], ...] = ()


def attributing_of(config: AgentConfig) -> Attributing:
    """Make what the configuration asks for."""
    proc_root = Path(config.proc_root)
    if not config.attribution or config.workload_manager == "kubernetes":
        return _kubernetes(config, proc_root)
    jobs = _jobs(config, proc_root)
    attributor = Attributor(
        kubelet=jobs,
        pids=jobs,
        names=jobs,
        expiry_seconds=config.attribution_expiry_seconds,
        command_of=partial(own_name, str(proc_root)),
        observe=jobs.observe,
        source=config.workload_manager,
    )
    return Attributing(attributor=attributor, tenancy=jobs)


def _jobs(config: AgentConfig, proc_root: Path) -> "SlurmJobs | HostUsers":
    if config.workload_manager == "slurm":
        from exporter.attribution.slurm import SlurmJobs

        return SlurmJobs(mapping_dir=config.job_mapping_dir, proc_root=proc_root)
    from exporter.attribution.host_users import HostUsers

    return HostUsers(proc_root=proc_root)


def _kubernetes(config: AgentConfig, proc_root: Path) -> Attributing:
    poller = _poller(config) if config.attribution else None
    metadata = _metadata(config) if config.attribution and config.kube_metadata else None
    attributor = Attributor(
        kubelet=poller,
        pids=PidResolver(proc_root),
        names=PodNames(Path(config.pod_log_root)),
        expiry_seconds=config.attribution_expiry_seconds,
        command_of=partial(own_name, str(proc_root)),
        metadata=metadata,
        metadata_wait_seconds=config.kube_start_jitter_seconds + API_ANSWER_SECONDS,
    )
    tasks = [part.run for part in (poller, metadata) if part is not None]
    return Attributing(attributor=attributor, tenancy=metadata, tasks=tuple(tasks))


def _poller(config: AgentConfig) -> KubeletPoller:
    return KubeletPoller(
        socket_path=config.kubelet_socket,
        interval_seconds=config.kubelet_interval_seconds,
        resources=config.gpu_resources,
        clock=time.time,
        canary=own_pod(),
        node_name=config.node_name,
    )


def _metadata(config: AgentConfig) -> "Metadata":
    from exporter.attribution.metadata import Metadata, MetadataSettings

    settings = MetadataSettings(
        node=config.node_name,
        kubeconfig=config.kubeconfig,
        start_jitter_seconds=config.kube_start_jitter_seconds,
        team_keys=config.team_keys,
        cost_labels=config.cost_labels,
        namespace_teams=config.namespace_teams,
        pod_labels=config.pod_labels,
        pod_annotations=config.pod_annotations,
        reservation_namespaces=config.reservation_namespaces,
        own_pod=own_pod(),
    )
    return Metadata(settings, clock=time.time, random=random.random)
