"""A real Prometheus, and samples into it over remote write, encoded so that one blob of samples serves many series."""

import http.client
import socket
import struct
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS, END_SECONDS = 60.0, 120.0
_BATCH_BYTES = 4 << 20
_LITERAL_OF_FOUR_LENGTH_BYTES = b"\xfc"
_LABELS, _SAMPLES, _SERIES = b"\x0a", b"\x12", b"\x0a"
_SAMPLE_HEAD = b"\x12\x10\x09"
"""Field 2 of a series, 16 bytes long, whose first field is a double: times of this century have six bytes."""


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:  # noqa: PLR2004 - seven bits a byte, as protobuf has it
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def encode_labels(labels: Mapping[str, str]) -> bytes:
    """The labels of a series, in order of their names as the receiver wants them; empty ones are left out."""
    return b"".join(
        _field(_LABELS, _field(b"\x0a", name.encode()) + _field(b"\x12", value.encode()))
        for name, value in sorted(labels.items())
        if value
    )


def encode_samples(times_ms: Sequence[int], values: Iterable[float]) -> bytes:
    """Samples of any series: Unix times in milliseconds, rising, and their values."""
    return b"".join(
        _SAMPLE_HEAD + struct.pack("<d", value) + b"\x10" + _varint(at)
        for at, value in zip(times_ms, values, strict=True)
    )


class Sender:
    """One connection to a receiver; requests are a few MiB each."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        self._waiting: list[bytes] = []
        self._bytes = 0

    def add(self, labels: bytes, samples: bytes) -> None:
        """Take the samples of one series, both parts encoded."""
        series = _field(_SERIES, labels + samples)
        self._waiting.append(series)
        self._bytes += len(series)
        if self._bytes >= _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Send what waits.

        Raises:
            RuntimeError: the receiver refuses it; its words are in the message.
        """
        if not self._waiting:
            return
        body = b"".join(self._waiting)
        # Snappy's format allows blocks that are not compressed: one literal.
        block = _varint(len(body)) + _LITERAL_OF_FOUR_LENGTH_BYTES + struct.pack("<I", len(body) - 1) + body
        headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"}
        self._connection.request("POST", "/api/v1/write", block, headers)
        answer = self._connection.getresponse()
        text = answer.read().decode(errors="replace")
        if answer.status >= http.client.BAD_REQUEST:
            raise RuntimeError(f"remote write: {answer.status} {text[:500]}")
        self._waiting, self._bytes = [], 0

    def close(self) -> None:
        """Close the connection; what waits is not sent."""
        self._connection.close()


@contextmanager
def serving(data: Path, config: str, *flags: str, program: str = "prometheus") -> Iterator[int]:
    """Run a Prometheus on the folder ``data``, with its log and configuration next to it, and yield its port.

    Raises:
        RuntimeError: It does not start; the end of its log is in the message.
    """
    file, log = data.with_name("prometheus.yml"), data.with_name("log")
    file.write_text(config, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [program, f"--config.file={file}", f"--storage.tsdb.path={data}", "--web.enable-remote-write-receiver"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{port}", *flags], stdout=output, stderr=output
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _is_ready(port):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"{program} does not start: {log.read_text()[-500:]}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(timeout=END_SECONDS)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5):
            return True
    except OSError:
        return False
