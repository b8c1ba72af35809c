"""Hours of a busy node in virtual time: does metering stay within memory, CPU and series?

8 GPUs with 14 replicas each and 110 pods that come and go, one sample a second through the agent's metering: meter,
ledger, prices, and a state file that is truly written and flushed every 5 s; a page is built and rendered every 30 s.

    python benchmarks/soak.py [--seconds N]
"""

import argparse
import gc
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, linear_regression, quantiles
from tempfile import TemporaryDirectory

from exporter.accounting.ledger import Ledger
from exporter.accounting.pricing import NodeFacts
from exporter.accounting.state_file import StateFile
from exporter.accounting.usage import Meter
from exporter.agent.metering import Metering, namespace_pays
from exporter.config import price_book
from exporter.exposition.collector import ExpositionOptions, families
from exporter.exposition.text import render
from exporter.model import (
    Activity,
    ActivitySource,
    AllocationState,
    DeviceView,
    Field,
    Gpu,
    Holder,
    PodUse,
    ShareMode,
    Snapshot,
)

GPUS = 8
REPLICAS = 14
PODS = 110
SHORTEST_SECONDS, LONGEST_SECONDS = 20.0, 600.0
NAMESPACES = ("search", "ads", "vision", "nlp", "recommend", "speech")
MODEL = "NVIDIA H100 80GB HBM3"
SCRAPE_SECONDS = 30
MEMORY_SECONDS = 30
SETTLED_SECONDS = 900
"""By then as many pods are dropped as come."""
FULL_SECONDS = 7200
"""By then the cache of label sets, which is bounded, is full of ended pods; memory should have found its level."""
EPOCH_SECONDS = 1_767_225_600.0
SAMPLE_BUDGET_MS = 20.0
"""2 % of a core at one sample a second, for all that the agent does."""


@dataclass(slots=True)
class Tenant:
    """A pod on one replica until it is replaced by the next."""

    holder: Holder
    ends_at: float


@dataclass(slots=True)
class Churn:
    """Pods that come and go on the replicas of a node."""

    chance: random.Random
    tenants: list[Tenant] = field(default_factory=list)
    started: int = 0
    energy_millijoules: float = 0.0
    gpus: tuple[Gpu, ...] = tuple(
        Gpu(uuid=f"GPU-{index}", index=index, minor=index, model=MODEL, pci_bus_id=f"00000000:{index:02X}:00.0")
        for index in range(GPUS)
    )

    def views(self, now: float) -> tuple[DeviceView, ...]:
        """The node at an instant; every pod busy to a part that nobody can foresee."""
        for number in range(PODS):
            if number >= len(self.tenants):
                self.tenants.append(self._tenant(number, now))
            elif self.tenants[number].ends_at <= now:
                self.tenants[number] = self._tenant(number, now)
        self.energy_millijoules += 400_000.0
        return tuple(self._view(gpu) for gpu in self.gpus)

    def _tenant(self, number: int, now: float) -> Tenant:
        self.started += 1
        holder = Holder(
            namespace=NAMESPACES[self.started % len(NAMESPACES)],
            pod=f"job-{self.started:05d}",
            container="main",
            device_uuid=self.gpus[number % GPUS].uuid,
            mode=ShareMode.SHARED,
            resource="nvidia.com/gpu.shared",
            source="device-plugin",
            share_ratio=1 / REPLICAS,
            device_share_ratio=1 / REPLICAS,
            pod_uid=f"00000000-0000-4000-8000-{self.started:012d}",
        )
        return Tenant(holder, now + self.chance.uniform(SHORTEST_SECONDS, LONGEST_SECONDS))

    def _view(self, gpu: Gpu) -> DeviceView:
        source = ActivitySource.PROCESS_SAMPLES
        pods = tuple(
            PodUse(
                holder=tenant.holder,
                age_seconds=0.0,
                activity=Activity(ratio=self.chance.random() / REPLICAS, source=source),
            )
            for tenant in self.tenants
            if tenant.holder.device_uuid == gpu.uuid
        )
        busy = sum(use.activity.ratio for use in pods if use.activity)
        return DeviceView(
            gpu=gpu,
            values={Field.TOTAL_ENERGY_CONSUMPTION: self.energy_millijoules, Field.POWER_USAGE: 400.0},
            activity=Activity(ratio=min(1.0, busy), source=ActivitySource.ENGINE),
            allocation=AllocationState.ALLOCATED,
            pods=pods,
            unattributed_activity_ratio=0.0,
        )


@dataclass(slots=True)
class Figures:
    """What was measured; milliseconds are CPU time."""

    sample_ms: list[float] = field(default_factory=list)
    dump_ms: list[float] = field(default_factory=list)
    write_ms: list[float] = field(default_factory=list)
    page_ms: list[float] = field(default_factory=list)
    page_bytes: list[int] = field(default_factory=list)
    series: list[int] = field(default_factory=list)
    state_bytes: list[int] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)
    """(virtual second, MiB resident)."""


