"""The one price arithmetic: what a portion of a GPU costs at a price."""

from exporter.model import Money, Portion, Price

SECONDS_PER_HOUR = 3600.0
JOULES_PER_KWH = 3.6e6


def money(portion: Portion, price: Price) -> Money:
    """What a portion costs, in the price's currency.

    Args:
        portion: Share-weighted seconds, and joules where they were measured.
        price: Of a whole physical GPU, of the portion's time.

    Returns:
        Hours at the hourly price, plus measured energy where the price asks for it. Energy is divided among the states
        as the seconds are; energy without any second is active money.
    """
    per_second = price.per_hour / SECONDS_PER_HOUR
    seconds = portion.allocated_seconds
    energy = (portion.energy_joules or 0.0) / JOULES_PER_KWH * price.per_kwh
    if energy and not seconds:
        return Money(active=energy)
    if energy:
        per_second += energy / seconds
    return Money(
        active=portion.active_seconds * per_second,
        idle=portion.idle_seconds * per_second,
        unknown=portion.unknown_seconds * per_second,
    )
