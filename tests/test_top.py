"""`top` and `kubectl gpu-cost`: their view of simulated agents, live, once and as JSON."""

import fcntl
import json
import os
import pty
import re
import select
import stat
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from agent_support import PATIENCE_SECONDS, ROOT, AgentProcess
from files_support import read_yaml
from fleet_support import SMALL_FLEET, backfill, prometheus

from exporter import __version__
from exporter.cli import kubectl_plugin, main
from exporter.cost.live import picture_of

NODE, NOTEBOOK = "sim-h100-01", "jupyter-mkowalski"
KUBECTL = f"""#!{sys.executable}
# Stands for kubectl: lists the pods of a file, and "forwards" to the port that an agent has on this host.
import json, pathlib, signal, sys
cluster, words = json.loads(pathlib.Path(__file__).with_name("cluster.json").read_text()), sys.argv[1:]
if "port-forward" in words:
    print(f"Forwarding from 127.0.0.1:{{cluster['ports'][words[-2]]}} -> {{words[-1]}}", flush=True)
    signal.pause()
elif "pods" in words:
    print(json.dumps({{"items": cluster["agents"]}}))
elif (name := words[words.index("pod") + 1]) in cluster["pods"]:
    print(json.dumps(cluster["pods"][name]))
else:
    sys.exit(f'Error from server (NotFound): pods "{{name}}" not found')
"""


def address(agent: AgentProcess) -> str:
    return f"http://127.0.0.1:{agent.port}"


def truth_of(agent: AgentProcess) -> tuple[set[tuple[str, str]], int]:
    """Return holders with their devices, and the number of free devices, from the agent's API."""
    devices = json.loads(agent.get("/api/v1/devices")[1])["devices"]
    held = {(device["uuid"], one["pod"]) for device in devices for one in device["holders"]}
    return held, sum(device["allocation"] == "unallocated" and device["state"] == "up" for device in devices)


def test_top_once_lists_holders_with_owner_activity_and_cost(
    demo_agent: AgentProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    held, free = truth_of(demo_agent)
    assert main(["top", "--agent", address(demo_agent), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["rows"]
    assert {(row["gpu_uuid"], row["pod"]) for row in rows if row["pod"]} == held
    assert sum(row["state"] == "unallocated" for row in rows) == free
    assert (document["simulated"], document["problems"]) == (True, [])
    (notebook,) = [row for row in rows if row["pod"] == NOTEBOOK]
    assert (notebook["owner_kind"], notebook["owner_name"], notebook["team"]) == (
        "Notebook",
        "mkowalski",
        "recommender",
    )
    assert notebook["cost_per_hour"] == [{"currency": "USD", "cost": pytest.approx(6.88)}]

    assert main(["top", "--agent", address(demo_agent), "--sort", "gpu"]) == 0
    head, titles, _, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith(f"SIMULATED  {NODE} · {len(held)} holders · ")
    assert titles.split()[:5] == ["GPU", "Holder", "Owner", "Team", "Activity"]
    assert len(lines) == len(rows)
    assert [line.split()[0] for line in lines] == sorted(line.split()[0] for line in lines)


def test_top_shows_the_state_of_a_failed_device(demo_agent: AgentProcess) -> None:
    document = json.loads(demo_agent.get("/api/v1/devices")[1])
    lost = next(device for device in document["devices"] if device["allocation"] == "unallocated")
    lost |= {"state": "lost", "state_reason": "gpu_is_lost"}
    (row,) = [row for row in picture_of(document, NODE).rows if row.gpu_uuid == lost["uuid"]]
    assert (row.state, row.unknown_reason) == ("lost", "gpu_is_lost")


@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        (("--agent", "http://127.0.0.1:9"), 1, "cannot reach the agent: connection refused"),
        (("--prometheus", "http://127.0.0.1:9", "--prometheus-retries", "0"), 1, "http://127.0.0.1:9: cannot connect"),
        (("--agent", "http://a", "--prometheus", "http://b"), 2, "--agent: shows one node, --prometheus a fleet"),
        (("--sort", "idel"), 2, "--sort: unknown value 'idel'; did you mean 'idle'?"),
        (
            ("--interval", "2"),
            2,
            "value '2' is not a duration in range; allowed: a number with ms, s, m or h, from 500ms to 1h",
        ),
    ],
)
def test_top_errors_are_one_clear_line(
    words: tuple[str, ...], code: int, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *words]) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert reported in err


