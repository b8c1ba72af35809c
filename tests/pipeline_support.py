"""A node in virtual time: the real sources over fake libraries, the real kubelet client, the real tick, no sleeping."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from exporter.accounting.activity import ActivityJudge
from exporter.accounting.idle import IdleClock
from exporter.accounting.ledger import Ledgers
from exporter.accounting.meter import Meter, stale_after_seconds
from exporter.accounting.prices import NodePrices
from exporter.accounting.state_file import StateFile
from exporter.agent.attributor import Attributor
from exporter.agent.metering import Metering
from exporter.agent.node import Node
from exporter.agent.owners import FILE_NAME, Owners, OwnerWindows
from exporter.agent.sources import Sources
from exporter.agent.views import Viewer
from exporter.attribution.owner_rules import OwnerRules
from exporter.attribution.pod_lifecycle import DEFAULT_RESERVATION_NAMESPACES as RESERVATIONS
from exporter.attribution.processes import PodLookup, sees_host_processes
from exporter.config import price_book
from exporter.errors import AttributionError, NoValuesError, SourceError
from exporter.gpu.dcgm.session import DcgmSource
from exporter.gpu.merge import alone, supplement
from exporter.gpu.nvml.source import NvmlSource
from exporter.kube.kubelet import KubeletClient
from exporter.kube.metadata import Metadata, MetadataSettings
from exporter.metrics.collectors_file import DEFAULT, Collectors
from exporter.model.attribution import Allocations
from exporter.model.devices import Reading, SourceState, SourceStatus
from exporter.model.fields import Field
from exporter.model.snapshot import Snapshot
from gpu_simulator import dcgm, driver
from gpu_simulator.api_server import ApiServer, objects_of
from gpu_simulator.kubelet import KubeletServer
from gpu_simulator.node import write_filesystem
from gpu_simulator.scenario import Scenario
from gpu_simulator.truth import NodeTruth

EPOCH_SECONDS = 1_800_000_000.0
FOLLOW_SECONDS = 120.0
"""The first answer waits for the package that reads kubeconfigs: 1.6 s of CPU time, and ten times as long or more on a
busy machine. The wait ends with the answer.
"""
KUBELET_SECONDS = 60.0
"""A busy machine may leave the server without CPU time for longer than the agent's timeout."""
KUBELET_INTERVAL_SECONDS = 5.0
"""The agent's default; a poll at every step would meet the kubelet's real rate limit."""


@dataclass(slots=True)
class DirectSource:
    """A source without its child: a test inserts readings."""

    name: str = "nvml"
    readings: list[Reading] = field(default_factory=list)
    state: SourceState = SourceState.UP
    reason: str = ""
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def status(self) -> SourceStatus:
        return SourceStatus(name=self.name, state=self.state, reason=self.reason)

    def take(self) -> tuple[Reading, ...]:
        taken, self.readings = tuple(self.readings), []
        return taken


@dataclass(slots=True)
class AskedKubelet:
    """The kubelet's answer, polled by a test."""

    latest: Allocations | None = None
    problem: str = ""
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Clock:
    """Virtual seconds since the scenario's start."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of the agent that a test changes."""

    interval_seconds: float = 1.0
    state_dir: Path | None = None
    pace: float = 1.0
    """Factor by which the windows of owners pass faster than the node's time."""
    boot_id: str = "boot-1"
    own_pod: tuple[str, str] | None = None
    """Namespace and name of the agent's pod."""


@dataclass(slots=True, kw_only=True)
class Sampled:
    """A source of readings and their destination, without the child process between the two."""

    source: NvmlSource | DcgmSource
    direct: DirectSource
    is_open: bool = False

    def sample(self, now: float) -> None:
        """Sample once; a failed source is opened again at the next sample, as in its child."""
        try:
            if not self.is_open:
                self.source.open()
                self.is_open = True
            self.direct.readings.append(self.source.sample(now))
            self.direct.state, self.direct.reason = SourceState.UP, ""
        except SourceError as error:
            if not isinstance(error, NoValuesError):
                self.close()
            self.direct.state, self.direct.reason = SourceState.FAILED, error.reason

    def close(self) -> None:
        """Release the library."""
        self.source.close()
        self.is_open = False


