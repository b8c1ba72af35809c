"""Posts a digest to a webhook; its address is a secret, and no word of it but the host is ever told."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from exporter.errors import ConfigError, ExporterError
from exporter.report.redirects import NoRedirects

ATTEMPTS = 5
TIMEOUT_SECONDS = 15.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 60.0
_TOO_MANY, _SERVER_ERROR = 429, 500
_SHOWN = 200
_ALLOWED = "allowed: one line with an address, as https://hooks.slack.com/services/..."


def read_url(path: Path) -> str:
    """The address in a file.

    Raises:
        ConfigError: There is none; no word of the file is repeated.
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
    """What may be told of an address."""
    return urlsplit(url).hostname or ""


def post(url: str, message: Mapping[str, Any], sleep: Callable[[float], object] = time.sleep) -> None:
    """Post a message; asks again where that can help, and waits as long as it is told to.

    Raises:
        ExporterError: It was not taken.
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
    """``None`` where it was taken; else whether another attempt may help, why, and for how long to wait."""
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
            return may_help, f"HTTP {error.code}{said}{hint}", _retry_after(error.headers.get("Retry-After", ""))
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
    """What the server says of it: Slack's words tell what is wrong, such as ``invalid_blocks``."""
    try:
        text = error.read(_SHOWN).decode("utf-8", "replace")
    except (OSError, HTTPException):
        return ""
    for secret in (url, urlsplit(url).path):
        if len(secret) > 1:
            text = text.replace(secret, "...")
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f" ({words})" if words and not words.startswith("<") else ""


def _retry_after(text: str) -> float | None:
    return float(text) if text.isascii() and text.isdecimal() else None
