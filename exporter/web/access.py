"""Protects an HTTP server with TLS, passwords and headers; reloads their files without a restart."""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
import secrets
import ssl
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Literal

import bcrypt
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from exporter.config.web_config import WebSettings
from exporter.errors import ConfigError

LOG = logging.getLogger("exporter.web")
POLL_SECONDS = 5.0
"""Seconds between two checks of the files."""
ALIVE, READY = "/healthz", "/readyz"
ALIVE_TOO = "/health"
"""Path that the probes of dcgm-exporter's DaemonSet request; the agent can run in that DaemonSet."""
MOST_REMEMBERED = 100
MOST_WAITING = 16
_READINESS = {200: "ready", 503: "not ready; the reasons need a password"}
_CHALLENGE = 'Basic realm="gpu-cost-exporter", charset="UTF-8"'
_MOST_BYTES = 72
"""Bytes of a password that bcrypt reads, also in Prometheus' exporter-toolkit."""
# Salt and hash of a random password. The password of an unknown user is compared with it, for an equal response time.
_DECOY = "Ro0CUfOqk6cXEKf3dyaM7OhSCvnwM9s4wIX9JeLapKK5YdLCKxBlm"

Verdict = Literal["right", "wrong", "busy"]


class Passwords:
    """Checks passwords of users. A password that was right is recognised later without bcrypt.

    Args:
        users: Bcrypt hash by user, as ``$2y$10$...``; not empty.
    """

    def __init__(self, users: Mapping[str, bytes]) -> None:
        self._users = dict(users)
        self._cost = max(_cost(known) for known in users.values())
        self._decoy = _decoy(self._cost)
        self._key = secrets.token_bytes(32)
        self._right: dict[bytes, None] = {}
        self._waiting = 0
        self._one_at_a_time = asyncio.Semaphore(1)

    async def verify(self, header: str) -> Verdict:
        """Check an Authorization header."""
        scheme, _, encoded = header.partition(" ")
        try:
            user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        except ValueError:
            return "wrong"
        if scheme.lower() != "basic" or not colon:
            return "wrong"
        return await self.check(user.decode("utf-8", "replace"), password)

    async def check(self, user: str, password: bytes) -> Verdict:
        """Check the password of a user; busy while too many other checks wait."""
        known = self._users.get(user, self._decoy)
        mark = self._mark(user, known, password)
        if mark in self._right:
            return "right"
        if self._waiting >= MOST_WAITING:
            return "busy"
        self._waiting += 1
        try:
            async with self._one_at_a_time:
                is_equal = await asyncio.to_thread(_is_equal, password, known, self._cost)
        finally:
            self._waiting -= 1
        if not (is_equal and user in self._users):
            return "wrong"
        if len(self._right) >= MOST_REMEMBERED:
            del self._right[next(iter(self._right))]
        self._right[mark] = None
        return "right"

    def _mark(self, user: str, known: bytes, password: bytes) -> bytes:
        """Return the digest to remember; the key exists only in this process, so a digest alone allows no guesses."""
        parts = (user.encode("utf-8", "surrogatepass"), known, password)
        message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, message, hashlib.sha256)


def _is_equal(password: bytes, known: bytes, most_cost: int) -> bool:
    """Return whether the password matches the hash. Every check costs as much as the most expensive hash."""
    asked = password[:_MOST_BYTES]
    try:
        is_equal = bcrypt.checkpw(asked, known)
        # A cost is a power of two: 2^n + (2^n + 2^(n+1) + ... + 2^(most-1)) = 2^most.
        for cost in range(_cost(known), most_cost):
            bcrypt.checkpw(asked, _decoy(cost))
    except ValueError:
        return False
    return is_equal


def _cost(known: bytes) -> int:
    return int(known[4:6])


def _decoy(cost: int) -> bytes:
    return f"$2b${cost:02d}${_DECOY}".encode()


