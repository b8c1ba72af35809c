"""Meters every sample, saves the ledger, and shows only saved totals while the state file is writable."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

from exporter.accounting.idle import IdleClock, IdleMemory
from exporter.accounting.ledger import COST_LABELS_LIMIT, Ledgers
from exporter.accounting.meter import Meter, MeterState
from exporter.accounting.owner_figures import OwnerFaults
from exporter.accounting.prices import NodePrices, PriceBook
from exporter.accounting.state_file import UNSYNCED, StateFile, WriterLock
from exporter.agent.owners import Owners, OwnerWindows
from exporter.attribution.device_ids import ReplicaKey
from exporter.errors import ConfigError, StateError
from exporter.model.attribution import NodeFacts, Owner
from exporter.model.ledger import LedgerView, PodAccount, Totals
from exporter.model.records import read, written
from exporter.model.snapshot import DeviceView, MeteringView

LOG = logging.getLogger("exporter.agent")

_FOLDED = "ledger", "too_many_cost_labels"
_FOLDED_NOTE = (
    f"more than {COST_LABELS_LIMIT} combinations of the labels that --cost-labels names: further ones are metered with"
    " the value __other__ until a new ledger begins; leave out keys with a value per pod"
)

HUNG_SECONDS = 30.0
"""Duration after which a save is reported as hung, and the page no longer waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentState:
    """Record of the state file with the data other than ledgers and the state of the meter."""

    saved_at_seconds: float
    """Unix time of the save."""
    simulated: bool
    labelled: NodeFacts | None
    replicas: tuple[tuple[str, str, int], ...]
    """Device UUID, resource and replica count of each shared device."""
    idle_clocks: tuple[IdleMemory, ...]

    def __post_init__(self) -> None:
        """Reject invalid values, such as those of another program.

        Raises:
            ValueError, OverflowError, OSError: The time is outside the calendar, or a replica count is 0.
        """
        datetime.fromtimestamp(self.saved_at_seconds, UTC)
        if not all(count for _, _, count in self.replicas):
            raise ValueError(f"not numbers of replicas: {self.replicas!r:.100}")


@dataclass(slots=True, kw_only=True)
class Save:
    """State to write, and the counters of pods in it."""

    file: StateFile
    data: Mapping[str, Any]
    pods: Mapping[PodAccount, Totals]
    now: float
    """Unix time at the start of the save."""
    steady: float
    windows: tuple[StateFile, Mapping[str, Any]] | None = None
    """Activity windows to write after the state, if due; a failure does not affect the ledger."""
    windows_error: StateError | None = None

    def write(self) -> StateError | None:
        """Write the state. Blocks until the disk has answered; uses no data that the agent changes meanwhile."""
        error = self.file.try_save(self.data)
        if self.windows and not error:
            file, windows = self.windows
            self.windows_error = file.try_save(windows)
        return error


