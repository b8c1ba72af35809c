#!/usr/bin/env python3
"""Writes a weekly digest of a GPU fleet as text, HTML mail or Slack message, and posts it to a webhook.

The figures are from `gpu-cost-exporter report` and `recommend`, or from the cost service. The address of a webhook is a
secret: messages contain only its host. Mattermost and Rocket.Chat accept Slack's JSON.
"""

import argparse
import base64
import html
import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from http.client import HTTPException
from math import floor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

EXIT_FAILED, EXIT_USAGE, EXIT_PARTIAL = 1, 2, 3
HOUR_SECONDS = 3600
RECORDED_AFTER_SECONDS = 1200
"""Delay after the end of an hour until its ledger is recorded, in seconds."""
MOST_MOVERS, MOST_TEAMS, MOST_WASTE, MOST_ADVICE, MOST_BUDGETS, MOST_NOTES = 5, 5, 10, 10, 20, 8
COMPARABLE_RATIO = 0.98
"""Least recorded part of the hours of the week before: below it, a higher cost can be only a better coverage."""
LEAST_MONEY, LEAST_RATIO = 0.01, 0.001
LONGEST_NAME, LONGEST_NOTE = 120, 400
ISO_WEEK = re.compile(r"2[01][0-9]{2}-?W[0-9]{2}")
WEEKS = "allowed: lastweek, or a complete week such as 2026-W46 (from Monday, UTC)"
SIMULATED = "SIMULATED FLEET: nothing here is real"
UNALLOCATED, UNATTRIBUTED = "Unallocated", "Unattributed"

MOST_BLOCKS, MOST_TEXTS = 50, 5
"""Blocks of a Slack message, and texts of a section."""
MOST_CHARACTERS = 2850
"""Longest text in characters: Slack accepts 3000, including a final line with the number of omitted rows."""
MOST_OF_ADDRESS, MOST_OF_HEAD, MOST_OF_TEXT = 500, 150, 2000
ATTEMPTS, TIMEOUT_SECONDS = 5, 15.0
SERVICE_TIMEOUT_SECONDS = 120.0
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0
TOO_MANY, SERVER_ERROR = 429, 500
MOST_SHOWN = 200
ADDRESS = "expected: one line with an address such as https://hooks.slack.com/services/..."

Document = Mapping[str, Any]
T = TypeVar("T")


class UsageError(Exception):
    """Flags or files have mistakes; the text has one line for each."""


class DigestError(Exception):
    """Data cannot be read, written or posted; the text has the reason and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """The documents of a week, in the format of the API and of `--format json`."""

    week: date
    """Monday of the week."""
    teams: Document
    """Report of the week by team."""
    owners: Document
    """Report of the week by cluster, namespace, workload and team."""
    before: Document | None = None
    """Report of the week before by team; ``None`` if the weeks are not comparable."""
    advice: Sequence[Document] | None = None
    """Recommendations, the largest saving first; ``None`` if they are unknown."""
    budgets: Sequence[Document] = ()
    notes: Sequence[str] = ()
    title: str = "GPU cost"
    external_url: str = ""
    """Address of the cost service, for links; empty without one."""


class Row(NamedTuple):
    """One row of a section."""

    texts: tuple[str, ...]
    href: str = ""
    """Complete address of the page about the first text; empty without one."""
    bad: tuple[int, ...] = ()
    """Indexes of highlighted texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with an optional sentence and an optional table."""

    title: str
    href: str = ""
    lead: str = ""
    columns: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()
    """Indexes of the columns with numbers."""
    rows: tuple[Row, ...] = ()
    more: str = ""
    """Text with the number of omitted rows; empty if there are none."""


def decimal(value: float, digits: int = 2) -> str:
    """Return a number such as ``1,234.50``; a small positive value is ``<0.01``, not 0, and 0 has no sign."""
    least = 10**-digits
    if abs(value) < least / 2:
        return f"<{least:.{digits}f}" if value > 0 else f"{0:.{digits}f}"
    return f"{value:,.{digits}f}"


def percent(ratio: float, digits: int = 2) -> str:
    """Return a ratio such as ``99.86 %``, rounded down so that parts never exceed the whole; small values are not 0."""
    scale = 10**digits
    if 0 < ratio * 100 * scale < 1:
        return f"<{1 / scale:.{digits}f} %"
    return f"{floor(ratio * 100 * scale + 1e-6) / scale:.{digits}f} %"


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode: an unpaired surrogate becomes a question mark."""
    return text.encode("utf-8", "replace").decode()


