"""Joins the driver's devices with the kubelet's and the Kubernetes API's answers, whenever one of them changes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from exporter.attribution.device_ids import Replicas
from exporter.attribution.join import MEMORY_UNKNOWN, REPLICAS_UNKNOWN, attribute
from exporter.attribution.pod_lifecycle import NO_EVIDENCE, Evidence
from exporter.attribution.processes import UNLISTED_USE, unlisted_uses
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
    NodeFacts,
    PodFacts,
    Reading,
    Unresolved,
)

HARMLESS_REASONS = frozenset({"unknown_uuid", "unknown_minor", "unknown_instance", "dra_passed_through"})
"""Reasons why an id was not resolved that leave no doubt about the devices that *are* seen: it names another one."""


class Kubelet(Protocol):
    """What the kubelet said last: ``attribution.podresources.KubeletPoller``, or an answer asked for in a replay."""

    @property
    def latest(self) -> Allocations | None:
        """The last good answer, however old."""
        ...

    @property
    def problem(self) -> str:
        """One line on why there is no newer one; empty when all is well."""
        ...

    @property
    def errors(self) -> Mapping[str, int]:
        """Counts since start by reason."""
        ...


class Pids(Protocol):
    """From a process to its pod: ``attribution.processes.PidResolver``, or to its job or user."""

    def pod_uid(self, pid: int) -> str | None:
        """Return the UID of a process' pod."""
        ...


class Names(Protocol):
    """Between UIDs and names of pods: ``attribution.processes.PodNames``, or of jobs or users."""

    def name_of(self, uid: str) -> tuple[str, str] | None:
        """Return namespace and name of a UID."""
        ...

    def uid_of(self, namespace: str, pod: str) -> str | None:
        """Return the UID of a name."""
        ...


class MetadataSource(Protocol):
    """What the Kubernetes API says: ``attribution.metadata.Metadata``."""

    @property
    def known(self) -> bool:
        """Whether the pods have been listed and changes are followed."""
        ...

    @property
    def at_seconds(self) -> float | None:
        """Unix time of the API's last sign of life."""
        ...

    @property
    def problem(self) -> str:
        """One line on what cannot be had; empty when all is well."""
        ...

    @property
    def names_other_node(self) -> bool:
        """Whether ``problem`` is that --node-name is not this node's name in the cluster."""
        ...

    @property
    def remark(self) -> str:
        """One line on what is not well though all can be had."""
        ...

    @property
    def errors(self) -> Mapping[str, int]:
        """Counts since start by reason."""
        ...

    @property
    def node_facts(self) -> NodeFacts | None:
        """What the node's labels say; ``None`` until they were read."""
        ...

    def evidence(self, now: float) -> Evidence:
        """Return what the join is to look at, the same object while nothing changes."""
        ...

    def note(self, allocations: Allocations, now: float) -> None:
        """Take note of a new answer of the kubelet."""
        ...

    def facts(self, namespace: str, pod: str) -> PodFacts | None:
        """Return the owner of a pod."""
        ...


