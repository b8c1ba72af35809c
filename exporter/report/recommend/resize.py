"""What busy devices could be exchanged for: a smaller MIG profile, a share of one, or a smaller model."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from exporter.report.recommend import words
from exporter.report.recommend.held import Lot
from exporter.report.recommend.prices import Price, Prices
from exporter.report.recommend.profiles import Profile, is_big, profiles_of
from exporter.report.recommend.settings import MONTH_HOURS, AdviceSettings
from exporter.report.recommend.values import Advice, DeviceUse, RiskLevel

_ROUNDING = 1e-9
_BURSTS = "Hours hide bursts of minutes, which take longer on less."
_SEVERAL = (
    " It holds several: a program that joins them cannot join instances or shares, and NCCL does not work between"
    " instances. Only for one process a device."
)
_SERVER = " It looks like a server that takes memory in advance: measure what it needs before."


class Change(NamedTuple):
    """A suggestion before it is written out."""

    advice: Advice
    title: str
    gpus: float
    per_month: float | None
    fact: str
    risk: str
    level: RiskLevel


class Market:
    """Models in the fleet, the memory of a whole GPU of each, and what one costs."""

    def __init__(self, uses: Iterable[DeviceUse], prices: Prices) -> None:
        self._prices = prices
        self._memory: dict[tuple[str, str], float] = {}
        for use in uses:
            if not use.gpu_instance and not use.mig_profile and use.memory_total_bytes is not None:
                self._memory[use.cluster, use.model] = use.memory_total_bytes

    def cheapest(self, cluster: str, least_bytes: float, below: Price) -> tuple[str, Price] | None:
        """The cheapest smaller model of a cluster that has so much memory and costs less; ``None`` where none does."""
        found = [
            (price.per_hour, model, price)
            for model in self._prices.models(cluster)
            if not is_big(model) and self._memory.get((cluster, model), 0.0) >= least_bytes
            if (price := self._prices.of_model(cluster, model)) is not None
            if price.currency == below.currency and price.per_hour < below.per_hour
        ]
        return min(found)[1:] if found else None


def change(lot: Lot, price: Price | None, market: Market, settings: AdviceSettings) -> Change | None:
    """The exchange that saves most, where there is one; of equal ones the first that keeps the model."""
    peak = lot.peak_memory_bytes
    if peak is None or lot.memory_total_bytes is None or not (lot.whole or lot.profile):
        return None
    found = [*_same_model(lot, peak, price, settings), *_smaller_model(lot, peak, price, market, settings)]
    return max(found, key=lambda one: -1.0 if one.per_month is None else one.per_month) if found else None


def _same_model(lot: Lot, peak: float, price: Price | None, settings: AdviceSettings) -> Iterator[Change]:
    if lot.is_server and not settings.judge_servers:
        return
    room = 1 + settings.headroom_ratio
    profiles = profiles_of(lot.model, lot.memory_total_bytes, lot.profile)
    if profiles:
        target = _smallest(profiles, lot, peak * room, lot.p95_ratio * room)
        if target is not None:
            title = f"Move {words.each(lot)} to a MIG instance {target.name}"
            fact = f"With {words.whole(settings.headroom_ratio)} of room it fits {target.name}."
            yield _kept(lot, "smaller-mig", title, target.share_ratio, fact, price)
    elif lot.whole and lot.memory_total_bytes is not None:
        sharers = _sharers(peak * room / lot.memory_total_bytes, lot.p95_ratio * room, settings)
        if sharers > 1:
            fact = f"With {words.whole(settings.headroom_ratio)} of room {sharers} of its like fit one GPU."
            title = f"Share {words.each(lot)} among {sharers} of its like"
            yield _kept(lot, "share", title, 1 / sharers, fact, price)


def _smallest(profiles: tuple[Profile, ...], lot: Lot, need_bytes: float, busy_ratio: float) -> Profile | None:
    now: Mapping[str, Profile] = {profile.name: profile for profile in profiles}
    compute = now[lot.profile].compute_ratio if lot.profile else 1.0
    share = now[lot.profile].share_ratio if lot.profile else 1.0
    fitting = [
        profile
        for profile in profiles
        if profile.memory_bytes >= need_bytes and profile.compute_ratio >= busy_ratio * compute
        if profile.share_ratio < share - _ROUNDING
    ]
    return min(fitting, key=lambda profile: profile.share_ratio) if fitting else None


def _sharers(memory_ratio: float, busy_ratio: float, settings: AdviceSettings) -> int:
    need = max(memory_ratio, busy_ratio, 1 / settings.most_sharers)
    return int(1 / need + _ROUNDING)


def _kept(lot: Lot, advice: Advice, title: str, share_ratio: float, fact: str, price: Price | None) -> Change:
    gpus = sum(max(0.0, use.share_ratio - share_ratio) for use in lot.uses)
    several = len(lot.uses) > 1
    isolation = (
        "Sharers wait for each other and share memory without a wall between them. " if advice == "share" else ""
    )
    risk = f"{isolation}{_BURSTS} Try one replica first.{_SEVERAL if several else ''}{_SERVER if lot.is_server else ''}"
    level: RiskLevel = "high" if several or lot.is_server else "medium"
    return Change(advice, title, gpus, _per_month(price, gpus), fact, risk, level)


def _smaller_model(
    lot: Lot, peak: float, price: Price | None, market: Market, settings: AdviceSettings
) -> Iterator[Change]:
    small = lot.mean_ratio <= settings.small_use_ratio and peak <= settings.small_use_bytes
    gpu_hours = sum(use.share_ratio * use.held_hours for use in lot.uses)
    if not (lot.whole and small and is_big(lot.model) and gpu_hours >= settings.least_held_hours):
        return
    need = peak * (1 + settings.headroom_ratio)
    other = None if price is None else market.cheapest(lot.payer.cluster, need, price)
    limits = (
        f"{words.whole(settings.small_use_ratio)} of activity and {words.memory(settings.small_use_bytes)} of memory"
    )
    fact = f"Less than {limits} is work for a smaller model."
    per_month = None
    name = "a smaller model"
    if other is not None and price is not None:
        model, theirs = other
        name = words.short(model)
        per_month = (price.per_hour - theirs.per_hour) * lot.gpus * MONTH_HOURS
        fact = f"{fact[:-1]}: a GPU-hour of {name} costs {words.money(theirs)} here."
    risk = (
        "Slower where it does work, and some programs need what only the bigger model has (FP8, NVLink). Time one run"
        f" on the smaller one first.{_SERVER if lot.is_server else ''}"
    )
    title = f"Use {name} instead of {words.devices(lot)}"
    yield Change("smaller-model", title, lot.gpus, per_month, fact, risk, "high" if lot.is_server else "medium")


def _per_month(price: Price | None, gpus: float) -> float | None:
    return None if price is None else price.per_hour * gpus * MONTH_HOURS
