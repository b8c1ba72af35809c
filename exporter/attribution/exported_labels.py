"""Labels and annotations of pods as labels of ours: by allow-list only, named as kube-state-metrics names them."""

import re
from collections.abc import Mapping, Sequence
from itertools import count

from exporter.attribution.label_text import label_text

MAX_KEYS = 10
"""Of labels, and as many of annotations."""
MAX_CHARACTERS = 128

_INVALID = re.compile(r"[^a-zA-Z0-9_]")
_CAMEL = re.compile(r"([a-z0-9])([A-Z])")
# One value per pod or per rollout: a series each, and nobody asks for them.
_NEVER = re.compile(r"(^|_)(uid|hash|checksum)(_|$)|job_completion_index$|statefulset_kubernetes_io_pod_name$")
_NEVER_KEYS = frozenset({"kubectl.kubernetes.io/last-applied-configuration"})


def exported_of(
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    allowed_labels: Sequence[str],
    allowed_annotations: Sequence[str],
) -> tuple[tuple[str, str], ...]:
    """Give what is allowed as (label name, value) in the order of names.

    Args:
        labels: Of the pod.
        annotations: Of the pod.
        allowed_labels: Keys, exactly; of those that may be shown the first ten count.
        allowed_annotations: As above.

    Returns:
        Names start with ``label_`` or ``annotation_``. Names that clash are numbered over the allow-list and not over
        the pod, so that a pod's other labels never rename one. Empty values are left out.
    """
    names = [
        *((name, labels.get(key, "")) for key, name in export_names("label", allowed_labels).items()),
        *((name, annotations.get(key, "")) for key, name in export_names("annotation", allowed_annotations).items()),
    ]
    cut = ((name, label_text(value, MAX_CHARACTERS)) for name, value in names)
    return tuple(sorted((name, value) for name, value in cut if value))


def export_names(prefix: str, keys: Sequence[str]) -> dict[str, str]:
    """Name the keys that may be shown: snake case, ``_conflict1``, ``_conflict2`` in the order of keys that clash."""
    shown = [key for key in dict.fromkeys(keys) if not is_never_shown(key)][:MAX_KEYS]
    groups: dict[str, list[str]] = {}
    for key in sorted(shown):
        groups.setdefault(f"{prefix}_{_sanitised(key)}", []).append(key)
    taken = {name for name, members in groups.items() if len(members) == 1}
    names: dict[str, str] = {}
    for name, members in groups.items():
        if len(members) == 1:
            names[members[0]] = name
            continue
        numbers = count(1)
        for key in members:
            names[key] = next(free for number in numbers if (free := f"{name}_conflict{number}") not in taken)
            taken.add(names[key])
    return names


def is_never_shown(key: str) -> bool:
    """Tell whether a key is refused whatever the allow-list says: UIDs, hashes, checksums and the like."""
    return key in _NEVER_KEYS or _NEVER.search(_sanitised(key)) is not None


def _sanitised(key: str) -> str:
    return _CAMEL.sub(r"\1_\2", _INVALID.sub("_", key)).lower()