@dataclass(slots=True)
class Attributor:
    """Keeps the last join and the ways from a process to its pod.

    ``kubelet`` is ``None`` where attribution is switched off: then nothing is known of any holder.
    """

    kubelet: Kubelet | None
    pids: Pids
    names: Names
    expiry_seconds: float
    metadata: MetadataSource | None = None
    """``None`` without the Kubernetes API."""
    metadata_wait_seconds: float = 75.0
    """For so long after the start the agent waits for the API, where it alone knows the holders."""
    observe: Callable[[Reading, float], None] | None = None
    """Called first with each reading, where processes determine the holders."""
    source: str = "kubelet"
    """Source of holders: ``kubelet``, ``slurm``, ``host``."""
    replicas: Replicas = field(default_factory=Replicas)
    """Of shared devices; whoever keeps them across restarts has the same object."""
    command_of: Callable[[int], str] = lambda _pid: ""
    """A process' own name, where it can be seen."""
    _first_joined: tuple[Allocations, float] | None = None
    _cached_for: tuple[Allocations, Evidence, tuple[Gpu, ...], tuple[MigInstance, ...]] | None = None
    _cached: Attribution = field(default_factory=lambda: Attribution(known=False))

    def join(self, reading: Reading | None, now: float, steady: float) -> Attribution:
        """Return the holders of every device of ``reading``, or that they are not known.

        Args:
            reading: The newest one.
            now: Unix time.
            steady: Seconds of the monotonic clock, by which an answer's age is judged from when it is first seen.
        """
        allocations = self.kubelet.latest if self.kubelet else None
        if allocations is None:
            return Attribution(known=False)
        new = self._first_joined is None or self._first_joined[0] is not allocations
        if self._first_joined is None or new:
            self._first_joined = allocations, steady
        if self.metadata and new:
            self.metadata.note(allocations, now)
        evidence = self.metadata.evidence(now) if self.metadata else NO_EVIDENCE
        # A minor number may have passed to another GPU since one went missing: those that are there come first.
        there_first = sorted(reading.gpus, key=lambda gpu: gpu.state is DeviceState.MISSING) if reading else ()
        gpus = tuple(gpu.gpu for gpu in there_first)
        instances = tuple(part.instance for gpu in reading.gpus for part in gpu.instances) if reading else ()
        age = steady - self._first_joined[1]
        expired = age > self.expiry_seconds
        previous = self._cached_for
        unchanged = (
            previous is not None
            and previous[0] is allocations
            and previous[1] is evidence
            and previous[2] == gpus
            and previous[3] == instances
            and self._cached.known is not expired
        )
        if not unchanged:
            self._cached = attribute(
                allocations=allocations,
                gpus=gpus,
                instances=instances,
                now=allocations.answered_at_seconds + age,
                expiry_seconds=self.expiry_seconds,
                evidence=evidence,
                replicas=self.replicas.counts,
            )
            if self._cached.known:
                self.replicas.counts = self._cached.replicas
            if self.metadata:
                self._cached = self._with_uids_of_node(self._cached, is_followed=evidence.is_followed)
            self._cached_for = (allocations, evidence, gpus, instances)
        unlisted = self._unlisted(reading) if reading and self._cached.known else ()
        return replace(self._cached, unresolved=(*self._cached.unresolved, *unlisted)) if unlisted else self._cached

    def _unlisted(self, reading: Reading) -> tuple[Unresolved, ...]:
        return unlisted_uses(
            reading,
            self._cached,
            pod_uid=self.pids.pod_uid,
            name_of=self.names.name_of,
            command_of=self.command_of,
        )

    def _with_uids_of_node(self, attribution: Attribution, *, is_followed: bool) -> Attribution:
        """Find the running pod of a name on the node, where the API has none or may report the one before.

        With the UID of another pod the running one would have no processes, and would look idle.
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
            return replace(holder, pod_uid=None)  # two pods of the name, or it cannot be looked up
        return holder if uid in {None, holder.pod_uid} else replace(holder, pod_uid=uid)

    def lacks_metadata(self, attribution: Attribution) -> bool:
        """Return whether holders still depend on an API that has not answered yet: fractions, claims."""
        if self.metadata is None or self.metadata.known or self._cached_for is None:
            return False
        reserved = self._cached_for[1].reservation_namespaces
        not_told = HARMLESS_REASONS | {REPLICAS_UNKNOWN, MEMORY_UNKNOWN, UNLISTED_USE}  # by the API either
        return any(entry.reason not in not_told for entry in attribution.unresolved) or any(
            holder.source == DRA or holder.namespace in reserved
            for holders in attribution.holders.values()
            for holder in holders
        )


def allocation_state(attribution: Attribution, uuid: str, gpu: GpuReading) -> AllocationState:
    """Return the state of a device; "unallocated" only where no unresolved id could stand for the device.

    Args:
        attribution: Holders of all devices.
        uuid: Of the device.
        gpu: The GPU that the device is or is part of.
    """
    if attribution.known and attribution.holders.get(uuid):
        return AllocationState.ALLOCATED
    return AllocationState.UNKNOWN if is_doubtful(attribution, uuid, gpu) else AllocationState.UNALLOCATED


def is_doubtful(attribution: Attribution, uuid: str, gpu: GpuReading) -> bool:
    """Return whether a GPU or a part of it may have an unknown holder.

    No holder is known, an unresolved id could stand for it, or an unlisted pod uses the device.

    Args:
        attribution: Holders of all devices.
        uuid: Of the device.
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
