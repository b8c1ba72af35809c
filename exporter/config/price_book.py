"""Reads price books: the user's YAML file, with all its mistakes at once, and the bundled list prices behind it."""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from itertools import islice, pairwise
from pathlib import Path

import yaml

from exporter.accounting.pricing import Match, PriceBook, PriceRow, overlaps
from exporter.config.currencies import CURRENCIES
from exporter.config.gpu_models import KNOWN_MODELS
from exporter.config.price_rows import BookHead, ReadRow, moment, read_row
from exporter.config.yaml_fields import Fields, compose
from exporter.errors import ConfigError
from exporter.model import NodeFacts

BUNDLED_NAME = "list-prices"
OFF = Path("none")
_MOST_BYTES, _MOST_ROWS, _LEAST_PART = 8 * 1024 * 1024, 20_000, 1e-9
_MOST_OVERLAPS = 100
_DAY_SECONDS = 86_400
# Helm and other tools read YAML's on and off as truth, and write them back as that.
_ON, _OFF = frozenset({"on", "true"}), frozenset({"off", "false"})


def load(path: Path | None) -> PriceBook:
    """The price book of a file, of which the bundled list prices are the fallback.

    Args:
        path: The file; ``None`` for the list prices alone, ``Path("none")`` for no prices at all.

    Raises:
        ConfigError: With all mistakes at once: file, line, row, key, what is wrong and what is allowed.
    """
    if path is None:
        return PriceBook(name=BUNDLED_NAME, currency=bundled().currency, fallback=bundled())
    if path == OFF:
        return PriceBook()
    return parse(read_text(path), str(path))


@cache
def bundled() -> PriceBook:
    """The list prices that come with this program."""
    text = files("exporter.config").joinpath("prices.yaml").read_text(encoding="utf-8")
    return parse(text, "prices.yaml", name=BUNDLED_NAME)


def parse(text: str, path: str, *, name: str = "") -> PriceBook:
    """A price book from its text; ``path`` is for messages, and the book's name unless there is another.

    Raises:
        ConfigError: With all mistakes at once.
    """
    book, problems = examine(text, path, name=name)
    if problems:
        raise ConfigError(*problems)
    return book


def examine(text: str, path: str, *, name: str = "") -> tuple[PriceBook, tuple[str, ...]]:
    """What is right in a price book, and its mistakes, one line each; with a mistake the book is only to be shown."""
    root, problem = compose(text, path)
    if problem:
        return PriceBook(), (problem,)
    if not isinstance(root, yaml.MappingNode):
        return PriceBook(), (f"{path}:1: not a price book; allowed: currency and rows (see docs/cost.md)",)
    problems: list[str] = []
    top = Fields(root, path, "", problems)
    currency = top.take_choice("currency", CURRENCIES, "an ISO 4217 code such as USD or EUR", needed=True)
    gpu_part = top.take_number("gpu_part", "more than 0, at most 1", _LEAST_PART, 1)
    list_prices = top.take_choice("list_prices", _ON | _OFF, "on, off")
    head = BookHead(
        name=name or Path(path).name,
        currency=currency or "",
        gpu_part=1.0 if gpu_part is None else gpu_part,
    )
    found, lines = _rows(top, head)
    top.finish()
    problems += _overlaps(tuple(read.row for read in found), lines, path)
    rows = tuple(read.row for read in found if read.right)
    book = PriceBook(
        name=head.name,
        currency=head.currency,
        gpu_part=head.gpu_part,
        rows=rows,
        fallback=None if name or list_prices in _OFF else bundled(),
        warnings=_warnings(rows, lines, path),
    )
    return book, tuple(problems)


def read_text(path: Path) -> str:
    """The text of a price book's file.

    Raises:
        ConfigError: Where it cannot be read.
    """
    where = f"price-book: cannot read {path}"
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ConfigError(f"price-book: {path} is larger than {_MOST_BYTES >> 20} MiB; give a price book")
        return content.decode()
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}; allowed: a readable YAML file, or none") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not UTF-8 text; allowed: a YAML file, or none") from None


