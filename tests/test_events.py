"""Xids and MIG changes, waited for beside the samples and told with the next one."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Self

import pynvml
import pytest
from driver_support import gpu, instance, load, partitioned
from driver_support import simulated as frozen

from exporter.gpu.nvml.source import EventWatch, NvmlSource
from exporter.model import DECODERS, Field, GpuReading, Reading
from gpu_simulator import driver as simulated_driver
from gpu_simulator.truth import GpuTruth, NodeTruth

PATIENCE_SECONDS = 10.0


def wait_until_registered(watch: EventWatch | None) -> None:
    """Until its thread waits for events, or has told why it cannot."""
    assert watch is not None
    end = time.monotonic() + PATIENCE_SECONDS
    sets = simulated_driver._installed.get().event_sets
    while not watch._errors:
        if any(one.waits and len(one.masks) == len(watch._handles) for one in list(sets.values())):
            return
        assert time.monotonic() < end
        time.sleep(0.005)


class Running:
    """A simulated node whose waits take real time, as the event thread needs."""

    def __init__(self, *gpus: GpuTruth) -> None:
        self.truth = NodeTruth(at_seconds=100.0, node="simulated", driver_version="590.48.01", gpus=gpus)
        self.source = NvmlSource(frozenset(Field), retry_seconds=0.0)

    def __enter__(self) -> Self:
        simulated_driver.install(lambda: self.truth, cache_seconds=0.0)
        self.source.open()
        wait_until_registered(self.source._events)
        return self

    def __exit__(self, *_: object) -> None:
        self.source.close()
        simulated_driver.uninstall()

    def set(self, *gpus: GpuTruth) -> None:
        truth = self.truth
        self.truth = NodeTruth(
            at_seconds=truth.at_seconds + 1, node=truth.node, driver_version=truth.driver_version, gpus=gpus
        )

    def sample_until_xid(self) -> Reading:
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            reading = self.source.sample(self.truth.at_seconds)
            if reading.xids:
                return reading
            time.sleep(0.01)
        raise AssertionError("no Xid came")


def test_an_xid_carries_the_ids_of_its_gpu_instance_and_compute_instance() -> None:
    parts = instance(3), instance(3, compute_instance=1)
    with Running(partitioned(*parts)) as node:
        node.set(partitioned(*parts, xids=((100.5, 94, 3, 1),)))
        (event,) = node.sample_until_xid().xids
        assert (event.xid, event.gpu_instance_id, event.compute_instance_id) == (94, 3, 1)


def test_an_xid_is_told_once_with_its_gpu_and_the_time_of_the_sample() -> None:
    with Running(gpu(0), gpu(1)) as node:
        assert node.source.sample(100.0).xids == ()
        node.set(gpu(0), gpu(1, xids=((100.5, 79),)))
        (event,) = node.sample_until_xid().xids
        assert (event.uuid, event.xid, event.at_seconds) == (gpu(1).uuid, 79, 101.0)
        assert event.gpu_instance_id is None
        assert node.source.sample(101.0).xids == ()


def test_several_xids_are_all_counted_and_none_is_only_the_last() -> None:
    with Running(gpu(0)) as node:
        node.set(gpu(0, xids=((100.5, 13), (100.6, 31), (100.7, 13))))
        codes: list[int] = []
        while len(codes) < 3:
            codes.extend(event.xid for event in node.sample_until_xid().xids)
        assert sorted(codes) == [13, 13, 31]


def test_a_new_mig_layout_is_told_by_an_event_before_its_time_to_be_looked_at() -> None:
    with Running(partitioned(instance(1))) as node:
        assert [one.instance.gpu_instance_id for one in node.source.sample(100.0).gpus[0].instances] == [1]
        node.set(partitioned(instance(1), instance(2)))
        end = time.monotonic() + PATIENCE_SECONDS
        while len(node.source.sample(101.0).gpus[0].instances) < 2:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_mig_instance_created_again_has_no_mean_over_both_of_its_lives() -> None:
    """Its decoder was busy in both; the difference of the counters is next to nothing."""
    before, after = (partitioned(instance(1, load_integral=load(decode=seconds))) for seconds in (50.0, 50.01))
    other = partitioned(instance(2))
    with Running(before) as node:
        node.source.sample(node.truth.at_seconds)
        node.set(before)
        assert DECODERS[0] in instance_values(node)
        node.set(other)
        wait_until_events_taken()
        node.set(after)
        wait_until_events_taken()
        assert DECODERS[0] not in instance_values(node)
        node.set(partitioned(instance(1, load_integral=load(decode=50.81))))
        assert instance_values(node)[DECODERS[0]] == pytest.approx(0.8)


def test_a_reading_during_which_the_mig_layout_changes_has_no_means_of_instances() -> None:
    layout = partitioned(instance(1))
    with Running(layout) as node:
        node.source.sample(node.truth.at_seconds)
        node.set(layout)
        read = node.source._read

        def changing(uuid: str, own: float) -> GpuReading:
            reading = read(uuid, own)
            node.set(partitioned(instance(2)))
            wait_until_events_taken()
            return reading

        node.source._read = changing  # type: ignore[method-assign]
        values = instance_values(node)
    assert DECODERS[0] not in values
    assert Field.FB_USED in values


def instance_values(node: Running) -> Mapping[Field, int | float]:
    """Values of the first instance in a new sample."""
    return node.source.sample(node.truth.at_seconds).gpus[0].instances[0].values


def wait_until_events_taken() -> None:
    """Until the event thread has taken every event so far."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not simulated_driver.events_told():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_driver_without_events_is_counted_and_everything_else_is_read() -> None:
    with frozen(gpu(), init=False):
        simulated_driver.fail("nvmlDeviceRegisterEvents", 999)
        source = NvmlSource(frozenset(Field))
        source.open()
        wait_until_registered(source._events)
        reading = source.sample(100.0)
        source.close()
    assert reading.errors == {"events_unavailable": 1}
    assert Field.GPU_UTIL in reading.gpus[0].values


