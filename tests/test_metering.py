"""Metering in the agent: shown values are saved, restarts continue, prices depend on time, disk faults are reported."""

import os
import signal
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from agent_support import gpu_seconds, matching, running_agent
from files_support import needs_root, tmpfs
from metering_support import holder, namespace_pays, use, whole
from pipeline_support import EPOCH_SECONDS, pipeline, save_now

from exporter.accounting.ledger import COST_LABELS_LIMIT, Ledgers
from exporter.accounting.meter import Meter
from exporter.accounting.prices import Match, NodePrices, PriceBook, PriceRow
from exporter.accounting.state_file import StateFile, to_json
from exporter.agent.metering import HUNG_SECONDS, Metering
from exporter.agent.run import loaded_driver
from exporter.errors import ConfigError, StateError
from exporter.model.attribution import UNALLOCATED, UNATTRIBUTED, NodeFacts, Owner
from exporter.model.fields import Field
from exporter.model.ledger import LedgerView, Price
from gpu_simulator.scenario import load as load_scenario

SAMPLED_AT = "gpu_exporter_sample_timestamp_seconds"

NOON = 1_800_000_000.0
DOLLAR = Price(per_hour=3600.0, currency="USD", source="test:1", as_of="2026-01-01")
BUSY = [whole(use(holder("train"), 1.0), busy=1.0)]
FREE = [whole()]


def row(price: Price, start: float = 0.0, end: float = 1e12) -> PriceRow:
    return PriceRow(number=1, match=Match(), price=price, from_seconds=start, to_seconds=end, source="test")


def book(*rows: PriceRow) -> PriceBook:
    return PriceBook(name="test", currency="USD", rows=rows)


def started(
    directory: Path | None = None,
    *,
    steady: float = 0.0,
    boot_id: str = "boot",
    prices: PriceBook | None = None,
    simulated: bool = False,
) -> Metering:
    made = Metering(
        meter=Meter(1.0, namespace_pays),
        ledgers=Ledgers(saves=directory is not None),
        prices=NodePrices(node="n", book=prices or book(row(DOLLAR))),
        file=StateFile(directory) if directory else None,
        boot_id=boot_id,
        simulated=simulated,
    )
    made.restore(steady)
    return made


def sample(metering: Metering, steady: float, views: object = BUSY) -> None:
    assert isinstance(views, list)
    metering.observe(views, sampled_steady=steady, now=NOON + steady, steady=steady)


def shown(metering: Metering, steady: float) -> LedgerView:
    view = metering.ledger_view(steady)
    assert view is not None
    return view


def seconds(view: LedgerView, owner: Owner) -> tuple[float, float, float]:
    totals = [totals for account, totals in view.accounts.items() if account.owner == owner]
    return (
        sum(entry.seconds.active for entry in totals),
        sum(entry.seconds.idle for entry in totals),
        sum(entry.seconds.unknown for entry in totals),
    )


ML = Owner(namespace="ml")


def test_ledger_is_absent_before_the_first_sample() -> None:
    assert started().ledger_view(0.0) is None


def test_memory_only_ledger_without_state_directory_is_no_problem() -> None:
    metering = started()
    sample(metering, 0.0)
    sample(metering, 1.0)
    assert metering.begin_save(NOON, 1.0) is None
    view = shown(metering, 1.0)
    assert seconds(view, ML) == (1.0, 0.0, 0.0)
    assert (view.saved_at_seconds, view.state_problem) == (None, "")


def test_ledger_view_shows_exactly_the_saved_seconds(tmp_path: Path) -> None:
    metering = started(tmp_path)
    sample(metering, 0.0)
    save_now(metering, NOON, 0.0)
    for steady in (1.0, 2.0, 3.0):
        sample(metering, steady)
        save_now(metering, NOON + steady, steady)
        assert shown(metering, steady).capacity_seconds == 0.0
    for steady in (4.0, 5.0):
        sample(metering, steady)
    save = metering.begin_save(NOON + 5, 5.0)
    assert save is not None
    sample(metering, 6.0)
    assert shown(metering, 6.0).capacity_seconds == 0.0, "not during the save"
    metering.end_save(save, save.write())
    view = shown(metering, 6.0)
    assert seconds(view, ML) == (5.0, 0.0, 0.0)
    assert view.saved_at_seconds == NOON + 5
    assert shown(started(tmp_path, steady=7.0), 7.0).accounts == view.accounts


