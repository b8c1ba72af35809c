"""Values of the ledger: accounts, seconds, joules and money, and the use of owners."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from exporter.model.attribution import HolderKey, Owner, ShareMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """An account of the ledger: use of one model in one mode by an owner."""

    owner: Owner
    model: str
    """Name of the model in NVML: ``NVIDIA H100 80GB HBM3``."""
    mode: ShareMode


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAccount:
    """Account of a container on a device, with the labels of its series; pods with the same name have separate ones."""

    device_uuid: str
    """UUID of the whole GPU or the MIG instance."""
    gpu_index: int
    gpu_uuid: str
    """UUID of the physical GPU."""
    gpu_instance: str = ""
    """GPU instance id of a MIG instance; empty for a whole GPU."""
    mig_profile: str = ""
    model: str
    namespace: str
    pod: str
    container: str
    pod_uid: str | None = None
    """UID of the pod; ``None`` if unknown."""

    @property
    def key(self) -> HolderKey:
        """Container and device."""
        return self.device_uuid, self.namespace, self.pod, self.container


class Bottleneck(StrEnum):
    """The kind of resource that limits active time; a label value of ``gpu_bottleneck``."""

    COMPUTE = "compute"
    """An arithmetic pipe: tensor, FP64, FP32, FP16 or integer."""
    MEMORY = "memory"
    """The device's own memory."""
    TRANSFER = "transfer"
    """NVLink, PCIe or C2C, in one direction."""
    VIDEO = "video"
    """A video, JPEG or optical-flow engine."""
    STARVED = "starved"
    """No resource is near its limit."""


RESOURCES = tuple(one for one in Bottleneck if one is not Bottleneck.STARVED)
"""Kinds of resources with a limit."""


class ResourceProfile(NamedTuple):
    """Use of a device's resources over a sample, as parts of their limits; only if all of them were measured.

    It is an upper bound on useful work, as a part of the maximum work of the device.
    """

    uses: tuple[float, ...]
    """Use of each of ``RESOURCES``, 0..1 of its limit and at most the activity."""
    bottleneck: Bottleneck
    sm_ratio: float | None = None
    """Mean part of the multiprocessors with work, 0..1; ``None`` if it was not measured."""

    @property
    def effective_ratio(self) -> float:
        """Use of the resource nearest to its limit."""
        return max(self.uses)


STATES = ("active_effective", "active_ineffective", "active_unprofiled", "idle", "unknown")
"""Values of the label ``state``, in the order of the fields of ``ByState``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByState:
    """Seconds, money or parts of a GPU, divided by the state of the time."""

    effective: float = 0.0
    """Effective part of the activity, by ``ResourceProfile.effective_ratio``."""
    ineffective: float = 0.0
    """Rest of the activity for which all resources were measured."""
    unprofiled: float = 0.0
    """Activity without a measurement of all resources."""
    idle: float = 0.0
    unknown: float = 0.0
    """Time without measured activity, neither active nor idle."""

    @property
    def active(self) -> float:
        """Sum of the effective, ineffective and unprofiled parts."""
        return self.effective + self.ineffective + self.unprofiled

    @property
    def profiled(self) -> float:
        """Sum of the effective and ineffective parts."""
        return self.effective + self.ineffective

    @property
    def measured(self) -> float:
        """Sum of the active and idle parts."""
        return self.active + self.idle

    @property
    def total(self) -> float:
        """Sum over all states."""
        return self.active + self.idle + self.unknown

    @property
    def active_ratio(self) -> float | None:
        """Active part of the measured part, 0..1 also for several GPUs; ``None`` without a measured part."""
        active = self.active
        return active / (active + self.idle) if active or self.idle else None

    @property
    def effective_ratio(self) -> float | None:
        """Effective part of the profiled part, 0..1; ``None`` without a profiled part."""
        profiled = self.profiled
        return self.effective / profiled if profiled else None

    @property
    def profiled_ratio(self) -> float | None:
        """Profiled part of the active part, 0..1: coverage of ``effective_ratio``; ``None`` without active time."""
        active = self.active
        return self.profiled / active if active else None

    def __add__(self, other: "ByState") -> "ByState":
        """Return the sum of both, state by state."""
        return ByState(
            effective=self.effective + other.effective,
            ineffective=self.ineffective + other.ineffective,
            unprofiled=self.unprofiled + other.unprofiled,
            idle=self.idle + other.idle,
            unknown=self.unknown + other.unknown,
        )

    def scaled(self, factor: float) -> "ByState":
        """Return the product of every part and a factor."""
        return ByState(
            effective=self.effective * factor,
            ineffective=self.ineffective * factor,
            unprofiled=self.unprofiled * factor,
            idle=self.idle * factor,
            unknown=self.unknown * factor,
        )

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Yield each of ``STATES`` with its figure."""
        figures = (self.effective, self.ineffective, self.unprofiled, self.idle, self.unknown)
        return zip(STATES, figures, strict=True)

    @classmethod
    def of(cls, figures: Mapping[str, float]) -> "ByState":
        """Return the figures of a mapping by ``STATES``; an absent state is 0."""
        return cls(**{_FIELD_OF_STATE[state]: figure for state, figure in figures.items()})


