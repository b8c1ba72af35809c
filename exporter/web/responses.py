"""Makes and compresses the bodies of responses once for all clients, and returns the responses with them."""

import asyncio
import json
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from weakref import ref

from aiohttp import hdrs, web

KEPT_BYTES = 64 << 20
VARY = "Accept, Accept-Encoding"
_WORTH_BYTES = 1024
_MEMORY = 7  # The table fits in the processor's cache: the same size of output, 5 % faster.
_GZIP = zlib.MAX_WBITS + 16  # with a gzip header, without a time
_LEVEL = 1  # The text repeats itself: higher levels take several times longer and save a few per cent.


class Body:
    """Body of a response; it is compressed when the first client accepts gzip.

    Args:
        plain: Uncompressed body.
        content_type: Media type with the charset.
        filename: Name under which browsers save the body; empty if they show it.
    """

    __slots__ = ("_packed", "content_type", "filename", "plain")

    def __init__(self, plain: bytes, content_type: str, filename: str = "") -> None:
        self.plain = plain
        self._packed: bytes | None = None
        self.content_type = content_type
        self.filename = filename

    def packed(self) -> bytes | None:
        """Return the body in gzip, the same bytes object each time; ``None`` if it is too short to compress."""
        if self._packed is None and len(self.plain) >= _WORTH_BYTES:
            packer = zlib.compressobj(_LEVEL, wbits=_GZIP, memLevel=_MEMORY)
            self._packed = packer.compress(self.plain) + packer.flush()
        return self._packed


def json_body(document: object) -> Body:
    """Return a document as compact JSON in UTF-8. Invalid Unicode is replaced, so one invalid name causes no error.

    Dataclasses become objects.

    Raises:
        ValueError: The document has NaN or infinity, which JSON cannot express.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=asdict)
    return Body(text.encode("utf-8", "replace"), "application/json")


class Bodies:
    """Caches bodies by the object that they show, while that object exists; the oldest are dropped. One event loop."""

    def __init__(self) -> None:
        # Weak references: a short page must not keep a report of 20,000 lines in memory.
        self._kept: OrderedDict[tuple[int, Hashable], tuple[ref[object], Body]] = OrderedDict()
        self._bytes = 0

    def of(self, shown: object, form: Hashable, make: Callable[[], Body]) -> Body:
        """Return the body that shows an object in a form; ``make`` is called the first time."""
        return self._find(shown, form) or self._keep(shown, form, make())

    async def of_thread(self, shown: object, form: Hashable, make: Callable[[], Body]) -> Body:
        """Do the same as ``of``, with ``make`` in a thread."""
        return self._find(shown, form) or self._keep(shown, form, await asyncio.to_thread(make))

    def _find(self, shown: object, form: Hashable) -> Body | None:
        key = (id(shown), form)
        kept = self._kept.get(key)
        if kept is None or kept[0]() is not shown:
            return None
        self._kept.move_to_end(key)
        return kept[1]

    def _keep(self, shown: object, form: Hashable, body: Body) -> Body:
        key = (id(shown), form)
        self._drop([one for one, (of, _) in self._kept.items() if of() is None or one == key])
        if shown is not None and len(body.plain) <= KEPT_BYTES:
            self._kept[key] = (ref(shown), body)
            self._bytes += len(body.plain)
        while self._bytes > KEPT_BYTES:
            self._drop([next(iter(self._kept))])
        return body

    def _drop(self, keys: list[tuple[int, Hashable]]) -> None:
        for key in keys:
            self._bytes -= len(self._kept.pop(key)[1].plain)


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether an Accept-Encoding header names gzip (or anything) with a weight above 0."""
    weights: dict[str, bool] = {}
    for item in accept_encoding.split(","):
        coding, *parameters = item.split(";")
        weights[coding.strip().lower()] = not any(_is_zero(parameter) for parameter in parameters)
    return weights.get("gzip", weights.get("*", False))


def _is_zero(parameter: str) -> bool:
    name, _, value = parameter.partition("=")
    return name.strip().lower() == "q" and value.strip().rstrip("0").rstrip(".") in {"", "0"}


def response_of(
    request: web.Request, body: Body, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """Return the response with a body, in gzip if the client accepts it; the server adds its own headers."""
    fields = {hdrs.CONTENT_TYPE: body.content_type, hdrs.VARY: VARY, **(headers or {})}
    packed = body.packed() if accepts_gzip(request.headers.get(hdrs.ACCEPT_ENCODING, "")) else None
    if packed is None:
        return web.Response(body=body.plain, status=status, headers=fields)
    return web.Response(body=packed, status=status, headers={**fields, hdrs.CONTENT_ENCODING: "gzip"})
