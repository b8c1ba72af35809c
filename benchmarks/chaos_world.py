"""The truth of a node under chaos: scenarios made from a schedule, one after the other as its MIG layout changes."""

import json
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaos_schedule import GPU_HANG, Act, Injection

from gpu_simulator import scenario, scenario_file
from gpu_simulator.truth import Fault, Load, NodeTruth

if TYPE_CHECKING:
    from gpu_simulator.scenario import Scenario

NODE = "sim-chaos"
MIG_GPU = 2
STEADY = {"steady": (0.8, 0.8), "half-a": (0.7, 1.0), "half-b": (0.4, 0.7)}
"""Pods that are there throughout, and what part of their time they are busy throughout; where the driver has not told
of processes yet, those who share a GPU are estimated to be as busy as the other."""
INSTANCE_TYPE = "sim.chaos"
_LAYOUTS = (["3g.40gb", "3g.40gb"], ["2g.20gb", "1g.10gb", "1g.10gb"])
EXACT_SECONDS = 0.02
"""Whoever asks twice within this gets one answer."""


HELD_MODEL = "NVIDIA H200"
"""The model of GPUs 0 and 3, which steady pods hold throughout: no second of this model is ever unallocated."""
_DECODES = {"engine": 0.05, "sm": 0.03, "utilisation": 0.05, "decode": 1.0}
_DECODES_JPEG = {"engine": 0.05, "sm": 0.03, "utilisation": 0.05, "jpeg": 1.0}


def _pod(name: str, device: dict[str, Any], activity: float, **more: object) -> dict[str, Any]:
    return {
        "namespace": "chaos",
        "name": name,
        "start": -100,
        "devices": [device],
        "activity": activity,
        "memory_mib": 4096,
        **more,
    }


def _plan(segment: int, since: float, injections: tuple[Injection, ...] = ()) -> str:
    """Scenario file of one segment: who is on the partitioned GPU is there in this segment only.

    Between two pods on one GPU is more time than between two looks at its processes (1.9 s).
    """
    short = {"start": since + 0.4, "end": since + 3.4, "every": 5.5}
    pods = [
        _pod("steady", {"gpu": 0}, 0.8, owner={"kind": "StatefulSet", "name": "steady"}),
        _pod("short", {"gpu": 1}, 0.9, owner={"kind": "Job", "name": "short"}, start=0.3, end=3.3, every=5.5),
        _pod(
            "half-a", {"gpu": 3, "replicas": [0]}, 0.5, owner={"kind": "DaemonSet", "name": "half"}, mix=_DECODES_JPEG
        ),
        _pod("half-b", {"gpu": 3, "replicas": [1]}, 0.2, mix=_DECODES_JPEG),
        _pod(f"slice-{segment}", {"gpu": MIG_GPU, "mig": 0}, 0.6, start=since - (0 if segment else 100), mix=_DECODES),
        _pod(f"part-{segment}", {"gpu": MIG_GPU, "mig": 1}, 0.7, owner={"kind": "Job", "name": "part"}, **short),
    ]
    known = {GPU_HANG: Fault.HANG.value} | {one.value: one.value for one in Fault}
    faults = [
        {"kind": known[one.kind], "from": one.at, "to": one.end}
        | ({"gpu": one.gpu} if one.gpu is not None else {})
        | ({"seconds": one.parameter} if one.parameter else {})
        for one in injections
        if one.kind in known
    ]
    xids = [{"gpu": one.gpu, "code": int(one.parameter), "at": one.at} for one in injections if one.kind == Act.XID]
    gpus = [
        {"model": "h200"},
        {"model": "h100"},
        {"model": "h100", "mig": _LAYOUTS[segment % len(_LAYOUTS)]},
        {"model": "h200", "sharing": {"strategy": "time-slicing", "replicas": 2}},
    ]
    return json.dumps(
        {
            "description": "a node under chaos",
            "node": NODE,
            "runtime": "mixed",
            "other_pods": 3,
            "node_labels": {"node.kubernetes.io/instance-type": INSTANCE_TYPE},
            "gpus": gpus,
            "pods": pods,
            "faults": faults,
            "xids": xids,
        }
    )