def test_gap_of_a_restart_is_unknown_time_of_the_continuous_holder(tmp_path: Path) -> None:
    metering = started(tmp_path)
    sample(metering, 0.0)
    sample(metering, 1.0)
    save_now(metering, NOON + 1, 1.0)
    metering = started(tmp_path, steady=60.0)
    assert seconds(shown(metering, 60.0), ML) == (1.0, 0.0, 0.0)
    sample(metering, 61.0)
    sample(metering, 62.0)
    save_now(metering, NOON + 62, 62.0)
    view = shown(metering, 62.0)
    assert seconds(view, ML) == (2.0, 0.0, 60.0)
    assert view.capacity_seconds == pytest.approx(62.0)
    assert view.started_at_seconds == NOON


def test_late_sample_before_a_restart_counts_no_second_twice(tmp_path: Path) -> None:
    first = started(tmp_path)
    for steady in (1.0, 3.0, 2.0):
        sample(first, steady)
    save_now(first, NOON + 3, 3.0)
    second = started(tmp_path, steady=4.0)
    sample(second, 4.0)
    save_now(second, NOON + 4, 4.0)
    assert shown(second, 4.0).capacity_seconds == 3.0


def test_energy_of_a_gap_with_a_driver_reload_is_unknown(tmp_path: Path) -> None:
    counter = Field.TOTAL_ENERGY_CONSUMPTION
    metering = started(tmp_path)
    for second, millijoules in ((0.0, 900_000_000), (1.0, 900_300_000), (621.0, 3_000_000), (622.0, 3_300_000)):
        sample(metering, second, [whole(use(holder("train"), 1.0), busy=1.0, values={counter: millijoules})])
    save_now(metering, NOON + 622, 622.0)
    (totals,) = shown(metering, 622.0).accounts.values()
    assert (totals.energy_joules, totals.energy_unknown_seconds) == (600.0, 620.0)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("reloads", [False, True])
def test_energy_over_a_gap_is_measured_only_with_the_same_loaded_driver(
    tmp_path: Path, *, reloads: bool, restarts: bool
) -> None:
    """The counter of the newly loaded driver is higher than the old one was."""
    module = tmp_path / "sys/module/nvidia"
    module.mkdir(parents=True)
    metering = started(tmp_path)

    def measure(second: float, joules: int) -> None:
        metering.loaded_driver = partial(loaded_driver, tmp_path / "sys")
        counter = {Field.TOTAL_ENERGY_CONSUMPTION: joules * 1000}
        sample(metering, second, [whole(use(holder("train"), 1.0), busy=1.0, values=counter)])

    measure(0.0, 3_000)
    measure(1.0, 3_300)
    if restarts:
        save_now(metering, NOON + 1, 1.0)
        metering = started(tmp_path, steady=620.0)
    if reloads:
        module.rename(module.with_name("unloaded"))
        module.mkdir()
    measure(621.0, 150_000)
    measure(622.0, 150_300)
    save_now(metering, NOON + 622, 622.0)
    (totals,) = shown(metering, 622.0).accounts.values()
    of_gap = (0.0, 620.0) if reloads else (146_700.0, 0.0)
    assert (totals.energy_joules, totals.energy_unknown_seconds) == (600.0 + of_gap[0], of_gap[1])


def test_unloaded_driver_has_no_identity(tmp_path: Path) -> None:
    assert loaded_driver(tmp_path) is None


def test_gap_of_a_restart_with_a_changed_holder_is_unattributed(tmp_path: Path) -> None:
    metering = started(tmp_path)
    sample(metering, 0.0)
    save_now(metering, NOON, 0.0)
    metering = started(tmp_path, steady=60.0)
    sample(metering, 60.0, FREE)
    save_now(metering, NOON + 60, 60.0)
    view = shown(metering, 60.0)
    assert seconds(view, UNATTRIBUTED) == (0.0, 0.0, 60.0)
    assert seconds(view, UNALLOCATED) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("boot_id", ["another", ""])
def test_time_across_a_reboot_is_not_charged(tmp_path: Path, boot_id: str) -> None:
    metering = started(tmp_path)
    sample(metering, 1000.0)
    sample(metering, 1001.0)
    save_now(metering, NOON, 1001.0)
    metering = started(tmp_path, steady=2000.0, boot_id=boot_id)
    sample(metering, 2000.0)
    sample(metering, 2001.0)
    save_now(metering, NOON + 1000, 2001.0)
    assert seconds(shown(metering, 2001.0), ML) == (2.0, 0.0, 0.0)


