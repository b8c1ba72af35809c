/* Simulated libdcgm, first part: which fields there are, and what they say of GPUs and MIG instances. No engine. */
#define _GNU_SOURCE
#include "stub.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Where a field's number comes from: COUNTER is 1000 x `number` + the GPU's index, so that every mapping can be checked. */
enum origin {
    FIXED, COUNTER, UNSUPPORTED, RATIO, RATE, TEXT, XID,
    GPU_PERCENT, MEMORY_PERCENT, ENCODER_PERCENT, DECODER_PERCENT, TEMPERATURE, MEMORY_TEMPERATURE, WATTS, SM_CLOCK,
    MEMORY_CLOCK, REASONS, MILLIJOULES, FB_TOTAL, FB_FREE, FB_USED, FB_RESERVED, FB_RATIO, NVML_INDEX, MINOR, MIG_MODE,
    BINARY,
};

struct field {
    struct field_meta meta;
    enum origin origin;
    double number;
    int since; /* major x 100 + minor x 10 + patch */
};

#define F(id, type, tag, level, origin, number, since) {{id, type, 8, tag, 2, 0, level, "%x"}, origin, number, since}
#define ALWAYS 330
static const struct field fields[] = {
    F(1, 's', "driver_version", NONE, TEXT, 0, ALWAYS),
    F(2, 's', "nvml_version", NONE, TEXT, 0, ALWAYS),
    F(4, 'i', "driver_count", NONE, FIXED, 8, ALWAYS),
    F(50, 's', "name", COMPUTE_INSTANCE, TEXT, 0, ALWAYS),
    F(51, 's', "brand", GPU, TEXT, 0, ALWAYS),
    F(52, 'i', "nvml_index", GPU, NVML_INDEX, 0, ALWAYS),
    F(53, 's', "serial_number", GPU, TEXT, 0, ALWAYS),
    F(54, 's', "uuid", COMPUTE_INSTANCE, TEXT, 0, ALWAYS),
    F(55, 'i', "minor_number", GPU, MINOR, 0, ALWAYS),
    F(56, 's', "oem_inforom_version", GPU, TEXT, 0, ALWAYS),
    F(57, 's', "pci_busid", GPU, TEXT, 0, ALWAYS),
    F(60, 'b', "system_topology_pci", GPU, BINARY, 0, ALWAYS),
    F(67, 'i', "mig_mode", GPU, MIG_MODE, 0, ALWAYS),
    F(69, 'i', "mig_max_slices", GPU, FIXED, 7, ALWAYS),
    F(80, 's', "ecc_inforom_version", GPU, TEXT, 0, ALWAYS),
    F(81, 's', "power_inforom_version", GPU, TEXT, 0, ALWAYS),
    F(82, 's', "inforom_image_version", GPU, TEXT, 0, ALWAYS),
    F(85, 's', "vbios_version", GPU, TEXT, 0, ALWAYS),
    F(90, 'i', "bar1_total", COMPUTE_INSTANCE, FIXED, 131072, ALWAYS),
    F(92, 'i', "bar1_used", COMPUTE_INSTANCE, FIXED, 1, ALWAYS),
    F(93, 'i', "bar1_free", COMPUTE_INSTANCE, FIXED, 131071, ALWAYS),
    F(100, 'i', "sm_clock", GPU, SM_CLOCK, 0, ALWAYS),
    F(101, 'i', "memory_clock", GPU, MEMORY_CLOCK, 0, ALWAYS),
    F(102, 'i', "video_clock", GPU, FIXED, 1200, ALWAYS),
    F(112, 'i', "current_clocks_event_reasons", GPU, REASONS, 0, ALWAYS),
    F(113, 'i', "sm_max_clock", GPU, FIXED, 1980, ALWAYS),
    F(114, 'i', "memory_max_clock", GPU, FIXED, 2619, ALWAYS),
    F(130, 'b', "supported_clocks", GPU, BINARY, 0, ALWAYS),
    F(140, 'i', "memory_temp", GPU, MEMORY_TEMPERATURE, 0, ALWAYS),
    F(150, 'i', "gpu_temp", GPU, TEMPERATURE, 0, ALWAYS),
    F(151, 'i', "gpu_mem_max_op_temp", GPU, FIXED, 95, ALWAYS),
    F(152, 'i', "gpu_max_op_temp", GPU, FIXED, 87, ALWAYS),
    F(153, 'i', "gpu_temp_tlimit", GPU, FIXED, 37, 400),
    F(155, 'd', "power_usage", GPU, WATTS, 0, ALWAYS),
    F(156, 'i', "total_energy_consumption", GPU, MILLIJOULES, 0, ALWAYS),
    F(157, 'd', "power_usage_instant", GPU, WATTS, 0, ALWAYS),
    F(158, 'i', "slowdown_temp", GPU, FIXED, 89, ALWAYS),
    F(159, 'i', "shutdown_temp", GPU, FIXED, 92, ALWAYS),
    F(160, 'd', "power_management_limit", GPU, FIXED, 650, ALWAYS),
    F(161, 'd', "power_management_limit_min", GPU, FIXED, 200, ALWAYS),
    F(162, 'd', "power_management_limit_max", GPU, FIXED, 700, ALWAYS),
    F(163, 'd', "power_management_limit_default", GPU, FIXED, 700, ALWAYS),
    F(164, 'd', "enforced_power_limit", GPU, FIXED, 640, ALWAYS),
    F(190, 'i', "pstate", GPU, FIXED, 0, ALWAYS),
    F(191, 'i', "fan_speed", GPU, UNSUPPORTED, 0, ALWAYS),
    F(200, 'i', "pcie_tx_throughput", GPU, UNSUPPORTED, 0, ALWAYS),
    F(201, 'i', "pcie_rx_throughput", GPU, UNSUPPORTED, 0, ALWAYS),
    F(202, 'i', "pcie_replay_counter", GPU, COUNTER, 94, ALWAYS),
    F(203, 'i', "gpu_utilization", GPU, GPU_PERCENT, 0, ALWAYS),
    F(204, 'i', "mem_copy_utilization", GPU, MEMORY_PERCENT, 0, ALWAYS),
    F(206, 'i', "enc_utilization", GPU, ENCODER_PERCENT, 0, ALWAYS),
    F(207, 'i', "dec_utilization", GPU, DECODER_PERCENT, 0, ALWAYS),
    F(230, 'i', "xid_errors", COMPUTE_INSTANCE, XID, 0, ALWAYS),
    F(235, 'i', "pcie_max_link_gen", GPU, FIXED, 5, ALWAYS),
    F(236, 'i', "pcie_max_link_width", GPU, FIXED, 16, ALWAYS),
    F(237, 'i', "pcie_link_gen", GPU, FIXED, 4, ALWAYS),
    F(238, 'i', "pcie_link_width", GPU, FIXED, 8, ALWAYS),
    F(240, 'i', "power_violation", GPU, COUNTER, 74, ALWAYS),
    F(241, 'i', "thermal_violation", GPU, COUNTER, 75, ALWAYS),
    F(242, 'i', "sync_boost_violation", GPU, COUNTER, 76, ALWAYS),
    F(243, 'i', "board_limit_violation", GPU, COUNTER, 77, ALWAYS),
    F(244, 'i', "low_util_violation", GPU, COUNTER, 78, ALWAYS),
    F(245, 'i', "reliability_violation", GPU, COUNTER, 79, ALWAYS),
    F(246, 'i', "app_clock_violation", GPU, COUNTER, 80, ALWAYS),
    F(247, 'i', "base_clock_violation", GPU, COUNTER, 81, ALWAYS),
    F(250, 'i', "fb_total", COMPUTE_INSTANCE, FB_TOTAL, 0, ALWAYS),
    F(251, 'i', "fb_free", COMPUTE_INSTANCE, FB_FREE, 0, ALWAYS),
    F(252, 'i', "fb_used", COMPUTE_INSTANCE, FB_USED, 0, ALWAYS),
    F(253, 'i', "fb_resv", COMPUTE_INSTANCE, FB_RESERVED, 0, ALWAYS),
    F(254, 'd', "fb_used_percent", COMPUTE_INSTANCE, FB_RATIO, 0, ALWAYS),
    F(310, 'i', "ecc_sbe_volatile_total", GPU, COUNTER, 3, ALWAYS),
    F(311, 'i', "ecc_dbe_volatile_total", GPU, COUNTER, 4, ALWAYS),
    F(312, 'i', "ecc_sbe_aggregate_total", GPU, COUNTER, 5, ALWAYS),
    F(313, 'i', "ecc_dbe_aggregate_total", GPU, COUNTER, 6, ALWAYS),
    F(390, 'i', "retired_pages_sbe", GPU, UNSUPPORTED, 0, ALWAYS),
    F(391, 'i', "retired_pages_dbe", GPU, UNSUPPORTED, 0, ALWAYS),
    F(392, 'i', "retired_pages_pending", GPU, UNSUPPORTED, 0, ALWAYS),
    F(393, 'i', "uncorrectable_remapped_rows", GPU, COUNTER, 143, ALWAYS),
    F(394, 'i', "correctable_remapped_rows", GPU, COUNTER, 142, ALWAYS),
    F(395, 'i', "row_remap_failure", GPU, FIXED, 0, ALWAYS),
    F(396, 'i', "row_remap_pending", GPU, FIXED, 0, ALWAYS),
    F(409, 'i', "nvlink_crc_flit_error_count_total", GPU, COUNTER, 38, ALWAYS),
    F(419, 'i', "nvlink_crc_data_error_count_total", GPU, COUNTER, 45, ALWAYS),
    F(429, 'i', "nvlink_replay_error_count_total", GPU, COUNTER, 52, ALWAYS),
    F(439, 'i', "nvlink_recovery_error_count_total", GPU, COUNTER, 59, ALWAYS),
    F(449, 'i', "nvlink_bandwidth_total", GPU, COUNTER, 138, ALWAYS),
    F(500, 'i', "virtual_mode", GPU, FIXED, 0, ALWAYS),
    F(526, 'i', "vgpu_license_status", GPU, FIXED, 0, ALWAYS),
    F(1001, 'd', "gr_engine_active", COMPUTE_INSTANCE, RATIO, 1.0, ALWAYS),
    F(1002, 'd', "sm_active", COMPUTE_INSTANCE, RATIO, 0.9, ALWAYS),
    F(1003, 'd', "sm_occupancy", COMPUTE_INSTANCE, RATIO, 0.5, ALWAYS),
    F(1004, 'd', "tensor_active", COMPUTE_INSTANCE, RATIO, 0.4, ALWAYS),
    F(1005, 'd', "dram_active", GPU_INSTANCE, RATIO, 0.3, ALWAYS),
    F(1006, 'd', "fp64_active", COMPUTE_INSTANCE, RATIO, 0.01, ALWAYS),
    F(1007, 'd', "fp32_active", COMPUTE_INSTANCE, RATIO, 0.02, ALWAYS),
    F(1008, 'd', "fp16_active", COMPUTE_INSTANCE, RATIO, 0.03, ALWAYS),
    F(1009, 'i', "pcie_tx_bytes", GPU, RATE, 20, ALWAYS),
    F(1010, 'i', "pcie_rx_bytes", GPU, RATE, 21, ALWAYS),
    F(1011, 'i', "nvlink_tx_bytes", GPU, RATE, 61, ALWAYS),
    F(1012, 'i', "nvlink_rx_bytes", GPU, RATE, 60, ALWAYS),
    F(1016, 'd', "int_active", COMPUTE_INSTANCE, RATIO, 0.05, ALWAYS),
    F(1076, 'i', "c2c_tx_all_bytes", GPU, RATE, 76, 400),
    F(1077, 'i', "c2c_tx_data_bytes", GPU, RATE, 77, 400),
    F(1206, 'i', "nvlink_rcv_err", GPU, UNSUPPORTED, 0, 400),
    F(1209, 'i', "nvlink_rcv_local_link_integrity_err", GPU, UNSUPPORTED, 0, 400),
    F(1211, 'i', "nvlink_link_recovery_successful", GPU, UNSUPPORTED, 0, 400),
    F(1212, 'i', "nvlink_link_recovery_failed", GPU, UNSUPPORTED, 0, 400),
    F(1420, 'i', "clocks_event_power_cap_ns", GPU, COUNTER, 74, 400),
    F(1421, 'i', "clocks_event_boost_ns", GPU, COUNTER, 76, 400),
    F(1422, 'i', "clocks_event_sw_thermal_slowdown_ns", GPU, COUNTER, 269, 400),
    F(1423, 'i', "clocks_event_hw_thermal_slowdown_ns", GPU, COUNTER, 270, 400),
    F(1424, 'i', "clocks_event_power_brake_slowdown_ns", GPU, COUNTER, 271, 400),
    F(1523, 'i', "get_gpu_recovery_action", GPU, FIXED, 0, 440),
    F(1603, 'i', "sm_clock_hertz", GPU, SM_CLOCK, 0, 461),
    F(1613, 'd', "gpu_util_ratio", GPU, GPU_PERCENT, 0, 470),
};

