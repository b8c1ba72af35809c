"""The number of replicas of a shared GPU is kept while the kubelet does not advertise it, also across restarts."""

import json
from pathlib import Path

import pytest
from agent_support import running_agent
from join_support import NOW, instance, mig_uuid
from metering_support import plain_viewer
from pipeline_support import save_now
from test_join import gpu, gpu_uuid, held, replicas_of
from test_metering import ML, seconds, shown, started

from exporter.accounting.state_file import StateFile
from exporter.agent.attributor import Attributor
from exporter.agent.metering import Metering
from exporter.attribution.processes import PodLookup
from exporter.model.attribution import UNALLOCATED, UNATTRIBUTED, Allocations, ContainerAllocation, DeviceIds
from exporter.model.devices import GpuReading, MigReading, Reading
from exporter.model.fields import Field

HOLDERS = (held("a", f"{gpu_uuid(0)}::0"), held("b", f"{gpu_uuid(0)}::1"))
WHOLE = GpuReading(gpu=gpu(0), values={Field.PROF_GR_ENGINE_ACTIVE: 0.9, Field.GPU_UTIL: 90})
IN_PARTS = GpuReading(gpu=gpu(0, mig=True), instances=tuple(MigReading(instance=instance(one)) for one in (1, 2)))
"""Two instances of a seventh each; five sevenths have no instance."""


class Answers:
    """Answers of the kubelet, set by a test."""

    def __init__(self, *advertised: str, holders: tuple[ContainerAllocation, ...] = HOLDERS) -> None:
        self.problem, self.errors = "", dict[str, int]()
        self.latest = Allocations(
            answered_at_seconds=NOW,
            containers=holders,
            allocatable=(DeviceIds(resource="nvidia.com/gpu", ids=advertised),),
        )


def attributor(nowhere: Path, metering: Metering, *advertised: str) -> Attributor:
    return Attributor(
        kubelet=Answers(*advertised),
        lookup=PodLookup(nowhere, nowhere),
        expiry_seconds=60.0,
        replicas=metering.replicas,
    )


def live(metering: Metering, made: Attributor, first: float, last: float, seen: GpuReading = WHOLE) -> None:
    """Run the agent's samples of a GPU."""
    viewer = plain_viewer(made.lookup)
    steady = first
    while steady <= last:
        reading = Reading(source="nvml", taken_at_seconds=NOW + steady, duration_seconds=0.0, gpus=(seen,))
        views = viewer.views(reading, made.join(reading, NOW + steady, steady), {}, steady)
        metering.observe(views, sampled_steady=steady, now=NOW + steady, steady=steady)
        save_now(metering, NOW + steady, steady)
        steady += 1.0


@pytest.mark.parametrize("restarts", [False, True])
def test_holders_of_an_unhealthy_gpu_keep_their_shares(tmp_path: Path, *, restarts: bool) -> None:
    metering = started(tmp_path)
    healthy = attributor(tmp_path / "no", metering, *replicas_of(0, 4))
    live(metering, healthy, 0.0, 10.0)
    if restarts:
        metering = started(tmp_path, steady=11.0)
        healthy = attributor(tmp_path / "no", metering)
    else:
        healthy.kubelet = Answers()
    live(metering, healthy, 11.0, 20.0)
    save_now(metering, NOW, 30.0, last=True)
    assert sum(seconds(shown(metering, 30.0), ML)) == pytest.approx(20.0 * 2 / 4)
    assert sum(seconds(shown(metering, 30.0), UNALLOCATED)) == pytest.approx(20.0 * 2 / 4)


@pytest.mark.parametrize("seen", [WHOLE, IN_PARTS], ids=["as listed", "in MIG mode since"])
def test_never_advertised_shared_gpu_is_unattributed(tmp_path: Path, seen: GpuReading) -> None:
    metering = started(tmp_path)
    live(metering, attributor(tmp_path / "no", metering), 0.0, 10.0, seen)
    save_now(metering, NOW, 30.0, last=True)
    assert sum(seconds(shown(metering, 30.0), UNATTRIBUTED)) == pytest.approx(10.0)
    assert sum(seconds(shown(metering, 30.0), ML)) == sum(seconds(shown(metering, 30.0), UNALLOCATED)) == 0


def test_expired_answer_leaves_no_slice_of_a_partitioned_gpu_unallocated(tmp_path: Path) -> None:
    metering = started(tmp_path)
    made = attributor(tmp_path / "no", metering)
    made.kubelet = Answers(holders=(held("a", mig_uuid(1)),))
    live(metering, made, 0.0, 80.0, IN_PARTS)
    save_now(metering, NOW, 90.0, last=True)
    view = shown(metering, 90.0)
    assert sum(seconds(view, ML)) == pytest.approx(60.0 / 7)
    assert sum(seconds(view, UNALLOCATED)) == pytest.approx(60.0 * 6 / 7), "free while the answer is valid"
    assert sum(seconds(view, UNATTRIBUTED)) == pytest.approx(20.0)


def test_replica_counts_survive_a_reading_without_gpus(tmp_path: Path) -> None:
    made = attributor(tmp_path, started(), *replicas_of(0, 4))
    made.join(None, NOW, 0.0)
    made.kubelet = Answers()
    made.join(None, NOW, 1.0)
    reading = Reading(source="nvml", taken_at_seconds=NOW, duration_seconds=0.0, gpus=(GpuReading(gpu=gpu(0)),))
    holders = made.join(reading, NOW, 2.0).holders[gpu_uuid(0)]
    assert [one.share_ratio for one in holders] == [0.25, 0.25]


@pytest.mark.parametrize(
    "kept",
    [7, [["GPU-1", "r"]], [["GPU-1", "r", 0]], [["GPU-1", "r", True]], [["GPU-1", "r", 1e3]], [[1, "r", 2]], [5]],
)
def test_state_with_invalid_replicas_is_set_aside(tmp_path: Path, kept: object) -> None:
    live(started(tmp_path), attributor(tmp_path / "no", started()), 0.0, 2.0)
    state = StateFile(tmp_path).load()
    assert state is not None
    StateFile(tmp_path).save({**state, "replicas": kept})
    assert "is damaged" in started(tmp_path).problem


def test_agent_saves_the_replica_counts_of_its_gpus(tmp_path: Path) -> None:
    with running_agent("--simulate", "t4-timeslicing", "--state-dir", str(tmp_path)) as agent:
        agent.until(lambda page: any(name.startswith("gpu_ledger_") for name in page), "the ledger")
        agent.end()
    state = json.loads((tmp_path / "ledger.json").read_bytes())["state"]
    assert sorted(count for _, _, count in state["replicas"]) == [4, 4]
