"""What a page costs: snapshot to families, families to text, text to gzip; in CPU time of this process.

    python benchmarks/rendering.py                     # beside prometheus_client on the same families
    python benchmarks/rendering.py --against CHECKOUT  # beside another version of this program
    python benchmarks/rendering.py --profile           # the ten lines of code that cost most

A first scrape is that of a snapshot which nobody has asked for yet: all but the socket, process metrics and gzip
included. Its snapshot is 30 s younger than the one before; what is measured and what runs up has changed.
"""

import argparse
import gc
import json
import linecache
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from statistics import median
from types import FrameType
from typing import TypeVar

from prometheus_client import core
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from rendering_nodes import SHAPES, ticks

from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.text_format import Family, Kind, render
from exporter.model import Snapshot
from exporter.web.responses import Body
from exporter.web.server import Renderer

PAGES = 30
HOTTEST = 10
SAMPLE_SECONDS = 0.001
RUNS = 3
"""Of each of two versions, in turns."""

FIRST, AGAIN = "first scrape, gzip", "the next of the same snapshot"
BUILD, RENDER, PACK, THEIRS = "build families", "render again", "gzip", "prometheus_client: render"
SIZES = ("series", "page, KiB", "gzip, KiB")

Costs = dict[str, list[float]]
_T = TypeVar("_T")


class Fixed(Collector):
    """A registry of prometheus_client that holds given families."""

    def __init__(self, shown: Iterable[Family]) -> None:
        self._metrics = [_theirs(family) for family in shown]

    def collect(self) -> Iterable[core.Metric]:
        """All of them."""
        return self._metrics


def _theirs(family: Family) -> core.Metric:
    counter = family.kind is Kind.COUNTER and family.name.endswith("_total")
    metric = core.Metric(family.name.removesuffix("_total"), family.help, "counter" if counter else "gauge")
    for sample in family.samples:
        metric.add_sample(family.name, dict(sample.pairs), sample.value)
    return metric


def _timed(costs: Costs, what: str, run: Callable[[], _T]) -> _T:
    started = time.process_time()
    result = run()
    costs.setdefault(what, []).append((time.process_time() - started) * 1000)
    return result


def scrape(renderer: Renderer, snapshot: Snapshot) -> bytes:
    """What Prometheus gets."""
    answer = renderer.metrics(snapshot, "application/openmetrics-text;version=1.0.0")
    return answer.packed() or b""


def first_scrapes(size: int, pages: int) -> Costs:
    """CPU of the first scrape of each of so many snapshots, and of the one after it."""
    renderer, costs = Renderer(ExpositionOptions()), Costs()
    for number, snapshot in enumerate(islice(ticks(SHAPES[size]), pages + 1)):
        kept = costs if number else Costs()  # the very first page has nothing to take over
        _timed(kept, FIRST, lambda snapshot=snapshot: scrape(renderer, snapshot))
        _timed(kept, AGAIN, lambda snapshot=snapshot: scrape(renderer, snapshot))
    return costs


def parts(size: int, pages: int) -> tuple[Costs, Mapping[str, float]]:
    """CPU of the parts, none of which takes over anything from the page before but label sets; and how much it is."""
    costs, options, sizes = Costs(), ExpositionOptions(), dict.fromkeys(SIZES, 0.0)
    for snapshot in islice(ticks(SHAPES[size]), pages):
        shown = _timed(costs, BUILD, lambda snapshot=snapshot: families(snapshot, options))
        page = _timed(costs, RENDER, lambda shown=shown: render(shown, openmetrics=False))
        packed = _timed(costs, PACK, lambda page=page: Body(page, "text/plain").packed()) or b""
        fixed = Fixed(shown)
        _timed(costs, THEIRS, lambda fixed=fixed: generate_latest(fixed))
        series = sum(len(family.values) for family in shown)
        sizes = dict(zip(SIZES, (series, len(page) / 1024, len(packed) / 1024), strict=True))
    return costs, sizes


def table(rows: Iterable[tuple[str, Iterable[float]]], digits: int = 2) -> None:
    """Print rows of figures, one column for each size."""
    for what, figures in rows:
        print(f"| {what} | " + " | ".join(f"{figure:,.{digits}f}" for figure in figures) + " |")


