"""Explains what a bill has more, or less, than the ledger: rate by rate and hour by hour, to the cent."""

from collections.abc import Iterable
from collections.abc import Mapping as Map
from decimal import Decimal

from exporter.report.fleet.values import DAY_SECONDS, Dimension, FleetLedger
from exporter.report.focus.amounts import exact, parts_of, quotient, rounded
from exporter.report.reconcile.bill import Bill, BillGroup
from exporter.report.reconcile.mapping import Mapping
from exporter.report.reconcile.ours import Metered, Place, metered, recorded_ratios
from exporter.report.reconcile.values import Explanation, ExplanationKind, Group, Reconciliation, Sort

RECONCILE_DIMENSIONS: frozenset[Dimension] = frozenset(("cluster", "node", "model"))
"""What a ledger must be read by to be reconciled."""
_CENTS = 2
_OF_HOURS: frozenset[ExplanationKind] = frozenset(("not_recorded", "not_metered", "not_billed", "unpriced"))
_FEW_HOURS = 0.05
_ZERO = Decimal(0)
_Part = tuple[ExplanationKind, str, Decimal, float | None]


def reconcile(ledger: FleetLedger, bill: Bill, mapping: Mapping, *, gpu_part: float = 1.0) -> Reconciliation:
    """Hold a bill against the ledger, by instance type, region and currency.

    Args:
        ledger: Read by ``RECONCILE_DIMENSIONS``, over the window that the bill was read for.
        bill: Of the same window.
        mapping: What ties them.
        gpu_part: The GPUs' part of a node's price that our prices are for, as the price book has it.
    """
    ours = metered(ledger, bill, mapping)
    recorded = recorded_ratios(ledger)
    theirs: dict[Place, dict[str, BillGroup]] = {}
    for key, group in bill.groups.items():
        theirs.setdefault((key.instance_type, key.region), {})[key.currency] = group
    groups: list[Group] = []
    notes = [*ledger.notes]
    if any(end % DAY_SECONDS for end in (ledger.window.start_seconds, ledger.window.end_seconds)):
        notes.append("the period is not of whole UTC days: a line of a bill for a day counts where it begins")
    for place in sorted({*ours, *theirs}):
        mine = ours.get(place, Metered())
        billed = theirs.get(place, {})
        currencies = sorted({*billed, *mine.cost})
        if not currencies:
            notes.append(f"{_name(place)}: {mine.gpu_hours:,.1f} GPU-hours have no price and are on no bill")
        if len(currencies) > 1:
            groups += _not_compared(place, billed, mine, currencies)
        for currency in currencies if len(currencies) == 1 else ():
            explain = _Gap(place, currency, billed.get(currency, BillGroup()), mine, mapping)
            groups.append(explain.group(recorded, exact(gpu_part)))
    clusters = {name for chunk in ledger.chunks for name in chunk.recorded_hours}
    return Reconciliation(
        window=ledger.window,
        groups=tuple(sorted(groups, key=lambda group: (-abs(group.gap), group.instance_type, group.currency))),
        scope=bill.scope,
        expected_hours=ledger.window.hours * max(len(clusters), 1),
        recorded_hours=sum(sum(chunk.recorded_hours.values()) for chunk in ledger.chunks),
        failures=ledger.failures,
        notes=(*notes, *(f"{one.file}:{one.line}: {one.what}" for one in bill.malformed)),
    )


def _name(place: Place) -> str:
    return " in ".join(filter(None, place)) or "nodes without an instance type"


def _not_compared(place: Place, billed: Map[str, BillGroup], mine: Metered, currencies: Iterable[str]) -> list[Group]:
    on_bill, in_ledger = ", ".join(sorted(billed)) or "nothing", ", ".join(sorted(mine.cost)) or "nothing"
    note = f"the bill is in {on_bill}, the ledger in {in_ledger}; money is never converted"
    found = []
    for currency in currencies:
        group = billed.get(currency, BillGroup())
        found.append(
            Group(
                instance_type=place[0],
                region=place[1],
                currency=currency,
                billed=rounded(group.amortised + sum(group.extras.values(), _ZERO), _CENTS),
                invoiced=rounded(group.invoiced, _CENTS),
                metered=rounded(mine.cost.get(currency, _ZERO), _CENTS),
                billed_gpu_hours=None,
                metered_gpu_hours=mine.priced_hours.get(currency, 0.0),
                explanations=(),
                note=note,
            )
        )
    return found


