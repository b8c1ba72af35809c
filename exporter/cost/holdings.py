"""Reads each workload's use of its devices over days from Prometheus, as evidence for recommendations."""

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from exporter.cost.dimensions import EVERYTHING, Dimension, Filters, LineKey
from exporter.cost.prometheus import PrometheusClient, by_labels
from exporter.cost.window import DAY_SECONDS, Window
from exporter.model.ledger import RESOURCES, Bottleneck, ByState


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldDevice:
    """The use of one device by a workload over the window, from the hourly evidence series."""

    owner: LineKey
    """Key of its ledger line: with node, model and mode, without pool and labels."""
    uuid: str
    mig_profile: str = ""
    share_ratio: float
    """Held part of the physical GPU."""
    held_hours: float
    measured_hours: float
    mean_ratio: float | None
    """Activity over the measured hours, 0-1 of its part; ``None`` without measurements."""
    p95_ratio: float | None
    """Activity that 95 % of the hours do not exceed."""
    peak_ratio: float | None
    """Activity in the busiest hour."""
    peak_memory_bytes: float | None
    memory_total_bytes: float | None
    """Memory of the device: the whole GPU or the MIG instance."""
    estimated: bool = False
    """Whether its activity is an estimate by its share of a shared device, rather than measured for it alone."""
    still_held: bool = True
    """Whether it was held at the end of the window, and for most of the last day."""
    policy: str = ""
    """Class that its pods declare, ``inference`` or ``reserved``: see docs/runbook.md; empty without one."""
    bottlenecks: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Profiled active GPU-seconds of its workload, on all devices, by limiting resource: see ``Bottleneck``."""
    resource_uses: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Use of each resource in these seconds, in GPU-seconds at its limit, as in ``OwnerUse.resource_use_seconds``."""

    @property
    def is_measured(self) -> bool:
        """Whether activity was measured rather than estimated, for most of the held hours."""
        return not self.estimated and self.measured_hours >= LEAST_COVERAGE_RATIO * self.held_hours

    @property
    def is_trusted(self) -> bool:
        """Whether the figures suffice for a recommendation: measured, over at least a day."""
        known = None not in (self.mean_ratio, self.p95_ratio, self.peak_ratio)
        return known and self.is_measured and self.held_hours >= LEAST_HELD_HOURS

    @property
    def is_idle(self) -> bool:
        """Whether every hour was idle, according to the measurements."""
        return self.is_measured and self.peak_ratio is not None and self.peak_ratio < IDLE_PEAK_RATIO


EVIDENCE = 'workload_device:gpu_use:facts{fact="share"}'
"""Series with one sample per hour in which a workload held a device."""
_BY_RESOURCE = {
    "bottlenecks": "workload:gpu_bottleneck_seconds:sum",
    "resource_uses": "workload:gpu_resource_use_seconds:sum",
}
_DEVICE = ("node", "gpu", "uuid", "gpu_instance", "mig_profile", "model")
_OWNER = ("workload_namespace", "workload_kind", "workload_name", "team")
_DAY_HOURS = 18
"""Held hours of the last day that a device needs to count as still held; below 24, as hours may not be recorded."""
_NEWEST = "7199s"
_WHOLE = 0.999

_Key = tuple[str, ...]
"""Values of cluster, device and owner labels, in this order; some answers have only device or owner labels."""


async def read_evidence(
    client: PrometheusClient, window: Window, filters: Filters = EVERYTHING
) -> tuple[HeldDevice, ...]:
    """Return the use of devices in the window, for workloads that hold a device at its end.

    The result is empty without recorded evidence. Workloads that have opted out of waste alerts are left out. Filters
    may name every dimension except ``pool``.

    Raises:
        PrometheusError: A query failed; evidence without its answer would be wrong.
    """
    questions = _questions(window, client.settings.cluster_label)
    try:
        async with asyncio.TaskGroup() as group:  # if one fails, the others end and do not use a closed client
            tasks = {
                name: group.create_task(client.instant(question, window.end_seconds))
                for name, (_, question) in questions.items()
            }
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    found = _uses({name: by_labels(task.result(), questions[name][0]) for name, task in tasks.items()})
    return tuple(one for one in found if filters.keep(one.owner))


