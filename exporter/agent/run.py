"""Starts the agent's parts in order, ticks at the sample interval, and stops them."""

import asyncio
import contextlib
import ipaddress
import logging
import random
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from exporter.accounting.activity import ActivityJudge
from exporter.accounting.idle import IdleClock
from exporter.accounting.ledger import Ledgers, PodTable
from exporter.accounting.meter import Meter, stale_after_seconds
from exporter.accounting.prices import NodePrices, PriceBook
from exporter.accounting.state_file import StateFile, WriterLock
from exporter.agent.attributor import Attributor
from exporter.agent.history import EventLog, SourceRecord
from exporter.agent.metering import Metering, Save
from exporter.agent.node import Node
from exporter.agent.owners import FILE_NAME, Owners, OwnerWindows
from exporter.agent.sources import make_sources, sources_of
from exporter.agent.views import Viewer
from exporter.attribution.processes import PodLookup, sees_host_processes
from exporter.attribution.tenants import tenant_source
from exporter.config import AgentConfig, price_book, read_collectors, web_config
from exporter.errors import ConfigError, StateError
from exporter.kube.kubelet import KubeletClient, KubeletPoller, own_pod
from exporter.metrics.collector import ExpositionOptions
from exporter.metrics.collectors_file import Collectors
from exporter.metrics.dcgm_names import LabelStyle
from exporter.model.snapshot import Snapshot
from exporter.web.access import WebAccess
from exporter.web.http_server import HttpServer, bind
from exporter.web.server import NodeSite, Renderer

LOG = logging.getLogger("exporter.agent")

STEPS_SECONDS, BETWEEN_STEPS_SECONDS = 0.002, 0.001
"""After the first time spent in steps, a tick pauses for the second time, so that scrapes are answered."""
API_ANSWER_SECONDS = 15.0
"""Maximum time for the first answers of the API, in addition to the start jitter."""
SHUTDOWN_SECONDS = 2.0
"""Time for open scrapes to finish after a termination signal."""
_HOUR_SECONDS = 3600.0


def attributor_of(config: AgentConfig, clock: Callable[[], float] = time.time) -> Attributor:
    """Create the attributor that the configuration selects."""
    settings, owners = config.attribution, config.owners
    kubelet = metadata = tenants = None
    if settings.enabled and settings.workload_manager == "kubernetes":
        client = KubeletClient(
            settings.kubelet_socket, resources=settings.gpu_resources, canary=own_pod(), node_name=settings.node_name
        )
        kubelet = KubeletPoller(client, interval_seconds=settings.kubelet_interval_seconds, clock=clock)
        if owners.kube_metadata:
            from exporter.kube.metadata import Metadata, MetadataSettings  # noqa: PLC0415 - saves memory where it is off

            of_metadata = MetadataSettings(
                node=settings.node_name,
                kubeconfig=owners.kubeconfig,
                start_jitter_seconds=owners.kube_start_jitter_seconds,
                rules=owners.rules,
                namespace_teams=owners.namespace_teams,
                reservation_namespaces=owners.reservation_namespaces,
                own_pod=own_pod(),
            )
            metadata = Metadata(of_metadata, clock=clock, random=random.random)
    elif settings.enabled:
        tenants = tenant_source(settings.workload_manager, settings.job_mapping_dir, settings.proc_root)
    return Attributor(
        kubelet=kubelet or tenants,
        lookup=tenants or PodLookup(settings.proc_root, settings.pod_log_root),
        expiry_seconds=settings.expiry_seconds,
        metadata=metadata,
        metadata_wait_seconds=owners.kube_start_jitter_seconds + API_ANSWER_SECONDS,
    )


async def run(config: AgentConfig, commands: Mapping[str, Sequence[str]]) -> int:
    """Run the agent until SIGTERM or SIGINT; return its exit code.

    Args:
        config: The user's configuration.
        commands: Command lines of the child processes of a simulated node, by source; pages and metrics then show that
            it is simulated. Empty for a real node.

    Raises:
        ExporterError: Nothing was started: a file has mistakes (ConfigError), or another process uses the port.
    """
    collectors = read_collectors(config.exposition.collectors, config.exposition.dcgm_names)
    load_prices = partial(price_book.load, config.prices.book)
    book = load_prices()
    missing = "" if "dcgm" in sources_of(config) else collectors.without_dcgm
    for warning in (*collectors.warnings, *([missing] if missing else []), *book.warnings):
        LOG.warning("%s", warning)
    serving = config.serving
    access = WebAccess(partial(web_config.load, serving.web_config)) if serving.web_config else None
    listener = bind(serving.listen.host, serving.listen.port)
    node = _node(config, collectors, book, commands)
    agent = Agent(
        node=node,
        tasks=node.attributor.tasks,
        load_prices=load_prices,
        renderer=Renderer(_exposition(config, collectors)),
        release_seconds=serving.release_seconds,
        access=access,
        cost_service_url=serving.cost_service_url,
    )
    try:
        return await agent.run(listener)
    finally:
        node.metering.close()


