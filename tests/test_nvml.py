"""The NVML source over a driver with a truth that a test changes: values, faults, recovery."""

import ctypes
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pynvml
import pytest
from driver_support import H100, MIB, T4, Node, gpu, instance, load, partitioned, process, simulated

from exporter.errors import SourceError
from exporter.gpu.nvml import library
from exporter.gpu.nvml.fields import field_values
from exporter.gpu.nvml.source import NvmlSource
from exporter.model.devices import DeviceState, GpuReading, Reading
from exporter.model.fields import Field
from gpu_simulator import driver as simulated_driver
from gpu_simulator.truth import Fault, GpuTruth, MigTruth

ALL = frozenset(Field)


class Watched:
    """An open source and its node, which change together."""

    def __init__(self, node: Node, source: NvmlSource) -> None:
        self.node = node
        self.source = source

    def after(self, seconds: float) -> Reading:
        self.node.set(at=self.node.truth.at_seconds + seconds)
        return self.source.sample(self.node.truth.at_seconds)


@contextmanager
def watched(*gpus: GpuTruth, fields: frozenset[Field] = ALL, **values: object) -> Iterator[Watched]:
    with simulated(*gpus, init=False, **values) as node:
        source = NvmlSource(fields)
        source.open()
        try:
            yield Watched(node, source)
        finally:
            source.close()


def states(reading: Reading) -> list[tuple[DeviceState, str]]:
    return [(one.state, one.reason) for one in reading.gpus]


UP = (DeviceState.UP, "")


def test_values_are_in_the_units_of_their_fields() -> None:
    one = gpu(
        load=load(utilisation=0.73, memory_copy=0.21, encode=0.1, decode=0.2, memory_used_bytes=1000 * MIB),
        power_watts=432.1,
        energy_joules=1234.5,
        gpu_temp_celsius=61,
        sm_clock_mhz=1755,
    )
    with watched(one) as it:
        reading = it.after(1)
        values = reading.gpus[0].values
    assert values[Field.GPU_UTIL] == 73
    assert values[Field.MEM_COPY_UTIL] == 21
    assert (values[Field.ENC_UTIL], values[Field.DEC_UTIL]) == (10, 20)
    assert (values[Field.FB_TOTAL], values[Field.FB_USED], values[Field.FB_RESERVED]) == (81559, 1000, 479)
    assert values[Field.FB_FREE] == 81559 - 1000 - 479
    assert values[Field.FB_USED_PERCENT] == pytest.approx(1000 / (81559 - 479))
    assert values[Field.POWER_USAGE] == pytest.approx(432.1)
    assert values[Field.TOTAL_ENERGY_CONSUMPTION] == 1_234_500
    assert (values[Field.GPU_TEMP], values[Field.MEMORY_TEMP]) == (61, 48)
    assert (values[Field.SM_CLOCK], values[Field.MAX_SM_CLOCK]) == (1755, 1980)
    assert values[Field.ENFORCED_POWER_LIMIT] == 700
    assert values[Field.GPU_RECOVERY_ACTION] == 0
    assert reading.driver_version == "590.48.01"
    assert reading.errors == {}


def test_identity_has_uuid_place_and_text_fields() -> None:
    with watched(gpu()) as it:
        one = it.after(1).gpus[0].gpu
    assert one.uuid == "GPU-00000000-0000-0000-0000-000000000000"
    assert (one.index, one.minor, one.model) == (0, 2, "NVIDIA H100 80GB HBM3")
    assert one.pci_bus_id == "00000000:17:00.0"
    assert one.labels[Field.SERIAL] == "1652423000000"


def test_only_requested_fields_are_read() -> None:
    with watched(gpu(), fields=frozenset({Field.SM_CLOCK, Field.FB_USED})) as it:
        values = set(it.after(1).gpus[0].values)
    assert values == {Field.SM_CLOCK, Field.FB_USED}


