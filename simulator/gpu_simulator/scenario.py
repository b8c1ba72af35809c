"""Computes the ground truth of a simulated node from a plan, as a pure function of time."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from exporter.errors import ConfigError, expected
from exporter.model.fields import Field
from gpu_simulator import activity, cluster, holders, identities, scenario_file
from gpu_simulator.holders import DeviceKey, DeviceTruth, UsePlan, board_uses, device_state
from gpu_simulator.models import NOT_SUPPORTED_IN_MIG_MODE, instance_base_bytes
from gpu_simulator.plan import GpuPlan, IdForm, MigStrategy, NodePlan, XidPlan
from gpu_simulator.truth import GPU_FAULTS, Board, ClusterTruth, GpuTruth, Load, MigTruth, NodeTruth, PodTruth

XIDS_KEPT = 256
"""Number of Xid events of a GPU in a truth, the newest; all readers have read older ones."""

_SUFFIX = ".yaml"
_BUSY = 0.001
_FULL_POWER = 0.92
"""Power of a fully busy GPU, as a part of the power limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A plan with the truth at any time; the same ``t`` always gives the same truth."""

    plan: NodePlan
    source: str = ""
    """Argument of ``load`` with which another process can load the scenario; empty: it exists only in memory."""
    uses: Mapping[DeviceKey, tuple[UsePlan, ...]]
    others: tuple[PodTruth, ...] = ()
    """Pods without devices."""
    slices: tuple[Mapping[str, object], ...] = ()
    """ResourceSlices; the first one is outdated."""

    @property
    def name(self) -> str:
        """Return the name of the scenario: that of a shipped one, or of the file."""
        return self.plan.name

    @property
    def node(self) -> str:
        """Return the name of the node."""
        return self.plan.node

    def at(self, t: float) -> NodeTruth:
        """Return the node ``t`` seconds after the scenario's start.

        Before the start (``t`` < 0) it is the node at the start.
        """
        t = max(0.0, t)
        plan = self.plan
        states = {key: device_state(uses, plan, t) for key, uses in self.uses.items()}
        gpus = tuple(self._gpu(gpu, states, t) for gpu in plan.gpus)
        held = list(holders.holdings(plan, states.values()))
        also_listed = tuple(holders.also_listed(plan, held, (use for uses in self.uses.values() for use in uses), t))
        present = list(cluster.present(plan, t))
        without_devices = [(pod, pod.containers) for pod in self.others]
        without_devices += [(pod, known.sidecars) for known, pod in present]
        return NodeTruth(
            at_seconds=t,
            node=plan.node,
            driver_version=plan.driver_version,
            gpus=gpus,
            holders=tuple(holders.holder_truth(plan, one) for one in held if not one.use.claim.admin),
            other_pods=tuple((pod.namespace, pod.name, one) for pod, names in without_devices for one in names),
            also_listed=also_listed,
            allocatable=self._allocatable(gpus),
            pods=(*(pod for _, pod in present), *cluster.reservations(plan, also_listed), *self.others),
            cluster=ClusterTruth(
                node_labels=plan.node_labels,
                namespaces=plan.namespaces,
                slices=self.slices if t < cluster.STALE_SECONDS else self.slices[1:],
                claims=cluster.claims(plan, held),
                dra_version=plan.dra_version,
            ),
            dcgm=plan.dcgm,
            faults={f.kind: f.parameter for f in plan.faults if f.gpu is None and f.window.occurrence(t)},
        )

    def _gpu(self, gpu: GpuPlan, states: Mapping[DeviceKey, DeviceTruth], t: float) -> GpuTruth:
        instances = tuple(
            _with_load(plan, states.get((gpu.index, position), DeviceTruth()))
            for position, plan in enumerate(gpu.instances)
        )
        state = _board_state(gpu, states) if gpu.mig_enabled else states.get((gpu.index, None), DeviceTruth())
        memory = state.memory_bytes
        if gpu.mig_enabled:
            memory = sum(instance.load.memory_used_bytes for instance in instances)
        model, load = gpu.model, activity.load(state.vector, memory)
        integral = activity.load(state.integral, clamp=False)
        busy = state.processes != () or any(instance.processes for instance in instances)
        power = model.idle_watts + _dynamic(gpu, load)
        has_memory_temp = Field.MEMORY_TEMP not in model.not_supported
        static = {field.name: getattr(gpu, field.name) for field in fields(Board)} | {"instances": instances}
        return GpuTruth(
            **static,
            load=load,
            load_integral=integral,
            processes=() if gpu.mig_enabled else state.processes,
            power_watts=power,
            energy_joules=model.idle_watts * t + _dynamic(gpu, integral),
            gpu_temp_celsius=31 + gpu.index % 4 + round(36 * power / model.power_limit_watts),
            memory_temp_celsius=36 + gpu.index % 3 + round(38 * load.dram) if has_memory_temp else None,
            sm_clock_mhz=model.max_sm_clock_mhz if busy else model.idle_sm_clock_mhz,
            mem_clock_mhz=model.max_mem_clock_mhz,
            performance_state=0 if busy else model.idle_performance_state,
            clock_event_reasons=0 if max(load.engine, load.utilisation) > _BUSY else 1,
            overrides=_overrides(gpu, t),
            fault=next((f.kind for f in self.plan.faults if f.gpu == gpu.index and f.window.occurrence(t)), None),
            xids=_xids(self.plan.xids, gpu.index, t),
        )

    def _allocatable(self, gpus: tuple[GpuTruth, ...]) -> dict[str, tuple[str, ...]]:
        plugin = self.plan.plugin
        listed: dict[str, tuple[str, ...]] = {}
        for gpu, truth in zip(self.plan.gpus, gpus, strict=True):
            if truth.fault in GPU_FAULTS or plugin.ids is IdForm.DRA:
                continue
            whole = not gpu.mig_enabled or plugin.mig_strategy is MigStrategy.NONE
            placeholders = plugin.ids in (IdForm.HAMI, IdForm.VOLCANO)
            replicas = range(max(gpu.replicas, gpu.splits)) if gpu.replicas > 1 or placeholders else ()
            for instance in (None,) if whole else gpu.instances:
                resource = identities.resource_name(self.plan, gpu, instance)
                ids = identities.device_ids(self.plan, gpu, instance, replicas)
                listed[resource] = listed.get(resource, ()) + ids
        return listed


def shipped() -> tuple[str, ...]:
    """Return the names of the scenarios of the package, in order."""
    return tuple(sorted(path.name.removesuffix(_SUFFIX) for path in _folder().iterdir() if path.name.endswith(_SUFFIX)))


def load(name_or_path: str) -> Scenario:
    """Return a shipped scenario by name, or one from a YAML file.

    Raises:
        ConfigError: The scenario is unknown, the file cannot be read, or it has mistakes, each with file and line.
    """
    if name_or_path in shipped():
        text = (_folder() / f"{name_or_path}{_SUFFIX}").read_text(encoding="utf-8")
        return build(scenario_file.parse(text, source=f"{name_or_path}{_SUFFIX}", is_ours=True), name_or_path)
    path = Path(name_or_path)
    if not path.suffix and len(path.parts) == 1 and not path.is_file():
        fix = expected(name_or_path, shipped(), f"{', '.join(shipped())}, or a file")
        raise ConfigError(f"unknown scenario {name_or_path!r}{fix}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name_or_path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name_or_path}: is not UTF-8 text (byte {error.start}); expected: YAML") from error
    return build(scenario_file.parse(text, source=name_or_path), str(path.resolve()))


def _folder() -> Traversable:
    return resources.files("gpu_simulator").joinpath("scenarios")


def build(plan: NodePlan, source: str = "") -> Scenario:
    """Return a scenario of a checked plan."""
    plan = cluster.scheduled(plan)
    return Scenario(
        plan=plan, source=source, uses=board_uses(plan), others=cluster.others(plan), slices=cluster.slices(plan)
    )


def _with_load(instance: MigTruth, state: DeviceTruth) -> MigTruth:
    return replace(
        instance,
        load=activity.load(state.vector, instance_base_bytes(instance.memory_slices) + state.memory_bytes),
        load_integral=activity.load(state.integral, clamp=False),
        processes=state.processes,
    )


def _board_state(gpu: GpuPlan, states: Mapping[DeviceKey, DeviceTruth]) -> DeviceTruth:
    """Return the state of a partitioned board from its instances, weighted with their compute slices."""
    parts = [
        (plan.compute_slices / gpu.model.compute_slices, states.get((gpu.index, position), DeviceTruth()))
        for position, plan in enumerate(gpu.instances)
    ]
    return DeviceTruth(
        vector=activity.combine([(weight, state.vector) for weight, state in parts]),
        integral=activity.combine([(weight, state.integral) for weight, state in parts]),
    )


def _dynamic(gpu: GpuPlan, load: Load) -> float:
    """Return the power above idle, a linear function, so that it also converts the integral of the load to joules."""
    span = gpu.model.power_limit_watts * _FULL_POWER - gpu.model.idle_watts
    return span * (0.3 * load.engine + 0.45 * load.sm + 0.2 * load.dram + 0.05 * load.encode)


def _overrides(gpu: GpuPlan, t: float) -> dict[Field, int | float | None]:
    values: dict[Field, int | float | None] = {}
    if gpu.mig_enabled:
        values.update(dict.fromkeys(NOT_SUPPORTED_IN_MIG_MODE))
    for override in gpu.overrides:
        if override.window.occurrence(t):
            values.update(override.values)
    return values


def _xids(plans: tuple[XidPlan, ...], index: int, t: float) -> tuple[tuple[float, int], ...]:
    events: list[tuple[float, int]] = []
    for plan in plans:
        if plan.gpu != index or plan.at_seconds > t:
            continue
        if plan.every_seconds is None:
            events.append((plan.at_seconds, plan.code))
            continue
        last = int((t - plan.at_seconds) // plan.every_seconds)
        numbers = range(max(0, last + 1 - XIDS_KEPT), last + 1)
        events += [(plan.at_seconds + number * plan.every_seconds, plan.code) for number in numbers]
    return tuple(sorted(events)[-XIDS_KEPT:])
