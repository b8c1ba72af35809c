"""Defines the fields, labels and event counts of dcgm-exporter, with the names and units of each era.

Names are never trusted for a unit: DCGM 4.6 calls id 203 ``DCGM_FI_DEV_GPU_UTIL_RATIO`` and means percent; 4.7
gives the same name to id 1613 and means 0..1. Here that name has its 4.9-release meaning, 0..1.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from exporter.metrics.text_format import Kind, Metric
from exporter.model.attribution import Holder
from exporter.model.devices import DeviceEvents, DeviceState
from exporter.model.fields import Field
from exporter.model.snapshot import DeviceView, Snapshot


class Era(StrEnum):
    """Version of names and units: dcgm-exporter up to 4.8 (``LEGACY``), or 4.9 (``NEW``)."""

    LEGACY = "legacy"
    NEW = "4.9"


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmField:
    """Names and units of one field. Values are in the legacy unit; ``times`` and ``per`` convert to the 4.9 unit."""

    field: Field
    legacy_name: str
    canonical_name: str
    """Name in DCGM 4.6, with the id and unit of the legacy name."""
    new_name: str | None
    """Name in dcgm-exporter 4.9; ``None`` if the new field cannot be derived from the measured values."""
    new_id: int
    kind: Kind
    unit: str
    new_unit: str
    times: int
    per: int
    whole: bool
    """Whether it is an integer in the legacy era."""
    new_whole: bool
    per_instance: bool
    """Whether it is measured on a MIG instance; otherwise it is a value of the board, never copied to instances."""
    default: bool
    """Whether dcgm-exporter's default file up to 4.8 has it."""
    new_default: bool
    other_names: tuple[str, ...] = ()
    """Names in dcgm-exporter's 1.x-compatibility file, or in other versions of DCGM."""
    asked: bool
    """Whether the sources read it; False for a field with a known name and no source."""
    help: str

    @property
    def is_profiling(self) -> bool:
        """Whether GPM or the profiling module of DCGM measures it."""
        return self.legacy_name.startswith("DCGM_FI_PROF_")

    def name(self, era: Era) -> str | None:
        """Metric name in an era."""
        return self.legacy_name if era is Era.LEGACY else self.new_name

    def number(self, era: Era) -> int:
        """Id in an era; 4.7 has a new id for a field with another unit."""
        return int(self.field) if era is Era.LEGACY else self.new_id

    def converter(self, era: Era) -> Callable[[float], int | float]:
        """Return the conversion from the legacy unit to the unit of an era; fractions of whole fields are kept."""
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
        other_names=tuple(flag.removeprefix("also=") for flag in rest if flag.startswith("also=")),
        asked="unasked" not in rest,
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
"""Fields that NVML reports too; first those of a default set, in the order of dcgm-exporter's file."""


def names_of(rows: Iterable[DcgmField]) -> dict[str, tuple[DcgmField, Era]]:
    """Return fields by name and id, each with the era of its unit; of two eras with the name, the older one."""
    names: dict[str, tuple[DcgmField, Era]] = {}
    for row in rows:
        if row.new_name:
            names[row.new_name] = (row, Era.NEW)
            names[str(row.new_id)] = (row, Era.NEW)
        for text in (row.legacy_name, *row.other_names, row.canonical_name, str(int(row.field))):
            names[text] = (row, Era.LEGACY)
    return names


BY_NAME: Mapping[str, tuple[DcgmField, Era]] = MappingProxyType(names_of(TABLE))
"""Fields and eras of their units by name and id: names of 1.x, up to 4.8, 4.6 and 4.9.

A name in both eras belongs to the older era; its unit is the same in both.
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
"""Label names that series of the family use in some style; the label with the name of the node must differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelStyle:
    """Options of the labels."""

    hostname: str = "Hostname"
    """Name of the label with the node's name; empty for no such label."""
    pod_uid: bool = False
    """Whether rows with a pod have its ``pod_uid`` too, if it is known."""
    old_names: bool = False
    """Whether labels are ``uuid``, ``container_name``, ..., as with dcgm-exporter's --use-old-namespace."""
    model_hyphens: bool = False
    """Whether models are ``NVIDIA-H100-80GB-HBM3``, as with its --replace-blanks-in-model-name."""

    engine_host: str = ""
    """Host of a DCGM engine on another machine: value of the host label while DCGM is the only source."""

    def node(self, snapshot: Snapshot) -> str:
        """Return the value of the host label: the node, or the machine of a remote engine."""
        alone = all(source.name == "dcgm" or source.reason == "library_not_found" for source in snapshot.sources)
        return self.engine_host if self.engine_host and alone else snapshot.node

    def device(self, view: DeviceView, node: str, *, crowded: bool) -> Pairs:
        """Return the labels of a device; ``crowded``: it is one of several compute instances of a GPU instance."""
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
        """Return the labels of a holder, in alphabetical order of the names, as in dcgm-exporter."""
        names = _OLD_HOLDER if self.old_names else _HOLDER
        values = dict(zip(names, (holder.container, holder.namespace, holder.pod), strict=True))
        pairs: Pairs = sorted(values.items())
        return [*pairs, ("pod_uid", holder.pod_uid)] if self.pod_uid else pairs


