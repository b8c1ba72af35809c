/* Simulated libdcgm, second part: connections to a host engine, one round trip per call, and what an engine says. No engine. */
#define _GNU_SOURCE
#include "stub.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 16, NO_FILE = -1, EMBEDDED = -2 };

/* Above 2^32, so that a handle passed as a C int is another one. */
static const dcgm_handle first_handle = 0x5a00000100000001ull, handle_step = 0x100000000ull;

struct connection {
    dcgm_handle handle;
    int file;
    char release[32];
};

struct stub_control *control;

static struct connection connections[MAX_CONNECTIONS];
static uint64_t connected;
static int references;
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

int64_t stub_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000 + now.tv_nsec / 1000 + control->clock_ahead_micros;
}

/* ---- Library ---- */

static int map_control(void) {
    const char *path = getenv("DCGM_STUB_CONTROL");
    int file = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) {
        fprintf(stderr, "simulated libdcgm: DCGM_STUB_CONTROL must name a control file (tests/dcgm_stub_support.py)\n");
        return GENERIC;
    }
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED || ((struct stub_control *)mapped)->size != sizeof *control) {
        fprintf(stderr, "simulated libdcgm: the control file has another layout\n");
        return GENERIC;
    }
    control = mapped;
    return OK;
}

EXPORTED int dcgmInit(void) {
    pthread_mutex_lock(&lock);
    int code = references == 0 ? map_control() : OK;
    if (code == OK) references++;
    pthread_mutex_unlock(&lock);
    return code;
}

static void drop(struct connection *one) {
    if (one->file >= 0) close(one->file);
    stub_forget(one->handle);
    *one = (struct connection){.file = NO_FILE};
}

EXPORTED int dcgmShutdown(void) {
    pthread_mutex_lock(&lock);
    int code = references == 0 ? UNINITIALIZED : OK;
    if (references > 0 && --references == 0) {
        for (int i = 0; i < MAX_CONNECTIONS; i++) {
            if (connections[i].handle != 0) drop(&connections[i]);
        }
        munmap(control, sizeof *control);
        control = NULL;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORTED const char *errorString(int code) {
    switch (code) {
    case OK: return "Success";
    case BAD_PARAMETER: return "Bad parameter passed to function";
    case GENERIC: return "Generic unspecified error";
    case NOT_CONFIGURED: return "Setting not configured";
    case UNINITIALIZED: return "DCGM is not initialized";
    case VERSION_MISMATCH: return "API version mismatch";
    case NO_DATA: return "No data is available";
    case NOT_WATCHED: return "Field is not being watched";
    case -17: return "No permission";
    case CONNECTION_GONE: return "Host engine connection invalid/disconnected";
    case LIMIT_REACHED: return "The maximum number of groups has been reached";
    case DUPLICATE_KEY: return "Duplicate key passed to function";
    case BUFFER_TOO_SMALL: return "The provided buffer is too small";
    case MODULE_NOT_LOADED: return "This request is serviced by a module of DCGM that is not currently loaded";
    case PROFILING_NOT_SUPPORTED: return "Profiling is not supported for this group of GPUs or GPU";
    default: return NULL;
    }
}

/* ---- Talking to the engine ---- */

static int64_t monotonic_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* One request and its answer. Past `until_ms` (0: never) it gives up; once connected, nothing ever does. */
static int talk(int file, enum operation operation, const char *name, int64_t until_ms, struct answer *answer) {
    struct request request = {.magic = MAGIC, .operation = operation, .major = MAJOR};
    if (name != NULL) snprintf(request.name, sizeof request.name, "%s", name);
    if (send(file, &request, sizeof request, MSG_NOSIGNAL) != (ssize_t)sizeof request) return CONNECTION_GONE;
    for (size_t have = 0; have < sizeof *answer;) {
        int64_t left_ms = until_ms == 0 ? -1 : until_ms - monotonic_ms();
        struct pollfd one = {file, POLLIN, 0};
        if (until_ms != 0 && left_ms <= 0) return CONNECTION_GONE;
        int ready = poll(&one, 1, (int)left_ms);
        if (ready < 0 && errno == EINTR) continue;
        if (ready <= 0) return CONNECTION_GONE;
        ssize_t got = recv(file, (char *)answer + have, sizeof *answer - have, 0);
        if (got <= 0) return CONNECTION_GONE;
        have += (size_t)got;
    }
    return answer->magic == MAGIC ? answer->code : CONNECTION_GONE;
}

static struct connection *find(dcgm_handle handle) {
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        if (handle != 0 && connections[i].handle == handle) return &connections[i];
    }
    return NULL;
}

const char *stub_release(dcgm_handle handle) { return find(handle)->release; }

int stub_enter(dcgm_handle handle, enum operation operation, const char *name) {
    pthread_mutex_lock(&lock);
    struct connection *one = find(handle);
    int code = OK;
    if (references == 0) {
        code = UNINITIALIZED;
    } else if (one == NULL) {
        code = BAD_PARAMETER; /* a truncated or foreign handle */
    } else if (one->file == NO_FILE) {
        code = CONNECTION_GONE;
    } else if (one->file != EMBEDDED) {
        struct answer answer;
        code = talk(one->file, operation, name, 0, &answer);
        if (code == CONNECTION_GONE) {
            close(one->file);
            one->file = NO_FILE;
        }
    }
    if (code != OK) pthread_mutex_unlock(&lock);
    return code;
}

void stub_leave(void) { pthread_mutex_unlock(&lock); }

/* ---- Connecting ---- */

static int open_unix(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) return -1;
    strcpy(address.sun_path, path);
    int file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (file >= 0 && connect(file, (struct sockaddr *)&address, sizeof address) == 0) return file;
    if (file >= 0) close(file);
    return -1;
}

