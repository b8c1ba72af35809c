"""Does a sample of the DCGM source copy the 4 KiB that each of DCGM's values takes? Counts its allocations.

The source runs on a simulated libdcgm and engine (tests/dcgm_stub) in a process whose allocator counts: Python asks
the C allocator for everything above 512 bytes, so a copy of a record, however short-lived, is seen as a piece of 4 KiB
or more.

    python benchmarks/dcgm_copies.py
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT))

import dcgm_stub_support as stub  # noqa: E402 - lies beside the tests, which the lines above make importable

from exporter.model import Field  # noqa: E402 - as above

RECORD_BYTES = 4120
INTERVAL_SECONDS = 0.2
WARM_UP_SAMPLES, SAMPLES = 40, 25


def main() -> int:
    """Print a line per setting; 1 when a sample copied a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", metavar="ADDRESS", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sample:
        print(json.dumps(sample(arguments.sample)))
        return 0
    if stub.compiler() is None:
        print("dcgm_copies: skipped: the simulated libdcgm needs a C compiler (install gcc)")
        return 0
    return max(_setting(partitioned=partitioned) for partitioned in (False, True))


def _setting(*, partitioned: bool) -> int:
    with tempfile.TemporaryDirectory(prefix="copies-") as name:
        directory = Path(name)
        stub.build(directory)
        stub.control(directory / "control", partitioned=partitioned)
        counter = stub.build_counter(directory)
        environment = {**os.environ, **stub.environment(directory, directory / "control"), "LD_PRELOAD": str(counter)}
        with stub.Engine(directory, directory / "control") as engine:
            command = [sys.executable, __file__, "--sample", engine.address]
            told = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    records = told["records"]
    title = "56 MIG instances" if partitioned else "8 whole GPUs"
    laid_out = records * RECORD_BYTES / 2**20
    print(
        f"{title}: {records:.0f} values a sample, {laid_out:.1f} MiB as DCGM lays them out; a sample of"
        f" {told['devices']} devices makes {told['large']:.1f} allocations of 4 KiB or more, together"
        f" {told['large_bytes'] / 1024:.0f} KiB, and {told['small_bytes'] / 1024:.0f} KiB of smaller ones above 512"
        f" bytes; it holds {told['peak_bytes'] / 1024:.0f} KiB more at its height, and"
        f" takes {told['cpu_seconds'] * 1e3:.2f} ms of CPU",
        flush=True,
    )
    return int(told["large"] >= records / 10)


def sample(address: str) -> dict[str, float]:
    """Sample in this process and return what one sample took, on average.

    Args:
        address: of the engine.
    """
    from exporter.gpu.dcgm.session import DcgmSource  # noqa: PLC0415 - only the counting process needs it

    block = stub.opened(Path(os.environ["DCGM_STUB_CONTROL"]))
    counts, tell = (ctypes.c_uint64 * 4)(), ctypes.CDLL(None).allocations
    tell(counts)
    before = counts[2]
    bytes(bytearray(RECORD_BYTES))
    tell(counts)
    if counts[2] - before < 2:  # noqa: PLR2004 - the two that the line above makes
        raise RuntimeError("the allocator does not count: LD_PRELOAD was not taken")
    source = DcgmSource(_default_fields(), address=address, interval_seconds=INTERVAL_SECONDS)
    source.announce = lambda: None
    source.open()
    for _ in range(WARM_UP_SAMPLES):
        reading = source.sample(time.time())
        time.sleep(INTERVAL_SECONDS / 4)
    sums = dict.fromkeys(("large", "large_bytes", "small_bytes", "peak_bytes", "cpu_seconds", "records"), 0.0)
    for _ in range(SAMPLES):
        time.sleep(INTERVAL_SECONDS)
        tell(counts)
        before, started, records = list(counts), time.process_time(), block.records
        source.sample(time.time())
        tell(counts)
        sums["cpu_seconds"] += time.process_time() - started
        large, large_bytes = counts[2] - before[2], counts[3] - before[3]
        sums["large"] += large
        sums["large_bytes"] += large_bytes
        sums["small_bytes"] += counts[1] - before[1] - large_bytes
        sums["records"] += block.records - records
    told = {name: value / SAMPLES for name, value in sums.items()}
    tracemalloc.start()
    source.sample(time.time())
    time.sleep(INTERVAL_SECONDS)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    source.sample(time.time())
    told["peak_bytes"] = tracemalloc.get_traced_memory()[1] - held
    source.close()
    told["devices"] = sum(max(1, len(gpu.instances)) for gpu in reading.gpus)
    return told


def _default_fields() -> frozenset[Field]:
    """What the agent asks of DCGM alone when no collectors file says otherwise."""
    from exporter.config import read_collectors  # noqa: PLC0415 - as above
    from exporter.gpu.merge import alone  # noqa: PLC0415 - as above

    return alone(read_collectors(None).fields)


if __name__ == "__main__":
    sys.exit(main())
