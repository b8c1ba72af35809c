"""Figures of owners: GPUs by share, activity over windows, waste, policy, opt-out, money, pools."""

import json
import math
from dataclasses import replace

import pytest
from metering_support import DOLLARS, HOUR, MINUTE, STEP, TRAIN, OwnedNode, gpu, held, holder, instances_of, whole

from exporter.accounting.windows import Windows
from exporter.model.attribution import AllocationState, Owner, ShareMode
from exporter.model.devices import DeviceState
from exporter.model.ledger import WINDOWS, Bottleneck, ResourceProfile
from exporter.model.snapshot import Activity, ActivitySource, DeviceView, PodUse

ESTIMATED = ActivitySource.ESTIMATED


def sharer(pod: str, ratio: float | None, owner: Owner | None = TRAIN, *, parts: int = 4, **reported: object) -> object:
    return held(holder(pod, share=1 / parts, mode=ShareMode.SHARED), ratio, owner, **reported)  # type: ignore[arg-type]


def test_owner_figures_are_the_sum_of_its_holders() -> None:
    node = OwnedNode()
    node.until(
        HOUR,
        whole(held(holder("a"), 1.0)),
        whole(held(holder("b", "GPU-1"), 0.25), index=1),
    )
    use = node.use()
    assert use.gpus == 2.0
    assert use.active_gpus == 2.0
    assert use.measured_seconds["1h"] == pytest.approx(2 * HOUR)
    assert use.active_seconds["1h"] == pytest.approx(1.25 * HOUR)
    assert use.active_seconds["15m"] == pytest.approx(1.25 * 900)
    assert (use.estimated_gpus, use.underused_gpus, dict(use.unused_gpus)) == (None, None, {})


def test_profiled_seconds_are_counted_by_window_and_bottleneck() -> None:
    node = OwnedNode()
    memory = ResourceProfile((0.2, 0.6, 0.0, 0.0), Bottleneck.MEMORY)
    starved = ResourceProfile((0.05, 0.0, 0.01, 0.0), Bottleneck.STARVED, sm_ratio=0.3)

    def profiled(device: str, ratio: float, profile: ResourceProfile) -> PodUse:
        activity = Activity(ratio=ratio, source=ActivitySource.ENGINE, profile=profile)
        return replace(held(holder("a", device), ratio), activity=activity)

    def quarter(source: ActivitySource) -> DeviceView:
        return whole(held(holder("d", "GPU-3", share=0.25, mode=ShareMode.SHARED), 0.5, source=source), index=3)

    views = (
        whole(profiled("GPU-0", 0.8, memory)),
        whole(profiled("GPU-1", 0.5, starved), index=1),
        whole(held(holder("c", "GPU-2"), 1.0), index=2),
    )
    node.until(2 * HOUR, *views)
    use = node.use()
    assert use.active_seconds["1h"] == pytest.approx(2.3 * HOUR)
    assert dict(use.profiled_seconds) == pytest.approx({name: 1.3 * min(WINDOWS[name], 2 * HOUR) for name in WINDOWS})
    assert dict(use.effective_seconds) == pytest.approx({name: 0.65 * min(WINDOWS[name], 2 * HOUR) for name in WINDOWS})
    assert dict(use.bottleneck_seconds) == pytest.approx({"memory": 0.8 * HOUR, "starved": 0.5 * HOUR})
    uses = {"compute": 0.25, "memory": 0.6, "transfer": 0.01, "video": 0.0, "profiled": 1.3}
    with_sm = {**uses, "sm": 0.3, "sm_profiled": 0.5}
    assert dict(use.resource_use_seconds) == pytest.approx({name: gpus * HOUR for name, gpus in with_sm.items()})
    node.until(2 * HOUR + MINUTE, *views, quarter(ActivitySource.PROCESS_SAMPLES))
    assert dict(node.use().profiled_seconds), "a holder with measured activity is certain"
    node.until(2 * HOUR + 2 * MINUTE, *views, quarter(ESTIMATED))
    assert dict(node.use().profiled_seconds) == {}, "the estimated part cannot be separated"
    node.until(2 * HOUR + 3 * MINUTE)
    assert node.use().effective_seconds["24h"] == pytest.approx(0.65 * 2.05 * HOUR, rel=0.01), "ended holders count"


