"""Values of pods: labels, owner and node, as the Kubernetes API reports them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.model.ledger import Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMetadata:
    """One pod of this node, with the data that the agent reads."""

    namespace: str
    name: str
    uid: str
    """UID in the kubelet and cgroups: for a static pod the hash of its file, not the API object's UID."""
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Only the annotations that are read; the rest can be a megabyte."""
    owner_kind: str = ""
    """Kind of the owner reference with ``controller: true``; empty for a pod without a controller."""
    owner_name: str = ""
    owner_api: str = ""
    """Group and version of the controller: ``apps/v1``, ``batch/v1``, ``ray.io/v1``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFacts:
    """Owner of a pod, and its alert settings; empty parts are unknown."""

    owner: Owner
    queue: str = ""
    """Queue of Kueue, KAI, Volcano or Run:ai."""
    workload_class: str = ""
    """Class for the rules: ``batch``, ``interactive``, ``inference``, ``reserved``."""
    opt_out_until_seconds: float | None = None
    """Unix time until which waste alerts skip the pod; ``inf`` is permanent, ``None`` means no opt-out."""
    exported: tuple[tuple[str, str], ...] = ()
    """Allowed labels and annotations as (label name, value), sanitised, sorted by name."""
    problems: tuple[str, ...] = ()
    """Snake-case reasons for values of the pod that could not be parsed, such as ``bad_opt_out``."""
    pod_uid: str = field(default="", compare=False)
    """UID of the pod; empty when unknown. It does not depend on the owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Known facts of a node for its prices; unknown ones are empty."""

    instance_type: str = ""
    capacity_type: str = ""
    """Capacity type: ``on-demand``, ``spot`` or ``reserved``."""
    region: str = ""
    gpu_product: str = ""
    """Model in the node's labels, for comparison only; the driver's model is authoritative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataStatus:
    """State of the data of the Kubernetes API."""

    known: bool
    """Whether the pods have been listed and changes are followed."""
    at_seconds: float | None = None
    """Unix time of the API's last list, event or bookmark."""
    problem: str = ""
    """The missing data and the fix, in one line; empty without a problem."""
    names_other_node: bool = False
    """Whether the problem is a wrong --node-name: an error of configuration, which needs a change by the user."""
    remark: str = ""
    """A fault that does not affect the data, such as clocks that differ, in one line."""
