"""What the rules sum over a simulated fleet's nodes: its workloads' ledger, and the funnel of its clusters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpu_simulator.fleet_ledger import NodeLedger
from gpu_simulator.fleet_owners import NOBODY, UNATTRIBUTED, FleetOwner
from gpu_simulator.fleet_plan import HOUR_SECONDS
from gpu_simulator.fleet_series import Ends, labels, money_text, quantities_text, series
from gpu_simulator.fleet_truth import Sum

_MS = 1000
_HOUR_MS = HOUR_SECONDS * _MS
_AT_WORK_RATIO = 0.05

Rows = dict[int, Sum]
"""By hour."""


@dataclass(slots=True)
class FleetSums:
    """What the rules sum over nodes. Several can be merged."""

    rows: dict[tuple[str, FleetOwner, str], dict[str, Rows]] = field(default_factory=dict)
    """By cluster, owner and model; then by currency."""
    working: dict[str, dict[int, float]] = field(default_factory=dict)
    """By cluster and hour: GPUs that are held and at work."""

    def add(self, ledger: NodeLedger) -> None:
        """Add one node."""
        node = ledger.node
        for (owner, _), lines in ledger.lines.items():
            rows = self.rows.setdefault((node.cluster, owner, node.spec.name), {}).setdefault(node.currency, {})
            for hour, line in lines.items():
                rows.setdefault(hour, Sum()).add(line)
        working = self.working.setdefault(node.cluster, {})
        for (_, owner), hours in ledger.uses.items():
            if owner == UNATTRIBUTED:
                continue
            for hour, (active, idle, unknown) in hours.items():
                if active and active >= _AT_WORK_RATIO * (active + idle):
                    working[hour] = working.get(hour, 0.0) + (active + idle + unknown) / _HOUR_MS

    def merge(self, other: "FleetSums") -> None:
        """Add what another has summed."""
        for key, currencies in other.rows.items():
            for currency, hours in currencies.items():
                _add(self.rows.setdefault(key, {}).setdefault(currency, {}), hours)
        for cluster, gpus in other.working.items():
            working = self.working.setdefault(cluster, {})
            for hour, count in gpus.items():
                working[hour] = working.get(hour, 0.0) + count

    def text(self, ending: Ends, extra: Mapping[str, str]) -> Iterator[str]:
        """All series."""
        capacity: dict[str, Rows] = {}
        held: dict[str, Rows] = {}
        for (cluster, owner, model), currencies in sorted(self.rows.items()):
            inside = {
                **extra,
                "cluster": cluster,
                "workload_namespace": owner.namespace,
                "workload_kind": owner.kind,
                "workload_name": owner.name,
                "team": owner.team,
                "cost_labels": owner.labels,
                "model": model,
            }
            every: Rows = {}
            for currency, rows in sorted(currencies.items()):
                _add(every, rows)
                yield from money_text("workload", inside, currency, _in_order(rows), ending.ledger)
            yield from quantities_text("workload", inside, _in_order(every), ending.ledger)
            _add(capacity.setdefault(cluster, {}), every)
            if owner not in {NOBODY, UNATTRIBUTED}:
                _add(held.setdefault(cluster, {}), every)
        for cluster, rows in sorted(capacity.items()):
            yield from self._funnel(cluster, rows, held.get(cluster, {}), ending, extra)

    def _funnel(
        self, cluster: str, capacity: Rows, held: Rows, ending: Ends, extra: Mapping[str, str]
    ) -> Iterator[str]:
        inside = labels(**extra, cluster=cluster)
        metered = [(hour, row.allocated_ms) for hour, row in sorted(capacity.items())]
        of_hours = ((hour, ms / _MS) for hour, ms in metered)
        yield series("cluster:gpu_capacity_seconds:delta1h", inside, of_hours, ending.ledger)
        owned = sorted(held.items())
        for word, counts in (
            ("capacity", metered),
            ("allocated", [(hour, row.allocated_ms) for hour, row in owned]),
            ("effective", [(hour, row.active_ms) for hour, row in owned]),
        ):
            gauges = ((hour, ms / _HOUR_MS) for hour, ms in counts)
            yield series(f"cluster:gpu_{word}:sum", inside, gauges, ending.live)
        at_work = ((hour, round(gpus, 6)) for hour, gpus in sorted(self.working.get(cluster, {}).items()))
        yield series("cluster:gpu_active:sum", inside, at_work, ending.live)


def _add(rows: Rows, more: Rows) -> None:
    for hour, row in more.items():
        rows.setdefault(hour, Sum()).add(row)


def _in_order(rows: Rows) -> Rows:
    return dict(sorted(rows.items()))