def clean(text: str) -> str:
    """Return a text without control characters and marks of the writing direction."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def cut(text: str, most: int = LONGEST_NAME) -> str:
    """Return a name or a note, cut to a length."""
    shown = clean(encodable(text))
    return shown if len(shown) <= most else f"{shown[:most]}…"


def money(amount: float, currency: str) -> str:
    """Return an amount such as ``1,234.50 USD``."""
    return f"{decimal(amount)} {clean(currency)}"


def span(monday: date) -> tuple[str, str]:
    """Return the first and the last day of a week."""
    return f"{monday}", f"{monday + timedelta(days=6)}"


def label(monday: date) -> str:
    """Return a week such as ``2026-W46``."""
    return f"{monday:%G-W%V}"


def parse_week(text: str, now_seconds: float) -> date:
    """Return the Monday, in UTC, of the week in a text.

    Raises:
        UsageError: The text is not a week, or the week is not complete.
    """
    written = text.strip()
    recorded = datetime.fromtimestamp((now_seconds - RECORDED_AFTER_SECONDS) // HOUR_SECONDS * HOUR_SECONDS, UTC)
    last = recorded.date() - timedelta(days=recorded.weekday() + 7)
    if written == "lastweek":
        return last
    try:
        monday = date.fromisoformat(written) if ISO_WEEK.fullmatch(written) else None
    except ValueError:
        monday = None
    if monday is None:
        raise UsageError(f"--week: value '{clean(text[:80])}' is not a week; {WEEKS}")
    if monday > last:
        raise UsageError(f"--week: {label(monday)} is not complete; {WEEKS}")
    return monday


def line_money(line: Document) -> dict[str, Document]:
    """Return the money of a line, or of a total, by currency."""
    return {one["currency"]: one for one in line["money"]}


def total(report: Document, currency: str) -> float:
    """Return the money of a report in a currency."""
    found = line_money(report["total"]).get(currency)
    return float(found["cost"]) if found else 0.0


def is_whole(report: Document) -> bool:
    """Return whether a report is complete."""
    return bool(report["trust"]["whole"])


def incomparable(before: Document | None) -> str:
    """Return the reason for no comparison with the week before; empty if the weeks are comparable."""
    trust = before["trust"] if before else {"failures": (), "recorded_hours": 0}
    if trust["failures"]:
        return "No comparison with the week before, because it could not be read completely."
    if not trust["recorded_hours"]:
        return "No comparison with the week before, because it has no data."
    if trust["period_coverage_ratio"] >= COMPARABLE_RATIO:
        return ""
    hours = f"{trust['recorded_hours']:,} of {trust['expected_hours']:,} hours"
    return f"No comparison with the week before, because only {hours} were recorded."


def headline(digest: Digest) -> str:
    """Return the digest in one line, for subjects and notifications."""
    mark = "SIMULATED: " if digest.teams["simulated"] else ""
    return f"{mark}{clean(digest.title)}, {label(digest.week)}: {spent(digest) or 'no GPU had a price'}"


def period(digest: Digest) -> str:
    """Return a period such as ``2026-11-09 to 2026-11-15, UTC``, including both days."""
    return f"{' to '.join(span(digest.week))}, UTC"


def sections(digest: Digest) -> Iterator[Section]:
    """Yield the sections in reading order."""
    yield spend(digest)
    yield funnel(digest)
    yield from movers(digest)
    yield waste(digest)
    yield advice(digest)
    if digest.budgets:
        yield budgets(digest)
    yield coverage(digest)


def currencies(digest: Digest) -> list[str]:
    """Return the currencies of both weeks."""
    totals = [report["total"] for report in (digest.teams, digest.before) if report]
    return sorted({currency for one in totals for currency in line_money(one)})


def spent(digest: Digest) -> str:
    """Return the cost in each currency, with its change."""
    words = []
    for currency in currencies(digest):
        after = total(digest.teams, currency)
        change = change_of(total(digest.before, currency), after) if digest.before else ""
        words.append(money(after, currency) + (f" ({change})" if change else ""))
    return " and ".join(words)


def change_of(before: float, after: float) -> str:
    """Return a change such as ``+12.0 % against the week before``; empty if both costs are 0."""
    if before <= 0:
        return "nothing the week before" if after > 0 else ""
    ratio = after / before - 1
    if abs(ratio) < LEAST_RATIO:
        return "as the week before"
    return f"{'+' if ratio > 0 else '-'}{percent(abs(ratio), 1)} against the week before"


PARTS = {
    "effective_cost": "Active, at most effective",
    "ineffective_cost": "Active, ineffective",
    "unprofiled_cost": "Active, not profiled",
    "idle_cost": "Idle, held without work",
    "unknown_cost": "Held, activity unknown",
    UNATTRIBUTED: "Unattributed",
    UNALLOCATED: "Unallocated, without a holder",
}
"""Titles of the parts of the cost: first those of owners, then those without an owner."""


def parts(report: Document, currency: str) -> dict[str, float]:
    """Return the cost of a report by ``PARTS``; effective and ineffective are null without profiled time."""
    found = dict.fromkeys(PARTS, 0.0)
    for line in report["lines"]:
        own = line_money(line).get(currency)
        if own is not None and line["held"]:
            for name in set(PARTS) & set(own):
                found[name] += own[name] or 0.0
        elif own is not None:
            found[line["owner_kind"]] += own["cost"]
    return found


def spend(digest: Digest) -> Section:
    """Return the section of the cost by part."""
    rows = []
    for currency in currencies(digest):
        whole, own = total(digest.teams, currency), parts(digest.teams, currency)
        before = money(total(digest.before, currency), currency) if digest.before else "unknown"
        rows.append(Row((f"Total {clean(currency)}", money(whole, currency), "", before)))
        for part, title in PARTS.items():
            if own[part] > 0:
                share = percent(own[part] / whole, 1) if whole else ""
                rows.append(Row((title, money(own[part], currency), share, "")))
    return Section(
        title="Spend",
        href=link(digest, "/"),
        lead=f"{spent(digest) or 'No GPU had a price'}.",
        columns=("", "This week", "Part", "Week before"),
        numbers=(1, 2, 3),
        rows=tuple(rows),
    )


def funnel(digest: Digest) -> Section:
    """Return the section of allocated, active and effective GPU-hours and cost, in total and by team."""
    teams = [line for line in digest.teams["lines"] if line["held"]]
    named = [
        ("All", digest.teams["total"], ""),
        *((team_name(line), line, link(digest, "/owner", team=line["team"] or "")) for line in teams[:MOST_TEAMS]),
    ]
    return Section(
        title="From paid to effective",
        href=link(digest, "/by/team"),
        lead="Effective: an upper bound for the profiled part of active time. The rest is unknown.",
        columns=("", "In", "Paid", "Allocated", "Active", "Profiled", "Effective"),
        numbers=(2, 3, 4, 5, 6),
        rows=tuple(Row(texts, href) for name, line, href in named for texts in funnel_rows(name, line)),
        more=more(len(teams) - MOST_TEAMS, "team"),
    )


def funnel_rows(name: str, line: Document) -> Iterator[tuple[str, ...]]:
    """Yield the steps of a line in GPU-hours and in each currency."""
    hours = [("GPU-hours", "seconds", line, line["allocated_seconds"], HOUR_SECONDS)]
    money = [(currency, "cost", own, own["cost"], 1) for currency, own in sorted(line_money(line).items())]
    for unit, kind, own, whole, scale in (*hours, *money):
        active, effective, unprofiled, idle, unknown = (
            own[f"{state}_{kind}"] for state in ("active", "effective", "unprofiled", "idle", "unknown")
        )
        profiled = None if effective is None else active - unprofiled
        measured = active if active or idle else None
        steps, absent = (
            (whole, active + idle + unknown, measured, profiled, effective),
            "not profiled" if active else "-",
        )
        yield name, unit, *(absent if step is None else decimal(step / scale) for step in steps)


def team_name(line: Document) -> str:
    """Return the team of a line."""
    return cut(line["team"] or "") or "(no team)"


def movers(digest: Digest) -> Iterator[Section]:
    """Yield the sections of teams with a changed cost, the largest change of each currency first."""
    if digest.before is None:
        return
    sums: dict[tuple[str, str], list[float]] = {}
    for place, report in enumerate((digest.before, digest.teams)):
        for line in report["lines"]:
            for currency, own in line_money(line).items() if line["held"] else ():
                sums.setdefault((currency, line["team"] or ""), [0.0, 0.0])[place] += own["cost"]
    changes = [(currency, after - before, team, before, after) for (currency, team), (before, after) in sums.items()]
    changes.sort(key=lambda one: (one[0], -abs(one[1]), one[2]))
    for title, sign in (("Teams that cost more", 1), ("Teams that cost less", -1)):
        found = [one for one in changes if sign * one[1] >= LEAST_MONEY]
        if not found:
            continue
        shown, left = first(found, MOST_MOVERS, lambda one: one[0])
        yield Section(
            title=title,
            href=link(digest, "/by/team"),
            columns=("Team", "Change", "This week", "Before"),
            numbers=(1, 2, 3),
            rows=tuple(
                Row(
                    (
                        cut(team) or "(no team)",
                        f"{'+' if sign > 0 else '-'}{money(abs(change), currency)}",
                        money(after, currency),
                        money(before, currency),
                    ),
                    href=link(digest, "/owner", team=team),
                    bad=(1,) if sign > 0 else (),
                )
                for currency, change, team, before, after in shown
            ),
            more=more(left, "team"),
        )


def waste(digest: Digest) -> Section:
    """Return the section of owners with the highest idle cost."""
    found = [
        (currency, own, line)
        for line in digest.owners["lines"]
        for currency, own in line_money(line).items()
        if line["held"] and own["idle_cost"] >= LEAST_MONEY
    ]
    names = ("cluster", "owner_namespace", "owner_kind", "owner_name", "team")
    found.sort(key=lambda one: (one[0], -one[1]["idle_cost"], [one[2][name] or "" for name in names]))
    shown, _ = first(found, MOST_WASTE, lambda one: one[0])
    return Section(
        title="Waste: GPUs held without work",
        href=link(digest, "/by/workload"),
        lead="" if shown else "No owner had idle cost.",
        columns=("Owner", "Team", "Idle", "Part of its cost", "Idle GPU-hours") if shown else (),
        numbers=(2, 3, 4),
        rows=tuple(
            Row(
                (
                    owner(line),
                    cut(line["team"] or "") or ("(no team)" if line["owner_namespace"] else "-"),
                    money(own["idle_cost"], currency),
                    percent(own["idle_cost"] / own["cost"], 0) if own["cost"] else "-",
                    decimal(line["idle_seconds"] / HOUR_SECONDS, 1),
                ),
                href=owner_link(digest, line) if line["owner_namespace"] else "",
            )
            for currency, own, line in shown
        ),
    )


def owner(line: Document) -> str:
    """Return the name of the owner of a line or a recommendation."""
    place = f"{line['cluster']}: " if line["cluster"] else ""
    namespace = line["owner_namespace"] or ""
    workload = f"{line['owner_kind'] or ''} {namespace}/{line['owner_name']}" if line["owner_name"] else namespace
    return cut(f"{place}{workload}" if workload else "") or "(no namespace)"


def owner_link(digest: Digest, line: Document) -> str:
    """Return the address of the page about an owner."""
    where = {"cluster": line["cluster"]} if line["cluster"] else {}
    keys = {"namespace": "owner_namespace", "kind": "owner_kind", "workload": "owner_name"}
    return link(digest, "/owner", **where, **{name: line[key] or "" for name, key in keys.items()})


def advice(digest: Digest) -> Section:
    """Return the section of recommendations."""
    title, href = "What to do", link(digest, "/recommendations")
    found = [one for one in digest.advice or () if one["gpus"]]  # without GPUs it is information
    if not found:
        lead = "Recommendations are unknown; see the notes." if digest.advice is None else "No recommendations."
        return Section(title=title, href=href, lead=lead)
    sums: dict[str, float] = {}
    for one in found:
        if one["per_month"] is not None:
            sums[one["currency"]] = sums.get(one["currency"], 0.0) + one["per_month"]
    savings = " and ".join(money(amount, currency) for currency, amount in sorted(sums.items()))
    count = f"{len(found):,} recommendation{'s' if len(found) > 1 else ''}"
    return Section(
        title=title,
        href=href,
        lead=f"{count} would save {savings} a month." if savings else f"{count}, without a price.",
        columns=("Owner", "Team", "What", "A month", "Risk"),
        numbers=(3,),
        rows=tuple(
            Row(
                (
                    owner(one),
                    team_name(one),
                    cut(one["title"]),
                    "no price" if one["per_month"] is None else money(one["per_month"], one["currency"]),
                    one["risk_level"],
                ),
                href=owner_link(digest, one),
            )
            for one in found[:MOST_ADVICE]
        ),
        more=more(len(found) - MOST_ADVICE, "recommendation"),
    )


def budgets(digest: Digest) -> Section:
    """Return the section of budgets over a threshold, projected over, or partly unknown; count the others."""
    news = [one for one in digest.budgets if one["passed"] or will_be_over(one) or one["spent"] is None or one["notes"]]
    quiet = len(digest.budgets) - len(news)
    news.sort(key=lambda one: 1.0 if one["spent"] is None else -one["spent"] / one["amount"])
    return Section(
        title="Budgets",
        href=link(digest, "/budgets"),
        lead=f"{quiet:,} of {len(digest.budgets):,} below every threshold and projection." if quiet else "",
        columns=("Budget", "Period", "Spent", "Of", "Will be") if news else (),
        numbers=(2, 3, 4),
        rows=tuple(budget_row(one) for one in news[:MOST_BUDGETS]),
        more=more(len(news) - MOST_BUDGETS, "budget"),
    )


def will_be_over(budget: Document) -> bool:
    """Return whether the projected spending exceeds a budget."""
    return budget["projected"] is not None and budget["projected"] > budget["amount"]


def budget_row(budget: Document) -> Row:
    """Return a budget as a row."""
    spent, currency = budget["spent"], budget["currency"]
    ratio = 0.0 if spent is None else spent / budget["amount"]
    start = datetime.fromtimestamp(budget["from_seconds"], UTC)
    forms = {"week": "%G-W%V", "month": "%Y-%m", "quarter": f"%Y-Q{start.month // 3 + 1}", "year": "%Y"}
    return Row(
        (
            cut(budget["name"]),
            start.strftime(forms[budget["period"]]),
            "unknown" if spent is None else f"{money(spent, currency)}, {percent(ratio, 0)}",
            money(budget["amount"], currency),
            "unknown" if budget["projected"] is None else money(budget["projected"], currency),
        ),
        bad=(*((2,) if ratio >= 1 else ()), *((4,) if will_be_over(budget) else ())),
    )


def coverage(digest: Digest) -> Section:
    """Return the section of the coverage of the data."""
    trust, unpriced_seconds = digest.teams["trust"], digest.teams["total"]["unpriced_seconds"]
    rows: list[Row] = []
    if trust["period_coverage_ratio"] is not None:
        hours = f"{trust['recorded_hours']:,} of {trust['expected_hours']:,}"
        rows.append(Row(("Hours recorded", f"{percent(trust['period_coverage_ratio'])} ({hours})")))
    if trust["activity_coverage_ratio"] is not None:
        rows.append(Row(("Activity measured", f"{percent(trust['activity_coverage_ratio'])} of held GPU-hours")))
    if trust["price_coverage_ratio"] is not None:
        rows.append(Row(("Price known", f"{percent(trust['price_coverage_ratio'])} of GPU-hours")))
    if unpriced_seconds > 0:
        rows.append(Row(("Unpriced", f"{decimal(unpriced_seconds / HOUR_SECONDS, 1)} GPU-hours without a price")))
    if trust["missing_seconds"]:
        missing = decimal(abs(trust["missing_seconds"]) / HOUR_SECONDS, 3)
        rows.append(Row(("Missing", f"{missing} GPU-hours do not add up")))
    left = 0
    for name, notes in (
        ("Budget", [f"{one['name']}: {note}" for one in digest.budgets for note in one["notes"][:1]]),
        ("Not read", [failure_words(failure) for failure in trust["failures"]]),
        ("Note", [*digest.notes, *trust["notes"]]),
    ):
        rows += [Row((name, cut(" ".join(note.split()), LONGEST_NOTE))) for note in notes[:MOST_NOTES]]
        left += max(0, len(notes) - MOST_NOTES) if name != "Budget" else 0
    return Section(
        title="How far to trust it",
        href=link(digest, "/about"),
        columns=("", ""),
        rows=tuple(rows),
        more=more(left, "note"),
    )


def failure_words(failure: Document) -> str:
    """Return the text of a failed query."""
    start, end = (datetime.fromtimestamp(failure[f"{side}_seconds"], UTC) for side in ("from", "to"))
    when = f"{start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"
    return f"{when}: {failure['what']}: {failure['reason']}; its data are missing"


def first(items: Iterable[T], most: int, kind: Callable[[T], str]) -> tuple[list[T], int]:
    """Return at most ``most`` items of each kind, and the number of the others."""
    counts: dict[str, int] = {}
    kept, left = [], 0
    for item in items:
        counts[kind(item)] = counts.get(kind(item), 0) + 1
        if counts[kind(item)] <= most:
            kept.append(item)
        else:
            left += 1
    return kept, left


def more(count: int, what: str) -> str:
    """Return a count such as ``and 3 more teams``; empty for 0."""
    return f"and {count:,} more {what}{'' if count == 1 else 's'}" if count > 0 else ""


def link(digest: Digest, path: str, **asked: str) -> str:
    """Return the address of a page of the service for the week; empty without ``external_url``."""
    if not digest.external_url:
        return ""
    # "(none)" selects the missing value; the service ignores an empty parameter.
    pairs = {"window": "..".join(span(digest.week))}
    pairs |= {name: encodable(value) or "(none)" for name, value in asked.items()}
    return f"{digest.external_url.rstrip('/')}{path}?{urlencode(pairs, quote_via=quote)}"


def as_text(digest: Digest) -> str:
    """Return the digest as plain text, for a terminal or a mail."""
    lines = [headline(digest), period(digest)]
    if digest.teams["simulated"]:
        lines.append(SIMULATED)
    for section in sections(digest):
        lines += ["", section.title, "-" * len(section.title), *text_lines(section)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def text_lines(section: Section) -> Iterator[str]:
    """Yield a section as lines with aligned columns."""
    if section.lead:
        yield section.lead
    table = [row.texts for row in section.rows]
    if any(section.columns):
        table.insert(0, section.columns)
    widths = [max(len(row[place]) for row in table) for place in range(len(section.columns))] if table else []
    for row in table:
        cells = enumerate(zip(row, widths, strict=True))
        yield "  ".join(
            text.rjust(width) if place in section.numbers else text.ljust(width) for place, (text, width) in cells
        )
    if section.more:
        yield section.more
    if section.href:
        yield section.href


HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="supported-color-schemes" content="light dark">
<title>{subject}</title>
</head>
<body style="margin:0;padding:0;font-family:Arial,Helvetica,sans-serif;font-size:14px;line-height:1.4">
<div style="display:none;max-height:0;overflow:hidden">{subject}</div>
<table role="presentation" width="100%" cellpadding="0" cellspacing="0" border="0"><tr><td align="center" \
style="padding:16px 8px">
<table role="presentation" width="100%" cellpadding="0" cellspacing="0" border="0" style="max-width:720px"><tr>\
<td align="left">
{simulated}<h1 style="margin:0;font-size:22px;line-height:1.2">{title}, {week}</h1>
<p style="margin:4px 0 16px">{period}</p>
"""
# Only the warning has colours, so that the dark mode of a mail client cannot make text unreadable.
WARNING = '<p style="margin:0 0 12px;padding:8px 12px;background-color:#ffc94d;color:#1c1300;font-weight:bold;'
WARNING += f'text-align:center">{SIMULATED}</p>\n'
FOOT = """<p style="margin:24px 0 0;font-size:12px">Read from {engine}. Unattributed: active GPUs with an unknown \
holder. Unallocated: GPUs without a holder.</p>
"""
END = "</td></tr></table>\n</td></tr></table>\n</body>\n</html>\n"


