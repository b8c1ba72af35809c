"""A digest as the body of a mail: tables and inline styles, no script, no picture, nothing loaded."""

from exporter.report.digest.sections import headline, period, sections
from exporter.report.digest.values import Digest
from exporter.report.render.escaping import render
from exporter.report.render.words import clean, encodable


def html(digest: Digest) -> str:
    """One document in UTF-8.

    Raises:
        ExporterError: jinja2 is not installed.
    """
    values = {
        "title": clean(digest.title),
        "week": digest.week.label,
        "subject": headline(digest),
        "period": period(digest),
        "simulated": digest.simulated,
        "sections": list(sections(digest)),
        "engine": clean(digest.engine),
    }
    return encodable(render("exporter.report.digest", "digest.html", values))
