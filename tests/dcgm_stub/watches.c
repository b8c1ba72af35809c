/* Simulated libdcgm, third part: groups, watches, and the delivery of values. No engine. */
#define _GNU_SOURCE
#include "stub.h"

#include <stdio.h>
#include <string.h>

enum { MAX_WATCHES = 256, LIVE = 1, POISON = 0xa5, POISONED_BYTES = 512 };

typedef int (*enumeration)(uint32_t level, uint32_t id, struct field_value_v1 *values, int count, void *data);

struct group {
    dcgm_handle owner, handle;
    uint32_t count;
    struct entity entities[MAX_ENTITIES];
};

struct field_group {
    dcgm_handle owner, handle;
    uint32_t count;
    uint16_t ids[MAX_FIELDS];
    char name[MAX_NAME];
};

struct watch {
    dcgm_handle owner, group, field_group;
    int64_t began_micros, interval_micros, updated_micros; /* the last: asked for by dcgmUpdateAllFields; 0: never */
    double keep_seconds;
    int keep_samples;
    uint32_t xids_before[MAX_GPUS]; /* of each GPU when it began: of those it knows nothing */
    int dead; /* its profiling fields were refused: the others get one value, and never another */
};

static struct group groups[MAX_GROUPS];
static struct field_group field_groups[MAX_FIELD_GROUPS];
static struct watch watches[MAX_WATCHES];
static uint64_t made;
static struct field_value_v1 delivered[MAX_FIELDS];

#define ENTER(operation, name)                                                                                         \
    do {                                                                                                               \
        int entered = stub_enter(handle, operation, name);                                                             \
        if (entered != OK) return entered;                                                                             \
    } while (0)

static struct group *group_of(dcgm_handle owner, dcgm_handle wanted) {
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (groups[i].owner == owner && groups[i].handle == wanted) return &groups[i];
    }
    return NULL;
}

static struct field_group *fields_of(dcgm_handle owner, dcgm_handle wanted) {
    for (int i = 0; i < MAX_FIELD_GROUPS; i++) {
        if (field_groups[i].owner == owner && field_groups[i].handle == wanted) return &field_groups[i];
    }
    return NULL;
}

static struct watch *watch_of(dcgm_handle owner, dcgm_handle group, dcgm_handle field_group) {
    for (int i = 0; i < MAX_WATCHES; i++) {
        struct watch *one = &watches[i];
        if (one->owner == owner && one->group == group && one->field_group == field_group) return one;
    }
    return NULL;
}

void stub_forget(dcgm_handle handle) {
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (groups[i].owner == handle) groups[i].owner = 0;
    }
    for (int i = 0; i < MAX_FIELD_GROUPS; i++) {
        if (field_groups[i].owner == handle) field_groups[i].owner = 0;
    }
    for (int i = 0; i < MAX_WATCHES; i++) {
        if (watches[i].owner == handle) watches[i].owner = 0;
    }
}

/* ---- Groups: each belongs to its connection; ids are above 2^32, so that truncation shows ---- */

static int add_entity(struct group *group, struct entity entity) {
    if (stub_gpu(entity) == NULL) return BAD_PARAMETER;
    for (uint32_t n = 0; n < group->count; n++) {
        if (group->entities[n].level == entity.level && group->entities[n].id == entity.id) return BAD_PARAMETER;
    }
    if (group->count == MAX_ENTITIES) return LIMIT_REACHED;
    group->entities[group->count++] = entity;
    return OK;
}

static void add_all(struct group *group, int type) {
    for (uint32_t gpu = 0; gpu < control->gpu_count; gpu++) {
        if (type == 0 || type == 5) add_entity(group, (struct entity){GPU, gpu});
        for (uint32_t place = 0; place < control->gpus[gpu].instance_count; place++) {
            if (type == 3 || type == 5) add_entity(group, (struct entity){GPU_INSTANCE, gpu * SLOTS + place});
            if (type == 4 || type == 5) add_entity(group, (struct entity){COMPUTE_INSTANCE, gpu * SLOTS + place});
        }
    }
}

