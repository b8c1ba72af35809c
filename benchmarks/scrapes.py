"""Scrapes of an exporter over a fresh connection each, as short-lived clients make them; same for every exporter."""

import http.client
import math
import time
from dataclasses import dataclass

TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One answered scrape; ``size_bytes`` is what went over the wire."""

    seconds: float
    size_bytes: int
    body: bytes


def scrape(port: int, *, gzip: bool = False) -> Scrape:
    """Ask for ``/metrics`` on this machine.

    Raises:
        OSError: nobody listens, or the answer is late.
        RuntimeError: the answer is not 200.
    """
    headers = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "gzip" if gzip else "identity"}
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/metrics", headers=headers)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise RuntimeError(f"/metrics on port {port} answered {response.status}")
    return Scrape(seconds=time.perf_counter() - started, size_bytes=len(body), body=body)


def many(port: int, *, count: int, pause_seconds: float, gzip: bool = False) -> tuple[float, ...]:
    """Scrape ``count`` times with a pause after each; return the latencies in seconds."""
    latencies = []
    for _ in range(count):
        latencies.append(scrape(port, gzip=gzip).seconds)
        time.sleep(pause_seconds)
    return tuple(latencies)


def percentile(values: tuple[float, ...], percent: float) -> float:
    """Return the smallest value that ``percent`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
