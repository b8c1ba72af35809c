"""Recorded samples in a real Prometheus: promtool makes the blocks, the server answers PromQL."""

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import remote_write

if TYPE_CHECKING:
    from array import array

OPENS_AT = 1_767_225_600
"""Unix time of the replayed day's start: 2026-01-01 00:00 UTC."""

Samples: TypeAlias = "tuple[array[float], array[float]]"
"""Times (seconds since the day's start) and values of one series."""


def write_openmetrics(path: Path, recorded: Iterable[Mapping[str, Samples]], keep: Callable[[str, float], bool]) -> int:
    """Write the samples that ``keep(node, time)`` lets through; return how many."""
    count = 0
    with path.open("w", encoding="ascii") as file:
        for series in recorded:
            for name, (times, values) in series.items():
                node = name.partition('node="')[2].partition('"')[0]
                lines = [
                    f"{name} {value!r} {OPENS_AT + at:.3f}\n"
                    for at, value in zip(times, values, strict=True)
                    if keep(node, at)
                ]
                count += len(lines)
                file.writelines(lines)
        file.write("# EOF\n")
    return count


class Server:
    """A Prometheus on a folder of blocks."""

    def __init__(self, port: int) -> None:
        self.port = port

    def query(self, expression: str, at: float) -> dict[tuple[str, ...], float]:
        """Values of an instant query by label values, in order of label name; ``at`` counts from the day's start."""
        return {_key(labels): value for labels, value in self.rows(expression, at)}

    def rows(self, expression: str, at: float) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and values of an instant query."""
        for row in self._ask("query", query=expression, time=str(OPENS_AT + at)):
            yield row["metric"], float(row["value"][1])

    def range(
        self, expression: str, first: float, last: float, step: float
    ) -> Iterator[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Labels, and Unix times with values, of a range query."""
        times = {"start": f"{OPENS_AT + first:.3f}", "end": f"{OPENS_AT + last:.3f}", "step": f"{step:g}"}
        for row in self._ask("query_range", query=expression, **times):
            yield row["metric"], [(float(at), float(value)) for at, value in row["values"]]

    def hourly_sum(self, expression: str, hours: int) -> dict[tuple[str, ...], float]:
        """Sum of a query over the full hours of the day."""
        rows = self.range(expression, 3600.0, 3600.0 * hours, 3600.0)
        return {_key(labels): sum(value for _, value in values) for labels, values in rows}

    def newest(self, series: str, at: float) -> float:
        """When the newest sample of the last five minutes was taken, of all series of a name.

        Raises:
            ValueError: There is none.
        """
        rows = self._ask("query", query=f"{series}[5m]", time=str(OPENS_AT + at))
        return max(float(time) for row in rows for time, _ in row["values"]) - OPENS_AT

    def _ask(self, path: str, **query: str) -> list[dict[str, Any]]:
        body = urllib.parse.urlencode(query).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", data=body, timeout=120) as answer:
            rows: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return rows


def _key(labels: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(value for name, value in sorted(labels.items()) if name != "__name__")


def make_blocks(text: Path, data: Path) -> None:
    """Make blocks of samples.

    Raises:
        RuntimeError: promtool fails; its words are in the message.
    """
    command = ["promtool", "tsdb", "create-blocks-from", "--max-block-duration=768h", "openmetrics", text, data]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise RuntimeError(f"promtool: {made.stderr[-500:]}")


@contextmanager
def serving(data: Path) -> Iterator[Server]:
    """Serve a folder of blocks until the context ends.

    Raises:
        RuntimeError: Prometheus fails; its words are in the message.
    """
    config = "storage: {tsdb: {out_of_order_time_window: 1000d}}\n"  # rules record older samples
    with remote_write.serving(data, config, "--storage.tsdb.retention.time=100y") as port:
        yield Server(port)