def test_unsupported_field_is_absent_instead_of_zero_or_an_error() -> None:
    bare = replace(T4, not_supported=frozenset({Field.MEMORY_TEMP, Field.FAN_SPEED}))
    with watched(gpu(model=bare, memory_temp_celsius=None, overrides={Field.ENC_UTIL: None})) as it:
        reading = it.after(1)
    values = reading.gpus[0].values
    assert not {Field.MEMORY_TEMP, Field.FAN_SPEED, Field.ENC_UTIL} & set(values)
    assert reading.errors == {}


def test_unsupported_field_is_retried_after_ten_minutes() -> None:
    with watched(gpu(overrides={Field.ENC_UTIL: None, Field.MEMORY_TEMP: None})) as it:
        it.after(1)
        it.node.change(overrides={})
        later = it.after(1).gpus[0].values
        assert not {Field.ENC_UTIL, Field.MEMORY_TEMP} & set(later)
        much_later = it.after(601).gpus[0].values
    assert {Field.ENC_UTIL, Field.MEMORY_TEMP} <= set(much_later)


def test_slow_values_are_carried_between_their_reads() -> None:
    with watched(gpu()) as it:
        assert it.after(1).gpus[0].values[Field.ECC_DBE_VOL_TOTAL] == 0
        it.node.change(overrides={Field.ECC_DBE_VOL_TOTAL: 3})
        assert it.after(1).gpus[0].values[Field.ECC_DBE_VOL_TOTAL] == 0
        assert it.after(10).gpus[0].values[Field.ECC_DBE_VOL_TOTAL] == 3


def test_nvlink_bandwidth_is_a_rate_from_the_second_read_on() -> None:
    with watched(gpu()) as it:
        assert Field.NVLINK_BANDWIDTH_TOTAL not in it.after(1).gpus[0].values
        both = load(nvlink_tx_bytes_per_second=2.0e9 * 1.024, nvlink_rx_bytes_per_second=1.0e9 * 1.024)
        it.node.change(load_integral=both)
        values = it.after(1).gpus[0].values
    assert values[Field.NVLINK_BANDWIDTH_TOTAL] == 3000
    assert values[Field.NVLINK_TX_BYTES_TOTAL] == 2_048_000_000


def test_field_ids_are_limited_to_those_of_an_old_driver() -> None:
    with watched(gpu(), driver_version="535.161.08") as it:
        values = it.after(1).gpus[0].values
    assert Field.GPU_RECOVERY_ACTION not in values
    assert Field.TOTAL_ENERGY_CONSUMPTION in values
    assert max(item.id for item in field_values(ALL, driver_major=535)) < 199


def test_missing_symbol_only_drops_its_field() -> None:
    with watched(gpu()) as it:
        simulated_driver.fail("nvmlDeviceGetTemperatureV", 13)
        simulated_driver.fail("nvmlDeviceGetPerformanceState", 13)
        simulated_driver.fail("nvmlDeviceGetMemoryInfo_v2", 13)
        reading = it.after(1)
    values = reading.gpus[0].values
    assert values[Field.GPU_TEMP] == 30
    assert Field.PSTATE not in values
    assert Field.FB_RESERVED not in values
    assert values[Field.FB_TOTAL] == 81559
    assert reading.errors == {}


def test_lost_gpu_does_not_affect_others_and_recovers() -> None:
    with watched(gpu(0), gpu(1)) as it:
        assert states(it.after(1)) == [UP, UP]
        it.node.change(1, fault=Fault.GPU_LOST)
        reading = it.after(1)
        assert states(reading) == [UP, (DeviceState.LOST, "gpu_is_lost")]
        assert reading.gpus[1].values == {}
        assert reading.gpus[1].processes is None
        assert reading.errors["gpu_is_lost"] == 1
        assert Field.GPU_UTIL in reading.gpus[0].values
        it.node.change(1, fault=None)
        assert states(it.after(5))[1] == (DeviceState.LOST, "gpu_is_lost")
        assert states(it.after(6)) == [UP, UP]


