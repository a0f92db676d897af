/* Copies host memory to a device through pinned memory (load/upload/staging.py), in several threads.
 *
 * In Python, threads would wait for the interpreter's lock after each part: beside a thread that computes in Python, for longer
 * than the part takes. A thread that calls medusa_staging_run stays here until medusa_staging_stop. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    PART_BYTES = 4 << 20, /* with 2 MiB the calls take too long beside the copies, with 16 MiB the processor's caches overflow */
    SLOTS = 2,            /* a thread fills one while the device reads the other */
    NON_BLOCKING = 1,     /* CU_STREAM_NON_BLOCKING */
    SLEEPING = 3,         /* CU_EVENT_BLOCKING_SYNC, so that waits leave the processor to others, and CU_EVENT_DISABLE_TIMING */
};

/* The driver's functions; all return a CUresult. */
struct driver {
    int (*set_context)(void *context);
    int (*create_stream)(void **stream, unsigned flags);
    int (*destroy_stream)(void *stream);
    int (*create_event)(void **event, unsigned flags);
    int (*destroy_event)(void *event);
    int (*allocate)(void **memory, size_t size, unsigned flags);
    int (*release)(void *memory);
    int (*copy)(uint64_t target, const void *source, size_t size, void *stream);
    int (*record)(void *event, void *stream);
    int (*wait)(void *event);
};

struct transfer {
    uint64_t target;
    const char *source;
    long size;
    long offset; /* of the source's bytes in the file */
    int file;    /* -1: they are in none */
    _Atomic long left;   /* bytes that are not on the device, as a failed part stays; once 0, this structure is not used any more */
    _Atomic int failure; /* the CUresult of a part that could not be copied, or 0 */
    long taken;          /* bytes that a thread copies or has copied */
    struct transfer *next;
};

struct queue {
    struct transfer *first, *last;
};

struct staging {
    struct driver driver;
    void *context;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct queue queues[2]; /* urgent transfers, and the others */
    int stopped;
};

struct part {
    struct transfer *transfer;
    long start, size;
};

struct slot {
    void *buffer, *event;
    struct part part; /* what the device reads from the buffer */
};

/* _INTERFACE in staging.py */
int medusa_staging_interface(void)
{
    return 2;
}

struct staging *medusa_staging_new(const struct driver *driver, void *context)
{
    struct staging *made = calloc(1, sizeof *made);
    if (!made)
        return NULL;
    made->driver = *driver;
    made->context = context;
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->changed, NULL);
    return made;
}

void medusa_staging_begin(struct staging *staging, struct transfer *transfer, int urgent)
{
    struct queue *queue = &staging->queues[!urgent];
    pthread_mutex_lock(&staging->lock);
    transfer->next = NULL;
    *(queue->first ? &queue->last->next : &queue->first) = transfer;
    queue->last = transfer;
    pthread_cond_broadcast(&staging->changed);
    pthread_mutex_unlock(&staging->lock);
}

void medusa_staging_stop(struct staging *staging)
{
    pthread_mutex_lock(&staging->lock);
    staging->stopped = 1;
    pthread_cond_broadcast(&staging->changed);
    pthread_mutex_unlock(&staging->lock);
}

/* When no thread runs any more. */
void medusa_staging_free(struct staging *staging)
{
    pthread_cond_destroy(&staging->changed);
    pthread_mutex_destroy(&staging->lock);
    free(staging);
}

/* Returns 0 if there is nothing to take: with `patient`, only once the threads are to stop. */
static int take(struct staging *staging, struct part *part, int patient)
{
    pthread_mutex_lock(&staging->lock);
    struct queue *queue = staging->queues;
    for (;;) {
        queue = &staging->queues[!staging->queues[0].first];
        if (queue->first || staging->stopped || !patient)
            break;
        pthread_cond_wait(&staging->changed, &staging->lock);
    }
    int found = queue->first && !staging->stopped;
    if (found) {
        struct transfer *transfer = queue->first;
        long left = transfer->size - transfer->taken;
        *part = (struct part){transfer, transfer->taken, left < PART_BYTES ? left : PART_BYTES};
        transfer->taken += part->size;
        if (transfer->taken == transfer->size)
            queue->first = transfer->next;
    }
    pthread_mutex_unlock(&staging->lock);
    return found;
}

/* A thread that copies pages which it has not touched stops at every sixteenth to map them. Reading them takes two thirds of the
 * processor's time. What cannot be read is copied. */
static void fill(const struct slot *slot)
{
    const struct transfer *transfer = slot->part.transfer;
    long done = 0, size = slot->part.size, start = slot->part.start;
    while (transfer->file >= 0 && done < size) {
        ssize_t count = pread(transfer->file, (char *)slot->buffer + done, size - done, transfer->offset + start + done);
        if (count > 0)
            done += count;
        else if (count == 0 || errno != EINTR)
            break;
    }
    memcpy((char *)slot->buffer + done, transfer->source + start + done, size - done);
}

static int begin(const struct driver *driver, struct slot *slot, void *stream)
{
    const struct transfer *transfer = slot->part.transfer;
    fill(slot);
    int result = driver->copy(transfer->target + slot->part.start, slot->buffer, slot->part.size, stream);
    return result ? result : driver->record(slot->event, stream);
}

static void fail(struct slot *slot, int result)
{
    if (result)
        atomic_store(&slot->part.transfer->failure, result);
}

static void finish(const struct driver *driver, struct slot *slot)
{
    struct transfer *transfer = slot->part.transfer;
    fail(slot, driver->wait(slot->event));
    if (!atomic_load(&transfer->failure))
        atomic_fetch_sub(&transfer->left, slot->part.size);
}

static void carry(struct staging *staging, struct slot *slots, void *stream)
{
    int oldest = 0, busy = 0;
    for (;;) {
        struct part part;
        int taken = take(staging, &part, !busy);
        if (taken) {
            struct slot *slot = &slots[(oldest + busy++) % SLOTS];
            slot->part = part;
            fail(slot, begin(&staging->driver, slot, stream));
        } else if (!busy) {
            return;
        }
        if (!taken || busy == SLOTS) {
            finish(&staging->driver, &slots[oldest]);
            oldest = (oldest + 1) % SLOTS;
            busy--;
        }
    }
}

/* Copies until medusa_staging_stop. Returns 0, or the CUresult for which this thread cannot copy. */
int medusa_staging_run(struct staging *staging)
{
    const struct driver *driver = &staging->driver;
    struct slot slots[SLOTS] = {0};
    void *stream = NULL;
    int result = driver->set_context(staging->context);
    if (!result)
        result = driver->create_stream(&stream, NON_BLOCKING);
    for (int i = 0; i < SLOTS && !result; i++) {
        result = driver->allocate(&slots[i].buffer, PART_BYTES, 0);
        if (!result)
            result = driver->create_event(&slots[i].event, SLEEPING);
    }
    if (!result)
        carry(staging, slots, stream);
    for (int i = 0; i < SLOTS; i++) {
        if (slots[i].event)
            driver->destroy_event(slots[i].event);
        if (slots[i].buffer)
            driver->release(slots[i].buffer);
    }
    if (stream)
        driver->destroy_stream(stream);
    return result;
}
