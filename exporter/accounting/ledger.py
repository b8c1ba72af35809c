"""Sums seconds, joules and money per owner under one ledger identity; totals start at 0 and never decrease."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.model import (
    Account,
    HolderKey,
    Money,
    Owner,
    PodAccount,
    Portion,
    Price,
    ShareMode,
    ShownLedger,
    Totals,
    is_other_pod,
)

PLAIN = (
    "active_seconds",
    "idle_seconds",
    "unknown_seconds",
    "energy_joules",
    "energy_unknown_seconds",
    "unpriced_seconds",
)
STATES = ("active", "idle", "unknown")
_MOST = 1e300
"""Two figures below this can be added."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums for an account or a pod; they only grow."""

    active_seconds: float = 0.0
    idle_seconds: float = 0.0
    unknown_seconds: float = 0.0
    energy_joules: float = 0.0
    energy_unknown_seconds: float = 0.0
    unpriced_seconds: float = 0.0
    money: dict[str, Money] = field(default_factory=dict)
    """By currency."""
    _totals: Totals | None = None

    @property
    def allocated_seconds(self) -> float:
        """Active, idle and unknown seconds."""
        return self.active_seconds + self.idle_seconds + self.unknown_seconds

    def add(self, portion: Portion, currency: str | None, paid: Money) -> None:
        """Add a portion.

        Args:
            portion: The seconds and joules.
            currency: Currency of the price of this moment; ``None`` where there is no price.
            paid: What the portion costs at that price.
        """
        seconds = portion.allocated_seconds
        self.active_seconds += portion.active_seconds
        self.idle_seconds += portion.idle_seconds
        self.unknown_seconds += portion.unknown_seconds
        if portion.energy_joules is None:
            self.energy_unknown_seconds += seconds
        else:
            self.energy_joules += portion.energy_joules
        if currency is None:
            self.unpriced_seconds += seconds
        else:
            self.money[currency] = self.money[currency] + paid if currency in self.money else paid
        self._totals = None

    def plus(self, other: "Tally") -> "Tally":
        """Return the sum of both as a tally of its own."""
        total = self.totals() + other.totals()
        return Tally(**{name: getattr(total, name) for name in PLAIN}, money=dict(total.money))

    def totals(self) -> Totals:
        """Return the sums of this moment; the same object until something is added."""
        if self._totals is None:
            self._totals = Totals(**{name: getattr(self, name) for name in PLAIN}, money=dict(self.money))
        return self._totals

    def dump(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        data: dict[str, Any] = {name: getattr(self, name) for name in PLAIN}
        data["money"] = {
            currency: {state: getattr(paid, state) for state in STATES} for currency, paid in self.money.items()
        }
        return data


def tally_of(data: Mapping[str, Any]) -> Tally:
    """Read what ``Tally.dump`` wrote.

    Raises:
        KeyError, TypeError, ValueError: It is not that, or a figure in it cannot be.
    """
    paid = {
        currency: Money(**{state: amount(by_state, state) for state in STATES})
        for currency, by_state in data["money"].items()
    }
    plain: dict[str, Any] = {name: amount(data, name) for name in PLAIN}
    return Tally(**plain, money=paid)


def amount(data: Mapping[str, Any], name: str) -> float:
    """Read a figure that only ever grows.

    Raises:
        KeyError, TypeError, ValueError: It is missing, no number, negative or not finite.
    """
    try:
        value = float(data[name])
    except OverflowError:
        value = math.inf
    if not 0 <= value < _MOST:
        raise ValueError(f"{name} is {value}")
    return value


def text(data: Mapping[str, Any], name: str) -> str:
    """Read a text.

    Raises:
        KeyError, TypeError: It is missing or no text.
    """
    value = data[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, not text")
    return value


@dataclass(slots=True, kw_only=True)
class PodTable:
    """Tallies of pods; one is dropped ``linger_seconds`` after its last charge."""

    linger_seconds: float = 300.0
    _tallies: dict[PodAccount, Tally] = field(default_factory=dict)
    _changed: dict[PodAccount, float] = field(default_factory=dict)
    """Monotonic time of the last charge in this process; a pod from before a restart has none at first."""
    _now: dict[HolderKey, PodAccount] = field(default_factory=dict)
    """The pod that has a name now."""

    def tally(self, pod: PodAccount, steady: float) -> Tally:
        """Return the tally of a pod, to be charged at a monotonic time.

        A UID that becomes known, or is unknown for a while, makes no other pod; one that differs does.
        """
        known = self._known(pod)
        self._changed[known] = steady
        return self._tallies[known]

    def _known(self, pod: PodAccount) -> PodAccount:
        if pod in self._tallies:
            return pod
        before = self._now.get(pod.key)
        tally = None
        if before is not None and before in self._tallies and not is_other_pod(before.pod_uid, pod.pod_uid):
            if pod.pod_uid is None and replace(pod, pod_uid=before.pod_uid) == before:
                return before
            tally = self._tallies.pop(before)
            self._changed.pop(before, None)
        self._now[pod.key] = pod
        self._tallies[pod] = tally or Tally()
        return pod

    def drop_ended(self, steady: float) -> None:
        """Drop pods that ended long enough ago; to be called only where time is metered: only then an end is known."""
        for pod in [*self._tallies]:
            if steady <= self._changed.setdefault(pod, steady) + self.linger_seconds:
                continue
            del self._tallies[pod], self._changed[pod]
            if self._now.get(pod.key) == pod:
                del self._now[pod.key]

    def shown(self) -> dict[PodAccount, Totals]:
        """Return the totals of this moment."""
        return {pod: tally.totals() for pod, tally in self._tallies.items()}

    def dump(self) -> list[dict[str, Any]]:
        """Return all of it, ready for JSON."""
        return [
            {name: getattr(pod, name) for name in PodAccount.__slots__} | {"totals": tally.dump()}
            for pod, tally in self._tallies.items()
        ]

    def restore(self, tallies: Mapping[PodAccount, Tally]) -> None:
        """Continue from what ``pods_of`` has read."""
        self._tallies = dict(tallies)
        self._changed = {}
        self._now = {pod.key: pod for pod in tallies}


def pods_of(entries: Iterable[Mapping[str, Any]]) -> dict[PodAccount, Tally]:
    """Read what ``PodTable.dump`` wrote.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: It is something else.
    """
    return {_pod_of(entry): tally_of(entry["totals"]) for entry in entries}


def _pod_of(entry: Mapping[str, Any]) -> PodAccount:
    texts = {name: text(entry, name) for name in PodAccount.__slots__ if name not in {"gpu_index", "pod_uid"}}
    uid = None if entry["pod_uid"] is None else text(entry, "pod_uid")
    return PodAccount(**texts, gpu_index=int(entry["gpu_index"]), pod_uid=uid)


SECONDS_PER_HOUR = 3600.0
JOULES_PER_KWH = 3.6e6


def money(portion: Portion, price: Price) -> Money:
    """What a portion costs, in the price's currency.

    Args:
        portion: Share-weighted seconds, and joules where they were measured.
        price: Of a whole physical GPU, of the portion's time.

    Returns:
        Hours at the hourly price, plus measured energy where the price asks for it. Energy is divided among the states
        as the seconds are; energy without any second is active money.
    """
    per_second = price.per_hour / SECONDS_PER_HOUR
    seconds = portion.allocated_seconds
    energy = (portion.energy_joules or 0.0) / JOULES_PER_KWH * price.per_kwh
    if energy and not seconds:
        return Money(active=energy)
    if energy:
        per_second += energy / seconds
    return Money(
        active=portion.active_seconds * per_second,
        idle=portion.idle_seconds * per_second,
        unknown=portion.unknown_seconds * per_second,
    )


COST_LABELS_LIMIT = 200
"""Combinations of cost labels in a ledger; a label with a value per pod would make a series for each."""
_OTHER = "=__other__"
"""Ends each pair of a combination beyond the limit; no label of Kubernetes can have that value."""
_NOTHING = Money()


@dataclass(slots=True, kw_only=True)
class Sheet:
    """Sums per account over some time. Only ``charge`` changes a tally in place, so sheets may share the others."""

    accounts: dict[Account, Tally] = field(default_factory=dict)
    capacity_seconds: float = 0.0
    """Sum of all intervals of all GPUs, without the seconds of owners that are not known yet; never decreases."""
    conservation_error_seconds: float = 0.0
    """Sum over GPUs and intervals of |sum of the portions - the interval|."""

    @property
    def provisional_seconds(self) -> float:
        """Allocated seconds of owners that are not known yet."""
        waiting = (tally for account, tally in self.accounts.items() if account.owner.provisional)
        return sum((tally.allocated_seconds for tally in waiting), 0.0)

    def charge(self, portions: Sequence[Portion], prices: Mapping[str, Price], pods: PodTable, steady: float) -> None:
        """Enter the portions of one sample.

        Args:
            portions: As one call of ``Meter.add`` returned them.
            prices: Price of this moment by UUID of the physical GPU; without one the seconds count as unpriced.
            pods: The counters of pods, which are charged, too.
            steady: Monotonic time in seconds.
        """
        sums: dict[str, float] = {}
        provisional: dict[str, float] = {}
        intervals: dict[str, float | None] = {}
        for portion in portions:
            uuid = portion.gpu_uuid
            price = prices.get(uuid)
            currency, paid = (price.currency, money(portion, price)) if price else (None, _NOTHING)
            tally = self.accounts.get(portion.account)
            if tally is None:
                tally = self.accounts[portion.account] = Tally()
            tally.add(portion, currency, paid)
            if portion.pod is not None:
                pods.tally(portion.pod, steady).add(portion, currency, paid)
            sums[uuid] = sums.get(uuid, 0.0) + portion.allocated_seconds
            if portion.account.owner.provisional:
                provisional[uuid] = provisional.get(uuid, 0.0) + portion.allocated_seconds
            intervals[uuid] = portion.interval_seconds
        for uuid, total in sums.items():
            interval = intervals[uuid]
            whole = total if interval is None else interval
            self.capacity_seconds += max(0.0, whole - provisional.get(uuid, 0.0))
            self.conservation_error_seconds += 0.0 if interval is None else abs(total - interval)

    def settle(self, owner_of: Callable[[Owner, float], Owner], steady: float) -> None:
        """Move what stands on provisional owners to those who turned out to pay.

        Args:
            owner_of: Returns the owner for a provisional one at a time; the same one while it is not known yet.
            steady: Monotonic time in seconds.
        """
        for account in [account for account in self.accounts if account.owner.provisional]:
            owner = owner_of(account.owner, steady)
            if owner != account.owner:
                tally = self.accounts.pop(account)
                self.capacity_seconds += tally.allocated_seconds
                self._add(replace(account, owner=owner), tally)

    def fold(self) -> set[str]:
        """Enter what is beyond ``COST_LABELS_LIMIT`` combinations of cost labels under ``__other__``.

        Returns:
            Those combinations. The first ones stay, so what has been shown is never folded.
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
        for account, tally in other.accounts.items():
            total._add(account, tally)
        return total

    def divided(self) -> tuple["Sheet", "Sheet"]:
        """Return what stands on known owners, and what stands on provisional ones."""
        waiting = {account: tally for account, tally in self.accounts.items() if account.owner.provisional}
        known = Sheet(
            accounts={account: tally for account, tally in self.accounts.items() if account not in waiting},
            capacity_seconds=self.capacity_seconds,
            conservation_error_seconds=self.conservation_error_seconds,
        )
        return known, Sheet(accounts=waiting)

    def _add(self, account: Account, tally: Tally) -> None:
        known = self.accounts.get(account)
        self.accounts[account] = tally if known is None else known.plus(tally)


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Sums under an identity. What was shown under it begins at 0, never goes back and has one writer."""

    identity: str
    created_at_seconds: float
    """Unix time at which it began."""
    ended_at_seconds: float | None = None
    """Unix time since which nothing is charged to it; ``None`` while it is open."""
    sheet: Sheet = field(default_factory=Sheet)

    def shown(self) -> ShownLedger:
        """Return what is to be shown of it."""
        return ShownLedger(
            identity=self.identity,
            created_at_seconds=self.created_at_seconds,
            capacity_seconds=self.sheet.capacity_seconds,
            accounts={
                account: tally.totals()
                for account, tally in self.sheet.accounts.items()
                if not account.owner.provisional
            },
        )

    def dump(self) -> dict[str, Any]:
        """Return all of it, ready for JSON and shared with nothing here."""
        return {
            "id": self.identity,
            "created_at_seconds": self.created_at_seconds,
            "ended_at_seconds": self.ended_at_seconds,
            "capacity_seconds": self.sheet.capacity_seconds,
            "conservation_error_seconds": self.sheet.conservation_error_seconds,
            "accounts": [
                {name: getattr(account.owner, name) for name in Owner.__slots__}
                | {"model": account.model, "mode": account.mode.value, "totals": tally.dump()}
                for account, tally in self.sheet.accounts.items()
            ],
        }


def ledger_of(data: Mapping[str, Any]) -> Ledger:
    """Read what ``Ledger.dump`` wrote.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: It is something else.
    """
    return Ledger(
        identity=text(data, "id"),
        created_at_seconds=amount(data, "created_at_seconds"),
        ended_at_seconds=None if data["ended_at_seconds"] is None else amount(data, "ended_at_seconds"),
        sheet=Sheet(
            accounts={_account_of(entry): tally_of(entry["totals"]) for entry in data["accounts"]},
            capacity_seconds=amount(data, "capacity_seconds"),
            conservation_error_seconds=amount(data, "conservation_error_seconds"),
        ),
    )


def _account_of(entry: Mapping[str, Any]) -> Account:
    texts = {name: text(entry, name) for name in Owner.__slots__ if name != "provisional"}
    owner = Owner(**texts, provisional=bool(entry["provisional"]))
    return Account(owner=owner, model=text(entry, "model"), mode=ShareMode(entry["mode"]))