static int number_of(const char *release) {
    int major = 0, minor = 0, patch = 0;
    sscanf(release, "%d.%d.%d", &major, &minor, &patch);
    return major * 100 + minor * 10 + patch;
}

/* Whole numbers of a GPU that no release has: more than a field group takes. */
static const struct field *spare(uint16_t id) {
    enum { FIRST = 700, COUNT = 150 };
    static struct field made[COUNT];
    if (id < FIRST || id >= FIRST + COUNT) return NULL;
    made[id - FIRST] = (struct field)F(id, 'i', "spare", GPU, FIXED, 1, ALWAYS);
    return &made[id - FIRST];
}

static const struct field *find(uint16_t id) {
    for (size_t low = 0, high = sizeof fields / sizeof *fields; low < high;) {
        size_t middle = (low + high) / 2;
        if (fields[middle].meta.id == id) return &fields[middle];
        if (fields[middle].meta.id < id) low = middle + 1;
        else high = middle;
    }
    return spare(id);
}

const struct field_meta *stub_meta(uint16_t id, const char *release) {
    const struct field *field = find(id);
    return field != NULL && field->since <= number_of(release) ? &field->meta : NULL;
}

EXPORTED const struct field_meta *DcgmFieldGetById(uint16_t id) { return stub_meta(id, RELEASE); }

