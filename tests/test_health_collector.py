"""Health series of the page, and the boards that have them."""

import dataclasses

import pytest
from exposition_support import exclusive, instance, lost, snapshot
from page_support import samples_of

from exporter.metrics import catalog, collectors_file
from exporter.metrics.collector import ExpositionOptions, families
from exporter.model.attribution import AllocationState
from exporter.model.devices import DeviceState
from exporter.model.fields import Field
from exporter.model.snapshot import DeviceView

HEALTH = (
    "gpu_ecc_errors_total",
    "gpu_remapped_rows",
    "gpu_row_remap_pending",
    "gpu_row_remap_failure",
    "gpu_retired_pages",
    "gpu_retired_pages_pending",
    "gpu_nvlink_errors_total",
    "gpu_pcie_replays_total",
    "gpu_temperature_celsius",
    "gpu_temperature_limit_celsius",
    "gpu_temperature_margin_celsius",
    "gpu_throttle_seconds_total",
    "gpu_recovery_action",
)


def shown(*views: DeviceView) -> dict[tuple[str, str], float]:
    """Return the values of the health series by name and their specific label."""
    page = families(snapshot(*views), ExpositionOptions())
    own = ("type", "cause", "kind", "sensor", "limit", "reason")
    return {
        (family.name, "".join(value for name, value in sample.pairs if name in own)): sample.value
        for family in page
        if family.name in HEALTH
        for sample in samples_of(family)
    }


def telling(**values: float) -> DeviceView:
    return dataclasses.replace(exclusive(), values={Field[name]: value for name, value in values.items()})


