"""A short piece of ``accuracy.py``: hours of the real trace on a few nodes, the clean case alone."""

import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from accuracy import cases, judge
from accuracy_agent import record
from accuracy_day import busiest_day, nodes_of_day
from accuracy_score import RECORDED
from trace_replay import TRACE, read_pods

HOURS, GPUS, WORKERS = 1, 16, 2
TRACES = Path(__file__).resolve().parents[2] / "shared" / "traces"
MISSING = "not measured: needs the trace beside the repository, prometheus and promtool; see make bench-accuracy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Relative error of the ledger as recorded, and what it lost of the time that passed."""

    total_ratio: float
    conservation_ratio: float


def run() -> Found | None:
    """Replay and compare; ``None`` where something is missing for it."""
    path = TRACES / TRACE
    if not (path.is_file() and shutil.which("promtool") and shutil.which("prometheus")):
        return None
    pods, _ = read_pods(path)
    nodes = nodes_of_day(pods, busiest_day(pods), GPUS)
    length = HOURS * 3600.0
    with ProcessPoolExecutor(WORKERS) as pool:
        records = list(pool.map(record, nodes, range(len(nodes)), [length] * len(nodes)))
    found = judge(cases(records, length)["clean"], nodes, length, 0)
    lost = (
        one.conservation_error_seconds / (node.gpu_count * length) for node, one in zip(nodes, records, strict=True)
    )
    return Found(
        total_ratio=next(row.total for row in found.rows if row.way == RECORDED),
        conservation_ratio=max(lost),
    )
