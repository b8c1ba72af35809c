"""The parent of a source's process: it never blocks, and every failure has a state and a count."""

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from agent_support import until

from exporter.gpu import child, worker
from exporter.gpu.worker import Worker, child_command
from exporter.model.devices import SourceState
from exporter.model.fields import Field

PREAMBLE = """
import os, signal, sys, time
from exporter.model.devices import Reading, SourceState, SourceStatus
from exporter.gpu import wire
def say(line):
    os.write(1, line)
def read(at=1.0):
    say(wire.encode(Reading(source="nvml", taken_at_seconds=at, duration_seconds=0.0)))
def fail(reason):
    say(wire.encode(SourceStatus(name="nvml", state=SourceState.FAILED, reason=reason, message="broken: fix it")))
"""
STEADY = """
while True:
    read()
    time.sleep(0.02)
"""


def script(body: str) -> tuple[str, ...]:
    return (sys.executable, "-c", PREAMBLE + textwrap.dedent(body))


@asynccontextmanager
async def working(
    command: tuple[str, ...],
    *,
    deadline_seconds: float = 5.0,
    start_deadline_seconds: float = 10.0,
    env: dict[str, str] | None = None,
) -> AsyncIterator[Worker]:
    one = Worker(
        name="nvml",
        command=command,
        interval_seconds=0.02,
        deadline_seconds=deadline_seconds,
        start_deadline_seconds=start_deadline_seconds,
        env=env,
    )
    task = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


async def test_readings_are_returned_once_and_in_order() -> None:
    body = """
    for at in range(1, 6):
        read(float(at))
    time.sleep(60)
    """
    async with working(script(body), deadline_seconds=30) as one:
        seen: list[float] = []

        def five() -> bool:
            seen.extend(reading.taken_at_seconds for reading in one.take())
            return len(seen) >= 5

        await until(five)
        assert seen == [1.0, 2.0, 3.0, 4.0, 5.0]
        assert one.take() == ()
        assert one.status.state is SourceState.UP
        assert one.errors == {}


async def test_profiling_start_is_an_event_also_after_a_stop_or_a_failure(tmp_path: Path) -> None:
    lines = (
        ("measure(Field.PROF_GR_ENGINE_ACTIVE)", True),
        ("measure(Field.PROF_GR_ENGINE_ACTIVE)", False),
        ("measure(Field.GPU_UTIL)", False),
        ("measure(Field.PROF_SM_ACTIVE)", True),
        ("fail('dcgm_connection_lost')", False),
        ("measure(Field.PROF_SM_ACTIVE)", True),
    )
    body = f"""
    from exporter.model.devices import Gpu, GpuReading
    from exporter.model.fields import Field
    gpu = Gpu(uuid="GPU-0", index=0, minor=0, model="A100", pci_bus_id="")
    def measure(field):
        row = GpuReading(gpu=gpu, values={{field: 0.5}})
        say(wire.encode(Reading(source="dcgm", taken_at_seconds=1.0, duration_seconds=0.0, gpus=(row,))))
    for number, line in enumerate({[line for line, _ in lines]!r}):
        while not os.path.exists(os.path.join({str(tmp_path)!r}, str(number))):
            time.sleep(0.01)
        exec(line)
    time.sleep(60)
    """
    async with working(script(body), deadline_seconds=30) as one:
        for number, (line, begun) in enumerate(lines):
            (tmp_path / str(number)).touch()
            failed = line.startswith("fail")
            await until(lambda failed=failed: one.status.state is SourceState.FAILED if failed else one.take())
            assert one.profiling_begun.is_set() is begun, line
            one.profiling_begun.clear()


async def test_a_silent_child_is_killed_counted_and_replaced(tmp_path: Path) -> None:
    marker = tmp_path / "hung-once"
    body = f"""
    read()
    if not os.path.exists({str(marker)!r}):
        open({str(marker)!r}, "w").close()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    {textwrap.indent(STEADY, "    ").strip()}
    """
    async with working(script(body), deadline_seconds=0.3) as one:
        await until(lambda: one.pid is not None)
        first = one.pid
        assert first is not None
        await until(lambda: one.status.state is SourceState.HUNG)
        assert "0.3 seconds" in one.status.message
        await until(lambda: one.status.state is SourceState.UP)
        assert one.errors == {"hung": 1}
        assert one.status.restarts == 1
        assert not alive(first)


async def test_child_is_not_killed_for_a_pause_of_the_agent() -> None:
    """A machine, a container or a debugger can stop the agent; readings of that time are not lost."""
    async with working(script(STEADY), deadline_seconds=0.3) as one:
        await until(lambda: one.status.state is SourceState.UP)
        child_before = one.pid
        one.take()
        time.sleep(0.6)  # noqa: ASYNC251 - the loop stands still
        await until(lambda: len(one.take()) > 10)
        assert (one.pid, one.errors, one.status.restarts) == (child_before, {}, 0)


