"""Option types: how a text becomes a value, and what each type allows."""

import ipaddress
import math
import os
import re
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import TypeVar
from zoneinfo import ZoneInfo

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)(?P<unit>ms|s|m|h)")
_SECONDS_PER = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_WORDS = {"on": True, "true": True, "yes": True, "1": True, "off": False, "false": False, "no": False, "0": False}
_LABEL_KEY = re.compile(
    r"(?=.{1,317}$)([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", re.ASCII
)
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
_MAX_PORT = 65535

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class OptionType:
    """A sort of value.

    ``parse`` turns a text into the value and raises ValueError; ``noun`` and ``allowed`` complete the message
    "'x' is not <noun>; allowed: <allowed>", to which ``why`` adds what is to be said of this text, if anything is.
    """

    parse: Callable[[str], object]
    noun: str
    allowed: str
    metavar: str
    _: KW_ONLY
    is_list: bool = False
    why: Callable[[str], str] = lambda _: ""


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen. An empty host is every interface."""

    host: str
    port: int


def duration_seconds(text: str) -> float:
    """Seconds of ``500ms``, ``1s``, ``2m``, ``1h``; ValueError without a unit, so that none is guessed."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return float(match["number"]) * _SECONDS_PER[match["unit"]]


def format_duration(seconds: float) -> str:
    """The shortest text that ``duration_seconds`` reads back: ``0.5`` is ``500ms``."""
    for unit in ("h", "m", "s"):
        count = seconds / _SECONDS_PER[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{seconds * 1000:.3f}".rstrip("0").rstrip(".") + "ms"


def checked(convert: Callable[[str], Value], is_allowed: Callable[[Value], object]) -> Callable[[str], object]:
    """Make a parser of a conversion, which may raise ValueError, and a test of what it gives."""

    def parse(text: str) -> object:
        value = convert(text)
        if not is_allowed(value):
            raise ValueError(text)
        return value

    return parse


def duration(minimum_seconds: float, maximum_seconds: float) -> OptionType:
    """A duration with a unit, within bounds; the value is in seconds."""
    low, high = format_duration(minimum_seconds), format_duration(maximum_seconds)
    return OptionType(
        checked(duration_seconds, lambda seconds: minimum_seconds <= seconds <= maximum_seconds),
        "a duration in range",
        f"a number with ms, s, m or h, from {low} to {high}",
        "DURATION",
    )


def choice(*words: str) -> OptionType:
    """One of a few words."""
    return OptionType(checked(str, words.__contains__), "a known choice", ", ".join(words), "{" + ",".join(words) + "}")


def count(minimum: int, maximum: int) -> OptionType:
    """A whole number within bounds."""
    return OptionType(
        checked(int, lambda value: minimum <= value <= maximum),
        "a whole number in range",
        f"{minimum} to {maximum}",
        "NUMBER",
    )


def _parse_listen(text: str) -> Listen:
    host, colon, port_text = text.strip().rpartition(":")
    if not colon:
        raise ValueError(text)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        ipaddress.IPv6Address(host.partition("%")[0])
    elif host and not _HOST_NAME.fullmatch(host):
        raise ValueError(text)
    return Listen(host, _port(port_text, least=0))


def _is_encodable(text: str) -> bool:
    # Half of a surrogate pair is in no file's name; a variable's bytes that are no UTF-8 are.
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _parse_switch(text: str) -> bool:
    value = _WORDS.get(text.strip().lower())
    if value is None:
        raise ValueError(text)
    return value


def _parse_path(text: str) -> Path:
    if not text or not _is_encodable(text):
        raise ValueError(text)
    return Path(text)


SWITCH = OptionType(_parse_switch, "a switch", "on, off", "{on,off}")
RATIO = OptionType(
    checked(float, lambda value: math.isfinite(value) and 0 <= value < 1),
    "a ratio",
    "a number from 0 up to, not including, 1",
    "RATIO",
)
LISTEN = OptionType(
    _parse_listen, "an address to listen on", ":PORT, HOST:PORT or [IPV6]:PORT with a port from 0 to 65535", "HOST:PORT"
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


def parse_zone(text: str) -> tzinfo:
    """Return the time zone of an IANA name.

    Raises:
        ValueError: The name is unknown, or days there do not begin on whole hours UTC.
    """
    zone = _zone(text)
    if not _is_on_hours(zone):
        raise ValueError(text)
    return zone


def zone_hint(text: str) -> str:
    """Return why a text is no time zone for reports, beyond being an unknown name."""
    try:
        zone = _zone(text)
    except ValueError:
        try:
            ZoneInfo("Europe/Berlin")
        except (KeyError, OSError):
            return "this host has no time zone database: install the package tzdata"
        return ""
    if _is_on_hours(zone):
        return ""
    return "days there begin within an hour UTC, and the ledger is recorded by the hour UTC, so no day would be exact"


def _zone(text: str) -> tzinfo:
    name = text.strip()
    if name.upper() == "UTC":  # also without a database
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, OSError) as error:
        raise ValueError(text) from error


def _is_on_hours(zone: tzinfo) -> bool:
    """Return whether days begin on whole hours UTC, in winter and summer of recent years."""
    offsets = (zone.utcoffset(datetime(_ZONE_YEAR, month, 1)) for month in (1, 7))  # noqa: DTZ001 - of the zone itself
    return all(offset is not None and not offset % timedelta(hours=1) for offset in offsets)


_ZONE_YEAR = 2026
ZONE = OptionType(parse_zone, "a time zone", "an IANA name such as Europe/Berlin", "ZONE", why=zone_hint)


EMBEDDED = "embedded"
DEFAULT_ADDRESS = "localhost:5555"

_DEFAULT_PORT = 5555
_MAX_SOCKET_PATH = 107
_ENGINE_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?\.?")


def parse(text: str) -> str:
    """``host:port`` (``[v6]:port``), ``unix:///path`` or ``embedded``; ValueError for anything else."""
    given = text.strip()
    if given == EMBEDDED:
        return EMBEDDED
    path = given.removeprefix("unix://")
    if path.startswith("/") or path != given:
        if not path.startswith("/") or path.endswith("/") or not path.isprintable():
            raise ValueError(text)
        if len(path.encode()) > _MAX_SOCKET_PATH:
            raise ValueError(text)
        return f"unix://{path}"
    host, port = _split(given.removeprefix("tcp://"))
    return f"{host}:{port}"


def _split(given: str) -> tuple[str, int]:
    """Host, in brackets where it is IPv6, and port."""
    bracketed, bracket, rest = given.rpartition("]")
    if bracket:
        host = bracketed.removeprefix("[")
        if host == bracketed or (rest and not rest.startswith(":")):
            raise ValueError(given)
        return _v6(host), _port(rest[1:]) if rest else _DEFAULT_PORT
    if given.count(":") > 1:
        return _v6(given), _DEFAULT_PORT
    host, colon, port = given.partition(":")
    if not _ENGINE_HOST_NAME.fullmatch(host):
        raise ValueError(given)
    return host, _port(port) if colon else _DEFAULT_PORT


def _v6(host: str) -> str:
    ipaddress.IPv6Address(host)
    return f"[{host}]"


def _port(text: str, *, least: int = 1) -> int:
    if not (text.isascii() and text.isdecimal() and least <= int(text) <= _MAX_PORT):
        raise ValueError(text)
    return int(text)


def _why(text: str) -> str:
    scheme = text.strip().partition("://")[0].lower()
    if scheme == "vsock":
        return "vsock:// is not spoken; let nv-hostengine listen on TCP or a Unix socket"
    if scheme in {"http", "https"}:
        return "an engine does not speak HTTP; give nv-hostengine's own address, port 5555 unless it was changed"
    return ""


ENGINE_ADDRESS = OptionType(
    parse, "an engine's address", "HOST, HOST:PORT, [IPV6]:PORT, unix:///path, embedded", "HOST:PORT", why=_why
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