int stub_load_module(void) {
    if (control->module_present && control->module_status == 0) control->module_status = MODULE_LOADED;
    return (int)control->module_present;
}

int stub_is_profiling(uint16_t id) { return id >= 1001 && id < 1100; }

/* ---- Entities: instance `place` of GPU g has id 8 g + place on both levels; its NVML GPU instance is 7 + place ---- */

static uint32_t gpu_of(struct entity entity) { return entity.level == GPU ? entity.id : entity.id / SLOTS; }

struct stub_gpu *stub_gpu(struct entity entity) {
    uint32_t gpu = gpu_of(entity);
    if (entity.level != GPU && entity.level != GPU_INSTANCE && entity.level != COMPUTE_INSTANCE) return NULL;
    if (gpu >= control->gpu_count) return NULL;
    if (entity.level != GPU && entity.id % SLOTS >= control->gpus[gpu].instance_count) return NULL;
    return &control->gpus[gpu];
}

static const struct stub_instance *instance_of(struct entity entity) {
    return entity.level == GPU ? NULL : &control->gpus[gpu_of(entity)].instances[entity.id % SLOTS];
}

/* ---- Values ---- */

void stub_blank(const struct field_meta *meta, int kind, struct field_value_v1 *out) {
    static const char *const texts[] = {"<<<NULL>>>", "<<<NOT_FOUND>>>", "<<<NOT_SUPPORTED>>>", "<<<NOT_PERM>>>"};
    switch (meta->type) {
    case 'd': out->value.real = 140737488355328.0 + kind; break;
    case 's': case 'b': strcpy(out->value.text, texts[kind]); break;
    default: out->value.integer = 0x7ffffffffffffff0 + kind;
    }
}

