"""Readings of all GPUs through a DCGM host engine, near or far."""

import logging
import time
from collections import Counter
from collections.abc import Callable

from exporter.errors import SourceError
from exporter.model import DeviceState, Field, Gpu, GpuReading, Reading
from exporter.sources import dcgm_wanted, libdcgm
from exporter.sources.dcgm_engine import MISMATCH, NO_GPUS, NO_VALUES, Engine, advice_of, connect, no_gpus, no_values
from exporter.sources.dcgm_session import Session
from exporter.sources.dcgm_values import Inbox

NAME = "dcgm"
OTHER_LIBRARY = "dcgm_other_library"
"""Reason: the engine is of another major version, of which there is a library, too; it takes a fresh process."""
_SHORTEST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 10.0
_LONG_SECONDS = 2.0

_NOT_LOGGED = frozenset({"dcgm_clamped", "dcgm_unknown_field", "dcgm_binary_field", "dcgm_field_of_other_entity"})
"""Reasons that are only counted: noise of the counters, and fields that are left out, which are logged by number."""

_log = logging.getLogger("exporter.sources.dcgm")


class DcgmSource:
    """Asks one host engine; open, sample again and again, close; may be opened again.

    Args:
        fields: What to read, and nothing else; those that DCGM has none of are left absent.
        address: Of the engine: ``host:port``, ``unix:///path``, or ``embedded`` to have one in this process.
        interval_seconds: Between samples, as planned; the engine measures as often.
        monotonic: Clock that times the samples, in seconds.
        is_first_library: Whether another libdcgm, of another major version, was not tried before.
    """

    name = NAME

    def __init__(
        self,
        fields: frozenset[Field],
        *,
        address: str,
        interval_seconds: float = 1.0,
        monotonic: Callable[[], float] = time.monotonic,
        is_first_library: bool = True,
    ) -> None:
        self.announce: Callable[[], None] = lambda: None
        """Called now and then while the engine is slow and does answer, so that it is not taken for a hanging one."""
        self.other_library: str | None = None
        """The libdcgm that a fresh process has to load, where ``open`` found that the engine does not fit this one."""
        # A profiling field takes an interval to its first value; with these waits it is back within two.
        self.waits_seconds = (
            min(1.0, max(_SHORTEST_WAIT_SECONDS, interval_seconds / 4)),
            min(_LONGEST_WAIT_SECONDS, max(_SHORTEST_WAIT_SECONDS, interval_seconds / 3)),
        )
        self._fields = fields
        self._address = address
        self._interval_seconds = interval_seconds
        self._monotonic = monotonic
        self._is_first_library = is_first_library
        self._errors: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._inbox = Inbox(self._count)
        self._session: Session | None = None
        self._known: dict[str, Gpu] = {}
        self._left_out: frozenset[int] = frozenset()
        self._busy_since = 0.0

    def open(self) -> None:
        """Connect, find the devices and watch them.

        Raises:
            SourceError: there is no library, no engine, none that can be used, no GPU; the message tells the mend.
        """
        self._busy_since = self._monotonic()
        try:
            engine = connect(self._address, monotonic=self._monotonic, progress=self._progress)
        except SourceError as error:
            # Once for each engine that was met, not back and forth.
            if error.reason == MISMATCH and (self._known or self._is_first_library):
                self.other_library = libdcgm.beside(libdcgm.load())
            if self.other_library:
                raise SourceError(OTHER_LIBRARY, f"{error}; {self.other_library} is here, too, and is tried") from error
            raise
        try:
            self._session = self._begin(engine)
        except SourceError:
            engine.close()
            raise

    def _begin(self, engine: Engine) -> Session:
        wanted = dcgm_wanted.sort(self._fields, engine.library)
        self._tell_left_out(wanted, engine.version)
        session = Session(
            engine,
            wanted,
            self._interval_seconds,
            self._inbox,
            self._count,
        )
        session.look(self._monotonic())
        if session.layout.devices:
            return session
        if session.layout.listed:
            raise SourceError(NO_VALUES, no_values(self._address, session.layout.listed))
        raise SourceError(NO_GPUS, no_gpus(self._address))

    def close(self) -> None:
        """Leave the engine, with all that was watched there; GPUs that were seen stay known."""
        if self._session is not None:
            session, self._session = self._session, None
            session.engine.close()

    def sample(self, now: float) -> Reading:
        """Return one reading of every GPU that was ever seen.

        Args:
            now: Unix time at the start of the sample, in seconds.

        Raises:
            NoValuesError: the engine answers and gives no values of any GPU; sample again.
            SourceError: the engine is gone; close, and open again.
        """
        session = self._session
        if session is None:
            raise SourceError("dcgm_not_open", "the DCGM source was not opened: open it, then sample")
        started = self._busy_since = self._monotonic()
        readings = session.read(started)
        self._known.update({uuid: reading.gpu for uuid, reading in readings.items()})
        gpus = sorted(self._known.values(), key=lambda gpu: (gpu.index, gpu.uuid))
        xids = session.events(now)
        errors, self._errors = self._errors, Counter()
        ended = self._monotonic()
        return Reading(
            source=NAME,
            taken_at_seconds=now + (ended - started),
            duration_seconds=ended - started,
            steady_seconds=ended,
            driver_version=session.text(Field.DRIVER_VERSION),
            nvml_version=session.text(Field.NVML_VERSION),
            dcgm_version=session.engine.version,
            gpus=tuple(readings.get(gpu.uuid) or _missing(gpu) for gpu in gpus),
            xids=xids,
            errors=dict(errors),
        )

    def _progress(self) -> None:
        now = self._monotonic()
        if now - self._busy_since >= _LONG_SECONDS:
            self._busy_since = now
            self.announce()

    def _count(self, reason: str) -> None:
        self._errors[reason] += 1
        if reason not in self._logged | _NOT_LOGGED:
            self._logged.add(reason)
            _log.warning("DCGM at %s: %s: %s", self._address, reason, advice_of(reason))

    def _tell_left_out(self, wanted: dcgm_wanted.Wanted, version: str | None) -> None:
        """Say once which fields cannot be read, not at every connection."""
        new = wanted.left_out.keys() - self._left_out
        self._left_out |= new
        for field_id in sorted(new):
            self._count(wanted.left_out[field_id])
        if new:
            ids = ", ".join(str(one) for one in sorted(new))
            _log.warning("DCGM %s tells no number of a GPU by the fields %s: they are left out", version, ids)


def _missing(gpu: Gpu) -> GpuReading:
    return GpuReading(gpu=gpu, state=DeviceState.MISSING, reason="not_enumerated")
