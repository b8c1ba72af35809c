"""Sums seconds, joules and money per owner under a ledger identity, and manages the ledgers of a node.

Under an identity, totals start at 0 and never decrease. A node has a ledger on disk, a ledger in memory while the disk
fails, and ended ledgers.
"""

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.accounting.prices import money
from exporter.model.attribution import HolderKey, Owner, is_other_pod
from exporter.model.ledger import Account, LedgerView, PodAccount, Portion, Price, ShownLedger, Totals
from exporter.model.records import read, written

_Charge = tuple[Portion, Totals]
"""A portion and its sums."""


def _charged(portion: Portion, price: Price | None) -> Totals:
    """Return the sums of one portion; without a price its seconds are unpriced."""
    seconds, joules = portion.seconds.total, portion.energy_joules
    return Totals(
        seconds=portion.seconds,
        energy_joules=joules or 0.0,
        energy_unknown_seconds=seconds if joules is None else 0.0,
        money={price.currency: money(portion.seconds, joules, price)} if price else {},
        unpriced_seconds=0.0 if price else seconds,
    )


@dataclass(slots=True, kw_only=True)
class PodTable:
    """Sums of pods; the sums of a pod are dropped ``linger_seconds`` after its last charge."""

    linger_seconds: float = 300.0
    _sums: dict[PodAccount, Totals] = field(default_factory=dict)
    _changed: dict[PodAccount, float] = field(default_factory=dict)
    """Monotonic time of the last charge in this process; absent for a restored pod until the first sample."""
    _now: dict[HolderKey, PodAccount] = field(default_factory=dict)
    """Current pod by container and device."""

    def charge(self, charges: Sequence[_Charge], steady: float) -> None:
        """Add the charges of one sample, and drop pods that ended more than ``linger_seconds`` ago.

        Pods are dropped only here, because an end is known only while time is metered.
        A pod stays the same when its UID becomes known or unknown; a different UID is another pod.

        Args:
            charges: Portions with their sums; those without a pod are left out.
            steady: Monotonic time in seconds.
        """
        for portion, totals in charges:
            if portion.pod is not None:
                known = self._known(portion.pod)
                self._changed[known] = steady
                self._sums[known] += totals
        for pod in [*self._sums]:
            if steady <= self._changed.setdefault(pod, steady) + self.linger_seconds:
                continue
            del self._sums[pod], self._changed[pod]
            if self._now.get(pod.key) == pod:
                del self._now[pod.key]

    def _known(self, pod: PodAccount) -> PodAccount:
        if pod in self._sums:
            return pod
        before = self._now.get(pod.key)
        totals = Totals()
        if before is not None and not is_other_pod(before.pod_uid, pod.pod_uid):
            if pod.pod_uid is None and replace(pod, pod_uid=before.pod_uid) == before:
                return before
            totals = self._sums.pop(before)
            self._changed.pop(before, None)
        self._now[pod.key] = pod
        self._sums[pod] = totals
        return pod

    def shown(self) -> dict[PodAccount, Totals]:
        """Return the current totals."""
        return dict(self._sums)

    def dump(self) -> list[dict[str, Any]]:
        """Return all sums, for the state file."""
        return [{**written(pod), "totals": totals} for pod, totals in self._sums.items()]

    def restore(self, sums: Mapping[PodAccount, Totals]) -> None:
        """Continue from these sums."""
        self._sums = dict(sums)
        self._now = {pod.key: pod for pod in sums}


COST_LABELS_LIMIT = 200
"""Maximum number of cost-label combinations in a ledger; a label with a value per pod would create one per pod."""
_OTHER = "=__other__"
"""Suffix of each pair of a combination beyond the limit. No Kubernetes label can have this value."""


