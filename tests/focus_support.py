"""Small ledgers for tests of FOCUS and of contrib/reconcile."""

import csv
import io
from collections.abc import Iterable, Mapping

from exporter.model import Money, NodeFacts
from exporter.report.fleet.values import Chunk, Figures, FleetLedger, LineKey, Window
from exporter.report.focus import FOCUS_DIMENSIONS, FocusSettings, write_focus

DAY = 86_400
START = 1_790_812_800  # 2026-10-01T00:00:00Z
H100 = "NVIDIA H100 80GB HBM3"
FACTS = NodeFacts(instance_type="p5.48xlarge", capacity_type="on-demand", region="us-east-1")

Lines = Mapping[LineKey, Figures]


def key(
    workload: str = "", *, node: str = "node-a", mode: str = "exclusive", namespace: str = "research", **more: str
) -> LineKey:
    """A line of an owner; without a workload it is for the kind of nobody."""
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
    """A line of what no owner held."""
    return key("", kind=kind, **more)


def held(
    hours: float,
    per_hour: float | None = 2.10,
    *,
    active: float = 0.5,
    idle: float = 0.3,
    currency: str = "USD",
    unpriced_hours: float = 0.0,
) -> Figures:
    """GPU-hours at a price, in parts active, idle and the rest unknown; ``None`` for no price."""
    seconds = hours * 3600
    money = {}
    if per_hour is not None:
        paid = (hours - unpriced_hours) * per_hour
        money[currency] = Money(active=paid * active, idle=paid * idle, unknown=paid * max(0.0, 1 - active - idle))
    return Figures(
        active_seconds=seconds * active,
        idle_seconds=seconds * idle,
        unknown_seconds=seconds * max(0.0, 1 - active - idle),
        unpriced_seconds=seconds if per_hour is None else unpriced_hours * 3600,
        money=money,
    )


def ledger(*days: Lines, start: int = START, facts: NodeFacts = FACTS, chunk_seconds: int = DAY) -> FleetLedger:
    """A ledger of whole days, each with its lines; capacity is what the lines sum to."""
    chunks = []
    nodes = {}
    for number, lines in enumerate(days):
        at = start + number * chunk_seconds
        clusters: dict[str, float] = {}
        for line, figures in lines.items():
            clusters[line.cluster] = clusters.get(line.cluster, 0.0) + figures.allocated_seconds
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
    """The file's text and its rows."""
    stream = io.StringIO()
    write_focus(of, stream, version=version, settings=settings)
    return stream.getvalue(), list(csv.DictReader(io.StringIO(stream.getvalue())))


def with_cells(text: str, changes: Iterable[tuple[int, str, str]]) -> str:
    """The CSV with some cells changed: row from 0, column, value."""
    rows = list(csv.reader(io.StringIO(text)))
    for row, column, value in changes:
        rows[row + 1][rows[0].index(column)] = value
    return as_csv(rows)


def as_csv(rows: Iterable[Iterable[str]]) -> str:
    """Rows as CSV; what could be taken for the end of a row is quoted, as that of a row is ``\\r\\n`` here."""
    stream = io.StringIO()
    csv.writer(stream, lineterminator="\r\n").writerows(rows)
    return stream.getvalue()
