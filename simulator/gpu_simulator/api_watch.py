"""One watch of a simulated API server, from its first event to its end."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from aiohttp import web

from gpu_simulator import api_answers
from gpu_simulator.api_store import Change, Store
from gpu_simulator.truth import Fault

_HALF_A_LINE = b'{"type":"MODIFIED","object":{"kind":"Pod","metadata":{"na'


@dataclass(slots=True, kw_only=True)
class Watch:
    """What a client asked for, and how far it has been served."""

    resource: str
    wanted: api_answers.Selector
    version: int
    """Of the last change sent; 0 begins with all objects that there are."""
    metadata_only: bool
    bookmark_seconds: float | None
    """``None``: no bookmarks."""
    lifetime_seconds: float
    has_news: bool = False
    """Whether an object of the resource has changed since the last bookmark: without that a server sends none."""

    async def serve(
        self,
        stream: web.StreamResponse,
        store: Store,
        faults: Callable[[], Mapping[Fault, float]],
        ticked: asyncio.Condition,
    ) -> None:
        """Write events until the watch's time is up or a fault ends it."""
        clock = asyncio.get_running_loop().time
        ends_at = clock() + self.lifetime_seconds
        bookmark_at = clock() + (self.bookmark_seconds or 0.0)
        for line in self._first(store):
            await stream.write(line)
        while clock() < ends_at:
            now = faults()
            if Fault.API_CUT in now:
                await stream.write(_HALF_A_LINE)
                return
            if Fault.API_GONE in now or self.version < store.oldest:
                await stream.write(api_answers.line("ERROR", api_answers.expired(self.version, store.oldest)))
                return
            if Fault.API_SILENT not in now:
                for line in self._news(store):
                    await stream.write(line)
                if self.bookmark_seconds is not None and clock() >= bookmark_at and self.has_news:
                    bookmark_at, self.has_news = clock() + self.bookmark_seconds, False
                    await stream.write(
                        api_answers.bookmark(self.resource, self.version, metadata_only=self.metadata_only)
                    )
            async with ticked:
                await ticked.wait()

    def _first(self, store: Store) -> Iterator[bytes]:
        if self.version:
            return
        self.version = store.version
        for shown in store.list(self.resource):
            first = Change(version=store.version, resource=self.resource, before=None, after=shown)
            if line := api_answers.event(first, self.wanted, metadata_only=self.metadata_only):
                yield line

    def _news(self, store: Store) -> Iterator[bytes]:
        for change in tuple(store.changes(self.resource, self.version)):
            self.has_news = True
            if line := api_answers.event(change, self.wanted, metadata_only=self.metadata_only):
                yield line
        self.version = store.version
