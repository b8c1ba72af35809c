"""A kubelet that was polled: its answer without a socket."""

import time
from collections.abc import Callable

from exporter.agent.facts import Attributor
from exporter.agent.run import attributor_of
from exporter.config import AgentConfig
from exporter.kube.kubelet import KubeletClient, KubeletPoller
from exporter.model.attribution import Allocations


def polled(answer: Allocations | None) -> KubeletPoller:
    """Return a poller with this answer."""
    poller = KubeletPoller(KubeletClient("/none.sock"), interval_seconds=5, clock=time.time)
    poller.latest = answer
    return poller


def attributor(config: AgentConfig, answer: Allocations | None, clock: Callable[[], float] = time.time) -> Attributor:
    """Return the attributor that the agent would have, with this answer of the kubelet."""
    made = attributor_of(config, clock)
    made.kubelet = polled(answer)
    return made
