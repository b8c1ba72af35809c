"""Every worked example of docs/cost.md, computed with the real price book, meter and ledger."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from metering_support import holder, namespace_owner, partitioned, use, whole

from exporter.accounting.ledger import Ledgers
from exporter.accounting.meter import Meter
from exporter.accounting.prices import PriceBook, PricedGpu, money
from exporter.config import price_book
from exporter.model.attribution import NodeFacts, Owner, ShareMode
from exporter.model.fields import Field
from exporter.model.ledger import Account, Price, Totals
from exporter.model.snapshot import DeviceView

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "cost.md"
STEP_SECONDS = 60.0
JUNE = datetime.fromisoformat("2026-06-01T00:00:00Z").timestamp()
JULY = datetime.fromisoformat("2026-07-01T00:00:00Z").timestamp()
Views = Callable[[float], Sequence[DeviceView]]


@cache
def book() -> PriceBook:
    (text,) = re.findall(r"```yaml\n(currency:.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return price_book.parse(text, "cost.yaml")


def replay(
    views: Views,
    hours: float,
    *,
    start: float = JUNE,
    node: str = "n",
    facts: Callable[[float], NodeFacts] = lambda _hour: NodeFacts(),
) -> Mapping[Account, Totals]:
    """Meter and charge from ``start`` on; ``views`` and ``facts`` get hours since then."""
    meter, ledgers = Meter(STEP_SECONDS, namespace_owner), Ledgers()
    at = 0.0
    spent = 0.0
    while at <= hours * 3600:
        # An interval belongs to the state before its end, so that an interval until noon has the morning's price.
        hour = max(0.0, at - 0.001) / 3600
        of_moment = views(hour)
        prices = _prices(of_moment, node, facts(hour), start + hour * 3600)
        portions = meter.add(of_moment, at)
        ledgers.charge(portions, prices, now=start + at, steady=at)
        spent += sum(
            money(portion.seconds, portion.energy_joules, prices[portion.gpu_uuid]).total for portion in portions
        )
        at += STEP_SECONDS
    accounts = ledgers.view().accounts
    assert sum(totals.money["USD"].total for totals in accounts.values()) == pytest.approx(spent, rel=1e-9)
    assert sum(totals.seconds.total for totals in accounts.values()) == pytest.approx(hours * 3600, rel=1e-9)
    return accounts


def _prices(views: Sequence[DeviceView], node: str, facts: NodeFacts, at_seconds: float) -> dict[str, Price]:
    prices = {}
    for gpu in {view.gpu.uuid: view.gpu for view in views}.values():
        price = book().price(PricedGpu(gpu.model, node, facts), at_seconds)
        assert price is not None
        prices[gpu.uuid] = price
    return prices


def table(accounts: Mapping[Account, Totals]) -> list[str]:
    by_owner: dict[str, list[Totals]] = {}
    for account, totals in accounts.items():
        by_owner.setdefault(_name(account.owner), []).append(totals)
    named = sorted(by_owner.items(), key=lambda entry: (entry[0] == "Unallocated", entry[0]))
    owned = [totals for account, totals in accounts.items() if account.owner.namespace]
    rows = [_row(name, found, [] if name == "Unallocated" else found) for name, found in named]
    return [*rows, _row("sum", list(accounts.values()), owned)]


def _name(owner: Owner) -> str:
    return owner.namespace or owner.kind


def _row(name: str, found: Sequence[Totals], owned: Sequence[Totals]) -> str:
    """Return a row as in a report: only time of owners is active or idle."""
    allocated = sum(totals.seconds.total for totals in found) / 3600
    active, idle = (sum(getattr(one.seconds, key) for one in owned) / 3600 for key in ("active", "idle"))
    total = sum(totals.money["USD"].total for totals in found)
    idle_cost = sum(totals.money["USD"].idle for totals in owned)
    states = [f"{active:.4f}", f"{idle:.4f}"] if owned else ["", ""]
    cells = [f"{allocated:.4f}", *states, f"{total:.2f}", f"{idle_cost:.2f}" if owned else ""]
    return " | ".join([f"| {name}", *cells]) + " |"


def documented(heading: str) -> list[list[str]]:
    """Return the rows of each table below a heading."""
    _, _, rest = DOCUMENT.read_text().partition(f"\n### {heading}\n")
    section = rest.partition("\n### ")[0]
    tables = re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE)
    return [found.strip().splitlines()[2:] for found in tables]


def alone(
    ratio: Callable[[float], float], *, model: str = "NVIDIA H100 80GB HBM3", watts: float | None = None
) -> Views:
    values: dict[Field, int | float] = {} if watts is None else {Field.POWER_USAGE: watts}

    def views(hour: float) -> Sequence[DeviceView]:
        busy = ratio(hour)
        return [whole(use(holder("p", namespace="train"), busy), busy=busy, model=model, values=values)]

    return views


def renamed(views: Sequence[DeviceView], namespaces: Mapping[str, str]) -> Sequence[DeviceView]:
    """Return the same views with each pod in a separate namespace, by pod."""
    return [
        replace(
            view,
            pods=tuple(
                replace(pod, holder=replace(pod.holder, namespace=namespaces[pod.holder.pod])) for pod in view.pods
            ),
        )
        for view in views
    ]


def test_whole_gpu_example_matches_the_document() -> None:
    accounts = replay(alone(lambda hour: 1.0 if hour < 5 else 0.0), 10)
    assert documented("A whole GPU") == [table(accounts)]


def test_mig_seven_ways_example_matches_the_document() -> None:
    held: dict[int, tuple[str, float | None]] = {number: (f"p{number}", 0.8) for number in range(5)} | {5: ("p5", 0.0)}
    names = {f"p{number}": "busy" for number in range(5)} | {"p5": "forgotten"}
    views = renamed(partitioned(("1g.10gb",) * 7, held), names)
    assert documented("MIG, seven ways") == [table(replay(lambda _hour: views, 10))]


def test_mig_halves_example_with_a_remainder_matches_the_document() -> None:
    names = {"left": "left", "right": "right"}
    tables = []
    for layout in (("3g.40gb", "3g.40gb"), ("3g.40gb", "2g.20gb")):
        views = renamed(partitioned(layout, {0: ("left", 1.0), 1: ("right", 0.0)}), names)
        tables.append(table(replay(lambda _hour, views=views: views, 10)))  # type: ignore[misc]
    assert documented("MIG, 3g + 3g") == tables


def test_time_slicing_example_matches_the_document() -> None:
    pods = tuple(
        use(holder(name, share=0.25, mode=ShareMode.SHARED, namespace=name), ratio)
        for name, ratio in (("greedy", 0.25), ("modest", 0.25), ("sleeper", 0.0))
    )
    views = [whole(*pods, busy=0.5)]
    assert documented("Time-slicing, four ways, one replica free") == [table(replay(lambda _hour: views, 10))]


def test_price_change_at_noon_example_matches_the_document() -> None:
    accounts = replay(alone(lambda _hour: 0.0), 24, start=JULY)
    assert documented("The price changes at noon") == [table(accounts)]


def test_spot_to_on_demand_example_matches_the_document() -> None:
    def facts(hour: float) -> NodeFacts:
        capacity = "spot" if hour < 4 else "on-demand"
        return NodeFacts(instance_type="g6e.12xlarge", region="us-east-1", capacity_type=capacity)

    accounts = replay(alone(lambda _hour: 1.0, model="NVIDIA L40S"), 10, facts=facts)
    assert documented("From spot to on-demand") == [table(accounts)]


def test_own_servers_examples_match_the_document() -> None:
    by_formula = replay(alone(lambda _hour: 1.0), 10, node="dc1-a")
    metered = replay(alone(lambda hour: 1.0 if hour < 5 else 0.0, watts=500.0), 10, node="dc2-a")
    assert documented("Own servers") == [table(by_formula), table(metered)]


def test_documented_price_book_has_no_warning_and_every_row_is_used() -> None:
    assert book().warnings == ()
    assert [row.price.source.partition(":")[2] for row in book().rows] == [
        "h100-until-july",
        "h100-from-july",
        "l40s-spot",
        "l40s-on-demand",
        "own-servers",
        "own-servers-metered",
    ]