def save_now(metering: Metering, now: float, steady: float, *, last: bool = False) -> None:
    """Save if it is due, and wait for the disk."""
    save = metering.begin_save(now, steady, last=last)
    if save is not None:
        metering.end_save(save, save.write())


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """One simulated node; ``step`` moves it to an instant and returns the agent's snapshot."""

    scenario: Scenario
    directory: Path
    clock: Clock
    sampled: tuple[Sampled, ...]
    client: KubeletClient
    node: Node
    kubelet: AskedKubelet
    server: KubeletServer
    metadata: Metadata | None = None

    @property
    def source(self) -> NvmlSource | DcgmSource:
        """Return the primary source."""
        return self.sampled[0].source

    @property
    def direct(self) -> DirectSource:
        """Return the destination of its readings."""
        return self.sampled[0].direct

    @property
    def truth(self) -> NodeTruth:
        """Return the true state of the node."""
        return self.scenario.at(self.clock.seconds)

    async def step(self, seconds: float) -> Snapshot:
        """Advance to ``seconds`` since the scenario's start, sample once, poll the kubelet if it is due, tick once."""
        self.clock.seconds = seconds
        write_filesystem(self.truth, self.directory / "proc", self.directory / "pods")
        now = EPOCH_SECONDS + seconds
        for one in self.sampled:
            one.sample(now)
        await self.server.follow()
        if self.kubelet.latest is None or now - self.kubelet.latest.answered_at_seconds >= KUBELET_INTERVAL_SECONDS:
            await self.ask(now)
        if self.metadata:
            await self._api_followed(self.metadata, now)
        return self.node.tick(now, self.clock.seconds)

    async def _api_followed(self, metadata: Metadata, now: float) -> None:
        """Wait, in real time, until the known state of the API is the truth of this instant."""
        self.node.attributor.join(None, now, self.clock.seconds)  # passes the kubelet's list to the reader of the API
        deadline = time.monotonic() + FOLLOW_SECONDS
        while time.monotonic() < deadline:
            if _is_followed(metadata, self.truth, self.kubelet.latest, now):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"the API was not followed within {FOLLOW_SECONDS} s: {metadata.status.problem}")

    async def ask(self, now: float) -> None:
        """Poll the kubelet, as its poller does."""
        try:
            self.kubelet.latest = await self.client.fetch(now)
            self.kubelet.problem = ""
        except AttributionError as error:
            self.kubelet.problem = str(error)

    async def until(self, seconds: float, *, steps: int = 9) -> Snapshot:
        """Sample once a second up to ``seconds`` and return the last snapshot."""
        for back in range(steps - 1, 0, -1):
            await self.step(seconds - back)
        return await self.step(seconds)


def _is_followed(metadata: Metadata, truth: NodeTruth, listed: Allocations | None, now: float) -> bool:
    evidence = metadata.evidence(now)
    finished = {(pod.namespace, pod.name) for pod in truth.pods if pod.phase != "Running"}
    listed_pods = {(one.namespace, one.pod) for one in listed.containers} if listed else set()
    pods = {(pod.namespace, pod.name) for pod in truth.pods if pod.phase == "Running"}
    holders = {(holder.namespace, holder.pod) for holder in truth.holders}
    return (
        metadata.node_facts is not None
        and evidence.pods is not None
        and set(evidence.pods) == pods
        and finished & listed_pods <= evidence.ended
        and all(metadata.facts(*name) for name in holders & pods)
        and (not truth.cluster.claims or evidence.devices is not None)
        and len(evidence.claims) >= len(truth.cluster.claims)
    )


@asynccontextmanager
async def api_of(directory: Path, truth: Callable[[], NodeTruth], clock: Clock) -> AsyncIterator[Metadata]:
    """Serve the Kubernetes API of a node and follow it, as the agent does by default on a simulated node."""
    server = ApiServer(
        lambda: objects_of(truth()),
        lambda: truth().faults,
        token_file=directory / "token",
        kubeconfig=directory / "kubeconfig",
    )
    await server.start()
    settings = MetadataSettings(
        node=truth().node,
        kubeconfig=directory / "kubeconfig",
        rules=OwnerRules(team_keys=("team",)),
        reservation_namespaces=RESERVATIONS,
    )
    metadata = Metadata(settings, clock=lambda: EPOCH_SECONDS + clock.seconds, random=lambda: 0.0)
    following = asyncio.create_task(metadata.run())
    try:
        yield metadata
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        await server.stop()