def test_replacement_gpu_is_distinct_from_the_replaced_one() -> None:
    with watched(gpu(0), gpu(1)) as it:
        it.after(1)
        it.node.change(1, uuid="GPU-00000000-0000-0000-0000-000000000009")
        it.source.close()
        it.source.open()
        reading = it.after(1)
    reported = {one.gpu.uuid[-1]: (one.state, one.reason) for one in reading.gpus}
    assert reported == {"0": UP, "1": (DeviceState.MISSING, "replaced"), "9": UP}


def test_reset_required_state_is_reported() -> None:
    with watched(gpu(0), gpu(1)) as it:
        it.after(1)
        it.node.change(0, fault=Fault.RESET_REQUIRED)
        assert states(it.after(1)) == [(DeviceState.RESET_REQUIRED, "reset_required"), UP]
        it.node.change(0, fault=None)
        assert states(it.after(11)) == [UP, UP]


def test_gpu_with_all_calls_failing_is_failed_until_it_recovers() -> None:
    with watched(gpu(0), gpu(1)) as it:
        it.after(1)
        it.node.change(0, fault=Fault.UNKNOWN_ERROR)
        for _ in range(5):
            assert states(it.after(1)) == [(DeviceState.FAILED, "unknown_error"), UP]
        it.node.change(0, fault=None)
        it.after(11)
        assert states(it.after(1)) == [UP, UP]


def test_unsupported_fields_are_read_again_after_a_gpu_failed_three_times() -> None:
    with watched(gpu(overrides={Field.ENC_UTIL: None}), fields=frozenset({Field.ENC_UTIL})) as it:
        assert [states(it.after(1)) for _ in range(3)] == [[(DeviceState.FAILED, "not_supported")]] * 3
        it.node.change(overrides={})
        assert states(it.after(1)) == [UP]


def test_failing_call_is_counted_and_only_drops_its_field() -> None:
    with watched(gpu()) as it:
        simulated_driver.fail("nvmlDeviceGetPowerUsage", 999)
        reading = it.after(1)
        simulated_driver.clear_failures()
        assert states(reading) == [UP]
        assert reading.errors == {"unknown_error": 1}
        assert Field.POWER_USAGE not in reading.gpus[0].values
        assert Field.POWER_USAGE in it.after(1).gpus[0].values


def test_gpu_lost_at_driver_open_is_found_once_it_recovers() -> None:
    with watched(gpu(0, fault=Fault.GPU_LOST), gpu(1)) as it:
        assert [one.gpu.index for one in it.after(1).gpus] == [1]
        it.node.change(0, fault=None)
        assert [one.gpu.index for one in it.after(11).gpus] == [0, 1]


def test_unenumerated_gpu_is_missing_until_the_driver_lists_it_again() -> None:
    with watched(gpu(0), gpu(1)) as it:
        it.after(1)
        it.node.change(1, fault=Fault.GPU_ABSENT)
        it.source.close()
        it.source.open()
        assert states(it.after(1)) == [UP, (DeviceState.MISSING, "not_enumerated")]
        it.node.change(1, fault=None)
        assert states(it.after(30)) == [UP, (DeviceState.MISSING, "not_enumerated")]
        it.source.close()
        it.source.open()
        assert states(it.after(40)) == [UP, UP]


def test_not_ready_call_only_drops_its_field() -> None:
    with watched(gpu(0), gpu(1)) as it:
        simulated_driver.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_NOT_READY, only=1)
        reading = it.after(1)
        assert states(reading) == [UP, UP]
        assert [Field.POWER_USAGE in one.values for one in reading.gpus] == [True, False]
        assert reading.errors == {"not_ready": 1}


@pytest.mark.parametrize(
    ("fault", "reason", "fix"),
    [
        (Fault.DRIVER_UNLOADED, "driver_not_loaded", "modprobe nvidia"),
        (Fault.LIBRARY_MISMATCH, "library_mismatch", "driver upgrade"),
        (Fault.LIBRARY_MISSING, "library_not_found", "runtimeClassName"),
    ],
)
def test_unopenable_driver_is_reported_with_its_fix(fault: Fault, reason: str, fix: str) -> None:
    with simulated(gpu(), init=False, faults={fault: 0.0}), pytest.raises(SourceError, match=fix) as caught:
        NvmlSource(ALL).open()
    assert caught.value.reason == reason
    assert "\n" not in str(caught.value)


