"""Watches: each entity has its possible fields, once, and profiling fields are in groups without others."""

from collections import Counter

from hypothesis import example, given
from hypothesis import strategies as st

from exporter.gpu.dcgm import library as abi
from exporter.gpu.dcgm.entities import DcgmDevice, DcgmLayout, Instance
from exporter.gpu.dcgm.watch import DRAM_ACTIVE, MEMORY, OF_INSTANCES, WatchPace, plan
from exporter.model.devices import DeviceState, Gpu, MigInstance
from exporter.model.fields import PROFILING

LEVELS = st.sampled_from((abi.GPU, 2, abi.GPU_INSTANCE, abi.COMPUTE_INSTANCE))
BOARD = frozenset({1009, 1010, 1011, 1012})
"""Fields of PCIe and NVLink: an instance has none, at any level that the engine reports for them."""
IDS = st.one_of(st.integers(90, 600), st.sampled_from((250, 251, 252, 1001, 1002, 1005, 1009, 1011, 1096)))


def device(number: int, state: DeviceState, shapes: tuple[tuple[bool, bool], ...]) -> DcgmDevice:
    gpu = Gpu(uuid=f"GPU-{number}", index=number, minor=number, model="m", pci_bus_id=f"{number}")
    instances = tuple(
        Instance(
            instance=MigInstance(
                uuid=f"MIG-{number}-{place}",
                parent_uuid=gpu.uuid,
                gpu_instance_id=place,
                compute_instance_id=0,
                profile="1g",
                compute_slices=1,
                memory_slices=1,
            ),
            measured=(abi.GPU_INSTANCE if whole else abi.COMPUTE_INSTANCE, 8 * number + place),
            has_memory=alone or whole,
        )
        for place, (whole, alone) in enumerate(shapes)
    )
    return DcgmDevice(gpu_id=number, gpu=gpu, state=state, instances=instances)


def entities(layout: DcgmLayout) -> list[tuple[int, int]]:
    return [one for gpu in layout.devices for one in (gpu.entity, *(part.measured for part in gpu.instances))]


@st.composite
def layouts(draw: st.DrawFn) -> DcgmLayout:
    shapes = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=7).map(tuple)
    states = st.sampled_from((DeviceState.UP, DeviceState.UP, DeviceState.LOST))
    count = draw(st.integers(0, 8))
    return DcgmLayout(devices=tuple(device(number, draw(states), draw(shapes)) for number in range(count)))


@given(
    layout=layouts(),
    levels=st.dictionaries(IDS, LEVELS, max_size=200),
    profiled=st.dictionaries(st.integers(0, 7), st.frozensets(st.sampled_from((1001, 1002, 1005, 1009)))),
    unwilling=st.frozensets(IDS, max_size=5),
)
@example(
    layout=DcgmLayout(devices=(device(0, DeviceState.UP, ((True, True), (False, False))),)),
    levels=dict.fromkeys((1001, 1005, *BOARD), abi.COMPUTE_INSTANCE),
    profiled={0: frozenset({1001, 1005, *BOARD})},
    unwilling=frozenset(),
)
def test_plan_watches_each_possible_field_of_each_entity_once(
    layout: DcgmLayout, levels: dict[int, int], profiled: dict[int, frozenset[int]], unwilling: frozenset[int]
) -> None:
    def can(gpu_id: int) -> frozenset[int]:
        return profiled.get(gpu_id, frozenset())

    refused = {(entity, one) for entity in entities(layout) for one in unwilling}
    watched: Counter[tuple[tuple[int, int], int]] = Counter()
    for one in plan(layout, levels, can, refused):
        assert 0 < len(one.field_ids) <= abi.MAX_FIELDS_PER_GROUP
        assert 0 < len(one.members) <= abi.MAX_ENTITIES_PER_GROUP
        assert {field_id in PROFILING for field_id in one.field_ids} == {one.pace is WatchPace.PROFILING}
        assert len({group for group, _ in one.members}) == 1
        watched.update((entity, field_id) for entity in one.members for field_id in one.field_ids)
    assert set(watched.values()) <= {1}
    expected: set[tuple[tuple[int, int], int]] = set()
    for gpu in layout.devices:
        if gpu.state is not DeviceState.UP:
            continue
        wanted = {one for one in levels if one not in unwilling and (one not in PROFILING or one in can(gpu.gpu_id))}
        expected |= {(gpu.entity, one) for one in wanted}
        for part in gpu.instances:
            own = {one for one in wanted if levels[one] in OF_INSTANCES} - BOARD
            own -= frozenset() if part.has_memory else MEMORY
            own -= {DRAM_ACTIVE} if part.measured[0] == abi.COMPUTE_INSTANCE else frozenset()
            expected |= {(part.measured, one) for one in own}
    assert set(watched) == expected


def test_gpus_of_one_kind_share_a_watch() -> None:
    layout = DcgmLayout(devices=tuple(device(number, DeviceState.UP, ()) for number in range(8)))
    levels = {150: abi.GPU, 1001: abi.COMPUTE_INSTANCE}
    found = plan(layout, levels, lambda gpu: frozenset({1001} if gpu else ()))
    assert sorted((one.pace.name, len(one.members)) for one in found) == [("FAST", 8), ("PROFILING", 7)]


def test_entities_beyond_the_dcgm_3_group_limit_are_split() -> None:
    whole = ((True, True),) * 7
    layout = DcgmLayout(devices=tuple(device(number, DeviceState.UP, whole) for number in range(16)))
    found = plan(layout, {252: abi.COMPUTE_INSTANCE}, lambda _gpu: frozenset())
    assert sorted(len(one.members) for one in found) == [16, 48, 64]
    assert len({entity for one in found for entity in one.members}) == 16 + 16 * 7
