"""Settings of the cost service, from flags, environment, file and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from exporter.config.options import SERVE_OPTIONS
from exporter.config.prometheus_options import PROMETHEUS_OPTIONS, PrometheusSettings, settings_of
from exporter.config.resolve import settle, unknown_variables
from exporter.errors import ConfigError

if TYPE_CHECKING:
    from exporter.config.types import Listen

OPTIONS = (*SERVE_OPTIONS, *PROMETHEUS_OPTIONS)
"""Every option of the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settled configuration of the service; every value is valid. Made by ``load_settings``."""

    prometheus: PrometheusSettings = field(default_factory=lambda: PrometheusSettings(url="http://127.0.0.1:9090"))
    listen_host: str = ""
    """Empty: every interface, IPv4 and IPv6."""
    listen_port: int = 9401
    """0: any free port."""
    web_config: Path | None = None
    """``None``: plain HTTP, for everybody."""
    external_url: str = ""
    """Without a slash at its end; empty where none was given."""
    title: str = "GPU cost"
    store: Path | None = None
    """``None``: no day is kept, and only what Prometheus still has is shown."""
    budgets: Path | None = None
    currency: str = ""
    """ISO 4217: currency of OpenCost's API where a request names none; empty where there is no default."""
    timezone: tzinfo = UTC
    """Time zone of days, weeks and months."""
    refresh_seconds: float = 300.0
    history_days: int = 90
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    warnings: tuple[str, ...] = ()
    """One line each: what was accepted and does not mean what it may seem to mean; to be logged at the start."""

    @property
    def path_prefix(self) -> str:
        """What links begin with: ``/cost``, or nothing. The service answers with and without it."""
        return urlsplit(self.external_url).path


def load_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], *, extra: tuple[str, ...] = ()
) -> ServeSettings:
    """The service's settled configuration.

    Args:
        flags: Option key, with hyphens or underscores, to its text; ``None`` is not given. ``config`` is the file.
        environ: The process environment.
        extra: Problems that the caller found, raised together with those found here.

    Raises:
        ConfigError: With all mistakes at once, one line each.
    """
    problems = list(extra)
    values = settle(OPTIONS, flags, environ, problems).values
    before = len(problems)
    prometheus = settings_of(values, problems)
    if prometheus is None and len(problems) == before and values["prometheus"] is None:
        problems.append(
            "prometheus: is not given; allowed: an address, as http://prometheus:9090, by --prometheus or"
            " GPU_COST_EXPORTER_PROMETHEUS"
        )
    problems += _path_problems(values)
    problems += _web_problems(values)
    if problems or prometheus is None:
        raise ConfigError(*problems)
    listen: Listen = values["listen"]
    return ServeSettings(
        prometheus=prometheus,
        listen_host=listen.host,
        listen_port=listen.port,
        web_config=Path(values["web-config"]) if values["web-config"] else None,
        external_url=values["external-url"] or "",
        title=values["title"],
        store=Path(values["store"]) if values["store"] else None,
        budgets=Path(values["budgets"]) if values["budgets"] else None,
        currency=values["currency"] or "",
        timezone=values["timezone"],
        refresh_seconds=values["refresh-interval"],
        history_days=values["history"],
        log_format=values["log-format"],
        log_level=values["log-level"],
        warnings=tuple(unknown_variables(OPTIONS, environ)),
    )


def _web_problems(values: dict[str, Any]) -> tuple[str, ...]:
    if not values["web-config"]:
        return ()
    from exporter.config import web_config  # noqa: PLC0415 - TLS and YAML only where they are asked for

    try:
        web_config.load(Path(values["web-config"]))
    except ConfigError as error:
        return error.problems
    return ()


def _path_problems(values: dict[str, Any]) -> list[str]:
    store = Path(values["store"]) if values["store"] else None
    if store is None:
        return []
    if store.is_dir():
        return [f"store: {store} is a directory; allowed: a file in it, such as {store / 'days.sqlite'}"]
    if not store.absolute().parent.is_dir():
        return [f"store: {store.absolute().parent} is no directory; make it, or choose another place"]
    return []
