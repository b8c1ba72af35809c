"""Metering in the agent: every sample becomes counters, and what is shown of them is on the disk first."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from exporter.accounting.ledger import Ledger
from exporter.accounting.pricing import PriceBook, settled_facts
from exporter.accounting.slots import slot_of
from exporter.accounting.state_file import StateFile
from exporter.accounting.tally import amount
from exporter.accounting.usage import Meter
from exporter.agent.owners import Owners
from exporter.attribution.replicas import Replicas, counts_of
from exporter.errors import ConfigError, StateError
from exporter.model import DeviceView, LedgerView, NodeFacts, Price

LOG = logging.getLogger("exporter.agent")

HUNG_SECONDS = 30.0
"""A save that takes longer than this is told, and no longer waited for by what is shown."""


def node_facts_of(data: Mapping[str, Any]) -> NodeFacts:
    """Read what ``dataclasses.asdict`` wrote of a node.

    Raises:
        TypeError: It is something else.
    """
    facts = NodeFacts(**data)
    if not all(isinstance(getattr(facts, name), str) for name in NodeFacts.__slots__):
        raise TypeError(f"not a node's facts: {data!r}")
    return facts


def _amounts(state: Mapping[str, Any], name: str) -> dict[str, float]:
    """Read figures by GPU; none where the state has no such thing.

    Raises:
        TypeError, ValueError: They are something else.
    """
    figures = state.get(name, {})
    return {str(uuid): amount(figures, uuid) for uuid in figures}


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A state to be written, and what may be shown once it has been."""

    file: StateFile
    data: Mapping[str, Any]
    view: LedgerView
    steady: float

    def write(self) -> StateError | None:
        """Write it; takes as long as the disk. Touches nothing that the agent goes on changing."""
        try:
            self.file.save(self.data)
        except StateError as error:
            return error
        return None


