"""Pods that have left the API while the kubelet still lists them."""

from hypothesis import given
from hypothesis import strategies as st

from exporter.attribution.pod_lifecycle import DEPARTED_SECONDS, Endings
from exporter.model.attribution import PodMetadata

A, B = ("ml", "a"), ("ml", "b")


def pod(name: str, uid: str = "") -> PodMetadata:
    return PodMetadata(namespace="ml", name=name, uid=uid or name)


def test_continuously_listed_pod_has_left_and_a_later_listed_one_is_a_stranger() -> None:
    endings = Endings()
    endings.update({A: pod("a"), B: pod("b")}, 0.0)
    endings.note([A])
    endings.update({}, 1.0)
    endings.note([A, B])
    assert (endings.left, endings.strangers) == ({A}, {B})
    endings.note([B])
    endings.note([A, B])
    assert (endings.left, endings.strangers) == (frozenset(), {A, B})


def test_pod_is_kept_for_ten_minutes_after_it_left_the_api() -> None:
    endings = Endings()
    endings.update({A: pod("a")}, 0.0)
    endings.update({B: pod("b")}, 1.0)
    endings.update({B: pod("b"), ("ml", "c"): pod("c")}, DEPARTED_SECONDS)
    assert endings.find(A) == pod("a")
    endings.update({}, 1.0 + DEPARTED_SECONDS)
    assert endings.find(A) is None
    assert endings.find(B) == pod("b")
    endings.update({B: pod("b", "second")}, 2.0 + DEPARTED_SECONDS)
    assert endings.find(B) == pod("b", "second")


STEPS = st.lists(st.tuples(st.sets(st.sampled_from([A, B])), st.sets(st.sampled_from([A, B]))), max_size=12)


@given(STEPS)
def test_left_pods_are_listed_and_were_removed_from_the_api(
    steps: list[tuple[set[tuple[str, str]], set[tuple[str, str]]]],
) -> None:
    endings, had = Endings(), set[tuple[str, str]]()
    for steady, (listed, has) in enumerate(steps):
        endings.note(listed)
        endings.update({name: pod(name[1]) for name in has}, float(steady))
        had |= has
        assert endings.left <= (listed & had) - has
        assert endings.strangers | endings.left == listed - has
