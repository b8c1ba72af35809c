"""A simulated node as a pure function of time: from a plan to the ground truth at any instant."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from exporter.errors import ConfigError
from exporter.model import Field
from gpu_simulator import activity, cluster, holders, identities, scenario_file
from gpu_simulator.cluster import KnownPod
from gpu_simulator.holders import DeviceState, DeviceUse, board_uses, device_state
from gpu_simulator.models import IDLE_SM_CLOCK_MHZ, NOT_SUPPORTED_IN_MIG_MODE, instance_base_bytes
from gpu_simulator.plan import FaultPlan, GpuPlan, IdForm, MigStrategy, NodePlan, XidPlan
from gpu_simulator.truth import ClusterTruth, Fault, GpuTruth, Load, MigTruth, NodeTruth, PodTruth

XIDS_KEPT = 256
"""Newest Xid events of a GPU that a truth lists; the ones before are long read by everybody."""

_SUFFIX = ".yaml"
_UNHEALTHY = frozenset({Fault.GPU_LOST, Fault.RESET_REQUIRED, Fault.UNKNOWN_ERROR, Fault.GPU_ABSENT})
_BUSY = 0.001
_FULL_POWER = 0.92
"""Part of the power limit that a fully busy GPU draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A plan made ready to be asked; the same ``t`` always gets the same answer."""

    plan: NodePlan
    source: str = ""
    """What ``load`` was asked for, so that another process can load the same; empty for one made in memory."""
    uses: Mapping[tuple[int, int | None], tuple[DeviceUse, ...]]
    """Who uses each device, by (GPU index, position in its MIG layout)."""
    known: tuple[KnownPod, ...] = ()
    others: tuple[PodTruth, ...] = ()
    """Pods without devices."""
    slices: tuple[Mapping[str, object], ...] = ()
    """ResourceSlices, the first of which is out of date."""

    @property
    def name(self) -> str:
        """Of the scenario: a shipped name or the file's."""
        return self.plan.name

    @property
    def node(self) -> str:
        """Name of the node."""
        return self.plan.node

    def at(self, t: float) -> NodeTruth:
        """The node ``t`` seconds after the scenario's start; pure.

        Before the start (``t`` < 0) it is as at the start.
        """
        t = max(0.0, t)
        states = {key: device_state(uses, self.plan, t) for key, uses in self.uses.items()}
        gpus = tuple(self._gpu(gpu, states, t) for gpu in self.plan.gpus)
        held = list(holders.holdings(self.plan, states))
        also_listed = tuple(holders.also_listed(self.plan, held, self.uses, t))
        present = list(cluster.present(self.plan.node, self.known, t))
        reservations = tuple(cluster.reservations(self.plan, also_listed))
        return NodeTruth(
            at_seconds=t,
            node=self.plan.node,
            driver_version=self.plan.driver_version,
            gpus=gpus,
            holders=tuple(holders.holders(self.plan, held, states)),
            other_pods=tuple(cluster.without_devices(self.others, present)),
            also_listed=also_listed,
            allocatable=self._allocatable(gpus),
            pods=(*(pod for _, pod in present), *reservations, *self.others),
            cluster=ClusterTruth(
                node_labels=self.plan.node_labels,
                namespaces=self.plan.namespaces,
                slices=self.slices if t < cluster.STALE_SECONDS else self.slices[1:],
                claims=cluster.claims(self.plan, held),
                dra_version=self.plan.dra_version,
            ),
            dcgm=self.plan.dcgm,
            faults={f.kind: f.parameter for f in self.plan.faults if f.gpu is None and f.window.occurrence(t)},
        )

    def _gpu(self, gpu: GpuPlan, states: Mapping[tuple[int, int | None], DeviceState], t: float) -> GpuTruth:
        instances = tuple(
            _with_load(plan, states.get((gpu.index, position), DeviceState()))
            for position, plan in enumerate(gpu.instances)
        )
        state = _board_state(gpu, states) if gpu.mig_enabled else states.get((gpu.index, None), DeviceState())
        memory = state.memory_bytes
        if gpu.mig_enabled:
            memory = sum(instance.load.memory_used_bytes for instance in instances)
        load = activity.load(state.vector, memory)
        integral = activity.load(state.integral, clamp=False)
        busy = state.processes != () or any(instance.processes for instance in instances)
        power = gpu.model.idle_watts + _dynamic(gpu, load)
        return GpuTruth(
            index=gpu.index,
            minor=gpu.minor,
            uuid=gpu.uuid,
            pci_bus_id=gpu.pci_bus_id,
            serial=gpu.serial,
            model=gpu.model,
            load=load,
            load_integral=integral,
            mig_enabled=gpu.mig_enabled,
            instances=instances,
            processes=() if gpu.mig_enabled else state.processes,
            power_watts=power,
            energy_joules=gpu.model.idle_watts * t + _dynamic(gpu, integral),
            gpu_temp_celsius=31 + gpu.index % 4 + round(36 * power / gpu.model.power_limit_watts),
            memory_temp_celsius=None
            if Field.MEMORY_TEMP in gpu.model.not_supported
            else 36 + gpu.index % 3 + round(38 * load.dram),
            sm_clock_mhz=gpu.model.max_sm_clock_mhz if busy else IDLE_SM_CLOCK_MHZ[gpu.model_key],
            mem_clock_mhz=gpu.model.max_mem_clock_mhz,
            performance_state=8 if gpu.model_key == "t4" and not busy else 0,
            clock_event_reasons=0 if max(load.engine, load.utilisation) > _BUSY else 1,
            overrides=_overrides(gpu, t),
            fault=_gpu_fault(self.plan.faults, gpu.index, t),
            xids=_xids(self.plan.xids, gpu.index, t),
        )

    def _allocatable(self, gpus: tuple[GpuTruth, ...]) -> dict[str, tuple[str, ...]]:
        plugin = self.plan.plugin
        if plugin.ids is IdForm.DRA:
            return {}
        listed: dict[str, tuple[str, ...]] = {}
        for gpu, truth in zip(self.plan.gpus, gpus, strict=True):
            if truth.fault in _UNHEALTHY:
                continue
            whole = not gpu.mig_enabled or plugin.mig_strategy is MigStrategy.NONE
            placeholders = plugin.ids in (IdForm.HAMI, IdForm.VOLCANO)
            replicas = range(max(gpu.replicas, gpu.splits)) if gpu.replicas > 1 or placeholders else ()
            for instance in (None,) if whole else gpu.instances:
                resource = identities.resource_name(plugin, gpu, instance)
                ids = identities.device_ids(plugin, self.plan.node, gpu, instance, replicas)
                listed[resource] = listed.get(resource, ()) + ids
        return listed


