"""Writes the recorded series of a simulated fleet as text, and returns their truth by UTC day."""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TextIO

from exporter.model.ledger import STATES, Bottleneck, Totals, state_columns
from gpu_simulator.fleet_ledger import HOUR_MS, MS, NAMES, FleetFigures, NodeLedger, add_at, node_ledger, profile_of
from gpu_simulator.fleet_plan import (
    DAY_SECONDS,
    NOBODY,
    RECORDED_AFTER_SECONDS,
    UNATTRIBUTED,
    FleetNode,
    FleetOwner,
    FleetPlan,
    fleet_nodes,
)
from gpu_simulator.identities import stable_uuid

_STATES = dict(zip(STATES, NAMES, strict=True))
"""State in this module by label value."""


class TruthKey(NamedTuple):
    """Owner and place of a line; a field is empty if it is unknown, or summed."""

    cluster: str = ""
    node: str = ""
    namespace: str = ""
    kind: str = ""
    """Kind of the workload, or ``Unallocated``, ``Unattributed``."""
    workload: str = ""
    team: str = ""
    labels: str = ""
    model: str = ""
    mode: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTruth:
    """Totals by UTC day of the hours that end after ``start_seconds`` and by ``end_seconds``."""

    start_seconds: int
    end_seconds: int
    days: Mapping[int, Mapping[TruthKey, Totals]]
    """Lines by Unix time of the day's start."""
    recorded_hours: Mapping[int, Mapping[str, int]]
    """Number of recorded hours by day and cluster."""

    def total(self, *names: str, **wanted: str) -> dict[tuple[str, ...], Totals]:
        """Return totals of all days by fields of ``TruthKey``, of the lines with the wanted values."""
        found: dict[tuple[str, ...], Totals] = {}
        for lines in self.days.values():
            for key, totals in lines.items():
                if all(getattr(key, name) == value for name, value in wanted.items()):
                    place = tuple(getattr(key, name) for name in names)
                    found[place] = found[place] + totals if place in found else totals
        return found

    def sum(self, **wanted: str) -> Totals:
        """Return the total of all days, of the lines with the wanted values."""
        return self.total(**wanted).get((), Totals())

    @property
    def capacity_seconds(self) -> float:
        """Return the GPU-seconds of all existing GPUs."""
        return self.sum().seconds.total


def fleet_truth(plan: FleetPlan) -> FleetTruth:
    """Return the truth of a fleet over all its time, by node."""
    sums = FleetSums(plan)
    for node in fleet_nodes(plan):
        sums.add(node_ledger(node))
    return sums.truth()


def truth_json(truth: FleetTruth) -> dict[str, Any]:
    """Return the truth as JSON: days with lines in the order of their keys; seconds are GPU-seconds."""
    days = [
        {
            "start_seconds": day,
            "recorded_hours": truth.recorded_hours.get(day, {}),
            "lines": [_line_json(key, totals) for key, totals in lines.items()],
        }
        for day, lines in truth.days.items()
    ]
    return {
        "simulated": True,
        "start_seconds": truth.start_seconds,
        "end_seconds": truth.end_seconds,
        "days": days,
    }


def _line_json(key: TruthKey, totals: Totals) -> dict[str, Any]:
    return {
        **{name: value for name, value in key._asdict().items() if value},
        **{f"{name}_seconds": seconds for name, seconds in state_columns(totals.seconds).items()},
        "unpriced_seconds": totals.unpriced_seconds,
        "energy_joules": totals.energy_joules,
        "money": {currency: {"total": money.total, **state_columns(money)} for currency, money in totals.money.items()},
    }


Format = Literal["openmetrics", "import"]
"""OpenMetrics with seconds, for promtool; Prometheus' text format with milliseconds, for VictoriaMetrics."""


def labels(**values: str) -> str:
    """Return labels in braces, escaped and without empty values, like in Prometheus."""
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items() if value)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _with(inside: str, **values: str) -> str:
    """Return labels in braces with further labels."""
    return f"{inside[:-1]},{labels(**values)[1:]}"


class Ends(NamedTuple):
    """End of a sample's line for each hour: the timestamp."""

    ledger: tuple[str, ...]
    """Timestamps of the hourly ledger."""
    live: tuple[str, ...]
    """Timestamps of scraped and continuously recorded series."""


