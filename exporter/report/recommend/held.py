"""What a workload holds, sort by sort of device, and whether enough is known of it to suggest anything."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from exporter.report.recommend.prices import Payer
from exporter.report.recommend.profiles import plain_name
from exporter.report.recommend.settings import AdviceSettings
from exporter.report.recommend.values import DeviceUse

_WHOLE = 0.999
_SERVER_KINDS = frozenset({"InferenceService", "LLMInferenceService", "SeldonDeployment", "NIMService", "RayService"})
_SERVER_NAMES = re.compile(
    r"vllm|triton|tritonserver|text-generation|\btgi\b|sglang|trt-?llm|tensorrt|lmdeploy|\bnim\b|kserve|"
    r"tensorflow|tf-?serving|\btf\b|\bjax\b|ollama|inference",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Lot:
    """Devices of one sort that a workload still holds: of one model, and whole, of one MIG profile, or shared parts."""

    payer: Payer
    uses: tuple[DeviceUse, ...]

    @property
    def model(self) -> str:
        """As the driver names it."""
        return self.payer.model

    @property
    def profile(self) -> str:
        """MIG profile, plainly; empty of whole devices and of shared parts."""
        return plain_name(self.uses[0].mig_profile)

    @property
    def whole(self) -> bool:
        """Whether each is a GPU of its own."""
        return _sort(self.uses[0])[2]

    @property
    def gpus(self) -> float:
        """Physical GPUs, by share."""
        return sum(use.share_ratio for use in self.uses)

    @property
    def held_hours(self) -> float:
        """Device-hours."""
        return sum(use.held_hours for use in self.uses)

    @property
    def coverage_ratio(self) -> float:
        """Part of them whose activity was measured."""
        return min(1.0, sum(use.measured_hours for use in self.uses) / self.held_hours)

    @property
    def mean_ratio(self) -> float:
        """Activity on the mean of the measured hours."""
        measured = sum(use.measured_hours for use in self.uses)
        return sum((use.mean_ratio or 0.0) * use.measured_hours for use in self.uses) / measured

    @property
    def p95_ratio(self) -> float:
        """Of the busiest device."""
        return max(use.p95_ratio or 0.0 for use in self.uses)

    @property
    def peak_ratio(self) -> float:
        """Of the busiest device in its busiest hour."""
        return max(use.peak_ratio or 0.0 for use in self.uses)

    @property
    def peak_memory_bytes(self) -> float | None:
        """Of the fullest device; ``None`` where one is not known."""
        return _largest(use.peak_memory_bytes for use in self.uses)

    @property
    def memory_total_bytes(self) -> float | None:
        """Of the smallest device; ``None`` where one is not known."""
        known = [use.memory_total_bytes for use in self.uses]
        return None if None in known else min(total for total in known if total is not None)

    @property
    def is_server(self) -> bool:
        """Whether it may take most of a device's memory whatever it does with it."""
        if self.payer.kind in _SERVER_KINDS or any(use.policy == "inference" for use in self.uses):
            return True
        return _SERVER_NAMES.search(self.payer.workload) is not None

    def part(self, uses: Iterable[DeviceUse]) -> "Lot":
        """Some of its devices."""
        return Lot(self.payer, tuple(uses))


def lots(uses: Sequence[DeviceUse]) -> Iterator[Lot]:
    """What is still held of one workload's uses, in a settled order."""
    sorts: dict[tuple[str, str, bool], list[DeviceUse]] = {}
    for use in uses:
        if use.still_held:
            sorts.setdefault(_sort(use), []).append(use)
    for (model, _, _), of_sort in sorted(sorts.items()):
        first = of_sort[0]
        payer = Payer(first.cluster, first.namespace, first.kind, first.workload, first.team, model)
        yield Lot(payer, tuple(sorted(of_sort, key=lambda use: (use.node, use.uuid))))


def trusted(use: DeviceUse, settings: AdviceSettings) -> bool:
    """Whether its figures say enough: measured for itself, for most of the time, over a day at least."""
    known = None not in (use.mean_ratio, use.p95_ratio, use.peak_ratio)
    return (
        known
        and not use.estimated
        and use.held_hours >= settings.least_held_hours
        and use.measured_hours >= settings.least_coverage_ratio * use.held_hours
    )


def idle(use: DeviceUse, settings: AdviceSettings) -> bool:
    """Whether it was known to do nothing, hour by hour."""
    return (
        not use.estimated
        and use.peak_ratio is not None
        and use.peak_ratio < settings.idle_peak_ratio
        and use.measured_hours >= settings.least_coverage_ratio * use.held_hours
    )


def _sort(use: DeviceUse) -> tuple[str, str, bool]:
    instance = bool(use.gpu_instance or use.mig_profile)
    return use.model, plain_name(use.mig_profile), not instance and use.share_ratio >= _WHOLE


def _largest(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else max(value for value in known if value is not None)