static void say_text(struct entity entity, uint16_t id, char *out, size_t size) {
    uint32_t gpu = gpu_of(entity), place = entity.id % SLOTS;
    switch (id) {
    case 1: snprintf(out, size, "590.48.01"); break;
    case 2: snprintf(out, size, "13.590.48.01"); break;
    case 50: snprintf(out, size, entity.level == GPU ? "NVIDIA H100 80GB HBM3" : "1g.10gb"); break;
    case 51: snprintf(out, size, "NVIDIA"); break;
    case 53: snprintf(out, size, "16500000000%02u", gpu); break;
    case 54:
        if (entity.level == GPU) {
            snprintf(out, size, "GPU-5717b000-0000-4000-8000-%012u", gpu);
        } else {
            snprintf(out, size, "MIG-5717b000-%04u-5000-8000-%06u%06u", instance_of(entity)->generation, gpu, place);
        }
        break;
    case 56: snprintf(out, size, "2.1"); break;
    case 57: snprintf(out, size, "00000000:%02x:00.0", 0x10 + gpu); break;
    case 80: snprintf(out, size, "7.16"); break;
    case 81: snprintf(out, size, "2.0"); break;
    case 82: snprintf(out, size, "G520.0200.00.05"); break;
    default: snprintf(out, size, "96.00.AF.00.01");
    }
}