_FIELD_OF_STATE = dict(zip(STATES, ByState.__slots__, strict=True))
NO_SECONDS = ByState()
STATE_COLUMNS = ("active", *_FIELD_OF_STATE.values())
"""Names of the figures by state in JSON and tables: active time, its parts, and the other states."""


def state_columns(figures: ByState | None) -> dict[str, float | None]:
    """Return the figures by ``STATE_COLUMNS``: ``None`` without figures, and for effective parts without a profile."""
    if figures is None:
        return dict.fromkeys(STATE_COLUMNS)
    is_profiled = figures.profiled > 0
    return {
        "active": figures.active,
        "effective": figures.effective if is_profiled else None,
        "ineffective": figures.ineffective if is_profiled else None,
        "unprofiled": figures.unprofiled,
        "idle": figures.idle,
        "unknown": figures.unknown,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """Part of one physical GPU over one interval, with or without a holder.

    Over an interval, the seconds of a GPU's portions sum to its length, and their energy to the energy of the GPU.
    Seconds are share-weighted GPU-seconds.
    """

    gpu_uuid: str
    account: Account
    pod: PodAccount | None = None
    """Container that held it; ``None`` for Unallocated and Unattributed."""
    seconds: ByState = NO_SECONDS
    energy_joules: float | None = None
    """Energy in joules; ``None`` if the GPU's energy was not measured over the interval."""
    interval_seconds: float | None = None
    """Length of the interval, to which the seconds of the GPU's portions sum; ``None`` for a portion of only energy."""
    estimated: bool = False
    """Whether activity was only estimated, by division among the holders by share."""
    profile: ResourceProfile | None = None
    """Resource profile of the device over the profiled seconds; ``None`` without such seconds."""

    def part(self, ratio: float) -> "Portion":
        """Return the portion for a part of its interval; use and energy are spread evenly over the interval."""
        return replace(
            self,
            seconds=self.seconds.scaled(ratio),
            energy_joules=None if self.energy_joules is None else self.energy_joules * ratio,
            interval_seconds=None if self.interval_seconds is None else self.interval_seconds * ratio,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums of one account or one pod; they never decrease."""

    seconds: ByState = NO_SECONDS
    energy_joules: float = 0.0
    energy_unknown_seconds: float = 0.0
    """Allocated seconds without measured energy. If they are all seconds, the energy is unknown, not 0."""
    money: Mapping[str, ByState] = field(default_factory=dict)
    """Cost by ISO 4217 currency, by state of the charged seconds; a currency without priced seconds is absent."""
    unpriced_seconds: float = 0.0
    """Allocated seconds without a price; included in the seconds above."""

    def __add__(self, other: "Totals") -> "Totals":
        """Return the sum of both, currency by currency."""
        money = dict(self.money)
        for currency, amount in other.money.items():
            money[currency] = money[currency] + amount if currency in money else amount
        return Totals(
            seconds=self.seconds + other.seconds,
            energy_joules=self.energy_joules + other.energy_joules,
            energy_unknown_seconds=self.energy_unknown_seconds + other.energy_unknown_seconds,
            money=money,
            unpriced_seconds=self.unpriced_seconds + other.unpriced_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Current price of one hour of one physical GPU, and its source. JSON documents use the field names as keys."""

    per_hour: float
    per_kwh: float = 0.0
    """Additional price per measured kilowatt-hour of the GPU, cooling included; 0 if the hourly price covers it."""
    currency: str
    source: str
    """Name of the price book and row, as label value: ``book:row``."""
    as_of: str
    """ISO date of the row's source."""
    fallback: bool = False
    """Whether the price is from the bundled book of list prices, because no row of the user's book matches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownLedger:
    """Sums of one ledger. Under an identity they start at 0, never decrease and have one writer."""

    identity: str
    created_at_seconds: float
    """Unix time of its start."""
    capacity_seconds: float = 0.0
    """Metered GPU-seconds: the sum of all intervals of all GPUs, without those of provisional owners."""
    accounts: Mapping[Account, Totals] = field(default_factory=dict)
    """Totals of every owner since the start, without provisional ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerView:
    """The shown ledgers of a node at one instant.

    At every instant the accounts' allocated seconds and ``withheld_seconds`` sum to ``capacity_seconds``.
    """

    ledgers: tuple[ShownLedger, ...] = ()
    """The ledger on disk, a memory-only ledger while the disk fails, and ledgers that ended within 25 hours."""
    pods: Mapping[PodAccount, Totals] = field(default_factory=dict)
    """Totals of containers that hold a device, or held one within the linger time."""
    conservation_error_seconds: float = 0.0
    """Sum over GPUs and intervals of |sum of the parts - the interval|."""
    withheld_seconds: float = 0.0
    """Allocated seconds of provisional owners."""
    saved_at_seconds: float | None = None
    """Unix time of the save that contains these totals; ``None`` if they are from memory."""
    state_problem: str = ""
    """Why the totals are not on disk, and the fix, in one line; empty without a problem or a state directory."""

    @property
    def capacity_seconds(self) -> float:
        """Metered GPU-seconds: the sum of all intervals of all GPUs."""
        return sum((ledger.capacity_seconds for ledger in self.ledgers), self.withheld_seconds)

    @property
    def accounts(self) -> Mapping[Account, Totals]:
        """Totals of every owner, summed over the ledgers."""
        if len(self.ledgers) == 1:
            return self.ledgers[0].accounts
        summed: dict[Account, Totals] = {}
        for ledger in self.ledgers:
            for account, totals in ledger.accounts.items():
                summed[account] = summed[account] + totals if account in summed else totals
        return summed

    @property
    def started_at_seconds(self) -> float | None:
        """Unix time at which the oldest of the ledgers began; ``None`` without a ledger."""
        return min((ledger.created_at_seconds for ledger in self.ledgers), default=None)


WINDOWS: Mapping[str, float] = {"15m": 900.0, "30m": 1800.0, "1h": 3600.0, "2h": 7200.0, "24h": 86400.0}
"""Activity windows in seconds, by the value of the label ``window``."""
_OF_POLICY = {"batch": "30m", "interactive": "2h", "inference": "24h"}
"""Window in which alerts judge a policy, if it is not the hour that is shown for every owner."""


@cache
def shown_windows(policy: str) -> frozenset[str]:
    """Return the windows that are shown for an owner: 15 minutes, an hour, and the window of its policy.

    An owner that holds nothing has no policy. All its windows are shown, because its next pods may run elsewhere.
    """
    return frozenset({"15m", "1h", _OF_POLICY.get(policy, "1h")} if policy else WINDOWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerUse:
    """One owner's use of the node. GPUs are share-weighted: a MIG instance or a replica counts as a part of a GPU.

    Only ``gpus``, ``estimated_gpus``, the age, the policy, the opt-out and ``cost_per_hour`` include holders with
    estimated activity (divided by share).
    """

    owner: Owner
    """Owner, never provisional; a pod with an unknown workload is its own owner (kind ``Pod``)."""
    active_seconds: Mapping[str, float] = field(default_factory=dict)
    """Active GPU-seconds by window, ended holders included; a window without measurement is absent."""
    profiled_seconds: Mapping[str, float] = field(default_factory=dict)
    """Part of the active seconds in which all resources were measured, by window; a window without such seconds is
    absent."""
    effective_seconds: Mapping[str, float] = field(default_factory=dict)
    """Effective part of ``profiled_seconds``, for the same windows."""
    bottleneck_seconds: Mapping[str, float] = field(default_factory=dict)
    """``profiled_seconds`` of the last hour, divided by bottleneck; a bottleneck without seconds is absent."""
    resource_use_seconds: Mapping[str, float] = field(default_factory=dict)
    """Use of the last hour in seconds at the limit, by kind of resource, with the seconds of its measurement,
    ``profiled``; the same for the multiprocessors: ``sm``, with the seconds ``sm_profiled``."""
    measured_seconds: Mapping[str, float] = field(default_factory=dict)
    """Active and idle GPU-seconds by window; absent if they are 0 and no measurable device is held."""
    gpus: float | None = None
    """GPUs held now; this field and the following ones are ``None`` or empty if the owner holds nothing now."""
    estimated_gpus: float | None = None
    """Part of ``gpus`` in shared devices with recent activity that was only estimated; ``None`` if 0."""
    underused_gpus: float | None = None
    """GPUs with low own activity; ``None`` if 0."""
    unused_gpus: Mapping[str, float] = field(default_factory=dict)
    """GPUs without activity over a window, by window; absent if 0."""
    active_gpus: float | None = None
    """GPUs with activity of at least 5 % over 15 minutes; ``None`` if no activity was measured."""
    idle_for_seconds: float | None = None
    """Shortest time for which a device has been idle; ``None`` if unknown for all devices."""
    age_seconds: float | None = None
    """Longest time for which a device has been held."""
    policy: str = ""
    """Class of the owner's pods for which alerts wait longest; empty if the owner holds nothing now."""
    opt_out_until_seconds: float | None = None
    """Unix time of the latest opt-out of the pods; ``inf`` is permanent."""
    cost_per_hour: Mapping[str, float] = field(default_factory=dict)
    """Current price per hour of the held GPUs, by currency; GPUs without a price are left out."""
    idle_cost_per_hour: Mapping[str, float] = field(default_factory=dict)
    """Part of ``cost_per_hour`` for the idle part of the last 15 minutes; unmeasured time is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUse:
    """Physical GPUs of one model on the node, including those that are down."""

    model: str
    gpus: int
    unallocated_gpus: float | None = None
    """GPUs without a holder, by share; ``None`` while the allocation of all of them is unknown."""
    unallocated_cost_per_hour: Mapping[str, float] = field(default_factory=dict)
    """Price per hour of the unallocated GPUs by currency; GPUs without a price are left out."""
    unpriced_gpus: int = 0
    """Number of GPUs without a known price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerXid:
    """An Xid of tier application on a device, and a pod that held the device at that time."""

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
    """Part of the physical GPU with holders whose activity is estimated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnersView:
    """Owners, pools and shared devices at one instant."""

    owners: tuple[OwnerUse, ...] = ()
    pools: tuple[PoolUse, ...] = ()
    shared_idle: tuple[SharedIdle, ...] = ()
    broken_gpus: Mapping[Owner, int] = field(default_factory=dict)
    """Number of GPUs with a critical fault that an owner holds or recently held; an owner without one is absent."""
    xids: tuple[OwnerXid, ...] = ()
    """Xids of the last ten minutes."""
