"""Finds the failed layer of a node from the number of GPUs that each layer reports, and says how to fix it."""

from dataclasses import dataclass
from enum import StrEnum

NVML, DCGM = "NVML", "DCGM"


class Layer(StrEnum):
    """What stands between the hardware and a pod, from below."""

    NONE = "none"
    """Nothing has failed, as far as can be told."""
    DRIVER = "driver"
    CONTAINER_TOOLKIT = "container toolkit"
    DEVICE_PLUGIN = "device plugin"
    KUBELET = "kubelet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Physical GPUs that each layer knows; ``None`` where it cannot be told."""

    on_bus: int | None = None
    """NVIDIA GPUs on the PCI bus that are not passed through to virtual machines."""
    in_driver: int | None = None
    """Known to the kernel driver of the host."""
    seen: int | None = None
    """Given out by NVML, or by DCGM, here; ``None`` where it does not work."""
    shown_by: str = NVML
    advertised: int | None = None
    """Healthy by the kubelet's word, or by the slices of a DRA driver; ``None`` where nobody can tell."""
    allocated: int | None = None
    """Of which somebody holds something, seen here or not."""
    inventory_refused: bool = False
    """Whether the kubelet did not answer what it advertises, though it may know."""
    by_claims: bool = False
    """Devices of this node are given out by DRA: then a kubelet that advertises none is as it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The lowest layer that has failed: those above it cannot be right either."""

    layer: Layer
    cause: str
    fix: str = ""
    """Empty where there is nothing to fix."""


_DRIVER_LOG = "see the kernel log (dmesg | grep -i -e nvrm -e xid), then reset the GPU or restart the node"
_LOAD_DRIVER = "load the driver (modprobe nvidia), or see the driver's pod of the GPU operator"
_SHOW_ALL = "see all GPUs: runtimeClassName: nvidia and NVIDIA_VISIBLE_DEVICES=all"
_PLUGIN_LOG = (
    "see the device plugin's log for the unhealthy device and the kernel log for its Xid; "
    "a resource of another name needs --gpu-resources"
)
_PLUGIN_MISSING = (
    "see that the device plugin's pod runs on this node; after a restart of the kubelet it registers within a minute; "
    "where devices are given out by claims (DRA) alone nothing is wrong, and --kube-metadata on knows that"
)
_PLUGIN_LATE = "it registers within a minute after the kubelet's start; else restart the device plugin's pod"


def diagnose(counts: Counts) -> Diagnosis:
    """Find the lowest layer that knows fewer GPUs than the one below it.

    Args:
        counts: Of one instant, as far as they are known; two layers that are known are compared though one between
            them is not.
    """
    return _driver(counts) or _toolkit(counts) or _above(counts)


def _driver(counts: Counts) -> Diagnosis | None:
    bus, driver, seen = counts.on_bus, counts.in_driver, counts.seen
    if bus and driver is None and not seen and not counts.advertised:
        return Diagnosis(
            layer=Layer.DRIVER, cause=f"the PCI bus has {_gpus(bus)}, and no driver is loaded", fix=_LOAD_DRIVER
        )
    if bus is not None and driver is not None and driver < bus:
        cause = f"the PCI bus has {_gpus(bus)}, the driver has taken {driver}"
        return Diagnosis(layer=Layer.DRIVER, cause=cause, fix=_DRIVER_LOG)
    known = max(counts.advertised or 0, counts.allocated or 0)
    # On hosts without PCI GPUs (Tegra, WSL) the bus is empty and all is well.
    there = driver if driver is not None else bus or None
    if there is not None and known > there:
        cause = f"the kubelet knows {_gpus(known)}, the {'driver' if driver is not None else 'PCI bus'} has {there} now"
        return Diagnosis(layer=Layer.DRIVER, cause=f"{cause}: one fell off the bus", fix=_DRIVER_LOG)
    return None


