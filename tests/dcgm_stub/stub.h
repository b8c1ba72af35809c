/* Layouts, control block and protocol of a simulated libdcgm and its host engine: for tests only, they drive no hardware. */
#ifndef DCGM_STUB_H
#define DCGM_STUB_H

#include <stddef.h>
#include <stdint.h>

#ifndef MAJOR
#define MAJOR 4
#endif
#ifndef RELEASE
#define RELEASE "4.6.0"
#endif

enum {
    OK = 0,
    BAD_PARAMETER = -1,
    GENERIC = -3,
    NOT_CONFIGURED = -5,
    UNINITIALIZED = -10,
    VERSION_MISMATCH = -12,
    NO_DATA = -14,
    NOT_WATCHED = -16,
    GPU_IS_LOST = -18,
    CONNECTION_GONE = -21,
    LIMIT_REACHED = -24,
    DUPLICATE_KEY = -26,
    BUFFER_TOO_SMALL = -31,
    MODULE_NOT_LOADED = -33,
    PROFILING_NOT_SUPPORTED = -36,
};

enum { NONE = 0, GPU = 1, GPU_INSTANCE = 4, COMPUTE_INSTANCE = 5 };
enum { PROFILING_MODULE = 8, MODULE_LOADED = 3, MODULE_PAUSED = 5 };
enum { MAX_GPUS = 16, MAX_INSTANCES = 7, MAX_XIDS = 32, MAX_OVERRIDES = 32, SLOTS = 8 };
enum { MAX_GROUPS = 64, MAX_FIELD_GROUPS = 64, MAX_ENTITIES = MAJOR < 4 ? 64 : 1024, MAX_FIELDS = 128 /* and one less in a group */, MAX_NAME = 256 };

/* ---- The control block: one file, mapped by library, engine and whoever steers them (tests/dcgm_stub_support.py). ---- */

struct stub_instance {
    uint32_t engine_permille, generation; /* another generation is another MIG UUID at the same place */
    uint64_t memory_used_bytes;
};

struct stub_xid {
    int64_t at_micros;
    uint32_t xid, level, place, reserved; /* level 1: the GPU; 4, 5: the instance at `place` */
};

struct stub_gpu {
    uint32_t status;       /* of dcgmGetGpuStatus: 1 works (6 while telemetry is paused), 4 lost, 7 detached */
    uint32_t nvml_index;
    uint32_t gpu_percent, memory_percent, encoder_percent, decoder_percent;
    uint32_t engine_permille;
    uint32_t temperature_celsius, memory_temperature_celsius;
    uint32_t power_milliwatts, sm_clock_mhz, memory_clock_mhz;
    uint32_t clock_event_reasons;
    uint32_t instance_count;
    uint32_t profiling;    /* what measures its PROF fields: 0 nothing, 1 the module, 2 GPM, without the module */
    uint32_t xid_count;    /* all so far; the last MAX_XIDS of them stand in `xids` */
    uint64_t memory_used_bytes, memory_reserved_bytes, energy_millijoules;
    struct stub_instance instances[MAX_INSTANCES];
    struct stub_xid xids[MAX_XIDS];
};

enum { KEEP = 0, ANSWER_STATUS, ANSWER_BLANK, ANSWER_BLANK32, ANSWER_NUMBER, ANSWER_FROZEN };

struct stub_override {
    uint32_t field_id, what;
    uint32_t level, entity_id; /* level 0: every entity */
    int32_t code;              /* the status, or how much is added to the blank */
    uint32_t reserved;
    int64_t at_micros;         /* when it froze */
    double number;
};

struct stub_engine {           /* told by the engine that runs now */
    uint32_t pid, connections, groups, field_groups, watches, accepted;
    uint64_t requests;
};

