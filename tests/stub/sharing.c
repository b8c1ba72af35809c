/* Simulated libnvidia-ml.so.1, second half: MIG, processes, GPM and events. Not a driver. */
#define _GNU_SOURCE
#include "stub.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct device *handle;

/* ---- MIG: every partitioned GPU is cut into 1g.10gb; instance i is GPU instance 7 + i ---- */

static const uint32_t first_gpu_instance = 7;

int nvmlDeviceGetMigMode(handle device, unsigned *current, unsigned *pending) {
    WHOLE(device);
    *current = *pending = gpu_of(device)->instance_count > 0;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(handle device, unsigned index, handle *out) {
    WHOLE(device);
    if (index >= MAX_INSTANCES) return INVALID_ARGUMENT;
    if (index >= gpu_of(device)->instance_count) return NOT_FOUND;
    *out = (handle)stub_handle(device->gpu, (int)index);
    return OK;
}

int nvmlDeviceIsMigDeviceHandle(handle device, unsigned *is_instance) {
    ANY(device);
    *is_instance = device->instance >= 0;
    return OK;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle device, handle *out) {
    ANY(device);
    if (device->instance < 0) return INVALID_ARGUMENT;
    *out = (handle)stub_handle(device->gpu, -1);
    return OK;
}

int nvmlDeviceGetGpuInstanceId(handle device, unsigned *id) {
    ANY(device);
    if (device->instance < 0) return NOT_SUPPORTED;
    *id = first_gpu_instance + (uint32_t)device->instance;
    return OK;
}

int nvmlDeviceGetComputeInstanceId(handle device, unsigned *id) {
    ANY(device);
    if (device->instance < 0) return NOT_SUPPORTED;
    *id = 0;
    return OK;
}

int nvmlDeviceGetAttributes_v2(handle device, struct attributes *out) {
    ANY(device);
    if (device->instance < 0) return NOT_SUPPORTED;
    *out = (struct attributes){
        .multiprocessors = 16, .copy_engines = 1, .decoders = 1, .jpegs = 1, .gpu_slices = 1, .compute_slices = 1, .memory_mib = 9984};
    return OK;
}

struct profile {
    uint32_t profile, id, slices, instances, memory_mib;
    const char *name;
};

static const struct profile profiles[] = {
    {0, 19, 1, 7, 9984, "1g.10gb"},  {1, 14, 2, 3, 20096, "2g.20gb"}, {2, 9, 3, 2, 40448, "3g.40gb"},
    {3, 5, 4, 1, 40448, "4g.40gb"},  {4, 0, 7, 1, 81050, "7g.80gb"},  {9, 15, 1, 4, 20096, "1g.20gb"},
};

static const struct profile *find_profile(unsigned wanted) {
    for (size_t i = 0; i < sizeof profiles / sizeof *profiles; i++) {
        if (profiles[i].profile == wanted) return &profiles[i];
    }
    return NULL;
}

int nvmlDeviceGetGpuInstanceProfileInfo(handle device, unsigned wanted, struct gpu_instance_profile *out) {
    WHOLE(device);
    const struct profile *found = find_profile(wanted);
    if (found == NULL) return wanted > 17 ? INVALID_ARGUMENT : NOT_SUPPORTED;
    *out = (struct gpu_instance_profile){.id = found->id,
                                         .slices = found->slices,
                                         .instances = found->instances,
                                         .multiprocessors = 16 * found->slices,
                                         .memory_mib = found->memory_mib};
    return OK;
}

int nvmlDeviceGetGpuInstanceProfileInfoV(handle device, unsigned wanted, struct gpu_instance_profile_v2 *out) {
    WHOLE(device);
    if (out->version != VERSION(struct gpu_instance_profile_v2, 2)) return ARGUMENT_VERSION_MISMATCH;
    const struct profile *found = find_profile(wanted);
    if (found == NULL) return wanted > 17 ? INVALID_ARGUMENT : NOT_SUPPORTED;
    *out = (struct gpu_instance_profile_v2){.version = out->version,
                                            .id = found->id,
                                            .slices = found->slices,
                                            .instances = found->instances,
                                            .multiprocessors = 16 * found->slices,
                                            .memory_mib = found->memory_mib};
    snprintf(out->name, sizeof out->name, "MIG %s", found->name);
    return OK;
}

int nvmlDeviceGetGpuInstances(handle device, unsigned profile_id, handle *out, unsigned *count) {
    WHOLE(device);
    *count = profile_id == 19 ? gpu_of(device)->instance_count : 0;
    for (unsigned i = 0; i < *count; i++) out[i] = (handle)stub_handle(device->gpu, (int)i);
    return OK;
}

int nvmlDeviceGetGpuInstanceById(handle device, unsigned id, handle *out) {
    WHOLE(device);
    if (id < first_gpu_instance || id - first_gpu_instance >= gpu_of(device)->instance_count) return NOT_FOUND;
    *out = (handle)stub_handle(device->gpu, (int)(id - first_gpu_instance));
    return OK;
}

int nvmlGpuInstanceGetInfo(handle instance, struct gpu_instance_info *out) {
    ANY(instance);
    if (instance->instance < 0) return INVALID_ARGUMENT;
    *out = (struct gpu_instance_info){.device = (handle)stub_handle(instance->gpu, -1),
                                      .id = first_gpu_instance + (uint32_t)instance->instance,
                                      .profile_id = 19,
                                      .placement_start = (uint32_t)instance->instance,
                                      .placement_size = 1};
    return OK;
}

/* ---- Processes ---- */

/* Those of a device, as (pid, memory, instance); returns how many. A partitioned GPU lists those of all instances. */
static unsigned processes_of(handle device, struct process_detail *out) {
    const struct stub_gpu *gpu = gpu_of(device);
    unsigned count = 0;
    for (uint32_t i = 0; gpu->instance_count == 0 && i < gpu->process_count && i < MAX_PROCESSES; i++) {
        out[count++] = (struct process_detail){gpu->processes[i].pid, gpu->processes[i].memory_bytes, NO_INSTANCE, NO_INSTANCE, 0};
    }
    for (uint32_t i = 0; i < gpu->instance_count; i++) {
        if (gpu->instances[i].pid == 0 || (device->instance >= 0 && (uint32_t)device->instance != i)) continue;
        out[count++] = (struct process_detail){gpu->instances[i].pid, gpu->instances[i].memory_used_bytes, first_gpu_instance + i, 0, 0};
    }
    return count;
}

static int list_processes(handle device, unsigned *count, struct process_info *out) {
    struct process_detail found[MAX_PROCESSES + MAX_INSTANCES];
    unsigned there = processes_of(device, found), room = *count;
    *count = there;
    if (there == 0) return OK;
    if (room < there || out == NULL) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < there; i++) {
        out[i] = (struct process_info){
            .pid = found[i].pid, .memory_bytes = found[i].memory_bytes, .gpu_instance = found[i].gpu_instance, .compute_instance = found[i].compute_instance};
    }
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(handle device, unsigned *count, struct process_info *out) {
    ANY(device);
    return list_processes(device, count, out);
}

#define NO_PROCESSES(function)                                                                                         \
    int function(handle device, unsigned *count, struct process_info *out) {                                           \
        (void)out;                                                                                                     \
        ANY(device);                                                                                                   \
        *count = 0;                                                                                                    \
        return OK;                                                                                                     \
    }
NO_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3)
NO_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3)

