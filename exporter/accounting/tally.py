"""A running total: the seconds, joules and money of one account or one pod."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from exporter.model import Money, Portion, Totals

PLAIN = (
    "active_seconds",
    "idle_seconds",
    "unknown_seconds",
    "energy_joules",
    "energy_unknown_seconds",
    "unpriced_seconds",
)
STATES = ("active", "idle", "unknown")
_MOST = 1e300
"""Two figures below this can be added."""


@dataclass(slots=True, kw_only=True)
class _Purse:
    """Money in one currency, by state."""

    active: float = 0.0
    idle: float = 0.0
    unknown: float = 0.0

    def add(self, paid: "Money | _Purse") -> None:
        self.active += paid.active
        self.idle += paid.idle
        self.unknown += paid.unknown


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums for an account or a pod; they only grow."""

    active_seconds: float = 0.0
    idle_seconds: float = 0.0
    unknown_seconds: float = 0.0
    energy_joules: float = 0.0
    energy_unknown_seconds: float = 0.0
    unpriced_seconds: float = 0.0
    purses: dict[str, _Purse] = field(default_factory=dict)
    _totals: Totals | None = None

    @property
    def allocated_seconds(self) -> float:
        """Active, idle and unknown seconds."""
        return self.active_seconds + self.idle_seconds + self.unknown_seconds

    def add(self, portion: Portion, currency: str | None, paid: Money) -> None:
        """Add a portion.

        Args:
            portion: The seconds and joules.
            currency: Currency of the price of this moment; ``None`` where there is no price.
            paid: What the portion costs at that price.
        """
        seconds = portion.allocated_seconds
        self.active_seconds += portion.active_seconds
        self.idle_seconds += portion.idle_seconds
        self.unknown_seconds += portion.unknown_seconds
        if portion.energy_joules is None:
            self.energy_unknown_seconds += seconds
        else:
            self.energy_joules += portion.energy_joules
        if currency is None:
            self.unpriced_seconds += seconds
        else:
            self._purse(currency).add(paid)
        self._totals = None

    def plus(self, other: "Tally") -> "Tally":
        """Return the sum of both as a tally of its own."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in PLAIN}
        total = Tally(**sums)
        for one in (self, other):
            for currency, purse in one.purses.items():
                total._purse(currency).add(purse)
        return total

    def totals(self) -> Totals:
        """Return the sums of this moment; the same object until something is added."""
        if self._totals is None:
            self._totals = Totals(
                active_seconds=self.active_seconds,
                idle_seconds=self.idle_seconds,
                unknown_seconds=self.unknown_seconds,
                energy_joules=self.energy_joules,
                energy_unknown_seconds=self.energy_unknown_seconds,
                unpriced_seconds=self.unpriced_seconds,
                money={
                    currency: Money(active=purse.active, idle=purse.idle, unknown=purse.unknown)
                    for currency, purse in self.purses.items()
                },
            )
        return self._totals

    def dump(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        data: dict[str, Any] = {name: getattr(self, name) for name in PLAIN}
        data["money"] = {
            currency: {state: getattr(purse, state) for state in STATES} for currency, purse in self.purses.items()
        }
        return data

    def _purse(self, currency: str) -> _Purse:
        purse = self.purses.get(currency)
        if purse is None:
            purse = self.purses[currency] = _Purse()
        return purse


def tally_of(data: Mapping[str, Any]) -> Tally:
    """Read what ``Tally.dump`` wrote.

    Raises:
        KeyError, TypeError, ValueError: It is not that, or a figure in it cannot be.
    """
    purses = {
        currency: _Purse(**{state: amount(purse, state) for state in STATES})
        for currency, purse in data["money"].items()
    }
    plain: dict[str, Any] = {name: amount(data, name) for name in PLAIN}
    return Tally(**plain, purses=purses)


def amount(data: Mapping[str, Any], name: str) -> float:
    """Read a figure that only ever grows.

    Raises:
        KeyError, TypeError, ValueError: It is missing, no number, negative or not finite.
    """
    try:
        value = float(data[name])
    except OverflowError:
        value = math.inf
    if not 0 <= value < _MOST:
        raise ValueError(f"{name} is {value}")
    return value


def text(data: Mapping[str, Any], name: str) -> str:
    """Read a text.

    Raises:
        KeyError, TypeError: It is missing or no text.
    """
    value = data[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, not text")
    return value