def test_node_without_gpu_is_reported_and_works_after_a_gpu_appears() -> None:
    with simulated(init=False) as node:
        source = NvmlSource(ALL)
        with pytest.raises(SourceError, match="lspci") as caught:
            source.open()
        assert caught.value.reason == "no_gpus"
        node.set(gpu())
        source.open()
        assert states(source.sample(200.0)) == [UP]
        source.close()


def test_unloaded_driver_ends_the_sample_and_reopening_recovers() -> None:
    with watched(gpu()) as it:
        it.after(1)
        it.node.set(faults={Fault.DRIVER_UNLOADED: 0.0})
        with pytest.raises(SourceError) as caught:
            it.after(1)
        assert caught.value.reason in {"driver_not_loaded", "uninitialized"}
        it.source.close()
        it.node.set(faults={})
        it.source.open()
        assert states(it.after(1)) == [UP]


def test_mig_instances_have_identity_shape_memory_and_processes() -> None:
    used = instance(1, "1g.10gb", load=load(memory_used_bytes=512 * MIB), processes=(process(4711, memory=512 * MIB),))
    with watched(partitioned(used, instance(2))) as it:
        reading = it.after(1).gpus[0]
    assert reading.gpu.mig_enabled
    assert (reading.gpu.compute_slices, reading.gpu.memory_slices) == (7, 8)
    assert Field.GPU_UTIL not in reading.values
    assert reading.processes is None
    first, second = reading.instances
    assert first.instance.parent_uuid == reading.gpu.uuid
    assert (first.instance.profile, first.instance.compute_slices, first.instance.memory_slices) == ("1g.10gb", 1, 1)
    assert (first.instance.gpu_instance_id, second.instance.gpu_instance_id) == (1, 2)
    assert first.values[Field.FB_USED] == 512
    assert first.processes is not None
    assert [(one.pid, one.memory_used_bytes, one.sm_ratio) for one in first.processes] == [(4711, 512 * MIB, None)]
    assert second.processes == ()


def test_instances_have_profile_number_and_placement() -> None:
    with watched(partitioned(instance(3), instance(7, profile_id=15, placement_start=6))) as it:
        first, second = (one.instance for one in it.after(1).gpus[0].instances)
        assert (first.profile_id, first.placement_start) == (19, 3)
        assert (second.profile_id, second.placement_start) == (15, 6)


@pytest.mark.parametrize("code", [3, 4])
def test_instance_without_placement_rights_has_no_placement(code: int) -> None:
    with watched(partitioned(instance(3))) as it:
        simulated_driver.fail("nvmlDeviceGetGpuInstanceById", code)
        (only,) = it.after(1).gpus[0].instances
        assert (only.instance.profile, only.instance.profile_id, only.instance.placement_start) == (
            "1g.10gb",
            None,
            None,
        )


def test_gpu_name_is_not_used_as_instance_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda _: "NVIDIA H100 80GB HBM3")
    with watched(partitioned(instance(3))) as it:
        assert _profiles(it.after(1).gpus[0]) == ["unknown"]


def test_gpu_memory_total_is_known_once_the_driver_reports_it() -> None:
    with simulated(gpu(0), gpu(1, model=T4), init=False) as node:
        for function in ("nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2"):
            simulated_driver.fail(function, 999, only=0)
        source = NvmlSource(ALL)
        source.open()
        it = Watched(node, source)
        assert [one.gpu.memory_total_bytes for one in it.after(1).gpus] == [None, 15360 * MIB]
        simulated_driver.clear_failures()
        assert [one.gpu.memory_total_bytes for one in it.after(1).gpus] == [81559 * MIB, 15360 * MIB]
        source.close()


