"""A kubelet that was polled: its answer without a socket."""

import time

from exporter.kube.kubelet import KubeletClient, KubeletPoller
from exporter.model import Allocations


def polled(answer: Allocations | None) -> KubeletPoller:
    """Return a poller with this answer."""
    poller = KubeletPoller(KubeletClient("/none.sock"), interval_seconds=5, clock=time.time)
    poller.latest = answer
    return poller