def markup(text: str) -> str:
    """Return a text with escaped markup."""
    return html.escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")


def anchor(text: str, href: str) -> str:
    """Return markup as a link if the address is not empty."""
    return f'<a href="{markup(href)}" style="color:inherit;text-decoration:underline">{text}</a>' if href else text


def as_html(digest: Digest) -> str:
    """Return the body of a mail: tables and inline styles, without scripts, images and external resources."""
    found = HEAD.format(
        subject=markup(headline(digest)),
        simulated=WARNING if digest.teams["simulated"] else "",
        title=markup(clean(digest.title)),
        week=label(digest.week),
        period=period(digest),
    )
    for section in sections(digest):
        title = anchor(markup(section.title), section.href)
        found += f'<h2 style="margin:24px 0 6px;font-size:16px">{title}</h2>\n'
        found += f'<p style="margin:0 0 6px">{markup(section.lead)}</p>\n' if section.lead else ""
        found += html_table(section) if section.rows else ""
        found += f'<p style="margin:6px 0 0">{section.more}</p>\n' if section.more else ""
    engine = digest.teams["engine"]
    return encodable(found + (FOOT.format(engine=markup(clean(engine))) if engine else "") + END)


def html_table(section: Section) -> str:
    """Return the table of a section."""
    found = '<table width="100%" cellpadding="4" cellspacing="0" border="0" '
    found += 'style="border-collapse:collapse;font-size:13px">\n'
    sides = ["right" if place in section.numbers else "left" for place in range(len(section.columns))]
    if any(section.columns):
        style = "border-bottom:2px solid #8792a2;font-weight:bold"
        heads = zip(section.columns, sides, strict=True)
        cells = (f'<th scope="col" align="{side}" style="{style}">{column}</th>' for column, side in heads)
        found += f"<tr>{''.join(cells)}</tr>\n"
    for row in section.rows:
        found += "<tr>"
        for place, (text, side) in enumerate(zip(row.texts, sides, strict=True)):
            style = "border-bottom:1px solid #8792a2;"
            style += "white-space:nowrap" if side == "right" else "word-break:break-word"
            style += ";font-weight:bold" if place in row.bad else ""
            cell = anchor(f"<bdi>{markup(text)}</bdi>", "" if place else row.href)
            found += f'<td align="{side}" valign="top" style="{style}">{cell}</td>'
        found += "</tr>\n"
    return f"{found}</table>\n"


