/* Simulated libnvidia-ml.so.1, first half: control, identity, and what is measured of the board. Not a driver. */
#define _GNU_SOURCE
#include "stub.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef struct device *handle;

struct stub_control *control;

static struct device wholes[MAX_GPUS], parts[MAX_GPUS][MAX_INSTANCES];
static int references;
static uint32_t enumerated; /* the driver fixes its device list at init */

static void pause_micros(uint64_t micros) {
    struct timespec left = {(time_t)(micros / 1000000), (long)(micros % 1000000) * 1000};
    while (nanosleep(&left, &left) != 0) {
    }
}

uint64_t stub_micros(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

const struct device *stub_handle(int gpu, int instance) {
    return instance < 0 ? &wholes[gpu] : &parts[gpu][instance];
}

static int map_control(void) {
    const char *path = getenv("NVML_STUB_CONTROL");
    if (control != NULL) return OK;
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        fprintf(stderr, "simulated libnvidia-ml: NVML_STUB_CONTROL must name a control file (tests/stub_support.py)\n");
        return 999;
    }
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED || ((struct stub_control *)mapped)->size != sizeof *control) {
        fprintf(stderr, "simulated libnvidia-ml: the control file has another layout\n");
        return 999;
    }
    control = mapped;
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
        wholes[gpu] = (struct device){gpu, -1};
        for (int part = 0; part < MAX_INSTANCES; part++) parts[gpu][part] = (struct device){gpu, part};
    }
    return OK;
}

static int trouble(const char *function) {
    __atomic_add_fetch(&control->calls, 1, __ATOMIC_RELAXED);
    while (strncmp(control->hang, function, sizeof control->hang) == 0) pause_micros(20000);
    if (control->slow_micros != 0) pause_micros(control->slow_micros);
    if (strncmp(control->kernel_release, STUB_RELEASE, sizeof control->kernel_release) != 0) {
        return LIB_RM_VERSION_MISMATCH;
    }
    return (int)control->driver_error;
}

int stub_enter(const char *function) {
    if (references == 0) return UNINITIALIZED;
    return trouble(function);
}

int stub_device(const char *function, const struct device *device, int allow_instance) {
    int entered = stub_enter(function);
    if (entered != OK) return entered;
    int whole = device >= wholes && device < wholes + MAX_GPUS;
    int part = device >= parts[0] && device < parts[0] + (size_t)MAX_GPUS * MAX_INSTANCES;
    if (!whole && !part) return INVALID_ARGUMENT; /* a truncated or foreign handle */
    if ((uint32_t)device->gpu >= enumerated) return INVALID_ARGUMENT;
    if (gpu_of(device)->error != 0) return (int)gpu_of(device)->error;
    if (part && (uint32_t)device->instance >= gpu_of(device)->instance_count) return INVALID_ARGUMENT;
    return part && !allow_instance ? NOT_SUPPORTED : OK;
}

static int put(char *buffer, unsigned length, const char *text) {
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(buffer, text);
    return OK;
}

/* ---- Library and system ---- */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int mapped = map_control();
    if (mapped != OK) return mapped;
    int entered = trouble(__func__);
    if (entered != OK) return entered;
    if (references++ == 0) enumerated = control->gpu_count;
    __atomic_add_fetch(&control->inits, 1, __ATOMIC_RELAXED);
    return OK;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (references == 0) return UNINITIALIZED;
    references--;
    __atomic_add_fetch(&control->shutdowns, 1, __ATOMIC_RELAXED);
    return OK;
}

