"""`prices`: reads price books and shows their rows."""

import argparse
from pathlib import Path

from exporter.cli.common import Parser, command, put, refuse, say, stdout
from exporter.config import price_book


def add_prices(parser: Parser) -> None:
    """Add the subcommands."""
    kinds = parser.add_subparsers(dest="about_prices", metavar="WHAT", required=True, parser_class=Parser)
    check = command(kinds, "check", "Read a price book and say what each row is for, or what is wrong with it.")
    check.add_argument("file", type=Path, metavar="FILE", help="YAML file (format: docs/cost.md)")
    check.set_defaults(run=_check_prices)
    listing = command(kinds, "list", "The bundled list prices, which hold where no price book has a matching row.")
    listing.set_defaults(run=_list_prices)


def _check_prices(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    book, mistakes = price_book.examine(price_book.read_book(namespace.file), str(namespace.file))
    if book.rows:
        with stdout() as stream:
            stream.writelines(f"{line}\n" for line in price_book.lines(book))
    for warning in book.warnings:
        say(f"warning: {warning}")
    refuse(mistakes)
    put(f"{namespace.file}: ok")
    return 0


def _list_prices(_namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    with stdout() as stream:
        stream.writelines(f"{line}\n" for line in price_book.lines(price_book.bundled()))
    return 0
