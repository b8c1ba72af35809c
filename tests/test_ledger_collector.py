"""The series of the ledger: what is not known is absent, and what ends is told."""

import dataclasses

from exposition_support import ENDED, IN_USE, TRAINING, UNMEASURED, exclusive, lost, snapshot

from exporter.accounting.ledger import Ledger
from exporter.exposition.collector import ExpositionOptions, families
from exporter.model import OTHER, Account, LedgerView, Money, Owner, Portion, Price, ShareMode, Snapshot, Totals

NOW = 1_760_000_200.25


def rows(view: Snapshot, name: str, options: ExpositionOptions | None = None) -> list[tuple[dict[str, str], float]]:
    page = {family.name: family for family in families(view, options or ExpositionOptions())}
    return [(dict(one.pairs), one.value) for one in page[name].samples] if name in page else []


def showing(**changes: object) -> Snapshot:
    base = snapshot()
    assert base.ledger is not None
    return dataclasses.replace(base, ledger=dataclasses.replace(base.ledger, **changes))


def test_an_owners_seconds_joules_and_money_carry_who_pays_for_what() -> None:
    view = snapshot()
    (work, who_knows, free) = rows(view, "gpu_ledger_allocated_seconds_total")
    assert work == (
        {
            "node": "node-a",
            "workload_namespace": "vision",
            "workload_kind": "Job",
            "workload_name": "resnet",
            "team": "perception",
            "model": TRAINING.model,
            "mode": "exclusive",
        },
        3600.0,
    )
    assert (who_knows[0]["workload_kind"], who_knows[0]["mode"]) == ("Unattributed", "mig")
    assert (free[0]["workload_kind"], "workload_namespace" in free[0]) == ("Unallocated", False)
    assert [value for _, value in rows(view, "gpu_ledger_cost_total")] == [2.5, 2.45]
    assert [(labels["currency"], value) for labels, value in rows(view, "gpu_ledger_idle_cost_total")] == [
        ("USD", 0.4166666),
        ("USD", 2.45),
    ]


def test_active_idle_and_unknown_sum_to_allocated_for_every_series() -> None:
    view = snapshot()
    for level in ("pod", "ledger"):
        parts = zip(
            *(rows(view, f"gpu_{level}_{part}_seconds_total") for part in ("active", "idle", "unknown")), strict=True
        )
        whole = rows(view, f"gpu_{level}_allocated_seconds_total")
        for (labels, value), row in zip(whole, parts, strict=True):
            assert {tuple(part[0].items()) for part in row} == {tuple(labels.items())}
            assert value == sum(part[1] for part in row)


def test_energy_that_was_never_measured_and_money_without_a_price_are_absent_and_not_zero() -> None:
    only = showing(accounts={UNMEASURED: Totals(unknown_seconds=72.0, energy_unknown_seconds=72.0)})
    assert rows(only, "gpu_ledger_energy_joules_total") == []
    assert rows(only, "gpu_ledger_cost_total") == []
    partly = Totals(idle_seconds=72.0, energy_joules=5.0, energy_unknown_seconds=71.0)
    assert rows(showing(accounts={UNMEASURED: partly}), "gpu_ledger_energy_joules_total")[0][1] == 5.0


def test_a_series_that_was_just_born_shows_zero_in_every_quantity_so_that_increase_sees_its_first_step() -> None:
    born = showing(accounts={TRAINING: Totals(money={"USD": Money()})})
    for name in ("allocated_seconds", "active_seconds", "energy_joules", "cost", "idle_cost"):
        assert [value for _, value in rows(born, f"gpu_ledger_{name}_total")] == [0.0], name


def test_a_pod_that_ended_keeps_its_counters_while_it_lingers() -> None:
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


def test_the_price_of_a_gpu_stands_once_even_while_it_is_down_and_is_absent_where_unknown() -> None:
    view = snapshot(exclusive(), lost(3))
    assert [(labels["gpu"], value) for labels, value in rows(view, "gpu_hourly_price")] == [("0", 2.5)]
    assert rows(view, "gpu_exporter_unpriced_devices") == [({}, 1)]
    price = Price(per_hour=0.0, currency="EUR", source="own:free", as_of="2026-01-01")
    ((labels, value),) = rows(dataclasses.replace(view, prices={lost(3).uuid: price}), "gpu_hourly_price")
    assert (labels["currency"], labels["price_source"], value) == ("EUR", "own:free", 0.0)