def message(digest: Digest) -> dict[str, Any]:
    """Return Slack's message: ``text`` for notifications, ``blocks`` for the chat."""
    subject = headline(digest)
    under = period(digest) + (f"; *{SIMULATED}*" if digest.teams["simulated"] else "")
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": shortened(subject, MOST_OF_HEAD)}},
        {"type": "context", "elements": [{"type": "mrkdwn", "text": under}]},
    ]
    texts = [text for section in sections(digest) for text in block_texts(section)]
    blocks += [{"type": "section", "text": {"type": "mrkdwn", "text": text}} for text in texts]
    return {"text": escaped(shortened(subject, MOST_OF_TEXT)), "blocks": blocks[:MOST_BLOCKS]}


def as_slack(digest: Digest) -> str:
    """Return the message as JSON."""
    return json.dumps(message(digest), ensure_ascii=False, indent=2) + "\n"


def escaped(text: str) -> str:
    """Return a text without mentions and links."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def block_texts(section: Section) -> list[str]:
    """Return a section as texts of one block each; the last one has the number of omitted rows."""
    title = escaped(section.title)
    if section.href:
        title = f"<{escaped(section.href)}|{title}>"
    texts = ["\n".join([f"*{title}*", *([escaped(section.lead)] if section.lead else [])])]
    rows = [block_row(row, section) for row in section.rows]
    for place, row in enumerate(rows):
        if len(texts[-1]) + len(row) < MOST_CHARACTERS:
            texts[-1] += f"\n{row}"
        elif len(texts) < MOST_TEXTS:
            texts.append(row)
        else:
            texts[-1] += f"\n… and {len(rows) - place} more lines"
            break
    if section.more:
        texts[-1] += f"\n{escaped(section.more)}"
    return texts


def block_row(row: Row, section: Section) -> str:
    """Return a row such as ``• name: 12 USD, of its cost: 40 %``, because a chat has no tables."""
    head = code(row.texts[0], row.href if len(row.href) < MOST_OF_ADDRESS else "")
    words = []
    for place, (title, value) in enumerate(zip(section.columns, row.texts, strict=True)):
        if place and value:
            # A name is formatted as code, which contains no markup.
            plain = escaped(value) if place in section.numbers else code(value)
            shown = f"*{escaped(value)}*" if place in row.bad else plain
            words.append(f"{title.lower()}: {shown}" if title and place > 1 else shown)
    return f"• {head}: {', '.join(words)}" if words else f"• {head}"


def code(text: str, href: str = "") -> str:
    """Return a name as code, followed by a link, because the text of a link cannot be code."""
    name = "`" + escaped(text.replace("`", "'")) + "`"
    return f"{name} (<{escaped(href)}|open>)" if href else name


def shortened(text: str, most: int) -> str:
    """Return a text of at most ``most`` characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


