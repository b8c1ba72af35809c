"""Small ledgers for tests of FOCUS and of contrib/reconcile."""

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal

from exporter.cost.dimensions import LineKey
from exporter.cost.focus import FOCUS_DIMENSIONS, OWN_COLUMNS, SPLIT_COLUMNS, FocusSettings, columns_of, write_focus
from exporter.cost.ledger import Chunk, Figures, FleetLedger
from exporter.cost.window import Window
from exporter.model.attribution import NodeFacts
from exporter.model.ledger import ByState

DAY = 86_400
START = 1_790_812_800  # 2026-10-01T00:00:00Z
H100 = "NVIDIA H100 80GB HBM3"
FACTS = NodeFacts(instance_type="p5.48xlarge", capacity_type="on-demand", region="us-east-1")

Lines = Mapping[LineKey, Figures]


def key(
    workload: str = "", *, node: str = "node-a", mode: str = "exclusive", namespace: str = "research", **more: str
) -> LineKey:
    """Return a line of an owner; without a workload it has only the kind of a line without an owner."""
    kind = more.pop("kind", "Deployment")
    if not workload:
        namespace = ""
    return LineKey(
        cluster=more.pop("cluster", "prod"),
        node=node,
        pool="p5.48xlarge on-demand",
        namespace=namespace,
        kind=kind,
        workload=workload,
        model=more.pop("model", H100),
        mode=mode,
        **more,
    )


def nobody(kind: str = "Unallocated", **more: str) -> LineKey:
    """Return a line without an owner."""
    return key("", kind=kind, **more)


def by_state(active: float, profiled: tuple[float, float], *, idle: float, unknown: float) -> ByState:
    """Figures by state; ``profiled`` are the effective and ineffective parts of the active figure."""
    effective, ineffective = profiled
    return ByState(
        effective=effective,
        ineffective=ineffective,
        unprofiled=active - effective - ineffective,
        idle=idle,
        unknown=unknown,
    )


def held(
    hours: float,
    per_hour: float | None = 2.10,
    *,
    active: float = 0.5,
    profiled: tuple[float, float] = (0.0, 0.0),
    idle: float = 0.3,
    currency: str = "USD",
    unpriced_hours: float = 0.0,
) -> Figures:
    """Return GPU-hours at a price, in parts active, idle and the rest unknown; ``None`` for no price.

    ``profiled`` are effective and ineffective parts of the hours, within the active ones.
    """
    parts = by_state(active, profiled, idle=idle, unknown=max(0.0, 1 - active - idle))
    seconds = hours * 3600
    money = {}
    if per_hour is not None:
        money[currency] = parts.scaled((hours - unpriced_hours) * per_hour)
    return Figures(
        seconds=parts.scaled(seconds),
        unpriced_seconds=seconds if per_hour is None else unpriced_hours * 3600,
        money=money,
    )


