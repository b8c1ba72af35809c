"""Requests that follow nobody elsewhere: what is sent along (a password, a message) must not go there."""

import urllib.request
from http.client import HTTPMessage
from typing import IO


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """For ``urllib.request.build_opener``: an answer that sends elsewhere is an error with its status."""

    def redirect_request(
        self,
        req: urllib.request.Request,  # noqa: ARG002 - urllib's, as are the next five
        fp: IO[bytes],  # noqa: ARG002
        code: int,  # noqa: ARG002
        msg: str,  # noqa: ARG002
        headers: HTTPMessage,  # noqa: ARG002
        newurl: str,  # noqa: ARG002
    ) -> None:
        """Follow nothing."""
        return
