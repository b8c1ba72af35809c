"""A running total on one line of the ledger, and from when on it is shown."""

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
_MOST = 1e300
"""Two figures below this can be added."""
HIDDEN = Totals()
NOTHING = Money()


@dataclass(slots=True)
class _Birth:
    """Since when a series is there; it shows 0 until it has been seen for long enough, then the truth for ever."""

    at_seconds: float | None = None
    """Of the clock that nobody sets; ``None`` in a process that has not yet come across the series."""
    over: bool = False

    def shows(self, now: float, birth_seconds: float) -> bool:
        if self.at_seconds is None or now < self.at_seconds:
            self.at_seconds = now
        self.over = self.over or now - self.at_seconds >= birth_seconds
        return self.over


@dataclass(slots=True, kw_only=True)
class _Purse:
    """Money in one currency; a series of its own, which may be born later than the seconds."""

    total: float = 0.0
    idle: float = 0.0
    birth: _Birth = field(default_factory=_Birth)


@dataclass(slots=True, kw_only=True)
class Tally:
    """What has been added up for an account or a pod; only ever grows."""

    active_seconds: float = 0.0
    idle_seconds: float = 0.0
    unknown_seconds: float = 0.0
    energy_joules: float = 0.0
    energy_unknown_seconds: float = 0.0
    unpriced_seconds: float = 0.0
    purses: dict[str, _Purse] = field(default_factory=dict)
    birth: _Birth = field(default_factory=_Birth)
    changed: float | None = None
    """When something was last added; ``None`` in a process that has not yet."""
    _shown: Totals | None = None

    @property
    def withheld_seconds(self) -> float:
        """Allocated seconds that ``shown`` still shows as zeros."""
        return 0.0 if self.birth.over else self.active_seconds + self.idle_seconds + self.unknown_seconds

    def add(self, portion: Portion, currency: str | None, paid: Money, now: float) -> None:
        """Add a portion.

        Args:
            portion: The seconds and joules.
            currency: Of the price of this moment; ``None`` where there is no price.
            paid: What the portion costs at that price.
            now: Seconds of a clock that nobody sets.
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
            purse = self._purse(currency, now)
            purse.total += paid.total
            purse.idle += paid.idle
        self._touch(now)

    def absorb(self, other: "Tally", now: float) -> None:
        """Take over everything of a line that ends."""
        for name in PLAIN:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for currency, theirs in other.purses.items():
            purse = self._purse(currency, now)
            purse.total += theirs.total
            purse.idle += theirs.idle
        self._touch(now)

    def _purse(self, currency: str, now: float) -> _Purse:
        purse = self.purses.get(currency)
        if purse is None:
            purse = self.purses[currency] = _Purse(birth=_Birth(at_seconds=now))
        return purse

    def _touch(self, now: float) -> None:
        if self.birth.at_seconds is None:
            self.birth.at_seconds = now
        self.changed = now
        self._shown = None

    def shown(self, now: float, birth_seconds: float) -> Totals:
        """Return what is to be shown: zeros at first."""
        if self._shown is not None:
            return self._shown
        # A currency's time of zeros runs beside the line's, not after it.
        paid = {currency: purse.birth.shows(now, birth_seconds) for currency, purse in self.purses.items()}
        if not self.birth.shows(now, birth_seconds):
            return Totals(money=dict.fromkeys(paid, NOTHING)) if paid else HIDDEN
        money = {
            currency: Money(total=purse.total, idle=purse.idle) if paid[currency] else NOTHING
            for currency, purse in self.purses.items()
        }
        totals = Totals(
            active_seconds=self.active_seconds,
            idle_seconds=self.idle_seconds,
            unknown_seconds=self.unknown_seconds,
            energy_joules=self.energy_joules,
            energy_unknown_seconds=self.energy_unknown_seconds,
            unpriced_seconds=self.unpriced_seconds,
            money=money,
        )
        if all(paid.values()):
            self._shown = totals
        return totals

    def dump(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        data: dict[str, Any] = {name: getattr(self, name) for name in PLAIN}
        data["shown"] = self.birth.over
        data["money"] = {
            currency: {"total": purse.total, "idle": purse.idle, "shown": purse.birth.over}
            for currency, purse in self.purses.items()
        }
        return data


def tally_of(data: Mapping[str, Any]) -> Tally:
    """Read what ``Tally.dump`` wrote.

    Raises:
        KeyError, TypeError, ValueError: It is not that, or a figure in it cannot be.
    """
    return Tally(
        active_seconds=amount(data, "active_seconds"),
        idle_seconds=amount(data, "idle_seconds"),
        unknown_seconds=amount(data, "unknown_seconds"),
        energy_joules=amount(data, "energy_joules"),
        energy_unknown_seconds=amount(data, "energy_unknown_seconds"),
        unpriced_seconds=amount(data, "unpriced_seconds"),
        birth=_Birth(over=bool(data["shown"])),
        purses={
            currency: _Purse(
                total=amount(purse, "total"), idle=amount(purse, "idle"), birth=_Birth(over=bool(purse["shown"]))
            )
            for currency, purse in data["money"].items()
        },
    )


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
