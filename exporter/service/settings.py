"""Settings of the cost service, from flags, environment, file and defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from exporter.config.options import BookSettings, LoggingSettings, ServiceServingSettings, group, groups_of, options_of
from exporter.config.prometheus_options import GROUP, PrometheusSettings, settings_of
from exporter.config.resolve import mistakes_in, settle, unknown_variables
from exporter.errors import ConfigError

# ruff: noqa: RUF009 - the calls in the class make its fields.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Settled configuration of the service; every value is valid. Made by ``load_settings``."""

    serving: ServiceServingSettings = group("Serving", ServiceServingSettings)
    books: BookSettings = group("Reading and keeping", BookSettings)
    logging: LoggingSettings = group("Running", LoggingSettings)
    prometheus: PrometheusSettings = group(GROUP, PrometheusSettings)
    warnings: tuple[str, ...] = ()
    """One line each: what was accepted and does not mean what it may seem to mean; to be logged at the start."""

    @property
    def path_prefix(self) -> str:
        """What links begin with: ``/cost``, or nothing. The service answers with and without it."""
        return urlsplit(self.serving.external_url).path


OPTIONS = options_of(ServeSettings)
"""Every option of the service."""


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
    values, _ = settle(OPTIONS, flags, environ, problems)
    before = len(problems)
    prometheus = settings_of(values, problems)
    if prometheus is None and len(problems) == before and values["prometheus"] is None:
        problems.append(
            "prometheus: not given; give an address, as http://prometheus:9090, by --prometheus or"
            " GPU_COST_EXPORTER_PROMETHEUS"
        )
    problems += _path_problems(values)
    problems += mistakes_in("web-config", values["web-config"])
    if problems or prometheus is None:
        raise ConfigError(*problems)
    groups = {**groups_of(ServeSettings, values), "prometheus": prometheus}
    return ServeSettings(**groups, warnings=tuple(unknown_variables(OPTIONS, environ)))


def _path_problems(values: dict[str, Any]) -> list[str]:
    store = values["store"]
    if store is None:
        return []
    if store.is_dir():
        return [f"store: {store} is a directory; allowed: a file in it, such as {store / 'days.sqlite'}"]
    if not store.absolute().parent.is_dir():
        return [f"store: {store.absolute().parent} is no directory; make it, or choose another place"]
    return []
