"""Ledgers of a small fleet that is written out by hand, and any ledger at all, for tests of what is made of them."""

from collections.abc import Mapping

from hypothesis import strategies as st

from exporter.cost.dimensions import UNALLOCATED, UNATTRIBUTED, Dimension, LineKey
from exporter.cost.ledger import Chunk, Failure, Figures, FleetLedger
from exporter.cost.window import DAY_SECONDS, HOUR_SECONDS, Window
from exporter.model.attribution import NodeFacts
from exporter.model.ledger import ByState

START = 1_790_812_800
"""2026-10-01T00:00Z."""
ALL: frozenset[Dimension] = frozenset(LineKey._fields)
A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"
HOSTILE = '=cmd|"/c calc"!A1'
MARKUP = "<script>alert(1)</script>"
TURNED = "right\u202eto-left\n\x1b[31mred"


def day(number: int, hours: int = 24) -> Window:
    """A day of the fleet, or its first hours."""
    start = START + number * DAY_SECONDS
    return Window(start_seconds=start, end_seconds=start + hours * HOUR_SECONDS)


def hours(
    *,
    active: float = 0.0,
    profiled: tuple[float, float] = (0.0, 0.0),
    idle: float = 0.0,
    unknown: float = 0.0,
    unpriced: float = 0.0,
    usd: float | None = None,
    eur: float | None = None,
    kwh: float | None = None,
) -> Figures:
    """Figures by GPU-hours and by what the money came to; money of a state is by its hours.

    ``profiled`` are effective and ineffective hours of the active ones, of which the rest is not profiled.
    """
    effective, ineffective = profiled
    parts = ByState(
        effective=effective,
        ineffective=ineffective,
        unprofiled=active - effective - ineffective,
        idle=idle,
        unknown=unknown,
    )
    amounts = {"USD": usd, "EUR": eur}
    return Figures(
        seconds=parts.scaled(HOUR_SECONDS),
        unpriced_seconds=unpriced * HOUR_SECONDS,
        energy_joules=None if kwh is None else kwh * 3.6e6,
        money={
            name: parts.scaled(one / parts.total) if parts.total else ByState(unprofiled=one)
            for name, one in amounts.items()
            if one is not None
        },
    )


def owner(namespace: str, workload: str, team: str = "", **more: str) -> LineKey:
    """The line of a Job on the only node."""
    fields = {"node": "n1", "pool": "p5.48xlarge on-demand", "kind": "Job", "model": H100, "mode": "exclusive"}
    return LineKey(**{**fields, "namespace": namespace, "workload": workload, "team": team, **more})


def nobody(kind: str, **more: str) -> LineKey:
    """A line of nobody's on the only node."""
    return LineKey(**{"kind": kind, "node": "n1", "pool": "p5.48xlarge on-demand", "model": H100, **more})


def ledger(
    *days: Mapping[LineKey, Figures],
    dimensions: frozenset[Dimension] = ALL,
    capacity: Mapping[str, float] | None = None,
    failures: tuple[Failure, ...] = (),
    notes: tuple[str, ...] = (),
) -> FleetLedger:
    """A ledger of whole days whose capacity is that of its lines, unless there is another."""
    chunks = []
    for number, lines in enumerate(days):
        summed: dict[str, float] = {}
        for key, figures in lines.items():
            summed[key.cluster] = summed.get(key.cluster, 0.0) + figures.seconds.total
        chunks.append(
            Chunk(
                window=day(number),
                lines=lines,
                capacity_seconds=summed if capacity is None else capacity,
                recorded_hours=dict.fromkeys(summed if capacity is None else capacity, 24),
            )
        )
    window = Window(start_seconds=START, end_seconds=START + len(days) * DAY_SECONDS, label="2026-10")
    return FleetLedger(
        window=window,
        dimensions=dimensions,
        chunks=tuple(chunks),
        nodes={("", "n1"): NodeFacts(instance_type="p5.48xlarge", capacity_type="on-demand", region="us-east-1")},
        failures=failures,
        engine="Prometheus 2.42.0",
        notes=notes,
    )


def small_ledger() -> FleetLedger:
    """Two days with all that a report must get right: every kind of line, two currencies, hostile names, a failure."""
    first = {
        owner("vision", "resnet", "core"): hours(active=172.8, profiled=(43.2, 86.4), idle=19.2, usd=1344.0, kwh=110.5),
        owner("vision", "notebook", "core", kind="Notebook", mode="mig"): hours(idle=12.0, usd=84.0),
        owner("lab", HOSTILE, MARKUP): hours(active=6.0, unknown=18.0, usd=168.0),
        owner("lab", TURNED, "", model=A100): hours(active=10.0, idle=14.0, unpriced=24.0),
        owner("batch", "", kind=""): hours(active=1.0, idle=3.0, usd=28.0),
        nobody(UNATTRIBUTED): hours(active=2.0, usd=14.0),
        nobody(UNALLOCATED): hours(idle=10.0, usd=70.01),
        nobody(UNALLOCATED, model=A100): hours(idle=24.0, eur=33.333),
    }
    second = {
        owner("vision", "resnet", "core"): hours(active=86.4, idle=9.6, usd=672.0, kwh=55.25),
        owner("lab", TURNED, "", model=A100): hours(active=12.0, idle=12.0, eur=24.0),
        nobody(UNALLOCATED): hours(idle=96.0, usd=672.0),
    }
    failure = Failure(
        window=day(1),
        what='workload:gpu_ledger:delta1h{quantity="energy_joules"}',
        reason="HTTP 503 after 4 retries; give --prometheus-timeout more time",
    )
    return ledger(first, second, failures=(failure,), notes=(f"hours are missing on {MARKUP}",))


_NAMES = st.sampled_from(["", "a", "b", "c"])
_SECONDS = st.floats(0, 1e6)
_MONEY = st.floats(0, 1e5)


@st.composite
def figures(draw: st.DrawFn) -> Figures:
    """Any figures."""
    parts = st.builds(ByState, **dict.fromkeys(ByState.__slots__, _MONEY))
    return Figures(
        seconds=draw(st.builds(ByState, **dict.fromkeys(ByState.__slots__, _SECONDS))),
        unpriced_seconds=draw(_SECONDS),
        energy_joules=draw(st.none() | _SECONDS),
        money=draw(st.dictionaries(st.sampled_from(["EUR", "USD"]), parts, max_size=2)),
    )


@st.composite
def keys(draw: st.DrawFn) -> LineKey:
    """The name of any line."""
    kind = draw(st.sampled_from(["Job", "Deployment", UNATTRIBUTED, UNALLOCATED]))
    place = {name: draw(_NAMES) for name in ("cluster", "node", "pool", "model", "mode")}
    if kind in {UNATTRIBUTED, UNALLOCATED}:
        return LineKey(kind=kind, **place)
    whose = {name: draw(_NAMES) for name in ("namespace", "workload", "team")}
    return LineKey(kind=kind, **place, **whose)


@st.composite
def ledgers(draw: st.DrawFn) -> FleetLedger:
    """Any ledger whose lines sum to its capacity."""
    return ledger(*draw(st.lists(st.dictionaries(keys(), figures(), max_size=8), min_size=1, max_size=3)))
