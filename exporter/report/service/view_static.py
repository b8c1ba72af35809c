"""Styles and scripts of the pages, under names that change with what is in them, so that browsers keep them."""

import gzip
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

_LEVEL = 6
_HASH_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file that pages load."""

    name: str
    """With its hash: ``page.1a2b3c4d5e6f.css``."""
    content_type: str
    body: bytes


@cache
def assets() -> Mapping[str, Asset]:
    """Every file, by its plain name: ``page.css``, ``page.js``, ``plotly.js``."""
    own = files("exporter.report.service") / "static"
    return MappingProxyType(
        {
            "page.css": _asset("page", "css", "text/css", (own / "page.css").read_bytes()),
            "page.js": _asset("page", "js", "text/javascript", (own / "page.js").read_bytes()),
            "plotly.js": _asset("plotly", "js", "text/javascript", _plotly().read_bytes()),
        }
    )


@cache
def packed(name: str) -> bytes:
    """The body of the asset with this plain name, compressed once."""
    return gzip.compress(assets()[name].body, _LEVEL, mtime=0)


def _asset(stem: str, suffix: str, content_type: str, body: bytes) -> Asset:
    digest = sha256(body).hexdigest()[:_HASH_DIGITS]
    return Asset(name=f"{stem}.{digest}.{suffix}", content_type=f"{content_type}; charset=utf-8", body=body)


def _plotly() -> Path:
    # The package is only a place where the script lies: importing it would take half a second and be of no use.
    spec = find_spec("plotly")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("plotly is not installed; the cost service needs the extra [report]", name="plotly")
    return Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