def _exposition(config: AgentConfig, collectors: Collectors) -> ExpositionOptions:
    settings = config.exposition
    return ExpositionOptions(
        collectors=collectors,
        dcgm_labels=LabelStyle(
            hostname=settings.hostname_label,
            pod_uid=settings.dcgm_pod_uid,
            old_names=settings.dcgm_old_labels,
            model_hyphens=settings.dcgm_model_hyphens,
            engine_host=_engine_host(config),
        ),
        series_limit=settings.series_limit,
    )


def _engine_host(config: AgentConfig) -> str:
    """Return the host of an engine on another machine, if no pods of this node are shown; otherwise empty."""
    host = config.sampling.dcgm_address.rpartition(":")[0].strip("[]")
    if config.attribution.enabled or host in {"", "unix", "localhost"}:
        return ""
    with contextlib.suppress(ValueError):
        return "" if ipaddress.ip_address(host).is_loopback else host
    return host


def _node(config: AgentConfig, collectors: Collectors, book: PriceBook, commands: Mapping[str, Sequence[str]]) -> Node:
    interval = config.sampling.interval_seconds
    simulated = bool(commands)
    sysfs = Path("/nonexistent" if simulated else "/sys")
    attributor = attributor_of(config)
    clock = IdleClock(
        threshold_ratio=config.sampling.idle_threshold_ratio, tolerated_gap_seconds=stale_after_seconds(interval)
    )
    metering = _metering(config, book, attributor, clock, sysfs, simulated=simulated)
    return Node(
        name=config.attribution.node_name,
        sources=make_sources(config, collectors.fields, commands),
        attributor=attributor,
        viewer=Viewer(
            lookup=attributor.lookup,
            clock=clock,
            judge=ActivityJudge(nvml_reads=config.sampling.source != "dcgm"),
            process_list_reliable=sees_host_processes(config.attribution.proc_root),
            owners=metering.owners,
        ),
        sample_interval_seconds=interval,
        process_clock=time.monotonic,
        metering=metering,
        events=EventLog(
            with_windows=bool(collectors.events),
            xid_window_seconds=config.exposition.xid_count_window_seconds,
            clock_events_window_seconds=config.exposition.clock_events_window_seconds,
        ),
        record=SourceRecord(bound_driver=partial(bound_driver, sysfs)),
    )


def _metering(
    config: AgentConfig, book: PriceBook, attributor: Attributor, clock: IdleClock, sysfs: Path, *, simulated: bool
) -> Metering:
    """Create the metering; if no other agent writes the ledger, continue from the state of the last process."""
    name, directory = config.attribution.node_name, config.running.state_dir
    boot_id, owners = _boot_id(), Owners(tenancy=attributor.tenancy)
    metering = Metering(
        meter=Meter(config.sampling.interval_seconds, owners.owner_of),
        owners=owners,
        ledgers=Ledgers(saves=directory is not None, pods=PodTable(linger_seconds=config.exposition.linger_seconds)),
        prices=NodePrices(node=name, book=book, facts=config.prices.node_facts),
        replicas=attributor.replicas,
        clock=clock,
        owner_windows=OwnerWindows(
            file=StateFile(directory, FILE_NAME, "every activity window") if directory else None,
            boot_id=boot_id,
            simulated=simulated,
            pace=_HOUR_SECONDS / config.running.simulate_hour_seconds if simulated else 1.0,
        ),
        file=StateFile(directory) if directory else None,
        lock=WriterLock(node=name, directory=config.running.lock_dir, state_directory=directory),
        boot_id=boot_id,
        loaded_driver=partial(loaded_driver, sysfs),
        simulated=simulated,
        save_interval_seconds=config.running.state_interval_seconds,
    )
    metering.become_writer(time.monotonic())
    return metering


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def loaded_driver(sys_root: Path) -> int | None:
    """Return a number that changes with every load of the NVIDIA kernel module; ``None`` without the module.

    It is the inode of the module's folder, which the kernel creates at each load.

    Args:
        sys_root: Mount point of sysfs.
    """
    try:
        return (sys_root / "module/nvidia").stat().st_ino
    except OSError:
        return None


def bound_driver(sys_root: Path, bus_id: str) -> str | None:
    """Return the name of the kernel driver that a PCI device is bound to; ``None`` if it cannot be read.

    Args:
        sys_root: Mount point of sysfs.
        bus_id: Bus id in NVML's form, with a domain of 8 digits.
    """
    domain, _, place = bus_id.partition(":")
    try:
        name = f"{int(domain, 16):04x}:{place.lower()}"
        return (sys_root / "bus/pci/devices" / name / "driver").readlink().name
    except (OSError, ValueError):
        return None