def _questions(window: Window, cluster: str) -> Mapping[str, tuple[tuple[str, ...], str]]:
    """Return labels and query by name of the answer; ``max`` merges Prometheus servers that recorded the same."""
    use, device, owner = (cluster, *_DEVICE, *_OWNER), (cluster, *_DEVICE), (cluster, *_OWNER)
    # One second less, because an engine with closed ranges would include the previous hour.
    over, day = f"{window.seconds - 1}s", f"{min(window.seconds, DAY_SECONDS) - 1}s"
    measured, active, memory, estimated = (
        f'workload_device:gpu_use:facts{{fact="{fact}"}}'
        for fact in ("measured", "active", "memory_used_bytes", "estimated")
    )
    of_uses = {
        "held": f"count_over_time({EVIDENCE}[{over}])",
        # The median ignores hours that were held in part, and hours in which pods replaced each other.
        "share": f"quantile_over_time(0.5, {EVIDENCE}[{over}])",
        "measured": f"sum_over_time({measured}[{over}])",
        "active": f"sum_over_time({active}[{over}])",
        "p95": f"quantile_over_time(0.95, {active}[{over}])",
        "peak": f"max_over_time({active}[{over}])",
        "memory": f"max_over_time({memory}[{over}])",
        "estimated": f"max_over_time({estimated}[{over}]) > 0",
    }
    # Only workloads that hold a device now; the others, mostly short tasks, are far more.
    here = f"and on ({', '.join(owner)}) last_over_time({EVIDENCE}[{_NEWEST}])"
    off = "workload:gpu_alerts_off_until_seconds:max"
    asked = {
        **{name: (use, f"{query} {here}") for name, query in of_uses.items()},
        # Only devices that are held now; a workload may have held others.
        "of_day": (use, f"count_over_time({EVIDENCE}[{day}]) and last_over_time({EVIDENCE}[{_NEWEST}])"),
        "total": (device, f"last_over_time(workload_device:gpu_memory_total_bytes:max[{over}])"),
        "reserved": (owner, 'last_over_time(workload:gpu_policy:info{policy="reserved"}[1h]) > 0'),
        "inference": (owner, 'last_over_time(workload:gpu_policy:info{policy="inference"}[1h]) > 0'),
        "muted": (owner, f"last_over_time({off}[1h]) > {window.end_seconds}"),
        # Each value covers the previous hour; an owner that holds nothing now has no value.
        **{
            name: ((*owner, "resource"), f"sum_over_time({series}[{over}:1h])") for name, series in _BY_RESOURCE.items()
        },
    }
    return {name: (labels, f"max by ({', '.join(labels)}) ({query})") for name, (labels, query) in asked.items()}


