"""Logs on standard error: one line per event, as text or JSON."""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

_PLAIN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LOGIN = re.compile(r"(?<=://)[^\s\"']{1,300}@")
"""Of an address: what stands before its host."""


def configure(log_format: Literal["text", "json"], level: str, stream: TextIO | None = None) -> None:
    """Send every event of ``level`` (``debug`` to ``error``) and above to ``stream``, standard error by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def _event(record: logging.LogRecord) -> dict[str, object]:
    at = datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds")
    event: dict[str, object] = {
        "time": at.replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "part": record.name.removeprefix("exporter."),
        "message": record.getMessage(),
    }
    event.update({key: value for key, value in vars(record).items() if key not in _PLAIN_ATTRIBUTES})
    return event


def told(text: str) -> str:
    """A text as it may be told to anybody: ``printable``, and no address in it has a user or a password."""
    return printable(_LOGIN.sub("...@", text))


def printable(text: str) -> str:
    """A text as one line that can neither steer a terminal nor pass itself off as another: what could is escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


class JsonFormatter(logging.Formatter):
    """One JSON object per event; what is passed as ``extra`` becomes keys."""

    def format(self, record: logging.LogRecord) -> str:
        """The event as one line."""
        event = _event(record)
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        line = _LOGIN.sub("...@", json.dumps(event, default=str, ensure_ascii=False))
        # JSON leaves in what begins a command to some terminals (U+009B), and ends a line to some readers (U+2028).
        if line.isprintable():
            return line
        return "".join(one if one.isprintable() else json.dumps(one)[1:-1] for one in line)


class TextFormatter(logging.Formatter):
    """``TIME LEVEL part: message key=value``, with line breaks and all else that is not printable escaped."""

    def format(self, record: logging.LogRecord) -> str:
        """The event as one line."""
        event = _event(record)
        head = f"{event.pop('time')} {str(event.pop('level')).upper():7} {event.pop('part')}: {event.pop('message')}"
        parts = [head, *(f"{key}={value}" for key, value in event.items())]
        if record.exc_info:
            parts.append(f"exception={self.formatException(record.exc_info)!r}")
        return told(" ".join(parts))