def _toolkit(counts: Counts) -> Diagnosis | None:
    """Compare what is shown here with what is there.

    Whose fault it is when fewer are shown is told by the device plugin, which asks the same driver from another place.
    """
    seen, advertised = counts.seen or 0, counts.advertised
    there = counts.in_driver if counts.in_driver is not None else counts.on_bus
    known = max(advertised or 0, counts.allocated or 0)
    if max(there or 0, known) <= seen:
        return None
    by, where = counts.shown_by, "this container" if counts.shown_by == NVML else "its engine's container"
    shown = f"{by} does not work here" if counts.seen is None else f"{by} shows {counts.seen} here"
    show_all = f"let {where} {_SHOW_ALL}"
    if advertised and advertised > seen:
        more = f"; the device plugin is shown {advertised}"
        return Diagnosis(layer=Layer.CONTAINER_TOOLKIT, cause=f"{_there(counts, there)}{shown}{more}", fix=show_all)
    if advertised or (counts.allocated or 0) > seen:
        who = f"to {where} and to the device plugin" if advertised else "any more"
        cause = f"{_there(counts, there)}{shown}: the driver does not give all of {max(there or 0, known)} {who}"
        return Diagnosis(layer=Layer.DRIVER, cause=cause, fix=_DRIVER_LOG)
    return Diagnosis(layer=Layer.CONTAINER_TOOLKIT, cause=f"{_there(counts, there)}{shown}", fix=show_all)


def _above(counts: Counts) -> Diagnosis:
    seen, advertised = counts.seen or 0, counts.advertised
    if advertised is None and counts.allocated is None:
        blind = f"{counts.shown_by} does not work here, and no GPU is known of"
        here = f"{_gpus(seen)} here" if counts.seen is not None else blind
        return Diagnosis(layer=Layer.NONE, cause=f"{here}; which are given out is not known")
    if (counts.by_claims and not advertised) or (counts.inventory_refused and advertised is None):
        return _ok(counts, "given out by claims (DRA)" if counts.by_claims else "advertised devices not known")
    if advertised is None:
        return Diagnosis(
            layer=Layer.KUBELET,
            cause="the kubelet does not tell which devices there are",
            fix="it is an old one: 1.23 or newer tells",
        )
    if not advertised and seen:
        return _nothing_advertised(seen, counts.allocated)
    if advertised < seen:
        who = "DRA driver or device plugin" if counts.by_claims else "device plugin"
        cause = f"the driver shows {_gpus(seen)}, the {who} advertises {advertised} as healthy"
        return Diagnosis(layer=Layer.DEVICE_PLUGIN, cause=cause, fix=_PLUGIN_LOG)
    return _ok(counts, "advertised")


def _nothing_advertised(seen: int, allocated: int | None) -> Diagnosis:
    # What is held outlives the plugin's registration, in the kubelet's checkpoint.
    if allocated:
        cause = f"{allocated} of {_gpus(seen)} are held and none is advertised: the device plugin is not registered"
        return Diagnosis(layer=Layer.KUBELET, cause=cause, fix=_PLUGIN_LATE)
    cause = f"the driver shows {_gpus(seen)}, no device plugin advertises one"
    return Diagnosis(layer=Layer.DEVICE_PLUGIN, cause=cause, fix=_PLUGIN_MISSING)


def _ok(counts: Counts, how: str) -> Diagnosis:
    seen, advertised = counts.seen or 0, counts.advertised
    if not seen:
        return Diagnosis(layer=Layer.NONE, cause="no GPU here, and nobody knows of one")
    number = "" if advertised is None else f"{advertised} "
    held = "" if counts.allocated is None else f", {counts.allocated} held"
    return Diagnosis(layer=Layer.NONE, cause=f"{_gpus(seen)} here, {number}{how}{held}")


def _there(counts: Counts, there: int | None) -> str:
    if there is None:
        return ""
    return f"the {'driver' if counts.in_driver is not None else 'PCI bus'} has {_gpus(there)}, "


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"