def ends(plan: FleetPlan, form: Format) -> Ends:
    """Return the timestamps of a fleet's samples."""
    unit = 1 if form == "openmetrics" else MS
    stamps = [plan.stamp(hour) for hour in range(plan.hours)]
    return Ends(*(tuple(f" {(stamp + late) * unit}\n" for stamp in stamps) for late in (RECORDED_AFTER_SECONDS, 0)))


def series(
    name: str, inside: str, values: Iterable[tuple[int, float]], ending: tuple[str, ...], *, zeros: bool = False
) -> str:
    """Return all samples of a series; with ``zeros`` also those of 0, which only evidence has."""
    begin = f"{name}{inside} "
    return "".join([f"{begin}{value}{ending[hour]}" for hour, value in values if zeros or value > 0])


def _whose(owner: FleetOwner) -> dict[str, str]:
    """Return the labels of an owner."""
    return {
        "workload_namespace": owner.namespace,
        "workload_kind": owner.kind,
        "workload_name": owner.name,
        "team": owner.team,
    }


def node_text(ledger: NodeLedger, ending: Ends, extra: Mapping[str, str], *, devices: bool) -> Iterator[str]:
    """Yield the owner series of a node, its facts and prices; with ``devices`` also the use of each device."""
    node = ledger.node
    place = {**extra, "cluster": node.cluster, "node": node.name}
    for (owner, mode), lines in ledger.lines.items():
        inside = labels(**place, **_whose(owner), cost_labels=owner.labels, model=node.spec.name, mode=mode)
        yield from quantities_text("owner", inside, lines, ending.ledger)
        yield from money_text("owner", inside, node.currency, lines, ending.ledger)
    there = [(hour, 1) for hour in ledger.there]
    yield series("gpu_node_info", labels(**place, **asdict(node.facts)), there, ending.live)
    yield series("gpu_exporter_simulated", labels(**place), there, ending.live)
    if devices:
        yield from _prices(ledger, place, ending.live)
        yield from _evidence(ledger, place, ending.live)


def quantities_text(
    level: str, inside: str, lines: Mapping[int, FleetFigures], ending: tuple[str, ...]
) -> Iterator[str]:
    """Yield the recorded series of a level in seconds and joules, which do not depend on a currency."""
    name, rows = f"{level}:gpu_ledger:delta1h", lines.items()
    for state, word in _STATES.items():
        values = ((hour, getattr(row, f"{word}_ms") / MS) for hour, row in rows)
        yield series(name, _with(inside, quantity="seconds", state=state), values, ending)
    unpriced = ((hour, row.unpriced_ms / MS) for hour, row in rows)
    yield series(name, _with(inside, quantity="unpriced_seconds"), unpriced, ending)
    joules = ((hour, float(row.energy_joules)) for hour, row in rows)
    yield series(name, _with(inside, quantity="energy_joules"), joules, ending)


def money_text(
    level: str, inside: str, currency: str, lines: Mapping[int, FleetFigures], ending: tuple[str, ...]
) -> Iterator[str]:
    """Yield the recorded cost of a level, in one currency."""
    for state, word in _STATES.items():
        values = ((hour, getattr(row, f"{word}_cost")) for hour, row in lines.items())
        cost = _with(inside, quantity="cost", state=state, currency=currency)
        yield series(f"{level}:gpu_ledger:delta1h", cost, values, ending)


def gpu_uuid(node: FleetNode, gpu: int) -> str:
    """Return the UUID of a physical GPU."""
    return f"GPU-{stable_uuid('fleet', node.plan.seed, node.index, gpu)}"


def slot_uuid(node: FleetNode, slot: int) -> str:
    """Return the UUID of the device of a slot."""
    part = node.slots[slot]
    if not part.instance:
        return gpu_uuid(node, part.gpu)
    return f"MIG-{stable_uuid('fleet', node.plan.seed, node.index, part.gpu, part.instance)}"


def _device_labels(node: FleetNode, slot: int, place: Mapping[str, str]) -> dict[str, str]:
    part = node.slots[slot]
    return {
        **place,
        "gpu": str(part.gpu),
        "uuid": slot_uuid(node, slot),
        "gpu_instance": part.instance,
        "mig_profile": part.profile,
        "model": node.spec.name,
    }


