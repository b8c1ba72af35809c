"""A price book as lines of text: what each row is for, when it holds, and what an hour of a GPU costs by it."""

from collections.abc import Iterator
from math import inf

from exporter.accounting.pricing import Match, PriceBook, PriceRow
from exporter.config.gpu_models import KNOWN_MODELS
from exporter.config.price_rows import moment
from exporter.model import NodeFacts


def lines(book: PriceBook) -> Iterator[str]:
    """The book's head, then two lines for each row that is right."""
    rows = "1 row" if len(book.rows) == 1 else f"{len(book.rows)} rows"
    yield f"{book.name}: {rows}, {book.currency or 'no currency'}; GPUs are {book.gpu_part:.0%} of a node's price"
    width = max((len(str(row.number)) for row in book.rows), default=1)
    for row in book.rows:
        yield f"  row {row.number:>{width}}  {_rate(row):<32}  {_period(row):<26}  {row.match.description}{_known(row)}"
        yield f"  {'':{width + 4}}  {row.price.source}: {row.source}; as of {row.price.as_of}"
    if book.fallback is not None:
        yield f"  what no row matches: {book.fallback.name} (see: gpu-cost-exporter prices list), marked as fallback"
    elif book.name != "list-prices":
        yield "  what no row matches has no price"


def _rate(row: PriceRow) -> str:
    energy = f" + {row.price.per_kwh:.4g}/kWh" if row.price.per_kwh else ""
    return f"{row.price.per_hour:.4f} {row.price.currency}/GPU-hour{energy}"


def _period(row: PriceRow) -> str:
    if row.from_seconds == -inf and row.to_seconds == inf:
        return "at all times"
    start = "" if row.from_seconds == -inf else f"from {moment(row.from_seconds)}"
    end = "" if row.to_seconds == inf else f"until {moment(row.to_seconds)}"
    return " ".join(part for part in (start, end) if part)


def _known(row: PriceRow) -> str:
    """The known models that a pattern stands for."""
    if not set(row.match.model) & set("*?"):
        return ""
    pattern = Match(model=row.match.model)
    found = [model for model in KNOWN_MODELS if pattern.matches(model=model, node="", facts=NodeFacts())]
    return f" ({', '.join(found) or 'none known'})"
