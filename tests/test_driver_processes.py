from typing import TYPE_CHECKING

import pynvml
import pytest
from driver_support import gpu, process, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_simulator.driver_session import ProcessSamples

if TYPE_CHECKING:
    from gpu_simulator.truth import ProcessTruth


def _good(samples: list[object], last_us: int) -> dict[int, object]:
    return {s.pid: s for s in samples if s.pid and 0 <= s.smUtil <= 100 and s.timeStamp > last_us}


@pytest.mark.parametrize("call", [pynvml.nvmlDeviceGetProcessUtilization, pynvml.nvmlDeviceGetProcessesUtilizationInfo])
def test_samples_since_the_last_poll_divide_the_device_among_its_processes(call: object) -> None:
    processes = (process(11, sm=0.6, mem_ratio=0.3), process(12, sm=0.2, enc_ratio=0.5))
    with simulated(gpu(0, processes=processes)) as node:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        last_us = max(one.timeStamp for one in _good(call(handle, 0), 0).values())
        for second in range(1, 6):
            node.change(at=100.0 + second)
            pynvml.nvmlDeviceGetCount()
        samples = call(handle, last_us)
        assert len(samples) == 100
        assert any(one.smUtil > 100 for one in samples)
        good = _good(samples, last_us)
        assert good[11].smUtil == pytest.approx(60, abs=3)
        assert good[12].smUtil == pytest.approx(20, abs=3)
        assert good[11].memUtil == pytest.approx(30, abs=3)
        assert good[12].encUtil == pytest.approx(50, abs=3)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=5), st.integers(5, 50))
def test_over_minutes_every_process_gets_its_part_of_the_samples(parts: list[float], interval_tenths: int) -> None:
    processes: list[ProcessTruth] = [process(pid, sm=part) for pid, part in enumerate(parts, start=1)]
    total = sum(parts)
    scale = min(total, 1.0) / total if total else 0.0
    ring, seen, busy_seconds = ProcessSamples(), 0.0, dict.fromkeys(range(1, len(parts) + 1), 0.0)
    ring.observe(0.0, processes)
    for poll in range(1, 201):
        ring.observe(poll * interval_tenths / 10, processes)
        uses = ring.since(seen)
        newest = max((use.newest_seconds for use in uses), default=seen)
        for use in uses:
            busy_seconds[use.pid] += use.percents[0] / 100 * (newest - seen)
        seen = newest
    if seen:
        for pid, part in enumerate(parts, start=1):
            assert busy_seconds[pid] / seen == pytest.approx(part * scale, abs=0.03)
