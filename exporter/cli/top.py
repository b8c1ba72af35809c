"""Implements `top`: GPUs with holders, activity, idle time and cost, live or once; of one agent or of a fleet."""

import argparse
import asyncio
import json
import os
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from exporter.cli.common import Parser, of_kind, refuse
from exporter.cli.output import EXIT_PARTIAL, say, stdout
from exporter.config import types
from exporter.config.prometheus_options import ADDRESS, add_prometheus_options, prometheus_settings
from exporter.cost import agent_client
from exporter.cost.live import LiveRow, Picture, agent_picture, fleet_picture
from exporter.cost.prometheus import PrometheusClient
from exporter.cost.render import console_for
from exporter.errors import ExporterError
from exporter.model.formatting import amounts, clean, duration, percent, plural, summed
from exporter.model.formatting import model as short_model

Read: TypeAlias = Callable[[], Awaitable[Picture]]
DEFAULT_AGENT = "http://localhost:9400"
_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 16
_KEYS = "q quit   s sort   r reverse   / filter   Esc clear"
_BACKSPACES = ("\x7f", "\b")


def holder(row: LiveRow) -> str:
    """Return the holder as text, ``namespace/pod``, or the reason why there is none."""
    if row.pod is None:
        return {"unallocated": "(free)", "unknown": "(holder unknown)"}.get(row.state, f"({row.state})")
    return clean("/".join(filter(None, (row.namespace, row.pod))))


def owner(row: LiveRow) -> str:
    """Return the workload as text, ``Kind/name``; empty if it is unknown."""
    return clean("/".join(filter(None, (row.owner_kind, row.owner_name))))


def _words(row: LiveRow) -> str:
    """Return the text that filters search."""
    parts = (row.cluster, row.node, holder(row), owner(row), row.team, row.model, row.mig_profile, row.state)
    return " ".join(filter(None, parts)).lower()


def device(row: LiveRow) -> str:
    """Return the device as text: ``3``, ``4 2g.20gb #3``, or ``6 25 %`` for a shared GPU."""
    share = row.gpu_share_ratio
    part = f"#{row.gpu_instance}" if row.gpu_instance else ""
    shared = percent(share) if share is not None and share < 1 and not row.mig_profile else ""
    return clean(" ".join(filter(None, (row.gpu_index, row.mig_profile, part, shared))))


def _activity(row: LiveRow) -> str:
    if row.state not in {"allocated", "unallocated", "unknown"}:
        return row.state.replace("_", " ")
    if row.activity_ratio is None:
        return "free" if row.state == "unallocated" else "not measured"
    return percent(row.activity_ratio)


def _measured(row: LiveRow) -> float:
    """Return the activity for sorting from low to high; unknown comes after full."""
    return 2.0 if row.activity_ratio is None else row.activity_ratio


def _seconds(value: float | None) -> str:
    return "" if value is None else duration(value)


COLUMNS: Mapping[str, Callable[[LiveRow], str]] = {
    "Cluster": lambda row: clean(row.cluster or ""),
    "Node": lambda row: clean(row.node),
    "GPU": device,
    "Model": lambda row: clean(short_model(row.model or "")),
    "Holder": holder,
    "Owner": owner,
    "Team": lambda row: clean(row.team or ""),
    "Activity": _activity,
    "Idle for": lambda row: _seconds(row.idle_for_seconds) if (row.idle_for_seconds or 0.0) >= 1 else "",
    "Held for": lambda row: _seconds(row.age_seconds),
    "Per hour": lambda row: amounts(row.cost_per_hour),
}
"""Functions that return the text of a row, by title of the column."""
_RIGHT = frozenset({"Activity", "Idle for", "Held for", "Per hour"})
_NAMES = frozenset({"Cluster", "Node", "Model", "Holder", "Owner", "Team"})
"""Columns that a narrow terminal shortens."""
_TOP = ("Cluster", "Node", "GPU", "Holder", "Owner", "Team", "Activity", "Idle for", "Per hour")
_ONLY_IF_SEVERAL = ("Cluster", "Node", "Model")
_ONLY_IF_KNOWN = ("Team", "Owner", "Per hour")

