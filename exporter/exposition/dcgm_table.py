"""The DCGM fields that NVML answers too, as a table to read; ``dcgm_fields`` makes values of it.

Two lines per field. Columns: id | dcgm-exporter's name up to 4.8 | DCGM 4.6's name, ``-`` where it is the same | unit
| type and flags | 4.9's own field where it has one: id, name, scale, type, unit. Names lack their ``DCGM_FI_``.
Flags: ``float`` (else integer), ``mig`` (measured on a MIG instance; all others are values of the whole board, never
copied to its instances), ``default`` (in the default file, and in 4.9's), ``default49`` (in 4.9's alone), ``not49``
(4.9's field measures something else and cannot be derived: it has none). The default fields come first, in the order of
dcgm-exporter's file.
"""

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
