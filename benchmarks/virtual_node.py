"""The real agent in virtual time: tick, meters, ledger, state file, join, owners and pages over a simulated world."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from virtual_world import AGENT_POD, NODE, Held, Pod, World

from exporter.accounting.idle import IdleClock
from exporter.accounting.ledger import Ledger, Ledgers, Sheet
from exporter.accounting.meter import Meter, stale_after_seconds
from exporter.accounting.prices import NodePrices, PriceBook
from exporter.accounting.state_file import StateFile, WriterLock
from exporter.agent.attributor import Attributor
from exporter.agent.metering import Metering
from exporter.agent.node import Node
from exporter.agent.owners import Owners
from exporter.agent.sources import Sources
from exporter.agent.views import Viewer
from exporter.attribution.owner_rules import OwnerRules
from exporter.attribution.pod_lifecycle import PodName
from exporter.attribution.processes import PodLookup
from exporter.errors import ApiError, AttributionError, SourceError
from exporter.gpu import wire
from exporter.kube.kubelet import LIST_METHOD, KubeletClient
from exporter.kube.metadata import Metadata, MetadataSettings, parse_pod
from exporter.model.attribution import Allocations, Owner, PodMetadata
from exporter.model.devices import Reading, SourceState, SourceStatus
from exporter.model.ledger import Portion, Price
from exporter.model.snapshot import Snapshot
from gpu_simulator.kubelet import allocatable_response, list_response

EXPIRY_SECONDS = 60.0
INTERVAL_SECONDS = 1.0
UP = SourceStatus(name="nvml", state=SourceState.UP)
DOWN = SourceStatus(name="nvml", state=SourceState.FAILED, reason="driver_not_loaded")
RULES = OwnerRules(team_keys=("team",))


class Api(Metadata):
    """The agent's reader of the Kubernetes API; its list of pods is made here instead of by requests."""

    def __init__(self, world: World, clock: Callable[[], float]) -> None:
        settings = MetadataSettings(node=NODE, rules=RULES, namespace_teams=False)
        super().__init__(settings, clock=clock, random=lambda: 0.5)
        self._world, self._clock = world, clock
        self._first_seen: dict[str, float] = {}

    def follow(self, late_seconds: float, *, is_down: bool) -> None:
        """Update the list, if the API answers."""
        for pod in self._world.pods.values():
            self._first_seen.setdefault(pod.uid, self._world.t)
        self._pods.failure = ApiError("refused", "api: refused") if is_down else None
        if is_down:
            return
        before, items = self._pods.items, dict[PodName, PodMetadata]()
        for name, pod in self._world.pods.items():
            known = before.get(name)
            if self._world.t - self._first_seen[pod.uid] < late_seconds:
                continue
            if known is not None and known.uid == pod.uid:
                items[name] = known
            elif parsed := parse_pod(_object_of(pod), frozenset()):
                items[name] = parsed
        self._pods.items = before if items == before else items
        self._pods.at_seconds = self._clock()

    @property
    def ended(self) -> frozenset[PodName]:
        """Return the pods that the kubelet still lists and the API no longer does."""
        return self._endings.left


def _object_of(pod: Pod) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "namespace": pod.namespace,
        "name": pod.name,
        "uid": pod.uid,
        "labels": {"team": pod.team},
    }
    if pod.job:
        metadata["ownerReferences"] = [
            {"controller": True, "kind": "Job", "name": pod.job, "apiVersion": "batch/v1", "uid": "j"}
        ]
    return {"metadata": metadata}


@dataclass(slots=True)
class Pipe:
    """The channel from the driver's child to the agent: lines, which may come late, twice, out of order or broken."""

    status: SourceStatus = UP
    """Status, as a worker reports it."""
    lines: deque[tuple[float, bytes]] = field(default_factory=deque)
    """(monotonic time of the arrival, line)."""
    steady: float = 0.0
    taken: list[Reading] = field(default_factory=list)
    """Readings of the agent since the last check."""
    errors: dict[str, int] = field(default_factory=dict)

    def take(self) -> tuple[Reading, ...]:
        """Decode the lines that have arrived."""
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


Charge = tuple[tuple[Portion, ...], dict[str, Price]]
"""Portions and the prices by GPU at which they were charged."""