class _Gap:
    """The gap of like instances in one currency, and what it is made of."""

    def __init__(self, place: Place, currency: str, billed: BillGroup, mine: Metered, mapping: Mapping) -> None:
        self.place = place
        self.currency = currency
        self.billed = billed
        self.mine = mine
        self.gpus = mapping.gpus.get(place[0]) or billed.gpus or mine.gpus
        self.instance_hours = sum(billed.hours.values(), _ZERO)
        self.gpu_hours = sum(billed.gpu_hours.values(), _ZERO)
        self.hours = self._gpu_hours()
        self.cost = mine.cost.get(currency, _ZERO)
        self.total = billed.amortised + sum(billed.extras.values(), _ZERO)

    def _gpu_hours(self) -> Decimal | None:
        """Billed; ``None`` where the bill has money without hours, or it is not known how many GPUs an instance has."""
        if not self.instance_hours and (self.gpu_hours or not self.billed.amortised):
            return self.gpu_hours
        return self.instance_hours * self.gpus + self.gpu_hours if self.gpus and self.instance_hours else None

    def group(self, recorded: Map[int, float], gpu_part: Decimal) -> Group:
        parts = [*self._time(recorded, gpu_part), *self._extras()]
        left = self.total - self.cost - sum((amount for _, _, amount, _ in parts), _ZERO)
        if rounded(left, _CENTS):
            why = "no hours of instances, or of their GPUs, on the bill to tell a rate by"
            if self.instance_hours and not self.gpus:
                why = "it is not known how many GPUs such an instance has: give it in --map"
            parts.append(("unexplained", why, left, None))
        billed, cost = rounded(self.total, _CENTS), rounded(self.cost, _CENTS)
        amounts = parts_of(billed - cost, [amount for _, _, amount, _ in parts], _CENTS)
        if not parts and billed != cost:  # by rounding alone
            parts, amounts = [("unexplained", "rounding", _ZERO, None)], [billed - cost]
        return Group(
            instance_type=self.place[0],
            region=self.place[1],
            currency=self.currency,
            billed=billed,
            invoiced=rounded(self.billed.invoiced, _CENTS),
            metered=cost,
            billed_gpu_hours=None if self.hours is None else float(self.hours),
            metered_gpu_hours=self.mine.gpu_hours,
            explanations=tuple(
                Explanation(kind=kind, words=words, amount=amount, gpu_hours=hours)
                for (kind, words, _, hours), amount in zip(parts, amounts, strict=True)
                if amount or (kind in _OF_HOURS and hours and hours >= _FEW_HOURS)
            ),
        )

    def _time(self, recorded: Map[int, float], gpu_part: Decimal) -> list[_Part]:
        """What the time of instances explains; nothing where it cannot be held against ours."""
        if not self.billed.amortised and not self.instance_hours and not self.gpu_hours:
            words = "metered, and the bill has no hours of such instances"
            return [("not_billed", words, -self.cost, self.mine.gpu_hours)] if self.cost else []
        if not self.hours:
            return []
        rate = quotient(self.billed.amortised, self.hours)
        parts = self._hours(recorded, rate)
        if self.mine.unpriced_hours:
            words = f"GPU-hours without a price of ours, at the bill's {_rate(rate)}"
            hours = self.mine.unpriced_hours
            parts.append(("unpriced", words, rate * exact(hours), hours))
        return parts + self._rates(rate, gpu_part)

    def _hours(self, recorded: Map[int, float], rate: Decimal) -> list[_Part]:
        """Hours that only one side has, at the bill's rate."""
        days = self._by_day() if self.billed.daily else {0: self._whole_window()}
        not_recorded = not_metered = not_billed = 0.0
        for day, (theirs, ours) in days.items():
            missing = max(0.0, theirs - ours)
            mean = sum(recorded.values()) / len(recorded) if recorded else 0.0
            ratio = recorded.get(day, 0.0) if self.billed.daily else mean
            hole = min(missing, theirs * (1 - ratio))
            not_recorded += hole
            not_metered += missing - hole
            not_billed += max(0.0, ours - theirs)
        told = f"at the bill's {_rate(rate)}"
        found: list[_Part] = []
        if not_recorded:
            words = f"hours for which no ledger was recorded, {told}"
            found.append(("not_recorded", words, rate * exact(not_recorded), not_recorded))
        if not_metered:
            words = f"billed, and no agent metered them, {told}"
            found.append(("not_metered", words, rate * exact(not_metered), not_metered))
        if not_billed:
            words = f"metered, and not on the bill, {told}"
            found.append(("not_billed", words, -rate * exact(not_billed), not_billed))
        return found

    def _by_day(self) -> dict[int, tuple[float, float]]:
        gpus = self.gpus or 0
        return {
            day: (
                float(self.billed.hours.get(day, _ZERO)) * gpus + float(self.billed.gpu_hours.get(day, _ZERO)),
                self.mine.hours.get(day, 0.0),
            )
            for day in sorted({*self.billed.hours, *self.mine.hours})
        }

    def _whole_window(self) -> tuple[float, float]:
        return float(self.hours or _ZERO), self.mine.gpu_hours

    def _rates(self, rate: Decimal, gpu_part: Decimal) -> list[_Part]:
        """Differences of rates times the hours that both sides have, from our price to what was paid."""
        hours = self.mine.priced_hours.get(self.currency, 0.0)
        if not hours or not self.hours:
            return []
        priced = exact(hours)
        own = quotient(self.cost, priced)
        listed, contracted = (quotient(one, self.hours) for one in (self.billed.listed, self.billed.contracted))
        of_gpus = f", of which {gpu_part:%} is the GPUs'" if gpu_part != 1 else ""
        return [
            (
                "price_book",
                f"our price of {_rate(own)}, and the bill's list {_rate(listed)}{of_gpus}",
                priced * (listed * gpu_part - own),
                hours,
            ),
            (
                "negotiated",
                f"negotiated price: {_rate(contracted)} instead of {_rate(listed)}",
                priced * (contracted - listed) * gpu_part,
                hours,
            ),
            (
                "commitments",
                f"reservations and savings plans, spread: {_rate(rate)} instead of {_rate(contracted)}",
                priced * (rate - contracted) * gpu_part,
                hours,
            ),
            (
                "not_gpu",
                f"what else is in the node: {1 - gpu_part:%} of {_rate(rate)}",
                priced * rate * (1 - gpu_part),
                hours,
            ),
        ]

    def _extras(self) -> list[_Part]:
        words: dict[Sort, tuple[ExplanationKind, str]] = {
            "unused": ("unused", "paid ahead and not used: reservations, savings plans, capacity"),
            "tax": ("tax", "taxes"),
            "credit": ("credit", "credits, refunds and discounts"),
            "other": ("other", "on these instances beside their time: data transfer, disks, support"),
        }
        extras = self.billed.extras
        return [(*words[sort], extras[sort], None) for sort in words if extras.get(sort)]


def _rate(rate: Decimal) -> str:
    return f"{rate:,.4f}"
