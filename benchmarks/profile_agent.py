"""Where the agent's CPU time goes: the hottest lines of our own code in parent and children, by py-spy.

    python benchmarks/profile_agent.py [--partitioned] [--seconds 40]

Samples are taken five times a second instead of once, so that there is something to see; the mix stays the same but for
the kubelet and the API, which are asked as rarely as ever. py-spy is installed into ``.cache/profile-venv``.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import bench
import footprint
import measure
import stub_support
from report import Setting

PY_SPY = "py-spy==0.4.1"
VENV = Path(__file__).resolve().parents[1] / ".cache" / "profile-venv"
INTERVAL = "200ms"
RATE, HOTTEST = 500, 10


def main() -> int:
    """Print a table per process; 0 as well where py-spy cannot be had, with a line that says so."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitioned", action="store_true", help="56 MIG instances instead of 8 whole GPUs")
    parser.add_argument("--seconds", type=int, default=40, help="length of the profile (default 40)")
    arguments = parser.parse_args()
    if stub_support.compiler() is None:
        print("profile_agent: skipped: the simulated driver needs a C compiler (install gcc)")
        return 0
    if not _installed():
        print(f"profile_agent: skipped: {PY_SPY} cannot be installed")
        return 0
    title = "56 MIG instances" if arguments.partitioned else "8 whole GPUs"
    setting = Setting(
        title=title, partitioned=arguments.partitioned, metadata=True, dcgm=True, scrape_p99_seconds=bench.WHOLE
    )
    with tempfile.TemporaryDirectory(prefix="profile-") as name, bench.running_node(setting, Path(name)) as node:
        command = [INTERVAL if word == "1s" else word for word in node.agent.command]
        log = Path(name) / "agent.log"
        with measure.started(replace(node.agent, command=command), log) as process:
            time.sleep(measure.WARM_UP_SECONDS)
            _profile(footprint.family(process.pid), arguments.seconds, Path(name), title)
    return 0


def _installed() -> bool:
    if not (VENV / "bin" / "py-spy").exists():
        made = subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False).returncode == 0
        pip = [str(VENV / "bin" / "pip"), "install", "--quiet", PY_SPY]
        return made and subprocess.run(pip, check=False).returncode == 0
    return True


def _profile(pids: tuple[int, ...], seconds: int, directory: Path, title: str) -> None:
    before = footprint.cpu(pids)
    running = []
    for pid in pids:
        command = [str(VENV / "bin" / "py-spy"), "record", "--gil", "--nonblocking", "--pid", str(pid)]
        command += [
            "--format",
            "raw",
            "--rate",
            str(RATE),
            "--duration",
            str(seconds),
            "--output",
            str(directory / f"{pid}.raw"),
        ]
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    for one in running:
        one.wait()
    spent = footprint.cpu(pids) - before
    print(f"{title}: {spent / seconds * 100:.2f} % of a core at a sample every {INTERVAL}\n")
    for place, pid in enumerate(pids):
        stacks = (directory / f"{pid}.raw").read_text(encoding="utf-8").splitlines()
        print(_table(measure.name_of(place, pid), stacks), flush=True)


def _table(name: str, stacks: list[str]) -> str:
    """Lines of our code in which most samples were, what they called of others included."""
    lines: Counter[str] = Counter()
    for stack in stacks:
        frames, _, count = stack.rpartition(" ")
        ours = [frame for frame in frames.split(";") if "exporter/" in frame]
        lines[ours[-1] if ours else "outside of our code: " + frames.split(";")[-1]] += int(count)
    total = lines.total()
    rows = [f"| {100 * count / total:.1f} | `{line}` |" for line, count in lines.most_common(HOTTEST)]
    return "\n".join([f"### {name}: {total} samples\n", "| % | line |", "|---:|---|", *rows, ""])


if __name__ == "__main__":
    sys.exit(main())
