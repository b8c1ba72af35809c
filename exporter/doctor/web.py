"""Checks the web configuration: whether its file, certificates and passwords can be used."""

from pathlib import Path

from exporter.config import web_config
from exporter.doctor.finding import Finding, fail, ok, warn
from exporter.errors import ConfigError

_NAME = "web config"


def face(path: Path) -> Finding:
    """A file with mistakes stops the start."""
    try:
        settings = web_config.load(path)
    except ConfigError as error:
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        return fail(_NAME, f"{error.problems[0]}{more}", "mend it; docs/web-config.md has every key")
    users = f"{len(settings.users)} user{'s' if len(settings.users) != 1 else ''}"
    told = f"{'TLS' if settings.tls else 'plain HTTP'}, {users if settings.users else 'no passwords'}"
    if settings.warnings:
        return warn(_NAME, f"{told}; {settings.warnings[0]}", "see docs/web-config.md")
    return ok(_NAME, told)