static int open_tcp(const char *text, int64_t until_ms) {
    char host[256], *colon;
    snprintf(host, sizeof host, "%s", text);
    colon = strrchr(host, ':');
    if (colon != NULL) *colon = 0;
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found = NULL;
    if (getaddrinfo(host, colon == NULL ? "5555" : colon + 1, &hints, &found) != 0) return -1;
    int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), trouble = 0;
    socklen_t size = sizeof trouble;
    int started = file >= 0 && (connect(file, found->ai_addr, found->ai_addrlen) == 0 || errno == EINPROGRESS);
    freeaddrinfo(found);
    struct pollfd one = {file, POLLOUT, 0};
    int64_t left_ms = until_ms - monotonic_ms();
    if (started && left_ms > 0 && poll(&one, 1, (int)left_ms) == 1 &&
        getsockopt(file, SOL_SOCKET, SO_ERROR, &trouble, &size) == 0 && trouble == 0) {
        fcntl(file, F_SETFL, fcntl(file, F_GETFL) & ~O_NONBLOCK);
        return file;
    }
    if (file >= 0) close(file);
    return -1;
}

static dcgm_handle keep(int file, const char *release) {
    for (int i = 0; i < MAX_CONNECTIONS; i++) {
        if (connections[i].handle != 0) continue;
        connections[i].handle = first_handle + handle_step * connected++;
        connections[i].file = file;
        snprintf(connections[i].release, sizeof connections[i].release, "%s", release);
        return connections[i].handle;
    }
    return 0;
}

/* A closed port takes the whole time; so does an engine that does not answer. */
static int greet(const char *address, int is_unix, uint32_t timeout_ms, dcgm_handle *out) {
    int64_t until_ms = monotonic_ms() + (timeout_ms == 0 ? 5000 : timeout_ms);
    int file = -1;
    while (file < 0) {
        file = is_unix ? open_unix(address) : open_tcp(address, until_ms);
        if (file >= 0) break;
        if (monotonic_ms() >= until_ms) return CONNECTION_GONE;
        nanosleep(&(struct timespec){0, 5000000}, NULL);
    }
    struct answer answer;
    int code = talk(file, HELLO, NULL, until_ms, &answer);
    /* libdcgm waits for a minute for each of two answers that do not come; this one for the time for connecting. */
    int silent = code == CONNECTION_GONE && monotonic_ms() >= until_ms;
    if (code != OK) {
        /* As libdcgm itself: after a login that failed it disconnects, and tells the code of that, which is OK. */
        close(file);
        file = NO_FILE;
    }
    if (silent) return CONNECTION_GONE;
    pthread_mutex_lock(&lock);
    *out = keep(file, code == OK ? answer.release : "");
    pthread_mutex_unlock(&lock);
    return *out == 0 ? LIMIT_REACHED : OK;
}

