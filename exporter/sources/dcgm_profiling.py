"""Whether profiling can be had of each GPU, and if not, why: asked GPU by GPU, for a node may have several models."""

import math
from collections.abc import Callable, Iterable, Mapping

from exporter.model import ProfilingState
from exporter.sources import _libdcgm
from exporter.sources.dcgm_engine import Engine, reason_of

_RETRY_SECONDS = 60.0
_LOOK_SECONDS = 4.9
_STATES: Mapping[int, ProfilingState] = {
    _libdcgm.MODULE_NOT_LOADED: ProfilingState.NO_MODULE,
    _libdcgm.PROFILING_NOT_SUPPORTED: ProfilingState.UNSUPPORTED,
    _libdcgm.NOT_SUPPORTED: ProfilingState.UNSUPPORTED,
    _libdcgm.GPU_NOT_SUPPORTED: ProfilingState.UNSUPPORTED,
    _libdcgm.NO_PERMISSION: ProfilingState.NO_PERMISSION,
    _libdcgm.REQUIRES_ROOT: ProfilingState.NO_PERMISSION,
    _libdcgm.PAUSED: ProfilingState.PAUSED,
}


def state_of(code: int) -> ProfilingState:
    """Return why there is no profiling where it was refused with a code."""
    return _STATES.get(code, ProfilingState.REFUSED)


class Profiling:
    """What the engine can profile, over one connection.

    Args:
        engine: To ask.
        wanted: Profiling fields that are asked for.
        count: Called with the reason of everything that goes wrong.
    """

    def __init__(self, engine: Engine, wanted: Iterable[int], count: Callable[[str], None]) -> None:
        self._engine = engine
        self._wanted = frozenset(wanted)
        self._count = count
        self._can: dict[int, tuple[int, frozenset[int]]] = {}
        self._asked_at: dict[int, float] = {}
        self._paused = False
        self._looked_at = -math.inf

    def follow(self, gpu_ids: Iterable[int], now: float) -> None:
        """Ask what can be had of GPUs that are new, and again of those that had nothing.

        Args:
            gpu_ids: By the engine's number.
            now: Seconds of the monotonic clock.

        Raises:
            SourceError: the engine is gone.
        """
        if not self._wanted:
            return
        present = set(gpu_ids)
        for gone in self._can.keys() - present:
            del self._can[gone]
        for gpu_id in sorted(present):
            code, _ = self._can.get(gpu_id, (None, None))
            if code == _libdcgm.OK or (code is not None and now - self._asked_at[gpu_id] < _RETRY_SECONDS):
                continue
            before = code
            self._can[gpu_id] = self._engine.profiling_fields(gpu_id)
            self._asked_at[gpu_id] = now
            code = self._can[gpu_id][0]
            if code not in (_libdcgm.OK, before):
                self._count(reason_of(code))

    def fields_of(self, gpu_id: int) -> frozenset[int]:
        """Return the wanted profiling fields that can be had of a GPU."""
        return self._wanted & self._can.get(gpu_id, (0, frozenset()))[1]

    def state(self, gpu_id: int, refusal: int | None) -> ProfilingState | None:
        """Return how profiling of a GPU is; ``None`` where nobody asked for it.

        Args:
            gpu_id: The engine's number.
            refusal: Code with which the engine would not watch any of its fields; ``None`` where it does.
        """
        if gpu_id not in self._can:
            return None
        code, can = self._can[gpu_id]
        if self._paused or code == _libdcgm.PAUSED:
            return ProfilingState.PAUSED
        if code != _libdcgm.OK:
            return state_of(code)
        if not can:
            return ProfilingState.UNSUPPORTED
        return ProfilingState.RUNNING if refusal is None else state_of(refusal)

    @property
    def paused(self) -> bool:
        """Whether somebody paused it; as of the last ``look``."""
        return self._paused

    def look(self, now: float, *, at_once: bool) -> None:
        """See whether somebody paused it; at once, or where it is time.

        Args:
            now: Seconds of the monotonic clock.
            at_once: Values have stopped coming, or somebody waits for them to come again.

        Raises:
            SourceError: the engine is gone.
        """
        if not self._wanted or (not at_once and now - self._looked_at < _LOOK_SECONDS):
            return
        self._looked_at = now
        paused = self._engine.profiling_paused()
        self._paused = self._paused if paused is None else paused
