"""Gzip for those who accept it, made once per body."""

import gzip
from functools import lru_cache

_WORTH_BYTES = 1024
_LEVEL = 1  # Repetitive text: higher levels cost several times the time for a few per cent.


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header names gzip (or anything) with a weight above 0."""
    weights: dict[str, bool] = {}
    for item in accept_encoding.split(","):
        coding, *parameters = item.split(";")
        refused = any(_is_zero(parameter) for parameter in parameters)
        weights[coding.strip().lower()] = not refused
    return weights.get("gzip", weights.get("*", False))


def _is_zero(parameter: str) -> bool:
    name, _, value = parameter.partition("=")
    return name.strip().lower() == "q" and value.strip().rstrip("0").rstrip(".") in {"", "0"}


@lru_cache(maxsize=4)
def gzipped(body: bytes) -> bytes | None:
    """The body, compressed; ``None`` where that is not worth it. Several scrapers of one snapshot share the work."""
    if len(body) < _WORTH_BYTES:
        return None
    return gzip.compress(body, _LEVEL, mtime=0)