SORTS: Mapping[str, Callable[[LiveRow], Any]] = {
    "waste": lambda row: (
        row.pod is None,
        not row.is_idle,
        *(-value for value in row.waste),
        _measured(row),
    ),
    "activity": lambda row: (row.activity_ratio is None, -_measured(row)),
    "idle": lambda row: (row.idle_for_seconds is None, -(row.idle_for_seconds or 0.0)),
    "cost": lambda row: -sum(row.cost_per_hour.values()),
    "gpu": lambda row: (row.cluster or "", row.node, row.gpu_index.zfill(4), (row.gpu_instance or "").zfill(4)),
    "owner": lambda row: (row.pod is None, row.team or "", row.namespace or "", row.owner_name or "", row.pod or ""),
}


def arranged(rows: Iterable[LiveRow], sort: str, words: str = "", *, reverse: bool = False) -> list[LiveRow]:
    """Return the rows that contain all of the words, sorted by a name in ``SORTS``."""
    wanted = words.lower().split()
    kept = [row for row in rows if all(word in _words(row) for word in wanted)]
    return sorted(sorted(kept, key=SORTS["gpu"]), key=SORTS[sort], reverse=reverse)


History: TypeAlias = Mapping[tuple[str | None, ...], Sequence[float | None]]


def table(rows: Sequence[LiveRow], titles: Sequence[str] = _TOP, history: History | None = None) -> Table:
    """Return the rows as a table without uniform columns; ``history`` adds a chart next to the activity."""
    texts = {title: [COLUMNS[title](row) for row in rows] for title in titles}
    left_out = {title for title in _ONLY_IF_SEVERAL if len(set(texts.get(title, ()))) == 1}
    left_out |= {title for title in _ONLY_IF_KNOWN if not any(texts.get(title, ()))}
    shown = [title for title in titles if title not in left_out]
    made = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in shown:
        least = None if title in _NAMES else max(map(cell_len, (title, *texts[title])))
        justify: Literal["right", "left"] = "right" if title in _RIGHT else "left"
        made.add_column(title, justify=justify, min_width=least, no_wrap=True, overflow="ellipsis")
        if title == "Activity" and history is not None:
            made.add_column("", no_wrap=True, width=_SPARKS)
    for number, row in enumerate(rows):
        cells = []
        for title in shown:
            cells.append(Text(texts[title][number]))
            if title == "Activity" and history is not None:
                cells.append(Text(sparkline(history.get(row.key, ())), style="cyan"))
        made.add_row(*cells, style="yellow" if row.is_idle else "dim" if row.pod is None else "")
    return made


def sparkline(values: Iterable[float | None]) -> str:
    """Return a bar per value, 0..1; a blank for a value that was not measured."""
    last = len(_BARS) - 1
    return "".join(" " if one is None else _BARS[min(last, int(one * len(_BARS)))] for one in values)


def summary(picture: Picture) -> str:
    """Return one line with counts and money."""
    if not picture.rows:
        return "no GPU"
    held = [row for row in picture.rows if row.pod is not None]
    idle, free = [row for row in held if row.is_idle], sum(row.state == "unallocated" for row in picture.rows)
    nodes = len({(row.cluster, row.node) for row in picture.rows})
    where = clean(picture.rows[0].node) if nodes == 1 else plural(nodes, "node")
    money = [f"{amounts(total)}/h{words}" for total, words in ((sums(held), " held"), (sums(idle), " idle")) if total]
    parts = (where, plural(len(held), "holder"), f"{len(idle)} idle", f"{free} free", *money)
    return ("SIMULATED  " if picture.simulated else "") + " · ".join(parts)


def sums(rows: Iterable[LiveRow]) -> dict[str, float]:
    """Return money per hour by currency."""
    return summed(item for row in rows for item in row.cost_per_hour.items())


