import pynvml
import pytest
from driver_support import code_of, instance, partitioned, process, simulated

from gpu_simulator.driver_mig import profile_index


def _mig_handles(parent: object) -> dict[int, object]:
    """Handle per index, holes left out."""
    found = {}
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(parent)):
        try:
            found[index] = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, index)
        except pynvml.NVMLError_NotFound:
            continue
    return found


def test_a_destroyed_instance_leaves_a_hole_and_its_handle_dies() -> None:
    with simulated(partitioned(instance(7), instance(8), instance(9))) as node:
        parent = pynvml.nvmlDeviceGetHandleByIndex(0)
        handles = _mig_handles(parent)
        assert list(handles) == [0, 1, 2]
        node.change(instances=(instance(7), instance(9)))
        assert list(_mig_handles(parent)) == [0, 2]
        assert code_of(pynvml.nvmlDeviceGetUUID, handles[1]) == pynvml.NVML_ERROR_INVALID_ARGUMENT
        assert pynvml.nvmlDeviceGetUUID(handles[2]) == instance(9).uuid
        assert code_of(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, 7) == pynvml.NVML_ERROR_INVALID_ARGUMENT
        node.change(instances=(instance(7), instance(9), instance(11)))
        assert list(_mig_handles(parent)) == [0, 1, 2]
        node.change(mig_enabled=False, instances=())
        assert code_of(pynvml.nvmlDeviceGetUUID, handles[2]) == pynvml.NVML_ERROR_INVALID_ARGUMENT
        assert pynvml.nvmlDeviceGetMaxMigDeviceCount(parent) == 0


def test_processes_are_listed_per_instance_and_on_the_parent_with_their_ids() -> None:
    busy, other = instance(7, processes=(process(11),)), instance(9, processes=(process(12), process(13)))
    with simulated(partitioned(busy, other)):
        parent = pynvml.nvmlDeviceGetHandleByIndex(0)
        first, second = _mig_handles(parent).values()
        assert [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(first)] == [11]
        assert [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(second)] == [12, 13]
        of_all = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(parent)
        assert [(one.pid, one.gpuInstanceId) for one in of_all] == [(11, 7), (12, 9), (13, 9)]


@pytest.mark.parametrize(
    ("name", "memory_slices", "index"),
    [
        ("1g.5gb", 1, 0),
        ("1g.10gb", 2, 9),
        ("1g.5gb+me", 1, 7),
        ("2g.12gb+me", 2, 8),
        ("4g.24gb", 4, 3),
        ("1c.3g.40gb", 4, 2),
        ("1g.12gb-me", 1, 13),
        ("nonsense", 1, None),
    ],
)
def test_profile_names_map_to_nvml_profile_numbers(name: str, memory_slices: int, index: int | None) -> None:
    assert profile_index(name, memory_slices) == index
