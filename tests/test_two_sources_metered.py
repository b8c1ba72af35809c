"""Metering of two sources at any schedule: all time and all energy once, and no counter decreases."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metering_support import namespace_owner, plain_node
from pipeline_support import DirectSource

from exporter.accounting.ledger import Ledgers
from exporter.accounting.meter import Meter
from exporter.agent.attributor import Attributor
from exporter.agent.metering import Metering
from exporter.agent.node import Node
from exporter.agent.sources import Sources
from exporter.attribution.processes import PodLookup
from exporter.model.devices import DeviceState, Gpu, GpuReading, MigInstance, MigReading, Reading, SourceState
from exporter.model.fields import Field
from exporter.model.ledger import LedgerView

EPOCH = 1_800_000_000.0
GPUS = 3
SOURCES = ("nvml", "dcgm")
ENERGY, ENGINE, UTIL = Field.TOTAL_ENERGY_CONSUMPTION, Field.PROF_GR_ENGINE_ACTIVE, Field.GPU_UTIL
MILLIJOULES_PER_SECOND = 15_000
"""Low enough that the energy of an absent GPU never exceeds the limit of a sample."""
OLDER_SECONDS = {"nvml": 0.05, "dcgm": 0.9}
"""Time by which an energy counter is older than its reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step: time passes, sources deliver, the agent ticks."""

    seconds: float
    wall_set_by: float
    nvml: SourceState
    dcgm: SourceState
    readings: tuple[tuple[str, float], ...]
    """Source and age in seconds."""
    gone: dict[tuple[str, int], DeviceState | None]
    """Fault of a GPU in a source; ``None``: it is not listed. The last GPU never has a fault."""
    layouts: dict[str, int]
    """Number of instances of GPU 0 in a source; 0: it is whole."""
    profiled: bool


states = st.sampled_from([SourceState.UP, SourceState.UP, SourceState.UP, SourceState.DIED, SourceState.HUNG])
script = st.lists(
    st.builds(
        Step,
        seconds=st.sampled_from([0.05, 0.3, 0.5, 1.0, 1.0, 1.0, 2.9, 4.0, 20.0]),
        wall_set_by=st.sampled_from([0.0, 0.0, 0.0, 0.0, 7200.0, -7200.0]),
        nvml=states,
        dcgm=states,
        readings=st.lists(st.tuples(st.sampled_from(["nvml", "dcgm"]), st.floats(0.0, 1.5)), max_size=4).map(tuple),
        gone=st.dictionaries(
            st.tuples(st.sampled_from(["nvml", "dcgm"]), st.integers(0, GPUS - 2)),
            st.sampled_from([None, DeviceState.LOST, DeviceState.FAILED]),
            max_size=2,
        ),
        layouts=st.fixed_dictionaries({"nvml": st.sampled_from([0, 0, 2, 7]), "dcgm": st.sampled_from([0, 0, 2, 7])}),
        profiled=st.booleans(),
    ),
    min_size=1,
    max_size=20,
)
WELL = Step(
    seconds=1.0,
    wall_set_by=0.0,
    nvml=SourceState.UP,
    dcgm=SourceState.UP,
    readings=(("nvml", 0.1), ("dcgm", 0.2)),
    gone={},
    layouts={"nvml": 0, "dcgm": 0},
    profiled=True,
)
"""First step: a GPU that was never seen up does not count as missing."""


def reading(step: Step, source: str, at: float, wall: float) -> Reading:
    gpus = []
    energy = (at - OLDER_SECONDS[source]) * MILLIJOULES_PER_SECOND
    for index in range(GPUS):
        state = step.gone.get((source, index), DeviceState.UP)
        if state is None:
            continue
        instances = step.layouts[source] if index == 0 else 0
        gpu = Gpu(
            uuid=f"GPU-{index}",
            index=index,
            minor=index,
            model="A100",
            pci_bus_id="",
            mig_enabled=bool(instances),
            compute_slices=7,
            memory_slices=8,
        )
        if state is not DeviceState.UP:
            gpus.append(GpuReading(gpu=gpu, state=state, reason="gpu_is_lost"))
            continue
        values = {UTIL: 50, ENERGY: energy}
        profiled = {ENGINE: 0.5} if source == "dcgm" and step.profiled else {}
        parts = tuple(
            MigReading(instance=instance(gpu.uuid, number, instances), values=profiled) for number in range(instances)
        )
        gpus.append(GpuReading(gpu=gpu, values={**values, **profiled}, instances=parts))
    return Reading(
        source=source, taken_at_seconds=wall, duration_seconds=0.0, steady_seconds=at, gpus=tuple(gpus), errors={"x": 1}
    )


def instance(parent: str, number: int, of: int) -> MigInstance:
    return MigInstance(
        uuid=f"MIG-{of}-{number}",
        parent_uuid=parent,
        gpu_instance_id=number,
        compute_instance_id=0,
        profile="1g.5gb" if of == 7 else "3g.20gb",
        compute_slices=7 // of,
        memory_slices=8 // of,
    )


@dataclass
class Twins:
    """The node, and a separate merge of the same two sources, which shows the input of the node."""

    nodes: dict[str, DirectSource] = field(default_factory=lambda: {one: DirectSource(name=one) for one in SOURCES})
    mine: dict[str, DirectSource] = field(default_factory=lambda: {one: DirectSource(name=one) for one in SOURCES})

    def set(self, name: str, state: SourceState, more: Iterable[Reading]) -> None:
        more = tuple(more)
        for source in (self.nodes[name], self.mine[name]):
            source.state = state
            source.readings += more


def node_of(twins: Twins) -> Node:
    nowhere = Path("/nonexistent")
    metering = Metering(
        meter=Meter(1.0, namespace_owner),
        ledgers=Ledgers(),
    )
    return plain_node(
        Sources(nvml=twins.nodes["nvml"], dcgm=twins.nodes["dcgm"], stale_after_seconds=3.0),
        Attributor(kubelet=None, lookup=PodLookup(nowhere, nowhere), expiry_seconds=60.0),
        metering=metering,
    )


@settings(deadline=None)
@given(script=script)
def test_all_time_and_all_energy_are_metered_once_and_no_total_falls(script: list[Step]) -> None:
    twins = Twins()
    node = node_of(twins)
    sources = Sources(nvml=twins.mine["nvml"], dcgm=twins.mine["dcgm"], stale_after_seconds=3.0)
    wall, steady = EPOCH, 100.0
    newest, heard = dict.fromkeys(SOURCES, 0.0), dict.fromkeys(SOURCES, 0)
    given_out: list[Reading] = []
    before: LedgerView | None = None
    for step in (WELL, *script):
        wall, steady = wall + step.seconds + step.wall_set_by, steady + step.seconds
        for name in SOURCES:
            taken = sorted({ago for source, ago in step.readings if source == name}, reverse=True)
            new = [reading(step, name, steady - ago, wall - ago) for ago in taken if steady - ago > newest[name]]
            newest[name] = max([newest[name], *(one.instant for one in new)])
            heard[name] += len(new)
            twins.set(name, step.nvml if name == "nvml" else step.dcgm, new)
        snapshot = node.tick(wall, steady)
        given_out += sources.take(wall, steady)
        assert node.record.newest is None or node.record.newest.instant == given_out[-1].instant
        assert {part: count for (part, why), count in snapshot.errors.items() if why == "x"} == {
            name: count for name, count in heard.items() if count
        }
        for uuid in {view.gpu.uuid for view in snapshot.devices}:
            whole = [view for view in snapshot.devices if view.gpu.uuid == uuid]
            assert sum(view.share_ratio for view in whole if view.instance) <= 1 + 1e-9
            assert len({view.uuid for view in whole}) == len(whole)
        view = snapshot.metering.ledger
        if before and view:
            check_not_fallen(before, view)
        before = view or before
    if before is None:
        return
    assert before.conservation_error_seconds == pytest.approx(0.0, abs=1e-6)
    totals = before.accounts.values()
    first_seen = (next(one.instant for one in given_out if is_in(one, uuid)) for uuid in seen(given_out))
    expected_seconds = sum(given_out[-1].instant - began for began in first_seen)
    assert sum(total.seconds.total for total in totals) == pytest.approx(expected_seconds, abs=1e-6)
    counters = [
        [gpu.values[ENERGY] for one in given_out for gpu in one.gpus if gpu.gpu.uuid == uuid and ENERGY in gpu.values]
        for uuid in seen(given_out)
    ]
    joules = sum(max(reported) - reported[0] for reported in counters if reported) / 1000
    assert all(reported == sorted(reported) for reported in counters), "no counter decreases when the sources alternate"
    assert sum(total.energy_joules for total in totals) == pytest.approx(joules, rel=1e-9, abs=1e-6)


def seen(readings: list[Reading]) -> set[str]:
    return {gpu.gpu.uuid for one in readings for gpu in one.gpus}


def is_in(one: Reading, uuid: str) -> bool:
    return any(gpu.gpu.uuid == uuid for gpu in one.gpus)


def check_not_fallen(before: LedgerView, now: LedgerView) -> None:
    assert before.accounts.keys() <= now.accounts.keys()
    for account, was in before.accounts.items():
        totals = now.accounts[account]
        assert totals.seconds.total >= was.seconds.total
        assert totals.seconds.unknown >= was.seconds.unknown
        assert totals.energy_joules >= was.energy_joules
