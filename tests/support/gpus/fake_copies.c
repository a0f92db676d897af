/* The part of a CUDA driver that copies from the host, in host memory. As on a GPU, a copy reads its source after the call, and
   only pinned memory can be its source. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 4096 };
enum { SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE = 400 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct { char *start; size_t size; } pinned[MOST];
static struct { uint64_t target; const void *source; size_t size; } copies[MOST]; /* in the order of the calls */
static int pinned_count, begun, done, held, handles, started;
static const char *failing = "";

static int fails(const char *name) { return strcmp(name, failing) ? SUCCESS : OUT_OF_MEMORY; }

static void *engine(void *unused)
{
    pthread_mutex_lock(&lock);
    for (;;) {
        while (held || done == begun)
            pthread_cond_wait(&changed, &lock);
        memcpy((void *)copies[done].target, copies[done].source, copies[done].size);
        done++;
        pthread_cond_broadcast(&changed);
    }
    return unused;
}

/* For tests. */
void fake_hold(int hold) { pthread_mutex_lock(&lock); held = hold; pthread_cond_broadcast(&changed); pthread_mutex_unlock(&lock); }
void fake_fail(const char *name) { failing = strdup(name); }
int fake_begun(void) { return begun; }
int fake_pinned(void) { return pinned_count; }
int fake_handles(void) { return handles; }
uint64_t fake_target(int number) { return copies[number].target; }
void fake_await(int count) /* until this many copies are done */
{
    pthread_mutex_lock(&lock);
    while (done < count)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

int cuGetErrorString(int error, const char **text) { *text = error == OUT_OF_MEMORY ? "out of memory" : "other"; return SUCCESS; }
int cuCtxGetCurrent(void **context) { *context = &lock; return SUCCESS; }
int cuCtxSetCurrent(void *context) { return context == &lock ? fails("cuCtxSetCurrent") : INVALID_HANDLE; }

static int created(void **handle)
{
    *handle = calloc(1, sizeof(int));
    __atomic_fetch_add(&handles, 1, __ATOMIC_SEQ_CST);
    return SUCCESS;
}
static int destroyed(void *handle) { free(handle); __atomic_fetch_sub(&handles, 1, __ATOMIC_SEQ_CST); return SUCCESS; }
int cuStreamCreate(void **stream, unsigned flags) { return flags == 1 ? created(stream) : INVALID_VALUE; }
int cuStreamDestroy_v2(void *stream) { return destroyed(stream); }
int cuEventCreate(void **event, unsigned flags) { return flags == 3 ? created(event) : INVALID_VALUE; }
int cuEventDestroy_v2(void *event) { return destroyed(event); }

int cuMemHostAlloc(void **memory, size_t size, unsigned flags)
{
    if (flags || fails("cuMemHostAlloc"))
        return flags ? INVALID_VALUE : OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    *memory = pinned[pinned_count].start = malloc(size);
    pinned[pinned_count++].size = size;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuMemFreeHost(void *memory)
{
    pthread_mutex_lock(&lock);
    int at = 0;
    while (at < pinned_count && pinned[at].start != memory)
        at++;
    int found = at < pinned_count;
    if (found) {
        memset(memory, 0xEE, pinned[at].size); /* what still reads it is found out */
        free(memory);
        pinned[at] = pinned[--pinned_count];
    }
    pthread_mutex_unlock(&lock);
    return found ? SUCCESS : INVALID_VALUE;
}

int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, void *stream)
{
    pthread_t thread;
    if (!stream || fails("cuMemcpyHtoDAsync_v2"))
        return stream ? OUT_OF_MEMORY : INVALID_HANDLE;
    pthread_mutex_lock(&lock);
    int inside = 0;
    for (int i = 0; i < pinned_count; i++)
        inside |= (char *)source >= pinned[i].start && (char *)source + size <= pinned[i].start + pinned[i].size;
    if (inside) {
        copies[begun].target = target, copies[begun].source = source, copies[begun++].size = size;
        if (!started++)
            pthread_create(&thread, NULL, engine, NULL);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return inside ? SUCCESS : INVALID_VALUE;
}

int cuEventRecord(void *event, void *stream)
{
    pthread_mutex_lock(&lock);
    *(int *)event = begun;
    pthread_mutex_unlock(&lock);
    return stream ? SUCCESS : INVALID_HANDLE;
}

int cuEventSynchronize(void *event)
{
    fake_await(*(int *)event);
    return fails("cuEventSynchronize");
}
