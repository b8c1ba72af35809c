import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.metrics import collectors_file
from exporter.metrics.dcgm_names import BY_NAME, TABLE, DcgmField, Era, table_lines
from exporter.metrics.text_format import Kind
from exporter.model.fields import Field

OTHERS = collectors_file.other_fields()
BY_FIELD = {row.field: row for row in TABLE}


def other_field(name: str) -> tuple[DcgmField, Era]:
    field, era = OTHERS[name]
    assert field is not None
    return field, era


# Names in dcgm-exporter: legacy name, legacy id, 4.9 name, 4.9 id, and a value in both units.
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


def test_every_shared_field_is_in_the_table_once() -> None:
    assert sorted(row.field for row in TABLE) == [
        field for field in Field if field < Field.OWN_FIRST and not field.only_dcgm
    ]
    assert len(BY_FIELD) == len(TABLE)


@pytest.mark.parametrize(("legacy", "old_id", "value", "new", "new_id", "converted"), RENAMED)
def test_field_has_names_and_units_of_both_eras(  # one argument per column
    legacy: str, old_id: int, value: float, new: str, new_id: int, converted: float
) -> None:
    row, era = BY_NAME[legacy]
    assert (int(row.field), era) == (old_id, Era.LEGACY)
    assert (row.name(Era.LEGACY), row.name(Era.NEW), row.new_id) == (legacy, new, new_id)
    assert row.converter(Era.LEGACY)(value) == value
    assert row.converter(Era.NEW)(value) == converted
    assert type(row.converter(Era.NEW)(value)) is type(converted)
    assert BY_NAME[new][0] is row


def test_gpu_util_ratio_name_means_the_new_field() -> None:
    row, era = BY_NAME["DCGM_FI_DEV_GPU_UTIL_RATIO"]
    assert (row.converter(era)(87), era) == (0.87, Era.NEW)


def test_dcgm_4_6_names_keep_the_old_unit() -> None:
    row, era = BY_NAME["DCGM_FI_DEV_BOARD_SERIAL"]
    assert (row.field, era) == (Field.SERIAL, Era.LEGACY)
    row, era = BY_NAME["DCGM_FI_DEV_NVLINK_THROUGHPUT_TOTAL"]
    assert (row.field, era) == (Field.NVLINK_BANDWIDTH_TOTAL, Era.LEGACY)


def test_field_ids_are_names_with_their_own_unit() -> None:
    assert BY_NAME["203"][1] is Era.LEGACY
    assert BY_NAME["1613"] == (BY_FIELD[Field.GPU_UTIL], Era.NEW)


def test_nvlink_throughput_is_not_derived_from_the_old_bandwidth() -> None:
    assert BY_FIELD[Field.NVLINK_BANDWIDTH_TOTAL].name(Era.NEW) is None
    other, era = other_field("DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND")
    assert (other.field, era, other.converter(era)(5)) == (1648, Era.LEGACY, 5)


def test_names_and_numbers_are_unique() -> None:
    assert not OTHERS.keys() & BY_NAME.keys()
    # A name in two lines would be one key instead of two.
    keys = 0
    for line in table_lines("dcgm_ids.txt"):
        _number, legacy, other, _unit, flags, *new = line.split(" | ")
        keys += 1 + len({legacy, legacy if other == "-" else other}) + flags.count("also=") + 2 * len(new)
    assert keys == len(OTHERS)


def test_every_dcgm_field_is_found_by_number() -> None:
    ids = {int(name) for name in OTHERS if name.isdigit()} | {int(name) for name in BY_NAME if name.isdigit()}
    assert len(ids) == 650 + 16 + 1  # up to DCGM 4.6.1, those of 4.7 in other units, and a new one of 4.7
    for first, last in [(1, 6), (50, 77), (400, 489), (789, 843), (879, 897), (1001, 1034), (1040, 1096), (1200, 1220)]:
        assert set(range(first, last + 1)) <= ids, (first, last)