def _uses(answers: Mapping[str, Mapping[_Key, float]]) -> Iterable[HeldDevice]:
    by_resource: dict[str, dict[_Key, dict[str, float]]] = {name: {} for name in _BY_RESOURCE}
    for name, of_owners in by_resource.items():
        for (*whose, resource), seconds in answers[name].items():
            of_owners.setdefault(tuple(whose), {})[resource] = seconds
    for key, held_hours in answers["held"].items():
        cluster, node, _, uuid, gpu_instance, mig_profile, model, namespace, kind, workload, team = key
        owner = (cluster, namespace, kind, workload, team)
        share = answers["share"].get(key, 0.0)
        if share <= 0 or owner in answers["muted"]:
            continue
        measured = answers["measured"].get(key, 0.0)
        mode = "mig" if gpu_instance or mig_profile else "exclusive" if share >= _WHOLE else "shared"
        yield HeldDevice(
            owner=LineKey(cluster, node, "", namespace, kind, workload, team, "", model, mode),
            uuid=uuid,
            mig_profile=mig_profile,
            share_ratio=min(1.0, share),
            held_hours=held_hours,
            measured_hours=min(held_hours, measured / share),
            mean_ratio=min(1.0, answers["active"].get(key, 0.0) / measured) if measured > 0 else None,
            # A partly measured hour counts its measured part. A missing value means no activity.
            p95_ratio=min(1.0, answers["p95"].get(key, 0.0) / share) if measured > 0 else None,
            peak_ratio=min(1.0, answers["peak"].get(key, 0.0) / share) if measured > 0 else None,
            peak_memory_bytes=answers["memory"].get(key),
            memory_total_bytes=answers["total"].get(key[:7]),
            estimated=key in answers["estimated"],
            still_held=answers["of_day"].get(key, 0.0) >= _DAY_HOURS,
            policy="reserved" if owner in answers["reserved"] else "inference" if owner in answers["inference"] else "",
            bottlenecks=by_resource["bottlenecks"].get(owner, {}),
            resource_uses=by_resource["resource_uses"].get(owner, {}),
        )


# Thresholds; docs/cost.md gives the reason of each.
LEAST_COVERAGE_RATIO = 0.9
"""Least part of the held hours with measured activity."""
LEAST_HELD_HOURS = 24.0
IDLE_PEAK_RATIO = 0.01
"""A device is idle if its busiest hour is below this ratio."""
ALMOST_ALL_RATIO = 0.9
"""Least part of the profiled active time that a class needs for a recommendation."""


GIB = 1 << 30
_USABLE_RATIO = 0.88
"""Usable part of the memory in a profile's name; up to an eighth is missing (1g.5gb of an A100 has 4.75 GiB)."""


class Profile(NamedTuple):
    """A MIG profile."""

    name: str
    compute_ratio: float
    """Part of the GPU's compute slices."""
    memory_bytes: float
    """Memory that every instance of the profile has at least."""
    share_ratio: float
    """Share of the GPU, which determines the cost: the larger of its parts of compute and memory slices."""


def _seven(*gigabytes: int) -> tuple[Profile, ...]:
    """Return the profiles of a GPU with seven compute and eight memory slices, by the memory of 1g, 2g, 3g and 7g."""
    one, two, half, whole = gigabytes
    shapes = ((1, 1, one), (1, 2, two), (2, 2, two), (3, 4, half), (4, 4, half), (7, 8, whole))
    return tuple(_profile(compute, memory, size, 7, 8) for compute, memory, size in shapes)


def _profile(compute: int, memory: int, gigabytes: int, compute_slices: int, memory_slices: int) -> Profile:
    return Profile(
        f"{compute}g.{gigabytes}gb",
        compute / compute_slices,
        gigabytes * GIB * _USABLE_RATIO,
        max(compute / compute_slices, memory / memory_slices),
    )


# Name of the model in the driver, its maximum memory in GiB, its profiles; the first match applies.
_MODELS: tuple[tuple[re.Pattern[str], float, tuple[Profile, ...]], ...] = (
    (re.compile(r"\bA100\b"), 50, _seven(5, 10, 20, 40)),
    (re.compile(r"\bA100\b"), 100, _seven(10, 20, 40, 80)),
    (re.compile(r"\bA30\b"), 30, tuple(_profile(n, n, gb, 4, 4) for n, gb in ((1, 6), (2, 12), (4, 24)))),
    (re.compile(r"\bH100\b"), 85, _seven(10, 20, 40, 80)),
    (re.compile(r"\bH100\b"), 100, _seven(12, 24, 47, 94)),
    (re.compile(r"\bH200\b"), 150, _seven(18, 35, 71, 141)),
    (re.compile(r"\bB200\b"), 200, _seven(23, 45, 90, 180)),
)
_BIG = re.compile(r"\b(?:A100|A800|H100|H800|H20|H200|GH200|B100|B200|GB200|B300|GB300|MI[23]\d\dX?)\b")