@dataclass(slots=True, kw_only=True)
class Sheet:
    """Sums per account over a time."""

    accounts: dict[Account, Totals] = field(default_factory=dict)
    capacity_seconds: float = 0.0
    """Sum of all intervals of all GPUs, without the seconds of provisional owners; never decreases."""
    conservation_error_seconds: float = 0.0
    """Sum over GPUs and intervals of |sum of the portions - the interval|."""
    since_seconds: float = math.inf
    """Unix time of the first charge."""

    @property
    def provisional_seconds(self) -> float:
        """Allocated seconds of provisional owners."""
        return sum((totals.seconds.total for totals in self.of_owners(provisional=True).values()), 0.0)

    def of_owners(self, *, provisional: bool) -> dict[Account, Totals]:
        """Return the sums of provisional owners, or those of all others."""
        return {
            account: totals for account, totals in self.accounts.items() if account.owner.provisional is provisional
        }

    def charge(self, charges: Sequence[_Charge], now: float) -> None:
        """Add the charges of one sample to the accounts at a Unix time."""
        self.since_seconds = min(self.since_seconds, now)
        sums: dict[str, float] = {}
        provisional: dict[str, float] = {}
        intervals: dict[str, float | None] = {}
        for portion, totals in charges:
            uuid = portion.gpu_uuid
            self._add(portion.account, totals)
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

    def settle(self, owner_of: Callable[[Owner], Owner]) -> None:
        """Move the sums of provisional owners to their actual owners.

        Args:
            owner_of: Returns the actual owner of a provisional owner, or the provisional owner while unknown.
        """
        for account in [account for account in self.accounts if account.owner.provisional]:
            owner = owner_of(account.owner)
            if owner != account.owner:
                totals = self.accounts.pop(account)
                self.capacity_seconds += totals.seconds.total
                self._add(replace(account, owner=owner), totals)

    def fold(self) -> set[str]:
        """Move combinations of cost labels beyond ``COST_LABELS_LIMIT`` to ``__other__``.

        Returns:
            The moved combinations. The first combinations stay, so a shown combination is never moved.
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
            since_seconds=min(self.since_seconds, other.since_seconds),
        )
        for account, totals in other.accounts.items():
            total._add(account, totals)
        return total

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
    """Unix time of its end, after which it gets no charges; ``None`` while it is open."""
    sheet: Sheet = field(default_factory=Sheet)

    def ended(self, now: float) -> tuple["Ledger", Sheet]:
        """Return the ended ledger, and the sums of its provisional owners, to be added to another ledger."""
        known = replace(self.sheet, accounts=self.sheet.of_owners(provisional=False))
        return replace(self, sheet=known, ended_at_seconds=now), Sheet(accounts=self.sheet.of_owners(provisional=True))

    def shown(self) -> ShownLedger:
        """Return the public view of the ledger."""
        return ShownLedger(
            identity=self.identity,
            created_at_seconds=self.created_at_seconds,
            capacity_seconds=self.sheet.capacity_seconds,
            accounts=self.sheet.of_owners(provisional=False),
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
            accounts={
                read(Account, {**entry, "owner": entry}): read(Totals, entry["totals"]) for entry in data["accounts"]
            },
            capacity_seconds=read(float, data["capacity_seconds"]),
            conservation_error_seconds=read(float, data["conservation_error_seconds"]),
        ),
    )


ACCOUNT_LIMIT = 2000
"""Maximum number of accounts in a ledger; above it, a new ledger begins. A node has far fewer pods."""
FORMER_SECONDS = 25 * 3600.0
"""Time for which an ended ledger is shown, so that Prometheus still scrapes it after an outage of a day."""
FORMER_LIMIT = 8
"""Maximum number of ended ledgers that are kept."""
PATIENCE_SECONDS = 3600.0
"""Minimum time between the starts of two memory-only ledgers when the limit of ended ledgers is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saving:
    """A save in progress: the state after its success, and the data before it."""

    at_seconds: float
    ledger: Ledger
    former: tuple[Ledger, ...]
    before: frozenset[str]
    """Identities of the ledgers that had ended before the save began."""
    charged: Sheet
    """Charges that the saved ledger lacks until the save succeeds."""
    memory: Ledger | None
    """Memory-only ledger, which ends with a successful save; it gets no charges during the save."""