@pytest.mark.parametrize(
    ("number", "kind", "per_instance", "whole", "names"),
    [
        (5, Kind.GAUGE, False, True, ["DCGM_FI_CUDA_DRIVER_VERSION"]),
        (
            63,
            Kind.GAUGE,
            False,
            True,
            ["DCGM_FI_DEV_CUDA_COMPUTE_CAPABILITY", "DCGM_FI_CUDA_GPU_COMPUTE_CAPABILITY"],
        ),
        (172, Kind.LABEL, False, True, ["DCGM_FI_DEV_FABRIC_CLUSTER_UUID"]),
        (345, Kind.GAUGE, False, True, ["DCGM_FI_DEV_ECC_DBE_AGG_SRM"]),
        (
            407,
            Kind.GAUGE,
            False,
            True,
            ["DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L13", "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_L13_TOTAL"],
        ),
        (
            493,
            Kind.GAUGE,
            False,
            True,
            ["DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_L17", "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_L17_TOTAL"],
        ),
        (1014, Kind.GAUGE, True, False, ["DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE", "DCGM_FI_PROF_HMMA_UTIL_RATIO"]),
        (1024, Kind.GAUGE, False, False, ["DCGM_FI_PROF_NVDEC7_ACTIVE", "DCGM_FI_PROF_NVDEC_UTIL_7_RATIO"]),
        (1075, Kind.GAUGE, False, True, ["DCGM_FI_PROF_NVLINK_L17_RX_BYTES"]),
        (1216, Kind.GAUGE, False, False, ["DCGM_FI_DEV_NVLINK_COUNT_SYMBOL_BER_FLOAT"]),
        (1418, Kind.GAUGE, False, True, ["DCGM_FI_DEV_NVLINK_COUNT_FEC_HISTORY_14"]),
    ],
)
def test_dcgm_only_field_has_its_type_and_level_by_every_name(
    number: int, kind: Kind, names: list[str], *, per_instance: bool, whole: bool
) -> None:
    for name in (str(number), *names):
        field, era = other_field(name)
        assert (field.field, field.field.only_dcgm, era) == (number, True, Era.LEGACY)
        assert (field.kind, field.per_instance, field.whole) == (kind, per_instance, whole)
        assert field.name(Era.LEGACY) == names[0]


def test_application_clocks_are_in_hertz_under_their_new_name_and_number() -> None:
    for name in ("1606", "DCGM_FI_DEV_SM_APP_CLOCK_HERTZ"):
        other, era = other_field(name)
        assert (other.field, other.converter(era)(1410)) == (110, 1_410_000_000)
        assert other.name(era) == "DCGM_FI_DEV_SM_APP_CLOCK_HERTZ"
    other, era = other_field("DCGM_FI_DEV_APP_SM_CLOCK")
    assert other.converter(era)(1410) == 1410


@pytest.mark.parametrize(
    "name",
    [
        "DCGM_FI_DEV_PCIE_TX_THROUGHPUT",
        "DCGM_FI_DEV_MIG_GI_INFO",
        "DCGM_FI_DEV_VGPU_MEMORY_USAGE",
        "DCGM_FI_DEV_NVSWITCH_LINK_CRC_ERROR_L5_TOTAL",
        "DCGM_FI_DEV_CPU_UTIL_RATIO",
        "DCGM_FI_DEV_CONNECTX_HEALTH",
        "1533",
    ],
)
def test_unsupported_fields_are_known_and_not_requested(name: str) -> None:
    assert not OTHERS[name][0].asked


@given(st.sampled_from(TABLE), st.integers(min_value=0, max_value=2**53))
def test_conversion_keeps_order_and_zero(row: DcgmField, value: int) -> None:
    assert row.converter(Era.NEW)(0) == 0
    assert row.converter(Era.NEW)(value) <= row.converter(Era.NEW)(value + 1000)


def test_fractional_percentage_is_not_rounded() -> None:
    assert BY_FIELD[Field.GPU_UTIL].converter(Era.LEGACY)(33.25) == 33.25
    assert repr(BY_FIELD[Field.GPU_UTIL].converter(Era.LEGACY)(25.0)) == "25"
