"""Settings of the cost service, from flags, environment, file and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from exporter.config.options import FleetSettings, LoggingSettings, ServiceServingSettings, group, groups_of, options_of
from exporter.config.prometheus_options import GROUP, PrometheusSettings, prometheus_problems
from exporter.config.resolve import mistakes_in, settle, unknown_variables
from exporter.errors import ConfigError

# ruff: noqa: RUF009 - the calls in the class make its fields.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settled configuration of the service with valid values, as returned by ``load_settings``."""

    serving: ServiceServingSettings = group("Serving", ServiceServingSettings)
    fleet: FleetSettings = group("Reading and keeping", FleetSettings)
    logging: LoggingSettings = group("Running", LoggingSettings)
    prometheus: PrometheusSettings = group(GROUP, PrometheusSettings)
    warnings: tuple[str, ...] = ()
    """Warnings for the log at the start, one line each: accepted settings that may not have the intended effect."""

    @property
    def path_prefix(self) -> str:
        """Prefix of links: ``/cost``, or empty. The service answers with and without it."""
        return urlsplit(self.serving.external_url).path


OPTIONS = options_of(ServeSettings)
"""Every option of the service."""


def load_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], *, extra: tuple[str, ...] = ()
) -> ServeSettings:
    """Return the service's settled configuration.

    Args:
        flags: Option key, with hyphens or underscores, to its text; ``None`` is not given. ``config`` is the file.
        environ: The process environment.
        extra: Problems that the caller found, which are reported together with those found here.

    Raises:
        ConfigError: Lists all mistakes, one line each.
    """
    problems = list(extra)
    values, given = settle(OPTIONS, flags, environ, problems)
    problems += [
        *prometheus_problems(values, given),
        *_path_problems(values),
        *mistakes_in("web-config", values["web-config"]),
    ]
    if problems:
        raise ConfigError(*problems)
    return ServeSettings(**groups_of(ServeSettings, values), warnings=tuple(unknown_variables(OPTIONS, environ)))


def _path_problems(values: dict[str, Any]) -> list[str]:
    store = values["store"]
    if store is None:
        return []
    if store.is_dir():
        return [f"store: {store} is a directory; allowed: a file in it, such as {store / 'days.sqlite'}"]
    if not store.absolute().parent.is_dir():
        return [f"store: {store.absolute().parent} is no directory; make it, or choose another place"]
    return []
