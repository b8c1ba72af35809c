"""A digest as a message of Slack's, and of what takes the same: Mattermost, Rocket.Chat, Alertmanager-like relays."""

import json
from typing import Any

from exporter.report.digest.sections import Cell, Section, headline, period, sections
from exporter.report.digest.values import Digest

MOST_BLOCKS = 50
MOST_TEXTS = 5
"""Of a section."""
MOST_CHARACTERS = 2850
"""Of a text; Slack takes 3000, and a line that says what is left out comes on top."""
_MOST_OF_ADDRESS = 500
_MOST_OF_HEAD, _MOST_OF_TEXT = 150, 2000


def message(digest: Digest) -> dict[str, Any]:
    """``text`` for notifications, ``blocks`` for the chat."""
    told = headline(digest)
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": _cut(told, _MOST_OF_HEAD)}}
    ]
    under = period(digest) + ("; *SIMULATED FLEET: nothing here is real*" if digest.simulated else "")
    blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": under}]})
    texts = [text for section in sections(digest) for text in _texts(section)]
    blocks += [{"type": "section", "text": {"type": "mrkdwn", "text": text}} for text in texts]
    return {"text": escaped(_cut(told, _MOST_OF_TEXT)), "blocks": blocks[:MOST_BLOCKS]}


def document(digest: Digest) -> str:
    """The message as it is sent."""
    return json.dumps(message(digest), ensure_ascii=False, indent=2) + "\n"


def escaped(text: str) -> str:
    """A text that can call nobody and be no link."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _texts(section: Section) -> list[str]:
    """A section as texts of a block each: rows that find no room in the last one are counted."""
    title = escaped(section.title)
    if section.href:
        title = f"<{escaped(section.href)}|{title}>"
    texts = ["\n".join([f"*{title}*", *([escaped(section.lead)] if section.lead else [])])]
    rows = [_row(row, section.columns) for row in section.rows]
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


def _row(row: tuple[Cell, ...], columns: tuple[str, ...]) -> str:
    """``• name: 12 USD, of its cost: 40 %``: a chat has no tables."""
    first, *rest = row
    head = _code(first.text, first.href if len(first.href) < _MOST_OF_ADDRESS else "")
    told = [
        f"{title.lower()}: {_value(cell)}" if title and place else _value(cell)
        for place, (title, cell) in enumerate(zip(columns[1:], rest, strict=True))
        if cell.text
    ]
    return f"• {head}: {', '.join(told)}" if told else f"• {head}"


def _value(cell: Cell) -> str:
    """A number as it is; a name as code, in which nothing means anything."""
    return (
        f"*{escaped(cell.text)}*" if cell.tone == "bad" else escaped(cell.text) if cell.is_number else _code(cell.text)
    )


def _code(text: str, href: str = "") -> str:
    """A name as code; its page beside it, since nothing in a link's own text can be told to mean nothing."""
    name = "`" + escaped(text.replace("`", "'")) + "`"
    return f"{name} (<{escaped(href)}|open>)" if href else name


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
