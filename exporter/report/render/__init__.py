"""A fleet's report as a table, CSV, JSON or HTML; conservation and coverage are at the foot of each."""

from typing import Literal, TextIO

from exporter.report.fleet.report import FleetReport
from exporter.report.render.document import document, write_json
from exporter.report.render.page import write_html
from exporter.report.render.spreadsheet import write_csv
from exporter.report.render.table import write_table

Form = Literal["table", "csv", "json", "html"]
FLEET_FORMATS: tuple[Form, ...] = ("table", "csv", "json", "html")

__all__ = ["FLEET_FORMATS", "Form", "document", "write_fleet"]


def write_fleet(report: FleetReport, form: Form, stream: TextIO, *, top: int | None = None) -> None:
    """Write the report.

    Args:
        report: What is written.
        form: One of ``FLEET_FORMATS``.
        stream: Takes UTF-8 text.
        top: How many owners' lines ``table`` and ``html`` show before they sum up the rest; the others show all.

    Raises:
        ExporterError: HTML was asked for and jinja2 is not installed.
    """
    if form == "table":
        write_table(report, stream, top)
    elif form == "html":
        write_html(report, stream, top)
    elif form == "csv":
        write_csv(report, stream)
    else:
        write_json(report, stream)