def soak(metering: Metering, churn: Churn, seconds: int, figures: Figures) -> None:
    """Run the node for so many virtual seconds."""
    for second in range(seconds):
        steady, now = 1000.0 + second, EPOCH_SECONDS + second
        views = churn.views(now)
        started = time.process_time()
        metering.observe(views, sampled_steady=steady, now=now, steady=steady)
        figures.sample_ms.append(_since(started))
        _save(metering, now, steady, figures)
        if second % SCRAPE_SECONDS == SCRAPE_SECONDS - 1:
            _page(metering, views, now, steady, figures)
        if second % MEMORY_SECONDS == 0:
            figures.memory.append((second, resident_mib()))


def _save(metering: Metering, now: float, steady: float, figures: Figures) -> None:
    started = time.process_time()
    save = metering.begin_save(now, steady)
    if save is None:
        return
    figures.dump_ms.append(_since(started))
    started = time.process_time()
    error = save.write()
    figures.write_ms.append(_since(started))
    if error is not None:
        raise error
    metering.end_save(save, error)
    figures.state_bytes.append(save.file.path.stat().st_size)


def _page(metering: Metering, views: tuple[DeviceView, ...], now: float, steady: float, figures: Figures) -> None:
    started = time.process_time()
    snapshot = Snapshot(
        taken_at_seconds=now,
        node="soak",
        devices=views,
        attribution_known=True,
        ledger=metering.view(steady),
        prices=metering.prices,
        price_book=metering.book.description,
        unpriced_gpus=metering.unpriced_gpus,
    )
    page = render(families(snapshot, ExpositionOptions()), openmetrics=False)
    figures.page_ms.append(_since(started))
    figures.page_bytes.append(len(page))
    figures.series.append(sum(1 for line in page.splitlines() if not line.startswith(b"#")))


def _since(started: float) -> float:
    return (time.process_time() - started) * 1000


def resident_mib() -> float:
    """Memory of this process that is in RAM."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def show(figures: Figures, churn: Churn, metering: Metering, seconds: int) -> None:
    """Print the table."""
    full = [(at, mib) for at, mib in figures.memory if at >= min(FULL_SECONDS, seconds / 2)]
    slope = linear_regression([at for at, _ in full], [mib for _, mib in full]).slope * 3600
    hours = [f"{mib:.1f}" for at, mib in figures.memory if at and at % 3600 == 0]
    per_second = (
        sum(figures.sample_ms) + sum(figures.dump_ms) + sum(figures.write_ms) + sum(figures.page_ms)
    ) / seconds
    rows = [
        ("pods at a time, in all", f"{PODS}, {churn.started}"),
        ("CPU of a sample, mean / p99 / worst, ms", _spread(figures.sample_ms)),
        ("CPU to take a save (in the tick), mean / p99 / worst, ms", _spread(figures.dump_ms)),
        ("CPU to write a save (in a thread), mean / p99 / worst, ms", _spread(figures.write_ms)),
        ("CPU to build and render a page, mean / p99 / worst, ms", _spread(figures.page_ms)),
        ("CPU of all of it per second, ms (the whole agent may take 20)", f"{per_second:.2f}"),
        (
            "series on the page, after a quarter of an hour / most",
            f"{_settled(figures.series, seconds)} / {max(figures.series)}",
        ),
        ("page, most, KiB", f"{max(figures.page_bytes) / 1024:.0f}"),
        ("state file, most, KiB", f"{max(figures.state_bytes) / 1024:.0f}"),
        ("resident after each hour / at the end, MiB", " / ".join((*hours, f"{full[-1][1]:.1f}"))),
        ("slope once the caches are full, MiB per hour", f"{slope:+.2f}"),
        ("conservation error, s", f"{metering.ledger.conservation_error_seconds:.1e}"),
    ]
    print("| what | figure |\n|---|---:|")
    print("\n".join(f"| {what} | {figure} |" for what, figure in rows))


def _spread(values: list[float]) -> str:
    return f"{fmean(values):.2f} / {quantiles(values, n=100, method='inclusive')[98]:.2f} / {max(values):.2f}"


def _settled(values: list[int], seconds: int) -> int:
    return values[int(min(SETTLED_SECONDS, seconds / 2) // SCRAPE_SECONDS)]


def main() -> int:
    """Run and print; never fails on a slow machine."""
    parser = argparse.ArgumentParser(description="Run a busy node's metering for some virtual hours.")
    parser.add_argument("--seconds", type=int, default=3 * 3600, help="virtual seconds")
    seconds = parser.parse_args().seconds
    churn = Churn(random.Random(7))  # noqa: S311 - not for secrets
    figures = Figures()
    gc.collect()
    gc.freeze()  # as the agent does at its start
    started = time.monotonic()
    with TemporaryDirectory() as directory:
        metering = Metering(
            node="soak",
            meter=Meter(1.0, namespace_pays),
            ledger=Ledger(started_at_seconds=EPOCH_SECONDS),
            book=price_book.load(None),
            facts=NodeFacts(),
            file=StateFile(Path(directory)),
            boot_id="soak",
            simulated=True,
        )
        soak(metering, churn, seconds, figures)
    show(figures, churn, metering, seconds)
    print(f"\n{seconds} virtual seconds in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
