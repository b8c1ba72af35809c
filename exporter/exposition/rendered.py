"""The body of /metrics, rendered once per snapshot and format, so that many scrapes cost one rendering."""

from collections.abc import Callable

from exporter.exposition import text
from exporter.exposition.builder import Dropped
from exporter.exposition.collector import ExpositionOptions, build
from exporter.exposition.family import Family, forget_unused
from exporter.exposition.process import ProcessMetrics
from exporter.exposition.responses import Bodies, Body
from exporter.exposition.tenants import exported_labels
from exporter.exposition.text import Block
from exporter.model import Snapshot

_TURN_PAGES = 20
"""Label sets that so many pages did without are forgotten; looking all of them over costs a page half a millisecond."""


class Renderer:
    """Renders snapshots and counts what it had to leave out. Not for several threads.

    Args:
        options: How snapshots are shown.
        process_families: Gives the process metrics; tests pass ``list`` for a page without them.
    """

    def __init__(self, options: ExpositionOptions, process_families: Callable[[], list[Family]] | None = None) -> None:
        self._options = options
        self._process_families = process_families or ProcessMetrics().families
        self._dropped = Dropped()
        self._snapshot: Snapshot | None = None
        self._blocks: dict[str, Block] = {}
        self._built = 0
        self._bodies = Bodies()

    def metrics(self, snapshot: Snapshot, accept: str = "") -> Body:
        """The page for an ``Accept`` header; the same body until the next snapshot."""
        openmetrics = text.negotiate(accept)
        return self._bodies.of(snapshot, openmetrics, lambda: self._body(snapshot, openmetrics=openmetrics))

    def _body(self, snapshot: Snapshot, *, openmetrics: bool) -> Body:
        if snapshot is not self._snapshot:
            self._build(snapshot)
        page = text.page(self._blocks.values(), openmetrics=openmetrics)
        return Body(page, text.OPENMETRICS if openmetrics else text.PLAIN)

    def _build(self, snapshot: Snapshot) -> None:
        self._built += 1
        if self._built % _TURN_PAGES == 0:
            forget_unused()
            exported_labels.cache_clear()
        families, self._dropped = build(snapshot, self._options, self._dropped)
        before, self._blocks = self._blocks, {}
        for family in (*families, *self._process_families()):
            block = before.get(family.name)
            if block is None:
                block = Block(family)
            else:
                block.show(family)
            self._blocks[family.name] = block
        self._snapshot = snapshot