struct memory {
    double total, reserved, used;
};

static struct memory memory_of(struct entity entity, const struct stub_gpu *gpu) {
    const double mib = 1024 * 1024;
    if (entity.level != GPU) return (struct memory){9984, 16, (double)instance_of(entity)->memory_used_bytes / mib};
    return (struct memory){81559, (double)gpu->memory_reserved_bytes / mib, (double)gpu->memory_used_bytes / mib};
}

static double engine_of(struct entity entity, const struct stub_gpu *gpu) {
    if (entity.level != GPU) return instance_of(entity)->engine_permille / 1000.0;
    if (gpu->instance_count == 0) return gpu->engine_permille / 1000.0;
    double sum = 0;
    for (uint32_t place = 0; place < gpu->instance_count; place++) sum += gpu->instances[place].engine_permille / 7000.0;
    return sum;
}

static double say_number(const struct field *field, struct entity entity, const struct stub_gpu *gpu) {
    struct memory memory = memory_of(entity, gpu);
    uint32_t index = gpu_of(entity);
    switch (field->origin) {
    case COUNTER: return field->number * 1000 + index;
    case RATIO: return field->number * engine_of(entity, gpu);
    case RATE: return field->number * 1048576;
    case GPU_PERCENT: return field->meta.type == 'd' ? gpu->gpu_percent / 100.0 : gpu->gpu_percent;
    case MEMORY_PERCENT: return gpu->memory_percent;
    case ENCODER_PERCENT: return gpu->encoder_percent;
    case DECODER_PERCENT: return gpu->decoder_percent;
    case TEMPERATURE: return gpu->temperature_celsius;
    case MEMORY_TEMPERATURE: return gpu->memory_temperature_celsius;
    case WATTS: return gpu->power_milliwatts / 1000.0;
    case SM_CLOCK: return gpu->sm_clock_mhz * (field->meta.id > 1600 ? 1e6 : 1);
    case MEMORY_CLOCK: return gpu->memory_clock_mhz;
    case REASONS: return gpu->clock_event_reasons;
    case MILLIJOULES: return (double)gpu->energy_millijoules;
    case FB_TOTAL: return memory.total;
    case FB_FREE: return floor(memory.total - memory.reserved - memory.used);
    case FB_USED: return floor(memory.used);
    case FB_RESERVED: return floor(memory.reserved);
    case FB_RATIO: return memory.used / (memory.total - memory.reserved);
    case NVML_INDEX: return gpu->nvml_index;
    case MINOR: return index;
    case MIG_MODE: return gpu->instance_count > 0;
    default: return field->number;
    }
}

