"""Connections to one Kubernetes API server: TLS as its settings say, one pool, and who asks on every request."""

import ipaddress
import socket
import ssl
from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from exporter.attribution.api_settings import ApiSettings


class Transport:
    """A pool of connections, for as long as what it was made of holds.

    Args:
        settings: Of the server; may be replaced by equal ones, with newer credentials.

    Raises:
        OSError: A certificate cannot be read.
        SSLError: Or is none.
    """

    def __init__(self, settings: ApiSettings) -> None:
        self.settings = settings
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=_context(settings), socket_factory=_keepalive_socket),
            # Only for a proxy: it also reads ~/.netrc, and with an entry of that no request can carry a token.
            trust_env=settings.proxy is None and _is_by_proxy(settings.host),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "gpu-cost-exporter"},
        )

    async def get(
        self, path: str, query: Mapping[str, str], *, accept: str, authorization: str, limits: aiohttp.ClientTimeout
    ) -> aiohttp.ClientResponse:
        """Send a request and return the answer, whose body is still to be read.

        Raises:
            ClientError, OSError, TimeoutError: There is no answer.
        """
        headers = {"Accept": accept, **({"Authorization": authorization} if authorization else {})}
        url = f"{self.settings.host.rstrip('/')}{path}"
        return await self._session.get(
            f"{url}?{urlencode(query)}" if query else url,
            headers=headers,
            timeout=limits,
            proxy=self.settings.proxy,
            server_hostname=self.settings.server_name,
            allow_redirects=False,  # an API server sends nobody elsewhere, and none chooses whom the agent asks
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


def _context(settings: ApiSettings) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=settings.ca_file, cadata=settings.ca_data)
    if settings.certificate_file:
        context.load_cert_chain(settings.certificate_file, settings.key_file)
    if not settings.verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    # Python 3.13 asks certificates for what many clusters' lack and Go does not ask for; chain and name are checked
    # as ever.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _is_by_proxy(url: str) -> bool:
    """Tell whether the environment sends requests to an address through a proxy."""
    parts, proxies = urlsplit(url), getproxies()
    host = parts.hostname or ""
    if parts.scheme not in proxies or proxy_bypass(host):
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True
    return not any(_is_in(address, entry.strip()) for entry in proxies.get("no", "").split(","))


def _is_in(address: ipaddress.IPv4Address | ipaddress.IPv6Address, entry: str) -> bool:
    """Clusters name networks in ``NO_PROXY``, as Go reads them and Python does not."""
    try:
        return address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _keepalive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    # A peer that vanished would be noticed only when a watch has been silent for minutes.
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    return made
