"""`digest`: the week of a fleet as text, HTML mail or Slack message."""

# Imports inside functions keep `--help` and `--version` fast: aiohttp takes a second.
# ruff: noqa: PLC0415

import argparse
import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from exporter.cli.common import EXIT_PARTIAL, Commands, add_output, command, say
from exporter.config.options import URL
from exporter.config.prometheus_options import add_prometheus_options
from exporter.errors import ConfigError

if TYPE_CHECKING:
    from exporter.config.prometheus_options import PrometheusSettings
    from exporter.cost.budgets import Budget
    from exporter.cost.digest import Digest
    from exporter.cost.ledger import Window

_EPILOG = (
    "Exit code: 0 for a digest that is whole; 1 if nothing can be read or the webhook does not take it; 2 for a wrong"
    " flag; 3 for one that is not whole: its last section lists what is missing. See docs/cost.md."
)


class _Task(NamedTuple):
    week: "Window"
    prometheus: "PrometheusSettings | None"
    budgets: "tuple[Budget, ...]"
    webhook: str
    """Empty: it is written, not posted."""
    form: str


def add(commands: Commands) -> None:
    """Add the command."""
    parser = command(
        commands, "digest", "A week of a fleet in a mail or a chat: money, movers, waste, savings, budgets."
    )
    parser.usage = f"{parser.prog} --prometheus URL | --store FILE [OPTION ...]"
    parser.epilog = _EPILOG
    what = parser.add_argument_group("What is told")
    what.add_argument(
        "--week",
        default="lastweek",
        metavar="WEEK",
        help="lastweek, or a week that is over, as 2026-W46; from Monday, in UTC [default: %(default)s]",
    )
    what.add_argument("--budgets", type=Path, metavar="FILE", help="YAML file of budgets, as serve reads it")
    what.add_argument("--title", default="GPU cost", metavar="TEXT", help="its head [default: %(default)s]")
    what.add_argument("--external-url", metavar="URL", help="where people reach the cost service, for links")
    what.add_argument("--store", type=Path, metavar="FILE", help="closed days that serve or store keep")
    form = parser.add_argument_group("How it is told")
    form.add_argument(
        "--format",
        choices=("text", "html", "slack"),
        help="lines, the body of a mail, or Slack's JSON [default: text; slack with --webhook-url-file]",
    )
    add_output(form)
    form.add_argument(
        "--webhook-url-file",
        type=Path,
        metavar="FILE",
        help="post it to the webhook whose address is in this file; Slack's, or one that takes the same",
    )
    form.add_argument("--dry-run", action="store_true", help="write what would be posted, and post nothing")
    add_prometheus_options(parser)
    parser.set_defaults(run=_digest)


def _digest(namespace: argparse.Namespace, problems: tuple[str, ...]) -> int:
    from exporter.cli.common import check_output, output
    from exporter.cost.digest_render import document, host_of, html, message, post, text

    now = time.time()
    task = _settle(namespace, list(problems), now)
    check_output(namespace.output)
    digest = asyncio.run(_read(task, namespace, now))
    if task.webhook and not namespace.dry_run:
        post(task.webhook, message(digest))
        say(f"the digest of {digest.week.label} was posted to {host_of(task.webhook)}")
    else:
        forms = {"text": text, "html": html, "slack": document}
        written = forms[task.form](digest)
        with output(namespace.output) as stream:
            stream.write(written)
        if task.webhook:
            say(f"nothing was posted; without --dry-run it would be, to {host_of(task.webhook)}")
    return 0 if digest.teams.trust.whole else EXIT_PARTIAL


def _settle(namespace: argparse.Namespace, problems: list[str], now: float) -> _Task:
    from exporter.cli.fleet import or_problems, prometheus_or_store
    from exporter.cost.budgets import load
    from exporter.cost.digest import parse_week
    from exporter.cost.digest_render import read_url

    week = or_problems(lambda: parse_week(namespace.week, now), problems, prefix="--")
    nowhere = "digest: nothing says where to read; give --prometheus URL, --store FILE, or both"
    prometheus = prometheus_or_store(namespace, problems, nowhere)
    budgets = (or_problems(lambda: load(namespace.budgets), problems) or ()) if namespace.budgets else ()
    path = namespace.webhook_url_file
    webhook = (or_problems(lambda: read_url(path), problems) or "") if path else ""
    problems += _contradictions(namespace)
    if problems or week is None:
        raise ConfigError(*problems)
    return _Task(week, prometheus, budgets, webhook, namespace.format or ("slack" if webhook else "text"))


def _contradictions(namespace: argparse.Namespace) -> list[str]:
    found = []
    if namespace.webhook_url_file is None:
        if namespace.dry_run:
            found.append("--dry-run: does nothing without --webhook-url-file: the digest is only written; leave it out")
    else:
        if namespace.format not in {None, "slack"}:
            found.append(f"--format: a webhook takes slack, not {namespace.format}; leave one of the two out")
        if namespace.output is not None and not namespace.dry_run:
            found.append("--output: the digest is posted, not written; leave it out, or give --dry-run")
    if namespace.external_url is not None:
        try:
            URL.parse(namespace.external_url)
        except ValueError:
            found.append(f"--external-url: value '{namespace.external_url}' is not {URL.noun}; allowed: {URL.allowed}")
    return found


async def _read(task: _Task, namespace: argparse.Namespace, now: float) -> "Digest":
    from exporter.cli.common import ProgressBar
    from exporter.cli.fleet import open_source
    from exporter.cost.digest import read_digest

    async with AsyncExitStack() as stack:
        source, client = await open_source(stack, task.prometheus, namespace.store)
        bar = stack.enter_context(ProgressBar("Reading"))
        digest = await read_digest(
            source,
            client,
            task.week,
            now,
            budgets=task.budgets,
            progress=bar.told,
        )
    return replace(digest, title=namespace.title, external_url=namespace.external_url or "")
