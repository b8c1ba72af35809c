"""Addresses of the demonstration for people: the page where the program has one, else its API."""

from collections.abc import Sequence

import aiohttp

_OF_PROMETHEUS = (
    ("Prometheus", ("graph?{query}", "classic/graph?{query}", "api/v1/query?query=gpu_pod_idle_for_seconds")),
    ("alerts", ("alerts", "classic/alerts", "api/v1/alerts")),
)
_QUERY = "g0.expr=gpu_pod_idle_for_seconds&g0.tab=1"
_OF_ALERTMANAGER = (("Alertmanager", ("", "api/v2/alerts")),)
_SECONDS = 5.0


async def links(prometheus: str, alertmanager: str) -> Sequence[tuple[str, str]]:
    """What to show people, and where: of each the first address that answers, as some packages come without pages.

    Args:
        prometheus: Its address, with a slash at the end.
        alertmanager: The same.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_SECONDS)) as session:
        return [
            (name, await _first(session, [base + path.format(query=_QUERY) for path in paths]))
            for base, told in ((prometheus, _OF_PROMETHEUS), (alertmanager, _OF_ALERTMANAGER))
            for name, paths in told
        ]


async def _first(session: aiohttp.ClientSession, urls: Sequence[str]) -> str:
    for url in urls[:-1]:
        try:
            async with session.get(url) as response:
                if response.ok:
                    return url
        except (aiohttp.ClientError, TimeoutError):
            continue
    return urls[-1]
