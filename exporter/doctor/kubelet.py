"""Checks of the kubelet's pod-resources socket, and of its word against the driver's."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from exporter.attribution.evidence import Evidence
from exporter.attribution.join import attribute
from exporter.attribution.podresources import KubeletClient, own_pod
from exporter.attribution.proc_files import own_name
from exporter.attribution.processes import PidResolver, PodNames, unlisted_uses
from exporter.config import AgentConfig
from exporter.doctor.finding import Finding, fail, ok, warn
from exporter.errors import AttributionError
from exporter.model import Allocations, Attribution, Reading

_ID_FORMS = "see the id forms in the documentation"
_MENDS = {
    "needs_annotation": "which GPU is meant is in the pod's annotation: --kube-metadata on reads it",
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


async def ask(
    config: AgentConfig, *, clock: Callable[[], float], monotonic: Callable[[], float]
) -> tuple[Finding, Allocations | None]:
    """Whether the kubelet answers, how fast and how much; and its answer.

    An answer without the inventory, which was refused, has no ``allocatable`` and is a warning. Outside a pod an answer
    without any pod is a warning and no answer: a kubelet that has just started gives it as well.
    """
    if not config.attribution:
        return warn("kubelet", "attribution is off: no pod is named", "set --attribution on"), None
    client = KubeletClient(config.kubelet_socket, resources=config.gpu_resources, canary=own_pod())
    start = monotonic()
    try:
        allocations = await client.fetch(clock())
    except AttributionError as error:
        return fail("kubelet", str(error), ""), None
    finally:
        await client.close()
    took = (monotonic() - start) * 1000
    cause = f"{config.kubelet_socket}: {len(allocations.containers)} containers hold devices, {took:.0f} ms"
    if own_pod() is None and not (allocations.containers or allocations.other_containers):
        return warn("kubelet", f"{config.kubelet_socket}: no pod is listed, {took:.0f} ms", _NO_PODS), None
    if missed := client.allocatable_error:
        return warn("kubelet", f"{cause}; which devices it advertises could not be read: {missed}", ""), allocations
    return ok("kubelet", cause), allocations


def join(
    config: AgentConfig, allocations: Allocations | None, reading: Reading | None, evidence: Evidence
) -> Attribution | None:
    """Who holds what, as the agent would have it; ``None`` where the kubelet did not answer."""
    if allocations is None:
        return None
    gpus = reading.gpus if reading else ()
    attribution = attribute(
        allocations=allocations,
        gpus=[gpu.gpu for gpu in gpus],
        instances=[part.instance for gpu in gpus for part in gpu.instances],
        now=allocations.answered_at_seconds,
        expiry_seconds=config.attribution_expiry_seconds,
        evidence=evidence,
    )
    if reading is None:
        return attribution
    unlisted = unlisted_uses(
        reading,
        attribution,
        pod_uid=PidResolver(config.proc_root).pod_uid,
        name_of=PodNames(config.pod_log_root).name_of,
        command_of=partial(own_name, str(config.proc_root)),
    )
    return replace(attribution, unresolved=(*attribution.unresolved, *unlisted))


def holders(attribution: Attribution | None) -> set[tuple[str, str]]:
    """Namespace and name of the pods that hold devices."""
    return {(one.namespace, one.pod) for of in attribution.holders.values() for one in of} if attribution else set()


def agreement(attribution: Attribution) -> Finding:
    """Every device that the kubelet lists with a container should be one that the driver shows."""
    name = "kubelet and driver"
    # What a virtual machine has the driver cannot see, and nothing is wrong with that.
    unmatched = [one for one in attribution.unresolved if one.reason != "dra_passed_through"]
    if unmatched:
        first = unmatched[0]
        what = f"{first.device_id} of {first.namespace}/{first.pod} ({first.reason.replace('_', ' ')})"
        more = f" and {len(unmatched) - 1} more" if len(unmatched) > 1 else ""
        return warn(name, f"not to be matched: {what}{more}", _MENDS.get(first.reason, _ID_FORMS))
    return ok(name, f"the driver shows all that is held: {len(attribution.holders)} devices")
