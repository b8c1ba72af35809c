"""Every option of the cost service that is its own; where it reads Prometheus is `prometheus_options`."""

from urllib.parse import urlsplit

from exporter.config import kinds
from exporter.config.currencies import CURRENCIES
from exporter.config.kinds import Kind
from exporter.config.options import LOG_FORMAT, LOG_LEVEL, SERVE, WEB_CONFIG, Option

BOOKS = "Reading and keeping"


def _parse_url(text: str) -> str:
    url = urlsplit(text.strip())
    if url.scheme not in {"http", "https"} or not url.hostname or url.query or url.fragment or url.username:
        raise ValueError(text)
    _ = url.port  # ValueError where it is none
    if any(part in {".", ".."} for part in url.path.split("/")) or any(mark in url.path for mark in "{}%\\"):
        raise ValueError(text)
    return text.strip().rstrip("/")


def _parse_days(text: str) -> int:
    number = text.strip().removesuffix("d")
    if number == text.strip() or not (number.isascii() and number.isdecimal()) or not 0 <= int(number) <= _MOST_DAYS:
        raise ValueError(text)
    return int(number)


def _parse_currency(text: str) -> str:
    if text.strip() not in CURRENCIES:
        raise ValueError(text)
    return text.strip()


_MOST_DAYS = 3650
URL = Kind(
    parse=_parse_url,
    noun="an address",
    allowed="http:// or https:// with a host, a port and a path if need be, no password and no query",
    metavar="URL",
)
CURRENCY = Kind(parse=_parse_currency, noun="a currency", allowed="an ISO 4217 code such as USD or EUR", metavar="CODE")
DAYS = Kind(parse=_parse_days, noun="a number of days", allowed="0d to 3650d", metavar="DAYS")

SERVE_OPTIONS: tuple[Option, ...] = (
    Option(
        key="listen",
        kind=kinds.LISTEN,
        default=":9401",
        group=SERVE,
        help="Address of the page, the API and the metrics; no host means every interface, IPv6 in brackets.",
    ),
    WEB_CONFIG,
    Option(
        key="external-url",
        kind=URL,
        default=None,
        default_note="links are relative to the host",
        group=SERVE,
        help="Where people reach the service, for links; its path is the prefix behind a proxy, as /cost.",
    ),
    Option(
        key="title",
        kind=kinds.NAME,
        default="GPU cost",
        group=SERVE,
        help="Head of every page.",
    ),
    Option(
        key="store",
        kind=kinds.PATH,
        default=None,
        default_note="only what Prometheus still has",
        group=BOOKS,
        help="File that keeps closed days (SQLite); made where there is none. One service writes to it.",
    ),
    Option(
        key="budgets",
        kind=kinds.PATH,
        default=None,
        default_note="no budgets",
        group=BOOKS,
        help="YAML file of budgets; read again at SIGHUP.",
    ),
    Option(
        key="currency",
        kind=CURRENCY,
        default=None,
        default_note="the only currency; with several each request must name one",
        group=BOOKS,
        help="Currency of OpenCost's API where a request names none, since clients of OpenCost never do.",
    ),
    Option(
        key="timezone",
        kind=kinds.ZONE,
        default="UTC",
        group=BOOKS,
        help="Time zone of the days, weeks and months that a period names; it differs from UTC by whole hours.",
    ),
    Option(
        key="refresh-interval",
        kind=kinds.duration(10, 86_400),
        default="5m",
        group=BOOKS,
        help="Time between two looks for newer hours, budgets and days to close.",
    ),
    Option(
        key="history",
        kind=DAYS,
        default="90d",
        group=BOOKS,
        help="How many days back the store is filled from Prometheus, as far as that has them.",
    ),
    LOG_FORMAT,
    LOG_LEVEL,
)
