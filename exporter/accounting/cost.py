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
        Hours at the hourly price, plus measured energy where the price asks for it. Energy is idle money in the part
        that idle seconds are of all; energy without any second was used, not idled away.
    """
    total = portion.allocated_seconds / SECONDS_PER_HOUR * price.per_hour
    idle = portion.idle_seconds / SECONDS_PER_HOUR * price.per_hour
    if price.per_kwh and portion.energy_joules is not None:
        energy = portion.energy_joules / JOULES_PER_KWH * price.per_kwh
        total += energy
        if portion.allocated_seconds > 0:
            idle += energy * (portion.idle_seconds / portion.allocated_seconds)
    return Money(total=total, idle=idle)
