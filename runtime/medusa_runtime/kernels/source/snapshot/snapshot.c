// Save the memory of this process, which must have a single thread, into a file from which resume.c continues it.
#define _GNU_SOURCE
#include "snapshot.h"
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define GAP_BYTES (16 * PAGE)  // fewer pages than this between others are saved, too: a mapping costs more than to read them

// Nothing is allocated while memory is being saved, because that would change it.
static struct snapshot head;
static struct segment segments[MOST_SEGMENTS];
static struct patch patches[MOST_PATCHES];
static char maps[8 << 20], names[1 << 18];
static uint32_t names_bytes;
static uint64_t pagemap[1 << 15];
static const char no_content[PAGE];
static int file, pages_file;
static uint64_t end_of_file;
static char *problem;
static size_t problem_bytes;

// Returns 0 once the registers are saved. In a process that is continued it returns again, with what that one passes.
int save_registers(struct registers *registers);
__asm__(".text\n"
        ".type save_registers, %function\n" SAVE_REGISTERS ".size save_registers, . - save_registers\n");

static int fail(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(problem, problem_bytes, format, values);
    va_end(values);
    return -1;
}

static int write_all(const void *data, uint64_t bytes) {
    while (bytes) {
        ssize_t written = pwrite(file, data, bytes, end_of_file);
        if (written <= 0) return fail("the file cannot be written: %s", strerror(errno));
        data = (const char *)data + written;
        bytes -= written;
        end_of_file += written;
    }
    return 0;
}

static int add(struct segment segment) {
    if (head.segments == MOST_SEGMENTS) return fail("its memory has more than %d parts", MOST_SEGMENTS);
    segments[head.segments++] = segment;
    return 0;
}

static int save(uint64_t begin, uint64_t end, int protection, enum segment_kind kind) {
    struct segment segment = {begin, end, end_of_file, 0, protection, kind};
    return add(segment) || write_all((const void *)begin, end - begin) ? -1 : 0;
}

static int read_pagemap(uint64_t begin, uint64_t pages) {
    ssize_t bytes = pages * sizeof *pagemap;
    if (pread(pages_file, pagemap, bytes, begin / PAGE * sizeof *pagemap) == bytes) return 0;
    return fail("/proc/self/pagemap cannot be read: %s", strerror(errno));
}

// Whether a page of anonymous memory, or of a mapped file, has to be saved: it has content, or was written to.
static int is_needed(uint64_t entry, uint64_t page, int of_file) {
    int in_memory = entry >> 63 & 1, in_swap = entry >> 62 & 1, is_the_files = entry >> 61 & 1;
    if (of_file) return in_swap || (in_memory && !is_the_files);
    return (in_memory || in_swap) && memcmp((const void *)page, no_content, PAGE);
}

// Whether nobody may touch this page, as at the end of a thread's stack (glibc 2.42). Such pages look like swapped ones.
static int is_guard(uint64_t entry, uint64_t page) {
    if (entry >> 63 & 1 || !(entry >> 62 & 1)) return 0;
    return pwrite(file, (const void *)page, 1, end_of_file) < 0 && errno == EFAULT;  // what follows overwrites the byte
}

static int add_guard(uint64_t page, int protection) {
    struct segment *last = segments + head.segments - 1;  // the mapping that it is in came before
    if (last->kind == GUARD && last->end == page) {
        last->end += PAGE;
        return 0;
    }
    return add((struct segment){page, page + PAGE, 0, 0, protection, GUARD});
}

// Save the pages of a mapping that a new mapping of the same kind would not have.
static int save_pages(uint64_t begin, uint64_t end, int protection, int of_file) {
    uint64_t start = 0, stop = 0;
    for (uint64_t page = begin; page < end; page += PAGE) {
        uint64_t index = (page - begin) / PAGE % (sizeof pagemap / sizeof *pagemap);
        if (!index) {
            uint64_t pages = (end - page) / PAGE, most = sizeof pagemap / sizeof *pagemap;
            if (read_pagemap(page, pages < most ? pages : most)) return -1;
        }
        int guard = is_guard(pagemap[index], page);
        if (!guard && !is_needed(pagemap[index], page, of_file)) continue;
        if (start && (guard || page - stop > GAP_BYTES)) {
            if (save(start, stop, protection, SAVED)) return -1;
            start = 0;
        }
        if (guard) {
            if (add_guard(page, protection)) return -1;
            continue;
        }
        if (!start) start = page;
        stop = page + PAGE;
    }
    return start ? save(start, stop, protection, SAVED) : 0;
}

