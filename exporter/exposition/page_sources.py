"""What the page says of the sources: how each is doing, and what DCGM cannot measure and why."""

from exporter.exposition.page_text import chip, text, words
from exporter.model import ActivitySource, DeviceView, ProfilingState, Snapshot, SourceState, SourceStatus

_CSS = {SourceState.UP: "ok", SourceState.STARTING: "unknown", SourceState.RELEASED: "idle"}
_QUIET = frozenset({SourceState.UP, SourceState.STARTING})
_NAMES = {"nvml": "NVML", "dcgm": "DCGM"}

_PROFILING = {
    ProfilingState.PAUSED: (
        "is paused, for the whole host engine",
        'once whoever paused it is done: <span class="mono">dcgmi profile --resume</span>',
    ),
    ProfilingState.NO_MODULE: (
        "is not there: the host engine could not load its profiling module",
        "install NVIDIA's full package of DCGM, which has that module, and start the host engine again",
    ),
    ProfilingState.NO_PERMISSION: (
        "is not permitted to the host engine",
        "run it as root, or with CAP_SYS_ADMIN",
    ),
    ProfilingState.REFUSED: (
        "is refused",
        "end the profiler that has the counters, or update the driver; the host engine's log says which",
    ),
}
"""What is so, and how to mend it. A model that DCGM does not profile has no mend, and is no problem."""


def chips(snapshot: Snapshot) -> list[str]:
    """A chip per source; one that is down while the other works is a loss, and not a failure of the node."""
    return [
        chip(_CSS.get(source.state, "idle" if snapshot.ready else "bad"), f"{text(source.name)} {source.state.value}")
        for source in snapshot.sources
    ]


def problems(snapshot: Snapshot) -> list[str]:
    """One line for each source that is down and for each reason why DCGM does not profile. Safe."""
    lines = [
        f"<strong>{text(source.name)} {source.state.value}</strong>: {text(source.message) or words(source.reason)}"
        f"{_meanwhile(source, snapshot)}"
        for source in snapshot.sources
        if source.state not in _QUIET and (source.message or source.reason)
    ]
    for state, (what, mend) in _PROFILING.items():
        indexes = sorted(view.gpu.index for view in snapshot.devices if view.profiling is state and _lacks(view))
        if indexes:
            gpus = ", ".join(map(str, indexes))
            lines.append(f"<strong>DCGM's profiling</strong> {what}; GPU {gpus} lacks what it measures. Mend: {mend}")
    return lines


def _meanwhile(source: SourceStatus, snapshot: Snapshot) -> str:
    others = [one.name for one in snapshot.sources if one.name != source.name and one.state is SourceState.UP]
    return f" (meanwhile {_NAMES.get(others[0], text(others[0]))} measures alone)" if others else ""


def _lacks(view: DeviceView) -> bool:
    """Whether a GPU has no engine counter from NVML, which then has the other profiling fields, too."""
    activity = view.activity
    by_nvml = activity is not None and activity.measured_by == "nvml" and activity.source is ActivitySource.ENGINE
    return view.instance is None and not by_nvml
