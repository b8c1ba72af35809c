"""Reports as they were written last: many who ask for the same one cost one writing."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable

from exporter.report.fleet.report import FleetReport

MOST_BYTES = 64 << 20


class Bodies:
    """Keeps what was written of reports that are shown. For one event loop."""

    def __init__(self) -> None:
        # The report is kept beside what was made of it, so that no other one can come to have its identity.
        self._kept: OrderedDict[tuple[int, Hashable], tuple[FleetReport, bytes]] = OrderedDict()
        self._bytes = 0

    async def get(self, report: FleetReport, form: Hashable, write: Callable[[], bytes]) -> bytes:
        """The report in a form; ``write`` makes it, in a thread, where it is not kept."""
        key = (id(report), form)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key][1]
        body = await asyncio.to_thread(write)
        if key not in self._kept and len(body) <= MOST_BYTES:
            self._kept[key] = (report, body)
            self._bytes += len(body)
        while self._bytes > MOST_BYTES:
            _, (_, gone) = self._kept.popitem(last=False)
            self._bytes -= len(gone)
        return body