static int save_file_mapping(uint64_t begin, uint64_t end, int protection, uint64_t offset, const char *name) {
    static uint32_t last_name;  // a library's mappings follow each other
    if (!names_bytes || strcmp(names + last_name, name)) {
        size_t bytes = strlen(name) + 1;
        if (names_bytes + bytes > sizeof names) return fail("it has mapped too many files");
        memcpy(names + names_bytes, name, bytes);
        last_name = names_bytes;
        names_bytes += bytes;
    }
    struct segment segment = {begin, end, offset, last_name, protection, FILE_PAGES};
    return add(segment) || save_pages(begin, end, protection, 1) ? -1 : 0;
}

static int save_stack(uint64_t end, int protection) {
    struct segment room = {end - STACK_BYTES, end, 0, 0, protection, ZEROS};
    // The 128 bytes below the stack pointer belong to the function that is running (System V ABI).
    uint64_t begin = (head.registers.stack_pointer - 128) & ~(PAGE - 1);
    return add(room) || save_pages(begin, end, protection, 0) ? -1 : 0;
}

// A mapping: its line in /proc/self/smaps, and its flags, which follow some lines later.
static int save_mapping(const char *line, const char *flags) {
    uint64_t begin, end, offset;
    char permissions[5] = "";
    int name_at = 0;
    if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %*s %*u %n", &begin, &end, permissions, &offset,
               &name_at) < 4)
        return fail("this line of /proc/self/smaps cannot be read: %s", line);
    const char *name = line + name_at;
    int protection = (permissions[0] == 'r' ? PROT_READ : 0) | (permissions[1] == 'w' ? PROT_WRITE : 0) |
                     (permissions[2] == 'x' ? PROT_EXEC : 0);
    if (!strncmp(name, "[vvar", 5) || !strcmp(name, "[vsyscall]")) return 0;
    if (!strcmp(name, "[vdso]")) {
        // libc goes on reading the headers of this library where they were. Its functions are called at a new place.
        head.vdso = begin, head.vdso_end = end;
        return save(begin, end, PROT_READ, SAVED);
    }
    if (permissions[3] == 's' && permissions[1] == 'w') {
        if (strcmp(name, "/dev/zero (deleted)")) return fail("it shares memory with others: %s", line);
        return save(begin, end, protection, SHARED);  // anonymous: only what this process forks could have it
    }
    if (!strcmp(name, "[stack]")) return save_stack(end, protection);
    if (!(protection & PROT_READ)) return add((struct segment){begin, end, 0, 0, protection, RESERVED});
    if (name[0] == '/') return save_file_mapping(begin, end, protection, offset, name);
    if (strstr(flags, " wf") || strstr(flags, " dp")) return add((struct segment){begin, end, 0, 0, protection, FORGOTTEN});
    return add((struct segment){begin, end, 0, 0, protection, ZEROS}) || save_pages(begin, end, protection, 0) ? -1 : 0;
}

static int find_patches(void) {
    for (uint32_t i = 0; i < head.segments; i++) {
        if (segments[i].kind != SAVED || segments[i].begin == head.vdso) continue;
        const uint64_t *begin = (const uint64_t *)segments[i].begin, *end = (const uint64_t *)segments[i].end;
        for (const uint64_t *word = begin; word < end; word++) {
            if (*word < head.vdso || *word >= head.vdso_end) continue;
            // The library's first byte is no function. Its address matters in the list of what the kernel has told the process.
            if (*word == head.vdso && (word == begin || word[-1] != AT_SYSINFO_EHDR)) continue;
            if (head.patches == MOST_PATCHES) return fail("it calls the kernel's library from too many places");
            patches[head.patches++] = (struct patch){(uint64_t)word, *word - head.vdso};
        }
    }
    return 0;
}

