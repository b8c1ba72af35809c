"""Implements `store`: fills, closes, reopens and lists the store of closed days."""

import argparse
import asyncio
import getpass
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from exporter.cli.common import Commands, Parser, alone, command
from exporter.cli.output import EXIT_PARTIAL, progress_bar, put, say
from exporter.config.prometheus_options import PrometheusSettings, add_prometheus_options, prometheus_settings
from exporter.cost.fleet_reading import PrometheusLedger
from exporter.cost.foot import HOUR
from exporter.cost.ledger import FleetLedger, LedgerSource
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.store import ALL_OF_A_DAY, HOURS_OF_A_DAY, DayStore, DayVersion, day_window
from exporter.cost.store_ledger import Closing, close_due_days
from exporter.cost.window import DAY_SECONDS, Window, last_recorded
from exporter.errors import ExporterError
from exporter.model.formatting import clean, decimal, moment, money_with_code, plural
from exporter.model.formatting import day as day_name

_EPILOG = (
    "Exit code: 0; 1 if the store or Prometheus cannot be used, or close does not close its day; 2 for a wrong flag;"
    " 3 if backfill left a day, or something is wrong with the store. What is kept, and how: docs/cost.md."
)
_KEEP = re.compile(r"([1-9][0-9]{0,3})([dy])")


def add_store(parser: Parser) -> None:
    """Add the subcommands."""
    kinds = parser.add_subparsers(dest="about_store", metavar="WHAT", required=True, parser_class=Parser)
    backfill = _one(kinds, "backfill", "Close every day that Prometheus still has and the store has not.", _backfill)
    close = _one(kinds, "close", "Close one day; again, where it is closed already and there is a reason.", _close)
    reopen = _one(kinds, "reopen", "Let serve or backfill read a closed day again; it stays valid until then.", _reopen)
    _one(kinds, "list", "Every closed day.", _show_days)
    history = _one(kinds, "history", "Every version of a closed day: time, author, reason and figures.", _history)
    _one(kinds, "check", "Check the whole store and show its problems; changes nothing.", _check)
    _one(kinds, "vacuum", "Return free space to the disk; brings an older store to this program's version.", _vacuum)
    prune = _one(kinds, "prune", "Delete days that are older than --keep.", _prune)
    for one in (close, reopen, history):
        one.add_argument("day", type=_day, metavar="DAY", help="UTC date, as 2026-10-31")
    backfill.add_argument(
        "--from", dest="from_day", type=_day, metavar="DAY", help="first day [default: the oldest that Prometheus has]"
    )
    close.add_argument("--reason", default="", help="why a day that is closed is read again; its history will have it")
    reopen.add_argument("--reason", required=True, help="why; the day's history will have it")
    for one, words, limits in (
        (backfill, "", "; from 48 hours after their end"),
        (close, "DAY ", ", and take less than was closed before"),
    ):
        one.usage = f"{one.prog} {words}--store FILE [OPTION ...]"
        gaps = f"close days of which hours were not recorded, and will not be{limits}"
        one.add_argument("--accept-gaps", action="store_true", help=gaps)
        add_prometheus_options(one)
    prune.add_argument("--keep", required=True, type=_keep, metavar="AGE", help="how long days are kept: 5y, 400d")
    prune.add_argument("--yes", action="store_true", help="delete; without it, what would be deleted is shown")


def _one(kinds: Commands, name: str, about: str, run: Callable[[argparse.Namespace], int]) -> Parser:
    parser = command(kinds, name, about)
    parser.epilog = _EPILOG
    parser.add_argument("--store", required=True, type=Path, metavar="FILE", help="the store")
    parser.set_defaults(run=alone(run))
    return parser


def _day(text: str) -> int:
    """Return the Unix time of the beginning of a UTC day.

    Raises:
        argparse.ArgumentTypeError: The text is not a date.
    """
    try:
        return int(datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).timestamp())
    except ValueError:
        raise argparse.ArgumentTypeError(f"value '{text}' is not a date; allowed: 2026-10-31") from None


def _keep(text: str) -> int:
    match = _KEEP.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"value '{text}' is not an age; allowed: 5y, 400d")
    return int(match[1]) * (366 if match[2] == "y" else 1)


def _backfill(namespace: argparse.Namespace) -> int:
    """Close every day that is due."""
    closing = asyncio.run(_closed_due(namespace, prometheus_settings(namespace, os.environ), time.time()))
    put(_days("closed", [day_name(day) for day in closing.closed]) if closing.closed else "no day closed")
    for left in closing.left:
        day = day_name(left.day_seconds)
        say(left.reason if day in left.reason else f"{day}: {left.reason}")
    return EXIT_PARTIAL if closing.left else 0


async def _closed_due(namespace: argparse.Namespace, settings: PrometheusSettings, now: float) -> Closing:
    with DayStore(namespace.store).writing(now) as store, progress_bar("Closing days") as show:
        async with PrometheusClient(settings) as client:
            source = PrometheusLedger(client)
            closing = await close_due_days(
                store,
                source,
                now,
                from_day=namespace.from_day,
                accept_gaps=namespace.accept_gaps,
                by=_closer(),
                progress=show,
            )
            if not closing.closed and not closing.left and not store.closed_days():
                await _refuse_nothing(source, now)
            return closing


