"""Defines the types of options: conversion of a text to a value, and allowed values."""

import ipaddress
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit
from zoneinfo import ZoneInfo, available_timezones

from exporter.errors import expected

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)(?P<unit>ms|s|m|h)")
_SECONDS_PER = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_WORDS = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_LABEL_KEY = re.compile(
    r"(?=.{1,317}$)([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII
)
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<name>[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?\.?)?)(?::(?P<port>[0-9]{1,5}))?"
)
_MAX_PORT = 65535

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class OptionType:
    """A type of option values.

    ``parse`` converts a text to the value. It raises ValueError with the text for display, and with a reason if the
    message "'x' is not <noun>; allowed: <allowed>" is not sufficient.
    """

    parse: Callable[[str], object]
    noun: str
    allowed: str
    metavar: str
    _: KW_ONLY
    is_list: bool = False
    words: tuple[str, ...] = ()
    """All values, if they are few."""
    bounds: tuple[float, float] | None = None
    """Minimum and maximum value; in seconds for a duration."""

    def refusal(self, error: ValueError) -> str:
        """Return the problem of a text for which ``parse`` raised an error."""
        text, *reasons = error.args
        hint = expected(text.lower(), self.words, self.allowed)
        return "; ".join((f"value '{text}' is not {self.noun}{hint}", *reasons))


@dataclass(frozen=True, slots=True)
class Listen:
    """Address of a server. An empty host means every interface."""

    host: str
    port: int


