"""The DCGM fields that NVML answers too: id, names of each era, types, units and how to convert between eras.

Names are never trusted for a unit: DCGM 4.6 calls id 203 ``DCGM_FI_DEV_GPU_UTIL_RATIO`` and means percent; 4.7
gives the same name to id 1613 and means 0..1. Here that name has its 4.9-release meaning, 0..1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from exporter.metrics.text_format import Kind
from exporter.model import DeviceView, Field, Holder, Snapshot


class Era(StrEnum):
    """Whose names and units: dcgm-exporter up to 4.8 (``LEGACY``), or 4.9 (``NEW``)."""

    LEGACY = "legacy"
    NEW = "4.9"


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmField:
    """One field in every spelling. Values arrive in the legacy unit; ``times`` and ``per`` lead to the 4.9 unit."""

    field: Field
    legacy_name: str
    canonical_name: str
    """Of DCGM 4.6: same id and unit as the legacy name."""
    new_name: str | None
    """Of dcgm-exporter 4.9; ``None`` where the new field cannot be derived from what is measured."""
    new_id: int
    kind: Kind
    unit: str
    new_unit: str
    times: int
    per: int
    whole: bool
    """An integer in the legacy era."""
    new_whole: bool
    per_instance: bool
    """Measured on a MIG instance; else a value of the whole board, which is never copied to its instances."""
    default: bool
    """In dcgm-exporter's default file up to 4.8."""
    new_default: bool
    first_name: str = ""
    """In dcgm-exporter's 1.x-compatibility file; empty where that lacks it."""
    help: str

    @property
    def is_profiling(self) -> bool:
        """Whether GPM or DCGM's profiling module measures it."""
        return self.legacy_name.startswith("DCGM_FI_PROF_")

    def name(self, era: Era) -> str | None:
        """Metric name in an era."""
        return self.legacy_name if era is Era.LEGACY else self.new_name

    def number(self, era: Era) -> int:
        """Id in an era; 4.7 has new ones where the unit is another."""
        return int(self.field) if era is Era.LEGACY else self.new_id

    def converter(self, era: Era) -> Callable[[float], int | float]:
        """What turns a value in the legacy unit into what the era shows; a part of a whole number stays a fraction."""
        if era is Era.LEGACY:
            return _whole_if_exact if self.whole else float
        times, per = self.times, self.per
        if self.new_whole:
            return lambda value: (
                value * times // per if isinstance(value, int) else _whole_if_exact(value * times / per)
            )
        return lambda value: value * times / per


def _whole_if_exact(value: float) -> int | float:
    if isinstance(value, int):
        return value
    return int(value) if value.is_integer() else value


def parse_field(columns: str, text: str) -> DcgmField:
    """Read a field from the columns of ``dcgm_fields.txt`` and its help."""
    number, legacy, canonical, unit, flags, *new = (column.strip() for column in columns.split("|"))
    kind, *rest = flags.split()
    same = PREFIX + (legacy if canonical == "-" else canonical)
    newer = [*new[0].split(" ", 4), ""][:5] if new else (number, same, "*1", "", unit)
    new_id, new_name, scale, new_type, new_unit = newer
    return DcgmField(
        field=Field(int(number)),
        legacy_name=PREFIX + legacy,
        canonical_name=same,
        new_name=None if "not49" in rest else PREFIX + new_name.removeprefix(PREFIX),
        new_id=int(new_id),
        kind=Kind(kind),
        unit=unit,
        new_unit=new_unit,
        times=int(scale[1:]) if scale[0] == "*" else 1,
        per=int(scale[1:]) if scale[0] == "/" else 1,
        whole="float" not in rest,
        new_whole=new_type == "int" if new_type else "float" not in rest,
        per_instance="mig" in rest,
        default="default" in rest,
        first_name=next((flag.removeprefix("1.x=") for flag in rest if flag.startswith("1.x=")), ""),
        new_default=("default" in rest and "not49" not in rest) or "default49" in rest,
        help=text,
    )


PREFIX = "DCGM_FI_"


