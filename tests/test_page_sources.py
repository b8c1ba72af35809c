"""Page and readiness with two sources: the working one, the failed one, and the reason for missing DCGM profiling."""

from dataclasses import replace

import page_support as made
import pytest

from exporter.model.devices import ProfilingState, SourceState, SourceStatus
from exporter.model.snapshot import Activity, ActivitySource, DeviceView, Snapshot

UP = SourceStatus(name="nvml", state=SourceState.UP)
DCGM = SourceStatus(name="dcgm", state=SourceState.UP)
DOWN = replace(DCGM, state=SourceState.FAILED, reason="refused", message="nobody listens at <gpu-1:5555>")


def snapshot(*views: DeviceView, sources: tuple[SourceStatus, ...] = (UP, DCGM), **facts: object) -> Snapshot:
    return made.snapshot(*views, sources=sources, **facts)


def unmeasured(index: int, state: ProfilingState) -> DeviceView:
    return replace(made.view(index, None), profiling=state, activity_unknown_reason="no_source")


def test_both_sources_and_the_dcgm_version_are_shown_at_the_top() -> None:
    shown = made.fragment(snapshot(made.view(0), reading={"dcgm_version": "4.6.0"}))
    assert "nvml up" in shown
    assert "dcgm up" in shown
    assert "DCGM 4.6.0" in shown
    assert 'class="problem"' not in shown


def test_failed_source_is_shown_with_the_remaining_source() -> None:
    shown = made.fragment(snapshot(made.view(0), sources=(UP, DOWN), ready=True))
    assert '<span class="chip idle">dcgm failed</span>' in shown
    assert "nobody listens at &lt;gpu-1:5555&gt; (meanwhile NVML measures alone)" in shown
    alone = made.fragment(snapshot(made.view(0), sources=(DOWN,), ready=False))
    assert '<span class="chip bad">dcgm failed</span>' in alone
    assert "meanwhile" not in alone


def test_measuring_source_is_shown_if_it_is_not_nvml() -> None:
    by_dcgm = Activity(ratio=0.4, source=ActivitySource.ENGINE, measured_by="dcgm")
    shown = made.fragment(snapshot(replace(made.view(0), activity=by_dcgm)))
    assert "measured by DCGM" in shown
    assert "measured by DCGM" not in made.fragment(snapshot(made.view(0, 0.4)))


@pytest.mark.parametrize(
    ("state", "fix"),
    [
        (ProfilingState.PAUSED, "dcgmi profile --resume"),
        (ProfilingState.NO_MODULE, "full package of DCGM"),
        (ProfilingState.NO_PERMISSION, "CAP_SYS_ADMIN"),
        (ProfilingState.REFUSED, "end the profiler"),
    ],
)
def test_missing_profiling_is_one_line_with_its_gpus_and_a_fix(state: ProfilingState, fix: str) -> None:
    views = [unmeasured(0, state), unmeasured(2, state), unmeasured(3, ProfilingState.RUNNING)]
    shown = made.fragment(snapshot(*views))
    assert shown.count('class="problem"') == 1
    assert "GPU 0, 2 lacks" in shown
    assert fix in shown


def test_unneeded_or_unsupported_profiling_is_no_problem() -> None:
    by_nvml = replace(made.view(0, 0.4), profiling=ProfilingState.PAUSED)
    no_model = unmeasured(1, ProfilingState.UNSUPPORTED)
    assert 'class="problem"' not in made.fragment(snapshot(by_nvml, no_model))
