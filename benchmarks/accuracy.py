"""Replays a day of a production trace through meters, ledger and a real Prometheus, and compares with the truth.

Every node of the day's jobs runs the agent's meter and ledger in virtual time: one sample a second, one kubelet poll
every five, a save every five. What a scrape would find is kept every 30 s. A real Prometheus gets it as
blocks from promtool, evaluates the shipped rules at their intervals in that time, and answers the queries that people
use. The source of the jobs is Alibaba cluster-trace-gpu-v2023 (CC BY 4.0).

    python benchmarks/accuracy.py [--traces DIR] [--hours N] [--gpus N] [--seeds N]
"""

import argparse
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from accuracy_agent import NodeRecord, record
from accuracy_day import TRACE, WARM_SECONDS, NodeDay, busiest_day, nodes_of_day, read_pods
from accuracy_prometheus import Samples, make_blocks, serving, write_openmetrics
from accuracy_rules import INTERVAL_SECONDS, Span, evaluate
from accuracy_score import CHECKPOINT_SECONDS, Balance, Row, ask, balance, score

LOST_RATIO = 0.02
OUTAGE_SECONDS = 600.0
WORKERS = 2
"""Nodes replayed at a time."""

Keep = Callable[[str, float], bool]


def everything(_node: str, _at: float) -> bool:
    """Every scrape arrives."""
    return True


@cache
def not_lost(node: str, at: float) -> bool:
    """Two scrapes in a hundred fail, whichever they are."""
    return random.Random(f"{node} {at}").random() >= LOST_RATIO  # noqa: S311 - not for secrets


def outage(length: float) -> Span:
    """Prometheus is away for ten minutes, across the full hour next to the middle where there is one."""
    middle = length // 7200 * 3600 or length / 2
    return middle - OUTAGE_SECONDS / 2, middle + OUTAGE_SECONDS / 2


