"""The lock of the ledger's writer: one agent of a node at a time, and the note that outlives the agent."""

import os
from pathlib import Path

import pytest

from exporter.accounting.state_file import WriterLock

POINT = {"boot_id": "b", "metered_steady": 12.5}


def lock_of(directory: Path, node: str = "n1", state: Path | None = None) -> WriterLock:
    return WriterLock(node=node, directory=directory, state_directory=state)


def test_one_agent_of_a_node_holds_the_lock_until_release(tmp_path: Path) -> None:
    first, second = lock_of(tmp_path / "run"), lock_of(tmp_path / "run")
    assert first.take()
    assert first.take(), "it keeps the lock"
    assert not second.take()
    assert second.waits_for == str(tmp_path / "run" / "n1.lock")
    assert (first.host_held, second.host_held) == (True, None)
    first.release()
    assert second.take()
    assert (second.waits_for, second.warning) == ("", "")
    assert not first.take()


def test_agents_of_two_nodes_on_one_machine_do_not_block_each_other(tmp_path: Path) -> None:
    assert lock_of(tmp_path, "n1").take()
    assert lock_of(tmp_path, "n2").take()


def test_agents_with_one_state_directory_block_each_other_under_any_name(tmp_path: Path) -> None:
    first, second = lock_of(tmp_path / "a", "n1", tmp_path), lock_of(tmp_path / "b", "n2", tmp_path)
    assert first.take()
    assert not second.take()
    assert second.waits_for == str(tmp_path)
    assert lock_of(tmp_path / "b", "n2").take(), "a partly free lock is not kept"


def test_without_paths_every_agent_is_a_writer() -> None:
    lock = WriterLock()
    assert lock.take()
    assert lock.host_held is None, "no host lock is requested"
    assert WriterLock().take()
    assert WriterLock().path is None


@pytest.mark.parametrize("node", ["../../etc/passwd", "..", "", "a b/c", "x" * 300, "ü\n"])
def test_node_names_never_lead_outside_the_directory(tmp_path: Path, node: str) -> None:
    lock = lock_of(tmp_path / "run", node)
    assert lock.take()
    assert not lock.warning
    (file,) = (tmp_path / "run").iterdir()
    assert file == lock.path
    assert file.stat().st_mode & 0o777 == 0o600, "every process that can open the file can lock it"


def test_missing_lock_directory_is_reported_and_the_state_directory_lock_used(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "below"
    first, second = lock_of(missing, state=tmp_path), lock_of(missing, state=tmp_path)
    assert first.take()
    assert "--lock-dir" in first.warning
    assert str(missing) in first.warning
    assert first.host_held is False
    assert not second.take()
    assert second.waits_for == str(tmp_path)
    assert lock_of(missing).take(), "an agent without any lock still meters"


@pytest.mark.parametrize("thing", ["folder", "link", "pipe"])
def test_non_file_at_the_lock_path_is_reported_and_unchanged(tmp_path: Path, thing: str) -> None:
    lock = lock_of(tmp_path)
    assert lock.path
    if thing == "folder":
        lock.path.mkdir()
    elif thing == "link":
        lock.path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(lock.path)
    assert lock.take()
    assert str(lock.path) in lock.warning
    lock.note(POINT)
    assert lock.noted() == {}
    assert not (tmp_path / "elsewhere").exists()


def test_missing_state_directory_is_ignored_by_the_lock(tmp_path: Path) -> None:
    lock = lock_of(tmp_path, state=tmp_path / "gone")
    assert lock.take()
    assert lock.warning == ""


def test_note_is_kept_for_the_next_holder_until_removed(tmp_path: Path) -> None:
    first = lock_of(tmp_path)
    assert first.take()
    assert first.noted() == {}
    first.note({**POINT, "long": "x" * 10_000})
    first.note(POINT)
    first.release()
    second = lock_of(tmp_path)
    assert second.take()
    assert second.noted() == POINT
    second.note({})
    assert second.noted() == {}


@pytest.mark.parametrize("content", [b"", b"\n", b"abc {}\n", b"\x00" * 5000, b"[1]\n"])
def test_invalid_note_is_ignored(tmp_path: Path, content: bytes) -> None:
    lock = lock_of(tmp_path)
    assert lock.take()
    assert lock.path
    lock.path.write_bytes(content)
    assert lock.noted() == {}


def test_truncated_note_is_ignored(tmp_path: Path) -> None:
    lock = lock_of(tmp_path)
    assert lock.take()
    assert lock.path
    lock.note(POINT)
    whole = lock.path.read_bytes()
    for length in range(len(whole)):
        lock.path.write_bytes(whole[:length])
        assert lock.noted() == {}
