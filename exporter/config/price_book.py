"""Reads price books: the user's YAML file, with all its mistakes at once, and the bundled list prices."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from itertools import islice, pairwise
from math import inf, nan
from pathlib import Path

from exporter.accounting.prices import Match, OnPrem, PriceBook, PricedGpu, PriceRow, overlaps
from exporter.config.types import CURRENCIES
from exporter.config.yaml_file import Fields, fields_of, read_text
from exporter.errors import ConfigError
from exporter.model.formatting import plural
from exporter.model.ledger import Price

_FILES = files("exporter.config")
KNOWN_MODELS = tuple(_FILES.joinpath("known_models.txt").read_text(encoding="utf-8").splitlines())
"""Names of GPUs in NVIDIA's driver."""
CAPACITY_TYPES = ("on-demand", "spot", "reserved")
WAYS = ("per_gpu_hour", "node_hour", "on_prem")
_MOST, _MOST_GPUS = 1e12, 1024
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_DATE_ALLOWED = "2026-01-31, or a time with its zone such as 2026-01-31T12:00:00Z"
_NOT_NEGATIVE = "0 or more"
_TINY = 1e-12


_ReadRow = tuple[PriceRow, bool]
"""A row with the values that could be read, and whether it is valid; an invalid row is only compared with others."""


def _row(fields: Fields, number: int, head: PriceBook) -> _ReadRow | None:
    """Return a row, or ``None`` if its match or time cannot be read; add each mistake to the problems."""
    before = len(fields.problems)
    match = Match(
        node=fields.take_text("node") or "",
        instance_type=fields.take_text("instance_type") or "",
        capacity_type=fields.take_choice("capacity_type", CAPACITY_TYPES, ", ".join(CAPACITY_TYPES)) or "",
        region=fields.take_text("region") or "",
        model=fields.take_text("model") or "",
    )
    start, end = _time(fields, "from", -inf), _time(fields, "to", inf)
    if end <= start:
        fields.problem("to", f"not after from; allowed: a time after {moment(start)}")
    comparable = len(fields.problems) == before
    name = fields.take_text("name") or str(number)
    per_hour, per_kwh = _rate(fields, head.gpu_part)
    source = fields.take_text("source", "where the price comes from, such as a list or a contract", needed=True)
    as_of = _day(fields)
    fields.finish()
    if not comparable:
        return None
    row = PriceRow(
        number=number,
        match=match,
        price=Price(
            per_hour=per_hour, per_kwh=per_kwh, currency=head.currency, source=f"{head.name}:{name}", as_of=as_of
        ),
        from_seconds=start,
        to_seconds=end,
        source=source or "",
    )
    return row, len(fields.problems) == before


def moment(seconds: float) -> str:
    """Return a Unix time in the format of a price book: a date for midnight UTC, ``always`` for no bound."""
    if abs(seconds) == inf:
        return "always"
    at = datetime.fromtimestamp(seconds, UTC)
    return at.date().isoformat() if seconds % 86_400 == 0 else at.isoformat().replace("+00:00", "Z")


def _rate(fields: Fields, gpu_part: float) -> tuple[float, float]:
    """Return the cost of a GPU per hour, NaN if it is not given, and per kWh."""
    given = [way for way in WAYS if way in fields]
    if len(given) != 1:
        words = f"{' and '.join(given)} are given" if given else "missing"
        fields.problem(given[1] if given else "price", f"{words}; allowed: one of {', '.join(WAYS)}")
    per_gpu = fields.take_number("per_gpu_hour", _NOT_NEGATIVE, 0, _MOST)
    per_node = fields.take_number("node_hour", _NOT_NEGATIVE, 0, _MOST)
    gpus = _gpus(fields, needed="node_hour" in fields)
    if gpus is not None and "node_hour" not in fields:
        fields.problem("gpus", "belongs to node_hour, which is not given; take it out")
    on_prem = fields.take_mapping("on_prem")
    owned = _on_prem(on_prem) if on_prem else None
    if len(given) == 1:
        if per_gpu is not None:
            return per_gpu, 0.0
        if per_node is not None and gpus is not None:
            return per_node * gpu_part / gpus, 0.0
        if owned is not None:
            return owned.per_gpu_hour(gpu_part), owned.per_measured_kwh
    return nan, 0.0