/* Where nothing is measured: which blank there is instead; A_VALUE: nothing is missing. */
enum { A_VALUE = -1, A_BLANK = 0, A_NOT_SUPPORTED = 2 };

static int missing(const struct field *field, struct entity entity, const struct stub_gpu *gpu) {
    int shared = field->origin >= GPU_PERCENT && field->origin <= DECODER_PERCENT;
    if (field->origin == UNSUPPORTED || (shared && gpu->instance_count > 0)) return A_NOT_SUPPORTED;
    if (gpu->status != 1 && field->origin != TEXT && field->origin != NVML_INDEX && field->origin != MINOR) return A_BLANK;
    if (!stub_is_profiling(field->meta.id)) return A_VALUE;
    if (gpu->profiling == 0) return A_NOT_SUPPORTED;
    if (gpu->profiling == 1 && control->module_status != MODULE_LOADED) return A_BLANK;
    /* Of the board only, or of GPU instances only: blank further down. */
    return entity.level > field->meta.level ? A_BLANK : A_VALUE;
}

static int say_xid(struct entity entity, const struct stub_gpu *gpu, int64_t at_micros, struct field_value_v1 *out) {
    for (uint32_t n = gpu->xid_count; n > 0 && gpu->xid_count - n < MAX_XIDS; n--) {
        const struct stub_xid *one = &gpu->xids[(n - 1) % MAX_XIDS];
        if (one->level != entity.level || (entity.level != GPU && one->place != entity.id % SLOTS)) continue;
        if (one->at_micros < at_micros) break;
        out->at_micros = one->at_micros;
        out->value.integer = one->xid;
        return 1;
    }
    return 0;
}

static void answer_otherwise(const struct stub_override *other, const struct field_meta *meta, struct field_value_v1 *out) {
    switch (other->what) {
    case ANSWER_STATUS:
        out->status = other->code;
        stub_blank(meta, 0, out);
        return;
    case ANSWER_BLANK: stub_blank(meta, other->code, out); return;
    case ANSWER_BLANK32: out->value.integer = 0x7ffffff0 + other->code; return;
    case ANSWER_NUMBER:
        if (meta->type == 'd') out->value.real = other->number;
        else out->value.integer = (int64_t)other->number;
        return;
    case ANSWER_FROZEN:
        if (out->at_micros > other->at_micros) out->at_micros = other->at_micros;
        return;
    default: return;
    }
}

void stub_value(struct entity entity, const struct field_meta *meta, int64_t at_micros, struct field_value_v1 *out) {
    const struct field *field = find(meta->id);
    const struct stub_gpu *gpu = entity.level == NONE ? control->gpus : stub_gpu(entity);
    out->status = OK;
    out->at_micros = at_micros;
    int none = missing(field, entity, gpu);
    if (none != A_VALUE) {
        stub_blank(meta, none, out);
    } else if (field->origin == XID) {
        if (!say_xid(entity, gpu, at_micros, out)) {
            out->status = NO_DATA;
            stub_blank(meta, 0, out);
        }
    } else if (meta->type == 's') {
        say_text(entity, meta->id, out->value.text, sizeof out->value.text);
    } else if (meta->type == 'b') {
        memset(out->value.blob, 0x5a, 64);
    } else if (meta->type == 'd') {
        out->value.real = say_number(field, entity, gpu);
    } else {
        out->value.integer = (int64_t)say_number(field, entity, gpu);
    }
    for (uint32_t n = 0; n < control->override_count && n < MAX_OVERRIDES; n++) {
        const struct stub_override *other = &control->overrides[n];
        int meant = other->level == 0 || (other->level == entity.level && other->entity_id == entity.id);
        if (meant && other->field_id == meta->id) answer_otherwise(other, meta, out);
    }
}