def test_last_save_includes_every_metered_sample(tmp_path: Path) -> None:
    metering = started(tmp_path)
    sample(metering, 0.0)
    save_now(metering, NOON, 0.0)
    sample(metering, 1.0)
    save_now(metering, NOON + 1, 1.0, last=True)
    assert seconds(shown(started(tmp_path, steady=2.0), 2.0), ML) == (1.0, 0.0, 0.0)


def test_damaged_file_is_set_aside_and_the_next_save_recovers(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_bytes(b'{"version":1')
    metering = started(tmp_path)
    assert metering.errors == {("state", "state_damaged"): 1}
    sample(metering, 0.0)
    sample(metering, 1.0)
    view = shown(metering, 1.0)
    assert "ledger.json.damaged-1" in view.state_problem
    assert (view.ledgers, view.saved_at_seconds) == ((), None)
    save_now(metering, NOON + 1, 1.0)
    view = shown(metering, 1.0)
    assert (view.state_problem, view.saved_at_seconds) == ("", NOON + 1)
    assert seconds(view, ML) == (1.0, 0.0, 0.0)


OWNER = {"namespace": "ml", "kind": "", "name": "", "team": "", "cost_labels": "", "provisional": False, "pod_uid": ""}
STATES = dict.fromkeys(("active_effective", "active_ineffective", "active_unprofiled", "idle", "unknown"), 1.0)
TOTALS = {"energy_joules": 9.0, "energy_unknown_seconds": 0.0, "unpriced_seconds": 0.0, "seconds": STATES, "money": {}}
HELD = {"namespace": "ml", "pod": "train", "container": "main", "pod_uid": None}
PLACE = {"device_uuid": "GPU-0", "gpu_uuid": "GPU-0"}
LAYOUT_3 = {
    "ledger": {
        "id": "0a1b",
        "created_at_seconds": NOON,
        "ended_at_seconds": None,
        "capacity_seconds": 5.0,
        "conservation_error_seconds": 0.0,
        "accounts": [{**OWNER, "model": "H100", "mode": "exclusive", "totals": TOTALS}],
    },
    "former_ledgers": [],
    "pods": [
        {**HELD, **PLACE, "gpu_index": 0, "gpu_instance": "", "mig_profile": "", "model": "H100", "totals": TOTALS}
    ],
    "boot_id": "boot",
    "metered_steady": 10.0,
    "metered_until": {"GPU-0": 10.0},
    "energy_uncounted_seconds": {},
    "energy_drivers": {},
    "slots": [
        {
            **HELD,
            **PLACE,
            "account": {"owner": OWNER, "model": "H100", "mode": "exclusive"},
            "share_ratio": 1.0,
            "energy_counter_millijoules": 7.5,
            "idle_watts": None,
        }
    ],
    "saved_at_seconds": NOON,
    "simulated": False,
    "labelled": None,
    "replicas": [["GPU-0", "r", 4]],
    "idle_clocks": [
        {
            "holder": ["GPU-0", "ml", "train", "main"],
            "pod_uid": "u",
            "first_seen": 0.0,
            "last_seen": 10.0,
            "idle_seconds": 3.0,
            "unmeasured_seconds": 0.0,
        }
    ],
}


def test_state_of_layout_3_keeps_its_format(tmp_path: Path) -> None:
    StateFile(tmp_path).save(LAYOUT_3)
    metering = started(tmp_path, steady=11.0)
    assert not metering.problem
    view = shown(metering, 11.0)
    assert seconds(view, ML) == (3.0, 1.0, 1.0)
    assert metering.replicas == {("GPU-0", "r"): 4}
    sample(metering, 11.0)
    save_now(metering, NOON + 1, 11.0)
    assert seconds(shown(metering, 11.0), ML) == (4.0, 1.0, 1.0)
    state = StateFile(tmp_path).load() or {}
    assert state.keys() == LAYOUT_3.keys()
    for part in ("ledger", "pods", "slots"):
        old, new = ((one if isinstance(one, dict) else one[0]) for one in (LAYOUT_3[part], state[part]))
        assert new.keys() == old.keys(), part


PARTS = (
    *("ledger", "former_ledgers", "pods", "slots", "boot_id", "metered_steady", "saved_at_seconds", "simulated"),
    *("replicas", "metered_until", "energy_uncounted_seconds", "idle_clocks", "labelled"),
)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *((part, None) for part in PARTS),
        ("ledger", {"accounts": [7]}),
        ("slots", [{}]),
        ("slots", 7),
        ("metered_steady", "soon"),
        ("saved_at_seconds", [1]),
    ],
)
def test_invalid_state_in_a_readable_file_is_set_aside(tmp_path: Path, part: str, value: object) -> None:
    metering = started(tmp_path)
    sample(metering, 0.0)
    save_now(metering, NOON, 0.0)
    file = StateFile(tmp_path)
    state = file.load() or {}
    file.save({**{key: kept for key, kept in state.items() if key != part}, **({} if value is None else {part: value})})
    again = started(tmp_path)
    assert again.errors == {("state", "state_damaged"): 1}
    assert (tmp_path / "ledger.json.damaged-1").exists()
    sample(again, 1.0)
    save_now(again, NOON + 1, 1.0)
    assert not again.problem


