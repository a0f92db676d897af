// The program medusa-resume: continue the process that snapshot.c has saved, in place of this one.
//
// It uses no libc. It is linked at an address between those of programs, whose heaps are below it, and those of
// libraries: nothing of it lies where memory is mapped, and this process's heap begins above the old one. The variable
// MEDUSA_RESUME is N,S,M,P: how often to try, in one digit, the descriptors of the snapshot and of the message that the
// continued process gets, and the program that is executed, with the same arguments, if memory cannot be mapped.
#define _GNU_SOURCE
#include "snapshot.h"
#include <elf.h>
#include <fcntl.h>
#include <sys/mman.h>

#define GUARD_INSTALL 102  // MADV_GUARD_INSTALL, which older headers lack

struct library {
    const Elf64_Sym *symbols;
    const char *strings;
    uint32_t count;
    uint64_t base;
};

static int equal(const char *a, const char *b) {
    while (*a && *a == *b) a++, b++;
    return *a == *b;
}

// Read the symbols of a vdso at this address.
static struct library library_at(uint64_t address) {
    const Elf64_Ehdr *header = (const void *)address;
    const Elf64_Phdr *parts = (const void *)(address + header->e_phoff);
    const Elf64_Dyn *entry = 0;
    const uint32_t *hash = 0, *gnu_hash = 0;
    struct library found = {0, 0, 0, 0};
    for (int i = 0; i < header->e_phnum; i++) {
        if (parts[i].p_type == PT_DYNAMIC) entry = (const void *)(address + parts[i].p_offset);
        if (parts[i].p_type == PT_LOAD) found.base = address + parts[i].p_offset - parts[i].p_vaddr;
    }
    for (; entry && entry->d_tag != DT_NULL; entry++) {
        const void *value = (const void *)(found.base + entry->d_un.d_ptr);
        if (entry->d_tag == DT_SYMTAB) found.symbols = value;
        if (entry->d_tag == DT_STRTAB) found.strings = value;
        if (entry->d_tag == DT_HASH) hash = value;
        if (entry->d_tag == DT_GNU_HASH) gnu_hash = value;
    }
    if (!found.symbols || !found.strings) return found;
    if (hash) {
        found.count = hash[1];
    } else if (gnu_hash) {  // the last chain ends with the last symbol
        const uint32_t *buckets = gnu_hash + 4 + gnu_hash[2] * 2, *chains = buckets + gnu_hash[0];
        for (uint32_t i = 0; i < gnu_hash[0]; i++)
            if (buckets[i] > found.count) found.count = buckets[i];
        if (found.count)
            while (!(chains[found.count++ - gnu_hash[1]] & 1)) {}
    }
    return found;
}

static int is_function(const Elf64_Sym *symbol) {
    return symbol->st_shndx != SHN_UNDEF && ELF64_ST_TYPE(symbol->st_info) == STT_FUNC;
}

// Return where the function is now that was at this address of the old vdso: 0 if none was, and 1 if it is gone.
static uint64_t moved(const struct library *old, const struct library *new, uint64_t address) {
    uint64_t found = 0;
    for (uint32_t from = 0; from < old->count; from++) {
        const Elf64_Sym *symbol = old->symbols + from;
        if (!is_function(symbol) || old->base + symbol->st_value != address) continue;
        found = found ? found : 1;
        for (uint32_t to = 0; to < new->count && found == 1; to++)  // one of its names is enough
            if (is_function(new->symbols + to) &&
                equal(old->strings + symbol->st_name, new->strings + new->symbols[to].st_name))
                found = new->base + new->symbols[to].st_value;
    }
    return found;
}

// Change the symbols of the old vdso to those of the new one. libc looks functions up there when a library calls them
// for the first time. Those that are gone are not found, and libc then calls the kernel.
static void redirect(const struct library *old, const struct library *new) {
    for (uint32_t i = 0; i < old->count; i++) {
        Elf64_Sym *symbol = (Elf64_Sym *)old->symbols + i;
        if (!is_function(symbol)) continue;
        symbol->st_shndx = SHN_UNDEF;
        for (uint32_t to = 0; to < new->count && symbol->st_shndx == SHN_UNDEF; to++) {
            const Elf64_Sym *found = new->symbols + to;
            if (!is_function(found) || !equal(old->strings + symbol->st_name, new->strings + found->st_name)) continue;
            symbol->st_value = new->base + found->st_value - old->base;
            symbol->st_shndx = found->st_shndx;
        }
    }
}

