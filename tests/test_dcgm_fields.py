import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.exposition.dcgm_fields import BY_FIELD, BY_NAME, TABLE, DcgmField, Era
from exporter.exposition.dcgm_known import NOT_MEASURED
from exporter.model import Field

# dcgm-exporter's rename map: legacy name, legacy id, 4.9 name, 4.9 id, and a value in both units.
RENAMED = [
    ("DCGM_FI_DEV_SM_CLOCK", 100, 1980, "DCGM_FI_DEV_SM_CLOCK_HERTZ", 1603, 1_980_000_000),
    ("DCGM_FI_DEV_MEM_CLOCK", 101, 2619, "DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", 1604, 2_619_000_000),
    ("DCGM_FI_DEV_MEMORY_TEMP", 140, 61, "DCGM_FI_DEV_MEMORY_TEMP_CELSIUS", 140, 61),
    ("DCGM_FI_DEV_GPU_TEMP", 150, 54, "DCGM_FI_DEV_GPU_TEMP_CELSIUS", 150, 54),
    ("DCGM_FI_DEV_POWER_USAGE", 155, 512.318, "DCGM_FI_DEV_BOARD_POWER_WATTS", 155, 512.318),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 156, 12_345_999, "DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", 1611, 12_345),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", 202, 3, "DCGM_FI_DEV_PCIE_REPLAY_TOTAL", 202, 3),
    ("DCGM_FI_DEV_GPU_UTIL", 203, 87, "DCGM_FI_DEV_GPU_UTIL_RATIO", 1613, 0.87),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", 204, 40, "DCGM_FI_DEV_MEMORY_UTIL_RATIO", 1614, 0.4),
    ("DCGM_FI_DEV_ENC_UTIL", 206, 5, "DCGM_FI_DEV_ENC_UTIL_RATIO", 1615, 0.05),
    ("DCGM_FI_DEV_DEC_UTIL", 207, 100, "DCGM_FI_DEV_DEC_UTIL_RATIO", 1616, 1.0),
    ("DCGM_FI_DEV_XID_ERRORS", 230, 31, "DCGM_FI_DEV_XID_ERROR", 230, 31),
    ("DCGM_FI_DEV_FB_TOTAL", 250, 81_559, "DCGM_FI_DEV_FB_CAPACITY_BYTES", 1625, 85_520_809_984),
    ("DCGM_FI_DEV_FB_FREE", 251, 1, "DCGM_FI_DEV_FB_FREE_BYTES", 1626, 1_048_576),
    ("DCGM_FI_DEV_FB_USED", 252, 2, "DCGM_FI_DEV_FB_USED_BYTES", 1627, 2_097_152),
    ("DCGM_FI_DEV_FB_RESERVED", 253, 3, "DCGM_FI_DEV_FB_RESERVED_BYTES", 1628, 3_145_728),
    ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", 393, 1, "DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", 393, 1),
    ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", 394, 1, "DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL", 394, 1),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", 395, 0, "DCGM_FI_DEV_ROW_REMAP_FAILED", 395, 0),
    ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 1001, 0.5, "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO", 1001, 0.5),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", 1004, 0.5, "DCGM_FI_PROF_TENSOR_UTIL_RATIO", 1004, 0.5),
    ("DCGM_FI_PROF_DRAM_ACTIVE", 1005, 0.5, "DCGM_FI_PROF_DRAM_UTIL_RATIO", 1005, 0.5),
    ("DCGM_FI_PROF_PIPE_FP64_ACTIVE", 1006, 0.5, "DCGM_FI_PROF_FP64_UTIL_RATIO", 1006, 0.5),
    (
        "DCGM_FI_DEV_POWER_VIOLATION",
        240,
        1_500_000_000,
        "DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL",
        1617,
        1.5,
    ),
]


def test_every_dcgm_field_that_sources_may_carry_is_in_the_table_once() -> None:
    assert sorted(row.field for row in TABLE) == [field for field in Field if field < Field.OWN_FIRST]
    assert len(BY_FIELD) == len(TABLE)


@pytest.mark.parametrize(("legacy", "old_id", "value", "new", "new_id", "converted"), RENAMED)
def test_a_field_has_its_names_and_units_in_both_eras(  # one argument per column
    legacy: str, old_id: int, value: float, new: str, new_id: int, converted: float
) -> None:
    row, era = BY_NAME[legacy]
    assert (int(row.field), era) == (old_id, Era.LEGACY)
    assert (row.name(Era.LEGACY), row.name(Era.NEW), row.new_id) == (legacy, new, new_id)
    assert row.convert(value, Era.LEGACY) == value
    assert row.convert(value, Era.NEW) == converted
    assert type(row.convert(value, Era.NEW)) is type(converted)
    assert BY_NAME[new][0] is row


def test_the_name_gpu_util_ratio_means_its_new_field_and_never_percent() -> None:
    row, era = BY_NAME["DCGM_FI_DEV_GPU_UTIL_RATIO"]
    assert (row.convert(87, era), era) == (0.87, Era.NEW)


def test_names_of_dcgm_4_6_keep_the_old_unit() -> None:
    row, era = BY_NAME["DCGM_FI_DEV_BOARD_SERIAL"]
    assert (row.field, era) == (Field.SERIAL, Era.LEGACY)
    row, era = BY_NAME["DCGM_FI_DEV_NVLINK_THROUGHPUT_TOTAL"]
    assert (row.field, era) == (Field.NVLINK_BANDWIDTH_TOTAL, Era.LEGACY)


def test_ids_are_names_too_and_choose_their_own_unit() -> None:
    assert BY_NAME["203"][1] is Era.LEGACY
    assert BY_NAME["1613"] == (BY_FIELD[Field.GPU_UTIL], Era.NEW)


def test_nvlink_throughput_is_never_derived_from_the_old_bandwidth() -> None:
    assert BY_FIELD[Field.NVLINK_BANDWIDTH_TOTAL].name(Era.NEW) is None
    assert "DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND" in NOT_MEASURED


def test_measured_and_unmeasured_names_do_not_overlap() -> None:
    assert not NOT_MEASURED & set(BY_NAME)
    assert {
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L17",
        "DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE",
        "DCGM_FI_DEV_ECC_SBE_VOL_SRM",
        "DCGM_FI_PROF_NVLINK_L0_TX_BYTES",
        "DCGM_EXP_XID_ERRORS_COUNT",
    } <= NOT_MEASURED


@given(st.sampled_from(TABLE), st.integers(min_value=0, max_value=2**53))
def test_conversion_keeps_order_and_zero(row: DcgmField, value: int) -> None:
    assert row.convert(0, Era.NEW) == 0
    assert row.convert(value, Era.NEW) <= row.convert(value + 1000, Era.NEW)


def test_a_part_of_a_percentage_is_not_rounded() -> None:
    assert BY_FIELD[Field.GPU_UTIL].convert(33.25, Era.LEGACY) == 33.25
    assert repr(BY_FIELD[Field.GPU_UTIL].convert(25.0, Era.LEGACY)) == "25"
