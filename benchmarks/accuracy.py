"""Replays a day of a production trace through meters, ledger and a real Prometheus, and compares with the truth.

Every node of the day's jobs runs the agent's meter and ledger in virtual time: one sample a second, one kubelet poll
every five, a save every five. What a scrape would find is kept every 30 s, made into blocks by promtool, and asked of a
real Prometheus in the ways that people ask. The source of the jobs is Alibaba cluster-trace-gpu-v2023 (CC BY 4.0).

    python benchmarks/accuracy.py [--traces DIR] [--hours N] [--gpus N]
"""

import argparse
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from accuracy_agent import NodeRecord, record
from accuracy_day import NodeDay, busiest_day, nodes_of_day
from accuracy_prometheus import Samples, serving, write_openmetrics
from accuracy_score import Balance, Row, ask, balance, score
from trace_replay import TRACE, read_pods

LOST_RATIO = 0.02
OUTAGE_SECONDS = 600.0

Keep = Callable[[str, float], bool]


def everything(_node: str, _at: float) -> bool:
    """Every scrape arrives."""
    return True


@cache
def not_lost(node: str, at: float) -> bool:
    """Two scrapes in a hundred fail, whichever they are."""
    return random.Random(f"{node} {at}").random() >= LOST_RATIO  # noqa: S311 - not for secrets


def outside_outage(length: float) -> Keep:
    """Prometheus is away for ten minutes, across the full hour next to the middle where there is one."""
    middle = length // 7200 * 3600 or length / 2
    return lambda _node, at: abs(at - middle) > OUTAGE_SECONDS / 2


def percent(ratio: float | None) -> str:
    """Two or three digits that matter."""
    return "" if ratio is None else f"{100 * ratio:+.2f} %"


def table(case: str, rows: Sequence[Row]) -> Iterator[str]:
    """Lines of one case."""
    for row in rows:
        worst = "" if row.worst_pod_seconds is None else f"{row.worst_pod_seconds:+.1f} s"
        cells = (percent(row.total), percent(row.worst_namespace), percent(row.brief), percent(row.short), worst)
        yield f"| {case} | {row.way} | {' | '.join(cells)} | {percent(row.active)} |"


def foot(case: str, sums: Balance) -> str:
    """The ledger of a case beside the capacity."""
    apart = (sums.told - sums.capacity) / sums.capacity
    return (
        f"| {case} | {sums.capacity / 3600:.1f} | {100 * apart:+.4f} % | {sums.unknown:.0f} "
        f"| {sums.unattributed:.0f} | {100 * sums.unallocated_error / sums.capacity:+.4f} % |"
    )


def compare(nodes: Sequence[NodeDay], records: Sequence[NodeRecord], length: float) -> None:
    """Print the table: every case through its own Prometheus."""
    jobs = [job for node in nodes for job in node.jobs]
    clean = [one.clean for one in records]
    cases: dict[str, tuple[Sequence[Mapping[str, Samples]], Keep]] = {
        "clean": (clean, everything),
        "2 % of scrapes lost": (clean, not_lost),
        "agents restarted": ([one.restarted for one in records], everything),
        "Prometheus away 10 min": (clean, outside_outage(length)),
    }
    feet: list[str] = []
    print("\n| case | way to ask | all | worst namespace | pods < 60 s | pods < 5 min | worst pod | active |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for case, (recorded, keep) in cases.items():
        with TemporaryDirectory() as directory:
            text = Path(directory) / "samples"
            write_openmetrics(text, recorded, keep)
            with serving(text, Path(directory)) as server:
                rows = [score(told, jobs, length) for told in ask(server, jobs, length)]
                feet.append(foot(case, balance(server, nodes, length)))
        print("\n".join(table(case, rows)), flush=True)
    print("\n| case | capacity, GPU-h | sum of the ledger | unknown, GPU-s | Unattributed, GPU-s | Unallocated |")
    print("|---|---:|---:|---:|---:|---:|")
    print("\n".join(feet))


def main() -> int:
    """Replay and compare; 0 as well where the trace or Prometheus is missing, with a line that says so."""
    parser = argparse.ArgumentParser(description="Replay a day and compare GPU-seconds with the truth.")
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"), help="folder with the CSV files")
    parser.add_argument("--hours", type=int, default=24, help="length of the day (a short one for a test)")
    parser.add_argument("--gpus", type=int, default=64, help="free nodes are added until there are so many")
    parser.add_argument("--workers", type=int, default=2, help="nodes replayed at a time")
    arguments = parser.parse_args()
    path = arguments.traces / TRACE
    if not path.is_file():
        print(f"accuracy: skipped, {path} is not there (give the folder with --traces)")
        return 0
    if not (shutil.which("promtool") and shutil.which("prometheus")):
        print("accuracy: skipped, needs prometheus and promtool on the PATH (make install)")
        return 0
    pods, _ = read_pods(path)
    day = busiest_day(pods)
    nodes = nodes_of_day(pods, day, arguments.gpus)
    length = arguments.hours * 3600.0
    started = time.monotonic()
    with ProcessPoolExecutor(arguments.workers) as pool:
        records = list(pool.map(record, nodes, range(len(nodes)), [length] * len(nodes)))
    print("source: Alibaba cluster-trace-gpu-v2023 (CC BY 4.0)")
    print(
        f"day {day} of the trace: {sum(len(node.jobs) for node in nodes)} jobs on {len(nodes)} nodes with "
        f"{sum(node.gpu_count for node in nodes)} GPUs; {sum(one.samples for one in records)} samples of nodes, "
        f"replayed in {time.monotonic() - started:.0f} s"
    )
    print(f"conservation error of the worst ledger: {max(one.conservation_error_seconds for one in records):.1e} s")
    compare(nodes, records, length)
    print(f"\n{time.monotonic() - started:.0f} s in all")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
