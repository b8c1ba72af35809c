"""The corpus of workload shapes: the contents of its files as values. tests/corpus/README.md describes the format."""

import math
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from files_support import read_yaml

FOLDER = Path(__file__).resolve().parent / "corpus"
NOBODY = "(nobody)"
NEVER_ENDS = 253_402_300_799.0
"""End of the year 9999: a permanent opt-out."""
GPUS_PER_NODE = 8
_UNITS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}


def seconds(text: str | float) -> float:
    """Parse a time such as ``1h10m``."""
    if isinstance(text, int | float):
        return float(text)
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not a time like 1h10m")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


@dataclass(frozen=True, slots=True)
class Track:
    """A value over time, constant between ``starts``; ``None`` is unknown. Before the first start it is 0."""

    starts: tuple[float, ...]
    values: tuple[float | None, ...]

    def at(self, t: float) -> float | None:
        index = bisect_right(self.starts, t) - 1
        return self.values[index] if index >= 0 else 0.0

    def with_unknown(self, spans: Iterable[tuple[float, float]]) -> "Track":
        """Return the same, unknown from each span's start to its end."""
        spans = tuple(spans)
        if not spans:
            return self
        starts = sorted({*self.starts, *(edge for span in spans for edge in span)})
        values = tuple(None if any(a <= start < b for a, b in spans) else self.at(start) for start in starts)
        return Track(tuple(starts), values)

    def integrals(self, times: Sequence[float], begin: float, end: float) -> Iterator[tuple[float, float]]:
        """Yield per time (integral of known values, unknown seconds) from ``begin`` until then, at most ``end``."""
        edges = [start for start in self.starts if begin < start < end]
        known = unknown = 0.0
        position, index = begin, 0
        for t in times:
            until = min(max(t, begin), end)
            while position < until:
                while index < len(edges) and edges[index] <= position:
                    index += 1
                stop = min(until, edges[index]) if index < len(edges) else until
                value = self.at(position)
                known += 0.0 if value is None else value * (stop - position)
                unknown += stop - position if value is None else 0.0
                position = stop
            yield known, unknown

    def last_busy(self, times: Sequence[float], begin: float, threshold: float) -> Iterator[float]:
        """Yield per time the last time at or above the threshold, or unknown; ``begin`` without one."""
        edges = [*self.starts[1:], math.inf]
        busy = [
            (start, end)
            for start, end, value in zip(self.starts, edges, self.values, strict=True)
            if value is None or value >= threshold
        ]
        for t in times:
            yield max((min(end, t) for start, end in busy if start <= t), default=begin)


def combine(tracks: Sequence[Track], fold: Any) -> Track:  # noqa: ANN401 - a callable over a list of values
    """Return a track of a function of other tracks' values at the same time."""
    starts = tuple(sorted({start for track in tracks for start in track.starts}))
    return Track(starts, tuple(fold([track.at(start) for track in tracks]) for start in starts))


def total(values: list[float | None]) -> float | None:
    """Return the sum, at most 1; unknown if a part is."""
    known = [value for value in values if value is not None]
    return min(1.0, sum(known)) if len(known) == len(values) else None


def _steps(script: Any, length: float) -> Iterator[tuple[float, float | None]]:  # noqa: ANN401 - YAML
    """Yield successive (seconds, value), for ``length`` seconds."""
    left = length
    for item in script if isinstance(script, list) else [script]:
        if isinstance(item, dict):
            turn = min(left, seconds(item["for"])) if "for" in item else left
            left -= turn
            while turn > 0:
                for lasting, value in _steps(item["repeat"], turn):
                    yield lasting, value
                    turn -= lasting
            continue
        word, _, lasting_text = str(item).partition(" ")
        lasting = min(left, seconds(lasting_text)) if lasting_text else left
        left -= lasting
        yield lasting, None if word == "?" else float(word)
        if left <= 0:
            return


