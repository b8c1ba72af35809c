"""Xids of MIG instances: each is on one row, and an instance inherits none from an earlier one with its id."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from metering_support import plain_node
from pipeline_support import DirectSource

from exporter.agent.attributor import Attributor
from exporter.agent.history import EventLog
from exporter.agent.sources import Sources
from exporter.attribution.processes import PodLookup
from exporter.model.devices import DeviceState, Gpu, GpuReading, MigInstance, MigReading, Reading, XidEvent

EPOCH = 1_800_000_000.0
Told = tuple[Mapping[int, int], Mapping[int, float], int | None, Mapping[int, int]]
NOTHING: Told = ({}, {}, None, {})


class Partitioned:
    """A node with one partitioned GPU and a reading a second; all instances but "MIG-other" are on GPU instance 7."""

    def __init__(self, root: Path) -> None:
        lookup = PodLookup(root / "proc", root / "pods")
        attributor = Attributor(kubelet=None, lookup=lookup, expiry_seconds=60.0)
        self.source = DirectSource()
        sources = Sources(nvml=self.source, stale_after_seconds=3.0)
        self.node = plain_node(sources, attributor, events=EventLog(with_windows=True))
        self.seconds = 0.0

    def tell(
        self,
        *uuids: str,
        xids: tuple[int, ...] = (),
        of: int | None = 7,
        part: int | None = None,
        state: DeviceState = DeviceState.UP,
    ) -> dict[str, Told]:
        """Read these instances and Xids; return all four places of the page for each device."""
        self.seconds += 1.0
        at = EPOCH + self.seconds
        gpu = Gpu(uuid="GPU-0", index=0, minor=0, model="H100", pci_bus_id="", mig_enabled=True, compute_slices=7)
        parts = tuple(
            MigReading(
                instance=MigInstance(
                    uuid=uuid,
                    parent_uuid="GPU-0",
                    gpu_instance_id=8 if uuid == "MIG-other" else 7,
                    compute_instance_id=number,
                    profile="1g.10gb",
                    compute_slices=1,
                    memory_slices=1,
                )
            )
            for number, uuid in enumerate(uuids)
        )
        self.source.readings.append(
            Reading(
                source="nvml",
                taken_at_seconds=at,
                duration_seconds=0.0,
                gpus=(GpuReading(gpu=gpu, state=state, instances=parts),),
                xids=tuple(
                    XidEvent(uuid="GPU-0", xid=xid, at_seconds=at, gpu_instance_id=of, compute_instance_id=part)
                    for xid in xids
                ),
            )
        )
        snapshot = self.node.tick(at, self.seconds)
        reported = {}
        for view in snapshot.devices:
            recent = snapshot.events[view.uuid].recent_xids if view.uuid in snapshot.events else {}
            reported[view.uuid] = (view.xids, view.xid_last_seen_seconds, view.last_xid, recent)
        return reported


@pytest.fixture
def node(tmp_path: Path) -> Partitioned:
    return Partitioned(tmp_path)


def test_instance_does_not_inherit_xids_of_the_former_instance_with_its_id(node: Partitioned) -> None:
    assert node.tell("MIG-old", xids=(94, 94))["MIG-old"] == ({94: 2}, {94: EPOCH + 1}, 94, {94: 2})
    assert node.tell("MIG-new")["MIG-new"] == NOTHING
    assert node.tell("MIG-new", xids=(43,))["MIG-new"] == ({43: 1}, {43: EPOCH + 3}, 43, {43: 1})
    assert node.tell("MIG-new")["MIG-new"][0] == {43: 1}


def test_xid_in_the_tick_of_a_new_instance_belongs_to_the_former_instance(node: Partitioned) -> None:
    node.tell("MIG-old")
    reported = node.tell("MIG-new", xids=(94,))
    assert reported["MIG-new"] == NOTHING
    assert reported["GPU-0"][0] == {94: 1}, "the former instance has no row any more"


@pytest.mark.parametrize("state", [DeviceState.UP, DeviceState.LOST])
def test_temporarily_unlisted_instance_keeps_its_xids(node: Partitioned, state: DeviceState) -> None:
    node.tell("MIG-old", xids=(94,))
    node.tell(state=state)
    assert node.tell("MIG-old")["MIG-old"][0] == {94: 1}
    node.tell(state=state)
    assert node.tell("MIG-new")["MIG-new"] == NOTHING


def test_the_xids_of_the_gpu_and_of_other_instances_stay(node: Partitioned) -> None:
    node.tell("MIG-old", "MIG-other", xids=(79,), of=None)
    node.tell("MIG-old", "MIG-other", xids=(94,), of=8)
    reported = node.tell("MIG-new", "MIG-other")
    assert (reported["GPU-0"][0], reported["MIG-other"][0], reported["MIG-new"]) == ({79: 1}, {94: 1}, NOTHING)


def test_added_compute_instance_keeps_the_xids_of_the_gpu_instance(node: Partitioned) -> None:
    node.tell("MIG-old", xids=(94,))
    assert node.tell("MIG-old", "MIG-beside")["MIG-old"][0] == {94: 1}


def test_xid_of_an_unlisted_instance_is_counted_on_the_gpu(node: Partitioned) -> None:
    assert node.tell("MIG-other", xids=(95,))["GPU-0"] == ({95: 1}, {95: EPOCH + 1}, 95, {95: 1})
    reported = node.tell("MIG-other", "MIG-late")
    assert (reported["GPU-0"][0], reported["MIG-late"]) == ({95: 1}, NOTHING), "a counter does not move to another row"


def test_xid_counts_once_for_compute_instances_sharing_a_gpu_instance(node: Partitioned) -> None:
    node.tell("MIG-a", "MIG-b")
    reported = node.tell("MIG-a", "MIG-b", xids=(43,), part=1)
    assert (reported["GPU-0"], reported["MIG-a"], reported["MIG-b"][0]) == (NOTHING, NOTHING, {43: 1})
    reported = node.tell("MIG-a", "MIG-b", xids=(94,))
    assert (reported["GPU-0"][0], reported["MIG-a"], reported["MIG-b"][0]) == ({94: 1}, NOTHING, {43: 1})
