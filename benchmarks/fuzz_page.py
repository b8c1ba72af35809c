"""A node as the agent has it, without processes: whatever was let in becomes a page here, and that must be valid."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from exporter.accounting.idle import IdleClock
from exporter.accounting.ledgers import Ledgers
from exporter.accounting.meter import Meter
from exporter.accounting.state_file import StateFile
from exporter.agent.facts import Attributor
from exporter.agent.metering import Metering
from exporter.agent.node import Node
from exporter.agent.owners import Owners
from exporter.agent.sources import Sources
from exporter.agent.views import Viewer
from exporter.config import price_book
from exporter.metrics.collector import ExpositionOptions, build
from exporter.metrics.text_format import Dropped, duplicate_series, render
from exporter.model import (
    Allocations,
    ContainerAllocation,
    DeviceIds,
    Field,
    Gpu,
    GpuReading,
    MigInstance,
    MigReading,
    NodeFacts,
    ProcessUse,
    Reading,
    Snapshot,
    SourceState,
    SourceStatus,
)
from exporter.web import node_api, node_page

NOW = 1_800_000_000.0
_ESCAPED = r'(?:[^"\\\n]|\\["\\n])*'
_LABEL = rf'[a-zA-Z_][a-zA-Z0-9_]*="{_ESCAPED}"'
_SAMPLE = re.compile(rf"[a-zA-Z_:][a-zA-Z0-9_:]*(?:\{{{_LABEL}(?:,{_LABEL})*\}})? -?[0-9][0-9.e+-]*")
_TOLERATED = 1e-6


class BrokenPromise(Exception):  # noqa: N818 - what it is
    """An entry point answered, and the answer is not what it promises."""


def require(holds: bool, promise: str) -> None:  # noqa: FBT001 - as assert has it
    """Raise where a promise does not hold."""
    if not holds:
        raise BrokenPromise(promise)


def require_finite(values: Iterable[float | None], what: str, *, least: float = -math.inf) -> None:
    """Raise where a value that is shown is no number, or is less than it can be."""
    for value in values:
        if value is not None:
            require(math.isfinite(value) and value >= least, f"{what} is {value}")


def require_json(text: str | bytes) -> None:
    """Raise where a document is no JSON, or has a number that JSON has not."""

    def refuse(name: str) -> None:
        raise BrokenPromise(f"{name} in a document")

    json.loads(text, parse_constant=refuse)


def gpus() -> tuple[GpuReading, ...]:
    """A whole GPU, one that is shared and one in two instances, as NVML tells them."""
    values: dict[Field, int | float] = {Field.GPU_UTIL: 40, Field.FB_TOTAL: 81_559, Field.FB_USED: 4_000}
    found = []
    for index in range(3):
        gpu = Gpu(
            uuid=f"GPU-0000000{index}-0000-0000-0000-000000000000",
            index=index,
            minor=index,
            model="NVIDIA H100 80GB HBM3",
            pci_bus_id=f"00000000:0{index + 1}:00.0",
            mig_enabled=index == 2,  # noqa: PLR2004 - the last one
            compute_slices=7,
            memory_slices=8,
            memory_total_bytes=80 << 30,
        )
        parts = tuple(_part(gpu.uuid, number) for number in (1, 2)) if gpu.mig_enabled else ()
        uses = (ProcessUse(pid=100 + index, memory_used_bytes=1 << 30, sm_ratio=0.4),)
        found.append(GpuReading(gpu=gpu, values=values, instances=parts, processes=None if parts else uses))
    return tuple(found)


def _part(parent: str, number: int) -> MigReading:
    instance = MigInstance(
        uuid=f"MIG-0000000{number}-1111-0000-0000-000000000000",
        parent_uuid=parent,
        gpu_instance_id=number,
        compute_instance_id=0,
        profile="3g.40gb",
        compute_slices=3,
        memory_slices=4,
        profile_id=9,
        placement_start=4 * (number - 1),
    )
    return MigReading(instance=instance, values={Field.FB_USED: 100, Field.PROF_GR_ENGINE_ACTIVE: 0.5})


def reading(at_seconds: float, found: tuple[GpuReading, ...]) -> Reading:
    """A reading of these GPUs."""
    return Reading(
        source="nvml",
        taken_at_seconds=NOW + at_seconds,
        duration_seconds=0.01,
        steady_seconds=at_seconds,
        driver_version="590.48.01",
        nvml_version="13.590",
        dcgm_version=None,
        gpus=found,
    )


PLACED = ContainerAllocation(
    namespace="team-a",
    pod="trainer-0",
    container="main",
    devices=(DeviceIds(resource="nvidia.com/gpu", ids=(gpus()[0].gpu.uuid,)),),
)
"""A container that holds the first GPU."""


@dataclass(slots=True)
class Fed:
    """A source whose readings are put in."""

    readings: list[Reading] = field(default_factory=list)
    status: SourceStatus = field(default_factory=lambda: SourceStatus(name="nvml", state=SourceState.UP))
    errors: Mapping[str, int] = field(default_factory=dict)

    def take(self) -> tuple[Reading, ...]:
        """Give them once."""
        taken, self.readings = tuple(self.readings), []
        return taken


@dataclass(slots=True)
class Told:
    """What the kubelet said."""

    latest: Allocations | None = None
    problem: str = ""
    errors: Mapping[str, int] = field(default_factory=dict)


class NoPids:
    """Processes and pods of which none can be found."""

    def pod_uid(self, _pid: int) -> str | None:
        """Return no UID."""
        return None

    def name_of(self, _uid: str) -> tuple[str, str] | None:
        """Return no name."""
        return None

    def uid_of(self, _namespace: str, _pod: str) -> str | None:
        """Return no UID."""
        return None


def metering(owners: Owners | None = None, file: StateFile | None = None) -> Metering:
    """A meter with the bundled prices."""
    owners = owners or Owners()
    return Metering(
        node="node-a",
        meter=Meter(1.0, owners.owner_of),
        ledgers=Ledgers(saves=file is not None),
        book=price_book.load(None),
        facts=NodeFacts(),
        owners=owners,
        file=file,
        boot_id="boot",
        save_interval_seconds=0.0,
    )


def node(*, told: Allocations | None = None, meter: Metering | None = None) -> tuple[Node, Fed]:
    """Return a node, and where its readings are put."""
    source, unknown = Fed(), NoPids()
    meter = meter or metering(Owners())
    attributor = Attributor(kubelet=Told(latest=told), pids=unknown, names=unknown, expiry_seconds=60.0)
    viewer = Viewer(attributor, IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=3.0), owners=meter.owners)
    return (
        Node(
            name="node-a",
            sources=Sources(nvml=source, stale_after_seconds=3.0),
            viewer=viewer,
            sample_interval_seconds=1.0,
            process_clock=lambda: 0.0,
            metering=meter,
        ),
        source,
    )


def lived(
    one: Node, source: Fed, *, first: tuple[GpuReading, ...] = (), steady: float = 0.0, conserved: bool = True
) -> Snapshot:
    """Three samples of a node, and its page looked at.

    Args:
        one: The node.
        source: Its source.
        first: What the first sample tells, and the last.
        steady: When the first is.
        conserved: Whether the ledger was this node's own from the start.
    """
    for second, found in enumerate((first or gpus(), gpus())):
        source.readings.append(reading(steady + second, found))
        one.tick(NOW + steady + second, steady + second)
    at = steady + 2
    source.readings.append(reading(at, first or gpus()))
    snapshot = one.tick(NOW + at, at)
    check_page(snapshot, conserved=conserved)
    return snapshot


def check_page(snapshot: Snapshot, *, conserved: bool = True) -> None:
    """The page is valid in both formats, no series is there twice, shares and totals are possible; as JSON, too."""
    families, _ = build(snapshot, ExpositionOptions(), Dropped())
    require(not duplicate_series(families), "a series is there twice")
    for openmetrics in (False, True):
        for line in render(families, openmetrics=openmetrics).decode("utf-8").split("\n"):
            require(
                not line or line.startswith("# ") or _SAMPLE.fullmatch(line) is not None, f"the line {line[:300]!r}"
            )
    held: dict[str, float] = {}
    for view in snapshot.devices:
        for pod in view.pods:
            held[view.gpu.uuid] = held.get(view.gpu.uuid, 0.0) + pod.holder.share_ratio
    require(all(0 < share <= 1 + _TOLERATED for share in held.values()), f"shares of {held}")
    if snapshot.ledger is not None:
        ledger = snapshot.ledger
        totals = ledger.accounts.values()
        seconds = sum(one.allocated_seconds for one in totals) + ledger.withheld_seconds
        require(all(one.allocated_seconds >= 0 for one in totals), "a negative total")
        apart = abs(seconds - ledger.capacity_seconds)
        require(
            not conserved or apart <= _TOLERATED * max(ledger.capacity_seconds, 1),
            f"{seconds} of {ledger.capacity_seconds} s",
        )
    require_json(node_api.device_document(snapshot))
    require_json(node_api.ledger_document(snapshot))
    node_page.document(snapshot).encode("utf-8", "replace")
