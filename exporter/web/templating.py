"""HTML from templates: one environment per package, with the product's formatters as filters.

jinja2 is loaded with the first page, not with this module: an agent without page requests does without.
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
    """Return the environment of the templates in a package's folder ``templates``; macros in ``web`` are for all."""
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
    # A line that ends between a number and its sign reads badly.
    made.filters["percent"] = lambda ratio: formatting.percent(ratio).replace(" ", "\N{NO-BREAK SPACE}")
    made.globals.update({"version": __version__, "dash": "—"})
    return made


@cache
def load(package: str) -> None:
    """Compile all templates of a package, which takes a good part of a second; a second call does nothing."""
    made = environment(package)
    for name in made.list_templates():
        made.get_template(name)


def render(package: str, template: str, values: Mapping[str, object]) -> str:
    """Return a template of a package with its values, all of them escaped."""
    return environment(package).get_template(template).render(values)
