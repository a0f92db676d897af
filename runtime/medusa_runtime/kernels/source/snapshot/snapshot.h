// The file that snapshot.c writes and resume.c reads. Addresses are those of the process that wrote it.
#pragma once
#include <stdint.h>
#if defined(__x86_64__)
#include "snapshot_x86_64.h"
#else
#include "snapshot_aarch64.h"
#endif

#define PAGE 4096ull
#define STACK_BYTES (8ull << 20)  // what the main thread's stack may grow to
#define MOST_SEGMENTS 16384
#define MOST_PATCHES 8192

enum segment_kind {
    RESERVED,   // no access: a guard, or room that an allocator keeps
    ZEROS,      // anonymous memory, whose pages with content follow as segments of their own
    FORGOTTEN,  // anonymous memory that a forked child finds empty, such as the state of random numbers
    FILE_PAGES, // pages of another file; those that were written to follow as segments of their own
    SAVED,      // pages of this file
    GUARD,      // pages of the mapping before, which nobody may touch (MADV_GUARD_INSTALL, Linux 6.13)
    SHARED,     // pages of this file, which a process shares with those that it forks
};

struct snapshot {
    struct registers registers;
    uint64_t thread_pointer;
    uint64_t thread_id;  // where libc keeps the main thread's id
    uint64_t vdso, vdso_end;  // where the kernel's library lay
    uint64_t segments_at, patches_at, names_at, tail_bytes;
    uint32_t segments, patches;
    uint32_t signs_returns;
};

struct segment {
    uint64_t begin, end;
    uint64_t offset;  // in this file, or in the other one
    uint32_t name;    // of the other file: an offset among the names
    uint16_t protection, kind;
};

// A word that holds an address in the vdso, which lies elsewhere in each process.
struct patch {
    uint64_t address, offset;
};