@dataclass(slots=True, kw_only=True)
class Ledgers:
    """The ledgers of a node.

    Without a state file, one ledger in memory is charged and shown. With a state file (``saves``), charges wait in a
    sheet that is not shown. A save writes the sum of ledger and sheet, and the ledger shows the sum once it is on disk.
    After a failed save, charges go to a memory-only ledger with its own identity; the saved ledger is still shown as
    on disk. The next successful save ends the memory-only ledger and continues the saved one. So the next process
    never shows less under an identity than this process.
    """

    saves: bool = False
    account_limit: int = ACCOUNT_LIMIT
    new_identity: Callable[[], str] = lambda: secrets.token_hex(6)
    """Returns an identity that no other ledger has."""
    pods: PodTable = field(default_factory=PodTable)
    folded_count: int = 0
    """Number of cost-label combinations beyond the limit of a ledger, charged under ``__other__``."""
    _folded: set[str] = field(default_factory=set)
    """Combinations that have been counted recently."""
    _ledger: Ledger | None = None
    """Ledger on disk; ``None`` before the first save."""
    _waiting: Sheet = field(default_factory=Sheet)
    """Charges since the last save, which are not shown."""
    _doubtful: Sheet = field(default_factory=Sheet)
    """Charges of saves that may or may not be on disk (``state_unsynced``); the next save includes them."""
    _memory: Ledger | None = None
    """Memory-only ledger that gets the charges; ``None`` while saves work."""
    _memory_since: float | None = None
    """Unix time at which the last memory-only ledger began."""
    _former: tuple[Ledger, ...] = ()
    """Ended ledgers, newest first."""
    _saving: _Saving | None = None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of ``begin_save``, read from JSON.

        Raises:
            KeyError, TypeError, ValueError: The state has another form; then nothing has changed.
        """
        ledger, former = ledger_of(state["ledger"]), tuple(ledger_of(entry) for entry in state["former_ledgers"])
        pods = {read(PodAccount, entry): read(Totals, entry["totals"]) for entry in state["pods"]}
        if self.saves:
            self._ledger = ledger
        else:
            self._memory = ledger
        self._former = former
        self.pods.restore(pods)

    def charge(self, portions: Sequence[Portion], prices: Mapping[str, Price], *, now: float, steady: float) -> None:
        """Add the portions of one sample.

        Args:
            portions: Result of one call of ``Meter.add``.
            prices: Current price by UUID of the physical GPU; seconds without a price count as unpriced.
            now: Unix time.
            steady: Monotonic time in seconds.
        """
        if not self.saves and self._memory is None:
            self._memory = self._new(now)
        charges = [(portion, _charged(portion, prices.get(portion.gpu_uuid))) for portion in portions]
        self._open.charge(charges, now)
        self.pods.charge(charges, steady)
        self._former = self._kept(self._former, now)
        # A save checks the size of the waiting sheet.
        memory = self._memory
        if memory is not None and self._is_full(memory.sheet, (portion.account for portion in portions)):
            self._memory, self._memory_since = self._new(now, self._end(memory, now)), now

    def settle(self, owner_of: Callable[[Owner], Owner]) -> None:
        """Move unsaved sums of provisional owners to their actual owners; see ``Sheet.settle``."""
        self._open.settle(owner_of)
        if self._memory is not None:
            self._fold(self._memory.sheet)

    def view(self, pods: Mapping[PodAccount, Totals] | None = None) -> LedgerView:
        """Return the ledgers and pod counters to show.

        Args:
            pods: Counters of pods to show instead of the current ones.
        """
        in_memory = (self._memory, self._saving and self._saving.memory)
        shown = [*(ledger for ledger in (self._ledger, *in_memory) if ledger), *self._former]
        return LedgerView(
            ledgers=tuple(ledger.shown() for ledger in shown),
            pods=self.pods.shown() if pods is None else pods,
            conservation_error_seconds=sum((ledger.sheet.conservation_error_seconds for ledger in shown), 0.0),
            withheld_seconds=sum((ledger.sheet.provisional_seconds for ledger in shown), 0.0),
        )

    @property
    def in_memory_only(self) -> bool:
        """Whether some shown data is not on disk."""
        return self._memory is not None or bool(self._saving and self._saving.memory)

    @property
    def shows_all(self) -> bool:
        """Whether a memory-only ledger shows all charges since the last save."""
        return self._memory is not None and not self._waiting.accounts

    def begin_save(self, owner_of: Callable[[Owner], Owner], now: float) -> dict[str, Any]:
        """Return the data for the state file; ``saved`` or ``not_saved`` must follow.

        Args:
            owner_of: As for ``settle``; the owners of sums that are on disk change only with a save.
            now: Unix time.
        """
        charged, former, memory = self._doubtful.plus(self._waiting), self._former, self._memory
        if memory is not None:
            ended, waiting = memory.ended(now)
            charged, former = charged.plus(waiting), (ended, *former)
        ledger = self._ledger or self._new(min(now, charged.since_seconds))
        whole = replace(ledger, sheet=ledger.sheet.plus(charged))
        if self._is_full(whole.sheet, charged.accounts):
            ended, waiting = ledger.ended(now)
            whole, former = self._new(now, waiting.plus(charged)), (ended, *former)
        whole.sheet.settle(owner_of)
        self._fold(whole.sheet)
        former = self._kept(former, now)
        self._saving = _Saving(
            at_seconds=now,
            ledger=whole,
            former=former,
            before=frozenset(ledger.identity for ledger in self._former),
            charged=self._waiting,
            memory=memory,
        )
        self._waiting, self._memory = Sheet(), None
        return {
            "ledger": whole.dump(),
            "former_ledgers": [ledger.dump() for ledger in former],
            "pods": self.pods.dump(),
        }

    def saved(self) -> None:
        """Show the saved data."""
        saving, self._saving = self._saving, None
        if saving is not None:
            ended_since = [ledger for ledger in self._former if ledger.identity not in saving.before]
            self._ledger, self._former = saving.ledger, (*ended_since, *saving.former)
            self._doubtful = Sheet()

    def not_saved(self, *, in_doubt: bool = False) -> None:
        """Continue in memory.

        Args:
            in_doubt: Whether the state may be on disk nevertheless; then no other ledger may show its charges.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        if in_doubt:
            self._doubtful = self._doubtful.plus(saving.charged)
            if saving.memory is not None:
                self._doubtful = self._doubtful.plus(self._end(saving.memory, saving.at_seconds))
        else:
            self._waiting = self._waiting.plus(saving.charged)
            if self._memory is None:
                self._memory = saving.memory
            elif saving.memory is not None:
                self._waiting = self._waiting.plus(self._end(saving.memory, saving.at_seconds))
        self.go_on_in_memory(saving.at_seconds)

    def go_on_in_memory(self, now: float) -> None:
        """Show the waiting charges in a memory-only ledger, also during a save that may still succeed.

        At the limit of ended ledgers it waits, so that a disk that fails repeatedly does not create a ledger each time.
        """
        since = self._memory_since
        is_early = since is not None and 0 <= now - since < PATIENCE_SECONDS
        if self._memory is None and not (is_early and len(self._former) >= FORMER_LIMIT):
            self._memory, self._waiting, self._memory_since = self._new(now, self._waiting), Sheet(), now
        elif self._memory is not None and self._waiting.accounts:
            self._memory.sheet, self._waiting = self._memory.sheet.plus(self._waiting), Sheet()
        if self._memory is not None:
            self._fold(self._memory.sheet)

    @property
    def _open(self) -> Sheet:
        """Sheet that gets the charges."""
        return self._waiting if self._memory is None else self._memory.sheet

    def _fold(self, sheet: Sheet) -> None:
        new = sheet.fold() - self._folded
        self.folded_count += len(new)
        self._folded = new if len(self._folded) > self.account_limit else self._folded | new

    def _is_full(self, sheet: Sheet, charged: Iterable[object]) -> bool:
        """Return whether a new ledger must begin; false if at least half of the accounts are charged now."""
        count = len(sheet.accounts)
        return count > self.account_limit and count > 2 * len({*charged})

    def _end(self, ledger: Ledger, now: float) -> Sheet:
        """End a ledger and add it to the ended ledgers; return its sums of provisional owners."""
        ended, waiting = ledger.ended(now)
        self._former = self._kept((ended, *self._former), now)
        return waiting

    def _new(self, now: float, sheet: Sheet | None = None) -> Ledger:
        """Return a new ledger that begins with the first charge."""
        sheet = sheet or Sheet()
        return Ledger(identity=self.new_identity(), created_at_seconds=min(now, sheet.since_seconds), sheet=sheet)

    def _kept(self, former: Sequence[Ledger], now: float) -> tuple[Ledger, ...]:
        """Return the ended ledgers to keep, by age (``FORMER_SECONDS``) and by the limits of ledgers and owners."""
        kept: list[Ledger] = []
        owners = 0
        for ledger in former:
            owners += len(ledger.sheet.accounts)
            if kept and (owners > self.account_limit or len(kept) >= FORMER_LIMIT):
                break
            if now - (ledger.ended_at_seconds or now) <= FORMER_SECONDS:
                kept.append(ledger)
        return tuple(kept)
