"""Invariants of a node under chaos: compares its pages with the truth and with earlier pages."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from chaos_schedule import GPU_HANG, GPUS, OF_ALL_GPUS, OF_ONE_GPU, Act, Injection
from chaos_world import HELD_MODEL, STEADY, World
from page_checks import Page, PageChecks

from gpu_simulator.truth import GPU_FAULTS, Fault, GpuTruth, Load, NodeTruth

ALLOWED_RATIO = 0.15
"""Largest difference between the truth and a lower activity; a larger one is a false idle."""
IDLE_RATIO = 0.05
"""The agent's idle threshold."""
OF_ENGINE = "(engine)"
"""Key in place of a pod: the activity of a GPU's engine alone."""
SHARE_RATIO = 0.05
"""Largest error of a pod's metered activity, over all measured time."""
BEFORE_SAMPLE_SECONDS = 1.6
"""Longest time between the start of a measurement and its sample."""
LOOK_SECONDS = 5.0
"""Longest period of a division by processes, back to the previous process samples: 1.9 s, and the driver's absence."""
AROUND_SECONDS = 0.3
"""Tolerance for the clocks of two processes and for rounded instants."""
STALE_SECONDS = 2.0 + 0.2
"""Age above which a reading is not shown: three intervals, at least two seconds, and a tick."""
APART_SECONDS = 0.05
"""Tolerance: a world reads the wall clock and the monotonic clock one after the other."""
CALL_SECONDS, HINDERED_CALL_SECONDS = 1.5, 4.5
"""Longest time from the stamp of an answer, which is that of the request; with faults, the request can be repeated."""
_ENGINE_STOOD = (Fault.HANG, Fault.ENGINE_HANG, Act.CHILD_STOP)
"""Faults that stop the host engine: its next mean covers their time. The simulated engine is in the child's process."""
HUNG_START_SECONDS = 16.0
"""``DRIVER_RECOVERS_SECONDS`` while a GPU hangs: a child that opens the driver then has 12 s before its replacement."""
GPU_SLICES = 7
"""Compute slices of every GPU of the chaos node."""
DRIVER_RECOVERS_SECONDS = 8.0
"""Time after a fault of the whole driver, or a start of the agent, in which GPUs may still be dark."""
HUNG_GPU_FOUND_SECONDS = 6.0
"""Time after a GPU's hang within which its child is replaced and the other GPUs are read again."""
PER_GPU_HOUR = 3.6
"""Price per hour of a GPU of this node's instance type."""
LATE_SECONDS = 10.0
"""Time for which a machine counts as busy after it had no CPU time."""
KUBELET_FAULTS = frozenset(one for one in Fault if one.value.startswith("kubelet_"))
BOARD_ROWS: Mapping[str, Callable[[GpuTruth], tuple[float, float]]] = {
    "gpu_up": lambda _: (1.0, 1.0),
    "gpu_power_watts": lambda gpu: (gpu.model.idle_watts, gpu.model.power_limit_watts),
    "gpu_activity_ratio": lambda _: (0.0, 1.0),
    "DCGM_FI_DEV_POWER_USAGE": lambda gpu: (gpu.model.idle_watts, gpu.model.power_limit_watts),
    "DCGM_FI_DEV_GPU_TEMP": lambda _: (1.0, 120.0),
    "DCGM_FI_DEV_SM_CLOCK": lambda _: (1.0, 5000.0),
    "DCGM_FI_DEV_MEM_CLOCK": lambda _: (1.0, 20_000.0),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": lambda _: (0.0, math.inf),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": lambda _: (0.0, math.inf),
    "DCGM_FI_DEV_FB_USED": lambda gpu: (0.0, gpu.model.memory_bytes / 2**20),
    "DCGM_FI_DEV_FB_FREE": lambda gpu: (0.0, gpu.model.memory_bytes / 2**20),
    "DCGM_FI_DEV_GPU_UTIL": lambda _: (0.0, 100.0),
}
"""Rows of each healthy GPU on a page, with the least and the greatest value."""
OF_WHOLE_GPUS = frozenset({"gpu_activity_ratio", "DCGM_FI_DEV_GPU_UTIL"})
"""Rows that a partitioned GPU has for its instances only, or not at all."""
EXPIRY_SECONDS = 5.0
_STEP_SECONDS = 0.1
SAVE_SECONDS = 1.0
"""Interval of the agent's saves."""