EXPORTED int dcgmConnect_v2(const char *address, struct connect_v2 *how, dcgm_handle *out) {
    if (references == 0) return UNINITIALIZED;
    if (address == NULL || how == NULL || out == NULL) return BAD_PARAMETER;
    if (how->version != VERSION(struct connect_v2, 2)) return VERSION_MISMATCH;
    return greet(address, how->address_is_unix_socket != 0, how->timeout_ms, out);
}

EXPORTED int dcgmConnect_v3(const char *uri, struct connect_v3 *how, dcgm_handle *out) {
    if (references == 0) return UNINITIALIZED;
    if (uri == NULL || how == NULL || out == NULL) return BAD_PARAMETER;
    if (how->version != VERSION(struct connect_v3, 1)) return VERSION_MISMATCH;
    if (strncmp(uri, "unix://", 7) == 0) return greet(uri + 7, 1, how->timeout_ms, out);
    return greet(strncmp(uri, "tcp://", 6) == 0 ? uri + 6 : uri, 0, how->timeout_ms, out);
}

EXPORTED int dcgmStartEmbedded_v2(struct embedded_v2 *how) {
    if (references == 0) return UNINITIALIZED;
    if (how->version != VERSION(struct embedded_v2, 1)) return VERSION_MISMATCH;
    if (how->operation_mode != 1 && how->operation_mode != 2) return BAD_PARAMETER;
    pthread_mutex_lock(&lock);
    how->handle = keep(EMBEDDED, RELEASE);
    control->embedded++;
    pthread_mutex_unlock(&lock);
    return how->handle == 0 ? LIMIT_REACHED : OK;
}

static int end(dcgm_handle handle, int embedded) {
    pthread_mutex_lock(&lock);
    struct connection *one = find(handle);
    int known = one != NULL && (one->file == EMBEDDED) == embedded;
    if (known) drop(one); /* with an engine that is gone, too */
    if (known && embedded) control->embedded--;
    pthread_mutex_unlock(&lock);
    return known ? OK : BAD_PARAMETER;
}

EXPORTED int dcgmDisconnect(dcgm_handle handle) { return end(handle, 0); }
EXPORTED int dcgmStopEmbedded(dcgm_handle handle) { return end(handle, 1); }

/* ---- What an engine says of itself and of its GPUs ---- */

#define ENTER(handle)                                                                                                  \
    do {                                                                                                               \
        int entered = stub_enter(handle, LOOK, NULL);                                                                  \
        if (entered != OK) return entered;                                                                             \
    } while (0)

static int say_version(const char *release, struct version_info_v2 *out) {
    if (out->version != VERSION(struct version_info_v2, 2)) return VERSION_MISMATCH;
    snprintf(out->text, sizeof out->text, "version:%s;arch:x86_64;buildtype:Release;buildid:0;commit:0", release);
    return OK;
}

EXPORTED int dcgmVersionInfo(struct version_info_v2 *out) { return say_version(RELEASE, out); }

EXPORTED int dcgmHostengineVersionInfo(dcgm_handle handle, struct version_info_v2 *out) {
    int entered = stub_enter(handle, HELLO, NULL);
    if (entered != OK) return entered;
    LEAVE(say_version(stub_release(handle), out));
}

EXPORTED int dcgmModuleGetStatuses(dcgm_handle handle, struct module_statuses_v1 *out) {
    ENTER(handle);
    if (out->version != VERSION(struct module_statuses_v1, 1)) LEAVE(VERSION_MISMATCH);
    out->count = 9;
    for (uint32_t id = 0; id < out->count; id++) {
        out->modules[id].id = id;
        out->modules[id].status = id == PROFILING_MODULE ? control->module_status : id == 0 ? MODULE_LOADED : 0;
        /* Telemetry is paused in each module that is loaded. */
        if (control->paused_micros != 0 && out->modules[id].status == MODULE_LOADED) out->modules[id].status = MODULE_PAUSED;
    }
    LEAVE(OK);
}

