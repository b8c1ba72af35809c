"""Runs a source in a child process: keeps the child running, kills it when it hangs, and never blocks."""

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from exporter.errors import SourceError
from exporter.gpu import wire
from exporter.model.devices import DeviceState, GpuReading, Reading, SourceState, SourceStatus
from exporter.model.fields import PROFILING, Field

_LINE_LIMIT_BYTES = 8 * 2**20
_KEPT_READINGS = 600
_GRACE_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS = 1.0
_LONGEST_BACKOFF_SECONDS = 30.0
_SETTLED_SECONDS = 30.0
_POLL_SECONDS = 0.2
_STUCK_LIMIT = 3
_LAST_CHANCE_SECONDS = 1.0
"""Additional time for a silent child, because a debugger or a pause of the machine may have stopped both processes."""
_READY_READINGS = 3
"""Readings after which a new child has measured all values: means need two samples, processes need three."""
_FIRST_RENEWAL_SECONDS = 1.0
_LONGEST_RENEWAL_SECONDS = 300.0
_WELL = frozenset({SourceState.STARTING, SourceState.UP, SourceState.RELEASED})
_LAST_WORDS_SECONDS = 0.5
_HUNG_WORDS = {
    "nvml": ("the driver", "see dmesg for NVRM and Xid lines"),
    "dcgm": (
        "the DCGM host engine",
        "if this lasts, restart nv-hostengine or correct --dcgm-address; a driver that hangs also blocks it",
    ),
}

_log = logging.getLogger("exporter.gpu.worker")


def child_command(interval_seconds: float, fields: Iterable[Field], dcgm_address: str = "") -> tuple[str, ...]:
    """Return the command line of a source's child.

    Args:
        interval_seconds: Time between samples.
        fields: Fields to read; for DCGM the result of ``merge.supplement`` or ``merge.alone``.
        dcgm_address: Address of the host engine: ``host:port``, ``unix:///path`` or ``embedded``; empty: NVML's child.
    """
    ids = ",".join(str(int(field)) for field in sorted(fields))
    command = (sys.executable, "-m", "exporter.gpu.child", "--interval", str(interval_seconds), "--fields", ids)
    return (*command, "--dcgm-address", dcgm_address) if dcgm_address else command


@dataclass(frozen=True, slots=True, kw_only=True)
class _Child:
    """One child process and its resources."""

    process: asyncio.subprocess.Process
    relay: asyncio.Task[None]
    """Task that relays its log."""
    note: int
    """Descriptor of the file in which it records the GPU of its current call."""
    left_out: frozenset[int]
    """Indexes of the GPUs that it does not read."""