def test_cost_labels_do_not_split_an_owner() -> None:
    node = OwnedNode(prices={"GPU-0": DOLLARS, "GPU-1": DOLLARS})
    llm, vision = (replace(TRAIN, cost_labels=f"project={name}") for name in ("llm", "vision"))
    first = whole(held(holder("a"), 1.0, llm))
    node.until(HOUR, first, whole(held(holder("b", "GPU-1"), 1.0, vision), index=1))
    node.windows = Windows.load(json.loads(json.dumps(node.windows.dump())), node.now)
    node.until(HOUR + STEP, first)
    (use,) = node.view().owners
    assert (use.owner, use.gpus) == (TRAIN, 1.0)
    assert use.active_seconds["2h"] == pytest.approx(2 * HOUR + STEP)


def test_recreated_pods_cover_the_window_of_their_owner() -> None:
    node = OwnedNode()
    for number in range(8):
        node.until((number + 1) * 20 * MINUTE, whole(held(holder(f"job-{number}", uid=f"uid-{number}"), 0.0)))
    use = node.use()
    assert use.gpus == 1.0
    for window in ("15m", "30m", "1h", "2h"):
        assert use.measured_seconds[window] / WINDOWS[window] >= 0.9, window
    assert use.unused_gpus == {}, "its present pod is younger than any window"


def test_owner_without_devices_keeps_its_past_usage() -> None:
    node = OwnedNode()
    node.until(20 * MINUTE, whole(held(holder("a"), 1.0)))
    node.until(25 * MINUTE, whole())
    use = node.use()
    assert (use.gpus, use.policy, dict(use.cost_per_hour)) == (None, "", {})
    assert use.active_seconds["30m"] == pytest.approx(20 * MINUTE)
    node.until(3 * HOUR, whole())
    assert set(node.use().measured_seconds) == {"24h"}
    node.until(26 * HOUR, whole())
    assert node.view().owners == ()


def test_usage_of_an_unknown_owner_is_shown_for_the_pod_and_moves_later() -> None:
    node = OwnedNode()
    unknown = held(holder("a"), 1.0, None)
    node.until(10 * MINUTE, whole(unknown))
    pod = Owner(namespace="ml", kind="Pod", name="a")
    assert [use.owner for use in node.view().owners] == [pod]
    assert node.use(pod).active_seconds["15m"] == pytest.approx(10 * MINUTE)
    node.until(20 * MINUTE, whole(held(holder("a"), 1.0)))
    assert [use.owner for use in node.view().owners] == [TRAIN]
    assert node.use().active_seconds["30m"] == pytest.approx(20 * MINUTE)


def test_unmeasured_time_is_neither_active_nor_measured() -> None:
    node = OwnedNode()
    node.until(HOUR, whole(held(holder("a"), None), busy=None))
    use = node.use()
    assert use.gpus == 1.0
    assert set(use.measured_seconds.values()) == {0.0}
    assert (dict(use.active_seconds), use.active_gpus, use.underused_gpus) == ({}, None, None)


@pytest.mark.parametrize(
    ("busy_until", "low", "expected"),
    [
        (50 * MINUTE, 0.09, 1.0),  # below 10 % over 15 minutes
        (50 * MINUTE, 0.11, None),
        (0.0, 0.049, 1.0),
        (0.0, 0.12, None),
    ],
)
def test_low_device_activity_is_underused(busy_until: float, low: float, expected: float | None) -> None:
    node = OwnedNode()
    if busy_until:
        node.until(busy_until, whole(held(holder("a"), 1.0)))
    node.until(busy_until + 16 * MINUTE, whole(held(holder("a"), low)))
    assert node.use().underused_gpus == expected


def test_one_hour_below_5_percent_is_underused_despite_recent_activity() -> None:
    node = OwnedNode()
    node.until(50 * MINUTE, whole(held(holder("a"), 0.0)))
    node.until(HOUR, whole(held(holder("a"), 0.2)))
    assert node.use().underused_gpus == 1.0
    node.until(HOUR + 10 * MINUTE, whole(held(holder("a"), 0.2)))
    assert node.use().underused_gpus is None


