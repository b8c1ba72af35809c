"""Runs the child process that owns the driver: samples at the interval and writes one line per reading."""

import argparse
import ctypes
import gc
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO, Protocol

from exporter.errors import NoValuesError, SourceError
from exporter.gpu import wire
from exporter.model.devices import Reading, SourceState, SourceStatus
from exporter.model.fields import Field

EXIT_FRESH_PROCESS_NEEDED = 3
_HEARTBEAT_SECONDS = 1.0
_END_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that end the process. They are blocked, so that they end a pause but never interrupt a driver call."""
_PR_SET_PDEATHSIG = 1

_log = logging.getLogger("exporter.gpu.child")


class ReadingSource(Protocol):
    """A source that can run in a child process."""

    name: str
    announce: Callable[[], None]
    """Function that the source calls before a slow step of a sample; set by ``run``."""
    waits_seconds: tuple[float, float]
    """First and longest wait between two attempts to open the source; it doubles with each failure."""

    @property
    def fresh_process_reasons(self) -> frozenset[str]:
        """Reasons that need a new process, because a library that was replaced on disk stays mapped in this process."""

    @property
    def fresh_arguments(self) -> tuple[str, ...]:
        """Arguments with which this process replaces itself, with the same parent.

        Empty if the parent must start the new process.
        """

    def open(self) -> None:
        """Prepare for sampling; raises SourceError."""

    def sample(self, now: float) -> Reading:
        """Return one reading.

        Raises:
            NoValuesError: There are no values now; sample again.
            SourceError: The source must be opened again.
        """

    def close(self) -> None:
        """Release the driver; may be called when the source is not open."""


def _pause(seconds: float) -> bool:
    """Wait, and return whether this process has received a signal to end, also before the wait."""
    return signal.sigtimedwait(_END_SIGNALS, max(0.0, seconds)) is not None


def main(argv: list[str] | None = None) -> int:
    """Run one source in this process, NVML or DCGM; see ``--help`` for the arguments. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m exporter.gpu.child", description=__doc__)
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between samples")
    parser.add_argument("--fields", default="", metavar="IDS", help="comma-separated field ids to read")
    parser.add_argument(
        "--dcgm-address",
        default="",
        metavar="ADDRESS",
        help="ask DCGM's host engine there instead of NVML: HOST:PORT, unix:///path, embedded",
    )
    parser.add_argument("--without", default="", metavar="INDEXES", help="GPUs that NVML must not read: they hang")
    parser.add_argument("--dcgm-library", default="", metavar="SONAME", help="load this libdcgm, if it exists")
    arguments = parser.parse_args(argv)
    out = prepare_process()
    source = _source(arguments)
    code = run(source, out, arguments.interval)
    if code == EXIT_FRESH_PROCESS_NEEDED and source.fresh_arguments:
        os.dup2(out.fileno(), 1)
        command = (sys.executable, "-m", "exporter.gpu.child", *(argv or sys.argv[1:]), *source.fresh_arguments)
        os.execv(sys.executable, command)  # noqa: S606 - no shell is wanted
    return code


def _source(arguments: argparse.Namespace) -> ReadingSource:
    # Only the selected binding is loaded, and late, so that it cannot write to the stream of readings.
    fields = parse_fields(arguments.fields)
    if arguments.dcgm_address:
        from exporter.gpu.dcgm.session import DcgmSource  # noqa: PLC0415 - see above

        return DcgmSource(
            fields,
            address=arguments.dcgm_address,
            interval_seconds=arguments.interval,
            library=arguments.dcgm_library,
        )
    from exporter.gpu.nvml.source import NvmlSource  # noqa: PLC0415 - see above

    return NvmlSource(
        fields,
        interval_seconds=arguments.interval,
        left_out=frozenset(int(index) for index in arguments.without.split(",") if index),
        note_asked=wire.note_asked,
        clock=time.monotonic,
    )


def parse_fields(text: str) -> frozenset[Field]:
    """Return the fields of a comma-separated list of ids.

    Raises:
        ValueError: An item is not the id of a field.
    """
    return frozenset(Field(int(part)) for part in text.split(",") if part.strip())


def prepare_process() -> BinaryIO:
    """Prepare this process as a child, and return the stream for its readings.

    The process ends with its parent in any state. Output of libraries is redirected to standard error, so that it
    cannot garble the readings.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        _log.warning("cannot use PR_SET_PDEATHSIG; will exit when the pipe closes")
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    return out


def run(source: ReadingSource, out: BinaryIO, interval_seconds: float) -> int:
    """Open the source, write a line per sample, and open it again after failures, until SIGTERM.

    Args:
        source: The source to sample.
        out: Stream for the lines; the result of ``prepare_process``.
        interval_seconds: Time between the starts of two samples; after a slower sample, some are skipped.

    Returns:
        The exit code: 0 after SIGTERM or when the pipe is closed, ``EXIT_FRESH_PROCESS_NEEDED`` when only a
        new process can open the source.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    say = partial(_say, out, source.name)
    source.announce = partial(say, SourceState.STARTING)
    first_seconds, longest_seconds = source.waits_seconds
    backoff_seconds = first_seconds
    try:
        while True:
            try:
                say(SourceState.STARTING)
                source.open()
                gc.collect()
                gc.freeze()
                for reading in _samples(source, interval_seconds, say):
                    _write(out, wire.encode(reading))
                    backoff_seconds = first_seconds
            except SourceError as error:
                source.close()
                report = partial(say, SourceState.FAILED, error.reason, str(error))
                is_final = error.reason in source.fresh_process_reasons
                if is_final and source.fresh_arguments:  # not a failure yet
                    _log.info("%s: trying again in a new process: %s", error.reason, " ".join(source.fresh_arguments))
                    return EXIT_FRESH_PROCESS_NEEDED
                report()
                if is_final:
                    return EXIT_FRESH_PROCESS_NEEDED
                if _is_asked_to_end(backoff_seconds, report):
                    return 0
                backoff_seconds = min(2 * backoff_seconds, longest_seconds)
            else:
                return 0
    except BrokenPipeError:
        _log.info("parent closed the pipe; exiting")
        return 0
    finally:
        source.close()


def _samples(source: ReadingSource, interval_seconds: float, say: Callable[..., None]) -> Iterator[Reading]:
    """Yield one reading per interval until a signal; intervals that a slow sample missed are skipped.

    If the source has no values, the reason is reported instead, and the source stays open.
    """
    due, asked = time.monotonic(), False
    while not asked:
        try:
            reading = source.sample(time.time())
        except NoValuesError as error:
            say(SourceState.FAILED, error.reason, str(error))
        else:
            yield reading
        late = time.monotonic() - due
        due += interval_seconds * max(1, math.ceil(late / interval_seconds))
        asked = _pause(due - time.monotonic())


def _is_asked_to_end(seconds: float, heartbeat: Callable[[], None]) -> bool:
    """Wait with a heartbeat, because the parent considers a silent child hung; return whether to end."""
    until, asked = time.monotonic() + seconds, False
    while not asked and (left := until - time.monotonic()) > 0:
        asked = _pause(min(left, _HEARTBEAT_SECONDS))
        heartbeat()
    return asked


def _say(out: BinaryIO, name: str, state: SourceState, reason: str = "", message: str = "") -> None:
    _write(out, wire.encode(SourceStatus(name=name, state=state, reason=reason, message=message)))


def _write(out: BinaryIO, line: bytes) -> None:
    """Write a whole line; a pipe accepts long lines in pieces."""
    rest = memoryview(line)
    while rest:
        rest = rest[out.write(rest) :]


if __name__ == "__main__":
    sys.exit(main())
