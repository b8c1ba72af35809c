"""Finds the failed layer of a node from the number of GPUs that each layer reports, and says how to fix it."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from exporter.doctor.findings import Finding, Surroundings, fail, ok, warn
from exporter.model import Allocations, Attribution, DeviceState, Reading

NVML, DCGM = "NVML", "DCGM"


class Layer(StrEnum):
    """What stands between the hardware and a pod, from below."""

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


_LAYERS = "layers"
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


def diagnose(counts: Counts) -> Finding:
    """Find the lowest layer that knows fewer GPUs than the one below it: those above it cannot be right either.

    Args:
        counts: Of one instant, as far as they are known; two layers that are known are compared though one between
            them is not.
    """
    return _driver(counts) or _toolkit(counts) or _above(counts)


def _failed(layer: Layer, cause: str, fix: str) -> Finding:
    told = fail if layer in {Layer.DRIVER, Layer.CONTAINER_TOOLKIT} else warn
    return told(_LAYERS, f"{layer.value}: {cause}", fix)


def _driver(counts: Counts) -> Finding | None:
    bus, driver, seen = counts.on_bus, counts.in_driver, counts.seen
    if bus and driver is None and not seen and not counts.advertised:
        return _failed(Layer.DRIVER, f"the PCI bus has {_gpus(bus)}, and no driver is loaded", _LOAD_DRIVER)
    if bus is not None and driver is not None and driver < bus:
        cause = f"the PCI bus has {_gpus(bus)}, the driver has taken {driver}"
        return _failed(Layer.DRIVER, cause, _DRIVER_LOG)
    known = max(counts.advertised or 0, counts.allocated or 0)
    # On hosts without PCI GPUs (Tegra, WSL) the bus is empty and all is well.
    there = driver if driver is not None else bus or None
    if there is not None and known > there:
        cause = f"the kubelet knows {_gpus(known)}, the {'driver' if driver is not None else 'PCI bus'} has {there} now"
        return _failed(Layer.DRIVER, f"{cause}: one fell off the bus", _DRIVER_LOG)
    return None


def _toolkit(counts: Counts) -> Finding | None:
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
        return _failed(Layer.CONTAINER_TOOLKIT, f"{_there(counts, there)}{shown}{more}", show_all)
    if advertised or (counts.allocated or 0) > seen:
        who = f"to {where} and to the device plugin" if advertised else "any more"
        cause = f"{_there(counts, there)}{shown}: the driver does not give all of {max(there or 0, known)} {who}"
        return _failed(Layer.DRIVER, cause, _DRIVER_LOG)
    return _failed(Layer.CONTAINER_TOOLKIT, f"{_there(counts, there)}{shown}", show_all)


def _above(counts: Counts) -> Finding:
    seen, advertised = counts.seen or 0, counts.advertised
    if advertised is None and counts.allocated is None:
        blind = f"{counts.shown_by} does not work here, and no GPU is known of"
        here = f"{_gpus(seen)} here" if counts.seen is not None else blind
        return ok(_LAYERS, f"{here}; which are given out is not known")
    if (counts.by_claims and not advertised) or (counts.inventory_refused and advertised is None):
        return _ok(counts, "given out by claims (DRA)" if counts.by_claims else "advertised devices not known")
    if advertised is None:
        return _failed(
            Layer.KUBELET, "the kubelet does not tell which devices there are", "it is an old one: 1.23 or newer tells"
        )
    if not advertised and seen:
        return _nothing_advertised(seen, counts.allocated)
    if advertised < seen:
        who = "DRA driver or device plugin" if counts.by_claims else "device plugin"
        cause = f"the driver shows {_gpus(seen)}, the {who} advertises {advertised} as healthy"
        return _failed(Layer.DEVICE_PLUGIN, cause, _PLUGIN_LOG)
    return _ok(counts, "advertised")


def _nothing_advertised(seen: int, allocated: int | None) -> Finding:
    # What is held outlives the plugin's registration, in the kubelet's checkpoint.
    if allocated:
        cause = f"{allocated} of {_gpus(seen)} are held and none is advertised: the device plugin is not registered"
        return _failed(Layer.KUBELET, cause, _PLUGIN_LATE)
    cause = f"the driver shows {_gpus(seen)}, no device plugin advertises one"
    return _failed(Layer.DEVICE_PLUGIN, cause, _PLUGIN_MISSING)


def _ok(counts: Counts, how: str) -> Finding:
    seen, advertised = counts.seen or 0, counts.advertised
    if not seen:
        return ok(_LAYERS, "no GPU here, and nobody knows of one")
    number = "" if advertised is None else f"{advertised} "
    held = "" if counts.allocated is None else f", {counts.allocated} held"
    return ok(_LAYERS, f"{_gpus(seen)} here, {number}{how}{held}")


def _there(counts: Counts, there: int | None) -> str:
    if there is None:
        return ""
    return f"the {'driver' if counts.in_driver is not None else 'PCI bus'} has {_gpus(there)}, "


def _gpus(count: int) -> str:
    return f"{count} GPU" if count == 1 else f"{count} GPUs"


_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")
_PASSED_THROUGH = "vfio-pci"


def layer_agreement(
    around: Surroundings,
    reading: Reading | None,
    attribution: Attribution | None = None,
    allocations: Allocations | None = None,
    *,
    inventory_refused: bool = False,
) -> Finding:
    """Compare PCI bus, kernel driver, NVML or DCGM, and kubelet.

    Args:
        around: Says where bus and driver are looked at, and which source is asked.
        reading: ``None`` where no source works.
        attribution: The join, ``None`` where no kubelet was asked or answered.
        allocations: The kubelet's answer.
        inventory_refused: Whether the kubelet refused to list what it advertises.
    """
    by_dcgm = around.config.source == "dcgm"
    # A host engine may be shown another machine's GPUs, or others of this one's.
    by_host = not around.simulated and not by_dcgm
    counts = Counts(
        on_bus=on_bus(around.sys_root) if by_host else None,
        in_driver=in_driver(around.config.proc_root) if by_host else None,
        seen=sum(gpu.state is not DeviceState.MISSING for gpu in reading.gpus) if reading else None,
        advertised=attribution.advertised_devices if attribution else None,
        allocated=attribution.allocated_devices if attribution else None,
        by_claims=allocations is not None and any(container.claims for container in allocations.containers),
        shown_by=DCGM if by_dcgm else NVML,
        inventory_refused=inventory_refused,
    )
    return diagnose(counts)


def on_bus(sys_root: Path) -> int | None:
    """Count NVIDIA's GPUs on the PCI bus that are not passed through to virtual machines; ``None`` without sysfs."""
    try:
        return sum(_is_gpu(device) for device in (sys_root / "bus" / "pci" / "devices").iterdir())
    except OSError:
        return None


def in_driver(proc_root: Path) -> int | None:
    """Count the GPUs that the kernel driver knows; ``None`` where it does not tell, or tells those of a container.

    The container toolkit lays a directory of the container's own GPUs over the driver's.
    """
    place = proc_root / "driver" / "nvidia"
    try:
        mounts = (proc_root / "self" / "mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        mounts = ""
    if any(line.split()[4:5] == [str(place)] for line in mounts.splitlines()):
        return None
    try:
        return sum(1 for _ in (place / "gpus").iterdir())
    except OSError:
        return None


def _is_gpu(device: Path) -> bool:
    try:
        if (device / "vendor").read_text(encoding="ascii").strip() != _NVIDIA:
            return False
        if not (device / "class").read_text(encoding="ascii").startswith(_DISPLAY_CLASSES):
            return False
        driver = device / "driver"
        return not driver.is_symlink() or driver.readlink().name != _PASSED_THROUGH
    except (OSError, UnicodeDecodeError):
        return False