def profiles_of(model: str, memory_bytes: float | None, current: str = "") -> tuple[Profile, ...]:
    """Return the profiles of a model, the smallest first; empty for a model without MIG, or with ambiguous memory.

    Args:
        model: Name of the model in NVML.
        memory_bytes: Memory of the device.
        current: Profile of the device if it is an instance; it determines the memory of the model.
    """
    sorts = [(most_gib, profiles) for pattern, most_gib, profiles in _MODELS if pattern.search(model)]
    if not current:
        return next((found for most, found in sorts if memory_bytes is not None and memory_bytes <= most * GIB), ())
    named = [(most, found) for most, found in sorts if plain_name(current) in {profile.name for profile in found}]
    if len(named) > 1:  # 1g.10gb of an A100 is a slice of 80 GB, or two of 40 GB
        size = next((int(text) for text in _SIZE.findall(model)), 0)
        named = [(most, found) for most, found in named if most * 0.7 < size <= most]
    return named[0][1] if named else ()


_SIZE = re.compile(r"(\d+) ?GB\b")


def plain_name(profile: str) -> str:
    """Return the profile without media engines and compute instances: ``3g.40gb`` of ``1c.3g.40gb+me``."""
    return re.sub(r"^\d+c\.|[+-].*$", "", profile)


def is_big(model: str) -> bool:
    """Return whether the model is expensive, so that a smaller one may replace it."""
    return _BIG.search(model) is not None


class Limit(NamedTuple):
    """The limit of a workload while it is active, and its use of each resource."""

    effective_ratio: float
    profiled_ratio: float
    """Part of the active time for which ``effective_ratio`` is known."""
    bottleneck: Bottleneck
    """Most frequent limit in that time."""
    bottleneck_ratio: float
    """Part of that time in which ``bottleneck`` was the limit."""
    uses: Mapping[str, float]
    """Mean use while active, 0-1 of its limit, of each resource, and of ``sm``, the multiprocessors with work. A
    resource is absent if it was recorded for too little of that time."""

    @property
    def is_starved(self) -> bool:
        """Whether almost none of the time was near a limit."""
        return self.bottleneck == Bottleneck.STARVED and self.bottleneck_ratio >= ALMOST_ALL_RATIO


_USED = (*((one.value, "profiled") for one in RESOURCES), ("sm", "sm_profiled"))
"""Key of each resource, and key of the seconds in which it was profiled."""


PAYER: frozenset[Dimension] = frozenset({"cluster", "namespace", "kind", "workload", "team", "model"})


