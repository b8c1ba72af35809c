"""The door to jinja2: templates of a package in which every value is escaped."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from exporter.errors import ExporterError

if TYPE_CHECKING:
    from jinja2 import Environment


def environment(package: str) -> "Environment":
    """What knows the templates in a package's folder ``templates``.

    Raises:
        ExporterError: jinja2 is not installed: it comes with the extra ``report``.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - an extra, needed for this only
    except ImportError:
        raise ExporterError(
            "HTML needs jinja2, which is not installed; install gpu-cost-exporter[report], or ask for another format"
        ) from None
    return Environment(
        loader=PackageLoader(package, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        keep_trailing_newline=True,
    )


def render(package: str, template: str, values: Mapping[str, object]) -> str:
    """A template of a package with its values, all of them escaped.

    Raises:
        ExporterError: As for ``environment``.
    """
    return environment(package).get_template(template).render(values)
