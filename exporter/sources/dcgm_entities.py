"""Which GPUs and MIG instances the engine has, who they are, and in which condition: identities as NVML tells them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from exporter.model import DeviceState, Field, Gpu
from exporter.sources._libdcgm import GPU, NONE
from exporter.sources.dcgm_engine import Engine
from exporter.sources.dcgm_live import Live
from exporter.sources.dcgm_mig import NAME, UUID, Instance, Instances
from exporter.sources.dcgm_values import Entity, Value, whole

NVML_INDEX, MINOR, BUS_ID, MIG_MODE, MIG_MAX_SLICES = 52, 55, 57, 67, 69
_TEXTS = (
    Field.BRAND,
    Field.SERIAL,
    Field.OEM_INFOROM_VER,
    Field.ECC_INFOROM_VER,
    Field.POWER_INFOROM_VER,
    Field.INFOROM_IMAGE_VER,
    Field.VBIOS_VERSION,
)
_IDENTITY = (NAME, NVML_INDEX, UUID, MINOR, BUS_ID, MIG_MODE, MIG_MAX_SLICES, int(Field.FB_TOTAL))
_WHO = (UUID, MIG_MODE)
_NODE: Entity = (NONE, 0)
_MIB = 2**20
_FULL_COMPUTE_SLICES, _FULL_MEMORY_SLICES = 7, 8
_STATES = {
    0: (DeviceState.MISSING, "not_enumerated"),
    1: (DeviceState.UP, ""),
    2: (DeviceState.FAILED, "gpu_not_supported"),
    3: (DeviceState.FAILED, "inaccessible"),
    4: (DeviceState.LOST, "gpu_is_lost"),
    5: (DeviceState.UP, ""),
    6: (DeviceState.FAILED, "disabled"),
    7: (DeviceState.MISSING, "detached"),
}
"""By DcgmEntityStatus_t; 5 is a GPU made up for a test."""


Place = tuple[str, int | None, int | None]
"""UUID of a GPU, and NVML's ids of a GPU instance and compute instance; ``None`` for what holds all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU as the engine has it; ``gpu_id`` is the engine's own number and holds for one connection."""

    gpu_id: int
    gpu: Gpu
    state: DeviceState = DeviceState.UP
    reason: str = ""
    instances: tuple[Instance, ...] = ()

    @property
    def entity(self) -> Entity:
        """The GPU as a whole."""
        return GPU, self.gpu_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All devices, and of which GPU and GPU instance an entity is a part: for events."""

    devices: tuple[Device, ...] = ()
    places: Mapping[Entity, Place] = field(default_factory=dict)
    listed: int = 0
    """GPUs that the engine lists, also those of which it gives no UUID."""


