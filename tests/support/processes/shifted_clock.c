/* The wall clock of a process, shifted by the seconds in a file: what the process sees when the machine's clock is set.
 *
 * SHIFTED_CLOCK names the file, eight bytes that may change at any time. The monotonic clock stays as it is. The kernel
 * compares deadlines by the wall clock with its own, so they are shifted back. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t none;
static const volatile int64_t *shift_s = &none;

__attribute__((constructor)) static void map_shift(void) {
    const char *path = getenv("SHIFTED_CLOCK");
    int file = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *found = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED) shift_s = found;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    int failed = (int)syscall(SYS_clock_gettime, clock, found);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI))
        found->tv_sec += *shift_s;
    return failed;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found != NULL) *found = now.tv_sec;
    return now.tv_sec;
}

/* A deadline by the kernel's clock. One by the monotonic clock, of a machine that runs for less than 30 years, stays. */
static struct timespec by_kernel(const struct timespec *deadline) {
    struct timespec found = *deadline;
    if (found.tv_sec > 1000000000) found.tv_sec -= *shift_s;
    return found;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec until = by_kernel(deadline);
    if (real == NULL) {
#ifdef __x86_64__ /* dlsym finds the oldest version, which is for other condition variables */
        *(void **)&real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
#else
        *(void **)&real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
#endif
    }
    return real(condition, mutex, &until);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    static int (*real)(sem_t *, const struct timespec *);
    struct timespec until = by_kernel(deadline);
    if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, "sem_timedwait");
    return real(semaphore, &until);
}