def table_lines(name: str) -> list[str]:
    """Return the lines of a table in this folder, without its comments."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if not line.startswith("#")]


_LINES = table_lines("dcgm_fields.txt")

TABLE: tuple[DcgmField, ...] = tuple(
    parse_field(columns, text.strip()) for columns, text in zip(_LINES[::2], _LINES[1::2], strict=True)
)
"""Fields that NVML answers too; those of a default set first, in the order of dcgm-exporter's file."""

BY_FIELD: Mapping[Field, DcgmField] = MappingProxyType({row.field: row for row in TABLE})


def _names() -> dict[str, tuple[DcgmField, Era]]:
    names: dict[str, tuple[DcgmField, Era]] = {}
    for row in TABLE:
        if row.new_name:
            names[row.new_name] = (row, Era.NEW)
            names[str(row.new_id)] = (row, Era.NEW)
        for text in (row.canonical_name, row.legacy_name, str(int(row.field))):
            names[text] = (row, Era.LEGACY)
    names.update((row.first_name, (row, Era.LEGACY)) for row in TABLE if row.first_name)
    return names


BY_NAME: Mapping[str, tuple[DcgmField, Era]] = MappingProxyType(_names())
"""Names of 1.x, up to 4.8, 4.6 and 4.9, and ids, each with the era that decides its unit.

A name that both eras have is of the older one: the unit is the same.
"""


Pairs = list[tuple[str, str | None]]

_HOLDER = ("container", "namespace", "pod")
_OLD_HOLDER = ("container_name", "pod_namespace", "pod_name")
_BY_METRIC = ("err_code", "err_msg", "window_size_in_ms", "xid", "clock_event", "health_error_code", "health_watch")

TAKEN = frozenset(
    {
        *("gpu", "UUID", "uuid", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "GPU_CI_ID"),
        *(*_HOLDER, *_OLD_HOLDER, "pod_uid", *_BY_METRIC),
    }
)
"""Names that some series of the family has in one spelling or the other: the node's name cannot have one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelStyle:
    """What is chosen of the labels."""

    hostname: str = "Hostname"
    """Name of the label with the node's name; empty: there is none."""
    pod_uid: bool = False
    """Whether rows that name a pod have its ``pod_uid`` too, where it is known."""
    old_names: bool = False
    """``uuid``, ``container_name``, ``pod_name`` and ``pod_namespace``, as with dcgm-exporter's --use-old-namespace."""
    model_hyphens: bool = False
    """``NVIDIA-H100-80GB-HBM3``, as with its --replace-blanks-in-model-name."""

    engine_host: str = ""
    """Host of a DCGM engine on another machine, which stands for the node's name while DCGM alone is read."""

    def node(self, snapshot: Snapshot) -> str:
        """Return the value of the host label: the node, or the machine of a remote engine."""
        alone = all(source.name == "dcgm" or source.reason == "library_not_found" for source in snapshot.sources)
        return self.engine_host if self.engine_host and alone else snapshot.node

    def device(self, view: DeviceView, node: str, *, crowded: bool) -> Pairs:
        """What says which device a row is of; ``crowded``: of one of several compute instances of a GPU instance."""
        gpu, instance = view.gpu, view.instance
        pairs: Pairs = [
            ("gpu", str(gpu.index)),
            ("uuid" if self.old_names else "UUID", gpu.uuid),
            ("pci_bus_id", gpu.pci_bus_id),
            ("device", f"nvidia{gpu.index}"),
            ("modelName", "-".join(gpu.model.split()) if self.model_hyphens else gpu.model),
        ]
        if instance is not None:
            pairs += [("GPU_I_PROFILE", instance.profile), ("GPU_I_ID", str(instance.gpu_instance_id))]
            if crowded:
                pairs.append(("GPU_CI_ID", str(instance.compute_instance_id)))
        return [*pairs, (self.hostname, node)] if self.hostname else pairs

    def holder(self, holder: Holder) -> Pairs:
        """Who holds it, in alphabetical order of the names, as there."""
        names = _OLD_HOLDER if self.old_names else _HOLDER
        values = dict(zip(names, (holder.container, holder.namespace, holder.pod), strict=True))
        pairs: Pairs = sorted(values.items())
        return [*pairs, ("pod_uid", holder.pod_uid)] if self.pod_uid else pairs


DEFAULT = LabelStyle()
"""As dcgm-exporter has them without a flag."""