def test_currencies_are_never_added_up() -> None:
    both = Totals(active_seconds=1.0, money={"USD": Money(total=1.0), "EUR": Money(total=2.0)})
    shown = rows(showing(accounts={TRAINING: both}), "gpu_ledger_cost_total")
    assert [(labels["currency"], value) for labels, value in shown] == [("EUR", 2.0), ("USD", 1.0)]


def test_whether_the_ledger_is_on_disk_and_adds_up_is_told() -> None:
    view = snapshot()
    assert rows(view, "gpu_exporter_state_saved") == [({}, 1)]
    assert rows(view, "gpu_exporter_state_saved_timestamp_seconds") == [({}, NOW - 3)]
    assert rows(view, "gpu_exporter_ledger_capacity_seconds_total") == [({}, 7200.0)]
    assert rows(view, "gpu_exporter_conservation_error_seconds") == [({}, 1e-12)]
    in_memory = showing(saved_at_seconds=None, state_problem="disk full")
    assert rows(in_memory, "gpu_exporter_state_saved") == [({}, 0)]
    assert rows(in_memory, "gpu_exporter_state_saved_timestamp_seconds") == []


def test_before_the_first_reading_was_metered_there_is_no_ledger_on_the_page() -> None:
    bare = dataclasses.replace(snapshot(), ledger=None)
    names = {family.name for family in families(bare, ExpositionOptions())}
    assert not {name for name in names if name.startswith("gpu_ledger_") or "state_saved" in name}


def test_pods_beyond_the_series_limit_are_left_out_whole_and_counted_but_owners_never() -> None:
    view = snapshot(exclusive())
    gauges, counters = 7, 6
    options = ExpositionOptions(series_limit=gauges + counters)
    assert len(rows(view, "gpu_pod_allocated_seconds_total", options)) == 1
    assert rows(view, "gpu_exporter_dropped_series_total", options)[0][1] == 4
    assert len(rows(view, "gpu_ledger_allocated_seconds_total", options)) == 3


def test_two_accounts_that_differ_only_in_mode_or_model_are_two_series() -> None:
    owner = Owner(namespace="a")
    accounts = {
        Account(owner=owner, model=model, mode=mode): Totals(active_seconds=1.0)
        for model in ("A100", "H100")
        for mode in ShareMode
    }
    view = dataclasses.replace(snapshot(), ledger=LedgerView(accounts=accounts))
    assert len(rows(view, "gpu_ledger_active_seconds_total")) == 6


def test_what_folded_owners_have_had_is_not_scraped_a_second_time() -> None:
    folded = Account(owner=OTHER, model=TRAINING.model, mode=ShareMode.EXCLUSIVE)
    base = snapshot().ledger
    assert base is not None
    view = showing(accounts={**base.accounts, folded: Totals(active_seconds=10.0)})
    kinds = {labels.get("workload_kind") for labels, _ in rows(view, "gpu_ledger_allocated_seconds_total")}
    assert kinds == {"Job", "Unattributed", "Unallocated"}


def test_the_page_adds_up_to_the_capacity_with_owners_just_born_and_owners_folded() -> None:
    ledger = Ledger(account_limit=3)
    for number in range(200):
        owner = Owner(namespace=f"team-{number // 40}")
        account = Account(owner=owner, model=TRAINING.model, mode=ShareMode.EXCLUSIVE)
        ledger.charge([Portion(gpu_uuid="GPU-0", account=account, idle_seconds=1.0)], {}, float(number))
        view = dataclasses.replace(snapshot(), ledger=ledger.view(float(number)))
        told = [*rows(view, "gpu_ledger_allocated_seconds_total"), *rows(view, "gpu_exporter_ledger_withheld_seconds")]
        assert sum(value for _, value in told) == rows(view, "gpu_exporter_ledger_capacity_seconds_total")[0][1]
    assert any(account.owner == OTHER for account in ledger.view(200.0).accounts)
