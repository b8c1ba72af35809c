"""Which lines of a bill are for instances with GPUs: by the instance types that the clouds have."""

import re
from collections.abc import Collection

_AWS = r"(?:ml\.)?(?:p[2-9][a-z0-9-]*|g[3-9](?!ad)[a-z]*|gr[6-9][a-z]*)\.(?:[0-9]*xlarge|metal[a-z0-9-]*)"
_AZURE = r"Standard_N[CDV][A-Za-z0-9]*(?:_[A-Za-z0-9]+)*"
_GOOGLE = r"(?:a[2-9]x?|g[2-9])-[a-z]+gpu-[0-9]+g(?:-[a-z]+)*|g[2-9]-standard-[0-9]+"
_KNOWN = re.compile(rf"(?<![A-Za-z0-9])(?:{_AWS}|{_AZURE}|{_GOOGLE})(?![A-Za-z0-9])")
_GOOGLES = re.compile(_GOOGLE)
_COUNT = re.compile(r"-([0-9]+)g(?:-|$)")


def instance_type_in(known: Collection[str], *texts: str) -> str:
    """The first type of an instance with NVIDIA GPUs that one of the texts names; empty where none does.

    Args:
        known: Types that are known to have some; a text that is one of them, and nothing else, names it.
        texts: Of one line, those that say it best first.
    """
    for text in texts:
        if text in known:
            return text
        found = _KNOWN.search(text) if text else None
        if found:
            return found.group()
    return ""


def gpus_of(instance_type: str) -> int | None:
    """How many GPUs a type's name tells, as ``a3-highgpu-8g`` does; ``None`` where it does not."""
    found = _COUNT.search(instance_type)
    return int(found.group(1)) if found else None


def is_googles(instance_type: str) -> bool:
    """Whether a type is one of Google's, which are billed in parts: cores, memory and GPUs."""
    return _GOOGLES.fullmatch(instance_type) is not None
