"""The DCGM fields that NVML answers too: id, names of each era, types, units and how to convert between eras.

Names are never trusted for a unit: DCGM 4.6 calls id 203 ``DCGM_FI_DEV_GPU_UTIL_RATIO`` and means percent; 4.7
gives the same name to id 1613 and means 0..1. Here that name has its 4.9-release meaning, 0..1.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from exporter.metrics.text_format import Kind
from exporter.model import DeviceView, Field, Holder, Snapshot

TEXT = """
1 | DRIVER_VERSION | SYSTEM_DRIVER_VERSION | text | label default
    Version of the NVIDIA driver.
2 | NVML_VERSION | SYSTEM_NVML_VERSION | text | label
    Version of the NVML library.
51 | DEV_BRAND | DEV_GPU_BRAND | text | label
    Brand of the GPU.
53 | DEV_SERIAL | DEV_BOARD_SERIAL | text | label
    Serial number of the board.
56 | DEV_OEM_INFOROM_VER | DEV_INFOROM_OEM_VERSION | text | label
    Version of the InfoROM's OEM object.
80 | DEV_ECC_INFOROM_VER | DEV_INFOROM_ECC_VERSION | text | label
    Version of the InfoROM's ECC object.
81 | DEV_POWER_INFOROM_VER | DEV_INFOROM_POWER_VERSION | text | label
    Version of the InfoROM's power object.
82 | DEV_INFOROM_IMAGE_VER | DEV_INFOROM_IMAGE_VERSION | text | label
    Version of the InfoROM image.
85 | DEV_VBIOS_VERSION | - | text | label
    Version of the video BIOS.
100 | DEV_SM_CLOCK | - | MHz | gauge default | 1603 DEV_SM_CLOCK_HERTZ *1000000 int Hz
    Clock of the streaming multiprocessors.
101 | DEV_MEM_CLOCK | - | MHz | gauge default | 1604 DEV_MEMORY_CLOCK_HERTZ *1000000 int Hz
    Clock of the memory.
140 | DEV_MEMORY_TEMP | DEV_MEMORY_TEMP_CELSIUS | degrees Celsius | gauge default
    Temperature of the memory.
150 | DEV_GPU_TEMP | DEV_GPU_TEMP_CELSIUS | degrees Celsius | gauge default
    Temperature of the GPU.
155 | DEV_POWER_USAGE | DEV_BOARD_POWER_WATTS | W | gauge float default
    Power drawn by the whole board.
156 | DEV_TOTAL_ENERGY_CONSUMPTION | - | mJ | counter default | 1611 DEV_GPU_ENERGY_JOULES_TOTAL /1000 int J
    Energy used since the driver was loaded; starts again with the driver.
202 | DEV_PCIE_REPLAY_COUNTER | DEV_PCIE_REPLAY_TOTAL | retries | counter default
    PCIe packets sent again.
203 | DEV_GPU_UTIL | - | percent | gauge default | 1613 DEV_GPU_UTIL_RATIO /100 float ratio 0-1
    Share of time in which a kernel was resident on the GPU; not how much of it worked.
204 | DEV_MEM_COPY_UTIL | - | percent | gauge default | 1614 DEV_MEMORY_UTIL_RATIO /100 float ratio 0-1
    Share of time in which memory was read or written.
206 | DEV_ENC_UTIL | - | percent | gauge default | 1615 DEV_ENC_UTIL_RATIO /100 float ratio 0-1
    Use of the video encoder.
207 | DEV_DEC_UTIL | - | percent | gauge default | 1616 DEV_DEC_UTIL_RATIO /100 float ratio 0-1
    Use of the video decoder.
230 | DEV_XID_ERRORS | DEV_XID_ERROR | Xid | gauge mig default
    Code of the last Xid event; absent before the first one.
251 | DEV_FB_FREE | - | MiB | gauge mig default | 1626 DEV_FB_FREE_BYTES *1048576 int bytes
    Framebuffer memory that is free.
252 | DEV_FB_USED | - | MiB | gauge mig default | 1627 DEV_FB_USED_BYTES *1048576 int bytes
    Framebuffer memory in use, without what the driver reserves.
253 | DEV_FB_RESERVED | - | MiB | gauge mig default | 1628 DEV_FB_RESERVED_BYTES *1048576 int bytes
    Framebuffer memory reserved by driver and firmware.
250 | DEV_FB_TOTAL | - | MiB | gauge mig default49 | 1625 DEV_FB_CAPACITY_BYTES *1048576 int bytes
    Framebuffer memory: free, used and reserved.