_SERVER_KINDS = frozenset({"InferenceService", "LLMInferenceService", "SeldonDeployment", "NIMService", "RayService"})
_SERVER_NAMES = re.compile(
    r"vllm|triton|tritonserver|text-generation|\btgi\b|sglang|trt-?llm|tensorrt|lmdeploy|\bnim\b|kserve|"
    r"tensorflow|tf-?serving|\btf\b|\bjax\b|ollama|inference",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class HeldDevices:
    """Devices of one model, mode and MIG profile that a workload still holds."""

    payer: LineKey
    """Key with cluster, namespace, kind, workload, team and model."""
    uses: tuple[HeldDevice, ...]
    most_ratio: float = 1.0
    """Cap on activity, for activity that is known to be no work above it."""

    @property
    def model(self) -> str:
        """Name of the model in NVML."""
        return self.payer.model

    @property
    def profile(self) -> str:
        """Plain MIG profile; empty for whole and shared devices."""
        return plain_name(self.uses[0].mig_profile)

    @property
    def whole(self) -> bool:
        """Whether each device is a whole GPU of one holder."""
        return self.uses[0].owner.mode == "exclusive"

    @property
    def gpus(self) -> float:
        """Physical GPUs, weighted by share."""
        return sum(use.share_ratio for use in self.uses)

    @property
    def held_hours(self) -> float:
        """Device-hours."""
        return sum(use.held_hours for use in self.uses)

    @property
    def measured_hours(self) -> float:
        """Device-hours with measured activity."""
        return sum(use.measured_hours for use in self.uses)

    @property
    def coverage_ratio(self) -> float:
        """Measured part of the device-hours."""
        return min(1.0, self.measured_hours / self.held_hours)

    @property
    def mean_ratio(self) -> float:
        """Mean activity of the measured hours."""
        active = (min(use.mean_ratio or 0.0, self.most_ratio) * use.measured_hours for use in self.uses)
        return sum(active) / self.measured_hours

    @property
    def p95_ratio(self) -> float:
        """Activity of the busiest device that 95 % of the hours do not exceed."""
        return min(self.most_ratio, max(use.p95_ratio or 0.0 for use in self.uses))

    @property
    def peak_ratio(self) -> float:
        """Activity of the busiest device in its busiest hour."""
        return min(self.most_ratio, max(use.peak_ratio or 0.0 for use in self.uses))

    @property
    def peak_memory_bytes(self) -> float | None:
        """Highest peak of memory use on a device; ``None`` if the peak of a device is unknown."""
        known = [use.peak_memory_bytes for use in self.uses if use.peak_memory_bytes is not None]
        return max(known) if len(known) == len(self.uses) else None

    @property
    def memory_total_bytes(self) -> float | None:
        """Memory of the smallest device; ``None`` if the memory of a device is unknown."""
        known = [use.memory_total_bytes for use in self.uses if use.memory_total_bytes is not None]
        return min(known) if len(known) == len(self.uses) else None

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """MIG profiles of the model, the smallest first; empty without MIG, or with ambiguous memory."""
        return profiles_of(self.model, self.memory_total_bytes, self.profile)

    @property
    def size(self) -> Profile:
        """Profile of the devices; the whole GPU for devices without a profile."""
        whole = Profile("", 1.0, self.memory_total_bytes or 0.0, 1.0)
        return next((one for one in self.profiles if one.name == self.profile), whole)

    def limit(self, seconds: ByState) -> Limit | None:
        """Return the limit of the workload; ``None`` if too little of its active time was profiled.

        Args:
            seconds: Seconds of these devices in the ledger.
        """
        effective, profiled = seconds.effective_ratio, seconds.profiled_ratio or 0.0
        of_class = {one: self.uses[0].bottlenecks.get(one, 0.0) for one in Bottleneck}
        most = max(of_class, key=of_class.__getitem__)
        if effective is None or profiled < LEAST_COVERAGE_RATIO or not of_class[most]:
            return None
        total = sum(of_class.values())
        used = self.uses[0].resource_uses
        least = LEAST_COVERAGE_RATIO * total
        means = {one: used[one] / used[of] for one, of in _USED if one in used and used.get(of, 0.0) >= least}
        return Limit(effective, profiled, most, of_class[most] / total, means)

    @property
    def is_server(self) -> bool:
        """Whether it may allocate most of a device's memory in advance."""
        if self.payer.kind in _SERVER_KINDS or any(use.policy == "inference" for use in self.uses):
            return True
        return _SERVER_NAMES.search(self.payer.workload) is not None


def lots(uses: Iterable[HeldDevice]) -> Iterator[HeldDevices]:
    """Yield the devices that one workload still holds, grouped by model, MIG profile and mode."""

    def sort(use: HeldDevice) -> tuple[str, str, str]:
        return use.owner.model, plain_name(use.mig_profile), use.owner.mode

    held = sorted((use for use in uses if use.still_held), key=lambda use: (sort(use), use.owner.node, use.uuid))
    for _, of_sort in groupby(held, key=sort):
        several = tuple(of_sort)
        yield HeldDevices(several[0].owner.at(PAYER), several)
