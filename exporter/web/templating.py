"""Renders HTML templates, with one environment per package and the formatters of ``model`` as filters.

The first page imports jinja2, not this module, so an agent without page requests does not load it.
"""

from collections.abc import Mapping
from functools import cache
from inspect import getmembers, isfunction
from typing import TYPE_CHECKING

from exporter import __version__
from exporter.model import formatting

if TYPE_CHECKING:
    from jinja2 import Environment

_FILTERS = {
    name: function
    for name, function in getmembers(formatting, isfunction)
    if function.__module__ == formatting.__name__ and not name.startswith("_")
}


@cache
def environment(package: str) -> "Environment":
    """Return the environment of a package's folder ``templates``; all packages can import the macros of ``web``."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - for pages only

    own, shared = PackageLoader(package), PackageLoader("exporter.web")
    made = Environment(
        loader=ChoiceLoader([own, shared]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        keep_trailing_newline=True,
    )
    made.filters.update(_FILTERS)
    # No line break between a number and its percent sign.
    made.filters["percent"] = lambda ratio: formatting.percent(ratio).replace(" ", "\N{NO-BREAK SPACE}")
    made.globals.update({"version": __version__, "dash": "—"})
    return made


@cache
def load(package: str) -> None:
    """Compile all templates of a package, which takes most of a second; a second call does nothing."""
    made = environment(package)
    for name in made.list_templates():
        made.get_template(name)


def render(package: str, template: str, values: Mapping[str, object]) -> str:
    """Return a rendered template of a package; all values are escaped."""
    return environment(package).get_template(template).render(values)
