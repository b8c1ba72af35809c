"""Sums seconds, joules and money per owner under one ledger identity; totals start at 0 and never decrease."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.accounting.records import read, written
from exporter.model import (
    Account,
    ByState,
    HolderKey,
    Owner,
    PodAccount,
    Portion,
    Price,
    ShownLedger,
    Totals,
    is_other_pod,
)


def charged(portion: Portion, price: Price | None) -> Totals:
    """Return the sums of one portion alone.

    Args:
        portion: The seconds and joules.
        price: Price of the physical GPU at that time; ``None`` if it is unknown.
    """
    seconds, joules = portion.seconds.total, portion.energy_joules
    return Totals(
        seconds=portion.seconds,
        energy_joules=joules or 0.0,
        energy_unknown_seconds=seconds if joules is None else 0.0,
        money={price.currency: money(portion, price)} if price else {},
        unpriced_seconds=0.0 if price else seconds,
    )


def totals_of(entry: Mapping[str, Any]) -> Totals:
    """Return the totals of an entry of the state file.

    Raises:
        KeyError, TypeError, ValueError: The entry has another form.
    """
    totals = entry["totals"]
    if "seconds" not in totals:  # layout 2
        totals = {**totals, "seconds": {name: totals[f"{name}_seconds"] for name in ("active", "idle", "unknown")}}
    return read(Totals, totals)


@dataclass(slots=True, kw_only=True)
class PodTable:
    """Sums of pods; those of a pod are dropped ``linger_seconds`` after its last charge."""

    linger_seconds: float = 300.0
    _sums: dict[PodAccount, Totals] = field(default_factory=dict)
    _changed: dict[PodAccount, float] = field(default_factory=dict)
    """Monotonic time of the last charge in this process; a pod from before a restart has none at first."""
    _now: dict[HolderKey, PodAccount] = field(default_factory=dict)
    """The current pod by name."""

    def charge(self, pod: PodAccount, totals: Totals, steady: float) -> None:
        """Add to the sums of a pod at a monotonic time.

        A pod stays the same when its UID becomes known or unknown; a different UID is another pod.
        """
        known = self._known(pod)
        self._changed[known] = steady
        self._sums[known] += totals

    def _known(self, pod: PodAccount) -> PodAccount:
        if pod in self._sums:
            return pod
        before = self._now.get(pod.key)
        totals = Totals()
        if before is not None and before in self._sums and not is_other_pod(before.pod_uid, pod.pod_uid):
            if pod.pod_uid is None and replace(pod, pod_uid=before.pod_uid) == before:
                return before
            totals = self._sums.pop(before)
            self._changed.pop(before, None)
        self._now[pod.key] = pod
        self._sums[pod] = totals
        return pod

    def drop_ended(self, steady: float) -> None:
        """Drop pods that ended long ago; call it only while time is metered, because only then an end is known."""
        for pod in [*self._sums]:
            if steady <= self._changed.setdefault(pod, steady) + self.linger_seconds:
                continue
            del self._sums[pod], self._changed[pod]
            if self._now.get(pod.key) == pod:
                del self._now[pod.key]

    def shown(self) -> dict[PodAccount, Totals]:
        """Return the current totals."""
        return dict(self._sums)

    def dump(self) -> list[dict[str, Any]]:
        """Return all sums, for the state file."""
        return [{**written(pod), "totals": totals} for pod, totals in self._sums.items()]

    def restore(self, sums: Mapping[PodAccount, Totals]) -> None:
        """Continue from these sums."""
        self._sums = dict(sums)
        self._changed = {}
        self._now = {pod.key: pod for pod in sums}


SECONDS_PER_HOUR = 3600.0
JOULES_PER_KWH = 3.6e6


def money(portion: Portion, price: Price) -> ByState:
    """Return the cost of a portion, in the price's currency.

    Args:
        portion: Share-weighted seconds, and joules if they were measured.
        price: Price of a whole physical GPU at the portion's time.

    Returns:
        Hours at the hourly price, plus measured energy if the price includes it. Energy is divided among the states
        like the seconds; energy without any second is unprofiled active money.
    """
    per_second = price.per_hour / SECONDS_PER_HOUR
    seconds = portion.seconds.total
    energy = (portion.energy_joules or 0.0) / JOULES_PER_KWH * price.per_kwh
    if energy and not seconds:
        return ByState(unprofiled=energy)
    if energy:
        per_second += energy / seconds
    return portion.seconds.scaled(per_second)


COST_LABELS_LIMIT = 200
"""Combinations of cost labels in a ledger; a label with one value per pod would create one series for each."""
_OTHER = "=__other__"
"""Suffix of each pair of a combination beyond the limit; no Kubernetes label can have that value."""


@dataclass(slots=True, kw_only=True)
class Sheet:
    """Sums per account over some time."""

    accounts: dict[Account, Totals] = field(default_factory=dict)
    capacity_seconds: float = 0.0
    """Sum of all intervals of all GPUs, without the seconds of provisional owners; never decreases."""
    conservation_error_seconds: float = 0.0
    """Sum over GPUs and intervals of |sum of the portions - the interval|."""

    @property
    def provisional_seconds(self) -> float:
        """Allocated seconds of provisional owners."""
        waiting = (totals for account, totals in self.accounts.items() if account.owner.provisional)
        return sum((totals.seconds.total for totals in waiting), 0.0)

    def charge(self, portions: Sequence[Portion], prices: Mapping[str, Price], pods: PodTable, steady: float) -> None:
        """Add the portions of one sample.

        Args:
            portions: Result of one call of ``Meter.add``.
            prices: Current price by UUID of the physical GPU; without one the seconds count as unpriced.
            pods: The counters of pods, which are charged too.
            steady: Monotonic time in seconds.
        """
        sums: dict[str, float] = {}
        provisional: dict[str, float] = {}
        intervals: dict[str, float | None] = {}
        for portion in portions:
            uuid = portion.gpu_uuid
            totals = charged(portion, prices.get(uuid))
            self._add(portion.account, totals)
            if portion.pod is not None:
                pods.charge(portion.pod, totals, steady)
            seconds = portion.seconds.total
            sums[uuid] = sums.get(uuid, 0.0) + seconds
            if portion.account.owner.provisional:
                provisional[uuid] = provisional.get(uuid, 0.0) + seconds
            intervals[uuid] = portion.interval_seconds
        for uuid, total in sums.items():
            interval = intervals[uuid]
            whole = total if interval is None else interval
            self.capacity_seconds += max(0.0, whole - provisional.get(uuid, 0.0))
            self.conservation_error_seconds += 0.0 if interval is None else abs(total - interval)

    def settle(self, owner_of: Callable[[Owner, float], Owner], steady: float) -> None:
        """Move the sums of provisional owners to their actual owners.

        Args:
            owner_of: Maps a provisional owner and a time to its owner; to itself while the owner is not known.
            steady: Monotonic time in seconds.
        """
        for account in [account for account in self.accounts if account.owner.provisional]:
            owner = owner_of(account.owner, steady)
            if owner != account.owner:
                totals = self.accounts.pop(account)
                self.capacity_seconds += totals.seconds.total
                self._add(replace(account, owner=owner), totals)

    def fold(self) -> set[str]:
        """Move combinations of cost labels beyond ``COST_LABELS_LIMIT`` to ``__other__``.

        Returns:
            Those combinations. The first ones stay, so shown combinations are never folded.
        """
        if len(self.accounts) <= COST_LABELS_LIMIT:
            return set()
        kept: set[str] = set()
        beyond: list[Account] = []
        for account in self.accounts:
            pairs = account.owner.cost_labels
            if not pairs or pairs in kept or _OTHER in pairs:
                continue
            if len(kept) < COST_LABELS_LIMIT:
                kept.add(pairs)
            else:
                beyond.append(account)
        for account in beyond:
            other = ",".join(pair.partition("=")[0] + _OTHER for pair in account.owner.cost_labels.split(","))
            self._add(replace(account, owner=replace(account.owner, cost_labels=other)), self.accounts.pop(account))
        return {account.owner.cost_labels for account in beyond}

    def plus(self, other: "Sheet") -> "Sheet":
        """Return the sum of both."""
        total = Sheet(
            accounts=dict(self.accounts),
            capacity_seconds=self.capacity_seconds + other.capacity_seconds,
            conservation_error_seconds=self.conservation_error_seconds + other.conservation_error_seconds,
        )
        for account, totals in other.accounts.items():
            total._add(account, totals)
        return total

    def divided(self) -> tuple["Sheet", "Sheet"]:
        """Return the sums of known owners, and the sums of provisional ones."""
        waiting = {account: totals for account, totals in self.accounts.items() if account.owner.provisional}
        known = Sheet(
            accounts={account: totals for account, totals in self.accounts.items() if account not in waiting},
            capacity_seconds=self.capacity_seconds,
            conservation_error_seconds=self.conservation_error_seconds,
        )
        return known, Sheet(accounts=waiting)

    def _add(self, account: Account, totals: Totals) -> None:
        known = self.accounts.get(account)
        self.accounts[account] = totals if known is None else known + totals


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Sums under an identity. The shown sums start at 0, never decrease and have one writer."""

    identity: str
    created_at_seconds: float
    """Unix time of its start."""
    ended_at_seconds: float | None = None
    """Unix time of its end, after which it takes no charges; ``None`` while it is open."""
    sheet: Sheet = field(default_factory=Sheet)

    def shown(self) -> ShownLedger:
        """Return the public view of the ledger."""
        return ShownLedger(
            identity=self.identity,
            created_at_seconds=self.created_at_seconds,
            capacity_seconds=self.sheet.capacity_seconds,
            accounts={
                account: totals for account, totals in self.sheet.accounts.items() if not account.owner.provisional
            },
        )

    def dump(self) -> dict[str, Any]:
        """Return all sums, for the state file."""
        return {
            "id": self.identity,
            "created_at_seconds": self.created_at_seconds,
            "ended_at_seconds": self.ended_at_seconds,
            "capacity_seconds": self.sheet.capacity_seconds,
            "conservation_error_seconds": self.sheet.conservation_error_seconds,
            "accounts": [
                {**written(account.owner), "model": account.model, "mode": account.mode, "totals": totals}
                for account, totals in self.sheet.accounts.items()
            ],
        }


def ledger_of(data: Mapping[str, Any]) -> Ledger:
    """Parse the output of ``Ledger.dump``.

    Raises:
        KeyError, TypeError, ValueError: The data has another form.
    """
    ended = data["ended_at_seconds"]
    return Ledger(
        identity=read(str, data["id"]),
        created_at_seconds=read(float, data["created_at_seconds"]),
        ended_at_seconds=None if ended is None else read(float, ended),
        sheet=Sheet(
            accounts={read(Account, {**entry, "owner": entry}): totals_of(entry) for entry in data["accounts"]},
            capacity_seconds=read(float, data["capacity_seconds"]),
            conservation_error_seconds=read(float, data["conservation_error_seconds"]),
        ),
    )
