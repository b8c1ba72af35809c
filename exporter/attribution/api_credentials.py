"""Where the Kubernetes API is and what to show it: the pod's service account or a kubeconfig, read when asked."""

import asyncio
import contextlib
import importlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from exporter.errors import ApiError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Credentials:
    """The settings of one cluster.

    Args:
        kubeconfig: File to use; without one the pod's service account, then $KUBECONFIG, then ~/.kube/config.
        environ: Where ``KUBERNETES_SERVICE_HOST`` and ``KUBECONFIG`` are looked up.
        service_account: Folder with the pod's ``token`` and ``ca.crt``.
    """

    def __init__(
        self,
        kubeconfig: Path | None,
        *,
        environ: Mapping[str, str] = os.environ,
        service_account: Path = SERVICE_ACCOUNT,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._environ = environ
        self._service_account = service_account

    @property
    def place(self) -> str:
        """Where the settings come from, for messages."""
        if self._in_pod:
            return f"service account in {self._service_account}"
        return f"kubeconfig {self._files}"

    async def read(self) -> Any:  # noqa: ANN401 - the package is not imported where its types could be named
        """Read everything from its files and give the package's ``Configuration``.

        Raises:
            ApiError: ``no_config``.
        """
        # By name, so that neither a type checker nor an agent without metadata reads thousands of modules; beside the
        # loop, because it takes half a second.
        for module in ("client.api_client", "config.kube_config", "config.incluster_config"):
            await asyncio.to_thread(importlib.import_module, f"kubernetes.aio.{module}")
        configuration = importlib.import_module("kubernetes.aio.client.configuration").Configuration()
        with usable(self.place):
            if self._in_pod:
                self._read_service_account(configuration)
            else:
                await self._read_kubeconfig(configuration)
        # Python 3.13 asks certificates for what many clusters' lack and Go does not ask for; chain and name are
        # checked as ever.
        configuration.disable_strict_ssl_verification = True
        _strip_token(configuration)
        return configuration

    @property
    def _in_pod(self) -> bool:
        return self._kubeconfig is None and bool(self._environ.get("KUBERNETES_SERVICE_HOST"))

    @property
    def _files(self) -> str:
        if self._kubeconfig is not None:
            return str(self._kubeconfig)
        return self._environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")

    def _read_service_account(self, configuration: Any) -> None:  # noqa: ANN401 - as read
        loader = importlib.import_module("kubernetes.aio.config.incluster_config").InClusterConfigLoader
        loader(
            token_filename=str(self._service_account / "token"),
            cert_filename=str(self._service_account / "ca.crt"),
            environ=self._environ,
        ).load_and_set(configuration)

    async def _read_kubeconfig(self, configuration: Any) -> None:  # noqa: ANN401 - as read
        files = self._files
        if not any(_is_file(name) for name in files.split(os.pathsep)):
            raise ApiError(
                "no_config",
                f"no Kubernetes API to ask: not in a pod with a service account, and no file {files};"
                " give --kubeconfig, or let the pod mount its service account's token",
            )
        kube_config = importlib.import_module("kubernetes.aio.config.kube_config")
        loader = await kube_config.load_kube_config(
            config_file=files, client_configuration=configuration, persist_config=False
        )
        user = loader.current_context["context"].get("user")
        if user and not configuration.api_key and not configuration.cert_file:
            raise ApiError(
                "no_config",
                f"{self.place}: user {user!r} has no token and no client certificate that can be read;"
                " no anonymous request is made",
            )


@contextlib.contextmanager
def usable(place: str) -> Iterator[None]:
    """Turn what the package raises over bad settings into ``ApiError`` with reason ``no_config``."""
    try:
        yield
    except ApiError:
        raise
    except Exception as error:
        # The errors of the package and of its YAML reader have no base of their own.
        ours = (OSError, LookupError, TypeError, ValueError, AttributeError)
        if not isinstance(error, ours) and type(error).__module__.partition(".")[0] not in {"kubernetes", "yaml"}:
            raise
        words = " ".join(str(error).split())[:300] or type(error).__name__
        raise ApiError("no_config", f"{place} cannot be used: {words}") from error


def _is_file(name: str) -> bool:
    return bool(name) and Path(name).expanduser().is_file()


def _strip_token(configuration: Any) -> None:  # noqa: ANN401 - as Credentials.read
    """Take the line end off a token, which would make every request an error; also when it is read again."""
    hook = configuration.refresh_api_key_hook

    def refresh(refreshed: Any) -> None:  # noqa: ANN401 - as above
        if hook is not None:
            hook(refreshed)
            refreshed.refresh_api_key_hook = refresh
        refreshed.api_key = {name: key.strip() for name, key in refreshed.api_key.items()}

    configuration.refresh_api_key_hook = refresh
