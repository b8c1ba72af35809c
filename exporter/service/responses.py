"""Answers of the service: headers, ETags, JSON, and errors as the API reports them."""

import asyncio
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Annotated, Any

from aiohttp import hdrs, web

from exporter.web.responses import VARY, Body, accepts_gzip, response_of

TEXT, HTML = "text/plain; charset=utf-8", "text/html; charset=utf-8"
RETRY_AFTER_SECONDS = 15
_IN_THREAD_BYTES = 100_000
_WHERE = re.compile(r"(?P<where>[^\s:;]+(?: \(from [^)]*\))?): (?P<rest>.+)", re.DOTALL)
_OF_A_REPORT = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
"""For HTML that brings no policy of its own: a report to be saved, which has its styles in it and no script."""


async def respond(
    request: web.Request,
    body: Body,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Return an answer with an ETag if its status is 200, or a 304 where the client has it already.

    A browser may keep an answer whose status is 200, and must ask again.

    Args:
        request: Says whether the client accepts gzip, and what it has.
        body: Shared by all clients.
        status: HTTP status; an answer that is no 200 is kept by no cache.
        headers: More of them; they win.
    """
    fields = dict(headers or {})
    if body.content_type == HTML:
        fields.setdefault("Content-Security-Policy", _OF_A_REPORT)
    if status == web.HTTPServiceUnavailable.status_code:
        fields[hdrs.RETRY_AFTER] = str(RETRY_AFTER_SECONDS)
    if body.filename:
        fields[hdrs.CONTENT_DISPOSITION] = f'attachment; filename="{body.filename}"'
    if status == web.HTTPOk.status_code:
        fields[hdrs.CACHE_CONTROL] = "private, no-cache"
        tag = hashlib.blake2b(body.plain, digest_size=12).hexdigest()
        fields[hdrs.ETAG] = f'W/"{tag}"'
        if any(one.value in {tag, "*"} for one in request.if_none_match or ()):
            return web.Response(status=web.HTTPNotModified.status_code, headers={hdrs.VARY: VARY, **fields})
    if len(body.plain) > _IN_THREAD_BYTES and accepts_gzip(request.headers.get(hdrs.ACCEPT_ENCODING, "")):
        await asyncio.to_thread(body.packed)
    return response_of(request, body, status=status, headers=fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorDocument:
    """What was wrong, where, and how to fix it. Clients of OpenCost read ``code`` and ``message``."""

    error: Annotated[str, "What is wrong."]
    where: Annotated[str, "The parameter, option or address; empty where there is none."]
    fix: Annotated[str, "How to fix it; empty where it is not known."]
    problems: Annotated[list[Mapping[str, Any]], "All problems, each with the three keys above."]
    code: Annotated[int, "The HTTP status."]
    message: Annotated[str, "All of it in one line."]


def problem_document(problems: Sequence[str], status: int) -> ErrorDocument:
    """Return the JSON of an error; a message of ours is ``where: what; how to fix it``."""
    documents = [_parts(problem) for problem in problems]
    return ErrorDocument(**documents[0], problems=[*documents], code=status, message="; ".join(problems))


def _parts(problem: str) -> dict[str, str]:
    match = _WHERE.fullmatch(problem)
    where, rest = (match["where"], match["rest"]) if match else ("", problem)
    what, _, fix = rest.partition("; ")
    return {"error": what, "where": where, "fix": fix}


_STATIC = (("page.css", "text/css; charset=utf-8"), ("page.js", "text/javascript; charset=utf-8"))


@cache
def assets() -> Mapping[str, tuple[str, Body]]:
    """Return every file that pages load, by its plain name: its name with its hash, ``page.1a2b3c4d5e6f.css``, and it.

    A browser keeps a file for good, and asks for another name where there is another content.
    """
    found = {}
    for plain, content_type in _STATIC:
        content = (files("exporter.service") / "static" / plain).read_bytes()
        stem, _, suffix = plain.partition(".")
        found[plain] = f"{stem}.{sha256(content).hexdigest()[:12]}.{suffix}", Body(content, content_type)
    return found
