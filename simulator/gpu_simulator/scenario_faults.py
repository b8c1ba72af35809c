"""The ``faults`` and ``xids`` parts of a scenario file."""

from gpu_simulator.plan import FaultPlan, Window, XidPlan
from gpu_simulator.scenario_keys import Section
from gpu_simulator.truth import Fault

GPU_FAULTS = frozenset({Fault.GPU_LOST, Fault.RESET_REQUIRED, Fault.UNKNOWN_ERROR, Fault.GPU_ABSENT})
"""Faults of one GPU; all others are of the driver, the kubelet, the API or the host engine as a whole."""
_WITH_SECONDS: dict[Fault, float | None] = {
    Fault.SLOW: None,
    Fault.KUBELET_PARTIAL: 0.0,
    Fault.API_SLOW: None,
    Fault.API_TOO_MANY: 1.0,
    Fault.ENGINE_SLOW: None,
}
"""Faults that have a parameter, and what it is by default; ``None``: it must be given."""


def read_window(section: Section) -> Window:
    """``from``, then ``to`` or ``for``, and ``every``; without an end it lasts for ever."""
    start = section.number("from", 0.0)
    end = section.optional_number("to", low=start)
    duration = section.optional_number("for", low=0.0)
    if end is not None and duration is not None:
        section.problem("for", "stands beside 'to'; allowed: one of them")
    if duration is not None:
        end = start + duration
    every = section.optional_number("every", low=0.001)
    if every is not None and (end is None or end - start > every):
        section.problem("every", f"is {every:g}; allowed: at least what it lasts, with 'to' or 'for' given")
        every = None
    return Window(start_seconds=start, end_seconds=end, every_seconds=every)


def read_gpu_index(section: Section, gpus: int) -> int | None:
    """``gpu``: an index of a board that is there; ``None`` after a mistake."""
    index = section.integer("gpu")
    if index < gpus:
        return index
    allowed = f"0 to {gpus - 1}" if gpus else "none, there are no GPUs"
    section.problem("gpu", f"is {index}, which is not there; allowed: {allowed}")
    return None


def read_faults(top: Section, gpus: int) -> tuple[FaultPlan, ...]:
    """Everything that goes wrong."""
    faults: list[FaultPlan] = []
    for section in top.sections("faults"):
        kind = section.choice("kind", Fault.SLOW if section.has("seconds") else Fault.GPU_LOST)
        if not section.has("kind"):
            section.problem("kind", f"is missing; allowed: {', '.join(Fault)}")
        gpu = None
        if kind in GPU_FAULTS or (kind is Fault.HANG and section.has("gpu")):
            gpu = read_gpu_index(section, gpus)
        elif section.has("gpu"):
            section.problem("gpu", f"means nothing for {kind.value}, which is of the whole node; allowed: leave it out")
        seconds = 0.0
        if kind in _WITH_SECONDS:
            seconds = section.number("seconds", _WITH_SECONDS[kind], low=0.0)
        faults.append(FaultPlan(kind=kind, gpu=gpu, window=read_window(section), parameter=seconds))
        section.finish()
    return tuple(faults)


def read_xids(top: Section, gpus: int) -> tuple[XidPlan, ...]:
    """Every driver error."""
    xids: list[XidPlan] = []
    for section in top.sections("xids"):
        gpu = read_gpu_index(section, gpus)
        code = section.integer("code", low=1, high=999)
        at = section.number("at", low=0.0)
        every = section.optional_number("every", low=0.001)
        if gpu is not None:
            xids.append(XidPlan(gpu=gpu, code=code, at_seconds=at, every_seconds=every))
        section.finish()
    return tuple(xids)
