"""Xids and MIG changes, read from the driver with each sample."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pynvml
import pytest
from driver_support import Node, gpu, instance, load, partitioned, simulated

from exporter.gpu.nvml.source import Events, NvmlSource
from exporter.model.devices import GpuReading, Reading
from exporter.model.fields import DECODERS, Field
from gpu_simulator import driver as simulated_driver
from gpu_simulator.truth import GpuTruth


class Running:
    """An open source on a simulated node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.source = NvmlSource(frozenset(Field), retry_seconds=0.0)

    def after(self, *gpus: GpuTruth) -> Reading:
        """Sample a second later, with these GPUs if any."""
        self.node.set(*gpus, at=self.node.truth.at_seconds + 1)
        return self.source.sample(self.node.truth.at_seconds)

    def instance_values(self, *gpus: GpuTruth) -> Mapping[Field, int | float]:
        """Return the values of the first instance in a new sample."""
        return self.after(*gpus).gpus[0].instances[0].values


@contextmanager
def running(*gpus: GpuTruth) -> Iterator[Running]:
    with simulated(*gpus, init=False) as node:
        one = Running(node)
        one.source.open()
        one.after()
        yield one
        one.source.close()


def test_xid_has_its_gpu_instance_and_compute_instance_id() -> None:
    parts = instance(3), instance(3, compute_instance=1)
    with running(partitioned(*parts)) as node:
        (event,) = node.after(partitioned(*parts, xids=((100.5, 94, 3, 1),))).xids
        assert (event.xid, event.gpu_instance_id, event.compute_instance_id) == (94, 3, 1)


def test_xid_is_reported_once_with_its_gpu_and_sample_time() -> None:
    with running(gpu(0), gpu(1)) as node:
        assert node.after().xids == ()
        (event,) = node.after(gpu(0), gpu(1, xids=((100.5, 79),))).xids
        assert (event.uuid, event.xid, event.at_seconds) == (gpu(1).uuid, 79, 103.0)
        assert event.gpu_instance_id is None
        assert node.after().xids == ()


def test_all_xids_of_a_sample_are_reported() -> None:
    with running(gpu(0)) as node:
        reading = node.after(gpu(0, xids=((100.5, 13), (100.6, 31), (100.7, 13))))
        assert [event.xid for event in reading.xids] == [13, 31, 13]


def test_xid_of_a_gpu_lost_in_the_same_sample_is_reported() -> None:
    with running(gpu(0), gpu(1)) as node:
        simulated_driver.fail("nvmlDeviceGetMemoryInfo_v2", pynvml.NVML_ERROR_GPU_IS_LOST, only=1)
        read = node.source._read

        def failing(uuid: str, own: float) -> GpuReading:
            if uuid == gpu(1).uuid:
                node.node.change(1, xids=((101.5, 79),))
            return read(uuid, own)

        node.source._read = failing  # type: ignore[method-assign]
        xids = (*node.after().xids, *node.after().xids)
        assert [(event.uuid, event.xid) for event in xids] == [(gpu(1).uuid, 79)]


def test_xid_after_a_gpu_is_lost_or_returns_is_reported() -> None:
    with running(gpu(0), gpu(1)) as node:
        simulated_driver.fail("nvmlDeviceGetMemoryInfo_v2", pynvml.NVML_ERROR_GPU_IS_LOST, only=1)
        node.after()
        assert [event.xid for event in node.after(gpu(0, xids=((102.5, 74),)), gpu(1)).xids] == [74]
        simulated_driver.clear_failures()
        node.after()
        node.after()
        both = gpu(0, xids=((102.5, 74), (105.5, 13))), gpu(1, xids=((105.5, 31),))
        assert [event.xid for event in node.after(*both).xids] == [13, 31]


def test_mig_event_triggers_an_early_layout_reading() -> None:
    with running(partitioned(instance(1))) as node:
        reading = node.after(partitioned(instance(1), instance(2)))
        assert [one.instance.gpu_instance_id for one in reading.gpus[0].instances] == [1, 2]


def test_recreated_mig_instance_has_no_mean_across_its_recreation() -> None:
    """The decoder was busy before and after; the difference of the counters is near 0."""
    before, after = (partitioned(instance(1, load_integral=load(decode=seconds))) for seconds in (50.0, 50.01))
    with running(before) as node:
        assert DECODERS[0] in node.instance_values()
        node.after(partitioned(instance(2)))
        assert DECODERS[0] not in node.instance_values(after)
        again = partitioned(instance(1, load_integral=load(decode=50.81)))
        assert node.instance_values(again)[DECODERS[0]] == pytest.approx(0.8)