def shipped() -> tuple[str, ...]:
    """Names of the scenarios that come with the package, in order."""
    return tuple(sorted(path.name.removesuffix(_SUFFIX) for path in _folder().iterdir() if path.name.endswith(_SUFFIX)))


def load(name_or_path: str) -> Scenario:
    """A shipped scenario by name, or one from a YAML file.

    Raises:
        ConfigError: no such scenario, a file that cannot be read, or all the mistakes in it by file and line.
    """
    if name_or_path in shipped():
        text = (_folder() / f"{name_or_path}{_SUFFIX}").read_text(encoding="utf-8")
        return build(scenario_file.parse(text, source=f"{name_or_path}{_SUFFIX}"), name_or_path)
    path = Path(name_or_path)
    if not path.suffix and len(path.parts) == 1 and not path.is_file():
        near = difflib.get_close_matches(name_or_path, shipped(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"scenario {name_or_path!r} is none{hint}; allowed: {', '.join(shipped())}, or a file")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{name_or_path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name_or_path}: is not UTF-8 text (byte {error.start}); a scenario is YAML") from error
    return build(scenario_file.parse(text, source=name_or_path), str(path.resolve()))


def _folder() -> Traversable:
    return resources.files("gpu_simulator").joinpath("scenarios")


def build(plan: NodePlan, source: str = "") -> Scenario:
    """Make a checked plan ready to be asked."""
    return Scenario(
        plan=plan,
        source=source,
        uses=board_uses(plan),
        known=cluster.known_pods(plan),
        others=cluster.others(plan),
        slices=cluster.slices(plan),
    )


def _with_load(instance: MigTruth, state: DeviceState) -> MigTruth:
    return replace(
        instance,
        load=activity.load(state.vector, instance_base_bytes(instance.memory_slices) + state.memory_bytes),
        load_integral=activity.load(state.integral, clamp=False),
        processes=state.processes,
    )


def _board_state(gpu: GpuPlan, states: Mapping[tuple[int, int | None], DeviceState]) -> DeviceState:
    """A partitioned board as its instances make it, each weighted with its compute slices."""
    parts = [
        (plan.compute_slices / gpu.model.compute_slices, states.get((gpu.index, position), DeviceState()))
        for position, plan in enumerate(gpu.instances)
    ]
    return DeviceState(
        vector=activity.combine([(weight, state.vector) for weight, state in parts]),
        integral=activity.combine([(weight, state.integral) for weight, state in parts]),
    )


def _dynamic(gpu: GpuPlan, load: Load) -> float:
    """Watts above idle; linear, so that the same arithmetic turns the load's integral into joules."""
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


def _gpu_fault(faults: tuple[FaultPlan, ...], index: int, t: float) -> Fault | None:
    return next((f.kind for f in faults if f.gpu == index and f.window.occurrence(t)), None)


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