int nvmlDeviceGetRunningProcessDetailList(handle device, struct process_detail_list *list) {
    ANY(device);
    if (list->version != VERSION(struct process_detail_list, 1)) return ARGUMENT_VERSION_MISMATCH;
    struct process_detail found[MAX_PROCESSES + MAX_INSTANCES];
    unsigned there = list->mode == 0 ? processes_of(device, found) : 0, room = list->count;
    list->count = there;
    if (there == 0) return OK;
    if (room < there || list->records == NULL) return INSUFFICIENT_SIZE;
    memcpy(list->records, found, there * sizeof *found);
    return OK;
}

/* The ring is filled about seven times a second; a reader that asks again sooner is told that nothing is new. */
static uint64_t newest_sample_micros(void) { return stub_micros() / 140000 * 140000; }

int nvmlDeviceGetProcessUtilization(handle device, struct process_sample *out, unsigned *count, uint64_t last_seen_micros) {
    WHOLE(device);
    const struct stub_gpu *gpu = gpu_of(device);
    const unsigned slots = 100;
    if (gpu->instance_count > 0) return NOT_SUPPORTED;
    if (out == NULL) return *count = slots, INSUFFICIENT_SIZE;
    if (*count < slots) return *count = slots, INSUFFICIENT_SIZE;
    uint64_t newest = newest_sample_micros();
    if (newest <= last_seen_micros || gpu->process_count == 0) return *count = 0, NOT_FOUND;
    uint32_t filled = gpu->process_count < MAX_PROCESSES ? gpu->process_count : MAX_PROCESSES;
    for (uint32_t i = 0; i < filled; i++) {
        out[i] = (struct process_sample){gpu->processes[i].pid, newest, gpu->processes[i].sm_percent, 10, 0, 0};
    }
    out[filled] = (struct process_sample){0, 0, 37100, 37100, 37100, 37100}; /* an unfilled slot holds garbage */
    *count = filled + 1;
    return OK;
}