@dataclass(slots=True, kw_only=True)
class Metering:
    """Meter, ledgers, prices and state file of one node.

    With a writable state file, ``shown`` is the saved state. After the end of the process, the next one therefore
    continues from at least the scraped values. While the file is not writable, a memory-only ledger is shown too.
    """

    meter: Meter
    ledgers: Ledgers
    prices: NodePrices = field(default_factory=NodePrices)
    owners: Owners = field(default_factory=Owners)
    replicas: dict[ReplicaKey, int] = field(default_factory=dict)
    """Replica counts of shared devices; saved with the ledger, because no source reports those of unhealthy devices."""
    clock: IdleClock | None = None
    """Ages and idle times of holders, saved with the ledger."""
    owner_windows: OwnerWindows = field(default_factory=OwnerWindows)
    owner_faults: OwnerFaults = field(default_factory=OwnerFaults)
    file: StateFile | None = None
    lock: WriterLock = field(default_factory=partial(WriterLock, held=True))
    """Lock of the writer. While another agent has it, this agent charges, saves and shows nothing."""
    boot_id: str = ""
    """Boot id of the machine; empty if unknown. Monotonic clocks of two boots are not comparable."""
    loaded_driver: Callable[[], int | None] = lambda: None
    """Returns the identity of the loaded driver; ``None`` if unknown. Energy counters restart with the driver."""
    simulated: bool = False
    save_interval_seconds: float = 5.0
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Counts since start by (part, reason)."""
    problem: str = ""
    """Reason why totals are not on disk, in one line; empty if they are, or without a state directory."""
    shown: LedgerView | None = None
    begun: bool = False
    """Whether a sample was metered in this process."""
    _is_noted: bool = False
    """Whether the lock file contains a note."""
    _saving: Save | None = None
    _next_save: float | None = None

    def become_writer(self, steady: float) -> None:
        """Become the writer of the node's ledger if no other agent is, and continue from the state file.

        Args:
            steady: Current seconds of the monotonic clock.
        """
        lock = self.lock
        if lock.held:
            return
        waited, before = lock.waits_for, lock.fault
        is_writer = lock.take()
        if lock.fault not in {"", before}:
            LOG.warning("ledger: %s", lock.fault)
        if is_writer:
            if waited:
                LOG.info("ledger: the other agent has ended, this one writes the ledger from now on")
            self.restore(steady)

    def restore(self, steady: float) -> None:
        """Continue from the state file, if it exists; an invalid file is set aside, logged and counted.

        Args:
            steady: Monotonic time in seconds.
        """
        if self.file is None:
            return
        try:
            saved = self.file.parsed(partial(self._parsed, self.file))
        except StateError as error:
            self._failed(error)
            return
        if saved is None:
            return
        state, of_file = saved
        # Counts that this agent has read while another one wrote the ledger are newer.
        self.replicas.update({(uuid, resource): count for uuid, resource, count in state.replicas} | self.replicas)
        self.prices.labelled = self.prices.labelled or state.labelled
        point = self._later(of_file)
        self.owners.restore(point.slots)
        if point.boot_id and point.boot_id == self.boot_id:
            self.meter.resume(point)
            if self.clock and of_file.boot_id == self.boot_id:
                self.clock.restore(state.idle_clocks, steady)
            self.owner_windows.restore(steady, self.errors)
        self.shown = replace(self.ledgers.view(), saved_at_seconds=state.saved_at_seconds)
        LOG.info("the ledger continues from %s", self.file.path)

    def _parsed(self, file: StateFile, data: Mapping[str, Any]) -> tuple[AgentState, MeterState]:
        """Parse a saved state and restore its ledgers."""
        state, meter = read(AgentState, data), read(MeterState, data)
        if state.simulated is not self.simulated:
            what = "is of a real node and this one is simulated" if self.simulated else "is of a simulated node"
            raise file.set_aside("state_foreign", what)
        self.ledgers.restore(data)
        return state, meter

    def _later(self, saved: MeterState) -> MeterState:
        """Return the later of the saved point and the point in the lock file.

        A process that has shown more than it has saved leaves a point in the lock file.
        """
        noted = self.lock.noted()
        self._is_noted = bool(noted)
        try:
            point = read(MeterState, noted)
        except (KeyError, TypeError, AttributeError, ValueError):
            return saved
        if not point.boot_id or point.boot_id != self.boot_id:
            return saved
        is_later = saved.boot_id != self.boot_id or point.metered_steady > saved.metered_steady
        return point if is_later else saved

    def _note(self, point: MeterState | None) -> None:
        """Write the instant up to which time is shown to the lock file; ``None``: the state file has all of it."""
        if not (point or self._is_noted):
            return
        try:
            self.lock.note(point)
        except OSError as error:
            self.errors["state", "not_noted"] += 1
            if self.errors["state", "not_noted"] == 1:
                what = "ledger: cannot write %s: %s; a restart charges the time that is not saved again"
                LOG.warning(what, self.lock.path, error.strerror)
        else:
            self._is_noted = bool(point)

    def close(self) -> None:
        """Release the ledger to another agent, except while a save hangs: that save may still replace the file.

        The kernel releases the lock at the end of the process, which also ends the hung save.
        """
        if self._saving is None:
            self.lock.release()

    @property
    def resumes(self) -> bool:
        """Whether the next sample closes the interval across a restart."""
        return not self.begun and self.meter.steady is not None

    def observe(self, views: Sequence[DeviceView], *, sampled_steady: float, now: float, steady: float) -> None:
        """Meter one sample.

        Args:
            views: Views of the sample's devices.
            sampled_steady: Instant of the sample, on the monotonic clock.
            now: Unix time, for the prices.
            steady: Monotonic time in seconds, for lingering.
        """
        self.prices.look_up(views, now)
        if not self.lock.held:
            return
        portions = self.meter.add(views, sampled_steady, self.loaded_driver())
        self.owner_windows.add(portions, steady)
        for part, prices in self.prices.split(portions, now):
            self.ledgers.charge(part, prices, now=now, steady=steady)
        self.ledgers.settle(partial(self._settled, steady=steady))
        if folded := self.ledgers.folded_count:
            if not self.errors[_FOLDED]:
                LOG.warning("ledger: %s", _FOLDED_NOTE)
            self.errors[_FOLDED] = folded
        self.begun = True

    def use_prices(self, book: PriceBook) -> None:
        """Use another price book, beginning with the next sample."""
        self.prices.book = book
        for warning in book.warnings:
            LOG.warning("%s", warning)
        LOG.info("price book reloaded: %s", book.description or "no prices")

    def keep_prices(self, error: ConfigError) -> None:
        """Keep the last valid book, because the new book has mistakes; count and log them."""
        self.errors["prices", "invalid"] += 1
        for line in (*error.problems, "price book not reloaded, the last good one stays: fix it and send SIGHUP again"):
            LOG.error("%s", line)

    def view(self, views: Sequence[DeviceView], *, now: float, steady: float) -> MeteringView:
        """Return the ledger, owners and prices to show now; arguments as for ``observe``."""
        prices, ledger = self.prices, self.ledger_view(steady)
        owners = None
        if ledger:
            free = self.meter.free_shares()
            held = self.owner_windows.view(views, prices.current, free, now=now, steady=steady)
            owners = self.owner_faults.add_to(held, views, now=now, steady=steady)
        return MeteringView(
            ledger=ledger,
            owners=owners,
            node_facts=prices.node_facts,
            prices=prices.current,
            price_book=prices.book.description,
            unpriced_gpus=prices.unpriced_gpus,
            awaits_labels=prices.awaits_labels,
            is_writer=self.lock.held,
            is_locked=self.lock.host_held,
            lock_note=self.lock.fault,
        )

    def _settled(self, provisional: Owner, steady: float) -> Owner:
        """Return the actual owner for a provisional owner, and move the activity windows to it."""
        owner = self.owners.settled(provisional, steady)
        self.owner_windows.windows.settle(provisional, owner)
        return owner

    def ledger_view(self, steady: float) -> LedgerView | None:
        """Return the ledger to show now; ``None`` before the first sample."""
        hung = self._saving is not None and steady - self._saving.steady > HUNG_SECONDS
        if hung and self._saving is not None:
            if not self.problem:
                words = f"the disk of {self._saving.file.path} has not answered for {HUNG_SECONDS:.0f} s"
                self._failed(StateError("hung", f"state: {words}"))
            self.ledgers.go_on_in_memory(self._saving.now + steady - self._saving.steady)
        # During a save, the shown ledger does not change: no later save may succeed.
        from_memory = self.file is None or self.problem
        if from_memory and self.begun and (self._saving is None or hung):
            if self.file is not None and self.ledgers.shows_all:
                self._note(self.meter.state(self.boot_id))  # before the view is shown
            self.shown = self.ledgers.view()
        if self.shown is None:
            return None
        return replace(self.shown, state_problem=self.problem)

    def begin_save(self, now: float, steady: float, *, last: bool = False) -> Save | None:
        """Return the state to save now; ``None`` if no save is due or while one is in progress.

        Args:
            now: Unix time.
            steady: Seconds of the monotonic clock.
            last: Whether the agent is ending; then a save is always due.
        """
        if self.file is None or not self.begun or self._saving is not None:
            return None
        if self._next_save is not None and steady < self._next_save and not last:
            return None
        self._next_save = steady + self.save_interval_seconds
        state = AgentState(
            saved_at_seconds=now,
            simulated=self.simulated,
            labelled=self.prices.labelled,
            replicas=tuple((uuid, resource, count) for (uuid, resource), count in self.replicas.items()),
            idle_clocks=self.clock.memories() if self.clock else (),
        )
        ledgers = self.ledgers.begin_save(partial(self._settled, steady=steady), now)
        data = {**ledgers, **written(self.meter.state(self.boot_id)), **written(state)}
        windows = self.owner_windows.begin_save(steady, last=last)
        pods = self.ledgers.pods.shown()
        self._saving = Save(file=self.file, data=data, pods=pods, now=now, steady=steady, windows=windows)
        return self._saving

    def end_save(self, save: Save, error: StateError | None) -> None:
        """Process the result of a save, and show its totals."""
        self._saving = None
        if error is not None:
            self.ledgers.not_saved(in_doubt=error.reason == UNSYNCED)
            self._failed(error)
            return
        if save.windows:
            self.owner_windows.end_save(save.windows_error, self.errors)
        self.ledgers.saved()
        if self.ledgers.in_memory_only:
            return  # it hung: the next save has the charges since its start
        if self.problem:
            LOG.info("the ledger is saved again in %s", save.file.path)
        self.problem = ""
        self._note(None)
        self.shown = replace(self.ledgers.view(save.pods), saved_at_seconds=save.now)

    def _failed(self, error: StateError) -> None:
        self.errors["state", error.reason] += 1
        if str(error) != self.problem:
            LOG.error("%s; until then new totals are in memory only", error)
        self.problem = str(error)
