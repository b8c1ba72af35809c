"""The ledgers of a node: sums, shown identities, and content after a restart."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metering_support import H100

from exporter.accounting.ledger import FORMER_LIMIT, FORMER_SECONDS, PATIENCE_SECONDS, Ledgers, PodTable
from exporter.accounting.state_file import to_json
from exporter.model.attribution import UNALLOCATED, Owner, ShareMode
from exporter.model.ledger import Account, ByState, PodAccount, Portion, Price, ShownLedger, Totals

DOLLARS = Price(per_hour=3600.0, currency="USD", source="book:h100", as_of="2026-01-01")
EUROS = replace(DOLLARS, per_hour=7200.0, currency="EUR")
NOON = 1_800_000_000.0
COST_LABELS_LIMIT = 200
"""Combinations of cost labels in a ledger, as documented in docs/owners.md and docs/security.md."""


def account(namespace: str, name: str = "", *, provisional: bool = False) -> Account:
    owner = Owner(namespace=namespace, kind="Job" if name else "", name=name, provisional=provisional)
    return Account(owner=owner, model=H100, mode=ShareMode.EXCLUSIVE)


ML = account("ml")
FREE = Account(owner=UNALLOCATED, model=H100, mode=ShareMode.EXCLUSIVE)
WAITS = account("ml", "train", provisional=True)
KNOWN = account("ml", "train")


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
        gpu_uuid="GPU-0", account=of, pod=who, seconds=ByState(unprofiled=active, idle=idle), energy_joules=joules
    )


def unknown_owner(provisional: Owner) -> Owner:
    return provisional


def known_owner(provisional: Owner) -> Owner:
    return replace(provisional, provisional=False)


@dataclass
class Node:
    """Ledgers with numbered identities, and the disk with their saves."""

    saves: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    linger_seconds: float = 300.0
    owner_of: Callable[[Owner], Owner] = unknown_owner
    now: float = 0.0
    disk: bytes = b""
    written: bytes = b""
    """State of the save in progress."""
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Start again from the disk."""
        pods = PodTable(linger_seconds=self.linger_seconds)
        identities = (f"ledger-{number}" for number in self.numbers)
        self.ledgers = Ledgers(saves=self.saves, pods=pods, new_identity=lambda: next(identities), **self.options)
        if self.disk:
            self.ledgers.restore(json.loads(self.disk))

    def charge(self, *portions: Portion, prices: dict[str, Price] | None = None, passed: float = 1.0) -> None:
        self.now += passed
        self.ledgers.charge(portions, prices or {}, now=NOON + self.now, steady=self.now)
        self.ledgers.settle(self.owner_of)

    def begin(self) -> None:
        self.written = to_json(self.ledgers.begin_save(self.owner_of, NOON + self.now))

    def finish(self, *, written: bool = True, noticed: bool = True) -> None:
        """End a save; the file is replaced or not, and the agent notices that or not."""
        if written:
            self.disk = self.written
        if written and noticed:
            self.ledgers.saved()
        else:
            self.ledgers.not_saved(in_doubt=not noticed)

    def save(self, *, works: bool = True) -> None:
        self.begin()
        self.finish(written=works)

    @property
    def shown(self) -> dict[str, ShownLedger]:
        return {ledger.identity: ledger for ledger in self.ledgers.view().ledgers}

    def totals(self, of: Account = ML) -> Totals:
        return self.ledgers.view().accounts[of]

    def active(self, of: Account = ML) -> dict[str, float]:
        """Return active seconds of an owner by identity, 0 if the ledger lacks the owner."""
        return {name: one.accounts.get(of, Totals()).seconds.active for name, one in self.shown.items()}


def test_money_is_the_seconds_of_each_state_times_the_price() -> None:
    node = Node()
    node.charge(second(ML, active=1.0, idle=0.5), prices={"GPU-0": DOLLARS})
    assert node.totals().money == {"USD": ByState(unprofiled=1.0, idle=0.5)}


