"""Measured uses and ledgers to make suggestions from, each a workload of one H100 that is as busy as it is told."""

from collections.abc import Iterable

from exporter.cost.dimensions import LineKey
from exporter.cost.holdings import PAYER, HeldDevice
from exporter.cost.ledger import Chunk, Figures, FleetLedger
from exporter.cost.window import Window
from exporter.model.ledger import ByState

END_SECONDS = 1_789_999_200
WEEK = Window(start_seconds=END_SECONDS - 7 * 86_400, end_seconds=END_SECONDS, label="7d")
HOURS = 168.0
H100, A100, L40S, T4 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "Tesla T4"
GB = 1e9


def use(number: int = 0, activity: float = 0.5, /, **others: object) -> HeldDevice:
    """A device that was held all the week; ``activity`` is its mean, its 95 % and its peak."""
    figures: dict[str, object] = {
        "cluster": "",
        "node": "n1",
        "uuid": f"GPU-{number}",
        "model": H100,
        "namespace": "ml",
        "kind": "Deployment",
        "workload": "w",
        "team": "t",
        "share_ratio": 1.0,
        "held_hours": HOURS,
        "measured_hours": HOURS,
        "mean_ratio": activity,
        "p95_ratio": activity,
        "peak_ratio": activity,
        "peak_memory_bytes": 70 * GB,
        "memory_total_bytes": 85 * GB,
    }
    values = figures | others
    values["mode"] = "mig" if values.get("mig_profile") else "exclusive" if values["share_ratio"] == 1 else "shared"
    return HeldDevice(**with_owner(values))  # type: ignore[arg-type]


def with_owner(values: dict[str, object]) -> dict[str, object]:
    """Values with those that name an owner put together."""
    names = {name: str(value) for name, value in values.items() if name in LineKey._fields}
    return {"owner": LineKey(**names), **{name: value for name, value in values.items() if name not in names}}


def ledger(*lines: tuple[LineKey, Figures]) -> FleetLedger:
    """A week's ledger of one chunk."""
    return FleetLedger(window=WEEK, dimensions=PAYER, chunks=(Chunk(window=WEEK, lines=dict(lines)),))


def paid(per_hour: float, hours: float, *, currency: str = "USD", **key: str) -> tuple[LineKey, Figures]:
    """A line of so many GPU-hours at a price."""
    names = {"namespace": "ml", "kind": "Deployment", "workload": "w", "team": "t", "model": H100} | key
    money = {currency: ByState(unprofiled=per_hour * hours)}
    return LineKey(**names), Figures(seconds=ByState(unprofiled=hours * 3600), money=money)


ACTIVE = ByState(unprofiled=1)


def prices_of(uses: Iterable[HeldDevice], per_hour: float, parts: ByState = ACTIVE) -> FleetLedger:
    """What those would have paid at one price, all of it in parts that sum to 1."""
    hours: dict[LineKey, float] = {}
    for one in uses:
        key = one.owner.at(PAYER)
        hours[key] = hours.get(key, 0.0) + one.held_hours * one.share_ratio
    return ledger(
        *(
            (key, Figures(seconds=parts.scaled(held * 3600), money={"USD": parts.scaled(held * per_hour)}))
            for key, held in hours.items()
        )
    )
