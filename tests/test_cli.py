"""The command line from a user's view."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from agent_support import AgentProcess, answering, run_fork
from files_support import read_yaml

from exporter import __version__
from exporter.cli import main, whole_parser
from exporter.config import dcgm_flags, price_book
from exporter.config.options import OPTIONS

HELP_THEN_HEAVY_MODULES = """
import sys
from exporter.cli import main, whole_parser
try:
    main(["agent", "--help"])
except SystemExit:
    sys.exit(",".join({"grpc", "aiohttp", "pynvml", "rich", "prometheus_client"} & set(sys.modules)))
"""
PROGRAM = [sys.executable, "-m", "exporter"]


def test_help_documents_every_option_with_its_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # no line break at a hyphen of a default
    with pytest.raises(SystemExit) as ended:
        main(["agent", "--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS:
        assert option.flag in text
        assert f"[default: {option.default_note or option.default}" in text
        assert all(name in text for name in dcgm_flags.names_for(option.key))
    assert "GPU_COST_EXPORTER_" in text


def test_help_loads_neither_grpc_nor_the_web_server_nor_the_driver() -> None:
    command = [sys.executable, "-c", HELP_THEN_HEAVY_MODULES]
    looked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert looked.stderr.strip() == ""


@pytest.mark.parametrize("word", ["--version", "version"])
def test_version_is_a_flag_and_a_command(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([word])
    assert capsys.readouterr().out == f"gpu-cost-exporter {__version__}\n"


def test_examples_of_each_command_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    parser = whole_parser()
    with pytest.raises(SystemExit):
        main(["help"])
    names = re.findall(r"^    (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert {"agent", "top", "report", "completion", "help", "version"} <= set(names)
    for name in {*names, "simulate fleet"} - {"help", "version"}:
        with pytest.raises(SystemExit):
            main(["help", name] if name in names else [*name.split(), "--help"])
        usage, _, text = capsys.readouterr().out.partition("\n\n")
        assert "\n" not in usage, name
        examples = re.findall(r"^  gpu-cost-exporter (.*)$", text, re.MULTILINE)
        assert len(examples) >= 2, name
        for example in examples:
            words = shlex.split(re.split(r" [>|] ", example)[0])
            namespace, unknown = parser.parse_known_args(words)
            assert (namespace.command, unknown) == (name.split()[0], [])


def test_doctor_help_has_its_own_options_and_refers_to_the_agent_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    text = capsys.readouterr().out
    assert "--report FILE" in text
    assert "gpu-cost-exporter agent --help" in " ".join(text.split())
    assert "--sample-interval" not in text
    assert len(text.splitlines()) < 30


def test_short_help_has_purpose_examples_and_the_long_help_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("agent", "report", "serve"):
        with pytest.raises(SystemExit) as ended:
            main([name, "-h"])
        text = capsys.readouterr().out
        assert ended.value.code == 0
        assert "Examples:" in text
        assert text.endswith(f"All options: gpu-cost-exporter {name} --help\n")
        assert len(text.splitlines()) < 15


COMPLETE = """
source <("$@" completion bash)
while read -r -a COMP_WORDS; do
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  [[ ${COMP_WORDS[-1]} == "''" ]] && COMP_WORDS[-1]=
  _gpu_cost_exporter
  echo "${COMPREPLY[*]}"