@dataclass(slots=True, kw_only=True)
class Judge(PageChecks):
    """Compares the pages of one node with the truth; times are those of the world."""

    world: World
    injections: tuple[Injection, ...]
    with_dcgm: bool
    steps: list[tuple[float, float, float]] = field(default_factory=lambda: [(-1.0, math.inf, 0.0)])
    """Earliest start, latest end and seconds of each offset of the wall clock."""
    late: deque[float] = field(default_factory=lambda: deque(maxlen=1000))
    """Times at which this machine had no CPU time for the node's servers."""
    agent_since: float = math.inf
    """Start of the serving agent; infinite before."""
    unsaved_ends: int = 0
    """Agents that ended before their last totals were saved."""

    def stepped(self, begin: float, end: float, seconds: float) -> None:
        """Note a step of the wall clock to an offset, at some instant between ``begin`` and ``end``."""
        since, _, off = self.steps.pop()
        self.steps += [(since, end, off), (begin, math.inf, seconds)]

    def agent_began(self, *, all_was_saved: bool) -> None:
        """Note another agent process, and whether it charges again the time that the former one could not save."""
        PageChecks.agent_began(self, all_was_saved=all_was_saved)
        self.unsaved_ends += not all_was_saved

    def look(self, text: str, seen_at: float) -> Page | None:
        """Check one page; return ``None`` if it is invalid."""
        page = self.read(text, seen_at, GPUS * (seen_at + AROUND_SECONDS + self.unsaved_ends * 2 * SAVE_SECONDS))
        if page is not None:
            took = page.one("gpu_exporter_sample_duration_seconds") or 0.0
            sampled = self.world_time(page.one("gpu_exporter_sample_timestamp_seconds"), seen_at, took)
            answered = self.world_time(page.one("gpu_exporter_attribution_timestamp_seconds"), seen_at)
            self._money(page, seen_at)
            self._activity(page, sampled, seen_at, took)
            self._holders(page, sampled, answered, seen_at)
            self._unallocated(page, answered, seen_at)
            self._others(page, seen_at)
        return page

    def world_time(self, stamp: float | None, seen_at: float, took: float = 0.0) -> float | None:
        """Return the world's time of a timestamp of the page; ``None`` if steps of the clock make it ambiguous.

        Args:
            stamp: Timestamp of the page.
            seen_at: Time at which the page was received.
            took: Longest time between the reading of the clock and the stamped instant.
        """
        if stamp is None:
            return None
        found = []
        for since, until, off in self.steps:
            t = stamp - self.world.plan.epoch_unix - off
            if since - AROUND_SECONDS <= t <= min(until + took, seen_at) + AROUND_SECONDS:
                found.append(t)
        return found[0] if found and max(found) - min(found) <= AROUND_SECONDS else None

    def truths(self, begin: float, end: float) -> list[NodeTruth]:
        """Return the truth at instants of a time span."""
        first, last = math.floor(begin / _STEP_SECONDS), math.ceil(end / _STEP_SECONDS)
        return [self.world.at(number * _STEP_SECONDS) for number in range(first, last + 1)]

    def covered(self, kinds: Iterable[str], begin: float, end: float, gpu: int | None = None) -> bool:
        """Return whether faults of some kinds, one after the other, cover a whole time span."""
        wanted = frozenset(kinds)
        reached = begin
        for one in self.injections:  # in order of their start
            if one.kind in wanted and (gpu is None or one.gpu == gpu) and one.at <= reached:
                reached = max(reached, one.end)
        return reached >= end

    def touched(self, kinds: Iterable[str], begin: float, end: float) -> bool:
        """Return whether a fault of some kinds overlaps a time span."""
        wanted = frozenset(kinds)
        return any(one.kind in wanted and one.at <= end and one.end >= begin for one in self.injections)

    def _money(self, page: Page, t: float) -> None:
        """Compare the cost with the price of the instance type: nothing is charged before the labels are read."""
        cost = page.total("gpu_ledger_cost_total")
        priced = page.total("gpu_ledger_seconds_total") - page.total("gpu_ledger_unpriced_seconds_total")
        most = priced * PER_GPU_HOUR / 3600
        self.expect("no price is guessed", cost <= most + 1e-6, t, f"{cost:.4f} for {most:.4f} at most")
        metered = {frozenset(carried.items()) for carried, _ in page.rows("gpu_ledger_seconds_total")}
        paid = {
            frozenset(pair for pair in carried.items() if pair[0] != "currency")
            for carried, _ in page.rows("gpu_ledger_cost_total")
        }
        self.expect("money is for seconds", paid <= metered, t, f"{[dict(one) for one in paid - metered][:2]}")

    def _activity(self, page: Page, sampled: float | None, t: float, took: float) -> None:
        shown = [
            (name, carried, value)
            for name in ("gpu_activity_ratio", "gpu_pod_activity_ratio")
            for carried, value in page.rows(name)
            if carried.get("source") != "estimated"
        ]
        newest = self.world_time(page.one("gpu_exporter_snapshot_timestamp_seconds"), t)
        up = any(value for _, value in page.rows("gpu_up"))
        if sampled is not None and newest is not None and (shown or up):
            late = newest - sampled > STALE_SECONDS + AROUND_SECONDS
            self.expect("nothing old is shown", not late, t, f"{newest - sampled:.2f} s old")
        begin, end = (sampled - took - BEFORE_SAMPLE_SECONDS, sampled) if sampled is not None else (t - 5.0, t)
        least = _least(self.truths(begin, end))
        least_of_share = _least(self.truths(begin - LOOK_SECONDS, end))
        least_of_mean = _least(self.truths(self._mean_begins(begin, end), end))
        by_dcgm = {carried["uuid"] for _, carried, _ in shown if carried.get("measured_by") == "dcgm"}
        in_part = self._measured_in_part(page)
        dark = self._dark(sampled, took)
        for name, carried, value in shown:
            key = carried["uuid"], carried.get("pod_name", "")
            divided = carried.get("source") == "process_samples"
            lowest = least_of_share if divided else least_of_mean if carried["uuid"] in by_dcgm else least
            floor = lowest.get(key, 0.0) - ALLOWED_RATIO
            if carried["uuid"] in in_part:
                floor = max(min(floor, IDLE_RATIO), lowest.get((carried["uuid"], OF_ENGINE), 0.0) - ALLOWED_RATIO)
            message = f"{name} {carried} {value:.3f}, truth {floor + ALLOWED_RATIO:.2f} from {begin:.2f} to {end:.2f}"
            self.expect("no false idle", value >= floor, t, message)
            self.expect("ratio", 0.0 <= value <= 1.0, t, f"{key} {value}")
            self.expect("dark while faulty", carried["uuid"] not in dark, t, f"{name} {key} {value}")

    def _measured_in_part(self, page: Page) -> frozenset[str]:
        """Return the GPUs with an unmeasured instance: they show their engine's activity, and no false idle."""
        measured = {carried["uuid"] for carried, _ in page.rows("gpu_activity_ratio")}
        parts = ((carried.get("parent_uuid", ""), carried["uuid"]) for carried, _ in page.rows("gpu_info"))
        return frozenset(parent for parent, uuid in parts if parent and uuid not in measured)

    def _mean_begins(self, begin: float, end: float) -> float:
        """Return the earliest start of a host engine's mean that is due from ``begin`` to ``end``."""
        for one in reversed(self.injections):
            if one.kind in _ENGINE_STOOD and one.at < end and one.end > begin:
                begin = min(begin, one.at - BEFORE_SAMPLE_SECONDS)
        return begin

    def _dark(self, sampled: float | None, took: float) -> frozenset[str]:
        """Return the devices of GPUs with a fault throughout the shown reading; indices are the driver's, and move."""
        if sampled is None or self.with_dcgm:
            return frozenset()
        begin = sampled - took - AROUND_SECONDS
        end = sampled + APART_SECONDS
        faulty = [g for g in self.world.at(sampled).gpus if self.covered(GPU_FAULTS, begin, end, g.index)]
        return frozenset(uuid for gpu in faulty for uuid in (gpu.uuid, *(part.uuid for part in gpu.instances)))

    def _holders(self, page: Page, sampled: float | None, answered: float | None, t: float) -> None:
        if answered is None or sampled is None or t - answered > EXPIRY_SECONDS - 0.5:
            return
        # Devices with unknown allocation are left out here; ``is_well`` requires all of them in the end.
        states = [carried for carried, value in page.rows("gpu_allocation_state") if value]
        seen = {carried["uuid"] for carried in states if carried["state"] != "unknown"}
        shown = {(carried["uuid"], carried["pod_name"]) for carried, _ in page.rows("gpu_pod_info")}
        hindered = self.touched(KUBELET_FAULTS, answered, answered + CALL_SECONDS) or any(
            abs(at - t) <= LATE_SECONDS for at in self.late
        )
        end = answered + (HINDERED_CALL_SECONDS if hindered else CALL_SECONDS)
        held = [
            {(one.device_uuid, one.pod) for one in truth.holders if one.device_uuid in seen}
            for truth in self.truths(answered - AROUND_SECONDS, min(end, t))
        ]
        # A pod that had ended by the API's last answer may be missing, even if the kubelet's answer is older.
        api_answered = self.world_time(page.one("gpu_exporter_metadata_timestamp_seconds"), t)
        still = {(one.device_uuid, one.pod) for one in self.world.at(max(answered, api_answered or answered)).holders}
        extra, missing = shown - set.union(*held), (set.intersection(*held) & still) - shown
        message = f"{sorted(extra)} too many, {sorted(missing)} missing, answered {t - answered:.2f} s before"
        self.expect("attribution is the kubelet's", not extra and not missing, t, message)

    def _unallocated(self, page: Page, answered: float | None, t: float) -> None:
        states = page.rows("gpu_allocation_state")
        free = {carried["uuid"] for carried, value in states if carried["state"] == "unallocated" and value}
        begin = answered - AROUND_SECONDS if answered is not None else t - 8.0
        always = set.intersection(*({one.device_uuid for one in truth.holders} for truth in self.truths(begin, t)))
        self.expect("never unallocated while held", not free & always, t, f"{sorted(free & always)}")
        charged = sum(
            value
            for carried, value in page.rows("gpu_ledger_seconds_total")
            if carried.get("workload_kind") == "Unallocated" and carried.get("model") == HELD_MODEL
        )
        self.expect("no held time is Unallocated", charged <= 0, t, f"{charged:.3f} s of {HELD_MODEL}")

    def _others(self, page: Page, t: float) -> None:
        """Check that GPUs are up and measured while only other GPUs, or parts outside of the driver, are faulty."""
        hangs = any(one.kind == GPU_HANG and one.at <= t <= one.end + HUNG_START_SECONDS for one in self.injections)
        recovers = HUNG_START_SECONDS if hangs else DRIVER_RECOVERS_SECONDS
        lately = [one for one in self.injections if one.at <= t and one.end >= t - recovers]
        faulty = {one.gpu for one in lately if one.kind in OF_ONE_GPU}
        if len(faulty) != 1 or any(one.kind in OF_ALL_GPUS for one in lately) or t < self.agent_since + recovers:
            return
        if any(at >= t - recovers for at in self.late):  # a child without CPU time takes longer to be replaced
            return
        # Until it ends, another fault of the GPU can hide the hang of its calls.
        if hangs and any(t - HUNG_GPU_FOUND_SECONDS < at <= t for one in lately for at in (one.at, one.end)):
            return
        others = [gpu for gpu in self.world.at(t).gpus if gpu.index not in faulty]
        wrong = [
            f"{name} of GPU {gpu.index} is {sorted(shown) or 'absent'}"
            for name, limits in BOARD_ROWS.items()
            for gpu in others
            if not (gpu.instances and name in OF_WHOLE_GPUS)
            for shown in [{value for carried, value in page.rows(name) if gpu.uuid in carried.values()}]
            for least, most in [limits(gpu)]
            if not shown or min(shown) < least or max(shown) > most
        ]
        self.expect("a fault of one GPU is its own", not wrong, t, f"GPU {faulty} is faulty; {'; '.join(wrong)}")

    def is_well(self, page: Page, t: float) -> str:
        """Return the first difference between a page and the truth; empty without one."""
        truth = self.world.at(t)
        seen = {carried["uuid"]: bool(value) for carried, value in page.rows("gpu_up")}
        expected = page.one("gpu_devices", state="expected") or 0
        if missing := [gpu.uuid for gpu in truth.gpus if not seen.get(gpu.uuid)]:
            return f"not up: {sorted(missing)}"
        if expected < len(truth.gpus):
            return f"{expected:g} GPUs expected"
        down = [carried["source"] for carried, value in page.rows("gpu_exporter_source_up") if not value]
        if blocking := [name for name in down if name != "kubernetes-api"]:
            return f"sources down: {blocking}"
        shown = {(carried["uuid"], carried["pod_name"]) for carried, _ in page.rows("gpu_pod_info")}
        there = {carried["uuid"] for carried, _ in page.rows("gpu_info")}
        lately = [
            {(one.device_uuid, one.pod) for one in each.holders if one.device_uuid in there}
            for each in self.truths(t - 2.0, t)
        ]
        if shown not in lately:
            return f"holders: {sorted(shown ^ lately[-1])}"
        if not page.one("gpu_exporter_state_saved"):
            return "the ledger is not saved"
        return ""

    def shares(self, page: Page, t: float) -> None:
        """Compare the metered activity of steady pods with the true one, over all measured time."""
        measured = {name: [0.0, 0.0] for name in STEADY}
        for place, kind in enumerate(("active", "idle")):
            for carried, value in page.rows(f"gpu_pod_{kind}_seconds_total"):
                if carried["pod_name"] in measured:
                    measured[carried["pod_name"]][place] += value
        for pod, (active, idle) in measured.items():
            if active + idle > 1.0:
                ratio = active / (active + idle)
                low, high = STEADY[pod]
                message = f"{pod} {ratio:.3f} of {active + idle:.1f} s, truth {low} to {high}"
                self.expect("metered as busy as it was", low - SHARE_RATIO <= ratio <= high + SHARE_RATIO, t, message)


