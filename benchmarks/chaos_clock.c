/* What a process under chaos has in LD_PRELOAD: a wall clock that can be stepped, and a disk that can hang. Nothing else
 * of time is touched: the monotonic clocks go on, as they do when a real wall clock is set. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Layout of the control file; as chaos_clock.py writes it. */
struct control {
    int64_t step_nanos;
    int64_t disk_hangs;
};

static const struct control nothing;
static const volatile struct control *control = &nothing;
static int (*real_clock)(clockid_t, struct timespec *);
static int (*real_fsync)(int);

__attribute__((constructor)) static void begin(void) {
    real_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    real_fsync = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    const char *path = getenv("CHAOS_CONTROL");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) control = mapped;
    close(file);
}

static int64_t wall_nanos(void) {
    struct timespec now;
    if (!real_clock) begin();
    real_clock(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec + control->step_nanos;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    if (!real_clock) begin();
    if (id != CLOCK_REALTIME && id != CLOCK_REALTIME_COARSE) return real_clock(id, now);
    int64_t nanos = wall_nanos();
    now->tv_sec = nanos / 1000000000LL;
    now->tv_nsec = nanos % 1000000000LL;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    int64_t nanos = wall_nanos();
    now->tv_sec = nanos / 1000000000LL;
    now->tv_usec = nanos % 1000000000LL / 1000;
    return 0;
}

time_t time(time_t *now) {
    time_t seconds = wall_nanos() / 1000000000LL;
    if (now) *now = seconds;
    return seconds;
}

int fsync(int file) {
    while (control->disk_hangs) usleep(10000);
    return real_fsync(file);
}