EXPORTED int dcgmGroupCreate(dcgm_handle handle, int type, const char *name, dcgm_handle *out) {
    if (name == NULL || out == NULL || type < 0 || type > 5) return BAD_PARAMETER;
    ENTER(ADD_GROUP, name);
    for (int i = 0; i < MAX_GROUPS; i++) {
        if (groups[i].owner != 0) continue;
        groups[i].owner = handle;
        groups[i].count = 0;
        *out = groups[i].handle = 0x7100000000ull + ++made;
        add_all(&groups[i], type);
        LEAVE(OK);
    }
    LEAVE(LIMIT_REACHED);
}

EXPORTED int dcgmGroupAddEntity(dcgm_handle handle, dcgm_handle group, uint32_t level, uint32_t id) {
    ENTER(LOOK, NULL);
    struct group *to = group_of(handle, group);
    if (to == NULL) LEAVE(NOT_CONFIGURED);
    /* A group that exists keeps a GPU that was lost, or whose telemetry is paused; a new one does not take it. */
    const struct stub_gpu *gpu = stub_gpu((struct entity){level, id});
    int32_t status = gpu == NULL ? 1 : stub_status((uint32_t)(gpu - control->gpus));
    if (status != 1) LEAVE(status == 4 ? GPU_IS_LOST : BAD_PARAMETER);
    LEAVE(add_entity(to, (struct entity){level, id}));
}

EXPORTED int dcgmGroupDestroy(dcgm_handle handle, dcgm_handle group) {
    ENTER(LOOK, NULL);
    struct group *one = group_of(handle, group);
    if (one == NULL) LEAVE(NOT_CONFIGURED);
    int code = stub_enter(handle, REMOVE_GROUP, NULL);
    if (code != OK) LEAVE(code);
    stub_leave();
    one->owner = 0;
    LEAVE(OK);
}

EXPORTED int dcgmFieldGroupCreate(dcgm_handle handle, int count, const uint16_t *ids, const char *name, dcgm_handle *out) {
    if (count <= 0 || count >= MAX_FIELDS || ids == NULL || name == NULL || out == NULL) return BAD_PARAMETER;
    ENTER(LOOK, NULL);
    for (int i = 0; i < count; i++) {
        /* As library and engine know it, whichever is older. */
        if (stub_meta(ids[i], RELEASE) == NULL || stub_meta(ids[i], stub_release(handle)) == NULL) LEAVE(BAD_PARAMETER);
    }
    int code = stub_enter(handle, ADD_FIELD_GROUP, name);
    if (code != OK) LEAVE(code);
    stub_leave();
    for (int i = 0; i < MAX_FIELD_GROUPS; i++) {
        struct field_group *one = &field_groups[i];
        if (one->owner != 0) continue;
        one->owner = handle;
        one->count = (uint32_t)count;
        memcpy(one->ids, ids, (size_t)count * sizeof *ids);
        snprintf(one->name, sizeof one->name, "%s", name);
        *out = one->handle = 0x9300000000ull + ++made;
        LEAVE(OK);
    }
    LEAVE(LIMIT_REACHED);
}

EXPORTED int dcgmFieldGroupDestroy(dcgm_handle handle, dcgm_handle field_group) {
    ENTER(LOOK, NULL);
    struct field_group *one = fields_of(handle, field_group);
    if (one == NULL) LEAVE(NOT_CONFIGURED);
    int code = stub_enter(handle, REMOVE_FIELD_GROUP, one->name);
    if (code != OK) LEAVE(code);
    stub_leave();
    one->owner = 0;
    LEAVE(OK);
}

/* ---- Watches ---- */

static int holds(const struct group *group, struct entity entity) {
    for (uint32_t n = 0; group != NULL && n < group->count; n++) {
        if (group->entities[n].level == entity.level && group->entities[n].id == entity.id) return 1;
    }
    return 0;
}

static int asks(const struct field_group *group, uint16_t id) {
    for (uint32_t n = 0; group != NULL && n < group->count; n++) {
        if (group->ids[n] == id) return 1;
    }
    return 0;
}

static int has_profiling(const uint16_t *ids, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if (stub_is_profiling(ids[i])) return 1;
    }
    return 0;
}

