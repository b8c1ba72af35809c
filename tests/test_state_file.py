"""The state file: replaced as a whole, every damage noticed, every disk fault reported in one line."""

import json
import os
import resource
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from files_support import needs_root, tmpfs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter.accounting import state_file
from exporter.accounting.state_file import StateFile, encode
from exporter.errors import StateError

STATE: dict[str, Any] = {"boot_id": "b", "steady_seconds": 12.25, "ledger": {"accounts": [["ml", 0.1]], "é": None}}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def refused(file: StateFile) -> StateError:
    with pytest.raises(StateError) as caught:
        file.load()
    assert "\n" not in str(caught.value)
    assert str(file.path) in str(caught.value)
    return caught.value


def not_saved(file: StateFile, data: dict[str, Any] = STATE) -> StateError:
    with pytest.raises(StateError) as caught:
        file.save(data)
    assert "\n" not in str(caught.value)
    return caught.value


def test_saved_state_is_loaded_and_no_other_file_is_left(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    assert file.load() is None
    file.save(STATE)
    file.save({**STATE, "steady_seconds": 13.5})
    assert StateFile(tmp_path).load() == {**STATE, "steady_seconds": 13.5}
    assert names(tmp_path) == ["ledger.json"]
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert json.loads(file.path.read_text(encoding="ascii"))["state"]["steady_seconds"] == 13.5


@given(st.recursive(st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.text(), st.lists, max_leaves=9))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_every_state_round_trips_exactly(tmp_path: Path, value: object) -> None:
    file = StateFile(tmp_path)
    file.save({"value": value})
    assert file.load() == {"value": value}


@given(bit=st.integers(0, len(encode(STATE)) * 8 - 1))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
def test_flipped_bit_is_detected_as_damage(tmp_path: Path, bit: int) -> None:
    file = StateFile(tmp_path)
    content = bytearray(encode(STATE))
    content[bit // 8] ^= 1 << bit % 8
    file.path.write_bytes(content)
    assert refused(file).reason == "state_damaged"
    assert not file.path.exists()


@given(length=st.integers(0, len(encode(STATE)) - 1), tail=st.binary(max_size=3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)
def test_truncated_file_is_detected_as_damage(tmp_path: Path, length: int, tail: bytes) -> None:
    content = encode(STATE)[:length] + tail
    if content == encode(STATE):
        return
    file = StateFile(tmp_path)
    file.path.write_bytes(content)
    assert refused(file).reason == "state_damaged"


def test_damaged_file_is_set_aside_and_saving_works_again(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    for number in range(1, 12):
        file.path.write_bytes(b"damage %d" % number)
        assert "ledger.json.damaged-" in str(refused(file))
        file.save(STATE)
        assert file.load() == STATE
    assert names(tmp_path) == ["ledger.json", *(f"ledger.json.damaged-{n}" for n in range(1, 10))]
    assert (tmp_path / "ledger.json.damaged-1").read_bytes() == b"damage 1"
    assert (tmp_path / "ledger.json.damaged-9").read_bytes() == b"damage 11"


@pytest.mark.parametrize(("version", "reason"), [(1, "state_older"), (7, "state_newer")])
def test_file_of_another_version_is_kept_but_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, reason: str
) -> None:
    monkeypatch.setattr(state_file, "VERSION", version)
    file = StateFile(tmp_path)
    file.save(STATE)
    other = file.path.read_bytes()
    monkeypatch.undo()
    error = refused(file)
    assert error.reason == reason
    assert f"version {version}" in str(error)
    assert (tmp_path / "ledger.json.damaged-1").read_bytes() == other


def test_file_over_the_limit_is_neither_read_nor_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path)
    file.save(STATE)
    monkeypatch.setattr(state_file, "MAX_BYTES", 1000)
    assert not_saved(file, {"long": "x" * 1000}).reason == "state_too_large"
    assert file.load() == STATE
    file.path.write_bytes(b"x" * 1001)
    assert refused(file).reason == "state_too_large"


def test_unopenable_file_is_set_aside(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    file.path.mkdir()
    assert refused(file).reason == "state_unreadable"
    file.save(STATE)
    assert file.load() == STATE


def test_non_finite_number_is_never_written(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    file.save(STATE)
    assert not_saved(file, {"total": float("nan")}).reason == "state_unwritable"
    assert file.load() == STATE


def test_missing_directory_is_reported(tmp_path: Path) -> None:
    error = not_saved(StateFile(tmp_path / "gone"))
    assert error.reason == "state_unwritable"
    assert "--state-dir" in str(error)


@needs_root
def test_full_disk_keeps_the_saved_state_and_saving_works_again_with_space(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=64k") as disk:
        file = StateFile(disk)
        file.save(STATE)
        ballast = disk / "ballast"
        free = os.statvfs(disk).f_bavail * 4096
        ballast.write_bytes(bytes(free))
        error = not_saved(file, {"long": "x" * 8192})
        assert error.reason == "disk_full"
        assert "--state-dir" in str(error)
        assert names(disk) == ["ballast", "ledger.json"]
        assert file.load() == STATE
        ballast.unlink()
        file.save({"long": "x" * 8192})
        assert file.load() == {"long": "x" * 8192}


@needs_root
def test_read_only_disk_allows_reading_but_not_writing_the_state(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=64k") as disk:
        file = StateFile(disk)
        file.save(STATE)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert not_saved(file).reason == "read_only"
        assert file.load() == STATE


@needs_root
def test_damaged_file_on_a_read_only_disk_is_set_aside_before_replacement(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=64k") as disk:
        file = StateFile(disk)
        file.path.write_bytes(b"damage")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        assert refused(file).reason == "state_damaged"
        assert not_saved(file).reason == "read_only"
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        file.save(STATE)
        assert (disk / "ledger.json.damaged-1").read_bytes() == b"damage"
        assert file.load() == STATE


def test_file_size_limit_is_reported_as_a_full_disk(tmp_path: Path) -> None:
    file = StateFile(tmp_path)
    file.save(STATE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        assert not_saved(file, {"long": "x" * 8192}).reason == "disk_full"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.load() == STATE
