// What a snapshot needs to know about x86-64: registers, system calls, and where programs lie in memory.
#pragma once
#include <asm/prctl.h>
#include <stdint.h>
#include <sys/syscall.h>

#define TAIL_AT 0x610000000000  // above the program medusa-resume (build.py), below libraries

// Assembly knows the offsets.
struct registers {
    uint64_t rbx, rbp, r12, r13, r14, r15, stack_pointer, rip;
    uint32_t mxcsr, x87;
};

#define SAVE_REGISTERS            \
    "save_registers:\n"           \
    "mov %rbx, 0(%rdi)\n"         \
    "mov %rbp, 8(%rdi)\n"         \
    "mov %r12, 16(%rdi)\n"        \
    "mov %r13, 24(%rdi)\n"        \
    "mov %r14, 32(%rdi)\n"        \
    "mov %r15, 40(%rdi)\n"        \
    "lea 8(%rsp), %rax\n"         \
    "mov %rax, 48(%rdi)\n"        \
    "mov (%rsp), %rax\n"          \
    "mov %rax, 56(%rdi)\n"        \
    "stmxcsr 64(%rdi)\n"          \
    "fnstcw 68(%rdi)\n"           \
    "xor %eax, %eax\n"            \
    "ret\n"

#define START                     \
    "_start:\n"                   \
    "xor %ebp, %ebp\n"            \
    "mov %rsp, %rdi\n"            \
    "and $-16, %rsp\n"            \
    "call run\n"                  \
    "hlt\n"

static inline long call(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

static inline uint64_t thread_pointer(void) {
    uint64_t value;
    __asm__("mov %%fs:0, %0" : "=r"(value));  // the first word that it points to is the pointer itself
    return value;
}

static inline void set_thread_pointer(uint64_t value) { call(SYS_arch_prctl, ARCH_SET_FS, value, 0, 0, 0, 0); }

// save_registers returns once more, with this result.
static inline void restore_registers(const struct registers *saved, int result) {
    __asm__ volatile("ldmxcsr 64(%0)\n"
                     "fldcw 68(%0)\n"
                     "mov 0(%0), %%rbx\n"
                     "mov 8(%0), %%rbp\n"
                     "mov 16(%0), %%r12\n"
                     "mov 24(%0), %%r13\n"
                     "mov 32(%0), %%r14\n"
                     "mov 40(%0), %%r15\n"
                     "mov 48(%0), %%rsp\n"
                     "jmp *56(%0)"
                     :
                     : "D"(saved), "a"(result)
                     : "memory");
}

// Return addresses are not signed.
static inline int signs_returns(void) { return 0; }
static inline int stop_signing(void) { return 0; }
static inline uint64_t unsigned_address(uint64_t address) { return address; }