def test_a_gpu_that_refuses_mig_events_still_tells_xids() -> None:
    with frozen(gpu()):
        simulated_driver.fail("nvmlDeviceRegisterEvents", 3, times=1)
        watch = EventWatch({"GPU-0": pynvml.nvmlDeviceGetHandleByIndex(0)})
        watch.start()
        wait_until_registered(watch)
        (registered,) = simulated_driver._installed.get().event_sets.values()
        assert list(registered.masks.values()) == [pynvml.nvmlEventTypeXidCriticalError]
        watch.close()
        assert watch.drain() == ([], [], [])


class Retried:
    """A watch over two GPUs by a clock that a test moves; registration of the second has failed."""

    def __init__(self, *, code: int = 999) -> None:
        self.seconds = 0.0
        simulated_driver.fail("nvmlDeviceRegisterEvents", code, only=1)
        handles = {gpu(index).uuid: pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(2)}
        self.watch = EventWatch(handles, monotonic=lambda: self.seconds)
        self.told: list[tuple[str, int]] = []

    def __enter__(self) -> Self:
        self.watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.close()

    def until(self, *told: tuple[int, int]) -> list[str]:
        """Wait until just these Xids, as (GPU, code), have been told since the start; return the errors meanwhile."""
        errors: list[str] = []

        def all_told() -> bool:
            xids, _, some = self.watch.drain()
            self.told.extend((event.uuid, event.xid) for event in xids)
            errors.extend(some)
            return len(self.told) >= len(told)

        self.wait(all_told)
        assert self.told == [(gpu(index).uuid, xid) for index, xid in told]
        return errors

    def wait(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)


def _waited_on() -> dict[int, list[str]]:
    """The GPUs of each set that is waited on."""
    sets = dict(simulated_driver._installed.get().event_sets)
    return {pointer: sorted(one.masks) for pointer, one in sets.items() if one.waits}


def test_a_gpu_that_could_not_be_registered_is_tried_again_and_the_others_lose_and_repeat_nothing() -> None:
    with frozen(gpu(0), gpu(1)) as node, Retried() as it:
        it.wait(lambda: list(_waited_on().values()) == [[gpu(0).uuid]])
        (first,) = _waited_on()
        node.change(0, xids=((100.5, 48),))
        node.change(1, xids=((100.5, 79),))
        assert it.until((0, 48)) == ["events_unavailable"]
        it.seconds = 11.0
        it.wait(lambda: bool(it.watch._errors))
        node.change(0, xids=((100.5, 48), (101.5, 31)))
        assert it.until((0, 48), (0, 31)) == ["events_unavailable"], "it failed again, and the set is as it was"
        simulated_driver.clear_failures()
        it.seconds = 22.0
        both = {first: [gpu(0).uuid, gpu(1).uuid]}
        it.wait(lambda: _waited_on() == both)
        node.change(1, xids=((100.5, 79), (102.5, 95)))
        it.until((0, 48), (0, 31), (1, 95))
        node.change(0, xids=((100.5, 48), (101.5, 31), (103.5, 13)))
        it.until((0, 48), (0, 31), (1, 95), (0, 13))
        it.seconds = 33.0
        it.watch.close()
        assert it.watch.drain() == ([], [], [])


def test_a_gpu_that_has_no_events_is_not_tried_again() -> None:
    with frozen(gpu(0), gpu(1)) as node, Retried(code=3) as it:
        it.wait(lambda: bool(_waited_on()))
        it.seconds = 1000.0
        node.change(0, xids=((100.5, 48),))
        assert it.until((0, 48)) == ["events_unavailable"]
        node.change(0, xids=((100.5, 48), (101.5, 31)))
        assert it.until((0, 48), (0, 31)) == []


def test_a_close_in_the_moment_in_which_the_thread_begins_ends_it_too() -> None:
    class Unlucky(threading.Event):
        """The close comes after the thread saw that it goes on, and before it clears what woke it."""

        def clear(self) -> None:
            watch._stopping = True
            self.set()
            super().clear()

    with frozen(gpu()):
        watch = EventWatch({"GPU-0": pynvml.nvmlDeviceGetHandleByIndex(0)})
        watch._renewed = Unlucky()
        watch.start()
        watch._thread.join(PATIENCE_SECONDS)
        ended = not watch._thread.is_alive()
        watch._renewed.set()
        assert ended


def test_closing_ends_the_thread_quickly() -> None:
    with Running(gpu(0)) as node:
        watch = node.source._events
        assert watch is not None
        started = time.monotonic()
        node.source.close()
        assert time.monotonic() - started < 3
        assert not watch._thread.is_alive()
