"""Count the functions of NVML and libdcgm that a sample calls, on the simulated libraries; NVML's in virtual time."""

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

import dcgm_stub_support
import stub_support

WARM_UP_SAMPLES = 30
DCGM_INTERVAL_SECONDS, DCGM_WARM_UP_SAMPLES = 0.1, 10
INTERVAL_SECONDS = 1.0


def nvml(*, partitioned: bool, samples: int) -> dict[str, int]:
    """Return the calls of so many samples by function, of a process that reads 8 GPUs."""
    with tempfile.TemporaryDirectory(prefix="calls-") as name:
        directory = Path(name)
        library = stub_support.build(directory / "lib")
        stub_support.control(directory / "control", partitioned=partitioned)
        return _told("nvml", samples, stub_support.environment(library, directory / "control"))


def dcgm(*, partitioned: bool, samples: int) -> dict[str, int]:
    """Return the calls of so many samples by function, of a process that asks an engine for 8 GPUs."""
    with tempfile.TemporaryDirectory(prefix="calls-") as name:
        directory = Path(name)
        library = dcgm_stub_support.build(directory / "lib")
        control = directory / "control"
        dcgm_stub_support.control(control, partitioned=partitioned)
        with dcgm_stub_support.Engine(library, control) as engine:
            return _told(engine.address, samples, dcgm_stub_support.environment(library, control))


def _told(source: str, samples: int, environment: dict[str, str]) -> dict[str, int]:
    command = [sys.executable, __file__, source, str(samples)]
    told = subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE).stdout
    calls: dict[str, int] = json.loads(told)
    return calls


def _nvml(samples: int) -> Counter[str]:
    import pynvml  # noqa: PLC0415 - only the process that samples has the library

    from exporter.config import read_collectors  # noqa: PLC0415 - as above
    from exporter.gpu.nvml.source import NvmlSource  # noqa: PLC0415 - as above

    calls: Counter[str] = Counter()
    find = pynvml._nvmlGetFunctionPointer  # every call of the binding goes through it

    def counted(name: str) -> Callable[..., Any]:
        function = find(name)

        def call(*arguments: object) -> object:
            calls[name] += 1
            return function(*arguments)

        return call

    pynvml._nvmlGetFunctionPointer = counted
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
        time.sleep(DCGM_INTERVAL_SECONDS)  # the engine is another process, which samples by the real clock
    counts = Counter(calls)
    source.close()
    return counts


if __name__ == "__main__":
    told = _nvml(int(sys.argv[2])) if sys.argv[1] == "nvml" else _dcgm(sys.argv[1], int(sys.argv[2]))
    sys.stdout.write(json.dumps(told))
