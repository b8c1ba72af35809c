"""The forms in which a simulated API server shows its objects: whole, metadata only, lists, events and statuses."""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from gpu_simulator.api_store import Change, Json

Selector = Callable[[Json], bool]
_TERM = re.compile(r"\s*([A-Za-z.]+)\s*(!=|==|=)\s*([^=!]*)\s*")
_FIELDS = {
    "pods": {"metadata.name", "metadata.namespace", "spec.nodeName", "status.phase"},
    "resourceslices": {"metadata.name", "spec.nodeName", "spec.driver"},
}
_KINDS = {"pods": ("v1", "Pod"), "resourceslices": ("resource.k8s.io/", "ResourceSlice")}


def selector(resource: str, text: str) -> Selector:
    """Read a ``fieldSelector``.

    Raises:
        ValueError: For a field that the API cannot select by.
    """
    terms = []
    for part in filter(None, text.split(",")):
        found = _TERM.fullmatch(part)
        if found is None or found[1] not in _FIELDS[resource]:
            raise ValueError(f"field label not supported: {part}")
        terms.append((found[1].split("."), found[2] != "!=", found[3]))
    return lambda shown: all((_field(shown, path) == value) is equal for path, equal, value in terms)


def one(shown: Json, *, metadata_only: bool) -> Json:
    """Show an object whole or as ``PartialObjectMetadata``."""
    if not metadata_only:
        return shown
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": shown["metadata"]}


def listed(resource: str, items: Iterable[Json], version: int, *, metadata_only: bool, dra_version: str) -> Json:
    """Make a list; its items have no kind of their own, as in the real one, except in the metadata form."""
    api, kind = _KINDS[resource]
    if metadata_only:
        api, kind = "meta.k8s.io/v1", "PartialObjectMetadata"
    elif api.endswith("/"):
        api += dra_version
    shown = [one(each, metadata_only=metadata_only) for each in items]
    if not metadata_only:
        shown = [{key: value for key, value in each.items() if key not in {"kind", "apiVersion"}} for each in shown]
    return {
        "kind": f"{kind}List",
        "apiVersion": api,
        "metadata": {"resourceVersion": str(version)},
        "items": shown,
    }


def event(change: Change, wanted: Selector, *, metadata_only: bool) -> bytes | None:
    """Make the line by which a watch is told of a change; ``None`` where it does not concern the watch."""
    before = change.before if change.before is not None and wanted(change.before) else None
    after = change.after if change.after is not None and wanted(change.after) else None
    shown = after if after is not None else before
    if shown is None:
        return None
    kind = "DELETED" if after is None else "ADDED" if before is None else "MODIFIED"
    metadata = {**shown["metadata"], "resourceVersion": str(change.version)}
    return line(kind, one({**shown, "metadata": metadata}, metadata_only=metadata_only))


def bookmark(resource: str, version: int, *, metadata_only: bool) -> bytes:
    """Make the line that tells a watch how far it has come."""
    api, kind = ("meta.k8s.io/v1", "PartialObjectMetadata") if metadata_only else _KINDS[resource]
    shown: dict[str, Any] = {
        "kind": kind,
        "apiVersion": api,
        "metadata": {"resourceVersion": str(version), "creationTimestamp": None},
    }
    if resource == "pods" and not metadata_only:
        shown |= {"spec": {"containers": None}, "status": {}}
    return line("BOOKMARK", shown)


def status(code: int, reason: str, message: str) -> Json:
    """Make the body of a refusal."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def expired(version: int, oldest: int) -> Json:
    """Make the status for a resource version that is too old."""
    return status(410, "Expired", f"too old resource version: {version} ({oldest})")


def line(kind: str, shown: Json) -> bytes:
    """Make one line of a watch."""
    return json.dumps({"type": kind, "object": shown}, separators=(",", ":")).encode() + b"\n"


def _field(shown: Json, path: Iterable[str]) -> str:
    value: Any = shown
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value)
