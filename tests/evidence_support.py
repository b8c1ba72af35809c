"""What the API objects of a simulated node say to the join, through the product's own readers and no server between."""

from exporter.attribution import vgpu
from exporter.attribution.pod_lifecycle import Evidence
from exporter.kube.dra import allocated_devices, parse_slice, pools_of, uid_of
from exporter.kube.metadata import parse_pod
from gpu_simulator.api_server import ApiObjects

_FINISHED = ("Succeeded", "Failed")


def evidence_of(objects: ApiObjects) -> Evidence:
    """Everything that the API has, as a watcher with all rights would know it after a while."""
    running = [pod for pod in objects.pods if pod["status"]["phase"] not in _FINISHED]
    parsed = [parse_pod(pod, vgpu.KEYS) for pod in running]
    pods = {(pod.namespace, pod.name): pod for pod in parsed if pod is not None}
    names = [(pod["metadata"]["namespace"], pod["metadata"]["name"]) for pod in objects.pods]
    slices = [found for each in objects.resource_slices if (found := parse_slice(each)) is not None]
    pools = pools_of(slices, {})
    return Evidence(
        pods=pods,
        ended=frozenset(set(names) - set(pods)),
        claims={uid_of(claim): allocated_devices(claim) or () for claim in objects.resource_claims},
        reads_claims=True,
        devices={(pool, name): device for pool, devices in pools.items() for name, device in devices.items()},
    )