def ledger(*days: Lines, start: int = START, facts: NodeFacts = FACTS, chunk_seconds: int = DAY) -> FleetLedger:
    """Return a ledger of whole days, each with its lines; the capacity is the sum of the lines."""
    chunks = []
    nodes = {}
    for number, lines in enumerate(days):
        at = start + number * chunk_seconds
        clusters: dict[str, float] = {}
        for line, figures in lines.items():
            clusters[line.cluster] = clusters.get(line.cluster, 0.0) + figures.seconds.total
            nodes[line.cluster, line.node] = facts
        chunks.append(
            Chunk(
                window=Window(start_seconds=at, end_seconds=at + chunk_seconds),
                lines=lines,
                capacity_seconds=clusters,
                recorded_hours=dict.fromkeys(clusters, chunk_seconds // 3600),
            )
        )
    window = Window(start_seconds=start, end_seconds=start + len(days) * chunk_seconds)
    return FleetLedger(
        window=window, dimensions=FOCUS_DIMENSIONS, chunks=tuple(chunks), nodes=nodes, engine="Prometheus 2.42.0"
    )


def exported(
    of: FleetLedger, version: str = "1.4", settings: FocusSettings | None = None
) -> tuple[str, list[dict[str, str]]]:
    """Return the file's text and its rows."""
    stream = io.StringIO()
    write_focus(of, stream, version=version, settings=settings)
    return stream.getvalue(), list(csv.DictReader(io.StringIO(stream.getvalue())))


_DECIMAL, _PRICE = re.compile(r"-?[0-9]+\.[0-9]+"), re.compile(r"[0-9]+\.[0-9]+")
_PATTERNS = {
    "decimal": _DECIMAL,
    "price": _PRICE,
    "datetime": re.compile(r"20[0-9]{2}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9]Z"),
    "currency": re.compile(r"[A-Z]{3}"),
    "unit": re.compile(r"GPU-Hours"),
}
_SUMMED = {"BilledCost", "ConsumedQuantity", "ContractedCost", "EffectiveCost", "ListCost", "PricingQuantity"}
_NEAR = Decimal("1e-6")
# The second column of a pair is null if the first one is; in the first four pairs, also vice versa.
_WITH = (
    ("PricingQuantity", "PricingUnit"),
    ("ConsumedQuantity", "ConsumedUnit"),
    ("RegionId", "RegionName"),
    ("SubAccountId", "SubAccountName"),
    ("ResourceId", "ResourceType"),
    ("SkuId", "SkuPriceId"),
    ("SkuPriceId", "SkuPriceDetails"),
)


def assert_promises(text: str, version: str) -> None:
    """Assert the requirements of the specification on every file, and the writer's rules for split charges."""
    rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    header = text.split("\n", 1)[0].split(",")
    known = columns_of(version)
    assert {name for name, column in known.items() if column.level == "mandatory"} <= set(header)
    of_focus = [name for name in header if not name.startswith("x_")]
    assert header[: len(of_focus)] == of_focus, "x_ columns are last"
    assert set(of_focus) <= set(known)
    assert len(set(header)) == len(header)
    charges: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        assert None not in row
        assert None not in row.values()
        _assert_values(row, version)
        _assert_row(row)
        of = ("ResourceId", "SkuPriceId", "ChargePeriodStart", "BillingCurrency", "BillingAccountId", "ChargeClass")
        charges.setdefault(tuple(row[name] for name in of), []).append(row)
    for charge in charges.values():
        _assert_charge(charge, "" if "AllocatedMethodId" in known else "x_")


def _assert_values(row: Mapping[str, str], version: str) -> None:
    known, newest = columns_of(version), columns_of("1.4")
    for name, value in row.items():
        column = known.get(name) or newest.get(name.removeprefix("x_"))
        kind = column.kind if column else OWN_COLUMNS[name]
        if not value:
            assert column is None or column.nullable, f"{name} is null"
            continue
        assert value not in {"NULL", "null"}, name
        assert not column or not column.allowed or value in column.allowed, f"{name}: {value}"
        pattern = _PATTERNS.get(kind)
        assert pattern is None or pattern.fullmatch(value), f"{name}: {value}"
        if kind in {"json", "tags"}:
            found = json.loads(value)
            assert isinstance(found, dict), name
            assert kind == "json" or all(isinstance(tag, str) for tag in found.values()), f"{name}: {value}"


def _assert_row(row: Mapping[str, str]) -> None:
    assert row["ChargePeriodStart"] < row["ChargePeriodEnd"] <= row["BillingPeriodEnd"]
    assert row["BillingPeriodStart"] <= row["ChargePeriodStart"]
    assert (row["ServiceCategory"], row["ServiceSubcategory"]) == ("Compute", "Containers")
    for leader, follower in _WITH:
        assert row[leader] or not row[follower], f"{follower} without {leader}"
    for leader, follower in _WITH[:4]:
        assert row[follower] or not row[leader], f"{leader} without {follower}"
    if not row["ChargeClass"]:
        for name in ("PricingQuantity", "ConsumedQuantity", "SkuId", "SkuPriceId", "PricingCategory"):
            assert row[name], name
    for name in ("x_ActiveRatio", "x_Coverage"):
        assert 0 <= Decimal(row[name] or 0) <= 1
    if row["ContractedUnitPrice"]:
        product = Decimal(row["ContractedUnitPrice"]) * Decimal(row["PricingQuantity"])
        assert abs(product - Decimal(row["ContractedCost"])) <= _NEAR * max(product, Decimal(1))
    parts = sum(Decimal(row[f"x_{kind}Cost"]) for kind in ("Active", "Idle", "Unknown"))
    assert parts == Decimal(row["EffectiveCost"])


def _assert_charge(charge: Sequence[Mapping[str, str]], prefix: str) -> None:
    """Assert that the rows of one charge are a single whole charge, or parts that sum to it."""
    method, by_details, owner, name, tags = (
        f"{prefix}Allocated{of}" for of in ("MethodId", "MethodDetails", "ResourceId", "ResourceName", "Tags")
    )
    split = [f"{prefix}{column}" for column in SPLIT_COLUMNS]
    if len(charge) == 1:
        assert not any(charge[0][column] for column in split)
        return
    details = [json.loads(row[by_details], parse_float=Decimal) for row in charge]
    elements = [element for detail in details for element in detail["Elements"]]
    assert [set(element) for element in elements] == [{"AllocatedRatio", "UsageUnit", "UsageQuantity"}] * len(charge)
    ratios = [element["AllocatedRatio"] for element in elements]
    assert all(0 <= ratio <= 1 for ratio in ratios)
    assert sum(ratios) == 1
    cost = sum(Decimal(row["EffectiveCost"]) for row in charge)
    for row, ratio in zip(charge, ratios, strict=True):
        assert row[method]
        assert bool(row[owner]) == bool(row[name]) == (row["x_WorkloadKind"] not in {"Unallocated", "Unattributed"})
        assert row[owner] or not row[tags]
        assert not set(json.loads(row[tags] or "{}")) & set(json.loads(row["Tags"] or "{}"))
        assert abs(Decimal(row["EffectiveCost"]) - cost * ratio) <= _NEAR * max(cost, Decimal(1))
    alike = {column for column in charge[0] if not column.startswith("x_")} - _SUMMED - set(split)
    for column in alike:
        assert len({row[column] for row in charge}) == 1, column


def as_csv(rows: Iterable[Iterable[str]]) -> str:
    """Return rows as CSV with ``\\r\\n`` as the end of a row; line ends within values are quoted."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\r\n").writerows(rows)
    return stream.getvalue()
