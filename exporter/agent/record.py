"""What the agent remembers of its sources between ticks: newest reading, Xid counts, error counts."""

from collections import Counter
from dataclasses import dataclass, field

from exporter.model import Reading


@dataclass(slots=True)
class XidRecord:
    """Xid events of one device since the agent started."""

    counts: Counter[int] = field(default_factory=Counter)
    last_seen_seconds: dict[int, float] = field(default_factory=dict)
    last: int | None = None


@dataclass(slots=True)
class SourceRecord:
    """Everything kept of one source's readings."""

    newest: Reading | None = None
    errors: Counter[str] = field(default_factory=Counter)
    xids: dict[tuple[str, int | None], XidRecord] = field(default_factory=dict)
    """By (GPU uuid, GPU-instance id or ``None`` for the whole GPU)."""

    def add(self, reading: Reading) -> None:
        """Add one reading: counts add up, values replace."""
        self.newest = reading
        self.errors.update(reading.errors)
        for event in reading.xids:
            record = self.xids.setdefault((event.uuid, event.gpu_instance_id), XidRecord())
            record.counts[event.xid] += 1
            record.last_seen_seconds[event.xid] = event.at_seconds
            record.last = event.xid