static int read_maps(void) {
    int from = open("/proc/self/smaps", O_RDONLY | O_CLOEXEC);
    size_t bytes = 0, room = sizeof maps - 1;
    ssize_t got = -1;
    while (from >= 0 && bytes < room && (got = read(from, maps + bytes, room - bytes)) > 0) bytes += got;
    if (from >= 0) close(from);
    maps[bytes] = 0;
    return got ? fail("/proc/self/smaps cannot be read as a whole") : 0;
}

static int save_mappings(void) {
    const char *mapping = 0;
    for (char *line = maps, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        if (*line < 'A' || *line > 'Z') mapping = line;  // the others begin with a name, as in "Size:"
        if (!strncmp(line, "VmFlags:", 8) && save_mapping(mapping, line)) return -1;
    }
    return 0;
}

static int save_memory(void) {
    end_of_file = PAGE;
    if (read_maps() || save_mappings()) return -1;
    if (!head.vdso) return fail("the kernel's library (vdso) is not where /proc/self/maps should show it");
    if (find_patches()) return -1;
    uint64_t tail = end_of_file;
    head.segments_at = end_of_file;
    if (write_all(segments, head.segments * sizeof *segments)) return -1;
    head.patches_at = end_of_file;
    if (write_all(patches, head.patches * sizeof *patches)) return -1;
    head.names_at = end_of_file;
    if (write_all(names, names_bytes)) return -1;
    head.tail_bytes = end_of_file - tail;
    end_of_file = 0;
    return write_all(&head, sizeof head);
}

extern void *__curbrk __attribute__((weak));                 // glibc's note of where its heap ends
extern const ptrdiff_t __rseq_offset __attribute__((weak));  // since glibc 2.35

// What libc and the kernel had agreed on holds for the old process only.
static void agree_with_kernel(void) {
    // The heap goes on where this process has room for it, which is above the old one (resume.c); libc then takes it for
    // memory that someone else has allocated. With the old end, it would shrink or grow what the kernel does not know.
    __curbrk = (void *)syscall(SYS_brk, 0);
    if (&__rseq_offset) {
        // Restartable sequences were not registered for this process, so the kernel does not keep its CPU's number.
        int *numbers = (int *)(head.thread_pointer + __rseq_offset);
        numbers[0] = 0;
        numbers[1] = -2;
    }
}

// Save this process into an empty file. Returns 0 when it is saved and -1, with a text in ``why``, if it cannot be. In
// a process that is continued from the file it returns the number of the descriptor that this one was given.
// ``thread_id_at`` is where, in bytes, glibc's description of a thread has the thread's id.
__attribute__((visibility("default"))) int medusa_save_snapshot(int into, size_t thread_id_at, char *why,
                                                                size_t why_bytes) {
    memset(&head, 0, sizeof head);
    names_bytes = 0;
    file = into, problem = why, problem_bytes = why_bytes;
    if (!&__curbrk) return fail("expected glibc, found another C library");
    if (sysconf(_SC_PAGESIZE) != PAGE) return fail("expected pages of 4 KiB, found %ld bytes", sysconf(_SC_PAGESIZE));
    int signs = signs_returns();
    if (signs < 0) return fail("this kernel cannot switch pointer authentication off; Linux 5.13 can");
    head.signs_returns = signs;
    head.thread_pointer = thread_pointer();
    head.thread_id = (uint64_t)pthread_self() + thread_id_at;
    if (*(const int *)head.thread_id != syscall(SYS_gettid)) return fail("glibc keeps the id of a thread elsewhere");
    pages_file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (pages_file < 0) return fail("/proc/self/pagemap cannot be opened: %s", strerror(errno));
    int resumed = save_registers(&head.registers);
    if (resumed) {
        agree_with_kernel();
        return resumed;
    }
    int status = save_memory();
    close(pages_file);
    return status;
}
