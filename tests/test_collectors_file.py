from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.errors import ConfigError
from exporter.metrics import collectors_file
from exporter.metrics.collectors_file import ALWAYS_READ, DEFAULT, Collectors, Row, default, parse
from exporter.metrics.dcgm_names import Era
from exporter.metrics.text_format import Kind
from exporter.model.fields import Field


def problems(text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(text, "counters.csv")
    return caught.value.problems


def names(collectors: Collectors) -> list[str]:
    return [row.name for row in collectors.rows]


def test_dcgm_exporter_file_is_parsed_as_dcgm_exporter_does() -> None:
    read = parse(
        "# Format,,\n"
        "\n"
        "DCGM_FI_DEV_SM_CLOCK,  gauge, SM clock frequency (in MHz).\r\n"
        "DCGM_FI_DEV_DEC_UTIL ,gauge,Decoder utilization (in %).\n"
        'DCGM_FI_DEV_XID_ERRORS, gauge,"Last XID, if any."\n'
        "DCGM_FI_DRIVER_VERSION, label, Driver Version\n",
        "counters.csv",
    )
    assert [(row.name, row.kind, row.help) for row in read.rows] == [
        ("DCGM_FI_DEV_SM_CLOCK", Kind.GAUGE, "SM clock frequency (in MHz)."),
        ("DCGM_FI_DEV_DEC_UTIL", Kind.GAUGE, "Decoder utilization (in %)."),
        ("DCGM_FI_DEV_XID_ERRORS", Kind.GAUGE, "Last XID, if any."),
        ("DCGM_FI_DRIVER_VERSION", Kind.LABEL, "Driver Version"),
    ]
    assert read.warnings == ()


def test_row_name_is_kept_and_decides_the_unit() -> None:
    read = parse(
        "DCGM_FI_DEV_GPU_TEMP_CELSIUS, gauge, x\n"
        "DCGM_FI_DEV_FB_USED_BYTES, gauge, x\n"
        "DCGM_FI_DEV_FB_FREE, gauge, x\n"
        "150, gauge, again\n"
        "1603, gauge, by number\n"
        "DCGM_FI_PROF_SM_ACTIVE, gauge, x\n",
        "counters.csv",
    )
    assert [(row.name, row.era) for row in read.rows] == [
        ("DCGM_FI_DEV_GPU_TEMP_CELSIUS", Era.LEGACY),
        ("DCGM_FI_DEV_FB_USED_BYTES", Era.NEW),
        ("DCGM_FI_DEV_FB_FREE", Era.LEGACY),
        ("DCGM_FI_DEV_SM_CLOCK_HERTZ", Era.NEW),
        ("DCGM_FI_PROF_SM_ACTIVE", Era.LEGACY),
    ]
    assert read.warnings == (
        "counters.csv:4: DCGM_FI_DEV_GPU_TEMP is the same field as DCGM_FI_DEV_GPU_TEMP_CELSIUS above and is left out",
    )


def test_old_and_new_names_may_be_combined_if_their_units_differ() -> None:
    read = parse(
        "DCGM_FI_DEV_GPU_UTIL, gauge, x\n"
        "DCGM_FI_DEV_GPU_UTIL_RATIO, gauge, x\n"
        "DCGM_FI_DEV_APP_SM_CLOCK, gauge, x\n"
        "DCGM_FI_DEV_SM_APP_CLOCK_HERTZ, gauge, x\n"
        "1613, gauge, again\n",
        "counters.csv",
    )
    assert [(row.name, row.field.converter(row.era)(50)) for row in read.rows] == [
        ("DCGM_FI_DEV_GPU_UTIL", 50),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO", 0.5),
        ("DCGM_FI_DEV_APP_SM_CLOCK", 50),
        ("DCGM_FI_DEV_SM_APP_CLOCK_HERTZ", 50_000_000),
    ]
    assert [warning.split(":")[1] for warning in read.warnings if "left out" in warning] == ["5"]


def test_all_errors_are_reported_with_their_lines() -> None:
    assert problems(
        "# comment\n"
        "DCGM_FI_DEV_GPU_UTILL, gauge, x\n"
        "DCGM_FI_DEV_SM_CLOCK, Gauge, x\n"
        "DCGM_FI_DEV_SM_CLOCK, gauge\n"
        "DCGM_FI_DEV_SM_CLOCK, gauge, a, b\n"
        "DCGM_FI_DEV_SM_CLOCK, label, x\n"
        "DCGM_FI_DRIVER_VERSION, gauge, x\n"
        'DCGM_FI_DEV_SM_CLOCK,gauge,"x\n'
        "99999, gauge, x\n"
        "nonsense, gauge, x\n"
    ) == (
        (
            "counters.csv:2: unknown field 'DCGM_FI_DEV_GPU_UTILL'; did you mean 'DCGM_FI_DEV_GPU_UTIL'? "
            "Allowed: DCGM field names and ids"
        ),
        "counters.csv:3: type 'Gauge' of DCGM_FI_DEV_SM_CLOCK: allowed are gauge, counter and label",
        "counters.csv:4: 2 columns instead of 3 (field, type, help)",
        (
            "counters.csv:5: 4 columns instead of 3 (field, type, help); put a help that has a comma in quotes, "
            "straight after the comma"
        ),
        "counters.csv:6: DCGM_FI_DEV_SM_CLOCK is a number and cannot be a label: allowed are gauge and counter",
        "counters.csv:7: DCGM_FI_DRIVER_VERSION is a text and cannot be a gauge: allowed is label",
        (
            "counters.csv:8: not valid CSV (unexpected end of data): write field, type, help; "
            "a help with a comma in quotes"
        ),
        "counters.csv:9: unknown field '99999'; allowed: DCGM field names and ids",
        "counters.csv:10: unknown field 'nonsense'; allowed: DCGM field names and ids",
    )


@pytest.mark.parametrize(
    "name",
    ["DCGM_FI_DEV_PCIE_TX_THROUGHPUT", "DCGM_FI_DEV_VGPU_MEMORY_USAGE", "75", "1640", "DCGM_FI_DEV_CPU_UTIL_TOTAL"],
)
def test_unmeasured_field_gives_a_warning_and_no_rows(name: str) -> None:
    read = parse(f"{name}, counter, x\nDCGM_FI_DEV_GPU_TEMP, gauge, x\n", "counters.csv")
    assert names(read) == ["DCGM_FI_DEV_GPU_TEMP"]
    assert read.warnings == (f"counters.csv:1: {name} is not measured by this agent; the row shows nothing",)


@pytest.mark.parametrize("number", ["0", "0150", "-1", "1651", "9" * 5000, "\u0661\u0665\u0660"])
def test_unknown_field_number_is_refused(number: str) -> None:
    (reported,) = problems(f"{number}, gauge, x\n")
    assert reported.startswith("counters.csv:1: unknown field ")
    assert "did you mean" not in reported


def test_dcgm_only_fields_are_requested_under_any_name_or_number() -> None:
    read = parse(
        "DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE, gauge, old\n"
        "DCGM_FI_PROF_HMMA_UTIL_RATIO, gauge, of 4.6\n"
        "DCGM_FI_DEV_SM_APP_CLOCK_HERTZ, gauge, of 4.9\n"
        "1077, gauge, by number\n"
        "1610, gauge, by its new number\n"
        "DCGM_FI_DEV_FABRIC_CLUSTER_UUID, label, x\n"
        "1013, gauge, again\n",
        "counters.csv",
    )
    assert [(row.name, int(row.field.field), row.era, row.kind) for row in read.rows] == [
        ("DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE", 1013, Era.LEGACY, Kind.GAUGE),
        ("DCGM_FI_PROF_HMMA_UTIL_RATIO", 1014, Era.LEGACY, Kind.GAUGE),
        ("DCGM_FI_DEV_SM_APP_CLOCK_HERTZ", 110, Era.NEW, Kind.GAUGE),
        ("DCGM_FI_PROF_C2C_TX_DATA_BYTES", 1077, Era.LEGACY, Kind.GAUGE),
        ("DCGM_FI_DEV_VIDEO_MAX_CLOCK_HERTZ", 115, Era.NEW, Kind.GAUGE),
        ("DCGM_FI_DEV_FABRIC_CLUSTER_UUID", 172, Era.LEGACY, Kind.LABEL),
    ]
    assert read.fields == ALWAYS_READ | {Field(number) for number in (1013, 1014, 110, 1077, 115, 172)}
    assert read.dcgm_only == read.rows
    assert read.warnings == (
        (
            "counters.csv:7: DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE is the same field as "
            "DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE above and is left out"
        ),
    )
    assert read.without_dcgm == (
        "collectors: only DCGM measures DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE, DCGM_FI_PROF_HMMA_UTIL_RATIO, "
        "DCGM_FI_DEV_SM_APP_CLOCK_HERTZ and 3 more, which show nothing; name its host engine (--dcgm-address)"
    )


def test_every_field_is_accepted_by_first_name_last_name_or_number() -> None:
    asked = {field.field: field for field, _ in collectors_file.other_fields().values() if field.asked}
    others = [((field.legacy_name, field.canonical_name), field) for field in asked.values()]

    def rows_of(names: Iterable[str]) -> tuple[Row, ...]:
        kinds = [(name, field.kind) for name, (_, field) in zip(names, others, strict=True)]
        read = parse("".join(f"{name}, {kind}, x\n" for name, kind in kinds), "counters.csv")
        assert all("4.7" in warning for warning in read.warnings)
        return read.rows

    first = rows_of(names[0] for names, _ in others)
    last = rows_of(names[-1] for names, _ in others)
    numbered = rows_of(str(int(field.field)) for _, field in others)
    assert len(first) == len(others) > 300
    assert [row.field for row in first] == [row.field for row in last] == [row.field for row in numbered]
    assert [row.name for row in first] == [row.name for row in numbered] == [names[0] for names, _ in others]
    assert [row.name for row in last] == [names[-1] for names, _ in others]


def test_nvml_fields_and_device_facts_need_no_dcgm() -> None:
    read = parse(
        "DCGM_FI_PROF_SM_ACTIVE, gauge, x\nDCGM_FI_DEV_UUID, label, x\nDCGM_FI_DEV_GPU_NAME, label, x\n57, label, x\n",
        "counters.csv",
    )
    assert [row.name for row in read.rows][1:] == ["DCGM_FI_DEV_UUID", "DCGM_FI_DEV_GPU_NAME", "DCGM_FI_DEV_PCI_BUSID"]
    assert (read.dcgm_only, read.without_dcgm) == ((), "")
    assert read.fields == ALWAYS_READ | {Field.PROF_SM_ACTIVE}


def test_dcgm_only_text_must_be_a_label_and_a_number_must_not() -> None:
    assert problems("172, gauge, x\n1076, label, x\n") == (
        "counters.csv:1: 172 is a text and cannot be a gauge: allowed is label",
        "counters.csv:2: 1076 is a number and cannot be a label: allowed are gauge and counter",
    )


def test_dcgm_4_7_field_is_requested_with_a_warning() -> None:
    read = parse("DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND, gauge, x\n", "counters.csv")
    assert [int(row.field.field) for row in read.dcgm_only] == [1648]
    assert read.warnings == (
        ("counters.csv:1: DCGM_FI_DEV_NVLINK_THROUGHPUT_BYTES_PER_SECOND is measured by DCGM 4.7 and later alone"),
    )


def test_dcgm_exp_counts_are_read_with_their_true_type() -> None:
    read = parse(
        "DCGM_EXP_XID_ERRORS_COUNT, gauge, Xids\n"
        "DCGM_EXP_CLOCK_EVENTS_COUNT, counter,\n"
        "DCGM_EXP_XID_ERRORS_TOTAL, counter, x\n"
        "DCGM_EXP_CLOCK_EVENTS_TOTAL, counter, x\n"
        "DCGM_EXP_XID_ERRORS_COUNT, gauge, again\n",
        "counters.csv",
    )
    assert [(row.name, row.kind) for row in read.events] == [
        ("DCGM_EXP_XID_ERRORS_COUNT", Kind.GAUGE),
        ("DCGM_EXP_CLOCK_EVENTS_COUNT", Kind.GAUGE),
        ("DCGM_EXP_XID_ERRORS_TOTAL", Kind.COUNTER),
        ("DCGM_EXP_CLOCK_EVENTS_TOTAL", Kind.COUNTER),
    ]
    assert read.events[0].help == "Xids"
    assert read.events[1].help.startswith("Samples of the window")
    assert (read.rows, read.fields, read.dcgm_only) == ((), ALWAYS_READ, ())
    assert read.warnings == (
        "counters.csv:2: DCGM_EXP_CLOCK_EVENTS_COUNT is shown as the gauge that it is, not as a counter",
        (
            "counters.csv:5: DCGM_EXP_XID_ERRORS_COUNT is the same field as DCGM_EXP_XID_ERRORS_COUNT above "
            "and is left out"
        ),
    )
    assert problems("DCGM_EXP_XID_ERRORS_COUNT, label, x\n") == (
        ("counters.csv:1: DCGM_EXP_XID_ERRORS_COUNT is a number and cannot be a label: allowed are gauge and counter"),
    )


def test_unsupported_dcgm_exp_row_warns_with_an_alternative() -> None:
    read = parse(
        "DCGM_EXP_P2P_STATUS, gauge, x\nDCGM_FI_DEV_GPU_TEMP, gauge, x\n",
        "counters.csv",
    )
    assert (names(read), read.events) == (["DCGM_FI_DEV_GPU_TEMP"], ())
    (p2p,) = read.warnings
    assert "DCGM_EXP_P2P_STATUS is not made by this agent" in p2p
    assert "gpu_nvlink_errors_total" in p2p


def test_gpu_util_ratio_warns_that_it_is_0_to_1() -> None:
    read = parse("DCGM_FI_DEV_GPU_UTIL_RATIO, gauge, x\n", "counters.csv")
    assert read.rows[0].field.converter(read.rows[0].era)(87) == 0.87
    assert read.warnings == (
        (
            "counters.csv:1: DCGM_FI_DEV_GPU_UTIL_RATIO is shown as 0-1, as dcgm-exporter 4.9 does; "
            "in DCGM 4.6 the same name meant 0-100"
        ),
    )


def test_names_of_the_1x_file_are_read_and_printed_as_written() -> None:
    read = parse(
        "dcgm_sm_clock, gauge, x\ndcgm_gpu_utilization, gauge, x\ndcgm_fi_prof_dram_active, gauge, x\n"
        "dcgm_pcie_tx_throughput, counter, x\ndcgm_retired_pages_sbe, counter, x\n",
        "1.x.csv",
    )
    assert [(row.name, row.field.field) for row in read.rows] == [
        ("dcgm_sm_clock", Field.SM_CLOCK),
        ("dcgm_gpu_utilization", Field.GPU_UTIL),
        ("dcgm_fi_prof_dram_active", Field.PROF_DRAM_ACTIVE),
        ("dcgm_retired_pages_sbe", Field.RETIRED_SBE),
    ]
    assert read.warnings == ("1.x.csv:4: dcgm_pcie_tx_throughput is not measured by this agent; the row shows nothing",)


def test_empty_file_leaves_only_the_own_metrics_with_a_warning() -> None:
    read = parse("# nothing\n", "counters.csv")
    assert read.rows == ()
    assert read.fields == ALWAYS_READ
    assert len(read.warnings) == 1


def test_requested_fields_are_the_rows_and_the_always_read_fields() -> None:
    assert Field.MEMORY_TEMP in DEFAULT.fields
    assert Field.PROF_SM_ACTIVE not in DEFAULT.fields
    read = parse("DCGM_FI_PROF_SM_ACTIVE, gauge, x\n", "counters.csv")
    assert read.fields == ALWAYS_READ | {Field.PROF_SM_ACTIVE}


def test_new_default_set_has_capacity_and_no_nvlink_fields() -> None:
    shown = names(default("4.9"))
    assert "DCGM_FI_DEV_FB_CAPACITY_BYTES" in shown
    assert "DCGM_FI_SYSTEM_DRIVER_VERSION" in shown
    assert not [name for name in shown if "NVLINK" in name]
    assert len(shown) == 26


@given(st.text(max_size=200))
def test_arbitrary_text_gives_only_located_errors(text: str) -> None:
    try:
        reported = parse(text, "counters.csv").warnings
    except ConfigError as mistake:
        reported = mistake.problems
    assert all(line.startswith("counters.csv:") for line in reported)


@given(st.lists(st.sampled_from(DEFAULT.rows), unique=True, min_size=1))
def test_written_set_reads_back_unchanged(rows: list[Row]) -> None:
    read = parse("".join(f'{row.name},{row.kind},"{row.help}"\n' for row in rows), "counters.csv")
    assert list(read.rows) == rows