def test_new_price_applies_from_its_start_and_currencies_stay_separate() -> None:
    node = Node()
    for price in (DOLLARS, replace(DOLLARS, per_hour=7200.0), EUROS):
        node.charge(second(ML, active=1.0), prices={"GPU-0": price})
    assert node.totals().money == {"USD": ByState(unprofiled=3.0), "EUR": ByState(unprofiled=2.0)}


def test_unpriced_seconds_are_counted_without_a_cost() -> None:
    node = Node()
    node.charge(second(ML, active=1.0, idle=1.0))
    assert node.totals().money == {}
    assert node.totals().unpriced_seconds == node.totals().seconds.total == 2.0


def test_measured_energy_is_charged_extra_in_proportion_to_the_seconds() -> None:
    node = Node()
    price = replace(DOLLARS, per_hour=0.0, per_kwh=0.5)
    node.charge(second(ML, active=1.0, idle=3.0, joules=7.2e6), prices={"GPU-0": price})
    node.charge(second(FREE, joules=3.6e6), prices={"GPU-0": price})
    assert node.totals().money == {"USD": ByState(unprofiled=0.25, idle=0.75)}
    assert node.totals(FREE).money == {"USD": ByState(unprofiled=0.5)}


def test_time_without_energy_measurement_is_counted() -> None:
    node = Node()
    node.charge(second(ML, active=2.0), second(ML, active=1.0, joules=300.0))
    assert (node.totals().energy_joules, node.totals().energy_unknown_seconds) == (300.0, 2.0)


def test_conservation_error_is_the_uncharged_part_of_the_interval() -> None:
    node = Node(saves=True)
    node.charge(replace(second(ML, active=0.5), interval_seconds=0.75))
    node.save()
    node.restart()
    view = node.ledgers.view()
    assert (view.conservation_error_seconds, view.capacity_seconds) == (0.25, 0.75)


def labelled(number: int | str) -> Account:
    return replace(KNOWN, owner=replace(KNOWN.owner, cost_labels=f"environment=prod,user={number}"))


OTHERS = replace(KNOWN, owner=replace(KNOWN.owner, cost_labels="environment=__other__,user=__other__"))


@pytest.mark.parametrize("saves", [False, True], ids=["in memory", "saved"])
def test_cost_label_combinations_beyond_the_limit_are_metered_together(*, saves: bool) -> None:
    node = Node(saves=saves)
    for _ in range(3):  # the last ones are in every sample, and count once
        for number in range(COST_LABELS_LIMIT + 5):
            node.charge(second(labelled(number), active=1.0), prices={"GPU-0": DOLLARS})
        node.charge(second(KNOWN, idle=1.0))
        if saves:
            node.save()
    if saves:
        node.restart()
        node.charge(second(labelled(COST_LABELS_LIMIT), active=1.0), second(labelled(3), active=1.0))
        node.save()
    accounts, more = node.ledgers.view().accounts, 1.0 if saves else 0.0
    kept = {labelled(number) for number in range(COST_LABELS_LIMIT)}
    assert accounts.keys() == {*kept, OTHERS, KNOWN}
    assert accounts[labelled(3)].seconds.active == 3.0 + more
    assert accounts[OTHERS].seconds.active == 15.0 + more
    assert accounts[OTHERS].money == {"USD": ByState(unprofiled=15.0)}
    assert accounts[KNOWN].seconds.idle == 3.0
    assert node.ledgers.folded_count == (1 if saves else 5), "counted since the last start"


def test_new_ledger_has_room_for_other_cost_label_combinations() -> None:
    node = Node(saves=True)
    for number in range(COST_LABELS_LIMIT):
        node.charge(second(labelled(number), active=1.0))
    node.save()
    node.charge(second(labelled("new"), active=1.0))
    node.save(works=False)
    assert node.active(labelled("new")) == {"ledger-1": 0.0, "ledger-2": 1.0}, "the memory-only ledger has room"
    node.save()
    assert node.active(labelled("new")) == {"ledger-1": 0.0, "ledger-2": 1.0}
    assert node.totals(labelled(0)).seconds.active == 1.0