struct stub_control {
    uint32_t size, gpu_count;
    uint32_t slow_micros;      /* how long the engine thinks about every request */
    int32_t connect_code;      /* what the engine answers a new client; 0: works */
    uint32_t module_present;   /* whether there is a profiling module; the first request that needs it loads it */
    uint32_t module_status;    /* of it: 0 not loaded, 3 loaded, 5 paused */
    uint32_t foreign_groups;   /* of other clients: so much less room for groups */
    uint32_t per_callback;     /* records in one delivery; 0: all of an entity */
    uint32_t refused_field;    /* a watch with this field fails with `refused_code` */
    int32_t refused_code;
    int64_t clock_ahead_micros; /* of the engine's clock, against ours */
    uint64_t deliveries, records;
    int64_t paused_micros;     /* when telemetry was paused, as for a diagnosis; 0: it is not */
    uint32_t reserved;
    uint32_t embedded, override_count;
    struct stub_engine engine;
    struct stub_override overrides[MAX_OVERRIDES];
    struct stub_gpu gpus[MAX_GPUS];
};

/* ---- Between library and engine: one request, one answer ---- */

enum operation {
    HELLO = 1,
    LOOK,
    ADD_GROUP,
    REMOVE_GROUP,
    ADD_FIELD_GROUP,
    REMOVE_FIELD_GROUP,
    ADD_WATCH,
    REMOVE_WATCH,
    CRASH,
};

struct request {
    uint32_t magic, operation, major, reserved;
    char name[MAX_NAME];
};

struct answer {
    uint32_t magic;
    int32_t code;
    char release[32];
};

#define MAGIC 0x4447434Du

/* ---- Layouts of dcgm_structs.h and dcgm_agent.h, the same from 3.3 to 4.7 on 64-bit Linux ---- */

typedef uintptr_t dcgm_handle;

union field_payload {
    int64_t integer;
    double real;
    char text[256];
    char blob[4096];
};

struct field_value_v1 {
    uint32_t version;
    uint16_t field_id, field_type;
    int32_t status;
    int64_t at_micros;
    union field_payload value;
};

struct field_value_v2 {
    uint32_t version, entity_group, entity_id;
    uint16_t field_id, field_type;
    int32_t status;
    uint32_t unused;
    int64_t at_micros;
    union field_payload value;
};

struct entity {
    uint32_t level, id;
};

struct connect_v2 {
    uint32_t version, persist_after_disconnect, timeout_ms, address_is_unix_socket;
};

struct connect_v3 {
    uint32_t version, persist_after_disconnect, timeout_ms;
};

struct embedded_v2 {
    uint32_t version, operation_mode;
    dcgm_handle handle;
    const char *log_file;
    uint32_t severity, deny_list_count, deny_list[10];
};

struct hierarchy_row {
    struct entity entity, parent;
    char gpu_uuid[128];
    uint32_t nvml_gpu_index, nvml_instance_id, nvml_compute_instance_id, nvml_profile_id, nvml_profile_slices;
};

struct hierarchy_v2 {
    uint32_t version, count;
    struct hierarchy_row rows[448];
};

struct field_meta {
    uint16_t id;
    char type;
    uint8_t size;
    char tag[48];
    int32_t scope, nvml_field;
    uint32_t level;
    const void *format;
};

struct metric_group {
    uint16_t major, minor;
    uint32_t count;
    uint16_t field_ids[64];
};

struct metric_groups_v3 {
    uint32_t version, unused, gpu_id, count;
    struct metric_group groups[10];
};

struct module_statuses_v1 {
    uint32_t version, count;
    struct {
        uint32_t id, status;
    } modules[16];
};

struct version_info_v2 {
    uint32_t version;
    char text[512];
};

