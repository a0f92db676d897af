#define _GNU_SOURCE
#include "parallel.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    MAX_WORKERS = 255,
    SPINS = 4000,       /* some 50 to 150 µs: longer than what lies between two products of a decode step */
    CLOSED = 1 << 30,   /* a bit of the gate: no worker may enter */
};

/* glibc 2.32 and 2.34 have newer versions of these functions. A library linked with them would not load on older systems. */
#ifdef __GLIBC__
#ifdef __aarch64__
#define FIRST_VERSION "GLIBC_2.17"
#else
#define FIRST_VERSION "GLIBC_2.2.5"
#endif
__asm__(".symver pthread_create, pthread_create@" FIRST_VERSION);
__asm__(".symver pthread_detach, pthread_detach@" FIRST_VERSION);
__asm__(".symver pthread_sigmask, pthread_sigmask@" FIRST_VERSION);
#endif

int medusa_instruction_set, medusa_has_bf16_dots, medusa_has_byte_dots;

static struct {
    atomic_flag taken;           /* one job at a time: a caller that finds it taken works alone */
    atomic_uint generation;      /* counts jobs; idle workers wait on it */
    atomic_int sleepers;
    atomic_int gate;             /* how many workers are at the job, and CLOSED */
    work_fn work;                /* from here to `helpers`: valid while the gate is open or a worker is inside */
    void *argument;
    int helpers;
    int workers; /* threads that were started */
} pool = {.taken = ATOMIC_FLAG_INIT, .gate = CLOSED};

static inline void relax(void)
{
#ifdef __aarch64__
    __asm__ volatile("isb" ::: "memory"); /* about as long as x86's pause; yield does nothing on most cores */
#else
    __builtin_ia32_pause();
#endif
}

static void *idle(void *argument)
{
    const int number = (int)(intptr_t)argument;
    unsigned seen = 0;
    for (;;) {
        unsigned now = atomic_load(&pool.generation);
        for (int spin = 0; now == seen && spin < SPINS; spin++) {
            relax();
            now = atomic_load(&pool.generation);
        }
        if (now == seen) {
            atomic_fetch_add(&pool.sleepers, 1);
            syscall(SYS_futex, &pool.generation, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
            atomic_fetch_sub(&pool.sleepers, 1);
            continue;
        }
        seen = now;
        int inside = atomic_load(&pool.gate);
        while (!(inside & CLOSED) && !atomic_compare_exchange_weak(&pool.gate, &inside, inside + 1))
            ;
        if (inside & CLOSED)
            continue;
        if (number <= pool.helpers)
            pool.work(pool.argument, number);
        atomic_fetch_sub(&pool.gate, 1);
    }
    return NULL;
}

/* The parent's threads are not in the child. They may have been at work. */
static void forget_workers(void)
{
    pool.workers = 0;
    pool.sleepers = 0;
    pool.gate = CLOSED;
    atomic_flag_clear(&pool.taken);
}

static void start_workers(int wanted)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals belong to the interpreter's threads */
    while (pool.workers < wanted && pool.workers < MAX_WORKERS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, idle, (void *)(intptr_t)(pool.workers + 1)))
            break; /* a limit on threads: go on with the ones that have started */
        pthread_detach(thread);
        pool.workers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void medusa_spread(work_fn work, void *argument, int threads)
{
    if (threads <= 1 || atomic_flag_test_and_set(&pool.taken)) {
        work(argument, 0);
        return;
    }
    if (pool.workers < threads - 1)
        start_workers(threads - 1);
    pool.work = work;
    pool.argument = argument;
    pool.helpers = threads - 1;
    atomic_store(&pool.gate, 0);
    atomic_fetch_add(&pool.generation, 1);
    if (atomic_load(&pool.sleepers))
        syscall(SYS_futex, &pool.generation, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    work(argument, 0);
    atomic_fetch_or(&pool.gate, CLOSED);
    for (int spin = 0; atomic_load(&pool.gate) != CLOSED; spin++)
        if (spin < SPINS)
            relax();
        else
            sched_yield(); /* a worker inside may need this very core */
    atomic_flag_clear(&pool.taken);
}

/* The number of this library's interface: INTERFACE in build.py. */
int medusa_interface(void)
{
    return MEDUSA_INTERFACE;
}

/* Call this once, before all others. `instruction_set` are the bits of this CPU's vectors: 512 (AVX-512F), 256 (AVX2) or 128
 * (NEON). The others say whether it has dot products of bf16, and, with NEON, of bytes. */
void medusa_configure(int instruction_set, int has_bf16_dots, int has_byte_dots)
{
    if (!medusa_instruction_set)
        pthread_atfork(NULL, NULL, forget_workers);
    medusa_instruction_set = instruction_set;
    medusa_has_bf16_dots = instruction_set != 256 && has_bf16_dots;
    medusa_has_byte_dots = has_byte_dots;
}
