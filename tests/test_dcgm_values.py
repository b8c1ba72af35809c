"""Validity of DCGM's records: a blank or a stopped value is absent; a number stays the same."""

import ctypes
import math
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.gpu.dcgm import library as abi
from exporter.gpu.dcgm.library import Record
from exporter.gpu.dcgm.readings import CurrentValues, Inbox, decode
from exporter.gpu.merge import alone, supplement
from exporter.model.fields import CODECS, PROFILING, Field, ratio_in_range

INT64_BLANK, INT32_BLANK, DOUBLE_BLANK = 0x7FFFFFFFFFFFFFF0, 0x7FFFFFF0, 2.0**47
TEMPERATURE, ENERGY, ACTIVE = 150, 156, 1001
KINDS = (abi.INTEGER, abi.TIMESTAMP)
GPU = (abi.GPU, 0)


def whole(value: int, *, field_id: int = TEMPERATURE, kind: int = abi.INTEGER, status: int = 0) -> Record:
    return Record(field_id, kind, status, 1, value)


def real(value: float, *, field_id: int = ACTIVE) -> Record:
    return Record(field_id, abi.DOUBLE, 0, 1, value)


def text(value: bytes) -> Record:
    return Record(85, abi.STRING, 0, 1, value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blank", [base + one for base in (INT64_BLANK, INT32_BLANK) for one in range(4)])
def test_blank_integer_with_status_ok_is_absent(blank: int, kind: int) -> None:
    assert decode(whole(blank, kind=kind)) is None


@pytest.mark.parametrize("blank", [DOUBLE_BLANK + one for one in range(4)])
def test_blank_real_number_is_absent(blank: float) -> None:
    assert decode(real(blank)) is None


@pytest.mark.parametrize("blank", [b"<<<NULL>>>", b"<<<NOT_FOUND>>>", b"<<<NOT_SUPPORTED>>>", b"<<<NOT_PERM>>>", b""])
def test_blank_text_is_absent(blank: bytes) -> None:
    assert decode(text(blank)) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_absent(value: float) -> None:
    assert decode(real(value)) is None


@given(status=st.integers(min_value=-70, max_value=-1), value=st.integers(min_value=0, max_value=100))
def test_value_with_a_bad_status_is_absent(status: int, value: int) -> None:
    assert decode(whole(value, status=status)) is None


@pytest.mark.parametrize("kind", [abi.BINARY, 0, ord("x"), 2**16 - 1])
def test_blob_and_unknown_type_are_absent(kind: int) -> None:
    assert decode(Record(60, kind, 0, 1, 7)) is None


@given(st.integers(min_value=-(2**63), max_value=2**63 - 1))
def test_other_integers_are_unchanged(value: int) -> None:
    blank = any(base <= value < base + 4 for base in (INT64_BLANK, INT32_BLANK))
    assert decode(whole(value)) == (None if blank else value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_other_real_numbers_are_unchanged(value: float) -> None:
    blank = value in {DOUBLE_BLANK + one for one in range(4)}
    assert decode(real(value)) == (None if blank else value)


@pytest.mark.parametrize("counter", [ENERGY, 202, 240, 393, 409, 439, 497, 1084, 1201, 1422, 1501])
def test_counter_may_have_a_32_bit_blank_value(counter: int) -> None:
    assert decode(whole(INT32_BLANK + 2, field_id=counter)) == INT32_BLANK + 2
    assert decode(whole(INT64_BLANK + 2, field_id=counter)) is None


def test_invalid_utf_8_in_a_text_is_replaced() -> None:
    assert decode(text(b" 96.00\xff ")) == "96.00\ufffd"


@given(st.floats(min_value=-1e6, max_value=1e6))
def test_ratio_is_clamped_to_0_and_1_and_the_clamping_is_reported(value: float) -> None:
    ratio, clamped = ratio_in_range(ACTIVE, value)
    if value < -0.01:
        assert (ratio, clamped) == (None, True), "a restarted counter is not an idle device"
        return
    assert ratio is not None
    assert 0 <= ratio <= 1
    assert clamped or abs(ratio - value) <= 2e-6
    assert clamped == (value < -1e-6 or value > 1 + 1e-6)


@pytest.fixture
def counted() -> list[str]:
    return []


def at(moment: int) -> list[Record]:
    """Return a temperature with this timestamp."""
    return [Record(TEMPERATURE, abi.INTEGER, 0, moment, 51)]


def test_frozen_value_expires_and_is_counted_once(counted: list[str]) -> None:
    fresh = CurrentValues(3.0, counted.append)
    good = [bool(fresh.values(GPU, at(7), now)) for now in (0.0, 1.0, 3.0, 3.5, 4.0, 9.0)]
    assert good == [True, True, True, False, False, False]
    assert counted == ["dcgm_stale"]
    assert fresh.values(GPU, at(8), 10.0)
    assert not fresh.values(GPU, at(8), 13.5)
    assert counted == ["dcgm_stale"] * 2


@given(st.lists(st.integers(min_value=0, max_value=2**62), unique=True, min_size=1, max_size=20))
def test_changing_value_is_valid_for_any_engine_clock(times: list[int]) -> None:
    """Hours ahead, behind, or set back: the clock of another machine is no reference."""
    fresh = CurrentValues(1.0, pytest.fail)
    assert all(fresh.values(GPU, at(moment), 100.0 * index) for index, moment in enumerate(times))


def records(*given_records: tuple[int, int, float, int]) -> "ctypes.Array[abi.FieldValueV1]":
    """Return records of (field id, type, value, time) in the library's layout."""
    array = (abi.FieldValueV1 * len(given_records))()
    for slot, (field_id, kind, value, at) in zip(array, given_records, strict=True):
        slot.version, slot.fieldId, slot.fieldType, slot.ts = abi.version_word(abi.FieldValueV1), field_id, kind, at
        if kind == abi.DOUBLE:
            slot.value.dbl = value
        else:
            slot.value.i64 = int(value)
    return array


def delivered(call: Callable[[Callable[..., int]], int]) -> dict[tuple[int, int], dict[int, int | float | str]]:
    """Return the values in the delivery of a call."""
    code, found = Inbox().fetch(call)
    assert code == 0
    return {entity: CurrentValues(1.0, pytest.fail).values(entity, some, 0.0) for entity, some in found.items()}


def test_delivered_values_survive_overwritten_records() -> None:
    array = records((TEMPERATURE, abi.INTEGER, 51, 1), (ACTIVE, abi.DOUBLE, 0.25, 1))

    def call(callback: Callable[..., int]) -> int:
        code = callback(*GPU, ctypes.addressof(array), 2, None)
        ctypes.memset(array, 0xFF, ctypes.sizeof(array))
        return code

    assert delivered(call) == {GPU: {TEMPERATURE: 51, ACTIVE: 0.25}}


def test_values_of_an_entity_can_arrive_one_at_a_time() -> None:
    def call(callback: Callable[..., int]) -> int:
        for entity in (GPU, (abi.GPU_INSTANCE, 0)):
            for one in ((TEMPERATURE, abi.INTEGER, 51, 1), (ENERGY, abi.INTEGER, 9, 1)):
                array = records(one)
                callback(*entity, ctypes.addressof(array), 1, None)
        return 0

    assert delivered(call) == {
        GPU: {TEMPERATURE: 51, ENERGY: 9},
        (abi.GPU_INSTANCE, 0): {TEMPERATURE: 51, ENERGY: 9},
    }


@given(st.floats(-1e9, 1e9))
def test_non_ratio_field_is_not_clamped(value: float) -> None:
    assert CurrentValues(1.0, pytest.fail).values(GPU, [real(value, field_id=TEMPERATURE)], 0.0) == {TEMPERATURE: value}


def test_clamped_values_are_counted(counted: list[str]) -> None:
    assert CurrentValues(1.0, counted.append).values(GPU, [real(1.3)], 0.0) == {ACTIVE: 1.0}
    assert counted == ["dcgm_clamped"]


def _profiling_ids() -> Iterator[int]:
    return (int(one) for one in Field if one.name.startswith("PROF_"))


def test_every_profiling_field_is_classified_as_profiling() -> None:
    """A direct read of one of them would kill the engine for all its clients."""
    assert all(one in PROFILING for one in (*_profiling_ids(), 1013, 1040, 1076, 1096, 1532, 1533))
    assert not any(one in PROFILING for one in (150, 203, 250, 1200, 1523))


def test_supplement_has_the_fields_that_nvml_may_lack_and_a_fallback() -> None:
    asked = supplement({Field.SM_CLOCK, Field.PROF_SM_ACTIVE, Field(63), Field.JPG_UTIL})
    assert asked >= {Field.PROF_SM_ACTIVE, Field(63), Field.PROF_GR_ENGINE_ACTIVE, Field.GPU_UTIL, Field.POWER_USAGE}
    assert not asked & {Field.SM_CLOCK, Field.JPG_UTIL}


def test_supplement_always_has_xids() -> None:
    assert Field.XID_ERRORS in supplement([])


def test_alone_has_every_available_field_and_xids() -> None:
    asked = alone({Field.SM_CLOCK, Field.JPG_UTIL, Field(63)})
    assert asked == {Field.SM_CLOCK, Field(63), Field.PROF_GR_ENGINE_ACTIVE, Field.XID_ERRORS} | CODECS
