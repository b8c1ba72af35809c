"""What owners hold and use now: the figures that alert rules judge."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from exporter.model.ledger import Owner

WINDOWS: Mapping[str, float] = {"15m": 900.0, "30m": 1800.0, "1h": 3600.0, "2h": 7200.0, "24h": 86400.0}
"""Activity windows in seconds, by the value of the label ``window``."""
_OF_POLICY = {"batch": "30m", "interactive": "2h", "inference": "24h"}
"""The window by which a policy is judged, where it is not the hour that all show."""


@cache
def shown_windows(policy: str) -> frozenset[str]:
    """Return the windows that an owner shows: 15 minutes, an hour, and the one by which its policy is judged.

    An owner that holds nothing now has no policy, and shows all: its next pods may run elsewhere.
    """
    return frozenset({"15m", "1h", _OF_POLICY.get(policy, "1h")} if policy else WINDOWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerUse:
    """One owner's use of the node. GPUs are share-weighted: a MIG instance or a replica is a part of one.

    What was only estimated (divided by share) is in no figure but ``gpus``, ``estimated_gpus``, the age, the policy,
    the opt-out and ``cost_per_hour``.
    """

    owner: Owner
    """Never provisional; a pod whose workload is not known is its own owner (kind ``Pod``)."""
    active_seconds: Mapping[str, float] = field(default_factory=dict)
    """Active GPU-seconds by window, ended holders included; a window in which nothing was measured is absent."""
    measured_seconds: Mapping[str, float] = field(default_factory=dict)
    """Active and idle GPU-seconds by window; absent where they are 0 and nothing is held that could be measured."""
    gpus: float | None = None
    """GPUs held now; ``None``, as all that follows, where the owner holds nothing now."""
    estimated_gpus: float | None = None
    """Of those: parts of shared devices whose activity was only estimated of late; ``None`` where there is none."""
    underused_gpus: float | None = None
    """GPUs whose own activity is low; ``None`` where there is none."""
    unused_gpus: Mapping[str, float] = field(default_factory=dict)
    """GPUs that did nothing over a window; a window without any is absent."""
    active_gpus: float | None = None
    """GPUs at work; ``None`` where the activity of none was measured."""
    idle_for_seconds: float | None = None
    """Shortest time for which a device has been idle; ``None`` where it is not known of any."""
    age_seconds: float | None = None
    """Longest time for which a device has been held."""
    policy: str = ""
    """The most patient class of the owner's pods; empty where the owner holds nothing now."""
    opt_out_until_seconds: float | None = None
    """Unix time of the latest opt-out of the pods; ``inf`` is for good."""
    cost_per_hour: Mapping[str, float] = field(default_factory=dict)
    """Price now of what is held now, by currency; GPUs without a price are left out."""
    idle_cost_per_hour: Mapping[str, float] = field(default_factory=dict)
    """The part of it for the idle part of the last 15 minutes; what was not measured is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Physical GPUs of one model on the node, those that are down among them."""

    model: str
    gpus: int
    unallocated_gpus: float | None = None
    """GPUs, by share, that nobody holds; ``None`` while it is not known of any of them who holds it."""
    unallocated_cost_per_hour: Mapping[str, float] = field(default_factory=dict)
    """By currency; GPUs without a price are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedIdle:
    """A shared device that is idle as a whole, where nobody can tell which of its holders works."""

    gpu_index: int
    uuid: str
    gpu_instance: str = ""
    """GPU instance id of a MIG instance; empty for a whole GPU."""
    gpus: float
    """Part of the physical GPU that is held with an estimated activity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersView:
    """Owners, pools and shared devices at one instant."""

    owners: tuple[OwnerUse, ...] = ()
    pools: tuple[PoolUse, ...] = ()
    shared_idle: tuple[SharedIdle, ...] = ()