// Point words to the vdso of this process.
static int patch(const struct snapshot *head, const struct patch *patches, uint64_t vdso) {
    struct library old = library_at(head->vdso), new = library_at(vdso);
    for (uint32_t i = 0; i < head->patches; i++) {
        uint64_t *word = (uint64_t *)patches[i].address;
        if (!patches[i].offset) {
            *word = vdso;  // in the list of what the kernel has told the process
            continue;
        }
        // Most words are no addresses of functions: they point to headers, or only look like such an address.
        uint64_t function = moved(&old, &new, head->vdso + patches[i].offset);
        if (function == 1) return -1;
        if (function) *word = function;
    }
    redirect(&old, &new);
    return 0;
}

static int map(const struct snapshot *head, const struct segment *segments, const char *names, int snapshot) {
    const char *opened = "";
    long file = -1;
    uint64_t room_end = 0;  // of the last mapping, in which the segments that follow it may lie
    int is_stack = 0;
    for (uint32_t i = 0; i < head->segments; i++) {
        const struct segment *segment = segments + i;
        long flags = MAP_PRIVATE, from = -1, protection = segment->protection, bytes = segment->end - segment->begin;
        if (segment->kind == GUARD) {
            if (call(SYS_madvise, segment->begin, bytes, GUARD_INSTALL, 0, 0, 0) &&
                call(SYS_mprotect, segment->begin, bytes, PROT_NONE, 0, 0, 0))  // a kernel without them
                return -1;
            continue;
        }
        if (segment->kind == FILE_PAGES) {
            if (!equal(names + segment->name, opened)) {
                if (file >= 0) call(SYS_close, file, 0, 0, 0, 0, 0);
                opened = names + segment->name;
                file = call(SYS_openat, AT_FDCWD, (long)opened, O_RDONLY | O_CLOEXEC, 0, 0, 0);  // as libc does: filters allow it
                if (file < 0) return -1;
            }
            from = file;
            flags |= MAP_FIXED_NOREPLACE;
            room_end = segment->end, is_stack = 0;
        } else if (segment->kind == SAVED && is_stack && segment->end <= room_end) {
            // The stack stays one mapping, from which libc takes its size.
            if (call(SYS_pread64, snapshot, segment->begin, bytes, segment->offset, 0, 0) != bytes) return -1;
            continue;
        } else if (segment->kind == SHARED) {
            flags = MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
        } else if (segment->kind == SAVED) {
            from = snapshot;
            flags |= segment->end <= room_end ? MAP_FIXED : MAP_FIXED_NOREPLACE;
            protection |= PROT_WRITE;  // for patches
        } else {
            if (segment->kind == ZEROS) {
                room_end = segment->end;
                is_stack = segment->begin <= head->registers.stack_pointer && head->registers.stack_pointer < segment->end;
            }
            flags |= MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
        }
        if (call(SYS_mmap, segment->begin, bytes, protection, flags, from, segment->offset) != (long)segment->begin)
            return -1;
        if (segment->kind == SHARED &&
            call(SYS_pread64, snapshot, segment->begin, bytes, segment->offset, 0, 0) != bytes)
            return -1;
        if (segment->kind == FORGOTTEN && call(SYS_madvise, segment->begin, bytes, MADV_WIPEONFORK, 0, 0, 0)) return -1;
    }
    if (file >= 0) call(SYS_close, file, 0, 0, 0, 0, 0);
    return 0;
}

static int protect(const struct snapshot *head, const struct segment *segments) {
    for (uint32_t i = 0; i < head->segments; i++) {
        const struct segment *segment = segments + i;
        if (segment->kind == SAVED && !(segment->protection & PROT_WRITE) &&
            call(SYS_mprotect, segment->begin, segment->end - segment->begin, segment->protection, 0, 0, 0))
            return -1;
    }
    return 0;
}