449 | DEV_NVLINK_BANDWIDTH_TOTAL | DEV_NVLINK_THROUGHPUT_TOTAL | 1000 KiB/s | gauge default not49
    Rate of NVLink payload over all links, both directions; a rate despite its name.
526 | DEV_VGPU_LICENSE_STATUS | - | 0/1 | gauge default
    vGPU licence status.
393 | DEV_UNCORRECTABLE_REMAPPED_ROWS | DEV_ROW_REMAP_UNCORRECTABLE_TOTAL | rows | counter default
    Memory rows remapped after uncorrectable errors.
394 | DEV_CORRECTABLE_REMAPPED_ROWS | DEV_ROW_REMAP_CORRECTABLE_TOTAL | rows | counter default
    Memory rows remapped after correctable errors.
395 | DEV_ROW_REMAP_FAILURE | DEV_ROW_REMAP_FAILED | 0/1 | gauge default
    Whether remapping a memory row failed.
1001 | PROF_GR_ENGINE_ACTIVE | PROF_GR_ENGINE_UTIL_RATIO | ratio 0-1 | gauge float mig default
    Share of time in which the graphics or compute engine was active.
1004 | PROF_PIPE_TENSOR_ACTIVE | PROF_TENSOR_UTIL_RATIO | ratio 0-1 | gauge float mig default
    Share of cycles in which the tensor pipes were active.
1005 | PROF_DRAM_ACTIVE | PROF_DRAM_UTIL_RATIO | ratio 0-1 | gauge float mig default
    Share of cycles in which the memory interface moved data.
1009 | PROF_PCIE_TX_BYTES | - | bytes per second | gauge default
    PCIe data from device to host; a rate despite its name.
1010 | PROF_PCIE_RX_BYTES | - | bytes per second | gauge default
    PCIe data from host to device; a rate despite its name.
1002 | PROF_SM_ACTIVE | PROF_SM_UTIL_RATIO | ratio 0-1 | gauge float mig
    Share of cycles in which a multiprocessor had a warp, mean over multiprocessors.
1003 | PROF_SM_OCCUPANCY | PROF_SM_OCCUPANCY_RATIO | ratio 0-1 | gauge float mig
    Resident warps as a part of what fits.
1006 | PROF_PIPE_FP64_ACTIVE | PROF_FP64_UTIL_RATIO | ratio 0-1 | gauge float mig
    Share of cycles in which the FP64 pipes were active.
1007 | PROF_PIPE_FP32_ACTIVE | PROF_FP32_UTIL_RATIO | ratio 0-1 | gauge float mig
    Share of cycles in which the FP32 pipes were active.
1008 | PROF_PIPE_FP16_ACTIVE | PROF_FP16_UTIL_RATIO | ratio 0-1 | gauge float mig
    Share of cycles in which the FP16 pipes were active.
1011 | PROF_NVLINK_TX_BYTES | - | bytes per second | gauge
    NVLink data sent; a rate despite its name.
1012 | PROF_NVLINK_RX_BYTES | - | bytes per second | gauge
    NVLink data received; a rate despite its name.
90 | DEV_BAR1_TOTAL | - | MiB | gauge mig | 1600 DEV_BAR1_CAPACITY_BYTES *1048576 int bytes
    Size of the BAR1 window.
92 | DEV_BAR1_USED | - | MiB | gauge mig | 1601 DEV_BAR1_USED_BYTES *1048576 int bytes
    BAR1 window in use.
93 | DEV_BAR1_FREE | - | MiB | gauge mig | 1602 DEV_BAR1_FREE_BYTES *1048576 int bytes
    BAR1 window that is free.
102 | DEV_VIDEO_CLOCK | - | MHz | gauge | 1605 DEV_VIDEO_CLOCK_HERTZ *1000000 int Hz
    Clock of the video engines.
112 | DEV_CLOCK_THROTTLE_REASONS | DEV_CLOCKS_EVENT_REASONS | bit mask | gauge
    Why clocks are held down now.
113 | DEV_MAX_SM_CLOCK | - | MHz | gauge | 1608 DEV_SM_MAX_CLOCK_HERTZ *1000000 int Hz
    Highest clock of the streaming multiprocessors.
114 | DEV_MAX_MEM_CLOCK | - | MHz | gauge | 1609 DEV_MEMORY_MAX_CLOCK_HERTZ *1000000 int Hz
    Highest clock of the memory.
151 | DEV_MEM_MAX_OP_TEMP | DEV_MEMORY_MAX_OP_TEMP_CELSIUS | degrees Celsius | gauge
    Highest operating temperature of the memory.
