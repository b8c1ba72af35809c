"""Who is charged for what: owners, accounts, and the seconds, joules and money that stand on them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from exporter.model.holders import ShareMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who pays. Without Kubernetes metadata the namespace alone; empty parts are not known."""

    namespace: str = ""
    kind: str = ""
    """``Job``, ``Deployment``, ... or one of ours: ``Unallocated``, ``Unattributed``, ``Other``."""
    name: str = ""
    team: str = ""
    provisional: bool = False
    """Stands for a pod whose owner will be known soon; shown nowhere, and entered at that owner then."""


UNALLOCATED = Owner(kind="Unallocated")
"""GPU time that nobody held: free GPUs and MIG instances, free replicas, stranded slices. The platform's."""
UNATTRIBUTED = Owner(kind="Unattributed")
"""GPU time of which it is not known who held it, or that was used by no listed pod."""
OTHER = Owner(kind="Other")
"""Where ended owners are folded to when there are more than the ledger may hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A line of the ledger: an owner's use of one model in one mode."""

    owner: Owner
    model: str
    """As NVML names it: ``NVIDIA H100 80GB HBM3``."""
    mode: ShareMode


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAccount:
    """A container on a device, as its series are labelled; another pod under the same name is another account."""

    device_uuid: str
    """Of the whole GPU or the MIG instance."""
    gpu_index: int
    gpu_uuid: str
    """Of the physical GPU."""
    gpu_instance: str = ""
    """GPU instance id of a MIG instance; empty for a whole GPU."""
    mig_profile: str = ""
    model: str
    namespace: str
    pod: str
    container: str
    pod_uid: str | None = None
    """``None`` where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """One holder's (or nobody's) part of one physical GPU over one interval.

    The portions of a GPU over an interval sum to the interval: active + idle + unknown seconds over all of them is
    the interval's length, energy the GPU's. Seconds are share-weighted GPU-seconds.
    """

    gpu_uuid: str
    account: Account
    pod: PodAccount | None = None
    """Who held it; ``None`` for Unallocated and Unattributed."""
    active_seconds: float = 0.0
    idle_seconds: float = 0.0
    unknown_seconds: float = 0.0
    energy_joules: float | None = None
    """``None`` where the GPU's energy was not measured over the interval."""
    interval_seconds: float | None = None
    """Length of the interval that the portions of the GPU share: what their seconds must sum to."""

    @property
    def allocated_seconds(self) -> float:
        """Active, idle and unknown, always."""
        return self.active_seconds + self.idle_seconds + self.unknown_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """Cost in one currency; ``idle`` is the part of ``total`` for idle seconds."""

    total: float = 0.0
    idle: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What has been added up on one account or for one pod; never decreases."""

    active_seconds: float = 0.0
    idle_seconds: float = 0.0
    unknown_seconds: float = 0.0
    energy_joules: float = 0.0
    energy_unknown_seconds: float = 0.0
    """Allocated seconds for which energy was not measured; where these are all, joules are not known rather than 0."""
    money: Mapping[str, Money] = field(default_factory=dict)
    """By ISO 4217 currency; a currency in which nothing was priced is absent."""
    unpriced_seconds: float = 0.0
    """Allocated seconds for which there was no price; part of the seconds above."""

    @property
    def allocated_seconds(self) -> float:
        """Active, idle and unknown, always."""
        return self.active_seconds + self.idle_seconds + self.unknown_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one hour of one physical GPU costs now, and how that is known."""

    per_hour: float
    currency: str
    source: str
    """Name of the price book and row, as label value: ``book:row``."""
    as_of: str
    """ISO date of the row's source."""
    per_kwh: float = 0.0
    """On top, per measured kilowatt-hour of the GPU (what cooling takes included); 0 where the hour covers it."""
    fallback: bool = False
    """From the bundled list-price book, because the user's had no match."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """The ledger at one instant, as it is to be shown.

    A series that was born a moment ago shows zeros, so that ``increase()`` sees its first step; the difference is shown
    as soon as it has been seen by two scrapes. At every instant the accounts' allocated seconds and
    ``withheld_seconds`` sum to ``capacity_seconds``.
    """

    accounts: Mapping[Account, Totals] = field(default_factory=dict)
    """Every owner since the ledger began; none that is provisional."""
    pods: Mapping[PodAccount, Totals] = field(default_factory=dict)
    """Containers that hold a device, and for the time of lingering those that did."""
    conservation_error_seconds: float = 0.0
    """Sum over GPUs and intervals of |sum of the parts - the interval|."""
    capacity_seconds: float = 0.0
    """GPU-seconds metered: the sum of all intervals of all GPUs."""
    withheld_seconds: float = 0.0
    """Allocated seconds of accounts that still show zeros, or whose owner is not known yet."""
    started_at_seconds: float = 0.0
    """Unix time from which the ledger counts."""
    saved_at_seconds: float | None = None
    """Unix time of the save that these totals are from; ``None`` where they are from memory."""
    state_problem: str = ""
    """One line: why the totals are not on disk and how to mend it; empty when all is well or none was asked for."""
