"""The suggestions that follow from measured use: pure, one for each sort of device of a workload, none from a guess."""

from collections.abc import Iterable, Iterator, Sequence

from exporter.report.fleet.values import FleetLedger, Window
from exporter.report.recommend import words
from exporter.report.recommend.held import Lot, idle, lots, trusted
from exporter.report.recommend.prices import Price, Prices
from exporter.report.recommend.resize import Change, Market, change
from exporter.report.recommend.settings import MONTH_HOURS, AdviceSettings
from exporter.report.recommend.values import DeviceUse, Recommendation

_LOADED_BYTES = 1e9
_Workload = tuple[str, str, str, str, str]


def recommend(
    uses: Iterable[DeviceUse], ledger: FleetLedger, settings: AdviceSettings | None = None
) -> tuple[Recommendation, ...]:
    """What could be given back, shared or made smaller, dearest first; those without a price last, the largest first.

    No device is in two suggestions, so that their money adds up, and to no more than the devices cost.

    Args:
        uses: Of one window.
        ledger: Of the same, by cluster, namespace, kind, workload, team and model: for what was paid.
        settings: Thresholds.
    """
    settings = settings or AdviceSettings()
    prices = Prices(ledger)
    workloads: dict[_Workload, list[DeviceUse]] = {}
    for use in (every := tuple(uses)):
        workloads.setdefault((use.cluster, use.namespace, use.kind, use.workload, use.team), []).append(use)
    market = Market(every, prices)
    found = [
        suggestion
        for of_one in workloads.values()
        if of_one[0].namespace not in settings.left_out
        for suggestion in _of_workload(of_one, ledger.window, prices, market, settings)
    ]
    return tuple(sorted(found, key=_rank))


def _rank(one: Recommendation) -> tuple[bool, float, float, str, str, str, str, str]:
    owner = (one.cluster, one.namespace, one.kind, one.workload)
    return (one.per_month is None, -(one.per_month or 0.0), -one.gpus, *owner, one.title)


def _of_workload(
    uses: Sequence[DeviceUse], window: Window, prices: Prices, market: Market, settings: AdviceSettings
) -> Iterator[Recommendation]:
    held = [use for use in uses if use.still_held]
    if any(use.policy == "reserved" for use in uses) or not all(trusted(use, settings) for use in held):
        return
    unused = {use for use in held if idle(use, settings)}
    # What it did on devices that it had before is known as well, or it may only be resting.
    if len(unused) == len(held) and not all(idle(use, settings) for use in uses):
        return
    for lot in lots(uses):
        price = prices.paid(lot.payer)
        of_lot = lot.part(use for use in lot.uses if use in unused)
        if len(unused) == len(held):
            yield _written(lot, _give_back(lot, price), window, price)
        elif of_lot.uses:
            yield _written(of_lot, _fewer(of_lot, lot, held, price), window, price)
        elif (found := change(lot, price, market, settings)) is not None:
            yield _written(lot, found, window, price)


def _give_back(lot: Lot, price: Price | None) -> Change:
    loaded = lot.is_server or (lot.peak_memory_bytes is not None and lot.peak_memory_bytes >= _LOADED_BYTES)
    if loaded:
        risk = "Something is loaded and may wait for requests or for its owner: ask, scale it to 0, and back if missed."
    else:
        risk = "No GPU work would be interrupted. Scale it to 0, and back if it is missed."
    title = f"Give back all {words.devices(lot)}" if len(lot.uses) > 1 else f"Give back {words.each(lot)}"
    fact = "Nothing that it holds did any work."
    return Change("give-back", title, lot.gpus, _money(price, lot), fact, risk, "medium" if loaded else "low")


def _fewer(unused: Lot, lot: Lot, held: Sequence[DeviceUse], price: Price | None) -> Change:
    others = [use for use in held if not any(use is gone for gone in unused.uses)]
    busiest = max(use.peak_ratio or 0.0 for use in others)
    rest = "Its other device" if len(others) == 1 else f"Of its other {len(others)} devices the busiest"
    fact = f"{rest} was {words.ratio(busiest)} active in its busiest hour."
    risk = (
        "A program that splits its work over all its GPUs needs every one, also a stage of a pipeline that waits:"
        " look at its world size and CUDA_VISIBLE_DEVICES, then ask for fewer and compare the time of one run."
    )
    several = len(unused.uses) < len(lot.uses)
    title = f"Give back {len(unused.uses)} of {words.devices(lot)}" if several else f"Give back {words.each(lot)}"
    return Change("fewer-gpus", title, unused.gpus, _money(price, unused), fact, risk, "medium")


def _money(price: Price | None, lot: Lot) -> float | None:
    return None if price is None else price.per_hour * lot.gpus * MONTH_HOURS


def _written(lot: Lot, found: Change, window: Window, price: Price | None) -> Recommendation:
    payer = lot.payer
    return Recommendation(
        advice=found.advice,
        cluster=payer.cluster,
        namespace=payer.namespace,
        kind=payer.kind,
        workload=payer.workload,
        team=payer.team,
        model=payer.model,
        title=found.title,
        gpus=found.gpus,
        currency="" if price is None or found.per_month is None else price.currency,
        per_month=found.per_month,
        evidence=(
            words.activity(lot),
            found.fact,
            *words.memories(lot),
            words.coverage(lot, window),
            words.paid(price),
        ),
        risk=found.risk,
        risk_level=found.level,
        devices=tuple(use.uuid for use in lot.uses),
        nodes=tuple(sorted({use.node for use in lot.uses})),
    )