done
"""
COMPLETIONS = {
    "re": "report recommend",
    "simulate ch": "check",
    "simulate check t4": "t4-timeslicing",
    "help prices": "prices",
    "report --win": "--window",
    "report --window last": "lastweek lastmonth",
    "report --format = js": "json",
    "report --by te": "team",
    "agent --source ''": "auto nvml dcgm",
    "focus columns --version 1.": "1.2 1.3 1.4",
    "agent --config ''": "",
}


def test_bash_completes_commands_flags_and_values() -> None:
    typed = "".join(f"gpu-cost-exporter {words}\n" for words in COMPLETIONS)
    command = ["bash", "-c", COMPLETE, "bash", *PROGRAM]
    done = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=60, check=True)
    assert dict(zip(COMPLETIONS, done.stdout.splitlines(), strict=True)) == COMPLETIONS
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_completion_scripts_are_valid(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "recommend" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, timeout=60, check=True)


def test_no_command_shows_the_help_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "simulate" in capsys.readouterr().out


def test_all_errors_are_reported_at_once_one_line_each(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("kubelet-intervall: 5s\n")
    code = main(["agent", "--config", str(file), "--sampel-interval", "1s", "--listen", "9400", "--x=1", "stray"])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert all(line.startswith("gpu-cost-exporter: ") for line in lines)
    for words in (
        "--sampel-interval: unknown flag; did you mean '--sample-interval'?",
        "--x: unknown flag",
        "'stray': unexpected argument",
        f"{file}:1: kubelet-intervall: unknown key; did you mean 'kubelet-interval'?",
        "listen (from --listen): value '9400'",
    ):
        assert sum(words in line for line in lines) == 1


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("agent", "--listen"), "argument --listen: expected one argument"),
        (("doctor", "--format", "xml"), "--format: unknown value 'xml'; allowed: text, json"),
        (("doctor", "--frmat", "json"), "--frmat: unknown flag; did you mean '--format'?"),
        (("simulate",), "required: WHAT"),
        (("agnt",), "unknown command 'agnt'; did you mean 'agent'?"),
        (("--verison",), "--verison: unknown flag; did you mean '--version'?"),
        (("simulate", "chek", "demo"), "unknown command 'chek'; did you mean 'check'?"),
        (("report", "--agent", "http://127.0.0.1:9", "--by", "tema"), "did you mean 'team'?"),
        (("report", "--prometheus", "http://127.0.0.1:9", "--window", "last-mnth"), "did you mean 'lastmonth'?"),
        (("report", "--prometheus", "http://127.0.0.1:9", "--window", "30 days"), "did you mean '30d'?"),
        (("simulate", "check", "dmo"), "unknown scenario 'dmo'; did you mean 'demo'?"),
        (("agent", "--simulate", "dmo"), "did you mean 'demo'?"),
        (("simulate", "check", "/none.yaml"), "/none.yaml: cannot be read"),
        (("agent", "--state-dir", "/dev/null"), "state-dir: /dev/null is not a directory"),
        (("agent", "--kubelet-socket", "/dev/null"), "/dev/null is a file, not a socket"),
        (("agent", "--collectors", "/none.csv"), "collectors: cannot read /none.csv"),
        (("agent", "--simulate", "demo", "--price-book", "/none.yaml"), "price-book: cannot read /none.yaml"),
        (("prices", "check", "/none.yaml"), "price-book: cannot read /none.yaml"),
        (("prices",), "required: WHAT"),
        (("prices", "init"), "give --agent URL for one node, --prometheus URL for a fleet"),
        (("prices", "init", "--agent", "a", "--prometheus", "http://p"), "give one of them"),
    ],
)
def test_usage_error_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], reported: str
) -> None:
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu-cost-exporter: ")
    assert reported in line


def test_port_in_use_is_one_line_and_exit_code_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = run_fork("agent", "--simulate", "demo", "--listen", address)
    assert ended.returncode == 1
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("gpu-cost-exporter: ")]
    assert address in line
    assert "in use" in line
    assert "--listen" in line
    assert "Traceback" not in ended.stderr


def test_shipped_scenarios_are_listed_and_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "list"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    names = set(listed)
    assert "a shared node of 8 x H100" in listed["demo"]
    assert {"demo", "a100-mig", "t4-timeslicing", "chaos"} <= names
    for name in names:
        assert main(["simulate", "check", name]) == 0
        assert capsys.readouterr().out.startswith(f"{name}: ok: ")


def test_prices_check_shows_every_row_with_its_matches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "book.yaml"
    file.write_text(
        "currency: EUR\nrows:\n"
        "  - {model: NVIDIA H100*, per_gpu_hour: 2, from: 2026-07-01, source: contract, as_of: 2026-06-01}\n"
    )
    assert main(["prices", "check", str(file)]) == 0
    reported = capsys.readouterr().out
    assert "  book.yaml:1  2.0000 EUR/GPU-hour  from 2026-07-01  [1]  model NVIDIA" in reported
    assert "model NVIDIA H100* (NVIDIA H100 80GB HBM3, NVIDIA H100 NVL, NVIDIA H100 PCIe)" in reported
    assert "\n  [1]  contract; as of 2026-06-01\n" in reported
    assert reported.endswith(f"{file}: ok\n")


def test_invalid_price_book_exits_with_2_and_shows_its_valid_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "book.yaml"
    good = "  - {node: a, per_gpu_hour: 2, source: contract, as_of: 2026-06-01}\n"
    file.write_text(f"currency: EUR\nrows:\n{good}{good.replace('a, per_gpu_hour: 2', 'b, per_gpu_hour: -2')}{good}")
    assert main(["prices", "check", str(file)]) == 2
    reported = capsys.readouterr()
    assert reported.out.count("EUR/GPU-hour") == 2
    assert [line.removeprefix(f"gpu-cost-exporter: {file}:")[:30] for line in reported.err.splitlines()] == [
        "4: row 2: per_gpu_hour: '-2' i",
        "5: row 3: rows 1 and 3 overlap",
    ]


def test_bundled_list_prices_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prices", "list"]) == 0
    rows, sources = [], {}
    for line in capsys.readouterr().out.splitlines()[1:]:
        name, words = line.split(maxsplit=1)
        if name.startswith("["):
            sources[name] = words
        else:
            rows.append((line.index(" USD/GPU-hour"), re.findall(r"\[\d+\]", words)))
    assert len(rows) > 90
    assert len({place for place, _ in rows}) == 1, "each row has one aligned line"
    assert {number for _, numbers in rows for number in numbers} == sources.keys()
    assert all("; as of 2026-" in source for source in sources.values())


def test_prices_init_writes_a_price_book_for_the_gpus_of_an_agent(
    capsys: pytest.CaptureFixture[str], demo_agent: AgentProcess, tmp_path: Path
) -> None:
    file = tmp_path / "book.yaml"
    assert main(["prices", "init", "--agent", f"http://127.0.0.1:{demo_agent.port}", "--output", str(file)]) == 0
    assert "# 8 GPUs" in file.read_text()
    assert main(["prices", "check", str(file)]) == 0
    reported = capsys.readouterr()
    assert reported.err == ""
    assert "6.8800 USD/GPU-hour" in reported.out
    assert "instance_type p5.48xlarge" in reported.out


def test_prices_init_writes_a_price_book_for_the_gpu_kinds_of_a_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = {name: {"cluster": "a", "node": name} for name in ("listed", "spot", "bare")}
    found = {
        "gpu_node_info": [
            (nodes["listed"] | {"instance_type": "g6e.48xlarge", "region": "us-east-1"}, "1"),
            (nodes["spot"] | {"instance_type": "g6.xlarge", "capacity_type": "spot"}, "1"),
        ],
        "gpu_pool_gpus": [
            (nodes["listed"] | {"model": "NVIDIA L40S"}, "8"),
            (nodes["spot"] | {"model": "NVIDIA L4"}, "1"),
            (nodes["bare"] | {"model": "NVIDIA A30"}, "2"),
        ],
    }

    class Prometheus(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = self.rfile.read(int(self.headers["Content-Length"])).decode()
            (rows,) = [rows for name, rows in found.items() if name in query]
            result = [{"metric": labels, "value": [1.8e9, value]} for labels, value in rows]
            body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

    with answering(Prometheus) as address:
        assert main(["prices", "init", "--prometheus", f"http://{address}"]) == 0
    reported = capsys.readouterr().out
    (row,) = read_yaml(reported)["rows"]
    assert (row["instance_type"], row["region"], row["per_gpu_hour"]) == ("g6e.48xlarge", "us-east-1", 3.7663975)
    for model, count in (("NVIDIA A30", "2 GPUs"), ("NVIDIA L4", "1 GPU")):
        assert f"# {count} without a list price" in reported
        assert f'  # - model: "{model}"\n' in reported
    filled = re.sub(r"(?m)^  # (?=- model|  )", "  ", reported).replace("per_gpu_hour:\n", "per_gpu_hour: 1\n")
    assert len(price_book.parse(filled.replace("source:\n", "source: contract\n"), "b").rows) == 3
