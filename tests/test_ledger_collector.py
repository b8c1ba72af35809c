"""The series of the ledger: unknown values are absent, and the end of a ledger is shown."""

import dataclasses
from collections import Counter

from exposition_support import ENDED, IN_USE, TRAINING, UNMEASURED, exclusive, lost, one_ledger, snapshot
from page_support import changed, rows

from exporter.accounting.ledger import Ledgers
from exporter.metrics.collector import ExpositionOptions, families
from exporter.model.attribution import Owner, ShareMode
from exporter.model.ledger import Account, ByState, LedgerView, Portion, Price, Totals
from exporter.model.snapshot import Snapshot

NOW = 1_760_000_200.25


def showing(**changes: object) -> Snapshot:
    base = snapshot()
    assert base.metering.ledger is not None
    return changed(base, metering={"ledger": dataclasses.replace(base.metering.ledger, **changes)})


def test_owner_seconds_and_cost_have_ledger_owner_and_state_labels() -> None:
    view = snapshot()
    seconds = rows(view, "gpu_ledger_seconds_total")
    assert seconds[0] == (
        {
            "ledger": "0123456789ab",
            "node": "node-a",
            "workload_namespace": "vision",
            "workload_kind": "Job",
            "workload_name": "resnet",
            "team": "perception",
            "cost_labels": "example.com/cost-center=42,project=resnet",
            "model": TRAINING.model,
            "mode": "exclusive",
            "state": "active_effective",
        },
        500.0,
    )
    by_state = {(labels["workload_kind"], labels["mode"], labels["state"]): value for labels, value in seconds}
    assert by_state == {
        ("Job", "exclusive", "active_effective"): 500.0,
        ("Job", "exclusive", "active_ineffective"): 1300.0,
        ("Job", "exclusive", "active_unprofiled"): 900.0,
        ("Job", "exclusive", "idle"): 600.0,
        ("Job", "exclusive", "unknown"): 300.0,
        ("Unattributed", "mig", "unknown"): 72.0,
        ("Unallocated", "exclusive", "idle"): 3528.0,
    }, "a state without a second is absent"
    cost = [(labels["state"], labels["currency"], value) for labels, value in rows(view, "gpu_ledger_cost_total")]
    assert cost == [
        ("active_effective", "USD", 0.35),
        ("active_ineffective", "USD", 0.9),
        ("active_unprofiled", "USD", 0.625),
        ("idle", "USD", 0.4166666),
        ("unknown", "USD", 0.2083334),
        ("idle", "USD", 2.45),
    ]
    assert [value for _, value in rows(view, "gpu_ledger_unpriced_seconds_total")] == [72.0]


def test_every_ledger_has_its_own_series_and_creation_time() -> None:
    second = Totals(seconds=ByState(unprofiled=1.0))
    both = (*one_ledger({TRAINING: second}, 100.0), *one_ledger({TRAINING: second}, 200.0, identity="ba9876543210"))
    view = showing(ledgers=both)
    assert [labels["ledger"] for labels, _ in rows(view, "gpu_ledger_seconds_total")] == [
        "0123456789ab",
        "ba9876543210",
    ]
    assert rows(view, "gpu_ledger_created_timestamp_seconds") == [
        ({"ledger": "0123456789ab", "node": "node-a"}, 100.0),
        ({"ledger": "ba9876543210", "node": "node-a"}, 200.0),
    ]


def test_a_pods_active_idle_and_unknown_seconds_sum_to_allocated() -> None:
    view = snapshot()
    parts = zip(*(rows(view, f"gpu_pod_{part}_seconds_total") for part in ("active", "idle", "unknown")), strict=True)
    for (labels, value), row in zip(rows(view, "gpu_pod_allocated_seconds_total"), parts, strict=True):
        assert {tuple(part[0].items()) for part in row} == {tuple(labels.items())}
        assert value == sum(part[1] for part in row)


def test_unmeasured_energy_and_unknown_cost_are_absent_not_zero() -> None:
    only = showing(ledgers=one_ledger({UNMEASURED: Totals(seconds=ByState(unknown=72.0), energy_unknown_seconds=72.0)}))
    assert rows(only, "gpu_ledger_energy_joules_total") == []
    assert rows(only, "gpu_ledger_cost_total") == []
    partly = Totals(seconds=ByState(idle=72.0), energy_joules=5.0, energy_unknown_seconds=71.0)
    assert rows(showing(ledgers=one_ledger({UNMEASURED: partly})), "gpu_ledger_energy_joules_total")[0][1] == 5.0


def test_energy_is_absent_while_an_account_has_no_energy_measurement() -> None:
    for totals in (Totals(), Totals(seconds=ByState(unknown=2.0), energy_unknown_seconds=2.0)):
        assert rows(showing(ledgers=one_ledger({UNMEASURED: totals})), "gpu_ledger_energy_joules_total") == []


