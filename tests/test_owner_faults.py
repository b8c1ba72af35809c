"""Owners of broken GPUs, and of programs that caused errors."""

from dataclasses import replace

import pytest
from metering_support import MINUTE, TRAIN, gpu, held, holder, instances_of, whole

from exporter.accounting.owner_figures import HELD_SECONDS, HOLDERS_LIMIT, OwnerFaults
from exporter.model.attribution import Owner
from exporter.model.devices import DeviceState, XidTier, xid_tier
from exporter.model.fields import Field
from exporter.model.ledger import OwnersView
from exporter.model.snapshot import DeviceView

OTHER = Owner(namespace="ml", kind="Job", name="other", team="nlp")
WALL = 1_000_000.0
"""Unix time at 0 of the monotonic clock."""


def faults_of(faults: OwnerFaults, steady: float, *views: DeviceView) -> OwnersView:
    return faults.add_to(OwnersView(), views, now=WALL + steady, steady=steady)


def with_xid(view: DeviceView, xid: int, at: float = 0.0) -> DeviceView:
    return replace(view, xid_last_seen_seconds={xid: WALL + at})


TRAINED = whole(held(holder("a"), 1.0), values={Field.ECC_DBE_VOL_TOTAL: 4, Field.GPU_RECOVERY_ACTION: 0})


def telling(**values: float) -> DeviceView:
    return replace(TRAINED, values={**TRAINED.values, **{Field[name]: value for name, value in values.items()}})


@pytest.mark.parametrize(
    ("view", "broken"),
    [
        (TRAINED, False),
        (replace(TRAINED, state=DeviceState.LOST), True),
        (replace(TRAINED, state=DeviceState.RESET_REQUIRED), True),
        (replace(TRAINED, state=DeviceState.UNKNOWN), False),
        (telling(ROW_REMAP_FAILURE=1), True),
        (telling(ROW_REMAP_PENDING=1), False),
        (telling(GPU_RECOVERY_ACTION=1), True),
        (telling(GPU_RECOVERY_ACTION=4), False),
        (with_xid(TRAINED, 79), True),
        (with_xid(TRAINED, 31), False),
        (with_xid(TRAINED, 94), False),
    ],
)
def test_gpu_with_a_critical_fault_is_a_broken_gpu_of_its_owner(view: DeviceView, *, broken: bool) -> None:
    beside = whole(held(holder("b", "GPU-1"), 0.0, OTHER), index=1)
    assert faults_of(OwnerFaults(), 1.0, view, beside).broken_gpus == ({TRAIN: 1} if broken else {})


def test_error_events_mark_a_gpu_broken_for_the_duration_of_their_alert() -> None:
    faults = OwnerFaults()
    assert faults_of(faults, 0.0, TRAINED).broken_gpus == {}, "errors from before the start are old"
    grown = telling(ECC_DBE_VOL_TOTAL=5)
    for minute, broken in ((1, True), (45, True), (47, False)):
        assert bool(faults_of(faults, minute * MINUTE, grown).broken_gpus) is broken
    fewer = telling(ECC_DBE_VOL_TOTAL=0)
    assert faults_of(faults, 50 * MINUTE, fewer).broken_gpus == {}, "the driver was reloaded"
    fallen = with_xid(fewer, 79, at=50 * MINUTE)
    for minute, broken in ((51, True), (89, True), (91, False)):
        assert bool(faults_of(faults, minute * MINUTE, fallen).broken_gpus) is broken


def test_last_owner_keeps_a_broken_gpu_for_one_hour() -> None:
    faults = OwnerFaults()
    faults_of(faults, 0.0, TRAINED)
    dead = whole(state=DeviceState.LOST)
    assert faults_of(faults, HELD_SECONDS, dead).broken_gpus == {TRAIN: 1}
    assert faults_of(faults, HELD_SECONDS + 1, dead).broken_gpus == {}


def test_owner_counts_each_board_once_and_an_instance_as_its_board() -> None:
    board = gpu(2, mig=True)
    first, second = instances_of(board, ("3g.40gb", "3g.40gb"))
    views = (
        whole(held(holder("a"), 1.0), held(holder("b"), 1.0), state=DeviceState.LOST),
        whole(held(holder("c", "GPU-1"), 1.0), index=1, state=DeviceState.FAILED),
        DeviceView(gpu=board, allocation=None),
        with_xid(DeviceView(gpu=board, instance=first, pods=(held(holder("d", first.uuid), 1.0, OTHER),)), 95),
        DeviceView(gpu=board, instance=second, pods=(held(holder("e", second.uuid), 1.0),)),
    )
    assert faults_of(OwnerFaults(), 0.0, *views).broken_gpus == {TRAIN: 3, OTHER: 1}


def test_application_xid_is_shown_for_ten_minutes_with_every_holder() -> None:
    faults = OwnerFaults()
    faults_of(faults, 0.0, whole(held(holder("a"), 1.0), held(holder("b"), 1.0, OTHER)))
    erred = with_xid(whole(held(holder("b"), 1.0, OTHER)), 31, at=60.0)
    beside = whole(held(holder("c", "GPU-1"), 1.0), index=1)
    shown = faults_of(faults, 61.0, erred, beside).xids
    assert [(one.owner, one.pod, one.device_uuid, one.xid, one.at_seconds) for one in shown] == [
        (TRAIN, "a", "GPU-0", 31, WALL + 60.0),
        (OTHER, "b", "GPU-0", 31, WALL + 60.0),
    ]
    assert [one.pod for one in faults_of(faults, 601.0, erred).xids] == ["b"]
    assert faults_of(faults, 660.0, erred).xids == ()


def test_pod_with_a_late_owner_is_shown_with_that_owner() -> None:
    faults = OwnerFaults()
    (before,) = faults_of(faults, 1.0, with_xid(whole(held(holder("a"), 1.0, None)), 13)).xids
    assert before.owner == Owner(namespace="ml", kind="Pod", name="a")
    (after,) = faults_of(faults, 2.0, with_xid(whole(held(holder("a"), 1.0)), 13)).xids
    assert after.owner == TRAIN


def test_remembered_holders_are_limited() -> None:
    faults = OwnerFaults()
    for number in range(2 * HOLDERS_LIMIT):
        faults_of(faults, number / HOLDERS_LIMIT, whole(held(holder(f"pod-{number}"), 1.0)))
    dead = whole(state=DeviceState.LOST)
    assert faults_of(faults, 3.0, dead).broken_gpus == {TRAIN: 1}
    assert len(faults._held) == HOLDERS_LIMIT


def test_xid_154_has_no_tier_if_the_gpu_reports_its_recovery_action() -> None:
    assert xid_tier(154) is XidTier.WARNING
    assert xid_tier(154, tells_action=True) is XidTier.NONE
    assert xid_tier(999, tells_action=True) is XidTier.WARNING
