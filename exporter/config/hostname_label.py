"""The DCGM_FI_* label that carries the node's name: which names it can have, and which it has by default."""

from dataclasses import replace

from exporter.config.kinds import LABEL
from exporter.exposition.dcgm_fields import PREFIX
from exporter.exposition.dcgm_labels import TAKEN

_NONE = "none"


def settled(text: str | None, dcgm_names: str | None) -> str:
    """Name of the label, empty for none: what was chosen, else what goes with the names of the metrics."""
    if text is None:
        return "hostname" if dcgm_names == "4.9" else "Hostname"
    return "" if text == _NONE else text


def _is_taken(text: str) -> bool:
    return text in TAKEN or text.startswith(PREFIX)


def _parse(text: str) -> object:
    if _is_taken(text):
        raise ValueError(text)
    return LABEL.parse(text)


def _why(text: str) -> str:
    return "another label of these series has that name" if _is_taken(text) else ""


# Two labels of one name on a line, and Prometheus refuses the whole page.
HOSTNAME_LABEL = replace(LABEL, parse=_parse, allowed=f"{LABEL.allowed}; or {_NONE}", why=_why)
