"""The real agent in virtual time: tick, meters, ledger, state file, join, owners and pages over a made-up world."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from virtual_api import Api
from virtual_world import NODE, Held, World

from exporter.accounting.idle import IdleClock
from exporter.accounting.ledger import Ledger
from exporter.accounting.pricing import PriceBook
from exporter.accounting.state_file import StateFile
from exporter.accounting.usage import Meter
from exporter.agent.attributor import Attributor
from exporter.agent.metering import Metering, Save
from exporter.agent.node import Node, stale_after_seconds
from exporter.agent.owners import Owners
from exporter.agent.views import Viewer
from exporter.attribution._proto import LIST_METHOD
from exporter.attribution.podresources import KubeletClient
from exporter.attribution.processes import PidResolver, PodNames
from exporter.errors import AttributionError, SourceError
from exporter.model import (
    Account,
    Allocations,
    Money,
    NodeFacts,
    Portion,
    Price,
    Reading,
    Snapshot,
    SourceState,
    SourceStatus,
    Totals,
)
from exporter.simulator.kubelet import allocatable_response, list_response
from exporter.sources import wire

EXPIRY_SECONDS = 60.0


@dataclass(slots=True)
class Pipe:
    """The way from the driver's child to the agent: lines, which may come late, twice, in another order or broken."""

    state: SourceState = SourceState.UP
    lines: deque[tuple[float, bytes]] = field(default_factory=deque)
    """(steady instant at which it comes, the line)."""
    steady: float = 0.0
    taken: list[Reading] = field(default_factory=list)
    """What the agent was given since the last look."""
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def status(self) -> SourceStatus:
        """As a worker tells it."""
        reason = "" if self.state is SourceState.UP else "driver_not_loaded"
        return SourceStatus(name="nvml", state=self.state, reason=reason)

    def take(self) -> tuple[Reading, ...]:
        """Decode what has come."""
        readings: list[Reading] = []
        waiting: deque[tuple[float, bytes]] = deque()
        for due, line in self.lines:
            if due > self.steady:
                waiting.append((due, line))
                continue
            try:
                message = wire.decode(line)
            except SourceError as error:
                self.errors[error.reason] = self.errors.get(error.reason, 0) + 1
                continue
            if isinstance(message, Reading):
                readings.append(message)
        self.lines = waiting
        self.taken += readings
        return tuple(readings)


class WatchedLedger(Ledger):
    """A ledger that keeps what it was told for whoever checks it."""

    __slots__ = ("charged",)

    def charge(self, portions: Sequence[Portion], prices: Mapping[str, Price], now_steady: float) -> None:
        """Enter portions and remember them."""
        if not hasattr(self, "charged"):
            self.charged: list[tuple[tuple[Portion, ...], dict[str, Price]]] = []
        self.charged.append((tuple(portions), dict(prices)))
        super().charge(portions, prices, now_steady)

    def taken(self) -> list[tuple[tuple[Portion, ...], dict[str, Price]]]:
        """Give what was charged since the last look."""
        charged = getattr(self, "charged", [])
        self.charged = []
        return charged

    def totals(self) -> list[tuple[Account, Totals]]:
        """Give every account with what stands on it, shown or not; changes nothing."""
        return [
            (
                account,
                Totals(
                    active_seconds=tally.active_seconds,
                    idle_seconds=tally.idle_seconds,
                    unknown_seconds=tally.unknown_seconds,
                    unpriced_seconds=tally.unpriced_seconds,
                    energy_joules=tally.energy_joules,
                    money={name: Money(total=purse.total, idle=purse.idle) for name, purse in tally.purses.items()},
                ),
            )
            for account, tally in self._accounts.items()
        ]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Accounts that may be folded, pods, and names of pods that are remembered."""
        return sum(not account.owner.provisional for account in self._accounts), len(self._pods), len(self._pod_now)


class Told(KubeletClient):
    """The real client and decoder, with the wire cut short: the answer's bytes are made here."""

    def __init__(self, world: World) -> None:
        super().__init__("/virtual/kubelet.sock")
        self._world = world
        self.trouble = ""

    async def _once(self, method: str, *, wait: bool) -> bytes:
        del wait
        if self.trouble == "garbage":
            return b"\xff\xfe not a message"
        if self.trouble:
            raise AttributionError(self.trouble, f"kubelet: {self.trouble}")
        truth = self._world.truth()
        return list_response(truth) if method == LIST_METHOD else allocatable_response(truth)