152 | DEV_GPU_MAX_OP_TEMP | DEV_GPU_MAX_OP_TEMP_CELSIUS | degrees Celsius | gauge
    Highest operating temperature of the GPU.
153 | DEV_GPU_TEMP_LIMIT | DEV_GPU_TEMP_MARGIN_CELSIUS | degrees Celsius | gauge
    Distance to the temperature at which clocks fall; may be negative.
158 | DEV_SLOWDOWN_TEMP | DEV_GPU_TEMP_SLOWDOWN_CELSIUS | degrees Celsius | gauge
    Temperature at which clocks fall.
159 | DEV_SHUTDOWN_TEMP | DEV_GPU_TEMP_SHUTDOWN_CELSIUS | degrees Celsius | gauge
    Temperature at which the GPU shuts down.
157 | DEV_POWER_USAGE_INSTANT | DEV_BOARD_POWER_RAW_WATTS | W | gauge float
    Power drawn by the board at this instant, not averaged.
160 | DEV_POWER_MGMT_LIMIT | DEV_BOARD_POWER_LIMIT_REQUESTED_WATTS | W | gauge float
    Power limit that was asked for.
161 | DEV_POWER_MGMT_LIMIT_MIN | DEV_BOARD_POWER_LIMIT_MIN_WATTS | W | gauge float
    Lowest power limit that can be set.
162 | DEV_POWER_MGMT_LIMIT_MAX | DEV_BOARD_POWER_LIMIT_MAX_WATTS | W | gauge float
    Highest power limit that can be set.
163 | DEV_POWER_MGMT_LIMIT_DEF | DEV_BOARD_POWER_LIMIT_DEFAULT_WATTS | W | gauge float
    Power limit from the factory.
164 | DEV_ENFORCED_POWER_LIMIT | DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS | W | gauge float
    Power limit in force after all limiters.
190 | DEV_PSTATE | DEV_GPU_PSTATE | 0-15 | gauge
    Performance state; 0 is the fastest.
191 | DEV_FAN_SPEED | - | percent | gauge | 1612 DEV_FAN_SPEED_RATIO /100 float ratio 0-1
    Fan speed as a part of its maximum; may pass 100.
235 | DEV_PCIE_MAX_LINK_GEN | - | generation | gauge
    Highest PCIe generation of device and slot.
236 | DEV_PCIE_MAX_LINK_WIDTH | - | lanes | gauge
    Highest PCIe width of device and slot.
237 | DEV_PCIE_LINK_GEN | - | generation | gauge
    PCIe generation in use; falls when idle.
238 | DEV_PCIE_LINK_WIDTH | - | lanes | gauge
    PCIe width in use.
240 | DEV_POWER_VIOLATION | - | ns | counter | 1617 DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL /1000000000 float s
    Time throttled by the power limit since the driver was loaded.
241 | DEV_THERMAL_VIOLATION | - | ns | counter | 1618 DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL /1000000000 float s
    Time throttled by temperature since the driver was loaded.
242 | DEV_SYNC_BOOST_VIOLATION | - | ns | counter | 1619 DEV_GPU_SYNC_BOOST_THROTTLE_SECONDS_TOTAL /1000000000 float s
    Time throttled to the slowest GPU of a sync-boost group since the driver was loaded.
243 | DEV_BOARD_LIMIT_VIOLATION | - | ns | counter | 1620 DEV_GPU_LIMIT_THROTTLE_SECONDS_TOTAL /1000000000 float s
    Time throttled by a limit of the board since the driver was loaded.
244 | DEV_LOW_UTIL_VIOLATION | - | ns | counter | 1621 DEV_GPU_LOW_UTIL_THROTTLE_SECONDS_TOTAL /1000000000 float s
    Time clocked down for want of work since the driver was loaded.
245 | DEV_RELIABILITY_VIOLATION | - | ns | counter | 1622 DEV_GPU_RELIABILITY_THROTTLE_SECONDS_TOTAL /1000000000 float s
    Time throttled by the voltage-reliability limit since the driver was loaded.
246 | DEV_TOTAL_APP_CLOCKS_VIOLATION | - | ns | counter | 1623 DEV_GPU_APP_THROTTLE_SECONDS_TOTAL /1000000000 float s
    Time below the application clocks for any reason since the driver was loaded.
247 | DEV_TOTAL_BASE_CLOCKS_VIOLATION | - | ns | counter | 1624 DEV_GPU_BASE_THROTTLE_SECONDS_TOTAL /1000000000 float s
    Time below the base clocks for any reason since the driver was loaded.
