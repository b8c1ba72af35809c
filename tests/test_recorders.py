"""Several recorders of a cluster: the values that count cover each hour once."""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import pytest

from exporter.cost.recorders import Recorder, Span, chosen, spans_of

A: Recorder = (("replica", "a"),)
B: Recorder = (("replica", "b"),)
C: Recorder = (("replica", "c"),)
HOUR = 3600.0


def steady(hours: Iterable[int], gpus: float = 1.0) -> dict[int, float]:
    """Return the values of a recorder for permanent GPUs: after missed hours the next value includes them."""
    found: dict[int, float] = {}
    for hour in sorted(hours):
        since = hour - max(found, default=hour - 1)
        found[hour] = since * gpus * HOUR
    return found


def counted(
    recorded: Mapping[Recorder, Mapping[int, float]], begin: int, end: int, order: tuple[Recorder, ...] = (A, B, C)
) -> list[tuple[Recorder, int]]:
    """Return recorder and hour of each value that counts."""
    known = [name for name in order if name in recorded]
    return [(span.recorder, span.end) for span in chosen(spans_of(recorded), begin, end, known).spans]


def test_first_recorder_with_every_hour_counts_alone() -> None:
    recorded = {A: steady(range(49)), B: steady(range(49))}
    assert counted(recorded, 0, 24) == [(A, hour) for hour in range(1, 25)]
    assert counted(recorded, 0, 24, (B, A)) == [(B, hour) for hour in range(1, 25)]


def test_gap_included_in_the_next_value_is_not_filled_by_another_recorder() -> None:
    recorded = {A: steady([*range(7), *range(10, 25)]), B: steady(range(25))}
    assert counted(recorded, 0, 24) == [(A, hour) for hour in (*range(1, 7), *range(10, 25))]


def test_other_recorder_is_used_if_an_hour_spills_into_the_next_period() -> None:
    recorded = {A: steady(hour for hour in range(49) if hour != 24), B: steady(range(49))}
    assert counted(recorded, 0, 24) == [(B, hour) for hour in range(1, 25)]
    assert counted(recorded, 24, 48) == [(B, hour) for hour in range(25, 49)]


@pytest.mark.parametrize("missing", [(4, 24), (7, 24, 30), (23, 24, 25)])
def test_recorder_change_at_a_period_end_neither_loses_nor_repeats_an_hour(missing: tuple[int, ...]) -> None:
    recorded = {
        A: steady(hour for hour in range(49) if hour not in missing),
        B: steady(hour for hour in range(49) if hour not in {12, 36}),
    }
    values = [recorded[name][hour] for begin in (0, 24) for name, hour in counted(recorded, begin, begin + 24)]
    assert sum(values) == 48 * HOUR


def test_two_recorders_each_without_one_end_are_combined() -> None:
    recorded = {A: steady(range(24)), B: steady(range(5, 25))}
    found = counted(recorded, 0, 24)
    assert [hour for _, hour in found] == list(range(1, 25))
    assert found[0][0] == A
    assert found[-1][0] == B
    assert sum(one[0] != other[0] for one, other in pairwise(found)) == 1


def test_new_recorder_is_used_from_its_second_value() -> None:
    recorded = {A: steady(range(13)), C: steady(range(10, 25))}
    found = counted(recorded, 0, 24)
    assert [hour for _, hour in found] == list(range(1, 25))
    assert (C, 10) not in found


def test_outage_of_more_than_a_day_is_filled_by_another_recorder() -> None:
    b = steady([*range(30, 49)])
    recorded = {A: {**steady(range(6)), **steady(range(40, 49))}, B: steady(range(49)), C: b}
    found = counted(recorded, 0, 48)
    assert [hour for _, hour in found] == list(range(1, 49))
    assert found[10][0] == B


def test_recorder_without_memory_has_one_hour_in_its_next_value() -> None:
    recorded = {A: {**steady(range(6)), **dict.fromkeys(range(9, 25), HOUR)}, B: steady(range(10))}
    found = counted(recorded, 0, 24)
    assert [hour for _, hour in found] == list(range(1, 25))


def test_lost_hour_is_taken_from_another_recorder() -> None:
    recorded = {A: {hour: HOUR for hour in range(25) if hour != 7}, B: steady([*range(9), *range(11, 24)])}
    found = counted(recorded, 0, 24)
    assert [hour for _, hour in found] == list(range(1, 25))


def test_recorder_without_some_nodes_is_not_used() -> None:
    recorded = {A: steady(range(25), gpus=6.0), B: steady(range(25), gpus=8.0)}
    assert {name for name, _ in counted(recorded, 0, 24)} == {B}
    recorded = {A: steady(range(25), gpus=8.0), B: {**steady(range(25), gpus=8.0), 24: 8.5 * HOUR}}
    assert {name for name, _ in counted(recorded, 0, 24)} == {A}


def test_unrecorded_hours_stay_missing_and_an_empty_period_is_valid() -> None:
    recorded = {A: steady([0, 1, 2]), B: steady([0, 1])}
    assert counted(recorded, 0, 24) == [(A, 1), (A, 2)]
    assert counted(recorded, 24, 48) == []


def test_unrecorded_hours_before_a_period_are_in_its_first_value() -> None:
    recorded = {A: steady([20, 26, 27, 28]), B: steady([22, 26, 27, 28])}
    found = chosen(spans_of(recorded), 24, 28, (A, B)).spans
    assert found[0] == Span(B, 24, 26, 4 * HOUR, pytest.approx(0.002))
    assert len(found) == 3