DEFAULT = LabelStyle()
"""Labels of dcgm-exporter without flags."""


ANSWERING = (DeviceState.UP, DeviceState.RESET_REQUIRED)
"""States of GPUs with rows: a GPU that needs a reset has no activity, but reports its fault."""

_MILLISECONDS = 1000
_NO_EVENTS = DeviceEvents()


class EventCount(StrEnum):
    """Event counts of dcgm-exporter that this agent provides."""

    XIDS_RECENT = "DCGM_EXP_XID_ERRORS_COUNT"
    XIDS = "DCGM_EXP_XID_ERRORS_TOTAL"
    CLOCK_EVENTS_RECENT = "DCGM_EXP_CLOCK_EVENTS_COUNT"
    CLOCK_EVENTS = "DCGM_EXP_CLOCK_EVENTS_TOTAL"
    HEALTH = "DCGM_EXP_GPU_HEALTH_STATUS"


NOT_MADE: Mapping[str, str] = {
    "DCGM_EXP_P2P_STATUS": "gpu_nvlink_errors_total, or DCGM_FI_DEV_P2P_NVLINK_STATUS with DCGM",
}
"""Other event counts of dcgm-exporter, each with a replacement."""

_HELP = {
    EventCount.XIDS_RECENT: "Xid events in the window, by code; 0 without a code where there was none.",
    EventCount.XIDS: "Xid events since this agent started, by code; a code appears with its first event.",
    EventCount.CLOCK_EVENTS_RECENT: (
        "Samples of the window in which the event held clocks down, at this agent's sample interval; 0 without an "
        "event where there was none."
    ),
    EventCount.CLOCK_EVENTS: (
        "Times an event began to hold clocks down since this agent started; appears with its first."
    ),
    EventCount.HEALTH: (
        "Health of a GPU by watch: 0 pass, 10 warn, 20 fail; derived from its recovery action, row remapping and the "
        "Xids of the window."
    ),
}
_PASS, _WARN, _FAIL = 0, 10, 20
_Verdict = tuple[int, str]
_FALLEN: _Verdict = (_FAIL, "DCGM_FR_FALLEN_OFF_BUS")
_FATAL: _Verdict = (_FAIL, "DCGM_FR_XID_ERROR")
_SERIOUS: _Verdict = (_WARN, "DCGM_FR_XID_ERROR")
_XIDS: Mapping[str, Mapping[int, _Verdict]] = {
    "ALL": {
        **dict.fromkeys((48, 74, 94, 119, 120, 140), _FATAL),
        79: _FALLEN,
        95: (_FAIL, "DCGM_FR_UNCONTAINED_ERROR"),
    },
    "MEM": {
        **dict.fromkeys((31, 32, 43), _SERIOUS),
        63: (_WARN, "DCGM_FR_PENDING_PAGE_RETIREMENTS"),
        64: (_WARN, "DCGM_FR_ROW_REMAP_FAILURE"),
    },
    "NVLINK": dict.fromkeys((73, 121, 137), _SERIOUS),
    "INFOROM": {93: (_WARN, "DCGM_FR_CORRUPT_INFOROM")},
}
"""Verdict of DCGM's own health check on an Xid, by watch."""
_SIGNS: Mapping[str, Mapping[tuple[Field, int], _Verdict]] = {
    "MEM": {
        (Field.ROW_REMAP_FAILURE, 1): (_FAIL, "DCGM_FR_ROW_REMAP_FAILURE"),
        (Field.ROW_REMAP_PENDING, 1): (_WARN, "DCGM_FR_PENDING_ROW_REMAP"),
    },
    "DRIVER": {
        **dict.fromkeys(((Field.GPU_RECOVERY_ACTION, one) for one in (1, 6)), (_FAIL, "DCGM_FR_GPU_RECOVERY_RESET")),
        **dict.fromkeys(((Field.GPU_RECOVERY_ACTION, one) for one in (2, 7)), (_FAIL, "DCGM_FR_GPU_RECOVERY_REBOOT")),
        (Field.GPU_RECOVERY_ACTION, 3): (_FAIL, "DCGM_FR_GPU_RECOVERY_DRAIN_P2P"),
        (Field.GPU_RECOVERY_ACTION, 4): (_FAIL, "DCGM_FR_GPU_RECOVERY_DRAIN_RESET"),
        (Field.GPU_RECOVERY_ACTION, 5): (_FAIL, "DCGM_FR_GPU_RECOVERY_IMEX_DOMAIN"),
    },
}
"""Verdict on a value of a field, by watch."""