class Entities:
    """Follows the engine's entities over one connection.

    Args:
        engine: To ask.
        texts: Text fields to read of every GPU, beside those that NVML tells too.
        node_fields: Fields of no entity (driver version, ...) to read.
        count: Called with the reason of everything that goes wrong.
    """

    def __init__(
        self, engine: Engine, *, texts: Iterable[int], node_fields: Iterable[int], count: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._live = Live(engine, count)
        self._texts = tuple(sorted({*map(int, _TEXTS), *texts}))
        self._node_fields = tuple(sorted({int(Field.DRIVER_VERSION), int(Field.NVML_VERSION), *node_fields}))
        self._count = count
        self._instances = Instances(engine, self._live, count)
        self._gpus: dict[int, Gpu] = {}
        self._present: set[int] = set()
        self._told: dict[int, Mapping[int, Value]] = {}
        self.node_values: Mapping[int, Value] = {}
        """What is the same for all devices, by field id."""

    def look(self, *, anew: bool = False) -> Layout:
        """Return the devices as they are now; who they are is read again where it may have changed.

        Args:
            anew: Read everything again, though the devices are the same.

        Raises:
            SourceError: the engine is gone, or does not list its GPUs.
        """
        present = self._engine.supported_gpus()
        # The driver numbers its GPUs again when one comes or goes.
        anew, self._present = anew or set(present) != self._present, set(present)
        changed = self._follow_gpus(present, anew=anew)
        if not self.node_values or anew:
            self.node_values = self._read_node(present)
        self._instances.follow(self._gpus, anew=anew or changed)
        devices = (self._device(gpu_id, present) for gpu_id in self._gpus)
        places: dict[Entity, Place] = {(GPU, gpu_id): (gpu.uuid, None, None) for gpu_id, gpu in self._gpus.items()}
        for entity, gpu_id, instance_id, part in self._instances.places():
            if gpu_id in self._gpus:
                places[entity] = (self._gpus[gpu_id].uuid, instance_id, part)
        ordered = tuple(sorted(devices, key=lambda one: one.gpu.index))
        return Layout(devices=ordered, places=places, listed=len(present))

    def _read_node(self, present: Sequence[int]) -> Mapping[int, Value]:
        """Ask the engine, or its first GPU where it knows no entity for what is nobody's."""
        for entity in (_NODE, *((GPU, gpu_id) for gpu_id in present[:1])):
            if told := self._live.read([entity], self._node_fields)[entity]:
                return told
        return {}

    def _device(self, gpu_id: int, present: Sequence[int]) -> Device:
        gpu, status = self._gpus[gpu_id], self._engine.gpu_status(gpu_id)
        state, reason = _STATES.get(1 if status is None else status, (DeviceState.FAILED, "unknown_status"))
        if state is DeviceState.UP and gpu_id not in present:
            state, reason = DeviceState.MISSING, "not_enumerated"
        instances = self._instances.of(gpu_id) if state is DeviceState.UP and gpu.mig_enabled else ()
        return Device(gpu_id=gpu_id, gpu=gpu, state=state, reason=reason, instances=instances)

    def _follow_gpus(self, present: Sequence[int], *, anew: bool) -> bool:
        """Read who a GPU is where it is new, or another one than before, or was switched to MIG or back, or anew."""
        changed = False
        told = self._live.read([(GPU, gpu_id) for gpu_id in present], _WHO)
        for gpu_id in present:
            known, now = self._gpus.get(gpu_id), told[GPU, gpu_id]
            same = (
                known is not None
                and now.get(UUID, known.uuid) == known.uuid
                and bool(now.get(MIG_MODE, int(known.mig_enabled))) == known.mig_enabled
            )
            if same and not anew:
                continue
            gpu = self._identity(gpu_id)
            if gpu is None:
                self._count("dcgm_nameless_gpu")
                continue
            for other, one in list(self._gpus.items()):
                # The engine may give a GPU that comes back another number.
                if one.uuid == gpu.uuid:
                    del self._gpus[other]
            changed = changed or gpu != known
            self._gpus[gpu_id] = gpu
        return changed

    def _identity(self, gpu_id: int) -> Gpu | None:
        entity = (GPU, gpu_id)
        now = self._live.read([entity], (*_IDENTITY, *self._texts))[entity]
        before = self._told.get(gpu_id, {})
        # What a GPU that is being reset does not tell at this moment is as it was.
        told = {**before, **now} if now.get(UUID, before.get(UUID)) == before.get(UUID) else now
        self._told[gpu_id] = told
        uuid, slices = told.get(UUID), whole(told.get(MIG_MAX_SLICES)) or 0
        if not isinstance(uuid, str):
            return None
        index, memory_mib = whole(told.get(NVML_INDEX)), whole(told.get(int(Field.FB_TOTAL)))
        return Gpu(
            uuid=uuid,
            index=gpu_id if index is None else index,
            minor=whole(told.get(MINOR)),
            model=str(told.get(NAME, "unknown")),
            pci_bus_id=str(told.get(BUS_ID, "")).upper(),
            mig_enabled=told.get(MIG_MODE) == 1,
            compute_slices=slices,
            memory_slices=_FULL_MEMORY_SLICES if slices == _FULL_COMPUTE_SLICES else slices,
            memory_total_bytes=memory_mib * _MIB if memory_mib else None,
            labels={Field(one): str(told[one]) for one in self._texts if one in told},
        )