int nvmlDeviceGetProcessesUtilizationInfo(handle device, struct process_samples_v1 *samples) {
    WHOLE(device);
    const struct stub_gpu *gpu = gpu_of(device);
    if (samples->version != VERSION(struct process_samples_v1, 1)) return ARGUMENT_VERSION_MISMATCH;
    if (gpu->instance_count > 0) return NOT_SUPPORTED;
    const unsigned slots = 100;
    if (samples->records == NULL || samples->count < slots) return samples->count = slots, INSUFFICIENT_SIZE;
    uint64_t newest = newest_sample_micros();
    if (newest <= samples->last_seen_micros || gpu->process_count == 0) return samples->count = 0, NOT_FOUND;
    uint32_t filled = gpu->process_count < MAX_PROCESSES ? gpu->process_count : MAX_PROCESSES;
    for (uint32_t i = 0; i < filled; i++) {
        samples->records[i] = (struct process_sample_v1){newest, gpu->processes[i].pid, gpu->processes[i].sm_percent, 10, 1, 2, 3, 4};
    }
    samples->count = filled;
    return OK;
}

/* ---- GPM ---- */

int nvmlGpmQueryDeviceSupport(handle device, struct gpm_support *support) {
    ANY(device);
    if (support->version != 1) return ARGUMENT_VERSION_MISMATCH;
    support->is_supported = 1;
    return OK;
}

int nvmlGpmSampleAlloc(struct sample **out) {
    ENTER();
    *out = calloc(1, sizeof **out);
    return OK;
}

int nvmlGpmSampleFree(struct sample *sample) {
    ENTER();
    free(sample);
    return OK;
}

static int take(handle device, int instance, struct sample *sample) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    sample->device = (struct device){device->gpu, instance};
    sample->taken_at_ns = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    return OK;
}

int nvmlGpmSampleGet(handle device, struct sample *sample) {
    ANY(device);
    return take(device, device->instance, sample);
}

int nvmlGpmMigSampleGet(handle device, unsigned gpu_instance, struct sample *sample) {
    WHOLE(device);
    uint32_t instance = gpu_instance - first_gpu_instance;
    if (gpu_instance < first_gpu_instance || instance >= gpu_of(device)->instance_count) return NOT_FOUND;
    return take(device, (int)instance, sample);
}