def test_top_of_a_fleet_shows_the_same_rows_as_the_agent(
    demo_agent: AgentProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, text = demo_agent.get("/metrics", {"Accept": "application/openmetrics-text"})[1], tmp_path / "page.om"
    lines = (line if line.startswith("#") else f"{line} {int(time.time())}" for line in page.splitlines())
    text.write_text("\n".join(lines) + "\n", encoding="utf-8")
    backfill(text, tmp_path / "blocks")
    found = []
    with prometheus(tmp_path, tmp_path / "blocks", SMALL_FLEET) as server:
        for words in (("--agent", address(demo_agent)), ("--prometheus", server.url)):
            assert main(["top", *words, "--json"]) == 0
            found.append(json.loads(capsys.readouterr().out)["rows"])
    same = ("state", "mig_profile", "gpu_share_ratio", "cost_per_hour")
    agent, fleet = ({(row["gpu_uuid"], row["pod"]): [row[name] for name in same] for row in rows} for rows in found)
    assert fleet == agent
    free = [row for row in found[1] if row["state"] == "unallocated"]
    assert free
    assert all(row["cost_per_hour"][0]["cost"] > 0 for row in free if row["mig_profile"])
    for name in ("activity_ratio", "effective_ratio"):
        known = [{(row["gpu_uuid"], row["pod"]) for row in rows if row[name] is not None} for rows in found]
        assert known[0] == known[1] > set(), name
        assert known[1] & {(row["gpu_uuid"], None) for row in free}, name


class Terminal:
    """A program in a terminal of 40 lines with 150 columns."""

    def __init__(self, *command: str) -> None:
        self.fd, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
        env = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
        env["TERM"] = "xterm"
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        self.text = ""

    def until(self, pattern: str) -> None:
        """Read until the newest screen matches."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not re.search(pattern, self.screen, re.DOTALL):
            assert time.monotonic() < deadline, (pattern, self.screen)
            self.read(0.2)

    def read(self, seconds: float) -> bool:
        """Read the available output; return False at the end."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return True
        try:
            self.text += os.read(self.fd, 1 << 16).decode(errors="replace")
        except OSError:  # Linux raises this at the end of a terminal
            return False
        return True

    @property
    def screen(self) -> str:
        """Return the newest complete screen, without colours."""
        screens = self.text.split("\x1b[H")
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screens[-1])

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def code(self) -> int:
        """Wait for the end."""
        while self.read(PATIENCE_SECONDS):
            pass
        os.close(self.fd)
        return self.process.wait(timeout=PATIENCE_SECONDS)


def test_top_in_a_terminal_updates_live_and_handles_keys(demo_agent: AgentProcess) -> None:
    words = ("-m", "exporter", "top", "--agent", address(demo_agent), "--interval", "500ms")
    terminal = Terminal(sys.executable, *words)
    terminal.until(r"sort: waste.*jupyter-mkowalski [^\n]*[▁▂▃▄▅▆▇█]{3} .*q quit")
    terminal.press("s")
    terminal.until("sort: activity.*q quit")
    terminal.press("r/llama\r")
    terminal.until("sort: activity reversed   filter: llama.*llama-pretrain.*q quit")
    assert NOTEBOOK not in terminal.screen
    terminal.press("\x1b")
    terminal.until("reversed *\r?\n.*jupyter-mkowalski.*q quit")
    terminal.press("q")
    assert terminal.code() == 0
    assert terminal.text.count("\x1b[?1049h") == terminal.text.count("\x1b[?1049l") == 1, "the screen is restored"


def pod(namespace: str, name: str, node: str | None, **more: object) -> dict[str, Any]:
    phase = "Running" if node else "Pending"
    spec = {"containers": [{}], **({"nodeName": node} if node else {}), **more}
    return {"metadata": {"namespace": namespace, "name": name}, "spec": spec, "status": {"phase": phase}}


