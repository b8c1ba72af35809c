"""What the rules sum over a simulated fleet's owners, by namespace, team, model and cluster."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from exporter.simulator.fleet_ledger import NodeLedger
from exporter.simulator.fleet_owners import NOBODY, UNATTRIBUTED
from exporter.simulator.fleet_plan import HOUR_SECONDS
from exporter.simulator.fleet_series import labels, money_text, seconds_text, series
from exporter.simulator.fleet_truth import Sum

_MS = 1000
_HOUR_MS = HOUR_SECONDS * _MS
_AT_WORK_RATIO = 0.05
_FREE_SERIES = {NOBODY.kind: "unallocated", UNATTRIBUTED.kind: "unattributed"}


@dataclass(slots=True)
class LevelSums:
    """What the rules sum over owners: by namespace, team, model and cluster. Several can be merged."""

    rows: dict[tuple[str, str, str, str, str, str], dict[int, Sum]] = field(default_factory=dict)
    """By cluster, kind where it is nobody's, namespace, team, model and currency; then by hour."""
    working: dict[str, dict[int, float]] = field(default_factory=dict)
    """By cluster and hour: GPUs that are held and at work."""

    def add(self, ledger: NodeLedger) -> None:
        """Add one node."""
        node = ledger.node
        for (owner, _), lines in ledger.lines.items():
            kind = owner.kind if owner.kind in _FREE_SERIES else ""
            rows = self.rows.setdefault(
                (node.cluster, kind, owner.namespace, owner.team, node.spec.name, node.currency), {}
            )
            for hour, line in lines.items():
                rows.setdefault(hour, Sum()).add(line)
        working = self.working.setdefault(node.cluster, {})
        for (_, owner), hours in ledger.uses.items():
            if owner == UNATTRIBUTED:
                continue
            for hour, (active, idle, unknown) in hours.items():
                if active and active >= _AT_WORK_RATIO * (active + idle):
                    working[hour] = working.get(hour, 0.0) + (active + idle + unknown) / _HOUR_MS

    def merge(self, other: "LevelSums") -> None:
        """Add what another has summed."""
        for key, hours in other.rows.items():
            rows = self.rows.setdefault(key, {})
            for hour, row in hours.items():
                rows.setdefault(hour, Sum()).add(row)
        for cluster, gpus in other.working.items():
            working = self.working.setdefault(cluster, {})
            for hour, count in gpus.items():
                working[hour] = working.get(hour, 0.0) + count

    def text(self, ending: tuple[str, ...], extra: Mapping[str, str]) -> Iterator[str]:
        """All series of all levels."""
        for level, place, label in (("namespace", 2, "workload_namespace"), ("team", 3, "team"), ("model", 4, "model")):
            for (cluster, value, currency), rows in self._collapsed(place).items():
                yield from _level(level, {**extra, "cluster": cluster, label: value}, currency, rows, ending)
        for (cluster, _, currency), rows in self._collapsed(None).items():
            yield from _level("cluster", {**extra, "cluster": cluster}, currency, rows, ending)
        yield from self._apart(ending, extra)
        yield from self._funnel(ending, extra)

    def _collapsed(self, place: int | None, kind: str = "") -> dict[tuple[str, str, str], dict[int, Sum]]:
        """By cluster, value of the level and currency ("" for all currencies together)."""
        found: dict[tuple[str, str, str], dict[int, Sum]] = {}
        for key, hours in self.rows.items():
            if key[1] != kind:
                continue
            value = "" if place is None else key[place]
            for currency in ("", key[5]):
                rows = found.setdefault((key[0], value, currency), {})
                for hour, row in hours.items():
                    rows.setdefault(hour, Sum()).add(row)
        return {key: dict(sorted(rows.items())) for key, rows in sorted(found.items())}

    def _apart(self, ending: tuple[str, ...], extra: Mapping[str, str]) -> Iterator[str]:
        for kind, word in _FREE_SERIES.items():
            for (cluster, _, currency), rows in self._collapsed(None, kind).items():
                inside = labels(**extra, cluster=cluster, currency=currency)
                if currency:
                    paid = ((hour, row.cost) for hour, row in rows.items())
                    yield series(f"cluster:gpu_{word}_cost:delta1h", inside, paid, ending)
                else:
                    lasted = ((h, (row.active_ms + row.idle_ms + row.unknown_ms) / _MS) for h, row in rows.items())
                    yield series(f"cluster:gpu_{word}_seconds:delta1h", inside, lasted, ending)

    def _funnel(self, ending: tuple[str, ...], extra: Mapping[str, str]) -> Iterator[str]:
        capacity: dict[str, dict[int, int]] = {}
        held: dict[str, dict[int, int]] = {}
        active: dict[str, dict[int, int]] = {}
        for (cluster, kind, *_), hours in self.rows.items():
            for hour, row in hours.items():
                lasted = row.active_ms + row.idle_ms + row.unknown_ms
                counted = (capacity, lasted), (held, 0 if kind else lasted), (active, 0 if kind else row.active_ms)
                for sums, more in counted:
                    sums.setdefault(cluster, {}).setdefault(hour, 0)
                    sums[cluster][hour] += more
        for cluster in sorted(capacity):
            inside = labels(**extra, cluster=cluster)
            hours_of = sorted(capacity[cluster].items())
            metered = ((hour, ms / _MS) for hour, ms in hours_of)
            yield series("cluster:gpu_capacity_seconds:delta1h", inside, metered, ending)
            for word, counts in (("capacity", capacity), ("allocated", held), ("effective", active)):
                gauges = ((hour, ms / _HOUR_MS) for hour, ms in sorted(counts[cluster].items()))
                yield series(f"cluster:gpu_{word}:sum", inside, gauges, ending)
            at_work = sorted(self.working.get(cluster, {}).items())
            yield series("cluster:gpu_active:sum", inside, ((h, round(gpus, 6)) for h, gpus in at_work), ending)


def _level(
    level: str, inside: Mapping[str, str], currency: str, rows: Mapping[int, Sum], ending: tuple[str, ...]
) -> Iterator[str]:
    """Seconds of all currencies together, or the money of one."""
    return money_text(level, inside, currency, rows, ending) if currency else seconds_text(level, inside, rows, ending)
