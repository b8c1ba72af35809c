"""A disk that fails, then a restart: time that a memory-only ledger has shown is not charged a second time."""

import shutil
import signal
from pathlib import Path

import pytest
from agent_support import gpu_seconds, running_agent
from kill_support import gpus_and_capacity
from metering_support import holder, namespace_pays, use, whole
from pipeline_support import save_now

from exporter.accounting.idle import IdleClock
from exporter.accounting.ledger import Ledgers
from exporter.accounting.meter import Meter
from exporter.accounting.state_file import StateFile, WriterLock
from exporter.agent.metering import HUNG_SECONDS, Metering
from exporter.model.ledger import LedgerView

NOON = 1_800_000_000.0


def started(
    directory: Path, steady: float, *, boot_id: str = "boot", lock: bool = True, clock: IdleClock | None = None
) -> Metering:
    """Return an agent's metering with the node's lock."""
    state = directory / "state"
    state.mkdir(exist_ok=True)
    made = Metering(
        meter=Meter(1.0, namespace_pays),
        ledgers=Ledgers(saves=True),
        file=StateFile(state),
        lock=WriterLock(node="n", directory=directory / "lock" if lock else None, state_directory=state),
        boot_id=boot_id,
        clock=clock,
    )
    made.become_writer(steady)
    assert made.lock.held
    return made


def metered(metering: Metering, first: int, last: int) -> LedgerView:
    """Meter one GPU, a sample each second, save when due and at the end; return the final view."""
    for second in range(first, last + 1):
        metering.observe(
            [whole(use(holder("train"), 1.0), busy=1.0)],
            sampled_steady=float(second),
            now=NOON + second,
            steady=float(second),
        )
        save_now(metering, NOON + second, float(second), last=second == last)
        metering.ledger_view(float(second))
    view = metering.ledger_view(float(last))
    assert view is not None
    return view


def killed(metering: Metering) -> None:
    """Leave the state as after a kill: locks released, nothing saved."""
    metering.lock.release()


def by_ledger(view: LedgerView) -> dict[str, float]:
    """Return GPU-seconds by the ledger's identity."""
    return {
        ledger.identity: sum(totals.seconds.total for totals in ledger.accounts.values()) for ledger in view.ledgers
    }


def break_disk(directory: Path) -> None:
    """Put a folder in place of the file that a save writes: the state stays readable, as on a full disk."""
    (directory / "state" / "ledger.json.new").mkdir()


def repair_disk(directory: Path) -> None:
    shutil.rmtree(directory / "state" / "ledger.json.new")


@pytest.mark.parametrize("repaired", [True, False])
def test_restart_continues_after_the_memory_only_ledger(tmp_path: Path, *, repaired: bool) -> None:
    first = started(tmp_path, 0.0)
    metered(first, 0, 10)
    break_disk(tmp_path)
    before = by_ledger(metered(first, 11, 22))
    assert sum(before.values()) == pytest.approx(22.0), "a part of it is in memory only"
    assert len(before) == 2
    killed(first)
    if repaired:
        repair_disk(tmp_path)
    second = started(tmp_path, 40.0)
    after = by_ledger(metered(second, 40, 50))
    seen = {name: max(before.get(name, 0.0), after.get(name, 0.0)) for name in before | after}
    assert sum(seen.values()) == pytest.approx(50.0), (
        "every second counts once, including the time between the processes"
    )


def test_only_the_saved_state_counts_after_the_disk_recovers(tmp_path: Path) -> None:
    first = started(tmp_path, 0.0)
    metered(first, 0, 10)
    break_disk(tmp_path)
    metered(first, 11, 22)
    repair_disk(tmp_path)
    before = by_ledger(metered(first, 23, 30))
    assert sum(before.values()) == pytest.approx(30.0)
    assert first.lock.noted() == {}
    killed(first)
    after = by_ledger(metered(started(tmp_path, 31.0), 31, 40))
    seen = {name: max(before.get(name, 0.0), after.get(name, 0.0)) for name in before | after}
    assert sum(seen.values()) == pytest.approx(40.0)


def test_time_before_another_boot_is_not_charged(tmp_path: Path) -> None:
    first = started(tmp_path, 0.0)
    metered(first, 0, 10)
    break_disk(tmp_path)
    before = by_ledger(metered(first, 11, 22))
    killed(first)
    repair_disk(tmp_path)
    after = by_ledger(metered(started(tmp_path, 100.0, boot_id="another"), 100, 110))
    seen = {name: max(before.get(name, 0.0), after.get(name, 0.0)) for name in before | after}
    assert sum(seen.values()) == pytest.approx(32.0)