@pytest.mark.parametrize(
    ("field", "value", "series", "expected"),
    [
        ("ECC_SBE_VOL_TOTAL", 9, ("gpu_ecc_errors_total", "corrected"), 9),
        ("ECC_DBE_VOL_TOTAL", 2, ("gpu_ecc_errors_total", "uncorrected"), 2),
        ("CORRECTABLE_REMAPPED_ROWS", 1, ("gpu_remapped_rows", "corrected"), 1),
        ("UNCORRECTABLE_REMAPPED_ROWS", 3, ("gpu_remapped_rows", "uncorrected"), 3),
        ("ROW_REMAP_PENDING", 1, ("gpu_row_remap_pending", ""), 1),
        ("ROW_REMAP_FAILURE", 1, ("gpu_row_remap_failure", ""), 1),
        ("RETIRED_SBE", 4, ("gpu_retired_pages", "single_bit"), 4),
        ("RETIRED_DBE", 5, ("gpu_retired_pages", "double_bit"), 5),
        ("RETIRED_PENDING", 1, ("gpu_retired_pages_pending", ""), 1),
        ("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 11, ("gpu_nvlink_errors_total", "crc_flit"), 11),
        ("NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", 12, ("gpu_nvlink_errors_total", "crc_data"), 12),
        ("NVLINK_REPLAY_ERROR_COUNT_TOTAL", 13, ("gpu_nvlink_errors_total", "replay"), 13),
        ("NVLINK_RECOVERY_ERROR_COUNT_TOTAL", 14, ("gpu_nvlink_errors_total", "recovery"), 14),
        ("NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS", 15, ("gpu_nvlink_errors_total", "recovery"), 15),
        ("NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS", 16, ("gpu_nvlink_errors_total", "recovery_failed"), 16),
        ("NVLINK_COUNT_RX_ERRORS", 17, ("gpu_nvlink_errors_total", "receive"), 17),
        ("NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS", 18, ("gpu_nvlink_errors_total", "integrity"), 18),
        ("PCIE_REPLAY_COUNTER", 19, ("gpu_pcie_replays_total", ""), 19),
        ("GPU_TEMP", 71, ("gpu_temperature_celsius", "gpu"), 71),
        ("MEMORY_TEMP", 88, ("gpu_temperature_celsius", "memory"), 88),
        ("SLOWDOWN_TEMP", 89, ("gpu_temperature_limit_celsius", "slowdown"), 89),
        ("SHUTDOWN_TEMP", 92, ("gpu_temperature_limit_celsius", "shutdown"), 92),
        ("GPU_MAX_OP_TEMP", 85, ("gpu_temperature_limit_celsius", "max_operating"), 85),
        ("MEM_MAX_OP_TEMP", 95, ("gpu_temperature_limit_celsius", "memory_max_operating"), 95),
        ("GPU_TEMP_LIMIT", -2, ("gpu_temperature_margin_celsius", ""), -2),
        ("THERMAL_VIOLATION", 2_500_000_000, ("gpu_throttle_seconds_total", "thermal"), 2.5),
        (
            "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS",
            500_000_000,
            ("gpu_throttle_seconds_total", "hw_power_brake"),
            0.5,
        ),
        ("GPU_RECOVERY_ACTION", 1, ("gpu_recovery_action", ""), 1),
    ],
)
def test_health_value_gives_exactly_its_series(
    field: str, value: float, series: tuple[str, str], expected: float
) -> None:
    assert shown(telling(**{field: value})) == {series: expected}


def test_nvlink_counters_of_two_generations_are_not_added() -> None:
    both = {"NVLINK_RECOVERY_ERROR_COUNT_TOTAL": 0, "NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS": 2}
    assert shown(telling(**both)) == {("gpu_nvlink_errors_total", "recovery"): 2}


def test_gpu_that_needs_a_reset_shows_its_action_and_a_lost_gpu_nothing() -> None:
    needs_reset = dataclasses.replace(
        telling(GPU_RECOVERY_ACTION=1, POWER_USAGE=70), state=DeviceState.RESET_REQUIRED, reason="reset_required"
    )
    assert shown(needs_reset) == {("gpu_recovery_action", ""): 1}
    names = {family.name for family in families(snapshot(needs_reset), ExpositionOptions())}
    assert "gpu_power_watts" not in names
    assert shown(lost()) == {}


def test_health_fields_are_read_for_any_collectors_file() -> None:
    little = collectors_file.parse("DCGM_FI_DEV_SM_CLOCK, gauge, Clock.", "a file")
    assert little.fields >= catalog.HEALTH_FIELDS


def test_instance_has_no_board_health() -> None:
    part = instance(exclusive().gpu, 1)
    values = dict.fromkeys(catalog.HEALTH_FIELDS, 1)
    view = DeviceView(gpu=exclusive().gpu, instance=part, values=values, allocation=AllocationState.UNALLOCATED)
    assert shown(view) == {}


def test_clock_events_start_at_zero_on_gpus_that_respond() -> None:
    page = {family.name: family for family in families(snapshot(), ExpositionOptions())}
    counted = {
        (pairs["gpu"], pairs["event"]): sample.value
        for sample in samples_of(page["gpu_clock_events_total"])
        for pairs in [dict(sample.pairs)]
        if "gpu_instance" not in pairs
    }
    assert len(counted) == len(samples_of(page["gpu_clock_events_total"])) == 3 * 9, (
        "not on instances, nor on a lost GPU"
    )
    assert {key: times for key, times in counted.items() if times} == {("0", "power_cap"): 3, ("0", "hw_thermal"): 1}


@pytest.mark.parametrize(
    ("reported", "expected"),
    [({"MEMORY_TEMP": 93, "MEM_MAX_OP_TEMP": 105}, ("driver", 12)), ({"MEMORY_TEMP": 96}, ("assumed", -1))],
)
def test_memory_temperature_margin_names_the_source_of_its_limit(
    reported: dict[str, float], expected: tuple[str, float]
) -> None:
    page = {family.name: family for family in families(snapshot(telling(**reported)), ExpositionOptions())}
    (sample,) = samples_of(page["gpu_memory_temperature_margin_celsius"])
    assert (dict(sample.pairs)["limit"], sample.value) == expected


def test_xid_has_its_tier_and_154_none_if_the_gpu_reports_its_action() -> None:
    xids = {31: 1.0, 79: 2.0, 154: 3.0}
    views = (
        dataclasses.replace(exclusive(0), xid_last_seen_seconds=xids, values={}),
        dataclasses.replace(exclusive(1), xid_last_seen_seconds={154: 3.0}, values={Field.GPU_RECOVERY_ACTION: 1}),
    )
    page = {family.name: family for family in families(snapshot(*views), ExpositionOptions())}
    carried = [dict(sample.pairs) for sample in samples_of(page["gpu_xid_last_seen_timestamp_seconds"])]
    assert [(one["gpu"], one["xid"], one["tier"]) for one in carried] == [
        ("0", "31", "application"),
        ("0", "79", "critical"),
        ("0", "154", "warning"),
        ("1", "154", "none"),
    ]