def test_pending_charges_are_bounded_by_the_cost_label_limit() -> None:
    node = Node(owner_of=lambda _owner: labelled("late").owner)
    for number in range(COST_LABELS_LIMIT):
        node.charge(second(labelled(number), active=1.0))
    node.charge(second(WAITS, active=2.0))
    assert node.active(OTHERS) == {"ledger-1": 2.0}


def test_ledger_starts_with_the_first_sample_and_keeps_its_identity_after_restarts() -> None:
    node = Node(saves=True)
    node.charge(second(ML, active=1.0), passed=5.0)
    assert node.shown == {}, "an identity is not shown before it is on disk"
    node.save()
    before = node.shown
    node.restart()
    node.charge(passed=100.0)
    assert node.shown == before
    (ledger,) = before.values()
    assert (ledger.identity, ledger.created_at_seconds) == ("ledger-1", NOON + 5.0)


def test_charges_are_shown_once_on_disk() -> None:
    node = Node(saves=True)
    node.charge(second(ML, active=1.0))
    node.begin()
    node.charge(second(ML, active=2.0))
    assert node.shown == {}
    node.finish()
    assert node.active() == {"ledger-1": 1.0}
    node.save()
    assert node.active() == {"ledger-1": 3.0}


def test_charges_are_shown_in_a_memory_only_ledger_while_saving_fails() -> None:
    node = Node(saves=True)
    node.charge(second(ML, active=1.0))
    node.save()
    node.charge(second(ML, active=2.0))
    node.save(works=False)
    assert node.active() == {"ledger-1": 1.0, "ledger-2": 2.0}
    node.charge(second(ML, active=4.0))
    node.save(works=False)
    node.charge(second(ML, active=8.0))
    assert node.active() == {"ledger-1": 1.0, "ledger-2": 14.0}


def test_successful_save_ends_the_memory_only_ledger_and_resumes_the_saved_one() -> None:
    node = Node(saves=True)
    node.save()
    node.charge(second(ML, active=1.0))
    node.save(works=False)
    node.charge(second(ML, active=2.0))
    node.begin()
    node.charge(second(ML, active=4.0))
    assert node.active() == {"ledger-1": 0.0, "ledger-2": 3.0}, "a ledger does not change during its save"
    node.finish()
    node.save()
    assert node.active() == {"ledger-1": 4.0, "ledger-2": 3.0}
    node.restart()
    assert node.active() == {"ledger-1": 4.0, "ledger-2": 3.0}


def test_disk_failing_from_the_start_leaves_a_memory_only_ledger() -> None:
    node = Node(saves=True)
    node.charge(second(ML, active=1.0))
    node.save(works=False)
    node.charge(second(ML, active=1.0))
    assert node.active() == {"ledger-2": 2.0}


def test_hanging_save_that_later_succeeds_counts_nothing_twice() -> None:
    node = Node(saves=True)
    node.charge(second(ML, active=1.0))
    node.begin()
    node.charge(second(ML, active=2.0))
    for _ in range(2):
        node.ledgers.go_on_in_memory(NOON + node.now)
        node.charge(second(ML, active=4.0))
    assert node.active() == {"ledger-2": 10.0}
    node.finish()
    assert node.active() == {"ledger-1": 1.0, "ledger-2": 10.0}
    assert node.ledgers.in_memory_only
    node.save()
    assert not node.ledgers.in_memory_only


@pytest.mark.parametrize("written", [True, False])
def test_unconfirmed_save_is_hidden_until_the_next_save_succeeds(written: bool) -> None:  # noqa: FBT001 - a parameter of the test
    node = Node(saves=True)
    node.save()
    node.charge(second(ML, active=1.0))
    node.begin()
    node.finish(written=written, noticed=False)
    node.charge(second(ML, active=2.0))
    assert node.active() == {"ledger-1": 0.0, "ledger-2": 2.0}
    node.save(works=False)
    assert node.active() == {"ledger-1": 0.0, "ledger-2": 2.0}
    node.save()
    assert node.active() == {"ledger-1": 1.0, "ledger-2": 2.0}