def _prices(ledger: NodeLedger, place: Mapping[str, str], ending: tuple[str, ...]) -> Iterator[str]:
    node = ledger.node
    prices = [(hour, node.price(hour) or 0.0) for hour in ledger.there]
    for gpu in range(node.plan.gpus_per_node):
        inside = labels(
            **place,
            gpu=str(gpu),
            uuid=gpu_uuid(node, gpu),
            model=node.spec.name,
            currency=node.currency,
            price_source="simulated:fleet",
        )
        yield series("gpu_hourly_price", inside, prices, ending)


def _evidence(ledger: NodeLedger, place: Mapping[str, str], ending: tuple[str, ...]) -> Iterator[str]:
    node = ledger.node
    memory = node.spec.memory_bytes - node.spec.memory_reserved_bytes
    for (slot, owner), hours in ledger.uses.items():
        if owner == UNATTRIBUTED:
            continue
        part = node.slots[slot]
        whose = _device_labels(node, slot, place) | _whose(owner)
        total = int(memory * (part.share_ratio if part.instance else 1))
        used = int(total * (0.1 + 0.8 * node.random(f"memory/{slot}/{owner}").random()))
        rows = hours.items()
        facts: dict[str, Iterable[tuple[int, float]]] = {
            "share": ((h, round(use.allocated_ms / HOUR_MS, 6)) for h, use in rows),
            "active": ((h, round(use.active_ms / HOUR_MS, 6)) for h, use in rows),
            "measured": ((h, round((use.active_ms + use.idle_ms) / HOUR_MS, 6)) for h, use in rows),
            "memory_used_bytes": ((h, used) for h in hours),
        }
        if part.mode == "shared":
            facts["estimated"] = ((h, 1) for h in hours)
        for fact, figures in facts.items():
            zeros = fact in {"active", "measured"}
            yield series("workload_device:gpu_use:facts", labels(**whose, fact=fact), figures, ending, zeros=zeros)
    for slot, part in enumerate(node.slots):
        total = int(memory * (part.share_ratio if part.instance else 1))
        if node.device(slot) == slot:
            inside = labels(**_device_labels(node, slot, place))
            yield series(
                "workload_device:gpu_memory_total_bytes:max", inside, ((h, total) for h in ledger.there), ending
            )


_AT_WORK_RATIO = 0.05
_OF_NEAREST = {"compute": 0.5, "memory": 0.4, "transfer": 0.1, "video": 0.0, "sm": 1.2}
"""Use of the other resources, as a part of the use of the resource that is nearest to its limit."""


def _resources(bottleneck: Bottleneck, use: FleetFigures) -> dict[tuple[str, str], int]:
    """Return the milliseconds of one hour by recorded series and resource."""
    profiled = use.effective_ms + use.ineffective_ms
    nearest = Bottleneck.COMPUTE if bottleneck is Bottleneck.STARVED else bottleneck
    used = {one: min(profiled, int(use.effective_ms * part)) for one, part in _OF_NEAREST.items()}
    used |= {nearest: use.effective_ms, "profiled": profiled, "sm_profiled": profiled}
    return {("bottleneck", bottleneck): profiled} | {("resource_use", one): ms for one, ms in used.items()}


Rows = dict[int, FleetFigures]
"""Figures by hour."""


