"""Sends long answers in pieces, so that a client that takes nothing holds a piece of memory and no copy of the page."""

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload

PIECE_BYTES = 65_536


def in_pieces(response: web.Response) -> None:
    """Have a long body of bytes sent in pieces; it is the same body, with the same headers."""
    if isinstance(response.body, bytes) and len(response.body) > PIECE_BYTES:
        response.body = _Pieces(response.body, response.headers.get(hdrs.CONTENT_TYPE, "application/octet-stream"))


class _Pieces(Payload):
    """Bytes that are shared by all who are sent them."""

    def __init__(self, body: bytes, content_type: str) -> None:
        super().__init__(body, content_type=content_type)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        body: bytes = self._value
        return body.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        view = memoryview(self._value)
        for start in range(0, len(view), PIECE_BYTES):
            await writer.write(view[start : start + PIECE_BYTES])
            await writer.drain()