@pytest.mark.parametrize("simulated", [False, True])
def test_simulated_and_real_ledgers_are_never_mixed(tmp_path: Path, *, simulated: bool) -> None:
    metering = started(tmp_path, simulated=not simulated)
    sample(metering, 0.0)
    save_now(metering, NOON, 0.0)
    again = started(tmp_path, simulated=simulated)
    assert again.errors == {("state", "state_foreign"): 1}
    assert again.shown is None


def test_unsynced_save_is_shown_only_in_the_saved_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metering = started(tmp_path)
    sample(metering, 0.0)
    save_now(metering, NOON, 0.0)
    sample(metering, 1.0)
    with monkeypatch.context() as broken:
        broken.setattr(StateFile, "_sync_directory", lambda _: (_ for _ in ()).throw(OSError(5, "I/O error")))
        save_now(metering, NOON + 1, 6.0)
    assert metering.errors == {("state", "state_unsynced"): 1}
    sample(metering, 8.0)
    view = shown(metering, 8.0)
    assert "may be lost with the power" in view.state_problem
    assert view.capacity_seconds == 7.0
    assert shown(started(tmp_path, steady=8.0), 8.0).capacity_seconds == 1.0
    save_now(metering, NOON + 12, 12.0)
    assert shown(metering, 12.0).capacity_seconds == 8.0


