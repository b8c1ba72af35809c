"""Scenarios as ground truth: pure, exact in their integrals, and like the simulated hardware."""

import math
import re
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.attribution import processes as cgroup
from exporter.errors import ConfigError
from exporter.model.fields import Field
from gpu_simulator import scenario
from gpu_simulator.activity import Signal, noise, ramp, sine, square, steady, steps
from gpu_simulator.models import MIB, MODELS, LayoutError, place
from gpu_simulator.truth import Fault

LEVEL = st.floats(0.0, 1.0)
SECONDS = st.floats(0.5, 1000.0)

SIGNALS = st.one_of(
    st.builds(steady, LEVEL),
    st.builds(
        lambda high, low, period, duty, phase: square(
            high=high, low=low, period_seconds=period, duty=duty, phase_seconds=phase
        ),
        LEVEL,
        LEVEL,
        SECONDS,
        LEVEL,
        SECONDS,
    ),
    st.builds(
        lambda part, period, phase: sine(mean=0.5, amplitude=part / 2, period_seconds=period, phase_seconds=phase),
        LEVEL,
        SECONDS,
        SECONDS,
    ),
    st.builds(lambda first, last, seconds: ramp(first=first, last=last, seconds=seconds), LEVEL, LEVEL, SECONDS),
    st.builds(
        lambda times, level: steps([(at, level * (n % 2)) for n, at in enumerate(sorted(times))]),
        st.lists(st.floats(0.0, 500.0), min_size=1, max_size=5),
        LEVEL,
    ),
    st.builds(lambda seed, slot: noise(low=0.1, high=0.9, slot_seconds=slot, seed=seed), st.text(), SECONDS),
)


@cache
def loaded(name: str) -> scenario.Scenario:
    """Return a shipped scenario, read once."""
    return scenario.load(name)


def summed(signal: Signal, start: float, end: float, parts: int = 20_000) -> float:
    step = (end - start) / parts
    return math.fsum(signal.value(start + (n + 0.5) * step) for n in range(parts)) * step


@given(SIGNALS, st.floats(0.0, 2000.0), st.floats(0.1, 60.0))
def test_the_integral_of_every_form_is_the_area_under_its_values(signal: Signal, start: float, width: float) -> None:
    exact = signal.integral(start + width) - signal.integral(start)
    assert exact == pytest.approx(summed(signal, start, start + width), abs=width * 2e-3 + 1e-6)


@pytest.mark.parametrize("name", scenario.shipped())
def test_shipped_scenario_always_gives_the_same_truth(name: str) -> None:
    one, other = scenario.load(name), scenario.load(name)
    assert one.at(777.7) == other.at(777.7)
    other.at(3.0)
    assert one.at(777.7) == other.at(777.7)


@pytest.mark.parametrize("name", scenario.shipped())
@settings(max_examples=15)
@given(t=st.floats(0.0, 20_000.0))
def test_holder_shares_and_activity_never_exceed_their_device(name: str, t: float) -> None:
    truth = loaded(name).at(t)
    for gpu in truth.gpus:
        devices = {gpu.uuid, *(instance.uuid for instance in gpu.instances)}
        holders = [holder for holder in truth.holders if holder.device_uuid in devices]
        assert sum(holder.share_ratio for holder in holders) <= 1 + 1e-12
        for device, load in [(gpu.uuid, gpu.load), *((i.uuid, i.load) for i in gpu.instances)]:
            parts = sum(holder.activity_ratio for holder in holders if holder.device_uuid == device)
            compute = load.engine if gpu.model.gpm else load.utilisation
            busiest = max(compute, load.encode, load.decode, load.jpeg, load.optical_flow)
            assert parts <= busiest + 1e-9
            assert max(busiest, load.sm, load.dram) <= 1.0


@pytest.mark.parametrize("name", scenario.shipped())
@settings(max_examples=15)
@given(t=st.floats(0.0, 5000.0), dt=st.floats(0.5, 400.0))
def test_integrals_and_energy_increase_within_the_hardware_limits(name: str, t: float, dt: float) -> None:
    before, after = loaded(name).at(t), loaded(name).at(t + dt)
    for old, new in zip(before.gpus, after.gpus, strict=True):
        assert -1e-9 <= new.load_integral.engine - old.load_integral.engine <= dt + 1e-6
        energy = new.energy_joules - old.energy_joules
        assert old.model.idle_watts * dt - 1e-3 <= energy <= old.model.power_limit_watts * dt + 1e-3
        for was, now in zip(old.instances, new.instances, strict=True):
            assert -1e-9 <= now.load_integral.engine - was.load_integral.engine <= dt + 1e-6


