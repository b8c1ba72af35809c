"""Rendered pages, kept per snapshot and format, so that many scrapes cost one rendering."""

import gzip
from collections.abc import Callable

from exporter.exposition import text
from exporter.exposition.builder import Dropped
from exporter.exposition.collector import ExpositionOptions, build
from exporter.exposition.family import Family
from exporter.exposition.process import ProcessMetrics
from exporter.model import Snapshot

_GZIP_LEVEL = 1  # a page shrinks to a twentieth at level 1; higher levels cost more time than they save bytes


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
        self._families: list[Family] = []
        self._pages: dict[tuple[bool, bool], bytes] = {}

    def metrics(self, snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
        """Body and content type for an ``Accept`` header."""
        return self._page(snapshot, accept, packed=False)

    def gzipped(self, snapshot: Snapshot, accept: str = "") -> tuple[bytes, str]:
        """The same, gzipped, for who accepts that encoding."""
        return self._page(snapshot, accept, packed=True)

    def _page(self, snapshot: Snapshot, accept: str, *, packed: bool) -> tuple[bytes, str]:
        openmetrics = text.negotiate(accept)
        content_type = text.OPENMETRICS if openmetrics else text.PLAIN
        if snapshot is not self._snapshot:
            families, self._dropped = build(snapshot, self._options, self._dropped)
            self._families = [*families, *self._process_families()]
            self._snapshot = snapshot
            self._pages.clear()
        body = self._pages.get((openmetrics, packed))
        if body is None:
            plain = self._pages.get((openmetrics, False))
            if plain is None:
                plain = text.render(self._families, openmetrics=openmetrics)
                self._pages[openmetrics, False] = plain
            body = gzip.compress(plain, _GZIP_LEVEL, mtime=0) if packed else plain
            self._pages[openmetrics, packed] = body
        return body, content_type
