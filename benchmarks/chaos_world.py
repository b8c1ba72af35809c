"""The truth of a node under chaos: a scenario of the simulator, made from a schedule."""

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from chaos_schedule import GPU_HANG, Act, Injection

from gpu_simulator import scenario, scenario_file
from gpu_simulator.truth import Fault, NodeTruth

NODE = "sim-chaos"
MIG_GPU = 2
STEADY = {"steady": (0.8, 0.8), "half-a": (0.7, 1.0), "half-b": (0.4, 0.7)}
"""Pods that exist throughout, and their least and greatest activity. Until the driver reports processes, both holders
of the shared GPU get the same estimate.
"""
INSTANCE_TYPE = "sim.chaos"
EXACT_SECONDS = 0.02
"""Time within which all queries get the same answer."""


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


def _scenario(injections: tuple[Injection, ...]) -> str:
    """Return the scenario file; the gap between two pods on a GPU exceeds that between two process samples."""
    pods = [
        _pod("steady", {"gpu": 0}, 0.8, owner={"kind": "StatefulSet", "name": "steady"}),
        _pod("short", {"gpu": 1}, 0.9, owner={"kind": "Job", "name": "short"}, start=0.3, end=3.3, every=5.5),
        _pod(
            "half-a", {"gpu": 3, "replicas": [0]}, 0.5, owner={"kind": "DaemonSet", "name": "half"}, mix=_DECODES_JPEG
        ),
        _pod("half-b", {"gpu": 3, "replicas": [1]}, 0.2, mix=_DECODES_JPEG),
        _pod("slice", {"gpu": MIG_GPU, "mig": 0}, 0.6, mix=_DECODES),
        _pod(
            "part",
            {"gpu": MIG_GPU, "mig": 1},
            0.7,
            owner={"kind": "Job", "name": "part"},
            start=0.4,
            end=3.4,
            every=5.5,
        ),
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
        {"model": "h100", "mig": ["3g.40gb", "3g.40gb"]},
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Data from which a child answers as the node's driver."""

    epoch_unix: float
    epoch_monotonic: float
    """Start of the world's time, on the monotonic clock."""
    scenario: str

    def write(self, path: Path) -> None:
        """Write the plan for other processes."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> "Plan":
        """Return the plan that ``write`` has written."""
        return Plan(**json.loads(path.read_text(encoding="utf-8")))


def plan(injections: tuple[Injection, ...], *, epoch_unix: float, epoch_monotonic: float) -> Plan:
    """Make the plan of all injections; their times are seconds since the epoch."""
    return Plan(epoch_unix=epoch_unix, epoch_monotonic=epoch_monotonic, scenario=_scenario(injections))


class World:
    """The node at any instant of its time."""

    def __init__(self, made: Plan) -> None:
        self.plan = made
        built = scenario.build(scenario_file.parse(made.scenario, source="chaos.yaml"))
        self._at = lru_cache(maxsize=4096)(lambda ticks: built.at(ticks * EXACT_SECONDS))

    def at(self, t: float) -> NodeTruth:
        """Return the node ``t`` seconds after the epoch, within a hundredth of a second."""
        return self._at(round(max(0.0, t) / EXACT_SECONDS))