def event_metric(name: str, text: str) -> Metric:
    """Return the metric of a name of ``EventCount``, with its true type; an empty help gets the default help."""
    count = EventCount(name)
    kind = Kind.COUNTER if count.endswith("_TOTAL") else Kind.GAUGE
    return Metric(name=count, kind=kind, help=text or _HELP[count])


def event_samples(name: str, view: DeviceView, snapshot: Snapshot) -> Iterator[tuple[tuple[tuple[str, str], ...], int]]:
    """Yield labels and values of one device for a metric with a name of ``EventCount``.

    Clock events belong to the board, so only its row has them. A device that is down keeps its Xids, which may be the
    cause.
    """
    events = snapshot.events.get(view.uuid, _NO_EVENTS)
    up = view.state is DeviceState.UP
    match EventCount(name):
        case EventCount.XIDS_RECENT:
            recent = {str(xid): times for xid, times in sorted(events.recent_xids.items())}
            yield from _in_window("xid", recent, snapshot.xid_window_seconds, with_none=up)
        case EventCount.XIDS:
            for xid, times in sorted(view.xids.items()):
                yield (("xid", str(xid)),), times
        case EventCount.CLOCK_EVENTS_RECENT if up and events.recent_clock_events is not None:
            seconds = snapshot.clock_events_window_seconds
            yield from _in_window("clock_event", events.recent_clock_events, seconds, with_none=True)
        case EventCount.CLOCK_EVENTS if up and events.clock_events is not None:
            for event, times in events.clock_events.items():
                if times:
                    yield (("clock_event", event),), times
        case EventCount.HEALTH if view.instance is None:
            for watch, (result, error) in sorted(_health(view, snapshot).items()):
                yield (("health_error_code", error), ("health_watch", watch)), result


def _health(view: DeviceView, snapshot: Snapshot) -> Mapping[str, _Verdict]:
    """Return the worst verdict by watch on a GPU and its instances; a watch without data is absent."""
    devices = (one.uuid for one in snapshot.devices if one.gpu.uuid == view.gpu.uuid)
    xids = {xid for uuid in devices if uuid in snapshot.events for xid in snapshot.events[uuid].recent_xids}
    found: dict[str, list[_Verdict]] = {}
    if view.state in ANSWERING:
        judged = {watch for watch, signs in _SIGNS.items() if any(field in view.values for field, _ in signs)}
        found = {watch: [(_PASS, "DCGM_FR_OK")] for watch in {*_XIDS, *judged}}
    if view.state is DeviceState.LOST:
        found["ALL"] = [_FALLEN]
    for watch, verdicts in _XIDS.items():
        found.setdefault(watch, []).extend(verdicts[xid] for xid in xids & verdicts.keys())
    for watch, signs in _SIGNS.items():
        found.setdefault(watch, []).extend(
            verdict for (field, value), verdict in signs.items() if view.values.get(field) == value
        )
    return {watch: max(verdicts) for watch, verdicts in found.items() if verdicts}


def _in_window(
    label: str, counts: Mapping[str, int], seconds: float, *, with_none: bool
) -> Iterator[tuple[tuple[tuple[str, str], ...], int]]:
    window = ("window_size_in_ms", str(round(seconds * _MILLISECONDS)))
    for value, times in counts.items():
        yield tuple(sorted((window, (label, value)))), times
    if not counts and with_none:
        yield (window,), 0


_TEXTS = dict(line.split(" ", 1) for line in table_lines("xid_texts.txt"))


def xid_text(code: int) -> str:
    """Return the meaning of an Xid code as a short text."""
    return _TEXTS.get(str(code), "Unknown error")
