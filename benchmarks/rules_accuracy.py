"""Compares the waste alerts with the most common public rules, over the corpus of tests/corpus: finds, times, messages.

Both evaluate the same workloads: ours through the agent's series, the others through those of dcgm-exporter and
kube-state-metrics. promtool evaluates everything in virtual time.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import corpus_engine  # noqa: E402 - in the folder of the tests
from corpus_engine import PROMTOOL, Firing, Index, Subject, agent_page, alerts_of, clock, joined, run, samples  # noqa: E402
from corpus_support import NOBODY, Shape, Workload, load  # noqa: E402

OURS = frozenset({"GPUUnderutilised", "GPUIdle", "GPUSharedIdle", "GPUIdleCost"})
BUSY = frozenset({"GPUIneffective"})
RULES = ROOT / "rules" / "prometheus-rules.yaml"
PLATFORMS_OWN = {"kube-system", "cw-hpc-verification"}
ADAPTER_SAMPLES = 8000.0
"""promtool keeps at most 10,000 samples of a query, and the adapter queries two hours of each GPU, every 30 s."""
AFTER_SECONDS = 40 * 60.0
"""Time for which an alert may outlive its cause before it counts as false."""
Span = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """One or several rules, the shapes that they evaluate and their firings."""

    name: str
    alerts: frozenset[str]
    shapes: Sequence[Shape]
    firings: Sequence[Firing]


@dataclass(slots=True, kw_only=True)
class Score:
    """Results of a contestant."""

    wasted: int = 0
    found: list[tuple[Subject, float]] = field(default_factory=list)
    missed: list[Subject] = field(default_factory=list)
    false: list[Subject] = field(default_factory=list)
    flaps: int = 0
    messages: int = 0
    """Alerts for workloads that were found: one per set of labels."""

    @property
    def precision(self) -> float:
        """Return the part of the reported workloads that was waste."""
        reported = len(self.found) + len(self.false)
        return len(self.found) / reported if reported else 1.0

    @property
    def recall(self) -> float:
        """Return the part of the waste that was found."""
        return len(self.found) / self.wasted if self.wasted else 1.0


def score(contestant: Contestant, counts: Callable[[Workload], bool]) -> Score:
    """Compare firings with waste.

    A workload is found if an alert for it fires while it is waste. It is blamed wrongly if one fires at another time,
    or without any waste. An alert for a GPU without a holder, free for hours, counts as wrong blame, too.
    """
    index = Index(contestant.shapes)
    spans: dict[Subject, list[Span]] = {}
    alerts: dict[Subject, int] = {}
    for firing in contestant.firings:
        if firing.alert in contestant.alerts:
            for subject in _blamed(firing, index):
                spans.setdefault(subject, []).extend(firing.episodes)
                alerts[subject] = alerts.get(subject, 0) + 1
    result = Score()
    for subject, workload in index.workloads.items():
        if workload.judged and counts(workload):
            _count(result, subject, workload, joined(spans.get(subject, ())), alerts.get(subject, 0))
    result.false += [
        subject for subject in spans if subject.name == NOBODY and subject.shape and index.shapes[subject.shape].free
    ]
    return result


def _count(result: Score, subject: Subject, workload: Workload, episodes: list[Span], alerts: int) -> None:
    begin, end = workload.waste or (float("inf"), float("inf"))
    within = [span for span in episodes if span[0] <= end and span[1] > begin]
    result.flaps += max(0, len(episodes) - 1)
    if workload.waste is not None:
        result.wasted += 1
        if within:
            result.found.append((subject, max(0.0, within[0][0] - begin)))
            result.messages += alerts
        else:
            result.missed.append(subject)
    if any(_is_false(span, workload) for span in episodes):
        result.false.append(subject)


def _is_false(span: Span, workload: Workload) -> bool:
    if workload.waste is None:
        return True
    (start, stop), (begin, end) = span, workload.waste
    goes_on = end < max(pod.end for pod in workload.pods)
    return start < begin or (goes_on and stop > end + AFTER_SECONDS)


def _blamed(firing: Firing, index: Index) -> Iterator[Subject]:
    """Yield the workloads of an alert: for a shared GPU, those of all its holders."""
    subject = index.subject(firing, firing.episodes[0][0])
    if firing.alert != "GPUSharedIdle":
        yield subject
        return
    for of_shape, workload in index.workloads.items():
        if any(use.board.uuid == subject.name for pod in workload.pods for use in pod.uses):
            yield of_shape


def undeclared(workload: Workload) -> bool:
    """Return whether a workload is without declarations that a public rule cannot know: class, opt-out, namespace."""
    opted = any(pod.alerts_off_until is not None for pod in workload.pods)
    return not workload.policy and not opted and workload.namespace not in PLATFORMS_OWN


def contestants(shapes: Sequence[Shape]) -> Iterator[Contestant]:
    """Evaluate all rules; yield each contestant."""
    yield Contestant(name="ours", alerts=OURS, shapes=shapes, firings=run(shapes, (RULES,), OURS, agent_page))
    on_dcgm = ROOT / "rules" / "prometheus-rules-dcgm-exporter.yaml"
    small = [shape for shape in shapes if samples(shape) <= ADAPTER_SAMPLES]
    firings = run(small, (on_dcgm,), OURS, corpus_engine.add, most=ADAPTER_SAMPLES)
    yield Contestant(name="ours, on dcgm-exporter's series", alerts=OURS, shapes=small, firings=firings)
    rules = ROOT / "benchmarks" / "public_rules.yaml"
    public = run(shapes, (rules,), alerts_of(rules), corpus_engine.add, step=30.0)
    for alert, name in (
        ("PublicInstant", "`GPU_UTIL < 10`, for 30m"),
        ("PublicAverage", "1 h average < 10, for 30m"),
        ("PublicAverageOnPod", "30 min average < 10 `on (pod)` requests, for 30m"),
        ("PublicAverageRunning", "30 min average < 5 `on (namespace, pod)` Running, for 30m"),
        ("PublicNothingAtAll", "30 min maximum of the engine 0, power low, older than 35 min"),
    ):
        yield Contestant(name=name, alerts=frozenset({alert}), shapes=shapes, firings=public)


def table(title: str, scores: Iterable[tuple[str, Score]]) -> None:
    """Print one row per rule."""
    print(f"\n{title}\n")
    print("| rule | precision | recall | found | false | until it fires: median, worst | alerts per find | flaps |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name, of in scores:
        delays = [delay for _, delay in of.found]
        when = f"{clock(statistics.median_low(delays))}, {clock(max(delays))}" if delays else ""
        each = f"{of.messages / len(of.found):.1f}" if of.found else ""
        print(
            f"| {name} | {100 * of.precision:.0f} % | {100 * of.recall:.0f} % | {len(of.found)} of {of.wasted} "
            f"| {len(of.false)} | {when} | {each} | {of.flaps} |"
        )


def main() -> int:
    """Print the tables; with ``--names`` also the workloads that each rule missed or blamed wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="print the missed and the wrongly blamed workloads")
    arguments = parser.parse_args()
    if not PROMTOOL.exists():
        print("promtool is not unpacked: make install")
        return 0
    everything = load()
    shapes = [shape for shape in everything if shape.file != "effective.yaml"]
    everybody = list(contestants(shapes))
    workloads = [workload for shape in shapes for workload in shape.workloads]
    wasted = sum(workload.waste is not None for workload in workloads)
    print(f"{len(shapes)} shapes, {len(workloads)} workloads, {wasted} of them waste at some time")
    scores = [(one.name, score(one, lambda _: True)) for one in everybody]
    table("All workloads:", scores)
    table(
        "Without those of which something was declared:",
        ((one.name, score(one, undeclared)) for one in everybody),
    )
    busy = [shape for shape in everything if shape not in shapes]
    firings = run(busy, (RULES, RULES.with_stem(f"{RULES.stem}-ineffective")), BUSY, agent_page)
    of_busy = score(Contestant(name="GPUIneffective", alerts=BUSY, shapes=busy, firings=firings), lambda _: True)
    table("Busy GPUs, far from every limit of the hardware or not:", [("GPUIneffective", of_busy)])
    for name, of in scores if arguments.names else ():
        print(f"\n{name}\n  missed: {_names(of.missed)}\n  false: {_names(of.false)}")
    return 0


def _names(subjects: Iterable[Subject]) -> str:
    return ", ".join(f"{subject.shape}:{subject.name.rpartition('/')[2]}" for subject in subjects) or "none"


if __name__ == "__main__":
    sys.exit(main())
