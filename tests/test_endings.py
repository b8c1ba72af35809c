"""Which pods have ended though the kubelet lists them."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from exporter.attribution.endings import DEPARTED_SECONDS, MISSING_SECONDS, Endings
from exporter.model import PodMetadata

A, B = ("ml", "a"), ("ml", "b")


@dataclass
class Followed:
    items: dict[tuple[str, str], PodMetadata] = field(default_factory=dict)
    removed: dict[tuple[str, str], float] = field(default_factory=dict)
    known: bool = True
    complete: bool = True
    at_seconds: float | None = None
    problem: str = ""


def pod(name: str, uid: str = "") -> PodMetadata:
    return PodMetadata(namespace="ml", name=name, uid=uid or name)


def test_a_pod_that_was_removed_while_it_was_listed_has_ended_and_one_listed_later_waits() -> None:
    endings = Endings()
    followed = Followed(removed={A: 50.0, B: 50.0}, at_seconds=90.0)
    endings.note([A], 40.0, 0.0)
    endings.note([A, B], 60.0, 1.0)
    endings.update(followed, 1.0)
    assert endings.ended == {A}


def test_a_clock_that_was_set_back_delays_nothing() -> None:
    endings = Endings()
    endings.note([A], 9000.0, 0.0)
    endings.update(Followed(at_seconds=100.0), 1.0)
    endings.update(Followed(at_seconds=160.0), 1.0 + MISSING_SECONDS)
    assert endings.ended == {A}


def test_a_pod_that_may_be_what_was_skipped_has_not_ended_by_being_missing() -> None:
    endings = Endings()
    endings.note([A, B], 0.0, 0.0)
    followed = Followed(at_seconds=1.0, complete=False, removed={B: 1.0})
    endings.update(followed, 1.0)
    endings.update(followed, 2.0 + MISSING_SECONDS)
    assert endings.ended == {B}
    followed.complete = True
    endings.update(followed, 3.0 + MISSING_SECONDS)
    assert endings.ended == {A, B}


def test_a_pod_is_remembered_for_ten_minutes_after_it_left_the_api() -> None:
    endings = Endings()
    endings.update(Followed(items={A: pod("a")}), 0.0)
    endings.update(Followed(items={B: pod("b")}), 1.0)
    assert endings.find(A) == pod("a")
    endings.update(Followed(items={}), 1.0 + DEPARTED_SECONDS)
    assert endings.find(A) is None
    assert endings.find(B) == pod("b")
    endings.update(Followed(items={B: pod("b", "second")}), 2.0 + DEPARTED_SECONDS)
    assert endings.find(B) == pod("b", "second")


STEPS = st.lists(
    st.tuples(
        st.sets(st.sampled_from([A, B])),
        st.sets(st.sampled_from([A, B])),
        st.booleans(),
        st.booleans(),
        st.floats(0.0, 40.0),
    ),
    max_size=12,
)


@given(STEPS)
def test_none_ends_that_the_api_has_or_the_kubelet_does_not_list_or_before_the_api_is_known(
    steps: list[tuple[set[tuple[str, str]], set[tuple[str, str]], bool, bool, float]],
) -> None:
    endings, steady, was_well = Endings(), 0.0, False
    for listed, has, known, well, seconds in steps:
        steady += seconds
        was_well = was_well or (known and well)
        problem = "" if well else "down"
        endings.note(listed, steady, steady)
        items = {name: pod(name[1]) for name in has}
        endings.update(Followed(items=items, known=known, problem=problem, at_seconds=steady), steady)
        assert endings.ended <= listed - has
        assert was_well or not endings.ended
