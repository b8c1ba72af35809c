"""A suggestion, and the measured use of one device by one workload that suggestions are made from."""

from dataclasses import dataclass
from typing import Literal

Advice = Literal["give-back", "fewer-gpus", "share", "smaller-mig", "smaller-model"]
RiskLevel = Literal["low", "medium", "high"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """How a workload used one device over the window, from the hourly evidence series."""

    cluster: str
    node: str
    uuid: str
    gpu_instance: str = ""
    mig_profile: str = ""
    model: str
    namespace: str
    kind: str
    workload: str
    team: str = ""
    share_ratio: float
    """Its part of the physical GPU."""
    held_hours: float
    measured_hours: float
    mean_ratio: float | None
    """Activity over the measured hours, 0-1 of its part; ``None`` where nothing was measured."""
    p95_ratio: float | None
    """95 % of the hours were no busier."""
    peak_ratio: float | None
    """Of the busiest hour."""
    peak_memory_bytes: float | None
    memory_total_bytes: float | None
    """Of the device: the whole GPU's or the instance's."""
    estimated: bool = False
    """Its part of a shared device was divided by share, and says nothing of it alone."""
    still_held: bool = True
    """Held when the window ended, and for most of its last day: what else was held is the past."""
    policy: str = ""
    """``inference`` or ``reserved`` where its pods say so: see docs/runbook.md on classes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One suggestion to one workload."""

    advice: Advice
    cluster: str
    namespace: str
    kind: str
    workload: str
    team: str = ""
    model: str
    title: str
    """What to do, in one sentence: ``Give back 3 of 8 H100``."""
    gpus: float
    """How many physical GPUs would become free, by share."""
    currency: str = ""
    per_month: float | None = None
    """Money of 730 hours at the mean price paid over the window; ``None`` where there was no price."""
    evidence: tuple[str, ...]
    """Measured facts, one sentence each, with window and coverage."""
    risk: str
    """What could go wrong if it were followed, and how to try it."""
    risk_level: RiskLevel
    devices: tuple[str, ...] = ()
    """UUIDs that it is about."""
    nodes: tuple[str, ...] = ()
    """Where these devices are, each once."""
