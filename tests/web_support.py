"""Certificates made by openssl and web configurations around them, for tests that connect for real."""

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import bcrypt
import pytest
from aiohttp import web

from exporter.web.access import WebAccess
from exporter.web.http_server import HttpServer, Limits, bind

PASSWORD = "correct horse"  # noqa: S105 - of a server that lives as long as a test


def hashed(password: str = PASSWORD, prefix: bytes = b"2y") -> str:
    """A cheap hash, as htpasswd writes it."""
    return (b"$" + prefix + bcrypt.hashpw(password.encode(), bcrypt.gensalt(4))[3:]).decode()


@asynccontextmanager
async def http_server(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    access: WebAccess | None = None,
    limits: Limits | None = None,
    count: Callable[[str, str], None] = lambda _part, _reason: None,
) -> AsyncIterator[int]:
    """Serve an application on a port of its own, as agent and service are served."""
    listener = bind(host, 0)
    server = HttpServer(
        app=app, listener=listener, shutdown_seconds=1.0, access=access, limits=limits or Limits(), count=count
    )
    async with server.running():
        watching = asyncio.ensure_future(server.watch())
        try:
            yield listener.getsockname()[1]
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Certificates:
    """An authority, a server for 127.0.0.1 and localhost, and a client named prometheus.example."""

    folder: Path

    def path(self, name: str) -> Path:
        """``ca.pem``, ``server.pem``, ``server.key``, ``client.pem``, ``client.key``."""
        return self.folder / name

    def client(self, *, shown: bool = False, most: ssl.TLSVersion | None = None) -> ssl.SSLContext:
        """What a client connects with that trusts the authority, and shows its certificate if it is asked to."""
        context = ssl.create_default_context(cafile=str(self.path("ca.pem")))
        if shown:
            context.load_cert_chain(self.path("client.pem"), self.path("client.key"))
        if most is not None:
            context.maximum_version = most
        return context


def make_certificates(folder: Path) -> Certificates:
    """Make them again in a folder, which may have old ones."""
    folder.mkdir(exist_ok=True)
    _openssl(
        folder,
        "req",
        "-x509",
        *_KEY,
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-subj",
        "/CN=test authority",
        "-days",
        "2",
    )
    _issue(folder, "server", "DNS:localhost,IP:127.0.0.1", "serverAuth")
    _issue(folder, "client", "DNS:prometheus.example", "clientAuth")
    return Certificates(folder)


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _issue(folder: Path, name: str, names: str, usage: str) -> None:
    _openssl(folder, "req", *_KEY, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
    (folder / f"{name}.ext").write_text(f"subjectAltName={names}\nextendedKeyUsage={usage}\n")
    signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.pem")


def _openssl(folder: Path, *arguments: str) -> None:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("needs openssl on the PATH: make install")
    subprocess.run([program, *arguments], cwd=folder, check=True, capture_output=True)


def web_file(folder: Path, *, tls: Mapping[str, str] | None = None, users: Mapping[str, str] | None = None) -> Path:
    """A web configuration beside its certificates."""
    lines = []
    if tls is not None:
        whole = {"cert_file": "server.pem", "key_file": "server.key", **tls}
        lines += ["tls_server_config:", *(f"  {key}: {value}" for key, value in whole.items())]
    if users:
        lines += ["basic_auth_users:", *(f"  {user}: {known}" for user, known in users.items())]
    path = folder / "web.yaml"
    beside = folder / "web.yaml.new"
    beside.write_text("\n".join(lines) + "\n")
    beside.replace(path)
    return path