class WatchedLedgers(Ledgers):
    """Ledgers that keep the charges of each reading, and the dropped ledgers, for the checks."""

    __slots__ = ("_charges", "_readings", "dropped")

    def __init__(self, dropped: Mapping[str, Sheet], **options: Any) -> None:  # noqa: ANN401 - of the ledgers
        super().__init__(**options)
        self._charges: list[Charge] = []
        self._readings: list[list[Charge]] = []
        self.dropped = dict(dropped)
        """Sheets by identity; a ledger that was dropped for a failed save still exists."""

    def charge(self, portions: Sequence[Portion], prices: Mapping[str, Price], *, now: float, steady: float) -> None:
        """Charge portions and keep them; a gap over a change of price comes in parts."""
        self._charges.append((tuple(portions), dict(prices)))
        super().charge(portions, prices, now=now, steady=steady)

    def settle(self, owner_of: Callable[[Owner], Owner]) -> None:
        """Settle owners, which completes the charges of a reading."""
        self._readings.append(self._charges)
        self._charges = []
        super().settle(owner_of)

    def taken(self) -> list[list[Charge]]:
        """Return the charges of each reading since the last call."""
        readings, self._readings = self._readings, []
        return readings

    def sheets(self) -> list[Sheet]:
        """Return everything that was ever charged and not lost, shown or not."""
        saving = self._saving
        there = [one for one in (self._ledger, self._memory, saving and saving.memory, *self._former) if one]
        waiting = [self._waiting, self._doubtful, *([saving.charged] if saving else [])]
        gone = self.dropped.keys() - {ledger.identity for ledger in there}
        return [*(ledger.sheet for ledger in there), *waiting, *(self.dropped[identity] for identity in gone)]

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the most accounts of a ledger, and the number of ended ledgers."""
        accounts = max((len(ledger.sheet.accounts) for ledger in (self._ledger, *self._former) if ledger), default=0)
        return accounts, len(self._former)

    def _kept(self, former: Sequence[Ledger], now: float) -> tuple[Ledger, ...]:
        kept = super()._kept(former, now)
        here = {ledger.identity for ledger in kept}
        self.dropped = {**self.dropped, **{one.identity: one.sheet for one in former if one.identity not in here}}
        return kept


class DirectClient(KubeletClient):
    """The real client and decoder without a connection: it makes the bytes of the answer itself."""

    def __init__(self, world: World, *, in_pod: bool) -> None:
        super().__init__("/virtual/kubelet.sock", canary=AGENT_POD if in_pod else None)
        self._world = world
        self._in_pod = in_pod
        self._has_answered = False
        self.trouble = ""

    async def _once(self, method: str) -> bytes:
        if self.trouble == "garbage":
            return b"\xff\xfe not a message"
        # An agent outside a pod accepts a first answer without pods: it has nothing to compare it with.
        if self.trouble == "starting" and (self._in_pod or self._has_answered):
            return b""
        if self.trouble:
            raise AttributionError(self.trouble, f"kubelet: {self.trouble}")
        self._has_answered = True
        truth = self._world.truth()
        return list_response(truth) if method == LIST_METHOD else allocatable_response(truth)


@dataclass(slots=True)
class Kubelet:
    """The last good answer of the kubelet, and the true holders at that time."""

    client: DirectClient
    world: World
    latest: Allocations | None = None
    problem: str = ""
    errors: dict[str, int] = field(default_factory=dict)
    held: frozenset[Held] = frozenset()
    advertised: Mapping[str, int] = field(default_factory=dict)
    """Existing GPUs, and the number of replicas of each."""
    asked_at: float = -1e18
    """True time of the last good answer."""

    def ask(self, wall: float) -> None:
        """Poll once."""
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
            raise AssertionError("the kubelet's answer must not wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of the agent under test."""

    directory: Path
    with_api: bool = True
    in_pod: bool = True
    """Whether the agent has the name of its own pod."""
    save_seconds: float = 5.0
    account_limit: int = 2000
    series_limit: int = 20_000


@dataclass(slots=True, kw_only=True)
class Agent:
    """One process of the agent."""

    node: Node
    pipe: Pipe
    kubelet: Kubelet
    api: Api | None
    metering: Metering
    ledgers: WatchedLedgers
    snapshot: Snapshot | None = None

    def end(self) -> None:
        """Release the lock, as the kernel does when the process ends."""
        self.metering.lock.release()

    def tick(self, wall: float, steady: float) -> Snapshot:
        """Tick once."""
        self.pipe.steady = steady
        self.snapshot = self.node.tick(wall, steady)
        return self.snapshot


def start(
    settings: Settings,
    world: World,
    book: PriceBook,
    *,
    boot_id: str,
    clock: Callable[[], float],
    steady: float,
    dropped: Mapping[str, Sheet] | None = None,
) -> Agent:
    """Start the agent's process, as ``agent.run`` does.

    Args:
        settings: Its options.
        world: Its node.
        book: Prices.
        boot_id: Boot id of the machine.
        clock: Returns Unix time.
        steady: Monotonic time in seconds.
        dropped: Ledgers that the state no longer has.
    """
    pipe, kubelet = Pipe(), Kubelet(DirectClient(world, in_pod=settings.in_pod), world)
    api = Api(world, clock) if settings.with_api else None
    owners = Owners(tenancy=api)
    stale = stale_after_seconds(INTERVAL_SECONDS)
    idle = IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=stale)
    ledgers = WatchedLedgers(dropped or {}, saves=True, account_limit=settings.account_limit)
    metering = Metering(
        meter=Meter(INTERVAL_SECONDS, owners.owner_of),
        owners=owners,
        ledgers=ledgers,
        prices=NodePrices(node=NODE, book=book),
        clock=idle,
        file=StateFile(settings.directory / "state"),
        lock=WriterLock(node=NODE, directory=settings.directory / "lock"),
        boot_id=boot_id,
        simulated=True,
        save_interval_seconds=settings.save_seconds,
    )
    metering.become_writer(steady)
    lookup = PodLookup(settings.directory / "proc", settings.directory / "pods")
    node = Node(
        name=NODE,
        sources=Sources(nvml=pipe, stale_after_seconds=stale),
        attributor=Attributor(
            kubelet=kubelet,
            lookup=lookup,
            expiry_seconds=EXPIRY_SECONDS,
            metadata=api,
            metadata_wait_seconds=15.0,
            replicas=metering.replicas,
        ),
        viewer=Viewer(lookup=lookup, clock=idle, owners=owners),
        sample_interval_seconds=INTERVAL_SECONDS,
        process_clock=lambda: 0.0,
        metering=metering,
    )
    return Agent(node=node, pipe=pipe, kubelet=kubelet, api=api, metering=metering, ledgers=ledgers)