def head(title: str) -> None:
    """Print the first lines of a table."""
    print(f"\n| {title} | " + " | ".join(shape.title for shape in SHAPES.values()) + " |")
    print("|---|" + "---:|" * len(SHAPES))


def alone(pages: int) -> None:
    """Print what everything costs, beside prometheus_client."""
    measured = [parts(size, pages) for size in SHAPES]
    scrapes = [first_scrapes(size, pages) for size in SHAPES]
    head("CPU, median, ms")
    table([(what, [sizes[what] for _, sizes in measured]) for what in SIZES], digits=0)
    table([(what, [median(costs[what]) for costs, _ in measured]) for what in (BUILD, RENDER, THEIRS, PACK)])
    table([("prometheus_client: our render", [median(c[THEIRS]) / median(c[RENDER]) for c, _ in measured])], digits=1)
    table([(what, [median(costs[what]) for costs in scrapes]) for what in (FIRST, AGAIN)], digits=3)
    table([("first scrape, worst", [max(costs[FIRST]) for costs in scrapes])])


def against(checkout: Path, pages: int) -> None:
    """Print first scrapes of this version and another, measured in turns in processes of their own."""
    here: list[Costs] = [{} for _ in SHAPES]
    there: list[Costs] = [{} for _ in SHAPES]
    for _ in range(RUNS):
        for column, size in enumerate(SHAPES):
            for kept, path in ((there, checkout), (here, _ROOT)):
                for what, figures in _of_version(path, size, pages).items():
                    kept[column].setdefault(what, []).extend(figures)
    head("CPU, ms")
    for what in (FIRST, AGAIN):
        for title, figure in (("median", median), ("least", min)):
            before, after = ([figure(costs[what]) for costs in version] for version in (there, here))
            table([(f"{what}: {title}, before", before), (f"{what}: {title}, after", after)])
            table([("before : after", [one / other for one, other in zip(before, after, strict=True)])], digits=1)


_ROOT = Path(__file__).resolve().parents[1]


def _of_version(checkout: Path, size: int, pages: int) -> Costs:
    command = [sys.executable, __file__, "--size", str(size), "--pages", str(pages)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(checkout)}, capture_output=True, check=True)
    costs: Costs = json.loads(done.stdout)
    return costs


def profile(size: int, pages: int) -> None:
    """Print the lines in which first scrapes spend most of their CPU time, by samples."""
    hot: Counter[tuple[str, int]] = Counter()

    def note(_number: int, frame: FrameType | None) -> None:
        if frame is not None:
            hot[frame.f_code.co_filename, frame.f_lineno] += 1

    snapshots = list(islice(ticks(SHAPES[size]), pages))
    renderer = Renderer(ExpositionOptions())
    scrape(renderer, snapshots[0])
    before = signal.signal(signal.SIGPROF, note)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
    for snapshot in snapshots[1:]:
        scrape(renderer, snapshot)
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
    print(f"{SHAPES[size].title}: {hot.total()} samples in {pages - 1} first scrapes\n")
    for (file, number), count in hot.most_common(HOTTEST):
        where = f"{Path(file).name}:{number}"
        print(f"{count / hot.total():6.1%}  {where:<26} {linecache.getline(file, number).strip()}")


def main() -> int:
    """Measure and print; never fails on a slow machine."""
    parser = argparse.ArgumentParser(description="What a page costs, in CPU time.")
    parser.add_argument("--pages", type=int, default=PAGES, help="of each size")
    parser.add_argument("--against", type=Path, help="another checkout, or just its folder exporter/ in one")
    parser.add_argument("--profile", type=int, nargs="?", const=5000, choices=SHAPES, help="series of the page")
    parser.add_argument("--size", type=int, choices=SHAPES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    gc.collect()
    gc.freeze()  # as the agent does at its start
    if arguments.size:
        print(json.dumps(first_scrapes(arguments.size, arguments.pages)))
    elif arguments.profile:
        profile(arguments.profile, arguments.pages)
    elif arguments.against:
        against(arguments.against.resolve(), arguments.pages)
    else:
        alone(arguments.pages)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
