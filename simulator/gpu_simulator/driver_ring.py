"""The driver's ring of per-process samples: about 7 Hz, 10 seconds deep, one process per sample and engine."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpu_simulator.truth import ProcessTruth

SAMPLES_PER_SECOND = 7
DEPTH = 72
"""Samples that the ring keeps (reference: 72 samples, wraps after 10 s)."""
_ENGINES: tuple[Callable[[ProcessTruth], float], ...] = (
    lambda p: p.sm_ratio,
    lambda p: p.mem_ratio,
    lambda p: p.enc_ratio,
    lambda p: p.dec_ratio,
    lambda p: p.jpg_ratio,
    lambda p: p.ofa_ratio,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    tick: int
    parts: tuple[tuple[int, float], ...]
    """(pid, utilisation of the whole engine 0..1) per engine; pid 0 where nothing ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One process's mean use over the samples asked for, in whole percent as the driver answers it."""

    pid: int
    newest_seconds: float
    """Time of its newest sample, in seconds since the scenario's start."""
    percents: tuple[int, ...]
    """SM, memory, encoder, decoder, JPEG, optical flow."""


@dataclass(slots=True, kw_only=True)
class Ring:
    """Samples of one GPU.

    Which process a sample shows is decided by carrying each one's unpaid part forward, so that over many samples
    every process appears in proportion to its part, as a statistical ring does.
    """

    samples: deque[_Sample] = field(default_factory=lambda: deque(maxlen=DEPTH))
    last_tick: int | None = None
    credit: tuple[dict[int, float], ...] = field(default_factory=lambda: tuple({} for _ in _ENGINES))

    def observe(self, at_seconds: float, processes: Sequence[ProcessTruth]) -> None:
        """Take the samples that fell due since the last call, all with the ``processes`` of now.

        A clock that went back starts the ring anew; the first call fills one second.
        """
        tick = int(at_seconds * SAMPLES_PER_SECOND)
        if self.last_tick is None or tick < self.last_tick:
            self.samples.clear()
            self.last_tick = tick - SAMPLES_PER_SECOND
        for due in range(max(self.last_tick + 1, tick - DEPTH + 1), tick + 1):
            parts = tuple(self._pick(engine, processes) for engine in range(len(_ENGINES)))
            self.samples.append(_Sample(tick=due, parts=parts))
        self.last_tick = tick

    def _pick(self, engine: int, processes: Sequence[ProcessTruth]) -> tuple[int, float]:
        shares = {p.pid: ratio for p in processes if (ratio := _ENGINES[engine](p)) > 0.0}
        total = sum(shares.values())
        credit = self.credit[engine]
        for gone in credit.keys() - shares.keys():
            del credit[gone]
        if total <= 0.0:
            return (0, 0.0)
        for pid, share in shares.items():
            credit[pid] = credit.get(pid, 0.0) + share / total
        chosen = max(credit, key=lambda pid: (credit[pid], -pid))
        credit[chosen] -= 1.0
        return (chosen, min(total, 1.0))

    def since(self, seconds: float) -> tuple[Use, ...]:
        """Mean use per process over the samples after ``seconds``; processes without a sample are absent."""
        # A thousandth of a sample: timestamps in whole microseconds must find the sample that they are of.
        newer = [sample for sample in self.samples if sample.tick > seconds * SAMPLES_PER_SECOND + 1e-3]
        sums: dict[int, list[float]] = {}
        newest: dict[int, float] = {}
        for sample in newer:
            for engine, (pid, ratio) in enumerate(sample.parts):
                if pid:
                    sums.setdefault(pid, [0.0] * len(_ENGINES))[engine] += ratio
                    newest[pid] = sample.tick / SAMPLES_PER_SECOND
        return tuple(
            Use(pid=pid, newest_seconds=newest[pid], percents=tuple(round(100 * part / len(newer)) for part in total))
            for pid, total in sorted(sums.items())
        )