@dataclass(slots=True, kw_only=True)
class Metering:
    """Meter, ledger, prices and state file of one node.

    With a state file that can be written, ``shown`` is what has been saved: whenever the process ends, the next one
    goes on from no less than anybody has seen. Without one it is what is in memory.
    """

    node: str
    meter: Meter
    ledger: Ledger
    book: PriceBook
    facts: NodeFacts
    """As flags have them."""
    labelled: NodeFacts = field(default_factory=NodeFacts)
    """As the node's labels had them last, in this process or the one before; flags win."""
    owners: Owners = field(default_factory=Owners)
    replicas: Replicas = field(default_factory=Replicas)
    """Of shared devices; kept with the ledger, as of one that is unhealthy nobody tells after a restart."""
    file: StateFile | None = None
    boot_id: str = ""
    """Of the machine: seconds of another boot's clock mean nothing. Empty where not known."""
    simulated: bool = False
    save_interval_seconds: float = 5.0
    prices: dict[str, Price] = field(default_factory=dict)
    """By UUID of the physical GPU, as of the last sample; one without a price is absent."""
    unpriced_gpus: int = 0
    errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Counts since start by (part, reason)."""
    problem: str = ""
    """Why totals are not on disk, in one line; empty when they are or nobody asked for it."""
    shown: LedgerView | None = None
    _shown_steady: float = 0.0
    _metered_steady: float | None = None
    """Instant of the last sample, on the clock of samples."""
    _saving: Save | None = None
    _next_save: float | None = None

    def restore(self, ledger_of: Callable[[Mapping[str, Any]], Ledger], steady: float) -> None:
        """Go on from the state file, if there is one; a bad one is set aside, told and counted.

        Args:
            ledger_of: Makes a ledger of what one has dumped; raises ValueError for anything else.
            steady: Seconds of a clock that nobody sets, now.
        """
        if self.file is None:
            return
        try:
            state = self.file.load()
            if state is None:
                return
            try:
                ledger = ledger_of(state["ledger"])
                slots = [slot_of(slot) for slot in state["slots"]]
                boot_id, metered_steady = str(state["boot_id"]), amount(state, "metered_steady")
                saved_at_seconds = datetime.fromtimestamp(amount(state, "saved_at_seconds"), UTC).timestamp()
                # None of these is in a state of before.
                replicas = counts_of(state.get("replicas", []))
                until, uncounted = (_amounts(state, name) for name in ("metered_until", "energy_uncounted_seconds"))
                simulated = bool(state["simulated"])
                node_facts = node_facts_of(state.get("node_facts", {}))  # a state of before has none
            except (KeyError, TypeError, AttributeError, ValueError, OverflowError, OSError) as error:
                raise self.file.set_aside("state_damaged", f"is damaged: {error!r}") from error
            if simulated is not self.simulated:
                what = "is of a simulated node" if simulated else "is of a real node and this one is simulated"
                raise self.file.set_aside("state_foreign", what)
        except StateError as error:
            self._failed(error)
            return
        self.ledger, self.replicas.counts = ledger, replicas
        self.learn(node_facts)
        self.owners.restore(slots)
        if boot_id and boot_id == self.boot_id:
            self.meter.resume(slots, metered_steady, until, uncounted)
        self._show(replace(ledger.view(steady), saved_at_seconds=saved_at_seconds), steady)
        LOG.info("the ledger goes on from %s", self.file.path)

    @property
    def begun(self) -> bool:
        """Whether a sample was metered in this process."""
        return self._metered_steady is not None

    @property
    def resumes(self) -> bool:
        """Whether the next sample closes the time across a restart."""
        return self._metered_steady is None and self.meter.steady is not None

    def observe(self, views: Sequence[DeviceView], *, sampled_steady: float, now: float, steady: float) -> None:
        """Meter one sample.

        Args:
            views: What was made of the sample.
            sampled_steady: Its instant, on a clock that nobody sets.
            now: Unix time, at which prices are looked up.
            steady: Seconds of a clock that nobody sets, for births and lingering.
        """
        self.look_up_prices(views, now)
        self.ledger.charge(self.meter.add(views, sampled_steady), self.prices, steady)
        self.ledger.settle(self.owners.settled, steady)
        self._metered_steady = self.meter.steady

    def learn(self, found: NodeFacts) -> None:
        """Take what the node's labels say, for what flags do not."""
        self.labelled = found

    @property
    def node_facts(self) -> NodeFacts:
        """All that is known of the node."""
        return settled_facts(self.facts, self.labelled)

    def look_up_prices(self, views: Sequence[DeviceView], now: float) -> None:
        """Find the price of every GPU at a time."""
        facts = self.node_facts
        models = {view.gpu.uuid: view.gpu.model for view in views}
        found = {
            model: self.book.price(model=model, node=self.node, facts=facts, at_seconds=now)
            for model in set(models.values())
        }
        self.prices = {uuid: price for uuid, model in models.items() if (price := found[model])}
        self.unpriced_gpus = len(models) - len(self.prices)

    def use_prices(self, book: PriceBook) -> None:
        """Price by another book from the next sample on."""
        self.book = book
        for warning in book.warnings:
            LOG.warning("%s", warning)
        LOG.info("price book reloaded: %s", book.description or "no prices")

    def keep_prices(self, error: ConfigError) -> None:
        """Go on with the last good book, as another has mistakes; count and tell that."""
        self.errors["prices", "invalid"] += 1
        for line in (*error.problems, "price book not reloaded, the last good one stays: mend it, send SIGHUP again"):
            LOG.error("%s", line)

    def view(self, steady: float) -> LedgerView | None:
        """Return what is to be shown now; ``None`` before the first sample."""
        hung = self._saving is not None and steady - self._saving.steady > HUNG_SECONDS
        if hung and self._saving is not None and not self.problem:
            path = self._saving.file.path
            self._failed(StateError("hung", f"state: the disk of {path} has not answered for {HUNG_SECONDS:.0f} s"))
        # While a save is under way what is shown stands still: it may be all that will have been kept.
        from_memory = self.file is None or self.problem
        if from_memory and self._metered_steady is not None and (self._saving is None or hung):
            self._show(self.ledger.view(steady), steady)
        if self.shown is None:
            return None
        return replace(self.shown, state_problem=self.problem)

    def begin_save(self, now: float, steady: float, *, last: bool = False) -> Save | None:
        """Return what is to be saved now: nothing before it is due or while a save is under way.

        Args:
            now: Unix time.
            steady: Seconds of a clock that nobody sets.
            last: Due whenever it was; the agent ends.
        """
        if self.file is None or self._metered_steady is None or self._saving is not None:
            return None
        if self._next_save is not None and steady < self._next_save and not last:
            return None
        self._next_save = steady + self.save_interval_seconds
        view = replace(self.ledger.view(steady), saved_at_seconds=now)  # before the dump: it says what was shown
        data = {
            "boot_id": self.boot_id,
            "metered_steady": self._metered_steady,
            "metered_until": self.meter.instants(),
            "energy_uncounted_seconds": self.meter.uncounted(),
            "saved_at_seconds": now,
            "simulated": self.simulated,
            "node_facts": asdict(self.labelled),
            "replicas": self.replicas.dump(),
            "slots": [asdict(slot) for slot in self.meter.slots()],
            "ledger": self.ledger.dump(),
        }
        self._saving = Save(file=self.file, data=data, view=view, steady=steady)
        return self._saving

    def end_save(self, save: Save, error: StateError | None) -> None:
        """Take note of how a save went; only then its totals are shown."""
        self._saving = None
        if error is not None:
            self._failed(error)
            return
        if self.problem:
            LOG.info("the ledger is saved again in %s", save.file.path)
        self.problem = ""
        self._show(save.view, save.steady)

    def save_now(self, now: float, steady: float, *, last: bool = False) -> None:
        """Save if it is due and wait for the disk."""
        save = self.begin_save(now, steady, last=last)
        if save is not None:
            self.end_save(save, save.write())

    def _show(self, view: LedgerView, steady: float) -> None:
        # What was shown from memory while a save hung may be newer than what that save wrote.
        if self.shown is None or steady >= self._shown_steady:
            self.shown, self._shown_steady = view, steady

    def _failed(self, error: StateError) -> None:
        self.errors["state", error.reason] += 1
        if str(error) != self.problem:
            LOG.error("%s; until then the totals are in memory only", error)
        self.problem = str(error)
