"""Joins the driver's devices with the kubelet's and the Kubernetes API's answers, whenever one of them changes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from exporter.attribution.device_ids import ReplicaKey
from exporter.attribution.join import MEMORY_UNKNOWN, REPLICAS_UNKNOWN, attribute
from exporter.attribution.pod_lifecycle import NO_EVIDENCE, Evidence
from exporter.attribution.processes import UNLISTED_USE, PidResolver, PodNames, with_unlisted_uses
from exporter.attribution.shares import DRA
from exporter.model import (
    Allocations,
    AllocationState,
    Attribution,
    DeviceState,
    Gpu,
    GpuReading,
    Holder,
    MigInstance,
    Reading,
    Unresolved,
)

if TYPE_CHECKING:
    from exporter.attribution.host import TenantSource
    from exporter.kube.kubelet import KubeletPoller
    from exporter.kube.metadata import Metadata

HARMLESS_REASONS = frozenset({"unknown_uuid", "unknown_minor", "unknown_instance", "dra_passed_through"})
"""Reasons of an unresolved id that leave no doubt about the devices that *are* seen: the id names another device."""


@dataclass(slots=True)
class Attributor:
    """Keeps the last join and the lookups from a process to its pod.

    ``kubelet`` is ``None`` if attribution is disabled: then no holder is known.
    """

    kubelet: "KubeletPoller | TenantSource | None"
    """Source of holders: the kubelet, or jobs and users in the same form."""
    pids: "PidResolver | TenantSource"
    """Finds the pod, job or user of a process."""
    names: "PodNames | TenantSource"
    """Finds names by UID, and UIDs by name."""
    expiry_seconds: float
    metadata: "Metadata | None" = None
    """Source of pod metadata; ``None`` without the Kubernetes API."""
    metadata_wait_seconds: float = 75.0
    """Maximum wait for the API after the start, if only the API knows the holders."""
    observe: Callable[[Reading, float], None] | None = None
    """Called first with each reading, if processes determine the holders."""
    source: str = "kubelet"
    """Source of holders: ``kubelet``, ``slurm``, ``host``."""
    replicas: dict[ReplicaKey, int] = field(default_factory=dict)
    """Last advertised replica counts of shared devices; the same object as the one that is saved across restarts."""
    command_of: Callable[[int], str] = lambda _pid: ""
    """Returns a process's own name, if it is visible."""
    _first_joined: tuple[Allocations, float] | None = None
    _cached_for: tuple[Allocations, Evidence, tuple[Gpu, ...], tuple[MigInstance, ...]] | None = None
    _cached: Attribution = field(default_factory=lambda: Attribution(known=False))

    def join(self, reading: Reading | None, now: float, steady: float) -> Attribution:
        """Return the holders of every device of ``reading``, or an unknown attribution.

        Args:
            reading: The newest reading.
            now: Unix time.
            steady: Seconds of the monotonic clock; the age of an answer counts from when it is first seen.
        """
        if self.kubelet is None:
            return Attribution(known=False, source="")
        allocations = self.kubelet.latest
        joined = self._joined(allocations, reading, now, steady) if allocations else Attribution(known=False)
        return replace(joined, source=self.source, problem=self.kubelet.problem)

    def _joined(self, allocations: Allocations, reading: Reading | None, now: float, steady: float) -> Attribution:
        new = self._first_joined is None or self._first_joined[0] is not allocations
        if self._first_joined is None or new:
            self._first_joined = allocations, steady
        if self.metadata and new:
            self.metadata.note(allocations, now)
        evidence = self.metadata.evidence(now) if self.metadata else NO_EVIDENCE
        # The minor number of a missing GPU may have passed to another one, so the present GPUs come first.
        there_first = sorted(reading.gpus, key=lambda gpu: gpu.state is DeviceState.MISSING) if reading else ()
        gpus = tuple(gpu.gpu for gpu in there_first)
        instances = tuple(part.instance for gpu in reading.gpus for part in gpu.instances) if reading else ()
        age = steady - self._first_joined[1]
        expired = age > self.expiry_seconds
        joined_for = allocations, evidence, gpus, instances
        # The first two are the same objects while nothing changes, so this compares little.
        if joined_for != self._cached_for or self._cached.known is expired:
            self._cached = attribute(
                allocations=allocations,
                gpus=gpus,
                instances=instances,
                now=allocations.answered_at_seconds + age,
                expiry_seconds=self.expiry_seconds,
                evidence=evidence,
                replicas=self.replicas,
            )
            if self._cached.known:
                self.replicas.clear()
                self.replicas.update(self._cached.replicas)
            if self.metadata:
                self._cached = self._with_uids_of_node(self._cached, is_followed=evidence.is_followed)
            self._cached_for = joined_for
        if reading is None or not self._cached.known:
            return self._cached
        return with_unlisted_uses(
            self._cached,
            reading,
            pod_uid=self.pids.pod_uid,
            name_of=self.names.name_of,
            command_of=self.command_of,
        )

    def _with_uids_of_node(self, attribution: Attribution, *, is_followed: bool) -> Attribution:
        """Use the UID of the running pod on the node where the API has none or may report the earlier pod's.

        With the UID of another pod, the running pod would have no processes and would look idle.
        """
        doubtful = {
            device: tuple(
                holder if is_followed and holder.pod_uid else self._with_uid_of_node(holder) for holder in of_device
            )
            for device, of_device in attribution.holders.items()
            if not is_followed or any(holder.pod_uid is None for holder in of_device)
        }
        return replace(attribution, holders={**attribution.holders, **doubtful}) if doubtful else attribution

    def _with_uid_of_node(self, holder: Holder) -> Holder:
        uid = self.names.uid_of(holder.namespace, holder.pod)
        if uid is None and holder.pod_uid and self.names.name_of(holder.pod_uid) is None:
            return replace(holder, pod_uid=None)  # two pods have the name, or the lookup failed
        return holder if uid in {None, holder.pod_uid} else replace(holder, pod_uid=uid)

    def lacks_metadata(self, attribution: Attribution) -> bool:
        """Return whether holders still depend on data that the API has not returned yet: fractions, claims."""
        if self.metadata is None or self.metadata.status.known or self._cached_for is None:
            return False
        reserved = self._cached_for[1].reservation_namespaces
        harmless = HARMLESS_REASONS | {REPLICAS_UNKNOWN, MEMORY_UNKNOWN, UNLISTED_USE}  # by the API either
        return any(entry.reason not in harmless for entry in attribution.unresolved) or any(
            holder.source == DRA or holder.namespace in reserved
            for holders in attribution.holders.values()
            for holder in holders
        )


