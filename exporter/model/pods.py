"""Values of pods: labels, owner and node, as the Kubernetes API reports them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.model.ledger import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMetadata:
    """One pod of this node, as much of it as anybody here reads."""

    namespace: str
    name: str
    uid: str
    """As the kubelet and its cgroups have it: of a static pod the hash of its file, not the API object's own."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Only those that are read; the rest can be a megabyte."""
    owner_kind: str = ""
    """Of the owner reference with ``controller: true``; empty for a pod that nothing controls."""
    owner_name: str = ""
    owner_api: str = ""
    """Group and version: ``apps/v1``, ``batch/v1``, ``ray.io/v1``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """Owner of a pod, and its alert settings; empty parts are unknown."""

    owner: Owner
    queue: str = ""
    """Of Kueue, KAI, Volcano or Run:ai."""
    workload_class: str = ""
    """For the rules: ``batch``, ``interactive``, ``inference``, ``reserved``."""
    opt_out_until_seconds: float | None = None
    """Unix time until which waste alerts leave it alone; ``inf`` is for good, ``None`` is not at all."""
    exported: tuple[tuple[str, str], ...] = ()
    """Allowed labels and annotations as (label name, value), sanitised, in the order of names."""
    problems: tuple[str, ...] = ()
    """Snake case: what in the pod's own words could not be understood, such as ``bad_opt_out``."""
    pod_uid: str = field(default="", compare=False)
    """UID of the pod; empty when unknown. It does not depend on the owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What is known of a node, for its prices; empty where it is not known."""

    instance_type: str = ""
    capacity_type: str = ""
    """``on-demand``, ``spot`` or ``reserved``."""
    region: str = ""
    gpu_product: str = ""
    """As the node's labels have it; the driver's word on the model counts, this is to compare it with."""
