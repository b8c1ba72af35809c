"""`focus`: the columns of a FOCUS version; also the options of `report --format focus`."""

import argparse

from exporter.cli.common import Parser, command, refuse, stdout
from exporter.cost.focus import DEFAULT_VERSION, VERSIONS, columns_of

_NAMES = (
    ("billing-account", "ID", "BillingAccountId of every row [default: on-prem]"),
    ("billing-account-name", "NAME", "BillingAccountName [default: none]"),
    (
        "provider",
        "NAME",
        "provider of the GPUs, which would send an invoice: the provider columns of every row [default: Internal]",
    ),
)
FOCUS_FLAGS = ("focus_version", *(f"focus_{name.replace('-', '_')}" for name, _, _ in _NAMES), "focus_restated")
"""Options of `report` that no other format has."""
_MOST_CHARACTERS = 256


def add_focus(parser: Parser) -> None:
    """Add the subcommand."""
    kinds = parser.add_subparsers(dest="about_focus", metavar="WHAT", required=True, parser_class=Parser)
    columns = command(kinds, "columns", "The columns of a version: what they hold, and which must be there.")
    columns.add_argument("--version", choices=VERSIONS, default=DEFAULT_VERSION, help="version [default: %(default)s]")
    columns.set_defaults(run=_columns)


def add_focus_options(parser: Parser) -> None:
    """Add the options of `report --format focus`: what no ledger knows."""
    focus = parser.add_argument_group("With --format focus (docs/focus.md)")
    focus.add_argument("--focus-version", choices=VERSIONS, help="version of FOCUS [default: 1.4]")
    for flag, metavar, about in _NAMES:
        focus.add_argument(f"--focus-{flag}", type=_name, metavar=metavar, help=about)
    focus.add_argument(
        "--focus-restated",
        action="store_const",
        const=True,
        help="the period was exported before: its charges are corrections (ChargeClass)",
    )


def _name(text: str) -> str:
    name = text.strip()
    if not name or not name.isprintable() or len(name) > _MOST_CHARACTERS:
        raise argparse.ArgumentTypeError(
            f"value {text[:40]!r} is no name; allowed: 1 to {_MOST_CHARACTERS} characters in one line"
        )
    return name


def _columns(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    with stdout() as stream:
        for column in columns_of(namespace.version).values():
            null = "may be null" if column.nullable else "never null"
            allowed = f": {', '.join(column.allowed)}" if column.allowed else ""
            stream.write(f"{column.name:<38}{column.level:<13}{column.kind:<10}{null}{allowed}\n")
    return 0
