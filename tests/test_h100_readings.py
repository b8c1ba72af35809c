"""Readings of a real H100 under known kernels: activity, effective part and bottleneck agree with the work done."""

from pathlib import Path
from typing import Any

import pytest
from files_support import read_yaml

from exporter.accounting.activity import ActivityJudge, Judgement, Observation
from exporter.model.fields import Field

RECORDED: dict[str, Any] = read_yaml((Path(__file__).parent / "fixtures" / "h100-kernels.yaml").read_text("utf-8"))
KERNELS: dict[str, dict[str, Any]] = RECORDED["kernels"]
IDLE_BELOW = 0.05
SECONDS = 180


def judged(kernel: str, **other: float) -> Judgement:
    """Judge three minutes of the kernel's readings: a contradiction takes a minute to appear."""
    recorded = {**dict.fromkeys(RECORDED["zeros"], 0.0), **RECORDED["board"], **KERNELS[kernel]["values"], **other}
    values = {Field(one) if isinstance(one, int) else Field[one]: value for one, value in recorded.items()}
    judge = ActivityJudge()
    for second in range(SECONDS):
        sample = Observation(
            uuid="GPU-1",
            at_seconds=float(second),
            values=values,
            model=RECORDED["model"],
            process_count=1,
        )
        judgement = judge.judge(sample, idle_below=IDLE_BELOW)
    assert not judge.errors
    return judgement


@pytest.mark.parametrize("kernel", [name for name, one in KERNELS.items() if "work" in one])
def test_effective_ratio_is_at_least_the_work_done(kernel: str) -> None:
    activity = judged(kernel).activity
    assert activity is not None
    assert activity.profile is not None
    # Half a percent of tolerance for the clocks of the program and the driver.
    assert KERNELS[kernel]["work"] - 0.005 <= activity.profile.effective_ratio <= activity.ratio


@pytest.mark.parametrize("kernel", [name for name, one in KERNELS.items() if one["bottleneck"]])
def test_bottleneck_matches_the_kernel(kernel: str) -> None:
    activity = judged(kernel).activity
    assert activity is not None
    assert activity.profile is not None
    assert activity.profile.bottleneck == KERNELS[kernel]["bottleneck"]


@pytest.mark.parametrize(
    ("kernel", "least", "most"),
    [
        ("h2d", 0.87, 1.0),
        ("d2h", 0.87, 1.0),
        ("pageable_h2d", 0.1, 0.2),
        ("loader", 0.05, 0.06),
        ("gemm_bf16", 0.98, 1),
    ],
)
def test_copies_are_activity_without_the_engine_counter(kernel: str, least: float, most: float) -> None:
    activity = judged(kernel).activity
    assert activity is not None
    assert least <= activity.ratio <= most


def test_context_without_work_is_idle() -> None:
    activity = judged("idle").activity
    assert activity is not None
    assert activity.ratio < 0.001


def test_utilisation_without_engine_or_traffic_is_unknown() -> None:
    values = {"GPU_UTIL": 99, "PROF_PCIE_RX_BYTES": 1e6, "PROF_PCIE_TX_BYTES": 1e6}
    with pytest.raises(AssertionError, match="contradiction"):
        judged("idle", **values)
