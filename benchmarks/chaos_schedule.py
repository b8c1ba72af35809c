"""Faults of a node under chaos and their times: drawn from a seed, reproducible and printable."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum

from gpu_simulator.truth import GPU_FAULTS, Fault

GPUS = 4
SHORTEST_SECONDS, LONGEST_SECONDS = 0.2, 3.5
"""Shortest and longest duration of a lasting fault."""
BURSTS = 3
CALM_SECONDS = 1.5
"""Time without faults after each burst but the last; after that one, it lasts until the node is well."""
_KINDS_OF_A_SEED = (10, 20)


class Act(StrEnum):
    """An act on the agent and its node from outside; every other fault is a ``Fault`` of the scenario."""

    XID = "xid"
    CHILD_KILL = "child_kill"
    CHILD_STOP = "child_stop"
    """SIGSTOP to a child, and SIGCONT at the end."""
    AGENT_KILL = "agent_kill"
    """SIGKILL, and the start of another agent at once."""
    AGENT_TERM = "agent_term"
    AGENT_OVERLAP = "agent_overlap"
    """Another agent next to the first one, which then gets SIGTERM: a rolling update with a surge."""
    HANGUP = "hangup"
    """SIGHUP: the price book is read again."""
    RELEASE = "release"
    """SIGUSR1: the driver is closed for a second."""
    CLOCK = "clock_step"
    """A step of the wall clock by ``parameter`` seconds, and back at the end."""
    DISK_HANG = "disk_hang"
    STORM = "scrape_storm"
    HALF_OPEN = "half_open"
    """Clients that send half a request and then nothing."""


GPU_HANG = "gpu_hang"
"""Calls to one GPU do not return; ``Fault.HANG`` concerns the whole driver."""
OF_ONE_GPU = GPU_FAULTS | {GPU_HANG}
_ENGINE = (Fault.ENGINE_DOWN, Fault.ENGINE_HANG, Fault.ENGINE_SLOW, Fault.PROFILING_PAUSED)
_PARAMETERS = {
    Fault.SLOW: (0.002, 0.03),
    Fault.ENGINE_SLOW: (0.002, 0.03),
    Fault.API_SLOW: (0.2, 2.0),
    Fault.API_TOO_MANY: (0.3, 1.5),
}
_CLOCK_STEPS = (-86_400.0, -3_600.0, -61.0, -5.0, -1.0, 1.0, 5.0, 61.0, 3_600.0, 86_400.0)
_INSTANTS = frozenset(
    {Act.CHILD_KILL, Act.AGENT_KILL, Act.AGENT_TERM, Act.AGENT_OVERLAP, Act.HANGUP, Act.RELEASE, Act.XID}
)
_RARE: dict[str, int] = {
    Act.AGENT_KILL: 1,
    Act.AGENT_TERM: 1,
    Act.AGENT_OVERLAP: 1,
    Act.RELEASE: 2,
    Act.CHILD_KILL: 5,
    Fault.HANG: 3,
    GPU_HANG: 1,
}
"""Most occurrences in a schedule: an end of the agent or its children hides the effects of other faults."""
OF_ALL_GPUS = frozenset(
    {
        *(Fault.DRIVER_UNLOADED, Fault.LIBRARY_MISMATCH, Fault.LIBRARY_MISSING, Fault.HANG, Fault.SLOW),
        *(Act.CHILD_KILL, Act.CHILD_STOP, Act.RELEASE, Act.CLOCK),
        *(Act.AGENT_KILL, Act.AGENT_TERM, Act.AGENT_OVERLAP),
        *(Fault.ENGINE_DOWN, Fault.ENGINE_HANG, Fault.ENGINE_SLOW, Fault.PROFILING_PAUSED),
    }
)
"""Faults that concern every GPU of the node."""
_NOT_DRAWN = frozenset({Fault.API_OTHER_NODE_NAME, Fault.API_UPGRADED})
"""A wrong name holds from the start, see ``WRONG_NAME_CHANCE``; an upgrade concerns claims, which this node lacks."""
WRONG_NAME_CHANCE = 0.1
"""Chance that the API has the node under a name other than the agent's until the first burst is over."""
BEFORE_SECONDS = 3.0
"""Time from the start of the node to the start of a schedule."""
ONE_GPU_CHANCE = 0.2
"""Chance that a schedule has faults of a single GPU, and none that concern the other GPUs."""
HUNG_SECONDS = (8.0, 14.0)
"""Duration of a GPU's hang: longer than its detection, so that readings of the other GPUs continue before its end."""
CLOCK_LIKE = frozenset({Act.CLOCK, Act.DISK_HANG})
"""Acts that need the library in front of the agent's C library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One fault or act; times are seconds since the schedule's start."""

    kind: str
    """A ``Fault`` or an ``Act``."""
    at: float
    seconds: float = 0.0
    """Duration; 0 for an instant."""
    gpu: int | None = None
    parameter: float = 0.0

    @property
    def end(self) -> float:
        """Return the time at which it is over."""
        return self.at + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All faults and acts of one node."""

    seed: int
    seconds: float
    """Time at which the last of them is over."""
    injections: tuple[Injection, ...]
    with_dcgm: bool
    """Whether the node has a host engine that the agent uses."""


def kinds(*, with_dcgm: bool, without: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Return everything that can go wrong.

    Args:
        with_dcgm: Whether there is a host engine.
        without: Kinds that this machine does not support.
    """
    engine = frozenset(_ENGINE)
    found: list[str] = [one for one in Fault if (with_dcgm or one not in engine) and one not in _NOT_DRAWN]
    return tuple(one for one in [*found, GPU_HANG, *Act] if one not in without)


