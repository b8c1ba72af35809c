"""Raw HTTP and openssl's own client, for tests that are not as polite as a library would be."""

import asyncio
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Raw:
    """An answer as it came."""

    status: int
    headers: tuple[tuple[str, str], ...]
    """Names in small letters; one that came twice is here twice."""
    body: bytes

    def values(self, name: str) -> list[str]:
        """All values of a header."""
        return [value for key, value in self.headers if key == name]


async def raw(port: int, request: bytes) -> Raw:
    """Send bytes to a port of this host and read until it closes the connection; status 0 is no answer at all."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        await writer.drain()
        async with asyncio.timeout(30):
            answer = await reader.read()
    except ConnectionResetError:
        answer = b""
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    pairs = tuple((name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines))
    return Raw(int(words[1]) if len(words) > 1 else 0, pairs, body)


def ask(path: str, method: str = "GET", **headers: str) -> bytes:
    """A request as bytes, its path as it stands; underscores of header names are hyphens."""
    sent = {"Host": "localhost", "Connection": "close"} | {key.replace("_", "-"): of for key, of in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode()


def openssl(*arguments: str, folder: Path, said: str = "") -> str:
    """What openssl says to these arguments, whether it ends well or not."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl on the PATH: make install")
    done = subprocess.run(
        [program, *arguments], cwd=folder, input=said, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr
