"""Recommendations from measured use, and cases without one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_support import A100, ACTIVE, GB, H100, HOURS, L40S, T4, ledger, paid, prices_of, use

from exporter.cost.dimensions import LineKey
from exporter.cost.holdings import HeldDevice, profiles_of
from exporter.cost.ledger import Figures
from exporter.cost.recommend import Recommendation, recommend
from exporter.model.ledger import ByState

MIG = {"uuid": "MIG-1", "memory_total_bytes": 40 * GB}
SMALL = {"peak_memory_bytes": 12 * GB}


def advice_on(
    *uses: HeldDevice, per_hour: float = 4.0, judge_servers: bool = False, parts: ByState = ACTIVE
) -> list[Recommendation]:
    return list(recommend(uses, prices_of(uses, per_hour, parts), judge_servers=judge_servers))


def test_unused_workload_is_advised_to_give_back_all_gpus_at_its_monthly_cost() -> None:
    (one,) = advice_on(use(0, 0.0, peak_memory_bytes=0.0), use(1, 0.004, peak_memory_bytes=0.4 * GB))
    assert (one.advice, one.title, one.gpus) == ("give-back", "Give back all 2 H100", 2)
    assert (one.per_month, one.currency) == (pytest.approx(2 * 4 * 730), "USD")
    assert (one.owner.namespace, one.owner.kind, one.owner.workload, one.owner.team, one.owner.model) == (
        "ml",
        "Deployment",
        "w",
        "t",
        H100,
    )
    assert one.devices == ("GPU-0", "GPU-1")
    assert one.risk_level == "low"
    text = " ".join(one.evidence)
    assert "0.4 % in the busiest hour" in text
    assert "100.0 % of 336 device-hours held from 2026-09-14 14:00 to 2026-09-21 14:00 UTC (168 h)" in text
    assert "At most 0.4 GB of 85.0 GB" in text
    assert "price paid per GPU-hour in this window is 4.00 USD" in text


def test_idle_workload_with_loaded_memory_has_a_medium_risk() -> None:
    (one,) = advice_on(use(0, 0.0, peak_memory_bytes=30 * GB))
    assert (one.title, one.risk_level) == ("Give back the H100", "medium")
    assert "ask" in one.risk


def test_idle_gpus_of_a_busy_workload_are_named() -> None:
    busy = [use(number, 0.9) for number in range(5)]
    idle = [use(number, 0.0) for number in range(5, 8)]
    (one,) = advice_on(*busy, *idle)
    assert (one.advice, one.title, one.gpus) == ("fewer-gpus", "Give back 3 of 8 H100", 3)
    assert one.per_month == pytest.approx(3 * 4 * 730)
    assert one.devices == ("GPU-5", "GPU-6", "GPU-7")
    assert one.risk_level == "medium"
    assert "pipeline" in one.risk
    assert "The busiest of its other 5 devices was 90.0 % active" in " ".join(one.evidence)


def test_all_idle_gpus_of_one_model_are_given_back_if_other_models_work() -> None:
    (one,) = advice_on(use(0, 0.9), use(1, 0.0, model=L40S))
    assert (one.advice, one.title, one.owner.model) == ("fewer-gpus", "Give back the L40S", L40S)


SILENT: dict[str, dict[str, object]] = {
    "an hour of one percent": {"peak_ratio": 0.01},
    "a tenth of the time was not measured": {"measured_hours": HOURS * 0.89},
    "nothing was measured": {"measured_hours": 0.0, "mean_ratio": None, "p95_ratio": None, "peak_ratio": None},
    "held for less than a day": {"held_hours": 23.0, "measured_hours": 23.0},
    "its part of a shared device is an estimate": {"estimated": True, "share_ratio": 0.25},
    "given back already": {"still_held": False},
    "reserved on purpose": {"policy": "reserved"},
    "held by the platform for others": {"namespace": "kube-system"},
}


@pytest.mark.parametrize("changes", SILENT.values(), ids=SILENT)
def test_idle_gpu_is_not_given_back_in_exempt_cases(changes: dict[str, object]) -> None:
    assert advice_on(use(0, 0.0)) != []
    assert advice_on(use(0, 0.0, **changes)) == []


@pytest.mark.parametrize(
    "changes", [SILENT["nothing was measured"], SILENT["its part of a shared device is an estimate"]]
)
def test_device_with_little_data_prevents_advice_for_its_workload(changes: dict[str, object]) -> None:
    assert advice_on(use(0, 0.0), use(1, 0.0), use(2, 0.0, **changes)) == []


def test_workload_active_on_another_device_this_week_is_not_advised() -> None:
    now = use(0, 0.0, held_hours=30.0, measured_hours=30.0)
    assert advice_on(now, use(1, 0.8, held_hours=90.0, measured_hours=90.0, still_held=False)) == []
    (one,) = advice_on(now, use(1, 0.0, held_hours=90.0, measured_hours=90.0, still_held=False))
    assert (one.advice, one.gpus, one.devices) == ("give-back", 1, ("GPU-0",))


def test_slightly_used_gpu_moves_to_the_smallest_fitting_mig_instance() -> None:
    (one,) = advice_on(use(0, 0.2, **SMALL))
    assert (one.advice, one.title) == ("smaller-mig", "Move the H100 to a MIG instance 2g.20gb")
    assert one.gpus == pytest.approx(5 / 7)
    assert one.per_month == pytest.approx(4 * 730 * 5 / 7)
    assert one.risk_level == "low"


THIN = {"held_hours": 30.0, "measured_hours": 30.0}
RISKS: dict[str, tuple[HeldDevice, str, str]] = {
    "nothing loaded": (use(0, 0.0, peak_memory_bytes=0.0), "low", "No GPU work would be interrupted"),
    "something loaded": (use(0, 0.0), "medium", "A model may be loaded"),
    "seen for a day, nothing loaded": (use(0, 0.0, peak_memory_bytes=0.0, **THIN), "medium", "only 30 hours"),
    "seen for a day, something loaded": (use(0, 0.0, **THIN), "high", "only 30 hours"),
    "a busiest hour that fits": (use(0, 0.2, **SMALL), "low", "Try one replica first"),
    "a busiest hour that does not fit": (use(0, 0.2, **SMALL, peak_ratio=0.9), "medium", "90 % active, would not fit"),
    "a burst and hours unknown": (
        use(0, 0.2, **SMALL, peak_ratio=0.9, measured_hours=HOURS * 0.95),
        "high",
        "Activity is unknown for 5 % of its hours",
    ),
}


@pytest.mark.parametrize(("held", "level", "reason"), RISKS.values(), ids=RISKS)
def test_risk_level_has_a_reason_from_the_evidence(held: HeldDevice, level: str, reason: str) -> None:
    (one,) = advice_on(held)
    assert one.risk_level == level
    assert reason in one.risk


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        ("Deployment", "kubectl -n ml scale deployment/w --replicas=0"),
        ("Job", """kubectl -n ml patch job/w --type=merge -p '{"spec":{"suspend":true}}'"""),
        ("RayCluster", "kubectl -n ml edit raycluster/w"),
        ("", ""),
    ],
)
def test_give_back_advice_has_a_command_for_the_workload_kind(kind: str, command: str) -> None:
    (one,) = advice_on(use(0, 0.0, kind=kind))
    assert one.command == command


def test_command_quotes_shell_characters() -> None:
    (one,) = advice_on(use(0, 0.2, workload="$(reboot); x", **SMALL))
    assert one.command == "kubectl -n ml edit 'deployment/$(reboot); x'"


@pytest.mark.parametrize(
    ("activity", "memory", "profile"),
    [
        (0.1, 7 * GB, "1g.10gb"),
        (0.1, 8 * GB, "1g.20gb"),  # 8 GB and a fifth exceed the certain memory of 1g.10gb
        (0.12, 7 * GB, "2g.20gb"),
        (0.23, 16 * GB, "3g.40gb"),  # 20 % more than 16 GB is 19.2 GB: more than 20 GB less an eighth
        (0.4, 20 * GB, "4g.40gb"),
    ],
)
def test_mig_profile_leaves_a_fifth_of_memory_and_activity_free(activity: float, memory: float, profile: str) -> None:
    (one,) = advice_on(use(0, activity, peak_memory_bytes=memory))
    assert one.title.endswith(f" {profile}")


def test_mig_instance_moves_to_a_smaller_one() -> None:
    of_half = {**MIG, "mig_profile": "3g.40gb", "share_ratio": 0.5, "peak_memory_bytes": 5 * GB}
    (one,) = advice_on(use(0, 0.25, **of_half))
    assert (one.title, one.advice) == ("Move the instance 3g.40gb of H100 to a MIG instance 1g.10gb", "smaller-mig")
    assert one.gpus == pytest.approx(0.5 - 1 / 7)


KEPT: dict[str, dict[str, object]] = {
    "busy": {"p95_ratio": 0.8},
    "full": {"peak_memory_bytes": 60 * GB},
    "of unknown memory": {"peak_memory_bytes": None},
    "a server that takes memory in advance": {"workload": "vllm-llama"},
    "a server by its kind": {"kind": "InferenceService"},
    "a server by its class": {"policy": "inference"},
    "the smallest instance": {**MIG, "mig_profile": "1g.10gb", "share_ratio": 1 / 7, "memory_total_bytes": 10 * GB},
    "an instance of a profile that is not known": {**MIG, "mig_profile": "3g.60gb", "share_ratio": 0.5},
    "a part of a shared GPU": {"share_ratio": 0.25, "model": T4, "memory_total_bytes": 16 * GB},
}


@pytest.mark.parametrize("changes", KEPT.values(), ids=KEPT)
def test_slightly_used_gpu_is_kept_in_exempt_cases(changes: dict[str, object]) -> None:
    little = {"peak_memory_bytes": 15 * GB} | changes
    assert advice_on(use(0, 0.25, peak_memory_bytes=15 * GB)) != []
    assert advice_on(use(0, 0.25, **little)) == []


def test_inference_servers_are_judged_on_request_with_a_high_risk() -> None:
    (one,) = advice_on(use(0, 0.2, **SMALL, workload="vllm-llama"), judge_servers=True)
    assert (one.advice, one.risk_level) == ("smaller-mig", "high")
    assert "reserves memory at its start" in one.risk


def test_device_with_unknown_memory_use_keeps_its_workload_on_whole_gpus() -> None:
    assert advice_on(use(0, 0.1, **SMALL), use(1, 0.1, **SMALL))
    assert advice_on(use(0, 0.1, **SMALL), use(1, 0.1, peak_memory_bytes=None)) == []


def test_moving_several_gpus_to_mig_has_a_high_risk() -> None:
    (one,) = advice_on(use(0, 0.2, **SMALL), use(1, 0.1, **SMALL))
    assert (one.title, one.risk_level) == ("Move each of 2 H100 to a MIG instance 2g.20gb", "high")
    assert "cannot use MIG instances" in one.risk


def test_gpu_without_mig_is_shared_by_the_fitting_number_of_workloads() -> None:
    little = {"model": L40S, "memory_total_bytes": 48 * GB}
    (one,) = advice_on(use(0, 0.1, **little, peak_memory_bytes=8 * GB), per_hour=2.0)
    assert (one.advice, one.title) == ("share", "Share the L40S among 4 such workloads")
    assert (one.gpus, one.per_month) == (0.75, pytest.approx(2 * 730 * 0.75))
    (other,) = advice_on(use(0, 0.1, **little, peak_memory_bytes=18 * GB))
    assert (other.title, other.gpus) == ("Share the L40S among 2 such workloads", 0.5)
    assert advice_on(use(0, 0.45, **little, peak_memory_bytes=8 * GB)) == []


def test_cheaper_model_of_the_fleet_with_enough_memory_is_advised() -> None:
    little = use(0, 0.1, peak_memory_bytes=9 * GB)
    fleet = [use(1, 0.9, model=T4, workload="x", memory_total_bytes=16 * GB, peak_memory_bytes=9 * GB)]
    book = ledger(paid(4.0, HOURS), paid(0.5, 1000, workload="x", model=T4))
    found = [one for one in recommend([little, *fleet], book) if one.owner.workload == "w"]
    (one,) = found
    assert (one.advice, one.title) == ("smaller-model", "Use T4 instead of 1 H100")
    assert one.per_month == pytest.approx(3.5 * 730)
    assert "GPU-hour of T4 costs 0.50 USD" in " ".join(one.evidence)
    dear = ledger(paid(4.0, HOURS), paid(3.9, 1000, workload="x", model=T4))
    assert [one.advice for one in recommend([little, *fleet], dear) if one.owner.workload == "w"] == ["smaller-mig"]


@pytest.mark.parametrize(("per_hour", "currency"), [(5.0, "USD"), (0.5, "EUR")])
def test_smaller_model_at_a_higher_price_or_other_currency_has_no_saving(per_hour: float, currency: str) -> None:
    server = use(0, 0.1, peak_memory_bytes=9 * GB, policy="inference")
    other = use(1, 0.9, workload="x", model=T4, memory_total_bytes=16 * GB)
    book = ledger(paid(4.0, HOURS), paid(per_hour, 1000, currency=currency, workload="x", model=T4))
    (one,) = [one for one in recommend([server, other], book) if one.owner.workload == "w"]
    assert (one.title, one.per_month) == ("Use a smaller model instead of 1 H100", None)


def test_smaller_model_advice_without_known_prices_has_no_saving() -> None:
    (one,) = recommend(
        [use(0, 0.1, model="NVIDIA GH200 480GB", peak_memory_bytes=9 * GB, policy="inference")], ledger()
    )
    assert (one.advice, one.per_month, one.currency) == ("smaller-model", None, "")
    assert one.title == "Use a smaller model instead of 1 GH200"
    assert "no single price" in " ".join(one.evidence)


def test_saving_uses_the_mean_paid_price_of_one_currency() -> None:
    idle = use(0, 0.0)
    key, hour = paid(4.0, 100)
    half = Figures(
        seconds=ByState(unprofiled=720_000), unpriced_seconds=360_000, money={"USD": ByState(unprofiled=600.0)}
    )
    (one,) = recommend([idle], ledger((key, half)))
    assert one.per_month == pytest.approx(6.0 * 730)
    both = Figures(
        seconds=ByState(unprofiled=hour.seconds.active),
        money={"USD": ByState(unprofiled=10.0), "EUR": ByState(unprofiled=10.0)},
    )
    (one,) = recommend([idle], ledger((key, both)))
    assert (one.per_month, one.currency) == (None, "")
    free = Figures(seconds=ByState(unprofiled=3600.0), unpriced_seconds=3600.0)
    (one,) = recommend([idle], ledger((key, free), paid(9.0, 10, workload="other")))
    assert one.per_month is None


def test_pod_without_a_ledger_line_uses_the_price_of_its_model() -> None:
    pod = use(0, 0.0, kind="Pod", workload="p-0", team="")
    (one,) = recommend([pod], ledger(paid(3.0, 100, kind="", workload="", team="")))
    assert one.per_month == pytest.approx(3.0 * 730)


def test_most_expensive_advice_comes_first_and_unpriced_advice_last() -> None:
    uses = [
        use(0, 0.0, workload="cheap"),
        use(1, 0.0, workload="dear"),
        *(use(number, 0.0, workload="unknown", model=A100) for number in (2, 3)),
    ]
    book = ledger(paid(1.0, HOURS, workload="cheap"), paid(9.0, HOURS, workload="dear"))
    assert [one.owner.workload for one in recommend(uses, book)] == ["dear", "cheap", "unknown"]


@pytest.mark.parametrize(
    ("model", "memory", "current", "smallest", "largest"),
    [
        ("NVIDIA A100-SXM4-40GB", 42.9 * GB, "", "1g.5gb", "7g.40gb"),
        ("NVIDIA A100-SXM4-80GB", 85.9 * GB, "", "1g.10gb", "7g.80gb"),
        ("NVIDIA A100-SXM4-40GB", 10 * GB, "1g.10gb", "1g.5gb", "7g.40gb"),
        ("NVIDIA A100-SXM4-80GB", 10 * GB, "1g.10gb+me", "1g.10gb", "7g.80gb"),
        ("NVIDIA A30", 25.8 * GB, "", "1g.6gb", "4g.24gb"),
        ("NVIDIA H100 NVL", 100.5 * GB, "", "1g.12gb", "7g.94gb"),
        ("NVIDIA H200", 150.8 * GB, "", "1g.18gb", "7g.141gb"),
        ("NVIDIA B200", 192 * GB, "1c.3g.90gb", "1g.23gb", "7g.180gb"),
    ],
)
def test_profiles_match_the_model(model: str, memory: float, current: str, smallest: str, largest: str) -> None:
    found = profiles_of(model, memory, current)
    assert (found[0].name, found[-1].name) == (smallest, largest)
    assert found[-1].share_ratio == found[-1].compute_ratio == 1
    assert [one.memory_bytes for one in found] == sorted(one.memory_bytes for one in found)


@pytest.mark.parametrize(("model", "current"), [("NVIDIA A100", "1g.10gb"), ("NVIDIA H100", "1g.99gb"), (L40S, "")])
def test_unknown_profiles_are_empty(model: str, current: str) -> None:
    assert profiles_of(model, 40 * GB, current) == ()


RATIO = st.floats(0, 1)
USES = st.builds(
    lambda number, mean, p95, peak, share, held, covered, memory, model, workload, estimated, still: use(
        number,
        mean,
        p95_ratio=p95,
        peak_ratio=peak if covered else None,
        share_ratio=share,
        held_hours=held,
        measured_hours=held * covered,
        peak_memory_bytes=memory,
        model=model,
        workload=workload,
        estimated=estimated,
        still_held=still,
    ),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.001, 0.1, 0.3]),
    RATIO,
    st.sampled_from([0.0, 0.005, 0.2, 1.0]),
    st.sampled_from([1.0, 0.5, 0.25]),
    st.sampled_from([10.0, 30.0, HOURS]),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.one_of(st.none(), st.floats(0, 85 * GB)),
    st.sampled_from([H100, A100, L40S, T4]),
    st.sampled_from(["a", "b", "vllm"]),
    st.booleans(),
    st.booleans(),
)


@given(st.lists(USES, max_size=12, unique_by=lambda one: one.uuid), st.floats(0.01, 100))
def test_savings_never_exceed_device_cost_and_count_each_device_once(uses: list[HeldDevice], per_hour: float) -> None:
    found = advice_on(*uses, per_hour=per_hour)
    named = [device for one in found for device in one.devices]
    assert len(named) == len(set(named))
    for workload in {one.owner.workload for one in found}:
        # Advice for a smaller model has no figure if the fleet has no cheaper model.
        known = [one.per_month for one in found if one.owner.workload == workload and one.per_month is not None]
        cost = (
            sum(one.share_ratio for one in uses if one.owner.workload == workload and one.still_held) * per_hour * 730
        )
        assert all(saved > 0 for saved in known)
        assert sum(known) <= cost * (1 + 1e-9)


@given(st.lists(USES, max_size=12, unique_by=lambda one: one.uuid))
def test_estimated_or_hardly_measured_devices_get_no_advice(uses: list[HeldDevice]) -> None:
    named = {device for one in advice_on(*uses) for device in one.devices}
    for one in uses:
        if one.estimated or one.measured_hours < 0.9 * one.held_hours or one.held_hours < 24 or not one.still_held:
            assert one.uuid not in named


def busy_at(effective_ratio: float, profiled_ratio: float = 1.0) -> ByState:
    """Return a week that was active all the time."""
    effective = effective_ratio * profiled_ratio
    return ByState(effective=effective, ineffective=profiled_ratio - effective, unprofiled=1 - profiled_ratio)


STARVED = {"bottlenecks": {"starved": 0.97 * HOURS, "compute": 0.03 * HOURS}, **SMALL}


def test_starved_workload_is_sized_by_its_busiest_resource() -> None:
    held = use(0, 0.96, **STARVED)
    assert advice_on(held) == [], "without a profile the workload is only busy"
    (one,) = advice_on(held, parts=busy_at(0.09))
    assert (one.advice, one.title) == ("smaller-mig", "Move the H100 to a MIG instance 1g.20gb")
    assert one.gpus == pytest.approx(0.75)
    assert one.per_month == pytest.approx(4 * 730 * 0.75)
    assert one.risk_level == "medium"
    assert "SMs" in one.risk
    assert "SM_ACTIVE" in one.risk
    text = " ".join(one.evidence)
    assert "Mean use" not in text, "the mean use is not recorded"
    assert "96.0 % active on average" in text
    assert "at 9.0 % of its limit (100.0 % of the active time was profiled); in 97 % of that time nothing was" in text


RECORDED = {
    "compute": 0.03,
    "memory": 0.09,
    "transfer": 0.0,
    "video": 0.0,
    "profiled": 1.0,
    "sm": 0.07 * 0.95,
    "sm_profiled": 0.95,
}


def used(**changes: float) -> HeldDevice:
    """Return a starved workload with recorded use of resources, as parts of the profiled time."""
    return use(0, 0.96, **STARVED, resource_uses={name: ratio * HOURS for name, ratio in (RECORDED | changes).items()})


def test_evidence_lists_the_use_of_each_resource_limit() -> None:
    of_limits = (
        "arithmetic pipes 3.0 %, memory bandwidth 9.0 %, busiest of PCIe, NVLink and C2C 0.0 %, video engines 0.0 %"
    )
    (one,) = advice_on(used(), parts=busy_at(0.09))
    assert one.evidence[2] == f"Mean use of each limit while active: {of_limits}, SMs with work 7.0 %."
    assert (one.title, one.risk_level) == ("Move the H100 to a MIG instance 1g.20gb", "medium")
    assert "SM_ACTIVE" not in one.risk
    (without,) = advice_on(used(sm_profiled=0.8), parts=busy_at(0.09))
    assert without.evidence[2] == f"Mean use of each limit while active: {of_limits}."
    (unknown,) = advice_on(used(profiled=0.8, sm_profiled=0.8), parts=busy_at(0.09))
    assert len(unknown.evidence) == len(one.evidence) - 1, "the use was recorded for too short a time"


def test_starved_workload_with_busy_multiprocessors_keeps_its_gpu() -> None:
    (half,) = advice_on(used(sm=0.4 * 0.95), parts=busy_at(0.09))
    assert half.title == "Move the H100 to a MIG instance 4g.40gb"
    (full,) = advice_on(used(sm=0.9 * 0.95), parts=busy_at(0.09))
    assert (full.advice, full.gpus) == ("bottleneck", 0.0)


def test_a_starved_workload_without_mig_shares_or_takes_a_smaller_model() -> None:
    little = {"model": L40S, "memory_total_bytes": 48 * GB, "peak_memory_bytes": 8 * GB}
    (one,) = advice_on(use(0, 0.96, **{**STARVED, **little}), parts=busy_at(0.09))
    assert (one.advice, one.title, one.risk_level) == ("share", "Share the L40S among 4 such workloads", "high")
    big = {"model": "NVIDIA GH200 480GB", "peak_memory_bytes": 8 * GB, "policy": "inference"}
    (other,) = advice_on(use(0, 0.96, **{**STARVED, **big}), parts=busy_at(0.09))
    assert (other.advice, other.title) == ("smaller-model", "Use a smaller model instead of 1 GH200")


def of_class(name: str, ratio: float = 0.9, **more: object) -> HeldDevice:
    other = "compute" if name == "starved" else "starved"
    return use(0, 0.96, **{"bottlenecks": {name: ratio, other: 1 - ratio}, **more})


INFORMED: dict[str, tuple[HeldDevice, str, str]] = {
    "memory-bound": (
        of_class("memory"),
        "Try larger batches on the H100: active 96 %, at 60 % of its limit",
        "no waste",
    ),
    "link-bound": (of_class("transfer"), "Overlap transfers with compute on the H100", "NVLink, PCIe"),
    "starved, and full": (of_class("starved"), "Find what starves the H100", "it was starved"),
}


@pytest.mark.parametrize(("held", "title", "words"), INFORMED.values(), ids=INFORMED)
def test_bottleneck_of_a_busy_workload_is_information_without_saving(held: HeldDevice, title: str, words: str) -> None:
    (one,) = advice_on(held, parts=busy_at(0.6))
    assert (one.advice, one.gpus, one.per_month, one.command, one.risk_level) == ("bottleneck", 0, None, "", "low")
    assert one.title.startswith(title)
    assert words in " ".join(one.evidence)


UNINFORMED: dict[str, tuple[HeldDevice, ByState]] = {
    "compute-bound": (of_class("compute"), busy_at(0.6)),
    "video": (of_class("video"), busy_at(0.6)),
    "no class has half of the time": (
        use(0, 0.96, bottlenecks={"memory": 4, "transfer": 3, "starved": 3}),
        busy_at(0.6),
    ),
    "mostly idle": (use(0, 0.1, bottlenecks={"memory": 1.0}), busy_at(0.6)),
    "a tenth was not profiled": (of_class("memory"), busy_at(0.6, 0.89)),
    "nothing was profiled": (of_class("memory"), busy_at(0.6, 0.0)),
    "no class is known": (use(0, 0.96), busy_at(0.6)),
}


@pytest.mark.parametrize(("held", "parts"), UNINFORMED.values(), ids=UNINFORMED)
def test_bottleneck_advice_is_absent_in_exempt_cases(held: HeldDevice, parts: ByState) -> None:
    assert advice_on(of_class("memory"), parts=busy_at(0.6)) != []
    assert advice_on(held, parts=parts) == []


def test_unallocated_lines_set_a_model_price_but_are_no_workload() -> None:
    free = (
        LineKey(kind="Unallocated", model=H100),
        Figures(seconds=ByState(idle=36_000.0), money={"USD": ByState(unprofiled=50.0)}),
    )
    (one,) = recommend([use(0, 0.0, workload="new")], ledger(free))
    assert one.per_month == pytest.approx(5 * 730)
