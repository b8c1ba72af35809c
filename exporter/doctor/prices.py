"""Checks the price book: whether it can be read, how old its prices are, and whether this node's GPUs have one."""

from datetime import UTC, datetime
from functools import partial

from exporter.accounting.pricing import PriceBook, settled_facts
from exporter.config import AgentConfig, price_book
from exporter.doctor.finding import Finding, fail, ok, warn
from exporter.errors import ConfigError
from exporter.model import NodeFacts, Reading

_NAME = "price book"


def book(config: AgentConfig, labelled: NodeFacts | None, reading: Reading | None, now: float) -> Finding:
    """A book with mistakes stops the start; a GPU without a price has GPU-hours but no money.

    Args:
        config: Names the book, and says what the node is.
        labelled: What the node's labels say; empty if the API is not used, ``None`` if they could not be read.
        reading: The GPUs of this node, ``None`` where they are not known.
        now: Unix time, at which prices are looked up.
    """
    try:
        read = price_book.load(config.price_book)
    except ConfigError as error:
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        return fail(_NAME, f"{error.problems[0]}{more}", "mend it, and try it: gpu-cost-exporter prices check FILE")
    if not read.rows and read.fallback is None:
        return ok(_NAME, "none: no prices, no money")
    told = _told(read)
    unpriced = _unpriced(read, config, labelled, reading, now)
    if unpriced:
        return _without_price(f"{told}; no price for {', '.join(unpriced)}", labels_read=labelled is not None)
    if read.warnings:
        more = f" (and {len(read.warnings) - 1} more)" if len(read.warnings) > 1 else ""
        return warn(_NAME, f"{told}; {read.warnings[0]}{more}", "see: gpu-cost-exporter prices check FILE")
    today = datetime.fromtimestamp(now, tz=UTC).date().isoformat()
    if _days(read)[-1] > today:
        return warn(_NAME, f"{told}: as_of lies in the future", "as_of is the day of the source, not of the effect")
    return ok(_NAME, told)


def _without_price(cause: str, *, labels_read: bool) -> Finding:
    if labels_read:
        return warn(
            _NAME,
            cause,
            "add a row; one that asks for region, instance or capacity type needs the option of that name, "
            "or the node's label and --kube-metadata on",
        )
    return warn(
        _NAME,
        f"{cause}: it may depend on the node's labels, which could not be read",
        "grant verb get on resource nodes, or set --instance-type, --capacity-type and --region",
    )


def _told(read: PriceBook) -> str:
    books = [_one(one) for one in (read, read.fallback) if one is not None and one.rows]
    return "; else ".join(books) if read.fallback else f"{books[0]}; no list prices behind it"


def _one(read: PriceBook) -> str:
    first, last = _days(read)[0], _days(read)[-1]
    period = first if first == last else f"{first} to {last}"
    rows = "1 row" if len(read.rows) == 1 else f"{len(read.rows)} rows"
    return f"{read.name}: {rows}, {read.currency}, as of {period}"


def _days(read: PriceBook) -> list[str]:
    """The days of the sources, the oldest first."""
    rows = read.rows or (read.fallback.rows if read.fallback else ())
    return sorted(row.price.as_of for row in rows)


def _unpriced(
    read: PriceBook, config: AgentConfig, labelled: NodeFacts | None, reading: Reading | None, now: float
) -> list[str]:
    given = NodeFacts(instance_type=config.instance_type, capacity_type=config.capacity_type, region=config.region)
    price = partial(
        read.price,
        node=config.node_name,
        facts=settled_facts(given, labelled or NodeFacts()),
        at_seconds=now,
        facts_complete=labelled is not None,
    )
    models = sorted({gpu.gpu.model for gpu in reading.gpus}) if reading else []
    return [model for model in models if price(model=model) is None]
