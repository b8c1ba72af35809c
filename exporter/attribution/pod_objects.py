"""Pods as the Kubernetes API writes them, whole or metadata only: what anybody here reads, bounded and printable."""

import re
from collections.abc import Mapping
from sys import intern
from typing import Any

from exporter.attribution import annotated, reservations
from exporter.model import PodMetadata

TEXT_LIMIT = 4096
LONG_TEXT_LIMIT = 64 << 10
"""A device list of HAMi has a line per container and device."""
KEYS_LIMIT = 512
"""Labels of one object; a node has up to some 200, a pod a dozen."""
LONG_KEYS = annotated.KEYS | reservations.KEYS
"""Annotations that are kept of every pod, whatever is configured."""

_KEY_LIMIT = 317
_NAME_LIMIT = 253
_CONFIG_HASH = "kubernetes.io/config.hash"
_CONFIG_MIRROR = "kubernetes.io/config.mirror"
_HASH = re.compile(r"[0-9a-f]{32}", re.ASCII)


def parse(item: Mapping[str, Any], wanted: frozenset[str]) -> tuple[tuple[str, str], PodMetadata] | None:
    """Read one pod.

    Args:
        item: A Pod or the PartialObjectMetadata of one; anything is borne.
        wanted: Annotations to keep, beside those that say who has which part of a GPU.

    Returns:
        (namespace, name) and the pod; ``None`` for what has no name.
    """
    metadata = _mapping(item.get("metadata"))
    namespace, name = text_of(metadata.get("namespace"), _NAME_LIMIT), text_of(metadata.get("name"), _NAME_LIMIT)
    if not namespace or not name:
        return None
    controller = _controller(metadata.get("ownerReferences"))
    kind = text_of(controller.get("kind"), _NAME_LIMIT)
    pod = PodMetadata(
        namespace=intern(namespace),
        name=name,
        uid=_uid(metadata, kind),
        labels=labels_of(metadata),
        annotations=annotations_of(metadata, wanted | LONG_KEYS),
        owner_kind=intern(kind),
        owner_name=text_of(controller.get("name"), _NAME_LIMIT),
        owner_api=intern(text_of(controller.get("apiVersion"), _NAME_LIMIT)),
    )
    return (pod.namespace, pod.name), pod


def labels_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of an object's ``metadata``, those whose values are text or can be."""
    return _texts(_mapping(metadata.get("labels")))


def annotations_of(metadata: Mapping[str, Any], wanted: frozenset[str]) -> dict[str, str]:
    """Return the wanted annotations of an object's ``metadata``."""
    annotations = _mapping(metadata.get("annotations"))
    return _texts({key: annotations[key] for key in wanted if key in annotations})


def text_of(value: object, limit: int = TEXT_LIMIT) -> str:
    """Return a value of JSON as text that can be encoded, cut; what is no scalar is empty."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        value = str(value)
    if not isinstance(value, str):
        return ""
    # JSON can write half of a surrogate pair, and no encoder takes it.
    return value[:limit].encode(errors="replace").decode()


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, value in values.items():
        if value is None or isinstance(value, (list, dict)):
            continue
        if len(texts) == KEYS_LIMIT:
            break
        texts[intern(text_of(key, _KEY_LIMIT))] = text_of(value, LONG_TEXT_LIMIT if key in LONG_KEYS else TEXT_LIMIT)
    return texts


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _controller(references: object) -> Mapping[str, Any]:
    if not isinstance(references, list):
        return {}
    owners = (_mapping(reference) for reference in references)
    return next((owner for owner in owners if owner.get("controller") is True), {})


def _uid(metadata: Mapping[str, Any], owner_kind: str) -> str:
    """Return the UID in the pod's cgroups: of a static pod it is its file's hash.

    The hash alone is anybody's to write; that a pod is the image of a static one only its node may say.
    """
    annotations = _mapping(metadata.get("annotations"))
    file_hash = text_of(annotations.get(_CONFIG_HASH), _NAME_LIMIT)
    if _HASH.fullmatch(file_hash) and (_CONFIG_MIRROR in annotations or owner_kind == "Node"):
        return file_hash
    return text_of(metadata.get("uid"), _NAME_LIMIT).lower()
