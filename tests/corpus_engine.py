"""Rules over the corpus in real engines, with the series of dcgm-exporter and kube-state-metrics."""

import json
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from corpus_series import RECORDED, Page, Series
from corpus_support import NEVER_ENDS, NOBODY, Board, Expected, Pod, Shape, Track, Use, Workload, combine
from files_support import read_yaml

IDLE_WATTS, BUSY_WATTS = 75.0, 600.0
_BETWEEN = {"Deployment": ("ReplicaSet", "replicaset"), "CronJob": ("Job", "job_name")}
"""Kinds that do not own their pods directly: the kind in between, and its label."""


class PublicPage(Page):
    """Adds the series of the public exporters for one shape."""

    def everything(self) -> None:
        for board in self.shape.boards:
            held = [
                (pod, use)
                for work in self.shape.workloads
                for pod in work.pods
                for use in pod.uses
                if use.board == board
            ]
            for pod, use in held:
                self.device(pod, use)
            if not any(use.profile for _, use in held):
                self.free(board, held)
        for workload in self.shape.workloads:
            self.owner(workload)
            for pod in workload.pods:
                self.kubernetes(workload, pod)

    def device(self, pod: Pod, use: Use) -> None:
        """Add the fields of a device, with the pod's labels while it is held."""
        labels = _labels(use.board, use.instance, use.profile) | {
            "namespace": pod.namespace,
            "pod": pod.name,
            "container": "main",
        }
        here = [pod.start <= t < pod.end for t in self.times]
        if use.util is not None:
            percent = self._live(here, use.util, lambda value: float(round(100 * value)))
            self.scraped("DCGM_FI_DEV_GPU_UTIL", use.board, labels, percent)
            beside = combine([use.part, use.util], _beside)
            video = self._live(here, beside, lambda value: float(round(100 * value)))
            self.scraped("DCGM_FI_DEV_ENC_UTIL", use.board, labels, video)
        self.scraped("DCGM_FI_PROF_GR_ENGINE_ACTIVE", use.board, labels, self._live(here, use.engine, float))
        watts = self._live(here, use.part, lambda value: IDLE_WATTS + (BUSY_WATTS - IDLE_WATTS) * value)
        self.scraped("DCGM_FI_DEV_POWER_USAGE", use.board, labels, watts)

    def _live(self, here: Iterable[bool], track: Track, of: object) -> Iterator[float | None]:
        assert callable(of)
        seen = track.with_unknown(self.agents.driverless)
        for there, t in zip(here, self.times, strict=True):
            value = seen.at(t) if there else None
            yield None if value is None else of(value)

    def free(self, board: Board, held: list[tuple[Pod, Use]]) -> None:
        """Add a GPU without a holder, at 0 and without a pod."""
        idle = [None if any(pod.start <= t < pod.end for pod, _ in held) else 0.0 for t in self.times]
        self.scraped("DCGM_FI_DEV_GPU_UTIL", board, _labels(board), idle)
        self.scraped("DCGM_FI_PROF_GR_ENGINE_ACTIVE", board, _labels(board), idle)

    def scraped(self, name: str, board: Board, labels: Mapping[str, str], values: Iterable[float | None]) -> None:
        """Add a series with the target labels that the exporter itself does not set."""
        seen = [
            value if self.agents.scraped(board.node, number, t) and t < self.shape.lasts else None
            for number, (t, value) in enumerate(zip(self.times, values, strict=True))
        ]
        target = {"job": "dcgm-exporter", "instance": f"{board.node}:9400"}
        self.series.add(name, {**labels, **target}, seen)

    def owner(self, workload: Workload) -> None:
        """Add the owners of owners, for a workload with a ReplicaSet or a Job between itself and its pods."""
        between, owned = _BETWEEN.get(workload.kind, ("", ""))
        if between:
            labels = {
                "namespace": workload.namespace,
                owned: f"{workload.name}-1",
                "owner_kind": workload.kind,
                "owner_name": workload.name,
                "owner_is_controller": "true",
                "job": "kube-state-metrics",
            }
            name = f"kube_{between.lower()}_owner"
            self.series.add(name, labels, (1.0 if t < self.shape.lasts else None for t in self.times))

    def kubernetes(self, workload: Workload, pod: Pod) -> None:
        """Add the series of kube-state-metrics for a pod; labels and annotations are those of its configuration."""
        labels = {"namespace": pod.namespace, "pod": pod.name, "uid": pod.uid, "job": "kube-state-metrics"}
        here = [pod.start <= t < pod.end for t in self.times]
        count = float(sum(1 for use in pod.uses))
        requests = {**labels, "container": "main", "node": pod.uses[0].board.node, "unit": "integer"}
        requests["resource"] = "".join(letter if letter.isalnum() else "_" for letter in pod.resource)
        phase = [float(pod.running_from <= t) if there else None for t, there in zip(self.times, here, strict=True)]
        self.series.add("kube_pod_status_phase", {**labels, "phase": "Running"}, phase)
        self.series.add("kube_pod_created", labels, [pod.start if there else None for there in here])
        there = [1.0 if here_now else None for here_now in here]
        if workload.kind == "Pod":
            nobody = dict.fromkeys(("owner_kind", "owner_name", "owner_is_controller"), "<none>")
            self.series.add("kube_pod_owner", {**labels, **nobody}, there)
        else:
            between = _BETWEEN.get(workload.kind, ("", ""))[0]
            name = f"{workload.name}-1" if between else pod.owner
            owner = {"owner_kind": between or workload.kind, "owner_name": name, "owner_is_controller": "true"}
            self.series.add("kube_pod_owner", {**labels, **owner}, there)
        if workload.policy:
            shown = {**labels, "label_gpu_cost_exporter_workload_class": workload.policy}
            self.series.add("kube_pod_labels", shown, there)
        if pod.alerts_off_until == NEVER_ENDS:
            self.series.add(
                "kube_pod_annotations", {**labels, "annotation_gpu_cost_exporter_alerts": "disabled"}, there
            )
        if pod.resource != "dra":
            values = [count if there else None for there in here]
            self.series.add("kube_pod_container_resource_requests", requests, values)


