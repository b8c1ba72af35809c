"""Recommends GPUs to return, share or resize, from evidence and ledger of recent days, and reports limits of work."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from exporter.cost.dimensions import APART, EVERYTHING, Dimension, Filters, LineKey
from exporter.cost.holdings import LEAST_HELD_HOURS, PAYER, HeldDevice, HeldDevices, Limit, is_big, lots, read_evidence
from exporter.cost.ledger import Figures, FleetLedger, LedgerSource, total_of
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.window import DAY_SECONDS, HOUR_SECONDS, Window, last_recorded
from exporter.model.attribution import PLATFORM_NAMESPACES
from exporter.model.formatting import decimal, minute, money_with_code, percent_down
from exporter.model.ledger import NO_SECONDS, Bottleneck, ByState

Advice = Literal["give-back", "fewer-gpus", "share", "smaller-mig", "smaller-model", "bottleneck"]
"""``bottleneck`` is information on the limit of a workload, without a saving."""
RiskLevel = Literal["low", "medium", "high"]
MONTH_HOURS = 730.0
# Thresholds; docs/cost.md gives the reason of each.
HEADROOM_RATIO = 0.2
"""Headroom over peak memory, and over the activity that 95 % of the hours do not exceed."""
SMALL_USE_RATIO = 0.2
"""Largest mean activity for a smaller model."""
SMALL_USE_BYTES = 10e9
"""Largest peak memory for a smaller model."""
MOST_SHARERS = 4
MOSTLY_RATIO = 0.5
"""Least part of the profiled active time of a class that is reported."""
GIGABYTE = 1e9
_CENTS_FROM = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """One suggestion for one workload."""

    advice: Advice
    owner: LineKey
    """Key with cluster, namespace, kind, workload, team and model."""
    title: str
    """Suggested change, in one sentence: ``Give back 3 of 8 H100``."""
    gpus: float
    """Physical GPUs that would become free, weighted by share."""
    currency: str = ""
    per_month: float | None = None
    """Saved money of 730 hours at the mean price paid over the window; ``None`` without a price."""
    evidence: tuple[str, ...]
    """Measured facts, one sentence each, with window and coverage."""
    risk: str
    """Possible consequences of the change, and a way to try it."""
    risk_level: RiskLevel
    """Level of the risk, by the number of findings against the change."""
    command: str = ""
    """Command that makes the change or opens the manifest; empty for a workload without a name."""
    devices: tuple[str, ...] = ()
    """UUIDs of the devices."""
    nodes: tuple[str, ...] = ()
    """Nodes of these devices, without duplicates."""


class MeanPrice(NamedTuple):
    """Mean money of a GPU-hour."""

    currency: str
    per_hour: float


def short(model: str) -> str:
    """Return the short name of a model, ``H100`` for ``NVIDIA H100 80GB HBM3``; whole without a number in word one."""
    bare = model.removeprefix("NVIDIA ").removeprefix("Tesla ")
    first = bare.replace("-", " ").split(" ", 1)[0]
    return first if any(letter.isdigit() for letter in first) else bare


def devices(lot: HeldDevices) -> str:
    """Return the devices as text: ``8 H100``, ``3 instances 1g.10gb of A100``, ``2 parts of T4``."""
    number = len(lot.uses)
    many = "s" if number != 1 else ""
    if lot.profile:
        return f"{number} instance{many} {lot.profile} of {short(lot.model)}"
    return f"{number} {short(lot.model)}" if lot.whole else f"{number} part{many} of {short(lot.model)}"


def each(lot: HeldDevices) -> str:
    """Return the devices as text for each of them: ``the H100``, ``each of 8 H100``."""
    return f"the {devices(lot).removeprefix('1 ')}" if len(lot.uses) == 1 else f"each of {devices(lot)}"


def memory(size: float) -> str:
    """Return a size as text: ``4.2 GB``."""
    return f"{decimal(size / GIGABYTE, 1)} GB"


def money(price: MeanPrice) -> str:
    """Return a price as text: ``4.10 USD``; a small price has two more decimals."""
    return money_with_code(price.per_hour, price.currency, 2 if price.per_hour >= _CENTS_FROM else 4)


_ROUNDING = 1e-9
_BURSTS = "Hourly figures hide bursts of minutes, which take longer on a smaller part."
_SEVERAL = (
    "It holds several devices. A program that uses them together cannot use MIG instances or shares: NCCL does not work"
    " between instances. Only for one process per device."
)
_FILLS = "On a part of the GPU, kernels that fill all SMs take longer."
_STARVED = f"How many of its SMs it keeps busy is not recorded. {_FILLS} Compare DCGM_FI_PROF_SM_ACTIVE first."
_SERVER = "It looks like a server that reserves memory at its start: measure its real need first."


class Change(NamedTuple):
    """A suggestion before conversion to a ``Recommendation``."""

    advice: Advice
    title: str
    gpus: float
    fact: str
    risk: str
    """Risk of the change itself, and a way to try it."""
    reasons: tuple[str, ...] = ()
    """Findings against the change: one makes the risk medium, two make it high."""
    least: RiskLevel = "low"
    """Level of risk without findings."""
    per_hour: float | None = 0.0
    """Hourly price of each of these GPUs after the change; ``None`` if it is unknown."""


class Market:
    """Prices of GPUs in the fleet: mean prices of payers and models, and the memory of a whole GPU of each model.

    Args:
        uses: Uses of the whole fleet.
        ledger: Ledger by cluster, namespace, kind, workload, team and model, for the money paid.
        judge_servers: Whether the memory use of servers that allocate most memory in advance counts: vLLM, Triton,
            TensorFlow, JAX, and others.
    """

    def __init__(self, uses: Iterable[HeldDevice], ledger: FleetLedger, *, judge_servers: bool) -> None:
        self.window = ledger.window
        self.judge_servers = judge_servers
        payers: dict[LineKey, list[Figures]] = {}
        models: dict[tuple[str, str], list[Figures]] = {}
        for key, figures in (line for chunk in ledger.chunks for line in chunk.lines.items()):
            models.setdefault((key.cluster, key.model), []).append(figures)
            if key.kind not in APART:
                payers.setdefault(key.at(PAYER), []).append(figures)
        self._payers = {key: total_of(paid) for key, paid in payers.items()}
        self._models = {place: _mean_price(total_of(paid)) for place, paid in models.items()}
        self._memory: dict[tuple[str, str], float] = {}
        for use in uses:
            if use.owner.mode != "mig" and use.memory_total_bytes is not None:
                self._memory[use.owner.cluster, use.owner.model] = use.memory_total_bytes

    def paid(self, payer: LineKey) -> MeanPrice | None:
        """Return the mean price that a workload paid; without a ledger line, that of its model and cluster."""
        if payer in self._payers:
            return _mean_price(self._payers[payer])
        return self._models.get((payer.cluster, payer.model))

    def seconds(self, payer: LineKey) -> ByState:
        """Return the GPU-seconds of a workload by state; 0 without a ledger line."""
        return self._payers[payer].seconds if payer in self._payers else NO_SECONDS

    def cheapest(self, cluster: str, least_bytes: float, below: MeanPrice) -> tuple[str, MeanPrice] | None:
        """Return the cheapest smaller model of a cluster with enough memory and a lower price, and its price."""
        found = [
            (price.per_hour, model, price)
            for (place, model), price in self._models.items()
            if place == cluster and not is_big(model) and self._memory.get((cluster, model), 0.0) >= least_bytes
            if price is not None and price.currency == below.currency and price.per_hour < below.per_hour
        ]
        return min(found)[1:] if found else None

    def saved(self, lot: HeldDevices, found: Change) -> float | None:
        """Return the money that a change saves per month; ``None`` if a price is unknown."""
        price = self.paid(lot.payer)
        if price is None or found.per_hour is None:
            return None
        return (price.per_hour - found.per_hour) * found.gpus * MONTH_HOURS


def _mean_price(paid: Figures) -> MeanPrice | None:
    """Return the mean price; ``None`` without money, and with several currencies."""
    priced_hours = (paid.seconds.total - paid.unpriced_seconds) / HOUR_SECONDS
    money = [(currency, one.total) for currency, one in paid.money.items() if one.total > 0]
    return MeanPrice(money[0][0], money[0][1] / priced_hours) if len(money) == 1 and priced_hours > 0 else None


def _change(lot: HeldDevices, market: Market) -> Change | None:
    """Return the change that saves most; of equal changes, the first one, which keeps the model."""
    peak, total = lot.peak_memory_bytes, lot.memory_total_bytes
    if peak is None or total is None or not (lot.whole or lot.profile):
        return None
    found = [*_smaller_model(lot, peak, market)]
    if market.judge_servers or not lot.is_server:
        found = [*_same_model(lot, peak, total), *found]
    return max(found, key=lambda one: market.saved(lot, one) or -1.0, default=None)


def _same_model(lot: HeldDevices, peak: float, total: float) -> Iterator[Change]:
    room = 1 + HEADROOM_RATIO
    headroom = f"With {percent_down(HEADROOM_RATIO, 0)} headroom"
    if profiles := lot.profiles:
        now = lot.size
        fitting = (
            one
            for one in profiles
            if one.memory_bytes >= peak * room and one.compute_ratio >= lot.p95_ratio * room * now.compute_ratio
            if one.share_ratio < now.share_ratio - _ROUNDING
        )
        if (target := next(fitting, None)) is not None:
            fact = f"{headroom} it fits {target.name}."
            burst = lot.peak_ratio * now.compute_ratio > target.compute_ratio
            bursts = (f"Its busiest hour, {percent_down(lot.peak_ratio, 0)} active, would not fit.",) if burst else ()
            title = f"Move {each(lot)} to a MIG instance {target.name}"
            yield _kept(lot, "smaller-mig", title, target.share_ratio, fact, bursts)
    elif lot.whole:
        need = max(peak * room / total, lot.p95_ratio * room, 1 / MOST_SHARERS)
        sharers = int(1 / need + _ROUNDING)
        if sharers > 1:
            fact = f"{headroom}, {sharers} such workloads fit on one GPU."
            title = f"Share {each(lot)} among {sharers} such workloads"
            walls = ("Sharers wait for each other and share memory without isolation.",)
            yield _kept(lot, "share", title, 1 / sharers, fact, walls)


def _kept(
    lot: HeldDevices, advice: Advice, title: str, share_ratio: float, fact: str, reasons: tuple[str, ...]
) -> Change:
    gpus = sum(max(0.0, use.share_ratio - share_ratio) for use in lot.uses)
    known = ((_SEVERAL, len(lot.uses) > 1), (_SERVER, lot.is_server))
    high = tuple(reason for reason, holds in known if holds)
    risk = f"{_BURSTS} Try one replica first."
    return Change(advice, title, gpus, fact, risk, (*reasons, *high), "high" if high else "low")


def _smaller_model(lot: HeldDevices, peak: float, market: Market) -> Iterator[Change]:
    small = lot.mean_ratio <= SMALL_USE_RATIO and peak <= SMALL_USE_BYTES
    gpu_hours = sum(use.share_ratio * use.held_hours for use in lot.uses)
    if not (lot.whole and small and is_big(lot.model) and gpu_hours >= LEAST_HELD_HOURS):
        return
    price = market.paid(lot.payer)
    other = None if price is None else market.cheapest(lot.payer.cluster, peak * (1 + HEADROOM_RATIO), price)
    most = f"{percent_down(SMALL_USE_RATIO, 0)} activity and {memory(SMALL_USE_BYTES)} of memory"
    fact = f"Work below {most} suits a smaller model"
    name, per_hour = "a smaller model", None
    if other is not None:
        model, theirs = other
        name, per_hour = short(model), theirs.per_hour
        fact = f"{fact}: a GPU-hour of {name} costs {money(theirs)} here"
    risk = (
        "Work takes longer on it, and some programs need features of the larger model (FP8, NVLink). Time one run on"
        " the smaller model first."
    )
    title = f"Use {name} instead of {devices(lot)}"
    reasons = (_SERVER,) if lot.is_server else ()
    least: RiskLevel = "high" if lot.is_server else "medium"
    yield Change("smaller-model", title, lot.gpus, f"{fact}.", risk, reasons, least, per_hour)


def _starved(lot: HeldDevices, limit: Limit, market: Market) -> Change | None:
    """Return the change that fits the used part of the device, for a workload that is active but starved."""
    if not limit.is_starved:
        return None
    used = max(limit.effective_ratio, limit.uses.get("sm", 0.0))
    found = _change(replace(lot, most_ratio=used), market)
    return found and found._replace(reasons=(_FILLS if "sm" in limit.uses else _STARVED, *found.reasons))


_BOTTLENECKS = {
    Bottleneck.MEMORY: (
        "Try larger batches on",
        "Larger batches do more work per byte read from memory. This is information, not waste.",
    ),
    Bottleneck.TRANSFER: (
        "Overlap transfers with compute on",
        "Usual causes: gradients or tensors that are sent while nothing is computed, copies from pageable memory.",
    ),
    Bottleneck.STARVED: (
        "Find what starves",
        "Usual causes: loading of data, many small kernels, small batches, synchronisation, one slow rank.",
    ),
}


def _information(lot: HeldDevices, limit: Limit) -> Change | None:
    """Return information on the limit of a busy workload, if its owner can act on it."""
    what = _BOTTLENECKS.get(limit.bottleneck)
    if what is None or limit.bottleneck_ratio < MOSTLY_RATIO or lot.mean_ratio < SMALL_USE_RATIO:
        return None
    at = f"active {percent_down(lot.mean_ratio, 0)}, at {_at_limit(lot, limit, 0)}"
    risk = "Nothing is saved until the same work takes fewer GPU-hours. Time one run."
    return Change("bottleneck", f"{what[0]} {each(lot)}: {at}", 0.0, what[1], risk, per_hour=None)


_LOADED_BYTES = 1e9
_WORKLOAD: frozenset[Dimension] = PAYER - {"model"}
_RANKED: frozenset[Dimension] = _WORKLOAD - {"team"}


def recommend(
    uses: Sequence[HeldDevice], ledger: FleetLedger, *, judge_servers: bool = False
) -> tuple[Recommendation, ...]:
    """Return recommendations, most money first; those without a price come last, the largest first.

    Each device is in at most one recommendation, so that the sum of money does not exceed the cost of the devices.

    Args:
        uses: Uses of one window.
        ledger: Ledger of the same window, as for ``Market``.
        judge_servers: As for ``Market``.
    """
    workloads: dict[LineKey, list[HeldDevice]] = {}
    for use in uses:
        workloads.setdefault(use.owner.at(_WORKLOAD), []).append(use)
    market = Market(uses, ledger, judge_servers=judge_servers)
    found = [
        suggestion
        for owner, of_one in workloads.items()
        if owner.namespace not in PLATFORM_NAMESPACES
        for suggestion in _of_workload(of_one, market)
    ]
    return tuple(sorted(found, key=_rank))


def _rank(one: Recommendation) -> tuple[bool, float, float, LineKey, str]:
    return (one.per_month is None, -(one.per_month or 0.0), -one.gpus, one.owner.at(_RANKED), one.title)


def _of_workload(uses: Sequence[HeldDevice], market: Market) -> Iterator[Recommendation]:
    held = [use for use in uses if use.still_held]
    if any(use.policy == "reserved" for use in uses) or not all(use.is_trusted for use in held):
        return
    unused = {use for use in held if use.is_idle}
    # Earlier use of other devices counts too; without it, the workload may only be pausing.
    if len(unused) == len(held) and not all(use.is_idle for use in uses):
        return
    for lot in lots(uses):
        of_lot = replace(lot, uses=tuple(use for use in lot.uses if use in unused))
        if len(unused) == len(held):
            yield _written(lot, _give_back(lot), market)
        elif of_lot.uses:
            yield _written(of_lot, _fewer(of_lot, lot, held), market)
        else:
            limit = lot.limit(market.seconds(lot.payer))
            found = _change(lot, market)
            if found is None and limit is not None:
                found = _starved(lot, limit, market) or _information(lot, limit)
            if found is not None:
                yield _written(lot, found, market, limit)


def _give_back(lot: HeldDevices) -> Change:
    loaded = lot.is_server or (lot.peak_memory_bytes is not None and lot.peak_memory_bytes >= _LOADED_BYTES)
    risk = "No GPU work would be interrupted. Scale it to 0, and back if it is missed."
    reasons = ("A model may be loaded that waits for requests or for its owner: ask first.",) if loaded else ()
    title = f"Give back all {devices(lot)}" if len(lot.uses) > 1 else f"Give back {each(lot)}"
    return Change("give-back", title, lot.gpus, "None of its devices did any work.", risk, reasons)


def _fewer(unused: HeldDevices, lot: HeldDevices, held: Sequence[HeldDevice]) -> Change:
    others = [use for use in held if not any(use is gone for gone in unused.uses)]
    busiest = max(use.peak_ratio or 0.0 for use in others)
    rest = "Its other device" if len(others) == 1 else f"The busiest of its other {len(others)} devices"
    fact = f"{rest} was {percent_down(busiest, 1)} active in its busiest hour."
    risk = (
        "A program that splits its work over all its GPUs needs each of them, even a pipeline stage that waits. Check"
        " its world size and CUDA_VISIBLE_DEVICES, then request fewer and compare the time of one run."
    )
    several = len(unused.uses) < len(lot.uses)
    title = f"Give back {len(unused.uses)} of {devices(lot)}" if several else f"Give back {each(lot)}"
    loaded = unused.peak_memory_bytes is None or unused.peak_memory_bytes >= _LOADED_BYTES
    reasons = ("Memory of the unused devices is in use.",) if loaded else ()
    return Change("fewer-gpus", title, unused.gpus, fact, risk, reasons)


_LEVELS_OF_RISK: tuple[RiskLevel, ...] = ("low", "medium", "high")
_SOLID_HOURS, _SOLID_RATIO = 120.0, 0.97
"""Hours that each device was seen, and measured part of them, below which the evidence is thin."""


def _doubts(lot: HeldDevices) -> Iterator[str]:
    """Yield the weaknesses of the evidence."""
    seen = min(use.held_hours for use in lot.uses)
    if seen < _SOLID_HOURS:
        yield f"It was seen for only {decimal(seen, 0)} hours."
    if lot.coverage_ratio < _SOLID_RATIO:
        yield f"Activity is unknown for {percent_down(1 - lot.coverage_ratio, 0)} of its hours."


_STOPS = {
    **dict.fromkeys(("Deployment", "ReplicaSet", "StatefulSet"), ("scale", "--replicas=0")),
    **dict.fromkeys(("CronJob", "Job"), ("patch", "--type=merge", "-p", '{"spec":{"suspend":true}}')),
    "Notebook": ("annotate", "kubeflow-resource-stopped=true"),
    "Pod": ("delete",),
}
"""Verb and arguments of ``kubectl`` that end the use of GPUs, by kind of workload."""


def _command(owner: LineKey, advice: Advice) -> str:
    """Return a command that makes the change or opens the manifest; empty for a workload without a name."""
    if advice == "bottleneck" or not (owner.namespace and owner.kind and owner.workload):
        return ""
    verb, *arguments = _STOPS.get(owner.kind, ("edit",)) if advice == "give-back" else ("edit",)
    return shlex.join(("kubectl", "-n", owner.namespace, verb, f"{owner.kind.lower()}/{owner.workload}", *arguments))


def _written(lot: HeldDevices, found: Change, market: Market, limit: Limit | None = None) -> Recommendation:
    reasons = (*found.reasons, *_doubts(lot))
    level = max(min(len(reasons), 2), _LEVELS_OF_RISK.index(found.least))
    if found.advice == "bottleneck":
        level = 0  # it changes nothing
    price = market.paid(lot.payer)
    saved = market.saved(lot, found)
    return Recommendation(
        advice=found.advice,
        owner=lot.payer,
        title=found.title,
        gpus=found.gpus,
        currency="" if price is None or saved is None else price.currency,
        per_month=saved,
        evidence=tuple(_evidence(lot, found.fact, market, limit)),
        risk=" ".join((*reasons, found.risk)),
        risk_level=_LEVELS_OF_RISK[level],
        command=_command(lot.payer, found.advice),
        devices=tuple(use.uuid for use in lot.uses),
        nodes=tuple(sorted({use.owner.node for use in lot.uses})),
    )


_CLASSES = {
    Bottleneck.COMPUTE: "an arithmetic pipe was the limit",
    Bottleneck.MEMORY: "the bandwidth of its memory was the limit, as in decoding: that is no waste",
    Bottleneck.TRANSFER: "NVLink, PCIe or C2C was the limit",
    Bottleneck.VIDEO: "a video engine was the limit",
    Bottleneck.STARVED: "nothing was near its limit: it was starved",
}
_RESOURCES = {
    "compute": "arithmetic pipes",
    "memory": "memory bandwidth",
    "transfer": "busiest of PCIe, NVLink and C2C",
    "video": "video engines",
    "sm": "SMs with work",
}


def _evidence(lot: HeldDevices, fact: str, market: Market, limit: Limit | None) -> Iterator[str]:
    """Yield measurements, price and coverage, one sentence each."""
    yield (
        f"{devices(lot)}: {percent_down(lot.mean_ratio, 1)} active on average, at most {percent_down(lot.p95_ratio, 1)}"
        f" in 95 % of the hours, {percent_down(lot.peak_ratio, 1)} in the busiest hour."
    )
    if limit:
        most = f"in {percent_down(limit.bottleneck_ratio, 0)} of that time {_CLASSES[limit.bottleneck]}"
        known = f"{percent_down(limit.profiled_ratio, 1)} of the active time was profiled"
        yield f"While active it was at {_at_limit(lot, limit, 1)} ({known}); {most}."
        if limit.uses:
            each_of = (f"{_RESOURCES[one]} {percent_down(ratio, 1)}" for one, ratio in limit.uses.items())
            yield f"Mean use of each limit while active: {', '.join(each_of)}."
    yield fact
    peak, total = lot.peak_memory_bytes, lot.memory_total_bytes
    if peak is not None and total is not None:
        where = " on any of them" if len(lot.uses) > 1 else ""
        yield f"At most {memory(peak)} of {memory(total)} of memory was in use{where}."
    window, price = market.window, market.paid(lot.payer)
    yield (
        f"Activity was measured for {percent_down(lot.coverage_ratio, 1)} of {decimal(lot.held_hours, 0)} device-hours"
        f" held from {minute(window.start_seconds)} to {minute(window.end_seconds)} UTC ({window.hours} h)."
    )
    if price is None:
        yield "There is no single price for it in this window, so no saving is shown."
    else:
        yield f"The average price paid per GPU-hour in this window is {money(price)}."


def _at_limit(lot: HeldDevices, limit: Limit, digits: int) -> str:
    """Return the use of the limit as text: ``9.0 % of its limit``."""
    return f"{percent_down(limit.effective_ratio, digits)} of {'its' if len(lot.uses) == 1 else 'their'} limit"


WINDOW_DAYS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceReading:
    """Recommendations and their sources."""

    recommendations: tuple[Recommendation, ...]
    uses: tuple[HeldDevice, ...]
    """Uses as evidence; empty if no evidence was recorded or the filters exclude it."""
    ledger: FleetLedger


async def read(
    client: PrometheusClient,
    source: LedgerSource,
    window: Window,
    *,
    filters: Filters = EVERYTHING,
    judge_servers: bool = False,
) -> AdviceReading:
    """Return recommendations over a window, most money first, with their evidence and ledger.

    Raises:
        PrometheusError: A query for the evidence failed.
        StoreError: The store of closed days cannot be read.
    """
    # Without filters, because the price of a smaller model depends on what others pay.
    uses = await read_evidence(client, window, filters)
    ledger = await source.ledger(window, PAYER)
    return AdviceReading(recommendations=recommend(uses, ledger, judge_servers=judge_servers), uses=uses, ledger=ledger)


async def read_recommendations(
    client: PrometheusClient, source: LedgerSource, now_seconds: float
) -> tuple[Recommendation, ...]:
    """Return recommendations over the last week up to the last recorded hour, most money first.

    Raises:
        PrometheusError: As for ``read``.
        StoreError: As for ``read``.
    """
    end = last_recorded(now_seconds)
    window = Window(start_seconds=end - WINDOW_DAYS * DAY_SECONDS, end_seconds=end, label=f"{WINDOW_DAYS}d")
    return (await read(client, source, window)).recommendations