/* While telemetry is paused, a GPU that works is disabled, and so is not among the supported ones. */
int32_t stub_status(uint32_t gpu) {
    uint32_t status = control->gpus[gpu].status;
    return control->paused_micros != 0 && status == 1 ? 6 : (int32_t)status;
}

EXPORTED int dcgmGetGpuStatus(dcgm_handle handle, uint32_t gpu, int32_t *status) {
    ENTER(handle);
    *status = gpu < control->gpu_count ? stub_status(gpu) : 0;
    LEAVE(OK);
}

EXPORTED int dcgmGetEntityGroupEntities(dcgm_handle handle, uint32_t level, uint32_t *ids, int32_t *count, uint32_t flags) {
    ENTER(handle);
    uint32_t found[MAX_GPUS * MAX_INSTANCES];
    int32_t number = 0, room = *count;
    for (uint32_t gpu = 0; gpu < control->gpu_count; gpu++) {
        if ((flags & 1) != 0 && stub_status(gpu) != 1) continue;
        if (level == GPU) found[number++] = gpu;
        if (level != GPU_INSTANCE && level != COMPUTE_INSTANCE) continue;
        for (uint32_t place = 0; place < control->gpus[gpu].instance_count; place++) found[number++] = gpu * SLOTS + place;
    }
    *count = number;
    if (room < number) LEAVE(BUFFER_TOO_SMALL);
    memcpy(ids, found, (size_t)number * sizeof *ids);
    LEAVE(OK);
}

EXPORTED int dcgmGetGpuInstanceHierarchy(dcgm_handle handle, struct hierarchy_v2 *out) {
    ENTER(handle);
    if (out->version != VERSION(struct hierarchy_v2, 2)) LEAVE(VERSION_MISMATCH);
    out->count = 0;
    for (uint32_t gpu = 0; gpu < control->gpu_count; gpu++) {
        for (uint32_t place = 0; place < control->gpus[gpu].instance_count; place++) {
            struct entity part = {GPU_INSTANCE, gpu * SLOTS + place};
            struct hierarchy_row row = {.entity = part, .parent = {GPU, gpu}, .nvml_gpu_index = control->gpus[gpu].nvml_index};
            snprintf(row.gpu_uuid, sizeof row.gpu_uuid, "GPU-5717b000-0000-4000-8000-%012u", gpu);
            row.nvml_instance_id = 7 + place;
            row.nvml_compute_instance_id = 0xFFFFFFFFu;
            row.nvml_profile_id = 19;
            row.nvml_profile_slices = 1;
            out->rows[out->count++] = row;
            row.parent = part;
            row.entity.level = COMPUTE_INSTANCE;
            row.nvml_compute_instance_id = 0;
            row.nvml_profile_id = 0;
            out->rows[out->count++] = row;
        }
    }
    LEAVE(OK);
}

EXPORTED int dcgmProfGetSupportedMetricGroups(dcgm_handle handle, struct metric_groups_v3 *out) {
    static const uint16_t ratios[] = {1001, 1002, 1003, 1004, 1005, 1006, 1007, 1008};
    static const uint16_t rates[] = {1009, 1010, 1011, 1012};
    ENTER(handle);
    if (out->version != VERSION(struct metric_groups_v3, 3)) LEAVE(VERSION_MISMATCH);
    if (out->gpu_id >= control->gpu_count) LEAVE(BAD_PARAMETER);
    uint32_t how = control->gpus[out->gpu_id].profiling;
    if (how != 2 && !stub_load_module()) LEAVE(MODULE_NOT_LOADED);
    if (how == 0) LEAVE(PROFILING_NOT_SUPPORTED);
    out->count = 2;
    out->groups[0] = (struct metric_group){.count = sizeof ratios / sizeof *ratios};
    memcpy(out->groups[0].field_ids, ratios, sizeof ratios);
    out->groups[1] = (struct metric_group){.major = 1, .count = sizeof rates / sizeof *rates};
    memcpy(out->groups[1].field_ids, rates, sizeof rates);
    LEAVE(OK);
}
