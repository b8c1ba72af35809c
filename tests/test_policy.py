from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.attribution.owner_rules import ALERTS_KEY, ALERTS_UNTIL_KEY, CLASS_KEY, OwnerRules, facts_of
from exporter.model.attribution import PodMetadata

NOTHING: tuple[dict[str, str], ...] = ({}, {})
ANY_TEXT = st.text(st.characters(codec=None), max_size=100)
Texts = Sequence[Mapping[str, str]]


class Policy(NamedTuple):
    """Facts of a pod about its alerts."""

    workload_class: str = ""
    opt_out_until_seconds: float | None = None
    problems: tuple[str, ...] = ()


BAD_OPT_OUT = Policy(problems=("bad_opt_out",))


def policy_of(kind: str, pod: Texts, namespace: Texts) -> Policy:
    labels, annotations = pod
    owned = PodMetadata(
        namespace="ml", name="a", uid="", labels=labels, annotations=annotations, owner_kind=kind, owner_name="a"
    )
    facts = facts_of(owned, *namespace, OwnerRules())
    problems = tuple(one for one in facts.problems if one.startswith("bad_"))
    return Policy(facts.workload_class, facts.opt_out_until_seconds, problems)


def until(text: str) -> Policy:
    return policy_of("Pod", ({}, {ALERTS_UNTIL_KEY: text}), NOTHING)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-12-31", datetime(2027, 1, 1, tzinfo=UTC)),
        (" 2026-12-31 ", datetime(2027, 1, 1, tzinfo=UTC)),
        ("2028-02-29", datetime(2028, 3, 1, tzinfo=UTC)),
        ("2026-12-31T18:00:00Z", datetime(2026, 12, 31, 18, tzinfo=UTC)),
        ("2026-12-31t18:00:00z", datetime(2026, 12, 31, 18, tzinfo=UTC)),
        ("2026-12-31 18:00:00+02:00", datetime(2026, 12, 31, 16, tzinfo=UTC)),
        ("2026-12-31T18:00:00.500000000-05:30", datetime(2026, 12, 31, 23, 30, 0, 500000, tzinfo=UTC)),
        ("2020-01-01", datetime(2020, 1, 2, tzinfo=UTC)),  # past: a reader of the time sees the end
    ],
)
def test_opt_out_ends_at_the_given_time_or_at_the_end_of_the_utc_day(text: str, moment: datetime) -> None:
    assert until(text) == Policy(opt_out_until_seconds=moment.timestamp())