async def _refuse_nothing(source: LedgerSource, now: float) -> None:
    """Raise an error if Prometheus has no ledger at all, but not if only its first day has not ended.

    Raises:
        ExporterError: Contains the cause, as far as Prometheus shows it.
    """
    end = last_recorded(now)
    lately = await source.ledger(Window(start_seconds=end - 2 * DAY_SECONDS, end_seconds=end), frozenset())
    if not any(chunk.lines or chunk.capacity_seconds for chunk in lately.chunks):
        why = "; ".join(lately.notes) or "nothing was recorded in the last two days"
        raise ExporterError(f"there is nothing to close: {why}")


def _close(namespace: argparse.Namespace) -> int:
    """Close one day, or close it again."""
    settings = prometheus_settings(namespace, os.environ)
    now = time.time()
    with DayStore(namespace.store).writing(now) as store:
        version = store.close_day(
            asyncio.run(_day_from(settings, namespace.day)),
            now=now,
            by=_closer(),
            reason=namespace.reason.strip(),
            accept_gaps=namespace.accept_gaps,
            accept_less=namespace.accept_gaps,
        )
    put(f"{day_name(namespace.day)} closed, version {version}")
    return 0


async def _day_from(settings: PrometheusSettings, day_seconds: int) -> FleetLedger:
    async with PrometheusClient(settings) as client:
        return await PrometheusLedger(client).ledger(day_window(day_seconds), ALL_OF_A_DAY)


def _reopen(namespace: argparse.Namespace) -> int:
    """Mark a day to be read and closed again."""
    DayStore(namespace.store).reopen(namespace.day, reason=namespace.reason, by=_closer(), now=time.time())
    put(f"{day_name(namespace.day)} reopened: serve or store backfill closes it again")
    return 0


def _show_days(namespace: argparse.Namespace) -> int:
    """Write a line for each closed day, and the missing days between them."""
    days = DayStore(namespace.store).closed_days()
    lines: list[str] = []
    due: int | None = None
    for day in days:
        start = day.window.start_seconds
        if due is not None and start > due:
            last = start - DAY_SECONDS
            lines.append(f"{day_name(due)}{f' to {day_name(last)}' if last > due else ''}  not closed")
        due = day.window.end_seconds
        notes = [f"version {day.version}"]
        notes += [f"{day.recorded_hours} of 24 hours"] if day.recorded_hours < HOURS_OF_A_DAY else []
        notes += ["simulated"] if day.simulated else []
        notes += [f"reopened: {clean(day.reopened)}"] if day.reopened else []
        lines.append(f"{day.window.label}  {', '.join(notes)}")
    put("\n".join((*lines, plural(len(days), "closed day"))))
    return 0


def _history(namespace: argparse.Namespace) -> int:
    """Write every version of a day."""
    versions = DayStore(namespace.store).restatements(namespace.day)
    if not versions:
        raise ExporterError(f"store: {day_name(namespace.day)} is not closed; see: gpu-cost-exporter store list")
    put("\n".join(line for version in versions for line in _lines(version)))
    return 0


def _lines(version: DayVersion) -> Iterator[str]:
    at = moment(version.closed_at_seconds)
    by = f" by {clean(version.closed_by)}" if version.closed_by else ""
    yield f"version {version.number}: closed {at}{by}, read from {clean(version.engine)}"
    if version.reason:
        yield f"  why: {clean(version.reason)}"
    figures = version.figures
    money = "".join(
        f", {money_with_code(money.total, code)} ({decimal(money.idle)} idle)"
        for code, money in sorted(figures.money.items())
    )
    hours = decimal(figures.seconds.total / HOUR, 1)
    yield f"  {version.lines} lines, {hours} GPU-hours{money}"
    few = {name: count for name, count in version.recorded_hours.items() if count < HOURS_OF_A_DAY}
    for name, count in sorted(few.items()):
        yield f"  {count} of 24 hours were recorded{f' of cluster {clean(name)}' if name else ''}"


def _check(namespace: argparse.Namespace) -> int:
    """Check the whole store."""
    problems = DayStore(namespace.store).check()
    for problem in problems:
        say(f"store: {namespace.store}: {problem}")
    if problems:
        return EXIT_PARTIAL
    put(f"{namespace.store}: ok")
    return 0


def _vacuum(namespace: argparse.Namespace) -> int:
    """Return free space to the disk."""
    path = namespace.store
    if not path.exists():
        raise ExporterError(f"store: there is no {path}; make it with: gpu-cost-exporter store backfill")
    with DayStore(path).writing(time.time()) as store:
        before = path.stat().st_size
        store.shrink()
        put(f"{path}: {before} bytes before, {path.stat().st_size} now")
    return 0


def _prune(namespace: argparse.Namespace) -> int:
    """Delete old days."""
    before = int(time.time()) // DAY_SECONDS * DAY_SECONDS - namespace.keep * DAY_SECONDS
    store = DayStore(namespace.store)
    old = [day.window.label for day in store.closed_days() if day.window.start_seconds < before]
    done = "would be deleted; add --yes to delete them"
    if old and namespace.yes:
        store.forget(before)
        done = "deleted"
    put(f"{_days('older', old)}: {done}" if old else f"no day is older than {day_name(before)}")
    return 0


def _days(what: str, names: Sequence[str]) -> str:
    """Return text such as ``3 days closed, 2026-10-01 to 2026-10-04``; days in between may be missing."""
    span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return f"{plural(len(names), 'day')} {what}, {span}"


def _closer() -> str:
    """Return the user and the machine that close a day, for its history."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user of a container may have no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
