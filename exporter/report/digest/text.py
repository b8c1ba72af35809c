"""A digest for a terminal or a plain mail."""

from collections.abc import Iterator

from exporter.report.digest.sections import Section, headline, period, sections
from exporter.report.digest.values import Digest


def text(digest: Digest) -> str:
    """All of it in lines."""
    lines = [headline(digest), period(digest)]
    if digest.simulated:
        lines.append("SIMULATED FLEET: nothing here is real")
    for section in sections(digest):
        lines += ["", section.title, "-" * len(section.title), *_lines(section)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _lines(section: Section) -> Iterator[str]:
    if section.lead:
        yield section.lead
    table = [tuple(cell.text for cell in row) for row in section.rows]
    if any(section.columns):
        table.insert(0, section.columns)
    widths = [max(len(row[place]) for row in table) for place in range(len(section.columns))] if table else []
    right = [all(row[place].is_number for row in section.rows) for place in range(len(widths))]
    for row in table:
        cells = [
            value.rjust(width) if is_right else value.ljust(width)
            for value, width, is_right in zip(row, widths, right, strict=True)
        ]
        yield "  ".join(cells)
    if section.more:
        yield section.more
    if section.href:
        yield section.href