/* Whether all of a group can be profiled: with one GPU that cannot, the whole watch is refused. */
static int can_profile(const struct group *group) {
    for (uint32_t n = 0; n < group->count; n++) {
        const struct stub_gpu *gpu = stub_gpu(group->entities[n]);
        if (gpu == NULL || gpu->profiling == 2) continue;
        if (!stub_load_module()) return MODULE_NOT_LOADED;
        if (gpu->profiling == 0) return PROFILING_NOT_SUPPORTED;
    }
    return OK;
}

static int refusal(const struct group *group, const struct field_group *asked) {
    for (uint32_t i = 0; i < asked->count; i++) {
        if (control->refused_field != 0 && asked->ids[i] == control->refused_field) return control->refused_code;
    }
    return has_profiling(asked->ids, asked->count) ? can_profile(group) : OK;
}

EXPORTED int dcgmWatchFields(
    dcgm_handle handle, dcgm_handle group, dcgm_handle field_group, int64_t interval_micros, double keep_seconds, int keep_samples) {
    ENTER(LOOK, NULL);
    struct group *of = group_of(handle, group);
    struct field_group *what = fields_of(handle, field_group);
    if (of == NULL || what == NULL) LEAVE(NOT_CONFIGURED);
    if (interval_micros <= 0) LEAVE(BAD_PARAMETER);
    struct watch *one = watch_of(handle, group, field_group);
    if (one == NULL) {
        for (one = watches; one < watches + MAX_WATCHES && one->owner != 0; one++) {
        }
        if (one == watches + MAX_WATCHES) LEAVE(LIMIT_REACHED);
        int code = stub_enter(handle, ADD_WATCH, NULL);
        if (code != OK) LEAVE(code);
        stub_leave();
    }
    int refused = refusal(of, what);
    int64_t now = stub_now(), only = refused == OK ? 0 : now;
    *one = (struct watch){handle, group, field_group, now, interval_micros, only, keep_seconds, keep_samples, {0}, refused != OK};
    for (uint32_t n = 0; n < MAX_GPUS; n++) one->xids_before[n] = control->gpus[n].xid_count;
    LEAVE(refused);
}

static int in_common(dcgm_handle group, dcgm_handle field_group, dcgm_handle owner, const struct watch *other) {
    const struct group *mine = group_of(owner, group), *its = group_of(owner, other->group);
    const struct field_group *my = fields_of(owner, field_group), *their = fields_of(owner, other->field_group);
    int members = 0, fields = 0;
    for (uint32_t n = 0; its != NULL && n < its->count; n++) members |= holds(mine, its->entities[n]);
    for (uint32_t n = 0; their != NULL && n < their->count; n++) fields |= asks(my, their->ids[n]);
    return members && fields;
}

EXPORTED int dcgmUnwatchFields(dcgm_handle handle, dcgm_handle group, dcgm_handle field_group) {
    ENTER(LOOK, NULL);
    if (group_of(handle, group) == NULL || fields_of(handle, field_group) == NULL) LEAVE(NOT_CONFIGURED);
    struct watch *one = watch_of(handle, group, field_group);
    if (one == NULL) LEAVE(OK);
    int refused = refusal(group_of(handle, group), fields_of(handle, field_group));
    int code = stub_enter(handle, REMOVE_WATCH, NULL);
    if (code != OK) LEAVE(code);
    stub_leave();
    one->owner = 0;
    /* A connection watches a field of an entity or it does not: what this had in common with others is over for them. */
    for (int i = 0; i < MAX_WATCHES; i++) {
        if (watches[i].owner == handle && in_common(group, field_group, handle, &watches[i])) watches[i].dead = 1;
    }
    LEAVE(refused);
}

EXPORTED int dcgmUpdateAllFields(dcgm_handle handle, int wait) {
    (void)wait;
    ENTER(LOOK, NULL);
    for (int i = 0; i < MAX_WATCHES && control->paused_micros == 0; i++) {
        if (watches[i].owner == handle && (!watches[i].dead || watches[i].updated_micros == 0)) {
            watches[i].updated_micros = stub_now();
        }
    }
    LEAVE(OK);
}

/* ---- Reading ---- */