@pytest.mark.parametrize("text", ["9999-12-31", "0001-01-01", "0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_calendar_limits_are_valid_dates(text: str) -> None:
    said = until(text)
    assert said.opt_out_until_seconds is not None
    assert said.problems == ()


@pytest.mark.parametrize(
    "text",
    [
        "2026-02-30",
        "2026-12-31T18:00:00",  # no zone: 18:00 is ambiguous
        "2026-12-31T18:00Z",
        "2026-12-31T25:00:00Z",
        "2026-12-31T18:00:00+99:00",
        "20261231",
        "2026-W53-4",
        "31.12.2026",
        "1798761600",
        "tomorrow",
        "٢٠٢٦-١٢-٣١",
        "9" * 5000,
    ],
)
def test_invalid_time_opts_out_nothing_and_is_reported(text: str) -> None:
    assert until(text) == BAD_OPT_OUT


def test_disabled_opts_out_forever() -> None:
    assert policy_of("Pod", ({}, {ALERTS_KEY: "disabled"}), NOTHING) == Policy(opt_out_until_seconds=inf)
    assert policy_of("Pod", ({ALERTS_KEY: "Disabled"}, {}), NOTHING).opt_out_until_seconds == inf
    assert policy_of("Pod", NOTHING, ({}, {ALERTS_KEY: "disabled"})).opt_out_until_seconds == inf


@pytest.mark.parametrize("word", ["true", "off", "no", "disable", "\ud800x"])
def test_invalid_value_opts_out_nothing_and_is_reported(word: str) -> None:
    assert policy_of("Pod", ({}, {ALERTS_KEY: word}), NOTHING) == BAD_OPT_OUT


def test_empty_value_is_ignored() -> None:
    empty = {ALERTS_KEY: "", ALERTS_UNTIL_KEY: " ", CLASS_KEY: "\n"}
    assert policy_of("Pod", (empty, empty), (empty, empty)) == Policy()


def test_pod_value_overrides_the_namespace_value() -> None:
    namespace = ({}, {ALERTS_KEY: "disabled"})
    assert policy_of("Pod", ({}, {ALERTS_KEY: "enabled"}), namespace) == Policy()
    day = policy_of("Pod", ({}, {ALERTS_UNTIL_KEY: "2026-12-31"}), namespace)
    assert day.opt_out_until_seconds == datetime(2027, 1, 1, tzinfo=UTC).timestamp()


def test_invalid_pod_value_falls_back_to_the_namespace_value() -> None:
    said = policy_of("Pod", ({}, {ALERTS_KEY: "yes"}), ({}, {ALERTS_KEY: "disabled"}))
    assert said == Policy(opt_out_until_seconds=inf, problems=("bad_opt_out",))


def test_latest_opt_out_of_one_object_applies() -> None:
    both = {ALERTS_KEY: "disabled", ALERTS_UNTIL_KEY: "2026-12-31"}
    assert policy_of("Pod", ({}, both), NOTHING).opt_out_until_seconds == inf
    assert until("2026-12-31") == policy_of("Pod", ({}, {**both, ALERTS_KEY: "enabled"}), NOTHING)


def test_class_is_read_from_the_pod_then_the_namespace_labels_first() -> None:
    def class_of(*words: str) -> str:
        first, second, third, fourth = ({CLASS_KEY: word} if word else {} for word in words)
        return policy_of("Job", (first, second), (third, fourth)).workload_class

    assert class_of("reserved", "batch", "inference", "interactive") == "reserved"
    assert class_of("", "inference", "batch", "batch") == "inference"
    assert class_of("", "", "Interactive", "batch") == "interactive"
    assert class_of("", "", "", "reserved") == "reserved"
    assert class_of("", "", "", "") == "batch"


def test_invalid_class_is_reported_and_the_next_one_applies() -> None:
    said = policy_of("Deployment", ({CLASS_KEY: "gpu"}, {CLASS_KEY: "training"}), ({}, {CLASS_KEY: "batch"}))
    assert said == Policy(workload_class="batch", problems=("bad_workload_class",))
    assert policy_of("Notebook", ({CLASS_KEY: "gpu"}, {}), NOTHING).workload_class == "interactive"


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Notebook", "interactive"),
        ("JupyterHub", "interactive"),
        ("InferenceService", "inference"),
        ("KnativeService", "inference"),
        ("RayService", "inference"),
        ("CronJob", "batch"),
        ("PyTorchJob", "batch"),
        ("Deployment", ""),
        ("LeaderWorkerSet", ""),
        ("RayCluster", ""),
        ("Pod", ""),
        ("", ""),
    ],
)
def test_workload_kind_implies_a_class(kind: str, expected: str) -> None:
    assert policy_of(kind, NOTHING, NOTHING).workload_class == expected


@settings(deadline=None)  # a busy machine is not an error
@given(st.lists(st.dictionaries(st.sampled_from([CLASS_KEY, ALERTS_KEY, ALERTS_UNTIL_KEY]), ANY_TEXT), min_size=4))
def test_arbitrary_text_gives_a_valid_class(sources: list[dict[str, str]]) -> None:
    said = policy_of("Pod", tuple(sources[:2]), tuple(sources[2:4]))
    assert said.workload_class in {"", "batch", "interactive", "inference", "reserved"}


@settings(deadline=None)
@given(st.datetimes(timezones=st.timezones()))
def test_every_rfc3339_time_gives_the_same_moment(moment: datetime) -> None:
    text = moment.isoformat(timespec="seconds")
    said = until(text)
    if len(text) == len("2026-12-31T18:00:00+02:00"):  # old local times have offsets with seconds: not RFC 3339
        assert said.opt_out_until_seconds == datetime.fromisoformat(text).timestamp()
    else:
        assert said == BAD_OPT_OUT