const char *nvmlErrorString(int code) {
    static char text[32];
    snprintf(text, sizeof text, "simulated error %d", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *buffer, unsigned length) {
    ENTER();
    return put(buffer, length, STUB_RELEASE);
}

int nvmlSystemGetNVMLVersion(char *buffer, unsigned length) {
    ENTER();
    return put(buffer, length, "13." STUB_RELEASE);
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    ENTER();
    *version = 13010;
    return OK;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    ENTER();
    *version = 13010;
    return OK;
}

/* ---- Handles and identity ---- */

int nvmlDeviceGetCount_v2(unsigned *count) {
    ENTER();
    *count = enumerated;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *out) {
    ENTER();
    if (index >= enumerated) return INVALID_ARGUMENT;
    *out = &wholes[index];
    return (int)control->gpus[index].error;
}

static void uuid_of(const struct device *device, char *out, size_t size) {
    if (device->instance < 0) {
        snprintf(out, size, "GPU-5717b000-0000-4000-8000-%012d", device->gpu);
    } else {
        uint32_t generation = gpu_of(device)->instances[device->instance].generation;
        snprintf(out, size, "MIG-5717b000-%04u-5000-8000-%06d%06d", generation % 10000, device->gpu, device->instance);
    }
}

static void bus_of(const struct device *device, char *out, size_t size) {
    snprintf(out, size, "00000000:%02X:00.0", 0x10 + device->gpu);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, handle *out) {
    ENTER();
    for (uint32_t gpu = 0; gpu < enumerated; gpu++) {
        char text[96];
        uuid_of(&wholes[gpu], text, sizeof text);
        if (strcmp(text, uuid) == 0) return *out = &wholes[gpu], (int)control->gpus[gpu].error;
        for (uint32_t part = 0; part < control->gpus[gpu].instance_count; part++) {
            uuid_of(&parts[gpu][part], text, sizeof text);
            if (strcmp(text, uuid) == 0) return *out = &parts[gpu][part], (int)control->gpus[gpu].error;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, handle *out) {
    ENTER();
    for (uint32_t gpu = 0; gpu < enumerated; gpu++) {
        char text[32];
        bus_of(&wholes[gpu], text, sizeof text);
        if (strcasecmp(text, bus_id) == 0) return *out = &wholes[gpu], (int)control->gpus[gpu].error;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(handle device, unsigned *index) {
    ANY(device);
    *index = (unsigned)(device->instance < 0 ? device->gpu : device->instance);
    return OK;
}

int nvmlDeviceGetMinorNumber(handle device, unsigned *minor) {
    ANY(device);
    *minor = (unsigned)device->gpu;
    return OK;
}

int nvmlDeviceGetUUID(handle device, char *buffer, unsigned length) {
    ANY(device);
    char text[96];
    uuid_of(device, text, sizeof text);
    return put(buffer, length, text);
}

int nvmlDeviceGetName(handle device, char *buffer, unsigned length) {
    ANY(device);
    return put(buffer, length, device->instance < 0 ? "NVIDIA H100 80GB HBM3" : "NVIDIA H100 80GB HBM3 MIG 1g.10gb");
}

int nvmlDeviceGetPciInfo_v3(handle device, struct pci_info_v3 *info) {
    ANY(device);
    memset(info, 0, sizeof *info);
    info->bus = 0x10 + (uint32_t)device->gpu;
    info->pci_device_id = 0x233010de;
    bus_of(device, info->bus_id, sizeof info->bus_id);
    snprintf(info->bus_id_legacy, sizeof info->bus_id_legacy, "0000:%02X:00.0", info->bus & 0xFF);
    return OK;
}

int nvmlDeviceGetSerial(handle device, char *buffer, unsigned length) {
    WHOLE(device);
    char text[16];
    snprintf(text, sizeof text, "16500000000%02d", device->gpu % 100);
    return put(buffer, length, text);
}

#define TEXT(function, text)                                                                                           \
    int function(handle device, char *buffer, unsigned length) {                                                       \
        WHOLE(device);                                                                                                 \
        return put(buffer, length, text);                                                                              \
    }
TEXT(nvmlDeviceGetVbiosVersion, "96.00.AF.00.01")
TEXT(nvmlDeviceGetInforomImageVersion, "G520.0200.00.05")

int nvmlDeviceGetInforomVersion(handle device, unsigned object, char *buffer, unsigned length) {
    WHOLE(device);
    static const char *const versions[] = {"2.1", "7.16", "2.0"}; /* OEM, ECC, power */
    return object < 3 ? put(buffer, length, versions[object]) : NOT_SUPPORTED;
}

/* ---- Plain numbers: the constants are distinct, so that a mixed-up call shows ---- */

#define NUMBER(function, expression)                                                                                   \
    int function(handle device, unsigned *out) {                                                                       \
        WHOLE(device);                                                                                                 \
        *out = (unsigned)(expression);                                                                                 \
        return OK;                                                                                                     \
    }
#define UNSUPPORTED(function)                                                                                          \
    int function(handle device) {                                                                                      \
        ANY(device);                                                                                                   \
        return NOT_SUPPORTED;                                                                                          \
    }

NUMBER(nvmlDeviceGetBrand, 1)
NUMBER(nvmlDeviceGetArchitecture, 9)
NUMBER(nvmlDeviceGetPersistenceMode, 1)
NUMBER(nvmlDeviceGetComputeMode, 0)
NUMBER(nvmlDeviceGetDisplayMode, 0)
NUMBER(nvmlDeviceGetDisplayActive, 0)
NUMBER(nvmlDeviceGetPowerUsage, gpu_of(device)->power_milliwatts)
NUMBER(nvmlDeviceGetPowerManagementLimit, 650000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, 700000)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, 640000)
NUMBER(nvmlDeviceGetPerformanceState, 0)
NUMBER(nvmlDeviceGetPcieReplayCounter, 94000 + device->gpu)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, 5)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, 4)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, 16)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, 8)
NUMBER(nvmlDeviceGetVirtualizationMode, 0)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, MAX_INSTANCES)
NUMBER(nvmlDeviceGetAccountingMode, 0)
UNSUPPORTED(nvmlDeviceGetFanSpeed)
UNSUPPORTED(nvmlDeviceGetGridLicensableFeatures_v4)
UNSUPPORTED(nvmlDeviceGetDriverModel_v2)
UNSUPPORTED(nvmlDeviceGetConfComputeMemSizeInfo)
UNSUPPORTED(nvmlDeviceGetSamples)
UNSUPPORTED(nvmlDeviceGetGpuFabricInfoV)