254 | DEV_FB_USED_PERCENT | DEV_FB_USED_RATIO | ratio 0-1 | gauge float mig
    Framebuffer in use as a part of what is not reserved; a ratio despite its name.
310 | DEV_ECC_SBE_VOL_TOTAL | - | errors | counter
    ECC single-bit errors since the driver was loaded.
312 | DEV_ECC_SBE_AGG_TOTAL | - | errors | counter
    ECC single-bit errors over the life of the board.
311 | DEV_ECC_DBE_VOL_TOTAL | - | errors | counter
    ECC double-bit errors since the driver was loaded.
313 | DEV_ECC_DBE_AGG_TOTAL | - | errors | counter
    ECC double-bit errors over the life of the board.
390 | DEV_RETIRED_SBE | DEV_PAGE_RETIRED_SBE_TOTAL | pages | counter
    Memory pages retired for single-bit errors.
391 | DEV_RETIRED_DBE | DEV_PAGE_RETIRED_DBE_TOTAL | pages | counter
    Memory pages retired for double-bit errors.
392 | DEV_RETIRED_PENDING | DEV_PAGE_RETIRED_PENDING | pages | counter
    Memory pages that wait for a reboot to be retired.
396 | DEV_ROW_REMAP_PENDING | - | 0/1 | gauge
    Whether a memory row waits for a reset to be remapped.
409 | DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL | DEV_NVLINK_CRC_FLIT_ERROR_TOTAL | errors | counter
    NVLink flow-control CRC errors over all links.
419 | DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL | DEV_NVLINK_CRC_DATA_ERROR_TOTAL | errors | counter
    NVLink data CRC errors over all links.
429 | DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL | DEV_NVLINK_REPLAY_ERROR_TOTAL | errors | counter
    NVLink replays over all links.
439 | DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL | DEV_NVLINK_RECOVERY_ERROR_TOTAL | errors | counter
    NVLink recoveries over all links.
497 | DEV_NVLINK_ERROR_DL_CRC | DEV_NVLINK_CRC_ERROR_TOTAL | errors | counter
    NVLink data-link CRC errors.
498 | DEV_NVLINK_ERROR_DL_RECOVERY | DEV_NVLINK_RECOVERY_TOTAL | errors | counter
    NVLink data-link recoveries.
499 | DEV_NVLINK_ERROR_DL_REPLAY | DEV_NVLINK_REPLAY_TOTAL | errors | counter
    NVLink data-link replays.
1206 | DEV_NVLINK_COUNT_RX_ERRORS | DEV_NVLINK_RX_ERROR_TOTAL | errors | counter
    Packets received with an error over all links; NVLink 5.
1209 | DEV_NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS | DEV_NVLINK_INTEGRITY_ERROR_TOTAL | errors | counter
    Times a link's errors passed its limit, over all links; NVLink 5.
1211 | DEV_NVLINK_COUNT_LINK_RECOVERY_SUCCESSFUL_EVENTS | DEV_NVLINK_RECOVERY_SUCCESSFUL_TOTAL | events | counter
    Links that went down and came back, over all links; NVLink 5.
1212 | DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS | DEV_NVLINK_RECOVERY_FAILED_TOTAL | events | counter
    Links that went down and stayed down, over all links; NVLink 5.
500 | DEV_VIRTUAL_MODE | DEV_GPU_VIRTUAL_MODE | 0-4 | gauge
    Virtualisation: 0 none, 1 passthrough, 2 vGPU guest, 3 vGPU host, 4 vSGA.
1422 | DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS | - | ns | counter
    Time slowed down by software for temperature since the driver was loaded; driver 590 and later.
1423 | DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS | - | ns | counter
    Time slowed down by hardware for temperature since the driver was loaded; driver 590 and later.
1424 | DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS | - | ns | counter
    Time slowed down by the external power brake since the driver was loaded; driver 590 and later.
1501 | DEV_PCIE_COUNT_CORRECTABLE_ERRORS | DEV_PCIE_CORRECTABLE_ERROR_TOTAL | errors | counter
    Correctable PCIe errors.
1507 | DEV_MEMORY_UNREPAIRABLE_FLAG | DEV_MEMORY_UNREPAIRABLE | 0/1 | gauge
    Whether memory has damage that cannot be repaired.
1523 | DEV_GET_GPU_RECOVERY_ACTION | DEV_GPU_RECOVERY_ACTION | 0-7 | gauge
    Recovery asked for: 0 none, 1 GPU reset, 2 reboot, 3 drain P2P, 4 drain and reset, 5 IMEX, 6 bus reset, 7 reboot.
