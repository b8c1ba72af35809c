"""Activity windows of the agent: computed at intervals, kept in a separate file, lost without harm to the ledger."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from metering_support import TRAIN, held, holder, whole
from pipeline_support import save_now

from exporter.accounting.ledger import Ledgers
from exporter.accounting.meter import Meter
from exporter.accounting.state_file import StateFile
from exporter.agent.metering import Metering
from exporter.agent.owners import FILE_NAME, SAVE_SECONDS, OwnerWindows
from exporter.model.ledger import OwnerUse
from exporter.model.snapshot import DeviceView

NOON = 1_800_000_000.0
BUSY = [whole(held(holder("a"), 1.0))]
IDLE = [whole(held(holder("a"), 0.0))]


def agent(directory: Path | None, *, steady: float = 0.0, boot_id: str = "boot", simulated: bool = False) -> Metering:
    made = Metering(
        meter=Meter(1.0, lambda _: TRAIN),
        ledgers=Ledgers(saves=directory is not None),
        owner_windows=OwnerWindows(
            file=StateFile(directory, FILE_NAME) if directory else None, boot_id=boot_id, simulated=simulated
        ),
        file=StateFile(directory) if directory else None,
        boot_id=boot_id,
        simulated=simulated,
    )
    made.restore(steady)
    return made


def run(metering: Metering, start: int, end: int) -> None:
    """Sample every second and save when it is due."""
    for second in range(start, end + 1):
        metering.observe(BUSY, sampled_steady=float(second), now=NOON + second, steady=float(second))
        save_now(metering, NOON + second, float(second))


def owners(metering: Metering, views: Sequence[DeviceView], steady: float) -> tuple[OwnerUse, ...]:
    view = metering.view(views, now=NOON + steady, steady=steady).owners
    assert view is not None
    return view.owners


def shown(metering: Metering, steady: float) -> OwnerUse | None:
    return next((use for use in owners(metering, BUSY, steady) if use.owner == TRAIN), None)


def active(metering: Metering, steady: float) -> float:
    use = shown(metering, steady)
    return use.active_seconds.get("15m", 0.0) if use else 0.0


def test_windows_continue_after_a_restart_and_unsaved_time_is_unmeasured(tmp_path: Path) -> None:
    run(agent(tmp_path), 0, 110)
    restarted = agent(tmp_path, steady=200.0)
    assert active(restarted, 200.0) == pytest.approx(SAVE_SECONDS, abs=0.01)
    run(restarted, 200, 300)
    assert active(restarted, 300.0) == pytest.approx(SAVE_SECONDS + 100.0, abs=0.01)


def test_last_save_includes_the_whole_windows(tmp_path: Path) -> None:
    metering = agent(tmp_path)
    run(metering, 0, 90)
    save_now(metering, NOON + 90, 90.0, last=True)
    assert active(agent(tmp_path, steady=95.0), 95.0) == pytest.approx(90.0, abs=0.01)


def test_windows_are_written_once_a_minute_to_a_separate_file(tmp_path: Path) -> None:
    metering, written = agent(tmp_path), []
    for second in range(180):
        run(metering, second, second)
        written.append((tmp_path / FILE_NAME).stat().st_mtime_ns)
    assert len(set(written)) == 180 / SAVE_SECONDS
    assert "windows" not in (tmp_path / "ledger.json").read_text()


@pytest.mark.parametrize(("boot_id", "simulated"), [("another", False), ("", False)])
def test_windows_of_another_boot_are_not_restored(tmp_path: Path, boot_id: str, *, simulated: bool) -> None:
    run(agent(tmp_path, boot_id="boot" if boot_id else ""), 0, 90)
    assert active(agent(tmp_path, steady=100.0, boot_id=boot_id, simulated=simulated), 100.0) == 0.0


def test_windows_of_another_boot_are_not_restored_with_a_ledger_of_this_one(tmp_path: Path) -> None:
    run(agent(tmp_path, boot_id="another"), 0, 90)
    (tmp_path / f"{FILE_NAME}.new").mkdir()
    run(agent(tmp_path, steady=95.0), 95, 100)
    assert active(agent(tmp_path, steady=100.0), 100.0) == 0.0


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version":1,"sha256":"00","state":{}}\n', None])
def test_damaged_file_loses_the_windows_but_not_the_ledger(tmp_path: Path, content: bytes | None) -> None:
    run(agent(tmp_path), 0, 90)
    file = StateFile(tmp_path, FILE_NAME)
    if content is None:
        state = file.load()
        assert state is not None
        file.save(state | {"windows": {"last": 3}})
    else:
        file.path.write_bytes(content)
    restarted = agent(tmp_path, steady=100.0)
    assert active(restarted, 100.0) == 0.0
    assert restarted.errors == Counter({("windows", "state_damaged"): 1})
    assert restarted.problem == ""
    assert (tmp_path / f"{FILE_NAME}.damaged-1").exists()
    run(restarted, 100, 190)
    assert active(restarted, 205.0) == pytest.approx(90.0, abs=0.01)
    view = restarted.ledger_view(190.0)
    assert view is not None
    assert sum(totals.seconds.active for totals in view.accounts.values()) >= 170.0


def test_unsaved_windows_are_counted_and_affect_nothing_else(tmp_path: Path) -> None:
    metering = agent(tmp_path)
    (tmp_path / f"{FILE_NAME}.new").mkdir()
    run(metering, 0, 130)
    assert metering.errors["windows", "state_unwritable"] == 3
    assert metering.problem == ""
    (tmp_path / f"{FILE_NAME}.new").rmdir()
    run(metering, 131, 200)
    assert json.loads((tmp_path / FILE_NAME).read_text())["state"]["boot_id"] == "boot"


def test_figures_are_recomputed_when_the_holders_change() -> None:
    metering = agent(None)
    run(metering, 0, 20)
    first = owners(metering, BUSY, 20.0)
    assert owners(metering, IDLE, 21.0) is first
    grown = [whole(held(holder("a"), 1.0)), whole(held(holder("b", "GPU-1"), 1.0), index=1)]
    second = owners(metering, grown, 22.0)
    assert second[0].gpus == 2.0
    assert owners(metering, grown, 40.0) is not second


def test_simulated_pace_shortens_an_hour_to_a_minute() -> None:
    metering = agent(None)
    metering.owner_windows = OwnerWindows(pace=60.0)
    run(metering, 0, 60)
    use = shown(metering, 60.0)
    assert use is not None
    assert use.active_seconds["1h"] == use.measured_seconds["1h"] == pytest.approx(3600.0)
    assert use.age_seconds == pytest.approx(60.0)