def evaluated(length: float, away: Span | None = None) -> list[Span]:
    """When Prometheus evaluates rules: from the start of the agents to the last checkpoint."""
    first, last = -float(WARM_SECONDS), length + CHECKPOINT_SECONDS
    return [(first, away[0]), (away[1], last)] if away else [(first, last)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What of the agents' pages reached Prometheus, and when it evaluated its rules."""

    records: Sequence[Mapping[str, Samples]]
    keep: Keep
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one case."""

    rows: list[Row]
    balance: Balance


def cases(records: Sequence[NodeRecord], length: float) -> dict[str, Case]:
    """Every case by its name."""
    clean, restarted = [one.clean for one in records], [one.restarted for one in records]
    begin, end = away = outage(length)
    always = evaluated(length)
    return {
        "clean": Case(records=clean, keep=everything, spans=always),
        "2 % of scrapes lost": Case(records=clean, keep=not_lost, spans=always),
        "agents restarted": Case(records=restarted, keep=everything, spans=always),
        "Prometheus away 10 min": Case(
            records=clean, keep=lambda _node, at: not begin <= at <= end, spans=evaluated(length, away)
        ),
    }


def judge(case: Case, nodes: Sequence[NodeDay], length: float, seed: int) -> Found:
    """Put a case into a Prometheus of its own, evaluate the rules and ask."""
    jobs = [job for node in nodes for job in node.jobs]
    with TemporaryDirectory() as name:
        directory = Path(name)
        text, data = directory / "samples", directory / "data"
        write_openmetrics(text, case.records, case.keep)
        make_blocks(text, data)
        text.unlink()
        with serving(data) as server:
            evaluate(server, case.spans, random.Random(seed).uniform(0.0, INTERVAL_SECONDS))  # noqa: S311 - no secret
            return Found([score(told, jobs) for told in ask(server, jobs, length)], balance(server, nodes, length))


def mean_of(rows: Sequence[Row]) -> Row:
    """The mean over seeds of one way to ask; of the worst pods the worst."""

    def mean(figures: Iterable[float | None]) -> float | None:
        there = [one for one in figures if one is not None]
        return fmean(there) if there else None

    return Row(
        way=rows[0].way,
        total=fmean(row.total for row in rows),
        worst_namespace=max((row.worst_namespace for row in rows), key=abs),
        brief=mean(row.brief for row in rows),
        short=mean(row.short for row in rows),
        worst_pod_seconds=max((row.worst_pod_seconds or 0.0 for row in rows), key=abs),
        active=mean(row.active for row in rows),
    )


def percent(ratio: float | None, digits: int = 2) -> str:
    """The digits that matter."""
    return "" if ratio is None else f"{100 * ratio:+.{digits}f} %"


def line(case: str, row: Row) -> str:
    """A line of the table of errors."""
    worst = "" if row.worst_pod_seconds is None else f"{row.worst_pod_seconds:+.1f} s"
    cells = (percent(row.total, 3), percent(row.worst_namespace), percent(row.brief), percent(row.short), worst)
    return f"| {case} | {row.way} | {' | '.join(cells)} | {percent(row.active)} |"


def foot(case: str, sums: Sequence[Balance]) -> str:
    """The recorded ledger of a case beside the capacity; of all seeds the worst."""

    def worst(figures: Iterable[float]) -> float:
        return max(figures, key=abs)

    return (
        f"| {case} | {sums[0].capacity / 3600:.1f} "
        f"| {percent(worst(one.told / one.capacity - 1 for one in sums), 4)} "
        f"| {percent(worst(one.workloads / one.told - 1 for one in sums), 4)} "
        f"| {percent(worst(one.marker / one.told - 1 for one in sums), 4)} "
        f"| {worst(one.unknown for one in sums):.0f} | {worst(one.unattributed for one in sums):.0f} "
        f"| {percent(worst(one.unallocated_error / one.capacity for one in sums), 4)} |"
    )


def show(found: Mapping[str, Sequence[Found]]) -> None:
    """Print the tables."""
    print("\n| case | way to ask | all | worst namespace | pods < 60 s | pods < 5 min | worst pod | active |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for case, seeds in found.items():
        for rows in zip(*(one.rows for one in seeds), strict=True):
            print(line(case, mean_of(rows)))
    heads = ("case", "capacity, GPU-h", "owners", "workloads", "marker", "unknown", "Unattributed", "Unallocated")
    print(f"\n| {' | '.join(heads)} |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    print("\n".join(foot(case, [one.balance for one in seeds]) for case, seeds in found.items()))


def main() -> int:
    """Replay and compare; 0 as well where the trace or Prometheus is missing, with a line that says so."""
    parser = argparse.ArgumentParser(description="Replay a day and compare GPU-seconds with the truth.")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder with the CSV files")
    parser.add_argument("--hours", type=int, default=24, help="length of the day (a short one for a test)")
    parser.add_argument("--gpus", type=int, default=64, help="free nodes are added until there are so many")
    parser.add_argument("--seeds", type=int, default=1, help="each with other phases of polls, scrapes and rules")
    arguments = parser.parse_args()
    path = arguments.traces / TRACE
    if not path.is_file():
        print(f"accuracy: skipped, {path} is not there (give the folder with --traces)")
        return 0
    if not (shutil.which("promtool") and shutil.which("prometheus")):
        print("accuracy: skipped, needs prometheus and promtool on the PATH (make install)")
        return 0
    pods = read_pods(path)
    day = busiest_day(pods)
    nodes = nodes_of_day(pods, day, arguments.gpus)
    length = arguments.hours * 3600.0
    started = time.monotonic()
    print("source: Alibaba cluster-trace-gpu-v2023 (CC BY 4.0)")
    print(
        f"day {day} of the trace: {sum(len(node.jobs) for node in nodes)} jobs on {len(nodes)} nodes with "
        f"{sum(node.gpu_count for node in nodes)} GPUs"
    )
    found: dict[str, list[Found]] = {}
    worst, samples = 0.0, 0
    for seed in range(arguments.seeds):
        with ProcessPoolExecutor(WORKERS) as pool:
            numbers = range(seed * len(nodes), (seed + 1) * len(nodes))
            records = list(pool.map(record, nodes, numbers, [length] * len(nodes)))
        samples += sum(one.samples for one in records)
        worst = max(worst, *(one.conservation_error_seconds for one in records))
        for name, case in cases(records, length).items():
            found.setdefault(name, []).append(judge(case, nodes, length, seed))
        print(f"seed {seed}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    print(f"{samples} samples of nodes; conservation error of the worst ledger: {worst:.1e} s")
    show(found)
    print(f"\n{arguments.seeds} seed(s), {time.monotonic() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
