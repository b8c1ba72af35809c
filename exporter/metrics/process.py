"""Collects memory, CPU and garbage collection of this process by prometheus_client."""

from collections.abc import Iterable

from prometheus_client import GCCollector, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import CollectorRegistry

from exporter.metrics import catalog
from exporter.metrics.text_format import Family, Kind, labels


class ProcessMetrics:
    """Reads ``/proc/self`` and the garbage collector's counters at each call."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def families(self) -> list[Family]:
        """Return the families of the catalogue, in its order; none without ``/proc``."""
        found = {family.name: family for family in _families(self._registry.collect())}
        return [found[metric.name] for metric in catalog.PROCESS if metric.name in found]


def _families(metrics: Iterable[Metric]) -> Iterable[Family]:
    for metric in metrics:
        kind = Kind.COUNTER if metric.type == "counter" else Kind.GAUGE
        known = catalog.BY_NAME.get(metric.name + "_total" if kind is Kind.COUNTER else metric.name)
        if known is not None:
            values = {
                labels(*sorted(sample.labels.items())): sample.value
                for sample in metric.samples
                if sample.name == known.name
            }
            yield Family(name=known.name, kind=kind, help=known.help, values=values)