def test_reading_during_a_mig_layout_change_has_no_instance_means() -> None:
    with running(partitioned(instance(1))) as node:
        read = node.source._read

        def changing(uuid: str, own: float) -> GpuReading:
            reading = read(uuid, own)
            node.node.set(partitioned(instance(2)))
            return reading

        node.source._read = changing  # type: ignore[method-assign]
        values = node.instance_values()
    assert DECODERS[0] not in values
    assert Field.FB_USED in values


def test_driver_without_events_is_counted_and_all_else_is_read() -> None:
    with simulated(gpu(), init=False):
        simulated_driver.fail("nvmlDeviceRegisterEvents", 999)
        source = NvmlSource(frozenset(Field))
        source.open()
        reading = source.sample(100.0)
        source.close()
    assert reading.errors == {"events_unavailable": 1}
    assert Field.GPU_UTIL in reading.gpus[0].values


@contextmanager
def watched(*gpus: GpuTruth) -> Iterator[tuple[Node, Events, Counter[str]]]:
    """Watch these GPUs; yield their events and the error counts."""
    with simulated(*gpus) as node:
        errors: Counter[str] = Counter()
        events = Events(lambda reason: errors.update([reason]))
        events.watch({one.uuid: pynvml.nvmlDeviceGetHandleByIndex(one.index) for one in gpus})
        yield node, events, errors
        events.close()
        assert not simulated_driver._installed.get().event_sets


def codes(events: Events, now: float) -> list[tuple[str, int]]:
    """Return the new Xids as (GPU, code)."""
    events.drain(now)
    found, events.xids = events.xids, []
    return [(event.uuid, event.xid) for event in found]


def test_gpu_that_refuses_mig_events_still_reports_xids() -> None:
    with watched(gpu()) as (_, events, errors):
        simulated_driver.fail("nvmlDeviceRegisterEvents", 3, times=1)
        assert events.drain(0.0) == frozenset()
        assert not events.xids
        (registered,) = simulated_driver._installed.get().event_sets.values()
        assert list(registered.masks.values()) == [pynvml.nvmlEventTypeXidCriticalError]
        assert not errors


def test_failed_event_registration_is_retried_without_lost_or_repeated_events() -> None:
    first, second = gpu(0).uuid, gpu(1).uuid
    with watched(gpu(0), gpu(1)) as (node, events, errors):
        simulated_driver.fail("nvmlDeviceRegisterEvents", 999, only=1)
        assert codes(events, 0.0) == []
        node.change(0, xids=((100.5, 48),))
        node.change(1, xids=((100.5, 79),))
        assert codes(events, 9.0) == [(first, 48)]
        assert errors == {"events_unavailable": 1}
        node.change(0, xids=((100.5, 48), (101.5, 31)))
        assert codes(events, 11.0) == [(first, 31)]
        assert errors == {"events_unavailable": 2}, "it failed again, and the set is unchanged"
        simulated_driver.clear_failures()
        assert codes(events, 22.0) == []
        node.change(1, xids=((100.5, 79), (102.5, 95)))
        node.change(0, xids=((100.5, 48), (101.5, 31), (103.5, 13)))
        assert codes(events, 23.0) == [(second, 95), (first, 13)]


def test_gpu_without_event_support_is_not_retried() -> None:
    with watched(gpu(0), gpu(1)) as (_, events, errors):
        simulated_driver.fail("nvmlDeviceRegisterEvents", 3, only=1)
        events.drain(0.0)
        events.drain(1000.0)
        assert errors == {"events_unavailable": 1}


def test_failed_event_set_is_recreated() -> None:
    with watched(gpu(0)) as (node, events, errors):
        events.drain(0.0)
        simulated_driver.fail("nvmlEventSetWait_v2", pynvml.NVML_ERROR_GPU_IS_LOST, times=1)
        assert codes(events, 1.0) == []
        assert errors == {"events_gpu_is_lost": 1}
        events.drain(12.0)
        node.change(0, xids=((100.5, 48),))
        assert codes(events, 13.0) == [(gpu(0).uuid, 48)]
