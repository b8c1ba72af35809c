"""Targets of what this program wrote, in this release or another, and a disk may have changed: state and store."""

import hashlib
import json
import sqlite3
from pathlib import Path

from fuzz_page import NOW, lived, metering, node
from fuzz_targets import BrokenPromise, Scratch, require, target

from exporter.accounting.ledger import ledger_of
from exporter.accounting.state_file import VERSION, StateFile, encode
from exporter.agent.owners import Owners
from exporter.cost.ledger import Chunk, Figures, FleetLedger, LineKey, Window
from exporter.cost.store import DayStore, connect_to_write
from exporter.cost.store_schema import ALL_OF_A_DAY, day_window
from exporter.errors import StateError, StoreError


def _folder() -> Path:
    folder = Scratch.folder() / "state"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    return folder


@target("state", "file", StateError)
def _file(data: bytes) -> None:
    """The bytes of the file."""
    file = StateFile(_folder())
    file.path.write_bytes(data)
    try:
        state = file.load()
    except StateError:
        require(not file.path.exists(), "a bad file stays where the next save replaces it")
        raise
    require(state is not None and isinstance(state, dict), "no state of a file that is there")


@target("state", "content", most_bytes=8192)
def _content(data: bytes) -> None:
    """What stands in a file whose checksum is right: a release of another time wrote it, or somebody did by hand."""
    folder = _folder()
    file = written(folder, data)
    as_read = file.path.read_bytes()
    meter = metering(file=file)
    meter.restore(10.0)
    one, source = node(meter=meter)
    lived(one, source, steady=20.0, conserved=False)
    meter.save_now(NOW + 30, 30.0)
    require(not meter.problem or "kept as" in meter.problem, f"not saved: {meter.problem}")
    if file.path.read_bytes() != as_read:  # else nothing was metered, and there was nothing to save
        _reread(folder)


def written(folder: Path, state: bytes) -> StateFile:
    """A file of this state, its checksum right."""
    checksum = hashlib.sha256(b"%d\n" % VERSION + state).hexdigest().encode()
    file = StateFile(folder)
    file.path.write_bytes(b'{"version":%d,"sha256":"%b","state":%b}\n' % (VERSION, checksum, state))
    return file


def _reread(folder: Path) -> None:
    """What was saved is read again, and says the same."""
    saved = StateFile(folder).load()
    if saved is None:
        raise BrokenPromise("nothing was saved")
    for ledger in (saved["ledger"], *saved["former_ledgers"]):
        again = ledger_of(ledger).dump()
        require(json.dumps(again, sort_keys=True) == json.dumps(ledger, sort_keys=True), "the ledger changed")


def state_of_a_node(folder: Path) -> bytes:
    """What a node's state is, without version and checksum; ``folder`` is empty."""
    meter = metering(Owners(), StateFile(folder))
    lived(*node(meter=meter))
    meter.save_now(NOW, 5.0)
    return encode(StateFile(folder).load() or {}).partition(b'"state":')[2].removesuffix(b"}\n")


DAY = 20_000 * 86_400


def store_of_a_day() -> bytes:
    """A store with one closed day, as its file is."""
    path = _folder() / "made.sqlite"
    key = LineKey(cluster="a", node="n", namespace="team", kind="Job", workload="w", model="H100", mode="exclusive")
    window = day_window(DAY)
    chunk = Chunk(
        window=window,
        lines={key: Figures(active_seconds=60.0, idle_seconds=30.0)},
        capacity_seconds={"a": 90.0},
        recorded_hours={"a": 24},
    )
    whole = Window(start_seconds=window.start_seconds, end_seconds=window.end_seconds)
    store = DayStore(path)
    store.close_day(FleetLedger(window=whole, dimensions=ALL_OF_A_DAY, chunks=(chunk,)), now=NOW, by="test")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    return path.read_bytes()


@target("state", "store", StoreError, most_bytes=1 << 17)
def _store(data: bytes) -> None:
    """The bytes of the store's file; where they begin with ``@`` patches of a sound one: ``@offset:bytes`` a line."""
    path = _folder() / "days.sqlite"
    path.write_bytes(_patched(data) if data.startswith(b"@") else data)
    store = DayStore.open(path, write=False)
    problems = store.check()
    for day in store.closed_days():
        for version in store.restatements(day.window.start_seconds):
            require(problems or version.lines >= 0, "a negative number of lines")
    connect_to_write(path).close()


_SOUND: list[bytes] = []


def _patched(data: bytes) -> bytes:
    if not _SOUND:
        _SOUND.append(store_of_a_day())
        _folder()
    content = bytearray(_SOUND[0])
    for patch in data.split(b"\n"):
        offset, _, new = patch.removeprefix(b"@").partition(b":")
        if offset.isdigit() and len(offset) < 8 and int(offset) + len(new) <= len(content):  # noqa: PLR2004 - of the file
            content[int(offset) : int(offset) + len(new)] = new
    return bytes(content)
