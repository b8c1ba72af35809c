"""One node's agent in virtual time: samples, kubelet polls and saves as in the real agent, and a day's scrapes."""

import math
import random
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accuracy_day import DAY_SECONDS, OPENS_AT, WARM_SECONDS, Job, NodeDay

from exporter.accounting.ledger import Ledgers
from exporter.accounting.meter import Meter, MeterState
from exporter.accounting.state_file import StateFile
from exporter.metrics.collector import ExpositionOptions, families
from exporter.model.attribution import AllocationState, Holder, Owner, ShareMode
from exporter.model.devices import Gpu
from exporter.model.ledger import LedgerView
from exporter.model.records import read
from exporter.model.snapshot import Activity, ActivitySource, DeviceView, MeteringView, PodUse, Snapshot

SAMPLE_SECONDS = 1.0
JITTER_SECONDS = 0.02
KUBELET_SECONDS = 5.0
SAVE_SECONDS = 5.0
SCRAPE_SECONDS = 30.0
DOWN_SECONDS = 20.0
"""Time for which a restarting agent is down."""
STEADY_AT_START = 100_000.0
RECORDED = frozenset(
    {
        *("gpu_ledger_seconds_total", "gpu_ledger_created_timestamp_seconds"),
        *("gpu_pod_allocated_seconds_total", "gpu_pod_active_seconds_total"),
    }
)
"""Metrics that rules and queries read."""
Samples = tuple["array[float]", "array[float]"]
"""Times (seconds since the day's start) and values of one series."""


def by_job(holder: Holder) -> Owner:
    """Return one owner per pod: the worst case, because most of its series begin within the day."""
    return Owner(namespace=holder.namespace, kind="Job", name=holder.pod)


@dataclass(slots=True)
class Books:
    """Meter and ledger, and the ledger as last shown."""

    meter: Meter
    ledgers: Ledgers
    saved: LedgerView = field(default_factory=LedgerView)


@dataclass(slots=True)
class Recorder:
    """The samples of one node in Prometheus."""

    node: str
    series: dict[str, Samples] = field(default_factory=dict)

    def add(self, name: str, at: float, value: float) -> None:
        """Keep one sample."""
        times, values = self.series.setdefault(name, (array("d"), array("d")))
        times.append(at)
        values.append(value)

    def page(self, ledger: LedgerView, at: float) -> None:
        """Keep the series of owners and pods in a scrape at ``at``."""
        snapshot = Snapshot(taken_at_seconds=OPENS_AT + at, node=self.node, metering=MeteringView(ledger=ledger))
        for family in families(snapshot, ExpositionOptions()):
            if family.name in RECORDED:
                for labels, value in family.values.items():
                    self.add(f"{family.name}{{{labels}}}", at, value)

    def gauges(self, views: Iterable[DeviceView], at: float) -> None:
        """Keep the gauges of dcgm-exporter: the device's utilisation with the labels of each holder."""
        for view in views:
            for use in view.pods:
                labels = (
                    f'UUID="{view.uuid}",gpu="{view.gpu.index}",namespace="{use.holder.namespace}",'
                    f'node="{self.node}",pod="{use.holder.pod}"'
                )
                ratio = view.activity.ratio if view.activity else 0.0
                self.add(f"DCGM_FI_DEV_GPU_UTIL{{{labels}}}", at, float(round(100 * ratio)))

    def before(self, moment: float) -> "Recorder":
        """Return a copy of the samples before a moment."""
        copy = Recorder(self.node)
        for name, (times, values) in self.series.items():
            count = bisect_left(times, moment)
            if count:
                copy.series[name] = (times[:count], values[:count])
        return copy


