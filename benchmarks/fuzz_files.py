"""Targets of files that people and programs write: CSV, YAML, price books, and the values of options."""

import math

from fuzz_targets import Scratch, require, require_finite, target

from exporter.accounting.prices import PriceBook
from exporter.config import price_book, read_collectors, web_config
from exporter.config import price_book as price_table
from exporter.config.options import OPTIONS
from exporter.config.price_book import KNOWN_MODELS
from exporter.config.resolve import load_agent
from exporter.cost import budgets as budget_file
from exporter.cost.ledger import chunks, parse_window
from exporter.cost.node_report import base_address
from exporter.cost.prometheus import seconds_of
from exporter.errors import ConfigError
from exporter.metrics.collector import ExpositionOptions, build
from exporter.metrics.text_format import Dropped, duplicate_series
from exporter.model import NodeFacts, Snapshot
from exporter.service.settings import OPTIONS as SERVE_OPTIONS
from exporter.service.settings import load_settings
from gpu_simulator import scenario

NOW = 1_800_000_000.0
_PATHS = frozenset(
    {"collectors", "price-book", "web-config", "state-dir", "kubelet-socket", "kubeconfig", "simulate", "config"}
)
"""Options whose values are looked up on the disk: what lies there is another target's."""


@target("csv", "collectors", ConfigError)
def _collectors(data: bytes) -> None:
    found = read_collectors(Scratch.file("collectors.csv", data))
    require(bool(found.without_dcgm) is bool(found.dcgm_only), "DCGM's rows are not told")
    snapshot = Snapshot(taken_at_seconds=NOW, node="node-a")
    families, _ = build(snapshot, ExpositionOptions(collectors=found), Dropped())
    require(not duplicate_series(families), "a series is there twice")
    names = [family.name for family in families]
    require(len(names) == len(set(names)), "a family is there twice")


@target("yaml", "config", ConfigError)
def _config(data: bytes) -> None:
    path = Scratch.file("config.yaml", data)
    load_agent({"config": str(path)}, {}, check_paths=False)


@target("yaml", "web", ConfigError)
def _web(data: bytes) -> None:
    found = web_config.load(Scratch.file("web.yaml", data))
    for name, value in found.headers.items():
        require((name + value).isascii() and (name + value).isprintable(), f"the header {name}: {value!r}")
    require(all(":" not in user for user in found.users), "a user with a colon")


@target("yaml", "budgets", ConfigError)
def _budgets(data: bytes) -> None:
    for budget in budget_file.load(Scratch.file("budgets.yaml", data)):
        require_finite((budget.amount, *budget.thresholds), "an amount", least=0.0)


@target("yaml", "scenario", ConfigError)
def _scenario(data: bytes) -> None:
    found = scenario.load(str(Scratch.file("scenario.yaml", data)))
    for seconds in (0.0, 61.5, 86_400.0):
        for gpu in found.at(seconds).gpus:
            require_finite((gpu.power_watts,), "a power", least=0.0)


def _priced(book: PriceBook) -> None:
    facts = NodeFacts(instance_type="p5.48xlarge", capacity_type="spot", region="us-east-1", gpu_product="H100")
    for model in (*KNOWN_MODELS[:20], "another"):
        for moment in (0.0, NOW, 4e9):
            price = book.price(model=model, node="node-a", facts=facts, at_seconds=moment)
            if price is not None:
                require_finite((price.per_hour, price.per_kwh), "a price", least=0.0)
                require(
                    bool(price.currency) and bool(price.source) and bool(price.as_of), f"of {price} is nothing told"
                )
    for line in price_table.lines(book):
        require(math.isfinite(len(line)) and "\n" not in line, f"the line {line!r}")
    book.description.encode()


@target("prices", "book", ConfigError)
def _book(data: bytes) -> None:
    path = Scratch.file("prices.yaml", data)
    book, problems = price_book.examine(price_book.read_book(path), "prices.yaml")
    if not problems:
        _priced(book)
    list(price_table.lines(book))
    _priced(price_book.load(path))


@target("options", "agent", ConfigError, most_bytes=512)
def _agent(data: bytes) -> None:
    """Lines of ``key=value``, as flags, and as variables where they begin with a capital."""
    flags, environ = _given(data)
    given = {key: value for key, value in flags.items() if key in _KEYS and key not in _PATHS}
    # What the system gives a process in its environment it gives as surrogates where it is no UTF-8.
    found = load_agent(given, environ, check_paths=False)
    require_finite(
        (
            found.sample_interval_seconds,
            found.kubelet_interval_seconds,
            found.attribution_expiry_seconds,
            found.linger_seconds,
            found.idle_threshold_ratio,
        ),
        "a setting",
        least=0.0,
    )
    require(0 <= found.listen_port < 65536, "a port")  # noqa: PLR2004 - as TCP has them


_KEYS = frozenset(option.key for option in OPTIONS)
_SERVE_KEYS = frozenset(option.key for option in SERVE_OPTIONS)
_SERVE_PATHS = frozenset(
    key for key in _SERVE_KEYS if key.endswith(("-file", "web-config")) or key in {"store", "budgets", "config"}
)


def _given(data: bytes) -> tuple[dict[str, str], dict[str, str]]:
    pairs = [line.partition("=") for line in data.decode("utf-8", "surrogateescape").replace("\0", "").split("\n")]
    flags = {key: value for key, _, value in pairs if key and not key[0].isupper()}
    environ = {
        key: value for key, _, value in pairs if key[:1].isupper() and not key.endswith(("CONFIG", "BOOK", "SIMULATE"))
    }
    return flags, environ


@target("options", "serve", ConfigError, most_bytes=512)
def _serve(data: bytes) -> None:
    flags, _ = _given(data)
    given = {key: value for key, value in flags.items() if key in _SERVE_KEYS - _SERVE_PATHS}
    found = load_settings({"prometheus": "http://127.0.0.1:9090", **given}, {})
    require_finite((found.refresh_seconds, found.prometheus.timeout_seconds), "a setting", least=0.0)
    require(found.prometheus.url.startswith("http"), "an address")


@target("options", "window", ConfigError, most_bytes=128)
def _window(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    window = parse_window(text, NOW)
    require(0 < window.seconds <= 3700 * 86_400 and window.end_seconds <= NOW, f"the window {window}")
    require(sum(chunk.seconds for chunk in chunks(window)) == window.seconds, "days that do not sum to the window")


@target("options", "texts", ConfigError, most_bytes=256)
def _texts(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    seconds = seconds_of(text)
    require(seconds is None or seconds >= 0, "a retention")
    require(base_address(text).startswith(("http://", "https://")), "an address")