def track(script: Any, begin: float, end: float) -> Track:  # noqa: ANN401 - YAML
    """Return an activity from its form in the file, from ``begin`` to ``end``."""
    starts, values, position = [], [], begin
    for lasting, value in _steps(script, end - begin):
        if lasting <= 0:
            continue
        if not values or values[-1] != value:
            starts.append(position)
            values.append(value)
        position += lasting
    return Track((*starts, end), (*values, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A failure of a part from ``start`` to ``end``.

    ``what``: ``agent`` (it restarts, its ledger is on disk), ``agent-without-state``, ``agent-replaced`` (by another
    pod of its DaemonSet), ``driver`` (it answers nothing), ``prometheus`` (does not run) or ``scrapes`` (fail).
    """

    what: str
    start: float
    end: float

    @property
    def blinds(self) -> bool:
        """Return whether the time is unknown to the agent itself."""
        return self.what not in {"prometheus", "scrapes"}


@dataclass(frozen=True, slots=True)
class Loss:
    """The failing scrapes: each ``every``-th one, or a ``part`` of them at random."""

    every: int = 0
    part: float = 0.0

    def numbers(self, node: str, count: int) -> frozenset[int]:
        """Return the numbers of the scrapes of a node that fail; the same ones each time."""
        if self.every:
            return frozenset(range(self.every - 1, count, self.every))
        chance = random.Random(node)  # noqa: S311 - no secret
        return frozenset(number for number in range(count) if chance.random() < self.part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A physical GPU."""

    node: str
    index: int
    uuid: str
    model: str
    price: float | None
    currency: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A part of a board that a pod holds."""

    board: Board
    device_uuid: str
    instance: str
    profile: str
    share: float
    mode: str
    source: str
    activity: Track
    """Activity of the holder, known to the agent, as a part of the held share."""
    part: Track
    """The same activity as a part of the device."""
    util: Track | None
    """Utilisation of the device in ``nvidia-smi``; ``None`` without one (MIG)."""
    engine: Track
    near: Track
    """Use of the resource nearest to its limit, as a part of the limit; unknown is unprofiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One pod, from its binding to its end."""

    namespace: str
    name: str
    uid: str
    start: float
    end: float
    running_from: float
    resource: str
    owner: str
    """Name of the workload that created it."""
    alerts_off_until: float | None
    uses: tuple[Use, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Times of an alert: it fires between ``earliest`` and ``latest``, and not from ``resolved`` on."""

    severity: str
    """Its first severity; empty: any."""
    earliest: float
    latest: float
    """Infinite: the alert is optional."""
    resolved: float | None
    pauses: bool
    """Whether the alert may pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The pods of a workload, and the expected alerts."""

    namespace: str
    kind: str
    name: str
    team: str
    policy: str
    pods: tuple[Pod, ...]
    waste: tuple[float, float] | None
    judged: bool
    """False if the waste is ambiguous; such a workload counts for no rule."""
    alerts: dict[str, Expected]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One case of the corpus."""

    name: str
    why: str
    file: str
    lasts: float
    metadata_from: float
    """Time from which the agent knows owners; infinite: never."""
    workloads: tuple[Workload, ...]
    sharers: dict[str, dict[str, Expected]]
    """Alerts of shared GPUs by their UUID."""
    boards: tuple[Board, ...]
    agents: dict[str, Expected]
    """Alerts of the agent of each node."""
    outages: tuple[Outage, ...]
    lost: Loss
    free: int
    scrape_seconds: float | None
    """Interval of scrapes; ``None``: as in the fleet."""
    step_seconds: float | None
    """Interval of evaluations; ``None``: as in the fleet."""

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(board.node for board in self.boards))


class _Builder:
    """Makes a shape; numbers its boards in the order of their use."""

    def __init__(self, raw: dict[str, Any], file: str) -> None:
        self.raw, self.file = raw, file
        self.name: str = raw["name"]
        self.lasts = seconds(raw["lasts"])
        self.boards: list[Board] = []
        self.named: dict[str, Board] = {}
        self.taken: dict[str, int] = {}

    def board(self, name: str | None = None) -> Board:
        if name is not None and name in self.named:
            return self.named[name]
        number = len(self.boards)
        made = Board(
            node=f"{self.name}-n{number // GPUS_PER_NODE}",
            index=number % GPUS_PER_NODE,
            uuid=f"GPU-{self.name}-{name or number}",
            model=self.raw.get("model", "NVIDIA H100 80GB HBM3"),
            price=self.raw.get("price", 3.0),
            currency=self.raw.get("currency", "USD"),
        )
        self.boards.append(made)
        if name is not None:
            self.named[name] = made
        return made

    def shape(self) -> Shape:
        raw = self.raw
        exporter = raw.get("exporter", {})
        outages = tuple(outage for item in exporter.get("outages", ()) for outage in _outages(item))
        workloads = tuple(self.workload(item) for item in raw["workloads"])
        for _ in range(raw.get("free", 0)):
            self.board()
        return Shape(
            name=self.name,
            why=" ".join(raw["why"].split()),
            file=self.file,
            lasts=self.lasts,
            metadata_from=seconds(raw.get("metadata_from", 0)) if raw.get("metadata", True) else math.inf,
            workloads=_estimated(workloads),
            sharers={
                f"GPU-{self.name}-{board}": {alert: _expected(text) for alert, text in alerts.items()}
                for board, alerts in raw.get("sharers", {}).items()
            },
            boards=tuple(self.boards),
            agents={alert: _expected(text) for alert, text in exporter.get("alerts", {}).items()},
            outages=outages,
            lost=_loss(exporter.get("lost", 0)),
            free=raw.get("free", 0),
            scrape_seconds=seconds(raw["scrapes"]) if "scrapes" in raw else None,
            step_seconds=seconds(raw["evaluations"]) if "evaluations" in raw else None,
        )

    def workload(self, raw: dict[str, Any]) -> Workload:
        namespace = raw.get("namespace", self.name)
        waste = None
        if raw.get("waste", "unknown") != "unknown":
            start, _, end = str(raw["waste"]).partition("..")
            waste = (seconds(start), seconds(end) if end else self.lasts)
        return Workload(
            namespace=namespace,
            kind=raw.get("kind", "Job"),
            name=raw["name"],
            team=raw.get("team", ""),
            policy=raw.get("class", ""),
            pods=tuple(pod for item in raw["pods"] for pod in self.pods(item, namespace, raw["name"])),
            waste=waste,
            judged=raw.get("waste") != "unknown",
            alerts={alert: _expected(text) for alert, text in raw.get("alerts", {}).items()},
        )

    def pods(self, raw: dict[str, Any], namespace: str, of: str) -> Iterator[Pod]:
        start, stop = seconds(raw.get("from", 0)), seconds(raw.get("to", self.lasts))
        lives = seconds(raw.get("lives", stop - start))
        apart = seconds(raw.get("apart", 0))
        for number in range(raw.get("count", 1)):
            name = raw.get("name", of) + (f"-{number}" if raw.get("count", 1) > 1 else "")
            boards = [self.board(raw.get("gpu")) for _ in range(len(raw.get("each", ())) or raw.get("gpus", 1))]
            at, life = start, 0
            while at < stop:
                called = name if raw.get("same_name") or "lives" not in raw else f"{name}-{life}"
                end = min(stop, at + lives)
                owner = called if raw.get("jobs") else of
                yield self.pod(raw, boards, (namespace, called, f"uid-{namespace}-{name}-{at:.0f}", owner), (at, end))
                at, life = end + apart, life + 1

    def pod(
        self, raw: dict[str, Any], boards: list[Board], named: tuple[str, str, str, str], span: tuple[float, float]
    ) -> Pod:
        namespace, name, uid, owner = named
        begin, end = span
        scripts = raw.get("each") or [raw["activity"]] * len(boards)
        off = raw.get("alerts_off_until")
        profile = raw.get("mig", "")
        return Pod(
            namespace=namespace,
            name=name,
            uid=uid,
            start=begin,
            end=end,
            running_from=begin + seconds(raw.get("running_from", 0)),
            resource=raw.get("resource", f"nvidia.com/mig-{profile}" if profile else "nvidia.com/gpu"),
            owner=owner,
            alerts_off_until=None if off is None else NEVER_ENDS if off == "ever" else seconds(off),
            uses=tuple(self.use(raw, board, script, span, name) for board, script in zip(boards, scripts, strict=True)),
        )

    def use(self, raw: dict[str, Any], board: Board, script: Any, span: tuple[float, float], pod: str) -> Use:  # noqa: ANN401 - YAML
        part = track(script, *span)
        share = float(raw.get("share", 1.0))
        profile = raw.get("mig", "")
        instance = ""
        if profile:
            instance = str(self.taken.setdefault(f"{board.uuid}/{pod}", len(self.taken) + 1))
        shared = share < 1 and not profile
        activity = combine([part], lambda values: _of_share(values[0], share)) if shared else part
        return Use(
            board=board,
            device_uuid=f"MIG-{self.name}-{instance}" if profile else board.uuid,
            instance=instance,
            profile=profile,
            share=share,
            mode="mig" if profile else "shared" if shared else "exclusive",
            source=raw.get("source", "process_samples" if shared else "engine"),
            activity=activity,
            part=part,
            util=None if profile else track(raw["util"], *span) if "util" in raw else part,
            engine=track(raw["engine"], *span) if "engine" in raw else part,
            near=track(raw.get("effective", "?"), *span),
        )


def _outages(raw: dict[str, Any]) -> Iterator[Outage]:
    """Yield one outage, or outages of the same length at intervals of ``every`` until ``until``."""
    start, end = seconds(raw["from"]), seconds(raw["to"])
    every, until = seconds(raw.get("every", 0)), seconds(raw.get("until", 0))
    yield Outage(what=raw["what"], start=start, end=end)
    for number in range(1, int((until - end) // every) + 1 if every else 1):
        yield Outage(what=raw["what"], start=start + number * every, end=end + number * every)


def _loss(raw: int | str) -> Loss:
    """Read ``3`` (each third) or ``5 %`` (at random)."""
    return Loss(part=float(raw.removesuffix("%")) / 100) if isinstance(raw, str) else Loss(every=raw)


def _of_share(value: float | None, share: float) -> float | None:
    return None if value is None else min(1.0, value / share)


def _estimated(workloads: tuple[Workload, ...]) -> tuple[Workload, ...]:
    """Give sharers with an estimated part the activity of the whole device; all have the same utilisation."""
    uses = [use for workload in workloads for pod in workload.pods for use in pod.uses]
    whole = {
        board: combine([use.part for use in uses if use.board.uuid == board and use.mode == "shared"], total)
        for board in {use.board.uuid for use in uses if use.mode == "shared"}
    }

    def seen(use: Use) -> Use:
        if use.mode != "shared":
            return use
        of_device = whole[use.board.uuid]
        use = replace(use, util=of_device, engine=of_device)
        if use.source != "estimated":
            return use
        by_share = combine([of_device], lambda values: None if values[0] is None else values[0] * use.share)
        return replace(use, activity=of_device, part=by_share)

    return tuple(
        replace(
            workload,
            pods=tuple(replace(pod, uses=tuple(seen(use) for use in pod.uses)) for pod in workload.pods),
        )
        for workload in workloads
    )


def _expected(text: str) -> Expected:
    text, pauses = text.removesuffix(" pauses"), text.endswith(" pauses")
    severity, _, times = text.rpartition(" ")
    earliest, latest, *rest = times.split("..")
    return Expected(
        severity=severity,
        earliest=seconds(earliest),
        latest=math.inf if latest == "never" else seconds(latest),
        resolved=seconds(rest[0]) if rest else None,
        pauses=pauses,
    )


def shape_of(raw: dict[str, Any], file: str = "") -> Shape:
    """Return a shape from its description in a file."""
    return _Builder(raw, file).shape()


def load(folder: Path = FOLDER) -> tuple[Shape, ...]:
    """Return all shapes, in the order of files and within them."""
    return tuple(
        shape_of(raw, path.name)
        for path in sorted(folder.glob("*.yaml"))
        for raw in read_yaml(path.read_text(encoding="utf-8"))
    )
