"""`store`: fills, closes, reopens and lists the store of closed days."""

# Imports inside functions keep `--help` and `--version` fast: SQLite and aiohttp take a second.
# ruff: noqa: PLC0415

import argparse
import re
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from exporter.cli.common import Commands, Parser, command, refuse
from exporter.config.prometheus_options import add_prometheus_options

_EPILOG = (
    "Exit code: 0; 1 if the store or Prometheus cannot be used, or close does not close its day; 2 for a wrong flag;"
    " 3 if backfill left a day, or something is wrong with the store. What is kept, and how: docs/cost.md."
)
_KEEP = re.compile(r"([1-9][0-9]{0,3})([dy])")


def add(commands: Commands) -> None:
    """Add the command and what it can do."""
    store = command(commands, "store", "The store of closed days: what a report shows of days that Prometheus forgot.")
    kinds = store.add_subparsers(dest="about_store", metavar="WHAT", required=True, parser_class=Parser)
    backfill = _one(kinds, "backfill", "Close every day that Prometheus still has and the store has not.", "backfill")
    backfill.add_argument(
        "--from", dest="from_day", type=day, metavar="DAY", help="first day [default: the oldest that Prometheus has]"
    )
    close = _one(kinds, "close", "Close one day; again, where it is closed already and there is a reason.", "close")
    close.add_argument("day", type=day, metavar="DAY", help="UTC date of a day that is over, as 2026-10-31")
    close.add_argument("--reason", default="", help="why a day that is closed is read again; its history will have it")
    for parser in (backfill, close):
        parser.add_argument(
            "--accept-gaps",
            action="store_true",
            help="close days of which hours were not recorded, and will not be"
            + ("; from 48 hours after their end" if parser is backfill else ", and take less than was closed before"),
        )
        add_prometheus_options(parser)
    reopen = _one(kinds, "reopen", "Have a closed day read again by serve or backfill; until then it holds.", "reopen")
    reopen.add_argument("day", type=day, metavar="DAY", help="UTC date, as 2026-10-31")
    reopen.add_argument("--reason", required=True, help="why; the day's history will have it")
    _one(kinds, "list", "Every closed day.", "show_days")
    history = _one(
        kinds, "history", "Every version of a closed day: when, by whom, why, and what it came to.", "history"
    )
    history.add_argument("day", type=day, metavar="DAY", help="UTC date, as 2026-10-31")
    _one(kinds, "check", "Read the whole store, and say what is wrong with it; changes nothing.", "check")
    _one(kinds, "vacuum", "Give free room back to the disk; brings an older store to this program's version.", "vacuum")
    prune = _one(kinds, "prune", "Delete days that are older than what is to be kept.", "prune")
    prune.add_argument("--keep", required=True, type=_keep, metavar="AGE", help="how long days are kept: 5y, 400d")
    prune.add_argument("--yes", action="store_true", help="delete; without it, what would be deleted is told")


def _one(kinds: Commands, name: str, about: str, function: str) -> Parser:
    parser = command(kinds, name, about)
    parser.epilog = _EPILOG
    parser.add_argument("--store", required=True, type=Path, metavar="FILE", help="the store")
    parser.set_defaults(run=partial(_run, function))
    return parser


def _run(function: str, namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    refuse(problems)
    from exporter.cli import store_work

    return int(getattr(store_work, function)(namespace))


def day(text: str) -> int:
    """Unix time at which the UTC day begins.

    Raises:
        argparse.ArgumentTypeError: It is no date.
    """
    try:
        if len(text) != len("2026-10-31"):
            raise ValueError  # noqa: TRY301 - told in the same words
        return int(datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise argparse.ArgumentTypeError(f"value '{text}' is not a date; allowed: 2026-10-31") from None


def _keep(text: str) -> int:
    match = _KEEP.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"value '{text}' is not an age; allowed: 5y, 400d")
    return int(match[1]) * (366 if match[2] == "y" else 1)
