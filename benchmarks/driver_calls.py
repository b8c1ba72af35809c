"""Which functions of NVML and libdcgm a sample calls, and how often: counted at the door to the library.

The sources run on the simulated libraries of tests/stub and tests/dcgm_stub; NVML's in virtual time. What a real driver
takes for each call depends on it, so fewer calls are all that can be done about it.

    python benchmarks/driver_calls.py
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import dcgm_stub_support  # noqa: E402 - lies beside the tests, which the line above makes importable
import stub_support  # noqa: E402 - as above

WARM_UP_SAMPLES, SAMPLES = 30, 600
DCGM_INTERVAL_SECONDS, DCGM_WARM_UP_SAMPLES, DCGM_SAMPLES = 0.1, 10, 100
INTERVAL_SECONDS = 1.0


def main() -> int:
    """Print a table per source and node."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sample:
        source, samples = arguments.sample[0], int(arguments.sample[1])
        print(json.dumps(_nvml(samples) if source == "nvml" else _dcgm(source, samples)))
        return 0
    if stub_support.compiler() is None:
        print("driver_calls: skipped: the simulated libraries need a C compiler (install gcc)")
        return 0
    for partitioned in (False, True):
        node = "56 MIG instances on 8 GPUs" if partitioned else "8 whole GPUs, 2 processes on each"
        print(_table(f"NVML, {node}", nvml(partitioned=partitioned), SAMPLES))
        print(_table(f"DCGM beside NVML, {node}", dcgm(partitioned=partitioned), DCGM_SAMPLES), flush=True)
    return 0


def nvml(*, partitioned: bool, samples: int = SAMPLES) -> dict[str, int]:
    """Return the calls of so many samples by function, of a process that reads 8 GPUs."""
    with tempfile.TemporaryDirectory(prefix="calls-") as name:
        directory = Path(name)
        library = stub_support.build(directory / "lib")
        stub_support.control(directory / "control", partitioned=partitioned)
        return _told("nvml", samples, stub_support.environment(library, directory / "control"))


def dcgm(*, partitioned: bool, samples: int = DCGM_SAMPLES) -> dict[str, int]:
    """Return the calls of so many samples by function, of a process that asks an engine for 8 GPUs."""
    with tempfile.TemporaryDirectory(prefix="calls-") as name:
        directory = Path(name)
        library = dcgm_stub_support.build(directory / "lib")
        control = directory / "control"
        dcgm_stub_support.control(control, partitioned=partitioned)
        with dcgm_stub_support.Engine(library, control) as engine:
            return _told(engine.address, samples, dcgm_stub_support.environment(library, control))


def _told(source: str, samples: int, environment: dict[str, str]) -> dict[str, int]:
    command = [sys.executable, __file__, "--sample", source, str(samples)]
    told = subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE).stdout
    calls: dict[str, int] = json.loads(told)
    return calls


def _nvml(samples: int) -> Counter[str]:
    import pynvml  # noqa: PLC0415 - only the process that samples has the library

    from exporter.config import read_collectors  # noqa: PLC0415 - as above
    from exporter.gpu.nvml.source import NvmlSource  # noqa: PLC0415 - as above

    calls: Counter[str] = Counter()
    find = pynvml._nvmlGetFunctionPointer  # noqa: SLF001 - every call of the binding goes through it

    def counted(name: str) -> Callable[..., Any]:
        function = find(name)

        def call(*arguments: object) -> object:
            calls[name] += 1
            return function(*arguments)

        return call

    pynvml._nvmlGetFunctionPointer = counted  # noqa: SLF001 - as above
    source = NvmlSource(read_collectors(None).fields, interval_seconds=INTERVAL_SECONDS)
    source.open()
    start = time.time()
    for number in range(WARM_UP_SAMPLES + samples):
        if number == WARM_UP_SAMPLES:
            calls.clear()
        source.sample(start + number * INTERVAL_SECONDS)
    counts = Counter(calls)
    source.close()
    return counts


def _dcgm(address: str, samples: int) -> Counter[str]:
    from exporter.config import read_collectors  # noqa: PLC0415 - as in _nvml
    from exporter.gpu.dcgm.library import Library  # noqa: PLC0415 - as above
    from exporter.gpu.dcgm.session import DcgmSource  # noqa: PLC0415 - as above
    from exporter.gpu.merge import supplement  # noqa: PLC0415 - as above

    calls: Counter[str] = Counter()
    ask = Library.call

    def counted(library: Library, name: str, *arguments: object) -> int:
        calls[name] += 1
        return ask(library, name, *arguments)

    Library.call = counted  # type: ignore[method-assign] # every call goes through it
    fields = supplement(read_collectors(None).fields)
    source = DcgmSource(fields, address=address, interval_seconds=DCGM_INTERVAL_SECONDS)
    source.announce = lambda: None
    source.open()
    for number in range(DCGM_WARM_UP_SAMPLES + samples):
        if number == DCGM_WARM_UP_SAMPLES:
            calls.clear()
        source.sample(time.time())
        time.sleep(DCGM_INTERVAL_SECONDS)
    counts = Counter(calls)
    source.close()
    return counts


def _table(title: str, calls: dict[str, int], samples: int) -> str:
    rows = [f"| `{name}` | {count / samples:.2f} |" for name, count in sorted(calls.items(), key=lambda one: -one[1])]
    total = f"| all | {sum(calls.values()) / samples:.1f} |"
    return "\n".join([f"### {title}\n", "| function | calls per sample |", "|---|---:|", *rows, total, ""])


if __name__ == "__main__":
    sys.exit(main())
