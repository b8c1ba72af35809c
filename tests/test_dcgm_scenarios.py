"""Every kind of node through NVML, through DCGM and through both: the same series from each source that has them."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from page_support import duplicate_series, samples_of
from pipeline_support import pipeline
from test_golden_scenarios import GOLDEN, pages

from exporter.metrics import collectors_file
from exporter.metrics.collector import ExpositionOptions, families
from exporter.metrics.dcgm_names import TABLE
from exporter.model.devices import Reading
from exporter.model.fields import Field
from gpu_simulator import scenario
from gpu_simulator.truth import GpuTruth, MigTruth, NodeTruth

INSTANT_SECONDS = 100.0
STEPS = 9
EVERYTHING = collectors_file.parse("\n".join(f"{row.legacy_name}, {row.kind.value}, x" for row in TABLE), "all.csv")
"""Every field with a name here, so that the comparison exceeds the default ones."""

NODES = [name for name in scenario.shipped() if name not in {"dra", "kai", "owners", "volcano-vgpu"}]
"""Scenarios with different devices; the others differ in the reports of kubelet and API only."""

Series = tuple[str, frozenset[tuple[str, str]]]

NOT_BY_DCGM = {
    "gpu_nvlink_transmit_bytes_total": "DCGM reports rates over NVLink, no sums",
    "gpu_nvlink_receive_bytes_total": "as above",
    "gpu_unattributed_processes": "DCGM lists no processes",
    "gpu_unattributed_memory_used_bytes": "as above",
}
NOT_BY_NVML = {"gpu_profiling_state": "NVML has no profiling that could be refused"}
PER_INSTANCE_BY_DCGM = {
    "DCGM_FI_DEV_BAR1_TOTAL": "NVML is asked for it once per board; DCGM tells it of every instance",
    "DCGM_FI_DEV_BAR1_USED": "as above",
    "DCGM_FI_DEV_BAR1_FREE": "as above",
}
SPLIT_BY_PROCESSES = {
    "DCGM_FI_DEV_GPU_UTIL": "on a shared device a pod's part is known by its processes, which only NVML lists",
    "DCGM_FI_DEV_FB_USED": "as above",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "as above",
}
PROFILED = ("gpu_activity_ratio", "gpu_effective_ratio", "gpu_bottleneck")
NOT_OF_DEVICES = ("gpu_exporter_", "gpu_pod_", "gpu_owner_", "gpu_ledger_", "gpu_unattributed_activity_ratio")
"""Series of the program, or series that depend on the holders of a device and on the processes of these."""


@dataclass(frozen=True)
class Seen:
    """Results of one source for a scenario at the instant."""

    series: Mapping[Series, float]
    reading: Reading
    truth: NodeTruth


_SEEN: dict[tuple[str, str], Seen] = {}


async def seen(name: str, source: str, directory: Path) -> Seen:
    if (name, source) not in _SEEN:
        (directory / source).mkdir()
        # The first sample is at the start: both sources read slow fields at the same instant.
        start = INSTANT_SECONDS - STEPS + 1
        loaded = scenario.load(name)
        async with pipeline(
            loaded, directory / source, start=start, collectors=EVERYTHING, with_api=name == "owners", source=source
        ) as node:
            snapshot = await node.until(INSTANT_SECONDS, steps=STEPS)
            reading = node.node.record.newest
        assert reading is not None
        shown = families(snapshot, ExpositionOptions(collectors=EVERYTHING))
        assert duplicate_series(shown) == []
        series = {
            (family.name, frozenset(pair for pair in sample.pairs if pair[0] != "measured_by")): sample.value
            for family in shown
            for sample in samples_of(family)
        }
        _SEEN[name, source] = Seen(series, reading, loaded.at(INSTANT_SECONDS))
    return _SEEN[name, source]


def before_hopper(truth: NodeTruth) -> frozenset[str]:
    """Return the UUIDs of devices without engine counters in NVML."""
    return frozenset(
        uuid
        for gpu in truth.gpus
        if not gpu.model.gpm
        for uuid in (gpu.uuid, *(instance.uuid for instance in gpu.instances))
    )


def shared_pods(truth: NodeTruth) -> frozenset[str]:
    """Return the pods that share their device, or may share it."""
    devices = [holder.device_uuid for holder in truth.holders]
    return frozenset(
        holder.pod
        for holder in truth.holders
        if devices.count(holder.device_uuid) > 1 or (holder.share_ratio < 1 and holder.device_uuid.startswith("GPU-"))
    )


def unexplained(one: Seen, other: Seen, reasons: Mapping[str, str]) -> Iterator[Series]:
    """Yield the series of the first source only, without a reason above."""
    blind, shared = before_hopper(one.truth), shared_pods(one.truth)
    for name, labels in sorted(one.series.keys() - other.series.keys(), key=str):
        found_labels = dict(labels)
        device = found_labels.get("uuid") or found_labels.get("UUID")
        if name.startswith(NOT_OF_DEVICES) or name in reasons:
            continue
        if name in SPLIT_BY_PROCESSES and found_labels.get("pod") in shared:
            continue
        if device in blind and name.startswith((*PROFILED, "DCGM_FI_PROF_")):
            continue
        yield name, labels


def different(one: Seen, other: Seen) -> list[tuple[Series, float, float]]:
    """Return the series of both with different values."""
    return [
        (key, one.series[key], other.series[key])
        for key in sorted(one.series.keys() & other.series.keys(), key=str)
        if not key[0].startswith(NOT_OF_DEVICES)
        and one.series[key] != pytest.approx(other.series[key], rel=1e-9, abs=1e-9)
    ]


@pytest.mark.parametrize("name", NODES)
async def test_dcgm_alone_gives_the_same_series_as_nvml_alone(name: str, tmp_path: Path) -> None:
    nvml, dcgm = await seen(name, "nvml", tmp_path), await seen(name, "dcgm", tmp_path)
    assert different(nvml, dcgm) == []
    assert list(unexplained(nvml, dcgm, NOT_BY_DCGM | PER_INSTANCE_BY_DCGM)) == []
    assert list(unexplained(dcgm, nvml, NOT_BY_NVML | PER_INSTANCE_BY_DCGM)) == []


@pytest.mark.parametrize("name", NODES)
async def test_dcgm_with_nvml_adds_only_series_that_nvml_lacks(name: str, tmp_path: Path) -> None:
    nvml, both = await seen(name, "nvml", tmp_path), await seen(name, "auto", tmp_path)
    assert different(nvml, both) == []
    assert list(unexplained(nvml, both, {})) == []
    assert list(unexplained(both, nvml, NOT_BY_NVML)) == []


@pytest.mark.parametrize("name", NODES)
async def test_gpus_and_instances_have_the_same_identity_through_either_source(name: str, tmp_path: Path) -> None:
    nvml, dcgm = [await seen(name, source, tmp_path) for source in ("nvml", "dcgm")]
    assert [gpu.gpu for gpu in dcgm.reading.gpus] == [gpu.gpu for gpu in nvml.reading.gpus]
    assert [gpu.state for gpu in dcgm.reading.gpus] == [gpu.state for gpu in nvml.reading.gpus]
    for ours, theirs in zip(nvml.reading.gpus, dcgm.reading.gpus, strict=True):
        # DCGM has the placement only in a field of raw bytes.
        wanted = [replace(part.instance, placement_start=None) for part in ours.instances]
        assert [part.instance for part in theirs.instances] == wanted


@pytest.mark.parametrize("name", ["owners", "capture-h100", "capture-h100-mig"])
async def test_ledger_is_the_same_through_either_source_without_sharing(name: str, tmp_path: Path) -> None:
    nvml, dcgm = [await seen(name, source, tmp_path) for source in ("nvml", "dcgm")]
    ledgers = [
        {key: value for key, value in one.series.items() if key[0].startswith(("gpu_ledger_", "gpu_pod_"))}
        for one in (nvml, dcgm)
    ]
    assert ledgers[0].keys() == ledgers[1].keys()
    assert ledgers[0] == pytest.approx(ledgers[1], rel=1e-9, abs=1e-9)
    assert name != "owners" or len(ledgers[0]) > 100


@dataclass(frozen=True)
class Means:
    """True engine activity of a device over the last second before the instant."""

    gpu: GpuTruth
    device: GpuTruth | MigTruth
    engine: float


def means(name: str) -> Iterator[Means]:
    loaded = scenario.load(name)
    before, now = loaded.at(INSTANT_SECONDS - 1), loaded.at(INSTANT_SECONDS)
    for old, gpu in zip(before.gpus, now.gpus, strict=True):
        pairs: list[tuple[GpuTruth | MigTruth, GpuTruth | MigTruth]] = [(old, gpu)]
        pairs += zip(old.instances, gpu.instances, strict=True)
        for earlier, device in pairs:
            yield Means(gpu, device, device.load_integral.engine - earlier.load_integral.engine)


async def test_a100_instance_activity_is_unknown_to_nvml_and_measured_by_dcgm(tmp_path: Path) -> None:
    nvml, dcgm, both = [await seen("a100-mig", source, tmp_path) for source in ("nvml", "dcgm", "auto")]
    instances = [one for one in means("a100-mig") if isinstance(one.device, MigTruth)]
    assert len(instances) == 4
    assert max(one.engine for one in instances) > 0.5
    for one in instances:
        key = "gpu_activity_ratio", one.device.uuid
        assert [value for _, value in _of(nvml, *key)] == []
        for source in (dcgm, both):
            assert [value for _, value in _of(source, *key)] == [pytest.approx(one.engine, abs=1e-6)]
    assert not [key for key in nvml.series if key[0].startswith("DCGM_FI_PROF_")]


def _of(source: Seen, name: str, uuid: str) -> list[tuple[Series, float]]:
    return [(key, value) for key, value in source.series.items() if key[0] == name and ("uuid", uuid) in key[1]]


@pytest.mark.parametrize("name", NODES)
async def test_dcgm_engine_activity_matches_the_scenario(name: str, tmp_path: Path) -> None:
    found = await seen(name, "dcgm", tmp_path)
    found_labels = {gpu.gpu.uuid: gpu.values for gpu in found.reading.gpus}
    found_labels |= {part.instance.uuid: part.values for gpu in found.reading.gpus for part in gpu.instances}
    for one in means(name):
        wanted = one.gpu.overrides.get(Field.PROF_GR_ENGINE_ACTIVE) if one.device is one.gpu else None
        expected = one.engine if wanted is None else wanted
        assert found_labels[one.device.uuid][Field.PROF_GR_ENGINE_ACTIVE] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("name", "source"), [("a100-mig", "auto"), ("demo", "dcgm")])
async def test_page_with_dcgm_matches_the_golden_file(name: str, source: str, tmp_path: Path) -> None:
    text, _ = await pages(name, tmp_path, source=source)
    golden = GOLDEN / f"dcgm_{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text)
    got, wanted = text.splitlines(), golden.read_text().splitlines()
    assert got == wanted, "the page has changed; after an intended change: make golden, and review the difference"