def document_of(picture: Picture, rows: Iterable[LiveRow], now: float) -> dict[str, Any]:
    """Return the rows as JSON values; ``null`` is unknown, never 0."""
    return {
        "taken_at_seconds": now,
        "simulated": picture.simulated,
        "problems": list(picture.problems),
        "rows": [
            {
                **asdict(row),
                "cost_per_hour": [{"currency": key, "cost": one} for key, one in sorted(row.cost_per_hour.items())],
            }
            for row in rows
        ],
    }


def add_top(parser: Parser) -> None:
    """Add the flags."""
    parser.usage = f"{parser.prog} [--agent URL | --prometheus URL] [OPTION ...]"
    parser.epilog = f"{EPILOG} Activity is the holder's part of the device's; a row is idle after two minutes."
    where = parser.add_argument_group("Source: one of these, or --prometheus (below)")
    where.add_argument("--agent", metavar="URL", help=f"address of one node's agent [default: {DEFAULT_AGENT}]")
    add_view_options(parser)
    agent_client.add_agent_access(parser)
    add_prometheus_options(parser)
    parser.set_defaults(run=_top)


EPILOG = (
    f"Keys of the live view: {', '.join(_KEYS.split('   '))}. Without a terminal it is printed once. Exit code: 0; 1 if"
    " nothing can be read; 2 for a wrong flag; 3 if a part could not be read."
)


def add_view_options(parser: Parser) -> None:
    """Add the flags of the view, which the kubectl plugin has as well."""
    view = parser.add_argument_group("View")
    view.add_argument("--once", action="store_true", help="print a table once instead of the live view")
    view.add_argument("--json", action="store_true", help="print JSON once")
    view.add_argument("--sort", choices=tuple(SORTS), default="waste", help="order of the rows [default: waste]")
    view.add_argument("--filter", default="", metavar="TEXT", help="only rows with these words, in any column")
    view.add_argument(
        "--interval",
        type=of_kind(types.duration(0.5, 3600)),
        default=2.0,
        metavar="DURATION",
        help="between reads [default: 2s]",
    )


