"""Which hours were recorded, by how many, and what capacity was metered in them."""

from collections.abc import Mapping, Sequence
from typing import Any

from exporter.errors import PrometheusError
from exporter.report.fleet import queries
from exporter.report.fleet.asking import Asking, Block, Rows
from exporter.report.fleet.values import MOST_FIGURE, Window


class Recorded:
    """Recorded hours and metered GPU-seconds by chunk and cluster.

    Args:
        windows: The chunks.
        cluster_label: Tells clusters apart.
    """

    def __init__(self, windows: Sequence[Window], cluster_label: str) -> None:
        self._windows = windows
        self._label = cluster_label
        self._hours: list[dict[str, int]] = [{} for _ in windows]
        self._capacity: list[dict[str, float]] = [{} for _ in windows]
        self._twice: set[Block] = set()
        self._differing: set[str] = set()

    async def read(self, asking: Asking, blocks: Sequence[Block]) -> None:
        """Ask which hours were recorded; the other questions depend on whether several recorded them.

        Raises:
            PrometheusError: None of it can be answered.
        """
        answered = [await self._read_block(asking, block) for block in blocks]
        if not any(answered):
            raise asking.last_error or PrometheusError("server_error", "no question was answered")

    async def _read_block(self, asking: Asking, block: Block) -> bool:
        by_series: dict[tuple[int, str], list[dict[str, str]]] = {}

        def take(rows: Rows) -> None:
            for chunk, metric, value in self._values(rows, block):
                cluster = metric.get(self._label, "")
                by_series.setdefault((chunk, cluster), []).append(metric)
                self._hours[chunk][cluster] = min(int(value), self._windows[chunk].hours)

        if not await asking.ask(block, queries.RECORDED, queries.recorded_hours, take):
            # Not knowing is answered with the dearer questions, which are right in either case.
            self._twice.add(block)
            return False
        several = [metrics for metrics in by_series.values() if len(metrics) > 1]
        if several:
            self._twice.add(block)
            self._differing |= {name for metrics in several for name in _differing(metrics)}

            def take_once(rows: Rows) -> None:
                for chunk, metric, value in self._values(rows, block):
                    self._hours[chunk][metric.get(self._label, "")] = min(int(value), self._windows[chunk].hours)

            await asking.ask_more(
                block, queries.RECORDED, lambda span: queries.recorded_hours_once(self._label, span), take_once
            )
        return True

    def add_capacity(self, rows: Rows, block: Block) -> None:
        """Take the rows of ``queries.capacity``."""
        for chunk, metric, value in self._values(rows, block):
            cluster, seconds = metric.get(self._label, ""), self._capacity[chunk]
            seconds[cluster] = seconds.get(cluster, 0.0) + value

    def _values(self, rows: Rows, block: Block) -> list[tuple[int, dict[str, Any], float]]:
        ends = {queries.asked_at(self._windows[chunk]): chunk for chunk in block}
        found = [
            (ends[int(moment)], row["metric"], float(value))
            for row in rows
            for moment, value in (row["values"] if "values" in row else (row["value"],))
        ]
        "".join(text for _, metric, _ in found for text in metric.values())
        return [one for one in found if 0 <= one[2] <= MOST_FIGURE]

    def is_twice(self, block: Block) -> bool:
        """Whether several Prometheis may have recorded the same."""
        return block in self._twice

    @property
    def apart(self) -> tuple[str, ...]:
        """Labels that tell several Prometheis apart."""
        return tuple(sorted(self._differing))

    def hours(self, chunk: int) -> Mapping[str, int]:
        """By cluster."""
        return self._hours[chunk]

    def capacity(self, chunk: int) -> Mapping[str, float]:
        """GPU-seconds by cluster."""
        return self._capacity[chunk]

    @property
    def clusters(self) -> set[str]:
        """All that recorded something."""
        return {cluster for hours in self._hours for cluster in hours}

    def notes(self) -> list[str]:
        """What a reader must know of who recorded."""
        if not self._differing:
            return []
        names = ", ".join(sorted(self._differing)) or "no label"
        note = (
            f"Several Prometheis have recorded the same hours (told apart by {names}): of each hour the largest value"
            " counts. If these are several clusters, give the label that tells them apart by --cluster-label"
        )
        return [note]


def _differing(metrics: Sequence[Mapping[str, str]]) -> set[str]:
    """Labels whose values differ between the series."""
    names = {name for metric in metrics for name in metric}
    return {name for name in names if len({metric.get(name, "") for metric in metrics}) > 1}