@dataclass(slots=True)
class VirtualAgent:
    """Steps through a day; the views change only where a job starts, ends, is found or changes its activity."""

    day: NodeDay
    seed: int
    recorder: Recorder
    books: Books
    _random: random.Random = field(init=False)
    _gpus: list[Gpu] = field(init=False)
    _poll_phase: float = field(init=False)
    scrape_phase: float = field(init=False)
    _found: tuple[Job, ...] = ()
    _polled: float = -math.inf
    _views: tuple[DeviceView, ...] = ()
    _fresh_until: float = -math.inf

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311 - not for secrets
        self._poll_phase = self._random.uniform(0, KUBELET_SECONDS)
        self.scrape_phase = self._random.uniform(0, SCRAPE_SECONDS)
        self._gpus = [
            Gpu(
                uuid=f"GPU-{self.day.name}-{index}",
                index=index,
                minor=index,
                model=self.day.model,
                pci_bus_id=str(index),
            )
            for index in range(self.day.gpu_count)
        ]

    def run(self, first: float, last: float, dump_before: float = math.inf) -> dict[str, Any] | None:
        """Sample from ``first`` to ``last`` and keep the scrapes in between; return the save before ``dump_before``."""
        dumped: dict[str, Any] | None = None
        scrape = self.scrape_phase + SCRAPE_SECONDS * math.ceil((first - self.scrape_phase) / SCRAPE_SECONDS)
        before, save, number = first - SAMPLE_SECONDS, first, 0
        while (now := first + number * SAMPLE_SECONDS + self._random.uniform(0, JITTER_SECONDS)) <= last:
            number += 1
            while scrape < now:
                self._scrape(scrape)
                scrape += SCRAPE_SECONDS
            self._sample(before, now)
            before = now
            if now < save:
                continue
            save = now + SAVE_SECONDS
            if scrape < save + SAMPLE_SECONDS:
                _save(self.books, now)
                self.books.saved = self.books.ledgers.view()
            if now < dump_before <= save + SAMPLE_SECONDS:
                dumped = _state(self.books, now)
        return dumped

    def _scrape(self, at: float) -> None:
        self.recorder.page(self.books.saved, at)
        self.recorder.gauges(self._views, at)

    def _sample(self, before: float, now: float) -> None:
        poll = self._poll_phase + KUBELET_SECONDS * math.floor((now - self._poll_phase) / KUBELET_SECONDS)
        if poll > self._polled:
            self._polled = poll
            found = tuple(job for job in self.day.jobs if job.start_seconds <= poll < job.end_seconds)
            if found != self._found:
                self._found, self._fresh_until = found, -math.inf
        if now > self._fresh_until:
            # Without a change since the last sample, the mean of later samples stays the same until the next change.
            change = min((job.next_change(before) for job in self.day.jobs), default=math.inf)
            self._views = self._look(before, now)
            self._fresh_until = change if change > now else -math.inf
        portions = self.books.meter.add(self._views, STEADY_AT_START + now)
        self.books.ledgers.charge(portions, {}, now=OPENS_AT + now, steady=STEADY_AT_START + now)

    def _look(self, before: float, now: float) -> tuple[DeviceView, ...]:
        span = now - before
        running = [
            (job, job.busy_seconds(before, now) / span)
            for job in self.day.jobs
            if job.start_seconds < now and job.end_seconds > before
        ]
        return tuple(self._view(gpu, running) for gpu in self._gpus)

    def _view(self, gpu: Gpu, running: list[tuple[Job, float]]) -> DeviceView:
        busy = {job.name: job.share_ratio * ratio for job, ratio in running if gpu.index in job.gpus}
        holders = [job for job in self._found if gpu.index in job.gpus]
        pods = tuple(_use(job, gpu, busy.get(job.name, 0.0)) for job in holders)
        total = min(1.0, sum(busy.values()))
        foreign = total - sum(use.activity.ratio for use in pods if use.activity)
        return DeviceView(
            gpu=gpu,
            activity=Activity(ratio=total, source=ActivitySource.ENGINE),
            allocation=AllocationState.ALLOCATED if pods else AllocationState.UNALLOCATED,
            pods=pods,
            unattributed_activity_ratio=max(0.0, foreign) if pods else None,
        )


def _use(job: Job, gpu: Gpu, ratio: float) -> PodUse:
    holder = Holder(
        namespace=job.namespace,
        pod=job.name,
        container="main",
        device_uuid=gpu.uuid,
        mode=ShareMode.SHARED if job.shared else ShareMode.EXCLUSIVE,
        resource="nvidia.com/gpu",
        source="device-plugin",
        share_ratio=job.share_ratio,
        device_share_ratio=job.share_ratio,
    )
    activity = Activity(ratio=ratio, source=ActivitySource.PROCESS_SAMPLES)
    return PodUse(holder=holder, age_seconds=0.0, activity=activity)


def new_books(seed: int) -> Books:
    """Return the books of a starting agent; the seed gives their identity."""
    return Books(Meter(SAMPLE_SECONDS, by_job), Ledgers(saves=True, new_identity=lambda: f"{seed:012x}"))


def _state(books: Books, now: float) -> dict[str, Any]:
    return {**_save(books, now), "meter": books.meter.state()}


def _save(books: Books, now: float) -> dict[str, Any]:
    saved = books.ledgers.begin_save(lambda owner: owner, OPENS_AT + now)
    books.ledgers.saved()
    return saved


def _restored(saved: dict[str, Any]) -> Books:
    """Return the books that a new agent reads from a real state file."""
    with TemporaryDirectory() as directory:
        StateFile(Path(directory)).save(saved)
        state = StateFile(Path(directory)).load()
    if state is None:
        raise RuntimeError("the saved state is missing")
    books = Books(Meter(SAMPLE_SECONDS, by_job), Ledgers(saves=True))
    books.ledgers.restore(state)
    books.meter.resume(read(MeterState, state["meter"]))
    return books


@dataclass(slots=True)
class NodeRecord:
    """Series of one node in Prometheus, without and with a restart of its agent in the middle of the day."""

    clean: dict[str, Samples]
    restarted: dict[str, Samples]
    conservation_error_seconds: float
    samples: int


def record(day: NodeDay, seed: int, length: float = DAY_SECONDS) -> NodeRecord:
    """Run a node's agent through the day, and a second time from a restart onwards."""
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    killed = chance.uniform(0.3, 0.7) * length
    recorder = Recorder(day.name)
    agent = VirtualAgent(day, seed, recorder, new_books(seed))
    first = -WARM_SECONDS + chance.uniform(0, SAMPLE_SECONDS)
    state = agent.run(first, length + SAMPLE_SECONDS, dump_before=killed)
    if state is None:
        raise RuntimeError("no save before the restart")
    second = VirtualAgent(day, seed, recorder.before(killed), _restored(state))
    second.run(killed + DOWN_SECONDS, length + SAMPLE_SECONDS)
    worst = max(one.books.saved.conservation_error_seconds for one in (agent, second))
    return NodeRecord(recorder.series, second.recorder.series, worst, int(length + WARM_SECONDS))
