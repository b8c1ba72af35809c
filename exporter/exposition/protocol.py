"""The headers that every answer has, aiohttp's own to what is no request included."""

from aiohttp import hdrs, web
from aiohttp.web_request import BaseRequest

SERVER = "gpu-cost-exporter"
UNLESS_SAID = {
    hdrs.CACHE_CONTROL: "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Headers by name, of an answer that does not have them of its own."""


class Protocol(web.RequestHandler):
    """aiohttp's part of a connection; it tells nobody of which versions it is made."""

    __slots__ = ()

    def handle_error(
        self, request: BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer for aiohttp, where a request is none or a handler fails."""
        if status == web.HTTPBadRequest.status_code:
            # The parser's own words name the library that it is made of.
            message = "this is not an HTTP/1.1 request that can be read in one way only; send one of a usual client\n"
        response = super().handle_error(request, status, exc, message)
        _dress(response)
        return response


async def dress(_: web.Request, response: web.StreamResponse) -> None:
    """For an application's ``on_response_prepare``."""
    _dress(response)


def _dress(response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = SERVER
    for name, value in UNLESS_SAID.items():
        response.headers.setdefault(name, value)
