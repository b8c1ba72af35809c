"""`prices`: reads price books and shows their rows."""

# Imports inside functions keep `--help` and `--version` fast: gRPC, aiohttp and the driver's binding take a second.
# ruff: noqa: PLC0415

import argparse
from pathlib import Path

from exporter.cli.common import Commands, Parser, command, put, refuse, say, stdout


def add(commands: Commands) -> None:
    """Add the command and what it can do."""
    parser = command(commands, "prices", "Price books: what an hour of a GPU costs.")
    kinds = parser.add_subparsers(dest="about_prices", metavar="WHAT", required=True, parser_class=Parser)
    check = command(kinds, "check", "Read a price book and say what each row is for, or what is wrong with it.")
    check.add_argument("file", type=Path, metavar="FILE", help="YAML file (format: docs/cost.md)")
    check.set_defaults(run=_check_prices)
    listing = command(kinds, "list", "The bundled list prices, which hold where no price book has a matching row.")
    listing.set_defaults(run=_list_prices)


def _check_prices(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    from exporter.config import price_book

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
    from exporter.config import price_book

    with stdout() as stream:
        stream.writelines(f"{line}\n" for line in price_book.lines(price_book.bundled()))
    return 0