def _rows(top: Fields, head: BookHead) -> tuple[list[ReadRow], dict[int, int]]:
    """The rows as far as they could be read, and the line of each row by its number."""
    node = top.take("rows")
    if not isinstance(node, yaml.SequenceNode) or not 0 < len(node.value) <= _MOST_ROWS:
        top.problem("rows", f"missing, empty, no list or too long; allowed: a list of 1 to {_MOST_ROWS} prices")
        return [], {}
    found: list[ReadRow] = []
    lines: dict[int, int] = {}
    for number, item in enumerate(node.value, start=1):
        lines[number] = item.start_mark.line + 1
        if not isinstance(item, yaml.MappingNode):
            top.problems.append(f"{top.path}:{lines[number]}: row {number}: not a mapping; allowed: keys with values")
            continue
        read = read_row(Fields(item, top.path, f"row {number}: ", top.problems), number, head)
        if read is not None:
            found.append(read)
    return found, lines


def _overlaps(rows: tuple[PriceRow, ...], lines: dict[int, int], path: str) -> list[str]:
    told = [
        f"{path}:{lines[later.number]}: row {later.number}: rows {earlier.number} and {later.number} overlap"
        f" {_period(start, end)}: both can match {_meeting(earlier.match, later.match)} and neither is more specific;"
        " give one of them an end, or one more key"
        for earlier, later, start, end in islice(overlaps(rows, KNOWN_MODELS), _MOST_OVERLAPS)
    ]
    if len(told) == _MOST_OVERLAPS:
        told.append(f"{path}: there may be more overlaps than these {_MOST_OVERLAPS}; mend them and check again")
    return told


def _period(start: float, end: float) -> str:
    first, last = moment(start), moment(end)
    return "at all times" if first == last == "always" else f"from {first} to {last}"


def _meeting(one: Match, other: Match) -> str:
    common = (mine or theirs for mine, theirs in zip(one.keys, other.keys, strict=True))
    node, instance_type, capacity_type, region, model = common
    both = Match(node=node, instance_type=instance_type, capacity_type=capacity_type, region=region, model=model)
    return both.description


def _warnings(rows: tuple[PriceRow, ...], lines: dict[int, int], path: str) -> tuple[str, ...]:
    told: list[str] = []
    for row in rows:
        at = f"{path}:{lines[row.number]}: row {row.number}"
        only_model = Match(model=row.match.model)
        if not any(only_model.matches(model=model, node="", facts=NodeFacts()) for model in KNOWN_MODELS):
            told.append(f"{at}: model: '{row.match.model}' matches no GPU name known here; compare with: nvidia-smi -L")
        if row.price.per_hour == 0 and row.price.per_kwh == 0:
            told.append(f"{at}: the price is 0: what matches it costs nothing")
    return (*told, *_names_twice(rows, lines, path), *_gaps(rows, lines, path))


def _names_twice(rows: tuple[PriceRow, ...], lines: dict[int, int], path: str) -> Iterator[str]:
    """Names that do not tell by which row was charged."""
    first: dict[str, PriceRow] = {}
    for row in rows:
        earlier = first.setdefault(row.price.source, row)
        if earlier is not row:
            name = row.price.source.rpartition(":")[2]
            at = f"{path}:{lines[row.number]}: row {row.number}"
            yield f"{at}: name: '{name}' is row {earlier.number}'s, too; with names of their own bills tell them apart"


def _gaps(rows: tuple[PriceRow, ...], lines: dict[int, int], path: str) -> Iterator[str]:
    """Up to a day between two rows for the same in which neither holds: a last day taken for the end."""
    alike: dict[Match, list[PriceRow]] = {}
    for row in rows:
        alike.setdefault(row.match, []).append(row)
    for group in alike.values():
        for earlier, later in pairwise(sorted(group, key=lambda row: row.from_seconds)):
            if earlier.to_seconds < later.from_seconds <= earlier.to_seconds + _DAY_SECONDS:
                end, start = moment(earlier.to_seconds), moment(later.from_seconds)
                yield (
                    f"{path}:{lines[earlier.number]}: row {earlier.number}: to: neither this row nor row {later.number}"
                    f" holds from {end} to {start}; 'to' is the first moment without the row: to: {start} leaves no gap"
                )
