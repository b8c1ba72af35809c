"""What the address of a page asks for, and the addresses of pages that ask for nearly the same."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from typing import get_args
from urllib.parse import quote, urlencode

from exporter.errors import ConfigError
from exporter.report.fleet.report import ShareIdle
from exporter.report.fleet.values import DIMENSIONS, LABEL, Dimension, Filters, Window, label_problem, too_many_labels
from exporter.report.fleet.windows import Now, parse_window
from exporter.report.service.parameters import filter_text

NONE = "(none)"
"""In an address: the value is empty, as the team of those that have none. An empty parameter asks for nothing."""
_OF_A_TABLE = ("sort", "page", "q")
DEFAULT_WINDOW = "30d"
_LONGEST = 500

Asked = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A page as it was asked for."""

    prefix: str
    """Of all paths, where a proxy serves this below a folder; else empty."""
    path: str
    window: Window
    now_seconds: float
    asked: Asked = field(default_factory=dict)
    """Every known parameter that is not empty, as it was written."""
    filters: Filters = field(default_factory=Filters)
    share_idle: ShareIdle = "none"
    share_unallocated: bool = False
    sort: str = ""
    """A column's name, with a ``-`` before it where the largest comes first; empty is the table's own order."""
    page: int = 1
    search: str = ""
    usual_currency: str = ""
    """That which most of the fleet's GPU-hours were paid in: what is shown where none is asked for."""

    @property
    def currency(self) -> str:
        """The one that was asked for, or empty."""
        return (self.asked.get("currency") or ("",))[0]

    def link(self, path: str | None = None, **changes: str | int | None) -> str:
        """The address of a page with the same window, filters, sharing and currency, but for ``changes``.

        ``None`` takes a parameter away. Another page begins with its own order and its first hundred.
        """
        asked = dict(self.asked)
        if path is not None and path != self.path:
            asked = {name: values for name, values in asked.items() if name not in _OF_A_TABLE}
        if "page" not in changes:
            asked.pop("page", None)
        for name, value in changes.items():
            asked.pop(name, None)
            if value is not None:
                asked[name] = (str(value),)
        return address(self.prefix, self.path if path is None else path, asked)

    def without(self, *names: str) -> str:
        """The address of this page without some parameters."""
        return self.link(None, **dict.fromkeys(names))

    def menu(self, path: str) -> str:
        """The address of a page of the menu. What a page is about is no filter of the next one."""
        subject: Iterable[str] = ()
        if self.path == "/owner":
            subject = (name for name in dimensions_in(self.asked) if name != "cluster")
        return self.link(path, **dict.fromkeys(subject))

    def owner(self, **parts: str) -> str:
        """The address of the page on an owner, within what is asked for."""
        return self.link("/owner", **{name: value or NONE for name, value in parts.items()})

    def download(self, by: Iterable[Dimension], form: str) -> str:
        """The address of a table's data in the API, with the same window, filters and sharing."""
        pairs = [("window", written(self)), ("by", ",".join(by))]
        for name in dimensions_in(self.asked):
            pairs += [(f"filter.{name}", "" if value == NONE else filter_text(value)) for value in self.asked[name]]
        if self.share_idle != "none":
            pairs.append(("shareIdle", self.share_idle))
        if self.share_unallocated:
            pairs.append(("shareUnallocated", "true"))
        pairs.append(("format", form))
        return f"{self.prefix}/api/v1/report?{urlencode(pairs, quote_via=quote)}"


def dimensions_in(asked: Asked) -> list[Dimension]:
    """Dimensions that a page is filtered by, labels last."""
    return [name for name in DIMENSIONS if name in asked] + [name for name in asked if name.startswith(LABEL)]


def address(prefix: str, path: str, asked: Asked) -> str:
    """Path and parameters as one link."""
    pairs = [(name, value) for name, values in asked.items() for value in values if value]
    return f"{prefix}{path}" + (f"?{urlencode(pairs, quote_via=quote, safe=':/')}" if pairs else "")


def written(view: View) -> str:
    """The window as it was written, or the default one."""
    return (view.asked.get("window") or (DEFAULT_WINDOW,))[0]


def read_view(
    path: str, pairs: Iterable[tuple[str, str]], now_seconds: float, prefix: str = "", zone: tzinfo = UTC
) -> View:
    """Understand the parameters of a page; unknown ones are passed over.

    Raises:
        ConfigError: With every parameter that cannot be understood.
    """
    known = {"window", "currency", "share", "shareUnallocated", *_OF_A_TABLE, *DIMENSIONS}
    asked: dict[str, tuple[str, ...]] = {}
    for name, value in pairs:
        if (name in known or (name.startswith(LABEL) and not label_problem(name))) and value.strip():
            # Bytes of an address that are no UTF-8 come as surrogates, which no link can have.
            text = value.strip()[:_LONGEST].encode("utf-8", "replace").decode()
            asked[name] = (*asked.get(name, ()), text)
    problems = too_many_labels("the page's address", asked)
    window = _window(asked, Now(now_seconds, zone), problems)
    share, page = _share(asked, problems), _page(asked, problems)
    if problems:
        raise ConfigError(*problems)
    wanted = {name: frozenset("" if value == NONE else value for value in asked[name]) for name in dimensions_in(asked)}
    return View(
        prefix=prefix,
        path=path,
        window=window,
        now_seconds=now_seconds,
        asked=asked,
        filters=Filters(wanted=wanted),
        share_idle=share,
        share_unallocated=asked.get("shareUnallocated", ("",))[0] in {"true", "1", "on"},
        sort=asked.get("sort", ("",))[0],
        page=page,
        search=asked.get("q", ("",))[0],
    )


def plain_view(path: str, now_seconds: float, prefix: str = "", zone: tzinfo = UTC) -> View:
    """The page with nothing asked for; what an error is shown on."""
    return read_view(path, (), now_seconds, prefix, zone)


def _window(asked: Asked, now: Now, problems: list[str]) -> Window:
    try:
        return parse_window(asked.get("window", (DEFAULT_WINDOW,))[0], now.seconds, now.zone)
    except ConfigError as error:
        problems.extend(error.problems)
        return parse_window(DEFAULT_WINDOW, now.seconds, now.zone)


def _share(asked: Asked, problems: list[str]) -> ShareIdle:
    text = asked.get("share", ("none",))[0]
    for known in get_args(ShareIdle):
        if text == known:
            return known  # type: ignore[no-any-return]
    problems.append(f"share: '{text}' is no way to share idle money; allowed: none, even, weighted")
    return "none"


def _page(asked: Asked, problems: list[str]) -> int:
    text = asked.get("page", ("1",))[0]
    if text.isascii() and text.isdigit() and 1 <= len(text) <= 6 and int(text) > 0:  # noqa: PLR2004 - of a million
        return int(text)
    problems.append(f"page: '{text}' is no page; allowed: a whole number from 1")
    return 1
