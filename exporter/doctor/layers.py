"""Counts the GPUs that each layer of the node knows, and names the layer that has failed."""

from pathlib import Path

from exporter.attribution.truth_table import NVML, Counts, Layer, diagnose
from exporter.doctor.finding import Finding, fail, ok, warn
from exporter.model import Allocations, Attribution, DeviceState, Reading

_NAME = "layers"
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")
_PASSED_THROUGH = "vfio-pci"


def agreement(
    reading: Reading | None,
    attribution: Attribution | None,
    allocations: Allocations | None,
    *,
    on_bus: int | None,
    in_driver: int | None,
    shown_by: str = NVML,
    inventory_refused: bool = False,
) -> Finding:
    """Compare PCI bus, kernel driver, NVML or DCGM, and kubelet.

    Args:
        reading: ``None`` where no source works.
        attribution: The join, ``None`` where no kubelet was asked or answered.
        allocations: The kubelet's answer.
        on_bus: GPUs on the PCI bus.
        in_driver: GPUs that the kernel driver knows.
        shown_by: Whose reading it is, ``NVML`` or ``DCGM``.
        inventory_refused: Whether the kubelet refused to list what it advertises.
    """
    counts = Counts(
        on_bus=on_bus,
        in_driver=in_driver,
        seen=sum(gpu.state is not DeviceState.MISSING for gpu in reading.gpus) if reading else None,
        advertised=attribution.advertised_devices if attribution else None,
        allocated=attribution.allocated_devices if attribution else None,
        by_claims=allocations is not None and any(container.claims for container in allocations.containers),
        shown_by=shown_by,
        inventory_refused=inventory_refused,
    )
    found = diagnose(counts)
    if found.layer is Layer.NONE:
        return ok(_NAME, found.cause)
    told = fail if found.layer in {Layer.DRIVER, Layer.CONTAINER_TOOLKIT} else warn
    return told(_NAME, f"{found.layer.value}: {found.cause}", found.mend)


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