def test_device_activity_is_judged_separately_from_a_busy_neighbour() -> None:
    node = OwnedNode()
    busy, idle = held(holder("a"), 1.0), held(holder("a", "GPU-1"), 0.0)
    node.until(2 * HOUR + MINUTE, whole(busy), whole(idle, index=1))
    use = node.use()
    assert (use.underused_gpus, use.active_gpus) == (1.0, 1.0)
    assert use.unused_gpus == {"30m": 1.0, "1h": 1.0, "2h": 1.0}


def test_unused_needs_nine_tenths_of_the_window_measured() -> None:
    node = OwnedNode()
    idle, unknown = whole(held(holder("a"), 0.0)), whole(held(holder("a"), None), busy=None)
    node.until(40 * MINUTE, idle)
    node.until(43.5 * MINUTE, unknown)
    assert node.use().unused_gpus == {}
    node.until(44 * MINUTE, idle)
    node.until(72 * MINUTE, idle)
    assert node.use().unused_gpus == {"30m": 1.0, "1h": 1.0}


def test_unused_window_tolerates_short_activity_only() -> None:
    for work, expected in ((0.2, True), (4.0, False)):
        node = OwnedNode()
        node.until(30 * MINUTE, whole(held(holder("a"), 0.0)))
        node.now += 30.0
        node.sample([whole(held(holder("a"), work / 30.0))])
        node.until(61 * MINUTE, whole(held(holder("a"), 0.0)))
        assert ("1h" in node.use().unused_gpus) is expected


def test_unused_day_uses_the_idle_clock() -> None:
    node = OwnedNode()
    node.until(HOUR, whole(held(holder("a"), 0.0, idle_for=86_399.0)))
    assert "24h" not in node.use().unused_gpus
    node.until(HOUR, whole(held(holder("a"), 0.0, idle_for=86_400.0)))
    assert node.use().unused_gpus["24h"] == 1.0


def test_mig_instances_count_with_their_share() -> None:
    board = gpu(0, mig=True)
    slices = instances_of(board, ("1g.10gb",) * 7)
    boarded = DeviceView(gpu=board, allocation=None)
    views = [boarded]
    for number, instance in enumerate(slices):
        owned = holder(f"nb-{number}", instance.uuid, share=1 / 7, of_device=1.0, mode=ShareMode.MIG)
        use = held(owned, 0.0 if number else 1.0)
        activity = Activity(ratio=0.0 if number else 1.0, source=ActivitySource.ENGINE)
        views.append(
            DeviceView(
                gpu=board,
                instance=instance,
                share_ratio=1 / 7,
                activity=activity,
                allocation=AllocationState.ALLOCATED,
                pods=(use,) if number < 3 else (),
            )
        )
    views = [
        replace(view, allocation=AllocationState.UNALLOCATED) if view.instance and not view.pods else view
        for view in views
    ]
    node = OwnedNode(prices={board.uuid: DOLLARS})
    node.until(HOUR, *views)
    use = node.use()
    assert use.gpus == pytest.approx(3 / 7)
    assert use.active_gpus == pytest.approx(1 / 7)
    assert use.unused_gpus["1h"] == pytest.approx(2 / 7)
    assert use.measured_seconds["1h"] == pytest.approx(3 / 7 * HOUR, abs=0.01)
    assert use.cost_per_hour == {"USD": pytest.approx(4 * 3 / 7)}
    assert use.idle_cost_per_hour == {"USD": pytest.approx(4 * 2 / 7)}
    (pool,) = node.view().pools
    assert (pool.gpus, pool.unallocated_gpus) == (1, pytest.approx(4 / 7))
    assert pool.unallocated_cost_per_hour == {"USD": pytest.approx(4 * 4 / 7)}


def test_busy_quarter_share_is_active() -> None:
    node = OwnedNode()
    node.until(HOUR, whole(*(sharer(pod, 0.25 if pod == "a" else 0.0) for pod in "abcd"), busy=0.25))  # type: ignore[arg-type]
    use = node.use()
    assert use.active_gpus == 0.25
    assert use.active_seconds["1h"] == pytest.approx(0.25 * HOUR)
    assert use.underused_gpus == 0.75


