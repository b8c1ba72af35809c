"""Sums seconds, joules and money per owner under one ledger identity; totals start at 0 and never decrease."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.model import (
    NO_SECONDS,
    STATES,
    Account,
    ByState,
    HolderKey,
    Owner,
    PodAccount,
    Portion,
    Price,
    ShareMode,
    ShownLedger,
    Totals,
    is_other_pod,
)

PLAIN = ("energy_joules", "energy_unknown_seconds", "unpriced_seconds")
_MOST = 1e300
"""Upper limit of a figure: the sum of two figures below it is finite."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums for an account or a pod; they never decrease."""

    seconds: ByState = NO_SECONDS
    energy_joules: float = 0.0
    energy_unknown_seconds: float = 0.0
    unpriced_seconds: float = 0.0
    money: dict[str, ByState] = field(default_factory=dict)
    """Money by currency."""
    _totals: Totals | None = None

    def add(self, portion: Portion, currency: str | None, paid: ByState) -> None:
        """Add a portion.

        Args:
            portion: The seconds and joules.
            currency: Currency of the current price; ``None`` without a price.
            paid: Cost of the portion at that price.
        """
        seconds = portion.seconds.total
        self.seconds += portion.seconds
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
        """Return the sum of both as a new tally."""
        total = self.totals() + other.totals()
        return Tally(seconds=total.seconds, **{name: getattr(total, name) for name in PLAIN}, money=dict(total.money))

    def totals(self) -> Totals:
        """Return the current sums; the same object until a portion is added."""
        if self._totals is None:
            plain: dict[str, Any] = {name: getattr(self, name) for name in PLAIN}
            self._totals = Totals(seconds=self.seconds, **plain, money=dict(self.money))
        return self._totals

    def dump(self) -> dict[str, Any]:
        """Return all sums, for JSON."""
        data: dict[str, Any] = {name: getattr(self, name) for name in PLAIN}
        money = {currency: dict(paid) for currency, paid in self.money.items()}
        return data | {"seconds": dict(self.seconds), "money": money}


def tally_of(data: Mapping[str, Any]) -> Tally:
    """Parse the output of ``Tally.dump``.

    Raises:
        KeyError, TypeError, ValueError: The data has another form, or a figure in it is impossible.
    """
    paid = {currency: _by_state(amounts) for currency, amounts in data["money"].items()}
    plain: dict[str, Any] = {name: amount(data, name) for name in PLAIN}
    seconds = data.get("seconds") or {state: data[f"{state}_seconds"] for state in _OLD_STATES}
    return Tally(seconds=_by_state(seconds), **plain, money=paid)


_OLD_STATES = {"active": "active_unprofiled", "idle": "idle", "unknown": "unknown"}
"""States of layout 2 of the state file, which had no profiled time."""


def _by_state(figures: Mapping[str, Any]) -> ByState:
    names = _OLD_STATES if "active" in figures else {state: state for state in STATES}
    return ByState.of({state: amount(figures, name) for name, state in names.items()})


def amount(data: Mapping[str, Any], name: str) -> float:
    """Return a figure that never decreases.

    Raises:
        KeyError, TypeError, ValueError: It is missing, not a number, negative or not finite.
    """
    try:
        value = float(data[name])
    except OverflowError:
        value = math.inf
    if not 0 <= value < _MOST:
        raise ValueError(f"{name} is {value}")
    return value


def text(data: Mapping[str, Any], name: str) -> str:
    """Return a text.

    Raises:
        KeyError, TypeError: It is missing or not a text.
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
    """The current pod by name."""

    def tally(self, pod: PodAccount, steady: float) -> Tally:
        """Return the tally of a pod, to be charged at a monotonic time.

        A pod stays the same when its UID becomes known or unknown; a different UID is another pod.
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
        """Drop pods that ended long ago; call it only while time is metered, because only then an end is known."""
        for pod in [*self._tallies]:
            if steady <= self._changed.setdefault(pod, steady) + self.linger_seconds:
                continue
            del self._tallies[pod], self._changed[pod]
            if self._now.get(pod.key) == pod:
                del self._now[pod.key]

    def shown(self) -> dict[PodAccount, Totals]:
        """Return the current totals."""
        return {pod: tally.totals() for pod, tally in self._tallies.items()}

    def dump(self) -> list[dict[str, Any]]:
        """Return all tallies, for JSON."""
        return [
            {name: getattr(pod, name) for name in PodAccount.__slots__} | {"totals": tally.dump()}
            for pod, tally in self._tallies.items()
        ]

    def restore(self, tallies: Mapping[PodAccount, Tally]) -> None:
        """Continue from the result of ``pods_of``."""
        self._tallies = dict(tallies)
        self._changed = {}
        self._now = {pod.key: pod for pod in tallies}


def pods_of(entries: Iterable[Mapping[str, Any]]) -> dict[PodAccount, Tally]:
    """Parse the output of ``PodTable.dump``.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: The data has another form.
    """
    return {_pod_of(entry): tally_of(entry["totals"]) for entry in entries}


def _pod_of(entry: Mapping[str, Any]) -> PodAccount:
    texts = {name: text(entry, name) for name in PodAccount.__slots__ if name not in {"gpu_index", "pod_uid"}}
    uid = None if entry["pod_uid"] is None else text(entry, "pod_uid")
    return PodAccount(**texts, gpu_index=int(entry["gpu_index"]), pod_uid=uid)


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
    """Sums per account over some time. Only ``charge`` changes a tally in place, so sheets may share the others."""

    accounts: dict[Account, Tally] = field(default_factory=dict)
    capacity_seconds: float = 0.0
    """Sum of all intervals of all GPUs, without the seconds of provisional owners; never decreases."""
    conservation_error_seconds: float = 0.0
    """Sum over GPUs and intervals of |sum of the portions - the interval|."""

    @property
    def provisional_seconds(self) -> float:
        """Allocated seconds of provisional owners."""
        waiting = (tally for account, tally in self.accounts.items() if account.owner.provisional)
        return sum((tally.seconds.total for tally in waiting), 0.0)

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
            price = prices.get(uuid)
            currency, paid = (price.currency, money(portion, price)) if price else (None, NO_SECONDS)
            tally = self.accounts.get(portion.account)
            if tally is None:
                tally = self.accounts[portion.account] = Tally()
            tally.add(portion, currency, paid)
            if portion.pod is not None:
                pods.tally(portion.pod, steady).add(portion, currency, paid)
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
                tally = self.accounts.pop(account)
                self.capacity_seconds += tally.seconds.total
                self._add(replace(account, owner=owner), tally)

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
        for account, tally in other.accounts.items():
            total._add(account, tally)
        return total

    def divided(self) -> tuple["Sheet", "Sheet"]:
        """Return the sums of known owners, and the sums of provisional ones."""
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
                account: tally.totals()
                for account, tally in self.sheet.accounts.items()
                if not account.owner.provisional
            },
        )

    def dump(self) -> dict[str, Any]:
        """Return all sums, for JSON, as copies."""
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
    """Parse the output of ``Ledger.dump``.

    Raises:
        KeyError, TypeError, AttributeError, ValueError: The data has another form.
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