def test_memory_ledger_is_shown_while_the_disk_fails_and_never_decreases(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    directory.mkdir()
    metering = started(directory)
    sample(metering, 0.0)
    save_now(metering, NOON, 0.0)
    (directory / "ledger.json").unlink()
    directory.rmdir()
    last = 0.0
    for step in range(1, 40):
        steady = step / 2
        sample(metering, steady)
        if step == 20:
            directory.mkdir()
        save = metering.begin_save(NOON + steady, steady)
        assert shown(metering, steady).capacity_seconds >= last
        if save:
            sample(metering, steady + 0.25)
            while_writing = shown(metering, steady + 0.25).capacity_seconds
            metering.end_save(save, save.write())
            assert shown(metering, steady + 0.25).capacity_seconds >= while_writing
        last = shown(metering, steady + 0.25).capacity_seconds
        if step == 19:
            assert "--state-dir" in shown(metering, steady).state_problem
            assert shown(metering, steady).saved_at_seconds is None
            assert last == pytest.approx(steady, abs=0.5), "the memory-only ledger is still shown"
    assert shown(metering, 20.0).state_problem == ""
    assert metering.errors == {("state", "state_unwritable"): 1}
    kept = shown(started(directory, steady=20.0), 20.0)
    assert kept.capacity_seconds >= last, "the last shown value is kept"


def test_hanging_disk_is_reported_and_the_memory_ledger_is_shown(tmp_path: Path) -> None:
    metering = started(tmp_path)
    sample(metering, 0.0)
    save = metering.begin_save(NOON, 0.0)
    assert save is not None
    for step in range(1, int(HUNG_SECONDS) + 3):
        sample(metering, float(step))
        assert metering.begin_save(NOON + step, float(step)) is None, "only one save at a time"
    now = HUNG_SECONDS + 2
    view = shown(metering, now)
    assert "has not answered" in view.state_problem
    assert view.capacity_seconds == now
    assert metering.errors == {("state", "hung"): 1}
    (identity,) = (ledger.identity for ledger in view.ledgers)
    metering.end_save(save, save.write())
    view = shown(metering, now)
    assert view.capacity_seconds == now, "a late save decreases no value"
    assert identity in {ledger.identity for ledger in view.ledgers}
    sample(metering, now + 1)
    save_now(metering, NOON + now + 1, now + 1)
    view = shown(metering, now + 1)
    assert (view.capacity_seconds, view.state_problem) == (now + 1, "")


def test_price_change_at_noon_applies_from_noon() -> None:
    dear = replace(DOLLAR, per_hour=7200.0)
    metering = started(prices=book(row(DOLLAR, end=NOON + 2), row(dear, start=NOON + 2)))
    for steady in (0.0, 1.0, 2.0, 3.0):
        sample(metering, steady, FREE)
    (totals,) = shown(metering, 3.0).accounts.values()
    assert totals.money["USD"].total == pytest.approx(1 + 1 + 2)
    assert totals.money["USD"].idle == pytest.approx(4)
    assert metering.prices.current == {"GPU-0": dear}


def test_price_change_in_a_gap_charges_each_side_at_its_own_price(tmp_path: Path) -> None:
    hour = 3600.0
    cheap, dear = replace(DOLLAR, per_hour=2.0), replace(DOLLAR, per_hour=10.0, per_kwh=1.0)
    noon = NOON + 12 * hour
    prices = book(row(cheap, end=noon), row(dear, start=noon))
    metering = started(tmp_path, prices=prices)
    sample(metering, 0.0)
    save_now(metering, NOON, 0.0)
    metering = started(tmp_path, prices=prices, steady=13 * hour)
    sample(metering, 13 * hour)
    save_now(metering, NOON + 13 * hour, 13 * hour)
    view = shown(metering, 13 * hour)
    assert [pod.money["USD"].total for pod in view.pods.values()] == pytest.approx([34.0])
    assert sum(totals.money["USD"].total for totals in view.accounts.values()) == pytest.approx(34.0)
    assert view.capacity_seconds == pytest.approx(13 * hour)
    assert view.conservation_error_seconds < 1e-6


def test_two_price_changes_in_a_gap_leave_the_middle_unpriced() -> None:
    metering = started(prices=book(row(DOLLAR, end=NOON + 10), row(DOLLAR, start=NOON + 30)))
    sample(metering, 0.0)
    sample(metering, 40.0)
    (totals,) = shown(metering, 40.0).accounts.values()
    assert totals.money["USD"].total == pytest.approx(10 + 10)
    assert totals.unpriced_seconds == pytest.approx(20)


SPOT = PriceRow(
    number=2, match=Match(capacity_type="spot"), price=replace(DOLLAR, per_hour=360.0), source="test", from_seconds=0.0
)


def test_label_dependent_price_is_unknown_until_the_labels_are_read(tmp_path: Path) -> None:
    prices = book(row(DOLLAR), SPOT)
    metering = started(tmp_path, prices=prices)
    metering.prices.learn(None)
    sample(metering, 0.0)
    sample(metering, 1.0)
    assert (metering.prices.current, metering.prices.unpriced_gpus) == ({}, 1)
    metering.prices.learn(NodeFacts(capacity_type="spot"))
    sample(metering, 2.0)
    save_now(metering, NOON + 2, 2.0)
    (totals,) = shown(metering, 2.0).accounts.values()
    assert (totals.money["USD"].total, totals.unpriced_seconds) == (pytest.approx(0.1), 1.0)
    again = started(tmp_path, prices=prices, steady=3.0)
    again.prices.learn(None)
    sample(again, 3.0)
    assert again.prices.current == {"GPU-0": SPOT.price}, "the state has the labels"


def test_label_independent_price_is_charged_before_labels_are_read() -> None:
    ours = PriceRow(number=3, match=Match(node="n"), price=DOLLAR, source="test", from_seconds=0.0)
    metering = started(prices=book(ours, SPOT))
    metering.prices.learn(None)
    sample(metering, 0.0)
    assert metering.prices.current == {"GPU-0": DOLLAR}
    metering = started(prices=book(row(DOLLAR), SPOT))
    metering.prices.facts = NodeFacts(capacity_type="on-demand")
    metering.prices.learn(None)
    sample(metering, 0.0)
    assert metering.prices.current == {"GPU-0": DOLLAR}, "the option decides"


LABELLED_NODE = """
node: sim-1
node_labels: {karpenter.sh/capacity-type: spot}
gpus: [{model: h100}]
faults: [{kind: %s, from: 0, for: %d}]
"""
SPOT_BOOK = """
currency: USD
rows:
  - {model: '*', per_gpu_hour: 6.88, source: contract, as_of: 2026-01-01}
  - {model: '*', capacity_type: spot, per_gpu_hour: 1.00, source: contract, as_of: 2026-01-01}
"""


def test_general_price_row_is_not_used_before_the_node_is_read(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(LABELLED_NODE % ("api_down", 6))
    (tmp_path / "prices.yaml").write_text(SPOT_BOOK)
    arguments = ("--simulate", str(tmp_path / "node.yaml"), "--price-book", str(tmp_path / "prices.yaml"))
    seen: set[float] = set()

    def spot(page: dict[str, float]) -> bool:
        seen.update(matching(page, "gpu_hourly_price").values())
        return bool(matching(page, "gpu_hourly_price"))

    with running_agent(*arguments, "--sample-interval", "250ms") as agent:
        agent.until(lambda page: page.get("gpu_exporter_unpriced_devices") == 1, "the GPU is unpriced at first")
        agent.until(spot, "a price")
    assert seen == {1.0}


def test_unreadable_node_leaves_gpus_unpriced_and_the_page_shows_why(tmp_path: Path) -> None:
    (tmp_path / "node.yaml").write_text(LABELLED_NODE % ("api_forbidden", 600))
    (tmp_path / "prices.yaml").write_text(SPOT_BOOK)
    arguments = ("--simulate", str(tmp_path / "node.yaml"), "--price-book", str(tmp_path / "prices.yaml"))
    with running_agent(*arguments, "--sample-interval", "250ms") as agent:
        page = agent.until(
            lambda page: (
                matching(page, "gpu_exporter_errors_total", part="metadata", reason="node_forbidden")
                and "gpu_exporter_unpriced_devices" in page
            ),
            "the refusal and the first reading",
        )
        assert page["gpu_exporter_unpriced_devices"] == 1
        assert not matching(page, "gpu_hourly_price")
        assert "GPUs are unpriced where the price may depend on this node's labels" in agent.get("/readyz")[1]
        assert "may depend on the node's labels" in agent.get("/")[1]


def test_unpriced_gpu_has_no_cost_and_is_counted() -> None:
    metering = started(prices=PriceBook())
    sample(metering, 0.0)
    sample(metering, 1.0)
    (totals,) = shown(metering, 1.0).accounts.values()
    assert (dict(totals.money), totals.unpriced_seconds) == ({}, 1.0)
    assert (metering.prices.current, metering.prices.unpriced_gpus) == ({}, 1)


def test_invalid_price_book_keeps_the_last_one_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    metering = started()
    good = metering.prices.book
    metering.keep_prices(ConfigError("prices.yaml:3: row 1: negative", "prices.yaml:9: row 2: no date"))
    assert metering.prices.book is good
    assert metering.errors == {("prices", "invalid"): 1}
    assert "row 1" in caplog.text
    assert "row 2" in caplog.text
    metering.use_prices(book(row(replace(DOLLAR, per_hour=1.0))))
    sample(metering, 0.0)
    assert metering.prices.current["GPU-0"].per_hour == 1.0


def test_save_is_unaffected_by_later_samples(tmp_path: Path) -> None:
    metering = started(tmp_path)
    sample(metering, 0.0)
    sample(metering, 1.0)
    save = metering.begin_save(NOON, 1.0)
    assert save is not None
    before = to_json(save.data), dict(save.pods)
    sample(metering, 2.0)
    assert (to_json(save.data), save.pods) == before


def test_save_failing_twice_is_counted_twice_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metering = started(tmp_path)
    for steady in (0.0, 5.0):
        sample(metering, steady)
        save = metering.begin_save(NOON + steady, steady)
        assert save is not None
        metering.end_save(save, StateError("disk_full", "state: cannot write: no space; free some"))
    assert metering.errors == {("state", "disk_full"): 2}
    assert caplog.text.count("no space") == 1


def priced(page: dict[str, float], dollars: float) -> bool:
    return dollars in matching(page, "gpu_hourly_price").values()


def test_too_many_cost_labels_are_metered_together_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    metering = started()
    owners = {f"pod-{number}": replace(ML, cost_labels=f"user={number}") for number in range(COST_LABELS_LIMIT + 3)}
    metering.meter = Meter(1.0, lambda held: owners[held.pod])
    for number, pod in enumerate((*owners, *owners)):
        sample(metering, float(number), [whole(use(holder(pod), 1.0), busy=1.0)])
    assert metering.errors == {("ledger", "too_many_cost_labels"): 3}
    (reported,) = [record.getMessage() for record in caplog.records if record.name == "exporter.agent"]
    assert "--cost-labels" in reported
    view = shown(metering, 500.0)
    assert sum(sum(seconds(view, account.owner)) for account in view.accounts) == view.capacity_seconds


def test_sighup_reloads_the_price_book_and_a_bad_one_keeps_the_last_good_one(tmp_path: Path) -> None:
    good = "currency: USD\nrows:\n  - {model: '*H100*', per_gpu_hour: %s, source: contract, as_of: 2026-01-01}\n"
    prices = tmp_path / "prices.yaml"
    prices.write_text(good % 2.5)
    with running_agent("--simulate", "demo", "--price-book", str(prices)) as agent:
        agent.until(lambda page: priced(page, 2.5), "the first price")
        prices.write_text(good % -1)
        agent.process.send_signal(signal.SIGHUP)
        page = agent.until(
            lambda page: matching(page, "gpu_exporter_errors_total", part="prices", reason="invalid"), "the failure"
        )
        assert priced(page, 2.5)
        assert any("row 1" in line for line in agent.lines)
        prices.write_text(good % 3.5)
        agent.process.send_signal(signal.SIGHUP)
        agent.until(lambda page: priced(page, 3.5), "the fixed price")


@needs_root
def test_agent_on_a_full_disk_reports_it_and_saves_once_there_is_space(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with tmpfs(disk, "size=64k"):
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize))
        arguments = ("--simulate", "t4-timeslicing", "--sample-interval", "250ms", "--state-interval", "1s")
        with running_agent(*arguments, "--state-dir", str(disk)) as agent:
            page = agent.until(
                lambda page: matching(page, "gpu_exporter_errors_total", part="state", reason="disk_full"),
                "the failure",
            )
            assert page["gpu_exporter_state_saved"] == 0
            page = agent.until(lambda page: gpu_seconds(page) > 0, "memory is shown")
            (in_memory,) = matching(page, "gpu_ledger_created_timestamp_seconds")
            assert agent.get("/readyz")[0] == 200
            ballast.unlink()
            page = agent.until(lambda page: page["gpu_exporter_state_saved"] == 1, "saved again")
            both = set(matching(page, "gpu_ledger_created_timestamp_seconds"))
            assert in_memory in both
            assert len(both) == 2
            assert agent.end(signal.SIGKILL) == -signal.SIGKILL
        with running_agent(*arguments, "--state-dir", str(disk)) as agent:
            after = agent.until(lambda page: matching(page, "gpu_ledger_seconds_total"), "the ledgers")
            assert set(matching(after, "gpu_ledger_created_timestamp_seconds")) == both
            for series, value in matching(page, "gpu_ledger_seconds_total").items():
                assert after[series] >= value
        left = {path.name for path in disk.iterdir()}
        assert {"ledger.json"} <= left <= {"ledger.json", "windows.json"}


async def test_every_queued_reading_of_a_tick_is_metered(tmp_path: Path) -> None:
    async with pipeline(load_scenario("demo"), tmp_path) as node:
        node.node.metering = started()
        await node.until(3.0, steps=4)
        for seconds_on in (4.0, 5.0):
            node.clock.seconds = seconds_on
            node.direct.readings.append(node.source.sample(EPOCH_SECONDS + seconds_on))
        snapshot = node.node.tick(EPOCH_SECONDS + 5.0, 5.0)
        assert snapshot.metering.ledger is not None
        gpus = len({view.gpu.uuid for view in snapshot.devices})
        assert snapshot.metering.ledger.capacity_seconds == pytest.approx(5.0 * gpus)
        unknown = sum(totals.seconds.unknown for totals in snapshot.metering.ledger.accounts.values())
        assert unknown < gpus, "two intervals of a second each, not one of two"


@needs_root
def test_agent_started_on_a_read_only_disk_meters_in_memory(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with tmpfs(disk, "size=64k"):
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with running_agent("--simulate", "t4-timeslicing", "--state-dir", str(disk)) as agent:
            page = agent.until(
                lambda page: matching(page, "gpu_exporter_errors_total", part="state", reason="read_only"),
                "the failure",
            )
            assert page["gpu_exporter_state_saved"] == 0
            agent.until(lambda page: gpu_seconds(page) > 0, "memory is shown")


def test_agent_saves_the_last_sample_on_sigterm(tmp_path: Path) -> None:
    arguments = ("--simulate", "t4-timeslicing", "--sample-interval", "250ms", "--state-interval", "300s")
    with running_agent(*arguments, "--state-dir", str(tmp_path)) as agent:
        first = agent.until(lambda page: page.get("gpu_exporter_state_saved"), "the first save, of nothing yet")
        began = first[SAMPLED_AT]
        page = agent.until(lambda page: page[SAMPLED_AT] >= began + 1.0, "a second of samples after it")
        assert agent.end() == 0
    state = StateFile(tmp_path).load() or {}
    seen_seconds = len(matching(page, "gpu_up")) * (page[SAMPLED_AT] - began)
    totals = [account["totals"] for account in state["ledger"]["accounts"]]
    saved_seconds = sum(sum(one["seconds"].values()) for one in totals)
    assert saved_seconds >= seen_seconds * 0.99 > 0, "including the time of unknown owners"


def test_agent_keeps_ages_and_idle_times_after_a_kill(tmp_path: Path) -> None:
    scenario, state = tmp_path / "one.yaml", tmp_path / "state"
    server = "{namespace: ml, name: server, devices: [{gpu: 0}], activity: 0, memory_mib: 4096}"
    scenario.write_text(f"node: n1\ngpus:\n  - {{model: h100}}\npods:\n  - {server}\n")
    state.mkdir()
    arguments = ("--simulate", str(scenario), "--state-dir", str(state), "--state-interval", "1s")

    def idle_for(page: dict[str, float]) -> float:
        return max(matching(page, "gpu_pod_idle_for_seconds", pod_name="server").values(), default=0.0)

    with running_agent(*arguments) as agent:
        before = agent.until(lambda page: idle_for(page) >= 6.0, "six seconds of idleness")
        agent.end(signal.SIGKILL)
    with running_agent(*arguments) as agent:
        after = agent.until(lambda page: matching(page, "gpu_pod_idle_for_seconds"), "the pod")
    assert idle_for(after) >= idle_for(before) - 3.0, "except for unsaved time"
    (age,) = matching(after, "gpu_pod_age_seconds").values()
    assert age >= idle_for(before)


@pytest.mark.parametrize("answers", [True, False])
async def test_gap_of_a_restart_waits_for_the_first_kubelet_answer_for_a_bounded_time(
    tmp_path: Path,
    answers: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    async with pipeline(load_scenario("demo"), tmp_path) as node:

        def tick(second: float) -> LedgerView | None:
            node.clock.seconds = second
            node.direct.readings.append(node.source.sample(EPOCH_SECONDS + second))
            return node.node.tick(EPOCH_SECONDS + second, second).metering.ledger

        node.node.metering = started(state, simulated=True)
        await node.until(10.0)
        save_now(node.node.metering, NOON, EPOCH_SECONDS + 10.0)
        before = shown(node.node.metering, EPOCH_SECONDS + 10.0)
        node.kubelet.latest = None
        node.node.metering = again = started(state, simulated=True)
        assert tick(18.0) == tick(20.0) == replace(before, saved_at_seconds=NOON)
        if answers:
            await node.ask(EPOCH_SECONDS + 20.0)
        tick(21.0 if answers else 79.0)
        save_now(again, NOON, EPOCH_SECONDS + 80.0)
        view = shown(again, EPOCH_SECONDS + 80.0)
        lost = seconds(view, UNATTRIBUTED)
        charged = view.capacity_seconds - before.capacity_seconds
        assert charged > 0
        assert sum(lost) == pytest.approx(0.0 if answers else charged)


async def test_kubelet_answer_within_a_tick_applies_from_the_next_tick(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    async with pipeline(load_scenario("demo"), tmp_path) as node:
        node.node.metering = started(state, simulated=True)
        await node.until(10.0)
        save_now(node.node.metering, NOON, EPOCH_SECONDS + 10.0)
        before = shown(node.node.metering, EPOCH_SECONDS + 10.0)
        node.kubelet.latest = None
        node.node.metering = again = started(state, simulated=True)
        for second in (18.0, 19.0):
            node.clock.seconds = second
            node.direct.readings.append(node.source.sample(EPOCH_SECONDS + second))
            steps = node.node.steps(EPOCH_SECONDS + second, second)
            next(steps)
            await node.ask(EPOCH_SECONDS + second)
            assert [step for step in steps if step]
        save_now(again, NOON, EPOCH_SECONDS + 19.0)
        view = shown(again, EPOCH_SECONDS + 19.0)
        assert view.capacity_seconds > before.capacity_seconds
        assert sum(seconds(view, UNATTRIBUTED)) == 0.0, "holders that were unknown at the join are not charged"
