"""The real agent in virtual time: tick, meters, ledger, state file, join, owners and pages over a made-up world."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from virtual_world import AGENT_POD, NODE, Held, Pod, World

from exporter.accounting.idle import IdleClock
from exporter.accounting.ledger import Ledger, Ledgers, Sheet
from exporter.accounting.meter import Meter, stale_after_seconds
from exporter.accounting.prices import NodePrices, PriceBook
from exporter.accounting.state_file import StateFile, WriterLock
from exporter.agent.facts import Attributor
from exporter.agent.metering import Metering, Save
from exporter.agent.node import Node
from exporter.agent.owners import Owners
from exporter.agent.sources import Sources
from exporter.agent.views import Viewer
from exporter.attribution.owner_rules import OwnerRules, facts_of
from exporter.attribution.pod_lifecycle import Endings, Evidence, PodName
from exporter.attribution.processes import PodLookup
from exporter.errors import AttributionError, SourceError
from exporter.gpu import wire
from exporter.kube.kubelet import LIST_METHOD, KubeletClient
from exporter.kube.metadata import parse_pod
from exporter.model import (
    Allocations,
    MetadataStatus,
    NodeFacts,
    Owner,
    PodFacts,
    PodMetadata,
    Portion,
    Price,
    Reading,
    Snapshot,
    SourceState,
    SourceStatus,
)
from gpu_simulator.kubelet import allocatable_response, list_response

EXPIRY_SECONDS = 60.0
RULES = OwnerRules(team_keys=("team",))


@dataclass(slots=True)
class Followed:
    """The API's pods as a watch has them."""

    items: Mapping[PodName, PodMetadata] = field(default_factory=dict)
    known: bool = False
    at_seconds: float | None = None
    problem: str = ""


@dataclass(slots=True)
class Api:
    """What the Kubernetes API says: real objects, owner rules and endings behind a watch that is made here."""

    world: World
    late_seconds: float = 1.0
    is_down: bool = False
    errors: dict[str, int] = field(default_factory=dict)
    node_facts: NodeFacts | None = None
    first_seen: dict[str, float] = field(default_factory=dict)
    _followed: Followed = field(default_factory=Followed)
    _endings: Endings = field(default_factory=Endings)
    _evidence: Evidence = field(default_factory=Evidence)
    _facts: dict[PodName, tuple[PodMetadata, PodFacts]] = field(default_factory=dict)
    _steady: float = 0.0
    _last_now: float | None = None

    def follow(self, wall: float) -> None:
        """Bring the watch up to date, as far as the API is there."""
        for pod in self.world.pods.values():
            self.first_seen.setdefault(pod.uid, self.world.t)
        if self.is_down:
            self._followed.problem = "api: refused"
            return
        items: dict[PodName, PodMetadata] = {}
        for pod in self.world.pods.values():
            if self.world.t - self.first_seen[pod.uid] < self.late_seconds:
                continue
            before = self._followed.items.get((pod.namespace, pod.name))
            if before is not None and before.uid == pod.uid:
                items[pod.namespace, pod.name] = before
            elif parsed := parse_pod(_object_of(pod), frozenset()):
                items[pod.namespace, pod.name] = parsed
        before = self._followed
        if items != before.items:
            before.items = MappingProxyType(items)
        before.known, before.problem, before.at_seconds = True, "", wall

    @property
    def ended(self) -> frozenset[PodName]:
        """Whom the kubelet lists still and the API no more."""
        return self._endings.left

    @property
    def status(self) -> MetadataStatus:
        """What is known of the pods."""
        followed = self._followed
        return MetadataStatus(known=followed.known, at_seconds=followed.at_seconds, problem=followed.problem)

    def note(self, allocations: Allocations, now: float) -> None:
        """Take note of a new answer of the kubelet."""
        self._advance(now)
        self._endings.note((one.namespace, one.pod) for one in allocations.containers)

    def evidence(self, now: float) -> Evidence:
        """Give what the join looks at."""
        self._advance(now)
        listed = self._followed.at_seconds is not None
        self._endings.update(self._followed.items, self._steady)
        new = Evidence(
            pods=self._endings.pods if listed else None,
            is_followed=self._followed.known and not self._followed.problem,
            ended=self._endings.left,
        )
        if new != self._evidence:
            self._evidence = new
        return self._evidence

    def facts(self, namespace: str, pod: str) -> PodFacts | None:
        """Say whose a pod is."""
        found = self._endings.find((namespace, pod))
        if found is None:
            return None
        cached = self._facts.get((namespace, pod))
        if cached is None or cached[0] is not found:
            cached = self._facts[namespace, pod] = (found, facts_of(found, {}, {}, RULES))
        return cached[1]

    def _advance(self, now: float) -> None:
        if self._last_now is not None:
            self._steady += min(max(now - self._last_now, 0.0), 10.0)
        self._last_now = now


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
    """The way from the driver's child to the agent: lines, which may come late, twice, in another order or broken."""

    state: SourceState = SourceState.UP
    lines: deque[tuple[float, bytes]] = field(default_factory=deque)
    """(steady instant at which it comes, the line)."""
    steady: float = 0.0
    taken: list[Reading] = field(default_factory=list)
    """What the agent was given since the last look."""
    errors: dict[str, int] = field(default_factory=dict)
    told: SourceStatus | None = None
    """A status of the child's own."""

    @property
    def status(self) -> SourceStatus:
        """As a worker tells it."""
        if self.told is not None:
            return self.told
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


Charge = tuple[tuple[Portion, ...], dict[str, Price]]
"""Portions and the prices by GPU at which they were charged."""