def _beside(values: list[float | None]) -> float | None:
    """Return the activity that the utilisation does not cover."""
    part, util = values
    return None if part is None or util is None else max(0.0, part - util)


def _labels(board: Board, instance: str = "", profile: str = "") -> dict[str, str]:
    return {
        "gpu": str(board.index),
        "UUID": board.uuid,
        "device": f"nvidia{board.index}",
        "modelName": board.model,
        "GPU_I_PROFILE": profile,
        "GPU_I_ID": instance,
        "Hostname": board.node,
    }


def add(shape: Shape, series: object) -> None:
    """Add the public exporters' series of a shape."""
    PublicPage(shape, series).everything()  # type: ignore[arg-type]


ROOT = Path(__file__).resolve().parent.parent
PROMTOOL = ROOT / ".tools" / "bin" / "promtool"
LONG_SECONDS = 9 * 3600.0
"""Longer shapes are evaluated separately, in larger steps."""
RESTORED_SECONDS = 3600.0
"""After longer outages Prometheus restores no alert: its ``--rules.alert.for-outage-tolerance``."""
_ASKED = 'ALERTS{alertstate="firing"}'
_RESULT = re.compile(r"time: (?P<at>\S+),\s+exp:[^\n]*\s+got:(?P<got>.*?)(?=\n +expr: |\n\n|\Z)", re.DOTALL)
_ALERT = re.compile(r'\{((?:[^"{}]|"(?:[^"\\]|\\.)*")*)\} 1E\+00')
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
_DURATION = re.compile(r"(\d+)(ms|[dhms])")
_UNIT_SECONDS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Shapes that are evaluated together, as nodes of one cluster."""

    shapes: tuple[Shape, ...]
    scrape_seconds: float
    step_seconds: float

    @property
    def lasts(self) -> float:
        return max(shape.lasts for shape in self.shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """One alert with one set of labels, and its times of firing: (from, to), in evaluation steps."""

    labels: dict[str, str]
    episodes: tuple[tuple[float, float], ...]
    pending: float
    """Time from the cause to the alert, in seconds."""

    @property
    def alert(self) -> str:
        return self.labels["alertname"]


def fleets(
    shapes: Sequence[Shape], step: float = 120.0, most: float = math.inf, scrape: float = 30.0
) -> tuple[Fleet, ...]:
    """Group the shapes in fleets: of hours, evaluated every ``step`` seconds, of days, and of separate intervals.

    Those of hours are scraped every ``scrape`` seconds.

    A fleet of several shapes has at most ``most`` samples, as counted by :func:`samples`.
    """
    made: dict[tuple[bool, float, float], list[Shape]] = {}
    for shape in shapes:
        long = shape.lasts > LONG_SECONDS
        seen, turn = shape.scrape_seconds or (60.0 if long else scrape), shape.step_seconds or (300.0 if long else step)
        made.setdefault((long, seen, turn), []).append(shape)
    return tuple(
        Fleet(shapes=part, scrape_seconds=seen, step_seconds=turn)
        for (_, seen, turn), of_fleet in made.items()
        for part in _parted(of_fleet, most)
    )


def samples(shape: Shape) -> float:
    """Return the most samples of held GPUs in two hours, with one every 30 s."""
    pods = [(pod.start, pod.end, len(pod.uses)) for workload in shape.workloads for pod in workload.pods]
    return max(
        sum(max(0.0, min(end, t) - max(start, t - 7200.0)) * held / 30.0 for start, end, held in pods)
        for t in {end for _, end, _ in pods}
    )


def _parted(shapes: Iterable[Shape], most: float) -> Iterator[tuple[Shape, ...]]:
    part: list[Shape] = []
    for shape in shapes:
        if part and sum(samples(one) for one in (*part, shape)) > most:
            yield tuple(part)
            part = []
        part.append(shape)
    yield tuple(part)


def needed(rules: Sequence[Path], alerts: frozenset[str]) -> dict[str, Any]:
    """Return the alerts and the recorded series that they read, as a rules file without annotations."""
    groups = [group for path in rules for group in read_yaml(path.read_text(encoding="utf-8"))["groups"]]
    records = {rule["record"] for group in groups for rule in group["rules"] if "record" in rule} - {RECORDED}
    wanted = set(alerts)
    while True:
        read = " ".join(
            rule["expr"]
            for group in groups
            for rule in group["rules"]
            if {rule.get("alert"), rule.get("record")} & wanted
        )
        found = wanted | {name for name in records if re.search(rf"(?<![\w:]){re.escape(name)}(?![\w:])", read)}
        if found == wanted:
            break
        wanted = found
    kept = [
        {
            "name": group["name"],
            "rules": [
                {key: value for key, value in rule.items() if key != "annotations"}
                for rule in group["rules"]
                if {rule.get("alert"), rule.get("record")} & wanted
            ],
        }
        for group in groups
    ]
    return {"groups": [group for group in kept if group["rules"]]}


def evaluate(
    fleet: Fleet, rules: Sequence[Path], alerts: frozenset[str], page: Callable[[Shape, Series], object]
) -> list[Firing]:
    """Evaluate rules over a fleet's series.

    Args:
        fleet: The shapes.
        rules: Rules files.
        alerts: The wanted alerts in them.
        page: Adds the series of a shape.

    Returns:
        All alerts that fired, with the times.
    """
    count = int(fleet.lasts // fleet.scrape_seconds) + 1
    wanted = needed(rules, alerts)
    text = json.dumps(wanted)
    times = [fleet.scrape_seconds * number for number in range(count)]
    read = " ".join(rule["expr"] for group in wanted["groups"] for rule in group["rules"])
    named = frozenset(re.findall(r"[A-Za-z_][\w:]*", read))
    series = Series(times, wanted=None if "__name__" in named else named)
    for shape in fleet.shapes:
        page(shape, series)
    moments = [fleet.step_seconds * number for number in range(1, int(fleet.lasts // fleet.step_seconds) + 1)]
    document = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": f"{fleet.step_seconds:.0f}s",
        "group_eval_order": [group["name"] for group in wanted["groups"]],
        "tests": [
            {
                "interval": f"{fleet.scrape_seconds:.0f}s",
                "input_series": [{"series": name, "values": values} for name, values in series.text()],
                # No series has this value, so that promtool prints the actual result.
                "promql_expr_test": [
                    {"expr": _ASKED, "eval_time": f"{at:.0f}s", "exp_samples": [{"labels": "{}", "value": -1}]}
                    for at in moments
                ],
            }
        ],
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "rules.yaml").write_text(text, encoding="utf-8")
        path = Path(folder) / "corpus.yaml"
        path.write_text(json.dumps(document), encoding="utf-8")
        done = subprocess.run([str(PROMTOOL), "test", "rules", str(path)], capture_output=True, text=True, check=False)
    pending = {
        rule["alert"]: _seconds(rule.get("for", ""))
        for group in wanted["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    return list(_firings(done.stdout + done.stderr, moments, fleet.step_seconds, pending))


def _firings(text: str, moments: Sequence[float], step: float, pending: dict[str, float]) -> Iterator[Firing]:
    found = {_seconds(match["at"]): match["got"] for match in _RESULT.finditer(text)}
    if set(found) != set(moments):
        raise RuntimeError(f"promtool did not answer as expected:\n{text[:4000]}")
    times: dict[str, list[float]] = {}
    for at in moments:
        for labels in _ALERT.findall(found[at]):
            times.setdefault(labels, []).append(at)
    for written, at_all in times.items():
        labels = {name: json.loads(f'"{value}"') for name, value in _LABEL.findall(written)}
        yield Firing(
            labels=labels, episodes=tuple(_episodes(at_all, step)), pending=pending[labels["alertname"]] + 2 * step
        )


def _episodes(times: Iterable[float], step: float) -> Iterator[tuple[float, float]]:
    """Join times without a gap: (first, one step after the last)."""
    start = last = None
    for at in sorted(set(times)):
        if last is not None and start is not None and at - last > step:
            yield start, last + step
            start = at
        start = at if start is None else start
        last = at
    if start is not None and last is not None:
        yield start, last + step


def _seconds(text: str) -> float:
    return sum((float(number) * _UNIT_SECONDS[unit] for number, unit in _DURATION.findall(text)), 0.0)


def run(
    shapes: Sequence[Shape],
    rules: Sequence[Path],
    alerts: frozenset[str],
    page: Callable[[Shape, Series], object],
    step: float = 120.0,
    most: float = math.inf,
    scrape: float = 30.0,
) -> list[Firing]:
    """Evaluate rules over all shapes, fleets in parallel."""
    index = Index(shapes)
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda fleet: evaluate(fleet, rules, alerts, page), fleets(shapes, step, most, scrape))
        return [_restored(one, index) for of_fleet in found for one in of_fleet]


def _restored(firing: Firing, index: "Index") -> Firing:
    """Continue an alert across an outage of Prometheus if it fires before, and its cause exists after it.

    promtool evaluates during the outage, which ends alerts. A real Prometheus does not, and within an hour it restores
    firing alerts from ``ALERTS_FOR_STATE``.
    """
    shape = index.shapes.get(index.subject(firing, firing.episodes[0][0]).shape)
    away = [item for item in shape.outages if item.what == "prometheus"] if shape else []
    episodes: list[tuple[float, float]] = []
    for start, end in firing.episodes:
        before = episodes[-1] if episodes else (start, start)
        if any(
            before[0] < item.start <= before[1] and start <= item.end + firing.pending
            for item in away
            if episodes and item.end - item.start <= RESTORED_SECONDS
        ):
            episodes[-1] = (before[0], end)
        else:
            episodes.append((start, end))
    return replace(firing, episodes=tuple(episodes))


def agent_page(shape: Shape, series: Series) -> None:
    """Add the agent's series of a shape."""
    Page(shape, series).everything()


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of an alert: a workload of a shape, one of its GPUs or nodes, or none."""

    shape: str
    name: str


class Index:
    """Finds the subject of an alert by its labels."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self.shapes = {shape.name: shape for shape in shapes}
        self.workloads: dict[Subject, Workload] = {}
        self._pods: dict[tuple[str, str], Subject] = {}
        self._names: dict[tuple[str, str], Subject] = {}
        self._namespaces: dict[str, set[Subject]] = {}
        self._devices: dict[str, list[tuple[float, float, Subject]]] = {}
        self._boards: dict[str, Subject] = {}
        self._nodes = {node: Subject(shape.name, node) for shape in shapes for node in shape.nodes}
        for shape in shapes:
            for workload in shape.workloads:
                self._take(shape, workload)
            for board in shape.boards:
                self._boards[board.uuid] = Subject(shape.name, board.uuid)

    def _take(self, shape: Shape, workload: Workload) -> None:
        subject = Subject(shape.name, f"{workload.namespace}/{workload.name}")
        self.workloads[subject] = workload
        self._names[workload.namespace, workload.name] = subject
        self._namespaces.setdefault(workload.namespace, set()).add(subject)
        for pod in workload.pods:
            self._names[pod.namespace, pod.owner] = self._pods[pod.namespace, pod.name] = subject
            for use in pod.uses:
                for uuid in {use.device_uuid, use.board.uuid}:
                    self._devices.setdefault(uuid, []).append((pod.start, pod.end, subject))

    def subject(self, firing: Firing, at: float) -> Subject:
        """Return the subject of an alert that fires at ``at``."""
        labels = firing.labels
        uuid = labels.get("uuid") or labels.get("UUID")
        if firing.alert == "GPUExporterCrashLooping":
            return self._nodes[labels["node"]]
        if firing.alert == "GPUSharedIdle" and uuid in self._boards:
            return self._boards[uuid]
        namespace = labels.get("workload_namespace") or labels.get("pod_namespace") or labels.get("namespace", "")
        pod = labels.get("pod_name") or labels.get("pod") or labels.get("workload_name", "")
        for found in (self._names.get((namespace, labels.get("workload_name", ""))), self._pods.get((namespace, pod))):
            if found is not None:
                return found
        known = self._namespaces.get(namespace, set())
        if len(known) == 1:
            return next(iter(known))
        for start, end, subject in self._devices.get(uuid or "", ()):
            if start <= at < end:
                return subject
        board = self._boards.get(uuid or "")
        return Subject(board.shape if board else "", NOBODY)