@dataclass(slots=True)
class Kubelet:
    """Its last good answer, and who truly held what when it was given."""

    client: Told
    world: World
    latest: Allocations | None = None
    problem: str = ""
    errors: dict[str, int] = field(default_factory=dict)
    held: frozenset[Held] = frozenset()
    advertised: Mapping[str, int] = field(default_factory=dict)
    """GPUs that are there, and into how many replicas each is divided."""
    asked_at: float = -1e18
    """True time of the last good answer."""

    def ask(self, wall: float) -> None:
        """Ask once."""
        question = self.client.fetch(wall)
        try:
            question.send(None)
        except StopIteration as answered:
            self.latest, self.problem = answered.value, ""
            self.held = frozenset(pod.held for pod in self.world.pods.values())
            self.advertised = {board.uuid: board.replicas for board in self.world.boards if board.is_there}
            self.asked_at = self.world.t
        except AttributionError as error:
            self.errors[error.reason] = self.errors.get(error.reason, 0) + 1
            self.problem = str(error)
        else:
            raise AssertionError("the kubelet's answer is made at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of the agent under test."""

    directory: Path
    with_api: bool = True
    interval_seconds: float = 1.0
    save_seconds: float = 5.0
    birth_seconds: float = 0.0
    account_limit: int = 2000
    series_limit: int = 20_000


@dataclass(slots=True, kw_only=True)
class Agent:
    """One life of the agent's process."""

    node: Node
    pipe: Pipe
    kubelet: Kubelet
    api: Api | None
    metering: Metering
    saving: Save | None = None
    snapshot: Snapshot | None = None

    @property
    def ledger(self) -> WatchedLedger:
        """The ledger, which is watched."""
        ledger = self.metering.ledger
        if not isinstance(ledger, WatchedLedger):
            raise TypeError(f"not watched: {ledger!r}")
        return ledger

    def tick(self, wall: float, steady: float) -> Snapshot:
        """Tick once."""
        self.pipe.steady = steady
        self.snapshot = self.node.tick(wall, steady)
        return self.snapshot


class _Loader:
    """Makes watched ledgers of what was kept."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __call__(self, data: Mapping[str, Any]) -> Ledger:
        return WatchedLedger.load(
            data, birth_seconds=self._settings.birth_seconds, account_limit=self._settings.account_limit
        )


def start(settings: Settings, world: World, book: PriceBook, *, boot_id: str, wall: float, steady: float) -> Agent:
    """Start the agent's process, as ``agent.run`` does."""
    pipe, client = Pipe(), Told(world)
    kubelet = Kubelet(client, world)
    api = Api(world) if settings.with_api else None
    owners = Owners(tenancy=api)
    metering = Metering(
        node=NODE,
        meter=Meter(settings.interval_seconds, owners.owner_of),
        owners=owners,
        ledger=WatchedLedger(
            started_at_seconds=max(0.0, wall),
            birth_seconds=settings.birth_seconds,
            account_limit=settings.account_limit,
        ),
        book=book,
        facts=NodeFacts(),
        file=StateFile(settings.directory / "state"),
        boot_id=boot_id,
        simulated=True,
        save_interval_seconds=settings.save_seconds,
    )
    metering.restore(_Loader(settings), steady)
    viewer = Viewer(
        attributor=Attributor(
            kubelet=kubelet,
            pids=PidResolver(settings.directory / "proc"),
            names=PodNames(settings.directory / "pods"),
            expiry_seconds=EXPIRY_SECONDS,
            metadata=api,
            metadata_wait_seconds=15.0,
            replicas=metering.replicas,
        ),
        clock=IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=stale_after_seconds(settings.interval_seconds)),
        owners=owners,
    )
    node = Node(
        name=NODE,
        source=pipe,
        viewer=viewer,
        sample_interval_seconds=settings.interval_seconds,
        simulated=True,
        process_clock=lambda: 0.0,
        metering=metering,
    )
    return Agent(node=node, pipe=pipe, kubelet=kubelet, api=api, metering=metering)