def test_ended_pod_keeps_its_counters_while_it_lingers() -> None:
    view = snapshot(exclusive())
    live, lingering = rows(view, "gpu_pod_allocated_seconds_total")
    assert (live[0]["pod_name"], live[0]["pod_uid"], live[1]) == ("resnet-0", IN_USE.pod_uid, 3600.0)
    assert lingering[0]["pod_name"] == ENDED.pod
    assert (lingering[0]["gpu_instance"], lingering[0]["mig_profile"]) == ("10", "1g.10gb")
    assert [labels["pod_name"] for labels, _ in rows(view, "gpu_pod_info")] == ["resnet-0"]


def test_a_live_pods_counters_have_the_labels_of_its_gauges() -> None:
    view = snapshot(exclusive())
    (gauge, _), *_ = rows(view, "gpu_pod_share_ratio")
    (counter, _), *_ = rows(view, "gpu_pod_allocated_seconds_total")
    assert counter == gauge


def test_gpu_price_has_one_series_even_if_lost_and_is_absent_if_unknown() -> None:
    view = snapshot(exclusive(), lost(3))
    assert [(labels["gpu"], value) for labels, value in rows(view, "gpu_hourly_price")] == [("0", 2.5)]
    assert rows(view, "gpu_exporter_unpriced_devices") == [({}, 1)]
    price = Price(per_hour=0.0, currency="EUR", source="own:free", as_of="2026-01-01")
    ((labels, value),) = rows(changed(view, metering={"prices": {lost(3).uuid: price}}), "gpu_hourly_price")
    assert (labels["currency"], labels["price_source"], value) == ("EUR", "own:free", 0.0)


def test_currencies_are_never_summed() -> None:
    both = Totals(
        seconds=ByState(unprofiled=1.0), money={"USD": ByState(unprofiled=1.0), "EUR": ByState(unprofiled=2.0)}
    )
    shown = rows(showing(ledgers=one_ledger({TRAINING: both})), "gpu_ledger_cost_total")
    assert [(labels["currency"], value) for labels, value in shown] == [("EUR", 2.0), ("USD", 1.0)]


def test_state_saved_and_ledger_capacity_are_exported() -> None:
    view = snapshot()
    assert rows(view, "gpu_exporter_state_saved") == [({}, 1)]
    assert rows(view, "gpu_exporter_state_saved_timestamp_seconds") == [({}, NOW - 3)]
    assert rows(view, "gpu_exporter_ledger_capacity_seconds_total") == [({"ledger": "0123456789ab"}, 7200.0)]
    assert rows(view, "gpu_exporter_conservation_error_seconds") == [({}, 1e-12)]
    in_memory = showing(saved_at_seconds=None, state_problem="disk full")
    assert rows(in_memory, "gpu_exporter_state_saved") == [({}, 0)]
    assert rows(in_memory, "gpu_exporter_state_saved_timestamp_seconds") == []


def test_ledger_series_are_absent_before_the_first_metered_reading() -> None:
    bare = changed(snapshot(), metering={"ledger": None})
    names = {family.name for family in families(bare, ExpositionOptions())}
    assert not {name for name in names if name.startswith("gpu_ledger_") or "state_saved" in name}


def test_pods_beyond_the_series_limit_are_dropped_whole_but_owners_never_are() -> None:
    view = snapshot(exclusive())
    gauges, counters = 8, 6
    options = ExpositionOptions(series_limit=gauges + counters)
    assert len(rows(view, "gpu_pod_allocated_seconds_total", options)) == 1
    assert rows(view, "gpu_exporter_dropped_series_total", options)[0][1] == 4
    assert len(rows(view, "gpu_ledger_seconds_total", options)) == 7


def test_accounts_differing_only_in_mode_or_model_are_separate_series() -> None:
    owner = Owner(namespace="a")
    accounts = {
        Account(owner=owner, model=model, mode=mode): Totals(seconds=ByState(unprofiled=1.0))
        for model in ("A100", "H100")
        for mode in ShareMode
    }
    view = changed(snapshot(), metering={"ledger": LedgerView(ledgers=one_ledger(accounts))})
    assert len(rows(view, "gpu_ledger_seconds_total")) == 6


def test_each_ledger_sums_to_its_capacity_and_never_decreases() -> None:
    """Some owners are unknown at the end of their ledger: another ledger takes them over."""
    ledgers, before = Ledgers(account_limit=3), dict[str, float]()
    for number in range(200):
        owner = Owner(namespace=f"team-{number // 30}", kind="Pod", name="a", provisional=number % 30 < 10)
        account = Account(owner=owner, model=TRAINING.model, mode=ShareMode.EXCLUSIVE)
        portion = Portion(gpu_uuid="GPU-0", account=account, seconds=ByState(idle=1.0))
        ledgers.charge([portion], {}, now=float(number), steady=float(number))
        view = changed(snapshot(), metering={"ledger": ledgers.view()})
        seconds = Counter[str]()
        for labels, value in rows(view, "gpu_ledger_seconds_total"):
            seconds[labels["ledger"]] += value
        capacity = rows(view, "gpu_exporter_ledger_capacity_seconds_total")
        assert {labels["ledger"]: value for labels, value in capacity if value} == seconds
        assert all(value >= before.get(labels["ledger"], 0.0) for labels, value in capacity)
        before |= {labels["ledger"]: value for labels, value in capacity}
    assert len(ledgers.view().ledgers) > 1