def _top(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    fleet = bool(namespace.prometheus or (os.environ.get(ADDRESS.env) and namespace.agent is None))
    given = list(agent_client.access_problems(namespace, of_an_agent=not fleet))
    if namespace.agent is not None and namespace.prometheus:
        given.append("--agent: shows one node, --prometheus a fleet; leave out one of them")
    refuse((*problems, *given))
    if fleet:
        return asyncio.run(_of_fleet(namespace))
    client = agent_client.client_of(namespace, namespace.agent or DEFAULT_AGENT)
    return asyncio.run(show(lambda: agent_picture(client, client.base), namespace))


async def _of_fleet(namespace: argparse.Namespace) -> int:
    async with PrometheusClient(prometheus_settings(namespace, os.environ)) as client:
        return await show(lambda: fleet_picture(client), namespace)


def is_live(namespace: argparse.Namespace) -> bool:
    """Return whether the view is live: input and output are a terminal."""
    can_be = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return can_be and not (namespace.once or namespace.json)


async def show(read: Read, namespace: argparse.Namespace) -> int:
    """Show the rows, live or once, and return the exit code.

    Raises:
        ExporterError: The first reading failed.
    """
    picture = await read()
    if is_live(namespace):
        await _watch(read, _View(picture=picture, sort=namespace.sort, words=namespace.filter), namespace.interval)
        return 0
    return write(picture, namespace, sort=namespace.sort)


def write(
    picture: Picture,
    namespace: argparse.Namespace,
    titles: Sequence[str] = _TOP,
    *,
    sort: str = "waste",
    keep: Callable[[LiveRow], bool] = lambda _: True,
) -> int:
    """Print the rows once, as a table or as JSON, and the problems to standard error; return the exit code.

    Args:
        picture: The rows.
        namespace: Options for form and filter.
        titles: Columns.
        sort: A name in ``SORTS``.
        keep: Selects the rows to print; the summary covers all rows.
    """
    rows = arranged(filter(keep, picture.rows), sort, namespace.filter)
    with stdout() as stream:
        if namespace.json:
            stream.write(json.dumps(document_of(picture, rows, time.time()), ensure_ascii=False, indent=2) + "\n")
        else:
            made = table(rows, titles)
            console = console_for(stream, made)
            console.print(Text(summary(picture), style="bold"))
            console.print(made if rows else "no row matches the filter")
    for problem in picture.problems:
        say(problem)
    return EXIT_PARTIAL if picture.problems else 0


@dataclass(slots=True)
class _View:
    """State of the live view; readings and keys change it."""

    picture: Picture
    sort: str
    words: str
    reverse: bool = False
    typing: bool = False
    ended: bool = False
    problem: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    history: dict[tuple[str | None, ...], deque[float | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.take(self.picture)

    def take(self, picture: Picture) -> None:
        """Replace the rows."""
        self.picture, self.problem = picture, ""
        before, self.history = self.history, {}
        for row in picture.rows:
            self.history[row.key] = before.get(row.key, deque(maxlen=_SPARKS))
            self.history[row.key].append(row.activity_ratio)
        self.changed.set()

    def press(self, keys: str) -> None:
        """Handle keys; an empty text means that the terminal is closed."""
        self.ended = not keys
        for key in keys:
            if key == "\x1b":
                self.words, self.typing = "", False
            elif self.typing:
                self._type(key)
            elif key in "qQ":
                self.ended = True
            elif key in "sS":
                names = list(SORTS)
                self.sort = names[(names.index(self.sort) + 1) % len(names)]
            elif key in "rR":
                self.reverse = not self.reverse
            elif key == "/":
                self.words, self.typing = "", True
        self.changed.set()

    def _type(self, key: str) -> None:
        if key in "\r\n":
            self.typing = False
        elif key in _BACKSPACES:
            self.words = self.words[:-1]
        elif key.isprintable():
            self.words += key

    def render(self, height: int) -> Group:
        """Return the view for a screen of ``height`` lines."""
        rows = arranged(self.picture.rows, self.sort, self.words, reverse=self.reverse)
        troubles = [self.problem] if self.problem else list(self.picture.problems)
        room = max(1, height - 6 - len(troubles))
        more = f"   {len(rows) - room} more rows: filter them" if len(rows) > room else ""
        filtered = f"   filter: {self.words}{'_' if self.typing else ''}" if self.words or self.typing else ""
        order = f"sort: {self.sort}{' reversed' if self.reverse else ''}"
        return Group(
            Text(summary(self.picture), style="bold"),
            *(Text(clean(trouble), style="red", no_wrap=True, overflow="ellipsis") for trouble in troubles),
            Text(f"{order}{filtered}{more}", style="dim"),
            table(rows[:room], history=self.history),
            Text(_KEYS, style="dim"),
        )


async def _watch(read: Read, view: _View, interval_seconds: float) -> None:
    """Show the view until ``q``; read again at each interval."""
    console = Console(highlight=False)
    polling = asyncio.create_task(_poll(read, view, interval_seconds))
    polling.add_done_callback(lambda _: view.changed.set())
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    try:
        with _unbuffered(keyboard), Live(console=console, screen=True, auto_refresh=False) as live:
            loop.add_reader(keyboard, lambda: view.press(_typed(keyboard)))
            while not (view.ended or polling.done()):
                view.changed.clear()
                live.update(view.render(console.height), refresh=True)
                await view.changed.wait()
    finally:
        loop.remove_reader(keyboard)
        polling.cancel()
    if polling.done() and not polling.cancelled():
        polling.result()


def _typed(keyboard: int) -> str:
    try:
        return os.read(keyboard, 64).decode(errors="replace")
    except OSError:  # the terminal is closed
        return ""


async def _poll(read: Read, view: _View, interval_seconds: float) -> None:
    while True:
        await asyncio.sleep(interval_seconds)
        try:
            view.take(await read())
        except ExporterError as error:
            view.problem = f"no new values: {error}"
            view.changed.set()


@contextmanager
def _unbuffered(keyboard: int) -> Iterator[None]:
    """Switch the terminal to unbuffered keys without echo; restore it at the end."""
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