def _gpus(fields: Fields, *, needed: bool) -> int | None:
    allowed = f"the physical GPUs of the node, 1 to {_MOST_GPUS}"
    value = fields.take_number("gpus", allowed, 1, _MOST_GPUS, needed=needed)
    if value is None or value == int(value):
        return None if value is None else int(value)
    fields.problem("gpus", f"'{value:g}' is not a whole number; allowed: {allowed}")
    return None


def _on_prem(fields: Fields) -> OnPrem | None:
    before = len(fields.problems)
    capex = fields.take_number("capex", _NOT_NEGATIVE, 0, _MOST, needed=True)
    years = fields.take_number("years", "more than 0, at most 50", _TINY, 50, needed=True)
    gpus = _gpus(fields, needed=True)
    measured = fields.take_switch("measured_energy")
    if measured and "kw_per_gpu" in fields:
        fields.problem("kw_per_gpu", "given with measured_energy: true, so that energy would be paid twice; keep one")
    power = fields.take_number("kw_per_gpu", _NOT_NEGATIVE, 0, 1000, needed=not measured)
    pue = fields.take_number("pue", "1 to 10", 1, 10)
    per_kwh = fields.take_number("per_kwh", _NOT_NEGATIVE, 0, _MOST, needed=True)
    opex = fields.take_number("opex_per_year", _NOT_NEGATIVE, 0, _MOST)
    target = fields.take_number("target_availability", "more than 0, at most 1", _TINY, 1)
    fields.finish()
    if len(fields.problems) > before or capex is None or years is None or gpus is None or per_kwh is None:
        return None
    return OnPrem(
        capex=capex,
        years=years,
        gpus=gpus,
        kw_per_gpu=None if measured else power,
        pue=1.0 if pue is None else pue,
        per_kwh=per_kwh,
        opex_per_year=opex or 0.0,
        target_availability=1.0 if target is None else target,
    )


def _time(fields: Fields, key: str, default: float) -> float:
    text = fields.take_text(key, _DATE_ALLOWED)
    at = _moment(text) if text else None
    if at and at.tzinfo:
        return at.timestamp()
    if text:
        wrong = "a time without its zone" if at else "not a date"
        fields.problem(key, f"'{text}' is {wrong}; allowed: {_DATE_ALLOWED}")
    return default


def _moment(text: str) -> datetime | None:
    """Return the time of a text; a date means midnight UTC."""
    try:
        at = datetime.fromisoformat(text)
        return at.replace(tzinfo=UTC) if _DATE.fullmatch(text) else at.astimezone(UTC) if at.tzinfo else at
    except (ValueError, OverflowError):  # OverflowError: in UTC it is before year 1 or after year 9999
        return None


def _day(fields: Fields) -> str:
    text = fields.take_text("as_of", "the day of the source, such as 2026-01-31", needed=True) or ""
    if text and not (_DATE.fullmatch(text) and _moment(text)):
        fields.problem("as_of", f"'{text}' is not a day; allowed: such as 2026-01-31")
    return text


BUNDLED_NAME = "list-prices"
OFF = Path("none")
_MOST_ROWS, _LEAST_PART = 20_000, 1e-9
_MOST_OVERLAPS = 100
_DAY_SECONDS = 86_400
# Helm and other tools read YAML's on and off as booleans, and write true and false.
_ON, _OFF = frozenset({"on", "true"}), frozenset({"off", "false"})