class WebAccess:
    """Applies the current web configuration.

    Args:
        load: Reads the file and the files that it names; raises ConfigError.
        prefix: Prefix of the application's paths behind a proxy.

    Raises:
        ConfigError: The configuration has mistakes.
    """

    def __init__(self, load: Callable[[], WebSettings], prefix: str = "") -> None:
        self._load = load
        self._prefix = prefix
        self._logged: tuple[str, ...] = ()
        self._seen: object = None
        self.settings: WebSettings
        self._passwords: Passwords | None
        self._take(*self._read())

    @property
    def context(self) -> ssl.SSLContext | None:
        """TLS context of new connections; open connections keep theirs. ``None``: plain HTTP."""
        return self.settings.tls.context if self.settings.tls else None

    def _read(self) -> tuple[WebSettings, object]:
        # The file names the files to check. A second read catches a change between the first read and the check.
        seen = _state(self._load().files)
        return self._load(), seen

    def _take(self, settings: WebSettings, seen: object) -> None:
        self.settings, self._seen = settings, seen
        self._passwords = Passwords(settings.users) if settings.users else None
        for warning in settings.warnings:
            LOG.warning("%s", warning)

    async def watch(self, failed: Callable[[], None], interval_seconds: float = POLL_SECONDS) -> None:
        """Reload the files after each change, until cancelled; ``failed`` counts an invalid configuration."""
        while True:
            await asyncio.sleep(interval_seconds)
            seen = await asyncio.to_thread(_state, self.settings.files)
            if seen == self._seen and not self._logged:
                continue
            try:
                self._take(*await asyncio.to_thread(self._read))
            except ConfigError as error:
                if error.problems != self._logged:
                    self._logged = error.problems
                    failed()
                    for problem in error.problems:
                        LOG.warning("keeping the previous web configuration: %s", problem)
            else:
                self._logged = ()
                LOG.info("web configuration reloaded")

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer authorised clients only; a middleware of the application."""
        path = request.path.removeprefix(self._prefix)
        refused = None if path in {ALIVE, ALIVE_TOO} else await self._refusal(request)
        response = await handler(request) if refused is None or path == READY else refused
        if refused is not None and path == READY and response.status in _READINESS:
            # The kubelet has no password and needs only the status.
            response = plain(response.status, _READINESS[response.status])
        for name, value in self.settings.headers.items():
            response.headers.setdefault(name, value)
        return response

    async def _refusal(self, request: web.Request) -> web.Response | None:
        tls = self.settings.tls
        if tls is not None and tls.allowed_sans and not tls.allowed_sans & _names(request):
            return plain(403, "your certificate has none of the names that are allowed here")
        if self._passwords is None:
            return None
        verdict = await self._passwords.verify(request.headers.get(hdrs.AUTHORIZATION, ""))
        if verdict == "right":
            return None
        if verdict == "busy":
            return plain(503, "too many passwords are being checked; retry in a second", {hdrs.RETRY_AFTER: "1"})
        words = "authentication required: missing or wrong user name or password"
        return plain(401, words, {hdrs.WWW_AUTHENTICATE: _CHALLENGE})


def _names(request: web.Request) -> frozenset[str]:
    """Return the subject alternative names of the client's certificate."""
    found = request.transport.get_extra_info("peercert") if request.transport else None
    names = found.get("subjectAltName", ()) if isinstance(found, dict) else ()
    return frozenset(str(name) for _, name in names)


def plain(status: int, words: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response of plain text with a final line break."""
    body = f"{words}\n".encode("utf-8", "replace")
    return web.Response(body=body, status=status, headers=headers, content_type="text/plain", charset="utf-8")


def address_of(peer: object) -> IPv4Address | IPv6Address | None:
    """Return the address of a transport's peer; an IPv4-mapped IPv6 address becomes IPv4."""
    if not isinstance(peer, tuple) or not peer:
        return None
    try:
        found = ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return None
    return (found.ipv4_mapped if isinstance(found, IPv6Address) else None) or found


def _state(files: tuple[Path, ...]) -> object:
    """Return a value that changes with each change of a file, without the unreadable files."""
    states = []
    for path in files:
        with contextlib.suppress(OSError):
            found = path.stat()
            states.append((path, found.st_mtime_ns, found.st_ino, found.st_size))
    return states