def test_mean_of_a_window_is_exact_across_pod_changes() -> None:
    loaded = scenario.load("chaos")
    start, end = 3.0, 50.0
    instance = [loaded.at(t).gpus[2].instances[1] for t in (start, end)]
    exact = instance[1].load_integral.engine - instance[0].load_integral.engine
    # short runs 5-12, 20-27, 35-42 at 0.9, and begins again at 50.
    assert exact == pytest.approx(3 * 7 * 0.9)


@pytest.mark.parametrize("name", scenario.shipped())
@settings(max_examples=15)
@given(t=st.floats(0.0, 5000.0))
def test_every_pid_is_one_process_with_the_cgroup_of_its_pod(name: str, t: float) -> None:
    truth = loaded(name).at(t)
    processes = [p for gpu in truth.gpus for part in (gpu, *gpu.instances) for p in part.processes]
    assert len({process.pid for process in processes}) == len(processes)
    for process in processes:
        assert (cgroup.pod_of(process.cgroup) or "") == process.pod_uid


def test_process_outliving_its_pod_belongs_to_no_holder() -> None:
    truth = loaded("t4-timeslicing").at(75.0)
    assert any(process.pod.startswith("thumbnails") for process in truth.gpus[1].processes)
    assert not any(holder.pod.startswith("thumbnails") for holder in truth.holders)


def test_demo_matches_its_documentation() -> None:
    truth = loaded("demo").at(100.0)
    held = {holder.device_uuid for holder in truth.holders}
    notebook = next(holder for holder in truth.holders if holder.pod == "jupyter-mkowalski")
    assert len(truth.gpus) == 8
    assert notebook.activity_ratio == 0.0
    assert loaded("demo").at(10.0).gpus[3].load.engine > 0.5
    assert [gpu.index for gpu in truth.gpus if gpu.mig_enabled] == [4, 5]
    assert truth.gpus[7].uuid not in held
    assert truth.gpus[7].load.engine == 0.0
    shared = [holder for holder in truth.holders if holder.device_uuid == truth.gpus[6].uuid]
    assert [holder.device_ids[0].rpartition("::")[2] for holder in shared] == ["0", "1", "2"]


def test_demo_gpu_fails_with_xid_79_and_recovers() -> None:
    demo = loaded("demo")
    faults = [demo.at(t).gpus[1].fault for t in (179.0, 180.0, 239.0, 240.0, 781.0)]
    assert faults == [None, Fault.GPU_LOST, Fault.GPU_LOST, None, Fault.GPU_LOST]
    assert demo.at(781.0).gpus[1].xids == ((180.0, 79), (780.0, 79))
    lost = demo.at(200.0)
    assert lost.gpus[1].uuid not in lost.allocatable["nvidia.com/gpu"]


def test_mig_placement_and_numbers_match_a_real_h100() -> None:
    placed = place(MODELS["h100"], ["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"])
    assert [(p.placement_start, p.gpu_instance_id) for p in placed] == [(4, 2), (0, 3), (2, 9), (3, 10)]
    assert [p.memory_bytes // MIB for p in placed] == [40448, 20096, 9984, 9984]


@pytest.mark.parametrize("model", [model for model in MODELS.values() if model.mig_profiles])
@given(data=st.data())
def test_instances_of_a_valid_layout_never_overlap(model: object, data: st.DataObject) -> None:
    spec = next(m for m in MODELS.values() if m is model)
    wanted = data.draw(st.lists(st.sampled_from(sorted(spec.mig_profiles)), max_size=8))
    try:
        placed = place(spec, wanted)
    except LayoutError as error:
        assert re.search("does not fit", str(error))  # noqa: PT017 - refusing is one of two right outcomes
        return
    spans = sorted((p.placement_start, p.placement_start + p.memory_slices) for p in placed)
    assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert sum(p.compute_slices for p in placed) <= spec.compute_slices
    assert len({p.gpu_instance_id for p in placed}) == len(placed)


def test_partitioned_board_omits_the_values_missing_on_hardware() -> None:
    board = loaded("capture-h100-mig").at(100.0).gpus[0]
    assert board.overrides[Field.GPU_UTIL] is None
    assert board.overrides[Field.FB_USED] == 11125
    assert loaded("capture-h100-mig").at(10.0).gpus[0].overrides[Field.FB_USED] == 59


def test_misspelt_scenario_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'dmeo'.*did you mean 'demo'.*a100-mig"):
        scenario.load("dmeo")


def test_missing_scenario_file_is_reported_by_name() -> None:
    with pytest.raises(ConfigError, match=r"nowhere/x\.yaml: cannot be read: No such file"):
        scenario.load("nowhere/x.yaml")
