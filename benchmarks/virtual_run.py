"""One seed of chaos in virtual time: the node, the processes of the agent on it, and the clocks that they read."""

import heapq
import itertools
import json
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from typing import Any, NamedTuple

from virtual_checks import Checks, Expected
from virtual_node import DOWN, INTERVAL_SECONDS, UP, Agent, Settings, start
from virtual_world import World

from exporter.accounting.prices import PriceBook
from exporter.agent.metering import Save
from exporter.config import price_book
from exporter.errors import StateError
from exporter.gpu import wire
from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import render
from exporter.web import node_api, node_page

EPOCH = 1_800_000_000
LAST_WALL = 253_402_000_000.0
"""Shortly before the year 10000: later dates cannot be written."""
KUBELET_SECONDS = 5.0
ROUNDING_SECONDS = 1e-3
PAGE_STEPS = 5
DOCUMENT_STEPS = 40


class PriceSpan(NamedTuple):
    """A price and the wall-clock time for which it holds."""

    start: int
    end: int
    per_hour: float


@dataclass(slots=True)
class Saving:
    """A save in progress."""

    save: Save
    expected: Expected
    done_at: float


@dataclass(slots=True, kw_only=True)
class Run:
    """A node under chaos."""

    random: Random
    world: World
    settings: Settings
    checks: Checks
    wall_offset: float = float(EPOCH)
    """Wall clock minus true time."""
    boot_t: float = -1000.0
    boot: int = 0
    agent: Agent | None = None
    book: PriceBook = field(init=False)
    prices: list[PriceSpan] = field(default_factory=list)
    currency: str = "USD"
    expected: Expected = field(default_factory=Expected)
    on_disk: Expected = field(default_factory=Expected)
    noted: Expected | None = None
    """The expected books at the instant in the lock file."""
    noted_steady: float | None = None
    saving: Saving | None = None
    troubles: dict[str, Any] = field(default_factory=dict)
    """Faults by part of the node; a part that works has none."""
    transport: list[str] = field(default_factory=list)
    """Faults of the next lines of the driver's child."""
    faults: Counter[str] = field(default_factory=Counter)
    ticks: int = 0
    _known: set[str] = field(default_factory=set)
    _later: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _number: Iterator[int] = field(default_factory=itertools.count)
    _next_ask: float = 0.0

    def __post_init__(self) -> None:
        """Start the node."""
        (self.settings.directory / "state").mkdir(parents=True, exist_ok=True)
        self.reprice()
        self.start_agent()

    @property
    def wall(self) -> float:
        """Return the wall clock of the node."""
        return self.world.t + self.wall_offset

    @property
    def steady(self) -> float:
        """Return the seconds since the boot."""
        return self.world.t - self.boot_t

    def later(self, seconds: float, then: Callable[[], None]) -> None:
        """Schedule a call after a time."""
        heapq.heappush(self._later, (self.world.t + seconds, next(self._number), then))

    # ---- processes of the agent

    def start_agent(self) -> None:
        """Start the agent, if it does not run."""
        if self.agent is not None:
            return
        self.expected = self.on_disk.copy()
        if self.noted is not None and self.expected.boot and self.noted.boot == str(self.boot):
            self.expected.continue_from(self.noted)
        if self.expected.boot != str(self.boot):
            self.expected.last = {}
        self.expected.boot = str(self.boot)
        self._known = set()
        self.agent = start(
            self.settings,
            self.world,
            self.book,
            boot_id=f"boot-{self.boot}",
            clock=lambda: self.wall,
            steady=self.steady,
            dropped=self.expected.dropped,
        )
        self._next_ask = self.world.t

    def kill(self) -> None:
        """Kill the agent; a save in progress may have reached the disk or not."""
        if self.agent is None:
            return
        shown = self.agent.metering.shown
        self.checks.agent_began(all_was_saved=shown is None or shown.saved_at_seconds is not None)
        if self.saving is not None and self.random.random() < 0.5:  # noqa: PLR2004 - a coin
            self._write(self.saving)
        self.agent.end()
        self.agent = self.saving = None

    def terminate(self) -> None:
        """End the agent as SIGTERM does, with a last save."""
        if self.agent is None:
            return
        if self.saving is not None:
            self._finish(self.saving)
        last = self.agent.metering.begin_save(self.wall, self.steady, last=True)
        if last is not None:
            self._finish(Saving(last, self._expected_of(self.agent), 0.0))
        self.checks.agent_began(all_was_saved=not self.agent.metering.problem)
        self.agent.end()
        self.agent = self.saving = None

    # ---- prices

    def reprice(self) -> None:
        """Make a new price book with changes and gaps around now, and parse it as from its file."""
        self.prices, self.currency = [], self.random.choice(("USD", "EUR"))
        at = int(max(0.0, self.wall - 100.0))
        for _ in range(self.random.randint(1, 5)):
            end = at + self.random.randint(5, 200)
            if not self.prices or self.random.random() < 0.7:  # noqa: PLR2004 - else a gap
                self.prices.append(PriceSpan(at, end, self.random.uniform(0.1, 9)))
            at = end
        rows = [
            {
                "name": f"row-{number}",
                "model": "NVIDIA*",
                "per_gpu_hour": span.per_hour,
                "from": datetime.fromtimestamp(span.start, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "to": datetime.fromtimestamp(span.end, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "source": "made up",
                "as_of": "2026-01-01",
            }
            for number, span in enumerate(self.prices)
        ]
        text = json.dumps({"currency": self.currency, "list_prices": "off", "rows": rows})
        self.book = price_book.parse(text, "prices.yaml")
        if self.agent is not None:
            self.agent.metering.use_prices(self.book)

    def prices_within(self, seconds: float) -> set[tuple[float, str]]:
        """Return the prices of the last seconds, computed without the book."""
        return {
            (span.per_hour, self.currency)
            for span in self.prices
            if span.start <= self.wall and span.end > self.wall - seconds - ROUNDING_SECONDS
        }

    # ---- a step

    def step(self) -> None:
        """Advance by about one sample interval."""
        while self._later and self._later[0][0] <= self.world.t:
            heapq.heappop(self._later)[2]()
        self.world.turn_over(fast="pods" in self.troubles)
        self.world.pass_time(INTERVAL_SECONDS * self.random.uniform(0.97, 1.03))
        if self.agent is not None:
            self._tick(self.agent)

    @property
    def is_troubled(self) -> bool:
        """Return whether a fault still lasts."""
        return bool(self._later)

    def _tick(self, agent: Agent) -> None:
        self._sample(agent)
        agent.kubelet.client.trouble = self.troubles.get("kubelet", "")
        if self.world.t >= self._next_ask:
            agent.kubelet.ask(self.wall)
            self.expected.replicas |= agent.kubelet.advertised
            self._next_ask = self.world.t + KUBELET_SECONDS
        if agent.api:
            agent.api.follow(self.troubles.get("metadata", 1.0), is_down="API" in self.troubles)
        agent.tick(self.wall, self.steady)
        self.ticks += 1
        self._check(agent)
        self._save(agent)
        self._look_at_note(agent.metering.lock.noted().get("metered_steady"))
        if self.ticks % PAGE_STEPS == 0:
            self.look(agent)

    def _sample(self, agent: Agent) -> None:
        agent.pipe.status = DOWN if "driver" in self.troubles else UP
        if agent.pipe.status is DOWN:
            return
        line = wire.encode(self.world.reading(wall=self.wall, steady=self.steady))
        what = self.transport.pop(0) if self.transport else ""
        lines = agent.pipe.lines
        match what:
            case "lost":
                return
            case "late":
                lines.append((self.steady + self.random.uniform(0.5, 8), line))
            case "twice":
                lines += [(0.0, line), (0.0, line)]
            case "swapped":
                lines.append((self.steady + 0.5, line))  # arrives with the next line
                self.transport.insert(0, "first")
            case "first":
                lines.appendleft((0.0, line))
            case "broken":
                lines.append((0.0, line[: self.random.randrange(len(line))] + b"\n"))
            case _:
                lines.append((0.0, line))

    def _check(self, agent: Agent) -> None:
        readings, agent.pipe.taken = agent.pipe.taken, []
        charged = agent.ledgers.taken()
        if len(charged) != len(readings):
            what = f"{len(charged)} charged of {len(readings)} readings"
            self.checks.hold("books", what, true=not charged and not agent.metering.begun)
            for reading in readings:  # a GPU that was up is known, metered or not
                self._known |= {gpu.gpu.uuid for gpu in reading.gpus if gpu.state == "up"}
        else:
            for reading, one in zip(readings, charged, strict=True):
                found = {(price.per_hour, price.currency) for _, prices in one for price in prices.values()}
                lasted = sum(max((each.interval_seconds or 0.0 for each in parts), default=0.0) for parts, _ in one)
                truth = self.prices_within(lasted)
                self.checks.hold("price", f"{found}, {truth} in truth", true=found <= truth)
                self.checks.reading(reading, one, self.expected, agent, self.boot_t, self._known)
        self.checks.books(agent, self.expected)
        self.checks.bounds(agent, self.settings.account_limit)

    def look(self, agent: Agent) -> None:
        """Render the page, and sometimes the documents, and check them."""
        if agent.snapshot is None:
            return
        options = ExpositionOptions(series_limit=self.settings.series_limit)
        body = render(families(agent.snapshot, options), openmetrics=bool(self.ticks % (2 * PAGE_STEPS)))
        self.checks.page(body.decode())
        self.checks.idle(agent, self.expected)
        if self.ticks % DOCUMENT_STEPS == 0:
            json.loads(node_api.device_document(agent.snapshot).plain)
            json.loads(node_api.ledger_document(agent.snapshot).plain)
            self.checks.hold("documents", "page", true="</html>" in node_page.document(agent.snapshot))

    # ---- saving

    def _save(self, agent: Agent) -> None:
        if self.saving is not None and self.world.t >= self.saving.done_at:
            self._finish(self.saving)
        save = agent.metering.begin_save(self.wall, self.steady)
        if save is not None:
            takes = self.troubles.get("save") or self.random.choice((0.0, 0.0, 0.0, 3.0))
            self.saving = Saving(save, self._expected_of(agent), self.world.t + takes)
            if not takes:
                self._finish(self.saving)

    def _look_at_note(self, steady: float | None) -> None:
        if steady != self.noted_steady:
            self.noted, self.noted_steady = None if steady is None else self.expected.copy(), steady

    def _expected_of(self, agent: Agent) -> Expected:
        """Return the expected books of an agent that reads a save that begins now."""
        self.expected.dropped = agent.ledgers.dropped
        return self.expected.copy()

    def _finish(self, saving: Saving) -> None:
        if self.agent is not None:
            error = self._write(saving)
            self.agent.metering.end_save(saving.save, error)
        self.saving = None

    def _write(self, saving: Saving) -> StateError | None:
        """Write a save to the disk in its present condition."""
        state = self.settings.directory / "state"
        in_the_way = state / "ledger.json.new"
        with ExitStack() as undo:
            match self.troubles.get("disk"):
                case "full":
                    before = resource.getrlimit(resource.RLIMIT_FSIZE)
                    undo.callback(resource.setrlimit, resource.RLIMIT_FSIZE, before)
                    resource.setrlimit(resource.RLIMIT_FSIZE, (self.random.randrange(1, 600), before[1]))
                case "refuses":
                    in_the_way.unlink(missing_ok=True)
                    in_the_way.mkdir()
                    undo.callback(in_the_way.rmdir)
                case "gone":
                    undo.callback(state.rename(state.with_name("away")).rename, state)
            error = saving.save.write()
        if error is None:
            self.on_disk = saving.expected
        return error