def test_restart_after_a_reboot_with_a_failing_disk_continues(tmp_path: Path) -> None:
    first = started(tmp_path, 0.0, boot_id="former")
    metered(first, 0, 10)
    killed(first)
    break_disk(tmp_path)
    second = started(tmp_path, 0.0)
    before = by_ledger(metered(second, 0, 20))
    killed(second)
    repair_disk(tmp_path)
    after = by_ledger(metered(started(tmp_path, 30.0), 30, 40))
    seen = {name: max(before.get(name, 0.0), after.get(name, 0.0)) for name in before | after}
    assert sum(seen.values()) == pytest.approx(10.0 + 40.0)


def test_idle_time_of_a_former_boot_is_not_continued_from_the_lock_file(tmp_path: Path) -> None:
    """The disk has failed since the reboot: the state is from the former boot, and the lock file from this one."""

    def clock() -> IdleClock:
        return IdleClock(threshold_ratio=0.05, tolerated_gap_seconds=5.0)

    idle = clock()
    key, idle_after = ("GPU-0", "ml", "train", "main"), {}
    for second in range(11):
        idle.observe(key, float(second), (0.0, 0.0), "uid")
    for name, boot_id, fails in (("same boot", "former", False), ("other boot", "boot", True)):
        directory = tmp_path / boot_id
        directory.mkdir()
        first = started(directory, 0.0, boot_id="former", clock=idle)
        metered(first, 0, 10)
        killed(first)
        if fails:
            break_disk(directory)
        second = started(directory, 10.0, boot_id=boot_id, clock=clock())
        metered(second, 10, 20)
        killed(second)
        last = clock()
        killed(started(directory, 21.0, boot_id=boot_id, clock=last))
        idle_after[name] = last.observe(key, 22.0, (0.0, 0.0), "uid").idle_for_seconds
    assert idle_after == {"same boot": 10.0, "other boot": 0.0}


def test_hanging_disk_is_noted_in_the_lock_file(tmp_path: Path) -> None:
    first = started(tmp_path, 0.0)
    metered(first, 0, 10)
    save = first.begin_save(NOON + 10, 10.0, last=True)
    assert save is not None
    end = 10 + int(HUNG_SECONDS) + 10
    before = by_ledger(metered(first, 11, end))
    assert len(before) == 2
    killed(first)
    after = by_ledger(metered(started(tmp_path, end + 1.0), end + 1, end + 10))
    seen = {name: max(before.get(name, 0.0), after.get(name, 0.0)) for name in before | after}
    assert sum(seen.values()) == pytest.approx(end + 10.0)


def test_nothing_is_noted_without_a_host_lock(tmp_path: Path) -> None:
    first = started(tmp_path, 0.0, lock=False)
    metered(first, 0, 10)
    break_disk(tmp_path)
    metered(first, 11, 22)
    assert first.lock.noted() == {}


def test_killed_agent_with_a_failed_disk_charges_every_second_once(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    options = ("--simulate", "t4-timeslicing", "--sample-interval", "250ms", "--state-interval", "1s")
    options += ("--state-dir", str(tmp_path / "state"), "--lock-dir", str(tmp_path / "lock"))
    with running_agent(*options) as agent:
        agent.until(lambda page: gpu_seconds(page) > 1, "the ledger")
        gpus, saved, steady = gpus_and_capacity(tmp_path / "state")
        began = steady - saved / gpus
        break_disk(tmp_path)
        agent.until(lambda page: page.get("gpu_exporter_state_saved") == 0, "the failure")
        saved = gpus_and_capacity(tmp_path / "state")[1]
        page = agent.until(lambda page: gpu_seconds(page) > saved + 2 * gpus, "a ledger in memory")
        in_memory = gpu_seconds(page) - saved
        assert agent.end(signal.SIGKILL) == -signal.SIGKILL
    repair_disk(tmp_path)
    with running_agent(*options) as agent:
        agent.until(lambda page: gpu_seconds(page) > saved + 1, "more")
        assert agent.end() == 0
    _, saved, steady = gpus_and_capacity(tmp_path / "state")
    passed = gpus * (steady - began)
    assert passed - gpus * 1.0 <= saved + in_memory <= passed + 1e-6, "except for the time after the last scrape"
