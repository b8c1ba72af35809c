"""Manages the ledgers of a node: which one takes charges, which are shown, and what is written to disk."""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from exporter.accounting.ledger import Ledger, PodTable, Sheet, Tally, ledger_of, pods_of
from exporter.model import LedgerView, Owner, PodAccount, Portion, Price, Totals

ACCOUNT_LIMIT = 2000
"""Owners in a ledger; beyond it a new ledger begins. A node's pods are a small part of it."""
FORMER_SECONDS = 25 * 3600.0
"""How long a ledger that has ended stays on the page: as long as the rules look back."""
FORMER_LIMIT = 8
"""Ledgers that have ended and are kept."""
PATIENCE_SECONDS = 3600.0
"""With so many of them, a memory-only ledger begins so long after the one before, at the earliest."""


def random_identity() -> str:
    """Return an identity that no other ledger has."""
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saving:
    """A save under way: what becomes true when it succeeds, and what it was made of."""

    at_seconds: float
    ledger: Ledger
    former: tuple[Ledger, ...]
    before: frozenset[str]
    """Identities of those that had ended when it began."""
    charged: Sheet
    """What the saved ledger lacks until then."""
    memory: Ledger | None
    """The memory-only ledger until then, which ends with a success; nothing is charged to it meanwhile."""