def test_estimated_shares_count_only_in_gpus_and_cost() -> None:
    node = OwnedNode(prices={"GPU-0": DOLLARS, "GPU-1": DOLLARS})
    shared = whole(sharer("a", 0.0, source=ESTIMATED, idle_for=9.0), sharer("b", 0.0, source=ESTIMATED))  # type: ignore[arg-type]
    node.until(HOUR, shared, whole(held(holder("c", "GPU-1"), 0.0, idle_for=5.0), index=1))
    use = node.use()
    assert (use.gpus, use.estimated_gpus) == (1.5, 0.5)
    assert use.measured_seconds["1h"] == pytest.approx(HOUR)
    assert (use.underused_gpus, use.unused_gpus["1h"], use.active_gpus) == (1.0, 1.0, 0.0)
    assert use.idle_for_seconds == 5.0
    assert use.cost_per_hour == {"USD": 6.0}
    assert use.idle_cost_per_hour == {"USD": 4.0}


def test_policy_is_the_most_patient_and_opt_out_the_latest_of_the_holders() -> None:
    node = OwnedNode()
    for classes, expected in (
        (("batch",), "batch"),
        (("", "batch"), "default"),
        (("interactive", ""), "interactive"),
        (("interactive", "inference"), "inference"),
        (("reserved", "inference"), "reserved"),
        (("no such class",), "default"),
    ):
        node.sample(
            [
                whole(held(holder(f"p-{one}", f"GPU-{number}"), 0.0, workload_class=one), index=number)
                for number, one in enumerate(classes)
            ]
        )
        assert node.use().policy == expected
    for times in ((None, 50.0, 80.0), (80.0, None, 50.0)):
        node.sample(
            [
                whole(
                    held(holder(f"p-{number}", f"GPU-{number}"), 0.0, off_until=until, age=number * 10.0), index=number
                )
                for number, until in enumerate(times)
            ]
        )
        assert node.use().opt_out_until_seconds == 80.0, times
        assert node.use().age_seconds == 20.0
    node.sample([whole(held(holder("p"), 0.0))])
    assert node.use().opt_out_until_seconds is None


def test_idle_time_is_that_of_the_most_recently_active_device() -> None:
    node = OwnedNode()
    node.sample(
        [
            whole(held(holder("a"), 0.0, idle_for=500.0)),
            whole(held(holder("a", "GPU-1"), 0.0, idle_for=70.0), index=1),
            whole(held(holder("a", "GPU-2"), None), index=2),
        ]
    )
    assert node.use().idle_for_seconds == 70.0


def test_cost_is_by_currency_and_absent_without_a_price() -> None:
    euros = replace(DOLLARS, currency="EUR", per_hour=3.0)
    node = OwnedNode(prices={"GPU-0": DOLLARS, "GPU-1": euros})
    node.until(HOUR, *(whole(held(holder("a", f"GPU-{number}"), 0.5), index=number) for number in range(3)))
    use = node.use()
    assert use.cost_per_hour == {"USD": 4.0, "EUR": 3.0}
    assert use.idle_cost_per_hour == {"USD": pytest.approx(2.0), "EUR": pytest.approx(1.5)}


def shared_node(hours: float = 2.05, ratio: float = 0.0, **reported: object) -> OwnedNode:
    node = OwnedNode()
    other = Owner(namespace="ml", kind="Deployment", name="chat")
    views = whole(sharer("a", ratio, source=ESTIMATED, **reported), sharer("b", ratio, other, source=ESTIMATED))  # type: ignore[arg-type]
    node.until(hours * HOUR, views)
    return node


def test_shared_device_idle_for_two_hours_is_shown_as_a_whole() -> None:
    (idle,) = shared_node().view().shared_idle
    assert (idle.gpu_index, idle.uuid, idle.gpu_instance, idle.gpus) == (0, "GPU-0", "", 0.5)