def _sources(
    stack: AsyncExitStack, truth: Callable[[], NodeTruth], clock: Clock, fields: frozenset[Field], source: str
) -> Iterator[Sampled]:
    def monotonic() -> float:
        return clock.seconds

    if source != "dcgm":
        driver.install(truth, cache_seconds=0.0, epoch_seconds=EPOCH_SECONDS)
        stack.callback(driver.uninstall)
        yield _opened(stack, NvmlSource(fields, clock=monotonic))
    if source != "nvml":
        dcgm.install(truth, cache_seconds=0.0, epoch_seconds=EPOCH_SECONDS, monotonic=monotonic)
        stack.callback(dcgm.uninstall)
        wanted = alone(fields) if source == "dcgm" else supplement(fields)
        yield _opened(stack, DcgmSource(wanted, address="localhost:5555", interval_seconds=1.0, monotonic=monotonic))


def _opened(stack: AsyncExitStack, source: NvmlSource | DcgmSource) -> Sampled:
    source.open()
    sampled = Sampled(source=source, direct=DirectSource(name=source.name), is_open=True)
    stack.callback(sampled.close)
    return sampled


@asynccontextmanager
async def pipeline(
    scenario: Scenario,
    directory: Path,
    *,
    start: float = 0.0,
    collectors: Collectors = DEFAULT,
    with_api: bool = False,
    source: str = "nvml",
    agent: AgentSettings = AgentSettings(),
) -> AsyncIterator[Pipeline]:
    """Set the node up at ``start`` seconds of the scenario; the kubelet's socket and all trees are in ``directory``.

    ``source`` is the agent's option: ``nvml``, ``dcgm``, or ``auto`` for both.
    """
    async with AsyncExitStack() as stack:
        yield await _made(
            stack,
            scenario,
            directory,
            start=start,
            collectors=collectors,
            with_api=with_api,
            source=source,
            agent=agent,
        )


async def _made(
    stack: AsyncExitStack,
    scenario: Scenario,
    directory: Path,
    *,
    start: float,
    collectors: Collectors,
    with_api: bool,
    source: str,
    agent: AgentSettings,
) -> Pipeline:
    clock = Clock(start)
    seen: dict[float, NodeTruth] = {}

    def truth() -> NodeTruth:
        if clock.seconds not in seen:
            seen.clear()
            seen[clock.seconds] = scenario.at(clock.seconds)
        return seen[clock.seconds]

    server = KubeletServer(directory / "kubelet.sock", truth, clock=lambda: clock.seconds)
    write_filesystem(truth(), directory / "proc", directory / "pods")
    await server.start()
    stack.push_async_callback(server.stop)
    client = KubeletClient(str(directory / "kubelet.sock"), canary=agent.own_pod, deadline_seconds=KUBELET_SECONDS)
    metadata = await stack.enter_async_context(api_of(directory, truth, clock)) if with_api else None
    owners = Owners(tenancy=metadata)
    sampled = tuple(_sources(stack, truth, clock, collectors.fields, source))
    kubelet = AskedKubelet()
    idle = IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=stale_after_seconds(agent.interval_seconds))
    metering = Metering(
        meter=Meter(agent.interval_seconds, owners.owner_of),
        owners=owners,
        ledgers=Ledgers(saves=agent.state_dir is not None, new_identity=partial(next, map("{:012x}".format, count(1)))),
        prices=NodePrices(node=truth().node, book=price_book.load(None)),
        clock=idle,
        owner_windows=OwnerWindows(
            file=StateFile(agent.state_dir, FILE_NAME) if agent.state_dir else None,
            boot_id=agent.boot_id,
            simulated=True,
            judge_seconds=0.0,
            pace=agent.pace,
        ),
        file=StateFile(agent.state_dir) if agent.state_dir else None,
        boot_id=agent.boot_id,
        simulated=True,
    )
    metering.restore(start)
    lookup = PodLookup(directory / "proc", directory / "pods")
    viewer = Viewer(
        lookup=lookup,
        clock=idle,
        judge=ActivityJudge(nvml_reads=source != "dcgm"),
        process_list_reliable=sees_host_processes(directory / "proc"),
        owners=owners,
    )
    direct = {one.direct.name: one.direct for one in sampled}
    node = Node(
        name=truth().node,
        sources=Sources(
            nvml=direct.get("nvml"),
            dcgm=direct.get("dcgm"),
            stale_after_seconds=stale_after_seconds(agent.interval_seconds),
        ),
        attributor=Attributor(kubelet=kubelet, lookup=lookup, expiry_seconds=60.0, metadata=metadata),
        viewer=viewer,
        sample_interval_seconds=agent.interval_seconds,
        process_clock=lambda: 0.0,
        metering=metering,
    )
    return Pipeline(
        scenario=scenario,
        directory=directory,
        clock=clock,
        sampled=sampled,
        client=client,
        node=node,
        kubelet=kubelet,
        server=server,
        metadata=metadata,
    )