"""


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


def _parse(columns: str, text: str) -> DcgmField:
    number, legacy, canonical, unit, flags, *new = (column.strip() for column in columns.split("|"))
    kind, *rest = flags.split()
    same = PREFIX + (legacy if canonical == "-" else canonical)
    new_id, new_name, scale, new_type, new_unit = new[0].split(" ", 4) if new else (number, same, "*1", "", unit)
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
        new_default=("default" in rest and "not49" not in rest) or "default49" in rest,
        help=text,
    )


PREFIX = "DCGM_FI_"
_LINES = TEXT.strip().splitlines()

TABLE: tuple[DcgmField, ...] = tuple(
    _parse(columns, text.strip()) for columns, text in zip(_LINES[::2], _LINES[1::2], strict=True)
)
"""All of them; those of a default set first, in the order of dcgm-exporter's file. The others are in ``dcgm_ids``."""

BY_FIELD: Mapping[Field, DcgmField] = MappingProxyType({row.field: row for row in TABLE})


# Of dcgm-exporter's 1.x-compatibility file, where they are not the legacy name in lower case.
_FIRST_NAMES = {
    "dcgm_memory_clock": Field.MEM_CLOCK,
    "dcgm_gpu_utilization": Field.GPU_UTIL,
    "dcgm_mem_copy_utilization": Field.MEM_COPY_UTIL,
    "dcgm_enc_utilization": Field.ENC_UTIL,
    "dcgm_dec_utilization": Field.DEC_UTIL,
    "dcgm_ecc_sbe_volatile_total": Field.ECC_SBE_VOL_TOTAL,
    "dcgm_ecc_dbe_volatile_total": Field.ECC_DBE_VOL_TOTAL,
    "dcgm_ecc_sbe_aggregate_total": Field.ECC_SBE_AGG_TOTAL,
    "dcgm_ecc_dbe_aggregate_total": Field.ECC_DBE_AGG_TOTAL,
    "dcgm_retired_pages_sbe": Field.RETIRED_SBE,
    "dcgm_retired_pages_dbe": Field.RETIRED_DBE,
    "dcgm_retired_pages_pending": Field.RETIRED_PENDING,
    "dcgm_nvlink_flit_crc_error_count_total": Field.NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    "dcgm_nvlink_data_crc_error_count_total": Field.NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
}
_FIRST_AS_LOWER_CASE = (
    *(Field.SM_CLOCK, Field.MEMORY_TEMP, Field.GPU_TEMP, Field.POWER_USAGE, Field.TOTAL_ENERGY_CONSUMPTION),
    *(Field.PCIE_REPLAY_COUNTER, Field.XID_ERRORS, Field.FB_FREE, Field.FB_USED, Field.NVLINK_BANDWIDTH_TOTAL),
    *(Field.POWER_VIOLATION, Field.THERMAL_VIOLATION, Field.SYNC_BOOST_VIOLATION, Field.BOARD_LIMIT_VIOLATION),
    *(Field.LOW_UTIL_VIOLATION, Field.RELIABILITY_VIOLATION),
    *(Field.NVLINK_REPLAY_ERROR_COUNT_TOTAL, Field.NVLINK_RECOVERY_ERROR_COUNT_TOTAL),
)


def _first_names() -> Iterator[tuple[str, Field]]:
    yield from _FIRST_NAMES.items()
    for field in _FIRST_AS_LOWER_CASE:
        yield "dcgm_" + BY_FIELD[field].legacy_name.removeprefix("DCGM_FI_DEV_").lower(), field
    for row in TABLE:
        if row.legacy_name.startswith("DCGM_FI_PROF_"):
            yield row.legacy_name.lower(), row.field


def _names() -> dict[str, tuple[DcgmField, Era]]:
    names: dict[str, tuple[DcgmField, Era]] = {}
    for row in TABLE:
        if row.new_name:
            names[row.new_name] = (row, Era.NEW)
            names[str(row.new_id)] = (row, Era.NEW)
        for text in (row.canonical_name, row.legacy_name, str(int(row.field))):
            names[text] = (row, Era.LEGACY)
    names.update((name, (BY_FIELD[field], Era.LEGACY)) for name, field in _first_names())
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
        if self.old_names:
            pairs = [
                ("container_name", holder.container),
                ("pod_name", holder.pod),
                ("pod_namespace", holder.namespace),
            ]
        else:
            pairs = [("container", holder.container), ("namespace", holder.namespace), ("pod", holder.pod)]
        return [*pairs, ("pod_uid", holder.pod_uid)] if self.pod_uid else [*pairs]


DEFAULT = LabelStyle()
"""As dcgm-exporter has them without a flag."""