def test_ended_ledger_stays_for_25_hours() -> None:
    node = Node(saves=True)
    node.save()
    node.charge(second(ML, active=1.0))
    node.save(works=False)
    node.save()
    node.charge(passed=25 * 3600.0)
    assert set(node.shown) == {"ledger-1", "ledger-2"}
    node.charge()
    assert set(node.shown) == {"ledger-1"}
    node.restart()
    node.charge()
    assert set(node.shown) == {"ledger-1"}


def test_repeatedly_failing_disk_creates_a_bounded_number_of_ledgers() -> None:
    node = Node(saves=True)
    node.save()
    hours = 20
    for number in range(hours * 360):
        node.charge(second(ML, active=5.0), passed=5.0)
        node.save(works=number % 2 == 0)
        assert len(node.shown) <= FORMER_LIMIT + 2
    node.save()
    last = int(max(node.shown, key=lambda name: int(name.split("-")[1])).split("-")[1])
    assert last <= FORMER_LIMIT + hours * 3600 / PATIENCE_SECONDS + 2


def test_long_disk_failure_shows_charges_even_with_many_ended_ledgers() -> None:
    node = Node(saves=True)
    node.save()
    for _ in range(FORMER_LIMIT):
        node.charge(second(ML, active=1.0))
        node.save(works=False)
        node.save()
    node.charge(second(ML, active=100.0))
    node.save(works=False)
    assert 100.0 not in node.active().values()
    node.charge(second(ML, active=100.0), passed=PATIENCE_SECONDS)
    node.save(works=False)
    assert 200.0 in node.active().values()


def test_full_ledger_stays_and_a_new_one_starts() -> None:
    node = Node(options={"account_limit": 10})
    for number in range(25):
        node.charge(second(account("ml", f"job-{number}"), active=1.0), second(FREE, idle=1.0))
    assert {name: len(one.accounts) for name, one in node.shown.items()} == {"ledger-3": 6, "ledger-2": 11}
    seconds = [sum(totals.seconds.total for totals in one.accounts.values()) for one in node.shown.values()]
    assert sum(seconds) == node.ledgers.view().capacity_seconds == 30.0


def test_full_saved_ledger_ends_with_its_content_on_disk() -> None:
    node = Node(saves=True, options={"account_limit": 3})
    for number in range(4):
        node.charge(second(account("ml", f"job-{number}"), active=1.0), second(WAITS, active=1.0))
        node.save()
    assert {name: len(one.accounts) for name, one in node.shown.items()} == {"ledger-2": 1, "ledger-1": 3}
    assert node.ledgers.view().withheld_seconds == 4.0, "charges without an owner move to the new ledger"
    before = node.shown
    node.restart()
    assert node.shown == before
    node.owner_of = known_owner
    node.save()
    assert node.active(KNOWN) == {"ledger-2": 4.0, "ledger-1": 0.0}


def test_more_concurrent_owners_than_the_limit_stay_in_one_ledger() -> None:
    node = Node(options={"account_limit": 2})
    for _ in range(3):
        node.charge(*(second(account("ml", f"job-{number}"), active=1.0) for number in range(5)))
    assert len(node.shown) == 1


def test_provisional_charges_are_withheld_until_their_owner_is_known_and_saved() -> None:
    node = Node(saves=True)
    node.charge(second(WAITS, active=1.0))
    node.save()
    assert (node.active(KNOWN), node.ledgers.view().withheld_seconds) == ({"ledger-1": 0.0}, 1.0)
    node.owner_of = known_owner
    node.charge(second(WAITS, active=2.0))
    node.save(works=False)
    assert node.active(KNOWN) == {"ledger-1": 0.0, "ledger-2": 2.0}, "only a save can move charges that are on disk"
    node.save()
    assert node.active(KNOWN) == {"ledger-1": 1.0, "ledger-2": 2.0}
    view = node.ledgers.view()
    assert (view.withheld_seconds, view.capacity_seconds) == (0.0, 3.0)


def test_pending_charges_of_a_memory_only_ledger_move_to_the_saved_one() -> None:
    node = Node(saves=True)
    node.save()
    node.save(works=False)
    node.charge(second(WAITS, active=1.0), second(ML, active=2.0))
    node.save()
    view = node.ledgers.view()
    assert (view.withheld_seconds, view.capacity_seconds) == (1.0, 3.0)
    node.owner_of = known_owner
    node.save()
    assert node.active(KNOWN) == {"ledger-1": 1.0, "ledger-2": 0.0}


