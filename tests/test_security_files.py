"""Files of agent and service: their owner and mode, their content, and links in their place."""

import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from agent_support import running_agent
from files_support import digest
from store_support import D1, NOW, chunk
from test_store import closed

from exporter.accounting.state_file import StateFile
from exporter.cost import agent_client
from exporter.cost.store import DayStore
from exporter.cost.store_file import changing
from exporter.errors import ExporterError, StateError, StoreError

SECRET = "PLANTED-environment"  # noqa: S105 - a planted secret


@contextmanager
def umask(mode: int) -> Iterator[None]:
    before = os.umask(mode)
    try:
        yield
    finally:
        os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """Return the mode by path of everything below a folder."""
    return {str(path.relative_to(folder)): oct(stat.S_IMODE(path.lstat().st_mode)) for path in folder.rglob("*")}


def test_agent_files_have_private_modes_and_no_secrets_under_any_umask(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with tempfile.TemporaryDirectory(prefix="f") as short:  # the path of a socket has at most 103 bytes
        content = _content_of_an_agents_state(state, Path(short))
    assert SECRET not in content
    assert "token" not in content.lower()


def _content_of_an_agents_state(state: Path, temporary: Path) -> str:
    shell = shutil.which("sh")
    assert shell
    open_to_all = (shell, "-c", 'umask 0; exec "$@"', "sh")
    environment = {"TMPDIR": str(temporary), "SOME_PASSWORD": SECRET}
    options = ("--simulate", "demo", "--state-dir", str(state), "--state-interval", "1s")
    with running_agent(*options, prefix=open_to_all, env=environment) as agent:
        agent.until(lambda page: page.get("gpu_exporter_state_saved") == 1, "a save")
        (folder,) = temporary.iterdir()
        assert oct(stat.S_IMODE(folder.stat().st_mode)) == "0o700", (
            "sockets and tokens of a simulated node are below it"
        )
        found = modes(state)
        assert set(found) - {"ledger.json.new", "windows.json", "windows.json.new"} == {"ledger.json"}
        assert set(found.values()) == {"0o600"}
        content = (state / "ledger.json").read_text()
        assert agent.end() == 0
    assert list(temporary.iterdir()) == []
    return content


def test_store_files_have_private_modes_under_any_umask(tmp_path: Path) -> None:
    path = tmp_path / "days.sqlite"
    with umask(0), closed(path, chunk(D1)), changing(path):
        assert set(modes(tmp_path)) > {"days.sqlite", "days.sqlite.lock"}
        assert set(modes(tmp_path).values()) == {"0o600"}, "including its log and its lock"
    with umask(0), pytest.raises(StoreError), DayStore(tmp_path / "none" / "days").writing(NOW):
        pass


def test_symlink_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    state, victim = tmp_path / "state", tmp_path / "victim"
    state.mkdir()
    victim.write_text("untouched")
    for name in ("ledger.json.new", "ledger.json", "days.sqlite.lock"):
        (state / name).symlink_to(victim)
    file = StateFile(state)
    file.save({"a": 1})
    assert file.load() == {"a": 1}
    assert not (state / "ledger.json").is_symlink()
    with pytest.raises(StoreError, match="cannot write"), DayStore(state / "days.sqlite").writing(NOW):
        pass
    assert victim.read_text() == "untouched"


def test_pipe_or_hard_link_in_place_of_the_state_file_is_not_used(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    os.mkfifo(tmp_path / "ledger.json")
    os.mkfifo(tmp_path / "ledger.json.new")
    file = StateFile(tmp_path)
    reported: list[StateError] = []

    def use() -> None:
        try:
            file.load()
        except StateError as error:
            reported.append(error)
        with umask(0):
            file.save({"a": 1})
        (tmp_path / "ledger.json.new").hardlink_to(victim)
        file.save({"a": 2})

    user = threading.Thread(target=use, daemon=True)
    user.start()
    user.join(30)
    assert not user.is_alive()
    assert [one.reason for one in reported] == ["state_unreadable"]
    assert file.load() == {"a": 2}
    assert victim.read_text() == "untouched"
    assert oct(stat.S_IMODE(file.path.stat().st_mode)) == "0o600"


class _Elsewhere(BaseHTTPRequestHandler):
    """Redirects every client to another path, and keeps the requested paths."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(307)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Log nothing."""


def test_webhook_and_agent_redirects_are_not_followed() -> None:
    _Elsewhere.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with pytest.raises(digest.DigestError):
            digest.post(f"{url}/hook", {"text": "x"}, sleep=lambda _: None)
        with pytest.raises(ExporterError):
            agent_client.AgentClient(base=url).fetch()
        server.shutdown()
        thread.join()
    assert _Elsewhere.asked == ["/hook", agent_client.LEDGER]