FORMS: Mapping[str, Callable[[Digest], str]] = {"text": as_text, "html": as_html, "slack": as_slack}


def opener(*handlers: urllib.request.BaseHandler) -> urllib.request.OpenerDirector:
    """Return an opener that does not follow redirects: a redirect is an error with its status."""
    made = urllib.request.OpenerDirector()
    errors = (urllib.request.HTTPDefaultErrorHandler(), urllib.request.HTTPErrorProcessor())
    for handler in (urllib.request.HTTPHandler(), *errors, *handlers):
        made.add_handler(handler)
    return made


def read_url(path: Path) -> str:
    """Return the address in a file.

    Raises:
        UsageError: The file has no address; the message does not contain its text.
    """
    try:
        url = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"--webhook-url-file: cannot read {path}: {why}; {ADDRESS}") from None
    if not is_address(url):
        raise UsageError(f"--webhook-url-file: {path} contains no address; {ADDRESS}")
    return url


def is_address(url: str) -> bool:
    """Return whether a text is an HTTP address."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return good and url.isascii() and url.isprintable() and " " not in url


def host_of(url: str) -> str:
    """Return the host of an address, which messages can show."""
    return urlsplit(url).hostname or ""


def post(url: str, message: Mapping[str, Any], sleep: Callable[[float], object] = time.sleep) -> None:
    """Post a message; retry temporary failures, after ``Retry-After`` of the response.

    Raises:
        DigestError: The webhook did not accept the message.
    """
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
    wait = FIRST_WAIT_SECONDS
    for attempt in range(1, ATTEMPTS + 1):
        answer = try_once(url, body)
        if answer is None:
            return
        may_help, words, asked_seconds = answer
        if not may_help or attempt == ATTEMPTS:
            tries = f" after {attempt} attempts" if attempt > 1 else ""
            raise DigestError(f"the webhook at {host_of(url)} did not accept the digest{tries}: {words}")
        sleep(min(LONGEST_WAIT_SECONDS, wait if asked_seconds is None else asked_seconds))
        wait *= 2


def try_once(url: str, body: bytes) -> tuple[bool, str, float | None] | None:
    """Return ``None`` for success; else whether a retry can succeed, the reason, and ``Retry-After`` in seconds."""
    request = urllib.request.Request(  # noqa: S310 - read_url allows http and https
        url, data=body, headers={"Content-Type": "application/json; charset=utf-8"}, method="POST"
    )
    try:
        through_proxies = opener(urllib.request.ProxyHandler(), urllib.request.HTTPSHandler())
        with through_proxies.open(request, timeout=TIMEOUT_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        with error:
            may_help = error.code == TOO_MANY or error.code >= SERVER_ERROR
            hint = "" if may_help else "; check that the address is that of a webhook"
            after = error.headers.get("Retry-After", "")
            seconds = float(after) if re.fullmatch(r"[0-9]{1,5}", after) else None
            return may_help, f"HTTP {error.code}{said(error, url)}{hint}", seconds
    except TimeoutError:
        # A retry could post the message twice.
        return False, f"no response within {TIMEOUT_SECONDS:g} s; the digest may have been posted", None
    except urllib.error.URLError as error:
        why = f"cannot be reached: {error.reason}".replace(url, "...")
        return not isinstance(error.reason, TimeoutError), why, None
    except (OSError, HTTPException) as error:
        return False, f"the connection broke ({type(error).__name__}); the digest may have been posted", None


def said(error: urllib.error.HTTPError, url: str) -> str:
    """Return the text of an error response: Slack names the mistake, such as ``invalid_blocks``."""
    try:
        text = error.read(MOST_SHOWN).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return ""
    for secret in (url, urlsplit(url).path):
        if len(secret) > 1:
            text = text.replace(secret, "...")
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f" ({words})" if words and not words.startswith("<") else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running cost service."""

    url: str
    user_file: Path | None = None
    """File with ``name:password``; ``None``: the service requires no password."""
    ca_file: Path | None = None
    """PEM file of certificate authorities; ``None``: those of the system."""

    def document(self, path: str, **asked: str) -> Document:
        """Return the document of a path of the API.

        Raises:
            UsageError: A file cannot be read.
            DigestError: The service does not respond.
        """
        address = f"{self.url.rstrip('/')}/api/v1/{path}?{urlencode(asked)}"
        headers = {}
        try:
            if self.user_file is not None:
                pair = self.user_file.read_text(encoding="utf-8").strip().encode()
                headers["Authorization"] = f"Basic {base64.b64encode(pair).decode('ascii')}"
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--user-file, --ca-file: {error}; expected: readable files") from None
        request = urllib.request.Request(address, headers=headers)  # noqa: S310 - the flag allows http and https
        try:
            directly = opener(urllib.request.HTTPSHandler(context=context))
            with directly.open(request, timeout=SERVICE_TIMEOUT_SECONDS) as response:
                found: Document = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise DigestError(f"{self.url}: HTTP {error.code}; {self.url}/readyz shows the reason") from None
        except (OSError, ValueError, HTTPException) as error:
            raise DigestError(f"{self.url}: no response of a cost service: {error}; check that it runs") from None
        return found

    def report(self, monday: date, by: str) -> Document:
        """Return the report of a week."""
        return self.document("report", window="..".join(span(monday)), by=by)

    def advice(self, _monday: date, _notes: list[str]) -> Sequence[Document]:
        """Return the recommendations of the last seven days."""
        found: Sequence[Document] = self.document("recommendations")["recommendations"]
        return found

    def budgets(self) -> Sequence[Document]:
        """Return the state of every budget."""
        found: Sequence[Document] = self.document("budgets")["budgets"]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Commands:
    """The program `gpu-cost-exporter`, with flags for Prometheus or a store."""

    flags: Sequence[str] = field(default=())
    """Flags of every command."""
    store: Path | None = None

    def document(self, *words: str) -> Document:
        """Return the document that a command writes.

        Raises:
            DigestError: The command fails; the text is its message.
        """
        command = ["gpu-cost-exporter", *words, "--format=json", *self.flags]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - flags of the user
        except OSError as error:
            raise DigestError(f"gpu-cost-exporter: {error.strerror}; install it, or set --service URL") from None
        if done.returncode not in {0, EXIT_PARTIAL}:
            problem = done.stderr.strip().replace("gpu-cost-exporter: ", "")
            raise (UsageError if done.returncode == EXIT_USAGE else DigestError)(problem)
        found: Document = json.loads(done.stdout)
        return found

    def report(self, monday: date, by: str) -> Document:
        """Return the report of a week."""
        store = () if self.store is None else (f"--store={self.store}",)
        return self.document("report", f"--window={'..'.join(span(monday))}", f"--by={by}", *store)

    def advice(self, monday: date, notes: list[str]) -> Sequence[Document] | None:
        """Return the recommendations of a week; add a note if they are missing."""
        asks = any(flag.startswith("--prometheus") for flag in self.flags)
        if not asks and "GPU_COST_EXPORTER_PROMETHEUS" not in os.environ:
            notes.append("Recommendations need --prometheus: the store has no data on the use of devices.")
            return None
        try:
            found: Sequence[Document] = self.document("recommend", f"--window={'..'.join(span(monday))}")[
                "recommendations"
            ]
        except DigestError as error:
            notes.append(f"Recommendations could not be read: {error}")
            return None
        return found

    def budgets(self) -> Sequence[Document]:
        """Return no budgets: only the service computes them."""
        return ()