def load(path: Path | None) -> PriceBook:
    """Return the price book of a file, with the bundled list prices as its fallback.

    Args:
        path: The file; ``None`` for the list prices only, ``Path("none")`` for no prices.

    Raises:
        ConfigError: Lists all mistakes, each with file, line, row, key and allowed values.
    """
    if path is None:
        return PriceBook(name=BUNDLED_NAME, currency=bundled().currency, fallback=bundled())
    if path == OFF:
        return PriceBook()
    return parse(read_book(path), str(path))


@cache
def bundled() -> PriceBook:
    """Return the list prices that are part of the program."""
    text = _FILES.joinpath("prices.yaml").read_text(encoding="utf-8")
    return parse(text, "prices.yaml", name=BUNDLED_NAME)


def parse(text: str, path: str, *, name: str = "") -> PriceBook:
    """Parse a price book; ``path`` is for messages, and is the book's name if ``name`` is empty.

    Raises:
        ConfigError: Lists all mistakes.
    """
    book, problems = examine(text, path, name=name)
    if problems:
        raise ConfigError(*problems)
    return book


def examine(text: str, path: str, *, name: str = "") -> tuple[PriceBook, tuple[str, ...]]:
    """Return the valid rows of a price book, and its mistakes, one line each. Use an invalid book only for display."""
    try:
        wrong = "not a price book; allowed: currency and rows (see docs/cost.md)"
        top = fields_of(text, path, wrong, is_ours=bool(name))
    except ConfigError as error:
        return PriceBook(), error.problems
    currency = top.take_choice("currency", CURRENCIES, "an ISO 4217 code such as USD or EUR", needed=True)
    gpu_part = top.take_number("gpu_part", "more than 0, at most 1", _LEAST_PART, 1)
    list_prices = top.take_choice("list_prices", _ON | _OFF, "on, off")
    head = PriceBook(
        name=name or Path(path).name,
        currency=currency or "",
        gpu_part=1.0 if gpu_part is None else gpu_part,
    )
    found: list[_ReadRow] = []
    places: _Places = {}
    for number, fields in enumerate(top.take_mappings("rows", "prices", "row", _MOST_ROWS), start=1):
        if read := _row(fields, number, head):
            found.append(read)
            places[number] = f"{fields.place_of('')}: row {number}"
    top.finish()
    top.problems += _overlaps(tuple(row for row, _ in found), places, path)
    rows = tuple(row for row, is_right in found if is_right)
    fallback = None if name or list_prices in _OFF else bundled()
    return replace(head, rows=rows, fallback=fallback, warnings=tuple(_warnings(rows, places))), tuple(top.problems)


def read_book(path: Path) -> str:
    """Return the text of a price book's file.

    Raises:
        ConfigError: The file cannot be read.
    """
    return read_text(path, "price-book", "a price book", "allowed: a readable YAML file, or none", most_mib=8)


_Places = dict[int, str]
"""File, line and number of each row, by its number."""


def _overlaps(rows: tuple[PriceRow, ...], places: _Places, path: str) -> list[str]:
    problems = [
        f"{places[later.number]}: rows {earlier.number} and {later.number} overlap"
        f" {_period(start, end)}: both can match {_meeting(earlier.match, later.match)} and neither is more specific;"
        " give one of them an end, or one more key"
        for earlier, later, start, end in islice(overlaps(rows, KNOWN_MODELS), _MOST_OVERLAPS)
    ]
    if len(problems) == _MOST_OVERLAPS:
        problems.append(f"{path}: there may be more overlaps than these {_MOST_OVERLAPS}; fix them and check again")
    return problems


def _period(start: float, end: float) -> str:
    first, last = moment(start), moment(end)
    return "at all times" if first == last == "always" else f"from {first} to {last}"


def _meeting(one: Match, other: Match) -> str:
    return Match(*(mine or theirs for mine, theirs in zip(one, other, strict=True))).description


