"""docs/migrating.md agrees with the code: every metric, flag and variable has its row, and its queries have answers."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from agent_support import AgentProcess

from exporter.config import dcgm_flags
from exporter.config.dcgm_flags import Setting
from exporter.config.options import OPTIONS
from exporter.metrics import catalog
from exporter.metrics.dcgm_names import NOT_MADE, TABLE, EventCount
from exporter.metrics.text_format import Kind

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "migrating.md").read_text(encoding="utf-8")
QUERIES = re.findall(r"```promql\n(.*?)```", TEXT, re.DOTALL)
LOST, POWER, ACTIVITY, PODS = QUERIES[:4]
THEIRS = 'job="dcgm-exporter",instance="x:9400",namespace="gpu-operator",pod="dcgm-exporter-a"'
OURS = 'job="gpu-cost/gpu-cost-exporter",instance="y:9400"'


def row_of(setting: Setting) -> str:
    flags = ", ".join(f"`{name}`" for name in setting.flags)
    here = f"`--{setting.key}"
    if setting.turns:
        here += f" {setting.turns}`"
    elif setting.key:
        here += "`" + (", from milliseconds" if setting.form == "milliseconds" else "")
    elif setting.always:
        here = f"nothing to set: {setting.always}"
    else:
        here = f"none; {setting.instead}"
    return f"| {flags} | `{setting.env}` | {here}"


@pytest.mark.parametrize("setting", dcgm_flags.TABLE, ids=lambda setting: setting.env)
def test_every_flag_and_variable_has_its_row_of_the_table(setting: Setting) -> None:
    assert row_of(setting) in TEXT


def test_every_documented_flag_is_accepted() -> None:
    section = TEXT.partition("## Flags and variables")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| (.*?) \| `([A-Z_]+)` \|", section, re.MULTILINE)
    assert [name for _, name in documented] == [setting.env for setting in dcgm_flags.TABLE]


def test_every_default_metric_has_a_row_with_its_device_level() -> None:
    numbers = [row for row in TABLE if row.default and row.kind is not Kind.LABEL]
    assert len(numbers) == 25
    for row in numbers:
        (cells,) = re.findall(rf"^\| `{row.legacy_name}` \|(.*)$", TEXT, re.MULTILINE)
        assert cells.split("|")[1].strip() == ("instance" if row.per_instance else "board"), row.legacy_name
    assert all(f"| `{name}`" in TEXT for name in (*EventCount, *NOT_MADE))


def test_every_named_metric_and_flag_exists() -> None:
    ours = {metric.name for metric in catalog.ALL}
    named = set(re.findall(r"`(gpu_[a-z_]+)", TEXT))
    assert named - ours - {"gpu_uuid"} == set()
    flags = {option.flag for option in OPTIONS} | {*dcgm_flags.KNOWN_FLAGS, "--flag", "--config", "--format"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", TEXT)) - flags == set()


def test_every_link_has_a_target() -> None:
    folder = Path(__file__).resolve().parent.parent / "docs"
    for target, _, heading in (link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", TEXT)):
        text = (folder / target).read_text(encoding="utf-8") if target else TEXT
        headings = {
            re.sub(r"[^a-z -]", "", line.lower()).replace(" ", "-")
            for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        }
        assert not heading or heading in headings, (target, heading)


def answers(tmp_path: Path, series: dict[str, str], expected: dict[str, list[str]]) -> None:
    """Run each query in a unit test of Prometheus, and compare the label sets of its answer."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("needs promtool on the PATH: make install")
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(expected)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    test = {
        "rule_files": ["rules.yaml"],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f"count by (UUID, GPU_I_ID, held_by) (query:{number})",
                        "eval_time": "60m",
                        "exp_samples": [{"labels": f"{{{labels}}}", "value": 1} for labels in found],
                    }
                    for number, found in enumerate(expected.values())
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(test))
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def pair(metric: str, theirs: str, ours: str, more: str = "", gpu: str = "a") -> dict[str, str]:
    theirs_more = more.replace("pod=", "exported_pod=").replace("namespace=", "exported_namespace=")
    return {
        f'{metric}{{{THEIRS},UUID="{gpu}"{theirs_more},hostname="n"}}': theirs,
        f'{metric}{{{OURS},UUID="{gpu}"{more},Hostname="n"}}': ours,
    }


