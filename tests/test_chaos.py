"""Chaos: a short run with real processes, and tests of its judge."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

# ruff: noqa: E402 - the benchmarks are not a package
import chaos_schedule
import chaos_world
from chaos_invariants import BOARD_ROWS, OF_WHOLE_GPUS, Judge
from chaos_schedule import Act, Injection
from page_checks import parse

from gpu_simulator.truth import Fault

SEEDS = "2,9,14"
HOUR = 3600.0


def judge_of(*injections: Injection, with_dcgm: bool = False) -> Judge:
    plan = chaos_world.plan(injections, epoch_unix=1000.0, epoch_monotonic=0.0)
    return Judge(world=chaos_world.World(plan), injections=injections, with_dcgm=with_dcgm)


def page_at(t: float, *series: str, off: float = 0.0) -> str:
    """Return a page of a reading and of a kubelet's answer at an instant of the world, on a clock with an offset.

    A ledger has the capacity that its owners sum to, unless the series give another one.
    """
    names = ("sample", "attribution", "snapshot")
    stamps = [f"gpu_exporter_{name}_timestamp_seconds {1000.0 + t + off!r}" for name in names]
    name, sums = "gpu_exporter_ledger_capacity_seconds_total", Counter[str]()
    seconds_of = re.compile(r'^gpu_ledger_seconds_total\{ledger="(\w+)".*\} (\S+)$', re.MULTILINE)
    for ledger, value in seconds_of.findall("\n".join(series)):
        sums[ledger] += float(value)
    reported = not any(name in one for one in series)
    capacity = [f'{name}{{ledger="{ledger}"}} {value!r}' for ledger, value in sums.items() if reported]
    return "\n".join([*stamps, *series, *capacity, ""])


def seconds(value: float, *, ledger: str = "a1", created: float = 0.0, **labels: str) -> str:
    """Return seconds of an owner in a ledger, and the world's time at which the ledger began."""
    more = "".join(f',{name}="{text}"' for name, text in labels.items())
    began = f'gpu_ledger_created_timestamp_seconds{{ledger="{ledger}"}} {1000.0 + created!r}'
    return (
        f'# TYPE gpu_ledger_seconds_total counter\ngpu_ledger_seconds_total{{ledger="{ledger}"{more}}} {value}\n{began}'
    )


def uuid_of(judge: Judge, gpu: int) -> str:
    return judge.world.at(0.0).gpus[gpu].uuid


def kinds(judge: Judge) -> set[str]:
    return {one.kind for one in judge.violations}