@pytest.fixture
def cluster(demo_agent: AgentProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a substitute for kubectl, alone on the PATH, with an agent on one node and a dead one on another."""
    ports = {"ports": [{"name": "metrics", "containerPort": 9400}]}
    agents = [pod("gpu-cost", name, node, containers=[ports]) for name, node in (("a", NODE), ("b", "dead-01"))]
    limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    pods = (
        pod("data-science", NOTEBOOK, NODE),
        pod("web", "shop", NODE),
        pod("web", "late", NODE, containers=[limits]),
        pod("web", "waiting", None),
        pod("web", "far", "cpu-01"),
    )
    state = {
        "agents": [*agents, pod("gpu-cost", "c", None)],
        "ports": {"pod/a": demo_agent.port, "pod/b": 9},
        "pods": {one["metadata"]["name"]: one for one in pods},
    }
    (tmp_path / "cluster.json").write_text(json.dumps(state))
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_kubectl_plugin_shows_all_agents_and_reports_failing_ones(
    cluster: Path, demo_agent: AgentProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    held, _ = truth_of(demo_agent)
    assert kubectl_plugin.main(["who"]) == 3
    out, err = capsys.readouterr()
    assert sum(f"/{name} " in out for _, name in held) == len({name for _, name in held})
    assert "Held for" in out
    assert "dead-01: http://127.0.0.1:9: cannot reach the agent: connection refused" in err

    assert kubectl_plugin.main(["top", "--node", NODE, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["gpu_uuid"], row["pod"]) for row in rows if row["pod"]} == held
    assert kubectl_plugin.main(["waste", "--node", NODE, "--json"]) == 0
    idle = json.loads(capsys.readouterr().out)["rows"]
    assert all(row["idle_for_seconds"] >= 120 for row in idle)
    left = subprocess.run(["/usr/bin/pgrep", "-f", str(cluster / "kubectl")], capture_output=True, check=False)
    assert left.stdout == b"", "each port-forward has ended"


@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        (("why", f"data-science/{NOTEBOOK}"), 0, "GPU 3 (H100 80GB HBM3), held for "),
        (("why", "shop", "--namespace", "web"), 0, "It requests no GPU: no container has a limit of a GPU resource"),
        (("why", "late"), 0, "It requests nvidia.com/gpu, and the kubelet does not list it with a GPU"),
        (("why", "waiting"), 0, "It is Pending and on no node"),
        (("why", "far"), 1, "no running agent on cpu-01 among 3 pods with the labels app.kubernetes.io/name=gpu-cost"),
        (("why", "nobody"), 1, 'kubectl get pod nobody: Error from server (NotFound): pods "nobody" not found'),
        (("who", "--node", "dead-01"), 1, "dead-01: http://127.0.0.1:9: cannot reach the agent"),
        (("waist",), 2, "unknown command 'waist'; did you mean 'waste'?"),
        (("who", "--noed", "x"), 2, "--noed: unknown flag; did you mean '--node'?"),
    ],
)
@pytest.mark.usefixtures("cluster")
def test_kubectl_plugin_explains_a_pod_or_a_mistake(
    words: tuple[str, ...], code: int, reported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kubectl_plugin.main(list(words)) == code
    out, err = capsys.readouterr()
    assert reported in (err if code else out)


def test_kubectl_plugin_without_kubectl_names_the_fix(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kubectl_plugin.main(["who"]) == 1
    assert "kubectl: No such file or directory; install kubectl and put it on the PATH" in capsys.readouterr().err


def test_krew_manifest_names_the_plugin_of_this_version() -> None:
    manifest = read_yaml((ROOT / "deploy" / "krew" / "gpu-cost.yaml").read_text(encoding="utf-8"))
    scripts = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert (manifest["metadata"]["name"], manifest["spec"]["version"]) == ("gpu-cost", f"v{__version__}")
    for platform in manifest["spec"]["platforms"]:
        assert f'{platform["bin"]} = "exporter.cli.kubectl_plugin:main"' in scripts
        assert __version__ in platform["uri"]