FACTS = {
    "nvmlDeviceGetMinorNumber": lambda one: one.gpu.minor == 2,
    "nvmlDeviceGetName": lambda one: one.gpu.model == H100.name,
    "nvmlDeviceGetBrand": lambda one: Field.BRAND in one.gpu.labels,
    "nvmlDeviceGetSerial": lambda one: one.gpu.labels.get(Field.SERIAL) == "1652423000000",
    "nvmlDeviceGetVbiosVersion": lambda one: Field.VBIOS_VERSION in one.gpu.labels,
    "nvmlDeviceGetMaxClockInfo": lambda one: Field.MAX_SM_CLOCK in one.values,
    "nvmlGpmQueryDeviceSupport": lambda one: Field.PROF_GR_ENGINE_ACTIVE in one.values,
}


@pytest.mark.parametrize("function", FACTS)
def test_property_that_failed_at_attach_is_retried(function: str) -> None:
    with simulated(gpu(0), init=False) as node:
        simulated_driver.fail(function, 999)
        source = NvmlSource(ALL)
        source.open()
        it = Watched(node, source)
        it.after(1)
        reading = it.after(1)
        assert not FACTS[function](reading.gpus[0])
        assert states(reading) == [UP]
        errors = Counter(reading.errors)
        for _ in range(4):
            errors.update(it.after(5).errors)
        assert errors["gpm_unknown_error" if "Gpm" in function else "unknown_error"] > 0
        simulated_driver.clear_failures()
        for _ in range(4):
            reading = it.after(5)
        assert FACTS[function](reading.gpus[0])
        assert reading.errors == {}
        source.close()


def _profiles(reading: GpuReading) -> list[str]:
    return [one.instance.profile for one in reading.instances]


def test_new_mig_layout_is_detected_at_runtime() -> None:
    with watched(partitioned(instance(1), instance(2))) as it:
        assert _profiles(it.after(1).gpus[0]) == ["1g.10gb", "1g.10gb"]
        new = instance(5, "3g.40gb", profile_id=9, compute_slices=3, memory_slices=4, memory_bytes=40448 * MIB)
        it.node.change(instances=(new,))
        it.after(5)
        reading = it.after(5).gpus[0]
        assert _profiles(reading) == ["3g.40gb"]
        assert reading.instances[0].instance.memory_slices == 4


def test_mig_mode_enabled_at_runtime_is_detected() -> None:
    with watched(gpu()) as it:
        assert not it.after(1).gpus[0].gpu.mig_enabled
        it.node.change(mig_enabled=True, instances=(instance(1),))
        it.after(5)
        reading = it.after(5)
        assert states(reading) == [UP]
        assert reading.gpus[0].gpu.mig_enabled
        assert _profiles(reading.gpus[0]) == ["1g.10gb"]


def test_reading_has_its_end_time_and_duration() -> None:
    with simulated(gpu(), init=False, faults={Fault.SLOW: 0.25}) as node:
        source = NvmlSource(ALL, clock=lambda: node.seconds)
        source.open()
        began = node.seconds
        reading = source.sample(1000.0)
        took = node.seconds - began
        source.close()
    assert took > 0
    assert reading.duration_seconds == pytest.approx(took)
    assert reading.taken_at_seconds == pytest.approx(1000.0 + took)


def test_gpus_with_and_without_gpm_coexist() -> None:
    with watched(gpu(0, model=H100), gpu(1, model=T4)) as it:
        it.after(1)
        first, second = it.after(1).gpus
    assert Field.PROF_GR_ENGINE_ACTIVE in first.values
    assert Field.PROF_GR_ENGINE_ACTIVE not in second.values


