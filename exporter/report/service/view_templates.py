"""From a template's name and what it shows to the HTML of a page; its words for figures are the filters here."""

from collections.abc import Mapping

from exporter import __version__
from exporter.report.render.escaping import environment
from exporter.report.service import view_text

_ENVIRONMENT = environment("exporter.report.service")
_ENVIRONMENT.filters.update(
    {
        "money": view_text.money,
        "amount": view_text.amount,
        "hours": view_text.hours,
        "gpus": view_text.gpus,
        "percent": view_text.percent,
        "coverage": view_text.coverage,
        "duration": view_text.duration,
        "moment": view_text.moment,
        "day": view_text.day,
        "gib": view_text.gib,
        "model": view_text.model,
        "plural": view_text.plural,
    }
)
_ENVIRONMENT.globals.update({"version": __version__, "dash": view_text.DASH})


def render(template: str, values: Mapping[str, object]) -> bytes:
    """The page as UTF-8; what cannot be encoded (half a surrogate pair in a name) is shown as a question mark."""
    return _ENVIRONMENT.get_template(template).render(values).encode("utf-8", "replace")
