"""Node labels of the clouds."""

import pytest

from exporter.kube.metadata import node_facts
from exporter.model.attribution import NodeFacts


def test_cloud_labels_give_instance_type_region_and_gpu_product() -> None:
    labels = {
        "node.kubernetes.io/instance-type": "p5.48xlarge",
        "beta.kubernetes.io/instance-type": "old",
        "topology.kubernetes.io/region": "us-east-1",
        "karpenter.sh/capacity-type": "reserved",
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED",
    }
    assert node_facts(labels) == NodeFacts(
        instance_type="p5.48xlarge",
        capacity_type="reserved",
        region="us-east-1",
        gpu_product="NVIDIA-H100-80GB-HBM3-SHARED",
    )


def test_node_without_labels_gives_empty_facts() -> None:
    assert node_facts({}) == NodeFacts()


@pytest.mark.parametrize(
    ("key", "value", "capacity"),
    [
        ("karpenter.sh/capacity-type", "spot", "spot"),
        ("karpenter.sh/capacity-type", "on-demand", "on-demand"),
        ("eks.amazonaws.com/capacityType", "SPOT", "spot"),
        ("eks.amazonaws.com/capacityType", "ON_DEMAND", "on-demand"),
        ("eks.amazonaws.com/capacityType", "CAPACITY_BLOCK", "reserved"),
        ("cloud.google.com/gke-spot", "true", "spot"),
        ("cloud.google.com/gke-spot", "false", ""),
        ("cloud.google.com/gke-provisioning", "standard", "on-demand"),
        ("cloud.google.com/gke-provisioning", "spot", "spot"),
        ("kubernetes.azure.com/scalesetpriority", "spot", "spot"),
        ("kubernetes.azure.com/scalesetpriority", "regular", "on-demand"),
        ("karpenter.sh/capacity-type", "something new", ""),
    ],
)
def test_capacity_types_of_all_clouds_have_one_spelling(key: str, value: str, capacity: str) -> None:
    assert node_facts({key: value}).capacity_type == capacity


def test_unknown_capacity_type_falls_back_to_the_next_label() -> None:
    labels = {"karpenter.sh/capacity-type": "new", "eks.amazonaws.com/capacityType": "SPOT"}
    assert node_facts(labels).capacity_type == "spot"


def test_legacy_keys_are_read_if_the_first_is_missing_or_empty() -> None:
    labels = {
        "node.kubernetes.io/instance-type": " ",
        "beta.kubernetes.io/instance-type": "Standard_ND96",
        "failure-domain.beta.kubernetes.io/region": "westeurope",
        "cloud.google.com/gke-accelerator": "nvidia-h100-80gb",
    }
    facts = node_facts(labels)
    assert (facts.instance_type, facts.region, facts.gpu_product) == ("Standard_ND96", "westeurope", "nvidia-h100-80gb")