def test_instance_destroyed_between_layout_checks_is_removed() -> None:
    with watched(partitioned(instance(1), instance(2))) as it:
        assert len(it.after(1).gpus[0].instances) == 2
        it.node.change(instances=(instance(2),))
        for _ in range(3):
            reading = it.after(1)
            assert states(reading) == [UP]
        assert [one.instance.gpu_instance_id for one in reading.gpus[0].instances] == [2]


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"],
)
def test_unlistable_instances_are_kept_and_marked_incomplete(function: str) -> None:
    with watched(partitioned(instance(1), instance(2))) as it:
        it.after(1)
        simulated_driver.fail(function, 999)
        reading = it.after(5)
        assert reading.gpus[0].gpu.mig_enabled
        assert [one.instance.gpu_instance_id for one in reading.gpus[0].instances] == [1, 2]
        assert reading.errors.keys() == {"mig_unknown_error"}
        again = it.after(1).gpus[0]
        assert again.gpu.mig_enabled
        assert len(again.instances) == 2
        assert again.lacks_instances  # there may be others by now
        simulated_driver.clear_failures()
        reported = it.after(5)
        assert reported.errors == {}
        assert reported.gpus[0].lacks_instances is False


@pytest.mark.parametrize("code", [4, 10, 999])
def test_temporarily_undescribable_instance_stays_listed_with_a_new_one(code: int) -> None:
    with watched(partitioned(instance(1), instance(2))) as it:
        it.after(1)
        it.node.change(instances=(instance(1), instance(2), instance(3)))
        simulated_driver.fail("nvmlDeviceGetAttributes_v2", code, times=1)
        reading = it.after(5)
        assert sorted(one.instance.gpu_instance_id for one in reading.gpus[0].instances) == [1, 2, 3]
        assert reading.gpus[0].lacks_instances
        assert reading.errors.keys() == {f"mig_{library.reason_of(code)}"}
        reading = it.after(5)
        assert [one.instance.gpu_instance_id for one in reading.gpus[0].instances] == [1, 2, 3]
        assert reading.errors == {}


@pytest.mark.parametrize(
    ("function", "reported"), [("nvmlDeviceGetAttributes_v2", [3, 5]), ("nvmlDeviceGetUUID", [2, 3, 5])]
)
def test_undescribable_instance_hides_no_other_and_marks_the_list_incomplete(
    monkeypatch: pytest.MonkeyPatch, function: str, reported: list[int]
) -> None:
    """The former instance in its place is gone if the place has another UUID, and may otherwise still exist."""
    with watched(partitioned(instance(1), instance(2))) as it:
        assert it.after(1).gpus[0].lacks_instances is False
        it.node.change(instances=(instance(3), instance(4), instance(5)))
        real, refused = getattr(pynvml, function), pynvml.NVMLError(999)
        bad = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(pynvml.nvmlDeviceGetHandleByIndex(0), 1)

        def answer(handle: object) -> object:
            if library.address(handle) == library.address(bad):
                raise refused
            return real(handle)

        monkeypatch.setattr(pynvml, function, answer)
        reading = it.after(5)
        assert sorted(one.instance.gpu_instance_id for one in reading.gpus[0].instances) == reported
        assert reading.gpus[0].lacks_instances
        assert reading.errors["mig_unknown_error"] >= 1
        monkeypatch.setattr(pynvml, function, real)
        reading = it.after(5)
        assert [one.instance.gpu_instance_id for one in reading.gpus[0].instances] == [3, 4, 5]
        assert reading.gpus[0].lacks_instances is False


def test_recreated_instance_with_its_old_uuid_has_its_new_profile() -> None:
    with watched(partitioned(instance(1), instance(2))) as it:
        assert _profiles(it.after(1).gpus[0]) == ["1g.10gb", "1g.10gb"]
        new = instance(1, "3g.40gb", profile_id=9, compute_slices=3, memory_slices=4, memory_bytes=40448 * MIB)
        it.node.change(instances=(new, instance(2)))
        reading = it.after(5).gpus[0]
        assert _profiles(reading) == ["3g.40gb", "1g.10gb"]
        assert [one.instance.memory_slices for one in reading.instances] == [4, 1]


def test_first_reading_lists_all_describable_instances() -> None:
    with simulated(partitioned(instance(1), instance(2)), init=False) as node:
        simulated_driver.fail("nvmlDeviceGetAttributes_v2", 999, times=1)
        source = NvmlSource(ALL)
        source.open()
        reading = source.sample(1000.0)
        source.close()
    assert node
    assert [one.instance.gpu_instance_id for one in reading.gpus[0].instances] == [2]
    assert reading.gpus[0].lacks_instances