class ProblemLog:
    """Logs each problem of the kubelet or the Kubernetes API once at its start and once at its end."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, snapshot: Snapshot) -> None:
        """Log the problems that have begun or ended since the previous snapshot."""
        of_api = snapshot.metadata.problem if snapshot.metadata else ""
        for name, problem in (("kubelet", snapshot.attribution.problem), ("Kubernetes API", of_api)):
            if bool(problem) is not (name in self._logged):
                self._logged ^= {name}
                LOG.log(logging.WARNING if problem else logging.INFO, "%s: %s", name, problem or "recovered")


@dataclass(slots=True, kw_only=True)
class Agent:
    """Runs the agent: ticks, serves the newest snapshot and handles signals."""

    node: Node
    renderer: Renderer
    release_seconds: float
    load_prices: Callable[[], PriceBook]
    """Loads the price book; raises ConfigError if it has mistakes."""
    access: WebAccess | None = None
    """Access control; ``None``: plain HTTP without passwords."""
    cost_service_url: str = ""
    tasks: Sequence[Callable[[], Awaitable[None]]] = ()
    """Tasks that run in parallel to the ticks until the agent stops."""
    snapshot: Snapshot | None = None
    _problems: ProblemLog = field(default_factory=ProblemLog)
    _saving: asyncio.Task[None] | None = None
    _reloading: asyncio.Task[None] | None = None

    async def run(self, listener: socket.socket) -> int:
        """Serve and tick until a termination signal."""
        stop = asyncio.Event()
        self._install_signals(stop)
        await self._tick()
        server = HttpServer(
            app=NodeSite(
                snapshot=lambda: self.snapshot,
                renderer=self.renderer,
                release=self._release,
                cost_service_url=self.cost_service_url,
            ).app(),
            listener=listener,
            access=self.access,
            count=self.node.count_error,
            remark=f", node {self.node.name}",
            shutdown_seconds=SHUTDOWN_SECONDS,
        )
        parts = (*(worker.run for worker in self.node.sources.workers), self._ticks, *self.tasks)
        await server.serve(stop, parts, self._save_last)
        return 0

    def _install_signals(self, stop: asyncio.Event) -> None:
        """Handle signals explicitly: as process 1 of a container, Python would ignore SIGTERM."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGUSR1, self._release, self.release_seconds)
        loop.add_signal_handler(signal.SIGHUP, self._start_reload)

    def _release(self, seconds: float) -> None:
        """Release the driver in every child that has opened it."""
        for worker in self.node.sources.workers:
            worker.release(seconds)

    async def _ticks(self) -> None:
        """Tick at each interval, and at the first profiling values of DCGM, so that they do not wait for a tick."""
        loop = asyncio.get_running_loop()
        dcgm = self.node.sources.dcgm
        begun = dcgm.profiling_begun if dcgm else asyncio.Event()
        due = loop.time()
        while True:
            if loop.time() >= due:
                due = max(due + self.node.sample_interval_seconds, loop.time())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await begun.wait()
            begun.clear()
            await self._tick()

    async def _tick(self) -> None:
        resumed = time.monotonic()
        try:
            for snapshot in self.node.steps(time.time(), time.monotonic()):
                if snapshot is not None:
                    self.snapshot = snapshot
                    self._problems.note(snapshot)
                    self.node.sources.reopen_for_missing(snapshot, time.monotonic())
                elif time.monotonic() - resumed >= STEPS_SECONDS:
                    await asyncio.sleep(BETWEEN_STEPS_SECONDS)
                    resumed = time.monotonic()
            self.node.sources.choose_fields()
            if save := self.node.metering.begin_save(time.time(), time.monotonic()):
                self._saving = asyncio.ensure_future(self._write(save))
        except Exception:
            # The last snapshot stays, with the error counted, until it is too old to show values.
            self.node.count_error("agent", "tick")
            LOG.exception("tick failed; the last snapshot stays")
            self.snapshot = self.node.after_failed_tick(self.snapshot, time.time(), time.monotonic())

    def _start_reload(self) -> None:
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.ensure_future(self._reload_prices())
        else:  # the file may have changed after it was read
            self._reloading.add_done_callback(lambda _: self._start_reload())

    async def _reload_prices(self) -> None:
        """Read the price book in a thread, because thousands of rows take seconds and would delay a tick."""
        try:
            book = await asyncio.to_thread(self.load_prices)
        except ConfigError as error:
            self.node.metering.keep_prices(error)
        else:
            self.node.metering.use_prices(book)

    async def _write(self, save: Save) -> None:
        """Wait for the disk in a thread, because an fsync has no time limit and would delay a scrape."""
        error: StateError | None
        try:
            error = await asyncio.to_thread(save.write)
        except (RuntimeError, MemoryError) as why:  # no thread available: the next save may get one
            error = StateError("state_unwritable", f"state: cannot write {save.file.path}: {str(why) or 'no memory'}")
        self.node.metering.end_save(save, error)

    async def _save_last(self) -> None:
        """Save the time metered since the last save."""
        with contextlib.suppress(asyncio.TimeoutError):
            if self._saving:
                await asyncio.wait_for(self._saving, SHUTDOWN_SECONDS)
            if save := self.node.metering.begin_save(time.time(), time.monotonic(), last=True):
                await asyncio.wait_for(self._write(save), SHUTDOWN_SECONDS)
