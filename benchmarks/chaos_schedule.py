"""What goes wrong with a node under chaos, and when: drawn from a seed, the same for the same seed, and printable."""

import random
from dataclasses import dataclass, replace
from enum import StrEnum

from gpu_simulator.truth import GPU_FAULTS, Fault

GPUS = 4
SHORTEST_SECONDS, LONGEST_SECONDS = 0.2, 3.5
"""Of a fault that lasts."""
BURSTS = 3
CALM_SECONDS = 1.5
"""After each burst but the last; what comes after that one lasts until the node is well."""
_KINDS_OF_A_SEED = (10, 20)


class Act(StrEnum):
    """What is done to the agent and its node from outside; everything else is a ``Fault`` of the scenario."""

    XID = "xid"
    CHILD_KILL = "child_kill"
    CHILD_STOP = "child_stop"
    """A child gets SIGSTOP, and SIGCONT when it is over."""
    AGENT_KILL = "agent_kill"
    """SIGKILL, and another agent at once."""
    AGENT_TERM = "agent_term"
    AGENT_OVERLAP = "agent_overlap"
    """Another agent beside the first one, which then gets SIGTERM: a rolling update with a surge."""
    HANGUP = "hangup"
    """SIGHUP: the price book is read again."""
    RELEASE = "release"
    """SIGUSR1: the driver is closed for a second."""
    CLOCK = "clock_step"
    """The wall clock is set by ``parameter`` seconds, and back when it is over."""
    DISK_HANG = "disk_hang"
    STORM = "scrape_storm"
    HALF_OPEN = "half_open"
    """Clients that send half a request and then nothing."""


GPU_HANG = "gpu_hang"
"""Calls to one GPU do not return; ``Fault.HANG`` is of the whole driver."""
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
"""What ends the agent or its children takes all that is seen with it: no more often than this in a schedule."""
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
"""Of a schedule in which the API has the node under another name than the agent, until the first burst is over."""
BEFORE_SECONDS = 3.0
"""A schedule begins so long after the node."""
ONE_GPU_CHANCE = 0.2
"""Of a schedule in which a single GPU is faulty, and nothing that concerns the others."""
HUNG_SECONDS = (8.0, 14.0)
"""How long a GPU's calls hang: longer than it takes to find that out, so that the others are seen to go on."""
CLOCK_LIKE = frozenset({Act.CLOCK, Act.DISK_HANG})
"""They need the library in front of the agent's C library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """One thing that goes wrong; times are seconds since the schedule's start."""

    kind: str
    """A ``Fault`` or an ``Act``."""
    at: float
    seconds: float = 0.0
    """0: it happens, and does not last."""
    gpu: int | None = None
    parameter: float = 0.0

    @property
    def end(self) -> float:
        """When it is over."""
        return self.at + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Everything that goes wrong with one node."""

    seed: int
    seconds: float
    """When the last of it is over."""
    injections: tuple[Injection, ...]
    with_dcgm: bool
    """Whether the node has a host engine and the agent asks it."""


def kinds(*, with_dcgm: bool, without: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Everything that can go wrong.

    Args:
        with_dcgm: Whether there is a host engine.
        without: What this machine cannot do.
    """
    engine = frozenset(_ENGINE)
    found: list[str] = [one for one in Fault if (with_dcgm or one not in engine) and one not in _NOT_DRAWN]
    return tuple(one for one in [*found, GPU_HANG, *Act] if one not in without)


def draw(seed: int, *, faults: int = 54, seconds: float = 12.0, without: frozenset[str] = frozenset()) -> Schedule:
    """Return the schedule of a seed.

    Args:
        seed: Any number.
        faults: How many things go wrong.
        seconds: Within how long they begin.
        without: Kinds that this machine cannot do.
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
    """Some time within a burst."""
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
    """Everything of a schedule, that much later."""
    return tuple(replace(one, at=one.at + seconds) for one in schedule.injections)