@pytest.mark.parametrize(
    "reported",
    [
        {"hours": 1.8},
        {"ratio": 0.02},  # of a quarter each
        {"workload_class": "inference"},
        {"workload_class": "reserved"},
        {"off_until": math.inf},
        {"off_until": 2.06 * HOUR},
    ],
    ids=["young", "at work", "inference", "reserved", "for good", "opted out"],
)
def test_exempt_or_active_shared_device_is_not_shown_as_idle(reported: dict[str, object]) -> None:
    assert shared_node(**reported).view().shared_idle == ()  # type: ignore[arg-type]


def test_expired_opt_out_does_not_mute_a_shared_device() -> None:
    assert shared_node(off_until=HOUR).view().shared_idle


def test_shared_device_of_a_system_namespace_is_not_shown_as_idle() -> None:
    node = OwnedNode()
    system = Owner(namespace="gpu-operator", kind="DaemonSet", name="validator")
    views = whole(sharer("a", 0.0, source=ESTIMATED), sharer("b", 0.0, system, source=ESTIMATED))  # type: ignore[arg-type]
    node.until(2.1 * HOUR, views)
    assert node.view().shared_idle == ()


def test_shared_device_with_measured_holders_is_not_judged_as_a_whole() -> None:
    node = OwnedNode()
    node.until(2.1 * HOUR, whole(sharer("a", 0.0), sharer("b", 0.0)))  # type: ignore[arg-type]
    assert node.view().shared_idle == ()
    assert node.use().unused_gpus["2h"] == 0.5


def test_work_in_the_previous_hour_keeps_a_shared_device_active() -> None:
    node = OwnedNode()
    busy = whole(sharer("a", 0.25, source=ESTIMATED), busy=0.25)  # type: ignore[arg-type]
    idle = whole(sharer("a", 0.0, source=ESTIMATED))  # type: ignore[arg-type]
    node.until(HOUR, idle)
    node.until(1.1 * HOUR, busy)
    node.until(2.3 * HOUR, idle)
    assert node.view().shared_idle == ()
    node.until(3.2 * HOUR, idle)
    assert node.view().shared_idle


def test_pools_count_lost_gpus_and_omit_unknown_values() -> None:
    node = OwnedNode(prices={f"GPU-{number}": DOLLARS for number in range(3)})
    lost = whole(index=1, busy=None, state=DeviceState.LOST)
    node.sample([whole(), lost, whole(held(holder("a", "GPU-2"), 0.0), index=2), whole(index=3, model="L4")])
    first, second = node.view().pools
    assert (first.gpus, first.unallocated_gpus, first.unallocated_cost_per_hour) == (3, 2.0, {"USD": 8.0})
    assert (second.model, second.gpus, second.unallocated_gpus, second.unallocated_cost_per_hour) == ("L4", 1, 1.0, {})
    assert (first.unpriced_gpus, second.unpriced_gpus) == (0, 1)
    node.sample([whole(known=False)])
    (pool,) = node.view().pools
    assert (pool.gpus, pool.unallocated_gpus, pool.unallocated_cost_per_hour) == (1, None, {})


def test_measured_seconds_of_a_holder_do_not_count_while_it_is_estimated() -> None:
    node = OwnedNode()
    measured = whole(held(holder("c", "GPU-1"), 0.0), index=1)
    node.until(HOUR, whole(sharer("a", 0.25)), measured)  # type: ignore[arg-type]
    assert node.use().active_seconds["1h"] == pytest.approx(0.25 * HOUR)
    node.until(1.1 * HOUR, whole(sharer("a", 0.25, source=ESTIMATED)), measured)  # type: ignore[arg-type]
    use = node.use()
    assert (use.active_seconds["1h"], use.active_seconds["24h"]) == (0.0, 0.0)
    assert use.measured_seconds["1h"] == pytest.approx(HOUR)
    node.until(1.5 * HOUR, whole(sharer("a", 0.25)), measured)  # type: ignore[arg-type]
    assert node.use().active_seconds["15m"] == pytest.approx(0.25 * 900)


def test_owner_with_only_estimated_shares_has_no_windows() -> None:
    node = OwnedNode()
    node.until(HOUR, whole(sharer("a", 0.1, source=ESTIMATED)))  # type: ignore[arg-type]
    use = node.use()
    assert (use.gpus, use.estimated_gpus, dict(use.measured_seconds), dict(use.active_seconds)) == (0.25, 0.25, {}, {})
