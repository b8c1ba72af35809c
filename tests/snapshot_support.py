"""Snapshots with some values of their parts changed."""

from dataclasses import replace

from exporter.model.attribution import MetadataStatus
from exporter.model.snapshot import Snapshot

PARTS = frozenset({"reading", "attribution", "metadata", "metering"})


def changed(snapshot: Snapshot, **changes: object) -> Snapshot:
    """Return a copy with other values; a ``dict`` for a part of the snapshot changes only these of its values."""
    new = {name: _part(snapshot, name, value) for name, value in changes.items()}
    return replace(snapshot, **new)


def _part(snapshot: Snapshot, name: str, value: object) -> object:
    if name not in PARTS or not isinstance(value, dict):
        return value
    old = getattr(snapshot, name)
    return MetadataStatus(**{"known": True, **value}) if name == "metadata" and old is None else replace(old, **value)