def test_ledger_ended_during_a_hanging_save_stays_once_the_save_succeeds() -> None:
    node = Node(saves=True, options={"account_limit": 2})
    node.begin()
    node.ledgers.go_on_in_memory(NOON)
    for number in range(3):
        node.charge(second(account("ml", f"job-{number}"), active=1.0))
    assert set(node.shown) == {"ledger-2", "ledger-3"}
    node.finish()
    assert set(node.shown) == {"ledger-1", "ledger-2", "ledger-3"}


def test_ended_pod_lingers_and_its_owner_keeps_its_seconds() -> None:
    node = Node(linger_seconds=300.0)
    node.charge(second(ML, active=20.0, who=pod("a")))
    node.charge(second(FREE, idle=5.0), passed=300.0)
    assert node.ledgers.view().pods[pod("a")].seconds.active == 20.0
    node.charge(second(FREE, idle=5.0))
    assert node.ledgers.view().pods == {}
    assert node.totals().seconds.active == 20.0


def test_pod_ended_during_a_restart_lingers_after_it() -> None:
    node = Node(saves=True, linger_seconds=10.0)
    node.charge(second(ML, active=20.0, who=pod("a")))
    node.save()
    node.restart()
    node.charge(passed=1000.0)
    node.charge(passed=10.0)
    assert pod("a") in node.ledgers.view().pods
    node.charge()
    assert node.ledgers.view().pods == {}


def test_pods_do_not_end_while_nothing_is_metered() -> None:
    node = Node()
    node.charge(second(ML, active=1.0, who=pod("a")))
    node.now += 100_000.0
    assert pod("a") in node.ledgers.view().pods


def test_late_uid_keeps_the_pods_counters_and_a_different_uid_is_a_new_pod() -> None:
    node = Node()
    for uid in (None, "uid-1", None, "uid-2"):
        node.charge(second(ML, active=1.0, who=pod("web-0", uid)))
    pods = node.ledgers.view().pods
    assert {(known.pod_uid, totals.seconds.active) for known, totals in pods.items()} == {
        ("uid-1", 3.0),
        ("uid-2", 1.0),
    }


def saved_state() -> dict[str, Any]:
    node = Node(saves=True)
    node.charge(second(ML, active=1.0, who=pod("a")), prices={"GPU-0": DOLLARS})
    node.save()
    state: dict[str, Any] = json.loads(node.disk)
    return state


