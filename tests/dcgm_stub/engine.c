/* A simulated nv-hostengine: answers one request at a time, and keeps count of what its clients left behind. No engine. */
#define _GNU_SOURCE
#include "stub.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CLIENTS = 64, OWN_GROUPS = 3, OWN_FIELD_GROUPS = 4 };

struct client {
    int file, greeted;
    uint32_t groups, field_groups, watches;
    char names[MAX_FIELD_GROUPS][MAX_NAME];
};

struct stub_control *control;
static struct client clients[MAX_CLIENTS];
static struct pollfd waiting[MAX_CLIENTS + 1];
static int client_count;
static const char *release;
static uint64_t requests;
static uint32_t accepted;

static _Noreturn void fail(const char *what) {
    fprintf(stderr, "simulated host engine: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void map_control(const char *path) {
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) fail(path);
    control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (control == MAP_FAILED) fail("mmap");
    if (control->size != sizeof *control) fail("the control file has another layout");
}

static int listen_unix(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) fail("the path is too long");
    strcpy(address.sun_path, path);
    unlink(path); /* a killed engine leaves its socket behind */
    int file = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (file < 0 || bind(file, (struct sockaddr *)&address, sizeof address) != 0) fail(path);
    return file;
}

static int listen_tcp(const char *port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int file = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    if (file < 0) fail("socket");
    setsockopt(file, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(file, (struct sockaddr *)&address, sizeof address) != 0) fail(port);
    return file;
}

/* ---- What clients have here ---- */

static void tell(void) {
    struct stub_engine now = {.pid = (uint32_t)getpid(), .accepted = accepted, .requests = requests};
    for (int i = 0; i < client_count; i++) {
        now.connections += (uint32_t)clients[i].greeted;
        now.groups += clients[i].groups;
        now.field_groups += clients[i].field_groups;
        now.watches += clients[i].watches;
    }
    control->engine = now;
}

static void let_go(int place) {
    close(clients[place].file);
    clients[place] = clients[--client_count];
    tell();
}

static int add_group(struct client *client) {
    if (control->engine.groups + control->foreign_groups + OWN_GROUPS >= MAX_GROUPS) return LIMIT_REACHED;
    client->groups++;
    return OK;
}

/* Names of field groups are the engine's, not a connection's. */
static int add_field_group(struct client *client, const char *name) {
    if (control->engine.field_groups + OWN_FIELD_GROUPS >= MAX_FIELD_GROUPS) return LIMIT_REACHED;
    for (int i = 0; i < client_count; i++) {
        for (uint32_t n = 0; n < clients[i].field_groups; n++) {
            if (strcmp(clients[i].names[n], name) == 0) return DUPLICATE_KEY;
        }
    }
    strcpy(client->names[client->field_groups++], name);
    return OK;
}

static int remove_field_group(struct client *client, const char *name) {
    for (uint32_t n = 0; n < client->field_groups; n++) {
        if (strcmp(client->names[n], name) != 0) continue;
        memmove(client->names[n], client->names[--client->field_groups], MAX_NAME);
        return OK;
    }
    return NOT_CONFIGURED;
}

static int carry_out(struct client *client, const struct request *request) {
    if (request->operation != HELLO && !client->greeted) return GENERIC;
    /* Messages about a connection are the same in every major version. */
    if (request->operation != HELLO && (int)request->major != atoi(release)) return VERSION_MISMATCH;
    switch (request->operation) {
    case HELLO:
        if (control->connect_code != OK) return control->connect_code;
        accepted += !client->greeted;
        client->greeted = 1;
        return OK;
    case LOOK: return OK;
    case ADD_GROUP: return add_group(client);
    case REMOVE_GROUP: return client->groups--, OK;
    case ADD_FIELD_GROUP: return add_field_group(client, request->name);
    case REMOVE_FIELD_GROUP: return remove_field_group(client, request->name);
    case ADD_WATCH: return client->watches++, OK;
    case REMOVE_WATCH: return client->watches--, OK;
    case CRASH: raise(SIGSEGV); return GENERIC;
    default: return BAD_PARAMETER;
    }
}

static void think(void) {
    struct timespec left = {(time_t)(control->slow_micros / 1000000), (long)(control->slow_micros % 1000000) * 1000};
    while (nanosleep(&left, &left) != 0) {
    }
}

static int serve(struct client *client) {
    struct request request;
    if (recv(client->file, &request, sizeof request, MSG_WAITALL) != (ssize_t)sizeof request) return 0;
    if (request.magic != MAGIC) return 0;
    if (control->slow_micros != 0) think();
    requests++;
    request.name[MAX_NAME - 1] = 0;
    struct answer answer = {.magic = MAGIC, .code = carry_out(client, &request)};
    snprintf(answer.release, sizeof answer.release, "%s", release);
    tell();
    return send(client->file, &answer, sizeof answer, MSG_NOSIGNAL) == (ssize_t)sizeof answer;
}

int main(int count, char **arguments) {
    if (count != 4) {
        fprintf(stderr, "usage: stub-engine CONTROL_FILE PORT|/SOCKET RELEASE\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    map_control(arguments[1]);
    release = arguments[3];
    if (control->module_status == MODULE_LOADED) control->module_status = 0;
    int listener = arguments[2][0] == '/' ? listen_unix(arguments[2]) : listen_tcp(arguments[2]);
    if (listen(listener, 64) != 0) fail("listen");
    tell();
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        waiting[0] = (struct pollfd){listener, POLLIN, 0};
        for (int i = 0; i < client_count; i++) waiting[i + 1] = (struct pollfd){clients[i].file, POLLIN, 0};
        int known = client_count;
        if (poll(waiting, (nfds_t)known + 1, -1) < 0 && errno != EINTR) fail("poll");
        for (int i = known - 1; i >= 0; i--) {
            if (waiting[i + 1].revents != 0 && !serve(&clients[i])) let_go(i);
        }
        if ((waiting[0].revents & POLLIN) == 0) continue;
        int file = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (file < 0) continue;
        if (client_count == MAX_CLIENTS) {
            close(file);
            continue;
        }
        memset(&clients[client_count], 0, sizeof *clients);
        clients[client_count++].file = file;
    }
}
