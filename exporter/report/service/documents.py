"""What the API tells besides reports, as plain values: units are in the keys, times Unix seconds, ``None`` unknown."""

from collections.abc import Mapping, Sequence
from typing import Any

from exporter.report.budget.values import BudgetState
from exporter.report.fleet.live import LivePod
from exporter.report.fleet.report import FleetReport
from exporter.report.fleet.values import UNALLOCATED, UNATTRIBUTED, Figures, Window
from exporter.report.service.book import Freshness, Funnel, MonthMoney


def month_document(month: MonthMoney) -> dict[str, Any]:
    """This month in one currency."""
    return {
        "currency": month.currency,
        "spent": month.spent,
        "forecast": month.forecast,
        "last_month": month.last_month,
    }


def funnel_document(funnel: Funnel | None) -> dict[str, Any] | None:
    """Mean numbers of GPUs; ``None`` where no hour was recorded."""
    if funnel is None:
        return None
    return {
        "total": funnel.total,
        "allocated": funnel.allocated,
        "active": funnel.at_work,
        "effective": funnel.effective,
        "unknown": funnel.unknown,
    }


def money_documents(report: FleetReport) -> list[dict[str, Any]]:
    """By currency what all GPUs of a report have cost, in parts that sum to ``total``."""
    held = [line.figures for line in report.held]
    apart = {
        kind: [line.figures for line in report.apart if line.key.kind == kind] for kind in (UNATTRIBUTED, UNALLOCATED)
    }
    return [
        {
            "currency": currency,
            "total": _cost([report.total], currency),
            "active": sum(figures.money_in(currency).active for figures in held),
            "idle": sum(figures.money_in(currency).idle for figures in held),
            "unknown": sum(figures.money_in(currency).unknown for figures in held),
            "unattributed": _cost(apart[UNATTRIBUTED], currency),
            "unallocated": _cost(apart[UNALLOCATED], currency),
        }
        for currency in report.currencies
    ]


def _cost(many: Sequence[Figures], currency: str) -> float:
    return sum(figures.money_in(currency).total for figures in many)


def budget_document(state: BudgetState) -> dict[str, Any]:
    """One budget and how it stands."""
    budget = state.budget
    return {
        "name": budget.name,
        "owner": dict(sorted(budget.owner.items())),
        "period": budget.period,
        "currency": budget.currency,
        "amount": budget.amount,
        "include_unallocated": budget.include_unallocated,
        "from_seconds": state.period.start_seconds,
        "to_seconds": state.period.end_seconds,
        "spent": state.spent if state.known else None,
        "projected": state.projected,
        "unpriced_seconds": state.unpriced_seconds if state.known else None,
        "thresholds": list(budget.thresholds),
        "passed": list(state.passed),
        "as_of_seconds": state.as_of_seconds,
        "known": state.known,
        "notes": list(state.notes),
    }


def pod_document(use: LivePod) -> dict[str, Any]:
    """One pod on one device."""
    return {
        "cluster": use.cluster or None,
        "node": use.node,
        "gpu_uuid": use.uuid,
        "gpu_index": use.gpu,
        "gpu_instance": use.gpu_instance or None,
        "mig_profile": use.mig_profile or None,
        "model": use.model or None,
        "namespace": use.namespace,
        "pod": use.pod,
        "container": use.container or None,
        "gpu_share_ratio": use.share_ratio,
        "activity_ratio": use.activity_ratio,
        "idle_for_seconds": use.idle_for_seconds,
        "age_seconds": use.age_seconds,
        "memory_used_bytes": use.memory_used_bytes,
        "cost_per_hour": [{"currency": currency, "cost": cost} for currency, cost in sorted(use.cost_per_hour.items())],
        "live": use.live,
    }


def freshness_document(freshness: Freshness) -> dict[str, Any]:
    """How new all is."""
    return {
        "now_seconds": freshness.now_seconds,
        "first_day_seconds": freshness.first_day_seconds,
        "closed_until_seconds": freshness.closed_until_seconds,
        "read_until_seconds": freshness.read_until_seconds,
        "problem": freshness.problem or None,
        "simulated": freshness.simulated,
    }


def window_document(window: Window) -> Mapping[str, Any]:
    """A period, its end outside."""
    return {
        "from_seconds": window.start_seconds,
        "to_seconds": window.end_seconds,
        "label": window.label or None,
    }
