"""Checks the kubelet and the Kubernetes API: socket, rights, devices and workload manager."""

import asyncio
import contextlib

from exporter.agent.attributor import Attributor
from exporter.attribution.pod_lifecycle import PodName
from exporter.attribution.tenants import TenantSource
from exporter.config import AgentConfig
from exporter.doctor.findings import Finding, Surroundings, fail, ok, warn
from exporter.kube.kubelet import KubeletPoller, own_pod
from exporter.kube.metadata import NAME_NODE, Metadata
from exporter.model.attribution import Attribution
from exporter.model.devices import Reading
from exporter.model.formatting import some

NAME, RIGHTS = "kubernetes API", "API rights"
_LOOKS = 160
_LOOK_SECONDS = 0.05


OFF = ok(
    NAME,
    "off: owners are namespaces, without workload and team; instance type and region come from options; claims (DRA)"
    " are as the kubelet lists them, and fractions of HAMi, volcano-vgpu and KAI are unknown;"
    " --kube-metadata on changes that",
)
"""Finding for an agent without the API."""


async def ask_api(
    around: Surroundings, attributor: Attributor, reading: Reading | None
) -> tuple[list[Finding], Metadata | None]:
    """Return findings on API and rights, and the answers of the API; ``None`` if the pods are not known.

    Args:
        around: The node.
        attributor: Contains the kubelet's answer, which determines the namespaces and claims to read.
        reading: Last reading of the driver; ``None`` without one.
    """
    metadata = attributor.metadata
    if metadata is None:
        return [OFF], None
    await _read(around, attributor, metadata, reading)
    status, node = metadata.status, around.config.attribution.node_name
    if not status.known:
        return [fail(NAME, status.problem or f"{metadata.address} does not answer", "")], None
    pods = len(metadata.evidence(around.wall()).pods or ())
    reached = f"{metadata.address}: {pods} pods of node {node}"
    found = [ok(NAME, reached) if pods else warn(NAME, reached, NAME_NODE)]
    granted = "the agent can read and watch all that it needs"
    found.append(warn(RIGHTS, status.problem, "") if status.problem else ok(RIGHTS, granted))
    if status.remark:
        cause, _, fix = status.remark.partition("; ")
        found.append(warn("API clock", cause, fix))
    return found, metadata


async def _read(around: Surroundings, attributor: Attributor, metadata: Metadata, reading: Reading | None) -> None:
    """Run the agent's reader until it has the data on this node's holders, or for some seconds."""
    task = asyncio.ensure_future(metadata.run())
    try:
        for _ in range(_LOOKS):
            for pod in holders(attributor.join(reading, around.wall(), 0.0)):
                metadata.facts(*pod)  # requests the pod's namespace
            if task.done() or metadata.answered:
                break
            await asyncio.sleep(_LOOK_SECONDS)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


_FIXES = {
    "needs_annotation": "which GPU is meant is in the pod's annotation: --kube-metadata on reads those of HAMi and"
    " volcano-vgpu, not those of other schedulers",
    "unknown_uuid": "the GPU is gone or not shown here: see the check of layers",
    "unknown_minor": "the GPU is gone or not shown here: see the check of layers",
    "dra_unresolved": "the claim's device is in the API: --kube-metadata on reads it",
    "bad_annotation": "the pod's annotation is not of the form that its scheduler writes: kubectl describe it",
    "claim_pending": "the claim is being read; if this stays, see the check of the API",
    "replicas_unknown": "the kubelet does not advertise this shared GPU now, so the number of its replicas is not"
    " known here: see the device plugin's log",
    "memory_unknown": "the driver does not report the memory of the GPU of which the pod has a part: see the driver",
    "unlisted_use": "a process of this pod uses a device that the kubelet lists with no container: an ordinary init"
    " container asked for it, or it was reached without a request; see the limits in docs/owners.md",
    "reservation_pending": "for whom the GPU is reserved is being read; if this stays, see the check of the API",
}
_NO_PODS = (
    "nothing, if this node runs no pods; a kubelet that has just started lists none until the API server answers it:"
    " check that the API server is up, and run doctor again"
)


async def ask_kubelet(around: Surroundings, kubelet: KubeletPoller) -> Finding:
    """Check whether the kubelet answers, and how fast; its answer stays with the poller.

    If only the advertised devices were refused, the answer has no ``allocatable``, and a warning reports it. Outside a
    pod an answer without any pod is a warning and no answer: a kubelet that has just started returns it as well.
    """
    socket, start = around.config.attribution.kubelet_socket, around.monotonic()
    await kubelet.poll()
    if (allocations := kubelet.latest) is None:
        return fail("kubelet", kubelet.problem, "")
    took = (around.monotonic() - start) * 1000
    cause = f"{socket}: {len(allocations.containers)} containers hold devices, {took:.0f} ms"
    if own_pod() is None and not (allocations.containers or allocations.other_containers):
        kubelet.latest = None
        return warn("kubelet", f"{socket}: no pod is listed, {took:.0f} ms", _NO_PODS)
    return warn("kubelet", f"{cause}; {kubelet.problem}", "") if kubelet.problem else ok("kubelet", cause)


def holders(attribution: Attribution) -> set[PodName]:
    """Return namespace and name of the pods that hold devices."""
    return {(one.namespace, one.pod) for of in attribution.holders.values() for one in of}


def agreement(attribution: Attribution) -> Finding:
    """Check that the driver shows each device that the kubelet lists with a container."""
    name = "kubelet and driver"
    # The driver cannot see the devices of virtual machines, which is no fault.
    unmatched = [one for one in attribution.unresolved if one.reason != "dra_passed_through"]
    if unmatched:
        what = [f"{one.device_id} of {one.namespace}/{one.pod} ({one.reason.replace('_', ' ')})" for one in unmatched]
        fix = _FIXES.get(unmatched[0].reason, "see the id forms in the documentation")
        return warn(name, f"not to be matched: {some(what, 1)}", fix)
    return ok(name, f"the driver shows all that is held: {len(attribution.holders)} devices")


_WORKLOAD_MANAGER = "workload manager"


def workload_holders(config: AgentConfig, jobs: TenantSource, reading: Reading | None, now: float) -> Finding:
    """Report the holders that the agent finds now.

    Args:
        config: Configuration, which selects the manager.
        jobs: The manager's holders.
        reading: The last reading; ``None`` if NVML does not work.
        now: Unix time.
    """
    manager, mapping = config.attribution.workload_manager, config.attribution.job_mapping_dir
    if reading is None:
        return warn(_WORKLOAD_MANAGER, f"{manager}: no holder is known without the driver", "fix the driver first")
    jobs.observe(reading, now)
    if jobs.problem:
        cause, _, fix = jobs.problem.partition("; ")
        return warn(_WORKLOAD_MANAGER, f"{manager}: {cause}", fix)
    count = len(jobs.latest.containers) if jobs.latest else 0
    how = f"by the mapping in {mapping}" if manager == "slurm" and mapping else "by their processes"
    idle = "" if manager == "slurm" and mapping else "; a device with a holder and without use counts as free"
    return ok(_WORKLOAD_MANAGER, f"{manager}: {count} hold devices, {how}{idle}")