@dataclass(kw_only=True)
class Worker:
    """One source in a child process.

    A GPU with hanging calls does not affect other GPUs: the child is killed, and the next child leaves that GPU out.
    Successors try it again at increasing intervals. A successor takes over when it has measured the GPU; until then,
    the current child works.
    """

    name: str
    """Name of the source, for its status."""
    command: Sequence[str]
    """Program and arguments of the child, which writes wire lines to its standard output."""
    interval_seconds: float
    """Time between the child's samples."""
    deadline_seconds: float = 10.0
    """Maximum silence of a child after its first reading, before it is killed; at least three intervals."""
    start_deadline_seconds: float = 60.0
    """Maximum silence while it opens the driver."""
    env: Mapping[str, str] | None = None
    """Environment of the child in addition to this process's own."""
    errors: Counter[str] = field(default_factory=Counter, init=False)
    """Counts since start by reason, without the errors in readings: ``hung``, ``died``, ``garbled``,
    ``unkillable``, ``dropped``, ``not_started``, and the reasons of the source's failures."""
    profiling_begun: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set by the first reading with profiling fields after one without; the waiting task clears it."""
    status: SourceStatus = field(init=False)
    """Current state of the source."""

    def __post_init__(self) -> None:
        """Begin without a child."""
        self.status = SourceStatus(name=self.name, state=SourceState.STARTING)
        self._readings: deque[Reading] = deque(maxlen=_KEPT_READINGS)
        self._child: _Child | None = None
        self._successor: _Child | None = None
        """Child that has measured all values and is used next."""
        self._prepared: _Child | None = None
        """Child that may become the successor."""
        self._renewal_asked = asyncio.Event()
        self._gpus: tuple[GpuReading, ...] = ()
        """GPUs of the newest reading."""
        self._hung: dict[int, GpuReading | None] = {}
        """GPUs that hang, by index, in the form for readings; ``None`` for a GPU without earlier readings."""
        self._patience: asyncio.Timeout | None = None
        """Limit of the current wait for a message."""
        self._patience_seconds = self.start_deadline_seconds
        self._profiles = False
        self._stuck: set[asyncio.Task[int]] = set()
        self._backoff_seconds = 0.0
        self._heard = False
        self._failure = ""
        self._leave_by: float | None = None
        """Time at which a child that was asked to end must have ended; its messages no longer count."""
        self._released_until = -math.inf
        self._release_asked = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Process id of the current child."""
        return None if self._child is None else self._child.process.pid

    def _is_released(self) -> bool:
        return self._released_until > _now()

    def _leaves(self) -> bool:
        return self._leave_by is not None

    @property
    def well_gpus(self) -> int | None:
        """Number of GPUs that are up in the newest reading, or that hang and are retried; ``None`` while not up."""
        if self.status.state is not SourceState.UP:
            return None
        hung = {gpu.uuid for gpu in self._hung.values() if gpu}
        return sum(gpu.state is DeviceState.UP or gpu.uuid in hung for gpu in self._gpus)

    def take(self) -> tuple[Reading, ...]:
        """Return the readings since the last call, oldest first."""
        return tuple(self._readings.popleft() for _ in range(len(self._readings)))

    def release(self, seconds: float) -> None:
        """Close the driver for a time, so that a GPU can be reset or the driver replaced; 0 opens it now."""
        self._released_until = _now() + seconds
        self._release_asked.set()
        if seconds <= 0:
            return
        if self._prepared is not None:
            _kill_group(self._prepared.process, signal.SIGKILL)
        self._send_away(signal.SIGTERM, _GRACE_SECONDS)

    def renew(self) -> None:
        """Open the driver again in a new child, which takes over if it recovers a GPU that is not up.

        The driver fixes its list of GPUs when a process opens it. The current child works in the meantime.
        """
        self._renewal_asked.set()

    def use(self, command: Sequence[str]) -> None:
        """Use another command; the current child ends, and the next child starts at once."""
        if tuple(self.command) != tuple(command):
            self.command = command
            self._backoff_seconds = 0.0
            self._send_away(signal.SIGTERM, _GRACE_SECONDS)

    async def run(self) -> None:
        """Run the source until cancelled; all its children have ended on return."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew_when_due())
                await self._stay_alive()
        finally:
            await self._drop_successor()

    async def _drop_successor(self) -> None:
        successor, self._successor = self._successor, None
        if successor is not None:
            await self._end(successor, at_once=True)

    async def _stay_alive(self) -> None:
        while True:
            await self._stay_released()
            started = _now()
            await self._live_once()
            if self._is_released():
                self._backoff_seconds = 0.0
            elif self._successor is None:
                self.status = replace(self.status, restarts=self.status.restarts + 1)
                await self._back_off(_now() - started)

    async def _renew_when_due(self) -> None:
        """Prepare a successor on request, and at increasing intervals while a GPU hangs."""
        pause_seconds = _FIRST_RENEWAL_SECONDS
        while True:
            await _wait_for(self._renewal_asked, pause_seconds if self._hung else None)
            # Children stuck in the kernel must leave room for the one that does the work.
            if self.status.state is SourceState.UP and len(self._stuck) < _STUCK_LIMIT - 1:
                await self._renew()
                pause_seconds = min(2 * pause_seconds, _LONGEST_RENEWAL_SECONDS)
            if not self._hung:
                pause_seconds = _FIRST_RENEWAL_SECONDS

    async def _renew(self) -> None:
        """Try successors without the GPUs at which earlier successors hung, while that may recover another GPU."""
        left_out: set[int] = set()
        while True:
            hung_at = await self._prepare(frozenset(left_out))
            if hung_at is None or hung_at in left_out:
                return
            left_out.add(hung_at)
            if left_out.issuperset(self._hung):
                return

    async def _prepare(self, left_out: frozenset[int]) -> int | None:
        """Start a successor and let it take over when it is ready; return the index of the GPU at which it hangs."""
        try:
            child = await self._start(left_out)
        except OSError:
            return None
        self._prepared, ready = child, False
        try:
            async with asyncio.timeout(self.start_deadline_seconds + _READY_READINGS * self.interval_seconds):
                ready = await self._is_ready(child)
        except TimeoutError:
            return wire.asked(child.note)
        finally:
            self._prepared = None
            if not ready:
                await self._end(child, at_once=True)
        if ready:
            self._successor = child
            self._send_away(signal.SIGKILL, 0.0)
        return None

    async def _is_ready(self, child: _Child) -> bool:
        """Return whether a child has measured all values, and has a GPU up that is not up in the current child.

        It cannot take over from an ended child, because the next child may be starting, and both would stay.
        """
        if self._is_released():
            return False
        readings = 0
        while message := await self._message(child):
            if isinstance(message, Reading):
                readings += 1
                if readings == _READY_READINGS:
                    return self._child is not None and not _up(message.gpus) <= _up(self._gpus)
            elif message.state is not SourceState.STARTING:
                return False
        return False

    def _send_away(self, number: signal.Signals, patience_seconds: float) -> None:
        """Ask the current child to end; ignore its messages from now on."""
        if self._child is not None:
            self._leave_by = _now() + patience_seconds
            _kill_group(self._child.process, number)
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(self._leave_by)

    async def _stay_released(self) -> None:
        if not self._is_released():
            return
        await self._drop_successor()
        self._set(
            SourceState.RELEASED,
            "released",
            "the driver is closed on request, for a GPU reset or a driver upgrade; it opens again by itself",
        )
        while self._is_released():
            await _wait_for(self._release_asked, self._released_until - _now())
        self._set(SourceState.STARTING)

    async def _back_off(self, lived_seconds: float) -> None:
        """Wait before the next child: not after a long life, increasingly long after consecutive failures."""
        if self._heard and lived_seconds >= _SETTLED_SECONDS:
            self._backoff_seconds = 0.0
        seconds = self._backoff_seconds
        self._backoff_seconds = min(max(2 * seconds, _FIRST_BACKOFF_SECONDS), _LONGEST_BACKOFF_SECONDS)
        await _wait_for(self._release_asked, seconds)
        while len(self._stuck) >= _STUCK_LIMIT:  # noqa: ASYNC110 - ends when any of several tasks does, rarely
            await asyncio.sleep(_POLL_SECONDS)

    async def _live_once(self) -> None:
        """Start a child, read its messages until it ends or hangs, and wait for its end."""
        self._heard, self._failure, self._leave_by = False, "", None
        self._patience_seconds = self.start_deadline_seconds
        child, self._successor = self._successor, None
        try:
            child = child or await self._start(frozenset(self._hung))
        except OSError as error:
            self.errors["not_started"] += 1
            message = f"the source's process could not be started: {error.strerror}: {self.command[0]}"
            self._set(SourceState.FAILED, "not_started", message)
            return
        silent = ended = False
        hung_at = None
        self._child = child
        self._hung = {index: gpu for index, gpu in self._hung.items() if index in child.left_out}
        try:
            if not self._is_released():
                await self._listen(child)
                ended = True
        except TimeoutError:
            silent, hung_at = True, wire.asked(child.note)
        finally:
            self._child = None
            code = await self._end(child, at_once=not ended)
        if not self._leaves() and not self._is_released():
            self._note_end(code, hung=silent, hung_at=hung_at)

    async def _start(self, left_out: frozenset[int]) -> _Child:
        """Start a child that leaves some GPUs out.

        Raises:
            OSError: The program does not exist, there is no memory, ...
        """
        without = ("--without", ",".join(map(str, sorted(left_out)))) if left_out else ()
        note = wire.open_note()
        try:
            process = await asyncio.create_subprocess_exec(
                *self.command,
                *without,
                stdin=note,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LINE_LIMIT_BYTES,
                env=self.env and {**os.environ, **self.env},
                start_new_session=True,
            )
        except OSError:
            os.close(note)
            raise
        return _Child(process=process, relay=asyncio.create_task(_relay_log(process)), note=note, left_out=left_out)

    async def _end(self, child: _Child, *, at_once: bool) -> int | None:
        """Wait for the end of a child and return its exit code; ``None`` if it cannot be killed."""
        try:
            code = await self._reap(child.process, at_once=at_once)
            # The last lines of the log have the cause of the end.
            await asyncio.wait({child.relay}, timeout=_LAST_WORDS_SECONDS)
        finally:
            child.relay.cancel()
            os.close(child.note)
        return code

    async def _listen(self, child: _Child) -> None:
        """Process the child's messages until it ends.

        Raises:
            TimeoutError: It was silent for too long.
        """
        seconds, last_chance = self.start_deadline_seconds, False
        while True:
            try:
                async with asyncio.timeout_at(self._leave_by or _now() + seconds) as self._patience:
                    message = await self._message(child)
            except TimeoutError:
                if last_chance or self._leaves():
                    raise
                # If this process was stopped, its timer fires before it reads the messages of the child.
                seconds, last_chance = _LAST_CHANCE_SECONDS, True
                continue
            finally:
                self._patience = None
            if message is None:
                return
            self._take_in(message)
            working = isinstance(message, Reading)
            seconds = max(self.deadline_seconds, 3 * self.interval_seconds) if working else self.start_deadline_seconds
            self._patience_seconds, last_chance = seconds, False

    async def _message(self, child: _Child) -> Reading | SourceStatus | None:
        """Return the next message of a child; ``None`` at its end."""
        while child.process.stdout is not None:
            try:
                line = await child.process.stdout.readline()
                return wire.decode(line) if line else None
            except (SourceError, ValueError) as error:
                # ValueError: raised by the stream for a line without an end.
                self.errors["garbled"] += 1
                _log.warning("garbled: %s", error)
        return None

    def _take_in(self, message: Reading | SourceStatus) -> None:
        if isinstance(message, Reading):
            self._heard, self._failure = True, ""
            if len(self._readings) == _KEPT_READINGS:
                self.errors["dropped"] += 1
            message = self._with_hung(message)
            self._readings.append(message)
            self._gpus = message.gpus
            self._note_profiling(message)
            if not self._leaves():
                self._set(SourceState.UP)
        elif message.state is not SourceState.STARTING and not self._leaves():
            # During a restart after a failure, the failure stays the state until the restart succeeds.
            if message.reason != self._failure:
                self.errors[message.reason] += 1
            self._failure = message.reason
            self._set(message.state, message.reason, message.message)

    def _note_profiling(self, reading: Reading) -> None:
        before = self._profiles
        measured = ((gpu.values, *(one.values for one in gpu.instances)) for gpu in reading.gpus)
        self._profiles = any(not PROFILING.isdisjoint(values) for of_gpu in measured for values in of_gpu)
        if self._profiles and not before:
            self.profiling_begun.set()

    def _with_hung(self, reading: Reading) -> Reading:
        """Return a reading with the hung GPUs, which its child did not read."""
        here = {gpu.uuid for gpu in reading.gpus}
        hung = [gpu for gpu in self._hung.values() if gpu and gpu.uuid not in here]
        if not hung:
            return reading
        return replace(reading, gpus=tuple(sorted((*reading.gpus, *hung), key=lambda gpu: gpu.gpu.index)))

    def _note_end(self, code: int | None, *, hung: bool, hung_at: int | None) -> None:
        if hung:
            self.errors["hung"] += 1
            source, fix = _HUNG_WORDS.get(self.name, _HUNG_WORDS["nvml"])
            if hung_at is None:
                self._hung.clear()  # the whole driver hangs, so no single GPU is the cause
            else:
                # The GPU is left out from now on; its holders keep it.
                last = next((gpu for gpu in self._gpus if gpu.gpu.index == hung_at), None)
                self._hung[hung_at] = last and last.without_values(DeviceState.FAILED, "hung")
                self._renewal_asked.set()
                source = f"{source}, asked about GPU {hung_at},"
            message = (
                f"{source} did not answer for {self._patience_seconds:g} seconds; its process was killed and another"
                f" one is started; {fix}"
            )
            self._set(SourceState.HUNG, "hung", message)
        elif not self._failure:
            # A child that ends after it has reported a failure does not count as died.
            self.errors["died"] += 1
            how = "cannot be killed" if code is None else _how_it_ended(code)
            self._set(SourceState.DIED, "died", f"the source's process {how}; another one is started")

    async def _reap(self, process: asyncio.subprocess.Process, *, at_once: bool) -> int | None:
        """Wait for the end of a child, and kill it if necessary; return ``None`` if it cannot be killed.

        After a cancellation, the child is killed at once, and this call is cancelled only after the child's end.
        """
        gone = asyncio.create_task(process.wait())
        try:
            if not at_once:
                await asyncio.wait({gone}, timeout=_GRACE_SECONDS)
        finally:
            if not gone.done():
                _kill_group(process, signal.SIGKILL)
                await _outlast_cancellation(gone, _GRACE_SECONDS)
        if gone.done():
            return gone.result()
        # The child is stuck in the kernel, where no signal reaches it: do not wait, its end is detected later.
        self.errors["unkillable"] += 1
        _log.warning("process %d cannot be killed: it is stuck in the driver", process.pid)
        self._stuck.add(gone)
        gone.add_done_callback(self._stuck.discard)
        return None

    def _set(self, state: SourceState, reason: str = "", message: str = "") -> None:
        if (state, reason) != (self.status.state, self.status.reason):
            level = logging.INFO if state in _WELL else logging.WARNING
            _log.log(level, "source %s is %s%s", self.name, state, f": {message}" if message else "")
        self.status = replace(self.status, state=state, reason=reason, message=message)
        self._profiles = self._profiles and state is SourceState.UP


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _wait_for(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for an event for a limited time, and clear it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()


def _up(gpus: Iterable[GpuReading]) -> frozenset[str]:
    return frozenset(gpu.uuid for gpu in gpus if gpu.state is DeviceState.UP)


def _kill_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    # The child leads its own process group, so none of its processes remain.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


async def _outlast_cancellation(task: asyncio.Task[int], seconds: float) -> None:
    """Wait for a task for a limited time; after a cancellation, continue to wait and raise it at the end."""
    until = _now() + seconds
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and (left := until - _now()) > 0:
        try:
            await asyncio.wait({task}, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended by itself with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


async def _relay_log(process: asyncio.subprocess.Process) -> None:
    """Relay the standard error of the child and its libraries to the log."""
    if process.stderr is None:
        return
    while True:
        try:
            line = await process.stderr.readline()
        except ValueError:
            continue
        if not line:
            return
        _log.info("child %d: %s", process.pid, line.decode("utf-8", "replace").rstrip())