async def test_hanging_start_is_terminated() -> None:
    async with working(script("time.sleep(600)"), start_deadline_seconds=0.3) as one:
        await until(lambda: one.errors.get("hung"))
        assert one.status.state is SourceState.HUNG


async def test_killed_child_is_replaced() -> None:
    async with working(script(STEADY)) as one:
        await until(lambda: one.status.state is SourceState.UP)
        assert one.pid is not None
        os.kill(one.pid, 9)
        await until(lambda: one.status.state is SourceState.DIED)
        assert "SIGKILL" in one.status.message
        await until(lambda: one.status.state is SourceState.UP)
        assert one.errors == {"died": 1}


async def test_ended_child_reports_its_exit_code() -> None:
    async with working(script("read(); sys.exit(7)")) as one:
        await until(lambda: one.status.state is SourceState.DIED)
        assert "exit code 7" in one.status.message


async def test_invalid_lines_are_counted_and_skipped() -> None:
    body = """
    say(b"hello\\n")
    say(b"x" * 100_000 + b"\\n")
    say(b"\\xff\\xfe\\n")
    """ + textwrap.indent(STEADY, "    ")
    async with working(script(body)) as one:
        await until(one.take)
        assert one.errors == {"garbled": 3}
        assert one.status.state is SourceState.UP


async def test_endless_line_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_LINE_LIMIT_BYTES", 10_000)
    body = """
    say(b"x" * 1_000_000 + b"\\n")
    """ + textwrap.indent(STEADY, "    ")
    async with working(script(body)) as one:
        await until(one.take)
        assert one.errors["garbled"] >= 1


async def test_failure_is_reported_with_the_message_of_the_child_and_counted_once() -> None:
    body = """
    for _ in range(5):
        fail("driver_not_loaded")
        time.sleep(0.02)
    """ + textwrap.indent(STEADY, "    ")
    async with working(script(body)) as one:
        await until(lambda: one.status.state is SourceState.FAILED)
        assert (one.status.reason, one.status.message) == ("driver_not_loaded", "broken: fix it")
        await until(lambda: one.status.state is SourceState.UP)
        assert one.errors == {"driver_not_loaded": 1}
        assert one.status.message == ""


async def test_child_that_fails_and_ends_is_failed_not_died() -> None:
    async with working(script(f'fail("library_mismatch"); sys.exit({child.EXIT_FRESH_PROCESS_NEEDED})')) as one:
        await until(lambda: one.status.restarts >= 2)
        assert one.status.state is SourceState.FAILED
        assert one.status.reason == "library_mismatch"
        assert "died" not in one.errors


async def test_missing_program_is_a_failure_with_its_name() -> None:
    async with working(("/nowhere/python",)) as one:
        await until(lambda: one.status.state is SourceState.FAILED)
        assert one.status.reason == "not_started"
        assert "/nowhere/python" in one.status.message


async def test_release_ends_the_child_and_starts_none_until_its_end() -> None:
    async with working(script(STEADY)) as one:
        await until(lambda: one.status.state is SourceState.UP)
        first = one.pid
        assert first is not None
        one.release(2)
        began = time.monotonic()
        await until(lambda: one.status.state is SourceState.RELEASED)
        assert not alive(first)
        assert one.pid is None
        await until(lambda: one.status.state is not SourceState.RELEASED)
        assert time.monotonic() - began >= 2
        await until(lambda: one.status.state is SourceState.UP)
        assert one.errors == {}
        assert one.status.restarts == 0


async def test_a_release_can_be_ended_early() -> None:
    async with working(script(STEADY)) as one:
        await until(lambda: one.status.state is SourceState.UP)
        one.release(3600)
        await until(lambda: one.status.state is SourceState.RELEASED)
        one.release(0)
        await until(lambda: one.status.state is SourceState.UP)


async def test_release_kills_a_child_that_ignores_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_GRACE_SECONDS", 0.3)
    async with working(script("signal.signal(signal.SIGTERM, signal.SIG_IGN)" + STEADY)) as one:
        await until(lambda: one.status.state is SourceState.UP)
        first = one.pid
        assert first is not None
        one.release(3600)
        await until(lambda: one.status.state is SourceState.RELEASED)
        assert not alive(first)


async def test_release_during_the_backoff_is_kept() -> None:
    async with working(script("sys.exit(1)")) as one:
        await until(lambda: one.status.restarts >= 2)
        one.release(3600)
        await until(lambda: one.status.state is SourceState.RELEASED)


def brings_a_gpu_back(started: Path) -> str:
    """Return a child with a GPU that the first child lacks; each child notes its pid when it reads."""
    return f"""
    from exporter.model.devices import DeviceState, Gpu, GpuReading
    gpu = Gpu(uuid="GPU-1", index=0, minor=0, model="H100", pci_bus_id="00000000:17:00.0")
    gpus = (GpuReading(gpu=gpu, state=DeviceState.UP),) if os.listdir({str(started)!r}) else ()
    open(os.path.join({str(started)!r}, str(os.getpid())), "w").close()
    while True:
        say(wire.encode(Reading(source="nvml", taken_at_seconds=1.0, duration_seconds=0.0, gpus=gpus)))
        time.sleep(0.02)
    """