def duration_seconds(text: str) -> float:
    """Convert ``500ms``, ``1s``, ``2m``, ``1h`` to seconds; raise ValueError if the unit is missing."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return float(match["number"]) * _SECONDS_PER[match["unit"]]


def format_duration(seconds: float) -> str:
    """Return the shortest text that ``duration_seconds`` converts back: ``500ms`` for ``0.5``."""
    for unit in ("h", "m", "s"):
        count = seconds / _SECONDS_PER[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{seconds * 1000:.3f}".rstrip("0").rstrip(".") + "ms"


def checked(
    convert: Callable[[str], Value], is_allowed: Callable[[Value], object] = lambda _: True
) -> Callable[[str], object]:
    """Return a parser from a conversion, which may raise ValueError, and a test of its result."""

    def parse(text: str) -> object:
        try:
            value = convert(text)
        except ValueError as error:
            raise ValueError(text, *error.args[1:]) from None
        if not is_allowed(value):
            raise ValueError(text)
        return value

    return parse


def duration(minimum_seconds: float, maximum_seconds: float) -> OptionType:
    """Return the type of a duration with a unit, within bounds; the value is in seconds."""
    low, high = format_duration(minimum_seconds), format_duration(maximum_seconds)
    return OptionType(
        checked(duration_seconds, lambda seconds: minimum_seconds <= seconds <= maximum_seconds),
        "a duration in range",
        f"a number with ms, s, m or h, from {low} to {high}",
        "DURATION",
        bounds=(minimum_seconds, maximum_seconds),
    )


def choice(*words: str) -> OptionType:
    """Return the type of a choice of words."""
    metavar = "{" + ",".join(words) + "}"
    return OptionType(checked(str, words.__contains__), "a known choice", ", ".join(words), metavar, words=words)


def count(minimum: int, maximum: int) -> OptionType:
    """Return the type of a whole number within bounds."""
    return OptionType(
        checked(int, lambda value: minimum <= value <= maximum),
        "a whole number in range",
        f"{minimum} to {maximum}",
        "NUMBER",
        bounds=(minimum, maximum),
    )


def part_of(text: str) -> float:
    """Convert ``0.8`` or ``80%`` to a fraction; raise ValueError if the text is not a number."""
    return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)


def _host_and_port(text: str, default_port: int | None, least_port: int) -> tuple[str, int]:
    """Return host and port; the host has no brackets, and is empty if it is missing."""
    found = _ADDRESS.fullmatch(text)
    port = int(found["port"]) if found and found["port"] else default_port
    if found is None or port is None or not least_port <= port <= _MAX_PORT:
        raise ValueError(text)
    if found["v6"]:
        ipaddress.IPv6Address(found["v6"])
    return found["v6"] or found["name"] or "", port


def _is_encodable(text: str) -> bool:
    # No file name contains half of a surrogate pair; bytes of a variable that are not UTF-8 are allowed.
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _parse_path(text: str) -> Path:
    if not text or not _is_encodable(text):
        raise ValueError(text)
    return Path(text)


SWITCH = OptionType(
    checked(lambda text: _WORDS.get(text.strip().lower()), lambda value: value is not None),
    "a switch",
    "on, off",
    "{on,off}",
    words=("on", "off"),
)
RATIO = OptionType(
    checked(float, lambda value: math.isfinite(value) and 0 <= value < 1),
    "a ratio",
    "a number from 0 up to, not including, 1",
    "RATIO",
)
PART = OptionType(checked(part_of, lambda part: 0 <= part <= 1), "a part", "0 to 1, or 0% to 100%", "PART")
LISTEN = OptionType(
    checked(lambda text: Listen(*_host_and_port(text.strip(), default_port=None, least_port=0))),
    "an address to listen on",
    ":PORT, HOST:PORT or [IPV6]:PORT with a port from 0 to 65535",
    "HOST:PORT",
)
PATH = OptionType(_parse_path, "a path", "a path that is not empty", "PATH")
SOCKET = OptionType(
    checked(lambda text: text.removeprefix("unix://"), lambda path: path.startswith("/") and _is_encodable(path)),
    "a socket path",
    "an absolute path, or unix:///path",
    "PATH",
)
NAME = OptionType(
    checked(str.strip, lambda name: name and name.isprintable()), "a name", "printable text that is not empty", "NAME"
)
LABEL = OptionType(
    checked(str, lambda text: _LABEL_NAME.fullmatch(text) and not text.startswith("__")),
    "a label name",
    "letters, digits and _, no digit first",
    "LABEL",
)
_parse_pattern = checked(str.strip, lambda pattern: pattern and not any(map(str.isspace, pattern)))
RESOURCES = OptionType(
    _parse_pattern,
    "a resource name",
    "resource names or patterns such as nvidia.com/mig-*, separated by commas",
    "PATTERN,...",
    is_list=True,
)
KEYS = OptionType(
    _parse_pattern,
    "a key",
    "names such as team or example.com/cost-center, separated by commas",
    "KEY,...",
    is_list=True,
)
LABEL_KEYS = OptionType(
    checked(str.strip, _LABEL_KEY.fullmatch),
    "a Kubernetes label key",
    "label keys such as project or example.com/cost-center, separated by commas",
    "KEY,...",
    is_list=True,
)


def http_parts(text: str) -> SplitResult:
    """Return the parts of an HTTP address: scheme, host, and optionally port and path.

    Raises:
        ValueError: The text is not an HTTP address. The error omits a text that may contain a password.
    """
    given = text.strip()
    is_plain = given.isascii() and given.isprintable() and not set(' "<>\\^`{|}?#') & set(given)
    with suppress(ValueError):
        parts = urlsplit(given.rstrip("/"))
        is_host = parts.hostname and parts.port != 0 and "@" not in parts.netloc
        if is_plain and is_host and parts.scheme in {"http", "https"}:
            return parts
    raise ValueError("..." if set("@?#[") & set(given) else text)


_ZONE_YEAR = 2026


def _parse_zone(text: str) -> tzinfo:
    """Return the time zone of an IANA name; its days begin on whole hours UTC, in winter and summer."""
    name = text.strip()
    if name.upper() == "UTC":  # works without a database
        return UTC
    try:
        zone = ZoneInfo(name)
    except (KeyError, OSError):
        missing = "this host has no time zone database: install the package tzdata"
        raise ValueError(text, *(() if available_timezones() else (missing,))) from None
    offsets = (zone.utcoffset(datetime(_ZONE_YEAR, month, 1)) for month in (1, 7))  # noqa: DTZ001 - of the zone itself
    if any(offset is None or offset % timedelta(hours=1) for offset in offsets):
        why = (
            "days there begin within an hour UTC, and the ledger is recorded by the hour UTC, so no day would be exact"
        )
        raise ValueError(text, why)
    return zone


ZONE = OptionType(checked(_parse_zone), "a time zone", "an IANA name such as Europe/Berlin", "ZONE")

EMBEDDED = "embedded"
DEFAULT_ADDRESS = "localhost:5555"
_ENGINE_PORT = 5555
_MAX_SOCKET_PATH = 107
_NO_HTTP = "an engine does not speak HTTP; give nv-hostengine's own address, port 5555 unless it was changed"
_NOT_SPOKEN = {
    "vsock": "vsock:// is not spoken; let nv-hostengine listen on TCP or a Unix socket",
    "http": _NO_HTTP,
    "https": _NO_HTTP,
}
"""Reasons for unsupported schemes."""


def _parse_engine(text: str) -> str:
    """Return ``host:port`` (``[v6]:port``), ``unix:///path`` or ``embedded``."""
    given = text.strip()
    scheme, _, rest = given.rpartition("://")
    if given == EMBEDDED:
        return EMBEDDED
    if scheme == "unix" or (not scheme and rest.startswith("/")):
        is_path = rest.startswith("/") and not rest.endswith("/") and rest.isprintable()
        if not is_path or len(rest.encode()) > _MAX_SOCKET_PATH:
            raise ValueError(text)
        return f"unix://{rest}"
    if scheme not in {"", "tcp"}:
        raise ValueError(text, *filter(None, [_NOT_SPOKEN.get(scheme.lower())]))
    if "[" not in rest and rest.count(":") > 1:
        rest = f"[{rest}]"
    host, port = _host_and_port(rest, default_port=_ENGINE_PORT, least_port=1)
    if not host:
        raise ValueError(text)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


ENGINE_ADDRESS = OptionType(
    checked(_parse_engine), "an engine's address", "HOST, HOST:PORT, [IPV6]:PORT, unix:///path, embedded", "HOST:PORT"
)


CURRENCIES = frozenset(
    """
    AED AFN ALL AMD AOA ARS AUD AWG AZN BAM BBD BDT BGN BHD BIF BMD BND BOB BRL BSD BTN BWP BYN BZD CAD CDF CHF CLP CNY
    COP CRC CUP CVE CZK DJF DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD GNF GTQ GYD HKD HNL HTG HUF IDR ILS
    INR IQD IRR ISK JMD JOD JPY KES KGS KHR KMF KPW KRW KWD KYD KZT LAK LBP LKR LRD LSL LYD MAD MDL MGA MKD MMK MNT MOP
    MRU MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR NZD OMR PAB PEN PGK PHP PKR PLN PYG QAR RON RSD RUB RWF SAR SBD SCR
    SDG SEK SGD SHP SLE SOS SRD SSP STN SVC SYP SZL THB TJS TMT TND TOP TRY TTD TWD TZS UAH UGX USD UYU UZS VES VND VUV
    WST XAF XCD XCG XOF XPF YER ZAR ZMW ZWG
    """.split()  # noqa: SIM905 - a list of one code a line would be five pages
)