static void measure(const struct device *device, int too_early, struct gpm_metric *metric) {
    const struct stub_gpu *gpu = gpu_of(device);
    double engine = (device->instance < 0 ? gpu->engine_permille : gpu->instances[device->instance].engine_permille) / 10.0;
    metric->result = OK;
    switch (metric->id) {
    case 1: metric->value = engine; break;
    case 2: metric->value = engine * 0.9; break;
    case 3: metric->value = engine * 0.5; break;
    case 4: metric->value = engine * 0.05; break;
    case 5: metric->value = engine * 0.4; break;
    case 10: metric->value = engine * 0.3; break;
    case 11: metric->value = engine * 0.01; break;
    case 12: metric->value = engine * 0.02; break;
    case 13: metric->value = engine * 0.03; break;
    case 20: case 21: case 60: case 61: case 100: case 102: /* MiB/s, of the board only */
        metric->value = metric->id;
        if (device->instance >= 0) metric->result = NOT_SUPPORTED;
        break;
    default: metric->result = NOT_SUPPORTED;
    }
    if (too_early) metric->value = NAN;
}

int nvmlGpmMetricsGet(struct gpm_metrics_get *get) {
    ENTER();
    if (get->version != 1) return ARGUMENT_VERSION_MISMATCH;
    const struct sample *older = get->sample1, *newer = get->sample2;
    if (older == NULL || newer == NULL || older->taken_at_ns == 0 || newer->taken_at_ns == 0) return INVALID_ARGUMENT;
    if (newer->taken_at_ns <= older->taken_at_ns) return INVALID_ARGUMENT;
    if (older->device.gpu != newer->device.gpu || older->device.instance != newer->device.instance) return INVALID_ARGUMENT;
    if (gpu_of(&newer->device)->error != 0) return (int)gpu_of(&newer->device)->error;
    int too_early = newer->taken_at_ns - older->taken_at_ns < 100000000;
    for (uint32_t i = 0; i < get->count; i++) measure(&newer->device, too_early, &get->metrics[i]);
    return OK;
}

/* ---- Events: one Xid whenever a GPU's xid_count grows after registration ---- */

struct event_set {
    uint32_t registered, seen[MAX_GPUS];
};

int nvmlEventSetCreate(struct event_set **out) {
    ENTER();
    *out = calloc(1, sizeof **out);
    return OK;
}

int nvmlEventSetFree(struct event_set *set) {
    ENTER();
    free(set);
    return OK;
}

int nvmlDeviceGetSupportedEventTypes(handle device, uint64_t *types) {
    WHOLE(device);
    *types = 0x1 | 0x2 | 0x8 | 0x100;
    return OK;
}

int nvmlDeviceRegisterEvents(handle device, uint64_t types, struct event_set *set) {
    WHOLE(device);
    if ((types & ~0x10Bull) != 0) return NOT_SUPPORTED;
    set->registered |= 1u << device->gpu;
    set->seen[device->gpu] = gpu_of(device)->xid_count;
    return OK;
}

static int next_event(struct event_set *set, struct event_data *out) {
    for (int gpu = 0; gpu < MAX_GPUS; gpu++) {
        if ((set->registered >> gpu & 1) == 0 || set->seen[gpu] == control->gpus[gpu].xid_count) continue;
        set->seen[gpu]++;
        *out = (struct event_data){(handle)stub_handle(gpu, -1), 0x8, control->gpus[gpu].xid, NO_INSTANCE, NO_INSTANCE};
        return 1;
    }
    return 0;
}

int nvmlEventSetWait_v2(struct event_set *set, struct event_data *out, unsigned timeout_ms) {
    ENTER();
    const unsigned step_ms = 250; // a real driver sleeps until there is an event
    for (unsigned waited_ms = 0;; waited_ms += step_ms) {
        if (next_event(set, out)) return OK;
        if (waited_ms >= timeout_ms) return TIMEOUT;
        struct timespec step = {0, step_ms * 1000000L};
        nanosleep(&step, NULL);
    }
}
