"""What one container is listed with, in one form whoever lists it: kubelet, claim or annotation."""

from dataclasses import dataclass, replace

from exporter.attribution.device_ids import IdKind, ParsedId
from exporter.attribution.shares import WHOLE_WITHIN_ROUNDING

ANNOTATION = "annotation"
"""Source of a holder that only its pod's annotations tell of."""

MIB = 1 << 20

HolderName = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """The part of a device that somebody asked for and was given."""

    memory_bytes: int = 0
    """0 is not limited, as is a ratio of 0."""
    of_bytes: int | None = None
    """Of what ``memory_bytes`` is a part; ``None`` is the GPU's memory."""
    ratio: float = 0.0

    def is_of_unknown_whole(self, device_bytes: int | None) -> bool:
        """Return whether only memory was declared, and how much the GPU has in all is not known."""
        return self.memory_bytes > 0 and self.ratio <= 0 and not (self.of_bytes or device_bytes)

    def part(self, device_bytes: int | None) -> tuple[float, bool]:
        """Give the part of the device, 0..1, and whether it is a guess.

        Args:
            device_bytes: The GPU's memory, ``None`` where the driver does not tell.
        """
        whole = self.of_bytes or device_bytes
        part = max(self.memory_bytes / whole if whole else 0.0, self.ratio)
        if part <= 0:  # nothing limits it, or nothing tells of what it is a part
            return 1.0, True
        return min(part, 1.0), part > WHOLE_WITHIN_ROUNDING or (self.memory_bytes > 0 and not whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One device of one container, before it is looked for."""

    holder: HolderName
    """Namespace, pod, container."""
    resource: str
    source: str
    device_id: str
    """As it is shown where it cannot be resolved."""
    parsed: ParsedId
    share_id: str | None = None
    claim: str = ""
    """DRA: containers that name one claim have together what it has."""
    declared: Declared | None = None
    """``None`` is the whole device, or by the replicas that the id names."""
    is_placeholder: bool = False
    """What the id names need not be what is held."""


def undecided(parsed: ParsedId, reason: str) -> ParsedId:
    """Keep of an id what it names, and say why it cannot be told what is held."""
    return replace(parsed, kind=IdKind.UNKNOWN, reason=reason)
