"""What a connection to a Kubernetes API server needs, and a pod's service account, which is the simplest of them."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Where the server is, whom to believe that it is, and what to show it. Equal ones may share connections."""

    host: str
    """URL without a path's end."""
    ca_file: str | None = None
    ca_data: str | bytes | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    verify: bool = True
    proxy: str | None = None
    server_name: str | None = None
    """What its certificate must be for, where that is not the host."""
    authorization: Callable[[], Awaitable[str]] = field(compare=False)
    """Gives the header's value, read again where it may have been renewed; empty where a certificate says who asks."""


def of_service_account(environ: Mapping[str, str], folder: Path) -> ApiSettings:
    """Return what a pod is given: address in its environment, token and authority in a folder.

    Args:
        environ: Has ``KUBERNETES_SERVICE_HOST`` and ``KUBERNETES_SERVICE_PORT``.
        folder: Has ``token`` and ``ca.crt``.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is empty.
        LookupError: The environment has no address.
    """
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
    authority = folder / "ca.crt"
    _text(authority)
    token = folder / "token"
    _text(token)

    async def authorization() -> str:
        # From the file each time: the kubelet renews it, and a request is rare.
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
