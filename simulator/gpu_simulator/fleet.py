"""Writes a simulated fleet's recorded series, node after node, and counts the truth meanwhile."""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TextIO

from gpu_simulator.fleet_ledger import node_ledger
from gpu_simulator.fleet_plan import FleetNode, FleetPlan, fleet_nodes
from gpu_simulator.fleet_series import Format, ends, node_text
from gpu_simulator.fleet_sums import FleetSums
from gpu_simulator.fleet_truth import FleetTruth, TruthCounter

_BATCH_NODES = 4
_HEAD = "# HELP gpu_exporter_simulated 1: nothing here is real. Written by gpu-cost-exporter simulate fleet.\n"
_FOOT = "# EOF\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """How a fleet is written."""

    form: Format
    devices: bool = True
    """Also prices by GPU and what was used of each device: four times as much."""
    by_node: bool = False
    """The truth keeps the nodes apart."""
    processes: int = 1
    extra: Mapping[str, str] = field(default_factory=dict)
    """Labels that every series gets: ``{"replica": "a"}``."""


class _Batch(NamedTuple):
    text: str
    sums: FleetSums
    counter: TruthCounter
    nodes: int


def write_fleet(
    plan: FleetPlan, output: TextIO, writing: Writing, progress: Callable[[int], None] | None = None
) -> FleetTruth:
    """Write all series of a fleet; a few nodes and all sums of workloads are in memory at a time.

    Args:
        plan: The fleet.
        output: Takes the text; a short one every few nodes.
        writing: In which format, and what.
        progress: Told how many nodes are done.

    Returns:
        The truth, by day.
    """
    nodes = fleet_nodes(plan)
    batches = [nodes[first : first + _BATCH_NODES] for first in range(0, len(nodes), _BATCH_NODES)]
    sums, counter = FleetSums(), _counter(plan, writing)
    output.write(_HEAD)
    done = 0
    with _mapped(partial(_batch, plan, writing), batches, writing.processes) as results:
        for batch in results:
            output.write(batch.text)
            sums.merge(batch.sums)
            counter.merge(batch.counter)
            done += batch.nodes
            if progress is not None:
                progress(done)
    output.writelines(sums.text(ends(plan, writing.form), writing.extra))
    if writing.form == "openmetrics":
        output.write(_FOOT)
    return counter.truth()


def _counter(plan: FleetPlan, writing: Writing) -> TruthCounter:
    return TruthCounter(plan.start_seconds, plan.end_seconds, writing.by_node)


def _batch(plan: FleetPlan, writing: Writing, nodes: Sequence[FleetNode]) -> _Batch:
    ending = ends(plan, writing.form)
    sums, counter = FleetSums(), _counter(plan, writing)
    texts: list[str] = []
    for node in nodes:
        ledger = node_ledger(node)
        texts.extend(node_text(ledger, ending, writing.extra, devices=writing.devices))
        sums.add(ledger)
        counter.add(ledger)
    return _Batch("".join(texts), sums, counter, len(nodes))


@contextmanager
def _mapped(
    make: Callable[[Sequence[FleetNode]], _Batch], batches: Sequence[Sequence[FleetNode]], processes: int
) -> Iterator[Iterator[_Batch]]:
    if processes <= 1 or len(batches) <= 1:
        yield map(make, batches)
        return
    # Not by fork: whoever calls may have threads.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield pool.imap(make, batches)