def still_alive(started: Path) -> list[int]:
    return [int(path.name) for path in started.iterdir() if alive(int(path.name))]


async def test_no_prepared_child_opens_the_driver_during_a_release(tmp_path: Path) -> None:
    async with working(script(brings_a_gpu_back(tmp_path))) as one:
        await until(lambda: one.status.state is SourceState.UP)
        one.release(3600)
        one.renew()
        await until(lambda: one.status.state is SourceState.RELEASED)
        await asyncio.sleep(1.0)
        assert still_alive(tmp_path) == []


async def test_prepared_child_ends_if_the_working_one_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create, starts = asyncio.create_subprocess_exec, iter(range(9))

    async def create_slowly(*command: str, **options: Any) -> asyncio.subprocess.Process:  # noqa: ANN401 - passed on
        if next(starts) == 2:  # the child after the killed one, while the prepared one becomes ready
            await until(lambda: len(list(tmp_path.iterdir())) == 2)
            await asyncio.sleep(0.5)
        return await create(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_slowly)
    async with working(script(brings_a_gpu_back(tmp_path))) as one:
        await until(lambda: one.status.state is SourceState.UP)
        first = one.pid
        assert first is not None
        one.renew()
        await asyncio.sleep(0)  # lets the prepared child start first
        os.kill(first, signal.SIGKILL)
        await until(lambda: one.pid not in {None, first} and one.status.state is SourceState.UP)
        assert still_alive(tmp_path) == [one.pid]


async def test_cancelled_worker_leaves_no_child() -> None:
    async with working(script("signal.signal(signal.SIGTERM, signal.SIG_IGN)" + STEADY)) as one:
        await until(lambda: one.status.state is SourceState.UP)
        pid = one.pid
        assert pid is not None
    assert not alive(pid)
    assert one.pid is None


@pytest.mark.parametrize("ending", ["signal.pause()", "os.close(1); signal.pause()"])
async def test_repeatedly_cancelled_worker_reaps_its_child(ending: str) -> None:
    # After its output closes, a child has some time to end: the worker must kill it also if cancelled in that time.
    body = f"signal.signal(signal.SIGTERM, signal.SIG_IGN); read(os.getpid()); {ending}"
    one = Worker(name="nvml", command=script(body), interval_seconds=0.02, deadline_seconds=30)
    task = asyncio.create_task(one.run())
    await until(lambda: one.status.state is SourceState.UP)
    pid = int(one.take()[0].taken_at_seconds)
    await until(lambda: (one.pid is None) == ("close" in ending))
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_failing_children_are_restarted_with_backoff(tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    async with working(("/bin/sh", "-c", f"cut -d ' ' -f 1 /proc/uptime >> '{starts}'; exit 1")) as one:
        await until(lambda: one.status.restarts >= 4)
    times = [float(line) for line in starts.read_text().splitlines()]
    _, second, third = (later - earlier for earlier, later in pairwise(times[:4]))
    assert second > 0.9
    assert third > 1.9


async def test_the_environment_is_extended_and_not_replaced() -> None:
    body = """
    if os.environ.get("EXTRA") == "yes" and os.environ.get("PATH"):
        read()
    time.sleep(60)
    """
    async with working(script(body), deadline_seconds=30, env={"EXTRA": "yes"}) as one:
        await until(lambda: one.status.state is SourceState.UP)


async def test_child_output_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="exporter.gpu.worker")
    async with working(script('os.write(2, b"NVRM said something\\n")' + STEADY)) as one:
        await until(lambda: "NVRM said something" in caplog.text)
        assert one.errors == {}


async def test_crash_message_of_a_child_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="exporter.gpu.worker")
    async with working(script('raise RuntimeError("the end")')) as one:
        await until(lambda: one.status.state is SourceState.DIED)
        assert "RuntimeError: the end" in caplog.text


def test_child_command_has_interval_and_fields() -> None:
    command = child_command(0.5, {Field.MEM_CLOCK, Field.SM_CLOCK})
    assert command == (sys.executable, "-m", "exporter.gpu.child", "--interval", "0.5", "--fields", "100,101")


async def test_unkillable_child_is_abandoned_and_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Without any grace period, every killed child seems to resist the signal.
    monkeypatch.setattr(worker, "_GRACE_SECONDS", 0.0)
    async with working(script("read(); time.sleep(600)"), deadline_seconds=0.2) as one:
        await until(lambda: one.errors.get("unkillable") and one.status.restarts)
        await until(lambda: one.pid is not None and one.status.state is SourceState.UP)
        assert one.errors["hung"] >= 1
        monkeypatch.undo()
        await until(lambda: not one._stuck)
