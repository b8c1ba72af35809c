"""Which server answers: its name and version for the report, and how long it keeps data, as far as it tells."""

import re
from dataclasses import dataclass

from exporter.errors import PrometheusError
from exporter.report.fleet.prometheus import PrometheusClient
from exporter.report.fleet.values import DAY_SECONDS, HOUR_SECONDS

_DURATION = re.compile(r"(\d+)(y|w|d|h|m(?!s)|s)")
_SECONDS = {"y": 365 * DAY_SECONDS, "w": 7 * DAY_SECONDS, "d": DAY_SECONDS, "h": HOUR_SECONDS, "m": 60, "s": 1}
_FATAL = frozenset({"unreachable", "no_such_name", "tls", "unauthorised", "forbidden", "redirected", "credentials"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What answers."""

    name: str
    """``Prometheus``, ``VictoriaMetrics``, ``Thanos``, ``Grafana Mimir``, ``Prometheus API`` where it is not known."""
    version: str = ""
    """Empty where it does not tell: VictoriaMetrics names a Prometheus that it is like."""
    retention_seconds: float | None = None
    """``None`` where it does not tell."""

    @property
    def title(self) -> str:
        """For the report: ``Prometheus 2.42.0``."""
        return f"{self.name} {self.version}".rstrip()


async def detect(client: PrometheusClient) -> Engine:
    """Ask what answers.

    Raises:
        PrometheusError: It cannot be asked at all: wrong address, no access. One that only does not tell is no error.
    """
    try:
        answer = await client.status("buildinfo")
    except PrometheusError as error:
        if error.reason in _FATAL:
            raise
        return Engine(name="Prometheus API")
    data = answer.data if isinstance(answer.data, dict) else {}
    version = str(data.get("version", "")).removeprefix("v").partition("+")[0][:40]
    if answer.headers and "x-server-hostname" in answer.headers:
        return Engine(name="VictoriaMetrics")
    application = str(data.get("application", ""))[:40]
    if application:
        return Engine(name=application, version=version)
    if version.startswith("0."):
        return Engine(name="Thanos", version=version)
    return Engine(name="Prometheus", version=version, retention_seconds=await _retention_seconds(client))


async def _retention_seconds(client: PrometheusClient) -> float | None:
    try:
        answer = await client.status("runtimeinfo")
    except PrometheusError:
        return None  # access to it is often not given; nothing but a note depends on it
    told = answer.data.get("storageRetention", "") if isinstance(answer.data, dict) else ""
    return seconds_of(str(told))


def seconds_of(retention: str) -> float | None:
    """Seconds of ``15d`` or of ``15d or 10GiB``; ``None`` where only a size limits it, or it is something else."""
    text = retention.partition(" or ")[0]
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return float(sum(int(number) * _SECONDS[unit] for number, unit in parts))