def test_instance_destroyed_during_description_is_omitted_alone() -> None:
    with watched(partitioned(instance(1), instance(2))) as it:
        it.after(1)
        it.node.change(instances=(instance(1), instance(2), instance(3)))
        simulated_driver.fail("nvmlDeviceGetAttributes_v2", 2, times=1)
        reading = it.after(5)
        assert [one.instance.gpu_instance_id for one in reading.gpus[0].instances] == [2, 3]
        assert reading.errors == {}


def test_gpu_with_unknown_mig_mode_is_not_attached() -> None:
    with simulated(partitioned(instance(1)), gpu(1), init=False) as node:
        simulated_driver.fail("nvmlDeviceGetMigMode", 999, only=0)
        source = NvmlSource(ALL)
        source.open()
        assert [one.gpu.index for one in source.sample(100.0).gpus] == [1]
        simulated_driver.clear_failures()
        node.set(at=111.0)
        assert [one.gpu.mig_enabled for one in source.sample(111.0).gpus] == [True, False]
        source.close()


def test_unresponsive_instance_is_listed_without_values() -> None:
    with watched(partitioned(instance(1), instance(2))) as it:
        it.after(1)
        simulated_driver.fail("nvmlDeviceGetMemoryInfo_v2", 999)
        one = it.after(1).gpus[0].instances[0]
        assert (one.instance.gpu_instance_id, one.values, one.processes) == (1, {}, None)


def test_instance_without_memory_value_has_all_other_values() -> None:
    with watched(partitioned(instance(1, processes=(process(11),)))) as it:
        simulated_driver.fail("nvmlDeviceGetMemoryInfo_v2", 3)
        it.after(1)
        reading = it.after(1)
        (one,) = reading.gpus[0].instances
        assert Field.FB_USED not in one.values
        assert Field.PROF_GR_ENGINE_ACTIVE in one.values
        assert one.processes is not None
        assert reading.errors == {}


def test_compute_instances_of_one_gpu_instance_have_no_own_memory_value() -> None:
    def part(number: int) -> MigTruth:
        memory = {"memory_slices": 4, "memory_bytes": 40448 * MIB, "profile_id": 9}
        return instance(1, "1c.3g.40gb", compute_instance=number, processes=(process(11 + number),), **memory)

    def with_memory(reading: Reading) -> dict[tuple[int, int], bool]:
        reported = {Field.FB_TOTAL, Field.FB_USED}
        return {
            (one.instance.gpu_instance_id, one.instance.compute_instance_id): reported <= set(one.values)
            for one in reading.gpus[0].instances
        }

    beside = instance(5)
    with watched(partitioned(part(0), beside)) as it:
        assert with_memory(it.after(1)) == {(1, 0): True, (5, 0): True}
        it.node.change(instances=(part(0), part(1), beside))
        reading = it.after(5)
    assert with_memory(reading) == {(1, 0): False, (1, 1): False, (5, 0): True}
    assert Field.FB_USED in reading.gpus[0].values
    pids = [[one.pid for one in part.processes or ()] for part in reading.gpus[0].instances]
    assert sorted(pids) == [[], [11], [12]]


def test_new_instance_has_no_measurement_of_its_neighbour() -> None:
    with watched(partitioned(instance(1))) as it:
        simulated_driver.fail("nvmlEventSetCreate", pynvml.NVML_ERROR_NOT_SUPPORTED)
        it.after(1)
        it.after(1)
        it.node.change(instances=(instance(1), instance(2)))
        old, new = it.after(5).gpus[0].instances
        assert Field.PROF_GR_ENGINE_ACTIVE in old.values
        assert Field.PROF_GR_ENGINE_ACTIVE not in new.values