def read(source: Service | Commands, monday: date) -> Digest:
    """Return the digest of a week.

    Raises:
        UsageError: Flags or files have mistakes.
        DigestError: The week cannot be read, or has no data.
    """
    teams = source.report(monday, "team")
    if not teams["trust"]["capacity_seconds"] and not teams["lines"]:
        why = "; ".join(teams["trust"]["notes"]) or "check that the retention of Prometheus or the store includes it"
        raise DigestError(f"no ledger of {label(monday)}: {why}")
    owners = source.report(monday, "cluster,namespace,workload,team")
    try:
        before = source.report(monday - timedelta(days=7), "team")
    except DigestError:
        before = None
    notes: list[str] = []
    advice = source.advice(monday, notes)
    return make(monday, teams, owners, before, advice=advice, budgets=source.budgets(), notes=notes)


def make(
    monday: date,
    teams: Document,
    owners: Document,
    before: Document | None,
    **rest: Any,  # noqa: ANN401 - of Digest
) -> Digest:
    """Return the digest of a week, without the week before if that is not comparable."""
    problem = incomparable(before)
    digest = Digest(week=monday, teams=teams, owners=owners, before=None if problem else before, **rest)
    return replace(digest, notes=(*([problem] if problem else []), *digest.notes))


def write(text: str, path: Path | None) -> None:
    """Write a digest; replace a file only after the new one is complete.

    Raises:
        DigestError: The file cannot be written.
    """
    if path is None or str(path) == "-":
        sys.stdout.write(text)
        return
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise DigestError(f"--output: {path}: cannot write: {error.strerror}; free space or set another file") from None


