"""How long `report` takes over fleets of 100 to 10,000 GPUs and 30 days, with how much memory, and how right it is."""

import argparse
import http.client
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import fleet_support  # noqa: E402 - lies beside the tests, which the line above makes importable
import scale_support  # noqa: E402 - as above
from fleet_support import FleetServer  # noqa: E402 - as above

from gpu_simulator.fleet import (  # noqa: E402 - as above
    FleetTruth,
    Writing,
    write_fleet,
)
from gpu_simulator.fleet_plan import FleetPlan  # noqa: E402 - as above

MIB = 1024 * 1024
CHUNK_BYTES = 4 * MIB
HEADER = (
    "| GPUs | engine | by | lines | wall, s | CPU: report, engine, s | wall with 5 % faults, s | MiB: report, engine"
    " | error: sums, a line |\n|---:|---|---|---:|---:|---|---|---|---|"
)


def main() -> None:
    """Print a table; exit 1 where a budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[13, 125, 1000, 1250], help="sizes of the fleets")
    parser.add_argument("--engines", nargs="+", default=["prometheus", "victoria"])
    parser.add_argument("--budget-seconds", type=float, default=5.0)
    parser.add_argument("--fault-timeout", default="20s", help="--prometheus-timeout where some questions hang")
    parser.add_argument("--directory", type=Path, help="where to work; needs 10 GB for 1,000 nodes")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} cores, Python {platform.python_version()}, load average {os.getloadavg()[0]:.1f}\n")
    print(HEADER)
    kept = True
    for nodes in arguments.nodes:
        with tempfile.TemporaryDirectory(prefix="report-scale-", dir=arguments.directory) as name:
            kept &= measure(Path(name), nodes, arguments)
    sys.exit(0 if kept else 1)


def measure(directory: Path, nodes: int, arguments: argparse.Namespace) -> bool:
    """Measure one size on every engine; whether all budgets are kept."""
    plan = FleetPlan(nodes=nodes, end_seconds=fleet_support.END_SECONDS, clusters=("alpha", "beta"))
    text = directory / "fleet.om"
    begin = time.monotonic()
    with text.open("w", encoding="utf-8") as output:
        writing = Writing(form="openmetrics", devices=False, processes=os.cpu_count() or 1)
        truth = write_fleet(plan, output, writing)
    tell(f"{nodes} nodes: {text.stat().st_size / 1e9:.2f} GB of text in {time.monotonic() - begin:.0f} s")
    kept = True
    for engine in arguments.engines:
        begin = time.monotonic()
        if engine == "prometheus":
            blocks = directory / "blocks"
            fleet_support.backfill(text, blocks, block_hours=768)
            with fleet_support.prometheus(directory, blocks, plan) as server:
                tell(f"Prometheus has it after {time.monotonic() - begin:.0f} s")
                kept &= reports(directory, server, truth, "Prometheus 2.42", arguments)
        else:
            with fleet_support.victoria(directory, None, plan) as server:
                victoria_import(server.url, text)
                tell(f"VictoriaMetrics has it after {time.monotonic() - begin:.0f} s")
                kept &= reports(directory, server, truth, "VictoriaMetrics 1.112", arguments)
    return kept


def tell(what: str) -> None:
    """Say on standard error how far it is."""
    print(what, file=sys.stderr, flush=True)


def victoria_import(url: str, text: Path) -> None:
    """Import OpenMetrics text, its seconds as milliseconds on the way."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=3600)
    connection.request("POST", "/api/v1/import/prometheus", body=milliseconds(text), encode_chunked=True)
    answer = connection.getresponse()
    answer.read()
    if answer.status >= http.client.BAD_REQUEST:
        raise RuntimeError(f"{url}: import: {answer.status}")
    for path in ("/internal/force_flush", "/internal/resetRollupResultCache"):
        connection.request("GET", path)
        connection.getresponse().read()
    connection.close()


def milliseconds(text: Path) -> Iterator[bytes]:
    """The text in pieces, comments left out."""
    piece = bytearray()
    with text.open("rb") as lines:
        for line in lines:
            if line.startswith(b"#"):
                continue
            piece += line[:-1] + b"000\n"
            if len(piece) > CHUNK_BYTES:
                yield bytes(piece)
                piece.clear()
    yield bytes(piece)


def reports(
    directory: Path, server: FleetServer, truth: FleetTruth, engine: str, arguments: argparse.Namespace
) -> bool:
    """Make every report, and print a line of each."""
    plan = server.plan
    period = scale_support.window(plan.start_seconds, plan.end_seconds)
    output = directory / "report.json"
    kept = True
    for by in scale_support.FIELDS:
        forget_peak(server.process.pid)
        before = cpu_seconds(server.process.pid)
        plain = scale_support.report(server.url, period, by, output)
        engine_cpu = cpu_seconds(server.process.pid) - before
        engine_bytes = peak_bytes(server.process.pid)
        with scale_support.flaky(server.url) as proxy:
            faulty = scale_support.report(
                proxy.url, period, by, output, "--prometheus-timeout", arguments.fault_timeout
            )
        true = scale_support.true_numbers(truth, by)
        worst = [scale_support.errors(scale_support.reported(run.report, by), true) for run in (plain, faulty)]
        # A report that is not whole says so, with exit code 3: its error is another matter.
        told = "" if faulty.exit_code == 0 else f", exit {faulty.exit_code}"
        print(
            f"| {plan.nodes * plan.gpus_per_node:,} | {engine} | {by} | {len(plain.report['lines']):,} |"
            f" {plain.wall_seconds:.1f} | {plain.cpu_seconds:.1f}, {engine_cpu:.1f} |"
            f" {faulty.wall_seconds:.1f} ({sum(proxy.failed[1:])} of {proxy.failed[0]}{told}) |"
            f" {plain.peak_bytes / MIB:.0f}, {engine_bytes / MIB:.0f} | {worst[0].total:.0e}, {worst[0].line:.0e} |",
            flush=True,
        )
        kept &= plain.wall_seconds <= arguments.budget_seconds
        kept &= max(one.total for one in worst) < 0.001  # noqa: PLR2004 - the budget: 0.1 %
        kept &= plain.exit_code == faulty.exit_code == 0
    return kept


def forget_peak(pid: int) -> None:
    """Let the kernel measure a process' peak again."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, its own and the kernel's for it."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    """Resident memory of a process at its largest since then."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
