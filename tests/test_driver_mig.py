import pynvml
import pytest
from driver_support import MIB, T4, code_of, gpu, instance, load, partitioned, process, simulated

from exporter.model import Field
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


def test_instances_tell_identity_shape_parent_and_memory() -> None:
    slice_of_three = instance(
        2, "3g.40gb", compute_slices=3, memory_slices=4, memory_bytes=40448 * MIB, load=load(memory_used_bytes=5 * MIB)
    )
    with simulated(partitioned(instance(9), slice_of_three)):
        parent = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlDeviceGetMigMode(parent) == [1, 1]
        assert pynvml.nvmlDeviceGetMaxMigDeviceCount(parent) == 7
        one, three = _mig_handles(parent).values()
        assert pynvml.nvmlDeviceGetName(three) == "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
        assert pynvml.nvmlDeviceGetUUID(three) == slice_of_three.uuid
        assert pynvml.nvmlDeviceGetGpuInstanceId(three) == 2
        assert pynvml.nvmlDeviceGetComputeInstanceId(one) == 0
        attributes = pynvml.nvmlDeviceGetAttributes_v2(three)
        assert (attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount) == (3, 3)
        assert attributes.memorySizeMB == 40448
        memory = pynvml.nvmlDeviceGetMemoryInfo(three, version=pynvml.nvmlMemory_v2)
        assert (memory.total, memory.used) == (40448 * MIB, 5 * MIB)
        assert pynvml.nvmlDeviceGetBAR1MemoryInfo(three).bar1Total // MIB == 24739
        assert pynvml.nvmlDeviceGetBAR1MemoryInfo(one).bar1Total // MIB == 6184
        assert pynvml.nvmlDeviceGetTotalEccErrors(three, 1, 0) == 0
        assert code_of(pynvml.nvmlDeviceGetTotalEccErrors, three, 0, 0) == pynvml.NVML_ERROR_NOT_SUPPORTED
        assert [pynvml.nvmlDeviceGetIndex(one), pynvml.nvmlDeviceGetIndex(three)] == [0, 1]
        assert pynvml.nvmlDeviceIsMigDeviceHandle(three).value == 1
        assert pynvml.nvmlDeviceIsMigDeviceHandle(parent).value == 0
        back = pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(three)
        assert pynvml.nvmlDeviceGetUUID(back) == pynvml.nvmlDeviceGetUUID(parent)
        assert pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByUUID(slice_of_three.uuid)) == slice_of_three.uuid


def test_a_compute_instance_smaller_than_its_gpu_instance_tells_both_slices() -> None:
    with simulated(partitioned(instance(2, "1c.3g.40gb"))):
        (handle,) = _mig_handles(pynvml.nvmlDeviceGetHandleByIndex(0)).values()
        attributes = pynvml.nvmlDeviceGetAttributes_v2(handle)
        assert (attributes.gpuInstanceSliceCount, attributes.computeInstanceSliceCount) == (3, 1)


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


def test_board_values_are_refused_on_an_instance_and_utilisation_on_its_parent() -> None:
    with simulated(partitioned(instance(7))):
        parent = pynvml.nvmlDeviceGetHandleByIndex(0)
        (mig,) = _mig_handles(parent).values()
        unsupported = pynvml.NVML_ERROR_NOT_SUPPORTED
        for call in (
            pynvml.nvmlDeviceGetPowerUsage,
            pynvml.nvmlDeviceGetUtilizationRates,
            pynvml.nvmlDeviceGetTotalEnergyConsumption,
        ):
            assert code_of(call, mig) == unsupported
        assert code_of(pynvml.nvmlDeviceGetTemperature, mig, 0) == unsupported
        assert code_of(pynvml.nvmlDeviceGetUtilizationRates, parent) == unsupported
        assert code_of(pynvml.nvmlDeviceGetEncoderUtilization, parent) == unsupported
        assert code_of(pynvml.nvmlDeviceGetProcessUtilization, parent, 0) == unsupported
        assert code_of(pynvml.nvmlDeviceGetProcessesUtilizationInfo, parent, 0) == unsupported
        assert code_of(pynvml.nvmlDeviceGetRemappedRows, parent) == unsupported
        assert pynvml.nvmlDeviceGetPowerUsage(parent) == 123456
        (value,) = pynvml.nvmlDeviceGetFieldValues(mig, [83])
        assert value.nvmlReturn == unsupported


def test_processes_are_listed_per_instance_and_on_the_parent_with_their_ids() -> None:
    busy, other = instance(7, processes=(process(11),)), instance(9, processes=(process(12), process(13)))
    with simulated(partitioned(busy, other)):
        parent = pynvml.nvmlDeviceGetHandleByIndex(0)
        first, second = _mig_handles(parent).values()
        assert [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(first)] == [11]
        assert [one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses_v3(second)] == [12, 13]
        of_all = pynvml.nvmlDeviceGetComputeRunningProcesses_v3(parent)
        assert [(one.pid, one.gpuInstanceId) for one in of_all] == [(11, 7), (12, 9), (13, 9)]


def test_profiles_say_what_the_model_offers() -> None:
    with simulated(gpu(0)):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        sizes = {}
        for profile in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
            if code_of(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, profile) == 0:
                info = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, profile)
                old = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, profile, version=1)
                assert (old.id, old.sliceCount, old.memorySizeMB) == (info.id, info.sliceCount, info.memorySizeMB)
                sizes[info.name] = (info.id, info.sliceCount, info.instanceCount)
        assert sizes == {
            "MIG 1g.10gb": (19, 1, 7),
            "MIG 1g.10gb+me": (20, 1, 7),
            "MIG 1g.20gb": (15, 1, 4),
            "MIG 2g.20gb": (14, 2, 3),
            "MIG 3g.40gb": (9, 3, 2),
            "MIG 4g.40gb": (5, 4, 1),
            "MIG 7g.80gb": (0, 7, 1),
        }


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


def test_gpu_instances_are_found_by_id_with_their_placement() -> None:
    with simulated(partitioned(instance(9))):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        gpu_instance = pynvml.nvmlDeviceGetGpuInstanceById(handle, 9)
        info = pynvml.nvmlGpuInstanceGetInfo(gpu_instance)
        assert (info.id, info.profileId, info.placement.start) == (9, 19, 9)
        assert pynvml.nvmlDeviceGetUUID(info.device) == gpu().uuid
        assert code_of(pynvml.nvmlDeviceGetGpuInstanceById, handle, 3) == pynvml.NVML_ERROR_NOT_FOUND
        found = (pynvml.c_nvmlGpuInstance_t * 7)()
        count = pynvml.c_uint(0)
        pynvml.nvmlDeviceGetGpuInstances(handle, 19, found, pynvml.byref(count))
        assert pynvml.nvmlGpuInstanceGetInfo(found[0]).id == 9
        assert count.value == 1


def test_a_model_without_mig_says_so() -> None:
    with simulated(gpu(0, model=T4, overrides={Field.MEMORY_TEMP: None})):
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert code_of(pynvml.nvmlDeviceGetMigMode, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED
        assert pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) == 0
        assert code_of(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, 0) == pynvml.NVML_ERROR_NOT_SUPPORTED
        assert code_of(pynvml.nvmlDeviceGetGpuInstanceId, handle) == pynvml.NVML_ERROR_NOT_SUPPORTED
