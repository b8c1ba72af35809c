"""Logs what keeps the kubelet or the Kubernetes API from telling, when it begins and when it is over."""

import logging

from exporter.model import Snapshot

LOG = logging.getLogger("exporter.agent")


class ProblemLog:
    """Tells a problem once, whatever becomes of its words: the page, ``/readyz`` and counters go on telling."""

    def __init__(self) -> None:
        """Begin with nothing told."""
        self._told: set[str] = set()

    def note(self, snapshot: Snapshot) -> None:
        """Log what has begun, or is over, since the snapshot before."""
        for name, problem in (("kubelet", snapshot.attribution_problem), ("Kubernetes API", snapshot.metadata_problem)):
            if problem and name not in self._told:
                self._told.add(name)
                LOG.warning("%s: %s", name, problem)
            elif not problem and name in self._told:
                self._told.discard(name)
                LOG.info("%s: tells again", name)