def test_gpu_lost_during_a_sample_gives_no_partial_reading() -> None:
    with watched(gpu(0, processes=(process(11),)), gpu(1)) as it:
        simulated_driver.fail("nvmlDeviceGetComputeRunningProcesses_v3", 15, only=0)
        reading = it.after(1)
        assert states(reading) == [(DeviceState.LOST, "gpu_is_lost"), UP]
        assert reading.gpus[0].values == {}
        simulated_driver.clear_failures()
        assert states(it.after(11)) == [UP, UP]


def test_ecc_counters_left_unset_by_the_driver_are_absent() -> None:
    ecc = {Field.ECC_SBE_VOL_TOTAL, Field.ECC_DBE_VOL_TOTAL, Field.ECC_SBE_AGG_TOTAL, Field.ECC_DBE_AGG_TOTAL}
    with watched(gpu(overrides=dict.fromkeys(ecc))) as it:
        assert not ecc & set(it.after(1).gpus[0].values)


def test_field_left_unset_by_the_driver_is_absent() -> None:
    class Forgetful:
        """A driver that answers the batch with success and returns no values."""

        def __call__(self, *_: object) -> int:
            return 0

    with watched(gpu(), fields=frozenset({Field.MEMORY_TEMP})) as it:
        for _ in range(3):
            assert Field.MEMORY_TEMP in it.after(1).gpus[0].values
        pynvml._nvmlGetFunctionPointer_cache["nvmlDeviceGetFieldValues"] = Forgetful()
        values = it.after(1).gpus[0].values
    assert not {Field.MEMORY_TEMP, Field.TOTAL_ENERGY_CONSUMPTION, Field.NVLINK_TX_BYTES_TOTAL} & set(values)


@pytest.mark.parametrize("counted_by", [138, 202])
def test_counter_with_two_ids_uses_the_nonzero_one(counted_by: int) -> None:
    def answer(_: object, count: ctypes.c_int32, array: object) -> int:
        for slot in array._obj[: count.value]:  # type: ignore[attr-defined]
            slot.valueType, slot.timestamp = 3, 1
            slot.value.ullVal = 4096 if slot.fieldId == counted_by else 0
        return 0

    with watched(gpu()) as it:
        pynvml._nvmlGetFunctionPointer_cache["nvmlDeviceGetFieldValues"] = answer
        values = it.after(1).gpus[0].values
    assert values[Field.NVLINK_TX_BYTES_TOTAL] == (4096 * 1024 if counted_by == 138 else 4096)


def test_refused_field_values_call_is_retried_with_the_next_sample() -> None:
    with watched(gpu()) as it:
        call = library.function("nvmlDeviceGetFieldValues")
        refused = pynvml.NVML_ERROR_INVALID_ARGUMENT
        pynvml._nvmlGetFunctionPointer_cache["nvmlDeviceGetFieldValues"] = lambda *_: refused
        reading = it.after(1)
        assert Field.TOTAL_ENERGY_CONSUMPTION not in reading.gpus[0].values
        assert reading.errors == {"invalid_argument": 1}
        pynvml._nvmlGetFunctionPointer_cache["nvmlDeviceGetFieldValues"] = call
        assert Field.TOTAL_ENERGY_CONSUMPTION in it.after(1).gpus[0].values


def test_wrong_pynvml_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pynvml, "_nvmlGetFunctionPointer")
    with pytest.raises(SourceError, match="install nvidia-ml-py") as caught:
        NvmlSource(ALL).open()
    assert caught.value.reason == "wrong_package"


def test_pynvml_package_without_newer_codes_is_reported() -> None:
    script = (
        "import pynvml\n"
        "for name in ('NVML_ERROR_GPU_NOT_FOUND', '_nvmlGetFunctionPointer'):\n"
        "    delattr(pynvml, name)\n"
        "from exporter.errors import SourceError\n"
        "from exporter.gpu.nvml.source import NvmlSource\n"
        "try:\n"
        "    NvmlSource(frozenset()).open()\n"
        "except SourceError as error:\n"
        "    print(error.reason)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert (found.stdout, found.stderr) == ("wrong_package\n", "")