def _least(truths: list[NodeTruth]) -> dict[tuple[str, str], float]:
    """Return the least activity by (device, pod) over all instants; an empty pod stands for the device."""
    least: dict[tuple[str, str], float] = {}
    for number, truth in enumerate(truths):
        loads = dict(_loads(truth))
        least = {key: min(least.get(key, 1.0), loads.get(key, 0.0)) for key in (least if number else loads)}
    return least


def _busiest(load: Load) -> float:
    """Return the activity of the busiest engine: a transcoder is not idle."""
    return max(load.engine, load.encode, load.decode, load.jpeg, load.optical_flow)


def _loads(truth: NodeTruth) -> Iterator[tuple[tuple[str, str], float]]:
    for gpu in truth.gpus:
        parts = [(part, _busiest(part.load)) for part in gpu.instances]
        divided = sum(part.compute_slices * busy for part, busy in parts) / GPU_SLICES
        yield (gpu.uuid, ""), divided if parts else _busiest(gpu.load)
        engine = sum(part.compute_slices * part.load.engine for part in gpu.instances) / GPU_SLICES
        yield (gpu.uuid, OF_ENGINE), engine if parts else gpu.load.engine
        for part, busy in parts:
            yield (part.uuid, ""), busy
    for one in truth.holders:
        yield (one.device_uuid, one.pod), one.activity_ratio
