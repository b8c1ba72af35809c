"""GPM, the performance monitoring of Hopper and later: sample buffers and the metrics between two of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from exporter.model import DECODERS, FLOW_ENGINES, JPEG_DECODERS, Field
from gpu_simulator.driver_core import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    NOT_SUPPORTED,
    Calls,
    CArgument,
    GpmSample,
    Refused,
    Session,
    Target,
    address,
    check_version,
    out,
    plain,
    put_pointer,
)
from gpu_simulator.driver_mig import slices_of
from gpu_simulator.truth import Load, MigTruth

CALLS = Calls()

_VERSION = 1
_METRIC_MAX = 477
_SHORTEST_SECONDS = 0.1
_PERCENT = 100.0
_PER_MIB = 1 / (1 << 20)


@dataclass(frozen=True, slots=True)
class _Metric:
    """What a GPM metric is the mean of; ``scale`` turns a ratio or bytes per second into NVML's unit."""

    of: Callable[[Load], float]
    field: Field
    scale: float = _PERCENT
    whole_gpu_only: bool = False


_METRICS: Mapping[int, _Metric] = {
    1: _Metric(lambda x: x.engine, Field.PROF_GR_ENGINE_ACTIVE),
    2: _Metric(lambda x: x.sm, Field.PROF_SM_ACTIVE),
    3: _Metric(lambda x: x.occupancy, Field.PROF_SM_OCCUPANCY),
    5: _Metric(lambda x: x.tensor, Field.PROF_PIPE_TENSOR_ACTIVE),
    10: _Metric(lambda x: x.dram, Field.PROF_DRAM_ACTIVE),
    11: _Metric(lambda x: x.fp64, Field.PROF_PIPE_FP64_ACTIVE),
    12: _Metric(lambda x: x.fp32, Field.PROF_PIPE_FP32_ACTIVE),
    13: _Metric(lambda x: x.fp16, Field.PROF_PIPE_FP16_ACTIVE),
    20: _Metric(lambda x: x.pcie_tx_bytes_per_second, Field.PROF_PCIE_TX_BYTES, _PER_MIB, whole_gpu_only=True),
    21: _Metric(lambda x: x.pcie_rx_bytes_per_second, Field.PROF_PCIE_RX_BYTES, _PER_MIB, whole_gpu_only=True),
    30: _Metric(lambda x: x.decode, DECODERS[0]),
    40: _Metric(lambda x: x.jpeg, JPEG_DECODERS[0]),
    50: _Metric(lambda x: x.optical_flow, FLOW_ENGINES[0]),
    60: _Metric(lambda x: x.nvlink_rx_bytes_per_second, Field.PROF_NVLINK_RX_BYTES, _PER_MIB, whole_gpu_only=True),
    61: _Metric(lambda x: x.nvlink_tx_bytes_per_second, Field.PROF_NVLINK_TX_BYTES, _PER_MIB, whole_gpu_only=True),
}


@CALLS.device("nvmlGpmQueryDeviceSupport", static=True, mig=True)
def _support(target: Target, support: CArgument) -> None:
    check_version(out(support), _VERSION)
    out(support).isSupportedDevice = int(target.gpu.model.gpm)


@CALLS.system("nvmlGpmSampleAlloc")
def _alloc(session: Session, sample: CArgument) -> None:
    pointer = session.new_pointer()
    session.gpm_samples[pointer] = None
    put_pointer(sample, pointer)


@CALLS.system("nvmlGpmSampleFree")
def _free(session: Session, sample: CArgument) -> None:
    if address(sample) not in session.gpm_samples:
        raise Refused(INVALID_ARGUMENT)
    del session.gpm_samples[address(sample)]


@CALLS.device("nvmlGpmSampleGet", mig=True)
def _sample(target: Target, sample: CArgument) -> None:
    if target.instance:
        _store(target, sample, target.instance.uuid, target.instance.load_integral, whole=False)
    else:
        _store(target, sample, target.gpu.uuid, target.gpu.load_integral, whole=True)


@CALLS.device("nvmlGpmMigSampleGet")
def _mig_sample(target: Target, number: CArgument, sample: CArgument) -> None:
    instances = target.gpu.instances if target.gpu.mig_enabled else ()
    members = [instance for instance in instances if instance.gpu_instance_id == plain(number)]
    if not members:
        raise Refused(NOT_FOUND if target.gpu.mig_enabled else NOT_SUPPORTED)
    uuid = f"{target.gpu.uuid}/{plain(number)}/" + ",".join(member.uuid for member in members)
    _store(target, sample, uuid, joined(members), whole=False)


def joined(members: Sequence[MigTruth]) -> Load:
    """Load of a GPU instance: its compute instances by their part of the slices in use."""
    weights = [slices_of(member)[1] for member in members]
    total = max(sum(weights), 1)
    return Load(
        **{
            f.name: sum(
                getattr(member.load_integral, f.name) * weight for member, weight in zip(members, weights, strict=True)
            )
            / total
            for f in fields(Load)
        }
    )


def _store(target: Target, sample: CArgument, uuid: str, integral: Load, *, whole: bool) -> None:
    if not target.gpu.model.gpm:
        raise Refused(NOT_SUPPORTED)
    if address(sample) not in target.session.gpm_samples:
        raise Refused(INVALID_ARGUMENT)
    target.session.gpm_samples[address(sample)] = GpmSample(
        device_uuid=uuid, at_seconds=target.node.at_seconds, integral=integral, gpu=target.gpu, whole=whole
    )


@CALLS.system("nvmlGpmMetricsGet")
def _metrics(session: Session, request: CArgument) -> None:
    struct = out(request)
    check_version(struct, _VERSION)
    old = session.gpm_samples.get(address(struct.sample1))
    new = session.gpm_samples.get(address(struct.sample2))
    if old is None or new is None or old.device_uuid != new.device_uuid or struct.numMetrics > _METRIC_MAX:
        raise Refused(INVALID_ARGUMENT)
    for metric in struct.metrics[: struct.numMetrics]:
        try:
            metric.value = _mean(old, new, metric.metricId)
            metric.nvmlReturn = 0
        except Refused as refusal:
            metric.nvmlReturn = refusal.code


def _mean(old: GpmSample, new: GpmSample, number: int) -> float:
    """Mean of a metric between two samples; NaN where they are too close or in the wrong order."""
    metric = _METRICS.get(number)
    if metric is None or metric.field in new.gpu.model.not_supported or (metric.whole_gpu_only and not new.whole):
        raise Refused(NOT_SUPPORTED)
    seconds = new.at_seconds - old.at_seconds
    if seconds < _SHORTEST_SECONDS:
        return math.nan
    if new.whole and metric.field in new.gpu.overrides:
        fixed = new.gpu.overrides[metric.field]
        if fixed is None:
            raise Refused(NOT_SUPPORTED)
        return fixed * metric.scale
    return (metric.of(new.integral) - metric.of(old.integral)) / seconds * metric.scale
