"""For all reports of kubelet and API: every GPU-second has a possible owner, and counts once."""

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from join_support import GPU_MIB, join
from metering_support import plain_viewer
from test_join_evidence import CONTAINERS, GPUS, INSTANCES, evidences

from exporter.accounting.meter import Meter
from exporter.attribution.pod_lifecycle import Evidence
from exporter.attribution.processes import PodLookup
from exporter.model.attribution import UNALLOCATED, UNATTRIBUTED, ContainerAllocation, Holder, Owner
from exporter.model.devices import GpuReading, MigReading, Reading
from exporter.model.fields import Field

NOWHERE = Path("/nonexistent")
STEPS = st.lists(
    st.tuples(CONTAINERS, evidences(), st.sampled_from([0.5, 1.0, 7.0]), st.sampled_from([None, 0, 40, 100])),
    min_size=2,
    max_size=5,
)


def pod_of(holder: Holder) -> Owner:
    return Owner(namespace=holder.namespace, kind="Pod", name=holder.pod)


def sample(utilisation: int | None, at: float) -> Reading:
    values = {Field.FB_USED: GPU_MIB // 2} | ({} if utilisation is None else {Field.GPU_UTIL: utilisation})
    gpus = tuple(
        GpuReading(
            gpu=gpu,
            values=values,
            instances=tuple(MigReading(instance=one) for one in INSTANCES if one.parent_uuid == gpu.uuid),
        )
        for gpu in GPUS
    )
    return Reading(source="nvml", taken_at_seconds=at, duration_seconds=0.01, gpus=gpus)


@given(STEPS)
def test_metering_charges_every_second_to_a_listed_holder(
    steps: list[tuple[list[ContainerAllocation], Evidence, float, int | None]],
) -> None:
    viewer = plain_viewer(PodLookup(NOWHERE, NOWHERE))
    meter = Meter(1.0, pod_of)
    at = 1_000_000.0
    listed: set[tuple[str, str]] = set()
    for number, (containers, evidence, interval, utilisation) in enumerate(steps):
        at += interval
        attribution = join(containers, GPUS, INSTANCES, evidence=evidence)
        views = viewer.views(sample(utilisation, at), attribution, {}, at)
        portions = meter.add(views, at)
        gone = evidence.ended | ({evidence.own_pod} if evidence.own_pod else set())
        listed = {(one.namespace, one.pod) for one in containers} | set(evidence.pods or {}) - gone
        seconds: dict[str, float] = defaultdict(float)
        for portion in portions:
            total = portion.seconds.active + portion.seconds.idle + portion.seconds.unknown
            assert min(portion.seconds.active, portion.seconds.idle, portion.seconds.unknown) >= 0
            seconds[portion.gpu_uuid] += total
            owner = portion.account.owner
            assert owner in (UNALLOCATED, UNATTRIBUTED) or (owner.namespace, owner.name) in listed - gone
        if number:
            assert seconds == {gpu.uuid: pytest.approx(interval, rel=1e-9) for gpu in GPUS}
