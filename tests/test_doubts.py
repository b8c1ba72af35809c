"""An unknown pod puts only those GPUs in doubt that it may hold."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from join_support import allocated, claimed, gpu, gpu_uuid, held, instance, join, knowing, mig_uuid, pod_metadata, read

from exporter.attribution.pod_lifecycle import NO_EVIDENCE, Evidence, SliceDevice
from exporter.attribution.vgpu import HAMI_DEVICES
from exporter.model.attribution import AllocationState, Attribution, ContainerAllocation
from exporter.model.devices import Gpu, MigInstance

GPUS = [gpu(0), gpu(1), gpu(2, mig=True)]
INSTANCES = [instance(21, 2, start=0, profile_id=19), instance(22, 2, start=1, profile_id=19)]
RESERVED = "kai-resource-reservation"
WAITING = Evidence(reads_claims=True)


def states(
    attribution: Attribution, gpus: Sequence[Gpu] = GPUS, instances: Sequence[MigInstance] = INSTANCES
) -> dict[str, AllocationState]:
    """Return the state of every device, with the driver's instances below their GPUs."""
    devices = [device.uuid for one in read(gpus, instances) for device in one.devices]
    return {uuid: attribution.allocation(uuid) for uuid in devices}


def in_doubt(attribution: Attribution, gpus: Sequence[Gpu] = GPUS) -> set[str]:
    return {uuid for uuid, state in states(attribution, gpus).items() if state is AllocationState.UNKNOWN}


MEMBER = {"runai-gpu-group": "x"}
RESERVING = pod_metadata("r", labels=MEMBER, namespace=RESERVED)
ANY = {gpu_uuid(0), gpu_uuid(1), mig_uuid(21), mig_uuid(22)}
PARTS = {mig_uuid(21), mig_uuid(22)}


@pytest.mark.parametrize(
    ("container", "evidence", "expected"),
    [
        (claimed("a", "gpu-10"), WAITING, {gpu_uuid(0)}),
        (claimed("a", "gpu-12-mig-1g10gb-19-0"), WAITING, PARTS),
        (claimed("a", "gpu-12-mig-1g10gb-19-5"), NO_EVIDENCE, PARTS),
        (claimed("a", "gpu-12-mig-19-0-1"), NO_EVIDENCE, PARTS),
        (claimed("a", "new-form-0"), NO_EVIDENCE, ANY),
        (
            claimed("a", "new-form-0"),
            replace(WAITING, devices={("node-1", "new-form-0"): SliceDevice(kind="mig", uuid=mig_uuid(21))}),
            PARTS,
        ),
        (
            claimed("a", "new-form-0"),
            replace(WAITING, devices={("node-1", "new-form-0"): SliceDevice(kind="gpu", uuid=gpu_uuid(1))}),
            {gpu_uuid(1)},
        ),
        (held("r", gpu_uuid(1), namespace=RESERVED), knowing(), {gpu_uuid(1)}),
        (held("r", gpu_uuid(1), namespace=RESERVED), knowing(RESERVING, pod_metadata("a", {}, MEMBER)), {gpu_uuid(1)}),
        (held("r", mig_uuid(21), namespace=RESERVED), knowing(), PARTS),
        (
            held("a", f"{gpu_uuid(0)}-3"),
            knowing(pod_metadata("a", {HAMI_DEVICES: f"{gpu_uuid(1)}[1-0],NVIDIA,1000,0:;"})),
            {gpu_uuid(1)},
        ),
        (held("a", f"{gpu_uuid(0)}-3"), knowing(), ANY),
        (held("a", f"{gpu_uuid(0)}-3"), knowing(pod_metadata("a", {HAMI_DEVICES: "nonsense"})), ANY),
        (held("a", mig_uuid(21)), knowing(pod_metadata("a", {HAMI_DEVICES: "nonsense"})), ANY),
        (held("a", "0-3", resource="volcano.sh/gpu-memory"), knowing(), ANY),
        (held("a", "junk"), NO_EVIDENCE, ANY),
        (held("a", gpu_uuid(7)), NO_EVIDENCE, set()),
        (held("a", f"MIG-{gpu_uuid(2)}/9/0"), NO_EVIDENCE, set()),
    ],
    ids=[
        "a claim that was not read yet",
        "a claim of an instance that was not read yet",
        "an instance that is not there yet",
        "a name of an older driver",
        "a name of a newer driver",
        "a claim of an instance that a slice knows by UUID",
        "a claim of a GPU that a slice knows by UUID",
        "a reservation of which the API says nothing yet",
        "a member without a fraction",
        "a reservation of an instance",
        "a part of a GPU as HAMi named it once",
        "HAMi without its annotation",
        "HAMi with a bad one",
        "an instance of HAMi with a bad annotation",
        "volcano without its annotation",
        "an id of no known form",
        "a GPU of another node",
        "an instance that is there no more",
    ],
)
def test_unresolved_device_puts_only_possible_gpus_in_doubt(
    container: ContainerAllocation, evidence: Evidence, expected: set[str]
) -> None:
    assert in_doubt(join([container], GPUS, INSTANCES, evidence=evidence)) == expected


def test_unknown_minor_number_puts_gpus_without_a_minor_in_doubt() -> None:
    gpus = [gpu(0), replace(gpu(1), minor=None)]
    assert in_doubt(join([held("a", "nvidia17")], gpus), gpus) == {gpu_uuid(1)}
    waiting = join([claimed("a", "gpu-17")], gpus, evidence=WAITING)
    assert in_doubt(waiting, gpus) == {gpu_uuid(1)}


DRA_NAMES = ("gpu-10", "gpu-11", "gpu-12", "gpu-12-mig-1g10gb-19-0", "gpu-12-mig-1g10gb-19-1", "gpu-vfio-0", "x-0")
SLICED = st.sampled_from(
    [
        SliceDevice(kind="gpu", uuid=gpu_uuid(0)),
        SliceDevice(kind="mig", uuid=mig_uuid(21)),
        SliceDevice(kind="mig", parent_uuid=gpu_uuid(2), profile="1g.10gb"),
    ]
)


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(DRA_NAMES), st.integers(1, 2)), max_size=4),
    st.lists(st.sampled_from([gpu_uuid(0), gpu_uuid(1), mig_uuid(21)]), max_size=2),
    st.dictionaries(st.sampled_from([("node-1", name) for name in DRA_NAMES]), SLICED, max_size=3),
)
def test_gpu_that_later_proves_held_is_never_unallocated_before(
    claims: list[tuple[str, str, int]], reserved: list[str], devices: dict[tuple[str, str], SliceDevice]
) -> None:
    containers = [claimed(pod, device, claim=claim, container=f"c{n}") for n, (pod, device, claim) in enumerate(claims)]
    containers += [held(f"r{number}", uuid, namespace=RESERVED) for number, uuid in enumerate(reserved)]
    results = tuple(allocated(device) for device in DRA_NAMES)
    uids = {f"0f1e2d3c-0000-4000-8000-0000000000{number:02d}": results for number in (1, 2)}
    later = [pod_metadata(f"r{number}", labels=MEMBER, namespace=RESERVED) for number in range(len(reserved))]
    members = [pod_metadata("member", {"gpu-fraction": "0.5"}, MEMBER)]
    before = join(containers, GPUS, INSTANCES, evidence=knowing(reads_claims=True, devices=devices or None))
    after = join(containers, GPUS, INSTANCES, evidence=knowing(*later, *members, claims=uids, devices=devices or None))
    free = {uuid for uuid, state in states(before).items() if state is AllocationState.UNALLOCATED}
    assert not free & set(after.holders)
