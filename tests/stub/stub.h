/* Layouts and the control block of a simulated libnvidia-ml.so.1: for ABI tests and benchmarks only, it drives no hardware. */
#ifndef STUB_H
#define STUB_H

#include <stddef.h>
#include <stdint.h>

#ifndef STUB_RELEASE
#define STUB_RELEASE "590.48.01"
#endif

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    LIB_RM_VERSION_MISMATCH = 18,
    ARGUMENT_VERSION_MISMATCH = 25,
};

enum { MAX_GPUS = 16, MAX_INSTANCES = 7, MAX_PROCESSES = 16 };

#define NO_INSTANCE 0xFFFFFFFFu
#define MIB (1024ull * 1024ull)

/* ---- The control block: one file, mapped by the library and by whoever steers it (tests/stub_support.py). ---- */

struct stub_process {
    uint32_t pid, sm_percent;
    uint64_t memory_bytes;
};

struct stub_instance {
    uint32_t engine_permille, pid;
    uint64_t memory_used_bytes;
    uint32_t generation, reserved; /* another generation is another MIG UUID at the same place */
};

struct stub_gpu {
    uint32_t error;                                      /* what every call on the GPU answers; 0: works */
    uint32_t gpu_percent, memory_percent, encoder_percent, decoder_percent;
    uint32_t engine_permille;                            /* GPM graphics engine */
    uint32_t temperature_celsius, memory_temperature_celsius;
    uint32_t power_milliwatts, sm_clock_mhz, memory_clock_mhz;
    uint32_t xid, xid_count;                             /* one event each time xid_count grows */
    uint32_t process_count, instance_count, recovery_action;
    uint64_t memory_used_bytes, memory_reserved_bytes, energy_millijoules;
    struct stub_process processes[MAX_PROCESSES];
    struct stub_instance instances[MAX_INSTANCES];
};

struct stub_control {
    uint32_t size, gpu_count;
    uint32_t driver_error;   /* what nvmlInit and every other call answers; 9: not loaded */
    uint32_t slow_micros;    /* how long every call takes */
    uint32_t inits, shutdowns;
    uint64_t calls;
    char kernel_release[32]; /* another one than the library's: error 18, as after a driver upgrade */
    char hang[64];           /* the function that does not return while it stands here */
    struct stub_gpu gpus[MAX_GPUS];
};

/* ---- Layouts of nvml.h; sizes are those of CUDA 11 to 13 on 64-bit Linux. ---- */

struct device {
    int gpu, instance; /* instance < 0: the whole GPU */
};

struct sample {
    struct device device;
    uint64_t taken_at_ns;
};

union value {
    double d;
    uint32_t ui;
    uint64_t ull;
};

struct field_value {
    uint32_t id, scope;
    int64_t timestamp_micros, latency_micros;
    uint32_t value_type, result;
    union value value;
};

struct memory_v1 {
    uint64_t total, free, used;
};

struct memory_v2 {
    uint32_t version;
    uint64_t total, reserved, free, used;
};

struct pci_info_v3 {
    char bus_id_legacy[16];
    uint32_t domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
};

/* R535 drivers up to about 535.86 had 32-byte records under the same _v3 name. */
struct process_info {
    uint32_t pid;
    uint64_t memory_bytes;
    uint32_t gpu_instance, compute_instance;
#ifdef STUB_WIDE_PROCESS_RECORDS
    uint64_t protected_memory_bytes;
#endif
};

struct process_detail {
    uint32_t pid;
    uint64_t memory_bytes;
    uint32_t gpu_instance, compute_instance;
    uint64_t protected_memory_bytes;
};

struct process_detail_list {
    uint32_t version, mode, count;
    struct process_detail *records;
};

struct process_sample {
    uint32_t pid;
    uint64_t timestamp_micros;
    uint32_t sm, memory, encoder, decoder;
};

struct process_sample_v1 {
    uint64_t timestamp_micros;
    uint32_t pid, sm, memory, encoder, decoder, jpeg, optical_flow;
};

struct process_samples_v1 {
    uint32_t version, count;
    uint64_t last_seen_micros;
    struct process_sample_v1 *records;
};

struct gpm_metric {
    uint32_t id, result;
    double value;
    const char *short_name, *long_name, *unit;
};

struct gpm_metrics_get {
    uint32_t version, count;
    struct sample *sample1, *sample2;
    struct gpm_metric metrics[]; /* 98 to 477 of them by header version: only `count` may be touched */
};

struct gpm_support {
    uint32_t version, is_supported;
};

struct event_data {
    struct device *device;
    uint64_t type, data;
    uint32_t gpu_instance, compute_instance;
};

