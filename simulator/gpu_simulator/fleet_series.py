"""A simulated fleet's recorded series as text: what the rules would have recorded, had there been such a fleet."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from gpu_simulator.fleet_ledger import NodeLedger
from gpu_simulator.fleet_owners import UNATTRIBUTED
from gpu_simulator.fleet_plan import HOUR_SECONDS, RECORDED_AFTER_SECONDS, FleetNode, FleetPlan
from gpu_simulator.fleet_truth import Row
from gpu_simulator.identities import stable_uuid

Format = Literal["openmetrics", "import"]
"""OpenMetrics with times in seconds, for promtool; Prometheus' text format with milliseconds, for VictoriaMetrics."""

_MS = 1000
_HOUR_MS = HOUR_SECONDS * _MS


def labels(**values: str) -> str:
    """Labels in braces, escaped; those without a value are left out, as Prometheus has it."""
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items() if value)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class Ends(NamedTuple):
    """For each hour what a sample's line ends with: its time."""

    ledger: tuple[str, ...]
    """Of the hourly ledger."""
    live: tuple[str, ...]
    """Of what is scraped, or recorded all the time."""


def ends(plan: FleetPlan, form: Format) -> Ends:
    """The times of a fleet's samples."""
    unit = 1 if form == "openmetrics" else _MS
    stamps = [plan.stamp(hour) for hour in range(plan.hours)]
    ledger, live = (tuple(f" {(stamp + late) * unit}\n" for stamp in stamps) for late in (RECORDED_AFTER_SECONDS, 0))
    return Ends(ledger, live)


def series(
    name: str, inside: str, values: Iterable[tuple[int, float]], ending: tuple[str, ...], *, zeros: bool = False
) -> str:
    """All samples of one series; those of 0 only with ``zeros``: evidence has them, and the ledger has none."""
    begin = f"{name}{inside} "
    return "".join([f"{begin}{value}{ending[hour]}" for hour, value in values if zeros or value > 0])


def node_text(ledger: NodeLedger, ending: Ends, extra: Mapping[str, str], *, devices: bool) -> Iterator[str]:
    """The owners' series of one node, its facts and prices; with ``devices`` what was used of each device, too."""
    node = ledger.node
    place = {**extra, "cluster": node.cluster, "node": node.name}
    for (owner, mode), lines in ledger.lines.items():
        whose = {
            "workload_namespace": owner.namespace,
            "workload_kind": owner.kind,
            "workload_name": owner.name,
            "team": owner.team,
            "cost_labels": owner.labels,
            "model": node.spec.name,
            "mode": mode,
        }
        yield from quantities_text("owner", {**place, **whose}, lines, ending.ledger)
        yield from money_text("owner", {**place, **whose}, node.currency, lines, ending.ledger)
    facts = node.facts
    known = labels(
        **place,
        instance_type=facts.instance_type,
        capacity_type=facts.capacity_type,
        region=facts.region,
        gpu_product=facts.gpu_product,
    )
    yield series("gpu_node_info", known, ((hour, 1) for hour in ledger.there), ending.live)
    yield series("gpu_exporter_simulated", labels(**place), ((hour, 1) for hour in ledger.there), ending.live)
    if devices:
        yield from _prices(ledger, place, ending.live)
        yield from _evidence(ledger, place, ending.live)


def quantities_text(
    level: str, inside: Mapping[str, str], lines: Mapping[int, Row], ending: tuple[str, ...]
) -> Iterator[str]:
    """The hourly series of a level that are the same in all currencies: seconds and joules."""
    rows = lines.items()
    for state, values in (
        ("active_unprofiled", ((hour, row.active_ms / _MS) for hour, row in rows)),
        ("idle", ((hour, row.idle_ms / _MS) for hour, row in rows)),
        ("unknown", ((hour, row.unknown_ms / _MS) for hour, row in rows)),
    ):
        yield series(f"{level}:gpu_seconds:delta1h", labels(**inside, state=state), values, ending)
    plain = labels(**inside)
    unpriced = ((hour, row.unpriced_ms / _MS) for hour, row in rows)
    yield series(f"{level}:gpu_unpriced_seconds:delta1h", plain, unpriced, ending)
    joules = ((hour, float(row.energy_joules)) for hour, row in rows)
    yield series(f"{level}:gpu_energy_joules:delta1h", plain, joules, ending)


def money_text(
    level: str, inside: Mapping[str, str], currency: str, lines: Mapping[int, Row], ending: tuple[str, ...]
) -> Iterator[str]:
    """The hourly money of a level, in one currency."""
    rows = lines.items()
    for state, values in (
        ("active_unprofiled", ((hour, row.active_cost) for hour, row in rows)),
        ("idle", ((hour, row.idle_cost) for hour, row in rows)),
        ("unknown", ((hour, row.unknown_cost) for hour, row in rows)),
    ):
        yield series(f"{level}:gpu_cost:delta1h", labels(**inside, state=state, currency=currency), values, ending)


def gpu_uuid(node: FleetNode, gpu: int) -> str:
    """The UUID of a physical GPU."""
    return f"GPU-{stable_uuid('fleet', node.plan.seed, node.index, gpu)}"


def slot_uuid(node: FleetNode, slot: int) -> str:
    """The UUID of the device that a slot is, or is on."""
    part = node.slots[slot]
    if not part.instance:
        return gpu_uuid(node, part.gpu)
    return f"MIG-{stable_uuid('fleet', node.plan.seed, node.index, part.gpu, part.instance)}"


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
        device = {
            **place,
            "gpu": str(part.gpu),
            "uuid": slot_uuid(node, slot),
            "gpu_instance": part.instance,
            "mig_profile": part.profile,
            "model": node.spec.name,
        }
        inside = labels(
            **device,
            workload_namespace=owner.namespace,
            workload_kind=owner.kind,
            workload_name=owner.name,
            team=owner.team,
        )
        total = int(memory * (part.share_ratio if part.instance else 1))
        used = int(total * (0.1 + 0.8 * node.random(f"memory/{slot}/{owner}").random()))
        rows = hours.items()
        level = "workload_device:gpu"
        yield series(f"{level}_share:ratio", inside, ((h, round(sum(use) / _HOUR_MS, 6)) for h, use in rows), ending)
        active = ((h, round(use[0] / _HOUR_MS, 6)) for h, use in rows)
        yield series(f"{level}_active:rate1h", inside, active, ending, zeros=True)
        measured = ((h, round((use[0] + use[1]) / _HOUR_MS, 6)) for h, use in rows)
        yield series(f"{level}_measured:rate1h", inside, measured, ending, zeros=True)
        yield series(f"{level}_memory_used_bytes:max1h", inside, ((h, used) for h in hours), ending)
        if part.mode == "shared":
            yield series(f"{level}_estimated:info", inside, ((h, 1) for h in hours), ending)
    for slot, part in enumerate(node.slots):
        total = int(memory * (part.share_ratio if part.instance else 1))
        if node.device(slot) == slot:
            inside = labels(
                **place,
                gpu=str(part.gpu),
                uuid=slot_uuid(node, slot),
                gpu_instance=part.instance,
                mig_profile=part.profile,
                model=node.spec.name,
            )
            yield series(
                "workload_device:gpu_memory_total_bytes:max", inside, ((h, total) for h in ledger.there), ending
            )