static const struct watch *watching(dcgm_handle owner, struct entity entity, uint16_t id) {
    for (int i = 0; i < MAX_WATCHES; i++) {
        const struct watch *one = &watches[i];
        if (one->owner != owner || (one->dead && stub_is_profiling(id))) continue;
        if (asks(fields_of(owner, one->field_group), id) && holds(group_of(owner, one->group), entity)) return one;
    }
    return NULL;
}

/* When a watch last took a value, 0: not yet. */
static int64_t taken_at(const struct watch *watch, int64_t now) {
    if (control->paused_micros != 0 && now > control->paused_micros) now = control->paused_micros;
    if (now < watch->began_micros) return watch->updated_micros;
    int64_t passed = (now - watch->began_micros) / watch->interval_micros;
    int64_t by_itself = watch->dead || passed == 0 ? 0 : watch->began_micros + passed * watch->interval_micros;
    return by_itself > watch->updated_micros ? by_itself : watch->updated_micros;
}

static uint32_t number_of(struct entity entity) { return entity.level == GPU ? entity.id : entity.id / SLOTS; }

static void read_one(const struct watch *watch, struct entity entity, uint16_t id, int64_t now, struct field_value_v1 *out) {
    const struct field_meta *meta = stub_meta(id, RELEASE);
    out->version = VERSION(struct field_value_v1, 1);
    out->field_id = id;
    out->field_type = (uint16_t)meta->type;
    out->at_micros = 0;
    int global = entity.level == NONE && meta->level == NONE;
    if ((!global && stub_gpu(entity) == NULL) || watch == NULL) {
        out->status = NOT_WATCHED;
        stub_blank(meta, 0, out);
        return;
    }
    /* Events have their own time, which is before the watch where the clock was set back. */
    int happened = id == 230 && stub_gpu(entity)->xid_count > watch->xids_before[number_of(entity)];
    int64_t at = happened ? INT64_MIN : id == 230 ? 0 : taken_at(watch, now);
    if (at == 0) {
        out->status = NO_DATA;
        stub_blank(meta, 0, out);
        return;
    }
    stub_value(entity, meta, at, out);
    /* The first sample of a ratio has nothing to be compared with. */
    if (stub_is_profiling(id) && now < watch->began_micros + watch->interval_micros && out->status == OK) stub_blank(meta, 0, out);
}

EXPORTED int dcgmEntitiesGetLatestValues(
    dcgm_handle handle, const struct entity *entities, uint32_t entity_count, const uint16_t *ids, uint32_t id_count,
    uint32_t flags, struct field_value_v2 *out) {
    static struct field_value_v1 one;
    int kills = (flags & LIVE) != 0 && has_profiling(ids, id_count);
    ENTER(kills ? CRASH : LOOK, NULL);
    for (uint32_t i = 0; i < id_count; i++) {
        if (stub_meta(ids[i], stub_release(handle)) == NULL || stub_meta(ids[i], RELEASE) == NULL) LEAVE(GENERIC);
        if ((flags & LIVE) != 0 && ids[i] == 230) LEAVE(GENERIC);
    }
    int64_t now = stub_now();
    /* Telemetry that is paused stops watches only. */
    struct watch live = {.began_micros = now, .updated_micros = now, .interval_micros = 1};
    for (uint32_t e = 0; e < entity_count; e++) {
        for (uint32_t i = 0; i < id_count; i++, out++) {
            const struct watch *by = (flags & LIVE) != 0 ? &live : watching(handle, entities[e], ids[i]);
            read_one(by, entities[e], ids[i], now, &one);
            out->version = VERSION(struct field_value_v2, 2);
            out->entity_group = entities[e].level;
            out->entity_id = entities[e].id;
            out->field_id = one.field_id;
            out->field_type = one.field_type;
            out->status = one.status;
            out->unused = 0;
            out->at_micros = one.at_micros;
            memcpy(&out->value, &one.value, 256);
        }
    }
    LEAVE(OK);
}

