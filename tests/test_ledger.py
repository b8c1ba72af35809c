"""The ledger: what is added up, what is shown of it, and what outlives a restart."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metering_support import H100

from exporter.accounting.ledger import Ledger
from exporter.model import (
    OTHER,
    UNALLOCATED,
    Account,
    LedgerView,
    Money,
    Owner,
    PodAccount,
    Portion,
    Price,
    ShareMode,
    Totals,
)

DOLLARS = Price(per_hour=3600.0, currency="USD", source="book:h100", as_of="2026-01-01")
EUROS = replace(DOLLARS, per_hour=7200.0, currency="EUR")


def account(namespace: str, name: str = "") -> Account:
    owner = Owner(namespace=namespace, kind="Job" if name else "", name=name)
    return Account(owner=owner, model=H100, mode=ShareMode.EXCLUSIVE)


FREE = Account(owner=UNALLOCATED, model=H100, mode=ShareMode.EXCLUSIVE)


def pod(name: str, uid: str | None = None) -> PodAccount:
    return PodAccount(
        device_uuid="GPU-0",
        gpu_index=0,
        gpu_uuid="GPU-0",
        model=H100,
        namespace="ml",
        pod=name,
        container="main",
        pod_uid=uid,
    )


def second(
    of: Account, *, active: float = 0.0, idle: float = 0.0, who: PodAccount | None = None, joules: float | None = None
) -> Portion:
    return Portion(
        gpu_uuid="GPU-0", account=of, pod=who, active_seconds=active, idle_seconds=idle, energy_joules=joules
    )


def shown(ledger: Ledger, now: float, of: Account) -> Totals:
    return ledger.view(now).accounts[of]


def restarted(ledger: Ledger, **options: Any) -> Ledger:  # noqa: ANN401 # the options of the ledger, whichever
    return Ledger.load(json.loads(json.dumps(ledger.dump())), **options)


def old() -> Ledger:
    """A ledger in which every series shows the truth from the start."""
    return Ledger(birth_seconds=0.0)


def test_money_is_seconds_times_price_and_idle_money_its_idle_part() -> None:
    ledger = old()
    ledger.charge([second(account("ml"), active=1.0, idle=0.5)], {"GPU-0": DOLLARS}, 10.0)
    assert shown(ledger, 10.0, account("ml")).money == {"USD": Money(total=1.5, idle=0.5)}


def test_a_new_price_counts_from_then_on_and_another_currency_is_kept_apart() -> None:
    ledger = old()
    for now, price in ((1.0, DOLLARS), (2.0, replace(DOLLARS, per_hour=7200.0)), (3.0, EUROS)):
        ledger.charge([second(account("ml"), active=1.0)], {"GPU-0": price}, now)
    assert shown(ledger, 3.0, account("ml")).money == {"USD": Money(total=3.0), "EUR": Money(total=2.0)}


def test_without_a_price_money_is_absent_and_the_seconds_are_counted_as_unpriced() -> None:
    ledger = old()
    ledger.charge([second(account("ml"), active=1.0, idle=1.0)], {}, 1.0)
    totals = shown(ledger, 1.0, account("ml"))
    assert totals.money == {}
    assert totals.unpriced_seconds == totals.allocated_seconds == 2.0


def test_measured_energy_is_paid_on_top_and_divided_as_the_seconds_are() -> None:
    ledger = old()
    price = replace(DOLLARS, per_hour=0.0, per_kwh=0.5)
    ledger.charge([second(account("ml"), active=1.0, idle=3.0, joules=7.2e6)], {"GPU-0": price}, 1.0)
    ledger.charge([second(FREE, joules=3.6e6)], {"GPU-0": price}, 1.0)
    assert shown(ledger, 1.0, account("ml")).money == {"USD": Money(total=1.0, idle=0.75)}
    assert shown(ledger, 1.0, FREE).money == {"USD": Money(total=0.5, idle=0.0)}


def test_where_energy_was_not_measured_its_time_is_told() -> None:
    ledger = old()
    ledger.charge([second(account("ml"), active=2.0), second(account("ml"), active=1.0, joules=300.0)], {}, 1.0)
    totals = shown(ledger, 1.0, account("ml"))
    assert (totals.energy_joules, totals.energy_unknown_seconds) == (300.0, 2.0)


def test_a_new_series_shows_zero_until_two_scrapes_have_seen_it_then_the_truth() -> None:
    ledger = Ledger()
    for now in range(1000, 1101):
        ledger.charge([second(account("ml"), active=1.0, who=pod("a"))], {"GPU-0": DOLLARS}, float(now))
        view = ledger.view(float(now))
        expected = 0.0 if now < 1075 else now - 999.0
        assert view.accounts[account("ml")].active_seconds == view.pods[pod("a")].active_seconds == expected
        assert view.accounts[account("ml")].money["USD"].total == expected
    assert ledger.capacity_seconds == 101.0


def test_a_currency_that_comes_later_is_a_new_series_of_its_own() -> None:
    ledger = Ledger()
    ledger.charge([second(account("ml"), active=1.0)], {}, 0.0)
    assert shown(ledger, 200.0, account("ml")).active_seconds == 1.0
    ledger.charge([second(account("ml"), active=1.0)], {"GPU-0": DOLLARS}, 200.0)
    totals = shown(ledger, 201.0, account("ml"))
    assert (totals.active_seconds, totals.money["USD"].total) == (2.0, 0.0)
    assert shown(ledger, 275.0, account("ml")).money["USD"].total == 1.0


def test_what_was_shown_once_is_shown_after_a_restart_too_in_this_boot_or_another() -> None:
    ledger = Ledger()
    ledger.charge([second(account("ml"), active=1.0)], {"GPU-0": DOLLARS}, 5000.0)
    before = shown(ledger, 5100.0, account("ml"))
    assert before.active_seconds == 1.0
    for now in (5101.0, 3.0):
        assert shown(restarted(ledger), now, account("ml")) == before


def test_a_series_that_showed_zero_at_the_restart_begins_its_zeros_anew() -> None:
    ledger = Ledger()
    ledger.charge([second(account("ml"), active=1.0)], {}, 5000.0)
    assert shown(ledger, 5010.0, account("ml")).active_seconds == 0.0
    again = restarted(ledger)
    assert shown(again, 7.0, account("ml")).active_seconds == 0.0
    assert shown(again, 81.0, account("ml")).active_seconds == 0.0
    assert shown(again, 82.0, account("ml")).active_seconds == 1.0


def test_a_pod_lingers_after_its_end_and_the_owner_keeps_its_seconds() -> None:
    ledger = Ledger(linger_seconds=300.0)
    ledger.charge([second(account("ml"), active=20.0, who=pod("a"))], {}, 0.0)
    seen = []
    for now in range(0, 500, 5):
        ledger.charge([second(FREE, idle=5.0)], {}, float(now))
        totals = ledger.view(float(now)).pods.get(pod("a"))
        seen.append(None if totals is None else totals.active_seconds)
    assert seen[:15] == [0.0] * 15
    assert seen[15:76] == [20.0] * 61
    assert seen[76:] == [None] * len(seen[76:])
    assert shown(ledger, 500.0, account("ml")).active_seconds == 20.0


def test_a_pod_that_lived_long_lingers_as_long_as_it_was_told_to() -> None:
    ledger = Ledger(linger_seconds=300.0)
    for now in (0.0, 1000.0):
        ledger.charge([second(account("ml"), active=20.0, who=pod("a"))], {}, now)
    ledger.charge([second(FREE, idle=1.0)], {}, 1300.0)
    assert pod("a") in ledger.view(1300.0).pods
    ledger.charge([second(FREE, idle=1.0)], {}, 1301.0)
    assert ledger.view(1301.0).pods == {}


def test_however_short_the_lingering_the_truth_of_a_short_pod_is_shown() -> None:
    ledger = Ledger(linger_seconds=0.0)
    ledger.charge([second(account("ml"), active=20.0, who=pod("a"))], {}, 0.0)
    ledger.charge([second(FREE, idle=5.0)], {}, 149.0)
    assert ledger.view(149.0).pods[pod("a")].active_seconds == 20.0
    ledger.charge([second(FREE, idle=5.0)], {}, 151.0)
    assert ledger.view(151.0).pods == {}


def test_while_nothing_is_metered_no_pod_is_taken_for_ended() -> None:
    ledger = old()
    ledger.charge([second(account("ml"), active=1.0, who=pod("a"))], {}, 0.0)
    assert pod("a") in ledger.view(100_000.0).pods


def test_a_uid_that_becomes_known_keeps_the_pods_counters_and_another_uid_is_another_pod() -> None:
    ledger = old()
    for now, uid in ((1.0, None), (2.0, "uid-1"), (3.0, None), (4.0, "uid-2")):
        ledger.charge([second(account("ml"), active=1.0, who=pod("web-0", uid))], {}, now)
    pods = ledger.view(4.0).pods
    assert {(known.pod_uid, totals.active_seconds) for known, totals in pods.items()} == {
        ("uid-1", 3.0),
        ("uid-2", 1.0),
    }


def test_beyond_the_limit_the_accounts_that_are_silent_for_longest_are_folded_without_losing_a_second() -> None:
    ledger = Ledger(birth_seconds=0.0, account_limit=10)
    for number in range(50):
        portions = [second(account("ml", f"job-{number}"), active=1.0, idle=0.5), second(FREE, idle=1.0)]
        ledger.charge(portions, {"GPU-0": DOLLARS}, float(number))
    view = ledger.view(60.0)
    names = {one.owner.name for one in view.accounts if one.owner.kind == "Job"}
    assert len(view.accounts) == 10
    assert names == {f"job-{number}" for number in range(42, 50)}
    other = view.accounts[Account(owner=OTHER, model=H100, mode=ShareMode.EXCLUSIVE)]
    assert other.allocated_seconds == 42 * 1.5
    assert other.money == {"USD": Money(total=42 * 1.5, idle=42 * 0.5)}
    assert sum(totals.allocated_seconds for totals in view.accounts.values()) == view.capacity_seconds == 50 * 2.5


def test_after_a_restart_too_who_holds_now_is_not_folded() -> None:
    ledger = old()
    ledger.account_limit = 3
    for now, name in enumerate(("live", "ended", "live", "other"), start=1):
        ledger.charge([second(account(name), active=1.0)], {}, float(now))
    again = restarted(ledger, account_limit=3, birth_seconds=0.0)
    again.charge([second(account("new"), active=1.0), second(account("live"), active=1.0)], {}, 5.0)
    assert shown(again, 5.0, account("live")).active_seconds == 3.0


def test_more_accounts_at_once_than_there_is_room_for_lose_nothing() -> None:
    ledger = Ledger(birth_seconds=0.0, account_limit=2)
    for now in (1.0, 2.0):
        ledger.charge([second(account("ml", f"job-{number}"), active=1.0) for number in range(5)], {}, now)
    assert sum(totals.active_seconds for totals in ledger.view(2.0).accounts.values()) == 10.0


def test_the_conservation_error_is_what_the_parts_lack_of_the_interval() -> None:
    ledger = old()
    whole = second(account("ml"), active=0.5)
    ledger.charge([replace(whole, interval_seconds=0.75)], {}, 1.0)
    assert (ledger.conservation_error_seconds, ledger.capacity_seconds) == (0.25, 0.75)
    assert restarted(ledger).view(1.0).conservation_error_seconds == 0.25


@pytest.mark.parametrize("path", [("capacity_seconds",), ("accounts", 0, "totals", "idle_seconds"), ("pods", 0, "pod")])
@pytest.mark.parametrize("wrong", [None, "much", [], {}])
def test_what_is_no_ledger_is_refused_in_words(path: tuple[str | int, ...], wrong: object) -> None:
    ledger = old()
    ledger.charge([second(account("ml"), active=1.0, who=pod("a"))], {}, 0.0)
    data: Any = json.loads(json.dumps(ledger.dump()))
    inner = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = wrong
    if wrong == "much" and path[-1] == "pod":
        return  # a name like any other
    with pytest.raises(ValueError, match="ledger"):
        Ledger.load(data)


figure = st.floats(0, 1e4)
charges = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", "d"]),
        figure,
        figure,
        st.sampled_from([None, "uid-1", "uid-2"]),
        st.sampled_from([None, DOLLARS, EUROS, replace(DOLLARS, per_hour=1.0, per_kwh=0.3)]),
        st.floats(0.5, 100),
        st.booleans(),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(charges, st.integers(3, 6))
def test_nothing_that_is_shown_ever_decreases_and_money_is_seconds_times_price(
    charges: list[tuple[str, float, float, str | None, Price | None, float, bool]], limit: int
) -> None:
    ledger, now = Ledger(account_limit=limit), 0.0
    seconds, dollars = 0.0, {"USD": 0.0, "EUR": 0.0}
    before = ledger.view(now)
    for name, active, idle, uid, price, passed, restart in charges:
        now += passed
        portion = second(account("ml", name), active=active, idle=idle, who=pod(name, uid), joules=active)
        ledger.charge([portion], {"GPU-0": price} if price else {}, now)
        seconds += active + idle
        if price:
            dollars[price.currency] += (active + idle) / 3600 * price.per_hour + active * price.per_kwh / 3.6e6
        after = ledger.view(now)
        assert_never_less(before, after)
        if restart:
            ledger, now = restarted(ledger, account_limit=limit), 0.0
            assert_never_less(after, ledger.view(now))
        before = after
    ledger.view(now)
    view = ledger.view(now + 1000)
    assert len(view.accounts) <= max(limit, 2)
    assert sum(totals.allocated_seconds for totals in view.accounts.values()) == pytest.approx(seconds, rel=1e-9)
    for currency, total in dollars.items():
        money = [totals.money[currency].total for totals in view.accounts.values() if currency in totals.money]
        assert sum(money) == pytest.approx(total, rel=1e-9)


def assert_never_less(before: LedgerView, after: LedgerView) -> None:
    pairs = [(totals, after.accounts.get(key)) for key, totals in before.accounts.items()]
    pairs += [(totals, after.pods.get(key)) for key, totals in before.pods.items()]
    for old_totals, new in pairs:
        if new is None:
            continue  # folded, or ended and lingered
        if not new.allocated_seconds and old_totals.allocated_seconds:
            continue  # was folded or ended, and came back as a new series
        assert new.active_seconds >= old_totals.active_seconds
        assert new.idle_seconds >= old_totals.idle_seconds
        assert new.energy_joules >= old_totals.energy_joules
        assert new.unpriced_seconds >= old_totals.unpriced_seconds
        for currency, money in old_totals.money.items():
            assert new.money[currency].total >= money.total
            assert new.money[currency].idle >= money.idle
