"""What an hour of a GPU has cost each workload over the window, on the mean of what was paid."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from exporter.report.fleet.values import HOUR_SECONDS, UNALLOCATED, UNATTRIBUTED, FleetLedger, LineKey

_NO_OWNER = frozenset({UNALLOCATED, UNATTRIBUTED})


class Price(NamedTuple):
    """Mean money of a GPU-hour."""

    currency: str
    per_hour: float


class Payer(NamedTuple):
    """Who paid, for GPUs of which model."""

    cluster: str
    namespace: str
    kind: str
    workload: str
    team: str
    model: str


@dataclass(slots=True)
class _Sum:
    priced_hours: float = 0.0
    money: dict[str, float] = field(default_factory=dict)

    def price(self) -> Price | None:
        """The mean; ``None`` without money, and in several currencies, of which none is the price."""
        paid = [(currency, total) for currency, total in self.money.items() if total > 0]
        if len(paid) != 1 or self.priced_hours <= 0:
            return None
        return Price(paid[0][0], paid[0][1] / self.priced_hours)


class Prices:
    """Mean prices of a ledger that has cluster, namespace, kind, workload, team and model."""

    def __init__(self, ledger: FleetLedger) -> None:
        self._payers: dict[Payer, _Sum] = {}
        self._models: dict[tuple[str, str], _Sum] = {}
        for chunk in ledger.chunks:
            for key, figures in chunk.lines.items():
                hours = (figures.allocated_seconds - figures.unpriced_seconds) / HOUR_SECONDS
                for total in self._sums(key):
                    total.priced_hours += hours
                    for currency, money in figures.money.items():
                        total.money[currency] = total.money.get(currency, 0.0) + money.total

    def _sums(self, key: LineKey) -> Iterable[_Sum]:
        yield self._models.setdefault((key.cluster, key.model), _Sum())
        if key.kind not in _NO_OWNER:
            payer = Payer(key.cluster, key.namespace, key.kind, key.workload, key.team, key.model)
            yield self._payers.setdefault(payer, _Sum())

    def paid(self, payer: Payer) -> Price | None:
        """What a workload paid; where the ledger knows it by no name, what GPUs of the model cost in its cluster."""
        known = self._payers.get(payer)
        return known.price() if known is not None else self.of_model(payer.cluster, payer.model)

    def of_model(self, cluster: str, model: str) -> Price | None:
        """What GPUs of a model cost in a cluster, whoever held them."""
        known = self._models.get((cluster, model))
        return None if known is None else known.price()

    def models(self, cluster: str) -> Iterable[str]:
        """Models of a cluster that the ledger knows."""
        return (model for place, model in self._models if place == cluster)
