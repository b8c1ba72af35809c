"""From where on something is suggested: the thresholds of all advice."""

from dataclasses import dataclass

from exporter.model import PLATFORM_NAMESPACES

MONTH_HOURS = 730.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceSettings:
    """Thresholds; docs/recommendations.md gives the reason of each."""

    least_coverage_ratio: float = 0.9
    """Part of the held hours whose activity was measured."""
    least_held_hours: float = 24.0
    idle_peak_ratio: float = 0.01
    """A device whose busiest hour was below it is idle."""
    headroom_ratio: float = 0.2
    """On top of peak memory and of the activity of the 95 % calmest hours."""
    small_use_ratio: float = 0.2
    """Mean activity up to which a big GPU is too big ..."""
    small_use_bytes: float = 10e9
    """... together with so much memory at its peak."""
    most_sharers: int = 4
    judge_servers: bool = False
    """Also by the memory of servers that take most of it in advance: vLLM, Triton, TensorFlow, JAX, and others."""
    left_out: frozenset[str] = PLATFORM_NAMESPACES
    """Namespaces that nothing is suggested to."""