def _warnings(rows: Sequence[PriceRow], places: _Places) -> Iterator[str]:
    """Yield warnings about accepted values that may be mistakes."""
    for row in rows:
        if not _models(row):
            model = row.match.model
            yield f"{places[row.number]}: model: '{model}' matches no GPU name known here; compare with: nvidia-smi -L"
        if row.price.per_hour == 0 and row.price.per_kwh == 0:
            yield f"{places[row.number]}: the price is 0: what matches it costs nothing"
    first: dict[str, PriceRow] = {}
    for row in rows:
        earlier = first.setdefault(row.price.source, row)
        if earlier is not row:
            name = row.price.source.rpartition(":")[2]
            same = f"'{name}' is row {earlier.number}'s, too; with different names bills distinguish them"
            yield f"{places[row.number]}: name: {same}"
    yield from _gaps(rows, places)


def _gaps(rows: Sequence[PriceRow], places: _Places) -> Iterator[str]:
    """Yield gaps of up to a day between rows with the same match; the user may have meant to include the last day."""
    alike: dict[Match, list[PriceRow]] = {}
    for row in rows:
        alike.setdefault(row.match, []).append(row)
    for group in alike.values():
        for earlier, later in pairwise(sorted(group, key=lambda row: row.from_seconds)):
            if earlier.to_seconds < later.from_seconds <= earlier.to_seconds + _DAY_SECONDS:
                end, start = moment(earlier.to_seconds), moment(later.from_seconds)
                yield (
                    f"{places[earlier.number]}: to: neither this row nor row {later.number}"
                    f" holds from {end} to {start}; 'to' is the first moment without the row: to: {start} leaves no gap"
                )


def lines(book: PriceBook) -> Iterator[str]:
    """Yield the book's head, a line for each valid row, and the numbered sources."""
    rows, currency = plural(len(book.rows), "row"), book.currency or "no currency"
    yield f"{book.name}: {rows}, {currency}; GPUs are {book.gpu_part:.0%} of a node's price"
    sources = [f"{row.source}; as of {row.price.as_of}" for row in book.rows]
    numbers = {source: f"[{number}]" for number, source in enumerate(dict.fromkeys(sources), start=1)}
    prices, periods = [_price_text(row) for row in book.rows], [_period_text(row) for row in book.rows]
    columns = ([row.price.source for row in book.rows], prices, periods, [numbers[source] for source in sources])
    widths = [max(map(len, column), default=0) for column in columns]
    for row, (name, price, *cells) in zip(book.rows, zip(*columns, strict=True), strict=True):
        padded = [f"{name:<{widths[0]}}", f"{price:>{widths[1]}}", *map(str.ljust, cells, widths[2:])]
        yield "  ".join(("", *filter(None, padded), f"{row.match.description}{_known(row)}"))
    for source, number in numbers.items():
        yield f"  {number:<{widths[-1]}}  {source}"
    if book.fallback is not None:
        yield f"  what no row matches: {book.fallback.name} (see: gpu-cost-exporter prices list), marked as fallback"
    elif book.name != "list-prices":
        yield "  what no row matches has no price"


def _price_text(row: PriceRow) -> str:
    energy = f" + {row.price.per_kwh:.4g}/kWh" if row.price.per_kwh else ""
    return f"{row.price.per_hour:.4f} {row.price.currency}/GPU-hour{energy}"


def _period_text(row: PriceRow) -> str:
    start = "" if row.from_seconds == -inf else f"from {moment(row.from_seconds)}"
    end = "" if row.to_seconds == inf else f"until {moment(row.to_seconds)}"
    return " ".join(part for part in (start, end) if part)


def _known(row: PriceRow) -> str:
    """Return the known models that match a row's pattern, as text; empty without a pattern."""
    return f" ({', '.join(_models(row)) or 'none known'})" if set(row.match.model) & set("*?") else ""


def _models(row: PriceRow) -> list[str]:
    pattern = Match(model=row.match.model)
    return [model for model in KNOWN_MODELS if pattern.matches(PricedGpu(model))]
