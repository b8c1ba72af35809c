"""The process that owns the driver: keeps its beat, reports faults, and ends on a signal or without its parent."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exporter.gpu import child, wire
from exporter.model.devices import Reading, SourceState, SourceStatus
from exporter.model.fields import Field

PRELUDE = """
import os, signal, sys, time
from exporter.errors import SourceError
from exporter.model.devices import Reading
from exporter.gpu import child
class Source:
    name = "nvml"
    announce = staticmethod(lambda: None)
    waits_seconds = (1.0, 10.0)
    fresh_process_reasons = {"library_mismatch"}
    fresh_arguments = ()
    def open(self): pass
    def sample(self, now): return Reading(source="nvml", taken_at_seconds=now, duration_seconds=0.0)
    def close(self): os.write(2, b"closed\\n")
"""
RUN = "\nsys.exit(child.run(Source(), child.prepare_process(), 0.02))"


@contextmanager
def started(body: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + body], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def messages(process: subprocess.Popen[bytes]) -> Iterator[Reading | SourceStatus]:
    assert process.stdout is not None
    for line in process.stdout:
        yield wire.decode(line)


def test_child_reports_starting_and_then_sends_one_reading_per_tick() -> None:
    with started(RUN) as process:
        lines = messages(process)
        assert next(lines) == SourceStatus(name="nvml", state=SourceState.STARTING)
        seen = [next(lines) for _ in range(10)]
        times = [one.taken_at_seconds for one in seen if isinstance(one, Reading)]
        assert len(times) == 10
        assert times == sorted(times)
        # The beat holds over the whole run, independent of single waits.
        assert times[-1] - times[0] >= 9 * 0.02 * 0.5


def test_sigterm_closes_the_driver_and_exits_with_zero() -> None:
    with started(RUN) as process:
        lines = messages(process)
        next(lines)
        next(lines)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
        assert process.returncode == 0
        assert b"closed" in errors


def test_library_output_does_not_corrupt_the_readings() -> None:
    body = """
class Loud(Source):
    def sample(self, now):
        print("a library speaks")
        os.write(1, b"so does C code\\n")
        return super().sample(now)
sys.exit(child.run(Loud(), child.prepare_process(), 0.02))
"""
    with started(body) as process:
        lines = messages(process)
        assert all(isinstance(next(lines), Reading | SourceStatus) for _ in range(5))
        process.terminate()
        _, errors = process.communicate(timeout=10)
        assert b"so does C code" in errors


def test_source_that_cannot_open_is_reported_until_it_opens() -> None:
    body = """
class Late(Source):
    tries = 0
    def open(self):
        self.tries += 1
        if self.tries < 2:
            raise SourceError("driver_not_loaded", "load it")
sys.exit(child.run(Late(), child.prepare_process(), 0.02))
"""
    with started(body) as process:
        lines = messages(process)
        states = []
        for one in lines:
            if isinstance(one, Reading):
                break
            states.append((one.state, one.reason, one.message))
        assert states[0] == (SourceState.STARTING, "", "")
        assert states[1] == (SourceState.FAILED, "driver_not_loaded", "load it")
        assert states[-1] == (SourceState.STARTING, "", "")


def test_driver_lost_while_sampling_is_reopened() -> None:
    body = """
class Shaky(Source):
    samples = 0
    def sample(self, now):
        self.samples += 1
        if self.samples == 3:
            raise SourceError("driver_not_loaded", "load it")
        return super().sample(now)
sys.exit(child.run(Shaky(), child.prepare_process(), 0.02))
"""
    with started(body) as process:
        kinds = []
        for one in messages(process):
            kinds.append("reading" if isinstance(one, Reading) else str(one.state))
            if kinds.count("reading") == 4:
                break
        assert kinds[:4] == ["starting", "reading", "reading", "failed"]
        assert kinds[-3:] == ["starting", "reading", "reading"]


def test_library_mismatch_requires_a_new_process() -> None:
    body = """
class Stale(Source):
    def open(self): raise SourceError("library_mismatch", "finish the upgrade")
sys.exit(child.run(Stale(), child.prepare_process(), 0.02))
"""
    with started(body) as process:
        last = list(messages(process))[-1]
        assert process.wait(timeout=10) == child.EXIT_FRESH_PROCESS_NEEDED
        assert isinstance(last, SourceStatus)
        assert last.reason == "library_mismatch"


def test_child_exits_when_its_output_is_closed() -> None:
    with started(RUN) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=10) == 0


def test_child_ends_with_its_parent_even_while_a_driver_call_hangs(tmp_path: Path) -> None:
    hanging = """
class Hanging(Source):
    def sample(self, now):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
"""
    reported = tmp_path / "pid"
    grandchild = PRELUDE + hanging + "\nchild.run(Hanging(), child.prepare_process(), 0.02)"
    parent = f"""
import subprocess, sys
one = subprocess.Popen([sys.executable, "-c", {grandchild!r}], stdout=subprocess.PIPE, start_new_session=True)
one.stdout.readline()
open({str(reported)!r}, "w").write(str(one.pid))
"""
    subprocess.run([sys.executable, "-c", parent], check=True, timeout=20)
    pid = int(reported.read_text())
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < end, "the orphan does not end"
        time.sleep(0.02)


def test_slow_sample_skips_ticks_without_catching_up() -> None:
    body = """
class Slow(Source):
    samples = 0
    def sample(self, now):
        self.samples += 1
        if self.samples == 2:
            time.sleep(0.3)
        return super().sample(now)
sys.exit(child.run(Slow(), child.prepare_process(), 0.1))
"""
    with started(body) as process:
        times = []
        for one in messages(process):
            if isinstance(one, Reading):
                times.append(one.taken_at_seconds)
            if len(times) == 4:
                break
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        assert gaps[1] > 0.25
        assert gaps[2] > 0.05


def test_child_without_a_driver_reports_it_and_loads_only_the_sources() -> None:
    body = """
import json, threading
def tell():
    names = sorted(name for name in sys.modules if name.partition(".")[0] in ("exporter", "grpc", "aiohttp", "asyncio",
                   "prometheus_client", "yaml", "kubernetes", "rich"))
    os.write(2, json.dumps(names).encode() + b"\\n")
    os._exit(0)
threading.Timer(0.7, tell).start()
sys.exit(child.main(["--interval", "0.1", "--fields", "100,1001"]))
"""
    environment = {**os.environ, "LD_LIBRARY_PATH": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", "import os, sys\nfrom exporter.gpu import child\n" + body],
        capture_output=True,
        check=True,
        timeout=20,
        env=environment,
    )
    names = json.loads(done.stderr.splitlines()[-1])
    own = [name for name in names if name.startswith("exporter.") and not name.startswith("exporter.model")]
    assert own == sorted(own)
    assert {name.split(".")[1] for name in own} == {"errors", "gpu"}
    assert all(name.partition(".")[0] == "exporter" for name in names)
    statuses = [wire.decode(line) for line in done.stdout.splitlines()]
    assert statuses


def test_fields_argument_is_a_list_of_known_ids() -> None:
    assert child.parse_fields("100, 1001,") == {Field.SM_CLOCK, Field.PROF_GR_ENGINE_ACTIVE}
    assert child.parse_fields("") == frozenset()
    with pytest.raises(ValueError, match="99999"):
        child.parse_fields("100,99999")
