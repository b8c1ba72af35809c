"""Charges: one pod has one owner, whenever metadata arrives, disappears or changes."""

from collections.abc import Mapping, Sized
from dataclasses import fields, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metering_support import H100, gpu, holder, through_json

from exporter.accounting.ledger import Ledgers
from exporter.accounting.meter import Meter, MeterState
from exporter.agent.owners import PATIENCE_SECONDS, Owners
from exporter.model.attribution import AllocationState, Owner, PodFacts, ShareMode
from exporter.model.ledger import Account
from exporter.model.records import read
from exporter.model.snapshot import DeviceView, PodUse

JOB = Owner(namespace="ml", kind="Job", name="train", team="vision")
OTHER_TEAM = Owner(namespace="ml", kind="Job", name="train", team="speech")
WAITS = Owner(namespace="ml", kind="Pod", name="a", provisional=True)
ITSELF = Owner(namespace="ml", kind="Pod", name="a")


def held(uid: str | None = None) -> DeviceView:
    pods = (PodUse(holder=holder("a", uid=uid), age_seconds=0.0),)
    return DeviceView(gpu=gpu(), allocation=AllocationState.ALLOCATED, pods=pods)


class FakeApi:
    """The present state of the API."""

    def __init__(self, owners: Mapping[str, Owner] | None = None) -> None:
        self.owners = dict(owners or {})
        self.pod_uid = ""

    def facts(self, namespace: str, pod: str) -> PodFacts | None:
        owner = self.owners.get(pod)
        known = owner is not None and namespace == owner.namespace
        return PodFacts(owner=owner, queue="gold", pod_uid=self.pod_uid) if owner and known else None


def test_namespace_is_the_owner_without_metadata() -> None:
    assert Owners().owner_of(holder("a")) == Owner(namespace="ml")
    assert Owners().facts(holder("a")) is None


def test_pod_keeps_its_first_owner_and_a_new_pod_with_its_name_gets_its_own() -> None:
    api = FakeApi({"a": JOB})
    owners = Owners(tenancy=api)
    first, second = holder("a", uid="1"), holder("a", uid="2")
    assert owners.owner_of(first) == JOB
    api.owners["a"] = OTHER_TEAM
    assert owners.owner_of(first) == JOB
    facts = owners.facts(first)
    assert facts is not None
    assert (facts.owner, facts.queue) == (JOB, "gold")
    del api.owners["a"]
    assert owners.owner_of(first) == JOB
    api.owners["a"] = OTHER_TEAM
    assert owners.owner_of(second) == OTHER_TEAM


@pytest.mark.parametrize("uids", ["12", "2"], ids=["the same pod, then a new one", "a new pod"])
def test_owner_of_a_holder_survives_an_agent_restart(uids: str) -> None:
    api = FakeApi({"a": JOB})
    owners = Owners(tenancy=api)
    meter = Meter(1.0, owners.owner_of)
    meter.add((held(uid="1"),), 0.0)
    api.owners["a"] = OTHER_TEAM
    after = Owners(tenancy=api)
    after.restore(meter.state().slots)
    owner_of = {"1": JOB, "2": OTHER_TEAM}
    for uid in uids:
        assert after.owner_of(holder("a", uid=uid)) == owner_of[uid]


def test_namespace_owner_from_missing_metadata_is_not_pinned() -> None:
    meter = Meter(1.0, Owners().owner_of)
    meter.add((held(uid="1"),), 0.0)
    after = Owners(tenancy=FakeApi({"a": JOB}))
    after.restore(meter.state().slots)
    assert after.owner_of(holder("a", uid="1")) == JOB


def metered(owners: Owners, ledgers: Ledgers, meter: Meter, seconds: range) -> None:
    for second in seconds:
        ledgers.charge(meter.add((held(),), float(second)), {}, now=float(second), steady=float(second))
        ledgers.settle(partial(owners.settled, steady=float(second)))


def restarted(ledgers: Ledgers, now: float) -> Ledgers:
    """Return the ledgers of the next process, from the state."""
    after = Ledgers()
    after.restore(through_json(ledgers.begin_save(lambda owner: owner, now)))
    return after


def seconds_of(ledgers: Ledgers, owner: Owner) -> float | None:
    account = Account(owner=owner, model=H100, mode=ShareMode.EXCLUSIVE)
    totals = ledgers.view().accounts.get(account)
    return totals.seconds.total if totals else None


