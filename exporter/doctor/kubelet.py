"""Checks of the kubelet's pod-resources socket, and of its word against the driver's."""

from collections.abc import Callable

from exporter.attribution.join import attribute
from exporter.attribution.podresources import KubeletClient
from exporter.config import AgentConfig
from exporter.doctor.finding import Finding, fail, ok, warn
from exporter.errors import AttributionError
from exporter.model import Allocations, Reading


async def ask(
    config: AgentConfig, *, clock: Callable[[], float], monotonic: Callable[[], float]
) -> tuple[Finding, Allocations | None]:
    """Whether the kubelet answers, how fast and how much; and its answer."""
    if not config.attribution:
        return warn("kubelet", "attribution is off: no pod is named", "set --attribution on"), None
    client = KubeletClient(config.kubelet_socket, resources=config.gpu_resources)
    start = monotonic()
    try:
        allocations = await client.fetch(clock())
    except AttributionError as error:
        return fail("kubelet", str(error), ""), None
    finally:
        await client.close()
    took = (monotonic() - start) * 1000
    holding = len(allocations.containers)
    return ok("kubelet", f"{config.kubelet_socket}: {holding} containers hold devices, {took:.0f} ms"), allocations


def agreement(config: AgentConfig, allocations: Allocations, reading: Reading) -> Finding:
    """What the kubelet advertises and has given out against what the driver sees."""
    name = "kubelet and driver"
    attribution = attribute(
        allocations=allocations,
        gpus=[gpu.gpu for gpu in reading.gpus],
        instances=[part.instance for gpu in reading.gpus for part in gpu.instances],
        now=allocations.answered_at_seconds,
        expiry_seconds=config.attribution_expiry_seconds,
    )
    if attribution.unresolved:
        first = attribution.unresolved[0]
        what = f"{first.device_id} of {first.namespace}/{first.pod} ({first.reason.replace('_', ' ')})"
        more = f" and {len(attribution.unresolved) - 1} more" if len(attribution.unresolved) > 1 else ""
        return warn(name, f"not seen by the driver: {what}{more}", "see the id forms in the documentation")
    expected, seen = attribution.expected_devices, len(reading.gpus)
    if expected is not None and expected > seen:
        return fail(
            name,
            f"the kubelet knows {expected} GPUs, the driver shows {seen}",
            "a GPU fell off the bus, or this container may not see all: set NVIDIA_VISIBLE_DEVICES=all",
        )
    if expected is not None and expected < seen:
        return warn(
            name,
            f"the kubelet knows {expected} GPUs, the driver shows {seen}",
            "see the device plugin's log: a GPU may be unhealthy, or a resource's name not be in --gpu-resources",
        )
    if expected is None:
        return warn(name, "the kubelet does not say which devices there are", "an old kubelet: 1.23 or newer can")
    return ok(name, f"both know {seen} GPUs")
