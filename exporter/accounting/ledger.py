"""The ledger: what every owner and every pod has had so far, in seconds, joules and money."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.accounting.cost import money
from exporter.accounting.tally import NOTHING, Tally, amount, tally_of
from exporter.model import (
    OTHER,
    UNALLOCATED,
    UNATTRIBUTED,
    Account,
    LedgerView,
    Owner,
    PodAccount,
    Portion,
    Price,
    ShareMode,
)

NEVER_FOLDED = (OTHER, UNALLOCATED, UNATTRIBUTED)
PodKey = tuple[str, str, str, str]
"""(device uuid, namespace, pod, container)."""


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Adds portions up; nothing in it ever decreases.

    A new series shows 0 for ``birth_seconds``, so that two scrapes see it at 0 and ``increase()`` its first step. The
    series of a pod stays for ``linger_seconds`` after its last charge. Beyond ``account_limit`` accounts, those that
    have not changed for longest are folded into ``OTHER`` of the same model and mode.
    """

    linger_seconds: float = 300.0
    birth_seconds: float = 75.0
    account_limit: int = 2000
    started_at_seconds: float = 0.0
    """Unix time from which the ledger counts; told by whoever makes it, and kept with it."""
    conservation_error_seconds: float = 0.0
    """Sum over GPUs and intervals of |sum of the portions - the interval|."""
    capacity_seconds: float = 0.0
    """Sum of all intervals of all GPUs."""
    _accounts: dict[Account, Tally] = field(default_factory=dict)
    _pods: dict[PodAccount, Tally] = field(default_factory=dict)
    _pod_now: dict[PodKey, PodAccount] = field(default_factory=dict)

    def charge(self, portions: Sequence[Portion], prices: Mapping[str, Price], now_steady: float) -> None:
        """Enter the portions of one sample.

        Args:
            portions: As one call of ``Meter.add`` returned them.
            prices: Price of this moment by UUID of the physical GPU; without one the seconds count as unpriced.
            now_steady: Seconds of a clock that nobody sets.
        """
        sums: dict[str, float] = {}
        intervals: dict[str, float | None] = {}
        for portion in portions:
            uuid = portion.gpu_uuid
            price = prices.get(uuid)
            currency, paid = (price.currency, money(portion, price)) if price else (None, NOTHING)
            self._account(portion.account, now_steady).add(portion, currency, paid, now_steady)
            if portion.pod is not None:
                self._pod(portion.pod).add(portion, currency, paid, now_steady)
            sums[uuid] = sums.get(uuid, 0.0) + portion.allocated_seconds
            intervals[uuid] = portion.interval_seconds
        for uuid, total in sums.items():
            interval = intervals[uuid]
            self.capacity_seconds += total if interval is None else interval
            self.conservation_error_seconds += 0.0 if interval is None else abs(total - interval)
        self._drop_ended(now_steady)
        if len(self._accounts) > self.account_limit:  # after all are entered: who holds now is never folded
            self._fold(now_steady)

    def settle(self, owner_of: Callable[[Owner, float], Owner], now_steady: float) -> None:
        """Enter what stands on provisional owners at those who turned out to pay.

        Args:
            owner_of: Who that is for a provisional owner at a time; the same one while it is not known yet.
            now_steady: Seconds of a clock that nobody sets.
        """
        for account in [account for account in self._accounts if account.owner.provisional]:
            owner = owner_of(account.owner, now_steady)
            if owner != account.owner:
                tally = self._accounts.pop(account)
                self._account(replace(account, owner=owner), now_steady).absorb(tally, now_steady)

    def view(self, now_steady: float) -> LedgerView:
        """Return what is to be shown. Before ``dump`` where both are needed, so that what is shown is what is kept."""
        birth = self.birth_seconds
        return LedgerView(
            accounts={
                account: tally.shown(now_steady, birth)
                for account, tally in self._accounts.items()
                if not account.owner.provisional
            },
            pods={pod: tally.shown(now_steady, birth) for pod, tally in self._pods.items()},
            conservation_error_seconds=self.conservation_error_seconds,
            capacity_seconds=self.capacity_seconds,
            withheld_seconds=sum(tally.withheld_seconds for tally in self._accounts.values()),
            started_at_seconds=self.started_at_seconds,
        )

    def dump(self) -> dict[str, Any]:
        """Return all of it, ready for JSON and shared with nothing here."""
        return {
            "started_at_seconds": self.started_at_seconds,
            "capacity_seconds": self.capacity_seconds,
            "conservation_error_seconds": self.conservation_error_seconds,
            "accounts": [
                {
                    "namespace": account.owner.namespace,
                    "kind": account.owner.kind,
                    "name": account.owner.name,
                    "team": account.owner.team,
                    "provisional": account.owner.provisional,
                    "model": account.model,
                    "mode": account.mode.value,
                    "totals": tally.dump(),
                }
                for account, tally in self._accounts.items()
            ],
            "pods": [
                {name: getattr(pod, name) for name in PodAccount.__slots__} | {"totals": tally.dump()}
                for pod, tally in self._pods.items()
            ],
        }

    @classmethod
    def load(
        cls,
        data: Mapping[str, Any],
        *,
        linger_seconds: float = 300.0,
        birth_seconds: float = 75.0,
        account_limit: int = 2000,
    ) -> "Ledger":
        """Read what ``dump`` returned, in this boot or another.

        Raises:
            ValueError: It is not that; says what is wrong with it.
        """
        try:
            ledger = cls(
                linger_seconds=linger_seconds,
                birth_seconds=birth_seconds,
                account_limit=account_limit,
                started_at_seconds=amount(data, "started_at_seconds"),
                conservation_error_seconds=amount(data, "conservation_error_seconds"),
                capacity_seconds=amount(data, "capacity_seconds"),
            )
            ledger._accounts = {_account_of(entry): tally_of(entry["totals"]) for entry in data["accounts"]}
            for entry in data["pods"]:
                pod = _pod_of(entry)
                ledger._pods[pod] = tally_of(entry["totals"])
                ledger._pod_now[_key(pod)] = pod
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"not a ledger: {type(error).__name__}: {error}") from error
        return ledger

    def _account(self, account: Account, now: float) -> Tally:
        tally = self._accounts.get(account)
        if tally is None:
            tally = self._accounts[account] = Tally(changed=now)
        return tally

    def _fold(self, now: float) -> None:
        """Fold the accounts that have not changed for longest until there is room, one of ``OTHER`` included."""
        foldable = [
            (-1.0 if tally.changed is None else tally.changed, number, account)
            for number, (account, tally) in enumerate(self._accounts.items())
            if account.owner not in NEVER_FOLDED and not account.owner.provisional and tally.changed != now
        ]
        foldable.sort(key=lambda entry: entry[:2])
        for _, _, account in foldable:
            if len(self._accounts) <= self.account_limit:
                return
            tally = self._accounts.pop(account)
            other = replace(account, owner=OTHER)
            self._accounts.setdefault(other, Tally()).absorb(tally, now)

    def _pod(self, pod: PodAccount) -> Tally:
        tally = self._pods.get(pod)
        if tally is not None:
            return tally
        # A UID that becomes known, or is not told for a while, makes no other pod; one that differs does.
        before = self._pod_now.get(_key(pod))
        if before is not None and before in self._pods and not _other_pod(before, pod):
            if pod.pod_uid is None and replace(pod, pod_uid=before.pod_uid) == before:
                return self._pods[before]
            tally = self._pods.pop(before)
        self._pod_now[_key(pod)] = pod
        self._pods[pod] = tally = tally or Tally()
        return tally

    def _drop_ended(self, now: float) -> None:
        """Drop pods that ended long enough ago; only where time is metered, as nobody else can tell that they ended."""
        for pod in [pod for pod, tally in self._pods.items() if self._is_over(tally, now)]:
            del self._pods[pod]
            if self._pod_now.get(_key(pod)) == pod:
                del self._pod_now[_key(pod)]

    def _is_over(self, tally: Tally, now: float) -> bool:
        if tally.changed is None:  # from before a restart, and not held since
            tally.changed = now
            return False
        born = tally.changed if tally.birth.at_seconds is None else tally.birth.at_seconds
        # However short life and lingering are, the truth is shown for as long as the zeros before it.
        until = born + self.birth_seconds + max(self.linger_seconds, self.birth_seconds)
        return now > max(tally.changed + self.linger_seconds, until)


def _key(pod: PodAccount) -> PodKey:
    return pod.device_uuid, pod.namespace, pod.pod, pod.container


def _other_pod(before: PodAccount, after: PodAccount) -> bool:
    return bool(before.pod_uid and after.pod_uid and before.pod_uid != after.pod_uid)


def _account_of(entry: Mapping[str, Any]) -> Account:
    texts = {name: _text(entry, name) for name in Owner.__slots__ if name != "provisional"}
    owner = Owner(**texts, provisional=bool(entry.get("provisional", False)))  # a state of before has none
    return Account(owner=owner, model=_text(entry, "model"), mode=ShareMode(entry["mode"]))


def _pod_of(entry: Mapping[str, Any]) -> PodAccount:
    texts = {name: _text(entry, name) for name in PodAccount.__slots__ if name not in {"gpu_index", "pod_uid"}}
    uid = None if entry["pod_uid"] is None else _text(entry, "pod_uid")
    return PodAccount(**texts, gpu_index=int(entry["gpu_index"]), pod_uid=uid)


def _text(entry: Mapping[str, Any], name: str) -> str:
    value = entry[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, not text")
    return value