@dataclass(slots=True, kw_only=True)
class Ledgers:
    """The ledgers of a node.

    Without a state file one ledger is charged and shown. With one (``saves``), charges wait in a sheet that is not
    shown; a save writes ledger and sheet, and the ledger shows the sum once that is on disk. From a save that fails on,
    charges go to a memory-only ledger with an identity of its own, and the saved one is shown as it is on disk. After
    the next save that works the memory-only one has ended, and the saved one continues. So the next process never shows
    less under an identity than this one did, whenever this one ends.
    """

    saves: bool = False
    linger_seconds: float = 300.0
    account_limit: int = ACCOUNT_LIMIT
    new_identity: Callable[[], str] = random_identity
    pods: PodTable = field(init=False)
    folded_count: int = 0
    """Combinations of cost labels that were beyond a ledger's limit and are entered under ``__other__``."""
    _folded: set[str] = field(default_factory=set)
    """Those that have been counted of late."""
    _ledger: Ledger = field(init=False)
    """The one that is on disk, or will be; without a state file the one that is charged. Begins with a sample."""
    _is_begun: bool = False
    _is_saved: bool = False
    _waiting: Sheet = field(default_factory=Sheet)
    """Charges since the last save; not shown."""
    _doubtful: Sheet = field(default_factory=Sheet)
    """Charges of saves that may be on disk or not (``state_unsynced``); part of the ledger with the next save."""
    _memory: Ledger | None = None
    _memory_since: float | None = None
    """Unix time at which a memory-only ledger was last begun."""
    _former: tuple[Ledger, ...] = ()
    """Those that have ended, the newest first."""
    _saving: _Saving | None = None

    def __post_init__(self) -> None:
        """Make the first ledger."""
        self.pods = PodTable(linger_seconds=self.linger_seconds)
        self._ledger = self._new(0.0)

    def restore(self, state: "KeptLedgers") -> None:
        """Continue from what ``kept_of`` has read."""
        self._ledger, self._former = state.ledger, state.former
        self._is_begun = self._is_saved = True
        self.pods.restore(state.pods)

    def charge(self, portions: Sequence[Portion], prices: Mapping[str, Price], *, now: float, steady: float) -> None:
        """Enter the portions of one sample.

        Args:
            portions: As one call of ``Meter.add`` returned them.
            prices: Price of this moment by UUID of the physical GPU; without one the seconds count as unpriced.
            now: Unix time.
            steady: Monotonic time in seconds.
        """
        if not self._is_begun:
            self._ledger.created_at_seconds, self._is_begun = now, True
        self._open.charge(portions, prices, self.pods, steady)
        self.pods.drop_ended(steady)
        self._former = self._kept(self._former, now)
        # What waits for a save is divided when it is saved.
        if self._open is not self._waiting and self._is_full(self._open, (portion.account for portion in portions)):
            self._turn_over(now)

    def settle(self, owner_of: Callable[[Owner, float], Owner], steady: float) -> None:
        """Move what stands on provisional owners, and is not on disk yet, to the owners; see ``Sheet.settle``."""
        self._open.settle(owner_of, steady)
        if self._open is not self._waiting:
            self._fold(self._open)

    def view(self, pods: Mapping[PodAccount, Totals] | None = None) -> LedgerView:
        """Return what is to be shown.

        Args:
            pods: Counters of pods, where those of this moment are not to be shown.
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
        """Whether something is shown that is not on disk."""
        return not self.saves or self._memory is not None or bool(self._saving and self._saving.memory)

    @property
    def shows_all(self) -> bool:
        """Whether all that was charged since the last save is shown in a memory-only ledger."""
        return self._memory is not None and not self._waiting.accounts

    def begin_save(self, owner_of: Callable[[Owner, float], Owner], *, now: float, steady: float) -> dict[str, Any]:
        """Return what is to be saved, ready for JSON; ``saved`` or ``not_saved`` must follow.

        Args:
            owner_of: As for ``settle``: of what is on disk already, owners become known with a save only.
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
        """Show what has been saved."""
        saving, self._saving = self._saving, None
        if saving is not None:
            ended_since = [ledger for ledger in self._former if ledger.identity not in saving.before]
            self._ledger, self._former = saving.ledger, (*ended_since, *saving.former)
            self._is_saved, self._doubtful = True, Sheet()

    def not_saved(self, *, in_doubt: bool = False) -> None:
        """Continue in memory.

        Args:
            in_doubt: The state may be on disk nevertheless; then no other ledger may show its charges.
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
        """Show what waits in a memory-only ledger, also while a save is under way that may succeed yet.

        With too many ledgers that have ended, not at once: a disk that fails again and again must not make a ledger
        each time.
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
        """The sheet that is charged."""
        if not self.saves:
            return self._ledger.sheet
        return self._waiting if self._memory is None else self._memory.sheet

    def _fold(self, sheet: Sheet) -> None:
        new = sheet.fold() - self._folded
        self.folded_count += len(new)
        self._folded = new if len(self._folded) > self.account_limit else self._folded | new

    def _is_full(self, sheet: Sheet, charged: Iterable[object]) -> bool:
        """Whether a new ledger is to begin: not where those that are charged now alone are too many."""
        count = len(sheet.accounts)
        return count > self.account_limit and count > 2 * len({*charged})

    def _turn_over(self, now: float) -> None:
        """End the ledger that is charged and shown, and begin another one in its place."""
        if self._memory is None:
            self._ledger = self._new(now, self._end(self._ledger, now))
        else:
            self._memory, self._memory_since = self._new(now, self._end(self._memory, now)), now

    def _end(self, ledger: Ledger, now: float) -> Sheet:
        """End a ledger; return what stands on provisional owners in it, which another one must take over."""
        known, waiting = ledger.sheet.divided()
        self._former = self._kept((replace(ledger, sheet=known, ended_at_seconds=now), *self._former), now)
        return waiting

    def _new(self, now: float, sheet: Sheet | None = None) -> Ledger:
        return Ledger(identity=self.new_identity(), created_at_seconds=now, sheet=sheet or Sheet())

    def _kept(self, former: Sequence[Ledger], now: float) -> tuple[Ledger, ...]:
        """Return those that stay: for ``FORMER_SECONDS``, and no more of them or of owners than there is room for."""
        kept: list[Ledger] = []
        owners = 0
        for ledger in former:
            owners += len(ledger.sheet.accounts)
            if kept and (owners > self.account_limit or len(kept) >= FORMER_LIMIT):
                break
            if now - (ledger.ended_at_seconds or now) <= FORMER_SECONDS:
                kept.append(ledger)
        return tuple(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLedgers:
    """Ledgers and counters of pods as a state has them."""

    ledger: Ledger
    former: tuple[Ledger, ...]
    pods: Mapping[PodAccount, Tally]


def kept_of(data: Mapping[str, Any]) -> KeptLedgers:
    """Read what ``Ledgers.begin_save`` returned.

    Raises:
        ValueError: It is something else; says what is wrong with it.
    """
    try:
        return KeptLedgers(
            ledger=ledger_of(data["ledger"]),
            former=tuple(ledger_of(entry) for entry in data["former_ledgers"]),
            pods=pods_of(data["pods"]),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a ledger: {type(error).__name__}: {error}") from error
