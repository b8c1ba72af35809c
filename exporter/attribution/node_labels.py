"""What a node's labels say for its prices: instance type, capacity type, region, GPU product."""

from collections.abc import Mapping
from typing import Final

from exporter.attribution.label_text import label_text
from exporter.model import NodeFacts

ON_DEMAND: Final = "on-demand"
SPOT: Final = "spot"
RESERVED: Final = "reserved"

_INSTANCE_TYPE = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
_REGION = ("topology.kubernetes.io/region", "failure-domain.beta.kubernetes.io/region")
_GPU_PRODUCT = (
    "nvidia.com/gpu.product",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
    "gpu.nvidia.com/model",
    "gpu.nvidia.com/class",
)
_CAPACITY: tuple[tuple[str, Mapping[str, str]], ...] = (
    ("karpenter.sh/capacity-type", {"spot": SPOT, "on-demand": ON_DEMAND, "reserved": RESERVED}),
    ("eks.amazonaws.com/capacitytype", {"spot": SPOT, "on_demand": ON_DEMAND, "capacity_block": RESERVED}),
    ("cloud.google.com/gke-spot", {"true": SPOT}),
    ("cloud.google.com/gke-preemptible", {"true": SPOT}),
    ("cloud.google.com/gke-provisioning", {"spot": SPOT, "preemptible": SPOT, "standard": ON_DEMAND}),
    ("kubernetes.azure.com/scalesetpriority", {"spot": SPOT, "regular": ON_DEMAND}),
)
"""Keys in lower case; the first that is there and understood counts."""
_LIMIT = 128


def node_facts(labels: Mapping[str, str]) -> NodeFacts:
    """Read a node's labels; what no label says stays empty."""
    return NodeFacts(
        instance_type=_first(labels, _INSTANCE_TYPE),
        capacity_type=_capacity(labels),
        region=_first(labels, _REGION),
        gpu_product=_first(labels, _GPU_PRODUCT),
    )


def _first(labels: Mapping[str, str], keys: tuple[str, ...]) -> str:
    return next(filter(None, (label_text(labels.get(key, ""), _LIMIT) for key in keys)), "")


def _capacity(labels: Mapping[str, str]) -> str:
    lower = {key.lower(): value.strip().lower() for key, value in labels.items()}
    words = (meanings.get(lower.get(key, ""), "") for key, meanings in _CAPACITY)
    return next(filter(None, words), "")
