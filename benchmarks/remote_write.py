"""A real Prometheus: remote writes, in which many series share one blob of samples, and queries."""

import http.client
import json
import struct
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import fleet_support

Points = list[tuple[float, float]]
"""Times and values."""
_BATCH_BYTES = 4 << 20
_LITERAL_OF_FOUR_LENGTH_BYTES = b"\xfc"
_LABELS, _SAMPLES, _SERIES = b"\x0a", b"\x12", b"\x0a"
_SAMPLE_HEAD = b"\x12\x10\x09"
"""Head of a sample: field 2 of a series, 16 bytes, and a double as its first field; current times take six bytes."""


@lru_cache(maxsize=4096)
def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits a byte, as protobuf has it
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def encode_labels(labels: Mapping[str, str]) -> bytes:
    """Encode the labels of a series, sorted by name as the receiver requires, without empty ones."""
    return b"".join(
        _field(_LABELS, _field(b"\x0a", name.encode()) + _field(b"\x12", value.encode()))
        for name, value in sorted(labels.items())
        if value
    )


def encode_samples(times_ms: Sequence[int], values: Iterable[float]) -> bytes:
    """Encode samples for any series: ascending Unix times in milliseconds, and their values."""
    return b"".join(
        _SAMPLE_HEAD + struct.pack("<d", value) + b"\x10" + _varint(at)
        for at, value in zip(times_ms, values, strict=True)
    )


class Sender:
    """One connection to a receiver; requests are a few MiB each."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=300)
        self._waiting: list[bytes] = []
        self._bytes = 0

    def add(self, labels: bytes, samples: bytes) -> None:
        """Add the samples of one series; both parts are encoded."""
        series = _field(_SERIES, labels + samples)
        self._waiting.append(series)
        self._bytes += len(series)
        if self._bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send the pending samples.

        Raises:
            RuntimeError: the receiver refuses them; the message has its answer.
        """
        if not self._waiting:
            return
        body = b"".join(self._waiting)
        # Snappy's format allows uncompressed blocks: one literal.
        block = _varint(len(body)) + _LITERAL_OF_FOUR_LENGTH_BYTES + struct.pack("<I", len(body) - 1) + body
        headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"}
        self._connection.request("POST", "/api/v1/write", block, headers)
        answer = self._connection.getresponse()
        text = answer.read().decode(errors="replace")
        if answer.status >= http.client.BAD_REQUEST:
            raise RuntimeError(f"remote write: {answer.status} {text[:500]}")
        self._waiting, self._bytes = [], 0

    def close(self) -> None:
        """Close the connection without sending the pending samples."""
        self._connection.close()


class Prometheus:
    """The HTTP API of a server on this machine; times are Unix seconds.

    Args:
        url: Without a slash at the end.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        """Return labels and values of an instant query."""
        when = {} if at is None else {"time": f"{at:.3f}"}
        rows = self._get("query", query=expression, timeout="10m", **when)["result"]
        return [(row["metric"], float(row["value"][1])) for row in rows]

    def by(self, expression: str, at: float | None = None) -> dict[str, float]:
        """Return the values of an instant query by the value of its only label."""
        return {next(iter(labels.values()), ""): value for labels, value in self.query(expression, at)}

    def range(self, expression: str, first: float, last: float, step: float) -> Iterator[tuple[dict[str, str], Points]]:
        """Yield labels, and times with values, of a range query."""
        times = {"start": f"{first:.3f}", "end": f"{last:.3f}", "step": f"{step:g}"}
        for row in self._get("query_range", query=expression, **times)["result"]:
            yield row["metric"], [(float(at), float(value)) for at, value in row["values"]]

    def groups(self) -> list[dict[str, Any]]:
        """Return the rule groups with their rules, as in ``/api/v1/rules``."""
        groups: list[dict[str, Any]] = self._get("rules")["groups"]
        return groups

    def own(self, *names: str) -> list[float]:
        """Return metrics of the server itself: for each, the sum over its series."""
        lines = self._ask("/metrics").decode().splitlines()
        return [
            sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))
            for name in names
        ]

    def reload(self) -> None:
        """Reload the configuration and the rules."""
        self._ask("/-/reload", b"")

    def collect_garbage(self) -> None:
        """Run a garbage collection to its end."""
        self._ask("/debug/pprof/heap?gc=1")

    def _get(self, path: str, **query: str) -> dict[str, Any]:
        body = urllib.parse.urlencode(query).encode() if query else None
        data: dict[str, Any] = json.loads(self._ask(f"/api/v1/{path}", body))["data"]
        return data

    def _ask(self, path: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(self.url + path, data=body, timeout=660) as answer:  # noqa: S310 - http
            return bytes(answer.read())


make_blocks = fleet_support.backfill


@contextmanager
def serving(data: Path, config: str, *options: str, program: str = "prometheus") -> Iterator[Prometheus]:
    """Run a Prometheus that accepts past samples on a folder; its log and configuration are next to the folder."""
    receiver = "--web.enable-remote-write-receiver"
    with fleet_support.engine(data.parent, data, receiver, *options, program=program, config=config) as (url, _):
        yield Prometheus(url)