/* Hands records over, and spoils them afterwards: who kept a pointer reads garbage. */
static int deliver(struct entity entity, uint32_t count, enumeration callback, void *data) {
    uint32_t step = control->per_callback == 0 ? count : control->per_callback;
    for (uint32_t start = 0; start < count; start += step) {
        uint32_t number = count - start < step ? count - start : step;
        int answer = callback(entity.level, entity.id, &delivered[start], (int)number, data);
        control->deliveries++;
        control->records += number;
        for (uint32_t i = start; i < start + number; i++) memset(&delivered[i], POISON, POISONED_BYTES);
        if (answer < 0) return answer;
    }
    return OK;
}

EXPORTED int dcgmGetLatestValues_v2(
    dcgm_handle handle, dcgm_handle group, dcgm_handle field_group, enumeration callback, void *data) {
    ENTER(LOOK, NULL);
    const struct group *of = group_of(handle, group);
    const struct field_group *what = fields_of(handle, field_group);
    if (of == NULL || what == NULL) LEAVE(NOT_CONFIGURED);
    if (callback == NULL) LEAVE(BAD_PARAMETER);
    int64_t now = stub_now();
    const struct watch *same = watch_of(handle, group, field_group);
    for (uint32_t e = 0; e < of->count; e++) {
        for (uint32_t i = 0; i < what->count; i++) {
            int usual = same != NULL && !(same->dead && stub_is_profiling(what->ids[i]));
            const struct watch *by = usual ? same : watching(handle, of->entities[e], what->ids[i]);
            read_one(by, of->entities[e], what->ids[i], now, &delivered[i]);
        }
        if (deliver(of->entities[e], what->count, callback, data) != OK) break;
    }
    LEAVE(OK);
}

static int add_xids(const struct watch *watch, struct entity entity, int64_t since) {
    const struct stub_gpu *gpu = stub_gpu(entity);
    int64_t oldest = since;
    int64_t kept = stub_now() - (int64_t)(watch->keep_seconds * 1e6);
    if (watch->keep_seconds > 0 && kept > oldest) oldest = kept;
    uint32_t first = gpu->xid_count > MAX_XIDS ? gpu->xid_count - MAX_XIDS : 0;
    if (watch->keep_samples > 0 && gpu->xid_count - first > (uint32_t)watch->keep_samples) {
        first = gpu->xid_count - (uint32_t)watch->keep_samples;
    }
    if (first < watch->xids_before[number_of(entity)]) first = watch->xids_before[number_of(entity)];
    int count = 0;
    for (uint32_t n = first; n < gpu->xid_count; n++) {
        const struct stub_xid *one = &gpu->xids[n % MAX_XIDS];
        if (one->at_micros < oldest || one->level != entity.level) continue;
        if (one->level != GPU && one->place != entity.id % SLOTS) continue;
        delivered[count] = (struct field_value_v1){VERSION(struct field_value_v1, 1), 230, 'i', OK, one->at_micros, {0}};
        delivered[count++].value.integer = one->xid;
    }
    return count;
}

EXPORTED int dcgmGetValuesSince_v2(
    dcgm_handle handle, dcgm_handle group, dcgm_handle field_group, int64_t since, int64_t *next, enumeration callback,
    void *data) {
    ENTER(LOOK, NULL);
    const struct group *of = group_of(handle, group);
    const struct field_group *what = fields_of(handle, field_group);
    if (of == NULL || what == NULL) LEAVE(NOT_CONFIGURED);
    int64_t now = stub_now();
    for (uint32_t e = 0; e < of->count; e++) {
        for (uint32_t i = 0; i < what->count; i++) {
            const struct watch *by = watching(handle, of->entities[e], what->ids[i]);
            int count = 0;
            if (by == NULL || stub_gpu(of->entities[e]) == NULL) continue;
            /* As libdcgm itself: a round trip for each. */
            int code = stub_enter(handle, LOOK, NULL);
            if (code != OK) LEAVE(code);
            stub_leave();
            if (what->ids[i] == 230) {
                count = add_xids(by, of->entities[e], since);
            } else {
                read_one(by, of->entities[e], what->ids[i], now, &delivered[0]);
                count = delivered[0].status == OK && delivered[0].at_micros >= since;
            }
            if (count > 0 && deliver(of->entities[e], (uint32_t)count, callback, data) != OK) break;
        }
    }
    /* Of the engine's clock, whatever was delivered. */
    if (next != NULL) *next = now + 1;
    LEAVE(OK);
}
