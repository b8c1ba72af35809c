"""Joins the devices of the driver with the data of the kubelet and the Kubernetes API, when one of them changes."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from exporter.attribution.device_ids import ReplicaKey
from exporter.attribution.join import DRA_UNRESOLVED, UNDECIDED, attribute
from exporter.attribution.pod_lifecycle import NO_EVIDENCE, Evidence
from exporter.attribution.processes import ProcessLookup, with_unlisted_uses
from exporter.attribution.shares import DRA
from exporter.attribution.tenants import TenantSource
from exporter.model.attribution import Allocations, Attribution, Holder
from exporter.model.devices import DeviceState, Reading

if TYPE_CHECKING:
    from exporter.kube.kubelet import KubeletPoller
    from exporter.kube.metadata import Metadata


@dataclass(slots=True, kw_only=True)
class Attributor:
    """Joins devices and holders, and caches the last result.

    ``kubelet`` is ``None`` if attribution is disabled: then no holder is known.
    """

    kubelet: "KubeletPoller | TenantSource | None"
    """Source of holders: the kubelet, or jobs and users in the same form."""
    lookup: ProcessLookup
    """Finds the pod, job or user of a process."""
    expiry_seconds: float
    metadata: "Metadata | None" = None
    """Source of pod metadata; ``None`` without the Kubernetes API."""
    metadata_wait_seconds: float = 75.0
    """Maximum wait for the API after the start, if only the API knows the holders."""
    replicas: dict[ReplicaKey, int] = field(default_factory=dict)
    """Last advertised replica counts of shared devices; the same object that ``Metering`` saves across restarts."""
    _answer: Allocations | None = None
    _answered_steady: float = 0.0
    """Monotonic instant at which ``_answer`` was first seen."""
    _evidence: Evidence = NO_EVIDENCE
    _cached_for: object = None
    _cached: Attribution = field(default_factory=lambda: Attribution(known=False))
    _waiting_since: float | None = None
    """Monotonic instant of the first reading without known holders."""

    @property
    def tenancy(self) -> "Metadata | TenantSource | None":
        """Source of owners; ``None`` if only names are known, so that the namespace is the owner."""
        return self.kubelet if isinstance(self.kubelet, TenantSource) else self.metadata

    @property
    def tasks(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """Tasks that read the sources, in parallel to the ticks; processes need no task, each tick reads them."""
        kubelet = None if isinstance(self.kubelet, TenantSource) else self.kubelet
        return tuple(source.run for source in (kubelet, self.metadata) if source)

    def join(self, reading: Reading | None, now: float, steady: float) -> Attribution:
        """Return the holders of every device of ``reading``, or an unknown attribution.

        Args:
            reading: The newest reading.
            now: Unix time.
            steady: Seconds of the monotonic clock; the age of an answer counts from its first use here.
        """
        if self.kubelet is None:
            return Attribution(known=False, source="")
        source = self.kubelet.manager if isinstance(self.kubelet, TenantSource) else "kubelet"
        allocations = self.kubelet.latest
        joined = self._joined(allocations, reading, now, steady) if allocations else Attribution(known=False)
        return replace(joined, source=source, problem=self.kubelet.problem)

    def _joined(self, allocations: Allocations, reading: Reading | None, now: float, steady: float) -> Attribution:
        if allocations is not self._answer:
            self._answer, self._answered_steady = allocations, steady
            if self.metadata:
                self.metadata.note(allocations, now)
        if self.metadata:
            self._evidence = self.metadata.evidence(now)
        if steady - self._answered_steady > self.expiry_seconds:
            return Attribution(known=False, answered_at_seconds=allocations.answered_at_seconds)
        gpus = reading.gpus if reading else ()
        devices = tuple(
            (gpu.gpu, gpu.state is DeviceState.MISSING, gpu.lacks_instances, *(part.instance for part in gpu.instances))
            for gpu in gpus
        )
        joined_for = allocations, self._evidence, devices
        # The first two are the same objects while nothing changes, so the comparison is cheap.
        if joined_for != self._cached_for:
            joined = attribute(allocations, gpus, self._evidence, self.replicas)
            self.replicas.clear()
            self.replicas.update(joined.replicas)
            self._cached = self._with_uids_of_node(joined) if self.metadata else joined
            self._cached_for = joined_for
        return with_unlisted_uses(self._cached, reading, self.lookup) if reading else self._cached

    def _with_uids_of_node(self, attribution: Attribution) -> Attribution:
        """Use the UID of the running pod from the node, if the API has no UID or may report that of an earlier pod.

        With the UID of another pod, the running pod would have no processes and would look idle.
        """
        followed = self._evidence.is_followed
        holders = {
            device: tuple(one if followed and one.pod_uid else self._with_uid_of_node(one) for one in of_device)
            for device, of_device in attribution.holders.items()
        }
        return replace(attribution, holders=holders)

    def _with_uid_of_node(self, holder: Holder) -> Holder:
        uid = self.lookup.uid_of(holder.namespace, holder.pod)
        if uid is None and holder.pod_uid and self.lookup.name_of(holder.pod_uid) is None:
            return replace(holder, pod_uid=None)  # two pods with this name exist, or the lookup failed
        return holder if uid in {None, holder.pod_uid} else replace(holder, pod_uid=uid)

    def awaits_holders(self, attribution: Attribution, steady: float, *, resumes: bool) -> bool:
        """Return whether charging must wait, because the holders are still unknown.

        The time across a restart is not charged before the kubelet has reported the holders after it. If only the API
        knows the holders, nothing is charged before its answer. Both waits are bounded.

        Args:
            attribution: The known holders.
            steady: Seconds of the monotonic clock.
            resumes: Whether the next sample closes the interval across a restart.
        """
        if self.kubelet is None:
            return False
        if self.kubelet.latest is None:
            awaits, patience = resumes, self.expiry_seconds
        else:
            awaits, patience = self._lacks_metadata(attribution), self.metadata_wait_seconds
        if self._waiting_since is None:
            self._waiting_since = steady
        return awaits and steady - self._waiting_since <= patience

    def _lacks_metadata(self, attribution: Attribution) -> bool:
        """Return whether holders still depend on data that the API has not returned yet: fractions, claims."""
        if self.metadata is None or self.metadata.status.known:
            return False
        reserved = self._evidence.reservation_namespaces
        return any(one.reason in UNDECIDED or one.reason == DRA_UNRESOLVED for one in attribution.unresolved) or any(
            holder.source == DRA or holder.namespace in reserved
            for holders in attribution.holders.values()
            for holder in holders
        )