def test_time_before_the_owner_is_known_is_charged_to_the_owner() -> None:
    api = FakeApi()
    owners, ledgers = Owners(tenancy=api), Ledgers()
    meter = Meter(1.0, owners.owner_of)
    metered(owners, ledgers, meter, range(11))
    waiting = ledgers.view()
    assert waiting.accounts == {}
    assert (waiting.withheld_seconds, waiting.capacity_seconds) == (10.0, 10.0)

    after = restarted(ledgers, 10.0)
    api.owners["a"] = JOB
    metered(owners, after, meter, range(11, 21))
    assert seconds_of(after, JOB) == 20.0
    assert after.view().withheld_seconds == 0.0
    assert len(after.view().accounts) == 1


def test_pod_with_a_never_known_owner_becomes_its_own_owner() -> None:
    owners, ledgers = Owners(tenancy=FakeApi()), Ledgers()
    meter = Meter(1.0, owners.owner_of)
    metered(owners, ledgers, meter, range(11))
    late = round(PATIENCE_SECONDS) + 2
    metered(owners, ledgers, meter, range(late, late + 5))
    assert seconds_of(ledgers, ITSELF) == ledgers.view().capacity_seconds - unattributed(ledgers)
    assert owners.owner_of(holder("a")) == ITSELF


def test_time_of_a_new_pod_with_the_same_name_waits_for_its_own_owner() -> None:
    api = FakeApi({"a": JOB})
    owners = Owners(tenancy=api)
    assert owners.owner_of(holder("a", uid="1")) == JOB
    api.owners.clear()
    provisional = owners.owner_of(holder("a", uid="2"))
    assert provisional == replace(WAITS, pod_uid="2")
    assert owners.settled(provisional, 0.0) == provisional, "the owner of the first pod does not pay for the second"
    api.owners["a"] = OTHER_TEAM
    assert owners.settled(provisional, 1.0) == OTHER_TEAM


def test_pod_recreated_during_an_api_outage_is_not_charged_to_the_former_owner() -> None:
    alone, again = (
        Owner(namespace="ml", kind="Pod", name="a", team="x"),
        Owner(namespace="ml", kind="Pod", name="a", team="y"),
    )
    api = FakeApi({"a": alone})
    api.pod_uid = "uid-1"
    owners = Owners(tenancy=api)
    assert owners.owner_of(holder("a", uid="uid-1")) == alone
    waits = owners.owner_of(holder("a", uid="uid-2"))
    assert waits == replace(WAITS, pod_uid="uid-2"), "the API still has the first pod"
    assert owners.settled(waits, 100.0) == waits
    assert owners.settled(WAITS, 100.0) == WAITS, "without a UID the pod is unknown"
    api.owners, api.pod_uid = {"a": again}, "uid-2"
    assert owners.settled(waits, 110.0) == owners.settled(WAITS, 110.0) == again
    assert owners.owner_of(holder("a", uid="uid-2")) == again


def test_pending_time_of_two_pods_with_one_name_goes_to_each_own_owner() -> None:
    api = FakeApi()
    owners, ledgers = Owners(tenancy=api), Ledgers()
    meter = Meter(1.0, owners.owner_of)
    for second in range(21):
        view = held(uid="uid-1" if second < 10 else "uid-2")
        ledgers.charge(meter.add((view,), float(second)), {}, now=float(second), steady=float(second))
        ledgers.settle(partial(owners.settled, steady=float(second)))
    ledgers = restarted(ledgers, 20.0)
    api.owners, api.pod_uid = {"a": OTHER_TEAM}, "uid-2"
    ledgers.settle(partial(owners.settled, steady=21.0))
    assert seconds_of(ledgers, OTHER_TEAM) == 11.0
    assert ledgers.view().withheld_seconds == 9.0, "the owner of the first pod is still unknown"
    ledgers.settle(partial(owners.settled, steady=PATIENCE_SECONDS + 21.0))
    assert (seconds_of(ledgers, ITSELF), seconds_of(ledgers, OTHER_TEAM)) == (9.0, 11.0)
    assert owners.owner_of(holder("a", uid="uid-3")) == replace(WAITS, pod_uid="uid-3"), "a third pod waits again"


