"""Where a fleet's ledger can be read: one question that Prometheus and the store of closed days both answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from exporter.report.fleet.values import Dimension, Filters, FleetLedger, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a long reading is."""

    done: int
    total: int
    """Questions, retries not counted."""


class LedgerSource(Protocol):
    """Reads the ledger over a window."""

    async def ledger(
        self,
        window: Window,
        dimensions: frozenset[Dimension],
        filters: Filters | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> FleetLedger:
        """The ledger, a chunk per UTC day, summed over every dimension that is not asked for.

        ``kind`` stays apart for Unallocated and Unattributed even where it is not asked for. Filters hold for the
        lines, not for capacity. What cannot be read after retries is in ``failures``; it is never left out silently.

        Raises:
            PrometheusError: Nothing can be read at all: wrong address, no access, no such server.
            StoreError: The store is damaged or not to be opened.
        """
        ...
