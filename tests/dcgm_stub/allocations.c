/* Counts what a process asks the allocator for, large pieces apart: preloaded by benchmarks/dcgm_copies.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

enum { LARGE_BYTES = 4096 };

static uint64_t large, large_bytes, calls, all_bytes;

static void count(size_t size) {
    __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&all_bytes, size, __ATOMIC_RELAXED);
    if (size < LARGE_BYTES) return;
    __atomic_add_fetch(&large, 1, __ATOMIC_RELAXED);
    __atomic_add_fetch(&large_bytes, size, __ATOMIC_RELAXED);
}

void allocations(uint64_t out[4]) {
    out[0] = calls;
    out[1] = all_bytes;
    out[2] = large;
    out[3] = large_bytes;
}

/* glibc's own names: no dlsym, which allocates. */
extern void *__libc_malloc(size_t size);
extern void *__libc_calloc(size_t number, size_t size);
extern void *__libc_realloc(void *block, size_t size);

void *malloc(size_t size) {
    count(size);
    return __libc_malloc(size);
}

void *calloc(size_t number, size_t size) {
    count(number * size);
    return __libc_calloc(number, size);
}

void *realloc(void *block, size_t size) {
    count(size);
    return __libc_realloc(block, size);
}
