"""Metrics of the agent's own process, under the usual names of Prometheus clients."""

from exporter.metrics.text_format import Kind, Metric
from exporter.metrics.text_format import plain as _own

_COUNTER = Kind.COUNTER

PROCESS_CPU_SECONDS_TOTAL = _own(
    "process_cpu_seconds_total", "User and system CPU time of this process, in seconds.", kind=_COUNTER
)
PROCESS_RESIDENT_MEMORY_BYTES = _own("process_resident_memory_bytes", "Resident memory of this process, in bytes.")
PROCESS_VIRTUAL_MEMORY_BYTES = _own("process_virtual_memory_bytes", "Virtual memory of this process, in bytes.")
PROCESS_START_TIME_SECONDS = _own("process_start_time_seconds", "Unix time of this process' start, in seconds.")
PROCESS_OPEN_FDS = _own("process_open_fds", "File descriptors that this process has open.")
PROCESS_MAX_FDS = _own("process_max_fds", "File descriptors that this process may open.")
PYTHON_GC_COLLECTIONS_TOTAL = _own(
    "python_gc_collections_total", "Runs of Python's garbage collector.", "generation", kind=_COUNTER
)
PYTHON_GC_OBJECTS_COLLECTED_TOTAL = _own(
    "python_gc_objects_collected_total", "Objects freed by Python's garbage collector.", "generation", kind=_COUNTER
)
PYTHON_GC_OBJECTS_UNCOLLECTABLE_TOTAL = _own(
    "python_gc_objects_uncollectable_total",
    "Objects that Python's garbage collector could not free.",
    "generation",
    kind=_COUNTER,
)

ALL: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""In the order above, which is the order on the page."""