int nvmlDeviceGetCudaComputeCapability(handle device, int *major, int *minor) {
    ANY(device);
    *major = 9;
    *minor = 0;
    return OK;
}

int nvmlDeviceGetPowerManagementLimitConstraints(handle device, unsigned *lowest, unsigned *highest) {
    WHOLE(device);
    *lowest = 200000;
    *highest = 700000;
    return OK;
}

int nvmlDeviceGetTotalEnergyConsumption(handle device, uint64_t *millijoules) {
    WHOLE(device);
    *millijoules = gpu_of(device)->energy_millijoules;
    return OK;
}

static int clock_of(handle device, unsigned type, unsigned *mhz, int maximum) {
    if (type > 3) return INVALID_ARGUMENT;
    const unsigned highest[] = {1980, 1980, 2619, 1545};
    const unsigned now[] = {gpu_of(device)->sm_clock_mhz, gpu_of(device)->sm_clock_mhz, gpu_of(device)->memory_clock_mhz, 1200};
    *mhz = maximum ? highest[type] : now[type];
    return OK;
}

int nvmlDeviceGetClockInfo(handle device, unsigned type, unsigned *mhz) {
    WHOLE(device);
    return clock_of(device, type, mhz, 0);
}

int nvmlDeviceGetMaxClockInfo(handle device, unsigned type, unsigned *mhz) {
    WHOLE(device);
    return clock_of(device, type, mhz, 1);
}

int nvmlDeviceGetTemperature(handle device, unsigned sensor, unsigned *celsius) {
    WHOLE(device);
    *celsius = gpu_of(device)->temperature_celsius;
    return sensor == 0 ? OK : INVALID_ARGUMENT;
}

int nvmlDeviceGetTemperatureV(handle device, struct temperature_v1 *temperature) {
    WHOLE(device);
    if (temperature->version != VERSION(struct temperature_v1, 1)) return ARGUMENT_VERSION_MISMATCH;
    temperature->celsius = (int32_t)gpu_of(device)->temperature_celsius;
    return temperature->sensor == 0 ? OK : INVALID_ARGUMENT;
}

int nvmlDeviceGetTemperatureThreshold(handle device, unsigned type, unsigned *celsius) {
    WHOLE(device);
    static const unsigned thresholds[] = {92, 89, 95, 87};
    if (type > 3) return NOT_SUPPORTED;
    *celsius = thresholds[type];
    return OK;
}

int nvmlDeviceGetMarginTemperature(handle device, struct margin_temperature_v1 *margin) {
    WHOLE(device);
    if (margin->version != VERSION(struct margin_temperature_v1, 1)) return ARGUMENT_VERSION_MISMATCH;
    margin->celsius = 87 - (int32_t)gpu_of(device)->temperature_celsius;
    return OK;
}

/* ---- Utilisation: a partitioned GPU and its instances have none ---- */

static int partitioned(handle device) { return gpu_of(device)->instance_count > 0; }

int nvmlDeviceGetUtilizationRates(handle device, struct utilization *rates) {
    WHOLE(device);
    if (partitioned(device)) return NOT_SUPPORTED;
    *rates = (struct utilization){gpu_of(device)->gpu_percent, gpu_of(device)->memory_percent};
    return OK;
}

#define ENGINE(function, expression)                                                                                   \
    int function(handle device, unsigned *percent, unsigned *period_micros) {                                          \
        WHOLE(device);                                                                                                 \
        if (partitioned(device)) return NOT_SUPPORTED;                                                                 \
        *percent = expression;                                                                                         \
        *period_micros = 167000;                                                                                       \
        return OK;                                                                                                     \
    }
ENGINE(nvmlDeviceGetEncoderUtilization, gpu_of(device)->encoder_percent)
ENGINE(nvmlDeviceGetDecoderUtilization, gpu_of(device)->decoder_percent)
ENGINE(nvmlDeviceGetJpgUtilization, 0)
ENGINE(nvmlDeviceGetOfaUtilization, 0)

int nvmlDeviceGetPcieThroughput(handle device, unsigned counter, unsigned *kib_per_second) {
    WHOLE(device);
    *kib_per_second = counter == 0 ? 2048 : 1024;
    return OK;
}

static int reasons_of(handle device, uint64_t *reasons) {
    *reasons = gpu_of(device)->gpu_percent == 0 ? 0x1 : 0;
    return OK;
}

