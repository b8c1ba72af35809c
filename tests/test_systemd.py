"""systemd accepts the unit, its settings are valid options, and its rights are sufficient."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import stub_support as stub
from agent_support import matching, running_agent

from exporter.config import load_agent

ROOT = Path(__file__).resolve().parents[1]
UNIT = ROOT / "deploy" / "systemd" / "gpu-cost-exporter.service"
SETTINGS = ROOT / "deploy" / "systemd" / "gpu-cost-exporter.env"
MOST_EXPOSED = "3.0"


def values(key: str) -> list[str]:
    """Return the values of a key of the unit, in their order."""
    return re.findall(rf"^{key}=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE)


def checked(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Return systemd-analyze's result for the unit, with an existing program in place of the installed one."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze: make install")
    unit = tmp_path / UNIT.name
    unit.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text(encoding="utf-8")))
    command = ["systemd-analyze", "--no-pager", *words, str(unit)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_systemd_verify_accepts_the_unit_without_warnings(tmp_path: Path) -> None:
    done = checked(tmp_path, "verify", "--man=no")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_security_exposure_is_below_the_limit(tmp_path: Path) -> None:
    threshold = str(int(float(MOST_EXPOSED) * 10))
    done = checked(tmp_path, "security", "--offline=true", f"--threshold={threshold}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_setting_of_the_example_is_a_valid_option(tmp_path: Path) -> None:
    text = SETTINGS.read_text(encoding="utf-8")
    environ = dict(re.findall(r"^#?(GPU_COST_EXPORTER_\w+)=(.*)$", text, re.MULTILINE))
    assert {"GPU_COST_EXPORTER_WORKLOAD_MANAGER", "GPU_COST_EXPORTER_JOB_MAPPING_DIR"} <= set(environ)
    # The example has a choice of both.
    environ["GPU_COST_EXPORTER_WORKLOAD_MANAGER"] = "slurm"
    environ["GPU_COST_EXPORTER_STATE_DIR"] = str(tmp_path)
    config = load_agent({}, environ, check_paths=False)
    assert not config.warnings


def test_settings_file_and_state_directory_match_the_unit() -> None:
    text = UNIT.read_text(encoding="utf-8")
    (file,) = values("EnvironmentFile")
    assert f"deploy/systemd/{SETTINGS.name} {file.lstrip('-')}" in text
    (state,) = values("StateDirectory")
    assert values("Environment") == [f"GPU_COST_EXPORTER_STATE_DIR=%S/{state}"]
    assert values("RestartPreventExitStatus") == ["2"]


def test_unit_runtime_directory_is_the_lock_directory_and_is_preserved() -> None:
    (folder,) = values("RuntimeDirectory")
    assert load_agent({}, {}).running.lock_dir == Path("/run") / folder
    assert values("RuntimeDirectoryPreserve") == ["yes"]


def test_agent_measures_with_the_rights_of_the_unit(tmp_path: Path) -> None:
    if shutil.which("setpriv") is None or stub.compiler() is None:
        pytest.skip("needs setpriv and a C compiler: make install")
    (kept,) = values("CapabilityBoundingSet")
    rights = ["--bounding-set", f"-all,+{kept.removeprefix('CAP_').lower()}", "--inh-caps", "-all", "--no-new-privs"]
    stub.control(tmp_path / "control", gpus=1)
    environment = stub.environment(stub.build(tmp_path / "lib"), tmp_path / "control")
    environment |= {"GPU_COST_EXPORTER_WORKLOAD_MANAGER": "host", "GPU_COST_EXPORTER_STATE_DIR": str(tmp_path)}
    with running_agent(prefix=("setpriv", *rights), env=environment) as agent:
        agent.until(lambda page: matching(page, "gpu_activity_ratio"), "the GPU")
        status = Path(f"/proc/{agent.process.pid}/status").read_text(encoding="ascii")
        assert re.findall(r"^CapEff:\s+(\w+)$", status, re.MULTILINE) == [f"{1 << 19:016x}"]
        # The rights of the unit allow this read: the directory of the first process has the users' names.
        users = subprocess.run(
            ["setpriv", *rights, "cat", f"/proc/{agent.process.pid}/root/etc/passwd"], check=False, capture_output=True
        )
        assert b"root:" in users.stdout
