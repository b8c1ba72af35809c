"""Values of the ledger: owners, accounts, seconds, joules and money."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from exporter.model.attribution import HolderKey, ShareMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who pays. Without Kubernetes metadata the namespace alone; empty parts are not known."""

    namespace: str = ""
    kind: str = ""
    """``Job``, ``Deployment``, ... or one of ours: ``Unallocated``, ``Unattributed``."""
    name: str = ""
    team: str = ""
    cost_labels: str = ""
    """``key=value`` pairs sorted by key and joined with commas: in the ledger only, windows go without them."""
    provisional: bool = False
    """Stands for a pod with an owner that will be known soon; shown nowhere, and entered at that owner then."""
    pod_uid: str = ""
    """Of that pod, as far as it is known; empty for every other owner."""

    @property
    def without_cost_labels(self) -> "Owner":
        """Return the owner as everything but the ledger has it."""
        return replace(self, cost_labels="") if self.cost_labels else self


PLATFORM_NAMESPACES = frozenset(
    {
        "kube-system",
        "gpu-operator",
        "nvidia-gpu-operator",
        "cw-hpc-verification",
        "kai-resource-reservation",
        "runai-reservation",
    }
)
"""Namespaces of what holds GPUs for others: alerts and advice on waste leave them out."""

UNALLOCATED = Owner(kind="Unallocated")
"""GPU time without a holder: free GPUs and MIG instances, free replicas, stranded slices. The platform's."""
UNATTRIBUTED = Owner(kind="Unattributed")
"""GPU time of which it is not known who held it, or that was used by no listed pod."""


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

    @property
    def key(self) -> HolderKey:
        """Container and device."""
        return self.device_uuid, self.namespace, self.pod, self.container


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """One holder's (or no holder's) part of one physical GPU over one interval.

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
    estimated: bool = False
    """Whether activity was only estimated: divided by share among the holders of a device."""

    @property
    def allocated_seconds(self) -> float:
        """Active, idle and unknown, always."""
        return self.active_seconds + self.idle_seconds + self.unknown_seconds

    def part(self, ratio: float) -> "Portion":
        """Return the portion for a part of its interval, 0..1, with use and energy spread evenly over the interval."""
        return replace(
            self,
            active_seconds=self.active_seconds * ratio,
            idle_seconds=self.idle_seconds * ratio,
            unknown_seconds=self.unknown_seconds * ratio,
            energy_joules=None if self.energy_joules is None else self.energy_joules * ratio,
            interval_seconds=None if self.interval_seconds is None else self.interval_seconds * ratio,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Money:
    """Cost in one currency, by the state of the seconds that it is for."""

    active: float = 0.0
    idle: float = 0.0
    unknown: float = 0.0

    @property
    def total(self) -> float:
        """Sum over the states."""
        return self.active + self.idle + self.unknown

    def __add__(self, other: "Money") -> "Money":
        """Return the sum of two amounts in the same currency, by state."""
        return Money(
            active=self.active + other.active, idle=self.idle + other.idle, unknown=self.unknown + other.unknown
        )


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

    def __add__(self, other: "Totals") -> "Totals":
        """Return the sum of both, currency by currency."""
        money = dict(self.money)
        for currency, amount in other.money.items():
            money[currency] = money[currency] + amount if currency in money else amount
        return Totals(
            active_seconds=self.active_seconds + other.active_seconds,
            idle_seconds=self.idle_seconds + other.idle_seconds,
            unknown_seconds=self.unknown_seconds + other.unknown_seconds,
            energy_joules=self.energy_joules + other.energy_joules,
            energy_unknown_seconds=self.energy_unknown_seconds + other.energy_unknown_seconds,
            money=money,
            unpriced_seconds=self.unpriced_seconds + other.unpriced_seconds,
        )


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
class ShownLedger:
    """The sums of one ledger: under its identity they begin at 0, never go back and have one writer."""

    identity: str
    created_at_seconds: float
    """Unix time at which it began."""
    capacity_seconds: float = 0.0
    """GPU-seconds metered: the sum of all intervals of all GPUs, without those of owners that are not known yet."""
    accounts: Mapping[Account, Totals] = field(default_factory=dict)
    """Every owner since it began; none that is provisional."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """The ledgers of a node at one instant, as they are to be shown.

    At every instant the accounts' allocated seconds and ``withheld_seconds`` sum to ``capacity_seconds``.
    """

    ledgers: tuple[ShownLedger, ...] = ()
    """The one that is on disk, a memory-only one while the disk fails, and those that have ended within 25 hours."""
    pods: Mapping[PodAccount, Totals] = field(default_factory=dict)
    """Containers that hold a device, and for the time of lingering those that did."""
    conservation_error_seconds: float = 0.0
    """Sum over GPUs and intervals of |sum of the parts - the interval|."""
    withheld_seconds: float = 0.0
    """Allocated seconds of owners that are not known yet."""
    saved_at_seconds: float | None = None
    """Unix time of the save that these totals are from; ``None`` where they are from memory."""
    state_problem: str = ""
    """One line: why the totals are not on disk and how to fix it; empty when all is well or none was asked for."""

    @property
    def capacity_seconds(self) -> float:
        """GPU-seconds metered: the sum of all intervals of all GPUs."""
        return sum((ledger.capacity_seconds for ledger in self.ledgers), self.withheld_seconds)

    @property
    def accounts(self) -> Mapping[Account, Totals]:
        """Every owner's totals, summed over the ledgers."""
        if len(self.ledgers) == 1:
            return self.ledgers[0].accounts
        summed: dict[Account, Totals] = {}
        for ledger in self.ledgers:
            for account, totals in ledger.accounts.items():
                summed[account] = summed[account] + totals if account in summed else totals
        return summed

    @property
    def started_at_seconds(self) -> float | None:
        """Unix time at which the oldest of the ledgers began; ``None`` where there is none."""
        return min((ledger.created_at_seconds for ledger in self.ledgers), default=None)


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
    """Never provisional; a pod with an unknown workload is its own owner (kind ``Pod``)."""
    active_seconds: Mapping[str, float] = field(default_factory=dict)
    """Active GPU-seconds by window, ended holders included; a window in which nothing was measured is absent."""
    measured_seconds: Mapping[str, float] = field(default_factory=dict)
    """Active and idle GPU-seconds by window; absent where they are 0 and nothing is held that could be measured."""
    gpus: float | None = None
    """GPUs held now; ``None``, as all that follows, where the owner holds nothing now."""
    estimated_gpus: float | None = None
    """Of those: parts of shared devices with recent activity that was only estimated; ``None`` without any."""
    underused_gpus: float | None = None
    """GPUs with low own activity; ``None`` without any."""
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
    """GPUs without a holder, by share; ``None`` while the allocation of all of them is unknown."""
    unallocated_cost_per_hour: Mapping[str, float] = field(default_factory=dict)
    """By currency; GPUs without a price are left out."""
    unpriced_gpus: int = 0
    """GPUs without a known price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerXid:
    """An Xid that a program caused on a device, and a pod that held the device then."""

    owner: Owner
    gpu_index: int
    device_uuid: str
    namespace: str
    pod: str
    xid: int
    at_seconds: float
    """Unix time of its newest event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedIdle:
    """A shared device that is idle as a whole and has only estimated activity of its holders."""

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
    broken_gpus: Mapping[Owner, int] = field(default_factory=dict)
    """Physical GPUs with a critical fault that an owner holds, or held not long ago; an owner without one is absent."""
    xids: tuple[OwnerXid, ...] = ()
    """Of the last minutes."""
