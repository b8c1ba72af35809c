"""Provides address and credentials of the Kubernetes API, from the pod's service account or a kubeconfig.

Only this module imports the ``kubernetes`` package, to read kubeconfigs. The package takes 20 MiB of memory, so agents
in pods do not load it.
"""

import asyncio
import contextlib
import importlib
import os
import ssl
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from exporter.errors import ApiError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Address, authority and credentials of a server."""

    host: str
    """URL without a trailing path."""
    ca_file: str | None = None
    ca_data: str | bytes | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    verify: bool = True
    proxy: str | None = None
    server_name: str | None = None
    """Name for which the certificate of the server must be valid; ``None`` for the host."""
    authorization: Callable[[], Awaitable[str]]
    """Returns the value of the Authorization header, read again if it may have changed; empty with a client
    certificate."""

    def context(self) -> ssl.SSLContext:
        """Read the certificates.

        Raises:
            OSError: A file cannot be read.
            SSLError: A certificate is not valid.
        """
        context = ssl.create_default_context(cafile=self.ca_file, cadata=self.ca_data)
        if self.certificate_file:
            context.load_cert_chain(self.certificate_file, self.key_file)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        # Python 3.13 requires certificate extensions that Go does not require and many clusters lack. Chain and name
        # are still checked.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


def of_service_account(environ: Mapping[str, str], folder: Path) -> ApiSettings:
    """Return the settings in a pod: the address from its environment, token and authority from a folder.

    Args:
        environ: Contains ``KUBERNETES_SERVICE_HOST`` and ``KUBERNETES_SERVICE_PORT``.
        folder: Contains ``token`` and ``ca.crt``.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is empty.
        LookupError: The environment has no address.
    """
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
    authority, token = folder / "ca.crt", folder / "token"
    for path in (authority, token):
        _text(path)

    async def authorization() -> str:
        # The file is read each time, because the kubelet renews it and requests are rare.
        return f"Bearer {_text(token)}"

    return ApiSettings(
        host=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        ca_file=str(authority),
        authorization=authorization,
    )


def _text(path: Path) -> str:
    text = path.read_text(encoding="utf-8").strip()
    if not text:
        raise ValueError(f"{path.name} is empty")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Reads the settings of one cluster."""

    kubeconfig: Path | None = None
    """Kubeconfig file; ``None``: the pod's service account, then $KUBECONFIG, then ~/.kube/config."""
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    """Environment with ``KUBERNETES_SERVICE_HOST`` and ``KUBECONFIG``."""
    service_account: Path = field(default_factory=lambda: SERVICE_ACCOUNT)
    """Folder with ``token`` and ``ca.crt`` of the pod."""

    @property
    def place(self) -> str:
        """Source of the settings, for messages."""
        if self._in_pod:
            return f"service account in {self.service_account}"
        return f"kubeconfig {self._files}"

    async def read(self) -> ApiSettings:
        """Read all settings from their files.

        Raises:
            ApiError: ``no_config``.
        """
        if self._in_pod:
            with usable(self.place):
                return of_service_account(self.environ, self.service_account)
        # The unused dynamic client of the package would load this validator if installed, which takes seconds.
        sys.modules.setdefault("kubernetes_validate", None)  # type: ignore[arg-type]
        # Imported by name, so that a type checker does not read thousands of modules. In a thread, because the import
        # takes half a second.
        names = ("kubernetes.aio.client.configuration", "kubernetes.aio.config.kube_config")
        client, kube_config = [await asyncio.to_thread(importlib.import_module, name) for name in names]
        configuration = client.Configuration()
        with usable(self.place):
            await self._read_kubeconfig(kube_config, configuration)
            # Messages and pages show the address, so it must not contain credentials.
            if "@" in urlsplit(configuration.host).netloc:
                fix = "put them under `users` of the kubeconfig"
                raise ApiError("no_config", f"{self.place}: `server` has a user or a password in it; {fix}")
        return _settings(configuration)

    @property
    def _in_pod(self) -> bool:
        return self.kubeconfig is None and bool(self.environ.get("KUBERNETES_SERVICE_HOST"))

    @property
    def _files(self) -> str:
        if self.kubeconfig is not None:
            return str(self.kubeconfig)
        return self.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")

    async def _read_kubeconfig(self, kube_config: Any, configuration: Any) -> None:  # noqa: ANN401 - the package has no types
        files = self._files
        if not any(_is_file(name) for name in files.split(os.pathsep)):
            missing = f"no Kubernetes API is configured: not in a pod with a service account, and no file {files}"
            fix = "give --kubeconfig, or let the pod mount its service account's token"
            raise ApiError("no_config", f"{missing}; {fix}")
        loader = await kube_config.load_kube_config(
            config_file=files, client_configuration=configuration, persist_config=False
        )
        user = loader.current_context["context"].get("user")
        if user and not configuration.api_key and not configuration.cert_file:
            wrong = f"user {user!r} has no token and no client certificate that can be read"
            raise ApiError("no_config", f"{self.place}: {wrong}; no anonymous request is made")


@contextlib.contextmanager
def usable(place: str) -> Iterator[None]:
    """Convert errors of the package about invalid settings to ``ApiError`` with reason ``no_config``."""
    try:
        yield
    except ApiError:
        raise
    except Exception as error:
        # The errors of the package and of its YAML reader have no common base class.
        ours = (OSError, LookupError, TypeError, ValueError, AttributeError)
        if not isinstance(error, ours) and type(error).__module__.partition(".")[0] not in {"kubernetes", "yaml"}:
            raise
        words = " ".join(str(error).split())[:300] or type(error).__name__
        raise ApiError("no_config", f"{place} cannot be used: {words}") from error


def _is_file(name: str) -> bool:
    return bool(name) and Path(name).expanduser().is_file()


def _settings(configuration: Any) -> ApiSettings:  # noqa: ANN401 - as _read_kubeconfig
    async def authorization() -> str:
        key = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        return str(key or "").strip()  # a line break would make every request fail

    return ApiSettings(
        host=configuration.host,
        ca_file=configuration.ssl_ca_cert,
        ca_data=configuration.ca_cert_data,
        certificate_file=configuration.cert_file,
        key_file=configuration.key_file,
        verify=configuration.verify_ssl,
        proxy=configuration.proxy,
        server_name=configuration.tls_server_name,
        authorization=authorization,
    )
