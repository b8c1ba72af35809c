"""Manages the ledgers of a node: which one takes charges, which ones are shown, and which data is saved."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.accounting.ledger import Ledger, PodTable, Sheet, ledger_of, totals_of
from exporter.accounting.records import read
from exporter.model import LedgerView, Owner, PodAccount, Portion, Price, Totals

ACCOUNT_LIMIT = 2000
"""Owners in a ledger; above it, a new ledger begins. The pods of a node are far fewer."""
FORMER_SECONDS = 25 * 3600.0
"""Time for which an ended ledger is shown: the longest range of the recording rules."""
FORMER_LIMIT = 8
"""Maximum number of ended ledgers that are kept."""
PATIENCE_SECONDS = 3600.0
"""Minimum time between the starts of two memory-only ledgers when the limit of ended ledgers is reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saving:
    """A save in progress: the state after its success, and the data it was made from."""

    at_seconds: float
    ledger: Ledger
    former: tuple[Ledger, ...]
    before: frozenset[str]
    """Identities of the ledgers that had ended when it began."""
    charged: Sheet
    """Charges that the saved ledger lacks until the save succeeds."""
    memory: Ledger | None
    """The memory-only ledger, which ends with a successful save; it takes no charges in the meantime."""


@dataclass(slots=True, kw_only=True)
class Ledgers:
    """The ledgers of a node.

    Without a state file, one ledger is charged and shown. With one (``saves``), charges wait in a sheet that is not
    shown; a save writes ledger and sheet, and the ledger shows the sum once that is on disk. After a failed save,
    charges go to a memory-only ledger with its own identity, and the saved one is shown as it is on disk. The next
    successful save ends the memory-only ledger, and the saved one continues. So the next process never shows less under
    an identity than this process did, whenever this one ends.
    """

    saves: bool = False
    linger_seconds: float = 300.0
    account_limit: int = ACCOUNT_LIMIT
    new_identity: Callable[[], str] = lambda: secrets.token_hex(6)
    """Returns an identity that no other ledger has."""
    pods: PodTable = field(init=False)
    folded_count: int = 0
    """Number of cost-label combinations beyond a ledger's limit, which are entered under ``__other__``."""
    _folded: set[str] = field(default_factory=set)
    """Combinations that have been counted recently."""
    _ledger: Ledger = field(init=False)
    """The ledger on disk, or to be saved; without a state file, the charged one. Begins with a sample."""
    _is_begun: bool = False
    _is_saved: bool = False
    _waiting: Sheet = field(default_factory=Sheet)
    """Charges since the last save; not shown."""
    _doubtful: Sheet = field(default_factory=Sheet)
    """Charges of saves that may or may not be on disk (``state_unsynced``); the next save includes them."""
    _memory: Ledger | None = None
    _memory_since: float | None = None
    """Unix time at which the last memory-only ledger began."""
    _former: tuple[Ledger, ...] = ()
    """Ended ledgers, the newest first."""
    _saving: _Saving | None = None

    def __post_init__(self) -> None:
        """Create the first ledger."""
        self.pods = PodTable(linger_seconds=self.linger_seconds)
        self._ledger = self._new(0.0)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of ``begin_save``, after JSON.

        Raises:
            KeyError, TypeError, ValueError: The state has another form; then nothing has changed.
        """
        ledger, former = ledger_of(state["ledger"]), tuple(ledger_of(entry) for entry in state["former_ledgers"])
        pods = {read(PodAccount, entry): totals_of(entry) for entry in state["pods"]}
        self._ledger, self._former = ledger, former
        self._is_begun = self._is_saved = True
        self.pods.restore(pods)

    def charge(self, portions: Sequence[Portion], prices: Mapping[str, Price], *, now: float, steady: float) -> None:
        """Add the portions of one sample.

        Args:
            portions: Result of one call of ``Meter.add``.
            prices: Current price by UUID of the physical GPU; without one the seconds count as unpriced.
            now: Unix time.
            steady: Monotonic time in seconds.
        """
        if not self._is_begun:
            self._ledger.created_at_seconds, self._is_begun = now, True
        self._open.charge(portions, prices, self.pods, steady)
        self.pods.drop_ended(steady)
        self._former = self._kept(self._former, now)
        # A waiting sheet is divided when it is saved.
        if self._open is not self._waiting and self._is_full(self._open, (portion.account for portion in portions)):
            self._turn_over(now)

    def settle(self, owner_of: Callable[[Owner, float], Owner], steady: float) -> None:
        """Move unsaved sums of provisional owners to their actual owners; see ``Sheet.settle``."""
        self._open.settle(owner_of, steady)
        if self._open is not self._waiting:
            self._fold(self._open)

    def view(self, pods: Mapping[PodAccount, Totals] | None = None) -> LedgerView:
        """Return the ledgers and pod counters to show.

        Args:
            pods: Counters of pods to show instead of the current ones.
        """
        shown = [self._ledger] if self._is_saved or not self.saves else []
        shown += [one for one in (self._memory, self._saving and self._saving.memory) if one]
        shown += self._former
        return LedgerView(
            ledgers=tuple(ledger.shown() for ledger in shown),
            pods=self.pods.shown() if pods is None else pods,
            conservation_error_seconds=sum((ledger.sheet.conservation_error_seconds for ledger in shown), 0.0),
            withheld_seconds=sum((ledger.sheet.provisional_seconds for ledger in shown), 0.0),
        )

    @property
    def in_memory_only(self) -> bool:
        """Whether some shown data is not on disk."""
        return not self.saves or self._memory is not None or bool(self._saving and self._saving.memory)

    @property
    def shows_all(self) -> bool:
        """Whether a memory-only ledger shows all charges since the last save."""
        return self._memory is not None and not self._waiting.accounts

    def begin_save(self, owner_of: Callable[[Owner, float], Owner], *, now: float, steady: float) -> dict[str, Any]:
        """Return the data for the state file; ``saved`` or ``not_saved`` must follow.

        Args:
            owner_of: As for ``settle``; the owners of sums that are on disk change only with a save.
            now: Unix time.
            steady: Monotonic time in seconds.
        """
        charged, former, memory = self._doubtful.plus(self._waiting), self._former, self._memory
        if memory is not None:
            known, waiting = memory.sheet.divided()
            charged = charged.plus(waiting)
            former = (replace(memory, sheet=known, ended_at_seconds=now), *former)
        whole = replace(self._ledger, sheet=self._ledger.sheet.plus(charged))
        if self._is_full(whole.sheet, charged.accounts):
            known, waiting = self._ledger.sheet.divided()
            former = (replace(self._ledger, sheet=known, ended_at_seconds=now), *former)
            whole = self._new(now, waiting.plus(charged))
        whole.sheet.settle(owner_of, steady)
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
            self._is_saved, self._doubtful = True, Sheet()

    def not_saved(self, *, in_doubt: bool = False) -> None:
        """Continue in memory.

        Args:
            in_doubt: Whether the state may still be on disk; then no other ledger may show its charges.
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
        """Show the waiting charges in a memory-only ledger, also while a save that may still succeed is in progress.

        If the limit of ended ledgers is reached, it waits: a disk that fails repeatedly must not create a ledger each
        time.
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
        """The sheet that takes charges."""
        if not self.saves:
            return self._ledger.sheet
        return self._waiting if self._memory is None else self._memory.sheet

    def _fold(self, sheet: Sheet) -> None:
        new = sheet.fold() - self._folded
        self.folded_count += len(new)
        self._folded = new if len(self._folded) > self.account_limit else self._folded | new

    def _is_full(self, sheet: Sheet, charged: Iterable[object]) -> bool:
        """Whether a new ledger must begin; false if the owners charged now are already too many by themselves."""
        count = len(sheet.accounts)
        return count > self.account_limit and count > 2 * len({*charged})

    def _turn_over(self, now: float) -> None:
        """End the ledger that is charged and shown, and begin a new one in its place."""
        if self._memory is None:
            self._ledger = self._new(now, self._end(self._ledger, now))
        else:
            self._memory, self._memory_since = self._new(now, self._end(self._memory, now)), now

    def _end(self, ledger: Ledger, now: float) -> Sheet:
        """End a ledger; return its sums of provisional owners, which another ledger must take over."""
        known, waiting = ledger.sheet.divided()
        self._former = self._kept((replace(ledger, sheet=known, ended_at_seconds=now), *self._former), now)
        return waiting

    def _new(self, now: float, sheet: Sheet | None = None) -> Ledger:
        return Ledger(identity=self.new_identity(), created_at_seconds=now, sheet=sheet or Sheet())

    def _kept(self, former: Sequence[Ledger], now: float) -> tuple[Ledger, ...]:
        """Return the ended ledgers to keep: for ``FORMER_SECONDS``, within the limits of ledgers and owners."""
        kept: list[Ledger] = []
        owners = 0
        for ledger in former:
            owners += len(ledger.sheet.accounts)
            if kept and (owners > self.account_limit or len(kept) >= FORMER_LIMIT):
                break
            if now - (ledger.ended_at_seconds or now) <= FORMER_SECONDS:
                kept.append(ledger)
        return tuple(kept)
