// What a snapshot needs to know about aarch64: registers, system calls, and where programs lie in memory.
#pragma once
#include <asm/hwcap.h>
#include <stdint.h>
#include <sys/auxv.h>
#include <sys/syscall.h>

#define TAIL_AT 0xd10000000000  // above the program medusa-resume (build.py), below libraries

// Assembly knows the offsets.
struct registers {
    uint64_t x19_to_x30[12], stack_pointer, d8_to_d15[8], fpcr;
};

#define SAVE_REGISTERS            \
    "save_registers:\n"           \
    "stp x19, x20, [x0]\n"        \
    "stp x21, x22, [x0, 16]\n"    \
    "stp x23, x24, [x0, 32]\n"    \
    "stp x25, x26, [x0, 48]\n"    \
    "stp x27, x28, [x0, 64]\n"    \
    "stp x29, x30, [x0, 80]\n"    \
    "mov x9, sp\n"                \
    "str x9, [x0, 96]\n"          \
    "stp d8, d9, [x0, 104]\n"     \
    "stp d10, d11, [x0, 120]\n"   \
    "stp d12, d13, [x0, 136]\n"   \
    "stp d14, d15, [x0, 152]\n"   \
    "mrs x9, fpcr\n"              \
    "str x9, [x0, 168]\n"         \
    "mov w0, 0\n"                 \
    "ret\n"

#define START                     \
    "_start:\n"                   \
    "mov x29, 0\n"                \
    "mov x30, 0\n"                \
    "mov x0, sp\n"                \
    "bl run\n"                    \
    "brk 0\n"

static inline long call(long number, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c,
                  x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}

static inline uint64_t thread_pointer(void) {
    uint64_t value;
    __asm__("mrs %0, tpidr_el0" : "=r"(value));
    return value;
}

static inline void set_thread_pointer(uint64_t value) { __asm__ volatile("msr tpidr_el0, %0" : : "r"(value) : "memory"); }

// save_registers returns once more, with this result.
static inline void restore_registers(const struct registers *saved, int result) {
    register const struct registers *x1 __asm__("x1") = saved;
    register long x0 __asm__("x0") = result;
    __asm__ volatile("ldp x19, x20, [x1]\n"
                     "ldp x21, x22, [x1, 16]\n"
                     "ldp x23, x24, [x1, 32]\n"
                     "ldp x25, x26, [x1, 48]\n"
                     "ldp x27, x28, [x1, 64]\n"
                     "ldp x29, x30, [x1, 80]\n"
                     "ldr x9, [x1, 96]\n"
                     "mov sp, x9\n"
                     "ldp d8, d9, [x1, 104]\n"
                     "ldp d10, d11, [x1, 120]\n"
                     "ldp d12, d13, [x1, 136]\n"
                     "ldp d14, d15, [x1, 152]\n"
                     "ldr x9, [x1, 168]\n"
                     "msr fpcr, x9\n"
                     "ret"
                     :
                     : "r"(x0), "r"(x1)
                     : "memory");
}

// Processors with pointer authentication sign return addresses on the stack with keys that each process has of its own.
// A process that is continued cannot get the old ones: it takes the signatures off, and does without.
#define ALL_KEYS 15  // PR_PAC_APIAKEY, APIBKEY, APDAKEY and APDBKEY
#define SET_ENABLED_KEYS 60  // PR_PAC_SET_ENABLED_KEYS, since Linux 5.13
#define GET_ENABLED_KEYS 61

// Returns 1 if they are signed, 0 if not, and -1 if this kernel cannot switch that off.
static inline int signs_returns(void) {
    if (!(getauxval(AT_HWCAP) & HWCAP_PACA)) return 0;
    return call(SYS_prctl, GET_ENABLED_KEYS, 0, 0, 0, 0, 0) < 0 ? -1 : 1;
}

static inline int stop_signing(void) {
    return call(SYS_prctl, SET_ENABLED_KEYS, ALL_KEYS, 0, 0, 0, 0) ? -1 : 0;
}

static inline uint64_t unsigned_address(uint64_t address) {
    register uint64_t x30 __asm__("x30") = address;
    __asm__("hint 7" : "+r"(x30));  // xpaclri
    return x30;
}
