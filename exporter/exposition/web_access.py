"""Who may ask an HTTP face: its listening socket with TLS or without, passwords, and a new file without a restart."""

import asyncio
import base64
import binascii
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from exporter.errors import ConfigError
from exporter.exposition.door import Door
from exporter.exposition.web_config import WebSettings, server_context

if TYPE_CHECKING:
    import ssl

    from exporter.exposition.passwords import Passwords, Verdict

LOG = logging.getLogger("exporter.web")
LOOK_SECONDS = 5.0
"""Time between two looks at the files."""
ALIVE, READY = "/healthz", "/readyz"
ALIVE_TOO = "/health"
"""What the probes of dcgm-exporter's own DaemonSet ask, in which the agent may stand."""
_READINESS = {200: "ready", 503: "not ready; the reasons need a password"}
_CHALLENGE = 'Basic realm="gpu-cost-exporter", charset="UTF-8"'


class WebAccess:
    """The web configuration as it is now.

    Args:
        load: Reads the file and all that it names; raises ConfigError.

    Raises:
        ConfigError: It has mistakes.
    """

    def __init__(self, load: Callable[[], WebSettings]) -> None:
        self._load = load
        self._told: tuple[str, ...] = ()
        self._seen: object = None
        self.settings: WebSettings
        self.context: ssl.SSLContext | None
        self._passwords: Passwords | None
        self._take(*self._read())

    def _read(self) -> tuple[WebSettings, object, "ssl.SSLContext | None"]:
        # Which files to look at stands in the file: it is read twice, so that no change can come in between unseen.
        seen = _state(self._load().files)
        settings = self._load()
        return settings, seen, server_context(settings.tls) if settings.tls else None

    def _take(self, settings: WebSettings, seen: object, context: "ssl.SSLContext | None") -> None:
        self.settings, self._seen, self.context = settings, seen, context
        self._passwords = _passwords(settings)
        for warning in settings.warnings:
            LOG.warning("%s", warning)

    async def look(self, failed: Callable[[], None]) -> bool:
        """Read the files again where they have changed; whether they have. A broken one is told and not taken."""
        seen = await asyncio.to_thread(_state, self.settings.files)
        if seen == self._seen and not self._told:
            return False
        try:
            self._take(*await asyncio.to_thread(self._read))
        except ConfigError as error:
            if error.problems != self._told:
                self._told = error.problems
                failed()
                for problem in error.problems:
                    LOG.warning("the web configuration stays as it was: %s", problem)
            return False
        self._told = ()
        LOG.info("the web configuration was read again")
        return True

    def middleware(self, prefix: str = "") -> Middleware:
        """What stands before an application; ``prefix`` is that of its paths behind a proxy."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            path = request.path.removeprefix(prefix)
            refused = None if path in {ALIVE, ALIVE_TOO} else await self._refusal(request)
            response = await handler(request) if refused is None or path == READY else refused
            if refused is not None and path == READY and response.status in _READINESS:
                # The kubelet has no password, and needs the status alone.
                response = _plain(response.status, _READINESS[response.status])
            for name, value in self.settings.headers.items():
                response.headers.setdefault(name, value)
            return response

        return guard

    async def _refusal(self, request: web.Request) -> web.Response | None:
        tls = self.settings.tls
        if tls is not None and tls.allowed_sans and not tls.allowed_sans & _names(request):
            return _plain(403, "your certificate has none of the names that are allowed here")
        if self._passwords is None:
            return None
        verdict = await _verdict(self._passwords, request.headers.get(hdrs.AUTHORIZATION, ""))
        if verdict == "right":
            return None
        if verdict == "busy":
            response = _plain(503, "too many passwords are being looked at; ask again in a second")
            response.headers[hdrs.RETRY_AFTER] = "1"
            return response
        response = _plain(401, "a user and a password are needed here, and those given are not right, if any")
        response.headers[hdrs.WWW_AUTHENTICATE] = _CHALLENGE
        return response


class Listening:
    """A listening socket on which a runner serves; what it is secured with can change while it listens.

    Args:
        runner: Set up.
        listener: Bound; closed at the end.
        access: ``None``: plain HTTP, for everybody.
    """

    def __init__(self, runner: web.AppRunner, listener: socket.socket, access: WebAccess | None) -> None:
        self._door = Door(listener, runner)
        self._access = access

    def start(self) -> None:
        """Listen. Connections that are open later stay as they are, whatever the file becomes."""
        self._secure()
        self._door.open()

    def _secure(self) -> None:
        self._door.context = self._access.context if self._access else None

    async def watch(self, failed: Callable[[], None], interval_seconds: float = LOOK_SECONDS) -> None:
        """Look for new files until cancelled; ``failed`` counts a broken one."""
        access = self._access
        while access:
            await asyncio.sleep(interval_seconds)
            before = access.context
            if await access.look(failed) and before is not access.context:
                self._secure()

    def stop(self) -> None:
        """Take no more connections."""
        self._door.close()


def _passwords(settings: WebSettings) -> "Passwords | None":
    if not settings.users:
        return None
    from exporter.exposition.passwords import Passwords  # noqa: PLC0415 - bcrypt only where passwords are asked for

    return Passwords(settings.users)


async def _verdict(passwords: "Passwords", header: str) -> "Verdict":
    scheme, _, encoded = header.partition(" ")
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return "wrong"
    if scheme.lower() != "basic" or not colon:
        return "wrong"
    return await passwords.check(user.decode("utf-8", "replace"), password)


def _names(request: web.Request) -> frozenset[str]:
    """Alternative names of the client's certificate."""
    found = request.transport.get_extra_info("peercert") if request.transport else None
    names = found.get("subjectAltName", ()) if isinstance(found, dict) else ()
    return frozenset(str(name) for _, name in names)


def _plain(status: int, words: str) -> web.Response:
    return web.Response(text=f"{words}\n", status=status)


def _state(files: tuple[Path, ...]) -> object:
    return tuple(_file_state(path) for path in files)


def _file_state(path: Path) -> object:
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_ino, state.st_size