def test_agents_under_seeded_faults_have_no_violations(tmp_path: Path) -> None:
    """Real agents, children, sockets, signals and disks; the assertions use the figures of the printed table."""
    command = [sys.executable, "benchmarks/chaos.py", "--seeds", SEEDS, "--jobs", "3"]
    done = subprocess.run(
        [*command, "--faults", "30", "--seconds", "7", "--log", str(tmp_path / "violations")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    reported = f"{done.stdout[-6000:]}{done.stderr[-3000:]}"
    assert done.returncode == 0, reported
    assert "| **all** | 90 |" in done.stdout, reported
    lines = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 4]
    checked = {cells[1].strip(): cells[2].strip() for cells in lines}
    for invariant in (
        "page served",
        "no false idle",
        "attribution is the kubelet's",
        "owners sum to capacity",
        "no second is in two ledgers",
    ):
        assert int(checked[invariant]) > 20, reported


def test_same_seed_gives_the_same_schedule_and_another_seed_a_different_one() -> None:
    assert chaos_schedule.draw(17) == chaos_schedule.draw(17)
    assert chaos_schedule.draw(17).injections != chaos_schedule.draw(18).injections


def test_every_fault_kind_occurs_often_in_200_seeds() -> None:
    counted: Counter[str] = Counter()
    for seed in range(200):
        counted += Counter(one.kind for one in chaos_schedule.draw(seed).injections)
    assert set(counted) == {one.value for one in (*Fault, *Act)} - {"api_upgraded"} | {chaos_schedule.GPU_HANG}
    assert min(counted.values()) >= 20
    assert counted.total() >= 10_000


def test_unsupported_faults_are_left_out_of_the_schedule() -> None:
    without = frozenset({Act.DISK_HANG.value, Act.CLOCK.value})
    drawn = [one.kind for seed in range(50) for one in chaos_schedule.draw(seed, without=without).injections]
    assert drawn
    assert not without & set(drawn)


@pytest.mark.parametrize(
    ("text", "reported"),
    [("a 1\na 2\n", "twice: a"), ("a NaN\n", "NaN: a"), ("", "empty"), ("a b\n", "could not convert")],
)
def test_page_with_a_duplicate_series_or_invalid_value_is_refused(text: str, reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        parse(text)


def test_living_series_exclude_kept_totals_of_owners_and_ended_pods() -> None:
    """A page grows while pods come and go; series that stay on purpose must not hide series that stay by mistake."""
    here, ended = 'pod_uid="1",container_name="main",uuid="GPU-1"', 'pod_uid="2",container_name="main",uuid="GPU-1"'
    living = [
        f"gpu_pod_info{{{here}}} 1",
        f"gpu_pod_active_seconds_total{{{here}}} 5",
        f"gpu_pod_age_seconds{{{here}}} 9",
    ]
    kept = [f"gpu_pod_active_seconds_total{{{ended}}} 5", 'gpu_ledger_cost_total{workload_name="of-old"} 1']
    assert parse("\n".join(living)).living() == len(living)
    assert parse("\n".join([*living, *kept])).living() == len(living)
    assert parse("\n".join([*living, f"gpu_pod_age_seconds{{{ended}}} 9"])).living() == len(living) + 1


def test_judge_busy_device_shown_idle_is_a_violation() -> None:
    judge = judge_of()
    labels = f'{{gpu="0",uuid="{uuid_of(judge, 0)}",source="engine"}}'
    judge.look(page_at(10.0, f"gpu_activity_ratio{labels} 0.8"), 10.3)
    assert not judge.violations
    judge.look(page_at(10.0, f"gpu_activity_ratio{labels} 0.1"), 10.3)
    assert kinds(judge) == {"no false idle"}


def test_judge_dcgm_mean_may_cover_the_time_of_a_driver_hang() -> None:
    """The pod on GPU 1 began at 5.8 s: a mean from before that is lower than the pod's activity."""
    stood = Injection(kind=Fault.HANG, at=4.0, seconds=4.0)
    for by, injections, wrong in (
        ("dcgm", (stood,), set[str]()),
        ("nvml", (stood,), {"no false idle"}),
        ("dcgm", (), {"no false idle"}),
    ):
        judge = judge_of(*injections, with_dcgm=True)
        labels = f'{{gpu="1",uuid="{uuid_of(judge, 1)}",source="engine",measured_by="{by}"}}'
        judge.look(page_at(8.2, f"gpu_activity_ratio{labels} 0.5"), 8.4)
        assert kinds(judge) == wrong, (by, injections)


def test_judge_value_read_while_the_gpu_was_lost_is_a_violation() -> None:
    judge = judge_of(Injection(kind=Fault.GPU_LOST, at=5.0, seconds=4.0, gpu=0))
    labels = f'{{gpu="0",uuid="{uuid_of(judge, 0)}",source="engine"}}'
    judge.look(page_at(8.0, f"gpu_activity_ratio{labels} 0.8"), 8.2)
    assert kinds(judge) == {"dark while faulty"}


def test_judge_value_read_while_the_gpu_returned_is_no_violation() -> None:
    """The clock of the stamp and the clock of the faults are read one after the other."""
    judge = judge_of(Injection(kind=Fault.GPU_LOST, at=5.0, seconds=3.02, gpu=0))
    labels = f'{{gpu="0",uuid="{uuid_of(judge, 0)}",source="engine"}}'
    judge.look(page_at(8.0, f"gpu_activity_ratio{labels} 0.8"), 8.2)
    assert not judge.violations


def test_judge_node_without_a_previously_absent_gpu_is_not_well() -> None:
    judge = judge_of(Injection(kind=Fault.GPU_ABSENT, at=5.0, seconds=3.0, gpu=0))
    up = [f'gpu_up{{uuid="{gpu.uuid}"}} 1' for gpu in judge.world.at(20.0).gpus]
    assert judge.is_well(parse(page_at(20.0, *up[1:])), 20.0) == f"not up: {[uuid_of(judge, 0)]}"
    assert "not up" not in judge.is_well(parse(page_at(20.0, *up)), 20.0)


def test_judge_missing_or_extra_holder_is_a_violation() -> None:
    judge = judge_of()
    holders = sorted({(one.device_uuid, one.pod) for one in judge.world.at(4.5).holders})
    held = sorted({uuid for uuid, _ in holders})
    infos = [f'gpu_allocation_state{{uuid="{uuid}",state="allocated"}} 1' for uuid in held]
    rows = [f'gpu_pod_info{{uuid="{uuid}",pod_name="{pod}"}} 1' for uuid, pod in holders]
    judge.look(page_at(4.5, *infos, *rows), 4.6)
    assert not judge.violations
    judge.look(page_at(4.5, *infos, *rows[1:]), 4.6)
    assert kinds(judge) == {"attribution is the kubelet's"}
    judge.violations.clear()
    judge.look(page_at(4.5, *infos, *rows, f'gpu_pod_info{{uuid="{holders[0][0]}",pod_name="nobody"}} 1'), 4.6)
    assert kinds(judge) == {"attribution is the kubelet's"}


def test_judge_ended_holder_may_be_missing_only_after_an_api_answer() -> None:
    judge = judge_of()
    answered, ended = 1.66, 3.45
    before, after = judge.world.at(answered).holders, judge.world.at(ended).holders
    gone = {(one.device_uuid, one.pod) for one in before} - {(one.device_uuid, one.pod) for one in after}
    assert gone
    states = [
        f'gpu_allocation_state{{uuid="{uuid}",state="allocated"}} 1'
        for uuid in {one[0] for one in gone} - {one.device_uuid for one in after}
    ]
    stamped = page_at(answered, *states)
    judge.look(f"{stamped}gpu_exporter_metadata_timestamp_seconds {1000.0 + ended}\n", ended)
    assert "attribution is the kubelet's" not in kinds(judge)
    judge.violations.clear()
    judge.look(f"{stamped}gpu_exporter_metadata_timestamp_seconds {1000.0 + answered}\n", ended)
    assert "attribution is the kubelet's" in kinds(judge)


def test_judge_held_device_shown_as_unallocated_is_a_violation() -> None:
    judge = judge_of()
    row = f'gpu_allocation_state{{uuid="{uuid_of(judge, 0)}",state="unallocated"}} 1'
    judge.look(page_at(10.0, row), 10.4)
    assert "never unallocated while held" in kinds(judge)


def test_judge_held_model_with_unallocated_time_is_a_violation() -> None:
    judge = judge_of()
    judge.look(page_at(10.0, seconds(1.5, workload_kind="Unallocated", model="NVIDIA H100 80GB HBM3")), 10.4)
    assert not judge.violations
    judge = judge_of()
    judge.look(page_at(10.0, seconds(1.5, workload_kind="Unallocated", model=chaos_world.HELD_MODEL)), 10.4)
    assert kinds(judge) == {"no held time is Unallocated"}


def test_judge_cost_above_the_price_of_the_node_is_a_violation() -> None:
    judge = judge_of()
    parts = [seconds(30.0), 'gpu_ledger_unpriced_seconds_total{ledger="a1"} 10']
    judge.look(page_at(10.0, *parts, 'gpu_ledger_cost_total{ledger="a1",currency="USD"} 0.02'), 10.1)
    assert not judge.violations
    judge.look(page_at(10.0, *parts, 'gpu_ledger_cost_total{ledger="a1",currency="USD"} 0.021'), 10.1)
    assert kinds(judge) == {"no price is guessed"}


def test_judge_money_of_a_state_without_seconds_is_a_violation() -> None:
    judge = judge_of()
    judge.look(
        page_at(10.0, seconds(30.0, state="idle"), 'gpu_ledger_cost_total{ledger="a1",state="unknown"} 0.02'), 10.1
    )
    assert kinds(judge) == {"money is for seconds"}


def test_judge_fault_of_one_gpu_that_hides_another_is_a_violation() -> None:
    for kind in (chaos_schedule.GPU_HANG, Fault.GPU_LOST):
        judge = judge_of(Injection(kind=kind, at=10.0, seconds=20.0, gpu=0))
        judge.agent_since = 1.0
        others = {
            f'{name}{{uuid="{gpu.uuid}"}}': min(limits(gpu)[1], 0.9e6)
            for gpu in judge.world.at(20.0).gpus[1:]
            for name, limits in BOARD_ROWS.items()
            if not (gpu.instances and name in OF_WHOLE_GPUS)
        }
        assert {uuid_of(judge, chaos_world.MIG_GPU) in one for one in others} == {True, False}

        def look(rows: Mapping[str, float], judge: Judge = judge) -> set[str]:
            judge.violations.clear()
            judge.look(page_at(20.0, *(f"{row} {value}" for row, value in rows.items())), 20.1)
            return kinds(judge)

        assert look(others) == set()
        for row in others:
            without = {one: value for one, value in others.items() if one != row}
            assert look(without) == {"a fault of one GPU is its own"}
            assert "a fault of one GPU is its own" in look(others | {row: -1.0})


def test_judge_driver_fault_during_a_gpu_fault_excuses_other_gpus() -> None:
    hung = Injection(kind=chaos_schedule.GPU_HANG, at=10.0, seconds=20.0, gpu=0)
    judge = judge_of(hung, Injection(kind=Act.CHILD_KILL, at=19.0))
    judge.agent_since = 1.0
    judge.look(page_at(20.0), 20.1)
    assert "a fault of one GPU is its own" not in kinds(judge)


def test_judge_decoding_instance_shown_idle_is_a_violation() -> None:
    judge = judge_of()
    instance = judge.world.at(10.0).gpus[chaos_world.MIG_GPU].instances[0].uuid
    judge.look(page_at(10.0, f'gpu_activity_ratio{{uuid="{instance}",source="engine"}} 0.03'), 10.3)
    assert kinds(judge) == {"no false idle"}


def test_judge_counter_that_goes_back_is_a_violation_except_in_a_new_agent() -> None:
    judge = judge_of()
    own = "# TYPE gpu_exporter_errors_total counter\ngpu_exporter_errors_total 7"
    kept = "# TYPE gpu_pod_idle_seconds_total counter\ngpu_pod_idle_seconds_total 7"
    judge.look(page_at(10.0, own, kept), 10.1)
    judge.agent_began(all_was_saved=True)
    judge.look(page_at(11.0, own.replace(" 7", " 0"), kept), 11.1)
    assert not judge.violations
    judge.look(page_at(12.0, own.replace(" 7", " 1"), kept.replace(" 7", " 6.9")), 12.1)
    assert kinds(judge) == {"counters never go back"}
    judge.violations.clear()
    judge.agent_began(all_was_saved=False)
    judge.look(page_at(13.0, kept.replace(" 7", " 2")), 13.1)
    assert not judge.violations


def test_judge_ledger_that_goes_back_is_a_violation_in_any_agent() -> None:
    for saved in (True, False):
        judge = judge_of()
        judge.look(page_at(10.0, seconds(7.0)), 10.1)
        judge.agent_began(all_was_saved=saved)
        judge.look(page_at(11.0, seconds(2.0, ledger="b2", created=10.5)), 11.1)
        assert not judge.violations
        judge.look(page_at(12.0, seconds(6.9)), 12.1)
        assert kinds(judge) == {"counters never go back"}


def test_judge_second_in_two_ledgers_is_a_violation() -> None:
    judge = judge_of()
    judge.look(page_at(10.0, seconds(39.0)), 10.1)
    judge.agent_began(all_was_saved=True)
    judge.look(page_at(10.5, seconds(3.0, ledger="b2", created=10.2)), 10.5)
    assert not judge.violations
    judge.look(page_at(11.0, seconds(39.0), seconds(8.0, ledger="b2", created=10.2)), 11.0)
    assert kinds(judge) == {"no second is in two ledgers"}


def test_judge_ledger_without_a_created_time_is_a_violation() -> None:
    judge = judge_of()
    judge.look(page_at(10.0, seconds(7.0).rpartition("\n")[0]), 10.1)
    assert kinds(judge) == {"every ledger has a beginning"}


def test_judge_ledger_shown_by_a_waiting_agent_is_a_violation() -> None:
    judge = judge_of()
    judge.look(page_at(10.0, "gpu_exporter_ledger_writer 1", seconds(7.0)), 10.1)
    judge.look(page_at(10.5, "gpu_exporter_ledger_writer 0"), 10.6)
    assert not judge.violations
    judge.look(page_at(11.0, "gpu_exporter_ledger_writer 0", seconds(7.0)), 11.1)
    assert kinds(judge) == {"only the writer shows the ledger"}


def test_judge_owners_that_do_not_sum_to_capacity_are_a_violation() -> None:
    judge = judge_of()
    parts = [seconds(3, state="idle"), 'gpu_ledger_seconds_total{ledger="a1",state="unknown"} 4']
    parts.append("gpu_exporter_ledger_withheld_seconds 1")
    capacity = 'gpu_exporter_ledger_capacity_seconds_total{ledger="a1"}'
    judge.look(page_at(10.0, f"{capacity} 7", *parts), 10.1)
    assert not judge.violations
    judge.look(page_at(10.0, f"{capacity} 7.5", *parts), 10.1)
    assert kinds(judge) == {"owners sum to capacity"}


def test_judge_gpu_up_from_an_old_reading_is_a_violation() -> None:
    judge = judge_of()
    stamps = page_at(10.0, 'gpu_up{gpu="0"} 1').replace(
        "snapshot_timestamp_seconds 1010.0", "snapshot_timestamp_seconds 1013.0"
    )
    judge.look(stamps, 13.1)
    assert kinds(judge) == {"nothing old is shown"}


def test_judge_converts_timestamps_across_clock_steps_unless_ambiguous() -> None:
    judge = judge_of()
    judge.stepped(10.0, 10.1, HOUR)
    judge.stepped(12.0, 12.1, 0.0)
    assert judge.world_time(1000.0 + 11.0 + HOUR, 12.5) == pytest.approx(11.0)
    assert judge.world_time(1000.0 + 12.4, 12.5) == pytest.approx(12.4)
    assert judge.world_time(1000.0 - HOUR, 12.5) is None
    judge.stepped(13.0, 13.1, -1.0)
    assert judge.world_time(1000.0 + 12.6, 13.9) is None


@pytest.mark.parametrize(("set_back_at", "found"), [(4.0, 10.6), (8.0, None)], ids=["known", "could be two"])
def test_judge_converts_a_timestamp_with_a_clock_step_within_the_sample(
    set_back_at: float, found: float | None
) -> None:
    judge = judge_of()
    judge.stepped(set_back_at, set_back_at + 0.1, -5.0)
    judge.stepped(10.0, 10.1, 0.0)
    reported = judge.world_time(1000.0 + 10.6 - 5.0, 12.0, took=0.5)
    assert reported == (None if found is None else pytest.approx(found))


@pytest.mark.parametrize(("ratio", "missing", "wrong"), [(0.1, 1, False), (0.1, 0, True), (0.01, 1, True)])
def test_judge_gpu_with_an_unmeasured_instance_must_only_not_be_idle(
    *, ratio: float, missing: int, wrong: bool
) -> None:
    """The GPU's own counters show the engine and no codec, and an instance is unmeasured right after a new layout."""
    judge = judge_of()
    (gpu,) = (gpu for gpu in judge.world.at(10.0).gpus if gpu.instances)
    infos = [f'gpu_info{{uuid="{part.uuid}",parent_uuid="{gpu.uuid}"}} 1' for part in gpu.instances]
    parts = [f'gpu_activity_ratio{{uuid="{part.uuid}",source="codec"}} 1' for part in gpu.instances[missing:]]
    judge.look(page_at(10.0, *infos, *parts, f'gpu_activity_ratio{{uuid="{gpu.uuid}",source="engine"}} {ratio}'), 10.3)
    assert ("no false idle" in kinds(judge)) is wrong


def test_judge_series_that_leaves_the_page_of_its_identity_is_a_violation() -> None:
    judge = judge_of()
    active = 'gpu_ledger_seconds_total{ledger="a1",state="active"} 1'
    judge.look(page_at(10.0, seconds(7.0, state="idle"), active), 10.1)
    judge.look(page_at(11.0, seconds(8.0, state="idle")), 11.1)
    assert kinds(judge) == {"counters never go back"}
