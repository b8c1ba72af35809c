"""Creates the answers of the service: headers, ETags, JSON, and errors in the format of the API."""

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
"""Policy of HTML without another policy: a report for download, with inline styles and without scripts."""


async def respond(
    request: web.Request,
    body: Body,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """Return an answer, with an ETag if its status is 200; or status 304 for a matching ETag.

    A browser may cache an answer with status 200, but must revalidate it.

    Args:
        request: Request with the client's encodings and ETags.
        body: Body, shared by all clients.
        status: HTTP status; an answer with another status than 200 is not cached.
        headers: Additional headers, which override others.
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
    """Return the JSON document of an error; messages have the form ``where: what; how to fix it``."""
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
    """Return the files that pages load, by plain name: name with a hash, ``page.1a2b3c4d5e6f.css``, and content.

    A browser caches a file permanently; changed content has another name.
    """
    found = {}
    for plain, content_type in _STATIC:
        content = (files("exporter.service") / "static" / plain).read_bytes()
        stem, _, suffix = plain.partition(".")
        found[plain] = f"{stem}.{sha256(content).hexdigest()[:12]}.{suffix}", Body(content, content_type)
    return found