@dataclass(slots=True)
class FleetSums:
    """Sums over nodes, which can be merged. Without ``by_node`` the truth has no nodes."""

    plan: FleetPlan
    by_node: bool = True
    rows: dict[tuple[TruthKey, str], Rows] = field(default_factory=dict)
    """Figures by key and currency, then by hour."""
    hours: dict[str, set[int]] = field(default_factory=dict)
    """Recorded hours by cluster."""
    limits: dict[tuple[str, FleetOwner, str, str], Counter[int]] = field(default_factory=dict)
    """Milliseconds by hour, for each cluster, workload, recorded series and resource."""
    working: dict[str, dict[int, float]] = field(default_factory=dict)
    """Number of active held GPUs, by cluster and hour."""

    def add(self, ledger: NodeLedger) -> None:
        """Add a node."""
        node = ledger.node
        name = node.name if self.by_node else ""
        for (owner, mode), lines in ledger.lines.items():
            key = TruthKey(node.cluster, name, *owner, owner.labels, node.spec.name, mode)
            _add(self.rows.setdefault((key, node.currency), {}), lines)
        self.hours.setdefault(node.cluster, set()).update(ledger.there)
        working = self.working.setdefault(node.cluster, {})
        for (_, owner), hours in ledger.uses.items():
            if owner == UNATTRIBUTED:
                continue
            if profile := profile_of(node, owner):
                for hour, use in hours.items():
                    for (name, resource), ms in _resources(profile[0], use).items():
                        self.limits.setdefault((node.cluster, owner, name, resource), Counter())[hour] += ms
            for hour, use in hours.items():
                if use.active_ms and use.active_ms >= _AT_WORK_RATIO * (use.active_ms + use.idle_ms):
                    working[hour] = working.get(hour, 0.0) + use.allocated_ms / HOUR_MS

    def merge(self, other: "FleetSums") -> None:
        """Add the sums of another object."""
        for place, rows in other.rows.items():
            _add(self.rows.setdefault(place, {}), rows)
        for cluster, hours in other.hours.items():
            self.hours.setdefault(cluster, set()).update(hours)
        for limit, seconds in other.limits.items():
            self.limits.setdefault(limit, Counter()).update(seconds)
        for cluster, gpus in other.working.items():
            working = self.working.setdefault(cluster, {})
            for hour, count in gpus.items():
                working[hour] = working.get(hour, 0.0) + count

    def truth(self, start_seconds: int | None = None, end_seconds: int | None = None) -> FleetTruth:
        """Return totals by day, of the hours that end after the start and by the end; default: those of the plan."""
        start = self.plan.start_seconds if start_seconds is None else start_seconds
        end = self.plan.end_seconds if end_seconds is None else end_seconds
        stamps = {hour: self.plan.stamp(hour) for hour in range(self.plan.hours)}
        day_of = {hour: (at - 1) // DAY_SECONDS * DAY_SECONDS for hour, at in stamps.items() if start < at <= end}
        sums: dict[tuple[int, TruthKey, str], FleetFigures] = {}
        for (key, currency), rows in self.rows.items():
            for hour, row in rows.items():
                if hour in day_of:
                    place = (day_of[hour], key, currency)
                    add_at(sums, place, row)
        days: dict[int, dict[TruthKey, Totals]] = {}
        for (day, key, currency), row in sorted(sums.items(), key=lambda item: item[0]):
            lines = days.setdefault(day, {})
            lines[key] = lines.get(key, Totals()) + row.totals(currency)
        recorded: dict[int, Counter[str]] = {}
        for cluster, hours in sorted(self.hours.items()):
            for hour in sorted(hours & day_of.keys()):
                recorded.setdefault(day_of[hour], Counter())[cluster] += 1
        return FleetTruth(
            start_seconds=start, end_seconds=end, days=days, recorded_hours=dict(sorted(recorded.items()))
        )

    def text(self, ending: Ends, extra: Mapping[str, str]) -> Iterator[str]:
        """Yield all series that the rules sum over nodes."""
        workloads: dict[TruthKey, dict[str, Rows]] = {}
        for (key, currency), rows in self.rows.items():
            _add(workloads.setdefault(key._replace(node="", mode=""), {}).setdefault(currency, {}), rows)
        capacity: dict[str, Rows] = {}
        held: dict[str, Rows] = {}
        for key, currencies in sorted(workloads.items()):
            owner = FleetOwner(key.namespace, key.kind, key.workload, key.team)
            inside = labels(**extra, cluster=key.cluster, **_whose(owner), cost_labels=key.labels, model=key.model)
            every: Rows = {}
            for currency, rows in sorted(currencies.items()):
                _add(every, rows)
                yield from money_text("workload", inside, currency, dict(sorted(rows.items())), ending.ledger)
            yield from quantities_text("workload", inside, dict(sorted(every.items())), ending.ledger)
            _add(capacity.setdefault(key.cluster, {}), every)
            if owner not in {NOBODY, UNATTRIBUTED}:
                _add(held.setdefault(key.cluster, {}), every)
        for (cluster, owner, name, resource), hours in sorted(self.limits.items()):
            of_class = labels(**extra, cluster=cluster, **_whose(owner), resource=resource)
            seconds = ((hour, ms / MS) for hour, ms in sorted(hours.items()))
            yield series(
                f"workload:gpu_{name}_seconds:sum", of_class, seconds, ending.live, zeros=name == "resource_use"
            )
        for cluster, rows in sorted(capacity.items()):
            yield from self._funnel(cluster, rows, held.get(cluster, {}), ending, extra)

    def _funnel(
        self, cluster: str, capacity: Rows, held: Rows, ending: Ends, extra: Mapping[str, str]
    ) -> Iterator[str]:
        inside = labels(**extra, cluster=cluster)
        metered, owned = sorted(capacity.items()), sorted(held.items())
        seconds = ((hour, row.allocated_ms / MS) for hour, row in metered)
        yield series("cluster:gpu_capacity_seconds:delta1h", inside, seconds, ending.ledger)
        for word, counts in (
            ("capacity", [(hour, row.allocated_ms / HOUR_MS) for hour, row in metered]),
            ("allocated", [(hour, row.allocated_ms / HOUR_MS) for hour, row in owned]),
            ("working", [(hour, round(gpus, 6)) for hour, gpus in sorted(self.working.get(cluster, {}).items())]),
            ("active", [(hour, row.active_ms / HOUR_MS) for hour, row in owned]),
            ("profiled", [(hour, (row.effective_ms + row.ineffective_ms) / HOUR_MS) for hour, row in owned]),
            ("effective", [(hour, row.effective_ms / HOUR_MS) for hour, row in owned]),
        ):
            yield series(f"cluster:gpu_{word}:sum", inside, counts, ending.live)


def _add(rows: Rows, more: Mapping[int, FleetFigures]) -> None:
    for hour, row in more.items():
        add_at(rows, hour, row)


_BATCH_NODES = 4
"""Largest number of nodes in a batch; a small fleet has twelve batches, to show the progress."""
_HEAD = "# HELP gpu_exporter_simulated 1: nothing here is real. Written by gpu-cost-exporter simulate fleet.\n"
_FOOT = "# EOF\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """Options of writing a fleet."""

    form: Format
    devices: bool = True
    """Whether to write prices by GPU and the use of each device, too, which is four times the data."""
    by_node: bool = False
    """Whether the truth has separate nodes."""
    processes: int = 1
    extra: Mapping[str, str] = field(default_factory=dict)
    """Labels added to every series, such as ``{"replica": "a"}``."""


def write_fleet(
    plan: FleetPlan, output: TextIO, writing: Writing, progress: Callable[[int], None] | None = None
) -> FleetTruth:
    """Write all series of a fleet; memory contains a few nodes and all sums of workloads at a time.

    Args:
        plan: The fleet.
        output: Output of the text, which is written every few nodes.
        writing: Options.
        progress: Called with the number of written nodes.

    Returns:
        The truth, by day.
    """
    nodes = fleet_nodes(plan)
    size = min(_BATCH_NODES, (len(nodes) + 11) // 12)
    batches = [nodes[first : first + size] for first in range(0, len(nodes), size)]
    sums, make = FleetSums(plan, writing.by_node), partial(_batch, plan, writing)
    output.write(_HEAD)
    done = 0
    with ExitStack() as stack:
        results: Iterator[tuple[str, FleetSums]] = map(make, batches)
        if writing.processes > 1 and len(batches) > 1:
            # Not by fork, because the caller can have threads.
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(writing.processes))
            results = pool.imap(make, batches)
        for batch, (text, more) in zip(batches, results, strict=True):
            output.write(text)
            sums.merge(more)
            done += len(batch)
            if progress is not None:
                progress(done)
    output.writelines(sums.text(ends(plan, writing.form), writing.extra))
    if writing.form == "openmetrics":
        output.write(_FOOT)
    return sums.truth()


def _batch(plan: FleetPlan, writing: Writing, nodes: Sequence[FleetNode]) -> tuple[str, FleetSums]:
    """Return the series of a batch of nodes, and their sums."""
    ending, sums = ends(plan, writing.form), FleetSums(plan, writing.by_node)
    texts: list[str] = []
    for node in nodes:
        ledger = node_ledger(node)
        texts.extend(node_text(ledger, ending, writing.extra, devices=writing.devices))
        sums.add(ledger)
    return "".join(texts), sums