def contradictions(arguments: argparse.Namespace, flags: Sequence[str]) -> Iterator[str]:
    """Yield the conflicts between flags."""
    if arguments.webhook_url_file is None:
        if arguments.dry_run:
            yield "--dry-run: has no effect without --webhook-url-file; remove it"
    else:
        if arguments.format not in {None, "slack"}:
            yield f"--format: a webhook accepts only slack, not {arguments.format}; remove one of the two flags"
        if arguments.output is not None and not arguments.dry_run:
            yield "--output: has no effect with --webhook-url-file; remove it, or set --dry-run"
    for name in ("external_url", "service"):
        value = getattr(arguments, name)
        if value is not None and not is_address(value):
            yield f"--{name.replace('_', '-')}: value '{clean(value)}' is not an address; expected: such as https://cost.example.org"
    if arguments.service is not None and (flags or arguments.store):
        yield f"--service: has its own sources; remove {' '.join(map(clean, flags)) or '--store'}"


def settle(arguments: argparse.Namespace, flags: Sequence[str]) -> tuple[date, Service | Commands, str]:
    """Return the week, its source and the address of the webhook, which is empty without one.

    Raises:
        UsageError: Flags or files have mistakes; the text has all of them.
    """
    problems = list(contradictions(arguments, flags))
    monday, webhook = date.min, ""
    try:
        monday = parse_week(arguments.week, time.time())
    except UsageError as error:
        problems.append(str(error))
    try:
        webhook = read_url(arguments.webhook_url_file) if arguments.webhook_url_file else ""
    except UsageError as error:
        problems.append(str(error))
    if problems:
        raise UsageError("\n".join(problems))
    if arguments.service is None:
        return monday, Commands(flags=flags, store=arguments.store), webhook
    return monday, Service(url=arguments.service, user_file=arguments.user_file, ca_file=arguments.ca_file), webhook


