"""Renders a digest as text, HTML mail or Slack message, and posts it to a webhook.

The address of a webhook is a secret: messages have its host alone. Mattermost and Rocket.Chat take the same JSON.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from exporter.cost.digest import Digest, DigestRow, Section, headline, period, sections
from exporter.cost.prometheus_access import NoRedirects, retry_after_seconds
from exporter.cost.render_rows import clean, encodable
from exporter.errors import ConfigError, ExporterError
from exporter.web.templating import render

MOST_BLOCKS = 50
MOST_TEXTS = 5
"""Of a section."""
MOST_CHARACTERS = 2850
"""Of a text; Slack takes 3000, and a line that says what is left out comes on top."""
_MOST_OF_ADDRESS = 500
_MOST_OF_HEAD, _MOST_OF_TEXT = 150, 2000
ATTEMPTS = 5
TIMEOUT_SECONDS = 15.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 60.0
_TOO_MANY, _SERVER_ERROR = 429, 500
_SHOWN = 200
_ALLOWED = "allowed: one line with an address, as https://hooks.slack.com/services/..."
_SIMULATED = "SIMULATED FLEET: nothing here is real"


def text(digest: Digest) -> str:
    """Return all of it in lines, for a terminal or a plain mail."""
    lines = [headline(digest), period(digest)]
    if digest.teams.simulated:
        lines.append(_SIMULATED)
    for section in sections(digest):
        lines += ["", section.title, "-" * len(section.title), *_lines(section)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _lines(section: Section) -> Iterator[str]:
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


def html(digest: Digest) -> str:
    """Return the body of a mail: tables and inline styles, no script, no picture, nothing loaded."""
    values = {
        "title": clean(digest.title),
        "week": digest.week.label,
        "subject": headline(digest),
        "period": period(digest),
        "simulated": digest.teams.simulated,
        "sections": list(sections(digest)),
        "engine": clean(digest.teams.engine),
    }
    return encodable(render("exporter.cost", "digest.html", values))


def message(digest: Digest) -> dict[str, Any]:
    """Return Slack's message: ``text`` for notifications, ``blocks`` for the chat."""
    told = headline(digest)
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": _cut(told, _MOST_OF_HEAD)}}
    ]
    under = period(digest) + (f"; *{_SIMULATED}*" if digest.teams.simulated else "")
    blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": under}]})
    texts = [text for section in sections(digest) for text in _texts(section)]
    blocks += [{"type": "section", "text": {"type": "mrkdwn", "text": text}} for text in texts]
    return {"text": escaped(_cut(told, _MOST_OF_TEXT)), "blocks": blocks[:MOST_BLOCKS]}


def document(digest: Digest) -> str:
    """Return the message in JSON, as it is sent."""
    return json.dumps(message(digest), ensure_ascii=False, indent=2) + "\n"


def escaped(text: str) -> str:
    """Return a text that can call nobody and be no link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _texts(section: Section) -> list[str]:
    """Return a section as texts of a block each; count the rows that find no room in the last one."""
    title = escaped(section.title)
    if section.href:
        title = f"<{escaped(section.href)}|{title}>"
    texts = ["\n".join([f"*{title}*", *([escaped(section.lead)] if section.lead else [])])]
    rows = [_row(row, section) for row in section.rows]
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


def _row(row: DigestRow, section: Section) -> str:
    """Return ``• name: 12 USD, of its cost: 40 %``: a chat has no tables."""
    head = _code(row.texts[0], row.href if len(row.href) < _MOST_OF_ADDRESS else "")
    told = []
    for place, (title, value) in enumerate(zip(section.columns, row.texts, strict=True)):
        if place and value:
            # A number as it is; a name as code, in which nothing is markup.
            plain = escaped(value) if place in section.numbers else _code(value)
            shown = f"*{escaped(value)}*" if place in row.bad else plain
            told.append(f"{title.lower()}: {shown}" if title and place > 1 else shown)
    return f"• {head}: {', '.join(told)}" if told else f"• {head}"


def _code(text: str, href: str = "") -> str:
    """Return a name as code and a link next to it: the text of a link cannot be code."""
    name = "`" + escaped(text.replace("`", "'")) + "`"
    return f"{name} (<{escaped(href)}|open>)" if href else name


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def read_url(path: Path) -> str:
    """Return the address in a file.

    Raises:
        ConfigError: There is none; the message repeats nothing of the file.
    """
    try:
        url = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--webhook-url-file: cannot read {path}: {why}; {_ALLOWED}") from None
    try:
        parts = urlsplit(url)
        good = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"--webhook-url-file: what is in {path} is no address; {_ALLOWED}")
    return url


def host_of(url: str) -> str:
    """Return the part of an address that messages may show."""
    return urlsplit(url).hostname or ""


def post(url: str, message: Mapping[str, Any], sleep: Callable[[float], object] = time.sleep) -> None:
    """Post a message; ask again where that can help, after the time that the answer names.

    Raises:
        ExporterError: The webhook did not take it.
    """
    body = json.dumps(message, ensure_ascii=False).encode("utf-8", "replace")
    wait = _FIRST_WAIT_SECONDS
    for attempt in range(1, ATTEMPTS + 1):
        answer = _attempt(url, body)
        if answer is None:
            return
        may_help, words, asked_seconds = answer
        if not may_help or attempt == ATTEMPTS:
            tries = f" after {attempt} attempts" if attempt > 1 else ""
            raise ExporterError(f"the webhook at {host_of(url)} did not take the digest{tries}: {words}")
        sleep(min(_LONGEST_WAIT_SECONDS, wait if asked_seconds is None else asked_seconds))
        wait *= 2


def _attempt(url: str, body: bytes) -> tuple[bool, str, float | None] | None:
    """Return ``None`` for success; else whether another attempt may help, why, and how long to wait."""
    request = urllib.request.Request(  # noqa: S310 - read_url allows http and https
        url, data=body, headers={"Content-Type": "application/json; charset=utf-8"}, method="POST"
    )
    try:
        with urllib.request.build_opener(NoRedirects()).open(request, timeout=TIMEOUT_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        with error:
            may_help = error.code == _TOO_MANY or error.code >= _SERVER_ERROR
            said = _shown(error, url)
            hint = "" if may_help else "; is the address still that of a webhook?"
            return may_help, f"HTTP {error.code}{said}{hint}", retry_after_seconds(error.headers.get("Retry-After", ""))
    except TimeoutError:
        # Another attempt might post it twice.
        return False, f"no answer within {TIMEOUT_SECONDS:g} s; it may have come all the same", None
    except urllib.error.URLError as error:
        timed_out = isinstance(error.reason, TimeoutError)
        why = f"cannot be reached: {error.reason}".replace(url, "...")
        return not timed_out, why, None
    except (OSError, HTTPException) as error:
        return False, f"the connection broke ({type(error).__name__}); it may have come all the same", None


def _shown(error: urllib.error.HTTPError, url: str) -> str:
    """Return what the server says: Slack names the mistake, such as ``invalid_blocks``."""
    try:
        text = error.read(_SHOWN).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return ""
    for secret in (url, urlsplit(url).path):
        if len(secret) > 1:
            text = text.replace(secret, "...")
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f" ({words})" if words and not words.startswith("<") else ""
