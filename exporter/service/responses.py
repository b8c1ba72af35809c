"""Answers of the service: headers, ETags, JSON, and errors as the API reports them."""

import asyncio
import gzip
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from types import MappingProxyType
from typing import Annotated, Any, TypedDict

from aiohttp import hdrs, web

from exporter.web.responses import VARY, Body, accepts_gzip, response_of

JSON, TEXT, HTML = "application/json", "text/plain; charset=utf-8", "text/html; charset=utf-8"
_IN_THREAD_BYTES = 100_000
_WHERE = re.compile(r"(?P<where>[^\s:;]+(?: \(from [^)]*\))?): (?P<rest>.+)", re.DOTALL)
_OF_A_REPORT = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
"""For HTML that brings no policy of its own: a report to be saved, which has its styles in it and no script."""

ErrorPage = Callable[[web.Request, int, str, str], Awaitable[web.Response]]
"""From request, status, what is wrong and how to fix it to a page for people."""
ERROR_PAGE: web.AppKey[ErrorPage] = web.AppKey("ERROR_PAGE")
"""Set by what adds pages: answers errors of paths that are none of the API's, to those who accept HTML."""


def json_body(document: object) -> Body:
    """Return a document as compact UTF-8; bad Unicode is replaced, so that one odd name cannot cost the answer.

    Dataclasses in it are objects.

    Raises:
        ValueError: It has a value that is no number; JSON has none for it.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=asdict)
    return Body(text.encode("utf-8", "replace"), JSON)


async def respond(
    request: web.Request,
    body: Body,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    cache: str = "private, no-cache",
) -> web.Response:
    """Return an answer with an ETag if its status is 200, or a 304 where the client has it already.

    Args:
        request: Says whether the client accepts gzip, and what it has.
        body: Shared by all clients.
        status: HTTP status; an answer that is no 200 is kept by no cache.
        headers: More of them; they win.
        cache: ``Cache-Control`` of a 200: by default a browser may keep it, and must ask again.
    """
    fields = {
        hdrs.CACHE_CONTROL: cache if status == web.HTTPOk.status_code else "no-store",
        "X-Frame-Options": "SAMEORIGIN",
        **(headers or {}),
    }
    if body.content_type == HTML:
        fields.setdefault("Content-Security-Policy", _OF_A_REPORT)
    if status == web.HTTPOk.status_code and hdrs.ETAG not in fields:
        fields[hdrs.ETAG] = f'W/"{hashlib.blake2b(body.plain, digest_size=12).hexdigest()}"'
        if _has_already(request, fields[hdrs.ETAG]):
            return web.Response(status=web.HTTPNotModified.status_code, headers={hdrs.VARY: VARY, **fields})
    if body.size > _IN_THREAD_BYTES and accepts_gzip(request.headers.get(hdrs.ACCEPT_ENCODING, "")):
        await asyncio.to_thread(body.packed)
    return response_of(request, body, status=status, headers=fields)


def _has_already(request: web.Request, etag: str) -> bool:
    """Whether the client names this ETag; the strength of a comparison does not matter for GET."""
    known = request.headers.get(hdrs.IF_NONE_MATCH, "")
    return known.strip() == "*" or etag.removeprefix("W/") in {
        one.strip().removeprefix("W/") for one in known.split(",")
    }


class ErrorDocument(TypedDict):
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
    first = documents[0]
    return {
        "error": first["error"],
        "where": first["where"],
        "fix": first["fix"],
        "problems": list(documents),
        "code": status,
        "message": "; ".join(problems),
    }


def _parts(problem: str) -> dict[str, str]:
    match = _WHERE.fullmatch(problem)
    where, rest = (match["where"], match["rest"]) if match else ("", problem)
    what, _, fix = rest.partition("; ")
    return {"error": what, "where": where, "fix": fix}


_LEVEL = 6
_HASH_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file that pages load."""

    name: str
    """With its hash: ``page.1a2b3c4d5e6f.css``."""
    content_type: str
    body: bytes


@cache
def assets() -> Mapping[str, Asset]:
    """Every file, by its plain name: ``page.css``, ``page.js``."""
    own = files("exporter.service") / "static"
    return MappingProxyType(
        {
            "page.css": _asset("page", "css", "text/css", (own / "page.css").read_bytes()),
            "page.js": _asset("page", "js", "text/javascript", (own / "page.js").read_bytes()),
        }
    )


@cache
def packed(name: str) -> bytes:
    """The body of the asset with this plain name, compressed once."""
    return gzip.compress(assets()[name].body, _LEVEL, mtime=0)


def _asset(stem: str, suffix: str, content_type: str, body: bytes) -> Asset:
    digest = sha256(body).hexdigest()[:_HASH_DIGITS]
    return Asset(name=f"{stem}.{digest}.{suffix}", content_type=f"{content_type}; charset=utf-8", body=body)
