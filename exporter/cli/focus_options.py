"""What a FOCUS file is to say that no ledger knows: its version, whose bill it is, and whether it is a restatement."""

import argparse

from exporter.cli.base import Parser

FOCUS_FLAGS = (
    "focus_version",
    "focus_billing_account",
    "focus_billing_account_name",
    "focus_provider",
    "focus_restated",
)
"""Of no other format."""
_MOST_CHARACTERS = 256


def add_focus_options(parser: Parser) -> None:
    """Add them."""
    focus = parser.add_argument_group("With --format focus (docs/focus.md)")
    focus.add_argument("--focus-version", choices=("1.2", "1.3", "1.4"), help="version of FOCUS [default: 1.4]")
    focus.add_argument(
        "--focus-billing-account", type=_name, metavar="ID", help="BillingAccountId of every row [default: on-prem]"
    )
    focus.add_argument(
        "--focus-billing-account-name", type=_name, metavar="NAME", help="BillingAccountName [default: none]"
    )
    focus.add_argument(
        "--focus-provider",
        type=_name,
        metavar="NAME",
        help="who provides the GPUs and would send an invoice: the provider columns of every row [default: Internal]",
    )
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