def test_self_owned_pod_keeps_its_cost_labels_after_a_restart() -> None:
    alone = replace(ITSELF, cost_labels="project=llm")
    meter = Meter(1.0, Owners(tenancy=FakeApi({"a": alone})).owner_of)
    meter.add((held(uid="1"),), 0.0)
    after = Owners(tenancy=FakeApi({"a": ITSELF}))
    state = through_json(meter.state())
    after.restore(read(MeterState, state).slots)
    assert after.owner_of(holder("a", uid="1")) == alone
    state["slots"][0]["account"]["owner"]["cost_labels"] = 7
    with pytest.raises(TypeError, match="is not of type str"):
        read(MeterState, state)


def test_pod_in_two_ledger_lines_is_given_up_in_both_at_once() -> None:
    owners = Owners(tenancy=FakeApi())
    assert owners.settled(WAITS, 0.0) == WAITS
    assert [owners.settled(WAITS, PATIENCE_SECONDS) for _ in range(2)] == [ITSELF, ITSELF]


def remembered(owners: Owners) -> int:
    kept = [getattr(owners, one.name) for one in fields(owners)]
    return sum(len(one) for one in kept if isinstance(one, Sized))


def test_owners_of_ended_pods_are_forgotten_and_those_of_running_pods_stay() -> None:
    api = FakeApi({"a": JOB})
    owners, waiting, most = Owners(tenancy=api), list[Owner](), 0
    for number in range(10_000):
        name, steady = f"pod-{number}", number * 10.0
        api.owners = {"a": JOB if number == 0 else OTHER_TEAM} | ({name: JOB} if number % 2 else {})
        assert owners.owner_of(holder("a", uid="a")) == JOB, "a pod keeps its owner for its whole life"
        waiting.append(owners.owner_of(holder(name, uid=name)))
        waiting = [one for one in waiting if one.provisional and owners.settled(one, steady) == one]
        owners.forget([("ml", "a"), ("ml", name)], steady)
        most = max(most, remembered(owners))
    assert most < 500, "twenty minutes of pods, one every ten seconds"


def test_pod_missing_for_some_minutes_keeps_its_owner() -> None:
    api = FakeApi({"a": JOB})
    owners = Owners(tenancy=api)
    assert owners.owner_of(holder("a", uid="1")) == JOB
    owners.forget([("ml", "a")], 0.0)
    api.owners["a"] = OTHER_TEAM
    for steady in range(1, round(PATIENCE_SECONDS)):
        owners.forget([], float(steady))
    assert owners.owner_of(holder("a", uid="1")) == JOB


def test_self_owned_pod_keeps_its_team_after_a_restart_during_an_outage() -> None:
    alone = Owner(namespace="ml", kind="Pod", name="a", team="vision")
    meter = Meter(1.0, Owners(tenancy=FakeApi({"a": alone})).owner_of)
    meter.add((held(uid="1"),), 0.0)
    after = Owners(tenancy=FakeApi())
    after.restore(meter.state().slots)
    assert after.owner_of(holder("a")) == alone


def unattributed(ledgers: Ledgers) -> float:
    return sum(
        totals.seconds.total
        for account, totals in ledgers.view().accounts.items()
        if account.owner.kind == "Unattributed"
    )


@given(steps=st.lists(st.sampled_from(["tell", "forget", "retell", "tick", "restart"]), max_size=30))
def test_every_second_is_charged_once_to_one_owner_for_any_api_answers(steps: list[str]) -> None:
    api = FakeApi()
    owners, ledgers = Owners(tenancy=api), Ledgers()
    meter = Meter(1.0, owners.owner_of)
    now = 0
    for step in [*steps, "tick"]:
        if step == "restart":
            state = meter.state()
            ledgers = restarted(ledgers, float(now))
            owners = Owners(tenancy=api)
            owners.restore(state.slots)
            meter = Meter(1.0, owners.owner_of)
            meter.resume(state)
        elif step == "tick":
            now += 1
        else:
            api.owners = {"tell": {"a": JOB}, "forget": {}, "retell": {"a": OTHER_TEAM}}[step]
        metered(owners, ledgers, meter, range(now, now + 1))
    shown = ledgers.view()
    known = [account.owner for account in shown.accounts]
    assert len(known) <= 1
    total = sum(totals.seconds.total for totals in shown.accounts.values()) + shown.withheld_seconds
    assert total == shown.capacity_seconds
