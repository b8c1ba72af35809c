"""For all declared parts, the pods of a scenario together never have more than the GPU."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.errors import ConfigError
from gpu_simulator import scenario, scenario_file
from gpu_simulator.truth import NodeTruth

WHOLE_MIB = 46068

PARTS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(100, WHOLE_MIB // 2),
        st.integers(0, 60),
        st.sampled_from([0.0, 10.0, 25.0]),
        st.sampled_from([None, 30.0, 45.0]),
    ),
    min_size=1,
    max_size=6,
)


def text_of(ids: str, parts: list[tuple[int, int, int, float, float | None]]) -> str:
    lines = ["node: n1", f"plugin: {{ids: {ids}}}"]
    lines += ["gpus: [{model: l40s, count: 2, sharing: {strategy: fraction}}]", "pods:"]
    for number, (gpu, memory_mib, cores, start, end) in enumerate(parts):
        limits = {"kai": f"fraction: {memory_mib / WHOLE_MIB:.6f}", "dra": f"memory_mib: {memory_mib}"}
        part = limits.get(ids, f"memory_mib: {memory_mib}, cores: {cores}")
        lines.append(f"  - {{namespace: a, name: p{number}, start: {start}, devices: [{{gpu: {gpu}, {part}}}],")
        lines.append(f"     activity: 0.5{'' if end is None else f', end: {end}'}}}")
    return "\n".join(lines) + "\n"


def sums(truth: NodeTruth) -> dict[str, float]:
    summed: dict[str, float] = defaultdict(float)
    for holder in truth.holders:
        summed[holder.device_uuid] += holder.share_ratio
    return summed


@pytest.mark.parametrize("ids", ["hami", "volcano-vgpu", "kai", "dra"])
@settings(max_examples=25)
@given(PARTS)
def test_declared_shares_of_a_gpu_never_sum_to_more_than_the_gpu(
    ids: str, parts: list[tuple[int, int, int, float, float | None]]
) -> None:
    try:
        loaded = scenario.build(scenario_file.parse(text_of(ids, parts), "s.yaml"))
    except ConfigError as error:
        assert all("in use at the same time" in problem for problem in error.problems)  # noqa: PT017 - more than fits
        return
    for t in (0.0, 10.0, 26.0, 40.0, 60.0):
        truth = loaded.at(t)
        assert all(total <= 1 + 1e-12 for total in sums(truth).values())
        there = [n for n, (_, _, _, start, end) in enumerate(parts) if start <= t and (end is None or t < end)]
        assert sorted(holder.pod for holder in truth.holders) == sorted(f"p{number}" for number in there)