static int is_code(const struct snapshot *head, const struct segment *segments, uint64_t address) {
    for (uint32_t i = 0; i < head->segments; i++)
        if (segments[i].protection & PROT_EXEC && segments[i].begin <= address && address < segments[i].end) return 1;
    return 0;
}

// Take the signatures off the return addresses on the stack.
static int take_signatures_off(const struct snapshot *head, const struct segment *segments) {
    if (!head->signs_returns) return 0;
    uint64_t word = head->registers.stack_pointer & ~7ull, end = word;
    for (uint32_t i = 0; i < head->segments; i++)
        if (segments[i].begin <= word && end < segments[i].end && word < segments[i].end) end = segments[i].end;
    for (; word < end; word += 8) {
        uint64_t *at = (uint64_t *)word, address = unsigned_address(*at);
        if (address != *at && is_code(head, segments, address)) *at = address;
    }
    return stop_signing();
}

static const char *number(const char *text, int *value) {
    for (*value = 0; *text >= '0' && *text <= '9'; text++) *value = *value * 10 + *text - '0';
    return *text ? text + 1 : text;
}

// Returns the rest of a text that begins with another, or 0.
static const char *after(const char *text, const char *beginning) {
    while (*beginning)
        if (*text++ != *beginning++) return 0;
    return text;
}

static int prepare(struct snapshot *head, int snapshot, uint64_t vdso) {
    if (!vdso || call(SYS_pread64, snapshot, (long)head, sizeof *head, 0, 0, 0) != sizeof *head) return -1;
    uint64_t from = head->segments_at & ~(PAGE - 1), bytes = head->segments_at - from + head->tail_bytes;
    if (call(SYS_mmap, TAIL_AT, bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED_NOREPLACE, snapshot, from) != TAIL_AT)
        return -1;
    const char *tail = (const char *)TAIL_AT - from;
    const struct segment *segments = (const void *)(tail + head->segments_at);
    if (map(head, segments, tail + head->names_at, snapshot) ||
        patch(head, (const void *)(tail + head->patches_at), vdso) ||
        take_signatures_off(head, segments) || protect(head, segments))
        return -1;
    call(SYS_munmap, TAIL_AT, bytes, 0, 0, 0, 0);
    return 0;
}

// Execute the program in place of this one, and let it know why.
static void give_up(const char *program, char **arguments, char **variables) {
    static char why[] = "MEDUSA_RESUME=its memory cannot be mapped: there is no room for it, or a limit is too low";
    for (char **each = variables; *each; each++)
        if (after(*each, "MEDUSA_RESUME=")) *each = why;
    call(SYS_execve, (long)program, (long)arguments, (long)variables, 0, 0, 0);
    call(SYS_exit_group, 127, 0, 0, 0, 0, 0);
}

__attribute__((used)) static void run(long *stack) {
    static struct snapshot head;
    char **arguments = (char **)(stack + 1), **variables = arguments + stack[0] + 1, **each = variables, *text = 0;
    const char *program;
    int tries, snapshot, message;
    uint64_t vdso = 0;
    for (; *each; each++)
        if (after(*each, "MEDUSA_RESUME=")) text = (char *)after(*each, "MEDUSA_RESUME=");
    if (!text) call(SYS_exit_group, 127, 0, 0, 0, 0, 0);
    for (const Elf64_auxv_t *entry = (const void *)(each + 1); entry->a_type != AT_NULL; entry++)
        if (entry->a_type == AT_SYSINFO_EHDR) vdso = entry->a_un.a_val;
    program = number(number(number(text, &tries), &snapshot), &message);
    int status = prepare(&head, snapshot, vdso);
    if (status && tries > 1) {  // in one of 700 processes, the stack lies where the saved one was
        --*text;
        call(SYS_execve, (long)"/proc/self/exe", (long)arguments, (long)variables, 0, 0, 0);
    }
    call(SYS_close, snapshot, 0, 0, 0, 0, 0);
    if (status) {
        call(SYS_close, message, 0, 0, 0, 0, 0);
        give_up(program, arguments, variables);
    }
    set_thread_pointer(head.thread_pointer);
    *(int *)head.thread_id = call(SYS_gettid, 0, 0, 0, 0, 0, 0);
    restore_registers(&head.registers, message);
}

__asm__(".globl _start\n" START);