def test_comparison_of_two_equal_exporters_is_empty(tmp_path: Path) -> None:
    series = {
        **pair("DCGM_FI_DEV_POWER_USAGE", "300x120", "304x120", ',namespace="ml",pod="train-0"'),
        **pair("DCGM_FI_DEV_FB_USED", "1000x120", "1010x120", ',namespace="ml",pod="train-0"'),
        **pair("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "0.5x120", "0.52x120", ',GPU_I_ID="1"'),
    }
    answers(tmp_path, series, {LOST: [], POWER: [], ACTIVITY: [], PODS: []})


def test_comparison_returns_only_the_differences(tmp_path: Path) -> None:
    theirs_only = f'DCGM_FI_DEV_XID_ERRORS{{{THEIRS},UUID="c"}}'
    series = {
        **pair("DCGM_FI_DEV_POWER_USAGE", "300x120", "150x120"),
        **pair("DCGM_FI_DEV_FB_USED", "1000x120", "1000x120", ',namespace="ml",pod="train-0"'),
        f'DCGM_FI_DEV_FB_USED{{{THEIRS},UUID="b",exported_namespace="ml",exported_pod="gone-0"}}': "0x120",
        f'DCGM_FI_DEV_FB_USED{{{OURS},UUID="b"}}': "0x120",
        **pair("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "0x120", "0.9x120", ',GPU_I_ID="1"'),
        theirs_only: "31x120",
    }
    expected = {
        LOST: ['UUID="c"'],
        POWER: ['UUID="a"'],
        ACTIVITY: ['UUID="a",GPU_I_ID="1"'],
        PODS: ['UUID="b",held_by="gone-0"'],
    }
    answers(tmp_path, series, expected)


def test_the_sums_of_the_document_count_every_device_once(tmp_path: Path) -> None:
    board, by_namespace = QUERIES[4:]
    series = {
        f'DCGM_FI_DEV_POWER_USAGE{{{OURS},UUID="a"}}': "300x120",
        f'DCGM_FI_DEV_FB_USED{{{OURS},UUID="a"}}': "1000x120",
        f'DCGM_FI_DEV_FB_USED{{{OURS},UUID="a",namespace="ml",pod="x"}}': "400x120",
        f'DCGM_FI_DEV_FB_USED{{{OURS},UUID="a",namespace="ml",pod="y"}}': "500x120",
    }
    answers(tmp_path, series, {f"({board}) == 300": [""], f"({by_namespace}) == 900": [""]})


def test_agent_replaces_the_image_in_dcgm_exporters_daemonset() -> None:
    environ = {
        "DCGM_EXPORTER_KUBERNETES": "true",
        "DCGM_EXPORTER_LISTEN": "127.0.0.1:0",
        "DCGM_EXPORTER_WEB_READ_TIMEOUT": "10s",
        "DCGM_EXPORTER_WEB_WRITE_TIMEOUT": "30s",
        "GPU_COST_EXPORTER_SIMULATE": "demo",
    }
    words = ["-f", "/etc/dcgm-exporter/dcp-metrics-included.csv", "-c", "1000"]
    with subprocess.Popen(
        [sys.executable, "-m", "exporter", *words], env={**os.environ, **environ}, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            reported = []
            for line in process.stderr:
                reported.append(line)
                if "listening on" in line:
                    break
            agent = AgentProcess(
                process, port=int(reported[-1].partition("127.0.0.1:")[2].split(",")[0]), lines=reported
            )
            assert agent.get("/health")[0] == 200
            agent.until(
                lambda page: any(re.match(r'DCGM_FI_DEV_FB_USED{.*,pod="', name) for name in page), "a pod's GPU"
            )
        finally:
            process.send_signal(signal.SIGTERM)
    (warning,) = [line for line in reported if "WARNING" in line]
    assert "its default set, which is built in, is used" in warning