PATHS: tuple[tuple[str | int, ...], ...] = (
    ("ledger", "id"),
    ("ledger", "capacity_seconds"),
    ("ledger", "accounts", 0, "cost_labels"),
    ("ledger", "accounts", 0, "pod_uid"),
    ("ledger", "accounts", 0, "totals", "seconds", "idle"),
    ("ledger", "accounts", 0, "totals", "money"),
    ("former_ledgers",),
    ("pods", 0, "pod"),
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wrong", [None, 7, [7]])
def test_invalid_ledger_state_is_refused(path: Sequence[str | int], wrong: object) -> None:
    data = inner = saved_state()
    for step in path[:-1]:
        inner = inner[step]  # type: ignore[index] # a path through lists and objects
    if path[-1] in {"capacity_seconds", "idle"} and wrong == 7:
        wrong = -7
    inner[path[-1]] = wrong  # type: ignore[index] # the same
    with pytest.raises((TypeError, ValueError, AttributeError)):
        Ledgers().restore(data)


NAMES = ("a", "b", "c", "d")
STEPS_OF_A_LIFE = st.one_of(
    st.tuples(st.just("charge"), st.sampled_from(NAMES), st.booleans(), st.floats(0.5, 100)),
    st.tuples(st.just("know")),
    st.tuples(st.just("begin")),
    st.tuples(st.just("save"), st.booleans(), st.booleans()),
    st.tuples(st.just("finish"), st.booleans(), st.booleans()),
    st.tuples(st.just("hang")),
    st.tuples(st.just("later"), st.sampled_from((60.0, 4000.0, FORMER_SECONDS + 1))),
)
STEPS = STEPS_OF_A_LIFE | st.tuples(st.just("kill"), st.booleans())


class World:
    """A node under random faults, and everything that a reader of its page has seen."""

    def __init__(self, *, limit: int) -> None:
        self.node = Node(saves=True, options={"account_limit": limit})
        self.charged = self.last_total = 0.0
        self.killed = self.saving = False
        self.seen: dict[str, dict[Account, Totals]] = {}

    def step(self, what: str, *arguments: Any) -> None:  # noqa: ANN401 - of the step, whichever
        getattr(self, what)(*arguments)
        self.look()

    def charge(self, name: str, provisional: bool, seconds: float) -> None:  # noqa: FBT001 - drawn
        price = {"a": {"GPU-0": DOLLARS}, "b": {"GPU-0": EUROS}}.get(name)
        of = account("ml", name, provisional=provisional)
        self.node.charge(second(of, active=seconds, idle=1.0, joules=seconds), prices=price, passed=5.0)
        self.charged += seconds + 1.0

    def later(self, seconds: float) -> None:
        self.node.charge(passed=seconds)

    def know(self) -> None:
        self.node.owner_of = known_owner

    def begin(self) -> None:
        if not self.saving:
            self.node.begin()
            self.saving = True

    def finish(self, written: bool, noticed: bool) -> None:  # noqa: FBT001 - drawn
        if self.saving:
            self.node.finish(written=written, noticed=noticed)
            self.saving = False

    def save(self, written: bool, noticed: bool) -> None:  # noqa: FBT001 - drawn
        self.begin()
        self.finish(written, noticed)

    def hang(self) -> None:
        if self.saving:
            self.node.ledgers.go_on_in_memory(NOON + self.node.now)

    def kill(self, written: bool) -> None:  # noqa: FBT001 - drawn
        if self.saving and written:
            self.node.disk = self.node.written
        self.node.restart()
        self.killed, self.saving = True, False

    def look(self) -> None:
        """Record the page: no identity decreases, and every second is shown at most once."""
        view = self.node.ledgers.view()
        assert len({ledger.identity for ledger in view.ledgers}) == len(view.ledgers)
        for ledger in view.ledgers:
            before = self.seen.setdefault(ledger.identity, {})
            assert before.keys() <= ledger.accounts.keys()
            for of, totals in before.items():
                assert_not_less(totals, ledger.accounts[of])
            before.update(ledger.accounts)
        shown = sum(totals.seconds.total for totals in view.accounts.values())
        assert shown + view.withheld_seconds == pytest.approx(view.capacity_seconds, rel=1e-9, abs=1e-6)
        assert self.total() <= self.charged * (1 + 1e-9)

    def total(self) -> float:
        """Return the seconds that a reader counts: the last value of each identity."""
        return sum(totals.seconds.total for accounts in self.seen.values() for totals in accounts.values())


def assert_not_less(before: Totals, after: Totals) -> None:
    assert after.seconds.active >= before.seconds.active
    assert after.seconds.idle >= before.seconds.idle
    assert after.energy_joules >= before.energy_joules
    assert after.unpriced_seconds >= before.unpriced_seconds
    for currency, money in before.money.items():
        assert after.money[currency].active >= money.active
        assert after.money[currency].idle >= money.idle


@settings(deadline=None)
@given(st.lists(STEPS, max_size=40) | st.lists(STEPS_OF_A_LIFE, max_size=40), st.integers(2, 6))
def test_no_ledger_decreases_and_every_second_is_shown_once(steps: list[tuple[Any, ...]], limit: int) -> None:
    world = World(limit=limit)
    for step in steps:
        world.step(*step)
    world.step("know")
    world.step("finish", True, True)  # noqa: FBT003 - as drawn
    for _ in range(2):  # the first ends a memory-only ledger
        world.step("save", True, True)  # noqa: FBT003 - as drawn
    if not world.killed:
        assert world.total() == pytest.approx(world.charged, rel=1e-9)