def draw(seed: int, *, faults: int = 54, seconds: float = 12.0, without: frozenset[str] = frozenset()) -> Schedule:
    """Return the schedule of a seed.

    Args:
        seed: Any number.
        faults: Number of faults and acts.
        seconds: Time within which they begin.
        without: Kinds that this machine does not support.
    """
    chance = random.Random(seed)  # noqa: S311 - a schedule, not a secret
    with_dcgm = bool(chance.randrange(2))
    possible = kinds(with_dcgm=with_dcgm, without=without)
    one_gpu = chance.randrange(GPUS) if chance.random() < ONE_GPU_CHANCE else None
    if one_gpu is not None:
        possible = tuple(one for one in possible if one not in OF_ALL_GPUS)
    some = chance.sample(possible, min(len(possible), chance.randint(*_KINDS_OF_A_SEED)))
    if one_gpu is not None:
        some = sorted({*some, *OF_ONE_GPU})
    begun: dict[str, int] = {}
    found: list[Injection] = []
    if chance.random() < WRONG_NAME_CHANCE:
        found.append(
            Injection(kind=Fault.API_OTHER_NODE_NAME, at=-BEFORE_SECONDS, seconds=BEFORE_SECONDS + seconds / BURSTS)
        )
    while len(found) < faults:
        kind = chance.choice(some)
        begun[kind] = begun.get(kind, 0) + 1
        if begun[kind] > _RARE.get(kind, faults):
            some = [one for one in some if one != kind] or list(possible)
            continue
        found.append(_injection(kind, _moment(chance, seconds), chance, one_gpu))
    found.sort(key=lambda one: one.at)
    end = max(one.end for one in found)
    return Schedule(seed=seed, seconds=end, injections=tuple(found), with_dcgm=with_dcgm)


def _moment(chance: random.Random, seconds: float) -> float:
    """Return a random time within a burst."""
    burst = chance.randrange(BURSTS)
    length = (seconds - CALM_SECONDS * (BURSTS - 1)) / BURSTS
    return round(burst * (length + CALM_SECONDS) + chance.uniform(0.0, length), 2)


def _injection(kind: str, at: float, chance: random.Random, one_gpu: int | None) -> Injection:
    gpu = chance.randrange(GPUS) if kind in OF_ONE_GPU or kind == Act.XID else None
    if gpu is not None and one_gpu is not None:
        gpu = one_gpu
    low, high = _PARAMETERS.get(Fault(kind), (0.0, 0.0)) if kind in {one.value for one in Fault} else (0.0, 0.0)
    parameter = round(chance.uniform(low, high), 3)
    if kind == Act.CLOCK:
        parameter = chance.choice(_CLOCK_STEPS)
    elif kind == Act.XID:
        parameter = float(chance.choice((13, 31, 48, 63, 74, 79, 94, 95, 119)))
    lasts = 0.0 if kind in _INSTANTS else min(LONGEST_SECONDS, SHORTEST_SECONDS + chance.expovariate(1.0))
    if kind == GPU_HANG:
        lasts = chance.uniform(*HUNG_SECONDS)
    return Injection(kind=kind, at=at, seconds=round(lasts, 2), gpu=gpu, parameter=parameter)


def shifted(schedule: Schedule, seconds: float) -> tuple[Injection, ...]:
    """Return the injections of a schedule, later by some seconds."""
    return tuple(replace(one, at=one.at + seconds) for one in schedule.injections)