FiredSpans = dict[Subject, dict[str, list[tuple[float, float]]]]
"""Times of firing by subject and alert, over all other labels."""


def spans_by_subject(firings: Iterable[Firing], index: Index) -> FiredSpans:
    """Group firings by subject; tiers of one alert are one."""
    times: dict[tuple[Subject, str], list[tuple[float, float]]] = {}
    for firing in firings:
        for start, end in firing.episodes:
            times.setdefault((index.subject(firing, start), firing.alert), []).append((start, end))
    result: FiredSpans = {}
    for (subject, alert), spans in times.items():
        result.setdefault(subject, {})[alert] = joined(spans)
    return result


def joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge spans that touch."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def wrong(expected: dict[str, Expected], fired: dict[str, list[tuple[float, float]]], lasts: float) -> Iterator[str]:
    """Yield the violations of the expectation."""
    for alert in sorted({*expected, *fired}):
        spans = fired.get(alert, [])
        when = ", ".join(f"{clock(start)} to {clock(end)}" for start, end in spans) or "never"
        want = expected.get(alert)
        if want is None:
            yield f"{alert} fires {when}; it must not"
        elif not spans and math.isinf(want.latest):
            continue
        elif not spans or spans[0][0] > want.latest:
            yield f"{alert} fires {when}; it must from {clock(want.latest)} at the latest"
        elif spans[0][0] < want.earliest:
            yield f"{alert} fires {when}; not before {clock(want.earliest)}"
        elif len(spans) > 1 and not want.pauses:
            yield f"{alert} fires {when}; it must not come and go"
        elif want.resolved is None and spans[-1][1] < lasts:
            yield f"{alert} fires {when}; it must not end"
        elif want.resolved is not None and spans[-1][1] > want.resolved:
            yield f"{alert} fires {when}; it must have ended by {clock(want.resolved)}"


def clock(seconds: float) -> str:
    """Return a time in the form of the corpus."""
    whole = round(seconds)
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m" + (f"{whole % 60:02d}s" if whole % 60 else "")


def alerts_of(rules: Path) -> frozenset[str]:
    """Return the names of the alerts of a rules file."""
    groups = read_yaml(rules.read_text(encoding="utf-8"))["groups"]
    return frozenset(rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule)