def switches(injections: tuple[Injection, ...]) -> tuple[float, ...]:
    """When the MIG layout changes: at the begin and at the end of each reconfiguration."""
    marks = sorted({mark for one in injections if one.kind == Act.MIG for mark in (one.at, one.end)})
    return tuple(mark for number, mark in enumerate(marks) if not number or mark - marks[number - 1] > EXACT_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a child needs to know to answer as the node's driver."""

    epoch_unix: float
    epoch_monotonic: float
    """The world's time begins here; it is told by the clock that nobody sets."""
    faults: str
    """Scenario file with the driver's faults, which are those of all segments: a child reads them once as it starts."""
    segments: tuple[tuple[float, str], ...]
    """(since, scenario file) in order."""

    def write(self, path: Path) -> None:
        """Keep it for other processes."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> "Plan":
        """What ``write`` has kept."""
        data = json.loads(path.read_text(encoding="utf-8"))
        segments = tuple((float(since), str(text)) for since, text in data["segments"])
        return Plan(
            epoch_unix=data["epoch_unix"],
            epoch_monotonic=data["epoch_monotonic"],
            faults=data["faults"],
            segments=segments,
        )


def plan(injections: tuple[Injection, ...], *, epoch_unix: float, epoch_monotonic: float) -> Plan:
    """Make the plan of everything that is to happen; injections at seconds since the epoch."""
    since = (0.0, *switches(injections))
    segments = tuple((at, _plan(number, at)) for number, at in enumerate(since))
    faults = _plan(0, 0.0, injections)
    return Plan(epoch_unix=epoch_unix, epoch_monotonic=epoch_monotonic, faults=faults, segments=segments)


class World:
    """The node at any instant of its time."""

    def __init__(self, made: Plan) -> None:
        self.plan = made
        everywhere = scenario_file.parse(made.faults, source="faults.yaml")
        self._parts: list[tuple[float, Scenario]] = []
        for number, (since, text) in enumerate(made.segments):
            own = scenario_file.parse(text, source=f"segment-{number}.yaml")
            part = scenario.build(replace(own, faults=everywhere.faults, xids=everywhere.xids))
            self._parts.append((since, part))
        self._offsets = self._made_steady()
        self._at = lru_cache(maxsize=4096)(self._exactly)

    def at(self, t: float) -> NodeTruth:
        """The node ``t`` seconds after the epoch, give or take a hundredth."""
        return self._at(round(max(0.0, t) / EXACT_SECONDS))

    def _exactly(self, ticks: int) -> NodeTruth:
        t = ticks * EXACT_SECONDS
        number = max(n for n, (since, _) in enumerate(self._parts) if since <= t or not n)
        return self._shifted(self._parts[number][1].at(t), number)

    def _made_steady(self) -> list[tuple[float, Load]]:
        """What energy and integrals of the partitioned GPU must be moved by, so that no layout takes any back."""
        offsets = [(0.0, Load())]
        for number in range(1, len(self._parts)):
            since, after = self._parts[number]
            before = self._parts[number - 1][1].at(since).gpus[MIG_GPU]
            new = after.at(since).gpus[MIG_GPU]
            joules, load = offsets[-1]
            moved = _sum(load, _sum(before.load_integral, new.load_integral, -1.0))
            offsets.append((joules + before.energy_joules - new.energy_joules, moved))
        return offsets

    def _shifted(self, truth: NodeTruth, number: int) -> NodeTruth:
        joules, load = self._offsets[number]
        gpus = tuple(
            replace(gpu, energy_joules=gpu.energy_joules + joules, load_integral=_sum(gpu.load_integral, load))
            if gpu.index == MIG_GPU
            else gpu
            for gpu in truth.gpus
        )
        return replace(truth, gpus=gpus)


def _sum(one: Load, other: Load, sign: float = 1.0) -> Load:
    sums = {each.name: getattr(one, each.name) + sign * getattr(other, each.name) for each in fields(Load)}
    return Load(**{**sums, "memory_used_bytes": one.memory_used_bytes})
