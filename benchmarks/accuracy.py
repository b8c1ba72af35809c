"""Replays a day of a production trace through meters, ledger and a real Prometheus, and compares with the truth.

Every node of the day's jobs runs the agent's meter and ledger in virtual time: one sample a second, one kubelet poll
every five, a save every five. The page of the agent is recorded every 30 s. A real Prometheus reads
the records as blocks from promtool, evaluates the shipped rules at their intervals in that time, and answers common
queries. The source of the jobs is Alibaba cluster-trace-gpu-v2023 (CC BY 4.0).

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
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

from accuracy_agent import NodeRecord, Samples, record
from accuracy_day import OPENS_AT, TRACE, WARM_SECONDS, NodeDay, busiest_day, nodes_of_day, read_pods
from accuracy_rules import INTERVAL_SECONDS, Span, evaluate
from accuracy_score import CHECKPOINT_SECONDS, Balance, Row, ask, balance, score
from remote_write import make_blocks, serving

LOST_RATIO = 0.02
OUTAGE_SECONDS = 600.0
WORKERS = 2
"""Nodes replayed at a time."""

Keep = Callable[[str, float], bool]


def everything(_node: str, _at: float) -> bool:
    """Keep every scrape."""
    return True


@cache
def not_lost(node: str, at: float) -> bool:
    """Return whether a scrape arrives: two in a hundred, drawn at random, fail."""
    return random.Random(f"{node} {at}").random() >= LOST_RATIO  # noqa: S311 - not for secrets


def outage(length: float) -> Span:
    """Return the ten minutes without Prometheus: across the full hour next to the middle if the day has one."""
    middle = length // 7200 * 3600 or length / 2
    return middle - OUTAGE_SECONDS / 2, middle + OUTAGE_SECONDS / 2


def evaluated(length: float, away: Span | None = None) -> list[Span]:
    """Return the spans in which Prometheus evaluates rules: from the start of the agents to the last checkpoint."""
    first, last = -float(WARM_SECONDS), length + CHECKPOINT_SECONDS
    return [(first, away[0]), (away[1], last)] if away else [(first, last)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The pages of the agents that reach Prometheus, and the spans in which it evaluates its rules."""

    records: Sequence[Mapping[str, Samples]]
    keep: Keep
    spans: Sequence[Span]


def write_openmetrics(path: Path, recorded: Iterable[Mapping[str, Samples]], keep: Keep) -> None:
    """Write the samples that arrive."""
    with path.open("w", encoding="ascii") as file:
        for series in recorded:
            for name, (times, values) in series.items():
                node = name.partition('node="')[2].partition('"')[0]
                pairs = zip(times, values, strict=True)
                file.writelines(f"{name} {value!r} {OPENS_AT + at:.3f}\n" for at, value in pairs if keep(node, at))
        file.write("# EOF\n")


@dataclass(frozen=True, slots=True)
class Found:
    """Results of one case."""

    rows: dict[str, Row]
    """Errors by query method."""
    balance: Balance


def replayed(nodes: Sequence[NodeDay], length: float, seed: int) -> list[NodeRecord]:
    """Return the record of every node; each node and seed has other phases."""
    with ProcessPoolExecutor(WORKERS) as pool:
        numbers = range(seed * len(nodes), (seed + 1) * len(nodes))
        return list(pool.map(record, nodes, numbers, [length] * len(nodes)))


def cases(records: Sequence[NodeRecord], length: float) -> dict[str, Case]:
    """Return every case by its name."""
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
    """Load a case into a separate Prometheus, evaluate the rules and query the results."""
    jobs = [job for node in nodes for job in node.jobs]
    with TemporaryDirectory() as name:
        directory = Path(name)
        text, data = directory / "samples", directory / "data"
        write_openmetrics(text, case.records, case.keep)
        make_blocks(text, data, block_hours=768)
        text.unlink()
        with serving(data, "storage: {tsdb: {out_of_order_time_window: 1000d}}\n") as server:
            evaluate(server, case.spans, random.Random(seed).uniform(0.0, INTERVAL_SECONDS))  # noqa: S311 - no secret
            rows = {answer.way: score(answer, jobs) for answer in ask(server, jobs, length)}
            return Found(rows, balance(server, nodes, length))


Column = tuple[str, str, Callable[[Iterable[float]], float]]
"""Heading, format of the figures, and the function that combines the figures of several seeds."""
worst = partial(max, key=abs)
ERRORS: Sequence[Column] = (
    ("all", "+.3%", fmean),
    ("worst namespace", "+.2%", worst),
    ("pods < 60 s", "+.2%", fmean),
    ("pods < 5 min", "+.2%", fmean),
    ("worst pod, s", "+.1f", worst),
    ("active", "+.2%", fmean),
)
SUMS: Sequence[Column] = (
    ("capacity, GPU-h", ".1f", fmean),
    ("owners", "+.4%", worst),
    ("workloads", "+.4%", worst),
    ("marker", "+.4%", worst),
    ("unknown", ".0f", worst),
    ("Unattributed", ".0f", worst),
    ("Unallocated", "+.4%", worst),
)


def heads(titles: str, columns: Sequence[Column]) -> str:
    """Return the first lines of a table."""
    return f"\n| {titles} | {' | '.join(column[0] for column in columns)} |\n|{'---|' * (len(columns) + 2)}"


def cells(seeds: Iterable[Sequence[float | None]], columns: Sequence[Column]) -> str:
    """Return the figures of a line; a figure without a value in any seed is empty."""
    texts = []
    for values, (_, form, choose) in zip(zip(*seeds, strict=True), columns, strict=True):
        there = [value for value in values if value is not None]
        texts.append(format(choose(there), form).replace("%", " %") if there else "")
    return " | ".join(texts)


def show(found: Mapping[str, Sequence[Found]]) -> None:
    """Print the tables."""
    print(heads("case | way to ask", ERRORS))
    for case, seeds in found.items():
        for way in seeds[0].rows:
            print(f"| {case} | {way} | {cells((one.rows[way] for one in seeds), ERRORS)} |")
    print(heads("case | recorded by", SUMS))
    for case, seeds in found.items():
        print(f"| {case} | ledger | {cells((one.balance for one in seeds), SUMS)} |")


def main() -> int:
    """Replay and compare; without the trace or Prometheus, print a message and return 0."""
    parser = argparse.ArgumentParser(description="Replay a day and compare GPU-seconds with the truth.")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder with the CSV files")
    parser.add_argument("--hours", type=int, default=24, help="length of the day (a short one for a test)")
    parser.add_argument("--gpus", type=int, default=64, help="least number of GPUs; free nodes are added up to it")
    parser.add_argument("--seeds", type=int, default=1, help="runs, each with other phases of polls, scrapes and rules")
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
        records = replayed(nodes, length, seed)
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
