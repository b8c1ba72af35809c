"""The parent's side of a source: keeps a child process alive, kills it when it hangs, and never blocks."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from exporter.errors import SourceError
from exporter.model import Field, Reading, SourceState, SourceStatus
from exporter.sources import wire

_LINE_LIMIT_BYTES = 8 * 2**20
_KEPT_READINGS = 600
_GRACE_SECONDS = 5.0
_FIRST_BACKOFF_SECONDS = 1.0
_LONGEST_BACKOFF_SECONDS = 30.0
_SETTLED_SECONDS = 30.0
_LOOK_SECONDS = 0.2
_STUCK_LIMIT = 3
_LAST_CHANCE_SECONDS = 1.0
"""A silent child is listened to for so long again: both may have been stopped, by a debugger or with their machine."""
_WELL = frozenset({SourceState.STARTING, SourceState.UP, SourceState.RELEASED})
_LAST_WORDS_SECONDS = 0.5
_HUNG_WORDS = {
    "nvml": ("the driver", "see dmesg for NVRM and Xid lines"),
    "dcgm": (
        "the DCGM host engine",
        "if that stays so, start nv-hostengine again, or correct --dcgm-address; a driver that hangs stops it, too",
    ),
}

_log = logging.getLogger("exporter.sources.worker")


def nvml_command(interval_seconds: float, fields: Iterable[Field]) -> tuple[str, ...]:
    """Return the command line of the child that owns NVML.

    Args:
        interval_seconds: Time between samples.
        fields: What to read beside what is always read.
    """
    ids = ",".join(str(int(field)) for field in sorted(fields))
    return (sys.executable, "-m", "exporter.sources.child", "--interval", str(interval_seconds), "--fields", ids)


def dcgm_command(interval_seconds: float, fields: Iterable[Field], address: str) -> tuple[str, ...]:
    """Return the command line of the child that asks a DCGM host engine.

    Args:
        interval_seconds: Time between samples.
        fields: What to read; ``dcgm_fields.supplement`` or ``dcgm_fields.alone`` gives them.
        address: ``host:port``, ``unix:///path`` or ``embedded``.
    """
    return (*nvml_command(interval_seconds, fields), "--dcgm-address", address)


class Worker:
    """One source in a child process.

    Args:
        name: Of the source; the status carries it.
        command: Program and arguments of the child, which writes wire lines to its standard output.
        interval_seconds: Time between the child's samples, told in messages.
        deadline_seconds: How long a child that has read once may be silent before it is killed.
        start_deadline_seconds: How long it may be silent while it opens the driver.
        env: Environment of the child in addition to this process's own.
        clock: Seconds now, of a clock that nobody sets; ``released_until`` is in it.
    """

    def __init__(
        self,
        *,
        name: str,
        command: Sequence[str],
        interval_seconds: float,
        deadline_seconds: float = 10.0,
        start_deadline_seconds: float = 60.0,
        env: Mapping[str, str] | None = None,
        clock: Callable[[], float],
    ) -> None:
        self._command = tuple(command)
        self._deadline_seconds = max(deadline_seconds, 3 * interval_seconds)
        self._start_deadline_seconds = start_deadline_seconds
        self._env = None if env is None else {**os.environ, **env}
        self._clock = clock
        self._readings: deque[Reading] = deque(maxlen=_KEPT_READINGS)
        self._errors: Counter[str] = Counter()
        self._process: asyncio.subprocess.Process | None = None
        self._patience: asyncio.Timeout | None = None
        self.news = asyncio.Event()
        """Set when a reading has come in; whoever waits for it clears it."""
        self._stuck: set[asyncio.Task[int]] = set()
        self._backoff_seconds = 0.0
        self._heard = False
        self._failure = ""
        self._told_to_go = False
        self._patience_seconds = start_deadline_seconds
        self._named: int | None = None
        self._released_until: float | None = None
        self._release_asked = asyncio.Event()
        self._status = SourceStatus(name=name, state=SourceState.STARTING)

    @property
    def status(self) -> SourceStatus:
        """How the source is doing now."""
        return self._status

    @property
    def errors(self) -> Mapping[str, int]:
        """Counts since start by reason; what readings count themselves is not in here.

        ``hung``, ``died``, ``garbled``, ``unkillable``, ``dropped``, ``not_started``, and the reasons for which
        the source said that it failed.
        """
        return dict(self._errors)

    @property
    def pid(self) -> int | None:
        """Process id of the child that is working now."""
        return None if self._process is None else self._process.pid

    @property
    def released_until(self) -> float | None:
        """Until when, by the clock, the driver is left alone; ``None`` when it is not."""
        until = self._released_until
        if until is None or until <= self._clock():
            return None
        return until

    def _is_released(self) -> bool:
        return self.released_until is not None

    @property
    def named_gpus(self) -> int | None:
        """GPUs of its newest reading, whatever their condition; ``None`` while it is not up."""
        return self._named if self._status.state is SourceState.UP else None

    def take(self) -> tuple[Reading, ...]:
        """Return the readings since the last call, oldest first."""
        return tuple(self._readings.popleft() for _ in range(len(self._readings)))

    def release(self, seconds: float) -> None:
        """Close the driver for a time, so that a GPU can be reset or the driver replaced; 0 ends that time now."""
        self._released_until = self._clock() + seconds
        if seconds <= 0:
            return
        self._release_asked.set()
        if self._process is not None:
            self._told_to_go = True
            self._signal(self._process, signal.SIGTERM)
        if self._patience is not None and not self._patience.expired():
            self._patience.reschedule(asyncio.get_running_loop().time() + _GRACE_SECONDS)

    def open_anew(self) -> None:
        """Have a child that is up close its source and open it again in its process; of another nothing is asked."""
        if self._process is not None and self._status.state is SourceState.UP and not self._told_to_go:
            self._signal(self._process, signal.SIGHUP)

    async def run(self) -> None:
        """Keep the source going until cancelled; the child is dead when this returns."""
        while True:
            await self._stay_released()
            started = asyncio.get_running_loop().time()
            await self._live_once()
            if self._is_released():
                self._backoff_seconds = 0.0
                continue
            self._status = replace(self._status, restarts=self._status.restarts + 1)
            await self._back_off(asyncio.get_running_loop().time() - started)

    async def _stay_released(self) -> None:
        if not self._is_released():
            return
        self._set(
            SourceState.RELEASED,
            "released",
            "the driver is closed on request, for a GPU reset or a driver upgrade; it opens again by itself",
        )
        while self._is_released():  # noqa: ASYNC110 - the clock is an argument, only looking tells
            await asyncio.sleep(_LOOK_SECONDS)
        self._set(SourceState.STARTING)

    async def _back_off(self, lived_seconds: float) -> None:
        """Wait before the next child: not at all after a long life, ever longer when they fail one after another."""
        if self._heard and lived_seconds >= _SETTLED_SECONDS:
            self._backoff_seconds = 0.0
        seconds = self._backoff_seconds
        self._backoff_seconds = min(max(2 * seconds, _FIRST_BACKOFF_SECONDS), _LONGEST_BACKOFF_SECONDS)
        self._release_asked.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._release_asked.wait()
        while len(self._stuck) >= _STUCK_LIMIT:  # noqa: ASYNC110 - ends when any of several tasks does, rarely
            await asyncio.sleep(_LOOK_SECONDS)

    async def _live_once(self) -> None:
        """Start a child, listen to it until it ends or hangs, and see that it is gone."""
        self._heard = self._told_to_go = False
        self._failure = ""
        self._patience_seconds = self._start_deadline_seconds
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=_LINE_LIMIT_BYTES,
                env=self._env,
                start_new_session=True,
            )
        except OSError as error:
            self._errors["not_started"] += 1
            message = f"the source's process could not be started: {error.strerror}: {self._command[0]}"
            self._set(SourceState.FAILED, "not_started", message)
            return
        relay = asyncio.create_task(_relay_log(self._process))
        silent = ended = False
        try:
            if not self._is_released():
                await self._listen(self._process)
                ended = True
        except TimeoutError:
            silent = True
        finally:
            process, self._process = self._process, None
            try:
                code = await self._bury(process, at_once=not ended)
                # Its last words say why it died.
                await asyncio.wait({relay}, timeout=_LAST_WORDS_SECONDS)
            finally:
                relay.cancel()
        if not self._told_to_go and not self._is_released():
            self._note_end(code, hung=silent)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Take in what the child says until it ends.

        Raises:
            TimeoutError: it was silent for too long.
        """
        seconds, last_chance = self._start_deadline_seconds, False
        while True:
            heard = False
            try:
                async with asyncio.timeout(seconds) as patience:
                    self._patience = patience
                    async for message in self._messages(process):
                        heard = True
                        self._take_in(message)
                        if not self._told_to_go:
                            working = isinstance(message, Reading)
                            self._patience_seconds = self._deadline_seconds if working else self._start_deadline_seconds
                            patience.reschedule(asyncio.get_running_loop().time() + self._patience_seconds)
            except TimeoutError:
                if self._told_to_go or (last_chance and not heard):
                    raise
                # An agent that stood still itself meets its timer before what the child has said meanwhile.
                seconds, last_chance = _LAST_CHANCE_SECONDS, True
            else:
                return
            finally:
                self._patience = None

    async def _messages(self, process: asyncio.subprocess.Process) -> AsyncIterator[Reading | SourceStatus]:
        if process.stdout is None:
            return
        while True:
            try:
                line = await process.stdout.readline()
                if not line:
                    return
                yield wire.decode(line)
            except (SourceError, ValueError) as error:
                # ValueError: the stream's, for a line without end.
                self._errors["garbled"] += 1
                _log.warning("garbled: %s", error)

    def _take_in(self, message: Reading | SourceStatus) -> None:
        if isinstance(message, Reading):
            self._heard, self._failure = True, ""
            if len(self._readings) == _KEPT_READINGS:
                self._errors["dropped"] += 1
            self._readings.append(message)
            self._named = len(message.gpus)
            self.news.set()
            if not self._told_to_go:
                self._set(SourceState.UP)
        elif message.state is not SourceState.STARTING and not self._told_to_go:
            # Starting again after a failure: until that has worked, the failure is what there is to tell.
            if message.reason != self._failure:
                self._errors[message.reason] += 1
            self._failure = message.reason
            self._set(message.state, message.reason, message.message)

    def _note_end(self, code: int | None, *, hung: bool) -> None:
        if hung:
            self._errors["hung"] += 1
            who, look = _HUNG_WORDS.get(self._status.name, _HUNG_WORDS["nvml"])
            message = (
                f"{who} did not answer for {self._patience_seconds:g} seconds; its process was killed and another one"
                f" is started; {look}"
            )
            self._set(SourceState.HUNG, "hung", message)
        elif not self._failure:
            # A child that said why it fails, and ended, has failed; it did not die.
            self._errors["died"] += 1
            how = "cannot be killed" if code is None else _how_it_ended(code)
            self._set(SourceState.DIED, "died", f"the source's process {how}; another one is started")

    async def _bury(self, process: asyncio.subprocess.Process, *, at_once: bool) -> int | None:
        """Wait until a child is gone, killing it when it does not go; ``None`` where it cannot be killed.

        Cancelled meanwhile, it kills the child at once and is cancelled only when the child is gone.
        """
        gone = asyncio.create_task(process.wait())
        try:
            if not at_once:
                await asyncio.wait({gone}, timeout=_GRACE_SECONDS)
        finally:
            if not gone.done():
                self._signal(process, signal.SIGKILL)
                await _outlast_cancellation(gone, _GRACE_SECONDS)
        if gone.done():
            return gone.result()
        # In the kernel, where no signal reaches it: leave it behind, its death is noticed whenever it comes.
        self._errors["unkillable"] += 1
        _log.warning("process %d cannot be killed: it is stuck in the driver", process.pid)
        self._stuck.add(gone)
        gone.add_done_callback(self._stuck.discard)
        return None

    def _signal(self, process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        # The child leads a group of its own, so that nothing it started stays behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    def _set(self, state: SourceState, reason: str = "", message: str = "") -> None:
        if (state, reason) != (self._status.state, self._status.reason):
            level = logging.INFO if state in _WELL else logging.WARNING
            _log.log(level, "source %s is %s%s", self._status.name, state, f": {message}" if message else "")
        self._status = replace(self._status, state=state, reason=reason, message=message)


async def _outlast_cancellation(task: asyncio.Task[int], seconds: float) -> None:
    """Wait for a task for a time; cancelled meanwhile, wait on and be cancelled at the end."""
    now = asyncio.get_running_loop().time
    until = now() + seconds
    cancelled: asyncio.CancelledError | None = None
    while not task.done() and (left := until - now()) > 0:
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
    """Pass on what the child, or a library in it, writes to standard error."""
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