#define AT(type, member, offset) _Static_assert(offsetof(type, member) == (offset), #type "." #member)
#define SIZED(type, size) _Static_assert(sizeof(type) == (size), #type)
SIZED(dcgm_handle, 8);
SIZED(union field_payload, 4096);
SIZED(struct field_value_v1, 4120);
AT(struct field_value_v1, field_id, 4);
AT(struct field_value_v1, field_type, 6);
AT(struct field_value_v1, status, 8);
AT(struct field_value_v1, at_micros, 16);
AT(struct field_value_v1, value, 24);
SIZED(struct field_value_v2, 4128);
AT(struct field_value_v2, entity_group, 4);
AT(struct field_value_v2, entity_id, 8);
AT(struct field_value_v2, field_id, 12);
AT(struct field_value_v2, field_type, 14);
AT(struct field_value_v2, status, 16);
AT(struct field_value_v2, unused, 20);
AT(struct field_value_v2, at_micros, 24);
AT(struct field_value_v2, value, 32);
SIZED(struct entity, 8);
AT(struct entity, id, 4);
SIZED(struct connect_v2, 16);
AT(struct connect_v2, timeout_ms, 8);
AT(struct connect_v2, address_is_unix_socket, 12);
SIZED(struct connect_v3, 12);
AT(struct connect_v3, timeout_ms, 8);
SIZED(struct embedded_v2, 72);
AT(struct embedded_v2, operation_mode, 4);
AT(struct embedded_v2, handle, 8);
AT(struct embedded_v2, log_file, 16);
AT(struct embedded_v2, severity, 24);
AT(struct embedded_v2, deny_list_count, 28);
AT(struct embedded_v2, deny_list, 32);
SIZED(struct hierarchy_row, 164);
AT(struct hierarchy_row, parent, 8);
AT(struct hierarchy_row, gpu_uuid, 16);
AT(struct hierarchy_row, nvml_gpu_index, 144);
AT(struct hierarchy_row, nvml_instance_id, 148);
AT(struct hierarchy_row, nvml_compute_instance_id, 152);
AT(struct hierarchy_row, nvml_profile_id, 156);
AT(struct hierarchy_row, nvml_profile_slices, 160);
SIZED(struct hierarchy_v2, 73480);
AT(struct hierarchy_v2, rows, 8);
SIZED(struct field_meta, 72);
AT(struct field_meta, type, 2);
AT(struct field_meta, size, 3);
AT(struct field_meta, tag, 4);
AT(struct field_meta, scope, 52);
AT(struct field_meta, nvml_field, 56);
AT(struct field_meta, level, 60);
AT(struct field_meta, format, 64);
SIZED(struct metric_group, 136);
AT(struct metric_group, field_ids, 8);
SIZED(struct metric_groups_v3, 1376);
AT(struct metric_groups_v3, groups, 16);
SIZED(struct module_statuses_v1, 136);
AT(struct module_statuses_v1, modules, 8);
SIZED(struct version_info_v2, 516);

#define VERSION(type, number) ((uint32_t)sizeof(type) | (uint32_t)(number) << 24)

/* ---- Shared by the library's translation units ---- */

#define EXPORTED __attribute__((visibility("default")))

extern struct stub_control *control;

int64_t stub_now(void);                                                 /* by the engine's clock, in microseconds */
int stub_enter(dcgm_handle handle, enum operation operation, const char *name); /* one round trip; a return code */
const char *stub_release(dcgm_handle handle);                           /* of the engine behind a connection */
void stub_leave(void);                                                  /* after an OK from stub_enter */
#define LEAVE(code)                                                                                                    \
    do {                                                                                                               \
        int left = (code);                                                                                             \
        stub_leave();                                                                                                  \
        return left;                                                                                                   \
    } while (0)
void stub_forget(dcgm_handle handle);                                   /* the groups and watches of a connection */

int32_t stub_status(uint32_t gpu);                                      /* of dcgmGetGpuStatus, now */
struct stub_gpu *stub_gpu(struct entity entity);                        /* NULL: there is no such entity */
const struct field_meta *stub_meta(uint16_t id, const char *release);   /* NULL: that release does not know it */
int stub_is_profiling(uint16_t id);
int stub_load_module(void);                                             /* whether it is there */
/* The value of a field now: `at_micros` is when it was taken, `now` when it is asked for. */
void stub_value(struct entity entity, const struct field_meta *meta, int64_t at_micros, struct field_value_v1 *out);
void stub_blank(const struct field_meta *meta, int kind, struct field_value_v1 *out);

#endif
