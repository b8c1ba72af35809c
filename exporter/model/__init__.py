"""Values that pass between the layers; frozen, and free of any library."""

from exporter.model.devices import (
    DeviceState,
    Gpu,
    GpuReading,
    MigInstance,
    MigReading,
    ProcessUse,
    Reading,
    SourceState,
    SourceStatus,
    XidEvent,
)
from exporter.model.fields import Field
from exporter.model.holders import (
    Allocations,
    AllocationState,
    Attribution,
    ClaimedDevice,
    ContainerAllocation,
    DeviceIds,
    Holder,
    ShareMode,
    Unresolved,
)
from exporter.model.snapshot import Activity, ActivitySource, DeviceView, PodUse, Snapshot

__all__ = [
    "Activity",
    "ActivitySource",
    "AllocationState",
    "Allocations",
    "Attribution",
    "ClaimedDevice",
    "ContainerAllocation",
    "DeviceIds",
    "DeviceState",
    "DeviceView",
    "Field",
    "Gpu",
    "GpuReading",
    "Holder",
    "MigInstance",
    "MigReading",
    "PodUse",
    "ProcessUse",
    "Reading",
    "ShareMode",
    "Snapshot",
    "SourceState",
    "SourceStatus",
    "Unresolved",
    "XidEvent",
]
