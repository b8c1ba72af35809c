"""Reports as they were written last: many who ask for the same one cost one writing."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable
from weakref import ref

from exporter.report.fleet.report import FleetReport

MOST_BYTES = 64 << 20


class Bodies:
    """Keeps what was written of reports, as long as somebody else keeps the report. For one event loop."""

    def __init__(self) -> None:
        # Weakly: a page of ten lines must not keep a report of 20,000 in memory.
        self._kept: OrderedDict[tuple[int, Hashable], tuple[ref[FleetReport], bytes]] = OrderedDict()
        self._bytes = 0

    async def get(self, report: FleetReport, form: Hashable, write: Callable[[], bytes]) -> bytes:
        """The report in a form; ``write`` makes it, in a thread, where it is not kept."""
        key = (id(report), form)
        kept = self._kept.get(key)
        if kept is not None and kept[0]() is report:
            self._kept.move_to_end(key)
            return kept[1]
        body = await asyncio.to_thread(write)
        self._drop([one for one, (of, _) in self._kept.items() if of() is None or one == key])
        if len(body) <= MOST_BYTES:
            self._kept[key] = (ref(report), body)
            self._bytes += len(body)
        while self._bytes > MOST_BYTES:
            self._drop([next(iter(self._kept))])
        return body

    def _drop(self, keys: list[tuple[int, Hashable]]) -> None:
        for key in keys:
            self._bytes -= len(self._kept.pop(key)[1])