int nvmlDeviceGetCurrentClocksEventReasons(handle device, uint64_t *reasons) {
    WHOLE(device);
    return reasons_of(device, reasons);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(handle device, uint64_t *reasons) {
    WHOLE(device);
    return reasons_of(device, reasons);
}

/* ---- Memory ---- */

static const uint64_t total_bytes = 81559 * MIB, part_bytes = 9984 * MIB, part_reserved_bytes = 16 * MIB;

static struct memory_v2 memory_of(handle device) {
    struct memory_v2 memory = {.total = part_bytes, .reserved = part_reserved_bytes};
    if (device->instance < 0) {
        memory.total = total_bytes;
        memory.reserved = gpu_of(device)->memory_reserved_bytes;
        memory.used = gpu_of(device)->memory_used_bytes;
    } else {
        memory.used = gpu_of(device)->instances[device->instance].memory_used_bytes;
    }
    memory.free = memory.total - memory.reserved - memory.used;
    return memory;
}

int nvmlDeviceGetMemoryInfo(handle device, struct memory_v1 *out) {
    ANY(device);
    struct memory_v2 memory = memory_of(device);
    *out = (struct memory_v1){memory.total, memory.free, memory.used + memory.reserved};
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(handle device, struct memory_v2 *out) {
    ANY(device);
    if (out->version != VERSION(struct memory_v2, 2)) return ARGUMENT_VERSION_MISMATCH;
    uint32_t version = out->version;
    *out = memory_of(device);
    out->version = version;
    return OK;
}

int nvmlDeviceGetBAR1MemoryInfo(handle device, struct bar1_memory *out) {
    ANY(device);
    *out = (struct bar1_memory){131072 * MIB, 131071 * MIB, 1 * MIB};
    return OK;
}

/* ---- Errors ---- */

int nvmlDeviceGetEccMode(handle device, unsigned *current, unsigned *pending) {
    WHOLE(device);
    *current = *pending = 1;
    return OK;
}

int nvmlDeviceGetTotalEccErrors(handle device, unsigned type, unsigned counter, uint64_t *count) {
    WHOLE(device);
    *count = (3 + type + 2 * counter) * 1000ull + (uint64_t)device->gpu;
    return OK;
}

int nvmlDeviceGetRemappedRows(handle device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
    WHOLE(device);
    if (partitioned(device)) return NOT_SUPPORTED;
    *correctable = 142000 + (unsigned)device->gpu;
    *uncorrectable = 143000 + (unsigned)device->gpu;
    *pending = *failed = 0;
    return OK;
}

int nvmlDeviceGetRetiredPages(handle device, unsigned cause, unsigned *count, uint64_t *pages) {
    (void)cause, (void)count, (void)pages;
    WHOLE(device);
    return NOT_SUPPORTED;
}

/* ---- Field values: a counter is 1000 x its id + the GPU's index, so that every mapping can be checked ---- */

static void answer(handle device, struct field_value *field) {
    const struct stub_gpu *gpu = gpu_of(device);
    field->value_type = 3; /* unsigned long long */
    field->value.ull = field->id * 1000ull + (uint64_t)device->gpu;
    switch (field->id) {
    case 3: case 4: case 5: case 6:                                         /* ECC totals */
    case 74: case 75: case 76: case 77: case 78: case 79: case 80: case 81: /* violations, ns */
    case 94: case 142: case 143: case 161: case 162: case 163: case 173: case 197: case 198:
        return;
    case 38: case 45: case 52: case 59: /* NVLink errors, before NVLink 5 */
        return;
    case 138: case 139:
        if (field->scope != 0xFFFFFFFFu && field->scope > 17) field->result = INVALID_ARGUMENT;
        return;
    case 82:
        field->value_type = 1;
        field->value.ui = gpu->memory_temperature_celsius;
        return;
    case 83:
        field->value.ull = gpu->energy_millijoules;
        return;
    case 91: /* NVLink count */
        field->value_type = 1;
        field->value.ui = 18;
        return;
    case 144: case 145:
        field->value_type = 1;
        field->value.ui = 0;
        return;
    case 185: case 186:
        field->value_type = 1;
        field->value.ui = gpu->power_milliwatts;
        return;
    case 230:
        field->value_type = 1;
        field->value.ui = gpu->recovery_action;
        return;
    default:
        field->result = NOT_SUPPORTED;
    }
}

int nvmlDeviceGetFieldValues(handle device, int count, struct field_value *fields) {
    ANY(device);
    for (int i = 0; i < count; i++) {
        fields[i].timestamp_micros = (int64_t)stub_micros();
        fields[i].latency_micros = 1;
        fields[i].result = device->instance < 0 ? OK : NOT_SUPPORTED;
        if (device->instance < 0) answer(device, &fields[i]);
    }
    return OK;
}
