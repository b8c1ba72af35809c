"""Answers of the service: headers that every one has, compression, and what has not changed is not sent again."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import hdrs, web

from exporter.exposition.compression import accepts_gzip, gzipped

JSON, TEXT, HTML = "application/json", "text/plain; charset=utf-8", "text/html; charset=utf-8"
_IN_THREAD_BYTES = 100_000
_OF_A_REPORT = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
"""For HTML that brings no policy of its own: a report to be saved, which has its styles in it and no script."""

ErrorPage = Callable[[web.Request, int, str, str], Awaitable[web.Response]]
"""From request, status, what is wrong and how to mend it to a page for people."""
ERROR_PAGE: web.AppKey[ErrorPage] = web.AppKey("ERROR_PAGE")
"""Set by what adds pages: answers errors of paths that are none of the API's, to those who accept HTML."""


def json_bytes(document: object) -> bytes:
    """A document as compact UTF-8; bad Unicode is replaced, so that one odd name cannot cost the answer.

    Raises:
        ValueError: It has a value that is no number; JSON has none for it.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


async def respond(
    request: web.Request,
    body: bytes,
    content_type: str,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    cache: str = "private, no-cache",
) -> web.Response:
    """An answer with the headers of all: no sniffing, no referrer, an ETag where it went well.

    Args:
        request: What is answered: says whether it takes gzip, and what it has already.
        body: Uncompressed.
        content_type: With its charset.
        status: HTTP status; an answer that is no 200 is not to be kept by anybody.
        headers: More of them; they win.
        cache: ``Cache-Control`` of a 200: by default it may be kept by a browser, which must ask again.
    """
    fields = {
        hdrs.CONTENT_TYPE: content_type,
        hdrs.CACHE_CONTROL: cache if status == web.HTTPOk.status_code else "no-store",
        hdrs.VARY: "Accept, Accept-Encoding",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "SAMEORIGIN",
        "Referrer-Policy": "no-referrer",
        hdrs.SERVER: "gpu-cost-exporter",
        **(headers or {}),
    }
    if content_type == HTML:
        fields.setdefault("Content-Security-Policy", _OF_A_REPORT)
    if status == web.HTTPOk.status_code and hdrs.ETAG not in fields:
        fields[hdrs.ETAG] = f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        if _has_already(request, fields[hdrs.ETAG]):
            del fields[hdrs.CONTENT_TYPE]
            return web.Response(status=web.HTTPNotModified.status_code, headers=fields)
    if accepts_gzip(request.headers.get(hdrs.ACCEPT_ENCODING, "")):
        large = len(body) > _IN_THREAD_BYTES
        packed = await asyncio.to_thread(gzipped, body) if large else gzipped(body)
        if packed is not None:
            body = packed
            fields[hdrs.CONTENT_ENCODING] = "gzip"
    return web.Response(body=body, status=status, headers=fields)


def _has_already(request: web.Request, etag: str) -> bool:
    """Whether the client names this ETag; the strength of a comparison does not matter for GET."""
    known = request.headers.get(hdrs.IF_NONE_MATCH, "")
    return known.strip() == "*" or etag.removeprefix("W/") in {
        one.strip().removeprefix("W/") for one in known.split(",")
    }