class WatchedLedgers(Ledgers):
    """Ledgers that keep what was charged for each reading, and those that were dropped, for the checks."""

    __slots__ = ("_charges", "_readings", "dropped")

    dropped: dict[str, Sheet]
    """By identity; one that was dropped for a save that failed is still there."""

    def charge(self, portions: Sequence[Portion], prices: Mapping[str, Price], *, now: float, steady: float) -> None:
        """Enter portions and remember them; a gap over a change of price comes in parts."""
        self._charges = [*getattr(self, "_charges", []), (tuple(portions), dict(prices))]
        super().charge(portions, prices, now=now, steady=steady)

    def settle(self, owner_of: Callable[[Owner, float], Owner], steady: float) -> None:
        """Settle owners, which ends what is charged for a reading."""
        self._readings = [*getattr(self, "_readings", []), getattr(self, "_charges", [])]
        self._charges = []
        super().settle(owner_of, steady)

    def taken(self) -> list[list[Charge]]:
        """Return what was charged for each reading since the last call."""
        readings: list[list[Charge]] = getattr(self, "_readings", [])
        self._readings = []
        return readings

    def sheets(self) -> list[Sheet]:
        """Give all that was ever charged and not lost, shown or not."""
        saving = self._saving
        there = [one for one in (self._ledger, self._memory, saving and saving.memory, *self._former) if one]
        waiting = [self._waiting, self._doubtful, *([saving.charged] if saving else [])]
        gone = self.dropped.keys() - {ledger.identity for ledger in there}
        return [*(ledger.sheet for ledger in there), *waiting, *(self.dropped[identity] for identity in gone)]

    @property
    def sizes(self) -> tuple[int, int]:
        """Most accounts of a ledger, and how many ledgers have ended."""
        accounts = max((len(ledger.sheet.accounts) for ledger in (self._ledger, *self._former) if ledger), default=0)
        return accounts, len(self._former)

    def _kept(self, former: Sequence[Ledger], now: float) -> tuple[Ledger, ...]:
        kept = super()._kept(former, now)
        here = {ledger.identity for ledger in kept}
        self.dropped = {**self.dropped, **{one.identity: one.sheet for one in former if one.identity not in here}}
        return kept


class Told(KubeletClient):
    """The real client and decoder, with the wire cut short: the answer's bytes are made here."""

    def __init__(self, world: World, *, in_pod: bool) -> None:
        super().__init__("/virtual/kubelet.sock", canary=AGENT_POD if in_pod else None)
        self._world = world
        self._in_pod = in_pod
        self._has_answered = False
        self.trouble = ""

    async def _once(self, method: str) -> bytes:
        if self.trouble == "garbage":
            return b"\xff\xfe not a message"
        # An agent outside a pod believes a first answer without pods: it has nothing to compare it with.
        if self.trouble == "starting" and (self._in_pod or self._has_answered):
            return b""
        if self.trouble:
            raise AttributionError(self.trouble, f"kubelet: {self.trouble}")
        self._has_answered = True
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
    in_pod: bool = True
    """Whether the agent has the name of its own pod."""
    interval_seconds: float = 1.0
    save_seconds: float = 5.0
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
    def ledgers(self) -> WatchedLedgers:
        """The ledgers, which are watched."""
        ledgers = self.metering.ledgers
        if not isinstance(ledgers, WatchedLedgers):
            raise TypeError(f"not watched: {ledgers!r}")
        return ledgers

    def end(self) -> None:
        """Let go of the lock, as the kernel does when the process ends."""
        self.metering.lock.release()

    @property
    def noted_steady(self) -> float | None:
        """Monotonic instant in the lock file: time up to it was shown and not saved. None where there is none."""
        return self.metering.lock.noted().get("metered_steady")

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
    steady: float,
    dropped: Mapping[str, Sheet] | None = None,
) -> Agent:
    """Start the agent's process, as ``agent.run`` does.

    Args:
        settings: Its options.
        world: Its node.
        book: Prices.
        boot_id: Of the machine.
        steady: Monotonic time in seconds.
        dropped: Ledgers that the state had once and has no more.
    """
    pipe, client = Pipe(), Told(world, in_pod=settings.in_pod)
    kubelet = Kubelet(client, world)
    api = Api(world) if settings.with_api else None
    owners = Owners(tenancy=api)
    clock = IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=stale_after_seconds(settings.interval_seconds))
    ledgers = WatchedLedgers(saves=True, account_limit=settings.account_limit)
    ledgers.dropped = dict(dropped or {})
    metering = Metering(
        meter=Meter(settings.interval_seconds, owners.owner_of),
        owners=owners,
        ledgers=ledgers,
        prices=NodePrices(node=NODE, book=book),
        clock=clock,
        file=StateFile(settings.directory / "state"),
        lock=WriterLock(node=NODE, directory=settings.directory / "lock"),
        boot_id=boot_id,
        simulated=True,
        save_interval_seconds=settings.save_seconds,
    )
    metering.take(steady)
    lookup = PodLookup(settings.directory / "proc", settings.directory / "pods")
    node = Node(
        name=NODE,
        sources=Sources(nvml=pipe, stale_after_seconds=stale_after_seconds(settings.interval_seconds)),
        attributor=Attributor(
            kubelet=kubelet,
            lookup=lookup,
            expiry_seconds=EXPIRY_SECONDS,
            metadata=api,
            metadata_wait_seconds=15.0,
            replicas=metering.replicas,
        ),
        viewer=Viewer(lookup=lookup, clock=clock, owners=owners),
        sample_interval_seconds=settings.interval_seconds,
        process_clock=lambda: 0.0,
        metering=metering,
    )
    return Agent(node=node, pipe=pipe, kubelet=kubelet, api=api, metering=metering)