struct attributes {
    uint32_t multiprocessors, copy_engines, decoders, encoders, jpegs, optical_flows, gpu_slices, compute_slices;
    uint64_t memory_mib;
};

struct gpu_instance_profile {
    uint32_t id, is_p2p_supported, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs, optical_flows;
    uint64_t memory_mib;
};

struct gpu_instance_profile_v2 {
    uint32_t version, id, is_p2p_supported, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpegs,
        optical_flows;
    uint64_t memory_mib;
    char name[96];
};

struct gpu_instance_info {
    struct device *device;
    uint32_t id, profile_id, placement_start, placement_size;
};

struct utilization {
    uint32_t gpu, memory;
};

struct bar1_memory {
    uint64_t total, free, used;
};

struct temperature_v1 {
    uint32_t version, sensor;
    int32_t celsius;
};

struct margin_temperature_v1 {
    uint32_t version;
    int32_t celsius;
};

_Static_assert(sizeof(struct field_value) == 40, "nvmlFieldValue_t");
_Static_assert(offsetof(struct field_value, value) == 32, "nvmlFieldValue_t.value");
_Static_assert(sizeof(struct memory_v1) == 24, "nvmlMemory_t");
_Static_assert(sizeof(struct memory_v2) == 40, "nvmlMemory_v2_t");
_Static_assert(sizeof(struct pci_info_v3) == 68, "nvmlPciInfo_t");
#ifdef STUB_WIDE_PROCESS_RECORDS
_Static_assert(sizeof(struct process_info) == 32, "nvmlProcessInfo_t of early R535");
#else
_Static_assert(sizeof(struct process_info) == 24, "nvmlProcessInfo_v3_t");
#endif
_Static_assert(sizeof(struct process_detail) == 32, "nvmlProcessDetail_v1_t");
_Static_assert(sizeof(struct process_detail_list) == 24, "nvmlProcessDetailList_v1_t");
_Static_assert(sizeof(struct process_sample) == 32, "nvmlProcessUtilizationSample_t");
_Static_assert(sizeof(struct process_sample_v1) == 40, "nvmlProcessUtilizationInfo_v1_t");
_Static_assert(sizeof(struct process_samples_v1) == 24, "nvmlProcessesUtilizationInfo_v1_t");
_Static_assert(sizeof(struct gpm_metric) == 40, "nvmlGpmMetric_t");
_Static_assert(sizeof(struct gpm_metrics_get) + 477 * sizeof(struct gpm_metric) == 19104, "nvmlGpmMetricsGet_t");
_Static_assert(sizeof(struct gpm_support) == 8, "nvmlGpmSupport_t");
_Static_assert(sizeof(struct event_data) == 32, "nvmlEventData_t");
_Static_assert(sizeof(struct attributes) == 40, "nvmlDeviceAttributes_t");
_Static_assert(sizeof(struct gpu_instance_profile) == 48, "nvmlGpuInstanceProfileInfo_t");
_Static_assert(sizeof(struct gpu_instance_profile_v2) == 152, "nvmlGpuInstanceProfileInfo_v2_t");
_Static_assert(sizeof(struct gpu_instance_info) == 24, "nvmlGpuInstanceInfo_t");
_Static_assert(sizeof(struct temperature_v1) == 12, "nvmlTemperature_v1_t");
_Static_assert(sizeof(struct margin_temperature_v1) == 8, "nvmlMarginTemperature_v1_t");

#define VERSION(type, number) ((uint32_t)sizeof(type) | (uint32_t)(number) << 24)

/* ---- Shared by the two translation units. ---- */

extern struct stub_control *control;

int stub_enter(const char *function);
int stub_device(const char *function, const struct device *device, int allow_instance);
uint64_t stub_micros(void);
const struct device *stub_handle(int gpu, int instance);

static inline struct stub_gpu *gpu_of(const struct device *device) { return &control->gpus[device->gpu]; }

/* Every entry point goes through one of these three: hang, latency, lost GPU and wrong handles are the same for all. */
#define ENTER()                                                                                                        \
    do {                                                                                                               \
        int entered = stub_enter(__func__);                                                                            \
        if (entered != OK) return entered;                                                                             \
    } while (0)
#define WHOLE(device)                                                                                                  \
    do {                                                                                                               \
        int entered = stub_device(__func__, device, 0);                                                                \
        if (entered != OK) return entered;                                                                             \
    } while (0)
#define ANY(device)                                                                                                    \
    do {                                                                                                               \
        int entered = stub_device(__func__, device, 1);                                                                \
        if (entered != OK) return entered;                                                                             \
    } while (0)

#endif
