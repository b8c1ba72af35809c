"""The waste alerts over a corpus of labelled workload shapes, in the real engine in virtual time."""

import re
from functools import cache
from pathlib import Path

import pytest
from corpus_engine import PROMTOOL, Firing, Index, Subject, agent_page, run, spans_by_subject, wrong
from corpus_series import RECORDED, Series
from corpus_support import Shape, load, seconds, track

from exporter.metrics import catalog

ROOT = Path(__file__).resolve().parent.parent
RULES = tuple(ROOT / "rules" / f"prometheus-rules{part}.yaml" for part in ("", "-ineffective"))
WASTE = frozenset({"GPUUnderutilised", "GPUIdle", "GPUSharedIdle", "GPUIdleCost", "GPUIneffective"})
BESIDE = frozenset({"GPUExporterCrashLooping"})
"""Alerts about the agents of the workloads."""
SHAPES = load()
INDEX = Index(SHAPES)
NOT_THE_AGENTS = {"up", "process_start_time_seconds", RECORDED}
TARGET_LABELS = {"job", "instance", "namespace", "pod"}

needs_promtool = pytest.mark.skipif(not PROMTOOL.exists(), reason="promtool is not unpacked; make install")


SHOWN: set[tuple[str, frozenset[str]]] = set()
"""Names, and label names, of all evaluated series."""


def noted_page(shape: Shape, series: Series) -> None:
    """Add the agents' series of a shape, and note their names."""
    agent_page(shape, series)
    SHOWN.update((name, frozenset(label for label, _ in labels)) for name, labels in list(series.rows))


@cache
def fired() -> tuple[Firing, ...]:
    """Return the firings over all shapes; evaluated once, with the longest scrape interval that most shapes allow."""
    return tuple(run(SHAPES, RULES, WASTE | BESIDE, noted_page, scrape=60.0))


def firings_of(subject: Subject, alert: str = "") -> list[Firing]:
    return [one for one in fired() if alert in ("", one.alert) and INDEX.subject(one, one.episodes[0][0]) == subject]


def test_corpus_has_at_least_40_shapes_each_with_a_reason() -> None:
    assert len(SHAPES) >= 40
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    assert all(re.fullmatch(r"[A-Z].{30,}\.", shape.why) for shape in SHAPES)


def test_only_undetectable_waste_has_no_alert() -> None:
    missed = {
        shape.name
        for shape in SHAPES
        for workload in shape.workloads
        if workload.waste is not None and not workload.alerts
    }
    assert missed == {"nccl-deadlock", "estimated-sharers-one-idle"}


@needs_promtool
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_alerts_fire_for_the_expected_shapes_only_with_the_expected_severity(shape: Shape) -> None:
    by_subject = spans_by_subject(fired(), INDEX)
    expected = {Subject(shape.name, f"{work.namespace}/{work.name}"): work.alerts for work in shape.workloads}
    expected |= {Subject(shape.name, board): alerts for board, alerts in shape.sharers.items()}
    expected |= {Subject(shape.name, node): shape.agents for node in shape.nodes}
    subjects = [subject for subject in by_subject if subject.shape == shape.name]
    findings = [
        f"{subject.name}: {finding}"
        for subject in dict.fromkeys([*expected, *subjects])
        for finding in wrong(expected.get(subject, {}), by_subject.get(subject, {}), shape.lasts)
    ]
    for subject, alerts in expected.items():
        for alert, wanted in alerts.items():
            first = min(firings_of(subject, alert), key=lambda one: one.episodes[0], default=None)
            if wanted.severity and first is not None and first.labels["severity"] != wanted.severity:
                findings.append(f"{subject.name}: {alert} is at first {first.labels['severity']}")
    assert not findings, shape.why


@needs_promtool
@pytest.mark.parametrize(
    "subject",
    [
        Subject("array-of-64-idle", "array-of-64-idle/sweep"),
        Subject("owner-known-late", "owner-known-late/latecomer"),
        Subject("owner-known-at-fifty-minutes", "owner-known-at-fifty-minutes/latecomer"),
    ],
    ids=lambda subject: subject.shape,
)
def test_one_workload_gives_one_alert_for_any_number_of_gpus_and_names(subject: Subject) -> None:
    assert [one.alert for one in firings_of(subject)] == ["GPUUnderutilised"]


@needs_promtool
def test_ineffective_alert_finds_all_wasteful_busy_gpus_and_no_others() -> None:
    shapes = [shape for shape in SHAPES if shape.file == "effective.yaml"]
    wasted = {
        Subject(shape.name, f"{work.namespace}/{work.name}")
        for shape in shapes
        for work in shape.workloads
        if work.waste is not None
    }
    blamed = {subject for subject, alerts in spans_by_subject(fired(), INDEX).items() if "GPUIneffective" in alerts}
    found = blamed & wasted
    assert (len(shapes), len(wasted)) == (12, 6)
    assert {"precision": len(found) / len(blamed), "recall": len(found) / len(wasted)} == {
        "precision": 1.0,
        "recall": 1.0,
    }


@needs_promtool
def test_corpus_uses_only_series_and_labels_of_the_agent() -> None:
    fired()
    for name, labels in SHOWN:
        if name not in NOT_THE_AGENTS:
            assert labels <= TARGET_LABELS | set(catalog.BY_NAME[name].labels), name


def test_activity_track_is_parsed_as_written() -> None:
    written = track(["0.9 40m", {"repeat": ["1 1m", "? 1m"], "for": "4m"}, "0.5"], 0.0, 3600.0)
    values = [written.at(60.0 * minute) for minute in (0, 39, 40, 41, 42, 43, 44, 59, 60)]
    assert values == [0.9, 0.9, 1.0, None, 1.0, None, 0.5, 0.5, 0.0]
    known, unknown = next(iter(written.integrals([3600.0], 0.0, 3600.0)))
    assert (known, unknown) == (pytest.approx(0.9 * 2400 + 120 + 0.5 * 960), 120.0)


def test_invalid_duration_is_named() -> None:
    assert seconds("1h2m3s") == 3723
    with pytest.raises(ValueError, match="90 minutes"):
        seconds("90 minutes")
