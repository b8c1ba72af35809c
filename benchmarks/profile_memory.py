"""What the memory of parent and children is made of: pages by kind, files, and what each package's modules take.

    python benchmarks/profile_memory.py [--partitioned]

Pages are counted as if the agent were alone on its machine (``page_map``). What modules take is what Python's own
allocators hold after their import, without what they import in turn; the rest of the private pages are data of
libraries, what allocators keep free, and the agent's state.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import bench
import footprint
import measure
import page_map
import stub_support
from report import KIB, MIB, Setting

LARGEST = 12
_HERE = {**os.environ, "PYTHONPATH": str(bench.ROOT)}
HOLD_SECONDS = 20.0
PROCESSES = {
    "parent": ("exporter.cli", "exporter.agent.run", "exporter.kube.metadata"),
    "child": ("exporter.gpu.child", "exporter.gpu.nvml.source"),
    "child for DCGM": ("exporter.gpu.child", "exporter.gpu.dcgm.session"),
}


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--partitioned", action="store_true", help="56 MIG instances instead of 8 whole GPUs")
    arguments = parser.parse_args()
    if stub_support.compiler() is None:
        print("profile_memory: skipped: the simulated driver needs a C compiler (install gcc)")
        return 0
    title = "56 MIG instances" if arguments.partitioned else "8 whole GPUs"
    setting = Setting(
        title=title, partitioned=arguments.partitioned, metadata=True, dcgm=True, scrape_p99_seconds=bench.WHOLE
    )
    with (
        tempfile.TemporaryDirectory(prefix="memory-") as name,
        bench.running_node(setting, Path(name)) as node,
        measure.started(node.agent, Path(name) / "agent.log") as process,
    ):
        time.sleep(HOLD_SECONDS)
        pids = footprint.family(process.pid)
        held = page_map.alone(pids)
        names = [measure.name_of(place, pid) for place, pid in enumerate(pids)]
    print(f"{title}, metadata and DCGM, MiB\n")
    print(_kinds(names, held))
    print(_largest("files, MiB", held[0].files, MIB))
    for process_name, modules in PROCESSES.items():
        command = [sys.executable, str(bench.ROOT / "benchmarks" / "module_sizes.py"), *modules]
        told = subprocess.run(command, env=_HERE, check=True, stdout=subprocess.PIPE).stdout
        print(_largest(f"modules of the {process_name} by package, KiB", Counter(json.loads(told)), KIB), flush=True)
    return 0


def _kinds(names: list[str], held: tuple[page_map.Held, ...]) -> str:
    kinds = ("heap", "anonymous", "data", "stack")
    head = ["| process | all | files | C heap | Python's arenas and other memory | data of libraries | stack |"]
    rows = [
        f"| {name} | {one.size_bytes / MIB:.1f} | {one.files.total() / MIB:.1f} | "
        + " | ".join(f"{one.private[kind] / MIB:.1f}" for kind in kinds)
        + " |"
        for name, one in zip(names, held, strict=True)
    ]
    total = f"| all | {sum(one.size_bytes for one in held) / MIB:.1f} |  |  |  |  |  |"
    return "\n".join([*head, "|---|---:|---:|---:|---:|---:|---:|", *rows, total, ""])


def _largest(title: str, sizes: Counter[str], unit: int) -> str:
    rows = [f"| {Path(name).name} | {size / unit:.1f} |" for name, size in sizes.most_common(LARGEST)]
    return "\n".join([f"| {title} | |", "|---|---:|", *rows, f"| all | {sizes.total() / unit:.1f} |", ""])


if __name__ == "__main__":
    sys.exit(main())