def run(arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Read the week, write or post the digest, and return the exit code."""
    monday, source, webhook = settle(arguments, flags)
    found = replace(read(source, monday), title=arguments.title, external_url=arguments.external_url or "")
    if webhook and not arguments.dry_run:
        post(webhook, message(found))
        say(f"the digest of {label(monday)} was posted to {host_of(webhook)}")
    else:
        write(FORMS[arguments.format or ("slack" if webhook else "text")](found), arguments.output)
        if webhook:
            say(f"not posted because of --dry-run; target: {host_of(webhook)}")
    return 0 if is_whole(found.teams) else EXIT_PARTIAL


def say(text: str) -> None:
    """Write each line of a message to standard error."""
    for line in text.splitlines():
        print(f"digest: {clean(line)}", file=sys.stderr)


def flags_of_program() -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.epilog = (
        "Without --service, gpu-cost-exporter reads the week, and receives every flag that is not listed here, such as"
        " --prometheus=URL. Exit code: 0; 1 no data, or the webhook did not accept the digest; 2 invalid flags;"
        " 3 an incomplete digest: its last section lists the missing parts."
    )
    parser.add_argument("--service", metavar="URL", help="cost service with the figures and the budgets")
    parser.add_argument("--user-file", type=Path, metavar="FILE", help="file with name:password for the service")
    parser.add_argument("--ca-file", type=Path, metavar="FILE", help="PEM file of authorities for the service")
    parser.add_argument("--store", type=Path, metavar="FILE", help="store with closed days, without --service")
    parser.add_argument(
        "--week", default="lastweek", help="lastweek, or a complete week such as 2026-W46 [default: %(default)s]"
    )
    parser.add_argument("--title", default="GPU cost", help="heading [default: %(default)s]")
    parser.add_argument("--external-url", metavar="URL", help="address of the cost service for users, for links")
    parser.add_argument("--format", choices=FORMS, help="[default: text; slack with --webhook-url-file]")
    parser.add_argument("--output", type=Path, metavar="FILE", help="output file")
    parser.add_argument("--webhook-url-file", type=Path, metavar="FILE", help="file with the address of the webhook")
    parser.add_argument("--dry-run", action="store_true", help="write the message instead of posting it")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Parse the flags; return the exit code."""
    arguments, flags = flags_of_program().parse_known_args(words)
    try:
        return run(arguments, flags)
    except (UsageError, DigestError) as error:
        say(str(error))
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
