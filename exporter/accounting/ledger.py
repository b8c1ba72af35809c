"""A ledger: sums per owner under an identity, which begin at 0 and never go back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.accounting.cost import money
from exporter.accounting.pods import PodTable
from exporter.accounting.tally import Tally, amount, tally_of, text
from exporter.model import Account, Money, Owner, Portion, Price, ShareMode, ShownLedger

COST_LABELS_LIMIT = 200
"""Combinations of cost labels in a ledger; a label whose value differs in each pod would make a series for each."""
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
                {
                    "namespace": account.owner.namespace,
                    "kind": account.owner.kind,
                    "name": account.owner.name,
                    "team": account.owner.team,
                    "cost_labels": account.owner.cost_labels,
                    "provisional": account.owner.provisional,
                    "pod_uid": account.owner.pod_uid,
                    "model": account.model,
                    "mode": account.mode.value,
                    "totals": tally.dump(),
                }
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