def allocation_state(attribution: Attribution, uuid: str, gpu: GpuReading) -> AllocationState:
    """Return the state of a device; "unallocated" only if no unresolved id can be the device.

    Args:
        attribution: Holders of all devices.
        uuid: UUID of the device.
        gpu: The GPU that the device is or is part of.
    """
    if attribution.known and attribution.holders.get(uuid):
        return AllocationState.ALLOCATED
    return AllocationState.UNKNOWN if is_doubtful(attribution, uuid, gpu) else AllocationState.UNALLOCATED


def is_doubtful(attribution: Attribution, uuid: str, gpu: GpuReading) -> bool:
    """Return whether a GPU or a part of it may have an unknown holder.

    This is so if no holder is known, an unresolved id may be the GPU, or an unlisted pod uses it.

    Args:
        attribution: Holders of all devices.
        uuid: UUID of the device.
        gpu: The GPU that the device is or is part of.
    """
    return not attribution.known or any(_leaves_doubt(entry, uuid, gpu) for entry in attribution.unresolved)


def _leaves_doubt(entry: Unresolved, uuid: str, gpu: GpuReading) -> bool:
    if entry.reason == UNLISTED_USE:
        return entry.device_id == uuid
    concerns = entry.gpu_uuids is None or gpu.gpu.uuid in entry.gpu_uuids
    return concerns and (entry.reason not in HARMLESS_REASONS or _may_be_part_of(gpu, entry))


def _may_be_part_of(gpu: GpuReading, entry: Unresolved) -> bool:
    """Return whether an id may be a MIG instance of a GPU with instances that the driver has not (all) listed."""
    if not gpu.gpu.mig_enabled or (gpu.instances and not gpu.lacks_instances):
        return False
    return entry.reason == "unknown_instance" or (entry.reason == "unknown_uuid" and entry.device_id.startswith("MIG-"))
